# SPDX-License-Identifier: Apache-2.0
"""Packed sequences with mask types and windows of their own: an attention for each policy.

Each attention reads all tensors where they lie. The sequences of the other policies have no tokens
there, so their tokens are those of gaps: nothing reads them, their outputs and gradients are 0, and
the outputs of all policies add up. No host has to know any length for it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import masks
from transformer_engine.pytorch.attention.problem import AttentionOptions, sizes_of, starts_of

__all__ = ["split_by_policy", "joined"]

_NAME = "DotProductAttention"
_NEEDED = {"sequence_ids", "mask_type", "window_size"}
_MAY_HAVE = _NEEDED | {"bottom_right_diagonal"}


class _Policy(NamedTuple):
    """Policy of some sequences: what their queries may attend."""

    mask_type: str
    window: tuple[int, int]
    bottom_right: bool | None


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
    batch, *longest = sizes_of(options, *tokens)
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
        return [_with(plain, next(iter(found)))]
    return [_with(_alone(plain, ids), kind) for kind, ids in found.items() if ids]


def _with(options: AttentionOptions, policy: _Policy) -> AttentionOptions:
    mask_type, window, bottom_right = policy
    return options._replace(
        attn_mask_type=mask_type, window_size=window, bottom_right_diagonal=bottom_right
    )


def _policy(policy: Any, label: str, bottom_right: bool | None) -> _Policy:
    """Make one of a dict, checked."""
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
    kind = masks.padding_form(kind, label)
    window = masks.window_of(policy["window_size"], kind, f"{label}['window_size']")
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


def _alone(options: AttentionOptions, ids: list[int]) -> AttentionOptions:
    """Options in which all sequences but these have no tokens."""
    given = options.cu_seqlens_q, options.cu_seqlens_kv
    starts = starts_of(options)
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


def joined(results: list[Any], with_top: bool) -> Any:
    """The result of a call from those of its policies; `with_top`: (output, largest scores)."""
    if not with_top:
        return _sum(results)
    outputs, tops = zip(*results, strict=True)
    return _sum(outputs), torch.stack(tops).amax(0)


def _sum(outputs: Sequence[Tensor]) -> Tensor:
    total = outputs[0]
    for output in outputs[1:]:
        total = total + output
    return total
