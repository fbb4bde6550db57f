# SPDX-License-Identifier: Apache-2.0
"""Text as bytes: where it comes from, how it is split, and the bigram model it is judged by.

A byte-level model needs no tokenizer and its loss can be checked against a model that anyone can
compute: how often does byte b follow byte a.  The default text is the Python standard library that
the running interpreter was shipped with, so that an example trains on real text without a
download.  Whole files are held out for validation: a window never spans both sides.
"""

from __future__ import annotations

import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

# Not source text: tests repeat themselves, the rest are tables, prose, or differ per machine.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings",
           "pydoc_data", "__pycache__"}  # fmt: skip
HELD_OUT = 20  # one file in so many is validation text; of a single text, its last 1/HELD_OUT


@dataclass(frozen=True)
class ByteText:
    """Training and validation bytes, on the device that trains.

    Attributes
    ----------
    name : str
        What the text is, for the report.
    train, valid : torch.Tensor
        One-dimensional uint8 tensors.
    """

    name: str
    train: torch.Tensor
    valid: torch.Tensor

    def to(self, device: str | torch.device) -> ByteText:
        """Return the same text with its tensors on `device`."""
        return ByteText(self.name, self.train.to(device), self.valid.to(device))


def _tensor(data: bytes) -> torch.Tensor:
    if not data:  # which frombuffer refuses
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _python_files(root: Path) -> list[Path]:
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (
        path
        for path in found
        if not SKIPPED.intersection(path.parts) and not path.name.startswith("_sysconfigdata")
    )
    return sorted(kept, key=lambda path: path.as_posix())


def standard_library() -> ByteText:
    """Read the sources of the running interpreter's standard library.

    The order of the files is that of their names and a file is held out by a checksum of its name,
    so the same interpreter gives the same text everywhere.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sides: dict[bool, list[bytes]] = {False: [], True: []}
    for path in _python_files(root):
        held_out = zlib.crc32(path.as_posix().encode()) % HELD_OUT == 0
        sides[held_out].append((root / path).read_bytes())
    if not sides[False] or not sides[True]:
        raise SystemExit(f"{root} holds too few Python sources to train on: give --text FILE")
    name = f"Python {sysconfig.get_python_version()} standard library"
    return ByteText(name, _tensor(b"".join(sides[False])), _tensor(b"".join(sides[True])))


def read_text(path: Path) -> ByteText:
    """Read one file; its end is the validation text."""
    data = path.read_bytes()
    split = len(data) - len(data) // HELD_OUT
    return ByteText(path.name, _tensor(data[:split]), _tensor(data[split:]))


def load(path: Path | None, length: int) -> ByteText:
    """Load `path`, or the standard library, and check that windows of `length` bytes fit."""
    if path is not None and not path.is_file():
        raise SystemExit(f"--text: there is no file {path}")
    text = standard_library() if path is None else read_text(path)
    shortest = min(len(text.train), len(text.valid))
    if shortest <= length:
        raise SystemExit(
            f"{text.name}: {len(text.train)} training and {len(text.valid)} validation bytes are "
            f"too few for windows of {length} bytes: give a longer text or a smaller --seq"
        )
    return text


def windows(
    data: torch.Tensor, starts: torch.Tensor, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut a window from each start on.

    Parameters
    ----------
    data : torch.Tensor
        Bytes, uint8.
    starts : torch.Tensor
        int64 [n], each less than `len(data) - length`.
    length : int
        Bytes per window.

    Returns
    -------
    tuple of torch.Tensor
        The windows, and for each of their bytes the one that follows it; both int64 [length, n],
        the order in which a Transformer layer takes them.
    """
    offsets = torch.arange(length + 1, device=data.device)
    cut = data[starts + offsets[:, None]].long()
    return cut[:-1], cut[1:]


def training_starts(data: torch.Tensor, length: int, batch: int, seed: int) -> torch.Tensor:
    """Draw the windows of one step; they depend on `seed` alone, whatever ran before."""
    generator = torch.Generator(device=data.device).manual_seed(seed)
    return torch.randint(
        len(data) - length, (batch,), generator=generator, device=data.device, dtype=torch.int64
    )


def validation_starts(data: torch.Tensor, length: int, count: int) -> torch.Tensor:
    """Return at most `count` starts, evenly spaced over the whole of `data`."""
    available = len(data) - length
    count = min(count, available)
    return torch.arange(count, device=data.device) * available // count


def bigram_loss(train: torch.Tensor, before: torch.Tensor, target: torch.Tensor) -> float:
    """Mean cross-entropy in nats of a bigram model fitted on `train`, of `target` after `before`.

    Every pair is counted 0.1 times more often than seen, so that none is impossible.
    """
    pairs = train[:-1].long() * 256 + train[1:].long()
    counts = torch.bincount(pairs, minlength=256 * 256).view(256, 256).double() + 0.1
    log_probability = (counts / counts.sum(dim=1, keepdim=True)).log()
    return -log_probability[before, target].mean().item()
