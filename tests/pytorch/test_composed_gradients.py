# SPDX-License-Identifier: Apache-2.0
"""Which gradients LayerNormLinear and LayerNormMLP compute, where they put them, and when."""

import itertools

import pytest
import torch
from comparators import assert_nmse
from layer_reference import wide
from pytorch.helpers import (
    RECIPES,
    assert_same_bits,
    assert_same_gemm,
    counted,
    high_precision_bound,
    state_of,
)
from pytorch.module_reference import make, region
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine import _core

FP8 = [None, "delayed", "current"]
KINDS = ["linear", "gelu", "swiglu", "gelu-checkpoint"]
IN, WIDTH, ROWS = 32, 48, 16


def recipe_of(name):
    return None if name is None else RECIPES[name]()


def make_kind(kind, device, **options):
    kind, _, checkpoint = kind.partition("-")
    if checkpoint:
        options["checkpoint"] = True
    return make(kind, device, sizes=(IN, WIDTH), **options)


def outputs_of(module):
    return module._sizes()[-1][1]


def weights_of(module):
    return {f"{prefix}weight": getattr(module, f"{prefix}weight") for prefix in module.PARTS}


def count_of(gemms, recipe):
    assert (gemms.other if recipe else gemms.fp8) == 0
    return gemms.fp8 if recipe else gemms.other


# ---- which ---------------------------------------------------------------------------------------


def expected_gemms(module, needs):
    """GEMMs of a forward and the backward that `needs` asks for."""
    before = bool({"x", "layer_norm_weight", "layer_norm_bias"} & needs)
    count = 0
    for prefix in module.PARTS:
        count += 1 + before + (f"{prefix}weight" in needs)
        if module.checkpoint and prefix == "fc2_":
            count += before or "fc2_weight" in needs  # fc1 runs once more
        before = before or bool({f"{prefix}weight", f"{prefix}bias"} & needs)
    return count


def run_with(module, needs, recipe, data, steps=2):
    """Steps with gradients of `needs` only: (outputs and gradients by name, counts)."""
    te.reset()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in needs)
    trace, counts = [], []
    for _ in range(steps):  # the second one goes the short way
        module.zero_grad()
        x = data[0].clone().requires_grad_("x" in needs)
        with counted() as gemms:
            with region(recipe):
                outputs = module(x)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            wanted = [(o, g) for o, g in zip(outputs, data[1:], strict=True) if o.requires_grad]
            if wanted:
                torch.autograd.backward(*zip(*wanted, strict=True))
        counts.append(count_of(gemms, recipe))
        found = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
        found |= {"x": x.grad} | {n: p.grad for n, p in module.named_parameters()}
        trace.append(found)
    return trace, counts, [o.requires_grad for o in outputs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm-output"])
def test_every_set_of_wanted_gradients(device, kind, recipe, normed):
    """Each gradient has the bits it has among all; nothing else is computed or kept."""
    module = make_kind(kind, device, return_layernorm_output=normed)
    made = recipe_of(recipe)
    data = [torch.randn(ROWS, n, device=device) for n in (IN, outputs_of(module), IN)][: 2 + normed]
    names = ["x", *dict(module.named_parameters())]
    full, counts, _ = run_with(module, set(names), made, data)
    assert counts == [expected_gemms(module, set(names))] * 2
    norm_only = {"x", "layer_norm_weight", "layer_norm_bias"}
    for size in range(len(names)):
        for needs in map(set, itertools.combinations(names, size)):
            found, counts, requires_grad = run_with(module, needs, made, data)
            assert counts == [expected_gemms(module, needs)] * 2, needs
            assert requires_grad[0] == bool(needs), needs
            if normed:
                assert requires_grad[1] == bool(needs & norm_only), needs
            for mine, all_of_them in zip(found, full, strict=True):
                for name, value in mine.items():
                    if name not in needs and "output" not in name:
                        assert value is None, (needs, name)
                    elif name.endswith("bias") and recipe is None:  # another kernel sums it up
                        bound = 2 * tol("sum", torch.float32, ROWS)
                        assert_nmse(value, wide(all_of_them[name]), bound)
                    else:
                        what = f"{name} of {needs}"
                        assert_same_gemm(value, all_of_them[name], device, recipe, 2 * WIDTH, what)


# ---- where ---------------------------------------------------------------------------------------


class Pair:
    """Two modules with the same parameters, one with options, and data that both are given."""

    def __init__(self, kind, device, dtype=torch.float32, **options):
        self.plain = make_kind(kind, device, dtype=dtype)
        self.module = make_kind(kind, device, dtype=dtype, **options)
        if "parameters_split" not in options:
            self.module.load_state_dict(self.plain.state_dict())
            self.weights = weights_of(self.module)
        self.device, self.dtype = device, dtype

    def batch(self):
        sizes = (IN, outputs_of(self.plain))
        return [torch.randn(ROWS, n, device=self.device, dtype=self.dtype) for n in sizes]

    def main_grads(self, make, dtype=torch.float32):
        for weight in self.weights.values():
            weight.main_grad = make(weight.shape, device=self.device, dtype=dtype)

    def step(self, module, recipe, data, **call):
        """Forward and backward: (output, gradient of the input, those of norm and biases)."""
        x = data[0].clone().requires_grad_()
        module.zero_grad()
        with region(recipe_of(recipe)):
            out = module(x, **call)
        out.backward(data[1].to(out.dtype))
        rest = {n: p.grad for n, p in module.named_parameters() if p.dim() == 1}
        return out.detach(), x.grad, rest


def assert_added(found, before, gradient, main_dtype, rounded):
    """`found` is before + gradient, in the precision of main_grad."""
    exact = before.double().cpu() + gradient.double().cpu()
    # The reference gradient was rounded to the weight's dtype, the one in main_grad was not.
    bound = tol("round", main_dtype) + tol("round", rounded) + tol("sum", torch.float32, ROWS)
    assert_nmse(found, exact, bound)


def gemms_of(module):
    return expected_gemms(module, {"x", *dict(module.named_parameters())})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16], ids=["main32", "main16"])
def test_accumulate_into_main_grad(device, kind, recipe, main):
    """Both weights' gradients are added to their main_grad; everything else is as without."""
    pair = Pair(kind, device, torch.bfloat16, fuse_wgrad_accumulation=True)
    pair.main_grads(torch.randn, main)
    for number in range(3):
        data = pair.batch()
        before = {n: w.main_grad.clone() for n, w in pair.weights.items()}
        expected = pair.step(pair.plain, recipe, data)
        if number == 2:  # overwritten where the step begins
            for weight in pair.weights.values():
                weight.overwrite_main_grad = True
            before = {n: torch.zeros_like(b) for n, b in before.items()}
        with counted() as gemms:
            found = pair.step(pair.module, recipe, data)
        assert count_of(gemms, recipe) == gemms_of(pair.module)
        assert_same_bits(found, expected)
        for name, weight in pair.weights.items():
            assert weight.grad is None
            gradient = pair.plain.get_parameter(name).grad
            assert_added(weight.main_grad, before[name], gradient, main, torch.bfloat16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", FP8)
def test_first_microbatch_overwrites_main_grad(device, kind, recipe):
    pair = Pair(kind, device, fuse_wgrad_accumulation=True)
    pair.main_grads(lambda *a, **k: torch.full(*a, float("nan"), **k))
    totals = dict.fromkeys(pair.weights, 0.0)
    for number in range(3):
        data = pair.batch()
        pair.step(pair.plain, recipe, data)
        pair.step(pair.module, recipe, data, is_first_microbatch=number == 0)
        for name in totals:
            totals[name] += wide(pair.plain.get_parameter(name).grad)
    for name, total in totals.items():
        found = pair.weights[name].main_grad
        assert found.isfinite().all()
        if recipe != "delayed":  # there the cached weight was cast with an older scale
            assert_nmse(found, total, 3 * tol("sum", torch.float32, ROWS))


@pytest.mark.parametrize("kind", ["linear", "gelu", "swiglu"])
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("delay", [False, True], ids=["", "delay"])
def test_main_grad_under_torch_autocast(device, kind, recipe, delay):
    """The parameters are fp32 and 16-bit copies feed the GEMMs: main_grad is the parameters'."""
    pair = Pair(kind, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    pair.main_grads(torch.zeros)
    data = pair.batch()
    with torch.autocast(device, dtype=torch.bfloat16):
        expected = pair.step(pair.plain, recipe, data)
        with counted() as gemms:
            found = pair.step(pair.module, recipe, data)
            pair.module.backward_dw()
    assert count_of(gemms, recipe) == gemms_of(pair.plain)
    assert_same_bits(found[:2], expected[:2])
    rounded = torch.float32 if recipe else torch.bfloat16
    for name, weight in pair.weights.items():
        gradient = pair.plain.get_parameter(name).grad
        assert_added(weight.main_grad, torch.zeros_like(gradient), gradient, torch.float32, rounded)


@pytest.mark.parametrize("kind", KINDS)
def test_frameworks_that_count_gradients(device, kind):
    pair = Pair(kind, device, fuse_wgrad_accumulation=True)
    pair.main_grads(torch.zeros)
    hooked = []
    for name, weight in pair.weights.items():
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = True
        weight.register_hook(lambda grad, name=name: hooked.append((name, grad.shape)))
    pair.step(pair.module, "delayed", pair.batch())
    assert sorted(hooked) == [(name, w.shape) for name, w in sorted(pair.weights.items())]
    for weight in pair.weights.values():
        assert weight.grad_added_to_main_grad is True and (weight.grad == 0).all()
        assert (weight.main_grad != 0).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", FP8)
def test_missing_and_unneeded_main_grads(device, kind, recipe):
    pair = Pair(kind, device, fuse_wgrad_accumulation=True)
    pair.main_grads(torch.zeros)
    last = list(pair.weights.values())[-1]
    del last.main_grad
    x = pair.batch()[0]
    with region(recipe_of(recipe)), pytest.raises(RuntimeError, match="no main_grad"):
        pair.module(x)
    assert state_of(pair.module) is None or (state_of(pair.module)["forward"][1] == 0).all()
    with torch.no_grad(), region(recipe_of(recipe)):  # without a gradient there is none to ask for
        pair.module(x)
    last.requires_grad_(False)
    pair.step(pair.module, recipe, pair.batch())
    for weight in list(pair.weights.values())[:-1]:
        assert (weight.main_grad != 0).any() and weight.grad is None


# ---- when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "gelu", "swiglu"])
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("fused", [False, True], ids=["", "main_grad"])
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm-output"])
def test_backward_dw(device, kind, recipe, fused, normed):
    """First in, first out; the sum is that of the usual backwards, bit for bit."""
    options = {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": fused}
    pair = Pair(kind, device, return_layernorm_output=normed, **options)
    pair.plain.return_layernorm_output = normed
    pair.main_grads(torch.zeros)
    full, parts = gemms_of(pair.plain), len(pair.weights)
    expected = []
    for _ in range(2):
        data = pair.batch()
        grads = []
        for module in (pair.plain, pair.module):
            x = data[0].clone().requires_grad_()
            with counted() as gemms:
                with region(recipe_of(recipe)):
                    outputs = module(x)
                outputs = outputs if normed else (outputs,)
                torch.autograd.backward(outputs, [data[1], data[0]][: len(outputs)])
            assert count_of(gemms, recipe) == full - parts * (module is pair.module)
            grads.append(x.grad)
        assert_same_bits(*grads)
        expected.append({n: pair.plain.get_parameter(n).grad.clone() for n in pair.weights})
        pair.plain.zero_grad()
        assert all(w.grad is None for w in pair.weights.values())
    totals = {n: torch.zeros_like(w) for n, w in pair.weights.items()}
    for gradients in expected:
        with counted() as gemms:
            pair.module.backward_dw()
        assert count_of(gemms, recipe) == parts
        for name, weight in pair.weights.items():
            totals[name] += gradients[name]
            found = weight.main_grad if fused else weight.grad
            if fused and recipe is None:
                bound = 2 * high_precision_bound(torch.float32, ROWS)
                assert_nmse(found, totals[name].double(), bound)
            else:
                assert_added(found, torch.zeros_like(found), totals[name], *[torch.float32] * 2)
    with pytest.raises(RuntimeError, match=r"backward_dw: no weight gradient is pending"):
        pair.module.backward_dw()


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("recipe", FP8)
def test_backward_dw_of_some_weights(device, kind, recipe):
    """One weight frozen, all else frozen, or the norm alone trainable."""
    late = make_kind(kind, device, delay_wgrad_compute=True)
    now = make_kind(kind, device)
    now.load_state_dict(late.state_dict())
    data = [torch.randn(ROWS, IN, device=device) for _ in range(2)]
    names = dict(late.named_parameters())
    subsets = [{"fc1_weight"}, {"fc2_weight"}, {"fc1_weight", "fc1_bias"}, {"layer_norm_weight"}]
    subsets += [set(names) - {"fc1_weight"}, set(names) - {"fc2_weight"}, {"fc2_bias"}]
    for needs in subsets:
        for module in (late, now):
            run_with(module, needs, recipe_of(recipe), data, steps=1)
        if {"fc1_weight", "fc2_weight"} & needs:
            late.backward_dw()
        with pytest.raises(RuntimeError, match="pending"):
            late.backward_dw()
        for name, parameter in late.named_parameters():
            gradient = now.get_parameter(name).grad
            assert (parameter.grad is None) == (name not in needs), (needs, name)
            if name.endswith("bias") and name in needs and recipe is None:
                assert_nmse(parameter.grad, wide(gradient), 2 * tol("sum", torch.float32, ROWS))
            elif name in needs:
                assert_same_gemm(parameter.grad, gradient, device, recipe, ROWS)


def test_backward_dw_of_split_parameters(device):
    pair = Pair("linear", device, delay_wgrad_compute=True, parameters_split={"q": 16, "kv": 32})
    split = pair.module
    with torch.no_grad():
        for name in ("layer_norm_weight", "layer_norm_bias"):
            getattr(split, name).copy_(getattr(pair.plain, name))
        for kind in ("weight", "bias"):
            rows = getattr(pair.plain, kind).split([16, 32])
            getattr(split, f"q_{kind}").copy_(rows[0])
            getattr(split, f"kv_{kind}").copy_(rows[1])
    data = pair.batch()
    expected, found = (pair.step(m, "current", data) for m in (pair.plain, split))
    assert_same_bits(found[:2], expected[:2])
    assert split.q_weight.grad is None
    split.backward_dw()
    assert_same_bits(torch.cat([split.q_weight.grad, split.kv_weight.grad]), pair.plain.weight.grad)


def test_checkpoint_and_delayed_gradients_do_not_go_together():
    with pytest.raises(NotImplementedError, match="checkpoint=True with delay_wgrad_compute=True"):
        make("gelu", "cpu", checkpoint=True, delay_wgrad_compute=True)


# ---- cached weights ------------------------------------------------------------------------------


def quantized():
    """How many quantize operators ran since the counters were reset."""
    return sum(v for n, v in _core.counters().items() if n.endswith(".quantize"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_cached_weights(device, kind, recipe):
    """False leaves the casts of both weights out, forward and backward; the bits are the same."""
    pair = Pair(kind, device)
    data = pair.batch()
    parts = len(pair.weights)
    casts = {}
    for first in (None, True, False, False, None):
        te.reset()
        with counted() as gemms:
            found = pair.step(pair.module, recipe, data, is_first_microbatch=first)
        casts.setdefault(first, quantized())
        assert gemms.fp8 == gemms_of(pair.module) and quantized() == casts[first]
        te.reset()
        expected = pair.step(pair.plain, recipe, data)
        assert_same_bits(found, expected)
        for name, weight in pair.weights.items():
            assert_same_bits(weight.grad, pair.plain.get_parameter(name).grad)
    again = 2 if pair.module.checkpoint else 1  # fc1's weight is cast for its second GEMM, too
    assert casts[True] - casts[False] == parts
    assert casts[None] - casts[True] in (parts, again + parts - 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["in-place", "reassigned", "recipe", "dtype"])
def test_a_changed_weight_is_cast_again(device, kind, change):
    """False never computes with a weight that is not there any more: each has its own cache."""
    pair = Pair(kind, device)
    data, recipe = pair.batch(), "current"
    pair.step(pair.module, recipe, data, is_first_microbatch=True)
    last = list(pair.weights)[-1]
    new = torch.randn_like(pair.weights[last])
    if change == "in-place":
        with torch.no_grad():
            pair.weights[last].copy_(new)
    elif change == "reassigned":
        setattr(pair.module, last, torch.nn.Parameter(new))
    elif change == "dtype":
        pair.module.bfloat16().float()
    else:
        recipe = "current-power2"
    pair.plain.load_state_dict(pair.module.state_dict())
    expected = pair.step(pair.plain, recipe, data)
    casts = []
    for _ in range(2):
        with counted() as gemms:
            found = pair.step(pair.module, recipe, data, is_first_microbatch=False)
        assert_same_bits(found, expected)
        assert gemms.fp8 == gemms_of(pair.module)
        casts.append(quantized())
    assert casts[0] - casts[1] == (len(pair.weights) if change in ("recipe", "dtype") else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_cache_without_gradients(device, kind):
    module = make_kind(kind, device)
    x = torch.randn(ROWS, IN, device=device)
    for mode in (torch.no_grad, torch.inference_mode):
        outputs = []
        for first in (True, False, None):
            with mode(), region(recipe_of("current")):
                outputs.append(module(x, is_first_microbatch=first).clone())
        assert_same_bits(outputs[1:], outputs[:1] * 2)
