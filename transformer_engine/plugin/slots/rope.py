# SPDX-License-Identifier: Apache-2.0
"""``te_rope`` by `fused_rope_forward` and `fused_rope_backward`."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.core.ops import NVTE_QKV_Format
from transformer_engine.plugin.slots.fields import Fields, written

_PARTS = (
    ("input", "output", "freqs"),
    ("key", "key_output", "key_freqs"),
    ("value", "value_output", "value_freqs"),
)
_ROPE = tuple(name for name, *_ in _core.op_fields("rope"))


def _heads(tensor: Tensor, channels: int) -> Tensor:
    """Heads by themselves, of a tensor whose lines have several side by side."""
    if channels in (0, tensor.shape[-1]):
        return tensor
    return tensor.reshape(*tensor.shape[:-2], -1, channels)


def rope(choices: Mapping[str, Any]) -> tuple[Callable, tuple[str, ...]]:
    """Rotary embeddings of the parts of a projection, one call for each that has angles.

    Parts without angles are copied. Where one part is not taken none is turned.
    """

    def run(fields: Fields) -> Any:
        name = "fused_rope_backward" if fields["backward"] else "fused_rope_forward"
        choice = choices.get(name)
        if choice is None or (fields["backward"] and fields["start_positions"] is not None):
            return NotImplemented  # the gradient's signature has no place for them
        given = [[fields[key] for key in part] for part in _PARTS]
        given = [part for part in given if part[0] is not None]
        made = []
        for source, _, freqs in given:
            if freqs is None:
                made.append(source)
                continue
            turned = choice(*_arguments(fields, source, freqs))
            if turned is NotImplemented:
                return NotImplemented
            made.append(turned)
        for (source, out, _), values in zip(given, made, strict=True):
            if isinstance(values, Tensor):
                values = values.reshape(source.shape)
            written(name, "the result", out, values)
        return None

    return run, _ROPE


def _arguments(fields: Fields, source: Tensor, freqs: Tensor) -> tuple:
    """Of the call for one part."""
    packed = fields["cu_seqlens"]
    form = NVTE_QKV_Format.NVTE_BSHD if packed is None else NVTE_QKV_Format.NVTE_THD
    starts = () if fields["backward"] else (fields["start_positions"],)
    ranks = max(fields["cp_size"], 1), fields["cp_rank"]
    angles = freqs[:, None, None]
    turned = _heads(source, fields["channels"])
    return turned, angles, *starts, form, bool(fields["interleaved"]), packed, *ranks
