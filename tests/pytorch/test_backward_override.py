# SPDX-License-Identifier: Apache-2.0
"""``backward_override`` of recipes: a quantized forward, and a backward in the activation dtype."""

import pytest
import torch
from buffers import name_of
from comparators import assert_bits, assert_nmse
from pytorch.helpers import assert_same_gemm, sum_bound
from pytorch.recipe_cases import (
    ALIGNED,
    BATCH,
    FFN,
    HEADS,
    MODULES,
    ONE,
    OVERRIDES,
    RECIPES,
    TOKENS,
    WIDTH,
    assert_same,
    casts,
    data,
    few,
    made,
    overrides,
    quantizer_of,
    read_again,
    recipes,
    results,
    step,
)
from tols import BF16, E4M3, F16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

pytestmark = pytest.mark.usefixtures("repeatable")


# ---- what runs, and what is kept -----------------------------------------------------------------


CASTING_ONCE = tuple(name for name in MODULES if not name.endswith("checkpoint"))
"""Whose backward repeats no forward, with the casts of that."""


@recipes
@overrides
@pytest.mark.parametrize("module", CASTING_ONCE)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_backward_runs_in_high_precision(device, recipe, override, module, dtype):
    """The forward is the recipe's; no GEMM of the backward is, and nothing is cast for one.

    Such a backward transforms nothing, so NVFP4 is that without the transform, whose casts are
    fused to what makes the values: of these in fp32, not as bf16 has them.
    """
    model, (x, grad) = made(module, device, dtype), data(device, dtype)
    plain = {"disable_rht": True} if recipe == "nvfp4" else {}
    with te.autocast(recipe=RECIPES[recipe](**plain)):
        expected = model(x).detach()
    with te.counting() as forward, te.autocast(recipe=RECIPES[recipe](backward_override=override)):
        out = model(x)
    layers = MODULES[module][1]
    assert_bits(out.detach().cpu(), expected.cpu())
    assert forward.fp8_gemms + forward.emulated_gemms == layers
    with te.counting() as backward:
        out.backward(grad)
    assert backward.fp8_gemms == backward.emulated_gemms == casts(backward) == 0
    dequantized = 2 * layers if override == "dequantized" else 0
    assert backward.get(f"op.{device}.dequantize", 0) == dequantized
    assert backward[f"op.{device}.gemm"] == 2 * layers


def plans_of(model, x, recipe):
    with te.autocast(recipe=recipe):
        return dict(model.plans_of(x))


@recipes
@overrides
@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_nothing_column_wise_is_made(device, recipe, override, module):
    model, (x, _) = made(module, device), data(device)
    for plan in plans_of(model, x, RECIPES[recipe](backward_override=override)).values():
        links = {buffer.link for buffer in plan.described.buffers}
        assert not any("column" in link for link in links), links


@recipes
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_what_is_saved(device, recipe, dtype):
    """The unquantized tensors themselves, or row-wise forms and their scales in one buffer."""
    model, rows = made("Linear", device, dtype), 128
    x, grad = (torch.randn(rows, WIDTH, device=device, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    kept = {}
    for override in OVERRIDES:
        saved = []
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda t, s=saved: s.append(t) or t, lambda t: t
            ),
            te.autocast(recipe=RECIPES[recipe](backward_override=override)),
        ):
            model(x).backward(grad)
        kept[override] = saved
    given = {x.data_ptr(), model.weight.data_ptr()}
    assert {t.data_ptr() for t in kept["high_precision"]} == given
    (packed,) = kept["dequantized"]
    elements = (rows + WIDTH) * WIDTH / (2 if recipe == "nvfp4" else 1)
    # At most {1/scale, scale} per row; or 4 bytes for those of the 64 columns, of 128 rows each.
    scales = max(2 * 4 * (rows + WIDTH), 2 * 4 * 128)
    assert packed.dtype is torch.uint8
    members = 6  # data, scales and amax of both, each at a multiple of ALIGNED
    assert elements < packed.nbytes <= elements + scales + members * ALIGNED


# ---- high precision ------------------------------------------------------------------------------


@recipes
@pytest.mark.parametrize("module", ONE)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_high_precision_is_that_of_no_recipe(device, recipe, module, dtype):
    """All gradients of one linear layer have the bits of the module without a recipe."""
    model, (x, grad) = made(module, device, dtype), data(device, dtype)
    found = step(model, x, grad, RECIPES[recipe](backward_override="high_precision"))
    assert_same(found[1:], step(model, x, grad, None)[1:])


@recipes
@overrides
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_mlp_is_its_layers(device, recipe, override, dtype):
    """With ReLU, which rounds nothing, it has the bits of its layers; sums in another order."""
    how = RECIPES[recipe](backward_override=override)
    options = {"params_dtype": dtype, "device": device}
    mlp = te.LayerNormMLP(WIDTH, FFN, activation="relu", **options)
    first, second = te.LayerNormLinear(WIDTH, FFN, **options), te.Linear(FFN, WIDTH, **options)
    of_first = first.layer_norm_weight, first.layer_norm_bias, first.weight, first.bias
    for ours, theirs in zip(mlp.parameters(), [*of_first, *second.parameters()], strict=True):
        ours.data.copy_(theirs.data)
    x, grad = data(device, dtype)
    found = step(mlp, x, grad, how)
    x.grad = None
    with te.autocast(recipe=how):
        out = second(torch.relu(first(x)))
    out.backward(grad)
    expected = [out.detach(), x.grad, *(p.grad for p in (*of_first, *second.parameters()))]
    names = ["output", "input", *(name for name, _ in mlp.named_parameters())]
    for name, a, b in zip(names, found, expected, strict=True):
        if name == "fc1_bias":
            assert_nmse(a, b.double(), 4 * sum_bound(device, dtype, TOKENS * BATCH))
        else:
            assert_same_gemm(a, b, device, None, FFN, name)


# ---- dequantized ---------------------------------------------------------------------------------


@recipes
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_dequantized_is_that_of_dequantized_operands(device, recipe, dtype):
    how = RECIPES[recipe](backward_override="dequantized")
    model, (x, grad) = made("Linear", device, dtype), data(device, dtype)
    found = step(model, x, grad, how)
    other, weight = made("Linear", device, dtype), quantizer_of(how, x.device, "weight")
    with torch.no_grad():
        other.weight.copy_(read_again(weight, model.weight, dtype))
    again = read_again(quantizer_of(how, x.device, "input"), x, dtype).requires_grad_()
    assert_same(found[1:], step(other, again, grad, None)[1:])


@recipes
def test_dequantized_behind_a_norm(device, recipe):
    """The norm has the gradients of the dequantized weight, the weight those of its output."""
    how = RECIPES[recipe](backward_override="dequantized")
    model = made("LayerNormLinear", device, F32, return_layernorm_output=True)
    x, grad = data(device, F32)
    with te.autocast(recipe=how):
        out, normed = model(x)
    out.backward(grad)
    found = {"input": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    other, weight = made("LayerNormLinear", device, F32), quantizer_of(how, x.device, "weight")
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.weight.copy_(read_again(weight, model.weight, F32))
    names = ["output", "input", *(name for name, _ in other.named_parameters())]
    expected = dict(zip(names, step(other, x, grad, None), strict=True))
    alone = te.Linear(WIDTH, WIDTH, params_dtype=F32, device=device)
    alone(read_again(quantizer_of(how, x.device, "input"), normed, F32)).backward(grad)
    expected["weight"] = alone.weight.grad
    for name, value in found.items():
        assert_bits(value.cpu(), expected[name].cpu())


# ---- dtypes --------------------------------------------------------------------------------------


@recipes
@overrides
@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_parameters_of_fp32_under_autocast(device, recipe, override, module):
    """GEMMs have the dtype of the activations, and write gradients of that of the parameters."""
    model, (x, grad) = made(module, device, F32), data(device, F32)
    how = RECIPES[recipe](backward_override=override)
    with torch.autocast(device, dtype=BF16):
        with te.autocast(recipe=how):
            out = model(x)
        with te.counting() as counts:
            out.backward(grad.to(BF16))
        found = results(out, x, model)
        plain = step(model, x, grad.to(BF16), None)
    assert counts[f"gemm.{device}.bf16.bf16"] == counts.other_gemms == 2 * MODULES[module][1]
    assert found[0].dtype is BF16 and all(t.dtype is F32 for t in found[1:])
    if override == "high_precision" and module == "Linear":  # which rounds them to bf16
        for a, b in zip(found[1:], plain[1:], strict=True):
            assert_nmse(a.to(BF16), b.double(), 4 * sum_bound(device, BF16, TOKENS * BATCH))


@overrides
def test_gradients_in_fp16_of_operands_in_bf16(device, override):
    """No GEMM of cuBLASLt writes them: they are cast from fp32."""
    model, (x, grad) = made("Linear", device, F16), data(device, F16)
    x.requires_grad_()
    how = Float8CurrentScaling(backward_override=override)
    with torch.autocast(device, dtype=BF16), te.autocast(recipe=how):
        out = model(x)
    grad = grad.to(BF16)
    out.backward(grad)
    assert out.dtype is BF16 and x.grad.dtype is model.weight.grad.dtype is F16
    rows, dy = x.detach().flatten(0, 1).double(), grad.flatten(0, 1).double()
    narrow = tol("round", E4M3) if override == "dequantized" else 0.0
    bound = 4 * sum_bound(device, BF16, TOKENS * BATCH) + 4 * tol("round", BF16) + 2 * narrow
    assert_nmse(x.grad.flatten(0, 1), dy @ model.weight.detach().double(), bound)
    assert_nmse(model.weight.grad, dy.t() @ rows, bound)


# ---- attention -----------------------------------------------------------------------------------


@overrides
def test_attention_in_fp8(device, override):
    """Its backward is the one of 16 bits, on what it saved in FP8."""
    found, shape = {}, (TOKENS, BATCH, HEADS, WIDTH // HEADS)
    heads = [torch.randn(shape, device=device).to(BF16).requires_grad_() for _ in range(3)]
    grad = torch.randn(TOKENS, BATCH, WIDTH, device=device).to(BF16)
    for name in (None, override):
        how = Float8CurrentScaling(fp8_dpa=True, backward_override=name)
        core = te.DotProductAttention(HEADS, WIDTH // HEADS, attention_dropout=0.0)
        with te.autocast(recipe=how):
            out = core(*heads, attn_mask_type="no_mask")
        found[name] = [out.detach(), *torch.autograd.grad(out, heads, grad)]
    assert_same(found[None], found[override])


@pytest.mark.parametrize("rows", [(0,), (1,), (2, 0)], ids=str)
@few
@overrides
def test_few_rows(device, recipe, override, rows):
    model = made("LayerNormMLP", device)
    x = torch.randn(*rows, WIDTH, device=device).to(BF16).requires_grad_()
    found = step(model, x, torch.ones_like(x), RECIPES[recipe](backward_override=override))
    assert all(value.isfinite().all() for value in found)
    if x.numel() == 0:
        assert all((value == 0).all() for value in found[2:])
