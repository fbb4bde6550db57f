# SPDX-License-Identifier: Apache-2.0
"""Arguments of attention: tensors, their formats, options, packed sequences; checks."""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.module.operands import DTYPES
from transformer_engine.pytorch.module.parameters import one_of
from transformer_engine.pytorch.torchside.modes import autocast_dtype, exporting

_NAME = "DotProductAttention"

# ---- arguments as one object ---------------------------------------------------------------------


class AttentionOptions(NamedTuple):
    """Arguments of `MultiheadAttention.forward` after the hidden states, in their order.

    `TransformerLayer`, `MultiheadAttention` and `DotProductAttention` make one in their forwards
    and hand it on through their methods ``attend``; what each field means stands with these
    forwards. Where a submodule has to be called as a module (see `composite.only_forwards`), the
    fields are its positional arguments: ``module(hidden_states, *options)``.
    """

    attention_mask: Any = None
    encoder_output: Tensor | None = None
    attn_mask_type: str | None = None
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    is_first_microbatch: bool | None = None
    checkpoint_core_attention: bool = False
    inference_params: Any = None
    rotary_pos_emb: Any = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias: Tensor | None = None
    alibi_slopes: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    cu_seqlens_q_padded: Tensor | None = None
    cu_seqlens_kv_padded: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    fast_zero_fill: bool = True
    pad_between_seqs: bool | None = None
    thd_attention_policies: Any = None
    thd_attention_policy_dispatch: str = "auto"
    softcap: float | None = None

    def without_tensors(self) -> bool:
        """Return whether a call has nothing but its input, and settings that compare by value."""
        return (
            self.attention_mask is self.encoder_output is self.rotary_pos_emb is None
            and self.core_attention_bias is self.alibi_slopes is self.cu_seqlens_q is None
            and self.cu_seqlens_kv is self.inference_params is self.thd_attention_policies is None
            and type(self.window_size) is not list
        )

    def has_lengths(self) -> bool:
        """Return whether a call says where its sequences end; else all are of full length."""
        return not (self.attention_mask is self.cu_seqlens_q is self.cu_seqlens_kv is None)

    def has_gaps(self) -> bool:
        """Return whether packed sequences may have tokens of none between them."""
        padded = self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded
        return not (padded[0] is padded[1] is self.inference_params is None)

    def for_core(self) -> tuple:
        """Positional arguments of `DotProductAttention.forward` after query, key and value."""
        return (
            self.attention_mask, None, self.cu_seqlens_q, self.cu_seqlens_kv,
            self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded, self.max_seqlen_q,
            self.max_seqlen_kv, self.attn_mask_type, self.window_size, self.bottom_right_diagonal,
            self.softcap, self.checkpoint_core_attention, self.core_attention_bias_type,
            self.core_attention_bias, self.alibi_slopes, self.fast_zero_fill,
            self.inference_params, self.pad_between_seqs,
        )  # fmt: skip

    def named_for_core(self) -> dict[str, Any]:
        """Further arguments of it, by name: those that are not as by default."""
        if self.thd_attention_policies is None:
            return {}
        return {
            "thd_attention_policies": self.thd_attention_policies,
            "thd_attention_policy_dispatch": self.thd_attention_policy_dispatch,
        }


class CoreOptions(NamedTuple):
    """Arguments of `DotProductAttention.forward` that layers do not have."""

    wide_backward: bool = False  # that of attention in FP8 runs in high precision
    fp8_output: bool = False  # attention in FP8 returns its output so
    score_mod: Any = None  # changes the scores, a `scores.ScoreMod`


# ---- queries, keys and values: apart, or several in one tensor -----------------------------------


class Heads(NamedTuple):
    """The tensors that a call is given, and gradients are wanted of.

    They are query, key and value; the query, and keys and values in one; or all three in one.
    """

    tensors: tuple[Tensor, ...]
    dim: int = 0  # -3 or -2: counts what is in one tensor; 0: they are apart

    @property
    def joined(self) -> int:
        """How many of query, key and value one tensor holds: 0, 2 or 3."""
        return 0 if self.dim == 0 else 4 - len(self.tensors)

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, as views."""
        if self.dim == 0:
            return self.tensors
        *query, packed = self.tensors
        return (*query, *packed.unbind(self.dim))

    def in_autocast(self) -> "Heads":
        """The same in the dtype of `torch.autocast`, where that is on."""
        dtype = autocast_dtype(self.tensors[0].device.type)
        if dtype is None:
            return self
        return self._replace(tensors=tuple([tensor.to(dtype) for tensor in self.tensors]))


def given_heads(separate: tuple, qkv: Any = None, kv: Any = None, dim: int = -3) -> Heads:
    """Return the tensors that were given: query, key and value (`separate`), or packed ones.

    Only the query goes beside `kv`, keys and values in one. `qkv` has all three; `dim`, -3 or -2,
    counts them. ValueError for tensors that exclude each other, or a shape or stride that can not
    be.
    """
    if qkv is None and kv is None:
        return Heads(separate)
    query, key, value = separate
    packed, count, label = (qkv, 3, "qkv_layer") if qkv is not None else (kv, 2, "kv_layer")
    if key is not None or value is not None or (qkv is not None) == (query is not None):
        raise ValueError(
            f"{_NAME}: {label} stands for separate tensors: give "
            + ("nothing else" if count == 3 else "query_layer beside it, and nothing else")
        )
    if qkv is not None and kv is not None:
        raise ValueError(f"{_NAME}: qkv_layer and kv_layer exclude each other")
    if dim not in (-3, -2):
        raise ValueError(f"{_NAME}: qkv_interleave_dim={dim}, expected -3 or -2")
    if packed.dim() < 4 or packed.shape[dim] != count:
        raise ValueError(
            f"{_NAME}: {label}: shape {tuple(packed.shape)}, expected {count} in dim {dim}"
        )
    if packed.stride(-1) != 1:
        raise ValueError(f"{_NAME}: {label}: last stride {packed.stride(-1)}, expected 1")
    return Heads((packed,) if count == 3 else (query, packed), dim)


# ---- formats -------------------------------------------------------------------------------------


FORMATS = ("sbhd", "bshd", "thd")
MIXED = ("sbhd_2bshd", "bshd_2sbhd", "thd_2bshd", "thd_2sbhd")
"""The format of the queries and, behind "_2", that of keys and values."""


def check_format(qkv_format: str, mixed: bool = False) -> None:
    """Raise for what is no format, or none of a module's where `mixed` is not set (ValueError)."""
    if qkv_format in FORMATS or (mixed and qkv_format in MIXED):
        return
    expected = "'sbhd', 'bshd' or 'thd'" + (f", or one of {', '.join(MIXED)}" if mixed else "")
    raise ValueError(f"{_NAME}: qkv_format={qkv_format!r}, expected {expected}")


# ---- layouts -------------------------------------------------------------------------------------


def _layouts() -> dict[str, tuple[str, str]]:
    """Formats of the queries and of the keys, by the name of a layout."""
    made = {}
    for form in FORMATS:
        lead = form[:-2]
        for name in (
            f"{lead}3hd", f"{lead}h3d", f"{form}_{lead}2hd", f"{form}_{lead}h2d",
            f"{form}_{form}_{form}",
        ):  # fmt: skip
            made[name] = form, form
    for mixed in MIXED:
        of_queries, of_keys = mixed.split("_2")
        made[f"{of_queries}_{of_keys}_{of_keys}"] = of_queries, of_keys
    for of_queries, of_keys in itertools.product(FORMATS, FORMATS[:2]):
        made[f"paged_kv_{of_queries}_{of_keys}_{of_keys}"] = of_queries, of_keys
    return made


LAYOUTS = _layouts()
"""The fifteen of one format (three in one tensor or two, counted before or behind the heads, or
apart), those of mixed formats, and those of a cache in pages."""


def layout_parts(name: str) -> tuple[str, str]:
    """Formats of the queries and of keys and values in a layout; ValueError for no layout."""
    if name not in LAYOUTS:
        raise ValueError(f"qkv_layout={name!r}, expected one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


# ---- packed sequences ----------------------------------------------------------------------------


def check_cu_seqlens(cumulative: Any, batch: int | None, label: str, prefix: str = "") -> None:
    """Raise for what are no sums of lengths [batch + 1] int32; `batch` is None for any number.

    TypeError for no tensor, ValueError for another dtype or shape; messages have the label.
    """
    if not isinstance(cumulative, Tensor):
        raise TypeError(
            f"{label}={cumulative!r}: {type(cumulative).__name__}, expected a torch.int32 tensor "
            "[batch + 1] on the device of the queries"
        )
    length = max(cumulative.numel(), 1) if batch is None else batch + 1
    if cumulative.dtype is not torch.int32 or tuple(cumulative.shape) != (length,):
        expected = "[batch + 1]" if batch is None else f"[batch + 1] = [{length}]"
        raise ValueError(
            f"{prefix}{label}: {cumulative.dtype} of shape {tuple(cumulative.shape)}, expected "
            f"torch.int32 {expected}"
        )


class Sequences(NamedTuple):
    """The queries, or the keys, of packed sequences."""

    offsets: Tensor  # [batch + 1] int32: the token with which each begins
    lengths: Tensor | None  # [batch] int32; None: each ends where the next one begins
    longest: int  # a bound of the lengths

    def token_counts(self) -> Tensor:
        """Their lengths."""
        return self.offsets[1:] - self.offsets[:-1] if self.lengths is None else self.lengths

    def token_rows(self, tokens: int) -> Tensor:
        """Which token each row of a padded batch is [batch, longest]; `tokens`: none."""
        row = torch.arange(self.longest, device=self.offsets.device)
        is_token = row < self.token_counts()[:, None]
        return torch.where(is_token, (self.offsets[:-1, None] + row).clamp(0, tokens), tokens)

    def valid(self, tokens: int) -> Tensor:
        """Return which lie within their bounds and places among so many tokens, [batch] bool."""
        first, after, lengths = self.offsets[:-1], self.offsets[1:], self.token_counts()
        is_long = (lengths < 0) | (lengths > self.longest)
        return ~(is_long | (first < 0) | (first + lengths > after) | (after > tokens))


def packed_sizes(options: AttentionOptions, queries: int, keys: int) -> tuple[int, int, int]:
    """(sequences, bound of their queries, bound of their keys) of so many tokens of each.

    Bounds that are not given are read from the device, and rounded up to a multiple of 64.
    ValueError for offsets that are missing or have another dtype or shape.
    """
    of_queries, of_keys = _cumulative(options, queries, keys)
    bounds = options.max_seqlen_q, options.max_seqlen_kv
    if of_keys is of_queries and bounds[1] is None:
        bounds = bounds[0], bounds[0]
    most = [
        _longest(cumulative) if bound is None else int(bound)
        for cumulative, bound in zip((of_queries, of_keys), bounds, strict=True)
    ]
    return of_queries.shape[0] - 1, *most


def sequence_starts(options: AttentionOptions) -> tuple[Tensor | None, Tensor | None]:
    """The tokens with which the sequences of queries and of keys begin, as they are given."""
    given = options.cu_seqlens_q, options.cu_seqlens_kv
    padded = options.cu_seqlens_q_padded, options.cu_seqlens_kv_padded
    queries, keys = (b if a is None else a for a, b in zip(padded, given, strict=True))
    return queries, queries if given[1] is None and padded[1] is None else keys


def packed_sequences(
    options: AttentionOptions, sizes: tuple[int, ...], tokens: tuple[int, int]
) -> tuple[Sequences, Sequences]:
    """Queries and keys of a call, of `sizes` (batch, heads, bound of queries, bound of keys)."""
    cumulative = _cumulative(options, *tokens)
    padded = [options.cu_seqlens_q_padded, options.cu_seqlens_kv_padded]
    if cumulative[1] is cumulative[0] and padded[1] is None:
        padded[1] = padded[0]
    queries = _sequences(cumulative[0], padded[0], sizes[2], "q")
    # Lengths that are one object say that queries and keys have one bound, too: see `Limits`.
    if cumulative[1] is cumulative[0] and padded[1] is padded[0] and sizes[2] == sizes[3]:
        return queries, queries
    return queries, _sequences(cumulative[1], padded[1], sizes[3], "kv")


def _cumulative(options: AttentionOptions, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    """The sums of lengths of queries and keys; one object where one stands for both."""
    of_queries, of_keys = options.cu_seqlens_q, options.cu_seqlens_kv
    if of_queries is None:
        raise ValueError(
            f"{_NAME}: cu_seqlens_q: None, with qkv_format='thd', which needs cu_seqlens_q: the "
            "sums of the lengths, torch.int32 [batch + 1]"
        )
    if of_keys is None:
        if queries != keys:
            raise ValueError(
                f"{_NAME}: cu_seqlens_kv: None, with {queries} queries, {keys} keys: give the "
                "lengths of the keys"
            )
        of_keys = of_queries
    check_cu_seqlens(of_queries, None, "cu_seqlens_q", f"{_NAME}: ")
    if of_keys is not of_queries:
        check_cu_seqlens(of_keys, of_queries.shape[0] - 1, "cu_seqlens_kv", f"{_NAME}: ")
    return of_queries, of_keys


def _longest(cumulative: Tensor) -> int:
    if cumulative.shape[0] < 2:
        return 0
    return -(-int((cumulative[1:] - cumulative[:-1]).max()) // 64) * 64


def _sequences(cumulative: Tensor, padded: Tensor | None, longest: int, side: str) -> Sequences:
    if padded is None or padded is cumulative:
        return Sequences(cumulative, None, longest)
    label = f"cu_seqlens_{side}_padded"
    check_cu_seqlens(padded, cumulative.shape[0] - 1, label, f"{_NAME}: ")
    return Sequences(padded, cumulative[1:] - cumulative[:-1], longest)


def to_padded(tensor: Tensor, rows: Tensor) -> Tensor:
    """[tokens, ...] as [batch, longest, ...], 0 in rows of no token; see `token_rows`."""
    return torch.cat((tensor, tensor.new_zeros(1, *tensor.shape[1:])))[rows]


def to_packed(tensor: Tensor, rows: Tensor, tokens: int, fill: float = 0.0) -> Tensor:
    """[batch, longest, ...] as [tokens, ...], `fill` for tokens of no sequence."""
    packed = tensor.new_full((tokens + 1, *tensor.shape[2:]), fill)
    return packed.index_copy(0, rows.flatten(), tensor.flatten(0, 1))[:tokens]


# ---- checks --------------------------------------------------------------------------------------


_SMALLEST_CAP = torch.finfo(torch.float32).tiny
_LARGEST_CAP = torch.finfo(torch.float32).max


def refuse_export(what: str, remedy: str = "leave it out there") -> None:
    """Raise NotImplementedError while a program is exported, which has one graph alone."""
    if exporting():
        raise NotImplementedError(f"{_NAME}: {what} in torch.export: {remedy}")


def check_splits(num_splits: Any) -> None:
    """Raise for what is no number of splits: None, or an integer of at least 0 (ValueError).

    It says how flash-attn's kernels share their work, which changes no result; there are none here.
    """
    if num_splits is None or (isinstance(num_splits, int) and num_splits >= 0):
        return
    raise ValueError(f"{_NAME}: num_splits={num_splits!r}, expected None or an integer from 0 on")


def check_dispatch(dispatch: Any) -> None:
    """Raise for no way to run packed sequences with policies (ValueError), be there some or not."""
    one_of(_NAME, ("auto", "grouped"), thd_attention_policy_dispatch=dispatch)


def check_softcap(softcap: Any) -> float:
    """The bound of the scores as given; ValueError for what is none: 0 switches it off.

    Scores are capped in fp32, which would round a smaller number to 0, and so to no cap.
    """
    is_number = isinstance(softcap, int | float) and not isinstance(softcap, bool)
    if is_number and (softcap == 0.0 or _SMALLEST_CAP <= softcap <= _LARGEST_CAP):
        return float(softcap)
    raise ValueError(
        f"{_NAME}: softcap={softcap!r}, expected a finite number of at least 0, which is none; "
        f"a cap is a normal number of fp32, {_SMALLEST_CAP:.3g} to {_LARGEST_CAP:.3g}"
    )


def check_tensors(
    core: Any, query: Any, key: Any, value: Any, qkv_format: str, options: AttentionOptions
) -> tuple[int, ...]:
    """(batch, heads, queries, keys) of a call of `core`, a `DotProductAttention`.

    TypeError or ValueError for tensors that do not go together.
    """
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        found = tuple(type(t).__name__ for t in (query, key, value))
        raise TypeError(f"{_NAME}: query, key, value are {found}, expected three tensors")
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    packed = qkv_format == "thd"
    s, b = (0, 1) if qkv_format == "sbhd" else (1, 0)
    heads, groups = core.num_attention_heads, core.num_gqa_groups
    k, v = core.hidden_size_per_attention_head_k, core.hidden_size_per_attention_head_v
    matches = len(of_query) == len(of_key) == 4 - packed
    if matches:
        lead = of_key[:-2]
        matches = (
            (of_query[-2], of_query[-1]) == (heads, k)
            and (packed or lead[b] == of_query[b])
            and of_key == (*lead, groups, k)
            and of_value == (*lead, groups, v)
        )
    if not matches:
        raise ValueError(
            f"{_NAME}: query {tuple(of_query)}, key {tuple(of_key)}, value {tuple(of_value)}: "
            f"expected {qkv_format} with {heads} heads of {k}, {groups} of {k} and {groups} of "
            f"{v}, one batch size and one length of keys and values"
        )
    dtype = query.dtype
    if key.dtype is not dtype or value.dtype is not dtype or dtype not in DTYPES:
        raise TypeError(
            f"{_NAME}: query is {dtype}, key {key.dtype}, value {value.dtype}: expected one of "
            "torch.float32, torch.float16 and torch.bfloat16 for all"
        )
    device = query.device
    if key.device != device or value.device != device:
        raise ValueError(
            f"{_NAME}: query is on {device}, key on {key.device}, value on {value.device}: "
            "expected one device"
        )
    if packed:
        batch, queries, keys = packed_sizes(options, of_query[0], of_key[0])
        return batch, heads, queries, keys
    return of_query[b], heads, of_query[s], of_key[s]
