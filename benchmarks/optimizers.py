# SPDX-License-Identifier: Apache-2.0
"""Steps of FusedAdam over the parameters of a model, beside torch's fused AdamW and a copy.

A step is bound by memory. Of bf16 parameters with fp32 masters and means it reads the gradient, the
master and the two means, and writes all but the gradient, and the parameter: 28 bytes for each one.
FP8 weights (delayed scaling, row-wise and column-wise: the weights of linear layers) are as many.
The share is those bytes over the time, of the rate of a copy measured in the same turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from timing import Column, Figure, Machine, alternate, parser, ratio, start

import transformer_engine.pytorch as te

COLUMNS = [
    Column("optimizer", "optimizer", "<34s"),
    Column("parameters", "parameters", ">12d"),
    Column("bytes_each", "bytes each", ">10d"),
    Column("ms", "ms", ">9.3f"),
    Column("rate", "GB/s", ">9.1f"),
    Column("share", "of limit", ">8.3f"),
]
TURNS = 7


def shapes(quick: bool) -> list[tuple[int, ...]]:
    """Those of a GPT of 24 layers of 2048, 1.3 billion parameters; of a tiny one."""
    layers, hidden, words = (2, 64, 100) if quick else (24, 2048, 50304)
    wide = 4 * hidden
    layer = [(3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,), (wide, hidden)]
    layer += [(wide,), (hidden, wide), (hidden,), (hidden,), (hidden,), (hidden,), (hidden,)]
    return [(words, hidden), *(layer * layers)]


def parameters(machine: Machine, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Parameters with gradients; float8_e4m3fn: bf16, those of linear layers quantized."""
    made, quantized = [], dtype is torch.float8_e4m3fn
    for number, shape in enumerate(shapes(machine.quick)):
        drawn = torch.randn(shape, device=machine.device).mul_(0.02)
        drawn = drawn.to(torch.bfloat16 if quantized else dtype)
        grad = torch.randn_like(drawn)
        if quantized and number > 0 and len(shape) == 2:
            scale = torch.full((1,), 2048.0, device=machine.device)
            drawn = te.Float8Quantizer(scale, torch.zeros_like(scale), dtype)(drawn)
        made.append(torch.nn.Parameter(drawn))
        made[-1].grad = grad
    return made


def candidates() -> dict[str, tuple[torch.dtype, int, Callable[[list], Any]]]:
    """(dtype of parameters as of `parameters`, bytes for each, optimizer) by name."""
    adam, masters = te.optimizers.FusedAdam, {"master_weights": True}
    half = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
    bf16, f32 = torch.bfloat16, torch.float32
    return {
        "FusedAdam bf16, fp32 masters": (bf16, 28, lambda p: adam(p, **masters)),
        "FusedAdam FP8, fp32 masters": (
            torch.float8_e4m3fn, 28, lambda p: adam(p, **masters)),
        "FusedAdam bf16, remainders": (
            bf16, 26, lambda p: adam(p, store_param_remainders=True, **masters)),
        "FusedAdam bf16, bf16 means": (bf16, 20, lambda p: adam(p, **masters, **half)),
        "FusedAdam fp32": (f32, 28, adam),
        "torch AdamW fp32, fused": (f32, 28, lambda p: torch.optim.AdamW(p, fused=True)),
        "torch AdamW bf16, fused": (bf16, 14, lambda p: torch.optim.AdamW(p, fused=True)),
    }  # fmt: skip


def all_rows(machine: Machine) -> Iterator[dict[str, Any]]:
    """A row for each optimizer, with the memory of the one before given back."""
    copy, size = machine.copier
    for name, (dtype, each, make) in candidates().items():
        given = parameters(machine, dtype)
        optimizer = make(given)
        count = sum(p.numel() for p in given)
        for _ in range(3):
            optimizer.step()
        measures = {
            "step": lambda step=optimizer.step: machine.device_time(step, 3),
            "copy": lambda: machine.device_time(copy, 20) / size * 1e9,
        }
        found = alternate(measures, 1 if machine.quick else TURNS)
        per_byte = [seconds / (count * each) * 1e9 for seconds in found["step"]]
        median = Figure.of(found["step"]).median
        yield {
            "optimizer": name, "parameters": count, "bytes_each": each, "ms": median * 1e3,
            "rate": count * each / median / 1e9, "share": ratio(found["copy"], per_byte).median,
        }  # fmt: skip
        del given, optimizer, measures
        if machine.cuda:
            torch.cuda.empty_cache()


def main() -> None:
    """Measure and report."""
    report = start("optimizers", parser(__doc__).parse_args())
    report.limit("copy GB/s", report.machine.copy_rate().median / 1e9, "a copy:")
    report.table("a step", COLUMNS, all_rows(report.machine))
    report.finish()


if __name__ == "__main__":
    main()
