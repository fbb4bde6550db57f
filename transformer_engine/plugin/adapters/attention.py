# SPDX-License-Identifier: Apache-2.0
"""``te_attention``, ``te_softmax``, their gradients, and ``te_rope`` by `fused_attn_*` and so on.

Queries, keys and values are given dense, in the order of dims in which the queries lie. What a
forward hands to its backward is what plans keep: the statistics, in the form of this library's own
attention, so a backward may be anybody's. There is no dropout: an implementation draws its random
numbers itself, while a plan has drawn them, and keeps no other ones.

Parts that are turned are one projection (`fused_qkv_rope_*`) or not (`fused_rope_*`).
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.plugin.adapters.fields import (
    Choices,
    Fields,
    NotTakenError,
    sums_of,
    taken,
    written,
)
from transformer_engine.plugin.attention_kinds import in_format, kinds_of
from transformer_engine.plugin.core.ops import NVTE_QKV_Format
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


def attention(choices: Choices, fields: Fields) -> None:
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


def attention_backward(choices: Choices, fields: Fields) -> None:
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


# ---- rotary positions ----------------------------------------------------------------------------


_PARTS = (
    ("input", "output", "freqs"),
    ("key", "key_output", "key_freqs"),
    ("value", "value_output", "value_freqs"),
)


def _form(inp: Tensor, packed: bool) -> NVTE_QKV_Format:
    """How the tokens of a part [batch, sequence, ...] or [tokens, ...] lie."""
    if packed:
        return NVTE_QKV_Format.NVTE_THD
    turned = inp.stride(0) < inp.stride(1)
    return NVTE_QKV_Format.NVTE_SBHD if turned else NVTE_QKV_Format.NVTE_BSHD


def _viewed(tensor: Tensor, form: NVTE_QKV_Format) -> Tensor:
    """A tensor of the call in the order of the operators, and back."""
    return tensor.transpose(0, 1) if form == NVTE_QKV_Format.NVTE_SBHD else tensor


def _angles(freqs: Tensor) -> Tensor:
    return freqs.view(freqs.shape[0], 1, 1, freqs.shape[1])


def rope(choices: Choices, fields: Fields) -> None:
    """Turn heads, or turn them back; parts without angles are copied."""
    direction = "backward" if fields["backward"] else "forward"
    whole, single = f"fused_qkv_rope_{direction}", f"fused_rope_{direction}"
    if whole not in choices and single not in choices:
        raise NotTakenError
    if fields["backward"] and fields["start_positions"] is not None:
        choices.unexpressed(whole if whole in choices else single)
    op, made = single, None
    if whole in choices:
        with contextlib.suppress(NotTakenError):
            op, made = whole, _as_one(choices.followed(whole, single), fields)
    if made is None and single not in choices:
        choices.unexpressed(whole)
    for into, values in made or _by_parts(choices[single], fields):
        written(op, "the result", into, values.reshape(into.shape))


def _settings(fields: Fields) -> tuple[bool, int, int]:
    """Pairs are interleaved, ranks of context parallelism, and which one it is."""
    return bool(fields["interleaved"]), max(fields["cp_size"], 1), fields["cp_rank"]


def _by_parts(choice: Any, fields: Fields) -> list[tuple[Tensor, Tensor]]:
    """(where it goes, values) of each part; NotTakenError where one is not taken."""
    channels, starts = fields["channels"], fields["start_positions"]
    interleaved, *ranks = _settings(fields)
    made = []
    for name, output, angles in _PARTS:
        inp, into, freqs = fields[name], fields[output], fields[angles]
        if inp is None:
            continue
        if freqs is None:
            made.append((into, inp))
            continue
        form = _form(inp, fields["cu_seqlens"] is not None)
        heads = inp.unflatten(-1, (-1, channels)).flatten(-3, -2) if channels else inp
        starting = () if fields["backward"] else (starts,)
        given = _viewed(heads, form), _angles(freqs), *starting, form, interleaved
        values = taken(choice(*given, fields["cu_seqlens"], *ranks))
        direction = "backward" if fields["backward"] else "forward"
        values = _shaped(f"fused_rope_{direction}", values, given[0].shape)
        made.append((into, _viewed(values, form)))
    return made


def _shaped(op: str, values: Any, shape: Sequence[int]) -> Tensor:
    """A result as heads, or as a line of them; TypeError or ValueError for anything else."""
    if not isinstance(values, Tensor):
        raise TypeError(f"{op}: the result: {type(values).__name__}, expected a tensor")
    if values.numel() != math.prod(shape):
        raise ValueError(f"{op}: the result: shape {tuple(values.shape)}, expected {tuple(shape)}")
    return values.reshape(shape)


def _as_one(choice: Any, fields: Fields) -> list[tuple[Tensor, Tensor]]:
    """`_by_parts` of queries, keys and values of one projection, or of its gradient."""
    back = bool(fields["backward"])
    parts = [fields[names[back]] for names in _PARTS]  # those that the projection has
    needed = *parts, fields["freqs"], fields["key_freqs"]
    alien = fields["cu_seqlens"], fields["value_freqs"]
    if any(each is None for each in needed) or any(each is not None for each in alien):
        raise NotTakenError
    query, key, value = parts
    size = fields["channels"] or key.shape[-1]
    sizes = [part.shape[-1] for part in parts]
    first, width = query.data_ptr(), query.element_size()
    expected = [first + sum(sizes[:i]) * width for i in range(3)]
    if (
        [part.data_ptr() for part in parts] != expected
        or any(part.stride() != query.stride() for part in parts)
        or any(part.shape[:-1] != query.shape[:-1] for part in parts)
        or sizes[1] != size
        or query.stride(-2) != sum(sizes)
    ):
        raise NotTakenError
    form = _form(query, False)
    shape = _viewed(query, form).shape[:-1]
    settings = sizes, form, *_settings(fields)
    angles = _angles(fields["freqs"]), _angles(fields["key_freqs"])
    if back:
        grads = [fields[names[0]] for names in _PARTS]
        heads = grads[0].unflatten(-1, (-1, size)).flatten(-3, -2)
        grads = [_viewed(each, form) for each in (heads, *grads[1:])]
        whole = taken(choice(*grads, *angles, *settings))
        found = _shaped("fused_qkv_rope_backward", whole, (*shape, sum(sizes))).split(sizes, -1)
    else:
        joined = torch.cat([_viewed(part, form) for part in parts], -1)
        found = taken(choice(joined, *angles, fields["start_positions"], *settings))
        op = "fused_qkv_rope_forward"
        found = [_shaped(op, each, (*shape, n)) for each, n in zip(found, sizes, strict=True)]
    pairs = zip(_PARTS, found, strict=True)
    return [(fields[output], _viewed(values, form)) for (_, output, _), values in pairs]


# ---- softmax -------------------------------------------------------------------------------------


_PLAIN, _MASKED = "scaled_softmax", "scaled_masked_softmax"
_TRIANGLE = "scaled_upper_triang_masked_softmax"
_ALIGNED = "scaled_aligned_causal_masked_softmax"


def _kinds(fields: Fields) -> tuple[str, ...]:
    """Operators that a softmax is, without their last word."""
    *_, queries, keys = fields["input"].shape
    if any(fields[name] is not None for name in ("bias", "sink", "rng")):
        return ()
    left, right = fields["window_left"], fields["window_right"]
    if fields["mask"] is not None:
        shared = fields["mask"].shape[1] == 1  # by all heads
        return (_MASKED,) if shared and left < 0 and right < 0 else ()
    if left >= 0 or right > 0:
        return ()
    if right < 0:
        return (_PLAIN,)
    if fields["diagonal"] != keys - queries:
        return ()
    return (_TRIANGLE, _ALIGNED) if queries == keys else (_ALIGNED,)


def _made(
    choices: Choices, kinds: tuple[str, ...], way: str, tensors: tuple, *more: Any
) -> tuple[str, Any]:
    """The first of the operators that somebody has and that is taken, and what it makes."""
    names = [f"{kind}_{way}" for kind in kinds]
    for i, kind in enumerate(kinds):
        given = [t.flatten(0, 1) if kind == _TRIANGLE else t for t in tensors]
        made = choices.followed(names[i], *names[i + 1 :])(*given, *more)
        if made is not NotImplemented:
            return names[i], made
    raise NotTakenError


def softmax(choices: Choices, fields: Fields) -> None:
    """Softmax of scores [batch, heads, queries, keys]."""
    scores, mask, kinds = fields["input"], fields["mask"], _kinds(fields)
    if not kinds:
        choices.unexpressed(next(iter(choices)))
    if mask is not None:
        mask = mask.expand(*mask.shape[:2], *scores.shape[2:]).contiguous()
    more = (fields["scale"],) if mask is None else (mask, fields["scale"])
    name, made = _made(choices, kinds, "forward", (scores,), *more)
    written(name, "the result", fields["output"], made)
    written(name, "the result", fields["probabilities"], made)


def softmax_backward(choices: Choices, fields: Fields) -> None:
    """Its gradient, one function of the probabilities whatever was masked."""
    grad, probabilities = fields["grad_output"], fields["probabilities"]
    if fields["rng"] is not None or fields["sink"] is not None:
        choices.unexpressed(next(iter(choices)))
    square = grad.shape[2] == grad.shape[3]
    kinds = _PLAIN, _MASKED, _ALIGNED, *((_TRIANGLE,) if square else ())
    name, made = _made(choices, kinds, "backward", (grad, probabilities), fields["scale"])
    written(name, "the gradient", fields["grad_input"], made)
