# SPDX-License-Identifier: Apache-2.0
"""Choice of a backend by a `DotProductAttention`: the kind of a call, its backend, its limits.

`backends.py` has the table that chooses; here the arguments of a call, the module's settings and
what is in force become the `CallKind` that the table is asked about.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common.config import AttentionSwitches, attention_switches
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.attention import fp8, masks
from transformer_engine.pytorch.attention.backends import (
    BIAS_TYPES,
    Choice,
    choose_backend,
    refusals,
)
from transformer_engine.pytorch.attention.cache_adapter import options_for_cache
from transformer_engine.pytorch.attention.fp8 import unbuilt_name
from transformer_engine.pytorch.attention.masks import (
    CallKind,
    Limits,
    constant_limits,
    limits_of,
)
from transformer_engine.pytorch.attention.problem import (
    AttentionOptions,
    Heads,
    check_format,
    check_softcap,
    check_tensors,
    in_one_format,
)
from transformer_engine.pytorch.execution.overrides import attention_class_name
from transformer_engine.pytorch.module.operands import DTYPES
from transformer_engine.pytorch.module.parameters import one_of
from transformer_engine.pytorch.torchside.device import prepare_device
from transformer_engine.pytorch.torchside.modes import any_autocast, constant_in_graphs

_NAME = "DotProductAttention"
_CPU = torch.device("cpu")
_RECIPES = (
    DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling,
)  # fmt: skip
_ALL_ON = AttentionSwitches(True, True, True)
"""Of the environment when a module is made: a program may still set it before the call."""


_switches = constant_in_graphs(attention_switches)
"""Switches of the environment now; in a graph, those when it was traced."""


_LARGEST_CAP = 2.0**100  # of cuDNN's attention: see csrc/cuda/attention_supports.c


@constant_in_graphs
def _device_facts(device: torch.device) -> tuple[int, int]:
    """Compute capability (90 for 9.0) and version of cuDNN; zeros for the CPU."""
    if device.type != "cuda":
        return 0, 0
    prepare_device(device)
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor, torch.backends.cudnn.version() or 0


class _Decision(NamedTuple):
    """Decision about calls of one kind; `limits` is None where each call has its own."""

    call_kind: CallKind
    choice: Choice
    limits: Limits | None


def _dtype_of(query: Tensor) -> torch.dtype:
    """The dtype that attention computes in."""
    on = query.device.type
    return torch.get_autocast_dtype(on) if torch.is_autocast_enabled(on) else query.dtype


def _unusual(
    options: AttentionOptions, sizes: tuple[int, ...], query: Tensor, cap: float, packed: bool
) -> str:
    """Feature of a mask, a bias, its gradient or a softcap that the operator does not take on CUDA.

    "": nothing. The same with gradients switched off: a recompute must run what the first pass ran.
    """
    bias = options.core_attention_bias
    if cap > _LARGEST_CAP:
        return "a softcap above 2^100, which leaves the scores as they are"
    if packed:
        return ""
    if sizes[3] == 1:
        with_bias = options.core_attention_bias_type != "no_bias"
        return (
            "a mask or bias over one key" if with_bias or options.attention_mask is not None else ""
        )
    # What is no tensor the limits refuse.
    if not isinstance(bias, Tensor) or not bias.requires_grad or bias.dim() != 4:
        return ""
    if options.core_attention_bias_type != "post_scale_bias" or bias.dtype is not _dtype_of(query):
        return "the gradient of a bias in another dtype than the queries, or before the scale"
    if tuple(bias.shape[2:]) != tuple(sizes[2:]):
        return "the gradient of a bias that several queries or keys share"
    if cap > 0.0:
        return "the gradient of a bias with a softcap"
    return ""


def _are_apart(slopes: Tensor | None) -> bool:
    """Return whether the slopes of ALiBi are of each sequence, not of all."""
    if slopes is None:
        return False
    masks.check_numbers(slopes, f"{_NAME}: alibi_slopes")
    return slopes.dim() == 2 and slopes.shape[0] > 1


class BackendChoice:
    """The part of `DotProductAttention` that chooses a backend for its calls."""

    attn_mask_type: str
    window_size: tuple[int, int] | None
    bottom_right_diagonal: bool | None
    qkv_format: str
    num_attention_heads: int
    num_gqa_groups: int
    hidden_size_per_attention_head_k: int
    hidden_size_per_attention_head_v: int
    softcap: float
    softmax_scale: float
    softmax_type: str
    softmax_offset: Tensor | None
    return_max_logit: bool
    attention_dropout: float
    training: bool
    _decisions: dict[tuple, _Decision]

    def call_kind_of(
        self,
        query: Any,
        key: Any,
        value: Any,
        options: AttentionOptions,
        qkv_format: str | None = None,
        modified: bool = False,
    ) -> CallKind:
        """The kind of a call, as `attend` would find it: of tensors, or what has their shapes.

        `modified`: with a `score_mod`.
        """
        qkv_format = qkv_format or self.qkv_format
        check_format(qkv_format, True)
        given = in_one_format(Heads((query, key, value)), options, qkv_format)
        (query, key, value), options, qkv_format = given[0].tensors, *given[1:]
        if options.inference_params is not None:
            options = options_for_cache(options, self.attn_mask_type, self.window_size)
            of_keys = options.inference_params.lengths.cu_seqlens_kv
            longest = options.inference_params.max_sequence_length
            options = options._replace(cu_seqlens_kv=of_keys, max_seqlen_kv=longest)
        sizes = check_tensors(self, query, key, value, qkv_format, options)
        of = options, sizes, query, qkv_format == "thd", modified
        return self._call_kind(self._kind_of(*of))

    def limits_for(
        self,
        options: AttentionOptions,
        sizes: tuple[int, ...],
        query: Tensor,
        tokens: tuple[int, int] | None = None,
        score_mod: Any = None,
    ) -> tuple[Choice, Limits]:
        """Which backend runs a call, and what its queries may attend.

        `sizes` are (batch, heads, queries, keys); `query` has the dtype and device of the queries;
        `tokens` are all queries and keys of packed sequences.
        """
        of = options, sizes, query, tokens is not None, score_mod is not None
        call_kind, choice, limits = self._decision_for(*of)
        if (
            limits is None
            or options.core_attention_bias is not None
            or options.alibi_slopes is not None
        ):
            given = (call_kind, options, sizes, self.softmax_scale, query)
            limits = limits_of(*given, (0, 0) if tokens is None else tokens)
        if score_mod is not None:
            limits = limits.but(score_mod=score_mod)
        if call_kind.softcap:
            in_cap = call_kind.bias == "pre_scale_bias"
            limits = limits.but(softcap=self._cap_of(options), bias_in_cap=in_cap)
        sink = self._sink(query)
        return choice, limits if sink is None else limits.but(sink=sink)

    def _cap_of(self, options: AttentionOptions) -> float:
        """Bound of the scores of a call; 0: none."""
        return check_softcap(self.softcap if options.softcap is None else options.softcap)

    def _sink(self, query: Tensor) -> Tensor | None:
        """Scores without a key [heads] fp32; None for a vanilla softmax."""
        if self.softmax_type == "vanilla":
            return None
        if self.softmax_type == "off-by-one":  # `softmax_offset` need not be where the queries are
            return query.new_zeros(self.num_attention_heads, dtype=torch.float32)
        return self.softmax_offset.float()

    def _decision_for(
        self,
        options: AttentionOptions,
        sizes: tuple[int, ...],
        query: Tensor,
        packed: bool,
        modified: bool,
    ) -> _Decision:
        """Return the decision about a call, remembered for the next one of its kind."""
        key = self._kind_of(options, sizes, query, packed, modified)
        if torch.compiler.is_compiling():
            return self._decide(key)
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._decisions[key] = self._decide(key)
        self.__dict__["_ran"] = decision.choice
        return decision

    def _kind_of(
        self,
        options: AttentionOptions,
        sizes: tuple[int, ...],
        query: Any,
        packed: bool,
        modified: bool,
    ) -> tuple:
        """All that the choice of a backend for a call depends on; of `query` dtype and device."""
        mask, bottom_right = options.attn_mask_type, options.bottom_right_diagonal
        in_fp8, cap = fp8.in_force(self), self._cap_of(options)
        window = self.window_size if options.window_size is None else options.window_size
        return (
            self.attn_mask_type if mask is None else mask,
            tuple(window) if isinstance(window, list) else window,
            self.bottom_right_diagonal if bottom_right is None else bottom_right,
            options.core_attention_bias_type,
            sizes[2] == sizes[3],
            _dtype_of(query) if any_autocast() else query.dtype,
            query.device,
            _switches(),
            "" if query.device.type == "cpu" else _unusual(options, sizes, query, cap, packed),
            packed,
            not packed and not options.tells_lengths(),
            _are_apart(options.alibi_slopes),
            options.alibi_slopes is not None and options.alibi_slopes.requires_grad,
            in_fp8,
            options.attention_mask is not None and options.inference_params is None,
            sizes[2] == 1 and not packed,
            in_fp8 and self.training and self.attention_dropout > 0.0,
            modified,
            fp8.unbuilt(self) if in_fp8 else "",
            attention_class_name(),
            packed and options.has_gaps(),
            cap > 0.0,
        )

    def _call_kind(self, key: tuple) -> CallKind:
        """The kind of call of a key."""
        name, window, bottom_right, bias, square, dtype, device, switches, unusual, *more = key
        packed, are_full, slopes_apart, slopes_grad, in_fp8, has_mask, one_query, *last = more
        kind = masks.mask_type(name)
        if packed:
            kind = masks.padding_form(kind, "qkv_format='thd'")
        window = masks.window_of(window, kind)
        if are_full:
            kind = masks.full_form(kind)
        diagonal = masks.diagonal_of(bottom_right, kind)
        one_of(_NAME, BIAS_TYPES, core_attention_bias_type=bias)
        grouped = self.num_gqa_groups != self.num_attention_heads
        channels = self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v
        return CallKind(
            kind, window, diagonal, square, bias, grouped, dtype, device.type, switches, channels,
            *_device_facts(device), unusual, packed, slopes_grad, slopes_apart,
            self.softmax_type, self.return_max_logit, in_fp8, has_mask and kind.padding, one_query,
            *last,
        )  # fmt: skip

    def _decide(self, key: tuple) -> _Decision:
        """Find out what applies to calls of a kind."""
        call_kind = self._call_kind(key)
        return _Decision(call_kind, choose_backend(call_kind), constant_limits(call_kind))

    def get_qkv_quantization_capabilities(self) -> dict[str, bool]:
        """By which recipes this attention casts queries, keys and values, by their classes' names.

        True where some backend runs a call without mask, bias or dropout so, with the settings of
        the module and of the environment, on the current device: CUDA where there is one.
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        calls = list(self._mildest_calls(device, _switches()))
        found, capped = {}, self.softcap > 0.0
        for recipe in _RECIPES:
            own = {"fp8": True, "fp8_unbuilt": unbuilt_name(recipe()), "softcap": capped}
            asked = (refusals(call._replace(**own)) for call in calls)
            found[recipe.__name__] = any(None in each.values() for each in asked)
        return found

    def _mildest_calls(
        self, device: torch.device = _CPU, switches: AttentionSwitches = _ALL_ON
    ) -> Iterator[CallKind]:
        """The kinds of call that ask the least of a backend, one of each dtype."""
        for dtype in DTYPES:
            key = "no_mask", None, None, "no_bias", True, dtype, device, switches, ""
            yield self._call_kind((*key, *[False] * 9, "", "", False, False))
