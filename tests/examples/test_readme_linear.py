# SPDX-License-Identifier: Apache-2.0
"""examples/readme_linear.py: runs as a program, and does in FP8 what it says."""

from pathlib import Path

import processes
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "readme_linear.py"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    import readme_linear

    return readme_linear


@pytest.mark.parametrize("old_names", [False, True])
def test_step(example, old_names):
    done = example.step(tokens=64, old_names=old_names)
    assert (done["fp8_gemms"], done["other_gemms"]) == (2, 0)  # the input needs no gradient
    assert done["out"].shape == (64, 3072) and done["out"].isfinite().all()
    assert done["weight_grad"].shape == (3072, 768) and (done["weight_grad"] != 0).any()
    assert (done["bias_grad"] == 64).all()  # of a sum over 64 tokens
    home = "cuda" if torch.cuda.is_available() else "cpu"
    assert done["out"].device.type == home


def test_program():
    done = processes.run(PROGRAM, limit=300, fresh=torch.cuda.is_available())
    assert done.stdout.count("GEMMs: 2 in FP8, 0 in high precision") == 2
