# SPDX-License-Identifier: Apache-2.0
"""The attention operator and its gradient, in 16 bits and in FP8: full, causal, of capped scores.

Each beside the rate of a large matrix product in the format that it multiplies in, measured in the
same run: what the device can do. A causal mask counts as half of the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gemm import BF16, E4M3, E5M2, F32, Ceilings, tera
from kernels import Effort
from timing import Column, Machine, Report, parser, start

import transformer_engine.pytorch  # noqa: F401 - hands torch to the extension
from transformer_engine import _core
from transformer_engine.pytorch.torchside.device import prepare_device

COLUMNS = [
    Column("operator", "operator", "<18s"),
    Column("format", "format", "<12s"),
    Column("scores", "scores", "<7s"),
    Column("shape", "b x s x h x d", "<17s"),
    Column("ms", "ms", ">9.4f"),
    Column("tflops", "TFLOP/s", ">9.4g"),
    Column("ceiling", "ceiling", ">9.4g"),
    Column("percent", "% of ceiling", ">12.1f"),
    Column("claimed", "data sheet", ">10.4g"),
]
NAMES = ("query", "key", "value")
SCORES: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"window_right": 0}, "softcap": {"softcap": 50.0}
}  # fmt: skip


class Problem:
    """Inputs and outputs of one attention: queries, keys and values [batch, tokens, heads, d]."""

    def __init__(
        self, shape: tuple[int, int, int, int], forward: torch.dtype, grads: torch.dtype, at: Any
    ) -> None:
        batch, tokens, heads, _ = shape
        self.heads = [torch.randn(shape, device=at).to(forward) for _ in NAMES]
        self.output, self.fp8 = torch.randn(shape, device=at).to(forward), forward.itemsize == 1
        self.grad = torch.randn(shape, device=at).to(grads)
        self.grads = [torch.empty_like(self.grad) for _ in NAMES]
        self.statistics = torch.full((batch, heads, tokens), 8.0, device=at)
        self.pair = torch.ones(2, device=at)

    def scales(self, *names: str) -> dict[str, torch.Tensor]:
        """Scales of 1, and room for those that are written, by name; none in high precision."""
        if not self.fp8:
            return {}
        ones = {f"{name}_scales": self.pair for name in NAMES}
        return ones | {name: self.pair.clone() for name in names}

    def forward(self, **options: Any) -> Callable[[], Any]:
        """A call of the operator."""
        options |= self.scales("output_scales")
        return lambda: _core.attention(
            *self.heads, self.output, statistics=self.statistics, **options
        )

    def backward(self, **options: Any) -> Callable[[], Any]:
        """A call of its gradient."""
        options |= self.scales("output_scales", "grad_output_scales", "grads_scales")
        if self.fp8:
            one = self.pair[:1].clone()
            options |= {"grad_scores_scale": one, "grads_scale": one.clone()}
        options |= {f"grad_{n}": g for n, g in zip(NAMES, self.grads, strict=True)}
        return lambda: _core.attention_backward(
            self.grad, *self.heads, self.output, self.statistics, **options
        )


def all_rows(machine: Machine, ceilings: Ceilings, effort: Effort) -> Iterator[dict[str, Any]]:
    """All cases."""
    shape = (1, 64, 2, 128) if machine.quick else (4, 2048, 32, 128)
    if not machine.cuda and not machine.quick:
        shape = (1, 512, 4, 128)
    batch, tokens, heads, d = shape
    high = BF16 if machine.cuda else F32
    for name, forward, grads in (
        ("16 bits", high, high),
        ("e4m3", E4M3, E4M3),
        ("e4m3, e5m2", E4M3, E5M2),
    ):
        for scores, options in SCORES.items():
            for operator, products in (("attention", 2), ("attention_backward", 5)):
                if grads is E5M2 and operator == "attention":
                    continue  # the same call
                if machine.cuda and scores == "softcap" and forward is E4M3:
                    continue  # refused
                problem = Problem(shape, forward, grads, machine.device)
                make = problem.forward if operator == "attention" else problem.backward
                step = make(scale=d**-0.5, **options)
                seconds = min(machine.device_time(step, effort.calls) for _ in range(effort.turns))
                work = 2.0 * products * batch * heads * tokens * tokens * d
                rate = work * (0.5 if scores == "causal" else 1.0) / seconds
                ceiling = ceilings.fp8 if problem.fp8 else ceilings.high
                claimed = ceilings.claimed_fp8 if problem.fp8 else ceilings.claimed_high
                yield {
                    "operator": operator, "format": name, "scores": scores,
                    "shape": "x".join(map(str, shape)), "ms": seconds * 1e3,
                    "tflops": tera(rate), "ceiling": tera(ceiling),
                    "percent": 100 * rate / ceiling, "claimed": tera(claimed),
                }  # fmt: skip


def main() -> None:
    """Measure and report."""
    report: Report = start("attention", parser(__doc__).parse_args())
    machine = report.machine
    prepare_device(machine.device)
    effort = Effort(20, 11) if machine.cuda else Effort(1, 2) if machine.quick else Effort(2, 3)
    report.table("attention", COLUMNS, all_rows(machine, Ceilings.measure(report), effort))
    report.finish()


if __name__ == "__main__":
    main()
