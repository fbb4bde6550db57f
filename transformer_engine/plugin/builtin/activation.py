# SPDX-License-Identifier: Apache-2.0
"""Activations and their gradients, by ``_core.activation`` and ``_core.activation_backward``."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.builtin import ACTIVATIONS
from transformer_engine.plugin.builtin.signatures import define
from transformer_engine.pytorch.cpp_extensions.values import placed, quantized, wide

_KINDS = {name: kind for kind, name in enumerate(_core.activation_names())}
_OF_ROWS = "`{}` of [..., columns]"
_OF_HALVES = f"{_OF_ROWS}; of a gated one, [..., 2 columns]: the first half is activated, the second a factor"  # noqa: E501
_CLAMPED = (
    "Compute a' sigmoid(alpha a') (b' + 1), a' = min(a, limit), b' = clamp(b, ±limit), of [a b]"
)
_FORWARD = """.

In fp32, rounded to the dtype of `input`; cast by `quantizer` where that is not None. `out`: where
the result goes, see `values.placed`. TypeError or ValueError for other arguments.
"""
_GRADIENT = """Gradient of the input of `{}`, of the shape and dtype of `fwd_input`.

`grad` is that of its result; cast by `quantizer` where that is not None.
"""
_WITH_SUMS = """(gradient of the bias before `{0}`, `d{0}`).

The first are the column sums of the second before its cast, [columns] in the dtype of `grad`.
"""


def define_all(module: dict[str, Any], forward: Callable, backward: Callable) -> None:
    """Define all activations and their gradients in a module, by its ``globals()``.

    Both functions are given the operator, the activation and what `operator` gives. `backward` is
    one of gradients with column sums, too, those whose names begin with "dbias_".
    """
    for kind, gradients in ACTIVATIONS.items():
        text = _OF_HALVES if kind.endswith("glu") else _OF_ROWS
        text = _CLAMPED if kind == "clamped_swiglu" else text
        runs, docs = (forward, backward, backward), (text + _FORWARD, _GRADIENT, _WITH_SUMS)
        for op, run, doc in zip((kind, *gradients), runs, docs, strict=False):
            define(module, op, partial(run, op, kind), doc.format(kind))


def numbers_of(call: Any) -> dict[str, float]:
    """Further arguments of an activation that has such."""
    return {name: getattr(call, name) for name in ("limit", "alpha") if hasattr(call, name)}


def _forward(op: str, kind: str, call: Any, out: Any) -> Any:
    inp = wide(op, "input", call.input)
    columns = inp.shape[-1]
    if kind.endswith("glu"):
        if columns % 2:
            raise ValueError(f"{op}: input: {columns} columns, expected two halves")
        columns //= 2
    made = placed(out, 0, inp, (*inp.shape[:-1], columns))
    _core.activation(inp, _KINDS[kind], wide=made, **numbers_of(call))
    return quantized(op, made, call.quantizer)


def _backward(op: str, kind: str, call: Any, out: Any) -> Any:
    inp, grad = wide(op, "fwd_input", call.fwd_input), wide(op, "grad", call.grad)
    sums: Tensor | None = None
    if op.startswith("dbias_"):
        sums = placed(out, 0, inp, inp.shape[-1:], grad.dtype)
    made = placed(out, -1, inp, inp.shape)
    given = {"wide": made, "bias_grad": sums, **numbers_of(call)}
    _core.activation_backward(grad, inp, _KINDS[kind], **given)
    cast = quantized(op, made, call.quantizer)
    return cast if sums is None else (sums, cast)


define_all(globals(), _forward, _backward)
