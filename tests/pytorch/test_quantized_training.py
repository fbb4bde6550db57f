# SPDX-License-Identifier: Apache-2.0
"""Quantized weights in training: their scales, optimizers and their slices, compilers, graphs."""

import copy
import functools
import gc
import pickle

import pytest
import torch
from device_kinds import every_device, our_kernels
from pytorch.helpers import assert_same_bits, captured, same_draws
from pytorch.module_cases import (
    IN,
    ROWS,
    WIDTH,
    batch,
    make,
    region,
    step,
    weights_of,
)
from pytorch.quantized_cases import (
    PER_TENSOR,
    assert_same_tensor,
    current,
    made,
    twins,
)

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.tensor import utils as tensor_utils

pytestmark = every_device

# ---- training ------------------------------------------------------------------------------------


def test_delayed_scales_follow_the_weights(device):
    """The optimizer casts with the module's scale and records the amax there."""
    recipe = DelayedScaling(amax_history_len=2)
    module = made(lambda: te.Linear(IN, WIDTH, device=device), "delayed")
    module.weight._quantizer.scale.fill_(1.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    largest = [module.weight.dequantize().abs().max().item()]
    for i in range(4):
        with te.autocast(recipe=recipe):
            out = module(batch(device))
        out.square().sum().backward()
        scale = module.weight._quantizer.scale.item()
        if i >= 2:  # the casts of the last two steps
            expected = torch.tensor(448.0) / torch.tensor(max(largest[-2:]))
            assert scale == expected.item()
        values = module.weight.dequantize().detach() - module.weight.grad
        largest.append(values.abs().max().item())
        optimizer.step()
        optimizer.zero_grad()
        assert module.weight._scale_inv.item() == (1 / torch.tensor(scale)).item()
    slots = module._slots
    slot = slots.forward_slot + 1
    assert slots.forward_history[0, slot].item() == largest[-1]
    assert module.weight._quantizer.scale.data_ptr() == slots.forward_scale[slot:].data_ptr()


def test_first_casts_with_their_own_amax(device):
    """`measure_first`: weights that nothing was recorded of are not cast with scale 1."""
    recipe = DelayedScaling(amax_history_len=2, measure_first=True)
    module, plain = twins(lambda: te.Linear(IN, WIDTH, device=device), recipe, None)
    assert_same_bits(module.weight._data, current()(plain.weight.detach())._data)
    x = batch(device)
    assert_same_bits(step(module, x, recipe), step(plain, x, recipe))
    with torch.no_grad():
        module.weight.copy_(2 * plain.weight)
    assert_same_bits(module.weight._data, current()(2 * plain.weight.detach())._data)
    restored = pickle.loads(pickle.dumps(module.weight))
    assert restored._quantizer.measure_first
    masters = torch.randn(module.weight.numel(), device=device)
    tensor_utils.quantize_master_weights([module.weight], [masters], [0], None)
    step(module, x, recipe)  # and records it
    assert module.weight.dequantize().abs().max() > 0


@pytest.mark.parametrize("first", [False, True])
def test_the_recipe_that_runs_says_how_weights_are_cast(device, first):
    """Weights that were made for the other value of `measure_first`."""
    recipe = DelayedScaling(amax_history_len=2, measure_first=first)
    module = made(
        lambda: te.Linear(IN, WIDTH, device=device), DelayedScaling(measure_first=not first)
    )
    step(module, batch(device), recipe)
    values = torch.randn_like(module.weight.dequantize()) / 1024
    with torch.no_grad():
        module.weight.copy_(values)
    expected = current()(values)._data if first else values.to(torch.float8_e4m3fn)
    assert_same_bits(module.weight._data, expected.view(torch.uint8))


def test_a_weight_keeps_its_scale_for_itself(device):
    """A weight whose module is gone, or has let its state go, records in no other module's."""
    recipe = DelayedScaling(amax_history_len=2)
    neighbour = te.Linear(IN, WIDTH, device=device)
    module = made(lambda: te.Linear(IN, WIDTH, device=device), recipe)
    x = batch(device)
    for each in (neighbour, module):
        step(each, x, recipe)
    weight = module.weight
    assert copy.deepcopy(weight._quantizer)._bound is None
    del module
    gc.collect()
    others = [te.Linear(IN, WIDTH, device=device) for _ in range(2)]
    for other in others:
        step(other, x, recipe)
    with torch.no_grad():
        weight.fill_(300.0)
    for other in (neighbour, *others):
        history = other._slots.views()["forward"][1]
        assert history.max() < 300.0


def test_columns_of_an_input_are_read_without_the_next_ones(device):
    """Which are no padding, although they lie where it would."""
    columns, wide = 20, 32
    values = torch.randn(ROWS, wide, device=device)
    values[:, columns:] = float("nan")
    x = current()(values)[:, :columns]
    module = te.Linear(columns, WIDTH, device=device)
    with region("current"):
        found, expected = module(x), module(x.dequantize())
    assert_same_bits(found, expected)


@our_kernels
@pytest.mark.parametrize("recipe", PER_TENSOR)
@pytest.mark.parametrize("masters", [True, False])
def test_a_module_learns(device, recipe, masters):
    module = made(lambda: make("swiglu", device, dtype=torch.bfloat16), recipe)
    optimizer = te.optimizers.FusedAdam(module.parameters(), lr=3e-3, master_weights=masters)
    x = batch(device, torch.bfloat16)
    target = torch.randn_like(x)
    losses = []
    for _ in range(60):
        with region(recipe):
            loss = (module(x) - target).float().square().mean()
        (loss * 100).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert all(isinstance(weight, te.Float8Tensor) for weight in weights_of(module).values())


# ---- sharded optimizers --------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", PER_TENSOR)
@pytest.mark.parametrize("sizes", [(IN, WIDTH), (36, 20)])
def test_slices_of_masters(device, recipe, sizes):
    """Two slices give the bytes of a whole cast, where the scale is that of the whole."""
    kind = functools.partial(te.Linear, *sizes, device=device, params_dtype=torch.bfloat16)
    modules = twins(kind, recipe, recipe, preserve=True)
    one, other = (module.weight for module in modules)
    masters = torch.randn(one.numel(), device=device)
    masters[0] = 9.0  # in the first slice, so that alone has the scale
    whole = other._quantizer(masters.view(one.shape).bfloat16())
    half = one.numel() // 2
    call = tensor_utils.quantize_master_weights
    call([one], [masters[:half]], [0], None)
    if recipe == "current":
        assert_same_bits(one._scale_inv, whole._scale_inv)
    assert_same_bits(one._data.reshape(-1)[:half], whole._data.reshape(-1)[:half])
    assert one.get_high_precision_init_val() is None
    shard = torch.zeros(one.numel() - half, dtype=torch.uint8, device=device)
    rest = masters[half:].clone()
    rest[-1] = 9.0
    tensor_utils.cast_master_weights_to_fp8(
        [one, other], [rest, None], [half, None], None, [shard, None]
    )
    assert_same_bits(shard[:-1], whole._data.reshape(-1)[half:-1])
    if recipe == "delayed":
        assert one._quantizer.amax.item() == 9.0 and other._quantizer.amax.item() == 9.0
    for start in (None, -1, half + 1):
        with pytest.raises(ValueError, match=f"a slice of {half} elements that begins at {start}"):
            call([one], [masters[:half]], [start], None)
    with pytest.raises(ValueError, match="1 model_weights, 0 master_weights"):
        call([one], [], [0], None)
    with pytest.raises(NotImplementedError, match="a model weight is a Parameter"):
        call([modules[0].bias], [masters[:2]], [0], None)


def test_raw_data_in_a_callers_buffer(device):
    weight = made(lambda: te.Linear(IN, WIDTH, device=device), "current").weight
    weight.update_usage(columnwise_usage=True)
    values, columns = weight.dequantize().detach(), weight._transpose
    buffer = torch.empty(2 * IN * WIDTH, dtype=torch.uint8, device=device)
    part = buffer[IN * WIDTH :].view(WIDTH, IN)
    tensor_utils.replace_raw_data(weight, part)
    assert weight._data.data_ptr() == part.data_ptr() and weight._transpose is columns
    assert_same_bits(weight.dequantize().detach(), values)
    buffer.zero_()
    assert weight._transpose_invalid
    tensor_utils.post_all_gather_processing([weight, torch.nn.Parameter(values)])
    assert weight._transpose.abs().max() == 0 and not weight._transpose_invalid
    with pytest.raises(ValueError, match=r"new_raw_data is torch.uint8 \(3,\), expected"):
        tensor_utils.replace_raw_data(weight, buffer[:3])
    with pytest.raises(ValueError, match="replace_raw_data: Tensor, expected a quantized tensor"):
        tensor_utils.replace_raw_data(values, buffer)
    with pytest.raises(ValueError, match="post_all_gather_processing: str"):
        tensor_utils.post_all_gather_processing(["weight"])


# ---- compilers -----------------------------------------------------------------------------------

COMPILERS = [
    pytest.param("cpu", id="cpu"),
    pytest.param("cuda", id="cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("place", COMPILERS)
@pytest.mark.parametrize("recipe", PER_TENSOR)
def test_compiled_training_has_the_bits_of_eager_training(place, recipe):
    found = []
    for compiled in (False, True):
        te.reset()
        torch._dynamo.reset()
        with same_draws(place):
            module = made(lambda: make("linear", place, dtype=torch.bfloat16), recipe)
            batches = [batch(place, torch.bfloat16).requires_grad_() for _ in range(3)]
        call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        for inp in batches:
            with region(recipe):
                out = call(inp)
            out.float().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([out.detach(), inp.grad, module.weight._data, module.weight._scale_inv])
    assert_same_bits(*found)


@pytest.mark.parametrize("place", COMPILERS)
def test_quantized_tensors_in_and_out_of_a_graph(place):
    torch._dynamo.reset()
    quantizer, module = current(), make("linear", place)

    def cast(x):
        return quantizer(2 * x)

    def use(x):
        return module(quantizer(torch.relu(x)))

    x = batch(place)
    tensor = torch.compile(cast, fullgraph=True, backend="aot_eager")(x)
    assert_same_tensor(tensor, cast(x))
    read = torch.compile(lambda t: t.dequantize() + 1, fullgraph=True, backend="aot_eager")
    assert_same_bits(read(tensor), tensor.dequantize() + 1)
    results = []
    for call in (use, torch.compile(use, fullgraph=True, backend="aot_eager")):
        inp = x.clone().requires_grad_()
        module.zero_grad()
        with region("current"):
            out = call(inp)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), inp.grad, module.weight.grad.clone()])
    assert_same_bits(*results)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", PER_TENSOR)
def test_a_captured_step_reads_the_weights_as_they_are(recipe):
    """Updates write to the memory that a graph reads: codes and scales."""
    module = made(lambda: make("linear", "cuda", dtype=torch.bfloat16), recipe)
    x = batch("cuda", torch.bfloat16)
    with torch.no_grad(), region(recipe):
        for _ in range(2):
            module(x)
        graph, out = captured(lambda: module(x))
    with torch.no_grad():
        module.weight.copy_(3 * module.weight.dequantize())
        graph.replay()
        with region(recipe):
            expected = module(x)
    assert_same_bits(out, expected)
