# SPDX-License-Identifier: Apache-2.0
"""Formulas of `torch.utils.flop_counter.FlopCounterMode` for the operators of this package.

2 m n k for each GEMM that a plan runs, on the sizes of the layer, not on what FP8 pads: as many as
the same layer of `torch.nn` has. Attention counts as in torch's kernels on a GPU: two products
of all queries and keys forward, five backward. Everything else counts 0, as torch's own operators;
what Python functions of a plan run is counted by itself.

The counter's module is not imported for it (on a GPU it loads a compiler): formulas are handed over
as soon as it is there and an operator is defined or watched.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.plan_text import PlanGraph, plan_of, read_text
from transformer_engine.common.plans import sizes_of
from transformer_engine.pytorch.torchside.modes import active_modes

_COUNTER = "torch.utils.flop_counter"


def _flops_of_run(
    plan: str, slots: Any, inputs: list[Tensor], saved: Any, rows: int, *others: Any, **results: Any
) -> int:
    """FLOPs of ``transformer_engine::run`` and ``run_with_state_<n>``, from their arguments."""
    del slots, saved, others, results
    graph, made = read_text(plan), plan_of(plan)
    sizes = sizes_of(made, [tensor.shape for tensor in inputs], rows)
    return sum(_flops_of_stage(graph, stage, sizes) for stage in made.stages if not stage.external)


def _flops_of_stage(graph: PlanGraph, stage: _core.Stage, sizes: list) -> int:
    operator, node = stage.op, stage.node
    if operator == "gemm":
        out_features, in_features = graph.weight_sizes(node)
        return 2 * sizes[graph.rows_symbol(node)] * out_features * in_features
    if operator not in _PRODUCTS:
        return 0
    queries, keys = (sizes[graph.rows_symbol(node, at) :][:3] for at in (0, 1))
    fields = graph.nodes[node]
    heads, of_query = fields.slices[0].heads, fields.slices[0].channels
    of_value = fields.slices[2].channels
    if fields.flags & _core.NODE_PACKED:  # as if each had as many keys as the longest may have
        pairs = queries[0] * sizes[_core.SYMBOL_MAX_KEYS]
    else:
        sequence_first = bool(fields.flags & _core.NODE_SEQUENCE_FIRST)
        pairs = queries[1] * queries[2] * keys[1:][not sequence_first]
    over_keys, over_values = _PRODUCTS[operator]
    return 2 * heads * pairs * (over_keys * of_query + over_values * of_value)


_PRODUCTS = {"attention": (1, 1), "attention_backward": (3, 2)}
"""How many products each operator makes over the channels of keys, and over those of values."""


FORMULAS = {"run": _flops_of_run}
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
