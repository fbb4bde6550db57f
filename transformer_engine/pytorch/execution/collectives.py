# SPDX-License-Identifier: Apache-2.0
"""Collectives of plans by torch.distributed: the functions of their stages, over a process group.

A plan knows of a collective how many ranks it has, and what is sent and received
(`te_collective_kind`). Over which group it runs is said by the functions that a run is given.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from transformer_engine import _core
from transformer_engine.common import config
from transformer_engine.common.plan_text import Plan
from transformer_engine.pytorch.execution.stages import StageBuffers, Staged
from transformer_engine.pytorch.torchside.collectives import (
    agree,
    exchange_rows,
    gather_parts,
    sendable,
    start_gather,
    start_largest,
    start_scatter,
    start_sum,
)
from transformer_engine.pytorch.torchside.device import is_any_captured

_Started = list[tuple[Any, Callable[[], Any] | None]]
"""Works, and what is done with what each has received."""
_MADE: "weakref.WeakKeyDictionary[Any, set[tuple]]" = weakref.WeakKeyDictionary()
"""Kinds of collectives that the ranks of a group have compared once."""


def _agree(name: str, op: Callable, group: Any, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError on all ranks where they begin the first collective of a kind differently.

    Backends do not: ranks of other numbers of rows would end, wait for ever, or read beyond. Sizes
    are no part of a kind, as they may change with each step, which a comparison holds up.
    """
    made = _MADE.get(group)
    if made is None:
        made = _MADE[group] = set()
    kind = (op, *[tensor.dtype for tensor in tensors])
    if (kind in made and not config.TE_CHECK_RANKS.get()) or is_any_captured():
        return
    shapes = ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in tensors)
    agree(f"{name}: the ranks of tp_group do not make the same call", shapes, group)
    made.add(kind)


def _gather(tensors: Sequence[Tensor], group: Any) -> _Started:
    """Of pairs (part, whole): parts are put together along the dim in which they differ."""
    started: _Started = []
    for part, whole in zip(*[map(sendable, tensors[i::2]) for i in (0, 1)], strict=True):
        if part.shape[0] * group.size() == whole.shape[0] and whole.is_contiguous():
            started.append((start_gather(part.contiguous(), whole, group), None))
        else:
            dim = int(part.shape[0] == whole.shape[0] and part.dim() > 1)
            started.append(gather_parts(part, whole, dim, group))
    return started


def _scatter(tensors: Sequence[Tensor], group: Any) -> _Started:
    whole, part = tensors
    return [(start_scatter(whole.contiguous(), part, group), None)]


def _exchange(tensors: Sequence[Tensor], group: Any) -> _Started:
    sent, received = tensors
    return [(exchange_rows(sent, received, group), None)]


def _sum(tensors: Sequence[Tensor], group: Any) -> _Started:
    (tensor,) = tensors
    return [(start_sum(tensor, group), None)]


def _largest(tensors: Sequence[Tensor], group: Any) -> _Started:
    return [start_largest(tensors, group)]


_OF_KIND: dict[int, tuple[Callable | None, ...]] = {
    _core.COLLECTIVE_GATHER: (_gather, _scatter),
    _core.COLLECTIVE_REDUCE_SCATTER: (_scatter, _gather, _exchange),
    _core.COLLECTIVE_ALL_REDUCE: (_sum, None),
    _core.COLLECTIVE_COPY: (None, _sum),
}
"""Forward, backward, exchange of a sum in pieces; `te_collective_step` is the place."""
_PIECES = _core.COLLECTIVE_PIECES_FORWARD | _core.COLLECTIVE_PIECES_BACKWARD
_AMAXES = frozenset(
    number for number, name in enumerate(_core.LINEAR_STAGES) if name.startswith("reduce_amax_")
)
"""Stages of linear nodes between measuring and casting."""


def _op_of(stage: _core.Stage, node: _core.Node, group: Any) -> Callable | None:
    """What a stage starts over its buffers; None for one that is no collective."""
    if node.kind == _core.NODE_LINEAR and stage.external and stage.step in _AMAXES:
        return _largest
    if node.kind != _core.NODE_COLLECTIVE:
        return None
    if node.ranks != group.size():
        raise ValueError(f"{stage.name}: {node.ranks} ranks, over a group of {group.size()}")
    if node.flags & _PIECES and node.rank != group.rank():
        raise ValueError(f"{stage.name}: of rank {node.rank}, and this is rank {group.rank()}")
    return _OF_KIND[node.variant][stage.step]


def functions_of(plan: Plan, group: Any) -> dict[str, Callable]:
    """Functions of the stages of a plan's collectives, by name, which run them over a group.

    Collectives are the nodes of that kind, and external ``reduce_amax_*`` stages of linear nodes,
    which take the largest amaxes of the ranks. ``f(buffers)`` starts the work, and waits for it
    unless the plan has the stage in two halves; ``f(buffers, started)`` of a second half waits.
    ValueError where the group has another number of ranks than a collective.
    """
    functions: dict[str, Callable] = {}
    for stage in plan.stages:
        op = None if stage.node < 0 else _op_of(stage, plan.graph.nodes[stage.node], group)
        if op is None:
            continue
        if stage.name.endswith("_finish"):
            functions[stage.name] = _finish
            continue
        run = functools.partial(_start, stage.name, op, group, stage.buffers)
        functions[stage.name] = run if stage.half >= 0 else functools.partial(_at_once, run)
    return functions


@functools.lru_cache(maxsize=64)
def staged_over(plan: Plan, group: Any) -> Staged:
    """Runner of `functions_of`, for a plan that is run by itself."""
    return Staged(functions_of(plan, group))


def functions_of_call(plans: Any, group: Any) -> dict[str, Callable]:
    """The same of the forward and the backward of `CallPlans`."""
    functions = functions_of(plans.forward, group)
    if plans.backward is not None:
        functions |= functions_of(plans.backward, group)
    return functions


def _start(
    name: str, op: Callable, group: Any, numbers: Sequence[int], buffers: StageBuffers
) -> _Started:
    tensors = [buffers.lend(number) for number in numbers]  # some have the dims of the call
    tensors = [t.flatten(0, -2) if t.dim() > 2 else t for t in tensors]
    if group.size() > 1:
        _agree(name, op, group, tensors)
    return op(tensors, group)


def _finish(buffers: StageBuffers | None, started: _Started) -> None:
    del buffers
    for work, put in started:
        if work is not None:  # of one rank there is none
            work.wait()
        if put is not None:
            put()


def _at_once(run: Callable, buffers: StageBuffers) -> None:
    _finish(None, run(buffers))
