# SPDX-License-Identifier: Apache-2.0
"""Weights of which each rank has a part, and which put themselves together: of other libraries.

A library that shards parameters by itself gives its weights the methods of `DistributedWeight`. The
functions here are what a layer calls around its products; weights that are no such ones pass
through. Modules of this library call none of them, and refuse such weights.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

__all__ = [
    "DistributedWeight",
    "finalize_weight_grads",
    "is_distributed_weight",
    "materialize_weight_for_backward",
    "materialize_weight_for_forward",
]


@runtime_checkable
class DistributedWeight(Protocol):
    """A weight that is put together with those of its group, the weights of one layer."""

    def grad_buffer(self) -> Tensor | None:
        """Where the gradient of the whole weight may be written; None: nowhere."""

    def materialize_group_for_forward(self) -> Sequence[Tensor]:
        """Whole weights of the group, for the forward."""

    def materialize_group_for_backward(self) -> Sequence[Tensor]:
        """Whole weights of the group, for the backward."""

    def finalize_group_grads(self, wgrads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Take gradients of the whole weights; return those of the parts, None where kept."""


def is_distributed_weight(weight: Any) -> bool:
    """Return whether a weight has the methods of `DistributedWeight`."""
    return isinstance(weight, DistributedWeight)


def _leader(function: str, weights: Sequence[Any]) -> Any:
    """The weight that acts for a group; None where none is distributed.

    TypeError where some are and others are not.
    """
    distributed = [is_distributed_weight(weight) for weight in weights]
    if any(distributed) and not all(distributed):
        kinds = ", ".join(type(weight).__name__ for weight in weights)
        raise TypeError(f"{function}: weights: {kinds}: all of a layer are distributed, or none")
    return weights[0] if any(distributed) else None


def _as_many(function: str, method: str, made: Sequence, weights: Sequence) -> list:
    """A result for each weight; ValueError for another number."""
    if len(made) != len(weights):
        raise ValueError(
            f"{function}: {method} returned {len(made)} tensors for {len(weights)} weights"
        )
    return list(made)


def materialize_weight_for_forward(weights: Sequence[Any]) -> list[Tensor]:
    """Whole weights of one layer for its forward: those of a group, or plain ones as they are.

    TypeError where some are distributed and others are not; ValueError where the group returns
    another number of tensors.
    """
    return _materialized("forward", weights)


def materialize_weight_for_backward(weights: Sequence[Any]) -> list[Tensor]:
    """Whole weights of one layer for its backward; as `materialize_weight_for_forward`."""
    return _materialized("backward", weights)


def _materialized(way: str, weights: Sequence[Any]) -> list[Tensor]:
    function, method = f"materialize_weight_for_{way}", f"materialize_group_for_{way}"
    leader = _leader(function, weights)
    made = weights if leader is None else getattr(leader, method)()
    return _as_many(function, method, made, weights)


def finalize_weight_grads(
    weights: Sequence[Any], wgrads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of one layer's weights, for autograd, of those of the whole weights.

    A group takes them and returns those of the parts, None where it has kept them itself; those of
    plain weights are returned as they are. Errors are as of `materialize_weight_for_forward`, and
    ValueError where there are not as many gradients as weights.
    """
    function = "finalize_weight_grads"
    given = _as_many(function, "the caller", wgrads, weights)
    leader = _leader(function, weights)
    made = given if leader is None else leader.finalize_group_grads(given)
    return _as_many(function, "finalize_group_grads", made, weights)
