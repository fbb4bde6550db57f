# SPDX-License-Identifier: Apache-2.0
"""Collectives of tensor parallelism, and what they do in a program of one process."""

import pytest
import torch
from pytorch import collective_programs as programs
from pytorch.helpers import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.torchside import collectives


@pytest.mark.parametrize("wait", [False, True])
def test_collectives(ranks, wait):
    tensors = [torch.randint(-99, 99, (6, 5)).float() for _ in range(ranks.size)]
    gathered, total = torch.cat(tensors), torch.stack(tensors).sum(0)
    for rank, (number, found, whole) in enumerate(ranks.run(programs.collectives, tensors, wait)):
        assert number == rank
        part = total.chunk(ranks.size)[rank]
        row = tensors[rank].flatten().chunk(ranks.size)[rank]
        assert_same_bits(found, [gathered, gathered, part, part, total, row])
        # of each rank's own tensor its own part
        own = [t.flatten().chunk(ranks.size)[r] for r, t in enumerate(tensors)]
        assert_same_bits(whole, torch.cat(own))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bool])
def test_gather_of_bytes(ranks, dtype):
    """Backends do not know FP8: its bytes travel."""
    tensors = [torch.randn(6, 5).to(dtype) for _ in range(ranks.size)]
    for found in ranks.run(programs.gathered, tensors):
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), torch.cat(tensors).view(torch.uint8))


def test_one_process():
    x = torch.ones(3, 2)
    for function in (
        distributed.gather_along_first_dim,
        distributed.reduce_scatter_along_first_dim,
        distributed.allreduce,
    ):
        out, handle = function(x, None)
        assert out is x and handle is None
    gathered, scattered = torch.zeros(3, 2), torch.zeros(3, 2)
    assert distributed.gather_along_first_dim(x, None, output_tensor=gathered)[0] is gathered
    assert distributed.reduce_scatter_along_first_dim(x, None, output=scattered)[0] is scattered
    assert_same_bits([gathered, scattered], [x, x])
    assert distributed.get_distributed_world_size() == 1
    assert distributed.get_distributed_rank() == 0


def test_parts_must_be_equal(monkeypatch):
    monkeypatch.setattr(collectives, "get_distributed_world_size", lambda group=None: 4)
    with pytest.raises(ValueError, match="3 rows are no 4"):
        distributed.reduce_scatter_along_first_dim(torch.ones(3, 2), None)
    with pytest.raises(ValueError, match="6 elements are no 4"):
        distributed.split_tensor_into_1d_equal_chunks(torch.ones(3, 2), None)


def test_attributes_are_said_once():
    x = torch.ones(2)
    distributed.set_tensor_model_parallel_attributes(x, True, 1, 1)
    assert (x.tensor_model_parallel, x.partition_dim, x.partition_stride) == (True, 1, 1)
    with pytest.raises(RuntimeError, match="tensor_model_parallel is set"):
        distributed.set_tensor_model_parallel_attributes(x, True, 1, 1)


def test_has_te_modules():
    assert distributed.has_te_modules(torch.nn.Sequential(te.Linear(16, 16)))
    assert not distributed.has_te_modules(torch.nn.Sequential(torch.nn.Linear(16, 16)))
