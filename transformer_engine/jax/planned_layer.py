# SPDX-License-Identifier: Apache-2.0
"""A Transformer layer as one plan: norms, projections, attention, MLP, dropouts and residuals.

Its graph is that of `transformer_engine.pytorch.TransformerLayer`, made of those of its three
modules (`planned`): the projection of queries, keys and values with the norm before it, that of
the attention's output, and the MLP.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from transformer_engine.common import graphs
from transformer_engine.common.attention_graphs import AttentionSpec, add_dropout, attend
from transformer_engine.common.plans import CallPlans, plans_of
from transformer_engine.jax import linear, planned
from transformer_engine.jax.activation import ActivationPlan
from transformer_engine.jax.custom_calls import PlanResults, call_plan, code_of, varying
from transformer_engine.jax.definitions.casts import next_state
from transformer_engine.jax.layer_plans import (
    BACKWARD_SLOTS,
    FORWARD_SLOTS,
    Facts,
    Kernel,
    Layer,
    graph_of,
)
from transformer_engine.jax.layernorm import NormPlan
from transformer_engine.jax.quantize.state import Drawn, Rule, joined, usable_scale


class LayerPlan(NamedTuple):
    """How a layer computes; static."""

    norms: tuple[NormPlan, NormPlan]
    linears: tuple[linear.LinearPlan, ...]  # projection in, projection out, both of the MLP
    activation: ActivationPlan
    attention: AttentionSpec
    dropout: float  # of what joins the residual
    rules: tuple[Rule, Rule, Rule] | None = None
    """Of inputs, kernels and gradients, how states of delayed scaling follow; the first two are
    one."""


class Parameters(NamedTuple):
    """Arrays of a layer, or something else of each."""

    affine: tuple[tuple, tuple]  # gamma and beta [hidden] of each norm; no beta for an RMSNorm
    kernels: tuple  # [in, .., out]
    biases: tuple  # [.., out], or None

    def in_order(self) -> tuple:
        """All, as the tensors of the graph are behind its input."""
        pairs = list(zip(self.kernels, self.biases, strict=True))
        order = self.affine[0], *pairs[:2], self.affine[1], *pairs[2:]
        return tuple(itertools.chain.from_iterable(order))

    @classmethod
    def of(cls, ordered: Sequence) -> "Parameters":
        """Undo `in_order`."""
        affine, pairs = (tuple(ordered[:2]), tuple(ordered[6:8])), [*ordered[2:6], *ordered[8:]]
        return cls(affine, tuple(pairs[::2]), tuple(pairs[1::2]))


class _Module(NamedTuple):
    """Which parts of a layer are one module."""

    name: str
    norm: int | None  # its number
    linears: slice


_MODULES = (
    _Module("qkv_", 0, slice(0, 1)),  # which the attention reads
    _Module("attention_", None, slice(1, 2)),  # this one and the next one join the residual
    _Module("mlp_", 1, slice(2, 4)),
)
_SLOTS = (0,) * len(_MODULES)  # the first one of each in its own states


class _Facts(NamedTuple):
    """What the plans of a layer depend on."""

    plan: LayerPlan
    dtype: int
    modules: tuple[Facts, ...]
    wanted: bool  # the gradient of the input is


@functools.lru_cache(maxsize=64)
def _plans_of(facts: _Facts) -> CallPlans:
    plan, dtype, modules, wanted = facts
    (hidden,) = modules[0].kernels[0].inside
    graph = graphs.Graph()
    residual = x = graph.tensor("input", dtype, (graphs.ROWS, hidden), graphs.input_flags(wanted))
    for number, (name, *_) in enumerate(_MODULES):
        own = graph_of(modules[number])
        x = graph.append(own, x, name, f"{name}made", number)[own.results[0][1]]
        if number == 0:
            x = attend(graph, plan.attention, [x], ((), {}, ()), "", 0)
            continue
        inputs, rates = (x, -1, residual), (plan.dropout, 0.0)
        residual = x = add_dropout(graph, inputs, f"{name}output", name, rates)
    graph.returns([x])
    return plans_of(graph.ordered(graph.tensors))


# ---- states --------------------------------------------------------------------------------------


class States(NamedTuple):
    """States of delayed scaling of all linear layers: of their inputs, kernels, gradients.

    Arrays of all, for a program has a kernel for each operation on small ones too.
    """

    scale: Array  # fp32 [linear layers, 3]
    history: Array  # fp32 [linear layers, 3, length]


def _groups(plan: LayerPlan) -> tuple[tuple[slice, Rule], ...]:
    """Which operands follow one rule."""
    x, _, grad = plan.rules
    return (slice(0, 2), x), (slice(2, 3), grad)


def _usable(plan: LayerPlan, states: States) -> Array:
    """Scales to cast with, as of `usable_scale`."""
    found = []
    for group, rule in _groups(plan):
        of_one = partial(usable_scale, rule=rule)
        given = states.scale[:, group, None], states.history[:, group]
        found.append(jax.vmap(jax.vmap(of_one))(*given)[..., 0])
    return jnp.concatenate(found, 1)


def _following(plan: LayerPlan, states: States, scale: Array, amaxes: Array) -> States:
    """The next states, of what `_usable` gave and of amaxes [linear layers, 3]."""
    scales, histories = [], []
    for group, rule in _groups(plan):
        step = jax.vmap(jax.vmap(lambda *state, rule=rule: next_state(*state, *rule)))
        given = amaxes[:, group, None], scale[:, group, None], states.history[:, group]
        of_scale, of_history = step(*given)
        scales.append(of_scale[..., 0])
        histories.append(of_history)
    made = jnp.where(jnp.isnan(scale), jnp.nan, jnp.concatenate(scales, 1))
    return States(made, jnp.concatenate(histories, 1))


def _scales_of(links: Sequence, scale: Array | None, backward: bool) -> list[Array]:
    """What a plan is given of state: scales and a row for amaxes of each module, by slots."""
    found, none = [], jnp.ones((4, 1), jnp.float32)  # the last slot is that of what is returned
    for what, owner in links:
        own = _MODULES[owner].linears
        operands = scale[own, 2:] if backward else scale[own, :2]
        slots = jnp.concatenate((operands, none[own]), 1).reshape(-1)
        found.append(slots if what == "scale" else jnp.zeros((1, *slots.shape), jnp.float32))
    return found


def _amaxes(made: PlanResults, slots: int) -> Array | None:
    """The amaxes of a call [linear layers, slots], without those of what is returned."""
    rows = [state.reshape(-1, slots)[:, :-1] for state in made.states]
    return jnp.concatenate(rows) if rows else None


# ---- facts ---------------------------------------------------------------------------------------


def _facts_of(plan: LayerPlan, x: Array, tensors: Parameters, wanted: bool) -> _Facts:
    """Facts of a call; `wanted`: whether gradients of input and parameters are."""
    dtype, modules = code_of(x.dtype), []

    def there(of: Sequence) -> tuple[bool, ...]:
        return tuple(wanted and each is not None for each in of)

    for _, norm, own in _MODULES:
        affine = (None, None) if norm is None else tensors.affine[norm]
        linears = plan.linears[own]
        layer = Layer(
            linears,
            None if norm is None else plan.norms[norm],
            plan.activation if len(linears) > 1 else None,
        )
        modules.append(
            Facts(
                layer,
                dtype,
                dtype,
                affine[1] is not None,
                tuple(
                    Kernel(k.shape[:1], k.shape[1:], code_of(k.dtype)) for k in tensors.kernels[own]
                ),
                tuple(None if b is None else code_of(b.dtype) for b in tensors.biases[own]),
                (False, there(affine), there(tensors.kernels[own]), there(tensors.biases[own])),
            )
        )
    return _Facts(plan, dtype, tuple(modules), wanted)


# ---- calls ---------------------------------------------------------------------------------------


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("saved", "states", "scale", "amaxes"),
    meta_fields=("facts", "given"),
)
@dataclass
class _Kept:
    """What a backward needs of its forward."""

    facts: _Facts
    given: tuple  # shape and `Given` of each tensor; None: absent
    saved: tuple
    states: States | None
    scale: Array | None  # that casts were made with
    amaxes: Array | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def transformer_layer(
    plan: LayerPlan,
    x: Array,
    parameters: Parameters,
    states: States | None,
    drawn: tuple[Drawn | None, ...],
    pairs: tuple[Array | None, ...],
) -> Array:
    """Run a layer.

    Parameters
    ----------
    plan : LayerPlan
        How.
    x : Array
        [batch, sequence, hidden], or the sequence first, as the attention says; fp16 or bf16, as
        gammas and betas.
    parameters : Parameters
        In fp32, fp16 or bf16.
    states : States or None
        Of delayed scaling; their gradient is their next value.
    drawn : tuple of Drawn or None
        Of each linear layer, for gradients that are rounded stochastically.
    pairs : tuple of Array or None
        Random pairs (seed, offset), uint32 [4]: of the attention and of both residuals; None
        where nothing is dropped.

    Returns
    -------
    Array
        Of the shape and dtype of `x`.
    """
    return _forward(plan, x, parameters, states, drawn, pairs, wanted=False)[0]


def _pairs(plan: LayerPlan, drawn: Sequence, pairs: Sequence) -> list[Drawn | None]:
    """Random numbers in the order of the graph."""
    found: list[Drawn | None] = []
    for module, pair in zip(_MODULES, pairs, strict=True):
        both = zip(plan.linears[module.linears], drawn[module.linears], strict=True)
        found += [own for of, own in both if of.grad.cast and of.grad.cast.rounds_at_random]
        found += [] if pair is None else [Drawn(pair)]
    return found


def _forward(plan: LayerPlan, *given: Any, wanted: bool = True) -> tuple[Array, _Kept]:
    x, parameters, states, drawn, pairs = given
    listed = tuple(
        None if a is None else (a.shape, planned.Given(a.dtype, varying(a)))
        for a in (x, *parameters.in_order())
    )
    # Without a recipe all that is multiplied has one dtype.
    dtypes = [None if each.is_quantized else x.dtype for each in plan.linears]
    parameters = parameters._replace(
        kernels=tuple(map(_in_dtype, parameters.kernels, dtypes)),
        biases=tuple(map(_in_dtype, parameters.biases, dtypes)),
    )
    facts = _facts_of(plan, x, parameters, wanted)
    plans, flat = (
        _plans_of(facts),
        Parameters(
            parameters.affine,
            tuple(kernel.reshape(kernel.shape[0], -1) for kernel in parameters.kernels),
            tuple(None if bias is None else bias.reshape(-1) for bias in parameters.biases),
        ),
    )
    arrays = (x, *flat.in_order(), *planned.pairs_of(plans, _pairs(plan, drawn, pairs)))
    scale = None if states is None else _usable(plan, states)
    state = _scales_of(plans.forward_state, scale, backward=False)
    made = call_plan(plans.forward, [*plans.pick_inputs(arrays), *state], slots=_SLOTS)
    saved = ()
    if plans.backward is not None:
        saved = plans.pick_saved((*made.outputs, tuple(made.saved), *arrays))
    if plans.saves_packed:
        saved = (tuple(checkpoint_name(a, linear.GEMM_NAME) for a in saved[0]), *saved[1:])
    y = checkpoint_name(made.outputs[0], linear.GEMM_NAME)
    return y, _Kept(facts, listed, saved, states, scale, _amaxes(made, FORWARD_SLOTS))


def _in_dtype(array: Array | None, dtype: Any) -> Array | None:
    return None if array is None else array.astype(dtype or array.dtype)


def _backward(plan: LayerPlan, kept: _Kept, grad: Array) -> tuple:
    plans, found = _plans_of(kept.facts), [None] * len(kept.given)
    packed, saved = kept.saved[: plans.saves_packed], kept.saved[plans.saves_packed :]
    state = _scales_of(plans.backward_state, kept.scale, backward=True)
    arrays = [*plans.pick_grads((grad,)), *saved, *state]
    made = call_plan(plans.backward, arrays, *packed, slots=_SLOTS)
    for i, (at, of) in enumerate(zip(plans.places, kept.given, strict=True)):
        if at >= 0:
            shape, like = of
            found[i] = like.alike(made.outputs[at].reshape(shape))
    states = None
    if kept.states is not None:
        states = _next_states(plan, kept, _amaxes(made, BACKWARD_SLOTS))
    return found[0], Parameters.of(found[1:]), states, None, None


def _next_states(plan: LayerPlan, kept: _Kept, of_gradients: Array) -> States:
    """The next states."""
    amaxes = jnp.concatenate((kept.amaxes, of_gradients), 1)
    shared = tuple(sorted(varying(amaxes) - varying(kept.scale)))
    amaxes = joined(jax.lax.pmax(amaxes, shared) if shared else amaxes, kept.scale)
    return _following(plan, kept.states, kept.scale, amaxes)


transformer_layer.defvjp(_forward, _backward)
