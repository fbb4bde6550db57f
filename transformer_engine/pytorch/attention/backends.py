# SPDX-License-Identifier: Apache-2.0
"""Which backend runs an attention, and why not another one: one table of features.

The arguments of a call, the settings of its module and what is in force become a `CallKind`
(`kind_of_call`), which `FEATURES` is asked about: at a call (`limits_for`), when a module is made
(`check_constructible`), and in questions: `te.explain_attention`, `utils.get_attention_backend`.
What a backend learns to run leaves its row; a new feature of a call is a field of `CallKind` and a
row here.
"""

from collections.abc import Callable, Iterator
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
from transformer_engine.pytorch.attention import fp8, masks, torch_backends
from transformer_engine.pytorch.attention.lowering import in_one_format, options_for_cache
from transformer_engine.pytorch.attention.masks import (
    CAUSAL_WINDOW,
    NO_WINDOW,
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
from transformer_engine.pytorch.torchside.device import (
    accelerator,
    get_device_compute_capability,
    on_cuda,
    prepare_device,
    type_name,
)
from transformer_engine.pytorch.torchside.modes import (
    any_autocast,
    autocast_dtype,
    constant_in_graphs,
)

_NAME = "DotProductAttention"

# ---- the table -----------------------------------------------------------------------------------


OLDEST_CUDNN = 91900  # as of csrc/cuda/cudnn_library.c
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


class Feature(NamedTuple):
    """A row of the table: what a call may have, and who does not run it."""

    name: str  # a format of the fields of `CallKind`, which makes it concrete
    present: Callable[[CallKind], bool]
    lacking: dict[str, str]
    """Why not, by who does not run it: a key of `BACKENDS`, or "cudnn", which is behind `native` on
    CUDA. Formats too; "": the name says it all."""


def _always(call_kind: CallKind) -> bool:
    del call_kind
    return True


def _diagonal_beyond_mask_type(call_kind: CallKind) -> bool:
    """Tell whether what a query attends depends on a diagonal that its mask type does not tell."""
    if not call_kind.bottom_right or call_kind.square or call_kind.mask_type.bottom_right:
        return False
    return call_kind.window != NO_WINDOW or call_kind.bias == "alibi"


def _row(name: str, present: Callable[[CallKind], bool], **lacking: str) -> Feature:
    return Feature(name, present, lacking)


FEATURES: tuple[Feature, ...] = (
    _row("a class of a plug-in", lambda s: not s.plugin,
         plugin="get_flash_attention_class gives this library's own"),
    _row("switched off by NVTE_FLASH_ATTN", lambda s: not s.switches.flash, plugin=""),
    _row("flash-attn", _always,
         flash="not built: nothing here calls that package; native is the fused attention"),
    _row("switched off by NVTE_FUSED_ATTN", lambda s: not s.switches.fused, native=""),
    _row("switched off by NVTE_FLASH_ATTN and NVTE_FUSED_ATTN",
         lambda s: not (s.switches.flash or s.switches.fused),
         sdpa=""),
    _row("switched off by NVTE_UNFUSED_ATTN", lambda s: not s.switches.unfused, unfused=""),
    _row("compute capability {capability_text}", lambda s: s.capability != 90,
         cudnn="it was built and tested for 9.0"),
    _row("cuDNN {cudnn}", lambda s: s.cudnn < OLDEST_CUDNN,
         cudnn=f"expected at least {OLDEST_CUDNN}"),
    _row("FP8 (fp8_dpa, fp8_mha)", lambda s: s.fp8,
         plugin="such classes are given tensors in high precision",
         sdpa="it computes in high precision"),
    _row("FP8 that is not to be emulated", lambda s: s.fp8 and not s.switches.emulate,
         unfused="it computes in high precision; TE_UNFUSED_DPA_EMULATE_FP8=1 lets it round"),
    _row("attention by {unsupported_fp8}", lambda s: bool(s.unsupported_fp8),
         native="it casts whole tensors with one scale: TE_DPA_FP8_RECIPE may name DelayedScaling "
                "or Float8CurrentScaling for attention alone",
         unfused="likewise"),
    _row("mask type arbitrary in FP8", lambda s: s.fp8 and s.mask_type.name == "arbitrary",
         native="the operator takes no mask there"),
    _row("a padding mask in FP8", lambda s: s.fp8 and s.padding_by_mask,
         native="the operator takes lengths: give cu_seqlens_q in place of attention_mask"),
    _row("bias type {bias} in FP8", lambda s: s.fp8 and s.bias != "no_bias",
         native="the operator takes none there"),
    _row("softmax type {softmax} in FP8", lambda s: s.fp8 and s.softmax != "vanilla",
         native="the operator takes no sink there"),
    _row("return_max_logit in FP8", lambda s: s.fp8 and s.max_logit,
         native="the operator does not write it there"),
    _row("{channels} channels of a head in FP8",
         lambda s: s.fp8 and any(n % 16 != 0 or n > 256 for n in s.channels),
         cudnn="they are no multiples of 16 up to 256"),
    _row("one query in FP8", lambda s: s.fp8 and s.one_query, cudnn="it has no kernel"),
    _row("packed sequences (thd) in FP8", lambda s: s.fp8 and s.packed,
         cudnn="the kernel of cuDNN 9.19 ends with an illegal instruction"),
    _row("dropout in FP8", lambda s: s.fp8 and s.fp8_dropout,
         cudnn="the kernel of cuDNN 9.19 reads memory that is not its own"),
    _row("softcap in FP8", lambda s: s.fp8 and s.softcap,
         cudnn="the kernel of cuDNN 9.19 computes something else"),
    _row("fp32", lambda s: s.dtype is torch.float32, cudnn="cuDNN's kernels take fp16 and bf16"),
    _row("{channels} channels of a head", lambda s: any(n % 8 != 0 or n > 256 for n in s.channels),
         cudnn="they are no multiples of 8 up to 256"),
    _row("{cudnn_lacks}", lambda s: bool(s.cudnn_lacks), cudnn="cuDNN's kernels do not make it"),
    _row("NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
         lambda s: s.device != "cpu" and not s.switches.nondeterministic,
         sdpa="its gradients are not repeatable"),
    _row("packed sequences (thd)", lambda s: s.packed, sdpa="it takes no offsets"),
    _row("bias type {bias} of packed sequences",
         lambda s: s.packed and s.bias not in ("no_bias", "alibi"),
         native="the operator takes none"),
    _row("the gradient of the slopes of ALiBi", lambda s: s.slopes_grad,
         native="the operator has none of them", plugin="their class need not have any"),
    _row("slopes of ALiBi from the ends of packed sequences, or of each of them",
         lambda s: s.packed and s.bias == "alibi" and (s.bottom_right or s.slopes_apart),
         cudnn="its kernels count from the top left corner, with one slope of a head"),
    _row("softmax type {softmax}", lambda s: s.softmax != "vanilla",
         plugin="its forward is not told of it", sdpa="its sums have no further term"),
    _row("return_max_logit", lambda s: s.max_logit,
         plugin="its forward gives the output alone",
         cudnn="its kernels do not write them",
         sdpa="it keeps its scores to itself"),
    _row("score_mod", lambda s: s.score_mod,
         plugin="its forward is given none",
         native="its kernels call no functions of a program",
         sdpa="it keeps its scores to itself"),
    _row("softcap", lambda s: s.softcap,
         plugin="its forward is given none", sdpa="it keeps its scores to itself"),
    _row("softcap of scores with a pre_scale_bias",
         lambda s: s.softcap and s.bias == "pre_scale_bias",
         native="it adds a bias to what is capped"),
    _row("mask type {mask_type.name}",
         lambda s: s.mask_type.padding or s.mask_type.name == "arbitrary",
         sdpa="it would take a mask of the size of the scores"),
    _row("mask type arbitrary of a class", lambda s: s.mask_type.name == "arbitrary",
         plugin="masks of such classes are those of padding"),
    _row("bias type {bias} of a class", lambda s: s.bias not in ("no_bias", "alibi"),
         plugin="its forward is given no bias but the slopes of ALiBi"),
    _row("gaps between packed sequences", lambda s: s.gaps,
         plugin="its forward is not told where they are"),
    _row("a diagonal of another mask type", _diagonal_beyond_mask_type,
         plugin="its forward is told of the mask type alone"),
    _row("bias type {bias}", lambda s: s.bias != "no_bias", sdpa="it takes no bias"),
    _row("window {window}", lambda s: s.window not in (NO_WINDOW, CAUSAL_WINDOW),
         sdpa="it takes no window"),
    _row("a causal mask whose diagonal does not begin in the top left corner",
         lambda s: s.mask_type.causal and s.bottom_right and not s.square,
         sdpa="its causal masks begin there"),
    _row("grouped heads in fp32", lambda s: s.grouped and s.dtype is torch.float32,
         sdpa="none of its fused kernels takes them"),
)  # fmt: skip
"""Every feature that some backend does not run. The first one that a backend lacks is the reason
that is given, so what holds for whole machines comes first."""


class Backend(NamedTuple):
    """How it runs, and what it is.

    See `torch_backends.attend_in_steps` for the arguments; None: another way, or it is not built.
    """

    run: Callable | None
    title: str
    is_there: Callable[[CallKind], bool] = _always  # else nobody is told why it does not run


BACKENDS = {
    "plugin": Backend(
        None,
        "the class that a plug-in gives for get_flash_attention_class",
        lambda s: bool(s.plugin),
    ),
    "native": Backend(None, "the library's own operator (cuDNN on CUDA)"),
    "sdpa": Backend(torch_backends.attend_by_sdpa, "torch's scaled_dot_product_attention"),
    "unfused": Backend(
        torch_backends.attend_in_steps, "two batched products and the library's softmax"
    ),
    "flash": Backend(None, "the flash-attn package"),
}
"""By name, in order of preference."""


class Refusal(NamedTuple):
    """Why a backend does not run a call."""

    feature: str  # of the call
    why: str  # what is about it; "": nothing more to say

    def __str__(self) -> str:
        return f"{self.feature}: {self.why}" if self.why else self.feature


class Choice(NamedTuple):
    """The outcome."""

    backend: str  # a key of `BACKENDS`
    reasons: dict[str, Refusal]  # of each backend that would have been preferred


def _refusal(backend: str, call_kind: CallKind) -> Refusal | None:
    """The first feature of a kind of call that a backend lacks; None: it runs it."""
    behind = "cudnn" if backend == "native" and call_kind.device == "cuda" else backend
    for name, present, lacking in FEATURES:
        why = lacking.get(backend, lacking.get(behind))
        if why is not None and present(call_kind):
            fields = {**call_kind._asdict(), "capability_text": f"{call_kind.capability / 10:.1f}"}
            return Refusal(name.format(**fields), why.format(**fields))
    return None


def refusals(call_kind: CallKind) -> dict[str, Refusal | None]:
    """Why each backend does not run a kind of call, by name; None: it does."""
    return {name: _refusal(name, call_kind) for name in BACKENDS}


def choose_backend(call_kind: CallKind) -> Choice:
    """Choose the first backend that lacks nothing, and say why the ones before it were passed over.

    ValueError where none is left: the message has the feature that each lacks.
    """
    reasons: dict[str, Refusal] = {}
    for name, backend in BACKENDS.items():
        if not backend.is_there(call_kind):
            continue
        refusal = _refusal(name, call_kind)
        if refusal is None:
            return Choice(name, reasons)
        reasons[name] = refusal
    found = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    fix = ""
    if not call_kind.switches.unfused:
        fix = ". Unset these variables, or set NVTE_UNFUSED_ATTN=1: that backend runs most"
    raise ValueError(f"DotProductAttention: no backend is left ({found}){fix}")


# ---- the kind of a call, and the decision about it -----------------------------------------------


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
    """Compute capability (90 for 9.0) and version of cuDNN; zeros for others than CUDA."""
    if not on_cuda(device):
        return 0, 0
    prepare_device(device)
    major, minor = get_device_compute_capability(device)
    return 10 * major + minor, torch.backends.cudnn.version() or 0


class _Decision(NamedTuple):
    """Decision about calls of one kind; `limits` is None where each call has its own."""

    call_kind: CallKind
    choice: Choice
    limits: Limits | None


def _cudnn_lacks(
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
) -> tuple[Choice, Limits]:
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
        decision = _Decision(call_kind, choose_backend(call_kind), constant_limits(call_kind))
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
        _cudnn_lacks(options, sizes, dtype, cap, packed) if on_cuda(device) else "",
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
    cudnn_lacks: str = "",
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
    one_of(_NAME, BIAS_TYPES, core_attention_bias_type=bias)
    grouped = core.num_gqa_groups != core.num_attention_heads
    channels = core.hidden_size_per_attention_head_k, core.hidden_size_per_attention_head_v
    return CallKind(
        kind, window, masks.ends_bottom_right(bottom_right, kind), square, bias, grouped, dtype,
        type_name(device), switches, channels, *_device_facts(device), cudnn_lacks, packed,
        slopes_grad, slopes_apart, core.softmax_type, core.return_max_logit, in_fp8,
        has_mask and kind.padding, *more,
    )  # fmt: skip


def get_qkv_quantization_capabilities(core: Any) -> dict[str, bool]:
    """By which recipes this attention casts queries, keys and values, by their classes' names.

    True where some backend runs a call without mask, bias or dropout so, with the settings of
    the module and of the environment, on the machine's accelerator, or the CPU.
    """
    device = torch.device(accelerator())
    calls = list(_undemanding_kinds(core, device, _switches()))
    found, capped = {}, core.softcap > 0.0
    for recipe in _RECIPES:
        own = {"fp8": True, "unsupported_fp8": fp8.unsupported_name(recipe()), "softcap": capped}
        asked = (refusals(call._replace(**own)) for call in calls)
        found[recipe.__name__] = any(None in each.values() for each in asked)
    return found


def _undemanding_kinds(
    core: Any, device: torch.device = _CPU, switches: AttentionSwitches = _ALL_ON
) -> Iterator[CallKind]:
    """The kinds of call that ask the least of a backend, one of each dtype."""
    for dtype in DTYPES:
        yield _call_kind(core, "no_mask", None, None, "no_bias", True, dtype, device, switches)


def check_constructible(core: Any) -> None:
    """Raise for a module none of whose kinds of call any backend runs (ValueError)."""
    error: Any = None
    for call_kind in _undemanding_kinds(core):
        try:
            choose_backend(call_kind)
            return
        except ValueError as refused:
            error = refused
    raise error
