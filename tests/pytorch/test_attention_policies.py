# SPDX-License-Identifier: Apache-2.0
"""Packed sequences with mask types and windows of their own, against float64 of each sequence."""

from unittest import mock

import pytest
import torch
from comparators import assert_bits, assert_nmse
from pytorch import attention_model as model
from pytorch.helpers import captured
from pytorch.test_packed_sequences import (
    GROUPS,
    HEADS,
    K,
    V,
    by_sequences,
    check,
    sides,
    tensors_of,
    where,
)
from tols import BF16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention import DotProductAttention

LENGTHS = ([20, 0, 1, 30, 9], [26, 5, 1, 33, 9])
LIMITS = {
    "padding": ((-1, -1), None),
    "padding_causal": ((-1, 0), False),
    "padding_causal_bottom_right": ((-1, 0), True),
}


def policy(ids, mask, window=None, **more):
    return {"sequence_ids": ids, "mask_type": mask, "window_size": window, **more}


POLICIES = {
    "masks": [policy([0, 2], "padding_causal"), policy([4, 1, 3], "padding")],
    "windows": [
        policy([3], "padding_causal", (4, 0)),
        policy((0, 1), "padding_causal_bottom_right", (3, 0)),
        policy(torch.tensor([2, 4]), "padding", (2, 5), bottom_right_diagonal=False),
    ],
    "one": [policy([1, 2, 0], "causal"), policy([3, 4], "padding_causal", (-1, 0))],
    "names": [
        policy([0, 1, 2, 3], "no_mask"), policy([4], "causal_bottom_right"), policy([], "causal"),
    ],
}  # fmt: skip


def definition(queries, keys, policies, corner=True):
    """Float64, each sequence by its policy; `corner`: of the diagonal of types that say nothing."""
    of = {int(id_): each for each in policies for id_ in each["sequence_ids"]}

    def attend(b, q, k, v):
        n, m = queries.lengths[b], keys.lengths[b]
        name = of[b]["mask_type"].replace("no_mask", "padding")
        own, bottom = LIMITS[name if name.startswith("padding") else f"padding_{name}"]
        if bottom is None:
            bottom = of[b].get("bottom_right_diagonal", corner)
        window = own if of[b]["window_size"] is None else of[b]["window_size"]
        diagonal = m - n if bottom else 0
        may = model.may_attend((1, HEADS, n, m), window=window, diagonal=diagonal)
        return model.attention(q, k, v, may)

    return by_sequences(queries, keys, attend)


def attention(**options):
    return DotProductAttention(HEADS, (K, V), GROUPS, qkv_format="thd", **options)


@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", POLICIES)
def test_values_and_gradients(device, name, dtype, gaps, rng):
    queries, keys = sides(rng, gaps, LENGTHS)
    tensors = tensors_of(queries, keys, dtype, device)
    exact = definition(queries, keys, POLICIES[name])
    module = attention(attn_mask_type="padding_causal", window_size=(1, 0))  # neither counts
    for dispatch in ("auto", "grouped"):
        given = {"thd_attention_policies": POLICIES[name]}
        check(
            module, tensors, queries, keys, exact, **given, thd_attention_policy_dispatch=dispatch
        )
        plain = device == "cuda" and dtype == F32
        assert module._last_call.backend == ("unfused" if plain else "native")


@pytest.mark.parametrize("corner", [False, True])
def test_diagonals_are_those_of_the_call_and_of_the_module(device, corner, rng):
    queries, keys = sides(rng, True, LENGTHS)
    tensors = tensors_of(queries, keys, BF16, device)
    policies = [policy([0, 3], "padding", (3, 2)), policy([1, 2, 4], "padding", (5, 0))]
    exact = definition(queries, keys, policies, corner)
    given = {"thd_attention_policies": policies}
    check(attention(bottom_right_diagonal=corner), tensors, queries, keys, exact, **given)
    other = attention(bottom_right_diagonal=not corner)
    check(other, tensors, queries, keys, exact, **given, bottom_right_diagonal=corner)


def test_largest_scores_and_offsets(device, rng):
    """Of all policies together."""
    queries, keys = sides(rng, False, LENGTHS)
    tensors = tensors_of(queries, keys, F32, device)
    module = attention(softmax_type="learnable", return_max_logit=True)
    with torch.no_grad():
        module.softmax_offset.normal_()
    told = where(queries, keys, device)
    out, top = module(*tensors, **told, thd_attention_policies=POLICIES["masks"])
    grad = torch.randn_like(out)
    (of_offset,) = torch.autograd.grad(out, module.softmax_offset, grad)
    expected_top, expected = torch.full_like(top, -torch.inf), torch.zeros_like(of_offset)
    for each in POLICIES["masks"]:
        rows = torch.zeros(queries.tokens, dtype=torch.bool)
        for b, of_queries in queries.rows():
            rows[of_queries] = b in each["sequence_ids"]
        rows = rows.to(device)
        alone, _ = module(*tensors, **told, attn_mask_type=each["mask_type"])
        found = torch.autograd.grad(alone, module.softmax_offset, grad * rows[:, None])[0]
        expected = expected + found
        assert_nmse(out[rows], alone[rows].double(), tol("attention", F32, 40))
        for b in each["sequence_ids"]:
            if queries.lengths[b] == 0:
                continue
            own, of_keys = dict(queries.rows())[b], dict(keys.rows())[b]
            sums = {
                f"cu_seqlens_{side}": torch.tensor([0, n], dtype=torch.int32, device=device)
                for side, n in (("q", queries.lengths[b]), ("kv", keys.lengths[b]))
            }
            part = [tensors[0][own], tensors[1][of_keys], tensors[2][of_keys]]
            _, most = module(*part, **sums, attn_mask_type=each["mask_type"])
            expected_top = torch.maximum(expected_top, most)
    assert_nmse(of_offset, expected.double(), tol("attention", F32, 40))
    assert_nmse(top, expected_top.double(), tol("attention", F32, 40))


def test_layers(device, rng):
    """`MultiheadAttention` and `TransformerLayer` hand them on, also to a module with hooks."""
    lengths = torch.tensor([0, 12, 19, 19, 40], dtype=torch.int32, device=device)
    policies = [policy([0, 2], "padding"), policy([1, 3], "padding_causal", (3, 0))]
    told = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "max_seqlen_q": 21}
    told["max_seqlen_kv"] = 21
    x = torch.randn(40, 64, device=device, requires_grad=True)
    for layer in (
        te.MultiheadAttention(64, 4, qkv_format="thd", attention_dropout=0.0),
        te.TransformerLayer(
            64, 96, 4, attn_input_format="thd", attention_dropout=0.0, hidden_dropout=0.0
        ),
    ):
        kind = (
            "attn_mask_type" if isinstance(layer, te.MultiheadAttention) else "self_attn_mask_type"
        )
        out = layer(x, **told, thd_attention_policies=policies)
        (grad,) = torch.autograd.grad(out.sum(), x)
        for each in policies:  # rows of a sequence depend on that sequence alone
            alone = layer(x, **told, **{kind: each["mask_type"]}, window_size=each["window_size"])
            (of_alone,) = torch.autograd.grad(alone.sum(), x)
            for b in each["sequence_ids"]:
                rows = slice(*lengths[b : b + 2].tolist())
                assert_nmse(out[rows], alone[rows].double(), tol("attention", F32, 64))
                assert_nmse(grad[rows], of_alone[rows].double(), tol("attention", F32, 64))
        core = (
            layer.core_attention if hasattr(layer, "proj") else layer.self_attention.core_attention
        )
        hook = mock.Mock(return_value=None)
        core.register_forward_hook(hook)
        assert_bits(layer(x, **told, thd_attention_policies=policies), out)
        assert hook.call_count == 1


def test_a_decoder_attends_its_encoder_by_the_module(device):
    """Policies are of the attention to itself."""
    layer = te.TransformerLayer(
        64, 96, 4, attn_input_format="thd", attention_dropout=0.0, hidden_dropout=0.0,
        layer_type="decoder",
    )  # fmt: skip
    sums = torch.tensor([0, 7, 16], dtype=torch.int32, device=device)
    x, encoded = torch.randn(16, 64, device=device), torch.randn(16, 64, device=device)
    told = {"cu_seqlens_q": sums, "cu_seqlens_kv": sums, "max_seqlen_q": 9, "max_seqlen_kv": 9}
    policies = [policy([0, 1], "padding_causal")]
    out = layer(x, encoder_output=encoded, **told, thd_attention_policies=policies)
    plain = layer(x, encoder_output=encoded, **told, self_attn_mask_type="padding_causal")
    assert_nmse(out, plain.double(), tol("attention", F32, 64))


def test_fp8(rng):
    """Each policy's attention is in FP8, into one state; the output is in high precision.

    On the CPU: cuDNN has no kernel for packed sequences in FP8.
    """
    lengths = torch.tensor([0, 16, 48], dtype=torch.int32)
    module = te.DotProductAttention(4, 32, qkv_format="thd")
    tensors = [torch.randn(48, 4, 32, dtype=BF16).requires_grad_() for _ in range(3)]
    policies = [policy([0], "padding"), policy([1], "padding_causal")]
    before = te.counters()
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
        out = module(
            *tensors, cu_seqlens_q=lengths, max_seqlen_q=32, thd_attention_policies=policies,
            fp8_output=True,
        )  # fmt: skip
    out.sum().backward()
    after = te.counters()
    assert after["attention.cpu.e4m3"] - before.get("attention.cpu.e4m3", 0) == 2
    assert type(out) is torch.Tensor and out.dtype is BF16
    plain = module(*tensors, cu_seqlens_q=lengths, max_seqlen_q=32, thd_attention_policies=policies)
    assert not torch.equal(out, plain)
    assert_nmse(out, plain.double(), 5 * tol("quantize", torch.float8_e4m3fn))


def test_recompute_and_graphs(device, rng):
    queries, keys = sides(rng, False, LENGTHS)
    tensors = tensors_of(queries, keys, BF16, device)
    module, told = attention(), where(queries, keys, device)
    told["thd_attention_policies"] = POLICIES["masks"]
    out = module(*tensors, **told)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, tensors, grad)
    again = module(*tensors, **told, checkpoint_core_attention=True)
    assert_bits(again, out)
    if device == "cpu":  # where gradients are repeatable
        for one, other in zip(torch.autograd.grad(again, tensors, grad), expected, strict=True):
            assert_bits(one, other)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_bits(compiled(*tensors, **told), out)


@pytest.mark.gpu
def test_cuda_a_captured_call(rng):
    """No length and no policy is brought from the host: later lengths count."""
    queries, keys = sides(rng, False, LENGTHS)
    tensors = [t.detach().nan_to_num() for t in tensors_of(queries, keys, BF16, "cuda")]
    module, told = attention(), where(queries, keys, "cuda")
    told["thd_attention_policies"] = POLICIES["masks"]
    graph, out = captured(lambda: module(*tensors, **told), 1)
    for sums in (told["cu_seqlens_q"], told["cu_seqlens_kv"]):
        sums[4] -= 1  # the last sequence takes a token of the one before it
        graph.replay()
        assert_bits(out, module(*tensors, **told))


REFUSED = {
    "twice": ([policy([0, 1], "padding"), policy([1], "padding")], ValueError, r"name \[0, 1, 1\]"),
    "missing": ([policy([0], "padding")], ValueError, r"each of the 2 sequences"),
    "beyond": ([policy([0, 2], "padding")], ValueError, r"name \[0, 2\]"),
    "key": ([policy([0, 1], "padding", extra=1)], ValueError, r"\[0\]: .*unknown \['extra'\]"),
    "window": ([{"sequence_ids": [0, 1], "mask_type": "padding"}], ValueError, "window_size'"),
    "type": ([policy([0, 1], "junk")], ValueError, r"policies\[0\]\['mask_type'\]='junk'"),
    "arbitrary": ([policy([0, 1], "arbitrary")], ValueError, r"arbitrary' with thd_att.*\[0\]"),
    "size": ([policy([0, 1], "causal", (1, 1))], ValueError, r"\['window_size'\]=\(1, 1\)"),
    "ids": ([policy(["a"], "padding")], TypeError, r"\[0\]\['sequence_ids'\]: \['a'\]"),
    "dict": (["padding"], TypeError, r"policies\[0\]: str, expected a dict"),
    "list": ("padding", TypeError, "thd_attention_policies: 'padding'"),
    "empty": ([], TypeError, r"thd_attention_policies: \[\]"),
}  # fmt: skip
GOOD = [policy([0, 1], "padding")]
BESIDE = {
    "mask": ({"attn_mask_type": "padding"}, ValueError, "with attn_mask_type"),
    "window": ({"window_size": (2, 0)}, ValueError, "with window_size"),
    "format": ({"qkv_format": "thd_2bshd"}, ValueError, "qkv_format='thd_2bshd'"),
    "dispatch": (
        {"thd_attention_policy_dispatch": "x"}, ValueError, "thd_attention_policy_dispatch='x'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED, *BESIDE])
def test_what_is_refused(name, device):
    policies, kind, text = REFUSED.get(name, (GOOD, None, None))
    given, kind, text = ({}, kind, text) if name in REFUSED else BESIDE[name]
    sums = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
    tensors = [torch.randn(8, 4, 16, device=device) for _ in range(3)]
    module = te.DotProductAttention(4, 16, qkv_format="thd")
    with pytest.raises(kind, match=text):
        module(*tensors, cu_seqlens_q=sums, thd_attention_policies=policies, **given)
    with pytest.raises(ValueError, match="thd_attention_policies: ask about each policy"):
        te.explain_attention(module, (8, 4, 16), thd_attention_policies=policies)


def test_a_cache_has_one_mask_type(device):
    cache = te.InferenceParams(2, 8, 4, 16, F32, device=device)
    tensors = [torch.randn(2, 4, 16, device=device) for _ in range(3)]
    module = te.DotProductAttention(4, 16, qkv_format="thd", layer_number=1)
    with pytest.raises(NotImplementedError, match="thd_attention_policies with inference_params"):
        module(*tensors, inference_params=cache, thd_attention_policies=GOOD)
