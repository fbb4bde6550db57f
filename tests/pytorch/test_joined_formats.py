# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors row after row: `torch.cat`, and split weights that one GEMM reads."""

import pytest
import torch
from pytorch.helpers import assert_same_bits, counted
from pytorch.module_cases import quantized, step
from pytorch.quantized_cases import E4M3, E5M2, FORMATS, assert_same_tensor, made, source_of

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)

ROWS = {"tiles": 128, "lines": 128, "mx": 32, "mx squares": 32, "mx margin": 32}
ROWS |= {"tiles f32": 128, "tiles e5m2": 128}
"""Formats that are put together, by the rows that parts have a multiple of."""


@pytest.mark.parametrize("columns", [256, 130])
@pytest.mark.parametrize("name", ROWS)
def test_rows_after_rows_are_the_cast_of_all(device, name, columns):
    each = ROWS[name]
    lengths = (each, 3 * each, each, 21)
    source = source_of(device, (sum(lengths), columns))
    quantizer = FORMATS[name]()
    parts = [quantizer(part.contiguous()) for part in source.split(lengths)]
    whole = torch.cat(parts)
    assert_same_tensor(whole, quantizer(source))
    assert whole._kind() == parts[0]._kind()
    assert_same_tensor(torch.cat(parts, -2), whole)
    assert_same_bits(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))
    for part in parts:
        part.update_usage(columnwise_usage=False)
    rows = torch.cat(parts)
    assert rows.get_usages() == {"rowwise": True, "columnwise": False}
    assert_same_bits(rows.dequantize(), whole.dequantize())
    parts[0].zero_()  # it is a copy
    assert_same_bits(rows.dequantize(), whole.dequantize())


@pytest.mark.parametrize("name", ["tiles", "lines", "mx"])
def test_rows_by_themselves_join_anywhere(device, name):
    """Scales of rows do; tiles of several do not."""
    quantizer = FORMATS[name]()
    quantizer.set_usage(columnwise=False)
    source = source_of(device, (40, 256))
    whole = torch.cat([quantizer(part.contiguous()) for part in source.split((17, 23))])
    if name == "tiles":
        assert type(whole) is torch.Tensor
    else:
        assert_same_tensor(whole, quantizer(source))


@pytest.mark.parametrize("name", FORMATS)
def test_what_does_not_fit_is_read_in_high_precision(device, name):
    """Parts of tiles, other forms, formats, dtypes and dims; and formats that are never joined."""
    quantizer = FORMATS[name]()
    whole = quantizer(source_of(device, (256, 64)))
    cases = [[quantizer(source_of(device, (150, 64))) for _ in range(2)]]
    cases += [[whole, whole.dequantize()], [whole.dequantize(), whole]]
    cases.append([whole, te.Float8RowQuantizer(E5M2, columnwise=False)(whole.dequantize())])
    wide = quantizer(source_of(device, (256, 64), torch.float32))
    rows = whole.clone()
    rows.update_usage(columnwise_usage=False)
    cases += [[whole, rows], [whole, wide]]
    if name not in ROWS:
        cases.append([whole, whole.clone()])
    for parts in cases:
        found = torch.cat(parts)
        assert type(found) is torch.Tensor
        values = [p.dequantize() if isinstance(p, te.QuantizedTensor) else p for p in parts]
        assert_same_bits(found, torch.cat(values))
    assert type(torch.cat([whole, whole], 1)) is torch.Tensor


def test_gradients_are_those_of_rows(device):
    parts = [te.MXFP8Quantizer(E4M3)(source_of(device, (64, 32))) for _ in range(3)]
    parts = [torch.nn.Parameter(part, requires_grad=i != 1) for i, part in enumerate(parts)]
    whole = torch.cat(parts)
    assert isinstance(whole, te.MXFP8Tensor) and whole.requires_grad
    grad = source_of(device, (192, 32))
    whole.dequantize().backward(grad)
    assert_same_bits(parts[0].grad, grad[:64])
    assert_same_bits(parts[2].grad, grad[128:])
    assert parts[1].grad is None


RECIPES = {
    "tiles": Float8BlockScaling,
    "lines": lambda: Float8BlockScaling(w_block_scaling_dim=1, x_block_scaling_dim=2),
    "mx": MXFP8BlockScaling,
    "squares": lambda: MXFP8BlockScaling(enable_2d_quantization=True),
    "custom": lambda: CustomRecipe(
        lambda role: te.MXFP8Quantizer(E4M3, margin=role.tensor_type == "weight")
    ),
}
SPLIT = {"query": 128, "key": 256, "value": 80}
WIDTH, OUT = 96, sum(SPLIT.values())


def modules_of(kind, device, recipe, **options):
    """A module with split weights, and one with the same weight as one parameter."""
    found = []
    for split in (SPLIT, None):
        module = made(
            lambda: kind(WIDTH, OUT, parameters_split=split, device=device, **options),  # noqa: B023
            recipe,
        )
        found.append(module)
    split, whole = found
    with torch.no_grad():
        for name in ("weight", "bias"):
            values = torch.randn(getattr(whole, name).shape, device=device)
            getattr(whole, name).copy_(values)
            for part, own in zip(values.split(list(SPLIT.values())), SPLIT, strict=True):
                getattr(split, f"{own}_{name}").copy_(part)
    return split, whole


def result_of(module, x, recipe, **call):
    """Output and gradients of a step, those of parameters row after row."""
    out, inp, grads = step(module, x, recipe, **call)
    norm = {name: grads.pop(name) for name in list(grads) if name.startswith("layer_norm")}
    rows = [torch.cat([g for n, g in grads.items() if n.endswith(k)]) for k in ("weight", "bias")]
    return [out, inp, *rows, *norm.values()]


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
@pytest.mark.parametrize("name", RECIPES)
def test_split_weights_have_the_bits_of_whole_ones(device, kind, name):
    """And are cast by no call."""
    recipe = RECIPES[name]()
    split, whole = modules_of(kind, device, recipe)
    assert isinstance(split.query_weight, te.QuantizedTensor)
    x = torch.randn(160, WIDTH, device=device)
    with counted():
        wanted = result_of(whole, x, recipe)
    casts = quantized()
    with counted():
        found = result_of(split, x, recipe)
    assert quantized() == casts
    assert_same_bits(found, wanted)
    for _ in range(2):
        torch.optim.SGD(split.parameters(), lr=0.1).step()
        torch.optim.SGD(whole.parameters(), lr=0.1).step()
        split.zero_grad(), whole.zero_grad()
        assert_same_bits(result_of(split, x, recipe), result_of(whole, x, recipe))


@pytest.mark.parametrize("way", ["checkpoint", "microbatch", "defer", "no grad"])
def test_other_ways_have_the_same_bits(device, way):
    recipe, x = MXFP8BlockScaling(), torch.randn(160, WIDTH, device=device)
    split, whole = modules_of(te.Linear, device, recipe, delay_wgrad_compute=way == "defer")
    results = []
    for module in (split, whole):
        inp = x.clone().requires_grad_()
        call = {"is_first_microbatch": False} if way == "microbatch" else {}
        with torch.set_grad_enabled(way != "no grad"), te.autocast(recipe=recipe):
            out = te.checkpoint(module, inp) if way == "checkpoint" else module(inp, **call)
        if way == "no grad":
            results.append([out])
            continue
        out.sum().backward()
        if way == "defer":
            module.backward_dw()
        weights = [p.grad for n, p in module.named_parameters() if n.endswith("weight")]
        results.append([out.detach(), inp.grad, torch.cat(weights)])
    assert_same_bits(*results)


def test_parts_that_do_not_join_are_cast_at_each_call(device):
    """One scale for each part, or a part that ends inside of a tile."""
    x = torch.randn(160, WIDTH, device=device)
    for recipe, split in (
        (Float8CurrentScaling(), SPLIT),
        (Float8BlockScaling(), {"query": 100, "key": 28}),
    ):
        module = made(
            lambda: te.Linear(WIDTH, sum(split.values()), parameters_split=split, device=device),  # noqa: B023
            recipe,
        )
        with te.counting() as counts, torch.no_grad(), te.autocast(recipe=recipe):
            module(x)
        casts = sum(n for c, n in counts.items() if c.startswith("op.") and "quantize" in c)
        assert casts == 1 + len(split) + 1  # the input, and parts that are read and cast together


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled(place):
    torch._dynamo.reset()
    recipe, x = MXFP8BlockScaling(), torch.randn(160, WIDTH, device=place)
    module, _ = modules_of(te.Linear, place, recipe)
    results = []
    for call in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        module.zero_grad()
        inp = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            out = call(inp)
        out.backward(torch.ones_like(out))
        results.append([out.detach(), inp.grad, *(p.grad for p in module.parameters())])
    assert_same_bits(*results)


def test_a_layer_casts_no_split_weight(device):
    """Query, key and value of a projection that is not fused: as many casts as of a fused one."""
    recipe, x = MXFP8BlockScaling(), torch.randn(32, 2, 128, device=device)
    options = {"hidden_dropout": 0, "attention_dropout": 0, "device": device}
    casts = []
    for fused in (True, False):
        layer = made(
            lambda: te.TransformerLayer(128, 256, 4, fuse_qkv_params=fused, **options),  # noqa: B023
            recipe,
        )
        with counted():
            out, *_ = step(layer, x, recipe)
        casts.append(quantized())
        assert torch.isfinite(out).all()
    assert casts[0] == casts[1]
