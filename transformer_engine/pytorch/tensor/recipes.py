# SPDX-License-Identifier: Apache-2.0
"""Which quantizers the casts of linear layers are, and what GEMMs read of tensors: one table.

A cast of the C library (`operand_casts.OperandCast`) is in it where GEMMs read its format as it is
stored. So tables and calls go by the casts of a module, whichever recipe or function asks for them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.operand_casts import OperandCast, Quantization
from transformer_engine.pytorch.constants import DType, TE_DType_To_Torch
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
)
from transformer_engine.pytorch.tensor.float8_row_tensor import Float8RowQuantizer, Float8RowTensor
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    Float8TensorStorage,
)
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizedTensorStorage, casters_of
from transformer_engine.pytorch.tensor.mxfp8_tensor import (
    MXFP8Quantizer,
    MXFP8Tensor,
    MXFP8TensorStorage,
)
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer, NVFP4Tensor
from transformer_engine.pytorch.tensor.quantizer import Quantizer
from transformer_engine.pytorch.torchside.tensor_kinds import ALIGNMENT

_ELEMENTS = {
    _core.DTYPE_E4M3: DType.kFloat8E4M3,
    _core.DTYPE_E5M2: DType.kFloat8E5M2,
    _core.DTYPE_U8: DType.kFloat4E2M1,
}
"""Of the data of a cast."""


class Format(NamedTuple):
    """How operands are kept that one of the casts makes; a role is as of `cast_of`."""

    recipe: int  # ``_core.RECIPE_*`` of the cast
    quantizer: type[Quantizer]
    make: Callable[[OperandCast, torch.device, bool], Quantizer]
    """Maker of a quantizer that casts so; given whether delayed scaling measures where it knows no
    scale."""
    tensor: type  # what the quantizer makes
    reads: Callable[[Any, Quantization, str], bool]
    """True where GEMMs of a linear layer read such a tensor in a role."""
    forms: Callable[[Any, str, bool], tuple[tuple, int]]
    """Forms of a tensor that a call reads, and `VALUE_*` of it: given the tensor, its role, and
    whether a backward may follow that reads it column-wise."""
    fields: Callable[[Any, tuple, tuple], dict[str, Any]]
    """Fields of a tensor, besides its quantizer, of what a call makes: given the quantizer, the
    forms (None for those that are not there) and the shape of the values."""


def cast_of(quantization: Quantization, role: str) -> OperandCast:
    """How a linear layer casts its "input", its "weight" or the "gradient" of its output."""
    return quantization.grad if role == "gradient" else getattr(quantization, role)


def _has(cast: OperandCast, option: int) -> bool:
    return bool(cast.options & option)


def with_scale(cast: OperandCast, scale: Tensor, amax: Tensor, first: bool) -> Float8Quantizer:
    """Make a row-wise cast with a given scale and amax; see `Float8Quantizer`."""
    options = {"columnwise": False, "measure_first": first}
    return Float8Quantizer(scale, amax, _ELEMENTS[cast.dtype], **options)


def _delayed(cast: OperandCast, device: torch.device, first: bool) -> Quantizer:
    scale = torch.full((1,), 0.0 if first else 1.0, dtype=torch.float32, device=device)
    return with_scale(cast, scale, torch.zeros_like(scale), first)


def _how(cast: OperandCast) -> dict[str, Any]:
    """How scales are found in what is cast."""
    power_2 = _has(cast, _core.CAST_POWER_2)
    return {"force_pow_2_scales": power_2, "amax_epsilon": cast.amax_epsilon}


def _current(cast: OperandCast, device: torch.device, _first: bool) -> Quantizer:
    options = {"columnwise": False, **_how(cast)}
    return Float8CurrentScalingQuantizer(_ELEMENTS[cast.dtype], device, **options)


def _block(cast: OperandCast, *_: Any) -> Quantizer:
    square = _has(cast, _core.CAST_TILES_2D)
    # Square tiles are turned where a backward reads them.
    options = {"columnwise": not square, "block_scaling_dim": 2 if square else 1, **_how(cast)}
    return Float8BlockQuantizer(_ELEMENTS[cast.dtype], **options)


def _row(cast: OperandCast, *_: Any) -> Quantizer:
    return Float8RowQuantizer(_ELEMENTS[cast.dtype], **_how(cast))


def _mxfp8(cast: OperandCast, *_: Any) -> Quantizer:
    squares = _has(cast, _core.CAST_TILES_2D)
    options = {"with_2d_quantization": squares, "margin": cast.margin}
    return MXFP8Quantizer(_ELEMENTS[cast.dtype], **options)


def _nvfp4(cast: OperandCast, *_: Any) -> Quantizer:
    return NVFP4Quantizer(
        with_rht=_has(cast, _core.CAST_HADAMARD),
        with_2d_quantization=_has(cast, _core.CAST_TILES_2D),
        stochastic_rounding=_has(cast, _core.CAST_STOCHASTIC),
        row_scaled_nvfp4=_has(cast, _core.CAST_ROW_SCALED),
        nvfp4_use_4over6=_has(cast, _core.CAST_FOUR_OVER_SIX),
        nvfp4_e4m3_max=256 if _has(cast, _core.CAST_TO_256) else 448,
        nvfp4_4over6_err_mode="MSE" if _has(cast, _core.CAST_SQUARED) else "MAE",
        with_random_sign_mask=not _has(cast, _core.CAST_UNSIGNED),
    )


# ---- what calls read -----------------------------------------------------------------------------


def _any(tensor: Any, quantization: Quantization, role: str) -> bool:
    return tensor._fp8_dtype == _ELEMENTS[cast_of(quantization, role).dtype]


def _has_both(tensor: Any, quantization: Quantization, role: str) -> bool:
    """Of an input that is not cast both ways a backward could not be computed."""
    return _any(tensor, quantization, role) and _is_whole(tensor, quantization, role)


def _is_wide(quantization: Quantization) -> bool:
    """Return whether the GEMMs of a backward multiply in high precision."""
    return quantization.backward != _core.BACKWARD_QUANTIZED


def _is_whole(tensor: Any, quantization: Quantization, role: str) -> bool:
    if role == "weight" or (role == "input" and not torch.is_grad_enabled()):
        return True
    usages = tensor.get_usages()
    rows_are_enough = role == "input" and _is_wide(quantization)
    return usages["rowwise"] if rows_are_enough else all(usages.values())


def _has_tiles(tensor: Any, quantization: Quantization, role: str) -> bool:
    square = _has(cast_of(quantization, role), _core.CAST_TILES_2D)
    return tensor._is_2D_scaled == square and _has_both(tensor, quantization, role)


def _is_fp4_of(tensor: Any, quantization: Quantization, role: str) -> bool:
    """Input and gradient are transformed alike, as they meet in a GEMM, or neither is."""
    cast = cast_of(quantization, role)
    signed = not _has(cast, _core.CAST_UNSIGNED)
    alike = tensor._with_rht == _has(cast, _core.CAST_HADAMARD) and (
        not tensor._with_rht or tensor._with_random_sign_mask == signed
    )
    return (
        (_is_wide(quantization) or alike)
        and tensor._nvfp4_e4m3_max == (256 if _has(cast, _core.CAST_TO_256) else 448)
        and tensor._row_scaled_nvfp4 == _has(cast, _core.CAST_ROW_SCALED)
        and tensor._is_2D_scaled == _has(cast, _core.CAST_TILES_2D)
        and _is_whole(tensor, quantization, role)
    )


def _rows(tensor: Any, data: Tensor | None) -> Tensor:
    if data is None:
        raise RuntimeError(
            f"{type(tensor).__name__}: its row-wise data were dropped, which a forward reads: keep "
            "them, update_usage(rowwise_usage=True)"
        )
    return _elements(tensor, data)


def _columns(tensor: Any, data: Tensor) -> Tensor:
    if isinstance(tensor, MXFP8TensorStorage):
        return _elements(tensor, data).flatten(0, -2)
    return _elements(tensor, data.view(data.shape[0], -1))


def _elements(tensor: Any, data: Tensor) -> Tensor:
    """Data as plans read them: padded, but for those of MXFP8; four-bit values lie so in bytes."""
    dtype = TE_DType_To_Torch.get(tensor._fp8_dtype)
    if dtype is None:
        return data
    return (data if isinstance(tensor, MXFP8TensorStorage) else casts.padded(data)).view(dtype)


def _per_tensor(tensor: Any, role: str, backward: bool) -> tuple[tuple, int]:
    """The transpose is read where there is one; else the backward makes it for itself."""
    row = _rows(tensor, tensor._data)
    transposes = torch.compiler.is_compiling() or tensor._transpose_invalid
    if transposes and tensor.shape[-1] % ALIGNMENT == 0:
        return (row, None, tensor._scales), _core.VALUE_QUANTIZED | _core.VALUE_ROW_WISE
    column = None
    if backward:
        made = casts.transpose(tensor._data) if transposes else tensor._transpose
        column = _columns(tensor, made)
    return (row, column, tensor._scales), _core.VALUE_QUANTIZED


def _two_forms(tensor: Any, role: str, backward: bool) -> tuple[tuple, int]:
    """Column-wise data that are not there are made for the call; None where they can not be."""
    row = _rows(tensor, tensor._rowwise_data)
    column, scales = tensor._columnwise_data, tensor._columnwise_scale_inv
    amaxes = tensor.get_data_tensors()[4:]
    if backward and column is None:
        column, scales = tensor._turned() or (None, None)
        amaxes = amaxes[:1] * len(amaxes)
    column = _columns(tensor, column) if backward and column is not None else None
    forms = (row, column, tensor._rowwise_scale_inv, scales, *amaxes)
    return forms, _core.VALUE_QUANTIZED


# ---- what calls make -----------------------------------------------------------------------------


def _bytes_of_rows(data: Tensor | None, shape: tuple) -> Tensor | None:
    if data is None:
        return None
    data = data.view(torch.uint8)
    return data if data.shape[-1] == shape[-1] else data[..., : shape[-1]]


def _bytes_of_columns(quantizer: Any, data: Tensor | None, shape: tuple) -> Tensor | None:
    if data is None:
        return None
    *leading, columns = shape
    if quantizer.TENSOR is MXFP8Tensor:
        return data.view(torch.uint8).view(shape)
    data, rows = data.view(torch.uint8), math.prod(leading)
    data = data if data.shape[1] == rows else data[:, :rows]
    return data if len(leading) == 1 else data.view(columns, *leading)


def _per_tensor_fields(quantizer: Any, forms: tuple, shape: tuple) -> dict[str, Any]:
    row, column, scales = forms
    fields = {"_data": _bytes_of_rows(row, shape), "_scales": scales}
    fields["_transpose"] = _bytes_of_columns(quantizer, column, shape)
    return {**fields, "_fp8_dtype": quantizer.dtype}


def _two_form_fields(quantizer: Any, forms: tuple, shape: tuple) -> dict[str, Any]:
    row, column, row_scales, column_scales = forms
    return {
        "_rowwise_data": _bytes_of_rows(row, shape),
        "_rowwise_scale_inv": row_scales,
        "_columnwise_data": _bytes_of_columns(quantizer, column, shape),
        "_columnwise_scale_inv": column_scales,
        "_fp8_dtype": quantizer.dtype,
        **quantizer._format_settings(shape),
    }


def _fp4_fields(quantizer: Any, forms: tuple, shape: tuple) -> dict[str, Any]:
    names = ("rowwise_data", "columnwise_data", "rowwise_scale_inv", "columnwise_scale_inv")
    names += ("amax_rowwise", "amax_columnwise")
    fields: dict[str, Any] = {f"_{name}": form for name, form in zip(names, forms, strict=True)}
    return {**fields, "_fp8_dtype": quantizer.dtype, **quantizer._format_settings(shape)}


_PER_TENSOR = (Float8Tensor, _any, _per_tensor, _per_tensor_fields)
_TWO_FORMS = (_two_forms, _two_form_fields)
_FP4 = (NVFP4Tensor, _is_fp4_of, _two_forms, _fp4_fields)
_TILES = (Float8BlockwiseQTensor, _has_tiles, *_TWO_FORMS)
_FORMATS = (
    Format(_core.RECIPE_DELAYED, Float8Quantizer, _delayed, *_PER_TENSOR),
    Format(_core.RECIPE_CURRENT, Float8CurrentScalingQuantizer, _current, *_PER_TENSOR),
    Format(_core.RECIPE_BLOCK, Float8BlockQuantizer, _block, *_TILES),
    Format(_core.RECIPE_ROW, Float8RowQuantizer, _row, Float8RowTensor, _has_both, *_TWO_FORMS),
    Format(_core.RECIPE_MXFP8, MXFP8Quantizer, _mxfp8, MXFP8Tensor, _has_both, *_TWO_FORMS),
    Format(_core.RECIPE_NVFP4, NVFP4Quantizer, _nvfp4, *_FP4),
)


def format_of(cast: OperandCast) -> Format | None:
    """The row of a cast; None where it makes nothing that GEMMs read as it is stored."""
    return next((row for row in _FORMATS if row.recipe == cast.recipe), None)


def _as_one(tensor: Any, role: str) -> Any:
    """A tensor or storage of one format; None of a hybrid tensor that is none.

    With one scale for the tensor it is known of weights alone that both forms have the same one:
    they are cast by their quantizers, without amaxes of other ranks.
    """
    if not isinstance(tensor, HybridQuantizedTensorStorage):
        return tensor
    one = tensor._as_one()
    return None if role != "weight" and isinstance(one, Float8TensorStorage) else one


def forms_of(tensor: Any, role: str, backward: bool) -> tuple[tuple, int]:
    """``Format.forms`` of a tensor that is read as it is."""
    tensor = _as_one(tensor, role)
    return next(row for row in _FORMATS if isinstance(tensor, row.tensor._STORAGE)).forms(
        tensor, role, backward
    )


def reads(tensor: Any, quantization: Quantization, role: str) -> bool:
    """Return whether GEMMs read a quantized tensor as it is, in a role of `cast_of`."""
    row, tensor = format_of(cast_of(quantization, role)), _as_one(tensor, role)
    return (
        row is not None
        and isinstance(tensor, row.tensor._STORAGE)
        and row.reads(tensor, quantization, role)
    )


def fits(weight: Any, quantization: Quantization) -> bool:
    """Return whether they do, and the weight is cast as they would where it is cast again."""
    return reads(weight, quantization, "weight") and all(
        isinstance(quantizer, format_of(quantization.weight).quantizer)
        for quantizer in casters_of(weight._quantizer)
    )
