# SPDX-License-Identifier: Apache-2.0
"""Delayed-scaling state: arenas of chunks of slots.

One arena holds the state of one (device, direction, recipe, reduction group): chunks of `SLOTS`
scales and amax-history columns. A module owns a few consecutive slots of a forward and of a
backward chunk (`Slots`). One launch updates a whole chunk and one all-reduce reduces it, however
many modules share it. Native code always gets the whole chunk and a slot number, never a view:
views of state do not survive the functionalisation that `torch.compile` does.
"""

import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from transformer_engine.common import config
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import torch_ops
from transformer_engine.pytorch.locks import Lock
from transformer_engine.pytorch.modes import faking, real_tensors

__all__ = [
    "SLOTS",
    "BlankSlots",
    "Chunk",
    "Rule",
    "Slots",
    "expected_length",
    "fresh_values",
    "is_fresh",
    "reset",
    "slots_of",
    "update",
    "warn_of_fresh_scales",
]

SLOTS = 256
"""Slots of a chunk."""

DIRECTIONS = ("forward", "backward")


class Rule(NamedTuple):
    """How the state of one recipe is updated.

    Attributes
    ----------
    identity : str
        The recipe's repr.
    length : int
        Rows of the amax history.
    fp8_max : tuple of float
        Largest FP8 value of the forward and of the backward.
    margin : int
        The scale is divided by 2 to this power.
    amax : str or callable
        "max", "most_recent", or ``f(history[length, n]) -> amax[n]``.
    scale : callable or None
        ``f(amax, old_scale, fp8_max, recipe) -> new_scale``; None: fp8_max / amax.
    reduce : bool
        Amaxes are reduced over the group.
    fused : bool
        The fused update does it, in one launch a chunk; else torch operations do: for callables and
        where ``TE_UNFUSED_FP8_UPDATE`` asks for them.
    recipe : DelayedScaling or None
        The recipe, for a callable `scale`; None without one.
    """

    identity: str
    length: int
    fp8_max: tuple[float, float]
    margin: int
    amax: Any
    scale: Callable | None
    reduce: bool
    fused: bool
    recipe: DelayedScaling | None


def rule_of(recipe: DelayedScaling) -> Rule:
    """Rule of a recipe as it is now.

    Parameters
    ----------
    recipe : DelayedScaling
        The recipe; later writes to it make another rule.

    Returns
    -------
    Rule
        What the update of its state needs.
    """
    algo, scale = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
    return Rule(
        identity=repr(recipe),
        length=recipe.amax_history_len,
        fp8_max=tuple(torch_ops.as_constant(recipe.fp8_format.fp8_max(d)) for d in ("fwd", "bwd")),
        margin=recipe.margin,
        amax=algo,
        scale=scale,
        reduce=recipe.reduce_amax,
        fused=isinstance(algo, str) and scale is None and not config.TE_UNFUSED_FP8_UPDATE.get(),
        recipe=recipe if scale is not None else None,
    )


class Chunk:
    """`SLOTS` scales and amax histories of one direction.

    Attributes
    ----------
    scale : Tensor
        [SLOTS] fp32; 1 where nothing was measured.
    history : Tensor
        [length, SLOTS] fp32; row 0 accumulates, the newest finished step is the last row.
    """

    def __init__(self, device: torch.device, rule: Rule) -> None:
        with real_tensors():  # state outlives the call that made it
            self.scale = torch.ones(SLOTS, dtype=torch.float32, device=device)
            self.history = torch.zeros(rule.length, SLOTS, dtype=torch.float32, device=device)
        self.used = [False] * SLOTS

    def take(self, count: int) -> int:
        """Reserve `count` consecutive slots; return the first, or -1."""
        run = 0
        for slot, used in enumerate(self.used):
            run = 0 if used else run + 1
            if run == count:
                first = slot - count + 1
                self.used[first : slot + 1] = [True] * count
                return first
        return -1

    def give_back(self, first: int, count: int) -> None:
        """Free slots for other modules. Their values are cleared when they are taken again."""
        self.used[first : first + count] = [False] * count


class Arena:
    """Chunks of one (device, direction, recipe, reduction group)."""

    def __init__(self, device: torch.device, direction: str, rule: Rule, group: Any) -> None:
        self.device = device
        self.direction = direction
        self.rule = rule
        self.group = group
        self.chunks: list[Chunk] = []

    def take(self, count: int) -> tuple[Chunk, int]:
        """Reserve fresh consecutive slots (scale 1, history 0)."""
        for chunk in self.chunks:
            first = chunk.take(count)
            if first >= 0:
                break
        else:
            chunk = Chunk(self.device, self.rule)
            self.chunks.append(chunk)
            first = chunk.take(count)
        with real_tensors():
            chunk.scale[first : first + count] = 1.0
            chunk.history[:, first : first + count] = 0.0
        return chunk, first


_ARENAS: dict[str, dict[tuple, Arena]] = {direction: {} for direction in DIRECTIONS}
_FREED: deque[tuple] = deque()
"""Slots of dead handles, as arguments of `_give_back`, until `_sweep` frees them: finalizers do no
more than add to it."""
_BOOKS = Lock()
"""Guards the arenas."""
_UPDATING = Lock()
"""Held by the thread that updates: native updates let the GIL go."""


class Slots:
    """A module's slots under one recipe: the handle that modules and pending backwards hold.

    The slots are free for others once the last reference to the handle is gone (and the next slots
    are taken, or the next scales made), so a backward still to come keeps them although its module
    died or moved on.

    Attributes
    ----------
    identity : str
        Repr of the recipe.
    device : torch.device
        Where the state lives.
    group : ProcessGroup or None
        Reduction group.
    forward_scale, forward_history, backward_scale, backward_history : Tensor
        The whole chunks.
    forward_slot, backward_slot : int
        First slot in each.
    live : bool
        False once `reset` has dropped all state.
    """

    def __init__(
        self, device: torch.device, rule: Rule, group: Any, counts: tuple[int, int]
    ) -> None:
        self.identity = rule.identity
        self.device = device
        self.group = group
        self.counts = counts
        self.live = True
        _refuse_capture(device)
        key = (device, rule.identity, id(group) if group is not None else None)
        _sweep()
        self._take(key, rule)
        _Program.length = rule.length

    @_BOOKS.held
    def _take(self, key: tuple, rule: Rule) -> None:
        for direction, count in zip(DIRECTIONS, self.counts, strict=True):
            arenas = _ARENAS[direction]
            arena = arenas.setdefault(key, Arena(self.device, direction, rule, self.group))
            chunk, first = arena.take(count)
            if direction == "forward":
                self.forward_scale, self.forward_history = chunk.scale, chunk.history
                self.forward_slot = first
            else:
                self.backward_scale, self.backward_history = chunk.scale, chunk.history
                self.backward_slot = first
            slots = (key, arena, chunk, first, count)
            weakref.finalize(self, _FREED.append, slots).atexit = False
        _HANDLES.add(self)

    def chunk(self, direction: str) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(scale, history, first slot) of a direction."""
        if direction == "forward":
            return self.forward_scale, self.forward_history, self.forward_slot
        return self.backward_scale, self.backward_history, self.backward_slot

    def values(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Copies of the state: direction -> (scale[n], history[length, n]), contiguous."""
        out = {}
        for direction, count in zip(DIRECTIONS, self.counts, strict=True):
            scale, history, first = self.chunk(direction)
            last = first + count
            out[direction] = (scale[first:last].clone(), history[:, first:last].clone())
        return out

    def fits(self, values: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Whether the histories of such state are as long as these."""
        return all(len(self.chunk(d)[1]) == len(values[d][1]) for d in DIRECTIONS)

    def load(self, values: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take over state from another handle, device or length.

        A shorter history keeps the leading rows, a longer one gets rows of zeros at the end.
        """
        with real_tensors():
            for direction, count in zip(DIRECTIONS, self.counts, strict=True):
                scale, history, first = self.chunk(direction)
                last = first + count
                old_scale, old_history = values[direction]
                rows = min(len(history), len(old_history))
                scale[first:last] = old_scale.to(scale.device)
                history[:rows, first:last] = old_history[:rows].to(history.device)
                history[rows:, first:last] = 0.0


_HANDLES: "weakref.WeakSet[Slots]" = weakref.WeakSet()


class _Program:
    """What is known of the program as a whole, until `reset`."""

    length: int | None = None
    """Rows of the histories of the newest slots: it runs delayed scaling since they were made."""
    warned = False
    """It was told of `warn_of_fresh_scales`."""


class BlankSlots:
    """Stands for the slots of a module in a call on tensors without memory.

    Chunks of the right shapes that are on no arena: nothing is read from them, nothing written, and
    they go with the call.

    Parameters
    ----------
    rule : Rule
        Of the recipe in force.
    like : Tensor
        Input of the call, on the meta device or fake.
    """

    forward_slot = backward_slot = 0

    def __init__(self, rule: Rule, like: torch.Tensor) -> None:
        def make(*shape: int) -> torch.Tensor:
            return like.new_empty(shape, dtype=torch.float32, requires_grad=False)

        self.forward_scale, self.backward_scale = make(SLOTS), make(SLOTS)
        self.forward_history = make(rule.length, SLOTS)
        self.backward_history = make(rule.length, SLOTS)


def expected_length(recipe: Any) -> int | None:
    """Rows of the history that a module without state will probably have.

    Parameters
    ----------
    recipe : Recipe or None
        In force.

    Returns
    -------
    int or None
        By the recipe where it is one of delayed scaling, else by the newest state of the program;
        None where neither says that the program runs delayed scaling.
    """
    if recipe is not None and recipe.delayed():
        return recipe.amax_history_len
    return _Program.length


def fresh_values(length: int, counts: tuple[int, int]) -> dict[str, tuple]:
    """State before anything was measured, as `Slots.values` gives it, on the CPU."""
    return {
        direction: (torch.ones(n, device="cpu"), torch.zeros(length, n, device="cpu"))
        for direction, n in zip(DIRECTIONS, counts, strict=True)
    }


def is_fresh(values: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Whether nothing was measured yet."""
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


@_BOOKS.held
def _free_all() -> None:
    while _FREED:
        _give_back(*_FREED.popleft())


def _sweep() -> None:
    """Free the slots of dead handles.

    Not while a graph is compiled: its guards name the arenas that its updates go through.
    """
    if _FREED and torch._guards.CompileContext.try_get() is None:
        _free_all()


def _give_back(key: tuple, arena: Arena, chunk: Chunk, first: int, count: int) -> None:
    """Free slots; a chunk without slots in use goes, and so does an arena without chunks."""
    chunk.give_back(first, count)
    if any(chunk.used):
        return
    arena.chunks.remove(chunk)
    arenas = _ARENAS[arena.direction]
    if not arena.chunks and arenas.get(key) is arena:
        del arenas[key]


def _refuse_capture(device: torch.device) -> None:
    """State made while a graph is captured would live in the graph's own memory pool."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a module meets this FP8 recipe for the first time while a CUDA graph is being "
            "captured; run it once before the capture (warm-up), with the same recipe"
        )


def slots_of(
    current: Slots | None,
    rule: Rule,
    group: Any,
    device: torch.device,
    counts: tuple[int, int],
) -> Slots:
    """Slots for a recipe: `current` where it fits, else new ones with its values.

    Parameters
    ----------
    current : Slots or None
        What the module has.
    rule : Rule
        Of the recipe in force.
    group : ProcessGroup or None
        Reduction group in force.
    device : torch.device
        Where the module computes.
    counts : tuple of int
        Slots that the module needs: forward, backward.

    Returns
    -------
    Slots
        State carries over when the recipe's settings, the device or the group change.
    """
    slots = Slots(device, rule, group, counts)
    if current is not None and current.live:
        slots.load(current.values())
    return slots


def _reduce(arena: Arena, chunk: Chunk) -> None:
    """MAX all-reduce of the amaxes of this step over the recipe's group."""
    if not arena.rule.reduce or not torch.distributed.is_available():
        return
    if not torch.distributed.is_initialized():
        return
    if torch.distributed.get_world_size(arena.group) > 1:
        torch.distributed.all_reduce(
            chunk.history[0], op=torch.distributed.ReduceOp.MAX, group=arena.group
        )


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


def update(direction: str) -> None:
    """Turn the amaxes collected since the last update into scales, for every module of the process.

    Parameters
    ----------
    direction : str
        "forward" or "backward".
    """
    if torch.compiler.is_compiling():
        _update(direction)
    elif not faking():  # no amax was recorded
        _sweep()
        _update_alone(direction)


def _update(direction: str) -> None:
    # Over copies: a module that dies meanwhile, or another thread's first one, changes the arenas.
    for arena in list(_ARENAS[direction].values()):
        rule = arena.rule
        for chunk in list(arena.chunks):
            _reduce(arena, chunk)
            if rule.fused:
                fp8_max = rule.fp8_max[DIRECTIONS.index(direction)] * 2.0**-rule.margin
                torch_ops.scaling_update(
                    chunk.scale, chunk.history, fp8_max, rule.amax == "most_recent"
                )
            else:
                _update_with_torch(arena, chunk)


_update_alone = _UPDATING.held(_update)


def _forget_devices() -> None:
    """Keep the state of the CPU alone: a forked child can not use CUDA, nor update state there."""
    for arenas in _ARENAS.values():
        for key in [key for key, arena in arenas.items() if arena.device.type != "cpu"]:
            del arenas[key]


os.register_at_fork(after_in_child=_forget_devices)


@_BOOKS.held
def reset() -> None:
    """Drop the state of every module; each starts again from scale 1 at its next FP8 forward."""
    for handle in list(_HANDLES):
        handle.live = False
    for arenas in _ARENAS.values():
        arenas.clear()
    _Program.length, _Program.warned = None, False
