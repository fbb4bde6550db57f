# SPDX-License-Identifier: Apache-2.0
"""Scaled and masked softmax as a function."""

from enum import Enum
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

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
    hidden = None if mask is None else mask != 0
    if softmax_fusion_type is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED:
        queries, keys = logits.shape[-2:]
        hidden = jnp.arange(keys) > jnp.arange(queries)[:, None]
    return _softmax(scale_factor, logits, hidden)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(scale: float, logits: Array, hidden: Array | None) -> Array:
    return chosen("softmax")(logits, hidden, scale).astype(logits.dtype)


def _forward(scale: float, logits: Array, hidden: Array | None) -> tuple[Array, Array]:
    probabilities = _softmax(scale, logits, hidden)
    return probabilities, probabilities


def _backward(scale: float, probabilities: Array, grad: Array) -> tuple[Array, None]:
    made = chosen("softmax_gradient")(grad, probabilities, scale)
    return made.astype(probabilities.dtype), None


_softmax.defvjp(_forward, _backward)
