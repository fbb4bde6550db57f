# SPDX-License-Identifier: Apache-2.0
"""GEMMs in pieces beside the collectives of tensor parallelism: where they run so.

A module says with `ub_overlap_ag` and `ub_overlap_rs` that its GEMMs may run in pieces, of the rows
of this rank and of those of the others, while rows travel (``_core.COLLECTIVE_PIECES_*``).
`initialize_ub` measures where that is faster, of each layer of its own shape (`LAYERS`); what it
has not measured runs not in pieces. Without it all of them do that may.
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


LAYERS = {"qkv": "column", "proj": "row", "fc1": "column", "fc2": "row"}
"""Names of layers, and how ranks split them."""
_CHOSEN: dict[UserBufferQuantizationMode, Mapping[str, bool]] = {}
"""By the name of a layer and of its GEMM (`gemms_of`) whether that runs in pieces."""


def gemms_of(before: str | None, behind: str | None) -> tuple[str, str, str]:
    """Names of the GEMMs of `Overlaps`, of the layer with a gather and the one with a sum."""
    return f"{before}_fprop", f"{behind}_fprop", f"{behind}_dgrad"


def overlaps_of(names: Sequence[str | None], gathers: bool, sums: bool) -> tuple[Overlaps, ...]:
    """Those of a module in high precision and in FP8.

    `names` are those of its layer whose input is gathered and of the one whose output is summed, of
    `LAYERS`; `gathers` and `sums` say where GEMMs may run in pieces.
    """
    may = Overlaps(bool(gathers), bool(sums), bool(gathers))
    if not _CHOSEN:
        return (may,) * len(UserBufferQuantizationMode)
    found = []
    for mode in UserBufferQuantizationMode:
        chosen = _CHOSEN.get(mode, {})
        pairs = zip(may, gemms_of(*names), strict=True)
        found.append(Overlaps(*[m and chosen.get(gemm, False) for m, gemm in pairs]))
    return tuple(found)


def choose(mode: UserBufferQuantizationMode, gemms: Mapping[str, bool]) -> None:
    """Say for a mode which GEMMs run in pieces, by their names."""
    _CHOSEN[mode] = gemms


def is_ub_initialized() -> bool:
    """Return whether `initialize_ub` has chosen where GEMMs run in pieces."""
    return bool(_CHOSEN)


def destroy_ub() -> None:
    """Forget what `initialize_ub` has chosen: modules that are made from now on do as they may."""
    _CHOSEN.clear()
