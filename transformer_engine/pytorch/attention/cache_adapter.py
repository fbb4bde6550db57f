# SPDX-License-Identifier: Apache-2.0
"""Attention to the keys and values that sequences keep (`InferenceParams`)."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.masks import (
    CAUSAL_WINDOW,
    NO_WINDOW,
    mask_type,
    padding_form,
    window_of,
)
from transformer_engine.pytorch.attention.problem import (
    AttentionOptions,
    Heads,
    check_tensors,
    keys_as,
)

_NAME = "DotProductAttention"


def options_for_cache(
    options: AttentionOptions, default_mask: str, default_window: Any
) -> AttentionOptions:
    """The options of a call as they apply to all keys of its sequences.

    Lengths are those of the cache. The diagonal of causal types ends in the bottom right corner:
    the last query of a sequence attends all of its keys. Types without padding count as those with
    it (`masks.padding_form`). ValueError for "arbitrary", TypeError for no `InferenceParams`.
    """
    params = options.inference_params
    if not hasattr(params, "lengths"):
        kind = type(params).__name__
        raise TypeError(f"{_NAME}: inference_params: {kind}, expected an InferenceParams")
    name = default_mask if options.attn_mask_type is None else options.attn_mask_type
    kind = padding_form(mask_type(name), "inference_params")
    window = default_window if options.window_size is None else options.window_size
    name = "padding_causal_bottom_right" if kind.causal else "padding"
    if kind.causal and params.max_seqlen_q == 1 and window_of(window, kind) == CAUSAL_WINDOW:
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
    made, longest = _append_and_view(params, core.layer_number, tuple(new), qkv_format)
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


def _append_and_view(
    params: Any, layer_number: int, new: tuple[Tensor, Tensor], qkv_format: str
) -> tuple[tuple[Tensor, Tensor], int]:
    """Put new keys and values into a cache; all of them, and the bound of their lengths.

    They are views of a contiguous cache, or copies of pages: [batch, longest, heads, channels]
    (bshd), [longest, batch, ..] (sbhd), or [batch * longest, ..] (thd) with gaps behind the
    sequences.
    """
    made = params.step(layer_number, *new, qkv_format)[:2]
    if params.is_paged:
        made = params.gather(*made)
    key, value = made
    longest = key.shape[1]
    return (keys_as(qkv_format, "bshd", key), keys_as(qkv_format, "bshd", value)), longest


def angles_for_cache(angles: Any, params: Any, length: int) -> Any:
    """Rotary angles with positions for what pads a batch behind its sequences, too.

    Of a step of `length` tokens each. Those positions are never read as such. For tokens nothing is
    made up: where angles lack positions of the cache, the operator sees what is missing.
    """
    if isinstance(angles, tuple | list):
        return tuple(angles_for_cache(each, params, length) for each in angles)
    missing = params.positions_of(length) - angles.shape[0]
    if missing <= 0 or angles.shape[0] < params.max_sequence_length:
        return angles
    return torch.cat((angles, angles.new_zeros(missing, *angles.shape[1:])))
