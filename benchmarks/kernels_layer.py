# SPDX-License-Identifier: Apache-2.0
"""Memory-bound operators of a layer: norms and activations, their gradients, with what is fused.

As in kernels.py: bytes that can not be avoided a second, beside a plain copy measured in the same
turns. What is fused counts once: a norm with FP8 in both usages has to read its input and to write
the two forms. `rows` and `columns` of a gated activation are those of its result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import modes
import torch
from kernels import COLUMNS, Effort, figures, launch_time
from kernels_attention import Work, size
from timing import Machine, Report, parser, start
from torch import Tensor

import transformer_engine.pytorch  # noqa: F401 - hands torch to the extension
from transformer_engine import _core
from transformer_engine.pytorch.torchside.device import prepare_device

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F32 = torch.bfloat16, torch.float32
FORMS = {"operator": "<19s", "case": "<32s"}  # wider than those of kernels.py


class Maker:
    """Random inputs and empty outputs of one shape.

    Parameters
    ----------
    rows, columns : int
        Of the result of an operator.
    device : torch.device
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.rows, self.columns, self.device = rows, columns, device

    def random(self, dtype: torch.dtype = BF16, halves: int = 1) -> Tensor:
        """Normal numbers, [rows, halves * columns]."""
        return torch.randn(self.rows, halves * self.columns, device=self.device).to(dtype)

    def vector(self, length: int, dtype: torch.dtype = F32) -> Tensor:
        """Weights, statistics, scales: ones."""
        return torch.ones(length, dtype=dtype, device=self.device)

    def outputs(
        self, form: str, halves: int = 1, data: torch.dtype = E4M3
    ) -> tuple[dict[str, Any], int]:
        """Keywords of what is written, and the bytes of it.

        `form` has a letter for each: "h" high precision, "r" and "c" FP8 row- and column-wise with
        a given scale, "a" partial maxima alone, "s" FP8 with a scale made from partial maxima, "t"
        scales of 1 x 128 tiles, "v" of rows.
        """
        columns = halves * self.columns
        keywords: dict[str, Any] = {}
        if "h" in form:
            keywords["wide"] = torch.empty(self.rows, columns, dtype=BF16, device=self.device)
        if "r" in form:
            keywords["row"] = torch.empty(self.rows, columns, dtype=data, device=self.device)
        if "c" in form:
            keywords["column"] = torch.empty(columns, self.rows, dtype=data, device=self.device)
        written = size(*keywords.values())
        if "t" in form or "v" in form:
            forms = keywords.pop("row", None), keywords.pop("column", None)
            return keywords | modes.scaled_forms(
                "block_1d" if "t" in form else "row", *forms
            ), written
        if "a" in form:
            keywords["amax_partials"] = self.vector(_core.AMAX_PARTIALS)
        if "s" in form:
            keywords["partials"] = self.vector(_core.AMAX_PARTIALS)
        elif "r" in form or "c" in form:
            keywords |= {"scale": self.vector(1), "amax": self.vector(1)}
        if "r" in form or "c" in form:
            keywords |= {"mode": _core.SCALING_TENSOR, "row_scales": self.vector(2)}
        return keywords, written

    def norm(
        self, form: str, *, kind: int = _core.NORM_LAYERNORM, dtype: torch.dtype = BF16,
        given: bool = False,
    ) -> Work:  # fmt: skip
        """Forward, with the statistics that a backward needs."""
        x = self.random(dtype)
        keywords, written = self.outputs(form)
        vectors = {"gamma": self.vector(self.columns, dtype), "rsigma": self.vector(self.rows)}
        if kind == _core.NORM_LAYERNORM:
            vectors["beta"] = self.vector(self.columns, dtype)
            vectors["mean"] = self.vector(self.rows)
        keywords |= {**vectors, "kind": kind, "statistics_given": given}
        return Work(lambda: _core.norm(x, **keywords), size(x, *vectors.values()) + written)

    def norm_backward(
        self, *, kind: int = _core.NORM_LAYERNORM, dtype: torch.dtype = BF16, add: bool = False
    ) -> Work:
        """All gradients; with `add`, the residual's gradient is added on the way."""
        x, grad = self.random(dtype), self.random(dtype)
        vectors = {"gamma": self.vector(self.columns, dtype), "rsigma": self.vector(self.rows)}
        vectors["gamma_grad"] = self.vector(self.columns, dtype)
        if kind == _core.NORM_LAYERNORM:
            vectors["mean"] = self.vector(self.rows)
            vectors["beta_grad"] = self.vector(self.columns, dtype)
        out, more = torch.empty_like(x), self.random(dtype) if add else None
        keywords = {**vectors, "kind": kind, "grad_input": out, "grad_add": more}
        return Work(
            lambda: _core.norm_backward(grad, x, **keywords),
            size(x, grad, out, more, *vectors.values()),
        )

    def activation(self, form: str, *, kind: str = "gelu", dtype: torch.dtype = BF16) -> Work:
        """Forward."""
        x = self.random(dtype, halves(kind))
        keywords, written = self.outputs(form)
        keywords["kind"] = _core.activation_names().index(kind)
        return Work(lambda: _core.activation(x, **keywords), size(x) + written)

    def activation_backward(
        self, form: str, *, kind: str = "gelu", dtype: torch.dtype = BF16, bias_grad: bool = False
    ) -> Work:
        """Backward; bias_grad: with the column sums."""
        x, grad = self.random(dtype, halves(kind)), self.random(dtype)
        keywords, written = self.outputs(form, halves(kind), E5M2)
        if bias_grad:
            keywords["bias_grad"] = self.vector(halves(kind) * self.columns, dtype)
            written += size(keywords["bias_grad"])
        keywords["kind"] = _core.activation_names().index(kind)
        return Work(lambda: _core.activation_backward(grad, x, **keywords), size(x, grad) + written)

    def softcap(self, form: str, *, backward: bool = False) -> Work:
        """Of scores or logits; its gradient."""
        x, grad = self.random(), self.random() if backward else None
        keywords, written = self.outputs(form)
        keywords["grad_output"] = grad
        return Work(lambda: _core.softcap(x, 30.0, **keywords), size(x, grad) + written)


def halves(kind: str) -> int:
    """2 for a gated activation, whose input is twice as wide as its result."""
    return 2 if kind.endswith("glu") else 1


Case = tuple[str, str, Callable[[Maker], Work]]
RMS = _core.NORM_RMSNORM

WIDE: list[Case] = [
    ("norm", "layernorm", lambda m: m.norm("h")),
    ("norm", "rmsnorm", lambda m: m.norm("h", kind=RMS)),
    ("norm", "layernorm f32 to bf16", lambda m: m.norm("h", dtype=F32)),
    ("norm", "layernorm, e4m3 rows", lambda m: m.norm("r")),
    ("norm", "layernorm, e4m3 both", lambda m: m.norm("rc")),
    ("norm", "rmsnorm, e4m3 both", lambda m: m.norm("rc", kind=RMS)),
    ("norm", "layernorm, partial maxima", lambda m: m.norm("a")),
    ("norm", "layernorm, current, both", lambda m: m.norm("rcs", given=True)),
    ("norm", "layernorm, tiles, both", lambda m: m.norm("rct")),
    ("norm", "layernorm, scales of rows, both", lambda m: m.norm("rcv")),
    ("norm_backward", "layernorm", lambda m: m.norm_backward()),
    ("norm_backward", "rmsnorm", lambda m: m.norm_backward(kind=RMS)),
    ("norm_backward", "layernorm, added gradient", lambda m: m.norm_backward(add=True)),
    ("norm_backward", "layernorm f32", lambda m: m.norm_backward(dtype=F32)),
    ("activation", "gelu", lambda m: m.activation("h")),
    ("activation", "gelu, e4m3 rows", lambda m: m.activation("r")),
    ("activation", "gelu, e4m3 both", lambda m: m.activation("rc")),
    ("activation", "gelu, partial maxima", lambda m: m.activation("a")),
    ("activation", "gelu, current, both", lambda m: m.activation("rcs")),
    ("activation", "gelu, tiles, both", lambda m: m.activation("rct")),
    ("activation", "gelu, scales of rows, both", lambda m: m.activation("rcv")),
    ("activation", "relu, e4m3 both", lambda m: m.activation("rc", kind="relu")),
    ("activation", "swiglu", lambda m: m.activation("h", kind="swiglu")),
    ("activation", "swiglu, e4m3 both", lambda m: m.activation("rc", kind="swiglu")),
    ("activation", "swiglu, tiles, both", lambda m: m.activation("rct", kind="swiglu")),
    ("softcap", "forward", lambda m: m.softcap("h")),
    ("softcap", "backward", lambda m: m.softcap("h", backward=True)),
    ("softcap", "backward, e4m3 both", lambda m: m.softcap("rc", backward=True)),
    ("activation_backward", "gelu", lambda m: m.activation_backward("h")),
    ("activation_backward", "gelu, bias gradient",
     lambda m: m.activation_backward("h", bias_grad=True)),
    ("activation_backward", "gelu, e5m2 both", lambda m: m.activation_backward("rc")),
    ("activation_backward", "gelu, e5m2 both, bias gradient",
     lambda m: m.activation_backward("rc", bias_grad=True)),
    ("activation_backward", "gelu, tiles, both, bias gradient",
     lambda m: m.activation_backward("rct", bias_grad=True)),
    ("activation_backward", "gelu, rows' scales, both, bias grad.",
     lambda m: m.activation_backward("rcv", bias_grad=True)),
    ("activation_backward", "swiglu, tiles, both",
     lambda m: m.activation_backward("rct", kind="swiglu")),
    ("activation_backward", "swiglu",
     lambda m: m.activation_backward("h", kind="swiglu")),
    ("activation_backward", "swiglu, e5m2 both",
     lambda m: m.activation_backward("rc", kind="swiglu")),
    ("activation_backward", "swiglu, e5m2 both, bias grad.",
     lambda m: m.activation_backward("rc", kind="swiglu", bias_grad=True)),
]  # fmt: skip

NARROW: list[Case] = [
    ("norm", "rmsnorm", lambda m: m.norm("h", kind=RMS)),
    ("norm", "l2 norm", lambda m: m.norm("h", kind=_core.NORM_L2)),
    ("norm_backward", "rmsnorm", lambda m: m.norm_backward(kind=RMS)),
]


def shapes(machine: Machine) -> list[tuple[list[Case], list[tuple[int, int]]]]:
    """The cases with their shapes: a layer's, wider, GPT-2's, an odd one; heads, of many tokens."""
    if machine.quick:
        return [(WIDE, [(16, 48)]), (NARROW, [(32, 16)])]
    if not machine.cuda:
        return [(WIDE, [(1024, 1024), (511, 1023)]), (NARROW, [(16384, 64)])]
    wide = [(8192, 4096), (8192, 16384), (8192, 768), (8191, 4095)]
    return [(WIDE, wide), (NARROW, [(262144, 128), (262144, 64)])]


def all_rows(
    machine: Machine, only: str, given: list[str] | None, effort: Effort
) -> Iterator[dict[str, Any]]:
    """All cases whose operator and label contain `only`, for the shapes `given` or for all."""
    for cases, sizes in shapes(machine):
        for rows, columns in sizes:
            if given and f"{rows}x{columns}" not in given:
                continue
            for operator, label, make in cases:
                if only not in f"{operator} {label}":
                    continue

                def one(
                    make: Callable[[Maker], Work] = make, rows: int = rows, columns: int = columns
                ) -> Work:
                    return make(Maker(rows, columns, machine.device))

                named = {"operator": operator, "case": label, "shape": f"{rows} x {columns}"}
                yield named | figures(machine, one, effort)


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--shape", action="append", metavar="ROWSxCOLUMNS", help="of these alone")
    options.add_argument("--only", default="", help="cases whose name contains this")
    options = options.parse_args()
    report: Report = start("kernels_layer", options)
    machine = report.machine
    prepare_device(machine.device)
    effort = Effort(20, 11) if machine.cuda else Effort(2, 2) if machine.quick else Effort(2, 5)
    copy = machine.copy_rate()
    report.limit("copy TB/s", copy.median * 1e-12, "device copy, read and write counted")
    if machine.spec is not None:
        report.limit("claimed memory TB/s", machine.spec.memory * 1e-12, "data sheet")
    report.limit("kernel us", launch_time(machine, effort) * 1e6, "a kernel without work")
    columns = [dataclasses.replace(c, form=FORMS.get(c.key, c.form)) for c in COLUMNS]
    made = all_rows(machine, options.only, options.shape, effort)
    report.table("norms and activations", columns, made)
    report.finish()


if __name__ == "__main__":
    main()
