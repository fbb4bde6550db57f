# SPDX-License-Identifier: Apache-2.0
"""Masks, windows and diagonals of DotProductAttention, and what it refuses."""

import pytest
import torch
from comparators import assert_grad64, assert_nmse
from pytorch import attention_model as model
from pytorch.helpers import assert_same_bits
from tols import BF16, F32, tol

from transformer_engine.pytorch.attention import DotProductAttention

OURS = pytest.mark.parametrize("backend", ["native", "unfused"], indirect=True)
BATCH, LENGTH, QUERIES, KEYS, HEADS, CHANNELS = 3, 9, 6, 10, 2, 8
OF_QUERIES, OF_KEYS = (4, 6, 0), (10, 3, 7)  # unpadded tokens


def lengths_mask(lengths, longest, device):
    """[batch, 1, 1, longest] bool, True beyond the length."""
    ends = torch.tensor(lengths, device=device)[:, None, None, None]
    return torch.arange(longest, device=device) >= ends


def cumulative(lengths, device):
    return torch.tensor((0, *lengths)).cumsum(0).to(device, torch.int32)


def dtype_of(device, backend):
    """One that the backend takes on the device."""
    return BF16 if device == "cuda" and backend == "native" else F32


def qkv_of(device, queries=LENGTH, keys=LENGTH, dtype=F32, form="sbhd"):
    sizes = (BATCH, queries, keys, HEADS, HEADS, CHANNELS, CHANNELS)
    return model.make_qkv(form, sizes, dtype, device)


def check(out, qkv, may, form="sbhd"):
    """Output and gradients against the definition with a table of what may be attended."""

    def definition(q, k, v):
        q, k, v = (model.to_bhsd(t, form) for t in (q, k, v))
        return model.joined(model.attention(q, k, v, may), form)

    named = dict(zip("qkv", qkv, strict=True))
    bound = tol("attention", out.dtype, max(may.shape))
    wide = {n: t.detach().cpu().double() for n, t in named.items()}
    assert_nmse(out, definition(**wide), bound)
    grad = torch.randn(out.shape).to(out)
    grads = dict(zip(named, torch.autograd.grad(out, qkv, grad), strict=True))
    # Of scores' gradients p (dp - sum(p dp)) the terms are rounded, and they cancel: wholly where
    # a query sees one key, by any amount where it sees few.
    of_output = grad.cpu().double().unflatten(-1, (HEADS, -1))
    q, k, v, grads_of_heads = (model.to_bhsd(t, form) for t in (*wide.values(), of_output))
    terms = dict(zip("qk", model.gradient_terms(q, k, v, may, grads_of_heads)[:2], strict=True))
    assert_grad64(grads, definition, named, grad, bound, terms)


# ---- padding -------------------------------------------------------------------------------------

PADDING = ("padding", "padding_causal", "padding_causal_bottom_right")
WINDOWS = [
    (mask, window) for mask in PADDING for window in (None, (2, 1) if mask == "padding" else (2, 0))
]


@pytest.mark.parametrize("given", ["mask", "lengths"])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize(("mask", "window"), WINDOWS)
@OURS
def test_padding_of_one_sequence(device, backend, mask, window, form, given):
    lengths = (9, 5, 1)
    padded = lengths_mask(lengths, LENGTH, device)
    qkv = qkv_of(device, form=form, dtype=dtype_of(device, backend))
    module = DotProductAttention(
        HEADS, CHANNELS, qkv_format=form, attn_mask_type=mask, window_size=window
    )
    if given == "mask":
        out = module(*qkv, attention_mask=padded)
    else:
        ends = cumulative(lengths, device)
        out = module(*qkv, cu_seqlens_q=ends, cu_seqlens_kv=ends)
    limits = window or ((-1, 0) if "causal" in mask else (-1, -1))
    both = padded.transpose(2, 3) | padded
    may = model.may_attend((BATCH, HEADS, LENGTH, LENGTH), both, limits)
    check(out, qkv, may, form)


@pytest.mark.parametrize("given", ["masks", "lengths"])
@pytest.mark.parametrize("bottom_right", [None, False])
@pytest.mark.parametrize(("mask", "window"), WINDOWS)
@OURS
def test_padding_of_two_sequences(device, backend, mask, bottom_right, window, given):
    """The diagonal of the bottom right corner is that of each sequence without its padding."""
    masks = lengths_mask(OF_QUERIES, QUERIES, device), lengths_mask(OF_KEYS, KEYS, device)
    qkv = qkv_of(device, QUERIES, KEYS, dtype=dtype_of(device, backend))
    module = DotProductAttention(
        HEADS,
        CHANNELS,
        attn_mask_type=mask,
        window_size=window,
        bottom_right_diagonal=bottom_right,
        attention_type="cross",
    )
    if given == "masks":
        out = module(*qkv, attention_mask=masks)
    else:
        ends = cumulative(OF_QUERIES, device), cumulative(OF_KEYS, device)
        out = module(*qkv, cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1])
    limits = window or ((-1, 0) if "causal" in mask else (-1, -1))
    corner = {"padding": bottom_right is None, "padding_causal": False}.get(mask, True)
    diagonal = torch.tensor(OF_KEYS) - torch.tensor(OF_QUERIES) if corner else 0
    both = masks[0].transpose(2, 3) | masks[1]
    may = model.may_attend((BATCH, HEADS, QUERIES, KEYS), both, limits, diagonal)
    check(out, qkv, may)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("mask", PADDING)
@OURS
def test_masked_queries_are_0_and_get_no_gradient(device, backend, mask, dtype):
    lengths = (9, 4, 0)
    padded = lengths_mask(lengths, LENGTH, device)
    qkv = qkv_of(device, dtype=dtype)
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type=mask, attention_dropout=0.1)
    out = module(*qkv, attention_mask=padded)
    grads = torch.autograd.grad(out, qkv, torch.randn(out.shape).to(out))
    for sample, length in enumerate(lengths):
        for tensor in (out, *grads):
            assert (tensor[length:, sample] == 0).all()
        assert length == 0 or (out[:length, sample] != 0).any()
    assert all(tensor.isfinite().all() for tensor in grads)


@pytest.mark.parametrize("lost", [LENGTH + 1, LENGTH + 1000, -1])
@pytest.mark.parametrize("mask", PADDING)
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@OURS
def test_lengths_that_can_not_be(device, backend, form, mask, lost, repeatable):
    """An error where the host sees them; else NaN in that sequence, and in no other."""
    lengths = [4, lost, 9]
    qkv = qkv_of(device, form=form, dtype=dtype_of(device, backend))
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type=mask, qkv_format=form)
    if device == "cpu" and backend == "native":
        with pytest.raises(ValueError, match=f"query_lengths: .*{lost}"):
            module(*qkv, cu_seqlens_q=cumulative(lengths, device))
        return

    def run(lengths):
        out = module(*qkv, cu_seqlens_q=cumulative(lengths, device))
        grads = torch.autograd.grad(out, qkv, torch.ones_like(out))
        batch_first = (t if form == "bshd" else t.transpose(0, 1) for t in (out, *grads))
        return [tensor.detach() for tensor in batch_first]

    for found, good in zip(run(lengths), run([4, 5, 9]), strict=True):
        assert found[1].isnan().all()
        assert_same_bits(found[::2], good[::2])


@OURS
def test_alibi_counts_from_the_diagonal_of_each_sequence(device, backend):
    masks = lengths_mask(OF_QUERIES, QUERIES, device), lengths_mask(OF_KEYS, KEYS, device)
    qkv = qkv_of(device, QUERIES, KEYS, dtype=dtype_of(device, backend))
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="padding_causal_bottom_right")
    slopes = torch.rand(HEADS, device=device)
    out = module(*qkv, attention_mask=masks, core_attention_bias_type="alibi", alibi_slopes=slopes)
    diagonal = torch.tensor(OF_KEYS) - torch.tensor(OF_QUERIES)
    both = masks[0].transpose(2, 3) | masks[1]
    may = model.may_attend((BATCH, HEADS, QUERIES, KEYS), both, (-1, 0), diagonal)
    far = torch.stack([model.distance(QUERIES, KEYS, int(d)) for d in diagonal])
    bias = -slopes.cpu().double()[:, None, None] * far[:, None]
    wide = (model.to_bhsd(t.detach().cpu().double(), "sbhd") for t in qkv)
    exact = model.joined(model.attention(*wide, may, bias=bias), "sbhd")
    assert_nmse(out, exact, tol("attention", out.dtype, KEYS))


# ---- arbitrary -----------------------------------------------------------------------------------

SHAPES = {
    "full": (BATCH, HEADS, QUERIES, KEYS),
    "b1ss": (BATCH, 1, QUERIES, KEYS),
    "11ss": (1, 1, QUERIES, KEYS),
    "ss": (QUERIES, KEYS),
    "b11s": (BATCH, 1, 1, KEYS),
}


@pytest.mark.parametrize("shape", SHAPES)
@OURS
def test_arbitrary(device, backend, shape):
    mask = torch.rand(SHAPES[shape], device=device) < 1 / 3
    qkv = qkv_of(device, QUERIES, KEYS, dtype=dtype_of(device, backend))
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="arbitrary")
    out = module(*qkv, attention_mask=mask)
    check(out, qkv, model.may_attend((BATCH, HEADS, QUERIES, KEYS), mask))


@OURS
def test_arbitrary_with_window_and_strides(device, backend):
    wide = torch.rand(BATCH, 1, KEYS, 2 * QUERIES, device=device) < 1 / 3
    mask = wide[..., ::2].transpose(2, 3)
    qkv = qkv_of(device, QUERIES, KEYS, dtype=dtype_of(device, backend))
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="arbitrary", window_size=(3, 1))
    for corner in (True, False):
        out = module(*qkv, attention_mask=mask, bottom_right_diagonal=corner)
        diagonal = KEYS - QUERIES if corner else 0
        check(out, qkv, model.may_attend((BATCH, HEADS, QUERIES, KEYS), mask, (3, 1), diagonal))


# ---- causal and windows --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(QUERIES, KEYS), (KEYS, QUERIES), (LENGTH, LENGTH)], ids=str)
@pytest.mark.parametrize("window", [None, (0, 0), (3, 0)], ids=str)
@pytest.mark.parametrize("mask", ["causal", "causal_bottom_right"])
@OURS
def test_causal(device, backend, mask, window, size):
    """With more queries than keys the first ones have nothing to attend: 0."""
    qkv = qkv_of(device, *size, dtype=dtype_of(device, backend))
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type=mask, window_size=window)
    diagonal = size[1] - size[0] if mask == "causal_bottom_right" else 0
    may = model.may_attend((BATCH, HEADS, *size), None, window or (-1, 0), diagonal)
    check(module(*qkv), qkv, may)


@pytest.mark.parametrize("bottom_right", [None, True, False])
@pytest.mark.parametrize("window", [(0, 0), (2, 3), (100, 0)], ids=str)
@OURS
def test_window_without_mask(device, backend, window, bottom_right):
    qkv = qkv_of(device, QUERIES, KEYS, dtype=dtype_of(device, backend))
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="no_mask")
    out = module(*qkv, window_size=window, bottom_right_diagonal=bottom_right)
    diagonal = 0 if bottom_right is False else KEYS - QUERIES
    check(out, qkv, model.may_attend((BATCH, HEADS, QUERIES, KEYS), None, window, diagonal))


def test_arguments_of_a_call_replace_the_defaults(device):
    qkv = qkv_of(device, form="bshd")
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="causal")
    found = module(*qkv, qkv_format="bshd", attn_mask_type="no_mask", window_size=[2, 2])
    expected = DotProductAttention(
        HEADS, CHANNELS, qkv_format="bshd", attn_mask_type="no_mask", window_size=(2, 2)
    )(*qkv)
    assert_same_bits(found, expected)
    assert not torch.equal(module(*qkv, qkv_format="bshd"), found)


@pytest.mark.parametrize(
    "spelling", ["padding,causal", "causal,padding", "padding, causal", "causal_padding"]
)
def test_spellings(device, spelling):
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type=spelling)
    assert module.attn_mask_type == "padding_causal"
    padded = lengths_mask((9, 5, 1), LENGTH, device)
    qkv = qkv_of(device)
    expected = module(*qkv, attention_mask=padded)
    other = DotProductAttention(HEADS, CHANNELS)(
        *qkv, attention_mask=padded, attn_mask_type=spelling
    )
    assert_same_bits(other, expected)


def test_causal_window_without_a_causal_mask_is_none(device):
    qkv = qkv_of(device)
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="no_mask")
    expected = module(*qkv)
    with pytest.warns(UserWarning, match="counts as .-1, -1."):
        assert_same_bits(module(*qkv, window_size=(-1, 0)), expected)


def test_masks_that_the_type_does_not_read_are_ignored(device):
    """What callers pass with every mask type, as they did to the package that this one follows."""
    qkv = qkv_of(device)
    mask = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool, device=device)
    module = DotProductAttention(HEADS, CHANNELS)
    assert_same_bits(module(*qkv, attention_mask=mask), module(*qkv))


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        ("causal", (2, 1)),
        ("causal", (-1, 3)),
        ("no_mask", (2, -1)),
        ("no_mask", (-1, 2)),
        ("padding", (-2, 2)),
        ("no_mask", (1, 2, 3)),
        ("causal", 4),
    ],
)
def test_windows_that_are_refused(device, mask, window):
    with pytest.raises(ValueError, match="window_size"):
        DotProductAttention(HEADS, CHANNELS, attn_mask_type=mask, window_size=window)
    module = DotProductAttention(HEADS, CHANNELS)
    with pytest.raises(ValueError, match="window_size"):
        module(*qkv_of(device), attn_mask_type=mask, window_size=window)


@OURS
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_lengths_of_the_keys_alone(device, backend, mask):
    """Then all queries are there."""
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type=mask)
    qkv = qkv_of(device, QUERIES, KEYS, dtype_of(device, backend))
    of_keys = cumulative((KEYS, 0, 1), device)
    out = module(*qkv, cu_seqlens_kv=of_keys)
    assert module._last_call.backend == backend
    full = cumulative((QUERIES,) * BATCH, device)
    expected = module(*qkv, cu_seqlens_q=full, cu_seqlens_kv=of_keys)
    assert_same_bits(out, expected)
    assert not out[:, 1].any() and out[:, ::2].any(-1).sum() > QUERIES
    grads = (torch.autograd.grad(each, qkv, torch.ones_like(out)) for each in (out, expected))
    for one, other in zip(*grads, strict=True):
        assert_nmse(one, other.double(), tol("attention", out.dtype, KEYS))


FULL = {
    "padding": "no_mask",
    "padding_causal": "causal",
    "padding_causal_bottom_right": "causal_bottom_right",
}
BESIDE = {
    "nothing": {},
    "window": {"window_size": (2, 0)},
    "corner": {"bottom_right_diagonal": False},
    "slopes": {"core_attention_bias_type": "alibi"},
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("keys", [LENGTH, KEYS], ids=["square", "longer"])
@pytest.mark.parametrize("mask", FULL)
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_padding_without_lengths(device, backend, form, mask, keys, beside):
    """All sequences are of full length: the same call as without padding, and that of lengths."""
    given = dict(BESIDE[beside])
    if beside == "window" and mask == "padding":
        given["window_size"] = (2, 1)
    dtype = BF16 if device == "cuda" and backend != "unfused" else F32
    qkv = qkv_of(device, keys=keys, dtype=dtype, form=form)
    module = DotProductAttention(HEADS, CHANNELS, qkv_format=form)
    grad = torch.randn(BATCH, LENGTH, HEADS * CHANNELS).to(device, dtype)
    grad = grad if form == "bshd" else grad.transpose(0, 1)

    def step(**told):
        out = module(*qkv, **told, **given)
        return out, *torch.autograd.grad(out, qkv, grad)

    for _ in range(3):  # the later ones are kept
        ours = step(attn_mask_type=mask)
        ran = module._last_call
        expected = step(attn_mask_type=FULL[mask])
        assert ran == module._last_call
        if backend != "sdpa" or beside == "nothing":
            assert_same_bits(ours[0], expected[0])
    for mine, theirs in zip(ours, expected, strict=True):
        assert_nmse(mine, theirs.double(), tol("attention", dtype, KEYS))
    ends = [cumulative((n,) * BATCH, device) for n in (LENGTH, keys)]
    lengths = step(attn_mask_type=mask, cu_seqlens_q=ends[0], cu_seqlens_kv=ends[1])
    for mine, theirs in zip(ours, lengths, strict=True):
        assert_nmse(mine, theirs.double(), tol("attention", dtype, KEYS))


@pytest.mark.parametrize("mask", FULL)
def test_padding_without_lengths_against_the_definition(device, mask):
    qkv = qkv_of(device, QUERIES, KEYS)
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type=mask)
    limits = (-1, 0) if "causal" in mask else (-1, -1)
    diagonal = KEYS - QUERIES if "bottom" in mask else 0
    may = model.may_attend((BATCH, HEADS, QUERIES, KEYS), None, limits, diagonal)
    check(module(*qkv), qkv, may)


def test_padding_with_lengths_at_some_calls(device):
    """A call is not taken for one of another kind, whichever was kept."""
    qkv = qkv_of(device)
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="padding")
    ends = cumulative((9, 5, 1), device)
    padded = lengths_mask((9, 5, 1), LENGTH, device)
    for told in ({}, {"cu_seqlens_q": ends}, {"attention_mask": padded}, {}) * 4:
        out = module(*qkv, **told)
        assert out[5:, 1].any().item() is (not told)


def test_packed_sequences_have_lengths(device):
    """Nothing says where they end; a decoder's lengths are of the encoder's output alone."""
    q, k, v = (torch.randn(5, HEADS, CHANNELS, device=device) for _ in range(3))
    module = DotProductAttention(HEADS, CHANNELS, qkv_format="thd", attn_mask_type="padding")
    with pytest.raises(ValueError, match="cu_seqlens_q: None, with qkv_format='thd'.*sums of the"):
        module(q, k, v)


def test_mask_errors(device):
    qkv = qkv_of(device)
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="padding")
    padded = lengths_mask((9, 5, 1), LENGTH, device)
    with pytest.raises(TypeError, match="expected a torch.bool tensor"):
        module(*qkv, attention_mask=padded.float())
    with pytest.raises(ValueError, match=r"expected .*\[3, 1, 1, 9\]"):
        module(*qkv, attention_mask=padded[:, 0])
    with pytest.raises(ValueError, match="3 masks"):
        module(*qkv, attention_mask=(padded, padded, padded))
    with pytest.raises(ValueError, match="a pair of masks"):
        module(*qkv_of(device, QUERIES, KEYS), attention_mask=padded)
    with pytest.raises(ValueError, match="cu_seqlens_q: torch.int64"):
        module(*qkv, cu_seqlens_q=cumulative((9, 5, 1), device).long())
    with pytest.raises(ValueError, match="cu_seqlens_kv: None"):
        module(*qkv_of(device, QUERIES, KEYS), cu_seqlens_q=cumulative(OF_QUERIES, device))
    with pytest.raises(TypeError, match="arbitrary"):
        module(*qkv, attn_mask_type="arbitrary")
    with pytest.raises(ValueError, match="can be broadcast"):
        module(*qkv, attn_mask_type="arbitrary", attention_mask=padded[:2])
    with pytest.raises(ValueError, match="attn_mask_type='diagonal', expected one of no_mask"):
        module(*qkv, attn_mask_type="diagonal")


def test_bias_errors(device):
    qkv = qkv_of(device)
    bias = torch.zeros(1, 1, LENGTH, LENGTH, device=device)
    slopes = torch.ones(HEADS, device=device)
    module = DotProductAttention(HEADS, CHANNELS)

    def refuses(match, kind, **arguments):
        with pytest.raises(ValueError, match=match):
            module(*qkv, core_attention_bias_type=kind, **arguments)

    refuses("expected one of no_bias", "relative")
    refuses("needs core_attention_bias", "post_scale_bias")
    refuses("takes no core_attention_bias", "no_bias", core_attention_bias=bias)
    refuses("takes no core_attention_bias", "alibi", core_attention_bias=bias)
    refuses("takes no alibi_slopes", "no_bias", alibi_slopes=slopes)
    refuses("alibi_slopes: shape", "alibi", alibi_slopes=slopes[:1])
    refuses("core_attention_bias: shape", "post_scale_bias", core_attention_bias=bias[..., 1:])
    refuses("core_attention_bias: shape", "pre_scale_bias", core_attention_bias=bias[0])


def test_tensor_errors(device):
    q, k, v = qkv_of(device)
    module = DotProductAttention(HEADS, CHANNELS)
    for wrong in (
        (q[..., :4], k, v),
        (q[:, :, :1], k, v),
        (q, k, v[:4]),
        (q, k[:, :2], v[:, :2]),
        (q[0], k[0], v[0]),
    ):
        with pytest.raises(ValueError, match="expected sbhd with 2 heads of 8"):
            module(*wrong)
    with pytest.raises(TypeError, match="key torch.bfloat16"):
        module(q, k.to(BF16), v)
    with pytest.raises(TypeError, match="torch.float64"):
        module(q.double(), k.double(), v.double())
    with pytest.raises(TypeError, match="expected three tensors"):
        module(q, k)
    with pytest.raises(ValueError, match="qkv_format='sdbh'"):
        module(q, k, v, qkv_format="sdbh")


def test_packed_errors(device):
    q, k, v = qkv_of(device)
    module = DotProductAttention(HEADS, CHANNELS)
    qkv, kv = torch.stack([q, k, v], -3), torch.stack([k, v], -3)
    for arguments in (
        {"query_layer": q, "qkv_layer": qkv},
        {"qkv_layer": qkv, "kv_layer": kv},
        {"kv_layer": kv},
        {"query_layer": q, "key_layer": k, "kv_layer": kv},
        {"qkv_layer": kv},
        {"qkv_layer": qkv, "qkv_interleave_dim": -1},
        {"qkv_layer": torch.empty(LENGTH, BATCH, 3, CHANNELS, HEADS).transpose(-1, -2)},
    ):
        with pytest.raises(ValueError, match="qkv_layer|kv_layer|qkv_interleave_dim"):
            module(**arguments)


def test_constructor_errors():
    for arguments, match in (
        ({"num_gqa_groups": 3}, "must divide"),
        ({"num_gqa_groups": 0}, "num_gqa_groups = 0"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"kv_channels": 0}, "kv_channels = 0"),
        ({"kv_channels": (8, -8)}, "kv_channels = -8"),
        ({"kv_channels": (8,)}, r"kv_channels=\(8,\), expected an int or a pair"),
        ({"window_size": (2.5, 0)}, r"window_size=\(2.5, 0\), expected a pair of ints"),
        ({"window_size": ("2", 0)}, "expected a pair of ints"),
        ({"attention_type": "both"}, "attention_type='both'"),
        ({"layer_number": 0}, "counts from 1"),
        ({"qkv_format": "bhsd"}, "qkv_format='bhsd'"),
        ({"attn_mask_type": "diagonal"}, "attn_mask_type='diagonal'"),
    ):
        sizes = {"num_attention_heads": HEADS, "kv_channels": CHANNELS}
        with pytest.raises(ValueError, match=match):
            DotProductAttention(**{**sizes, **arguments})
