# SPDX-License-Identifier: Apache-2.0
"""Where delayed-scaling state lies: chunks of slots in arenas, arenas in domains.

An update touches one domain, idle modules included: the modules that first ran in one thread, and
those of every domain that a thread has trained modules of as well. So models that train side by
side in threads of their own stay apart, and a program of one thread has one domain.

What several ranks reduce, in which order and with which sizes, must not depend on when a rank
collects its garbage. So an arena over more than one rank never frees a slot: where a module's slots
lie follows from the order in which modules first ran.
"""

import bisect
import itertools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from transformer_engine.common import config
from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.execution.thread_state import Domain, RegionState
from transformer_engine.pytorch.torchside.locks import Lock
from transformer_engine.pytorch.torchside.modes import compilation, real_tensors

SLOTS_PER_CHUNK = 256
"""Slots of a chunk."""

DIRECTIONS = ("forward", "backward")


class Rule(NamedTuple):
    """How the state of one recipe is updated."""

    identity: str  # `identity_of` the recipe
    length: int  # rows of the amax history
    fp8_max: tuple[float, float]  # largest FP8 value of the forward and of the backward
    margin: int  # the scale is divided by 2 to this power
    amax: Any  # "max", "most_recent", or ``f(history[length, n]) -> amax[n]``
    scale: Callable | None
    """``f(amax, old_scale, fp8_max, recipe) -> new_scale``; None: fp8_max / amax."""
    reduce: bool  # amaxes are reduced over the group
    fused: bool
    """The fused update does it, in one launch a chunk; else torch operations do: for callables and
    where ``TE_UNFUSED_FP8_UPDATE`` asks for them."""
    initial: float
    """Scale of a slot that has recorded no amax: 1, or 0, with which casts measure theirs first."""
    recipe: DelayedScaling | None  # the recipe, for a callable `scale`; None without one


def identity_of(recipe: Recipe) -> str:
    """Text of what the state of a recipe goes by: those that only attend otherwise share it.

    A callable that makes scales is given the recipe, and may read all of it.
    """
    text = repr(recipe)
    if recipe.delayed() and recipe.scaling_factor_compute_algo is None:
        for name in ("fp8_dpa", "fp8_mha"):
            text = text.replace(f"{name}=True", f"{name}=False")
    return text


def rule_of(recipe: DelayedScaling) -> Rule:
    """Rule of a recipe as it is now; later writes to the recipe make another one."""
    algo, scale = recipe.amax_compute_algo, recipe.scaling_factor_compute_algo
    for name in ("scaling_factor_compute_algo", "fp8_dpa", "fp8_mha"):
        if recipe.measure_first and getattr(recipe, name):
            raise NotImplementedError(
                f"DelayedScaling: measure_first=True with {name} is not built: leave one of them "
                "out"
            )
    return Rule(
        identity=identity_of(recipe),
        length=recipe.amax_history_len,
        fp8_max=tuple(plan_ops.as_constant(recipe.fp8_format.fp8_max(d)) for d in ("fwd", "bwd")),
        margin=recipe.margin,
        amax=algo,
        scale=scale,
        reduce=recipe.reduce_amax,
        fused=isinstance(algo, str) and scale is None and not config.TE_UNFUSED_FP8_UPDATE.get(),
        initial=0.0 if recipe.measure_first else 1.0,
        recipe=recipe if scale is not None else None,
    )


class Chunk:
    """`SLOTS_PER_CHUNK` scales and amax histories of one direction."""

    made: ClassVar[int] = 0
    """How many there have been."""

    def __init__(self, device: torch.device, rule: Rule) -> None:
        Chunk.made += 1
        with real_tensors():  # state outlives the call that made it
            self.scale = torch.full(
                (SLOTS_PER_CHUNK,), rule.initial, dtype=torch.float32, device=device
            )
            # Row 0 accumulates, the newest finished step is the last row.
            self.history = torch.zeros(
                rule.length, SLOTS_PER_CHUNK, dtype=torch.float32, device=device
            )
            # Row 0 for eager code, as it is and as ranks reduce it: graphs get the whole history.
            self.row = self.history[0]
            self.bits = self.row.view(torch.int32)
        self.used = [False] * SLOTS_PER_CHUNK
        # Scales while they are copied to the host (see `scaling._stop_measuring`).
        self.arriving: tuple | None = None

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


class Arena:
    """Chunks of one (domain, direction, device, recipe, reduction group, number of ranks)."""

    def __init__(self, domain: Domain, direction: str, key: tuple, rule: Rule, group: Any) -> None:
        self.domain = domain
        self.direction = direction
        self.key = key
        self.device, *_, self.ranks = key
        self.rule = rule
        self.group = group  # kept alive: the key has its id
        self.retired = False  # its ranks are others now: nothing is reduced, modules move out
        self.chunks: list[Chunk] = []
        # Over several ranks: of each module what it is and its slots, as they were taken; numbers
        # of these modules, sorted; the `Peers` of this rank, and the `Reduction` that was started
        # and not waited for (see `reduction`).
        self.layout: list[str] = []
        self.made: list[int] = []
        self.peers: Any = None
        self.reduction: Any = None

    def take(self, count: int) -> tuple[Chunk, int]:
        """Reserve fresh consecutive slots (the rule's initial scale, history 0)."""
        for chunk in self.chunks:
            first = chunk.take(count)
            if first >= 0:
                break
        else:
            chunk = Chunk(self.device, self.rule)
            self.chunks.append(chunk)
            first = chunk.take(count)
        with real_tensors():
            chunk.scale[first : first + count] = self.rule.initial
            chunk.history[:, first : first + count] = 0.0
        chunk.arriving = None  # it shows what former owners of these slots had
        return chunk, first

    def note(self, owner: Any, count: int) -> None:
        """Add an owner to the layout, with its place among those before in the order of making.

        So layers of one size that ranks run in different orders make different layouts, and modules
        that one rank alone has made, and does not run, make none.
        """
        place = bisect.bisect_right(self.made, owner.number)
        self.made.insert(place, owner.number)
        self.layout.append(f"{owner.kind} of {count} slots, made after {place} of those before")

    def give_back(self, chunk: Chunk, first: int, count: int) -> None:
        """Free slots; a chunk without slots in use goes, and so does an arena without chunks.

        Their values are cleared when they are taken again.
        """
        chunk.used[first : first + count] = [False] * count
        if any(chunk.used):
            return
        self.chunks.remove(chunk)
        domain = self.domain
        arenas = domain.arenas[self.direction]
        if not self.chunks and arenas.get(self.key) is self:
            del arenas[self.key]
            if domain in domain.joined[1:] and not domain.has_state():
                domain.joined.remove(domain)


def rank_count(rule: Rule, group: Any) -> int:
    """Processes that the amaxes of a recipe are reduced over, as it is now."""
    distributed = torch.distributed
    if not rule.reduce or not distributed.is_available() or not distributed.is_initialized():
        return 1
    if group is None:
        return distributed.get_world_size()
    try:
        return len(distributed.get_process_group_ranks(group))
    except KeyError:  # it was destroyed, or this rank is none of it
        return 1


def key_of(device: torch.device, rule: Rule, group: Any) -> tuple:
    """Which state of a domain and direction lies in one arena."""
    return device, rule.identity, None if group is None else id(group), rank_count(rule, group)


ARENAS_LOCK = Lock()
"""Guards the domains and their arenas."""
_NUMBERS = itertools.count()
_DOMAINS: "weakref.WeakSet[Domain]" = weakref.WeakSet()
"""Those that have had state, or were joined."""
_REDUCED: list[Domain] = []
"""Domains with state over several ranks, which does not vanish with threads and modules."""
_FREED: deque[tuple] = deque()
"""Slots of dead handles, as arguments of `Arena.give_back`, until `sweep` frees them: finalizers do
no more than add to it."""


def take(
    owner: Any, domain: Domain, key: tuple, rule: Rule, group: Any, counts: tuple[int, int]
) -> list[tuple[Chunk, int]]:
    """Reserve slots in both directions for as long as `owner` lives; called under `ARENAS_LOCK`.

    `owner.kind` says which module they are for, `owner.number` when it was made.

    Returns of each direction the chunk and the first slot.
    """
    _DOMAINS.add(domain)
    if domain.number < 0:
        domain.number = next(_NUMBERS)
    if domain.label < 0:
        domain.label = domain.number
    if domain not in domain.joined:
        domain.joined.append(domain)
    domain.joined.sort(key=Domain.order)
    taken = []
    for direction, count in zip(DIRECTIONS, counts, strict=True):
        arenas = domain.arenas[direction]
        arena = arenas.setdefault(key, Arena(domain, direction, key, rule, group))
        chunk, first = arena.take(count)
        taken.append((chunk, first))
        if arena.ranks == 1:
            weakref.finalize(owner, _FREED.append, (arena, chunk, first, count)).atexit = False
            continue
        arena.note(owner, count)
        if domain not in _REDUCED:
            _REDUCED.append(domain)
    return taken


@ARENAS_LOCK.held
def _free_all() -> None:
    while _FREED:
        arena, *slots = _FREED.popleft()
        arena.give_back(*slots)


def sweep() -> None:
    """Free the slots of dead handles.

    Not while a graph is compiled: its guards name the arenas that its updates go through.
    """
    if _FREED and compilation() is None:
        _free_all()


def own_domain(state: RegionState) -> Domain:
    """The domain for modules that first run in a thread now: a new one after `drop_arenas`."""
    if state.domain.label < 0 <= state.label:  # dropped, and other threads may still have it
        state.domain, state.label = Domain(), -1
    return state.domain


@ARENAS_LOCK.held
def join(state: RegionState, other: Domain) -> None:
    """Join a thread's domain with another one: each update of either touches both from now on.

    A thread that has run nothing takes the other domain for its own.
    """
    one = own_domain(state)
    if other.label < 0:
        other.label = next(_NUMBERS)
    ours, theirs = one.joined, other.joined
    if state.label < 0 or not any(domain.has_state() for domain in ours):
        one.joined, state.domain, state.label = theirs, other, other.label
        return
    if ours is not theirs:
        found = [domain for domain in ours if domain not in theirs]
        joined = sorted([*found, *theirs], key=Domain.order)
        for domain in list(_DOMAINS):
            if domain.joined is ours or domain.joined is theirs:
                domain.joined, domain.label = joined, one.label
    state.label = one.label


def adopt(state: RegionState, other: Domain) -> None:
    """`join` as a traced graph does it: for a thread that has run nothing.

    Another thread's domain was joined while the graph was traced. The labels read here become
    guards of the graph. Threads that have run nothing have the same label, -1; so have threads
    whose domains were joined. Guards on the domains themselves would compile again for each thread.
    """
    label = other.label
    if state.label < 0:
        state.domain.joined = other.joined
        state.domain, state.label = other, label


@ARENAS_LOCK.held
def all_domains() -> list[Domain]:
    """Every domain that has state, in the order of their numbers."""
    return sorted({*_DOMAINS, *_REDUCED}, key=Domain.order)


def drop_arenas() -> None:
    """Begin again without state and with each thread's domain for itself; under `ARENAS_LOCK`."""
    for domain in _DOMAINS:
        for arenas in domain.arenas.values():
            arenas.clear()
        domain.joined, domain.label = [domain], -1
    _REDUCED.clear()
