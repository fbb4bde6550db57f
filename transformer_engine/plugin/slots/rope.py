# SPDX-License-Identifier: Apache-2.0
"""``te_rope`` by `fused_rope_*`, or `fused_qkv_rope_*` where its parts are one projection."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.core.ops import NVTE_QKV_Format
from transformer_engine.plugin.slots.fields import Choices, Fields, written

__all__ = ["rope"]

_FIELDS = tuple(name for name, *_ in _core.op_fields("rope"))
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


def rope(choices: Choices) -> tuple[Callable, tuple[str, ...]]:
    """Turn heads, or turn them back; parts without angles are copied."""

    def run(fields: Fields) -> Any:
        direction = "backward" if fields["backward"] else "forward"
        whole, single = f"fused_qkv_rope_{direction}", f"fused_rope_{direction}"
        if whole not in choices and single not in choices:
            return NotImplemented
        if fields["backward"] and fields["start_positions"] is not None:
            return choices.unexpressed(whole if whole in choices else single)
        made: Any = NotImplemented
        if whole in choices:
            made = _as_one(choices.followed(whole, single), fields)
        if made is NotImplemented and single in choices:
            made = _by_parts(choices[single], fields)
        if made is NotImplemented:
            return choices.unexpressed(whole) if single not in choices else NotImplemented
        for into, values in made:
            written(
                whole if whole in choices else single,
                "the result",
                into,
                values.reshape(into.shape),
            )
        return None

    return run, _FIELDS


def _settings(fields: Fields) -> tuple[bool, int, int]:
    """Pairs are interleaved, ranks of context parallelism, and which one it is."""
    return bool(fields["interleaved"]), max(fields["cp_size"], 1), fields["cp_rank"]


def _by_parts(choice: Any, fields: Fields) -> Any:
    """(where it goes, values) of each part; NotImplemented where one is not taken."""
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
        values = choice(*given, fields["cu_seqlens"], *ranks)
        if values is NotImplemented:
            return NotImplemented
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


def _as_one(choice: Any, fields: Fields) -> Any:
    """`_by_parts` of queries, keys and values of one projection, or of its gradient."""
    back = bool(fields["backward"])
    parts = [fields[names[back]] for names in _PARTS]  # those that the projection has
    if (
        any(part is None for part in parts)
        or fields["cu_seqlens"] is not None
        or any(fields[angles] is None for *_, angles in _PARTS[:2])
        or fields["value_freqs"] is not None
    ):
        return NotImplemented
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
        return NotImplemented
    form = _form(query, False)
    interleaved, *ranks = _settings(fields)
    angles = _angles(fields["freqs"]), _angles(fields["key_freqs"])
    if back:
        grads = [fields[names[0]] for names in _PARTS]
        heads = grads[0].unflatten(-1, (-1, size)).flatten(-3, -2)
        grads = [_viewed(each, form) for each in (heads, *grads[1:])]
        whole = choice(*grads, *angles, sizes, form, interleaved, *ranks)
        if whole is NotImplemented:
            return NotImplemented
        shape = _viewed(query, form).shape[:-1]
        whole = _shaped("fused_qkv_rope_backward", whole, (*shape, sum(sizes)))
        found = whole.split(sizes, -1)
    else:
        joined = torch.cat([_viewed(part, form) for part in parts], -1)
        starts = fields["start_positions"]
        found = choice(joined, *angles, starts, sizes, form, interleaved, *ranks)
        if found is NotImplemented:
            return NotImplemented
        shape, op = _viewed(query, form).shape[:-1], "fused_qkv_rope_forward"
        found = [_shaped(op, each, (*shape, n)) for each, n in zip(found, sizes, strict=True)]
    outputs = [fields[names[1]] for names in _PARTS]
    pairs = zip(outputs, found, strict=True)
    return [(into, _viewed(values, form)) for into, values in pairs]
