# SPDX-License-Identifier: Apache-2.0
"""Runs of plans whose stages are partly Python: a collective, a quantizer, an overridden operator.

A run of a plan made with external stages (`_core.run_staged`) calls the Python function given for
each of them, with the plan's buffers as tensors. Functions are arguments of the run, never part of
the plan.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.plan_text import Plan


def external_steps(
    stages: Mapping[str, Any] | None, prefixes: tuple[str, ...] = ("",)
) -> tuple[frozenset[int], ...]:
    """`LinearSpec.external` of each part, one with each prefix, for stages by name.

    ValueError for a name that is none of ``_core.LINEAR_STAGES`` with a prefix.
    """
    known = {
        prefix + name: (part, step)
        for part, prefix in enumerate(prefixes)
        for step, name in enumerate(_core.LINEAR_STAGES)
    }
    steps: list[set[int]] = [set() for _ in prefixes]
    for name in stages or ():
        if name not in known:
            raise ValueError(f"stage {name!r} does not exist; there are {tuple(known)}")
        part, step = known[name]
        steps[part].add(step)
    return tuple(map(frozenset, steps))


class StageBuffers(Mapping[str, Tensor]):
    """The buffers of a running plan by name, as tensors that share its memory.

    FP8 buffers have torch's FP8 dtypes. Quantized data comes as ``<tensor>_row`` [rows, padded
    columns], ``<tensor>_column`` [columns, padded rows] (transposed) and ``<tensor>_scales``
    {1/scale, scale}, or where rows or tiles have scales ``<tensor>_row_scales`` and
    ``<tensor>_column_scales`` (TE_SCALING_MODES); padding must be written as zero. ``scale`` and
    ``history`` are the whole chunks. Buffers can be taken while the run goes on; tensors may be
    kept, but later stages write over those that are not read any more. ``rows`` is the product of
    the leading dims, ``slot`` the first slot of the module in `scale` and `history`.
    """

    def __init__(self, plan: Plan, lend: Callable[[int], Tensor], rows: int, slot: int) -> None:
        self.lend = lend
        self.plan = plan
        self._numbers = plan.numbers
        self.rows = rows
        self.slot = slot

    def __getitem__(self, name: str) -> Tensor:
        """Tensor of a buffer; KeyError for one that the plan does not have."""
        return self.lend(self._numbers[name])

    def linked(self, link: str, of: int) -> Tensor | None:
        """Tensor of the buffer with a link (see `common.graphs.Link`); None where there is none."""
        number = self.plan.links.get((link, of))
        return None if number is None else self.lend(number)

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


Observer = Callable[[_core.Stage, StageBuffers, bool], Any]
"""``f(stage, buffers, done)``: looks on before a stage, and when it is done."""


def _tell(observer: Observer, plan: Plan, number: int, buffers: StageBuffers, done: bool) -> None:
    observer(plan.stages[number], buffers, done)


class Staged(NamedTuple):
    """The Python functions of runs."""

    functions: Mapping[str, Callable]  # ``f(buffers)`` for each external stage
    observer: Observer | None = None
    make_buffers: Callable = StageBuffers
    """Arguments of the functions: their plan, lend(), rows and first slot (see `StageBuffers`)."""

    def of(self, plan: Plan) -> tuple[Mapping, Callable | None, Callable]:
        """Argument of ``_core.run_staged`` for a run of a plan."""
        observer = self.observer
        if observer is not None:
            observer = functools.partial(_tell, observer, plan)
        return self.functions, observer, functools.partial(self.make_buffers, plan)

    def wrapped(self, wrap: Callable[[Callable], Callable]) -> "Staged":
        """The same with all functions wrapped."""
        functions = {name: wrap(function) for name, function in self.functions.items()}
        observer = None if self.observer is None else wrap(self.observer)
        return Staged(functions, observer, self.make_buffers)
