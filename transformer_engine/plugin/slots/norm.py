# SPDX-License-Identifier: Apache-2.0
"""``te_norm`` and ``te_norm_backward`` by operators of `transformer_engine_torch`."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.slots.fields import (
    Choices,
    Fields,
    apart,
    matrix,
    reads,
    taken,
    written,
)
from transformer_engine.plugin.slots.values import CAST_FIELDS, are_cast, asked_for, deliver, ours

_NAMES = {_core.NORM_LAYERNORM: "layernorm", _core.NORM_RMSNORM: "rmsnorm"}
_OF_NORM = "kind gamma beta mean rsigma eps zero_centered statistics_given".split()


def _factor(gamma: Tensor | None, inp: Tensor, zero_centered: bool) -> Tensor:
    """The factors of a norm that has none."""
    if gamma is not None:
        return gamma
    make = torch.zeros if zero_centered else torch.ones
    return make(inp.shape[-1], dtype=inp.dtype, device=inp.device)


@reads("input", *_OF_NORM, *CAST_FIELDS[:-1])
def forward(choices: Choices, fields: Fields) -> None:
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
    deliver(op, fields, made, choices, place)


def _add(op: str, into: Tensor, values: Any, residual: Tensor) -> None:
    """Put a gradient and that of another reader where a call wants their sum, rounded once."""
    fits = isinstance(values, Tensor) and values.shape[-1:] == into.shape[-1:]
    if not fits or values.numel() != into.numel():
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
def backward(choices: Choices, fields: Fields) -> None:
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
