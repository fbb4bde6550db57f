# SPDX-License-Identifier: Apache-2.0
"""The recipe of attention alone: TE_DPA_FP8_RECIPE and its siblings, and bf16_backward."""

import copy

import pytest
import torch
from pytorch.helpers import assert_same_bits, state_of
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

HEADS, CHANNELS, BATCH, LENGTH = 4, 128, 2, 24
LAYER = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": BF16}


def tensors_of(device):
    return [
        torch.randn(LENGTH, BATCH, HEADS, CHANNELS).to(device, BF16).requires_grad_()
        for _ in range(3)
    ]


def steps(module, tensors, recipe, count=3, **arguments):
    """Outputs and gradients of several steps, each in a region of its own."""
    found = []
    for _ in range(count):
        with te.autocast(recipe=recipe):
            out = module(*tensors, **arguments)
        found += [out.detach(), *torch.autograd.grad(out, tensors, out.detach())]
    return found


def core_of(**options):
    return te.DotProductAttention(HEADS, CHANNELS, attn_mask_type="no_mask", **options)


def fp8_attentions():
    return {n: v for n, v in te.counters().items() if n.startswith("attention") and "e4m3" in n}


OWN_DELAYED = {"amax_history_len": 1, "amax_compute_algo": "most_recent"}
OVERRIDES = {
    "current to delayed": (Float8CurrentScaling, "DelayedScaling", "HYBRID"),
    "MXFP8 to delayed": (MXFP8BlockScaling, "DelayedScaling", "E4M3"),
    "NVFP4 to delayed": (NVFP4BlockScaling, "DelayedScaling", "HYBRID"),
    "delayed to current": (DelayedScaling, "Float8CurrentScaling", "HYBRID"),
    "MXFP8 to current": (MXFP8BlockScaling, "Float8CurrentScaling", "E4M3"),
    "NVFP4 to current": (NVFP4BlockScaling, "Float8CurrentScaling", "HYBRID"),
    "delayed to itself": (DelayedScaling, "DelayedScaling", "HYBRID"),
}


@pytest.fixture(autouse=True)
def _repeatable_on_a_gpu(device):
    if device == "cuda":
        torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", OVERRIDES)
def test_attention_runs_by_another_recipe(device, case, monkeypatch, counters):
    """The bits of a region of that recipe, of whose state there is a step more in each step."""
    region, name, fp8_format = OVERRIDES[case]
    tensors = tensors_of(device)
    given = region(fp8_dpa=True)
    before = repr(given)
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", name)
    found = steps(core_of(), tensors, given)
    assert sum(fp8_attentions().values()) >= 3
    assert repr(given) == before
    monkeypatch.delenv("NVTE_DPA_FP8_RECIPE")
    options = {"fp8_format": Format[fp8_format], "fp8_dpa": True}
    if name == "Float8CurrentScaling":
        alone = Float8CurrentScaling(**options)
    else:
        own = {} if region is DelayedScaling else OWN_DELAYED
        alone = DelayedScaling(**options, **own)
    expected = steps(core_of(), tensors, alone)
    for x, y in zip(found, expected, strict=True):
        assert_same_bits(x, y)


def test_settings_of_delayed_scaling(device, monkeypatch):
    """Its history, its algorithm and, under NVFP4, its format."""
    settings = {
        "NVTE_DPA_FP8_RECIPE": "DelayedScaling",
        "NVTE_DPA_FP8_FORMAT": "E4M3",
        "NVTE_DPA_FP8DS_AMAX_ALGO": "max",
        "NVTE_DPA_FP8DS_AMAX_HISTLEN": "5",
        "NVTE_DPA_FP8DS_REDUCE_AMAX": "0",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    module, tensors = core_of(), tensors_of(device)
    found = steps(module, tensors, NVFP4BlockScaling(fp8_dpa=True))
    made = module.fp8_meta["recipe"]
    assert (made.amax_history_len, made.amax_compute_algo) == (5, "max")
    assert not made.reduce_amax and made.fp8_format is Format.E4M3
    assert state_of(module)["forward"][1].shape[0] == 5
    for name in settings:
        monkeypatch.delenv(name)
    expected = steps(core_of(), tensors, made)
    for x, y in zip(found, expected, strict=True):
        assert_same_bits(x, y)


def test_f16_is_high_precision(device, monkeypatch, counters):
    tensors, recipe = tensors_of(device), DelayedScaling(fp8_dpa=True, fp8_mha=True)
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "F16")
    found = steps(core_of(), tensors, recipe)
    assert not fp8_attentions()
    assert recipe.fp8_dpa and recipe.fp8_mha
    for x, y in zip(found, steps(core_of(), tensors, DelayedScaling()), strict=True):
        assert_same_bits(x, y)


def test_nothing_changes_where_attention_is_in_high_precision(device, monkeypatch, counters):
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "Float8CurrentScaling")
    steps(core_of(), tensors_of(device), DelayedScaling(), 1)
    assert not fp8_attentions()


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling, NVFP4BlockScaling])
def test_recipes_that_attention_does_not_run_by(device, recipe, monkeypatch):
    with pytest.raises(ValueError, match=rf"native: attention by {recipe.__name__}: "):
        steps(core_of(), tensors_of(device), recipe(fp8_dpa=True), 1)
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "MXFP8BlockScaling")
    with pytest.raises(ValueError, match=r"native: attention by MXFP8BlockScaling: "):
        steps(core_of(), tensors_of(device), DelayedScaling(fp8_dpa=True), 1)


@pytest.mark.parametrize("region", [Float8CurrentScaling, DelayedScaling])
def test_in_a_layer(device, region, monkeypatch, counters):
    """As one plan and module by module; the linear layers keep the recipe of the region."""
    name = "DelayedScaling" if region is Float8CurrentScaling else "Float8CurrentScaling"
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", name)
    layer = te.TransformerLayer(256, 512, 2, device=device, **LAYER)
    other = copy.deepcopy(layer)
    other.self_attention.core_attention.register_forward_hook(lambda *_: None)  # calls modules
    x = torch.randn(16, 2, 256).to(device, BF16).requires_grad_()
    for _ in range(3):
        found = []
        for each in (layer, other):
            with te.autocast(recipe=region(fp8_dpa=True)):
                out = each(x)
            found.append((out.detach(), *torch.autograd.grad(out, x, out.detach())))
        for one, two in zip(*found, strict=True):
            assert_same_bits(one, two)
    core = layer.self_attention.core_attention
    assert fp8_attentions()
    values = core._state_values()
    if name == "DelayedScaling":
        assert values["forward"][1].shape[0] == 1 and bool((values["forward"][0] != 1).any())
    else:
        assert values is None
    linear = layer.self_attention.layernorm_qkv
    assert (linear._state_values() is None) == (region is Float8CurrentScaling)


def test_another_history_in_the_middle(device, monkeypatch):
    """A variable that changes counts from the next call on, in a layer too."""
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    layer = te.TransformerLayer(256, 512, 2, device=device, **LAYER)
    x = torch.randn(16, 2, 256).to(device, BF16).requires_grad_()
    for length in (1, 1, 1, 4, 4, 2):
        monkeypatch.setenv("NVTE_DPA_FP8DS_AMAX_HISTLEN", str(length))
        with te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
            layer(x).sum().backward()
        core = layer.self_attention.core_attention
        assert core._state_values()["forward"][1].shape[0] == length


@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute_takes_the_recipe_of_the_first_forward(device, reentrant, monkeypatch):
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    tensors, recipe = tensors_of(device), Float8CurrentScaling(fp8_dpa=True)
    expected = steps(core_of(), tensors, recipe)
    module, found = core_of(), []
    for _ in range(3):
        monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
        with te.autocast(recipe=recipe):
            out = te.checkpoint(module, *tensors, use_reentrant=reentrant)
        monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "F16")
        found += (
            [out.detach(), *torch.autograd.grad(out, tensors, out.detach())]
            if (not reentrant)
            else _through_backward(out, tensors)
        )
    for x, y in zip(found, expected, strict=True):
        assert_same_bits(x, y)


def _through_backward(out, tensors):
    """The same for a reentrant checkpoint, which takes ``backward`` alone."""
    for tensor in tensors:
        tensor.grad = None
    out.backward(out.detach())
    return [out.detach(), *(tensor.grad for tensor in tensors)]


def test_in_a_compiled_function(device, monkeypatch):
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    tensors, recipe = tensors_of(device), Float8CurrentScaling(fp8_dpa=True)
    expected = steps(core_of(), tensors, recipe)
    compiled = torch.compile(core_of(), fullgraph=True, backend="aot_eager")
    for x, y in zip(steps(compiled, tensors, recipe), expected, strict=True):
        assert_same_bits(x, y)


def test_state_dict_of_a_recipe_of_its_own(device, monkeypatch):
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    tensors, recipe = tensors_of(device), Float8CurrentScaling(fp8_dpa=True)
    module, twin = core_of(), core_of()
    steps(module, tensors, recipe)
    twin.load_state_dict(module.state_dict())
    one, two = (steps(each, tensors, recipe, 1) for each in (module, twin))
    for x, y in zip(one, two, strict=True):
        assert_same_bits(x, y)


def test_backward_in_high_precision_by_argument(device, counters):
    """The forward stays in FP8."""
    steps(core_of(), tensors_of(device), DelayedScaling(fp8_dpa=True), 1, bf16_backward=True)
    found = te.counters()
    assert any(n.startswith("attention.") and n.endswith("e4m3") for n in found)
    assert any(n.startswith("attention_backward.") and n.endswith("bf16") for n in found)
    assert not any(n.startswith("attention_backward.") and n.endswith("e4m3") for n in found)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", "by Float8CurrentScaling; backward in high precision: "),
        ("DelayedScaling", "by DelayedScaling (TE_DPA_FP8_RECIPE); backward in "),
        ("F16", "none: TE_DPA_FP8_RECIPE=F16"),
    ],
)
def test_explanation(device, name, expected, monkeypatch):
    monkeypatch.setenv("TE_DPA_FP8_RECIPE", name)
    module, shape = core_of(), (LENGTH, BATCH, HEADS, CHANNELS)
    assert te.explain_attention(module, shape, device=device).fp8 == ""
    with te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        found = te.explain_attention(module, shape, device=device)
    assert found.fp8.startswith(expected)
    assert f"FP8      {expected}" in str(found)
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
        found = te.explain_attention(module, shape, device=device, bf16_backward=True)
    if device == "cpu" and name == "":
        assert found.fp8.endswith("high precision: bf16_backward=True")
