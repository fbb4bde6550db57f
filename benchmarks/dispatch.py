# SPDX-License-Identifier: Apache-2.0
"""What the plug-in system costs the host: calls, contexts of policies, changes, import.

Nanoseconds, on the CPU; what is called does nothing. `goal` is what the project set itself, `fork`
what the dispatch layer of the fork of NVIDIA Transformer Engine with plug-ins takes for the same
(measured elsewhere, on another machine of two cores; -: it has no such thing).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from timing import Column, Figure, alternate, parser, start

import transformer_engine
from transformer_engine import _core
from transformer_engine.plugin.core import (
    BackendImplKind,
    OpImpl,
    OpManager,
    OpRegistry,
    SelectionPolicy,
    policy_context,
    reset_global_policy,
    set_global_policy,
)

OPERATORS = 109
ROOT = Path(transformer_engine.__file__).resolve().parents[1]
COLUMNS = [
    Column("what", "call", "<48s"),
    Column("ns", "ns"),
    Column("low_ns", "low"),
    Column("high_ns", "high"),
    Column("floor_ns", "floor ns"),
    Column("goal_ns", "goal ns"),
    Column("fork_ns", "fork ns"),
]
IMPORT = """
import time
import transformer_engine.common.config
import transformer_engine._core
begin = time.perf_counter()
import transformer_engine.plugin.core
print(time.perf_counter() - begin)
"""


def _nothing(*args: Any) -> None:
    """An implementation in Python."""


def managed() -> OpManager:
    """A manager of as many operators as the fork has, three implementations each."""
    registry = OpRegistry()
    kinds = (BackendImplKind.DEFAULT, "default.d"), (BackendImplKind.REFERENCE, "reference.r")
    registry.register_many(
        OpImpl(f"op{i}", name, kind, _nothing, priority=priority)
        for i in range(OPERATORS)
        for priority, (kind, name) in enumerate(kinds)
    )
    registry.register_many(
        OpImpl(f"op{i}", "vendor.v", BackendImplKind.VENDOR, _nothing, vendor="v")
        for i in range(OPERATORS)
    )
    # Of the library itself: a C function that looks at nothing.
    registry.register(OpImpl("native", "default.c", BackendImplKind.DEFAULT, _core.policy_in_force))
    return OpManager(registry)


LOOP = "loop"
CALLS: dict[str, tuple[str, int | None, int | None]] = {
    LOOP: ("pass", None, None),
    "the Python function itself, 3 arguments": ("nothing(1, 2, 3)", None, None),
    "the C function itself": ("c_function()", None, None),
    "operator -> C function": ("native()", 100, 17_000),
    "operator -> Python function, 3 arguments": ("op(1, 2, 3)", 150, 17_000),
    "operator -> Python function, 20 arguments": ("op(*twenty)", 200, 17_000),
    "the same with 3, inside of a context": ("op(1, 2, 3)", 150, 17_000),
    "manager.call(name), 3 arguments": ("call('op0', 1, 2, 3)", None, 18_900),
    "a context made, entered and left": ("with context(policy): pass", 500, 2_200),
}
"""Statement, goal and what the fork takes, in nanoseconds."""
FLOORS = {
    "operator -> C function": "the C function itself",
    "operator -> Python function, 3 arguments": "the Python function itself, 3 arguments",
}


def measures(manager: OpManager, count: int) -> dict[str, Callable[[], float]]:
    """Seconds of one of `count` turns of a loop around each of `CALLS`."""
    policy = SelectionPolicy("vendor")
    names = {
        "nothing": _nothing, "c_function": _core.policy_in_force, "call": manager.call,
        "op": manager.operator("op0"), "native": manager.operator("native"),
        "twenty": tuple(range(20)), "context": policy_context, "policy": policy,
    }  # fmt: skip

    def measure(name: str, statement: str) -> float:
        inside = policy_context(policy) if "inside" in name else contextlib.nullcontext()
        with inside:
            return timeit.timeit(statement, number=count, globals=names) / count

    return {name: partial(measure, name, statement) for name, (statement, *_) in CALLS.items()}


def changed(manager: OpManager) -> Callable[[], float]:
    """Seconds of a change of the global policy, for which all operators choose anew."""
    policies = [SelectionPolicy("vendor"), SelectionPolicy("reference")]

    def measure() -> float:
        policies.reverse()
        begin = time.perf_counter()
        set_global_policy(policies[0])
        manager.operator("op0")()
        return time.perf_counter() - begin

    return measure


def imported() -> float:
    """Seconds that the import takes in a fresh interpreter, behind the package's own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT],
        env=environment, capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    return float(done.stdout)


def main() -> None:
    """Measure and report."""
    options = parser(__doc__).parse_args()
    report = start("dispatch", options)
    count, turns = (2_000, 2) if options.quick else (200_000, 15)
    manager = managed()
    taken = alternate(measures(manager, count), turns)
    loop = min(taken.pop(LOOP))
    rows = []
    for name, values in taken.items():
        floor = FLOORS.get(name)
        figure = Figure.of(value - loop for value in values)
        under = None if floor is None else Figure.of(v - loop for v in taken[floor]).median
        rows.append(_row(name, figure, CALLS[name][1:], under))
    changes = Figure.of(changed(manager)() for _ in range(turns))
    rows.append(_row("all operators choose anew", changes))
    reset_global_policy()
    runs = 1 if options.quick else 9
    rows.append(_row("import", Figure.of(imported() for _ in range(runs)), (5_000_000, None)))
    report.limit("loop ns", loop * 1e9, "taken off every figure")
    report.table("calls; floor: the function without the operator", COLUMNS, rows)
    report.finish()


def _row(
    what: str, figure: Figure, told: tuple = (None, None), floor: float | None = None
) -> dict[str, Any]:
    """A row of the table, of seconds."""
    scaled = figure.scaled(1e9)
    return {
        "what": what, "ns": scaled["median"], "low_ns": scaled["low"], "high_ns": scaled["high"],
        "floor_ns": None if floor is None else floor * 1e9, "goal_ns": told[0], "fork_ns": told[1],
        "figure_ns": scaled,
    }  # fmt: skip


if __name__ == "__main__":
    main()
