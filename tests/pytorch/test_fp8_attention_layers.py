# SPDX-License-Identifier: Apache-2.0
"""Layers whose attention is in FP8 by the recipe: one plan or module by module, and their state."""

import pytest
import torch
from pytorch.fp8_attention_cases import BATCH, CHANNELS, HEADS, LAYER, RECIPES, attentions
from pytorch.helpers import assert_same_bits, same_draws, state_of
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
from transformer_engine.pytorch.attention.fp8 import BLOCK

FORMS = {
    "interleaved": {"fuse_qkv_params": True},
    "apart": {},
    "grouped": {"fuse_qkv_params": True, "num_gqa_groups": 2},
    "one after the other": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
    "fp8 backward": {"self_attn_mask_type": "no_mask", "kv_channels": 128},
    "norms of heads": {"qk_norm_type": "RMSNorm"},
    "decoder": {"layer_type": "decoder"},
}


def train(device, options, recipe, by_modules, steps=2):
    """A layer after some steps, and their results."""
    layer = te.TransformerLayer(HEADS * CHANNELS, 512, HEADS, device=device, **LAYER, **options)
    if by_modules:
        layer.self_attention.core_attention.register_forward_hook(lambda *_: None)
    found = []
    for _ in range(steps):
        x, source = (
            torch.randn(n, BATCH, HEADS * CHANNELS).to(device, BF16).requires_grad_()
            for n in (BLOCK, 48)
        )
        given = {"encoder_output": source} if "layer_type" in options else {}
        te.reset_counters()
        with te.autocast(recipe=recipe):
            out = layer(x, **given)
        out.sum().backward()
        found += [out.detach(), x.grad, *(p.grad for p in layer.parameters())]
        layer.zero_grad()
    return layer, found


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("form", FORMS)
def test_layers(device, kind, form, monkeypatch, counters):
    """As one plan and module by module: the same bits, in FP8."""
    compared = None
    if form != "fp8 backward":
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    elif device == "cuda":  # cuDNN's gradients are not repeatable there
        compared = 1
    recipe = RECIPES[kind](fp8_dpa=True)
    with same_draws(device):
        one, found = train(device, FORMS[form], recipe, False)
    ran = attentions()
    count = 2 if form == "decoder" else 1
    assert ran["attention.e4m3"] == count and "attention.bf16" not in ran
    in_fp8 = form == "fp8 backward" and kind == "delayed"
    assert ran["attention_backward.e4m3" if in_fp8 else "attention_backward.bf16"] == count
    other, expected = train(device, FORMS[form], recipe, True)
    for x, y in zip(found[:compared], expected[:compared], strict=True):
        assert_same_bits(x, y)
    if compared is not None:
        return
    cores = [m for m in one.modules() if isinstance(m, te.DotProductAttention)]
    twins = [m for m in other.modules() if isinstance(m, te.DotProductAttention)]
    for core, twin in zip(cores, twins, strict=True):
        assert (state_of(core) is None) == (kind == "current")
        for way in ("forward", "backward") if kind == "delayed" else ():
            assert_same_bits(state_of(core)[way][0], state_of(twin)[way][0])


def test_a_layer_follows_the_recipe(device, counters):
    """The plans of one recipe are not those of the next."""
    layer = te.MultiheadAttention(
        HEADS * CHANNELS, HEADS, attention_dropout=0.0, params_dtype=BF16, device=device
    )
    x = torch.randn(32, BATCH, HEADS * CHANNELS).to(device, BF16)
    ran = []
    for recipe in (
        DelayedScaling(), DelayedScaling(fp8_dpa=True), Float8CurrentScaling(fp8_dpa=True),
        DelayedScaling(), DelayedScaling(fp8_dpa=True),
    ):  # fmt: skip
        te.reset_counters()
        with te.autocast(recipe=recipe):
            layer(x)
        ran.append(attentions())
    te.reset_counters()
    layer(x)
    in_16 = {"attention.bf16": 1}
    in_8 = {"attention.e4m3": 1}
    assert [*ran, attentions()] == [in_16, in_8, in_8, in_16, in_8, in_16]


def test_a_layer_saves_the_state_of_its_attention(device):
    recipe = DelayedScaling(fp8_dpa=True)
    layer, _ = train(device, {}, recipe, False)
    assert "self_attention.core_attention._extra_state" in layer.state_dict()
    plain, _ = train(device, {}, DelayedScaling(), False)
    assert "self_attention.core_attention._extra_state" not in plain.state_dict()
