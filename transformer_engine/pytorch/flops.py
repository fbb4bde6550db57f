# SPDX-License-Identifier: Apache-2.0
"""What `torch.utils.flop_counter.FlopCounterMode` counts for the operators of this package.

2 m n k for each GEMM that a plan runs, on the sizes of the layer, not on what FP8 pads: as many as
the same layer of `torch.nn` has. Everything else counts 0, as it does for torch's own operators.

The counter's module is not imported for it (on a GPU it loads a compiler): formulas are handed over
as soon as it is there and a plan is made or watched.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.plan_text import plan_of, read_text
from transformer_engine.pytorch.modes import active_modes

__all__ = ["offer_formulas"]

_COUNTER = "torch.utils.flop_counter"


def _flops_of_run(
    plan: str,
    slot_fwd: int,
    slot_bwd: int,
    inputs: list[Tensor],
    saved: Tensor | None,
    rows: int,
    state: Sequence[Tensor] = (),
    **results: Any,
) -> int:
    """FLOPs of ``transformer_engine::run``; takes its arguments and the keyword `out_val`."""
    del slot_fwd, slot_bwd, saved, state, results
    if rows == -1:
        rows = math.prod(inputs[0].shape[:-1])
    graph = read_text(plan)
    stages = _core.plan_describe(plan_of(plan))["stages"]
    gemms = [node for _, operator, node, _ in stages if operator == "gemm"]
    return rows * sum(2 * math.prod(graph.weight_sizes(node)) for node in gemms)


def offer_formulas() -> None:
    """Hand the formulas to the counter's module, if it is loaded, and to counters that run."""
    counter = sys.modules.get(_COUNTER)
    registry = getattr(counter, "flop_registry", None)
    if registry is None:
        return
    ours = torch.ops.transformer_engine
    operators = (ours.run, ours.run_with_state)
    if operators[0] not in registry:
        counter.register_flop_formula(operators, get_raw=True)(_flops_of_run)
    for mode in active_modes():  # a counter copies the registry when it is made
        owner = getattr(mode, "counter", None)
        if isinstance(owner, counter.FlopCounterMode):
            for operator in operators:
                owner.flop_registry.setdefault(operator, registry[operator])
