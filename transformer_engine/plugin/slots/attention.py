# SPDX-License-Identifier: Apache-2.0
"""``te_attention`` and its gradient by `fused_attn_fwd` and `fused_attn_bwd`.

Queries, keys and values are given dense, in the order of dims in which the queries lie. What a
forward hands to its backward is what plans keep: the statistics, in the form of this library's own
attention, so a backward may be anybody's. There is no dropout: an implementation draws its random
numbers itself, while a plan has drawn them, and keeps no other ones.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.plugin.attention_kinds import in_format, kinds_of
from transformer_engine.plugin.slots.fields import Choices, Fields, sums_of, taken, written
from transformer_engine.pytorch.attention.masks import alibi_bias

_FORWARD, _BACKWARD = "fused_attn_fwd", "fused_attn_bwd"


class _Problem(NamedTuple):
    """A call as the operators have it."""

    form: str  # "sbhd", "bshd" or "thd"
    mask: str
    window: tuple[int, int]
    counted: tuple[Tensor, Tensor]  # cu_seqlens of queries and keys
    padded: tuple[Tensor | None, Tensor | None]
    longest: tuple[int, int]
    bias: Tensor | None
    sink: Tensor | None  # [1, heads, 1, 1]

    @property
    def kinds(self) -> tuple:
        """Layout, type of bias, of mask and of softmax, window."""
        bias = "no_bias" if self.bias is None else "post_scale_bias"
        softmax = "vanilla" if self.sink is None else "learnable"
        return *kinds_of("_".join([self.form] * 3), bias, self.mask, softmax), self.window

    def viewed(self, tensor: Tensor) -> Tensor:
        """A tensor of the call [batch, sequence, heads, channels] in the order of the dims."""
        return in_format(tensor, self.form)


def _problem(fields: Fields) -> _Problem | None:
    """The call; None for one that the operators can not be told."""
    query, bias = fields["query"], fields["bias"]
    packed, slopes = fields["query_offsets"] is not None, fields["slopes"]
    if (
        fields["dropout"] > 0.0
        or fields["softcap"] > 0.0
        or fields["diagonal"] != 0
        or fields["mask"] is not None
        or query.element_size() == 1  # in FP8, with scales of its own
        or (slopes is not None and (packed or bias is not None))
    ):
        return None
    limits = _limits(fields)
    if limits is None:
        return None
    sizes = query.shape[1], fields["key"].shape[1]
    padded: tuple = (None, None)
    longest = sizes
    if packed:
        form, longest = "thd", (fields["max_queries"], fields["max_keys"])
        counted = starts = fields["query_offsets"], fields["key_offsets"]
        if fields["query_lengths"] is not None:
            counted, padded = _summed(fields, longest), starts
    else:
        form = "sbhd" if query.stride(0) < query.stride(1) else "bshd"
        counted = _summed(fields, sizes)
    if slopes is not None:
        bias = _alibi(fields, slopes, sizes)
    if bias is not None:
        bias = bias.expand(*bias.shape[:2], *sizes).contiguous()
    sink = fields["sink"]
    sink = None if sink is None else sink.view(1, -1, 1, 1)
    return _Problem(form, *limits, counted, padded, longest, bias, sink)


def _limits(fields: Fields) -> tuple[str, tuple[int, int]] | None:
    """Name of the type of mask, and the window; None where the diagonal is one of no type."""
    window = max(fields["window_left"], -1), max(fields["window_right"], -1)
    lengths = [fields[f"{of}_lengths"] for of in ("query", "key")]
    padding = fields["query_offsets"] is not None or any(each is not None for each in lengths)
    square = not padding and fields["query"].shape[1] == fields["key"].shape[1]
    corner = bool(fields["bottom_right"]) and not square
    if window[1] == 0:
        name = "causal_bottom_right" if corner else "causal"
        name = f"padding_{name}" if padding else name
    elif corner and window != (-1, -1):
        return None
    else:
        name = "padding" if padding else "no"
    return name, window


def _summed(fields: Fields, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Sums of the lengths of sequences [batch + 1] int32, of queries and of keys."""
    batch, device = fields["query"].shape[0], fields["query"].device
    lengths = fields["query_lengths"], fields["key_lengths"]
    whole = torch.arange(batch + 1, dtype=torch.int32, device=device)
    pairs = zip(lengths, sizes, strict=True)
    return tuple(whole * size if each is None else sums_of(each) for each, size in pairs)


def _alibi(fields: Fields, slopes: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Bias of slopes of ALiBi, [1 or batch, heads, queries, keys] fp32.

    The operators have slopes of their own, which follow from the number of heads; whether those of
    a call are the same a host does not know without waiting for the device.
    """
    diagonal: Any = 0
    if fields["bottom_right"]:
        diagonal = sizes[1] - sizes[0]
        if fields["query_lengths"] is not None:
            diagonal = (fields["key_lengths"] - fields["query_lengths"]).view(-1, 1, 1, 1)
    return alibi_bias(slopes, *sizes, diagonal)


def forward(choices: Choices, fields: Fields) -> None:
    """Attention; its statistics are asked for as they are for training."""
    problem = _problem(fields)
    if problem is None:
        choices.unexpressed(_FORWARD)
    heads = [problem.viewed(fields[name]).contiguous() for name in ("query", "key", "value")]
    statistics, top = fields["statistics"], fields["top"]
    no_tables, no_quantizers = (None, None), (None, None)
    found = choices[_FORWARD](
        *(*problem.longest, statistics is not None, fields["scale"], 0.0, True, *problem.kinds),
        *(*problem.counted, *heads, heads[0].dtype, *problem.padded, *no_tables, *no_quantizers),
        *(problem.bias, problem.sink, None, 0, top is not None),
    )
    made, *rest = taken(found)
    names = ["the largest scores"] * (top is not None)
    names += ["the statistics", "the random state"] * (statistics is not None)
    if len(rest) < len(names):
        wanted = ", ".join(["the output", *names])
        raise ValueError(f"{_FORWARD}: a result of {len(found)} tensors, expected {wanted}")
    _placed(_FORWARD, "the output", problem.viewed(fields["output"]), made)
    if top is not None:
        written(_FORWARD, "the largest scores", top, rest.pop(0))
    if statistics is not None:
        _placed(_FORWARD, "the statistics", statistics, rest[0])


def backward(choices: Choices, fields: Fields) -> None:
    """The gradients of attention."""
    problem = _problem(fields)
    if problem is None or fields["grad_output"].element_size() == 1:
        choices.unexpressed(_BACKWARD)
    names = "query", "key", "value", "output", "grad_output"
    tensors = [problem.viewed(fields[name]).contiguous() for name in names]
    statistics = fields["statistics"]
    kept = [statistics[0, ..., None] if problem.form == "thd" else statistics[..., None]]
    kept.append(torch.zeros(2, dtype=torch.int64, device=statistics.device))
    kept += [each for each in (problem.bias, problem.sink) if each is not None]
    deterministic, no_quantizers = bool(fields["deterministic"]), (None, None, None)
    found = choices[_BACKWARD](
        *(*problem.longest, fields["scale"], 0.0, True, *problem.kinds, deterministic),
        *(*problem.counted, *tensors, tensors[0].dtype, tensors[-1].dtype, kept),
        *(*problem.padded, *no_quantizers),
    )
    if len(taken(found)) < 3:
        raise ValueError(f"{_BACKWARD}: {len(found)} gradients, expected dQ, dK, dV, ...")
    for name, made in zip(("query", "key", "value"), found, strict=False):
        into = fields[f"grad_{name}"]
        into = None if into is None else problem.viewed(into)
        _placed(_BACKWARD, f"the gradient of {name}", into, made)
    gradients = dict(zip(("bias", "sink"), found[3:], strict=False))
    bias, into = gradients.get("bias"), fields["grad_bias"]
    if into is not None and isinstance(bias, Tensor):  # of a bias that was expanded
        bias = bias.float().sum_to_size(into.shape)
    written(_BACKWARD, "the gradient of Bias", into, bias)
    _placed(_BACKWARD, "the gradient of SoftmaxOffset", fields["grad_sink"], gradients.get("sink"))


def _placed(op: str, name: str, out: Tensor | None, values: Any) -> None:
    """`written`, of values with other dims in the same order: heads of one line, say."""
    if out is not None and isinstance(values, Tensor) and values.numel() == out.numel():
        values = values.reshape(out.shape)
    written(op, name, out, values)
