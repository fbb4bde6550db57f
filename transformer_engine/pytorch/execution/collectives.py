# SPDX-License-Identifier: Apache-2.0
"""Collectives of plans by torch.distributed: the functions of their stages, over a process group.

A plan knows of a collective how many ranks it has, and what is sent and received
(`te_collective_kind`). Over which group it runs is said by the functions that a run is given.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.plan_text import Plan
from transformer_engine.pytorch.execution.stages import StageBuffers

_Started = list[tuple[Any, Callable[[], Any] | None]]
"""Works, and what is done with what each has received."""


def _named(name: str, older: str) -> Callable:
    """A collective of torch, which renames some: by its name, or by the older one."""
    return getattr(torch.distributed, name, None) or getattr(torch.distributed, older)


def gather_rows(whole: Tensor, part: Tensor, **options: Any) -> Any:
    """Put the tensors of all ranks one below the other; arguments and result as of torch's."""
    return _named("all_gather_single", "all_gather_into_tensor")(whole, part, **options)


def scatter_sum(part: Tensor, whole: Tensor, **options: Any) -> Any:
    """Sum over ranks, of which each gets its rows; arguments and result as of torch's."""
    return _named("reduce_scatter_single", "reduce_scatter_tensor")(part, whole, **options)


def _raw(tensor: Tensor) -> Tensor:
    """FP8 as bytes, which all backends send."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _gather(tensors: Sequence[Tensor], options: dict) -> _Started:
    """Of pairs (part, whole): parts are put together along the dim in which they differ."""
    started: _Started = []
    for part, whole in zip(map(_raw, tensors[::2]), map(_raw, tensors[1::2]), strict=True):
        ranks = options["group"].size()
        if whole.shape == (ranks * part.shape[0], *part.shape[1:]):
            started.append((gather_rows(whole, part, **options), None))
            continue
        if whole.shape != (part.shape[0], ranks * part.shape[1]):
            raise ValueError(
                f"{tuple(part.shape)} of each of {ranks} ranks: these are no {tuple(whole.shape)}; "
                "quantized forms are gathered of rows in a multiple of the height of their tiles"
            )
        room = part.new_empty(ranks, *part.shape)
        spread = whole.view(part.shape[0], ranks, part.shape[1]).copy_
        work = gather_rows(room.flatten(0, 1), part, **options)
        started.append((work, functools.partial(spread, room.transpose(0, 1))))
    return started


def _scatter(tensors: Sequence[Tensor], options: dict) -> _Started:
    whole, part = tensors
    return [(scatter_sum(part, whole, **options), None)]


def _sum(tensors: Sequence[Tensor], options: dict) -> _Started:
    (tensor,) = tensors
    return [(torch.distributed.all_reduce(tensor, **options), None)]


_OF_KIND: dict[int, tuple[Callable | None, Callable | None]] = {
    _core.COLLECTIVE_GATHER: (_gather, _scatter),
    _core.COLLECTIVE_REDUCE_SCATTER: (_scatter, _gather),
    _core.COLLECTIVE_ALL_REDUCE: (_sum, None),
    _core.COLLECTIVE_COPY: (None, _sum),
}
"""Forward and backward; `te_collective_step` is the place."""


def functions_of(plan: Plan, group: Any) -> dict[str, Callable]:
    """Functions of the stages of a plan's collectives, by name, which run them over a group.

    ``f(buffers)`` starts the work, and waits for it unless the plan has the stage in two halves;
    ``f(buffers, started)`` of a second half waits. ValueError where the group has another number of
    ranks than a collective.
    """
    functions: dict[str, Callable] = {}
    for stage in plan.stages:
        node = plan.graph.nodes[stage.node] if stage.node >= 0 else None
        if node is None or node.kind != _core.NODE_COLLECTIVE:
            continue
        if node.ranks != group.size():
            raise ValueError(f"{stage.name}: {node.ranks} ranks, over a group of {group.size()}")
        if stage.name.endswith("_finish"):
            functions[stage.name] = _finish
            continue
        run = functools.partial(_start, _OF_KIND[node.variant][stage.step], group, stage.buffers)
        functions[stage.name] = run if stage.half >= 0 else functools.partial(_at_once, run)
    return functions


def _start(op: Callable, group: Any, numbers: Sequence[int], buffers: StageBuffers) -> _Started:
    tensors = [buffers.lend(number) for number in numbers]
    return op(tensors, {"group": group, "async_op": True})


def _finish(buffers: StageBuffers | None, started: _Started) -> None:
    del buffers
    for work, put in started:
        work.wait()
        if put is not None:
            put()


def _at_once(run: Callable, buffers: StageBuffers) -> None:
    _finish(None, run(buffers))
