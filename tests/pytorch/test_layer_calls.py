# SPDX-License-Identifier: Apache-2.0
"""A layer as one call gives the bits of its modules, with every option.

`assert_ways_agree` compares outputs, all gradients, scaling state and random states over steps, and
asserts which way ran. On a GPU a layer with masks, biases or windows calls its modules: torch's
attention, which runs inside a call there, takes none of them.
"""

import itertools

import pytest
import torch
from pytorch.layer_ways import (
    BATCH,
    DROPS,
    FUSED,
    HEADS,
    LENGTH,
    RECIPE_NAMES,
    SOURCE,
    assert_modules,
    assert_ways_agree,
    dtype_of,
    inputs_of,
    make_attention,
    make_layer,
    states,
)
from thinning import pairs
from tols import BF16, F16, F32

import transformer_engine.pytorch as te

APART = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
BOTH_ATTENTIONS = {
    "fused": FUSED,
    "fused, apart": APART,
    "groups": {"num_gqa_groups": 2},
    "groups, apart": {"num_gqa_groups": 2, **APART},
    "one group": {"num_gqa_groups": 1},
    "channels": {"kv_channels": 16},
    "two channels": {"kv_channels": (16, 8)},
    "two channels, fused": {"kv_channels": (16, 8), **FUSED},
    "two channels, apart": {"kv_channels": (8, 16), "num_gqa_groups": 2, **APART},
    "no bias": {"bias": False},
    "attention dropout": {"attention_dropout": 0.3},
}
LAYERS = {
    "plain": {},
    **BOTH_ATTENTIONS,
    "bshd": {"attn_input_format": "bshd"},
    "bshd, dropped": {"attn_input_format": "bshd", **DROPS, **FUSED},
    "rmsnorm": {"normalization": "RMSNorm", "layernorm_epsilon": 0.01},
    "rmsnorm, zero-centred": {"normalization": "RMSNorm", "zero_centered_gamma": True},
    "zero-centred": {"zero_centered_gamma": True},
    "hidden dropout": {"hidden_dropout": 0.3},
    "hidden dropout, no bias": {"hidden_dropout": 0.3, "bias": False},
    "drop path": {"drop_path_rate": 0.5},
    "dropped": DROPS,
    "parallel": {"parallel_attention_mlp": True},
    "parallel, dropped": {"parallel_attention_mlp": True, **DROPS},
    "parallel, no bias": {"parallel_attention_mlp": True, "bias": False, **FUSED},
    "post-residual": {"apply_residual_connection_post_layernorm": True},
    "post-residual, dropped": {"apply_residual_connection_post_layernorm": True, **DROPS},
    "output norm": {"output_layernorm": True},
    "output rmsnorm": {"output_layernorm": True, "normalization": "RMSNorm", **DROPS},
    "both norms": {"output_layernorm": True, "apply_residual_connection_post_layernorm": True},
    "no mask": {"self_attn_mask_type": "no_mask"},
    "modes": {"set_parallel_mode": True, "layer_number": 3, "name": "first"},
}
DECODERS = {
    "plain": {},
    **BOTH_ATTENTIONS,
    "groups, fused": {
        "num_gqa_groups": 1,
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
    },
    "bshd": {"attn_input_format": "bshd", **FUSED},
    "dropped": DROPS,
    "post-residual": {"apply_residual_connection_post_layernorm": True, **DROPS},
    "output norm": {"output_layernorm": True},
    "rmsnorm": {"normalization": "RMSNorm", "zero_centered_gamma": True, "bias": False},
}
ATTENTIONS = {
    "plain": {},
    **BOTH_ATTENTIONS,
    "bshd": {"qkv_format": "bshd"},
    "norm": {"input_layernorm": True},
    "rmsnorm": {"input_layernorm": True, "normalization": "RMSNorm", "zero_centered_gamma": True},
    "returned bias": {"return_bias": True},
    "returned bias, none": {"return_bias": True, "bias": False},
    "returned norm": {"input_layernorm": True, "return_layernorm_output": True},
    "both returned": {
        "input_layernorm": True,
        "return_layernorm_output": True,
        "return_bias": True,
        **FUSED,
    },
    "no mask": {"attn_mask_type": "no_mask"},
}


# ---- how layers are made -------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("options", LAYERS)
def test_encoders(device, options, recipe):
    layer = make_layer(device, dtype_of(device, recipe), **LAYERS[options])
    assert_ways_agree(layer, inputs_of(layer), recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("options", DECODERS)
def test_decoders(device, options, recipe):
    options = {**DECODERS[options], "layer_type": "decoder"}
    layer = make_layer(device, dtype_of(device, recipe), **options)
    assert_ways_agree(layer, inputs_of(layer), recipe=recipe)


# A recipe is of the products, an option of what lies between them.
@pairs(options=ATTENTIONS, kind=["self", "cross"], recipe=RECIPE_NAMES)
def test_attention(device, options, kind, recipe):
    options = {**ATTENTIONS[options], "attention_type": kind}
    layer = make_attention(device, dtype_of(device, recipe), **options)
    assert_ways_agree(layer, inputs_of(layer), recipe=recipe)


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "geglu", "relu", "reglu", "srelu", "sreglu",
                                        "qgelu", "qgeglu", "silu", "swiglu", "glu"])  # fmt: skip
def test_activations(device, activation, returned):
    """With the bias of the second layer in its GEMM, and in the addition."""
    drops = DROPS if returned else {}
    layer = make_layer(device, dtype_of(device), activation=activation, **drops)
    assert_ways_agree(layer, inputs_of(layer))


@pytest.mark.parametrize("recipe", [*RECIPE_NAMES, "delayed-e4m3", "current-power2"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
def test_dtypes_and_recipes(device, layer_type, dtype, recipe):
    layer = make_layer(device, dtype, layer_type=layer_type, **DROPS)
    attends = device == "cpu" or dtype is not F32  # in a plan
    assert_ways_agree(layer, inputs_of(layer), recipe=recipe, whole=attends)


@pytest.mark.parametrize("name", ["hidden_dropout", "attention_dropout", "drop_path_rate"])
def test_everything_is_dropped(device, name):
    layer = make_layer(device, dtype_of(device), **{name: 1.0})
    assert_ways_agree(layer, inputs_of(layer))


# ---- what is attended ----------------------------------------------------------------------------


def ends(device, lengths, longest):
    """Padding mask [batch, 1, 1, longest]: True from the end of each sequence on."""
    of = torch.tensor(lengths, device=device)[:, None, None, None]
    return torch.arange(longest, device=device) >= of


def sums(device, *lengths):
    """Cumulative lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def randoms(*shape, wants=True, dtype=F32):
    def make(device):
        return torch.randn(*shape).to(device, dtype).requires_grad_(wants)

    return make


def arbitrary(*shape):
    """Some masked out, none of them the first key."""

    def make(device):
        mask = torch.rand(*shape) < 0.4
        mask[..., 0] = False
        return mask.to(device)

    return make


def biased(kind, tensor):
    return lambda device: {"core_attention_bias_type": kind, "core_attention_bias": tensor(device)}


def alibi(*shape):
    def given(device):
        slopes = (torch.rand(*shape) + 0.1).to(device) if shape else None
        return {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}

    return given


def padded(kind, by_mask):
    def given(device):
        of = {"self_attn_mask_type": kind}
        if by_mask:
            return {**of, "attention_mask": ends(device, (4, LENGTH), LENGTH)}
        lengths = sums(device, 4, LENGTH)
        return {**of, "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}

    return given


def masked(*shape, **others):
    def given(device):
        mask = arbitrary(*shape)(device)
        return {"self_attn_mask_type": "arbitrary", "attention_mask": mask, **others}

    return given


S, B, H = LENGTH, BATCH, HEADS
PADDING = ("padding", "padding_causal", "padding_causal_bottom_right")
LIMITS = {
    **{f"{kind}, mask": padded(kind, True) for kind in PADDING},
    **{f"{kind}, lengths": padded(kind, False) for kind in PADDING},
    "padding, window": lambda device: {**padded("padding", False)(device), "window_size": (2, 1)},
    "arbitrary, one": masked(1, 1, S, S),
    "arbitrary, samples": masked(B, 1, S, S),
    "arbitrary, heads": masked(B, H, S, S),
    "arbitrary, keys": masked(B, 1, 1, S),
    "arbitrary, window": masked(1, 1, S, S, window_size=(3, 2)),
    "window": lambda _: {"window_size": (2, 0)},
    "window, both sides": lambda _: {"self_attn_mask_type": "no_mask", "window_size": (1, 2)},
    "window, other corner": lambda _: {
        "self_attn_mask_type": "no_mask",
        "window_size": (1, 2),
        "bottom_right_diagonal": False,
    },
    "bias": biased("post_scale_bias", randoms(1, H, S, S)),
    "bias, no gradient": biased("post_scale_bias", randoms(1, H, S, S, wants=False)),
    "bias, all": biased("post_scale_bias", randoms(B, H, S, S)),
    "bias, keys": biased("post_scale_bias", randoms(B, 1, 1, S)),
    "bias, heads": biased("post_scale_bias", randoms(1, H, 1, S)),
    "bias, bf16": biased("post_scale_bias", randoms(1, H, S, S, dtype=BF16)),
    "bias before": biased("pre_scale_bias", randoms(1, H, S, S)),
    "bias before, no gradient": biased("pre_scale_bias", randoms(1, H, S, S, wants=False)),
    "alibi": alibi(),
    "alibi, slopes": alibi(H),
    "alibi, slopes of samples": alibi(B, H),
    "all": lambda device: {
        **masked(B, 1, S, S, window_size=(4, 3))(device),
        **biased("post_scale_bias", randoms(B, H, S, S))(device),
    },
}
UNFUSED_ON_CUDA = ("bias", "bias, all", "bias, keys", "bias, heads", "bias before", "all")
"""Gradients of biases that cuDNN does not make: in fp32, or of one that queries or keys share."""
SDPA_LIMITS = {
    "causal": lambda _: {"self_attn_mask_type": "causal"},
    "no mask": lambda _: {"self_attn_mask_type": "no_mask"},
    "bottom right": lambda _: {"self_attn_mask_type": "causal_bottom_right"},
}


# Limits are an input of the attention node; dropout and products are others.
@pairs(limits=[*LIMITS, *SDPA_LIMITS], dropped=[False, True], recipe=[None, "delayed"])
def test_limits(device, limits, dropped, recipe):
    layer = make_layer(device, dtype_of(device, recipe), **(DROPS if dropped else {}))
    given = {**LIMITS, **SDPA_LIMITS}[limits](device)
    whole = device == "cpu" or limits not in UNFUSED_ON_CUDA
    assert_ways_agree(layer, inputs_of(layer, **given), recipe=recipe, whole=whole)


@pytest.mark.parametrize("limits", LIMITS)
def test_limits_of_attention_alone(device, limits):
    layer = make_attention(device, dtype_of(device), qkv_format="bshd", num_gqa_groups=2)
    given = LIMITS[limits](device)
    if "self_attn_mask_type" in given:
        given["attn_mask_type"] = given.pop("self_attn_mask_type")
    whole = device == "cpu" or limits not in UNFUSED_ON_CUDA
    assert_ways_agree(layer, inputs_of(layer, **given), whole=whole)


# As with limits.
@pairs(
    kind=["off-by-one", "learnable"],
    limits=["causal", "padding, lengths", "alibi", "bias, all"],
    recipe=[None, "delayed"],
)
def test_softmax_types(device, kind, limits, recipe):
    """The gradient of the offsets is one of the plan's results."""
    options = {"softmax_type": kind, "fuse_qkv_params": True, **DROPS}
    layer = make_layer(device, dtype_of(device, recipe), **options)
    given = {**LIMITS, **SDPA_LIMITS}[limits](device)
    if kind == "learnable":
        torch.nn.init.normal_(layer.self_attention.core_attention.softmax_offset)
    whole = device == "cpu" or limits not in UNFUSED_ON_CUDA
    assert_ways_agree(layer, inputs_of(layer, **given), recipe=recipe, whole=whole)


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_softmax_types_of_a_decoder(device, form):
    """Each attention has offsets of its own; one without a gradient."""
    options = {"softmax_type": "learnable", "layer_type": "decoder", "attn_input_format": form}
    layer = make_layer(device, dtype_of(device), **options)
    for name, parameter in layer.named_parameters():
        if name.endswith("softmax_offset"):
            torch.nn.init.normal_(parameter)
    layer.inter_attention.core_attention.softmax_offset.requires_grad_(False)
    assert_ways_agree(layer, inputs_of(layer))


TO_SOURCE = {
    "masks": lambda device: {
        "enc_dec_attn_mask_type": "padding",
        "enc_dec_attn_mask": (ends(device, (LENGTH, 5), LENGTH), ends(device, (4, SOURCE), SOURCE)),
    },
    "masks, other corner": lambda device: {
        "enc_dec_attn_mask_type": "padding_causal_bottom_right",
        "enc_dec_attn_mask": (ends(device, (LENGTH, 5), LENGTH), ends(device, (7, SOURCE), SOURCE)),
    },
    "arbitrary": lambda device: {
        "enc_dec_attn_mask_type": "arbitrary",
        "enc_dec_attn_mask": arbitrary(BATCH, 1, LENGTH, SOURCE)(device),
    },
    "causal, other corner": lambda _: {"enc_dec_attn_mask_type": "causal_bottom_right"},
    "window": lambda _: {"enc_dec_window_size": (3, 1)},
    "window, top left": lambda _: {
        "enc_dec_window_size": (3, 1),
        "enc_dec_bottom_right_diagonal": False,
    },
}


@pytest.mark.parametrize("limits", TO_SOURCE)
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_limits_of_attention_to_a_source(device, form, limits):
    layer = make_layer(device, dtype_of(device), layer_type="decoder", attn_input_format=form)
    assert_ways_agree(layer, inputs_of(layer, **TO_SOURCE[limits](device)))


def test_lengths_of_attention_to_a_source(device):
    layer = make_attention(device, dtype_of(device), attention_type="cross")
    given = {
        "attn_mask_type": "padding",
        "cu_seqlens_q": sums(device, 3, LENGTH),
        "cu_seqlens_kv": sums(device, SOURCE, 5),
    }
    assert_ways_agree(layer, inputs_of(layer, **given))


@pytest.mark.parametrize("lengths", [(LENGTH, SOURCE), (SOURCE, LENGTH)])
def test_causal_attention_to_a_source(device, lengths):
    """From the top left corner, which torch's attention takes too."""
    layer = make_attention(
        device, dtype_of(device), attention_type="cross", attn_mask_type="causal"
    )
    given = inputs_of(layer, hidden_states=states(layer, lengths[0]))
    given["encoder_output"] = states(layer, lengths[1])
    assert_ways_agree(layer, given)


def test_a_bias_of_both_attentions_of_a_decoder(device):
    """One tensor is given twice: its gradient is the sum."""
    layer = make_layer(device, dtype_of(device), layer_type="decoder")
    given = biased("post_scale_bias", randoms(1, HEADS, LENGTH, LENGTH))(device)
    given["encoder_output"] = states(layer)
    assert_ways_agree(layer, inputs_of(layer, **given), whole=device == "cpu")


# ---- rotary positions ----------------------------------------------------------------------------


def angles(device, channels=8, length=LENGTH, **options):
    return te.RotaryPositionEmbedding(channels, **options).to(device)(length)


ANGLES = {
    "same": lambda d: angles(d),
    "pair": lambda d: (angles(d), angles(d, rotary_base=100.0)),
    "pair of one": lambda d: (angles(d),) * 2,
    "list": lambda d: [angles(d), angles(d)],
    "partial": lambda d: angles(d, rotary_percent=0.5),
    "partly partial": lambda d: (angles(d, rotary_percent=0.5), angles(d)),
    "longer": lambda d: angles(d, length=LENGTH + 5),
    "bf16": lambda d: angles(d).to(BF16),
    "not contiguous": lambda d: angles(d, 16)[..., ::2],
}


# Angles, the order of the dims and of the pairs are three fields of one node.
@pairs(kind=ANGLES, form=["sbhd", "bshd"], interleaved=[False, True])
def test_rotary_positions(device, kind, form, interleaved):
    options = {"rotary_pos_interleaved": interleaved, "attn_input_format": form}
    layer = make_layer(device, dtype_of(device), **options, **DROPS)
    given = inputs_of(layer, rotary_pos_emb=ANGLES[kind](device))
    assert_ways_agree(layer, given)


@pytest.mark.parametrize("options", BOTH_ATTENTIONS)
def test_rotary_positions_with_options(device, options):
    options = {**BOTH_ATTENTIONS[options]}
    channels = options.get("kv_channels", 8)
    channels = channels[0] if isinstance(channels, tuple) else channels
    layer = make_layer(device, BF16, **options)
    given = inputs_of(layer, rotary_pos_emb=angles(device, channels))
    assert_ways_agree(layer, given, recipe="delayed")


@pytest.mark.parametrize("options", [{}, FUSED, {"num_gqa_groups": 2}], ids=["", "fused", "groups"])
def test_rotary_positions_of_a_source(device, options):
    layer = make_attention(device, dtype_of(device), attention_type="cross", **options)
    pair = angles(device), angles(device, length=SOURCE)
    assert_ways_agree(layer, inputs_of(layer, rotary_pos_emb=pair))


def test_angles_with_gradients_call_the_modules(device):
    """The plan gives angles no gradient; the modules do."""
    layer = make_layer(device, dtype_of(device))
    learned = angles(device, length=LENGTH + 2).requires_grad_()
    assert_modules(layer, hidden_states=states(layer), rotary_pos_emb=learned).sum().backward()
    assert learned.grad[1:LENGTH].any() and not learned.grad[LENGTH:].any()


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_rotary_positions_of_a_decoder(device, form):
    """Both attentions are given tensors of their own."""
    options = {"layer_type": "decoder", "attn_input_format": form}
    layer = make_layer(device, dtype_of(device), **options, **DROPS)
    pair = ANGLES["pair"](device)
    assert_ways_agree(layer, inputs_of(layer, rotary_pos_emb=pair))
    masks = {**padded("padding_causal", True)(device), **TO_SOURCE["masks"](device)}
    assert_ways_agree(layer, inputs_of(layer, rotary_pos_emb=pair, **masks))
