# SPDX-License-Identifier: Apache-2.0
"""`get_flash_attention_class`: this library's attention as a module of the plug-in system."""

from typing import Any

from torch import Tensor

from transformer_engine.plugin.attention_kinds import formats
from transformer_engine.plugin.core.manager import get_default_manager
from transformer_engine.plugin.core.ops import FlashAttentionBase
from transformer_engine.pytorch.attention import limits
from transformer_engine.pytorch.attention.core import DotProductAttention


class FlashAttention(FlashAttentionBase):
    """Attention by `DotProductAttention`, made for the heads of the first call of each kind."""

    def _core_attention(self, query: Tensor, key: Tensor, value: Tensor) -> DotProductAttention:
        made = self.__dict__.setdefault("_made", {})
        channels = query.shape[-1], value.shape[-1]
        kind = query.shape[-2], key.shape[-2], channels
        if kind not in made:
            made[kind] = DotProductAttention(
                query.shape[-2],
                channels,
                key.shape[-2],
                self.attention_dropout,
                attention_type=self.attention_type,
                layer_number=self.layer_number,
                softmax_scale=self.softmax_scale,
            )
        return made[kind].train(self.training)

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_layout: str = "sbh3d",
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        alibi_slopes: Tensor | None = None,
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        fp8: bool = False,
        fp8_meta: Any = None,
        quantizers: Any = None,
        inference_params: Any = None,
        flash_attention_backend: Any = None,
        fp8_output: bool = False,
    ) -> Tensor:
        """Attend, with gradients; see `DotProductAttention.forward`.

        NotImplementedError for `fp8`, which is that of `autocast` there, for ranks of context
        parallelism, and for ``deterministic`` where the process does not ask for it.
        """
        del cp_global_ranks, cp_stream, cp_comm_type, fp8_meta, quantizers, flash_attention_backend
        if fp8 or fp8_output:
            raise NotImplementedError(
                "get_flash_attention_class: fp8: not built yet; te.DotProductAttention under "
                "autocast attends in FP8"
            )
        if cp_group is not None and cp_group.size() > 1:
            raise NotImplementedError("get_flash_attention_class: cp_group of more than one rank")
        of_queries, of_keys = formats("get_flash_attention_class", qkv_layout)
        if of_queries != of_keys:
            raise NotImplementedError(
                f"get_flash_attention_class: qkv_layout={qkv_layout!r}: not built yet; give one "
                "format"
            )
        if self.deterministic and not limits.deterministic():
            raise NotImplementedError(
                "get_flash_attention_class: deterministic=True for one module: not built yet; "
                "torch.use_deterministic_algorithms(True) or NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 "
                "asks for it in all"
            )
        run = self._core_attention(query_layer, key_layer, value_layer)
        biased = alibi_slopes is not None
        with self.attention_dropout_ctx():
            return run(
                query_layer,
                key_layer,
                value_layer,
                attention_mask,
                qkv_format=of_queries,
                cu_seqlens_q=cu_seqlens_q,
                cu_seqlens_kv=cu_seqlens_kv,
                max_seqlen_q=max_seqlen_q,
                max_seqlen_kv=max_seqlen_kv,
                attn_mask_type=attn_mask_type,
                window_size=window_size,
                core_attention_bias_type="alibi" if biased else "no_bias",
                alibi_slopes=alibi_slopes,
                inference_params=inference_params,
            )


def get_flash_attention_class() -> type[FlashAttentionBase]:
    """The class of attention modules that `DotProductAttention`'s users get."""
    return FlashAttention


def class_in_force() -> type[FlashAttentionBase] | None:
    """The class that is selected ahead of this library's; None where nobody gives one."""
    found = get_default_manager().operator("get_flash_attention_class")()
    return None if found is FlashAttention else found
