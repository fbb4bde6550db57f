# SPDX-License-Identifier: Apache-2.0
"""A norm and the dense layer behind it as a function."""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array

from transformer_engine.jax import linear, planned
from transformer_engine.jax.dense import Axes
from transformer_engine.jax.layernorm import NormPlan, norm_backward, norm_forward, norm_plan
from transformer_engine.jax.quantize import QuantizerSet, noop_quantizer_set
from transformer_engine.jax.sharding import with_sharding_constraint_by_logical_axes as constrain


def layernorm_dense(
    x: Array,
    kernel: Array,
    gamma: Array,
    beta: Array | None,
    bias: Array | None = None,
    norm_type: str = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    transpose_batch_sequence: bool = False,
    layernorm_input_axes: Axes = None,
    dot_input_axes: Axes = None,
    kernel_axes: Axes = None,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> Array:
    """Normalize along the last dim, multiply by ``kernel``, and add a bias.

    Parameters
    ----------
    x : Array
        [.., hidden] in a float dtype.
    kernel : Array
        [hidden, ..].
    gamma, beta, norm_type, zero_centered_gamma, epsilon :
        Of the norm, as `layernorm` has them.
    bias : Array, optional
        Of the shape of the kernel's other dims.
    transpose_batch_sequence : bool
        Whether the sequence comes before the batch; the result is the same.
    layernorm_input_axes, dot_input_axes, kernel_axes : tuple of str, optional
        Names of dims, by which tensors are spread over a mesh.
    quantizer_set : QuantizerSet
        As of `dense`; the norm's fp32 values are cast.

    Returns
    -------
    Array
        [.., other dims of kernel..] in the dtype of `x`.
    """
    del transpose_batch_sequence
    norm = norm_plan(norm_type, zero_centered_gamma, epsilon, beta)
    own, uses = linear.plan_of_set(quantizer_set)
    columns, outside = x.shape[-1:], kernel.shape[1:]
    linear.check_arrays(
        "layernorm_dense", x, gamma=(gamma, columns), beta=(beta, columns),
        kernel=(kernel, (*columns, *outside)), bias=(bias, outside),
    )  # fmt: skip
    x, kernel = constrain(x, layernorm_input_axes), constrain(kernel, kernel_axes)
    return _layernorm_dense(_Plan(norm, own, dot_input_axes), x, kernel, gamma, beta, bias, uses)


class _Plan(NamedTuple):
    norm: NormPlan
    linear: linear.LinearPlan
    axes: Axes  # of what the norm gives


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layernorm_dense(plan: _Plan, *args: Any) -> Array:
    return _forward(plan, *args, wanted=False)[0]


def _forward(plan: _Plan, *given: Any, wanted: bool = True) -> tuple[Array, Any]:
    x, kernel, gamma, beta, bias, uses = given
    layer = planned.Layer((plan.linear,), plan.norm)
    if planned.runs(layer, x, kernel, gamma):
        of_one = ((a,) for a in (kernel, bias, uses))
        return planned.forward(layer, x, (gamma, beta), *of_one, wanted=wanted)
    values, norm = norm_forward(plan.norm, x, gamma, beta)
    operand = constrain(linear.operand_of(values, plan.linear, x.dtype), plan.axes)
    y, saved = linear.linear_forward(operand, kernel, plan.linear, uses)
    return linear.with_bias(y, bias, plan.linear.is_quantized, x.dtype), (norm, saved, bias, uses)


def _backward(plan: _Plan, kept: Any, grad: Array) -> tuple:
    if isinstance(kept, planned.Kept):
        of = planned.backward(kept, grad)
        return of.x, *of.kernels, *of.affine, *of.biases, *of.uses
    norm, saved, bias, uses = kept
    made = linear.linear_backward(saved, grad, plan.linear, uses)
    of_x, of_gamma, of_beta = norm_backward(plan.norm, norm, made.x.astype(norm.x.dtype))
    return of_x, made.kernel, of_gamma, of_beta, linear.bias_gradient(grad, bias), made.uses


_layernorm_dense.defvjp(_forward, _backward)
