# SPDX-License-Identifier: Apache-2.0
"""Tensors that go from rank to rank, in one batch of sends and receives."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, distributed as dist

from transformer_engine.pytorch.torchside.collectives import as_bytes


class Hop(NamedTuple):
    """Tensors under way; they live until it is waited for."""

    works: Sequence[Any] = ()
    sent: Sequence[Tensor] = ()

    def wait(self) -> None:
        """Let the current stream wait for what has been received."""
        for work in self.works:
            work.wait()


def _sendable(tensor: Tensor) -> Tensor:
    """The tensor, or its bytes where not all backends send its dtype."""
    return tensor if tensor.element_size() > 1 else as_bytes(tensor)


def exchange(
    group: Any, sent: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]
) -> Hop:
    """Begin to send dense tensors to ranks of a group, and to receive such from them.

    Between two ranks both name them in the same order.
    """
    works = [
        dist.P2POp(way, _sendable(each), group=group, group_peer=rank)
        for way, tensors in ((dist.isend, sent), (dist.irecv, into))
        for rank, each in tensors
    ]
    return Hop(dist.batch_isend_irecv(works) if works else (), [each for _, each in sent])
