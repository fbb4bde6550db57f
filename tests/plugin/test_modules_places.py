# SPDX-License-Identifier: Apache-2.0
"""Where implementations put results: places by `out`, and casts by the quantizer of a call."""

import contextlib
import copy

import pytest
import torch
from plugged import FFN, HIDDEN, RECIPES, TOKENS, data, distance, made, native, register, same, step
from tols import BF16, F32, tol

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine import _core
from transformer_engine.plugin import adapters, core as plugin
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

pytestmark = pytest.mark.usefixtures("manager")

FUSED = sorted(set(RECIPES) - {"plain", "current", "nvfp4"})
"""Recipes whose casts need no amax before."""


def recording(op, fn):
    """Register `fn` for an operator, as it is; returns the keyword arguments of its calls."""
    seen = []

    def run(*args, out=None):
        seen.append((args, out))
        return fn(*args, out=out)

    register(op, run)
    return seen


# ---- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_results_go_to_their_places(device, name):
    """What is written there is not copied: the results are the places themselves."""
    kept = {}
    for op in (f"{name.lower()}_fwd", f"{name.lower()}_bwd"):
        own = native(op)

        def placed(*args, out=None, own=own, op=op):
            made = own(*args, out=out)
            pairs = zip(made, out, strict=True)
            kept[op] = [(a.data_ptr(), b.data_ptr()) for a, b in pairs if b is not None]
            return made

        register(op, placed)
    module, x = made(name, device), data(device)
    wanted = step(copy.deepcopy(module), x)
    got = step(module, x, policy=plugin.with_preference("vendor"))
    same(got, wanted)
    statistics = 2 if name == "LayerNorm" else 1
    assert len(kept[f"{name.lower()}_fwd"]) == 1 + statistics
    assert len(kept[f"{name.lower()}_bwd"]) == 1 + statistics  # gradients of x, gamma (and beta)
    assert all(ours == place for pairs in kept.values() for ours, place in pairs)


@pytest.mark.parametrize("kind", ["none", "any keyword", "positional"])
def test_who_is_given_no_places(device, kind):
    """What does not name `out` as a keyword of its own is called as the signature has it."""
    own, seen = native("rmsnorm_fwd"), []

    def none(*args):
        seen.append(len(args))
        return own(*args)

    def any_keyword(*args, **kwargs):
        assert not kwargs
        return none(*args)

    def positional(a, b, c, d, e, f, g, h, out="not given"):
        assert out == "not given"
        return none(a, b, c, d, e, f, g, h)

    functions = {"none": none, "any keyword": any_keyword, "positional": positional}
    register("rmsnorm_fwd", functions[kind])
    module, x = made("RMSNorm", device), data(device)
    wanted = step(copy.deepcopy(module), x)
    same(step(module, x, policy=plugin.with_preference("vendor")), wanted)
    assert seen == [8]


def test_supports_is_given_no_places(device):
    own, asked = native("rmsnorm_fwd"), []

    def supports(*args, **kwargs):
        asked.append((len(args), kwargs))
        return True

    register("rmsnorm_fwd", lambda *args, out=None: own(*args, out=out), supports=supports)
    step(made("RMSNorm", device), data(device), policy=plugin.with_preference("vendor"))
    assert asked == [(8, {})]


def test_places_may_be_ignored(device):
    """Results elsewhere, of other dtypes, are copied."""
    forward, backward = native("rmsnorm_fwd"), native("rmsnorm_bwd")

    def elsewhere(*args, out=None):
        return tuple(t if t is None else t.clone() for t in forward(*args[:3], None, *args[4:]))

    def in_fp32(dy, x, *rest, out=None):
        return backward(dy.float(), x.float(), *rest)

    register("rmsnorm_fwd", elsewhere)
    register("rmsnorm_bwd", in_fp32)
    module, x = made("RMSNorm", device, BF16), data(device, BF16)
    wanted = step(copy.deepcopy(module), x)
    same(step(module, x, policy=plugin.with_preference("vendor")), wanted)


def test_a_residual_has_its_own_operator(device):
    """`rmsnorm_bwd_add` writes the sum to its place; without it the module adds, with less."""
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "RMSNorm"}
    layer = te.TransformerLayer(HIDDEN, FFN, 4, params_dtype=BF16, device=device, **options)
    x = data(device, BF16)  # which attention of every device takes, so the layer is one plan
    wanted = step(copy.deepcopy(layer), x)
    plain = recording("rmsnorm_bwd", native("rmsnorm_bwd"))
    got = step(copy.deepcopy(layer), x, policy=plugin.with_preference("vendor"))
    assert len(plain) == 2
    for one, exact in zip(got, wanted, strict=True):  # a sum that is rounded twice
        assert distance(one, exact) < tol("chain", BF16, HIDDEN)
    adding = recording("rmsnorm_bwd_add", native("rmsnorm_bwd_add"))
    plain.clear()
    same(step(layer, x, policy=plugin.with_preference("vendor")), wanted)
    assert len(adding) == 2 and not plain


@pytest.mark.parametrize("kind", ["gelu", "swiglu", "clamped_swiglu"])
def test_activations_have_places(device, kind):
    """Gradients have none where they go to the memory of what they are made of."""
    module = te.LayerNormMLP(HIDDEN, FFN, activation=kind, params_dtype=F32, device=device)
    x = data(device)
    wanted = step(copy.deepcopy(module), x)
    back = "clamped_dswiglu" if kind == "clamped_swiglu" else f"d{kind}"
    ops = [op for op in (kind, back, f"dbias_{back}") if op in adapters.PLACED]
    calls = {op: recording(op, native(op)) for op in ops}
    same(step(module, x, policy=plugin.with_preference("vendor")), wanted)
    (_, (place,)) = calls[kind][0]
    assert place.shape == (TOKENS, FFN) and place.dtype == F32
    assert sum(len(calls[op]) for op in ops) == 2


# ---- casts ---------------------------------------------------------------------------------------


def casting(how):
    """A norm that is given a quantizer, and casts as `how` says."""
    own = native("rmsnorm_fwd")

    def norm(x, weight, eps, ln_out, quantizer, otype, *rest, out=None):
        y, none, rsigma = own(x, weight, eps, None, None, otype, *rest)
        seen.append(quantizer)
        if quantizer is None or how == "leaves it":
            return y, none, rsigma
        if how != "in its place":  # a storage, as modules use them, or a tensor of torch
            quantizer.internal = how == "a new storage"
            made = quantizer(y)
            assert isinstance(made, torch.Tensor) == (how == "a new tensor")
            return made, none, rsigma
        assert out[0] is ln_out
        assert isinstance(ln_out, QuantizedTensorStorage) and not isinstance(ln_out, torch.Tensor)
        return tex.quantize(y, quantizer, ln_out), none, rsigma

    seen = []
    register("rmsnorm_fwd", norm)
    return seen


@pytest.mark.parametrize("how", ["leaves it", "a new storage", "a new tensor", "in its place"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_norms_are_given_quantizers(device, recipe, how):
    """Whoever casts: the bits are those of the fused cast, and so are amaxes and scales."""
    module, x = made("LayerNormLinear", device, BF16), data(device, BF16)
    other = copy.deepcopy(module)
    seen = casting(how)
    for _ in range(3):  # scales of the next step
        wanted = step(other, x, RECIPES[recipe])
        same(step(module, x, RECIPES[recipe], plugin.with_preference("vendor")), wanted)
        x = x * 1.5
    if recipe == "delayed":
        scale = other.fp8_meta["scaling_fwd"].scale
        assert torch.equal(module.fp8_meta["scaling_fwd"].scale, scale) and scale[0] != 1.0
    assert all(each is not None for each in seen) == (recipe in FUSED)


def test_amaxes_of_several_calls(device):
    """A cast raises the amax that is there: of calls in one region the largest counts."""
    module, x = made("LayerNormLinear", device, BF16), data(device, BF16)
    other = copy.deepcopy(module)
    casting("in its place")
    for layer, policy in ((other, "flagos"), (module, "vendor")):
        torch.nn.init.constant_(layer.layer_norm_weight, 1.0)
        with plugin.with_preference(policy), te.autocast(recipe=RECIPES["delayed"]()):
            for factor in (4.0, 1.0):
                with torch.no_grad():
                    layer.layer_norm_weight.fill_(factor)
                layer(x)
    history = other.fp8_meta["scaling_fwd"].amax_history
    assert torch.equal(module.fp8_meta["scaling_fwd"].amax_history, history)
    assert float(history.max()) > 4.0


@pytest.mark.parametrize("recipe", FUSED)
def test_native_norms_cast_in_one_pass(device, recipe):
    """`default.native`, called by a plug-in with what it is given, casts nothing by itself."""
    recording("rmsnorm_fwd", native("rmsnorm_fwd"))
    module, x = made("LayerNormLinear", device, BF16), data(device, BF16)
    step(module, x, RECIPES[recipe])

    def casts(policy):
        before = _core.counters()
        with torch.no_grad(), te.autocast(recipe=RECIPES[recipe]()), policy:
            module(x)
        return {k: v - before.get(k, 0) for k, v in _core.counters().items() if "quantize" in k}

    assert casts(plugin.with_preference("vendor")) == casts(contextlib.nullcontext())
