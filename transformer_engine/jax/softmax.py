# SPDX-License-Identifier: Apache-2.0
"""Scaled and masked softmax as a function."""

from dataclasses import dataclass
from enum import Enum
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from transformer_engine.jax import operator_calls
from transformer_engine.jax.definitions import chosen


class SoftmaxFusionType(Enum):
    """What is hidden from a query."""

    SCALED = "scaled"  # nothing
    SCALED_MASKED = "scaled_masked"  # what a mask says
    SCALED_UPPER_TRIANG_MASKED = "scaled_upper_triang_masked"  # keys that come later


def softmax(
    logits: Array,
    mask: Array | None = None,
    scale_factor: float = 1.0,
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED,
) -> Array:
    """Softmax along the last dim.

    Parameters
    ----------
    logits : Array
        [.., queries, keys] in a float dtype.
    mask : Array, optional
        Of a shape that broadcasts to that of `logits`; not 0 is hidden. Of SCALED_MASKED alone.
    scale_factor : float
        Multiplies logits.
    softmax_fusion_type : SoftmaxFusionType
        What is hidden.

    Returns
    -------
    Array
        Probabilities in the dtype of `logits`; a query without keys has zeros.

    Raises
    ------
    ValueError
        A mask is there, or is not, against what the type says.
    """
    if (mask is not None) != (softmax_fusion_type is SoftmaxFusionType.SCALED_MASKED):
        raise ValueError(f"softmax: {softmax_fusion_type}, and mask is {type(mask).__name__}")
    causal = softmax_fusion_type is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED
    return _softmax((float(scale_factor), causal), logits, mask)


_Plan = tuple[float, bool]  # scale, and whether keys that come later are hidden


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(plan: _Plan, logits: Array, mask: Array | None) -> Array:
    return _forward(plan, logits, mask)[0]


@partial(jax.tree_util.register_dataclass, data_fields=("probabilities",), meta_fields=("called",))
@dataclass
class _Kept:
    """What the backward needs; `called`: the operator ran, whose backward it then is."""

    probabilities: Array
    called: bool


def _forward(plan: _Plan, logits: Array, mask: Array | None) -> tuple[Array, _Kept]:
    (scale, causal), queries = plan, logits.shape[-2:-1]
    if called := 2 <= logits.ndim <= 4 and operator_calls.run_on(logits):
        made = operator_calls.softmax(logits, mask, scale, causal)
    else:
        hidden = None if mask is None else mask != 0
        if causal:
            hidden = jnp.arange(logits.shape[-1]) > jnp.arange(*queries)[:, None]
        made = chosen("softmax")(logits, hidden, scale).astype(logits.dtype)
    return made, _Kept(made, called)


def _backward(plan: _Plan, kept: _Kept, grad: Array) -> tuple[Array, None]:
    if kept.called:
        return operator_calls.softmax_gradient(grad, kept.probabilities, plan[0]), None
    made = chosen("softmax_gradient")(grad, kept.probabilities, plan[0])
    return made.astype(kept.probabilities.dtype), None


_softmax.defvjp(_forward, _backward)
