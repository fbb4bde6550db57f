# SPDX-License-Identifier: Apache-2.0
"""Norms of queries and keys, and interleaved groups of heads, as nodes of a layer's plans."""

import pytest
import torch
from pytorch.attention_model import randomise
from pytorch.layer_ways import (
    ATTENTION,
    DROPS,
    FUSED,
    HEADS,
    HIDDEN,
    RECIPE_NAMES,
    assert_counts,
    assert_modules,
    assert_same_error,
    assert_ways_agree,
    assert_whole,
    both_ways,
    dtype_of,
    gradients,
    inputs_of,
    make_attention,
    make_layer,
    set_of,
    states,
)
from thinning import pairs

import transformer_engine.pytorch as te

NORMS = ["L2Normalization", "RMSNorm", "LayerNorm"]
CHANNELS = HIDDEN // HEADS
PROJECTIONS = {
    "apart": {},
    "fused": FUSED,
    "groups, interleaved": {"num_gqa_groups": 2, **FUSED},
    "one group, interleaved": {"num_gqa_groups": 1, **FUSED},
    "groups, in turn": {"num_gqa_groups": 2, "qkv_weight_interleaved": False, **FUSED},
    "two channels": {"kv_channels": (8, 16), "num_gqa_groups": 2, **FUSED},
    "cross": {"attention_type": "cross", "num_gqa_groups": 2, **FUSED},
}
WHERE = pytest.mark.parametrize("first", [False, True], ids=["after", "before"])


def angles(device, rotated=CHANNELS, length=12, pairs=False):
    return te.RotaryPositionEmbedding(rotated, interleaved=pairs).to(device)(length)


# ---- both ways -----------------------------------------------------------------------------------


@pytest.mark.parametrize("turned", [False, True], ids=["", "rope"])
@WHERE
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_norms_of_queries_and_keys(device, projection, norm, first, turned):
    layer = make_attention(
        device, dtype_of(device), qk_norm_type=norm, qk_norm_before_rope=first, qk_norm_eps=1e-3,
        **PROJECTIONS[projection],
    )  # fmt: skip
    given = inputs_of(layer)
    if turned:
        given["rotary_pos_emb"] = angles(device, rotated=4), angles(device)
    assert_ways_agree(layer, given)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("turned", [0, 4, CHANNELS])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_interleaved_groups(device, form, turned, pairs):
    """Without angles the query heads of a group are copied, else turned where they lie."""
    layer = make_attention(
        device, dtype_of(device), qkv_format=form, rotary_pos_interleaved=pairs, num_gqa_groups=2,
        **FUSED,
    )  # fmt: skip
    given = inputs_of(layer)
    if turned:
        given["rotary_pos_emb"] = angles(device, turned, pairs=pairs)
    assert_ways_agree(layer, given)


# Norms of heads lie between products, of which a recipe is.
@pairs(kind=["encoder", "decoder"], norm=[None, *NORMS], recipe=RECIPE_NAMES)
def test_layers(device, kind, norm, recipe):
    layer = make_layer(
        device, dtype_of(device, recipe), layer_type=kind, qk_norm_type=norm, num_gqa_groups=2,
        **FUSED, **DROPS,
    )  # fmt: skip
    assert_ways_agree(layer, inputs_of(layer), recipe=recipe)


@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm"])
def test_only_the_norms_learn(device, norm):
    """The projections need no gradients, what lies behind the norms does."""
    layer = make_attention(device, dtype_of(device), qk_norm_type=norm)
    layer.requires_grad_(False)
    layer.k_norm.requires_grad_()
    given = inputs_of(layer, hidden_states=states(layer).detach())
    results = assert_ways_agree(layer, given)
    assert results[0]["parameters"]["k_norm.weight"].any()
    layer.k_norm.requires_grad_(False)
    layer.q_norm.weight.requires_grad_()
    assert_ways_agree(layer, given)


def test_no_gradients(device):
    layer = make_attention(device, dtype_of(device), qk_norm_type="LayerNorm", **FUSED)

    def run(layer):
        with torch.no_grad():
            return layer(**inputs)

    inputs = inputs_of(layer)
    both_ways(layer, run, kind=ATTENTION)


@WHERE
@pytest.mark.parametrize("norm", [None, "RMSNorm"])
@pytest.mark.parametrize("options", [FUSED, {"num_gqa_groups": 2, **FUSED}], ids=["", "groups"])
def test_packed_sequences(device, options, norm, first):
    layer = make_attention(
        device, dtype_of(device), qkv_format="thd", attn_mask_type="padding_causal",
        qk_norm_type=norm, qk_norm_before_rope=first, **options,
    )  # fmt: skip
    limits = torch.tensor([0, 3, 3, 12], dtype=torch.int32, device=device)
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), limits)
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), 9)
    assert_ways_agree(layer, inputs_of(layer, **lengths, **longest))
    assert_ways_agree(layer, inputs_of(layer, **lengths, **longest, rotary_pos_emb=angles(device)))


# ---- what a plan does not save or copy -----------------------------------------------------------


def test_operators_of_a_step(device, counters):
    """Heads are normalized and turned where they lie, and their gradients: turned once for both."""
    layer = make_attention(device, dtype_of(device), qk_norm_type="RMSNorm", **FUSED)
    given = inputs_of(layer, rotary_pos_emb=angles(device))
    out = assert_whole(layer, **given)
    out.sum().backward()
    ops = {n.rsplit(".", 1)[1]: v for n, v in counters().items() if n.startswith(f"op.{device}.")}
    assert {n: ops[n] for n in ("norm", "norm_backward", "rope")} == {
        "norm": 2,
        "norm_backward": 2,
        "rope": 2,  # of queries and keys together
    }
    assert not {"cast", "dropout_add"} & set(ops)


# ---- changes between calls -----------------------------------------------------------------------

CHANGES = {
    "eps": set_of("q_norm.eps", 0.5),
    "no eps": set_of("k_norm.eps", 1e-2),
    "zero-centred": set_of("q_norm.zero_centered_gamma", True),
    "order": set_of("qk_norm_before_rope", True),
    "other weight": lambda layer: setattr(
        layer.k_norm, "weight", torch.nn.Parameter(layer.k_norm.weight.detach() * 2)
    ),
    "frozen": lambda layer: layer.q_norm.weight.requires_grad_(False),
    "other norm": lambda layer: setattr(layer, "q_norm", other_norm(layer)),
}


def other_norm(layer):
    weight = layer.q_norm.weight
    norm = te.LayerNorm(CHANNELS, device=weight.device, params_dtype=weight.dtype)
    randomise(norm)
    return norm


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_counts(device, change):
    layer = make_attention(device, dtype_of(device), qk_norm_type="RMSNorm")
    given = inputs_of(layer, rotary_pos_emb=angles(device))
    assert_counts(layer, CHANGES[change], True, given=given)


def test_without_norms_again(device):
    layer = make_attention(device, dtype_of(device), qk_norm_type="RMSNorm")

    def remove(layer):
        layer.q_norm = layer.k_norm = None

    assert_counts(layer, remove, True, given=inputs_of(layer))


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_a_hook_on_a_norm_asks_for_the_module(device, name):
    layer = make_attention(device, dtype_of(device), qk_norm_type="LayerNorm")
    seen = []

    def hook(layer):
        return getattr(layer, name).register_forward_hook(lambda *_: seen.append(name))

    assert_counts(layer, hook, False, given=inputs_of(layer))
    assert seen


def test_a_norm_of_another_class_is_called(device):
    layer = make_attention(device, dtype_of(device), qk_norm_type="RMSNorm")
    layer.q_norm = torch.nn.RMSNorm(CHANNELS, device=device, dtype=dtype_of(device))
    x = states(layer)
    out = assert_modules(layer, hidden_states=x)
    assert all(g is not None for g in gradients(layer, x, out))


def test_heads_of_many_channels_call_the_modules(device):
    dtype = dtype_of(device)
    layer = te.MultiheadAttention(
        288, 1, qk_norm_type="RMSNorm", attention_dropout=0.0, device=device, params_dtype=dtype
    )
    x = torch.randn(6, 2, 288, device=device, dtype=dtype, requires_grad=True)
    assert_modules(layer, hidden_states=x).sum().backward()
    assert x.grad.isfinite().all()


# ---- errors --------------------------------------------------------------------------------------


def test_a_norm_of_another_size(device):
    layer = make_attention(device, dtype_of(device), qk_norm_type="RMSNorm")
    good = layer.q_norm
    wrong = te.RMSNorm(CHANNELS + 2, device=device, params_dtype=dtype_of(device))

    def call():
        layer.q_norm = wrong
        try:
            layer(**inputs_of(layer))
        finally:
            layer.q_norm = good

    assert "RMSNorm: inp" in assert_same_error(layer, call)
