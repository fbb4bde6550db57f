# SPDX-License-Identifier: Apache-2.0
"""Each recipe on one GPU: time, memory and difference to bf16 of a layer and of whole GPTs.

The table of docs/recipes_by_gpu.md, printed once more in Markdown at the end. The layer is that of
the quick-start page: forward and backward. Of a GPT a step is embedding, layers, tied logits, cross
entropy and fused AdamW. Parameters are bf16, there are no dropouts, gradients are set to None
before each step; times are those of steps in a row.

The limit is the time of the products of the linear layers and of the logits at the rate of torch's
products in the same run: FP8 where they run so, else bf16. Differences are root mean squares
relative to the values under bf16, of the same weights and inputs: of the output (of a GPT: the
logits' loss, a number), and of all gradients of parameters. Some passes come before; delayed
scaling measures in the first one.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import modes
import torch
from timing import MIB, Column, Figure, Machine, parser, start

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling

COLUMNS = [
    Column("recipe", "recipe", "<9s"),
    Column("products", "products", "<24s"),
    Column("ms", "ms", ">9.2f"),
    Column("speed", "against bf16", ">12.2f"),
    Column("limit_ms", "limit ms", ">9.2f"),
    Column("peak_mib", "peak MiB", ">9.0f"),
    Column("output", "output", ">9.2e"),
    Column("gradients", "gradients", ">9.2e"),
]
BF16 = torch.bfloat16
TURNS = 3  # how often a time is taken
WARMUP = 3  # passes before that are not looked at
TOKENS = {"length": 2048, "batch": 4}
LAYER = {"hidden": 4096, "heads": 32, "layers": 1, "words": 0, **TOKENS, "calls": 20}
GPTS = [
    {"hidden": 1024, "heads": 16, "layers": 24, "words": 50304, **TOKENS, "calls": 10},
    {"hidden": 2048, "heads": 16, "layers": 24, "words": 50304, **TOKENS, "calls": 5},
]
QUICK = {"hidden": 64, "heads": 2, "layers": 1, "words": 128, "length": 32, "batch": 2, "calls": 1}


def recipes() -> dict[str, Any]:
    """Recipes by name; None is bf16, and comes first."""
    found = {name: recipe for name, recipe in modes.recipes().items() if name != modes.BASE}
    # Gradients of a mean over many tokens would need a pass for each layer to find their scales.
    found["delayed"] = dataclasses.replace(found["delayed"], measure_first=True)
    return found | {"mxfp8": MXFP8BlockScaling(), "nvfp4": NVFP4BlockScaling()}


def make_layers(size: dict[str, int], device: torch.device) -> torch.nn.Sequential:
    """Transformer layers with bf16 parameters."""
    return torch.nn.Sequential(
        *(
            te.TransformerLayer(
                size["hidden"], 4 * size["hidden"], size["heads"], layer_number=number + 1,
                hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal",
                fuse_qkv_params=True, params_dtype=BF16, device=device,
            )
            for number in range(size["layers"])
        )
    )  # fmt: skip


class Layer:
    """A layer, forward and backward."""

    def __init__(self, size: dict[str, int], device: torch.device) -> None:
        self.model = make_layers(size, device)
        shape = size["length"], size["batch"], size["hidden"]
        self.x = torch.randn(shape, device=device).to(BF16).requires_grad_()
        self.grad = torch.randn(shape, device=device).to(BF16)

    def run(self, recipe: Any) -> torch.Tensor:
        """Forward and backward with fresh gradients; the output."""
        self.model.zero_grad(set_to_none=True)
        self.x.grad = None
        with modes.region(recipe):
            out = self.model(self.x)
        out.backward(self.grad)
        return out.detach()

    step = run


class Gpt:
    """A GPT with its optimizer."""

    def __init__(self, size: dict[str, int], device: torch.device) -> None:
        words, hidden = size["words"], size["hidden"]
        embedding = torch.nn.Embedding(words, hidden, device=device, dtype=BF16)
        torch.nn.init.normal_(embedding.weight.data, std=0.02)
        norm = te.LayerNorm(hidden, params_dtype=BF16, device=device)
        self.model = torch.nn.ModuleList([embedding, make_layers(size, device), norm])
        shape = size["length"], size["batch"]
        self.tokens, self.target = (torch.randint(words, shape, device=device) for _ in range(2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def run(self, recipe: Any) -> torch.Tensor:
        """Forward and backward with fresh gradients; the loss."""
        self.model.zero_grad(set_to_none=True)
        embedding, layers, norm = self.model
        x = embedding(self.tokens)
        with modes.region(recipe):
            x = layers(x)
        logits = norm(x) @ embedding.weight.t()
        logits = logits.flatten(0, 1).float()
        loss = torch.nn.functional.cross_entropy(logits, self.target.flatten())
        loss.backward()
        return loss.detach()

    def step(self, recipe: Any) -> None:
        """Forward, backward and an update."""
        self.run(recipe)
        self.optimizer.step()


def results(task: Layer | Gpt, recipe: Any) -> tuple[list[torch.Tensor], str]:
    """Output and gradients of a pass, on the CPU; and which products of linear layers ran."""
    for _ in range(WARMUP):
        task.run(recipe)
    with te.counting() as ran:
        out = task.run(recipe)
    plain = ran.other_gemms - ran.emulated_gemms
    kinds = {"FP8": ran.fp8_gemms, "emulated": ran.emulated_gemms, "bf16": plain}
    said = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    return [out.cpu(), *(p.grad.cpu() for p in task.model.parameters())], said


def difference(found: list[torch.Tensor], base: list[torch.Tensor], device: Any) -> float:
    """Root mean square of found - base, relative to that of base."""
    off = whole = 0.0
    for one, other in zip(found, base, strict=True):
        one, other = one.to(device).float(), other.to(device).float()
        off += (one - other).double().square().sum().item()
        whole += other.double().square().sum().item()
    return (off / whole) ** 0.5


def peak(machine: Machine, task: Layer | Gpt, recipe: Any) -> float | None:
    """Bytes that a step takes over those of parameters, inputs and the optimizer."""
    if not machine.cuda:
        return None
    task.model.zero_grad(set_to_none=True)
    if isinstance(task, Layer):
        task.x.grad = None
    machine.synchronize()
    torch.cuda.reset_peak_memory_stats(machine.device)
    before = torch.cuda.memory_allocated(machine.device)
    task.step(recipe)
    return torch.cuda.max_memory_allocated(machine.device) - before


def rows(
    machine: Machine, kind: type, size: dict[str, int], rates: dict[str, float]
) -> Iterator[dict[str, Any]]:
    """A row for each recipe, the memory of the one before given back."""
    seed = torch.seed() % 2**31
    base: list[torch.Tensor] = []
    base_ms = 0.0
    tokens, hidden = size["length"] * size["batch"], size["hidden"]
    for name, recipe in recipes().items():
        torch.manual_seed(seed)
        task = kind(size, machine.device)
        found, products = results(task, recipe)
        base = base or found
        for _ in range(3):
            task.step(recipe)
        times = [
            machine.sustained_time(lambda task=task, r=recipe: task.step(r), size["calls"])
            for _ in range(1 if machine.quick else TURNS)
        ]
        ms = Figure.of(times).median * 1e3
        base_ms = base_ms or ms
        rate = rates["fp8" if "FP8" in products else "bf16"]
        work = 6 * tokens * hidden
        limit = work * (12 * hidden * size["layers"] / rate + size["words"] / rates["bf16"])
        taken = peak(machine, task, recipe)
        yield {
            "recipe": name, "products": products, "ms": ms, "speed": base_ms / ms,
            "limit_ms": limit * 1e3, "peak_mib": None if taken is None else taken / MIB,
            "output": difference(found[:1], base[:1], machine.device),
            "gradients": difference(found[1:], base[1:], machine.device),
        }  # fmt: skip
        del task, found
        gc.collect()
        if machine.cuda:
            torch.cuda.empty_cache()


def title(kind: type, size: dict[str, int]) -> str:
    """What a table is of."""
    shape = f"hidden {size['hidden']}, {size['heads']} heads, {size['batch']} x {size['length']}"
    if kind is Layer:
        return f"one layer, forward + backward: {shape} tokens"
    weights = 12 * size["hidden"] ** 2 * size["layers"] + size["words"] * size["hidden"]
    return f"steps of a GPT of {weights / 1e6:,.0f} M: {size['layers']} layers, {shape} tokens"


def markdown(tables: dict[str, list[dict[str, Any]]]) -> str:
    """The same tables for the page."""
    lines = []
    for name, found in tables.items():
        heads = [column.title for column in COLUMNS]
        lines += [f"\n{name}:\n", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for row in found:
            cells = (column.show(row.get(column.key)).strip() for column in COLUMNS)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and report."""
    report = start("recipes", parser(__doc__).parse_args())
    machine = report.machine
    bf16 = machine.matmul_rate(BF16)
    fp8 = machine.matmul_rate(torch.float8_e4m3fn) or bf16
    rates = {"bf16": bf16.median, "fp8": fp8.median}
    for name, rate in rates.items():
        report.limit(f"{name} products TFLOP/s", rate / 1e12, f"products in {name}:")
    cases = [(Layer, LAYER), *((Gpt, size) for size in GPTS)]
    if machine.quick:
        cases = [(Layer, {**QUICK, "words": 0}), (Gpt, QUICK)]
    for kind, size in cases:
        report.table(title(kind, size), COLUMNS, rows(machine, kind, size, rates))
    report.finish()
    print(markdown(report.tables))


if __name__ == "__main__":
    main()
