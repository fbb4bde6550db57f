# SPDX-License-Identifier: Apache-2.0
"""Draw and tabulate the runs that docs/convergence/run.py has left beside this file.

    python docs/convergence/plot.py [FOLDER]

Prints a table in Markdown and writes curves.svg; where there are runs of bf16, differences.svg too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

BASE = "bf16"
MARGIN = 0.005  # a recipe may end this much, relatively, above `BASE`


def read(folder: Path) -> dict[str, dict[int, dict]]:
    """Runs by recipe and seed; ValueError where two of them do not compare."""
    runs: dict[str, dict[int, dict]] = {}
    for file in sorted(folder.glob("*-*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        runs.setdefault(run["recipe"], {})[run["seed"]] = run
    configs = {
        json.dumps({k: v for k, v in run["config"].items() if k not in ("seed", "recipe")})
        for seeds in runs.values()
        for run in seeds.values()
    }
    if len(configs) > 1:
        raise ValueError(f"runs of {len(configs)} configurations in {folder}")
    return runs


def excess(runs: dict[str, dict[int, dict]], recipe: str) -> float | None:
    """Relative excess of a recipe's final loss over that of `BASE`: the mean over common seeds."""
    seeds = sorted(runs[recipe].keys() & runs.get(BASE, {}).keys())
    if not seeds:
        return None
    of = [mean(runs[name][seed]["valid_loss"] for seed in seeds) for name in (recipe, BASE)]
    return of[0] / of[1] - 1.0


def table(runs: dict[str, dict[int, dict]]) -> str:
    """Final losses, in Markdown."""
    lines = ["| recipe | seeds | final validation loss | against bf16 | quantized GEMMs |"]
    lines.append("|---|---|---|---|---|")
    for recipe, seeds in sorted(runs.items(), key=lambda item: item[0] != BASE):
        losses = ", ".join(f"{seeds[seed]['valid_loss']:.4f}" for seed in sorted(seeds))
        more = excess(runs, recipe)
        some = next(iter(seeds.values()))
        counted = f"{some['fp8_gemms']:,} of {some['gemms']:,}"
        named = ", ".join(map(str, sorted(seeds)))
        against = "" if recipe == BASE or more is None else f"{more:+.2%}"
        lines.append(f"| {recipe} | {named} | {losses} | {against} | {counted} |")
    return "\n".join(lines)


def steps_of(run: dict) -> list[float]:
    """Last step of each mean of the training loss."""
    each = run["config"]["steps"] / len(run["train_means"])
    return [each * (i + 1) for i in range(len(run["train_means"]))]


def drawn(file: Path, draw: Callable[..., None], titles: tuple[str, str]) -> None:
    """Two plots side by side: of training and of validation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": "transformer_engine", "font.size": 9}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
        draw(left, right)
        for axes, title in zip((left, right), titles, strict=True):
            axes.set_title(title, loc="left")
            axes.set_xlabel("step")
        handles = left.get_legend_handles_labels()
        figure.legend(*handles, loc="outside right center", frameon=False)
        figure.savefig(file, metadata={"Date": None})
        plt.close(figure)


def plot(runs: dict[str, dict[int, dict]], file: Path) -> None:
    """Training and validation curves: thin lines are seeds."""

    def draw(left: Any, right: Any) -> None:
        for number, (recipe, seeds) in enumerate(runs.items()):
            for place, run in enumerate(seeds.values()):
                label = recipe if place == 0 else None
                line = {"color": f"C{number}", "linewidth": 0.9, "label": label}
                left.plot(steps_of(run), run["train_means"], **line)
                right.plot(*zip(*run["valid_curve"][1:], strict=True), marker=".", **line)
        for axes in (left, right):
            axes.set_yscale("log")

    drawn(file, draw, ("training loss", "validation loss"))


def over(values: list[list[float]], base: list[list[float]]) -> list[float]:
    """Percent by which curves lie above others, on average."""
    ratios = [
        [v / b for v, b in zip(*pair, strict=True)] for pair in zip(values, base, strict=True)
    ]
    return [100.0 * (mean(ratio) - 1.0) for ratio in zip(*ratios, strict=True)]


def spread(curves: list[list[float]]) -> list[float]:
    """Percent from the mean of curves to the one that is farthest from it."""
    return [
        100.0 * max(abs(v / mean(each) - 1.0) for v in each) for each in zip(*curves, strict=True)
    ]


def plot_differences(runs: dict[str, dict[int, dict]], file: Path) -> None:
    """How far each recipe lies above `BASE` of the same seeds, and how far seeds of that differ."""

    def curves(seeds: dict[int, dict], common: list[int], key: str) -> list[list[float]]:
        if key == "train_means":
            return [seeds[seed][key] for seed in common]
        return [[loss for _, loss in seeds[seed][key][1:]] for seed in common]

    def draw(left: Any, right: Any) -> None:
        base = runs[BASE]
        first = next(iter(base.values()))
        places = {"train_means": steps_of(first)}
        places["valid_curve"] = [step for step, _ in first["valid_curve"][1:]]
        for axes, (key, at) in zip((left, right), places.items(), strict=True):
            band = spread(curves(base, sorted(base), key))
            below = [-percent for percent in band]
            axes.fill_between(at, below, band, color="0.9", label=f"seeds of {BASE}")
            axes.axhline(0.0, color="0.4", linewidth=0.8)
            for number, (recipe, seeds) in enumerate(runs.items()):
                common = sorted(seeds.keys() & base.keys())
                if recipe == BASE or not common:
                    continue
                found = over(curves(seeds, common, key), curves(base, common, key))
                line = {"color": f"C{number}", "linewidth": 1.0, "label": recipe}
                axes.plot(at, found, marker="." if key == "valid_curve" else "", **line)
            axes.set_ylabel("percent")

    titles = (f"training loss above {BASE}", f"validation loss above {BASE}")
    drawn(file, draw, titles)


def main(folder: Path) -> int:
    """Draw, print; 1 where a recipe ends further above `BASE` than `MARGIN`."""
    runs = read(folder)
    plot(runs, folder / "curves.svg")
    if BASE in runs:
        plot_differences(runs, folder / "differences.svg")
    print(table(runs))
    above = {recipe: excess(runs, recipe) for recipe in runs}
    far = [recipe for recipe, more in above.items() if more is not None and more > MARGIN]
    for recipe in far:
        print(f"{recipe} ends {above[recipe]:.2%} above {BASE}", file=sys.stderr)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
