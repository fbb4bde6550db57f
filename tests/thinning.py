# SPDX-License-Identifier: Apache-2.0
"""Parameters of tests that need every pair of values; every combination is for `nightly`."""

import heapq
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


def cover_pairs(cases, places=2):
    """Indices of cases that together have every pair of values, of two of their places, of all.

    They are found one by one: the case with the most pairs that none before it has. With another
    number of `places`: triples of values, and so on.
    """
    assert all(len(case) >= places for case in cases), "fewer parameters than meet"
    pairs = [set(itertools.combinations(enumerate(case), places)) for case in cases]
    missing, chosen = set().union(*pairs), set()
    heap = [(-len(own), number) for number, own in enumerate(pairs)]
    heapq.heapify(heap)
    while missing:
        count, number = heapq.heappop(heap)
        new = len(pairs[number] & missing)
        if new < -count:  # others of its pairs are no longer missing
            heapq.heappush(heap, (-new, number))
            continue
        chosen.add(number)
        missing -= pairs[number]
    return chosen


def pairs_first(*axes, places=2):
    """Parameters: every combination of the values of all axes; the mark nightly is on most.

    Those without it have every pair of values of two axes (`cover_pairs`).
    """
    cases = combine(axes)
    return marked(cases, cover_pairs([numbers for _, numbers in cases], places))


def combine(axes):
    """Every combination of the values of all axes: (values, places in the axes)."""
    axes = [list(enumerate(axis)) for axis in axes]
    return [
        tuple(zip(*((v, n) for n, v in case), strict=True)) for case in itertools.product(*axes)
    ]


def marked(cases, chosen):
    """Parameters of cases (values, anything); all but those of the chosen indices are nightly."""
    return [
        pytest.param(*values, marks=[] if number in chosen else pytest.mark.nightly)
        for number, (values, _) in enumerate(cases)
    ]


# Marks: parameters by name with their values, which are combined.


def pairs(indirect=(), **axes):
    """Every pair of values of two parameters, and the other combinations nightly.

    `indirect` names those of them that are fixtures.
    """
    made = pairs_first(*axes.values())
    return pytest.mark.parametrize(tuple(axes), made, indirect=indirect, ids=case_id)


def triples(**axes):
    """All values of any three parameters, and the other combinations nightly."""
    made = pairs_first(*axes.values(), places=3)
    return pytest.mark.parametrize(tuple(axes), made, ids=case_id)


def pairs_of(names, cases):
    """Of these cases those that have every pair of values of all; the others nightly."""
    cases = [(case, None) for case in cases]
    chosen = cover_pairs([case for case, _ in cases])
    return pytest.mark.parametrize(names, marked(cases, chosen), ids=case_id)


def every_other(**axes):
    """Half of the combinations, and the others nightly: each value meets half of any other axis."""
    cases = combine(axes.values())
    chosen = {number for number, (_, places) in enumerate(cases) if sum(places) % 2 == 0}
    return pytest.mark.parametrize(tuple(axes), marked(cases, chosen), ids=case_id)


def chosen(wanted, **axes):
    """The combinations that are `wanted`, tuples in the order of the axes; all others nightly."""
    cases, wanted = combine(axes.values()), set(wanted)
    numbers = {number for number, (values, _) in enumerate(cases) if values in wanted}
    assert len(numbers) == len(wanted), "a wanted case is none of the combinations"
    return pytest.mark.parametrize(tuple(axes), marked(cases, numbers), ids=case_id)


def one_each(**axes):
    """Each value of the first parameter, each combination of the others; all others nightly.

    The order of the values says which meet, in every run: for parameters that all code treats
    alike.
    """
    cases = combine(axes.values())
    rests = {rest: n for n, rest in enumerate(dict.fromkeys(places[1:] for _, places in cases))}
    count = cases[-1][1][0] + 1
    chosen = {
        number
        for number, (_, (first, *rest)) in enumerate(cases)
        if (rests[tuple(rest)] - first) % min(count, len(rests)) == 0
    }
    return pytest.mark.parametrize(tuple(axes), marked(cases, chosen), ids=case_id)


def few_there(items):
    """Of the cases of a test for one more device each value of a parameter once; else nightly."""
    tests = {}
    for item in items:
        if item.get_closest_marker("devices") and not item.get_closest_marker("nightly"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        values = [tuple(map(_key, item.callspec.params.values())) for item in cases]
        chosen = cover_pairs(values, 1)
        for number in set(range(len(cases))) - chosen:
            cases[number].add_marker(pytest.mark.nightly)


def keep_triples(items):
    """Of each test the cases that together have all values of any three parameters that occur."""
    tests, kept = {}, set()
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        given = [getattr(item, "callspec", None) for item in cases]
        if None in given or len({tuple(spec.params) for spec in given}) != 1:
            kept.update(cases)
            continue
        values = zip(*(map(_key, spec.params.values()) for spec in given), strict=True)
        values = [column for column in values if len(set(column)) > 1]
        if len(values) < 4:
            kept.update(cases)
            continue
        chosen = cover_pairs(list(zip(*values, strict=True)), 3)
        kept.update(cases[number] for number in chosen)
    return [item for item in items if item in kept]


def _key(value):
    """What two equal parameters have in common."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def case_id(value):
    """Id of one value of a case: dtypes by their names."""
    if value is torch.float64:  # which the C API has no name for
        return "f64"
    if isinstance(value, torch.dtype):
        return name_of(value)
    if isinstance(value, tuple) and value and all(isinstance(v, torch.dtype) for v in value):
        return names_of(value)
    return str(value)
