# SPDX-License-Identifier: Apache-2.0
"""Values that operators compute and cast, and the forms in which a call wants them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.slots import casts, state
from transformer_engine.plugin.slots.fields import Fields, fields_of, matrix, written

_OWN = ("wide", "amax_partials")
CAST_FIELDS = (*_OWN, *(name for name in fields_of("quantize") if name not in ("input", "noop")))
"""Of operators that cast what they compute."""


def are_cast(fields: Fields) -> bool:
    """Return whether a call wants its values quantized, or their largest magnitude."""
    wanted = "row", "column", "amax", "amax_partials", "row_scales", "column_scales"
    return any(fields[name] is not None for name in wanted)


def asked_for(
    fields: Fields, shape: tuple[int, int], choices: Mapping[str, Any]
) -> casts.Place | None:
    """Cast of the values of an implementation: by which quantizer, and where to.

    None: they are asked for as they are. So they are where somebody else casts them, and where a
    call wants more of them than their codes.
    """
    if choices.keys() & casts.OPERATORS or (fields["row"] is None and fields["column"] is None):
        return None
    more = "wide", "amax_partials", "bias_grad"
    if any(fields.get(name) is not None for name in more):
        return None
    return casts.place_of(fields, shape)


def ours(
    run: Callable, shape: Sequence[int], fields: Fields, choices: Mapping[str, Any], *names: str
) -> Any:
    """What this library computes of fields by name, in fp32, for somebody else's cast or amax.

    NotImplemented where nobody else has what is wanted.
    """
    of_amax = fields["amax_partials"] is not None
    cast = are_cast(fields) and not choices.keys().isdisjoint(casts.OPERATORS)
    if not ("compute_amax" in choices if of_amax else cast):
        return NotImplemented
    made = fields["input"].new_empty(shape, dtype=torch.float32)
    run(wide=made, **{name: fields[name] for name in names})
    return made


def deliver(
    op: str,
    fields: Fields,
    values: Any,
    choices: Mapping[str, Any],
    place: casts.Place | None = None,
) -> Any:
    """Put the values that an operator has computed where a call wants them, as it wants them.

    An implementation that was asked to cast them may have left that to us. NotImplemented is
    passed on.
    """
    if values is NotImplemented:
        return NotImplemented
    if place is not None and hasattr(type(values), "_dequantized"):
        casts.settle(fields, place, values)
        return None
    if not isinstance(values, Tensor):
        raise TypeError(f"{op}: the result: {type(values).__name__}, expected a tensor")
    rows = matrix(values)
    written(op, "the result", fields["wide"], rows)
    if fields["amax_partials"] is not None:
        _measure(rows, fields["amax_partials"], choices)
    sums = fields.get("bias_grad")
    if sums is not None or (are_cast(fields) and fields["amax_partials"] is None):
        casts.cast_values(rows, fields, choices)
    return None


def _measure(values: Tensor, partials: Tensor, choices: Mapping[str, Any]) -> None:
    """Find the largest magnitude of a matrix, by an implementation of somebody else if there is."""
    choice = choices.get("compute_amax")
    if choice is None or state.measured(choice, values, partials) is NotImplemented:
        _core.amax(values, partials)
