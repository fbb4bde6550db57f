# SPDX-License-Identifier: Apache-2.0
"""The pictures of the documentation: drawn by a script, from formats as they are defined."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from pictures import differences

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


@pytest.mark.parametrize("name", ["number_lines", "errors", "scale_layouts", "collectives"])
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
    pages = ("formats_and_recipes.md", "distributed.md")
    page = "".join((DOCS / name).read_text(encoding="utf-8") for name in pages)
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
