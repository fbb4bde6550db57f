# SPDX-License-Identifier: Apache-2.0
"""Activations as a function."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array

from transformer_engine.jax import linear
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


def _forward(plans: _Plans, x: Array, use: Any) -> tuple[Array, Any]:
    values = chosen("activate")(x, *plans[0])
    y, amax = linear.as_cast(values, plans[1], use, x.dtype)
    return y, (x, amax)


def _backward(plans: _Plans, kept: Any, grad: Array) -> tuple:
    x, amax = kept
    made = chosen("activation_gradient")(grad, x, *plans[0]).astype(x.dtype)
    return made, linear.gradient_of_use(amax, plans[1])


_activation.defvjp(_forward, _backward)
