# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: angles, application, gradients, formats, errors."""

import copy

import attention_reference as reference
import pytest
import torch
from comparators import assert_bits, assert_grad64, assert_nmse, assert_within
from device_kinds import every_device
from pytorch.helpers import assert_same_bits
from tols import BF16, F16, F32, tol

from transformer_engine.pytorch.attention.rope import (
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)

pytestmark = every_device

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


def inputs(form, dtype, device, *, sequence=SEQUENCE, lengths=LENGTHS, ranks=1):
    """(tensor that wants gradients, cu_seqlens or None)."""
    cu_seqlens = None
    if form == "thd":
        shape = (sum(lengths), HEADS, CHANNELS)
        ends = torch.tensor((0, *lengths)).cumsum(0) * ranks
        cu_seqlens = ends.to(device, torch.int32)
    elif form == "sbhd":
        shape = (sequence, BATCH, HEADS, CHANNELS)
    else:
        shape = (BATCH, sequence, HEADS, CHANNELS)
    return torch.randn(shape).to(device, dtype).requires_grad_(), cu_seqlens


def positions_of(form, starts, *, sequence=SEQUENCE, lengths=LENGTHS, ranks=1, rank=0):
    """Position of each token, [s, b, 1], [b, s, 1] or [tokens, 1]."""
    starts = torch.zeros(BATCH, dtype=torch.long) if starts is None else starts.cpu().long()
    if ranks == 1:  # chunks of an odd sequence have no one length
        found = {n: torch.arange(n) for n in (sequence, *lengths)}
    else:
        found = {n: reference.cp_positions(n * ranks, ranks, rank) for n in (sequence, *lengths)}
    if form == "thd":
        parts = [found[n] + s for n, s in zip(lengths, starts, strict=True)]
        return torch.cat(parts)[:, None]
    at = found[sequence][:, None] + starts
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


EVEN = {"sequence": 8, "lengths": (4, 0, 10)}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_chunks_of_ranks(device, form, ranks, started):
    freqs = RotaryPositionEmbedding(CHANNELS).to(device)(50)
    for rank in range(ranks):
        t, cu_seqlens = inputs(form, F32, device, **EVEN, ranks=ranks)
        starts = torch.randint(0, 20, (BATCH,), dtype=torch.int32) if started else None
        placed = None if starts is None else starts.to(device)
        options = {"cu_seqlens": cu_seqlens, "cp_size": ranks, "cp_rank": rank}
        out = apply_rotary_pos_emb(t, freqs, form, placed, **options)
        at = positions_of(form, starts, **EVEN, ranks=ranks, rank=rank)
        angles = freqs.cpu().double().flatten(1)[at]

        def definition(t, angles=angles):
            return reference.rope(t, angles)

        bound = tol("round", F32) + tol("sum", F32, 2)
        assert_nmse(out, definition(t.detach().cpu().double()), bound)
        grad = torch.randn(t.shape, device=device)
        (found,) = torch.autograd.grad(out, t, grad)
        assert_grad64({"t": found}, definition, {"t": t}, grad, bound)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_angles_of_each_batch_entry(device, form, interleaved):
    t, _ = inputs(form, F32, device)
    shared = RotaryPositionEmbedding(6, interleaved=interleaved).to(device)(SEQUENCE + 2)
    own = torch.cat([shared * (1 + b) for b in range(BATCH)], dim=1)
    out = apply_rotary_pos_emb(t, own, form, interleaved=interleaved)
    batch = 1 if form == "sbhd" else 0
    parts = [
        apply_rotary_pos_emb(one, shared * (1 + b), form, interleaved=interleaved)
        for b, one in enumerate(t.split(1, dim=batch))
    ]
    expected = torch.cat(parts, batch)
    assert_bits(out, expected)
    grad = torch.randn_like(t)
    assert_bits(*(torch.autograd.grad(made, t, grad)[0] for made in (out, expected)))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_gradients_of_angles(device, form, ranks, interleaved, own):
    """The values are the kernel's; the gradients those of the definition."""
    t, cu_seqlens = inputs(form, F32, device, **EVEN, ranks=ranks)
    rank, own = ranks - 1, own and form != "thd"
    freqs = torch.randn(40, BATCH if own else 1, 1, 6, device=device, requires_grad=True)
    starts = None if own else torch.tensor([1, 0, 7], dtype=torch.int32, device=device)
    options = dict(cu_seqlens=cu_seqlens, cp_size=ranks, cp_rank=rank, interleaved=interleaved)
    out = apply_rotary_pos_emb(t, freqs, form, starts, **options)
    at = positions_of(form, starts, **EVEN, ranks=ranks, rank=rank)[..., 0]
    batch = torch.arange(BATCH) if form == "sbhd" else torch.arange(BATCH)[:, None]

    def definition(t, freqs):
        angles = freqs[at, batch] if own else freqs[at, 0]
        return reference.rope(t, angles, interleaved)

    bound = tol("round", F32) + tol("sum", F32, 2)
    kernel = apply_rotary_pos_emb(t, freqs.detach(), form, starts, **options)
    assert_nmse(out, kernel, bound)
    grad = torch.randn_like(t)
    found = dict(zip(("t", "freqs"), torch.autograd.grad(out, (t, freqs), grad), strict=True))
    depth = 4 * BATCH * HEADS  # terms of the sum over all heads of a position
    bound = tol("round", F32) + tol("sum", F32, depth)
    assert_grad64(found, definition, {"t": t, "freqs": freqs}, grad, bound)


def test_gradients_of_angles_pass_padding_on(device):
    """Tokens before the first sequence and behind the last."""
    t = torch.randn(12, HEADS, CHANNELS, device=device, requires_grad=True)
    limits = torch.tensor([2, 5, 9], dtype=torch.int32, device=device)
    freqs = torch.randn(8, 1, 1, CHANNELS, device=device, requires_grad=True)
    out = apply_rotary_pos_emb(t, freqs, "thd", cu_seqlens=limits)
    for rows in (slice(0, 2), slice(9, 12)):
        assert_bits(out[rows], t[rows])
    (found,) = torch.autograd.grad(out[9:].sum() + out[:2].sum(), freqs)
    assert not found.any()


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
    with pytest.raises(ValueError, match=r"expected \[s, 1, 1, d\] or \[s, 3, 1, d\]"):
        apply_rotary_pos_emb(t, freqs.flatten(1))
    with pytest.raises(ValueError, match=r"freqs: shape \(9, 2, 1, 16\), expected"):
        apply_rotary_pos_emb(t, freqs.expand(-1, 2, 1, -1))
    with pytest.raises(ValueError, match="there are no start_positions"):
        starts = torch.zeros(BATCH, device=device, dtype=torch.int32)
        apply_rotary_pos_emb(t, freqs.expand(-1, BATCH, 1, -1), start_positions=starts)
    with pytest.raises(ValueError):
        apply_rotary_pos_emb(t, torch.zeros(SEQUENCE, 1, 1, CHANNELS + 2, device=device))
    with pytest.raises(ValueError, match="cp_size=2: 9 tokens .* expected two chunks"):
        apply_rotary_pos_emb(t, freqs, cp_size=2)
    with pytest.raises(ValueError, match="16 positions, but freqs has 9"):
        apply_rotary_pos_emb(t[:8], freqs, cp_size=2)
    for ranks in ({"cp_size": 0}, {"cp_size": 2, "cp_rank": 2}, {"cp_rank": -1}):
        with pytest.raises(ValueError, match="cp_size=., cp_rank=.*: expected a number of ranks"):
            apply_rotary_pos_emb(t, freqs, **ranks)
