# SPDX-License-Identifier: Apache-2.0
"""Where `Linear` puts the weight gradient, and when: main_grad, backward_dw, cached weights."""

import pytest
import torch
from comparators import assert_nmse
from pytorch.helpers import (
    RECIPES,
    assert_same_bits,
    assert_same_gemm,
    counted,
    high_precision_bound,
    state_of,
)
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

FP8 = [None, "delayed", "current"]
IN, OUT, ROWS = 32, 48, 16


def region(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]())


def count_of(gemms, recipe):
    return gemms.fp8 if recipe else gemms.other


class Setup:
    """Two layers with the same weight, one with options, and data that both are given."""

    def __init__(self, device, dtype=torch.float32, **options):
        self.plain = te.Linear(IN, OUT, device=device, params_dtype=dtype)
        self.layer = te.Linear(IN, OUT, device=device, params_dtype=dtype, **options)
        if "parameters_split" not in options:
            self.layer.load_state_dict(self.plain.state_dict())
        self.device, self.dtype = device, dtype

    def batch(self):
        x = torch.randn(ROWS, IN, device=self.device, dtype=self.dtype)
        return x, torch.randn(ROWS, OUT, device=self.device, dtype=self.dtype)

    def step(self, layer, recipe, data, **call):
        """Forward and backward: (output, gradient of the input)."""
        x = data[0].clone().requires_grad_()
        with region(recipe):
            out = layer(x, **call)
        out.backward(data[1])
        return out.detach(), x.grad


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


# ---- main_grad -----------------------------------------------------------------------------------


def assert_added(found, before, gradient, main_dtype, rounded):
    """`found` is before + gradient, in the precision of main_grad."""
    exact = before.double().cpu() + gradient.double().cpu()
    # The reference gradient was rounded to the weight's dtype, the one in main_grad was not.
    bound = tol("round", main_dtype) + tol("round", rounded) + tol("sum", torch.float32, ROWS)
    assert_nmse(found, exact, bound)


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16], ids=["main32", "main16"])
def test_accumulate_into_main_grad(device, recipe, dtype, main):
    s = Setup(device, dtype, fuse_wgrad_accumulation=True)
    s.layer.weight.main_grad = torch.randn(OUT, IN, device=device, dtype=main)
    if recipe is None and main not in (dtype, torch.float32):
        with pytest.raises(TypeError, match="main_grad is torch.bfloat16, .* torch.float32"):
            s.layer(s.batch()[0])
        return
    for _ in range(3):
        data = s.batch()
        before = s.layer.weight.main_grad.clone()
        pointer = s.layer.weight.main_grad.data_ptr()
        s.plain.zero_grad()
        s.layer.bias.grad = None
        expected = s.step(s.plain, recipe, data)
        with counted() as gemms:
            found = s.step(s.layer, recipe, data)
        assert count_of(gemms, recipe) == 3
        assert_same_bits(found, expected)
        assert_same_bits(s.layer.bias.grad, s.plain.bias.grad)
        assert s.layer.weight.grad is None
        assert s.layer.weight.main_grad.data_ptr() == pointer
        assert_added(s.layer.weight.main_grad, before, s.plain.weight.grad, main, dtype)


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("how", ["first-microbatch", "attribute"])
def test_overwrite_main_grad(device, recipe, how):
    s = Setup(device, fuse_wgrad_accumulation=True)
    s.layer.weight.main_grad = torch.full((OUT, IN), 1e30, device=device)
    call = {}
    if how == "attribute":
        s.layer.weight.overwrite_main_grad = True
    else:
        call["is_first_microbatch"] = True
    data = s.batch()
    s.step(s.plain, recipe, data)
    with counted() as gemms:
        s.step(s.layer, recipe, data, **call)
    assert count_of(gemms, recipe) == 3
    assert_same_gemm(s.layer.weight.main_grad, s.plain.weight.grad, device, recipe, ROWS)


@pytest.mark.parametrize("recipe", FP8)
def test_microbatches_overwrite_then_accumulate(device, recipe):
    s = Setup(device, fuse_wgrad_accumulation=True)
    s.layer.weight.main_grad = torch.full((OUT, IN), float("nan"), device=device)
    total = torch.zeros(OUT, IN, dtype=torch.float64)
    for number in range(3):
        data = s.batch()
        s.plain.zero_grad()
        s.step(s.plain, recipe, data)
        s.step(s.layer, recipe, data, is_first_microbatch=number == 0)
        total += s.plain.weight.grad.double().cpu()
    if recipe == "delayed":  # the cached weight was cast with an older scale: outputs may differ
        assert s.layer.weight.main_grad.isfinite().all()
    assert_nmse(s.layer.weight.main_grad, total, 3 * tol("sum", torch.float32, ROWS))


@pytest.mark.parametrize("zero", [None, False, True])
def test_grad_added_to_main_grad(device, zero):
    s = Setup(device, fuse_wgrad_accumulation=True)
    weight = s.layer.weight
    weight.main_grad = torch.zeros(OUT, IN, device=device)
    weight.grad_added_to_main_grad = False
    if zero is not None:
        weight.zero_out_wgrad = zero
    hooked = []
    weight.register_hook(lambda grad: hooked.append(grad.shape))
    with counted() as gemms:
        s.step(s.layer, "delayed", s.batch())
    assert gemms.fp8 == 3
    assert weight.grad_added_to_main_grad is True and hooked == [(OUT, IN)]
    assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
    assert not zero or (weight.grad == 0).all()
    assert (weight.main_grad != 0).any()


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("delay", [False, True])
def test_main_grad_under_torch_autocast(device, recipe, delay):
    """The parameter is fp32 and its 16-bit copy feeds the GEMM: main_grad is the parameter's."""
    s = Setup(device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    s.layer.weight.main_grad = torch.zeros(OUT, IN, device=device)
    data = s.batch()
    with torch.autocast(device, dtype=torch.bfloat16):
        s.step(s.plain, recipe, (data[0], data[1].bfloat16()))
        with counted() as gemms:
            s.step(s.layer, recipe, (data[0], data[1].bfloat16()))
            s.layer.backward_dw()
    assert count_of(gemms, recipe) == 3
    rounded = torch.float32 if recipe else torch.bfloat16
    zero = torch.zeros(OUT, IN, device=device)
    assert_added(s.layer.weight.main_grad, zero, s.plain.weight.grad, torch.float32, rounded)


def test_backward_dw_under_torch_autocast(device):
    s = Setup(device, delay_wgrad_compute=True)
    data = s.batch()
    with torch.autocast(device, dtype=torch.bfloat16):
        for _ in range(2):
            for layer in (s.plain, s.layer):
                s.step(layer, None, (data[0], data[1].bfloat16()))
            s.layer.backward_dw()
    assert s.layer.weight.grad.dtype == torch.float32
    bound = 4 * high_precision_bound(torch.bfloat16, ROWS)
    assert_nmse(s.layer.weight.grad, s.plain.weight.grad.double(), bound)


@pytest.mark.parametrize("recipe", FP8)
def test_missing_main_grad(device, recipe):
    s = Setup(device, fuse_wgrad_accumulation=True)
    with region(recipe), pytest.raises(RuntimeError, match=r"no main_grad.*\(48, 32\)"):
        s.layer(s.batch()[0])
    assert state_of(s.layer) is None or (state_of(s.layer)["forward"][1] == 0).all()
    with torch.no_grad(), region(recipe):  # without a gradient there is nothing to ask for
        s.layer(s.batch()[0])


def test_main_grad_of_a_wrong_shape_is_refused(device):
    s = Setup(device, fuse_wgrad_accumulation=True)
    s.layer.weight.main_grad = torch.zeros(IN, OUT, device=device)
    with pytest.raises(ValueError, match="main_grad"):
        s.step(s.layer, None, s.batch())
    assert (s.layer.weight.main_grad == 0).all()


def test_frozen_weight_needs_no_main_grad(device):
    s = Setup(device, fuse_wgrad_accumulation=True)
    s.layer.weight.requires_grad_(False)
    with counted() as gemms:
        s.step(s.layer, "current", s.batch())
    assert gemms.fp8 == 2


# ---- delayed weight gradients --------------------------------------------------------------------


@pytest.mark.parametrize("recipe", FP8)
def test_backward_dw_is_first_in_first_out(device, recipe, dtype):
    """Each call computes the oldest; the sum is that of the usual backwards, bit for bit."""
    s = Setup(device, dtype, delay_wgrad_compute=True)
    expected = []
    with counted() as gemms:
        for _ in range(3):
            data = s.batch()
            s.plain.zero_grad()
            outputs = s.step(s.plain, recipe, data)
            expected.append(s.plain.weight.grad.clone())
            te.reset() if recipe == "delayed" else None
            assert_same_bits(s.step(s.layer, recipe, data), outputs)
            te.reset() if recipe == "delayed" else None
            assert s.layer.weight.grad is None and s.layer.bias.grad is not None
    assert count_of(gemms, recipe) == 3 * 3 + 3 * 2
    total = None
    for gradient in expected:
        with counted() as gemms:
            s.layer.backward_dw()
        assert count_of(gemms, recipe) == 1
        total = gradient if total is None else total + gradient
        assert_same_gemm(s.layer.weight.grad, total, device, recipe, ROWS)
    with pytest.raises(RuntimeError, match=r"Linear\.backward_dw: no weight gradient is pending"):
        s.layer.backward_dw()


@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("first", [True, False, None])
def test_backward_dw_into_main_grad(device, recipe, first):
    s = Setup(device, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    s.layer.weight.main_grad = torch.randn(OUT, IN, device=device)
    s.layer.weight.grad_added_to_main_grad = False
    before = s.layer.weight.main_grad.clone()
    data = s.batch()
    s.step(s.plain, recipe, data)
    s.step(s.layer, recipe, data, is_first_microbatch=first)
    assert_same_bits(s.layer.weight.main_grad, before)
    assert s.layer.weight.grad_added_to_main_grad is False
    with counted() as gemms:
        s.layer.backward_dw()
    assert count_of(gemms, recipe) == 1
    assert s.layer.weight.grad_added_to_main_grad is True
    if first:
        assert_same_gemm(s.layer.weight.main_grad, s.plain.weight.grad, device, recipe, ROWS)
    else:
        gradient = s.plain.weight.grad
        assert_added(s.layer.weight.main_grad, before, gradient, torch.float32, torch.float32)


@pytest.mark.parametrize("recipe", FP8)
def test_backward_dw_with_split_parameters(device, recipe):
    s = Setup(device, delay_wgrad_compute=True, parameters_split={"q": 16, "kv": 32})
    with torch.no_grad():
        s.plain.weight.copy_(torch.cat([s.layer.q_weight, s.layer.kv_weight]))
    s.layer.kv_weight.requires_grad_(False)
    data = s.batch()
    s.step(s.plain, recipe, data)
    s.step(s.layer, recipe, data)
    assert s.layer.q_weight.grad is None
    s.layer.backward_dw()
    assert_same_gemm(s.layer.q_weight.grad, s.plain.weight.grad[:16], device, recipe, ROWS)
    assert s.layer.kv_weight.grad is None


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_backward_dw_with_the_original_input(device, recipe):
    s = Setup(device, delay_wgrad_compute=True, save_original_input=True)
    data = s.batch()
    s.step(s.plain, recipe, data)
    s.step(s.layer, recipe, data)
    s.layer.backward_dw()
    assert_same_bits(s.layer.weight.grad, s.plain.weight.grad)


def test_backward_dw_without_the_option_does_nothing(device):
    s = Setup(device)
    s.plain.backward_dw()
    assert s.plain.weight.grad is None


def test_backward_dw_of_a_frozen_weight_has_nothing_pending(device):
    s = Setup(device, delay_wgrad_compute=True)
    s.layer.weight.requires_grad_(False)
    s.step(s.layer, "current", s.batch())
    with pytest.raises(RuntimeError, match="pending"):
        s.layer.backward_dw()


# ---- cached weights ------------------------------------------------------------------------------


def quantized_weights():
    """How many quantize operators ran since the counters were reset."""
    from transformer_engine import _core

    return sum(v for n, v in _core.counters().items() if n.endswith(".quantize"))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_cache_saves_the_casts_and_keeps_the_bits(device, recipe):
    """True casts input and weight in the forward and the gradient; False leaves the weight out."""
    s = Setup(device)
    data = s.batch()
    expected = s.step(s.plain, "current", data)
    for first, casts in ((True, 3), (False, 2), (False, 2), (None, 4), (False, 2)):
        with counted() as gemms:
            found = s.step(s.layer, recipe, data, is_first_microbatch=first)
        assert gemms.fp8 == 3 and quantized_weights() == casts
        if recipe == "current":
            assert_same_bits(found, expected)


def test_none_keeps_nothing(device):
    s = Setup(device)
    s.step(s.layer, "current", s.batch())
    assert s.layer._weight_caches[0] is None


def test_false_without_a_cache_makes_one(device):
    s = Setup(device)
    data = s.batch()
    expected = s.step(s.plain, "current", data)
    with counted() as gemms:
        found = s.step(s.layer, "current", data, is_first_microbatch=False)
    assert gemms.fp8 == 3 and quantized_weights() == 3
    assert_same_bits(found, expected)


@pytest.mark.parametrize("change", ["in-place", "reassigned", "data", "recipe", "optimizer"])
def test_a_changed_weight_is_cast_again(device, change):
    """False never computes with a weight that is not there any more."""
    s = Setup(device)
    data = s.batch()
    s.step(s.layer, "current", data, is_first_microbatch=True)
    new = torch.randn(OUT, IN, device=device)
    recipe = "current"
    if change == "in-place":
        with torch.no_grad():
            s.layer.weight.copy_(new)
    elif change == "reassigned":
        s.layer.weight = torch.nn.Parameter(new)
    elif change == "data":
        s.layer.weight.data = new
    elif change == "optimizer":
        torch.optim.SGD(s.layer.parameters(), lr=1.0).step()
    else:
        recipe = "current-power2"
    s.plain.load_state_dict(s.layer.state_dict())
    expected = s.step(s.plain, recipe, data)
    with counted() as gemms:
        found = s.step(s.layer, recipe, data, is_first_microbatch=False)
    assert gemms.fp8 == 3 and quantized_weights() == 3
    assert_same_bits(found, expected)


@pytest.mark.parametrize("kind", ["split", "parametrized", "functional"])
def test_a_changed_source_of_a_computed_weight_is_cast_again(device, kind):
    """The weight of a call may be a new tensor each time, in the memory of the one before."""
    options = {"parameters_split": ("a", "b")} if kind == "split" else {}
    s = Setup(device, **options)
    if kind == "parametrized":
        torch.nn.utils.parametrize.register_parametrization(s.layer, "weight", torch.nn.Identity())
    x = s.batch()[0]
    values = dict(s.layer.named_parameters())
    for _ in range(3):
        with torch.no_grad():
            for parameter in values.values():
                parameter.normal_()
        outputs = []
        for first in (False, None):
            with counted() as gemms, region("current"):
                if kind == "functional":
                    given = {n: p.detach().clone() for n, p in values.items()}
                    kwargs = {"is_first_microbatch": first}
                    outputs.append(torch.func.functional_call(s.layer, given, (x,), kwargs))
                    del given
                else:
                    outputs.append(s.layer(x, is_first_microbatch=first))
            assert gemms.fp8 == 1
        assert_same_bits(*outputs)


def test_another_weight_in_the_same_memory_is_cast_again(device):
    """Same address, same version, other tensor: as when the allocator gives memory out again."""
    s = Setup(device)
    x = s.batch()[0]
    memory, bias = torch.empty(OUT, IN, device=device), s.layer.bias.detach()
    outputs = {first: [] for first in (False, None)}
    with counted() as gemms:
        for _ in range(2):
            memory.normal_()
            for first, found in outputs.items():
                given = {"weight": memory.data, "bias": bias}  # with a version counter of its own
                kwargs = {"is_first_microbatch": first}
                with region("current"):
                    found.append(torch.func.functional_call(s.layer, given, (x,), kwargs))
                del given
    assert gemms.fp8 == 4
    assert_same_bits(outputs[False], outputs[None])


def test_split_weights_are_cached(device):
    s = Setup(device, parameters_split=("a", "b"))
    data = s.batch()
    for first, casts in ((True, 3), (False, 2), (False, 2)):
        with counted() as gemms:
            s.step(s.layer, "current", data, is_first_microbatch=first)
        assert gemms.fp8 == 3 and quantized_weights() == casts


def test_cached_weight_feeds_no_amax(device):
    """Only the calls that cast the weight record its amax: its scale and history stay put."""
    recipe = DelayedScaling(amax_history_len=3)
    s = Setup(device)
    histories = []
    for first in (True, False, False):
        with te.autocast(recipe=recipe):
            out = s.layer(s.batch()[0].requires_grad_(), is_first_microbatch=first)
        out.sum().backward()
        histories.append(state_of(s.layer)["forward"][1][:, 1])
    assert (histories[0] != 0).sum() == 1
    assert_same_bits(histories[1], histories[0])
    assert_same_bits(histories[2], histories[0])
    assert (state_of(s.layer)["forward"][1][:, 0] != 0).sum() == 2  # the input went on


def test_cached_forwards_before_their_backwards(device):
    """A later True rewrites the cache; the earlier graph keeps its own."""
    s = Setup(device)
    a, b = s.batch(), s.batch()
    x = a[0].clone().requires_grad_()
    with region("current"):
        early = s.layer(x, is_first_microbatch=True)
    expected = s.step(s.plain, "current", a)[1]
    with torch.no_grad():
        s.layer.weight.add_(1.0)
    with region("current"):
        s.layer(b[0], is_first_microbatch=True)
    early.backward(a[1])
    assert_same_bits(x.grad, expected)


def test_cache_under_no_grad_and_inference_mode(device):
    s = Setup(device)
    x = s.batch()[0]
    with counted() as gemms:
        for mode in (torch.no_grad, torch.inference_mode):
            outputs = []
            for first in (True, False, None):
                with mode(), region("current"):
                    outputs.append(s.layer(x, is_first_microbatch=first).clone())
            assert_same_bits(outputs[1:], outputs[:1] * 2)
    assert gemms.fp8 == 6
