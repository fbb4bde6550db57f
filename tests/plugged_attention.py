# SPDX-License-Identifier: Apache-2.0
"""Attention and layers with it under implementations that a test registers."""

import contextlib
import threading

import torch
from comparators import assert_nmse
from plugged import native, register
from tols import tol

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine.plugin import adapters, core as plugin

LENGTH, BATCH, HEADS, GROUPS, DIM = 12, 2, 4, 2, 16
HIDDEN = HEADS * DIM
FORWARD, BACKWARD = "fused_attn_fwd", "fused_attn_bwd"


def changed(op, factor=2.0, seen=None):
    """Register an implementation whose first result is another one."""

    def run(*given, **named):
        made = native(op)(*given, **named)
        if seen is not None:
            seen.append((threading.get_ident(), given))
        if isinstance(made, list | tuple):
            return [made[0] * factor, *made[1:]]
        return made * factor

    register(op, run)


def vendor():
    return plugin.with_preference("vendor")


def reference():
    return plugin.with_preference("reference")


def ran():
    """Operators of which others than this library's implementations ran."""
    return {key.partition("/")[0] for key in plugins.counts() if not key.endswith(adapters.NATIVE)}


def sums(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def normal(*shape, device, dtype):
    return torch.randn(*shape, device=device).to(dtype)


def layer(device, dtype, **options):
    torch.manual_seed(5)
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype, **options}
    return te.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, device=device, **given)


def grads_of(module, x, policy, **call):
    x = x.detach().clone().requires_grad_()
    with policy:
        out = module(x, **call)
    learned = [x, *module.parameters()]
    return [out.detach(), *torch.autograd.grad((out.float() * out.float()).sum(), learned)]


PACKED = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
# Options of the module, of the call (functions of the device), queries where there are fewer.
CASES = {
    "no_mask": ({"attn_mask_type": "no_mask"}, {}),
    "causal": ({}, {}),
    "bshd": ({"qkv_format": "bshd"}, {}),
    "corner": ({"attn_mask_type": "causal_bottom_right"}, {"queries": 7}),
    "window": ({"window_size": (3, 0)}, {}),
    "both sides": ({"attn_mask_type": "no_mask", "window_size": (3, 2)}, {}),
    "padding": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": (0, 5, 17), "cu_seqlens_kv": (0, 12, 20)},
    ),
    "padding of nothing": ({"attn_mask_type": "padding_causal"}, {}),
    "padding causal": (
        {"attn_mask_type": "padding_causal_bottom_right"},
        {"cu_seqlens_q": (0, 5, 12), "cu_seqlens_kv": (0, 12, 20)},
    ),
    "packed": (PACKED, {"cu_seqlens_q": (0, 5, 24), "max_seqlen_q": 19}),
    "gaps": (
        PACKED,
        {
            "cu_seqlens_q": (0, 5, 15),
            "cu_seqlens_q_padded": (0, 8, 24),
            "max_seqlen_q": 10,
        },
    ),
    "alibi": ({}, {"core_attention_bias_type": "alibi"}),
    "bias": ({}, {"core_attention_bias_type": "post_scale_bias", "bias": (1, HEADS, 12, 12)}),
    "bias of a key": (
        {"attn_mask_type": "no_mask"},
        {"core_attention_bias_type": "post_scale_bias", "bias": (BATCH, 1, 1, 12)},
    ),
    "off by one": ({"softmax_type": "off-by-one"}, {}),
    "learnable": ({"softmax_type": "learnable"}, {}),
    "largest": ({"return_max_logit": True}, {}),
}
ON_THE_CPU_ALONE = ("largest", "bias of a key")


class Attention:
    """A module, the tensors of a call, and a step of it."""

    def __init__(self, name, device, dtype):
        torch.manual_seed(3)
        options, call = CASES[name]
        call = dict(call)
        self.module = te.DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, **options)
        self.module.to(device)
        form, queries = options.get("qkv_format", "sbhd"), call.pop("queries", LENGTH)
        lead = {
            "sbhd": lambda n: (n, BATCH),
            "bshd": lambda n: (BATCH, n),
            "thd": lambda n: (n * BATCH,),
        }[form]
        shapes = [(*lead(queries), HEADS, DIM), *[(*lead(LENGTH), GROUPS, DIM)] * 2]
        self.tensors = [normal(*shape, device=device, dtype=dtype) for shape in shapes]
        self.bias = None
        if "bias" in call:
            self.bias = normal(*call.pop("bias"), device=device, dtype=dtype)
        self.call = {
            name: sums(device, *value) if isinstance(value, tuple) else value
            for name, value in call.items()
        }

    def step(self, policy=None, wrap=None):
        """Results and gradients; the backward is outside of the policy."""
        tensors = [t.detach().clone().requires_grad_() for t in self.tensors]
        call, learned = dict(self.call), [*tensors, *self.module.parameters()]
        if self.bias is not None:
            call["core_attention_bias"] = bias = self.bias.detach().clone().requires_grad_()
            learned.append(bias)
        with policy or contextlib.nullcontext():
            out = (wrap or (lambda f, *given, **named: f(*given, **named)))(
                self.module, *tensors, **call
            )
        out, *top = out if isinstance(out, tuple) else (out,)
        weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
        (out.float() * weights.sin()).sum().backward()
        grads = [each.grad for each in learned]
        self.module.zero_grad()
        return [out.detach(), *top, *grads]


def assert_near(got, wanted, dtype):
    """Of two ways to attend."""
    for one, other in zip(got, wanted, strict=True):
        assert_nmse(one, other, 4 * tol("attention", dtype, LENGTH))
