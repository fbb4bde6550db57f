# SPDX-License-Identifier: Apache-2.0
"""Plans, and plans as text: what a graph of torch carries, so that any process can make the plan.

The text is C's (te_graph_write). A graph of torch does not hold its plans: where nobody else does
any more, or in another process, they are made again.
"""

import functools
import weakref
from typing import Any, NamedTuple

from transformer_engine import _core

_HELD: weakref.WeakValueDictionary[str, "Plan"] = weakref.WeakValueDictionary()
"""Plans that somebody holds, by text."""


class Plan:
    """A plan, for as long as somebody holds it."""

    def __init__(self, text: str, direction: int, graph: Any) -> None:
        self.native = _core.make_plan(direction, graph)  # what ``_core`` runs
        self.text = text  # see `plan_of`

    @functools.cached_property
    def graph(self) -> "PlanGraph":
        """The graph that it is of, as its text has it."""
        return read_text(self.text)

    @functools.cached_property
    def described(self) -> _core.PlanDescription:
        """Result of ``_core.plan_describe`` for it."""
        return _core.plan_describe(self.native)

    @functools.cached_property
    def casts(self) -> tuple:
        """How its nodes quantize; the same of a forward with and without a backward."""
        return tuple(node.quantization for node in self.graph.nodes)

    @functools.cached_property
    def measures(self) -> bool:
        """True where its linear layers measure operands that have no scale yet."""
        linear = self.graph.numbers_of(_core.NODE_LINEAR)
        return any(self.graph.nodes[n].flags & _core.LINEAR_MEASURE_OPERANDS for n in linear)

    @functools.cached_property
    def given(self) -> int:
        """How many tensors a run is given, besides what the forward has packed."""
        return sum(b.role in ("input", "parameter", "state") for b in self.described.buffers)

    @property
    def stages(self) -> tuple[_core.Stage, ...]:
        """Its stages."""
        return self.described.stages

    @functools.cached_property
    def links(self) -> dict[tuple[str, int], int]:
        """Numbers of its buffers by link."""
        buffers = enumerate(self.described.buffers)
        return {(b.link, b.of): i for i, b in buffers if b.role != "view"}

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Numbers of its buffers by name."""
        return {buffer.name: i for i, buffer in enumerate(self.described.buffers)}


class PlanGraph(NamedTuple):
    """The graph of a plan, and which of its plans that is."""

    direction: int  # ``_core.DIRECTION_*``
    flags: int  # ``_core.GRAPH_*``
    values: tuple[_core.Value, ...]
    nodes: tuple[_core.Node, ...]

    def numbers_of(self, kind: int) -> list[int]:
        """Numbers of the nodes of a kind, ``_core.NODE_*``."""
        return [n for n, node in enumerate(self.nodes) if node.kind == kind]

    def weight_sizes(self, node: int) -> tuple[int, int]:
        """(out_features, in_features) of a linear node."""
        out_features, in_features = self.values[self.nodes[node].inputs[1]].shape
        return out_features.add, in_features.add

    def rows_symbol(self, node: int, at: int = 0) -> int:
        """`SYMBOL_*` of the rows of an input of a node, a matrix or heads."""
        shape = self.values[self.nodes[node].inputs[at]].shape
        return shape[0].symbol - (len(shape) == 4)


def make_plan(direction: int, graph: Any) -> Plan:
    """Return the plan of a graph, made where nobody holds it; arguments as of `_core.make_plan`."""
    text = _core.write_graph(direction, graph)
    plan = _HELD.get(text)
    if plan is None:
        plan = _HELD[text] = Plan(text, direction, graph)
    return plan


@functools.lru_cache
def read_text(text: str) -> PlanGraph:
    """Read the text of a plan, in this process or another one.

    ValueError for no such text, or one of another version of this package.
    """
    direction, graph = _core.read_graph(text)
    return PlanGraph(direction, *graph)


@functools.lru_cache
def plan_of(text: str) -> Plan:
    """Return the plan of a text, made where nobody holds it; ValueError as of `read_text`."""
    plan = _HELD.get(text)
    if plan is None:
        graph = read_text(text)
        plan = make_plan(graph.direction, graph)
    return plan
