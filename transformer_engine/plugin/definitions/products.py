# SPDX-License-Identifier: Apache-2.0
"""Products of matrices, in high precision and of every quantized form.

All are products of fp32 matrices by `torch.matmul`. 16-bit operands are widened, which is exact:
multiplied in their own dtype they would give a product that is rounded to it, before the bias, the
activation and what is accumulated, and torch lets some devices sum in 16 bits too. Whether a device
multiplies fp32 matrices in a shorter format (TF32) is left to torch's own settings of it.

No device multiplies FP8 or FP4 here: operands are multiplied out, and the product is counted as
that ("emulated.tensor", "emulated.mixed"), besides the product of the fp32 matrices.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.definitions import casts, device_type
from transformer_engine.plugin.definitions.codes import encode, is_fp8
from transformer_engine.plugin.definitions.scales import largest

_BLOCKS = _core.SCALING_BLOCK_1D, _core.SCALING_BLOCK_2D
_GROUPS = _core.SCALING_MXFP8, _core.SCALING_NVFP4
_OF_TENSORS = _core.SCALING_TENSOR, _core.SCALING_NVFP4
_GELU = 1  # te_epilogue


class _Operand(NamedTuple):
    """An operand of a product: the form of it that is read, whose rows run along k."""

    prefix: str
    mode: int
    by_rows: bool
    transposed: bool
    data: Tensor
    has_amax_of_rows: bool


def _operand(fields: Mapping[str, Any], name: str) -> _Operand:
    prefix, transposed = f"{name}_", bool(fields[f"{name}_transposed"])
    mode, by_rows = fields[f"{prefix}mode"], transposed == (name == "b")
    if mode == _core.SCALING_NONE:
        return _Operand(prefix, mode, by_rows, transposed, fields[name], False)
    form = f"{prefix}{'row' if by_rows else 'column'}"
    amax = fields[f"{form}_amax"]
    of_rows = mode == _core.SCALING_NVFP4 and amax.numel() > 1
    return _Operand(prefix, mode, by_rows, transposed, fields[form], of_rows)


def _is_mixed(a: _Operand, b: _Operand) -> bool:
    """Whether no GEMM reads these two together: `te_gemm_way_of` of `csrc/core/operand.h`."""
    if a.mode == b.mode and a.mode in _GROUPS:
        return a.has_amax_of_rows or b.has_amax_of_rows
    if a.data.dtype == b.data.dtype == torch.float8_e5m2:
        return True
    if a.mode == b.mode:
        plain = a.mode == _core.SCALING_NONE
        return a.mode == _core.SCALING_BLOCK_2D or (plain and a.data.dtype != b.data.dtype)
    return not (a.mode in _BLOCKS and b.mode in _BLOCKS)


def _matrix(fields: Mapping[str, Any], of: _Operand, raw: bool) -> Tensor:
    """The fp32 matrix that is multiplied: [m, k] or [k, n], k padded or not."""
    if of.mode == _core.SCALING_NONE:
        values = of.data.to(torch.float32)
    else:
        values = casts.operand(fields, of.prefix, by_rows=of.by_rows, raw=raw)
    return values.t() if of.transposed else values


def _count(fields: Mapping[str, Any], a: _Operand, b: _Operand, depth: int) -> None:
    """Count what runs, as backends do that multiply operands out."""
    mixed, modes = _is_mixed(a, b), (a.mode, b.mode)
    plain = not mixed and modes == (_core.SCALING_NONE, _core.SCALING_NONE)
    if depth:
        multiplied = (a.data.dtype, b.data.dtype) if plain else (torch.float32, torch.float32)
        _core.count_gemm(device_type(fields["d"]), *map(_core.dtype_code, multiplied))
    if not mixed and not plain:
        _core.count_emulated(a.mode)
    elif mixed or fields["multiplied_out"]:
        _core.count_mixed()


# ---- the operator --------------------------------------------------------------------------------


def gemm(fields: Mapping[str, Any]) -> None:
    """Write epilogue(a b + bias) to d, or add a b to it; what is quantized is multiplied out.

    Of operands that have one factor each, FP8 with a scale of the tensor and NVFP4, codes are
    multiplied, and the product by both factors.
    """
    d = fields["d"]
    if not d.numel():
        return
    a, b = _operand(fields, "a"), _operand(fields, "b")
    raw = not _is_mixed(a, b)
    left, right = _matrix(fields, a, raw), _matrix(fields, b, raw)
    depth = min(left.shape[1], right.shape[0])  # one may be padded further
    _count(fields, a, b, depth)
    if fields["bias_grad"] is not None:
        fields["bias_grad"].copy_(left.sum(1))
    if fields["accumulate"] and not depth:
        return
    values = torch.matmul(left[:, :depth], right[:depth])
    if raw and a.mode in _OF_TENSORS:
        factors = (casts.factor(fields, of.prefix, of.by_rows) for of in (a, b))
        values = values * math.prod(factors)
    _deliver(values, fields)


def _deliver(values: Tensor, fields: Mapping[str, Any]) -> None:
    """The epilogue of sums [m, n], and where they are wanted."""
    d, amax = fields["d"], fields["d_amax"]
    if fields["bias"] is not None:
        values = values + fields["bias"].to(torch.float32)
    if fields["aux"] is not None:
        fields["aux"].copy_(values)
    if fields["epilogue"] == _GELU:
        values = torch.nn.functional.gelu(values, approximate="tanh")
    if fields["accumulate"]:
        values = values + d.to(torch.float32)
    if not is_fp8(d.dtype):
        d.copy_(values)
        return
    scale = fields["d_scale"]
    casts.store(d, encode(values if scale is None else values * scale, d.dtype))
    if amax is not None:
        amax.copy_(casts.raised(amax, largest(values)))
