# SPDX-License-Identifier: Apache-2.0
"""The pages that users read: their code blocks, what these ask for, and their links.

What GitHub does not show says how a block is tested: HTML comments right before it.

    <!-- needs: gpu, accelerate -->   run it where there is a GPU and this package; one of
                                     build/clients by its folder's name, NAME-VERSION
    <!-- raises: ValueError -->       it must raise this exception
    <!-- setup: model = ... -->       Python to run before it, in as many lines as it takes
    <!-- not run: why -->             it can not be run or checked here
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMENT = re.compile(r"<!-- (needs|raises|setup|not run):\s*(.*?)\s*-->", re.DOTALL)
FENCE = re.compile(r"(?P<indent> *)(?P<marks>`{3,}|~{3,}) *(?P<language>[\w+-]*)")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes
    ----------
    path : Path
        Its page.
    line : int
        The first line of its text, from 1.
    language : str
        What its fence says; empty without, ``"indented"`` for a block that has no fence.
    text : str
        The code.
    notes : dict of str to str
        What the comments before it say, by their key.
    setup_line : int
        The line where the text of ``notes["setup"]`` begins.
    """

    path: Path
    line: int
    language: str
    text: str
    notes: dict[str, str] = field(default_factory=dict)
    setup_line: int = 0

    @property
    def where(self) -> str:
        """Page and line, as tools print them."""
        return f"{self.path.name}:{self.line}"

    @property
    def needs(self) -> frozenset[str]:
        """What must be there to run it."""
        return frozenset(re.findall(r"[\w.-]+", self.notes.get("needs", "")))

    def pieces(self) -> list[dict[str, str | int]]:
        """Return what is to be run: the setup, and the block."""
        pieces = [{"text": self.text, "line": self.line, "raises": self.notes.get("raises", "")}]
        if "setup" in self.notes:
            setup = {"text": self.notes["setup"], "line": self.setup_line, "raises": ""}
            pieces.insert(0, setup)
        return [{"path": str(self.path), **piece} for piece in pieces]


def guides() -> list[Path]:
    """Return the pages whose code blocks are tested: all of docs is."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]


def pages() -> list[Path]:
    """Return the pages whose links are tested."""
    return [*guides(), ROOT / "CHANGELOG.md", *sorted(ROOT.glob("benchmarks/**/*.md"))]


def links(text: str) -> list[str]:
    """Return the targets of the links of a page."""
    return LINK.findall(text)


def blocks(path: Path, text: str) -> Iterator[Block]:
    """Yield the code blocks of a page in their order.

    Raises
    ------
    ValueError
        If a comment stands before no block, or a fence has no end.
    """
    lines = text.splitlines()
    number, notes, setup_line, in_list = 0, {}, 0, False
    while number < len(lines):
        line, start = lines[number], number
        if line.startswith("<!--"):
            while "-->" not in lines[number]:
                number += 1
            comment = COMMENT.match("\n".join(lines[start : number + 1]))
            if comment:
                notes[comment[1]] = comment[2]
                skipped = comment[0][: comment.start(2) - comment.start()].count("\n")
                setup_line = start + 1 + skipped if comment[1] == "setup" else setup_line
        elif fence := FENCE.match(line):
            number = _find_end(lines, start, fence["marks"], path)
            indent = len(fence["indent"])
            code = "".join(f"{row[indent:]}\n" for row in lines[start + 1 : number])
            yield Block(path, start + 2, fence["language"], code, notes, setup_line)
            notes, setup_line = {}, 0
        elif line.startswith("    ") and not in_list and not lines[start - 1].strip():
            while number + 1 < len(lines) and lines[number + 1].startswith("    "):
                number += 1
            yield Block(path, start + 1, "indented", "\n".join(lines[start : number + 1]))
        elif line.strip():
            if notes:
                raise ValueError(f"{path.name}:{start + 1}: {notes} before it belong to no block")
            in_list = bool(re.match(r"\s*([-*+]|\d+[.)]) ", line)) or (
                in_list and line.startswith(" ")
            )
        number += 1


def _find_end(lines: list[str], start: int, marks: str, path: Path) -> int:
    """Return the line that closes a fence."""
    for number in range(start + 1, len(lines)):
        if lines[number].strip().startswith(marks):
            return number
    raise ValueError(f"{path.name}:{start + 1}: this fence has no end")
