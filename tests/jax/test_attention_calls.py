# SPDX-License-Identifier: Apache-2.0
"""Attention as custom calls: results of the definition, and which calls are custom ones."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparators import assert_nmse
from jax_arrays import assert_same, normal, to_torch, wide
from thinning import pairs
from tols import tol

import transformer_engine.jax.flax as te_flax
from transformer_engine import _core
from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    SequenceDescriptor,
    fused_attn,
)
from transformer_engine.jax.attention_calls import pair_of
from transformer_engine.jax.definitions import by_definition

BATCH, QUERIES, KEYS, HEADS, CHANNELS = 2, 24, 40, 4, 16
PLAIN = {
    "seed": None,
    "attn_bias_type": AttnBiasType.NO_BIAS,
    "attn_mask_type": AttnMaskType.NO_MASK,
    "qkv_layout": QKVLayout.BSHD_BSHD_BSHD,
    "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX,
    "scaling_factor": 0.25,
    "dropout_probability": 0.0,
    "is_training": True,
}
LENGTHS = SequenceDescriptor.from_seqlens((np.int32([24, 7]), np.int32([40, 11])))
CASES = {
    "plain": {},
    "causal": {"attn_mask_type": AttnMaskType.CAUSAL_MASK},
    "bottom right": {"attn_mask_type": AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK},
    "window": {"attn_mask_type": AttnMaskType.CAUSAL_MASK, "window_size": (5, 0)},
    "lengths": {"attn_mask_type": AttnMaskType.PADDING_MASK},
    "causal lengths": {"attn_mask_type": AttnMaskType.PADDING_CAUSAL_MASK},
    "bias": {"attn_bias_type": AttnBiasType.POST_SCALE_BIAS},
    "off by one": {"softmax_type": AttnSoftmaxType.OFF_BY_ONE_SOFTMAX},
    "sink": {"softmax_type": AttnSoftmaxType.LEARNABLE_SOFTMAX},
}


def run(options, lengths, bias, sink, *qkv):
    sink = None if sink is None else sink.reshape(1, HEADS, 1, 1)
    return fused_attn(qkv, bias, lengths, softmax_offset=sink, **PLAIN | options)


def fresh(rng, name, dtype, groups):
    """Arguments of `run` behind the options."""
    q, k, v = (
        normal(rng, shape, dtype)
        for shape in (
            (BATCH, QUERIES, HEADS, CHANNELS),
            (BATCH, KEYS, groups, CHANNELS),
            (BATCH, KEYS, groups, 2 * CHANNELS),
        )
    )
    bias = normal(rng, (1, HEADS, QUERIES, KEYS), dtype) if name == "bias" else None
    sink = normal(rng, (HEADS,)) if name == "sink" else None
    return (LENGTHS if "lengths" in name else None), bias, sink, q, k, v


def step(options, grad, lengths, *arrays):
    """Output and gradients."""
    out, back = jax.vjp(functools.partial(run, options, lengths), *arrays)
    return out, back(grad)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_definition(name, dtype, groups, seed):
    rng = np.random.default_rng(seed)
    given = fresh(rng, name, dtype, groups)
    grad = normal(rng, (BATCH, QUERIES, HEADS, 2 * CHANNELS), dtype)
    of_case = jax.jit(functools.partial(step, CASES[name]))
    text = str(jax.make_jaxpr(functools.partial(step, CASES[name]))(grad, *given))
    assert text.count("te_operator") == 2
    found, wanted = of_case(grad, *given), jax.jit(by_definition(of_case.__wrapped__))(grad, *given)
    assert_nmse(to_torch(found[0]), wide(wanted[0]), 2 * tol("attention", dtype, KEYS))
    for one, other in zip(*map(jax.tree.leaves, (found[1], wanted[1])), strict=True):
        assert one.dtype == other.dtype
        assert_nmse(to_torch(one), wide(other), 4 * tol("attention", dtype, KEYS))


def test_dropout_is_that_of_the_key(seed):
    """A key makes the same decisions again, in the backward too; another one makes others."""
    rng = np.random.default_rng(seed)
    _, _, _, q, k, v = fresh(rng, "plain", torch.bfloat16, HEADS)
    options = {"dropout_probability": 0.5}
    outs = [
        run(options | {"seed": jax.random.key(number)}, None, None, None, q, k, jnp.ones_like(v))
        for number in (seed, seed, seed + 1)
    ]
    assert jnp.array_equal(outs[0], outs[1]) and not jnp.array_equal(outs[0], outs[2])
    # With values of 1 an output is the sum of the weights that are kept, whose gradient is they.
    seeded = options | {"seed": jax.random.key(seed)}
    alone = functools.partial(run, seeded, None, None, None, q, k)
    grad = jax.vjp(alone, jnp.ones_like(v))[1](outs[0] * 0 + 1)[0]
    total = float(outs[0].astype(jnp.float32).sum())
    assert abs(float(grad.astype(jnp.float32).sum()) / total - 1.0) < KEYS * 2.0**-8


@pytest.mark.parametrize(
    "change",
    [
        {"return_max_logit": True},
        {"attn_bias_type": AttnBiasType.PRE_SCALE_BIAS},
    ],
)
def test_what_is_by_definition(change, seed):
    rng = np.random.default_rng(seed)
    name = "bias" if "attn_bias_type" in change else "plain"
    given = fresh(rng, name, torch.bfloat16, HEADS)
    assert "te_operator" not in str(jax.make_jaxpr(functools.partial(run, change))(*given))
    assert "te_operator" in str(jax.make_jaxpr(functools.partial(run, CASES[name]))(*given))


# ---- packed rows ---------------------------------------------------------------------------------


SEGMENTS = 3


@pytest.fixture
def on_device(device):
    """The kind of device under test, which arrays of JAX are on."""
    with jax.default_device(jax.devices(device)[0]):
        yield device


def packed_lengths(rng, tokens):
    """Lengths of the sequences of each row and where they begin, with gaps; one is not there."""
    cuts = np.sort(rng.choice(np.arange(1, tokens), (BATCH, 2 * SEGMENTS - 1), replace=False))
    cuts = np.concatenate([np.zeros((BATCH, 1), int), cuts], axis=1).astype(np.int32)
    cuts = np.array([np.sort(row) for row in cuts])
    starts, ends = cuts[:, ::2], cuts[:, 1::2]
    lengths = np.ascontiguousarray(ends - starts)
    lengths[1, 1] = -1
    return lengths, np.ascontiguousarray(starts)


def described(lengths, starts, tokens, by):
    """A `SequenceDescriptor` of queries and keys."""
    if by == "offsets":
        return SequenceDescriptor.from_seqlens_and_offsets(tuple(lengths), tuple(starts))
    ids = [np.zeros((BATCH, count), np.int32) for count in tokens]
    places = [np.zeros_like(one) for one in ids]
    for side, row, number in itertools.product(range(2), range(BATCH), range(SEGMENTS)):
        start, length = starts[side][row, number], lengths[side][row, number]
        span = slice(start, start + max(length, 0))
        ids[side][row, span] = number + 1
        places[side][row, span] = np.arange(max(length, 0))
    given = (tuple(ids), tuple(places)) if by == "positions" else (tuple(ids),)
    return SequenceDescriptor.from_segment_ids_and_pos(*given)


def by_operators(device, options, lengths, starts, grad, pair, *heads):
    """Output and gradients of the operators, called as PyTorch modules call them."""
    q, k, v, grad = (to_torch(each).flatten(0, 1)[None].to(device) for each in (*heads, grad))
    mask, window = options["attn_mask_type"], options.get("window_size", (-1, -1))
    fields = {"scale": PLAIN["scaling_factor"], "window_left": window[0]}
    fields |= {"window_right": 0 if mask.is_causal() else window[1]}
    fields |= {"bottom_right": mask.is_bottom_right(), "rng": pair}
    fields |= {"dropout": options.get("dropout_probability", 0.0)}
    for name, side, array in (("query", 0, heads[0]), ("key", 1, heads[1])):
        count = array.shape[1]
        begin = starts[side] + count * np.arange(BATCH, dtype=np.int32)[:, None]
        offsets = torch.tensor([*begin.reshape(-1), BATCH * count], dtype=torch.int32)
        fields[f"{name}_offsets"] = offsets.to(device)
        own = torch.tensor(lengths[side]).clamp(min=0)
        fields[f"{name}_lengths"] = own.reshape(-1).to(device)
    fields |= {"max_queries": heads[0].shape[1], "max_keys": heads[1].shape[1]}
    out = q.new_empty(*q.shape[:3], v.shape[3])
    statistics = torch.empty(q.shape[:3], device=device)
    _core.obeying("attention")(q, k, v, out, statistics=statistics, **fields)
    names = ("grad_query", "grad_key", "grad_value")
    grads = {name: torch.empty_like(each) for name, each in zip(names, (q, k, v), strict=True)}
    _core.obeying("attention_backward")(grad, q, k, v, out, statistics, **grads, **fields)
    shaped = zip((out, *grads.values()), (heads[0], *heads), strict=True)
    return [one.reshape(*like.shape[:3], -1) for one, like in shaped]


@pairs(
    kind=[kind for kind in AttnMaskType if kind.is_padding()],
    window=[None, (6, -1)],
    itself=[True, False],
    groups=[4, 2],
    dropout=[0.0, 0.3],
    by=["offsets", "segments", "positions"],
    dtype=[torch.bfloat16, torch.float16],
)
def test_packed_rows_have_the_bits_of_the_operators(
    on_device, rng, seed, counters, kind, window, itself, groups, dropout, by, dtype
):
    """Of attention to itself and of queries to keys of other lengths, with gaps between them."""
    *_, q, k, v = fresh(rng, "plain", dtype, groups)
    tokens = (QUERIES, QUERIES if itself else KEYS)
    k, v = k[:, : tokens[1]], v[:, : tokens[1]]
    lengths, starts = zip(*(packed_lengths(rng, count) for count in tokens), strict=True)
    lengths[1][0, 2] = 0  # of queries that see no key
    if itself:
        lengths, starts = (lengths[0],) * 2, (starts[0],) * 2
    options = {"attn_mask_type": kind, "qkv_layout": QKVLayout.THD_THD_THD}
    options |= {"window_size": window} if window else {}
    options |= {"max_segments_per_seq": SEGMENTS, "dropout_probability": dropout}
    key = jax.random.key(seed)
    grad = normal(rng, (BATCH, QUERIES, HEADS, 2 * CHANNELS), dtype)
    sequences = described(lengths, starts, tokens, by)
    call = functools.partial(step, options | {"seed": key})
    made = jax.block_until_ready(jax.jit(call)(grad, sequences, None, None, q, k, v))
    out, (*_, of_q, of_k, of_v) = made
    ran = {name: count for name, count in counters().items() if name.startswith("attention")}
    assert sum(ran.values()) == 2, ran
    pair = None
    if dropout:
        pair = torch.from_numpy(np.array(pair_of(key)).view(np.int64)).to(on_device)
    wanted = by_operators(on_device, options, lengths, starts, grad, pair, q, k, v)
    if on_device != "cpu":  # where sums of this gradient have no fixed order
        bound = 4 * tol("attention", dtype, KEYS)
        assert_nmse(to_torch(of_q), wanted.pop(1).cpu().double(), bound)
        made = out, of_k, of_v
    else:
        made = out, of_q, of_k, of_v
    for one, other in zip(made, wanted, strict=True):
        assert_same(one, other)


def test_rows_that_are_not_as_said(on_device, rng):
    """More segments than said, one in two pieces and positions of another order: error or NaN."""
    q = normal(rng, (1, 12, HEADS, CHANNELS), torch.bfloat16)
    options = {"attn_mask_type": AttnMaskType.PADDING_MASK, "max_segments_per_seq": 2}
    ids, places = np.repeat([1, 2, 3], 4), np.arange(12) % 4
    for given in ([ids], [[1, 1, 2, 2, 1, 1, 0, 0, 0, 0, 0, 0]], [ids % 3, places[::-1]]):
        given = [np.asarray(one, np.int32)[None] for one in given]
        sequences = SequenceDescriptor.from_segment_ids_and_pos(*given)
        if on_device != "cpu":
            assert jnp.isnan(run(options, sequences, None, None, q, q, q)).any()
            continue
        with pytest.raises(jax.errors.JaxRuntimeError, match="-1 of sequence 0"):
            jax.block_until_ready(run(options, sequences, None, None, q, q, q))
    with pytest.raises(ValueError, match="segment_pos"):
        SequenceDescriptor.from_segment_ids_and_pos(given[0], is_segment_ids_reordered=True)


def test_the_flax_module_runs_custom_calls(rng):
    """Unless the largest scores are wanted, which the kernels of a GPU do not write."""
    *_, q, k, v = fresh(rng, "plain", torch.bfloat16, HEADS)
    for wants_largest in (False, True):
        module = te_flax.DotProductAttention(CHANNELS, HEADS, return_max_logit=wants_largest)
        text = str(jax.make_jaxpr(functools.partial(module.apply, {}))(q, k, v))
        assert ("te_operator" in text) is not wants_largest
