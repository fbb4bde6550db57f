# SPDX-License-Identifier: Apache-2.0
"""What a custom call of XLA costs on the CPU, over a jitted program that does nothing.

Microseconds of a call of a jitted program and of waiting for it. The programs that do nothing have
the arguments and results of those with the custom call. The plan is a linear layer under delayed
scaling of one token, whose kernels are in its figure: `run` is what it takes by `_core.run`. So the
limit is the operator's, which copies one number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import torch
from timing import Column, Figure, alternate, parser, start

import transformer_engine.pytorch  # noqa: F401 - hands torch to the extension
from transformer_engine import _core
from transformer_engine.common import graphs
from transformer_engine.common.operand_casts import OperandCast, Quantization
from transformer_engine.common.plan_text import Plan
from transformer_engine.jax.custom_calls import call_operator, call_plan

LIMIT = 15.0  # microseconds
FEATURES = 16
COLUMNS = [
    Column("what", "call", "<28s"),
    Column("us", "us"),
    Column("low_us", "low"),
    Column("high_us", "high"),
    Column("over_us", "over no-op"),
    Column("limit_us", "limit us"),
]


def linear_plan() -> Plan:
    """Make the forward of a linear layer without a bias."""
    dtype = _core.DTYPE_E4M3
    quantization = Quantization(*[OperandCast(_core.RECIPE_DELAYED, dtype)] * 3)
    flags = graphs.LinearFlags(weight=_core.VALUE_PARAMETER)
    part = graphs.LinearSpec(FEATURES, FEATURES, *[_core.DTYPE_F32] * 5, quantization, flags)
    return graphs.call_graph(graphs.CallSpec((part,))).make(_core.DIRECTION_FORWARD)


def steps() -> dict[str, Callable[[], Any]]:
    """The calls by name."""
    plan = linear_plan()
    x, weight = torch.randn(1, FEATURES), torch.randn(FEATURES, FEATURES)
    tensors = [x, weight, torch.ones(4), torch.zeros(1, 4)]
    arrays = [jnp.asarray(tensor.numpy()) for tensor in tensors]
    one = {"output": jax.ShapeDtypeStruct((1, 1), jnp.float32)}
    operator = jax.jit(lambda x: call_operator("cast", one, input=x))
    nothing = jax.jit(lambda *arrays: [array + 0 for array in arrays])
    whole = jax.jit(lambda *arrays: call_plan(plan, arrays))
    single = jnp.ones((1, 1))
    programs = {
        "no-op, 1 array": partial(nothing, single),
        "operator": partial(operator, single),
        "no-op, 4 arrays": partial(nothing, *arrays),
        "plan": partial(whole, *arrays),
    }
    waiting = {name: lambda f=f: jax.block_until_ready(f()) for name, f in programs.items()}
    return waiting | {"run": lambda: _core.run(plan.native, 0, 0, *tensors)}


def microseconds(step: Callable[[], Any], calls: int) -> float:
    """Mean of a call."""
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - begin) / calls * 1e6


def main() -> None:
    """Measure and report."""
    options = parser(__doc__).parse_args()
    report = start("xla_call", options)
    calls, turns = (5, 2) if options.quick else (300, 15)
    made = steps()
    for step in made.values():
        microseconds(step, calls)
    found = alternate({name: partial(microseconds, made[name], calls) for name in made}, turns)
    report.limit("allowed us", LIMIT, "what a custom call may cost over a no-op")
    rows = []
    for name, base in (
        ("no-op, 1 array", None),
        ("operator", "no-op, 1 array"),
        ("no-op, 4 arrays", None),
        ("plan", "no-op, 4 arrays"),
        ("run", None),
    ):
        figure = Figure.of(found[name])
        over = base and Figure.of(a - b for a, b in zip(found[name], found[base], strict=True))
        rows.append(
            {"what": name, "us": figure.median, "low_us": figure.low}
            | {"high_us": figure.high, "over_us": over and over.median}
            | {"limit_us": LIMIT if name == "operator" else None, "figure_us": figure.scaled(1.0)}
        )
    report.table("calls", COLUMNS, rows)
    report.finish()


if __name__ == "__main__":
    main()
