# SPDX-License-Identifier: Apache-2.0
"""MXFP8BlockScaling and NVFP4BlockScaling under autocast: every module, every way to run it."""

import io

import numpy as np
import pytest
import torch
from buffers import name_of
from comparators import assert_bits, assert_nmse
from device_kinds import every_device, our_kernels
from microscaled import expected, mxfp8_values, nvfp4_values
from pytorch.helpers import captured, random_of
from pytorch.recipe_cases import MODULES, WIDTH, assert_same, data, made, modules, step
from thinning import chosen, in_turns
from tols import BF16, E4M3, E5M2, F16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import (
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.tensor.scale_layouts import swizzle_scales, unswizzle_scales

pytestmark = [every_device, pytest.mark.usefixtures("repeatable")]

RECIPES = {
    "mxfp8": MXFP8BlockScaling,
    "mxfp8-hybrid-2d": lambda: MXFP8BlockScaling(
        fp8_format=Format.HYBRID, enable_2d_quantization=True
    ),
    "nvfp4": NVFP4BlockScaling,
    "nvfp4-plain": lambda: NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
}
recipes = pytest.mark.parametrize("recipe", RECIPES)


def rounding(kind):
    """The mean square of a cast's error, which lies evenly within half a step of either side."""
    half = tol("half_step_nvfp4", E4M3) if kind == "nvfp4" else tol("half_step", kind)
    return half**2 / 3


# ---- every module --------------------------------------------------------------------------------


@recipes
@modules
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_modules(device, recipe, module, dtype):
    """Close to high precision, all GEMMs emulated, none in FP8; the same bits again."""
    model, (x, grad) = made(module, device, dtype), data(device, dtype)
    plain = step(model, x, grad, None)
    with te.counting() as counts:
        found = step(model, x, grad, RECIPES[recipe]())
    gemms = 3 * MODULES[module][1] + ("checkpoint" in module)
    kind = recipe.partition("-")[0]
    assert counts[f"emulated.{kind}"] == counts.emulated_gemms == gemms
    assert counts.fp8_gemms == 0 and counts.other_gemms >= gemms
    # Two casts of each of the layers in a row, whose errors add up; as far as norms pass them on.
    cast = rounding("nvfp4") if kind == "nvfp4" else rounding(E5M2 if "hybrid" in recipe else E4M3)
    for a, b in zip(found, plain, strict=True):
        if a.dim() > 1:  # the gradient of keys' bias is 0 but for errors
            assert_nmse(a, b, 4 * 2 * MODULES[module][1] * cast)
    assert_same(step(model, x, grad, RECIPES[recipe]()), found)


@recipes
def test_linear_is_the_product_of_the_casts(device, recipe, rng):
    """Output and both gradients, from casts by the definition."""
    made_recipe = RECIPES[recipe]()
    if recipe == "nvfp4":  # the pair is drawn inside
        made_recipe.disable_stochastic_rounding = True
    model = te.Linear(48, 80, params_dtype=BF16, device=device, bias=False)
    x = torch.from_numpy(rng.standard_normal((33, 48))).to(BF16).to(device).requires_grad_()
    grad = torch.from_numpy(rng.standard_normal((33, 80))).to(BF16).to(device)
    with te.autocast(recipe=made_recipe):
        out = model(x)
    out.backward(grad)
    mode = _core.SCALING_NVFP4 if recipe.startswith("nvfp4") else _core.SCALING_MXFP8
    square = recipe in ("nvfp4", "mxfp8-hybrid-2d")
    rht = {"rht": True} if recipe == "nvfp4" else {}
    backward = {"dtype": E5M2} if "hybrid" in recipe else {}

    def values(tensor, **how):
        forms, shape = expected(tensor.detach().cpu(), mode, **how), tensor.shape
        if mode == _core.SCALING_MXFP8:
            pairs = (("row", 1), ("column", 0))
            return [
                mxfp8_values(forms[n], forms[f"{n}_scales"], axis).double() for n, axis in pairs
            ]
        row, column = (
            nvfp4_values(forms[n], forms[f"{n}_scales"], forms[f"{n}_amax"]).double()
            for n in ("row", "column")
        )
        return [row[:, : shape[1]], column.T if rht else column.T[: shape[0]]]

    x_row, x_column = values(x, **rht)
    w_row, w_column = values(model.weight, square=square)
    g_row, g_column = values(grad, **rht, **backward)
    for found, exact in (
        (out, x_row @ w_row.T),
        (x.grad, g_row @ w_column[:80]),
        (model.weight.grad, g_column.T @ x_column),
    ):
        assert_nmse(found, exact, tol("round", BF16) + tol("sum", F32, 96))


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_fp16(device, kind):
    model, (x, grad) = made("Linear", device, F16), data(device, F16)
    if kind == "nvfp4":
        with pytest.raises(NotImplementedError, match="nvfp4 has no f16 output"):
            step(model, x, grad, RECIPES[kind]())
        return
    plain = step(model, x, grad, None)
    found = step(model, x, grad, RECIPES[kind]())
    for a, b in zip(found, plain, strict=True):
        assert a.dtype is F16
        assert_nmse(a, b, 4 * tol("half_step", E4M3) ** 2)


@recipes
@pytest.mark.parametrize("tokens", [1, 7, 17, 33])
def test_any_number_of_tokens(device, recipe, tokens):
    """Nothing is to be padded by the caller, nor any size a multiple."""
    model = te.LayerNormMLP(36, 52, params_dtype=BF16, device=device)
    x = torch.randn(tokens, 36, device=device).to(BF16).requires_grad_()
    plain = step(model, x, torch.ones_like(x), None)
    found = step(model, x, torch.ones_like(x), RECIPES[recipe]())
    for a, b in zip(found[:1], plain[:1], strict=True):
        assert_nmse(a, b, 16 * tol("half_step_nvfp4", E4M3) ** 2)
    assert all(a.isfinite().all() for a in found)


FUSED = [
    "fc1_quantize_input [norm] -> fc1_quantize_weight [quantize]",
    "fc2_quantize_input [activation] -> fc2_quantize_weight [quantize]",
    "fc1_quantize_grad_output [activation_backward] -> ",
]
MEASURED = [
    "fc1_amax_input [norm] -> fc1_quantize_input [norm]",
    "fc2_amax_input [activation] -> fc2_quantize_input [activation]",
    "fc1_amax_grad_output [activation_backward] -> fc1_quantize_grad_output [activation_backward]",
]
IN_A_MATRIX = [
    "fc1_produce_input [norm] -> fc1_amax_input [amax]",
    "fc2_produce_input [activation] -> fc2_amax_input [amax]",
    "fc1_produce_grad_output [activation_backward] -> ",
]
STAGES = {
    "mxfp8": FUSED,
    "mxfp8-hybrid-2d": FUSED,
    "nvfp4-plain": MEASURED,
    "nvfp4": IN_A_MATRIX,
}


@recipes
def test_casts_are_fused(device, recipe):
    """What makes values casts them; not where maxima are found in a matrix."""
    model, file = made("LayerNormMLP", device), io.StringIO()
    x, _ = data(device)
    with te.autocast(recipe=RECIPES[recipe]()):
        te.explain(model, x, file=file)
    for stages in STAGES[recipe]:
        assert stages in file.getvalue()


# ---- every way -----------------------------------------------------------------------------------


@recipes
@modules
@pytest.mark.parametrize("ours", [True, False], ids=["te", "torch"])
def test_recompute(device, recipe, module, ours):
    model, (x, grad) = made(module, device), data(device)
    eager = step(model, x, grad, RECIPES[recipe]())
    if ours:
        found = step(model, x, grad, RECIPES[recipe](), lambda x: te.checkpoint(model, x))
    else:
        again = torch.utils.checkpoint.checkpoint
        found = step(
            model, x, grad, RECIPES[recipe](), lambda x: again(model, x, use_reentrant=False)
        )
    assert_same(found, eager)


@recipes
@modules
def test_microbatches(device, recipe, module):
    """A cached weight gives the bits of one that is cast at each call."""
    model, (x, grad) = made(module, device), data(device)
    eager = step(model, x, grad, RECIPES[recipe]())
    assert_same(step(model, x, grad, RECIPES[recipe](), is_first_microbatch=True), eager)
    with te.counting() as counts:
        found = step(model, x, grad, RECIPES[recipe](), is_first_microbatch=False)
    assert_same(found, eager)
    casts = counts[f"op.{device}.quantize"]
    with te.counting() as counts:
        step(model, x, grad, RECIPES[recipe]())
    assert counts[f"op.{device}.quantize"] == casts + 2 * MODULES[module][1]


OF_DRAWS = [(module, "nvfp4") for module in MODULES]
BY_TURNS = in_turns(MODULES, ["mxfp8", "mxfp8-hybrid-2d", "nvfp4-plain"])


# Graphs hold one operator with a plan; what the plan holds is compared in eager mode. What a plan
# is given is another matter where it draws.
@our_kernels
@chosen([*OF_DRAWS, *BY_TURNS], module=MODULES, recipe=RECIPES)
def test_compiled(device, recipe, module):
    """The bits of eager steps; of several modules that draw, a compiler chooses the order."""
    torch.compiler.reset()
    model, (x, grad) = made(module, device), data(device)
    eager = step(model, x, grad, RECIPES[recipe]())
    backend = "inductor" if recipe == "nvfp4" else "aot_eager"  # its code has no part in the others
    compiled = torch.compile(lambda x: model(x), fullgraph=True, backend=backend)
    with te.counting() as counts:
        found = step(model, x, grad, RECIPES[recipe](), compiled)
    assert counts.emulated_gemms == 3 * MODULES[module][1] + ("checkpoint" in module)
    if recipe == "nvfp4" and module in ("MultiheadAttention", "TransformerLayer"):
        assert_same(found[:1], eager[:1])
        for a, b in zip(found[1:], eager[1:], strict=True):
            if a.dim() > 1:
                assert_nmse(a, b, 16 * MODULES[module][1] * rounding("nvfp4"))
        return
    assert_same(found, eager)
    assert_same(step(model, x, grad, RECIPES[recipe](), compiled), eager)


@our_kernels
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("library", ["ours", "torch's"])
@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_dropout_behind_a_repeated_module(device, start, module, library, reentrant):
    """A first forward without gradients draws as many pairs as its repetition: masks stay."""
    found = []
    run = te.checkpoint if library == "ours" else torch.utils.checkpoint.checkpoint
    for repeats in (False, True):
        start()
        model, (x, grad), drop = made(module, device), data(device), torch.nn.Dropout(0.5)

        def forward(x, model=model, drop=drop):
            return drop(model(drop(model(x))))

        x = x.detach().requires_grad_()
        with te.autocast(recipe=NVFP4BlockScaling()):
            out = run(forward, x, use_reentrant=reentrant) if repeats else forward(x)
            out = drop(out)
        out.backward(grad)
        found.append([out.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert_same(*found)


@our_kernels
@pytest.mark.parametrize("dropouts", [(0.0, 0.1), (0.1, 0.0), (0.1, 0.1)])
def test_a_layer_draws_as_its_modules_do(device, start, dropouts):
    """Random pairs of roundings and of dropouts come in one order, in one plan or in several."""
    options = dict(zip(("hidden_dropout", "attention_dropout"), dropouts, strict=True))
    layer = te.TransformerLayer(128, 256, 4, params_dtype=BF16, device=device, **options)
    found = []
    for hooked in (False, False, False, True):  # the third call of a situation is bound
        start()
        x = torch.randn(64, 2, 128, device=device, dtype=BF16, requires_grad=True)
        hook = layer.layernorm_mlp.register_forward_hook(lambda *_: None) if hooked else None
        layer.zero_grad()
        with te.autocast(recipe=NVFP4BlockScaling()):
            out = layer(x)
        out.square().mean().backward()
        found.append([out.detach(), x.grad, *(p.grad for p in layer.parameters())])
        if hook is not None:
            hook.remove()
    for other in found[1:]:
        assert_same(found[0], other)


@recipes
def test_deferred_weight_gradients(device, recipe):
    model, (x, grad) = made("LayerNormMLP", device), data(device)
    late = made("LayerNormMLP", device, delay_wgrad_compute=True)
    late.load_state_dict(model.state_dict())
    eager = step(model, x, grad, RECIPES[recipe]())
    assert_same(step(late, x, grad, RECIPES[recipe]()), eager)


@pytest.mark.gpu
@recipes
@modules
def test_captured(recipe, module):
    """Replays: each draws numbers of its own, so casts to nearest have the bits of eager steps."""
    model, (x, grad) = made(module, "cuda"), data("cuda")
    how = RECIPES[recipe]()
    if recipe == "nvfp4":
        how.disable_stochastic_rounding = True
    eager = step(model, x, grad, how)

    def run():
        with te.autocast(recipe=how):
            out = model(x)
        return (out, *torch.autograd.grad(out, [x, *model.parameters()], grad))

    graph, found = captured(run, warm_ups=3)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert_same([t.detach() for t in found], eager)


@pytest.mark.gpu
def test_captured_draws():
    """Replays of a graph round gradients by other numbers each time, and are right on average."""
    model, (x, grad) = made("Linear", "cuda"), data("cuda")
    exact = step(model, x, grad, None)[2]

    def run():
        with te.autocast(recipe=NVFP4BlockScaling()):
            out = model(x)
        return torch.autograd.grad(out, [model.weight], grad)[0]

    graph, found = captured(run, warm_ups=2)
    graph.replay()
    first = found.clone()
    graph.replay()
    assert not torch.equal(first, found)
    assert_nmse(found, exact, 8 * tol("half_step_nvfp4", E4M3) ** 2)


# ---- stochastic rounding -------------------------------------------------------------------------


def test_seeds(device):
    """The current generator decides, and nothing but the gradients' casts draws."""
    model, (x, grad) = made("LayerNormMLP", device), data(device)

    def gradients(seed, draws=True):
        how = NVFP4BlockScaling(disable_stochastic_rounding=not draws)
        torch.manual_seed(seed)
        with te.autocast(recipe=how):
            out = model(x)
        return [out.detach(), *torch.autograd.grad(out, list(model.parameters()), grad)]

    one, other = torch.randperm(2**20)[:2].tolist()
    a, b, c = gradients(one), gradients(one), gradients(other)
    assert_same(a, b)
    assert torch.equal(a[0], c[0]) and not torch.equal(a[3], c[3])
    plain = gradients(one, False)
    assert torch.equal(plain[0], a[0]) and not torch.equal(plain[3], a[3])
    state = random_of(device).get_rng_state()
    with torch.no_grad(), te.autocast(recipe=NVFP4BlockScaling()):
        model(x)
    after = random_of(device).get_rng_state()
    assert torch.equal(state, after)


@our_kernels
def test_gradients_are_right_on_average(device):
    """Rounding to nearest keeps its error; that of stochastic rounding goes with the mean."""
    times = 64
    model, (x, grad) = made("Linear", device), data(device)

    def mean(draws):
        how = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=not draws)
        total = 0
        for _ in range(times if draws else 1):
            with te.autocast(recipe=how):
                out = model(x)
            total = total + torch.autograd.grad(out, x, grad)[0].cpu().double()
        return total / (times if draws else 1)

    row = expected(grad.flatten(0, 1).cpu(), _core.SCALING_NVFP4)
    assert set(row) >= {"row", "row_scales"}
    weight = expected(model.weight.detach().cpu(), _core.SCALING_NVFP4, square=True)
    weight = nvfp4_values(weight["column"], weight["column_scales"], weight["column_amax"])
    exact = grad.cpu().double().flatten(0, 1) @ weight.double().T[:WIDTH]
    stochastic = ((mean(True).flatten(0, 1) - exact) ** 2).mean()
    nearest = ((mean(False).flatten(0, 1) - exact) ** 2).mean()
    assert stochastic < nearest / 4
    assert np.isfinite(float(nearest))


# ---- state, words --------------------------------------------------------------------------------


@recipes
def test_no_state(device, recipe):
    """Recipes without state: nothing in a state dict, and one that has none loads."""
    model, (x, grad) = made("LayerNormLinear", device), data(device)
    before = set(model.state_dict())
    step(model, x, grad, RECIPES[recipe]())
    assert set(model.state_dict()) == before
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    twin = made("LayerNormLinear", device)
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    assert_same(step(twin, x, grad, RECIPES[recipe]()), step(model, x, grad, RECIPES[recipe]()))


@our_kernels
def test_recipes_by_turns(device):
    """Each call goes by its region, nested or one after the other."""
    model, (x, grad) = made("Linear", device), data(device)
    single = {name: step(model, x, grad, make())[0] for name, make in RECIPES.items()}
    with te.autocast(recipe=Float8CurrentScaling()):
        for name, make in RECIPES.items():
            with te.autocast(recipe=make()):
                assert_bits(model(x).detach().cpu(), single[name].cpu())
            with te.counting() as counts:
                model(x)
            assert counts.fp8_gemms == 1 and counts.emulated_gemms == 0


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_said(device, kind, capsys):
    """`explain`, `report` and `observe` say that GEMMs are emulated."""
    model, (x, grad) = made("Linear", device), data(device)
    how = RECIPES[kind]()
    with te.autocast(recipe=how):
        te.explain(model, x)
    assert f"emulated.{kind}" in capsys.readouterr().out
    step(model, x, grad, how)
    names = {"mxfp8": "e4m3 x e4m3", "nvfp4": "e2m1 x e2m1"}
    found = te.report(model, file=io.StringIO())[0]
    for gemm in found.gemms:
        assert (
            gemm.precision == f"{names[kind]} (emulated {kind})" and "multiplied out" in gemm.reason
        )
    with te.observe(model) as seen:
        step(model, x, grad, how)
    found = te.report(model, seen, file=io.StringIO())[0]
    wide = "bf16 x bf16" if device == "cuda" else "f32 x f32"
    for gemm in found.gemms:
        assert gemm.precision == f"{wide} (emulated {kind})" and gemm.count == 1
    assert [t.dtype for t in found.tensors] == ["e2m1" if kind == "nvfp4" else "e4m3"] * 3
    largest = (x, model.weight, grad)
    for tensor, values in zip(found.tensors, largest, strict=True):
        assert tensor.amax == float(values.detach().abs().max()) and tensor.saturated == 0


# ---- the order of scales -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(128, 4), (256, 12), (384, 8), (0, 4)], ids=str)
def test_swizzled_scales(device, shape, rng):
    scales = torch.from_numpy(rng.integers(0, 256, shape, dtype="uint8")).to(device)
    found = swizzle_scales(scales)
    assert found.is_contiguous() and found.shape == scales.shape
    assert_bits(unswizzle_scales(found).cpu(), scales.cpu())
    plain, flat, across = scales.cpu().numpy(), found.flatten().cpu().numpy(), shape[1] // 4
    for row in range(shape[0]):
        for column in range(shape[1]):
            tile, i, j = row // 128 * across + column // 4, row % 128, column % 4
            assert flat[tile * 512 + i % 32 * 16 + i // 32 * 4 + j] == plain[row, column]


@pytest.mark.parametrize("shape", [(64, 4), (128, 2), (128,)], ids=str)
def test_scales_that_no_cast_makes(shape):
    for call in (swizzle_scales, unswizzle_scales):
        with pytest.raises(ValueError, match="multiples of 128 and 4"):
            call(torch.zeros(shape, dtype=torch.uint8))
