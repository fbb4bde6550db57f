# SPDX-License-Identifier: Apache-2.0
"""`observe`: look at what the FP8 casts and GEMMs of a step really do, without changing it.

Inside the block a function is told of each stage of a module's plans (`stages.Observer`): the
same stages over the same buffers, so the numbers are the same bit for bit. Between the stages the
values that are about to be cast, and the scale that they were cast with, are there to be counted.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from transformer_engine import _core
from transformer_engine.common.contexts import Context
from transformer_engine.common.graphs import forms_of
from transformer_engine.common.operand_casts import OperandCast
from transformer_engine.pytorch.execution.stages import StageBuffers
from transformer_engine.pytorch.module.linear_base import LinearBase
from transformer_engine.pytorch.tools.scale_matrix import scale_matrix, scaling_mode
from transformer_engine.pytorch.tools.skip import check_model
from transformer_engine.pytorch.torchside.modes import graph_task

_LIMITS = {
    torch.float8_e4m3fn: ("e4m3", 464.0, 2.0**-10),
    torch.float8_e5m2: ("e5m2", 61440.0 - 2.0**-8, 2.0**-17),
    torch.uint8: ("e2m1", 7.0, 0.25),  # two to a byte
}
"""Name, largest magnitude that rounds to the largest value, largest magnitude that rounds to 0."""

CASTS = ("input", "weight", "grad_output")
"""Tensors of a linear layer that are cast, by their numbers as operands of a node."""
INPUT, WEIGHT, GRAD, *_ = range(_core.OPERAND_ROLES)
STEPS = {name: number for number, name in enumerate(_core.LINEAR_STAGES)}
"""Numbers of the stages of a linear layer."""
_ROLES = {STEPS[f"quantize_{name}"]: role for role, name in enumerate(CASTS)}
_GEMMS = {STEPS[name] for name in ("gemm_output", "gemm_grad_input", "gemm_grad_weight")}


def count_cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Count what a cast of values (of any shape) to FP8 loses at both ends; scales broadcast.

    Returns how many values come out smaller than rounding makes them, as the format ends; how many
    that are not 0 come out as 0; the largest magnitude. On the device of `values`, not waited for.
    """
    _, largest, smallest = _LIMITS[dtype]
    values = values.detach().float()
    scaled = (values * scale).abs()
    saturated = (scaled > largest).sum()
    flushed = ((scaled <= smallest) & (values != 0.0)).sum()
    return saturated, flushed, values.abs().max()


class CastRecord:
    """The casts of one tensor in a block."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = _LIMITS[dtype][0]  # "e4m3", "e5m2" or "e2m1"
        self.values = 0  # elements that were cast
        self.saturated: Any = 0  # how many of them were, as a tensor; see `count_cast`
        self.flushed: Any = 0
        self.amax: Any = None
        self.scale: Any = None  # of the last cast; the smallest one

    def add(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        """Count one cast."""
        if values.numel() == 0:
            return
        saturated, flushed, amax = count_cast(values, scale, dtype)
        self.values += values.numel()
        self.saturated = self.saturated + saturated
        self.flushed = self.flushed + flushed
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        self.scale = scale.min()


class ModuleRecord:
    """Record of one module in a block; called for every stage of its plans."""

    def __init__(self) -> None:
        # By part of the module and number of the operand.
        self.casts: dict[tuple[int, int], CastRecord] = {}
        # By part and number of the stage: how many GEMMs of which operand dtypes the library
        # counted, "e4m3 x e5m2".
        self.gemms: dict[tuple[int, int], Counter[str]] = {}
        self._before: Any = None  # of the stage that is running

    def __call__(self, stage: _core.Stage, buffers: StageBuffers, done: bool) -> None:
        """Record what a stage does."""
        if stage.step < 0:
            return
        part = buffers.plan.graph.numbers_of(_core.NODE_LINEAR).index(stage.node)
        if stage.step in _GEMMS:
            self._count_gemm(part, stage, done)
            return
        role = _ROLES.get(stage.step)
        # A recompute casts the same once more.
        if role is None or (role != GRAD and graph_task() != -1):
            return
        with torch.no_grad():
            if not done:
                self._before = _values(stage, role, buffers)
                return
            values, self._before = self._before, None
            operand = stage.node * _core.OPERAND_ROLES + role
            forms = forms_of(operand, buffers.plan.links)
            row, column, *scales = (buffers.linked(*form) for form in forms)
            if all(found is None for found in scales):  # it sums columns for the bias gradient
                return
            dtype = (column if row is None else row).dtype
            record = self.casts.setdefault((part, role), CastRecord(dtype))
            node = buffers.plan.graph.nodes[stage.node]
            cast = OperandCast(*node.quantization.casts[role])
            values = values.flatten(0, -2)
            if scales[0] is not None:
                scale = scale_matrix(cast, scales[0], *values.shape, *scales[2:3])
            else:
                lies_in_rows = scaling_mode(cast) == _core.SCALING_MXFP8
                turned = scales[1].t() if lies_in_rows else scales[1]
                scale = scale_matrix(cast, turned, *values.t().shape, *scales[3:4]).t()
            record.add(values, scale, dtype)

    def _count_gemm(self, part: int, stage: _core.Stage, done: bool) -> None:
        counts = self.gemms.setdefault((part, stage.step), Counter())
        if stage.external:
            counts["a Python function"] += done
        elif not done:
            self._before = _core.counters()
        else:
            now, before = _core.counters(), self._before
            new = {name: n - before.get(name, 0) for name, n in now.items()}
            # A format that no kernel multiplies: the operands were multiplied out.
            how = "".join(
                f" (emulated {name.removeprefix('emulated.')})"
                for name, n in new.items()
                if name.startswith("emulated.") and n > 0
            )
            for name, n in new.items():
                kind, _, *operands = name.split(".")
                if kind == "gemm" and n > 0:
                    counts[" x ".join(operands) + how] += n


def _values(stage: _core.Stage, role: int, buffers: StageBuffers) -> Tensor:
    """Values that a stage casts, as the operator computes them before the cast: in fp32."""
    graph = buffers.plan.graph
    linear = graph.nodes[stage.node]
    if stage.op == "quantize":
        link = ("gradient", linear.output) if role == GRAD else ("value", linear.inputs[role])
        return buffers.linked(*link)
    # The operator of the node that makes the input, or of the one that reads the output.
    nodes = graph.nodes
    if role == INPUT:
        node = next(node for node in nodes if node.output == linear.inputs[0])
    else:
        node = next(node for node in nodes if node.inputs[0] == linear.output)
    x, *parameters = (None if of < 0 else buffers.linked("value", of) for of in node.inputs)
    options = {"kind": node.variant}
    if stage.op == "norm":
        options |= zip(("gamma", "beta"), parameters, strict=False)
        options["eps"] = node.numbers[0]
        options["zero_centered"] = bool(node.flags & _core.NODE_ZERO_CENTERED)
    else:
        options |= zip(("limit", "alpha", "linear_offset"), node.numbers, strict=False)
    columns = x.shape[-1] if role == GRAD else graph.values[node.output].shape[-1].add
    out = x.new_empty(*x.shape[:-1], columns, dtype=torch.float32)
    if role == GRAD:
        _core.activation_backward(buffers.linked("gradient", node.output), x, wide=out, **options)
    else:
        getattr(_core, stage.op)(x, wide=out, **options)
    return out


class observe(Context):  # noqa: N801 - reads as what it does, as `autocast`
    """Record what the casts and GEMMs of a model do inside a ``with`` block, for `report`.

    Forward and backward belong inside the block. Every FP8 cast is looked at exactly: how much of
    the tensor saturates and how much becomes zero, under the scale that it was cast with. Numbers,
    scaling state and random state are those of a step without it. It waits for nothing, but runs
    several times longer than the step itself, and counts the operators that it looks with
    (`te.counters`). Calls inside graphs of `torch.compile` are not seen.

    Parameters
    ----------
    model : Module
        A model with modules of this package.

    Attributes
    ----------
    records : dict of Module to ModuleRecord
        What was seen, by module.

    Raises
    ------
    TypeError
        `model` is no module.
    RuntimeError
        A module of it is being observed already.
    """

    def __init__(self, model: Module) -> None:
        check_model("observe", model)
        self._model = model
        self.records: dict[Module, ModuleRecord] = {}

    def _enter(self) -> "observe":
        modules = [m for m in self._model.modules() if isinstance(m, LinearBase)]
        if any(module._observer is not None for module in modules):
            raise RuntimeError("observe: a module of the model is being observed already")
        self.records = {module: ModuleRecord() for module in modules}
        self._undo_by(self._stop)
        for module, record in self.records.items():
            module.observe_stages(record)
        return self

    def _stop(self) -> None:
        for module in self.records:
            module.observe_stages(None)
