# SPDX-License-Identifier: Apache-2.0
"""Quantized parameters of sharded optimizers: ranks own slices of masters in high precision."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common import absent
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8Quantizer,
    Float8TensorStorage,
    code_of,
)
from transformer_engine.pytorch.tensor.hybrid import HybridQuantizedTensorStorage
from transformer_engine.pytorch.tensor.identity import IdentityTensorStorage
from transformer_engine.pytorch.tensors import is_quantized

__getattr__, __dir__ = absent.attach(globals())
__all__ = [
    "cast_master_weights_to_fp8",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
    *absent.names_of(__name__),
]


@torch.no_grad()
def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Cast this rank's slices of master weights into quantized parameters.

    All ranks of a group call it with the same parameters in the same order, as the scales are those
    of whole parameters. Row-wise data of the slices are written, and no others; gather them, then
    call `post_all_gather_processing`. First values that were preserved are let go.

    Parameters
    ----------
    model_weights : sequence of Float8Tensor
        The parameters.
    master_weights : sequence of Tensor or None
        1-D slices of them in high precision, rounded to the nominal dtype before they are cast;
        None where other ranks own all of a parameter.
    start_offsets : sequence of int or None
        Where each slice begins among the elements of its parameter.
    group : ProcessGroup, optional
        The ranks that share the parameters; all where None, none where torch.distributed is not in
        use.
    fsdp_shard_model_weights : sequence of Tensor or None, optional
        uint8 shards to write to instead of the parameters, each as long as its slice.
    manual_post_all_gather_processing : bool, default False
        Keep column-wise forms, which `post_all_gather_processing` makes new: else they are dropped.

    Raises
    ------
    ValueError
        The sequences have other lengths, or a slice does not lie in its parameter.
    NotImplementedError
        A parameter of a class that is not there yet.
    """
    shards = fsdp_shard_model_weights
    shards = [None] * len(model_weights) if shards is None else shards
    if len({len(s) for s in (model_weights, master_weights, start_offsets, shards)}) != 1:
        raise ValueError(
            f"quantize_master_weights: {len(model_weights)} model_weights, {len(master_weights)} "
            f"master_weights, {len(start_offsets)} start_offsets and {len(shards)} shards, "
            "expected as many of each"
        )
    slices = [
        _slice_of(weight, master, start)
        for weight, master, start in zip(model_weights, master_weights, start_offsets, strict=True)
    ]
    amaxes = [_amax_of(weight, part) for weight, part in zip(model_weights, slices, strict=True)]
    _reduce(amaxes, group)
    each = zip(model_weights, slices, start_offsets, shards, amaxes, strict=True)
    for weight, part, start, shard, amax in each:
        _cast_slice(weight, part, start, shard, amax)
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()
        if not manual_post_all_gather_processing and weight._data is not None:
            weight.update_usage(columnwise_usage=False)


cast_master_weights_to_fp8 = quantize_master_weights
"""`quantize_master_weights` under its older name."""


def _slice_of(weight: Any, master: Tensor | None, start: int | None) -> Tensor | None:
    """The slice in the nominal dtype; ValueError where it is none."""
    if not isinstance(weight, Float8TensorStorage):
        raise NotImplementedError(
            f"quantize_master_weights: a model weight is a {type(weight).__name__}, expected a "
            "Float8Tensor: parameters of other formats are not there yet"
        )
    if master is None:
        return None
    if start is None or start < 0 or start + master.numel() > weight.shape.numel():
        raise ValueError(
            f"quantize_master_weights: a slice of {master.numel()} elements that begins at "
            f"{start}, of a weight of {weight.shape.numel()}"
        )
    return master.detach().reshape(-1).to(weight.dtype)


def _amax_of(weight: Any, part: Tensor | None) -> Tensor:
    """Largest magnitude of a slice, fp32 [1]; 0 where there is none."""
    if part is None or part.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=weight.device)
    return casts.measure(part).amax().reshape(1)


def _reduce(amaxes: list[Tensor], group: Any) -> None:
    """Give each rank the largest of all ranks."""
    distributed = torch.distributed
    if not amaxes or not distributed.is_available() or not distributed.is_initialized():
        return
    together = torch.cat(amaxes)
    distributed.all_reduce(together, distributed.ReduceOp.MAX, group=group)
    for amax, reduced in zip(amaxes, together.split(1), strict=True):
        amax.copy_(reduced)


def _cast_slice(
    weight: Any, part: Tensor | None, start: int | None, shard: Tensor | None, amax: Tensor
) -> None:
    """Write bytes of a slice, and the scale of the whole parameter."""
    source = torch.empty(0, dtype=weight.dtype, device=weight.device) if part is None else part
    made = casts.empty_rows(source.shape, weight.device)
    quantizer = weight._caster()
    how: dict[str, Any] = {}
    delayed = isinstance(quantizer, Float8Quantizer)
    if not delayed or quantizer.measure_first:
        how["partials"] = partials = torch.zeros(
            _core.AMAX_PARTIALS, dtype=torch.float32, device=weight.device
        )
        partials[:1] = amax
    if delayed:
        how["scale"] = quantizer.scale.to(weight.device)
        quantizer.amax.copy_(torch.maximum(quantizer.amax, amax.to(quantizer.amax.device)))
    else:
        how["epsilon"], how["power_2"] = quantizer.amax_epsilon, quantizer.force_pow_2_scales
    code = code_of(weight._fp8_dtype)
    casts.cast(source, _core.SCALING_TENSOR, code, row=made, row_scales=weight._scales, **how)
    if part is None:
        return
    if shard is not None:
        shard.view(torch.uint8).reshape(-1).copy_(made)
    elif weight._data.is_contiguous():
        weight._data.view(-1)[start : start + len(made)].copy_(made)
    else:  # rows with padding between them
        whole = weight._data.reshape(-1)
        whole[start : start + len(made)] = made
        weight._data.copy_(whole.view(weight._data.shape))


def replace_raw_data(tensor: Any, new_raw_data: Tensor) -> None:
    """Copy the row-wise data of a quantized tensor to a caller's buffer, and keep them there.

    The buffer has the shape of the data. ValueError where its dtype or shape differ, or the tensor
    is not quantized.
    """
    if isinstance(tensor, HybridQuantizedTensorStorage):
        tensor = tensor._rowwise_storage
    kinds = {Float8TensorStorage: "_data", IdentityTensorStorage: "_hp_data"}
    name = next((field for kind, field in kinds.items() if isinstance(tensor, kind)), None)
    if name is None:
        raise ValueError(f"replace_raw_data: {type(tensor).__name__}, expected a quantized tensor")
    old = getattr(tensor, name)
    if old.dtype != new_raw_data.dtype or old.shape != new_raw_data.shape:
        raise ValueError(
            f"replace_raw_data: new_raw_data is {new_raw_data.dtype} {tuple(new_raw_data.shape)}, "
            f"expected {old.dtype} {tuple(old.shape)}"
        )
    columns = name == "_data" and not tensor._transpose_invalid
    new_raw_data.detach().copy_(old)
    setattr(tensor, name, new_raw_data)
    if columns:
        tensor._transpose_invalid = False


def post_all_gather_processing(model_weights: Any) -> None:
    """Make the column-wise forms that parameters had from their new row-wise data.

    One parameter or several. Those without one need none: a backward transposes what it reads.
    ValueError for what is no tensor.
    """
    weights = model_weights if isinstance(model_weights, Iterable) else [model_weights]
    if isinstance(model_weights, Tensor):
        weights = [model_weights]
    for weight in weights:
        if not isinstance(weight, Tensor):
            raise ValueError(
                f"post_all_gather_processing: {type(weight).__name__}, expected a parameter"
            )
        if is_quantized(weight) and hasattr(weight, "_transpose") and weight._data is not None:
            quantizer = weight._quantizer
            wanted = quantizer is not None and quantizer.columnwise_usage
            if wanted or weight._transpose is not None:
                weight._transpose_invalid = True
                weight.update_usage(columnwise_usage=True)
