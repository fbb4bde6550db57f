# SPDX-License-Identifier: Apache-2.0
"""Output of a comparison of two training runs: a table, a plot, a file of figures, a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Curve = Sequence[tuple[int, float]]  # steps and losses

MARGIN = 0.01  # FP8 may end this much, relatively, above high precision


@dataclass
class GemmCount:
    """Matrix products of the linear layers.

    Attributes
    ----------
    fp8, total : int
        Counted by the library where it runs them: those with quantized operands (FP8, and what is
        multiplied out from MXFP8 or NVFP4), and all.
    expected, fp8_expected : int
        What the program asked for: one per layer and forward, two more per layer and backward.
    """

    fp8: int = 0
    total: int = 0
    expected: int = 0
    fp8_expected: int = 0


@dataclass
class Result:
    """One finished run.

    Attributes
    ----------
    precision : str
        ``"fp8"``, ``"fp32"`` or ``"bf16"``.
    label : str
        The column's title.
    parameters : int
        Number of trained values.
    valid_loss : float
        Final validation loss in nats per byte.
    tokens_per_second : float
        Bytes predicted per second while training.
    peak_memory : int
        Bytes: of the device's allocator on a GPU, of the whole process on a CPU.
    gemms : GemmCount
        How many matrix products ran, and how many of them in FP8.
    train_curve, valid_curve : list of (int, float)
        Step and loss.
    sample : str
        Text the trained model wrote.
    """

    precision: str
    label: str
    parameters: int
    valid_loss: float
    tokens_per_second: float
    peak_memory: int
    gemms: GemmCount
    train_curve: list[tuple[int, float]]
    valid_curve: list[tuple[int, float]]
    sample: str


def _pair(results: Sequence[Result]) -> tuple[Result, Result] | None:
    """Return the FP8 run and the other one, None without both."""
    fp8 = [r for r in results if r.precision == "fp8"]
    other = [r for r in results if r.precision != "fp8"]
    return (fp8[0], other[0]) if fp8 and other else None


def difference(results: Sequence[Result]) -> float | None:
    """Return FP8's relative excess in final loss over the other run, None without both."""
    pair = _pair(results)
    return None if pair is None else pair[0].valid_loss / pair[1].valid_loss - 1.0


def table(results: Sequence[Result], bigram: float) -> str:
    """Lay the runs out side by side: their validation curves, and what else was measured."""
    rows: list[tuple[str, list[str]]] = []
    pair = _pair(results)

    def add_losses(name: str, loss_of: Callable[[Result], float]) -> None:
        cells = [f"{loss_of(r):.4f}" for r in results]
        if pair is not None:
            cells.append(f"{loss_of(pair[0]) / loss_of(pair[1]) - 1.0:+.2%}")
        rows.append((name, cells))

    def add(name: str, cells: list[str]) -> None:
        rows.append((name, cells if pair is None else [*cells, ""]))

    for index, (step, _) in enumerate(results[0].valid_curve[:-1]):
        add_losses(f"validation loss, step {step}", lambda r, i=index: r.valid_curve[i][1])
    add_losses("final validation loss", lambda r: r.valid_loss)
    add_losses("training loss, last tenth", _last_tenth)
    add("bigram loss, same bytes", [f"{bigram:.4f}" for _ in results])
    add("parameters", [f"{r.parameters:,}" for r in results])
    add("tokens/s", [f"{r.tokens_per_second:,.0f}" for r in results])
    add("peak memory, MiB", [f"{r.peak_memory / 2**20:,.0f}" for r in results])
    add("quantized linear GEMMs", [f"{r.gemms.fp8:,} of {r.gemms.total:,}" for r in results])
    titles = [r.label for r in results]
    return _columns(titles if pair is None else [*titles, "difference"], rows)


def _last_tenth(result: Result) -> float:
    tail = result.train_curve[-max(1, len(result.train_curve) // 10) :]
    return sum(loss for _, loss in tail) / len(tail)


def _columns(titles: list[str], rows: list[tuple[str, list[str]]]) -> str:
    """Align a table: names to the left, cells to the right."""
    rows = [("", titles), *rows]
    widths = [max(len(name) for name, _ in rows)]
    widths += [max(len(cells[i]) for _, cells in rows) for i in range(len(titles))]
    lines = []
    for name, cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:]])


def problems(results: Sequence[Result], bigram: float, check_loss: bool = True) -> list[str]:
    """List what makes the comparison a failure; empty when all is well.

    Parameters
    ----------
    results : sequence of Result
        The runs.
    bigram : float
        Loss of the bigram model on the same validation bytes.
    check_loss : bool
        Also ask that every run beats the bigram model and that FP8 ends within `MARGIN` of the
        other run, which only a long enough training can.
    """
    found = []
    for r in results:
        count = r.gemms
        if count.total != count.expected:
            found.append(f"{r.label}: {count.total} linear GEMMs ran, {count.expected} expected")
        if count.fp8 != count.fp8_expected:
            found.append(
                f"{r.label}: {count.fp8} linear GEMMs were quantized, {count.fp8_expected} expected"
            )
        losses = [loss for _, loss in r.train_curve + r.valid_curve] + [r.valid_loss]
        if not all(math.isfinite(loss) for loss in losses):
            found.append(f"{r.label}: a loss is not finite")
        elif check_loss and r.valid_loss >= bigram:
            found.append(f"{r.label}: loss {r.valid_loss:.4f} is not below bigram {bigram:.4f}")
    excess = difference(results)
    if check_loss and excess is not None and excess > MARGIN:
        found.append(f"FP8 ends {excess:+.2%} above high precision, more than {MARGIN:.0%}")
    return found


def write_json(path: Path, results: Sequence[Result], bigram: float) -> None:
    """Write every figure of the report."""
    figures = {
        "bigram_loss": bigram,
        "difference": difference(results),
        "runs": [asdict(r) for r in results],
    }
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def _smoothed(curve: Curve) -> Curve:
    """Average a noisy curve over one hundredth of its length."""
    span = max(1, len(curve) // 100)
    chunks = [curve[i : i + span] for i in range(0, len(curve), span)]
    return [(chunk[-1][0], sum(loss for _, loss in chunk) / len(chunk)) for chunk in chunks]


def plot(path: Path, results: Sequence[Result], bigram: float, title: str) -> None:
    """Draw the losses of all runs, and FP8's excess over the other below them, into one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pair = _pair(results)
    heights = [5] if pair is None else [5, 2]
    figure, grid = pyplot.subplots(
        len(heights), figsize=(8, sum(heights)), dpi=120, sharex=True, squeeze=False,
        height_ratios=heights,
    )  # fmt: skip
    axes = grid[0, 0]
    for index, r in enumerate(results):
        colour = f"C{index}"
        steps, losses = zip(*_smoothed(r.train_curve), strict=True)
        axes.plot(steps, losses, color=colour, alpha=0.35, label=f"{r.label}, training")
        steps, losses = zip(*r.valid_curve, strict=True)
        style = {"marker": "ox"[index % 2], "linestyle": ["-", "--"][index % 2]}
        axes.plot(steps, losses, color=colour, label=f"{r.label}, validation", **style)
    axes.axhline(bigram, color="grey", linestyle=":", label="bigram model, validation")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title(title)
    axes.legend()
    if pair is not None:
        _plot_difference(grid[1, 0], *pair)
    for panel in grid[:, 0]:
        panel.grid(alpha=0.3)
    grid[-1, 0].set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, format="png")
    pyplot.close(figure)


def _plot_difference(axes: Any, fp8: Result, high: Result) -> None:
    """Draw FP8's relative excess at every point of the curves."""

    def draw(ours: Curve, theirs: Curve, **style: Any) -> None:
        pairs = zip(ours, theirs, strict=True)
        steps, excess = zip(*((s, 100.0 * (a / b - 1.0)) for (s, a), (_, b) in pairs), strict=True)
        axes.plot(steps, excess, color="C3", **style)

    draw(_smoothed(fp8.train_curve), _smoothed(high.train_curve), alpha=0.35, label="training")
    draw(fp8.valid_curve, high.valid_curve, marker="o", label="validation")
    for bound in (-MARGIN, MARGIN):
        axes.axhline(100.0 * bound, color="grey", linestyle=":")
    axes.set_ylabel(f"{fp8.label}\nover {high.label}, %")
    axes.legend()
