# SPDX-License-Identifier: Apache-2.0
"""Which backend runs an attention, and why not another one: one table of features.

A call is a `CallKind` here (`choice.kind_of_call`). From `FEATURES` come the choice at a call
(`choose_backend`), what no backend runs and so is refused when a module is made
(`choice.check_constructible`), the answers of `te.explain_attention` and of
`utils.get_attention_backend`.
What a backend learns to run leaves its row; a new feature of a call is a field of `CallKind` and a
row here.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from transformer_engine.pytorch.attention import torch_backends
from transformer_engine.pytorch.attention.masks import (
    CAUSAL_WINDOW,
    NO_WINDOW,
    CallKind,
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
    CUDA, or "cpu", behind it elsewhere. Formats too; "": the name says it all."""


def _always(call_kind: CallKind) -> bool:
    del call_kind
    return True


def _corner_untold(call_kind: CallKind) -> bool:
    """Tell whether what a query attends depends on a diagonal that its mask type does not tell."""
    if not call_kind.bottom_right or call_kind.square or call_kind.mask_type.bottom_right:
        return False
    return call_kind.window != NO_WINDOW or call_kind.bias == "alibi"


FEATURES: tuple[Feature, ...] = (
    Feature(
        "a class of a plug-in",
        lambda s: not s.plugin,
        {"plugin": "get_flash_attention_class gives this library's own"},
    ),
    Feature("switched off by NVTE_FLASH_ATTN", lambda s: not s.switches.flash, {"plugin": ""}),
    Feature(
        "flash-attn",
        _always,
        {"flash": "not built: nothing here calls that package; native is the fused attention"},
    ),
    Feature("switched off by NVTE_FUSED_ATTN", lambda s: not s.switches.fused, {"native": ""}),
    Feature(
        "switched off by NVTE_FLASH_ATTN and NVTE_FUSED_ATTN",
        lambda s: not (s.switches.flash or s.switches.fused),
        {"sdpa": ""},
    ),
    Feature("switched off by NVTE_UNFUSED_ATTN", lambda s: not s.switches.unfused, {"unfused": ""}),
    Feature(
        "compute capability {capability_text}",
        lambda s: s.capability != 90,
        {"cudnn": "it was built and tested for 9.0"},
    ),
    Feature(
        "cuDNN {cudnn}",
        lambda s: s.cudnn < OLDEST_CUDNN,
        {"cudnn": f"expected at least {OLDEST_CUDNN}"},
    ),
    Feature(
        "FP8 (fp8_dpa, fp8_mha)",
        lambda s: s.fp8,
        {
            "plugin": "such classes are given tensors in high precision",
            "sdpa": "it computes in high precision",
        },
    ),
    Feature(
        "FP8 that is not to be emulated",
        lambda s: s.fp8 and not s.switches.emulate,
        {"unfused": "it computes in high precision; TE_UNFUSED_DPA_EMULATE_FP8=1 lets it round"},
    ),
    Feature(
        "attention by {fp8_unbuilt}",
        lambda s: bool(s.fp8_unbuilt),
        {
            "native": "it casts whole tensors with one scale: TE_DPA_FP8_RECIPE may name "
            "DelayedScaling or Float8CurrentScaling for attention alone",
            "unfused": "likewise",
        },
    ),
    Feature(
        "mask type arbitrary in FP8",
        lambda s: s.fp8 and s.mask_type.name == "arbitrary",
        {"native": "the operator takes no mask there"},
    ),
    Feature(
        "a padding mask in FP8",
        lambda s: s.fp8 and s.padding_by_mask,
        {"native": "the operator takes lengths: give cu_seqlens_q in place of attention_mask"},
    ),
    Feature(
        "bias type {bias} in FP8",
        lambda s: s.fp8 and s.bias != "no_bias",
        {"native": "the operator takes none there"},
    ),
    Feature(
        "softmax type {softmax} in FP8",
        lambda s: s.fp8 and s.softmax != "vanilla",
        {"native": "the operator takes no sink there"},
    ),
    Feature(
        "return_max_logit in FP8",
        lambda s: s.fp8 and s.max_logit,
        {"native": "the operator does not write it there"},
    ),
    Feature(
        "{channels} channels of a head in FP8",
        lambda s: s.fp8 and any(n % 16 != 0 or n > 256 for n in s.channels),
        {"cudnn": "they are no multiples of 16 up to 256"},
    ),
    Feature("one query in FP8", lambda s: s.fp8 and s.one_query, {"cudnn": "it has no kernel"}),
    Feature(
        "packed sequences (thd) in FP8",
        lambda s: s.fp8 and s.packed,
        {"cudnn": "the kernel of cuDNN 9.19 ends with an illegal instruction"},
    ),
    Feature(
        "dropout in FP8",
        lambda s: s.fp8 and s.fp8_dropout,
        {"cudnn": "the kernel of cuDNN 9.19 reads memory that is not its own"},
    ),
    Feature(
        "softcap in FP8",
        lambda s: s.fp8 and s.softcap,
        {"cudnn": "the kernel of cuDNN 9.19 computes something else"},
    ),
    Feature(
        "fp32", lambda s: s.dtype is torch.float32, {"cudnn": "cuDNN's kernels take fp16 and bf16"}
    ),
    Feature(
        "{channels} channels of a head",
        lambda s: any(n % 8 != 0 or n > 256 for n in s.channels),
        {"cudnn": "they are no multiples of 8 up to 256"},
    ),
    Feature("{unusual}", lambda s: bool(s.unusual), {"cudnn": "cuDNN's kernels do not make it"}),
    Feature(
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0",
        lambda s: s.device != "cpu" and not s.switches.nondeterministic,
        {"sdpa": "its gradients are not repeatable"},
    ),
    Feature("packed sequences (thd)", lambda s: s.packed, {"sdpa": "it takes no offsets"}),
    Feature(
        "bias type {bias} of packed sequences",
        lambda s: s.packed and s.bias not in ("no_bias", "alibi"),
        {"native": "the operator takes none"},
    ),
    Feature(
        "the gradient of the slopes of ALiBi",
        lambda s: s.slopes_grad,
        {"native": "the operator has none of them", "plugin": "their class need not have any"},
    ),
    Feature(
        "slopes of ALiBi from the ends of packed sequences, or of each of them",
        lambda s: s.packed and s.bias == "alibi" and (s.bottom_right or s.slopes_apart),
        {"cudnn": "its kernels count from the top left corner, with one slope of a head"},
    ),
    Feature(
        "softmax type {softmax}",
        lambda s: s.softmax != "vanilla",
        {"plugin": "its forward is not told of it", "sdpa": "its sums have no further term"},
    ),
    Feature(
        "return_max_logit",
        lambda s: s.max_logit,
        {
            "plugin": "its forward gives the output alone",
            "cudnn": "its kernels do not write them",
            "sdpa": "it keeps its scores to itself",
        },
    ),
    Feature(
        "score_mod",
        lambda s: s.score_mod,
        {
            "plugin": "its forward is given none",
            "native": "its kernels call no functions of a program",
            "sdpa": "it keeps its scores to itself",
        },
    ),
    Feature(
        "softcap",
        lambda s: s.softcap,
        {"plugin": "its forward is given none", "sdpa": "it keeps its scores to itself"},
    ),
    Feature(
        "softcap of scores with a pre_scale_bias",
        lambda s: s.softcap and s.bias == "pre_scale_bias",
        {"native": "it adds a bias to what is capped"},
    ),
    Feature(
        "mask type {mask_type.name}",
        lambda s: s.mask_type.padding or s.mask_type.name == "arbitrary",
        {"sdpa": "it would take a mask of the size of the scores"},
    ),
    Feature(
        "mask type arbitrary of a class",
        lambda s: s.mask_type.name == "arbitrary",
        {"plugin": "masks of such classes are those of padding"},
    ),
    Feature(
        "bias type {bias} of a class",
        lambda s: s.bias not in ("no_bias", "alibi"),
        {"plugin": "its forward is given no bias but the slopes of ALiBi"},
    ),
    Feature(
        "gaps between packed sequences",
        lambda s: s.gaps,
        {"plugin": "its forward is not told where they are"},
    ),
    Feature(
        "a diagonal of another mask type",
        _corner_untold,
        {"plugin": "its forward is told of the mask type alone"},
    ),
    Feature("bias type {bias}", lambda s: s.bias != "no_bias", {"sdpa": "it takes no bias"}),
    Feature(
        "window {window}",
        lambda s: s.window not in (NO_WINDOW, CAUSAL_WINDOW),
        {"sdpa": "it takes no window"},
    ),
    Feature(
        "a causal mask whose diagonal does not begin in the top left corner",
        lambda s: s.mask_type.causal and s.bottom_right and not s.square,
        {"sdpa": "its causal masks begin there"},
    ),
    Feature(
        "grouped heads in fp32",
        lambda s: s.grouped and s.dtype is torch.float32,
        {"sdpa": "none of its fused kernels takes them"},
    ),
)
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
    behind = ("cpu" if call_kind.device == "cpu" else "cudnn") if backend == "native" else backend
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
