# SPDX-License-Identifier: Apache-2.0
"""Norms whose input, parameters and output are of several dtypes, alone and in modules."""

import copy
from unittest import mock

import layer_reference
import pytest
import torch
from comparators import assert_grad64, assert_nmse
from device_kinds import every_device, our_kernels
from layer_reference import wide
from pytorch import module_reference
from pytorch.helpers import RECIPES, assert_same_bits, counted
from thinning import pairs
from tols import tol
from torch import nn

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling

pytestmark = every_device

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
DTYPES = [F32, F16, BF16]
NORMS = {"layernorm": te.LayerNorm, "rmsnorm": te.RMSNorm}
TOKENS, FEATURES = 24, 40


def dtype_id(value):
    return str(value).removeprefix("torch.")


def per_dtype(name):
    return pytest.mark.parametrize(name, DTYPES, ids=dtype_id)


def randomise(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    return module


def make(kind, device, dtype, shape=FEATURES, **options):
    return randomise(NORMS[kind](shape, device=device, dtype=dtype, **options))


def step(module, x, grad_dtype, **options):
    """(Output, gradient that it gets, gradients by name)."""
    module.zero_grad()
    inp = x.detach().clone().requires_grad_()
    out = module(inp, **options)
    grad = torch.randn(out.shape, device=x.device, dtype=grad_dtype)
    assert out.dtype == grad_dtype
    out.backward(grad)
    return out.detach(), grad, {"x": inp.grad} | {n: p.grad for n, p in module.named_parameters()}


def check(norm, kind, x, out, grad, grads):
    """Values and gradients to the accuracy of the dtype of each."""

    def definition(x, weight, bias=None):
        columns = weight.numel()
        gamma = weight.reshape(-1) + float(norm.zero_centered_gamma)
        beta = 0.0 if bias is None else bias.reshape(-1)
        flat = x.reshape(-1, columns)
        return layer_reference.norm(kind, flat, gamma, beta, norm.eps).reshape(x.shape)

    inputs = {"x": x} | dict(norm.named_parameters())
    exact = definition(**{n: wide(t) for n, t in inputs.items()})
    assert_nmse(out, exact, tol("round", out.dtype) + tol("chain", F32, FEATURES))
    for name, found in grads.items():
        assert found.dtype == inputs[name].dtype
        inside = F32 if found.dtype == F64 else found.dtype
        bound = tol("round", inside) + tol("chain", F32, TOKENS + FEATURES)
        # One at a time: each has the accuracy of its own dtype.
        assert_grad64({name: found}, definition, inputs, grad, bound)


@pytest.fixture(params=NORMS)
def kind(request):
    return request.param


# ---- norms alone ---------------------------------------------------------------------------------


@pytest.mark.parametrize("features", [FEATURES, 17, 1024, 9000])
@pytest.mark.parametrize("centred", [False, True], ids=["", "zero-centred"])
@per_dtype("weight")
@pytest.mark.parametrize("given", [F64, *DTYPES], ids=dtype_id)
def test_input_and_weight(device, kind, given, weight, centred, features):
    """The output has the dtype of the weight, each gradient that of what it belongs to.

    Widths of all kernels: narrow, not of whole vectors, wide, and too wide for one.
    """
    norm = make(kind, device, weight, features, zero_centered_gamma=centred, eps=1e-3)
    x = torch.randn(TOKENS, features, device=device, dtype=given)
    _core.reset_counters()
    found = step(norm, x, weight)
    ran = {n.rpartition(".")[2]: c for n, c in _core.counters().items() if n.startswith("op.")}
    assert ran == {"norm": 1, "norm_backward": 1}
    check(norm, kind, x, *found)


@per_dtype("weight")
@per_dtype("given")
def test_several_dims_and_strides(device, kind, given, weight):
    norm = make(kind, device, weight, (5, 8))
    x = torch.randn(5, 8, TOKENS, device=device, dtype=given).permute(2, 0, 1)
    check(norm, kind, x, *step(norm, x, weight))
    empty = step(norm, x[:0], weight)[2]
    assert all((g == 0).all() for g in empty.values())


@pytest.mark.parametrize("result", [F16, BF16], ids=dtype_id)
@per_dtype("weight")
@per_dtype("given")
def test_under_torch_autocast(device, kind, given, weight, result):
    """The output has the dtype of the region; input and weight are read in their own."""
    norm = make(kind, device, weight)
    x = torch.randn(TOKENS, FEATURES, device=device, dtype=given)
    with torch.autocast(device, dtype=result):
        found = step(norm, x, result)
    check(norm, kind, x, *found)


def test_parameters_of_two_dtypes(device):
    norm = make("layernorm", device, BF16)
    norm.bias = nn.Parameter(torch.randn(FEATURES, device=device))
    x = torch.randn(TOKENS, FEATURES, device=device, dtype=F16)
    check(norm, "layernorm", x, *step(norm, x, BF16))


@per_dtype("weight")
def test_quantized_input(device, kind, weight):
    norm = make(kind, device, weight)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device=torch.device(device))
    x = quantizer(torch.randn(TOKENS, FEATURES, device=device, dtype=BF16))
    out = norm(x)
    assert out.dtype == weight
    assert_same_bits(out, norm(x.dequantize()))


def test_without_weight(device, kind):
    norm = NORMS[kind](FEATURES, elementwise_affine=False, device=device)
    assert norm(torch.randn(3, FEATURES, device=device, dtype=BF16)).dtype is BF16
    with pytest.raises(TypeError, match="inp is torch.float64, expected"):
        norm(torch.randn(3, FEATURES, device=device, dtype=F64))


# Graphs hold what eager code runs, which is compared for all of these.
@our_kernels
@pairs(kind=NORMS, given=[F64, *DTYPES], weight=DTYPES)
def test_compiled(device, kind, given, weight):
    torch._dynamo.reset()
    norm = make(kind, device, weight)
    x = torch.randn(TOKENS, FEATURES, device=device, dtype=given)
    results = []
    for forward in (norm, torch.compile(norm, fullgraph=True, backend="aot_eager")):
        norm.zero_grad()
        inp = x.clone().requires_grad_()
        out = forward(inp)
        out.square().sum().backward()
        results.append([out.detach(), inp.grad, [p.grad.clone() for p in norm.parameters()]])
    assert_same_bits(*results)
    torch._dynamo.reset()


# ---- in modules ----------------------------------------------------------------------------------

MODULES = {
    "LayerNormLinear": lambda **o: te.LayerNormLinear(64, 96, **o),
    "LayerNormLinear-rms": lambda **o: te.LayerNormLinear(64, 96, normalization="RMSNorm", **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(64, 96, **o),
    "LayerNormMLP-rms": lambda **o: te.LayerNormMLP(64, 96, normalization="RMSNorm", **o),
}
USES = {**RECIPES, "mxfp8": MXFP8BlockScaling, "blockwise": Float8BlockScaling}


def normed(name, device, dtype, norm_dtype):
    module = randomise(MODULES[name](params_dtype=dtype, device=device))
    for parameter in ("layer_norm_weight", "layer_norm_bias"):
        if getattr(module, parameter, None) is not None:
            own = getattr(module, parameter)
            own.data = own.data.to(norm_dtype)
    return module


@per_dtype("given")
@per_dtype("of_norm")
@pytest.mark.parametrize("dtype", [F16, BF16], ids=dtype_id)
@pytest.mark.parametrize("name", MODULES)
def test_normed_modules(device, name, dtype, of_norm, given):
    """Residual stream and norm in fp32, say, and a linear layer of 16 bits."""
    module = normed(name, device, dtype, of_norm)
    x = torch.randn(32, 64, device=device, dtype=given)
    out, grad, grads = step(module, x, dtype)
    exact_x = wide(x).requires_grad_()
    values = module_reference.values_of(module)
    for value in values.values():
        value.requires_grad_()
    exact, _ = module_reference.definition(module, exact_x, values)
    bound = tol("chain", dtype, 96)
    assert_nmse(out, exact, bound)
    exact.backward(wide(grad))
    assert grads["x"].dtype == given
    assert_nmse(grads["x"], exact_x.grad, bound)
    for parameter, own in module.named_parameters():
        assert grads[parameter].dtype == own.dtype
        assert_nmse(grads[parameter], values[parameter].grad, bound, parameter)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", MODULES)
def test_normed_modules_quantized(device, name, use):
    """An input in fp32 of values of bf16 gives the bits of the input in bf16, and runs in FP8."""
    module = normed(name, device, BF16, BF16)
    x = torch.randn(32, 64, device=device, dtype=BF16)
    grad = torch.randn(32, module(x).shape[-1], device=device, dtype=BF16)
    results = []
    for dtype in (BF16, F32):
        for parameter in ("layer_norm_weight", "layer_norm_bias"):
            if getattr(module, parameter, None) is not None:
                own = getattr(module, parameter)
                own.data = own.data.to(dtype)
        te.reset()
        _core.reset_counters()
        module.zero_grad()
        inp = x.to(dtype, copy=True).requires_grad_()
        with counted() as gemms, te.autocast(recipe=USES[use]()):
            out = module(inp)
            out.backward(grad)
        # Without GEMMs of MXFP8 its operands are cast all the same, and multiplied out.
        ran = _core.counters().get("emulated.mxfp8", 0) if use == "mxfp8" else gemms.fp8
        assert ran > 0
        assert inp.grad.dtype == dtype and out.dtype == BF16
        linear = {n: p.grad for n, p in module.named_parameters() if "layer_norm" not in n}
        results.append((out.detach(), linear, inp.grad.to(BF16)))
    assert_same_bits(*results)


@our_kernels
@pytest.mark.parametrize("use", [None, "delayed", "current"])
@pytest.mark.parametrize("name", MODULES)
def test_calls_of_several_dtypes_are_found_again(device, name, use, monkeypatch):
    """By the dtypes of all tensors, to the bits of calls that are decided anew."""
    module = normed(name, device, BF16, F32)
    anew, decide = copy.deepcopy(module), mock.Mock(side_effect=type(module)._decide)
    monkeypatch.setattr(type(module), "_decide", lambda *given: decide(*given))
    x = torch.randn(32, 64, device=device)
    grad = torch.randn(32, module(x).shape[-1], device=device, dtype=BF16)
    recipe = RECIPES[use]() if use else None

    def run(module, given):
        module.zero_grad()
        inp = x.to(given, copy=True).requires_grad_()
        with te.autocast(enabled=use is not None, recipe=recipe):
            out = module(inp)
        out.backward(grad)
        return [out.detach(), inp.grad, [p.grad.clone() for p in module.parameters()]]

    for given, of_norm in ((F32, F32), (BF16, F32), (F32, BF16), (BF16, BF16), (F16, F32)):
        for parameter in ("layer_norm_weight", "layer_norm_bias"):
            for each in (module, anew):
                if getattr(each, parameter, None) is not None:
                    own = getattr(each, parameter)
                    own.data = own.data.to(of_norm)  # the module is not told
        decide.reset_mock()
        for _ in range(4):
            anew._kept_calls.clear()
            assert_same_bits(run(module, given), run(anew, given))
        calls = [given[0][0] for given in decide.call_args_list]
        assert (calls.count(module), calls.count(anew)) == (1, 4)


@pytest.mark.parametrize("name", MODULES)
def test_what_is_converted_is_converted_at_each_call(device, name):
    """An input of fp64, and parameters of a norm of two dtypes: read in others than their own."""
    module = normed(name, device, BF16, BF16)
    x = torch.randn(32, 64, device=device, dtype=BF16)
    module(x)  # so that the module's tensors are known
    found = [module(x.double()) for _ in range(3)]
    assert_same_bits(found[1:], [module(x.float())] * 2)
    if module.layer_norm_bias is not None:
        module.layer_norm_bias.data = module.layer_norm_bias.data.float() + 2.0**-10
        found = [module(x) for _ in range(3)]
        assert_same_bits(found[1:], found[:1] * 2)
        values = module_reference.values_of(module)
        exact, _ = module_reference.definition(module, wide(x), values)
        assert_nmse(found[2], exact, tol("chain", BF16, 96))


def test_without_a_norm_dtypes_stay_one(device):
    with pytest.raises(TypeError, match="inp is torch.float32, weight torch.bfloat16"):
        te.Linear(64, 64, params_dtype=BF16, device=device)(torch.randn(2, 64, device=device))
    module = te.LayerNormLinear(64, 64, params_dtype=BF16, device=device)
    module.bias.data = module.bias.data.float()
    with pytest.raises(TypeError, match="weight torch.bfloat16, bias torch.float32.*the module"):
        module(torch.randn(2, 64, device=device))


@pytest.mark.parametrize("options", [{}, {"parallel_attention_mlp": True}], ids=["", "parallel"])
def test_residual_stream_in_fp32(device, options):
    """Layers of bf16 read it, add to it in fp32, and give it gradients in fp32."""
    fixed = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": device}
    layer = te.TransformerLayer(64, 96, 4, params_dtype=BF16, **fixed, **options)
    same = te.TransformerLayer(64, 96, 4, params_dtype=F32, **fixed, **options)
    same.load_state_dict({n: t.float() for n, t in layer.state_dict().items()})
    x = torch.randn(16, 2, 64, device=device)
    out, grad, grads = step(layer, x, F32)
    inp = x.clone().requires_grad_()
    expected = same(inp)
    expected.backward(grad)
    assert_nmse(out, wide(expected), tol("layer", BF16, 96))
    assert grads["x"].dtype == F32
    assert_nmse(grads["x"], wide(inp.grad), tol("layer", BF16, 96))
    # What passes the branches by is not rounded.
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    assert_same_bits(layer(x), x)


@pytest.mark.parametrize("before", [False, True], ids=["after rope", "before rope"])
@pytest.mark.parametrize("qk", ["RMSNorm", "LayerNorm"])
def test_norms_of_queries_and_keys_in_fp32(device, qk, before):
    options = {"qk_norm_type": qk, "qk_norm_before_rope": before, "fuse_qkv_params": True}
    options |= {"attention_dropout": 0.0, "device": device}
    layer = te.MultiheadAttention(64, 4, params_dtype=BF16, **options)
    for norm in (layer.q_norm, layer.k_norm):
        randomise(norm.float())
    same = te.MultiheadAttention(64, 4, params_dtype=F32, **options)
    same.load_state_dict({n: t.float() for n, t in layer.state_dict().items()})
    x = torch.randn(16, 2, 64, device=device, dtype=BF16)
    angles = te.attention.RotaryPositionEmbedding(16)(16).to(device)
    out, grad, grads = step(layer, x, BF16, rotary_pos_emb=angles)
    inp = x.float().requires_grad_()
    expected = same(inp, rotary_pos_emb=angles)
    expected.backward(grad.float())
    bound = tol("layer", BF16, 64)
    assert_nmse(out, wide(expected), bound)
    assert_nmse(grads["x"], wide(inp.grad), bound)
    for name, parameter in same.named_parameters():
        if "norm" in name:
            assert grads[name].dtype == F32
            # What all keys have in common moves no weight: the gradient is 0, of terms that cancel.
            terms = wide(grads["q_norm.weight"]) if name == "k_norm.bias" and not before else None
            assert_nmse(grads[name], wide(parameter.grad), bound, name, terms)


# ---- converted models ----------------------------------------------------------------------------


class LlamaRMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x):
        wider = x.float()
        normal = wider * torch.rsqrt(wider.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normal.to(x.dtype)


class OlmoRMSNorm(LlamaRMSNorm):
    def forward(self, x):
        wider = x.float()
        normal = wider * torch.rsqrt(wider.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * normal).to(x.dtype)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, LlamaRMSNorm, OlmoRMSNorm])
def test_converted_norms_keep_the_dtype_of_their_output(device, kind):
    """Norms in fp32 among linear layers of 16 bits; after them comes what came before."""
    after = F32 if kind is LlamaRMSNorm else BF16
    linear = nn.Linear(FEATURES, FEATURES, dtype=after)
    model = randomise(nn.Sequential(kind(FEATURES), linear))
    x = torch.randn(TOKENS, FEATURES, dtype=BF16)
    expected = model(x).detach()  # on a GPU torch's LayerNorm takes one dtype
    te.convert(model.to(device))
    x = x.to(device)
    assert isinstance(model[0], te.LayerNorm | te.RMSNorm) and isinstance(model[1], te.Linear)
    out, _, grads = step(model, x, after)
    assert out.dtype == expected.dtype and grads["x"].dtype == BF16
    assert_nmse(out, wide(expected), tol("chain", BF16, FEATURES))
    back = te.convert(model, to="torch")
    assert type(back[1]) is nn.Linear and "follows_input" not in vars(back[0])
