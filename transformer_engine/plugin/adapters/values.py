# SPDX-License-Identifier: Apache-2.0
"""Operators that compute values and cast them: norms, activations, their gradients, softcaps.

They are ``te_norm``, ``te_activation`` and so on, by operators of `transformer_engine_torch`; then
their values are brought into the forms in which a call wants them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.adapters import casts, state
from transformer_engine.plugin.adapters.fields import (
    Choices,
    Fields,
    NotTakenError,
    apart,
    fields_of,
    reads,
    taken,
    written,
)
from transformer_engine.plugin.builtin import ACTIVATIONS
from transformer_engine.pytorch.cpp_extensions.values import matrix

_OWN = ("wide", "amax_partials")
CAST_FIELDS = (*_OWN, *(name for name in fields_of("quantize") if name not in ("input", "noop")))
"""Of operators that cast what they compute."""


def are_cast(fields: Fields) -> bool:
    """Return whether a call wants its values quantized, or their largest magnitude."""
    wanted = "row", "column", "amax", "amax_partials", "row_scales", "column_scales"
    return any(fields[name] is not None for name in wanted)


def asked_for(fields: Fields, shape: tuple[int, int], choices: Choices) -> casts.Place | None:
    """Cast of the values of an implementation: by which quantizer, and where to.

    None: they are asked for as they are. So they are where somebody else casts them, and where a
    call wants more of them than their codes.
    """
    if choices.keys() & casts.OPERATORS or (fields["row"] is None and fields["column"] is None):
        return None
    more = "wide", "amax_partials", "bias_grad"
    if any(fields.get(name) is not None for name in more):
        return None
    return casts.place_of(fields, shape)


def ours(
    run: Callable, shape: Sequence[int], fields: Fields, choices: Choices, *names: str
) -> Tensor:
    """Results in fp32 that this library computes of fields, for the cast or amax of a plug-in."""
    of_amax = fields["amax_partials"] is not None
    cast = are_cast(fields) and not choices.keys().isdisjoint(casts.OPERATORS)
    if not ("compute_amax" in choices if of_amax else cast):
        raise NotTakenError
    made = fields["input"].new_empty(shape, dtype=torch.float32)
    run(wide=made, **{name: fields[name] for name in names})
    return made


def deliver(
    op: str,
    fields: Fields,
    values: Any,
    shape: Sequence[int],
    choices: Choices,
    place: casts.Place | None = None,
) -> None:
    """Put the values that an operator has computed where a call wants them, as it wants them.

    They are of a shape [rows, columns], also where a call wants no more than their casts. An
    implementation that was asked to cast them may have left that to us.
    """
    if place is not None and hasattr(type(values), "_dequantized"):
        casts.settle(fields, place, values)
        return
    if not isinstance(values, Tensor):
        raise TypeError(f"{op}: the result: {type(values).__name__}, expected a tensor")
    rows = matrix(values)
    if tuple(rows.shape) != tuple(shape):
        raise ValueError(f"{op}: the result: shape {tuple(rows.shape)}, expected {tuple(shape)}")
    written(op, "the result", fields["wide"], rows)
    partials = fields["amax_partials"]
    if partials is not None:
        try:
            state.measured(choices, rows, partials)
        except NotTakenError:
            _core.amax(rows, partials)
    sums = fields.get("bias_grad")
    if sums is not None or (are_cast(fields) and partials is None):
        casts.cast_values(rows, fields, choices)


# ---- norms ---------------------------------------------------------------------------------------


_NAMES = {_core.NORM_LAYERNORM: "layernorm", _core.NORM_RMSNORM: "rmsnorm"}
_OF_NORM = "kind gamma beta mean rsigma eps zero_centered statistics_given".split()


def _factor(gamma: Tensor | None, inp: Tensor, zero_centered: bool) -> Tensor:
    """The factors of a norm that has none."""
    if gamma is not None:
        return gamma
    make = torch.zeros if zero_centered else torch.ones
    return make(inp.shape[-1], dtype=inp.dtype, device=inp.device)


@reads("input", *_OF_NORM, *CAST_FIELDS[:-1])
def norm(choices: Choices, fields: Fields) -> None:
    """A norm, cast as asked.

    Values that are cast are asked for in fp32, as this library casts them, with the quantizer that
    does it.
    """
    kind, inp, place = fields["kind"], fields["input"], None
    op = f"{_NAMES.get(kind, 'norm')}_fwd"
    wanted = (None, None) if fields["statistics_given"] else (fields["mean"], fields["rsigma"])
    values: Any = NotImplemented
    if op in choices:
        zero_centered = bool(fields["zero_centered"])
        rows = matrix(inp)
        given = (rows, _factor(fields["gamma"], inp, zero_centered))
        given += (fields["beta"],) if kind == _core.NORM_LAYERNORM else ()
        quantizer, out, otype = None, None, torch.float32
        if not are_cast(fields):
            out, otype = fields["wide"], fields["wide"].dtype
            out = out if out.shape == rows.shape else out.view(rows.shape)
        elif (place := asked_for(fields, tuple(rows.shape), choices)) is not None:
            quantizer, out = place.quantizer, place.output
        options = fields["eps"], out, quantizer, otype, 0, zero_centered
        values = choices[op](*given, *options, out=(out, *wanted))
    if values is NotImplemented:
        made = ours(_core.norm, inp.shape, fields, choices, "input", *_OF_NORM)
        values = made, fields["mean"], fields["rsigma"]
    made, mean, rsigma = values
    written(op, "mu", wanted[0], mean)
    written(op, "rsigma", wanted[1], rsigma)
    deliver(op, fields, made, inp.shape, choices, place)


def _add(op: str, into: Tensor, values: Any, residual: Tensor) -> None:
    """Put a gradient and that of another reader where a call wants their sum, rounded once."""
    fits = isinstance(values, Tensor) and values.shape[-1:] == into.shape[-1:]
    numbers = fits and values.is_floating_point() and values.device == into.device
    if not numbers or values.numel() != into.numel():
        written(op, "dx", into, values)  # which raises
    values = values.reshape(into.shape)
    if values.dtype == residual.dtype == into.dtype:
        torch.add(values, residual, out=into)
    else:
        into.copy_(values.to(torch.float32) + residual)


@reads(
    *("grad_output", "grad_add", "input", "kind", "gamma", "mean", "rsigma", "grad_residual"),
    *("grad_input", "gamma_grad", "beta_grad", "zero_centered"),
)
def norm_backward(choices: Choices, fields: Fields) -> None:
    """The gradients of a norm."""
    kind, inp, residual = fields["kind"], fields["input"], fields["grad_residual"]
    op = f"{_NAMES.get(kind)}_bwd"
    grad, rows = matrix(fields["grad_output"]), matrix(inp)
    if fields["grad_add"] is not None:
        grad = grad + matrix(fields["grad_add"])
    zero_centered = bool(fields["zero_centered"])
    mean = (fields["mean"],) if kind == _core.NORM_LAYERNORM else ()
    statistics = (*mean, fields["rsigma"])
    gamma = _factor(fields["gamma"], inp, zero_centered)
    into, of_beta = fields["grad_input"], (fields["beta_grad"],)
    places = apart(into, grad, rows, residual), fields["gamma_grad"]
    places += of_beta if kind == _core.NORM_LAYERNORM else ()
    more = *statistics, gamma, 0, zero_centered
    found: Any = NotImplemented
    if residual is not None:
        adds = choices.followed(f"{op}_add", op)
        found = adds(grad, rows, matrix(residual), *more, out=places)
    added = found is not NotImplemented
    if not added:
        found = taken(choices[op](grad, rows, *more, out=places))
    if into is not None and residual is not None and not added:
        _add(op, into, found[0], residual)
    else:
        written(op, "dx", into, found[0])
    written(op, "dgamma", fields["gamma_grad"], found[1])
    if fields["beta_grad"] is not None:
        written(op, "dbeta", fields["beta_grad"], found[2])


# ---- activations ---------------------------------------------------------------------------------


_KINDS = tuple(_core.activation_names())
_CLAMPED = "clamped_swiglu"
_NUMBERS = ("limit", "alpha", "linear_offset")


def _numbers(kind: str, fields: Fields) -> tuple | None:
    """Further arguments of an operator; None where it can not be told one."""
    if kind != _CLAMPED:
        return ()
    return (fields["limit"], fields["alpha"]) if fields["linear_offset"] == 1.0 else None


def _made(name: str, choices: Choices, fields: Fields, kind: str, *tensors: Tensor) -> Any:
    """Call the operator `name`; NotImplemented where nobody takes it."""
    if name not in choices:
        return NotImplemented
    numbers = _numbers(kind, fields)
    if numbers is None:
        choices.unexpressed(name)
    return choices[name](*tensors, None, *numbers, out=(_place(fields, *tensors),))


def _place(fields: Fields, *read: Tensor) -> Tensor | None:
    """Where the values of a call go; None where they are cast, too."""
    return None if are_cast(fields) else apart(fields["wide"], *read)


@reads("input", "kind", *CAST_FIELDS[:-1], *_NUMBERS)
def activation(choices: Choices, fields: Fields) -> None:
    """An activation, cast as asked, from the dtype in which the implementation returns it."""
    kind, inp = _KINDS[fields["kind"]], fields["input"]
    made = _made(kind, choices, fields, kind, inp)
    shape = inp.shape[0], inp.shape[1] // (2 if kind.endswith("glu") else 1)
    if made is NotImplemented:
        made = ours(_core.activation, shape, fields, choices, "input", "kind", *_NUMBERS)
    deliver(kind, fields, made, shape, choices)


@reads("grad_output", "input", "kind", *CAST_FIELDS, *_NUMBERS)
def activation_backward(choices: Choices, fields: Fields) -> None:
    """The gradient of an activation, cast as asked, and its column sums."""
    kind, inp, grad = _KINDS[fields["kind"]], fields["input"], fields["grad_output"]
    name, sums = ACTIVATIONS[kind][0], fields["bias_grad"]
    made: Any = NotImplemented
    if sums is not None:
        with_sums = choices.followed(f"dbias_{name}", name)
        found = with_sums(grad, inp, None, out=(sums, _place(fields, grad, inp)))
        if found is not NotImplemented:
            total, made = found
            written(f"dbias_{name}", "the gradient of the bias", sums, total)
            fields = {**fields, "bias_grad": None}
    if made is NotImplemented:
        made = _made(name, choices, fields, kind, grad, inp)
    if made is NotImplemented:
        names = "grad_output", "input", "kind", *_NUMBERS
        made = ours(_core.activation_backward, inp.shape, fields, choices, *names)
    deliver(name, fields, made, inp.shape, choices)


@reads("input", "cap", "grad_output", *CAST_FIELDS[:-1])
def softcap(choices: Choices, fields: Fields) -> None:
    """A softcap of this library, whose cast is somebody else's."""
    names = "input", "cap", "grad_output"
    made = ours(_core.softcap, fields["input"].shape, fields, choices, *names)
    deliver("softcap", fields, made, fields["input"].shape, choices)
