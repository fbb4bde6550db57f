# SPDX-License-Identifier: Apache-2.0
"""Casts as single operations."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from transformer_engine.jax import operator_calls
from transformer_engine.jax.activation import activation_plan, is_operator
from transformer_engine.jax.definitions import activations, chosen
from transformer_engine.jax.operator_calls import Into, Made
from transformer_engine.jax.quantize import (
    DelayedScaleQuantizer,
    NoScaleTensor,
    Quantizer,
    ScaledTensor,
    ScaledTensor2x,
    ScaledTensorFactory,
)
from transformer_engine.jax.quantize.quantizer import named


def into(quantizer: Quantizer | None, dtype: Any) -> Into:
    """What the values of an operator become that a quantizer, or none, is to have."""
    if quantizer is None:
        return Into(dtype)
    layout = quantizer.q_layout
    forms = layout.has_rowwise, layout.has_colwise
    scale = quantizer.usable_scale() if isinstance(quantizer, DelayedScaleQuantizer) else None
    return operator_calls.into(dtype, quantizer.cast, scale, forms)


def delivered(
    values: Array, quantizer: Quantizer | None, dtype: Any, flatten_axis: int = -1
) -> ScaledTensor | NoScaleTensor:
    """Fp32 values, cast, or rounded to a dtype."""
    if quantizer is None:
        return NoScaleTensor(values.astype(dtype))
    return quantizer.quantize(values, dq_dtype=dtype, flatten_axis=flatten_axis)


def made_tensor(
    made: Made, quantizer: Quantizer | None, dtype: Any, flatten_axis: int = -1
) -> ScaledTensor | NoScaleTensor:
    """What an operator made `into` a dtype or a cast, as `delivered`."""
    if made.wide is not None:
        return delivered(made.wide, quantizer, dtype, flatten_axis)
    quantizer.update(made.amax)
    forms = [
        named(ScaledTensorFactory.create_1x(
            *form, scaling_mode=quantizer.scaling_mode, dq_dtype=dtype, is_colwise=is_column,
            data_layout="T" if is_column else "N", flatten_axis=flatten_axis,
        ), quantizer)
        for form, is_column in ((made.row, False), (made.column, True))
        if form is not None
    ]  # fmt: skip
    return forms[0] if len(forms) == 1 else ScaledTensor2x(*forms)


def quantize(
    x: Array | NoScaleTensor, quantizer: Quantizer | None = None, flatten_axis: int = -1
) -> ScaledTensor | NoScaleTensor:
    """Cast a tensor; without a quantizer it stays in high precision.

    A quantizer of delayed scaling then has its next state. `flatten_axis` as of
    `Quantizer.quantize`.
    """
    data = x.data if isinstance(x, NoScaleTensor) else x
    if quantizer is None:
        return NoScaleTensor(data)
    return quantizer.quantize(data, flatten_axis=flatten_axis)


def quantize_dbias(
    dz: Array,
    quantizer: Quantizer | None = None,
    is_dbias: bool = True,
    flatten_axis: int = -1,
) -> tuple[ScaledTensor | NoScaleTensor, Array | None]:
    """Cast a gradient, and sum it over the dims before `flatten_axis`.

    Returns
    -------
    tuple
        The tensor, and the sum in the dtype of `dz`; None without `is_dbias`.
    """
    axis = flatten_axis % dz.ndim
    total = None
    if is_dbias:
        total = jnp.sum(dz.astype(jnp.float32), tuple(range(axis))).astype(dz.dtype)
    return quantize(dz, quantizer, flatten_axis), total


def quantize_dact_dbias(
    dz: Array,
    x: Array,
    activation_type: Sequence[str] = ("gelu",),
    is_dbias: bool = True,
    quantizer: Quantizer | None = None,
    act_params: Mapping | activations.Limits | None = None,
) -> tuple[ScaledTensor | NoScaleTensor, Array | None]:
    """Cast the gradient of an activation's input, and sum it over rows.

    Parameters
    ----------
    dz : Array
        [.., columns], gradient of the activation.
    x : Array
        [.., functions, columns], its input.
    activation_type, act_params :
        As of `transformer_engine.jax.activation.activation`.
    is_dbias : bool
        Whether to sum.
    quantizer : Quantizer, optional
        How to cast.

    Returns
    -------
    tuple
        [.., functions, columns], cast from fp32, in high precision in the dtype of `x`; and the sum
        [functions, columns] in that dtype, or None.
    """
    plan = activation_plan(activation_type, act_params)
    if is_operator(plan, x, dz):
        to = into(quantizer, x.dtype)
        made, total = operator_calls.activation_gradient(dz, x, *plan, to, is_dbias)
        return made_tensor(made, quantizer, x.dtype, x.ndim - 2), total
    values = chosen("activation_gradient")(dz, x, *plan)
    total = None
    if is_dbias:
        total = jnp.sum(values, tuple(range(x.ndim - 2))).astype(x.dtype)
    return delivered(values, quantizer, x.dtype, -2), total


def dequantize(x: ScaledTensor | NoScaleTensor, dq_dtype: Any = None) -> Array:
    """Return what a tensor stands for, in `dq_dtype` or in the dtype that it names."""
    values = x.dequantize()
    return values if dq_dtype is None else values.astype(dq_dtype)
