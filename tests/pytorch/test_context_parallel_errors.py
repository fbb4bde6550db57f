# SPDX-License-Identifier: Apache-2.0
"""What attention over ranks does not run is refused on all ranks, and no rank waits for another."""

import pytest
import torch
from pytorch import context_parallel_programs as programs

from transformer_engine.common.recipe import DelayedScaling

OPTIONS = {"num_attention_heads": 4, "kv_channels": 8, "qkv_format": "sbhd"}
FP8 = {**OPTIONS, "kv_channels": 16}
SHAPE = (8, 2, 4, 8)
LENGTHS = torch.tensor([0, 8, 16], dtype=torch.int32)
EVERY = ("p2p", "all_gather", "a2a")

REFUSED = {
    "padding": ({}, {"attn_mask_type": "padding", "cu_seqlens_q": LENGTHS}, EVERY),
    "corner": ({"attn_mask_type": "causal_bottom_right"}, {}, EVERY),
    "arbitrary": (
        {}, {"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(1, 1, 8, 8) > 0}, EVERY
    ),
    "alibi": ({}, {"core_attention_bias_type": "alibi"}, EVERY),
    "pre_scale": (
        {}, {"core_attention_bias_type": "pre_scale_bias",
             "core_attention_bias": torch.zeros(1, 4, 8, 16)}, EVERY,
    ),
    "window": ({"window_size": (4, 0)}, {}, ("p2p",)),
    "mixed": ({}, {"qkv_format": "sbhd_2bshd"}, EVERY),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name, (*_, ways) in REFUSED.items() for way in ways]
)
def test_refusals(ranks, name, way):
    if ranks.size == 1:
        pytest.skip("one rank runs all")
    options, call, _ = REFUSED[name]
    call = {k: v.to(ranks.device) if torch.is_tensor(v) else v for k, v in call.items()}
    for kind, text in ranks.run(
        programs.said, way, {**OPTIONS, **options}, call, [[SHAPE] * 3] * 2
    ):
        assert kind == "NotImplementedError"
        assert f"with cp_comm_type={way!r} over several ranks is not there yet" in text


@pytest.mark.parametrize("apart", [False, True])
def test_gathered_codes_of_scales_of_a_rank_alone(ranks, apart):
    """Keys of all ranks are read with one scale."""
    if ranks.size == 1:
        pytest.skip("one rank has one scale")
    made = DelayedScaling(fp8_dpa=True, reduce_amax=apart)
    call = [[(16, 2, 4, 16)] * 3] * 2
    for found in ranks.run(programs.said, "all_gather", FP8, {}, call, made, apart):
        kind, text = found
        assert kind == "NotImplementedError" and "whose amaxes are not those of all ranks" in text


def test_sizes(ranks):
    if ranks.size == 1:
        pytest.skip("one rank has all tokens")
    odd = (7, 2, 4, 8)
    for kind, text in ranks.run(programs.said, "p2p", OPTIONS, {}, [[odd] * 3] * 2):
        assert (kind, "7 tokens on one of 2 ranks, expected two chunks" in text) == (
            "ValueError", True,
        )  # fmt: skip
    options, few = {**OPTIONS, "num_attention_heads": 3}, (8, 2, 3, 8)
    for kind, text in ranks.run(programs.said, "a2a", options, {}, [[few] * 3] * 2):
        assert (kind, "3 heads, which 2 ranks do not divide" in text) == ("ValueError", True)


def test_lengths_that_are_no_chunks(ranks):
    """The host reads them in the first call of its kind; all ranks raise."""
    if ranks.size == 1:
        pytest.skip("one rank has whole sequences")
    options, packed = {**OPTIONS, "qkv_format": "thd"}, (8, 4, 8)
    for lengths, wrong in (([0, 8, 16], None), ([0, 6, 16], 6)):
        given = torch.tensor(lengths, dtype=torch.int32, device=ranks.device)
        call = {"cu_seqlens_q": given, "max_seqlen_q": 16, "max_seqlen_kv": 16}
        for said in ranks.run(programs.said, "p2p", options, call, [[packed] * 3] * 2):
            if wrong is None:
                assert said is None
            else:
                assert said[0] == "ValueError" and f"sequence of {wrong} tokens" in said[1]


def test_ranks_that_differ(ranks):
    """In shapes, in the way, or where one of them refuses its call: an error on each, no hang."""
    if ranks.size == 1:
        pytest.skip("one rank agrees with itself")
    longer = (16, 2, 4, 8)
    shapes = [[SHAPE] * 3, [longer] * 3]
    for kind, text in ranks.run(programs.said, "p2p", OPTIONS, {}, shapes):
        assert kind == "ValueError"
        assert "do not make the same call: rank 0: " in text and str(longer) in text
    for kind, text in ranks.run(programs.said, ["p2p", "a2a"], OPTIONS, {}, [[SHAPE] * 3] * 2):
        assert kind == "ValueError" and "cp_comm_type='a2a'" in text
    shapes = [[SHAPE] * 3, [(7, 2, 4, 8)] * 3]
    found = ranks.run(programs.said, "p2p", OPTIONS, {}, shapes)
    assert [kind for kind, _ in found] == ["ValueError"] * 2


def test_ranks_that_differ_later(ranks):
    """In calls of kinds that are known: compared with TE_CHECK_RANKS; lengths are read again."""
    if ranks.size == 1:
        pytest.skip("one rank agrees with itself")
    causal, whole = ({"attn_mask_type": kind} for kind in ("causal", "no_mask"))
    calls = [causal, whole, whole]
    for text in ranks.run(programs.said_later, OPTIONS, calls, SHAPE, True):
        assert "do not make the same call: rank 0: " in text
        assert "mask 'no_mask'" in text and "mask 'causal'" in text
    packed = {"max_seqlen_q": 16, "max_seqlen_kv": 16}
    good, bad = (
        {**packed, "cu_seqlens_q": torch.tensor(starts, dtype=torch.int32)}
        for starts in ([0, 8, 16], [0, 6, 16])
    )
    options = {**OPTIONS, "qkv_format": "thd"}
    for calls, refused in (([good, good], False), ([good, bad], True)):
        found = ranks.run(programs.said_later, options, calls, (8, 4, 8), True)
        assert [text is not None for text in found] == [refused] * ranks.size
        assert not refused or all("refused" in text for text in found)
