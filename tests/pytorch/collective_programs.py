# SPDX-License-Identifier: Apache-2.0
"""What each rank runs of the tests of reductions and collectives."""

import gc

import torch
import torch.distributed as dist
from pytorch.distributed_programs import to_cpu
from pytorch.helpers import arenas, state_of, states_of

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

# ---- amaxes of ranks whose memory differs --------------------------------------------------------


def _train(layers, data, recipe, group=None):
    """Train layers one after another; each has its own (input, gradient of the output)."""
    for layer, (x, grad) in zip(layers, data, strict=True):
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            out = layer(x)
        out.backward(grad)


def garbage(device, count, lengths, data):
    """Models come and go. Rank 0 keeps the dead ones, the others collect them at once.

    Returns the states of the models, and how many chunks there are at the end.
    """
    kept, states = [], []
    for length in lengths:
        recipe = DelayedScaling(amax_history_len=length)
        layers = [te.Linear(16, 16, device=device) for _ in range(count)]
        mine = [[t.to(device) for t in pair] for pair in data[dist.get_rank()]]
        for _ in range(2):
            _train(layers, mine * count, recipe)
        states.append(to_cpu(states_of(torch.nn.ModuleList(layers))))
        if dist.get_rank() == 0:
            kept.append(layers)
        del layers
        gc.collect()
    return states, [len(arena.chunks) for arena in arenas("forward")]


def returning(device, lengths, data):
    """One model under several recipes by turns; its state, and the slots that are taken."""
    layer = te.Linear(16, 16, device=device)
    mine = [[t.to(device) for t in pair] for pair in data[dist.get_rank()]]
    for length in lengths:
        _train([layer], mine, DelayedScaling(amax_history_len=length))
    found = arenas("forward")
    taken = [sum(chunk.used) for arena in found for chunk in arena.chunks]
    return to_cpu(state_of(layer)), taken


def ranks_that_change(device, data, folder):
    """A model before there is a process group, under one, in a part of it, and after it.

    Returns whether the ranks shared the state in each of these times.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = [[t.to(device) for t in pair] for pair in data[rank]]
    recipe = DelayedScaling(amax_history_len=2)
    dead = te.Linear(16, 16, device=device)
    layer = te.Linear(16, 16, device=device)
    states = []

    def train(group=None):
        for _ in range(2):  # where the ranks have changed, the first step finds it out
            _train([layer], mine, recipe, group)
        states.append(to_cpu(state_of(layer)))

    dist.destroy_process_group()
    if rank == 0:  # it takes slots before the other one
        _train([dead], mine, recipe)
    train()
    del dead
    gc.collect()
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, f"file://{folder}/again", rank=rank, world_size=size)
    train()
    group = dist.new_group()
    train(group)
    dist.destroy_process_group(group)
    train()
    return states


# ---- collectives of tensor parallelism -----------------------------------------------------------


def largest(device, tensors):
    """The maximum over the ranks, in place."""
    found = tensors[dist.get_rank()].to(device)
    te.quantization.FP8GlobalStateManager.reduce_tensor_across_group_op_max(found, None)
    return found.cpu()


def collectives(device, tensors, wait):
    """Run each collective on this rank's tensor; `wait`: asynchronously, and wait for it."""
    from transformer_engine.pytorch import distributed

    inp = tensors[dist.get_rank()].to(device)
    given = inp.clone()
    rows = [distributed.get_distributed_world_size() * len(inp), len(inp) // len(tensors)]
    buffers = [inp.new_empty(n, *inp.shape[1:]) for n in rows]
    found = []
    for call in (
        lambda: distributed.gather_along_first_dim(inp, None, wait),
        lambda: distributed.gather_along_first_dim(inp, None, wait, output_tensor=buffers[0]),
        lambda: distributed.reduce_scatter_along_first_dim(inp, None, wait),
        lambda: distributed.reduce_scatter_along_first_dim(inp, None, wait, output=buffers[1]),
        lambda: distributed.allreduce(inp.clone(), None, wait),
    ):
        out, handle = call()
        assert (handle is not None) == (wait and len(tensors) > 1)
        if handle is not None:
            handle.wait()
        found.append(out.clone())
    assert torch.equal(inp, given)
    part = distributed.split_tensor_into_1d_equal_chunks(inp, None, new_buffer=True)
    assert part.shape == (inp.numel() // len(tensors),)
    found.append(part)
    whole = distributed.gather_split_1d_tensor(part, None)
    return distributed.get_distributed_rank(), [t.cpu() for t in found], whole.cpu()


def gathered(device, tensors):
    """Rows of all ranks."""
    mine = tensors[dist.get_rank()].to(device)
    return te.distributed.gather_along_first_dim(mine, dist.group.WORLD)[0].cpu()
