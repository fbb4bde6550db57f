# SPDX-License-Identifier: Apache-2.0
"""Linear layers under each precision, as the benchmarks of modules compare them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from timing import Machine

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Format,
)
from transformer_engine.pytorch.tensor.two_forms import scale_shape

BASE = "torch.nn.Linear"


def scaled_forms(
    mode: str, row: torch.Tensor | None, column: torch.Tensor | None
) -> dict[str, Any]:
    """Keywords of a cast to these forms with scales of rows or tiles: "row", "block_1d", ..."""
    keywords: dict[str, Any] = {"mode": getattr(_core, f"SCALING_{mode.upper()}")}
    for name, data in (("row", row), ("column", column)):
        if data is not None:
            shape = scale_shape(keywords["mode"], *data.shape)
            scales = torch.empty(shape, dtype=torch.float32, device=data.device)
            keywords |= {name: data, f"{name}_scales": scales}
    return keywords


def recipes() -> dict[str, Any]:
    """Recipes by mode; None is high precision."""
    return {
        BASE: None,
        "bf16": None,
        "delayed": DelayedScaling(
            fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max"
        ),
        "current": Float8CurrentScaling(),
        "block": Float8BlockScaling(),
        "row": Float8RowScaling(),
    }


def region(recipe: Any) -> contextlib.AbstractContextManager:
    """The autocast region of a recipe."""
    return contextlib.nullcontext() if recipe is None else te.autocast(enabled=True, recipe=recipe)


def linear(mode: str, inputs: int, outputs: int, device: torch.device) -> torch.nn.Module:
    """A linear layer with bf16 parameters: torch's, or ours."""
    if mode == BASE:
        return torch.nn.Linear(inputs, outputs, device=device, dtype=torch.bfloat16)
    return te.Linear(inputs, outputs, params_dtype=torch.bfloat16, device=device)


def fp8_gemms(step: Callable[[], Any]) -> int:
    """How many FP8 matrix products a step runs, by the library's own count."""
    with te.counting() as ran:
        step()
    return ran.fp8_gemms


def expect_fp8(mode: str, step: Callable[[], Any], linears: int) -> int:
    """Count the FP8 products of a forward and backward; say so where they are not all there."""
    found = fp8_gemms(step)
    wanted = 0 if recipes()[mode] is None else 3 * linears
    if found != wanted:
        said = f"{mode}: a step ran {found} FP8 matrix products, not {wanted}: its figures are void"
        print(said, file=sys.stderr, flush=True)
    return found


class HostCall:
    """A forward and its backward, for the time that they take of the host.

    `run` makes an output of `x`, bf16 of a shape; `steps` are those of a turn.
    """

    PARTS = ("forward", "backward")

    def __init__(self, run: Callable, shape: tuple[int, ...], machine: Machine, steps: int) -> None:
        self.run, self.machine, self.steps = run, machine, steps
        like = {"device": machine.device, "dtype": torch.bfloat16}
        self.x = torch.randn(shape, **like).requires_grad_()
        self.grad = torch.randn(shape, **like)
        self.out = self.x

    def forward(self) -> None:
        """The forward."""
        self.out = self.run(self.x)

    def backward(self) -> None:
        """The backward of the last forward."""
        self.out.backward(self.grad)

    def step(self) -> None:
        """Forward and backward."""
        self.forward()
        self.backward()

    def turn(self) -> dict[str, float]:
        """The least seconds of each part in one turn: neighbours on the machine only add to it."""
        both = [self.machine.host_time(self.forward, self.backward) for _ in range(self.steps)]
        return {part: min(s) for part, s in zip(self.PARTS, zip(*both, strict=True), strict=True)}
