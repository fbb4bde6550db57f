# SPDX-License-Identifier: Apache-2.0
"""CustomRecipe: quantizers per role, inside of plans or at their stages."""

import copy
import pickle
from functools import partial

import pytest
import torch
from comparators import assert_nmse
from device_kinds import every_device
from pytorch.helpers import assert_same_bits, counted, state_of, sum_bound
from pytorch.module_cases import batch, gemms_of, make, step
from tols import BF16, E4M3, E5M2, tol

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRequest,
    QuantizerRole,
)
from transformer_engine.pytorch.constants import DType

pytestmark = every_device

FP8 = {"e4m3": DType.kFloat8E4M3, "e5m2": DType.kFloat8E5M2}
KINDS = ("linear", "norm-linear", "gelu", "swiglu", "gelu checkpoint")


class Own(te.Float8CurrentScalingQuantizer):
    """A quantizer of a program: not one that plans know."""


def current(dtype="e4m3", kind=te.Float8CurrentScalingQuantizer):
    return kind(FP8[dtype], "cpu")


def by_role(inp, weight, grad):
    """A recipe of one quantizer for each role."""
    made = {"input": inp, "weight": weight, "grad_output": grad}
    return CustomRecipe(lambda role: made[role.tensor_type]())


def rht():
    return te.NVFP4Quantizer(with_rht=True)


def pair(row, column=None, **options):
    """A function that gives a pair of quantizers, of two functions or twice of one."""
    parts = {"rowwise_quantizer": row, "columnwise_quantizer": column or row}
    return lambda: te.HybridQuantizer(**{n: part() for n, part in parts.items()}, **options)


UNIFORM = {
    "current": (Float8CurrentScaling, (current, current, lambda: current("e5m2"))),
    "block": (
        Float8BlockScaling,
        (
            lambda: te.Float8BlockQuantizer(FP8["e4m3"], block_scaling_dim=1),
            lambda: te.Float8BlockQuantizer(FP8["e4m3"]),
            lambda: te.Float8BlockQuantizer(FP8["e4m3"], block_scaling_dim=1),
        ),
    ),
    "row": (
        lambda: Float8RowScaling(fp8_format=Format.E4M3),
        (lambda: te.Float8RowQuantizer(FP8["e4m3"]),) * 3,
    ),
    "mxfp8": (
        lambda: MXFP8BlockScaling(margin=1),
        (lambda: te.MXFP8Quantizer(FP8["e4m3"], margin=1),) * 3,
    ),
    "nvfp4": (
        lambda: NVFP4BlockScaling(disable_stochastic_rounding=True, nvfp4_4over6="weights"),
        (
            rht,
            lambda: te.NVFP4Quantizer(
                with_2d_quantization=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256
            ),
            rht,
        ),
    ),
    "delayed": (lambda: DelayedScaling(amax_history_len=4), None),
}


def request():
    return DelayedScalingRequest(amax_history_len=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UNIFORM)
def test_has_the_bits_of_the_recipe_that_casts_so(device, kind, name, start):
    recipe, quantizers = UNIFORM[name]
    ours = by_role(*(quantizers or (request,) * 3))
    results = []
    for given in (recipe(), ours):
        start()
        module, x = make(kind, device), batch(device)
        with counted() as gemms:
            steps = [step(module, x * (1 + i), given) for i in range(3)]
        results.append((steps, vars(gemms), state_of(module)))
    (wanted, gemms, state), (found, ours_gemms, ours_state) = results
    assert gemms == ours_gemms
    assert_same_bits(found, wanted)
    if state is not None:
        assert_same_bits(ours_state, state)


def fp4(**options):
    """A function that gives a quantizer of NVFP4."""
    return lambda: te.NVFP4Quantizer(**options)


PAIRS = {
    **{name: (recipe, map(pair, own)) for name, (recipe, own) in UNIFORM.items() if own},
    "nested": (Float8CurrentScaling, map(pair, map(pair, UNIFORM["current"][1]))),
    "mx squares": (
        lambda: MXFP8BlockScaling(enable_2d_quantization=True),
        (
            pair(lambda: te.MXFP8Quantizer(FP8["e4m3"])),
            pair(lambda: te.MXFP8Quantizer(FP8["e4m3"], with_2d_quantization=True)),
            pair(lambda: te.MXFP8Quantizer(FP8["e4m3"])),
        ),
    ),
    # Rounded by chance, each form transformed as it is alone, or not: one of the two has no effect.
    "stochastic": (
        NVFP4BlockScaling,
        (
            pair(fp4(), rht),
            pair(fp4(with_2d_quantization=True)),
            pair(
                fp4(stochastic_rounding=True),
                fp4(with_rht=True, stochastic_rounding=True),
            ),
        ),
    ),
    "scaled rows": (
        lambda: NVFP4BlockScaling(
            disable_stochastic_rounding=True, row_scaled_activation=True, nvfp4_4over6="weights"
        ),
        (
            pair(fp4(row_scaled_nvfp4=True), rht),
            pair(fp4(with_2d_quantization=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256)),
            pair(rht, fp4(with_rht=True, row_scaled_nvfp4=True)),
        ),
    ),
}
"""Recipes, and quantizers of two parts that cast so."""
PAIRS = {name: (recipe, tuple(own)) for name, (recipe, own) in PAIRS.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PAIRS)
def test_equal_parts_have_the_bits_of_the_recipe_that_casts_so(device, kind, name, start):
    """With its GEMMs: no operand is multiplied out that is not multiplied out there."""
    recipe, quantizers = PAIRS[name]
    results = []
    for given in (recipe(), by_role(*quantizers)):
        start()
        module, x = make(kind, device), batch(device)
        _core.reset_counters()
        found = [step(module, x * (1 + i), given) for i in range(2)]
        results.append((found, _core.counters()))
    (wanted, counters), (found, ours) = results
    assert_same_bits(found, wanted)
    assert ours == counters


MIXES = {
    "input": (te.IdentityQuantizer, current, current),
    "weight": (current, te.IdentityQuantizer, current),
    "gradient": (current, current, te.IdentityQuantizer),
    "formats": (current, lambda: te.Float8BlockQuantizer(FP8["e4m3"]), current),
    "e5m2": (lambda: current("e5m2"),) * 2 + (current,),
    "micro": (lambda: te.MXFP8Quantizer(FP8["e4m3"]), te.NVFP4Quantizer, current),
    "state": (current, current, request),
    "own": (lambda: current(kind=Own),) * 3,
    "own input": (lambda: current(kind=Own), current, current),
    "hybrid": (
        current,
        lambda: te.HybridQuantizer(
            rowwise_quantizer=current(), columnwise_quantizer=te.MXFP8Quantizer(FP8["e4m3"])
        ),
        current,
    ),
}
EMULATED = {"input": 2, "weight": 2, "gradient": 2, "formats": 2, "e5m2": 1, "micro": 3}
EMULATED |= {"state": 0, "own": 3, "own input": 2, "hybrid": 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MIXES)
def test_mixes_are_close_and_counted(device, kind, name):
    """Every product is as near to that in high precision as casts of all operands allow."""
    module, x = make(kind, device), batch(device)
    grad = torch.randn_like(module(x))
    exact = step(module, x, None, grad)
    with counted():
        found = step(module, x, by_role(*MIXES[name]), grad)
    emulated = _core.counters().get("emulated.mixed", 0)
    if "checkpoint" not in kind:
        assert emulated == EMULATED[name] * len(module.LINEARS)
    assert sum(n for c, n in _core.counters().items() if c.startswith("gemm.")) >= gemms_of(module)
    assert_close(found, exact, name)


def assert_close(found, exact, name):
    """Within what casts of a few products in a row leave; those of four bits are as E5M2's."""
    bound = tol("casts_in_a_row", E5M2 if name in ("micro", "e5m2") else E4M3)
    for one, other in zip(flat(found), flat(exact), strict=True):
        assert (one - other).float().norm() <= bound * other.float().norm()


def flat(result):
    out, inp, grads = result
    return [out, inp, *grads.values()]


CALLED = {
    "current": (te.Float8CurrentScalingQuantizer, (FP8["e4m3"], "cpu"), {}),
    "block": (te.Float8BlockQuantizer, (FP8["e4m3"],), {"block_scaling_dim": 1}),
    "row": (te.Float8RowQuantizer, (FP8["e4m3"],), {}),
    "mxfp8": (te.MXFP8Quantizer, (FP8["e4m3"],), {}),
}


@pytest.mark.parametrize("kind", ["linear", "norm-linear"])
@pytest.mark.parametrize("name", CALLED)
def test_a_quantizer_of_the_program_makes_what_is_multiplied(device, kind, name, start):
    """The products of what the same casts of our own stand for, and of what is cast anew.

    Each GEMM multiplies the form that it reads, also where the two stand for other values.
    """
    cls, arguments, options = CALLED[name]
    results = []
    for used in (cls, type("Own", (cls,), {})):
        start()
        module, x = make(kind, device), batch(device)
        results.append(step(module, x, by_role(*(partial(used, *arguments, **options),) * 3)))
    # Both are within it of the exact product; a bias is added in bf16.
    bound = 4 * sum_bound(device, BF16, 64, fast=True)
    for one, other in zip(flat(results[1]), flat(results[0]), strict=True):
        assert_nmse(one, other.cpu().double(), bound)


DIFFERING = {
    "elements": (current, lambda: current("e5m2")),
    "scales": (current, lambda: te.Float8BlockQuantizer(FP8["e4m3"], block_scaling_dim=1)),
    "groups": (lambda: te.MXFP8Quantizer(FP8["e4m3"]), te.NVFP4Quantizer),
    "wide forward": (te.IdentityQuantizer, current),
    "wide backward": (current, te.IdentityQuantizer),
}


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
@pytest.mark.parametrize("name", DIFFERING)
def test_each_product_is_of_the_forms_that_it_names(device, name, source):
    """Against a float64 model: the output of row-wise forms, that of the weight of column-wise."""
    quantizer = pair(*DIFFERING[name], columnwise_source=source)
    module, x = make("linear", device, bias=False), batch(device)
    grad = torch.randn(x.shape[0], module.weight.shape[0], device=device)
    found = step(module, x, by_role(*(quantizer,) * 3), grad)

    def forms(tensor):
        made = quantizer()(tensor.detach())
        parts = made.rowwise_sub_storage, made.columnwise_sub_storage
        return [part.dequantize(dtype=torch.float32).double() for part in parts]

    (x_row, x_column), (w_row, w_column), (g_row, g_column) = map(forms, (x, module.weight, grad))
    expected = x_row @ w_row.t(), g_row @ w_column, g_column.t() @ x_column
    bound = 4 * sum_bound(device, BF16, 64, fast=True)
    for one, other in zip(flat(found), expected, strict=True):
        assert_nmse(one, other.cpu(), bound)


@pytest.mark.parametrize("name", ["own", "input", "state"])
def test_recompute_has_the_same_bits(device, name, start):
    results = []
    for checkpoint in (False, True):
        start()
        module, x = make("gelu", device), batch(device).requires_grad_()
        with te.autocast(recipe=by_role(*MIXES[name])):
            y = te.checkpoint(module, x) if checkpoint else module(x)
        y.sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    assert_same_bits(*results)


@pytest.mark.parametrize("name", ["weight", "own", "formats"])
def test_microbatches_have_the_same_bits(device, name):
    module, x = make("linear", device), batch(device)
    recipe = by_role(*MIXES[name])
    plain = step(module, x, recipe)
    for first in (True, False):
        assert_same_bits(step(module, x, recipe, is_first_microbatch=first), plain)


@pytest.mark.parametrize("way", ["save_original_input", "delay_wgrad_compute", "cache_weights"])
@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("name", ["weight", "own", "own input", "formats", "hybrid"])
def test_other_ways_have_the_same_bits(device, name, override, way):
    module, x = make("linear", device, bias=False), batch(device)
    recipe = by_role(*MIXES[name])
    recipe.backward_override = override
    plain = step(module, x, recipe)
    setattr(module, way, True)
    module.zero_grad()
    for _ in range(2):
        out, inp, grads = step(module, x, recipe)
        if way == "delay_wgrad_compute":
            module.backward_dw()
            grads = {name: p.grad for name, p in module.named_parameters()}
        assert_same_bits([out, inp, *grads.values()], flat(plain))
        module.zero_grad()


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("name", ["weight", "own", "formats"])
def test_backward_override(device, name, override):
    module, x = make("linear", device), batch(device)
    recipe = by_role(*MIXES[name])
    recipe.backward_override = override
    with te.autocast(recipe=recipe):
        y = module(x.requires_grad_())
    with counted() as gemms:
        y.sum().backward()
    assert gemms.fp8 == 0 and gemms.other == 2


def test_roles_are_asked_for_once(device):
    asked = []

    def factory(role):
        asked.append(role)
        return current()

    recipe = CustomRecipe(factory)
    linear = te.Linear(32, 32, device=device, name="head")
    mlp = te.LayerNormMLP(32, 64, device=device)
    for _ in range(2):
        for module in (linear, mlp):
            step(module, torch.randn(16, 32, device=device), recipe)
    names = ["head"] * 3 + ["fc1"] * 3 + ["fc2"] * 3
    tensors = ["input", "weight", "grad_output"] * 3
    assert asked == [QuantizerRole("linear", t, n) for t, n in zip(tensors, names, strict=True)]


@pytest.mark.parametrize("options", [{}, {"layer_type": "decoder", "output_layernorm": True}])
def test_modules_of_a_layer_are_told_by_its_name(device, options):
    asked = []

    def factory(role):
        asked.append(role.name)
        return current()

    layer = te.TransformerLayer(64, 64, 2, name="block.3", device=device, **options)
    x = torch.randn(16, 2, 64, device=device)
    with te.autocast(recipe=CustomRecipe(factory)):
        layer(x, encoder_output=x if options else None)
    names = ["self_attention.layernorm_linear_qkv", "self_attention.proj"]
    if options:
        names = ["self_attention.linear_qkv", "self_attention.proj"]
        names += [f"inter_attention.{n}" for n in ("layernorm_linear_q", "linear_kv", "proj")]
    names += ["layernorm_mlp.fc1", "layernorm_mlp.fc2"]
    assert asked[::3] == [f"block.3.{name}" for name in names]


def factory(role):
    """The function of a program that has another one of this name later."""
    return current()


@pytest.mark.parametrize("microbatches", [False, True])
def test_another_function_of_the_same_name_is_asked(device, monkeypatch, microbatches):
    """As in a notebook, whose cell with the function is run again: both recipes print alike."""
    module, x = make("linear", device), batch(device)
    options = [{"is_first_microbatch": first} for first in (True, False)]
    options = options if microbatches else [{}, {}]
    before = CustomRecipe(factory)
    step(module, x, before, **options[0])
    if microbatches:
        step(module, x, by_role(*MIXES["own"]))  # keeps no weight

    def factory_again(role):
        return te.Float8RowQuantizer(FP8["e4m3"])

    factory_again.__qualname__ = "factory"
    monkeypatch.setitem(globals(), "factory", factory_again)
    after = CustomRecipe(factory_again)
    assert repr(after) == repr(before)
    found = step(module, x, after, **options[1])
    assert_same_bits(found, step(copy.deepcopy(module), x, after))


def test_a_report_knows_of_casts_of_the_second_layer_alone(device):
    def only_second(role):
        return current() if role.name.endswith("fc2") else te.IdentityQuantizer()

    module, x = make("gelu", device), batch(device)
    step(module, x, CustomRecipe(only_second))
    first, second = te.report(module)
    assert [g.precision for g in first.gemms] == ["f32 x f32"] * 3
    assert [t.name for t in second.tensors] == ["input", "weight", "grad_output"]


@pytest.mark.parametrize("high", ["fc1", "fc2"])
def test_torch_autocast_converts_what_is_not_cast(device, high):
    def factory(role):
        return te.IdentityQuantizer() if role.name.endswith(high) else current()

    module, x = make("gelu", device), batch(device)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in (getattr(twin, f"{high}_{what}") for what in ("weight", "bias")):
            parameter.copy_(parameter.to(BF16))
    results = []
    for own in (module, twin):
        with torch.autocast(device, BF16):
            results.append(step(own, x, CustomRecipe(factory)))
    assert results[0][0].dtype is BF16
    assert_same_bits(*results)


def test_all_in_high_precision(device):
    module, x = make("gelu", device), batch(device)
    assert_same_bits(step(module, x, by_role(*(te.IdentityQuantizer,) * 3)), step(module, x, None))


def test_a_layer_follows_the_recipe(device):
    layer = te.TransformerLayer(64, 128, 4, hidden_dropout=0, attention_dropout=0, device=device)
    x = torch.randn(16, 2, 64, device=device)
    for _ in range(3):
        with counted() as gemms, te.autocast(recipe=by_role(*MIXES["formats"])):
            y = layer(x.requires_grad_())
        y.sum().backward()
    assert gemms.fp8 + gemms.other == 4
    assert _core.counters()["emulated.mixed"] >= 4


@pytest.mark.parametrize("attention", ["self", "cross"])
def test_a_layer_of_equal_parts_has_the_bits_of_the_recipe(device, attention, start):
    """Projections of attention included, and no GEMM of theirs in another dtype."""
    options = {"layer_type": "decoder"} if attention == "cross" else {}
    results = []
    for recipe in (Float8CurrentScaling(), by_role(*PAIRS["current"][1])):
        start()
        layer = te.TransformerLayer(
            64, 128, 4, hidden_dropout=0, attention_dropout=0, device=device, **options
        )
        x = torch.randn(16, 2, 64, device=device, requires_grad=True)
        with counted() as gemms:
            with te.autocast(recipe=recipe):
                y = layer(x, encoder_output=torch.randn_like(x) if options else None)
            y.square().sum().backward()
        grads = {name: p.grad for name, p in layer.named_parameters()}
        results.append(((y.detach(), x.grad, grads), (gemms.fp8, gemms.other)))
    (wanted, usual), (found, ours) = results
    assert_same_bits(found, wanted)
    assert ours == usual and usual[0] > 0


def test_copies_and_pickles(device):
    module, x = make("linear", device), batch(device)
    recipe = by_role(*MIXES["own"])
    plain = step(module, x, recipe)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same_bits(step(twin, x, recipe), plain)


class Unknown(QuantizerRequest):
    pass


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (lambda role: None, ValueError, r"qfactory\(QuantizerRole\(.*'input'.*gave None"),
        (lambda role: 3, TypeError, "gave a int, expected a quantizer"),
        (lambda role: Unknown(), NotImplementedError, "gave a Unknown"),
        (
            lambda role: DelayedScalingRequest(amax_history_len=len(role.tensor_type)),
            ValueError,
            "requests that differ",
        ),
        (
            lambda role: te.NVFP4Quantizer(with_rht=role.tensor_type == "input"),
            ValueError,
            "random_hadamard_transform belongs to",
        ),
        (
            lambda role: te.NVFP4Quantizer(
                with_rht=role.tensor_type != "weight",
                with_random_sign_mask=role.tensor_type == "input",
            ),
            ValueError,
            "with_random_sign_mask of the quantizers of input and gradient differs",
        ),
    ],
)
def test_what_functions_may_not_give(device, given, error, words):
    module = te.Linear(32, 32, device=device)
    with te.autocast(recipe=CustomRecipe(given)), pytest.raises(error, match=words):
        module(torch.randn(16, 32, device=device))


def test_what_can_not_be(device):
    module, x = te.Linear(32, 32, device=device), torch.randn(16, 32, device=device)
    recipe = CustomRecipe(lambda role: current())
    with (
        te.autocast(recipe=recipe),
        pytest.raises(NotImplementedError, match="fp8_output=True under CustomRecipe"),
    ):
        module(x, fp8_output=True)
    with pytest.raises(ValueError, match="qfactory must be a function"):
        CustomRecipe(3)
    with pytest.raises(ValueError, match="quantization_alignment"):
        CustomRecipe(current, quantization_alignment=0)
