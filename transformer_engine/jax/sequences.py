# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a batch belong together, and how sequences are cut for several devices.

A token has a segment (a number from 1 on; 0 is padding) and a position in it. All that says how
long sequences are becomes these two, so masks have one definition (`definitions/attention.py`).
"""

from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
    "ReorderStrategy",
    "SequenceDescriptor",
    "get_seqlens_and_offsets",
    "inverse_reorder_causal_load_balancing",
    "make_swa_mask",
    "reorder_causal_load_balancing",
    "run_length_fill",
]


def _pair(value):
    """Return (of queries, of keys); one value is that of both."""
    if value is None or isinstance(value, list | tuple):
        return (None, None) if value is None else tuple(value)
    return value, value


@jax.tree_util.register_pytree_node_class
class SequenceDescriptor:
    """Which tokens of queries and keys are real, and to which sequence each belongs.

    Made by one of `from_seqlens`, `from_seqlens_and_offsets` and `from_segment_ids_and_pos`. It is
    a pytree, whose leaves are its arrays.

    Parameters
    ----------
    seqlens : pair of jax.Array, optional
        Tokens of each sequence, int32 [batch] or [batch, segments]; those of keys follow those of
        queries in this and the other pairs. Negative lengths are those of no sequence.
    seq_offsets : pair of jax.Array, optional
        Where each begins, int32 [batch, segments] or [batch, segments + 1].
    segment_ids : pair of jax.Array, optional
        Segment of each token, int32 [batch, length]; 0 is padding.
    segment_pos : pair of jax.Array, optional
        Position of each token in its segment, int32 [batch, length].
    is_reordered : bool, default False
        Tokens stand in the order in which devices have them, not in that of their positions.
    """

    def __init__(
        self,
        seqlens=None,
        seq_offsets=None,
        segment_ids=None,
        segment_pos=None,
        is_reordered: bool = False,
    ) -> None:
        self.seqlens, self.seq_offsets = _pair(seqlens), _pair(seq_offsets)
        self.segment_ids, self.segment_pos = _pair(segment_ids), _pair(segment_pos)
        self.is_reordered = is_reordered

    def tree_flatten(self):
        """Return the arrays, for `jax.tree_util`."""
        arrays = (self.seqlens, self.seq_offsets, self.segment_ids, self.segment_pos)
        return arrays, self.is_reordered

    @classmethod
    def tree_unflatten(cls, aux: bool, children: Any) -> "SequenceDescriptor":
        """Make one of what `tree_flatten` gave."""
        return cls(*children, is_reordered=aux)

    @classmethod
    def from_seqlens(cls, seqlens: Any) -> "SequenceDescriptor":
        """Make one of lengths; sequences of one row follow each other without gaps.

        Parameters
        ----------
        seqlens : jax.Array or pair of jax.Array
            int32 [batch], or [batch, segments] for the layouts of packed sequences (THD).
        """
        return cls(seqlens=seqlens)

    @classmethod
    def from_seqlens_and_offsets(cls, seqlens: Any, seq_offsets: Any) -> "SequenceDescriptor":
        """Make one of lengths and of where each sequence begins in its row."""
        return cls(seqlens=seqlens, seq_offsets=seq_offsets)

    @classmethod
    def from_segment_ids_and_pos(
        cls,
        segment_ids: Any,
        segment_pos: Any = None,
        *,
        is_thd: bool | None = None,
        is_segment_ids_reordered: bool = False,
    ) -> "SequenceDescriptor":
        """Make one of the segment of each token.

        Parameters
        ----------
        segment_ids : jax.Array or pair of jax.Array
            int32 [batch, length]; 0 is padding.
        segment_pos : jax.Array or pair of jax.Array, optional
            Positions; by default they count from 0 in each segment.
        is_thd : bool, optional
            Whether rows are packed; positions count from 0 in each segment either way.
        is_segment_ids_reordered : bool, default False
            Tokens do not stand in their order, so `segment_pos` is needed.

        Raises
        ------
        ValueError
            Reordered tokens without positions.
        """
        if segment_pos is None:
            if is_segment_ids_reordered:
                raise ValueError("reordered segment_ids need their segment_pos")
            segment_pos = tuple(map(_positions, _pair(segment_ids)))
        made = {"segment_ids": segment_ids, "segment_pos": segment_pos}
        return cls(**made, is_reordered=is_segment_ids_reordered)

    def over(self, batch: int, lengths: tuple[int, int]) -> "SequenceDescriptor":
        """Return the same with arrays of all rows: one row stands for each.

        `lengths`: of a row of queries, and of keys. ValueError for other shapes.
        """

        def of_rows(name: str, array: Any, *length: int) -> Any:
            if array is None:
                return None
            array = jnp.asarray(array)
            shape = (batch, *(length or array.shape[1:]))
            if array.ndim < 1 or array.shape[0] not in (1, batch) or array.shape[1:] != shape[1:]:
                raise ValueError(f"SequenceDescriptor: {name} is {array.shape}, expected {shape}")
            return jnp.broadcast_to(array, shape)

        def of_both(name: str, *lengths: int) -> tuple:
            ends = lengths or ((), ())
            pairs = zip(getattr(self, name), ends, strict=True)
            return tuple(of_rows(name, each, *([end] if lengths else [])) for each, end in pairs)

        return SequenceDescriptor(
            of_both("seqlens"),
            of_both("seq_offsets"),
            of_both("segment_ids", *lengths),
            of_both("segment_pos", *lengths),
            self.is_reordered,
        )

    def segments(self, lengths: tuple[int, int]):
        """Return ((segment ids, positions) of queries, the same of keys), each [batch, length].

        `lengths`: of a row of queries, and of keys.
        """
        if self.segment_ids[0] is not None:
            return tuple(zip(self.segment_ids, self.segment_pos, strict=True))
        if self.seqlens[0] is None:
            raise ValueError("the SequenceDescriptor has neither seqlens nor segment_ids")
        ids = map(_ids_of_lengths, self.seqlens, self.seq_offsets, lengths)
        return tuple((one, _positions(one)) for one in ids)

    def lengths(self, packed: bool) -> tuple | None:
        """Return lengths of queries and keys [batch], where each row begins with its one sequence.

        None for others, and where `packed` says that rows have several.
        """
        alone = self.segment_ids[0] is None and self.seq_offsets[0] is None and not packed
        return self.seqlens if alone and all(n.ndim == 1 for n in self.seqlens) else None

    def count(self, most: int) -> int:
        """Return how many sequences a row has at most; `most` where segments are given."""
        if self.segment_ids[0] is not None:
            return most
        return max(1 if lengths.ndim == 1 else lengths.shape[1] for lengths in self.seqlens)

    def get_seqlens_and_offsets(
        self, attn_mask_type: Any, qkv_layout: Any, window_size: Any, max_segments_per_seq: int
    ):
        """Return (lengths of queries and keys, where they begin), each [batch, segments(+ 1)].

        Lengths that were given come back as they are. The mask type, the layout and the window
        change nothing.
        """
        if self.segment_ids[0] is None:
            return self.seqlens, self.seq_offsets
        of_both = [get_seqlens_and_offsets(ids, max_segments_per_seq) for ids in self.segment_ids]
        return tuple(zip(*of_both, strict=True))


def _ids_of_lengths(seqlens, offsets, length):
    """Segment of each token, [batch, length]."""
    seqlens = seqlens[:, None] if seqlens.ndim == 1 else seqlens
    kept = jnp.maximum(seqlens, 0)
    if offsets is None:
        offsets = jnp.cumsum(kept, axis=1) - kept
    starts = offsets.reshape(len(seqlens), -1)[:, : seqlens.shape[1], None]
    tokens = jnp.arange(length)
    inside = (tokens >= starts) & (tokens < starts + kept[:, :, None])
    numbers = jnp.arange(1, seqlens.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(inside, numbers[:, None], 0), axis=1, initial=0)


def _run_starts(segment_ids):
    """Index of the first token of the run of equal ids that each token is in."""
    length = segment_ids.shape[-1]
    tokens = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segment_ids.shape)
    before = jnp.roll(segment_ids, 1, axis=-1)
    new = (segment_ids != before) | (tokens == 0)
    return jax.lax.cummax(jnp.where(new, tokens, 0), axis=segment_ids.ndim - 1)


def _positions(segment_ids):
    """Position of each token in its run."""
    length = segment_ids.shape[-1]
    return jnp.arange(length, dtype=jnp.int32) - _run_starts(segment_ids)


def _runs(
    ids: jax.Array, places: jax.Array, segments: int, step: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lengths and first tokens of the segments from 1 on; which rows are in order, bool [batch].

    In order: segments ascend, each lies in one piece, and its positions advance by `step`; with
    None they count from 0, with 0 they mean nothing.
    """
    length = ids.shape[1]
    mine = ids[:, None, :] == jnp.arange(1, segments + 1, dtype=ids.dtype)[:, None]
    lengths = jnp.sum(mine, axis=-1, dtype=jnp.int32)
    first = jnp.min(jnp.where(mine, jnp.arange(length, dtype=jnp.int32), length), axis=-1)
    starts = jax.lax.cummin(first, axis=1, reverse=True)  # of what is not there: the next one's
    right = jnp.all(_ids_of_lengths(lengths, starts, length) == ids, axis=-1)
    if step == 0:
        return lengths, starts, right
    if step is None:
        return lengths, starts, right & jnp.all((places == _positions(ids)) | (ids == 0), axis=-1)
    joined = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] != 0)
    advance = places[:, 1:] - places[:, :-1] == step
    return lengths, starts, right & jnp.all(advance | ~joined, axis=-1)


def packed_rows(
    queries: tuple[jax.Array, jax.Array],
    keys: tuple[jax.Array, jax.Array],
    segments: int,
    step: int | None = None,
    seen: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return how the operators of attention find the sequences of rows that lie one behind another.

    Parameters
    ----------
    queries, keys : pair of jax.Array
        Segment ids and positions, int32 [batch, length].
    segments : int
        Segments of a row at most.
    step : int, optional
        By how much positions advance from token to token (0: they mean nothing); by default they
        count from 0.
    seen : bool, default False
        Keys behind the last query of their sequence are left out. What a causal mask lets a query
        see is then aligned with the last query and key, wherever the first ones stand.

    Returns
    -------
    tuple of jax.Array
        Lengths of queries and of keys, int32 [batch segments]; where sequences of queries and of
        keys begin, int32 [batch segments + 1]. Lengths of a row that is not as said are -1, of
        which the operators make an error (CPU) or NaN (CUDA).
    """
    of_queries, of_keys = (_runs(*side, segments, step) for side in (queries, keys))
    ordered = (of_queries[2] & of_keys[2])[:, None]
    lengths = [of_queries[0], of_keys[0]]
    if seen:
        numbers = jnp.arange(1, segments + 1)[:, None]
        ids, places = (each[:, None, :] for each in queries)
        last = jnp.max(jnp.where(ids == numbers, places, -1), axis=-1, initial=-1, keepdims=True)
        ids, places = (each[:, None, :] for each in keys)
        lengths[1] = jnp.sum((ids == numbers) & (places <= last), axis=-1, dtype=jnp.int32)
    offsets = []
    for starts, (ids, _) in ((of_queries[1], queries), (of_keys[1], keys)):
        rows, length = ids.shape
        begin = starts + length * jnp.arange(rows, dtype=jnp.int32)[:, None]
        offsets.append(jnp.append(begin.reshape(-1), jnp.int32(rows * length)))
    return *(jnp.where(ordered, one, -1).reshape(-1) for one in lengths), *offsets


def run_length_fill(segment_ids: jax.Array) -> jax.Array:
    """Return for each token how many tokens its run of equal ids has; 0 for padding.

    Parameters
    ----------
    segment_ids : jax.Array
        int32 [..., length]; 0 is padding.
    """
    starts = _run_starts(segment_ids)
    lengths = jnp.sum(starts[..., :, None] == starts[..., None, :], axis=-1, dtype=jnp.int32)
    return jnp.where(segment_ids == 0, 0, lengths)


def get_seqlens_and_offsets(
    segment_ids: jax.Array, max_segments_per_seq: int
) -> tuple[jax.Array, jax.Array]:
    """Return the lengths of segments, and where they begin.

    Parameters
    ----------
    segment_ids : jax.Array
        int32 [batch, length], segments in ascending order; 0 is padding.
    max_segments_per_seq : int
        Segments of a row at most.

    Returns
    -------
    tuple of jax.Array
        Lengths int32 [batch, max_segments_per_seq], 0 for what is not there; offsets
        [batch, max_segments_per_seq + 1], -1 for what is not there.
    """
    numbers = jnp.arange(1, max_segments_per_seq + 1)
    mine = segment_ids[:, None, :] == numbers[:, None]
    seqlens = jnp.sum(mine, axis=-1, dtype=jnp.int32)
    first = jnp.where(seqlens > 0, jnp.argmax(mine, axis=-1), -1)
    return seqlens, jnp.pad(first.astype(jnp.int32), ((0, 0), (0, 1)), constant_values=-1)


def make_swa_mask(
    segment_pos_q: jax.Array,
    segment_pos_kv: jax.Array,
    window_size: tuple[int, int] | None = None,
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Return the mask of a sliding window: 1 where a query may attend, 0 elsewhere.

    Parameters
    ----------
    segment_pos_q, segment_pos_kv : jax.Array
        Positions [..., queries] and [..., keys].
    window_size : tuple of int, optional
        Keys before and after a query's own position that it sees; -1 and None are all of them.
    dtype : dtype, default float32
        Of the result [..., queries, keys].
    """
    left, right = (-1, -1) if window_size is None else window_size
    distance = segment_pos_kv[..., None, :] - segment_pos_q[..., :, None]
    inside = jnp.ones(distance.shape, bool)
    if left >= 0:
        inside &= distance >= -left
    if right >= 0:
        inside &= distance <= right
    return inside.astype(dtype)


class ReorderStrategy(Enum):
    """How the tokens of a sequence are dealt out, so that causal masks load devices evenly."""

    DualChunkSwap = 0
    """Device i of n has the chunks i and 2n - 1 - i of 2n."""
    Striped = 1
    """Device i of n has every n-th stripe of tokens."""


def order_of(
    strategy: ReorderStrategy, cp_size: int, length: int, stripe_size: int | None
) -> jax.Array:
    """Return the index of the token that stands at each place, int32 [length]; see below."""
    stripe_size = stripe_size or 1
    parts = 2 * cp_size if strategy is ReorderStrategy.DualChunkSwap else cp_size * stripe_size
    if length % parts:
        raise ValueError(f"a sequence of {length} tokens does not divide by {parts}")
    tokens = jnp.arange(length)
    if strategy is ReorderStrategy.Striped:
        return tokens.reshape(-1, cp_size, stripe_size).swapaxes(0, 1).reshape(-1)
    chunks = tokens.reshape(2 * cp_size, -1)
    return jnp.stack([chunks[:cp_size], chunks[: cp_size - 1 : -1]], axis=1).reshape(-1)


def reorder_causal_load_balancing(
    tensor: jax.Array,
    strategy: ReorderStrategy,
    cp_size: int,
    seq_dim: int,
    stripe_size: int | None = None,
) -> jax.Array:
    """Return the tokens in the order in which `cp_size` devices have them.

    Parameters
    ----------
    tensor : jax.Array
        Of any shape; `seq_dim` is the dim of its tokens.
    strategy : ReorderStrategy
        Which device has which tokens.
    cp_size : int
        Number of devices.
    seq_dim : int
        Dim of the tokens.
    stripe_size : int, optional
        Tokens of a stripe; 1 by default.

    Raises
    ------
    ValueError
        The tokens do not divide.
    """
    order = order_of(strategy, cp_size, tensor.shape[seq_dim], stripe_size)
    return jnp.take(tensor, order, axis=seq_dim)


def inverse_reorder_causal_load_balancing(
    tensor: jax.Array,
    strategy: ReorderStrategy,
    cp_size: int,
    seq_dim: int,
    stripe_size: int | None = None,
) -> jax.Array:
    """Undo `reorder_causal_load_balancing`, which has the same parameters and errors."""
    order = order_of(strategy, cp_size, tensor.shape[seq_dim], stripe_size)
    return jnp.take(tensor, jnp.argsort(order), axis=seq_dim)
