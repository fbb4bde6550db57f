# SPDX-License-Identifier: Apache-2.0
"""Constructors of layers hand every option on to the modules that they are made of."""

import contextlib
import functools
import inspect

import pytest
import torch

import transformer_engine.pytorch as te

SIZES = (32, 64, 4)
SIZE_NAMES = ("hidden_size", "ffn_hidden_size", "num_attention_heads")
NOT_HANDED_ON = {
    "tp_group",  # needs a process group: see test_one_rank.py
    *("tp_size", "sequence_parallel", "seq_length", "micro_batch_size"),  # change nothing
    *("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad"),
    "name",  # of the layer alone
}


class Tracker:
    """Of random states, as far as constructors use it."""

    def fork(self, name="model-parallel-rng"):
        return contextlib.nullcontext()


def first_weight(weight):
    torch.nn.init.ones_(weight)


def second_weight(weight):
    torch.nn.init.zeros_(weight)


LINEAR = {
    "params_dtype": torch.bfloat16,
    "get_rng_state_tracker": Tracker,
    "fuse_wgrad_accumulation": True,
    "bias": False,
    "device": "meta",  # only what is said counts here
}
NORM = {"zero_centered_gamma": True, "normalization": "RMSNorm"}
ATTENTION = {
    **{**LINEAR, **NORM, "num_gqa_groups": 2, "layernorm_epsilon": 1e-3, "layer_number": 3},
    **{"attention_dropout": 0.25, "init_method": first_weight, "kv_channels": (8, 16)},
    **{"output_layer_init_method": second_weight, "set_parallel_mode": True},
    **{"window_size": (2, 1), "bottom_right_diagonal": True, "fuse_qkv_params": True},
    **{"rotary_pos_interleaved": True, "qkv_weight_interleaved": False},
    **{"qk_norm_type": "RMSNorm", "qk_norm_eps": 1e-4, "qk_norm_before_rope": True},
    "softmax_type": "learnable",
    "softcap": 30.0,
}
LAYER = {
    **{**ATTENTION, "self_attn_mask_type": "no_mask", "attn_input_format": "bshd"},
    **{"enc_dec_attn_mask_type": "padding", "enc_dec_window_size": (3, 0)},
    **{"enc_dec_bottom_right_diagonal": False, "activation": "clamped_swiglu"},
    **{"activation_params": {"limit": 3.0}, "apply_residual_connection_post_layernorm": True},
}


def options_of(kind):
    """Names and defaults of a constructor."""
    parameters = inspect.signature(kind.__init__).parameters
    return {name: p.default for name, p in parameters.items() if name != "self"}


@pytest.fixture
def made(monkeypatch):
    """Arguments of every module that is constructed, by class and in order."""
    calls = {}

    def record(kind):
        signature, begin = inspect.signature(kind.__init__), kind.__init__

        @functools.wraps(begin)  # which keeps the signature
        def recording(self, *args, **options):
            bound = signature.bind(self, *args, **options)
            bound.apply_defaults()
            calls.setdefault(kind.__name__, []).append(bound.arguments)
            begin(self, *args, **options)

        monkeypatch.setattr(kind, "__init__", recording)

    for kind in (te.MultiheadAttention, te.DotProductAttention, te.LayerNormMLP, te.Linear):
        record(kind)
    record(te.LayerNormLinear)
    return calls


def check(outer, given, inner, received, renamed):
    """Every option that both take has arrived, none as it would be without."""
    of_outer, of_inner = options_of(outer), options_of(inner)
    names = {name: renamed.get(name, name) for name in of_inner}
    shared = {name: source for name, source in names.items() if source in of_outer}
    shared = {k: v for k, v in shared.items() if k not in NOT_HANDED_ON and v not in SIZE_NAMES}
    assert shared.keys() >= {"params_dtype", "device", "bias", "get_rng_state_tracker"}
    for name, source in shared.items():
        assert source in given, f"no value for {source}"
        assert given[source] != of_outer[source], f"{source}: a default shows nothing"
        assert received[name] == given[source], name


@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
def test_transformer_layer(made, layer_type):
    kind = te.TransformerLayer
    kind(*SIZES, layer_type=layer_type, **LAYER)
    own = {"attn_mask_type": "self_attn_mask_type", "qkv_format": "attn_input_format"}
    crossed = {name: f"enc_dec_{name}" for name in ("attn_mask_type", "window_size")}
    crossed |= {"bottom_right_diagonal": "enc_dec_bottom_right_diagonal"}
    crossed |= {"qkv_format": "attn_input_format"}
    attentions = made["MultiheadAttention"]
    assert [a["attention_type"] for a in attentions] == ["self", "cross"][: len(attentions)]
    assert len(attentions) == (2 if layer_type == "decoder" else 1)
    for received, renamed in zip(attentions, (own, crossed), strict=False):
        check(kind, LAYER, te.MultiheadAttention, received, renamed)
        assert (received["hidden_size"], received["num_attention_heads"]) == (32, 4)
        assert received["input_layernorm"] and received["return_layernorm_output"]
    (received,) = made["LayerNormMLP"]
    check(kind, LAYER, te.LayerNormMLP, received, {"eps": "layernorm_epsilon"})
    assert (received["hidden_size"], received["ffn_hidden_size"]) == (32, 64)
    assert received["return_layernorm_output"]


@pytest.mark.parametrize("attention_type", ["self", "cross"])
def test_multihead_attention(made, attention_type):
    given = {**ATTENTION, "attn_mask_type": "no_mask", "qkv_format": "bshd"}
    given |= {"return_bias": True, "return_layernorm_output": True}
    kind = te.MultiheadAttention
    kind(32, 4, attention_type=attention_type, input_layernorm=True, **given)
    (core,), (first,), (*source, last) = (
        made[name] for name in ("DotProductAttention", "LayerNormLinear", "Linear")
    )
    passed = {n: v for n, v in given.items() if n in options_of(te.DotProductAttention)}
    assert len(passed) >= 9 and {n: core[n] for n in passed} == passed
    assert core["attention_type"] == attention_type
    assert len(source) == (attention_type == "cross")
    for received, mode, method in ((first, "column", first_weight), (last, "row", second_weight)):
        inner = te.Linear if received is last else te.LayerNormLinear
        renamed = {"eps": "layernorm_epsilon", "init_method": "", "return_bias": ""}
        check(kind, given, inner, received, renamed)
        assert (received["parallel_mode"], received["init_method"]) == (mode, method)
        assert received["return_bias"] is (received is last)
    for received in source:
        check(kind, given, te.Linear, received, {"return_bias": ""})
        assert received["parallel_mode"] == "column" and not received["return_bias"]
