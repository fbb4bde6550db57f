# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling in pipelines: no stage waits for a reduction before it has sent its output."""

import pytest
import torch
from pytorch import pipeline_programs as programs
from pytorch.helpers import assert_same_bits
from pytorch.ranks import Ranks

COUNT = 3  # microbatches
PIPELINES = [  # the device of groups of two stages
    pytest.param("cpu", id="gloo-2"),
    pytest.param("cuda", id="nccl-2", marks=pytest.mark.multigpu),
]


@pytest.fixture(params=PIPELINES)
def stages(request):
    """Two processes of their own: a failed pipeline leaves its sends and receives behind."""
    made = Ranks(request.param, 2)
    yield made
    made.close()


def random_data(steps=2):
    shape = COUNT * programs.ROWS, programs.WIDTH
    return [(torch.randn(shape) * 4.0**step, torch.randn(shape)) for step in range(steps)]


@pytest.mark.parametrize("group", ["default", "alone"])
@pytest.mark.parametrize("which", programs.STAGES)
def test_gpipe(stages, which, group):
    """Stages of equal layers share their amaxes, those of others have groups of their own."""
    data, together = random_data(), group == "default"
    if together and which != "equal":
        for error in stages.run(programs.refused_gpipe, which, COUNT, data):
            assert "amax_reduction_group: the ranks [0, 1]" in error, error
            assert "hold different modules" in error
            for number, kinds in enumerate(programs.STAGES[which]):
                assert f"rank {number}: forward slots of {len(kinds)} modules" in error
        return
    results = stages.run(programs.gpipe, which, group, COUNT, data, 0.1)
    if together:
        assert_same_bits(results[0][2], results[1][2])
    for rank, (inputs, grads, states) in enumerate(results):
        shared = results if together else [results[rank]]
        for layer, state in enumerate(states):
            for place, direction in enumerate(("forward", "backward")):
                mine = (inputs, grads)[place][layer]
                assert len(mine) == COUNT * len(data)
                columns = [result[place][layer] for result in shared]
                expected = [max(amaxes) for amaxes in zip(*columns, strict=True)]
                history = state[direction][1][-len(expected) :, 0]
                if programs.STAGES[which][rank][layer] == "Linear":
                    assert_same_bits(history, torch.tensor(expected))
                assert (state[direction][0][0] != 1.0).all()


def test_ranks_with_other_numbers_of_regions(stages):
    """A forward and a backward meet: each rank says so."""
    for error in stages.run(programs.one_region_more):
        assert "amax_reduction_group: the ranks [0, 1]" in error
        assert "of different modules, or of other directions" in error
        assert "rank 0: " in error and "rank 1: " in error


@pytest.mark.parametrize("checks", [False, True])
def test_a_rank_that_is_left_alone(stages, checks):
    """The time-out of the group ends its wait; on a GPU that of the ranks' comparison."""
    if stages.device == "cuda" and not checks:
        pytest.skip("NCCL's watchdog ends the process")
    error, none = stages.run(programs.left_alone, checks)
    assert none is None
    assert "amax_reduction_group: the ranks [0, 1]" in error
    says = "did not all come to this reduction" if checks else "did not all reduce their amaxes"
    assert says in error
    if not checks:
        assert "rank 1: forward slots of 1 modules (Linear 32 x 32 of 3 slots)" in error


def test_layouts_that_differ_later(stages):
    for error in stages.run(programs.later_layer):
        assert "reduce the amaxes of different modules" in error
        assert "rank 0: forward slots of 1 modules (Linear 32 x 32 of 3 slots)" in error
        assert "rank 1: forward slots of 2 modules (2 x Linear 32 x 32 of 3 slots)" in error


@pytest.mark.parametrize("how", ["state dict", "fp8_meta", "copy", "now", "entry"])
def test_who_reads_scales_gets_those_of_all_ranks(ranks, how):
    data = [torch.randn(programs.ROWS, programs.WIDTH) * 4**rank for rank in range(ranks.size)]
    largest = max(x.abs().max() for x in data)
    for scale in ranks.run(programs.read_early, how, data):
        assert_same_bits(scale, torch.full_like(largest, 448.0) / largest)


def test_a_write_to_a_quantized_weight_waits_for_its_scale(ranks):
    weights = [torch.randn(programs.WIDTH, programs.WIDTH) * 4**n for n in range(ranks.size)]
    for inverse, scale in ranks.run(programs.quantized_write, weights):
        assert_same_bits(inverse, scale.reciprocal().reshape(1))


@pytest.mark.parametrize("stages", PIPELINES[1:], indirect=True)
def test_a_capture_waits_for_what_was_started_before(stages):
    """The graph has the region's own reduction, and not that of the region before it."""
    shape = programs.ROWS, programs.WIDTH
    data = [[torch.randn(shape) * 4.0 ** (rank + n) for n in range(2)] for rank in range(2)]
    for captured, eager in stages.run(programs.capture_behind, data):
        assert_same_bits(captured, eager)
        histories = [state["forward"][1][-2:, 0] for state in captured]
        expected = [max(x.abs().max() for x in xs) for xs in zip(*data, strict=True)]
        for history in histories:
            assert_same_bits(history, torch.stack(expected))


def test_weight_gradients_at_the_end_of_1f1b(stages):
    """In FP8, with microbatches in flight: losses and gradients of one process, bit for bit."""
    data = torch.randn(COUNT, 2, programs.ROWS, programs.WIDTH).unbind()
    data = [tuple(each.unbind()) for each in data]
    (_, first), (losses, second) = stages.run(programs.one_f_one_b, data)
    (expected, found), _ = stages.run(programs.one_process, data)
    assert_same_bits(losses, expected)
    for (gradients, hooks), (wanted, calls) in zip((first, second), found, strict=True):
        assert_same_bits(gradients, wanted)
        assert hooks == calls == [COUNT, COUNT]
