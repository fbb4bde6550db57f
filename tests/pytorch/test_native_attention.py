# SPDX-License-Identifier: Apache-2.0
"""`plan.attend`: autograd, torch.compile and torch.func on attention by itself."""

import pytest
import torch
from attention_reference import allowed, softmax
from buffers import normal
from comparators import assert_bits, assert_grad64
from tols import BF16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.backends import _cudnn_lacks as cudnn_lacks
from transformer_engine.pytorch.attention.masks import Limits
from transformer_engine.pytorch.attention.plan import attend
from transformer_engine.pytorch.attention.problem import AttentionOptions, CoreOptions, Heads

SHAPE = (2, 4, 30, 50)  # batch, heads, queries, keys


def leaves(rng, dtype):
    made = {
        "query": normal(rng, (2, 30, 4, 16), dtype),
        "key": normal(rng, (2, 50, 2, 16), dtype),
        "value": normal(rng, (2, 50, 2, 8), dtype),
        "bias": normal(rng, (1, 4, 1, 50), dtype),
    }
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


CORE = te.DotProductAttention(4, (16, 8), 2, qkv_format="bshd")


def run(query, key, value, bias, dropout=0.0):
    limits = Limits(None, bias, (-1, 0), True)
    heads = Heads((query, key, value))
    return attend(CORE, CoreOptions(), heads, "bshd", limits, 0.25, dropout).unflatten(-1, (4, 8))


def definition(query, key, value, bias):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scores = 0.25 * q @ k.repeat_interleave(2, 1).mT + bias
    weights = softmax(scores, allowed(SHAPE, None, -1, 0, 20))
    return (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_gradients(dtype, rng):
    inputs = leaves(rng, dtype)
    output = run(**inputs)
    grad = normal(rng, output.shape, dtype)
    grads = dict(zip(inputs, torch.autograd.grad(output, list(inputs.values()), grad), strict=True))
    assert_grad64(grads, definition, inputs, grad, tol("attention", dtype, 240))


def test_compiled_gives_the_same_bits(rng):
    inputs = leaves(rng, F32)

    def step(**tensors):
        return run(**tensors)

    results = []
    for function in (step, torch.compile(step, fullgraph=True)):
        output = function(**inputs)
        grads = torch.autograd.grad(output.square().sum(), list(inputs.values()))
        results.append((output, *grads))
    for made, expected in zip(*results, strict=True):
        assert_bits(made, expected)


def test_functional_gradient_has_the_same_bits(rng):
    inputs = leaves(rng, F32)

    def loss(query):
        return run(**inputs | {"query": query}).square().sum()

    (expected,) = torch.autograd.grad(loss(inputs["query"]), inputs["query"])
    assert_bits(torch.func.grad(loss)(inputs["query"].detach()), expected)


def test_dropout_follows_the_seed(rng):
    inputs = leaves(rng, F32)
    made = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        output = run(**inputs, dropout=0.3)
        made.append((output, *torch.autograd.grad(output.sum(), [inputs["query"]])))
    for first, second in zip(made[0], made[1], strict=True):
        assert_bits(first, second)
    assert not torch.equal(made[0][0], made[2][0])


def test_inputs_without_unit_stride_are_copied(rng):
    inputs = leaves(rng, F32)
    expected = run(**inputs)
    turned = {n: t.transpose(-1, -2).contiguous().transpose(-1, -2) for n, t in inputs.items()}
    turned["bias"] = inputs["bias"]
    assert_bits(run(**turned), expected)


def test_the_gradient_of_a_turned_bias_is_dense(rng):
    """The operator writes it so, however the bias lies."""
    inputs = leaves(rng, F32)
    turned = normal(rng, (1, 4, 50, 30), F32).transpose(2, 3)
    made = []
    for bias in (turned, turned.contiguous()):
        given = {**inputs, "bias": bias.requires_grad_()}
        made.append(torch.autograd.grad(run(**given).square().sum(), given["bias"])[0])
    assert made[0].is_contiguous()
    assert_bits(*made)


def _options(**given):
    return AttentionOptions(core_attention_bias_type="post_scale_bias", **given)


@pytest.mark.parametrize("gradients", [True, False])
def test_gradients_of_biases_that_cudnn_makes(gradients):
    """The choice is that of the recompute, whose first pass runs without gradients."""
    query, sizes = torch.zeros(2, 30, 4, 16, dtype=BF16), SHAPE

    def odd(shape, dtype=BF16, capped=False, **more):
        bias = torch.zeros(shape, dtype=dtype, requires_grad=True)
        return bool(
            cudnn_lacks(
                _options(core_attention_bias=bias, **more), sizes, query.dtype, capped, False
            )
        )

    with torch.set_grad_enabled(gradients):
        assert not odd((1, 4, 30, 50)) and not odd((2, 1, 30, 50))
        assert odd((1, 4, 1, 50)) and odd((1, 4, 30, 1)) and odd((1, 4, 30, 50), F32)
        assert odd((1, 4, 30, 50), capped=True)


def test_masks_and_biases_over_one_key_are_not_for_cudnn():
    """There is a bias of alibi too, which the kind of it says."""
    query, one, two = torch.zeros(2, 5, 4, 8), (2, 4, 5, 1), (2, 4, 5, 2)
    mask, bias = torch.zeros(2, 1, 5, 1, dtype=torch.bool), torch.zeros(2, 1, 5, 1)
    for given in (
        {"attention_mask": mask, "core_attention_bias_type": "no_bias"},
        {"core_attention_bias": bias, "core_attention_bias_type": "post_scale_bias"},
        {"core_attention_bias_type": "alibi"},
    ):
        assert "over one key" in cudnn_lacks(
            AttentionOptions(**given), one, query.dtype, 0.0, False
        )
        assert not cudnn_lacks(AttentionOptions(**given), two, query.dtype, 0.0, False)
    assert not cudnn_lacks(AttentionOptions(), one, query.dtype, 0.0, False)
    assert not cudnn_lacks(
        AttentionOptions(attention_mask=mask), (2, 4, 1, 2), query.dtype, 0.0, False
    )
