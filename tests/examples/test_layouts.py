# SPDX-License-Identifier: Apache-2.0
"""The GPT example over several ranks: every layout trains the same, and goes on from any other."""

import json
import math
import os
import random
import shutil
import subprocess
import sys

import example_ranks as programs
import pytest
import torch
from comparators import assert_bits
from pytorch.ranks import FOUR, GROUPS, Ranks
from tols import E5M2, F32, tol

import transformer_engine.pytorch as te

BEGUN, STEPS = 3, 8  # no validation stands between the last step and the checkpoint
LAYOUTS = {  # of two ranks and of four
    "dp": ({"dp": 2}, {"dp": 4}), "fsdp": ({"fsdp": 2}, {"dp": 2, "fsdp": 2}),
    "tp": ({"tp": 2}, {"fsdp": 2, "tp": 2}), "cp": ({"cp": 2}, {"cp": 2, "tp": 2}),
}  # fmt: skip
TWO = [group for group in GROUPS if group.values[0][1] == 2]
SLOW = pytest.param(("cpu", 4), id="gloo-4", marks=pytest.mark.nightly)


def options(layout, ranks):
    """A layout of so many ranks as the example prints it, and its arguments."""
    sizes = LAYOUTS[layout][ranks.size == 4].items()
    said = " x ".join(f"{name} {size}" for name, size in sizes)
    return said, [word for name, size in sizes for word in (f"--{name}", str(size))]


@pytest.fixture(scope="module", params=[*TWO, SLOW, *FOUR[1:]])
def ranks(request):
    group = Ranks(*request.param)
    yield group
    group.close()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Write a text of random words, 8000 bytes long."""
    words = ["def", "return", "self", "import", "for", "in", "=", "(", ")", ":\n"]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(random.choices(words, k=3000))[:8000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def flags(text):
    """Function of a folder for results and more flags: the command line of a tiny run."""
    sizes = {"layers": 2, "hidden": 32, "heads": 2, "seq": 16, "batch": 4, "steps": STEPS,
             "valid-windows": 8, "sample": 4}  # fmt: skip
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    words += ["--no-check", "--text", str(text)]
    return lambda out, *more: [*words, "--out", str(out), *map(str, more)]


@pytest.fixture(scope="module")
def begun(ranks, flags, tmp_path_factory):
    """Ranks that share parameters stop early: the folder with their checkpoint."""
    out = tmp_path_factory.mktemp("begun")
    more = ["--precision", "fp32", "--checkpoint", out / "gpt", "--stop-after", BEGUN]
    results = finish(ranks.run(programs.train, flags(out, *options("fsdp", ranks)[1], *more)))
    assert f"fp32: stopped after step {BEGUN}" in results
    return out / "gpt"


@pytest.fixture(scope="module")
def alone(ranks, begun, flags, tmp_path_factory):
    """One process goes on from that: its results."""
    out = tmp_path_factory.mktemp("alone")
    te.reset()
    own = flags(out, "--precision", "fp32", "--resume", begun, "--checkpoint", out / "gpt.pt")
    finish([programs.train(ranks.device, own)])
    return out


def finish(results):
    """Every rank has ended well, and the first alone has printed, what is returned."""
    assert [status for status, _ in results] == [0] * len(results), results
    assert not any(said for _, said in results[1:])
    return results[0][1]


def figures(out):
    """What the only run of a training has written."""
    (run,) = json.loads((out / "results.json").read_text(encoding="utf-8"))["runs"]
    return run


def model_in(out, precision):
    """The tensors of a trained model."""
    (file,) = out.glob(f"model_{precision}.pt")
    return programs.example("checkpoints").load(file, "cpu")["model"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_as_one_process(ranks, layout, begun, alone, flags, tmp_path):
    """From one checkpoint: losses within roundings, and a checkpoint that one process reads."""
    shutil.copytree(begun, tmp_path / "gpt")
    name, sizes = options(layout, ranks)
    more = [*sizes, "--precision", "fp32", "--resume", tmp_path / "gpt"]
    results = ranks.run(programs.train, flags(tmp_path, *more))
    if "cp" in LAYOUTS[layout][0] and ranks.device == "cuda":  # test_context_parallel has 16 bits
        assert all("does not run this call: fp32" in status for status, _ in results)
        return
    said = finish(results)
    assert f"layout: {name}" in said
    found, wanted = figures(tmp_path), figures(alone)
    assert found["parameters"] == wanted["parameters"]
    # Every loss is made by forwards and steps that round as a layer does.
    bound = STEPS * math.sqrt(tol("layer", F32))
    for name in ("train_curve", "valid_curve"):
        torch.testing.assert_close(
            torch.tensor(found[name]), torch.tensor(wanted[name]), rtol=bound, atol=0
        )
    te.reset()
    own = flags(tmp_path, "--precision", "fp32", "--device", ranks.device)
    model, moments, step = programs.read(own, tmp_path / "gpt")
    assert step == STEPS and all(moment.any() for moment in moments)
    written = model_in(tmp_path, "fp32")
    assert model.keys() == written.keys()
    for name, tensor in model.items():
        assert_bits(tensor, written[name])


def test_a_resumed_run_in_fp8_has_the_bits_of_an_uninterrupted_one(ranks, flags, tmp_path):
    """Dropouts and scales included."""
    more = [*options("fsdp", ranks)[1], "--precision", "fp8", "--dropout", "0.1"]
    finish(ranks.run(programs.train, flags(tmp_path / "whole", *more)))
    parts = flags(tmp_path / "parts", *more, "--checkpoint", tmp_path / "gpt")
    finish(ranks.run(programs.train, [*parts, "--stop-after", str(BEGUN)]))
    finish(ranks.run(programs.train, [*parts, "--resume", str(tmp_path / "gpt")]))
    whole, parts = (model_in(tmp_path / name, "fp8") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() and any("_extra_state" in name for name in whole)
    if ranks.device == "cpu":  # a GPU sums in another order each time
        for name, tensor in whole.items():
            assert_bits(parts[name], tensor)
    runs = [figures(tmp_path / name) for name in ("whole", "parts")]
    assert runs[0]["gemms"] == runs[1]["gemms"]
    assert runs[0]["gemms"]["fp8"] == runs[0]["gemms"]["fp8_expected"]


def test_fp8_goes_on_in_another_layout(ranks, flags, tmp_path):
    """Parts of layers become copies: scales come along, and losses stay those of the old layout.

    Gradients are cast by other scales, which may change a step by what rounds them: so losses
    differ by that share of how far they have come.
    """
    fp8 = ["--precision", "fp8"]
    parts = flags(
        tmp_path / "parts", *options("tp", ranks)[1], *fp8, "--checkpoint", tmp_path / "gpt"
    )
    finish(ranks.run(programs.train, [*parts, "--stop-after", str(BEGUN)]))
    shutil.copytree(tmp_path / "gpt", tmp_path / "copied")
    finish(ranks.run(programs.train, [*parts, "--resume", str(tmp_path / "gpt")]))
    copies = [*options("dp", ranks)[1], *fp8, "--resume", tmp_path / "copied"]
    finish(ranks.run(programs.train, flags(tmp_path / "copies", *copies)))
    found, wanted = (figures(tmp_path / name) for name in ("copies", "parts"))
    for name in ("train_curve", "valid_curve"):
        mine, theirs = torch.tensor(found[name]), torch.tensor(wanted[name])
        came = theirs[0, 1] - theirs[:, 1].min()
        bound = math.sqrt(tol("round", E5M2)) * came.item()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=bound)
        assert torch.equal(mine[: BEGUN // 2], theirs[: BEGUN // 2])


REFUSED = {
    "sizes": (["--dp", "3"], "--dp 3 x --fsdp 1 x --cp 1 x --tp 1 are not {n} processes"),
    "windows": (["--batch", "5"], "5 windows are no {n} equal parts: give --batch"),
    "file": (["--resume", __file__], "is a file of a run without torchrun"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_can_not_be_shared_is_refused(ranks, what, flags, tmp_path):
    more, message = REFUSED[what]
    for status, _ in ranks.run(programs.train, flags(tmp_path, "--precision", "fp32", *more)):
        assert status.startswith("SystemExit") and message.format(n=ranks.size) in status


@pytest.mark.nightly
def test_torchrun(flags, tmp_path):
    """The command line of the example, from the start of the processes to their end."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    file = programs.EXAMPLES / "train_gpt.py"
    done = subprocess.run(
        [sys.executable, *launch, file, *flags(tmp_path), "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "layout: dp 2" in done.stdout and done.stdout.count("final validation loss") == 1
