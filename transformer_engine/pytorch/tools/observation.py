# SPDX-License-Identifier: Apache-2.0
"""`observe`: look at what the FP8 casts and GEMMs of a step really do, without changing it.

Inside the block a function is told of each stage of a module's plans (`staged.Observer`): the
same stages over the same buffers, so the numbers are the same bit for bit. Between the stages the
values that are about to be cast, and the scale that they were cast with, are there to be counted.
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from transformer_engine import _core
from transformer_engine.pytorch.modes import graph_task
from transformer_engine.pytorch.module.composed import ComposedModule
from transformer_engine.pytorch.staged import StageBuffers
from transformer_engine.pytorch.tools.skip import check_model

_LIMITS = {
    torch.float8_e4m3fn: ("e4m3", 464.0, 2.0**-10),
    torch.float8_e5m2: ("e5m2", 61440.0 - 2.0**-8, 2.0**-17),
}
"""Name, largest magnitude that rounds to the largest value, largest magnitude that rounds to 0."""

CASTS = ("input", "weight", "grad_output")
"""Tensors of a linear layer that are cast."""
_GEMMS = ("gemm_output", "gemm_grad_input", "gemm_grad_weight")


def count_cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Count what a cast of values (of any shape) to FP8, by one fp32 scale, loses at both ends.

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
        self.dtype = _LIMITS[dtype][0]  # "e4m3" or "e5m2"
        self.values = 0  # elements that were cast
        self.saturated: Any = 0  # how many of them were, as a tensor; see `count_cast`
        self.flushed: Any = 0
        self.amax: Any = None
        self.scale: Any = None  # of the last cast

    def add(self, values: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        """Count one cast."""
        if values.numel() == 0:
            return
        saturated, flushed, amax = count_cast(values, scale, dtype)
        self.values += values.numel()
        self.saturated = self.saturated + saturated
        self.flushed = self.flushed + flushed
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        self.scale = scale.clone()


class ModuleRecord:
    """What one module did in a block; called for every stage of its plans."""

    def __init__(self, module: ComposedModule) -> None:
        self._module = module
        # By tensor: "input", "weight", "grad_output", with the prefix of the part.
        self.casts: dict[str, CastRecord] = {}
        # By stage: how many GEMMs of which operand dtypes the library counted, "e4m3 x e5m2".
        self.gemms: dict[str, Counter[str]] = {}
        self._before: Any = None  # of the stage that is running

    def __call__(self, stage: str, operator: str, buffers: StageBuffers, done: bool) -> None:
        """Record what a stage does."""
        prefix = next((p for p in self._module.PARTS if p and stage.startswith(p)), "")
        name = stage.removeprefix(prefix)
        if name in _GEMMS:
            self._count_gemm(stage, operator, done)
            return
        tensor = name.removeprefix("quantize_")
        again = tensor != "grad_output" and graph_task() != -1
        if name == tensor or tensor not in CASTS or again:  # a recompute casts the same once more
            return
        with torch.no_grad():
            if not done:
                self._before = self._values(prefix, tensor, operator, buffers)
                return
            values, self._before = self._before, None
            pair = buffers.get(f"{prefix}{tensor}_scales")
            if pair is None:  # it sums columns for the bias gradient, and casts nothing
                return
            data = buffers.get(f"{prefix}{tensor}_row")
            dtype = (buffers[f"{prefix}{tensor}_column"] if data is None else data).dtype
            record = self.casts.setdefault(prefix + tensor, CastRecord(dtype))
            record.add(values, pair[1], dtype)

    def _count_gemm(self, stage: str, operator: str, done: bool) -> None:
        counts = self.gemms.setdefault(stage, Counter())
        if operator == "external":
            counts["a Python function"] += done
        elif not done:
            self._before = _core.counters()
        else:
            for counter, count in _core.counters().items():
                kind, _, *operands = counter.split(".")
                if kind == "gemm" and count > self._before.get(counter, 0):
                    counts[" x ".join(operands)] += count - self._before.get(counter, 0)

    def _values(self, prefix: str, tensor: str, operator: str, buffers: StageBuffers) -> Tensor:
        """What a stage casts, as the operator computes it before the cast: in fp32."""
        module = self._module
        if operator == "norm":
            parameters = buffers["gamma"], buffers.get("beta")
            return module._normed(buffers["input"], *parameters, torch.float32)
        if operator in ("activation", "activation_backward"):
            kind, limit, alpha, offset = module.activation_spec
            before = buffers["fc1_output"]
            keywords = {"kind": kind, "limit": limit, "alpha": alpha, "linear_offset": offset}
            if operator == "activation":
                features = module._sizes()[1][0]
                out = before.new_empty(*before.shape[:-1], features, dtype=torch.float32)
                _core.activation(before, wide=out, **keywords)
            else:
                out = torch.empty(before.shape, dtype=torch.float32, device=before.device)
                grad = buffers["grad_fc2_input"]
                _core.activation_backward(grad, before, wide=out, **keywords)
            return out
        written = {"fc2_input": "fc2_input", "fc1_grad_output": "grad_fc1_output"}
        sources = (written.get(prefix + tensor, ""), f"{prefix}{tensor}")
        if tensor == "input" and module.NORM is not None:
            sources = (*sources, "norm_output")
        sources = (*sources, tensor)
        return next(buffers[name] for name in sources if name in buffers)


class observe:  # noqa: N801 - reads as what it does, as `autocast`
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

    def __enter__(self) -> "observe":
        modules = [m for m in self._model.modules() if isinstance(m, ComposedModule)]
        if any(module._observer is not None for module in modules):
            raise RuntimeError("observe: a module of the model is being observed already")
        self.records = {module: ModuleRecord(module) for module in modules}
        for module, record in self.records.items():
            module.observe_stages(record)
        return self

    def __exit__(self, *exception: Any) -> None:
        for module in self.records:
            module.observe_stages(None)
