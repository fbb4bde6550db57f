# SPDX-License-Identifier: Apache-2.0
"""Dense layers as a function."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_engine.common import absent
from transformer_engine.jax import linear, planned
from transformer_engine.jax.cpp_extensions.collective import (
    CollectiveOpSet,
    noop_collective_op_set,
    refuse_collectives,
)
from transformer_engine.jax.quantize import QuantizerSet, noop_quantizer_set
from transformer_engine.jax.sharding import with_sharding_constraint_by_logical_axes as constrain

Axes = tuple[str | None, ...] | None
"""Names of the dims of a tensor."""

__getattr__, __dir__ = absent.attach(globals())


def dense(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (0,)),
    transpose_batch_sequence: bool = False,
    input_axes: Axes = None,
    kernel_axes: Axes = None,
    output_axes: Axes = None,
    collective_op_set: CollectiveOpSet = noop_collective_op_set,
    quantizer_set: QuantizerSet = noop_quantizer_set,
) -> Array:
    """Multiply ``x`` by ``kernel``, and add a bias.

    Parameters
    ----------
    x : Array
        In a float dtype.
    kernel : Array
        In a float dtype.
    bias : Array, optional
        Of the shape of the kernel's dims that are not summed over.
    contracting_dims : pair of sequences
        Dims of `x` and of `kernel` that are summed over.
    transpose_batch_sequence : bool
        Whether the sequence comes before the batch in `x`; the result is the same.
    input_axes, kernel_axes, output_axes : tuple of str, optional
        Names of dims, by which tensors are spread over a mesh.
    collective_op_set : CollectiveOpSet
        Collectives that overlap the product: NotImplementedError for any.
    quantizer_set : QuantizerSet
        How operands are cast. Differentiating with respect to it gives the next state of delayed
        scaling in place of a gradient.

    Returns
    -------
    Array
        [other dims of x.., other dims of kernel..] in the dtype of `x`.
    """
    del transpose_batch_sequence
    refuse_collectives("dense", collective_op_set)
    x = constrain(x, input_axes)
    kernel = constrain(kernel, kernel_axes)
    of_x, of_kernel = (
        tuple(dim % a.ndim for dim in dims)
        for a, dims in zip((x, kernel), contracting_dims, strict=True)
    )
    depth = len(of_x)
    x = jnp.moveaxis(x, of_x, range(x.ndim - depth, x.ndim))
    kernel = jnp.moveaxis(kernel, of_kernel, range(depth))
    if x.shape[x.ndim - depth :] != kernel.shape[:depth]:
        raise ValueError(
            f"dense: x sums over {x.shape[x.ndim - depth :]}, kernel over {kernel.shape[:depth]}"
        )
    linear.check_arrays(
        "dense", x, kernel=(kernel, kernel.shape), bias=(bias, kernel.shape[depth:])
    )
    plan, uses = linear.plan_of_set(quantizer_set)
    return constrain(_dense(_Plan(plan, depth), x, kernel, bias, uses), output_axes)


class _Plan(NamedTuple):
    linear: linear.LinearPlan
    depth: int


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(plan: _Plan, x: Array, kernel: Array, bias: Array | None, uses: linear.Uses) -> Array:
    return _forward(plan, x, kernel, bias, uses, wanted=False)[0]


def _forward(plan: _Plan, *given: Any, wanted: bool = True) -> tuple[Array, Any]:
    x, kernel, bias, uses = given
    layer = planned.Layer((plan.linear,))
    if planned.runs(layer, x, kernel):
        of_one = ((a,) for a in (kernel, bias, uses))
        return planned.forward(layer, x, (None, None), *of_one, plan.depth, wanted=wanted)
    y, saved = linear.linear_forward(x, kernel, plan.linear, uses, plan.depth)
    return linear.with_bias(y, bias, plan.linear.is_quantized, x.dtype), (saved, bias, uses)


def _backward(plan: _Plan, kept: Any, grad: Array) -> tuple:
    if isinstance(kept, planned.Kept):
        of = planned.backward(kept, grad)
        return of.x, *of.kernels, *of.biases, *of.uses
    saved, bias, uses = kept
    made = linear.linear_backward(saved, grad, plan.linear, uses, plan.depth)
    of_x = made.x.astype(saved.dtypes[0].dtype)
    return of_x, made.kernel, linear.bias_gradient(grad, bias), made.uses


_dense.defvjp(_forward, _backward)
