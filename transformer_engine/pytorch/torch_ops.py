# SPDX-License-Identifier: Apache-2.0
"""The native entry points as torch operators, for `torch.compile`.

Eager code calls `_core` directly. While a graph is traced, the same plans run behind two operators
of fixed arity whose fake kernels evaluate the plan's sizes on symbolic numbers. An operator that
mutates and returns a list can not be functionalised, so absent results are empty tensors.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core

__all__ = [
    "OUTPUTS",
    "as_constant",
    "constant_in_graphs",
    "define",
    "extent_value",
    "run",
    "run_native",
    "run_traced",
    "scaling_update",
    "shapes",
]

OUTPUTS = 9
"""Outputs of `transformer_engine::run` before the packed saved tensor."""

_LIBRARY = torch.library.Library("transformer_engine", "DEF")
_LIBRARY.define(
    "run(int plan, int slot_fwd, int slot_bwd, Tensor[] inputs, Tensor(a!)[] state, Tensor? saved, "
    "SymInt rows) -> (" + ", ".join(["Tensor"] * (OUTPUTS + 1)) + ")"
)
_LIBRARY.define(
    "scaling_update(Tensor(a!) scale, Tensor(b!) history, float fp8_max, bool most_recent) -> ()"
)


def constant_in_graphs(function: Callable) -> Callable:
    """Run a function while a graph is traced and keep its result as a constant (decorator).

    What `torch.compiler.assume_constant_result` does, which imports the whole compiler: a second.
    """
    function._dynamo_marked_constant = True
    return function


def as_constant(number: float) -> float:
    """A float for a function that is `constant_in_graphs`.

    ``torch.compile(dynamic=True)`` makes symbols of the floats it meets; their text is a constant.
    """
    return float.fromhex(number.hex())


def define(
    schema: str, implementation: Callable, fake: Callable, tags: tuple[torch.Tag, ...] = ()
) -> None:
    """Make a native function an operator ``torch.ops.transformer_engine.<name>``.

    Parameters
    ----------
    schema : str
        Name, arguments and results. At least one argument is a tensor: it says on which device to
        run.
    implementation : callable
        Runs the function on tensors of the CPU or of a CUDA device.
    fake : callable
        Gives empty results of the right shapes and dtypes.
    tags : tuple of torch.Tag
        What a compiler must know.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=tags)
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, device)
    torch.library.register_fake(f"transformer_engine::{name}", fake, lib=_LIBRARY)


@functools.cache
def _describe(plan: int) -> dict:
    return _core.plan_describe(plan)


def extent_value(extent: tuple[int, int, int], rows: Any) -> Any:
    """Multiply * roundup(rows, align) + add, on integers or symbolic ones."""
    multiply, align, add = extent
    if multiply == 0:
        return add
    padded = rows if align == 1 else (rows + align - 1) // align * align
    return multiply * padded + add


def shapes(plan: int, leading: Any, rows: Any) -> tuple[list[tuple[torch.dtype, list]], Any]:
    """Shapes of what a plan makes, on integers or symbolic ones.

    Parameters
    ----------
    plan : int
        Plan id.
    leading : sequence of int or SymInt
        Leading dims of the first input.
    rows : int or SymInt
        Their product.

    Returns
    -------
    outputs : list of (torch.dtype, list)
        dtype and shape of each output, in plan order.
    saved : int or SymInt
        Bytes of the packed saved tensor; 0: none.
    """
    described = _describe(plan)
    outputs = []
    for name, role, code, lead, extents, *_ in described["buffers"]:
        del name
        if role != "output":
            continue
        if lead:
            gather = extents[0][0]
            first = [gather * leading[0], *leading[1:]] if leading else []
            shape = [*first, extent_value(extents[1], rows)]
        else:
            shape = [extent_value(extent, rows) for extent in extents]
        outputs.append((_core.torch_dtype(code), shape))
    saved = (
        extent_value(described["saved_bytes"], rows) if described["kind"].endswith("forward") else 0
    )
    return outputs, saved


def run_native(
    plan: int, slots: tuple[int, int], tensors: list[Tensor], saved: Tensor | None, rows: int = -1
) -> tuple:
    """Run a plan at once; the same arguments and results as `run`, inputs and state in one list."""
    if rows >= 0:  # only a plan whose inputs have no leading dims is told
        return _core.run(plan, *slots, *tensors, saved, rows)
    if saved is not None:
        return _core.run(plan, *slots, *tensors, saved)
    return _core.run(plan, *slots, *tensors)


def _run(
    plan: int,
    slot_fwd: int,
    slot_bwd: int,
    inputs: list[Tensor],
    state: list[Tensor],
    saved: Tensor | None,
    rows: int,
) -> tuple[Tensor, ...]:
    *outputs, packed = run_native(plan, (slot_fwd, slot_bwd), [*inputs, *state], saved, rows)
    absent = OUTPUTS - len(outputs) + (packed is None)
    padding = [inputs[0].new_empty(0) for _ in range(absent)]
    if packed is None:
        return (*outputs, *padding)
    return (*outputs, *padding, packed)


def _run_fake(
    plan: int,
    slot_fwd: int,
    slot_bwd: int,
    inputs: list[Tensor],
    state: list[Tensor],
    saved: Tensor | None,
    rows: Any,
) -> tuple[Tensor, ...]:
    del slot_fwd, slot_bwd, state, saved
    leading = inputs[0].shape[:-1]
    if rows == -1:
        rows = math.prod(leading)
    outputs, packed = shapes(plan, leading, rows)
    made = [inputs[0].new_empty(shape, dtype=dtype) for dtype, shape in outputs]
    made += [inputs[0].new_empty(0) for _ in range(OUTPUTS - len(made))]
    saves = isinstance(packed, torch.SymInt) or packed > 0
    made.append(inputs[0].new_empty(packed, dtype=torch.uint8) if saves else inputs[0].new_empty(0))
    return tuple(made)


def _scaling_update(scale: Tensor, history: Tensor, fp8_max: float, most_recent: bool) -> None:
    _core.scaling_update(scale, history, fp8_max, most_recent)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("run", _run, _device)
    _LIBRARY.impl("scaling_update", _scaling_update, _device)
torch.library.register_fake("transformer_engine::run", _run_fake, lib=_LIBRARY)
torch.library.register_fake("transformer_engine::scaling_update", lambda *_: None, lib=_LIBRARY)


def run(
    plan: int,
    slots: tuple[int, int],
    inputs: list[Tensor],
    state: list[Tensor],
    saved: Tensor | None = None,
    rows: Any = -1,
) -> tuple:
    """Run a plan, in eager mode or in a graph being traced.

    Parameters
    ----------
    plan : int
        Plan id.
    slots : tuple of int
        First slot of the module in the forward and in the backward chunk.
    inputs : list of Tensor
        What the plan reads: inputs, parameters and scales, in plan order.
    state : list of Tensor
        What it writes besides outputs: amax history, main gradient, in plan order.
    saved : Tensor, optional
        Packed saved tensor of the forward, for a plan that reads it.
    rows : int
        Product of the leading dims; -1 where the first input has them.

    Returns
    -------
    tuple of Tensor
        Outputs in plan order, then the packed saved tensor or None. In a traced graph absent ones
        are empty tensors and there are always `OUTPUTS` + 1.
    """
    if torch.compiler.is_compiling():
        return run_traced(plan, slots, inputs, state, saved, rows)
    return run_native(plan, slots, [*inputs, *state], saved, rows)


def run_traced(
    plan: int,
    slots: tuple[int, int],
    inputs: list[Tensor],
    state: list[Tensor],
    saved: Tensor | None,
    rows: Any = -1,
) -> tuple:
    """Put a plan into the graph that is being traced; arguments and results as of `run`."""
    return torch.ops.transformer_engine.run(plan, *slots, inputs, state, saved, rows)


def scaling_update(scale: Tensor, history: Tensor, fp8_max: float, most_recent: bool) -> None:
    """Update a chunk of delayed-scaling slots in place.

    Parameters
    ----------
    scale : Tensor
        [slots] fp32.
    history : Tensor
        [length, slots] fp32.
    fp8_max : float
        Largest FP8 value times 2^-margin.
    most_recent : bool
        The newest amax counts, not the largest of the history.
    """
    if torch.compiler.is_compiling():
        torch.ops.transformer_engine.scaling_update(scale, history, fp8_max, most_recent)
    else:
        _core.scaling_update(scale, history, fp8_max, most_recent)
