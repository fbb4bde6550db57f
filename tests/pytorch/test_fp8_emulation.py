# SPDX-License-Identifier: Apache-2.0
"""Attention in FP8 emulated by `unfused`: TE_UNFUSED_DPA_EMULATE_FP8."""

import pytest
import torch
from comparators import assert_nmse
from pytorch import attention_model as model
from pytorch.helpers import assert_same_bits, same_draws, state_of
from tols import BF16, E4M3, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)

HEADS, GROUPS, CHANNELS, BATCH, QUERIES, KEYS = 4, 2, 64, 2, 24, 40
SIZES = BATCH, QUERIES, KEYS, HEADS, GROUPS, CHANNELS, CHANNELS
RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}
KINDS = pytest.mark.parametrize("kind", RECIPES)


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """The backend that emulates runs."""
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")


def module_of(**options):
    return te.DotProductAttention(HEADS, CHANNELS, GROUPS, **options)


def run(module, tensors, recipe, grad=None, **arguments):
    with te.autocast(recipe=recipe):
        out = module(*tensors, **arguments)
    grad = torch.ones_like(out) if grad is None else grad
    return out.detach(), *torch.autograd.grad(out, tensors, grad)


def rounded(tensor, scale):
    """Cast to E4M3 with a scale [] fp32, and read again."""
    codes = (tensor.float() * scale).clamp(-448, 448).to(E4M3)
    return (codes.float() / scale).to(tensor.dtype)


def test_what_is_rounded(device):
    """Queries, keys and values by what they hold, weights by their bound, output by the values."""
    q, k, v = model.make_qkv("sbhd", SIZES, BF16, device)
    out, *_ = run(
        module_of(attn_mask_type="no_mask"), (q, k, v), Float8CurrentScaling(fp8_dpa=True)
    )
    scales = [448.0 / t.detach().float().abs().max() for t in (q, k, v)]
    read = [rounded(t.detach(), s) for t, s in zip((q, k, v), scales, strict=True)]
    wide = [
        model.to_bhsd(t, "sbhd").float().repeat_interleave(HEADS // t.shape[2], 1) for t in read
    ]
    weights = rounded(torch.softmax(CHANNELS**-0.5 * (wide[0] @ wide[1].mT), -1), 448.0)
    exact = model.joined(weights @ wide[2], "sbhd")
    # What lies between two numbers of E4M3 may go to either side of it, of weights and output.
    assert_nmse(out, rounded(exact, scales[2]), 2 * tol("quantize", E4M3))
    codes = out.float() * scales[2]
    assert_nmse(codes, codes.to(E4M3).double(), tol("attention", BF16))  # they are of E4M3


@KINDS
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
def test_against_high_precision_and_the_kernel(device, kind, mask, monkeypatch):
    """Within the bounds of attention in FP8, and on the CPU with the same scaling state."""
    recipe, tensors = RECIPES[kind](fp8_dpa=True), model.make_qkv("sbhd", SIZES, BF16, device)
    emulating, native = module_of(attn_mask_type=mask), module_of(attn_mask_type=mask)
    for _ in range(2):
        found = run(emulating, tensors, recipe)
    out = emulating(*tensors)
    exact = [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))]
    for i, (x, expected) in enumerate(zip(found, exact, strict=True)):
        assert x.dtype is BF16 and not torch.equal(x, expected)
        terms = 5 if i == 0 else 16  # gradients of queries and keys cancel
        assert_nmse(x, expected, terms * tol("quantize", E4M3), f"result {i}")
    if kind == "current":
        assert emulating._state_values() is None
    elif device == "cpu":
        monkeypatch.setenv("NVTE_FUSED_ATTN", "1")
        for _ in range(2):
            run(native, tensors, recipe)
        one, two = (state_of(m)["forward"][0] for m in (emulating, native))
        assert_same_bits(one[2], two[2])  # of heads; weights and output differ in their last bits
        assert torch.equal(one != 1.0, two != 1.0) and bool((one[[3, 8]] != 1.0).all())


def test_one_tensor_of_all(device):
    """One cast of what lies in one tensor, and its gradient."""
    packed = torch.randn(QUERIES, BATCH, 3, HEADS, CHANNELS).to(device, BF16).requires_grad_()
    module = te.DotProductAttention(HEADS, CHANNELS, attn_mask_type="causal")
    with te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        out = module(qkv_layer=packed)
    (grad,) = torch.autograd.grad(out, packed, torch.ones_like(out))
    exact = module(qkv_layer=packed)
    (expected,) = torch.autograd.grad(exact, packed, torch.ones_like(exact))
    assert_nmse(out, exact, 5 * tol("quantize", E4M3))
    assert_nmse(grad, expected, 16 * tol("quantize", E4M3))


def beyond(device):
    """Calls that no kernel runs in FP8: options of the module, arguments."""
    bias = torch.randn(1, HEADS, QUERIES, KEYS, device=device, dtype=BF16).requires_grad_()
    some = torch.zeros(1, 1, QUERIES, KEYS, dtype=torch.bool, device=device)
    some[..., ::3] = True
    return {
        "arbitrary": ({"attn_mask_type": "arbitrary"}, {"attention_mask": some}),
        "bias": (
            {"attn_mask_type": "no_mask"},
            {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias},
        ),
        "alibi": ({"attn_mask_type": "causal"}, {"core_attention_bias_type": "alibi"}),
        "softcap": ({"attn_mask_type": "no_mask", "softcap": 0.5}, {}),  # on CUDA
        "sink": ({"attn_mask_type": "no_mask", "softmax_type": "off-by-one"}, {}),
        "score_mod": (
            {"attn_mask_type": "no_mask"},
            {"score_mod": lambda graph, score, tensors: graph.tanh(score)},
        ),
    }


@KINDS
@pytest.mark.parametrize("case", beyond("cpu"))
def test_what_no_kernel_runs(device, kind, case):
    options, arguments = beyond(device)[case]
    module, tensors = module_of(**options), model.make_qkv("sbhd", SIZES, BF16, device)
    for _ in range(2):
        out, *_ = run(module, tensors, RECIPES[kind](fp8_dpa=True), **arguments)
    assert_nmse(out, module(*tensors, **arguments), 5 * tol("quantize", E4M3))


def test_largest_score_and_dropout(device):
    recipe, tensors = Float8CurrentScaling(fp8_dpa=True), model.make_qkv("sbhd", SIZES, F32, device)
    module = module_of(attn_mask_type="no_mask", return_max_logit=True)
    with te.autocast(recipe=recipe):
        out, top = module(*tensors)
    exact, largest = module(*tensors)
    assert_nmse(out, exact, 5 * tol("quantize", E4M3))
    assert_nmse(top, largest, 5 * tol("quantize", E4M3))
    for p in (0.3, 1.0):
        module, found = module_of(attn_mask_type="no_mask", attention_dropout=p), []
        for region in (recipe, None):
            with same_draws(device), te.autocast(enabled=region is not None, recipe=region):
                found.append(module(*tensors).detach())
        assert_nmse(*found, 5 * tol("quantize", E4M3))
    assert not found[0].any()


@KINDS
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute(device, kind, reentrant):
    """The bits and the state of a run without."""
    recipe, tensors = RECIPES[kind](fp8_dpa=True), model.make_qkv("sbhd", SIZES, BF16, device)
    plain, again = module_of(), module_of()
    for _ in range(3):
        expected = run(plain, tensors, recipe)
        for tensor in tensors:
            tensor.grad = None
        with te.autocast(recipe=recipe):
            out = te.checkpoint(again, *tensors, use_reentrant=reentrant)
        out.backward(torch.ones_like(out))
        for x, y in zip((out.detach(), *(t.grad for t in tensors)), expected, strict=True):
            assert_same_bits(x, y)
    if kind == "delayed":
        for one, two in zip(state_of(plain)["forward"], state_of(again)["forward"], strict=True):
            assert_same_bits(one, two)


def test_in_a_layer(device):
    """Its attention alone is emulated; the scales of linear layers follow as ever."""
    layer = te.TransformerLayer(
        256, 512, 4, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16, device=device
    )
    x = torch.randn(16, 2, 256).to(device, BF16).requires_grad_()
    te.reset_counters()
    for _ in range(2):
        with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
            out = layer(x)
        out.sum().backward()
    assert not any(n.startswith("attention") for n in te.counters())
    assert any("e4m3" in n for n in te.counters())
    core = layer.self_attention.core_attention
    for module in (core, layer.self_attention.layernorm_qkv):
        assert bool((module._state_values()["forward"][0] != 1.0).any())
    assert bool((layer.layernorm_mlp._state_values()["backward"][0] != 1.0).any())


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch asks non-leaves, and hides it
@KINDS
def test_compiled(device, kind):
    """Outside of graphs, which cover what is around: the bits of eager code."""
    torch.compiler.reset()
    recipe, modules = RECIPES[kind](fp8_dpa=True), (module_of(), module_of())
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.name for node in graph.graph.nodes])
        return graph.forward

    def program(query, key, value):
        return torch.cos(modules[1](torch.sin(query), key, value))

    compiled = torch.compile(program, backend=backend)
    for _ in range(3):
        tensors = model.make_qkv("sbhd", SIZES, BF16, device)
        with te.autocast(recipe=recipe):
            first = torch.cos(modules[0](torch.sin(tensors[0]), *tensors[1:]))
            second = compiled(*tensors)
        grad = torch.randn_like(first)
        assert_same_bits(first.detach(), second.detach())
        for one, other in zip(
            *(torch.autograd.grad(out, tensors, grad) for out in (first, second)), strict=True
        ):
            assert_same_bits(one, other)
    assert_same_bits(*map(state_of, modules))
    names = [name for graph in graphs for name in graph]
    assert "sin" in names and "cos" in names
    with (
        te.autocast(recipe=recipe),
        pytest.raises(torch._dynamo.exc.Unsupported),
    ):
        torch.compile(program, backend="eager", fullgraph=True)(*tensors)
    torch.compiler.reset()


def test_refusals(device, monkeypatch):
    tensors = model.make_qkv("sbhd", SIZES, BF16, device)
    module = module_of()
    with te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        found = te.explain_attention(module, *tensors)
        assert found.backend == "unfused"
        assert "emulated (TE_UNFUSED_DPA_EMULATE_FP8)" in found.fp8
        with pytest.raises(Exception, match="emulated .* in torch.export"):
            torch.export.export(module, tuple(t.detach() for t in tensors), strict=True)
    with pytest.raises(ValueError, match="unfused: attention by MXFP8BlockScaling"):
        run(module, tensors, MXFP8BlockScaling(fp8_dpa=True))
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "0")
    with pytest.raises(ValueError, match="TE_UNFUSED_DPA_EMULATE_FP8=1"):
        run(module, tensors, Float8CurrentScaling(fp8_dpa=True))
