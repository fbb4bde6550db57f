# SPDX-License-Identifier: Apache-2.0
"""`generic_gemm`, which is `general_gemm` by other arguments."""

from typing import Any

from torch import Tensor

from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.pytorch.cpp_extensions.product import product
from transformer_engine.pytorch.cpp_extensions.values import refuse
from transformer_engine.pytorch.execution.overrides import native

WAITING = ("comm_overlap", "extra_output", "bulk_overlap")
"""Arguments that wait for user buffers."""


@native
@operator
def generic_gemm(call: Any) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """D = epilogue(alpha op(B) op(A) + beta D + bias), as row-major matrices.

    op transposes where `transA`, `transB` say so; leading dims of a matrix are flattened. Sums are
    fp32. With alpha and beta at their defaults, a bias in the dtype of the result (of quantized
    operands: bf16, or fp16 where the result is) and operands that one GEMM reads, one native call
    computes all of it; else the product is made in fp32 and the rest is torch's. So is the gradient
    of a bias of quantized operands, or of operands in another dtype than the bias has.

    Parameters
    ----------
    A, B : Tensor
        In fp32, fp16 or bf16; or quantized, tensors or storages of any format. Row-wise data are
        read of `A` where `transA`, and of `B` where not `transB`; else column-wise ones. Operands
        that no kernel reads together are multiplied in fp32, and counted as ``emulated.mixed``; so
        is one that lacks the form that is read.
    D : Tensor, optional
        To be written, and returned: of the result's shape, plain or quantized.
    quantizer : Quantizer, optional
        What casts the result, from `output_dtype`.
    output_dtype : torch.dtype or DType, optional
        Of the result; that of `D`, or of `A`, where None.
    bias : Tensor, optional
        [columns], added; with `grad` its gradient is asked for instead.
    gelu : bool
        The result is gelu of what it is without; with `grad` it is multiplied by the derivative of
        gelu at `gelu_in`.
    gelu_in : Tensor, optional
        Of the shape of the result: with `grad` read, else written where it is given.
    grad : bool
        The product is one of a backward.
    accumulate : bool
        Add to `D`; `beta` is 1 where None.
    use_split_accumulator : bool
        FP8 on Hopper: add up in fp32 often; False is faster and less precise.
    comm_overlap, extra_output, bulk_overlap
        NotImplementedError unless None or False: they wait for user buffers.
    alpha, beta : float
        Factors of the product and of `D`.
    bias_type, workspace, workspace_size, comm_type
        Not needed.

    Returns
    -------
    tuple
        (result, gradient of the bias or None, what gelu was applied to or None, None). The gradient
        of the bias are the sums of op(B), dequantized, over what the product sums over, or with
        `gelu` the column sums of the result.

    Raises
    ------
    TypeError, ValueError
        Arguments that do not go together.
    """
    op = "generic_gemm"
    refuse(op, **{name: getattr(call, name) for name in WAITING})
    return product(
        op,
        (call.A, call.transA, call.B, call.transB),
        (call.D, call.quantizer, call.output_dtype),
        (call.bias, call.gelu, call.gelu_in, call.grad),
        (call.accumulate, call.alpha, call.beta),
        call.use_split_accumulator,
    )
