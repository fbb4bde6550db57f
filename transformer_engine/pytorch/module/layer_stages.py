# SPDX-License-Identifier: Apache-2.0
"""Functions at the stages of a layer's plan: of the program's nodes, and of its modules' stages."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.plan_text import Plan
from transformer_engine.common.plans import dims_of, is_of_source, lead_of
from transformer_engine.pytorch.execution.stages import HalvedFunction, Halves, StageBuffers
from transformer_engine.pytorch.module.call import ModuleCall

_Lend = Callable[[int], Tensor]
"""Lends a buffer of the plan that runs, by its number."""


def function_of_stage(
    function: Callable, wanted: tuple[bool, ...], stage: _core.Stage, backward: bool
) -> Callable | Halves:
    """A function of the program at a stage of its node."""

    def matrices(lend: _Lend) -> list[Tensor]:
        # Arguments and outputs of a call have its leading dims.
        return [lend(number).flatten(0, -2) for number in stage.buffers]

    if isinstance(function, HalvedFunction):
        start, finish = function.halves(wanted, backward)

        def begin(lend: _Lend) -> tuple:
            tensors = matrices(lend)
            return start(tensors), tensors  # which are held: some may be copies

        return Halves(begin, lambda lend, started: finish(started[0]))
    if backward:
        return lambda lend: _run_gradient(function, wanted, matrices(lend))
    return lambda lend: _run_function(function, matrices(lend))


def lending(plan: Plan, lend: _Lend, *sizes: int) -> _Lend:
    """Argument of functions of a layer's stages: the function that lends a buffer by its number."""
    del plan, sizes
    return lend


def _run_function(function: Callable, tensors: list[Tensor]) -> None:
    """A function of a program in a forward: of the inputs, to the output."""
    *inputs, output = tensors
    with torch.no_grad():
        output.copy_(function(*inputs))


def _run_gradient(function: Callable, wanted: tuple[bool, ...], tensors: list[Tensor]) -> None:
    """Its gradients, by autograd: of that of the output, and the inputs."""
    grad, *others = tensors
    inputs, grads = others[: len(wanted)], others[len(wanted) :]
    inputs = [x.detach().requires_grad_(is_) for x, is_ in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        out = function(*inputs)
    asked_for = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad(out, asked_for, grad, allow_unused=True)
    for into, made in zip(grads, found, strict=True):
        into.zero_() if made is None else into.copy_(made)


_OF_NODE = ("mean", "rsigma", "bias_cast")


class ModuleStages(NamedTuple):
    """A module in a layer, some of whose stages functions run (`LinearBase.override_stages`).

    They are given the buffers that they know, those of the module's own plans.
    """

    call: ModuleCall  # that the module would make
    prefix: str  # of the names of its nodes in the layer
    values: dict[int, int]  # numbers of its values there
    node: int  # number of its first node there
    owner: int  # number of the module
    rows: _core.Extent  # of its input

    def functions(self, way: str, plan: Plan, order: dict[int, int]) -> dict[str, Callable] | None:
        """Functions of stages of the layer's plan, whose values have these numbers.

        None where such a stage is given other buffers there.
        """
        own, slots = getattr(self.call.plans, way), self.call.slots
        if own is None:
            return {}
        places = self._places(own, plan, order)
        if places is None:
            return None
        lead = lead_of(plan, is_of_source(self.rows))
        lead = lead, partial(dims_of, plan, lead)
        slot = 0 if slots is None else getattr(slots, f"{way}_slot")
        functions, given = self.call.staged.functions, (own, places, lead, slot, self._heights(own))
        return {
            self.prefix + stage.name: partial(self._run, functions[stage.name], *given)
            for stage in own.stages
            if stage.external
        }

    def _heights(self, own: Plan) -> dict[int, int]:
        """Of each buffer with leading dims how often it has the first one of the layer's."""
        graph = self.call.plans.graph
        of_input = graph.values[graph.tensors[0][1]].shape[0].multiply
        return {
            number: self.rows.multiply * buffer.shape[0].multiply // of_input
            for number, buffer in enumerate(own.described.buffers)
            if buffer.leading and buffer.role in ("input", "output")
        }

    def _places(self, own: Plan, plan: Plan, order: dict[int, int]) -> dict[int, int] | None:
        """Numbers of buffers of the module's plan in the layer's, as far as they are there.

        What an external stage is given is told by its place. A gradient has other contributions in
        a layer, and is not told otherwise.
        """
        found = {}
        for (link, of), number in own.links.items():
            there = plan.links.get((link, self._moved(link, of, order)))
            if there is not None and link not in ("gradient", "part"):
                found[number] = there
        given = {stage.name: stage.buffers for stage in reversed(plan.stages)}
        for stage in own.stages:
            there = given.get(self.prefix + stage.name, ())
            if stage.external and len(there) != len(stage.buffers):
                return None
            if stage.external:
                found.update(zip(stage.buffers, there, strict=True))
        return found

    def _moved(self, link: str, of: int, order: dict[int, int]) -> int:
        if link == "value":
            return order[self.values[of]]
        if link in ("scale", "history"):
            return self.owner
        if link == "partials":
            return of
        return of + self.node * (1 if link in _OF_NODE else _core.OPERAND_ROLES)

    def _run(
        self,
        function: Callable,
        own: Plan,
        places: dict[int, int],
        lead: tuple[int, Callable],
        slot: int,
        heights: dict[int, int],
        lend: _Lend,
        *started: Any,
    ) -> Any:
        first, *others = lead[1](lend(lead[0]).shape)

        def lend_own(number: int) -> Tensor:
            buffer = own.described.buffers[number]
            if number not in places:
                raise KeyError(f"{buffer.name}: the layer's plan has no such buffer at this stage")
            tensor = lend(places[number])
            if number not in heights:
                return tensor
            return tensor.view(heights[number] * first, *others, tensor.shape[-1])

        rows = math.prod((self.rows.multiply * first, *others))  # of the module's input
        return function(StageBuffers(own, lend_own, rows, slot), *started)
