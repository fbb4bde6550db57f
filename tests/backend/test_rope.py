# SPDX-License-Identifier: Apache-2.0
"""rope: strided and packed sequences, partial rotary, pairs and halves, positions, gradients."""

import numpy as np
import pytest
import torch
from attention_reference import rope
from buffers import HIGH, LAYOUTS, Poisoned, laid_out, name_of, normal, op_count
from comparators import assert_bits, assert_grad64, assert_nmse, assert_repeats, assert_within
from refusals import check_refused
from tols import BF16, F32, tol

from transformer_engine import _core

SHAPE = (2, 9, 3, 32)
POSITIONS = 40
FLAGS = pytest.mark.parametrize("interleaved", [False, True])
WAYS = pytest.mark.parametrize("backward", [False, True])


def make_freqs(rng, rotary, positions=POSITIONS, *, paired=False, interleaved=False):
    """Angles [positions, rotary]; paired: both channels of a pair have the same one."""
    angles = torch.from_numpy(rng.uniform(-10, 10, (positions, rotary))).float()
    if paired:
        half = angles[:, : rotary // 2]
        angles = half.repeat_interleave(2, -1) if interleaved else torch.cat([half, half], -1)
    return angles


def reference(x, angles, interleaved, backward):
    """float64 values and their terms; the gradient comes from autograd of the definition."""
    x, angles = x.double(), angles.double()
    if not backward:
        exact = rope(x, angles, interleaved)
    else:
        wide = torch.zeros_like(x, requires_grad=True)
        (exact,) = torch.autograd.grad(rope(wide, angles, interleaved), wide, x)
    rotary = angles.shape[-1]
    sizes = x.abs()
    turned = sizes[..., :rotary]
    if interleaved:
        partner = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = torch.cat([turned[..., rotary // 2 :], turned[..., : rotary // 2]], -1)
    return exact, torch.cat([turned + partner, sizes[..., rotary:]], -1)


def check_dense(rng, device, shape, dtype, *, rotary=None, starts=None, **options):
    """[batch, sequence, heads, dim]; options: layout, in_place, paired and the flags."""
    layout = options.pop("layout", "dense")
    in_place, paired = options.pop("in_place", False), options.pop("paired", False)
    interleaved = options.get("interleaved", False)
    rotary = shape[3] if rotary is None else rotary
    freqs = make_freqs(rng, rotary, paired=paired, interleaved=interleaved)
    x = normal(rng, shape, dtype)
    made = Poisoned(shape, dtype, device, layout=layout)
    placed = made.put(x) if in_place else laid_out(x, layout, device)
    positions = torch.arange(shape[1]).expand(shape[:2])
    if starts is not None:
        positions = positions + starts[:, None]
        options["start_positions"] = starts.int().to(device)
    _core.rope(placed, made.tensor, freqs=freqs.to(device), **options)
    exact, terms = reference(
        x, freqs[positions][:, :, None], interleaved, options.get("backward", False)
    )
    assert_within(made.tensor, exact, terms)
    assert_bits(made.tensor[..., rotary:], x[..., rotary:])
    assert made.untouched()


def positions_of(limits, starts, tokens):
    """Position of every token of a packed tensor; -1 where it belongs to no sequence."""
    positions = torch.full((tokens,), -1)
    for b, (begin, end) in enumerate(zip(limits[:-1], limits[1:], strict=True)):
        positions[begin:end] = torch.arange(end - begin) + (0 if starts is None else starts[b])
    return positions


def check_packed(rng, device, limits, tokens, dtype, *, starts=None, rotary=24, **options):
    """[tokens, heads, dim] with the first token of each sequence and the end of the last."""
    x, freqs = normal(rng, (tokens, 3, 32), dtype), make_freqs(rng, rotary)
    made = Poisoned(x.shape, dtype, device, layout="strided")
    if starts is not None:
        options["start_positions"] = torch.tensor(starts, dtype=torch.int32, device=device)
    cu_seqlens = torch.tensor(limits, dtype=torch.int32, device=device)
    _core.rope(x.to(device), made.tensor, freqs=freqs.to(device), cu_seqlens=cu_seqlens, **options)
    positions = positions_of(limits, starts, tokens)
    inside = positions >= 0
    flags = options.get("interleaved", False), options.get("backward", False)
    exact, terms = reference(x[inside], freqs[positions[inside]][:, None], *flags)
    assert_within(made.tensor[inside.to(device)], exact, terms)
    assert_bits(made.tensor[~inside.to(device)], x[~inside])
    assert made.untouched()


# ---- values --------------------------------------------------------------------------------------


@WAYS
@FLAGS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_layouts(device, dtype, layout, interleaved, backward, rng):
    options = {"interleaved": interleaved, "backward": backward, "layout": layout}
    check_dense(rng, device, SHAPE, dtype, **options)
    check_dense(rng, device, SHAPE, dtype, rotary=20, **options)


@WAYS
@FLAGS
@pytest.mark.parametrize("rotary", [0, 2, 6, 16, 32])
@pytest.mark.parametrize("in_place", [False, True])
def test_partial_rotary(device, in_place, rotary, interleaved, backward, rng):
    options = {"interleaved": interleaved, "backward": backward, "in_place": in_place}
    check_dense(rng, device, SHAPE, BF16, rotary=rotary, **options)


@FLAGS
@pytest.mark.parametrize("dim", [2, 3, 33, 64, 127, 128, 130, 600])
def test_head_sizes(device, dim, interleaved, rng):
    for rotary in {dim // 2 * 2, dim // 4 * 2}:
        for dtype in (F32, BF16):
            options = {"interleaved": interleaved, "paired": rotary > 2}
            check_dense(rng, device, (2, 5, 2, dim), dtype, rotary=rotary, **options)


@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (1, 40, 1, 8), (7, 1, 5, 8), (3, 40, 17, 16)])
def test_shapes(device, shape, rng):
    check_dense(rng, device, shape, BF16)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8), (2, 4, 2, 0)])
def test_empty(device, shape, counters):
    x = torch.empty(shape, device=device)
    _core.rope(
        x, torch.empty_like(x), freqs=torch.zeros(POSITIONS, min(shape[3], 4), device=device)
    )
    assert counters() == {f"op.{device}.rope": 1}


@WAYS
@FLAGS
def test_start_positions(device, interleaved, backward, rng):
    starts = torch.from_numpy(rng.integers(0, POSITIONS - SHAPE[1] + 1, SHAPE[0]))
    options = {"interleaved": interleaved, "backward": backward}
    check_dense(rng, device, SHAPE, F32, starts=starts, **options)
    check_dense(rng, device, SHAPE, F32, starts=torch.full((2,), 31), **options)  # up to the last


def test_large_angles(device, rng):
    """Positions of a long context: cos and sin of the fp32 angle, whatever its size."""
    x, angles = normal(rng, (1, 4, 1, 8), F32), make_freqs(rng, 8, 4) * 2.0**17
    made = torch.empty_like(x).to(device)
    _core.rope(x.to(device), made, freqs=angles.to(device))
    assert_within(made, *reference(x, angles[None, :, None], False, False))


# ---- memory --------------------------------------------------------------------------------------


@FLAGS
def test_other_orders_of_dims(device, interleaved, rng):
    """Sequence first, heads first: strides alone; query, key and value may share one tensor."""
    b, s, h, d = SHAPE
    mixed = normal(rng, (s, b, h, 3 * d), BF16)  # query, key and value of a head side by side
    freqs = make_freqs(rng, d)
    exact, terms = reference(
        mixed[..., d : 2 * d].transpose(0, 1), freqs[None, :s, None], interleaved, False
    )
    key = mixed.to(device)[..., d : 2 * d].transpose(0, 1)
    made = Poisoned((b, h, s, d), BF16, device, layout="strided")
    _core.rope(key, made.tensor.transpose(1, 2), freqs=freqs.to(device), interleaved=interleaved)
    assert_within(made.tensor.transpose(1, 2), exact, terms)
    assert made.untouched()
    memory = mixed.to(device)
    key = memory[..., d : 2 * d].transpose(0, 1)
    _core.rope(key, key, freqs=freqs.to(device), interleaved=interleaved)
    assert_bits(key, made.tensor.transpose(1, 2))
    for part in (slice(0, d), slice(2 * d, 3 * d)):
        assert_bits(memory[..., part], mixed[..., part])


@pytest.mark.parametrize("view", ["expanded", "column step"])
def test_any_view_is_read(device, view, rng):
    b, s, h, d = SHAPE
    x = {
        "expanded": normal(rng, (1, s, 1, d), BF16, device).expand(SHAPE),
        "column step": normal(rng, (b, s, h, 2 * d), BF16, device)[..., ::2],
    }[view]
    freqs, made = make_freqs(rng, d), torch.empty(SHAPE, dtype=BF16, device=device)
    _core.rope(x, made, freqs=freqs.to(device))
    assert_within(made, *reference(x.cpu(), freqs[None, :s, None], False, False))


# ---- packed sequences ----------------------------------------------------------------------------


@WAYS
@FLAGS
@pytest.mark.parametrize("starts", [None, [4, 0, 9, 20]])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_packed(device, dtype, starts, interleaved, backward, rng):
    options = {"starts": starts, "interleaved": interleaved, "backward": backward}
    check_packed(rng, device, [0, 7, 7, 8, 28], 28, dtype, **options)


@pytest.mark.parametrize("limits", [[0, 40], [0, 0], [3, 5, 5, 17], [0, *range(1, 31)], [30, 30]])
def test_packed_with_padding(device, limits, rng):
    """Tokens before the first and after the last sequence are copied."""
    check_packed(rng, device, limits, 40, BF16)


def test_many_packed_sequences(device, rng):
    lengths = rng.integers(0, 6, 200)
    limits = [0, *np.cumsum(lengths).tolist()]
    check_packed(rng, device, limits, limits[-1] + 1, F32)


def test_packed_is_the_dense_one(device, rng):
    b, s, h, d = SHAPE
    x, freqs = normal(rng, SHAPE, F32, device), make_freqs(rng, d).to(device)
    dense, packed = torch.empty_like(x), torch.empty_like(x)
    _core.rope(x, dense, freqs=freqs)
    limits = torch.arange(0, b * s + 1, s, dtype=torch.int32, device=device)
    _core.rope(x.view(b * s, h, d), packed.view(b * s, h, d), freqs=freqs, cu_seqlens=limits)
    assert_bits(packed, dense)


# ---- properties ----------------------------------------------------------------------------------


@FLAGS
def test_gradient_of_the_definition(device, interleaved, rng):
    freqs, x = make_freqs(rng, 24), normal(rng, SHAPE, F32)
    grad, made = normal(rng, SHAPE, F32), torch.empty(SHAPE, device=device)
    _core.rope(
        grad.to(device), made, freqs=freqs.to(device), interleaved=interleaved, backward=True
    )

    def definition(x):
        return rope(x, freqs[: SHAPE[1], None].double(), interleaved)

    bound = tol("round", F32) + tol("sum", F32, 2)
    assert_grad64({"x": made}, definition, {"x": x}, grad, bound)


@FLAGS
def test_backward_turns_back(device, interleaved, rng):
    """With one angle per pair the map is a rotation, and its transpose the inverse."""
    freqs = make_freqs(rng, 32, paired=True, interleaved=interleaved).to(device)
    x = normal(rng, SHAPE, F32, device)
    there, back = torch.empty_like(x), torch.empty_like(x)
    _core.rope(x, there, freqs=freqs, interleaved=interleaved)
    _core.rope(there, back, freqs=freqs, interleaved=interleaved, backward=True)
    ones = torch.zeros(POSITIONS, 32)
    assert_within(back, x.double(), reference(x.cpu(), ones[None, :9, None], interleaved, False)[1])


def test_position_zero_of_zero_angles_copies(device, rng):
    x = normal(rng, SHAPE, BF16, device)
    made = torch.empty_like(x)
    _core.rope(x, made, freqs=torch.zeros(POSITIONS, 32, device=device))
    assert torch.equal(made, x)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_special_numbers_stay_in_their_pair(device, special, rng):
    x, freqs = normal(rng, SHAPE, F32), make_freqs(rng, 32)
    clean, made = torch.empty(SHAPE, device=device), torch.empty(SHAPE, device=device)
    _core.rope(x.to(device), clean, freqs=freqs.to(device))
    x[1, 2, 0, 5] = special
    _core.rope(x.to(device), made, freqs=freqs.to(device))
    spoilt = torch.zeros(SHAPE, dtype=torch.bool)
    spoilt[1, 2, 0, [5, 21]] = True
    assert not made.cpu()[spoilt].isfinite().any()
    assert_bits(made.cpu()[~spoilt], clean.cpu()[~spoilt])


def test_twice_the_same(device, rng):
    x, freqs = normal(rng, (4, 40, 12, 64), BF16, device), make_freqs(rng, 64).to(device)

    def run():
        made = torch.empty_like(x)
        _core.rope(x, made, freqs=freqs)
        return [made]

    assert_repeats(run)


# ---- refusals ------------------------------------------------------------------------------------

X = torch.zeros(2, 6, 3, 8)
FREQS = torch.zeros(6, 8)
LIMITS = torch.tensor([0, 2, 6], dtype=torch.int32)
WRONG = {
    "three dims": (ValueError, r"input: ndim = 3, expected 4", {"input": X[0]}),
    "packed with four": (ValueError, r"input: ndim = 4, expected 3", {"cu_seqlens": LIMITS}),
    "integer input": (TypeError, r"input: dtype i32", {"input": X.int()}),
    "other output dtype": (
        TypeError,
        r"output: dtype bf16, expected f32",
        {"output": X.bfloat16()},
    ),
    "other output shape": (ValueError, r"output: dim 1: size 5", {"output": X[:, :5].clone()}),
    "bf16 angles": (TypeError, r"freqs: dtype bf16, expected f32", {"freqs": FREQS.bfloat16()}),
    "odd angles": (
        ValueError,
        r"freqs: 7 rotary channels, expected an even",
        {"freqs": FREQS[:, :7]},
    ),
    "wide angles": (
        ValueError,
        r"freqs: 10 rotary channels, .* at most 8",
        {"freqs": torch.zeros(6, 10)},
    ),
    "few positions": (
        ValueError,
        r"freqs: 5 positions, expected at least the 6",
        {"freqs": FREQS[:5]},
    ),
    "int64 limits": (
        TypeError,
        r"cu_seqlens: dtype i64, expected i32",
        {"input": X[0], "output": X[0].clone(), "cu_seqlens": LIMITS.long()},
    ),
    "no limits": (
        ValueError,
        r"cu_seqlens: length 1, expected a vector of batch",
        {"input": X[0], "output": X[0].clone(), "cu_seqlens": LIMITS[:1]},
    ),
    "few starts": (ValueError, r"start_positions: .*length 1", {"start_positions": LIMITS[:1]}),
    "int64 starts": (
        TypeError,
        r"start_positions: dtype i64",
        {"start_positions": LIMITS[:2].long()},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    output = Poisoned(X.shape, F32, device)
    good = {"input": X, "output": output.tensor, "freqs": FREQS}
    check_refused("rope", device, WRONG[case], good, output)


BEYOND = {
    "start": {"start_positions": torch.tensor([0, 1], dtype=torch.int32)},
    "negative start": {"start_positions": torch.tensor([-1, 0], dtype=torch.int32)},
    "long sequence": {"cu_seqlens": LIMITS, "freqs": FREQS[:3]},
    "limits that fall": {"cu_seqlens": torch.tensor([0, 4, 2], dtype=torch.int32)},
    "limits beyond the tokens": {"cu_seqlens": torch.tensor([0, 2, 7], dtype=torch.int32)},
    "negative limit": {"cu_seqlens": torch.tensor([-1, 2, 6], dtype=torch.int32)},
}


@pytest.mark.parametrize("case", BEYOND)
def test_cpu_checks_positions(case):
    """On a GPU they are in device memory, which a launch does not read."""
    changes = dict(BEYOND[case])
    if "cu_seqlens" in changes:
        changes |= {"input": X[0], "output": X[0].clone()}
    named = "cu_seqlens: sequence" if "limit" in case else "batch entry"
    good = {"input": X, "output": X.clone(), "freqs": FREQS}
    check_refused("rope", "cpu", (ValueError, named, changes), good)


def test_counted_once(device, counters, rng):
    x = normal(rng, SHAPE, F32, device)
    _core.rope(x, x, freqs=make_freqs(rng, 32).to(device))
    assert counters() == {f"op.{device}.rope": 1} and op_count(device, "rope") == 1


@pytest.mark.gpu
@FLAGS
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_cuda_close_to_cpu(dtype, interleaved, rng):
    x, freqs = normal(rng, (4, 40, 12, 64), dtype), make_freqs(rng, 64)
    made = [torch.empty_like(x, device=device) for device in ("cpu", "cuda")]
    for out in made:
        _core.rope(x.to(out.device), out, freqs=freqs.to(out.device), interleaved=interleaved)
    assert_nmse(made[1], made[0], 2 * tol("round", dtype) + tol("sum", F32, 2))


@pytest.mark.gpu
def test_cuda_gives_nan_for_positions_beyond_freqs(rng):
    x, freqs = normal(rng, SHAPE, F32, "cuda"), make_freqs(rng, 24).to("cuda")
    starts = torch.tensor([POSITIONS - 4, -3], dtype=torch.int32, device="cuda")
    made = torch.empty_like(x)
    _core.rope(x, made, freqs=freqs, start_positions=starts)
    lacking = torch.zeros(SHAPE, dtype=torch.bool)
    lacking[0, 4:, :, :24] = lacking[1, :3, :, :24] = True
    assert torch.equal(made.isnan().cpu(), lacking)
