# SPDX-License-Identifier: Apache-2.0
"""Modules over the process group of a third party's devices: DDP and FSDP2, amaxes reduced."""

import pytest
import torch
from comparators import assert_nmse
from pytorch import distributed_programs as programs
from pytorch.helpers import assert_same_bits
from pytorch.ranks import Ranks
from tols import E5M2, F32, tol

pytestmark = pytest.mark.npu
SIZE, STEPS, RATE = 2, 3, 0.05
USES = [None, "delayed", "current"]


@pytest.fixture(scope="module")
def ranks():
    group = Ranks("npu", SIZE)
    yield group
    group.close()


def given(kind):
    weights = {
        name: 1 + 0.1 * torch.randn(t.shape) if t.dim() == 1 else torch.randn(t.shape) / 4
        for name, t in programs.make_model(kind, "cpu").state_dict().items()
        if isinstance(t, torch.Tensor) and t.is_floating_point()
    }
    shape = 8, programs.BATCH, programs.HIDDEN
    return weights, [(torch.randn(shape), torch.randn(shape)) for _ in range(STEPS)]


@pytest.mark.parametrize("use", USES, ids=str)
@pytest.mark.parametrize("kind", ["Linear", "TransformerLayer"])
def test_wrapped_models(ranks, npu, kind, use):
    """FSDP2 trains as DDP, bit by bit; under delayed scaling both as one process with all data."""
    weights, batches = given(kind)
    ddp = ranks.run(programs.ddp, kind, use, weights, batches, 1, False, RATE)
    fsdp = ranks.run(programs.fsdp2, kind, use, weights, batches, True, False, None, 1, False, RATE)
    assert_same_bits(fsdp, ddp)
    for key in ("gradients", "parameters", "states"):
        assert_same_bits(ddp[0][key], ddp[1][key])
    if use == "current":  # each rank measures its own share
        return
    model = programs.make_model(kind, npu)
    model.load_state_dict(weights, strict=False)
    shared = [(x.to(npu), grad.to(npu) / SIZE) for x, grad in batches]
    alone = programs.run_steps(model, use, shared, rate=RATE)
    outputs = [torch.cat(parts, 1) for parts in zip(*(r["outputs"] for r in ddp), strict=True)]
    # Sums in another order, through two blocks, which may move a cast to its neighbour. In high
    # precision of the first step alone: what later ones make of its error depends on the weights.
    bound = 2 * tol("chain", F32, 64) if use is None else tol("round", E5M2)
    for mine, theirs in zip(outputs, alone["outputs"][: 1 if use is None else STEPS], strict=False):
        assert_nmse(mine, theirs, bound)
    if use is not None:
        for mine, theirs in zip(ddp[0]["states"], alone["states"], strict=True):
            for found, wanted in zip(mine["forward"], theirs["forward"], strict=True):
                assert_nmse(found, wanted, bound)
