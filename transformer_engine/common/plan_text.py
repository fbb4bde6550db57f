# SPDX-License-Identifier: Apache-2.0
"""Plans as text: what a graph of torch carries, so that a process that never made a plan can.

``plan/3 (direction, flags, values, nodes)``: the version of this format, and the arguments of
``_core.make_plan``. A plan's id is a hash of these, but a process that loads an exported program
knows no plan of that id.
"""

import ast
import functools
from typing import Any, NamedTuple

from transformer_engine import _core

_HEAD = "plan/3 "
"""With a version that is raised whenever a number of a plan gets another meaning."""

_TEXTS: dict[int, str] = {}


class PlanGraph(NamedTuple):
    """Arguments of ``_core.make_plan``; see `_core.make_plan` for the tuples."""

    direction: int  # ``_core.DIRECTION_*``
    flags: int  # ``_core.GRAPH_*``
    values: tuple  # what the graph consists of
    nodes: tuple  # what the graph consists of

    def weight_sizes(self, node: int) -> tuple[int, int]:
        """(out_features, in_features) of a linear node."""
        _, _, _, _, inputs, *_ = self.nodes[node]
        return self.values[inputs[1]][4]

    def rows_symbol(self, node: int, at: int = 0) -> int:
        """`SYMBOL_*` of the rows of an input of a node."""
        _, _, _, _, inputs, *_ = self.nodes[node]
        return self.values[inputs[at]][4][0][0]


def make_plan(direction: int, flags: int, values: tuple, nodes: tuple) -> int:
    """Id of a plan, made where it is not there yet; `text_of` knows its text from now on."""
    graph = PlanGraph(direction, flags, values, nodes)
    plan = _core.make_plan(*graph)
    if plan not in _TEXTS:
        _TEXTS[plan] = _HEAD + repr(tuple(graph))
    return plan


def text_of(plan: int) -> str:
    """Text of a plan that `make_plan` made."""
    return _TEXTS[plan]


@functools.lru_cache
def read_text(text: str) -> PlanGraph:
    """Read what `text_of` gave, in this process or another one.

    ValueError for no such text, or one of another version of this package.
    """
    if not text.startswith(_HEAD):
        raise ValueError(
            f"plan {text[:16]!r}: this version of transformer_engine reads {_HEAD}: export the "
            "program again with it, or load it with the version that exported it"
        )
    content: Any = ast.literal_eval(text.removeprefix(_HEAD))
    return PlanGraph(*content)


@functools.cache
def plan_of(text: str) -> int:
    """Id of the plan of a text, made where this process has none; ValueError as of `read_text`."""
    return make_plan(*read_text(text))
