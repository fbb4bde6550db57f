# SPDX-License-Identifier: Apache-2.0
"""The language-model example, tiny: it runs, resumes to the same bits, reports and sees faults."""

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
STEPS, BATCH, CONTEXT, VALID, SAMPLE = 12, 32, 16, 80, 8
LAYERS = 1 + 2 * 2 + 1  # projection, two blocks of two, head
EVALUATED = [0, 2, 4, 6, 8, 10, 12]  # steps
PREDICTIONS = len(EVALUATED) * math.ceil(VALID / BATCH) + SAMPLE  # forwards without a backward
GEMMS = LAYERS * (3 * STEPS + PREDICTIONS)


def train(text, out, *flags, check=True):
    """Run the example in a process of its own."""
    sizes = {"steps": STEPS, "batch": BATCH, "context": CONTEXT, "embed": 16, "width": 32,
             "depth": 2, "valid-tokens": VALID, "sample-bytes": SAMPLE}  # fmt: skip
    command = [sys.executable, str(EXAMPLES / "train_mlp_lm.py"), "--device", "cpu", "--no-check"]
    command += ["--text", str(text), "--out", str(out), *flags]
    command += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Write a text of random words, 8000 bytes long."""
    words = ["def", "return", "self", "import", "for", "in", "=", "(", ")", ":\n"]
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(draw.choices(words, k=3000))[:8000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def both(text, tmp_path_factory):
    """Run both precisions once: the process, its folder and its figures."""
    out = tmp_path_factory.mktemp("both")
    done = train(text, out)
    figures = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return done, out, figures


@pytest.fixture(scope="module")
def report():
    """Import the example's report module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import report

        yield report
    finally:
        sys.path.remove(str(EXAMPLES))
        sys.modules.pop("report", None)


def test_table_is_printed(both):
    done, _, figures = both
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if "FP8 (delayed)" in line and "fp32" in line)
    rows = dict(line.split("  ", 1) for line in lines[start + 2 : start + 9])
    assert rows["final validation loss"].split() == [
        f"{run['valid_loss']:.4f}" for run in figures["runs"]
    ]
    assert rows["difference"].split()[0] == f"{figures['difference']:+.2%}"
    assert rows["bigram loss, same bytes"].split() == [f"{figures['bigram_loss']:.4f}"] * 2
    assert {"parameters", "tokens/s", "peak memory, MiB", "FP8 of linear GEMMs"} <= set(rows)


def test_every_linear_gemm_is_fp8(both):
    fp8, high = (run["gemms"] for run in both[2]["runs"])
    assert fp8 == {"fp8": GEMMS, "total": GEMMS, "expected": GEMMS}
    assert high == {"fp8": 0, "total": GEMMS, "expected": GEMMS}


def test_plot_is_a_png(both):
    assert (both[1] / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_both_runs_start_from_the_same_model_and_learn(both):
    fp8, high = (dict(run["valid_curve"]) for run in both[2]["runs"])
    assert list(fp8) == list(high) == EVALUATED
    assert fp8[STEPS] < fp8[0] and high[STEPS] < high[0]
    assert all(run["sample"] for run in both[2]["runs"])


def assert_same_training(whole, parts, precision):
    """Compare final checkpoints bit for bit, losses and what is left of the optimizer included."""
    one, other = (torch.load(p / f"{precision}.pt", weights_only=True) for p in (whole, parts))
    assert one["step"] == other["step"] == STEPS
    for name in ("model", "optimizer", "train_losses", "valid_curve", "gemms"):
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=0)


def test_resumed_runs_equal_uninterrupted_ones(both, text, tmp_path):
    stopped = train(text, tmp_path, "--stop-after", "5")
    assert "fp8: stopped after step 5" in stopped.stdout
    assert "fp32: stopped after step 5" in stopped.stdout
    resumed = train(text, tmp_path, "--resume")
    for precision in ("fp8", "fp32"):
        assert_same_training(both[1], tmp_path, precision)
        sample = (tmp_path / f"sample_{precision}.txt").read_bytes()
        assert sample == (both[1] / f"sample_{precision}.txt").read_bytes()
    assert "FP8 of linear GEMMs" in resumed.stdout


def test_current_scaling_resumes_too(text, tmp_path):
    flags = ["--precision", "fp8", "--recipe", "current"]
    train(text, tmp_path / "whole", *flags)
    train(text, tmp_path / "parts", *flags, "--stop-after", "5")
    train(text, tmp_path / "parts", *flags, "--resume")
    assert_same_training(tmp_path / "whole", tmp_path / "parts", "fp8")


def test_bf16_runs_on_the_cpu(text, tmp_path):
    train(text, tmp_path, "--precision", "bf16")
    (run,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["runs"]
    assert run["gemms"] == {"fp8": 0, "total": GEMMS, "expected": GEMMS}
    assert math.isfinite(run["valid_loss"])


def test_checkpoint_of_another_run_is_refused(both, text):
    done = train(text, both[1], "--resume", "--seed", "7", check=False)
    assert done.returncode == 1
    assert "seed 0 -> 7" in done.stderr


def test_too_short_a_text_is_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("short", encoding="utf-8")
    done = train(short, tmp_path / "out", check=False)
    assert done.returncode == 1
    assert "too few for windows of 16 bytes" in done.stderr


def test_diverging_run_fails(text, tmp_path):
    done = train(text, tmp_path, "--precision", "fp32", "--lr", "inf", check=False)
    assert done.returncode == 1
    assert "fp32: a loss of steps" in done.stderr


def make_result(report, precision, loss, fp8, total=30):
    return report.Result(
        precision=precision,
        label=precision,
        parameters=1,
        valid_loss=loss,
        tokens_per_second=1.0,
        peak_memory=1,
        gemms=report.GemmCount(fp8=fp8, total=total, expected=30),
        train_curve=[(1, loss)],
        valid_curve=[(1, loss)],
        sample="",
    )


def test_faults_are_noticed(report):
    good = [make_result(report, "fp8", 1.5, 30), make_result(report, "fp32", 1.5, 0)]
    assert report.problems(good, bigram=2.0) == []

    def said(index, **changes):
        runs = list(good)
        runs[index] = replace(runs[index], **changes)
        return " ".join(report.problems(runs, bigram=2.0))

    count = report.GemmCount
    assert "29 linear GEMMs ran in FP8" in said(0, gemms=count(fp8=29, total=30, expected=30))
    assert "29 linear GEMMs ran, 30" in said(0, gemms=count(fp8=29, total=29, expected=30))
    assert "1 linear GEMMs ran in FP8, 0" in said(1, gemms=count(fp8=1, total=30, expected=30))
    assert "not finite" in said(1, valid_loss=math.nan)
    assert "not below bigram" in said(1, valid_loss=2.5)
    assert "above high precision" in said(0, valid_loss=1.6)
    assert report.problems([replace(good[0], valid_loss=2.5)], bigram=2.0, check_loss=False) == []
