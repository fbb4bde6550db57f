# SPDX-License-Identifier: Apache-2.0
"""What `torch.utils.flop_counter.FlopCounterMode` counts for the operators of this package.

2 m n k for each GEMM that a plan runs, on the sizes of the layer, not on what FP8 pads: as many as
the same layer of `torch.nn` has. Attention counts as in torch's kernels on a GPU: two products
of all queries and keys forward, five backward. Everything else counts 0, as torch's own operators.

The counter's module is not imported for it (on a GPU it loads a compiler): formulas are handed over
as soon as it is there and an operator is defined or watched.
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
    """FLOPs of ``transformer_engine::run`` and ``run_with_state_<n>``, from their arguments."""
    del slot_fwd, slot_bwd, saved, state, results
    if rows == -1:
        rows = math.prod(inputs[0].shape[:-1])
    graph = read_text(plan)
    stages = _core.plan_describe(plan_of(plan))["stages"]
    gemms = [node for _, operator, node, _ in stages if operator == "gemm"]
    return rows * sum(2 * math.prod(graph.weight_sizes(node)) for node in gemms)


def _flops_of_products(of_keys: int, of_values: int, tensors: tuple) -> int:
    """FLOPs of products over the channels of keys and of values; `tensors`: query, key, ..."""
    query, key, value, *_, sequence_first = tensors
    scores = math.prod(query.shape[:3]) * key.shape[0 if sequence_first else 1]
    return 2 * scores * (of_keys * query.shape[3] + of_values * value.shape[3])


def _flops_of_attention(*arguments: Any, **results: Any) -> int:
    del results
    return _flops_of_products(1, 1, arguments)


def _flops_of_attention_backward(
    grad: Tensor, wants_bias: bool, *arguments: Any, **results: Any
) -> int:
    del grad, wants_bias, results
    return _flops_of_products(3, 2, arguments)


FORMULAS = {
    "run": _flops_of_run,
    "attention": _flops_of_attention,
    "attention_backward": _flops_of_attention_backward,
}
"""By name of the operator; those that are defined later, with their definition."""


def offer_formulas() -> None:
    """Hand the formulas to the counter's module, if it is loaded, and to counters that run."""
    counter = sys.modules.get(_COUNTER)
    registry = getattr(counter, "flop_registry", None)
    if registry is None:
        return
    ours, operators = torch.ops.transformer_engine, []
    for name, formula in FORMULAS.items():
        if hasattr(ours, name):  # else its file is yet to be imported
            operators.append(getattr(ours, name))
            if operators[-1] not in registry:
                counter.register_flop_formula(operators[-1], get_raw=True)(formula)
    for mode in active_modes():  # a counter copies the registry when it is made
        owner = getattr(mode, "counter", None)
        if isinstance(owner, counter.FlopCounterMode):
            for operator in operators:
                owner.flop_registry.setdefault(operator, registry[operator])
