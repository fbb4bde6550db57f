# SPDX-License-Identifier: Apache-2.0
"""Casts between high precision and quantized data: native, or behind torch operators.

All formats go through these four. Data are uint8, [..., columns] row-wise and
[columns, ...] column-wise, with scales as the operators of `_core` take them for a mode; `dtype`
is the code of an element, ``_core.DTYPE_*``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch
from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.execution.custom_ops import traceable
from transformer_engine.pytorch.torchside.device import is_capturing
from transformer_engine.pytorch.torchside.modes import dispatch_modes, is_traced_or_faked
from transformer_engine.pytorch.torchside.tensor_kinds import ALIGNMENT

_HIGH_PRECISION = (torch.float32, torch.float16, torch.bfloat16)


def code_of(kind: DType) -> int:
    """``_core.DTYPE_*`` of an FP8 element type."""
    return _core.dtype_code(TE_DType_To_Torch[kind])


def _lines(shape: Sequence[int], device: torch.device, pin_memory: bool) -> Tensor:
    """Lines of bytes [..., length] in memory for lines of a multiple of `ALIGNMENT`."""
    *leading, length = shape
    padded = -(-length // ALIGNMENT) * ALIGNMENT
    options = {"dtype": torch.uint8, "device": device, "pin_memory": pin_memory}
    if padded == length:
        return torch.empty(*shape, **options)
    return torch.zeros(*leading, padded, **options)[..., :length]


def empty_rows(shape: Sequence[int], device: torch.device, pin_memory: bool = False) -> Tensor:
    """Row-wise bytes of a tensor of this shape, in memory that native code can read."""
    return _lines(tuple(shape) or (1,), device, pin_memory).view(tuple(shape))


def empty_columns(shape: Sequence[int], device: torch.device, pin_memory: bool = False) -> Tensor:
    """Column-wise bytes: its last dim first."""
    if not tuple(shape):
        return empty_rows(shape, device, pin_memory)
    *leading, columns = shape
    made = _lines((columns, math.prod(leading)), device, pin_memory)
    return made.view(columns, *leading)


def has_padding(data: Tensor) -> bool:
    """Return whether lines lie as those that are padded do."""
    rows, missing = data.shape[-1], -data.shape[-1] % ALIGNMENT
    if missing == 0 or data.dim() < 2:  # a line by itself may be part of a longer one
        return False
    rows += missing
    for size, step in zip(reversed(data.shape[:-1]), reversed(data.stride()[:-1]), strict=True):
        if step != rows:
            return False
        rows *= size
    return data.storage_offset() + rows <= data.untyped_storage().nbytes()


def given(data: Tensor) -> Tensor:
    """Bytes of a caller as lines of their own: a copy where other bytes lie in place of padding."""
    if data.is_meta or is_traced_or_faked() or not has_padding(data):
        return data
    length = data.shape[-1]
    return data.contiguous() if padded(data)[..., length:].any() else data


def padded(data: Tensor) -> Tensor:
    """Lines with their padding, as plans read them: where they lie, else a copy."""
    length = data.shape[-1]
    missing = -length % ALIGNMENT
    if missing == 0:
        return data
    if has_padding(data):
        return data.as_strided((*data.shape[:-1], length + missing), data.stride())
    return torch.nn.functional.pad(data, (0, missing))


class Computed:
    """Values of an operator that casts what it computes, as the source of a cast.

    A cast that needs no amax before is part of the operator; for any other the values are written
    first, in fp32: the bits are the same. ``run(**fields)`` runs the operator, with fields of
    ``te_cast_request``; the values have a shape [rows, columns], on a device.
    """

    def __init__(
        self, run: Callable[..., None], shape: Sequence[int], device: torch.device
    ) -> None:
        self.shape, self.device = tuple(shape), device
        self._run = run
        self._values: Tensor | None = None

    def values(self) -> Tensor:
        """Compute them; once."""
        if self._values is None:
            self._values = torch.empty(self.shape, dtype=torch.float32, device=self.device)
            self._run(wide=self._values)
        return self._values

    def cast(self, **fields: Any) -> None:
        """Cast them as these fields say."""
        if self._values is None:
            self._run(**fields)
        else:
            _core.quantize(self._values, **fields)


def as_line(data: Tensor) -> Tensor:
    """A tensor without dims as a line of its one value, which is how native code reads it."""
    return data if data.dim() else data.view(1)


def readable(source: Tensor) -> Tensor:
    """Convert to a dtype that casts read: fp32, unless it is fp16 or bf16; with a dim at least."""
    source = as_line(source)
    return source if source.dtype in _HIGH_PRECISION else source.to(torch.float32)


def _as_matrix(data: Tensor | None, mode: int, dtype: torch.dtype) -> Tensor | None:
    """Column-wise bytes as a matrix of elements; those of MXFP8 lie as row-wise ones."""
    if data is None:
        return None
    data = as_line(data)
    if data.dim() != 2 and mode != _core.SCALING_MXFP8:
        data = data.view(data.shape[0], math.prod(data.shape[1:]))
    return data.view(dtype)


def _elements(data: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if data is None else as_line(data).view(dtype)


_obeying_quantize, _obeying_dequantize = map(_core.obeying, ("quantize", "dequantize"))
_obeying_amax, _obeying_transpose = map(_core.obeying, ("amax", "transpose"))


_WRITTEN = ("row", "row_scales", "column", "column_scales", "row_amax", "column_amax", "amax")
_READ = ("scale", "partials", "column_partials", "rng", "noop")
_SETTINGS = {
    "amax_epsilon": "float amax_epsilon=0.0",
    "power_2_scale": "bool power_2_scale=False",
    "square": "bool square=False",
    "hadamard": "int hadamard=0",
    "margin": "int margin=0",
    "four_over_six": "int four_over_six=0",
    "scales_to_256": "bool scales_to_256=False",
    "row_scaled": "bool row_scaled=False",
}
_FIELDS = (*_WRITTEN, *_READ, *_SETTINGS)
"""Of ``te_quantize_args``, but for its source, mode and column sums."""


def native_fields(scaling: int, dtype: int, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields as the operator takes them: data as matrices of their elements."""
    element = _core.torch_dtype(dtype)
    row = _elements(fields.get("row"), element)
    column = _as_matrix(fields.get("column"), scaling, element)
    return {**fields, "row": row, "column": column, "mode": scaling}


def _cast(source: Tensor, scaling: int, dtype: int, *given: Any, **named: Any) -> None:
    fields = {**dict(zip(_FIELDS, given, strict=False)), **named}
    _obeying_quantize(source, **native_fields(scaling, dtype, fields))


_tensors = [f"Tensor({chr(97 + i)}!)? {name}=None" for i, name in enumerate(_WRITTEN)]
_tensors += [f"Tensor? {name}=None" for name in _READ]
_traced_cast = plan_ops.define_obeying(
    "cast_quantized",
    ", ".join(("Tensor source, int scaling, int dtype", *_tensors, *_SETTINGS.values())),
    "",
    _cast,
    lambda *_, **__: None,
)


def cast(source: Tensor | Computed, scaling: int, dtype: int, **fields: Any) -> None:
    """Cast high precision into row-wise and (or) column-wise data, by a scale or by partial maxima.

    `fields` are `_FIELDS`; what is None, or not given, is not read or not written. What an operator
    computes is always cast: TypeError for a ``noop``.
    """
    if isinstance(source, Computed):
        if fields.pop("noop", None) is not None:
            raise TypeError(
                "noop: it skips casts of tensors alone: give None where an operator (a norm, say) "
                "computes the values"
            )
        source.cast(**native_fields(scaling, dtype, fields))
        return
    traced = plan_ops.behind_operators(source) or (dispatch_modes() and plan_ops.watched())
    source = readable(source).detach()
    if not traced:
        _obeying_quantize(source, **native_fields(scaling, dtype, fields))
        return
    epsilon = plan_ops.as_constant(fields.pop("amax_epsilon", 0.0))
    _traced_cast(source, scaling, dtype, amax_epsilon=epsilon, **fields)


def _measure(source: Tensor, hadamard: int) -> Tensor:
    partials = torch.empty(_core.AMAX_PARTIALS, dtype=torch.float32, device=source.device)
    _obeying_amax(source, partials, hadamard=hadamard)
    return partials


_run_measure = traceable(
    "measure_amax",
    "Tensor source, int hadamard",
    1,
    _measure,
    lambda source, hadamard: source.new_empty(_core.AMAX_PARTIALS, dtype=torch.float32),
)


def measure(source: Tensor | Computed, hadamard: int = 0) -> Tensor:
    """Partial maxima of |source|, fp32 [AMAX_PARTIALS], NaN ignored; the largest is the amax.

    With `hadamard` (``te_hadamard``) of the transformed groups of 16 values of a column.
    """
    if isinstance(source, Computed):
        source = source.values()
    return _run_measure(plan_ops.behind_operators(source), readable(source).detach(), hadamard)


def no_partials(source: Tensor | Computed) -> Tensor:
    """Result of `measure` for no values, on the device of values; it is only read."""
    device = source.device
    if is_traced_or_faked() or dispatch_modes() or is_capturing(device):
        return torch.zeros(_core.AMAX_PARTIALS, dtype=torch.float32, device=device)
    return _zeros(device)


def measure_each(sources: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Partial maxima of several tensors on a device, fp32: side by side, and those of each."""
    count = len(sources) * _core.AMAX_PARTIALS
    joined = torch.empty(count, dtype=torch.float32, device=sources[0].device)
    parts = joined.split(_core.AMAX_PARTIALS)
    for source, part in zip(sources, parts, strict=True):
        _obeying_amax(readable(source), part)
    return joined, parts


@functools.cache
def _zeros(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(_core.AMAX_PARTIALS, dtype=torch.float32, device=device)


def partials_of(amax: Tensor) -> Tensor:
    """An amax that is known, fp32 [1], as `measure` would give it."""
    partials = amax.new_zeros(_core.AMAX_PARTIALS)
    partials[:1] = amax
    return partials


def _dequantize(*given: Any) -> Tensor:
    """Run the operator; arguments as of the schema below."""
    row, row_scales, column, column_scales, row_amax, column_amax, *settings = given
    scaling, dtype, shape, output, scales_to_256 = settings
    data = column if row is None else row
    element = _core.torch_dtype(dtype)
    made = torch.empty(tuple(shape), dtype=output, device=data.device)
    by_rows = row is not None
    _obeying_dequantize(
        as_line(made),
        mode=scaling,
        row=_elements(row, element),
        row_scales=row_scales if by_rows else None,
        column=None if by_rows else _as_matrix(column, scaling, element),
        column_scales=None if by_rows else column_scales,
        row_amax=row_amax if by_rows else None,
        column_amax=None if by_rows else column_amax,
        scales_to_256=int(scales_to_256),
    )
    return made


def _dequantize_fake(
    row: Tensor | None, row_scales: Tensor | None, column: Tensor | None, *rest: Any
) -> Tensor:
    data = column if row is None else row
    return data.new_empty(tuple(rest[-3]), dtype=rest[-2])


_run_dequantize = traceable(
    "dequantize_quantized",
    "Tensor? row, Tensor? row_scales, Tensor? column, Tensor? column_scales, Tensor? row_amax, "
    "Tensor? column_amax, int scaling, int dtype, SymInt[] shape, ScalarType output, "
    "bool scales_to_256",
    1,
    _dequantize,
    _dequantize_fake,
)


def dequantize(
    data: tuple,
    scaling: int,
    dtype: int,
    shape: Sequence[int],
    to: torch.dtype,
    scales_to_256: bool = False,
) -> Tensor:
    """High precision [...] of quantized data.

    `data` are row-wise data and scales, column-wise data and scales, and maybe the amaxes of both;
    column-wise ones are read where there are no row-wise ones. `scales_to_256`: of NVFP4, its group
    scales go up to 256.
    """
    output = to if to in _HIGH_PRECISION else torch.float32
    one = data[2] if data[0] is None else data[0]
    given = (*data, None, None)[:6]
    made = _run_dequantize(
        plan_ops.behind_operators(one),
        *given,
        *(scaling, dtype, list(shape), output, scales_to_256),
    )
    return made.to(to)


def _transpose(data: Tensor) -> Tensor:
    lines = math.prod(data.shape[:-1])
    padding = lines + -lines % ALIGNMENT
    made = torch.empty(data.shape[-1], padding, dtype=torch.uint8, device=data.device)
    _obeying_transpose(data, made)
    return made


def _transpose_fake(data: Tensor) -> Tensor:
    lines = math.prod(data.shape[:-1])
    return data.new_empty(data.shape[-1], (lines + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)


_run_transpose = traceable("transpose_bytes", "Tensor data", 1, _transpose, _transpose_fake)


def transpose(data: Tensor) -> Tensor:
    """Column-wise bytes [columns, ...] of row-wise ones [..., columns], padded as plans want."""
    if not data.dim():
        return transpose(data.view(1)).view(())
    made = _run_transpose(plan_ops.behind_operators(data), data)
    *leading, columns = data.shape
    return made[:, : math.prod(leading)].view(columns, *leading)


def transpose_into(data: Tensor, columns: Tensor) -> Tensor:
    """`transpose` of matrices in memory that `empty_columns` has made; return it."""
    _obeying_transpose(data, padded(columns))
    return columns
