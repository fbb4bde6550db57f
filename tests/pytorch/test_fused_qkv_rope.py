# SPDX-License-Identifier: Apache-2.0
"""apply_fused_qkv_rotary_pos_emb: one projection taken apart and turned, and its gradient."""

import attention_reference as reference
import pytest
import torch
from buffers import name_of
from comparators import assert_bits, assert_grad64, assert_nmse
from pytorch.helpers import assert_same_bits
from pytorch.test_rope import BATCH, EVEN, positions_of
from tols import BF16, F16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention import apply_fused_qkv_rotary_pos_emb

GROUPS, EACH, CHANNELS, VALUES = 2, 3, 16, 24
SIZES = [EACH * CHANNELS, CHANNELS, VALUES]
FORMS = pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
PAIRS = pytest.mark.parametrize("interleaved", [False, True])


def projection(form, dtype, device, ranks=1, sizes=SIZES):
    """(projection that wants a gradient, cu_seqlens or None)."""
    cu_seqlens = None
    lead = (EVEN["sequence"], BATCH) if form == "sbhd" else (BATCH, EVEN["sequence"])
    if form == "thd":
        lead = (sum(EVEN["lengths"]),)
        ends = torch.tensor((0, *EVEN["lengths"])).cumsum(0) * ranks
        cu_seqlens = ends.to(device, torch.int32)
    qkv = torch.randn(*lead, GROUPS, sum(sizes)).to(device, dtype)
    return qkv.requires_grad_(), cu_seqlens


def angles_of(device, rotated, interleaved, positions=50, offset=0):
    make = te.RotaryPositionEmbedding(rotated, interleaved=interleaved).to(device)
    return make(positions, offset)


def definition_of(q_angles, k_angles, interleaved, part):
    """One of the three results, from the projection."""

    def definition(qkv):
        query, key, value = qkv.split(SIZES, -1)
        query = query.unflatten(-1, (EACH, CHANNELS)).flatten(-3, -2)
        query = reference.rope(query, q_angles, interleaved)
        return (query, reference.rope(key, k_angles, interleaved), value)[part]

    return definition


def check(form, dtype, device, *, rotated=(CHANNELS, 6), interleaved=False, ranks=1, started=False):
    rank = ranks - 1
    qkv, cu_seqlens = projection(form, dtype, device, ranks)
    starts = torch.randint(0, 20, (BATCH,), dtype=torch.int32) if started else None
    freqs = [angles_of(device, n, interleaved, offset=3 * i) for i, n in enumerate(rotated)]
    outs = apply_fused_qkv_rotary_pos_emb(
        qkv, *freqs, SIZES, form, None if starts is None else starts.to(device), interleaved,
        cu_seqlens, ranks, rank,
    )  # fmt: skip
    at = positions_of(form, starts, **EVEN, ranks=ranks, rank=rank)
    angles = [f.cpu().double().flatten(1)[at] for f in freqs]
    bound = tol("round", dtype) + tol("sum", F32, 2)
    heads = (GROUPS * EACH, CHANNELS), (GROUPS, CHANNELS), (GROUPS, VALUES)
    for part, out in enumerate(outs):
        assert out.shape == (*qkv.shape[:-2], *heads[part])
        assert out.dtype == dtype and out.is_contiguous()
        definition = definition_of(*angles, interleaved, part)
        assert_nmse(out, definition(qkv.detach().cpu().double()), bound)
        grad = torch.randn(out.shape).to(device, dtype)
        (found,) = torch.autograd.grad(out, qkv, grad, retain_graph=True)
        assert_grad64({"qkv": found}, definition, {"qkv": qkv}, grad, bound)
    assert_bits(outs[2], qkv.split(SIZES, -1)[2])


@pytest.mark.parametrize("started", [False, True])
@PAIRS
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=name_of)
@FORMS
def test_values_and_gradients(device, form, dtype, interleaved, started):
    check(form, dtype, device, interleaved=interleaved, started=started)


@PAIRS
@pytest.mark.parametrize("ranks", [2, 3])
@FORMS
def test_chunks_of_ranks(device, form, ranks, interleaved):
    check(form, F32, device, ranks=ranks, interleaved=interleaved)


@FORMS
def test_it_is_what_the_parts_give(device, form):
    qkv, cu_seqlens = projection(form, BF16, device)
    first, second = angles_of(device, CHANNELS, False), angles_of(device, CHANNELS, False, offset=9)
    for of_query, of_key in ((first, first), (first, second)):
        outs = apply_fused_qkv_rotary_pos_emb(
            qkv, of_query, of_key, SIZES, form, cu_seqlens=cu_seqlens
        )
        query, key, value = qkv.split(SIZES, -1)
        query = query.reshape(*qkv.shape[:-2], -1, CHANNELS)
        expected = (
            te.apply_rotary_pos_emb(query, of_query, form, cu_seqlens=cu_seqlens),
            te.apply_rotary_pos_emb(key, of_key, form, cu_seqlens=cu_seqlens),
            value,
        )
        assert_same_bits(list(outs), list(expected))
        grads = [torch.randn_like(out) for out in outs]
        found = torch.autograd.grad(outs, qkv, grads)
        assert_same_bits(list(found), list(torch.autograd.grad(expected, qkv, grads)))


@FORMS
def test_one_pass_in_either_direction(device, form, counters):
    qkv, cu_seqlens = projection(form, F32, device)
    angles = angles_of(device, CHANNELS, False)
    outs = apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, SIZES, form, cu_seqlens=cu_seqlens)
    assert counters() == {f"op.{device}.rope": 1}
    torch.autograd.grad(outs, qkv, [torch.randn_like(out) for out in outs])
    assert counters() == {f"op.{device}.rope": 2}


def test_views_and_strided_gradients(device):
    """The projection may be part of another tensor; so may gradients, or one number."""
    whole = torch.randn(8, BATCH, GROUPS, sum(SIZES) + 8, device=device, requires_grad=True)
    angles, part = angles_of(device, CHANNELS, False), whole[..., 4:-4]
    outs = apply_fused_qkv_rotary_pos_emb(part, angles, angles, SIZES)
    dense = apply_fused_qkv_rotary_pos_emb(part.contiguous(), angles, angles, SIZES)
    assert_same_bits(list(outs), list(dense))
    grads = [torch.randn(*out.shape[::-1], device=device).permute(3, 2, 1, 0) for out in outs]
    found = torch.autograd.grad(outs, whole, grads, retain_graph=True)
    same = torch.autograd.grad(outs, whole, [g.contiguous() for g in grads], retain_graph=True)
    assert_same_bits(list(found), list(same))
    found = torch.autograd.grad(sum(out.sum() for out in outs), whole, retain_graph=True)
    same = torch.autograd.grad(outs, whole, [torch.ones_like(out) for out in outs])
    assert_same_bits(list(found), list(same))


@pytest.mark.parametrize("form", ["sbhd", "thd"])
def test_compiled_equals_eager(device, form):
    qkv, cu_seqlens = projection(form, F32, device)
    angles = angles_of(device, CHANNELS, False)

    def f(qkv):
        return apply_fused_qkv_rotary_pos_emb(
            qkv, angles, angles, SIZES, form, cu_seqlens=cu_seqlens
        )

    torch._dynamo.reset()
    results = []
    for function in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        outs = function(qkv)
        loss = sum((out * out).sum() for out in outs)
        results.append([*outs, *torch.autograd.grad(loss, qkv)])
    assert_same_bits(*results)


def test_empty(device):
    for shape in ((0, 2, GROUPS), (3, 0, GROUPS), (3, 2, 0)):
        qkv = torch.zeros(*shape, sum(SIZES), device=device, requires_grad=True)
        angles = angles_of(device, CHANNELS, False)
        outs = apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, SIZES)
        assert [out.numel() for out in outs] == [0, 0, 0]
        (grad,) = torch.autograd.grad(outs, qkv, [torch.ones_like(out) for out in outs])
        assert grad.shape == qkv.shape


def test_errors(device):
    qkv, _ = projection("sbhd", F32, device)
    angles = angles_of(device, CHANNELS, False)
    for sizes in ([16, 16], [48, 16, 16], [40, 24, 24], [48, 0, 40]):
        with pytest.raises(ValueError, match="qkv_split_arg_list .*expected three sizes"):
            apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, sizes)
    with pytest.raises(ValueError, match="qkv: shape .*, thd has 3 dims"):
        apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, SIZES, "thd", cu_seqlens=qkv)
    with pytest.raises(ValueError, match="tensor_format='thd' needs cu_seqlens"):
        apply_fused_qkv_rotary_pos_emb(qkv[0], angles, angles, SIZES, "thd")
    with pytest.raises(ValueError, match="tensor_format='bhsd'"):
        apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, SIZES, "bhsd")
    with pytest.raises(ValueError, match="k_freqs: shape .50, 3, 1, 16., expected .s, 1, 1, d."):
        apply_fused_qkv_rotary_pos_emb(qkv, angles, angles.expand(-1, 3, 1, -1), SIZES)
    with pytest.raises(ValueError, match="8 positions, but k_freqs has 5"):
        apply_fused_qkv_rotary_pos_emb(qkv, angles, angles[:5], SIZES)
    with pytest.raises(ValueError, match="cp_size=2, cp_rank=2"):
        apply_fused_qkv_rotary_pos_emb(qkv, angles, angles, SIZES, cp_size=2, cp_rank=2)
    with pytest.raises(ValueError, match="q_freqs requires a gradient"):
        learned = angles.clone().requires_grad_()
        apply_fused_qkv_rotary_pos_emb(qkv, learned, angles, SIZES)
    with pytest.raises(TypeError, match="q_freqs: Rotary"):
        apply_fused_qkv_rotary_pos_emb(qkv, te.RotaryPositionEmbedding(16), angles, SIZES)
