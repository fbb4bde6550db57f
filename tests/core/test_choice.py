# SPDX-License-Identifier: Apache-2.0
"""`_core.Choice`: the first implementation that takes a call, and who gets its keywords."""

import pytest

from transformer_engine import _core


def implementation(name, takes=True):
    """One that gives its name and its arguments, and what `supports` was given."""
    asked = []

    def supports(*args, **kwargs):
        asked.append((args, kwargs))
        return takes

    def run(*args, **kwargs):
        return name, args, kwargs

    return _core.Implementation("op", name, run, supports), asked


def test_the_first_that_takes_a_call():
    (one, _), (two, _) = implementation("one", takes=False), implementation("two")
    assert _core.Choice("op", (one, two))(1, 2, out=3) == ("two", (1, 2), {"out": 3})
    assert (one.calls, two.calls) == (0, 1)
    assert _core.Choice("op", (one,))(1) is NotImplemented
    with pytest.raises(KeyError, match="op"):
        _core.Choice("op", (one,), lambda name, asked: {}[name])(1)


@pytest.mark.parametrize("given", [False, True])
def test_keywords_go_to_those_that_take_them(given):
    one, asked = implementation("one")
    choice = _core.Choice("op", (one,), None, (given,))
    assert choice(1, out=2) == ("one", (1,), {"out": 2} if given else {})
    assert choice(1, 5) == ("one", (1, 5), {})
    assert asked == [((1,), {}), ((1, 5), {})]  # `supports` is given none


def test_without_a_say_all_get_them():
    one, asked = implementation("one")
    assert _core.Choice("op", (one,), None, None)(1, out=2) == ("one", (1,), {"out": 2})
    assert asked == [((1,), {"out": 2})]


@pytest.mark.parametrize("wrong", [(), (True, False), True, [True]])
def test_a_say_for_each(wrong):
    one, _ = implementation("one")
    with pytest.raises(TypeError, match="keywords: expected None or a tuple, one bool for each"):
        _core.Choice("op", (one,), None, wrong)
