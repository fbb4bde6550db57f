# SPDX-License-Identifier: Apache-2.0
"""Attention in FP8 (``fp8_dpa`` and ``fp8_mha`` of a recipe): when it is, what a call has of it.

By which recipe says that of the region, or the environment names another one. A `CustomRecipe`
gives quantizers, which have to be those of a recipe of attention: it has one scale for queries,
keys and values, and one for each of the other tensors, under delayed scaling of all of them or
current scaling. Recipes that are made here are attention's own: a region's recipe stays as it is,
and scaling state of a recipe of attention's own is updated with that of the region.

Queries, keys and values are cast to FP8, both products multiply FP8, and the output is read again
in the dtype of the queries. What is saved is in FP8. Which backward follows is said in one place,
`GRADIENT_RULE`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common.config import (
    TE_FP8_ATTENTION_BACKWARD,
    AttentionRecipe,
    attention_recipe,
)
from transformer_engine.common.operand_casts import Quantization
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    QParams,
    QuantizerRole,
    Recipe,
)
from transformer_engine.pytorch.attention.masks import Limits, deterministic
from transformer_engine.pytorch.attention.problem import CoreOptions, refuse_export
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.execution import plan_ops, recompute
from transformer_engine.pytorch.execution.recompute_frames import Frame, unread_history
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.module.call import ModuleCall
from transformer_engine.pytorch.module.custom_quantizers import ask, common_request, remembered
from transformer_engine.pytorch.module.region import Region
from transformer_engine.pytorch.scaling_state import arenas, scaling
from transformer_engine.pytorch.torchside.device import type_name
from transformer_engine.pytorch.torchside.modes import (
    beside_graph,
    constant_in_graphs,
    graph_task,
    in_transform,
    without_memory,
)
from transformer_engine.pytorch.torchside.tensor_kinds import ALIGNMENT

# ---- recipes -------------------------------------------------------------------------------------


BUILT = (DelayedScaling, Float8CurrentScaling)
"""Recipes that attention runs by: those with one scale of a whole tensor."""

_KINDS = {kind.__name__: kind for kind in (*BUILT, MXFP8BlockScaling)}
_OWN: dict[str, Recipe | None] = {}
"""Recipes of attention's own, by what they print: a graph can read one, but not make one."""


def asks_for_attention(recipe: Any) -> bool:
    """Return whether a region of a recipe asks for attention in FP8."""
    return recipe is not None and bool(
        getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False)
    )


def recipe_of(recipe: Any, module: Any) -> Any:
    """The recipe that an attention runs by in a region of `recipe`; None: in high precision.

    A `CustomRecipe` is asked for the quantizers of the module.
    ``TE_DPA_FP8_RECIPE`` changes the recipe of those regions that attend in FP8: "F16" to none,
    another name to a recipe with the region's ``fp8_dpa``, ``fp8_mha`` and format (that of
    ``TE_DPA_FP8_FORMAT`` under NVFP4). Delayed scaling then has the history of
    ``TE_DPA_FP8DS_AMAX_HISTLEN`` and its siblings.
    """
    if not asks_for_attention(recipe):
        return None
    if _has_own():
        format_name = "" if recipe.nvfp4() else recipe.fp8_format.name
        own = _own(type(recipe).__name__, format_name, recipe.fp8_dpa, recipe.fp8_mha)
        if own:
            return _OWN[own]
    if not recipe.custom():
        return recipe
    return remembered(module, recipe, lambda: resolve(recipe, type(module).__name__, module.name))


def unsupported_name(recipe: Recipe | None) -> str:
    """Name of a recipe of `recipe_of` that attention has no kernels for; else ""."""
    return "" if recipe is None or isinstance(recipe, BUILT) else type(recipe).__name__


@constant_in_graphs
def _hands_over(mha: bool) -> bool:
    """Return whether layers hand tensors over in FP8 under a recipe with this ``fp8_mha``.

    A constant in graphs, as `recipe_of` is: ``TE_DPA_FP8_RECIPE_MHA`` says so for attention that
    has a recipe of its own.
    """
    environment = attention_recipe()
    return environment.fp8_mha if environment.name else mha


@constant_in_graphs
def _has_own() -> bool:
    """Return whether the environment names a recipe for attention; in graphs, as when traced."""
    return attention_recipe().name != ""


@constant_in_graphs
def _own(kind: str, format_name: str, dpa: bool, mha: bool) -> str:
    """Key of the recipe in `_OWN`; "": it is the region's, a `kind` with this format.

    A constant in graphs: what the environment said when they were traced.
    """
    environment = attention_recipe()
    if environment.name == kind:
        return ""
    if environment.name == "F16":
        _OWN["F16"] = None
        return "F16"
    return _made(environment, format_name or environment.format, dpa, mha)


@functools.lru_cache(maxsize=64)
def _made(environment: AttentionRecipe, format_name: str, dpa: bool, mha: bool) -> str:
    options: dict[str, Any] = {"fp8_format": Format[format_name], "fp8_dpa": dpa, "fp8_mha": mha}
    if environment.name == "DelayedScaling":
        options["amax_compute_algo"] = environment.amax_compute_algo
        options["amax_history_len"] = environment.amax_history_len
        options["reduce_amax"] = environment.reduce_amax
    recipe = _KINDS[environment.name](**options)
    _OWN.setdefault(repr(recipe), recipe)
    return repr(recipe)


# ---- quantizers of a CustomRecipe ----------------------------------------------------------------


ROLES = ("qkv", "s", "do", "dp")
"""Queries, keys and values; weights of softmax; the gradients of the output, and of these weights.

The output, and the gradients of queries, keys and values, are cast as what they are made of.
"""


def resolve(recipe: CustomRecipe, kind: str, name: str | None) -> Recipe | None:
    """The recipe that an attention runs by; None: in high precision.

    NotImplementedError where its quantizers are none of a recipe of attention; else as
    `module.custom_quantizers.resolve`.
    """
    given = {role: ask(recipe, QuantizerRole("dpa", role, name or ""), kind) for role in ROLES}
    options = {"fp8_dpa": recipe.fp8_dpa, "fp8_mha": recipe.fp8_mha}
    requests = [each for each in given.values() if isinstance(each, DelayedScalingRequest)]
    if len(requests) == len(ROLES):
        return DelayedScaling(**vars(common_request(kind, requests)), **options)
    if all(_is_high_precision(each) for each in given.values()):
        return None
    for role, each in given.items():
        why = _refusal(role, each)
        if why:
            what = each if isinstance(each, DelayedScalingRequest) else type(each).__name__
            raise NotImplementedError(
                f"{kind}: CustomRecipe.qfactory gave {what!r} for {role!r} of attention: {why}"
            )
    return _current(recipe, given, options)


def _is_high_precision(given: Any) -> bool:
    from transformer_engine.pytorch.tensor import IdentityQuantizer

    return type(given) is IdentityQuantizer and given.dtype is None


def _refusal(role: str, given: Any) -> str:
    """Why attention by current scaling has no such cast; "": it has.

    It casts weights of softmax, which are at most 1, with the scale of that, as a delayed scale of
    such weights is; and nothing of its backward, which is in high precision.
    """
    from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer

    delayed = isinstance(given, DelayedScalingRequest)
    if role in ("do", "dp") and (delayed or _is_high_precision(given)):
        return ""
    if role == "s" and delayed:
        return ""
    if delayed or _is_high_precision(given):
        return (
            "all four roles are delayed, or in high precision, or 'qkv' is of "
            "Float8CurrentScalingQuantizer"
        )
    if type(given) is not Float8CurrentScalingQuantizer or given.with_amax_reduction:
        return (
            "it casts by Float8CurrentScalingQuantizer of its own tensors, or by a "
            "DelayedScalingRequest for all four roles"
        )
    if role in ("qkv", "s") and given.dtype != DType.kFloat8E4M3:
        return f"it multiplies E4M3, not {given.dtype.name}"
    return ""


def _current(recipe: CustomRecipe, given: dict[str, Any], options: dict[str, bool]) -> Recipe:
    """Current scaling as the quantizer of queries, keys and values has it."""
    heads, gradient = given["qkv"], getattr(given["do"], "dtype", None)
    made = Float8CurrentScaling(
        fp8_format=Format.E4M3 if gradient == DType.kFloat8E4M3 else Format.HYBRID,
        backward_override=recipe.backward_override,
        **options,
    )
    made.fp8_quant_fwd_inp = QParams(
        power_2_scale=heads.force_pow_2_scales, amax_epsilon=heads.amax_epsilon
    )
    return made


# ---- when ----------------------------------------------------------------------------------------


SLOTS = (9, 6)
"""Of the forward and backward scaling state; see ``te_node_desc`` for those that are used."""
OUTPUT_SLOT = 3
"""The one of the output, among those of the forward."""


def is_outside_graphs() -> bool:
    """Return whether no graph holds attention in this thread's region: quantizers are asked for."""
    state = current_state()
    return state.enabled and asks_for_attention(state.recipe) and state.recipe.custom()


def region_in_fp8(module: Any) -> bool:
    """Return whether the region of this thread runs a `DotProductAttention` in FP8."""
    state = current_state()
    return state.enabled and recipe_of(state.recipe, module) is not None


def in_force(module: Any) -> bool:
    """Return whether a call of a `DotProductAttention` that begins now runs in FP8.

    The region says so, or, in the recompute of a checkpoint, that the first forward did.
    """
    replay = repeated()
    return region_in_fp8(module) if replay is None else replay.knows(module)


def repeated() -> Frame | None:
    """The frame of the checkpoint whose forward is being repeated; None: none is."""
    if torch.compiler.is_compiling() or graph_task() == -1:
        return None
    return recompute.frames()[1]


def hands_fp8_to(core: Any, projection: Any, replay: Frame | None) -> bool:
    """Return whether a layer hands the output of its attention to the projection behind it in FP8.

    With ``fp8_mha``, where the projection multiplies inputs with one scale: its GEMM reads what
    attention has made, with attention's scale. `replay` is as of `repeated`.
    """
    if replay is None:
        state = current_state()
        recipe = state.recipe if state.enabled else None
    else:
        entry = replay.next_of(projection)
        recipe = None if entry is None else entry.recipe
    if recipe is None or recipe.custom() or not getattr(recipe, "fp8_mha", False):
        return False
    columns = core.num_attention_heads * core.hidden_size_per_attention_head_v
    return (
        _hands_over(recipe.fp8_mha)
        and (recipe.delayed() or recipe.float8_current_scaling())
        and columns % ALIGNMENT == 0
        and (region_in_fp8(core) if replay is None else replay.knows(core))
    )


def unsupported_recipe(module: Any) -> str:
    """Name of the recipe that attention would run by in this region, and does not; else ""."""
    state = current_state()
    return unsupported_name(recipe_of(state.recipe, module)) if state.enabled else ""


# ---- the backward --------------------------------------------------------------------------------


class BackwardFacts(NamedTuple):
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
    holds: Callable[[BackwardFacts], bool]


BLOCK = 64
"""Queries that cuDNN's kernel takes at a time."""

GRADIENT_RULE: tuple[Clause, ...] = (
    Clause("TE_FP8_ATTENTION_BACKWARD=0", lambda f: not f.switched_on),
    Clause("bf16_backward=True", lambda f: f.wide),
    Clause("current scaling: the kernel has to be told the scales of what it makes beforehand",
           lambda f: not f.delayed),
    Clause("a causal mask, a window or lengths: that of bf16 leaves blocks out, and is faster",
           lambda f: f.limited),
    Clause("heads that have not 128 channels: cuDNN has no kernel",
           lambda f: f.channels != (128, 128)),
    Clause("packed sequences: cuDNN has no kernel", lambda f: f.packed),
    Clause(f"CUDA, queries that are no multiple of {BLOCK}: what cuDNN 9.19 makes of the last ones "
           "is wrong",
           lambda f: f.device == "cuda" and not f.packed and not fills_blocks(f.queries)),
    Clause("dropout", lambda f: f.dropout > 0.0),
    Clause("repeatable gradients: the kernel's are not", lambda f: f.deterministic),
)  # fmt: skip
"""The backward runs in FP8 where none of these holds; else in high precision, on queries, keys,
values and output as they were saved in FP8."""


def why_in_high_precision(facts: BackwardFacts) -> str:
    """Why the backward of an attention in FP8 runs in high precision; "": it runs in FP8."""
    return next((clause.reason for clause in GRADIENT_RULE if clause.holds(facts)), "")


def fills_blocks(queries: int) -> bool:
    """Return whether so many queries are whole blocks of cuDNN's kernel."""
    return queries % BLOCK == 0


def backward_facts(recipe: Recipe, **problem: Any) -> BackwardFacts:
    """Return the facts of a call's backward, of which `problem` are those by name."""
    return BackwardFacts(
        recipe.delayed(), TE_FP8_ATTENTION_BACKWARD.get(), deterministic(), **problem
    )


def backward_in_fp8(module: Any, recipe: Recipe, limits: Limits, **problem: Any) -> bool:
    """Return whether a call's backward runs in FP8; `problem` are `BackwardFacts` by name."""
    channels = module.hidden_size_per_attention_head_k, module.hidden_size_per_attention_head_v
    limited = limits.query_lengths is not None or max(limits.window) >= 0
    packed = limits.packed is not None
    facts = backward_facts(recipe, channels=channels, limited=limited, packed=packed, **problem)
    return not why_in_high_precision(facts)


def _in_a_layer(module: Any, replay: Frame | None) -> tuple[Recipe, bool] | None:
    """(recipe, no amax is recorded) of an attention in a layer's plan; None: in high precision."""
    if replay is not None:
        entry = replay.next_of(module)
        return None if entry is None else (entry.recipe, entry.scales is not None)
    state = current_state()
    recipe = recipe_of(state.recipe, module) if state.enabled else None
    return None if recipe is None else (recipe, False)


def layer_key(module: Any, queries: int, replay: Frame | None) -> tuple | None:
    """Key of recipe, environment and size for an attention in a layer's plan.

    None: it is not in FP8. `replay` is as of `repeated`.
    """
    found = _in_a_layer(module, replay)
    if found is None:
        return None
    recipe, no_amax = found
    quantization = module._quantization_of(recipe, False)
    switched_on = TE_FP8_ATTENTION_BACKWARD.get()
    return quantization, switched_on, fills_blocks(queries), repr(recipe), no_amax


class LayerCasts(NamedTuple):
    """An attention in FP8 in a layer's plan."""

    quantization: Quantization
    fp8_gradient: bool  # its gradients are computed in FP8
    fp8_output: bool  # the projection behind it reads its output in FP8
    no_amax: bool  # it repeats a call, and records none
    recipe: str


def layer_casts(
    module: Any, replay: Frame | None, limits: Limits, fp8_output: bool, **problem: Any
) -> LayerCasts | None:
    """How an attention runs in a layer's plan; None: in high precision.

    `replay` is as of `repeated`, `fp8_output` as of `hands_fp8_to`; `problem` are `BackwardFacts`
    by name.
    """
    found = _in_a_layer(module, replay)
    if found is None:
        return None
    recipe, no_amax = found
    back = backward_in_fp8(module, recipe, limits, **problem)
    quantization = module._quantization_of(recipe, torch.compiler.is_compiling())
    return LayerCasts(quantization, back, fp8_output, no_amax, repr(recipe))


# ---- a call --------------------------------------------------------------------------------------


class Casts(NamedTuple):
    """What a call of an attention by itself has of FP8."""

    region: Region  # with the recipe of attention
    slots: scaling.Slots | None
    scales: Tensor | None  # as of `scaling_state_of`
    history: Tensor | None
    key: tuple  # quantization as codes and epsilons; gradients in FP8, no amaxes, output in FP8


def leaves_graph(more: CoreOptions, dropout: float, traced: bool) -> bool:
    """Return whether a call runs outside of the graph that is traced.

    Graphs have no dropout of these plans, and pass no quantized tensors on. NotImplementedError
    where there is no outside.
    """
    if more.fp8_output and in_transform():
        raise NotImplementedError(
            "DotProductAttention: fp8_output=True (or fp8_mha) in a transform of torch.func: leave "
            "it out there"
        )
    if not traced or (dropout == 0.0 and not more.fp8_output):
        return False
    if more.fp8_output:
        refuse_export("fp8_output=True (or fp8_mha)")
    refuse_export("dropout of attention in FP8", "set attention_dropout=0")
    return True


def region_of(module: Any, traced: bool) -> Region:
    """The region of a call that begins now, with the recipe of attention."""
    region = module._region(traced)
    if region.replay is not None:
        return region
    return region._replace(recipe=recipe_of(region.recipe, module))


def casts_of(
    module: Any,
    more: CoreOptions,
    like: Tensor,
    limits: Limits,
    traced: bool,
    *,
    gradient: bool,
    **problem: Any,
) -> Casts:
    """How a call that begins now is cast; `problem` are `BackwardFacts` by name."""
    region = region_of(module, traced)
    if not traced and without_memory(like):
        region = region._replace(blank=True)
    codes, epsilons = module._quantization_of(region.recipe, traced).flat()
    if traced:
        epsilons = tuple([plan_ops.as_constant(epsilon) for epsilon in epsilons])
    # Without a gradient no graph depends on how many queries there are.
    kind = {"device": type_name(like.device), "wide": more.wide_backward, **problem}
    fp8_gradient = gradient and backward_in_fp8(module, region.recipe, limits, **kind)
    slots, scales, history = scaling_state_of(module, region, like)
    no_amax = scales is not None and history is None
    key = codes, epsilons, fp8_gradient, no_amax, more.fp8_output
    return Casts(region, slots, scales, history, key)


def begin_call(module: Any, call: ModuleCall, casts: Casts, records: bool) -> None:
    """Give a call its state; `records`: a backward follows."""
    region = casts.region
    call.scales, call.unread_history, call.recipe = casts.scales, casts.history, region.recipe
    call.updates_backward = not region.blank and region.updates_backward(records)
    call.domain = (region.replay or region.state).domain


def end_call(module: Any, call: ModuleCall, casts: Casts) -> None:
    """Note that a call has run."""
    region = casts.region
    if call.updates_backward and region.replay is None:
        beside_graph(setattr, region.state, "owes_update", False)
    if region.record:
        module._record(
            region, casts.slots if region.replay is None else None, call.updates_backward
        )


def scaling_state_of(
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
