# SPDX-License-Identifier: Apache-2.0
"""Where the keys and values of sequences lie while a model generates, and how long these are."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.execution.custom_ops import operator
from transformer_engine.pytorch.torchside.device import canonicalize_device
from transformer_engine.pytorch.torchside.modes import dispatch_modes, real_tensors

# ---- operators -----------------------------------------------------------------------------------


def _append(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    starts: Tensor,
    counts: Tensor,
    cu_seqlens: Tensor | None,
    page_table: Tensor | None,
) -> None:
    key = key if key.stride(-1) == 1 else key.contiguous()
    value = value if value.stride(-1) == 1 else value.contiguous()
    _cache_append(
        key, value, key_cache, value_cache, starts,
        counts=counts, cu_seqlens=cu_seqlens, page_table=page_table,
    )  # fmt: skip


_cache_append = _core.obeying("cache_append")
_traced_append = plan_ops.define_obeying(
    "cache_append",
    "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor starts, "
    "Tensor counts, Tensor? cu_seqlens, Tensor? page_table",
    "",
    _append,
    lambda *_: None,
)


def append_tokens(*arguments: Tensor | None) -> None:
    """Put keys and values of new tokens into a cache: arguments of the operator cache_append."""
    if plan_ops.behind_operators(arguments[0]) or (dispatch_modes() and plan_ops.watched()):
        _traced_append(*arguments)
    else:
        _append(*arguments)


gather_tokens = operator(
    "cache_gather",
    "Tensor key_cache, Tensor value_cache, Tensor lengths, Tensor? page_table, SymInt tokens",
    "key value",
    lambda key, value, lengths, _, tokens: tuple(
        cache.new_empty(lengths.shape[0], tokens, *cache.shape[2:]) for cache in (key, value)
    ),
)
"""The keys and values of the first `tokens` tokens of each sequence, in a row."""


# ---- lengths -------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """How long the sequences of a step are: int32 on the device, for layers to read."""

    starts: Tensor  # [batch]: tokens that each had before
    counts: Tensor  # [batch]: tokens that it gets
    totals: Tensor  # [batch]: both together
    cu_seqlens_q: Tensor  # [batch + 1]: sums of `counts`
    cu_seqlens_kv: Tensor  # [batch + 1]: sums of `totals`


_ROWS = len(Lengths._fields)


class StepState:
    """The lengths of a step, in one tensor that stays where it is."""

    def __init__(self, max_batch_size: int, longest: int, device: torch.device) -> None:
        with real_tensors():
            self.memory = torch.zeros(_ROWS, max_batch_size + 1, dtype=torch.int32, device=device)
        self.whole = Lengths(*(row[:-1] for row in self.memory[:3]), *self.memory[3:])
        self.now = self.whole
        self.longest = longest

    def write(self, starts: list[int], counts: list[int]) -> None:
        """Take the lengths of a step from the host, in one copy."""
        batch, width = len(starts), self.memory.shape[1]
        totals = [start + count for start, count in zip(starts, counts, strict=True)]
        rows = (starts, counts, totals)
        padded = [[*row, *([0] * (width - batch))] for row in rows]
        summed = [list(accumulate(row[:-1], initial=0)) for row in padded[1:]]
        self.memory.copy_(torch.tensor([*padded, *summed], dtype=torch.int32), non_blocking=True)
        self.now = Lengths(
            *(row[:batch] for row in self.whole[:3]), *(row[: batch + 1] for row in self.whole[3:])
        )

    def advance(self, count: int) -> None:
        """Let all sequences get so many tokens more, on the device: for a step that is captured.

        What has no room spoils the cache there (see the operator), and lengths stop at the end.
        """
        starts, counts, totals, *_ = self.now
        starts.add_(counts)
        counts.fill_(count)
        torch.add(starts, counts, out=totals)
        totals.clamp_(max=self.longest)
        whole = self.whole  # with no tokens behind the sequences: the tail of the sums repeats
        torch.cumsum(whole.counts, 0, dtype=torch.int32, out=whole.cu_seqlens_q[1:])
        torch.cumsum(whole.totals, 0, dtype=torch.int32, out=whole.cu_seqlens_kv[1:])


# ---- where keys and values lie -------------------------------------------------------------------


class KVCacheManager:
    """Base of what keeps keys and values of sequences; a program may bring its own.

    Attributes
    ----------
    cache : dict
        By layer number its keys and its values, two tensors.
    sequences : OrderedDict
        Length of each sequence in the cache, by its id, in the order of the batch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.sequences: OrderedDict[Any, int] = OrderedDict()

    def reset(self) -> None:
        """Forget all sequences."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer."""
        raise NotImplementedError

    def pre_step(self, step_dict: OrderedDict) -> OrderedDict:
        """Take in which sequences get how many tokens; return the lengths afterwards."""
        raise NotImplementedError

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Put new keys and values into the cache of a layer; return it, and the table of pages.

        `cu_new_seqlens` and `cu_cached_seqlens` are [batch + 1] int32 sums of the lengths of what
        is new, and of all.
        """
        raise NotImplementedError


class LibraryCacheManager(KVCacheManager):
    """Base of both kinds of this library."""

    def __init__(
        self,
        shape: tuple[int, int],
        num_heads: int,
        head_dim_k: int,
        head_dim_v: int | None,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        channels = head_dim_k, head_dim_k if head_dim_v is None else head_dim_v
        self._shapes = tuple((*shape, num_heads, n) for n in channels)
        self.dtype, self.device = dtype, canonicalize_device(device)
        self.lengths: Lengths | None = None  # of the step, where the owner has them
        self.page_table: Tensor | None = None

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer: zeros, for what no sequence has written is read by some."""
        with real_tensors():
            kind = {"dtype": self.dtype, "device": self.device}
            key, value = (torch.zeros(shape, **kind) for shape in self._shapes)
        self.cache[layer_number] = key, value

    def step(
        self,
        layer_number: int,
        new_k: Tensor,
        new_v: Tensor,
        cu_new_seqlens: Tensor,
        cu_cached_seqlens: Tensor,
        qkv_format: str,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Put new keys and values into the cache of a layer; see `KVCacheManager`."""
        caches, packed = self.cache[layer_number], qkv_format == "thd"
        if qkv_format == "sbhd":
            new_k, new_v = new_k.transpose(0, 1), new_v.transpose(0, 1)
        lengths = self.lengths
        if lengths is None:
            counts, totals = cu_new_seqlens.diff(), cu_cached_seqlens.diff()
            starts = totals - counts
        else:
            starts, counts = lengths[:2]
        table = self.page_table
        if table is not None:
            table = table[: starts.shape[0]]
        given = starts, counts, cu_new_seqlens if packed else None, table
        append_tokens(new_k, new_v, *caches, *given)
        return *caches, table


class NonPagedKVCacheManager(LibraryCacheManager):
    """A row of a tensor [max_batch_size, max_seqlen, heads, channels] for each sequence.

    Sequences that stay while others go move up, so that they are the first rows.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_seqlen: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        head_dim_v: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        shape = max_batch_size, max_seqlen
        super().__init__(shape, num_heads, head_dim_k, head_dim_v, dtype, device)
        self._used = 0  # rows that some sequence has had

    def pre_step(self, step_dict: OrderedDict) -> OrderedDict:
        """Bring the rows of the sequences into the order of `step_dict`, empty those of new ones.

        What a sequence that is gone has left is never read as such, but a NaN of it would not mask.
        """
        rows = {id_: row for row, id_ in enumerate(self.sequences)}
        moved = [(row, rows[id_]) for row, id_ in enumerate(step_dict) if rows.get(id_, row) != row]
        fresh = [row for row, id_ in enumerate(step_dict) if id_ not in rows and row < self._used]
        if moved:
            to, origin = torch.tensor(moved, device=self.device).unbind(1)
            for cache in self._tensors():
                cache.index_copy_(0, to, cache.index_select(0, origin))
        if fresh:
            empty = torch.tensor(fresh, device=self.device)
            for cache in self._tensors():
                cache.index_fill_(0, empty, 0.0)
        self._used = max(self._used, len(step_dict))
        self.sequences = _lengths_after(self.sequences, step_dict)
        return self.sequences

    def _tensors(self) -> list[Tensor]:
        return [tensor for pair in self.cache.values() for tensor in pair]


class Page:
    """A page of a cache: its number, and whether a sequence has it."""

    def __init__(self, page_id: int) -> None:
        self.page_id, self.allocated = page_id, False

    def __repr__(self) -> str:
        return f"Page({self.page_id}, allocated={self.allocated})"

    def allocate_page(self) -> None:
        """Let a sequence have it; RuntimeError where one does."""
        if self.allocated:
            raise RuntimeError(f"{self} belongs to a sequence already: deallocate it first")
        self.allocated = True

    def deallocate_page(self) -> None:
        """Let no sequence have it."""
        self.allocated = False


class PagedKVCacheManager(LibraryCacheManager):
    """Pages [total_num_pages, page_size, heads, channels], which sequences take as they grow.

    ``page_table`` [max_batch_size, pages of the longest sequence] int32 has the pages of each; -1:
    none, or none yet, so that a row without a sequence names nobody's pages. Pages are given out in
    the order in which they became free.

    ValueError for a `max_seqlen` that is no multiple of `page_size`.
    """

    def __init__(
        self,
        total_num_pages: int,
        page_size: int,
        num_heads: int,
        head_dim_k: int,
        dtype: torch.dtype,
        max_batch_size: int,
        max_seqlen: int,
        head_dim_v: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        shape = total_num_pages, page_size
        super().__init__(shape, num_heads, head_dim_k, head_dim_v, dtype, device)
        if max_seqlen % page_size != 0:
            raise ValueError(
                f"PagedKVCacheManager: max_seqlen={max_seqlen} is no multiple of "
                f"page_size={page_size}"
            )
        self.page_size, self.total_num_pages = page_size, total_num_pages
        self.max_pages_per_seq = max_seqlen // page_size
        self._free = deque(map(Page, range(total_num_pages)))
        self._pages: dict[Any, list[Page]] = {}  # of each sequence
        with real_tensors():
            table = torch.full((max_batch_size, self.max_pages_per_seq), -1, dtype=torch.int32)
            self.page_table: Tensor = table.to(self.device)

    def reset(self) -> None:
        """Forget all sequences; their pages are free."""
        super().reset()
        for pages in self._pages.values():
            self._take_back(pages)
        self._pages = {}
        self._write_table()

    def pre_step(self, step_dict: OrderedDict) -> OrderedDict:
        """Take the pages back of sequences that are gone, and give what the others need.

        RuntimeError where there are not enough, ValueError for more or longer sequences than the
        table has room for; then nothing has changed.
        """
        after = _lengths_after(self.sequences, step_dict)
        self._assign_pages(after)
        self.sequences = after
        return after

    def reserve(self, tokens: int) -> None:
        """Give each sequence the pages of so many tokens in all (RuntimeError: there are none)."""
        self._assign_pages(OrderedDict((id_, max(n, tokens)) for id_, n in self.sequences.items()))

    def capacity_of(self, id_: Any) -> int:
        """How many tokens a sequence has pages for."""
        return len(self._pages[id_]) * self.page_size

    def allocate_page(self, seq: Any) -> Page:
        """Give a sequence one page more than it has; it may be one that has none yet.

        Pages are what a step finds, as after `reserve`: tokens come by `pre_step`, which takes the
        pages of sequences back that it does not name. RuntimeError where no page is free, and
        ValueError where the sequence, or the batch, is as long as it gets.
        """
        self._add_pages(seq, 1)
        return self._pages[seq][-1]

    def allocate_sequence(self, seq: Any, context_len: int) -> None:
        """Give a sequence without pages those of so many tokens; see `allocate_page`.

        ValueError where it has some, and for what is no number of tokens.
        """
        if not isinstance(context_len, int) or context_len < 0:
            raise ValueError(
                f"PagedKVCacheManager: context_len = {context_len!r}, expected a number of tokens"
            )
        if self._pages.get(seq):
            raise ValueError(f"PagedKVCacheManager: sequence {seq!r} has pages already")
        self._add_pages(seq, self._pages_of(context_len))

    def deallocate_sequence(self, seq: Any) -> None:
        """Forget a sequence and take its pages back; KeyError for one that there is not."""
        self._take_back(self._pages.pop(seq))
        self.sequences.pop(seq, None)
        self._write_table()

    # ---- questions ---------------------------------------------------------------------------

    def get_sequence_count(self) -> int:
        """How many sequences there are."""
        return len(self.sequences)

    def get_sequence_lengths(self) -> list[int]:
        """Their tokens, in the order of the batch."""
        return list(self.sequences.values())

    def has_free_page(self) -> bool:
        """Return whether some page is no sequence's."""
        return bool(self._free)

    def get_page_count(self, seq: Any) -> int:
        """How many pages a sequence has; KeyError for an id that there is not."""
        return len(self._pages[seq])

    def get_page_list(self, seq: Any) -> list[int]:
        """Numbers of a sequence's pages, in the order of its tokens; KeyError as above."""
        return [page.page_id for page in self._pages[seq]]

    def get_page_table(self, sequences: Iterable[Any]) -> Tensor:
        """The pages of sequences, [how many, pages of the longest one] int32; -1: none yet.

        `sequences` are ids; KeyError as above.
        """
        rows = [self._row(self._pages[id_]) for id_ in sequences]
        made = torch.tensor(rows, dtype=torch.int32, device=self.device)
        return made.reshape(-1, self.max_pages_per_seq)

    def print_cache(self) -> None:
        """Print the sequences with their lengths and pages, and how many pages are free."""
        print(f"PagedKVCacheManager: {len(self._free)} of {self.total_num_pages} pages are free")
        for id_, length in self.sequences.items():
            print(f"  sequence {id_!r}: {length} tokens in pages {self.get_page_list(id_)}")

    # ---- pages -------------------------------------------------------------------------------

    def _row(self, pages: list[Page]) -> list[int]:
        numbers = [page.page_id for page in pages]
        return [*numbers, *([-1] * (self.max_pages_per_seq - len(pages)))]

    def _write_table(self) -> None:
        # Rows without a sequence too: replays of a captured step, and layers that are called too
        # early, go by the table.
        rows = [self._row(pages) for pages in self._pages.values()]
        if rows:
            self.page_table[: len(rows)].copy_(torch.tensor(rows, dtype=torch.int32))
        self.page_table[len(rows) :].fill_(-1)

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _take_free(self, count: int) -> list[Page]:
        """Take so many free pages for a sequence."""
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            page.allocate_page()
        return pages

    def _take_back(self, pages: Iterable[Page]) -> None:
        for page in pages:
            page.deallocate_page()
            self._free.append(page)

    def _check_free(self, wanted: int, free: int) -> None:
        if wanted > free:
            raise RuntimeError(
                f"InferenceParams: {wanted} pages are needed and {free} of "
                f"{self.total_num_pages} are free: let sequences finish first, or give "
                "total_num_pages"
            )

    def _add_pages(self, seq: Any, count: int) -> None:
        rows, has = self.page_table.shape[0], self._pages.get(seq, [])
        if seq not in self._pages and len(self._pages) == rows:
            raise ValueError(
                f"PagedKVCacheManager: {rows} sequences have pages, as many as max_batch_size "
                "allows: deallocate one first"
            )
        if not 0 <= count <= self.max_pages_per_seq - len(has):
            raise ValueError(
                f"PagedKVCacheManager: sequence {seq!r} has {len(has)} pages and gets {count}: "
                f"max_seqlen allows {self.max_pages_per_seq}"
            )
        self._check_free(count, len(self._free))
        self._pages[seq] = [*has, *self._take_free(count)]
        self._write_table()

    def _assign_pages(self, lengths: OrderedDict) -> None:
        """Let sequences of these lengths, and no others, have pages."""
        each = {id_: self._pages_of(n) for id_, n in lengths.items()}
        rows = self.page_table.shape[0]
        if len(each) > rows:
            raise ValueError(f"PagedKVCacheManager: {len(each)} sequences, max_batch_size={rows}")
        for id_, count in each.items():
            if count > self.max_pages_per_seq:
                raise ValueError(
                    f"PagedKVCacheManager: sequence {id_!r} would have {lengths[id_]} tokens, "
                    f"max_seqlen={self.max_pages_per_seq * self.page_size}"
                )
        freed = [page for id_, pages in self._pages.items() if id_ not in each for page in pages]
        missing = {id_: n - len(self._pages.get(id_, ())) for id_, n in each.items()}
        wanted = sum(n for n in missing.values() if n > 0)
        self._check_free(wanted, len(self._free) + len(freed))
        self._take_back(freed)
        held = {id_: [*self._pages.get(id_, ()), *self._take_free(missing[id_])] for id_ in each}
        changed = wanted > 0 or list(held) != list(self._pages)
        self._pages = held
        if changed:
            self._write_table()


def _lengths_after(sequences: OrderedDict, step_dict: OrderedDict) -> OrderedDict:
    return OrderedDict((id_, sequences.get(id_, 0) + n) for id_, n in step_dict.items())
