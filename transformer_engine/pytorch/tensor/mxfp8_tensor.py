# SPDX-License-Identifier: Apache-2.0
"""MXFP8: FP8 with an exponent for each 32 values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.joints import Joint
from transformer_engine.pytorch.tensor.quantizer_arguments import as_bytes
from transformer_engine.pytorch.tensor.two_forms import (
    FORMS,
    TwoFormQuantizer,
    TwoFormStorage,
    TwoFormTensor,
    rows_of_scales,
)


class MXFP8TensorStorage(TwoFormStorage):
    """FP8 bytes with an exponent (E8M0, uint8) for each 32 values along the last dim, or across.

    Column-wise data are not transposed: both are [M, K], with scales
    [roundup(M, 128), roundup(ceil(K / 32), 4)] and [roundup(ceil(M / 32), 4), roundup(K, 128)].
    They lie row after row: ``with_gemm_swizzled_scales=True`` raises NotImplementedError. With
    ``is_2D_scaled`` squares of 32 x 32 values have one exponent, repeated.
    """

    _SETTINGS = ("_fp8_dtype", "_is_2D_scaled", "_with_gemm_swizzled_scales")
    _JOINTS = {
        ("rowwise", False): Joint(0, 0, 1, 128, 1),
        ("rowwise", True): Joint(0, 0, 1, 128, 32),
        ("columnwise", False): Joint(0, 0, 32, 4, 32),
        ("columnwise", True): Joint(0, 0, 32, 4, 32),
    }
    _is_2D_scaled: bool
    _with_gemm_swizzled_scales = rows_of_scales

    _MODE = _core.SCALING_MXFP8

    def _take(self, fields: dict[str, Any], dtype: torch.dtype) -> None:
        if fields.get("_is_2D_scaled") is None:  # nobody said so: as new values would be cast
            square = getattr(fields.get("_quantizer"), "with_2d_quantization", False)
            fields = {**fields, "_is_2D_scaled": square}
        super()._take(fields, dtype)

    def _of_layout(self) -> TwoFormQuantizer:
        return MXFP8Quantizer(self._fp8_dtype)

    def _turned(self) -> tuple[Tensor, Tensor] | None:
        """Squares are the same column-wise, and data are not transposed."""
        if not self._is_2D_scaled:
            return None
        data = self._rowwise_data
        return casts.empty_rows(data.shape, data.device).copy_(data), self._turned_scales()

    def _memory_of_columns(self, fields: dict[str, Any], shape: tuple) -> dict[str, Any]:
        scales = self._shapes(shape)["_columnwise_scale_inv"]
        return {
            "_columnwise_data": fields["_rowwise_data"],  # they lie alike in both forms
            "_columnwise_scale_inv": self._rowwise_scale_inv.new_empty(scales),
        }

    def _turn(self) -> None:
        """Write the scales: the data are those of both forms."""
        self._columnwise_scale_inv.copy_(self._turned_scales())

    def _turned_scales(self) -> Tensor:
        """Column-wise scales of squares."""
        data, scales = self._rowwise_data, self._rowwise_scale_inv
        rows, columns = data.shape[:-1].numel(), data.shape[-1]
        across = -(-columns // 32)
        found = scales[:rows:32, :across].repeat_interleave(32, 1)[:, :columns]
        turned = scales.new_zeros(-(-rows // 128) * 4, -(-columns // 128) * 128)
        turned[: found.shape[0], :columns] = found
        return turned

    def _shape_of_columns(self, data: Tensor) -> tuple[int, ...]:
        return tuple(data.shape)

    def _viewed_columns(self, data: Tensor, shape: Sequence[int]) -> Tensor:
        return data.view(tuple(shape))


class MXFP8Tensor(TwoFormTensor, MXFP8TensorStorage):
    """A tensor in MXFP8; see `MXFP8TensorStorage`."""

    _STORAGE = MXFP8TensorStorage

    _PICKLED = (*FORMS, "fp8_dtype", "dtype", "shape", "quantizer", "with_gemm_swizzled_scales")


class MXFP8Quantizer(TwoFormQuantizer):
    """Casts to MXFP8.

    Parameters
    ----------
    fp8_dtype, rowwise, columnwise
        As of `CodesQuantizer`.
    with_2d_quantization : bool, default False
        Squares of 32 x 32 values have one exponent.
    margin : int, default 0
        Powers of two left free below the largest number, -126 to 126 (not the incumbent's).
    """

    TENSOR, STORAGE = MXFP8Tensor, MXFP8TensorStorage
    _ARGUMENTS = ("fp8_dtype", "with_2d_quantization", "margin")
    _SCALES = torch.uint8
    _empty_columns = staticmethod(casts.empty_rows)

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
        margin: int = 0,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.with_2d_quantization = bool(with_2d_quantization)
        if not -126 <= margin <= 126:
            raise ValueError(f"MXFP8Quantizer: margin={margin}, expected -126 to 126")
        self.margin = int(margin)

    def get_columnwise_shape(self, rowwise_data_shape: Sequence[int]) -> tuple[int, ...]:
        """That of the tensor; ValueError for one without dims."""
        self._check_shape(tuple(rowwise_data_shape))
        return tuple(rowwise_data_shape)

    def create_tensor_from_data(
        self,
        data: Tensor,
        scale_inv: Tensor,
        fake_dtype: torch.dtype,
        fp8_dtype: Any = DType.kFloat8E4M3,
    ) -> MXFP8Tensor:
        """Take bytes and their scales for row-wise data; ValueError for scales of another shape."""
        options = {"fp8_dtype": fp8_dtype, "quantizer": self.copy()}
        options["is_2D_scaled"] = self.with_2d_quantization
        shape = as_bytes("MXFP8Quantizer.create_tensor_from_data: data", data).shape
        return MXFP8Tensor(
            shape, fake_dtype, rowwise_data=data, rowwise_scale_inv=scale_inv, **options
        )

    def _format_settings(self, shape: tuple | None) -> dict[str, Any]:
        return {
            **super()._format_settings(shape),
            "_is_2D_scaled": self.with_2d_quantization,
            "_with_gemm_swizzled_scales": False,
        }

    def _how(self, source: Tensor, into: Any, amax: Tensor | None) -> dict[str, Any]:
        del source, amax
        return {"square": into._is_2D_scaled, "margin": self.margin}
