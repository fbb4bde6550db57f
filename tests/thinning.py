# SPDX-License-Identifier: Apache-2.0
"""Parameters of tests that need every pair of values, not every combination."""

import itertools

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


def case_id(value):
    """Id of one value of a case: dtypes by their names."""
    if isinstance(value, torch.dtype):
        return name_of(value)
    if isinstance(value, tuple) and value and all(isinstance(v, torch.dtype) for v in value):
        return names_of(value)
    return str(value)
