# SPDX-License-Identifier: Apache-2.0
"""`quantized_model_init`: what it quantizes, what conversions keep of that, and what is saved."""

import copy
import functools
import io
import pickle
import threading

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits
from pytorch.module_cases import (
    FEW,
    IN,
    WIDTH,
    batch,
    make,
    step,
)
from pytorch.quantized_cases import (
    PER_TENSOR,
    fp8_weights,
    made,
    pair,
    twins,
)

import transformer_engine.pytorch as te

# ---- construction --------------------------------------------------------------------------------


def test_what_is_quantized_and_where(device):
    with te.quantized_model_init():
        outer = te.LayerNormLinear(16, 32, device=device)
        with te.quantized_model_init(enabled=False):
            inner = te.Linear(16, 32, device=device)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(te.Linear(16, 16, device=device)))
        thread.start()
        thread.join()
        assert te.fp8.FP8GlobalStateManager.with_fp8_parameters()
        assert te.fp8.FP8GlobalStateManager.quantization_state.fp8_parameters
    kinds = {name: type(p).__name__ for name, p in outer.named_parameters()}
    assert kinds == {
        "layer_norm_weight": "Parameter",
        "layer_norm_bias": "Parameter",
        "weight": "Float8Tensor",
        "bias": "Parameter",
    }
    assert isinstance(outer.weight, torch.nn.Parameter) and outer.weight.requires_grad
    assert isinstance(outer.weight._quantizer, te.Float8Quantizer)
    assert outer.weight._scale_inv.item() == 1
    assert not inner.primary_weights_in_fp8 and not seen[0].primary_weights_in_fp8
    assert not te.fp8.FP8GlobalStateManager.with_fp8_parameters()


def test_a_decorator_and_an_exception():
    @te.fp8_model_init(recipe=RECIPES["current"]())
    def build():
        return te.Linear(16, 16, device="cpu")

    assert isinstance(build().weight._quantizer, te.Float8CurrentScalingQuantizer)
    assert isinstance(build().weight, te.Float8Tensor)
    with pytest.raises(KeyError), te.quantized_model_init():
        raise KeyError
    assert not te.fp8.FP8GlobalStateManager.with_fp8_parameters()
    with pytest.raises(TypeError, match="recipe: str object, expected a recipe"):
        te.quantized_model_init(recipe="current").__enter__()


def test_first_values_are_preserved(device):
    kind = functools.partial(te.Linear, IN, WIDTH, device=device)
    plain, module = twins(kind, None, "current", preserve=True)
    weight = module.weight
    assert weight.get_high_precision_init_val().device.type == "cpu"
    assert_same_bits(weight.get_high_precision_init_val(), plain.weight.cpu())
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    weight.clear_high_precision_init_val()
    usual = made(kind, "current")
    assert not hasattr(usual.weight, "get_high_precision_init_val")


def test_modules_without_memory_are_quantized_when_they_get_some(device):
    module = made(lambda: te.Linear(IN, WIDTH, device="meta"), "current")
    assert type(module.weight) is torch.nn.Parameter
    with torch.device(device):
        module.reset_parameters()
    assert isinstance(module.weight, te.Float8Tensor) and module.weight.device.type == device
    values = module.weight.dequantize()
    module.reset_parameters()
    assert isinstance(module.weight, te.Float8Tensor)
    assert not torch.equal(module.weight.dequantize(), values)
    module.to_empty(device=device)
    assert isinstance(module.weight, te.Float8Tensor)


def test_conversions_change_the_nominal_dtype_alone(device):
    module = made(lambda: te.Linear(IN, WIDTH, device=device), "current")
    codes = module.weight._data.clone()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        module.to(dtype)
        assert isinstance(module.weight, te.Float8Tensor) and module.weight.requires_grad
        assert module.weight.dtype is dtype and module.bias.dtype is dtype
        assert_same_bits(module.weight._data, codes)
        step(module, batch(device, dtype), "current")
    module.cpu()
    assert module.weight._data.device.type == "cpu"


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FEW)
def test_copies(device, kind):
    module = made(lambda: make(kind, device), "current")
    x = batch(device)
    expected = step(module, x, "current")
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    copies.append(torch.load(file, weights_only=False))
    for copied in copies:
        assert len(fp8_weights(copied)) == len(module.LINEARS)
        assert_same_bits(step(copied, x, "current"), expected)


@pytest.mark.parametrize("recipe", PER_TENSOR)
def test_state_dicts_both_ways(device, recipe):
    module, plain = pair("norm-linear", device, recipe)
    saved = module.state_dict()
    assert isinstance(saved["weight"], te.Float8Tensor)
    plain.load_state_dict(saved)
    assert_same_bits(plain.weight.detach(), module.weight.dequantize().detach())
    other = make("norm-linear", device)
    module.load_state_dict(other.state_dict())
    assert isinstance(module.weight, te.Float8Tensor)
    expected = module.weight._quantizer(other.weight.detach())
    assert_same_bits(module.weight._data, expected._data)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    again = made(lambda: make("norm-linear", device), recipe)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert_same_bits(again.weight._data, module.weight._data)
    assert_same_bits(again.weight._scale_inv, module.weight._scale_inv)
    wide = {
        name: v.dequantize() if isinstance(v, te.QuantizedTensor) else v
        for name, v in saved.items()
    }
    assert all(type(v) is torch.Tensor for v in wide.values())
