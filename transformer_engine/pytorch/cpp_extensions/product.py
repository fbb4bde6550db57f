# SPDX-License-Identifier: Apache-2.0
"""A product of operands of any format, with its epilogues: `general_gemm` and `generic_gemm`."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.constants import torch_dtype
from transformer_engine.pytorch.cpp_extensions.values import checked, delivered, exact, like, wide
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.casts import code_of
from transformer_engine.pytorch.tensor.float8_tensor import Float8TensorStorage
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizedTensorStorage
from transformer_engine.pytorch.tensor.identity_tensor import IdentityTensorStorage
from transformer_engine.pytorch.tensor.quantized_tensor import QuantizedTensorStorage
from transformer_engine.pytorch.tensor.quantizer_arguments import checked_tensor
from transformer_engine.pytorch.tensor.two_forms import TwoFormStorage
from transformer_engine.pytorch.torchside.device import on_cuda, prepare_device
from transformer_engine.pytorch.torchside.modes import allows_tf32

_GELU = _core.ACTIVATION_GELU
_gemm = _core.obeying("gemm")
_activation = _core.obeying("activation")
_activation_backward = _core.obeying("activation_backward")


def _read(tensor: Any, by_rows: bool) -> Any:
    """Data of an operand that is multiplied: of two formats that of this form, else the values."""
    if isinstance(tensor, HybridQuantizedTensorStorage):
        part = tensor._rowwise_storage if by_rows else tensor._columnwise_storage
        return tensor if part is None else _read(part, by_rows)
    if isinstance(tensor, IdentityTensorStorage):
        return tensor._hp_data.view(tensor.shape)
    return tensor


def _form(storage: Any, by_rows: bool) -> tuple[int, int, tuple[Tensor | None, ...]]:
    """Mode, code of an element, and (data, scales, amax or None) of a form, None: it is not there.

    A column-wise form that is the transpose of the row-wise one is made, for the call.
    """
    if isinstance(storage, Float8TensorStorage):
        data = storage._data
        if not by_rows and not storage._transpose_invalid:
            data = storage._transpose
        elif not by_rows and data is not None:
            data = casts.transpose(data)
        return _core.SCALING_TENSOR, code_of(storage._fp8_dtype), (data, storage._scales, None)
    *forms, of_row, of_column = (*storage.get_data_tensors(), None, None)[:6]
    data, scales = forms[:2] if by_rows else forms[2:]
    if data is None and not by_rows and forms[0] is not None:
        data, scales = storage._turned() or (None, None)
        of_column = of_row
    return storage._mode(), storage._code(), (data, scales, of_row if by_rows else of_column)


class _Operand(NamedTuple):
    """A matrix as a GEMM reads it."""

    fields: dict[str, Any]  # of the operator, without the prefix
    dtype: torch.dtype  # of what is multiplied
    mode: int = _core.SCALING_NONE
    is_multiplied_out: bool = False  # it was quantized, and lacks the form that is read
    transformed: tuple[bool, bool] = (False, False)  # it is of transformed values, with signs


def _operand(op: str, name: str, tensor: Any, by_rows: bool) -> _Operand:
    """One in high precision, or quantized: by its row-wise form or its column-wise one."""
    source = _read(tensor, by_rows)
    if isinstance(source, Float8TensorStorage | TwoFormStorage):
        mode, code, (data, scales, amax) = _form(source, by_rows)
        if data is not None:
            return _quantized_operand(source, by_rows, (mode, code), (data, scales, amax))
    if hasattr(type(source), "_dequantized"):
        return _multiplied_out(op, name, source)
    values = wide(op, name, source)
    return _Operand({"": values.flatten(0, -2)}, values.dtype)


def _multiplied_out(op: str, name: str, tensor: Any) -> _Operand:
    values = wide(op, name, exact(op, name, tensor))
    return _Operand({"": values.flatten(0, -2)}, values.dtype, is_multiplied_out=True)


_UNPADDED = (_core.SCALING_MXFP8, _core.SCALING_NVFP4)
"""How data are scaled whose rows are as long as those of the matrix."""


def _quantized_operand(storage: Any, by_rows: bool, kind: tuple, form: tuple) -> _Operand:
    mode, code = kind
    data, scales, amax = form
    lies_in_rows = by_rows or mode == _core.SCALING_MXFP8
    matrix = data.flatten(0, -2) if lies_in_rows else data.flatten(1)
    if mode not in _UNPADDED:
        matrix = casts.padded(matrix)
    prepare_device(matrix.device)
    name, dtype = "row" if by_rows else "column", _core.torch_dtype(code)
    fields = {
        "_mode": mode,
        f"_{name}": matrix.view(dtype),
        f"_{name}_scales": scales,
        f"_{name}_amax": amax,
        "_scales_to_256": int(isinstance(storage, TwoFormStorage) and storage._scales_to_256()),
    }
    is_transformed = not by_rows and getattr(storage, "_with_rht", False)
    signs = is_transformed and storage._with_random_sign_mask
    return _Operand(fields, dtype, mode, transformed=(is_transformed, signs))


def _pair(
    op: str, A: Any, transA: bool, B: Any, transB: bool
) -> tuple[dict[str, Any], list[_Operand]]:
    """Keywords of the operator for op(B) op(A), and the operands in that order.

    What is quantized and can not be read is multiplied out, to fp32. So it is with transformed
    values where the others are not transformed alike.
    """
    pair = [_operand(op, "B", B, not transB), _operand(op, "A", A, transA)]
    if pair[0].transformed != pair[1].transformed:
        for i, (name, tensor) in enumerate((("B", B), ("A", A))):
            if pair[i].transformed[0]:
                pair[i] = _multiplied_out(op, name, tensor)
    fields: dict[str, Any] = {
        "a_transposed": int(transB),
        "b_transposed": int(transA),
        "multiplied_out": any(operand.is_multiplied_out for operand in pair),
    }
    for prefix, operand in zip("ab", pair, strict=True):
        fields |= {prefix + field: value for field, value in operand.fields.items()}
    return fields, pair


def _shape(op: str, A: Any, transA: bool, B: Any, transB: bool) -> tuple[int, ...]:
    """Shape of the result; ValueError where the operands do not go together."""
    for name, tensor in (("A", A), ("B", B)):
        checked_tensor(f"{op}: {name}", tensor)
    of_a, of_b = tuple(A.shape), tuple(B.shape)
    for name, shape in (("A", of_a), ("B", of_b)):
        if len(shape) < 2:
            raise ValueError(f"{op}: {name}: shape {shape}, expected [..., columns]")
    flat_a, flat_b = ((torch.Size(s[:-1]).numel(), s[-1]) for s in (of_a, of_b))
    inner = flat_a[1] if transA else flat_a[0]
    if inner != (flat_b[0] if transB else flat_b[1]):
        raise ValueError(
            f"{op}: A {of_a} (transA={transA}), B {of_b} (transB={transB}): the summed dims differ"
        )
    columns = flat_a[0] if transA else flat_a[1]
    return (of_b[-1], columns) if transB else (*of_b[:-1], columns)


def product(
    op: str,
    operands: tuple[Any, bool, Any, bool],
    result: tuple[Any, Any, Any],
    epilogue: tuple[Tensor | None, bool, Tensor | None, bool],
    factors: tuple[bool, float, float | None],
    use_split_accumulator: bool,
) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None]:
    """`generic_gemm` of plug-ins, by what modules run: `op` is what errors call it.

    Its arguments are ``operands`` (A, transA, B, transB), ``result`` (D, quantizer, output_dtype),
    ``epilogue`` (bias, gelu, gelu_in, grad) and ``factors`` (accumulate, alpha, beta).
    """
    D, quantizer, output_dtype = result
    bias, gelu, gelu_in, grad = epilogue
    accumulate, alpha, beta = factors
    shape = _shape(op, *operands)
    beta = _checked_beta(op, D, accumulate, beta)
    dtype = _output_dtype(op, operands[0], D, output_dtype)
    bias, added = _checked_bias(op, bias, shape[-1], grad)
    gelu_in = _checked_gelu_in(op, gelu_in, shape, gelu and grad) if gelu else None
    fields, pair = _pair(op, *operands)
    device = operands[0].device
    are_quantized = all(operand.mode != _core.SCALING_NONE for operand in pair)
    fields["fast_accumulation"] = are_quantized and not use_split_accumulator
    fields["allow_tf32"] = not are_quantized and on_cuda(device) and allows_tf32()
    out = (
        _writable_output(op, D, shape, dtype) if quantizer is None and not (gelu and grad) else None
    )
    adds_to_out = out is not None and beta == 1.0 and added is None and not gelu
    in_one_call = alpha == 1.0 and (beta == 0.0 or adds_to_out)
    # That in which a native call adds a bias.
    bias_dtype = torch.bfloat16 if are_quantized and dtype != torch.float16 else dtype
    in_one_call = in_one_call and (added is None or added.dtype == bias_dtype)
    in_one_call = in_one_call and (grad or not gelu or _applies_gelu(pair, device, dtype, added))
    if out is None or not in_one_call:
        made = torch.empty(shape, dtype=dtype, device=device)
    else:
        made = out
    before_gelu = torch.empty_like(made) if gelu and not grad else None
    sums = None
    if grad and bias is not None and not gelu:
        sums = made.new_empty(made.shape[:-1].numel(), dtype=bias.dtype)
    # What a product reads of a hybrid may be other values than those that it stands for.
    summed = in_one_call and sums is not None and type(operands[2]) is Tensor
    summed = summed and all(each.mode == _core.SCALING_NONE for each in pair)
    summed = summed and pair[0].dtype == pair[1].dtype == bias.dtype
    if in_one_call:
        epilogue = _core.EPILOGUE_NONE if before_gelu is None else _core.EPILOGUE_GELU
        aux = None if before_gelu is None else before_gelu.flatten(0, -2)
        _gemm(
            made.flatten(0, -2), **fields, bias=added, bias_grad=sums if summed else None,
            aux=aux, epilogue=epilogue, accumulate=beta != 0.0,
        )  # fmt: skip
    else:
        before = checked(op, "D", D) if beta != 0.0 else None
        _combine(made, fields, added, before_gelu, (alpha, beta), before)
    if gelu and grad:
        made, sums, before_gelu = _through_gelu(op, made, gelu_in, bias)
    elif sums is not None and not summed:
        left = exact(op, "B", operands[2]).flatten(0, -2)
        sums.copy_(left.sum(0 if operands[3] else 1, dtype=torch.float32))
    if before_gelu is not None and gelu_in is not None and not grad:
        gelu_in.detach().copy_(before_gelu.view(gelu_in.shape))
        before_gelu = gelu_in
    made = D if made is out else delivered(op, made, quantizer, D, _output_name(op))
    return made, sums, before_gelu, None


def _checked_beta(op: str, D: Any, accumulate: bool, beta: float | None) -> float:
    """The factor of `D`."""
    if accumulate and D is None:
        raise ValueError(f"{op}: accumulate=True needs {_output_name(op)}")
    if not accumulate and beta not in (None, 0.0):
        raise ValueError(f"{op}: beta={beta} without accumulate=True")
    return (1.0 if beta is None else float(beta)) if accumulate else 0.0


def _checked_bias(
    op: str, bias: Any, columns: int, grad: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(the bias, None where it has no elements; what is added of it)."""
    if bias is None or checked(op, "bias", bias).numel() == 0:
        return None, None
    if grad:
        return bias, None
    if bias.numel() != columns:
        raise ValueError(f"{op}: bias: shape {tuple(bias.shape)}, expected [{columns}]")
    return bias, wide(op, "bias", bias).flatten()


def _checked_gelu_in(op: str, gelu_in: Any, shape: tuple[int, ...], is_read: bool) -> Any:
    """Tensor of an argument that is read, or written."""
    if gelu_in is None:
        if is_read:
            raise ValueError(f"{op}: gelu=True with grad=True needs gelu_in")
        return None
    if checked(op, "gelu_in", gelu_in).numel() != torch.Size(shape).numel():
        raise ValueError(f"{op}: gelu_in: shape {tuple(gelu_in.shape)}, expected {shape}")
    return gelu_in


def _output_name(op: str) -> str:
    return "D" if op == "generic_gemm" else "out"


def _output_dtype(op: str, A: Any, D: Any, output_dtype: Any) -> torch.dtype:
    if output_dtype is not None:
        name = "output_dtype" if op == "generic_gemm" else "out_dtype"
        return torch_dtype(op, name, output_dtype)
    return A.dtype if D is None else D.dtype


def _writable_output(op: str, D: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """`D`, where a call can write to it."""
    if not isinstance(D, Tensor) or isinstance(D, QuantizedTensorStorage):
        return None
    out = like(op, _output_name(op), D, shape, dtype).detach()
    return out if out.is_contiguous() or (out.dim() == 2 and out.stride(1) == 1) else None


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


def _applies_gelu(
    pair: list[_Operand], device: torch.device, dtype: torch.dtype, bias: Tensor | None
) -> bool:
    """Return whether the native call does: one GEMM reads both operands.

    On CUDA it makes the result in its dtype, whatever that is of.
    """
    modes = pair[0].mode, pair[1].mode
    if modes not in _WITH_GELU:
        return False
    one, other = pair[0].dtype, pair[1].dtype
    if modes == _WITH_GELU[0]:
        return one == other and (not on_cuda(device) or dtype in (one, torch.float32))
    if one == other == torch.float8_e5m2:
        return False
    if not on_cuda(device):
        return True
    if _core.SCALING_MXFP8 in modes:
        return dtype != torch.float16
    return _TILES.isdisjoint(modes) and (dtype != torch.float32 or bias is None)


def _combine(
    made: Tensor,
    operands: dict[str, Any],
    bias: Tensor | None,
    before_gelu: Tensor | None,
    factors: tuple[float, float],
    before: Tensor | None,
) -> None:
    """The product in fp32, then factors and epilogue."""
    alpha, beta = factors
    total = torch.empty(made.shape, dtype=torch.float32, device=made.device)
    _gemm(total.flatten(0, -2), **operands)
    total *= alpha
    if before is not None:
        total += beta * before.to(torch.float32)
    if bias is not None:
        total += bias
    if before_gelu is None:
        made.copy_(total)
        return
    before_gelu.copy_(total)
    _activation(total.flatten(0, -2), _GELU, wide=made.flatten(0, -2))


def _through_gelu(
    op: str, made: Tensor, gelu_in: Any, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(gradient through gelu, its column sums or None, gelu_in)."""
    source = wide(op, "gelu_in", gelu_in).view(made.shape)
    out = torch.empty_like(made)
    sums = None if bias is None else torch.empty(out.shape[-1], dtype=bias.dtype, device=out.device)
    grad, source, into = (t.flatten(0, -2) for t in (made, source, out))
    _activation_backward(grad, source, _GELU, wide=into, bias_grad=sums)
    return out, sums, gelu_in
