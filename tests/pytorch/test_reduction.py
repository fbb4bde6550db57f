# SPDX-License-Identifier: Apache-2.0
"""Amaxes over ranks: what is reduced follows from the program, whatever lies in a rank's memory."""

import pytest
import torch
from pytorch import collective_programs as programs
from pytorch.helpers import assert_same_bits


def data_of(size):
    """Of each rank an (input, output gradient); the ranks' amaxes differ a lot."""
    return [
        [[torch.randn(16, 16) * 16.0 ** ((rank + n) % size) for n in range(2)]]
        for rank in range(size)
    ]


def largest(data, number):
    """Amax of all ranks of the inputs (0) or the output gradients (1)."""
    return max(pairs[0][number].abs().max() for pairs in data)


CASES = {
    "slots": (1, (2, 2, 2)),  # what dies leaves a gap that the next model would fill
    "arenas": (1, (2, 3, 4)),  # what dies was the only model of its recipe
    "chunks": (90, (2, 2)),  # what dies leaves a chunk empty
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_collect_garbage_at_other_times(ranks, case):
    count, lengths = CASES[case]
    data = data_of(ranks.size)
    results = ranks.run(programs.garbage, count, lengths, data)
    for result in results[1:]:
        assert_same_bits(result[0], results[0][0])
        if ranks.size > 1:
            assert result[1] == results[0][1]
    for states in results[0][0]:
        for state in states:
            for number, direction in enumerate(("forward", "backward")):
                assert state[direction][1][-1, 0] == largest(data, number)


def test_a_model_that_comes_back_to_a_recipe_takes_no_more_slots(ranks):
    data = data_of(ranks.size)
    results = ranks.run(programs.returning, (2, 3, 2, 3, 2, 3), data)
    for state, taken in results:
        assert_same_bits(state, results[0][0])
        assert taken == ([3, 3] if ranks.size > 1 else [3])
        assert state["forward"][1][-1, 0] == largest(data, 0)


def test_ranks_that_come_and_go(ranks, tmp_path):
    """Slots taken before there were ranks need not lie alike: models move, with their values."""
    data = data_of(ranks.size)
    results = ranks.run(programs.ranks_that_change, data, tmp_path)
    for time, shared in enumerate((False, True, True, True)):
        for rank, states in enumerate(results):
            expected = largest(data if shared else data[rank : rank + 1], 0)
            assert states[time]["forward"][1][-1, 0] == expected, (time, rank)
