# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group of test devices run; each function gets the kind of device first."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 16


def here(kind):
    return torch.device(kind, dist.get_rank())


# ---- collectives: (work, results, what the results have to be) -----------------------------------
# `rows` has the [2 * size, 3] numbers of every rank, on the host.


def broadcast(device, rows, rank, **options):
    x = rows[rank].to(device)
    return dist.broadcast(x, 1, **options), [x], [rows[1]]


def all_gather(device, rows, rank, **options):
    found = [torch.zeros_like(x, device=device) for x in rows]
    return dist.all_gather(found, rows[rank].to(device), **options), found, rows


def all_gather_into_tensor(device, rows, rank, **options):
    found = torch.zeros_like(torch.cat(rows), device=device)
    work = dist.all_gather_into_tensor(found, rows[rank].to(device), **options)
    return work, [found], [torch.cat(rows)]


def all_to_all_single(device, rows, rank, **options):
    found = torch.zeros_like(rows[rank], device=device)
    work = dist.all_to_all_single(found, rows[rank].to(device), **options)
    return work, [found], [torch.cat([x.chunk(len(rows))[rank] for x in rows])]


def all_to_all_of_sizes(device, rows, rank, **options):
    """The first rank gets one row of each, the second one the rest."""
    split = [1, len(rows[0]) - 1]
    wanted = torch.cat([x.split(split)[rank] for x in rows])
    found = torch.zeros_like(wanted, device=device)
    work = dist.all_to_all_single(
        found, rows[rank].to(device), [split[rank]] * len(rows), split, **options
    )
    return work, [found], [wanted]


def all_to_all(device, rows, rank, **options):
    """Lists of tensors of several sizes."""
    split = [1, len(rows[0]) - 1]
    wanted = [x.split(split)[rank] for x in rows]
    found = [torch.zeros_like(x, device=device) for x in wanted]
    return dist.all_to_all(found, [*rows[rank].to(device).split(split)], **options), found, wanted


def gather(device, rows, rank, **options):
    found = [torch.zeros_like(x, device=device) for x in rows] if rank == 1 else None
    work = dist.gather(rows[rank].to(device), found, dst=1, **options)
    return work, found or [], rows if found else []


def scatter(device, rows, rank, **options):
    found = torch.zeros_like(rows[rank], device=device)
    given = [x.to(device) for x in rows] if rank == 0 else None
    return dist.scatter(found, given, src=0, **options), [found], [rows[rank]]


def send_and_receive(device, rows, rank, async_op):
    """Around a ring; both begin at once."""
    size = len(rows)
    found = torch.zeros_like(rows[rank], device=device)
    target, source = (rank + 1) % size, (rank - 1) % size
    if async_op:
        calls = [dist.P2POp(dist.isend, rows[rank].to(device), target)]
        calls.append(dist.P2POp(dist.irecv, found, source))
        for work in dist.batch_isend_irecv(calls):
            work.wait()
    elif rank == 0:
        dist.send(rows[rank].to(device), target)
        dist.recv(found, source)
    else:
        dist.recv(found, source)
        dist.send(rows[rank].to(device), target)
    return None, [found], [rows[source]]


def coalesced_gathers(device, rows, rank, async_op):
    found = [torch.zeros_like(torch.cat(rows), device=device) for _ in "ab"]
    given = [rows[rank].to(device), rows[rank].flip(0).to(device)]
    with dist._coalescing_manager(device=device, async_ops=async_op) as manager:
        for one, x in zip(found, given, strict=True):
            dist.all_gather_into_tensor(one, x)
    wanted = [torch.cat(rows), torch.cat([x.flip(0) for x in rows])]
    return manager if async_op else None, found, wanted


MOVES = [broadcast, all_gather, all_gather_into_tensor, all_to_all_single, all_to_all_of_sizes,
         all_to_all, gather, scatter, send_and_receive, coalesced_gathers]  # fmt: skip


def total(rows, op):
    stacked = torch.stack(rows)
    if op == dist.ReduceOp.MAX:
        return stacked.amax(0)
    return stacked.sum(0) if op == dist.ReduceOp.SUM else stacked.mean(0)


def all_reduce(device, rows, rank, op, **options):
    x = rows[rank].to(device)
    return dist.all_reduce(x, op, **options), [x], [total(rows, op)]


def reduce(device, rows, rank, op, **options):
    x = rows[rank].to(device)
    work = dist.reduce(x, 1, op, **options)
    return work, [x] if rank == 1 else [], [total(rows, op)] if rank == 1 else []


def reduce_scatter_tensor(device, rows, rank, op, **options):
    wanted = total(rows, op).chunk(len(rows))[rank]
    found = torch.zeros_like(wanted, device=device)
    return (
        dist.reduce_scatter_tensor(found, rows[rank].to(device), op, **options),
        [found],
        [wanted],
    )


def reduce_scatter(device, rows, rank, op, **options):
    split = [1, len(rows[0]) - 1]
    wanted = total(rows, op).split(split)[rank]
    found = torch.zeros_like(wanted, device=device)
    given = [*rows[rank].to(device).split(split)]
    return dist.reduce_scatter(found, given, op, **options), [found], [wanted]


def coalesced_reductions(device, rows, rank, op, async_op):
    found = [rows[rank].to(device), rows[rank].flip(0).to(device)]
    with dist._coalescing_manager(device=device, async_ops=async_op) as manager:
        for x in found:
            dist.all_reduce(x, op)
    return manager if async_op else None, found, [total(rows, op), total(rows, op).flip(0)]


def coalesced_scatters(device, rows, rank, op, async_op):
    wanted = total(rows, op).chunk(len(rows))[rank]
    found = [torch.zeros_like(wanted, device=device) for _ in "ab"]
    with dist._coalescing_manager(device=device, async_ops=async_op) as manager:
        for one in found:
            dist.reduce_scatter_tensor(one, rows[rank].to(device), op)
    return manager if async_op else None, found, [wanted, wanted]


REDUCTIONS = [all_reduce, reduce, reduce_scatter_tensor, reduce_scatter, coalesced_reductions,
              coalesced_scatters]  # fmt: skip


def run(kind, collective, seed, dtype, options):
    """Results of a collective and what they have to be, on the host.

    The numbers are small integers, whose sums and means of two are exact in every dtype.
    """
    torch.manual_seed(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = [torch.randint(-4, 5, (2 * size, 3)).to(dtype) for _ in range(size)]
    work, found, wanted = collective(here(kind), rows, rank, **options)
    if work is not None:
        work.wait()
    dist.barrier(device_ids=[rank])
    return [(x.cpu(), y) for x, y in zip(found, wanted, strict=True)], [
        str(x.device) for x in found
    ]


def refused(kind):
    """What a collective says whose tensors are on two kinds of device."""
    try:
        dist.all_gather([torch.ones(2)] * dist.get_world_size(), torch.ones(2, device=here(kind)))
    except RuntimeError as error:
        return str(error)


# ---- training ------------------------------------------------------------------------------------


def model(device):
    torch.manual_seed(11)
    layers = [torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.GELU(), torch.nn.Linear(2 * WIDTH, WIDTH)]
    return torch.nn.Sequential(*layers).to(device)


def distributed(kind, model):
    return DistributedDataParallel(model, device_ids=[dist.get_rank()] if kind == "npu" else None)


def sharded(kind, model):
    mesh = dist.init_device_mesh(kind, (dist.get_world_size(),))
    for layer in model:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPED = {"ddp": distributed, "fsdp": sharded}


def train(kind, way, seed):
    """Losses of three steps, and parameters after them, of the wrapped and of the plain model.

    Every rank has data of its own; the plain model sees those of all.
    """
    device, rank, size = here(kind), dist.get_rank(), dist.get_world_size()
    plain = model(device)
    wrapped = WRAPPED[way](kind, copy.deepcopy(plain))
    torch.manual_seed(seed)
    inputs = torch.randn(3, size, 8, WIDTH)
    steps = []
    for module, mine in ((wrapped, inputs[:, rank]), (plain, inputs.flatten(1, 2))):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for x in mine.to(device):
            loss = (module(x) - x.roll(1, -1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        losses = torch.stack(losses)
        if module is wrapped:
            dist.all_reduce(losses, dist.ReduceOp.AVG if kind == "npu" else dist.ReduceOp.SUM)
        weights = [full(p).detach().cpu() for p in module.parameters()]
        assert all(p.device == device for p in module.parameters())
        steps.append([losses.cpu(), *weights])
    return steps


def full(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
