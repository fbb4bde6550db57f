# SPDX-License-Identifier: Apache-2.0
"""Parameters of tests that need every pair of values; every combination is for `nightly`."""

import itertools

import pytest
import torch
from buffers import name_of, names_of


def in_turns(*axes):
    """Every combination of the values of all axes but the last one, whose values take turns.

    Each value of the last axis then meets each value of any other one, as long as the remaining
    axes have at least as many values as the last.
    """
    *axes, last = map(list, axes)
    cases = []
    for numbers in itertools.product(*(range(len(axis)) for axis in axes)):
        values = (axis[number] for axis, number in zip(axes, numbers, strict=True))
        cases.append((*values, last[sum(numbers) % len(last)]))
    return cases


def pairs_first(*axes):
    """Parameters: every combination of the values of all axes; the mark nightly is on most.

    Those without it have every pair of values of two axes. They are found one by one: the
    combination with the most pairs that none before it has.
    """
    cases = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing, chosen = set().union(*pairs.values()), set()
    while missing:
        chosen.add(max(cases, key=lambda case: len(pairs[case] & missing)))
        missing = missing.difference(*map(pairs.get, chosen))
    made = []
    for case in cases:
        values = (axis[number] for axis, number in zip(axes, case, strict=True))
        made.append(pytest.param(*values, marks=[] if case in chosen else pytest.mark.nightly))
    return made


def case_id(value):
    """Id of one value of a case: dtypes by their names."""
    if isinstance(value, torch.dtype):
        return name_of(value)
    if isinstance(value, tuple) and value and all(isinstance(v, torch.dtype) for v in value):
        return names_of(value)
    return str(value)
