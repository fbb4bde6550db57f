# SPDX-License-Identifier: Apache-2.0
"""Quantized parameters of sharded optimizers: ranks own slices of masters in high precision."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.tensor.float8_tensor import Float8TensorStorage
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizedTensorStorage
from transformer_engine.pytorch.tensor.master_slices import (
    Shards,
    Slice,
    row_data_field,
    row_storage,
    slices_of,
)
from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor, is_quantized

__getattr__, __dir__ = absent.attach(globals())


@torch.no_grad()
def quantize_master_weights(
    model_weights: Sequence[Any],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Any] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Cast this rank's slices of master weights into quantized parameters.

    All ranks of a group call it with the same parameters in the same order, as the scales are those
    of whole parameters. Row-wise data of the slices are written, and all scales; gather the former,
    then call `post_all_gather_processing`: parameters have the bits then of a cast of the whole by
    their quantizers. First values that were preserved are let go.

    Amaxes of all parameters are reduced by one collective. Some formats take one more for each
    parameter, by which all ranks get what can not be made of row-wise data:

    - column-wise codes (one byte an element) of tiles of 1 x 128, of rows, and of MXFP8 whose
      groups are no squares, where the parameter has that form;
    - the values (in the nominal dtype) of what a quantizer or a tensor of a program casts, of NVFP4
      that chooses between 4 and 6, rounds stochastically, has an amax for each row, or has a
      column-wise form and no squares, and of a hybrid parameter whose column-wise form is cast from
      the original. Each rank casts the whole then, and writes all row-wise data. Stochastic
      rounding wants generators of all ranks in the same state, or codes differ from rank to rank.

    Parameters
    ----------
    model_weights : sequence of QuantizedTensor
        The parameters, of any format, with row-wise data.
    master_weights : sequence of Tensor or None
        1-D slices of them in high precision, rounded to the nominal dtype before they are cast;
        None where other ranks own all of a parameter.
    start_offsets : sequence of int or None
        Where each slice begins among the elements of its parameter; not read for None.
    group : ProcessGroup, optional
        The ranks that share the parameters; all where None, none where torch.distributed is not in
        use.
    fsdp_shard_model_weights : sequence of Tensor, pair of Tensor or None, optional
        uint8 shards to write to instead of the parameters, each as long as the row-wise bytes of
        its slice: an element each, or two of NVFP4, where rows are padded to 16; of an
        `IdentityTensor` of its dtype. A pair is one for row-wise and one for column-wise bytes, or
        None for one of them: of MXFP8, whose forms have elements in one order. All ranks that have
        a slice of a parameter give pairs, or none does: then nothing is exchanged but amaxes, the
        program gathers both forms, and the column-wise one is kept.
    manual_post_all_gather_processing : bool, default False
        Keep column-wise forms that `post_all_gather_processing` makes new: else they are dropped,
        and made when they are read. Others always stay.

    Raises
    ------
    ValueError
        The sequences have other lengths, a parameter comes twice, a slice does not lie in its
        parameter or cuts a byte of NVFP4 (which two neighbours in a row share), a shard has another
        size, is no tensor, is for a class of a program or for column-wise bytes that the parameter
        has not in the order of elements, or a parameter has no row-wise data. The other ranks wait
        for this one then.
    NotImplementedError
        A parameter that is not quantized.
    """
    shards = fsdp_shard_model_weights
    shards = [None] * len(model_weights) if shards is None else shards
    if len({len(s) for s in (model_weights, master_weights, start_offsets, shards)}) != 1:
        raise ValueError(
            f"quantize_master_weights: {len(model_weights)} model_weights, {len(master_weights)} "
            f"master_weights, {len(start_offsets)} start_offsets and {len(shards)} shards, "
            "expected as many of each"
        )
    if len({id(weight) for weight in model_weights}) != len(model_weights):
        raise ValueError("quantize_master_weights: a parameter comes twice: join its slices to one")
    each = zip(model_weights, master_weights, start_offsets, shards, strict=True)
    slices = [part for given in each for part in _slices(*given)]
    amaxes = [amax for part in slices for amax in part.measure()]
    _reduce_amaxes(amaxes, group)
    for part in slices:
        shared = part.share()
        if shared is not None:
            _reduce(shared, group)
        part.write(shared)
    kept = {id(part.storage) for part in slices if part.keeps_columns}
    for weight in model_weights:
        weight._count_write()  # of this rank or of others
        weight._changed()
        if hasattr(weight, "clear_high_precision_init_val"):
            weight.clear_high_precision_init_val()
        if not manual_post_all_gather_processing and weight._turns() and id(weight) not in kept:
            weight.update_usage(columnwise_usage=False)


cast_master_weights_to_fp8 = quantize_master_weights
"""`quantize_master_weights` under its older name."""


def _slices(weight: Any, master: Tensor | None, start: int | None, shard: Any) -> list[Slice]:
    """The slices of a parameter, an empty one for None; ValueError where it is none."""
    if not is_quantized(weight):
        raise NotImplementedError(
            f"quantize_master_weights: a model weight is a {type(weight).__name__}, expected a "
            "quantized parameter"
        )
    if master is None:
        nothing = torch.empty(0, dtype=weight.dtype, device=weight.device)
        return slices_of(weight, nothing, 0, Shards())
    if start is None or start < 0 or start + master.numel() > weight.shape.numel():
        raise ValueError(
            f"quantize_master_weights: a slice of {master.numel()} elements that begins at "
            f"{start}, of a weight of {weight.shape.numel()}"
        )
    part = master.detach().reshape(-1).to(device=weight.device, dtype=weight.dtype)
    shards = _shards(shard)
    return slices_of(weight, part, start, shards if part.numel() > 0 else Shards())


def _shards(given: Any) -> Shards:
    """Argument of a program: a row-wise shard, a pair, or None."""
    pair = given if isinstance(given, (tuple, list)) else (given, None)
    if len(pair) != 2 or not all(isinstance(each, Tensor | None) for each in pair):
        raise ValueError(
            f"quantize_master_weights: a shard is a {type(given).__name__} of {len(pair)}, "
            "expected a tensor, a pair (row-wise, column-wise) of tensors or None, or None"
        )
    return Shards(*pair)


def _reduce_amaxes(amaxes: list[Tensor], group: Any) -> None:
    """Give each rank the largest of all ranks, NaN being the largest, by one collective.

    As integers the bits of numbers that are not negative have the order of these.
    """
    if not amaxes:
        return
    together = torch.cat([amax.view(-1) for amax in amaxes])
    _reduce(together.view(torch.int32), group)
    reduced = together.split([amax.numel() for amax in amaxes])
    for amax, largest in zip(amaxes, reduced, strict=True):
        amax.copy_(largest.view(amax.shape))


def _reduce(integers: Tensor, group: Any) -> None:
    """Give each rank the largest of all ranks."""
    distributed = torch.distributed
    if integers.numel() > 0 and distributed.is_available() and distributed.is_initialized():
        distributed.all_reduce(integers, distributed.ReduceOp.MAX, group=group)


def replace_raw_data(tensor: Any, new_raw_data: Tensor) -> None:
    """Copy the row-wise data of a quantized tensor to a caller's buffer, and keep them there.

    The buffer has the shape and dtype of the data; of a hybrid tensor of its row-wise part.
    ValueError where they differ, there are none, or the tensor is not quantized.
    """
    storage = row_storage(tensor)
    name = row_data_field(storage)
    if name is None:
        raise ValueError(
            f"replace_raw_data: {type(tensor).__name__}, expected a quantized tensor of a format "
            "of this library"
        )
    expect_tensor("replace_raw_data: new_raw_data", new_raw_data)
    old = getattr(storage, name)
    if old is None:
        raise ValueError(
            f"replace_raw_data: a {type(tensor).__name__} without row-wise data, which are what it "
            "replaces"
        )
    if old.dtype != new_raw_data.dtype or old.shape != new_raw_data.shape:
        raise ValueError(
            f"replace_raw_data: new_raw_data is {new_raw_data.dtype} {tuple(new_raw_data.shape)}, "
            f"expected {old.dtype} {tuple(old.shape)}"
        )
    columns = name == "_data" and not storage._transpose_invalid
    new_raw_data.detach().copy_(old)
    setattr(storage, name, new_raw_data)
    if columns:
        storage._transpose_invalid = False


@torch.no_grad()
def post_all_gather_processing(model_weights: Any) -> None:
    """Make the column-wise forms that parameters had from their new row-wise data.

    One parameter or several. What is made of row-wise data are transposes, of parameters with one
    scale, square tiles or square groups, and column-wise parts of hybrid ones that are cast from
    the row-wise part; `quantize_master_weights` has written all others, and those that are not
    there are made when a backward reads them. ValueError for what is no tensor.
    """
    is_one = isinstance(model_weights, Tensor) or not isinstance(model_weights, Iterable)
    for weight in [model_weights] if is_one else model_weights:
        if not isinstance(weight, Tensor):
            raise ValueError(
                f"post_all_gather_processing: {type(weight).__name__}, expected a parameter"
            )
        if isinstance(weight, HybridQuantizedTensorStorage):
            _cast_columns_of_rows(weight)
        elif is_quantized(weight) and weight._turns():
            _turn(weight)


def _cast_columns_of_rows(weight: Any) -> None:
    """Cast the column-wise part of a hybrid parameter anew, where it is made of the other one."""
    row, column, quantizer = weight._rowwise_storage, weight._columnwise_storage, weight._quantizer
    if None in (row, column, quantizer) or quantizer.columnwise_source == "original":
        return
    values = row._dequantized(weight.dtype, tuple(weight.shape))
    column._write(values, quantizer.columnwise_quantizer)
    weight._changed()


def _turn(weight: Any) -> None:
    """Make the column-wise form anew, where there is one or the quantizer makes one."""
    quantizer = weight._quantizer
    wanted = quantizer is not None and quantizer.columnwise_usage
    if isinstance(weight, Float8TensorStorage):
        if weight._data is not None and (wanted or weight._transpose is not None):
            weight._transpose_invalid = True
            weight.update_usage(columnwise_usage=True)
    elif weight._rowwise_data is not None and weight._columnwise_data is not None:
        columns = weight._columnwise_data, weight._columnwise_scale_inv
        for mine, made in zip(columns, weight._turned(), strict=True):
            mine.copy_(made.view(mine.shape))
    elif weight._rowwise_data is not None and wanted:
        weight.update_usage(columnwise_usage=True)
