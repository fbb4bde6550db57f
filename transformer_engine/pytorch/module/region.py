# SPDX-License-Identifier: Apache-2.0
"""What is in force for one call of a module: the recipe, and the checkpoints around it."""

from typing import NamedTuple

import torch

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.execution import recompute
from transformer_engine.pytorch.execution.recompute_frames import Entry, Frame
from transformer_engine.pytorch.execution.thread_state import RegionState

NO_FRAMES: list = []
"""`Region.record` of a call that no checkpoint records; stays empty."""


class Region(NamedTuple):
    """State in force for one call of a module, or of a layer (`layer_region.LayerRegion`)."""

    state: RegionState  # of the thread
    recipe: Recipe | None  # how to quantize; None: high precision
    record: list = NO_FRAMES  # frames of the checkpoints that record this call
    frame: Frame | None = None
    """Of the checkpoint whose forward is being repeated; of one module None without `replays`."""
    replays: tuple[Entry, ...] = ()
    """Calls that this one repeats: of a layer those of its modules with linear layers and of
    attentions in FP8; () where none is known."""
    resolved: tuple[Recipe | None, ...] = ()
    """Of a layer under a `CustomRecipe` what each of these modules follows; else ()."""
    traced: bool = False  # the call is part of a graph that is being traced
    exported: bool = False
    """That of `torch.export`: a forward without a backward, over scales that stay as they are."""
    blank: bool = False  # the tensors have no memory: the call makes and changes no state
    joins: bool = True
    """Rows of a rank are whole tiles, so that what each rank casts by tiles is put together."""

    @property
    def replay(self) -> Entry | None:
        """The call of one module that this one repeats."""
        return self.replays[0] if self.replays else None

    @property
    def repeats(self) -> bool:
        """True where the call is to be repeated, or repeats one."""
        return bool(self.record or self.replays)

    def recipe_of(self, number: int) -> Recipe | None:
        """How one of the modules with linear layers quantizes."""
        return self.resolved[number] if self.resolved else self.recipe

    def updates_backward(self, records: bool) -> bool:
        """Return whether the backward of a call is the one that updates the backward state.

        `records`: it has one. To be asked once for each call, which takes the flag when it has
        succeeded: one that raises leaves it to the next. Under a reentrant checkpoint gradients are
        off, and it takes the flag for its repetition; a repetition may itself be such a forward.
        """
        if not records and self.record and not torch.is_grad_enabled():
            due = bool(self.replays) or self.state.owes_update
            records = due and recompute.in_reentrant_forward()
        if self.replays and self.frame is not None:
            return any([self.frame.updates_backward(entry, records) for entry in self.replays])
        return records and self.state.owes_update
