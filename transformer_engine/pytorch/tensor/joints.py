# SPDX-License-Identifier: Apache-2.0
"""How quantized matrices are put row after row: where their codes and scales lie then."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor


class Joint(NamedTuple):
    """Where the rows of a matrix lie in a form of it, for matrices that are put row after row."""

    data: int  # dim of its data
    scales: int  # dim of its scales,
    rows: int  # of which one is of so many rows,
    align: int  # and which has a length in a multiple of this
    whole: int  # rows that all matrices but the last have a multiple of


def joints_of(kind: type, square: bool, forms: list[str], rows: int) -> dict[str, Joint] | None:
    """How forms of a storage class join, of so many rows each; None where one does not."""
    table = getattr(kind, "_GATHERED", None) or getattr(kind, "_JOINTS", {})
    found = {form: table.get((form, square)) for form in forms}
    if any(joint is None or rows % joint.whole for joint in found.values()):
        return None
    return found


class Part(NamedTuple):
    """A field of a quantized tensor, as it is put beside those of other ranks."""

    name: str
    tensor: Tensor  # without padding
    dim: int  # along which those of ranks lie
    align: int  # and which has a length in a multiple of this


def parts_of(storage: Any, joints: dict[str, Joint]) -> Iterator[Part]:
    """All that ranks exchange of a tensor whose forms join so."""
    rows = storage.shape[:-1].numel()
    for form, joint in joints.items():
        data, scales = (f"_{form}_{what}" for what in ("data", "scale_inv"))
        yield Part(data, getattr(storage, data), joint.data, 1)
        own = getattr(storage, scales).narrow(joint.scales, 0, -(-rows // joint.rows))
        yield Part(scales, own, joint.scales, joint.align)
        if form == "rowwise" and getattr(storage, "_row_scaled_nvfp4", False):
            yield Part("_amax_rowwise", storage._amax_rowwise, 0, 1)


def rows_of(storage: Any, joints: dict[str, Joint], first: int, count: int) -> Iterator[Tensor]:
    """Views of all that belongs to some rows of a matrix whose forms join so, and its amaxes."""
    rows = storage.shape[0]
    for form, joint in joints.items():
        data, scales = (getattr(storage, f"_{form}_{what}") for what in ("data", "scale_inv"))
        length = data.shape[joint.data]  # half of the rows, where two share a byte
        yield data.narrow(joint.data, first * length // rows, count * length // rows)
        yield scales.narrow(joint.scales, first // joint.rows, -(-count // joint.rows))
        amax = getattr(storage, f"_amax_{form}", None)
        if amax is not None:
            by_rows = form == "rowwise" and storage._row_scaled_nvfp4
            yield amax.narrow(0, first, count) if by_rows else amax
