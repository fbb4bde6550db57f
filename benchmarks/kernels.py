# SPDX-License-Identifier: Apache-2.0
"""Memory-bound operators: bytes a second, beside a plain copy measured in the same turns.

Bytes are those that can not be avoided: each input read once, each output written once. Inputs
rotate among sets that no cache holds. What is small is limited by the time that the device needs
for a kernel without work, which is measured too.
"""

from __future__ import annotations

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
from torch import Tensor

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.torchside.device import prepare_device

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F32 = torch.bfloat16, torch.float32
# benchmarks/gemm.py; attention, on the CPU alone, is products that go through its kernels
COMPUTE_BOUND = {"gemm", "attention", "attention_backward"}
ATTENTION = {  # benchmarks/kernels_attention.py
    "softmax",
    "softmax_backward",
    "dropout_add",
    "dropout_backward",
    "rope",
    "cache_append",
    "cache_gather",
    "attention_merge",
}
# benchmarks/kernels_layer.py
LAYER = {"norm", "norm_backward", "activation", "activation_backward", "softcap"}
SLOTS, HISTORY = 256, 1024  # of a chunk of scaling state

COLUMNS = [
    Column("operator", "operator", "<15s"),
    Column("case", "case", "<28s"),
    Column("shape", "shape", "<13s"),
    Column("mib", "MiB", ">8.2f"),
    Column("us", "us"),
    Column("tb_s", "TB/s", ">8.3f"),
    Column("limit_us", "limit us"),
    Column("percent_of_copy", "% of copy", ">9.1f"),
    Column("spread", "quartiles", "<13s"),
]


@dataclass(frozen=True)
class Call:
    """One call of an operator on tensors of its own.

    Attributes
    ----------
    run : callable
        Makes the call.
    reads, writes : tuple of Tensor
        What it has to read and to write.
    """

    run: Callable[[], Any]
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]

    @property
    def bytes(self) -> int:
        """Bytes that can not be avoided."""
        return sum(t.numel() * t.itemsize for t in (*self.reads, *self.writes))


class Maker:
    """Random inputs and empty outputs of one shape.

    Parameters
    ----------
    rows, columns : int
        Of the matrix that an operator reads.
    device : torch.device
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self.rows, self.columns, self.device = rows, columns, device

    def random(self, dtype: torch.dtype) -> Tensor:
        """Normal numbers."""
        return torch.randn(self.rows, self.columns, device=self.device).to(dtype)

    def empty(self, dtype: torch.dtype, transposed: bool = False) -> Tensor:
        """An output of the same size."""
        shape = (self.columns, self.rows) if transposed else (self.rows, self.columns)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def floats(self, count: int, value: float = 1.0) -> Tensor:
        """Scales and the like."""
        return torch.full((count,), value, device=self.device)

    def quantize(
        self, data: torch.dtype, usages: str, *, source: torch.dtype = BF16, **wanted: bool
    ) -> Call:
        """A cast to FP8; `usages` of "r", "c", "rc", `wanted` of bias_grad and current."""
        x = self.random(source)
        row = self.empty(data) if "r" in usages else None
        column = self.empty(data, transposed=True) if "c" in usages else None
        keywords: dict[str, Any] = {"row": row, "column": column}
        reads, writes = [x], [t for t in (row, column) if t is not None]
        if wanted.get("current"):
            keywords["partials"] = self.floats(_core.AMAX_PARTIALS)
            reads.append(keywords["partials"])
        elif usages:
            keywords |= {"scale": self.floats(1), "amax": self.floats(1, 0.0)}
        if usages:
            keywords |= {"mode": _core.SCALING_TENSOR, "row_scales": self.floats(2)}
        if wanted.get("bias_grad"):
            keywords["bias_grad"] = torch.empty(self.columns, dtype=source, device=self.device)
            writes.append(keywords["bias_grad"])
        return Call(lambda: _core.quantize(x, **keywords), tuple(reads), tuple(writes))

    def scaled(
        self, mode: str, data: torch.dtype, usages: str, *, source: torch.dtype = BF16,
        bias_grad: bool = False,
    ) -> Call:  # fmt: skip
        """A cast with scales of rows or tiles. The bytes are those of one read of the input."""
        x = self.random(source)
        row = self.empty(data) if "r" in usages else None
        column = self.empty(data, transposed=True) if "c" in usages else None
        keywords = modes.scaled_forms(mode, row, column)
        writes = [value for value in keywords.values() if isinstance(value, Tensor)]
        if bias_grad:
            keywords["bias_grad"] = torch.empty(self.columns, dtype=source, device=self.device)
        return Call(lambda: _core.quantize(x, **keywords), (x,), tuple(writes))

    def grouped(
        self, make: Callable[..., Any], usages: str, *, source: torch.dtype = BF16, **options: bool
    ) -> Call:
        """A cast to MXFP8 or NVFP4, the latter by maxima that an amax has found before.

        `make` is the class of a quantizer, with `options`; `usages` are as of `quantize`.
        """
        x = self.random(source)
        quantizer = make(rowwise="r" in usages, columnwise="c" in usages, **options)
        into = quantizer.make_empty(x.shape, device=self.device)
        names = ("row", "row_scales", "column", "column_scales", "row_amax", "column_amax")
        forms = dict(zip(names, into.get_data_tensors(), strict=False))
        how = quantizer._how(x, into, None)
        reads = [value for value in how.values() if isinstance(value, Tensor)]
        writes = [value for value in forms.values() if value is not None]
        kind = into._mode(), into._code()
        return Call(lambda: casts.cast(x, *kind, **forms, **how), (x, *reads), tuple(writes))

    def ungrouped(self, make: Callable[..., Any]) -> Call:
        """A cast from MXFP8 or NVFP4, row-wise, to a new matrix."""
        tensor = make(columnwise=False)(self.random(BF16))
        reads = [value for value in tensor.get_data_tensors() if value is not None]
        return Call(tensor.dequantize, tuple(reads), (self.empty(BF16),))

    def dequantize(self, usage: str) -> Call:
        """A cast from FP8."""
        q, out = self.random(E4M3), self.empty(BF16)
        if usage == "column":
            q = q.t().contiguous()
        scales = self.floats(2)
        keywords = {"mode": _core.SCALING_TENSOR, usage: q, f"{usage}_scales": scales}
        return Call(lambda: _core.dequantize(out, **keywords), (q,), (out,))

    def amax(self, dtype: torch.dtype, hadamard: bool = False) -> Call:
        """Partial maxima; with `hadamard` those of what NVFP4 casts column-wise."""
        x, partials = self.random(dtype), self.floats(_core.AMAX_PARTIALS)
        turned = int(hadamard)
        return Call(lambda: _core.amax(x, partials, hadamard=turned), (x,), (partials,))

    def transpose(self) -> Call:
        """A transpose of bytes."""
        q, out = self.random(E4M3), self.empty(E4M3, transposed=True)
        return Call(lambda: _core.transpose(q, out), (q,), (out,))

    def fill(self, dtype: torch.dtype) -> Call:
        """Writing alone."""
        out = self.empty(dtype)
        return Call(lambda: _core.fill(out, 1.5), (), (out,))

    def cast(self, source: torch.dtype, target: torch.dtype) -> Call:
        """A conversion of a dense matrix."""
        x, out = self.random(source), self.empty(target)
        return Call(lambda: _core.cast(x, out), (x,), (out,))

    def unpad(self) -> Call:
        """A copy out of rows that are longer."""
        wide = torch.randn(self.rows, self.columns + 16, device=self.device).to(BF16)
        x, out = wide[:, : self.columns], self.empty(BF16)
        return Call(lambda: _core.cast(x, out), (x,), (out,))

    def scaling_update(self) -> Call:
        """An update of a chunk of delayed scaling; the shape is the chunk's.

        A history rolls only where the step recorded an amax, so a fill of row 0 comes before.
        """
        scale = self.floats(self.columns)
        history = torch.rand(self.rows, self.columns, device=self.device)
        live = history[:1]

        def run() -> None:
            _core.fill(live, 1.0)
            _core.scaling_update(scale, history, 448.0)

        return Call(run, (scale, history), (scale, history, live))


def mxfp8(**options: Any) -> Any:
    """What casts to MXFP8."""
    return te.MXFP8Quantizer(te.DType.kFloat8E4M3, **options)


Case = tuple[str, str, Callable[[Maker], Call]]

CASES: list[Case] = [
    ("quantize", "e4m3 rows", lambda m: m.quantize(E4M3, "r")),
    ("quantize", "e4m3 columns", lambda m: m.quantize(E4M3, "c")),
    ("quantize", "e4m3 both", lambda m: m.quantize(E4M3, "rc")),
    ("quantize", "e4m3 both, current", lambda m: m.quantize(E4M3, "rc", current=True)),
    ("quantize", "e5m2 both", lambda m: m.quantize(E5M2, "rc")),
    ("quantize", "e5m2 both, bias gradient", lambda m: m.quantize(E5M2, "rc", bias_grad=True)),
    ("quantize", "f32 to e4m3 both", lambda m: m.quantize(E4M3, "rc", source=F32)),
    ("quantize", "bias gradient alone", lambda m: m.quantize(E4M3, "", bias_grad=True)),
    ("quantize", "e4m3 both, block_1d", lambda m: m.scaled("block_1d", E4M3, "rc")),
    ("quantize", "e4m3 rows, block_1d", lambda m: m.scaled("block_1d", E4M3, "r")),
    (
        "quantize",
        "e4m3 both, block_1d, bias gradient",
        lambda m: m.scaled("block_1d", E4M3, "rc", bias_grad=True),
    ),
    (
        "quantize",
        "f32 to e4m3 both, block_1d",
        lambda m: m.scaled("block_1d", E4M3, "rc", source=F32),
    ),
    ("quantize", "e4m3 both, block_2d", lambda m: m.scaled("block_2d", E4M3, "rc")),
    ("quantize", "e4m3 rows, block_2d", lambda m: m.scaled("block_2d", E4M3, "r")),
    ("quantize", "e4m3 both, row", lambda m: m.scaled("row", E4M3, "rc")),
    ("quantize", "e4m3 rows, row", lambda m: m.scaled("row", E4M3, "r")),
    ("quantize", "mxfp8 rows", lambda m: m.grouped(mxfp8, "r")),
    ("quantize", "mxfp8 columns", lambda m: m.grouped(mxfp8, "c")),
    ("quantize", "mxfp8 both", lambda m: m.grouped(mxfp8, "rc")),
    ("quantize", "f32 to mxfp8 both", lambda m: m.grouped(mxfp8, "rc", source=F32)),
    (
        "quantize",
        "mxfp8 both, 32 x 32",
        lambda m: m.grouped(mxfp8, "rc", with_2d_quantization=True),
    ),
    ("quantize", "nvfp4 rows", lambda m: m.grouped(te.NVFP4Quantizer, "r")),
    ("quantize", "nvfp4 columns", lambda m: m.grouped(te.NVFP4Quantizer, "c")),
    ("quantize", "nvfp4 both", lambda m: m.grouped(te.NVFP4Quantizer, "rc")),
    (
        "quantize",
        "nvfp4 both, 16 x 16",
        lambda m: m.grouped(te.NVFP4Quantizer, "rc", with_2d_quantization=True),
    ),
    (
        "quantize",
        "nvfp4 rows, 16 x 16",
        lambda m: m.grouped(te.NVFP4Quantizer, "r", with_2d_quantization=True),
    ),
    (
        "quantize",
        "nvfp4 both, hadamard",
        lambda m: m.grouped(te.NVFP4Quantizer, "rc", with_rht=True),
    ),
    (
        "quantize",
        "nvfp4 both, as a gradient",
        lambda m: m.grouped(te.NVFP4Quantizer, "rc", with_rht=True, stochastic_rounding=True),
    ),
    ("dequantize", "e4m3 rows", lambda m: m.dequantize("row")),
    ("dequantize", "e4m3 columns", lambda m: m.dequantize("column")),
    ("dequantize", "mxfp8 rows", lambda m: m.ungrouped(mxfp8)),
    ("dequantize", "nvfp4 rows", lambda m: m.ungrouped(te.NVFP4Quantizer)),
    ("amax", "bf16", lambda m: m.amax(BF16)),
    ("amax", "bf16, hadamard", lambda m: m.amax(BF16, hadamard=True)),
    ("amax", "f32", lambda m: m.amax(F32)),
    ("transpose", "e4m3", lambda m: m.transpose()),
    ("cast", "f32 to bf16", lambda m: m.cast(F32, BF16)),
    ("cast", "bf16 to f32", lambda m: m.cast(BF16, F32)),
    ("cast", "bf16 copy, dense", lambda m: m.cast(BF16, BF16)),
    ("cast", "bf16 copy, longer rows", lambda m: m.unpad()),
    ("fill", "bf16", lambda m: m.fill(BF16)),
    ("fill", "f32", lambda m: m.fill(F32)),
    ("scaling_update", "256 slots, and a fill", lambda m: m.scaling_update()),
]


@dataclass(frozen=True)
class Effort:
    """How often things run.

    Attributes
    ----------
    calls : int
        Per batch.
    turns : int
        Batches per case.
    """

    calls: int
    turns: int


def check_cases() -> None:
    """Every operator of the library is measured here or in a file named beside its set."""
    here = {operator for operator, _, _ in CASES}
    missing = set(_core.op_names()) - here - COMPUTE_BOUND - ATTENTION - LAYER
    if missing:
        raise SystemExit(f"kernels.py has no case for the operators {sorted(missing)}")


def shapes(machine: Machine, given: list[str] | None) -> list[tuple[int, int]]:
    """The matrices: a layer's, larger, smaller, one without a multiple of anything, tiny."""
    if given:
        return [(int(rows), int(columns)) for rows, columns in (g.split("x") for g in given)]
    if machine.quick:
        return [(64, 48)]
    if machine.cuda:
        return [(8192, 4096), (8192, 12288), (2048, 4096), (8191, 4095), (64, 256)]
    return [(2048, 4096), (511, 1023)]


def measure(machine: Machine, case: Case, shape: tuple[int, int], effort: Effort) -> dict[str, Any]:
    """One row: a case in turns with the copy."""
    operator, label, make = case
    named = {"operator": operator, "case": label, "shape": f"{shape[0]} x {shape[1]}"}
    return named | figures(machine, lambda: make(Maker(*shape, machine.device)), effort)


def figures(machine: Machine, make: Callable[[], Any], effort: Effort) -> dict[str, Any]:
    """What the calls that `make` makes reach, in turns with the copy.

    A call has `run`, and `bytes` that can not be avoided.
    """
    first = make()
    calls = [first, *(make() for _ in range(machine.sets(first.bytes) - 1))]
    step = rotating([call.run for call in calls])
    copy, copied = machine.copier
    warm(step, max(2 * len(calls), 3))
    warm(copy, 3)
    copies = max(effort.calls // 5, 1)
    found = alternate(
        {
            "kernel": lambda: first.bytes / machine.device_time(step, effort.calls),
            "copy": lambda: copied / machine.device_time(copy, copies),
        },
        effort.turns,
    )
    rate, copy_rate = Figure.of(found["kernel"]), Figure.of(found["copy"])
    of_copy = ratio(found["kernel"], found["copy"])
    return {
        "bytes": first.bytes,
        "sets": len(calls),
        "mib": first.bytes / 2**20,
        "us": first.bytes / rate.median * 1e6,
        "tb_s": rate.median * 1e-12,
        "rate_figure_tb_s": rate.scaled(1e-12),
        "copy_figure_tb_s": copy_rate.scaled(1e-12),
        "limit_us": first.bytes / copy_rate.median * 1e6,
        "percent_of_copy": 100 * of_copy.median,
        "percent_figure": of_copy.scaled(100),
        "spread": f"{100 * of_copy.low:.1f}-{100 * of_copy.high:.1f}",
    }


def all_rows(
    machine: Machine, sizes: list[tuple[int, int]], only: str, effort: Effort
) -> Iterator[dict[str, Any]]:
    """All cases whose operator and label contain `only`."""
    for shape in sizes:
        for case in CASES:
            if only not in f"{case[0]} {case[1]}" or case[0] == "scaling_update":
                continue
            yield measure(machine, case, shape, effort)
    for case in CASES:
        if case[0] == "scaling_update" and only in f"{case[0]} {case[1]}":
            for length in (16,) if machine.quick else (16, HISTORY):
                yield measure(machine, case, (length, SLOTS), effort)


def launch_time(machine: Machine, effort: Effort) -> float:
    """Seconds that the device needs for a kernel without work."""
    one = torch.zeros(1, 1, device=machine.device)

    def step() -> None:
        _core.fill(one, 1.0)

    warm(step, 3)
    return Figure.of(machine.device_time(step, effort.calls) for _ in range(effort.turns)).median


def main() -> None:
    """Measure and report."""
    check_cases()
    options = parser(__doc__)
    options.add_argument("--shape", action="append", metavar="ROWSxCOLUMNS", help="instead of all")
    options.add_argument("--only", default="", help="cases whose name contains this")
    options = options.parse_args()
    report: Report = start("kernels", options)
    machine = report.machine
    prepare_device(machine.device)
    effort = Effort(20, 11) if machine.cuda else Effort(2, 2) if machine.quick else Effort(2, 5)
    copy = machine.copy_rate()
    report.limit("copy TB/s", copy.median * 1e-12, "device copy, read and write counted")
    if machine.spec is not None:
        report.limit("claimed memory TB/s", machine.spec.memory * 1e-12, "data sheet")
    report.limit("kernel us", launch_time(machine, effort) * 1e6, "a kernel without work")
    made = all_rows(machine, shapes(machine, options.shape), options.only, effort)
    report.table("memory-bound operators", COLUMNS, made)
    report.finish()


if __name__ == "__main__":
    main()
