# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: angles, application, gradients, formats, errors."""

import copy

import attention_reference as reference
import pytest
import torch
from comparators import assert_bits, assert_grad64, assert_nmse, assert_within
from pytorch.helpers import assert_same_bits
from tols import BF16, F16, F32, tol

from transformer_engine.pytorch.attention.rope import (
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)

SEQUENCE, BATCH, HEADS, CHANNELS = 9, 3, 2, 16
LENGTHS = (4, 0, 9)


def angles_of(positions, channels, base=10000.0, interleaved=False):
    """Angles [positions, channels] in float64: position / base^(2 i / channels) for pair i."""
    at = torch.as_tensor(positions, dtype=torch.float64)[:, None]
    pairs = torch.arange(channels // 2, dtype=torch.float64)
    angles = at / base ** (2 * pairs / channels)
    return angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)


def assert_angles(found, exact):
    """fp32 angles: a power, a quotient and a product, relative to the angle."""
    assert found.dtype == F32
    assert_within(found, exact[:, None, None, :], exact[:, None, None, :])


# ---- angles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("percent", "rotated"), [(1.0, 32), (0.5, 16), (0.25, 8)])
def test_angles(device, percent, rotated, interleaved):
    rope = RotaryPositionEmbedding(32, percent, interleaved=interleaved).to(device)
    found = rope(20)
    assert found.shape == (20, 1, 1, rotated) and found.device.type == device
    assert_angles(found, angles_of(range(20), rotated, interleaved=interleaved))
    assert_angles(rope(20, offset=7), angles_of(range(7, 27), rotated, interleaved=interleaved))


def test_base_and_interpolation(device):
    assert_angles(
        RotaryPositionEmbedding(8, rotary_base=500.0).to(device)(5), angles_of(range(5), 8, 500.0)
    )
    both = RotaryPositionEmbedding(
        8, seq_len_interpolation_factor=4, pretrained_max_position_embeddings=10
    ).to(device)
    positions = torch.arange(64, dtype=torch.float64)
    assert_angles(both(40), angles_of(positions[:40] / 4, 8))  # up to 10 * 4: the factor
    assert_angles(both(64), angles_of(positions / 6.4, 8))  # beyond: 64 / 10


def test_one_interpolation_argument_changes_nothing(device):
    plain = RotaryPositionEmbedding(8).to(device)(12)
    for name in ("seq_len_interpolation_factor", "pretrained_max_position_embeddings"):
        assert_bits(RotaryPositionEmbedding(8, **{name: 2}).to(device)(12), plain)


def test_angles_stay_fp32_and_out_of_state_dicts(device):
    rope = RotaryPositionEmbedding(16).to(device)
    expected = rope(100)
    assert rope.state_dict() == {}
    rope.load_state_dict({"inv_freq": torch.zeros(8)})  # a peer's: they follow from the arguments
    for converted in (rope.half(), copy.deepcopy(rope).bfloat16(), rope.double()):
        assert_bits(converted(100), expected)


def test_reset_after_a_time_without_memory(device):
    """As of a model that is made on the meta device: its modules are reset one by one."""
    rope = RotaryPositionEmbedding(16, interleaved=True).to(device)
    expected = rope(12)
    rope.to("meta").to_empty(device=device)
    with torch.no_grad():
        rope.inv_freq.fill_(float("nan"))  # what happens to lie there
    rope.reset_parameters()
    assert_bits(rope(12), expected)


def test_odd_number_of_channels_is_an_error():
    with pytest.raises(ValueError, match="rotary_percent=0.25: 3 rotated"):
        RotaryPositionEmbedding(12, 0.25)


# ---- application ---------------------------------------------------------------------------------


def inputs(form, dtype, device):
    """(tensor that wants gradients, cu_seqlens or None)."""
    cu_seqlens = None
    if form == "thd":
        shape = (sum(LENGTHS), HEADS, CHANNELS)
        ends = torch.tensor((0, *LENGTHS)).cumsum(0)
        cu_seqlens = ends.to(device, torch.int32)
    elif form == "sbhd":
        shape = (SEQUENCE, BATCH, HEADS, CHANNELS)
    else:
        shape = (BATCH, SEQUENCE, HEADS, CHANNELS)
    return torch.randn(shape).to(device, dtype).requires_grad_(), cu_seqlens


def positions_of(form, starts):
    """Position of each token, [s, b, 1], [b, s, 1] or [tokens, 1]."""
    starts = torch.zeros(BATCH, dtype=torch.long) if starts is None else starts.cpu().long()
    if form == "thd":
        parts = [torch.arange(n) + s for n, s in zip(LENGTHS, starts, strict=True)]
        return torch.cat(parts)[:, None]
    at = torch.arange(SEQUENCE)[:, None] + starts
    return (at if form == "sbhd" else at.T)[..., None]


@pytest.mark.parametrize("rotated", [CHANNELS, 6])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
def test_values_and_gradients(device, dtype, form, started, interleaved, rotated):
    t, cu_seqlens = inputs(form, dtype, device)
    starts = torch.randint(0, 20, (BATCH,), device=device, dtype=torch.int32) if started else None
    freqs = RotaryPositionEmbedding(rotated, interleaved=interleaved).to(device)(30)
    out = apply_rotary_pos_emb(
        t, freqs, form, starts, interleaved, cu_seqlens=cu_seqlens, fused=interleaved
    )
    angles = freqs.cpu().double().view(30, rotated)[positions_of(form, starts)]

    def definition(t):
        return reference.rope(t, angles, interleaved)

    wide = t.detach().cpu().double()
    assert out.dtype == dtype and out.shape == t.shape
    turned, rest = wide[..., :rotated], wide[..., rotated:]
    partners = torch.cat([reference.rotate(turned, interleaved), torch.zeros_like(rest)], dim=-1)
    terms = wide.abs() + partners.abs()
    assert_within(out, definition(wide), terms)
    grad = torch.randn(t.shape).to(device, dtype)
    (found,) = torch.autograd.grad(out, t, grad)
    bound = tol("round", dtype) + tol("sum", F32, 2)
    assert_grad64({"t": found}, definition, {"t": t}, grad, bound)
    assert_nmse(out, definition(wide), bound)


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_fused_or_not_is_one_kernel(device, form):
    t, cu_seqlens = inputs(form, F32, device)
    freqs = RotaryPositionEmbedding(CHANNELS).to(device)(SEQUENCE)
    outs = [
        apply_rotary_pos_emb(t, freqs, form, fused=fused, cu_seqlens=cu_seqlens)
        for fused in (False, True)
    ]
    assert_bits(*outs)


def test_views_and_shared_angles(device, counters):
    """Queries of a packed projection are read in place; a gradient of any strides serves."""
    packed = torch.randn(SEQUENCE, BATCH, HEADS, 3 * CHANNELS, device=device, requires_grad=True)
    freqs = RotaryPositionEmbedding(CHANNELS).to(device)(SEQUENCE)
    query = packed[..., CHANNELS : 2 * CHANNELS]
    out = apply_rotary_pos_emb(query, freqs)
    assert_bits(out, apply_rotary_pos_emb(query.contiguous(), freqs))
    assert counters() == {f"op.{device}.rope": 2}
    grad = torch.randn(HEADS, CHANNELS, SEQUENCE, BATCH, device=device).permute(2, 3, 0, 1)
    (strided,) = torch.autograd.grad(out, packed, grad, retain_graph=True)
    (dense,) = torch.autograd.grad(out, packed, grad.contiguous())
    assert_bits(strided, dense)


def test_half_precision_angles_are_read_as_fp32(device):
    t, _ = inputs("sbhd", F32, device)
    freqs = RotaryPositionEmbedding(CHANNELS).to(device)(SEQUENCE).to(BF16)
    assert_bits(apply_rotary_pos_emb(t, freqs), apply_rotary_pos_emb(t, freqs.float()))


def test_rotation_and_back(device):
    """The backward is the inverse rotation."""
    t, _ = inputs("bshd", F32, device)
    freqs = RotaryPositionEmbedding(CHANNELS).to(device)(SEQUENCE)
    out = apply_rotary_pos_emb(t, freqs, "bshd")
    (back,) = torch.autograd.grad(out, t, out.detach())
    assert_nmse(back, t, 4 * (tol("round", F32) + tol("sum", F32, 2)))


@pytest.mark.parametrize("form", ["sbhd", "thd"])
def test_compiled_equals_eager(device, form):
    t, cu_seqlens = inputs(form, F32, device)
    rope = RotaryPositionEmbedding(CHANNELS).to(device)

    def f(t):
        return apply_rotary_pos_emb(t, rope(SEQUENCE), form, cu_seqlens=cu_seqlens)

    torch._dynamo.reset()
    results = []
    for function in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        out = function(t)
        results.append([out, *torch.autograd.grad(out.square().sum(), t)])
    assert_same_bits(*results)


# ---- errors --------------------------------------------------------------------------------------


def test_errors(device):
    t, cu_seqlens = inputs("sbhd", F32, device)
    freqs = RotaryPositionEmbedding(CHANNELS).to(device)(SEQUENCE)
    with pytest.raises(ValueError, match="tensor_format='bhsd'"):
        apply_rotary_pos_emb(t, freqs, "bhsd")
    with pytest.raises(ValueError, match="thd has 3 dims"):
        apply_rotary_pos_emb(t, freqs, "thd")
    with pytest.raises(ValueError, match="needs cu_seqlens"):
        apply_rotary_pos_emb(t[0], freqs, "thd")
    with pytest.raises(ValueError, match="9 positions, but freqs has 8"):
        apply_rotary_pos_emb(t, freqs[:8])
    with pytest.raises(ValueError, match="expected .s, 1, 1, d."):
        apply_rotary_pos_emb(t, freqs.flatten(1))
    with pytest.raises(ValueError):
        apply_rotary_pos_emb(t, torch.zeros(SEQUENCE, 1, 1, CHANNELS + 2, device=device))
    with pytest.raises(NotImplementedError, match="cp_size=2"):
        apply_rotary_pos_emb(t, freqs, cp_size=2)
    with pytest.raises(NotImplementedError, match="gradients of freqs"):
        apply_rotary_pos_emb(t, freqs.clone().requires_grad_())
