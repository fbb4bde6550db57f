# SPDX-License-Identifier: Apache-2.0
"""What each rank runs of the tests of activations that ranks share."""

import contextlib
import gc
import os
import weakref
from unittest import mock

import torch
import torch.distributed as dist

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

RECIPES = {None: None, "delayed": DelayedScaling, "current": Float8CurrentScaling}


def make_layers(weights, device):
    """Two layers with dropout between them, of given weights."""
    layers = torch.nn.ModuleList(
        [te.LayerNormMLP(32, 64, device=device), te.Linear(32, 32, device=device)]
    )
    layers.load_state_dict(weights, strict=False)
    return layers


def _region(recipe):
    return te.autocast(recipe=recipe()) if recipe is not None else contextlib.nullcontext()


def checkpointed(device, weights, x, grad, recipe, way):
    """Output, gradients and whether the input was let go; `way`: options of te.checkpoint."""
    layers = make_layers(weights, device)
    leaf = x.to(device).requires_grad_()
    torch.manual_seed(7)

    def forward(hidden, scale, shift=0.0):
        hidden = torch.nn.functional.dropout(layers[0](hidden), 0.5)
        return layers[1](hidden) * scale + shift

    scale = torch.full((), 3.0, device=device, requires_grad=True)
    whole = leaf * 2
    alive = weakref.ref(whole)
    with _region(RECIPES[recipe]):
        if way is None:
            out = forward(whole, scale, shift=1.0)
        else:
            options = {"distribute_saved_activations": True, "tp_group": dist.group.WORLD, **way}
            out = te.checkpoint(forward, whole, scale, shift=1.0, **options)
    del whole
    gc.collect()
    gone = alive() is None
    out.backward(grad.to(device))
    found = [out.detach(), leaf.grad, scale.grad, *(p.grad for p in layers.parameters())]
    return [t.cpu() for t in found], gone


def other_inputs(device):
    """What checkpoints say that compare inputs: of equal ones, and of others on each rank."""
    found = []
    for number in (0.0, float(dist.get_rank())):
        x = torch.full((4, 8), number, device=device, requires_grad=True)
        options = {"distribute_saved_activations": True, "tp_group": dist.group.WORLD}
        try:
            with mock.patch.dict(os.environ, TE_CHECK_RANKS="1"):
                te.checkpoint(lambda x: x.sin(), x, **options).sum().backward()
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


# ---- FSDP1 ---------------------------------------------------------------------------------------

RATE = 0.1


def _model(weights, device):
    model = torch.nn.Sequential(*make_layers(weights, device))
    return model, torch.optim.SGD(model.parameters(), lr=RATE)


def _steps(model, optimizer, batches, recipe, device, sums=None):
    """Outputs of training steps on the batches of this rank; `sums` adds up gradients."""
    outputs = []
    for shares in batches:
        with _region(RECIPES[recipe]):
            out = model(shares[dist.get_rank()].to(device))
        out.square().mean().backward()
        if sums is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(out.detach().cpu())
    return outputs


def by_hand(device, weights, batches, recipe):
    """Each rank has the model, and gradients are their mean: outputs and parameters."""
    model, optimizer = _model(weights, device)
    outputs = _steps(model, optimizer, batches, recipe, device, sums=True)
    return outputs, {name: p.detach().cpu() for name, p in model.named_parameters()}


def sharded(device, weights, batches, recipe, original):
    """The same under FSDP1, each layer wrapped, and the groups of the layers' modules."""
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else device
    options = {"device_id": torch.device(place), "use_orig_params": original}
    fsdp = te.distributed.FullyShardedDataParallel
    model, _ = _model(weights, device)
    model = fsdp(torch.nn.Sequential(*[fsdp(layer, **options) for layer in model]), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    outputs = _steps(model, optimizer, batches, recipe, device)
    groups = [layer.module.fsdp_group is layer.process_group for layer in model.module]
    with fsdp.summon_full_params(model):
        inner = "_fsdp_wrapped_module."
        parameters = {
            name.replace(inner, ""): p.detach().cpu().clone()
            for name, p in model.named_parameters()
        }
    return outputs, parameters, groups


# ---- context parallelism -------------------------------------------------------------------------


def batch_of_rank(device, limits, batch, form, strategy):
    """Get this rank's part of a batch, and that of a batch without tensors."""
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    options = {"qvk_format": form, "load_balancing_strategy": te.CPLoadBalancingStrategy(strategy)}
    limits = limits if limits is None else limits.to(device)
    call = context_parallel.get_batch_on_this_cp_rank
    parts = call(limits, *(tensor.to(device) for tensor in batch), dist.group.WORLD, **options)
    without = call(limits, None, None, None, **options)
    return [part.cpu() for part in parts], list(without)
