# SPDX-License-Identifier: Apache-2.0
"""GEMMs in pieces beside the collectives of tensor parallelism: where they run so.

A module says with `ub_overlap_ag` and `ub_overlap_rs` that its GEMMs may run in pieces, of the rows
of this rank and of those of the others, while rows travel (``_core.COLLECTIVE_PIECES_*``).
`initialize_ub` measures where that is faster; without it all of them do that may.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class UserBufferQuantizationMode(Enum):
    """What modules send and multiply: high precision or FP8."""

    NONE = "none"
    FP8 = "fp8"


class Overlaps(NamedTuple):
    """Whether GEMMs of a module run in pieces."""

    gathered: bool = False  # beside the gather of its input
    summed: bool = False  # beside the sum of its output
    grad: bool = False  # beside the gather of the gradient of its output


class _Chosen(NamedTuple):
    """What `initialize_ub` has chosen for a mode."""

    measured: Overlaps
    methods: Mapping[str, bool]  # by the name of a layer and of its GEMM


_CHOSEN: dict[UserBufferQuantizationMode, _Chosen] = {}


def overlaps_of(names: Sequence[str | None], gathers: bool, sums: bool) -> tuple[Overlaps, ...]:
    """Those of a module in high precision and in FP8.

    `names` are those of its layer whose input is gathered and of the one whose output is summed, in
    configurations of `initialize_ub`; `gathers` and `sums` say where GEMMs may run in pieces.
    """
    may = Overlaps(bool(gathers), bool(sums), bool(gathers))
    gemms = f"{names[0]}_fprop", f"{names[1]}_fprop", f"{names[1]}_dgrad"
    found = []
    for mode in UserBufferQuantizationMode:
        chosen = _CHOSEN.get(mode)
        does = may if chosen is None else chosen.measured
        methods = {} if chosen is None else chosen.methods
        does = [methods.get(gemm, d) for gemm, d in zip(gemms, does, strict=True)]
        found.append(Overlaps(*[m and d for m, d in zip(may, does, strict=True)]))
    return tuple(found)


def choose(
    mode: UserBufferQuantizationMode, measured: Overlaps, methods: Mapping[str, bool]
) -> None:
    """Say for a mode what was measured, and what a program has said by name."""
    _CHOSEN[mode] = _Chosen(measured, methods)


def is_ub_initialized() -> bool:
    """Return whether `initialize_ub` has chosen where GEMMs run in pieces."""
    return bool(_CHOSEN)


def destroy_ub() -> None:
    """Forget what `initialize_ub` has chosen: modules that are made from now on do as they may."""
    _CHOSEN.clear()
