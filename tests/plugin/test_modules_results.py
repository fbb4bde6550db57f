# SPDX-License-Identifier: Apache-2.0
"""What implementations return to modules: places, what only looks like them, and what is wrong."""

import copy

import pytest
import torch
from comparators import assert_bits
from plugged import HIDDEN, RECIPES, TOKENS, data, made, native, register, step
from plugged_attention import BACKWARD, Attention
from tols import F16, F32

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine import _core
from transformer_engine.common import recipe as recipes
from transformer_engine.plugin import core as plugin

pytestmark = pytest.mark.usefixtures("manager")


def vendor():
    return plugin.with_preference("vendor")


def square(device):
    """A product whose result is as wide as it has rows."""
    return te.Linear(HIDDEN, TOKENS, bias=False, device=device), data(device).flatten(0, 1)


# ---- views of places -----------------------------------------------------------------------------

VIEWS = {
    "transposed": lambda y: y.T,
    "one row": lambda y: y[:1].expand(y.shape),
    "one column": lambda y: y[:, :1].expand(y.shape),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_the_place(device, view):
    """They begin where the place does, and are other values."""
    module, x = square(device)
    wanted = VIEWS[view](module(x).detach())

    def gemm(*args):
        result, *rest = native("generic_gemm")(*args)
        assert result is args[4]
        return VIEWS[view](result), *rest

    register("generic_gemm", gemm)
    with vendor():
        assert_bits(module(x).detach(), wanted)


@pytest.mark.parametrize("form", [lambda y: y.view(2, -1, y.shape[-1]), lambda y: y[:]])
def test_the_place_in_another_form(device, form):
    """Is the place: nothing is copied."""
    module, x = square(device)
    wanted = module(x).detach()

    def gemm(*args):
        result, *rest = native("generic_gemm")(*args)
        return form(result), *rest

    register("generic_gemm", gemm)
    with vendor():
        assert_bits(module(x).detach(), wanted)


def test_statistics_as_a_matrix(device):
    """A column of them is; another one has them in an order of its own."""
    own, shape = native("rmsnorm_fwd"), [-1, 1]

    def rmsnorm(*args):
        y, mu, rsigma = own(*args)
        return y, mu, rsigma.view(*shape)

    register("rmsnorm_fwd", rmsnorm)
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    with vendor():
        module(x)
        module(x[:0])
        shape[1] = 2
        with pytest.raises(ValueError, match=rf"rsigma: shape \({TOKENS // 2}, 2\), expected"):
            module(x)


# ---- numbers of another kind ---------------------------------------------------------------------

KINDS = {
    "integers": (lambda y: y.int(), TypeError, "the result: torch.int32, expected torch.float32"),
    "bool": (lambda y: y > 0, TypeError, "the result: torch.bool"),
    "complex": (lambda y: y.to(torch.complex64), TypeError, "the result: torch.complex64"),
    "nowhere": (lambda y: y.to("meta"), ValueError, "the result: on meta, expected c"),
    "not taken": (lambda y: NotImplemented, TypeError, "vendor.test returned NotImplemented"),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_results_of_another_kind(device, kind, strict):
    change, error, match = KINDS[kind]

    def gemm(*args):
        result, *rest = native("generic_gemm")(*args)
        changed = change(result)
        return changed if changed is NotImplemented else (changed, *rest)

    register("generic_gemm", gemm)
    module, x = square(device)
    policy = plugin.SelectionPolicy(prefer="vendor", strict=strict)
    with plugin.policy_context(policy), pytest.raises(error, match=match):
        module(x)


def test_an_operator_that_returns_not_implemented():
    """Nobody else runs, for it has begun; and nobody takes that for a result."""
    register("silu", lambda *args: NotImplemented)
    with vendor(), pytest.raises(TypeError, match="silu: vendor.test returned NotImplemented"):
        tex.silu(torch.ones(2, 4), None)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_gradients_of_attention_that_are_missing(device, dtype, count):
    own = native(BACKWARD)
    register(BACKWARD, lambda *args: own(*args)[:count])
    with pytest.raises(ValueError, match=f"{BACKWARD}: {count} gradients, expected dQ, dK, dV"):
        Attention("causal", device, dtype).step(vendor())


# ---- casts ---------------------------------------------------------------------------------------


def quantizer_like(quantizer):
    """Of the other eight-bit dtype."""
    other = quantizer.copy()
    other.dtype = te.DType.kFloat8E5M2
    return other


@pytest.mark.parametrize("recipe", ["current", "block", "row", "mxfp8"])
def test_codes_of_another_dtype(device, recipe):
    own = native("quantize")
    register("quantize", lambda tensor, quantizer, *rest: own(tensor, quantizer_like(quantizer)))
    module, x = made("Linear", device), data(device)
    match = r"quantize: the result: _fp8_dtype=.*E5M2.*, expected .*E4M3"
    with vendor(), te.autocast(recipe=RECIPES[recipe]()), pytest.raises(ValueError, match=match):
        module(x)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "plain"])
def test_casts_of_another_shape(device, recipe):
    """Of as many values."""
    own = native("quantize")
    register("quantize", lambda tensor, quantizer, *rest: own(tensor.T.contiguous(), quantizer))
    module, x = made("Linear", device), data(device)
    match = r"quantize: the result: shape \(\d+, \d+\), expected \(\d+, \d+\)"
    with vendor(), te.autocast(recipe=RECIPES[recipe]()), pytest.raises(ValueError, match=match):
        module(x)


@pytest.mark.parametrize("sums", [lambda s: s.sum(), lambda s: s[:1], lambda s: None])
def test_column_sums_of_another_shape(device, sums):
    """They are not spread over the gradient of the bias."""
    own = native("bgrad_quantize")

    def bgrad_quantize(*args):
        total, result = own(*args)
        return sums(total), result

    register("bgrad_quantize", bgrad_quantize)
    match = "bgrad_quantize: the gradient of the bias"
    with pytest.raises((TypeError, ValueError), match=match):
        step(made("Linear", device), data(device), recipes.Float8BlockScaling, vendor())


# ---- what is around a call -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["current", "row"])
def test_regions_of_autocast_change_no_sum(device, recipe):
    """An implementation in torch multiplies in the dtypes that it is given, or makes."""
    seen = []
    own = native("generic_gemm")

    def gemm(*args):
        one, other = torch.ones(2, 2, device=device), torch.ones(2, 2, device=device)
        seen.append(((one @ other).dtype, torch.is_autocast_enabled(one.device.type)))
        return own(*args)

    register("generic_gemm", gemm)
    kind = torch.device(device).type
    with torch.autocast(kind, dtype=torch.bfloat16):
        step(made("Linear", device), data(device), RECIPES[recipe], vendor())
        assert torch.is_autocast_enabled(kind)
    assert seen == [(F32, False)] * 3


@pytest.mark.parametrize("op", ["generic_gemm", "fused_attn_fwd", "fused_attn_bwd"])
def test_the_reference_in_a_region_of_autocast(device, op):
    """It is the definition, in fp32, there, too."""
    own = plugin.get_registry().get_implementation(op, "reference.torch").fn
    kind = torch.device(device).type

    def run(*args):
        with torch.autocast(kind, dtype=torch.bfloat16):
            return own(*args)

    report = plugins.check(run, op, device=device, dtypes=[F32])
    assert report.passed, str(report)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("impl_id", ["default.native", "reference.torch"])
@pytest.mark.parametrize(
    "op",
    ["fused_attn_fwd", "fused_attn_bwd", "fp8_block_scaling_compute_partial_amax", "dropout_fwd"],
)
def test_another_default_dtype(device, op, impl_id, default):
    """Statistics, sinks and amaxes are fp32, whatever dtype a program gives its parameters."""
    own = plugin.get_registry().get_implementation(op, impl_id).fn

    def run(*args):
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            return own(*args)
        finally:
            torch.set_default_dtype(before)

    report = plugins.check(run, op, device=device, dtypes=[F32, F16])  # cuDNN has 16 bits alone
    assert report.passed, str(report)


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_casts_under_another_default_dtype(device, recipe):
    own = native("quantize")
    register("quantize", lambda *args: own(*args))
    module, x = made("Linear", device), data(device)
    other = copy.deepcopy(module)
    torch.set_default_dtype(torch.bfloat16)
    try:
        wanted = step(module, x, RECIPES[recipe])
        got = step(other, x, RECIPES[recipe], vendor())
    finally:
        torch.set_default_dtype(F32)
    for one, exact in zip(got, wanted, strict=True):
        assert_bits(one, exact)


# ---- calls that an operator can not be told ------------------------------------------------------


@pytest.mark.parametrize("op", ["clamped_swiglu", "clamped_dswiglu"])
def test_an_offset_that_has_no_argument(device, op):
    """Of the clamped SwiGLU: it is this library's, under a strict policy an error."""
    own = native(op)
    register(op, lambda *args: own(*args))
    params = {"glu_linear_offset": 0.5}
    module = te.LayerNormMLP(
        HIDDEN, 96, activation="clamped_swiglu", activation_params=params, device=device
    )
    other, x = copy.deepcopy(module), data(device)
    wanted = step(module, x)
    for one, exact in zip(step(other, x, None, vendor()), wanted, strict=True):
        assert_bits(one, exact)
    assert f"{op}/vendor.test" not in plugins.counts()
    order = plugin.SelectionPolicy.from_dict(strict=True, per_op_order={op: ["vendor:test"]})
    with pytest.raises(NotImplementedError, match=f"{op}: the call is none that vendor.test"):
        step(other, x, None, plugin.policy_context(order))


PAIRS = {
    "rmsnorm_bwd_add": (
        "rmsnorm_bwd",
        None,
        lambda **o: te.TransformerLayer(
            HIDDEN, 96, 4, normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0, **o
        ),
    ),
    "dbias_dgelu": (
        "dgelu",
        recipes.Float8BlockScaling,
        lambda **o: te.LayerNormMLP(HIDDEN, 96, **o),
    ),
    "bgrad_quantize": (
        "quantize",
        recipes.Float8BlockScaling,
        lambda **o: te.Linear(HIDDEN, 48, **o),
    ),
}


@pytest.mark.parametrize("op", PAIRS)
def test_another_operator_takes_the_call(device, op):
    """That is no refusal, though the first one has; it is where nobody takes the other, either."""
    other, recipe, make = PAIRS[op]
    own = native(other)
    register(op, native(op), supports=lambda *args, **named: False)
    register(other, lambda *args: own(*args))
    strict = plugin.SelectionPolicy(prefer="vendor", strict=True)
    step(make(device=device), data(device), recipe, plugin.policy_context(strict))
    counts = plugins.counts()
    assert counts[f"{other}/vendor.test"] > 0
    assert f"{op}/vendor.test" not in counts
    plugin.get_registry().unregister(other, "vendor.test")
    register(other, own, supports=lambda *args, **named: False)
    with pytest.raises(NotImplementedError, match=f"{other}: the call is none that vendor.test"):
        step(make(device=device), data(device), recipe, plugin.policy_context(strict))


def test_another_softmax_takes_the_call(device):
    """Of as many queries as keys either causal mask is that of the other."""
    name = "scaled_upper_triang_masked_softmax_forward"
    other = "scaled_aligned_causal_masked_softmax_forward"
    register(name, native(name), supports=lambda *args: False)
    register(other, native(other))
    scores = torch.randn(1, 2, 4, 4, device=device)
    made, softmax = torch.empty_like(scores), _core.obeying("softmax")
    with plugin.policy_context(plugin.SelectionPolicy(prefer="vendor", strict=True)):
        softmax(scores, output=made, scale=1.0, window_right=0, window_left=-1)
    assert plugins.counts() == {f"{other}/vendor.test": 1}
    assert_bits(made, native(other)(scores, 1.0))
