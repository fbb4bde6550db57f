# SPDX-License-Identifier: Apache-2.0
"""``te_rope`` by `fused_rope_*`, or `fused_qkv_rope_*` where its parts are one projection."""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.core.ops import NVTE_QKV_Format
from transformer_engine.plugin.slots.fields import Choices, Fields, NotTakenError, taken, written

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
