# SPDX-License-Identifier: Apache-2.0
"""Parameters that the quantizers of a CustomRecipe make (`quantized_model_init`)."""

import copy
import io
import pickle

import pytest
import torch
from pytorch.helpers import assert_same_bits, counted, state_of
from pytorch.module_cases import batch, make, quantized, step, weights_of
from pytorch.quantized_cases import (
    E4M3,
    E5M2,
    WEIGHT_RECIPES,
    assert_same_tensor,
    current,
    made,
    source_of,
    twins,
)

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling, DelayedScalingRequest
from transformer_engine.pytorch.tensor import HybridQuantizedTensor

KINDS = ("linear", "norm-linear", "swiglu", "gelu checkpoint")


class Own(te.Float8CurrentScalingQuantizer):
    """A quantizer of a program, which is called."""

    calls = 0

    def _cast(self, *arguments):
        type(self).calls += 1
        super()._cast(*arguments)


class OwnRows(te.Float8RowQuantizer):
    """Another one, whose forms are casts by themselves."""


def hybrid(columnwise=E5M2, **options):
    parts = {"rowwise_quantizer": current(), "columnwise_quantizer": current(columnwise)}
    return te.HybridQuantizer(**parts, **options)


NATIVE = {
    "current": (current, te.Float8Tensor),
    "power 2": (lambda: current(E5M2, force_pow_2_scales=True), te.Float8Tensor),
    "tiles": (lambda: te.Float8BlockQuantizer(E4M3), te.Float8BlockwiseQTensor),
    "lines": (
        lambda: te.Float8BlockQuantizer(E4M3, block_scaling_dim=1),
        te.Float8BlockwiseQTensor,
    ),
    "rows": (lambda: te.Float8RowQuantizer(E4M3, amax_epsilon=0.01), te.Float8RowTensor),
    "mx": (lambda: te.MXFP8Quantizer(E4M3, margin=1), te.MXFP8Tensor),
    "nv": (lambda: te.NVFP4Quantizer(with_2d_quantization=True), te.NVFP4Tensor),
    "nv 4over6": (
        lambda: te.NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE"),
        te.NVFP4Tensor,
    ),
}


def pair(make):
    """A function that gives two equal quantizers as one."""
    return lambda: te.HybridQuantizer(rowwise_quantizer=make(), columnwise_quantizer=make())


NATIVE |= {
    f"pair of {name}": (pair(make), HybridQuantizedTensor) for name, (make, _) in NATIVE.items()
}
CALLED = {
    "own": (lambda: Own(E4M3, None), te.Float8Tensor),
    "own rows": (lambda: OwnRows(E4M3), te.Float8RowTensor),
    "hybrid": (hybrid, HybridQuantizedTensor),
    "hybrid of rows": (
        lambda: te.HybridQuantizer(
            rowwise_quantizer=te.MXFP8Quantizer(E4M3),
            columnwise_quantizer=te.Float8BlockQuantizer(E4M3),
            columnwise_source="rowwise_dequantized",
        ),
        HybridQuantizedTensor,
    ),
}
WEIGHTS = {**NATIVE, **CALLED}
"""Quantizers of weights, and the tensors of their parameters."""


def recipe_of(weight, inp=current, grad=lambda: current(E5M2)):
    """A recipe that casts weights by what `weight` makes."""
    made = {"input": inp, "weight": weight, "grad_output": grad}
    return CustomRecipe(lambda role: made[role.tensor_type]())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_bits_are_those_of_a_weight_cast_at_each_call(device, kind, name):
    """And no forward casts it; optimizers update it in place."""
    quantizer, cls = WEIGHTS[name]
    recipe = recipe_of(quantizer)
    module, plain = twins(lambda: make(kind, device, sizes=(144, 272)), recipe, None)
    weights = weights_of(module)
    assert len(weights) == len(module.LINEARS) and module.primary_weights_in_fp8
    for weight in weights.values():
        assert type(weight) is cls and isinstance(weight, torch.nn.Parameter)
        assert type(weight._quantizer) is type(quantizer())
    x = torch.randn(160, 144, device=device)
    with counted() as gemms:
        expected = step(plain, x, recipe)
    usual, all_gemms = quantized(), (gemms.fp8, gemms.other)
    Own.calls = 0
    with counted() as gemms:
        found = step(module, x, recipe)
    assert_same_bits(found, expected)
    assert (gemms.fp8, gemms.other) == all_gemms
    assert usual > quantized() and Own.calls == 0
    place = {name: weight.get_data_tensors()[0].data_ptr() for name, weight in weights.items()}
    values = {
        name: torch.add(weight.dequantize().detach(), weight.grad, alpha=-0.1)
        for name, weight in weights.items()
    }
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    for name, weight in weights.items():
        assert_same_tensor(weight.detach(), weight._quantizer(values[name]))
        assert weight.get_data_tensors()[0].data_ptr() == place[name]
    step(module, x, recipe)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [name for name in NATIVE if f"pair of {name}" in NATIVE])
def test_pairs_have_the_bits_of_one(device, kind, name):
    """Of a parameter of each, over steps of an optimizer, and with GEMMs of the same dtypes."""
    recipes = [recipe_of(WEIGHTS[f"{first}{name}"][0]) for first in ("", "pair of ")]
    results = []
    x = torch.randn(160, 144, device=device)
    for module, recipe in zip(
        twins(lambda: make(kind, device, sizes=(144, 272)), *recipes), recipes, strict=True
    ):
        optimizer, found = torch.optim.SGD(module.parameters(), lr=0.5), []
        for _ in range(3):
            _core.reset_counters()
            found.append(step(module, x, recipe))
            gemms = {n: count for n, count in _core.counters().items() if "gemm" in n}
            optimizer.step()
        results.append((found, gemms))
    assert_same_bits(results[1][0], results[0][0])
    assert results[1][1] == results[0][1]


def test_a_pair_with_one_scale_is_read_where_its_quantizers_are_equal(device):
    """Each form has a scale of its own, and a GEMM that of the row-wise one."""
    for options, is_one in (({}, True), ({"amax_epsilon": 9.0}, False)):
        quantizer = hybrid(E4M3)
        quantizer.columnwise_quantizer = current(E4M3, **options)
        tensor = quantizer(torch.randn(32, 48, device=device))
        assert (tensor._as_one() is not None) == is_one
    dequantized = hybrid(E4M3, columnwise_source="rowwise_dequantized")
    assert dequantized(torch.randn(32, 48, device=device))._as_one() is None


@pytest.mark.parametrize("measure", [False, True])
def test_delayed_scaling_of_weights(device, measure):
    """As a recipe of its own has it: scales and amaxes are those of the module."""
    request = lambda: DelayedScalingRequest(amax_history_len=4)  # noqa: E731
    ours = recipe_of(request, request, request)
    modules = twins(lambda: make("swiglu", device), DelayedScaling(amax_history_len=4), ours)
    batches = [batch(device) for _ in range(3)]
    results = []
    for module, recipe in zip(modules, (DelayedScaling(amax_history_len=4), ours), strict=True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        steps = []
        for x in batches:
            steps.append(step(module, x, recipe))
            optimizer.step()
        assert all(isinstance(w, te.Float8Tensor) for w in weights_of(module).values())
        results.append((steps, state_of(module)))
    (found, state), (expected, other) = results
    assert_same_bits(found, expected)
    assert_same_bits(state, other)


@pytest.mark.parametrize("way", ["checkpoint", "microbatch", "main", "defer", "dequantized"])
@pytest.mark.parametrize("name", ["lines", "own", "hybrid"])
def test_other_ways_have_the_same_bits(device, name, way, start):
    """Checkpoints, microbatches, main gradients, deferred ones, and backwards of dequantized."""
    recipe = recipe_of(WEIGHTS[name][0])
    recipe.backward_override = "dequantized" if way == "dequantized" else None
    options = {"delay_wgrad_compute": way == "defer", "fuse_wgrad_accumulation": way == "main"}
    call = {"is_first_microbatch": True} if way == "microbatch" else {}
    found, x = [], torch.randn(16, 32, device=device)
    for module in twins(lambda: make("linear", device, **options), recipe, None):
        start()
        inp = x.clone().requires_grad_()
        module.weight.main_grad = torch.ones(module.weight.shape, device=device)
        run = (lambda *a: te.checkpoint(module, *a)) if way == "checkpoint" else module  # noqa: B023
        with te.autocast(recipe=recipe):
            out = run(inp, **call)
        out.sum().backward()
        if way == "defer":
            module.backward_dw()
        assert (module.weight.grad is None) == (way == "main")
        grad = module.weight.main_grad if way == "main" else module.weight.grad
        found.append([out.detach(), inp.grad, grad])
    assert_same_bits(*found)


def test_what_keeps_no_tensor_stays_in_high_precision(device):
    def factory(role):
        if role.name.endswith("fc1"):
            return te.IdentityQuantizer(dtype=torch.bfloat16)
        return current()

    module = made(lambda: make("gelu", device), CustomRecipe(factory))
    assert type(module.fc1_weight) is torch.nn.Parameter
    assert isinstance(module.fc2_weight, te.Float8Tensor)
    step(module, batch(device), CustomRecipe(factory))
    plain = made(lambda: make("gelu", device), recipe_of(*(te.IdentityQuantizer,) * 3))
    assert all(type(weight) is torch.nn.Parameter for weight in plain.parameters())
    assert not plain.primary_weights_in_fp8
    other = made(lambda: make("linear", device), recipe_of(te.IdentityQuantizer))
    assert type(other.weight) is torch.nn.Parameter


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [(None, ValueError, "gave None"), (torch.nn.Identity(), TypeError, "gave a Identity")],
)
def test_what_functions_may_not_give(device, given, error, words):
    with te.quantized_model_init(recipe=CustomRecipe(lambda role: given)):
        with pytest.raises(error, match=words):
            te.Linear(32, 32, device=device)


def test_a_function_is_asked_once(device):
    asked = []

    def factory(role):
        asked.append((role.name, role.tensor_type))
        return current()

    recipe = CustomRecipe(factory)
    with te.quantized_model_init(recipe=recipe):
        module = te.LayerNormMLP(32, 64, device=device, name="mlp")
    step(module, torch.randn(16, 32, device=device), recipe)
    tensors = ("input", "weight", "grad_output")
    assert asked == [(f"mlp.{part}", tensor) for part in ("fc1", "fc2") for tensor in tensors]


@pytest.mark.parametrize("name", WEIGHTS)
def test_first_values_and_memory(device, name):
    quantizer, cls = WEIGHTS[name]
    recipe = recipe_of(quantizer)
    plain, module = twins(lambda: te.Linear(32, 48, device=device), None, recipe, preserve=True)
    assert_same_bits(module.weight.get_high_precision_init_val(), plain.weight.cpu())
    expected = module.weight._quantizer(plain.weight.detach())
    assert_same_tensor(module.weight.detach(), expected)
    module.weight.clear_high_precision_init_val()
    assert module.weight.get_high_precision_init_val() is None
    later = made(lambda: te.Linear(32, 48, device="meta"), recipe)
    assert type(later.weight) is torch.nn.Parameter
    with torch.device(device):
        later.reset_parameters()
    assert type(later.weight) is cls


@pytest.mark.parametrize("name", WEIGHTS)
def test_state_dicts_both_ways(device, name):
    recipe = recipe_of(WEIGHTS[name][0])
    module, plain = twins(lambda: make("norm-linear", device), recipe, None)
    saved = module.state_dict()
    file = io.BytesIO()
    other = make("norm-linear", device)
    module.load_state_dict(other.state_dict())
    assert_same_tensor(module.weight.detach(), module.weight._quantizer(other.weight.detach()))
    plain.load_state_dict(module.state_dict())
    assert_same_bits(plain.weight.detach(), module.weight.dequantize().detach())
    if name.startswith("own"):  # classes of the program: no file names them
        return
    torch.save(module.state_dict(), file)
    file.seek(0)
    again = made(lambda: make("norm-linear", device), recipe)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert_same_tensor(again.weight.detach(), module.weight.detach())
    again.load_state_dict(saved)
    x = batch(device)
    assert_same_bits(step(again, x, recipe), step(module, x, recipe))


def factory(role):
    """A function that a pickle can name."""
    return hybrid() if role.tensor_type == "weight" else current()


def test_copies_and_pickles(device):
    recipe = CustomRecipe(factory)
    module, x = made(lambda: make("swiglu", device), recipe), batch(device)
    expected = step(module, x, recipe)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert isinstance(copied.fc1_weight, HybridQuantizedTensor)
        assert_same_bits(step(copied, x, recipe), expected)


OTHERS = [
    ("current", "power 2"),
    ("current", "tiles"),
    ("tiles", "lines"),
    ("tiles", "hybrid"),
    ("current", "own"),
    ("hybrid", "current"),
    ("hybrid", "hybrid of rows"),
    ("hybrid", "pair of current"),
    ("pair of tiles", "pair of lines"),
    ("pair of current", "pair of power 2"),
    ("mx", "nv"),
]


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_another_format_is_an_error(device, one, other):
    module = made(lambda: make("linear", device), recipe_of(WEIGHTS[one][0]))
    with pytest.raises(RuntimeError, match="which CustomRecipe does not read"):
        step(module, batch(device), recipe_of(WEIGHTS[other][0]))


def test_another_format_of_one_form_is_an_error(device):
    module = made(lambda: make("linear", device), recipe_of(hybrid))
    with pytest.raises(RuntimeError, match="which CustomRecipe does not read"):
        step(module, batch(device), recipe_of(lambda: hybrid(E4M3)))


@pytest.mark.parametrize("name", ["current", "block", "row", "mx"])
def test_the_same_format_of_another_recipe_is_read(device, name):
    """What counts is how a weight lies, not which recipe it was made for."""
    theirs = WEIGHT_RECIPES[name]() if name != "current" else te.recipe.Float8CurrentScaling()
    ours = {
        "current": current,
        "block": lambda: te.Float8BlockQuantizer(E4M3),
        "row": lambda: te.Float8RowQuantizer(E4M3),
        "mx": lambda: te.MXFP8Quantizer(E4M3),
    }[name]
    recipe = recipe_of(ours)
    module, plain = twins(lambda: make("linear", device), theirs, None)
    x = batch(device)
    assert_same_bits(step(module, x, recipe), step(plain, x, recipe))
    module, plain = twins(lambda: make("linear", device), recipe, None)
    assert_same_bits(step(module, x, theirs), step(plain, x, theirs))


@pytest.mark.parametrize("dropped", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", ["own rows", "hybrid"])
def test_a_form_that_was_dropped_is_an_error_where_it_is_read(device, name, dropped):
    recipe = recipe_of(WEIGHTS[name][0])
    module, x = made(lambda: make("linear", device), recipe), batch(device)
    expected = step(module, x, recipe)[0]
    module.weight.update_usage(**{f"{dropped}_usage": False})
    if dropped == "columnwise":
        with torch.no_grad(), te.autocast(recipe=recipe):
            assert_same_bits(module(x), expected)
    with pytest.raises(RuntimeError, match=f"a GEMM reads its {dropped} form, which was dropped"):
        step(module, x, recipe)


@pytest.mark.parametrize("name", ["lines", "rows", "mx", "nv 4over6"])
def test_pairs_that_arrive_are_read(device, name):
    """As what one quantizer makes is; nothing of an input is cast then."""
    one, two = WEIGHTS[name][0], WEIGHTS[f"pair of {name}"][0]
    recipe = recipe_of(one, one, one)
    module, x = make("linear", device), batch(device)
    results = []
    for quantizer in (one(), two()):
        inp = quantizer(x).requires_grad_()
        with counted(), te.autocast(recipe=recipe):
            out = module(inp)
        casts = quantized()
        out.sum().backward()
        results.append(([out.detach(), module.weight.grad.clone()], casts))
        module.zero_grad()
    assert_same_bits(results[1][0], results[0][0])
    assert results[1][1] == results[0][1]


def test_inputs_that_arrive_quantized_are_read(device):
    recipe = recipe_of(lambda: te.Float8BlockQuantizer(E4M3))
    module, x = made(lambda: make("linear", device), recipe), batch(device)
    with counted():
        expected = step(module, x, recipe)
    casts = quantized()
    with counted(), te.autocast(recipe=recipe):
        out = module(current()(x).requires_grad_())
    out.sum().backward()
    assert_same_bits(out.detach(), expected[0])
    assert quantized() == casts  # the cast of the input was outside of the module
    called = recipe_of(current, lambda: Own(E4M3, None))
    with te.autocast(recipe=called):
        assert torch.isfinite(made(lambda: make("linear", device), called)(current()(x))).all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", ["tiles", "own", "hybrid"])
def test_layers(device, name, fused):
    quantizer, cls = WEIGHTS[name]
    recipe = recipe_of(quantizer)

    def layer():
        return te.TransformerLayer(
            64, 128, 4, fuse_qkv_params=fused, hidden_dropout=0, attention_dropout=0,
            device=device,
        )  # fmt: skip

    module, plain = twins(layer, recipe, None)
    found = [p for p in module.parameters() if isinstance(p, te.QuantizedTensor)]
    assert len(found) == (4 if fused else 6) and all(type(p) is cls for p in found)
    x = source_of(device, (8, 2, 64), torch.float32)
    results = [step(m, x, recipe) for m in (module, plain)]
    if fused:
        assert_same_bits(*results)
    for result in results:
        assert torch.isfinite(result[0]).all()


def test_without_fp8_the_values_are_read_with_a_warning(device):
    module, x = made(lambda: make("linear", device), recipe_of(hybrid)), batch(device)
    with pytest.warns(UserWarning, match="its weight is quantized"):
        out = module(x)
    weight = module.weight.dequantize()
    assert_same_bits(out, torch.nn.functional.linear(x, weight, module.bias))
