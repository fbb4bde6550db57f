# SPDX-License-Identifier: Apache-2.0
"""Operators of modules by the registry: rotary positions, softmax, caches, casts."""

import contextlib

import pytest
import torch
from comparators import assert_bits, assert_nmse
from plugged import native, register
from plugged_attention import (
    BATCH,
    DIM,
    FORWARD,
    GROUPS,
    HEADS,
    LENGTH,
    Attention,
    assert_near,
    changed,
    normal,
    ran,
    reference,
    sums,
    vendor,
)
from tols import BF16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.plugin import core as plugin
from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb

pytestmark = pytest.mark.usefixtures("manager")

# ---- rotary positions ----------------------------------------------------------------------------


def rotated(t, freqs, policy=None, **options):
    t = t.detach().clone().requires_grad_()
    with policy or contextlib.nullcontext():
        out = te.attention.apply_rotary_pos_emb(t, freqs, **options)
    return [out.detach(), *torch.autograd.grad((out * out).sum(), t)]


ROPE = {
    "sbhd": {},
    "bshd": {"tensor_format": "bshd"},
    "pairs": {"interleaved": True},
    "packed": {"tensor_format": "thd", "cu_seqlens": (0, 5, 20)},
    "ranks": {"cp_size": 2, "cp_rank": 1},
}


@pytest.mark.parametrize("name", ROPE)
def test_rotary_positions(device, name):
    options = dict(ROPE[name])
    if "cu_seqlens" in options:
        options["cu_seqlens"] = sums(device, *options["cu_seqlens"])
    freqs = te.attention.RotaryPositionEmbedding(DIM, 0.5)(2 * LENGTH).to(device)
    lead = (24,) if name == "packed" else (BATCH, LENGTH)[:: 1 if name == "bshd" else -1]
    t = normal(*lead, HEADS, DIM, device=device, dtype=F32)
    wanted, got = rotated(t, freqs, **options), rotated(t, freqs, reference(), **options)
    for one, other in zip(got, wanted, strict=True):
        assert_nmse(one, other, tol("chain", F32, 4))
    assert ran() == {"fused_rope_forward", "fused_rope_backward"}
    changed("fused_rope_forward")
    assert_bits(rotated(t, freqs, vendor(), **options)[0], 2 * wanted[0])


def test_rotary_positions_in_a_graph(device):
    torch.compiler.reset()
    freqs = te.attention.RotaryPositionEmbedding(DIM)(LENGTH).to(device)
    t = normal(LENGTH, BATCH, HEADS, DIM, device=device, dtype=F32)
    changed("fused_rope_forward")
    run = torch.compile(te.attention.apply_rotary_pos_emb, backend="aot_eager", fullgraph=True)
    wanted = run(t, freqs)
    with vendor():
        assert_bits(run(t, freqs), 2 * wanted)
    assert_bits(run(t, freqs), wanted)


@pytest.mark.parametrize(
    "made, kind",
    [(lambda t: None, TypeError), (lambda t: t[..., :2], ValueError)],
    ids=["no tensor", "less"],
)
def test_wrong_positions_are_told(device, made, kind):
    register("fused_rope_forward", lambda t, *given: made(t))
    t, freqs = (
        normal(LENGTH, BATCH, HEADS, DIM, device=device, dtype=F32),
        torch.rand(LENGTH, 1, 1, DIM),
    )
    with vendor(), pytest.raises(kind, match="fused_rope_forward: the result"):
        te.attention.apply_rotary_pos_emb(t, freqs.to(device), fused=True)


def test_starts_of_sequences_go_forward_alone(device):
    """Their backward has no argument for them: this library's own runs it."""
    freqs = te.attention.RotaryPositionEmbedding(DIM)(2 * LENGTH).to(device)
    t = normal(LENGTH, BATCH, HEADS, DIM, device=device, dtype=F32)
    options = {"start_positions": sums(device, 3, 7)}
    wanted, got = rotated(t, freqs, **options), rotated(t, freqs, reference(), **options)
    for one, other in zip(got, wanted, strict=True):
        assert_nmse(one, other, tol("chain", F32, 4))
    assert ran() == {"fused_rope_forward"}
    with pytest.raises(NotImplementedError, match="strict"):
        rotated(t, freqs, plugin.policy_context(strict_reference()), **options)


def strict_reference():
    return plugin.SelectionPolicy.from_dict(prefer="reference", strict=True)


def test_parts_of_a_projection(device):
    freqs = te.attention.RotaryPositionEmbedding(DIM)(LENGTH).to(device)
    sizes = [2 * DIM, DIM, DIM]
    qkv = normal(LENGTH, BATCH, GROUPS, sum(sizes), device=device, dtype=F32)

    def run(policy=None):
        given = qkv.detach().clone().requires_grad_()
        with policy or contextlib.nullcontext():
            made = apply_fused_qkv_rotary_pos_emb(given, freqs, freqs, sizes)
        return [*made, *torch.autograd.grad(sum((t * t).sum() for t in made), given)]

    wanted = run()
    for one, other in zip(run(reference()), wanted, strict=True):
        assert_nmse(one, other, tol("chain", F32, 4))
    assert ran() == {"fused_qkv_rope_forward", "fused_qkv_rope_backward"}
    changed("fused_rope_forward")  # it turns queries and keys; values are copied
    got = run(vendor())
    assert_bits(got[0], 2 * wanted[0])
    assert_bits(got[1], 2 * wanted[1])
    assert_bits(got[2], wanted[2])


# ---- softmax -------------------------------------------------------------------------------------


@pytest.fixture
def unfused(monkeypatch):
    """Attention in three steps, which makes a softmax of its own."""
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")


SOFTMAX = {
    "no_mask": "scaled_softmax_forward",
    "causal": "scaled_upper_triang_masked_softmax_forward",
    "corner": "scaled_aligned_causal_masked_softmax_forward",
    "padding": "scaled_masked_softmax_forward",
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(device, unfused, name):
    attention = Attention(name, device, F32)
    wanted = attention.step()
    assert_near(attention.step(reference()), wanted, F32)
    assert ran() == {SOFTMAX[name], "scaled_softmax_backward"}
    changed(SOFTMAX[name])
    assert_nmse(attention.step(vendor())[0], 2 * wanted[0], tol("chain", F32, 4))


def test_softmax_with_a_bias(device, unfused):
    attention = Attention("bias", device, F32)
    wanted = attention.step()
    changed("scaled_upper_triang_masked_softmax_forward")
    assert_bits(attention.step(vendor())[0], wanted[0])
    with plugin.with_strict_mode(), pytest.raises(NotImplementedError, match="strict"):
        attention.step(vendor())


# ---- caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("paged", [False, True])
def test_caches(device, dtype, form, paged):
    module = te.DotProductAttention(
        HEADS, DIM, qkv_format=form, attn_mask_type="padding_causal", layer_number=1
    )

    @torch.no_grad()
    def generate():
        options = {"is_paged": True, "page_size": 8, "total_num_pages": 8} if paged else {}
        params = te.InferenceParams(
            BATCH, 32, num_heads_kv=HEADS, head_dim_k=DIM, dtype=dtype, device=device, **options
        )
        torch.manual_seed(2)
        made = []
        for counts in ((5, 3), (1, 1), (4, 4)):
            params.pre_step(dict(enumerate(counts)))
            longest = max(counts)
            lead = {"bshd": (BATCH, longest), "sbhd": (longest, BATCH), "thd": (sum(counts),)}
            shape = (*lead[form], HEADS, DIM)
            given = [normal(*shape, device=device, dtype=dtype) for _ in range(3)]
            made.append(module(*given, inference_params=params, max_seqlen_q=longest))
        return made

    wanted = generate()
    with reference():
        got = generate()
    for one, other in zip(got, wanted, strict=True):
        assert_near([one], [other], dtype)
    assert {"copy_to_kv_cache", FORWARD} <= ran()
    register("copy_to_kv_cache", lambda *given: [cache.zero_() for cache in given[2:4]] and None)
    with vendor():
        assert not generate()[-1].any()


# ---- casts outside of plans ----------------------------------------------------------------------


def test_casts_of_quantizers(device):
    """The same bits by whomever; wrong ones show."""
    x = normal(32, 48, device=device, dtype=BF16)
    for scale in (True, False):
        if scale:
            quantizer = te.Float8Quantizer(
                torch.ones(1, device=device), torch.zeros(1, device=device), te.DType.kFloat8E4M3
            )
        else:
            quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)
        wanted = quantizer(x)
        with reference():
            got = quantizer(x)
        assert_bits(got.dequantize(), wanted.dequantize())
    assert "compute_amax" in ran()
    register("dequantize", lambda inp, otype: 2 * native("dequantize")(inp, otype))
    wanted = got.dequantize()
    with vendor():
        assert_bits(got.dequantize(), 2 * wanted)


def test_transposes(device):
    def turned():
        quantizer = te.Float8Quantizer(
            torch.ones(1, device=device), torch.zeros(1, device=device), te.DType.kFloat8E4M3
        )
        quantizer.set_usage(rowwise=True, columnwise=False)
        torch.manual_seed(0)
        made = quantizer(torch.randn(20, 48, device=device))
        made.update_usage(rowwise_usage=True, columnwise_usage=True)
        return made._transpose

    wanted = turned()
    with reference():
        assert_bits(turned(), wanted)
    assert "fp8_transpose" in ran()
