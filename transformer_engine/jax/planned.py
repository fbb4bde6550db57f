# SPDX-License-Identifier: Apache-2.0
"""Layers as plans of the C library: one call forward, one backward.

Kernels are [in, out]. Scales are arguments of a call, and the amaxes that it has seen a result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from transformer_engine.common.plans import CallPlans
from transformer_engine.jax import linear
from transformer_engine.jax.custom_calls import PlanResults, code_of, varying
from transformer_engine.jax.definitions import are_custom_calls_on
from transformer_engine.jax.layer_calls import call_layer
from transformer_engine.jax.layer_cuts import Direction
from transformer_engine.jax.layer_plans import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    WHOLE_TENSORS,
    Facts,
    Kernel,
    Layer,
    layer_plans,
    modes_of,
)
from transformer_engine.jax.operator_calls import ACTIVATIONS, DTYPES
from transformer_engine.jax.quantize.state import Drawn, joined
from transformer_engine.jax.sharding import AxesInForce, axes_in_force

# ---- what runs as a plan -------------------------------------------------------------------------


def runs(layer: Layer, *arrays: Array) -> bool:
    """Return whether a layer runs as a plan; asked while a call is traced.

    What no plan computes is by definition (docs/jax.md): arrays of other dtypes than fp32, fp16 and
    bf16, a gated activation whose linear part comes first, and over a mesh scales of less than a
    tensor.
    """
    if not are_custom_calls_on(cut=modes_of(layer) <= WHOLE_TENSORS):
        return False
    known = layer.activation is None or layer.activation.kinds in ACTIVATIONS
    return known and all(array.dtype in DTYPES for array in arrays)


# ---- state ---------------------------------------------------------------------------------------


def _scales(uses: Sequence[linear.Uses], backward: bool) -> Array:
    """The scales of a direction, fp32 [n], by slots."""
    found = []
    for x, kernel, grad in uses:
        slots = (grad, None) if backward else (x, kernel, None)
        found += [jnp.ones(1, jnp.float32) if use is None else use.scale for use in slots]
    return jnp.concatenate(found)


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


class Given(NamedTuple):
    """What a call was given; static."""

    dtype: Any
    varying: frozenset[str]  # axes along which devices have different numbers

    def alike(self, grad: Array) -> Array:
        """Its gradient in its dtype, summed over devices that share it."""
        shared = tuple(sorted(varying(grad) - self.varying))
        return (jax.lax.psum(grad, shared) if shared else grad).astype(self.dtype)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("saved", "uses", "amaxes"),
    meta_fields=("facts", "names", "given"),
)
@dataclass
class Kept:
    """What a backward needs of its forward."""

    facts: Facts
    names: AxesInForce
    given: tuple[Given | None, ...]  # input, gamma and beta, kernels, biases; None: absent
    saved: tuple  # what the plan saves, as one tuple, where there is that, and others
    uses: tuple  # of each dense layer
    amaxes: Array | None  # [dense layers, slots], of inputs and weights


class Gradients(NamedTuple):
    """Gradients of a layer, as what they are of; None of what is absent."""

    x: Array | None
    affine: tuple[Array | None, Array | None]
    kernels: tuple[Array | None, ...]
    biases: tuple[Array | None, ...]
    uses: tuple[linear.Uses, ...]


def forward(
    layer: Layer,
    x: Any,
    affine: tuple,
    kernels: tuple,
    biases: tuple,
    uses: tuple[linear.Uses, ...],
    depth: int = 1,
    *,
    wanted: bool,
) -> tuple[Array, Kept]:
    """Run a layer.

    `x` is [batch.., in..], where in are `depth` dims, and `affine` are gamma and beta of the norm,
    [in]. The first kernel is [in.., out..], a second one [in, out..], biases are [out..]. Returns
    [batch.., out..] in the dtype of `x`, and what `backward` needs where gradients are `wanted`: of
    all arrays, since JAX keeps one structure of what a forward gives, whatever it differentiates.
    """
    listed = (x, *affine, *kernels, *biases)
    given = tuple(None if a is None else Given(a.dtype, varying(a)) for a in listed)
    depths = (depth, 1)[: len(kernels)]
    # Without a recipe all that is multiplied has one dtype.
    dtypes = [None if each.is_quantized else x.dtype for each in layer.linears]
    kernels, biases = (
        tuple(
            None if a is None else a.astype(to or a.dtype) for a, to in zip(of, dtypes, strict=True)
        )
        for of in (kernels, biases)
    )
    facts = Facts(
        layer,
        code_of(x.dtype),
        code_of(x.dtype if affine[0] is None else affine[0].dtype),
        affine[1] is not None,
        tuple(
            Kernel(kernel.shape[:of], kernel.shape[of:], code_of(kernel.dtype))
            for kernel, of in zip(kernels, depths, strict=True)
        ),
        tuple(None if bias is None else code_of(bias.dtype) for bias in biases),
        (
            wanted,
            *(tuple(wanted and a is not None for a in of) for of in (affine, kernels, biases)),
        ),
    )
    plans, names = layer_plans(facts).call, axes_in_force()
    pairs = zip(kernels, biases, strict=True)
    tensors = (x, *(affine if layer.norm else ()), *chain.from_iterable(pairs))
    tensors += pairs_of(plans, drawn_by(layer.linears, uses))
    scales = [_scales(uses, backward=False)] if plans.forward_state else []
    made = call_layer(Direction(facts, False, names), [*plans.pick_inputs(tensors), *scales])
    saved = ()
    if plans.backward is not None:
        saved = plans.pick_saved((*made.outputs, tuple(made.saved), *tensors))
    if plans.saves_packed:  # with it and the output nothing of the forward has to run again
        name = layer.linears[0].x.name or linear.GEMM_NAME
        saved = (tuple(checkpoint_name(a, name) for a in saved[0]), *saved[1:])
    y = checkpoint_name(made.outputs[0], linear.GEMM_NAME)
    return y, Kept(facts, names, given, saved, tuple(uses), _amaxes(made, FORWARD_SLOTS))


def backward(kept: Kept, grad: Array) -> Gradients:
    """Gradients, by that of the result."""
    facts, plans = kept.facts, layer_plans(kept.facts).call
    packed, saved = kept.saved[: plans.saves_packed], kept.saved[plans.saves_packed :]
    scales = [_scales(kept.uses, backward=True)] if plans.backward_state else []
    arrays = [*plans.pick_grads((grad,)), *saved, *scales, *chain.from_iterable(packed)]
    made = call_layer(Direction(facts, True, kept.names), arrays)
    of_x, *others = [None if at < 0 else made.outputs[at] for at in plans.places]
    affine = (None, None)
    if facts.layer.norm is not None:
        affine, others = tuple(others[:2]), others[2:]
    count, listed = len(facts.kernels), (of_x, *affine, *others[::2], *others[1::2])
    of_x, *found = (
        None if a is None else of.alike(a) for a, of in zip(listed, kept.given, strict=True)
    )
    affine, kernels, biases = (
        tuple(found[:2]),
        tuple(found[2 : 2 + count]),
        tuple(found[2 + count :]),
    )
    return Gradients(of_x, affine, kernels, biases, _following(kept, _amaxes(made, BACKWARD_SLOTS)))


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
            amax = amaxes[number, slot : slot + 1]
            shared = tuple(sorted(varying(amax) - varying(use.scale)))
            amax = joined(jax.lax.pmax(amax, shared) if shared else amax, use.scale)
        made.append(linear.gradient_of_use(amax, operand))
    return tuple(made)
