# SPDX-License-Identifier: Apache-2.0
"""What a comparison of two training runs shows: a table, a plot, a file of figures, a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MARGIN = 0.01  # FP8 may end this much, relatively, above high precision


@dataclass
class GemmCount:
    """Matrix products of the linear layers.

    Attributes
    ----------
    fp8, total : int
        Counted by the library where it runs them: those with FP8 operands, and all.
    expected : int
        What the program asked for: one per layer and forward, two more per layer and backward.
    """

    fp8: int = 0
    total: int = 0
    expected: int = 0


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


def difference(results: Sequence[Result]) -> float | None:
    """Return FP8's relative excess in final loss over the other run, None without both."""
    fp8 = [r for r in results if r.precision == "fp8"]
    other = [r for r in results if r.precision != "fp8"]
    if not fp8 or not other:
        return None
    return fp8[0].valid_loss / other[0].valid_loss - 1.0


def table(results: Sequence[Result], bigram: float) -> str:
    """Lay the runs out side by side."""
    excess = difference(results)
    rows: list[tuple[str, list[str]]] = [
        ("", [r.label for r in results]),
        ("parameters", [f"{r.parameters:,}" for r in results]),
        ("final validation loss", [f"{r.valid_loss:.4f}" for r in results]),
        ("bigram loss, same bytes", [f"{bigram:.4f}" for _ in results]),
        ("tokens/s", [f"{r.tokens_per_second:,.0f}" for r in results]),
        ("peak memory, MiB", [f"{r.peak_memory / 2**20:,.0f}" for r in results]),
        ("FP8 of linear GEMMs", [f"{r.gemms.fp8:,} of {r.gemms.total:,}" for r in results]),
    ]
    if excess is not None:
        cells = [f"{excess:+.2%}" if r.precision == "fp8" else "-" for r in results]
        rows.insert(3, ("difference", cells))
    widths = [max(len(name) for name, _ in rows)]
    widths += [max(len(cells[i]) for _, cells in rows) for i in range(len(results))]
    rule = "  ".join("-" * width for width in widths)
    lines = []
    for name, cells in rows:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
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
        wanted = count.expected if r.precision == "fp8" else 0
        if count.fp8 != wanted:
            found.append(f"{r.label}: {count.fp8} linear GEMMs ran in FP8, {wanted} expected")
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


def _smoothed(curve: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Average a noisy curve over one hundredth of its length."""
    span = max(1, len(curve) // 100)
    chunks = [curve[i : i + span] for i in range(0, len(curve), span)]
    return (
        [chunk[-1][0] for chunk in chunks],
        [sum(loss for _, loss in chunk) / len(chunk) for chunk in chunks],
    )


def plot(path: Path, results: Sequence[Result], bigram: float, title: str) -> None:
    """Draw training and validation losses of all runs into one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=120)
    for index, r in enumerate(results):
        colour = f"C{index}"
        axes.plot(*_smoothed(r.train_curve), color=colour, alpha=0.35, label=f"{r.label}, training")
        steps, losses = zip(*r.valid_curve, strict=True)
        style = {"marker": "ox"[index % 2], "linestyle": ["-", "--"][index % 2]}
        axes.plot(steps, losses, color=colour, label=f"{r.label}, validation", **style)
    axes.axhline(bigram, color="grey", linestyle=":", label="bigram model, validation")
    highest = max(loss for r in results for _, loss in r.valid_curve)
    axes.set_ylim(top=min(highest, 1.6 * bigram) * 1.02)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, format="png")
    pyplot.close(figure)
