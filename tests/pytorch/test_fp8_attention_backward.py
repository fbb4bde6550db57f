# SPDX-License-Identifier: Apache-2.0
"""Which backward an attention in FP8 has: the rule, clause by clause, and what it computes."""

import pytest
import torch
from comparators import assert_nmse
from pytorch.fp8_attention_cases import (
    BACK_TO_16,
    BACK_TO_BACK,
    BATCH,
    HEADS,
    LAYER,
    attentions,
    module_of,
    run,
    tensors_of,
)
from pytorch.helpers import assert_same_bits
from tols import BF16, E4M3, tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.attention import fp8
from transformer_engine.pytorch.attention.fp8 import (
    BLOCK,
    GRADIENT_RULE,
    BackwardFacts,
    Clause,
    fills_blocks,
    why_in_high_precision,
)

PLAIN = BackwardFacts(True, True, False, "cuda", 3 * BLOCK, (128, 128), False, False, 0.0)
CLAUSES = {
    "switched off": PLAIN._replace(switched_on=False),
    "asked for": PLAIN._replace(wide=True),
    "current": PLAIN._replace(delayed=False),
    "limited": PLAIN._replace(limited=True),
    "channels": PLAIN._replace(channels=(128, 64)),
    "packed": PLAIN._replace(packed=True),
    "partial blocks": PLAIN._replace(queries=3 * BLOCK + 1),
    "dropout": PLAIN._replace(dropout=0.1),
    "repeatable": PLAIN._replace(deterministic=True),
}


def test_every_clause_counts():
    assert why_in_high_precision(PLAIN) == ""
    assert why_in_high_precision(CLAUSES["partial blocks"]._replace(device="cpu")) == ""
    assert len(CLAUSES) == len(GRADIENT_RULE)
    for facts, clause in zip(CLAUSES.values(), GRADIENT_RULE, strict=True):
        assert [c.reason for c in GRADIENT_RULE if c.holds(facts)] == [clause.reason]
        assert why_in_high_precision(facts)


@pytest.mark.parametrize("fp8_format", [Format.HYBRID, Format.E4M3])
def test_backward_in_fp8(device, fp8_format, counters):
    """Without a mask, in heads of 128 channels: the format of gradients is the recipe's."""
    module = module_of(128, attn_mask_type="no_mask")
    tensors = tensors_of(device, 128, queries=BLOCK)
    recipe = DelayedScaling(fp8_dpa=True, fp8_format=fp8_format)
    grad = torch.randn(BLOCK, BATCH, HEADS * 128).to(device, BF16)
    for _ in range(2):
        te.reset_counters()
        found = run(module, tensors, recipe, grad)
    assert attentions() == BACK_TO_BACK
    out = module(*tensors)
    exact = torch.autograd.grad(out, tensors, grad)
    dtype = torch.float8_e5m2 if fp8_format is Format.HYBRID else E4M3
    for x, expected in zip(found[1:], exact, strict=True):
        assert_nmse(x, expected, 4 * tol("quantize", dtype) + 4 * tol("quantize", E4M3))


@pytest.mark.parametrize(
    ("options", "recipe", "expected"),
    [
        ({"attn_mask_type": "causal"}, DelayedScaling, BACK_TO_16),
        ({"attn_mask_type": "no_mask", "window_size": (9, 9)}, DelayedScaling, BACK_TO_16),
        ({"attn_mask_type": "no_mask"}, Float8CurrentScaling, BACK_TO_16),
        ({"attn_mask_type": "no_mask"}, DelayedScaling, BACK_TO_BACK),
    ],
)
def test_which_backward_follows(device, options, recipe, expected, counters):
    tensors = tensors_of(device, 128, queries=BLOCK)
    run(module_of(128, **options), tensors, recipe(fp8_dpa=True))
    assert attentions() == expected


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
def test_partial_blocks(device, order, counters):
    """What cuDNN's kernel makes of their last queries is wrong; from call to call of a module."""
    module = module_of(128, attn_mask_type="no_mask", qkv_format=order)
    for queries in (BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 63):
        te.reset_counters()
        tensors = tensors_of(device, 128, queries=queries, order=order)
        run(module, tensors, DelayedScaling(fp8_dpa=True))
        in_fp8 = device == "cpu" or queries % BLOCK == 0
        assert attentions() == (BACK_TO_BACK if in_fp8 else BACK_TO_16)


def test_partial_blocks_of_a_layer(device, counters):
    layer = te.TransformerLayer(256, 512, 2, device=device, self_attn_mask_type="no_mask", **LAYER)
    for tokens in (BLOCK, BLOCK, BLOCK + 1, BLOCK + 1, BLOCK):
        te.reset_counters()
        x = torch.randn(tokens, BATCH, 256, device=device, dtype=BF16)
        with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
            layer(x).sum().backward()
        in_fp8 = device == "cpu" or tokens == BLOCK
        assert attentions() == (BACK_TO_BACK if in_fp8 else BACK_TO_16)


@pytest.fixture
def by_queries(monkeypatch):
    """The rule of CUDA on every device: the backward goes by how many queries there are."""
    rule = Clause("partial blocks", lambda facts: not fills_blocks(facts.queries))
    monkeypatch.setattr(fp8, "GRADIENT_RULE", (rule,))


def test_partial_blocks_in_a_graph_of_any_length(by_queries, start):
    results = []
    for compiled in (False, True):
        start()
        module, found = module_of(128, attn_mask_type="no_mask"), []
        call = torch.compile(module, backend="eager", dynamic=True) if compiled else module
        for queries in (BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 63):
            tensors = tensors_of("cpu", 128, queries=queries)
            found += run(call, tensors, DelayedScaling(fp8_dpa=True))
        results.append(found)
    assert_same_bits(*results)


def test_a_program_takes_any_number_of_queries(by_queries):
    """It has no backward, on whose kind that depends."""
    module = module_of(128, attn_mask_type="no_mask").eval()
    tokens = torch.export.Dim("tokens", min=2, max=4 * BLOCK)
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)), torch.no_grad():
        tensors = tensors_of("cpu", 128, queries=BLOCK, keys=BLOCK)
        module(*tensors)
        program = torch.export.export(module, tuple(tensors), dynamic_shapes=({0: tokens},) * 3)
        others = tensors_of("cpu", 128, queries=BLOCK + 1, keys=BLOCK + 1)
        assert_same_bits(program.module()(*others), module(*others))


@pytest.mark.parametrize("name", ["TE_FP8_ATTENTION_BACKWARD", "NVTE_FP8_DPA_BWD"])
def test_switched_off(device, name, monkeypatch, counters):
    monkeypatch.setenv(name, "0")
    module = module_of(128, attn_mask_type="no_mask")
    run(module, tensors_of(device, 128), DelayedScaling(fp8_dpa=True))
    assert attentions() == BACK_TO_16


def test_repeatable_gradients(device, counters):
    torch.use_deterministic_algorithms(True)
    try:
        module = module_of(128, attn_mask_type="no_mask")
        run(module, tensors_of(device, 128), DelayedScaling(fp8_dpa=True))
    finally:
        torch.use_deterministic_algorithms(False)
    assert attentions() == BACK_TO_16


def test_backward_of_16_bits_is_that_of_what_was_saved(rng):
    """The gradient of attention at the queries, keys, values and output that FP8 holds."""
    module, tensors = module_of(attn_mask_type="causal"), tensors_of("cpu")
    recipe = Float8CurrentScaling(fp8_dpa=True)
    out, *grads = run(module, tensors, recipe)
    wide = []
    for tensor in tensors:
        scale = 448.0 / tensor.detach().float().abs().max()
        data = (tensor.detach().float() * scale).to(torch.float8_e4m3fn)
        wide.append((data.float() * (1 / scale)).to(BF16).requires_grad_())
    exact = torch.autograd.grad(module(*wide), wide, torch.ones_like(out))
    for x, expected in zip(grads, exact, strict=True):  # the output is rounded to FP8 alone
        assert_nmse(x, expected, 4 * tol("quantize", E4M3))
