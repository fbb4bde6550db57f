# SPDX-License-Identifier: Apache-2.0
"""Calls of `DotProductAttention`, and the assertion that plans give the bits of its operator."""

import contextlib
import itertools

import torch
from pytorch.attention_operators import by_operators, unkept
from pytorch.helpers import assert_same_bits, same_draws
from pytorch.layer_ways import dtype_of

import transformer_engine.pytorch as te

HEADS, CHANNELS, BATCH, QUERIES, KEYS = 4, 16, 3, 10, 14

# By name: arguments of the module, then a function from the device to those of a call.
CASES = {
    "causal": ({}, lambda at: {}),
    "no mask": ({"attn_mask_type": "no_mask"}, lambda at: {}),
    "bottom right": ({"attn_mask_type": "causal_bottom_right"}, lambda at: {}),
    "window": ({"attn_mask_type": "no_mask", "window_size": (2, 3)}, lambda at: {}),
    "window of a call": ({}, lambda at: {"window_size": (3, 0)}),
    "dropout": ({"attention_dropout": 0.3}, lambda at: {}),
    "scale": ({"softmax_scale": 0.7, "attn_mask_type": "no_mask"}, lambda at: {}),
    "grouped": ({"num_gqa_groups": 2}, lambda at: {}),
    "values of other channels": ({"kv_channels": (CHANNELS, 8)}, lambda at: {}),
    "off by one": ({"softmax_type": "off-by-one"}, lambda at: {}),
    "learnable": ({"softmax_type": "learnable"}, lambda at: {}),
    "alibi": ({}, lambda at: {"core_attention_bias_type": "alibi"}),
    "slopes": (
        {"attn_mask_type": "no_mask"},
        lambda at: {
            "core_attention_bias_type": "alibi",
            "alibi_slopes": torch.rand(HEADS, device=at),
            "bottom_right_diagonal": False,
        },
    ),
    "bias": (
        {"attn_mask_type": "no_mask"},
        lambda at: {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": torch.randn(1, HEADS, QUERIES, KEYS)
            .to(at, dtype_of(at))
            .requires_grad_(),
        },
    ),
    "arbitrary": (
        {"attn_mask_type": "arbitrary"},
        lambda at: {"attention_mask": (torch.rand(BATCH, 1, QUERIES, KEYS) < 0.4).to(at)},
    ),
    "padding": (
        {"attn_mask_type": "padding"},
        lambda at: {"attention_mask": (ends_of(QUERIES).to(at), ends_of(KEYS).to(at))},
    ),
    "lengths": (
        {"attn_mask_type": "padding_causal"},
        lambda at: {"cu_seqlens_q": sums(at, 4, 0, 10), "cu_seqlens_kv": sums(at, 14, 1, 9)},
    ),
}  # fmt: skip
LONG = QUERIES, KEYS
PACKED = {"attn_mask_type": "padding_causal", "qkv_format": "thd"}


def sums(device, *lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def ends_of(length):
    return torch.rand(BATCH, 1, 1, length) < 0.4


def packed_arguments(device):
    made = {"cu_seqlens_q": sums(device, 3, 0, 7), "cu_seqlens_kv": sums(device, 5, 2, 7)}
    return {**made, "max_seqlen_q": QUERIES, "max_seqlen_kv": KEYS}


def make(**options):
    core = te.DotProductAttention(HEADS, **{"kv_channels": CHANNELS, **options})
    if core.softmax_offset is not None:
        torch.nn.init.normal_(core.softmax_offset)
    return core


def leaves_of(core, device, form="sbhd", dtype=None, sizes=(QUERIES, KEYS), batch=BATCH):
    """Queries, keys and values that want gradients."""
    k, v = core.hidden_size_per_attention_head_k, core.hidden_size_per_attention_head_v
    made = []
    for length, heads, channels in (
        (sizes[0], HEADS, k),
        (sizes[1], core.num_gqa_groups, k),
        (sizes[1], core.num_gqa_groups, v),
    ):
        lead = {"sbhd": (length, batch), "bshd": (batch, length), "thd": (length,)}[form]
        tensor = torch.randn(*lead, heads, channels).to(device, dtype or dtype_of(device))
        made.append(tensor.requires_grad_())
    return made


def step(core, tensors, given):
    """Output and gradients; what is called next draws the same dropout."""
    leaves = [*tensors, *core.parameters()]
    bias = given.get("core_attention_bias")
    leaves += [] if bias is None else [bias]
    with same_draws(tensors[0].device):
        out = core(*tensors, **given)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grad = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    return [out, *torch.autograd.grad(out, wanted, grad)]


@contextlib.contextmanager
def plans_only(native_runs):
    """Assert that a block runs plans, and no operator of attention."""
    native_runs.clear()
    yield
    assert {"run", "run_staged"} & set(native_runs)
    assert not {"attention", "attention_backward"} & set(native_runs)


def assert_same_step(core, tensors, given, native_runs):
    """Assert that plans give the bits of the operator: those made now, and those found again."""
    with by_operators():
        expected = step(core, tensors, given)
    with plans_only(native_runs):
        for _ in range(3):
            assert_same_bits(step(core, tensors, given), expected)
    with unkept(), plans_only(native_runs):
        assert_same_bits(step(core, tensors, given), expected)
    with torch.no_grad(), plans_only(native_runs):
        assert_same_bits(core(*tensors, **given), expected[0].detach())
