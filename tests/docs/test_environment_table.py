# SPDX-License-Identifier: Apache-2.0
"""The tables of environment variables are made from the package, are up to date, and are whole."""

import re
import subprocess
import sys

import pytest
from markdown_pages import ROOT

from transformer_engine.common import config

ENVIRONMENT = ROOT / "docs/environment.md"


def test_is_up_to_date():
    script = ROOT / "tools/environment_table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["TE_NVRTC", "NVTE_CUDA_ARCHS", "NVTE_COMPILE_OP_SIDE_EFFECTS"])
def test_an_old_table_is_noticed(name, tmp_path):
    """The check of a copy whose page lacks a line fails, and writing mends it."""
    for path in ("tools/page_tables.py", "tools/environment_table.py", "docs/environment.md",
                 "transformer_engine/common/config.py",
                 "transformer_engine/common/unread_variables.py"):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text())
    page = tmp_path / "docs/environment.md"
    page.write_text(re.sub(rf"\| `{name}`.*\n", "", page.read_text()))
    script = [sys.executable, tmp_path / "tools/environment_table.py"]
    done = subprocess.run([*script, "--check"], capture_output=True, text=True)
    assert done.returncode == 1 and "is not up to date: run python tools" in done.stdout
    subprocess.run(script, check=True)
    assert page.read_text() == ENVIRONMENT.read_text()


def test_every_variable_is_there():
    """Those of the package by the table; those that setup.py reads are written by hand."""
    page = ENVIRONMENT.read_text()
    read = set(re.findall(r'environ\.get\("(\w+)"', (ROOT / "setup.py").read_text()))
    assert {"TE_CUDA", "TE_CUDA_ARCHS", "CC"} <= read
    names = read | {name for v in config.TABLE for name in (v.name, *v.aliases)}
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
