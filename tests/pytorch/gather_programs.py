# SPDX-License-Identifier: Apache-2.0
"""What each rank runs of the tests of gathers of quantized tensors."""

import torch
import torch.distributed as dist
from pytorch.quantized_cases import FORMATS, current, delayed

from transformer_engine.pytorch.distributed import gather_along_first_dim
from transformer_engine.pytorch.tensor import gathering


def quantizer_of(name, device, usages):
    """A quantizer by its name, with these usages."""
    made = {"delayed": lambda: delayed(device), "current": current, **FORMATS}[name]()
    made.set_usage(**usages)
    return made


def _noted(monitor):
    """`gather_rows` that notes the dtypes of what it sends."""
    plain = gathering.gather_rows

    def gather_rows(inp, *args):
        monitor.add(inp.dtype)
        return plain(inp, *args)

    return plain, gather_rows


def gather(device, name, tensors, usages, before, wait, given):
    """Gather this rank's tensor: the result, and the dtypes of what ranks have exchanged.

    `before`: quantized before; `wait`: asynchronously; `given`: into a tensor.
    """
    inp = tensors[dist.get_rank()].to(device)
    quantizer = quantizer_of(name, device, usages)
    shape = (len(tensors) * inp.shape[0], *inp.shape[1:])
    out = quantizer.make_empty(shape, dtype=inp.dtype, device=device) if given else None
    if before:
        caster = quantizer.copy()
        if quantizer.supports_only_rowwise_all_gather():
            caster.set_usage(rowwise=True, columnwise=False)
        caster.with_amax_reduction, caster.amax_reduction_group = True, None
        inp = caster(inp)
    sent = set()
    plain, gathering.gather_rows = _noted(sent)
    try:
        found, handle = gather_along_first_dim(inp, None, wait, quantizer, out)
    finally:
        gathering.gather_rows = plain
    assert out is None or found is out
    if handle is not None:
        assert wait
        handle.wait()
        handle.wait()  # waits for nothing more
    return found.to("cpu"), sent


def gathers(device, name, cases):
    """`gather` for each case: the arguments after the name."""
    return [gather(device, name, *case) for case in cases]


def gather_in_pairs(device, name, tensors):
    """Gather this rank's tensor in a group of two, quantized with the largest amax of these."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, len(tensors), 2)]
    rank = dist.get_rank()
    quantizer = quantizer_of(name, device, {"rowwise": True, "columnwise": True})
    inp = tensors[rank].to(device)
    found, _ = gather_along_first_dim(inp, pairs[rank // 2], quantizer=quantizer)
    for pair in pairs:
        dist.destroy_process_group(pair)
    return found.to("cpu")


def refused(device, tensors):
    """Names of the errors of wrong calls of collectives, each with its text."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from transformer_engine.pytorch import distributed as d

    inp, size = tensors[dist.get_rank()].to(device), len(tensors)
    other = dist.new_group([0])
    mesh = init_device_mesh(device, (size,))
    sharded = distribute_tensor(torch.cat(tensors).to(device), mesh, [Shard(0)])
    maker = current()
    narrow = maker(inp)
    calls = {
        "gather DTensor": lambda: d.gather_along_first_dim(sharded, None),
        "quantized gather DTensor": lambda: d.gather_along_first_dim(
            sharded, None, quantizer=maker
        ),
        "scatter DTensor": lambda: d.reduce_scatter_along_first_dim(sharded, None),
        "reduce DTensor": lambda: d.allreduce(sharded),
        "reduce quantized": lambda: d.allreduce(narrow),
        "gather quantized": lambda: d.gather_along_first_dim(narrow, None),
        "scatter rows": lambda: d.reduce_scatter_along_first_dim(inp[: size + 1], None),
        "gather output": lambda: d.gather_along_first_dim(inp, None, output_tensor=inp),
        "scatter output": lambda: d.reduce_scatter_along_first_dim(inp, None, output=inp),
        "quantized output": lambda: d.gather_along_first_dim(
            inp, None, quantizer=maker, output_tensor=narrow
        ),
        "plain output": lambda: d.gather_along_first_dim(
            inp, None, quantizer=maker, output_tensor=torch.cat(tensors).to(device)
        ),
        "no quantizer": lambda: d.gather_along_first_dim(inp, None, quantizer=torch.nn.ReLU()),
        "no dims": lambda: d.gather_along_first_dim(inp.sum(), None),
        "coalesced": lambda: d.gather_along_first_dim(
            inp, None, quantizer=maker, external_coalescing=True
        ),
    }
    if dist.get_rank() > 0:
        calls["not in group"] = lambda: d.allreduce(inp, other)
        calls["not in group, quantized"] = lambda: d.gather_along_first_dim(
            inp, other, quantizer=maker
        )
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError, NotImplementedError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
