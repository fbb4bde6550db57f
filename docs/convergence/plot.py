# SPDX-License-Identifier: Apache-2.0
"""Draw and tabulate the runs that docs/convergence/run.py has left beside this file.

    python docs/convergence/plot.py [FOLDER]

Prints a table in Markdown and writes curves.svg.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

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


def plot(runs: dict[str, dict[int, dict]], file: Path) -> None:
    """Training and validation curves: thin lines are seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": "transformer_engine", "font.size": 9}
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.0, 3.6), layout="constrained")
        for number, (recipe, seeds) in enumerate(runs.items()):
            for place, run in enumerate(seeds.values()):
                label = recipe if place == 0 else None
                steps = run["config"]["steps"] / len(run["train_means"])
                at = [steps * (i + 1) for i in range(len(run["train_means"]))]
                line = {"color": f"C{number}", "linewidth": 0.9, "label": label}
                left.plot(at, run["train_means"], **line)
                right.plot(*zip(*run["valid_curve"][1:], strict=True), marker=".", **line)
        for axes, title in ((left, "training loss"), (right, "validation loss")):
            axes.set_title(title, loc="left")
            axes.set_xlabel("step")
            axes.set_yscale("log")
            axes.legend(frameon=False)
        figure.savefig(file, metadata={"Date": None})
        plt.close(figure)


def main(folder: Path) -> int:
    """Draw, print; 1 where a recipe ends further above `BASE` than `MARGIN`."""
    runs = read(folder)
    plot(runs, folder / "curves.svg")
    print(table(runs))
    above = {recipe: excess(runs, recipe) for recipe in runs}
    far = [recipe for recipe, more in above.items() if more is not None and more > MARGIN]
    for recipe in far:
        print(f"{recipe} ends {above[recipe]:.2%} above {BASE}", file=sys.stderr)
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
