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
from transformer_engine.jax.custom_calls import PlanResults, call_plan, code_of
from transformer_engine.jax.layernorm import NormPlan
from transformer_engine.jax.quantize.state import Drawn


class LayerPlan(NamedTuple):
    """How a layer computes; static."""

    norms: tuple[NormPlan, NormPlan]
    linears: tuple[linear.LinearPlan, ...]  # projection in, projection out, both of the MLP
    activation: ActivationPlan
    attention: AttentionSpec
    dropout: float  # of what joins the residual


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
    modules: tuple[planned._Facts, ...]
    wanted: bool  # the gradient of the input is


@functools.lru_cache(maxsize=64)
def _plans_of(facts: _Facts) -> CallPlans:
    plan, dtype, modules, wanted = facts
    hidden = modules[0].kernels[0][0]
    graph = graphs.Graph()
    residual = x = graph.tensor("input", dtype, (graphs.ROWS, hidden), graphs.input_flags(wanted))
    for number, (name, *_) in enumerate(_MODULES):
        own = graphs.call_graph(planned._spec_of(modules[number]))
        x = graph.append(own, x, name, f"{name}made", number)[own.results[0][1]]
        if number == 0:
            x = attend(graph, plan.attention, [x], ((), {}, ()), "", 0)
            continue
        inputs, rates = (x, -1, residual), (plan.dropout, 0.0)
        residual = x = add_dropout(graph, inputs, f"{name}output", name, rates)
    graph.returns([x])
    return plans_of(graph.ordered(graph.tensors))


def _states_of(links: Sequence, uses: Sequence, backward: bool) -> list[Array]:
    """What a plan is given of state: scales and amaxes of each module."""
    owners = {owner: uses[_MODULES[owner].linears] for _, owner in links}
    known = {owner: planned._scales(own, backward) for owner, own in owners.items()}
    return [known[owner][what == "history"] for what, owner in links]


def _amaxes(made: PlanResults, slots: int) -> Array | None:
    """The amaxes of a call [linear layers, slots]."""
    rows = [state.reshape(-1, slots) for state in made.states]
    return jnp.concatenate(rows) if rows else None


def _facts_of(plan: LayerPlan, x: Array, wanted: Any, tensors: Parameters) -> _Facts:
    """Facts of a call; `wanted`: which gradients of input and parameters are."""
    dtype, (of_x, of_parameters), modules = code_of(x.dtype), wanted, []
    for _, norm, own in _MODULES:
        affine = (None, None) if norm is None else tensors.affine[norm]
        of_affine = (False, False) if norm is None else of_parameters.affine[norm]
        linears = plan.linears[own]
        layer = planned.Layer(
            linears,
            None if norm is None else plan.norms[norm],
            plan.activation if len(linears) > 1 else None,
        )
        modules.append(
            planned._Facts(
                layer,
                dtype,
                dtype,
                affine[1] is not None,
                tuple((*kernel.shape, code_of(kernel.dtype)) for kernel in tensors.kernels[own]),
                tuple(None if b is None else code_of(b.dtype) for b in tensors.biases[own]),
                (False, of_affine, of_parameters.kernels[own], of_parameters.biases[own]),
            )
        )
    return _Facts(plan, dtype, tuple(modules), of_x)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("saved", "uses", "amaxes"),
    meta_fields=("facts", "given"),
)
@dataclass
class _Kept:
    """What a backward needs of its forward."""

    facts: _Facts
    given: tuple  # shape and dtype of each tensor; None: absent
    saved: tuple
    uses: tuple
    amaxes: Array | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def transformer_layer(
    plan: LayerPlan,
    x: Array,
    parameters: Parameters,
    uses: tuple[linear.Uses, ...],
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
    uses : tuple of linear.Uses
        States of the linear layers.
    pairs : tuple of Array or None
        Random pairs (seed, offset), uint32 [4]: of the attention and of both residuals; None
        where nothing is dropped.

    Returns
    -------
    Array
        Of the shape and dtype of `x`.
    """
    return _forward(plan, x, parameters, uses, pairs)[0]


def _forward(plan: LayerPlan, *given: Any) -> tuple[Array, _Kept]:
    x, parameters, uses, pairs = planned.values(given)
    of_x, of_parameters, of_uses, _ = map(planned._are_wanted, given)
    of_parameters = Parameters(*of_parameters)
    # The gradient of a layer's output is cast for that of its kernel.
    states = any(jax.tree.leaves(of_uses))
    of_kernels = tuple(wanted or states for wanted in of_parameters.kernels)
    wanted = of_x, of_parameters._replace(kernels=of_kernels)
    # Without a recipe all that is multiplied has one dtype.
    dtypes = [None if each.is_quantized else x.dtype for each in plan.linears]
    tensors = Parameters(
        parameters.affine,
        tuple(map(planned._matrix, parameters.kernels, (1,) * len(dtypes), dtypes)),
        tuple(map(planned._vector, parameters.biases, dtypes)),
    )
    facts = _facts_of(plan, x, wanted, tensors)
    plans = _plans_of(facts)
    arrays = (x, *tensors.in_order())
    state = _states_of(plans.forward_state, uses, backward=False)
    drawn = []
    for module, pair in zip(_MODULES, pairs, strict=True):
        drawn += planned.drawn_by(plan.linears[module.linears], uses[module.linears])
        drawn += [] if pair is None else [Drawn(pair)]
    arrays += planned.pairs_of(plans, drawn)
    inputs = plans.pick_inputs(arrays)
    made = call_plan(plans.forward, [*inputs, *state], slots=_SLOTS)
    saved = ()
    if plans.backward is not None:
        saved = plans.pick_saved((*made.outputs, made.saved, *arrays))
    if plans.saves_packed:
        saved = (checkpoint_name(saved[0], linear.GEMM_NAME), *saved[1:])
    ordered = (x, *parameters.in_order())
    listed = tuple(None if each is None else (each.shape, each.dtype) for each in ordered)
    amaxes = _amaxes(made, planned._FORWARD_SLOTS)
    y = checkpoint_name(made.outputs[0], linear.GEMM_NAME)
    return y, _Kept(facts, listed, saved, uses, amaxes)


def _backward(plan: LayerPlan, kept: _Kept, grad: Array) -> tuple:
    plans, found = _plans_of(kept.facts), [None] * len(kept.given)
    of_gradients = None
    if plans.backward is not None:
        packed, saved = kept.saved[: plans.saves_packed], kept.saved[plans.saves_packed :]
        state = _states_of(plans.backward_state, kept.uses, backward=True)
        grads = plans.pick_grads((planned.whole(grad),))
        made = call_plan(plans.backward, [*grads, *saved, *state], *packed, slots=_SLOTS)
        of_gradients = _amaxes(made, planned._BACKWARD_SLOTS)
        for i, (at, of) in enumerate(zip(plans.places, kept.given, strict=True)):
            if at >= 0:
                found[i] = made.outputs[at].reshape(of[0]).astype(of[1])
    uses = tuple(
        planned._next(number, *of, kept.amaxes, of_gradients)
        for number, of in enumerate(zip(plan.linears, kept.uses, strict=True))
    )
    return found[0], Parameters.of(found[1:]), uses, None


transformer_layer.defvjp(_forward, _backward, symbolic_zeros=True)
