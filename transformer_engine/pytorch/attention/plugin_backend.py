# SPDX-License-Identifier: Apache-2.0
"""Attention by the class that a plug-in gives for `get_flash_attention_class`."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import masks
from transformer_engine.pytorch.attention.problem import AttentionOptions, Heads
from transformer_engine.pytorch.execution import overrides
from transformer_engine.pytorch.execution.custom_ops import aligned, with_aligned_gradient


def _module_of(core: Any) -> torch.nn.Module:
    """The module of the class in force that belongs to a `DotProductAttention`."""
    kind = overrides.attention_class()
    if kind is None:
        raise RuntimeError(
            "DotProductAttention: this graph was compiled for the attention class of a plug-in, "
            "which the policy no longer selects: call torch.compiler.reset() after such a change"
        )
    made, key = core.__dict__.setdefault("_plugin_modules", {}), (kind, masks.deterministic())
    if key not in made:
        made[key] = kind(
            core.softmax_scale, attention_dropout=core.attention_dropout,
            attention_type=core.attention_type, layer_number=core.layer_number,
            deterministic=key[1],
        )  # fmt: skip
    found = made[key]
    found.attention_dropout = core.attention_dropout
    return found.train(core.training)


def attend(core: Any, heads: Heads, options: AttentionOptions, qkv_format: str) -> Tensor:
    """Attend by the class in force: [.., heads, channels], with its own gradients.

    What the class runs of this library asks no plug-in.
    """
    query, key, value = (aligned(tensor) for tensor in heads.split())
    name, window = options.attn_mask_type, options.window_size
    kind = masks.mask_type(core.attn_mask_type if name is None else name)
    if qkv_format == "thd":
        kind = masks.with_padding(kind, "qkv_format='thd'")
    elif not options.has_lengths():
        kind = masks.without_padding(kind)
    biased = options.core_attention_bias_type == "alibi"
    slopes = options.alibi_slopes
    if biased and slopes is None:
        slopes = masks.default_alibi_slopes(query.shape[-2], query.device)
    run = _module_of(core)
    with overrides.natively():
        out = run(
            query, key, value, options.attention_mask, qkv_layout="_".join([qkv_format] * 3),
            cu_seqlens_q=options.cu_seqlens_q, cu_seqlens_kv=options.cu_seqlens_kv,
            max_seqlen_q=options.max_seqlen_q, max_seqlen_kv=options.max_seqlen_kv,
            attn_mask_type=kind.name, window_size=core.window_size if window is None else window,
            alibi_slopes=slopes if biased else None,
        )  # fmt: skip
    return with_aligned_gradient(out).reshape(*query.shape[:-1], value.shape[-1])
