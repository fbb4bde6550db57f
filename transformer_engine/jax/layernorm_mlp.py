# SPDX-License-Identifier: Apache-2.0
"""A norm, two dense layers and the activation between them as a function."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from transformer_engine.jax import linear, planned
from transformer_engine.jax.activation import ActivationPlan, activation_plan
from transformer_engine.jax.cpp_extensions.collective import (
    CollectiveOpSet,
    noop_collective_op_set,
    refuse_collectives,
)
from transformer_engine.jax.definitions import activations, chosen
from transformer_engine.jax.dense import Axes
from transformer_engine.jax.layernorm import NormPlan, norm_backward, norm_forward, norm_plan
from transformer_engine.jax.quantize import QuantizerSet, noop_quantizer_set
from transformer_engine.jax.sharding import with_sharding_constraint_by_logical_axes as constrain


def layernorm_mlp(
    x: Array,
    gamma: Array,
    beta: Array | None,
    kernels: Sequence[Array],
    biases: Sequence[Array | None],
    norm_type: str,
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    transpose_batch_sequence: bool = False,
    norm_input_axes: Axes = None,
    dot_1_input_axes: Axes = None,
    dot_2_input_axes: Axes = None,
    kernel_1_axes: Axes = None,
    kernel_2_axes: Axes = None,
    ffn1_ckpt_name: str = "ffn1",
    ffn2_ckpt_name: str = "ffn2",
    activation_type: Sequence[str] = ("gelu",),
    activation_params: Mapping | activations.Limits | None = None,
    collective_op_sets: Sequence[CollectiveOpSet] = (noop_collective_op_set,) * 2,
    quantizer_sets: Sequence[QuantizerSet] = (noop_quantizer_set,) * 2,
) -> Array:
    """Normalize along the last dim, and go through a dense layer, an activation and another layer.

    Parameters
    ----------
    x : Array
        [.., hidden] in a float dtype.
    gamma, beta, norm_type, zero_centered_gamma, epsilon :
        Of the norm, as `layernorm` has them.
    kernels : pair of Array
        [hidden, functions of the activation, intermediate] and [intermediate, hidden].
    biases : pair of Array or None
        [functions, intermediate] and [hidden]; an empty sequence: none.
    transpose_batch_sequence : bool
        Whether the sequence comes before the batch; the result is the same.
    norm_input_axes, dot_1_input_axes, dot_2_input_axes, kernel_1_axes, kernel_2_axes :
        Names of dims, by which tensors are spread over a mesh.
    ffn1_ckpt_name, ffn2_ckpt_name : str
        Names of the results of the dense layers, for the policies of `jax.checkpoint`.
    activation_type, activation_params :
        As of `activation`.
    collective_op_sets : pair of CollectiveOpSet
        As of `dense`.
    quantizer_sets : pair of QuantizerSet
        As of `dense`; fp32 values of norm and activation are cast.

    Returns
    -------
    Array
        [.., hidden] in the dtype of `x`.
    """
    del transpose_batch_sequence
    refuse_collectives("layernorm_mlp", *collective_op_sets)
    (first, uses_1), (second, uses_2) = map(linear.plan_of_set, quantizer_sets)
    activation = activation_plan(activation_type, activation_params)
    if kernels[0].ndim != 3 or kernels[0].shape[1] != len(activation.kinds):
        raise ValueError(
            f"layernorm_mlp: kernels[0] is {kernels[0].shape}, and activation "
            f"{activation.kinds} needs [hidden, {len(activation.kinds)}, intermediate]"
        )
    biases = tuple(biases) or (None, None)
    if len(kernels) != 2 or len(biases) != 2:
        raise ValueError(f"layernorm_mlp: {len(kernels)} kernels and {len(biases)} biases of 2")
    columns, inner, outside = x.shape[-1:], kernels[0].shape[1:], kernels[1].shape[1:]
    linear.check_arrays(
        "layernorm_mlp", x, gamma=(gamma, columns), beta=(beta, columns),
        kernel_1=(kernels[0], (*columns, *inner)), bias_1=(biases[0], inner),
        kernel_2=(kernels[1], (*inner[1:], *outside)), bias_2=(biases[1], outside),
    )  # fmt: skip
    plan = _Plan(
        norm_plan(norm_type, zero_centered_gamma, epsilon, beta),
        activation,
        (first, second),
        (dot_1_input_axes, dot_2_input_axes),
        (ffn1_ckpt_name, ffn2_ckpt_name),
    )
    x = constrain(x, norm_input_axes)
    axes = kernel_1_axes, kernel_2_axes
    kernels = tuple(constrain(k, names) for k, names in zip(kernels, axes, strict=True))
    return _layernorm_mlp(plan, x, gamma, beta, kernels, biases, (uses_1, uses_2))


class _Plan(NamedTuple):
    norm: NormPlan
    activation: ActivationPlan
    linears: tuple[linear.LinearPlan, linear.LinearPlan]
    axes: tuple[Axes, Axes]
    names: tuple[str, str]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _layernorm_mlp(plan: _Plan, *args: Any) -> Array:
    return _forward(plan, *args, wanted=False)[0]


def _forward(plan: _Plan, *given: Any, wanted: bool = True) -> tuple[Array, Any]:
    x, gamma, beta, kernels, biases, uses = given
    layer = planned.Layer(plan.linears, plan.norm, plan.activation)
    if planned.runs(layer, x, gamma, *kernels):
        y, kept = planned.forward(layer, x, (gamma, beta), kernels, biases, uses, wanted=wanted)
        return checkpoint_name(y, plan.names[1]), kept
    values, norm = norm_forward(plan.norm, x, gamma, beta)
    operand = constrain(linear.operand_of(values, plan.linears[0], x.dtype), plan.axes[0])
    h, saved_1 = linear.linear_forward(operand, kernels[0], plan.linears[0], uses[0])
    h = checkpoint_name(
        linear.with_bias(h, biases[0], plan.linears[0].is_quantized, x.dtype), plan.names[0]
    )
    values = chosen("activate")(h, *plan.activation)
    operand = constrain(linear.operand_of(values, plan.linears[1], x.dtype), plan.axes[1])
    y, saved_2 = linear.linear_forward(operand, kernels[1], plan.linears[1], uses[1])
    y = checkpoint_name(
        linear.with_bias(y, biases[1], plan.linears[1].is_quantized, x.dtype), plan.names[1]
    )
    return y, (norm, h, (saved_1, saved_2), biases, uses)


def _backward(plan: _Plan, kept: Any, grad: Array) -> tuple:
    if isinstance(kept, planned.Kept):
        of = planned.backward(kept, grad)
        return of.x, *of.affine, of.kernels, of.biases, of.uses
    norm, h, saved, biases, uses = kept
    second = linear.linear_backward(saved[1], grad, plan.linears[1], uses[1])
    of_values = second.x.astype(h.dtype)
    of_h = chosen("activation_gradient")(of_values, h, *plan.activation)
    of_h = linear.operand_of(of_h, plan.linears[0], h.dtype)
    first = linear.linear_backward(saved[0], of_h, plan.linears[0], uses[0])
    of_x, of_gamma, of_beta = norm_backward(plan.norm, norm, first.x.astype(h.dtype))
    of_biases = linear.bias_gradient(of_h, biases[0]), linear.bias_gradient(grad, biases[1])
    of_kernels = first.kernel, second.kernel
    return of_x, of_gamma, of_beta, of_kernels, of_biases, (first.uses, second.uses)


_layernorm_mlp.defvjp(_forward, _backward)
