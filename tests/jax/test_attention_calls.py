# SPDX-License-Identifier: Apache-2.0
"""Attention as custom calls: results of the definition, and which calls are custom ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparators import assert_nmse
from jax_arrays import normal, to_torch, wide
from tols import tol

from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    SequenceDescriptor,
    fused_attn,
)
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
