# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of several ranks share: times of all ranks, and collectives that are watched."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

_NAMES = {
    "all_gather_into_tensor": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "all_to_all_single": "all_to_all_single",
    "all_reduce": "all_reduce",
}
"""Collectives of versions of torch, and their older names."""


@contextlib.contextmanager
def replaced(make: Callable[[str, Callable], Callable]) -> Iterator[None]:
    """A context in which collectives of torch are what `make` gives for older name and function."""
    with contextlib.ExitStack() as stack:
        for known, name in _NAMES.items():
            plain = getattr(dist, known, None)
            if plain is not None:
                stack.enter_context(mock.patch.object(dist, known, make(name, plain)))
        yield


def seconds_of(step: Callable[[], Any], device: torch.device, calls: int) -> float:
    """The slowest rank's time of a call, of calls in a row that all ranks begin together."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    wait()
    found = torch.tensor([(time.perf_counter() - begin) / calls], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
