# SPDX-License-Identifier: Apache-2.0
"""Records of a checkpointed forward: an `Entry` of each module call, a `Run` of each plan's run.

Where frames are found, and who writes to them, see `recompute`.
"""

import weakref
from collections import deque
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from transformer_engine import _core
from transformer_engine.pytorch.torchside.modes import dispatch_modes, graph_task, unseen


class Entry(NamedTuple):
    """One module call inside a checkpointed forward."""

    module: Any  # whose call it was
    recipe: Any  # the `Recipe` in force; None: high precision
    slots: Any  # the module's scaling state, `Slots`, under delayed scaling; else None
    scales: torch.Tensor | None  # copy of its forward scales as they were
    measures: int  # flags of casts that measured, where there was none
    cache: tuple | None  # the quantized weight that the call kept or read
    kept: tuple[int, ...]  # parts of which it made that
    updates_backward: bool  # the backward state, of its region
    domain: Any  # the `Domain` that its thread updates
    layer: int = 0  # id of the layer that ran it as a part of its own plan; 0: it was called


class Run(NamedTuple):
    """One run of a forward's plan, by a graph, inside a checkpointed forward."""

    state: tuple[torch.Tensor, ...]  # copies of the scales and histories that it was given
    measures: bool  # it casts by what it measures where it was given no scale


_COMPILED = (
    ". Compiled code ran in that forward: if torch has given up compiling since then, raise "
    "torch._dynamo.config.recompile_limit"
)


class Frame:
    """Module calls of one checkpointed forward, in order for each module.

    High-precision calls are recorded too where it is `complete`. They are not under a reentrant
    checkpoint of torch, where finding the checkpoint costs each of them more than the rest of the
    call.
    """

    def __init__(self, complete: bool = True) -> None:
        self.complete = complete
        # By id of the module, which the entries hold; runs by what they are of.
        self._entries: dict[Hashable, list] = {}
        self._next: dict[Hashable, int] = {}
        self._pass = -1
        self._owes_update = False  # a repeated call would have made it, but had no backward
        self.measures = False  # a run does
        self._has_runs = False
        self.scope: Any = None  # of the plug-ins that the forward obeyed (`_core.selected`)

    def note_scope(self, scope: Any) -> None:
        """Keep the scope of the forward, which is that of its first call."""
        self.scope = self.scope or scope

    def record(self, entry: Entry) -> None:
        """Add a module call of the forward."""
        self.note_scope(_core.selected())
        self._entries.setdefault(id(entry.module), []).append(entry)

    def replay(self, module: Any) -> Entry | None:
        """Entry of the module call that is being repeated; None: it was not recorded.

        RuntimeError where the recompute calls a module that the forward did not call, or more
        often.
        """
        entries = self._entries.get(id(module), [])
        at = self._at(id(module))
        if at == len(entries):
            if not entries and not self.complete:
                return None
            raise RuntimeError(
                f"the recompute calls a {type(module).__name__} more than the {at} times that the "
                "checkpointed forward did; the function under the checkpoint must do the same at "
                "each call" + _COMPILED * self._has_runs
            )
        return self._take(id(module), at)

    def record_run(self, key: Hashable, run: Run) -> None:
        """Add a run of the forward."""
        self.note_scope(_core.selected())
        self._entries.setdefault(key, []).append(run)
        self.measures |= run.measures
        self._has_runs = True

    def replay_run(self, key: Hashable) -> Run:
        """The run that is being repeated; RuntimeError where the forward has no such run."""
        at = self._at(key)
        if at == len(self._entries.get(key, [])):
            raise RuntimeError(
                "the recompute of a checkpointed forward runs a compiled module in another way "
                "than that forward, most likely in another precision: use "
                "transformer_engine.pytorch.checkpoint, whose recompute is in the autocast region "
                "of its forward, or enter autocast in the function under the checkpoint"
            )
        return self._take(key, at)

    def record_pairs(self, pairs: list[torch.Tensor]) -> None:
        """Add random pairs of the forward."""
        self._entries.setdefault("pairs", []).append(pairs)

    def replay_pairs(self, pairs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The pairs that are drawn again; `pairs` where the forward recorded none."""
        at = self._at("pairs")
        return pairs if at == len(self._entries.get("pairs", [])) else self._take("pairs", at)

    def _at(self, key: Hashable) -> int:
        """How many of a key this repetition has taken."""
        current = graph_task()
        if current != self._pass:  # another backward through the same graph starts over
            self._pass = current
            self._next.clear()
            self._owes_update = False
        return self._next.get(key, 0)

    def _take(self, key: Hashable, at: int) -> Any:
        self._next[key] = at + 1
        return self._entries[key][at]

    def knows(self, module: Any) -> bool:
        """Return whether the forward has recorded a call of a module."""
        return id(module) in self._entries

    def next_of(self, module: Any, ahead: int = 0) -> Entry | None:
        """Record that `replay` finds after so many others of a module; None: there is none."""
        entries = self._entries.get(id(module), [])
        at = self._next.get(id(module), 0) if graph_task() == self._pass else 0
        return entries[at + ahead] if at + ahead < len(entries) else None

    def updates_backward(self, entry: Entry, records: bool) -> bool:
        """Return whether a repeated call updates the backward state.

        Its forward may have taken the flag where it could not tell that the function itself
        switches gradients off for this call: then it goes to the next one that has a backward.
        """
        due = entry.updates_backward or self._owes_update
        self._owes_update = due and not records
        return due and records


class Queue(Frame):
    """Calls of forwards that a program repeats by itself: the oldest of a module comes first."""

    def __init__(self) -> None:
        super().__init__(complete=False)
        self._queues: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    def note_scope(self, scope: Any) -> None:
        """Nothing: it is of many forwards."""

    def record(self, entry: Entry) -> None:
        """Add a module call; the entry must not keep the module, which is its key."""
        self._queues.setdefault(entry.module, deque()).append(entry._replace(module=None))

    def knows(self, module: Any) -> bool:
        """Return whether there is an entry of a module."""
        return bool(self._queues.get(module))

    def next_of(self, module: Any, ahead: int = 0) -> Entry | None:
        """Record that `replay` finds after so many others of a module; None: there is none."""
        queue = self._queues.get(module, ())
        return queue[ahead] if ahead < len(queue) else None

    def replay(self, module: Any) -> Entry | None:
        """Take the oldest entry of a module; None: there is none."""
        queue = self._queues.get(module)
        return queue.popleft()._replace(module=module) if queue else None

    def replay_run(self, key: Hashable) -> Run:
        """Take the oldest run of a key; RuntimeError where there is none."""
        self._next.clear()
        run = super().replay_run(key)
        self._entries[key].pop(0)
        return run


def unread_history(entry: Entry) -> torch.Tensor | None:
    """Where a repeated call records amaxes, for nobody; None: it is to record none.

    A mode that watches has to see the operators of the forward, in the same order: a selective
    checkpoint puts the results of that one in the place of some. So the same plans run.
    """
    if entry.scales is None or not dispatch_modes():
        return None
    with unseen():
        return torch.zeros_like(entry.scales).unsqueeze(0)
