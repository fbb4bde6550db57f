# SPDX-License-Identifier: Apache-2.0
"""What ranks run for tests/pytorch/test_parameter_marks.py: FSDP2 replaces parameters."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
MARKS += ("allreduce",)
HIDDEN, FFN, HEADS = 32, 64, 4
RATE = 0.5


def layer_of(quantized, device, group=None, **options):
    """A layer of two ranks of tensor parallelism; one parameter has a mark of a framework."""
    init = contextlib.nullcontext()
    if quantized:
        init = te.quantized_model_init(recipe=Float8CurrentScaling())
    options = {"tp_size": 2, "set_parallel_mode": True, "sequence_parallel": True, **options}
    with init:
        layer = te.TransformerLayer(
            HIDDEN, FFN, HEADS, tp_group=group, hidden_dropout=0.0, attention_dropout=0.0,
            device=device, **options,
        )  # fmt: skip
    layer.layernorm_mlp.fc1_weight.allreduce = False
    return layer


def reset(module):
    """Give parameters on the meta device values."""
    for each in module.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()
    return module


def marks_of(module):
    """Marks of all parameters, by their names."""
    return {
        name: {mark: getattr(p, mark) for mark in MARKS if hasattr(p, mark)}
        for name, p in module.named_parameters()
    }


def sharded(device, quantized, on_meta):
    """Marks under FSDP2, and again after a forward and a backward."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    options = {} if on_meta else {"tp_size": 1}
    layer = layer_of(quantized, "meta" if on_meta else device, **options)
    fully_shard(layer, mesh=mesh)
    if on_meta:
        with torch.device(device):
            reset(layer)
        return marks_of(layer), marks_of(layer)
    before = marks_of(layer)
    layer(torch.randn(4, 2, HIDDEN, device=device)).sum().backward()
    return before, marks_of(layer)


def trained(device, state, batches):
    """Train over 2 ranks of FSDP2 x 2 of tensor parallelism; return whole parameters.

    What is split, and what gradients are summed, is said by the marks of sharded parameters.
    """
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("fsdp", "tp"))
    group, rank = mesh["tp"].get_group(), mesh.get_local_rank("tp")
    layer = layer_of(False, device, group)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            dim = getattr(p, "partition_dim", None)
            p.copy_(state[name] if dim is None else state[name].chunk(2, dim)[rank])
    fully_shard(layer, mesh=mesh["fsdp"])
    for batch in batches:
        x = batch.chunk(2, 1)[mesh.get_local_rank("fsdp")].chunk(2)[rank]
        layer(x.to(device)).square().sum().backward()
        for p in layer.parameters():
            if getattr(p, "sequence_parallel", False):
                dist.all_reduce(p.grad.to_local(), group=group)
        with torch.no_grad():
            for p in layer.parameters():
                p.sub_(p.grad, alpha=RATE / batch.numel())
                p.grad = None
    whole = {}
    for name, p in layer.named_parameters():
        part = p.full_tensor().detach()
        if getattr(p, "tensor_model_parallel", False):
            parts = [torch.empty_like(part) for _ in range(2)]
            dist.all_gather(parts, part.contiguous(), group=group)
            part = torch.cat(parts, p.partition_dim)
        whole[name] = part.cpu()
    return whole
