# SPDX-License-Identifier: Apache-2.0
"""What processes of a group run for tests/examples/test_layouts.py: one rank of a training."""

import contextlib
import importlib
import io
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example(name):
    """Import a module of the examples."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def train(device, arguments):
    """Run the example on this rank: (exit status or what it refuses, what it has printed)."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        try:
            status = example("train_gpt").main(["--device", device, *arguments])
        except (SystemExit, NotImplementedError) as error:
            status = f"{type(error).__name__}: {error}"
    return status, said.getvalue()


def read(arguments, folder):
    """Read a checkpoint in a process alone: its model, the optimizer's first moments, its step."""
    train_gpt, textdata = example("train_gpt"), example("textdata")
    args = train_gpt.parse(arguments)
    names = train_gpt.Config.__dataclass_fields__
    config = train_gpt.Config(**{name: getattr(args, name) for name in names})
    text = textdata.load(args.text, config.seq).to(args.device)
    trainer = train_gpt.Trainer(config, args.precision, text)
    trainer.load(folder)
    moments = [one["exp_avg"] for one in trainer.optimizer.state_dict()["state"].values()]
    return trainer.model.state_dict(), moments, trainer.step
