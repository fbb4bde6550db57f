# SPDX-License-Identifier: Apache-2.0
"""What `thinning` leaves has what it promises, whatever the parameters."""

import itertools
from types import SimpleNamespace

import pytest
import thinning
from hypothesis import given, strategies as st

LENGTHS = st.lists(st.integers(1, 4), min_size=3, max_size=5)


def kept(mark):
    """Values of the cases that are not nightly, and of all."""
    cases = mark.args[1]
    assert all(
        m is pytest.mark.nightly.mark or m == pytest.mark.nightly for c in cases for m in c.marks
    )
    return [case.values for case in cases if not case.marks], [case.values for case in cases]


def meetings(cases, count):
    """Values that occur together in `count` places, with these."""
    return {each for case in cases for each in itertools.combinations(enumerate(case), count)}


def axes_of(lengths):
    return {f"p{n}": [10 * n + i for i in range(length)] for n, length in enumerate(lengths)}


@given(LENGTHS)
@pytest.mark.parametrize(("make", "count"), [(thinning.pairs, 2), (thinning.triples, 3)])
def test_all_values_of_so_many_parameters_meet(make, count, lengths):
    axes = axes_of(lengths)
    chosen, cases = kept(make(**axes))
    assert cases == list(itertools.product(*axes.values()))
    assert meetings(chosen, count) == meetings(cases, count)


@given(LENGTHS, st.data())
def test_pairs_that_occur_in_given_cases_stay(lengths, data):
    combined = list(itertools.product(*axes_of(lengths).values()))
    cases = data.draw(st.lists(st.sampled_from(combined), min_size=1, unique=True))
    chosen, given_cases = kept(thinning.pairs_of("names", cases))
    assert given_cases == cases
    assert meetings(chosen, 2) == meetings(cases, 2)


@given(LENGTHS)
@pytest.mark.parametrize("make", [thinning.every_other, thinning.one_each])
def test_every_value_stays(make, lengths):
    axes = axes_of(lengths)
    chosen, cases = kept(make(**axes))
    firsts = axes["p0"] if make is thinning.one_each else []
    assert chosen and {case[0] for case in chosen} >= set(firsts)
    if min(lengths[:2]) > 1:
        assert meetings(chosen, 1) == meetings(cases, 1)


def test_chosen_cases_are_those():
    chosen, cases = kept(thinning.chosen([(1, "b"), (2, "a")], number=[1, 2], name=["a", "b"]))
    assert chosen == [(1, "b"), (2, "a")] and len(cases) == 4
    with pytest.raises(AssertionError, match="none of the combinations"):
        thinning.chosen([(3, "a")], number=[1, 2], name=["a", "b"])


def test_fewer_parameters_than_meet_are_a_mistake():
    with pytest.raises(AssertionError, match="fewer parameters than meet"):
        thinning.triples(one=[1, 2], other=[3, 4])


class Item:
    """What pytest makes of a case, as far as it is read."""

    def __init__(self, test, **params):
        self.nodeid = test
        if params:
            self.nodeid += f"[{'-'.join(map(str, params.values()))}]"
            self.callspec = SimpleNamespace(params=params)


def test_sanitized_cases_have_every_triple():
    plain = [Item("file.py::test_plain"), Item("file.py::Class::test_method")]
    few = [Item("file.py::test_few", a=a, b=b) for a in range(3) for b in range(3)]
    axes = [range(3)] * 5
    many = [
        Item("file.py::test_many", **dict(zip("abcde", v, strict=True)))
        for v in itertools.product(*axes)
    ]
    left = thinning.keep_triples([*plain, *few, *many])
    assert left[: len(plain) + len(few)] == [*plain, *few]
    values = [tuple(case.callspec.params.values()) for case in left[len(plain) + len(few) :]]
    assert len(values) < 3**5 / 3
    assert meetings(values, 3) == meetings(list(itertools.product(*axes)), 3)
