# SPDX-License-Identifier: Apache-2.0
"""Runs of plans whose stages are partly Python: a collective, a quantizer, an overridden operator.

A run of a plan made with external stages (`_core.run_staged`) calls the Python function given for
each of them, with the plan's buffers as tensors. Functions are arguments of the run, never part of
the plan.

A stage may be run in two halves: `Halves` of a stage of a module, `HalvedFunction` as a node of a
graph.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.plan_text import Plan


class Halves(NamedTuple):
    """The two halves of a stage, between which other stages run.

    The second one is called before a stage reads what the stage writes, or writes what it reads; it
    is called too where the run fails in between.
    """

    start: Callable  # ``f(buffers)``; what it returns goes to the second half
    finish: Callable  # ``f(buffers, started)``


class HalvedFunction:
    """A function of rows in two halves, as a node of a graph: work that overlaps what lies between.

    Its inputs are one or more matrices [rows, columns], its output is one in the dtype of the first
    of them; gradients are made in two halves too. What the first half starts may read and write
    these tensors until the second half has returned: on CUDA on another stream, which waits for the
    current one, and which the second half lets the current one wait for.
    """

    ranks: int | Fraction = 1
    """Rows of the output for a row of the inputs: n to gather from n ranks, 1/n to scatter."""

    def columns(self, *columns: int) -> int:
        """Columns of the output, of those of the inputs."""
        return columns[0]

    def start(self, inputs: tuple[Tensor, ...], output: Tensor) -> Any:
        """Begin to write the output; returns what `finish` is given."""
        raise NotImplementedError

    def finish(self, started: Any) -> None:
        """Let the output be there."""
        raise NotImplementedError

    def start_backward(
        self, grad: Tensor, inputs: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> Any:
        """Begin to write the gradients of the inputs, None for one that is not wanted."""
        raise NotImplementedError

    def finish_backward(self, started: Any) -> None:
        """Let the gradients be there."""
        raise NotImplementedError

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Run at once, both halves one after the other."""
        return _AtOnce.apply(self, *inputs)

    def halves(self, wanted: tuple[bool, ...], backward: bool) -> tuple[Callable, Callable]:
        """``start(tensors)``, of the buffers of its stage in their order, and ``finish(started)``.

        `wanted` says which inputs have gradients.
        """
        if not backward:
            return lambda tensors: self.start(tuple(tensors[:-1]), tensors[-1]), self.finish

        def start(tensors: list[Tensor]) -> Any:
            grad, *others = tensors
            made = iter(others[len(wanted) :])
            grads = tuple([next(made) if is_ else None for is_ in wanted])
            return self.start_backward(grad, tuple(others[: len(wanted)]), grads)

        return start, self.finish_backward


class _AtOnce(torch.autograd.Function):
    """A `HalvedFunction` without a plan."""

    @staticmethod
    def forward(ctx: Any, function: HalvedFunction, *inputs: Tensor) -> Tensor:
        first, inputs = inputs[0], tuple([x.contiguous() for x in inputs])
        ctx.save_for_backward(*inputs)
        ctx.function = function
        columns = function.columns(*(x.shape[1] for x in inputs))
        output = first.new_empty(int(first.shape[0] * function.ranks), columns)
        function.finish(function.start(inputs, output))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        inputs, function, grad = ctx.saved_tensors, ctx.function, grad.contiguous()
        wanted = zip(inputs, ctx.needs_input_grad[1:], strict=True)
        grads = tuple([torch.empty_like(x) if needed else None for x, needed in wanted])
        function.finish_backward(function.start_backward(grad, inputs, grads))
        return None, *grads


def named(functions: Mapping[str, Callable | Halves]) -> dict[str, Callable]:
    """Functions by the names of their stages, each half of one in two halves by itself."""
    found: dict[str, Callable] = {}
    for name, function in functions.items():
        if isinstance(function, Halves):
            found |= {name: function.start, f"{name}_finish": function.finish}
        else:
            found[name] = function
    return found


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

    functions: Mapping[str, Callable]
    """``f(buffers)`` for each external stage; of a second half ``f(buffers, started)``."""
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
