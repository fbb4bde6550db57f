# SPDX-License-Identifier: Apache-2.0
"""What the plug-in system costs the host: calls, contexts of policies, changes, import.

Nanoseconds, on the CPU; what is called does nothing. Calls from C are those of dispatch.c, which
is built here. `goal` is what the project set itself, `fork` what the dispatch layer of the fork of
NVIDIA Transformer Engine with plug-ins takes for the same (measured elsewhere, on another machine
of two cores; -: it has no such thing).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
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

# ---- calls from C --------------------------------------------------------------------------------

_RUN = "te_op_run_checked"
FROM_C: dict[str, tuple[str, str, int | None, int | None]] = {
    "C: the function itself, through a pointer": ("slot through a pointer", "loop", None, None),
    "C: dispatch: table, slot, call, counters": (_RUN, "loop", 5, 17_000),
    "C: what supports adds to that": (f"{_RUN} with supports", _RUN, 20, None),
    "C: argument checks": ("checks", "loop", None, None),
    "C: te_amax, both": ("te_amax", "loop", None, None),
    "C: a table held by counting (call in a call)": ("acquire and release", "loop", None, None),
}
"""Row of dispatch.c, the row that is taken off, goal and what the fork takes, in nanoseconds."""


def from_c(quick: bool) -> list[dict[str, Any]]:
    """What dispatch.c measures, less its loop; [] where it can not be built."""
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None or not (ROOT / "setup.py").exists():
        print("calls from C are not measured: they need a C compiler and the source tree")
        return []
    build = [sys.executable, "setup.py", "-q", "library"]
    plain = os.environ | {"TE_SANITIZE": ""}
    subprocess.run(build, cwd=ROOT, env=plain, check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "dispatch")
        sources = ["benchmarks/dispatch.c", "build/libtransformer_engine.a"]
        flags = ["-std=c11", "-O2", "-Icsrc/include", "-Icsrc", "-o", str(program)]
        libraries = ["-fopenmp", "-ldl", "-lm", "-lpthread"]
        subprocess.run([compiler, *flags, *sources, *libraries], cwd=ROOT, check=True)
        counts = ["1000", "2"] if quick else ["100000", "50"]
        done = subprocess.run([program, *counts], capture_output=True, text=True, check=True)
    lines = (line.split(maxsplit=1) for line in done.stdout.splitlines())
    least = {name: float(ns) for ns, name in lines}
    rows = []
    for what, (name, less, *told) in FROM_C.items():
        figure = Figure.of([(least[name] - least[less]) * 1e-9])
        floor = least["slot through a pointer"] - least["loop"] if name == _RUN else None
        rows.append(_row(what, figure, tuple(told), None if floor is None else floor * 1e-9))
    return rows


# ---- calls from Python ---------------------------------------------------------------------------


def _nothing(*args: Any) -> None:
    """An implementation in Python."""


def _true(*args: Any) -> bool:
    """A predicate in Python."""
    return True


IN_C = _core.Predicate(_true)
"""An implementation in C: it looks what classes its arguments are of."""


def managed() -> OpManager:
    """A manager of as many operators as the fork has, three implementations each, and some more."""
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
    default = BackendImplKind.DEFAULT
    registry.register_many(
        (
            OpImpl("native", "default.c", default, IN_C),
            OpImpl("dtypes", "default.d", default, _nothing, supported_dtypes={"float32"}),
            OpImpl("devices", "default.d", default, _nothing, min_arch="9.0"),
            OpImpl("devices", "reference.r", BackendImplKind.REFERENCE, _nothing),
            OpImpl("asks", "default.d", default, _nothing, supports=_true),
        )
    )
    return OpManager(registry)


LOOP = "loop"
CALLS: dict[str, tuple[str, int | None, int | None]] = {
    LOOP: ("pass", None, None),
    "the Python function itself, 3 arguments": ("nothing(1, 2, 3)", None, None),
    "the Python function itself, 20 arguments": ("nothing(*twenty)", None, None),
    "the C function itself, 3 arguments": ("in_c(1, 2, 3)", None, None),
    "the C function itself, 20 arguments": ("in_c(*twenty)", None, None),
    "operator -> C function, 3 arguments": ("native(1, 2, 3)", 100, 17_000),
    "operator -> C function, 20 arguments": ("native(*twenty)", 200, 17_000),
    "operator -> Python function, 3 arguments": ("op(1, 2, 3)", 150, 17_000),
    "operator -> Python function, 20 arguments": ("op(*twenty)", 200, 17_000),
    "the same with 3, inside of a context": ("op(1, 2, 3)", 150, 17_000),
    "the same with 3, the first a tensor": ("op(x, 2, 3)", 150, 17_000),
    "the same, dtypes limited": ("dtypes(x, 2, 3)", None, None),
    "the same, architecture limited": ("devices(x, 2, 3)", None, None),
    "the same, `supports` in Python": ("asks(x, 2, 3)", None, None),
    "torch's x.dtype, by itself": ("x.dtype", None, None),
    "torch's x.dtype and x.device, by themselves": ("x.dtype; x.device", None, None),
    "manager.call(name), 3 arguments": ("call('op0', 1, 2, 3)", None, 18_900),
    "a context made, entered and left": ("with context(policy): pass", 500, 2_200),
}
"""Statement, goal and what the fork takes, in nanoseconds."""
FLOORS = {
    "operator -> C function, 3 arguments": "the C function itself, 3 arguments",
    "operator -> C function, 20 arguments": "the C function itself, 20 arguments",
    "operator -> Python function, 3 arguments": "the Python function itself, 3 arguments",
    "operator -> Python function, 20 arguments": "the Python function itself, 20 arguments",
    "the same, dtypes limited": "the same with 3, the first a tensor",
    "the same, architecture limited": "the same with 3, the first a tensor",
    "the same, `supports` in Python": "the same with 3, the first a tensor",
}
READS = {
    "the same, dtypes limited": "torch's x.dtype, by itself",
    "the same, architecture limited": "torch's x.dtype and x.device, by themselves",
}
"""What a limit, remembered, adds is for the most part the time that torch takes to tell these."""


def measures(manager: OpManager, count: int) -> dict[str, Callable[[], float]]:
    """Seconds of one of `count` turns of a loop around each of `CALLS`."""
    policy = SelectionPolicy("vendor")
    names = {
        "nothing": _nothing, "in_c": IN_C, "call": manager.call, "x": torch.ones(3),
        "op": manager.operator("op0"), "twenty": tuple(range(20)),
        "context": policy_context, "policy": policy,
    }  # fmt: skip
    names |= {name: manager.operator(name) for name in ("native", "dtypes", "devices", "asks")}

    def measure(name: str, statement: str) -> float:
        inside = policy_context(policy) if "inside" in name else contextlib.nullcontext()
        with inside:
            return timeit.timeit(statement, number=count, globals=names) / count

    return {name: partial(measure, name, statement) for name, (statement, *_) in CALLS.items()}


def from_python(taken: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Rows of what `measures` took, turn by turn."""
    loop = min(taken.pop(LOOP))
    rows = []
    for name, values in taken.items():
        floor = FLOORS.get(name)
        figure = Figure.of(value - loop for value in values)
        under = None if floor is None else Figure.of(v - loop for v in taken[floor]).median
        rows.append(_row(name, figure, CALLS[name][1:], under))
        if name in READS:
            added = (a - b for a, b in zip(values, taken[floor], strict=True))
            read = Figure.of(v - loop for v in taken[READS[name]]).median
            what = f"of that: {name.removeprefix('the same, ')}, remembered"
            rows.append(_row(what, Figure.of(added), (20, None), read))
    return rows


# ---- changes, children, import -------------------------------------------------------------------


def changes(manager: OpManager, turns: int) -> list[dict[str, Any]]:
    """A change and the call after it, for which all operators choose anew."""
    operator = manager.operator("op0")
    policies = [SelectionPolicy("vendor"), SelectionPolicy("reference")]

    def timed(change: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        change()
        operator()
        return time.perf_counter() - begin

    def known(turn: int) -> float:
        return timed(lambda: set_global_policy(policies[turn % 2]))

    def new(turn: int) -> float:
        policy = SelectionPolicy("vendor", deny_vendors=(f"v{turn}",))
        return timed(lambda: set_global_policy(policy))

    def late(turn: int) -> float:
        kind = BackendImplKind.VENDOR
        impl = OpImpl("op5", f"vendor.late{turn}", kind, _nothing, vendor="late")
        taken = timed(lambda: manager.registry.register(impl))
        manager.registry.unregister(impl.op_name, impl.impl_id)
        operator()
        return taken

    found = [
        _row(f"all operators choose anew: {what}", Figure.of(list(map(measure, range(turns)))[2:]),
             (50_000, None))
        for what, measure in (("a known policy", known), ("a new policy", new),
                              ("a late registration", late))
    ]  # fmt: skip
    reset_global_policy()
    return found


def first_calls(manager: OpManager, turns: int) -> dict[str, Any]:
    """The first call of a forked child; `floor`: of the function itself, in another child.

    A child gets memory of its own page by page, as it writes.
    """

    def single(function: Callable[..., Any]) -> float:
        begin = time.perf_counter()
        function(1, 2, 3)
        return time.perf_counter() - begin

    def of_child(function: Callable[..., Any]) -> float:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, str(single(function)).encode())
            os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with open(reading, encoding="ascii") as file:
            return float(file.read())

    operator = manager.operator("op0")
    operator(1, 2, 3)
    plain, called = zip(
        *((of_child(_nothing), of_child(operator)) for _ in range(turns)), strict=True
    )
    floor = Figure.of(plain).median
    return _row("the first call of a forked child", Figure.of(called), (None, None), floor)


def imports(turns: int) -> Figure:
    """The import in a fresh interpreter, behind the package's own; compiled beforehand."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)

        def once() -> float:
            done = subprocess.run(
                [sys.executable, "-P", "-c", IMPORT],
                env=environment, capture_output=True, text=True, check=True, timeout=100,
            )  # fmt: skip
            return float(done.stdout)

        once()
        return Figure.of(once() for _ in range(turns))


def main() -> None:
    """Measure and report."""
    options = parser(__doc__).parse_args()
    report = start("dispatch", options)
    count, turns = (2_000, 4) if options.quick else (100_000, 15)
    manager = managed()
    # Predicates read tensors as the modules bind torch.
    importlib.import_module("transformer_engine.pytorch")
    rows = from_c(options.quick)
    taken = alternate(measures(manager, count), turns)
    report.limit("loop ns", min(taken[LOOP]) * 1e9, "taken off every figure")
    rows += from_python(taken)
    rows += changes(manager, turns * 4)
    rows.append(first_calls(manager, turns))
    rows.append(_row("import", imports(1 if options.quick else 9), (5_000_000, None)))
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
