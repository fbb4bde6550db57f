# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments of `checkpoint` and of trackers of random states: name, value, what to do."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed


def ones():
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"function": 5}, "checkpoint: function=5, expected a callable; the arguments follow it"),
        ({"function": None}, "checkpoint: function=None, expected a callable"),
        ({"function": te.Linear}, "checkpoint: function: the class Linear, expected a module or"),
        ({"get_rng_state_tracker": 5}, "get_rng_state_tracker=5, expected a callable; give a func"),
        (
            {"get_rng_state_tracker": lambda: 5},
            "returned a int object, expected a tracker with",
        ),
        ({"context_fn": 5}, "checkpoint: context_fn=5, expected a callable; give a function that"),
    ],
)
def test_checkpoint(reentrant, given, match):
    given = dict(given)
    function = given.pop("function", torch.sin)
    with pytest.raises(TypeError, match=match):
        te.checkpoint(function, ones(), use_reentrant=reentrant, **given)


@pytest.mark.parametrize("states", [5, None, [torch.ones(1)], "one"])
def test_states_that_are_none(states):
    tracker = distributed.CudaRNGStatesTracker()
    tracker.add("one", 3)
    before = tracker.get_states()
    for function in (tracker.set_states, distributed.set_all_rng_states):
        with pytest.raises(TypeError, match=f"states: {type(states).__name__} object, expected st"):
            function(states)
    assert tracker.get_states().keys() == before.keys()


@pytest.mark.parametrize("seed", ["1", None, 1.5])
def test_seeds_that_are_none(seed):
    with pytest.raises(TypeError, match="CudaRNGStatesTracker.add: seed=.*, expected an int"):
        distributed.CudaRNGStatesTracker().add("one", seed)
