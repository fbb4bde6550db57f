# SPDX-License-Identifier: Apache-2.0
"""Attention in FP8 (``fp8_dpa`` and ``fp8_mha`` of a recipe): one node with casts, run as a plan.

Queries, keys and values are cast to FP8, both products multiply FP8, and the output is read again
in the dtype of the queries. What is saved is in FP8. Which backward follows is said in one place,
`GRADIENT_RULE`.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.attention_graphs import AttentionSpec, core_graph
from transformer_engine.common.config import TE_FP8_ATTENTION_BACKWARD
from transformer_engine.common.operand_casts import Quantization
from transformer_engine.common.plans import CallPlans, plans_of
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.attention.fp8_recipe import (
    asks_for_it,
    hands_over,
    recipe_of,
    unbuilt_name,
)
from transformer_engine.pytorch.attention.limits import Limits
from transformer_engine.pytorch.attention.native import (
    deterministic,
    lengths_and_offsets,
)
from transformer_engine.pytorch.attention.problem import CoreOptions, Heads, slices_of
from transformer_engine.pytorch.execution import plan_ops, recompute
from transformer_engine.pytorch.execution.autograd import run_call, run_without_backward
from transformer_engine.pytorch.execution.recompute_frames import unread_history
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.module.base import Region
from transformer_engine.pytorch.module.call import ModuleCall
from transformer_engine.pytorch.module.quantized import measures_first
from transformer_engine.pytorch.module.situation import keep
from transformer_engine.pytorch.scaling_state import arenas, scaling
from transformer_engine.pytorch.torchside.device import prepare_device
from transformer_engine.pytorch.torchside.graph_breaks import Outside
from transformer_engine.pytorch.torchside.modes import (
    exporting,
    graph_task,
    in_transform,
    without_memory,
)
from transformer_engine.pytorch.torchside.tensor_kinds import ALIGNMENT

__all__ = [
    "GRADIENT_RULE",
    "asks_for_it",
    "attend",
    "facts_of",
    "gradient_of",
    "hands_to",
    "in_force",
    "in_layer",
    "is_asked_for",
    "is_outside_graphs",
    "recipe_of",
    "settings",
    "state_of",
    "unbuilt",
    "why_in_high_precision",
]

SLOTS = (9, 6)
"""Of the forward and backward scaling state; see ``te_node_desc`` for those that are used."""
OUTPUT_SLOT = 3
"""The one of the output, among those of the forward."""


def is_outside_graphs() -> bool:
    """Whether no graph holds attention in the region of this thread: quantizers are asked for."""
    state = current_state()
    return state.enabled and asks_for_it(state.recipe) and state.recipe.custom()


def is_asked_for(module: Any) -> bool:
    """Whether the region of this thread runs a `DotProductAttention` in FP8."""
    state = current_state()
    return state.enabled and recipe_of(state.recipe, module) is not None


def in_force(module: Any) -> bool:
    """Whether a call of a `DotProductAttention` that begins now runs in FP8.

    The region says so, or, in the recompute of a checkpoint, that the first forward did.
    """
    if not torch.compiler.is_compiling() and graph_task() != -1:
        _, replay = recompute.frames()
        if replay is not None:
            return replay.knows(module)
    return is_asked_for(module)


def hands_to(core: Any, projection: Any) -> bool:
    """Whether a layer hands the output of its attention to the projection behind it in FP8.

    With ``fp8_mha``, where the projection multiplies inputs with one scale: its GEMM reads what
    attention has made, with attention's scale.
    """
    state = current_state()
    recipe = state.recipe if state.enabled else None
    if not torch.compiler.is_compiling() and graph_task() != -1:
        _, replay = recompute.frames()
        if replay is not None:
            entry = replay.next_of(projection)
            recipe = None if entry is None else entry.recipe
    if recipe is None or recipe.custom() or not getattr(recipe, "fp8_mha", False):
        return False
    columns = core.num_attention_heads * core.hidden_size_per_attention_head_v
    return (
        hands_over(recipe.fp8_mha)
        and (recipe.delayed() or recipe.float8_current_scaling())
        and columns % ALIGNMENT == 0
        and in_force(core)
    )


def unbuilt(module: Any) -> str:
    """Name of the recipe that attention would run by in this region, and does not; else ""."""
    state = current_state()
    return unbuilt_name(recipe_of(state.recipe, module)) if state.enabled else ""


# ---- the backward --------------------------------------------------------------------------------


class Facts(NamedTuple):
    """What the kind of the backward depends on."""

    delayed: bool  # scaling is delayed
    switched_on: bool  # as of TE_FP8_ATTENTION_BACKWARD
    deterministic: bool
    device: str  # type of it
    queries: int  # of each sequence
    channels: tuple[int, int]  # of a head
    limited: bool  # there are a causal mask, a window or lengths
    packed: bool
    dropout: float
    wide: bool = False  # the caller asks for high precision


class Clause(NamedTuple):
    """Why a backward runs in high precision."""

    reason: str
    holds: Callable[[Facts], bool]


BLOCK = 64
"""Queries that cuDNN's kernel takes at a time."""

GRADIENT_RULE: tuple[Clause, ...] = (
    Clause("TE_FP8_ATTENTION_BACKWARD=0", lambda f: not f.switched_on),
    Clause("bf16_backward=True", lambda f: f.wide),
    Clause(
        "current scaling: the kernel has to be told the scales of what it makes beforehand",
        lambda f: not f.delayed,
    ),
    Clause(
        "a causal mask, a window or lengths: that of bf16 leaves blocks out, and is faster",
        lambda f: f.limited,
    ),
    Clause(
        "heads that have not 128 channels: cuDNN has no kernel",
        lambda f: f.channels != (128, 128),
    ),
    Clause("packed sequences: cuDNN has no kernel", lambda f: f.packed),
    Clause(
        f"CUDA, queries that are no multiple of {BLOCK}: what cuDNN 9.19 makes of the last ones is "
        "wrong",
        lambda f: f.device != "cpu" and not f.packed and not fills_blocks(f.queries),
    ),
    Clause("dropout", lambda f: f.dropout > 0.0),
    Clause("repeatable gradients: the kernel's are not", lambda f: f.deterministic),
)
"""The backward runs in FP8 where none of these holds; else in high precision, on queries, keys,
values and output as they were saved in FP8."""


def why_in_high_precision(facts: Facts) -> str:
    """Why the backward of an attention in FP8 runs in high precision; "": it runs in FP8."""
    return next((clause.reason for clause in GRADIENT_RULE if clause.holds(facts)), "")


def fills_blocks(queries: int) -> bool:
    """Whether so many queries are whole blocks of cuDNN's kernel."""
    return queries % BLOCK == 0


def facts_of(recipe: Recipe, **problem: Any) -> Facts:
    """What the backward of a call goes by: recipe, environment, and the other `Facts` by name."""
    return Facts(recipe.delayed(), TE_FP8_ATTENTION_BACKWARD.get(), deterministic(), **problem)


def gradient_of(recipe: Recipe, limits: Limits, **problem: Any) -> bool:
    """Whether the backward of a call runs in FP8; `problem` as of `facts_of`, but for limits."""
    limited = limits.query_lengths is not None or max(limits.window) >= 0
    packed = limits.packed is not None
    return not why_in_high_precision(facts_of(recipe, limited=limited, packed=packed, **problem))


def settings(module: Any, queries: int) -> tuple[Quantization, bool, bool, str] | None:
    """What of recipe, environment and size an attention in FP8 depends on; None: it is in none."""
    if not in_force(module):
        return None
    recipe = recipe_of(current_state().recipe, module)
    quantization = module._quantization_of(recipe, False)
    return quantization, TE_FP8_ATTENTION_BACKWARD.get(), fills_blocks(queries), repr(recipe)


class InLayer(NamedTuple):
    """An attention in FP8 in a layer's plan."""

    quantization: Quantization
    fp8_gradient: bool  # its gradients are computed in FP8
    fp8_output: bool  # the projection behind it reads its output in FP8
    recipe: str


def in_layer(
    module: Any, device: str, queries: int, limits: Limits, dropout: float, fp8_output: bool
) -> InLayer | None:
    """How an attention runs in a layer's plan; None: in high precision."""
    if not in_force(module):
        return None
    recipe = recipe_of(current_state().recipe, module)
    channels = module.hidden_size_per_attention_head_k, module.hidden_size_per_attention_head_v
    back = gradient_of(
        recipe, limits, device=device, queries=queries, channels=channels, dropout=dropout
    )
    return InLayer(module._quantization_of(recipe, False), back, fp8_output, repr(recipe))


# ---- a call --------------------------------------------------------------------------------------


class _Call(ModuleCall):
    """One call of an attention by itself."""

    def _returned(self, made: tuple) -> Any:
        """The output as a `Float8Tensor`, whose next values are cast with its slot, or measured."""
        from transformer_engine.pytorch.tensor.recipes import format_of

        graph = self.plans.graph
        cast = graph.nodes[0].quantization.input
        row = format_of(cast)
        forms = [None if place < 0 else made[place] for place in self.plans.returned]
        quantizer = row.make(cast, forms[0].device, measures_first(self.recipe))
        slots = self.slots
        if slots is not None:
            slot = slots.forward_slot + OUTPUT_SLOT
            quantizer.scale = slots.forward_scale[slot : slot + 1]
            quantizer.amax = slots.forward_history[0, slot : slot + 1]
            quantizer._bound = slots
        shape = tuple(forms[0].shape)
        fields = {**row.fields(quantizer, tuple(forms), shape), "_quantizer": quantizer}
        return row.tensor._made(fields, _core.torch_dtype(graph.values[0].dtype), shape)


def _flat(heads: Heads) -> list[Tensor]:
    """Its tensors as rows, dense as a plan reads them."""
    last = len(heads.tensors) - 1
    return [
        tensor.flatten(-3 if heads.dim != 0 and i == last else -2).contiguous()
        for i, tensor in enumerate(heads.tensors)
    ]


def attend(
    module: Any,
    more: CoreOptions,
    heads: Heads,
    qkv_format: str,
    limits: Limits,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend in FP8; arguments as of `native.attend`, of a `DotProductAttention`.

    The output [.., heads, channels of values] has the dtype of the queries; with ``fp8_output`` it
    is a `Float8Tensor` [.., heads * channels] of that nominal one. NotImplementedError for what no
    graph of `torch.export` or transform of torch.func holds.
    """
    traced = torch.compiler.is_compiling()
    if more.fp8_output and in_transform():
        raise NotImplementedError(
            "DotProductAttention: fp8_output=True (or fp8_mha) in a transform of torch.func: leave "
            "it out there"
        )
    # Graphs have no dropout of these plans, and pass no quantized tensors on.
    if traced and (dropout > 0.0 or more.fp8_output):
        if exporting():
            what, remedy = "dropout of attention in FP8", "set attention_dropout=0"
            if more.fp8_output:
                what, remedy = "fp8_output=True (or fp8_mha)", "leave it out there"
            raise NotImplementedError(f"DotProductAttention: {what} in torch.export: {remedy}")
        return _attend_outside(module, more, heads, qkv_format, limits, scale, dropout)
    region = module._region(traced)
    if region.replay is None:
        region = region._replace(recipe=recipe_of(region.recipe, module))
    device = heads.tensors[0].device
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        heads = heads._replace(tensors=tuple(tensor.to(dtype) for tensor in heads.tensors))
    like = heads.tensors[0]
    if not traced and without_memory(like):
        region = region._replace(blank=True)
    where, packed = _where(limits)
    gradient = torch.is_grad_enabled() and any(t.requires_grad for t in heads.tensors)
    gradient = gradient and not region.exported
    slices = slices_of(heads)
    if traced:  # sizes that differ from graph to graph become symbols, of which no plan is made
        slices = tuple(tuple(map(operator.index, each)) for each in slices)
        packed = None if packed is None else tuple(map(operator.index, packed))
    channels = slices[0][1], slices[2][1]
    codes, epsilons = module._quantization_of(region.recipe, traced).flat()
    queries = like.shape[1 if qkv_format == "bshd" else 0]
    fp8_gradient = gradient and gradient_of(  # without one no graph depends on how many there are
        region.recipe, limits, device=device.type, queries=queries, channels=channels,
        dropout=dropout, wide=more.wide_backward,
    )  # fmt: skip
    slots, scales, history = state_of(module, region, like)
    no_amax = scales is not None and history is None
    key = (
        torch.device("meta") if region.blank else device, like.dtype,
        gradient, heads.joined if heads.dim else 0, slices,
        qkv_format == "sbhd",
        plan_ops.as_constant(scale) if traced else scale, 0.0 if traced else dropout,
        tuple(limits.window),
        limits.bottom_right, len(where), packed, codes,
        tuple(map(plan_ops.as_constant, epsilons)) if traced else epsilons,
        fp8_gradient, no_amax, deterministic(), more.fp8_output,
        plan_ops.as_constant(limits.softcap) if traced else limits.softcap,
    )  # fmt: skip
    call = _Call(_plans_of(module, key, traced), slots, type(module).__name__)
    call.traced = traced or region.blank
    call.scales, call.unread_history, call.recipe = scales, history, region.recipe
    records = call.plans.backward is not None
    call.first = module._is_first(region, records)
    call.domain = (region.replay or region.state).domain
    offsets = () if limits.packed is None else lengths_and_offsets(limits.packed)[1]
    run = run_call if records else run_without_backward
    out = run(call, *_flat(heads), *where, *offsets)
    if call.first and region.replay is None:
        region.state.first = False
    if region.record:
        module._record(region, slots if region.replay is None else None, call.first)
    return out if more.fp8_output else out.unflatten(-1, (slices[0][0], channels[1]))


_attend_outside = Outside(attend)


def _where(limits: Limits) -> tuple[tuple[Tensor, ...], tuple[int, int, int] | None]:
    """Lengths; and how many packed sequences there are, with bounds of their lengths."""
    if limits.packed is None:
        both = limits.query_lengths, limits.key_lengths
        return tuple(each for each in both if each is not None), None
    lengths, offsets = lengths_and_offsets(limits.packed)
    queries, keys = limits.packed
    packed = offsets[0].shape[0] - 1, queries.longest, keys.longest
    return tuple(each for each in lengths if each is not None), packed


def state_of(
    module: Any, region: Region, like: Tensor
) -> tuple[scaling.Slots | None, Tensor | None, Tensor | None]:
    """(slots, scales to use in their place, where amaxes go then or None): of the state in force.

    With scales and no place for amaxes none is recorded.
    """
    if region.replay is not None:
        replay = region.replay
        return replay.slots, replay.scales, unread_history(replay)
    if not region.recipe.delayed():
        return None, None, None
    if region.exported:
        return None, module._scales_to_export(like.device), None
    if region.blank:
        return scaling.BlankSlots(arenas.rule_of(region.recipe), like), None, None
    slots = module._slots_for(region.recipe, region.state.group, like.device, region.traced)
    return slots, None, None


def _plans_of(module: Any, key: tuple, traced: bool) -> CallPlans:
    if traced:
        module._ensure_fp8_plans(key)
    known = module._plans.get(key)
    return _make_plans(module, key) if known is None else known


def _make_plans(module: Any, key: tuple) -> CallPlans:
    (
        device, dtype, gradient, joined, slices, sequence_first, scale, dropout, window,
        bottom_right, lengths, packed, codes, epsilon, fp8_gradient, no_amax, repeatable,
        fp8_output, softcap,
    ) = key  # fmt: skip
    prepare_device(device)
    spec = AttentionSpec(
        slices, sequence_first, scale, dropout, window, bottom_right, lengths=lengths,
        deterministic=repeatable, packed=packed, quantization=Quantization.of_flat(codes, epsilon),
        fp8_gradient=fp8_gradient, no_amax=no_amax, fp8_output=fp8_output, softcap=softcap,
    )  # fmt: skip
    graph = core_graph(spec, _core.dtype_code(dtype), gradient, joined)
    return keep(module._plans, key, plans_of(graph))


def ensure_plans(module: Any, key: tuple) -> None:
    """Make plans of a module where there are none."""
    if key not in module._plans:
        _make_plans(module, key)
