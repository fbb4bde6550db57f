# SPDX-License-Identifier: Apache-2.0
"""`quantized_model_init`: modules whose weights are quantized once, and never cast by a forward."""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, counted
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
from pytorch.quantized_cases import assert_same_tensor, current, made

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.tensor import utils as tensor_utils

PER_TENSOR = ("current", "delayed")


def pair(kind, device, recipe, **options):
    """A module with quantized weights, and the same one with plain weights."""
    return [made(lambda: make(kind, device, **options), r) for r in (recipe, None)]


def fp8_weights(module):
    return [w for w in module.parameters() if isinstance(w, te.Float8Tensor)]


# ---- calls ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CHECKPOINTED)
@pytest.mark.parametrize("recipe", ["current", "current-power2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_a_weight_cast_at_each_call(device, kind, recipe, dtype):
    """And no forward or backward casts a weight: it is transposed where a backward reads it."""
    module, plain = pair(kind, device, recipe, dtype=dtype)
    assert len(fp8_weights(module)) == len(module.PARTS) and module.primary_weights_in_fp8
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
    assert casts - quantized() in (2 * len(module.PARTS), len(module.PARTS) + again)
    name = torch.device(device).type
    assert _core.counters()[f"op.{name}.transpose"] == len(module.PARTS)
    assert all(weight._transpose is None for weight in fp8_weights(module))


@pytest.mark.parametrize("sizes", [(36, 52), (32, 50), (37, 48)])
@pytest.mark.parametrize("recipe", PER_TENSOR)
def test_sizes_that_need_padding(device, sizes, recipe):
    module, plain = pair("linear", device, recipe, sizes=sizes)
    with torch.no_grad():
        plain.weight.copy_(module.weight.dequantize())
    if recipe == "delayed":  # of which the scale is 1
        plain.weight.data = module.weight.dequantize().detach()
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
    module, other = pair("linear", device, recipe)[0], pair("linear", device, recipe)[0]
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

    module, plain = made(layer, recipe), made(layer, None)
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
        module = made(layer, recipe)
        if not planned:
            module.register_forward_hook(lambda *_: None)
            for part in module.modules():
                part.register_forward_hook(lambda *_: None)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        torch.manual_seed(5)
        results = []
        for i in range(5):
            x = torch.randn(8, 2, 64, device=device, dtype=dtype)
            results.append(step(module, x, recipe))
            optimizer.step()
            if i == 3:
                old = module.layernorm_mlp.fc1_weight
                new = torch.nn.Parameter(old._quantizer(2 * old.dequantize().detach()))
                module.layernorm_mlp.fc1_weight = new
        calls = module.__dict__.get("_calls")
        assert planned == (calls is not None and any(calls.calls.values()))
        found.append(results)
    assert_same_bits(*found)


def test_a_call_is_found_again(device):
    """Until a weight is plain, or another one."""
    module = made(lambda: make("linear", device), "current")
    x = batch(device)
    for _ in range(3):
        step(module, x, "current")
    bound = module._bound
    assert len(bound) == 1 and module._held
    step(module, x, "current")
    assert module._bound is bound and len(bound) == 1
    module.weight = torch.nn.Parameter(module.weight.dequantize().detach())
    plain = copy.deepcopy(module)
    for _ in range(2):
        assert_same_bits(step(module, x, "current"), step(plain, x, "current"))
    assert not module._held


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
    module, plain = (made(lambda: te.Linear(IN, WIDTH, device=device), r) for r in (recipe, None))
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
    plain = made(lambda: te.Linear(IN, WIDTH, device=device), None)
    module = made(lambda: te.Linear(IN, WIDTH, device=device), "current", preserve=True)
    weight = module.weight
    assert weight.get_high_precision_init_val().device.type == "cpu"
    assert_same_bits(weight.get_high_precision_init_val(), plain.weight.cpu())
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    weight.clear_high_precision_init_val()
    usual = made(lambda: te.Linear(IN, WIDTH, device=device), "current")
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
        assert len(fp8_weights(copied)) == len(module.PARTS)
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
    again = made(lambda: make("norm-linear", device), recipe, seed=1)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert_same_bits(again.weight._data, module.weight._data)
    assert_same_bits(again.weight._scale_inv, module.weight._scale_inv)
    wide = {
        name: v.dequantize() if isinstance(v, te.QuantizedTensor) else v
        for name, v in saved.items()
    }
    assert all(type(v) is torch.Tensor for v in wide.values())


# ---- sharded optimizers --------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", PER_TENSOR)
@pytest.mark.parametrize("sizes", [(IN, WIDTH), (36, 20)])
def test_slices_of_masters(device, recipe, sizes):
    """Two slices give the bytes of a whole cast, where the scale is that of the whole."""
    modules = [
        made(lambda: te.Linear(*sizes, device=device, params_dtype=torch.bfloat16), recipe, True)
        for _ in range(2)
    ]
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
        module = made(lambda: make("linear", place, dtype=torch.bfloat16), recipe)
        call = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        torch.manual_seed(5)
        for _ in range(3):
            inp = batch(place, torch.bfloat16).requires_grad_()
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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = module(x)
    with torch.no_grad():
        module.weight.copy_(3 * module.weight.dequantize())
        graph.replay()
        with region(recipe):
            expected = module(x)
    assert_same_bits(out, expected)
