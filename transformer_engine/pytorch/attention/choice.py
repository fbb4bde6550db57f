# SPDX-License-Identifier: Apache-2.0
"""The kind of a call, and the decision about it.

The arguments of a call, the settings of its module and what is in force become a `CallKind`
(`kind_of_call`), which the table of `backends` is asked about: at a call (`limits_for`), when a
module is made (`check_constructible`), and in questions.
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
from transformer_engine.pytorch.attention import backends, fp8, masks
from transformer_engine.pytorch.attention.lowering import in_one_format, options_for_cache
from transformer_engine.pytorch.attention.masks import (
    CallKind,
    Limits,
    call_limits,
    constant_limits,
)
from transformer_engine.pytorch.attention.problem import (
    AttentionOptions,
    Heads,
    check_format,
    check_softcap,
    check_tensors,
)
from transformer_engine.pytorch.execution.overrides import attention_class_name
from transformer_engine.pytorch.module.operands import DTYPES
from transformer_engine.pytorch.module.parameters import one_of
from transformer_engine.pytorch.torchside.device import prepare_device
from transformer_engine.pytorch.torchside.modes import (
    any_autocast,
    autocast_dtype,
    constant_in_graphs,
)

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
    choice: backends.Choice
    limits: Limits | None


def _unusual(
    options: AttentionOptions, sizes: tuple[int, ...], dtype: torch.dtype, cap: float, packed: bool
) -> str:
    """Feature of a mask, a bias, its gradient or a softcap that the operator does not take on CUDA.

    "": nothing. `dtype` is that of the queries. The same with gradients switched off: a recompute
    must run what the first pass ran.
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
    if options.core_attention_bias_type != "post_scale_bias" or bias.dtype is not dtype:
        return "the gradient of a bias in another dtype than the queries, or before the scale"
    if tuple(bias.shape[2:]) != tuple(sizes[2:]):
        return "the gradient of a bias that several queries or keys share"
    if cap > 0.0:
        return "the gradient of a bias with a softcap"
    return ""


def kind_of_call(
    core: Any,
    heads: Heads,
    options: AttentionOptions,
    qkv_format: str | None = None,
    modified: bool = False,
    device: torch.device | None = None,
) -> CallKind:
    """The kind of a call, as `attend` would find it.

    `modified`: with a `score_mod`. `device` is that of the call, where its tensors stand for
    others on the meta device.
    """
    qkv_format = qkv_format or core.qkv_format
    check_format(qkv_format, True)
    heads, options, qkv_format = in_one_format(heads, options, qkv_format)
    if options.inference_params is not None:
        options = options_for_cache(options, core.attn_mask_type, core.window_size)
        of_keys = options.inference_params.lengths.cu_seqlens_kv
        longest = options.inference_params.max_sequence_length
        options = options._replace(cu_seqlens_kv=of_keys, max_seqlen_kv=longest)
    query, key, value = heads.split()
    sizes = check_tensors(core, query, key, value, qkv_format, options)
    packed = qkv_format == "thd"
    device = query.device if device is None else device
    return _call_kind(core, *_facts(core, options, sizes, query, packed, modified, device))


def limits_for(
    core: Any,
    options: AttentionOptions,
    sizes: tuple[int, ...],
    query: Tensor,
    tokens: tuple[int, int] | None = None,
    score_mod: Any = None,
) -> tuple[backends.Choice, Limits]:
    """Which backend runs a call, and what its queries may attend.

    `sizes` are (batch, heads, queries, keys); `query` has the dtype and device of the queries;
    `tokens` are all queries and keys of packed sequences.
    """
    of = options, sizes, query, tokens is not None, score_mod is not None, query.device
    call_kind, choice, limits = _decision_for(core, _facts(core, *of))
    if (
        limits is None
        or options.core_attention_bias is not None
        or options.alibi_slopes is not None
    ):
        given = (call_kind, options, sizes, core.softmax_scale, query)
        limits = call_limits(*given, (0, 0) if tokens is None else tokens)
    if score_mod is not None:
        limits = limits.replaced(score_mod=score_mod)
    if call_kind.softcap:
        in_cap = call_kind.bias == "pre_scale_bias"
        limits = limits.replaced(softcap=_cap_of(core, options), bias_in_cap=in_cap)
    sink = _sink(core, query)
    return choice, limits if sink is None else limits.replaced(sink=sink)


def _cap_of(core: Any, options: AttentionOptions) -> float:
    """Bound of the scores of a call; 0: none."""
    return check_softcap(core.softcap if options.softcap is None else options.softcap)


def _sink(core: Any, query: Tensor) -> Tensor | None:
    """Scores without a key [heads] fp32; None for a vanilla softmax."""
    if core.softmax_type == "vanilla":
        return None
    if core.softmax_type == "off-by-one":  # `softmax_offset` need not be where the queries are
        return query.new_zeros(core.num_attention_heads, dtype=torch.float32)
    return core.softmax_offset.float()


def _decision_for(core: Any, facts: tuple) -> _Decision:
    """Return the decision about a call of such facts, remembered for the next one of its kind."""
    traced = torch.compiler.is_compiling()
    decision = None if traced else core._decisions.get(facts)
    if decision is None:
        call_kind = _call_kind(core, *facts)
        decision = _Decision(
            call_kind, backends.choose_backend(call_kind), constant_limits(call_kind)
        )
    if not traced:
        core._decisions[facts] = decision
        core.__dict__["_last_call"] = decision.choice
    return decision


def _facts(
    core: Any,
    options: AttentionOptions,
    sizes: tuple[int, ...],
    query: Tensor,
    packed: bool,
    modified: bool,
    device: torch.device,
) -> tuple:
    """All that the choice of a backend for a call depends on: arguments of `_call_kind`."""
    mask, bottom_right = options.attn_mask_type, options.bottom_right_diagonal
    window = core.window_size if options.window_size is None else options.window_size
    in_fp8, cap, dtype = fp8.in_force(core), _cap_of(core, options), query.dtype
    slopes = options.alibi_slopes
    if slopes is not None:
        masks.check_real(slopes, f"{_NAME}: alibi_slopes")
    if any_autocast():
        dtype = autocast_dtype(device.type) or dtype
    return (
        core.attn_mask_type if mask is None else mask,
        tuple(window) if isinstance(window, list) else window,
        core.bottom_right_diagonal if bottom_right is None else bottom_right,
        options.core_attention_bias_type,
        sizes[2] == sizes[3],
        dtype,
        device,
        _switches(),
        "" if device.type == "cpu" else _unusual(options, sizes, dtype, cap, packed),
        packed,
        not packed and not options.has_lengths(),
        slopes is not None and slopes.dim() == 2 and slopes.shape[0] > 1,
        slopes is not None and slopes.requires_grad,
        in_fp8,
        options.attention_mask is not None and options.inference_params is None,
        sizes[2] == 1 and not packed,
        in_fp8 and core.training and core.attention_dropout > 0.0,
        modified,
        fp8.unsupported_recipe(core) if in_fp8 else "",
        attention_class_name(),
        packed and options.has_gaps(),
        cap > 0.0,
    )


def _call_kind(
    core: Any,
    mask: str,
    window: tuple[int, int] | None,
    bottom_right: bool | None,
    bias: str,
    square: bool,
    dtype: torch.dtype,
    device: torch.device,
    switches: AttentionSwitches,
    unusual: str = "",
    packed: bool = False,
    full_length: bool = False,
    slopes_apart: bool = False,
    slopes_grad: bool = False,
    in_fp8: bool = False,
    has_mask: bool = False,
    *more: Any,
) -> CallKind:
    """The kind of call of such facts; `more` are fields of it, from `one_query` on."""
    kind = masks.mask_type(mask)
    if packed:
        kind = masks.with_padding(kind, "qkv_format='thd'")
    window = masks.effective_window(window, kind)
    if full_length:
        kind = masks.without_padding(kind)
    one_of(_NAME, backends.BIAS_TYPES, core_attention_bias_type=bias)
    grouped = core.num_gqa_groups != core.num_attention_heads
    channels = core.hidden_size_per_attention_head_k, core.hidden_size_per_attention_head_v
    return CallKind(
        kind, window, masks.ends_bottom_right(bottom_right, kind), square, bias, grouped, dtype,
        device.type, switches, channels, *_device_facts(device), unusual, packed, slopes_grad,
        slopes_apart, core.softmax_type, core.return_max_logit, in_fp8,
        has_mask and kind.padding, *more,
    )  # fmt: skip


def get_qkv_quantization_capabilities(core: Any) -> dict[str, bool]:
    """By which recipes this attention casts queries, keys and values, by their classes' names.

    True where some backend runs a call without mask, bias or dropout so, with the settings of
    the module and of the environment, on the current device: CUDA where there is one.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    calls = list(_mildest_calls(core, device, _switches()))
    found, capped = {}, core.softcap > 0.0
    for recipe in _RECIPES:
        own = {"fp8": True, "fp8_unbuilt": fp8.unsupported_name(recipe()), "softcap": capped}
        asked = (backends.refusals(call._replace(**own)) for call in calls)
        found[recipe.__name__] = any(None in each.values() for each in asked)
    return found


def _mildest_calls(
    core: Any, device: torch.device = _CPU, switches: AttentionSwitches = _ALL_ON
) -> Iterator[CallKind]:
    """The kinds of call that ask the least of a backend, one of each dtype."""
    for dtype in DTYPES:
        yield _call_kind(core, "no_mask", None, None, "no_bias", True, dtype, device, switches)


def check_constructible(core: Any) -> None:
    """Raise for a module none of whose kinds of call any backend runs (ValueError)."""
    error: Any = None
    for call_kind in _mildest_calls(core):
        try:
            backends.choose_backend(call_kind)
            return
        except ValueError as refused:
            error = refused
    raise error
