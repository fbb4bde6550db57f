# SPDX-License-Identifier: Apache-2.0
"""`observe` measures casts and GEMMs and changes nothing; `report` says what ran, and why."""

import copy
import io

import numpy as np
import pytest
import reference
import torch
from comparators import assert_nmse
from pytorch.helpers import FP8, RECIPES, assert_same_bits, state_of, states_of
from pytorch.module_cases import make, region
from tols import tol
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tools.observation import count_cast

KINDS = {
    "Linear": lambda device, dtype: te.Linear(48, 32, params_dtype=dtype, device=device),
    "LayerNormLinear": lambda device, dtype: make("norm-linear", device, dtype, (48, 32)),
    "LayerNormMLP": lambda device, dtype: make("gelu", device, dtype, (48, 32)),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def reported(model, observed=None):
    """The report as data, by path, and its text."""
    file = io.StringIO()
    layers = te.report(model, observed, file=file)
    return {layer.name: layer for layer in layers}, file.getvalue()


def step(model, x, recipe, **arguments):
    with region(recipe):
        out = model(x, **arguments)
    out.float().square().sum().backward()
    return out.detach()


def gemms_of(layer):
    return {gemm.name: gemm for gemm in layer.gemms}


def tensors_of(layer):
    return {tensor.name: tensor for tensor in layer.tensors}


# ---- what is counted is what the cast does ----


def counts64(values, scale, dtype):
    """(saturated, flushed) from the definition of a cast, in float64 over the fp32 products."""
    product = np.abs(reference.as_f32(values) * np.float32(scale)).astype(np.float64)
    bits = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}[dtype]  # with the leading one
    fraction, exponent = np.frexp(product)
    unbounded = np.ldexp(np.rint(fraction * 2**bits), exponent - bits)  # half to even
    saturated = (unbounded > reference.FP8_MAX[dtype]).sum()
    codes = reference.quantize(values, scale, dtype)
    flushed = ((codes.double() == 0) & (values.cpu() != 0)).sum()
    return int(saturated), int(flushed)


@pytest.mark.parametrize("dtype", FP8.values(), ids=str)
def test_counts_of_a_cast(device, dtype):
    values = torch.randn(64, 64, device=device) * torch.logspace(-6, 4, 64, device=device)
    largest = reference.FP8_MAX[dtype]
    edges = [0.0, largest, 464.0, 465.0, 61439.0, 61440.0, 2.0**-10, 2.0**-17, 1e-30, float("inf")]
    values[0, :10] = torch.tensor(edges)
    for scale in (1.0, 0.37, 300.0):
        found = count_cast(values, torch.tensor(scale, device=device), dtype)
        assert tuple(map(int, found[:2])) == counts64(values, scale, dtype)
        assert found[2] == float("inf")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_measures_a_linear_layer(device, recipe, dtype):
    layer = te.Linear(48, 32, params_dtype=dtype, device=device)
    made = RECIPES[recipe]()
    x = torch.randn(24, 48, device=device, dtype=dtype) * 1e-3
    x[0, 0] = 3e3
    x.requires_grad_()
    grads = []
    for _ in range(2):
        with te.observe(layer) as seen, region(made):
            out = layer(x)
            out.register_hook(grads.append)
        with seen:
            grad = torch.randn_like(out) * torch.logspace(-9, 0, 32, device=device).to(dtype)
            before = state_of(layer)
            with region(made):
                out = layer(x)
            out.register_hook(grads.append)
            out.backward(grad)
    scales = {}
    if before is not None:
        scales = {"input": before["forward"][0][0], "weight": before["forward"][0][1],
                  "grad_output": before["backward"][0][0]}  # fmt: skip
    layers, _ = reported(layer, seen)
    tensors = tensors_of(layers[""])
    values = {"input": x.detach(), "weight": layer.weight.detach(), "grad_output": grads[-1]}
    assert tensors.keys() == values.keys()
    for name, tensor in tensors.items():
        fp8 = FP8[made.fp8_format.dtype_name("bwd" if name == "grad_output" else "fwd")]
        assert FP8[tensor.dtype] is fp8
        assert tensor.amax == reference.amax(values[name])
        if scales:
            assert tensor.scale == scales[name].item()
        else:
            power_2 = made.use_power_2_scales
            largest = reference.FP8_MAX[fp8]
            assert tensor.scale == reference.current_scale(tensor.amax, largest, power_2=power_2)
        saturated, flushed = counts64(values[name], tensor.scale, fp8)
        count = values[name].numel()
        assert (tensor.saturated, tensor.flushed) == (saturated / count, flushed / count)
    assert tensors["input"].flushed > 0 or tensors["grad_output"].flushed > 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_measures_inside_an_mlp(device, activation, recompute):
    """The amaxes of the values between norm, activation and GEMMs are those that casts record."""
    mlp = make(activation, device, sizes=(48, 32), checkpoint=recompute)
    x = torch.randn(32, 48, device=device, requires_grad=True)
    with te.observe(mlp) as seen:
        step(mlp, x, RECIPES["delayed"]())
    layers, _ = reported(mlp, seen)
    assert list(layers) == ["fc1", "fc2"]
    recorded = te.scales(mlp)
    for part, layer in layers.items():
        tensors = tensors_of(layer)
        assert list(tensors) == ["input", "weight", "grad_output"]
        for name, tensor in tensors.items():
            amax = recorded[f"{part}_{name}"].history[0]
            assert abs(tensor.amax - amax) <= tol("amax", torch.float32) * amax
            assert tensor.scale == 1.0
            assert 0.0 <= tensor.flushed < 1.0
        counts = [gemm.count for gemm in layer.gemms]
        assert counts == [2 if recompute and part == "fc1" else 1, 1, 1]


# ---- nothing changes ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_and_state(device, kind, recipe, dtype):
    model = KINDS[kind](device, dtype)
    twin = copy.deepcopy(model)
    x = torch.randn(3, 11, model._sizes()[0][0], device=device, dtype=dtype)
    made = None if recipe is None else RECIPES[recipe]()
    found = []
    for module in (model, twin):
        inp = x.clone().requires_grad_()
        for _ in range(3):
            if module is model:
                with te.observe(module):
                    out = step(module, inp, made)
            else:
                out = step(module, inp, made)
        grads = [p.grad for p in module.parameters()]
        found.append([[out, inp.grad, *grads], state_of(module) or {}])
    if recipe is None and device == "cuda":  # cuBLASLt chooses by the alignment of scratch, too
        for tensor, wanted in zip(*(tensors for tensors, _ in found), strict=True):
            assert_nmse(tensor, wanted.double(), 4 * tol("chain", dtype, 64))
    else:
        assert_same_bits(*found)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("way", ["te", "reentrant", "non-reentrant", "microbatches"])
def test_same_bits_in_a_layer(device, way, recipe, start):
    layers = [te.TransformerLayer(32, 64, 2, hidden_dropout=0.1, device=device) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(16, 2, 32, device=device)
    made = RECIPES[recipe]()

    def run(layer, inp, first):
        if way == "microbatches":
            return layer(inp, is_first_microbatch=first)
        if way == "te":
            return te.checkpoint(layer, inp)
        return checkpoint(layer, inp, use_reentrant=way == "reentrant")

    found = []
    for number, layer in enumerate(layers):
        start()
        with te.observe(layers[0]) as seen:
            for first in (True, False):
                inp = x.clone().requires_grad_()
                with region(made):
                    out = run(layer, inp, first)
                out.sum().backward()
        grads = [p.grad.clone() for p in layer.parameters()]
        found.append([out.detach(), inp.grad, *grads, states_of(layer)])
        if number == 0:
            kept = seen
    assert_same_bits(*found)
    layers, _ = reported(layers[0], kept)
    mlp = layers["layernorm_mlp.fc1"]
    assert [gemm.count for gemm in mlp.gemms] == [2 if way == "microbatches" else 4, 2, 2]
    assert all(gemm.precision.startswith("e") for gemm in mlp.gemms)
    assert list(tensors_of(mlp)) == ["input", "weight", "grad_output"]


def test_block_ends(device):
    layer = te.Linear(32, 32, device=device)
    x = torch.randn(16, 32, device=device)
    with pytest.raises(KeyError), te.observe(layer) as seen:
        layer(x)
        raise KeyError
    assert layer._observer is None
    layer(x)
    assert gemms_of(reported(layer, seen)[0][""])["output"].count == 1
    with te.observe(layer), pytest.raises(RuntimeError, match="being observed already"):
        te.observe(layer).__enter__()
    with te.observe(layer):
        assert copy.deepcopy(layer)._observer is None


# ---- what is reported ----


def test_precision_and_reasons(device):
    model = torch.nn.Sequential(te.Linear(32, 32, device=device), te.LayerNorm(32, device=device))
    x = torch.randn(16, 32, device=device)

    def found():
        (layer, norm), _ = reported(model)[0].values(), None
        assert norm.kind == "LayerNorm" and "fp32" in norm.note and norm.gemms == ()
        return [(gemm.precision, gemm.reason) for gemm in layer.gemms]

    assert found() == [(None, "not called yet")] * 3
    step(model, x, None)
    none = "no autocast was in force"
    no_input = (None, "the input needs no gradient")
    assert found() == [("f32 x f32", none), no_input, ("f32 x f32", none)]
    step(model, x.clone().requires_grad_(), RECIPES["delayed"]())
    assert found() == [("e4m3 x e4m3", None), ("e5m2 x e4m3", None), ("e5m2 x e4m3", None)]
    step(model, x, RECIPES["delayed-e4m3"]())
    assert found() == [("e4m3 x e4m3", None), no_input, ("e4m3 x e4m3", None)]
    with te.autocast(enabled=False):
        model(x)
    assert found()[0] == ("f32 x f32", "autocast(enabled=False) was in force")
    with te.autocast(enabled=False, calibrating=True):
        model(x)
    assert found()[0] == ("f32 x f32", "autocast was calibrating")
    with torch.no_grad(), te.autocast():
        model(x)
    assert found() == [("e4m3 x e4m3", None), *[(None, "gradients were off")] * 2]
    model[0].weight.requires_grad_(False)
    step(model, x.clone().requires_grad_(), RECIPES["delayed"]())
    assert found()[1:] == [("e5m2 x e4m3", None), (None, "the weight is frozen")]
    assert [t.name for t in reported(model)[0]["0"].tensors] == ["input", "weight", "grad_output"]
    step(model, x, RECIPES["delayed"]())  # its bias alone has a gradient: that is not cast
    assert found()[1:] == [no_input, (None, "the weight is frozen")]
    assert [t.name for t in reported(model)[0]["0"].tensors] == ["input", "weight"]
    model.half()
    model(x.half())
    assert found()[0] == ("f16 x f16", none)
    model[0].override_stages(gemm_output=lambda buffers: buffers["output"].zero_())
    model(x.half())
    assert found()[0] == ("a Python function", "override_stages")


@pytest.mark.parametrize("recipe", ["delayed", "current-power2"])
def test_weights_without_an_observation(device, recipe):
    """What the next cast of the weight does; one column of it is lost."""
    layer = te.Linear(40, 24, device=device)
    with torch.no_grad():
        layer.weight[:, 0] = 1e-7
    made = RECIPES[recipe]()
    step(layer, torch.randn(16, 40, device=device), made)
    layers, text = reported(layer)
    tensors = tensors_of(layers[""])
    weight = layer.weight.detach()
    scale = tensors["weight"].scale
    expected = reference.current_scale(
        reference.amax(weight), 448.0, power_2=recipe == "current-power2"
    )
    assert scale == expected and tensors["weight"].amax == reference.amax(weight)
    saturated, flushed = counts64(weight, scale, torch.float8_e4m3fn)
    assert saturated == 0 and flushed >= 24
    share = flushed / weight.numel()
    assert (tensors["weight"].saturated, tensors["weight"].flushed) == (0.0, share)
    unknown = tensors["input"]
    assert unknown.saturated is None and unknown.flushed is None
    assert (unknown.amax is None) == (recipe != "delayed")
    assert "te.observe(model) as seen" in text and f"flushed to zero {100 * share:.3g}%" in text


def test_every_kind_of_layer(device):
    model = torch.nn.ModuleDict({
        "layer": te.TransformerLayer(32, 64, 2, device=device),
        "plain": torch.nn.Linear(32, 32, device=device),
        "attention": torch.nn.MultiheadAttention(32, 2),
        "unused": te.Linear(32, 32, device=device),
        "split": te.Linear(32, 48, parameters_split=("a", "b", "c"), device=device),
    })  # fmt: skip
    x = torch.randn(8, 2, 32, device=device)
    with te.observe(model) as seen:
        step(model["layer"], x, RECIPES["current"]())
        step(model["split"], x, RECIPES["current"]())
    for observed in (None, seen):
        layers, text = reported(model, observed)
        kinds = {name: layer.kind for name, layer in layers.items()}
        assert kinds == {
            "layer.self_attention.core_attention": "DotProductAttention",
            "layer.self_attention.layernorm_qkv": "LayerNormLinear",
            "layer.self_attention.proj": "Linear",
            "layer.layernorm_mlp.fc1": "LayerNormMLP",
            "layer.layernorm_mlp.fc2": "LayerNormMLP",
            "plain": "Linear",
            "attention.out_proj": "NonDynamicallyQuantizableLinear",
            "unused": "Linear",
            "split": "Linear",
        }
        assert layers["layer.self_attention.core_attention"].note.startswith("backend ")
        assert layers["layer.layernorm_mlp.fc2"].shape == (32, 64)
        assert layers["split"].shape == (48, 32)
        assert tensors_of(layers["split"])["weight"].saturated == 0.0
        assert layers["plain"].gemms[0].reason.endswith("te.convert swaps it")
        assert (
            "leaves alone: its class is a subclass" in layers["attention.out_proj"].gemms[0].reason
        )
        why = "not called in the observed block" if observed else "not called yet"
        assert layers["unused"].gemms[0].reason.startswith(why)
        for name in layers:
            assert any(line.startswith(name) for line in text.splitlines()), name


def test_deferred_weight_gradients(device):
    layer = te.Linear(32, 32, delay_wgrad_compute=True, device=device)
    with te.observe(layer) as seen:
        step(layer, torch.randn(16, 32, device=device), RECIPES["delayed"]())
    assert gemms_of(reported(layer)[0][""])["weight gradient"].precision == "e5m2 x e4m3"
    gemm = gemms_of(reported(layer, seen)[0][""])["weight gradient"]
    assert gemm[1:] == (None, "deferred: backward_dw", 0)
    layer.backward_dw()


def test_of_a_compiled_model(device):
    layer = te.Linear(32, 32, device=device)
    x = torch.randn(16, 32, device=device)
    compiled = torch.compile(layer, backend="aot_eager")
    step(compiled, x, RECIPES["delayed"]())
    layers, _ = reported(compiled)
    (found,) = layers.values()
    assert [g.precision for g in found.gemms] == ["e4m3 x e4m3", None, "e5m2 x e4m3"]
    with te.observe(compiled) as seen:
        step(compiled, x, RECIPES["delayed"]())
    (found,) = reported(compiled, seen)[0].values()
    assert "compiled graph" in found.gemms[0].reason


def test_wrong_arguments():
    layer = te.Linear(8, 8, device="cpu")
    with pytest.raises(TypeError, match="report: model: int, expected"):
        te.report(3)
    with pytest.raises(TypeError, match="report: observed: dict, expected what te.observe"):
        te.report(layer, {})
    with pytest.raises(TypeError, match="observe: model: int, expected"):
        te.observe(3)
