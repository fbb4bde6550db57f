# SPDX-License-Identifier: Apache-2.0
"""Modules run what the registry selects: norms, activations, GEMMs and casts, in every way."""

import contextlib
import copy
import os
import subprocess
import sys
import textwrap
import threading
from functools import partial

import pytest
import torch
from comparators import assert_bits
from tols import BF16, E4M3, F32, PASSED_ON, tol
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common import recipe as recipes
from transformer_engine.plugin import core as plugin
from transformer_engine.plugin import slots

TOKENS, HIDDEN, FFN = 32, 64, 128
RECIPES = {
    "plain": None,
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "row": recipes.Float8RowScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    # Random numbers of a cast by itself are others than those of a plan.
    "nvfp4": partial(recipes.NVFP4BlockScaling, disable_stochastic_rounding=True),
}
MODULES = {
    "LayerNorm": lambda **o: te.LayerNorm(HIDDEN, **o),
    "RMSNorm": lambda **o: te.RMSNorm(HIDDEN, zero_centered_gamma=True, **o),
    "Linear": lambda **o: te.Linear(HIDDEN, 48, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(HIDDEN, 48, normalization="RMSNorm", **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(HIDDEN, FFN, **o),
    "gated": lambda **o: te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", **o),
    "TransformerLayer": lambda **o: te.TransformerLayer(
        HIDDEN, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, **o
    ),
}
NAMES = {
    "LayerNorm": {"layernorm_fwd", "layernorm_bwd"},
    "RMSNorm": {"rmsnorm_fwd", "rmsnorm_bwd"},
    "Linear": {"generic_gemm"},
    "LayerNormLinear": {"rmsnorm_fwd", "rmsnorm_bwd", "generic_gemm"},
    "LayerNormMLP": {"layernorm_fwd", "layernorm_bwd", "generic_gemm"},
    "gated": {"layernorm_fwd", "layernorm_bwd", "generic_gemm", "swiglu", "dswiglu"},
    "TransformerLayer": {"layernorm_fwd", "layernorm_bwd", "generic_gemm"},
}
KIND = plugin.BackendImplKind


@pytest.fixture(autouse=True)
def manager():
    """A manager of the process that this test alone changes."""
    plugin.reset_default_manager()
    made = plugin.get_default_manager()
    made.ensure_initialized()
    yield made
    plugin.reset_default_manager()
    plugin.reset_global_policy()


def register(op, fn, **options):
    impl = plugin.OpImpl(op, "vendor.test", KIND.VENDOR, fn, vendor="test", **options)
    plugin.get_registry().register(impl)
    return impl


def native(op):
    """Implementation of this library."""
    return plugin.get_registry().get_implementation(op, slots.NATIVE).fn


def made(name, device, dtype=F32, **options):
    return MODULES[name](params_dtype=dtype, device=device, **options)


def data(device, dtype=F32):
    return torch.randn(TOKENS // 2, 2, HIDDEN, device=device).to(dtype)


def step(module, x, recipe=None, policy=None, wrap=None, outside=True):
    """Results and gradients of a step; its backward outside of the policy, where it has ended."""
    x = x.detach().clone().requires_grad_()
    region = te.autocast(enabled=recipe is not None, recipe=recipe and recipe())
    torch.manual_seed(7)
    with policy or contextlib.nullcontext(), region:
        y = module(x) if wrap is None else wrap(module, x)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    loss = (y.float() * weights.sin()).sum()
    if outside:
        loss.backward()
    found = [y.detach(), x.grad, *(p.grad for p in parameters(module))]
    for parameter in parameters(module):
        parameter.grad = None
    return found


def parameters(module):
    return list(getattr(module, "_orig_mod", module).parameters())


def ran(before):
    """Implementations that ran since, and how often, without this library's own."""
    now = plugins.counts()
    return {
        key: now[key] - before.get(key, 0)
        for key in now
        if now[key] > before.get(key, 0) and not key.endswith(slots.NATIVE)
    }


def distance(got, wanted):
    """Mean square of the error, relative but of what is 0 save for rounding.

    That is the gradient of a key's bias. Values of these programs are of the order of 1.
    """
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).square().mean() / wanted.square().mean().clamp(min=2.0**-12))


SAME = tol("chain", F32, FFN)
"""Of two ways to compute a step in fp32."""
RECAST = PASSED_ON * tol("recast", E4M3) / (TOKENS * HIDDEN)
"""Of two in FP8: values whose last bits differ fall to two sides of a boundary now and then."""


def bound_of(recipe):
    """NVFP4's codes are four times as far apart."""
    return {"plain": SAME, "nvfp4": 16 * RECAST}.get(recipe, RECAST)


def unsteadiness(module, x, recipe, wanted):
    """How far each result of a step moves where its input changes as much as sums do on a device.

    Tensor cores add products of FP8 in 14 bits, so codes of what they make are others in some
    places than those of exact sums; gradients of biases are sums that cancel, more or less.
    """
    moved = [0.0] * len(wanted)
    for _ in range(4):
        near = x * (1.0 + torch.randn_like(x) * 2.0**-12)
        found = step(copy.deepcopy(module), near, recipe)
        pairs = zip(found, wanted, moved, strict=True)
        moved = [max(distance(one, exact), most) for one, exact, most in pairs]
    return moved


# ---- what runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_by_the_reference(device, name, recipe):
    """The definitions in torch, in place of all kernels that have one.

    Sums in another order change fp32's last bits, and by those now and then a code.
    """
    if RECIPES[recipe] is not None and name.endswith("Norm"):
        pytest.skip("a norm by itself quantizes nothing")
    module, x = made(name, device), data(device)
    other, third = copy.deepcopy(module), copy.deepcopy(module)
    wanted = step(module, x, RECIPES[recipe])
    before = plugins.counts()
    got = step(other, x, RECIPES[recipe], plugin.with_preference("reference"))
    done = ran(before)
    assert {key.split("/")[0] for key in done} >= NAMES[name]
    assert all(key.endswith("/reference.torch") for key in done)
    moved = [0.0] * len(wanted)
    if x.is_cuda and RECIPES[recipe] is not None:
        moved = unsteadiness(third, x, RECIPES[recipe], wanted)
    for one, exact, most in zip(got, wanted, moved, strict=True):
        assert distance(one, exact) < bound_of(recipe) + 8 * most


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "gated", "LayerNormMLP"])
def test_delegating_changes_no_bit(device, name, recipe):
    """Implementations that call this library's own: arguments and results come through exactly."""
    for op in slots.OPERATORS - {"bgrad_quantize"}:
        fn = native(op)
        register(op, lambda *args, fn=fn, **kwargs: fn(*args, **kwargs))
    module, x = made(name, device), data(device)
    other = copy.deepcopy(module)
    wanted = step(module, x, RECIPES[recipe])
    before = plugins.counts()
    got = step(other, x, RECIPES[recipe], plugin.with_preference("vendor"))
    done = ran(before)
    if RECIPES[recipe] is not None:
        assert done.get("quantize/vendor.test", 0) >= 3  # input, weight, gradient
    assert done["generic_gemm/vendor.test"] >= 3
    # cuBLASLt may choose another algorithm without its epilogues; a plain bias is torch's sum.
    exact = device == "cpu"
    for one, other_one in zip(got, wanted, strict=True):
        if exact and recipe not in ("plain", "current"):
            assert_bits(one, other_one)
        else:
            assert distance(one, other_one) < bound_of(recipe)


def shifted(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    """RMSNorm and one more: results show that it ran."""
    inp = input.float()
    rsigma = (inp.square().mean(-1) + eps).rsqrt()
    factor = weight.float() + 1 if zero_centered_gamma else weight.float()
    return (inp * rsigma[..., None] * factor + 1).to(otype), None, rsigma


class Recorded:
    """Implementations of RMSNorm that note what they are asked, and in which thread."""

    def __init__(self):
        self.calls = []

    def forward(self, *args):
        self.calls.append(("forward", threading.get_ident()))
        return shifted(*args)

    def backward(self, dy, x, rsigma, gamma, sm_margin=0, zero_centered_gamma=False, eps=1e-5):
        self.calls.append(("backward", threading.get_ident()))
        return torch.full_like(x, 3.0), torch.full_like(gamma, 5.0)

    @property
    def ways(self):
        return [way for way, _ in self.calls]

    def register(self):
        register("rmsnorm_fwd", self.forward)
        register("rmsnorm_bwd", self.backward)
        return self


def reentrant(module, x):
    return torch_checkpoint(module, x, use_reentrant=True)


def not_reentrant(module, x):
    return torch_checkpoint(module, x, use_reentrant=False)


WAYS = {
    "eager": None,
    "te checkpoint": lambda module, x: te.checkpoint(module, x),
    "te checkpoint, not reentrant": lambda m, x: te.checkpoint(m, x, use_reentrant=False),
    "torch checkpoint": reentrant,
    "torch checkpoint, not reentrant": not_reentrant,
    "vjp": "vjp",
    "compiled": "compiled",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_is_of_its_forward(device, way):
    """The policy has ended when the backward runs."""
    module, x = made("RMSNorm", device), data(device)
    wanted = step(module, x)
    recorded = Recorded().register()
    wrap, call = WAYS[way], module
    if wrap == "compiled":
        call, wrap = torch.compile(module, fullgraph=True), None
        first = step(call, x)
        assert recorded.calls == []
        assert distance(first[1], wanted[1]) < SAME
    if wrap == "vjp":
        with plugin.with_preference("vendor"):
            y, back = torch.func.vjp(module, x)
        (grad,) = back(torch.ones_like(y))
    else:
        y, grad, gamma_grad = step(call, x, None, plugin.with_preference("vendor"), wrap)
        assert torch.equal(gamma_grad, torch.full_like(gamma_grad, 5.0))
    assert torch.equal(grad, torch.full_like(grad, 3.0))
    assert distance(y, wanted[0] + 1) < SAME
    assert recorded.ways == ["forward"] * (1 + ("checkpoint" in way)) + ["backward"]
    recorded.calls.clear()
    again = step(call, x, None, None, wrap if callable(wrap) else None)  # and nothing stays behind
    assert recorded.calls == []
    assert distance(again[0], wanted[0]) < SAME
    assert distance(again[1], wanted[1]) < SAME


@pytest.mark.parametrize("way", ["eager", "te checkpoint", "torch checkpoint, not reentrant"])
def test_a_native_forward_has_a_native_backward(device, way):
    """Whatever is in force, or was registered, when the backward runs."""
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    recorded = Recorded().register()
    wrap = WAYS[way] or (lambda module, x: module(x))
    with plugin.with_preference("flagos"):
        y = wrap(module, x)
    plugin.set_global_policy(plugin.SelectionPolicy(prefer="vendor"))
    y.sum().backward()
    assert recorded.calls == []


def test_registered_between_forward_and_backward(device):
    """Where nobody was obeyed: the manager itself is younger than the forward."""
    _core.obey(None)
    plugin.reset_default_manager()
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    y = module(x)
    plugin.set_global_policy(plugin.SelectionPolicy(prefer="vendor"))
    recorded = Recorded().register()
    y.sum().backward()
    assert recorded.calls == []
    module(x).sum().backward()
    assert recorded.ways == ["forward", "backward"]


def test_unregistered_between_forward_and_backward(device):
    recorded = Recorded().register()
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    with plugin.with_preference("vendor"):
        y = module(x)
    for op in ("rmsnorm_fwd", "rmsnorm_bwd"):
        plugin.get_registry().unregister(op, "vendor.test")
    y.sum().backward()
    assert recorded.ways == ["forward", "backward"]


def test_weight_gradients_that_were_put_off(device):
    """They are of their forward, too."""
    shapes = []
    own = native("generic_gemm")

    def gemm(*args):
        found = own(*args)
        shapes.append(tuple(found[0].shape))
        return found

    register("generic_gemm", gemm)
    module, x = te.Linear(HIDDEN, 48, device=device, delay_wgrad_compute=True), data(device)
    with plugin.with_preference("vendor"):
        y = module(x)
    y.sum().backward()
    before = len(shapes)
    module.backward_dw()
    assert shapes[before:] == [(48, HIDDEN)]


def test_unrelated_registrations_change_no_selection():
    Recorded().register()
    with plugin.with_preference("vendor"):
        number = _core.selection_number()
        assert number > 0
        plugin.get_registry().register(
            plugin.OpImpl("other", "vendor.test", KIND.VENDOR, print, vendor="test")
        )
        assert _core.selection_number() == number


def test_the_thread_of_a_policy(device):
    """A policy context is of its thread; a backward on another thread is of its forward."""
    recorded = Recorded().register()
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    with plugin.with_preference("vendor"):
        y = module(x)
        other = threading.Thread(target=lambda: module(x.detach()))
        other.start()
        other.join()
    assert recorded.ways == ["forward"]
    later = threading.Thread(target=lambda: y.sum().backward())
    later.start()
    later.join()
    assert recorded.ways == ["forward", "backward"]
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_a_graph_of_each_selection(device):
    """Registering, a global policy and a context each make another graph, and none is confused."""
    module, x = made("LayerNormLinear", device), data(device)
    compiled = torch.compile(module, fullgraph=True)
    first = step(compiled, x)
    recorded = Recorded().register()
    assert_bits(step(compiled, x)[0], first[0])
    plugin.set_global_policy(plugin.SelectionPolicy(prefer="vendor"))
    assert distance(step(compiled, x)[0], first[0]) > SAME
    assert recorded.ways == ["forward", "backward"]
    inside = step(compiled, x, None, plugin.with_preference("flagos"))
    assert_bits(inside[0], first[0])
    plugin.get_registry().unregister("rmsnorm_fwd", "vendor.test")
    assert_bits(step(compiled, x)[0], first[0])


def test_without_gradients(device):
    recorded = Recorded().register()
    module, x = made("RMSNorm", device), data(device)
    plain = module(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with plugin.with_preference("vendor"), mode():
            y = module(x)
        assert distance(y, plain + 1) < SAME
    assert recorded.ways == ["forward"] * 2


@pytest.mark.gpu
def test_captured():
    """A graph of the device holds what was selected when it was captured."""
    recorded = Recorded().register()
    module, x = made("RMSNorm", "cuda"), data("cuda")
    wanted = module(x).detach() + 1
    side = torch.cuda.Stream()
    with plugin.with_preference("vendor"), torch.no_grad():
        with torch.cuda.stream(side):
            module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
    graph.replay()
    assert distance(y, wanted) < SAME
    assert recorded.ways == ["forward"] * 2


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
}


@pytest.mark.parametrize("case", WRONG)
def test_what_it_returns(device, case):
    fn, kind, match = WRONG[case]
    register("rmsnorm_fwd", fn)
    x = data(device).requires_grad_()
    with plugin.with_preference("vendor"), pytest.raises(kind, match=match):
        made("RMSNorm", device)(x)


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


# ---- processes -----------------------------------------------------------------------------------

HEAD = """
import sys, torch
import transformer_engine.pytorch as te
from transformer_engine import _core
norm, x = te.RMSNorm(16), torch.ones(2, 16)
"""


def run(program, folder=None, **variables):
    environment = {**os.environ, **variables}
    if folder is not None:
        environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    code = HEAD + textwrap.dedent(program)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100, env=environment)


def test_nothing_is_loaded_where_nobody_asks():
    run("""
    norm(x)
    assert _core.selected() is None
    assert "transformer_engine.plugin" not in sys.modules
    """)


def test_a_preference_of_the_environment():
    run(
        """
        norm(x)
        from transformer_engine import plugin
        assert plugin.counts() == {"rmsnorm_fwd/reference.torch": 1}
        """,
        TE_FL_PREFER="reference",
    )


PLUGIN = """
import transformer_engine.pytorch as te  # at its top, as plug-ins do
from transformer_engine.plugin.core import BackendImplKind, OpImpl

def norm(input, weight, *args):
    return input * 0 + 2, None, input.new_ones(input.shape[0])

def register(registry):
    registry.register(
        OpImpl("rmsnorm_fwd", "vendor.mine", BackendImplKind.VENDOR, norm, vendor="mine"))
"""


def test_a_module_of_the_environment(tmp_path):
    """The first run of a module finds it, and again after a reset."""
    (tmp_path / "te_test_plugin.py").write_text(PLUGIN)
    run(
        """
        assert norm(x).eq(2).all()
        from transformer_engine.plugin import core
        core.reset_default_manager()
        assert norm(x).eq(2).all()
        """,
        tmp_path,
        TE_FL_PLUGIN_MODULES="te_test_plugin",
        TE_FL_PREFER="vendor",
    )


def test_changes_while_modules_run():
    run("""
    import itertools, threading, time
    from transformer_engine.plugin import core as plugin
    numbers, errors, end = itertools.count(), [], time.monotonic() + 2
    exact = norm(x).detach()

    def one_more(inp, weight, *args):
        return torch.full_like(inp, 2.0), None, inp.new_ones(inp.shape[0])

    def registers():
        name = f"vendor.{next(numbers)}"
        plugin.get_registry().register(plugin.OpImpl(
            "rmsnorm_fwd", name, plugin.BackendImplKind.VENDOR, one_more, vendor=name))
        plugin.get_registry().unregister("rmsnorm_fwd", name)

    def runs():
        y = norm(x)
        assert torch.equal(y, exact)
        with plugin.with_preference("vendor"):
            y = norm(x)
        assert torch.equal(y, exact) or y.eq(2).all()

    def loop(function):
        try:
            while time.monotonic() < end:
                function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(f,)) for f in [registers] * 2 + [runs] * 14]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not errors, errors
    """)
