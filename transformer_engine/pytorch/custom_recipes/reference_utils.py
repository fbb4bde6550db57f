# SPDX-License-Identifier: Apache-2.0
"""Code that the reference quantizers share: their tensors are plain ones of PyTorch.

Under a `CustomRecipe` they are called at their stage, and what they make is multiplied out.
"""

import copy
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.custom_recipes.gemm import GEMMType, MMParams
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor.quantizer import Quantizer

HIGH_PRECISION_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Values that are not quantized."""


class Fp4Formats(Enum):
    """Element types of four bits."""

    E2M1 = "e2m1"


def roundup_div(x: int, y: int) -> int:
    """The smallest integer that is not below x / y; both are positive."""
    return -(-x // y)


_PAIRS = {"data": "data_t", "scale": "scale_t", "global_amax_row": "global_amax_col"}
_OTHERS = _PAIRS | {column: row for row, column in _PAIRS.items()}
"""The field of the other form."""


class ReferenceTensor(QuantizedTensorStorage):
    """A matrix in two forms: `data` and `scale` by rows, `data_t` and `scale_t` of its transpose.

    `original_shape` is that of what was cast, whose leading dims are flattened.
    """

    custom = True
    _CAST_APART = True
    _TENSORS: tuple[str, ...] = ("data", "scale", "data_t", "scale_t")
    _SETTINGS: tuple[str, ...] = ("quant_dtype", "original_shape")
    _FORMS = _TENSORS[:2], _TENSORS[2:]

    data: Tensor | None
    scale: Tensor | None
    data_t: Tensor | None
    scale_t: Tensor | None
    quant_dtype: Any
    original_shape: tuple[int, ...]

    def __init__(self, fields: dict[str, Any], dtype: torch.dtype | None) -> None:
        self._take(fields, torch.float32 if dtype is None else dtype)

    def _extent(self) -> tuple[int, ...]:
        return tuple(self.original_shape)

    def _values(self, transposed: bool) -> Tensor:
        """Values of a form, in fp32, as a matrix."""
        raise NotImplementedError

    def _decoded(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        transposed = self.data is None
        if transposed and self.data_t is None:
            raise RuntimeError(f"{type(self).__name__}: both forms were dropped: keep one")
        values = self._values(transposed)
        return (values.t() if transposed else values).reshape(shape).to(dtype)

    def detach(self) -> "ReferenceTensor":
        """Another one over the same data."""
        return copy.copy(self)

    def _make_form(self, form: str) -> None:
        raise RuntimeError(f"{type(self).__name__}: a dropped form is not made again")


class ReferenceQuantizer(Quantizer):
    """Base: makes storages, by a cast in PyTorch."""

    custom = True
    supports_allgather_fp8 = False

    def __init__(self, rowwise: bool, columnwise: bool) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.internal = True

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
    ) -> Any:
        """A tensor of zeros of a shape and nominal dtype; the storage takes no gradient."""
        del requires_grad
        return self.quantize(torch.zeros(tuple(shape), dtype=dtype, device=device))

    def quantize_impl(self, tensor: Tensor) -> Any:
        """Cast a tensor, whose leading dims are flattened."""
        fields = self._cast_matrix(tensor.reshape(-1, tensor.shape[-1]))
        fields |= {"original_shape": tuple(tensor.shape), "_quantizer": self}
        return self.STORAGE._made(fields, tensor.dtype)

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Cast into an existing tensor; nothing where `noop_flag` is not 0."""
        if noop_flag is None or noop_flag.item() == 0:
            dst._take(self.quantize(src, dtype=dst.dtype)._fields(), dst.dtype)
        return dst

    def _cast_matrix(self, matrix: Tensor) -> dict[str, Any]:
        """Fields of the forms of a matrix."""
        raise NotImplementedError

    def transpose_qresult(self, qresult: Any) -> Any:
        """The tensor of the transpose: the forms change places."""
        swapped = {n: getattr(qresult, _OTHERS[n]) for n in qresult._TENSORS}
        rows = qresult.original_shape
        size = (rows[-1], torch.Size(rows[:-1]).numel())
        fields = {**qresult._fields(), **swapped, "original_shape": size}
        return self.STORAGE._made(fields, qresult.dtype)

    def qgemm(
        self,
        qx: Tensor,
        qw: Tensor,
        m_params: MMParams,
        out_dtype: torch.dtype,
        sx: Tensor,
        sw: Tensor,
        bias: Tensor | None = None,
        out: Tensor | None = None,
        accumulate: bool = False,
        gemm_type: GEMMType = GEMMType.FPROP,
        qresult_x: Any = None,
        qresult_w: Any = None,
    ) -> Tensor:
        """Multiply codes of x [rows, k] and w [columns, k], with their scales: x w^T (+ bias).

        fp32 sums in `out_dtype`, added to `out` with `accumulate`. `qresult_x` and `qresult_w` are
        the tensors whose codes these are, of the forms that `gemm_type` reads: column-wise ones of
        both for WGRAD, of w for DGRAD. A format reads of them what scales do not have.
        """
        del m_params
        x = self._operand(qx, sx, qresult_x, gemm_type is GEMMType.WGRAD)
        w = self._operand(qw, sw, qresult_w, gemm_type is not GEMMType.FPROP)
        return high_precision_gemm_ref(x, w, out_dtype, accumulate, False, True, out, bias)

    def _operand(self, codes: Tensor, scale: Tensor, qresult: Any, column: bool) -> Tensor:
        """Values of codes in fp32, of a form of `qresult`."""
        raise NotImplementedError


def high_precision_gemm_ref(
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    accumulate: bool = False,
    is_a_transposed: bool = False,
    is_b_transposed: bool = False,
    out: Tensor | None = None,
    bias: Tensor | None = None,
    scale_alpha: float = 1.0,
) -> Tensor:
    """Compute alpha a b (+ bias) (+ out) in fp32; matrices may be given as their transposes."""
    left, right = (m.t() if t else m for m, t in ((a, is_a_transposed), (b, is_b_transposed)))
    made = scale_alpha * (left.float() @ right.float())
    if bias is not None and bias.numel() > 0:
        made = made + bias.float()
    if accumulate:
        if out is None:
            raise ValueError("high_precision_gemm_ref: accumulate=True needs out")
        made = made + out.float()
    return made.to(out_dtype) if out is None else out.copy_(made)
