# SPDX-License-Identifier: Apache-2.0
"""Operators that module code calls: what is selected for the thread runs first."""

import pytest
import torch
from native import fresh_core


@pytest.fixture
def core():
    return fresh_core()


def select(core, *slots, **others):
    """Have the module obey these functions."""
    table = (core.Selection(tuple(slots), others),)
    core.obey(core.Dispatcher(lambda policy: table, print))


def rows(core, run):
    out = torch.zeros(3, 5)
    run(out, 1.5)
    return out


def test_nobody_is_selected(core):
    assert torch.equal(rows(core, core.obeying("fill")), rows(core, core.fill))


def test_what_is_selected_runs(core):
    asked = []

    def fill(fields):
        asked.append(fields["value"])
        fields["output"].fill_(7.0)

    select(core, ("fill", fill, None))
    assert torch.equal(rows(core, core.obeying("fill")), torch.full((3, 5), 7.0))
    assert asked == [1.5]
    assert torch.equal(rows(core, core.fill), torch.full((3, 5), 1.5))  # this library's own
    with core.unselected():
        assert torch.equal(rows(core, core.obeying("fill")), torch.full((3, 5), 1.5))


def test_scopes_that_ask_nobody_are_not_entered_twice(core):
    assert core.unselected() is None  # there is nobody to ask
    select(core, ("fill", lambda fields: fields["output"].fill_(7.0), None))
    selected = core.selected()
    with core.unselected():
        assert core.unselected() is None
        with selected:  # a backward of a forward that asked
            assert core.unselected() is not None
            assert float(rows(core, core.obeying("fill")).max()) == 7.0
            with core.unselected():
                assert float(rows(core, core.obeying("fill")).max()) == 1.5
        assert core.unselected() is None
        with core.Scope("a policy"):  # whose table may have somebody
            assert core.unselected() is not None
    assert core.unselected() is not None


def test_a_call_that_is_not_taken_goes_on(core):
    """With the workspace that it needs."""
    select(core, ("quantize", lambda fields: NotImplemented, None))
    x = torch.randn(70, 90)
    found, wanted = torch.zeros(90), torch.zeros(90)
    core.obeying("quantize")(x, bias_grad=found)
    core.quantize(x, bias_grad=wanted)
    assert torch.equal(found, wanted)


def test_errors(core):
    def fail(fields):
        raise KeyError("of the plug-in")

    select(core, ("fill", fail, ()))
    with pytest.raises(KeyError, match="of the plug-in"):
        rows(core, core.obeying("fill"))
    with pytest.raises(ValueError, match="there is no operator 'nothing'"):
        core.obeying("nothing")
    with pytest.raises(TypeError):
        core.obeying(3)


def test_a_function_keeps_its_module():
    run = fresh_core().obeying("fill")
    out = torch.zeros(2)
    run(out.view(1, 2), 2.0)
    assert out.tolist() == [2.0, 2.0]


def test_functions_beside_operators(core):
    assert core.selected_function("step") is None  # there is nobody to ask
    select(core, step=max)
    assert core.selected_function("step") is max
    assert core.selected_function("other") is None
    with core.unselected():
        assert core.selected_function("step") is None
    with pytest.raises(TypeError, match="unhashable"):
        core.selected_function([])
    with pytest.raises(TypeError, match="must be dict"):
        core.Selection((), 3)
