# SPDX-License-Identifier: Apache-2.0
"""Casts by quantizers, the scaling state around them, and casts of slices of weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.plugin.definitions.codes import encode, is_fp8
from transformer_engine.pytorch.constants import TE_DType_To_Torch, torch_dtype
from transformer_engine.pytorch.cpp_extensions.values import checked, like, wide
from transformer_engine.pytorch.execution.overrides import native
from transformer_engine.pytorch.execution.plan_ops import scaling_update
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.quantizer import Quantizer

ALGORITHMS = {"max": False, "most_recent": True}
"""True where the newest amax counts alone, by name."""


def _cast(op: str, tensor: Any, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    if not isinstance(quantizer, Quantizer):
        raise TypeError(f"{op}: quantizer: {type(quantizer).__name__}, expected a Quantizer")
    source = checked(op, "tensor", tensor)
    if output is None and noop is None:
        return quantizer.quantize(source)
    if output is None:
        output = quantizer.make_empty(source.shape, dtype=source.dtype, device=source.device)
    return quantizer.update_quantized(source, output, noop_flag=noop)


@native
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Cast a tensor by a quantizer.

    Parameters
    ----------
    tensor : Tensor
        Of a floating dtype, or quantized.
    quantizer : Quantizer
        TypeError for anything else.
    output : QuantizedTensor, optional
        To be written, and returned: in all forms that it has.
    noop : Tensor, optional
        fp32 [1]: where it is not 0, nothing is written (a new tensor has no values then).
    """
    return _cast("quantize", tensor, quantizer, output, noop)


@native
def dequantize(input: Any, otype: Any) -> Tensor:
    """High precision of a quantized tensor or storage, in a torch dtype or `DType`."""
    dtype = torch_dtype("dequantize", "otype", otype)
    if not hasattr(type(input), "_dequantized"):
        raise TypeError(f"dequantize: input: {type(input).__name__}, expected a quantized tensor")
    return input.dequantize(dtype=dtype).detach()


@native
def bgrad_quantize(input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """(column sums of the input, the input cast by a quantizer): of the gradient of an output.

    The sums are fp32's, [columns] in the dtype of `input`, [..., columns].
    """
    op = "bgrad_quantize"
    grad = wide(op, "input", input)
    sums = grad.new_empty(grad.shape[-1])
    _core.quantize(grad, bias_grad=sums)
    return sums, _cast(op, grad, quantizer)


@native
def multi_tensor_quantize(tensor_list: Sequence[Tensor], quantizer_list: Sequence[Any]) -> list:
    """Each tensor, cast by its own quantizer; ValueError for lists of other lengths."""
    op = "multi_tensor_quantize"
    if len(tensor_list) != len(quantizer_list):
        raise ValueError(
            f"{op}: {len(tensor_list)} tensors in tensor_list, {len(quantizer_list)} quantizers in "
            "quantizer_list"
        )
    pairs = zip(tensor_list, quantizer_list, strict=True)
    return [_cast(op, tensor, quantizer) for tensor, quantizer in pairs]


@native
def split_quantize(
    tensor: Tensor, split_sections: Sequence[int], quantizer_list: Sequence[Any]
) -> list:
    """Parts of a tensor along its first dim, each cast by its own quantizer.

    ValueError where the sections do not make up the dim, or there are other numbers of them.
    """
    sections = [int(section) for section in split_sections]
    if sum(sections) != tensor.shape[0] or len(sections) != len(quantizer_list):
        raise ValueError(
            f"split_quantize: split_sections={sections}, expected {len(quantizer_list)} that make "
            f"up the {tensor.shape[0]} rows of tensor"
        )
    parts = checked("split_quantize", "tensor", tensor).split(sections)
    return [
        _cast("split_quantize", part, one) for part, one in zip(parts, quantizer_list, strict=True)
    ]


@native
def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor) -> Tensor:
    """Transpose bytes [..., columns] to [columns, ...], into `out`, which is returned.

    `input` is uint8 or of an FP8 dtype; `dtype` is that of its codes, which makes no difference.
    A new tensor where `out` is None.
    """
    del dtype
    op = "fp8_transpose"
    if input.element_size() != 1 or input.dim() == 0:
        raise TypeError(f"{op}: input: {input.dtype} {tuple(input.shape)}, expected bytes [.., n]")
    made = casts.transpose(input.detach().contiguous().view(torch.uint8))
    if out is None:
        return made.contiguous()
    like(op, "out", out.view(torch.uint8), tuple(made.shape), torch.uint8)
    out.view(torch.uint8).copy_(made)
    return out


@native
def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Write the largest magnitude of a tensor, NaN ignored, into `amax`, fp32 of one element."""
    source = checked("compute_amax", "input", input)
    if amax.dtype != torch.float32 or amax.numel() != 1:
        raise TypeError(
            f"compute_amax: amax: {amax.dtype} {tuple(amax.shape)}, expected torch.float32 of one "
            "element"
        )
    source = source.contiguous()
    partials = casts.measure(source.flatten(0, -2) if source.dim() > 2 else source.view(1, -1))
    amax.detach().copy_(partials.max().view(amax.shape))


@native
@operator
def fused_amax_and_scale_update_after_reduction(call: Any) -> None:
    """Update the state of delayed scaling, in place: scales, and histories moved on by one row.

    Parameters
    ----------
    amax_reduction_buffer : Tensor
        fp32: the newest amaxes of all slots, which are written to row 0 of the histories first
        where they are not 0; one of no elements leaves these as they are.
    amax_histories, scales : list of Tensor
        fp32 [length, slots] and [slots]. Row 0 is the newest; where it is not 0, the scale is made
        anew and the rows are moved so that it becomes the last, and row 0 is 0 then. Where it is 0,
        the slot stays as it is.
    amax_compute_algo : str
        "max" of the history, or "most_recent". ValueError for another one.
    fp8_dtype : DType
        Whose largest value a scale is made for.
    margin : float
        Powers of two that are left free below it.
    """
    largest, most_recent = update_rule(call)
    for scale, history in with_newest(call):
        scaling_update(scale, history, largest, most_recent)


_UPDATE = "fused_amax_and_scale_update_after_reduction"


def update_rule(call: Any) -> tuple[float, bool]:
    """(largest value with its margin, whether the newest amax counts alone)."""
    algo, fp8_dtype = call.amax_compute_algo, call.fp8_dtype
    if algo not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ValueError(f"{_UPDATE}: amax_compute_algo={algo!r}, expected one of {known}")
    dtype = TE_DType_To_Torch.get(fp8_dtype, fp8_dtype)
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise TypeError(f"{_UPDATE}: fp8_dtype={fp8_dtype!r}, expected an FP8 DType")
    return torch.finfo(dtype).max * 2.0**-call.margin, ALGORITHMS[algo]


def with_newest(call: Any) -> list[tuple[Tensor, Tensor]]:
    """(scale, history) of each state, with the newest amaxes in row 0."""
    buffer, histories, scales = call.amax_reduction_buffer, call.amax_histories, call.scales
    sizes = [history.shape[1] for history in histories]
    if [scale.numel() for scale in scales] != sizes or buffer.numel() not in (0, sum(sizes)):
        raise ValueError(
            f"{_UPDATE}: amax_histories of {sizes} slots, scales of "
            f"{[scale.numel() for scale in scales]}, amax_reduction_buffer of {buffer.numel()}: "
            "expected as many of each"
        )
    if buffer.numel():
        for history, newest in zip(histories, buffer.detach().split(sizes), strict=True):
            row = history.detach()[0]
            row.copy_(torch.where(newest != 0, newest, row))
    return [(s.detach(), h.detach()) for s, h in zip(scales, histories, strict=True)]


# ---- slices of weights ---------------------------------------------------------------------------


# Casts of a slice of a flat weight that one rank owns, with a scale for each square tile, in plain
# torch: an optimizer calls them once for each weight and step.


def _tiles(op: str, part: Tensor, call: Any, name: str, by_tile: Tensor) -> Tensor:
    """Number of the tile of each element of a slice; a tensor has a number for each tile."""
    h, w, start_offset, block_len = call.h, call.w, call.start_offset, call.block_len
    if start_offset < 0 or start_offset + part.numel() > h * w:
        raise ValueError(
            f"{op}: start_offset={start_offset} and {part.numel()} elements, of a matrix of "
            f"{h} x {w}"
        )
    expected = -(-h // block_len) * -(-w // block_len)
    if by_tile.numel() != expected:
        raise ValueError(f"{op}: {name} of {by_tile.numel()} elements, expected {expected} tiles")
    at = torch.arange(start_offset, start_offset + part.numel(), device=part.device)
    return at // w // block_len * -(-w // block_len) + at % w // block_len


@operator
def fp8_block_scaling_compute_partial_amax(call: Any) -> None:
    """Write the largest magnitudes of a slice, by tile.

    `tensor` are consecutive elements of a matrix [h, w], from element `start_offset` on, of a
    floating dtype; `amax` is fp32 [ceil(h / block_len), ceil(w / block_len)], 0 for tiles without
    elements here. ValueError for a slice that is none of the matrix, or another number of tiles.
    """
    op, amax = "fp8_block_scaling_compute_partial_amax", call.amax
    part = checked(op, "tensor", call.tensor).reshape(-1)
    tiles = _tiles(op, part, call, "amax", amax)
    found = torch.zeros(amax.numel(), dtype=torch.float32, device=amax.device)
    found.scatter_reduce_(0, tiles, part.float().abs(), "amax")
    amax.detach().copy_(found.view(amax.shape))


@operator
def fp8_block_scaling_partial_cast(call: Any) -> None:
    """Cast a slice with the scales of its tiles: codes of inp * scale, saturated.

    `out` is uint8 of as many elements as `inp`, `scale` fp32 as `amax` of
    `fp8_block_scaling_compute_partial_amax`, whose other arguments these are; `out_dtype` is the
    FP8 `DType` of the codes.
    """
    op, out = "fp8_block_scaling_partial_cast", call.out.detach()
    part = checked(op, "inp", call.inp).reshape(-1)
    dtype = torch_dtype(op, "out_dtype", call.out_dtype)
    if not is_fp8(dtype):
        raise TypeError(f"{op}: out_dtype={call.out_dtype!r}, expected an FP8 DType")
    if out.numel() != part.numel():
        raise ValueError(f"{op}: out of {out.numel()} elements, inp of {part.numel()}")
    tiles = _tiles(op, part, call, "scale", call.scale)
    codes = encode(part.float() * call.scale.reshape(-1)[tiles], dtype)
    out.view(torch.uint8).copy_(codes.view(out.shape))
