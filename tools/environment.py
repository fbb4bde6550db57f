# SPDX-License-Identifier: Apache-2.0
"""Find or make the Python environment of a make target; write its interpreter's path to a file.

`python3 tools/environment.py GROUP PYTHON STAMP`: GROUP (demo, test, lint) names packages of
tests/constraints.txt. PYTHON is used as it is where it has them all. Where it has torch but lacks
others, these go into a virtual environment on top of it; where it has no torch, everything goes
into a virtual environment. An environment that exists is completed, never rebuilt.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {  # the headings of the constraints file that a group takes
    "demo": ("build", "demo"),
    "test": ("build", "demo", "test"),
    "lint": ("build", "lint"),
}
MODULES = {"clang-format": "clang_format", "clang-tidy": "clang_tidy", "codespell": "codespell_lib"}
PROBE = """
import importlib.util, sys
missing = [m for m in sys.argv[1:] if importlib.util.find_spec(m) is None]
if "torch" in sys.argv[1:] and "torch" not in missing:
    import torch  # being there is not enough: it has to load
print(*missing)
"""


def read_group(group):
    """Return {package: pin} of a group of the constraints file."""
    pins, current = {}, ""
    for line in (ROOT / "tests/constraints.txt").read_text().splitlines():
        heading = re.match(r"# \[(\w+)\]", line)
        if heading:
            current = heading[1]
        elif line and not line.startswith("#"):
            if current in GROUPS[group]:
                pins[line.split("==")[0]] = line
    return pins


def find_missing(python, packages):
    """Return the packages that an interpreter lacks, all of them where it does not run."""
    names = [MODULES.get(p, p) for p in packages]
    probe = subprocess.run([python, "-c", PROBE, *names], capture_output=True, text=True)
    absent = probe.stdout.split() if probe.returncode == 0 else names
    return [p for p, n in zip(packages, names, strict=True) if n in absent]


def add_packages_of(base, folder):
    """Let a virtual environment see the packages of another interpreter, itself virtual or not."""
    query = "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\\n')"
    paths = subprocess.run([base, "-c", query], capture_output=True, text=True, check=True).stdout
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "packages_of_base.pth").write_text(paths)


def main():
    """Print and record the interpreter, installing what it lacks."""
    group, base, stamp = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    pins = read_group(group)
    missing = find_missing(base, list(pins))
    python = base
    if missing:
        folder = ROOT / (".venv" if base == "python3" else f".venv-{Path(base).name}")
        python = str(folder / "bin" / "python3")
        if Path(python).exists():
            missing = find_missing(python, list(pins))
        else:
            print(f"making {folder.name}")
            subprocess.run([base, "-m", "venv", str(folder)], check=True)
            if find_missing(base, ["torch"]):
                missing = list(pins)  # all: what a new environment brings has other versions
            else:
                add_packages_of(base, folder)
    if missing:
        wanted = [pins[p] for p in missing]
        print(f"installing {' '.join(wanted)} into {Path(python).parents[1].name}", flush=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(python + "\n")
    print(f"python: {python}")


if __name__ == "__main__":
    main()
