# SPDX-License-Identifier: Apache-2.0
"""Delayed-scaling state in checkpoints: a uint8 tensor of a JSON header and raw little-endian fp32.

Layout: 8 bytes of magic, 8 bytes length of the header (little-endian), the header, the data.
Loading parses JSON and copies bytes; it never unpickles anything.
"""

import json
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import config

__all__ = ["pack_state", "unpack_state"]

_MAGIC = b"TEstate1"
_DIRECTIONS = ("forward", "backward")


def pack_state(values: dict[str, tuple[Tensor, Tensor]] | None) -> Tensor:
    """State as bytes.

    Parameters
    ----------
    values : dict or None
        direction -> (scale [n], history [length, n]) fp32.

    Returns
    -------
    Tensor
        1-D uint8 on the CPU; no elements for None.
    """
    if values is None:
        return torch.empty(0, dtype=torch.uint8)
    header: dict[str, Any] = {}
    data = []
    for direction in _DIRECTIONS:
        scale, history = values[direction]
        header[direction] = {"slots": scale.numel(), "length": history.shape[0]}
        data += [scale.detach().cpu().flatten(), history.detach().cpu().flatten()]
    text = json.dumps(header, sort_keys=True).encode()
    head = _MAGIC + len(text).to_bytes(8, "little") + text
    body = torch.cat(data).contiguous().view(torch.uint8)
    return torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), body])


def _header(raw: bytes) -> tuple[dict, int]:
    """(header, bytes before the data)."""
    if raw[:8] != _MAGIC:
        if raw[:1] == b"\x80":
            raise RuntimeError(
                "_extra_state: this checkpoint holds a pickle of another package, which is never "
                "loaded. Set TE_EXTRA_STATE=ignore to load the weights and start with fresh scales"
            )
        raise ValueError(
            f"_extra_state: {len(raw)} bytes that begin with {raw[:8]!r}, expected {_MAGIC!r}"
        )
    end = 16 + int.from_bytes(raw[8:16], "little")
    try:
        header = json.loads(raw[16:end])
        header = {d: (int(header[d]["slots"]), int(header[d]["length"])) for d in _DIRECTIONS}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"_extra_state: the header is malformed: {error}") from None
    return header, end


def unpack_state(state: Any, slots: tuple[int, int]) -> dict[str, tuple[Tensor, Tensor]] | None:
    """Bytes as state.

    Parameters
    ----------
    state : Tensor or None
        What `pack_state` gave.
    slots : tuple of int
        Slots that the module has, forward and backward.

    Returns
    -------
    dict or None
        direction -> (scale [n], history [length, n]) fp32 on the CPU; None where there is none.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        The bytes are not such state.
    """
    if state is None or config.TE_EXTRA_STATE.get() == "ignore":
        return None
    plain = isinstance(state, Tensor) and state.dtype == torch.uint8 and state.dim() == 1
    if not plain or state.is_meta:
        what = (
            f"{state.dtype} tensor of {state.dim()} dims on {state.device}"
            if isinstance(state, Tensor)
            else type(state).__name__
        )
        raise TypeError(f"_extra_state: {what}, expected a 1-D uint8 tensor with data")
    if state.numel() == 0:
        return None
    raw = bytes(state.tolist())  # a few kilobytes; numpy need not be there
    header, at = _header(raw)
    values = {}
    for direction, expected in zip(_DIRECTIONS, slots, strict=True):
        count, length = header[direction]
        size = 4 * count * (1 + length)
        if count != expected or length < 1 or at + size > len(raw):
            raise ValueError(
                f"_extra_state: {direction} state of {count} slots and {length} rows in "
                f"{len(raw) - at} bytes, expected {expected} slots, one row or more, {size} bytes"
            )
        numbers = torch.frombuffer(bytearray(raw[at : at + size]), dtype=torch.float32)
        values[direction] = (numbers[:count].clone(), numbers[count:].view(length, count).clone())
        at += size
    if at != len(raw):
        raise ValueError(f"_extra_state: {len(raw) - at} bytes too many")
    return values
