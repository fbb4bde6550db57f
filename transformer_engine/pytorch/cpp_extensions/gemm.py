# SPDX-License-Identifier: Apache-2.0
"""`general_gemm`: one matrix product in high precision."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common import absent
from transformer_engine.pytorch.device import prepare_device

__getattr__, __dir__ = absent.attach(globals())
__all__ = ["general_gemm", *absent.names_of(__name__)]

_LAYOUTS = {
    "TN": lambda a, b: (b, a.t()),
    "NN": lambda a, b: (b, a),
    "NT": lambda a, b: (b.t(), a),
}
"""Left and right factor of the result, of row-major A and B."""

_obeying_gemm = _core.obeying("gemm")


def general_gemm(
    A: Tensor,
    B: Tensor,
    workspace: Any = None,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Tensor | None = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Multiply two matrices: B Aᵀ (TN), B A (NN) or Bᵀ A (NT), without a gradient.

    Parameters
    ----------
    A, B : Tensor
        Matrices of one dtype, fp32, fp16 or bf16; leading dims are flattened.
    workspace
        Ignored: the library finds its own. May be left out: a dtype in its place is `out_dtype`.
    out_dtype : torch.dtype, optional
        Of the result; that of `A` where None.
    accumulate : bool, default False
        Add to `out`.
    layout : str, default "TN"
        "TN", "NN" or "NT"; ValueError for another one.
    out : Tensor, optional
        To be written.
    bias : Tensor, optional
        [columns], added to the result; with `grad` its gradient is asked for: the column sums of B.
    use_split_accumulator : bool
        Ignored: sums are fp32.
    grad : bool, default False
        The product is one of a backward.
    quantization_params, gelu, gelu_in, alpha, beta, **options
        Quantized results, fused activations, factors, ``ub``, ``ub_type``, ``extra_output``,
        ``bulk_overlap``: NotImplementedError for anything but the defaults.

    Returns
    -------
    tuple
        (result, gradient of the bias or None, None, None).
    """
    del use_split_accumulator
    if isinstance(workspace, torch.dtype):
        out_dtype = workspace
    refused = {"quantization_params": quantization_params, "gelu": gelu, "gelu_in": gelu_in}
    refused |= {"beta": beta, "alpha": alpha != 1.0, **options}
    for name, value in refused.items():
        if value is not None and value is not False:
            raise absent.refusal("pytorch.cpp_extensions.general_gemm", f"({name}=...)")
    if layout not in _LAYOUTS:
        raise ValueError(f"general_gemm: layout={layout!r}, expected one of {', '.join(_LAYOUTS)}")
    if accumulate and out is None:
        raise ValueError("general_gemm: accumulate=True needs out")
    A, B = A.detach().flatten(0, -2), B.detach().flatten(0, -2)
    left, right = _LAYOUTS[layout](A, B)
    if out is None:
        shape = (left.shape[0], right.shape[1])
        out = torch.empty(shape, dtype=out_dtype or A.dtype, device=A.device)
    prepare_device(A.device)
    adds = bias is not None and bias.numel() > 0 and not grad
    tf32 = torch.backends.cuda.matmul.allow_tf32
    added = bias.detach() if adds else None
    operands = {"a": left, "b": right, "bias": added}
    _obeying_gemm(out.detach(), **operands, accumulate=accumulate, allow_tf32=tf32)
    sums = B.sum(0, dtype=torch.float32).to(bias.dtype) if grad and bias is not None else None
    return out, sums, None, None
