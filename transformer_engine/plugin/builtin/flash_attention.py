# SPDX-License-Identifier: Apache-2.0
"""`get_flash_attention_class`: this library's attention as a module of the plug-in system."""

import inspect
from typing import Any

from torch import Tensor

from transformer_engine.plugin.attention_kinds import formats
from transformer_engine.plugin.builtin.signatures import taking
from transformer_engine.plugin.core.manager import get_default_manager
from transformer_engine.plugin.core.ops import FlashAttentionBase
from transformer_engine.pytorch.attention import masks
from transformer_engine.pytorch.attention.core import DotProductAttention

_PASSED = (
    *("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "attn_mask_type"),
    *("window_size", "alibi_slopes", "inference_params"),
)
"""Arguments of `DotProductAttention.forward` by the same names."""


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

    def _forward(call: Any) -> Tensor:  # noqa: N805 - `call.self`
        """Attend, with gradients; see `DotProductAttention.forward`.

        NotImplementedError for `fp8`, which is that of `autocast` there, for ranks of context
        parallelism, and for ``deterministic`` where the process does not ask for it.
        """
        self, op = call.self, "get_flash_attention_class"
        of_queries, of_keys = formats(op, call.qkv_layout)
        what = ""
        if call.fp8 or call.fp8_output:
            what = "fp8: not built yet; te.DotProductAttention under autocast attends in FP8"
        elif call.cp_group is not None and call.cp_group.size() > 1:
            what = "cp_group of more than one rank"
        elif of_queries != of_keys:
            what = f"qkv_layout={call.qkv_layout!r}: not built yet; give one format"
        elif self.deterministic and not masks.deterministic():
            what = (
                "deterministic=True for one module: not built yet; "
                "torch.use_deterministic_algorithms(True) or NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 "
                "asks for it in all"
            )
        if what:
            raise NotImplementedError(f"{op}: {what}")
        run = self._core_attention(call.query_layer, call.key_layer, call.value_layer)
        given = {name: getattr(call, name) for name in _PASSED}
        biased = "no_bias" if call.alibi_slopes is None else "alibi"
        with self.attention_dropout_ctx():
            return run(
                *(call.query_layer, call.key_layer, call.value_layer, call.attention_mask),
                qkv_format=of_queries,
                core_attention_bias_type=biased,
                **given,
            )

    forward = taking(inspect.signature(FlashAttentionBase.forward), _forward, "forward")


def get_flash_attention_class() -> type[FlashAttentionBase]:
    """The class of attention modules that `DotProductAttention`'s users get."""
    return FlashAttention


def class_in_force() -> type[FlashAttentionBase] | None:
    """The class that is selected ahead of this library's; None where nobody gives one."""
    found = get_default_manager().operator("get_flash_attention_class")()
    return None if found is FlashAttention else found
