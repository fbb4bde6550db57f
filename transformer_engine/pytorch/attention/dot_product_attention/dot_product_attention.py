# SPDX-License-Identifier: Apache-2.0
"""`DotProductAttention`: softmax(scale * query key^T) value with masks, windows and biases."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common.config import AttentionSwitches, attention_switches
from transformer_engine.pytorch.attention.dot_product_attention import masks, sdpa, unfused
from transformer_engine.pytorch.attention.dot_product_attention.arguments import (
    check_biases,
    check_format,
    refuse_fp8,
    unpack,
)
from transformer_engine.pytorch.attention.dot_product_attention.backends import (
    BIAS_TYPES,
    Choice,
    Situation,
    choose_backend,
)
from transformer_engine.pytorch.attention.dot_product_attention.masks import MaskType
from transformer_engine.pytorch.modes import constant_in_graphs
from transformer_engine.pytorch.module.base import NativeModule
from transformer_engine.pytorch.module.operands import DEVICES, DTYPES
from transformer_engine.pytorch.module.parameters import (
    positive_sizes,
    probabilities,
    refuse_options,
)
from transformer_engine.pytorch.parallel import TensorParallel, check_group
from transformer_engine.pytorch.recompute import checkpoint
from transformer_engine.pytorch.state import current_state

__all__ = ["DotProductAttention"]

_NAME = "DotProductAttention"


@constant_in_graphs
def _switches() -> AttentionSwitches:
    """What the environment allows now; in a graph, what it allowed when that was traced."""
    return attention_switches()


class _Decision(NamedTuple):
    """What was found out about calls of one kind.

    Attributes
    ----------
    kind : MaskType
        The mask type.
    window : tuple of int
        (left, right).
    bottom_right : bool
        The diagonal ends in the bottom right corner.
    bias : str
        Bias type.
    choice : Choice
        The backend and why.
    fused : bool
        The backend is "sdpa", which takes no limits.
    """

    kind: MaskType
    window: tuple[int, int]
    bottom_right: bool
    bias: str
    choice: Choice
    fused: bool


class DotProductAttention(TensorParallel, NativeModule):
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
        "sbhd" [sequence, batch, heads, channels] or "bshd". "thd" is not there yet.
    attn_mask_type : str, default "causal"
        Default of the forward: "no_mask", "padding", "causal", "padding_causal",
        "causal_bottom_right", "padding_causal_bottom_right" or "arbitrary".
    window_size : (int, int), optional
        Default of the forward: keys to the left and to the right of the diagonal; -1: no limit.
    bottom_right_diagonal : bool, optional
        Default of the forward: the diagonal of windows and ALiBi ends in the bottom right corner of
        the scores. Causal types have their own.
    sequence_parallel, tp_size, tp_group
        As of `Linear`.
    get_rng_state_tracker : callable, optional
        Returns a tracker whose ``fork()`` is entered while dropout is drawn. Recompute reads and
        sets its states: see `checkpoint`.
    layer_number : int, optional
        From 1.
    attention_type : str, default "self"
        "self" or "cross".
    cp_group, cp_global_ranks, cp_stream, cp_comm_type
        Context parallelism of one rank, which changes nothing; over more it is not there yet.
    softmax_scale : float, optional
        Factor of the scores; 1 / sqrt(channels) where None.
    softmax_type : str, default "vanilla"
        Others are not there yet.
    return_max_logit : bool, default False
        Not there yet.
    name : str, optional
        Name of the module for messages.

    Raises
    ------
    ValueError
        Sizes or names that do not go together.
    NotImplementedError
        An option that is not there yet.
    """

    cp_group: Any = None
    cp_stream: Any = None
    _OF_THE_PROCESS = ("tp_group", "cp_group", "cp_stream")

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
        del sequence_parallel
        self._set_parallel(tp_group, tp_size)
        refuse_options(
            _NAME,
            softmax_type=(softmax_type, "vanilla"),
            return_max_logit=(return_max_logit, False),
        )
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        positive_sizes(_NAME, num_attention_heads=num_attention_heads, num_gqa_groups=groups)
        if num_attention_heads % groups != 0:
            raise ValueError(
                f"{_NAME}: num_attention_heads={num_attention_heads}, num_gqa_groups="
                f"{num_gqa_groups}: the groups must divide the heads"
            )
        if attention_type not in ("self", "cross"):
            raise ValueError(f"{_NAME}: attention_type={attention_type!r}: 'self' or 'cross'")
        if layer_number is not None and layer_number < 1:
            raise ValueError(f"{_NAME}: layer_number={layer_number}: counts from 1")
        check_format(qkv_format)
        probabilities(_NAME, attention_dropout=attention_dropout)
        channels = kv_channels if isinstance(kv_channels, tuple | list) else (kv_channels,) * 2
        for size in channels:
            positive_sizes(_NAME, kv_channels=size)
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = groups
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = channels
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = masks.mask_type(attn_mask_type).name
        masks.window_of(window_size, masks.mask_type(attn_mask_type))  # raises where it must
        self.window_size = None if window_size is None else tuple(window_size)
        self.bottom_right_diagonal = bottom_right_diagonal
        self.layer_number = layer_number
        self.attention_type = attention_type
        self.softmax_scale = (
            1.0 / math.sqrt(channels[0]) if softmax_scale is None else softmax_scale
        )
        self.name = name
        self._get_tracker = get_rng_state_tracker
        self._decisions: dict[tuple, _Decision] = {}
        self._ran: Choice | None = None  # of the last call that was not compiled, for `report`

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Take a group that sequences are spread over.

        Parameters
        ----------
        cp_group : ProcessGroup, list of ProcessGroup or None
            Of one rank.
        cp_global_ranks, cp_stream, cp_comm_type
            How its ranks would talk to each other.

        Raises
        ------
        TypeError
            It is no process group.
        NotImplementedError
            It has more than one rank.
        """
        check_group(_NAME, "cp_group", cp_group)
        self.cp_group = cp_group
        self.cp_global_ranks = cp_global_ranks
        self.cp_stream = cp_stream
        self.cp_comm_type = cp_comm_type

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load nothing: what peers save here is the scaling state of FP8 attention."""
        lists = (missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        for key in (f"{prefix}_extra_state", f"{prefix}fused_attention._extra_state"):
            if key in unexpected_keys:
                unexpected_keys.remove(key)

    def extra_repr(self) -> str:
        """Sizes and defaults."""
        return (
            f"heads={self.num_attention_heads}, groups={self.num_gqa_groups}, "
            f"channels=({self.hidden_size_per_attention_head_k}, "
            f"{self.hidden_size_per_attention_head_v}), dropout={self.attention_dropout}, "
            f"qkv_format={self.qkv_format}, attn_mask_type={self.attn_mask_type}"
        )

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
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool = False,
        bf16_backward: bool | None = None,
        num_splits: int | None = 1,
        score_mod: Callable | None = None,
        score_mod_bprop: Callable | None = None,
        score_mod_tensors: Any = None,
        score_mod_bprop_tensors: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor:
        """Attend.

        Parameters
        ----------
        query_layer : Tensor
            [s, b, heads, channels] (sbhd) or [b, s, heads, channels] (bshd); fp32, fp16 or bf16, on
            the CPU or a CUDA device.
        key_layer, value_layer : Tensor
            The same with the sequence of the keys and `num_gqa_groups` heads.
        attention_mask : Tensor or pair of Tensor, optional
            bool, True: masked out. Padding types: [b, 1, 1, s], or a pair for queries and keys;
            "arbitrary": broadcastable to [b, heads, queries, keys]. The other types read none.
        qkv_format, attn_mask_type, window_size, bottom_right_diagonal
            As of the constructor, for this call.
        cu_seqlens_q, cu_seqlens_kv : Tensor, optional
            [b + 1] int32 sums of the sequence lengths: in place of the mask for padding types.
        cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv
            Of packed sequences, which are not there yet; read for no other format.
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
        fast_zero_fill, bf16_backward
            Ignored: they choose among implementations that there is one of here.
        inference_params, pad_between_seqs, fp8_output, num_splits, score_mod, score_mod_bprop, \
score_mod_tensors, score_mod_bprop_tensors
            Not there yet.
        qkv_layer : Tensor, optional
            Queries, keys and values in one, in place of the three: [.., 3, heads, channels], or
            [.., heads, 3, channels] with `qkv_interleave_dim` -2.
        kv_layer : Tensor, optional
            Keys and values in one, likewise with 2.
        qkv_interleave_dim : int, default -3
            Which dim of the packed tensors counts them: -3 or -2.

        Returns
        -------
        Tensor
            [s, b, heads * channels] or [b, s, heads * channels] in the dtype of the queries; under
            `torch.autocast` in its dtype.

        Raises
        ------
        TypeError, ValueError
            Tensors or arguments that do not go together.
        NotImplementedError
            An option that is not there yet.
        """
        del cu_seqlens_q_padded, cu_seqlens_kv_padded, max_seqlen_q, max_seqlen_kv
        del fast_zero_fill, bf16_backward
        if (
            inference_params is not None
            or pad_between_seqs
            or fp8_output
            or (num_splits is not None and num_splits != 1)
            or score_mod is not None
            or score_mod_bprop is not None
            or score_mod_tensors is not None
            or score_mod_bprop_tensors is not None
        ):
            refuse_options(
                _NAME,
                inference_params=(inference_params, None),
                pad_between_seqs=(bool(pad_between_seqs), False),
                fp8_output=(fp8_output, False),
                num_splits=(num_splits, 1),
                score_mod=(score_mod, None),
                score_mod_bprop=(score_mod_bprop, None),
                score_mod_tensors=(score_mod_tensors, None),
                score_mod_bprop_tensors=(score_mod_bprop_tensors, None),
            )
        if qkv_layer is not None or kv_layer is not None:
            given = (query_layer, key_layer, value_layer)
            query_layer, key_layer, value_layer = unpack(
                given, qkv_layer, kv_layer, qkv_interleave_dim
            )
        state = current_state()
        if state.enabled:
            refuse_fp8(state.recipe)
        form = self.qkv_format if qkv_format is None else qkv_format
        if window_size is None:
            window_size = self.window_size
        shape = self._check(query_layer, key_layer, value_layer, form)
        key = (
            self.attn_mask_type if attn_mask_type is None else attn_mask_type,
            tuple(window_size) if isinstance(window_size, list) else window_size,
            self.bottom_right_diagonal if bottom_right_diagonal is None else bottom_right_diagonal,
            core_attention_bias_type,
            shape[1] == shape[2],
            query_layer.dtype,
            _switches(),
        )
        if torch.compiler.is_compiling():
            decision = self._decide(*key)
        else:
            decision = self._decisions.get(key)
            if decision is None:
                decision = self._decisions[key] = self._decide(*key)
            self.__dict__["_ran"] = decision.choice
        if form == "sbhd":
            query = query_layer.permute(1, 2, 0, 3)
            keys = key_layer.permute(1, 2, 0, 3)
            values = value_layer.permute(1, 2, 0, 3)
        else:
            query = query_layer.transpose(1, 2)
            keys = key_layer.transpose(1, 2)
            values = value_layer.transpose(1, 2)
        dropout = self.attention_dropout if self.training else 0.0
        if decision.fused:
            limits = None
            if core_attention_bias is not None or alibi_slopes is not None:
                check_biases(
                    core_attention_bias_type,
                    core_attention_bias,
                    alibi_slopes,
                    self.num_attention_heads,
                )
        else:
            lengths = (cu_seqlens_q, cu_seqlens_kv)
            limits, diagonal = self._limits(decision, attention_mask, lengths, shape)
            biases = (core_attention_bias, alibi_slopes)
            bias = self._bias(decision, biases, diagonal, shape, query.device)
            limits = limits._replace(bias=bias)
        if self._get_tracker is not None or checkpoint_core_attention:
            out = self._attend_specially(
                decision, (query, keys, values), limits, dropout, checkpoint_core_attention
            )
        else:
            out = self._attend(decision, query, keys, values, limits, dropout)
        # [b, heads, s, channels]; contiguous does nothing where the backend wrote in this order
        out = out.permute(2, 0, 1, 3) if form == "sbhd" else out.transpose(1, 2)
        return out.flatten(2).contiguous()

    def _attend(
        self,
        decision: _Decision,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        limits: unfused.Limits | None,
        dropout: float,
    ) -> Tensor:
        """Run the backend: [batch, heads, length, channels] views in, the same out."""
        if decision.fused:
            causal = decision.kind.causal
            return sdpa.attend(query, key, value, causal, self.softmax_scale, dropout)
        return unfused.attend(query, key, value, limits, self.softmax_scale, dropout)

    def _attend_specially(
        self,
        decision: _Decision,
        layers: tuple[Tensor, Tensor, Tensor],
        limits: unfused.Limits | None,
        dropout: float,
        recompute: bool,
    ) -> Tensor:
        """`_attend` inside a fork of the random state, or under a checkpoint."""

        def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
            fork = contextlib.nullcontext()
            if self._get_tracker is not None and dropout > 0.0:
                fork = self._get_tracker().fork()
            given = None if limits is None else limits._replace(bias=bias)
            with fork:
                return self._attend(decision, query, key, value, given, dropout)

        bias = None if limits is None else limits.bias
        if not recompute:
            return attend(*layers, bias)
        tracker = self._get_tracker if dropout > 0.0 else None
        return checkpoint(attend, *layers, bias, get_rng_state_tracker=tracker, use_reentrant=False)

    # ---- what applies --------------------------------------------------------------------------

    def _check(self, query: Any, key: Any, value: Any, form: str) -> tuple[int, int, int]:
        """(batch, queries, keys); raises for tensors that do not go together."""
        if not (
            isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)
        ):
            found = tuple(type(t).__name__ for t in (query, key, value))
            raise TypeError(f"{_NAME}: query, key, value are {found}, expected three tensors")
        of_query, of_key, of_value = query.shape, key.shape, value.shape
        if form == "sbhd":
            s, b = 0, 1
        else:
            check_format(form)
            s, b = 1, 0
        if (
            len(of_query) != 4
            or len(of_key) != 4
            or of_key[:3] != of_value[:3]
            or of_query[b] != of_key[b]
            or of_query[2] != self.num_attention_heads
            or of_key[2] != self.num_gqa_groups
            or of_query[3] != self.hidden_size_per_attention_head_k
            or of_key[3] != self.hidden_size_per_attention_head_k
            or of_value[3] != self.hidden_size_per_attention_head_v
        ):
            k, v = self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v
            raise ValueError(
                f"{_NAME}: query {tuple(of_query)}, key {tuple(of_key)}, value {tuple(of_value)}: "
                f"expected {form} with {self.num_attention_heads} heads of {k}, "
                f"{self.num_gqa_groups} of {k} and {self.num_gqa_groups} of {v}, one batch size "
                "and one length of keys and values"
            )
        dtype = query.dtype
        if key.dtype is not dtype or value.dtype is not dtype or dtype not in DTYPES:
            raise TypeError(
                f"{_NAME}: query is {dtype}, key {key.dtype}, value {value.dtype}: expected one of "
                "torch.float32, torch.float16 and torch.bfloat16 for all"
            )
        device = query.device
        if device.type not in DEVICES or key.device != device or value.device != device:
            raise ValueError(
                f"{_NAME}: query is on {device}, key on {key.device}, value on {value.device}: "
                "expected the CPU or one CUDA device"
            )
        return of_query[b], of_query[s], of_key[s]

    def _decide(
        self,
        mask_name: str,
        window: Any,
        bottom_right: bool | None,
        bias: str,
        square: bool,
        dtype: torch.dtype,
        switches: AttentionSwitches,
    ) -> _Decision:
        """Find out what applies to calls of a kind."""
        kind = masks.mask_type(mask_name)
        window = masks.window_of(window, kind)
        diagonal = masks.diagonal_of(bottom_right, kind)
        if bias not in BIAS_TYPES:
            raise ValueError(
                f"{_NAME}: core_attention_bias_type={bias!r}, expected one of "
                f"{', '.join(BIAS_TYPES)}"
            )
        grouped = self.num_gqa_groups != self.num_attention_heads
        choice = choose_backend(
            Situation(kind, window, diagonal, square, bias, grouped, dtype, switches)
        )
        return _Decision(kind, window, diagonal, bias, choice, choice.backend == "sdpa")

    def _limits(
        self, decision: _Decision, mask: Any, lengths: tuple, shape: tuple[int, int, int]
    ) -> tuple[unfused.Limits, Any]:
        """Mask and window for the unfused backend, and the diagonal: one, or one a sequence."""
        batch, queries, keys = shape
        window = decision.window
        diagonal: Any = keys - queries if decision.bottom_right else 0
        if decision.kind.name == "arbitrary":
            sizes = (batch, self.num_attention_heads, queries, keys)
            mask = masks.arbitrary_mask(mask, sizes)
            return unfused.Limits(mask, None, window, diagonal), diagonal
        if not decision.kind.padding:
            return unfused.Limits(None, None, window, diagonal), diagonal
        if mask is not None:
            both = masks.padding_masks(mask, *shape)
        elif lengths[0] is not None:
            both = masks.lengths_to_masks(*lengths, *shape)
        else:
            raise ValueError(
                f"{_NAME}: mask type {decision.kind.name} needs attention_mask or cu_seqlens_q"
            )
        mask = both[0].transpose(2, 3) | both[1]
        if not decision.bottom_right or both[0] is both[1]:
            return unfused.Limits(mask, None, window, diagonal), diagonal
        diagonal = masks.length_difference(both)  # each sequence has its own: a mask says so
        outside = masks.window_mask(window, diagonal, queries, keys)
        mask = mask if outside is None else mask | outside
        return unfused.Limits(mask, None, masks.NO_WINDOW, 0), diagonal

    def _bias(
        self,
        decision: _Decision,
        biases: tuple[Tensor | None, Tensor | None],
        diagonal: Any,
        shape: tuple[int, int, int],
        device: torch.device,
    ) -> Tensor | None:
        """What the unfused backend adds to the scaled scores, of (bias, ALiBi slopes)."""
        bias, slopes = biases
        check_biases(decision.bias, bias, slopes, self.num_attention_heads)
        batch, queries, keys = shape
        if decision.bias == "alibi":
            if slopes is None:
                slopes = masks.default_alibi_slopes(self.num_attention_heads, device)
            return masks.alibi_bias(slopes, queries, keys, diagonal)
        if bias is None:
            return None
        sizes = (batch, self.num_attention_heads, queries, keys)
        if bias.dim() != 4 or any(
            n not in (1, size) for n, size in zip(bias.shape, sizes, strict=True)
        ):
            raise ValueError(
                f"{_NAME}: core_attention_bias: shape {tuple(bias.shape)}, expected {sizes}, each "
                "dim that or 1"
            )
        return bias.float() * self.softmax_scale if decision.bias == "pre_scale_bias" else bias
