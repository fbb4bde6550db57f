# SPDX-License-Identifier: Apache-2.0
"""Regions that are left in any order, as those that an interrupt leaves behind are."""

import contextlib
import gc
import itertools
import sys

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.execution.thread_state import current_state

FIELDS = ("enabled", "calibrating", "recipe", "group")


def in_force():
    return tuple(getattr(current_state(), name) for name in FIELDS)


OUTSIDE = in_force()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_the_innermost_region_that_is_left_to_nobody_is_in_force(order):
    regions, settings = [], []
    for i in range(4):
        recipe = DelayedScaling(amax_history_len=i + 1)
        regions.append(te.autocast(i != 2, calibrating=i == 2, recipe=recipe))
        regions[-1].__enter__()
        settings.append(in_force())
    active = [*range(4)]
    for number in order:
        regions[number].__exit__(None, None, None)
        active.remove(number)
        assert in_force() == (settings[active[-1]] if active else OUTSIDE)
        with pytest.raises(RuntimeError, match="this region is not active"):
            regions[number].__exit__(None, None, None)
        with te.autocast(recipe=Float8CurrentScaling()):
            assert isinstance(current_state().recipe, Float8CurrentScaling)
        assert in_force() == (settings[active[-1]] if active else OUTSIDE)
    assert current_state().depth == 0 and current_state().region is None
    with regions[1]:  # all can be entered again
        assert in_force() == settings[1]
    assert in_force() == OUTSIDE


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_one_that_is_left_updates_scales(device, first):
    layer, recipe = te.Linear(32, 32, device=device), DelayedScaling()
    regions = [te.autocast(recipe=recipe), te.autocast(recipe=recipe)]
    for region in regions:
        region.__enter__()
    layer(torch.full((16, 32), 8.0, device=device))
    regions[first].__exit__(None, None, None)
    assert te.scales(layer)["input"].scale == 1.0
    regions[1 - first].__exit__(None, None, None)
    assert te.scales(layer)["input"].scale == 448.0 / 8.0


class Interrupt(BaseException):
    pass


@contextlib.contextmanager
def mine(recipe):
    with te.autocast(recipe=recipe):
        yield


def left_behind(recipe):
    """Enter a context of a generator, and interrupt its exit; the exception keeps it."""

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_name == "__exit__":
            raise Interrupt

    before = sys.getprofile()
    try:
        with mine(recipe):
            sys.setprofile(profile)
    except Interrupt as error:
        return error
    finally:
        sys.setprofile(before)
    raise AssertionError("nothing was interrupted")


def test_a_region_that_an_interrupt_leaves_behind_ends_with_its_generator():
    error = left_behind(DelayedScaling())
    assert (
        te.quantization.FP8GlobalStateManager.is_fp8_enabled()
    )  # nobody can tell it from a live one
    del error
    gc.collect()
    assert in_force() == OUTSIDE and current_state().depth == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_it_ends_in_the_middle_of_another_region(enabled):
    """That goes on to be in force, and leaves nothing behind."""
    error = left_behind(DelayedScaling())
    recipe = Float8CurrentScaling()
    with te.autocast(enabled=enabled, recipe=recipe):
        inside = in_force()
        del error
        gc.collect()
        assert in_force() == inside and current_state().recipe is recipe
    assert in_force() == OUTSIDE and current_state().depth == 0
