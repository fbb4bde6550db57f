# SPDX-License-Identifier: Apache-2.0
"""Memory of the parameters of a stack of layers that were made quantized, and what a step casts.

The limit is a byte for each parameter. Bytes are those of the storages that parameters hold, each
counted once: before the first step, and after a forward and backward, when what a step left behind
would show; then of a stack that was made without gradients, after a forward without. Beside them
the casts of a forward: those that it makes with plain weights, and those that it makes with
quantized ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import modes
import torch
from timing import Column, Machine, parser, start

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

COLUMNS = [
    Column("recipe", "recipe", "<11s"),
    Column("parameters", "parameters", ">12d"),
    Column("bytes", "bytes", ">12d"),
    Column("bytes_after", "after a step", ">12d"),
    Column("bytes_each", "bytes/limit", ">11.4f"),
    Column("bytes_frozen", "frozen", ">12d"),
    Column("frozen_each", "frozen/limit", ">12.4f"),
    Column("fp8_gemms", "FP8 GEMMs", ">9d"),
    Column("casts", "casts", ">7d"),
    Column("casts_plain", "of plain", ">8d"),
]


def recipes() -> dict[str, Any]:
    """Those of a format of weights each, by name."""
    return {
        **{name: recipe for name, recipe in modes.recipes().items() if recipe is not None},
        "block 1x128": Float8BlockScaling(w_block_scaling_dim=1),
        "mxfp8": MXFP8BlockScaling(),
        "mxfp8 32x32": MXFP8BlockScaling(enable_2d_quantization=True),
        "nvfp4": NVFP4BlockScaling(),
        "nvfp4 1x16": NVFP4BlockScaling(disable_2d_quantization=True),
    }


def make_stack(sizes: tuple[int, int, int], recipe: Any, device: Any) -> torch.nn.ModuleList:
    """Layers with bf16 parameters; quantized for `recipe`, unless that is None."""
    layers, hidden, heads = sizes
    init = contextlib.nullcontext() if recipe is None else te.quantized_model_init(recipe=recipe)
    with init:
        return torch.nn.ModuleList(
            te.TransformerLayer(
                hidden, 4 * hidden, heads, hidden_dropout=0.0, attention_dropout=0.0,
                fuse_qkv_params=True, params_dtype=torch.bfloat16, device=device,
            )
            for _ in range(layers)
        )  # fmt: skip


def held_bytes(stack: torch.nn.Module) -> int:
    """Bytes of all storages that the parameters hold, quantized ones by all of their tensors."""
    storages = {}
    for parameter in stack.parameters():
        parts = [parameter]
        if isinstance(parameter, te.QuantizedTensor):
            found = vars(parameter).values()
            parts = [value for value in found if isinstance(value, torch.Tensor)]
        for part in parts:
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def step(stack: torch.nn.ModuleList, recipe: Any, hidden: int, machine: Machine) -> tuple[int, int]:
    """A forward and backward: how many casts and FP8 matrix products the forward ran.

    Where gradients are disabled a forward alone.
    """
    x = torch.randn(32, 1, hidden, dtype=torch.bfloat16, device=machine.device)
    x.requires_grad_(torch.is_grad_enabled())
    _core.reset_counters()
    with te.counting() as ran, modes.region(recipe):
        out = x
        for layer in stack:
            out = layer(out)
    casts = sum(
        count
        for name, count in _core.counters().items()
        if name.startswith("op.") and name.endswith(".quantize")
    )
    if out.requires_grad:
        out.float().sum().backward()
    return casts, ran.fp8_gemms


def all_rows(sizes: tuple[int, int, int], machine: Machine) -> Iterator[dict[str, Any]]:
    """A row for each recipe."""
    for name, recipe in recipes().items():
        plain, _ = step(make_stack(sizes, None, machine.device), recipe, sizes[1], machine)
        stack = make_stack(sizes, recipe, machine.device)
        count, before = sum(p.numel() for p in stack.parameters()), held_bytes(stack)
        casts, gemms = step(stack, recipe, sizes[1], machine)
        after = held_bytes(stack)
        with torch.no_grad():
            stack = make_stack(sizes, recipe, machine.device)
            step(stack, recipe, sizes[1], machine)
        frozen = held_bytes(stack)
        yield {
            "recipe": name, "parameters": count, "bytes": before, "bytes_after": after,
            "bytes_each": after / count, "bytes_frozen": frozen, "frozen_each": frozen / count,
            "fp8_gemms": gemms, "casts": casts, "casts_plain": plain,
        }  # fmt: skip


def main() -> None:
    """Measure and report."""
    report = start("parameter_memory", parser(__doc__).parse_args())
    sizes = (1, 128, 1) if report.machine.quick else (24, 2048, 16)
    count = sum(p.numel() for p in make_stack(sizes, None, "meta").parameters())
    report.limit("one byte each B", count, "a byte for each parameter:")
    title = "{} layers, hidden {}, {} heads".format(*sizes)
    report.table(title, COLUMNS, all_rows(sizes, report.machine))
    report.finish()


if __name__ == "__main__":
    main()
