# SPDX-License-Identifier: Apache-2.0
"""`CudaRNGStatesTracker`: random states by name, alone, in modules and in recompute."""

import pytest
import torch
from pytorch.helpers import assert_same_bits, same_draws

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    graph_safe_rng_available,
    is_graph_safe_rng_state,
    set_all_rng_states,
)

WIDTH = 32


@pytest.fixture(autouse=True)
def on(device, monkeypatch):
    """Trackers swap the CPU's state where there is no CUDA device, so hide one."""
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def tracker():
    made = CudaRNGStatesTracker()
    made.add("model-parallel-rng", 1234)
    made.add("experts", 99)
    return made


def draw(device):
    return torch.rand(8, device=device)


def test_add_leaves_the_generator_alone(device, seed):
    torch.manual_seed(seed)
    expected = draw(device)
    torch.manual_seed(seed)
    CudaRNGStatesTracker().add("a", 77)
    assert_same_bits(draw(device), expected)


def test_fork_draws_from_the_named_state_and_goes_on(device, tracker, seed):
    torch.manual_seed(1234)
    named = [draw(device), draw(device)]
    torch.manual_seed(seed)
    plain = [draw(device), draw(device)]
    torch.manual_seed(seed)
    found = [draw(device)]
    with tracker.fork():
        first = draw(device)
    found.append(draw(device))
    with tracker.fork("experts"):
        other = draw(device)
    with tracker.fork("model-parallel-rng"):
        second = draw(device)
    assert_same_bits(found, plain)
    assert_same_bits([first, second], named)
    assert not torch.equal(other, first)


def test_fork_ends_with_an_error(device, tracker, seed):
    torch.manual_seed(seed)
    expected = draw(device)
    torch.manual_seed(seed)
    before = tracker.get_states()
    with pytest.raises(KeyError, match="mine"), tracker.fork():
        draw(device)
        raise KeyError("mine")
    assert_same_bits(draw(device), expected)
    assert not torch.equal(tracker.get_states()["experts"], before["model-parallel-rng"])
    assert not torch.equal(tracker.get_states()["model-parallel-rng"], before["model-parallel-rng"])


def test_forks_nest(device, tracker):
    with tracker.fork():
        with tracker.fork("experts"):
            draw(device)
        inside = draw(device)
    torch.manual_seed(1234)
    assert_same_bits(inside, draw(device))


def test_states_go_from_one_tracker_to_another(device, tracker):
    with tracker.fork():
        draw(device)
    other = CudaRNGStatesTracker()
    other.set_states(tracker.get_states())
    drawn = []
    for each in (tracker, other):
        with each.fork():
            drawn.append(draw(device))
    assert_same_bits(*drawn)
    states = tracker.get_states()
    states.clear()
    assert tracker.get_states().keys() == {"model-parallel-rng", "experts"}
    tracker.reset()
    assert tracker.get_states() == {} and tracker.seeds_ == set()


def test_names_and_seeds_occur_once(tracker):
    with pytest.raises(RuntimeError, match="seed 99 "):
        tracker.add("new", 99)
    with pytest.raises(RuntimeError, match="name 'experts'"):
        tracker.add("experts", 98)
    with pytest.raises(KeyError, match="no state 'other'.*'experts'"), tracker.fork("other"):
        pass


def test_states_of_all_trackers(device, tracker):
    second = CudaRNGStatesTracker()
    second.add("of-second", 3)
    saved = get_all_rng_states()
    assert {"model-parallel-rng", "experts", "of-second"} <= saved.keys()
    drawn = []
    for _ in range(2):
        with tracker.fork(), second.fork("of-second"):
            drawn.append(draw(device))
        with tracker.fork():
            drawn.append(draw(device))
        set_all_rng_states(saved)
    assert_same_bits(drawn[:2], drawn[2:])
    assert "of-second" not in tracker.get_states()


def test_states_are_bytes(tracker):
    state = tracker.get_states()["experts"]
    assert state.dtype == torch.uint8 and not is_graph_safe_rng_state(state)
    assert not graph_safe_rng_available()
    assert is_graph_safe_rng_state(torch.Generator())


def test_a_subclass_may_begin_before_its_base(device):
    """megatron-core's tracker calls reset() of its own from the constructor."""

    class Wrapped(CudaRNGStatesTracker):
        def __init__(self):
            super().__init__()
            self.reset()

        def reset(self):
            super().reset()
            self.ready = False

        def set_states(self, states):
            super().set_states(states)
            self.ready = True

    wrapped = Wrapped()
    wrapped.set_states({})
    assert wrapped.ready


def test_weights_begin_from_the_named_state(device, tracker):
    """Two modules made at the same state of the tracker are equal, whatever was drawn besides."""
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        tracker.reset()
        tracker.add("model-parallel-rng", 7)
        made.append(te.Linear(WIDTH, WIDTH, device=device, get_rng_state_tracker=lambda: tracker))
        after = draw(device)
        torch.manual_seed(seed)
        assert_same_bits(after, draw(device))
    assert_same_bits(made[0].weight, made[1].weight)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_repeats_the_named_numbers(device, tracker, use_reentrant):
    """With recompute and without: the same outputs, gradients and states afterwards."""
    weight = torch.randn(WIDTH, WIDTH, device=device)
    start = torch.randn(16, WIDTH, device=device)

    def layer(x):
        with tracker.fork():
            x = torch.nn.functional.dropout(x @ weight, 0.5)
        return torch.nn.functional.dropout(x, 0.5)

    results = []
    for again in (False, True):
        tracker.reset()
        tracker.add("model-parallel-rng", 7)
        x = start.clone().requires_grad_()
        with same_draws(device):
            if again:
                options = {"get_rng_state_tracker": lambda: tracker, "use_reentrant": use_reentrant}
                out = te.checkpoint(layer, te.checkpoint(layer, x, **options), **options)
            else:
                out = layer(layer(x))
            out.sum().backward()
            results.append([out, x.grad, tracker.get_states(), draw(device)])
    assert_same_bits(*results)
    assert (results[0][0] == 0).any()
