# SPDX-License-Identifier: Apache-2.0
"""Quantized outputs and gradients of inputs, `fp8_output` and `fp8_grad`, from module to module."""

import copy

import pytest
import torch
from device_kinds import every_device
from pytorch.helpers import assert_same_bits, captured, counted, same_bits, side_stream, state_of
from pytorch.recompute_cases import CHECKPOINTS

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.execution.random import draw_pair
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "measured first": lambda: DelayedScaling(amax_history_len=4, measure_first=True),
    "current": Float8CurrentScaling,
    "current power 2": lambda: Float8CurrentScaling(use_power_2_scales=True),
    "block": Float8BlockScaling,
    "block tiles": lambda: Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "row": Float8RowScaling,
    "mx": MXFP8BlockScaling,
    "nv": lambda: NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nv rows": lambda: NVFP4BlockScaling(
        disable_stochastic_rounding=True,
        disable_rht=True,
        row_scaled_activation=True,
        nvfp4_4over6="activations",
    ),
}
ONE_SCALE = ("delayed", "measured first", "current", "current power 2")
KINDS = {"linear": te.Linear, "norm-linear": te.LayerNormLinear}
EMULATED = ("emulated.mxfp8", "emulated.nvfp4", "emulated.mixed")
IN, OUT = 48, 64
OUTPUT_SLOT, GRAD_SLOT = 2, 1
DTYPE = torch.bfloat16


def made(kind, device, sizes=(IN, OUT), **options):
    return KINDS[kind](*sizes, params_dtype=DTYPE, device=device, **options)


def inputs(device, width=IN):
    return torch.randn(2, 16, width, dtype=DTYPE, device=device, requires_grad=True)


def cast_alone(wide, recipe, name, gradient, scale):
    """What the quantizer of the format makes of high precision."""
    if name.startswith("nv"):
        options = {"with_rht": name == "nv"}
        if name == "nv rows" and not gradient:
            options |= {"row_scaled_nvfp4": True, "nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}
        return te.NVFP4Quantizer(**options)(wide.detach())
    code = recipe.fp8_format.dtype_name("bwd" if gradient else "fwd")
    kind = {"e4m3": te.DType.kFloat8E4M3, "e5m2": te.DType.kFloat8E5M2}[code]
    if name in ("delayed", "measured first"):
        made = te.Float8Quantizer(
            scale, torch.zeros_like(scale), kind, measure_first=name != "delayed"
        )
    elif name in ONE_SCALE:
        made = te.Float8CurrentScalingQuantizer(kind, force_pow_2_scales=name != "current")
    elif name == "row":
        made = te.Float8RowQuantizer(kind)
    elif name == "mx":
        made = te.MXFP8Quantizer(kind)
    else:
        dim = 2 if name == "block tiles" and not gradient else 1
        made = te.Float8BlockQuantizer(kind, block_scaling_dim=dim)
    return made(wide.detach())


def assert_same_quantized(found, expected):
    """The same class, settings and forms, as far as these are there."""
    assert type(found) is type(expected) and found.shape == expected.shape
    assert found.dtype == expected.dtype
    for field, one in found._fields().items():
        other = getattr(expected, field)
        if isinstance(one, torch.Tensor):
            assert same_bits(one, other), field
        elif field not in ("_quantizer", "_transpose", "_transpose_version"):
            assert one == other, field


def run(layer, recipe, x, grad, **options):
    """Output and gradient of one step, and the scale of its slot before it, both ways."""
    state = state_of(layer)
    x.grad = None
    with te.autocast(recipe=recipe):
        out = layer(x, **options)
    out.backward(grad)
    ones = torch.ones(1) if not recipe.delayed() or not recipe.measure_first else torch.zeros(1)
    if state is None:
        return out, x.grad, ones, ones
    forward, backward = state["forward"][0], state["backward"][0]
    return out, x.grad, forward[OUTPUT_SLOT:][:1], backward[GRAD_SLOT:][:1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_bits_are_those_of_a_cast_of_what_would_be_returned(kind, name, device, rng):
    layer, recipe = made(kind, device), RECIPES[name]()
    twin = copy.deepcopy(layer)
    x = inputs(device)
    for _ in range(3):  # scale 1, then that of the step before
        grad = torch.randn(2, 16, OUT, dtype=DTYPE, device=device)
        wide, wide_grad, *_ = run(twin, recipe, x, grad)
        out, x_grad, scale, grad_scale = run(layer, recipe, x, grad, fp8_output=True, fp8_grad=True)
        assert_same_quantized(out, cast_alone(wide, recipe, name, False, scale.to(device)))
        assert_same_quantized(
            x_grad, cast_alone(wide_grad, recipe, name, True, grad_scale.to(device))
        )
        assert out.requires_grad and out.grad_fn is not None
        for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
            assert_same_bits(one.grad, other.grad)
        if name == "delayed":
            scales = state_of(layer)["forward"][0], state_of(twin)["forward"][0]
            assert scales[0][OUTPUT_SLOT] != 1.0 and scales[1][OUTPUT_SLOT] == 1.0
            assert torch.equal(scales[0][:2], scales[1][:2])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_chain_casts_once_between_its_layers(name, bias, device, rng):
    """Each of what passes between is cast by who makes it, and by nobody else."""
    if device == "cuda":
        pytest.skip("counters by operator name the CPU's")
    first, last = made("linear", device, bias=bias), made("linear", device, (OUT, 32), bias=bias)
    recipe, x = RECIPES[name](), inputs(device)
    for _ in range(2):
        with te.autocast(recipe=recipe):
            between = first(x, fp8_output=True)
            out = last(between, fp8_grad=True)
        grad = torch.randn_like(out)
        with counted() as gemms:
            with te.autocast(recipe=recipe):
                between = first(x, fp8_output=True)
                out = last(between, fp8_grad=True)
            forward = _core.counters()
            out.backward(grad)
            counts = _core.counters()
    assert gemms.fp8 + sum(n for c, n in counts.items() if c in EMULATED) == 6
    assert is_quantized(between) and not is_quantized(out) and not is_quantized(x.grad)
    # The input, two weights, what is between; the gradients of both outputs and the weights again.
    assert forward["op.cpu.quantize"] == 4
    summed = bias  # of the gradient between: its bias gradient by itself
    assert counts["op.cpu.quantize"] == 4 + 4 + summed
    assert counts.get("op.cpu.dequantize", 0) == summed
    assert counts.get("op.cpu.transpose", 0) == 2 * (name in ONE_SCALE)


@pytest.mark.parametrize("name", RECIPES)
def test_a_chain_has_the_bits_of_its_layers_by_themselves(name, device, rng):
    """Over what the layer before has returned, and the gradient that the layer behind has."""
    first, last = made("linear", device), made("linear", device, (OUT, 32))
    apart = copy.deepcopy(first), copy.deepcopy(last)
    recipe, x = RECIPES[name](), inputs(device)
    for _ in range(3):
        grad = torch.randn(2, 16, 32, dtype=DTYPE, device=device)
        for layer in (first, last, *apart):
            layer.zero_grad()
        x.grad = None
        with te.autocast(recipe=recipe):
            last(first(x, fp8_output=True), fp8_grad=True).backward(grad)
        whole, x.grad = x.grad, None
        with te.autocast(recipe=recipe):
            between = apart[0](x, fp8_output=True)
            leaf = between.detach().requires_grad_()
            apart[1](leaf, fp8_grad=True).backward(grad)
        assert is_quantized(leaf.grad)
        between.backward(leaf.grad)
        assert_same_bits(whole, x.grad)
        for one, other in zip((first, last), apart, strict=True):
            for mine, its in zip(one.parameters(), other.parameters(), strict=True):
                assert_same_bits(mine.grad, its.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stochastic_gradient_rounds_by_numbers_of_its_own(kind, device, rng):
    """By the second pair of the call: the first has rounded what it is made of."""
    layer, recipe, x = made(kind, device), NVFP4BlockScaling(), inputs(device)
    twin = copy.deepcopy(layer)
    grad = torch.randn(2, 16, OUT, dtype=DTYPE, device=device)
    seed = int(rng.integers(2**31))
    found = []
    for of, options in ((twin, {}), (layer, {"fp8_grad": True}), (layer, {"fp8_grad": True})):
        torch.manual_seed(seed)
        found.append(run(of, recipe, x, grad, **options)[1])
    wide, first, again = found
    torch.manual_seed(seed)
    draw_pair(x)
    quantizer = te.NVFP4Quantizer(with_rht=True, stochastic_rounding=True)
    assert_same_quantized(first, quantizer(wide))
    assert_same_quantized(again, first)
    torch.manual_seed(seed)
    assert not same_bits(quantizer(wide)._rowwise_data, first._rowwise_data)


@every_device
def test_a_stochastic_gradient_is_multiplied_as_it_arrives(device, start):
    """With the bits of the layers by themselves, one over what the other one has returned."""
    first, last = made("linear", device), made("linear", device, (OUT, 32))
    recipe, x = NVFP4BlockScaling(), inputs(device)
    grad = torch.randn(2, 16, 32, dtype=DTYPE, device=device)
    found = []
    for whole in (True, False):
        start()
        for tensor in (x, *first.parameters(), *last.parameters()):
            tensor.grad = None
        with counted() as gemms, te.autocast(recipe=recipe):
            between = first(x, fp8_output=True)
            leaf = between if whole else between.detach().requires_grad_()
            last(leaf, fp8_grad=True).backward(grad)
            if not whole:
                assert isinstance(leaf.grad, te.NVFP4Tensor)
                between.backward(leaf.grad)
        assert gemms.fp8 + gemms.other == 6
        if device == "cpu" and whole:  # as in the chain above
            assert _core.counters()["op.cpu.quantize"] == 4 + 4 + 1
        params = [p.grad for layer in (first, last) for p in layer.parameters()]
        found.append([x.grad, *params])
    assert_same_bits(*found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wide", [True, False])
def test_a_gradient_that_a_cast_would_not_change(kind, wide, device, rng):
    """At scale 1, of numbers that E5M2 holds, a quantized gradient gives what a plain one does."""
    layer, recipe = made(kind, device), RECIPES["delayed"]()
    x = inputs(device)
    grad = torch.randn(2, 16, OUT, dtype=DTYPE, device=device)
    grad = grad.to(torch.float8_e5m2).to(DTYPE)
    one = torch.ones(1, device=device)
    quantized = te.Float8Quantizer(one, torch.zeros_like(one), te.DType.kFloat8E5M2)(grad)
    found = []
    for given in (grad, quantized):
        layer.zero_grad()
        te.reset()
        results = run(layer, recipe, x, given, fp8_output=not wide)
        found.append((results[1], [p.grad for p in layer.parameters()]))
    if kind == "linear":  # its bias gradient is the same sum of the same numbers
        assert_same_bits(found[0], found[1])
    assert_same_bits(found[0][0], found[1][0])


@pytest.mark.parametrize("name", ["delayed", "block"])
def test_plain_torch_reads_the_values(name, device, rng):
    layer, recipe, x = made("linear", device), RECIPES[name](), inputs(device)
    with te.autocast(recipe=recipe):
        out = layer(x, fp8_output=True)
    loss = torch.nn.functional.silu(out).square().mean()
    loss.backward()
    assert loss.dtype is DTYPE and type(x.grad) is torch.Tensor and x.grad.any()
    values = out.detach().dequantize().requires_grad_()
    torch.nn.functional.silu(values).square().mean().backward()
    grads = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    te.reset()
    with te.autocast(recipe=recipe):
        layer(x).backward(values.grad)
    assert_same_bits(grads, [p.grad for p in layer.parameters()])


@pytest.mark.parametrize("how", ["main_grad", "deferred", "saved input", "norm output", "split"])
def test_with_other_options(how, device, rng):
    """The same numbers as without a quantized output, whose gradient passes unchanged."""
    options = {
        "main_grad": {"fuse_wgrad_accumulation": True},
        "deferred": {"delay_wgrad_compute": True},
        "norm output": {"return_layernorm_output": True},
        "saved input": {"save_original_input": True},
        "split": {"parameters_split": ("query", "key")},
    }[how]
    kind = "norm-linear" if how == "norm output" else "linear"
    recipe, x = Float8CurrentScaling(), inputs(device)
    layer = made(kind, device, **options)
    grad = torch.randn(2, 16, OUT, dtype=DTYPE, device=device)
    kinds = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2)
    found = []
    for given, quantized in ((kinds(grad).dequantize(), False), (kinds(grad), True)):
        layer.zero_grad()
        x.grad = None
        if how == "main_grad":
            layer.weight.main_grad = torch.zeros(OUT, IN, device=device)
        with te.autocast(recipe=recipe):
            out = layer(x, fp8_output=quantized)
        if how == "norm output":
            out, normed = out
            assert not is_quantized(normed) and normed.shape == x.shape
        assert is_quantized(out) == quantized
        out.backward(given)
        layer.backward_dw()
        main = [layer.weight.main_grad] if how == "main_grad" else []
        found.append([x.grad, *main, *[p.grad for p in layer.parameters()]])
    assert_same_bits(*found)  # the values are the cast's own, so that another makes the same codes


@pytest.mark.parametrize("how", ["high_precision", "dequantized"])
@pytest.mark.parametrize("recipe", [Float8CurrentScaling, Float8BlockScaling])
def test_a_backward_in_high_precision_reads_and_gives_that(how, recipe, device, rng):
    layer, x = made("linear", device), inputs(device)
    grad = torch.randn(2, 16, OUT, dtype=DTYPE, device=device)
    quantized = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2)(grad)
    found = []
    for given in (quantized, quantized.dequantize()):
        layer.zero_grad()
        options = {"fp8_output": True, "fp8_grad": True}
        out, x_grad, *_ = run(layer, recipe(backward_override=how), x, given, **options)
        assert is_quantized(out) and not is_quantized(x_grad)
        found.append([x_grad, *[p.grad for p in layer.parameters()]])
    assert_same_bits(*found)


@pytest.mark.parametrize("way", CHECKPOINTS)
@pytest.mark.parametrize("name", ["delayed", "measured first", "current", "block", "nv"])
def test_recompute(way, name, device, start):
    found = []
    for checkpoint in (lambda f, *a: f(*a), CHECKPOINTS[way]):
        start()
        first, last = made("linear", device), made("linear", device, (OUT, 32))
        recipe, x = RECIPES[name](), inputs(device)

        def block(x, first=first, last=last):
            return last(first(x, fp8_output=True), fp8_grad=True)

        for _ in range(3):
            with te.autocast(recipe=recipe):
                out = checkpoint(block, x)
            out.backward(torch.randn_like(out))
        params = [p.grad for layer in (first, last) for p in layer.parameters()]
        found.append([out.detach(), x.grad, params, state_of(first), state_of(last)])
    for one, other in zip(*found, strict=True):
        if one is not None:
            assert_same_bits(one, other)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch asks non-leaves, and hides it
@pytest.mark.parametrize("name", ["delayed", "current", "block", "nv"])
def test_compile_leaves_such_calls_outside_of_its_graphs(name, device, start):
    found = []
    for compiled in (False, True):
        start()
        first, last = made("linear", device), made("linear", device, (OUT, 32))
        recipe, x = RECIPES[name](), inputs(device)

        def block(x, first=first, last=last):
            between = first(torch.sin(x), fp8_output=True, fp8_grad=True)
            return torch.cos(last(between, fp8_grad=True))

        torch.compiler.reset()
        program = torch.compile(block, backend="aot_eager") if compiled else block
        for _ in range(2):
            with te.autocast(recipe=recipe):
                out = program(x)
            out.backward(torch.randn_like(out))
        params = [p.grad for layer in (first, last) for p in layer.parameters()]
        found.append([out.detach(), params, state_of(first), state_of(last)])
    for one, other in zip(*found, strict=True):
        if one is not None:
            assert_same_bits(one, other)


@every_device
def test_calls_that_are_found_again(device, rng):
    """What a call returns is part of its situation."""
    layer, x = made("linear", device), inputs(device)
    for options in ({}, {"fp8_output": True}, {"fp8_grad": True}) * 3:
        x.grad = None
        with te.autocast(recipe=Float8CurrentScaling()):
            out = layer(x, **options)
        out.backward(torch.ones(2, 16, OUT, dtype=DTYPE, device=device))
        assert is_quantized(out) == bool(options.get("fp8_output"))
        assert is_quantized(x.grad) == bool(options.get("fp8_grad"))


@pytest.mark.parametrize("name", ["delayed", "current", "block", "nv"])
def test_calls_with_quantized_inputs_are_found_again(name, device, rng, monkeypatch):
    """With the bits of those that are decided anew; what differs in kind is another situation."""
    layer, recipe, x = made("linear", device), RECIPES[name](), inputs(device)
    other = made("linear", device, (IN, IN))
    decided, decide = [], layer._decide
    monkeypatch.setattr(layer, "_decide", lambda *a: decided.append(0) or decide(*a))
    results = []
    for step in range(4):
        if step == 3:
            layer._kept_calls.clear()
        layer.zero_grad()
        with te.autocast(recipe=recipe):
            given = other(x, fp8_output=True).detach()
            out = layer(given.requires_grad_(), is_first_microbatch=step == 0)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), given.grad, layer.weight.grad.clone()])
        if step:
            assert len(decided) == 2 + (step == 3)
    assert_same_bits(results[2], results[3]) if name != "delayed" else None
    with te.autocast(recipe=recipe), torch.no_grad():
        layer(given)
    assert len(decided) == 4
    with te.autocast(recipe=NVFP4BlockScaling()):
        assert layer(given).isfinite().all()  # read in high precision


@every_device
def test_nothing_is_quantized_without_fp8(device, rng):
    layer, x = made("linear", device), inputs(device)
    out = layer(x, fp8_output=True, fp8_grad=True)
    out.sum().backward()
    assert type(out) is torch.Tensor and type(x.grad) is torch.Tensor
    with torch.no_grad(), te.autocast(recipe=DelayedScaling()):
        assert type(layer(x, fp8_output=True)) is te.Float8Tensor


@every_device
def test_the_scale_of_an_output_is_saved_and_loaded(device, rng):
    layer, recipe, x = made("linear", device), RECIPES["delayed"](), inputs(device)
    grad = torch.randn(2, 16, OUT, dtype=DTYPE, device=device)
    for _ in range(2):
        out, *_ = run(layer, recipe, x, grad, fp8_output=True, fp8_grad=True)
    twin = made("linear", device)
    twin.load_state_dict(layer.state_dict())
    assert_same_bits(state_of(twin), state_of(layer))
    expected = state_of(layer)["forward"][0][OUTPUT_SLOT]
    out, *_ = run(twin, recipe, x, grad, fp8_output=True, fp8_grad=True)
    assert out._scale_inv == 1.0 / expected and expected != 1.0


@every_device
def test_new_values_are_cast_as_the_old_ones(device, rng):
    """By the output's own quantizer: with its slot's scale, where it records the amax too."""
    layer, recipe, x = made("linear", device), RECIPES["delayed"](), inputs(device)
    with te.autocast(recipe=recipe):
        out = layer(x, fp8_output=True).detach()
        out.copy_(torch.full_like(out, 1000.0, dtype=torch.float32))
    history = state_of(layer)["forward"][1]
    assert history[-1, OUTPUT_SLOT] == 1000.0 and out.dequantize().eq(448.0).all()


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_that_a_leaf_adds_up_do_not_saturate(name, device, rng):
    """The slot's scale fits one gradient: a sum is measured, and recorded nowhere."""
    layer, recipe, x = made("linear", device), RECIPES[name](), inputs(device)
    with torch.no_grad():
        layer.weight.fill_(0.5)
    grad = torch.ones(2, 16, OUT, dtype=DTYPE, device=device)
    for _ in range(3):
        run(layer, recipe, x, grad, fp8_grad=True)
    for times in (2, 3, 4):
        with te.autocast(recipe=recipe):
            out = layer(x, fp8_grad=True)
        out.backward(grad)
        assert is_quantized(x.grad)
        assert x.grad.dequantize().eq(times * 0.5 * OUT).all()
    state = state_of(layer)
    assert state is None or state["backward"][1][:, GRAD_SLOT].max() == 0.5 * OUT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fp8_output", "fp8_grad"])
def test_what_can_not_be_returned(kind, name, device, rng):
    layer, x = made(kind, device), inputs(device)
    recipe = CustomRecipe(lambda role: te.MXFP8Quantizer(te.DType.kFloat8E4M3))
    text = f"{type(layer).__name__}: {name}=True under CustomRecipe"
    with te.autocast(recipe=recipe), pytest.raises(NotImplementedError, match=text):
        layer(x, **{name: True})

    def loss(x):
        with te.autocast(recipe=Float8CurrentScaling()):
            return layer(x, **{name: True}).sum()

    text = f"{type(layer).__name__}: {name}=True in a transform of torch.func"
    with pytest.raises(NotImplementedError, match=text):
        torch.func.grad(loss)(x.detach())


@every_device
def test_export_refuses(device, rng):
    class Program(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = made("linear", device)

        def forward(self, x):
            with te.autocast(recipe=Float8CurrentScaling()):
                return self.layer(x, fp8_output=True) + 0.0

    with pytest.raises(NotImplementedError, match="Linear: fp8_output=True in torch.export"):
        torch.export.export(Program(), (inputs(device).detach(),))


@pytest.mark.gpu
def test_capture(rng):
    """A replay has the bits of a step: current scaling keeps no state from one to the next."""
    first, last = made("linear", "cuda"), made("linear", "cuda", (OUT, 32))
    recipe, x = Float8CurrentScaling(), inputs("cuda")
    grad = torch.randn(2, 16, 32, dtype=DTYPE, device="cuda")

    def step():
        for tensor in (x, *first.parameters(), *last.parameters()):
            tensor.grad = None
        with te.autocast(recipe=recipe):
            out = last(first(x, fp8_output=True), fp8_grad=True)
        out.backward(grad)
        return [out.detach(), x.grad, *[p.grad for m in (first, last) for p in m.parameters()]]

    with side_stream():
        expected = [tensor.clone() for tensor in step()]
    graph, found = captured(step)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(found, expected)
