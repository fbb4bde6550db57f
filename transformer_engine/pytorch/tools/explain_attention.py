# SPDX-License-Identifier: Apache-2.0
"""`explain_attention`: which backend runs an attention, and what keeps each other one from it."""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common.config import TE_DPA_FP8_RECIPE, TE_UNFUSED_DPA_EMULATE_FP8
from transformer_engine.pytorch.attention import fp8
from transformer_engine.pytorch.attention.backends import (
    BACKENDS,
    Refusal,
    kind_of_call,
    refusals,
)
from transformer_engine.pytorch.attention.core import DotProductAttention
from transformer_engine.pytorch.attention.masks import CallKind
from transformer_engine.pytorch.attention.problem import (
    AttentionOptions,
    check_splits,
    given_heads,
)
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.torchside.device import accelerator

_NAME = "explain_attention"


class AttentionExplanation(NamedTuple):
    """The answer; ``print`` shows it as a short table."""

    backend: str | None
    """The backend that runs a call: "plugin" (the class of a plug-in), "native" (the library's own
    operator; cuDNN's kernels on CUDA), "sdpa" (torch's), "unfused" (two products and our softmax);
    None: nothing does."""
    refused: dict[str, Refusal]
    """For each backend that does not run it the one ``feature`` that is in its way, and ``why``."""
    others: tuple[str, ...]  # would run it too, and come after the chosen one
    fp8: str = ""
    """By which recipe it runs in FP8, why it does not where the region asks for it, and which
    backward follows; "": nothing asks for FP8."""

    def __str__(self) -> str:
        lines = ["nothing runs it"]
        if self.backend is not None:
            lines = [f"runs     {self.backend}: {BACKENDS[self.backend].title}"]
        lines += [f"FP8      {self.fp8}"] * bool(self.fp8)
        lines += [f"could    {name}: {BACKENDS[name].title}" for name in self.others]
        lines += [f"refused  {name}: {refusal}" for name, refusal in self.refused.items()]
        return "\n".join(lines)


def explain_attention(
    attention: torch.nn.Module,
    query_layer: Any = None,
    key_layer: Any = None,
    value_layer: Any = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    **arguments: Any,
) -> AttentionExplanation:
    """Say which backend would run an attention, and the feature that each other one lacks.

    Nothing runs and nothing is allocated. Environment, `torch.autocast` and the `autocast` region
    are those in force.

    Parameters
    ----------
    attention : DotProductAttention, MultiheadAttention or TransformerLayer
        Whose attention; of a layer its `core_attention`, that of a sequence to itself.
    query_layer, key_layer, value_layer : Tensor or tuple of int
        Tensors as of the attention's forward, or their shapes. Where keys and values are left out
        they are as many as the queries, in the groups and channels of the module.
    dtype, device
        Of shapes; bf16, and CUDA where there is a device, are the defaults.
    **arguments
        Others of `DotProductAttention.forward`, by name; for a tensor its shape does. The bounds of
        packed sequences that are a shape are all tokens, where they are not given.

    Returns
    -------
    AttentionExplanation
        ``backend``, ``refused``, ``others``, ``fp8``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        What the forward would raise for these arguments, but that no backend is left.
    """
    core = _core_of(attention)
    _check_names(arguments)
    check_splits(arguments.get("num_splits"))
    layers: Any = (query_layer, key_layer, value_layer)
    packed: Any = [arguments.get(name) for name in ("qkv_layer", "kv_layer")]
    if query_layer is not None and all(each is None for each in (*layers[1:], *packed)):
        layers = _self_attention(core, query_layer)
    dtype, device = _kind_of((*layers, *packed), dtype, device)
    if any(isinstance(each, tuple) for each in (*layers, *packed)):
        layers, packed = ([_on_meta(each, dtype) for each in some] for some in (layers, packed))
    heads = given_heads(tuple(layers), *packed, arguments.get("qkv_interleave_dim", -3))
    given = {name: value for name, value in arguments.items() if name in AttentionOptions._fields}
    for names, of in ((_SHAPES, dtype), (_SUMS, torch.int32)):
        given |= {n: _on_meta(given[n], of) for n in names if isinstance(given.get(n), tuple)}
    tensors = heads.split()
    _bound(given, arguments.get("qkv_format") or core.qkv_format, tensors)
    options = AttentionOptions(**given)
    modified = arguments.get("score_mod") is not None
    call_kind = kind_of_call(core, heads, options, arguments.get("qkv_format"), modified, device)
    found = refusals(call_kind)
    runs = [name for name, refusal in found.items() if refusal is None]
    refused = {name: refusal for name, refusal in found.items() if refusal is not None}
    emulated = runs[:1] == ["unfused"]
    sequence_at = 1 if (arguments.get("qkv_format") or core.qkv_format) == "bshd" else 0
    about = {"queries": tensors[0].shape[sequence_at], "wide": bool(arguments.get("bf16_backward"))}
    in_fp8 = _about_fp8(core, call_kind, about, emulated)
    return AttentionExplanation(runs[0] if runs else None, refused, tuple(runs[1:]), in_fp8)


def _about_fp8(
    core: DotProductAttention, call_kind: CallKind, about: dict[str, Any], emulated: bool
) -> str:
    """Text about FP8 in a call of a kind; `about`: `fp8.BackwardFacts` that it has not."""
    state = current_state()
    if not state.enabled or not fp8.asks_for_attention(state.recipe):
        return ""
    recipe, named = fp8.recipe_of(state.recipe, core), TE_DPA_FP8_RECIPE.get()
    asked = state.recipe.custom() and not named  # the quantizers say by which one
    source = type(state.recipe).__name__ if asked else TE_DPA_FP8_RECIPE.name
    if recipe is None:
        return f"none: {source}" + ("" if asked else f"={named}")
    found = f"by {type(recipe).__name__}" + (f" ({source})" if recipe is not state.recipe else "")
    if emulated:
        return f"{found}, emulated ({TE_UNFUSED_DPA_EMULATE_FP8.name}); backward in high precision"
    limited = call_kind.mask_type.padding or max(call_kind.window) >= 0
    dropout = core.attention_dropout if core.training else 0.0
    facts = fp8.backward_facts(
        recipe, device=call_kind.device, channels=call_kind.channels, limited=limited,
        packed=call_kind.packed, dropout=dropout, **about,
    )  # fmt: skip
    reason = fp8.why_in_high_precision(facts)
    return f"{found}; backward in " + (f"high precision: {reason}" if reason else "FP8")


_SHAPES = ("attention_mask", "core_attention_bias", "alibi_slopes")
_SUMS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
"""Arguments that may be given as shapes; those behind are int32."""


def _bound(given: dict[str, Any], qkv_format: str, tensors: Any) -> None:
    """Give packed sequences the bounds that are read of sums, which a shape has none of."""
    if not qkv_format.startswith("thd"):
        return
    sides = ("q", "kv") if qkv_format == "thd" else ("q",)  # padded keys have the bound of a dim
    for side, tensor in zip(sides, tensors, strict=False):
        sums = given.get(f"cu_seqlens_{side}", given.get("cu_seqlens_q"))
        if isinstance(sums, Tensor) and sums.is_meta and given.get(f"max_seqlen_{side}") is None:
            given[f"max_seqlen_{side}"] = tensor.shape[0]


def _core_of(attention: torch.nn.Module) -> DotProductAttention:
    """The core attention of a module."""
    found: Any = attention
    for name in ("self_attention", "core_attention"):
        found = getattr(found, name, found)
    if not isinstance(found, DotProductAttention):
        raise TypeError(
            f"{_NAME}: {type(attention).__name__}, expected a DotProductAttention, or a "
            "MultiheadAttention or TransformerLayer with one"
        )
    return found


def _check_names(arguments: dict) -> None:
    """Raise for what is no argument of the forward (TypeError), or several calls (ValueError)."""
    known = inspect.signature(DotProductAttention.forward).parameters
    for name in arguments:
        if name not in known:
            raise TypeError(f"{_NAME}: {name!r} is no argument of DotProductAttention.forward")
    if arguments.get("thd_attention_policies") is not None:
        raise ValueError(
            f"{_NAME}: thd_attention_policies: ask about each policy, by attn_mask_type, "
            "window_size and cu_seqlens_q_padded: each is an attention of its own"
        )


def _self_attention(core: DotProductAttention, query: Any) -> tuple:
    """Queries, and the shapes of as many keys and values."""
    *lead, _, _ = getattr(query, "shape", query)
    k, v = core.hidden_size_per_attention_head_k, core.hidden_size_per_attention_head_v
    return query, (*lead, core.num_gqa_groups, k), (*lead, core.num_gqa_groups, v)


def _kind_of(layers: tuple, dtype: Any, device: Any) -> tuple[torch.dtype, torch.device]:
    """Dtype and device of a call: those of its first tensor, where not all of them are shapes."""
    for layer in layers:
        if isinstance(layer, Tensor):
            return layer.dtype, layer.device
    if device is None:
        device = accelerator()
    return torch.bfloat16 if dtype is None else dtype, torch.device(device)


def _on_meta(value: Any, dtype: torch.dtype) -> Any:
    """A tensor without memory for a shape, or for a tensor; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, tuple) and all(isinstance(n, int) for n in value):
        return torch.empty(value, dtype=dtype, device="meta")
    return value
