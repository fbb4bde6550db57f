# SPDX-License-Identifier: Apache-2.0
"""Shared objects for tests of plug-ins: tests/c_plugins.c in variants, built by the C compiler."""

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from transformer_engine.plugin import get_include

SOURCE = "c_plugins.c"
CC = os.environ.get("CC", "cc")

needs_compiler = pytest.mark.skipif(shutil.which(CC) is None, reason="needs a C compiler")


def build(folder: Path, name: str = "plugin", source: str = SOURCE, **defines) -> Path:
    """A shared object `name`.so of a file beside this one.

    NAME, VENDOR and REASON become literals of C.
    """
    quoted = {key: f'"{defines[key]}"' for key in defines.keys() & {"NAME", "VENDOR", "REASON"}}
    flags = [f"-D{key}={value}" for key, value in (defines | quoted).items()]
    out = folder / f"{name}.so"
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    command = [CC, "-std=c11", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", *flags]
    command += [f"-I{get_include()}", "-Wl,-z,defs", "-o", str(out)]
    command += [str(Path(__file__).with_name(source)), "-lm"]
    subprocess.run(command, check=True, env=environment)
    return out


_FOLDER = tempfile.TemporaryDirectory(prefix="te_plugins_")  # goes with the process


@functools.cache
def usual() -> Path:
    """The plug-in without options, built once."""
    return build(Path(_FOLDER.name), "usual")
