# SPDX-License-Identifier: Apache-2.0
"""Casts: from high precision to every quantized form, back again, and between dtypes.

`put` delivers what an operator has computed as a call wants it, `operand` reads what a call gives.
Codes, scales and largest magnitudes have the bits of the CPU backend. Partial maxima have the
largest magnitude first and zeros behind it, however they are spread elsewhere; a NaN in high
precision may have another payload.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.definitions import microscales, scales
from transformer_engine.plugin.definitions.codes import (
    at_most_largest,
    encode,
    is_fp8,
    largest_of,
    quotient,
)
from transformer_engine.plugin.definitions.scales import largest, padded

Fields = Mapping[str, Any]

_CASTS: dict[int, Callable[[Tensor, Fields, float], dict[str, Tensor]]] = {
    _core.SCALING_TENSOR: scales.by_tensor,
    _core.SCALING_ROW: scales.by_tile,
    _core.SCALING_BLOCK_1D: scales.by_tile,
    _core.SCALING_BLOCK_2D: scales.by_tile,
    _core.SCALING_MXFP8: microscales.mxfp8,
    _core.SCALING_NVFP4: microscales.nvfp4,
}


def put(
    values: Tensor,
    fields: Fields,
    *,
    top: torch.dtype = torch.float32,
    kept: Tensor | None = None,
) -> None:
    """Deliver values that an operator has computed where a call wants them.

    Parameters
    ----------
    values : Tensor
        [rows, columns] fp32.
    fields : mapping
        Of the call: what `te_cast_request` has, by the names of `_core.op_fields`, and `bias_grad`.
        Which of them an operator lacks is not wanted.
    top : torch.dtype
        Whose largest number an infinite scale of rows or tiles becomes: that of what was read.
    kept : Tensor, optional
        bool [1]: where it is true nothing is written.
    """
    made = {"wide": values}
    if fields["mode"] != _core.SCALING_NONE:
        made |= _CASTS[fields["mode"]](values, fields, largest_of(top))
    if fields.get("bias_grad") is not None:
        made["bias_grad"] = values.sum(0)
    slot, partials = fields.get("amax"), fields.get("amax_partials")
    if slot is not None or partials is not None:
        amax = largest(values)
        made |= {} if slot is None else {"amax": raised(slot, amax)}
        made |= {} if partials is None else {"amax_partials": _spread(amax, partials)}
    for name, result in made.items():
        if fields.get(name) is not None:
            store(fields[name], result, kept)


def store(target: Tensor, values: Tensor, kept: Tensor | None = None) -> None:
    """Write values, of FP8 its codes, and zeros behind the rows and columns that there are.

    Where `kept`, bool [1], is true nothing is written.
    """
    target = target.view(torch.uint8) if is_fp8(target.dtype) else target
    if values.shape != target.shape:
        values = padded(values, target.shape)
    if kept is not None:
        values = torch.where(kept, target, values.to(target.dtype))
    target.copy_(values)


def raised(slot: Tensor, amax: Tensor) -> Tensor:
    """The larger one of a recorded amax and another; a NaN that was recorded loses."""
    return torch.where(amax <= slot, slot, amax)


def _spread(amax: Tensor, partials: Tensor) -> Tensor:
    return torch.nn.functional.pad(amax, (0, partials.numel() - 1))


def operand(
    fields: Fields,
    prefix: str,
    *,
    by_rows: bool | None = None,
    limit: torch.dtype = torch.float32,
    raw: bool = False,
) -> Tensor:
    """The fp32 numbers that a quantized operand stands for, as the matrix [rows, columns].

    Parameters
    ----------
    fields, prefix :
        Of a call, and of the names of the operand's fields in it: "", "a_" or "b_".
    by_rows : bool, optional
        The form that is read; by default `row` where it is there.
    limit : torch.dtype
        What is finite stays within the numbers of this dtype.
    raw : bool
        Without the factor of a whole tensor, `factor`.

    Zeros or other padding may follow the rows or columns that the form runs along.
    """
    if by_rows is None:
        by_rows = fields[f"{prefix}row"] is not None
    form, mode = f"{prefix}{'row' if by_rows else 'column'}", fields[f"{prefix}mode"]
    data, of_data, top = fields[form], fields[f"{form}_scales"], largest_of(limit)
    if mode == _core.SCALING_MXFP8:
        return microscales.mxfp8_numbers(data, of_data, by_rows, top)
    if mode == _core.SCALING_NVFP4:
        of_tensor = None if raw else factor(fields, prefix, by_rows)
        values = microscales.nvfp4_numbers(data, of_data, of_tensor, top)
    elif mode == _core.SCALING_TENSOR and raw:
        values = scales.numbers(data)
    else:
        values = scales.scaled_numbers(data, of_data, mode, top)
    return values if by_rows else values.t()


def factor(fields: Fields, prefix: str, by_rows: bool) -> Tensor | None:
    """What `raw` numbers are to be multiplied by, fp32 [1] or of each row; None: nothing."""
    form, mode = f"{prefix}{'row' if by_rows else 'column'}", fields[f"{prefix}mode"]
    if mode == _core.SCALING_TENSOR:
        return fields[f"{form}_scales"][:1]
    if mode == _core.SCALING_NVFP4:
        return microscales.nvfp4_factor(fields[f"{form}_amax"], fields, prefix)
    return None


# ---- operators -----------------------------------------------------------------------------------


def quantize(fields: Fields) -> None:
    """Cast a matrix to FP8 or FP4; where `noop` is not 0 nothing is written."""
    values, noop = fields["input"], fields["noop"]
    kept = None if noop is None else noop != 0.0
    put(values.to(torch.float32), fields, top=values.dtype, kept=kept)


def dequantize(fields: Fields) -> None:
    """Write what data stands for, from `row`, or from `column` where that is None."""
    output = fields["output"]
    if output.numel():
        values = operand(fields, "", limit=output.dtype)
        output.copy_(values[: output.shape[0], : output.shape[1]])


def amax(fields: Fields) -> None:
    """Write the largest magnitude of a matrix, or of what its columns are transformed to."""
    values, hadamard = fields["input"].to(torch.float32), fields["hadamard"]
    found = microscales.transformed(values, hadamard) if hadamard else values
    fields["partials"].copy_(_spread(largest(found), fields["partials"]))


def transpose(fields: Fields) -> None:
    """Transpose one-byte elements; columns of the output beyond the input's rows become 0."""
    store(fields["output"], fields["input"].view(torch.uint8).t())


def fill(fields: Fields) -> None:
    """Set every element to a number that is rounded once; FP8 and integers saturate."""
    output, value = fields["output"], fields["value"]
    if not output.dtype.is_floating_point:
        output.fill_(_nearest_integer(value, output.dtype))
        return
    number = torch.tensor(value, dtype=torch.float64, device="cpu")
    if output.dtype != torch.float32:
        number = _round_to_odd(number)
    if is_fp8(output.dtype):
        output.view(torch.uint8).fill_(encode(number, output.dtype).item())
    else:
        output.fill_(number.to(output.dtype).item())


def _nearest_integer(value: float, dtype: torch.dtype) -> int:
    """The nearest integer that a dtype holds, ties to even; 0 for NaN."""
    limits = torch.iinfo(dtype)
    if value != value:
        return 0
    return limits.min if value <= limits.min else min(limits.max, round(min(value, 2.0**63)))


def _round_to_odd(number: Tensor) -> Tensor:
    """A number of float64 as fp32 that rounds to a narrower float as the number itself does."""
    rounded = number.to(torch.float32)
    wide = rounded.to(torch.float64)
    bits = rounded.view(torch.int32)
    odd = torch.where(wide.abs() > number.abs(), bits - 1, bits) | 1
    exact = (wide == number) | ~rounded.isfinite()
    return torch.where(exact, bits, odd).view(torch.float32)


_MOST_RECENT = 1  # te_amax_algo
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cast(fields: Fields) -> None:
    """Convert and copy a matrix; of one dtype its bits, elsewhere zeros where the input ends."""
    source, output = fields["input"], fields["output"]
    if source.dtype == output.dtype:
        same = _SAME_SIZE[source.element_size()]
        source, output = source.view(same), output.view(same)
    store(output, source[: output.shape[0], : output.shape[1]])


def scaling_update(fields: Fields) -> None:
    """Update slots of delayed scaling in place; one whose row 0 is 0 stays as it is."""
    scale, history = fields["scale"], fields["history"]
    live = history[0].clone()
    idle = live == 0.0
    window = live[None] if fields["algo"] == _MOST_RECENT else history
    found = torch.where(window.isnan(), -torch.inf, window).amax(0)
    made = quotient(torch.full_like(found, fields["fp8_max"]), found)
    usable = found.isfinite() & (found > 0.0) & ~idle
    scale.copy_(torch.where(usable, at_most_largest(made), scale))
    if len(history) > 1:
        moved = torch.cat((history[2:], live[None]))
        history[1:] = torch.where(idle, history[1:], moved)
    history[0] = 0.0
