# SPDX-License-Identifier: Apache-2.0
"""What a rank of tests/pytorch/test_plan_collectives.py runs: plans, over its group."""

import torch.distributed as dist
from collective_graphs import Found, linear_graph, part_of, run_plans

from transformer_engine.common.plans import CallPlans
from transformer_engine.pytorch.execution import collectives
from transformer_engine.pytorch.execution.stages import Staged


def linear(device, recipe, way, forms, halves, recompute, problem):
    """Forward and backward of this rank's part."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    graph = linear_graph(recipe, way, ranks, forms=forms, halves=halves, recompute=recompute)

    def functions(plan):
        return Staged(collectives.functions_of(plan, group)).of(plan)

    mine = [t.to(device) for t in part_of(problem, way, ranks, dist.get_rank())]
    return Found(*(t.cpu() for t in run_plans(CallPlans(graph), functions, *mine)))


def group_of_another_size(device):
    """What a group of one rank says to a plan for two."""
    del device
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    plans = CallPlans(linear_graph("none", "row", dist.get_world_size()))
    try:
        collectives.functions_of(plans.forward, groups[dist.get_rank()])
    except ValueError as error:
        return str(error)
    return None


def rows_that_are_no_tiles(device, problem):
    """What a gather of forms says whose scales are padded."""
    ranks = dist.get_world_size()
    plans = CallPlans(linear_graph("block", "column-sp", ranks, forms=True))

    def functions(plan):
        return Staged(collectives.functions_of(plan, dist.group.WORLD)).of(plan)

    x, w, grad, scales = (
        t.to(device) for t in part_of(problem, "column-sp", ranks, dist.get_rank())
    )
    try:
        run_plans(plans, functions, x[:6], w, grad[: 6 * ranks], scales)
    except ValueError as error:
        return str(error)
    return None
