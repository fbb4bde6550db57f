# SPDX-License-Identifier: Apache-2.0
"""Attention as a node of a plan, of a layer's or its own: by the library's operator."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.attention_graphs import AttentionSpec
from transformer_engine.pytorch.attention import fp8, native
from transformer_engine.pytorch.attention.backends import Choice
from transformer_engine.pytorch.attention.limits import Limits
from transformer_engine.pytorch.module.layer_call import Attending

__all__ = ["attending", "is_constant", "sink_of"]


_NOTHING = ((), (), False, False)


def attending(
    core: Any,
    how: tuple[Choice, Limits],
    slices: tuple,
    given: tuple[tuple, tuple, bool, bool] = _NOTHING,
    qkv_format: str | None = None,
    about: tuple[str, int] = ("cpu", 0),
    hands_over: bool = False,
) -> Attending | None:
    """How a call attends as part of a plan; None for what runs in no plan.

    Scale, dropout, random state and, if None is given, the format are those of `core`, a
    `DotProductAttention`; `how` is what its `limits_for` gives; `slices` are of queries, keys and
    values in their projections; `given` is the source or nothing, the angles, whether these are
    interleaved, and whether norms come before them. `about` says on what type of device that is,
    and how many queries there are, which attention in FP8 depends on; `hands_over`: that hands its
    output on in FP8.
    """
    choice, limits = how
    if choice.backend != "native" or limits.wants_top:
        return None
    qkv_format = core.qkv_format if qkv_format is None else qkv_format
    source, angles, interleaved, norms_first = given
    dropout = core.attention_dropout if core.training else 0.0
    tracker = core._get_tracker if dropout > 0.0 else None
    masks = [
        None if tensor is None else tuple(1 if n == 1 else 0 for n in tensor.shape)
        for tensor in (limits.mask, limits.bias)
    ]
    lengths = [n for n in (limits.query_lengths, limits.key_lengths) if n is not None]
    offsets, packed = (), None
    if limits.packed is not None:
        of_lengths, offsets = native.told_of(limits.packed)
        lengths = [n for n in of_lengths if n is not None]
        queries, keys = limits.packed
        packed = offsets[0].shape[0] - 1, queries.longest, keys.longest
    bias = limits.bias
    bias_dtype = torch.float32 if bias is None else bias.dtype
    sink, slopes = limits.sink, limits.slopes
    bias_grad, sink_grad = (
        added is not None and added.requires_grad and torch.is_grad_enabled()
        for added in (bias, sink)
    )
    softmax = sink is not None, sink_grad, 0 if slopes is None else slopes.dim()
    window = tuple(limits.window)
    channels = tuple(of.shape[1] for of in angles)
    repeatable = native.deterministic()
    in_fp8 = fp8.in_layer(core, *about, limits, dropout, hands_over)
    key = (
        slices, dropout, tracker, core.softmax_scale, window, limits.bottom_right, *masks,
        len(lengths), bias_dtype, bias_grad, channels, interleaved, norms_first, qkv_format,
        bool(source) and source[0].requires_grad, repeatable, packed, *softmax, in_fp8,
        limits.softcap,
    )  # fmt: skip

    def spec() -> AttentionSpec:
        cast = {} if in_fp8 is None else in_fp8._asdict()
        cast.pop("recipe", None)
        return AttentionSpec(
            slices, qkv_format == "sbhd", core.softmax_scale, dropout, window,
            limits.bottom_right, channels, interleaved, norms_first, *masks, len(lengths),
            _core.dtype_code(bias_dtype), bias_grad, repeatable, packed, *softmax,
            softcap=limits.softcap, **cast,
        )  # fmt: skip

    tensors = (limits.mask, bias, *lengths, *offsets, sink, slopes)
    tensors = (*source, *angles, *(tensor for tensor in tensors if tensor is not None))
    owner = None if in_fp8 is None else core
    constant = not (source or angles) and is_constant(core, limits)
    return Attending(key, spec, tensors, _draw_in(tracker), choice, owner, constant)


def sink_of(core: Any) -> tuple | None:
    """What a call depends on of the parameter of `core`'s softmax; None without one."""
    sink = core.__dict__["_parameters"].get("softmax_offset")
    if sink is None:  # or a parametrization makes it
        return None
    wanted = sink.requires_grad and torch.is_grad_enabled()
    return sink, wanted, sink.dtype, sink.device


def is_constant(core: Any, limits: Limits) -> bool:
    """Whether a call with the same arguments, none of them a tensor, has these limits again.

    Then they hold no tensors, but the parameter of the softmax or what is made once for a device.
    """
    lengths = limits.query_lengths is not None or limits.packed is not None
    if lengths or limits.mask is not None or limits.bias is not None:
        return False
    if isinstance(core.window_size, list):  # it may change
        return False
    learnt, offset = core.softmax_type == "learnable", core._parameters.get("softmax_offset")
    if learnt and limits.sink is not offset:  # a parametrization makes it, too
        return False
    made = [tensor for tensor in (limits.sink, limits.slopes) if tensor is not None]
    # What is made while a graph is captured is memory of that graph.
    return not any(t.is_cuda and torch.cuda.is_current_stream_capturing() for t in made)


def _draw_in(tracker: Callable | None) -> Callable[[Tensor], None] | None:
    """What fills the random pair of a dropout in the fork of a tracker; None without one."""
    if tracker is None:
        return None

    def draw(pair: Tensor) -> None:
        with tracker().fork():
            pair.random_()

    return draw
