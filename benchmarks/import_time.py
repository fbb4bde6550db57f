# SPDX-License-Identifier: Apache-2.0
"""What `import transformer_engine.pytorch` adds to `import torch`: time, processes, CUDA libraries.

Every run is a fresh interpreter. `--check` fails where the import adds more than ALLOWED seconds,
starts a process, or opens a CUDA library that torch had not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from timing import Column, Figure, parser, start

import transformer_engine

ALLOWED = 0.3  # seconds
ROOT = Path(transformer_engine.__file__).resolve().parents[1]

# Prints one JSON object. A process that native code starts is a child that no audit event told of.
PROBE = """
import json, os, re, sys, time

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system",
          "os.exec", "pty.spawn"}

def libraries():
    names = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
    return {n for n in names if re.search(r"libcu|libnv|cublas|cudnn|nvrtc|nccl", n)}

def has_children():
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True

begin = time.perf_counter()
import torch
torch_seconds = time.perf_counter() - begin
before, children, started = libraries(), has_children(), []
sys.addaudithook(lambda event, args: started.append(event) if event in STARTS else None)
begin = time.perf_counter()
import transformer_engine.pytorch
added_seconds = time.perf_counter() - begin
opened, processes = sorted(libraries() - before), list(started)
if has_children() and not children:
    processes.append("a child process")
initialised = torch.cuda.is_initialized()
print(json.dumps({"torch": torch_seconds, "added": added_seconds, "libraries": opened,
                  "processes": processes, "initialised": initialised}))
"""
COLUMNS = [
    Column("what", "import", "<31s"),
    Column("ms", "ms"),
    Column("low_ms", "low"),
    Column("high_ms", "high"),
    Column("limit_ms", "limit ms"),
]


def probe() -> dict[str, Any]:
    """Import both in a fresh interpreter."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBE],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"the import failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def problems(rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> list[str]:
    """What should not be."""
    found = []
    added = rows[1]["ms"] * 1e-3
    if added > ALLOWED:
        found.append(f"the import adds {added:.3f} s to that of torch, more than {ALLOWED} s")
    for name in ("processes", "libraries"):
        seen = sorted({thing for run in runs for thing in run[name]})
        if seen:
            found.append(f"{name} that the import started or opened: {', '.join(seen)}")
    if any(run["initialised"] for run in runs):
        found.append("the import initialised CUDA")
    return found


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--check", action="store_true", help="exit with 1 where a bound is broken")
    options.add_argument("--runs", type=int, help="fresh interpreters")
    options = options.parse_args()
    report = start("import_time", options)
    if not options.quick:
        probe()  # files come into the page cache, bytecode is written
    runs = [probe() for _ in range(options.runs or (1 if options.quick else 9))]
    report.limit("allowed ms", ALLOWED * 1e3, "what the import may add")
    rows = []
    for what, key, limit in (
        ("torch", "torch", None),
        ("transformer_engine.pytorch adds", "added", ALLOWED * 1e3),
    ):
        figure = Figure.of(run[key] for run in runs).scaled(1e3)
        rows.append(
            {"what": what, "ms": figure["median"], "low_ms": figure["low"]}
            | {"high_ms": figure["high"], "limit_ms": limit, "figure_ms": figure}
        )
    found = problems(rows, runs)
    report.facts["problems"] = found
    report.table("import", COLUMNS, rows)
    report.finish()
    print("\n".join(found) or "no process started, no CUDA library opened, no device touched")
    if options.check and found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
