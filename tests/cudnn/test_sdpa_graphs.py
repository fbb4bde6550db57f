# SPDX-License-Identifier: Apache-2.0
"""cuDNN compiles the graphs of attention for a GPU that is described, not there; lives of plans.

Graphs compile where cuDNN and NVRTC are installed (the wheels nvidia-cudnn-cu13, nvidia-cuda-nvrtc
and nvidia-cublas will do), with a stub in place of the driver.
"""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
GRAPHS = ("library", "cudnn_library", "cudnn_graph", "cudnn_plan", "sdpa_graph", "sdpa_mask")
CC = os.environ.get("CC", "cc")
NEEDS_CC = pytest.mark.skipif(shutil.which(CC) is None, reason="needs a C compiler")
NO_DRIVER = 34  # CUDA_ERROR_STUB_LIBRARY


def wheels(part):
    """Folders of installed wheels of CUDA: "include" or "lib"."""
    sites = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    return [folder for site in sites for folder in sorted(Path(site).glob(f"nvidia/*/{part}"))]


def headers():
    """Folders of cuda.h and cudnn.h; None where one is missing."""
    places = [*Path("/usr/local").glob("cuda*/include"), *wheels("include")]
    places.append(ROOT / "build/cuda-headers")
    found = [[p for p in places if (p / name).exists()] for name in ("cuda.h", "cudnn.h")]
    return [each[0] for each in found] if all(found) else None


def stub_driver(folder, include):
    """A libcuda.so.1 whose functions all fail."""
    text = (include / "cuda.h").read_text()
    names = {*re.findall(r"CUDAAPI\s+(cu\w+)\s*\(", text)}
    names |= {new for _, new in re.findall(r"#define\s+(cu\w+)\s+(cu\w+)", text)}
    source = folder / "driver.c"
    source.write_text("".join(f"int {n}(void) {{ return {NO_DRIVER}; }}\n" for n in sorted(names)))
    made = folder / "libcuda.so.1"
    subprocess.run([CC, "-shared", "-fPIC", "-w", "-o", made, source], check=True)


def compiled(folder, name, files):
    """A program of this folder over files of csrc/cuda, and the folders of the headers."""
    includes = headers()
    if includes is None:
        pytest.skip("the headers of CUDA and cuDNN are not installed")
    flags = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}"]
    flags += [word for include in includes for word in ("-isystem", str(include))]
    sources = [HERE / f"{name}.c", *(ROOT / "csrc/cuda" / f"{file}.c" for file in files)]
    sources += [ROOT / "csrc/core" / f"{file}.c" for file in ("status", "fork")]
    command = [CC, "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror", *flags]
    command += ["-o", folder / name, *sources, "-ldl", "-lpthread", "-lm"]
    subprocess.run(command, check=True)
    return folder / name, includes


@NEEDS_CC
def test_plans_live_as_long_as_they_are_used(tmp_path):
    """Without cuDNN: over a library that counts what is made and what goes."""
    program, _ = compiled(tmp_path, "sdpa_plans", ("sdpa_plans",))
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@NEEDS_CC
def test_graphs_compile(tmp_path):
    program, includes = compiled(tmp_path, "sdpa_graphs", GRAPHS)
    stub_driver(tmp_path, includes[0])
    path = [
        str(tmp_path),
        *map(str, wheels("lib")),
        *os.environ.get("LD_LIBRARY_PATH", "").split(":"),
    ]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, path))}
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
