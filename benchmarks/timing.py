# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: timing, the limits of the machine, tables, and a JSON file.

Three kinds of time. `device_time`: a batch of calls behind a kernel that keeps the device busy
while the host enqueues, so that the host is not in the figure. `single_time` and `sustained_time`:
whole steps as a program makes them, one by one or in a row, host included. `host_time`: what a call
costs the host while the device has nothing to do. Figures that are compared are measured in turns
(`alternate`) and compared turn by turn: clocks and neighbours drift, a ratio of two turns does not.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import transformer_engine

MIB = 1 << 20
SLEEP_CYCLES = 100_000  # per call: about 50 us, several times what a call costs the host
OVER_CACHE = 4  # input sets together are this many times as large as the last-level cache
MOST_SETS = 64


@dataclass(frozen=True)
class Spec:
    """Rates that a vendor's data sheet claims, dense.

    Attributes
    ----------
    memory : float
        Bytes a second.
    bf16, fp8 : float
        Floating-point operations a second.
    """

    memory: float
    bf16: float
    fp8: float


SPECS = {
    "H200": Spec(memory=4.8e12, bf16=989e12, fp8=1979e12),
    "H100 80GB HBM3": Spec(memory=3.35e12, bf16=989e12, fp8=1979e12),
}


# ---- figures ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """Median and quartiles of one quantity over the turns of a run.

    Attributes
    ----------
    median, low, high : float
        Median, lower and upper quartile.
    turns : int
        How many values they are of.
    """

    median: float
    low: float
    high: float
    turns: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Figure:
        """Make a figure from its values."""
        values = sorted(values)
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high, len(values))

    def scaled(self, factor: float) -> dict[str, float]:
        """The figure in another unit, for JSON."""
        return {
            "median": self.median * factor,
            "low": self.low * factor,
            "high": self.high * factor,
            "turns": self.turns,
        }


def alternate(measures: dict[str, Callable[[], Any]], turns: int) -> dict[str, list[Any]]:
    """Call every measure once per turn; the results by name, in order of the turns.

    Every other turn goes backwards, so that none of them always comes after the same other one.
    """
    found: dict[str, list[Any]] = {name: [] for name in measures}
    for turn in range(turns):
        names = list(measures)
        for name in names if turn % 2 == 0 else reversed(names):
            found[name].append(measures[name]())
    return found


def ratio(values: list[float], base: list[float]) -> Figure:
    """Figure of values / base, turn by turn."""
    return Figure.of(v / b for v, b in zip(values, base, strict=True))


# ---- the machine -----------------------------------------------------------------------------


class Machine:
    """A device and how to time on it.

    Parameters
    ----------
    device : torch.device
        The CPU, or a CUDA device with its index.
    quick : bool
        Sizes and numbers of repetitions that show that it works, and no more.
    """

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device = device
        self.quick = quick
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.set_device(device)
            self.properties = torch.cuda.get_device_properties(device)
            self.cache_bytes = self.properties.L2_cache_size
            self.name = self.properties.name
        else:
            self.cache_bytes = 0 if quick else _last_level_cache()
            self.name = _processor()

    @property
    def spec(self) -> Spec | None:
        """What the data sheet claims, where it is known."""
        return next((spec for name, spec in SPECS.items() if name in self.name), None)

    def synchronize(self) -> None:
        """Wait until the device has nothing to do."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def sets(self, bytes_per_set: int) -> int:
        """How many input sets it takes to read none from the cache."""
        wanted = math.ceil(OVER_CACHE * self.cache_bytes / max(bytes_per_set, 1))
        return min(max(wanted, 2), 2 if self.quick else MOST_SETS)

    def device_time(self, step: Callable[[], Any], calls: int) -> float:
        """Seconds per call, of `calls` in a row that the host has enqueued beforehand."""
        if not self.cuda:
            return self.sustained_time(step, calls)
        self.synchronize()
        sleep = getattr(torch.cuda, "_sleep", None)
        if sleep is not None:
            sleep(SLEEP_CYCLES * calls)
        return self._between_events(step, calls)

    def sustained_time(self, step: Callable[[], Any], calls: int, ahead: int = 0) -> float:
        """Seconds per call, of `calls` in a row; the host may be what limits them.

        `ahead` calls come before these, without a wait: what is timed is the middle of a loop,
        where the host is as far ahead of the device as it gets.
        """
        self.synchronize()
        for _ in range(ahead):
            step()
        if self.cuda:
            return self._between_events(step, calls)
        start = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - start) / calls

    def single_time(self, step: Callable[[], Any]) -> float:
        """Seconds of one call on a device that has nothing else to do."""
        return self.sustained_time(step, 1)

    def _between_events(self, step: Callable[[], Any], calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3 / calls

    def host_time(self, *steps: Callable[[], Any]) -> list[float]:
        """Seconds that the host spends in each of some steps in a row, the device idle before."""
        self.synchronize()
        stamps = [time.perf_counter()]
        for step in steps:
            step()
            stamps.append(time.perf_counter())
        return [after - before for before, after in itertools.pairwise(stamps)]

    def keep_busy(self) -> None:
        """Enqueue matrix products for about half a second, and return."""
        n = 1024 if self.quick else 8192
        a, b = (torch.randn(n, n, device=self.device).bfloat16() for _ in range(2))
        d = torch.empty_like(a)
        for _ in range(300):
            torch.mm(a, b, out=d)

    # -- limits, measured ----------------------------------------------------------------------

    @functools.cached_property
    def copier(self) -> tuple[Callable[[], Any], int]:
        """A copy within the memory of the device: the step and the bytes it reads and writes."""
        size = 512 * MIB if self.cuda else MIB if self.quick else 64 * MIB
        source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source), 2 * size

    def copy_rate(self) -> Figure:
        """Bytes a second of a copy, read and written ones counted."""
        step, size = self.copier
        return self._rate(step, size)

    def matmul_rate(self, dtype: torch.dtype) -> Figure | None:
        """Operations a second of torch's square matrix product; None where torch has none."""
        n = 8192 if self.cuda else 128 if self.quick else 1024
        a, b = (torch.randn(n, n, device=self.device).to(dtype) for _ in range(2))
        if dtype.itemsize > 1:
            d = torch.empty(n, n, dtype=dtype, device=self.device)
            return self._rate(lambda: torch.mm(a, b.t(), out=d), 2 * n**3)
        one = torch.ones((), device=self.device)

        def scaled() -> Any:
            return torch._scaled_mm(
                a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        try:
            scaled()
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return None
        return self._rate(scaled, 2 * n**3)

    def _rate(self, step: Callable[[], Any], amount: float) -> Figure:
        for _ in range(3):
            step()
        calls, turns = (10, 9) if self.cuda else (2, 2 if self.quick else 5)
        return Figure.of(amount / self.device_time(step, calls) for _ in range(turns))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _last_level_cache() -> int:
    try:
        size = os.sysconf("SC_LEVEL3_CACHE_SIZE")
    except (OSError, ValueError):
        size = 0
    return min(size if size > 0 else 32 * MIB, 64 * MIB)


def rotating(steps: list[Callable[[], Any]]) -> Callable[[], Any]:
    """One step that makes the steps in turn."""
    endless = itertools.cycle(steps)
    return lambda: next(endless)()


def warm(step: Callable[[], Any], calls: int) -> None:
    """Make the first calls: libraries load, plans are made, caches of algorithms fill."""
    for _ in range(calls):
        step()


# ---- environment -----------------------------------------------------------------------------

QUERIED = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "most_sm_mhz": "clocks.max.sm",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "celsius": "temperature.gpu",
}


def read_gpu(machine: Machine) -> dict[str, str]:
    """Driver, clocks, power and temperature as nvidia-smi reads them; empty where it can not."""
    program = shutil.which("nvidia-smi")
    if not machine.cuda or program is None:
        return {}
    which = f"--id=GPU-{str(machine.properties.uuid).removeprefix('GPU-')}"
    query = [program, which, f"--query-gpu={','.join(QUERIED.values())}"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(QUERIED, values, strict=False))


def environment(machine: Machine) -> dict[str, Any]:
    """What a figure depends on besides the code."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "package": transformer_engine.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device_type": machine.device.type,
        "device": machine.name,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith("TE_")},
    }
    if machine.cuda:
        facts |= {
            "compute_capability": f"{machine.properties.major}.{machine.properties.minor}",
            "multiprocessors": machine.properties.multi_processor_count,
            "memory_bytes": machine.properties.total_memory,
            "cache_bytes": machine.properties.L2_cache_size,
            "torch_cuda": torch.version.cuda,
            "gpu_at_start": read_gpu(machine),
        }
    return facts


# ---- reports ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes
    ----------
    key : str
        Of the value in a row. A missing value or None prints as a dash.
    title : str
        Heading, with the unit.
    form : str
        Format specification of the value, width included.
    """

    key: str
    title: str
    form: str = ">10.2f"

    @property
    def width(self) -> int:
        """Characters that it takes."""
        return max(int(self.form.strip("<>^").partition(".")[0].rstrip("sdf")), len(self.title))

    def show(self, value: Any) -> str:
        """The value as text of the column's width."""
        text = "-" if value is None else format(value, self.form).strip()
        return text.ljust(self.width) if self.form.startswith("<") else text.rjust(self.width)


@dataclass
class Report:
    """What a benchmark found: printed row by row, and written as far as it is after each.

    Attributes
    ----------
    name : str
        Of the benchmark.
    machine : Machine
        What it ran on.
    path : Path or None
        Of the JSON file.
    limits : dict
        Measured and claimed limits of the machine, by name with the unit.
    tables : dict
        Rows by title.
    """

    name: str
    machine: Machine
    path: Path | None
    facts: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.facts = environment(self.machine)
        shown = [self.facts["device"], f"torch {self.facts['torch']}"]
        print(f"{self.name}: {', '.join(shown)}, transformer_engine {self.facts['package']}")

    def limit(self, name: str, value: float | None, said: str) -> None:
        """Note a limit of the machine and print it."""
        if value is not None:
            self.limits[name] = value
            print(f"limit: {said} {value:.4g} {name.rpartition(' ')[2]}", flush=True)

    def table(self, title: str, columns: list[Column], rows: Iterable[dict[str, Any]]) -> None:
        """Print and write the rows as they come."""
        print(f"\n{title}")
        heading = [c.title.ljust(c.width) if c.form[0] == "<" else c.title.rjust(c.width)
                   for c in columns]  # fmt: skip
        print("  ".join(heading).rstrip())
        print("  ".join("-" * c.width for c in columns), flush=True)
        kept = self.tables.setdefault(title, [])
        for row in rows:
            kept.append(row)
            print("  ".join(c.show(row.get(c.key)) for c in columns).rstrip(), flush=True)
            self.write()

    def finish(self) -> None:
        """Add how the device is under load, and write the file for the last time."""
        if self.path is None:
            return
        if self.machine.cuda:
            self.machine.keep_busy()
            self.facts["gpu_under_load"] = read_gpu(self.machine)
            self.machine.synchronize()
        self.write()
        print(f"\nwrote {self.path}")

    def write(self) -> None:
        """Write the JSON file, where one was asked for."""
        if self.path is None:
            return
        content = {
            "benchmark": self.name,
            "environment": self.facts,
            "limits": self.limits,
            "tables": self.tables,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1, allow_nan=False)
        self.path.write_text(text + "\n", encoding="utf-8")


# ---- command line ----------------------------------------------------------------------------


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    options.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    options.add_argument("--json", metavar="FILE", help="write the figures (a folder ends in /)")
    options.add_argument("--quick", action="store_true", help="tiny sizes: only see that it runs")
    options.add_argument("--seed", type=int, default=None, help="of the random inputs")
    return options


def start(name: str, options: argparse.Namespace) -> Report:
    """The report of a benchmark that begins now."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(torch.seed() if options.seed is None else options.seed)
    path = None if options.json is None else Path(options.json)
    if path is not None and (options.json.endswith("/") or path.is_dir()):
        path /= f"{name}.json"
    return Report(name, Machine(device, options.quick), path)
