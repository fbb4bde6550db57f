# SPDX-License-Identifier: Apache-2.0
"""Arguments of `Linear`, one by one: what each changes, and what it refuses."""

import contextlib

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, counted, state_of

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MMParams
from transformer_engine.pytorch.plans import quantization_of

FP8 = [None, "delayed", "current"]


def region(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]())


def run(layer, x, recipe, grad=None, **call):
    """Forward and backward: (output, gradient of the input); the weights' are in the layer."""
    x = x.detach().clone().requires_grad_()
    with region(recipe):
        out = layer(x, **call)
    first = out[0] if isinstance(out, tuple) else out
    first.backward(torch.ones_like(first) if grad is None else grad)
    return out, x.grad


@pytest.fixture
def x(device):
    return torch.randn(16, 32, device=device)


@pytest.fixture
def grad(device):
    return torch.randn(16, 48, device=device)


def twin_of(layer, device, **options):
    """A layer with the same parameters and other options."""
    twin = te.Linear(layer.in_features, layer.out_features, device=device, **options)
    twin.load_state_dict(layer.state_dict())
    return twin


# ---- bias ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", FP8)
def test_return_bias(device, recipe, x):
    layer = te.Linear(32, 48, return_bias=True, device=device)
    with torch.no_grad():
        layer.bias.normal_()
    (out, bias), _ = run(layer, x, recipe)
    assert_same_bits(bias, layer.bias)
    assert layer.bias.grad is None  # its gradient is the caller's
    plain = te.Linear(32, 48, bias=False, device=device)
    plain.load_state_dict({"weight": layer.weight})
    assert_same_bits(out, run(plain, x, recipe)[0])
    bias.sum().backward()
    assert (layer.bias.grad == 1).all()


def test_return_bias_without_a_bias(device, x):
    out, bias = te.Linear(32, 48, bias=False, return_bias=True, device=device)(x)
    assert out.shape == (16, 48) and bias.numel() == 0


def test_bias_false_leaves_an_empty_tensor(device):
    layer = te.Linear(32, 48, bias=False, device=device)
    assert isinstance(layer.bias, torch.Tensor) and layer.bias.numel() == 0
    assert list(dict(layer.named_parameters())) == ["weight"]


# ---- parameters ----------------------------------------------------------------------------------

SPLITS = {
    "tuple": (("query_", "key_", "value"), [("query", 16), ("key", 16), ("value", 16)]),
    "list": (["a", "b"], [("a", 24), ("b", 24)]),
    "dict": ({"q_": 32, "kv": 16}, [("q", 32), ("kv", 16)]),
}


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("split", SPLITS)
def test_parameters_split(device, recipe, split, x, grad):
    argument, parts = SPLITS[split]
    layer = te.Linear(32, 48, parameters_split=argument, device=device)
    names = [f"{n}_{kind}" for kind in ("weight", "bias") for n, _ in parts]
    assert sorted(dict(layer.named_parameters())) == sorted(names)
    assert sorted(layer.state_dict()) == sorted(names)
    for name, rows in parts:
        assert getattr(layer, f"{name}_weight").shape == (rows, 32)
        assert getattr(layer, f"{name}_bias").shape == (rows,)
    whole = te.Linear(32, 48, device=device)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            rows = [getattr(layer, f"{n}_{kind}") for n, _ in parts]
            getattr(whole, kind).copy_(torch.cat(rows))
    with counted() as gemms:
        out, dx = run(layer, x, recipe, grad)
    assert (gemms.fp8 if recipe else gemms.other) == 3
    expected = run(whole, x, recipe, grad)
    assert_same_bits([out, dx], list(expected))
    for kind in ("weight", "bias"):
        grads = [getattr(layer, f"{n}_{kind}").grad for n, _ in parts]
        assert_same_bits(torch.cat(grads), getattr(whole, kind).grad)


def test_parameters_split_without_bias(device, x):
    layer = te.Linear(32, 48, bias=False, parameters_split=("a", "b"), device=device)
    assert sorted(dict(layer.named_parameters())) == ["a_weight", "b_weight"]
    assert layer.a_bias.numel() == layer.b_bias.numel() == 0
    assert layer(x).shape == (16, 48)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_assigning_a_name_that_the_split_replaced(device, name):
    layer = te.Linear(32, 48, parameters_split=("q_", "k_"), device=device)
    with pytest.raises(AttributeError, match=f"{name} is split into q_{name}, k_{name}"):
        setattr(layer, name, torch.nn.Parameter(torch.zeros(48, 32, device=device)))
    assert not hasattr(layer, "weight")


@pytest.mark.parametrize(
    "split",
    [("a",) * 5, ("a", "a"), {"a": 40, "b": 9}, {"a": 48, "b": 0}, {"a": 60, "b": -12}, ()],
    ids=str,
)
def test_wrong_splits(split):
    with pytest.raises(ValueError, match="Linear: parameters_split="):
        te.Linear(32, 48, parameters_split=split, device="cpu")


def test_split_and_fused_accumulation_do_not_go_together():
    with pytest.raises(ValueError, match="fuse_wgrad_accumulation and parameters_split"):
        te.Linear(32, 48, parameters_split=("a", "b"), fuse_wgrad_accumulation=True, device="cpu")


def test_initial_values(device):
    layer = te.Linear(256, 512, device=device)
    assert (layer.bias == 0).all()
    deviation = float(layer.weight.detach().double().std())
    # The sample deviation of 131072 values is itself within 1/sqrt(2 n) of it, 6 times over here.
    assert abs(deviation / 0.023 - 1) * (2 * layer.weight.numel()) ** 0.5 < 6


@pytest.mark.parametrize("split", [None, ("a", "b")])
def test_init_method(device, split):
    shapes = []

    def init(weight):
        shapes.append(tuple(weight.shape))
        torch.nn.init.constant_(weight, 3.0)

    layer = te.Linear(32, 48, init_method=init, parameters_split=split, device=device)
    assert shapes == ([(48, 32)] if split is None else [(24, 32), (24, 32)])
    for name, parameter in layer.named_parameters():
        assert (parameter == (3.0 if name.endswith("weight") else 0.0)).all()


def test_rng_tracker():
    forks = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, name="default"):
            forks.append(name)
            state = torch.get_rng_state()
            torch.manual_seed(7)
            yield
            torch.set_rng_state(state)

    before = torch.get_rng_state()
    layers = [
        te.Linear(32, 48, get_rng_state_tracker=Tracker, rng_tracker_name=name, device="cpu")
        for name in (None, "model-parallel-rng")
    ]
    assert_same_bits(torch.get_rng_state(), before)
    assert_same_bits(layers[0].weight, layers[1].weight)
    assert forks[0] == "default" and forks[-1] == "model-parallel-rng"


@pytest.mark.parametrize("bias", [True, False])
def test_meta_device(device, bias):
    with torch.device("meta"):
        layer = te.Linear(32, 48, bias=bias, device="meta", init_method=torch.nn.init.ones_)
    layer.weight.mark = "kept"
    assert layer.weight.device.type == "meta" and len(list(layer.parameters())) == 1 + bias
    layer.reset_parameters(defer_init=True)
    assert layer.weight.device.type == "meta"
    layer.reset_parameters()
    assert (layer.weight == 1).all() and layer.weight.mark == "kept"
    home = "cuda" if torch.cuda.is_available() else "cpu"
    assert {p.device.type for p in (*layer.parameters(), layer.bias)} == {home}
    layer.to(device)
    with counted() as gemms:
        run(layer, torch.randn(16, 32, device=device), "delayed")
    assert gemms.fp8 == 3


def test_meta_device_with_to_empty(device):
    layer = te.Linear(32, 48, device="meta").to_empty(device=device)
    layer.reset_parameters()
    assert layer.weight.isfinite().all() and layer.weight.device.type == device


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_arguments(device, dtype):
    for options in ({"params_dtype": dtype}, {"dtype": dtype}):
        layer = te.Linear(32, 48, device=device, **options)
        assert {p.dtype for p in layer.parameters()} == {dtype}
    with pytest.raises(ValueError, match="dtype=torch.float64 and params_dtype="):
        te.Linear(32, 48, params_dtype=dtype, dtype=torch.float64, device=device)


def test_default_dtype_and_device():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = te.Linear(32, 48)
    finally:
        torch.set_default_dtype(torch.float32)
    home = "cuda" if torch.cuda.is_available() else "cpu"
    assert layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == home


def test_extra_repr():
    plain = repr(te.Linear(32, 48, device="cpu"))
    assert plain == "Linear(in_features=32, out_features=48, bias=True)"
    full = te.Linear(
        32, 48, bias=False, return_bias=True, delay_wgrad_compute=True,
        save_original_input=True, parameters_split={"a": 16, "b": 32}, device="cpu",
    )  # fmt: skip
    for part in ("bias=False", "return_bias=True", "delay_wgrad_compute=True",
                 "save_original_input=True", "parameters_split={'a': 16, 'b': 32}"):  # fmt: skip
        assert part in repr(full)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4), (4, 2.0), ("4", 4)], ids=str)
def test_wrong_sizes(sizes):
    with pytest.raises(ValueError, match=r"Linear: (in|out)_features = .*expected a positive int"):
        te.Linear(*sizes, device="cpu")


# ---- not there yet -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_output", "fp8_grad"])
def test_forward_arguments_name_themselves(device, name, x):
    layer = te.Linear(32, 48, device=device)
    with te.autocast(), pytest.raises(NotImplementedError, match=f"Linear: {name}=True"):
        layer(x, **{name: True})
    assert state_of(layer) is None


@pytest.mark.parametrize("recipe", [DelayedScaling, Float8CurrentScaling])
@pytest.mark.parametrize("name", ["fp8_dpa", "fp8_mha", "backward_override"])
def test_recipe_fields_name_themselves(device, recipe, name, x):
    if (recipe, name) == (DelayedScaling, "backward_override"):
        pytest.skip("DelayedScaling refuses it itself")
    layer = te.Linear(32, 48, device=device)
    made = recipe(**{name: "dequantized" if name == "backward_override" else True})
    with te.autocast(recipe=made), pytest.raises(NotImplementedError, match=name):
        layer(x)
    assert state_of(layer) is None


# ---- accumulation --------------------------------------------------------------------------------

FAST = (_core.LINEAR_FAST_FPROP, _core.LINEAR_FAST_DGRAD, _core.LINEAR_FAST_WGRAD)


@pytest.mark.parametrize("split", [(True, True, False), (False, False, True), None], ids=str)
def test_accumulation_follows_the_recipe(split):
    """Fast in the forward alone by default; each GEMM of current scaling can be told otherwise."""
    if split is None:
        split, made = (False, True, True), [DelayedScaling(), Float8CurrentScaling()]
    else:
        names = ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad")
        chosen = {name: MMParams(value) for name, value in zip(names, split, strict=True)}
        made = [Float8CurrentScaling(**chosen)]
    for recipe in made:
        flags = quantization_of(recipe).flags
        assert [bool(flags & flag) for flag in FAST] == [not value for value in split]


# ---- what needs a gradient -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", FP8)
def test_requires_grad_toggled(device, recipe, x, grad):
    """The same layer with its weight frozen, thawed and frozen again."""
    layer = te.Linear(32, 48, device=device)
    for thawed in (True, False, True, False):
        layer.weight.requires_grad_(thawed)
        layer.zero_grad()
        with counted() as gemms:
            run(layer, x, recipe, grad)
        assert (gemms.fp8 if recipe else gemms.other) == 2 + thawed
        assert (layer.weight.grad is not None) == thawed and layer.bias.grad is not None


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_original_input_gives_the_same_bits(device, recipe, dtype):
    x = torch.randn(21, 33, device=device, dtype=dtype)
    grad = torch.randn(21, 48, device=device, dtype=dtype)
    results = []
    first = te.Linear(33, 48, device=device, params_dtype=dtype)
    for keep in (False, True):
        te.reset()
        layer = twin_of(first, device, save_original_input=keep, params_dtype=dtype)
        for _ in range(2):
            layer.zero_grad()
            with counted() as gemms:
                out, dx = run(layer, x, recipe, grad)
            assert gemms.fp8 == 3
        results.append([out, dx, layer.weight.grad, layer.bias.grad, state_of(layer)])
    assert_same_bits(*results)


def test_save_original_input_keeps_the_input_alone(device, x):
    layer = te.Linear(32, 48, save_original_input=True, device=device)
    x.requires_grad_()
    with te.autocast(recipe=RECIPES["delayed"]()):
        out = layer(x)
    saved = out.grad_fn.saved_tensors
    assert sum(t.data_ptr() == x.data_ptr() for t in saved) == 1
    others = [t for t in saved if t.data_ptr() not in (x.data_ptr(), layer.weight.data_ptr())]
    assert sum(t.nbytes for t in others) < x.nbytes // 2
