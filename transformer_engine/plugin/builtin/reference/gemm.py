# SPDX-License-Identifier: Apache-2.0
"""`generic_gemm`, in fp32; see `builtin.gemm`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from transformer_engine.plugin.builtin.values import exact, quantized, refuse, torch_dtype
from transformer_engine.pytorch.torchside.modes import in_own_dtypes


@in_own_dtypes
def generic_gemm(
    A: Tensor,
    transA: bool,
    B: Tensor,
    transB: bool,
    D: Tensor,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """D = epilogue(alpha op(B) op(A) + beta D + bias), as row-major matrices."""
    op = "generic_gemm"
    refuse(op, comm_overlap=comm_overlap, extra_output=extra_output, bulk_overlap=bulk_overlap)
    left, right = (exact(op, name, t) for name, t in (("B", B), ("A", A)))
    right = right.flatten(0, -2).t() if transA else right.flatten(0, -2)
    left = left.flatten(0, -2).t() if transB else left
    total = alpha * (left @ right)
    if accumulate:
        total = total + (1.0 if beta is None else beta) * exact(op, "D", D)
    wanted = bias is not None and bias.numel() > 0
    if wanted and not grad:
        total = total + bias.detach().float()
    default = A.dtype if D is None else D.dtype
    dtype = default if output_dtype is None else torch_dtype(op, "output_dtype", output_dtype)
    before = sums = None
    if gelu and grad:
        before = gelu_in
        x = gelu_in.detach().float().view(total.shape).requires_grad_()
        with torch.enable_grad():
            through = functional.gelu(x, approximate="tanh")
        (total,) = torch.autograd.grad(through, x, total)
        sums = total.flatten(0, -2).sum(0) if wanted else None
    elif gelu:
        before = total.to(dtype)
        if gelu_in is not None:
            gelu_in.detach().copy_(before.view(gelu_in.shape))
            before = gelu_in
        total = functional.gelu(total, approximate="tanh")
    elif grad and wanted:
        sums = left.flatten(0, -2).sum(1)
    sums = None if sums is None else sums.to(bias.dtype)
    return quantized(op, total.to(dtype), quantizer, D), sums, before, None
