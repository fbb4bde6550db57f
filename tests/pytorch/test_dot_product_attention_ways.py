# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention under a recompute, `torch.compile` and `torch.autocast`; its copies."""

import copy

import pytest
import torch
from comparators import assert_nmse
from pytorch import attention_model as model
from pytorch.helpers import assert_same_bits
from thinning import pairs_first
from tols import BF16, F32, tol

from transformer_engine.pytorch.attention import DotProductAttention

BATCH, KEYS, HEADS, CHANNELS = 2, 11, 4, 16
SIZES = BATCH, KEYS, KEYS, HEADS, HEADS, CHANNELS, CHANNELS


def test_checkpoint_core_attention(device, backend):
    module = DotProductAttention(HEADS, CHANNELS, attention_dropout=0.3)
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    wanted, arguments = qkv, {}
    if backend != "sdpa":
        bias = torch.randn(1, 1, KEYS, KEYS, device=device, requires_grad=True)
        wanted = [*qkv, bias]
        arguments = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    seed = int(torch.randint(2**31, ()))
    results, saved = [], []
    for recompute in (False, True):
        torch.manual_seed(seed)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t) or t, lambda t: t
        ):
            out = module(*qkv, checkpoint_core_attention=recompute, **arguments)
        results.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
        saved.append(len(kept))
    assert_same_bits(*results)
    assert saved[1] < saved[0]


# The mask is an argument of a backend; recompute is a checkpoint around its call.
@pytest.mark.parametrize(
    ("backend", "mask", "recompute"),
    pairs_first(["native", "sdpa", "unfused"], ["causal", "padding", "lengths"], [False, True]),
    indirect=["backend"],
)
def test_compiled_equals_eager(device, backend, mask, recompute):
    kind = "padding" if mask == "lengths" else mask
    module = DotProductAttention(HEADS, CHANNELS, attention_dropout=0.0, attn_mask_type=kind)
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    padding = torch.arange(KEYS, device=device) >= torch.tensor([KEYS, 5], device=device)[:, None]
    ends = torch.tensor([0, KEYS, KEYS + 5], device=device, dtype=torch.int32)

    def f(*qkv):
        return module(
            *qkv,
            attention_mask=padding[:, None, None] if mask == "padding" else None,
            cu_seqlens_q=ends if mask == "lengths" else None,
            checkpoint_core_attention=recompute,
        )

    torch._dynamo.reset()
    results = []
    for function in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        out = function(*qkv)
        results.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
    assert_same_bits(*results)


def test_compiled_attention_of_a_tensor_to_itself(device, backend):
    module = DotProductAttention(HEADS, CHANNELS)
    x = model.make_qkv("sbhd", SIZES, F32, device)[0]
    torch._dynamo.reset()
    results = []
    for function in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        out = function(x, x, x)
        results.append([out, *torch.autograd.grad(out.square().sum(), x)])
    assert_same_bits(results[0][0], results[1][0])
    # Three gradients are added in one order here and in another there: four roundings.
    assert_nmse(results[1][1], results[0][1].double(), 4 * tol("round", F32))


def test_copies_and_state_dict(device):
    module = DotProductAttention(HEADS, CHANNELS)
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    expected = module(*qkv)
    assert_same_bits(copy.deepcopy(module)(*qkv), expected)
    assert module.state_dict() == {}
    for key in ("_extra_state", "fused_attention._extra_state"):  # of peers
        module.load_state_dict({key: torch.empty(0, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match="Unexpected"):
        module.load_state_dict({"other": torch.empty(0)})


def test_autocast_computes_in_its_dtype(device, backend):
    module = DotProductAttention(HEADS, CHANNELS)
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    with torch.autocast(device, dtype=BF16):
        out = module(*qkv)
    assert out.dtype == BF16
    out.float().sum().backward()
    assert qkv[0].grad.dtype == F32
