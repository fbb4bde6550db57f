# SPDX-License-Identifier: Apache-2.0
"""Products, norms and activations as single operations."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from transformer_engine.jax import operator_calls
from transformer_engine.jax.activation import activation_plan, is_operator
from transformer_engine.jax.cpp_extensions.casts import (
    delivered,
    into,
    made_tensor,
    quantize_dact_dbias,
)
from transformer_engine.jax.definitions import activations, casts, chosen
from transformer_engine.jax.definitions.scaling_modes import ScalingMode
from transformer_engine.jax.layernorm import norm_plan
from transformer_engine.jax.linear import with_bias
from transformer_engine.jax.quantize import (
    NoScaleTensor,
    Quantizer,
    ScaledTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    TensorUsage,
)
from transformer_engine.jax.quantize.tensor import turned

Operand = Array | NoScaleTensor | ScaledTensor


def gemm(
    lhs: Operand,
    rhs: Operand,
    bias: Array | None = None,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (0,)),
    lhs_quantizer: Quantizer | None = None,
    rhs_quantizer: Quantizer | None = None,
) -> Array:
    """Multiply two tensors.

    Parameters
    ----------
    lhs, rhs : Array or tensor in low precision
        Of one in low precision the first or the last dims are summed over, up to or from its
        `flatten_axis`; it has the form for that.
    bias : Array, optional
        Of the shape of the other dims of `rhs`.
    contracting_dims : pair of sequences
        Dims of both that are summed over.
    lhs_quantizer, rhs_quantizer : Quantizer, optional
        Cast an operand in high precision first.

    Returns
    -------
    Array
        [other dims of lhs.., other dims of rhs..] in the dtype of `lhs`, or that which it is
        dequantized to.
    """
    operands = []
    pairs = ((lhs, lhs_quantizer), (rhs, rhs_quantizer))
    for (operand, quantizer), dims in zip(pairs, contracting_dims, strict=True):
        operands.append(_operand(operand, quantizer, dims))
    (a, mode_a, dtype), (b, mode_b, _) = operands
    product = chosen("gemm")(a, b, (mode_a, mode_b), len(contracting_dims[0]))
    quantized = any(mode is not ScalingMode.NO_SCALING for mode in (mode_a, mode_b))
    return with_bias(product, bias, quantized, dtype)


def _operand(
    operand: Operand, quantizer: Quantizer | None, dims: Sequence[int]
) -> tuple[Array | casts.Quantized, ScalingMode, Any]:
    """(what is multiplied, its mode, dtype of the product) with the dims of sums at the end."""
    ndim, count = operand.ndim, len(dims)
    dims = tuple(dim % ndim for dim in dims)
    is_first = dims == tuple(range(count))
    if isinstance(operand, NoScaleTensor):
        operand = operand.data
    if isinstance(operand, ScaledTensor1x | ScaledTensor2x):
        usage = TensorUsage.RHS if is_first else TensorUsage.LHS
        return _scaled_operand(operand.get_tensor(usage), dims, is_first)
    if quantizer is not None:
        axis = count if is_first else ndim - count
        made = quantizer.quantize(
            operand, is_rowwise=not is_first, is_colwise=is_first, flatten_axis=axis
        )
        return _scaled_operand(made, dims, is_first)
    last = range(ndim - count, ndim)
    return jnp.moveaxis(operand, dims, last), ScalingMode.NO_SCALING, operand.dtype


def _scaled_operand(
    tensor: ScaledTensor1x, dims: tuple[int, ...], is_first: bool
) -> tuple[casts.Quantized, ScalingMode, Any]:
    axis = tensor.flatten_axis
    if dims != (tuple(range(axis)) if is_first else tuple(range(axis, tensor.ndim))):
        raise ValueError(
            f"gemm: sums over dims {dims} of a tensor whose flatten_axis is {axis}: pass its first "
            f"{axis} or its last {tensor.ndim - axis} dims"
        )
    data, scale_inv = tensor.lines()
    if tensor.is_colwise != is_first:  # of one scale: the other form is its data turned
        data = turned(data, tensor.ndim - tensor.depth)
    return casts.Quantized(data, scale_inv), tensor.scaling_mode, tensor.dq_dtype


def act_lu(
    x: Array,
    activation_type: Sequence[str],
    quantizer: Quantizer | None = None,
    act_params: Mapping | activations.Limits | None = None,
) -> ScaledTensor | NoScaleTensor:
    """Apply an activation to x [.., functions, columns], and cast its fp32 values.

    Arguments as of `transformer_engine.jax.activation.activation`.
    """
    plan = activation_plan(activation_type, act_params)
    if is_operator(plan, x):
        made = operator_calls.activate(x, *plan, into(quantizer, x.dtype))
        return made_tensor(made, quantizer, x.dtype)
    return delivered(chosen("activate")(x, *plan), quantizer, x.dtype)


def dact_lu(
    dz: Array,
    x: Array,
    activation_type: Sequence[str],
    quantizer: Quantizer | None = None,
    act_params: Mapping | activations.Limits | None = None,
) -> ScaledTensor | NoScaleTensor:
    """Gradient of the input of an activation, x [.., functions, columns], by dz [.., columns]."""
    return quantize_dact_dbias(dz, x, activation_type, False, quantizer, act_params)[0]


def normalization_fwd(
    x: Array,
    gamma: Array,
    beta: Array | None,
    zero_centered_gamma: bool,
    epsilon: float,
    norm_type: str,
    quantizer: Quantizer | None = None,
) -> tuple[ScaledTensor | NoScaleTensor, Array | None, Array]:
    """Normalize along the last dim.

    Returns
    -------
    tuple
        The result; mean (None of an RMSNorm) and rsigma of rows, fp32 [..].
    """
    plan = norm_plan(norm_type, zero_centered_gamma, epsilon, beta)
    if operator_calls.are_norms_on(x, gamma, beta):
        made, statistics = operator_calls.norm(plan, x, gamma, beta, into(quantizer, x.dtype))
        return made_tensor(made, quantizer, x.dtype), *statistics
    values, mean, rsigma = chosen("norm")(plan.kind, x, gamma, beta, zero_centered_gamma, epsilon)
    return delivered(values, quantizer, x.dtype), mean, rsigma


def normalization_bwd(
    dz: Array,
    x: Array,
    mu: Array | None,
    rsigma: Array,
    gamma: Array,
    zero_centered_gamma: bool,
    epsilon: float,
    norm_type: str,
) -> tuple[Array, Array, Array | None]:
    """Gradients of x, gamma and beta (None of an RMSNorm) by that of the result."""
    plan = norm_plan(norm_type, zero_centered_gamma, epsilon, None)
    if operator_calls.are_norms_on(x, gamma, dz):
        return operator_calls.norm_gradient(plan, dz, x, gamma, (mu, rsigma))
    gradient = chosen("norm_gradient")
    made = gradient(plan.kind, dz, x, gamma, zero_centered_gamma, (mu, rsigma))
    of_beta = made[2].astype(gamma.dtype) if plan.kind == "layernorm" else None
    return made[0].astype(x.dtype), made[1].astype(gamma.dtype), of_beta


def layernorm_fwd(
    x: Array,
    gamma: Array,
    beta: Array,
    zero_centered_gamma: bool,
    epsilon: float,
    quantizer: Quantizer | None = None,
) -> tuple[ScaledTensor | NoScaleTensor, Array, Array]:
    """(result, mean, rsigma) of a LayerNorm; see `normalization_fwd`."""
    return normalization_fwd(x, gamma, beta, zero_centered_gamma, epsilon, "layernorm", quantizer)


def layernorm_bwd(
    dz: Array,
    x: Array,
    mu: Array,
    rsigma: Array,
    gamma: Array,
    zero_centered_gamma: bool,
    epsilon: float,
) -> tuple[Array, Array, Array]:
    """Gradients of x, gamma and beta of a LayerNorm."""
    return normalization_bwd(dz, x, mu, rsigma, gamma, zero_centered_gamma, epsilon, "layernorm")


def rmsnorm_fwd(
    x: Array,
    gamma: Array,
    zero_centered_gamma: bool,
    epsilon: float,
    quantizer: Quantizer | None = None,
) -> tuple[ScaledTensor | NoScaleTensor, Array]:
    """(result, rsigma) of an RMSNorm; see `normalization_fwd`."""
    made = normalization_fwd(x, gamma, None, zero_centered_gamma, epsilon, "rmsnorm", quantizer)
    return made[0], made[2]


def rmsnorm_bwd(
    dz: Array,
    x: Array,
    rsigma: Array,
    gamma: Array,
    zero_centered_gamma: bool,
    epsilon: float,
) -> tuple[Array, Array]:
    """Gradients of x and gamma of an RMSNorm."""
    kind = "rmsnorm"
    return normalization_bwd(dz, x, None, rsigma, gamma, zero_centered_gamma, epsilon, kind)[:2]


def is_softmax_kernel_available(*args: Any, **kwargs: Any) -> bool:
    """Return whether a softmax is an operator of the C library; of any sizes it is."""
    del args, kwargs
    return operator_calls.run_on()
