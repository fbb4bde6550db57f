# SPDX-License-Identifier: Apache-2.0
"""Layers of packed sequences: as one call, by branches and by modules, with the same bits."""

import pytest
import torch
from comparators import assert_nmse
from pytorch.layer_ways import (
    DROPS,
    FUSED,
    HEADS,
    HIDDEN,
    RECIPE_NAMES,
    assert_modules,
    assert_ways_agree,
    assert_whole,
    dtype_of,
    make_attention,
    make_layer,
    states,
)
from tols import F32, tol
from torch.utils.flop_counter import FlopCounterMode

import transformer_engine.pytorch as te
from transformer_engine import _core

TOKENS, LONGEST = 32, 20
OPTIONS = {
    "plain": {},
    "one weight": FUSED,
    "groups": {"num_gqa_groups": 2},
    "groups in one weight": {**FUSED, "num_gqa_groups": 2},
    "norms of heads": {**FUSED, "qk_norm_type": "RMSNorm"},
    "window": {**FUSED, "window_size": (4, 0)},
    "sinks": {**FUSED, "softmax_type": "learnable"},
    "dropout": {**DROPS, "drop_path_rate": 0.0},
}


def told(device, *lengths, starts=None, side="q"):
    """What a call is told of its sequences."""
    sums = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    given = {f"cu_seqlens_{side}": sums, f"max_seqlen_{side}": LONGEST}
    if starts is not None:
        offsets = torch.tensor(starts, dtype=torch.int32, device=device)
        given[f"cu_seqlens_{side}_padded"] = offsets
    return given


def make(device, recipe, **options):
    return make_layer(
        device, dtype_of(device, recipe), attn_input_format="thd",
        self_attn_mask_type="padding_causal", **options,
    )  # fmt: skip


def call_of(layer, device, *, gaps=False, rotary=False):
    given = {"hidden_states": states(layer, TOKENS // 2, 2)}
    given |= told(device, 11, 0, 20, starts=(0, 11, 11, 32) if gaps else None)
    if not gaps:
        given |= told(device, 12, 0, 20)
    if rotary:
        angles = te.attention.RotaryPositionEmbedding(HIDDEN // HEADS)(LONGEST + 1)
        given["rotary_pos_emb"] = angles.to(device)
    return given


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("options", OPTIONS)
def test_ways_agree(device, options, recipe):
    layer = make(device, recipe, **OPTIONS[options])
    assert_ways_agree(layer, call_of(layer, device), recipe=recipe)


@pytest.mark.parametrize("bias", ["no_bias", "alibi"])
@pytest.mark.parametrize(
    "options", ["one weight", "groups in one weight", "norms of heads", "sinks"]
)
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
def test_gaps_and_rotary_positions(device, gaps, rotary, options, bias):
    layer = make(device, None, **OPTIONS[options])
    given = call_of(layer, device, gaps=gaps, rotary=rotary)
    assert_ways_agree(layer, given | {"core_attention_bias_type": bias})


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_attention_to_another_sequence(device, recipe):
    """Whose tokens are others, and have lengths of their own."""
    layer = make_attention(
        device, dtype_of(device, recipe), qkv_format="thd", attention_type="cross",
        attn_mask_type="padding",
    )  # fmt: skip
    given = {"hidden_states": states(layer, TOKENS // 2, 2)}
    given["encoder_output"] = states(layer, 24, 2)
    given |= told(device, 12, 0, 20) | told(device, 20, 8, 20, side="kv")
    assert_ways_agree(layer, given, recipe=recipe)


def decoder_call(layer, device, gaps=False):
    """Of tokens, and an encoder's output of others, with lengths of its own."""
    given = {"hidden_states": states(layer, TOKENS // 2, 2)}
    given["encoder_output"] = states(layer, 24, 2)
    if gaps:
        given |= told(device, 11, 0, 18, starts=(0, 12, 12, 32))
        return given | told(device, 17, 8, 20, side="kv", starts=(0, 20, 28, 48))
    return given | told(device, 12, 0, 20) | told(device, 20, 8, 20, side="kv")


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("mask", ["padding", "no_mask", "padding_causal_bottom_right"])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_decoders(device, recipe, mask, gaps):
    layer = make(device, recipe, layer_type="decoder", enc_dec_attn_mask_type=mask)
    assert_ways_agree(layer, decoder_call(layer, device, gaps), recipe=recipe)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("form", ["thd", "sbhd"])
def test_decoders_see_each_sequence_alone(device, form, gaps):
    """Packed, or padded with lengths in place of masks: as each sequence in a batch of its own."""
    options = {"layer_type": "decoder", "enc_dec_attn_mask_type": "padding"}
    layer = make_layer(
        device, F32, attn_input_format=form, self_attn_mask_type="padding_causal", **options
    )
    alone = make_layer(device, F32, self_attn_mask_type="causal", layer_type="decoder")
    alone.load_state_dict(layer.state_dict())
    given = decoder_call(layer, device, gaps)
    slices = {}
    for side in ("q", "kv"):
        sums = given[f"cu_seqlens_{side}"]
        starts = given.get(f"cu_seqlens_{side}_padded", sums)[:-1].tolist()
        counts = sums.diff().tolist()
        slices[side] = [slice(i, i + n) for i, n in zip(starts, counts, strict=True)]
    parts = list(zip(slices["q"], slices["kv"], strict=True))
    names = "hidden_states", "encoder_output"
    hidden, source = (given[name].reshape(-1, HIDDEN) for name in names)
    if form == "thd":
        found = layer(**given)
        rows = [found[of_queries] for of_queries, _ in parts]
    else:
        lengths = {name: given[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
        padded = torch.nn.utils.rnn.pad_sequence
        batch = padded([hidden[q] for q, _ in parts])
        found = layer(batch, encoder_output=padded([source[k] for _, k in parts]), **lengths)
        rows = [found[: q.stop - q.start, b] for b, (q, _) in enumerate(parts)]
    for mine, (q, k) in zip(rows, parts, strict=True):
        if mine.numel() > 0:
            exact = alone(hidden[q].unsqueeze(1), encoder_output=source[k].unsqueeze(1))
            assert_nmse(mine, exact.squeeze(1).double(), tol("layer", F32, HIDDEN * TOKENS))


def test_paths_that_are_dropped(device):
    """A sample is a token then, as where modules are called."""
    layer = make(device, None, drop_path_rate=0.5)
    assert_ways_agree(layer, call_of(layer, device), whole=False)


def test_another_number_of_sequences_is_another_call(device):
    layer = make(device, None)
    x = states(layer, TOKENS // 2, 2)
    for lengths in ((12, 20), (10, 2, 20), (20, 12), (1, 0, 0)):
        given = told(device, *lengths)
        ours = assert_whole(layer, hidden_states=x, **given)
        with layer.layernorm_mlp.register_forward_hook(lambda *_: None):
            theirs = assert_modules(layer, hidden_states=x, **given)
        assert torch.equal(ours, theirs)


def test_errors(device):
    layer = make(device, None)
    x = states(layer, TOKENS // 2, 2)
    good = told(device, 12, 20)
    for changes in (
        {"cu_seqlens_q": None},
        {"cu_seqlens_q": good["cu_seqlens_q"].long()},
        {"cu_seqlens_q_padded": good["cu_seqlens_q"][:-1]},
        {"self_attn_mask_type": "arbitrary"},
    ):
        with pytest.raises(ValueError, match="cu_seqlens_q|mask_type"):
            layer(x, **good | changes)
    assert_whole(layer, hidden_states=x, **good)


def test_flops_are_those_of_the_modules(device):
    layer = make(device, None)
    given = call_of(layer, device)
    counts = []
    for way in (assert_whole, assert_modules):
        hooks = [layer.layernorm_mlp.register_forward_hook(lambda *_: None)]
        if way is assert_whole:
            hooks.pop().remove()
        with FlopCounterMode(display=False) as counter:
            layer(**given)
        counts.append(counter.get_total_flops())
        for hook in hooks:
            hook.remove()
    assert counts[0] == counts[1] > 0


def test_bounds_and_numbers_of_sequences_make_no_plans(device):
    layer = make(device, None)
    x = states(layer, TOKENS // 2, 2)
    counts = []
    for more, lengths in enumerate([(11, 0, 20)] * 3 + [(16, 16), (20, 12), (8, 8, 8, 8), (3, 20)]):
        given = told(device, *lengths)
        given["max_seqlen_q"] += more
        layer(x, **given).sum().backward()
        counts.append(_core.plan_count())
    assert len(set(counts[2:])) == 1
