# SPDX-License-Identifier: Apache-2.0
"""FP8 with a scale for each row of what a GEMM reads, for `Float8RowScaling`."""

from typing import ClassVar

from transformer_engine import _core
from transformer_engine.pytorch.tensor.joints import Joint
from transformer_engine.pytorch.tensor.two_forms import (
    TwoFormQuantizer,
    TwoFormStorage,
    TwoFormTensor,
)


class Float8RowTensorStorage(TwoFormStorage):
    """FP8 bytes with a scale for each row, and for each column of the column-wise form.

    Of data [M, K] ``rowwise_scale_inv`` is [2, M]: inverse scales, and the largest magnitudes that
    they were made of.
    """

    _MODE = _core.SCALING_ROW
    _GATHERED: ClassVar[dict] = {("rowwise", False): Joint(0, 1, 1, 1, 1)}

    def _of_layout(self) -> TwoFormQuantizer:
        return Float8RowQuantizer(self._fp8_dtype)


class Float8RowTensor(TwoFormTensor, Float8RowTensorStorage):
    """A tensor in FP8 with a scale for each row; see `Float8RowTensorStorage`."""

    _STORAGE = Float8RowTensorStorage


class Float8RowQuantizer(TwoFormQuantizer):
    """Casts with a scale for each row; arguments as of `CodesQuantizer`."""

    TENSOR, STORAGE = Float8RowTensor, Float8RowTensorStorage
