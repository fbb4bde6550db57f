# SPDX-License-Identifier: Apache-2.0
"""Modules under implementations that a test registers, and steps of them."""

import contextlib
import threading
from functools import partial

import torch
from comparators import assert_bits
from tols import E4M3, F32, PASSED_ON, tol

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.plugin import adapters, core as plugin

TOKENS, HIDDEN, FFN = 32, 64, 128
RECIPES = {
    "plain": None,
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "row": recipes.Float8RowScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    # Random numbers of a cast by itself are others than those of a plan.
    "nvfp4": partial(recipes.NVFP4BlockScaling, disable_stochastic_rounding=True),
}
MODULES = {
    "LayerNorm": lambda **o: te.LayerNorm(HIDDEN, **o),
    "RMSNorm": lambda **o: te.RMSNorm(HIDDEN, zero_centered_gamma=True, **o),
    "Linear": lambda **o: te.Linear(HIDDEN, 48, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(HIDDEN, 48, normalization="RMSNorm", **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(HIDDEN, FFN, **o),
    "gated": lambda **o: te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **o),
    "TransformerLayer": lambda **o: te.TransformerLayer(
        HIDDEN, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, **o
    ),
}
NAMES = {
    "LayerNorm": {"layernorm_fwd", "layernorm_bwd"},
    "RMSNorm": {"rmsnorm_fwd", "rmsnorm_bwd"},
    "Linear": {"generic_gemm"},
    "LayerNormLinear": {"rmsnorm_fwd", "rmsnorm_bwd", "generic_gemm"},
    "LayerNormMLP": {"layernorm_fwd", "layernorm_bwd", "generic_gemm"},
    "gated": {"layernorm_fwd", "layernorm_bwd", "generic_gemm", "swiglu", "dswiglu"},
    "TransformerLayer": {"layernorm_fwd", "layernorm_bwd", "generic_gemm"},
}
KIND = plugin.BackendImplKind


def register(op, fn, **options):
    impl = plugin.OpImpl(op, "vendor.test", KIND.VENDOR, fn, vendor="test", **options)
    plugin.get_registry().register(impl)
    return impl


def native(op):
    """Implementation of this library."""
    return plugin.get_registry().get_implementation(op, adapters.NATIVE).fn


def made(name, device, dtype=F32, **options):
    return MODULES[name](params_dtype=dtype, device=device, **options)


def data(device, dtype=F32):
    return torch.randn(TOKENS // 2, 2, HIDDEN, device=device).to(dtype)


def step(module, x, recipe=None, policy=None, wrap=None, outside=True):
    """Results and gradients of a step; its backward outside of the policy, where it has ended."""
    x = x.detach().clone().requires_grad_()
    region = te.autocast(enabled=recipe is not None, recipe=recipe and recipe())
    torch.manual_seed(7)
    with policy or contextlib.nullcontext(), region:
        y = module(x) if wrap is None else wrap(module, x)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    loss = (y.float() * weights.sin()).sum()
    if outside:
        loss.backward()
    found = [y.detach(), x.grad, *(p.grad for p in parameters(module))]
    for parameter in parameters(module):
        parameter.grad = None
    return found


def parameters(module):
    return list(getattr(module, "_orig_mod", module).parameters())


def ran(before):
    """Implementations that ran since, and how often, without this library's own."""
    now = plugins.counts()
    return {
        key: now[key] - before.get(key, 0)
        for key in now
        if now[key] > before.get(key, 0) and not key.endswith(adapters.NATIVE)
    }


def same(got, wanted):
    """Tensors of two steps have the same bits."""
    for one, exact in zip(got, wanted, strict=True):
        assert_bits(one, exact)


def distance(got, wanted):
    """Mean square of the error, relative but of what is 0 save for rounding.

    That is the gradient of a key's bias. Values of these programs are of the order of 1.
    """
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).square().mean() / wanted.square().mean().clamp(min=2.0**-12))


SAME = tol("chain", F32, FFN)
"""Of two ways to compute a step in fp32."""
RECAST = PASSED_ON * tol("recast", E4M3) / (TOKENS * HIDDEN)
"""Of two in FP8: values whose last bits differ fall to two sides of a boundary now and then."""


def bound_of(recipe):
    """NVFP4's codes are four times as far apart."""
    return {"plain": SAME, "nvfp4": 16 * RECAST}.get(recipe, RECAST)


def shifted(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    """RMSNorm and one more: results show that it ran."""
    inp = input.float()
    rsigma = (inp.square().mean(-1) + eps).rsqrt()
    factor = weight.float() + 1 if zero_centered_gamma else weight.float()
    return (inp * rsigma[..., None] * factor + 1).to(otype), None, rsigma


class Recorded:
    """Implementations of RMSNorm that note what they are asked, and in which thread."""

    def __init__(self):
        self.calls = []

    def forward(self, *args):
        self.calls.append(("forward", threading.get_ident()))
        return shifted(*args)

    def backward(self, dy, x, rsigma, gamma, sm_margin=0, zero_centered_gamma=False, eps=1e-5):
        self.calls.append(("backward", threading.get_ident()))
        return torch.full_like(x, 3.0), torch.full_like(gamma, 5.0)

    @property
    def ways(self):
        return [way for way, _ in self.calls]

    def register(self):
        register("rmsnorm_fwd", self.forward)
        register("rmsnorm_bwd", self.backward)
        return self
