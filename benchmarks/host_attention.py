# SPDX-License-Identifier: Apache-2.0
"""Host time of `DotProductAttention`: what a call costs before the device has anything to do.

Problems so small that the device is never the limit, each compared, within its turn, with an
autograd function of as many inputs that only allocates its outputs: no attention that records a
backward in Python can be faster. On the CPU the work itself is in the figures, for there is no
other device.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from timing import Column, Figure, Machine, alternate, parser, ratio, start, warm
from torch import Tensor

import transformer_engine.pytorch as te

FLOOR = "allocation only"
PARTS = ("forward", "backward")
HEADS, CHANNELS, BATCH, LENGTH = 4, 64, 2, 64
COLUMNS = [
    Column("call", "call", "<16s"),
    Column("forward_us", "forward us"),
    Column("backward_us", "backward us"),
    Column("forward_over", "over floor"),
    Column("backward_over", "over floor"),
    Column("forward_ratio", "forward/floor", ">13.2f"),
    Column("backward_ratio", "backward/floor", ">14.2f"),
]


class _Allocate(torch.autograd.Function):
    """Attention that only makes its outputs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return torch.empty(
            *query.shape[:-2], HEADS * CHANNELS, dtype=query.dtype, device=query.device
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def calls(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """What is measured: functions of queries, keys and values."""
    modules = {
        "causal": te.DotProductAttention(HEADS, CHANNELS),
        "no mask": te.DotProductAttention(HEADS, CHANNELS, attn_mask_type="no_mask"),
        "dropout": te.DotProductAttention(HEADS, CHANNELS, attention_dropout=0.1),
        "off by one": te.DotProductAttention(HEADS, CHANNELS, softmax_type="off-by-one"),
        "lengths": te.DotProductAttention(HEADS, CHANNELS, attn_mask_type="padding_causal"),
    }
    sums = torch.arange(BATCH + 1, dtype=torch.int32, device=device) * LENGTH
    made: dict[str, Callable[..., Tensor]] = dict(modules)
    made["lengths"] = lambda *heads: modules["lengths"](*heads, cu_seqlens_q=sums)
    return {**made, FLOOR: _Allocate.apply}


class Call:
    """One kind of call, and its steps."""

    def __init__(self, call: Callable[..., Tensor], machine: Machine, steps: int) -> None:
        self.call, self.machine, self.steps = call, machine, steps
        like = {"device": machine.device, "dtype": torch.bfloat16}
        shape = LENGTH, BATCH, HEADS, CHANNELS
        self.heads = [torch.randn(shape, **like).requires_grad_() for _ in range(3)]
        self.grad = torch.randn(LENGTH, BATCH, HEADS * CHANNELS, **like)
        self.out = self.heads[0]

    def forward(self) -> None:
        """The forward."""
        self.out = self.call(*self.heads)

    def backward(self) -> None:
        """The backward of the last forward."""
        torch.autograd.grad(self.out, self.heads, self.grad)

    def step(self) -> None:
        """Forward and backward."""
        self.forward()
        self.backward()

    def turn(self) -> dict[str, float]:
        """Seconds of each part: medians over the steps of one turn."""
        both = [self.machine.host_time(self.forward, self.backward) for _ in range(self.steps)]
        return {part: median(s) for part, s in zip(PARTS, zip(*both, strict=True), strict=True)}


def rows(machine: Machine, steps: int, turns: int) -> list[dict[str, Any]]:
    """Measure all calls in turns."""
    made = {name: Call(call, machine, steps) for name, call in calls(machine.device).items()}
    for call in made.values():
        warm(call.step, 2 if machine.quick else 20)
    found = alternate({name: call.turn for name, call in made.items()}, turns)
    series = {n: {p: [t[p] for t in turns] for p in PARTS} for n, turns in found.items()}
    listed = []
    for name, parts in series.items():
        row: dict[str, Any] = {"call": name}
        for part, values in parts.items():
            floor = series[FLOOR][part]
            over = [value - least for value, least in zip(values, floor, strict=True)]
            row[f"{part}_us"] = Figure.of(values).median * 1e6
            row[f"{part}_over"] = Figure.of(over).median * 1e6
            row[f"{part}_ratio"] = ratio(values, floor).median
        listed.append(row)
    return listed


def main() -> None:
    """Measure and report."""
    options = parser(__doc__).parse_args()
    report = start("host_attention", options)
    sizes = (2, 2) if options.quick else (40, 21)
    title = f"host time per call, {HEADS} heads of {CHANNELS}, {BATCH} x {LENGTH} tokens, bf16"
    measured = rows(report.machine, *sizes)
    floor = measured[-1]["forward_us"] + measured[-1]["backward_us"]
    report.limit("floor us", floor, "a function that only allocates, forward and backward")
    report.table(title, COLUMNS, measured)
    report.finish()


if __name__ == "__main__":
    main()
