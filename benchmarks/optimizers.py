# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers and norms of gradients over a model, beside torch's and a copy; host times.

A step is bound by memory. Of bf16 parameters with fp32 masters and means it reads the gradient, the
master and the two means, and writes all but the gradient, and the parameter: 28 bytes for each one.
FP8 weights (delayed scaling, row-wise and column-wise: the weights of linear layers) are as many.
The share is those bytes over the time, of the rate of a copy measured in the same turns. A norm
reads its gradients once.

The last table is the host's time for a step over many tiny parameters, the device idle before;
its floor is to read the gradient of each.
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
NORM_COLUMNS = [Column("norm", "norm", "<34s"), *COLUMNS[1:]]
HOST_COLUMNS = [
    Column("optimizer", "optimizer", "<34s"),
    Column("parameters", "parameters", ">12d"),
    Column("us", "us a step", ">10.1f"),
    Column("each_ns", "ns for each", ">12.1f"),
    Column("floor", "floor", ">8.1f"),
    Column("ratio", "of torch", ">9.3f"),
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


def norms(machine: Machine) -> dict[str, tuple[torch.dtype, Callable[[list], Callable[[], Any]]]]:
    """(dtype of gradients, what makes a call of their list) by name."""
    flag = torch.zeros(1, dtype=torch.int32, device=machine.device)
    factor = torch.full((1,), 0.5, device=machine.device)
    l2norm = te.optimizers.multi_tensor_l2norm
    unscaled = te.optimizers.multi_tensor_unscale_l2norm
    bf16, f32 = torch.bfloat16, torch.float32
    return {
        "l2norm bf16": (bf16, lambda g: lambda: l2norm(0, flag, [g])),
        "l2norm fp32": (f32, lambda g: lambda: l2norm(0, flag, [g])),
        "unscale_l2norm bf16, of each too": (
            bf16, lambda g: lambda: unscaled(0, flag, [g], factor, True)),
        "torch._foreach_norm bf16": (bf16, lambda g: lambda: torch._foreach_norm(g)),
        "torch._foreach_norm fp32": (f32, lambda g: lambda: torch._foreach_norm(g)),
    }  # fmt: skip


def measured(machine: Machine, count: int, each: int, step: Callable[[], Any]) -> dict[str, Any]:
    """What a pass over so many elements takes, and its share of the rate of a copy."""
    copy, size = machine.copier
    for _ in range(3):
        step()
    measures = {
        "step": lambda: machine.device_time(step, 3),
        "copy": lambda: machine.device_time(copy, 20) / size * 1e9,
    }
    found = alternate(measures, 1 if machine.quick else TURNS)
    per_byte = [seconds / (count * each) * 1e9 for seconds in found["step"]]
    median = Figure.of(found["step"]).median
    return {
        "parameters": count, "bytes_each": each, "ms": median * 1e3,
        "rate": count * each / median / 1e9, "share": ratio(found["copy"], per_byte).median,
    }  # fmt: skip


def all_rows(machine: Machine) -> Iterator[dict[str, Any]]:
    """A row for each optimizer, with the memory of the one before given back."""
    for name, (dtype, each, make) in candidates().items():
        given = parameters(machine, dtype)
        optimizer = make(given)
        count = sum(p.numel() for p in given)
        yield {"optimizer": name, **measured(machine, count, each, optimizer.step)}
        del given, optimizer
        if machine.cuda:
            torch.cuda.empty_cache()


def norm_rows(machine: Machine) -> Iterator[dict[str, Any]]:
    """A row for each norm, likewise."""
    for name, (dtype, make) in norms(machine).items():
        grads = [
            torch.randn(shape, device=machine.device).to(dtype) for shape in shapes(machine.quick)
        ]
        count = sum(g.numel() for g in grads)
        yield {"norm": name, **measured(machine, count, dtype.itemsize, make(grads))}
        del grads
        if machine.cuda:
            torch.cuda.empty_cache()


def host_rows(machine: Machine) -> Iterator[dict[str, Any]]:
    """A row for each optimizer: the time of the host for a step over many tiny parameters."""
    adam, masters = te.optimizers.FusedAdam, {"master_weights": True}
    bf16, f32, count = torch.bfloat16, torch.float32, 50 if machine.quick else 2000
    made = {
        "torch AdamW fp32, fused": (f32, lambda p: torch.optim.AdamW(p, fused=True)),
        "FusedAdam fp32": (f32, adam),
        "FusedAdam fp32, capturable": (f32, lambda p: adam(p, capturable=True)),
        "FusedAdam bf16, fp32 masters": (bf16, lambda p: adam(p, **masters)),
    }
    steps = {}
    for name, (dtype, make) in made.items():
        given = [torch.nn.Parameter(torch.randn(8, device=machine.device).to(dtype))
                 for _ in range(count)]  # fmt: skip
        for parameter in given:
            parameter.grad = torch.randn_like(parameter)
        steps[name] = make(given).step
        for _ in range(3):
            steps[name]()
    steps["floor"] = lambda: [parameter.grad for parameter in given]
    measures = {name: lambda step=step: machine.host_time(step)[0] for name, step in steps.items()}
    found = alternate(measures, 3 if machine.quick else 5 * TURNS)
    base, floor = next(iter(found.values())), Figure.of(found.pop("floor")).median
    for name, times in found.items():
        median = Figure.of(times).median
        yield {
            "optimizer": name, "parameters": count, "us": median * 1e6,
            "each_ns": median / count * 1e9, "floor": floor / count * 1e9,
            "ratio": ratio(times, base).median,
        }  # fmt: skip


def main() -> None:
    """Measure and report."""
    report = start("optimizers", parser(__doc__).parse_args())
    report.limit("copy GB/s", report.machine.copy_rate().median / 1e9, "a copy:")
    report.table("a step", COLUMNS, all_rows(report.machine))
    report.table("a norm", NORM_COLUMNS, norm_rows(report.machine))
    report.table("the host of a step", HOST_COLUMNS, host_rows(report.machine))
    report.finish()


if __name__ == "__main__":
    main()
