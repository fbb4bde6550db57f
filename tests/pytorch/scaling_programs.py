# SPDX-License-Identifier: Apache-2.0
"""What a rank of tests/pytorch/test_scaling_out.py runs: plans over its group, counting bytes."""

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from collective_graphs import run_plans

from transformer_engine.common.plans import CallPlans
from transformer_engine.pytorch.execution import collectives
from transformer_engine.pytorch.execution.stages import Staged

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import scaling_out

WHOLE = {"all_gather_single": 0, "all_gather_into_tensor": 0, "reduce_scatter_single": 1,
         "reduce_scatter_tensor": 1}  # fmt: skip
"""Collectives of torch, by the argument that is the tensor of all ranks."""


def counted(device, columns, outputs, by_rows, rows):
    """Bytes that this rank sends for a layer's forward and backward, and what the tool says."""
    ranks, found, depth = dist.get_world_size(), [], []
    plans = CallPlans(scaling_out.linear_graph(columns, outputs, ranks, by_rows))

    def noting(name, run):
        def noted(*args, **kwargs):
            depth.append(name)  # one may call another
            if len(depth) == 1:
                whole = args[WHOLE[name]]
                found.append(whole.numel() * whole.element_size() * (ranks - 1) // ranks)
            try:
                return run(*args, **kwargs)
            finally:
                depth.pop()

        return noted

    split = (columns // ranks, outputs) if by_rows else (columns, outputs // ranks)
    local, whole = (rows * ranks, rows) if by_rows else (rows, rows * ranks)
    options = {"device": device, "dtype": torch.bfloat16}
    tensors = [torch.randn(*shape, **options) for shape in ((local, split[0]), split[::-1])]
    grad, scales = torch.randn(whole, split[1], **options), torch.ones(256, device=device)
    there = {name: getattr(dist, name) for name in WHOLE if hasattr(dist, name)}
    with mock.patch.multiple(dist, **{n: noting(n, f) for n, f in there.items()}):
        group = dist.group.WORLD
        run_plans(
            plans, lambda plan: Staged(collectives.functions_of(plan, group)).of(plan),
            *tensors, grad, scales,
        )  # fmt: skip
    return sum(found), sum(scaling_out.sent_by(plans, ranks, rows))
