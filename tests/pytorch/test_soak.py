# SPDX-License-Identifier: Apache-2.0
"""Many steps of tensor and sequence parallelism in FP8: nothing hangs, grows or drifts apart."""

import pytest
from pytorch import soak_programs as programs
from pytorch.helpers import assert_same_bits
from pytorch.ranks import Ranks
from tols import BF16, F32, tol

EARLY = 10  # steps whose losses differ by what is rounded alone


@pytest.fixture(
    params=[
        pytest.param(("cpu", 20), id="gloo-2"),
        pytest.param(("cuda", 500), id="nccl-2", marks=pytest.mark.multigpu),
    ]
)
def soaked(request, seed):
    """Results of both ranks of so many steps."""
    device, steps = request.param
    ranks = Ranks(device, 2)
    yield steps, ranks.run(programs.soak, seed, steps, [min(50, steps // 2), steps])
    ranks.close()


def test_soak(soaked):
    """The losses are those of one rank, and ranks keep alike what each has whole."""
    steps, results = soaked
    assert_same_bits(results[0][1:], results[1][1:])
    for ((exact, _), (losses, (before, after))), *_ in results:
        assert before == after
        assert losses.isfinite().all()
        early = ((losses - exact) / exact)[:EARLY].square()
        assert early.max() <= tol("round", BF16)
        count = steps // 4  # they show where training ends
        late = losses[-count:].mean()
        assert late < losses[:EARLY].mean()
        known = tol("share", F32, count * programs.TOKENS)
        assert abs(late - exact[-count:].mean()) <= known  # as well as so many tokens tell a loss
