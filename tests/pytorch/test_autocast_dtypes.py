# SPDX-License-Identifier: Apache-2.0
"""FP8 and torch's own modes: `torch.autocast`, `no_grad`, `inference_mode`, `GradScaler`."""

import pytest
import torch
from comparators import assert_nmse
from device_kinds import every_device
from pytorch.helpers import RECIPES, Fp8Linear, assert_same_bits, counted, state_of, sum_bound
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

pytestmark = every_device

HALVES = [torch.bfloat16, torch.float16]
F32 = torch.float32


def name(dtype):
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else None


def region(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]())


@pytest.fixture
def layer(device):
    layer = te.Linear(48, 80, device=device)
    with torch.no_grad():
        layer.bias.normal_()
    return layer


# ---- torch.autocast ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("given", [F32, *HALVES], ids=name)
def test_high_precision_under_torch_autocast(device, layer, dtype, given):
    """The operands are rounded to the 16-bit dtype, whatever they were; gradients keep theirs."""
    x = torch.randn(16, 48, device=device, dtype=given, requires_grad=True)
    with counted() as gemms:
        with torch.autocast(device, dtype=dtype):
            out = layer(x)
        grad = torch.randn_like(out)
        out.backward(grad)
    assert (gemms.fp8, gemms.other) == (0, 3)
    assert out.dtype == dtype and x.grad.dtype == given
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == F32
    xs, w, b = (t.detach().to(dtype).double().cpu() for t in (x, layer.weight, layer.bias))
    g = grad.double().cpu()

    def bound(depth):
        return tol("round", dtype) + tol("sum", F32, depth)

    assert_nmse(out, xs @ w.T + b, bound(48))
    assert_nmse(x.grad, g @ w, bound(80) + tol("round", given))
    assert_nmse(layer.weight.grad, g.T @ xs, bound(16))
    assert_nmse(layer.bias.grad, g.sum(0), bound(16))


@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("given", [F32, *HALVES], ids=name)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fp8_under_torch_autocast(device, layer, dtype, given, recipe):
    """Operands are cast to FP8 as they are; outputs have autocast's dtype, gradients their own."""
    made = RECIPES[recipe]()
    x = torch.randn(16, 48, device=device, dtype=given, requires_grad=True)
    with counted() as gemms:
        with torch.autocast(device, dtype=dtype), te.autocast(recipe=made):
            out = layer(x)
        grad = torch.randn_like(out)
        out.backward(grad)
    assert (gemms.fp8, gemms.other) == (3, 0)
    assert out.dtype == dtype and x.grad.dtype == given
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == F32
    ones = torch.ones(3) if recipe == "delayed" else None  # scales of a first step
    exact = Fp8Linear(layer, made, ones, ones).run(x, grad)
    found = {"out": out, "x": x.grad, "weight": layer.weight.grad, "bias": layer.bias.grad}
    for key, (expected, depth, fast) in exact.items():
        assert_nmse(found[key], expected, sum_bound(device, found[key].dtype, depth, fast))


@pytest.mark.parametrize("recipe", [None, "current"])
def test_order_of_the_two_autocasts_does_not_matter(device, layer, recipe):
    x = torch.randn(16, 48, device=device)
    with torch.autocast(device, dtype=torch.bfloat16), region(recipe):
        first = layer(x)
    with region(recipe), torch.autocast(device, dtype=torch.bfloat16):
        second = layer(x)
    assert_same_bits(first, second)


def test_disabled_torch_autocast_is_none(device, layer):
    x = torch.randn(16, 48, device=device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=False):
        assert layer(x).dtype == F32
        with pytest.raises(TypeError, match=r"torch\.autocast"):
            layer(x.bfloat16())


def test_return_bias_under_torch_autocast(device):
    layer = te.Linear(48, 80, return_bias=True, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out, bias = layer(torch.randn(16, 48, device=device))
    assert out.dtype == bias.dtype == torch.bfloat16


# ---- no gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_modes_without_gradients(device, layer, mode, recipe):
    x = torch.randn(16, 48, device=device, requires_grad=True)
    with region(recipe):
        expected = layer(x).detach()
    te.reset()
    with mode(), counted() as gemms, region(recipe):
        out = layer(x)
    assert (gemms.fp8 if recipe else gemms.other) == 1
    assert not out.requires_grad and out.grad_fn is None
    assert out.is_inference() == (mode is torch.inference_mode)
    assert_same_bits(out.clone(), expected)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_training_after_a_first_use_in_inference_mode(device, layer, recipe):
    """State made in inference mode is ordinary state."""
    made = RECIPES[recipe]()
    x = torch.randn(16, 48, device=device)
    with torch.inference_mode(), te.autocast(recipe=made):
        layer(x, is_first_microbatch=True)
    for first in (None, False, True):
        with counted() as gemms:
            with te.autocast(recipe=made):
                out = layer(x.clone().requires_grad_(), is_first_microbatch=first)
            out.sum().backward()
        assert gemms.fp8 == 3
    if recipe == "delayed":
        assert (state_of(layer)["forward"][0][:2] != 1).all()


def test_inference_tensors_as_input(device, layer):
    """An input made in inference mode can be used outside where its own gradient is not wanted."""
    with torch.inference_mode():
        x = torch.randn(16, 48, device=device)
    with counted() as gemms:
        with te.autocast(recipe=Float8CurrentScaling()):
            out = layer(x)
        out.sum().backward()
    assert gemms.fp8 == 2 and (layer.weight.grad != 0).any()


# ---- GradScaler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("pure", [False, True], ids=["fp32-weights", "fp16-weights"])
def test_grad_scaler_skips_a_step_of_inf_and_the_state_recovers(device, recipe, pure):
    """An overflowing step changes no weight and no backward scale; later steps are finite again."""
    length = 3
    made = DelayedScaling(amax_history_len=length) if recipe == "delayed" else RECIPES[recipe]()
    model = torch.nn.Sequential(
        te.Linear(48, 64, device=device), torch.nn.GELU(), te.Linear(64, 16, device=device)
    )
    x = torch.randn(32, 48, device=device)
    target = torch.randn(32, 16, device=device)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    overflow = 3
    scales, weights, losses, amp = [], [], [], []
    for number in range(overflow + length + 4):
        optimizer.zero_grad()
        if pure:  # GradScaler refuses to unscale fp16 gradients: keep fp32 ones beside the module
            half = {n: p.half() for n, p in model.named_parameters()}
        with counted() as gemms:
            with torch.autocast(device, dtype=torch.float16, enabled=not pure):
                with te.autocast(recipe=made):
                    if pure:
                        out = torch.func.functional_call(model, half, (x.half(),))
                    else:
                        out = model(x)
            loss = (out.float() - target).square().mean()
            scaler.scale(loss * (1e30 if number == overflow else 1.0)).backward()
        assert gemms.fp8 == 5
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        amp.append(scaler.get_scale())
        weights.append([p.detach().clone() for p in model.parameters()])
        if recipe == "delayed":
            scales.append([state_of(layer)["backward"][0] for layer in (model[0], model[2])])
    assert amp == [2.0**8] * overflow + [2.0**7] * (length + 4)
    assert_same_bits(weights[overflow], weights[overflow - 1])
    assert all(t.isfinite().all() for step in weights for t in step)
    assert all((b != a).any() for a, b in zip(weights[-2], weights[-1], strict=True))
    assert losses[-1] < losses[0]
    if recipe == "delayed":
        assert all(t.isfinite().all() for step in scales for t in step)
        # The last layer met the Inf, which stays in the window of so many updates; the first one
        # met what a saturated gradient made of it, a large number.
        for after in range(length):
            assert_same_bits(scales[overflow + after][1], scales[overflow - 1][1])
        assert all(a[0] != b[0] for a, b in zip(scales[-1], scales[overflow], strict=True))
        history = state_of(model[2])["backward"][1]
        assert history.isfinite().all() and (history[1:, 0] > 0).all()
