# SPDX-License-Identifier: Apache-2.0
"""Train the demo's GPT for 2,000 steps under each recipe, and keep the curves beside this file.

    python docs/convergence/run.py --recipes bf16 delayed current --seeds 0 1 2

A run is one JSON file, RECIPE-SEED.json: the device, the configuration, the validation curve, means
of the training loss over 50 steps, and by the library's counters the GEMMs of quantized operands.
docs/convergence/plot.py draws what is there and checks it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples"))

import train_gpt  # noqa: E402
from textdata import load  # noqa: E402

STEPS = 2000
MEAN_OF = 50  # steps


def means(losses: list[float]) -> list[float]:
    """Mean losses of `MEAN_OF` steps each."""
    parts = [losses[i : i + MEAN_OF] for i in range(0, len(losses), MEAN_OF)]
    return [round(sum(part) / len(part), 5) for part in parts]


def train(recipe: str, seed: int, steps: int, arguments: list[str]) -> dict:
    """Train once; what the JSON file holds."""
    precision = recipe if recipe in ("bf16", "fp32") else "fp8"
    given = ["--precision", precision, "--seed", str(seed), "--steps", str(steps), *arguments]
    if precision == "fp8":
        given += ["--recipe", recipe]
    args = train_gpt.parse(given)
    names = train_gpt.Config.__dataclass_fields__
    config = train_gpt.Config(**{name: getattr(args, name) for name in names})
    text = load(args.text, config.seq).to(args.device)
    trainer = train_gpt.Trainer(config, precision, text)
    began = time.perf_counter()
    trainer.fit(config.steps, config.steps, None)
    result = trainer.result("")
    on_gpu = args.device.type == "cuda"
    return {
        "recipe": recipe,
        "seed": seed,
        "device": torch.cuda.get_device_name(args.device) if on_gpu else "CPU",
        "torch": torch.__version__,
        "text": text.name,
        "parameters": result.parameters,
        "config": asdict(config),
        "seconds": round(time.perf_counter() - began, 1),
        "fp8_gemms": result.gemms.fp8,
        "gemms": result.gemms.total,
        "valid_loss": result.valid_loss,
        "valid_curve": result.valid_curve,
        "train_means": means([loss for _, loss in result.train_curve]),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line names; what is there already is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=HERE, metavar="FOLDER")
    args, others = parser.parse_known_args(arguments)  # the others are those of train_gpt.py
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        for recipe in args.recipes:
            file = args.out / f"{recipe}-{seed}.json"
            if file.exists():
                continue
            made = train(recipe, seed, args.steps, others)
            file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
            print(f"{file.name}: {made['valid_loss']:.4f} in {made['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
