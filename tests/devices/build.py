# SPDX-License-Identifier: Apache-2.0
"""Build the C++ of the test devices, once for each torch and each version of the sources.

A library lies in ``build/test_devices/<torch>-<hash>``. Processes that need it at once wait for the
first of them, which builds it.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
CACHE = HERE.parent.parent / "build" / "test_devices"
SOURCES = {
    "npu_device": ["npu_device.cpp", "npu_operators.cpp"],
    "npu_group": ["npu_group.cpp"],
    "rocm_device": ["rocm_device.cpp"],
}
"""Files of the extension modules, by name."""
FLAGS = ["-O1", "-g0", "-w", "-std=c++20", "-DUSE_C10D", "-DUSE_DISTRIBUTED"]


class NoCompilerError(RuntimeError):
    """No C++ compiler is here."""


def load(name):
    """Return the extension module of a name of `SOURCES`, which is built where it is missing.

    Raises
    ------
    NoCompilerError
        It has to be built, and no C++ compiler is found.
    """
    spec = importlib.util.spec_from_file_location(name, build(name))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(name):
    """Return the path of a library, which is built where it is missing."""
    here = folder()
    library = here / f"{name}.so"
    if library.exists():
        return library
    if compiler() is None:
        raise NoCompilerError("the test device needs a C++ compiler (c++, or CXX)")
    here.mkdir(parents=True, exist_ok=True)
    with open(here / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _run(name, here)
    return library


def compiler():
    """Path of the C++ compiler; None where there is none."""
    return shutil.which(os.environ.get("CXX", "c++"))


def folder():
    """Folder of the libraries of this torch and of these sources."""
    made = hashlib.sha256(repr((SOURCES, FLAGS)).encode())
    for file in sorted([*HERE.glob("*.cpp"), *HERE.glob("*.h")]):
        made.update(file.read_bytes())
    return CACHE / f"{torch.__version__}-py{sys.version_info[1]}-{made.hexdigest()[:16]}"


def _run(name, target):
    """Build in a process of its own: setuptools changes the process that it runs in."""
    files = [str(HERE / file) for file in SOURCES[name]]
    command = [sys.executable, __file__, name, str(target), *files]
    environment = {**os.environ, "CXX": compiler()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{name} was not built:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")


def _main(name, target, *files):
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    extension = CppExtension(name, list(files), extra_compile_args=FLAGS)
    command = BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=True)
    distribution = Distribution({"name": name, "ext_modules": [extension]})
    distribution.cmdclass["build_ext"] = command
    builder = distribution.get_command_obj("build_ext")
    builder.build_lib = f"{target}/{name}-made"
    builder.build_temp = f"{target}/{name}-objects"
    distribution.run_command("build_ext")
    os.replace(f"{target}/{name}-made/{name}.so", f"{target}/{name}.so")


if __name__ == "__main__":
    _main(*sys.argv[1:])
