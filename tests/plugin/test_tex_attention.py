# SPDX-License-Identifier: Apache-2.0
"""Attention operators of `transformer_engine_torch`: what cases of `plugin.check` can not say.

Casts of results, any options together, where random bits come from, refusals.
"""

import inspect

import pytest
import torch
from buffers import normal
from comparators import assert_bits, assert_nmse
from plugged import register
from tex_cases import Operators, assert_same_data, each_implementation, quantizers
from tols import BF16, F32, tol

import transformer_engine_torch as plain_tex
from transformer_engine.plugin import core as plugin
from transformer_engine.plugin.conformance.attention import (
    Problem,
    Setting,
    backward_arguments,
    forward_arguments,
)
from transformer_engine.plugin.conformance.cases import Draw
from transformer_engine.plugin.core.ops import (
    FlashAttentionBase,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from transformer_engine.pytorch.attention.dot_product_attention.utils import FusedAttentionParams
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.cpp_extensions import fused_attn

native = Operators("default.native")


def forward(tex, problem, training=True, **changed):
    return called(tex.fused_attn_fwd, forward_arguments(problem, training), changed)


def backward(tex, problem, out, grad, aux, **changed):
    return called(tex.fused_attn_bwd, backward_arguments(problem, out, grad, aux), changed)


def called(op, args, changed):
    """Call with other arguments for some, by name."""
    return op(**{**inspect.signature(op).bind(*args).arguments, **changed})


@pytest.fixture
def draw(seed):
    return Draw(torch.device("cpu"), seed, (F32,))


@each_implementation
def test_cast_outputs(draw, tex):
    problem = Problem(draw, Setting("", "bsh3d", heads=(3, 3), lengths=(9, 9)), BF16)
    (out,) = forward(tex, problem, False)
    make = quantizers("cpu")["current"]
    (cast,) = forward(tex, problem, False, o_quantizer=make)
    assert_same_data(cast, make(out))


@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
def test_both_implementations_agree(rng, draw, form):
    """On any options together, with sequences of no token and queries that attend nothing."""
    reference = Operators("reference.torch")
    packed = form == "thd"
    biases = ["no_bias", "alibi"] + ["post_scale_bias"] * (not packed)
    softmaxes = ["vanilla", "off_by_one", "learnable"]
    masks = [m.name.removeprefix("NVTE_").lower().removesuffix("_mask") for m in NVTE_Mask_Type]
    masks = ["no_mask" if m == "no" else m for m in masks]
    for _ in range(20):
        mask = str(rng.choice(masks))
        uneven = packed or "padding" in mask
        ends = tuple(tuple(map(int, rng.integers(0, n + 1, 2))) for n in (9, 12))
        setting = Setting(
            "", "_".join([form] * 3), mask, [(-1, -1), (2, -1), (-1, 1), (1, 2)][rng.integers(4)],
            str(rng.choice(biases)), softmax=str(rng.choice(softmaxes)),
            each=ends if uneven else None,
        )  # fmt: skip
        problem, made, grad = Problem(draw, setting, F32), [], None
        for tex in (native, reference):
            out, *aux = forward(tex, problem)
            grad = normal(rng, tuple(out.shape), F32) if grad is None else grad
            made.append([out, *aux, *backward(tex, problem, out, grad, aux)])
        for one, other in zip(*made, strict=True):
            if one is not None:
                found, expected = (t.double().nan_to_num(neginf=-99.0) for t in (one, other))
                terms = 1 + expected.abs()  # gradients of scores cancel
                assert_nmse(found, expected, tol("attention", F32, 64), terms=terms)


def test_dropout_of_attention(draw):
    """Drawn from the generator; in inference there is none."""
    problem, results = Problem(draw, Setting(""), F32), []
    for _ in range(2):
        generator = torch.Generator().manual_seed(7)
        results.append(forward(native, problem, p_dropout=0.4, rng_gen=generator))
    assert_bits(results[0][0], results[1][0])
    plain = forward(native, problem)[0]
    assert not torch.equal(results[0][0], plain)
    assert_bits(forward(native, problem, False, p_dropout=0.4)[0], plain)


def test_refused_attention(draw):
    problem = Problem(draw, Setting(""), F32)
    tables = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="fused_attn_fwd: page_table_k"):
        forward(native, problem, page_table_k=tables)
    with pytest.raises(NotImplementedError, match="PRE_SCALE_BIAS"):
        forward(native, problem, bias_type=NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS)
    with pytest.raises(NotImplementedError, match="qkv_layout=NVTE_Paged"):
        forward(native, problem, qkv_layout=NVTE_QKV_Layout.NVTE_Paged_KV_BSHD_BSHD_BSHD)
    with pytest.raises(NotImplementedError, match="Q: Float8Tensor"):
        forward(native, problem, Q=quantizers("cpu")["current"](problem.tensors[0]))
    for name, kind in (("attn_mask_type", NVTE_Mask_Type), ("bias_type", NVTE_Bias_Type)):
        with pytest.raises(
            ValueError, match=f"fused_attn_fwd: {name}=77, expected a {kind.__name__}"
        ):
            forward(native, problem, **{name: 77})
    with pytest.raises(ValueError, match="fused_attn_fwd: qkv_layout="):
        forward(native, problem, qkv_layout=99)
    with pytest.raises(ValueError, match="needs SoftmaxOffset"):
        forward(native, problem, softmax_type=NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX)
    out, statistics, _ = forward(native, problem)
    with pytest.raises(ValueError, match="Aux_CTX_Tensors: 1 tensors"):
        backward(native, problem, out, out, [statistics])


def test_backend_query():
    def ask(dtype=DType.kBFloat16, layout=NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, dim=64, bias=0):
        return native.get_fused_attn_backend(
            True, dtype, dtype, layout, bias, NVTE_Mask_Type.NVTE_CAUSAL_MASK, 0, 0.0, 8, 2, 128,
            128, dim, dim, -1, 0, False,
        )  # fmt: skip

    none = NVTE_Fused_Attn_Backend.NVTE_No_Backend
    if not torch.cuda.is_available():
        assert ask() == ask(torch.float32) == NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    assert ask(DType.kFloat8E4M3) == none
    assert ask(layout=NVTE_QKV_Layout.NVTE_Paged_KV_BSHD_BSHD_BSHD) == none
    assert ask(bias=NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS) == none


def fused(**fields):
    sizes = {"num_attn_heads": 8, "num_gqa_groups": 2, "head_dim_qk": 64, "head_dim_v": 64}
    return FusedAttentionParams(**sizes | fields)


def test_fused_attention_of_one_object():
    """The kind and why there is none, of the same call as the operator's arguments describe."""
    ask = plain_tex.get_fused_attn_backend
    assert fused_attn.get_fused_attn_backend is ask
    kinds = NVTE_Fused_Attn_Backend
    assert ask(fused(qkv_dtype=DType.kFloat16)) == ask(fused_attn_params=fused())
    kind, message = ask(fused())
    assert kind == ask(**fused().scalars())
    if not torch.cuda.is_available():
        assert (kind, message) == (kinds.NVTE_F16_arbitrary_seqlen, "")
        assert kind == fused_attn.FusedAttnBackend.F16_arbitrary_seqlen
    layouts = NVTE_QKV_Layout
    for fields, text in (
        ({"num_gqa_groups": 3}, "8 heads of queries and 3 of keys"),
        ({"num_gqa_groups": 0}, "0 of keys"),
        ({"qkv_dtype": DType.kFloat8E4M3}, "float8_e4m3fn: expected one of"),
        ({"bias_type": NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS}, "NVTE_PRE_SCALE_BIAS: not built"),
        ({"qkv_layout": layouts.NVTE_Paged_KV_BSHD_BSHD_BSHD}, "caches in pages"),
        ({"qkv_layout": layouts.NVTE_THD_BSHD_BSHD}, "pack both"),
    ):
        kind, message = ask(fused(**fields))
        assert kind == kinds.NVTE_No_Backend and text in message
        assert ask(**fused(**fields).scalars()) == kinds.NVTE_No_Backend
    with pytest.raises(TypeError, match="dict, expected a FusedAttentionParams"):
        ask({})
    with pytest.raises(ValueError, match="bias_type=77"):
        ask(fused(bias_type=77))
    for field in ("num_attn_heads", "num_gqa_groups", "head_dim_qk", "head_dim_v"):
        for junk in (None, "8", 64.0):
            with pytest.raises(TypeError, match=f"{field}={junk!r}, expected an int"):
                ask(fused(**{field: junk}))
        assert ask(fused(**{field: -8}))[0] == kinds.NVTE_No_Backend
    assert ask(fused(num_attn_heads=0))[0] == kinds.NVTE_No_Backend


def test_a_plug_in_is_asked_by_its_arguments(manager):
    """Its implementation gets what is its operator's, and its answer counts."""
    asked = []

    def answer(**given):
        asked.append(given)
        return NVTE_Fused_Attn_Backend.NVTE_No_Backend

    register("get_fused_attn_backend", answer)
    with plugin.with_preference("vendor"):
        kind, message = plain_tex.get_fused_attn_backend(fused(dropout=0.1))
    assert kind == NVTE_Fused_Attn_Backend.NVTE_No_Backend and message
    assert asked == [fused(dropout=0.1).scalars()]


# ---- the attention class ---------------------------------------------------------------------


def test_flash_attention_class(rng):
    kind = plain_tex.get_flash_attention_class()
    assert issubclass(kind, FlashAttentionBase)
    run = plain_tex.flash_attention(0.2, layer_number=3)
    assert type(run) is kind and run.layer_number == 3 and run.backend_name == "FlashAttention"
    tensors = [normal(rng, (7, 2, 4, 16), F32) for _ in range(3)]
    given = {"qkv_layout": "sbhd_sbhd_sbhd"}
    out = run(*tensors, **given)
    assert not list(run.state_dict())
    dropping = kind(0.2, attention_dropout=0.5)
    assert not torch.equal(dropping(*tensors, **given), out)
    assert_bits(dropping.eval()(*tensors, **given), out)
    with pytest.raises(NotImplementedError, match="fp8"):
        run(*tensors, **given, fp8=True)


def test_flash_attention_is_repeatable_or_refuses(monkeypatch):
    heads = [torch.randn(4, 1, 2, 8) for _ in range(3)]
    given = {"qkv_layout": "sbhd_sbhd_sbhd"}
    run = plain_tex.flash_attention(0.2, deterministic=True)
    with pytest.raises(NotImplementedError, match="deterministic=True"):
        run(*heads, **given)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    expected = plain_tex.flash_attention(0.2)(*heads, **given)
    assert torch.equal(run(*heads, **given), expected)
