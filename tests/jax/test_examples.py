# SPDX-License-Identifier: Apache-2.0
"""Programs of examples/jax run, small, and say what they have to."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "jax"


@pytest.fixture
def program(monkeypatch, capsys):
    """Run `main` of a program; return (status, what it printed)."""

    def run(name, *arguments):
        monkeypatch.syspath_prepend(str(EXAMPLES.parent))
        status = runpy.run_path(str(EXAMPLES / name))["main"](list(arguments))
        return status, capsys.readouterr().out

    return run


def test_gpt(program, tmp_path):
    """Of a text that repeats itself both runs learn, and FP8 learns as much."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and again " * 400)
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "seq": 16, "batch": 8, "steps": 60, "valid": 4,
             "lr": 0.01, "text": text}  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in sizes.items()]
    _, printed = program("train_gpt.py", *arguments)
    losses = [float(loss) for loss in re.findall(r"validation loss (\S+)", printed)]
    assert len(losses) == 2 and all(0 < loss < 1.5 for loss in losses)  # log 256 is 5.5
    assert len(re.findall(r"step \d+, loss", printed)) == 20


@pytest.mark.parametrize("name, arguments, least", [
    ("encoder.py", ("--steps=150", "--hidden=32", "--layers=1"), 60),
    ("mnist.py", ("--steps=60", "--batch=32"), 60),
])  # fmt: skip
def test_classes(program, name, arguments, least):
    """New data is told better than by chance, which of 1024 and two classes gives 55% at most."""
    status, printed = program(name, *arguments)
    assert status == 0
    assert float(re.search(r"told right: (\S+)%", printed)[1]) > least
