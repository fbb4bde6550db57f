# SPDX-License-Identifier: Apache-2.0
"""Calls that run as plain ones: a mixed format, a cache of keys and values, policies of sequences.

A call in a mixed format ("thd_2bshd") becomes one in the format of its queries. One to a cache
(`InferenceParams`) becomes one to all keys that are there. Packed sequences with mask types and
windows of their own (policies) become several calls, each of which reads all tensors where they
lie: there the sequences of the other policies have no tokens, so their tokens are those of gaps;
nothing reads them, their outputs and gradients are 0, and the outputs of all calls add up. No host
has to know any length for it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import masks
from transformer_engine.pytorch.attention.masks import CAUSAL_WINDOW, NO_WINDOW
from transformer_engine.pytorch.attention.problem import (
    MIXED,
    AttentionOptions,
    Heads,
    check_tensors,
    packed_sizes,
    sequence_starts,
)

_NAME = "DotProductAttention"

# ---- mixed formats -------------------------------------------------------------------------------


def keys_in_format(of_queries: str, of_keys: str, tensor: Any) -> Any:
    """Keys or values of a format, sbhd or bshd, in that of queries.

    A view, but that what becomes packed and is not [b, s, ..] in memory is copied.
    """
    if of_queries == of_keys:
        return tensor
    in_order = tensor if (of_queries, of_keys) == ("thd", "bshd") else tensor.transpose(0, 1)
    return in_order.flatten(0, 1) if of_queries == "thd" else in_order


def in_one_format(
    heads: Heads, options: AttentionOptions, qkv_format: str
) -> tuple[Heads, AttentionOptions, str]:
    """Heads, options and format of a call, with a mixed format as that of its queries.

    ValueError for a mixed format beside what it does not go with.
    """
    if qkv_format not in MIXED:
        return heads, options, qkv_format
    of_queries, of_keys = qkv_format.split("_2")
    if options.inference_params is not None:
        raise ValueError(
            f"{_NAME}: qkv_format={qkv_format!r} with inference_params: new keys have the format "
            f"of the queries, {of_queries!r}"
        )
    if heads.joined == 3:
        raise ValueError(
            f"{_NAME}: qkv_format={qkv_format!r} with qkv_layer, which has one format: give "
            "query_layer and kv_layer"
        )
    query, key, value = heads.split()
    dims = [getattr(tensor, "shape", ()) for tensor in (query, key, value)]
    if [len(shape) for shape in dims] != [3 if of_queries == "thd" else 4, 4, 4]:
        raise ValueError(
            f"{_NAME}: query {tuple(dims[0])}, key {tuple(dims[1])}, value {tuple(dims[2])}: "
            f"expected {qkv_format}"
        )
    if of_queries == "thd":
        batch, length = dims[1][:2] if of_keys == "bshd" else (dims[1][1], dims[1][0])
        options = _with_gaps(options, key, batch, length)
    made = (query, *(keys_in_format(of_queries, of_keys, tensor) for tensor in (key, value)))
    return Heads(made), options, of_queries


def _with_gaps(options: AttentionOptions, key: Any, batch: int, length: int) -> AttentionOptions:
    """The options of packed queries, to sequences of keys that begin at multiples of a length."""
    sums = options.cu_seqlens_q
    if sums is not None and sums.shape[0] - 1 != batch:
        raise ValueError(
            f"{_NAME}: cu_seqlens_q of {sums.shape[0] - 1} sequences, and keys of {batch}: "
            "expected the same number"
        )
    starts = torch.arange(batch + 1, dtype=torch.int32, device=key.device) * length
    ends = starts if options.cu_seqlens_kv is None else options.cu_seqlens_kv
    longest = length if options.max_seqlen_kv is None else options.max_seqlen_kv
    return options._replace(cu_seqlens_kv=ends, cu_seqlens_kv_padded=starts, max_seqlen_kv=longest)


# ---- a cache -------------------------------------------------------------------------------------


def options_for_cache(
    options: AttentionOptions, default_mask: str, default_window: Any
) -> AttentionOptions:
    """The options of a call as they apply to all keys of its sequences.

    Lengths are those of the cache. The diagonal of causal types ends in the bottom right corner:
    the last query of a sequence attends all of its keys. Types without padding count as those with
    it (`masks.with_padding`). ValueError for "arbitrary", TypeError for no `InferenceParams`.
    """
    params = options.inference_params
    if not hasattr(params, "lengths"):
        kind = type(params).__name__
        raise TypeError(f"{_NAME}: inference_params: {kind}, expected an InferenceParams")
    name = default_mask if options.attn_mask_type is None else options.attn_mask_type
    kind = masks.with_padding(masks.mask_type(name), "inference_params")
    window = default_window if options.window_size is None else options.window_size
    name = "padding_causal_bottom_right" if kind.causal else "padding"
    if (
        kind.causal
        and params.max_seqlen_q == 1
        and masks.effective_window(window, kind) == CAUSAL_WINDOW
    ):
        name, window = "padding", NO_WINDOW  # one query attends all there is
    now = params.lengths
    corner = True if kind.causal else options.bottom_right_diagonal  # that of ALiBi's distances
    return options._replace(
        attn_mask_type=name, window_size=window, attention_mask=None, bottom_right_diagonal=corner,
        cu_seqlens_q=now.cu_seqlens_q, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None, max_seqlen_q=params.max_seqlen_q, max_seqlen_kv=None,
    )  # fmt: skip


def extend_cache(
    core: Any, heads: Heads, options: AttentionOptions, qkv_format: str
) -> tuple[Heads, AttentionOptions]:
    """Put new keys and values into their cache: all of them, and the options for these."""
    params = options.inference_params
    options = options_for_cache(options, core.attn_mask_type, core.window_size)
    query, *new = heads.split()
    batch, *_ = check_tensors(core, query, *new, qkv_format, options)
    _check_new(core, params, batch, new[0])
    # Views of a contiguous cache, or copies of pages; packed with gaps behind the sequences.
    made = params.step(core.layer_number, *new, qkv_format)[:2]
    if params.is_paged:
        made = params.gather(*made)
    longest = made[0].shape[1]
    made = (keys_in_format(qkv_format, "bshd", each) for each in made)
    of_keys = {"cu_seqlens_kv": params.lengths.cu_seqlens_kv, "max_seqlen_kv": longest}
    return Heads((query, *made)), options._replace(**of_keys)


def _check_new(core: Any, params: Any, batch: int, key: Tensor) -> None:
    """Raise for new keys that can not go into a cache (ValueError)."""
    if core.layer_number is None:
        raise ValueError(f"{_NAME}: inference_params needs a layer_number: give it to the module")
    if key.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{_NAME}: inference_params: no gradients pass a cache: call inside of torch.no_grad()"
        )
    if batch != params.batch_size:
        raise ValueError(
            f"{_NAME}: {batch} batch entries, but inference_params has {params.batch_size} "
            f"sequences in this step ({list(params.sequences)}): call pre_step() first"
        )
    if (key.dtype, key.device) != (params.dtype, params.device):
        raise ValueError(
            f"{_NAME}: keys are {key.dtype} on {key.device}, inference_params was made for "
            f"{params.dtype} on {params.device}: give it that dtype and device"
        )


def angles_for_cache(angles: Any, params: Any, length: int) -> Any:
    """Rotary angles with positions for what pads a batch behind its sequences, too.

    Of a step of `length` tokens each. Those positions are never read as such. For tokens nothing is
    made up: where angles lack positions of the cache, the operator sees what is missing.
    """
    if isinstance(angles, tuple | list):
        return tuple(angles_for_cache(each, params, length) for each in angles)
    missing = params.max_positions(length) - angles.shape[0]
    if missing <= 0 or angles.shape[0] < params.max_sequence_length:
        return angles
    return torch.cat((angles, angles.new_zeros(missing, *angles.shape[1:])))


# ---- policies ------------------------------------------------------------------------------------


_NEEDED = {"sequence_ids", "mask_type", "window_size"}
_MAY_HAVE = _NEEDED | {"bottom_right_diagonal"}


class _Policy(NamedTuple):
    """What the queries of some sequences may attend: fields of `AttentionOptions`."""

    attn_mask_type: str
    window_size: tuple[int, int]
    bottom_right_diagonal: bool | None


def split_by_policy(
    options: AttentionOptions, qkv_format: str, tokens: tuple[int, int]
) -> list[AttentionOptions]:
    """The options of one attention for each policy that differs, over so many queries and keys.

    NotImplementedError for a cache; ValueError or TypeError for policies that are none, or do not
    name each sequence once, and for what does not go with them.
    """
    given = options.thd_attention_policies
    if options.inference_params is not None:
        raise NotImplementedError(
            f"{_NAME}: thd_attention_policies with inference_params: a cache has one mask type; "
            "leave one of the two out"
        )
    if qkv_format != "thd":
        raise ValueError(
            f"{_NAME}: thd_attention_policies with qkv_format={qkv_format!r}, expected 'thd'"
        )
    for name in ("attn_mask_type", "window_size"):
        if getattr(options, name) is not None:
            raise ValueError(
                f"{_NAME}: thd_attention_policies with {name}: each policy has its own; leave "
                f"{name} out"
            )
    if not isinstance(given, list | tuple) or len(given) == 0:
        raise TypeError(f"{_NAME}: thd_attention_policies: {given!r}, expected a list of dicts")
    batch, *longest = packed_sizes(options, *tokens)
    found: dict[_Policy, list[int]] = {}
    for at, policy in enumerate(given):
        kind = _policy(policy, f"thd_attention_policies[{at}]", options.bottom_right_diagonal)
        found.setdefault(kind, []).extend(_ids(policy["sequence_ids"], at))
    named = sorted(id_ for ids in found.values() for id_ in ids)
    if named != list(range(batch)):
        raise ValueError(
            f"{_NAME}: thd_attention_policies: sequence_ids name {named}, expected each of the "
            f"{batch} sequences, from 0, in one policy"
        )
    plain = options._replace(
        thd_attention_policies=None, max_seqlen_q=longest[0], max_seqlen_kv=longest[1]
    )
    if len(found) == 1:
        return [plain._replace(**next(iter(found))._asdict())]
    return [
        _for_sequences(plain, ids)._replace(**each._asdict()) for each, ids in found.items() if ids
    ]


def _policy(policy: Any, label: str, bottom_right: bool | None) -> _Policy:
    if not isinstance(policy, dict):
        raise TypeError(f"{_NAME}: {label}: {type(policy).__name__}, expected a dict")
    names = set(policy)
    missing, unknown = _NEEDED - names, names - _MAY_HAVE
    if missing or unknown:
        raise ValueError(
            f"{_NAME}: {label}: missing {sorted(missing)}, unknown {sorted(map(str, unknown))}: it "
            "has sequence_ids, mask_type, window_size and may have bottom_right_diagonal"
        )
    kind = masks.mask_type(policy["mask_type"], f"{label}['mask_type']")
    kind = masks.with_padding(kind, label)
    window = masks.effective_window(policy["window_size"], kind, f"{label}['window_size']")
    own = policy.get("bottom_right_diagonal")
    return _Policy(kind.name, window, bottom_right if own is None else bool(own))


def _ids(ids: Any, at: int) -> list[int]:
    """Numbers of sequences on the host, which waits for those of a device."""
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or not all(type(id_) is int for id_ in ids):
        raise TypeError(
            f"{_NAME}: thd_attention_policies[{at}]['sequence_ids']: {ids!r}, expected integers"
        )
    return list(ids)


def _for_sequences(options: AttentionOptions, ids: list[int]) -> AttentionOptions:
    """Options in which all sequences but these have no tokens."""
    given = options.cu_seqlens_q, options.cu_seqlens_kv
    starts = sequence_starts(options)
    is_own = given[0].new_zeros(given[0].shape[0] - 1)
    for id_ in ids:  # by fills, which a capture takes, where it does not take a copy from the host
        is_own[id_].fill_(1)

    def sums(cumulative: Tensor | None) -> Tensor | None:
        if cumulative is None:
            return None
        own = (cumulative.diff() * is_own).cumsum(0, dtype=torch.int32)
        return torch.nn.functional.pad(own, (1, 0))

    of_queries = sums(given[0])
    of_keys = of_queries if given[1] is given[0] else sums(given[1])
    return options._replace(
        cu_seqlens_q=of_queries, cu_seqlens_kv=of_keys,
        cu_seqlens_q_padded=starts[0], cu_seqlens_kv_padded=starts[1],
    )  # fmt: skip
