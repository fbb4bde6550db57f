# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process, which run the collectives of plans over plain memory."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

RANKS = 2


class World:
    """What the ranks exchange."""

    def __init__(self):
        self.barrier = threading.Barrier(RANKS, timeout=60)
        self.given = [None] * RANKS

    def exchange(self, rank, tensor):
        """The tensors of all ranks."""
        self.given[rank] = tensor.clone()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


def run_stage(world, rank, name, buffers, lend):
    """Do what the name of a stage says, over its buffers."""
    tensors = [lend(number) for number in buffers]
    tensors = [t.view(torch.uint8) if t.element_size() == 1 else t for t in tensors]
    if "gather" in name:
        for part, whole in zip(tensors[::2], tensors[1::2], strict=True):
            dim = int(part.shape[0] == whole.shape[0])
            whole.copy_(torch.cat(world.exchange(rank, part), dim))
    elif "reduce_scatter" in name:
        total = sum(world.exchange(rank, tensors[0]))
        tensors[1].copy_(total.chunk(RANKS)[rank])
    elif "all_reduce" in name:
        tensors[0].copy_(sum(world.exchange(rank, tensors[0])))
    else:
        assert "reduce_amax" in name
        for tensor in tensors:
            tensor.copy_(torch.stack(world.exchange(rank, tensor)).amax(0))


def functions_of(world, rank, plan):
    """What a rank gives a run: the first half of a stage does all."""
    functions = {}
    for stage in plan.stages:
        if stage.external and stage.name.endswith("_finish"):
            functions[stage.name] = lambda lend, started: None
        elif stage.external:
            functions[stage.name] = partial(run_stage, world, rank, stage.name, stage.buffers)
    return functions, None, lambda lend, rows, slot: lend


def each_rank(function, world):
    """Results of ``function(rank)`` on a thread for each rank; what one raises frees the others."""

    def run(rank):
        try:
            return function(rank)
        except BaseException:
            world.barrier.abort()
            raise

    with ThreadPoolExecutor(RANKS) as pool:
        tasks = [pool.submit(run, rank) for rank in range(RANKS)]
        for task in tasks:  # what one raises, not that the others wait in vain
            if not isinstance(task.exception(), threading.BrokenBarrierError | None):
                raise task.exception()
        return [task.result() for task in tasks]
