# SPDX-License-Identifier: Apache-2.0
"""Copies between layouts of `transformer_engine_torch`, and those of context parallelism."""

import pytest
import torch
from buffers import normal
from comparators import assert_bits
from tex_cases import Operators, assert_near
from tols import BF16, F16, F32

native = Operators("default.native")


# ---- layouts ---------------------------------------------------------------------------------


def test_taking_projections_apart(rng, device):
    whole = normal(rng, (5, 2, 3, 3 * 8), BF16, device)
    q, k, v = whole.split(8, -1)
    made = native.fa_prepare_fwd(q)
    assert_bits(made, torch.stack([t.transpose(0, 1) for t in (q, k, v)]).contiguous())
    assert_bits(native.fa_prepare_bwd(*made), whole)
    with pytest.raises(ValueError, match="fa_prepare_fwd: qkvi"):
        native.fa_prepare_fwd(q.contiguous())
    with pytest.raises(ValueError, match="fa_prepare_bwd: q, k, v"):
        native.fa_prepare_bwd(made[0], made[1][:1], made[2])
    swapped = torch.empty(2, 5, 3, 24, dtype=BF16, device=device)
    native.swap_first_dims(whole, out=swapped)
    assert_bits(swapped, whole.transpose(0, 1).contiguous())
    with pytest.raises(ValueError, match="swap_first_dims: out"):
        native.swap_first_dims(whole, out=whole)


def test_packing(rng, device):
    lengths, room = (3, 0, 5), 6
    cu = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device)
    packed = normal(rng, (10, 2, 4), F16, device)  # two tokens of no sequence
    padded = native.convert_thd_to_bshd(packed, cu, 3, room)
    expected = torch.zeros(3, room, 2, 4, dtype=F16, device=device)
    for i, n in enumerate(lengths):
        expected[i, :n] = packed[int(cu[i]) : int(cu[i]) + n]
    assert_bits(padded, expected)
    again = native.convert_bshd_to_thd(padded, cu, 10)
    assert_bits(again[:8], packed[:8])
    assert not again[8:].any()


def test_rows_of_groups(rng, device):
    x = normal(rng, (9, 4), BF16, device)
    rows, room = [2, 0, 7], [4, 4, 8]
    out = torch.full((16, 4), torch.nan, dtype=BF16, device=device)
    native.fused_multi_row_padding(x, out, rows, room)
    zeros = x.new_zeros(16, 4)
    zeros[:2], zeros[8:15] = x[:2], x[2:]
    assert_bits(out, zeros)
    back = torch.empty_like(x)
    native.fused_multi_row_unpadding(out, back, room, rows)
    assert_bits(back, x)
    with pytest.raises(ValueError, match="fused_multi_row_padding: groups"):
        native.fused_multi_row_padding(x, out, rows, [1, 7, 8])
    with pytest.raises(ValueError, match="output of 16 rows"):
        native.fused_multi_row_padding(x, out, rows, [4, 4, 9])


# ---- context parallelism ---------------------------------------------------------------------

SEQUENCES = (4, 8, 2)


def halves():
    """Tokens of the first and of the second halves."""
    first, second, start = [], [], 0
    for n in SEQUENCES:
        first += range(start, start + n // 2)
        second += range(start + n // 2, start + n)
        start += n
    return first, second


def cu_of(device):
    return torch.tensor([0, 4, 12, 14], dtype=torch.int32, device=device)


@pytest.mark.parametrize("shape", [(14, 2, 4), (2, 14, 2, 4)])
def test_halves(rng, device, shape):
    x, cu = normal(rng, shape, BF16, device), cu_of(device)
    for half, tokens in enumerate(halves()):
        expected = x[tokens] if len(shape) == 3 else x[:, tokens]
        assert_bits(native.thd_read_half_tensor(x, cu, half), expected)
    with pytest.raises(ValueError, match="half_idx=2"):
        native.thd_read_half_tensor(x, cu, 2)


def unpacked(lse, lengths):
    """[sequences, heads, longest] of [heads, tokens]."""
    made = lse.new_full((len(lengths), lse.shape[0], max(lengths)), 9.0)
    start = 0
    for i, n in enumerate(lengths):
        made[i, :, :n] = lse[:, start : start + n]
        start += n
    return made


@pytest.mark.parametrize("packed", [False, True])
def test_sums_of_second_halves(rng, device, packed):
    cu, (_, second) = cu_of(device), halves()
    lse = normal(rng, (3, 14), F32, device)
    short = [n // 2 for n in SEQUENCES]
    given = lse if packed else unpacked(lse, SEQUENCES)
    found = native.thd_read_second_half_lse(given, cu, packed, 7 if packed else 4)
    expected = lse[:, second]
    if not packed:
        for i, n in enumerate(short):
            start = sum(short[:i])
            assert_bits(found[i, :, :n], expected[:, start : start + n])
            assert not found[i, :, n:].any()
    else:
        assert_bits(found, expected)
    step = normal(rng, (3, 7), F32, device)
    wide = lse.double()
    wide[:, second] = torch.logaddexp(wide[:, second], step.double())
    of_step = step if packed else unpacked(step, short)
    native.thd_second_half_lse_correction(given, of_step, cu, packed)
    if packed:
        assert_near(given, wide)
    else:
        for i, n in enumerate(SEQUENCES):
            start = int(cu[i])
            assert_near(given[i, :, :n], wide[:, start : start + n])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_corrected_outputs(rng, device, packed, alone):
    cu, (_, second) = cu_of(device), halves()
    tokens = second if alone else list(range(14))
    out, step = (
        normal(rng, (14, 3, 4), BF16, device),
        normal(rng, (len(tokens), 3, 4), BF16, device),
    )
    lse, lse_step = normal(rng, (3, 14), F32, device), normal(rng, (3, len(tokens)), F32, device)
    expected = out.double()
    weights = (lse_step.double() - lse.double()[:, tokens]).exp().t()
    expected[tokens] += step.double() * weights[..., None]
    lengths = [n // 2 for n in SEQUENCES] if alone else SEQUENCES
    given = (lse, lse_step) if packed else (unpacked(lse, SEQUENCES), unpacked(lse_step, lengths))
    native.thd_out_correction(out, step, *given, cu, alone, packed)
    assert_near(out, expected)


@pytest.mark.parametrize("shape", [(14, 2, 4), (2, 14, 2, 4)])
@pytest.mark.parametrize("words", [
    ("add", "add"), ("copy", "add"), ("add", "copy"), ("none", "add"), ("add", "none"),
    ("none", "copy"), ("copy", "none"),
])  # fmt: skip
def test_corrected_gradients(rng, device, shape, words):
    cu, dim = cu_of(device), len(shape) - 3
    grad = normal(rng, shape, BF16, device)
    alone = "none" in words
    count = 7 if alone else 14
    step = normal(rng, shape[:dim] + (count,) + shape[dim + 1 :], BF16, device)
    expected = grad.double()
    for tokens, word in zip(halves(), words, strict=True):
        if word == "none":
            continue
        at = (slice(None),) * dim + (tokens,)
        new = step.double() if alone else step.double()[at]
        expected[at] = new + (expected[at] if word == "add" else 0)
    native.thd_grad_correction(grad, step, cu, *words)
    assert_near(grad, expected)
    with pytest.raises(ValueError, match="thd_grad_correction: first_half"):
        native.thd_grad_correction(grad, step, cu, "none", "none")
