# SPDX-License-Identifier: Apache-2.0
"""Attention in FP8: the module, its tensors, a call, and what of it ran."""

import torch
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

HEADS, GROUPS, CHANNELS, BATCH, QUERIES, KEYS = 4, 2, 64, 2, 24, 40
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}
LAYER = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": BF16}


def module_of(channels=CHANNELS, groups=GROUPS, **options):
    return te.DotProductAttention(HEADS, channels, groups, **options)


def tensors_of(device, channels=CHANNELS, groups=GROUPS, queries=QUERIES, keys=KEYS, order="sbhd"):
    """Leaves [sequence, batch, heads, channels], or with the first two exchanged."""
    lead = [(n, BATCH) if order == "sbhd" else (BATCH, n) for n in (queries, keys, keys)]
    counts = HEADS, groups, groups
    return [
        torch.randn(*dims, count, channels).to(device, BF16).requires_grad_()
        for dims, count in zip(lead, counts, strict=True)
    ]


def run(module, tensors, recipe, grad=None, **arguments):
    """Output and gradients of a call in a region of its own."""
    with te.autocast(recipe=recipe):
        out = module(*tensors, **arguments)
    grad = torch.ones_like(out) if grad is None else grad
    return out.detach(), *torch.autograd.grad(out, tensors, grad)


def attentions():
    """What ran since the counters were reset, by direction and dtype."""
    found = {n: v for n, v in te.counters().items() if n.startswith("attention")}
    return {f"{n.split('.')[0]}.{n.split('.')[2]}": v for n, v in found.items()}


BACK_TO_BACK = {"attention.e4m3": 1, "attention_backward.e4m3": 1}
BACK_TO_16 = {"attention.e4m3": 1, "attention_backward.bf16": 1}
