# SPDX-License-Identifier: Apache-2.0
"""Delayed-scaling state in checkpoints: a uint8 tensor of a JSON header and raw little-endian fp32.

Layout: 8 bytes of magic; the first 8 bytes of the SHA-256 of all that follows; 8 bytes length of
the header (little-endian); the header, filled up with spaces to byte 128; the data. So the size
follows from the slots and the history length alone, and loaders that read into tensors of fixed
size can be offered one. Loading parses JSON and copies bytes; it never unpickles anything.
"""

import hashlib
import io
import json
import pickle
import sys
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from transformer_engine.common import config

KEY = "_extra_state"
"""Last part of the keys under which `torch.nn.Module` saves such state."""

_MAGIC = b"TEstate2"
_FORMER_MAGIC = b"TEstate1"  # as the other, but without checksum and filling
_PICKLE = b"\x80"  # that of another package begins so
_DATA_AT = 128
_DIRECTIONS = ("forward", "backward")
_FIX = (
    "load an undamaged copy, or set TE_EXTRA_STATE=ignore to load the weights alone and start with "
    "fresh scales"
)

_PICKLES_OF_NOTHING = frozenset(
    pickle.dumps(value, protocol)
    for value in ({}, None)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)
)
"""Bytes that the incumbent's modules without state write: compared, never loaded."""

M = TypeVar("M", bound=dict)


def pack_state(values: dict[str, tuple[Tensor, Tensor]] | None) -> Tensor:
    """State as bytes: a 1-D uint8 tensor on the CPU, of no elements for None.

    `values` is direction -> (scale [n], history [length, n]) fp32.
    """
    if values is None:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    header: dict[str, Any] = {}
    data = []
    for direction in _DIRECTIONS:
        scale, history = values[direction]
        header[direction] = {"slots": scale.numel(), "length": history.shape[0]}
        data += [scale.detach().cpu().flatten(), history.detach().cpu().flatten()]
    text = json.dumps(header, sort_keys=True).encode().ljust(_DATA_AT - 24)
    body = bytes(torch.cat(data).view(torch.uint8).tolist())  # numpy need not be there
    checked = len(text).to_bytes(8, "little") + text + body
    return torch.frombuffer(bytearray(_MAGIC + _checksum(checked) + checked), dtype=torch.uint8)


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:8]


def _refuse(name: str, what: str) -> NoReturn:
    raise ValueError(f"{name}: {what}; {_FIX}")


def _is_absent(state: Any) -> bool:
    """Return whether a loader, or the module that saved it, says that there is no such state.

    That is None, a tensor of no elements, the pickle of an empty dict or of None, and the
    placeholder that `torch.distributed.checkpoint.state_dict` puts where a module could have some.
    """
    if state is None or (isinstance(state, Tensor) and state.numel() == 0):
        return True
    if _is_bytes(state) and state.numel() <= 8 and not state.is_meta:
        return bytes(state.tolist()) in _PICKLES_OF_NOTHING
    functions = sys.modules.get("torch.distributed.checkpoint.state_dict")
    placeholder = getattr(functions, "_EXTRA_STATE", None)
    return placeholder is not None and isinstance(state, placeholder)


def _is_bytes(state: Any) -> bool:
    return isinstance(state, Tensor) and state.dtype == torch.uint8 and state.dim() == 1


def is_ours(state: Any) -> bool:
    """Return whether bytes begin as those that `pack_state` gives."""
    return _begins(state) in (_MAGIC, _FORMER_MAGIC)


def _begins(state: Any) -> bytes:
    """The first bytes; none of what is no bytes, or has no memory."""
    return bytes(state[:8].tolist()) if _is_bytes(state) and not state.is_meta else b""


def _refuse_file(state: Any, name: str) -> None:
    """Raise where state is what early versions of the incumbent wrote."""
    if isinstance(state, io.BytesIO):
        raise RuntimeError(
            f"{name}: a BytesIO object of {state.getbuffer().nbytes} bytes: state that an early "
            "version of another package (NVIDIA Transformer Engine before 2.0) wrote with "
            "torch.save, a pickle, which is never loaded. Set TE_EXTRA_STATE=ignore to load the "
            "weights and start with fresh scales, or delete this entry of the state dict"
        )


def _bytes_of(state: Any, name: str) -> bytes:
    _refuse_file(state, name)
    if not _is_bytes(state) or state.is_meta:
        what = (
            f"{state.dtype} tensor of {state.dim()} dims on {state.device}"
            if isinstance(state, Tensor)
            else type(state).__name__
        )
        raise TypeError(f"{name}: {what}, expected a 1-D uint8 tensor with data; {_FIX}")
    return bytes(state.tolist())  # a few kilobytes; numpy need not be there


def _header(raw: bytes, name: str) -> tuple[dict, int]:
    """(header, bytes before the data)."""
    magic = raw[:8]
    if magic == _MAGIC:
        if _checksum(raw[16:]) != raw[8:16]:
            _refuse(name, f"the checksum of its {len(raw)} bytes is wrong: cut off or damaged")
        at = 16
    elif magic == _FORMER_MAGIC:
        at = 8
    elif raw[:1] == _PICKLE:
        raise RuntimeError(
            f"{name}: this checkpoint holds a pickle of another package, which is never "
            "loaded. Set TE_EXTRA_STATE=ignore to load the weights and start with fresh scales"
        )
    else:
        _refuse(name, f"{len(raw)} bytes that begin with {magic!r}, expected {_MAGIC!r}")
    start = at + 8
    end = start + int.from_bytes(raw[at:start], "little")
    try:
        header = json.loads(raw[start:end])
        header = {d: (int(header[d]["slots"]), int(header[d]["length"])) for d in _DIRECTIONS}
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        _refuse(name, f"the header is malformed: {error}")
    return header, end


def _check_values(name: str, direction: str, scale: Tensor, history: Tensor) -> None:
    """Refuse what no update makes. An amax may be Inf or NaN: those of the data are recorded."""
    for what, values, wrong in (
        ("scale", scale, ~(torch.isfinite(scale) & (scale > 0))),
        ("amax", history, history < 0),
    ):
        if wrong.any():
            found = values[wrong][0].item()
            _refuse(name, f"{direction} state with {what} {found}, which no training makes")


def unpack_state(
    state: Any, slots: tuple[int, int], name: str = KEY
) -> dict[str, tuple[Tensor, Tensor]] | None:
    """Bytes of `pack_state` as state; None where there is none.

    It is direction -> (scale [n], history [length, n]), fp32 on the CPU. `slots` are those that the
    module has, forward and backward; `name` is the key in the state dict, for messages. TypeError,
    ValueError or RuntimeError where the bytes are not such state, or no training made it.
    """
    if _is_absent(state) or config.TE_EXTRA_STATE.get() == "ignore":
        return None
    raw = _bytes_of(state, name)
    header, at = _header(raw, name)
    values = {}
    for direction, expected in zip(_DIRECTIONS, slots, strict=True):
        count, length = header[direction]
        size = 4 * count * (1 + length)
        if count != expected or length < 1 or at + size > len(raw):
            _refuse(
                name,
                f"{direction} state of {count} slots and {length} rows in {len(raw) - at} bytes, "
                f"expected {expected} slots, one row or more, {size} bytes: of another kind of "
                "module, or damaged",
            )
        numbers = torch.frombuffer(bytearray(raw[at : at + size]), dtype=torch.float32)
        scale, history = numbers[:count].clone(), numbers[count:].view(length, count).clone()
        _check_values(name, direction, scale, history)
        values[direction] = (scale, history)
        at += size
    if at != len(raw):
        _refuse(name, f"{len(raw) - at} bytes too many")
    return values


def says_nothing(state_dict: dict, key: str) -> bool:
    """Return whether an entry that peers wrote for a module without scaling state is to be dropped.

    So where it says that there is no state, or the user wants none looked at. RuntimeError for a
    BytesIO object.
    """
    if key not in state_dict:
        return False
    if config.TE_EXTRA_STATE.get() == "ignore":
        return True
    _refuse_file(state_dict[key], key)
    return _is_absent(state_dict[key])


def without_scaling_state(state_dict: M) -> M:
    """A state dict for `torch.nn` modules: without the scaling state of FP8 training.

    The given one is of a model with modules of this package, at any depth and under any prefix. The
    result is a shallow copy of the same type, without the ``_extra_state`` entries that hold
    scaling state, are empty or are pickles in bytes. Entries of other modules, say of a user's own
    ``get_extra_state``, stay. TypeError for what is no dict.
    """
    if not isinstance(state_dict, dict):
        raise TypeError(
            f"state_dict: {type(state_dict).__name__} object, expected a dict; give "
            "module.state_dict()"
        )
    plain = state_dict.copy()
    if hasattr(state_dict, "_metadata"):
        plain._metadata = state_dict._metadata
    for key, value in state_dict.items():
        if isinstance(key, str) and key.rpartition(".")[2] == KEY:
            if _is_absent(value) or is_ours(value) or _begins(value)[:1] == _PICKLE:
                del plain[key]
    return plain
