# SPDX-License-Identifier: Apache-2.0
"""`generic_gemm`; see `builtin.gemm`."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from transformer_engine.plugin.builtin import gemm as native
from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.pytorch.cpp_extensions.values import exact, quantized, refuse, torch_dtype
from transformer_engine.pytorch.torchside.modes import in_own_dtypes


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


@in_own_dtypes
@operator
def generic_gemm(
    call: Any,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """D = epilogue(alpha op(B) op(A) + beta D + bias), as row-major matrices."""
    op, bias, gelu_in = "generic_gemm", call.bias, call.gelu_in
    refuse(op, **{name: getattr(call, name) for name in native.WAITING})
    left, right = exact(op, "B", call.B), exact(op, "A", call.A).flatten(0, -2)
    right = right.t() if call.transA else right
    left = left.flatten(0, -2).t() if call.transB else left
    total = call.alpha * (left @ right)
    if call.accumulate:
        total = total + (1.0 if call.beta is None else call.beta) * exact(op, "D", call.D)
    wanted = bias is not None and bias.numel() > 0
    if wanted and not call.grad:
        total = total + exact(op, "bias", bias)
    dtype = call.A.dtype if call.D is None else call.D.dtype
    if call.output_dtype is not None:
        dtype = torch_dtype(op, "output_dtype", call.output_dtype)
    before = sums = None
    if call.gelu and call.grad:
        before = gelu_in
        x = exact(op, "gelu_in", gelu_in).view(total.shape).requires_grad_()
        with torch.enable_grad():
            through = _gelu(x)
        (total,) = torch.autograd.grad(through, x, total)
        sums = total.flatten(0, -2).sum(0) if wanted else None
    elif call.gelu:
        before = total.to(dtype)
        if gelu_in is not None:
            gelu_in.detach().copy_(before.view(gelu_in.shape))
            before = gelu_in
        total = _gelu(total)
    elif call.grad and wanted:
        sums = left.flatten(0, -2).sum(1)
    sums = None if sums is None else sums.to(bias.dtype)
    return quantized(op, total.to(dtype), call.quantizer, call.D), sums, before, None
