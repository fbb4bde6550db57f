# SPDX-License-Identifier: Apache-2.0
"""A TransformerLayer run again: recompute, compiled, captured, copied, loaded, shared."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch._dynamo.utils
from pytorch import attention_model
from pytorch.helpers import RECIPES, assert_same_bits, captured, side_stream, states_of
from tols import BF16, F32
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.pytorch.layer.dropout import bias_dropout_add

HIDDEN, FFN, HEADS, LENGTH, BATCH = 32, 64, 4, 6, 2

# Torch says so of every reentrant checkpoint inside another one: its forward has no gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def make(device, dtype=F32, **options):
    """A layer, without dropout unless told, with other biases than 0."""
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype, **options}
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, device=device, **given)
    attention_model.randomise(layer)
    return layer


def states(device):
    return torch.randn(LENGTH, BATCH, HIDDEN, device=device, requires_grad=True)


def region(recipe):
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=RECIPES[recipe]())


CHECKPOINTS = {
    "torch-reentrant": lambda f, x: torch_checkpoint(f, x, use_reentrant=True),
    "torch-saved": lambda f, x: torch_checkpoint(f, x, use_reentrant=False),
    "te-reentrant": lambda f, x: te.checkpoint(f, x, use_reentrant=True),
    "te-saved": lambda f, x: te.checkpoint(f, x, use_reentrant=False),
}


@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_recompute_gives_the_same_bits(device, kind, recipe, core):
    """Dropout included; the scaling state advances once."""
    dtype = F32 if recipe is None else BF16
    original = make(device, dtype, hidden_dropout=0.2, attention_dropout=0.2, drop_path_rate=0.2)
    data = torch.randn(3, LENGTH, BATCH, HIDDEN).to(device, dtype)
    seed = int(torch.randint(2**31, ()))
    results = []
    for run in (lambda f, x: f(x), CHECKPOINTS[kind]):
        te.reset()
        layer = copy.deepcopy(original)
        torch.manual_seed(seed)
        seen = []
        for step in data:
            x = step.clone().requires_grad_()
            with region(recipe):
                out = run(lambda x, layer=layer: layer(x, checkpoint_core_attention=core), x)
            out.float().square().sum().backward()
            seen += [out.detach(), x.grad]
        results.append([seen, [p.grad for p in layer.parameters()], states_of(layer)])
    assert_same_bits(results[0][:2], results[1][:2])
    for one, other in zip(results[0][2], results[1][2], strict=True):
        assert_same_bits(one, other) if one is not None else None
        assert (one is None) == (other is None)


class Tracker:
    """Random states of tensor-parallel regions, as frameworks keep them."""

    def __init__(self, device, seed):
        self.device = torch.device(device)
        with self._forked():
            torch.manual_seed(seed)
            self.states = {"region": self._state()}

    def _forked(self):
        return torch.random.fork_rng(devices=range(torch.cuda.device_count()))

    def _state(self):
        return torch.get_rng_state() if self.device.type == "cpu" else torch.cuda.get_rng_state()

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = states

    @contextlib.contextmanager
    def fork(self):
        module = torch if self.device.type == "cpu" else torch.cuda
        with self._forked():
            module.set_rng_state(self.states["region"])
            yield
            self.states["region"] = self._state()


def _checkpointed(layer, x, tracker):
    return te.checkpoint(layer, x, get_rng_state_tracker=lambda: tracker)


TRACKED = {
    "core": lambda layer, x, tracker: layer(x, checkpoint_core_attention=True),
    "layer": _checkpointed,
}


@pytest.mark.parametrize("window", [None, (3, 0)], ids=["sdpa", "unfused"])
@pytest.mark.parametrize("kind", TRACKED)
def test_recompute_repeats_the_dropout_of_a_tracker(device, kind, window):
    seed = int(torch.randint(2**31, ()))
    data = torch.randn(2, LENGTH, BATCH, HIDDEN, device=device)
    results = []
    for run in (lambda layer, x, tracker: layer(x), TRACKED[kind]):
        tracker = Tracker(device, seed)
        torch.manual_seed(seed)
        options = {"attention_dropout": 0.5, "window_size": window}
        layer = make(device, get_rng_state_tracker=lambda tracker=tracker: tracker, **options)
        seen = []
        for step in data:
            x = step.clone().requires_grad_()
            out = run(layer, x, tracker)
            out.square().sum().backward()
            seen += [out.detach(), x.grad]
        results.append([seen, [p.grad for p in layer.parameters()], tracker.states])
    assert_same_bits(*results)


def test_checkpoint_in_a_traced_graph(device):
    torch._dynamo.reset()
    # Torch's random numbers inside a compiled checkpoint are not those of eager code on CUDA.
    layer = make(device, hidden_dropout=0.0 if device == "cuda" else 0.2)

    def step(x):
        return te.checkpoint(layer, x, use_reentrant=False, window_size=(3, 0))

    x = states(device)
    seed = int(torch.randint(2**31, ()))
    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(seed)
        out = function(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])])
    assert_same_bits(*results)
    tracked = torch.compile(
        lambda x: te.checkpoint(layer, x, get_rng_state_tracker=lambda: None), fullgraph=True
    )
    with pytest.raises(Exception, match="get_rng_state_tracker under"):
        tracked(x)


def test_recompute_in_a_traced_graph_repeats_the_dropout(device):
    torch._dynamo.reset()

    def dropped(x):
        return bias_dropout_add(x, None, None, dropout=0.5)

    step = torch.compile(lambda x: te.checkpoint(dropped, x), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(64, HIDDEN, device=device).requires_grad_()
        out = step(x)
        out.sum().backward()
        assert 0 < out.count_nonzero() < out.numel()
        assert torch.equal(x.grad * x.detach(), out)


@pytest.mark.parametrize(
    ("fused", "recipe"), [(True, None), (False, "delayed"), (True, "delayed"), (False, "current")]
)
def test_compiled_equals_eager(device, fused, recipe):
    dtype = F32 if recipe is None else BF16
    original = make(device, dtype, hidden_dropout=0.2, fuse_qkv_params=fused)
    data = torch.randn(3, LENGTH, BATCH, HIDDEN).to(device, dtype)
    seed = int(torch.randint(2**31, ()))
    results = []
    for compiled in (False, True):
        te.reset()
        torch._dynamo.reset()
        layer = copy.deepcopy(original)
        function = layer
        if compiled:
            function = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.manual_seed(seed)
        seen = []
        for step in data:
            x = step.clone().requires_grad_()
            with region(recipe):
                out = function(x)
            out.float().square().sum().backward()
            seen += [out.detach(), x.grad]
        results.append([seen, [p.grad for p in layer.parameters()]])
    assert_same_bits(*results)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_captured_graph_equals_eager(recipe):
    """Forward and backward of a layer with dropout: a replay draws like an eager step."""
    original = make("cuda", BF16, hidden_dropout=0.2, drop_path_rate=0.2, fuse_qkv_params=True)
    data = torch.randn(8, LENGTH, BATCH, HIDDEN).to("cuda", BF16)
    made = None if recipe is None else RECIPES[recipe]()

    def build():
        te.reset()
        layer = copy.deepcopy(original)
        static = data[0].clone().requires_grad_()

        def step():
            for tensor in (static, *layer.parameters()):
                if tensor.grad is not None:
                    tensor.grad.zero_()
            with contextlib.nullcontext() if made is None else te.autocast(recipe=made):
                out = layer(static)
            out.float().square().sum().backward()
            return out

        return static, step

    def feed(static, index):
        with torch.no_grad():
            static.copy_(data[index])

    static, step = build()
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    expected = []
    for index in range(8):
        feed(static, index)
        expected.append((step().detach().clone(), static.grad.clone()))
    static, step = build()
    torch.manual_seed(seed)
    with side_stream():
        for index in range(3):
            feed(static, index)
            step()
    graph, out = captured(step)
    for index in range(3, 8):
        feed(static, index)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits([out.detach(), static.grad], list(expected[index]))


@pytest.mark.parametrize("options", [{}, {"num_gqa_groups": 2, "window_size": (3, 0)}], ids=str)
def test_sequence_lengths_share_a_graph(device, options):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layer = make(device, hidden_dropout=0.1, **options)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    seed = int(torch.randint(2**31, ()))
    for length in (6, 7, 9, 12, 5):
        x = torch.randn(length, BATCH, HIDDEN, device=device, requires_grad=True)
        results = []
        for function in (layer, compiled):
            torch.manual_seed(seed)
            out = function(x)
            results.append([out, *torch.autograd.grad(out.square().sum(), x)])
        assert_same_bits(*results)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one length, any length


def test_copies_state_dict_and_moves(device):
    layer = make(device, num_gqa_groups=2)
    x = states(device)
    expected = layer(x)
    assert_same_bits(copy.deepcopy(layer)(x), expected)
    assert_same_bits(pickle.loads(pickle.dumps(layer))(x), expected)
    other = make(device, num_gqa_groups=2)
    other.load_state_dict(layer.state_dict(), strict=True)
    assert_same_bits(other(x), expected)
    half = copy.deepcopy(layer).to(BF16)
    assert half(x.to(BF16)).dtype == BF16
    assert_same_bits(copy.deepcopy(half).to("cpu").to(device)(x.to(BF16)), half(x.to(BF16)))


def test_parameters_may_be_reassigned_and_shared(device):
    one, other = (make(device, fuse_qkv_params=True) for _ in range(2))
    x = states(device)
    one(x)
    other(x)
    other.self_attention.layernorm_qkv.weight = one.self_attention.layernorm_qkv.weight
    other.layernorm_mlp.fc1_weight = one.layernorm_mlp.fc1_weight
    for name, parameter in one.named_parameters():
        dict(other.named_parameters())[name].data.copy_(parameter.data)
    assert_same_bits(other(x), one(x))
    (one(x) + other(x)).sum().backward()
    shared = one.layernorm_mlp.fc1_weight
    assert shared is other.layernorm_mlp.fc1_weight and shared.grad is not None


def test_autocast_of_torch(device):
    """fp32 parameters and residual stream, 16-bit branches."""
    layer = make(device, hidden_dropout=0.1)
    x = states(device)
    with torch.autocast(device, dtype=BF16):
        out = layer(x)
    assert out.dtype == F32
    out.sum().backward()
    assert x.grad.dtype == F32 and layer.layernorm_mlp.fc2_bias.grad.dtype == F32
