# SPDX-License-Identifier: Apache-2.0
"""Attention over ranks: forward and backward of each way against one GPU, on the same cards.

``torchrun --nproc-per-node 2 benchmarks/context_parallel.py``. Each rank measures all of the
sequence by itself first, at the same time as the others do; then its part over the ranks, in turns.
Beside stand the bytes that a rank sends, and a limit: the longer of the times that its products and
these bytes take at rates that are given. A causal mask counts as half of the products.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from over_ranks import seconds_of

import transformer_engine.pytorch as te

WAYS = ("p2p", "all_gather", "a2a")
PRODUCTS = 2 + 5  # of the forward and of the backward


class Shape(NamedTuple):
    """One sequence."""

    tokens: int
    heads: int
    channels: int

    def elements(self, ranks: int) -> int:
        """Of the queries, keys or values that a rank has."""
        return self.tokens * self.heads * self.channels // ranks


def sent_bytes(way: str, shape: Shape, ranks: int, width: int) -> int:
    """What a rank sends in a forward and a backward, of elements of so many bytes."""
    own, others = shape.elements(ranks), ranks - 1
    if way == "a2a":  # queries, keys, values and outputs, and their gradients
        return 8 * own * width * others // ranks
    keys = others * 2 * own * 2 * width  # and values, forward and backward
    if way == "all_gather":  # the last rank; others send fewer chunks. And gradients of each step
        return keys + others * 2 * own * width
    return keys + 2 * own * (width + (others - 1) * 4)  # gradients, behind the first step in fp32


def step_of(module: Any, tensors: list[torch.Tensor], grad: torch.Tensor) -> Callable[[], None]:
    """A forward and a backward."""

    def step() -> None:
        for tensor in tensors:
            tensor.grad = None
        module(*tensors).backward(grad)

    return step


def options() -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--tokens", type=int, default=32768)
    made.add_argument("--heads", type=int, default=16)
    made.add_argument("--channels", type=int, default=128)
    made.add_argument("--turns", type=int, default=7)
    made.add_argument("--calls", type=int, default=5, help="in each turn")
    made.add_argument("--second-stream", action="store_true", help="give the ring a cp_stream")
    made.add_argument("--tflops", type=float, default=989.0, help="of the device in bf16")
    made.add_argument("--gigabytes", type=float, default=450.0, help="a second, to other ranks")
    return made.parse_args()


def main() -> None:
    """Measure and print."""
    given, cuda = options(), torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    shape = Shape(given.tokens, given.heads, given.channels)
    dtype = torch.bfloat16 if cuda else torch.float32

    def make(tokens: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        like = {"device": device, "dtype": dtype}
        heads = torch.randn(3, tokens, 1, shape.heads, shape.channels, **like)
        grad = torch.randn(tokens, 1, shape.heads * shape.channels, **like)
        return [each.clone().requires_grad_() for each in heads], grad

    steps = {"one GPU": step_of(te.DotProductAttention(shape.heads, shape.channels),
                                *make(shape.tokens))}  # fmt: skip
    stream = torch.cuda.Stream() if cuda and given.second_stream else None
    for way in WAYS:
        module = te.DotProductAttention(shape.heads, shape.channels)
        module.set_context_parallel_group(dist.group.WORLD, list(range(ranks)), stream, way)
        steps[way] = step_of(module, *make(shape.tokens // ranks))
    for step in steps.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(given.turns):
        for name, step in steps.items():
            times[name].append(seconds_of(step, device, given.calls))
    if rank == 0:
        title = torch.cuda.get_device_name() if cuda else "CPU"
        print(f"{ranks} x {title}, {dtype}, {shape}, causal, forward and backward")
        print(f"{'':<12}{'ms':>10}{'of one GPU':>12}{'MB sent':>10}{'limit ms':>10}")
        for name in steps:
            n = 1 if name == "one GPU" else ranks
            work = PRODUCTS * shape.tokens**2 * shape.heads * shape.channels / n
            sent = 0 if n == 1 else sent_bytes(name, shape, ranks, dtype.itemsize)
            limit = max(work / (given.tflops * 1e12), sent / (given.gigabytes * 1e9))
            pairs = zip(times[name], times["one GPU"], strict=True)
            part = statistics.median(mine / one for mine, one in pairs)
            ms = statistics.median(times[name]) * 1e3
            print(f"{name:<12}{ms:>10.3f}{part:>12.3f}{sent / 1e6:>10.3f}{limit * 1e3:>10.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
