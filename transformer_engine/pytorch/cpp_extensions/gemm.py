# SPDX-License-Identifier: Apache-2.0
"""Products of operands in any format, as modules compute theirs: one, or one for each pair."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.cpp_extensions.product import product
from transformer_engine.pytorch.cpp_extensions.values import refuse
from transformer_engine.pytorch.custom_recipes.gemm import custom_gemm

__all__ = ["general_gemm", "general_grouped_gemm", *absent.names_of(__name__)]
__getattr__, __dir__ = absent.attach(globals())

_LAYOUTS = {"TN": (True, False), "NN": (False, False), "NT": (False, True)}
"""True where A and B are transposed, by letters."""


def general_gemm(
    A: Any,
    B: Any,
    out_dtype: torch.dtype | None = None,
    quantization_params: Any = None,
    gelu: bool = False,
    gelu_in: Tensor | None = None,
    alpha: float = 1.0,
    beta: float | None = None,
    accumulate: bool = False,
    layout: str = "TN",
    out: Any = None,
    bias: Tensor | None = None,
    use_split_accumulator: bool = False,
    grad: bool = False,
    ub: Any = None,
    ub_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """Multiply two matrices: B Aᵀ (TN), B A (NN) or Bᵀ A (NT), without a gradient.

    These are the products of a linear layer: its output of weight and input (TN), the gradient of
    its input of weight and gradient (NN), that of its weight of input and gradient (NT). Of the
    tensors that the layer multiplies they have its bits. Plug-ins are asked as modules ask them.

    Parameters
    ----------
    A, B : Tensor
        [.., columns] in fp32, fp16 or bf16, or quantized: tensors or storages of any format, of
        which TN reads the row-wise forms, NN the column-wise one of A and the row-wise one of B, NT
        the column-wise ones. Leading dims are flattened. Two of a reference quantizer
        (`custom_recipes`) are multiplied by its ``qgemm``. Operands that no kernel reads together,
        and one that lacks its form, are multiplied out, which counts as ``emulated.mixed``.
    out_dtype : torch.dtype, optional
        Of the result; that of `out`, or of `A` (of a quantized one its nominal dtype), where None.
    quantization_params : Quantizer, optional
        What casts the result, which is returned quantized.
    gelu : bool, default False
        The result is gelu of what it is without; with `grad` it is multiplied by the derivative of
        gelu at `gelu_in`.
    gelu_in : Tensor, optional
        Of the shape of the result: with `grad` read, else written where it is given.
    alpha, beta : float
        Factors of the product and of `out`; `beta` is 1 where None. ValueError for one without
        `accumulate`.
    accumulate : bool, default False
        Add to `out`, in fp32, whatever its dtype.
    layout : str, default "TN"
        "TN", "NN" or "NT"; ValueError for another one.
    out : Tensor, optional
        To be written, and returned: of the result's shape, plain or quantized.
    bias : Tensor, optional
        [columns], added to the product; with `grad` its gradient is asked for, in its dtype.
    use_split_accumulator : bool, default False
        FP8 on Hopper: add up in fp32 often; False is faster and less precise.
    grad : bool, default False
        The product is one of a backward.
    ub, ub_type, extra_output, bulk_overlap
        Of user buffers: NotImplementedError unless None or False.

    Returns
    -------
    tuple
        (result, gradient of the bias or None, what gelu was applied to or None, None). The result
        is [.., columns] with the leading dims of B, or [columns of B, columns of A] (NT). The
        gradient of the bias are the sums of B, dequantized, over its rows (NT; else over its
        columns), or with `gelu` the column sums of the result.

    Raises
    ------
    TypeError, ValueError
        Arguments that do not go together.
    """
    op = "general_gemm"
    refuse(op, ub=ub, ub_type=ub_type, extra_output=extra_output, bulk_overlap=bulk_overlap)
    if layout not in _LAYOUTS:
        raise ValueError(f"{op}: layout={layout!r}, expected one of {', '.join(_LAYOUTS)}")
    if any(hasattr(getattr(tensor, "_quantizer", None), "qgemm") for tensor in (A, B)):
        refuse(op, alpha=None if alpha == 1.0 else alpha, beta=beta)
        given = (out_dtype, quantization_params, gelu, gelu_in, accumulate, layout, out, bias)
        return custom_gemm(A, B, None, *given, use_split_accumulator, grad)
    transA, transB = _LAYOUTS[layout]
    return product(
        op,
        (A, transA, B, transB),
        (out, quantization_params, out_dtype),
        (bias, gelu, gelu_in, grad),
        (accumulate, alpha, beta),
        use_split_accumulator,
    )


def general_grouped_gemm(
    A: Sequence[Any],
    B: Sequence[Any],
    out: Sequence[Any],
    quantization_params: Sequence[Any] | None,
    out_dtype: torch.dtype | None,
    layout: str = "TN",
    m_splits: Sequence[int] | Tensor | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: Sequence[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: torch.dtype | None = None,
    single_output: bool = False,
) -> tuple[Sequence[Any], Sequence[Tensor | None], list[Tensor | None]]:
    """`general_gemm` of each pair of two lists: one product after the other, each with its bits.

    Parameters
    ----------
    A, B : list of Tensor
        Operands as of `general_gemm`, as many of each; any may have no rows.
    out : list of Tensor
        To be written: one for each pair, None for a new one; with `single_output` one tensor
        [>= rows of all, columns] for the rows of all results in their order.
    quantization_params : list of Quantizer, optional
        What casts the results; None for those that stay plain.
    out_dtype, D_dtype : torch.dtype, optional
        Of new results, the latter where it is given; that of `A` where both are None. What is
        written has a dtype of its own.
    m_splits : list of int or Tensor, optional
        With `single_output` how many rows each result has: ValueError for others than they have.
    gelu, layout, accumulate, use_split_accumulator, grad
        As of `general_gemm`; NotImplementedError for `gelu` with `grad`, whose argument there is no
        place for.
    bias : list of Tensor, optional
        Read with `use_bias` alone: added, or with `grad` their gradients are asked for.

    Returns
    -------
    tuple
        (results: `out`, with what is new; gradients of biases with `grad` and `use_bias`, else the
        biases that were added or None; what gelu was applied to or None), lists.

    Raises
    ------
    ValueError
        Lists of other lengths, and what `general_gemm` raises for.
    """
    op, count = "general_grouped_gemm", len(A)
    biases = bias if use_bias and bias is not None else [None] * count
    quantizers = [None] * count if quantization_params is None else quantization_params
    casts = single_output and any(quantizer is not None for quantizer in quantizers)
    refuse(op, gelu=gelu and grad, quantization_params=casts)
    outputs = _rows_of(op, B, out, layout, m_splits) if single_output else out
    lists = {"B": B, "out": outputs, "quantization_params": quantizers, "bias": biases}
    for name, found in lists.items():
        if len(found) != count:
            raise ValueError(f"{op}: {len(found)} in {name}, expected {count}, as in A")
    made, sums, inputs = [], [], []
    for i in range(count):
        dtype = (D_dtype or out_dtype) if outputs[i] is None else outputs[i].dtype
        result, of_bias, before, _ = general_gemm(
            A[i], B[i], dtype, quantizers[i], gelu=gelu, accumulate=accumulate, layout=layout,
            out=outputs[i], bias=biases[i], use_split_accumulator=use_split_accumulator, grad=grad,
        )  # fmt: skip
        made.append(result)
        sums.append(of_bias if grad else biases[i])
        inputs.append(before)
    return (out if single_output else made), sums, inputs


def _rows_of(
    op: str, B: Sequence[Any], out: Sequence[Tensor], layout: str, m_splits: Any
) -> list[Tensor]:
    """The rows of each result in the one tensor of all."""
    rows = [b.shape[-1] if layout == "NT" else b.shape[:-1].numel() for b in B]
    given = rows if m_splits is None else [int(m) for m in m_splits]
    if given != rows:
        raise ValueError(f"{op}: m_splits={given}, expected the rows of the results, {rows}")
    if len(out) != 1 or out[0] is None or out[0].shape[0] < sum(rows):
        shapes = [None if t is None else tuple(t.shape) for t in out]
        raise ValueError(
            f"{op}: single_output=True with out of {shapes}, expected one of [>= {sum(rows)}, ...]"
        )
    return list(out[0][: sum(rows)].split(rows))
