# SPDX-License-Identifier: Apache-2.0
"""What attention in FP8 makes goes on in FP8: `fp8_output`, and `fp8_mha` of a recipe."""

import copy

import pytest
import torch
from pytorch.fp8_attention_cases import (
    BATCH,
    CHANNELS,
    HEADS,
    RECIPES,
    attentions,
    module_of,
    run,
    tensors_of,
)
from pytorch.helpers import assert_same_bits, captured, state_of
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.attention_graphs import AttentionSpec, core_graph
from transformer_engine.common.operand_casts import (
    HIGH_PRECISION,
    quantization_of,
)
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
)
from transformer_engine.pytorch.attention.fp8 import BLOCK
from transformer_engine.pytorch.module.layer_call import LayerRunner

WIDTH = HEADS * CHANNELS
OPTIONS = {"attention_dropout": 0.0, "params_dtype": BF16, "fuse_qkv_params": True}
kinds = pytest.mark.parametrize("kind", RECIPES)


@pytest.fixture(autouse=True)
def _repeatable(repeatable):
    """Gradients of the queries have the same bits in each run."""


def attention(device, **options):
    return te.MultiheadAttention(WIDTH, HEADS, device=device, **{**OPTIONS, **options})


def inputs(device, rows=BLOCK):
    return torch.randn(rows, BATCH, WIDTH).to(device, BF16).requires_grad_()


def step(module, x, recipe, **options):
    """Output and gradients, those of the parameters too."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    with te.autocast(recipe=recipe):
        out = module(x, **options)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *parameters])


def compare(modules, device, recipe, calls, steps=3):
    """Both ways to call twins give the same bits, in each step."""
    for _ in range(steps):
        x = inputs(device)
        one, two = (
            step(module, x, recipe, **call) for module, call in zip(modules, calls, strict=True)
        )
        for a, b in zip(one, two, strict=True):
            assert_same_bits(a, b)


# ---- attention by itself -------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("order", ["sbhd", "bshd"])
def test_output_is_what_attention_made(device, kind, order, counters):
    """The values of a call that reads it again, row-wise alone; gradients are the same."""
    recipe, tensors = RECIPES[kind](fp8_dpa=True), tensors_of(device, order=order)
    one, two = module_of(qkv_format=order), module_of(qkv_format=order)
    for _ in range(3):
        out, *grads = run(one, tensors, recipe)
        te.reset_counters()
        with te.autocast(recipe=recipe):
            kept = two(*tensors, fp8_output=True)
        found = {name: n for name, n in te.counters().items() if "dequantize" in name}
        assert isinstance(kept, te.Float8Tensor) and not found
        assert kept.dtype == BF16 and kept._transpose is None
        assert_same_bits(kept.dequantize(), out)
        for a, b in zip(
            torch.autograd.grad(kept, tensors, torch.ones_like(out)), grads, strict=True
        ):
            assert_same_bits(a, b)
    if kind == "delayed":
        assert_same_bits(state_of(one)["forward"][0], state_of(two)["forward"][0])
        scale = state_of(two)["forward"][0][3:4]
        assert_same_bits(kept._quantizer.scale, scale)


def test_packed_sequences(device):
    if device == "cuda":
        pytest.skip("cuDNN has no FP8 kernel for packed sequences that works: refused")
    offsets = torch.tensor([0, 5, 5, 24], dtype=torch.int32)
    tensors = [torch.randn(24, HEADS, CHANNELS).to(BF16).requires_grad_() for _ in range(3)]
    given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
    options = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
    recipe, results = DelayedScaling(fp8_dpa=True), []
    for asked in (False, True):
        module = module_of(groups=HEADS, **options)
        with te.autocast(recipe=recipe):
            out = module(*tensors, fp8_output=asked, **given)
        assert isinstance(out, te.Float8Tensor) == asked
        results.append(out.dequantize() if asked else out)
    assert_same_bits(*results)


def test_high_precision_and_emulation_return_theirs(device, monkeypatch):
    tensors = tensors_of(device)
    assert type(module_of()(*tensors, fp8_output=True)) is torch.Tensor
    monkeypatch.setenv("NVTE_UnfusedDPA_Emulate_FP8", "1")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
        assert type(module_of()(*tensors, fp8_output=True)) is torch.Tensor


def test_refused_where_no_graph_holds_it(device):
    tensors, module = tensors_of(device), module_of()

    def call(query):
        with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
            return module(query, *tensors[1:], fp8_output=True)

    with pytest.raises(NotImplementedError, match="fp8_output=True"):
        torch.func.vjp(call, tensors[0].detach())
    mha, recipe = attention(device), Float8CurrentScaling(fp8_mha=True)
    with te.autocast(recipe=recipe), pytest.raises(Exception, match="fp8_mha"):
        torch.export.export(mha, (inputs(device),))


# ---- layers --------------------------------------------------------------------------------------


def hooked(module):
    """A twin that is called module by module."""
    twin = copy.deepcopy(module)
    twin.core_attention.register_forward_hook(lambda *_: None)
    return twin


def plans_of(module, x, recipe):
    with te.autocast(recipe=recipe):
        for _ in range(2):
            module(x)
    found = [kept for kept in LayerRunner.of(module).calls.values() if kept is not None]
    return found[-1].call.plans


def stages(plan):
    return [stage.name for stage in plan.stages]


LAYERS = {
    "one query projection": {},
    "apart": {"fuse_qkv_params": False},
    "grouped": {"num_gqa_groups": 2},
    "norm": {"input_layernorm": True},
    "norms of heads": {"qk_norm_type": "RMSNorm"},
    "fp8 backward": {"kv_channels": 128, "attn_mask_type": "no_mask"},
}


@kinds
@pytest.mark.parametrize("form", LAYERS)
def test_as_one_plan_and_module_by_module(device, kind, form, counters):
    module = attention(device, **LAYERS[form])
    calls = ({}, {})
    if form == "fp8 backward" and kind == "delayed" and device == "cuda":
        pytest.skip("its gradients are in high precision where they have to be repeatable")
    compare((module, hooked(module)), device, RECIPES[kind](fp8_mha=True), calls)
    assert attentions()["attention.e4m3"] == 6


@kinds
def test_projection_casts_nothing(device, kind):
    """Its GEMM reads what attention made, transposed in the backward; with fp8_dpa it is cast."""
    module, x = attention(device), inputs(device)
    for asked, cast in (("fp8_mha", False), ("fp8_dpa", True)):
        plans = plans_of(module, x, RECIPES[kind](**{asked: True}))
        forward, backward = stages(plans.forward), stages(plans.backward)
        assert ("proj_quantize_input" in forward) == cast
        assert ("core_dequantize_output" in forward) == cast
        assert ("proj_requantize_input" in backward) != cast


@kinds
def test_projection_of_the_forms(device, kind):
    """A layer is its parts: attention's `Float8Tensor` is the input of the projection."""
    recipe, x = RECIPES[kind](fp8_mha=True), inputs(device)
    module = attention(device, qkv_weight_interleaved=False)
    twin = copy.deepcopy(module)
    for _ in range(3):
        with te.autocast(recipe=recipe):
            out = module(x)
        with te.autocast(recipe=recipe):
            qkv = twin.qkv(x).unflatten(-1, (3 * HEADS, CHANNELS))
            context = twin.core_attention(*qkv.split(HEADS, -2), fp8_output=True)
            expected = twin.proj(context)
        assert_same_bits(out, expected)


@kinds
@pytest.mark.parametrize("reentrant", [True, False])
def test_recompute(device, kind, reentrant):
    module = attention(device)
    twin = copy.deepcopy(module)

    class Repeated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = twin

        def forward(self, x):
            return te.checkpoint(self.inner, x, use_reentrant=reentrant)

    recipe = RECIPES[kind](fp8_mha=True)
    for _ in range(3):
        x, found = inputs(device), []
        for each in (module, Repeated()):
            each.zero_grad()
            x.grad = None
            with te.autocast(recipe=recipe):
                out = each(x)
            out.sum().backward()
            found.append([out.detach(), x.grad, *(p.grad.clone() for p in each.parameters())])
        for a, b in zip(*found, strict=True):
            assert_same_bits(a, b)


def test_checkpointed_core(device):
    module = attention(device)
    calls = {}, {"checkpoint_core_attention": True}
    modules = module, copy.deepcopy(module)
    compare(modules, device, DelayedScaling(fp8_mha=True), calls)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch asks non-leaves, and hides it
@kinds
def test_compiled(device, kind):
    """Between two graphs, with the bits of eager code."""
    torch.compiler.reset()
    module = attention(device)
    twin = torch.compile(copy.deepcopy(module), backend="aot_eager")
    compare((module, twin), device, RECIPES[kind](fp8_mha=True), ({}, {}))


@kinds
def test_quantized_parameters_and_microbatches(device, kind):
    recipe = RECIPES[kind](fp8_mha=True)
    with te.quantized_model_init(recipe=recipe):
        module = attention(device)
    modules = module, hooked(module)
    for first in (True, False):
        call = {"is_first_microbatch": first}
        compare(modules, device, recipe, (call, call), steps=2)


def test_attention_by_another_recipe(device, monkeypatch):
    """The environment says what is handed over where attention has a recipe of its own."""
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "DelayedScaling")
    module, x = attention(device), inputs(device)
    recipe = Float8CurrentScaling(fp8_mha=True)
    assert "proj_quantize_input" in stages(plans_of(module, x, recipe).forward)
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE_MHA", "1")
    module = attention(device)
    assert "proj_quantize_input" not in stages(plans_of(module, x, recipe).forward)


def test_a_projection_of_another_class_is_handed_16_bits(device):
    class Plain(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.seen = inner, []

        def forward(self, x, is_first_microbatch=None):
            self.seen.append(type(x))
            return self.inner(x, is_first_microbatch)

    module = attention(device)
    module.proj = Plain(module.proj)
    with te.autocast(recipe=DelayedScaling(fp8_mha=True)):
        module(inputs(device))
    assert module.proj.seen == [torch.Tensor]


@pytest.mark.gpu
@kinds
def test_captured(kind):
    """A CUDA graph replays the forward and the backward, to the bits of a call without one."""
    recipe, module = RECIPES[kind](fp8_mha=True), attention("cuda")
    x = inputs("cuda")
    graph, found = captured(lambda: step(module, x, recipe), warm_ups=3)
    twin = copy.deepcopy(module)
    graph.replay()
    torch.cuda.synchronize()
    if kind == "delayed":
        return  # the copy's state is that of before the capture, which ran nothing
    expected = step(twin, x.detach().requires_grad_(), recipe)
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


# ---- graphs that can not be ----------------------------------------------------------------------


VAIN = {
    "attention in 16 bits": ({"quantization": None, "fp8_gradient": False}, None),
    "projection in 16 bits": ({}, HIGH_PRECISION),
    "tiles": ({}, quantization_of(Float8BlockScaling())),
    "another dtype": ({}, lambda q: q._replace(input=q.input._replace(dtype=_core.DTYPE_E5M2))),
}


@pytest.mark.parametrize("change", VAIN)
def test_graphs_that_hand_over_in_vain(change):
    own, other = VAIN[change]
    graph = plans_of(attention("cpu"), inputs("cpu"), DelayedScaling(fp8_mha=True)).graph
    graph = graph.ordered(graph.tensors)
    if "quantization" in own:
        (at,) = (n for n, node in enumerate(graph.nodes) if node.kind == _core.NODE_ATTENTION)
        cast = HIGH_PRECISION
        graph.nodes[at] = graph.nodes[at]._replace(quantization=cast)
    if other is not None:
        cast = graph.parts[-1].quantization
        cast = other(cast) if callable(other) else other
        graph.nodes[-1] = graph.nodes[-1]._replace(quantization=cast)
    with pytest.raises(ValueError, match="context is handed over in FP8|context arrives row-wise"):
        graph.make(_core.DIRECTION_FORWARD)


def test_attention_in_16_bits_returns_none_of_fp8():
    options = {"scale": 1.0, "dropout": 0.0, "window": (-1, -1), "bottom_right": False}
    spec = AttentionSpec(((2, 16, 0, 16),) * 3, True, **options, fp8_output=True)
    graph = core_graph(spec, _core.DTYPE_BF16, True)
    with pytest.raises(ValueError, match="output is returned quantized"):
        graph.make(_core.DIRECTION_FORWARD)
