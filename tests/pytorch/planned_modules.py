# SPDX-License-Identifier: Apache-2.0
"""Modules that a program composes, with their inputs, and how tests run them."""

import copy

import torch
from pytorch.helpers import RECIPES
from pytorch.quantized_cases import WEIGHT_RECIPES

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling, MXFP8BlockScaling

HIDDEN, HEADS, TOKENS, SOURCE, BATCH = 64, 4, 8, 6, 2


class Parallel(te.PlannedModule):
    """Attention and MLP side by side, a norm behind them."""

    def __init__(self, dropout=0.1, **options):
        super().__init__()
        self.attention = te.MultiheadAttention(
            HIDDEN, HEADS, input_layernorm=True, attention_dropout=0.0, **options
        )
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", **options)
        self.norm = te.RMSNorm(HIDDEN, **options)
        self.dropout = dropout

    def emit(self, nodes, x, mask_type="causal"):
        both = nodes.run(self.attention, x, attn_mask_type=mask_type)
        both = nodes.add(both, nodes.run(self.mlp, x))
        out = nodes.add(both, x, dropout=self.dropout if self.training else 0.0)
        return nodes.run(self.norm, out)


class EncoderDecoder(te.PlannedModule):
    """Attention to itself, attention to a source, and a block of its own."""

    def __init__(self, **options):
        super().__init__()
        own = {"input_layernorm": True, "attention_dropout": 0.0, **options}
        self.attention = te.MultiheadAttention(HIDDEN, HEADS, attn_mask_type="causal", **own)
        self.cross = te.MultiheadAttention(HIDDEN, HEADS, attention_type="cross", **own)
        self.block = Parallel(0.0, **options)

    def emit(self, nodes, x, source, mask=None):
        x = nodes.add(nodes.run(self.attention, x), x)
        crossed = {} if mask is None else {"attention_mask": mask, "attn_mask_type": "arbitrary"}
        x = nodes.add(nodes.run(self.cross, x, encoder_output=source, **crossed), x)
        return nodes.run(self.block, x, mask_type="no_mask")


class Linears(te.PlannedModule):
    """Linear layers one after the other, of a list."""

    def __init__(self, count, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            te.Linear(HIDDEN, HIDDEN, bias=i % 2 == 0, **options) for i in range(count)
        )

    def emit(self, nodes, x):
        for layer in self.layers:
            x = nodes.add(nodes.run(layer, x), x)
        return x


class Gated(te.PlannedModule):
    """A gated MLP with an activation of the program's in the middle."""

    def __init__(self, **options):
        super().__init__()
        wide = 2 * HIDDEN
        self.gate = te.LayerNormLinear(HIDDEN, wide, bias=False, **options)
        self.up = te.LayerNormLinear(HIDDEN, wide, bias=False, **options)
        self.down = te.Linear(wide, HIDDEN, **options)

    def emit(self, nodes, x):
        gated = nodes.function(gate, nodes.run(self.gate, x), nodes.run(self.up, x))
        return nodes.add(nodes.run(self.down, gated), x)


def gate(x, y):
    return torch.nn.functional.mish(x) * y


class Chain(te.PlannedModule):
    """Links one after the other: modules by name, and what joins values."""

    def __init__(self, links, **options):
        super().__init__()
        self.links = links
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList(make(**options) for make in LINKS[link]) for link in links
        )

    def emit(self, nodes, x):
        first = x
        for link, layers in zip(self.links, self.layers, strict=True):
            parts = [nodes.run(layer, x) for layer in layers]
            if link == "function":
                x = nodes.function(torch.nn.functional.mish, x)
            elif link == "add":
                x = nodes.add(x, first)
            elif link == "gate":
                x = nodes.add(x, nodes.function(torch.nn.functional.mish, x))
            else:
                x = parts[0]
            for part in parts[1:]:
                x = nodes.add(x, part)
        return x


LINKS = {
    "linear": [lambda **o: te.Linear(HIDDEN, HIDDEN, **o)],
    "saving": [lambda **o: te.Linear(HIDDEN, HIDDEN, save_original_input=True, **o)],
    "norm-linear": [lambda **o: te.LayerNormLinear(HIDDEN, HIDDEN, **o)],
    "mlp": [lambda **o: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", **o)],
    "layernorm": [lambda **o: te.LayerNorm(HIDDEN, **o)],
    "rmsnorm": [lambda **o: te.RMSNorm(HIDDEN, **o)],
    "attention": [
        lambda **o: te.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, attn_mask_type="causal", **o
        )
    ],
    "heads": [
        lambda **o: te.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, qk_norm_type="RMSNorm", fuse_qkv_params=False, **o
        )
    ],
    "fork": [lambda **o: te.Linear(HIDDEN, HIDDEN, **o)] * 2,
    "threefold": [lambda **o: te.LayerNormLinear(HIDDEN, HIDDEN, **o)] * 3,
    "add": [],
    "function": [],
    "gate": [],
}
READERS = [link for link, modules in LINKS.items() if modules]
WITH_LINEARS = [link for link in READERS if link not in ("layernorm", "rmsnorm")]
CHAINED = {
    "none": lambda: None,
    **RECIPES,
    **WEIGHT_RECIPES,
    "high": lambda: Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": lambda: MXFP8BlockScaling(backward_override="dequantized"),
}

KINDS = {
    "gated": Gated,
    "parallel": Parallel,
    "encoder-decoder": EncoderDecoder,
    "linears": lambda **o: Linears(3, **o),
    "norms": lambda **o: Chain(("rmsnorm", "fork", "gate", "layernorm", "linear"), **o),
}


def inputs(kind, device, dtype=torch.float32):
    x = torch.randn(TOKENS, BATCH, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    if kind != "encoder-decoder":
        return (x,)
    source = torch.randn(SOURCE, BATCH, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    return x, source


def planned_dtype(device):
    """Attention of it is part of a plan."""
    return torch.bfloat16 if device == "cuda" else torch.float32


_LINEARS = te.Linear | te.LayerNormLinear | te.LayerNormMLP


def hooked(module):
    """A twin that calls its modules: one of them has a hook."""
    twin = copy.deepcopy(module)
    first = next(m for m in twin.modules() if isinstance(m, _LINEARS))
    first.register_forward_hook(lambda *_: None)
    return twin


def region(recipe):
    return te.autocast(recipe is not None, recipe=recipe and RECIPES[recipe]())


def step(module, given, recipe=None, **options):
    given = tuple(t.detach().clone().requires_grad_() for t in given)
    with region(recipe):
        out = module(*given, **options)
    out.square().mean().backward()
    grads = [p.grad for p in module.parameters()]
    module.zero_grad()
    return [out.detach(), *(t.grad for t in given), *grads]


def calls_of(module):
    """Calls that a module keeps; None in the place of one that its modules make."""
    kept = module.__dict__.get("_by_arguments", {}).values()
    return [call for of in kept for call in getattr(of.get("_calls"), "calls", {}).values()]


def assert_one_plan(module):
    found = calls_of(module)
    assert found and None not in found
