# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level GPT in FP8 and in high precision, and compare the two.

The model is a stack of `te.TransformerLayer` between an embedding and a head.  Every linear layer
of it is the library's; the only difference between the two runs is `enabled=` of `te.autocast`.
Data, order and initial weights are the same, so the two curves may be compared step by step.

    python examples/train_gpt.py                       # both runs, table, plot
    python examples/train_gpt.py --text book.txt       # own text
    python examples/train_gpt.py --precision fp8 --layers 2 --hidden 256 --heads 4
    python examples/train_gpt.py --checkpoint gpt.pt   # and later: --resume gpt.pt

Over several GPUs or processes torchrun starts it. The layout says how they share the work
(layout.py); a checkpoint is a folder then, from which any layout goes on, one process too.

    torchrun --nproc-per-node 8 examples/train_gpt.py --fsdp 8 --checkpoint gpt
    torchrun --nproc-per-node 4 examples/train_gpt.py --dp 2 --fsdp 2 --resume gpt
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import checkpoints
import torch
import torch.nn.functional as F
from gpt import GPT, RECIPES, WIDE_HEADS, Config, InPrecision
from layout import DIMS, Layout, start_processes
from progress import Progress
from report import GemmCount, Result, plot, problems, table, write_json
from textdata import (
    ByteText,
    bigram_loss,
    load,
    training_starts,
    validation_starts,
    windows,
)

import transformer_engine.pytorch as te

TEMPERATURE = 0.8
EVALUATIONS = 5  # validations while training
SEGMENT = 20  # steps between two looks at the clock and at the losses: each look waits for the GPU
# What the command line leaves open: 10.8 and 126 million parameters.
DEFAULTS = {
    "cpu": {"layers": 6, "hidden": 384, "heads": 6, "seq": 64, "batch": 8, "steps": 700,
            "lr": 1e-3, "warmup": 0.1, "final_lr": 0.02, "valid_windows": 256, "sample": 200},
    "cuda": {"layers": 10, "hidden": 1024, "heads": 16, "seq": 1024, "batch": 16, "steps": 500,
             "lr": 6e-4, "warmup": 0.2, "final_lr": 0.02, "valid_windows": 128, "sample": 400},
}  # fmt: skip


def gemm_counts() -> tuple[int, int]:
    """Return how many GEMMs the library has run in this process: of quantized operands, and all."""
    ran = te.counters()
    return ran.fp8_gemms + ran.emulated_gemms, ran.fp8_gemms + ran.other_gemms


def resident_memory() -> int:
    """Bytes of memory that this process holds."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:  # not Linux: the peak so far is the next best
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


class Trainer:
    """One run: a model, its optimizer, and all that a checkpoint must hold.

    Parameters
    ----------
    config : Config
        Shape of the model and of the training.
    precision : str
        ``"fp8"``, ``"fp32"`` or ``"bf16"``.
    text : ByteText
        Text on the device that trains.
    layout : Layout, optional
        How the run is spread over ranks; by default it is not.
    """

    def __init__(
        self, config: Config, precision: str, text: ByteText, layout: Layout | None = None
    ) -> None:
        self.config, self.precision, self.text = config, precision, text
        self.layout = layout or Layout()
        self.device = text.train.device
        self.on_gpu = self.device.type == "cuda"
        torch.manual_seed(config.seed)
        self.model = GPT(config, self.device, self.layout)
        predict = InPrecision(self.model, precision, config.recipe)
        self.recipe, self.head_recipe = predict.recipe, predict.head_recipe
        self.quantized_head = predict.quantized_head
        self.predict = self.layout.wrap(predict)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=True,
        )
        self.step = 0
        self.train_losses = torch.zeros(config.steps, device=self.device)
        self.valid_curve: list[tuple[int, float]] = []
        self.rates: list[float] = []
        self.gemms = GemmCount()
        self.peak_memory = 0
        self._counted = gemm_counts()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    # -- what is measured -----------------------------------------------------------------------

    def _expect_gemms(self, count: int) -> None:
        """Note that each linear layer runs so many."""
        linears = self.model.linears
        self.gemms.expected += count * linears
        if self.precision == "fp8":
            self.gemms.fp8_expected += count * (linears if self.quantized_head else linears - 1)

    def take_stock(self) -> None:
        """Bring the counts of GEMMs and the peak of memory up to date."""
        counts = gemm_counts()
        self.gemms.fp8 += counts[0] - self._counted[0]
        self.gemms.total += counts[1] - self._counted[1]
        self._counted = counts
        used = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else resident_memory()
        self.peak_memory = max(self.peak_memory, used)

    # -- training -------------------------------------------------------------------------------

    def learning_rate(self) -> float:
        """Return the rate of this step: a linear warm-up, then half a cosine to `final_lr`."""
        config = self.config
        warmup = max(1, round(config.steps * config.warmup))
        if self.step < warmup:
            return config.lr * (self.step + 1) / warmup
        done = (self.step - warmup) / max(1, config.steps - warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * done))
        return config.lr * (config.final_lr + (1.0 - config.final_lr) * cosine)

    def gradients(self) -> torch.Tensor:
        """Add this step's gradients to the parameters'; return the loss of this rank's bytes."""
        config, data, layout = self.config, self.text.train, self.layout
        seed = config.seed * 1_000_003 + self.step
        starts = layout.share(training_starts(data, config.seq, config.batch, seed))
        window, target = layout.tokens(*windows(data, starts, config.seq))
        torch.manual_seed((seed << 20) + layout.rank)  # of dropouts
        loss = F.cross_entropy(self.predict(window).flatten(0, 1), target.flatten())
        (loss / layout.tp).backward()  # ranks of tp have parts of one window's loss
        # The embedding is trained: every linear layer has both gradients.
        self._expect_gemms(3)
        return loss.detach()

    def train_step(self) -> None:
        """Do one step; its loss stays on the device, where reading it costs no wait."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = self.gradients()
        self.layout.clip_gradients(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.train_losses[self.step] = loss
        self.step += 1

    def train_segment(self, until: int, bar: Progress) -> float:
        """Train up to step `until`, take the time, and return the mean loss."""
        start, began = self.step, time.perf_counter()
        while self.step < until:
            self.train_step()
            bar.update()
        loss = self.layout.mean(self.train_losses[start:until]).mean().item()
        tokens = (until - start) * self.config.batch * self.config.seq
        self.rates.append(tokens / (time.perf_counter() - began))
        self.take_stock()
        if not math.isfinite(loss):
            bar.close()
            raise SystemExit(f"{self.precision}: a loss of steps {start + 1} to {until} is {loss}")
        return loss

    def fit(self, stop: int, save_every: int, checkpoint: Path | None) -> None:
        """Train up to step `stop`, with a bar, a validation now and then, and checkpoints."""
        config = self.config
        evaluate_every = math.ceil(config.steps / EVALUATIONS)
        bar = Progress(
            total=config.steps,
            initial=self.step,
            desc=self.precision,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 15.0,
            dynamic_ncols=True,
            disable=not self.layout.leads,
        )
        if self.step == 0:
            bar.set_postfix_str("before the first step")
            self.validate()
            bar.set_postfix_str("", refresh=False)
        while self.step < stop:
            until = min(
                stop, *(self.step // n * n + n for n in (SEGMENT, evaluate_every, save_every))
            )
            loss = self.train_segment(until, bar)
            bar.set_postfix_str(
                f"loss {loss:.3f}, valid {self.valid_curve[-1][1]:.3f}, "
                f"{self.rates[-1]:,.0f} tokens/s, {self.peak_memory / 2**20:,.0f} MiB",
                refresh=False,
            )
            if self.step % evaluate_every == 0 or self.step == config.steps:
                self.validate()
            if checkpoint is not None and (self.step % save_every == 0 or self.step == stop):
                self.save(checkpoint)
        bar.close()

    @torch.no_grad()
    def validate(self) -> None:
        """Add a point to the validation curve."""
        self.model.eval()
        data, config, layout = self.text.valid, self.config, self.layout
        starts = validation_starts(data, config.seq, config.valid_windows)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for part in starts.split(config.batch):
            window, target = layout.tokens(*windows(data, layout.share(part), config.seq))
            logits = self.predict(window).flatten(0, 1)
            total += F.cross_entropy(logits, target.flatten(), reduction="sum").double()
            self._expect_gemms(1)
        loss = layout.total(total).item() / (len(starts) * config.seq)
        self.valid_curve.append((self.step, loss))
        self.model.train()

    @torch.no_grad()
    def sample(self, prompt: bytes, count: int) -> str:
        """Let the model write `count` bytes after `prompt`."""
        self.model.eval()
        generator = torch.Generator().manual_seed(self.config.seed)
        written = list(prompt)
        for _ in range(count):
            window = torch.tensor(written[-self.config.seq :], device=self.device)[:, None]
            logits = self.predict(window, last_only=True).view(-1).cpu()
            self._expect_gemms(1)
            probability = (logits / TEMPERATURE).softmax(dim=-1)
            written.append(int(torch.multinomial(probability, 1, generator=generator)))
        self.model.train()
        return bytes(written).decode("utf-8", "replace")

    # -- checkpoints ----------------------------------------------------------------------------

    def save_model(self, path: Path) -> None:
        """Write the trained model alone, which examples/generate.py reads."""
        content = {"config": asdict(self.config), "precision": self.precision}
        content["model"] = self.layout.whole_model(self.model)
        if self.layout.leads:
            checkpoints.save(path, content)

    def identity(self) -> dict[str, object]:
        """Return what two runs must share for one to continue the other: not the layout."""
        sizes = {"train_bytes": len(self.text.train), "valid_bytes": len(self.text.valid)}
        return {
            **asdict(self.config),
            "precision": self.precision,
            "device": self.device.type,
            "text": self.text.name,
            **sizes,
        }

    def notes(self) -> dict[str, Any]:
        """Return all that a checkpoint holds besides the model and the optimizer."""
        self.take_stock()
        return {
            "identity": self.identity(),
            "step": self.step,
            "train_losses": self.train_losses.tolist(),
            "valid_curve": self.valid_curve,
            "rates": self.rates,
            "gemms": asdict(self.gemms),
            "peak_memory": self.peak_memory,
        }

    @torch.no_grad()  # a region with gradients would be one more for the scales
    def save(self, path: Path) -> None:
        """Write a checkpoint; a crash while writing leaves the one before it."""
        if self.layout.spread or path.is_dir():
            with self.region():
                notes = json.dumps(self.notes())
                self.layout.save(path, self.model, self.optimizer, notes)
            return
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        checkpoints.save(path, {**self.notes(), **states})

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Continue from a checkpoint, as if the run had never stopped."""
        if path.is_dir():
            saved = json.loads(self.layout.notes(path))
            self._take(saved, path)
            with self.region():
                self.layout.load(path, self.model, self.optimizer)
        elif self.layout.spread:
            raise SystemExit(
                f"{path} is a file of a run without torchrun: several ranks go on "
                "from a folder, which they have written"
            )
        else:
            saved = checkpoints.load(path, self.device)
            self._take(saved, path)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def region(self) -> AbstractContextManager:
        """Where a state dict has room for the scales that a checkpoint holds."""
        return te.autocast(enabled=self.precision == "fp8", recipe=self.recipe)

    def _take(self, saved: dict[str, Any], path: Path) -> None:
        """Take over what `notes` gave; refuse that of another run."""
        now = self.identity()
        changed = [name for name in now if saved["identity"].get(name) != now[name]]
        if changed:
            was = ", ".join(f"{n} {saved['identity'].get(n)} -> {now[n]}" for n in changed)
            raise SystemExit(f"{path} is of another run ({was})")
        self.step = saved["step"]
        self.train_losses.copy_(torch.tensor(saved["train_losses"]))
        self.valid_curve = [(step, loss) for step, loss in saved["valid_curve"]]
        self.rates = list(saved["rates"])
        self.gemms = GemmCount(**saved["gemms"])
        self.peak_memory = saved["peak_memory"]

    def result(self, sample: str) -> Result:
        """Sum the finished run up."""
        self.take_stock()
        recipe = self.config.recipe
        label = self.precision
        if self.precision == "fp8":
            label = recipe.upper() if recipe in WIDE_HEADS else f"FP8 ({recipe})"
        return Result(
            precision=self.precision,
            label=label,
            parameters=self.layout.count_parameters(self.model),
            valid_loss=self.valid_curve[-1][1],
            tokens_per_second=median(self.rates),
            peak_memory=self.peak_memory,
            gemms=self.gemms,
            train_curve=list(enumerate(self.train_losses.tolist(), start=1)),
            valid_curve=self.valid_curve,
            sample=sample,
        )


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The text as it stands, and the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def by_device(name: str, about: str = "") -> str:
    """Describe an option whose default depends on the device."""
    cpu, gpu = (f"{DEFAULTS[device][name]:g}" for device in ("cpu", "cuda"))
    return f"{about} (default: {cpu}, on a GPU {gpu})".strip()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; what it leaves open depends on the device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    for name, kind, about in (
        ("layers", int, "Transformer layers"),
        ("hidden", int, "values per byte"),
        ("heads", int, "attention heads"),
        ("seq", int, "bytes per window"),
        ("batch", int, "windows per step"),
        ("steps", int, "steps of training"),
        ("lr", float, "peak learning rate"),
        ("warmup", float, "share of the steps until the peak"),
        ("final_lr", float, "last learning rate, as a share of the peak"),
        ("valid_windows", int, "windows predicted in a validation"),
        ("sample", int, "bytes that the trained model writes; none with --cp and --tp"),
    ):
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=kind, metavar="N", help=by_device(name, about))
    for name, about in zip(DIMS, ("replicas that split the batch (default: what the others leave)",
                                  "ranks that split the batch, parameters and optimizer",
                                  "ranks that split each window",
                                  "ranks that split each layer"), strict=True):  # fmt: skip
        add(f"--{name}", type=int, metavar="RANKS", default=None if name == "dp" else 1, help=about)
    add("--precision", choices=["both", "fp8", "bf16", "fp32"], default="both",
        help="both: fp8, and fp32 on a CPU or bf16 on a GPU")  # fmt: skip
    add("--recipe", choices=sorted(RECIPES), default="delayed", help="FP8 scaling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add("--text", type=Path, metavar="FILE",
        help="text to train on (default: the Python standard library)")  # fmt: skip
    add("--dropout", type=float, default=0.0, help="of attention and of what joins the residuals")
    add("--seed", type=int, default=0, help="of weights and data")
    add("--prompt", default="def ", help="what the sample begins with")
    add("--out", type=Path, default=Path("build/demo"), help="folder for the results")
    add("--checkpoint", type=Path, metavar="FILE",
        help="write checkpoints (default: none, or --resume); of two runs each puts its precision "
        "into the name")  # fmt: skip
    add("--resume", type=Path, metavar="FILE",
        help="continue from what --checkpoint wrote")  # fmt: skip
    add("--save-every", type=int, metavar="N",
        help="steps between checkpoints (default: a quarter of all)")  # fmt: skip
    add("--stop-after", type=int, metavar="STEP",
        help="stop early, to go on with --resume (default: the last step)")  # fmt: skip
    add("--check", action=argparse.BooleanOptionalAction, default=True,
        help="fail when a run does not beat the bigram model or FP8 is not within 1%%")  # fmt: skip
    args = parser.parse_args(arguments)
    args.device = torch.device(args.device)
    for name, value in DEFAULTS[args.device.type].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.save_every is None:
        args.save_every = max(1, args.steps // 4)
    high = "bf16" if args.device.type == "cuda" else "fp32"
    args.precisions = ["fp8", high] if args.precision == "both" else [args.precision]
    if args.checkpoint is None:
        args.checkpoint = args.resume
    return args


def checkpoint_of(path: Path | None, precision: str, args: argparse.Namespace) -> Path | None:
    """Return the file of one run: `path` itself where there is only one."""
    if path is None or len(args.precisions) == 1:
        return path
    return path.with_name(f"{path.stem}-{precision}{path.suffix}")


def run(
    args: argparse.Namespace, config: Config, precision: str, text: ByteText, layout: Layout
) -> Result | None:
    """Train in one precision; None when stopped on the way."""
    trainer = Trainer(config, precision, text, layout)
    before = checkpoint_of(args.resume, precision, args)
    if before is not None and before.exists():  # the second run may not have begun yet
        trainer.load(before)
    stop = min(args.stop_after or config.steps, config.steps)
    trainer.fit(stop, args.save_every, checkpoint_of(args.checkpoint, precision, args))
    if trainer.step < config.steps:
        if layout.leads:
            print(f"{precision}: stopped after step {trainer.step}")
        return None
    trainer.save_model(args.out / f"model_{precision}.pt")
    # Ranks of tp and cp have parts of a window, which must divide: one that grows does not.
    count = args.sample if layout.tp == layout.cp == 1 else 0
    return trainer.result(trainer.sample(args.prompt.encode(), count))


def compare(args: argparse.Namespace, make_layout: Callable[[], Layout]) -> int:
    """Run the comparison; return the exit status."""
    began = time.perf_counter()
    if args.resume is not None:
        files = [checkpoint_of(args.resume, precision, args) for precision in args.precisions]
        if not any(file.exists() for file in files):
            raise SystemExit(f"--resume: there is no {' and no '.join(map(str, files))}")
    config = Config(**{name: getattr(args, name) for name in Config.__dataclass_fields__})
    layout = make_layout()
    args.out.mkdir(parents=True, exist_ok=True)
    text = load(args.text, config.seq)
    if layout.leads:
        print(f"{text.name}: {len(text.train):,} training, {len(text.valid):,} validation bytes")
    starts = validation_starts(text.valid, config.seq, config.valid_windows)
    bigram = bigram_loss(text.train, *windows(text.valid, starts, config.seq))
    text = text.to(args.device)
    finished = [run(args, config, precision, text, make_layout()) for precision in args.precisions]
    results = [result for result in finished if result is not None]
    if len(results) < len(finished):
        return 0
    failures = problems(results, bigram, args.check)
    if layout.leads:
        show(args, results, bigram, text.name)
        print(f"finished in {time.perf_counter() - began:.0f} s, layout: {layout}")
    for failure in failures:  # of any rank
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


def show(args: argparse.Namespace, results: list[Result], bigram: float, text: str) -> None:
    """Write what the runs have made."""
    for r in results:
        print(f"\n--- {r.label} writes " + "-" * 60 + f"\n{r.sample}")
        (args.out / f"sample_{r.precision}.txt").write_text(r.sample, encoding="utf-8")
    write_json(args.out / "results.json", results, bigram)
    plot(args.out / "loss.png", results, bigram, f"Byte-level GPT, {text}")
    print(f"\n{table(results, bigram)}\n\nplot, figures, samples, models: {args.out}")


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison, alone or as one of torchrun's processes; return the exit status."""
    args = parse(arguments)
    started = start_processes(args.device)
    sizes = {name: getattr(args, name) for name in DIMS}
    try:
        return compare(args, partial(Layout, args.device, **sizes, seed=args.seed))
    finally:
        if started:
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
