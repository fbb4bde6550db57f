# SPDX-License-Identifier: Apache-2.0
"""One Transformer layer, built five ways from the same parameters, compared and timed.

    torch               torch.nn modules and attention in plain torch operations
    te.Linear           the same with te.Linear and te.LayerNorm
    fused modules       te.LayerNormLinear and te.LayerNormMLP
    TransformerLayer    the whole layer as one module
    in FP8              the same layer inside te.fp8_autocast

All five have the causal mask.  Outputs are compared without dropout, times taken with it.  The
sizes are those of a 4096 wide layer on a GPU and small ones elsewhere.

    python examples/quickstart.py
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import quickstart_utils as utils
import torch
from torch import Tensor

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Format

# What the command line leaves open.
DEFAULTS = {
    "cpu": {"hidden": 256, "heads": 4, "seq": 128, "batch": 2, "iters": 20, "dtype": "float32"},
    "cuda": {"hidden": 4096, "heads": 32, "seq": 2048, "batch": 4, "iters": 50, "dtype": "float16"},
}


class LinearMLP(torch.nn.Module):
    """`utils.BasicMLP` with `te.Linear`."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.linear1 = te.Linear(hidden_size, ffn_hidden_size)
        self.linear2 = te.Linear(ffn_hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(torch.nn.functional.gelu(self.linear1(x), approximate="tanh"))


class Layer(torch.nn.Module):
    """A GPT layer of separate modules: `kit` says whose linear, norm and MLP."""

    KITS = {
        "torch": (torch.nn.Linear, torch.nn.LayerNorm, utils.BasicMLP),
        "te": (te.Linear, te.LayerNorm, LinearMLP),
    }

    def __init__(self, kit: str, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        linear, norm, mlp = self.KITS[kit]
        self.num_attention_heads = heads
        self.ln1 = norm(hidden)
        self.qkv_projection = linear(hidden, 3 * hidden)
        self.attention = utils.DotProductAttention(heads, hidden // heads, dropout)
        self.projection = linear(hidden, hidden)
        self.dropout = torch.nn.Dropout(dropout)
        self.ln2 = norm(hidden)
        self.mlp = mlp(hidden, 4 * hidden)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """Return [length, samples, hidden] of [length, samples, hidden]."""
        x = x + self.dropout(self.projection(self.attend(self.project(x), attention_mask)))
        return x + self.refine(x)

    def project(self, x: Tensor) -> Tensor:
        """Return queries, keys and values, head by head."""
        return self.qkv_projection(self.ln1(x))

    def attend(self, qkv: Tensor, attention_mask: Tensor) -> Tensor:
        """Split `qkv` and attend."""
        parts = qkv.unflatten(-1, (self.num_attention_heads, -1)).chunk(3, dim=-1)
        return self.attention(*parts, attention_mask)

    def refine(self, x: Tensor) -> Tensor:
        """Return the MLP's part."""
        return self.mlp(self.ln2(x))


class FusedLayer(Layer):
    """The layer with each norm fused into the linear layer or the MLP behind it."""

    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__("te", hidden, heads, dropout)
        del self.ln1, self.qkv_projection, self.ln2, self.mlp
        self.ln_qkv = te.LayerNormLinear(hidden, 3 * hidden)
        self.ln_mlp = te.LayerNormMLP(hidden, 4 * hidden)

    def project(self, x: Tensor) -> Tensor:
        return self.ln_qkv(x)

    def refine(self, x: Tensor) -> Tensor:
        return self.ln_mlp(x)


@dataclass
class Way:
    """One way to build the layer: the module, its mask and, for FP8, its region."""

    name: str
    module: torch.nn.Module
    forward_kwargs: dict
    region: dict | None = None


def build(args: argparse.Namespace) -> list[Way]:
    """Build the layer five times, the baseline first, with the baseline's parameters."""
    hidden, heads = args.hidden, args.heads
    # True hides; a query sees itself and what came before.
    future = torch.ones(args.seq, args.seq, dtype=torch.bool, device=args.device).triu(1)
    masked = {"attention_mask": future}

    def place(module: torch.nn.Module) -> torch.nn.Module:
        return module.to(device=args.device, dtype=getattr(torch, args.dtype))

    def whole_layer() -> te.TransformerLayer:
        layer = te.TransformerLayer(
            hidden, 4 * hidden, heads, hidden_dropout=args.dropout,
            attention_dropout=args.dropout, self_attn_mask_type="causal",
        )  # fmt: skip
        layer = place(layer)
        utils.share_parameters_with_transformerlayer_te_model(layer, basic)
        return layer

    basic = place(Layer("torch", hidden, heads, args.dropout))
    linears = place(Layer("te", hidden, heads, args.dropout))
    utils.share_parameters_with_basic_te_model(linears, basic)
    fused = place(FusedLayer(hidden, heads, args.dropout))
    utils.share_parameters_with_fused_te_model(fused, basic)
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")
    return [
        Way("torch", basic, masked),
        Way("te.Linear, te.LayerNorm", linears, masked),
        Way("LayerNormLinear, LayerNormMLP", fused, masked),
        Way("TransformerLayer", whole_layer(), {}),
        Way("TransformerLayer in FP8", whole_layer(), {}, {"enabled": True, "fp8_recipe": recipe}),
    ]


def output(way: Way, x: Tensor) -> Tensor:
    """Return what a layer makes of `x`, without dropout.

    It runs twice: delayed scaling learns its scales from the call before.
    """
    way.module.eval()
    for _ in range(2):
        with te.fp8_autocast(**(way.region or {"enabled": False})):
            y = way.module(x, **way.forward_kwargs)
    way.module.train()
    return y.detach()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; what it leaves open depends on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--seq", type=int, help="tokens per sample")
    parser.add_argument("--batch", type=int, help="samples")
    parser.add_argument("--iters", type=int, help="timed iterations")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1234)
    args = parser.parse_args(arguments)
    args.device = torch.device(args.device)
    for name, value in DEFAULTS.get(args.device.type, DEFAULTS["cpu"]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main(arguments: list[str] | None = None) -> list[dict[str, float | str]]:
    """Compare, print and return the table: name, relative difference and ms of each way."""
    args = parse(arguments)
    torch.manual_seed(args.seed)
    shape = (args.seq, args.batch, args.hidden)
    x, dy = (
        torch.randn(shape, device=args.device).to(getattr(torch, args.dtype)) for _ in range(2)
    )
    print(f"{list(shape)} {args.dtype} on {args.device}, {args.heads} heads, causal")
    print(f"{'':30} {'difference':>10} {'forward + backward':>20}")
    rows = []
    reference = None
    for way in build(args):
        y = output(way, x).double()
        reference = y if reference is None else reference
        difference = ((y - reference).norm() / reference.norm()).item()
        ms = utils.mean_time(
            way.module, x, dy, way.forward_kwargs, way.region, args.iters, args.iters
        )
        print(f"{way.name:30} {difference:10.2e} {ms:17.3f} ms")
        rows.append({"name": way.name, "difference": difference, "ms": ms})
    return rows


if __name__ == "__main__":
    main()
