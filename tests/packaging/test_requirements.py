# SPDX-License-Identifier: Apache-2.0
"""Without torch, with an old one, or unbuilt: the import says what to do."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from markdown_pages import ROOT

import transformer_engine
from transformer_engine.common.requirements import OLDEST_TORCH

PACKAGE = Path(transformer_engine.__file__).parent
NO_TORCH = "import sys; sys.modules['torch'] = None"
TORCH_29 = (
    "import sys, types; t = sys.modules['torch'] = types.ModuleType('torch');"
    "t.__version__ = '2.9.1+cu128'"
)
BROKEN_TORCH = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'sympy'", name="sympy")
sys.meta_path.insert(0, Finder())
"""


def import_after(code, folder, module="transformer_engine.pytorch"):
    """Import the package in a new process after `code`; return its status and last line."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}\nimport {module}"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    return done.returncode, done.stderr.strip().splitlines()[-1] if done.stderr else ""


@pytest.mark.parametrize("code, said", [
    (NO_TORCH, "PyTorch, and this Python has none: "),
    (TORCH_29, "PyTorch 2.10 or later and found 2.9.1+cu128: "),
])  # fmt: skip
def test_torch_that_is_missing_or_old(code, said):
    status, last = import_after(code, PACKAGE.parent)
    assert status == 1 and last.startswith(f"ImportError: transformer_engine.pytorch needs {said}")
    assert f'{sys.executable} -m pip install "torch>=2.10"' in last


def test_what_torch_lacks_is_said_by_torch():
    status, last = import_after(BROKEN_TORCH, PACKAGE.parent)
    assert (status, last) == (1, "ModuleNotFoundError: No module named 'sympy'")


def test_the_recipes_need_no_torch():
    module = "transformer_engine.common.recipe"
    assert import_after(NO_TORCH, PACKAGE.parent, module) == (0, "")


def test_the_oldest_torch_is_that_of_the_package():
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("this is no source tree")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = "torch>=" + ".".join(map(str, OLDEST_TORCH))
    extras = project["optional-dependencies"]
    assert all(oldest in extras[name] for name in extras.keys() - {"jax"})


def test_an_extension_that_was_not_built(tmp_path):
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / PACKAGE.name, ignore=unbuilt)
    site = Path(torch.__file__).parents[1]
    status, last = import_after(f"import sys; sys.path.append({str(site)!r})", tmp_path)
    assert status == 1
    assert last.startswith("ImportError: transformer_engine._core, the native extension, was not")
    assert "make build" in last


OLD_SETUPTOOLS = """
import importlib.util, runpy, setuptools, sys
found = importlib.util.find_spec
setuptools.__version__, *sys.argv = sys.argv[1:]
importlib.util.find_spec = lambda name: None if name == "wheel" else found(name)
runpy.run_path("setup.py", run_name="__main__")
"""


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="an installed package has no setup.py")
@pytest.mark.parametrize(
    ("version", "command", "told"),
    [
        ("65.5.0", "dist_info", True),
        ("70.0.0", "bdist_wheel", True),
        ("65.5.0", "--version", False),
        ("60.9.3", "--version", True),
        ("70.1.0", "--version", False),
    ],
)
def test_old_setuptools_is_told(version, command, told):
    done = subprocess.run(
        [sys.executable, "-c", OLD_SETUPTOOLS, version, "setup.py", command],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = f"setuptools {version} is too old: 70.1 is needed" in done.stderr
    assert said is told and (done.returncode == 1) is told, done.stdout + done.stderr
