# SPDX-License-Identifier: Apache-2.0
"""Which quantizer a recipe casts parameters with, and what its GEMMs can read of them: one table.

A recipe is in it where GEMMs read a format as it is stored; where it is not, parameters of modules
stay in high precision (`quantized_model_init` says so).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common.graphs import INPUT_GIVEN, WEIGHT_GIVEN, WEIGHT_ROWS
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

_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Format(NamedTuple):
    """How a recipe keeps parameters."""

    holds: str  # the method of recipes that says whether one is of this kind
    quantizer: type[Quantizer]
    make: Callable[[Recipe, torch.device], Quantizer]
    tensor: type  # what the quantizer makes
    reads: Callable[[Any, Recipe, str], bool]
    """Whether GEMMs of a recipe read such a tensor as its "input" or "weight"."""
    forms: Callable[[Any, bool, bool], tuple[tuple, int]]
    """What a call reads of a tensor, and flags of its part: given the tensor, whether it is the
    weight, and whether a backward may follow."""


def _delayed(recipe: Recipe, device: torch.device) -> Quantizer:
    first = recipe.measure_first
    scale = torch.full((1,), 0.0 if first else 1.0, device=device)
    options = {"columnwise": False, "measure_first": first}
    return Float8Quantizer(scale, torch.zeros_like(scale), _element(recipe), **options)


def _current(recipe: Recipe, device: torch.device) -> Quantizer:
    how = recipe.fp8_quant_fwd_weight
    return Float8CurrentScalingQuantizer(
        _element(recipe),
        device,
        columnwise=False,
        force_pow_2_scales=how.power_2_scale,
        amax_epsilon=how.amax_epsilon,
    )


def _element(recipe: Recipe) -> Any:
    return fp8_type("fp8_format", _CODES[recipe.fp8_format.dtype_name("fwd")])


def _block(recipe: Recipe, device: torch.device) -> Quantizer:
    del device
    how, dim = recipe.fp8_quant_fwd_weight, recipe.w_block_scaling_dim
    return Float8BlockQuantizer(
        _element(recipe),
        columnwise=dim == 1,  # square tiles are turned where a backward reads them
        force_pow_2_scales=how.power_2_scale,
        amax_epsilon=how.amax_epsilon,
        block_scaling_dim=dim,
    )


def _row(recipe: Recipe, device: torch.device) -> Quantizer:
    del device
    how = recipe.fp8_quant_fwd_weight
    options = {"force_pow_2_scales": how.power_2_scale, "amax_epsilon": how.amax_epsilon}
    return Float8RowQuantizer(_element(recipe), **options)


def _mxfp8(recipe: Recipe, device: torch.device) -> Quantizer:
    del device
    return MXFP8Quantizer(_element(recipe), with_2d_quantization=recipe.enable_2d_quantization)


def _nvfp4(recipe: Recipe, device: torch.device) -> Quantizer:
    del device
    return NVFP4Quantizer(with_2d_quantization=recipe.fp4_quant_fwd_weight.fp4_2d_quantization)


# ---- what calls read -----------------------------------------------------------------------------


def _any(tensor: Any, recipe: Recipe, role: str) -> bool:
    del role
    return tensor._fp8_dtype == _element(recipe)


def _has_both(tensor: Any, recipe: Recipe, role: str) -> bool:
    """Of an input that is not cast both ways a backward could not be computed."""
    return _any(tensor, recipe, role) and _is_whole(tensor, role)


def _is_whole(tensor: Any, role: str) -> bool:
    return role == "weight" or not torch.is_grad_enabled() or all(tensor.get_usages().values())


def _has_tiles(tensor: Any, recipe: Recipe, role: str) -> bool:
    dims = {"input": recipe.x_block_scaling_dim, "weight": recipe.w_block_scaling_dim}
    return tensor._is_2D_scaled == (dims[role] == 2) and _has_both(tensor, recipe, role)


def _is_fp4_of(tensor: Any, recipe: Recipe, role: str) -> bool:
    """Transformed as the gradient is that it meets, and never transformed where that is not."""
    how = recipe.fp4_quant_fwd_weight if role == "weight" else recipe.fp4_quant_fwd_inp
    transformed = how.random_hadamard_transform if role == "input" else False
    return (
        tensor._with_rht == transformed
        and tensor._is_2D_scaled == how.fp4_2d_quantization
        and _is_whole(tensor, role)
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


def _per_tensor(tensor: Any, weight: bool, backward: bool) -> tuple[tuple, int]:
    """A weight's transpose is read where there is one; else the backward makes it for itself."""
    row = _rows(tensor, tensor._data)
    transposes = torch.compiler.is_compiling() or tensor._transpose_invalid
    if weight and transposes and tensor.shape[-1] % casts.ALIGNMENT == 0:
        return (row, None, tensor._scales), WEIGHT_GIVEN | WEIGHT_ROWS
    column = None
    if backward:
        made = casts.transpose(tensor._data) if transposes else tensor._transpose
        column = _columns(tensor, made)
    return (row, column, tensor._scales), WEIGHT_GIVEN if weight else INPUT_GIVEN


def _two_forms(tensor: Any, weight: bool, backward: bool) -> tuple[tuple, int]:
    """Column-wise data that are not there are made for the call, where they can be."""
    row = _rows(tensor, tensor._rowwise_data)
    column, scales = tensor._columnwise_data, tensor._columnwise_scale_inv
    if backward and column is None:
        made = tensor._turned()
        if made is None:
            raise RuntimeError(
                f"{type(tensor).__name__}: its column-wise data were dropped, which a backward "
                "reads: run without gradients, or quantize with both usages"
            )
        column, scales = made
    column = _columns(tensor, column) if backward else None
    forms = (row, column, tensor._rowwise_scale_inv, scales, *tensor.get_data_tensors()[4:])
    return forms, WEIGHT_GIVEN if weight else INPUT_GIVEN


_PER_TENSOR = (Float8Tensor, _any, _per_tensor)
_FORMATS = (
    Format("delayed", Float8Quantizer, _delayed, *_PER_TENSOR),
    Format("float8_current_scaling", Float8CurrentScalingQuantizer, _current, *_PER_TENSOR),
    Format(
        "float8_block_scaling",
        Float8BlockQuantizer,
        _block,
        Float8BlockwiseQTensor,
        _has_tiles,
        _two_forms,
    ),
    Format("float8_row_scaling", Float8RowQuantizer, _row, Float8RowTensor, _has_both, _two_forms),
    Format("mxfp8", MXFP8Quantizer, _mxfp8, MXFP8Tensor, _has_both, _two_forms),
    Format("nvfp4", NVFP4Quantizer, _nvfp4, NVFP4Tensor, _is_fp4_of, _two_forms),
)


def format_of(recipe: Recipe) -> Format | None:
    """The row of a recipe; None where it has none."""
    return next((row for row in _FORMATS if getattr(recipe, row.holds)()), None)


def weight_quantizer(recipe: Recipe, device: torch.device) -> Quantizer:
    """A quantizer of weights; NotImplementedError for a recipe that keeps none."""
    row = format_of(recipe)
    if row is None:
        raise NotImplementedError(
            f"quantized_model_init: {type(recipe).__name__}: it says no format to keep weights in: "
            "use DelayedScaling() or another recipe that does, or leave quantized_model_init out"
        )
    return row.make(recipe, device)


def reads(tensor: Any, recipe: Recipe, role: str) -> bool:
    """Whether GEMMs of a recipe read a quantized tensor as it is, as "input" or "weight"."""
    row = format_of(recipe)
    return row is not None and isinstance(tensor, row.tensor) and row.reads(tensor, recipe, role)


def fits(weight: Any, recipe: Recipe) -> bool:
    """Whether they do, and the weight is cast as the recipe casts, where it can be cast again."""
    quantizer = weight._quantizer
    return reads(weight, recipe, "weight") and (
        quantizer is None or isinstance(quantizer, format_of(recipe).quantizer)
    )
