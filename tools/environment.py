# SPDX-License-Identifier: Apache-2.0
"""Find or make the Python environment of a make target; write its interpreter's path to a file.

`python3 tools/environment.py GROUP PYTHON STAMP [FOLDER]`: GROUP (demo, test, lint, clients) names
packages of tests/constraints.txt. PYTHON is used as it is where it has them all. Where it has torch
but lacks others, these go into a virtual environment (FOLDER, or .venv) on top of it; where it has
no torch, everything goes into a virtual environment. An environment that exists is completed, never
rebuilt.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {  # the headings of the constraints file that a group takes
    "demo": ("build", "demo"),
    "test": ("build", "demo", "test"),
    "lint": ("build", "lint"),
    "clients": ("build", "demo", "test", "clients"),
}
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MARK = "made_by = transformer_engine/tools/environment.py\n"  # a line of pyvenv.cfg
MODULES = {
    "clang-format": "clang_format",
    "clang-tidy": "clang_tidy",
    "codespell": "codespell_lib",
    "pytest-xdist": "xdist",
}
PROBE = """
import importlib.util, sys
missing = [m for m in sys.argv[1:] if importlib.util.find_spec(m) is None]
if "torch" in sys.argv[1:] and "torch" not in missing:
    import torch  # being there is not enough: it has to load
print(*missing)
"""


def read_pins(*headings):
    """Return the pins that stand under these headings of the constraints file."""
    pins, current = [], ""
    for line in (ROOT / "tests/constraints.txt").read_text().splitlines():
        heading = re.match(r"# \[(\w+)\]", line)
        if heading:
            current = heading[1]
        elif line and not line.startswith("#") and current in headings:
            pins.append(line.split("#")[0].strip())
    return pins


def read_group(group):
    """Return {package: pin} of a group of the constraints file."""
    return {pin.split("==")[0]: pin for pin in read_pins(*GROUPS[group])}


def read_notes():
    """Return {pin: what the constraints file says of it}."""
    lines = (ROOT / "tests/constraints.txt").read_text().splitlines()
    split = (line.partition("#") for line in lines)
    return {pin.strip(): note for pin, _, note in split}


def count_megabytes(pins, cpu=False):
    """Return how many megabytes come with these pins, with torch from its CPU index if `cpu`."""
    notes = read_notes()
    sizes = [re.findall(r"(\d+) MB", notes[pin]) or ["1"] for pin in pins if pin in notes]
    return sum(int(size[-1 if cpu else 0]) for size in sizes)


def has_gpu():
    """Tell whether an NVIDIA driver is there."""
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def torch_index():
    """Return the index that torch comes from, empty for that of all packages."""
    return os.environ.get("TORCH_INDEX", "" if has_gpu() else CPU_INDEX)


def announce(wanted, folder, index):
    """Say what is going to be downloaded, and that torch is that for machines without a GPU."""
    has_torch = any(pin.startswith("torch==") for pin in wanted)
    size = count_megabytes(wanted, cpu=has_torch and index == CPU_INDEX)
    print(f"{folder} gets {' '.join(wanted)}: about {size:,} MB", flush=True)
    if has_torch and index:
        print(f"no NVIDIA GPU found: torch from {index}; make TORCH_INDEX= takes", flush=True)
        print(f"the usual one, about {count_megabytes(wanted):,} MB in all", flush=True)


def make_environment(base, folder):
    """Make a virtual environment; say in it that it is ours, where the package may be installed."""
    print(f"making {folder.name}", flush=True)
    subprocess.run([base, "-m", "venv", str(folder)], check=True)
    with open(folder / "pyvenv.cfg", "a", encoding="utf-8") as config:
        config.write(MARK)


def run_pip(python, *words):
    """Let pip install, saying more where somebody looks on; return its exit status."""
    quiet = [] if sys.stdout.isatty() else ["-q"]
    command = [python, "-m", "pip", "install", *quiet, *words]
    return subprocess.run(command, check=False).returncode


def install(python, wanted, folder):
    """Install packages, torch from its own index where there is no GPU and it answers."""
    index, rest = torch_index(), wanted
    announce(wanted, folder.name, index)
    torch = [pin for pin in wanted if pin.startswith("torch==")]
    if torch and index:
        short = ("--index-url", index, "--retries", "1", "--timeout", "20")
        if run_pip(python, *torch, *short) == 0:
            rest = [pin for pin in wanted if pin not in torch]
        else:
            print(f"{index} has not answered: torch from the usual index", flush=True)
    if rest and run_pip(python, *rest) != 0:
        raise SystemExit(f"{folder.name} lacks packages: see what pip said above, and make again")


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
    if sys.version_info < (3, 11):  # noqa: UP036 - here it is found out
        found = f"{sys.executable} is Python {sys.version.split()[0]}"
        raise SystemExit(f"{found}; name one from 3.11 on: make ... PYTHON=python3.12")
    group, base, stamp = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    pins = read_group(group)
    missing = find_missing(base, list(pins))
    python = base
    if missing:
        named = ".venv" if base == "python3" else f".venv-{Path(base).name}"
        folder = ROOT / (sys.argv[4] if len(sys.argv) > 4 else named)
        python = str(folder / "bin" / "python3")
        if Path(python).exists():
            missing = find_missing(python, list(pins))
        else:
            make_environment(base, folder)
            if find_missing(base, ["torch"]):
                missing = list(pins)  # all: what a new environment brings has other versions
            else:
                add_packages_of(base, folder)
    if missing:
        install(python, [pins[p] for p in missing], folder)
    stamp.parent.mkdir(parents=True, exist_ok=True)
    stamp.write_text(python + "\n")
    print(f"python: {python}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
