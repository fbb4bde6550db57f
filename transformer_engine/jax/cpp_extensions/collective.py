# SPDX-License-Identifier: Apache-2.0
"""Collectives that overlap a product: names of them, which products refuse."""

from dataclasses import dataclass
from enum import Enum


class CollectiveOp(Enum):
    """A collective around a product."""

    NONE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2


@dataclass(frozen=True)
class CollectiveOpSet:
    """Collectives of a layer's products."""

    forward: CollectiveOp = CollectiveOp.NONE
    backward: CollectiveOp = CollectiveOp.NONE

    @staticmethod
    def create(forward_collective_op: CollectiveOp) -> "CollectiveOpSet":
        """Make the set whose backward has the opposite collective."""
        opposite = {
            CollectiveOp.ALL_GATHER: CollectiveOp.REDUCE_SCATTER,
            CollectiveOp.REDUCE_SCATTER: CollectiveOp.ALL_GATHER,
        }
        return CollectiveOpSet(
            forward_collective_op, opposite.get(forward_collective_op, CollectiveOp.NONE)
        )


noop_collective_op_set = CollectiveOpSet()
"""No collectives."""


def refuse_collectives(name: str, *sets: CollectiveOpSet) -> None:
    """Raise NotImplementedError for a set that has any."""
    for given in sets:
        if given != noop_collective_op_set:
            raise NotImplementedError(
                f"{name}: collective_op_set={given}: products that overlap collectives are not "
                "built; leave it out, and XLA inserts the collectives that a mesh needs"
            )
