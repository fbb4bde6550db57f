# SPDX-License-Identifier: Apache-2.0
"""The GPT example, tiny: it runs, resumes to the same bits, reports and sees faults."""

import io
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import processes
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LAYERS, STEPS, BATCH, VALID, SAMPLE = 2, 12, 4, 10, 8
LINEARS = 4 * LAYERS + 1  # query-key-value, projection, two of the MLP; the head
EVALUATED = [0, 3, 6, 9, 12]  # steps
PREDICTIONS = len(EVALUATED) * math.ceil(VALID / BATCH) + SAMPLE  # forwards without a backward
GEMMS = LINEARS * (3 * STEPS + PREDICTIONS)
# Drawn in training: a resumed run must draw what an uninterrupted one does.
DROPOUT = ("--dropout", "0.1")


def arguments(device, text, out, *flags):
    """The command line of a tiny run."""
    sizes = {"layers": LAYERS, "hidden": 32, "heads": 2, "seq": 16, "batch": BATCH, "steps": STEPS,
             "valid-windows": VALID, "sample": SAMPLE}  # fmt: skip
    words = ["--device", device, "--no-check", "--text", str(text), "--out", str(out)]
    words += [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    return [*words, *flags]


def train(device, text, out, *flags, check=True):
    """Run the example in a process of its own."""
    return processes.run(
        EXAMPLES / "train_gpt.py",
        *arguments(device, text, out, *flags),
        limit=300,
        check=check,
        fresh=device != "cpu",
        OMP_NUM_THREADS="1",
    )


def high(device):
    """Name the precision that FP8 is compared with."""
    return "bf16" if device == "cuda" else "fp32"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Write a text of random words, 8000 bytes long."""
    words = ["def", "return", "self", "import", "for", "in", "=", "(", ")", ":\n"]
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(draw.choices(words, k=3000))[:8000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def both(device, text, tmp_path_factory):
    """Run both precisions once: the process, its folder and its figures."""
    out = tmp_path_factory.mktemp("both")
    done = train(device, text, out, *DROPOUT, "--checkpoint", str(out / "gpt.pt"))
    figures = json.loads((out / "results.json").read_text(encoding="utf-8"))
    return done, out, figures


@pytest.fixture
def run(example, device, text, tmp_path):
    """Function of flags that runs the example in this process, which spares it a start.

    An end by SystemExit with a text is what a program makes the exit status 1 of, and that text.
    """
    main = example("train_gpt").main

    def function(*flags, text=text):
        return main(arguments(device, text, tmp_path, *flags))

    return function


@pytest.fixture(scope="module")
def report(example):
    return example("report")


@pytest.fixture(scope="module")
def checkpoints(example):
    return example("checkpoints")


def test_table_is_printed(both, device):
    done, _, figures = both
    lines = done.stdout.splitlines()
    title = ["FP8", "(delayed)", high(device), "difference"]
    start = next(i for i, line in enumerate(lines) if line.split() == title)
    rows = dict(line.split("  ", 1) for line in lines[start + 2 :] if "  " in line)
    runs = figures["runs"]
    final = [f"{run['valid_loss']:.4f}" for run in runs] + [f"{figures['difference']:+.2%}"]
    assert rows["final validation loss"].split() == final
    for index, step in enumerate(EVALUATED[:-1]):
        losses = [f"{run['valid_curve'][index][1]:.4f}" for run in runs]
        assert rows[f"validation loss, step {step}"].split()[:2] == losses
    assert rows["bigram loss, same bytes"].split() == [f"{figures['bigram_loss']:.4f}"] * 2
    assert rows["quantized linear GEMMs"].split() == [str(GEMMS), "of", str(GEMMS),
                                                   "0", "of", str(GEMMS)]  # fmt: skip
    assert {"parameters", "tokens/s", "peak memory, MiB"} <= set(rows)


def test_every_linear_gemm_is_fp8(both):
    fp8, other = (run["gemms"] for run in both[2]["runs"])
    asked = {"total": GEMMS, "expected": GEMMS}
    assert fp8 == {"fp8": GEMMS, **asked, "fp8_expected": GEMMS}
    assert other == {"fp8": 0, **asked, "fp8_expected": 0}


def test_plot_is_a_png(both):
    assert (both[1] / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_plot_shows_every_point(report, monkeypatch, tmp_path):
    from matplotlib import pyplot

    shown = []
    monkeypatch.setattr(pyplot, "close", lambda figure: shown.append(figure))
    curve = [(0, 5.4), (140, 2.3), (700, 1.7)]  # as the demo's: it starts far above the bigram
    runs = [
        replace(make_result(report, "fp8", 1.7, 30), train_curve=curve[1:], valid_curve=curve),
        replace(make_result(report, "fp32", 1.8, 0), train_curve=curve[1:], valid_curve=curve),
    ]
    report.plot(tmp_path / "loss.png", runs, 2.4, "title")
    monkeypatch.undo()
    axes = shown[0].axes[0]
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    points = [p for line in axes.lines for p in line.get_xydata() if len(line.get_xdata()) == 3]
    assert sorted({x for x, _ in points}) == [0, 140, 700]
    assert all(low < y < high and left < x < right for x, y in points)
    pyplot.close(shown[0])


def test_progress_leaves_the_slow_beginning_out(example):
    bar = example("progress").Progress(total=700, file=io.StringIO(), mininterval=0)
    now = bar.start_t
    bar._time = lambda: now
    for took in [20.0, 0.5, 0.25, 0.25]:  # seconds before each step ends: scales, kernels, steps
        now += took
        bar.update()
    figures = bar.format_dict
    assert (figures["n"], figures["total"]) == (4, 700)
    assert figures["elapsed"] == pytest.approx(1.0)
    assert 2 <= figures["rate"] <= 4  # steps per second; with the first one it is below 0.5


def test_progress_shows_loss_rate_and_memory(both):
    bar = both[0].stderr
    assert "fp8" in bar and "loss" in bar and "tokens/s" in bar and "MiB" in bar


def test_both_runs_see_the_same_steps_and_learn(both):
    fp8, other = (dict(run["valid_curve"]) for run in both[2]["runs"])
    assert list(fp8) == list(other) == EVALUATED
    assert fp8[STEPS] < fp8[0] and other[STEPS] < other[0]
    samples = [run["sample"] for run in both[2]["runs"]]
    assert all(sample.startswith("def ") and len(sample) > len("def ") for sample in samples)


def assert_same_training(whole, parts, load):
    """Compare final checkpoints bit for bit, losses and what is left of the optimizer included."""
    one, other = (load(path, "cpu") for path in (whole, parts))
    assert one["step"] == other["step"] == STEPS
    names = ["model", "optimizer", "train_losses", "valid_curve", "gemms"]
    for name in names:
        torch.testing.assert_close(other[name], one[name], rtol=0, atol=0)


def test_resumed_runs_equal_uninterrupted_ones(both, device, text, tmp_path, checkpoints):
    precisions = ("fp8", high(device))
    file = str(tmp_path / "gpt.pt")
    stopped = train(device, text, tmp_path, *DROPOUT, "--checkpoint", file, "--stop-after", "5")
    resumed = train(device, text, tmp_path, *DROPOUT, "--resume", file)
    for precision in precisions:
        assert f"{precision}: stopped after step 5" in stopped.stdout
        files = (folder / f"gpt-{precision}.pt" for folder in (both[1], tmp_path))
        assert_same_training(*files, checkpoints.load)
        sample = (tmp_path / f"sample_{precision}.txt").read_bytes()
        assert sample == (both[1] / f"sample_{precision}.txt").read_bytes()
    assert "quantized linear GEMMs" in resumed.stdout


def test_current_scaling_resumes_too(run, tmp_path, checkpoints):
    flags = ["--precision", "fp8", "--recipe", "current"]
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    assert run(*flags, "--checkpoint", str(whole)) == 0
    assert run(*flags, "--checkpoint", str(parts), "--stop-after", "5") == 0
    assert run(*flags, "--resume", str(parts)) == 0
    assert_same_training(whole, parts, checkpoints.load)


def test_a_single_run_in_high_precision(run, tmp_path):
    assert run("--precision", "bf16") == 0
    (only,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["runs"]
    assert only["gemms"] == {"fp8": 0, "total": GEMMS, "expected": GEMMS, "fp8_expected": 0}
    assert math.isfinite(only["valid_loss"])


@pytest.mark.parametrize("recipe", ["block", "row", "mxfp8", "nvfp4"])
def test_other_recipes(run, tmp_path, recipe):
    """All products are quantized, but for the head of NVFP4."""
    assert run("--precision", "fp8", "--recipe", recipe) == 0
    (only,) = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["runs"]
    wanted = GEMMS - GEMMS // LINEARS if recipe == "nvfp4" else GEMMS
    assert only["gemms"] == {
        "fp8": wanted, "total": GEMMS, "expected": GEMMS, "fp8_expected": wanted,
    }  # fmt: skip
    assert only["label"] == ("NVFP4" if recipe == "nvfp4" else f"FP8 ({recipe})")


def test_checkpoint_of_another_run_is_refused(both, run):
    with pytest.raises(SystemExit, match="seed 0 -> 7"):
        run(*DROPOUT, "--resume", str(both[1] / "gpt.pt"), "--seed", "7")


DAMAGES = {
    "a flipped bit": (
        lambda data, at: data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :],
        "SHA-256",
    ),
    "a cut end": (lambda data, at: data[:at], "bytes of content"),
    "something appended": (lambda data, at: data + b"x", "bytes of content"),
    "nothing in it": (lambda data, at: b"", "is empty"),
    "another program's file": (lambda data, at: b"PK\3\4" + data[at:], "does not begin as"),
    "another kind's first line": (lambda data, at: data.replace(b"t 1,", b"t 2,", 1), "does not"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_refused(checkpoints, rng, tmp_path, damage):
    file = tmp_path / "gpt.pt"
    checkpoints.save(file, {"weight": torch.randn(64, 64), "step": 3})
    torch.testing.assert_close(checkpoints.load(file, "cpu")["step"], 3)
    assert [path.name for path in tmp_path.iterdir()] == ["gpt.pt"]
    whole = file.read_bytes()
    content = whole.index(b"\n") + 1
    break_it, said = DAMAGES[damage]
    file.write_bytes(break_it(whole, int(rng.integers(content, len(whole)))))
    with pytest.raises(SystemExit, match=f"gpt.pt .*{said}.*: --resume an undamaged copy"):
        checkpoints.load(file, "cpu")


def test_every_flipped_bit_of_the_first_line_is_noticed(checkpoints, tmp_path):
    file = tmp_path / "gpt.pt"
    checkpoints.save(file, {"step": 3})
    whole = file.read_bytes()
    for bit in range(8 * (whole.index(b"\n") + 1)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(SystemExit, match="gpt.pt"):
            checkpoints.load(file, "cpu")


def test_unreadable_checkpoint_is_refused(checkpoints, tmp_path):
    with pytest.raises(SystemExit, match="can not be read .Is a directory.: --resume"):
        checkpoints.load(tmp_path, "cpu")


def test_damaged_checkpoint_stops_the_program(both, run, tmp_path):
    file = tmp_path / "gpt.pt"
    file.write_bytes((both[1] / "gpt-fp8.pt").read_bytes()[:-100])
    with pytest.raises(SystemExit, match=f"{file} .*--resume an undamaged copy"):
        run("--precision", "fp8", *DROPOUT, "--resume", str(file))


def test_missing_checkpoint_is_refused(text, tmp_path):
    """In a process of its own: what is raised is printed, without a traceback, and status 1."""
    done = train("cpu", text, tmp_path, "--resume", str(tmp_path / "none.pt"), check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "there is no" in done.stderr and "none-fp8.pt" in done.stderr


def test_too_short_a_text_is_refused(run, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("short", encoding="utf-8")
    with pytest.raises(SystemExit, match="too few for windows of 16 bytes"):
        run(text=short)


def test_missing_text_is_refused(run, tmp_path):
    none = tmp_path / "none.txt"
    with pytest.raises(SystemExit, match=f"--text: there is no file {none}"):
        run(text=none)


def test_diverging_run_fails(run, device):
    with pytest.raises(SystemExit, match=f"^{high(device)}: a loss of steps"):
        run("--precision", high(device), "--lr", "inf")


def test_first_gradients_are_not_lost(example, device, text):
    train_gpt, textdata = example("train_gpt"), example("textdata")
    data = textdata.load(text, 32).to(device)
    # A mean over so many predictions has gradients below what FP8 holds at a scale of 1.
    config = train_gpt.Config(layers=LAYERS, hidden=32, heads=2, seq=32, batch=128, steps=STEPS,
                              lr=1e-3, warmup=0.1, final_lr=0.1, dropout=0.0, valid_windows=VALID,
                              seed=0, recipe="delayed")  # fmt: skip

    def weights_after_a_backward(**options):
        trainer = train_gpt.Trainer(config, "fp8", data)
        for recipe in (trainer.recipe, trainer.head_recipe):
            recipe.measure_first &= options.get("measure_first", True)
        named = trainer.model.layers.named_parameters()
        weights = [p for name, p in named if name.endswith("weight") and p.dim() == 2]
        trainer.gradients()
        return weights

    weights = weights_after_a_backward()
    assert len(weights) == LINEARS - 1
    assert all(p.grad.count_nonzero() > p.numel() // 2 for p in weights)
    assert not any(p.grad.any() for p in weights_after_a_backward(measure_first=False))


def make_result(report, precision, loss, fp8, total=30):
    return report.Result(
        precision=precision,
        label=precision,
        parameters=1,
        valid_loss=loss,
        tokens_per_second=1.0,
        peak_memory=1,
        gemms=report.GemmCount(fp8, total, expected=30, fp8_expected=fp8),
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
    assert "29 linear GEMMs were quantized, 30" in said(0, gemms=count(29, 30, 30, 30))
    assert "29 linear GEMMs ran, 30" in said(0, gemms=count(29, 29, 30, 29))
    assert "1 linear GEMMs were quantized, 0" in said(1, gemms=count(1, 30, 30, 0))
    assert "not finite" in said(1, valid_loss=math.nan)
    assert "not below bigram" in said(1, valid_loss=2.5)
    assert "above high precision" in said(0, valid_loss=1.6)
    assert report.problems([replace(good[0], valid_loss=2.5)], bigram=2.0, check_loss=False) == []


def test_help_shows_defaults(example, capsys):
    """Each option says its default, but for --resume, which has none."""
    train_gpt = example("train_gpt")
    with pytest.raises(SystemExit):
        train_gpt.parse(["--help"])
    options = capsys.readouterr().out.split("options:")[1]
    described = [" ".join(option.split()) for option in re.split(r"\n  (?=-)", options)[1:]]
    without = [option.split()[0] for option in described if "(default: " not in option]
    assert without == ["-h,", "--resume"]
    said = " ".join(described)
    assert "--layers N Transformer layers (default: 6, on a GPU 10)" in said
    assert "--dropout DROPOUT of attention and of what joins the residuals (default: 0.0)" in said
    assert "None" not in said
