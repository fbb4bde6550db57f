# SPDX-License-Identifier: Apache-2.0
"""Amaxes over ranks: reductions that an update starts, and whoever reads scales waits for.

A rank that waited at the end of a region would stop a pipeline: the next stage can not end its
region before it has what this one sends after its own. So the amaxes of a step leave row 0 of the
histories for buffers on their way, and scales are made of them when something needs these.

Ranks that differ in what their slots stand for would make wrong scales, and those that start other
numbers of reductions would wait for ever. Before the first reduction of an arena they compare the
layouts of its slots through the store of the group, which waits for nobody at the end of a region.
Each buffer carries a digest of the layout too, as it is and negative, so that the largest of all
ranks tells whether they agree. All buffers have one size: those of other layouts do no harm.

NCCL makes the communicator of a group in its first collective, which waits for all ranks: a stage
that reduced first would never send what the next one waits for. So where a group has none yet, a
thread makes one for the amaxes alone, and starts the reductions of that time.
"""

import atexit
import contextlib
import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, distributed

from transformer_engine.pytorch.execution.thread_state import Domain
from transformer_engine.pytorch.scaling_state.arenas import SLOTS, Arena, Chunk
from transformer_engine.pytorch.torchside.device import is_capturing

FLYING: list[Arena] = []
"""Arenas with a reduction that was started and not waited for, in the order of the starts."""

_PARTS = 4
"""Numbers of 16 bits that a digest consists of, which fp32 holds exactly."""
_SHOWN = 8
"""Kinds of modules that a message lists of a layout."""
_PAUSE = 0.002
"""Seconds between two looks at a store."""
_NUMBERS: dict[tuple[str, str], int] = {}
"""By group and direction, how many arenas have been reduced over it."""


class Part(NamedTuple):
    """A chunk on its way."""

    chunk: Chunk
    buffer: Tensor  # its amaxes, then the digest as it is and negative
    work: Any  # of the collective


class Flight:
    """A reduction of the amaxes of an arena."""

    def __init__(self, first: bool) -> None:
        self.first = first  # of this arena: the layouts are being compared
        self.parts: list[Part] = []


class _Later:
    """Work of a collective that a thread starts, behind those that earlier ones start."""

    def __init__(self, begin: Callable, device: torch.device, former: "_Later | None") -> None:
        self._begin, self._device, self._former = begin, device, former
        self._ready = torch.cuda.Event()
        self._ready.record(torch.cuda.current_stream(device))
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._former is not None:
                self._former.started()
                self._former = None
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
                self._ready.wait()
                self._work = self._begin()
        except BaseException as error:  # for the thread that waits
            self._error = error

    def alive(self) -> bool:
        return self._thread.is_alive()

    def started(self) -> None:
        """Wait until the collective is started; its error, if it could not be."""
        self._thread.join()
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error

    def wait(self) -> None:
        self.started()
        self._work.wait()


class _Own:
    """A communicator of NCCL for the amaxes of a group that has none of its own yet."""

    def __init__(self, ties: "Ties", device: torch.device) -> None:
        kind = type(ties.backend)
        options = kind.Options()
        options._timeout = ties.limit
        store = distributed.PrefixStore("transformer_engine/communicator", ties.store)
        self._make = partial(kind, store, ties.rank, len(ties.ranks), options)
        self._device = device
        self._backend: Any = None
        self._last: _Later | None = None
        self._how = distributed.AllreduceOptions()
        self._how.reduceOp = distributed.ReduceOp.MAX

    def reduce(self, buffer: Tensor) -> Any:
        """Start an all-reduce of the largest values; returns its work."""
        if self._backend is not None and not (self._last and self._last.alive()):
            self._last = None
            return self._reduce(buffer)
        self._last = _Later(partial(self._reduce, buffer), self._device, self._last)
        return self._last

    def _reduce(self, buffer: Tensor) -> Any:
        if self._backend is None:
            self._backend = self._make()
        return self._backend.allreduce([buffer], self._how)

    def close(self) -> None:
        """Let it go, without a word to the other ranks."""
        if self._backend is not None:
            self._backend.abort()


_OWN: dict[tuple[Any, torch.device], _Own] = {}
"""Communicators of ours, by process group and device."""


@atexit.register
def _close_all() -> None:
    while _OWN:
        _OWN.popitem()[1].close()


def _own_of(ties: "Ties", device: torch.device) -> _Own:
    """The communicator of ours for a group; those of groups that are no more are let go."""
    for key in [key for key in _OWN if key[0] not in distributed.distributed_c10d._world.pg_map]:
        _OWN.pop(key).close()
    return _OWN.setdefault((ties.group, device), _Own(ties, device))


class Ties:
    """Knowledge of an arena over several ranks about the other ranks."""

    def __init__(self, arena: Arena) -> None:
        group = arena.group
        if group is None:
            group = distributed.distributed_c10d._get_default_group()
        self.group, self.backend = group, group._get_backend(arena.device)
        self.rank = distributed.get_rank(group)  # in the group
        self.ranks = distributed.get_process_group_ranks(group)
        self.store = distributed.distributed_c10d._get_process_group_store(group)
        self.limit = _time_limit(self.backend, self.store)
        number = _NUMBERS.get((group.group_name, arena.direction), 0)
        _NUMBERS[group.group_name, arena.direction] = number + 1
        self.key = f"transformer_engine/amaxes/{arena.direction}/{number}"
        self.modules = 0  # of the layout that was posted
        self.digest: Tensor | None = None  # of that, as buffers carry it
        self.look: tuple | None = None  # digests of all ranks on their way to the host
        self.own: _Own | None = None  # reduces in place of the group

    def post(self, arena: Arena) -> None:
        """Tell the others the layout, where it has changed; compare it with the first one."""
        if self.modules == len(arena.layout):
            return
        text = layout_text(arena)
        first, self.modules = self.modules == 0, len(arena.layout)
        full = hashlib.sha256(repr((text, arena.layout, arena.rule.identity)).encode()).digest()
        numbers = [float(int.from_bytes(full[2 * i : 2 * i + 2])) for i in range(_PARTS)]
        self.digest = torch.tensor([*numbers, *(-n for n in numbers)], device=arena.device)
        if self.store is None:
            return
        self.store.set(f"{self.key}/{self.rank}", text)
        if not first:
            return
        # All ranks follow the first: a communicator that it found made is one that all have.
        connected = getattr(self.backend, "_is_initialized", lambda: True)()
        way = self.store.compare_set(f"{self.key}/way", "", "group" if connected else "own")
        if way == b"own":
            self.own = _own_of(self, arena.device)
        mine = full.hex()
        if self.store.compare_set(f"{self.key}/first", "", mine).decode() != mine:
            self.store.set(f"{self.key}/differ", text)
        self.store.add(f"{self.key}/count", 1)

    def differ(self) -> bool:
        """Tell whether ranks are known to have other layouts than the first one; waits for none."""
        return self.store is not None and self.store.check([f"{self.key}/differ"])

    def compare(self) -> bool:
        """Return whether all ranks have the same layout: waits until each has said its own."""
        if self.store is None:
            return True
        end = time.monotonic() + self.limit.total_seconds()
        while not self.differ():
            if self.store.add(f"{self.key}/count", 0) >= len(self.ranks):
                return not self.differ()
            if time.monotonic() > end:
                raise RuntimeError(f"timed out after {self.limit.total_seconds():g} seconds")
            time.sleep(_PAUSE)
        return False

    def layouts(self) -> list[str]:
        """Of each rank what it has posted last."""
        found = []
        for place, rank in enumerate(self.ranks):
            key = f"{self.key}/{place}"
            known = self.store is not None and self.store.check([key])
            text = self.store.get(key).decode() if known else "nothing so far"
            found.append(f"rank {rank}: {text}")
        return found

    def reduce(self, buffer: Tensor) -> Any:
        """Start an all-reduce of the largest values; returns its work."""
        if self.own is not None:
            return self.own.reduce(buffer)
        most = distributed.ReduceOp.MAX
        return distributed.all_reduce(buffer, op=most, group=self.group, async_op=True)


def _time_limit(backend: Any, store: Any) -> timedelta:
    """How long a collective of a group may take."""
    options = getattr(backend, "options", None)
    known = getattr(options, "_timeout", None)
    return known or (timedelta(minutes=5) if store is None else store.timeout)


def layout_text(arena: Arena) -> str:
    """Description of the slots of an arena, for error texts."""
    runs = [(kind, len(list(same))) for kind, same in itertools.groupby(arena.layout)]
    shown = [f"{count} x {kind}" if count > 1 else kind for kind, count in runs[:_SHOWN]]
    if len(runs) > _SHOWN:
        shown.append("...")
    return f"{arena.direction} slots of {len(arena.layout)} modules ({', '.join(shown)})"


def start(arena: Arena) -> None:
    """Start the reduction of what an arena has recorded. RuntimeError where layouts differ."""
    ties = arena.ties
    if ties is None:
        ties = arena.ties = Ties(arena)
    captures = is_capturing(arena.device)
    first = ties.modules == 0
    if not captures:
        ties.post(arena)
        _look(arena)
    digest = ties.digest
    if digest is None:  # what was never reduced before a capture has no place for it
        digest = torch.zeros(2 * _PARTS, device=arena.device)
    arena.flight = flight = Flight(first and not captures)
    FLYING.append(arena)
    for chunk in list(arena.chunks):
        row = chunk.history[0]
        buffer = torch.cat((row, digest))
        flight.parts.append(Part(chunk, buffer, ties.reduce(buffer)))
        row.zero_()
    if flight.first and ties.differ():
        _refuse(arena, "hold different modules")


def flying(domain: Domain, ways: tuple[str, ...]) -> list[Arena]:
    """Arenas that are updated with a domain, in some directions, and have not landed."""
    return [a for a in FLYING if a.domain in domain.joined and a.direction in ways]


def land(arena: Arena) -> Flight | None:
    """Wait for a reduction, and put what it found into row 0 of the histories.

    None where another thread has done so meanwhile. RuntimeError where it failed, or the ranks do
    not agree.
    """
    flight = arena.flight
    if flight is None:
        return None
    try:
        alike = not flight.first or arena.ties.compare()
        for part in flight.parts if alike else ():
            part.work.wait()
    except RuntimeError as error:
        _refuse(arena, f"did not all reduce their amaxes ({error})", error)
    if not alike:
        _refuse(arena, "hold different modules")
    with torch.no_grad():
        for chunk, buffer, _ in flight.parts:
            row = chunk.history[0]
            torch.maximum(row, buffer[:SLOTS], out=row)
            _keep(arena, buffer)
    return flight


def took_off(arena: Arena, flight: Flight) -> bool:
    """Forget a reduction; whether it was this one, and nobody had."""
    if arena.flight is not flight:
        return False
    arena.flight = None
    with contextlib.suppress(ValueError):
        FLYING.remove(arena)
    return True


def drop_all() -> None:
    """Forget all reductions, which other ranks may wait for; nobody reads what they find."""
    for arena in list(FLYING):
        arena.flight = None
    FLYING.clear()


def _keep(arena: Arena, buffer: Tensor) -> None:
    """Look at the digests of all ranks; those of a GPU are on their way to the host first."""
    digests = buffer[SLOTS:]
    if not buffer.is_cuda:
        _check(arena, digests)
    elif not is_capturing(arena.device):
        buffer.record_stream(torch.cuda.current_stream(buffer.device))
        arena.ties.look = copy_of(digests)


def _look(arena: Arena) -> None:
    """Look at digests that have arrived on the host; never waits."""
    look = arena.ties.look
    if look is not None and look[1].query():
        arena.ties.look = None
        _check(arena, look[0])


def _check(arena: Arena, digests: Tensor) -> None:
    largest, smallest = digests[:_PARTS], -digests[_PARTS:]
    if not torch.equal(largest, smallest):
        _refuse(arena, "reduce the amaxes of different modules, or of other directions")


def _refuse(arena: Arena, what: str, cause: BaseException | None = None) -> NoReturn:
    for other in flying(arena.domain, ("forward", "backward")):
        took_off(other, other.flight)
    layouts = "; ".join(arena.ties.layouts())
    raise RuntimeError(
        f"amax_reduction_group: the ranks {arena.ties.ranks} of the group that delayed scaling "
        f"reduces amaxes over {what}. This is the reduction of {layout_text(arena)}. Layouts: "
        f"{layouts}. Ranks of such a group run the same modules in the same order, in as many "
        "regions and backwards: give autocast an amax_reduction_group of ranks that do (in a "
        "pipeline those of one stage), or use DelayedScaling(reduce_amax=False)"
    ) from cause


def copy_of(values: Tensor) -> tuple[Tensor, "torch.cuda.Event"]:
    """A copy on its way to the host, and what tells that it is there."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return host, event
