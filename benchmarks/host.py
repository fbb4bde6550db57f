# SPDX-License-Identifier: Apache-2.0
"""Host time per module: what a call costs before the device has anything to do.

Stacked linear layers so small that the device is never the limit. The modules take turns, and each
is compared with torch.nn.Linear within its turn. The limit is an autograd function that allocates
its outputs and does nothing else: no module that records a backward in Python can be faster. On the
CPU the work itself is in the figures, for there is no other device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import modes
import torch
from timing import Column, Figure, Machine, Report, alternate, parser, ratio, start, warm
from torch import Tensor

FLOOR = "allocation only"
PARTS = ("forward", "backward", "step", "inference")
COLUMNS = [
    Column("module", "module", "<16s"),
    Column("forward_us", "forward us"),
    Column("backward_us", "backward us"),
    Column("step_us", "step us"),
    Column("inference_us", "inference us"),
    Column("ratio", "step/torch", ">10.3f"),
    Column("spread", "quartiles", "<13s"),
    Column("limit_us", "limit us"),
    Column("over_limit", "step/limit", ">10.2f"),
    Column("fp8_gemms", "FP8 GEMMs", ">9d"),
]


class _Allocate(torch.autograd.Function):
    """A linear layer that only makes its outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)


class Floor(torch.nn.Module):
    """The cheapest module: parameters, and a function that only allocates."""

    def __init__(self, features: int, device: torch.device) -> None:
        super().__init__()
        like = {"device": device, "dtype": torch.bfloat16}
        self.weight = torch.nn.Parameter(torch.zeros(features, features, **like))
        self.bias = torch.nn.Parameter(torch.zeros(features, **like))

    def forward(self, x: Tensor) -> Tensor:
        """Allocate the output."""
        return _Allocate.apply(x, self.weight, self.bias)


@dataclass(frozen=True)
class Sizes:
    """What is run.

    Attributes
    ----------
    features, tokens, layers : int
        Of the stack.
    steps, turns : int
        Steps per turn, turns per module.
    """

    features: int
    tokens: int
    layers: int
    steps: int
    turns: int


class Stack:
    """Stacked layers of one mode and their steps."""

    def __init__(self, mode: str, sizes: Sizes, machine: Machine) -> None:
        self.sizes, self.machine = sizes, machine
        self.recipe = modes.recipes().get(mode)
        make: Callable[[], torch.nn.Module] = (
            (lambda: Floor(sizes.features, machine.device))
            if mode == FLOOR
            else (lambda: modes.linear(mode, sizes.features, sizes.features, machine.device))
        )
        self.layers = torch.nn.Sequential(*[make() for _ in range(sizes.layers)])
        shape, like = (sizes.tokens, sizes.features), {"dtype": torch.bfloat16}
        self.x = torch.randn(shape, device=machine.device, **like).requires_grad_()
        self.grad = torch.randn(shape, device=machine.device, **like)
        self.y = self.x

    def forward(self) -> None:
        """The forward of the stack, its autocast region included."""
        with modes.region(self.recipe):
            self.y = self.layers(self.x)

    def backward(self) -> None:
        """The backward of the last forward."""
        self.y.backward(self.grad)

    def step(self) -> None:
        """Forward and backward."""
        self.forward()
        self.backward()

    def turn(self) -> dict[str, float]:
        """Seconds per layer of each part: medians over the steps of one turn."""
        both = [
            self.machine.host_time(self.forward, self.backward) for _ in range(self.sizes.steps)
        ]
        with torch.no_grad():
            alone = [self.machine.host_time(self.forward)[0] for _ in range(self.sizes.steps)]
        forward, backward = zip(*both, strict=True)
        seconds = (forward, backward, [f + b for f, b in both], alone)
        return {p: median(s) / self.sizes.layers for p, s in zip(PARTS, seconds, strict=True)}


def rows(machine: Machine, sizes: Sizes) -> list[dict[str, Any]]:
    """Measure all modules in turns."""
    stacks = {name: Stack(name, sizes, machine) for name in [*modes.recipes(), FLOOR]}
    counts = {}
    for name, stack in stacks.items():
        warm(stack.step, 2 if machine.quick else 20)
        counts[name] = 0 if name == FLOOR else modes.expect_fp8(name, stack.step, sizes.layers)
        with torch.no_grad():
            warm(stack.forward, 2 if machine.quick else 20)
    found = alternate({name: stack.turn for name, stack in stacks.items()}, sizes.turns)
    series = {n: {p: [t[p] for t in turns] for p in PARTS} for n, turns in found.items()}
    floor = Figure.of(series[FLOOR]["step"]).median
    made = []
    for name, parts in series.items():
        figures = {part: Figure.of(values) for part, values in parts.items()}
        to_torch = ratio(parts["step"], series[modes.BASE]["step"])
        made.append(
            {"module": name, "fp8_gemms": counts[name], "ratio": to_torch.median}
            | {f"{part}_us": figure.median * 1e6 for part, figure in figures.items()}
            | {
                "spread": f"{to_torch.low:.3f}-{to_torch.high:.3f}",
                "ratio_figure": to_torch.scaled(1),
                "ratios": {p: ratio(parts[p], series[modes.BASE][p]).scaled(1) for p in PARTS},
                "figures_us": {p: f.scaled(1e6) for p, f in figures.items()},
                "limit_us": floor * 1e6,
                "over_limit": ratio(parts["step"], series[FLOOR]["step"]).median,
            }
        )
    return made


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--turns", type=int, help="turns per module")
    options = options.parse_args()
    report: Report = start("host", options)
    sizes = Sizes(32, 16, 2, 2, 2) if options.quick else Sizes(256, 64, 12, 20, 15)
    if options.turns:
        sizes = Sizes(sizes.features, sizes.tokens, sizes.layers, sizes.steps, options.turns)
    measured = rows(report.machine, sizes)
    report.limit("floor us", measured[-1]["step_us"], "a function that only allocates, a step")
    title = (
        f"host time per layer, {sizes.layers} stacked {sizes.features} x {sizes.features}, "
        f"{sizes.tokens} tokens, bf16"
    )
    report.table(title, COLUMNS, measured)
    report.finish()


if __name__ == "__main__":
    main()
