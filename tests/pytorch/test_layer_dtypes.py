# SPDX-License-Identifier: Apache-2.0
"""Layers of several dtypes, as large models keep the residual and the norms in fp32: one call."""

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits
from pytorch.layer_ways import (
    DROPS,
    FUSED,
    HEADS,
    LENGTH,
    SOURCE,
    assert_modules,
    assert_ways_agree,
    assert_whole,
    make_attention,
    make_layer,
    states,
)
from thinning import pairs
from tols import BF16, F16, F32

import transformer_engine.pytorch as te

LAYERS = {
    "plain": {},
    "rms": {"normalization": "RMSNorm", "activation": "swiglu"},
    "dropped": DROPS,
    "no bias": {"bias": False},
    "no bias, dropped": {"bias": False, **DROPS},
    "decoder": {"layer_type": "decoder", **DROPS},
    "post norm": {"apply_residual_connection_post_layernorm": True, **DROPS},
    "parallel": {"parallel_attention_mlp": True, **FUSED},
    "groups": {"num_gqa_groups": 2, "qk_norm_type": "RMSNorm", **FUSED},
}


def with_norms_in(layer, dtype):
    """Its norms of tokens in a dtype."""
    for name, parameter in layer.named_parameters():
        if "layer_norm" in name or name.startswith("layernorm."):
            parameter.data = parameter.data.to(dtype)
    return layer


def given_to(layer, stream, weights):
    """Hidden states of a residual stream; what is attended to comes in the dtype of weights."""
    given = {"hidden_states": states(layer, dtype=stream)}
    if getattr(layer, "layer_type", None) == "decoder":
        given["encoder_output"] = states(layer, SOURCE, dtype=weights)
    return given


# Dtypes of norms are fields of their nodes; a recipe is of the products.
@pairs(kind=LAYERS, recipe=[None, "delayed", "current"], norms=[F32, BF16])
def test_a_residual_in_fp32(device, kind, recipe, norms):
    """Each way gives the bits of the modules, with the residual and its gradient in fp32."""
    layer = with_norms_in(make_layer(device, BF16, **LAYERS[kind]), norms)
    found = assert_ways_agree(layer, given_to(layer, F32, BF16), recipe=recipe)
    behind = BF16 if kind == "post norm" else F32
    out = found[0]["outputs"][0]
    assert out.dtype is behind
    assert behind is BF16 or not torch.equal(out.to(BF16).float(), out)  # nothing has rounded it
    assert found[0]["inputs"]["hidden_states"].dtype is F32
    assert all(grad is None or grad.isfinite().all() for grad in found[0]["inputs"].values())


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("kind", LAYERS)
def test_norms_in_fp32(device, kind, recipe):
    layer = with_norms_in(make_layer(device, BF16, **LAYERS[kind]), F32)
    assert_ways_agree(layer, given_to(layer, BF16, BF16), recipe=recipe)


@pytest.mark.parametrize("how", ["packed", "lengths", "turned", "kept weight", "quantized"])
def test_a_residual_in_fp32_beside_others(device, how):
    """What else a call may come with: the same way, to the same bits."""
    options, given, recipe = {}, {}, None
    sums = torch.tensor([0, 5, 2 * LENGTH], dtype=torch.int32, device=device)
    if how == "packed":
        options = {"attn_input_format": "thd", "self_attn_mask_type": "padding_causal"}
        given = {"cu_seqlens_q": sums, "max_seqlen_q": 7}
    elif how == "lengths":
        options = {"self_attn_mask_type": "padding"}
        given = {"cu_seqlens_q": sums.clamp(max=LENGTH + 4)}
    elif how == "turned":
        given = {"rotary_pos_emb": te.RotaryPositionEmbedding(8).to(device)(LENGTH)}
    else:
        recipe = "current"
        given = {"is_first_microbatch": True} if how == "kept weight" else {}
    made_as = te.quantized_model_init(how == "quantized", recipe=RECIPES["current"]())
    with made_as:
        layer = make_layer(device, BF16, **FUSED, **options)
    given["hidden_states"] = states(layer, dtype=F32)
    assert_ways_agree(with_norms_in(layer, F32), given, recipe=recipe)


def test_the_norm_of_the_output_in_fp32(device):
    """It stands behind the one call, and before its input there is none."""
    layer = with_norms_in(make_layer(device, BF16, output_layernorm=True), F32)
    found = assert_ways_agree(layer, given_to(layer, BF16, BF16))
    assert found[0]["outputs"][0].dtype is F32
    with pytest.raises(TypeError, match="hidden_states is torch.float32, weight"):
        layer(states(layer, dtype=F32))


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("wide", ["attention", "mlp"])
def test_branches_of_several_dtypes(device, wide, recipe):
    """The stream goes to fp32 at the first sum that has such a term; each branch has its own."""
    layer = make_layer(device, BF16, **DROPS)
    branches = {"attention": layer.self_attention, "mlp": layer.layernorm_mlp}
    branches[wide].float()
    one_call = device == "cpu" or wide == "mlp"  # cuDNN attends in 16 bits
    found = assert_ways_agree(layer, given_to(layer, BF16, BF16), recipe=recipe, whole=one_call)
    assert found[0]["outputs"][0].dtype is F32
    assert found[0]["inputs"]["hidden_states"].dtype is BF16


def test_two_16_bit_dtypes(device):
    """Their sum is in fp32."""
    layer = make_layer(device, BF16, bias=False)
    found = assert_ways_agree(layer, given_to(layer, F16, BF16), recipe="current")
    assert found[0]["outputs"][0].dtype is F32
    assert found[0]["inputs"]["hidden_states"].dtype is F16


@pytest.mark.parametrize("normed", [False, True])
def test_attention_behind_a_norm(device, normed):
    layer = make_attention(
        device, BF16, input_layernorm=True, return_layernorm_output=normed, return_bias=True
    )
    found = assert_ways_agree(layer, given_to(layer, F32, BF16))
    assert all(out.dtype is BF16 for out in found[0]["outputs"])


def test_bounds_of_what_runs_as_one(device):
    """Norms of heads in another dtype than these: the modules are called, to no error."""
    layer = make_layer(device, BF16, **LAYERS["groups"])
    for norm in (layer.self_attention.q_norm, layer.self_attention.k_norm):
        norm.float()
    x = states(layer, dtype=F32)
    first = assert_modules(layer, hidden_states=x)
    assert_same_bits(assert_modules(layer, hidden_states=x), first)


def test_a_residual_that_changes_its_dtype(device):
    """A call of one dtype is not taken for another, nor are weights that are cast in between."""
    layer = make_layer(device, BF16)
    values = torch.randn(LENGTH, 2, layer.hidden_size, device=device)
    expected = {}
    for _ in range(3):
        for stream in (F32, BF16):
            out = assert_whole(layer, hidden_states=values.to(stream))
            assert out.dtype is stream
            assert_same_bits(expected.setdefault(stream, out), out)
    if device == "cpu":  # a GPU asks for TF32 at each call in fp32
        layer.float()
        assert assert_whole(layer, hidden_states=values).dtype is F32
        layer.bfloat16()
        assert_same_bits(assert_whole(layer, hidden_states=values), expected[F32])


@pytest.mark.parametrize("dtype", [F32, F16])
def test_without_a_norm_dtypes_are_one(device, dtype):
    """As of a linear layer, under the name that the program has for the tensor.

    `torch.autocast` converts it.
    """
    layer = te.MultiheadAttention(32, HEADS, params_dtype=BF16, device=device)
    refused = f"{dtype}, weight torch.bfloat16.*outside torch.autocast"
    for _ in range(3):
        with pytest.raises(TypeError, match=f"hidden_states is {refused}"):
            layer(states(layer, dtype=dtype))
    crossed = make_layer(device, BF16, layer_type="decoder")
    source = states(crossed, SOURCE, dtype=dtype)
    for x in (states(crossed, dtype=dtype), states(crossed, dtype=BF16)):
        with pytest.raises(TypeError, match=f"encoder_output is {refused}"):
            crossed(x, encoder_output=source)
    with torch.autocast(device, dtype=BF16):
        found = crossed(x, encoder_output=source)
        assert_same_bits(found, crossed(x, encoder_output=source.to(BF16)))
