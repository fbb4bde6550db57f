# SPDX-License-Identifier: Apache-2.0
"""What each rank runs of tests/pytorch/test_shared_scales.py: amaxes that ranks have in common."""

import contextlib
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from pytorch.distributed_programs import to_cpu
from pytorch.helpers import state_of, states_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.scaling_state import reduction

WIDTH = 16
SECONDS = 20  # time-out of a group that works, or fails at once
ALONE = 2  # of one in which a rank waits for another that does not come
DEATH = 5  # of one of which a rank ends


@contextlib.contextmanager
def counted():
    """Numbers of elements of the buffers that are reduced, in order."""
    sizes, plain = [], reduction.Peers.reduce

    def reduce(self, buffer):
        sizes.append(buffer.numel())
        return plain(self, buffer)

    reduction.Peers.reduce = reduce
    try:
        yield sizes
    finally:
        reduction.Peers.reduce = plain


def make_layers(count, device, **options):
    return torch.nn.ModuleList(
        te.Linear(WIDTH, WIDTH, device=device, **options) for _ in range(count)
    )


def region(layers, x, recipe, group=None):
    with te.autocast(recipe=recipe, amax_reduction_group=group):
        for layer in layers:
            x = layer(x)
    return x


def own(device, data):
    """Input of this rank, with a gradient."""
    return data[dist.get_rank()].to(device).requires_grad_()


def each_reads(layers):
    """Wait for what was started."""
    for layer in layers:
        layer.get_extra_state()


# ---- programs that go well -----------------------------------------------------------------------


def packed(device, counts, data):
    """Steps over ever more layers: sizes of the buffers of each step, amaxes of the inputs."""
    recipe = DelayedScaling(amax_history_len=4)
    layers, found = make_layers(max(counts), device), []
    for count in counts:
        inputs = [own(device, data) * (n + 1) for n in range(count)]
        with counted() as sizes:
            with te.autocast(recipe=recipe):
                outs = [layer(x) for layer, x in zip(layers, inputs, strict=False)]
            sum(out.sum() for out in outs).backward()
            each_reads(layers[:1])
        found.append(list(sizes))
    amaxes = [state_of(layer)["forward"][1][-1, 0].cpu() for layer in layers]
    return found, torch.stack(amaxes)


def several_groups(device, data):
    """One region over all ranks, one over pairs, one over none: amaxes of their inputs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group(list(range(at, min(at + 2, size)))) for at in range(0, size, 2)]
    regions = [
        (DelayedScaling(amax_history_len=3), None),
        (DelayedScaling(amax_history_len=3), pairs[rank // 2]),
        (DelayedScaling(amax_history_len=3, reduce_amax=False), None),
    ]
    layers = make_layers(3, device)
    for _ in range(2):
        x = own(device, data)
        outs = [region([layer], x, *how) for layer, how in zip(layers, regions, strict=True)]
        sum(outs).sum().backward()
    return torch.stack([state["forward"][1][-1, 0].cpu() for state in states_of(layers)])


WAYS = ("plain", "reentrant", "not reentrant", "torch", "microbatches", "delayed", "unused")


def _run(way, layers, x, recipe):
    """One step; returns how many regions it had."""
    first, second = layers
    if way == "microbatches":  # all forwards come first, as in a pipeline
        outs = [region(layers, x * n, recipe) for n in (1, 2)]
        for out in outs:
            out.sum().backward()
        return 2
    with te.autocast(recipe=recipe):
        if way == "unused":
            first(x)
            out = second(x)
        elif way in ("reentrant", "not reentrant"):
            out = te.checkpoint(lambda x: second(first(x)), x, use_reentrant=way == "reentrant")
        elif way == "torch":
            out = torch_checkpoint(lambda x: second(first(x)), x, use_reentrant=False)
        else:
            out = second(first(x))
    out.sum().backward()
    if way == "delayed":
        for layer in reversed(layers):
            layer.backward_dw()
    return 1


def once_for_a_region(device, way, data):
    """Steps by one of `WAYS`: reductions for each region, and the state."""
    recipe = DelayedScaling(amax_history_len=4)
    layers = make_layers(2, device, delay_wgrad_compute=way == "delayed")
    counts = []
    for _ in range(2):
        with counted() as sizes:
            regions = _run(way, layers, own(device, data), recipe)
        counts.append(len(sizes) / regions)
    return counts, to_cpu(states_of(layers))


def skipped(device, data):
    """Rank 0 runs layers in a region that the others leave empty; then all leave one empty.

    Returns the states before, between and after.
    """
    recipe, states = DelayedScaling(amax_history_len=4), []
    layers, x = make_layers(2, device), own(device, data)
    region(layers, x, recipe).sum().backward()
    states.append(to_cpu(states_of(layers)))
    for runs in (dist.get_rank() == 0, False):
        with te.autocast(recipe=recipe):
            if runs:
                layers[1](layers[0](8 * x))
        states.append(to_cpu(states_of(layers)))
    return states


def compiled(device, data):
    """A compiled function with the region inside, and the same in eager mode: their states."""
    recipe = DelayedScaling(amax_history_len=4)
    states = []
    for compiles in (False, True):
        torch.manual_seed(0)
        layers = make_layers(2, device)

        def run(x, layers=layers):
            return region(layers, x, recipe)

        function = torch.compile(run, backend="aot_eager", fullgraph=True) if compiles else run
        for number in range(3):
            function(own(device, data) * (number + 1)).sum().backward()
        states.append(to_cpu(states_of(layers)))
    return states


def trained_by_ddp(device, data):
    """Train: scales, and sizes of the scaling state in a state dict, before training and after."""
    recipe = DelayedScaling(amax_history_len=4)
    model = torch.nn.Sequential(*make_layers(2, device))
    with te.autocast(recipe=recipe):
        before = [m.get_extra_state().numel() for m in model]
    wrapped = DistributedDataParallel(model)
    for number in range(3):
        with te.autocast(recipe=recipe):
            out = wrapped(own(device, data) * (number + 1))
        out.square().mean().backward()
    state = model.state_dict()
    return to_cpu(states_of(model)), before, [state[f"{n}._extra_state"].numel() for n in range(2)]


def quantized(device, make, options, data):
    """Casts of a rank's rows with the largest amax of all ranks, and how many collectives."""
    calls, plain = [], dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        calls.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    quantizer = getattr(te, make)(with_amax_reduction=True, **_typed(make, device), **options)
    dist.all_reduce = all_reduce
    try:
        made = quantizer(data[dist.get_rank()].to(device))
    finally:
        dist.all_reduce = plain
    return made.to("cpu"), len(calls)


def _typed(make, device):
    if make == "NVFP4Quantizer":
        return {}
    return {"fp8_dtype": te.DType.kFloat8E4M3, "device": torch.device(device)}


# ---- ranks of which rank 1 differs ---------------------------------------------------------------


def _orders(layers, x, recipe, group, rank):
    region(layers[::-1] if rank == 1 else layers, x, recipe, group)


def _lacks_one(layers, x, recipe, group, rank):
    region(layers[: 2 - (rank == 1)], x, recipe, group)


def _recipes(layers, x, recipe, group, rank):
    del recipe
    region(layers, x, DelayedScaling(amax_history_len=4 + (rank == 1)), group)


def _sizes(layers, x, recipe, group, rank):
    layers[0] = te.LayerNormLinear(WIDTH, WIDTH * (1 + (rank == 1)), device=x.device)
    region(layers[:1], x, recipe, group)


def _names(layers, x, recipe, group, rank):
    layers[0] = te.Linear(WIDTH, WIDTH, device=x.device, name="q" if rank == 1 else "p")
    region(layers[:1], x, recipe, group)


def _later(layers, x, recipe, group, rank):
    """A layer that one rank alone begins to use."""
    region(layers[:1], x, recipe, group)
    each_reads(layers[:1])
    region(layers[: 1 + (rank == 1)], x, recipe, group)


def _grows(layers, x, recipe, group, rank):
    """One rank alone comes to need more buffers."""
    region(layers, x, recipe, group)
    each_reads(layers[:1])
    more = make_layers(90 if rank == 1 else 0, x.device)
    region([*layers, *more], x, recipe, group)


def _raises(layers, x, recipe, group, rank):
    """An exception on one rank in the middle of a region."""
    region(layers, x, recipe, group)
    each_reads(layers[:1])
    with (
        contextlib.suppress(ZeroDivisionError),
        te.autocast(recipe=recipe, amax_reduction_group=group),
    ):
        x = layers[0](x)
        if rank == 1:
            raise ZeroDivisionError
        layers[1](x)


def _step(layers, x, recipe, group):
    region(layers, x, recipe, group).sum().backward()
    each_reads(layers)


def _raises_and_goes_on(layers, x, recipe, group, rank):
    """It goes on with a backward, of the region before it."""
    _step(layers, x, recipe, group)
    out = region(layers, x, recipe, group)
    _raises(layers, x, recipe, group, rank)
    if rank == 1:
        out.sum().backward()


def _branches(layers, x, recipe, group, rank):
    """A branch whose output one rank does not use."""
    _step(layers, x, recipe, group)
    with te.autocast(recipe=recipe, amax_reduction_group=group):
        outs = [layer(x) for layer in layers]
    (outs[1] if rank == 1 else sum(outs)).sum().backward()
    region(layers, x, recipe, group)


CASES = {
    "orders": _orders, "lacks one": _lacks_one, "recipes": _recipes, "sizes": _sizes,
    "names": _names, "later": _later, "grows": _grows, "raises": _raises,
    "raises, goes on": _raises_and_goes_on, "branches": _branches,
}  # fmt: skip


def differing(device, case, limit, checks, data):
    """Run a case: the error of this rank, or None."""
    group = dist.new_group(timeout=timedelta(seconds=limit))
    recipe = DelayedScaling(amax_history_len=4)
    layers = make_layers(2, device)
    os.environ["TE_CHECK_RANKS"] = str(int(checks))
    try:
        CASES[case](layers, own(device, data), recipe, group, dist.get_rank())
        each_reads(layers)
    except RuntimeError as error:
        return str(error)
    finally:
        del os.environ["TE_CHECK_RANKS"]
    return None


def checked(device, data):
    """Train with layouts compared each time: the states of layers, and of twins without that."""
    states = []
    for checks in ("1", "0"):
        os.environ["TE_CHECK_RANKS"] = checks
        torch.manual_seed(0)
        layers = make_layers(2, device)
        for _ in range(2):
            region(layers, own(device, data), DelayedScaling(amax_history_len=4)).sum().backward()
        states.append(to_cpu(states_of(layers)))
    del os.environ["TE_CHECK_RANKS"]
    return states


def dies(device, data, file):
    """The last rank ends in the middle of a region; the first writes its error to a file."""
    group = dist.new_group(timeout=timedelta(seconds=DEATH))
    recipe = DelayedScaling(amax_history_len=4)
    layers, x = make_layers(2, device), own(device, data)
    region(layers, x, recipe, group)
    each_reads(layers)
    dist.barrier()
    try:
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            x = layers[0](x)
            if dist.get_rank() == dist.get_world_size() - 1:
                os._exit(0)
            layers[1](x)
        each_reads(layers)
    except RuntimeError as error:
        if dist.get_rank() == 0:
            with open(file, "w") as out:
                out.write(str(error))
