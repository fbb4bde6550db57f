# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files that are either whole or refused.

A line of text comes first: what the file is, the SHA-256 of all that follows and how long that is.
What follows is written by `torch.save`.  A file appears under its name when it is complete.
"""

from __future__ import annotations

import hashlib
import io
import re
from pathlib import Path
from typing import Any, NoReturn

import torch

KIND = "examples/train_gpt.py checkpoint 1"
HEADER = re.compile(rb"([^\n]+), sha256 ([0-9a-f]{64}), bytes (\d+)\n")


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint; an older one of the same name stays until this one is complete."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    data = buffer.getbuffer()
    header = f"{KIND}, sha256 {hashlib.sha256(data).hexdigest()}, bytes {len(data)}\n"
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(header.encode())
        file.write(data)
    partial.replace(path)


def load(path: Path, device: str | torch.device) -> dict[str, Any]:
    """Read a checkpoint that `save` wrote, its tensors onto `device`.

    Raises
    ------
    SystemExit
        If the file can not be read, is none of `save`, or is not what `save` wrote; the message
        names it and says what to do.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        _refuse(path, f"can not be read ({error.strerror})")
    if not data:
        _refuse(path, "is empty")
    header = HEADER.match(data)
    if header is None or header[1] != KIND.encode():
        _refuse(path, f"does not begin as a file of this program does ({KIND!r})")
    content = memoryview(data)[header.end() :]
    if len(content) != int(header[3]):
        _refuse(path, f"has {len(content):,} bytes of content and {int(header[3]):,} were written")
    found = hashlib.sha256(content).hexdigest()
    if found != header[2].decode():
        _refuse(path, f"was changed: its SHA-256 is {found}, {header[2].decode()} was written")
    return torch.load(io.BytesIO(content), map_location=device, weights_only=True)


def _refuse(path: Path, what: str) -> NoReturn:
    raise SystemExit(
        f"{path} {what}: --resume an undamaged copy or another checkpoint, or delete this one and"
        " train from the beginning"
    )
