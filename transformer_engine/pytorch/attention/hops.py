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


def exchange(
    group: Any, sent: Sequence[tuple[int, Tensor]], into: Sequence[tuple[int, Tensor]]
) -> Hop:
    """Begin to send dense tensors to ranks of a group, and to receive such from them.

    Between two ranks both name them in the same order.
    """
    ranks = dist.get_process_group_ranks(group)
    works = [dist.P2POp(dist.isend, as_bytes(each), ranks[to], group) for to, each in sent]
    works += [dist.P2POp(dist.irecv, as_bytes(each), ranks[of], group) for of, each in into]
    return Hop(dist.batch_isend_irecv(works) if works else (), [each for _, each in sent])
