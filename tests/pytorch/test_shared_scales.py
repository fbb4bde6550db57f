# SPDX-License-Identifier: Apache-2.0
"""Scales that ranks have in common: what is reduced, how often, and what ranks that differ say."""

import re

import pytest
import torch
from pytorch import reduction_programs as programs
from pytorch.helpers import assert_same_bits
from pytorch.ranks import FOUR_TOO, Ranks

import transformer_engine.pytorch as te
from transformer_engine.pytorch.scaling_state.reduction import first_difference

CPU_RANKS = [pytest.param(("cpu", size), id=f"gloo-{size}") for size in (2, 4)]
"""For errors, after which NCCL may end a process."""
four_too = pytest.mark.parametrize("ranks", FOUR_TOO, indirect=True)
on_cpu = pytest.mark.parametrize("ranks", CPU_RANKS, indirect=True)
SLOTS, DIGEST = 256, 8  # numbers of a chunk, and behind them


def data_of(size):
    """An input of each rank; the ranks' amaxes differ a lot."""
    return [torch.randn(32, programs.WIDTH) * 4.0**rank for rank in range(size)]


def largest(tensors):
    return torch.stack([t.abs().max() for t in tensors]).max()


# ---- what is reduced -----------------------------------------------------------------------------


def test_one_buffer_for_all_chunks(ranks):
    """Of those that a reduction has shown to be alike; a new one goes by itself first."""
    data, one = data_of(ranks.size), [SLOTS + DIGEST]
    counts = (2, 90, 90, 180, 180)  # layers; 85 of them have the forward slots of a chunk
    forward = [one, one * 2, [2 * SLOTS + DIGEST], [2 * SLOTS + DIGEST, *one], [3 * SLOTS + DIGEST]]
    backward = [one, one, one, one * 2, [2 * SLOTS + DIGEST]]
    expected = torch.stack([largest(data) * (n + 1) for n in range(max(counts))])
    for sizes, amaxes in ranks.run(programs.packed, counts, data):
        if ranks.size > 1:
            assert sizes == [a + b for a, b in zip(forward, backward, strict=True)]
        assert_same_bits(amaxes, expected)


@four_too
def test_regions_with_groups_of_their_own(ranks):
    data = data_of(ranks.size)
    for rank, amaxes in enumerate(ranks.run(programs.several_groups, data)):
        pair = data[rank // 2 * 2 :][:2]
        expected = [largest(data), largest(pair), largest(data[rank : rank + 1])]
        assert_same_bits(amaxes, torch.stack(expected))


@pytest.mark.parametrize("way", programs.WAYS)
def test_once_for_a_region(ranks, way):
    """Forward and backward are reduced once each, whatever is repeated, put off or not used."""
    results = ranks.run(programs.once_for_a_region, way, data_of(ranks.size))
    once = 1.0 if way == "unused" else 2.0  # no backward of the first module: the next one updates
    for counts, states in results:
        assert counts == ([once] * 2 if ranks.size > 1 else [0.0] * 2)
        assert_same_bits(states, results[0][1])
        for state in states:
            assert (state["forward"][0][:2] != 1.0).all()


def test_an_empty_region(ranks):
    """It is an update, which meets those of ranks that run; without amaxes it changes nothing."""
    data = data_of(ranks.size)
    results = ranks.run(programs.skipped, data)
    for before, between, after in results:
        assert_same_bits([between, after], [results[0][1]] * 2)
        amax = between[0]["forward"][1][-1, 0]
        assert amax == 8 * data[0].abs().max() != before[0]["forward"][1][-1, 0]


def test_a_compiled_region(ranks):
    """The reduction is a part of the graph."""
    for eager, compiled in ranks.run(programs.compiled, data_of(ranks.size)):
        assert_same_bits(compiled, eager)


@four_too
def test_ddp_has_equal_scales(ranks):
    """They are no buffers, which DDP would send around: the reduction alone makes them equal."""
    results = ranks.run(programs.trained_by_ddp, data_of(ranks.size))
    for states, before, after in results:
        assert_same_bits(states, results[0][0])
        assert before == after and all(before)


QUANTIZERS = {
    "current": ("Float8CurrentScalingQuantizer", {}),
    "nvfp4": ("NVFP4Quantizer", {}),
    "nvfp4 rht": ("NVFP4Quantizer", {"with_rht": True}),
}


@four_too
@pytest.mark.parametrize("name", QUANTIZERS)
def test_casts_with_the_amax_of_all_ranks(ranks, name):
    """The bits are those of a cast of all rows, by one collective, also where two amaxes count."""
    make, options = QUANTIZERS[name]
    data = data_of(ranks.size)
    typed = programs._typed(make, "cpu")
    whole = getattr(te, make)(**typed, **options)(torch.cat(data))
    for rank, (made, calls) in enumerate(ranks.run(programs.quantized, make, options, data)):
        assert calls == (ranks.size > 1)
        expected = whole.dequantize()[32 * rank :][:32]
        assert_same_bits(made.dequantize(), expected)
        for field in ("_scale_inv", "_amax_rowwise", "_amax_columnwise"):
            if hasattr(whole, field):
                assert_same_bits(getattr(made, field), getattr(whole, field), field)


# ---- ranks that differ ---------------------------------------------------------------------------

SAYS = {  # in what the layouts first differ: that of rank 1, and that of the others
    "orders": ("module 1", "Linear 16 x 16 of 3 slots, made after 0", "Linear 16 x 16 of 3 slots, "
               "made after 1"),
    "lacks one": ("module 1", "none", "Linear 16 x 16 of 3 slots, made after 1"),
    "recipes": ("recipe", "DelayedScaling(", "DelayedScaling("),
    "sizes": ("module 0", "LayerNormLinear 16 x 32 of 3 slots", "LayerNormLinear 16 x 16 of 3"),
    "names": ("module 0", "Linear[q] 16 x 16 of 3 slots", "Linear[p] 16 x 16 of 3 slots"),
    "later": ("module 1", "Linear 16 x 16 of 3 slots", "none"),
    "grows": ("module 2", "Linear 16 x 16 of 3 slots", "none"),
    "raises, goes on": None,
    "branches": None,
}  # fmt: skip
DIFFERENCE = r"First difference: (.*) of rank (\d): (.*); of rank (\d): (.*)\. Ranks of such"


def assert_says(error, what, mine, others):
    """Assert that an error names the first difference between rank 1 and another one."""
    found = re.search(DIFFERENCE, error)
    assert found, error
    texts = {int(found[2]): found[3], int(found[4]): found[5]}
    assert found[1] == what and len(texts) == 2
    assert texts.pop(1).startswith(mine)
    assert texts.popitem()[1].startswith(others)


@on_cpu
@pytest.mark.parametrize("case", SAYS)
def test_ranks_that_differ(ranks, case):
    """Each says so, and where they first differ; none hangs, none mixes amaxes."""
    errors = ranks.run(programs.differing, case, programs.SECONDS, False, data_of(ranks.size))
    for error in errors:
        assert error is not None
        assert f"amax_reduction_group: the ranks {list(range(ranks.size))}" in error
        if SAYS[case] is None:
            assert "none between what they have said: a rank has left out a region or a" in error
        else:
            assert_says(error, *SAYS[case])


@on_cpu
@pytest.mark.parametrize("case", ["orders", "recipes", "later", "grows", "branches"])
def test_ranks_that_differ_and_compare_each_time(ranks, case):
    errors = ranks.run(programs.differing, case, programs.SECONDS, True, data_of(ranks.size))
    for error in errors:
        assert error is not None and "(TE_CHECK_RANKS)" in error
        assert_says(error, *(SAYS[case] or ("direction", "forward", "backward")))


@on_cpu
@pytest.mark.parametrize("checks", [False, True])
def test_an_exception_on_one_rank(ranks, checks):
    """The others wait for it as long as the group lets them."""
    data = data_of(ranks.size)
    errors = ranks.run(programs.differing, "raises", programs.ALONE, checks, data)
    assert errors.pop(1) is None
    for error in errors:
        says = "did not all come to this reduction" if checks else "did not all reduce their amaxes"
        assert says in error


@on_cpu
def test_comparing_each_time_changes_nothing(ranks):
    for compared, plain in ranks.run(programs.checked, data_of(ranks.size)):
        assert_same_bits(compared, plain)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_a_rank_that_dies(size, tmp_path):
    group, file = Ranks("cpu", size), tmp_path / "error"
    try:
        with pytest.raises(EOFError):
            group.run(programs.dies, data_of(size), str(file))
    finally:
        group.close()
    assert "did not all reduce their amaxes" in file.read_text()


def test_first_difference():
    same = '["forward", "a recipe", "", ["one", "two"]]'
    assert first_difference({0: same, 1: same}) == ""
    assert first_difference({0: same, 3: None}) == "ranks [3] have said nothing so far"
    other = '["backward", "a recipe", "", []]'
    assert (
        first_difference({2: same, 5: other}) == "direction of rank 2: forward; of rank 5: backward"
    )
