# SPDX-License-Identifier: Apache-2.0
"""Linear layers under each precision, as the benchmarks of modules compare them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

BASE = "torch.nn.Linear"


def recipes() -> dict[str, Any]:
    """Recipes by mode; None is high precision."""
    return {
        BASE: None,
        "bf16": None,
        "delayed": DelayedScaling(
            fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max"
        ),
        "current": Float8CurrentScaling(),
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
