# SPDX-License-Identifier: Apache-2.0
"""Keys and values in another format than the queries, and names of layouts."""

import pytest
import torch
from comparators import assert_nmse
from pytorch.helpers import assert_same_bits
from tols import BF16, tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    AttentionParams,
    get_attention_backend,
)
from transformer_engine.pytorch.attention.problem import LAYOUTS, layout_parts

HEADS, GROUPS, CHANNELS, BATCH, KEYS = 4, 2, 16, 4, 13
QUERY_LENGTHS, KEY_LENGTHS = [3, 0, 7, 1], [13, 5, 0, 9]


def cumulative(lengths, device):
    sums = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    sums[1:] = torch.tensor(lengths).cumsum(0)
    return sums.to(device)


def keys_of(device):
    """Keys and values [b, s, groups, channels]."""
    like = {"device": device, "dtype": BF16}
    return [torch.randn(BATCH, KEYS, GROUPS, CHANNELS, **like) for _ in range(2)]


def leaves(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("mask", ["no_mask", "causal_bottom_right"])
@pytest.mark.parametrize("form", ["sbhd_2bshd", "bshd_2sbhd"])
@pytest.mark.parametrize("joined", [False, True])
def test_turned_keys(device, form, mask, joined, repeatable):
    """The bits of one format, and gradients in the formats given."""
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type=mask)
    lead = (7, BATCH) if form.startswith("sbhd") else (BATCH, 7)
    query = torch.randn(*lead, HEADS, CHANNELS, device=device, dtype=BF16)
    keys = [t if form.endswith("bshd") else t.transpose(0, 1).contiguous() for t in keys_of(device)]
    one = leaves(query, *(t.transpose(0, 1).contiguous() for t in keys))
    expected = module(*one, qkv_format=form[:4])
    grad = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, one, grad)
    if joined:
        two = leaves(query, torch.stack(keys, -3))
        out = module(two[0], kv_layer=two[1], qkv_format=form)
    else:
        two = leaves(query, *keys)
        out = module(*two, qkv_format=form)
    assert_same_bits(out.detach(), expected.detach())
    found = torch.autograd.grad(out, two, grad)
    of_keys = found[1].unbind(-3) if joined else found[1:]
    for x, y in zip((found[0], *of_keys), (grads[0], *(g.transpose(0, 1) for g in grads[1:])),
                    strict=True):  # fmt: skip
        assert_same_bits(x, y.contiguous())


@pytest.mark.parametrize("backend", ["native", "unfused"], indirect=True)
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("form", ["thd_2bshd", "thd_2sbhd"])
@pytest.mark.parametrize("whole", [False, True])
def test_packed_queries_to_padded_keys(device, backend, form, mask, whole):
    """The results of the padded batch, of keys of their own lengths or of all keys."""
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type=mask)
    longest = max(QUERY_LENGTHS)
    rows = torch.randn(BATCH, longest, HEADS, CHANNELS, device=device, dtype=BF16)
    is_token = torch.arange(longest) < torch.tensor(QUERY_LENGTHS)[:, None]
    keys, sums = keys_of(device), cumulative(QUERY_LENGTHS, device)
    of_keys = None if whole else cumulative(KEY_LENGTHS, device)
    padded = leaves(rows, *keys)
    all_keys = cumulative([KEYS] * BATCH, device) if whole else of_keys
    expected = module(*padded, qkv_format="bshd", cu_seqlens_q=sums, cu_seqlens_kv=all_keys)
    grad = torch.randn_like(expected)
    exact = torch.autograd.grad(expected, padded, grad)
    turned = [t.transpose(0, 1).contiguous() if form == "thd_2sbhd" else t for t in keys]
    packed = leaves(rows[is_token], *turned)
    given = {"cu_seqlens_q": sums, "cu_seqlens_kv": of_keys, "max_seqlen_q": longest}
    out = module(*packed, qkv_format=form, **given)
    bound = 2 * tol("attention", BF16, KEYS * longest)
    assert out.shape == (sum(QUERY_LENGTHS), HEADS * CHANNELS)
    assert_nmse(out, expected[is_token], bound)
    found = torch.autograd.grad(out, packed, grad[is_token])
    wanted = [exact[0][is_token]]
    wanted += [t.transpose(0, 1) if form == "thd_2sbhd" else t for t in exact[1:]]
    if device == "cpu":  # elsewhere: that packed sequences with gaps have their gradients
        for x, y in zip(found, wanted, strict=True):
            assert_same_bits(x, y.contiguous())


def test_in_fp8(device):
    """The casts read the tensors wherever they lie."""
    module = DotProductAttention(HEADS, 64, GROUPS, attn_mask_type="no_mask")
    query = torch.randn(7, BATCH, HEADS, 64, device=device, dtype=BF16)
    keys = [torch.randn(BATCH, KEYS, GROUPS, 64, device=device, dtype=BF16) for _ in range(2)]
    with torch.no_grad(), te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        out = module(query, *keys, qkv_format="sbhd_2bshd")
        expected = module(query, *(t.transpose(0, 1) for t in keys))
    assert_same_bits(out, expected)


def test_what_a_format_does_not_go_with(device):
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="padding")
    key, value = keys_of(device)
    query = torch.randn(11, HEADS, CHANNELS, device=device, dtype=BF16)
    sums = cumulative([5, 6], device)
    with pytest.raises(ValueError, match="cu_seqlens_q of 2 sequences, and keys of 4"):
        module(query, key, value, qkv_format="thd_2bshd", cu_seqlens_q=sums)
    with pytest.raises(ValueError, match="expected thd_2bshd"):
        module(query, key[0], value[0], qkv_format="thd_2bshd", cu_seqlens_q=sums)
    with pytest.raises(ValueError, match="which has one format"):
        module(qkv_layer=torch.zeros(5, 2, 3, HEADS, CHANNELS), qkv_format="sbhd_2bshd")
    with pytest.raises(ValueError, match="qkv_format='bshd_2thd', expected"):
        module(query, key, value, qkv_format="bshd_2thd")
    with pytest.raises(ValueError, match="qkv_format='thd_2bshd', expected"):
        DotProductAttention(HEADS, CHANNELS, qkv_format="thd_2bshd")
    cache = te.InferenceParams(4, 32, GROUPS, CHANNELS, BF16)
    with pytest.raises(ValueError, match="new keys have the format of the queries"):
        module(query, key, value, qkv_format="thd_2bshd", inference_params=cache)


def test_explained_and_splits(device):
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="no_mask")
    shapes = (7, BATCH, HEADS, CHANNELS), *[(BATCH, KEYS, GROUPS, CHANNELS)] * 2
    found = te.explain_attention(module, *shapes, device=device, qkv_format="sbhd_2bshd")
    assert found.backend == "native"
    for splits in (None, 0, 4):
        given = {"qkv_format": "sbhd_2bshd", "num_splits": splits, "device": device}
        assert te.explain_attention(module, *shapes, **given) == found


def test_splits_change_nothing(device):
    """They are a control of kernels that are not here."""
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="no_mask")
    tensors = [torch.randn(9, 2, n, CHANNELS).to(device, BF16) for n in (HEADS, GROUPS, GROUPS)]
    expected = module(*tensors)
    for splits in (None, 0, 3):
        assert_same_bits(module(*tensors, num_splits=splits), expected)
    for splits in (-1, 1.5, "2"):
        with pytest.raises(ValueError, match="num_splits="):
            module(*tensors, num_splits=splits)


# ---- layouts -------------------------------------------------------------------------------------


def test_names_of_layouts():
    one = {n: p for n, p in LAYOUTS.items() if p[0] == p[1] and not n.startswith("paged")}
    assert len(one) == 15
    assert layout_parts("sbh3d") == layout_parts("sbhd_sb2hd") == ("sbhd", "sbhd")
    assert layout_parts("t3hd") == ("thd", "thd")
    assert layout_parts("thd_bshd_bshd") == ("thd", "bshd")
    assert layout_parts("paged_kv_sbhd_bshd_bshd") == ("sbhd", "bshd")
    with pytest.raises(ValueError, match="qkv_layout='bhsd'"):
        layout_parts("bhsd")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_get_attention_backend_knows_them(layout):
    mask = "padding" if layout_parts(layout)[0] == "thd" else "no_mask"
    found = get_attention_backend(AttentionParams(qkv_layout=layout, attn_mask_type=mask))
    assert found[2:5] == (True, 1, False)
