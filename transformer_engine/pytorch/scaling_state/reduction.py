# SPDX-License-Identifier: Apache-2.0
"""Amaxes over ranks: reductions that an update starts, and whoever reads scales waits for.

A rank that waited at the end of a region would stop a pipeline: the next stage can not end its
region before it has what this one sends after its own. So an update moves the amaxes of a step from
row 0 of the histories to buffers, starts the all-reduce of these, and returns. Scales are made when
something reads them, which waits for the all-reduce first.

All chunks of an arena go in one buffer. Ranks that differ in what their slots stand for would make
wrong scales, those whose buffers have other sizes would read beyond them, and those that start
other numbers of reductions would wait for ever. Before the first reduction of an arena they compare
the layouts of its slots through the store of the group, which waits for nobody at the end of a
region. Each buffer carries a digest of the layout too, as it is and with all bits turned, so that
the largest of all ranks tells whether they agree. A chunk that is new goes in a buffer by itself,
of a size that all ranks know, until a reduction with it has shown that all of them have it.
`TE_CHECK_RANKS` compares layouts through the store each time.

NCCL makes the communicator of a group in its first collective, which waits for all ranks: a stage
that reduced first would never send what the next one waits for. So where a group has none yet, a
thread makes one for the amaxes alone, and starts the reductions of that time.
"""

import atexit
import contextlib
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed

from transformer_engine.common import config
from transformer_engine.pytorch.execution.thread_state import Domain
from transformer_engine.pytorch.scaling_state.arenas import SLOTS_PER_CHUNK, Arena, Chunk
from transformer_engine.pytorch.torchside.device import (
    can_pin,
    has_streams,
    is_any_captured,
    is_capturing,
    module_of,
)

STARTED: list[Arena] = []
"""Arenas with a reduction that was started and not waited for, in the order of the starts."""

_PARTS = 4
"""Numbers of 31 bits that a digest consists of."""
_SHOWN = 8
"""Kinds of modules that a message lists of a layout."""
_PAUSE = 0.002
"""Seconds between two looks at a store."""
_NUMBERS: dict[tuple[str, str], int] = {}
"""By group and direction, how many arenas have been reduced over it; "check": how often ranks have
compared what they reduce."""


class Part:
    """Chunks whose amaxes go in one buffer.

    It holds the bits of their amaxes, which as integers have the order of these, NaN being the
    largest; then the digest as it is and with all bits turned. A reduction of ranks that agree
    leaves the digest as it was.
    """

    def __init__(self, chunks: list[Chunk], digest: Tensor) -> None:
        self.chunks = chunks
        self.bits = [chunk.bits for chunk in chunks]
        self.buffer = torch.cat([*self.bits, digest])  # i32
        self.digest = self.buffer[-2 * _PARTS :]
        self._amaxes = self.buffer[: -2 * _PARTS]
        found = self._amaxes.view(torch.float32).split(SLOTS_PER_CHUNK)
        self._pairs = [(chunk.row, part) for chunk, part in zip(chunks, found, strict=True)]

    def take(self) -> None:
        """Move the amaxes from the histories to the buffer."""
        torch.cat(self.bits, out=self._amaxes)
        for bits in self.bits:
            bits.zero_()

    def give(self) -> None:
        """Put those of all ranks into the histories."""
        for row, amaxes in self._pairs:
            torch.maximum(row, amaxes, out=row)


class Reduction:
    """A reduction of the amaxes of an arena, which was started and maybe not waited for."""

    def __init__(self, first: bool) -> None:
        self.first = first  # of this arena: the layouts are being compared
        self.started: list[tuple[Part, Any]] = []  # with the works of their collectives


class _LaterWork:
    """Work of a collective that a thread of its own starts, after the `former` one has started."""

    def __init__(self, begin: Callable, device: torch.device, former: "_LaterWork | None") -> None:
        self._begin, self._device, self._former = begin, device, former
        self._ready = event_of(device)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            if self._former is not None:
                self._former.started()
                self._former = None
            module = module_of(self._device.type)
            with module.device(self._device), module.stream(module.Stream()):
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


class _Communicator:
    """A communicator of NCCL for the amaxes of a group that has none of its own yet."""

    def __init__(self, peers: "Peers", device: torch.device) -> None:
        kind = type(peers.backend)
        options = kind.Options()
        options._timeout = peers.limit
        store = distributed.PrefixStore("transformer_engine/communicator", peers.store)
        self._make = partial(kind, store, peers.rank, len(peers.ranks), options)
        self._device = device
        self._backend: Any = None
        self._last: _LaterWork | None = None
        self._how = distributed.AllreduceOptions()
        self._how.reduceOp = distributed.ReduceOp.MAX

    def reduce(self, buffer: Tensor) -> Any:
        """Start an all-reduce of the largest values; returns its work."""
        if self._backend is not None and not (self._last and self._last.alive()):
            self._last = None
            return self._reduce(buffer)
        self._last = _LaterWork(partial(self._reduce, buffer), self._device, self._last)
        return self._last

    def _reduce(self, buffer: Tensor) -> Any:
        if self._backend is None:
            self._backend = self._make()
        return self._backend.allreduce([buffer], self._how)

    def close(self) -> None:
        """Let it go, without a word to the other ranks."""
        if self._backend is not None:
            self._backend.abort()


_COMMUNICATORS: dict[tuple[Any, torch.device], _Communicator] = {}
"""Those that were made, by process group and device."""


@atexit.register
def _close_all() -> None:
    while _COMMUNICATORS:
        _COMMUNICATORS.popitem()[1].close()


def _communicator_of(peers: "Peers", device: torch.device) -> _Communicator:
    """The communicator beside a group; those of groups that are no more are let go."""
    groups = distributed.distributed_c10d._world.pg_map
    for key in [key for key in _COMMUNICATORS if key[0] not in groups]:
        _COMMUNICATORS.pop(key).close()
    return _COMMUNICATORS.setdefault((peers.group, device), _Communicator(peers, device))


class Peers:
    """What an arena over several ranks knows of the other ranks, and how it reaches them."""

    def __init__(self, arena: Arena) -> None:
        group = arena.group
        if group is None:
            group = distributed.distributed_c10d._get_default_group()
        self.group, self.backend = group, group._get_backend(arena.device)
        self.rank = distributed.get_rank(group)  # in the group
        self.ranks = distributed.get_process_group_ranks(group)
        self.store = distributed.distributed_c10d._get_process_group_store(group)
        self.limit = _time_limit(self.backend, self.store)
        number = self._next(arena.direction)
        self.key = f"transformer_engine/amaxes/{arena.direction}/{number}"
        self.modules = 0  # of the layout that was posted
        self.chunks = 0  # that all ranks are known to have: they go in one buffer
        self.parts: list[Part] = []  # for this layout
        self.digest: Tensor | None = None  # of that, as buffers carry it
        # Digests of all ranks, while they are copied to the host.
        self.arriving: tuple | None = None
        self.communicator: _Communicator | None = None  # reduces instead of the group's

    def _next(self, what: str) -> int:
        key = (self.group.group_name, what)
        _NUMBERS[key] = _NUMBERS.get(key, 0) + 1
        return _NUMBERS[key] - 1

    def post(self, arena: Arena) -> None:
        """Tell the others the layout, where it has changed; compare it with the first one."""
        if self.modules == len(arena.layout):
            return
        text = _layout(arena)
        first, self.modules = self.modules == 0, len(arena.layout)
        full = hashlib.sha256(text.encode()).digest()
        numbers = [int.from_bytes(full[4 * i : 4 * i + 4]) >> 1 for i in range(_PARTS)]
        both = [*numbers, *(~n for n in numbers)]
        self.digest = torch.tensor(both, dtype=torch.int32, device=arena.device)
        self.parts = []
        if self.store is None:
            return
        self.store.set(f"{self.key}/{self.rank}", text)
        if not first:
            return
        # All ranks follow the first: a communicator that it found made is one that all have.
        connected = getattr(self.backend, "_is_initialized", lambda: True)()
        way = self.store.compare_set(f"{self.key}/way", "", "group" if connected else "own")
        if way == b"own":
            self.communicator = _communicator_of(self, arena.device)
        mine = full.hex()
        if self.store.compare_set(f"{self.key}/first", "", mine).decode() != mine:
            self.store.set(f"{self.key}/differ", text)
        self.store.add(f"{self.key}/count", 1)

    def parts_of(self, arena: Arena, captures: bool) -> list[Part]:
        """Chunks by buffers; of a capture in buffers of its own, which replays write to."""
        if self.parts and not captures:
            return self.parts
        digest = self.digest
        if digest is None:  # what was never reduced before a capture has no place for it
            digest = torch.zeros(2 * _PARTS, dtype=torch.int32, device=arena.device)
        known, new = arena.chunks[: self.chunks], arena.chunks[self.chunks :]
        together = [known, *([chunk] for chunk in new)]
        parts = [Part(chunks, digest) for chunks in together if chunks]
        if not captures:
            self.parts = parts
        return parts

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

    def posted(self) -> dict[int, str | None]:
        """Of each rank the layout that it has posted last."""
        keys = {rank: f"{self.key}/{place}" for place, rank in enumerate(self.ranks)}
        return {rank: self._read(key) for rank, key in keys.items()}

    def _read(self, key: str) -> str | None:
        known = self.store is not None and self.store.check([key])
        return self.store.get(key).decode() if known else None

    def check(self, arena: Arena) -> None:
        """Compare with all ranks what is reduced now, and wait for them; RuntimeError."""
        if self.store is None:
            return
        number = self._next("check")
        keys = [f"transformer_engine/amaxes/check/{number}/{n}" for n in range(len(self.ranks))]
        mine = self.store, f"transformer_engine/amaxes/check/{number - 1}/{self.rank}"
        self.store.set(keys[self.rank], _layout(arena, self.key))
        try:
            self.store.wait(keys, self.limit)
        except RuntimeError as error:
            self._refuse_check(arena, keys, "did not all come to this reduction", error)
        if len({self.store.get(key) for key in keys}) > 1:
            self._refuse_check(arena, keys, "do not reduce the same amaxes")
        if number > 0:  # all have read those of before
            self.store.delete_key(mine[1])

    def _refuse_check(
        self, arena: Arena, keys: list[str], what: str, error: BaseException | None = None
    ) -> NoReturn:
        told = dict(zip(self.ranks, map(self._read, keys), strict=True))
        _refuse(arena, f"{what} (TE_CHECK_RANKS)", error, told)

    def reduce(self, buffer: Tensor) -> Any:
        """Start an all-reduce of the largest values; returns its work."""
        if self.communicator is not None:
            return self.communicator.reduce(buffer)
        most = distributed.ReduceOp.MAX
        return distributed.all_reduce(buffer, op=most, group=self.group, async_op=True)


def _time_limit(backend: Any, store: Any) -> timedelta:
    """How long a collective of a group may take."""
    options = getattr(backend, "options", None)
    known = getattr(options, "_timeout", None)
    return known or (timedelta(minutes=5) if store is None else store.timeout)


def _layout(arena: Arena, key: str = "") -> str:
    """What the ranks of an arena have in common, as JSON."""
    return json.dumps([arena.direction, arena.rule.identity, key, arena.layout])


def _summary(direction: str, layout: list[str]) -> str:
    kinds = [entry.partition(",")[0] for entry in layout]
    runs = [(kind, len(list(same))) for kind, same in itertools.groupby(kinds)]
    shown = [f"{count} x {kind}" if count > 1 else kind for kind, count in runs[:_SHOWN]]
    if len(runs) > _SHOWN:
        shown.append("...")
    return f"{direction} slots of {len(layout)} modules ({', '.join(shown)})"


def first_difference(told: dict[int, str | None]) -> str:
    """In words, where the layouts of ranks first differ; "" where those that are there do not."""
    silent = [rank for rank, text in told.items() if text is None]
    (first, mine), *others = [(r, json.loads(t)) for r, t in told.items() if t is not None]
    for rank, theirs in others:
        for what, a, b in zip(("direction", "recipe", "arena"), mine[:3], theirs[:3], strict=True):
            if a != b:
                return f"{what} of rank {first}: {a}; of rank {rank}: {b}"
        pairs = itertools.zip_longest(mine[3], theirs[3], fillvalue="none")
        for number, (a, b) in enumerate(pairs):
            if a != b:
                return f"module {number} of rank {first}: {a}; of rank {rank}: {b}"
    return f"ranks {silent} have said nothing so far" if silent else ""


def start(arena: Arena) -> None:
    """Start the reduction of what an arena has recorded. RuntimeError where layouts differ."""
    peers = arena.peers
    if peers is None:
        peers = arena.peers = Peers(arena)
    captures = is_capturing(arena.device)
    first = peers.modules == 0
    if not captures:
        if config.TE_CHECK_RANKS.get():
            peers.check(arena)
        peers.post(arena)
        _check_arrived(arena.domain)
    arena.reduction = reduction = Reduction(first and not captures)
    STARTED.append(arena)
    for part in peers.parts_of(arena, captures):
        part.take()
        reduction.started.append((part, peers.reduce(part.buffer)))
    if reduction.first and peers.differ():
        _refuse(arena, "hold different modules")


def started(domain: Domain, directions: tuple[str, ...]) -> list[Arena]:
    """Arenas that are updated with a domain, in some directions, and have a reduction started."""
    return [a for a in STARTED if a.domain in domain.joined and a.direction in directions]


def finish(arena: Arena) -> Reduction | None:
    """Wait for a reduction, and put what it found into row 0 of the histories.

    None where another thread has done so meanwhile. RuntimeError where it failed, or the ranks do
    not agree.
    """
    reduction = arena.reduction
    if reduction is None:
        return None
    count = sum([len(part.chunks) for part, _ in reduction.started])
    grows = count > arena.peers.chunks and not is_any_captured()
    try:
        alike = not reduction.first or arena.peers.compare()
        if grows:  # NCCL runs them in order: what does not match came before what nobody answers
            _check_arrived(arena.domain, wait=True)
        for part, work in reduction.started if alike else ():
            work.wait()
            if grows:  # now: what comes next may have no counterpart
                _check(arena, part.digest)
    except _Differs:
        raise
    except RuntimeError as error:
        _refuse(arena, f"did not all reduce their amaxes ({error})", error)
    if not alike:
        _refuse(arena, "hold different modules")
    for part, _ in reduction.started:
        part.give()
        _take_digests(arena, part, checked=grows)
    if grows:
        arena.peers.chunks, arena.peers.parts = count, []
    return reduction


def forget(arena: Arena, reduction: Reduction) -> bool:
    """Take a reduction off its arena; False where another thread has done so."""
    if arena.reduction is not reduction:
        return False
    arena.reduction = None
    with contextlib.suppress(ValueError):
        STARTED.remove(arena)
    return True


def drop_all() -> None:
    """Forget all reductions, which other ranks may wait for; nobody reads what they find."""
    for arena in list(STARTED):
        arena.reduction = None
    STARTED.clear()


def _take_digests(arena: Arena, part: Part, checked: bool) -> None:
    """Check the digests of all ranks; where streams run, those of a copy on the host, later."""
    if not has_streams(arena.device.type):
        _check(arena, part.digest)
    elif not is_capturing(arena.device):
        part.buffer.record_stream(module_of(arena.device.type).current_stream(arena.device))
        if arena.peers.arriving is None and not checked:
            arena.peers.arriving = copy_of(part.digest)


def _check_arrived(domain: Domain, wait: bool = False) -> None:
    """Check the digests of earlier reductions whose copies on the host are complete, or all."""
    kinds = [arenas for each in domain.joined for arenas in each.arenas.values()]
    for arena in [arena for arenas in kinds for arena in list(arenas.values())]:
        arriving = None if arena.peers is None else arena.peers.arriving
        if arriving is None:
            continue
        if wait:
            arriving[1].synchronize()
        if arriving[1].query():
            arena.peers.arriving = None
            _check(arena, arriving[0])


def _check(arena: Arena, digests: Tensor) -> None:
    found = digests.tolist()
    if found[:_PARTS] != [~number for number in found[_PARTS:]]:
        _refuse(arena, "reduce the amaxes of different modules, or of other directions")


class _Differs(RuntimeError):
    """Ranks do not agree on what they reduce."""


def _refuse(
    arena: Arena, what: str, cause: BaseException | None = None, told: dict | None = None
) -> NoReturn:
    for other in started(arena.domain, ("forward", "backward")):
        forget(other, other.reduction)
    told = {**(arena.peers.posted() if told is None else told)}
    told[distributed.get_rank()] = told.get(distributed.get_rank()) or _layout(arena)
    layouts = "; ".join(
        f"rank {rank}: " + ("nothing so far" if text is None else _summary(*json.loads(text)[::3]))
        for rank, text in told.items()
    )
    where = first_difference(told) or (
        "none between what they have said: a rank has left out a region or a backward, where an "
        "exception ended one or where it alone has run some modules"
    )
    raise _Differs(
        f"amax_reduction_group: the ranks {arena.peers.ranks} of the group that delayed scaling "
        f"reduces amaxes over {what}. This is the reduction of "
        f"{_summary(arena.direction, arena.layout)}. Layouts: {layouts}. First difference: "
        f"{where}. Ranks of such a group run the same modules in the same order, in as many "
        "regions and backwards: give autocast an amax_reduction_group of ranks that do (in a "
        "pipeline those of one stage), or use DelayedScaling(reduce_amax=False)"
    ) from cause


def event_of(device: torch.device) -> Any:
    """Event of what the current stream of a device has been given so far."""
    module = module_of(device.type)
    event = module.Event()
    event.record(module.current_stream(device))
    return event


def copy_of(values: Tensor) -> tuple[Tensor, Any]:
    """A copy on the host that is being made, and the event that tells when it is complete."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=can_pin(values.device.type))
    host.copy_(values, non_blocking=True)
    return host, event_of(values.device)
