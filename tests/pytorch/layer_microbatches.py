# SPDX-License-Identifier: Apache-2.0
"""Microbatches of a layer, run as one call, by branches and by modules."""

import contextlib
import copy

import torch
from pytorch.helpers import assert_same_bits, counted, data_generator, states_of
from pytorch.layer_ways import (
    DROPS,
    FUSED,
    backward,
    by_branches,
    by_modules,
    in_parts,
    make_attention,
    make_layer,
    random_states,
    region,
    watched,
)
from pytorch.module_cases import quantized
from tols import F32

import transformer_engine.pytorch as te
from transformer_engine.pytorch.module.linear_base import LinearBase

NORMED = {"input_layernorm": True, "return_layernorm_output": True}
LAYERS = {
    "encoder": {},
    "encoder, fused": {**FUSED, **DROPS},
    "decoder": {"layer_type": "decoder", **DROPS},
    "decoder, fused": {"layer_type": "decoder", **FUSED},
    "parallel": {"parallel_attention_mlp": True, **FUSED},
    "post-residual": {"apply_residual_connection_post_layernorm": True, "bias": False, **FUSED},
}
ATTENTIONS = {
    "attention": {},
    "attention, fused": {**FUSED, **NORMED},
    "cross-attention": {"attention_type": "cross", **NORMED},
    "cross-attention, fused": {"attention_type": "cross", **FUSED},
}
KINDS = [*LAYERS, *ATTENTIONS]
STEP = (True, False, False)
"""``is_first_microbatch`` of the microbatches of a step."""


def make(kind, device, dtype):
    if kind in LAYERS:
        return make_layer(device, dtype, **LAYERS[kind])
    return make_attention(device, dtype, **ATTENTIONS[kind])


def linears_of(layer):
    return [module for module in layer.modules() if isinstance(module, LinearBase)]


def weights_of(layer):
    """Weights of the linear layers that are whole."""
    names = ("weight", "fc1_weight", "fc2_weight")
    found = [getattr(module, name, None) for module in linears_of(layer) for name in names]
    return [weight for weight in found if weight is not None]


def accumulate(layer, dtype=F32, **marks):
    """Let the modules with whole weights add to a random ``main_grad`` of each; with attributes."""
    generator = data_generator()
    for module in linears_of(layer):
        module.fuse_wgrad_accumulation = getattr(module, "_split", None) is None
    for weight in weights_of(layer):
        weight.main_grad = torch.randn(weight.shape, generator=generator).to(weight.device, dtype)
        for name, value in marks.items():
            setattr(weight, name, value)


def microbatch(layer, number, first, recipe, given):
    """Run one: its results, what it adds to, and how much was cast and multiplied."""
    fresh = dict(given)
    for name in ("hidden_states", "encoder_output"):
        if name in given:
            fresh[name] = (given[name].detach() * (1 + number)).requires_grad_()
    with counted() as gemms:
        with region(recipe):
            out = layer(is_first_microbatch=first, **fresh)
        outs = list(out) if isinstance(out, tuple) else [out]
        backward(outs)
    told = [getattr(weight, "grad_added_to_main_grad", None) for weight in weights_of(layer)]
    main = [getattr(weight, "main_grad", None) for weight in weights_of(layer)]
    return {
        "outputs": [out.detach() for out in outs],
        "inputs": [value.grad for name, value in fresh.items() if name in given],
        "parameters": [None if p.grad is None else p.grad.clone() for p in layer.parameters()],
        "main": [None if grad is None else grad.clone() for grad in main],
        "told": torch.tensor([-1 if mark is None else int(mark) for mark in told]),
        "state": states_of(layer),
        "random": random_states(outs[0].device.type),
        "counts": torch.tensor([quantized(), gemms.fp8, gemms.other]),
    }


def run_steps(layer, recipe, given, steps=2, firsts=STEP):
    """Microbatches of steps, after each of which the parameters change."""
    found = []
    for _ in range(steps):
        for number, first in enumerate(firsts):
            found.append(microbatch(layer, number, first, recipe, given))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(0.75)
                parameter.grad = None
    return found


def assert_microbatches_agree(layer, run, prepare=lambda layer: None, whole=True):
    """Assert that ``run(layer)`` gives the same of all ways; return what it gives."""
    seed, results = int(torch.randint(2**31, ())), []
    ways = contextlib.nullcontext, by_branches, by_modules, None
    for way in ways:
        own = copy.deepcopy(layer)
        te.reset()
        torch.manual_seed(seed)
        prepare(own)
        with in_parts(own) if way is None else way(), watched() as found:
            results.append(run(own))
        taken = {taken for name, taken in found if name == type(layer).__name__}
        assert way not in ways[:1] or taken == {whole}, found
        assert_same_bits(results[0], results[-1], str(way))
    return results[0]
