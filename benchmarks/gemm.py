# SPDX-License-Identifier: Apache-2.0
"""Matrix products: the operator at the shapes of a Transformer layer, and te.Linear beside torch.

Section `gemm` runs the operator alone, in every format, beside torch's own product of the same
shape and layout, and beside the rate of a large square product in that format. Section `grid`
trains one te.Linear under its own autocast, forward and backward, beside torch.nn.Linear in bf16;
its limit is the arithmetic alone. Formats and modules take turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import modes
import torch
from timing import (
    Column,
    Figure,
    Machine,
    Report,
    alternate,
    parser,
    ratio,
    rotating,
    start,
    warm,
)

from transformer_engine import _core
from transformer_engine.pytorch.torchside.device import prepare_device

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F32 = torch.bfloat16, torch.float32

TOKENS, HIDDEN, FFN = 8192, 4096, 16384
# name: m, n, k of d[m, n] = a[m, k] b[k, n]; one layer of hidden size 4096
LAYER_SHAPES = {
    "qkv fprop": (TOKENS, 3 * HIDDEN, HIDDEN),
    "proj fprop": (TOKENS, HIDDEN, HIDDEN),
    "fc1 fprop": (TOKENS, FFN, HIDDEN),
    "fc2 fprop": (TOKENS, HIDDEN, FFN),
    "qkv dgrad": (TOKENS, HIDDEN, 3 * HIDDEN),
    "proj dgrad": (TOKENS, HIDDEN, HIDDEN),
    "fc1 dgrad": (TOKENS, HIDDEN, FFN),
    "fc2 dgrad": (TOKENS, FFN, HIDDEN),
    "qkv wgrad": (3 * HIDDEN, HIDDEN, TOKENS),
    "proj wgrad": (HIDDEN, HIDDEN, TOKENS),
    "fc1 wgrad": (FFN, HIDDEN, TOKENS),
    "fc2 wgrad": (HIDDEN, FFN, TOKENS),
}
GRID_TOKENS = (256, 2048, 8192, 32768)
GRID_FEATURES = ((1024, 1024), (4096, 4096), (4096, 16384), (8192, 8192))

GEMM_COLUMNS = [
    Column("problem", "problem", "<12s"),
    Column("shape", "m x n x k", "<20s"),
    Column("format", "format", "<12s"),
    Column("ms", "ms", ">9.4f"),
    Column("tflops", "TFLOP/s", ">9.4g"),
    Column("ceiling", "ceiling", ">9.4g"),
    Column("percent", "% of ceiling", ">12.1f"),
    Column("claimed", "data sheet", ">10.4g"),
    Column("speedup", "x torch", ">9.3f"),
    Column("spread", "quartiles", "<13s"),
]
GRID_COLUMNS = [
    Column("shape", "tokens x in x out", "<20s"),
    Column("mode", "mode", "<15s"),
    Column("single_ms", "single ms", ">10.4f"),
    Column("sustained_ms", "sustained ms", ">12.4f"),
    Column("ratio", "of torch", ">9.3f"),
    Column("spread", "quartiles", "<13s"),
    Column("limit_ms", "limit ms", ">9.4f"),
    Column("percent", "% of limit", ">10.1f"),
    Column("fp8_gemms", "FP8 GEMMs", ">9d"),
]


@dataclass(frozen=True)
class Format:
    """Operand dtypes of a product, the way the layers run it.

    Attributes
    ----------
    name : str
    a, b, d : torch.dtype
    fast : bool
        Fast accumulation (the forward's), where the operands are FP8.
    """

    name: str
    a: torch.dtype
    b: torch.dtype
    d: torch.dtype = BF16
    fast: bool = False

    @property
    def fp8(self) -> bool:
        """FP8 operands."""
        return self.a.itemsize == 1


FORMATS = [
    Format("e4m3 x e4m3", E4M3, E4M3, fast=True),
    Format("e5m2 x e4m3", E5M2, E4M3),
    Format("bf16", BF16, BF16),
]
CPU_FORMATS = [*FORMATS, Format("f32", F32, F32, F32)]


@dataclass
class Ceilings:
    """Operations a second that the device can do, measured with torch; and those claimed.

    Attributes
    ----------
    high, fp8 : float
        Measured in torch's best high-precision format, and in FP8 (`high` where torch has none).
    claimed_high, claimed_fp8 : float or None
        Of the data sheet.
    """

    high: float
    fp8: float
    claimed_high: float | None
    claimed_fp8: float | None

    @classmethod
    def measure(cls, report: Report) -> Ceilings:
        """Measure, and note in the report."""
        machine = report.machine
        dtype = reference_dtype(machine)
        high = machine.matmul_rate(dtype).median
        report.limit("high precision TFLOP/s", high * 1e-12, f"torch.mm, {dtype}, large square")
        found = machine.matmul_rate(E4M3) if machine.cuda else None
        fp8 = high if found is None else found.median
        if found is not None:
            report.limit("fp8 TFLOP/s", fp8 * 1e-12, "torch._scaled_mm, e4m3, large square")
        spec = machine.spec
        if spec is not None:
            report.limit("claimed bf16 TFLOP/s", spec.bf16 * 1e-12, "data sheet, bf16")
            report.limit("claimed fp8 TFLOP/s", spec.fp8 * 1e-12, "data sheet, fp8")
        return cls(high, fp8, spec and spec.bf16, spec and spec.fp8)


def reference_dtype(machine: Machine) -> torch.dtype:
    """The dtype in which torch is fastest: what a user has without FP8."""
    return BF16 if machine.cuda else F32


def tera(value: float | None) -> float | None:
    """In units of 10^12."""
    return None if value is None else value * 1e-12


# ---- the operator ----------------------------------------------------------------------------


def product(kind: Format, shape: tuple[int, int, int], machine: Machine) -> Callable[[], Any]:
    """A call of the operator on operands of its own, b stored transposed."""
    m, n, k = shape
    a, b = operands(kind, shape, machine)
    d = torch.empty(m, n, dtype=kind.d, device=machine.device)
    keywords: dict[str, Any] = {"b_transposed": True}
    if kind.fp8:
        mode, one = _core.SCALING_TENSOR, torch.ones(2, device=machine.device)
        keywords |= {"a_mode": mode, "a_row": a, "a_row_scales": one}
        keywords |= {"b_mode": mode, "b_row": b, "b_row_scales": one}
        keywords["fast_accumulation"] = kind.fast
    else:
        keywords |= {"a": a, "b": b}
    return lambda: _core.gemm(d, **keywords)


def operands(
    kind: Format, shape: tuple[int, int, int], machine: Machine
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal random numbers: a [m, k], b [n, k]."""
    m, n, k = shape
    return (
        torch.randn(m, k, device=machine.device).to(kind.a),
        torch.randn(n, k, device=machine.device).to(kind.b),
    )


def torch_product(shape: tuple[int, int, int], machine: Machine) -> Callable[[], Any]:
    """The product of torch, of the same shape and layout."""
    dtype = reference_dtype(machine)
    kind = Format("torch", dtype, dtype, dtype)
    a, b = operands(kind, shape, machine)
    d = torch.empty(shape[0], shape[1], dtype=dtype, device=machine.device)
    return lambda: torch.mm(a, b.t(), out=d)


def sets_of(shape: tuple[int, int, int], machine: Machine) -> int:
    """Input sets that no cache holds; the smallest format counts."""
    m, n, k = shape
    return machine.sets(m * k + n * k + 2 * m * n)


def gemm_rows(
    machine: Machine, shapes: dict[str, tuple[int, int, int]], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """Each shape: torch and all formats in turns."""
    calls, turns = (10, 9) if machine.cuda else (1, 2 if machine.quick else 5)
    for problem, shape in shapes.items():
        count = range(sets_of(shape, machine))
        steps = {"torch": rotating([torch_product(shape, machine) for _ in count])}
        formats = FORMATS if machine.cuda else CPU_FORMATS
        for kind in formats:
            steps[kind.name] = rotating([product(kind, shape, machine) for _ in count])
        for step in steps.values():
            warm(step, len(count) + 2)
        found = alternate(
            {n: (lambda s=s: machine.device_time(s, calls)) for n, s in steps.items()}, turns
        )
        base = Format("torch", reference_dtype(machine), reference_dtype(machine))
        for kind in [base, *formats]:
            yield gemm_row(problem, shape, kind, found, ceilings)


def gemm_row(
    problem: str,
    shape: tuple[int, int, int],
    kind: Format,
    found: dict[str, list[float]],
    ceilings: Ceilings,
) -> dict[str, Any]:
    """One line of the table."""
    work = 2 * math.prod(shape)
    time, speedup = Figure.of(found[kind.name]), ratio(found["torch"], found[kind.name])
    ceiling = ceilings.fp8 if kind.fp8 else ceilings.high
    return {
        "problem": problem,
        "shape": " x ".join(map(str, shape)),
        "format": kind.name,
        "ms": time.median * 1e3,
        "figure_ms": time.scaled(1e3),
        "tflops": tera(work / time.median),
        "ceiling": tera(ceiling),
        "percent": 100 * work / time.median / ceiling,
        "claimed": tera(ceilings.claimed_fp8 if kind.fp8 else ceilings.claimed_high),
        "speedup": speedup.median,
        "speedup_figure": speedup.scaled(1),
        "spread": f"{speedup.low:.3f}-{speedup.high:.3f}",
    }


# ---- the layer -------------------------------------------------------------------------------


class Trained:
    """One linear layer under its own autocast region, forward and backward."""

    def __init__(self, mode: str, shape: tuple[int, int, int], machine: Machine) -> None:
        tokens, inputs, outputs = shape
        like = {"device": machine.device, "dtype": BF16}
        self.recipe = modes.recipes()[mode]
        self.layer = modes.linear(mode, inputs, outputs, machine.device)
        self.x = torch.randn(tokens, inputs, **like).requires_grad_()
        self.grad = torch.randn(tokens, outputs, **like)

    def step(self) -> None:
        """Forward and backward; gradients accumulate, as with torch."""
        with modes.region(self.recipe):
            y = self.layer(self.x)
        y.backward(self.grad)


def grid_rows(
    machine: Machine, shapes: list[tuple[int, int, int]], ceilings: Ceilings
) -> Iterator[dict[str, Any]]:
    """Each shape: torch and all modes in turns."""
    calls, turns = (12, 7) if machine.cuda else (1, 2 if machine.quick else 5)
    for shape in shapes:
        layers = {mode: Trained(mode, shape, machine) for mode in modes.recipes()}
        counts = {}
        for mode, layer in layers.items():
            warm(layer.step, 4)
            counts[mode] = modes.expect_fp8(mode, layer.step, 1)

        def timed(layer: Trained) -> Callable[[], tuple[float, float]]:
            return lambda: (
                Figure.of(machine.single_time(layer.step) for _ in range(calls)).median,
                machine.sustained_time(layer.step, calls),
            )

        found = alternate({mode: timed(layer) for mode, layer in layers.items()}, turns)
        base = [sustained for _, sustained in found[modes.BASE]]
        for mode, pairs in found.items():
            yield grid_row(shape, mode, pairs, base, ceilings) | {"fp8_gemms": counts[mode]}


def grid_row(
    shape: tuple[int, int, int],
    mode: str,
    pairs: list[tuple[float, float]],
    base: list[float],
    ceilings: Ceilings,
) -> dict[str, Any]:
    """One line of the table."""
    single = Figure.of(one for one, _ in pairs)
    sustained = Figure.of(many for _, many in pairs)
    to_torch = ratio([many for _, many in pairs], base)
    quantized = modes.recipes()[mode] is not None
    limit = 6 * math.prod(shape) / (ceilings.fp8 if quantized else ceilings.high)
    return {
        "shape": " x ".join(map(str, shape)),
        "mode": mode,
        "single_ms": single.median * 1e3,
        "single_figure_ms": single.scaled(1e3),
        "sustained_ms": sustained.median * 1e3,
        "sustained_figure_ms": sustained.scaled(1e3),
        "ratio": to_torch.median,
        "ratio_figure": to_torch.scaled(1),
        "spread": f"{to_torch.low:.3f}-{to_torch.high:.3f}",
        "limit_ms": limit * 1e3,
        "percent": 100 * limit / sustained.median,
    }


# ---- command line ----------------------------------------------------------------------------


def gemm_shapes(machine: Machine) -> dict[str, tuple[int, int, int]]:
    """Shapes of section `gemm`."""
    if machine.cuda and not machine.quick:
        return LAYER_SHAPES
    if machine.quick:
        return {"quick": (64, 48, 32)}
    return {  # a sixteenth of the layer, so that a CPU is done with it
        name: (m // 16, n // 16, k // 16) for name, (m, n, k) in LAYER_SHAPES.items()
    }


def grid_shapes(machine: Machine, given: list[str] | None) -> list[tuple[int, int, int]]:
    """Shapes of section `grid`."""
    if given:
        return [tuple(map(int, text.split("x"))) for text in given]
    if machine.cuda and not machine.quick:
        return [(tokens, k, n) for tokens in GRID_TOKENS for k, n in GRID_FEATURES]
    return [(64, 32, 48)] if machine.quick else [(64, 256, 256), (256, 512, 1024)]


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--section", choices=("gemm", "grid"), help="only this one")
    options.add_argument("--grid", action="append", metavar="TOKENSxINxOUT", help="only this shape")
    options.add_argument("--tune", action="store_true", help="time the candidates of cuBLASLt")
    options = options.parse_args()
    report = start("gemm", options)
    machine = report.machine
    prepare_device(machine.device)
    if options.tune:
        if not machine.cuda:
            raise SystemExit("--tune is about cuBLASLt: it needs a CUDA device")
        _core.tune_gemm(_core.DEVICE_CUDA, machine.device.index or 0, True, None)
    report.facts["tuned"] = options.tune
    ceilings = Ceilings.measure(report)
    if options.section != "grid":
        rows = gemm_rows(machine, gemm_shapes(machine), ceilings)
        report.table("the operator, one product", GEMM_COLUMNS, rows)
    if options.section != "gemm":
        rows = grid_rows(machine, grid_shapes(machine, options.grid), ceilings)
        report.table("one linear layer, forward and backward, bf16", GRID_COLUMNS, rows)
    report.finish()


if __name__ == "__main__":
    main()
