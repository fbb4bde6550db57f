# SPDX-License-Identifier: Apache-2.0
"""Activations as a function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array

from transformer_engine.jax import linear, operator_calls
from transformer_engine.jax.definitions import activations, chosen
from transformer_engine.jax.quantize import Quantizer


class ActivationPlan(NamedTuple):
    """Which activation; static."""

    kinds: tuple[str, ...]
    numbers: activations.Limits


def activation_plan(
    activation_type: Sequence[str], act_params: Mapping | activations.Limits | None
) -> ActivationPlan:
    """Make the plan of an activation; ValueError for names that are none.

    The names of a gated activation may come in either order: that of the parts of its input.
    """
    kinds = tuple(activation_type)
    if kinds not in activations.ACTIVATIONS and kinds[::-1] not in activations.ACTIVATIONS:
        known = ", ".join(map(str, sorted(activations.ACTIVATIONS)))
        raise ValueError(f"activation_type={kinds}: it is one of {known}")
    if isinstance(act_params, Mapping):
        act_params = activations.Limits(**act_params)
    return ActivationPlan(kinds, act_params or activations.Limits())


def activation(
    x: Array,
    activation_type: Sequence[str],
    quantizer: Quantizer | None = None,
    act_params: Mapping | activations.Limits | None = None,
) -> Array:
    """Apply an activation.

    Parameters
    ----------
    x : Array
        [.., functions, columns] in a float dtype; the results of the functions are multiplied.
    activation_type : sequence of str
        Names of functions: gelu (by tanh), silu, relu, quick_gelu or squared_relu, alone or with
        linear; sigmoid with linear; clamped_silu with clamped_linear.
    quantizer : Quantizer, optional
        The result is what its cast stands for; gradients pass the cast as they are.
    act_params : mapping, optional
        limit, alpha and glu_linear_offset of clamped_silu with clamped_linear.

    Returns
    -------
    Array
        [.., columns] in the dtype of `x`.
    """
    plan = activation_plan(activation_type, act_params)
    if x.ndim < 2 or x.shape[-2] != len(plan.kinds):
        raise ValueError(
            f"activation: x is {x.shape}, and {plan.kinds} needs [.., {len(plan.kinds)}, columns]"
        )
    operand, use = linear.plan_of(quantizer)
    return _activation((plan, operand), x, use)


_Plans = tuple[ActivationPlan, linear.OperandPlan]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activation(plans: _Plans, x: Array, use: Any) -> Array:
    return _forward(plans, x, use)[0]


def is_operator(plan: ActivationPlan, *arrays: Array) -> bool:
    """Return whether an activation of such arrays is an operator of the C library."""
    return plan.kinds in operator_calls.ACTIVATIONS and operator_calls.run_on(*arrays)


@partial(jax.tree_util.register_dataclass, data_fields=("x", "amax"), meta_fields=("called",))
@dataclass
class _Kept:
    """What the backward needs; `called`: the operator ran, whose backward it then is."""

    x: Array
    amax: Array | None
    called: bool


def _forward(plans: _Plans, x: Array, use: Any) -> tuple[Array, _Kept]:
    plan, operand = plans
    if called := is_operator(plan, x):
        made = operator_calls.activate(x, *plan, linear.into(operand, use, x))
        y, amax = linear.as_made(made, operand, use, x.dtype)
    else:
        y, amax = linear.as_cast(chosen("activate")(x, *plan), operand, use, x.dtype)
    return y, _Kept(x, amax, called)


def _backward(plans: _Plans, kept: _Kept, grad: Array) -> tuple:
    x = kept.x
    if kept.called:
        to = operator_calls.Into(x.dtype)
        made = operator_calls.activation_gradient(grad, x, *plans[0], to)[0].wide
    else:
        made = chosen("activation_gradient")(grad, x, *plans[0]).astype(x.dtype)
    return made, linear.gradient_of_use(kept.amax, plans[1])


_activation.defvjp(_forward, _backward)
