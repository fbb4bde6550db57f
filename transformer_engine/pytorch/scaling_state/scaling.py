# SPDX-License-Identifier: Apache-2.0
"""Delayed-scaling state: a module's slots, and their update.

A module owns a few consecutive slots of a forward and of a backward chunk (`Slots`; see `arenas`
for where they lie). One launch updates a whole chunk and one all-reduce reduces it, however many
modules share it. Native code always gets the whole chunk and a slot number, never a view: views of
state do not survive the functionalisation that `torch.compile` does.
"""

import os
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from transformer_engine import _core
from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.execution.thread_state import Domain, current_state
from transformer_engine.pytorch.scaling_state import reduction
from transformer_engine.pytorch.scaling_state.arenas import (
    ARENAS_LOCK,
    DIRECTIONS,
    SLOTS_PER_CHUNK,
    Arena,
    Chunk,
    Rule,
    all_domains,
    drop_arenas,
    key_of,
    own_domain,
    rank_count,
    sweep,
    take,
)
from transformer_engine.pytorch.torchside.device import (
    has_streams,
    is_captured,
    is_capturing,
    outside_capture,
)
from transformer_engine.pytorch.torchside.locks import Lock
from transformer_engine.pytorch.torchside.modes import (
    compilation,
    constant_in_graphs,
    faking,
    real_tensors,
)

_TRACED = threading.local()
"""``last``: the compilation in which the thread traced an update last."""

_FRESH = {"dtype": torch.float32, "device": "cpu"}
"""How state is made, whatever defaults of torch are set."""

_UPDATING = Lock()
"""Held by the thread that updates: native updates let the GIL go."""


class Slots:
    """A module's slots under one recipe: the handle that modules and pending backwards hold.

    The slots are free for others once the last reference to the handle is gone (and the next slots
    are taken, or the next scales made), so a backward still to come keeps them although its module
    died or moved on. Those over several ranks are free after `reset` alone.
    """

    def __init__(
        self,
        device: torch.device,
        rule: Rule,
        group: Any,
        counts: tuple[int, int],
        kind: str,
        number: int,
        former: "Slots | None" = None,
    ) -> None:
        self.kind, self.number = kind, number  # of the module: see `slots_of`
        self.identity = rule.identity
        self.device = device
        self.group = group  # that amaxes are reduced over
        self.counts = counts
        state = current_state()
        self.domain = own_domain(state) if former is None else former.domain  # updated with it
        self.live = True  # until `reset` drops all state
        # False where calls must take other slots: not live, or made for another number of ranks.
        self.current = True
        # By key, the module's slots over several ranks: coming back to a recipe takes no more.
        self.kept: dict[tuple, Slots] = {} if former is None else former.kept
        self.key = key_of(device, rule, group)  # of their arena
        self.initial = rule.initial
        # Flags of casts that measure, as long as one of the slots has recorded nothing.
        self.measures = sum(_MEASURES.values()) if rule.initial == 0.0 else 0
        # Called when these are others: what calls are bound to has changed.
        self.changed: Callable[[], Any] = lambda: None
        _refuse_capture(device)
        sweep()
        self._take(rule)
        if self.domain is state.domain:
            state.label = self.domain.label
        if self.key[-1] > 1:
            self.kept[self.key] = self
        _Program.length = rule.length

    @ARENAS_LOCK.held
    def _take(self, rule: Rule) -> None:
        """Keep the whole chunks, and the first slot in each."""
        forward, backward = take(self, self.domain, self.key, rule, self.group, self.counts)
        chunk, self.forward_slot = forward
        self.forward_scale, self.forward_history = chunk.scale, chunk.history
        other, self.backward_slot = backward
        self.backward_scale, self.backward_history = other.scale, other.history
        self._chunks = chunk, other
        _HANDLES.add(self)

    def chunk(self, direction: str) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(scale, history, first slot) of a direction."""
        if direction == "forward":
            return self.forward_scale, self.forward_history, self.forward_slot
        return self.backward_scale, self.backward_history, self.backward_slot

    def settle(self, *directions: str) -> None:
        """`settle` of the domain; of both directions where none is named."""
        if reduction.STARTED:
            settle(self.domain, *directions)

    def views(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The state, not copied: direction -> (scale[n], history[length, n])."""
        self.settle()
        out = {}
        for direction, count in zip(DIRECTIONS, self.counts, strict=True):
            scale, history, first = self.chunk(direction)
            last = first + count
            out[direction] = (scale[first:last], history[:, first:last])
        return out

    def values(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Copies of `views`, contiguous; scale 1 where nothing was recorded, whatever the rule."""
        return {
            direction: (torch.where(scale == 0.0, 1.0, scale), rows.clone())
            for direction, (scale, rows) in self.views().items()
        }

    def fits(self, values: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Return whether the histories of such state are as long as these."""
        return all(len(self.chunk(d)[1]) == len(values[d][1]) for d in DIRECTIONS)

    def load(self, values: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take over state from another handle, device or length.

        A shorter history keeps the leading rows, a longer one gets rows of zeros at the end. A slot
        that has recorded nothing gets the scale that this rule has for such.
        """
        plan_ops.scaling_updates(made=True)
        with real_tensors():
            for direction, (scale, history) in self.views().items():
                old_scale, old_history = values[direction]
                rows = min(len(history), len(old_history))
                # Row 0 is of no update yet.
                unknown = ~old_history[1:].any(0) & (old_scale == 1.0)
                scale[:] = torch.where(unknown, self.initial, old_scale).to(scale.device)
                history[:rows] = old_history[:rows].to(history.device)
                history[rows:] = 0.0
        if self.initial == 0.0:  # some may be unknown again
            for chunk in self._chunks:
                chunk.arriving = None
            self.measures = sum(_MEASURES.values())
            self.changed()


_HANDLES: "weakref.WeakSet[Slots]" = weakref.WeakSet()


class _Program:
    """State of the whole program, until `reset`."""

    length: int | None = None
    """Rows of the histories of the newest slots; None: delayed scaling has not run yet."""
    warned = False
    """It was told of `warn_of_fresh_scales`."""
    waits_at_once = False
    """It has graphs that make scales, and graphs read scales without calling `settle`: so each
    reduction is waited for where it is started."""
    switches: ClassVar[set[tuple[str, str]]] = set()
    """Pairs of recipes of which it was told by `warn_of_switch`."""


class BlankSlots:
    """Stands for the slots of a module in a call on tensors without memory, such as `like`.

    Chunks of the right shapes that are on no arena: nothing is read from them, nothing written, and
    they go with the call.
    """

    forward_slot = backward_slot = 0

    def __init__(self, rule: Rule, like: torch.Tensor) -> None:
        def make(*shape: int) -> torch.Tensor:
            return like.new_empty(shape, dtype=torch.float32, requires_grad=False)

        self.initial = rule.initial
        self.measures = sum(_MEASURES.values()) if rule.initial == 0.0 else 0
        self.forward_scale, self.backward_scale = make(SLOTS_PER_CHUNK), make(SLOTS_PER_CHUNK)
        self.forward_history = make(rule.length, SLOTS_PER_CHUNK)
        self.backward_history = make(rule.length, SLOTS_PER_CHUNK)

    def settle(self, *directions: str) -> None:
        """Nothing: no rank shares them."""


def expected_length(recipe: Any) -> int | None:
    """Rows of the history that a module without state will probably have.

    By the recipe in force where it is one of delayed scaling, else by the newest state of the
    program; None where neither says that the program runs delayed scaling.
    """
    if recipe is not None and recipe.delayed():
        return recipe.amax_history_len
    return _Program.length


def fresh_values(length: int, counts: tuple[int, int]) -> dict[str, tuple]:
    """State before anything was measured, as `Slots.values` gives it, on the CPU."""
    return {
        direction: (torch.ones(n, **_FRESH), torch.zeros(length, n, **_FRESH))
        for direction, n in zip(DIRECTIONS, counts, strict=True)
    }


def is_fresh(values: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Return whether nothing was measured yet."""
    return all(bool((s == 1).all()) and not bool(h.any()) for s, h in values.values())


def warn_of_fresh_scales() -> None:
    """Say, once, that a checkpoint was loaded in a way that leaves scales behind."""
    if _Program.warned:
        return
    _Program.warned = True
    warnings.warn(
        "a checkpoint was loaded in place, as torch.distributed.checkpoint does, into modules that "
        "offered no scaling state: their delayed scaling starts from scale 1. If FP8 training "
        "saved it, take the state dict and load it inside `with autocast(recipe=...)` of the "
        "recipe that trains; if it holds no scales, load it under TE_EXTRA_STATE=ignore",
        stacklevel=2,
    )


def warn_of_switch(kind: str, before: str, now: str) -> None:
    """Say, once for each pair, that a module goes on to train under another kind of recipe."""
    if (before, now) in _Program.switches:
        return
    _Program.switches.add((before, now))
    warnings.warn(
        f"{kind}: it has trained under {before} and goes on under {now}: its operands are rounded "
        "in another way from here on. Quantized weights are made anew; scales that delayed scaling "
        "has found stay with the module until it comes back (reset_fp8_meta_tensors() drops them)",
        stacklevel=2,
    )


def _refuse_capture(device: torch.device) -> None:
    """State made while a graph is captured would live in the graph's own memory pool."""
    if is_capturing(device):
        raise RuntimeError(
            "a module runs under this FP8 recipe for the first time while a CUDA graph is being "
            "captured; run it once before the capture (warm-up), with the same recipe"
        )


def slots_of(
    current: Slots | None,
    rule: Rule,
    group: Any,
    device: torch.device,
    counts: tuple[int, int],
    kind: str,
    number: int,
) -> Slots:
    """Slots for a recipe: `current` where it fits, else new ones with its values.

    State carries over when the recipe's settings, the device or the group change. `counts` are the
    slots that the module needs, forward and backward; `kind` says which one it is, in the same
    words on all ranks, and `number` has the order in which modules were made.
    """
    slots = None if current is None else current.kept.get(key_of(device, rule, group))
    if slots is None or not slots.current:
        slots = Slots(device, rule, group, counts, kind, number, current)
    if current is not None and current.live and current is not slots:
        slots.load(current.values())
    return slots


def _retire(arena: Arena) -> None:
    """Let modules take other slots: the number of ranks has changed since they took these.

    Until then the ranks had no reason to place them alike.
    """
    arena.retired = True
    for handle in list(_HANDLES):
        if handle.domain is arena.domain and handle.key == arena.key:
            handle.current = False


def _start_reductions(arenas: list[Arena]) -> list[Arena]:
    """Start the reductions of the amaxes of this step; the arenas that have one now."""
    started = []
    for arena in arenas:
        if arena.retired:
            continue
        if arena.ranks != rank_count(arena.rule, arena.group):
            _retire(arena)
        elif arena.ranks > 1:
            with real_tensors():
                reduction.start(arena)
            started.append(arena)
    return started


def _reduce_in_graph(arenas: list[Arena]) -> None:
    """MAX all-reduce of the amaxes of a step over the recipes' groups, as a part of a graph."""
    for arena in arenas:
        if arena.retired or arena.ranks == 1:
            continue
        chunks = list(arena.chunks)
        together = torch.cat([chunk.history[0] for chunk in chunks])
        most = torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(together, op=most, group=arena.group)
        for chunk, amaxes in zip(chunks, together.split(SLOTS_PER_CHUNK), strict=True):
            chunk.history[0].copy_(amaxes)


def _update_with_torch(arena: Arena, chunk: Chunk) -> None:
    """The update in torch operations.

    It differs from the fused one as documented: the history rolls for every slot, and a NaN among
    the amaxes reaches the maximum, so that the scale is kept.
    """
    rule = arena.rule
    fp8_max = rule.fp8_max[DIRECTIONS.index(arena.direction)]
    with torch.no_grad():
        history = chunk.history
        if callable(rule.amax):
            amax = rule.amax(history)
        elif rule.amax == "max":
            amax = history.amax(dim=0)
        else:
            amax = history[0].clone()
        if rule.scale is not None:
            chunk.scale.copy_(rule.scale(amax, chunk.scale, fp8_max, rule.recipe))
        else:
            # A number divided by a tensor is rounded twice in torch; two tensors once, as in the
            # kernel.
            scale = torch.full_like(amax, fp8_max * 2.0**-rule.margin) / amax
            scale = torch.where(torch.isinf(scale), torch.finfo(torch.float32).max, scale)
            usable = torch.isfinite(amax) & (amax > 0)
            chunk.scale.copy_(torch.where(usable, scale, chunk.scale))
        history.copy_(torch.roll(history, -1, 0))
        history[0].zero_()


def update(direction: str, domain: Domain) -> None:
    """Turn the amaxes collected since the last update into scales, for every module of a domain.

    The domain is that of the thread whose region ends ("forward"), or which ran the forward of a
    backward that has ended ("backward"). Where several ranks share the amaxes their reduction is
    started, and `settle` makes the scales.
    """
    _update_all(direction, domain.joined)


def settle(domain: Domain, *directions: str) -> None:
    """Wait for the reductions that updates of a domain have started, and make its scales of them.

    `directions` are those whose scales are about to be read, both where none is named. Nothing
    while a graph is traced. RuntimeError where the ranks do not agree on what they reduce.
    """
    if torch.compiler.is_compiling() or not reduction.STARTED:
        return
    for arena in reduction.started(domain, directions or DIRECTIONS):
        with outside_capture(arena.device):
            _finish(arena)


def _finish(arena: Arena) -> None:
    with real_tensors():
        found = reduction.finish(arena)  # no lock is held: threads wait for other ranks' threads
        if found is not None:
            _update_reduced(arena, found)


def update_now(direction: str) -> None:
    """Update this thread's domain; all in a thread that has run no module (a backward's)."""
    domains = current_state().domain.joined
    if not any(domain.has_state() for domain in domains):
        domains = all_domains()
    _update_all(direction, domains)
    for domain in list(domains):
        settle(domain, direction)


def _update_all(direction: str, domains: list[Domain]) -> None:
    # Over copies: a module that dies meanwhile, or another thread's first one, changes the arenas.
    if torch.compiler.is_compiling():
        _note_traced()
        arenas = [a for domain in list(domains) for a in list(domain.arenas[direction].values())]
        _reduce_in_graph(arenas)
        _update(arenas)
        return
    if not any([domain.arenas[direction] for domain in domains]):
        return  # nothing has state
    if faking():
        return  # no amax was recorded
    sweep()
    for domain in list(domains):
        settle(domain, direction)
    arenas = [a for domain in list(domains) for a in list(domain.arenas[direction].values())]
    started = _start_reductions(arenas)
    _update_alone([arena for arena in arenas if arena not in started])
    plan_ops.scaling_updates(made=True)  # those of torch operations too
    if any(is_capturing(arena.device) for arena in started):
        _Program.waits_at_once = True
    if _Program.waits_at_once:
        for arena in started:
            _finish(arena)


@constant_in_graphs
def _note_traced() -> None:
    _TRACED.last = compilation()
    _Program.waits_at_once = True
    for arena in reduction.started(current_state().domain, DIRECTIONS):
        _finish(arena)


def is_traced() -> bool:
    """Return whether the graph that is being traced has an update, over the state of that time."""
    now = compilation()
    return now is not None and getattr(_TRACED, "last", None) is now


def extent() -> tuple[int, int]:
    """Extent of an update of this thread: it changes where there is more, and not always."""
    return Chunk.made, len(current_state().domain.joined)


def _update(arenas: list[Arena]) -> None:
    for arena in arenas:
        rule = arena.rule
        for chunk in list(arena.chunks):
            if rule.fused:
                fp8_max = rule.fp8_max[DIRECTIONS.index(arena.direction)] * 2.0**-rule.margin
                plan_ops.scaling_update(
                    chunk.scale, chunk.history, fp8_max, rule.amax == "most_recent"
                )
            else:
                _update_with_torch(arena, chunk)
            if rule.initial == 0.0 and not torch.compiler.is_compiling():
                _stop_measuring(arena, chunk)


_MEASURES = {"forward": _core.LINEAR_MEASURE_OPERANDS, "backward": _core.LINEAR_MEASURE_GRAD}
"""The flag by which the casts of a direction measure first."""
_CAST = {"forward": (3, (0, 1)), "backward": (2, (0,))}
"""Of each direction how many slots a linear layer has, and the numbers of those that its operands
are cast with. The last one is for a result that is returned quantized."""


def _stop_measuring(arena: Arena, chunk: Chunk) -> None:
    """Take the measuring flags off modules all of whose slots have recorded an amax.

    Whether a cast measures is decided on the device, by its scale, so it does not matter when the
    host learns that no slot needs it. On a GPU this reads the copy that an earlier update has
    started, and does not wait.
    """
    flag = _MEASURES[arena.direction]
    handles = [h for h in list(_HANDLES) if h.measures & flag and h.key == arena.key]
    handles = [h for h in handles if h.chunk(arena.direction)[0] is chunk.scale]
    if not handles:
        chunk.arriving = None
        return
    scales = chunk.scale
    if has_streams(scales.device.type):
        if is_captured(scales):
            return
        if chunk.arriving is not None and not chunk.arriving[1].query():
            return
        former, chunk.arriving = chunk.arriving, reduction.copy_of(chunk.scale)
        scales = None if former is None else former[0]
    if scales is None:
        return
    known = (scales != 0.0).tolist()
    each, cast = _CAST[arena.direction]
    for handle in handles:
        first = handle.chunk(arena.direction)[2]
        count = handle.counts[DIRECTIONS.index(arena.direction)]
        if all(known[first + i] for i in range(count) if i % each in cast):
            handle.measures &= ~flag
            handle.changed()


_update_alone = _UPDATING.held(_update)


@_UPDATING.held
def _update_reduced(arena: Arena, found: reduction.Reduction) -> None:
    """Update an arena whose amaxes are reduced, unless another thread has."""
    if reduction.forget(arena, found):
        _update([arena])
        plan_ops.scaling_updates(made=True)


def _forget_devices() -> None:
    """Keep the state of the CPU alone: a forked child can not use CUDA, nor update state there.

    What was on its way to other ranks arrives in the parent.
    """
    reduction.drop_all()
    for domain in all_domains():
        for arenas in domain.arenas.values():
            for key in [key for key, arena in arenas.items() if arena.device.type != "cpu"]:
                del arenas[key]


os.register_at_fork(after_in_child=_forget_devices)


@ARENAS_LOCK.held
def reset() -> None:
    """Drop the state of every module; each starts again from scale 1 at its next FP8 forward."""
    for handle in list(_HANDLES):
        handle.live = handle.current = False
    reduction.drop_all()
    drop_arenas()
    _Program.length, _Program.warned, _Program.waits_at_once = None, False, False
    _Program.switches.clear()
