# SPDX-License-Identifier: Apache-2.0
"""``te_quantize`` and ``te_dequantize`` by operators of `transformer_engine_torch`.

The quantizer and the quantized storage that an implementation is given are made of the fields of
the call: the storage lies in the memory of the call, so that an implementation that writes to
`output` is done, and what one returns else is copied there.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.operand_casts import OperandCast
from transformer_engine.plugin.adapters.fields import (
    Choices,
    Fields,
    NotTakenError,
    fields_of,
    taken,
    written,
)
from transformer_engine.pytorch.tensor import recipes
from transformer_engine.pytorch.tensor.nvfp4_tensor import UNSIGNED

_RECIPES = {
    _core.SCALING_ROW: _core.RECIPE_ROW,
    _core.SCALING_BLOCK_1D: _core.RECIPE_BLOCK,
    _core.SCALING_BLOCK_2D: _core.RECIPE_BLOCK,
    _core.SCALING_MXFP8: _core.RECIPE_MXFP8,
    _core.SCALING_NVFP4: _core.RECIPE_NVFP4,
}
OPERATORS = frozenset(("quantize", "bgrad_quantize"))
"""Those that cast."""
_SCALES = 2
"""Of data with one scale: its inverse, and the scale."""
_MEANING = frozenset(
    ("_fp8_dtype", "_is_2D_scaled", "_with_rht", "_row_scaled_nvfp4")
    + ("_nvfp4_e4m3_max", "_with_random_sign_mask")
)
"""Of what a quantized tensor says: what its codes and scales mean."""
_FORMS = ("row", "column", "row_scales", "column_scales", "row_amax", "column_amax")
_SETTINGS = (
    *("power_2_scale", "square", "hadamard", "rng", "four_over_six", "scales_to_256"),
    *("row_scaled", "amax_epsilon", "margin"),
)
"""Fields that decide how a call casts; of ``rng`` that there is one."""
_RNG = _SETTINGS.index("rng")
_QUANTIZE = fields_of("quantize")


@functools.lru_cache(maxsize=256)
def _cast_of(mode: int, dtype: torch.dtype, delayed: bool, *settings: Any) -> OperandCast:
    """How a call casts: by its mode, the dtype of codes, whether it has a scale, `_SETTINGS`."""
    given = dict(zip(_SETTINGS, settings, strict=True))
    recipe = _core.RECIPE_DELAYED if delayed else _core.RECIPE_CURRENT
    recipe = recipe if mode == _core.SCALING_TENSOR else _RECIPES[mode]
    options = {
        _core.CAST_POWER_2: given["power_2_scale"],
        _core.CAST_TILES_2D: given["square"] or mode == _core.SCALING_BLOCK_2D,
        _core.CAST_HADAMARD: given["hadamard"],
        _core.CAST_UNSIGNED: given["hadamard"] == UNSIGNED,
        _core.CAST_STOCHASTIC: given["rng"],
        _core.CAST_FOUR_OVER_SIX: given["four_over_six"],
        _core.CAST_SQUARED: given["four_over_six"] == 2,
        _core.CAST_TO_256: given["scales_to_256"],
        _core.CAST_ROW_SCALED: given["row_scaled"],
    }
    bits = sum(bit for bit, is_set in options.items() if is_set)
    code = _core.dtype_code(dtype)
    return OperandCast(recipe, code, given["amax_epsilon"], bits, given["margin"])


def _made_of(
    fields: Fields, quantizer: Any, row: recipes.Format, shape: tuple[int, int]
) -> dict[str, Any]:
    """Fields of a quantized tensor over the forms of a call."""
    forms = data, column, scales, column_scales, *_ = tuple(fields[name] for name in _FORMS)
    if row.recipe in (_core.RECIPE_DELAYED, _core.RECIPE_CURRENT):
        one = scales if scales is not None else column_scales
        if one is None:  # nobody reads it
            device = (column if data is None else data).device
            one = torch.ones(_SCALES, dtype=torch.float32, device=device)
        forms = data, column, one
    elif row.recipe != _core.RECIPE_NVFP4:
        forms = forms[:4]
    return {**row.fields(quantizer, forms, shape), "_quantizer": quantizer}


def cast_values(values: Tensor, fields: Fields, choices: Choices) -> None:
    """Cast a matrix [rows, columns] and sum its columns, as the fields of a call say."""
    try:
        _cast_elsewhere(values, fields, choices)
    except NotTakenError:
        given = {name: fields.get(name) for name in _QUANTIZE if name != "input"}
        given = {name: value for name, value in given.items() if value is not None}
        _core.quantize(values, **given)


class Place(NamedTuple):
    """Quantizer of an implementation's cast, and a storage over the memory of the call for it.

    It is no tensor of torch, which takes longer to make: nobody records what becomes of it. Its
    nominal dtype is bf16.
    """

    quantizer: Any
    output: Any
    shape: tuple[int, int]  # of the values


def place_of(fields: Fields, shape: tuple[int, int]) -> Place:
    """Of a call that wants values of this shape quantized."""
    rows, columns = fields["row"], fields["column"]
    data = columns if rows is None else rows
    settings = [fields[name] for name in _SETTINGS]
    settings[_RNG] = settings[_RNG] is not None
    cast = _cast_of(fields["mode"], data.dtype, fields.get("scale") is not None, *settings)
    quantizer = _quantizer(fields, cast, data.device)
    quantizer.set_usage(rowwise=rows is not None, columnwise=columns is not None)
    quantizer.internal = True
    row = recipes.format_of(cast)
    made = _made_of(fields, quantizer, row, shape)
    return Place(quantizer, row.tensor._STORAGE._made(made, torch.bfloat16), shape)


def _quantizer(fields: Fields, cast: OperandCast, device: torch.device) -> Any:
    """Make the quantizer of a cast: with the call's scale, into its amax, or as it measured."""
    partials = fields["partials"]
    if cast.recipe == _core.RECIPE_DELAYED:
        amax = fields["amax"]
        amax = torch.zeros(1, dtype=torch.float32, device=device) if amax is None else amax
        quantizer = recipes.with_scale(cast, fields["scale"], amax, partials is not None)
        quantizer._known = (partials,)
        return quantizer
    quantizer = recipes.format_of(cast).make(cast, device, False)
    if cast.recipe == _core.RECIPE_CURRENT and partials is not None:
        quantizer._known = (partials,)
    return quantizer


def settle(fields: Fields, place: Place, made: Any) -> None:
    """See that what an implementation has made of a place is in the memory of the call."""
    if made is not place.output:
        _copy_forms(made, place, fields.get("noop"))
    _clear_padding(fields, place.shape)


def _cast_elsewhere(values: Tensor, fields: Fields, choices: Choices) -> None:
    """`cast_values` by an implementation of somebody else; NotTakenError where there is none."""
    sums, noop, made = fields.get("bias_grad"), fields.get("noop"), NotImplemented
    nothing = fields["row"] is None and fields["column"] is None
    if nothing or OPERATORS.isdisjoint(choices):
        raise NotTakenError
    place = place_of(fields, tuple(values.shape))
    if sums is not None and noop is None:
        made = choices.followed("bgrad_quantize", "quantize")(values, place.quantizer)
        if made is not NotImplemented:
            total, made = made
            written("bgrad_quantize", "the gradient of the bias", sums, total)
            sums = None
    if made is NotImplemented:
        made = taken(choices["quantize"](values, place.quantizer, place.output, noop))
    settle(fields, place, made)
    if sums is not None:
        _core.quantize(values, bias_grad=sums, noop=noop)


def _copy_forms(made: Any, place: Place, noop: Tensor | None) -> None:
    """Put what an implementation has returned into the storage over the memory of the call.

    It may be a tensor of the format, too.
    """
    output = place.output
    if getattr(type(made), "_STORAGE", type(made)) is not type(output):
        raise TypeError(
            f"quantize: the result: {type(made).__name__}, expected a {type(output).__name__}"
        )
    if noop is not None:
        raise TypeError("quantize: with noop an implementation has to write to output")
    shape = tuple(made.shape)
    if shape[-1:] != place.shape[-1:] or math.prod(shape) != math.prod(place.shape):
        raise ValueError(f"quantize: the result: shape {shape}, expected {place.shape}")
    given, wanted = made._fields(), output._fields()
    for name in sorted(_MEANING & given.keys() & wanted.keys()):
        if given[name] != wanted[name]:
            raise ValueError(
                f"quantize: the result: {name}={given[name]!r}, expected {wanted[name]!r}"
            )
    pairs = zip(output.get_data_tensors(), made.get_data_tensors(), strict=True)
    for into, values in pairs:
        if into is None:
            continue
        if values is None or values.numel() != into.numel():
            raise ValueError(
                f"quantize: the result lacks a form that was asked for: {made.get_usages()}"
            )
        into.copy_(values.view(into.shape))
    if hasattr(output, "_scales"):
        output._scales.copy_(made._scales)


def _clear_padding(fields: Fields, shape: tuple) -> None:
    """Zero what lies behind the values: GEMMs read it."""
    if fields["mode"] == _core.SCALING_NVFP4:
        return
    for name, used in (("row", shape[1]), ("column", shape[0])):
        data = fields[name]
        if name == "column" and fields["mode"] == _core.SCALING_MXFP8:
            used = shape[1]
        if data is not None and data.shape[1] > used:
            data.view(torch.uint8)[:, used:].zero_()


def quantize(choices: Choices, fields: Fields) -> None:
    """A cast, and column sums."""
    _cast_elsewhere(fields["input"], fields, choices)


def dequantize(choices: Choices, fields: Fields) -> None:
    """High precision of a quantized matrix."""
    out = fields["output"]
    found = taken(choices["dequantize"](operand_of(fields, "", tuple(out.shape)), out.dtype))
    written("dequantize", "the result", out, found)


def operand_of(fields: Fields, prefix: str, shape: tuple[int, int] | None = None) -> Any:
    """A quantized tensor of the forms of an operand.

    Its fields are named with a prefix. `shape` is that of its values; None: with their padding.
    """
    forms = {name: fields[prefix + name] for name in _FORMS}
    mode = fields[prefix + "mode"]
    data = forms["column"] if forms["row"] is None else forms["row"]
    settings = (fields.get(prefix + name, 0) for name in _SETTINGS)  # how it was cast it has not
    cast = _cast_of(mode, data.dtype, False, *settings)
    row = recipes.format_of(cast)
    quantizer = row.make(cast, data.device, False)
    if shape is None:
        turned = forms["row"] is None and mode != _core.SCALING_MXFP8
        rows, columns = data.shape
        columns *= 2 if mode == _core.SCALING_NVFP4 else 1
        shape = (columns, rows) if turned else (rows, columns)
    return row.tensor._made(_made_of(forms, quantizer, row, shape), torch.bfloat16, shape)
