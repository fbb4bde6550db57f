# SPDX-License-Identifier: Apache-2.0
"""`report`: which precision each layer of a model ran in, why, and how its casts fare."""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor
from torch.nn import Module

from transformer_engine import _core
from transformer_engine.common.graphs import LinearSpec
from transformer_engine.common.operand_casts import OperandCast
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.module.call import LastCall
from transformer_engine.pytorch.module.linear_base import LinearBase
from transformer_engine.pytorch.module.norm import AffineNorm
from transformer_engine.pytorch.tensor.recipes import format_of
from transformer_engine.pytorch.tools.conversion import counterpart_of
from transformer_engine.pytorch.tools.counts import scales
from transformer_engine.pytorch.tools.observation import (
    CASTS,
    GRAD,
    STEPS,
    WEIGHT,
    ModuleRecord,
    count_cast,
    observe,
)
from transformer_engine.pytorch.tools.scale_matrix import (
    ONE_SCALE,
    element_name,
    emulation_of,
    scale_matrix,
)
from transformer_engine.pytorch.tools.skip import check_model
from transformer_engine.pytorch.torchside.device import on_cuda, without_kernels

_GEMMS = {
    STEPS["gemm_output"]: "output",
    STEPS["gemm_grad_input"]: "input gradient",
    STEPS["gemm_grad_weight"]: "weight gradient",
}


class GemmReport(NamedTuple):
    """One GEMM of a linear layer."""

    name: str  # "output", "input gradient" or "weight gradient"
    precision: str | None
    """dtypes of its operands, "e4m3 x e4m3"; None where it did not run, or torch ran it."""
    reason: str | None  # why it was not in FP8, or did not run; None where it was
    count: int | None  # how often it ran in the observed block; None without one


class TensorReport(NamedTuple):
    """One tensor that is cast to FP8. What is not known is None."""

    name: str  # "input", "weight" or "grad_output"
    dtype: str  # "e4m3", "e5m2" or "e2m1"
    amax: float | None  # largest magnitude: of the observed block, else of the amax history
    scale: float | None  # of the last observed cast; else the one that the next cast uses
    saturated: float | None  # share, 0 to 1, of the values that lie beyond the format's range
    flushed: float | None  # likewise of those that are not 0 and become 0


class LayerReport(NamedTuple):
    """One layer: a linear layer, a norm or an attention."""

    name: str  # its path; that of a part of a `LayerNormMLP` ends in ``.fc1`` or ``.fc2``
    kind: str  # the class of its module
    shape: tuple[int, ...]  # of the weight; empty where there is none
    gemms: tuple[GemmReport, ...]  # of a linear layer
    tensors: tuple[TensorReport, ...]
    """Casts to FP8; empty where its last call did not run in FP8."""
    note: str | None
    """Further facts: of a norm its precision, of an attention its backend."""


def report(
    model: Module, observed: observe | None = None, *, file: TextIO | None = None
) -> list[LayerReport]:
    """Print which precision every layer ran in, and why, and return it as data.

    Without `observed`, precisions are those of the plans of each layer's last call, amaxes and
    scales those of delayed scaling's state, and shares are known of weights alone. With it they are
    what the library counted and measured in the block::

        with te.observe(model) as seen:
            step()
        te.report(model, seen)

    Parameters
    ----------
    model : Module
        The model, after a step.
    observed : observe, optional
        A block in which it ran.
    file : text file, optional
        Where to print; standard output where None.

    Returns
    -------
    list of LayerReport
        Linear layers, norms and attentions of this package in the order of the model, and the
        linear layers of `torch.nn` among them.

    Raises
    ------
    TypeError
        `model` is no module, or `observed` no observation.
    """
    check_model("report", model)
    if observed is not None and not isinstance(observed, observe):
        kind = type(observed).__name__
        raise TypeError(f"report: observed: {kind}, expected what te.observe(model) gives")
    layers: list[LayerReport] = []
    for path, module in model.named_modules():
        if isinstance(module, LinearBase):
            layers += _linear_layers(path, module, observed)
        elif isinstance(module, AffineNorm):
            layers.append(_norm(path, module))
        elif isinstance(module, DotProductAttention):
            layers.append(_attention(path, module))
        elif isinstance(module, torch.nn.Linear):
            layers.append(_foreign(path, module))
    devices = dict.fromkeys(p.device for p in model.parameters())
    lines = [*_text(layers, observed is not None), *filter(None, map(without_kernels, devices))]
    print("\n".join(lines), file=file or sys.stdout)
    return layers


# ---- linear layers -------------------------------------------------------------------------------


def _linear_layers(
    path: str, module: LinearBase, observed: observe | None
) -> Iterator[LayerReport]:
    ran = module._last_call
    record = None if observed is None else observed.records.get(module)
    for part, prefix in enumerate(module.LINEARS):
        name = prefix.removesuffix("_")
        full = f"{path}.{name}" if path and name else path or name
        columns, rows = module._sizes()[part]
        weights = module._linear_tensors()[part].weights
        if observed is not None and (record is None or not record.gemms):
            why = "not called in the observed block, unless inside a compiled graph"
            gemms, tensors = _no_gemms(why), ()
        elif ran is None:
            gemms, tensors = _no_gemms("not called yet"), ()
        else:
            spec = ran.plans.parts[part]
            gemms = tuple(_gemms(part, ran, spec, weights, record))
            tensors = ()
            if record is not None:
                tensors = tuple(_measured(part, record))
            elif ran.plans.quantized:
                tensors = tuple(_known(module, prefix, ran, spec, weights))
        yield LayerReport(full, type(module).__name__, (rows, columns), gemms, tensors, None)


def _no_gemms(reason: str) -> tuple[GemmReport, ...]:
    return tuple(GemmReport(name, None, reason, None) for name in _GEMMS.values())


def _operators(ran: LastCall, part: int) -> dict[int, str]:
    """Operator of each stage of a part in the plans of a call, by its number."""
    plans = [plan for plan in (ran.plans.forward, ran.plans.backward, ran.plans.wgrad) if plan]
    node = plans[0].graph.numbers_of(_core.NODE_LINEAR)[part]
    stages = (stage for plan in plans for stage in plan.stages)
    return {s.step: "external" if s.external else s.op for s in stages if s.node == node}


def _gemms(
    part: int,
    ran: LastCall,
    spec: LinearSpec,
    weights: tuple[Tensor, ...],
    record: ModuleRecord | None,
) -> Iterator[GemmReport]:
    """Each GEMM: as it was counted, else as the plans of the last call have it."""
    operators = _operators(ran, part)
    for stage, name in _GEMMS.items():
        operator = operators.get(stage)
        counted = None if record is None else record.gemms.get((part, stage))
        if counted:
            precision = ", ".join(counted)
            fp8 = all(set(p.split(" x ")) <= {"e4m3", "e5m2"} for p in counted)
            reason = None if fp8 else ran.reason or "not in FP8 in some calls"
            if any("(emulated" in p for p in counted):
                reason = _EMULATED
            yield GemmReport(name, precision, reason, sum(counted.values()))
        elif operator is None:
            reason = _why_not(stage, ran, weights)
            yield GemmReport(name, None, reason, None if record is None else 0)
        elif record is not None:
            deferred = spec.flags.weight & _core.VALUE_DEFER and stage == STEPS["gemm_grad_weight"]
            reason = "deferred: backward_dw" if deferred else "did not run in the observed block"
            yield GemmReport(name, None, reason, 0)
        elif operator == "external":
            yield GemmReport(name, "a Python function", "override_stages", None)
        else:
            emulated = ran.plans.quantized and emulation_of(*_pair(stage, spec))
            reason = _EMULATED if emulated else ran.reason
            yield GemmReport(name, _planned(stage, ran, spec, weights), reason, None)


_EMULATED = "no native GEMM: the operands are multiplied out first"


_WIDE = (_core.RECIPE_NONE, _core.RECIPE_EXTERNAL)
"""Recipes of operands that GEMMs read in high precision."""


def _pair(stage: int, spec: LinearSpec) -> tuple[OperandCast, OperandCast]:
    """How the operands of a GEMM are cast."""
    inp, weight, grad = spec.quantization.casts
    if stage == STEPS["gemm_output"]:
        return inp, weight
    return grad, weight if stage == STEPS["gemm_grad_input"] else inp


def _planned(stage: int, ran: LastCall, spec: LinearSpec, weights: tuple[Tensor, ...]) -> str:
    """Operand dtypes of a GEMM that is part of the last call's plans."""
    if ran.plans.quantized:
        pair = _pair(stage, spec)
        if any(cast.recipe not in _WIDE for cast in pair):
            wide = _core.dtype_names()[spec.output]
            names = (
                wide if cast.recipe in _WIDE else element_name(cast.recipe, cast.dtype)
                for cast in pair
            )
            return " x ".join(names) + emulation_of(*pair)
    dtype = _core.dtype_names()[spec.weight]
    tf32 = spec.flags.node & _core.LINEAR_ALLOW_TF32 and on_cuda(weights[0].device)
    return f"{dtype} x {dtype}" + (" (tf32)" if tf32 else "")


def _why_not(stage: int, ran: LastCall, weights: tuple[Tensor, ...]) -> str:
    """Why a call's backward has no such GEMM."""
    if not ran.plans.backward and any(weight.requires_grad for weight in weights):
        return "gradients were off"
    if stage == STEPS["gemm_grad_input"]:
        return "the input needs no gradient"
    if stage == STEPS["gemm_grad_weight"]:
        return "the weight is frozen"
    return "the last call had no such product"


def _known(
    module: LinearBase, prefix: str, ran: LastCall, spec: LinearSpec, weights: tuple[Tensor, ...]
) -> Iterator[TensorReport]:
    """Each tensor that is cast, as far as it is known without a measurement."""
    of_backward = {STEPS["gemm_grad_input"], STEPS["gemm_grad_weight"]}
    casts_grad = of_backward & _operators(ran, module.LINEARS.index(prefix)).keys()
    quantization = spec.quantization
    delayed = any(cast.recipe == _core.RECIPE_DELAYED for cast in quantization.casts)
    state = scales(module) if delayed else {}
    for role, tensor in enumerate(CASTS):
        backward = role == GRAD
        if backward and not casts_grad:
            continue
        cast = quantization.casts[role]
        if cast.recipe in _WIDE:
            continue
        scaling = state.get(prefix + tensor)
        amax, scale = (scaling.amax, scaling.scale) if scaling else (None, None)
        dtype = element_name(cast.recipe, cast.dtype)
        found = TensorReport(tensor, dtype, amax, scale, None, None)
        if role == WEIGHT and not weights[0].is_meta:
            found = _weight(found, cast.dtype, spec, weights)
        yield found


def _measured(part: int, record: ModuleRecord) -> Iterator[TensorReport]:
    """Each tensor that was cast in the observed block."""
    for role, tensor in enumerate(CASTS):
        seen = record.casts.get((part, role))
        if seen is not None and seen.values:
            yield TensorReport(
                tensor,
                seen.dtype,
                float(seen.amax),
                float(seen.scale),
                int(seen.saturated) / seen.values,
                int(seen.flushed) / seen.values,
            )


def _found(weight: Tensor, cast: OperandCast) -> Tensor:
    """The scales that a cast of a weight finds in it, to be multiplied with it."""
    quantizer: Any = format_of(cast).make(cast, weight.device, True)
    quantizer.set_usage(rowwise=True, columnwise=False)
    quantizer.internal = True
    made = quantizer(weight)
    scales = made._scales if cast.recipe in ONE_SCALE else made._rowwise_scale_inv
    return scale_matrix(cast, scales, *weight.shape, getattr(made, "_amax_rowwise", None))


def _weight(
    found: TensorReport, code: int, spec: LinearSpec, weights: tuple[Tensor, ...]
) -> TensorReport:
    """Describe the next cast of a weight, with the scales that it finds; delayed: is given."""
    weight = torch.cat([w.detach() for w in weights])
    if found.scale is None:
        scale = _found(weight, spec.quantization.weight)
    else:
        scale = torch.tensor(found.scale, dtype=torch.float32, device=weight.device)
    saturated, flushed, amax = count_cast(weight, scale, _core.torch_dtype(code))
    return found._replace(
        amax=float(amax),
        scale=float(scale.min()),
        saturated=int(saturated) / weight.numel(),
        flushed=int(flushed) / weight.numel(),
    )


# ---- other layers --------------------------------------------------------------------------------


def _norm(path: str, module: AffineNorm) -> LayerReport:
    note = "computes in fp32, whatever comes in and goes out"
    return LayerReport(path, type(module).__name__, tuple(module.normalized_shape), (), (), note)


def _attention(path: str, module: DotProductAttention) -> LayerReport:
    choice = module._last_call
    note = "not called yet"
    if choice is not None:
        lacks = "; ".join(f"{name}: {why}" for name, why in choice.reasons.items())
        note = f"backend {choice.backend}" + (f" ({lacks})" if lacks else "")
    return LayerReport(path, type(module).__name__, (), (), (), note)


def _foreign(path: str, module: torch.nn.Linear) -> LayerReport:
    """A linear layer of torch: what it ran in is not known here."""
    stays = counterpart_of(module)
    reason = "a layer of torch.nn: te.convert swaps it"
    if isinstance(stays, str):
        reason = f"a layer of torch.nn, which te.convert leaves alone: {stays}"
    weight = module._parameters.get("weight")
    shape = () if weight is None or torch.nn.parameter.is_lazy(weight) else tuple(weight.shape)
    return LayerReport(path, type(module).__qualname__, shape, _no_gemms(reason), (), None)


# ---- text ----------------------------------------------------------------------------------------


def _text(layers: list[LayerReport], observed: bool) -> Iterator[str]:
    """The table: a row for each layer, below it what is not FP8 and why, and the casts."""
    head = ("layer", "kind", "shape", *_GEMMS.values())
    rows = [_row(layer) for layer in layers]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    yield _line(head, widths)
    for layer, row in zip(layers, rows, strict=True):
        yield _line(row, widths)
        if layer.note:
            yield f"    {layer.note}"
        reasons: dict[str, list[str]] = {}
        for gemm in layer.gemms:
            if gemm.reason:
                reasons.setdefault(gemm.reason, []).append(gemm.name)
        for reason, names in reasons.items():
            which = "" if len(names) == len(_GEMMS) else f"{', '.join(names)}: "
            yield f"    {which}{reason}"
        for tensor in layer.tensors:
            yield (
                f"    {tensor.name:11s} {tensor.dtype}  amax {_number(tensor.amax)}  scale "
                f"{_number(tensor.scale)}  saturated {_share(tensor.saturated)}  flushed to zero "
                f"{_share(tensor.flushed)}".rstrip()
            )
    if not observed and any(layer.tensors for layer in layers):
        yield (
            "What is marked - takes an observed step: `with te.observe(model) as seen:` around it, "
            "then te.report(model, seen)."
        )


def _row(layer: LayerReport) -> tuple[str, ...]:
    found = {gemm.name: gemm.precision or "-" for gemm in layer.gemms}
    shape = " x ".join(map(str, layer.shape))
    return (layer.name, layer.kind, shape, *(found.get(name, "") for name in _GEMMS.values()))


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _number(value: float | None) -> str:
    return f"{'-' if value is None else format(value, '.4g'):<9s}"


def _share(value: float | None) -> str:
    return f"{'-' if value is None else format(100.0 * value, '.3g') + '%':<8s}"
