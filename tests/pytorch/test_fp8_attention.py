# SPDX-License-Identifier: Apache-2.0
"""Attention in FP8 by the recipe: what runs, its scaling state, checkpoints, graphs, refusals."""

import copy
import pickle

import pytest
import torch
from comparators import assert_nmse
from device_kinds import every_device, our_kernels
from pytorch.fp8_attention_cases import (
    BACK_TO_16,
    BATCH,
    CHANNELS,
    GROUPS,
    HEADS,
    KEYS,
    QUERIES,
    RECIPES,
    attentions,
    module_of,
    run,
    tensors_of,
)
from pytorch.helpers import assert_same_bits, captured, state_of
from pytorch.quantized_cases import codes_of, scale_of, values_of
from tols import BF16, E4M3, tol
from torch._subclasses import FakeTensorMode

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, QParams
from transformer_engine.pytorch.attention.fp8 import BLOCK
from transformer_engine.pytorch.constants import DType

pytestmark = every_device

QKV, OUTPUT, WEIGHTS = 2, 3, 8  # slots of the forward
GRADS, GRAD_OUTPUT, GRAD_SCORES = 0, 3, 5  # of the backward


# ---- what runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("order", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right", "padding_causal"])
def test_close_to_high_precision(device, kind, order, mask, counters):
    """One rounding of each operand, of the weights and of the output; once scales are found."""
    module = module_of(qkv_format=order, attn_mask_type=mask)
    recipe = RECIPES[kind](fp8_dpa=True)
    tensors = tensors_of(device, order=order)
    for _ in range(2):
        te.reset_counters()
        found = run(module, tensors, recipe)
    assert attentions() == BACK_TO_16
    out = module(*tensors)
    exact = [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))]
    for i, (x, expected) in enumerate(zip(found, exact, strict=True)):
        assert x.dtype is BF16 and x.shape == expected.shape
        terms = 5 if i == 0 else 16  # gradients of queries and keys cancel
        assert_nmse(x, expected, terms * tol("quantize", E4M3), f"result {i}")


@pytest.mark.parametrize("kind", RECIPES)
def test_packed_sequences(device, kind):
    lengths = torch.tensor([0, 5, 5, 29, 64], dtype=torch.int32, device=device)
    module = module_of(qkv_format="thd", attn_mask_type="padding_causal")
    tensors = [
        torch.randn(64, n, CHANNELS).to(device, BF16).requires_grad_()
        for n in (HEADS, GROUPS, GROUPS)
    ]
    given = {
        "cu_seqlens_q": lengths,
        "cu_seqlens_kv": lengths,
        "max_seqlen_q": 35,
        "max_seqlen_kv": 35,
    }
    if device == "cuda":
        with pytest.raises(ValueError, match=r"packed sequences \(thd\) in FP8"):
            run(module, tensors, RECIPES[kind](fp8_dpa=True), **given)
        return
    for _ in range(2):
        te.reset_counters()
        found = run(module, tensors, RECIPES[kind](fp8_dpa=True), **given)
    assert attentions() == BACK_TO_16
    out = module(*tensors, **given)
    exact = [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))]
    for x, expected in zip(found, exact, strict=True):
        assert_nmse(x, expected, 16 * tol("quantize", E4M3))


@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("kind", RECIPES)
def test_queries_keys_and_values_in_one_tensor(device, kind, dim, repeatable):
    """The bits of three tensors, and the gradient in one."""
    apart, joined = (module_of(groups=HEADS, attn_mask_type="causal") for _ in range(2))
    tensors = tensors_of(device, groups=HEADS, keys=QUERIES)
    packed = torch.stack([t.detach() for t in tensors], dim).requires_grad_()
    for _ in range(2):
        recipe = RECIPES[kind](fp8_dpa=True)
        out, *grads = run(apart, tensors, recipe)
        with te.autocast(recipe=recipe):
            again = joined(qkv_layer=packed, qkv_interleave_dim=dim)
        (grad,) = torch.autograd.grad(again, packed, torch.ones_like(again))
        assert_same_bits(again.detach(), out)
        for x, expected in zip(grad.unbind(dim), grads, strict=True):
            assert_same_bits(x, expected)


def test_inference_changes_no_state(device):
    module, tensors = module_of(), tensors_of(device)
    recipe = DelayedScaling(fp8_dpa=True)
    run(module, tensors, recipe)
    before = state_of(module)
    with torch.no_grad(), te.autocast(recipe=recipe):
        module(*tensors)
    after = state_of(module)
    assert_same_bits(before["forward"][0], after["forward"][0])
    assert torch.equal(before["forward"][1][1:], after["forward"][1][1:])


@pytest.mark.parametrize("how", [QParams(power_2_scale=True), QParams(amax_epsilon=100.0)])
def test_options_of_current_scaling(device, how):
    """Values that such scales hold are what any values are rounded to."""
    recipe, module, wide = Float8CurrentScaling(fp8_dpa=True), module_of(), []
    recipe.fp8_quant_fwd_inp = how
    tensors = [tensor.detach().clamp(-2.5, 2.5) for tensor in tensors_of(device)]
    for tensor in tensors:
        tensor[0, 0, 0, 0] = 3.0  # the scale is the same again
        scale = scale_of(tensor, DType.kFloat8E4M3, how.power_2_scale, how.amax_epsilon)
        codes = codes_of(tensor, scale, DType.kFloat8E4M3)
        wide.append(values_of(codes, scale, DType.kFloat8E4M3, BF16))
    with te.autocast(recipe=recipe):
        found, expected = module(*tensors), module(*wide)
    assert_same_bits(found, expected)
    with te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        assert not torch.equal(module(*tensors), found)


# ---- scaling state -------------------------------------------------------------------------------


def test_scales_follow_from_amaxes(device):
    """Slots as programs know them; one scale for queries, keys and values."""
    module = module_of(128, attn_mask_type="no_mask")
    tensors = tensors_of(device, 128, queries=BLOCK)
    recipe = DelayedScaling(fp8_dpa=True, amax_history_len=4)
    grad = torch.randn(BLOCK, BATCH, HEADS * 128).to(device, BF16) * 3
    out, *grads = run(module, tensors, recipe, grad)
    forward, backward = state_of(module)["forward"], state_of(module)["backward"]
    assert forward[0].numel() == 9 and backward[0].numel() == 6
    largest = max(t.detach().abs().max().float() for t in tensors).cpu()
    assert_same_bits(forward[1][-1, QKV].cpu(), largest)
    assert_same_bits(forward[0][QKV].cpu(), torch.full_like(largest, 448) / largest)
    assert_nmse(forward[1][-1, OUTPUT], out.abs().max().float(), 2 * tol("quantize", E4M3))
    assert 0 < forward[1][-1, WEIGHTS] <= 1
    of_grad = grad.abs().max().float().cpu()
    assert_same_bits(backward[1][-1, GRAD_OUTPUT].cpu(), of_grad)
    assert_same_bits(backward[0][GRAD_OUTPUT].cpu(), torch.full_like(of_grad, 57344) / of_grad)
    assert (backward[1][-1, [GRADS, GRAD_SCORES]] > 0).all()
    used = {QKV, OUTPUT, WEIGHTS}
    assert all(forward[0][i] == 1 for i in range(9) if i not in used)
    used = {GRADS, GRAD_OUTPUT, GRAD_SCORES}
    assert all(backward[0][i] == 1 for i in range(6) if i not in used)
    assert len(grads) == 3


def test_current_scaling_has_no_state(device):
    module = module_of()
    run(module, tensors_of(device), Float8CurrentScaling(fp8_dpa=True))
    assert state_of(module) is None and "_extra_state" not in module.state_dict()


def test_checkpoints(device, repeatable):
    """What is saved goes on with the same bits; without FP8 nothing is saved."""
    plain = module_of()
    assert list(plain.state_dict()) == []
    recipe, tensors = DelayedScaling(fp8_dpa=True), tensors_of(device)
    module = module_of()
    run(module, tensors, recipe)
    saved = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert list(saved) == ["_extra_state"]
    others = module_of(), copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    others[0].load_state_dict(saved)
    expected = run(module, tensors, recipe)
    for other in others:
        for x, y in zip(run(other, tensors, recipe), expected, strict=True):
            assert_same_bits(x, y)
    others[0].reset_fp8_meta_tensors()
    assert state_of(others[0]) is None


def test_state_of_peers_is_passed_over():
    module, foreign = module_of(), torch.tensor(list(b"\x80\x04pickle"), dtype=torch.uint8)
    module.load_state_dict({"_extra_state": foreign})
    module.load_state_dict({"fused_attention._extra_state": foreign})
    assert state_of(module) is None


def test_fp8_meta(device):
    module = module_of()
    run(module, tensors_of(device), DelayedScaling(fp8_dpa=True))
    meta = module.fp8_meta
    assert meta["scaling_fwd"].scale.shape == (9,) and meta["scaling_bwd"].scale.shape == (6,)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", RECIPES)
def test_recompute_has_the_bits_of_the_forward(device, kind, reentrant, repeatable):
    modules, recipe = [module_of(), module_of()], RECIPES[kind](fp8_dpa=True)
    for _ in range(3):
        tensors, found = tensors_of(device), []
        for i, module in enumerate(modules):
            with te.autocast(recipe=recipe):
                if i == 0:
                    out = module(*tensors)
                else:
                    out = te.checkpoint(module, *tensors, use_reentrant=reentrant)
            tensors_grads = [t.detach().clone() for t in _grads(out, tensors)]
            found.append([out.detach(), *tensors_grads])
        for x, y in zip(*found, strict=True):
            assert_same_bits(x, y)
    if kind == "delayed":
        first, second = map(state_of, modules)
        for direction in ("forward", "backward"):
            assert_same_bits(first[direction][0], second[direction][0])


def _grads(out, tensors):
    for tensor in tensors:
        tensor.grad = None
    out.backward(torch.ones_like(out))
    return [tensor.grad for tensor in tensors]


def test_checkpoint_core_attention(device, repeatable):
    modules, recipe = [module_of(), module_of()], DelayedScaling(fp8_dpa=True)
    for _ in range(2):
        tensors = tensors_of(device)
        first = run(modules[0], tensors, recipe)
        second = run(modules[1], tensors, recipe, checkpoint_core_attention=True)
        for x, y in zip(first, second, strict=True):
            assert_same_bits(x, y)


def test_dropout_is_drawn_from_the_generator(device, repeatable):
    module, recipe = module_of(attention_dropout=0.4), DelayedScaling(fp8_dpa=True)
    tensors, results = tensors_of(device), []
    if device == "cuda":
        with pytest.raises(ValueError, match="dropout in FP8"):
            run(module, tensors, recipe)
        module.eval()
        run(module, tensors, recipe)
        return
    run(module, tensors, recipe)
    for seed in (1, 1, 2):
        twin = copy.deepcopy(module)
        torch.manual_seed(seed)
        results.append(run(twin, tensors, recipe))
    for x, y in zip(results[0], results[1], strict=True):
        assert_same_bits(x, y)
    assert not torch.equal(results[0][0], results[2][0])


# ---- graphs ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("kind", RECIPES)
def test_captured(kind):
    """A CUDA graph replays what it captured."""
    recipe, module = RECIPES[kind](fp8_dpa=True), module_of(128, attn_mask_type="no_mask")
    tensors = tensors_of("cuda", 128, queries=BLOCK)
    grad = torch.randn(BLOCK, BATCH, HEADS * 128, device="cuda", dtype=BF16)
    graph, (out, *grads) = captured(lambda: run(module, tensors, recipe, grad), warm_ups=3)
    graph.replay()
    torch.cuda.synchronize()
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]  # of this stream
    exact_out = module(*leaves)
    exact = torch.autograd.grad(exact_out, leaves, grad)
    assert_nmse(out, exact_out, 5 * tol("quantize", E4M3))
    for x, expected in zip(grads, exact, strict=True):
        assert_nmse(x, expected, 8 * tol("quantize", torch.float8_e5m2))


@our_kernels
@pytest.mark.parametrize("kind", RECIPES)
def test_compiled(device, kind, repeatable):
    """The bits of eager code."""
    recipe, modules = RECIPES[kind](fp8_dpa=True), (module_of(), module_of())
    compiled = torch.compile(modules[1], fullgraph=True, backend="aot_eager")
    for _ in range(3):
        tensors = tensors_of(device)
        first = run(modules[0], tensors, recipe)
        second = run(compiled, tensors, recipe)
        for x, y in zip(first, second, strict=True):
            assert_same_bits(x, y)


@our_kernels
def test_compiled_for_other_sizes(device, repeatable):
    """Sizes that differ from graph to graph are symbols to the compiler."""
    torch._dynamo.reset()
    recipe = Float8CurrentScaling(fp8_dpa=True)
    for channels, groups, keys in ((64, GROUPS, KEYS), (128, HEADS, QUERIES), (32, 1, KEYS)):
        module = module_of(channels, groups, attn_mask_type="no_mask")
        tensors = tensors_of(device, channels, groups, keys=keys)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        one, two = run(module, tensors, recipe), run(compiled, tensors, recipe)
        for x, y in zip(one, two, strict=True):
            assert_same_bits(x, y)


# ---- refusals ------------------------------------------------------------------------------------

NO = torch.zeros(1, dtype=torch.bool)
BIASED = {"core_attention_bias_type": "post_scale_bias"}
REFUSED = {
    "mask": (
        {"attn_mask_type": "arbitrary"},
        {"attention_mask": NO.expand(1, 1, QUERIES, KEYS)},
        "mask type arbitrary in FP8",
    ),
    "padding mask": (
        {"attn_mask_type": "padding"},
        {"attention_mask": (NO.expand(BATCH, 1, 1, QUERIES), NO.expand(BATCH, 1, 1, KEYS))},
        "a padding mask in FP8.*cu_seqlens_q",
    ),
    "bias": (
        {"attn_mask_type": "no_mask"},
        {**BIASED, "core_attention_bias": torch.zeros(1, HEADS, QUERIES, KEYS)},
        "bias type post_scale_bias in FP8",
    ),
    "alibi": ({}, {"core_attention_bias_type": "alibi"}, "bias type alibi in FP8"),
    "sink": ({"softmax_type": "learnable"}, {}, "softmax type learnable in FP8"),
    "largest scores": ({"return_max_logit": True}, {}, "return_max_logit in FP8"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("kind", RECIPES)
def test_what_fp8_can_not_run(device, case, kind):
    """Nothing falls back: the message names the feature, and that the others compute otherwise."""
    options, arguments, text = case
    module = module_of(**options).to(device)
    arguments = {
        name: tuple(t.to(device) for t in value) if isinstance(value, tuple)
        else value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }  # fmt: skip
    with (
        pytest.raises(ValueError, match=f"{text}.*sdpa.*FP8.*unfused.*FP8"),
        te.autocast(recipe=RECIPES[kind](fp8_dpa=True)),
    ):
        module(*tensors_of(device), **arguments)
    module(*tensors_of(device), **arguments)  # high precision has it


def test_explained(device):
    module, shape = module_of(attn_mask_type="no_mask"), (QUERIES, BATCH, HEADS, CHANNELS)
    bias = {
        "core_attention_bias_type": "post_scale_bias",
        "core_attention_bias": (1, HEADS, QUERIES, QUERIES),
    }
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
        found = te.explain_attention(module, shape, device=device)
        refused = te.explain_attention(module, shape, device=device, **bias)
    assert found.backend == "native" and "FP8" in found.refused["sdpa"].feature
    assert refused.backend is None
    assert refused.refused["native"].feature == "bias type post_scale_bias in FP8"
    assert te.explain_attention(module, shape, device=device).backend == "native"


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch asks non-leaves, and hides it
def test_dropout_is_no_part_of_a_graph(start):
    """It runs outside, with the numbers of eager code. On CUDA there is no such dropout."""
    torch.compiler.reset()
    module, recipe = module_of(attention_dropout=0.2), DelayedScaling(fp8_dpa=True)
    twin, tensors, found = copy.deepcopy(module), tensors_of("cpu"), []
    for call in (module, torch.compile(twin, backend="aot_eager")):
        start()
        found.append([run(call, tensors, recipe) for _ in range(2)])
    assert_same_bits(*found)
    with te.autocast(recipe=recipe), pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(twin, backend="eager", fullgraph=True)(*tensors)
    torch.compiler.reset()


def test_tensors_without_memory():
    """Shapes alone, and no state."""
    module = module_of(attention_dropout=0.1)
    with FakeTensorMode():
        tensors = tensors_of("cpu")
        out, *grads = run(module, tensors, DelayedScaling(fp8_dpa=True))
    assert out.shape == (QUERIES, BATCH, HEADS * CHANNELS)
    assert [g.shape for g in grads] == [t.shape for t in tensors]
    assert state_of(module) is None


def test_high_precision_needs_no_fp8(device, counters):
    """Outside of a region, and in one that asks for none."""
    module, tensors = module_of(), tensors_of(device)
    module(*tensors)
    with te.autocast(recipe=DelayedScaling()):
        module(*tensors)
    with te.autocast(enabled=False, recipe=DelayedScaling(fp8_dpa=True)):
        module(*tensors)
    assert attentions() == {"attention.bf16": 3}
