# SPDX-License-Identifier: Apache-2.0
"""`InferenceParams`: keys and values that sequences keep while a model generates.

Sequences come, get tokens at each step, and go. The host knows which there are and how long they
are; the layers read all of it from the device (`Lengths`), in tensors that stay where they are, so
a captured step serves every later one.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.attention.kv_cache import (
    KVCacheManager,
    Lengths,
    LibraryCacheManager,
    NonPagedKVCacheManager,
    Page,
    PagedKVCacheManager,
    StepState,
    gather_tokens,
)
from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.module.operands import DTYPES
from transformer_engine.pytorch.module.parameters import one_of, positive_sizes
from transformer_engine.pytorch.torchside.device import canonicalize_device, is_capturing

__getattr__, __dir__ = absent.attach(globals())
__all__ = [
    "InferenceParams",
    "KVCacheManager",
    "NonPagedKVCacheManager",
    "Page",
    "PagedKVCacheManager",
    *absent.names_of(__name__),
]

_NAME = "InferenceParams"


class InferenceParams:
    """Caches of keys and values for generation, and the sequences in them.

    For each step a program says which sequences get how many tokens (`pre_step`), and calls its
    model with ``inference_params=``, any mask type but "arbitrary", and the tokens of these
    sequences in that order: as rows of a batch, padded behind (sbhd, bshd), or packed (thd). Layers
    need a ``layer_number``; the caches of each are made at its first call. Rotary positions go on
    where each sequence has ended, so ``rotary_pos_emb`` has the angles of all positions. No
    gradients pass a cache: call the model inside of `torch.no_grad`.

    Parameters
    ----------
    max_batch_size : int
        Sequences at a time.
    max_sequence_length : int
        Tokens of a sequence, those of its prompt among them.
    num_heads_kv : int
        Heads of keys and values.
    head_dim_k : int
        Channels of a head of the keys.
    dtype : torch.dtype
        Of keys and values: fp32, fp16 or bf16.
    head_dim_v : int, optional
        Channels of a head of the values; as of the keys where None.
    is_paged : bool, default False
        Keys and values lie in pages, which sequences take as they grow.
    total_num_pages : int, optional
        How many there are; enough for all sequences of full length where None.
    page_size : int, optional
        Tokens of a page, which divide `max_sequence_length`; needed where paged.
    max_ctx_len : int, optional
        Tokens that a sequence gets at a step, at most; needed for "thd".
    qkv_format : str, default "bshd"
        Accepted for its callers: each call says its own.
    custom_cache_manager : type, optional
        A class like `KVCacheManager`, made with the arguments of `NonPagedKVCacheManager` or
        `PagedKVCacheManager` but for the device, by name.
    device : torch.device or str, optional
        Where the model is; the current CUDA device where there is one, else the CPU.

    Attributes
    ----------
    sequences : OrderedDict
        Lengths by id, the tokens of the current step among them, in the order of the batch.
    sequences_pre_step : OrderedDict
        The same before the step.
    cu_seqlens_q, cu_seqlens_kv : Tensor
        [max_batch_size + 1] int32 sums of the lengths of what is new, and of all; behind the last
        sequence its value is repeated.
    cache_manager : KVCacheManager
        Where keys and values lie.

    Raises
    ------
    ValueError, TypeError
        Sizes or arguments that do not go together.
    """

    def __init__(
        self,
        max_batch_size: int,
        max_sequence_length: int,
        num_heads_kv: int | None = None,
        head_dim_k: int | None = None,
        dtype: torch.dtype | None = None,
        head_dim_v: int | None = None,
        is_paged: bool = False,
        total_num_pages: int | None = None,
        page_size: int | None = None,
        max_ctx_len: int | None = None,
        qkv_format: str = "bshd",
        custom_cache_manager: type | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"max_batch_size": max_batch_size, "max_sequence_length": max_sequence_length}
        needed = {"num_heads_kv": num_heads_kv, "head_dim_k": head_dim_k}
        for name, value in {**needed, "dtype": dtype}.items():
            if value is None:
                raise ValueError(f"{_NAME}: {name} is needed")
        head_dim_v = head_dim_k if head_dim_v is None else head_dim_v
        positive_sizes(_NAME, **sizes, **needed, head_dim_v=head_dim_v)
        one_of(_NAME, DTYPES, dtype=dtype)
        one_of(_NAME, ("sbhd", "bshd", "thd"), qkv_format=qkv_format)
        if qkv_format == "thd" and max_ctx_len is None:
            raise ValueError(f"{_NAME}: qkv_format='thd' needs max_ctx_len")
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.head_dim_v = num_heads_kv, head_dim_k, head_dim_v
        self.dtype, self.is_paged, self.max_ctx_len = dtype, bool(is_paged), max_ctx_len
        self.qkv_format, self.device = qkv_format, canonicalize_device(device)
        self.page_size, self.total_num_pages = page_size, total_num_pages
        given = {
            "max_batch_size": max_batch_size, "max_seqlen": max_sequence_length,
            "num_heads": num_heads_kv, "head_dim_k": head_dim_k, "head_dim_v": head_dim_v,
            "dtype": dtype,
        }  # fmt: skip
        if self.is_paged:
            given |= self._pages()
        made = PagedKVCacheManager if self.is_paged else NonPagedKVCacheManager
        if custom_cache_manager is None:
            self.cache_manager: KVCacheManager = made(**given, device=self.device)
        else:
            self.cache_manager = custom_cache_manager(**given)
        self._state = StepState(max_batch_size, max_sequence_length, self.device)
        self.cu_seqlens_q, self.cu_seqlens_kv = self._state.whole[3:]
        self.sequences: OrderedDict[Any, int] = OrderedDict()
        self.sequences_pre_step: OrderedDict[Any, int] = OrderedDict()
        self._longest_new = 1
        self._new = 0, 0  # tokens of the step: of the sequence that gets most, and of all
        self._some_are_full = False  # and get none: what pads them is behind all positions
        self._offsets: dict[tuple[int, int], Tensor] = {}
        self._ahead = False  # the host does not know the lengths: a step is being captured
        self._captured = False  # there are such steps, whose replays the host does not see
        self._table: Tensor | None = None  # of the pages, as the last step gave it

    def _pages(self) -> dict[str, int]:
        if self.page_size is None:
            raise ValueError(f"{_NAME}: is_paged=True needs page_size")
        positive_sizes(_NAME, page_size=self.page_size)
        if self.max_sequence_length % self.page_size != 0:
            raise ValueError(
                f"{_NAME}: max_sequence_length={self.max_sequence_length} is no multiple of "
                f"page_size={self.page_size}"
            )
        if self.total_num_pages is None:
            each = self.max_sequence_length // self.page_size
            self.total_num_pages = self.max_batch_size * each
        positive_sizes(_NAME, total_num_pages=self.total_num_pages)
        return {"total_num_pages": self.total_num_pages, "page_size": self.page_size}

    def __repr__(self) -> str:
        return (
            f"{_NAME}({len(self.sequences)} of {self.max_batch_size} sequences, "
            f"max_sequence_length={self.max_sequence_length}, num_heads_kv={self.num_heads_kv}, "
            f"head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v}, dtype={self.dtype}, "
            f"is_paged={self.is_paged}, device={self.device})"
        )

    @property
    def batch_size(self) -> int:
        """How many sequences get tokens in the current step."""
        return len(self.sequences)

    @property
    def max_seqlen_kv(self) -> int:
        """A bound of the lengths."""
        return self.max_sequence_length

    @property
    def max_seqlen_q(self) -> int:
        """A bound of what sequences get in the current step: 1, or a multiple of 64."""
        return self._longest_new

    @property
    def lengths(self) -> Lengths:
        """Of the sequences of the current step, on the device."""
        return self._state.now

    # ---- steps -------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all sequences; the memory stays."""
        self.sequences, self.sequences_pre_step = OrderedDict(), OrderedDict()
        self.cache_manager.reset()
        self._state.write([], [])
        self._ahead = False

    def allocate_memory(self, layer_number: int) -> None:
        """Make the cache of a layer; its first call does so otherwise."""
        self.cache_manager.allocate_memory(layer_number)

    def pre_step(self, step_dict: OrderedDict) -> None:
        """Say which sequences get how many tokens in the step that begins.

        Ids that were not there before are new sequences; those that are left out have finished, and
        their memory is free. The batch has the order of `step_dict`.

        Inside of a captured graph all sequences go on with as many tokens each: every replay adds
        them on the device, and the host looks there when it next has to know.

        Parameters
        ----------
        step_dict : OrderedDict
            Number of new tokens by id.

        Raises
        ------
        ValueError
            Too many sequences, or one that gets too long.
        RuntimeError
            There are not enough pages, or what a captured step can not do.
        """
        if is_capturing(self.device):
            self._advance(step_dict)
            return
        self._catch_up()
        if len(step_dict) > self.max_batch_size:
            raise ValueError(
                f"{_NAME}: {len(step_dict)} sequences, max_batch_size={self.max_batch_size}: let "
                "sequences finish first, or make it with a larger max_batch_size"
            )
        manager = self.cache_manager  # a program may have taken a sequence out of ours
        known = manager.sequences if isinstance(manager, LibraryCacheManager) else self.sequences
        before = [known.get(id_, 0) for id_ in step_dict]
        for (id_, count), start in zip(step_dict.items(), before, strict=True):
            if not isinstance(count, int) or count < 0:
                raise ValueError(
                    f"{_NAME}: sequence {id_!r} gets {count!r} tokens, expected an int from 0 on"
                )
            if start + count > self.max_sequence_length:
                raise ValueError(
                    f"{_NAME}: sequence {id_!r} has {start} tokens and gets {count}, "
                    f"max_sequence_length={self.max_sequence_length}"
                )
        self.sequences = OrderedDict(self.cache_manager.pre_step(step_dict))
        self.sequences_pre_step = OrderedDict(zip(step_dict, before, strict=True))
        self._some_are_full = self.max_sequence_length in before
        self._set_new(list(step_dict.values()))
        self._state.write(before, list(step_dict.values()))
        if isinstance(self.cache_manager, LibraryCacheManager):
            self.cache_manager.lengths = self._state.now

    def _advance(self, step_dict: OrderedDict) -> None:
        """`pre_step` inside of a captured graph."""
        counts = set(step_dict.values())
        if list(step_dict) != list(self.sequences) or len(counts) > 1:
            raise RuntimeError(
                f"{_NAME}: in a captured step the sequences are those of the step before, "
                f"{list(self.sequences)}, each with the same number of tokens; got "
                f"{dict(step_dict)}"
            )
        if self.is_paged and not self._is_reserved():
            raise RuntimeError(
                f"{_NAME}: a captured step can not take pages: call reserve() before the capture"
            )
        self._set_new(list(step_dict.values()))
        self._state.advance(counts.pop() if counts else 0)
        self._ahead = self._captured = True

    def _set_new(self, counts: list[int]) -> None:
        """Take in how many tokens the sequences of a step get."""
        longest = max([*counts, 0])
        # 1 where that is enough, else a multiple of 64: few bounds come up, and each has a plan.
        self._longest_new = 1 if longest <= 1 else -(-longest // 64) * 64
        self._new = longest, sum(counts)

    def reserve(self, tokens: int | None = None) -> None:
        """Take the pages now that all sequences need for so many tokens in all.

        `max_sequence_length` where None. Does nothing for a cache without pages. RuntimeError
        where there are not enough.
        """
        if self.is_paged and isinstance(self.cache_manager, PagedKVCacheManager):
            tokens = self.max_sequence_length if tokens is None else tokens
            self.cache_manager.reserve(min(tokens, self.max_sequence_length))

    def _is_reserved(self) -> bool:
        manager = self.cache_manager
        if not isinstance(manager, PagedKVCacheManager):
            return False
        return all(len(pages) == manager.max_pages_per_seq for pages in manager._pages.values())

    def _catch_up(self) -> None:
        """Learn from the device what replays of captured steps have added."""
        self._ahead = False
        if not self._captured:  # else any number of replays may have come since the last look
            return
        starts, counts, *_ = self._state.now
        after = [s + c for s, c in zip(starts.tolist(), counts.tolist(), strict=True)]
        manager = self.cache_manager
        for id_, length in zip(self.sequences, after, strict=True):
            what = f"{_NAME}: replays of a captured step gave sequence {id_!r} {length} tokens"
            if length > self.max_sequence_length:
                raise RuntimeError(
                    f"{what}, max_sequence_length={self.max_sequence_length}: their results are NaN"
                )
            if isinstance(manager, PagedKVCacheManager) and length > manager.capacity_of(id_):
                raise RuntimeError(
                    f"{what}, which has pages for {manager.capacity_of(id_)}: their results are "
                    "wrong: call reserve() before replays, also after new sequences have begun"
                )
        self.sequences = OrderedDict(zip(self.sequences, after, strict=True))
        self.cache_manager.sequences = OrderedDict(self.sequences)

    def step(
        self, layer_number: int, new_k: Tensor, new_v: Tensor, qkv_format: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, str]:
        """Put the keys and values of a layer's new tokens into its cache.

        `DotProductAttention` does it for the layers.

        Parameters
        ----------
        layer_number : int
            Of the layer.
        new_k, new_v : Tensor
            [s, b, heads, channels] (sbhd), [b, s, heads, channels] (bshd) or [t, heads, channels]
            (thd) of the sequences of the step.
        qkv_format : str
            "sbhd", "bshd" or "thd".

        Returns
        -------
        tuple
            Keys and values in the cache ([batch, max_sequence_length, heads, channels], or with
            pages [total_num_pages, page_size, heads, channels]), `cu_seqlens_q` and
            `cu_seqlens_kv` [batch + 1], the bound of the lengths, and "bshd", "sbhd_2bshd" or
            "thd_2bshd": formats of the queries and of the cache.
        """
        if layer_number not in self.cache_manager.cache:
            self.allocate_memory(layer_number)
        self._check_new(new_k, qkv_format)
        _, _, _, of_new, of_all = self._state.now
        given = layer_number, new_k, new_v, of_new, of_all, qkv_format
        key, value, self._table = self.cache_manager.step(*given)
        if not self.is_paged:
            key, value = key[: self.batch_size], value[: self.batch_size]
        both = qkv_format if qkv_format == "bshd" else f"{qkv_format}_2bshd"
        return key, value, of_new, of_all, self.max_sequence_length, both

    def _check_new(self, new_k: Tensor, qkv_format: str) -> None:
        """Raise for fewer tokens than sequences get (ValueError)."""
        packed = qkv_format == "thd"
        given, needed = new_k.shape[1 if qkv_format == "bshd" else 0], self._new[packed]
        if given < needed:
            whose = "in all" if packed else "of each sequence"
            raise ValueError(
                f"{_NAME}: {given} tokens {whose}, but pre_step() announced {needed}: pass the "
                "tokens that pre_step() names"
            )

    def max_positions(self, length: int) -> int:
        """How many positions a batch of rows of so many tokens takes at most, with its padding."""
        return self.max_sequence_length + length - (0 if self._some_are_full else 1)

    def offsets(self, longest: int) -> Tensor:
        """First token of each sequence, [batch + 1] int32, in rows of so many tokens each."""
        key = self.batch_size, longest
        if key not in self._offsets:
            rows = torch.arange(key[0] + 1, dtype=torch.int32, device=self.device)
            self._offsets[key] = rows * longest
        return self._offsets[key]

    def get_seqlens_pre_step(self) -> Tensor:
        """How many tokens each sequence had before the step, [batch] int32."""
        return self._state.now.starts

    def convert_paged_to_nonpaged(self, layer_number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer as [batch, max_sequence_length, heads, channels]: copies.

        Zeros stand behind the tokens of a sequence.
        """
        caches = self.cache_manager.cache[layer_number]
        return self.gather(*caches, self.max_sequence_length)

    def gather(
        self, key: Tensor, value: Tensor, tokens: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values in pages as [batch, tokens, heads, channels]; None: of the longest.

        That is the longest now, rounded up to a power of two of pages, so that few sizes come up.
        Where the host does not know the lengths it is `max_sequence_length`.
        """
        if tokens is None:
            tokens = self.max_sequence_length
            if not self._ahead:
                longest = max([1, *self.sequences.values()])
                pages = 1 << (-(-longest // self.page_size) - 1).bit_length()
                tokens = min(tokens, pages * self.page_size)
        totals = self._state.now.totals
        table = getattr(self.cache_manager, "page_table", self._table)
        if table is not None:
            table = table[: totals.shape[0]]
        traced = plan_ops.behind_operators(key)
        return gather_tokens(traced, key, value, totals, table, tokens)
