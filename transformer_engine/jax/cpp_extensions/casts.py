# SPDX-License-Identifier: Apache-2.0
"""Casts as single operations."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from transformer_engine.jax.activation import activation_plan
from transformer_engine.jax.definitions import activations, chosen
from transformer_engine.jax.quantize import NoScaleTensor, Quantizer, ScaledTensor


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
    values = chosen("activation_gradient")(dz, x, *plan)
    total = None
    if is_dbias:
        total = jnp.sum(values, tuple(range(x.ndim - 2))).astype(x.dtype)
    if quantizer is None:
        return NoScaleTensor(values.astype(x.dtype)), total
    return quantizer.quantize(values, dq_dtype=x.dtype, flatten_axis=-2), total


def dequantize(x: ScaledTensor | NoScaleTensor, dq_dtype: Any = None) -> Array:
    """Return what a tensor stands for, in `dq_dtype` or in the dtype that it names."""
    values = x.dequantize()
    return values if dq_dtype is None else values.astype(dq_dtype)
