# SPDX-License-Identifier: Apache-2.0
"""TransformerLayer: parameters, every arrangement of its parts, FP8, recompute, compile, errors."""

import contextlib

import pytest
import torch
from attention_reference import drop_factors, path_factors, rope
from comparators import assert_nmse
from device_kinds import every_device
from pytorch import attention_model
from pytorch.attention_model import Model, check, may_attend, wide
from pytorch.helpers import RECIPES, assert_same_bits, counted, states_of
from tols import BF16, E4M3, F16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.execution.random import draw_pair

pytestmark = every_device

HIDDEN, FFN, HEADS, LENGTH, BATCH = 32, 64, 4, 6, 2
DEPTH = 3 * HIDDEN


def make(device, dtype=F32, **options):
    """A layer, without dropout unless told, with other biases than 0."""
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype, **options}
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, device=device, **given)
    attention_model.randomise(layer)
    return layer


def states(device, dtype=F32, length=LENGTH, form="sbhd"):
    shape = (length, BATCH) if form == "sbhd" else (BATCH, length)
    return torch.randn(*shape, HIDDEN).to(device, dtype).requires_grad_()


def mask(queries=LENGTH, keys=LENGTH, window=(-1, 0)):
    return may_attend((BATCH, HEADS, queries, keys), window=window)


def region(recipe):
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=RECIPES[recipe]())


# ---- parameters ----------------------------------------------------------------------------------


def test_parameters_and_state_dict_keys():
    layer = te.TransformerLayer(32, 64, 4, fuse_qkv_params=True, device="cpu")
    assert {name: tuple(p.shape) for name, p in layer.state_dict().items()} == {
        "self_attention.layernorm_qkv.layer_norm_weight": (32,),
        "self_attention.layernorm_qkv.layer_norm_bias": (32,),
        "self_attention.layernorm_qkv.weight": (96, 32),
        "self_attention.layernorm_qkv.bias": (96,),
        "self_attention.proj.weight": (32, 32),
        "self_attention.proj.bias": (32,),
        "layernorm_mlp.layer_norm_weight": (32,),
        "layernorm_mlp.layer_norm_bias": (32,),
        "layernorm_mlp.fc1_weight": (64, 32),
        "layernorm_mlp.fc1_bias": (64,),
        "layernorm_mlp.fc2_weight": (32, 64),
        "layernorm_mlp.fc2_bias": (32,),
    }
    decoder = te.TransformerLayer(
        32, 64, 4, layer_type="decoder", output_layernorm=True, bias=False, device="cpu"
    )
    assert set(decoder.state_dict()) == {
        "self_attention.qkv.query_weight",
        "self_attention.qkv.key_weight",
        "self_attention.qkv.value_weight",
        "self_attention.proj.weight",
        "inter_attention.layernorm_query.layer_norm_weight",
        "inter_attention.layernorm_query.layer_norm_bias",
        "inter_attention.layernorm_query.query_weight",
        "inter_attention.key_value.key_weight",
        "inter_attention.key_value.value_weight",
        "inter_attention.proj.weight",
        "layernorm_mlp.layer_norm_weight",
        "layernorm_mlp.layer_norm_bias",
        "layernorm_mlp.fc1_weight",
        "layernorm_mlp.fc2_weight",
        "layernorm.weight",
        "layernorm.bias",
    }


def test_defaults():
    layer = te.TransformerLayer(32, 64, 4, device="cpu")
    assert layer.hidden_dropout == layer.self_attention.core_attention.attention_dropout == 0.1
    assert layer.self_attn_mask_type == "causal" and layer.enc_dec_attn_mask_type == "no_mask"
    assert type(layer).__module__.startswith("transformer_engine.pytorch")
    assert layer(torch.randn(4, 2, 32), attention_mask=None).shape == (4, 2, 32)


def test_initialisation_of_what_writes_to_the_residual_stream():
    layer = te.TransformerLayer(
        32,
        64,
        4,
        init_method=lambda w: torch.nn.init.constant_(w, 1.0),
        output_layer_init_method=lambda w: torch.nn.init.constant_(w, 2.0),
        device="cpu",
    )
    assert (layer.self_attention.layernorm_qkv.query_weight == 1).all()
    assert (layer.layernorm_mlp.fc1_weight == 1).all()
    assert (layer.self_attention.proj.weight == 2).all()
    assert (layer.layernorm_mlp.fc2_weight == 2).all()


# ---- arrangements --------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
def test_encoder(device, dtype, form, fused):
    layer = make(device, dtype, attn_input_format=form, fuse_qkv_params=fused)
    model = Model(wide(layer), form=form, interleaved=fused)
    x = states(device, dtype, form=form)
    bound = tol("layer", dtype, DEPTH)
    check(layer, model, layer, lambda x: model.layer(x, mask()), [x], bound)


ARRANGEMENTS = {
    "post-residual": (
        {"apply_residual_connection_post_layernorm": True},
        {"post_residual": True},
    ),
    "output-norm": ({"output_layernorm": True}, {"output_norm": True}),
    "output-rmsnorm": (
        {"output_layernorm": True, "normalization": "RMSNorm", "zero_centered_gamma": True},
        {"output_norm": True, "kind": "RMSNorm", "zero_centered": True},
    ),
    "parallel": ({"parallel_attention_mlp": True}, {"parallel": True}),
    "groups": ({"num_gqa_groups": 2, "fuse_qkv_params": True}, {"groups": 2, "interleaved": True}),
    "rmsnorm": (
        {"normalization": "RMSNorm", "layernorm_epsilon": 0.01, "bias": False},
        {"kind": "RMSNorm", "eps": 0.01},
    ),
    "channels": ({"kv_channels": 16}, {"channels": (16, 16)}),
}


@pytest.mark.parametrize("dropped", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arrangements(device, arrangement, dropped):
    """With dropout in training mode the biases take another way; in eval it drops nothing."""
    options, same = ARRANGEMENTS[arrangement]
    layer = make(device, hidden_dropout=0.5 if dropped else 0.0, **options)
    layer.train(not dropped)
    model = Model(wide(layer), **same)
    bound = tol("layer", F32, DEPTH)
    check(layer, model, layer, lambda x: model.layer(x, mask()), [states(device)], bound)


@pytest.mark.parametrize("post_residual", [False, True])
@pytest.mark.parametrize("output_norm", [False, True])
def test_decoder(device, output_norm, post_residual):
    layer = make(
        device,
        layer_type="decoder",
        output_layernorm=output_norm,
        apply_residual_connection_post_layernorm=post_residual,
    )
    model = Model(wide(layer), output_norm=output_norm)
    # the attention of an output_layernorm layer has no norm whose output could be the residual
    model.post_residual = post_residual
    check(
        layer,
        model,
        lambda x, source: layer(x, encoder_output=source),
        lambda x, source: model.layer(x, mask(), source, mask(LENGTH, 9, (-1, -1))),
        [states(device), states(device, length=9)],
        tol("layer", F32, DEPTH),
    )


def test_masks_of_a_decoder(device):
    layer = make(
        device,
        layer_type="decoder",
        self_attn_mask_type="no_mask",
        window_size=(2, 1),
        enc_dec_attn_mask_type="padding",
    )
    model = Model(wide(layer))
    ends = torch.tensor([7, 9], device=device)[:, None, None, None]
    keys = torch.arange(9, device=device) >= ends
    queries = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool, device=device)
    to_source = may_attend((BATCH, HEADS, LENGTH, 9), keys.expand(-1, 1, LENGTH, -1))
    check(
        layer,
        model,
        lambda x, source: layer(x, encoder_output=source, enc_dec_attn_mask=(queries, keys)),
        lambda x, source: model.layer(x, mask(window=(2, 1)), source, to_source),
        [states(device), states(device, length=9)],
        tol("layer", F32, DEPTH),
    )


def test_rotary_positions_and_bias(device):
    layer = make(device, fuse_qkv_params=True, qk_norm_type=None)
    angles = te.RotaryPositionEmbedding(8).to(device)(LENGTH)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, device=device)
    turned = angles.cpu().double()
    model = Model(
        wide(layer),
        interleaved=True,
        position=lambda q, k: (rope(q, turned), rope(k, turned)),
        bias=bias.cpu().double(),
    )
    arguments = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    check(
        layer,
        model,
        lambda x: layer(x, rotary_pos_emb=angles, **arguments),
        lambda x: model.layer(x, mask()),
        [states(device)],
        tol("layer", F32, DEPTH),
    )


def test_mask_type_of_a_call(device):
    layer, x = make(device), states(device)
    found = layer(x, self_attn_mask_type="no_mask")
    model = Model(wide(layer))
    exact = model.layer(x.detach().cpu().double(), mask(window=(-1, -1))).detach()
    assert_nmse(found, exact, tol("layer", F32, DEPTH))


# ---- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_path", [0.0, 0.5])
@pytest.mark.parametrize("parallel", [False, True])
def test_hidden_dropout(device, parallel, drop_path):
    layer = make(
        device, hidden_dropout=0.3, drop_path_rate=drop_path, parallel_attention_mlp=parallel
    )
    x = states(device)
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    names = ("mlp",) if parallel else ("attention", "mlp")
    rows = (LENGTH * BATCH, HIDDEN)
    factors = {}
    for name in names:
        pair = draw_pair(x).tolist()
        factors[name] = drop_factors(pair, rows, 0.3)
        if drop_path > 0:  # a sample is an entry of the first dim
            factors[name] = factors[name] * path_factors(pair, rows, drop_path, LENGTH)
    model = Model(
        wide(layer),
        parallel=parallel,
        drop=lambda branch, name: branch * factors[name].view_as(branch),
    )
    torch.manual_seed(seed)
    bound = tol("layer", F32, DEPTH)
    check(layer, model, layer, lambda x: model.layer(x, mask()), [x], bound)


def test_biases_are_added_where_dropout_runs(device, counters):
    """One operator for bias, dropout and residual; without dropout the GEMM adds the bias."""
    layer = make(device, hidden_dropout=0.1)
    out = layer(states(device))
    assert counters()[f"op.{device}.dropout_add"] == 2
    out.sum().backward()
    assert counters()[f"op.{device}.dropout_backward"] == 2
    assert layer.self_attention.return_bias and layer.layernorm_mlp.return_bias
    layer = make(device)
    assert not layer.self_attention.return_bias and not layer.layernorm_mlp.return_bias


# ---- FP8 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fused", [True, False])
def test_fp8(device, recipe, fused):
    """Every linear GEMM in FP8, and branches close to those without."""
    layer = make(device, BF16, fuse_qkv_params=fused)
    x = states(device, BF16)
    plain = layer(x).detach() - x.detach()
    for _ in range(2):  # delayed scaling has scales in the second step
        with counted() as gemms:
            with region(recipe):
                out = layer(x)
            out.sum().backward()
        assert (gemms.fp8, gemms.other) == (12, 0)
    found = out.detach() - x.detach()
    bound = tol("quantized_layer", E4M3) + 2 * tol("layer", BF16, DEPTH)
    assert_nmse(found, plain.double(), bound)


def test_microbatches_share_the_quantized_weights(device):
    layer = make(device, BF16, fuse_qkv_params=True)
    x = states(device, BF16)
    results = []
    with te.autocast(recipe=RECIPES["current"]()):
        for first in (None, True, False):
            out = layer(x, is_first_microbatch=first)
            results.append([out, *torch.autograd.grad(out.float().sum(), [x])])
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_reset_of_the_scaling_state(device):
    layer = make(device, BF16)
    with te.autocast(recipe=DelayedScaling()):
        layer(states(device, BF16)).sum().backward()
    assert all(state is not None for state in states_of(layer))
    layer.reset_fp8_meta_tensors()
    assert all(state is None for state in states_of(layer))


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layer_type": "middle"}, "layer_type='middle'"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, "excludes layer_type"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, "excludes output_layernorm"),
        (
            {"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True},
            "excludes apply_residual",
        ),
        ({"fuse_wgrad_accumulation": True}, "needs fuse_qkv_params=True"),
        ({"self_attn_mask_type": "diagonal"}, "self_attn_mask_type='diagonal'"),
        ({"window_size": (2, 2)}, "window_size"),
        ({"normalization": "BatchNorm"}, "normalization='BatchNorm'"),
        ({"num_gqa_groups": 3}, "must divide"),
        ({"layer_number": 0}, "counts from 1"),
        ({"hidden_dropout": 1.5}, "hidden_dropout=1.5"),
        ({"drop_path_rate": -0.5}, "drop_path_rate=-0.5"),
        ({"attention_dropout": float("nan")}, "attention_dropout=nan"),
    ],
)
def test_errors(options, match):
    with pytest.raises(ValueError, match=match):
        te.TransformerLayer(32, 64, 4, device="cpu", **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("activation", "sine"),
    ],
)
def test_options_that_are_not_there_yet(option, value):
    with pytest.raises(NotImplementedError, match=f"{option}="):
        te.TransformerLayer(32, 64, 4, device="cpu", **{option: value})


def test_call_errors(device):
    layer, x = make(device), states(device)
    with pytest.raises(ValueError, match="encoder_output with layer_type='encoder'"):
        layer(x, encoder_output=x)
    with pytest.raises(ValueError, match="needs encoder_output"):
        make(device, layer_type="decoder")(x)
    with pytest.raises(TypeError, match="inference_params: dict, expected an InferenceParams"):
        layer(x, inference_params={})
