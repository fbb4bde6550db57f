# SPDX-License-Identifier: Apache-2.0
"""`convert` swaps layers in place: the same parameters, hooks, state dict and numbers as before."""

import copy
import pickle

import pytest
import torch
from comparators import assert_nmse
from device_kinds import every_device
from pytorch.helpers import assert_same_bits, counted
from tols import tol
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.tools.rmsnorms import recognise

# ---- RMSNorm classes as model libraries write them ----


class LlamaRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        kept = hidden_states.dtype
        x = hidden_states.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(kept)


class GemmaRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).type_as(x)


class T5LayerNorm(LlamaRMSNorm):
    pass


class WrongEpsRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


class CenteredRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class TrainingRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x) if self.training else x


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x, gate=None):
        return super().forward(x)


class Fp32OutRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        return super().forward(x.float())


class BuffersRMSNorm(LlamaRMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("seen", torch.zeros(1))


class BrokenRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        raise RuntimeError("only where it is told to")


class Block(nn.Module):
    """A block with what convert has to leave alone as well."""

    def __init__(self, size=32):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.qkv = nn.Linear(size, 3 * size)
        self.rms = LlamaRMSNorm(size)
        self.out = nn.Linear(3 * size, size, bias=False)
        self.attention = nn.MultiheadAttention(size, 2)
        self.last = nn.RMSNorm(size, eps=1e-6)

    def forward(self, x):
        h = self.out(self.qkv(self.norm(x)))
        return self.last(self.rms(x + h))


def randomise(model):
    """Weights that no constructor gives."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def chain_bound(x):
    return tol("layer", x.dtype, x.shape[-1] * 3)


# ---- numbers, parameters, state dicts ----


@every_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_same_parameters_same_numbers(device, dtype):
    model = randomise(Block()).to(device=device, dtype=dtype)
    plain = copy.deepcopy(model)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    random_state = torch.get_rng_state()
    assert te.convert(model) is model
    assert torch.equal(random_state, torch.get_rng_state())
    kinds = [type(m) for m in (model.norm, model.qkv, model.rms, model.out, model.last)]
    assert kinds == [te.LayerNorm, te.Linear, te.RMSNorm, te.Linear, te.RMSNorm]
    assert type(model.attention.out_proj) is type(plain.attention.out_proj)
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameters[name] for name in after)
    assert list(model.state_dict()) == list(plain.state_dict())

    x = torch.randn(8, 4, 32, device=device, dtype=dtype)
    g = torch.randn_like(x)
    found, expected = model(x), plain(x)
    assert found.dtype == expected.dtype
    assert_nmse(found, expected.double(), chain_bound(x))
    found.backward(g)
    plain(x).backward(g)
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            assert_nmse(after[name].grad, parameter.grad.double(), chain_bound(x), name)
    before = model.qkv.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.qkv.weight, before)  # the optimizer made before the conversion


@every_device
def test_converted_layers_run_in_fp8(device):
    model = te.convert(randomise(Block()).to(device))
    x = torch.randn(16, 32, device=device, requires_grad=True)
    with counted() as ran:
        with te.autocast():
            out = model(x)
        out.sum().backward()
    assert (ran.fp8, ran.other) == (6, 0)


@every_device
def test_state_dicts_go_both_ways(device):
    plain, model = randomise(Block()).to(device), Block().to(device)
    te.convert(model)
    assert model.load_state_dict(plain.state_dict()).missing_keys == []
    assert plain.load_state_dict(model.state_dict()).unexpected_keys == []
    assert_same_bits(dict(model.state_dict()), dict(plain.state_dict()))


def test_copies_and_pickles_of_a_converted_model():
    model = te.convert(randomise(Block()))
    model(torch.randn(4, 32))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin.qkv) is te.Linear
        assert_same_bits(dict(twin.state_dict()), dict(model.state_dict()))


def test_meta_device_and_later_values():
    with torch.device("meta"):
        model = Block()
    te.convert(model)
    assert all(p.is_meta for p in model.parameters())
    assert type(model.rms) is te.RMSNorm  # recognised without values
    model.to_empty(device="cpu")
    model.load_state_dict(randomise(Block()).state_dict())
    assert model(torch.randn(4, 32)).isfinite().all()


# ---- what belongs to the old module goes over ----


def test_ties_frozen_weights_and_attributes():
    model = nn.Module()
    model.embedding = nn.Embedding(48, 32)
    model.head = nn.Linear(32, 48, bias=False)
    model.head.weight = model.embedding.weight
    model.frozen = nn.Linear(32, 32).requires_grad_(False)
    model.again = model.frozen
    model.frozen.weight.tag = "kept"
    model.frozen.note = {"of": "a user"}
    model.frozen.register_buffer("seen", torch.zeros(3))
    model.frozen.register_buffer("hidden", torch.ones(2), persistent=False)
    model.frozen.eval()
    keys = list(model.state_dict())
    te.convert(model)
    assert model.head.weight is model.embedding.weight
    assert model.again is model.frozen and type(model.again) is te.Linear
    assert not model.frozen.weight.requires_grad and model.frozen.weight.tag == "kept"
    assert model.frozen.note == {"of": "a user"}
    assert not model.frozen.training and model.head.training
    assert list(model.state_dict()) == keys


def test_hooks_and_their_handles():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
    calls = []

    def note(name):
        return lambda *args: calls.append(name)

    linear = model[0]
    handles = [
        linear.register_forward_pre_hook(note("before")),
        linear.register_forward_hook(lambda m, a, kw, out: calls.append("after"), with_kwargs=True),
        linear.register_full_backward_pre_hook(note("backward before")),
        linear.register_full_backward_hook(note("backward")),
        linear.register_state_dict_pre_hook(note("save before")),
        linear._register_state_dict_hook(note("save")),
        linear.register_load_state_dict_pre_hook(lambda m, *rest: calls.append(type(m))),
        linear.register_load_state_dict_post_hook(note("load")),
    ]
    del linear
    te.convert(model)
    model(torch.randn(4, 16, requires_grad=True)).sum().backward()
    model.load_state_dict(model.state_dict())
    assert calls == ["before", "after", "backward before", "backward", "save before", "save",
                     te.Linear, "load"]  # fmt: skip
    calls.clear()
    for handle in handles:
        handle.remove()
    model(torch.randn(4, 16)).sum().backward()
    model.load_state_dict(model.state_dict())
    assert calls == []


@pytest.mark.parametrize("bias", [True, False])
def test_parametrizations(bias):
    made = nn.Linear(16, 24, bias=bias)
    model = nn.Sequential(parametrizations.spectral_norm(parametrizations.weight_norm(made)))
    plain = copy.deepcopy(model)
    keys = list(model.state_dict())
    te.convert(model)
    assert isinstance(model[0], te.Linear) and parametrize.is_parametrized(model[0], "weight")
    assert list(model.state_dict()) == keys
    x = torch.randn(8, 16)
    for module in (model, plain):
        module.eval()
        module(x).sum().backward()
    assert_nmse(model(x), plain(x).double(), chain_bound(x))
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert_nmse(found.grad, wanted.grad.double(), tol("layer", x.dtype, 16))
    parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is te.Linear and isinstance(model[0]._parameters["weight"], nn.Parameter)


@pytest.mark.parametrize("split", [False, True])
def test_a_call_reads_a_parametrization_once(split):
    """One with a state moves on at each reading: spectral_norm's is a step of a power iteration."""
    if split:
        layer = te.Linear(16, 32, parameters_split=("a", "b"), device="cpu")
        names = ("a_weight", "b_bias")
    else:
        layer, names = te.convert(nn.Linear(16, 32)), ("weight", "bias")
    read = []

    class Reads(nn.Module):
        def forward(self, tensor):
            read.append(tensor.shape)
            return 2 * tensor

    for name in names:
        parametrize.register_parametrization(layer, name, Reads())
    for recipe in (None, DelayedScaling()):
        for _ in range(3):
            read.clear()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                layer(torch.randn(16, 16)).sum().backward()
            assert len(read) == 2


def test_spectral_norm_moves_on_as_in_torch():
    torch_layer = parametrizations.spectral_norm(nn.Linear(16, 32))
    layer = te.convert(copy.deepcopy(torch_layer))
    for _ in range(3):
        x = torch.randn(16, 16)
        results = [module(x) for module in (layer, torch_layer)]
        assert_nmse(results[0], results[1].double(), tol("layer", x.dtype, 16))
        states = [module.state_dict() for module in (layer, torch_layer)]
        for name, value in states[1].items():
            assert torch.equal(states[0][name], value), name


@every_device
@pytest.mark.parametrize("first", ["convert", "parametrize"])
def test_copies_of_a_parametrized_layer_have_scales_of_their_own(device, first):
    layer = nn.Linear(16, 32, device=device)
    if first == "convert":
        layer = parametrizations.weight_norm(te.convert(layer))
    else:
        layer = te.convert(parametrizations.weight_norm(layer))
    x = torch.randn(16, 16, device=device)

    def step(module, x):
        with te.autocast():
            return module(x)

    step(layer, x)
    twin = copy.deepcopy(layer)
    assert te.scales(twin) == te.scales(layer)
    step(twin, 128.0 * x)
    assert te.scales(twin)["input"].amax == 128.0 * te.scales(layer)["input"].amax
    assert te.scales(twin)["weight"] != te.scales(layer)["weight"]
    back = te.convert(layer, to="torch")
    assert_nmse(copy.deepcopy(back)(x), back(x).double(), tol("round", x.dtype))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm_by_hook():
    model, plain = (nn.Sequential(nn.utils.weight_norm(nn.Linear(16, 24))) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    te.convert(model)
    x = torch.randn(8, 16)
    assert type(model[0]) is te.Linear
    with torch.no_grad():
        model[0].weight_g.mul_(2.0)
        plain[0].weight_g.mul_(2.0)
    assert_nmse(model(x), plain(x).double(), chain_bound(x))


def test_layers_inside_a_linear_layer():
    """Adapters hang their layers into the module that they adapt."""
    base = nn.Linear(16, 16)
    base.adapter = nn.Linear(16, 4)
    model = nn.Sequential(base)
    te.convert(model)
    assert type(model[0]) is te.Linear and type(model[0].adapter) is te.Linear


NORMS = {
    "no bias": lambda: nn.LayerNorm(24, bias=False),
    "no parameters": lambda: nn.LayerNorm(24, elementwise_affine=False),
    "two dims": lambda: nn.LayerNorm((4, 24), eps=1e-3),
    "rms": lambda: nn.RMSNorm(24),  # eps=None
    "rms without a weight": lambda: nn.RMSNorm(24, eps=1e-3, elementwise_affine=False),
}


@every_device
@pytest.mark.parametrize("kind", NORMS)
def test_norms_with_and_without_parameters(device, kind):
    norm = randomise(NORMS[kind]()).to(device)
    plain = copy.deepcopy(norm)
    x = 1e-3 * torch.randn(6, 4, 24, device=device)
    new = te.convert(norm, strict=True)
    assert type(new).__module__.startswith("transformer_engine")
    assert list(new.state_dict()) == list(plain.state_dict())
    assert_nmse(new(x), plain(x).double(), chain_bound(x))
    back = te.convert(new, to="torch", strict=True)
    assert type(back) is type(plain) and repr(back) == repr(plain)
    assert list(back.state_dict()) == list(plain.state_dict())
    assert_nmse(back(x), plain(x).double(), chain_bound(x))


# ---- RMSNorm classes ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind, zero_centered", [
    (LlamaRMSNorm, False), (GemmaRMSNorm, True), (T5LayerNorm, False),
])  # fmt: skip
def test_rmsnorms_of_others(kind, zero_centered, dtype):
    norm = randomise(kind(48, eps=1e-4)).to(dtype)
    plain = copy.deepcopy(norm)
    new = te.convert(norm)
    assert type(new) is te.RMSNorm
    assert (new.eps, new.zero_centered_gamma) == (1e-4, zero_centered)
    x = 1e-2 * torch.randn(6, 48, dtype=dtype)
    assert_nmse(new(x), plain(x).double(), chain_bound(x))


@pytest.mark.parametrize("kind, why", [
    (WrongEpsRMSNorm, "something else than an RMSNorm"),
    (CenteredRMSNorm, "something else than an RMSNorm"),
    (TrainingRMSNorm, "something else than an RMSNorm"),
    (GatedRMSNorm, "takes more than the input"),
    (BuffersRMSNorm, "buffers or modules of its own"),
    (BrokenRMSNorm, "raised RuntimeError: only where it is told to"),
    (Fp32OutRMSNorm, "torch.float32 of torch.bfloat16"),
])  # fmt: skip
def test_lookalikes_that_compute_something_else_stay(kind, why):
    model = nn.Sequential(kind(32)).to(torch.bfloat16)
    (found,) = te.convertible(model)
    assert found.target is None and why in found.reason
    te.convert(model)
    assert type(model[0]) is kind
    with pytest.raises(ValueError, match="strict=True, and 1 modules can not be converted"):
        te.convert(model, strict=True)


@pytest.mark.parametrize("features", [1, 2, 16, 1000])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1e-2])
def test_recognised_at_every_size(features, eps):
    for kind in (LlamaRMSNorm, GemmaRMSNorm):
        assert recognise(kind(features, eps)) == (eps, *2 * [kind is GemmaRMSNorm])


def test_trying_touches_nothing():
    norm = LlamaRMSNorm(32).train()
    norm.register_forward_hook(lambda *args: pytest.fail("the hook ran"))
    before, weight = torch.get_rng_state(), norm.weight.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        assert recognise(norm) == (1e-6, False, False)
    assert torch.equal(before, torch.get_rng_state()) and torch.equal(weight, norm.weight)
    assert norm.training and isinstance(norm.weight, nn.Parameter)


# ---- skip, strict, what stays ----


@pytest.mark.parametrize("skip, swapped", [
    ((), ["0.norm", "0.qkv", "0.rms", "0.out", "0.last", "head"]),
    ("head", ["0.norm", "0.qkv", "0.rms", "0.out", "0.last"]),
    ("0", ["head"]),
    (["*.norm", "*.r?s"], ["0.qkv", "0.out", "0.last", "head"]),
    (nn.Linear, ["0.norm", "0.rms", "0.last"]),
    ([Block, "nothing*"], ["head"]),
    (lambda path, module: isinstance(module, nn.Linear) and module.bias is None,
     ["0.norm", "0.qkv", "0.rms", "0.last", "head"]),
])  # fmt: skip
def test_skip(skip, swapped):
    model = nn.Sequential()
    model.add_module("0", Block())
    model.add_module("head", nn.Linear(32, 64))
    listed = [c.name for c in te.convertible(model, skip=skip) if c.target is not None]
    te.convert(model, skip=skip)
    ours = [n for n, m in model.named_modules() if type(m).__module__.startswith("transformer_")]
    assert listed == ours == swapped


def test_skip_by_object_and_by_either_path():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["c"] = model["a"]
    te.convert(model, skip=model["b"])
    assert type(model["b"]) is nn.Linear and model["a"] is model["c"]
    twin = nn.ModuleDict({"a": nn.Linear(8, 8)})
    twin["c"] = twin["a"]
    te.convert(twin, skip="c")
    assert type(twin["a"]) is nn.Linear and twin["a"] is twin["c"]


def test_what_stays_and_why():
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict({
        "fp64": nn.Linear(8, 8, dtype=torch.float64),
        "subclass": Special(8, 8),
        "lazy": nn.LazyLinear(8),
        "patched": nn.Linear(8, 8),
        "mixed": nn.Linear(8, 8),
        "pruned": nn.Linear(8, 8),
        "compiled": nn.Linear(8, 8),
        "outer": torch.compile(nn.Linear(8, 8), backend="eager"),
        "fine": nn.Linear(8, 8),
        "other": nn.Bilinear(8, 8, 8),
    })  # fmt: skip
    model["patched"].forward = lambda x: x
    model["mixed"].bias = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))
    model["pruned"].weight = nn.Parameter(torch.zeros(4, 8))
    model["compiled"].compile()
    reasons = {c.name: c.reason for c in te.convertible(model)}
    parts = {
        "fp64": "weight is torch.float64, not torch.float32",
        "subclass": "a subclass of torch.nn.Linear",
        "lazy": "a subclass of torch.nn.Linear",
        "patched": "its forward was replaced on the instance",
        "mixed": "its parameters differ in dtype",
        "pruned": "its weight is (4, 8), where its features say (8, 8)",
        "compiled": "it was compiled by itself",
        "outer._orig_mod": "it was compiled by itself",
    }
    assert reasons.keys() == parts.keys() | {"fine"}
    for name, part in parts.items():
        assert part in reasons[name], name
    kinds = {name: type(module) for name, module in model.items()}
    with pytest.raises(ValueError, match="8 modules can not be converted; nothing was") as error:
        te.convert(model, strict=True)
    assert all(f"{name} (" in str(error.value) for name in parts)
    assert {name: type(module) for name, module in model.items()} == kinds  # also "fine"
    te.convert(model, strict=True, skip=list(parts))
    assert type(model["fine"]) is te.Linear


def test_converting_again_changes_nothing():
    model = te.convert(nn.Sequential(Block(), te.TransformerLayer(32, 64, 2, device="cpu")))
    modules = list(model.modules())
    left = [(c.name, c.target) for c in te.convertible(model)]
    assert left == [("0.attention.out_proj", None)]
    te.convert(model)
    assert all(a is b for a, b in zip(modules, model.modules(), strict=True))


def test_the_model_itself():
    layer = nn.Linear(8, 24)
    new = te.convert(layer)
    assert type(new) is te.Linear and new.weight is layer.weight
    assert [c.name for c in te.convertible(layer)] == [""]
    assert te.convert(new) is new
    with pytest.raises(ValueError, match="the model itself"):
        te.convert(nn.Linear(8, 8).double(), strict=True)


def test_wrong_arguments():
    model = nn.Sequential(nn.Linear(8, 8))
    for call in (te.convert, te.convertible):
        with pytest.raises(TypeError, match="model: list, expected a torch.nn.Module"):
            call([model])
        with pytest.raises(TypeError, match="skip: 3, expected a path"):
            call(model, skip=[3])
        with pytest.raises(TypeError, match="skip=3, expected paths"):
            call(model, skip=3)
        with pytest.raises(ValueError, match="no module '1'"):
            call(model, skip="1")
        with pytest.raises(ValueError, match="to='jax', expected"):
            call(model, to="jax")
    wide = nn.ModuleDict({"lm_head": nn.Linear(8, 8)})
    with pytest.raises(ValueError, match="no module 'lm_haed'; did you mean 'lm_head'"):
        te.convert(wide, skip="lm_haed")
    assert type(model[0]) is nn.Linear


# ---- the other way ----


@every_device
def test_back_to_torch(device):
    model = randomise(Block()).to(device)
    parameters = list(model.parameters())
    te.convert(model)
    with te.autocast():
        model(torch.randn(16, 32, device=device)).sum().backward()
    x = torch.randn(16, 32, device=device)
    expected = model(x)
    te.convert(model, to="torch", strict=True)
    kinds = [type(m) for m in (model.norm, model.qkv, model.rms, model.out, model.last)]
    assert kinds == [nn.LayerNorm, nn.Linear, nn.RMSNorm, nn.Linear, nn.RMSNorm]
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.out.bias is None and not any("extra_state" in key for key in model.state_dict())
    assert_nmse(model(x), expected.double(), chain_bound(x))
    pickle.loads(pickle.dumps(model))


def test_what_torch_has_no_module_for():
    model = nn.ModuleDict({
        "zero": te.RMSNorm(8, zero_centered_gamma=True, device="cpu"),
        "split": te.Linear(8, 8, parameters_split=("a", "b"), device="cpu"),
        "late": te.Linear(8, 8, delay_wgrad_compute=True, device="cpu"),
        "mlp": te.LayerNormMLP(8, 8, device="cpu"),
        "layer": te.TransformerLayer(32, 64, 2, device="cpu"),
        "core": te.DotProductAttention(2, 16),
        "fine": te.Linear(8, 8, bias=False, device="cpu"),
    })  # fmt: skip
    reasons = {c.name: c.reason for c in te.convertible(model, to="torch")}
    assert reasons.keys() == model.keys() - {"core"}
    assert "1 + gamma" in reasons["zero"] and "split into a, b" in reasons["split"]
    assert reasons["late"] == "delay_wgrad_compute=True"
    assert reasons["mlp"] == reasons["layer"] == "torch.nn has no such module"
    te.convert(model, to="torch")
    assert type(model["fine"]) is nn.Linear and model["fine"].bias is None
    assert type(model["layer"]) is te.TransformerLayer
