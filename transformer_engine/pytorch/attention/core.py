# SPDX-License-Identifier: Apache-2.0
"""`DotProductAttention`: softmax(scale * query key^T) value with masks, windows and biases."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.config import TE_EXTRA_STATE
from transformer_engine.common.plans import CallPlans
from transformer_engine.pytorch.attention import fp8, lowering, masks, over_ranks, plan
from transformer_engine.pytorch.attention.backends import (
    BACKENDS,
    SOFTMAX_TYPES,
    Choice,
    check_constructible,
    get_qkv_quantization_capabilities,
    limits_for,
)
from transformer_engine.pytorch.attention.masks import Limits
from transformer_engine.pytorch.attention.plan import KeptCalls
from transformer_engine.pytorch.attention.problem import (
    MIXED,
    AttentionOptions,
    CoreOptions,
    Heads,
    check_dispatch,
    check_format,
    check_softcap,
    check_splits,
    check_tensors,
    given_heads,
    refuse_export,
)
from transformer_engine.pytorch.attention.scores import checked_score_mod
from transformer_engine.pytorch.attention.torch_backends import attend_by_class, attend_emulated
from transformer_engine.pytorch.execution.recompute import checkpoint
from transformer_engine.pytorch.module.base import Fp8Module
from transformer_engine.pytorch.module.parallel import ContextParallel
from transformer_engine.pytorch.module.parameters import (
    default_device,
    functions,
    have_memory,
    initialise,
    one_of,
    positive_sizes,
    probabilities,
)
from transformer_engine.pytorch.scaling_state.extra_state import KEY, is_ours, pack_state
from transformer_engine.pytorch.torchside.graph_breaks import Outside
from transformer_engine.pytorch.torchside.modes import constant_in_graphs

_attention_backends: dict[str, bool] = {"backend_selection_requires_update": False}
"""Programs set the entry after they have changed a variable; here every call reads them."""

_NAME = "DotProductAttention"
_PLAIN = CoreOptions()

_DEFAULTS = (
    None, None, None, None, None, None, None, None, None, None,
    None, None, False,
    "no_bias", None, None, None,
    False, 1,
    None, None, None, None,
    True, True, False, -3,
    None,
)  # fmt: skip
"""The arguments that a call is found by, as `DotProductAttention.forward` lists them, where only
queries, keys and values are given."""

_SET_BY_CALLS = (
    "training", "attention_dropout", "_slots", "_loaded_state", "_lacks_scales", "_quantization",
)  # fmt: skip
"""Attributes that calls set, or that are part of what they are kept by."""


class DotProductAttention(ContextParallel, Fp8Module):
    """Attention of queries to keys and values.

    Parameters
    ----------
    num_attention_heads : int
        Heads of the queries.
    kv_channels : int or (int, int)
        Channels of a head: of queries and keys, and of values where they differ.
    num_gqa_groups : int, optional
        Heads of keys and values, which divide `num_attention_heads`; as many where None.
    attention_dropout : float, default 0
        Probability that an attention probability is dropped, in training.
    qkv_format : str, default "sbhd"
        "sbhd" [sequence, batch, heads, channels], "bshd", or "thd": [tokens, heads, channels] of
        packed sequences.
    attn_mask_type : str, default "causal"
        Default of the forward: "no_mask", "padding", "causal", "padding_causal",
        "causal_bottom_right", "padding_causal_bottom_right" or "arbitrary".
    window_size : (int, int), optional
        Default of the forward: keys to the left and to the right of the diagonal; -1: no limit.
    bottom_right_diagonal : bool, optional
        Default of the forward: the diagonal of windows and ALiBi ends in the bottom right corner of
        the scores. Causal types have their own.
    softcap : float, default 0
        Default of the forward: scaled scores s become softcap tanh(s / softcap); 0: as they are.
    sequence_parallel, tp_size, tp_group
        As of `Linear`.
    get_rng_state_tracker : callable, optional
        Returns a tracker whose ``fork()`` is entered while dropout is drawn, but for sequence
        parallelism, where programs enter it around whole layers. Recompute reads and sets its
        states: see `checkpoint`.
    layer_number : int, optional
        From 1.
    attention_type : str, default "self"
        "self" or "cross".
    cp_group, cp_global_ranks, cp_stream, cp_comm_type
        As of `set_context_parallel_group`: see `over_ranks`.
    softmax_scale : float, optional
        Factor of the scores; 1 / sqrt(channels) where None.
    softmax_type : str, default "vanilla"
        "off-by-one": 1 is added to the sum of the exponentiated scores, as by a key of score 0
        without a value; "learnable": of e to the parameter ``softmax_offset`` ([heads] fp32, 0 at
        first), which gets its gradient. Without a parameter ``softmax_offset`` is None, or zeros
        that are read by nothing where "off-by-one".
    return_max_logit : bool, default False
        Return the largest score of each head too.
    name : str, optional
        Name of the module for messages.

    Raises
    ------
    ValueError
        Sizes or names that do not go together.
    NotImplementedError
        An option that is not there yet.
    """

    SLOTS = fp8.SLOTS

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float = 0.0,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._set_parallel(tp_group, tp_size, sequence_parallel=sequence_parallel)
        one_of(_NAME, SOFTMAX_TYPES, softmax_type=softmax_type)
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        positive_sizes(_NAME, num_attention_heads=num_attention_heads, num_gqa_groups=groups)
        if num_attention_heads % groups != 0:
            raise ValueError(
                f"{_NAME}: num_attention_heads={num_attention_heads}, num_gqa_groups="
                f"{num_gqa_groups}: the groups must divide the heads"
            )
        one_of(_NAME, ("self", "cross"), attention_type=attention_type)
        counts = hasattr(layer_number, "__index__") and layer_number >= 1
        if layer_number is not None and not counts:
            raise ValueError(f"{_NAME}: layer_number={layer_number!r}: an int that counts from 1")
        functions(_NAME, get_rng_state_tracker=get_rng_state_tracker)
        check_format(qkv_format)
        probabilities(_NAME, attention_dropout=attention_dropout)
        channels = kv_channels if isinstance(kv_channels, tuple | list) else (kv_channels,) * 2
        if len(channels) != 2:
            raise ValueError(f"{_NAME}: kv_channels={kv_channels!r}, expected an int or a pair")
        for size in channels:
            positive_sizes(_NAME, kv_channels=size)
        num_attention_heads = self._share(num_attention_heads, "num_attention_heads")
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = self._share(groups, "num_gqa_groups")
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = channels
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.attn_mask_type = masks.mask_type(attn_mask_type).name
        masks.effective_window(window_size, masks.mask_type(attn_mask_type))  # raises where it must
        self.window_size = None if window_size is None else tuple(window_size)
        self.bottom_right_diagonal = bottom_right_diagonal
        self.softcap = check_softcap(softcap)
        self.attention_type, self.layer_number, self.name = attention_type, layer_number, name
        scale = 1.0 / math.sqrt(channels[0]) if softmax_scale is None else softmax_scale
        self.softmax_scale = scale
        self._get_tracker = None if self.sequence_parallel else get_rng_state_tracker
        self.softmax_type, self.return_max_logit = softmax_type, bool(return_max_logit)
        if softmax_type == "vanilla":
            self.register_parameter("softmax_offset", None)
        else:
            offset = torch.zeros(num_attention_heads, dtype=torch.float32, device=default_device())
            learns = softmax_type == "learnable"
            self.softmax_offset = torch.nn.Parameter(offset) if learns else offset
            if learns and have_memory(self):
                self.reset_parameters()
        check_constructible(self)
        self._plans: dict[tuple, CallPlans] = {}  # of calls that are not kept
        self._last_call: Choice | None = None  # of the last one that was not compiled

    _READ_BY_PLANS = (
        "training", "attention_dropout", "softmax_scale", "_get_tracker", "attn_mask_type",
        "window_size", "bottom_right_diagonal", "qkv_format", "softcap", "softmax_type",
        "return_max_logit", "num_attention_heads", "num_gqa_groups",
        "hidden_size_per_attention_head_k", "hidden_size_per_attention_head_v", "cp_size",
    )  # fmt: skip
    """Settings that plans of a layer depend on (see `traced_layer`)."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a setting counts from the next call on."""
        super().__setattr__(name, value)
        if name not in _SET_BY_CALLS:  # a call is not kept by the others
            self.__dict__["_kept"], self.__dict__["_decisions"] = KeptCalls(), {}
            self.__dict__["_agreed"] = {}  # kinds of calls that all ranks of `cp_group` make
            self.__dict__["_plugin_modules"] = {}  # attention by their classes

    def __getstate__(self) -> dict:
        """Copy and pickle without calls."""
        without = {"_kept": KeptCalls(), "_plans": {}, "_custom": None, "_plugin_modules": {}}
        return {**super().__getstate__(), **without}

    def _replicate_for_data_parallel(self) -> "DotProductAttention":
        """Copy for `torch.nn.DataParallel`, without calls: its parameters are others."""
        made = super()._replicate_for_data_parallel()
        made.__dict__["_kept"] = KeptCalls()
        return made

    def reset_parameters(self) -> None:
        """Give a learnable `softmax_offset` 0; see `Linear.reset_parameters`."""
        if self.softmax_type == "learnable":
            initialise(self, "softmax_offset", torch.nn.init.zeros_, (None, None))

    @constant_in_graphs
    def _ensure_plans(self, key: tuple) -> None:
        """Make plans while a graph is traced, outside of the graph."""
        plan.plans_for(self, key)

    def _recipe_in_force(self) -> Any:
        return fp8.recipe_of(super()._recipe_in_force(), self)

    # Most attentions have no such state, and loaders ask every class that defines these for some.
    get_extra_state = torch.nn.Module.get_extra_state
    set_extra_state = torch.nn.Module.set_extra_state

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        """Save scaling state where attention has run in FP8, or is about to."""
        super(Fp8Module, self)._save_to_state_dict(destination, prefix, keep_vars)
        state = pack_state(None)
        if self._has_state() or fp8.in_force(self):
            state = Fp8Module.get_extra_state(self).detach()
        if state.numel() > 0 or TE_EXTRA_STATE.get() == "always":
            destination[prefix + KEY] = state

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *given: Any) -> None:
        """Load scaling state that this package has saved; peers save another kind here."""
        key, unexpected_keys = prefix + KEY, given[3]
        known = state_dict
        if key in state_dict and not is_ours(state_dict[key]):
            known = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(known, prefix, *given)
        if key in known:
            Fp8Module.set_extra_state(self, known[key])
        for name in (key, f"{prefix}fused_attention.{KEY}"):
            if name in unexpected_keys:
                unexpected_keys.remove(name)

    def extra_repr(self) -> str:
        """Sizes and defaults."""
        return (
            f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, "
            f"channels=({self.hidden_size_per_attention_head_k}, "
            f"{self.hidden_size_per_attention_head_v}), dropout={self.attention_dropout}, "
            f"qkv_format={self.qkv_format}, attn_mask_type={self.attn_mask_type}"
            + (f", softcap={self.softcap}" if self.softcap else "")
            + ("" if self.softmax_type == "vanilla" else f", softmax_type={self.softmax_type}")
        )

    limits_for = limits_for
    get_qkv_quantization_capabilities = get_qkv_quantization_capabilities

    # ---- forward -------------------------------------------------------------------------------

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        softcap: float | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Callable | None = None,
        score_mod_bprop: Callable | None = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        thd_attention_policies: Any = None,
        thd_attention_policy_dispatch: str = "auto",
    ) -> Any:
        """Attend.

        Parameters
        ----------
        query_layer : Tensor
            [s, b, heads, channels] (sbhd), [b, s, heads, channels] (bshd) or [t, heads, channels]
            (thd); fp32, fp16 or bf16, on the CPU or a CUDA device.
        key_layer, value_layer : Tensor
            The same with the sequence of the keys and `num_gqa_groups` heads.
        attention_mask : Tensor or pair of Tensor, optional
            bool, True: masked out. Padding types: [b, 1, 1, s], or a pair for queries and keys;
            without one, and without lengths, all sequences are of full length. "arbitrary":
            broadcastable to [b, heads, queries, keys]. The other types read none, and packed
            sequences neither: "no_mask" and causal types are the padding types there.
        qkv_format : str, optional
            As of the constructor, for this call; or keys and values in another format than the
            queries: "sbhd_2bshd", "bshd_2sbhd", "thd_2bshd", "thd_2sbhd". Packed queries then have
            `cu_seqlens_q`, and `cu_seqlens_kv` where keys are padded behind their sequences.
        attn_mask_type, window_size, bottom_right_diagonal
            As of the constructor, for this call.
        softcap : float, optional
            As of the constructor, for this call: in fp32, before biases behind the scale, mask and
            softmax, and before `score_mod`, which gets capped scores.
        cu_seqlens_q, cu_seqlens_kv : Tensor, optional
            [b + 1] int32 sums of the sequence lengths: in place of the mask for padding types, and
            the second alone where all queries are there. For packed sequences the first is needed,
            and the second where keys are others than queries.
        cu_seqlens_q_padded, cu_seqlens_kv_padded : Tensor, optional
            [b + 1] int32: the tokens with which packed sequences begin, where there are tokens of
            no sequence between them. Their results are 0.
        max_seqlen_q, max_seqlen_kv : int, optional
            Bounds of the lengths of packed sequences. What is not given is read from the device,
            for which the host waits, and rounded up to a multiple of 64.
        checkpoint_core_attention : bool, default False
            Keep the inputs only and repeat the attention in the backward.
        core_attention_bias_type : str, default "no_bias"
            "pre_scale_bias": scale * (q k + bias); "post_scale_bias": scale * q k + bias; "alibi":
            -slope * distance from the diagonal is the bias.
        core_attention_bias : Tensor, optional
            [b or 1, heads or 1, queries or 1, keys], differentiable.
        alibi_slopes : Tensor, optional
            [heads] or [b, heads] fp32; where None 2^(-8 k / heads) from k = 1 for a power of two of
            heads (for others see `masks.default_alibi_slopes`).
        fast_zero_fill
            Ignored: it chooses among implementations that there is one of here.
        pad_between_seqs : bool, optional
            Ignored: ``cu_seqlens_q_padded`` and ``cu_seqlens_kv_padded`` say so.
        inference_params : InferenceParams, optional
            Keys and values are those of new tokens: they go into its cache of this `layer_number`,
            and queries attend to all that is there. The mask type is any but "arbitrary", and
            counts as that of padding; lengths are those of the cache, and causal types have their
            diagonal in the bottom right corner.
        bf16_backward : bool, optional
            True: the backward of attention in FP8 runs in high precision, as with
            ``TE_FP8_ATTENTION_BACKWARD=0``; else as ever.
        fp8_output : bool
            Where attention runs in FP8, return its output as it is made: a `Float8Tensor`, which a
            linear layer behind it multiplies. Elsewhere, emulated FP8 too, it changes nothing.
        num_splits : int, optional
            Ignored: how kernels of flash-attn, which are not built, would share their work.
        score_mod : callable, optional
            ``score_mod(graph, score, tensors)`` gives scores [b, heads, queries, keys] fp32 that
            bias, mask and softmax go on with, from those that are scaled: by the operations of
            `graph`, which has the names of cuDNN's, or by torch's own. Run by "unfused".
        score_mod_bprop : callable, optional
            ``score_mod_bprop(graph, grad, tensors)`` gives the gradient of the scores from that of
            what `score_mod` gave, after a call of that; where None autograd does, and `tensors` may
            have gradients too.
        score_mod_tensors, score_mod_bprop_tensors : dict, optional
            What these functions get as `tensors`.
        qkv_layer : Tensor, optional
            Queries, keys and values in one, in place of the three: [.., 3, heads, channels], or
            [.., heads, 3, channels] with `qkv_interleave_dim` -2.
        kv_layer : Tensor, optional
            Keys and values in one, likewise with 2.
        qkv_interleave_dim : int, default -3
            Which dim of these tensors counts them: -3 or -2.
        thd_attention_policies : list of dict, optional
            Packed sequences that attend in different ways: ``{"sequence_ids": integers,
            "mask_type": str, "window_size": pair or None}``, which name each sequence of the batch
            once, from 0, in place of `attn_mask_type` and `window_size`. A policy may have its
            ``bottom_right_diagonal``, in place of that of the call. Numbers on a device are read by
            the host, which waits.
        thd_attention_policy_dispatch : str, default "auto"
            "auto" or "grouped", which are the same here: one attention for each policy that
            differs. With `fp8_output` the output of several is in high precision.

        Returns
        -------
        Tensor or (Tensor, Tensor)
            [s, b, heads * channels], [b, s, heads * channels] or [t, heads * channels] in the dtype
            of the queries; under `torch.autocast` in its dtype. With `return_max_logit` also
            [heads] fp32: the largest score, scaled and with its bias, that any query of the batch
            attends, before what a softmax type adds; -Inf where there is none. It has no gradient.

        Raises
        ------
        TypeError, ValueError
            Tensors or arguments that do not go together.
        NotImplementedError
            An option that is not there yet; `fp8_output` of attention in FP8 in `torch.export` or a
            transform of torch.func.
        """
        if thd_attention_policy_dispatch != "auto":
            check_dispatch(thd_attention_policy_dispatch)
        call_key = None
        if not torch.compiler.is_compiling():
            if qkv_layer is kv_layer is None:
                tensors = (query_layer, key_layer, value_layer)
            else:
                layers = query_layer, key_layer, value_layer, kv_layer, qkv_layer
                tensors = tuple(tensor for tensor in layers if tensor is not None)[:3]
            calls = self.__dict__["_kept"]
            given = (
                attention_mask, qkv_format, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
                cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, attn_mask_type, window_size,
                bottom_right_diagonal, softcap, checkpoint_core_attention,
                core_attention_bias_type, core_attention_bias, alibi_slopes, inference_params,
                fp8_output, num_splits,
                score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors,
                qkv_layer is None, kv_layer is None, key_layer is None, qkv_interleave_dim,
                thd_attention_policies,
            )  # fmt: skip
            # One object is hashed faster than 28; a tensor is compared by operators of torch.
            if (
                attention_mask is cu_seqlens_q is cu_seqlens_kv is cu_seqlens_q_padded is None
                and cu_seqlens_kv_padded is core_attention_bias is alibi_slopes is None
                and given == _DEFAULTS
            ):
                given = None
            call_key, found = calls.look_up(self, tensors, given)
            if found is not None:
                self.__dict__["_last_call"] = found.choice
                return found.run(tensors)
        if num_splits != 1:
            check_splits(num_splits)
        more, mod = _PLAIN, None
        mods = score_mod, score_mod_bprop, score_mod_tensors, score_mod_bprop_tensors
        if not (mods[0] is mods[1] is mods[2] is mods[3] is None):
            mod = checked_score_mod(*mods, core_attention_bias_type)
        if bf16_backward or fp8_output or mod is not None:
            more = CoreOptions(bool(bf16_backward), bool(fp8_output), mod)
        layers = (query_layer, key_layer, value_layer)
        heads = given_heads(layers, qkv_layer, kv_layer, qkv_interleave_dim)
        options = AttentionOptions(
            attention_mask, None, attn_mask_type, window_size, bottom_right_diagonal, None,
            checkpoint_core_attention, inference_params, None, core_attention_bias_type,
            core_attention_bias, alibi_slopes, cu_seqlens_q, cu_seqlens_kv, cu_seqlens_q_padded,
            cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv, fast_zero_fill, pad_between_seqs,
            thd_attention_policies, thd_attention_policy_dispatch, softcap,
        )  # fmt: skip
        return self.attend(heads, options, qkv_format, call_key, more)

    _FORWARD = forward

    def attend(
        self,
        heads: Heads,
        options: AttentionOptions,
        qkv_format: str | None = None,
        call_key: tuple | None = None,
        more: CoreOptions = _PLAIN,
    ) -> Any:
        """`forward` with its other arguments in three; `call_key`: key of `KeptCalls`, or None."""
        if torch.compiler.is_compiling() and fp8.is_outside_graphs():
            refuse_export("FP8 under CustomRecipe")
            return _attend_outside(self, heads, options, qkv_format, None, more)
        qkv_format = self.qkv_format if qkv_format is None else qkv_format
        check_format(qkv_format, True)
        if self.cp_size > 1:
            return over_ranks.attend(self, heads, options, qkv_format, more)
        if options.thd_attention_policies is not None:
            return self._attend_by_policies(heads, options, qkv_format, more)
        if qkv_format in MIXED:
            heads, options, qkv_format = lowering.in_one_format(heads, options, qkv_format)
            call_key = None
        if options.inference_params is not None:
            heads, options = lowering.extend_cache(self, heads, options, qkv_format)
        query, key, value = heads.split()
        sizes = check_tensors(self, query, key, value, qkv_format, options)
        tokens = (query.shape[0], key.shape[0]) if qkv_format == "thd" else None
        choice, limits = self.limits_for(options, sizes, query, tokens, more.score_mod)
        if (
            call_key is not None
            and options.inference_params is None
            and not options.checkpoint_core_attention
        ):
            found = self._kept.find(self, heads, (choice, limits), qkv_format, call_key)
            if found is not None:
                return found.run(heads.tensors)
        if choice.backend == "plugin" and torch.compiler.is_compiling():
            refuse_export("the class of a plug-in", "select another one there")
            return _attend_outside(self, heads, options, qkv_format, None, more)
        return self._run_backend((choice.backend, options, more), heads, qkv_format, limits)

    def _run_backend(self, arguments: tuple, heads: Heads, qkv_format: str, limits: Limits) -> Any:
        """Run a backend as `_run` does, in a fork or checkpoint where the call wants it."""
        backend, options, _ = arguments
        dropout = self.attention_dropout if self.training else 0.0
        if self._get_tracker is not None or options.checkpoint_core_attention:
            out = self._run_in_fork(arguments, heads, qkv_format, limits, dropout)
        else:
            out = self._run(arguments, heads, qkv_format, limits, dropout)
        if backend == "native":
            return out
        out, *largest = out if self.return_max_logit else (out,)
        out = out.flatten(-2).contiguous()  # does nothing where it was written in this order
        return (out, *largest) if largest else out

    def _attend_by_policies(
        self, heads: Heads, options: AttentionOptions, qkv_format: str, more: CoreOptions
    ) -> Any:
        """`attend` of packed sequences with policies of their own: once for each policy."""
        query, key, _ = heads.split()
        calls = lowering.split_by_policy(options, qkv_format, (query.shape[0], key.shape[0]))
        if len(calls) > 1:
            more = more._replace(fp8_output=False)  # those of several have several scales
        results = [self.attend(heads, each, qkv_format, None, more) for each in calls]
        if not self.return_max_logit:
            return sum(results[1:], results[0])
        outputs, largest = zip(*results, strict=True)
        return sum(outputs[1:], outputs[0]), torch.stack(largest).amax(0)

    def _run(
        self,
        arguments: tuple[str, AttentionOptions, CoreOptions],
        heads: Heads,
        qkv_format: str,
        limits: Limits,
        dropout: float,
    ) -> Any:
        """Run a backend, in FP8 where that is in force: see `plan.attend`."""
        backend, options, more = arguments
        if backend == "plugin":
            return attend_by_class(self, heads, options, qkv_format)
        given = heads, qkv_format, limits, self.softmax_scale, dropout
        if backend == "native":
            return plan.attend(self, more, *given)
        if fp8.in_force(self):
            return attend_emulated(self, *given)
        return BACKENDS[backend].run(*given)

    def _run_in_fork(
        self, arguments: tuple, heads: Heads, qkv_format: str, limits: Limits, dropout: float
    ) -> Any:
        """`_run` inside a fork of the random state, or under a checkpoint."""
        tracker = self._get_tracker if dropout > 0.0 else None

        def run(bias: Tensor | None, sink: Tensor | None, *tensors: Tensor) -> Any:
            with contextlib.nullcontext() if tracker is None else tracker().fork():
                own = limits.replaced(bias=bias, sink=sink)
                given = heads._replace(tensors=tensors)
                return self._run(arguments, given, qkv_format, own, dropout)

        tensors = limits.bias, limits.sink, *heads.tensors
        if not arguments[1].checkpoint_core_attention:
            return run(*tensors)
        return checkpoint(run, *tensors, get_rng_state_tracker=tracker, use_reentrant=False)


_attend_outside = Outside(DotProductAttention.attend)
