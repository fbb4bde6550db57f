# SPDX-License-Identifier: Apache-2.0
"""Values that operators compute and cast, and the forms in which a call wants them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.slots import casts, state
from transformer_engine.plugin.slots.fields import (
    Choices,
    Fields,
    NotTakenError,
    fields_of,
    matrix,
    written,
)

_OWN = ("wide", "amax_partials")
CAST_FIELDS = (*_OWN, *(name for name in fields_of("quantize") if name not in ("input", "noop")))
"""Of operators that cast what they compute."""


def are_cast(fields: Fields) -> bool:
    """Return whether a call wants its values quantized, or their largest magnitude."""
    wanted = "row", "column", "amax", "amax_partials", "row_scales", "column_scales"
    return any(fields[name] is not None for name in wanted)


def asked_for(fields: Fields, shape: tuple[int, int], choices: Choices) -> casts.Place | None:
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
    run: Callable, shape: Sequence[int], fields: Fields, choices: Choices, *names: str
) -> Tensor:
    """What this library computes of fields by name, in fp32, for somebody else's cast or amax."""
    of_amax = fields["amax_partials"] is not None
    cast = are_cast(fields) and not choices.keys().isdisjoint(casts.OPERATORS)
    if not ("compute_amax" in choices if of_amax else cast):
        raise NotTakenError
    made = fields["input"].new_empty(shape, dtype=torch.float32)
    run(wide=made, **{name: fields[name] for name in names})
    return made


def deliver(
    op: str, fields: Fields, values: Any, choices: Choices, place: casts.Place | None = None
) -> None:
    """Put the values that an operator has computed where a call wants them, as it wants them.

    An implementation that was asked to cast them may have left that to us.
    """
    if place is not None and hasattr(type(values), "_dequantized"):
        casts.settle(fields, place, values)
        return
    if not isinstance(values, Tensor):
        raise TypeError(f"{op}: the result: {type(values).__name__}, expected a tensor")
    rows = matrix(values)
    written(op, "the result", fields["wide"], rows)
    partials = fields["amax_partials"]
    if partials is not None:
        try:
            state.measured(choices, rows, partials)
        except NotTakenError:
            _core.amax(rows, partials)
    sums = fields.get("bias_grad")
    if sums is not None or (are_cast(fields) and partials is None):
        casts.cast_values(rows, fields, choices)
