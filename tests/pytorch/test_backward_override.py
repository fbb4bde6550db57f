# SPDX-License-Identifier: Apache-2.0
"""``backward_override`` of recipes: a quantized forward, and a backward in the activation dtype."""

import pytest
import torch
from buffers import name_of
from comparators import assert_bits, assert_nmse
from pytorch.helpers import sum_bound
from tols import BF16, F16, F32

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.tensor.recipes import weight_quantizer

WIDTH, FFN, HEADS, TOKENS, BATCH = 64, 128, 4, 24, 2
ALIGNED = 256
"""Bytes; where members of a packed buffer begin."""
RECIPES = {
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "block-1d": lambda **o: Float8BlockScaling(w_block_scaling_dim=1, **o),
    "row": Float8RowScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
OVERRIDES = ("high_precision", "dequantized")
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# Of each module: how it is made, and how many linear layers it has.
MODULES = {
    "Linear": (lambda **o: te.Linear(WIDTH, WIDTH, **o), 1),
    "Linear-split": (lambda **o: te.Linear(WIDTH, WIDTH, parameters_split=("a", "b"), **o), 1),
    "LayerNormLinear": (lambda **o: te.LayerNormLinear(WIDTH, WIDTH, **o), 1),
    "LayerNormMLP": (lambda **o: te.LayerNormMLP(WIDTH, FFN, **o), 2),
    "LayerNormMLP-checkpoint": (lambda **o: te.LayerNormMLP(WIDTH, FFN, checkpoint=True, **o), 2),
    "MultiheadAttention": (
        lambda **o: te.MultiheadAttention(
            WIDTH, HEADS, attention_dropout=0.0, input_layernorm=True, **o
        ),
        2,
    ),
    "TransformerLayer": (lambda **o: te.TransformerLayer(WIDTH, FFN, HEADS, **NO_DROPOUT, **o), 4),
}
FEW = ("current", "block-1d", "nvfp4")
"""A scale of the tensor, several, and amaxes besides."""
ONE = ("Linear", "Linear-split", "LayerNormLinear")
few = pytest.mark.parametrize("recipe", FEW)
recipes = pytest.mark.parametrize("recipe", RECIPES)
overrides = pytest.mark.parametrize("override", OVERRIDES)
modules = pytest.mark.parametrize("module", MODULES)


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    """Attention whose gradients have the same bits each time."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def made(module, device, dtype=BF16, **options):
    model = MODULES[module][0](params_dtype=dtype, device=device, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(float("layer_norm_weight" in name), 0.25)
    return model


def data(device, dtype=BF16, width=WIDTH):
    x = torch.randn(TOKENS, BATCH, width, device=device).to(dtype).requires_grad_()
    return x, torch.randn(TOKENS, BATCH, width, device=device).to(dtype)


def results(out, x, model):
    return [out.detach(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]


def step(model, x, grad, recipe, run=None, **more):
    """Output and all gradients of a step."""
    x.grad = None
    model.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = (run or model)(x, **more)
    out.backward(grad)
    return results(out, x, model)


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        assert_bits(x.cpu(), y.cpu())


def casts(counts):
    """How many operators measured or cast."""
    return sum(n for name, n in counts.items() if name.endswith((".quantize", ".amax")))


# ---- what runs, and what is kept -----------------------------------------------------------------


@recipes
@overrides
@modules
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_backward_runs_in_high_precision(device, recipe, override, module, dtype):
    """The forward is the recipe's; no GEMM of the backward is, and nothing is cast for one."""
    if module.endswith("checkpoint"):
        pytest.skip("its backward repeats a forward, with the casts of that")
    model, (x, grad) = made(module, device, dtype), data(device, dtype)
    with te.autocast(recipe=RECIPES[recipe]()):
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
        links = {link for _, _, _, _, _, link, _, _ in plan.described["buffers"]}
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
            assert_bits(a.cpu(), b.cpu())


# ---- dequantized ---------------------------------------------------------------------------------


def input_quantizer(recipe, device):
    """What casts inputs as a recipe does: a quantizer of weights, but for its tiles."""
    quantizer = weight_quantizer(recipe, device)
    for name, value in (("block_scaling_dim", 1), ("with_2d_quantization", False)):
        if hasattr(quantizer, name):
            setattr(quantizer, name, value)
    return quantizer


def read_again(quantizer, values, dtype):
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer(values.detach().contiguous()).dequantize(dtype=dtype)


@recipes
@pytest.mark.parametrize("dtype", [BF16, F32], ids=name_of)
def test_dequantized_is_that_of_dequantized_operands(device, recipe, dtype):
    how = RECIPES[recipe](backward_override="dequantized")
    model, (x, grad) = made("Linear", device, dtype), data(device, dtype)
    found = step(model, x, grad, how)
    other, weight = made("Linear", device, dtype), weight_quantizer(how, x.device)
    with torch.no_grad():
        other.weight.copy_(read_again(weight, model.weight, dtype))
    again = read_again(input_quantizer(how, x.device), x, dtype).requires_grad_()
    assert_same(found[1:], step(other, again, grad, None)[1:])


@recipes
def test_dequantized_behind_a_norm(device, recipe):
    """The norm's gradients are those of the dequantized weight, which its output has no part in."""
    how = RECIPES[recipe](backward_override="dequantized")
    model, (x, grad) = made("LayerNormLinear", device, F32), data(device, F32)
    found = step(model, x, grad, how)
    other, weight = made("LayerNormLinear", device, F32), weight_quantizer(how, x.device)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.weight.copy_(read_again(weight, model.weight, F32))
    expected = step(other, x, grad, None)
    for (name, _), a, b in zip(model.named_parameters(), found[2:], expected[2:], strict=True):
        if name != "weight":
            assert_bits(a.cpu(), b.cpu())
    assert_bits(found[1].cpu(), expected[1].cpu())
    normed = torch.nn.functional.layer_norm(
        x.detach().double(), (WIDTH,), model.layer_norm_weight.double(),
        model.layer_norm_bias.double(), model.eps,
    )  # fmt: skip
    weight_grad = dict(zip([n for n, _ in model.named_parameters()], found[2:], strict=True))[
        "weight"
    ]
    # The norm in double crosses a boundary of the casts now and then: by a step of its format.
    again = read_again(input_quantizer(how, x.device), normed.float(), F32)
    exact = grad.flatten(0, 1).double().T @ again.flatten(0, 1).double()
    assert_nmse(weight_grad, exact, 1e-4)


# ---- every way -----------------------------------------------------------------------------------


@few
@overrides
@modules
@pytest.mark.parametrize("ours", [True, False], ids=["te", "torch"])
def test_recompute(device, recipe, override, module, ours):
    model, (x, grad) = made(module, device), data(device)
    how = RECIPES[recipe](backward_override=override)
    eager = step(model, x, grad, how)
    if ours:
        found = step(model, x, grad, how, lambda x: te.checkpoint(model, x))
    else:
        again = torch.utils.checkpoint.checkpoint
        found = step(model, x, grad, how, lambda x: again(model, x, use_reentrant=False))
    assert_same(found, eager)


@recipes
@overrides
def test_mlp_that_keeps_nothing(device, recipe, override):
    how = RECIPES[recipe](backward_override=override)
    model, (x, grad) = made("LayerNormMLP", device), data(device)
    kept = made("LayerNormMLP-checkpoint", device)
    kept.load_state_dict(model.state_dict())
    assert_same(step(kept, x, grad, how), step(model, x, grad, how))


@few
@overrides
@modules
def test_microbatches(device, recipe, override, module):
    """A cached weight gives the bits of one that is cast at each call, and is row-wise alone."""
    model, (x, grad) = made(module, device), data(device)
    how = RECIPES[recipe](backward_override=override)
    eager = step(model, x, grad, how)
    for first in (True, False, False):
        assert_same(step(model, x, grad, how, is_first_microbatch=first), eager)
    held = [part for m in model.modules() for part in getattr(m, "_weight_caches", ()) if part]
    assert len(held) == MODULES[module][1]
    assert all(part.tensors[0] is not None and part.tensors[1] is None for part in held)


@few
@overrides
@modules
def test_weights_cached_without_a_flag(device, recipe, override, module):
    model, (x, grad) = made(module, device), data(device)
    how = RECIPES[recipe](backward_override=override)
    eager = step(model, x, grad, how)
    for part in model.modules():
        if hasattr(part, "cache_weights"):
            part.cache_weights = True
    for _ in range(3):
        assert_same(step(model, x, grad, how), eager)


WAYS = {
    "deferred": {"delay_wgrad_compute": True},
    "main_grad": {"fuse_wgrad_accumulation": True},
    "both": {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
    "input": {"save_original_input": True},
}


@recipes
@overrides
@pytest.mark.parametrize("way", WAYS)
def test_weight_gradients_of_every_way(device, recipe, override, way):
    plain, other = made("Linear", device), made("Linear", device, **WAYS[way])
    other.load_state_dict(plain.state_dict())
    x, grad = data(device)
    how = RECIPES[recipe](backward_override=override)
    expected = step(plain, x, grad, how)
    if "fuse_wgrad_accumulation" in WAYS[way]:
        other.weight.main_grad = torch.zeros_like(other.weight, dtype=F32)
    other.zero_grad()
    x.grad = None
    with te.autocast(recipe=how):
        out = other(x)
    out.backward(grad)
    if "delay_wgrad_compute" in WAYS[way]:
        other.backward_dw()
    weight = other.weight.grad
    if "fuse_wgrad_accumulation" in WAYS[way]:
        weight = other.weight.main_grad.to(BF16)
    assert_same([out.detach(), x.grad, weight, other.bias.grad], expected)


@overrides
def test_main_grad_of_another_dtype(device, override):
    model, (x, _) = made("Linear", device, fuse_wgrad_accumulation=True), data(device)
    model.weight.main_grad = torch.zeros_like(model.weight, dtype=F16)
    how = Float8CurrentScaling(backward_override=override)
    with te.autocast(recipe=how), pytest.raises(TypeError, match="main_grad is torch.float16"):
        model(x)


@recipes
@overrides
def test_deferred_mlp(device, recipe, override):
    how = RECIPES[recipe](backward_override=override)
    model, (x, grad) = made("LayerNormMLP", device), data(device)
    eager = step(model, x, grad, how)
    late = made("LayerNormMLP", device, delay_wgrad_compute=True)
    late.load_state_dict(model.state_dict())
    x.grad = None
    with te.autocast(recipe=how):
        out = late(x)
    out.backward(grad)
    late.backward_dw()
    for (name, a), b in zip(late.named_parameters(), eager[2:], strict=True):
        if name == "fc2_bias":  # another operator sums it where the GEMM comes later
            assert_nmse(a.grad, b.double(), 4 * sum_bound(device, BF16, TOKENS * BATCH))
        else:
            assert_bits(a.grad.cpu(), b.cpu())


@few
@overrides
@modules
def test_compiled(device, recipe, override, module):
    torch.compiler.reset()
    model, (x, grad) = made(module, device), data(device)
    how = RECIPES[recipe](backward_override=override)
    eager = step(model, x, grad, how)
    compiled = torch.compile(lambda x: model(x), fullgraph=True, backend="aot_eager")
    assert_same(step(model, x, grad, how, compiled), eager)
    torch.compiler.reset()


@pytest.mark.gpu
@few
@overrides
@modules
def test_captured(recipe, override, module):
    model, (x, grad) = made(module, "cuda"), data("cuda")
    how = RECIPES[recipe](backward_override=override)
    eager = step(model, x, grad, how)

    def run():
        with te.autocast(recipe=how):
            out = model(x)
        return (out, *torch.autograd.grad(out, [x, *model.parameters()], grad))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    graph.replay()
    torch.cuda.synchronize()
    assert_same([t.detach() for t in found], eager)


@recipes
@overrides
def test_layer_is_its_submodules(device, recipe, override):
    """One plan per direction has the bits of calls of the submodules."""
    model, (x, grad) = made("TransformerLayer", device), data(device)
    how = RECIPES[recipe](backward_override=override)
    expected = step(model, x, grad, how)
    with model.layernorm_mlp.register_forward_hook(lambda module, given, out: None):
        assert_same(step(model, x, grad, how), expected)


@recipes
@modules
def test_switching_between_calls(device, recipe, module):
    """A call has the backward that was in force when it ran forward."""
    model, (x, grad) = made(module, device), data(device)
    ways = [RECIPES[recipe](), *(RECIPES[recipe](backward_override=how) for how in OVERRIDES)]
    if recipe == "nvfp4":
        ways[0].disable_stochastic_rounding = True
    expected = [step(model, x, grad, how) for how in ways]
    for i in (2, 0, 1, 0, 2, 1):
        assert_same(step(model, x, grad, ways[i]), expected[i])
    assert not torch.equal(expected[1][1], expected[2][1])
    outs = []
    for how in ways:
        with te.autocast(recipe=how):
            outs.append(model(x))
    for out, wanted in zip(reversed(outs), reversed(expected), strict=True):
        x.grad = None
        model.zero_grad()
        out.backward(grad)
        assert_same(results(out, x, model), wanted)


def test_the_environment_says_so(device, monkeypatch):
    model, (x, grad) = made("LayerNormLinear", device), data(device)
    plain = step(model, x, grad, None)
    monkeypatch.setenv("NVTE_BACKWARD_OVERRIDE", "high_precision")
    assert_same(step(model, x, grad, Float8CurrentScaling())[1:], plain[1:])


# ---- quantized tensors ---------------------------------------------------------------------------


@recipes
@pytest.mark.parametrize("module", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_quantized_parameters(device, recipe, module):
    """Of a parameter there is no high precision: both read what it stands for."""
    how = {name: RECIPES[recipe](backward_override=name) for name in OVERRIDES}
    with te.quantized_model_init(recipe=how["dequantized"]):
        model = MODULES[module][0](params_dtype=BF16, device=device)
    wide = MODULES[module][0](params_dtype=BF16, device=device)
    with torch.no_grad():
        for ours, theirs in zip(wide.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs.dequantize() if hasattr(theirs, "dequantize") else theirs)
    x, grad = data(device)
    for name in OVERRIDES:
        with te.counting() as counts:
            found = step(model, x, grad, how[name])
        layers = MODULES[module][1]
        wanted = layers * (2 if name == "dequantized" else 1)
        assert counts.get(f"op.{device}.dequantize", 0) == wanted
        if module == "LayerNormMLP":
            continue
        if name == "high_precision":
            assert_same(found[1:], step(wide, x, grad, None)[1:])
        else:
            assert_bits(found[1].cpu(), step(wide, x, grad, None)[1].cpu())
        for first in (True, False):
            assert_same(step(model, x, grad, how[name], is_first_microbatch=first), found)


@recipes
@overrides
def test_quantized_input(device, recipe, override):
    """Row-wise data are enough, whose values both read."""
    how = RECIPES[recipe](backward_override=override)
    model, (x, grad) = made("Linear", device), data(device)
    quantizer = input_quantizer(how, x.device)
    quantizer.set_usage(rowwise=True, columnwise=False)
    given = quantizer(x.detach())
    with te.counting() as counts, te.autocast(recipe=how):
        out = model(given)
    assert casts(counts) <= 2  # of the weight alone
    out.backward(grad)
    wide = given.dequantize(dtype=BF16).flatten(0, 1)
    other = te.Linear(WIDTH, WIDTH, bias=False, params_dtype=BF16, device=device)
    other(wide).backward(grad.flatten(0, 1))
    assert_bits(model.weight.grad.cpu(), other.weight.grad.cpu())


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
def test_gradients_that_no_gemm_writes(device, override):
    model, (x, _) = made("Linear", device, F16), data(device, F16)
    how = Float8CurrentScaling(backward_override=override)
    with (
        torch.autocast(device, dtype=BF16),
        te.autocast(recipe=how),
        pytest.raises(NotImplementedError, match=r"gradient of \w+ in f16 of operands in bf16"),
    ):
        model(x)


# ---- attention -----------------------------------------------------------------------------------


@overrides
def test_attention_in_fp8(device, override):
    """Its backward is the one of 16 bits, on what it saved in FP8."""
    found = {}
    for name in (None, override):
        how = Float8CurrentScaling(fp8_dpa=True, backward_override=name)
        torch.manual_seed(1)
        core = te.DotProductAttention(HEADS, WIDTH // HEADS, attention_dropout=0.0)
        shape = TOKENS, BATCH, HEADS, WIDTH // HEADS
        heads = [torch.randn(shape, device=device).to(BF16).requires_grad_() for _ in range(3)]
        with te.autocast(recipe=how):
            out = core(*heads, attn_mask_type="no_mask")
        out.backward(torch.ones_like(out))
        found[name] = [out.detach(), *(t.grad for t in heads)]
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
