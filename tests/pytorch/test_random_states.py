# SPDX-License-Identifier: Apache-2.0
"""`CudaRNGStatesTracker`: random states by name, alone, in modules and in recompute."""

import pytest
import torch
from pytorch.helpers import assert_same_bits, same_draws

import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.distributed import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    graph_safe_rng_available,
    is_graph_safe_rng_state,
    set_all_rng_states,
)

WIDTH = 32
in_a_graph = pytest.mark.parametrize(
    ("device", "on"), [pytest.param("cuda", "as there", marks=pytest.mark.gpu)], indirect=True
)
"""For tests of CUDA graphs: no device is hidden, and nothing stands for its generator."""


class SharedState(torch.Generator):
    """A state of the CPU's generator as CUDA has them: a handle, which `Swapped` draws from."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def __new__(cls, cell):
        return super().__new__(cls)

    def clone_state(self):
        return SharedState({"bytes": self.get_state().clone()})

    def manual_seed(self, seed):
        self.cell["bytes"] = torch.Generator().manual_seed(seed).get_state()

    def get_state(self):
        return self.cell["bytes"]

    def set_state(self, state):
        self.cell["bytes"] = state.clone()


class Swapped:
    """Stands for CUDA's default generator: the CPU's, whose state can be swapped by reference."""

    def __init__(self):
        self.cell = {}

    def _keep(self):
        self.cell["bytes"] = torch.get_rng_state()

    def graphsafe_get_state(self):
        self._keep()
        return SharedState(self.cell)

    def graphsafe_set_state(self, state):
        self._keep()
        self.cell = state.cell
        torch.set_rng_state(self.cell["bytes"])

    def clone_state(self):
        return self.graphsafe_get_state().clone_state()


@pytest.fixture(autouse=True, params=["as there", "generators"])
def on(device, request, monkeypatch):
    """Trackers swap the CPU's state where there is no CUDA device, so hide one."""
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        if request.param == "generators":
            generator = Swapped()
            monkeypatch.setattr(distributed, "graph_safe_generator", lambda: generator)
    elif request.param == "generators":
        pytest.skip("they are there")


def values(states):
    """States by name as bytes, now."""
    return {
        name: state.get_state().clone() if is_graph_safe_rng_state(state) else state.clone()
        for name, state in states.items()
    }


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
    before = values(tracker.get_states())
    with pytest.raises(KeyError, match="mine"), tracker.fork():
        draw(device)
        raise KeyError("mine")
    assert_same_bits(draw(device), expected)
    after = values(tracker.get_states())
    assert torch.equal(after["experts"], before["experts"])
    assert not torch.equal(after["model-parallel-rng"], before["model-parallel-rng"])


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
    live = get_all_rng_states()
    assert {"model-parallel-rng", "experts", "of-second"} <= live.keys()
    saved = {
        name: state.clone_state() if is_graph_safe_rng_state(state) else state
        for name, state in live.items()
    }
    drawn = []
    for _ in range(2):
        with tracker.fork(), second.fork("of-second"):
            drawn.append(draw(device))
        with tracker.fork():
            drawn.append(draw(device))
        set_all_rng_states(saved)
    assert_same_bits(drawn[:2], drawn[2:])
    assert "of-second" not in tracker.get_states()


def test_kind_of_states(device, tracker, request):
    state = tracker.get_states()["experts"]
    assert is_graph_safe_rng_state(state) == graph_safe_rng_available()
    if not graph_safe_rng_available():
        assert state.dtype == torch.uint8
        return
    assert get_all_rng_states()["experts"] is tracker.states_["experts"]
    assert state is not tracker.states_["experts"]


def test_a_generator_keeps_its_place(device, tracker):
    """Graphs know the generators of a tracker: states that it is given are values."""
    own, saved = dict(tracker.states_), tracker.get_states()
    before = values(saved)
    with tracker.fork():
        draw(device)
    assert_same_bits(values(saved), before)
    tracker.set_states(saved)
    assert_same_bits(values(tracker.states_), before)
    if graph_safe_rng_available():
        assert all(tracker.states_[name] is state for name, state in own.items())


@in_a_graph
def test_states_in_a_graph(device):
    """Replays draw what runs draw, and leave the generators where these leave them."""
    x = torch.ones(64, 64, device=device)

    def step(tracker):
        with tracker.fork():
            dropped = torch.nn.functional.dropout(x, 0.5)
        with tracker.fork("experts"):
            return dropped, torch.rand(8, device=device)

    def made():
        tracker = CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 1234)
        tracker.add("experts", 99)
        return tracker

    eager, captured = made(), made()
    step(captured)
    step(eager)
    graph = torch.cuda.CUDAGraph()
    for state in captured.states_.values():
        graph.register_generator_state(state)
    with torch.cuda.graph(graph):
        static = step(captured)
    for _ in range(3):
        graph.replay()
        assert_same_bits([t.clone() for t in static], step(eager))
    saved = captured.get_states()
    graph.replay()
    last = [t.clone() for t in static]
    captured.set_states(saved)
    graph.replay()
    assert_same_bits([t.clone() for t in static], last)
    assert_same_bits(step(eager), last)
    assert_same_bits(step(captured), step(eager))


@in_a_graph
def test_a_layer_in_a_graph_draws_its_attention_dropout_from_a_tracker(device):
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1234)
    layer = te.TransformerLayer(
        WIDTH, 2 * WIDTH, 2, hidden_dropout=0.0, attention_dropout=0.5, device=device,
        get_rng_state_tracker=lambda: tracker, params_dtype=torch.bfloat16,
    )  # fmt: skip
    x = torch.randn(16, 2, WIDTH, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        saved = tracker.get_states()
        expected = [layer(x) for _ in range(3)]
        tracker.set_states(saved)
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():
            graph.register_generator_state(state)
        with torch.cuda.graph(graph):
            static = layer(x)
        found = []
        for _ in expected:
            graph.replay()
            found.append(static.clone())
    assert_same_bits(found, expected)
    assert not torch.equal(found[0], found[1])


@in_a_graph
def test_a_checkpoint_with_a_tracker_is_refused_in_a_capture(device):
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1234)
    x = torch.ones(8, device=device, requires_grad=True)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(NotImplementedError, match="get_rng_state_tracker in the capture"):
        with torch.cuda.graph(graph):
            x.detach().sin()  # torch warns of a graph without work
            te.checkpoint(torch.sin, x, get_rng_state_tracker=lambda: tracker)


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
            results.append([out, x.grad, values(tracker.get_states()), draw(device)])
    assert_same_bits(*results)
    assert (results[0][0] == 0).any()
