# SPDX-License-Identifier: Apache-2.0
"""Layers as plans of the C library: one custom call forward, one backward.

A layer is a norm, one or two dense layers and the activation between them, in this order. Its graph
is that of the PyTorch modules (`common.graphs`), with kernels that are [in, out]. Scales are
arguments of a call, and the amaxes that it has seen a result.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_engine import _core
from transformer_engine.common import config, graphs
from transformer_engine.common.operand_casts import OperandCast, Quantization, flags_of
from transformer_engine.common.plans import CallPlans, call_plans
from transformer_engine.jax import linear
from transformer_engine.jax.activation import ActivationPlan
from transformer_engine.jax.custom_calls import PlanResults, call_plan, code_of
from transformer_engine.jax.definitions.scaling_modes import Cast, ScalingMode
from transformer_engine.jax.layernorm import NormPlan

# ---- what runs as a plan -------------------------------------------------------------------------


class Layer(NamedTuple):
    """How a layer computes; static."""

    linears: tuple[linear.LinearPlan, ...]  # one, or two with the activation between them
    norm: NormPlan | None = None
    activation: ActivationPlan | None = None


_DTYPES = tuple(jnp.dtype(each) for each in (jnp.float32, jnp.float16, jnp.bfloat16))
_ACTIVATIONS = {
    ("gelu",): _core.ACTIVATION_GELU,
    ("gelu", "linear"): _core.ACTIVATION_GEGLU,
    ("quick_gelu",): _core.ACTIVATION_QGELU,
    ("quick_gelu", "linear"): _core.ACTIVATION_QGEGLU,
    ("relu",): _core.ACTIVATION_RELU,
    ("relu", "linear"): _core.ACTIVATION_REGLU,
    ("squared_relu",): _core.ACTIVATION_SRELU,
    ("squared_relu", "linear"): _core.ACTIVATION_SREGLU,
    ("silu",): _core.ACTIVATION_SILU,
    ("silu", "linear"): _core.ACTIVATION_SWIGLU,
    ("sigmoid", "linear"): _core.ACTIVATION_GLU,
    ("clamped_silu", "clamped_linear"): _core.ACTIVATION_CLAMPED_SWIGLU,
}
_NORMS = {"layernorm": _core.NORM_LAYERNORM, "rmsnorm": _core.NORM_RMSNORM}


def runs(layer: Layer, *arrays: Array) -> bool:
    """Return whether a layer runs as a plan; asked while a call is traced.

    What no plan computes is by definition (docs/jax.md): arrays of other dtypes than fp32, fp16 and
    bf16, and a gated activation whose linear part comes first.
    """
    if not config.TE_JAX_CUSTOM_CALLS.get():
        return False
    known = layer.activation is None or layer.activation.kinds in _ACTIVATIONS
    return known and all(array.dtype in _DTYPES for array in arrays)


# ---- casts ---------------------------------------------------------------------------------------

_RECIPES = {
    ScalingMode.DELAYED_TENSOR_SCALING: _core.RECIPE_DELAYED,
    ScalingMode.CURRENT_TENSOR_SCALING: _core.RECIPE_CURRENT,
    ScalingMode.BLOCK_1D_SCALING: _core.RECIPE_BLOCK,
    ScalingMode.BLOCK_2D_SCALING: _core.RECIPE_BLOCK,
    ScalingMode.ROW_SCALING: _core.RECIPE_ROW,
    ScalingMode.MXFP8_1D_SCALING: _core.RECIPE_MXFP8,
}
_BACKWARDS = {
    None: _core.BACKWARD_QUANTIZED,
    "high_precision": _core.BACKWARD_HIGH_PRECISION,
    "dequantized": _core.BACKWARD_DEQUANTIZED,
}


def _cast(cast: Cast | None) -> OperandCast:
    if cast is None:
        return OperandCast()
    options = flags_of(
        (
            (_core.CAST_POWER_2, cast.power_2),
            (_core.CAST_TILES_2D, cast.square or cast.mode is ScalingMode.BLOCK_2D_SCALING),
        )
    )
    # The margin of delayed scaling is that of its updates.
    margin = cast.margin if cast.mode is ScalingMode.MXFP8_1D_SCALING else 0
    dtype = code_of(cast.dtype)
    return OperandCast(_RECIPES[cast.mode], dtype, cast.epsilon, options, margin)


def _quantization(plan: linear.LinearPlan) -> Quantization:
    casts = [_cast(operand.cast) for operand in (plan.x, plan.kernel, plan.grad)]
    # As the recipes have it for PyTorch: the forward's product, where it scales its result once.
    fast = all(operand.mode.is_tensor_scaling() for operand in (plan.x, plan.kernel))
    return Quantization(*casts, _core.LINEAR_FAST_OUTPUT if fast else 0, _BACKWARDS[plan.backward])


# ---- plans ---------------------------------------------------------------------------------------


class _Facts(NamedTuple):
    """What the plans of a layer depend on."""

    layer: Layer
    dtype: int  # of input and output
    norm: int  # dtype of gamma and beta
    has_beta: bool
    kernels: tuple[tuple[int, int, int], ...]  # of each in, out, dtype
    biases: tuple[int | None, ...]  # dtypes


@functools.lru_cache(maxsize=256)
def _plans_of(facts: _Facts) -> CallPlans:
    layer, parts, wanted = facts.layer, [], _core.VALUE_PARAMETER | _core.VALUE_GRADIENT
    for i, (of_in, out, dtype) in enumerate(facts.kernels):
        flags = graphs.LinearFlags(
            node=_core.LINEAR_WEIGHT_TRANSPOSED,
            input=_core.VALUE_GRADIENT,
            weight=wanted,
            bias=0 if facts.biases[i] is None else wanted,
        )
        bias = facts.dtype if facts.biases[i] is None else facts.biases[i]
        dtypes = facts.dtype, dtype, bias, facts.dtype, dtype
        parts.append(
            graphs.LinearSpec(of_in, out, *dtypes, _quantization(layer.linears[i]), flags)
        )
    norm = activation = None
    if layer.norm is not None:
        kind, centered, epsilon = layer.norm
        beta, node = wanted * facts.has_beta, _core.NODE_ZERO_CENTERED * centered
        norm = graphs.Norm(_NORMS[kind], facts.norm, epsilon, wanted, beta, node)
    if layer.activation is not None:
        kinds, numbers = layer.activation
        activation = graphs.Activation(_ACTIVATIONS[kinds], *numbers)
    names = ("",) if len(parts) == 1 else ("fc1_", "fc2_")
    return call_plans(graphs.CallSpec(tuple(parts), norm, activation, names=names))


_FORWARD_SLOTS, _BACKWARD_SLOTS = 3, 2  # of a dense layer; the last one is that of what is returned
_DELAYED = ScalingMode.DELAYED_TENSOR_SCALING


def _scales(uses: Sequence[linear.Uses], backward: bool) -> list[Array]:
    """The scales of a direction, fp32 [n], and amaxes, fp32 [1, n]; by slots."""
    found = []
    for x, kernel, grad in uses:
        slots = (grad, None) if backward else (x, kernel, None)
        found += [jnp.ones(1, jnp.float32) if use is None else use.scale for use in slots]
    scales = jnp.concatenate(found)
    return [scales, jnp.zeros((1, scales.shape[0]), jnp.float32)]


def _state_of(links: Sequence, uses: Sequence, backward: bool) -> list[Array]:
    """What a plan is given of state."""
    if not links:
        return []
    known = dict(zip(("scale", "history"), _scales(uses, backward), strict=True))
    return [known[what] for what, _ in links]


def _amaxes(made: PlanResults, slots: int) -> Array | None:
    """The amaxes of a call [dense layers, slots]."""
    return made.states[-1].reshape(-1, slots) if made.states else None


# ---- calls ---------------------------------------------------------------------------------------


@partial(
    jax.tree_util.register_dataclass, data_fields=("saved", "uses", "amaxes"), meta_fields=("facts",)
)
@dataclass
class Kept:
    """What a backward needs of its forward."""

    facts: _Facts
    saved: tuple  # the packed tensor, where there is one, and others
    uses: tuple  # of each dense layer
    amaxes: Array | None  # [dense layers, slots], of inputs and weights


class Gradients(NamedTuple):
    """Gradients of a layer, each in the dtype of what it is of; None of what there is not."""

    x: Array
    gamma: Array | None
    beta: Array | None
    kernels: tuple[Array, ...]
    biases: tuple[Array | None, ...]
    uses: tuple[linear.Uses, ...]


def _facts_of(
    layer: Layer, x: Array, affine: Sequence, kernels: Sequence, biases: Sequence
) -> _Facts:
    gamma, beta = affine
    return _Facts(
        layer,
        code_of(x.dtype),
        code_of(x.dtype if gamma is None else gamma.dtype),
        beta is not None,
        tuple((*kernel.shape, code_of(kernel.dtype)) for kernel in kernels),
        tuple(None if bias is None else code_of(bias.dtype) for bias in biases),
    )


def forward(
    layer: Layer,
    x: Array,
    affine: tuple[Array | None, Array | None],
    kernels: Sequence[Array],
    biases: Sequence[Array | None],
    uses: Sequence[linear.Uses],
) -> tuple[Array, Kept]:
    """Run a layer.

    `x` is [.., in], `affine` gamma and beta of the norm, [in]; kernels are [in, out], biases [out].
    Returns [.., out] in the dtype of `x`, and what `backward` needs.
    """
    facts = _facts_of(layer, x, affine, kernels, biases)
    plans = _plans_of(facts)
    pairs = zip(kernels, biases, strict=True)
    tensors = (x, *(affine if layer.norm else ()), *itertools.chain.from_iterable(pairs))
    state = _state_of(plans.forward_state, uses, backward=False)
    made = call_plan(plans.forward, [*plans.pick_inputs(tensors), *state])
    saved = plans.pick_saved((*made.outputs, made.saved, *tensors))
    return made.outputs[0], Kept(facts, saved, tuple(uses), _amaxes(made, _FORWARD_SLOTS))


def backward(kept: Kept, grad: Array) -> Gradients:
    """Gradients, by that of the result."""
    facts, plans = kept.facts, _plans_of(kept.facts)
    packed, saved = kept.saved[: plans.saves_packed], kept.saved[plans.saves_packed :]
    state = _state_of(plans.backward_state, kept.uses, backward=True)
    made = call_plan(plans.backward, [*plans.pick_grads((grad,)), *saved, *state], *packed)
    found = [None if at < 0 else made.outputs[at] for at in plans.places]
    gamma = beta = None
    if facts.layer.norm is not None:
        gamma, beta = found[1:3]
    pairs = found[1 if facts.layer.norm is None else 3 :]
    amaxes = kept.amaxes, _amaxes(made, _BACKWARD_SLOTS)
    uses = [_next(number, linear_, *amaxes) for number, linear_ in enumerate(facts.layer.linears)]
    return Gradients(found[0], gamma, beta, tuple(pairs[::2]), tuple(pairs[1::2]), tuple(uses))


def _next(
    number: int, of: linear.LinearPlan, forward: Array | None, backward: Array | None
) -> linear.Uses:
    """Gradients of the states of a dense layer."""
    operands = (of.x, forward, 0), (of.kernel, forward, 1), (of.grad, backward, 0)
    return tuple(
        linear.gradient_of_use(
            amaxes[number, slot : slot + 1] if operand.mode is _DELAYED else None, operand
        )
        for operand, amaxes, slot in operands
    )
