# SPDX-License-Identifier: Apache-2.0
"""Which implementations compute what their operators are: operator x vendor x dtype x recipe."""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from transformer_engine import _core
from transformer_engine.plugin.adapters import LIBRARY, NATIVE
from transformer_engine.plugin.builtin import ABSENT, OPERATORS
from transformer_engine.plugin.conformance import WITHOUT_CASES, Row, check, groups
from transformer_engine.plugin.core import get_registry
from transformer_engine.plugin.core.types import BackendImplKind, OpImpl, vendor_key
from transformer_engine.plugin.definitions import NAME
from transformer_engine.pytorch.torchside.device import type_name

PASSES, FAILED, REFUSED, ABSENT_ = "passes", "failed", "refused", "absent"
_OURS = frozenset((NATIVE, NAME, "reference.absent"))


class Cell(NamedTuple):
    """Outcome of an implementation for a dtype and a recipe."""

    op_name: str
    vendor: str  # or the `impl_id` of what has no vendor
    impl_id: str  # "" of an operator that the vendor has not
    dtype: str  # of the tensors in high precision; "" of calls without
    recipe: str  # "none": without quantized tensors and quantizers
    outcome: str  # "passes", "failed", "refused" or "absent"
    passed: int  # cases
    refused: int
    failed: int
    why: str  # of refusals the first reason, of failures the case and what is wrong

    def in_words(self) -> str:
        """The outcome, and why."""
        numbers = {PASSES: self.passed, REFUSED: self.refused, FAILED: self.failed}
        count = f" {numbers[self.outcome]}" if self.outcome in numbers else ""
        others = f", refused {self.refused}" if self.outcome == PASSES and self.refused else ""
        return f"{self.outcome}{count}{others}{self.why and f': {self.why}'}"


class Matrix(NamedTuple):
    """Result of `matrix`; ``str()`` of it is a table."""

    device: str
    cells: tuple[Cell, ...]

    @property
    def failed(self) -> tuple[Cell, ...]:
        """Those of which a case failed."""
        return tuple(cell for cell in self.cells if cell.outcome == FAILED)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for cell in self.cells:
            yield cell.op_name, cell.vendor, cell.dtype, cell.recipe, cell.in_words()

    def __str__(self) -> str:
        rows = [("operator", "vendor", "dtype", "recipe", f"on {self.device}"), *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        pairs = (zip(row, widths, strict=True) for row in rows)
        return "\n".join("  ".join(f"{t:{w}}" for t, w in pair).rstrip() for pair in pairs)

    def to_markdown(self) -> str:
        """A table for a page."""
        lines = [
            f"| operator | vendor | dtype | recipe | on {self.device} |",
            "|---|---|---|---|---|",
        ]
        for op, *others, words in self._rows():
            escaped = words.replace("|", "\\|").replace("\n", " ")
            lines.append(f"| `{op}` | {' | '.join(others)} | {escaped} |")
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """All cells, for programs."""
        found = {"device": self.device, "cells": [cell._asdict() for cell in self.cells]}
        return json.dumps(found, indent=1)


def vendors() -> tuple[str, ...]:
    """Who has registered implementations beside this library: vendors, and else `impl_id`s."""
    found = {_whose(impl): None for impl in _registered() if impl.impl_id not in _OURS}
    return tuple(sorted(found))


def implementations(vendor: str) -> tuple[OpImpl, ...]:
    """Those of a vendor, or of an `impl_id`, by operator; LookupError where there are none."""
    key = vendor_key(vendor)
    found = [one for one in _registered() if key in (vendor_key(_whose(one)), one.impl_id)]
    if not found:
        known = ", ".join(vendors()) or "nobody beside this library"
        raise LookupError(f"{vendor!r} has registered no implementation; who has: {known}")
    return tuple(sorted(found, key=lambda one: one.op_name))


def matrix(
    device: Any = "cpu",
    named: Iterable[str] = (),
    ops: Iterable[str] = (),
    tell: Callable[[str], Any] = lambda line: None,
    lacking: bool = True,
) -> Matrix:
    """Check implementations of vendors on a type of devices, and list what comes of it.

    `named` are vendors, or `impl_id`s of what has none ("default.native"); () all but this
    library's own. `ops` are operators, () all that somebody named has. ``tell`` gets a line for
    each implementation that was checked. `lacking`: list as "absent" what somebody lacks of `ops`,
    or of all of `transformer_engine_torch`, with the dtypes and recipes that its cases have.
    """
    found = vendors()  # which loads plug-ins: one may bring the device
    device, wanted = torch.device(device), frozenset(ops)
    cells: list[Cell] = []
    cases: dict[str, tuple] = {}  # what `groups` finds of operators that somebody lacks
    strange = wanted - _named()
    if strange:
        raise LookupError(f"there is no operator {', '.join(sorted(strange))}")
    for vendor in tuple(named) or found:
        there = set()
        for impl in implementations(vendor):
            if wanted and impl.op_name not in wanted:
                continue
            there.add(impl.op_name)
            made = tuple(_cells(impl, device))
            tell(f"{impl.op_name} by {impl.impl_id}: {summary(made)}")
            cells += made
        for op in sorted((wanted or _expected()) - there) if lacking else ():
            if op not in cases:
                cases[op] = groups(op) or (("", ""),)
            for group in cases[op]:
                cells.append(Cell(op, vendor, "", *group, ABSENT_, 0, 0, 0, ""))
    return Matrix(type_name(device), tuple(sorted(cells, key=lambda cell: cell[:5])))


def summary(cells: Iterable[Cell]) -> str:
    """How many cases passed, failed and were refused, and the first failure."""
    cells = tuple(cells)
    passed, failed, refused = (
        sum(getattr(cell, name) for cell in cells) for name in ("passed", "failed", "refused")
    )
    why = next((cell.why for cell in cells if cell.outcome == FAILED), "")
    return f"{passed} passed, {failed} failed, {refused} refused{why and f' ({why})'}"


def _whose(impl: OpImpl) -> str:
    return impl.vendor if impl.kind is BackendImplKind.VENDOR else impl.impl_id


def _registered() -> Iterator[OpImpl]:
    registry = get_registry()
    for op in registry.list_operators():
        yield from registry.get_implementations(op)


def _expected() -> frozenset[str]:
    """Operators of `transformer_engine_torch` that compute something and are built."""
    return frozenset(OPERATORS) - ABSENT.keys() - WITHOUT_CASES.keys()


def _named() -> set[str]:
    """Operators that there are, those that plug-ins have brought too."""
    return {*OPERATORS, *LIBRARY, *get_registry().snapshot().impls_by_op}


def _cells(impl: OpImpl, device: torch.device) -> Iterator[Cell]:
    """One for each dtype and recipe of its cases; one alone of what can not be checked."""
    slot, named = impl.fn, (impl.op_name, _whose(impl), impl.impl_id)
    why = ""
    if isinstance(slot, _core.NativeSlot) and _core.device_type_name(slot.device) != type_name(
        device
    ):
        why = f"it is for {_core.device_type_name(slot.device)}"
    if not why and impl.op_name not in OPERATORS and impl.op_name not in LIBRARY:
        why = "it is no operator of this library"
    why = why or impl.unavailable_because()
    rows: tuple[Row, ...] = ()
    if not why:
        try:
            rows = check(impl, device=device).rows
        except (NotImplementedError, ValueError) as error:
            why = str(error)
    if not rows:
        yield Cell(*named, "", "", REFUSED, 0, 0, 0, why or "there is no case")
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row.dtype, row.recipe), []).append(row)
    for (dtype, recipe), group in grouped.items():
        yield _cell(named, dtype, recipe, group)


def _cell(named: tuple[str, str, str], dtype: str, recipe: str, rows: list[Row]) -> Cell:
    outcomes = [row.outcome for row in rows]
    passed, refused, failed = map(outcomes.count, ("passed", "refused", "failed"))
    outcome = FAILED if failed else PASSES if passed else REFUSED
    first = next((row for row in rows if row.outcome == ("failed" if failed else "refused")), None)
    why = ""
    if first is not None:
        why = f"{first.case}: {first.why}" if failed else first.why
    return Cell(*named, dtype, recipe, outcome, passed, refused, failed, why.partition("\n")[0])
