# SPDX-License-Identifier: Apache-2.0
"""LayerNorm and RMSNorm as a function."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array

from transformer_engine.jax import linear, operator_calls
from transformer_engine.jax.definitions import chosen, norms
from transformer_engine.jax.quantize import Quantizer


class NormPlan(NamedTuple):
    """How a norm computes; static."""

    kind: str
    zero_centered: bool
    epsilon: float


def canonicalize_norm_type(norm_type: str) -> str:
    """Return "layernorm" or "rmsnorm"; ValueError for another name."""
    kind = norm_type.lower().strip()
    if kind not in norms.KINDS:
        raise ValueError(f"norm_type={norm_type!r}: it is one of {', '.join(norms.KINDS)}")
    return kind


def norm_plan(norm_type: str, zero_centered: bool, epsilon: float, beta: Array | None) -> NormPlan:
    """Make the plan of a norm; ValueError for an RMSNorm with a beta."""
    kind = canonicalize_norm_type(norm_type)
    if kind == "rmsnorm" and beta is not None:
        raise ValueError("an RMSNorm has no beta: pass None")
    return NormPlan(kind, zero_centered, epsilon)


class NormSaved(NamedTuple):
    """What the backward of a norm needs of its forward."""

    x: Array
    gamma: Array
    beta: Array | None
    statistics: tuple[Array | None, Array]  # mean and rsigma of rows, fp32


def norm_forward(
    plan: NormPlan, x: Array, gamma: Array, beta: Array | None
) -> tuple[Array, NormSaved]:
    """Values of a norm along the last dim, fp32."""
    norm = chosen("norm")
    values, *statistics = norm(plan.kind, x, gamma, beta, plan.zero_centered, plan.epsilon)
    return values, NormSaved(x, gamma, beta, tuple(statistics))


def norm_backward(plan: NormPlan, saved: NormSaved, grad: Array) -> tuple:
    """Gradients of x, gamma and beta in their dtypes; None of what there is not."""
    x, gamma, beta, statistics = saved
    made = chosen("norm_gradient")(plan.kind, grad, x, gamma, plan.zero_centered, statistics)
    of_beta = None if beta is None else made[2].astype(beta.dtype)
    return made[0].astype(x.dtype), made[1].astype(gamma.dtype), of_beta


def layernorm(
    x: Array,
    gamma: Array,
    beta: Array | None,
    norm_type: str,
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    quantizer: Quantizer | None = None,
) -> Array:
    """Normalize along the last dim.

    Parameters
    ----------
    x : Array
        [.., hidden] in a float dtype.
    gamma : Array
        [hidden].
    beta : Array, optional
        [hidden]; of a LayerNorm alone.
    norm_type : {"layernorm", "rmsnorm"}
        Which.
    zero_centered_gamma : bool
        Values are multiplied by 1 + gamma.
    epsilon : float
        Added to the variance.
    quantizer : Quantizer, optional
        The result is what its cast stands for; gradients pass the cast as they are.

    Returns
    -------
    Array
        [.., hidden] in the dtype of `x`.
    """
    operand, use = linear.plan_of(quantizer)
    plan = norm_plan(norm_type, zero_centered_gamma, epsilon, beta)
    return _layernorm((plan, operand), x, gamma, beta, use)


_Plans = tuple[NormPlan, linear.OperandPlan]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layernorm(plans: _Plans, x: Array, gamma: Array, beta: Array | None, use: Any) -> Array:
    return _forward(plans, x, gamma, beta, use)[0]


@partial(jax.tree_util.register_dataclass, data_fields=("saved", "amax"), meta_fields=("called",))
@dataclass
class _Kept:
    """What the backward needs; `called`: the operators ran, whose backward it then is."""

    saved: NormSaved
    amax: Array | None
    called: bool


def _forward(
    plans: _Plans, x: Array, gamma: Array, beta: Array | None, use: Any
) -> tuple[Array, _Kept]:
    plan, operand = plans
    if called := operator_calls.are_norms_on(x, gamma, beta):
        made, statistics = operator_calls.norm(plan, x, gamma, beta, linear.into(operand, use, x))
        saved = NormSaved(x, gamma, beta, statistics)
        y, amax = linear.as_made(made, operand, use, x.dtype)
    else:
        values, saved = norm_forward(plan, x, gamma, beta)
        y, amax = linear.as_cast(values, operand, use, x.dtype)
    return y, _Kept(saved, amax, called)


def _backward(plans: _Plans, kept: _Kept, grad: Array) -> tuple:
    if kept.called:
        x, gamma, beta, statistics = kept.saved
        made = operator_calls.norm_gradient(plans[0], grad, x, gamma, statistics)
        made = (*made[:2], None if beta is None else made[2])
    else:
        made = norm_backward(plans[0], kept.saved, grad)
    return *made, linear.gradient_of_use(kept.amax, plans[1])


_layernorm.defvjp(_forward, _backward)
