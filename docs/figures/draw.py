# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of docs/formats_and_recipes.md and docs/distributed.md beside this file.

    python docs/figures/draw.py [FOLDER]

Values and errors come from the formats' definitions in ml_dtypes, not from the library.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import ml_dtypes
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

FORMATS = {
    "E4M3": ml_dtypes.float8_e4m3fn,
    "E5M2": ml_dtypes.float8_e5m2,
    "E2M1": ml_dtypes.float4_e2m1fn,
}
COLORS = {"E4M3": "#1b6ca8", "E5M2": "#c8553d", "E2M1": "#588157"}
STYLE = {
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "transformer_engine",
    "path.simplify": False,  # which points it leaves out depends on the layout
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def values_of(name: str) -> np.ndarray:
    """All finite values of a format that are not negative, in order, as float64."""
    bits = 4 if name == "E2M1" else 8
    codes = np.arange(1 << (bits - 1), dtype=np.uint8)
    values = codes.view(FORMATS[name]).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def cast(values: np.ndarray, name: str) -> np.ndarray:
    """Round to a format, and saturate where it ends; float64."""
    largest = values_of(name)[-1]
    rounded = np.clip(values, -largest, largest).astype(np.float32).astype(FORMATS[name])
    return rounded.astype(np.float64)


def relative_error(name: str, below: np.ndarray, samples: int = 4096) -> np.ndarray:
    """Root mean square of the relative error of values that lie `below` binades under the amax.

    The scale takes the amax to the largest value of the format. The values are drawn evenly from a
    binade; the same for every format.
    """
    draw = np.random.default_rng(0).uniform(1.0, 2.0, samples) / 2.0
    exact = values_of(name)[-1] * draw * 2.0 ** -below[:, None]
    return np.sqrt(np.mean((cast(exact, name) / exact - 1.0) ** 2, axis=1))


def number_lines() -> plt.Figure:
    """Every value of each format, over its range and near 0."""
    figure, (wide, near) = plt.subplots(2, 1, figsize=(8.0, 4.2), layout="constrained")
    for row, name in enumerate(reversed(FORMATS)):
        values = values_of(name)
        positive = values[values > 0]
        for axes, shown in ((wide, positive), (near, values[values <= 2.0**-5])):
            axes.vlines(shown, row - 0.3, row + 0.3, color=COLORS[name], linewidth=0.6)
        wide.annotate(f"{values[-1]:g}", (values[-1], row), (4, -3), textcoords="offset points")
    names = list(reversed(FORMATS))
    for axes in (wide, near):
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.6, len(names) - 0.4)
        axes.tick_params(left=False)
        axes.spines["left"].set_visible(False)
    wide.set_xscale("log", base=2)
    wide.set_xlim(2.0**-17, 2.0**18)
    wide.set_title("all positive values (logarithmic)", loc="left")
    near.set_xlim(-0.0002, 2.0**-5 + 0.0005)
    near.set_title("from 0 to 1/32 (linear)", loc="left")
    return figure


def errors() -> plt.Figure:
    """What rounding costs, by how far a value lies under the amax that its scale was made of."""
    figure, axes = plt.subplots(figsize=(8.0, 3.6), layout="constrained")
    below = np.arange(0.0, 36.0, 0.25)
    for name in FORMATS:
        axes.plot(below, relative_error(name, below), color=COLORS[name], label=name)
    axes.set_yscale("log", base=2)
    axes.set_xlim(0, 35)
    axes.set_ylim(2.0**-7, 1.3)
    axes.set_xlabel("binades under the largest magnitude of those that share the scale")
    axes.set_ylabel("relative error (root mean square)")
    axes.axhline(1.0, color="0.7", linewidth=0.6)
    axes.annotate("rounded to 0", (34.5, 1.0), (0, 3), textcoords="offset points", ha="right")
    axes.legend(frameon=False, loc="lower right")
    return figure


def _shade(axes: plt.Axes, tile: tuple[int, int], title: str, shape: tuple[int, int]) -> None:
    """A matrix of `shape`, in tiles that share a scale."""
    rows, columns = shape
    shades = ("#dbe9f4", "#a9cbe6", "#f6d8cf", "#eeb6a5")
    for r in range(0, rows, tile[0]):
        for c in range(0, columns, tile[1]):
            shade = shades[(r // tile[0]) % 2 * 2 + (c // tile[1]) % 2]
            size = min(tile[1], columns - c), min(tile[0], rows - r)
            axes.add_patch(Rectangle((c, r), *size, facecolor=shade, edgecolor="none"))
    axes.add_patch(Rectangle((0, 0), columns, rows, fill=False, edgecolor="0.3", linewidth=0.8))
    axes.set_xlim(-0.02 * columns, 1.02 * columns)
    axes.set_ylim(1.02 * rows, -0.02 * rows)
    axes.set_axis_off()
    axes.set_title(title, fontsize=8)


def scale_layouts() -> plt.Figure:
    """Which elements share a scale under each recipe."""
    figure, axes = plt.subplots(2, 3, figsize=(8.0, 4.6), layout="constrained")
    kinds = (
        ((256, 384), "delayed, current:\none scale of the tensor", (256, 384)),
        ((1, 24), "rows: one of each row\n(16 x 24 elements shown)", (16, 24)),
        ((1, 128), "blocks, inputs and gradients:\n1 x 128 (8 rows x 384 shown)", (8, 384)),
        ((128, 128), "blocks, weights:\n128 x 128", (256, 384)),
        ((1, 32), "MXFP8:\n1 x 32 (16 x 96 shown)", (16, 96)),
        ((1, 16), "NVFP4: 1 x 16 (16 x 48 shown),\nand one of the tensor", (16, 48)),
    )
    for place, (tile, title, shape) in zip(axes.flat, kinds, strict=True):
        _shade(place, tile, title, shape)
    return figure


COMPUTES, SENDS, MAY_OVERLAP = "#dbe9f4", "#eeb6a5", "#f6d8cf"
PASSES = {
    "forward": (
        ("norm,\ncast", 0.8, ""), ("cast\nweight", 1.0, "gather codes?"), ("qkv", 1.2, ""),
        ("attention", 1.4, ""), ("proj", 1.0, ""), ("", 1.0, "reduce-scatter?"),
        ("norm,\ncast", 0.8, ""), ("cast\nweight", 1.0, "gather codes?"), ("fc1", 1.4, ""),
        ("act,\ncast", 0.8, ""), ("fc2", 1.4, ""), ("", 1.0, "reduce-scatter?"),
    ),
    "backward": (
        ("cast", 0.6, ""), ("", 1.0, "gather codes?"), ("fc2\nwgrad", 1.0, ""),
        ("fc2\ndgrad", 1.0, ""), ("act,\ncast", 0.8, ""), ("fc1\ndgrad", 1.2, "gather saved"),
        ("fc1\nwgrad", 1.2, "reduce-scatter"), ("norm,\ncast", 0.8, ""), ("", 1.0, "gather codes?"),
        ("proj\nwgrad", 0.9, ""), ("proj\ndgrad", 0.9, ""), ("attention", 1.4, ""),
        ("qkv\ndgrad", 1.2, "gather saved"), ("qkv\nwgrad", 1.2, "reduce-scatter"),
        ("norm", 0.6, ""),
    ),
}  # fmt: skip
"""Steps of a layer in their order: what a rank computes, how wide it is drawn, and what is sent
meanwhile. A "?" behind that: it may travel beside the GEMM that is next to it, in pieces."""


def collectives() -> plt.Figure:
    """Collectives of a Transformer layer under tensor and sequence parallelism, over time."""
    figure, places = plt.subplots(2, 1, figsize=(9.6, 3.6), layout="constrained")
    for axes, (name, steps) in zip(places, PASSES.items(), strict=True):
        left = 0.0
        for computes, width, sent in steps:
            color = MAY_OVERLAP if sent.endswith("?") else SENDS
            for text, y, shade in ((computes, 1.1, COMPUTES), (sent.rstrip("?"), 0.0, color)):
                if text:
                    box = Rectangle((left, y), width, 1.0, facecolor=shade, edgecolor="0.4")
                    axes.add_patch(box)
                    lines = text.replace(" ", "\n").replace("-", "-\n")
                    axes.annotate(
                        lines, (left + width / 2, y + 0.5), ha="center", va="center", fontsize=6.5
                    )
            left += width
        axes.set_xlim(0.0, left)
        axes.set_ylim(-0.05, 2.15)
        axes.set_yticks((0.5, 1.6), ("travels", "computes"))
        axes.set_xticks(())
        axes.tick_params(left=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_title(f"{name}, one rank, from left to right", loc="left")
    return figure


PICTURES: dict[str, Callable[[], plt.Figure]] = {
    "number_lines": number_lines,
    "errors": errors,
    "scale_layouts": scale_layouts,
    "collectives": collectives,
}


def main(folder: Path) -> None:
    """Draw all pictures into a folder, as SVG."""
    with plt.rc_context(STYLE):
        for name, draw in PICTURES.items():
            figure = draw()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
            print(folder / f"{name}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
