# SPDX-License-Identifier: Apache-2.0
"""Time the quick-start layer under tensor parallelism, and how much of its communication is hidden.

Run: torchrun --nproc-per-node 2 benchmarks/tensor_parallel.py

Each rank times the whole layer on its GPU, then its part of the layer: with sequence parallelism,
with GEMMs in pieces beside the collectives (`ub_tp_comm_overlap`) and without, and without sequence
parallelism. Hidden is 1 - (time - time with each collective replaced by a local copy of the bytes
that it writes) / (sum of the collectives timed alone); the limit of a ratio is 1 / ranks.
"""

import argparse
import os
import time
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from over_ranks import replaced

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

RECIPES = {
    "bf16": None,
    "delayed": recipes.DelayedScaling(),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
}


class Done:
    """A handle of work that is done."""

    def wait(self):
        """Return at once."""


def copied(output, *given, async_op=False, **_):
    """In place of a collective: write what it writes, from what this rank has."""
    inp = given[0] if given and isinstance(given[0], torch.Tensor) else output
    if inp.numel() < output.numel():
        output.view(-1, *inp.shape).copy_(inp.expand(output.shape[0] // inp.shape[0], *inp.shape))
    elif inp is not output:
        output.copy_(inp[: output.shape[0]])
    return Done() if async_op else None


def noting(found, name, plain):
    """A collective that notes what it is called with, and runs."""

    def run(output, *given, **how):
        inp = given[0] if given and isinstance(given[0], torch.Tensor) else output
        splits = tuple(map(tuple, given[1:]))
        found[name, tuple(output.shape), tuple(inp.shape), output.dtype, splits] += 1
        return plain(output, *given, **how)

    return run


def alone(call, repeats):
    """Milliseconds of a collective by itself."""
    name, out, inp, dtype, splits = call
    output, given = [torch.empty(s, device="cuda").to(dtype) for s in (out, inp)]
    run = getattr(dist, name)
    arguments = (output,) if name == "all_reduce" else (output, given, *map(list, splits))
    return timed([lambda: run(*arguments)], repeats)[0]


def timed(functions, repeats, warm=3):
    """Median milliseconds of each of several functions that are called in turn."""
    found = []
    for repeat in range(repeats + warm):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(functions) + 1)]
        if repeat == warm:
            torch.cuda.synchronize()
            dist.barrier()
        marks[0].record()
        for function, mark in zip(functions, marks[1:], strict=True):
            function()
            mark.record()
        if repeat >= warm:
            found.append(marks)
    torch.cuda.synchronize()
    each = [[a.elapsed_time(b) for a, b in zip(m, m[1:], strict=False)] for m in found]
    return [torch.tensor(column).median().item() for column in zip(*each, strict=True)]


class Step:
    """Forward and backward of a layer."""

    def __init__(self, arguments, recipe, ranks, **options):
        sizes = arguments.hidden, 4 * arguments.hidden, arguments.hidden // 128
        given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
        given |= {"params_dtype": torch.bfloat16, "fuse_qkv_params": True, "device": "cuda"}
        if ranks > 1:
            given |= {"tp_group": dist.group.WORLD, "set_parallel_mode": True}
        self.layer, self.recipe = te.TransformerLayer(*sizes, **given, **options), recipe
        parts = ranks if options.get("sequence_parallel") else 1
        shape = arguments.tokens // parts, arguments.batch, arguments.hidden
        self.x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.grad = torch.randn_like(self.x)

    def forward(self):
        """Run the layer."""
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            self.out = self.layer(self.x)

    def backward(self):
        """Run its backward."""
        self.out.backward(self.grad)

    def times(self, repeats):
        """Milliseconds of forward and backward."""
        return timed([self.forward, self.backward], repeats)

    def host(self, repeats):
        """Milliseconds that the host takes for both."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            self.forward()
            self.backward()
        return (time.perf_counter() - begin) / repeats * 1e3


def hidden(step, times, repeats):
    """Share of the communication that is hidden, of forward and backward; None where none is."""
    shares = []
    with replaced(lambda _, __: copied):
        without = step.times(repeats)
    for function, full, local in zip((step.forward, step.backward), times, without, strict=True):
        found = Counter()
        if function == step.backward:
            step.forward()
        with replaced(partial(noting, found)):
            function()
        if function == step.forward:
            step.backward()
        whole = sum(count * alone(call, repeats) for call, count in found.items())
        shares.append((1 - (full - local) / whole if whole else None, whole))
    return shares


def main():
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--recipes", nargs="+", default=["bf16", "delayed"], choices=RECIPES)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks, tell = dist.get_world_size(), dist.get_rank() == 0
    if tell:
        print(f"{torch.cuda.get_device_name()}, {ranks} ranks; limit of the ratio {1 / ranks:.3f}")
        names = "forward ms", "backward", "ratio", "host ms", "hidden fwd", "hidden bwd"
        names += ("collectives alone, fwd + bwd ms",)
        print(f"{'recipe':8} {'way':26}", *(f"{name:>10}" for name in names))
    ways = {
        "sequence": {"sequence_parallel": True},
        "sequence, in pieces": {"sequence_parallel": True, "ub_tp_comm_overlap": True},
        "gathers in pieces": {
            "sequence_parallel": True, "ub_tp_comm_overlap": True, "ub_overlap_rs": False,
        },
        "tensor": {},
    }  # fmt: skip
    for name in arguments.recipes:
        one = Step(arguments, RECIPES[name], 1)
        whole = one.times(arguments.repeats)
        if tell:
            print(f"{name:8} {'one GPU':26} {whole[0]:10.3f} {whole[1]:10.3f}")
        for way, options in ways.items():
            step = Step(arguments, RECIPES[name], ranks, **options)
            times = step.times(arguments.repeats)
            shares = hidden(step, times, arguments.repeats)
            host = step.host(arguments.repeats)
            if tell:
                row = f"{times[0]:10.3f} {times[1]:10.3f} {sum(times) / sum(whole):10.3f} "
                row += f"{host:10.2f}"
                for share, _ in shares:
                    row += f" {'-':>10}" if share is None else f" {share:10.2f}"
                row += "".join(f" {alone:10.3f}" for _, alone in shares)
                print(f"{name:8} {way:26} {row}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
