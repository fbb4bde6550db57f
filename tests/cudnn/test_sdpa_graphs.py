# SPDX-License-Identifier: Apache-2.0
"""cuDNN compiles the graphs of attention for a GPU that is described, not there.

Runs where cuDNN and NVRTC are installed (the wheels nvidia-cudnn-cu13, nvidia-cuda-nvrtc and
nvidia-cublas will do), with a stub in place of the driver.
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
SOURCES = [
    *(ROOT / "csrc/cuda" / f"{name}.c" for name in (
        "library", "cudnn_library", "cudnn_graph", "cudnn_plan", "sdpa_graph",
    )),
    *(ROOT / "csrc/core" / f"{name}.c" for name in ("status", "fork")),
]  # fmt: skip
CC = os.environ.get("CC", "cc")
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


@pytest.mark.skipif(shutil.which(CC) is None, reason="needs a C compiler")
def test_graphs_compile(tmp_path):
    includes = headers()
    if includes is None:
        pytest.skip("the headers of CUDA and cuDNN are not installed")
    program = tmp_path / "sdpa_graphs"
    flags = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/include'}"]
    flags += [word for folder in includes for word in ("-isystem", str(folder))]
    command = [CC, "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-Wall", "-Wextra", "-Werror", *flags]
    command += ["-o", program, HERE / "sdpa_graphs.c", *SOURCES, "-ldl", "-lpthread", "-lm"]
    subprocess.run(command, check=True)
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
