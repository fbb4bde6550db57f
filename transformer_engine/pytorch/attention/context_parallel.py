# SPDX-License-Identifier: Apache-2.0
"""Data of context parallelism: which tokens a rank has, and in which order.

Of n ranks, rank r has two of 2 n equal chunks of each sequence, r and 2 n - 1 - r, in that order
(`CPLoadBalancingStrategy.DUAL_CHUNK_SWAP`), so that all ranks have equal work under a causal mask.
Without balance (`NO_LOAD_BALANCE`) it has the r-th of n equal parts of all tokens. Packed sequences
("thd") are padded, each to a multiple of 2 n. Their ``cu_seqlens``, [b + 1] integers, are the first
token of each sequence, and the number of all tokens.
"""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.constants import CPLoadBalancingStrategy
from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor

__all__ = [
    "generate_positional_ids_for_cp",
    "get_batch_on_this_cp_rank",
    "get_bsh_dims",
    "get_cu_seqlens_on_cp_rank",
    "get_seq_chunk_ids_for_reordering_after_attn",
    "get_seq_chunk_ids_for_reordering_before_attn",
    "get_thd_partitioned_indices",
    "pad_thd_sequences_for_cp",
    "thd_cp_rank_order_to_sequence_order",
    "thd_sequence_order_to_cp_rank_order",
]

_BALANCED = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP


def _check_rank(op: str, size: int, rank: int) -> None:
    if size < 1 or not 0 <= rank < size:
        raise ValueError(
            f"{op}: rank {rank} of {size}: expected a number of ranks, and one of 0 .. size - 1"
        )


def places_of(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Sequence of each of `tokens` packed tokens, and its place in that; [tokens] int64 both."""
    at = torch.arange(tokens, device=cu_seqlens.device)
    limits = cu_seqlens.long()
    entry = torch.searchsorted(limits[1:].contiguous(), at, right=True).clamp(max=len(limits) - 2)
    return entry, at - limits[entry]


# ---- tokens of a rank ----------------------------------------------------------------------------


def tokens_of_rank(op: str, cu_seqlens: Tensor, total_tokens: int, size: int, rank: int) -> Tensor:
    """Tokens of packed sequences that a rank has, balanced: [total_tokens / size] int32.

    `op` is a name for messages. ValueError for no rank of so many, a length that is no multiple of
    2 * size, or sequences that do not have `total_tokens`.
    """
    _check_rank(op, size, rank)
    limits = cu_seqlens.long()
    lengths = limits.diff().tolist()
    wrong = [length for length in lengths if length % (2 * size)]
    if wrong:
        raise ValueError(
            f"{op}: a sequence of {wrong[0]} tokens, expected a multiple of {2 * size}"
        )
    if sum(lengths) != total_tokens:
        raise ValueError(
            f"{op}: total_tokens={total_tokens}, but the sequences of cu_seqlens have "
            f"{sum(lengths)}"
        )
    entry, place = places_of((limits - limits[0]) // size, total_tokens // size)
    chunk = limits.diff()[entry] // (2 * size)
    # Its second chunk is this far behind the first one, where the first one's end is.
    gap = torch.where(place < chunk, rank, 2 * (size - 1) - rank) * chunk
    return (limits[entry] + place + gap).int()


def get_thd_partitioned_indices(
    cu_seqlens_padded: Tensor,
    total_tokens: int,
    cp_size: int,
    cp_rank: int,
    device: Any = None,
    load_balancing_strategy: CPLoadBalancingStrategy = _BALANCED,
) -> Tensor:
    """Tokens of packed sequences that a rank has, [total_tokens / cp_size] int32.

    Parameters
    ----------
    cu_seqlens_padded : Tensor
        First tokens of the padded sequences, [b + 1].
    total_tokens : int
        Number of all tokens.
    cp_size, cp_rank : int
        Number of ranks, and which one.
    device : torch.device, optional
        Of the result; that of `cu_seqlens_padded` where None.
    load_balancing_strategy : CPLoadBalancingStrategy
        How tokens are dealt to ranks.

    Raises
    ------
    ValueError
        No such rank or strategy; tokens that do not divide by the ranks, or, balanced, a sequence
        that does not divide by twice as many; sequences that do not have `total_tokens`.
    """
    op = "get_thd_partitioned_indices"
    expect_tensor(f"{op}: cu_seqlens_padded", cu_seqlens_padded)
    if CPLoadBalancingStrategy(load_balancing_strategy) is _BALANCED:
        found = tokens_of_rank(op, cu_seqlens_padded, total_tokens, cp_size, cp_rank)
        return found if device is None else found.to(device)
    _check_rank(op, cp_size, cp_rank)
    if total_tokens % cp_size:
        raise ValueError(f"{op}: {total_tokens} tokens are no {cp_size} equal parts")
    part = total_tokens // cp_size
    where = cu_seqlens_padded.device if device is None else device
    return torch.arange(cp_rank * part, (cp_rank + 1) * part, dtype=torch.int32, device=where)


def _part_of_sequences(
    name: str, tensor: Tensor, dim: int, size: int, rank: int, strategy: CPLoadBalancingStrategy
) -> Tensor:
    """A rank's part of sequences of one length, which lie along a dim."""
    count = 2 * size if strategy is _BALANCED else size
    if tensor.dim() <= dim or tensor.shape[dim] % count:
        raise ValueError(
            f"get_batch_on_this_cp_rank: {name}: shape {tuple(tensor.shape)}: dim {dim} is no "
            f"{count} equal chunks"
        )
    chunks = tensor.chunk(count, dim)
    if strategy is _BALANCED:
        return torch.cat((chunks[rank], chunks[-1 - rank]), dim)
    return chunks[rank].contiguous()


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: Tensor | None,
    input_ids_padded: Tensor | None,
    labels_padded: Tensor | None,
    position_ids_padded: Tensor | None,
    cp_group: Any = None,
    qvk_format: str = "thd",
    load_balancing_strategy: CPLoadBalancingStrategy = _BALANCED,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Get this rank's part of a batch that all ranks have.

    Parameters
    ----------
    cu_seqlens_padded : Tensor, optional
        First tokens of the padded sequences, [b + 1]; for "thd", where it is needed.
    input_ids_padded, labels_padded, position_ids_padded : Tensor, optional
        Of all tokens: [tokens, ...] or [1, tokens, ...] for "thd", [s, b, ...] for "sbhd",
        [b, s, ...] for "bshd".
    cp_group : ProcessGroup, optional
        The ranks; all of them where None.
    qvk_format : {"thd", "sbhd", "bshd"}, default "thd"
        How the tensors lie.
    load_balancing_strategy : CPLoadBalancingStrategy
        How tokens are dealt to ranks.

    Returns
    -------
    tuple of Tensor
        Input ids, labels and position ids of this rank, in the same dims; None for None.

    Raises
    ------
    ValueError
        Another format or strategy, tokens that can not be dealt to the ranks, or a tensor without
        a dim of all tokens; torch.distributed is not initialised, or this rank is not in the group.
    TypeError
        What is given is no tensor.
    """
    op = "get_batch_on_this_cp_rank"
    if qvk_format not in ("thd", "sbhd", "bshd"):
        raise ValueError(f"{op}: qvk_format={qvk_format!r}, expected 'thd', 'sbhd' or 'bshd'")
    strategy = CPLoadBalancingStrategy(load_balancing_strategy)
    size = torch.distributed.get_world_size(group=cp_group)
    rank = torch.distributed.get_rank(group=cp_group)
    _check_rank(op, size, rank)
    named = {
        "input_ids_padded": input_ids_padded,
        "labels_padded": labels_padded,
        "position_ids_padded": position_ids_padded,
    }
    given = {name: tensor for name, tensor in named.items() if tensor is not None}
    for name, tensor in given.items():
        expect_tensor(f"{op}: {name}", tensor)
    made: dict[str, Tensor]
    if qvk_format == "thd":
        expect_tensor(f"{op}: cu_seqlens_padded", cu_seqlens_padded)
        total = int(cu_seqlens_padded[-1])
        options = {"load_balancing_strategy": strategy}
        tokens = get_thd_partitioned_indices(cu_seqlens_padded, total, size, rank, **options)
        made = {name: _tokens_along(name, t, total, tokens) for name, t in given.items()}
    else:
        dim = qvk_format.index("s")
        made = {n: _part_of_sequences(n, t, dim, size, rank, strategy) for n, t in given.items()}
    ids, labels, positions = (made.get(name) for name in named)
    return ids, labels, positions


def _tokens_along(name: str, tensor: Tensor, total: int, tokens: Tensor) -> Tensor:
    """Chosen tokens of a tensor [tokens, ...] or [1, tokens, ...]."""
    dims = [dim for dim, length in enumerate(tensor.shape[:2]) if length == total]
    if not dims:
        raise ValueError(
            f"get_batch_on_this_cp_rank: {name}: shape {tuple(tensor.shape)}, expected [{total}] "
            f"or [1, {total}], as of cu_seqlens_padded"
        )
    return tensor.index_select(dims[-1], tokens.to(tensor.device))


# ---- padding -------------------------------------------------------------------------------------


def _padded_limits(op: str, cu_seqlens: Tensor, divisor: int) -> Tensor:
    """First tokens of sequences whose lengths are padded to multiples of a number."""
    expect_tensor(f"{op}: cu_seqlens", cu_seqlens)
    if divisor < 1:
        raise ValueError(f"{op}: divisibility_factor={divisor}, expected a positive int")
    lengths = cu_seqlens.diff()
    padded = torch.nn.functional.pad((lengths + divisor - 1) // divisor * divisor, (1, 0))
    return padded.cumsum(0).to(cu_seqlens.dtype)


def pad_thd_sequences_for_cp(
    input_ids: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor,
    divisibility_factor: int,
    padding_token_id: int = 0,
    padding_label_id: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad each of some packed sequences, behind its end, to a multiple of a number of tokens.

    Parameters
    ----------
    input_ids, labels : Tensor
        Of all tokens: [tokens] or [1, tokens].
    cu_seqlens : Tensor
        First tokens of the sequences, [b + 1].
    divisibility_factor : int
        The number: 2 * ranks for a balanced context parallelism.
    padding_token_id, padding_label_id : int
        What is put there.

    Returns
    -------
    tuple of Tensor
        Ids and labels, [padded tokens], and the first tokens of the padded sequences, [b + 1], in
        the dtype of `cu_seqlens`.

    Raises
    ------
    ValueError
        Another shape, or a number below 1.
    TypeError
        What is given is no tensor.
    """
    op = "pad_thd_sequences_for_cp"
    limits = _padded_limits(op, cu_seqlens, divisibility_factor)
    tokens, padded = int(cu_seqlens[-1]), int(limits[-1])
    entry, place = places_of(cu_seqlens, tokens)
    to = limits[entry] + place
    made = []
    for name, tensor, fill in (
        ("input_ids", input_ids, padding_token_id),
        ("labels", labels, padding_label_id),
    ):
        expect_tensor(f"{op}: {name}", tensor)
        if tuple(tensor.shape) not in ((tokens,), (1, tokens)):
            raise ValueError(
                f"{op}: {name}: shape {tuple(tensor.shape)}, expected [{tokens}] or [1, {tokens}], "
                "as of cu_seqlens"
            )
        whole = tensor.new_full((padded,), fill)
        made.append(whole.index_copy_(0, to.to(tensor.device), tensor.flatten()))
    return made[0], made[1], limits


def generate_positional_ids_for_cp(
    cu_seqlens: Tensor, divisibility_factor: int, dtype: torch.dtype = torch.long
) -> Tensor:
    """Place of each token in its sequence, which `pad_thd_sequences_for_cp` has padded.

    Padding is counted on. The result is [padded tokens] in `dtype`, on the device of `cu_seqlens`.
    Errors are as of that function.
    """
    limits = _padded_limits("generate_positional_ids_for_cp", cu_seqlens, divisibility_factor)
    return places_of(limits, int(limits[-1]))[1].to(dtype)


# ---- lengths and orders --------------------------------------------------------------------------


def get_cu_seqlens_on_cp_rank(
    cu_seqlens: Tensor,
    cu_seqlens_padded_on_cp_rank: Tensor,
    cp_size: int,
    cp_rank: int,
    first_half: bool,
    second_half: bool,
) -> Tensor:
    """First real tokens of what a rank has of each sequence, and their sum, [b + 1].

    Parameters
    ----------
    cu_seqlens : Tensor
        First tokens of the sequences of all ranks without padding, [b + 1].
    cu_seqlens_padded_on_cp_rank : Tensor
        First tokens of the padded sequences on this rank, [b + 1].
    cp_size, cp_rank : int
        Number of ranks, and which one; ValueError where there is no such rank.
    first_half, second_half : bool
        Count the rank's first chunk of each sequence, and its second one.
    """
    _check_rank("get_cu_seqlens_on_cp_rank", cp_size, cp_rank)
    lengths, chunk = cu_seqlens.diff(), cu_seqlens_padded_on_cp_rank.diff() // 2
    real = torch.zeros_like(lengths)
    for wanted, index in ((first_half, cp_rank), (second_half, 2 * cp_size - 1 - cp_rank)):
        if wanted:
            real = real + torch.minimum((lengths - index * chunk).clamp(min=0), chunk)
    return torch.nn.functional.pad(real.cumsum(0), (1, 0)).to(cu_seqlens.dtype)


def get_seq_chunk_ids_for_reordering_before_attn(cp_size: int, device: Any) -> Tensor:
    """Where each of 2 n chunks of a sequence is, in what the n ranks have one behind the other.

    [2 n] int32: ``gathered[ids]`` are the chunks in the order of the sequence.
    """
    after = get_seq_chunk_ids_for_reordering_after_attn(cp_size, device)
    return torch.argsort(after).int()


def get_seq_chunk_ids_for_reordering_after_attn(cp_size: int, device: Any) -> Tensor:
    """Chunks of a sequence as n ranks have them: r and 2 n - 1 - r for each rank r.

    [2 n] int32: ``sequence[ids]`` are the chunks in the order of the ranks.
    """
    first = torch.arange(cp_size, dtype=torch.int32, device=device)
    return torch.stack((first, 2 * cp_size - 1 - first), 1).flatten()


def _in_rank_order(op: str, x: Tensor, cu_seqlens: Tensor, size: int, dim: int) -> Tensor:
    """Tokens of all ranks, those of each behind those of the one before: [tokens] int64."""
    expect_tensor(f"{op}: x", x)
    total = x.shape[dim]
    parts = [tokens_of_rank(op, cu_seqlens, total, size, rank) for rank in range(size)]
    return torch.cat(parts).long().to(x.device)


def thd_sequence_order_to_cp_rank_order(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """Put packed tokens into the order of ranks: those of rank 0, then those of rank 1, ...

    `x` has all tokens along `seq_dim`, and is differentiable; `cu_seqlens` [b + 1] are the first
    tokens of the padded sequences. ValueError where a length is no multiple of 2 * cp_size, or the
    sequences do not have so many tokens.
    """
    op = "thd_sequence_order_to_cp_rank_order"
    return x.index_select(seq_dim, _in_rank_order(op, x, cu_seqlens, cp_size, seq_dim))


def thd_cp_rank_order_to_sequence_order(
    x: Tensor, cu_seqlens: Tensor, cp_size: int, seq_dim: int = 0
) -> Tensor:
    """Undo `thd_sequence_order_to_cp_rank_order`: what ranks have gathered, in its own order."""
    op = "thd_cp_rank_order_to_sequence_order"
    order = _in_rank_order(op, x, cu_seqlens, cp_size, seq_dim)
    return x.index_select(seq_dim, torch.argsort(order))


def get_bsh_dims(tensor_format: str) -> tuple[int, int, int]:
    """Dims of batch, sequence and heads in a format ("sbhd", "bshd", "bhsd").

    ValueError for a format without one of them.
    """
    if sorted(tensor_format) != sorted("bshd"):
        raise ValueError(f"get_bsh_dims: tensor_format={tensor_format!r}, expected say 'bshd'")
    batch, sequence, heads = (tensor_format.index(dim) for dim in "bsh")
    return batch, sequence, heads
