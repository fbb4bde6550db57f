# SPDX-License-Identifier: Apache-2.0
"""Training under FSDP2 with weights kept in FP8 (B) against weights kept in bf16 (A).

``torchrun --nproc-per-node 2 benchmarks/fsdp.py``. Both cast by the same recipe, on the same cards,
in turns: A gathers bf16 and casts what has arrived, B gathers codes. Masters in fp32 are kept by
the optimizer. A line stands for a recipe: milliseconds of a step (forward, backward and optimizer)
and of its forward and backward, bytes of linear weights that a rank sends to all-gathers in a step,
and the most memory that a step takes, the model's own with it. Then the last losses of each seed,
beside those of DDP over the same weights and batches.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from over_ranks import replaced, seconds_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=16),
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
}
RATE = 1e-4


def sharded(given: argparse.Namespace, device: torch.device, recipe: Any, seed: int) -> Any:
    """Layers whose weights are kept quantized, without a recipe in bf16; values are of the seed."""
    kept = contextlib.nullcontext()
    if recipe is not None:
        kept = te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True)
    with kept:
        model = torch.nn.Sequential(*[layer_of(given, "meta") for _ in range(given.layers)])
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not given.keep)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(seed * dist.get_world_size() + dist.get_rank())
    for module in model.modules():
        if module is not model and hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def layer_of(given: argparse.Namespace, device: Any) -> Any:
    """One layer, without dropout."""
    return te.TransformerLayer(
        given.hidden,
        4 * given.hidden,
        given.hidden // given.channels,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        fuse_qkv_params=True,
        params_dtype=torch.bfloat16,
        device=device,
    )


def replicated(given: argparse.Namespace, device: torch.device, like: Any) -> Any:
    """The same under DDP, in bf16, with the values of a sharded model."""
    state = get_model_state_dict(like, options=StateDictOptions(full_state_dict=True))
    model = torch.nn.Sequential(*[layer_of(given, device) for _ in range(given.layers)])
    model.load_state_dict(state)
    return DistributedDataParallel(model)


class Training:
    """A model in training: a call of `step` is one step on fresh batches."""

    def __init__(self, given: argparse.Namespace, model: Any, recipe: Any, seed: int) -> None:
        self.model, self.recipe, self.given = model, recipe, given
        self.optimizer = te.optimizers.FusedAdam(model.parameters(), lr=RATE, master_weights=True)
        for p in model.parameters():
            if hasattr(p, "get_high_precision_init_val"):
                self.optimizer.initialize_state(p)
                values = p.get_high_precision_init_val().to(p.device).float()
                self.optimizer.set_scaled_state(p, "master_param", values)
                p.clear_high_precision_init_val()
        self.device = next(model.parameters()).device
        self.random = torch.Generator(self.device).manual_seed(seed + 1000 * dist.get_rank())

    def gradients(self) -> torch.Tensor:
        """Run a forward and a backward; return the loss. Each token learns the one before it."""
        shape = self.given.tokens, self.given.batch, self.given.hidden
        like = {"device": self.device, "dtype": torch.bfloat16}
        x = torch.randn(shape, generator=self.random, **like)
        with te.autocast(recipe=self.recipe):
            out = self.model(x)
        loss = (out[1:] - x[:-1]).float().square().mean()
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        """Step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> torch.Tensor:
        """One step; return the loss."""
        loss = self.gradients()
        self.update()
        return loss


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that this rank sends to each all-gather."""
    sent: list[int] = []

    def counting(name: str, known: Callable) -> Callable:
        def gather(output: Any, given: torch.Tensor, *more: Any, **options: Any) -> Any:
            sent.append(given.numel() * given.itemsize)
            return known(output, given, *more, **options)

        return gather if name == "all_gather_into_tensor" else known

    with replaced(counting):
        yield sent


def gathered(training: Training) -> int:
    """Bytes of weights that this rank sends to the all-gathers of a step."""
    vectors = [p.to_local() for p in training.model.parameters() if p.dim() == 1]
    others = sum(local.numel() * local.itemsize for local in vectors)
    with counted() as sent:
        training.step()
    times, rest = divmod(len(sent), training.given.layers)
    if times == 0 or rest:
        raise RuntimeError(f"{len(sent)} all-gathers of {training.given.layers} layers in a step")
    return sum(sent) - times * others


def made(
    given: argparse.Namespace, device: torch.device, recipe: Any, quantized: bool
) -> tuple[Training, float]:
    """A model that has taken some steps, and MiB at the most: of it and of a step."""
    cuda = device.type == "cuda"
    gc.collect()  # models before it are cycles
    before = torch.cuda.memory_allocated() if cuda else 0
    training = Training(given, sharded(given, device, recipe if quantized else None, 0), recipe, 0)
    for _ in range(3):
        training.step()
    if not cuda:
        return training, 0.0
    torch.cuda.reset_peak_memory_stats()
    training.step()
    return training, (torch.cuda.max_memory_allocated() - before) / 2**20


def compare(given: argparse.Namespace, device: torch.device, recipe: Any) -> list[float]:
    """Columns of a recipe's line: of A and B the quantities, and of each their median ratio."""
    found = [made(given, device, recipe, quantized) for quantized in (False, True)]
    a, b = (training for training, _ in found)
    columns = []
    for calls_of in (lambda each: each.step, lambda each: each.gradients):
        times: list[tuple[float, float]] = []
        for turn in range(given.turns):
            order = (a, b) if turn % 2 == 0 else (b, a)
            taken = {each: seconds_of(calls_of(each), device, given.calls) for each in order}
            times.append((taken[a], taken[b]))
        columns += [statistics.median(each) * 1e3 for each in zip(*times, strict=True)]
        columns.append(statistics.median(mine / plain for plain, mine in times))
    for each in (a, b):
        each.optimizer.zero_grad()
    sent = [gathered(each) for each in (a, b)]
    peaks = [peak for _, peak in found]
    columns += [sent[0] / 1e6, sent[1] / 1e6, sent[1] / sent[0]]
    return [*columns, *peaks, peaks[1] / peaks[0] if peaks[0] else 0.0]


def losses(given: argparse.Namespace, device: torch.device, recipe: Any) -> dict[str, list[float]]:
    """Losses of the last step, the mean of ranks, by seed: of A, of B, and of DDP."""
    found: dict[str, list[float]] = {"DDP": [], "A": [], "B": []}
    for seed in range(given.seeds):
        a = sharded(given, device, None, seed)
        models = {"DDP": replicated(given, device, a), "A": a}
        models["B"] = sharded(given, device, recipe, seed)
        for name in list(models):
            model = models.pop(name)
            training = Training(given, model, recipe, seed)
            for _ in range(given.steps):
                loss = training.step()
            dist.all_reduce(loss)
            found[name].append(float(loss) / dist.get_world_size())
            del model, training
    return found


def options() -> argparse.Namespace:
    """The command line."""
    known = argparse.ArgumentParser(description=__doc__)
    known.add_argument("--hidden", type=int, default=2048)
    known.add_argument("--layers", type=int, default=6)
    known.add_argument("--channels", type=int, default=128, help="of a head")
    known.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    known.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    known.add_argument("--recipes", nargs="*", choices=RECIPES, default=list(RECIPES))
    known.add_argument("--turns", type=int, default=7)
    known.add_argument("--calls", type=int, default=5, help="in each turn")
    known.add_argument("--steps", type=int, default=30, help="whose losses are compared; 0: none")
    known.add_argument("--seeds", type=int, default=3)
    known.add_argument("--keep", action="store_true", help="weights from forward to backward")
    return known.parse_args()


def main() -> None:
    """Measure and print."""
    given, cuda = options(), torch.cuda.is_available()
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    title = torch.cuda.get_device_name() if cuda else "CPU"
    say(
        f"{dist.get_world_size()} x {title}, {given.layers} layers of {given.hidden}, "
        f"{given.tokens} x {given.batch} tokens a rank, A: weights in bf16, B: quantized"
    )
    parts = ("step ms", "forward + backward ms", "gathered MB", "peak MiB")
    say(f"{'':<9}" + "".join(f"{part:>30}" for part in parts))
    say(f"{'':<9}" + f"{'A':>11}{'B':>11}{'B/A':>8}" * len(parts))
    for name in given.recipes:
        columns = compare(given, device, RECIPES[name])
        trios = [columns[at : at + 3] for at in range(0, len(columns), 3)]
        say(f"{name:<9}" + "".join(f"{a:>11.3f}{b:>11.3f}{c:>8.3f}" for a, b, c in trios))
    if given.steps:
        say(f"losses after {given.steps} steps, of {given.seeds} seeds")
        for name in given.recipes:
            for way, values in losses(given, device, RECIPES[name]).items():
                say(f"{name:<9}{way:<4}" + "".join(f"{value:>11.5f}" for value in values))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
