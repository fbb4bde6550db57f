# SPDX-License-Identifier: Apache-2.0
"""`AttentionOptions`: what a call of a layer says about its attention, handed on as one object."""

from typing import Any, NamedTuple

from torch import Tensor


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
        """Whether a call has nothing but its input, and settings that compare by value."""
        return (
            self.attention_mask is None
            and self.encoder_output is None
            and self.rotary_pos_emb is None
            and self.core_attention_bias is None
            and self.alibi_slopes is None
            and self.cu_seqlens_q is None
            and self.cu_seqlens_kv is None
            and self.inference_params is None
            and self.thd_attention_policies is None
            and type(self.window_size) is not list
        )

    def tells_lengths(self) -> bool:
        """Whether a call says where its sequences end; else all of them are of full length."""
        told = self.attention_mask, self.cu_seqlens_q, self.cu_seqlens_kv
        return any(each is not None for each in told)

    def has_gaps(self) -> bool:
        """Whether packed sequences may have tokens of none between them."""
        padded = self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded
        return any(each is not None for each in (*padded, self.inference_params))

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
    score_mod: Any = None  # changes the scores, a `score_mod.ScoreMod`
