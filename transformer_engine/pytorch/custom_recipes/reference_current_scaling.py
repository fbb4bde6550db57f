# SPDX-License-Identifier: Apache-2.0
"""FP8 with one scale for a tensor, found in the tensor, in PyTorch's own operators."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.recipe import QuantizerRole
from transformer_engine.plugin.definitions.codes import encode, largest_of, reciprocal
from transformer_engine.plugin.definitions.scales import largest, numbers, scale_of_amax
from transformer_engine.pytorch.custom_recipes.quantizer_factories import tensor_of
from transformer_engine.pytorch.custom_recipes.reference_utils import (
    ReferenceQuantizer,
    ReferenceTensor,
)


class CurrentScalingTensorRef(ReferenceTensor):
    """FP8 codes of a matrix and of its transpose; a value is its code times `scale`, fp32 [1]."""

    def __init__(
        self,
        data: Tensor | None = None,
        scale: Tensor | None = None,
        data_t: Tensor | None = None,
        scale_t: Tensor | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        quant_dtype: torch.dtype | None = None,
        original_shape: tuple[int, ...] | None = None,
        _quantizer: Any = None,
    ) -> None:
        del device  # that of the data
        given = {"data": data, "scale": scale, "data_t": data_t, "scale_t": scale_t}
        given |= {"quant_dtype": quant_dtype, "original_shape": original_shape}
        super().__init__({**given, "_quantizer": _quantizer}, dtype)

    def _values(self, transposed: bool) -> Tensor:
        data, scale = (self.data_t, self.scale_t) if transposed else (self.data, self.scale)
        return numbers(data) * scale


class CurrentScalingQuantizerRef(ReferenceQuantizer):
    """Casts to FP8 by the largest magnitude of a tensor.

    Parameters
    ----------
    dtype : torch.dtype
        ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
    rowwise, columnwise : bool, default True
        Which forms to make.
    pow_2_scales : bool, default False
        Round the scale down to a power of two.
    eps : float, default 0.0
        Smallest amax.
    """

    STORAGE = CurrentScalingTensorRef

    def __init__(
        self,
        dtype: torch.dtype,
        rowwise: bool = True,
        columnwise: bool = True,
        pow_2_scales: bool = False,
        eps: float = 0.0,
    ) -> None:
        super().__init__(rowwise, columnwise)
        self.dtype, self.pow_2_scales, self.eps = dtype, bool(pow_2_scales), float(eps)

    @staticmethod
    def compute_scale(
        x: Tensor, quant_dtype: torch.dtype, eps: float = 0.0, pow_2_scales: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(scale, 1 / scale), fp32 [1]: the largest code / amax, at least of `eps`.

        1 where the amax is 0 or Inf; at most the largest fp32 number.
        """
        scale = scale_of_amax(
            largest(x.detach().float()), largest_of(quant_dtype), eps, pow_2_scales
        )
        return scale, reciprocal(scale)

    def _cast_matrix(self, matrix: Tensor) -> dict[str, Any]:
        scale, inverse = self.compute_scale(matrix, self.dtype, self.eps, self.pow_2_scales)
        data = encode(matrix.detach().float() * scale, self.dtype).view(self.dtype)
        fields: dict[str, Any] = {"quant_dtype": self.dtype}
        if self.rowwise_usage:
            fields |= {"data": data, "scale": inverse}
        if self.columnwise_usage:
            fields |= {"data_t": data.t().contiguous(), "scale_t": inverse}
        return fields

    def dequantize(self, tensor: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Codes times a scale, in fp32 where `dtype` is None."""
        return (numbers(tensor) * scale).to(dtype or torch.float32)

    def _operand(self, codes: Tensor, scale: Tensor, qresult: Any, column: bool) -> Tensor:
        del qresult, column
        return self.dequantize(codes, scale)


def current_scaling_ref_factory(role: QuantizerRole | None) -> CurrentScalingQuantizerRef:
    """For `CustomRecipe`: as `current_scaling_factory`, by the reference."""
    gradient = tensor_of(role) == "gradient"
    return CurrentScalingQuantizerRef(torch.float8_e5m2 if gradient else torch.float8_e4m3fn)
