# SPDX-License-Identifier: Apache-2.0
"""What is in force for one call of a layer: the recipe, and the checkpoints around it.

A checkpoint keeps an entry of each module (`recompute_frames.Entry`), whether the module was called
or a layer did its work. So either way can be repeated; where the entries say which one it was, the
repetition takes the same, since `torch.utils.checkpoint` compares what both save.
"""

from collections.abc import Sequence
from typing import Any

import torch

from transformer_engine.pytorch.execution.recompute import frames, may_concern
from transformer_engine.pytorch.execution.recompute_frames import Entry, Frame
from transformer_engine.pytorch.execution.thread_state import RegionState
from transformer_engine.pytorch.module import custom_quantizers
from transformer_engine.pytorch.module.region import NO_FRAMES, Region
from transformer_engine.pytorch.torchside.modes import graph_task


class LayerRegion(Region):
    """State in force for one call of a layer."""

    __slots__ = ()

    def of(self, number: int) -> Region:
        """The same for one of the modules with linear layers."""
        entry = self.replays[number : number + 1]
        found = Region(self.state, self.recipe_of(number), self.record, None, entry)
        return found._replace(joins=self.joins)

    def with_cores(self, owners: Sequence) -> "LayerRegion | None":
        """The same where attentions have scaling state, too; None: a call of one is not known.

        `owners` are all modules with such state.
        """
        if len(self.replays) in (0, len(owners)):
            return self
        found = _next_of(self.frame, owners)
        return None if found is None else self._replace(replays=tuple(found))

    def leave(
        self, layer: int, owners: Sequence, call: Any, caches: Sequence, updates_backward: bool
    ) -> None:
        """Leave to the checkpoints what a repetition needs, of each of the owners of a call.

        `layer` is its id, `caches` are those of the run, `updates_backward` as of the method.
        """
        made = {part for part, _ in call.plans.writes_caches}
        known, begin = {*made, *call.plans.reads_caches}, 0
        for i, (owner, slots) in enumerate(zip(owners, call.owner_slots, strict=True)):
            parts = getattr(owner, "LINEARS", None)  # None: it is an attention
            of = range(begin, begin + len(parts or ()))
            begin = of.stop
            cache = tuple([caches[part] for part in of]) if known.intersection(of) else None
            kept = tuple([part - of.start for part in of if part in made])
            recipe = owner._recipe_in_force() if parts is None else self.recipe_of(i)
            region = Region(self.state, recipe, self.record, None, self.replays[i : i + 1])
            owner._record(region, slots, updates_backward and i == 0, cache, kept, layer)


def region_of(state: RegionState, modules: Sequence, layer: int) -> LayerRegion | None:
    """The region of a call of a layer, whose id is `layer`; takes nothing from the checkpoints.

    `modules` are those with linear layers. None where the layer has to call them.
    """
    recipe = state.recipe if state.enabled else None
    record, frame, replays, resolved = NO_FRAMES, None, (), ()
    if may_concern(torch.is_grad_enabled(), recipe is not None):
        record, frame = frames()
        if frame is None and recipe is not None and graph_task() != -1:
            return None  # which they refuse
        if frame is not None and (frame.complete or any(map(frame.knows, modules))):
            found = _next_of(frame, modules)
            if found is None or any([entry.layer != layer for entry in found]):
                return None
            recipe, replays = found[0].recipe, tuple(found)
            if any([custom_quantizers.is_custom(entry.recipe) for entry in found]):
                resolved = tuple([entry.recipe for entry in found])
        elif frame is not None and recipe is not None:
            return None
    if recipe is not None and recipe.custom() and not replays:
        for module in modules:
            module._note_recipe(recipe)
        resolved = tuple([module._resolved(recipe, False) for module in modules])
    if state.calibrating and None in (resolved or (recipe,)):
        return None  # they record amaxes
    return LayerRegion(state, recipe, record, frame, replays, resolved)


def _next_of(frame: Frame, owners: Sequence) -> list[Entry] | None:
    """The calls of modules that a frame has next; None: not of all of them."""
    found: list[Entry] = []
    for i, owner in enumerate(owners):
        entry = frame.next_of(owner, sum([other is owner for other in owners[:i]]))
        if entry is None:
            return None
        found.append(entry)
    return found
