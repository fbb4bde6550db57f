# SPDX-License-Identifier: Apache-2.0
"""Which quantizers a recipe casts with, and what its GEMMs read of tensors: one table.

A recipe is in it where GEMMs read a format as it is stored; where it is not, parameters of modules
stay in high precision (`quantized_model_init` says so).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common.graphs import (
    GRAD_GIVEN,
    GRAD_ROWS,
    INPUT_GIVEN,
    INPUT_ROWS,
    WEIGHT_GIVEN,
    WEIGHT_ROWS,
    is_backward_wide,
)
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.constants import TE_DType_To_Torch
from transformer_engine.pytorch.quantizer import Quantizer
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
    fp8_type,
)
from transformer_engine.pytorch.tensor.mxfp8_tensor import (
    MXFP8Quantizer,
    MXFP8Tensor,
    MXFP8TensorStorage,
)
from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer, NVFP4Tensor
from transformer_engine.pytorch.tensors import ALIGNMENT

_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

GIVEN = {"input": INPUT_GIVEN, "weight": WEIGHT_GIVEN, "gradient": GRAD_GIVEN}
"""Flags of a part whose operand of a role arrives quantized; of which its row-wise form alone."""
_ROWS = {"input": INPUT_ROWS, "weight": WEIGHT_ROWS, "gradient": GRAD_ROWS}


class Format(NamedTuple):
    """How a recipe keeps operands; a role is "input", "weight" or "gradient"."""

    holds: str  # the method of recipes that says whether one is of this kind
    quantizer: type[Quantizer]
    make: Callable[[Recipe, torch.device, str], Quantizer]  # of a role
    tensor: type  # what the quantizer makes
    reads: Callable[[Any, Recipe, str], bool]
    """Whether GEMMs of a recipe read such a tensor in a role."""
    forms: Callable[[Any, str, bool], tuple[tuple, int]]
    """What a call reads of a tensor, and flags of its part: given the tensor, its role, and whether
    a backward may follow that reads it column-wise."""
    fields: Callable[[Any, tuple, tuple], dict[str, Any]]
    """Fields of a tensor, besides its quantizer, of what a call makes: given the quantizer, the
    forms (None for those that are not there) and the shape of the values."""


def _delayed(recipe: Recipe, device: torch.device, role: str) -> Quantizer:
    first = recipe.measure_first
    scale = torch.full((1,), 0.0 if first else 1.0, device=device)
    options = {"columnwise": False, "measure_first": first}
    return Float8Quantizer(scale, torch.zeros_like(scale), _element(recipe, role), **options)


def _how(recipe: Recipe, role: str) -> Any:
    """How the recipe casts a role."""
    names = {"input": "fwd_inp", "weight": "fwd_weight", "gradient": "bwd_grad"}
    return getattr(recipe, f"fp8_quant_{names[role]}")


def _current(recipe: Recipe, device: torch.device, role: str) -> Quantizer:
    how = _how(recipe, role)
    return Float8CurrentScalingQuantizer(
        _element(recipe, role),
        device,
        columnwise=False,
        force_pow_2_scales=how.power_2_scale,
        amax_epsilon=how.amax_epsilon,
    )


def _element(recipe: Recipe, role: str) -> Any:
    direction = "bwd" if role == "gradient" else "fwd"
    return fp8_type("fp8_format", _CODES[recipe.fp8_format.dtype_name(direction)])


def _tile_dim(recipe: Recipe, role: str) -> int:
    names = {"input": "x", "weight": "w", "gradient": "grad"}
    return getattr(recipe, f"{names[role]}_block_scaling_dim")


def _block(recipe: Recipe, device: torch.device, role: str) -> Quantizer:
    del device
    how, dim = _how(recipe, role), _tile_dim(recipe, role)
    return Float8BlockQuantizer(
        _element(recipe, role),
        columnwise=dim == 1,  # square tiles are turned where a backward reads them
        force_pow_2_scales=how.power_2_scale,
        amax_epsilon=how.amax_epsilon,
        block_scaling_dim=dim,
    )


def _row(recipe: Recipe, device: torch.device, role: str) -> Quantizer:
    del device
    how = _how(recipe, role)
    options = {"force_pow_2_scales": how.power_2_scale, "amax_epsilon": how.amax_epsilon}
    return Float8RowQuantizer(_element(recipe, role), **options)


def _mxfp8(recipe: Recipe, device: torch.device, role: str) -> Quantizer:
    del device
    squares = role == "weight" and recipe.enable_2d_quantization
    options = {"with_2d_quantization": squares, "margin": recipe.margin}
    return MXFP8Quantizer(_element(recipe, role), **options)


def _nvfp4(recipe: Recipe, device: torch.device, role: str) -> Quantizer:
    del device
    if role != "weight":
        raise NotImplementedError(f"NVFP4BlockScaling: a {role} that a module returns quantized")
    chooses = recipe.nvfp4_4over6 in ("weights", "all")
    to_256 = chooses and recipe.nvfp4_4over6_e4m3_use_256 in ("weights", "all")
    return NVFP4Quantizer(
        with_2d_quantization=recipe.fp4_quant_fwd_weight.fp4_2d_quantization,
        nvfp4_use_4over6=chooses,
        nvfp4_e4m3_max=256 if to_256 else 448,
        nvfp4_4over6_err_mode=recipe.nvfp4_4over6_err_mode,
    )


# ---- what calls read -----------------------------------------------------------------------------


def _any(tensor: Any, recipe: Recipe, role: str) -> bool:
    return tensor._fp8_dtype == _element(recipe, role)


def _has_both(tensor: Any, recipe: Recipe, role: str) -> bool:
    """Of an input that is not cast both ways a backward could not be computed."""
    return _any(tensor, recipe, role) and _is_whole(tensor, recipe, role)


def _is_whole(tensor: Any, recipe: Recipe, role: str) -> bool:
    if role == "weight" or (role == "input" and not torch.is_grad_enabled()):
        return True
    usages = tensor.get_usages()
    rows_are_enough = role == "input" and is_backward_wide(recipe)
    return usages["rowwise"] if rows_are_enough else all(usages.values())


def _has_tiles(tensor: Any, recipe: Recipe, role: str) -> bool:
    square = _tile_dim(recipe, role) == 2
    return tensor._is_2D_scaled == square and _has_both(tensor, recipe, role)


def _is_fp4_of(tensor: Any, recipe: Recipe, role: str) -> bool:
    """Transformed as the gradient is that it meets, and never transformed where that is not.

    A gradient is cast where it is multiplied, by random numbers of its own.
    """
    if role == "gradient":
        return False
    how = recipe.fp4_quant_fwd_weight if role == "weight" else recipe.fp4_quant_fwd_inp
    is_input = role == "input"
    return (
        (
            is_backward_wide(recipe)
            or tensor._with_rht == (how.random_hadamard_transform and is_input)
        )
        and tensor._row_scaled_nvfp4 == (recipe.row_scaled_activation and is_input)
        and tensor._is_2D_scaled == how.fp4_2d_quantization
        and _is_whole(tensor, recipe, role)
    )


def _rows(tensor: Any, data: Tensor | None) -> Tensor:
    if data is None:
        raise RuntimeError(
            f"{type(tensor).__name__}: its row-wise data were dropped, which a forward reads"
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
        return (row, None, tensor._scales), GIVEN[role] | _ROWS[role]
    column = None
    if backward:
        made = casts.transpose(tensor._data) if transposes else tensor._transpose
        column = _columns(tensor, made)
    return (row, column, tensor._scales), GIVEN[role]


def _two_forms(tensor: Any, role: str, backward: bool) -> tuple[tuple, int]:
    """Column-wise data that are not there are made for the call, where they can be."""
    row = _rows(tensor, tensor._rowwise_data)
    column, scales = tensor._columnwise_data, tensor._columnwise_scale_inv
    amaxes = tensor.get_data_tensors()[4:]
    if backward and column is None:
        made = tensor._turned()
        if made is None:
            raise RuntimeError(
                f"{type(tensor).__name__}: its column-wise data were dropped, which a backward "
                "reads: run without gradients, or quantize with both usages"
            )
        column, scales = made
        amaxes = amaxes[:1] * len(amaxes)
    column = _columns(tensor, column) if backward else None
    forms = (row, column, tensor._rowwise_scale_inv, scales, *amaxes)
    return forms, GIVEN[role]


# ---- what calls make -----------------------------------------------------------------------------


def _bytes_of_rows(data: Tensor | None, shape: tuple) -> Tensor | None:
    return None if data is None else data.view(torch.uint8)[..., : shape[-1]]


def _bytes_of_columns(quantizer: Any, data: Tensor | None, shape: tuple) -> Tensor | None:
    if data is None:
        return None
    *leading, columns = shape
    if quantizer.TENSOR is MXFP8Tensor:
        return data.view(torch.uint8).view(shape)
    return data.view(torch.uint8)[:, : math.prod(leading)].view(columns, *leading)


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


_PER_TENSOR = (Float8Tensor, _any, _per_tensor, _per_tensor_fields)
_TWO_FORMS = (_two_forms, _two_form_fields)
_FORMATS = (
    Format("delayed", Float8Quantizer, _delayed, *_PER_TENSOR),
    Format("float8_current_scaling", Float8CurrentScalingQuantizer, _current, *_PER_TENSOR),
    Format(
        "float8_block_scaling",
        Float8BlockQuantizer,
        _block,
        Float8BlockwiseQTensor,
        _has_tiles,
        *_TWO_FORMS,
    ),
    Format("float8_row_scaling", Float8RowQuantizer, _row, Float8RowTensor, _has_both, *_TWO_FORMS),
    Format("mxfp8", MXFP8Quantizer, _mxfp8, MXFP8Tensor, _has_both, *_TWO_FORMS),
    Format("nvfp4", NVFP4Quantizer, _nvfp4, NVFP4Tensor, _is_fp4_of, *_TWO_FORMS),
)


def format_of(recipe: Recipe) -> Format | None:
    """The row of a recipe; None where it has none."""
    if getattr(recipe, "quantizations", None) is not None:  # of the user's quantizers
        return None
    return next((row for row in _FORMATS if getattr(recipe, row.holds)()), None)


def weight_quantizer(recipe: Recipe, device: torch.device) -> Quantizer:
    """A quantizer of weights; NotImplementedError for a recipe that keeps none."""
    row = format_of(recipe)
    if row is None:
        raise NotImplementedError(
            f"quantized_model_init: {type(recipe).__name__}: it says no format to keep weights in: "
            "use DelayedScaling() or another recipe that does, or leave quantized_model_init out"
        )
    return row.make(recipe, device, "weight")


def reads(tensor: Any, recipe: Recipe, role: str) -> bool:
    """Whether GEMMs of a recipe read a quantized tensor as it is, in a role of `Format`."""
    row = format_of(recipe)
    return row is not None and isinstance(tensor, row.tensor) and row.reads(tensor, recipe, role)


def fits(weight: Any, recipe: Recipe) -> bool:
    """Whether they do, and the weight is cast as the recipe casts, where it can be cast again."""
    quantizer = weight._quantizer
    return reads(weight, recipe, "weight") and (
        quantizer is None or isinstance(quantizer, format_of(recipe).quantizer)
    )
