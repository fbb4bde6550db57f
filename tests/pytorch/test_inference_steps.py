# SPDX-License-Identifier: Apache-2.0
"""`InferenceParams` between the host and the device: replays, pages, single tokens."""

from collections import OrderedDict

import pytest
import torch
from comparators import assert_bits, assert_nmse
from device_kinds import every_device
from tols import F32, tol

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention import inference

pytestmark = every_device

ROWS, LONGEST, HEADS, GROUPS, CHANNELS, PAGE = 3, 24, 4, 2, 16, 4
PAGED = pytest.mark.parametrize("paged", [False, True])


def make_params(device, paged, **options):
    if paged:
        options["page_size"] = PAGE
    sizes = ROWS, LONGEST, GROUPS, CHANNELS, F32
    return te.InferenceParams(*sizes, is_paged=paged, device=device, **options)


def make_core(**options):
    options = {"attn_mask_type": "padding_causal", "layer_number": 1, **options}
    return te.DotProductAttention(HEADS, CHANNELS, GROUPS, qkv_format="bshd", **options).eval()


def make_tensors(device, batch, count):
    """Queries, keys and values of so many tokens of each sequence."""
    return [torch.randn(batch, count, n, CHANNELS, device=device) for n in (HEADS, GROUPS, GROUPS)]


def replay(params, count=1):
    """What a captured `pre_step` does on the device at each replay."""
    params._state.advance(count)


@PAGED
def test_the_host_looks_after_every_row_of_replays(device, paged):
    """A graph may be replayed long after its capture, between steps of the host."""
    params = make_params(device, paged)
    params.pre_step(OrderedDict(a=3, b=1))
    params.reserve()
    params._advance(OrderedDict(a=1, b=1))  # a capture runs nothing: this is its first replay
    replay(params)
    params.pre_step(OrderedDict(a=2, b=2))
    assert params.sequences == {"a": 7, "b": 5}
    replay(params)
    replay(params)
    params.pre_step(OrderedDict(a=1, b=0))
    assert params.sequences == {"a": 10, "b": 7}
    assert params.get_seqlens_pre_step().tolist() == [9, 7]
    params.reset()
    params.pre_step(OrderedDict(c=2))
    params.reserve()
    replay(params)
    params.pre_step(OrderedDict(c=1))
    assert params.sequences == {"c": 4}


def test_replays_without_pages_are_seen(device):
    params = make_params(device, True)
    params.pre_step(OrderedDict(a=3))
    params.reserve()
    params._advance(OrderedDict(a=1))
    params.reset()
    params.pre_step(OrderedDict(a=PAGE))
    replay(params)
    for _ in range(2):  # not only at first
        with pytest.raises(RuntimeError, match=f"gave sequence 'a' {PAGE + 1} tokens, .*reserve()"):
            params.pre_step(OrderedDict(a=1))
    params.reset()
    params.pre_step(OrderedDict(a=1))


def test_a_manager_of_the_program_with_pages(device):
    """Its table is the one that its steps return."""
    usual = make_params(device, True)

    class Own(inference.KVCacheManager):
        def __init__(self, **sizes):
            super().__init__()
            self.inner = inference.PagedKVCacheManager(**sizes, device=device)
            self.cache = self.inner.cache
            self.allocate_memory, self.pre_step = self.inner.allocate_memory, self.inner.pre_step
            self.step, self.reset = self.inner.step, self.inner.reset

    own, core = make_params(device, True, custom_cache_manager=Own), make_core()
    for count in (5, 1):
        new = make_tensors(device, 2, count)
        found = []
        for params in (own, usual):
            params.pre_step(OrderedDict(a=count, b=count))
            with torch.no_grad():
                found.append(core(*new, inference_params=params))
        assert_bits(*found)


@pytest.mark.parametrize("corner", [None, False, True])
def test_alibi_of_single_tokens(device, corner):
    """A causal type says where its diagonal ends, whatever the caller does."""
    params, core = make_params(device, False), make_core(bottom_right_diagonal=corner)
    tensors = make_tensors(device, 1, 5)
    alibi = {"core_attention_bias_type": "alibi"}
    with torch.no_grad():
        whole_ = core(*tensors, attn_mask_type="causal", **alibi)
        for i in range(5):
            params.pre_step(OrderedDict(a=1))
            out = core(*(t[:, i : i + 1] for t in tensors), inference_params=params, **alibi)
            assert_nmse(out[:, 0], whole_[:, i].double(), tol("attention", F32, LONGEST))


@PAGED
def test_capped_scores_of_single_tokens(device, paged):
    """What the whole sequence gives at once."""
    params, core = make_params(device, paged), make_core(softcap=0.5)
    tensors = make_tensors(device, 1, 5)
    with torch.no_grad():
        whole_ = core(*tensors, attn_mask_type="causal")
        for i in range(5):
            params.pre_step(OrderedDict(a=1))
            out = core(*(t[:, i : i + 1] for t in tensors), inference_params=params)
            assert_nmse(out[:, 0], whole_[:, i].double(), tol("attention", F32, LONGEST))


# ---- rotary positions ----------------------------------------------------------------------------


def make_layer(device, form="bshd"):
    return te.MultiheadAttention(
        64, HEADS, num_gqa_groups=GROUPS, attn_mask_type="padding_causal", layer_number=1,
        qkv_format=form, params_dtype=F32, device=device,
    ).eval()  # fmt: skip


@PAGED
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_full_sequence_that_gets_nothing(device, form, paged, count):
    """What pads it is behind all positions that there are angles for."""
    layer, params = make_layer(device, form), make_params(device, paged)
    angles = te.RotaryPositionEmbedding(CHANNELS)(LONGEST).to(device)
    all_ = torch.randn(LONGEST + count, 64, device=device)  # those of b behind those of a
    found = []
    for step in (OrderedDict(a=LONGEST), OrderedDict(a=0, b=count)):
        params.pre_step(step)
        rows, all_ = all_[: sum(step.values())], all_[sum(step.values()) :]
        if form != "thd":
            tokens = rows.new_zeros(len(step), len(rows), 64)
            tokens[-1] = rows
            rows = tokens if form == "bshd" else tokens.transpose(0, 1)
        with torch.no_grad():
            out = layer(rows, inference_params=params, rotary_pos_emb=angles)
        found.append((rows, out))
    rows, out = found[1]
    mine = {"thd": slice(None), "sbhd": (slice(None), 1), "bshd": 1}[form]
    layer.qkv_format = layer.core_attention.qkv_format = "bshd"
    with torch.no_grad():
        exact = layer(rows[mine][None], attn_mask_type="causal", rotary_pos_emb=angles)
    assert_nmse(out[mine], exact[0].double(), tol("layer", F32, 64))


def test_angles_that_a_cache_lacks_are_not_made_up(device):
    layer, params = make_layer(device), make_params(device, False)
    angles = te.RotaryPositionEmbedding(CHANNELS)(8).to(device)
    params.pre_step(OrderedDict(a=12))
    tokens = torch.randn(1, 12, 64, device=device)
    with torch.no_grad(), pytest.raises(ValueError, match="12 positions, but freqs has 8"):
        layer(tokens, inference_params=params, rotary_pos_emb=angles)
