# SPDX-License-Identifier: Apache-2.0
"""The convergence runs of the docs: the scripts, and that what is kept fulfils its claim."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from pictures import differences

FOLDER = Path(__file__).resolve().parents[2] / "docs/convergence"


def script(name):
    spec = importlib.util.spec_from_file_location(f"convergence_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def plot():
    pytest.importorskip("matplotlib")
    return script("plot")


def test_a_short_run_is_kept_and_tabulated(tmp_path, plot, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    small = "--layers 1 --hidden 64 --heads 2 --seq 32 --batch 2 --valid-windows 4 --device cpu"
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 200)
    given = ["--out", str(tmp_path), "--text", str(text), "--steps", "5", *small.split()]
    script("run").main(["--recipes", "fp32", "current", "--seeds", "3", *given])
    runs = plot.read(tmp_path)
    assert runs.keys() == {"current", "fp32"}
    run = runs["current"][3]
    assert run["fp8_gemms"] == run["gemms"] > 0 == runs["fp32"][3]["fp8_gemms"]
    assert run["valid_curve"][-1][1] == run["valid_loss"]
    plot.main(tmp_path)
    assert (tmp_path / "curves.svg").stat().st_size > 1000
    assert f"| current | 3 | {run['valid_loss']:.4f} |" in capsys.readouterr().out


def test_a_recipe_that_ends_far_above_is_told(tmp_path, plot):
    def keep(recipe, loss, **config):
        run = {"recipe": recipe, "seed": 0, "config": {"steps": 2, **config}, "fp8_gemms": 1,
               "gemms": 1, "valid_loss": loss, "valid_curve": [[0, 5.0], [2, loss]],
               "train_means": [loss]}  # fmt: skip
        (tmp_path / f"{recipe}-0.json").write_text(json.dumps(run))

    keep("bf16", 1.0)
    keep("delayed", 1.004)
    assert plot.main(tmp_path) == 0
    keep("delayed", 1.006)
    assert plot.main(tmp_path) == 1
    keep("delayed", 1.0, layers=3)
    with pytest.raises(ValueError, match="2 configurations"):
        plot.read(tmp_path)


@pytest.mark.parametrize("name, draws", [
    ("curves.svg", "plot"), ("differences.svg", "plot_differences")
])  # fmt: skip
def test_the_pictures_that_are_kept_are_those_of_the_runs(plot, tmp_path, name, draws):
    for file in FOLDER.glob("*.json"):
        shutil.copy(file, tmp_path)
    draw, runs = getattr(plot, draws), plot.read(tmp_path)
    draw(runs, tmp_path / name)
    assert differences(tmp_path / name, FOLDER / name) == []
    draw({recipe: runs[recipe] for recipe in list(runs)[:-1]}, tmp_path / "fewer.svg")
    assert differences(tmp_path / "fewer.svg", FOLDER / name) != []


def test_differences_are_percents_of_the_same_seeds(plot):
    assert plot.over([[1.1, 2.0], [3.3, 4.0]], [[1.0, 2.0], [3.0, 4.0]]) == pytest.approx([10, 0])
    assert plot.spread([[1.0, 2.0], [3.0, 2.0]]) == pytest.approx([50, 0])


def test_the_runs_that_are_kept_end_near_bf16(plot, tmp_path):
    runs = plot.read(FOLDER)
    page = (FOLDER.parent / "formats_and_recipes.md").read_text(encoding="utf-8")
    if runs:
        assert plot.table(runs) in page
    assert [name for name in runs if (plot.excess(runs, name) or 0.0) > plot.MARGIN] == []
