# SPDX-License-Identifier: Apache-2.0
"""Which implementation takes a call of a module, what it raises and returns, and casts."""

import copy

import pytest
import torch
from comparators import assert_bits
from plugged import (
    FFN,
    HIDDEN,
    RECAST,
    RECIPES,
    SAME,
    TOKENS,
    Recorded,
    data,
    distance,
    made,
    native,
    ran,
    register,
    step,
)
from tols import BF16

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.plugin import core as plugin

pytestmark = pytest.mark.usefixtures("manager")

# ---- who takes a call ----------------------------------------------------------------------------


def test_one_that_does_not_take_a_call(device):
    """It is passed over; strict, that is an error."""
    recorded, module, x = Recorded(), made("RMSNorm", device), data(device)
    register("rmsnorm_fwd", recorded.forward, supports=lambda *args: False)
    wanted = module(x).detach()
    with plugin.with_preference("vendor"):
        assert_bits(module(x).detach(), wanted)
        with plugin.with_strict_mode(), pytest.raises(NotImplementedError, match=r"vendor\.test"):
            module(x)
    assert recorded.calls == []


def test_dtypes_that_it_supports(device):
    recorded = Recorded()
    register("rmsnorm_fwd", recorded.forward, supported_dtypes={"bfloat16"})
    with plugin.with_preference("vendor"):
        made("RMSNorm", device)(data(device))
        assert recorded.calls == []
        made("RMSNorm", device, BF16)(data(device, BF16))
    assert recorded.ways == ["forward"]


def test_an_order_of_one_operator(device):
    recorded = Recorded().register()
    policy = plugin.SelectionPolicy.from_dict(per_op_order={"rmsnorm_fwd": ["vendor:test"]})
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    with plugin.policy_context(policy):
        module(x).sum().backward()
    assert recorded.ways == ["forward"]  # the gradient has the order of all


@pytest.mark.parametrize("strict", [False, True])
def test_an_order_without_this_library(device, strict):
    """What none of its tokens names is not run, under modules either; the rest is as ever."""
    closed = {"rmsnorm_fwd": ["vendor:test"]}
    policy = plugin.SelectionPolicy.from_dict(per_op_order=closed, strict=strict)
    module, x = made("RMSNorm", device), data(device)
    with plugin.policy_context(policy):
        assert made("LayerNorm", device)(x).shape == x.shape
        with pytest.raises(RuntimeError, match="rmsnorm_fwd: no implementation can be called"):
            module(x)
        recorded = Recorded()
        register("rmsnorm_fwd", recorded.forward, supports=lambda x, *rest: len(x) == TOKENS)
        module(x)
        with pytest.raises(NotImplementedError, match=r"none that vendor\.test takes"):
            module(x[:3])
    assert recorded.ways == ["forward"]
    module(x[:3])


@pytest.mark.parametrize("name", ["LayerNormLinear", "LayerNormMLP"])
def test_amaxes_of_what_operators_compute(device, name):
    """Current scaling measures what norms and activations compute: by whoever has compute_amax."""
    module, x = made(name, device, BF16), data(device, BF16)
    other, sizes = copy.deepcopy(module), []
    wanted = step(other, x, recipes.Float8CurrentScaling)

    def largest(values, amax):
        sizes.append(values.shape[-1])
        native("compute_amax")(values, amax)

    register("compute_amax", largest)
    got = step(module, x, recipes.Float8CurrentScaling, plugin.with_preference("vendor"))
    for one, exact in zip(got, wanted, strict=True):
        assert_bits(one, exact)
    assert HIDDEN in sizes
    plugin.get_registry().unregister("compute_amax", "vendor.test")
    register("compute_amax", lambda values, amax: amax.fill_(2.0**40))
    wild = step(module, x, recipes.Float8CurrentScaling, plugin.with_preference("vendor"))
    assert float(wild[0].abs().max()) == 0.0 < float(wanted[0].abs().max())


def test_a_vendor_that_is_denied(device):
    recorded = Recorded().register()
    with plugin.with_preference("vendor"), plugin.with_denied_vendors("TEST"):
        made("RMSNorm", device)(data(device))
    assert recorded.calls == []


# ---- errors --------------------------------------------------------------------------------------


def test_what_it_raises(device):
    """The error itself, whose and of which call; nobody runs after it."""
    calls = []

    def fails(*args):
        calls.append(args)
        raise ZeroDivisionError("as asked")

    register("rmsnorm_fwd", fails)
    module, x = made("RMSNorm", device), data(device)
    with (
        plugin.with_preference("vendor"),
        pytest.raises(ZeroDivisionError, match="as asked") as e,
    ):
        module(x)
    notes = "\n".join(e.value.__notes__)
    assert "raised by vendor.test, an implementation of rmsnorm_fwd" in notes
    assert f"in te_norm: input f32 [{TOKENS}, {HIDDEN}]" in notes
    assert len(calls) == 1


WRONG = {
    "no tensor": (
        lambda inp, *args: ("y", None, inp.new_ones(inp.shape[0])),
        TypeError,
        "the result: str",
    ),
    "another shape": (
        lambda inp, *args: (inp[:1], None, inp.new_ones(inp.shape[0])),
        ValueError,
        r"the result: shape \(1, 64\)",
    ),
    "transposed": (
        lambda inp, *args: (inp.T.contiguous(), None, inp.new_ones(inp.shape[0])),
        ValueError,
        r"the result: shape \(64, 32\), expected \(32, 64\)",
    ),
    "no statistics": (lambda inp, *args: (inp, None, None), TypeError, "rsigma: NoneType"),
    "one result": (lambda inp, *args: inp, ValueError, "unpack"),
    "nothing": (lambda inp, *args: None, TypeError, "unpack"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_it_returns(device, case):
    fn, kind, match = WRONG[case]
    register("rmsnorm_fwd", fn)
    x = data(device).requires_grad_()
    with plugin.with_preference("vendor"), pytest.raises(kind, match=match) as error:
        made("RMSNorm", device)(x)
    assert "in what came from vendor.test (rmsnorm_fwd)" in error.value.__notes__


def test_a_cast_of_another_format(device):
    quantizer = te.MXFP8Quantizer(te.DType.kFloat8E4M3)
    register("quantize", lambda tensor, *args: quantizer(tensor))
    module, x = made("Linear", device), data(device)
    with (
        plugin.with_preference("vendor"),
        te.autocast(recipe=recipes.Float8RowScaling()),
        pytest.raises(TypeError, match="expected a Float8RowTensor"),
    ):
        module(x)


# ---- casts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "plain"])
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP"])
def test_quantize_alone(device, name, recipe):
    """Casts that norms and activations do in one pass are made by `quantize`, too."""
    asked = []
    own = native("quantize")

    def quantize(tensor, quantizer, output=None, noop=None):
        asked.append(type(quantizer).__name__)
        return own(tensor, quantizer)  # a new tensor: it is copied

    module, x = made(name, device), data(device)
    other = copy.deepcopy(module)
    wanted = step(module, x, RECIPES[recipe])
    register("quantize", quantize)
    got = step(other, x, RECIPES[recipe], plugin.with_preference("vendor"))
    assert len(asked) >= 3 * (1 if name == "Linear" else 2)
    for one, exact in zip(got, wanted, strict=True):
        if recipe == "current":  # it measures values that were computed, not their partial maxima
            assert distance(one, exact) < RECAST
        else:
            assert_bits(one, exact)


def test_column_sums_with_a_cast(device):
    """The gradient of a bias comes with the cast of the gradient of the output."""
    asked = []
    own = native("bgrad_quantize")

    def bgrad_quantize(input, quantizer):
        asked.append(tuple(input.shape))
        return own(input, quantizer)

    module, x = made("Linear", device), data(device)
    other = copy.deepcopy(module)
    wanted = step(module, x, recipes.Float8BlockScaling)
    register("bgrad_quantize", bgrad_quantize)
    vendor = plugin.with_preference("vendor")
    for one, exact in zip(step(other, x, recipes.Float8BlockScaling, vendor), wanted, strict=True):
        assert_bits(one, exact)
    assert asked == [(TOKENS, 48)]


def test_delayed_scaling_learns_from_it(device):
    """Amaxes of an implementation that records them reach the module's history."""
    module, x = made("Linear", device), data(device)
    other = copy.deepcopy(module)
    register("quantize", lambda tensor, quantizer, *rest: native("quantize")(tensor, quantizer))
    for _ in range(3):
        wanted = step(module, x, recipes.DelayedScaling)
        got = step(other, x, recipes.DelayedScaling, plugin.with_preference("vendor"))
    for one, exact in zip(got, wanted, strict=True):
        assert_bits(one, exact)
    scales = module.fp8_meta["scaling_fwd"].scale
    assert float(scales[0]) != 1.0
    assert torch.equal(other.fp8_meta["scaling_fwd"].scale, scales)


# ---- rotary embeddings ---------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("fused", [True, False], ids=["one projection", "three"])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_rotary_embeddings(device, form, fused, groups, interleaved):
    """Queries and keys, where they lie: heads of a projection side by side."""
    options = {"num_gqa_groups": groups, "fuse_qkv_params": fused, "attn_input_format": form}
    module = te.TransformerLayer(
        HIDDEN, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, device=device,
        rotary_pos_interleaved=interleaved, **options,
    )  # fmt: skip
    other, x = copy.deepcopy(module), data(device)
    freqs = te.RotaryPositionEmbedding(12, interleaved=interleaved)(TOKENS).to(device)

    def with_angles(layer, x):
        return layer(x, rotary_pos_emb=freqs)

    wanted = step(module, x, wrap=with_angles)
    for op in ("fused_rope_forward", "fused_rope_backward"):
        fn = native(op)
        register(op, lambda *args, fn=fn: fn(*args))
    before = plugins.counts()
    got = step(other, x, None, plugin.with_preference("vendor"), with_angles)
    assert ran(before) == {
        "fused_rope_forward/vendor.test": 2,
        "fused_rope_backward/vendor.test": 2,
    }
    for one, exact in zip(got, wanted, strict=True):
        assert_bits(one, exact)
    plugin.get_registry().unregister("fused_rope_forward", "vendor.test")
    register("fused_rope_forward", lambda t, *rest: t * 0)
    with plugin.with_preference("vendor"):
        changed = other(x, rotary_pos_emb=freqs)
    assert distance(changed, wanted[0]) > SAME
