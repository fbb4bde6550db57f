# SPDX-License-Identifier: Apache-2.0
"""Variables of NVIDIA Transformer Engine that are not read: which, and that a program is told."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import processes
import pytest

from transformer_engine.common import config
from transformer_engine.common.unread_variables import BUILD, ELSEWHERE, RUN

ROOT = Path(config.__file__).parents[2]
SOURCES = Path(__file__).parents[2]  # not ROOT where the package is an installed one
ENTRIES = (*RUN, *BUILD, *ELSEWHERE)
NAMES = [name for entry in ENTRIES for name in entry.names.split()]
LISTED = (Path(__file__).parents[1] / "data/variables.txt").read_text().split()
NO_VARIABLE = {"NVTE_FP8_COLLECTION_NAME"}  # a name of its package for JAX


@pytest.fixture(autouse=True)
def none_is_set(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    config.warn_of_unread.cache_clear()
    yield
    config.warn_of_unread.cache_clear()


def test_each_name_of_the_release_is_read_or_listed_here():
    read = {alias for v in config.TABLE for alias in v.aliases}
    assert not read & set(NAMES) and len(NAMES) == len(set(NAMES))
    assert sorted(set(LISTED) - read - set(NAMES) - NO_VARIABLE) == []
    assert len(LISTED) > 70


def test_entries_are_well_formed():
    for entry in ENTRIES:
        assert all(name.startswith("NVTE_") for name in entry.names.split())
        assert entry.what and entry.instead and entry.instead[-1] != "." != entry.what[-1]
        for page in re.findall(r"docs/\w+\.md", entry.line("", "")):
            assert (SOURCES / page).exists()


@pytest.mark.parametrize("entry", RUN, ids=lambda entry: entry.names.split()[0])
def test_one_that_is_set_is_told_once(entry, monkeypatch):
    for name in entry.names.split():
        monkeypatch.setenv(name, "7")
        config.warn_of_unread.cache_clear()
        with pytest.warns(UserWarning) as said:
            config.warn_of_unread(RUN)
            config.warn_of_unread(RUN)
        assert [str(each.message) for each in said] == [entry.line(name, "7")]
        assert name in entry.line(name, "7") and "\n" not in entry.line(name, "7")
        monkeypatch.setenv(name, " ")
        assert config.unread(RUN) == []
        for value in entry.same.split():
            monkeypatch.setenv(name, value)
            assert config.unread(RUN) == []
        monkeypatch.delenv(name)


def test_nothing_is_said_of_others(monkeypatch):
    for entry in (*BUILD, *ELSEWHERE):
        for name in entry.names.split():
            monkeypatch.setenv(name, "7")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")  # one that is read
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.warn_of_unread(RUN)


PROGRAM = """
import warnings
warnings.simplefilter("always")
with warnings.catch_warnings(record=True) as said:
    import transformer_engine.pytorch as te
    assert said == [], "an import reads nothing"
    make = {make}
    make()
    make()
print(*(each.message for each in said), sep="\\n")
"""


@pytest.mark.parametrize("make", [
    "lambda: te.Linear(16, 16, device='cpu')",
    "lambda: te.RMSNorm(16, device='cpu')",
    "lambda: te.DotProductAttention(2, 16)",
    "lambda: te.TransformerLayer(32, 64, 2, device='cpu')",
])  # fmt: skip
def test_a_program_is_told_at_its_first_module(make):
    pytest.importorskip("torch")
    env = {"NVTE_DEBUG": "1", "NVTE_TORCH_COMPILE": "0", "NVTE_CUDA_ARCHS": "90"}
    done = processes.run(PROGRAM.format(make=make), folder=ROOT, **env)
    (entry,) = (each for each in RUN if "NVTE_DEBUG" in each.names.split())
    assert done.stdout.splitlines() == [entry.line("NVTE_DEBUG", "1")]


@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="an installed package has no setup.py")
def test_the_build_says_which_of_its_are_set():
    """The function of setup.py alone: a build would take the lock of another."""
    text = (ROOT / "setup.py").read_text()
    start = text.index("def print_unread():")
    code = "import os, runpy\n" + text[start : text.index("\n\n\n", start)] + "\nprint_unread()\n"
    env = {**os.environ, "NVTE_CUDA_ARCHS": "90", "NVTE_FRAMEWORK": "pytorch", "NVTE_DEBUG": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    said = done.stdout.splitlines()
    assert len(said) == 2 and "TE_CUDA_ARCHS=sm_90a" in said[0] and "NVTE_FRAMEWORK" in said[1]
    assert "print_unread()" in text[text.index("def build_objects") :]
