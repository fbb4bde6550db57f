# SPDX-License-Identifier: Apache-2.0
"""Products of what reference quantizers make, as their ``qgemm`` computes them."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class GEMMType(Enum):
    """Which product of a linear layer one is."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


@dataclass(frozen=True)
class MMParams:
    """Settings of a product: its dtype, and how FP8 sums are kept (here always in fp32)."""

    out_dtype: torch.dtype | None = None
    use_split_accumulator: bool = True


_LAYOUTS = {
    "TN": (GEMMType.FPROP, False, False),
    "NN": (GEMMType.DGRAD, False, True),
    "NT": (GEMMType.WGRAD, True, True),
}
"""The product, and whether B and A are read in their transposed form."""


def custom_gemm(
    A: Any,
    B: Any,
    workspace: Any,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Multiply tensors of one reference quantizer: B A^T (TN), B A (NN) or B^T A (NT).

    Arguments and result as of `cpp_extensions.general_gemm`; `workspace` is not read. TypeError
    where A or B was made by another quantizer, RuntimeError where the form that the product reads
    was not made, NotImplementedError for `gelu` and `quantization_params`.
    """
    del workspace
    for name, value in (("gelu", gelu or gelu_in), ("quantization_params", quantization_params)):
        if value is not None and value is not False:
            raise NotImplementedError(f"custom_gemm: {name}=...: multiply, then apply it")
    if layout not in _LAYOUTS:
        raise ValueError(f"custom_gemm: layout={layout!r}, expected one of {', '.join(_LAYOUTS)}")
    for name, tensor in (("A", A), ("B", B)):
        if not hasattr(getattr(tensor, "_quantizer", None), "qgemm"):
            raise TypeError(
                f"custom_gemm: {name}: {type(tensor).__name__} object, expected a tensor that a "
                "quantizer with qgemm() has made"
            )
    kind, *turned = _LAYOUTS[layout]
    operands = []
    for name, tensor, transposed in zip("BA", (B, A), turned, strict=True):
        end = "_t" if transposed else ""
        data, scale = getattr(tensor, f"data{end}"), getattr(tensor, f"scale{end}")
        if data is None:
            form = "columnwise" if transposed else "rowwise"
            raise RuntimeError(f"custom_gemm: {name}: its {form} form was not made, or was dropped")
        operands.append((data, scale))
    (qx, sx), (qw, sw) = operands
    made = B._quantizer.qgemm(
        qx,
        qw,
        MMParams(out_dtype, use_split_accumulator),
        out_dtype or A.dtype,
        sx,
        sw,
        bias=None if grad else bias,
        out=out,
        accumulate=accumulate,
        gemm_type=kind,
        qresult_x=B,
        qresult_w=A,
    )
    sums = None
    if grad and bias is not None:
        sums = B.dequantize(dtype=torch.float32).flatten(0, -2).sum(0).to(bias.dtype)
    return made, sums, None, None
