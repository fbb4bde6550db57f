# SPDX-License-Identifier: Apache-2.0
"""Host time that a collective adds to a call of a module, beside a bare call of torch.distributed.

Run: torchrun --nproc-per-node 2 benchmarks/host_collectives.py

A module with tensor and sequence parallelism is timed beside one of the same sizes on one rank.
What it takes longer, divided by its collectives, is compared with the same collectives called by
themselves, asynchronously and waited for. Sizes are small, so that the device waits for the host.
"""

import argparse
import os
import statistics
import time
from functools import partial

import torch
import torch.distributed as dist
from over_ranks import replaced

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

HIDDEN, FFN, HEADS, ROWS = 256, 1024, 8, 128
RECIPES = {"bf16": None, "delayed": recipes.DelayedScaling()}
LIMIT = 40  # microseconds for a collective


def modules(ranks):
    """Pairs of a module over ranks and one of a rank's sizes, with the features of its input."""
    common = {"params_dtype": torch.bfloat16, "device": "cuda"}
    over = {"tp_group": dist.group.WORLD, "sequence_parallel": True}
    part = FFN // ranks
    yield (
        "Linear, column",
        te.Linear(HIDDEN, FFN, parallel_mode="column", **over, **common),
        te.Linear(HIDDEN, part, **common),
        HIDDEN,
    )
    yield (
        "Linear, row",
        te.Linear(FFN, HIDDEN, parallel_mode="row", **over, **common),
        te.Linear(part, HIDDEN, **common),
        part,
    )
    yield (
        "LayerNormMLP",
        te.LayerNormMLP(HIDDEN, FFN, set_parallel_mode=True, **over, **common),
        te.LayerNormMLP(HIDDEN, part, **common),
        HIDDEN,
    )
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
    rates |= {"fuse_qkv_params": True}
    yield (
        "TransformerLayer",
        te.TransformerLayer(HIDDEN, FFN, HEADS, set_parallel_mode=True, **rates, **over, **common),
        te.TransformerLayer(HIDDEN, FFN, HEADS, **rates, **common),
        HIDDEN,
    )


def microseconds(function, calls, repeats=7):
    """Host time of a call: the median of means, each of calls between two waits for the device."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        found.append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def noting(calls, _, plain):
    """A collective that notes a call, to be made again."""

    def run(*args, **kwargs):
        calls.append((plain, args, kwargs))
        return plain(*args, **kwargs)

    return run


def bare(calls):
    """Call collectives again, and wait for each."""
    for plain, args, kwargs in calls:
        work = plain(*args, **kwargs)
        if work is not None:
            work.wait()


def main():
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=20)
    calls = parser.parse_args().calls
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    ranks, tell = dist.get_world_size(), dist.get_rank() == 0
    if tell:
        print(f"{torch.cuda.get_device_name()}, {ranks} ranks, forward + backward, microseconds")
        print("more: for a collective, over a bare call of it; limit", LIMIT)
        columns = "one rank", "ranks", "collectives", "bare", "more"
        print(f"{'recipe':8} {'module':18}", *(f"{name:>11}" for name in columns))
    for name, recipe in RECIPES.items():
        for kind, over, alone, features in modules(ranks):

            def step(module, x, recipe=recipe):
                with te.autocast(enabled=recipe is not None, recipe=recipe):
                    out = module(x)
                out.backward(torch.empty_like(out))

            of_rank = ROWS if kind == "Linear, row" else ROWS // ranks
            x, whole = [
                torch.randn(rows, 1, features, device="cuda", dtype=torch.bfloat16)
                for rows in (of_rank, ROWS)
            ]
            x.requires_grad_()
            whole.requires_grad_()
            for _ in range(3):
                step(over, x)
                step(alone, whole)
            noted = []
            with replaced(partial(noting, noted)):
                step(over, x)
            of_one = microseconds(lambda m=alone, t=whole: step(m, t), calls)
            of_all = microseconds(lambda m=over, t=x: step(m, t), calls)
            by_itself = microseconds(lambda c=tuple(noted): bare(c), calls)
            count = len(noted)
            more = (of_all - of_one - by_itself) / count
            if tell:
                row = f"{of_one:11.1f} {of_all:11.1f} {count:11d} {by_itself / count:11.1f}"
                print(f"{name:8} {kind:18} {row} {more:11.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
