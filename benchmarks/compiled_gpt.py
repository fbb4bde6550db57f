# SPDX-License-Identifier: Apache-2.0
"""Step of a GPT of 124 M parameters, forward and backward: compiled as a whole, beside eager code.

Embedding, Transformer layers, a norm, tied logits, cross entropy; bf16 parameters, a causal mask,
no dropout. Of each recipe both ways take turns, and the ratio is the median of those of the turns.
The optimizer is left out: it runs outside of the graph. On the CPU, and with ``--quick``, the model
is a small one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import modes
import torch
from timing import Column, Figure, Machine, alternate, parser, ratio, start, warm
from torch import Tensor
from torch.nn import functional

import transformer_engine.pytorch as te

RECIPES = ("bf16", "delayed", "current", "block")
SIZES = {"hidden": 768, "heads": 12, "layers": 12, "words": 50304, "batch": 8, "length": 1024}
SMALL = {"hidden": 64, "heads": 1, "layers": 2, "words": 256, "batch": 1, "length": 64}
COLUMNS = [
    Column("recipe", "recipe", "<8s"),
    Column("way", "way", "<9s"),
    Column("ms", "step ms", ">8.2f"),
    Column("low", "low", ">8.2f"),
    Column("high", "high", ">8.2f"),
    Column("ratio", "of eager", ">9.3f"),
]


class Model(torch.nn.Module):
    """The model with its loss."""

    def __init__(self, sizes: dict[str, int], device: torch.device) -> None:
        super().__init__()
        hidden, made = sizes["hidden"], {"params_dtype": torch.bfloat16, "device": device}
        options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **made}
        options |= {"attn_input_format": "bshd", "fuse_qkv_params": True}
        self.embedding = torch.nn.Embedding(
            sizes["words"], hidden, device=device, dtype=torch.bfloat16
        )
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(hidden, 4 * hidden, sizes["heads"], **options)
            for _ in range(sizes["layers"])
        )
        self.norm = te.LayerNorm(hidden, **made)

    def forward(self, words: Tensor, following: Tensor) -> Tensor:
        """The loss of words [batch, length], whose following ones are given."""
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x, self_attn_mask_type="causal")
        logits = (self.norm(x) @ self.embedding.weight.t()).float()
        return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def step_of(model: Model, run: Callable, recipe: Any, words: tuple[Tensor, Tensor]) -> Callable:
    """A step without an optimizer."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with modes.region(recipe):
            loss = run(*words)
        loss.backward()

    return step


def rows(machine: Machine, name: str, turns: int, calls: int) -> list[dict]:
    """Measure both ways under a recipe, in turns."""
    recipe, device = modes.recipes()[name], machine.device
    small = machine.quick or device.type == "cpu"
    sizes = SMALL if small else SIZES
    torch._dynamo.reset()
    te.reset()
    words = torch.randint(sizes["words"], (2, sizes["batch"], sizes["length"]), device=device)
    steps = {}
    for way in ("eager", "compiled"):
        model = Model(sizes, device)
        run = torch.compile(model) if way == "compiled" else model
        steps[way] = step_of(model, run, recipe, tuple(words))
        warm(steps[way], 2 if small else 6)
    found = alternate(
        {w: lambda step=step: machine.sustained_time(step, calls) for w, step in steps.items()},
        turns,
    )
    made = []
    for way, seconds in found.items():
        figure = Figure.of(seconds).scaled(1e3)
        row = {"recipe": name, "way": way, "ms": figure["median"]}
        row |= {"low": figure["low"], "high": figure["high"]}
        made.append({**row, "ratio": ratio(seconds, found["eager"]).median})
    return made


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--recipe", action="append", choices=RECIPES, help="measure this one")
    options = options.parse_args()
    report = start("compiled_gpt", options)
    turns, calls = (2, 1) if options.quick else (7, 15)
    names = options.recipe or RECIPES
    measured = [row for name in names for row in rows(report.machine, name, turns, calls)]
    eager = min(row["ms"] for row in measured if row["way"] == "eager")
    report.limit("eager ms", eager, "the fastest step in eager mode")
    report.table("step of a GPT, forward and backward", COLUMNS, measured)
    report.finish()


if __name__ == "__main__":
    main()
