# SPDX-License-Identifier: Apache-2.0
"""Microbatches of a step: the quantized weights that they share, and their main gradients."""

import enum
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.execution.thread_state import RegionState
from transformer_engine.pytorch.module.quantized import forms_held
from transformer_engine.pytorch.torchside.device import is_any_captured
from transformer_engine.pytorch.torchside.modes import dispatch_modes
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized


class Microbatch(enum.Enum):
    """Value of ``is_first_microbatch`` that stands for one which the program has not given."""

    BY_ITSELF = enum.auto()
    """The module has ``cache_weights``: it reads a cached weight where a new cast would have the
    same bits. False as a bool, since it does not begin a step."""

    def __bool__(self) -> bool:
        return False


class Source(NamedTuple):
    """A tensor and its memory, neither of which it keeps alive.

    A storage that is referred to weakly keeps its address, so no other one is taken for it: its
    memory may have gone to another storage, which `weight.data = new` puts in its place.
    """

    tensor: weakref.ref
    storage: StorageWeakRef

    @classmethod
    def of(cls, tensor: Tensor) -> "Source":
        """Refer to a tensor as it is now."""
        return cls(weakref.ref(tensor), StorageWeakRef(tensor.untyped_storage()))

    def is_that(self, tensor: Tensor) -> bool:
        """Return whether it is this very tensor, over this very storage."""
        return self.tensor() is tensor and self.storage.cdata == tensor.untyped_storage()._cdata


class WeightCache(NamedTuple):
    """The quantized weight, and of what it is the quantized form."""

    tensors: tuple[Tensor, ...]  # row-wise and column-wise data, their scales
    key: tuple  # places, versions and dtype of the weight, recipe, whether inference mode made it
    sources: tuple[Source, ...]  # the tensors that the weight consisted of
    updates: int  # of delayed scaling's scales in the process, before it was made

    @classmethod
    def of(cls, tensors: tuple, sources: tuple[Tensor, ...], recipe: Any) -> "WeightCache":
        """Keep what a forward made of `sources` under a recipe."""
        kept = tuple(map(Source.of, sources))
        return cls(tensors, cls._key_of(sources, recipe), kept, plan_ops.scaling_updates())

    def holds(self, sources: tuple[Tensor, ...], recipe: Any) -> bool:
        """Return whether it is of these very tensors and their values now, under this recipe."""
        if self.key != self._key_of(sources, recipe):
            return False  # they changed, moved, or another recipe is in force
        return all(kept.is_that(t) for kept, t in zip(self.sources, sources, strict=True))

    @staticmethod
    def _key_of(sources: tuple[Tensor, ...], recipe: Any) -> tuple:
        values = [
            (t.data_ptr(), t.stride(), -1 if t.is_inference() else t._version) for t in sources
        ]
        return (
            *values,
            sources[0].dtype,
            sources[0].device,
            repr(recipe),
            torch.is_inference_mode_enabled(),  # what it makes can not be saved for a backward
        )


def held_caches(
    module: Any, first_microbatch: bool | Microbatch, parts: Sequence, recipe: Any
) -> list[tuple | None]:
    """Of each part the quantized weight that a microbatch reads; None where it makes one.

    `parts` are the `operands.LinearTensors` of a call of the module. ``is_first_microbatch=False``
    reads the cached weight, even if the scales of delayed scaling have changed since. A module with
    ``cache_weights`` reads it only where a new cast would have the same bits: not after a change of
    scales, and not of weights made in inference mode, which have no version that tells of changes.
    """
    delayed = recipe.delayed()
    if first_microbatch and (delayed or not module.cache_weights):
        return [None] * len(parts)
    same_bits = bool(first_microbatch) or first_microbatch is Microbatch.BY_ITSELF
    now = plan_ops.scaling_updates()
    return [
        old.tensors
        if old is not None
        and not (same_bits and delayed and old.updates != now)
        and not (same_bits and any(w.is_inference() for w in part.weights))
        and old.holds(part.weights, recipe)
        else None
        for old, part in zip(module._weight_caches, parts, strict=True)
    ]


def microbatch(
    modules: Sequence, first_microbatch: bool | None, state: RegionState
) -> bool | Microbatch | None:
    """``is_first_microbatch`` of a call: as given, or that modules cache by themselves.

    Not while a CUDA graph is captured, which would read a cast that nobody makes again, and under
    delayed scaling only without gradients: there each cast counts, for the history of amaxes.
    """
    if (
        first_microbatch is not None
        or not state.enabled
        or not all(m.cache_weights for m in modules)
    ):
        return first_microbatch
    if state.recipe.custom():  # whether a cast counts, its quantizers say
        return None
    if state.recipe.delayed() and torch.is_grad_enabled():
        return None
    return None if is_any_captured() else Microbatch.BY_ITSELF


def keep_caches(modules: Sequence, caches: Sequence, parts: Sequence, recipes: Sequence) -> None:
    """Let the modules of a call keep the quantized weights that it made, among those it read.

    `recipes` are those that the modules follow.
    """
    made = iter(caches)
    for module, own, recipe in zip(modules, parts, recipes, strict=True):
        kept = []
        for old, new, part in zip(module._weight_caches, made, own, strict=False):
            if is_quantized(part.weights[0]):  # it is its own cast
                kept.append(None)
                continue
            same = old is not None and old.tensors is new
            kept.append(old if same else WeightCache.of(new, part.weights, recipe))
        module.__dict__["_weight_caches"] = tuple(kept)  # torch's setattr takes longer


def caches_to_repeat(replay: Any, count: int, watched: bool) -> list[tuple | None]:
    """Of each part the quantized weight that a repeated call reads; None where it casts.

    `replay` is the `recompute_frames.Entry` of the call that it repeats. Where a dispatch mode has
    `watched` that one, it casts again what that one cast, so that the same operators run.
    """
    caches = [None] * count if replay.cache is None else [*replay.cache[:count]]
    if watched:
        for part in replay.kept:
            caches[part] = None
    return caches


def microbatch_of(
    modules: Sequence,
    first_microbatch: bool | Microbatch | None,
    state: RegionState,
    key: tuple,
    tensors: tuple = (),
    region: Any = None,
) -> tuple[tuple[Sequence, tuple], tuple]:
    """Return caches and weights of a run, and the key with what depends on these.

    As of `call.ModuleCall`. `first_microbatch` is that of `microbatch`, `key` that of the call;
    `tensors` are all of the call, where there are quantized weights among those of the modules.
    `region` is as of `call_key.KeptCall.holds`, or a `layer_region.LayerRegion`.
    """
    caches, weights = [], ()
    if region is None:
        recipes, replays = [state.recipe if state.enabled else None] * len(modules), ()
    else:
        recipes, replays = [region.recipe_of(i) for i in range(len(modules))], region.replays
    parts = [module._linear_tensors() for module in modules]
    cached = [each for each in replays if each.cache is not None]
    reads_caches = len(cached) > 0 if replays else first_microbatch is not None
    if (reads_caches or tensors) and any([recipe is not None for recipe in recipes]):
        for i, (module, own, recipe) in enumerate(zip(modules, parts, recipes, strict=True)):
            if not reads_caches or recipe is None:
                caches += [None] * len(own)
            elif not replays:
                caches += held_caches(module, first_microbatch, own, recipe)
            else:
                caches += caches_to_repeat(replays[i], len(own), dispatch_modes() > 0)
        if tensors:
            forms_held(modules, parts, caches, recipes[0], tensors)
        key = (key, *[None if cache is None else cache[1] is None for cache in caches])
        key = (*key, *[each.kept for each in replays])
    if any(module.fuse_wgrad_accumulation for module in modules):
        weights = tuple([part.weights[0] for own in parts for part in own])
        main = [getattr(weight, "main_grad", None) for weight in weights]
        overwrites = [bool(getattr(w, "overwrite_main_grad", False)) for w in weights]
        key = (
            key,
            bool(first_microbatch),
            *overwrites,
            *[getattr(into, "dtype", None) for into in main],
        )
    return (caches, weights), key


def reads(call: Any, caches: Sequence) -> bool:
    """Return whether these are what a call reads: another thread may have kept some since."""
    return call.plans.reads_caches == tuple(i for i, c in enumerate(caches) if c is not None)
