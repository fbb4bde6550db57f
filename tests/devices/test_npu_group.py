# SPDX-License-Identifier: Apache-2.0
"""Process groups of the test device npu: each collective, and torch's models trained over them."""

import pytest
import torch
import torch.distributed as dist
from comparators import assert_bits
from devices import group_programs as programs
from pytorch.ranks import Ranks

pytestmark = pytest.mark.npu
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
ASYNC = pytest.mark.parametrize("async_op", [False, True], ids=["waits", "async"])


@pytest.fixture(scope="module")
def ranks():
    group = Ranks("npu", 2)
    yield group
    group.close()


def check(ranks, collective, seed, dtype, **options):
    for rank, (pairs, devices) in enumerate(
        ranks.run(programs.run, collective, seed, dtype, options)
    ):
        assert set(devices) <= {f"npu:{rank}"}
        for found, wanted in pairs:
            assert_bits(found, wanted)


@ASYNC
@pytest.mark.parametrize("collective", programs.MOVES, ids=lambda one: one.__name__)
def test_what_moves(ranks, seed, collective, async_op):
    for dtype in (*DTYPES, torch.bool, torch.float8_e4m3fn):
        check(ranks, collective, seed, dtype, async_op=async_op)


@ASYNC
@pytest.mark.parametrize("collective", programs.REDUCTIONS, ids=lambda one: one.__name__)
def test_what_is_reduced(ranks, seed, collective, async_op):
    for dtype in DTYPES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            check(ranks, collective, seed, dtype, op=op, async_op=async_op)
    check(ranks, collective, seed, torch.float32, op=dist.ReduceOp.AVG, async_op=async_op)


@pytest.mark.parametrize("way", programs.WRAPPED)
def test_training(ranks, seed, way):
    """As one model that sees the data of all ranks."""
    for wrapped, plain in ranks.run(programs.train, way, seed):
        for found, wanted in zip(wrapped, plain, strict=True):
            torch.testing.assert_close(found, wanted)
