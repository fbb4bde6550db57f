# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documentation: drawn by a script, from formats as they are defined."""

import importlib.util
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def draw():
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("figures_draw", DOCS / "figures/draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawn(draw, tmp_path_factory):
    """A folder with the pictures as the script draws them now."""
    folder = tmp_path_factory.mktemp("drawn")
    draw.main(folder)
    return folder


def marks_of(part, texts, marks):
    """Collect what an SVG element shows: strings, and points [n, 2] of lines and areas."""
    kind = part.tag.rpartition("}")[2]
    if kind == "defs" or part.get("id", "").startswith("legend"):
        return
    if kind == "text":
        texts.append("".join(part.itertext()).strip())
    elif kind == "path":
        numbers = re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", part.get("d"))
        marks.append((part.get("style"), np.array(numbers, dtype=np.float64).reshape(-1, 2)))
    for each in part:
        marks_of(each, texts, marks)


def plots_of(path):
    """Strings and marks of each plot of a picture, these within the extent of all of the plot.

    Where the plots lie, and how large they are, is up to fonts and to matplotlib's version.
    """
    found = []
    for part in ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}g"):
        if not re.fullmatch(r"axes_\d+", part.get("id", "")):
            continue
        texts, marks = [], []
        marks_of(part, texts, marks)
        points = np.concatenate([points for _, points in marks])
        low, high = points.min(0), points.max(0)
        found.append((texts, [(style, (p - low) / (high - low)) for style, p in marks]))
    return found


def differences(one, other):
    """What two pictures do not both show."""
    one, other = plots_of(one), plots_of(other)
    if len(one) != len(other):
        return [f"{len(one)} plots, {len(other)}"]
    said = []
    for plot, ((texts, marks), (their_texts, their_marks)) in enumerate(
        zip(one, other, strict=True)
    ):
        if texts != their_texts:
            said.append(f"plot {plot}: {texts}, {their_texts}")
        if len(marks) != len(their_marks):
            said.append(f"plot {plot}: {len(marks)} marks, {len(their_marks)}")
        for (style, points), (their_style, theirs) in zip(marks, their_marks, strict=False):
            same = style == their_style and points.shape == theirs.shape
            if not same or np.abs(points - theirs).max() > 1e-3:
                said.append(f"plot {plot}: a mark of {style}, {their_style}")
    return said


@pytest.mark.parametrize("name", ["number_lines", "errors", "scale_layouts"])
def test_pictures_show_what_the_script_draws(drawn, name):
    assert differences(drawn / f"{name}.svg", DOCS / f"figures/{name}.svg") == []


def test_a_value_that_is_not_drawn_or_elsewhere_is_found(draw, drawn, tmp_path, monkeypatch):
    right, error = draw.values_of, draw.relative_error
    monkeypatch.setattr(draw, "values_of", lambda name: np.delete(right(name), 5))
    monkeypatch.setattr(draw, "relative_error", lambda *given: 1.02 * error(*given))
    draw.main(tmp_path)
    for name, changed in (("number_lines", True), ("errors", True), ("scale_layouts", False)):
        assert bool(differences(drawn / f"{name}.svg", tmp_path / f"{name}.svg")) == changed


def test_every_picture_is_drawn_kept_and_shown(draw, drawn):
    page = (DOCS / "formats_and_recipes.md").read_text(encoding="utf-8")
    kept = {path.name for path in (DOCS / "figures").glob("*.svg")}
    assert (
        kept == {path.name for path in drawn.glob("*.svg")} == {f"{n}.svg" for n in draw.PICTURES}
    )
    assert all(f"(figures/{name})" in page for name in kept)


@pytest.mark.parametrize(
    ("name", "count", "smallest", "largest"),
    [("E4M3", 127, 2.0**-9, 448.0), ("E5M2", 124, 2.0**-16, 57344.0), ("E2M1", 8, 0.5, 6.0)],
)
def test_values_of_formats(draw, name, count, smallest, largest):
    values = draw.values_of(name)
    assert (len(values), values[0], values[1], values[-1]) == (count, 0.0, smallest, largest)


@pytest.mark.parametrize(("name", "fraction"), [("E4M3", 3), ("E5M2", 2)])
def test_error_of_formats(draw, name, fraction):
    """Of evenly spread values in a binade, at half a step at most: a step is 2^-fraction of it."""
    (error,) = draw.relative_error(name, np.array([4.0]))
    step = 2.0**-fraction
    # Rounding errors spread evenly over a step, relative to values between 1 and 2 steps' units.
    low, high = step / np.sqrt(12) / 2, step / np.sqrt(12)
    assert low < error < high
    assert draw.relative_error(name, np.array([40.0])) == 1.0  # rounded to zero
