# SPDX-License-Identifier: Apache-2.0
"""Collectives of torch.distributed on plain tensors, along their first dim; and groups of ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor, is_quantized, local_of


def get_distributed_world_size(group: Any = None) -> int:
    """Ranks of a group; None: of all processes. 1 where torch.distributed is not initialised."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return torch.distributed.get_world_size(group)


def get_distributed_rank(group: Any = None) -> int:
    """Rank in a group; None: among all processes. 0 where torch.distributed is not initialised."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0
    return torch.distributed.get_rank(group)


def ranks_of(op: str, group: Any) -> int:
    """`get_distributed_world_size`; ValueError where this process is none of them."""
    size = get_distributed_world_size(group)
    if size < 1:
        raise ValueError(f"{op}: this process is not in the group that it was given")
    return size


def agree(problem: str, said: str, group: Any) -> None:
    """Raise ValueError on all ranks of a group, by a collective, unless all say the same."""
    found: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(found, said, group=group)
    if len(set(found)) > 1:
        listed = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(found))
        raise ValueError(f"{problem}: {listed}")


def expect_own(label: str, given: Any) -> None:
    """Raise TypeError for what is no plain tensor of this rank alone."""
    expect_tensor(label, given)
    kind = type(given).__name__
    if local_of(given) is not given:
        raise TypeError(f"{label}: {kind}, expected the tensor of this rank: give to_local()")
    if is_quantized(given):
        raise TypeError(f"{label}: {kind}, expected a plain tensor: give dequantize()")


def as_bytes(tensor: Tensor) -> Tensor:
    """A dense tensor as a row of bytes, which all backends send; it shares the memory."""
    return tensor.view(-1).view(torch.uint8)


def sendable(tensor: Tensor) -> Tensor:
    """A tensor as all backends send it: FP8 as bytes. It shares the memory."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def _named(name: str, older: str) -> str:
    """Name of a collective of torch, which renames some: the new one, or the older one."""
    return name if hasattr(torch.distributed, name) else older


_GATHER = _named("all_gather_single", "all_gather_into_tensor")
_SCATTER = _named("reduce_scatter_single", "reduce_scatter_tensor")


def start_gather(part: Tensor, whole: Tensor, group: Any, async_op: bool = True) -> Any:
    """Begin to put the parts of all ranks one below the other; the handle is to be waited for.

    Tensors are dense and of matching shapes, and ranks are several: nothing is checked.
    """
    return getattr(torch.distributed, _GATHER)(whole, part, group=group, async_op=async_op)


def start_scatter(whole: Tensor, part: Tensor, group: Any, async_op: bool = True) -> Any:
    """Begin to sum a tensor over ranks, of which each gets its rows; see `start_gather`."""
    return getattr(torch.distributed, _SCATTER)(part, whole, group=group, async_op=async_op)


def start_sum(tensor: Tensor, group: Any, async_op: bool = True) -> Any:
    """Begin to sum a tensor over ranks, in place; see `start_gather`."""
    return torch.distributed.all_reduce(tensor, group=group, async_op=async_op)


def _into(label: str, output: Tensor | None, inp: Tensor, rows: int) -> Tensor:
    """The tensor for a result of so many rows, checked where it is given."""
    shape = (rows, *inp.shape[1:])
    if output is None:
        return inp.new_empty(shape)
    expect_own(label, output)
    found, wanted = (tuple(output.shape), output.dtype), (shape, inp.dtype)
    if found != wanted or not output.is_contiguous():
        raise ValueError(
            f"{label}: shape {found[0]}, {found[1]}, expected {shape}, {inp.dtype}, contiguous"
        )
    return output


def _rows(label: str, inp: Tensor) -> int:
    if inp.dim() == 0:
        raise ValueError(f"{label}: shape (), expected at least one dim")
    return inp.shape[0]


def allreduce(inp: Tensor, tp_group: Any = None, async_op: bool = False) -> tuple[Tensor, Any]:
    """Sum a tensor over a group, in place; return it and a handle or None.

    The handle of an asynchronous call is to be waited for.
    """
    expect_own("allreduce: inp", inp)
    if ranks_of("allreduce", tp_group) == 1:
        return inp, None
    return inp, start_sum(inp, tp_group, async_op)


def start_largest(
    tensors: Sequence[Tensor], group: Any, async_op: bool = True
) -> tuple[Any, Callable | None]:
    """Begin to give each rank the largest values of all ranks, in place, by one collective.

    Tensors are fp32, and their values not negative: so their bits, as integers, have the order of
    the values, and NaN is the largest. `group` None: all ranks. Returns a handle (None: there is
    nothing to wait for) and, for several tensors, the function to be called after that.
    """
    if not tensors or ranks_of("start_largest", group) == 1:
        return None, None
    direct = len(tensors) == 1 and tensors[0].is_contiguous()
    joined = tensors[0] if direct else torch.cat([t.reshape(-1) for t in tensors])
    most = torch.distributed.ReduceOp.MAX
    bits = joined.view(torch.int32)
    work = torch.distributed.all_reduce(bits, most, group=group, async_op=async_op)

    def put() -> None:
        parts = joined.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))

    return work, None if direct else put


def take_largest(tensors: Sequence[Tensor], group: Any) -> None:
    """`start_largest` on the current stream, which takes no other one to wait for."""
    work, put = start_largest(tensors, group, async_op=False)
    if work is not None:
        work.wait()
    if put is not None:
        put()


def gather_rows(
    inp: Tensor, group: Any, async_op: bool = False, output: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Put the tensors [n, ...] of all ranks, of one shape, one below the other: [ranks * n, ...].

    `group` None: all ranks. `output`, contiguous, is written where it is given. Returns it and a
    handle or None; that of an asynchronous call is to be waited for.
    """
    op = "gather_along_first_dim"
    expect_own(f"{op}: inp", inp)
    size = ranks_of(op, group)
    made = _into(f"{op}: output_tensor", output, inp, _rows(f"{op}: inp", inp) * size)
    if size == 1:
        return inp if output is None else made.copy_(inp), None
    return made, start_gather(sendable(inp.contiguous()), sendable(made), group, async_op)


def gather_parts(part: Tensor, whole: Tensor, dim: int, group: Any) -> tuple[Any, Callable | None]:
    """Begin to put the parts of all ranks side by side along a dim of `whole`.

    Of parts whose sizes along the others are those of `whole`; what is behind them along `dim` is
    padding, and zeroed. Returns a handle (None: of one rank) and, where the parts come to another
    place first, the function to be called once it was waited for.
    """
    size = ranks_of("gather", group)
    direct = dim == 0 and whole.is_contiguous() and whole.shape[0] == size * part.shape[0]
    made, work = gather_rows(part.contiguous(), group, True, whole if direct else None)

    def put() -> None:
        parts = made.unflatten(0, (size, -1)).movedim(0, dim).flatten(dim, dim + 1)
        length = parts.shape[dim]
        whole.narrow(dim, 0, length).copy_(parts)
        whole.narrow(dim, length, whole.shape[dim] - length).zero_()

    return work, None if direct else put


def reduce_scatter_along_first_dim(
    inp: Tensor, tp_group: Any, async_op: bool = False, output: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Sum a tensor [ranks * n, ...] over a group; each rank gets its part of the rows, [n, ...].

    `tp_group` None: all ranks. `output`, contiguous, is written where it is given. Returns it and a
    handle or None; that of an asynchronous call is to be waited for. ValueError where the ranks do
    not divide the rows.
    """
    op = "reduce_scatter_along_first_dim"
    expect_own(f"{op}: inp", inp)
    size, rows = ranks_of(op, tp_group), _rows(f"{op}: inp", inp)
    if rows % size != 0:
        raise ValueError(f"{op}: {rows} rows are no {size} equal parts")
    made = _into(f"{op}: output", output, inp, rows // size)
    if size == 1:
        return inp if output is None else made.copy_(inp), None
    return made, start_scatter(inp.contiguous(), made, tp_group, async_op)


def exchange_rows(sent: Tensor, received: Tensor, group: Any) -> Any:
    """Begin to send each other rank its rows of a tensor, and to receive this rank's from each.

    Both are [(ranks - 1) * n, ...], contiguous, n rows for each other rank in their order. Returns
    a handle that is to be waited for.
    """
    size, rank = group.size(), group.rank()
    rows = [sent.shape[0] // (size - 1)] * size
    rows[rank] = 0
    return torch.distributed.all_to_all_single(
        received, sent, rows, rows, group=group, async_op=True
    )


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, tp_group: Any, new_buffer: bool = False
) -> Tensor:
    """Part of a tensor's elements, that of this rank, as a row; `new_buffer`: as a copy.

    ValueError where the elements do not divide by the ranks.
    """
    op = "split_tensor_into_1d_equal_chunks"
    expect_own(f"{op}: tensor", tensor)
    size = ranks_of(op, tp_group)
    if tensor.numel() % size != 0:
        raise ValueError(f"{op}: {tensor.numel()} elements are no {size} parts")
    part = tensor.reshape(size, -1)[get_distributed_rank(tp_group)]
    return part.clone() if new_buffer else part


def gather_split_1d_tensor(tensor: Tensor, tp_group: Any) -> Tensor:
    """The row that `split_tensor_into_1d_equal_chunks` cut, put together again."""
    return gather_rows(tensor, tp_group)[0]
