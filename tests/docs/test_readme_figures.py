# SPDX-License-Identifier: Apache-2.0
"""Figures of README.md and of pages of docs are those that benchmarks/RESULTS.md keeps."""

import re

import pytest
from markdown_pages import ROOT

RESULTS = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
BY_GPU = (ROOT / "docs/recipes_by_gpu.md").read_text(encoding="utf-8")


def section(start):
    """Lines of the first section whose heading begins so, up to the next one of any level."""
    heading = re.search(rf"^#+ {re.escape(start)}.*$", RESULTS, re.MULTILINE)
    assert heading, start
    return re.split(r"^#+ ", RESULTS[heading.end() :], maxsplit=1, flags=re.MULTILINE)[0]


def cells(text, *first):
    """Cells of the row of a Markdown table that begins with these."""
    for line in text.splitlines():
        row = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and row[: len(first)] == list(first):
            return row[len(first) :]
    raise AssertionError(f"no row {first}")


def shown(text, *first):
    """Numbers of a row."""
    row = cells(text, *first)
    return [float(re.sub(r"[^\d.]", "", cell)) for cell in row if re.search(r"\d", cell)]


def rounded(values, digits):
    return [round(float(value), digits) for value in values]


def linear(name, size):
    """Sustained ms of a linear layer's modes: the first tables of that size, in plain text."""
    found = {}
    for line in section(name).splitlines():
        if line.startswith(size):
            mode, _, sustained = line[len(size) :].split()[:3]
            found[mode] = sustained
    return [found[mode] for mode in ("torch.nn.Linear", "delayed", "current")]


def test_host_time():
    table = section("Host time per layer")
    modes = ("torch.nn.Linear", "te.Linear, FP8 delayed", "te.Linear, FP8 current")
    steps = [cells(table, mode)[2] for mode in modes]
    row = "host time of one of 12 layers of 256 features, 64 tokens, forward + backward"
    assert shown(README, row) == rounded(steps, 0)


def test_linear_layers():
    row = "2048 tokens, 4096 x 4096, forward + backward"
    kept = linear("One linear layer, forward + backward", "2048 x 4096 x 4096 ")
    assert shown(README, row) == rounded(kept, 3)
    kept = linear("One linear layer by recipe", "8192 x 4096 x 16384 ")
    assert shown(README, "8192 tokens, 4096 x 16384") == rounded(kept, 2)


@pytest.mark.parametrize(("row", "model"), [
    ("124 M parameters, 8 x 1024 tokens", "124M h768 L12 s1024 b8"),
    ("1.3 B parameters, 4 x 2048 tokens", "1.3B h2048 L24 s2048 b4"),
])  # fmt: skip
def test_training_steps(row, model):
    table = section("Whole training steps")
    programs = ("torch", "torch.compile", "bf16", "delayed")
    ours = [cells(table, model, program)[0] for program in programs]
    incumbent = cells(table, model, "delayed")[3]
    assert shown(README, row) == rounded([*ours, incumbent], 1)


@pytest.mark.parametrize(("recipe", "name"), [
    ("bf16", "bf16"),
    ("`DelayedScaling`", "delayed"),
    ("`Float8CurrentScaling`", "current"),
    ("`Float8RowScaling`", "row"),
    ("`Float8BlockScaling`", "block"),
])  # fmt: skip
def test_recipes_by_gpu(recipe, name):
    layer = cells(section("Quick-start layer"), name, "0.0")
    ms, peak = layer[0].split("/")[1], layer[2].split("/")[1]
    _, *row = cells(BY_GPU, recipe)
    assert [float(row[0]), float(row[1])] == [float(ms), float(peak)]
    if row[2] != "-":
        step = cells(section("Whole training steps"), "1.3B h2048 L24 s2048 b4", name)
        assert [row[2], row[3]] == [step[0], step[2]]


def test_losses_by_gpu():
    page = (ROOT / "docs/formats_and_recipes.md").read_text(encoding="utf-8")
    names = {"Delayed": "delayed", "Float8Current": "current", "Float8Row": "row"}
    names |= {"Float8Block": "block", "MXFP8Block": "mxfp8", "NVFP4Block": "nvfp4"}
    for recipe, name in names.items():
        assert cells(BY_GPU, f"`{recipe}Scaling`")[-1] == cells(page, name)[2]
