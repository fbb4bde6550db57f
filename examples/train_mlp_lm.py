# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level language model in FP8 and in high precision, and compare the two.

The model reads a window of bytes and predicts the next one: the embeddings of the window are laid
side by side, projected, and refined by residual MLP blocks.  Every matrix product is a `te.Linear`;
the only difference between the two runs is `enabled=` of `te.autocast`.  Data, order and initial
weights are the same, so the two curves may be compared step by step.

    python examples/train_mlp_lm.py                     # both runs, table, plot
    python examples/train_mlp_lm.py --text book.txt     # own text
    python examples/train_mlp_lm.py --resume            # go on where it stopped
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from report import GemmCount, Result, plot, problems, table, write_json
from textdata import (
    ByteText,
    bigram_loss,
    load,
    training_positions,
    validation_positions,
    windows,
)
from tqdm import tqdm

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format

RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}
FP8_DTYPES = ("e4m3", "e5m2")
VOCABULARY = 256
TEMPERATURE = 0.8
EVALUATIONS = 8  # validations while training
SEGMENT = 20  # steps between two looks at the clock and at the losses: each look waits for the GPU


@dataclass(frozen=True)
class Config:
    """All that decides the outcome of a run, besides its precision."""

    steps: int
    batch: int
    context: int
    embed: int
    width: int
    depth: int
    lr: float
    valid_tokens: int
    seed: int
    recipe: str


# What the command line leaves open. Dimensions are multiples of 16, the granule of FP8 products.
# A window of 16 bytes is what so short a training can make use of: with 32 it learns less.
DEFAULTS = {
    "cpu": {"steps": 1500, "batch": 512, "context": 16, "embed": 64, "width": 256, "depth": 4,
            "lr": 2e-3, "valid_tokens": 8192},
    "cuda": {"steps": 1200, "batch": 8192, "context": 32, "embed": 64, "width": 1536, "depth": 4,
             "lr": 5e-4, "valid_tokens": 65536},
}  # fmt: skip


def linear(inputs: int, outputs: int, device: torch.device, gain: float = 1.0) -> te.Linear:
    """Make a linear layer that keeps the variance of its input times `gain` squared."""

    def init(weight: torch.Tensor) -> None:
        torch.nn.init.normal_(weight, std=gain / math.sqrt(inputs))

    return te.Linear(inputs, outputs, init_method=init, params_dtype=torch.float32, device=device)


class Block(torch.nn.Module):
    """A residual MLP: x + down(gelu(up(norm(x))))."""

    def __init__(self, width: int, depth: int, device: torch.device) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width, device=device)
        self.up = linear(width, 4 * width, device)
        self.down = linear(4 * width, width, device, gain=1.0 / math.sqrt(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Refine `x`, [rows, width]."""
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class ByteModel(torch.nn.Module):
    """Window of bytes, int64 [rows, context], to features, [rows, width], and these to logits."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, config.embed, device=device)
        self.project = linear(config.context * config.embed, config.width, device)
        self.blocks = torch.nn.ModuleList(
            Block(config.width, config.depth, device) for _ in range(config.depth)
        )
        self.norm = torch.nn.LayerNorm(config.width, device=device)
        self.head = linear(config.width, VOCABULARY, device, gain=0.1)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """Return the features of each window; `head` makes logits of them."""
        x = self.project(self.embedding(window).flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def gemm_counts() -> tuple[int, int]:
    """Return how many GEMMs the library has run in this process: in FP8, and in all."""
    fp8 = total = 0
    for name, count in _core.counters().items():  # such as "gemm.cpu.e4m3.e5m2"
        kind, _, *operands = name.split(".")
        if kind == "gemm":
            total += count
            fp8 += count if all(dtype in FP8_DTYPES for dtype in operands) else 0
    return fp8, total


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
    path : Path
        Where the checkpoint goes.
    """

    def __init__(self, config: Config, precision: str, text: ByteText, path: Path) -> None:
        self.config, self.precision, self.text, self.path = config, precision, text, path
        self.device = text.train.device
        self.on_gpu = self.device.type == "cuda"
        # FP8 products stand among bf16 operations on a GPU, among fp32 ones on a CPU.
        self.bf16 = precision == "bf16" or (precision == "fp8" and self.on_gpu)
        self.recipe = RECIPES[config.recipe]()
        self.head_recipe = RECIPES[config.recipe](fp8_format=Format.E4M3)
        torch.manual_seed(config.seed)
        self.model = ByteModel(config, self.device)
        self.layers = sum(isinstance(m, te.Linear) for m in self.model.modules())
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=config.lr,
            betas=(0.9, 0.98),
            eps=1e-6,
            weight_decay=0.01,
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

    # -- precision ------------------------------------------------------------------------------

    def predict(self, window: torch.Tensor) -> torch.Tensor:
        """Run the model in this run's precision: the one place where the runs differ.

        The recipes' own format has gradients in E5M2, whose range suits most of them.  Those of the
        logits are probabilities and need digits, not range: E5M2's two bits of mantissa would cost
        more of the loss there than all the rest of FP8 together, E4M3's three cost nothing.
        """
        fp8 = self.precision == "fp8"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16):
            with te.autocast(enabled=fp8, recipe=self.recipe):
                features = self.model(window)
            with te.autocast(enabled=fp8, recipe=self.head_recipe):
                logits = self.model.head(features)
        return logits.float()

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
        """Return the rate of this step: a linear warm-up, then half a cosine to a twentieth."""
        warmup = max(1, self.config.steps // 20)
        if self.step < warmup:
            return self.config.lr * (self.step + 1) / warmup
        done = (self.step - warmup) / max(1, self.config.steps - warmup)
        return self.config.lr * (0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * done)))

    def train_step(self) -> None:
        """Do one step; its loss stays on the device, where reading it costs no wait."""
        config, data = self.config, self.text.train
        seed = config.seed * 1_000_003 + self.step
        positions = training_positions(data, config.context, config.batch, seed)
        window, target = windows(data, positions, config.context)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = F.cross_entropy(self.predict(window), target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.train_losses[self.step] = loss.detach()
        self.gemms.expected += 3 * self.layers  # the embedding is trained: every layer has a dgrad
        self.step += 1

    def train_segment(self, until: int, bar: tqdm) -> float:
        """Train up to step `until`, take the time, and return the mean loss."""
        start, began = self.step, time.perf_counter()
        while self.step < until:
            self.train_step()
            bar.update()
        loss = self.train_losses[start:until].mean().item()
        self.rates.append((until - start) * self.config.batch / (time.perf_counter() - began))
        self.take_stock()
        if not math.isfinite(loss):
            bar.close()
            raise SystemExit(f"{self.precision}: a loss of steps {start + 1} to {until} is {loss}")
        return loss

    def fit(self, stop: int, save_every: int) -> None:
        """Train up to step `stop`, with a bar, a validation now and then, and checkpoints."""
        config = self.config
        evaluate_every = math.ceil(config.steps / EVALUATIONS)
        bar = tqdm(
            total=config.steps,
            initial=self.step,
            desc=self.precision,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 15.0,
            dynamic_ncols=True,
        )
        if self.step == 0:
            self.validate()
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
            if self.step % save_every == 0 or self.step == stop:
                self.save()
        bar.close()

    @torch.no_grad()
    def validate(self) -> None:
        """Add a point to the validation curve."""
        data, config = self.text.valid, self.config
        positions = validation_positions(data, config.context, config.valid_tokens)
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        for part in positions.split(config.batch):
            window, target = windows(data, part, config.context)
            total += F.cross_entropy(self.predict(window), target, reduction="sum").double()
            self.gemms.expected += self.layers
        self.valid_curve.append((self.step, total.item() / len(positions)))

    @torch.no_grad()
    def sample(self, prompt: bytes, count: int) -> str:
        """Let the model write `count` bytes after `prompt`."""
        generator = torch.Generator().manual_seed(self.config.seed)
        written = list(prompt.rjust(self.config.context, b"\n"))
        for _ in range(count):
            window = torch.tensor([written[-self.config.context :]], device=self.device)
            logits = self.predict(window)[0].cpu()
            self.gemms.expected += self.layers
            probability = (logits / TEMPERATURE).softmax(dim=-1)
            written.append(int(torch.multinomial(probability, 1, generator=generator)))
        return bytes(written[self.config.context - len(prompt) :]).decode("utf-8", "replace")

    # -- checkpoints ----------------------------------------------------------------------------

    def identity(self) -> dict[str, object]:
        """Return what two runs must share for one to continue the other."""
        sizes = {"train_bytes": len(self.text.train), "valid_bytes": len(self.text.valid)}
        return {**asdict(self.config), "text": self.text.name, **sizes}

    def save(self) -> None:
        """Write a checkpoint; a crash while writing leaves the one before it."""
        self.take_stock()
        partial = self.path.with_suffix(".partial")
        torch.save(
            {
                "identity": self.identity(),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "train_losses": self.train_losses,
                "valid_curve": self.valid_curve,
                "rates": self.rates,
                "gemms": asdict(self.gemms),
                "peak_memory": self.peak_memory,
            },
            partial,
        )
        partial.replace(self.path)

    def load(self) -> None:
        """Continue from the checkpoint, as if the run had never stopped."""
        saved = torch.load(self.path, map_location=self.device, weights_only=True)
        now = self.identity()
        changed = [name for name in now if saved["identity"].get(name) != now[name]]
        if changed:
            was = ", ".join(f"{n} {saved['identity'].get(n)} -> {now[n]}" for n in changed)
            raise SystemExit(
                f"{self.path} is of another run ({was}): drop --resume or change --out"
            )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step = saved["step"]
        self.train_losses.copy_(saved["train_losses"])
        self.valid_curve = [(step, loss) for step, loss in saved["valid_curve"]]
        self.rates = list(saved["rates"])
        self.gemms = GemmCount(**saved["gemms"])
        self.peak_memory = saved["peak_memory"]

    def result(self, sample: str) -> Result:
        """Sum the finished run up."""
        self.take_stock()
        label = f"FP8 ({self.config.recipe})" if self.precision == "fp8" else self.precision
        return Result(
            precision=self.precision,
            label=label,
            parameters=sum(p.numel() for p in self.model.parameters()),
            valid_loss=self.valid_curve[-1][1],
            tokens_per_second=median(self.rates),
            peak_memory=self.peak_memory,
            gemms=self.gemms,
            train_curve=list(enumerate(self.train_losses.tolist(), start=1)),
            valid_curve=self.valid_curve,
            sample=sample,
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; what it leaves open depends on the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--precision", choices=["both", "fp8", "fp32", "bf16"], default="both",
        help="both: fp8, and fp32 on a CPU or bf16 on a GPU")  # fmt: skip
    add("--recipe", choices=sorted(RECIPES), default="delayed", help="FP8 scaling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--text", type=Path, metavar="FILE", help="default: the Python standard library")
    add("--steps", type=int)
    add("--batch", type=int, help="windows per step")
    add("--context", type=int, help="bytes per window")
    add("--embed", type=int, help="values per byte of the window")
    add("--width", type=int, help="values per window after the projection")
    add("--depth", type=int, help="MLP blocks")
    add("--lr", type=float, help="peak learning rate")
    add("--valid-tokens", type=int, help="bytes predicted in a validation")
    add("--seed", type=int, default=0)
    add("--sample-bytes", type=int, default=400)
    add("--prompt", default="def ", help="what the sample begins with")
    add("--out", type=Path, default=Path("build/demo"), help="folder for all results")
    add("--resume", action="store_true", help="continue from the checkpoints in --out")
    add("--save-every", type=int, help="steps between checkpoints (default: a quarter)")
    add("--stop-after", type=int, metavar="STEP", help="stop early, to go on with --resume")
    add("--check", action=argparse.BooleanOptionalAction, default=True,
        help="fail when a run does not beat the bigram model or FP8 is not within 1%%")  # fmt: skip
    args = parser.parse_args(arguments)
    args.device = torch.device(args.device)
    for name, value in DEFAULTS[args.device.type].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.save_every is None:
        args.save_every = max(1, args.steps // 4)
    return args


def run(args: argparse.Namespace, config: Config, precision: str, text: ByteText) -> Result | None:
    """Train in one precision; None when stopped on the way."""
    trainer = Trainer(config, precision, text, args.out / f"{precision}.pt")
    if args.resume and trainer.path.exists():
        trainer.load()
    stop = min(args.stop_after or config.steps, config.steps)
    trainer.fit(stop, args.save_every)
    if trainer.step < config.steps:
        print(f"{precision}: stopped after step {trainer.step}; continue with --resume")
        return None
    return trainer.result(trainer.sample(args.prompt.encode(), args.sample_bytes))


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return the exit status."""
    args = parse(arguments)
    config = Config(**{name: getattr(args, name) for name in Config.__dataclass_fields__})
    args.out.mkdir(parents=True, exist_ok=True)
    text = load(args.text, config.context)
    print(f"{text.name}: {len(text.train):,} training, {len(text.valid):,} validation bytes")
    positions = validation_positions(text.valid, config.context, config.valid_tokens)
    bigram = bigram_loss(text.train, text.valid, positions)
    high = "bf16" if args.device.type == "cuda" else "fp32"
    precisions = ["fp8", high] if args.precision == "both" else [args.precision]
    text = text.to(args.device)
    finished = [run(args, config, precision, text) for precision in precisions]
    results = [result for result in finished if result is not None]
    if len(results) < len(precisions):
        return 0
    for r in results:
        print(f"\n--- {r.label} writes " + "-" * 60 + f"\n{r.sample}")
        (args.out / f"sample_{r.precision}.txt").write_text(r.sample, encoding="utf-8")
    write_json(args.out / "results.json", results, bigram)
    plot(args.out / "loss.png", results, bigram, f"Byte-level language model, {text.name}")
    print(f"\n{table(results, bigram)}\n\nplot, figures, samples: {args.out}")
    failures = problems(results, bigram, args.check)
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
