# SPDX-License-Identifier: Apache-2.0
"""`generic_gemm`, by ``_core.gemm``: operands in high precision or quantized, and epilogues."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.builtin.values import (
    checked,
    exact,
    like,
    quantized,
    refuse,
    torch_dtype,
    wide,
)
from transformer_engine.pytorch.device import prepare_device
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.float8_tensor import Float8TensorStorage, code_of
from transformer_engine.pytorch.tensor.two_forms import TwoFormStorage

_OP = "generic_gemm"
_GELU = _core.ACTIVATION_GELU


def _forms(storage: Any) -> tuple[int, int, tuple[Tensor | None, ...]]:
    """Mode, code of an element, (row, its scales, column, its scales, amaxes) of quantized data."""
    if isinstance(storage, Float8TensorStorage):
        column = None if storage._transpose_invalid else storage._transpose
        if column is None and storage._data is not None:
            column = casts.transpose(storage._data)
        scales = storage._scales
        forms = storage._data, scales, column, scales, None, None
        return _core.SCALING_TENSOR, code_of(storage._fp8_dtype), forms
    forms = (*storage.get_data_tensors(), None, None)[:6]
    return storage._mode(), storage._code(), forms


class _Operand(NamedTuple):
    """A quantized matrix as a GEMM reads it."""

    fields: dict[str, Any]  # of `_core.gemm`, without the prefix
    summed: int  # its size, with padding, in the dim that is summed over
    transformed: tuple[bool, bool]  # it is of transformed values, with signs


def _quantized_operand(tensor: Any, by_rows: bool) -> _Operand | None:
    """An operand whose row-wise form is read, or the column-wise one.

    None where it is not quantized, or lacks that form.
    """
    if not isinstance(tensor, Float8TensorStorage | TwoFormStorage):
        return None
    mode, code, forms = _forms(tensor)
    at = 0 if by_rows else 2
    data, scales, amax = forms[at], forms[at + 1], forms[4 + at // 2]
    if data is None:
        return None
    lies_in_rows = by_rows or mode == _core.SCALING_MXFP8
    if mode != _core.SCALING_NVFP4 and (by_rows or not lies_in_rows):
        data = casts.padded(data)
    matrix = data.flatten(0, -2) if lies_in_rows else data.flatten(1)
    prepare_device(matrix.device)
    form = "row" if by_rows else "column"
    fields = {
        "_mode": mode,
        f"_{form}": matrix.view(_core.torch_dtype(code)),
        f"_{form}_scales": scales,
        f"_{form}_amax": amax,
        "_scales_to_256": int(isinstance(tensor, TwoFormStorage) and tensor._scales_to_256()),
    }
    summed = matrix.shape[0] if lies_in_rows and not by_rows else matrix.shape[1]
    summed *= 2 if mode == _core.SCALING_NVFP4 else 1  # two to a byte
    turned = not by_rows and getattr(tensor, "_with_rht", False)
    return _Operand(fields, summed, (turned, turned and tensor._with_random_sign_mask))


def _pair(A: Any, transA: bool, B: Any, transB: bool) -> tuple[dict[str, Any], torch.dtype | None]:
    """Arguments of `_core.gemm` for op(B) op(A), and their dtype; None: both are quantized.

    Both are multiplied out to fp32 where one alone is quantized, lacks the form that is read or has
    that of transformed values, or where they are padded differently.
    """
    left, right = _quantized_operand(B, not transB), _quantized_operand(A, transA)
    dtype = None
    if left is not None and right is not None and left[1:] == right[1:]:
        fields = left.fields, right.fields
    else:
        wanted = (("B", B), ("A", A))
        if any(hasattr(type(t), "_dequantized") for _, t in wanted):
            found = [exact(_OP, name, t).contiguous() for name, t in wanted]
        else:
            found = [wide(_OP, name, t) for name, t in wanted]
        dtype = found[1].dtype
        prepare_device(found[0].device)
        fields = tuple({"": t.flatten(0, -2)} for t in found)
    named: dict[str, Any] = {"a_transposed": int(transB), "b_transposed": int(transA)}
    for prefix, own in zip("ab", fields, strict=True):
        named |= {prefix + field: value for field, value in own.items()}
    return named, dtype


def _shape(A: Any, transA: bool, B: Any, transB: bool) -> tuple[int, ...]:
    """Shape of the result; ValueError where the operands do not go together."""
    of_a, of_b = tuple(A.shape), tuple(B.shape)
    for name, shape in (("A", of_a), ("B", of_b)):
        if len(shape) < 2:
            raise ValueError(f"{_OP}: {name}: shape {shape}, expected [..., columns]")
    flat_a, flat_b = ((torch.Size(s[:-1]).numel(), s[-1]) for s in (of_a, of_b))
    inner = flat_a[1] if transA else flat_a[0]
    if inner != (flat_b[0] if transB else flat_b[1]):
        raise ValueError(
            f"{_OP}: A {of_a} (transA={transA}), B {of_b} (transB={transB}): the summed dims differ"
        )
    columns = flat_a[0] if transA else flat_a[1]
    return (of_b[-1], columns) if transB else (*of_b[:-1], columns)


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
    """D = epilogue(alpha op(B) op(A) + beta D + bias), as row-major matrices.

    op transposes where `transA`, `transB` say so; leading dims of a matrix are flattened. Sums are
    fp32. With alpha and beta at their defaults, a bias in the dtype of the result (of quantized
    operands: bf16, or fp16 where the result is) and operands that one GEMM reads, one native call
    computes all of it; else the product is made in fp32 and the rest is torch's. So is the gradient
    of a bias of quantized operands, or of operands in another dtype than the bias has.

    Parameters
    ----------
    A, B : Tensor
        In fp32, fp16 or bf16; or quantized, tensors or storages of any format. One of each kind are
        multiplied in fp32, and so is one that lacks the form that is read.
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
        of the bias are the sums of op(B) over what the product sums over, or with `gelu` the column
        sums of the result.

    Raises
    ------
    TypeError, ValueError
        Arguments that do not go together.
    """
    del bias_type, workspace, workspace_size, comm_type
    refuse(_OP, comm_overlap=comm_overlap, extra_output=extra_output, bulk_overlap=bulk_overlap)
    shape = _shape(A, transA, B, transB)
    beta = _checked_beta(D, accumulate, beta)
    dtype = _output_dtype(A, D, output_dtype)
    if gelu and grad and gelu_in is None:
        raise ValueError(f"{_OP}: gelu=True with grad=True needs gelu_in")
    if bias is not None and bias.numel() == 0:
        bias = None
    added = None if grad or bias is None else wide(_OP, "bias", bias)
    operands, of_operands = _pair(A, transA, B, transB)
    is_quantized = of_operands is None
    operands["fast_accumulation"] = is_quantized and not use_split_accumulator
    operands["allow_tf32"] = not is_quantized and torch.backends.cuda.matmul.allow_tf32
    plain_out = isinstance(D, Tensor) and not isinstance(D, QuantizedTensorStorage)
    direct = plain_out and quantizer is None and not (gelu and grad)
    out = like(_OP, "D", D, shape, dtype).detach() if direct else None
    simple = alpha == 1.0 and (beta == 0.0 or _accumulates(out, beta, added, gelu))
    simple = simple and _gives(operands, of_operands, dtype)
    simple = simple and (added is None or added.dtype == _bias_dtype(is_quantized, dtype))
    simple = simple and (grad or not gelu or _applies_gelu(operands, A.device))
    if out is None or not simple:
        made = torch.empty(shape, dtype=dtype, device=A.device)
    else:
        made = out
    pre = torch.empty_like(made) if gelu and not grad else None
    sums = None
    if grad and bias is not None and not gelu:
        sums = made.new_empty(made.shape[:-1].numel(), dtype=bias.dtype)
    summed = simple and sums is not None and _sums(operands, bias.dtype)
    if simple:
        _multiply(made, operands, (added, sums if summed else None), pre, beta != 0.0)
    else:
        _combine(made, operands, added, pre, (alpha, beta), D)
    if gelu and grad:
        made, sums, pre = _through_gelu(made, gelu_in, bias)
    elif sums is not None and not summed:
        left = exact(_OP, "B", B).flatten(0, -2)
        sums.copy_(left.sum(0 if transB else 1, dtype=torch.float32))
    if pre is not None and gelu_in is not None and not grad:
        gelu_in.detach().copy_(pre.view(gelu_in.shape))
        pre = gelu_in
    if made is not out:
        made = _delivered(made, quantizer, D)
    return (D if direct else made), sums, pre, None


def _checked_beta(D: Any, accumulate: bool, beta: float | None) -> float:
    """The factor of `D`."""
    if accumulate and D is None:
        raise ValueError(f"{_OP}: accumulate=True needs D")
    if not accumulate and beta not in (None, 0.0):
        raise ValueError(f"{_OP}: beta={beta} without accumulate=True")
    return (1.0 if beta is None else float(beta)) if accumulate else 0.0


def _output_dtype(A: Any, D: Any, output_dtype: Any) -> torch.dtype:
    if output_dtype is not None:
        return torch_dtype(_OP, "output_dtype", output_dtype)
    return A.dtype if D is None else D.dtype


def _gives(operands: dict, of_operands: torch.dtype | None, dtype: torch.dtype) -> bool:
    """Whether the native call gives a dtype: that of the operands, fp32; of NVFP4 all but fp16."""
    if of_operands is not None:
        return dtype in (of_operands, torch.float32)
    modes = operands["a_mode"], operands["b_mode"]
    return dtype != torch.float16 or _core.SCALING_NVFP4 not in modes


def _bias_dtype(is_quantized: bool, dtype: torch.dtype) -> torch.dtype:
    """In which dtype the native call adds a bias to what it gives in `dtype`."""
    if not is_quantized:
        return dtype
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


_WITH_GELU = (
    (_core.SCALING_NONE, _core.SCALING_NONE),
    (_core.SCALING_TENSOR, _core.SCALING_TENSOR),
    (_core.SCALING_BLOCK_1D, _core.SCALING_BLOCK_1D),
    (_core.SCALING_BLOCK_1D, _core.SCALING_BLOCK_2D),
    (_core.SCALING_BLOCK_2D, _core.SCALING_BLOCK_1D),
    (_core.SCALING_MXFP8, _core.SCALING_MXFP8),
)
"""How operands are scaled that are multiplied with gelu in one call."""
_TILES = {_core.SCALING_BLOCK_1D, _core.SCALING_BLOCK_2D}
"""Of cuBLASLt those have no gelu."""


def _applies_gelu(operands: dict[str, Any], device: torch.device) -> bool:
    """Whether the native call does: one GEMM reads both operands."""
    modes = tuple(operands.get(f"{name}_mode", _core.SCALING_NONE) for name in "ab")
    if modes not in _WITH_GELU or (device.type == "cuda" and not _TILES.isdisjoint(modes)):
        return False
    one, other = (
        next(
            operands[key].dtype
            for key in (name, f"{name}_row", f"{name}_column")
            if key in operands
        )
        for name in "ab"
    )
    if modes == _WITH_GELU[0]:
        return one == other
    return one != torch.float8_e5m2 or other != torch.float8_e5m2


def _sums(operands: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether the native call gives the gradient of a bias: of operands in high precision."""
    return all(name in operands and operands[name].dtype == dtype for name in "ab")


def _accumulates(out: Tensor | None, beta: float, added: Tensor | None, gelu: bool) -> bool:
    """Whether the native call adds to `D`."""
    if out is None or beta != 1.0 or added is not None or gelu:
        return False
    return out.dtype in (torch.float32, torch.bfloat16)


def _multiply(
    made: Tensor,
    operands: dict[str, Any],
    biases: tuple[Tensor | None, Tensor | None],
    pre: Tensor | None,
    accumulate: bool,
) -> None:
    """One native call, with a bias or with a place for the gradient of one."""
    epilogue = _core.EPILOGUE_NONE if pre is None else _core.EPILOGUE_GELU
    flat, aux = (None if t is None else t.flatten(0, -2) for t in (made, pre))
    given = dict(zip(("bias", "bias_grad"), biases, strict=True))
    given |= {"aux": aux, "epilogue": epilogue, "accumulate": accumulate}
    _core.gemm(flat, **operands, **given)


def _combine(
    made: Tensor,
    operands: dict[str, Any],
    bias: Tensor | None,
    pre: Tensor | None,
    factors: tuple[float, float],
    D: Any,
) -> None:
    """The product in fp32, then factors and epilogue."""
    alpha, beta = factors
    total = torch.empty(made.shape, dtype=torch.float32, device=made.device)
    _core.gemm(total.flatten(0, -2), **operands)
    total *= alpha
    if beta != 0.0:
        total += beta * checked(_OP, "D", D).to(torch.float32)
    if bias is not None:
        total += bias
    if pre is None:
        made.copy_(total)
        return
    pre.copy_(total)
    _core.activation(total, _GELU, wide=made)


def _through_gelu(
    made: Tensor, gelu_in: Any, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(gradient through gelu, its column sums or None, gelu_in)."""
    source = wide(_OP, "gelu_in", gelu_in)
    out = torch.empty_like(made)
    sums = None if bias is None else torch.empty(out.shape[-1], dtype=bias.dtype, device=out.device)
    _core.activation_backward(made, source.view(made.shape), _GELU, wide=out, bias_grad=sums)
    return out, sums, gelu_in


def _delivered(made: Tensor, quantizer: Any, D: Any) -> Any:
    """The result where and how it is asked for."""
    if isinstance(D, Tensor) and not isinstance(D, QuantizedTensorStorage):
        like(_OP, "D", D, tuple(made.shape), D.dtype)
    return quantized(_OP, made, quantizer, D)
