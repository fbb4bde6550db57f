# SPDX-License-Identifier: Apache-2.0
"""Modules whose weights are quantized once, and never cast by a forward: calls of every kind."""

import copy

import pytest
import torch
from device_kinds import every_device, our_kernels
from pytorch.helpers import assert_same_bits, counted, same_draws
from pytorch.module_cases import (
    CHECKPOINTED,
    FEW,
    IN,
    ROWS,
    WIDTH,
    batch,
    count_of,
    gemms_of,
    make,
    quantized,
    region,
    step,
    weights_of,
)
from pytorch.quantized_cases import (
    PER_TENSOR,
    current,
    fp8_weights,
    made,
    pair,
    twins,
)

import transformer_engine.pytorch as te
from transformer_engine import _core

pytestmark = every_device

# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHECKPOINTED)
@pytest.mark.parametrize("recipe", ["current", "current-power2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_a_weight_cast_at_each_call(device, kind, recipe, dtype):
    """And no forward or backward casts a weight: it is transposed where a backward reads it."""
    module, plain = pair(kind, device, recipe, dtype=dtype)
    assert len(fp8_weights(module)) == len(module.LINEARS) and module.primary_weights_in_fp8
    x = batch(device, dtype)
    with counted() as gemms:
        expected = step(plain, x, recipe)
    casts = quantized()
    with counted() as gemms:
        found = step(module, x, recipe)
    assert_same_bits(found, expected)
    assert all(grad.dtype == dtype and type(grad) is torch.Tensor for grad in found[2].values())
    assert count_of(gemms, recipe) == gemms_of(module)
    again = 2 if module.checkpoint else 1  # fc1's weight is read by two GEMMs of the backward
    assert casts - quantized() in (2 * len(module.LINEARS), len(module.LINEARS) + again)
    name = torch.device(device).type
    assert _core.counters()[f"op.{name}.transpose"] == len(module.LINEARS)
    assert all(weight._transpose is None for weight in fp8_weights(module))


@pytest.mark.parametrize("sizes", [(36, 52), (32, 50), (37, 48)])
@pytest.mark.parametrize("recipe", PER_TENSOR)
def test_sizes_that_need_padding(device, sizes, recipe):
    """The bits of a cast at each call: both casts are of the first values, with one scale."""
    module, plain = pair("linear", device, recipe, sizes=sizes)
    x = torch.randn(ROWS, sizes[0], device=device)
    assert_same_bits(step(module, x, recipe), step(plain, x, recipe))


@pytest.mark.parametrize("columnwise", [False, True])
def test_a_transpose_that_is_there_is_read(device, columnwise):
    module, plain = pair("linear", device, "current")
    module.weight.update_usage(columnwise_usage=columnwise)
    x = batch(device)
    expected = step(plain, x, "current")
    with counted():
        found = step(module, x, "current")
    assert_same_bits(found, expected)
    transposes = sum(v for n, v in _core.counters().items() if n.endswith(".transpose"))
    assert transposes == (not columnwise)


def test_the_memory_of_weights(device):
    """One byte an element and a scale, also after training: the transpose does not stay."""
    module = made(lambda: te.Linear(256, 512, device=device, bias=False), "current")
    step(module, torch.randn(16, 256, device=device), "current")
    tensors = [t for t in module.weight.get_data_tensors() if t is not None]
    total = sum(t.untyped_storage().nbytes() for t in tensors)
    assert total == 256 * 512 + 8


@pytest.mark.parametrize("kind", FEW)
def test_frozen_weights(device, kind):
    module, plain = pair(kind, device, "current")
    for m in (module, plain):
        for weight in weights_of(m).values():
            weight.requires_grad_(False)
    x = batch(device)
    expected = step(plain, x, "current")
    assert_same_bits(step(module, x, "current"), expected)
    with torch.inference_mode(), region("current"), counted():
        found = module(x)
    assert_same_bits(found, expected[0])
    assert quantized() == (kind == "linear")  # of its input; a norm and an activation cast theirs


@pytest.mark.parametrize("first", [True, False, None])
def test_microbatches_keep_nothing(device, first):
    module, plain = pair("linear", device, "current")
    x = batch(device)
    with counted():
        found = step(module, x, "current", is_first_microbatch=first)
    assert_same_bits(found, step(plain, x, "current"))
    assert module._weight_caches == (None,)


@pytest.mark.parametrize("function", [te.checkpoint, torch.utils.checkpoint.checkpoint])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recipe", PER_TENSOR)
def test_recompute(device, function, reentrant, recipe):
    module, other = twins(lambda: make("linear", device), recipe, recipe)
    x = batch(device)
    for _ in range(2):
        expected = step(other, x, recipe)
        inp = x.clone().requires_grad_()
        module.zero_grad()
        with region(recipe):
            out = function(module, inp, use_reentrant=reentrant)
        out.backward(torch.ones_like(out))
        assert_same_bits(
            [out.detach(), inp.grad, module.weight.grad], [*expected[:2], expected[2]["weight"]]
        )


@pytest.mark.parametrize("recipe", PER_TENSOR)
@pytest.mark.parametrize("fused", [True, False])
def test_layers(device, recipe, fused):
    """One cast each for what is no weight; split projections, whose parts have scales, one more."""

    def layer():
        return te.TransformerLayer(
            64, 128, 4, fuse_qkv_params=fused, hidden_dropout=0, attention_dropout=0,
            params_dtype=torch.bfloat16, device=device,
        )  # fmt: skip

    module, plain = twins(layer, recipe, None)
    assert len(fp8_weights(module)) == (4 if fused else 6)
    x = torch.randn(8, 2, 64, device=device, dtype=torch.bfloat16)
    counts, found = [], []
    for m in (module, plain):
        with counted() as gemms:
            found.append(step(m, x, recipe))
        counts.append((gemms.fp8, quantized()))
    assert counts[0][0] == counts[1][0] == 12
    assert counts[1][1] - counts[0][1] == (8 if fused else 6)
    if recipe == "current" and fused:
        assert_same_bits(*found)


@our_kernels
@pytest.mark.parametrize("recipe", PER_TENSOR)
def test_a_layer_is_one_plan(device, recipe):
    """Quantized weights go into it as cached ones do, and what replaces one is seen."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32  # what has plans there

    def layer():
        options = {"fuse_qkv_params": True, "hidden_dropout": 0, "attention_dropout": 0}
        return te.TransformerLayer(64, 128, 4, device=device, params_dtype=dtype, **options)

    found = []
    for planned in (True, False):
        te.reset()
        with same_draws(device):
            module = made(layer, recipe)
            batches = [torch.randn(8, 2, 64, device=device, dtype=dtype) for _ in range(5)]
        if not planned:
            module.register_forward_hook(lambda *_: None)
            for part in module.modules():
                part.register_forward_hook(lambda *_: None)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        results = []
        for i, x in enumerate(batches):
            results.append(step(module, x, recipe))
            optimizer.step()
            if i == 3:
                old = module.layernorm_mlp.fc1_weight
                new = torch.nn.Parameter(old._quantizer(2 * old.dequantize().detach()))
                module.layernorm_mlp.fc1_weight = new
        calls = getattr(module.__dict__.get("_calls"), "calls", {})
        assert planned == any(calls.values())
        found.append(results)
    assert_same_bits(*found)


def test_a_call_is_found_again(device):
    """Until a weight is plain, or another one."""
    module = made(lambda: make("linear", device), "current")
    x = batch(device)
    for _ in range(3):
        step(module, x, "current")
    kept = module._kept_calls
    assert len(kept) == 1 and module._quantized_parameters
    step(module, x, "current")
    assert module._kept_calls is kept and len(kept) == 1
    module.weight = torch.nn.Parameter(module.weight.dequantize().detach())
    plain = copy.deepcopy(module)
    for _ in range(2):
        assert_same_bits(step(module, x, "current"), step(plain, x, "current"))
    assert not module._quantized_parameters


@pytest.mark.parametrize("accumulates", [True, False])
def test_main_gradients(device, accumulates):
    options = {"fuse_wgrad_accumulation": accumulates}
    module, plain = pair("linear", device, "current", **options)
    for m in (module, plain):
        m.weight.main_grad = torch.ones(WIDTH, IN, device=device)
        m.weight.grad_added_to_main_grad = False
    x = batch(device)
    for _ in range(2):
        step(module, x, "current"), step(plain, x, "current")
    assert module.weight.grad_added_to_main_grad is accumulates
    assert_same_bits(module.weight.main_grad, plain.weight.main_grad)


def test_deferred_weight_gradients(device):
    module, plain = pair("linear", device, "current", delay_wgrad_compute=True)
    x = batch(device)
    for m in (module, plain):
        step(m, x, "current")
        m.backward_dw()
    assert_same_bits(module.weight.grad, plain.weight.grad)


# ---- other precisions ----------------------------------------------------------------------------


def test_without_fp8_the_values_are_read_with_a_warning(device):
    module, plain = pair("linear", device, "current")
    with torch.no_grad():
        plain.weight.copy_(module.weight)
    x = batch(device)
    with pytest.warns(UserWarning, match="Linear: its weight is quantized, and no FP8 autocast"):
        found = step(module, x)
    assert_same_bits(found, step(plain, x))


@pytest.mark.parametrize(("one", "other"), [("current", "delayed"), ("delayed", "current")])
def test_another_recipe_is_an_error(device, one, other):
    module = made(lambda: make("linear", device), one)
    with pytest.raises(RuntimeError, match="its weight is a Float8Tensor of Float8.*does not read"):
        step(module, batch(device), other)


def test_elements_that_the_recipe_does_not_read(device):
    module = made(lambda: make("linear", device), None)
    wrong = current(te.DType.kFloat8E5M2)(module.weight.detach())
    module.weight = torch.nn.Parameter(wrong)
    with pytest.raises(RuntimeError, match="its weight is a Float8Tensor"):
        step(module, batch(device), "current")


# ---- quantized inputs ----------------------------------------------------------------------------


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_a_quantized_input_is_not_cast_again(device, columnwise, weights):
    module, plain = pair("linear", device, "current" if weights else None)
    x = batch(device).view(2, ROWS // 2, IN)
    expected = step(plain, x, "current")
    inp = x.clone().requires_grad_()
    module.zero_grad()
    tensor = current(columnwise=columnwise)(inp)
    with counted() as gemms:
        with region("current"):
            out = module(tensor)
        out.backward(torch.ones_like(out))
    assert count_of(gemms, "current") == 3 and quantized() == (1 if weights else 3)
    assert_same_bits(
        [out.detach(), inp.grad, module.weight.grad], [*expected[:2], expected[2]["weight"]]
    )


@pytest.mark.parametrize("kind", ["norm-linear", "swiglu"])
def test_before_a_norm_it_is_read_in_high_precision(device, kind):
    module = make(kind, device)
    tensor = current()(batch(device))
    with region("current"):
        found = module(tensor)
        expected = module(tensor.dequantize())
    assert_same_bits(found, expected)
    with region(None):
        assert_same_bits(module(tensor), module(tensor.dequantize()))
