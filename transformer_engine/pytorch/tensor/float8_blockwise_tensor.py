# SPDX-License-Identifier: Apache-2.0
"""FP8 with a scale for each tile: of 1 x 128 elements along a row, or of 128 x 128."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.joints import Joint
from transformer_engine.pytorch.tensor.two_forms import (
    FORMS,
    TwoFormQuantizer,
    TwoFormStorage,
    TwoFormTensor,
    scale_shape,
)

_MODES = {1: _core.SCALING_BLOCK_1D, 2: _core.SCALING_BLOCK_2D}


class Float8BlockwiseQTensorStorage(TwoFormStorage):
    """FP8 bytes with a scale for each tile.

    Of data [M, K] with tiles of 1 x 128 the inverse scales are [ceil(K / 128), roundup(M, 4)],
    with tiles of 128 x 128 [ceil(M / 128), roundup(ceil(K / 128), 4)]. ``is_2D_scaled`` says which;
    the other arguments are those of `TwoFormStorage`.
    """

    _SETTINGS = ("_fp8_dtype", "_is_2D_scaled")
    _JOINTS = {  # column-wise data are transposed, and so are the scales of lines
        ("rowwise", False): Joint(0, 1, 1, 4, 1),
        ("rowwise", True): Joint(0, 0, 128, 1, 128),
        ("columnwise", False): Joint(1, 0, 128, 1, 128),
        ("columnwise", True): Joint(1, 1, 128, 4, 128),
    }
    _is_2D_scaled: bool

    def _mode(self) -> int:
        return _MODES[2 if self._is_2D_scaled else 1]

    def _of_layout(self) -> TwoFormQuantizer:
        dim = 2 if self._is_2D_scaled else 1
        return Float8BlockQuantizer(self._fp8_dtype, block_scaling_dim=dim)

    def _turned(self) -> tuple[Tensor, Tensor] | None:
        """Square tiles are the same tiles column-wise."""
        if not self._is_2D_scaled:
            return None
        *leading, columns = self._rowwise_data.shape
        shape = scale_shape(self._mode(), columns, torch.Size(leading).numel())
        turned = self._rowwise_scale_inv.new_empty(shape)
        return casts.transpose(self._rowwise_data), self._turn_scales(turned)

    def _turn(self) -> None:
        casts.transpose_into(self._rowwise_data, self._columnwise_data)
        self._turn_scales(self._columnwise_scale_inv)

    def _turn_scales(self, turned: Tensor) -> Tensor:
        """Write the scales of square tiles as those of the column-wise form; return them."""
        scales = self._rowwise_scale_inv
        along, across = scales.shape[0], turned.shape[0]
        if along == turned.shape[1]:
            return turned.copy_(scales[:, :across].t())
        turned[:, :along] = scales[:, :across].t()
        turned[:, along:] = 0.0
        return turned


class Float8BlockwiseQTensor(TwoFormTensor, Float8BlockwiseQTensorStorage):
    """A tensor in FP8 with a scale for each tile; see `Float8BlockwiseQTensorStorage`."""

    _STORAGE = Float8BlockwiseQTensorStorage

    _PICKLED = ("shape", *FORMS, "fp8_dtype", "dtype", "quantizer", "is_2D_scaled", "data_format")

    @classmethod
    def _of_pickle(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        data_format = arguments.pop("data_format", None)
        if data_format is not None and int(data_format) != 0:
            raise NotImplementedError(
                f"a pickled Float8BlockwiseQTensor: data_format={data_format!r}: its scales do not "
                "lie as those of GEMMs: quantize the values again"
            )
        return arguments


class Float8BlockQuantizer(TwoFormQuantizer):
    """Casts with a scale for each tile, a power of two unless `force_pow_2_scales` is False.

    Parameters
    ----------
    block_scaling_dim : {1, 2}, default 2
        Tiles of 1 x 128, or of 128 x 128. The other arguments are as of `CodesQuantizer`.
    """

    TENSOR, STORAGE = Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage
    _ARGUMENTS = (*TwoFormQuantizer._ARGUMENTS, "block_scaling_dim")

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        how = {"amax_epsilon": amax_epsilon, "force_pow_2_scales": force_pow_2_scales}
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise, **how)
        if block_scaling_dim not in _MODES:
            raise ValueError(
                f"Float8BlockQuantizer: block_scaling_dim={block_scaling_dim!r}, expected 1 or 2"
            )
        self.block_scaling_dim = block_scaling_dim
        self.block_len = 128

    def _mode(self) -> int:
        return _MODES[self.block_scaling_dim]

    def _format_settings(self, shape: tuple | None) -> dict[str, Any]:
        return {**super()._format_settings(shape), "_is_2D_scaled": self.block_scaling_dim == 2}
