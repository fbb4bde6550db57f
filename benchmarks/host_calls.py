# SPDX-License-Identifier: Apache-2.0
"""Host cost of a call in the ways that programs call: torch.autocast, checkpoints, microbatches.

Modules so small that the device is never the limit. Each way is compared with the plain call of the
same module, its floor: what is added is the way's own, a checkpoint's second forward included. The
calls of Python functions are counted too, in the thread of the forward: they do not vary with the
machine. On CUDA devices a backward runs in another thread and counts none. On the CPU the work
itself is in the figures, for there is no other device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import modes
import torch
from timing import Column, Machine, alternate, parser, start, warm
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te

PLAIN = "plain"
FEATURES, ROWS = 64, 16
RECIPE = modes.recipes()["delayed"]
PARTS = modes.HostCall.PARTS
COLUMNS = [
    Column("module", "module", "<17s"),
    Column("way", "way", "<16s"),
    Column("forward_frames", "forward frames", ">14d"),
    Column("backward_frames", "backward frames", ">15d"),
    Column("forward_us", "forward us"),
    Column("backward_us", "backward us"),
    Column("step_ratio", "step/floor", ">10.2f"),
]

Way = Callable[[torch.nn.Module, Tensor], Tensor]


def _within(block: Callable[[], AbstractContextManager], way: Way) -> Way:
    """A way inside a block."""

    def call(module: torch.nn.Module, x: Tensor) -> Tensor:
        with block():
            return way(module, x)

    return call


def _plain(module: torch.nn.Module, x: Tensor) -> Tensor:
    return module(x)


def ways(device: torch.device) -> dict[str, tuple[Way, bool]]:
    """What is measured: functions of a module and its input, and whether it has to run in FP8."""

    def delayed() -> AbstractContextManager:
        return modes.region(RECIPE)

    def amp() -> AbstractContextManager:
        return torch.autocast(device.type, torch.bfloat16)

    found: dict[str, Way] = {PLAIN: _plain, "amp": _within(amp, _plain), "frozen": _plain}
    fp8: dict[str, Way] = {"fp8": _plain, "fp8 amp": _within(amp, _plain)}
    for name, call in (("te", te.checkpoint), ("torch", checkpoint)):
        for reentrant in (False, True):

            def way(module: Any, x: Tensor, call: Any = call, reentrant: bool = reentrant) -> Any:
                return call(module, x, use_reentrant=reentrant)

            kind = name + (" reentrant" if reentrant else " hooked")
            found[kind] = fp8[f"fp8 {kind}"] = way
    for first in (True, False):
        fp8[f"fp8 first={first}"] = lambda m, x, first=first: m(x, is_first_microbatch=first)
    inside = {name: (_within(delayed, way), True) for name, way in fp8.items()}
    return {name: (way, False) for name, way in found.items()} | inside


def modules(device: torch.device) -> dict[str, Callable[[], torch.nn.Module]]:
    """What is called."""
    like: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device}
    return {
        modes.BASE: lambda: modes.linear(modes.BASE, FEATURES, FEATURES, device),
        "Linear": lambda: te.Linear(FEATURES, FEATURES, **like),
        "LayerNormLinear": lambda: te.LayerNormLinear(FEATURES, FEATURES, **like),
        "LayerNormMLP": lambda: te.LayerNormMLP(FEATURES, 4 * FEATURES, **like),
        "LayerNorm": lambda: te.LayerNorm(FEATURES, **like),
        "RMSNorm": lambda: te.RMSNorm(FEATURES, **like),
        "TransformerLayer": lambda: te.TransformerLayer(
            FEATURES, 4 * FEATURES, 1, hidden_dropout=0.0, attention_dropout=0.0, **like
        ),
    }


class Call(modes.HostCall):
    """A module that is called in one way."""

    def frames(self) -> dict[str, int]:
        """Calls of Python functions in each part."""
        return {"forward": count(self.forward), "backward": count(self.backward)}


def count(function: Callable[[], Any]) -> int:
    """How many Python functions a function calls in this thread, itself left out."""
    found = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        del frame, argument
        found += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found - 1


def rows(machine: Machine, name: str, make: Callable, sizes: tuple[int, int]) -> list[dict]:
    """Measure a module in all ways, in turns."""
    calls = {}
    for way, (call, fp8) in ways(machine.device).items():
        module = make()
        if fp8 and isinstance(module, torch.nn.Linear | te.LayerNorm | te.RMSNorm):
            continue  # nothing of it is in FP8
        if way == "frozen":
            module.requires_grad_(False)
        run = functools.partial(call, module)
        calls[way] = Call(run, (ROWS, 1, FEATURES), machine, sizes[0])
        if way == "fp8 first=False":
            with modes.region(RECIPE):
                module(calls[way].x, is_first_microbatch=True)
        warm(calls[way].step, 6 if machine.quick else 20)
    frames = {way: call.frames() for way, call in calls.items()}
    found = alternate({way: call.turn for way, call in calls.items()}, sizes[1])
    least = {w: {p: min(t[p] for t in turns) for p in PARTS} for w, turns in found.items()}
    floor = sum(least[PLAIN].values())
    return [
        {"module": name, "way": way, "step_ratio": sum(parts.values()) / floor}
        | {f"{part}_us": seconds * 1e6 for part, seconds in parts.items()}
        | {f"{part}_frames": frames[way][part] for part in PARTS}
        for way, parts in least.items()
    ]


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--module", action="append", help="measure this one (again: that one too)")
    options = options.parse_args()
    report = start("host_calls", options)
    sizes = (2, 2) if options.quick else (20, 15)
    made = modules(report.machine.device)
    named = options.module or list(made)
    measured = [r for name in named for r in rows(report.machine, name, made[name], sizes)]
    least = measured[0]["forward_us"] + measured[0]["backward_us"]
    report.limit("floor us", least, f"a plain call of {named[0]}, forward and backward")
    title = f"host cost of a call by the way it is made, {FEATURES} features, {ROWS} tokens, bf16"
    report.table(title, COLUMNS, measured)
    report.finish()


if __name__ == "__main__":
    main()
