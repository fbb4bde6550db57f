# SPDX-License-Identifier: Apache-2.0
"""Plans, and plans as text: what a graph of torch carries, so that any process can make the plan.

``plan/6 (direction, flags, values, nodes)``: the version of this format, and the arguments of
``_core.make_plan``. A graph does not hold its plans: where nobody else does any more, or in another
process, they are made again.
"""

import ast
import functools
import weakref
from typing import Any, NamedTuple

from transformer_engine import _core

_HEAD = "plan/6 "
"""With a version that is raised whenever a number of a plan gets another meaning."""

_HELD: weakref.WeakValueDictionary[str, "Plan"] = weakref.WeakValueDictionary()
"""Plans that somebody holds, by text."""


class Stage(NamedTuple):
    """A stage of a plan."""

    name: str  # for people
    operator: str  # "external" where a Python function runs it
    node: int  # that it belongs to, or -1
    buffers: tuple[int, ...]  # numbers of those that it reads or writes
    native: str  # the operator that runs it, or would
    step: int  # number of ``_core.LINEAR_STAGES``, or -1


class Node(NamedTuple):
    """A node as ``_core.make_plan`` takes it."""

    name: str
    kind: int
    variant: int
    flags: int
    inputs: tuple
    output: int
    numbers: tuple
    slices: tuple
    quantization: tuple
    owner: int
    slots: tuple
    gather: int
    external: tuple


class Plan:
    """A plan, for as long as somebody holds it."""

    def __init__(self, graph: "PlanGraph", text: str) -> None:
        self.native = _core.make_plan(*graph)  # what ``_core`` runs
        self.graph = graph  # that it is of
        self.text = text  # see `plan_of`

    @functools.cached_property
    def described(self) -> dict:
        """What ``_core.plan_describe`` says of it."""
        return _core.plan_describe(self.native)

    @functools.cached_property
    def casts(self) -> tuple:
        """How its nodes quantize; the same of a forward with and without a backward."""
        return tuple(self.graph.node(n).quantization for n in range(len(self.graph.nodes)))

    @functools.cached_property
    def measures(self) -> bool:
        """Whether its linear layers measure operands that have no scale yet."""
        linear = self.graph.numbers_of(_core.NODE_LINEAR)
        return any(self.graph.node(n).flags & _core.LINEAR_MEASURE_OPERANDS for n in linear)

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Its stages."""
        return tuple(Stage(*stage) for stage in self.described["stages"])

    @functools.cached_property
    def links(self) -> dict[tuple[str, int], int]:
        """Numbers of its buffers by link."""
        buffers = enumerate(self.described["buffers"])
        return {(b[5], b[6]): i for i, b in buffers if b[1] != "view"}

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """Numbers of its buffers by name."""
        return {name: i for i, (name, *_) in enumerate(self.described["buffers"])}


class PlanGraph(NamedTuple):
    """Arguments of ``_core.make_plan``; see `_core.make_plan` for the tuples."""

    direction: int  # ``_core.DIRECTION_*``
    flags: int  # ``_core.GRAPH_*``
    values: tuple  # what the graph consists of
    nodes: tuple  # what the graph consists of

    def node(self, number: int) -> Node:
        """Fields of a node."""
        return Node(*self.nodes[number])

    def numbers_of(self, kind: int) -> list[int]:
        """Numbers of the nodes of a kind, ``_core.NODE_*``."""
        return [n for n in range(len(self.nodes)) if self.node(n).kind == kind]

    def weight_sizes(self, node: int) -> tuple[int, int]:
        """(out_features, in_features) of a linear node."""
        return self.values[self.node(node).inputs[1]][4]

    def rows_symbol(self, node: int, at: int = 0) -> int:
        """`SYMBOL_*` of the rows of an input of a node, a matrix or heads."""
        shape = self.values[self.node(node).inputs[at]][4]
        return shape[0][0] - (len(shape) == 4)


def make_plan(direction: int, flags: int, values: tuple, nodes: tuple) -> Plan:
    """Return the plan of a graph, made where nobody holds it."""
    graph = PlanGraph(direction, flags, values, nodes)
    text = _HEAD + repr(tuple(graph))
    plan = _HELD.get(text)
    if plan is None:
        plan = _HELD[text] = Plan(graph, text)
    return plan


@functools.lru_cache
def read_text(text: str) -> PlanGraph:
    """Read the text of a plan, in this process or another one.

    ValueError for no such text, or one of another version of this package.
    """
    if not text.startswith(_HEAD):
        raise ValueError(
            f"plan {text[:16]!r}: this version of transformer_engine reads {_HEAD.strip()}: export "
            "the program again with it, or load it with the version that exported it"
        )
    try:
        content: Any = ast.literal_eval(text.removeprefix(_HEAD))
        return PlanGraph(*content)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"plan {text[:64]!r}: damaged: export the program again") from error


@functools.lru_cache
def plan_of(text: str) -> Plan:
    """Return the plan of a text, made where nobody holds it; ValueError as of `read_text`."""
    plan = _HELD.get(text)
    return make_plan(*read_text(text)) if plan is None else plan
