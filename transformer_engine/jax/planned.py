# SPDX-License-Identifier: Apache-2.0
"""Layers as plans of the C library: one custom call forward, one backward.

A layer is a norm, one or two dense layers and the activation between them, in this order. Its graph
is that of the PyTorch modules (`common.graphs`), with kernels that are [in, out]. Scales are
arguments of a call, and the amaxes that it has seen a result.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from transformer_engine import _core
from transformer_engine.common import graphs
from transformer_engine.common.operand_casts import (
    BACKWARDS,
    OperandCast,
    Quantization,
    flags_of,
)
from transformer_engine.common.plans import CallPlans, call_plans
from transformer_engine.jax import linear
from transformer_engine.jax.activation import ActivationPlan
from transformer_engine.jax.custom_calls import PlanResults, call_plan, code_of
from transformer_engine.jax.definitions import are_custom_calls_on
from transformer_engine.jax.definitions.scaling_modes import Cast, ScalingMode
from transformer_engine.jax.layernorm import NormPlan
from transformer_engine.jax.operator_calls import ACTIVATIONS, DTYPES, NORMS
from transformer_engine.jax.quantize.state import Drawn, joined

# ---- what runs as a plan -------------------------------------------------------------------------


class Layer(NamedTuple):
    """How a layer computes; static."""

    linears: tuple[linear.LinearPlan, ...]  # one, or two with the activation between them
    norm: NormPlan | None = None
    activation: ActivationPlan | None = None


def runs(layer: Layer, *arrays: Array) -> bool:
    """Return whether a layer runs as a plan; asked while a call is traced.

    What no plan computes is by definition (docs/jax.md): arrays of other dtypes than fp32, fp16 and
    bf16, and a gated activation whose linear part comes first.
    """
    if not are_custom_calls_on():
        return False
    known = layer.activation is None or layer.activation.kinds in ACTIVATIONS
    return known and all(array.dtype in DTYPES for array in arrays)


# ---- casts ---------------------------------------------------------------------------------------

_RECIPES = {
    ScalingMode.DELAYED_TENSOR_SCALING: _core.RECIPE_DELAYED,
    ScalingMode.CURRENT_TENSOR_SCALING: _core.RECIPE_CURRENT,
    ScalingMode.BLOCK_1D_SCALING: _core.RECIPE_BLOCK,
    ScalingMode.BLOCK_2D_SCALING: _core.RECIPE_BLOCK,
    ScalingMode.ROW_SCALING: _core.RECIPE_ROW,
    ScalingMode.MXFP8_1D_SCALING: _core.RECIPE_MXFP8,
}


def _cast(cast: Cast | None) -> OperandCast:
    if cast is None:
        return OperandCast()
    if cast.mode.is_nvfp4_scaling:
        return OperandCast(_core.RECIPE_NVFP4, _core.DTYPE_U8, options=cast.options)
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
    return Quantization(*casts, plan.fast, BACKWARDS[plan.backward])


# ---- plans ---------------------------------------------------------------------------------------


class _Facts(NamedTuple):
    """What the plans of a layer depend on."""

    layer: Layer
    dtype: int  # of input and output
    norm: int  # dtype of gamma and beta
    has_beta: bool
    kernels: tuple[tuple[int, int, int], ...]  # of each in, out, dtype
    biases: tuple[int | None, ...]  # dtypes
    wanted: tuple[bool, tuple, tuple, tuple]
    """Whether the gradients of input, gamma and beta, kernels, biases are."""


def _parameter(wanted: bool) -> int:
    return _core.VALUE_PARAMETER | _core.VALUE_GRADIENT * wanted


def _spec_of(facts: _Facts) -> graphs.CallSpec:
    """The call whose plans run a layer."""
    layer, parts = facts.layer, []
    of_x, of_affine, of_kernels, of_biases = facts.wanted
    for i, (of_in, out, dtype) in enumerate(facts.kernels):
        flags = graphs.LinearFlags(
            node=_core.LINEAR_WEIGHT_TRANSPOSED,
            input=_core.VALUE_GRADIENT * of_x,
            weight=_parameter(of_kernels[i]),
            bias=0 if facts.biases[i] is None else _parameter(of_biases[i]),
        )
        bias = facts.dtype if facts.biases[i] is None else facts.biases[i]
        dtypes = facts.dtype, dtype, bias, facts.dtype, dtype
        parts.append(graphs.LinearSpec(of_in, out, *dtypes, _quantization(layer.linears[i]), flags))
    norm = activation = None
    if layer.norm is not None:
        kind, centered, epsilon = layer.norm
        gamma, beta = map(_parameter, of_affine)
        flags = gamma, beta * facts.has_beta, _core.NODE_ZERO_CENTERED * centered
        norm = graphs.Norm(NORMS[kind], facts.norm, epsilon, *flags)
    if layer.activation is not None:
        kinds, numbers = layer.activation
        activation = graphs.Activation(ACTIVATIONS[kinds], *numbers)
    names = ("",) if len(parts) == 1 else ("fc1_", "fc2_")
    return graphs.CallSpec(tuple(parts), norm, activation, names=names)


@functools.lru_cache(maxsize=256)
def _plans_of(facts: _Facts) -> CallPlans:
    return call_plans(_spec_of(facts))


_FORWARD_SLOTS, _BACKWARD_SLOTS = 3, 2  # of a dense layer; the last one is that of what is returned


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


# ---- random numbers ------------------------------------------------------------------------------


def drawn_by(linears: Sequence[linear.LinearPlan], uses: Sequence[linear.Uses]) -> list:
    """Of each dense layer that rounds stochastically its `Drawn`; None: it has none."""
    rounding = (plan.grad.cast is not None and plan.grad.cast.rounds_at_random for plan in linears)
    return [grad for (*_, grad), rounds in zip(uses, rounding, strict=True) if rounds]


def pairs_of(plans: CallPlans, drawn: Sequence[Drawn | None]) -> tuple[Array, ...]:
    """Random pairs that the plans of a call read; `drawn` are those of its graph, in order."""
    known = dict(zip(plans.graph.drawn, drawn, strict=True))
    if any(known[link] is None for link in plans.drawn):
        raise ValueError(
            "gradients are rounded stochastically, and a quantizer has no random state: give "
            'modules of Flax a stream "sr_rng" (rngs={"sr_rng": key}), functions a '
            "QuantizeMeta(stochastic_rounding_rng_state=) for grad, or use "
            "NVFP4BlockScaling(disable_stochastic_rounding=True)"
        )
    return tuple(known[link].pair for link in plans.drawn)


# ---- calls ---------------------------------------------------------------------------------------


class _Given(NamedTuple):
    """What a call was given, in the shapes that it had; static."""

    batch: tuple[int, ...]
    tensors: tuple[tuple | None, ...]  # shape and dtype of input, kernels, biases; None: absent


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("saved", "uses", "amaxes"),
    meta_fields=("facts", "given"),
)
@dataclass
class Kept:
    """What a backward needs of its forward."""

    facts: _Facts
    given: _Given
    saved: tuple  # the packed tensor, where there is one, and others
    uses: tuple  # of each dense layer
    amaxes: Array | None  # [dense layers, slots], of inputs and weights


class Gradients(NamedTuple):
    """Gradients of a layer, as what they are of; None of what is absent or has none."""

    x: Array | None
    affine: tuple[Array | None, Array | None]
    kernels: tuple[Array | None, ...]
    biases: tuple[Array | None, ...]
    uses: tuple[linear.Uses, ...]


def values(given: Any) -> Any:
    """What a `custom_vjp` with ``symbolic_zeros`` gives its forward, as arrays."""
    return jax.tree.map(lambda a: a.value if _is_primal(a) else a, given, is_leaf=_is_primal)


def _is_primal(given: Any) -> bool:
    return isinstance(given, CustomVJPPrimal)


def _are_wanted(given: Any) -> Any:
    """Whether gradients are, of what `values` takes."""
    if isinstance(given, tuple):
        return tuple(map(_are_wanted, given))
    return _is_primal(given) and given.perturbed


def _wanted(x: Any, affine: tuple, kernels: tuple, biases: tuple, uses: tuple) -> tuple:
    """Which gradients the plans make: also one that is not wanted, where a state needs the cast.

    The gradient of a layer's output is cast for that of its kernel, or of what comes before it.
    """
    given = (x, tuple(affine), tuple(kernels), tuple(biases))
    of_x, of_affine, of_kernels, of_biases = _are_wanted(given)
    found: list[bool] = []
    before = of_x or any(of_affine)
    for i, (_, _, grad) in enumerate(uses):
        state = grad is not None and any(map(_are_wanted, grad))
        found.append(of_kernels[i] or (state and not before))
        before |= found[i] or of_biases[i]
    return of_x, of_affine, tuple(found), of_biases


def whole(grad: Array | SymbolicZero) -> Array:
    """The gradient that a `custom_vjp` with ``symbolic_zeros`` gives its backward, as an array."""
    return jnp.zeros(grad.shape, grad.dtype) if isinstance(grad, SymbolicZero) else grad


def _matrix(kernel: Array, depth: int, dtype: Any) -> Array:
    """A kernel [in.., out..] as [in, out]; `depth` is how many dims of in."""
    return kernel.reshape(math.prod(kernel.shape[:depth]), -1).astype(dtype or kernel.dtype)


def _vector(bias: Array | None, dtype: Any) -> Array | None:
    return None if bias is None else bias.reshape(-1).astype(dtype or bias.dtype)


def forward(
    layer: Layer,
    x: Any,
    affine: tuple,
    kernels: tuple,
    biases: tuple,
    uses: tuple[linear.Uses, ...],
    depth: int = 1,
) -> tuple[Array, Kept]:
    """Run a layer on what a `custom_vjp` with ``symbolic_zeros`` gives its forward, or on arrays.

    `x` is [batch.., in..], where in are `depth` dims, and `affine` are gamma and beta of the norm,
    [in]. The first kernel is [in.., out..], a second one [in, out..], biases are [out..]. Returns
    [batch.., out..] in the dtype of `x`, and what `backward` needs: nothing for gradients that
    nobody wants.
    """
    wanted = _wanted(x, affine, kernels, biases, uses)
    x, affine, kernels, biases, uses = values((x, affine, kernels, biases, uses))
    listed = [None if a is None else (a.shape, a.dtype) for a in (x, *kernels, *biases)]
    batch = x.shape[: x.ndim - depth]
    depths = (depth, 1)[: len(kernels)]
    features = kernels[-1].shape[depths[-1] :]
    # Without a recipe all that is multiplied has one dtype.
    dtypes = [None if each.is_quantized else x.dtype for each in layer.linears]
    kernels = tuple(map(_matrix, kernels, depths, dtypes))
    biases = tuple(map(_vector, biases, dtypes))
    x = x.reshape(*(batch or (1,)), kernels[0].shape[0])
    facts = _Facts(
        layer,
        code_of(x.dtype),
        code_of(x.dtype if affine[0] is None else affine[0].dtype),
        affine[1] is not None,
        tuple((*kernel.shape, code_of(kernel.dtype)) for kernel in kernels),
        tuple(None if bias is None else code_of(bias.dtype) for bias in biases),
        wanted,
    )
    plans = _plans_of(facts)
    pairs = zip(kernels, biases, strict=True)
    tensors = (x, *(affine if layer.norm else ()), *itertools.chain.from_iterable(pairs))
    tensors += pairs_of(plans, drawn_by(layer.linears, uses))
    state = _state_of(plans.forward_state, uses, backward=False)
    made = call_plan(plans.forward, [*plans.pick_inputs(tensors), *state])
    saved = ()
    if plans.backward is not None:
        saved = plans.pick_saved((*made.outputs, made.saved, *tensors))
    if plans.saves_packed:  # with it and the output nothing of the forward has to run again
        name = layer.linears[0].x.name or linear.GEMM_NAME
        saved = (checkpoint_name(saved[0], name), *saved[1:])
    y = checkpoint_name(made.outputs[0], linear.GEMM_NAME)
    kept = facts, _Given(batch, tuple(listed)), saved, tuple(uses), _amaxes(made, _FORWARD_SLOTS)
    return y.reshape(*batch, *features), Kept(*kept)


def backward(kept: Kept, grad: Array) -> Gradients:
    """Gradients, by that of the result."""
    facts, plans = kept.facts, _plans_of(kept.facts)
    if plans.backward is None:  # the state alone goes on
        nothing = (None,) * len(facts.kernels)
        return Gradients(None, (None, None), nothing, nothing, _following(kept, None))
    packed, saved = kept.saved[: plans.saves_packed], kept.saved[plans.saves_packed :]
    state = _state_of(plans.backward_state, kept.uses, backward=True)
    grad = grad.reshape(*(kept.given.batch or (1,)), facts.kernels[-1][1])
    made = call_plan(plans.backward, [*plans.pick_grads((grad,)), *saved, *state], *packed)
    of_x, *others = [None if at < 0 else made.outputs[at] for at in plans.places]
    affine = (None, None)
    if facts.layer.norm is not None:
        affine, others = tuple(others[:2]), others[2:]
    listed = zip((of_x, *others[::2], *others[1::2]), kept.given.tensors, strict=True)
    of_x, *found = [None if a is None else a.reshape(of[0]).astype(of[1]) for a, of in listed]
    count, uses = len(facts.kernels), _following(kept, _amaxes(made, _BACKWARD_SLOTS))
    return Gradients(of_x, affine, tuple(found[:count]), tuple(found[count:]), uses)


def _following(kept: Kept, of_gradients: Array | None) -> tuple[linear.Uses, ...]:
    """Gradients of all states."""
    pairs = enumerate(zip(kept.facts.layer.linears, kept.uses, strict=True))
    return tuple(_next(number, *of, kept.amaxes, of_gradients) for number, of in pairs)


def _next(
    number: int,
    of: linear.LinearPlan,
    uses: linear.Uses,
    forward: Array | None,
    backward: Array | None,
) -> linear.Uses:
    """Gradients of the states of a dense layer."""
    operands = (of.x, forward, 0), (of.kernel, forward, 1), (of.grad, backward, 0)
    made = []
    for (operand, amaxes, slot), use in zip(operands, uses, strict=True):
        amax = None
        if use is not None and amaxes is not None:
            amax = joined(amaxes[number, slot : slot + 1], use.scale)
        made.append(linear.gradient_of_use(amax, operand))
    return tuple(made)
