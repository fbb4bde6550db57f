# SPDX-License-Identifier: Apache-2.0
"""Quantized operands and results as keywords of the operators of `_core`."""

from transformer_engine import _core


def operand(prefix="", *, row=None, column=None, scales=None):
    """Keywords of a matrix in FP8 with one scale for all of it.

    Parameters
    ----------
    prefix : str
        Of the keywords: "a_" and "b_" of gemm.
    row, column : Tensor, optional
        Its forms; what an operator writes to, or reads.
    scales : Tensor, optional
        {1 / scale, scale}, of both forms; alone it is that of no data.
    """
    return {
        f"{prefix}mode": _core.SCALING_TENSOR,
        f"{prefix}row": row,
        f"{prefix}row_scales": scales if column is None or row is not None else None,
        f"{prefix}column": column,
        f"{prefix}column_scales": scales if column is not None else None,
    }
