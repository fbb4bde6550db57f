# SPDX-License-Identifier: Apache-2.0
"""Packed sequences on CUDA, which cuDNN's kernels run: values, gaps, plans, memory and capture."""

import itertools
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from attention_reference import allowed, softmax
from backend.packed_sequences import Packing
from comparators import assert_nmse
from pytorch.cudnn_attention_cases import SHARING
from pytorch.helpers import assert_same_bits, captured
from tols import BF16, EPS, F16, tol

from transformer_engine import _core
from transformer_engine.pytorch.attention import DotProductAttention

pytestmark = pytest.mark.gpu

BOTH = ("query", "key")


TOGETHER = {"": (0, 0), "all": (1, 1), "heads": (1, 0), "gradients": (0, 1)}
"""Which of a problem's heads and gradients lie side by side in one matrix."""


def parts_of(tokens, counts, dtype, together):
    """Queries, keys and values of random numbers, views of one matrix or tensors of their own."""
    if not together:
        shapes = [(t, *n) for t, n in zip(tokens, counts, strict=True)]
        return [torch.randn(shape).to("cuda", dtype) for shape in shapes]
    sizes = [n * d for n, d in counts]
    whole = torch.randn(tokens[0], sum(sizes)).to("cuda", dtype)
    parts = zip(whole.split(sizes, 1), counts, strict=True)
    return [part.unflatten(1, n) for part, n in parts]


def problem(sides, shape, dtype, together=""):
    """Query, key, value, gradient of the output, and memory for the gradients, NaN in gaps.

    `shape`: heads, groups, channels of keys, channels of values.
    """
    heads, groups, d_k, d_v = shape
    counts = ((heads, d_k), (groups, d_k), (groups, d_v))
    tokens = sides[0].tokens, sides[1].tokens, sides[1].tokens
    tensors, grads = (parts_of(tokens, counts, dtype, one) for one in TOGETHER[together])
    grad = torch.randn(tokens[0], heads, d_v).to("cuda", dtype)
    for tensor, side in zip((*tensors, grad), (*sides, sides[1], sides[0]), strict=True):
        tensor[~side.owned()] = math.nan
    for tensor in grads:
        tensor.fill_(math.nan)
    return tensors, grad, grads


def attended(sides, tensors, grad, grads, *, with_lengths=True, deterministic=0, **limits):
    """Output, gradients and statistics, of memory that holds NaN."""
    given = {"max_queries": sides[0].longest, "max_keys": sides[1].longest, **limits}
    for name, side in zip(BOTH, sides, strict=True):
        given[f"{name}_offsets"] = side.vector("offsets", "cuda")
        if with_lengths:
            given[f"{name}_lengths"] = side.vector("lengths", "cuda")
    inputs = [tensor[None] for tensor in tensors]
    out = torch.full_like(grad, math.nan)
    statistics = torch.full((1, *out.shape[:2]), math.nan, device="cuda")
    torch.full((2**24,), math.nan, device="cuda")  # freed, for the allocator to hand out
    _core.attention(*inputs, out[None], statistics=statistics, **given)
    names = ("grad_query", "grad_key", "grad_value")
    given |= {n: t[None] for n, t in zip(names, grads, strict=True)}
    _core.attention_backward(
        grad[None], *inputs, out[None], statistics, deterministic=deterministic, **given
    )
    return [out, *grads, statistics[0]]


def definition(sides, tensors, grad, dtype, limits, factors=None):
    """Output and gradients, sequence by sequence, by autograd on the CPU."""
    leaves = [t.detach().cpu().nan_to_num().to(dtype).requires_grad_() for t in tensors]
    queries, keys = sides
    group = tensors[0].shape[1] // tensors[1].shape[1]
    at, rows = [torch.arange(0)], [leaves[0].new_zeros(0, *grad.shape[1:])]
    for (b, of_queries), (_, of_keys) in zip(queries.rows(), keys.rows(), strict=True):
        n, m = queries.lengths[b], keys.lengths[b]
        if n == 0 or m == 0:
            continue
        pairs = zip(leaves, (of_queries, of_keys, of_keys), strict=True)
        q, k, v = (t[where].transpose(0, 1) for t, where in pairs)
        k, v = (t.repeat_interleave(group, 0) for t in (k, v))
        window = [limits.get(f"window_{side}", -1) for side in ("left", "right")]
        may = allowed((1, 1, n, m), None, *window, m - n if limits.get("bottom_right") else 0)[0]
        scores, cap = limits["scale"] * (q @ k.mT), limits.get("softcap", 0.0)
        scores = cap * torch.tanh(scores / cap) if cap else scores
        weights = softmax(scores, may.expand(len(q), -1, -1))
        weights = weights if factors is None else weights * factors[b]
        rows.append((weights.to(dtype) @ v).transpose(0, 1))
        at.append(torch.arange(of_queries.start, of_queries.stop))
    out = leaves[0].new_zeros(grad.shape).index_copy(0, torch.cat(at), torch.cat(rows))
    wide = grad.detach().cpu().nan_to_num().to(dtype)
    if not out.requires_grad:
        return [out, *map(torch.zeros_like, leaves)]
    return [out.detach(), *torch.autograd.grad(out, leaves, wide)]


def assert_right(sides, shape, dtype, together="", **limits):
    """Errors of at most twice those of a naive computation, and a rounding; 0 in gaps."""
    limits.setdefault("scale", shape[2] ** -0.5)
    tensors, grad, grads = problem(sides, shape, dtype, together)
    *found, statistics = attended(sides, tensors, grad, grads, **limits)
    exact = definition(sides, tensors, grad, torch.float64, limits)
    naive = definition(sides, tensors, grad, dtype, limits)
    for at, (tensor, wide, near) in enumerate(zip(found, exact, naive, strict=True)):
        tensor, side = tensor.cpu().double(), sides[at in (2, 3)]
        assert not tensor[~side.owned()].any()
        if tensor.numel() == 0:
            continue
        error, allowance = (tensor - wide).abs().max(), 2 * (near.double() - wide).abs().max()
        # A rounding of each of the terms, probabilities of up to 1 times numbers of up to 4.
        allowance += EPS[dtype] / 2 * (4 + wide.abs().max())
        assert error <= allowance, f"result {at}: error {error:.3e} exceeds {allowance:.3e}"
    none = ~sides[0].owned()
    assert (statistics.cpu()[none] == -math.inf).all() and not statistics.isnan().any()


@pytest.mark.parametrize("part", range(10))
def test_random_problems(part, rng):
    del part
    for _ in range(4):
        batch, gaps = int(rng.choice([1, 2, 3, 6])), bool(rng.random() < 0.5)
        longest = rng.choice([1, 7, 64, 100, 128, 200, 300], 2)
        together = str(rng.choice(list(TOGETHER)))
        queries = Packing(rng, batch, int(longest[0]), gaps=gaps)
        keys = queries if together else Packing(rng, batch, int(longest[1]), gaps=gaps)
        heads = int(rng.choice([1, 2, 4, 6]))
        groups = int(rng.choice([g for g in range(1, heads + 1) if heads % g == 0]))
        channels = ((64, 64), (128, 128), (128, 64), (192, 128), (40, 24), (8, 8), (256, 256))
        shape = (heads, groups, *channels[rng.integers(len(channels))])
        limits = {"deterministic": int(rng.random() < 0.2)}
        if rng.random() < 0.6:
            limits["window_right"] = int(rng.choice([0, 0, 5, 50]))
        if rng.random() < 0.3:
            limits["window_left"] = int(rng.choice([0, 3, 40]))
        if len(limits) > 1 and rng.random() < 0.4:
            limits["bottom_right"] = 1
        if rng.random() < 0.3:
            limits["softcap"] = float(rng.choice([0.5, 20.0]))
        with_lengths = gaps or bool(rng.random() < 0.3)
        dtype = (BF16, F16)[rng.integers(2)]
        print(queries.lengths, keys.lengths, gaps, shape, dtype, together, with_lengths, limits)
        sides = queries, keys
        assert_right(sides, shape, dtype, together, with_lengths=with_lengths, **limits)


def test_sequences_that_exceed_their_bound(rng):
    """They are NaN, and no other is."""
    side = Packing(rng, 3, 128, lengths=[50, 200, 30])
    tensors, grad, grads = problem((side, side), (2, 2, 64, 64), BF16)
    lost = torch.zeros(side.tokens, dtype=torch.bool)
    lost[side.rows()[1][1]] = True
    for tensor in attended((side, side), tensors, grad, grads, with_lengths=False):
        assert tensor.cpu()[lost].isnan().all() and tensor.cpu()[~lost].isfinite().all()


@pytest.mark.parametrize("batch", [0, 2])
def test_no_tokens(batch, rng):
    side = Packing(rng, batch, 0, lengths=[0] * batch)
    other = Packing(rng, batch, 9, gaps=True, lengths=[9] * batch)
    for sides in ((side, side), (side, other), (other, side)):
        tensors, grad, grads = problem(sides, (2, 1, 64, 64), BF16)
        *found, statistics = attended(sides, tensors, grad, grads)
        assert not any(tensor.any() for tensor in found) and (statistics == -math.inf).all()


def test_repeatable_gradients(rng):
    side = Packing(rng, 5, 300, gaps=True, lengths=[300, 1, 0, 250, 77])
    tensors, grad, _ = problem((side, side), (8, 2, 128, 128), BF16)
    made = []
    for _ in range(5):
        grads = [torch.full_like(tensor, math.nan) for tensor in tensors]
        arguments = (side, side), tensors, grad, grads
        made.append(attended(*arguments, deterministic=1, window_right=0, scale=0.1))
    for each in made[1:]:
        assert_same_bits(each, made[0])


@pytest.mark.parametrize("limits", [{}, {"window_right": 0}], ids=["full", "causal"])
@pytest.mark.parametrize("groups", [4, 2])
def test_dropout(groups, limits, rng):
    """The decisions are read from an output of equal weights, and are those of the gradients."""
    probability, longest = 0.3, 100
    side = Packing(rng, 4, longest, gaps=True, lengths=[longest, 0, 1, 77])
    sides = side, side
    drops = {"dropout": probability, "rng": torch.randint(2**40, (2,), device="cuda")}
    marks, grad, grads = problem(sides, (4, 4, 64, 128), BF16)
    marks[0].zero_()
    marks[1].zero_()
    for b, where in side.rows():
        marks[2][where] = torch.eye(128)[: side.lengths[b], None].to("cuda", BF16)
    marked = attended(sides, marks, grad, grads, scale=1.0, **drops)[0].cpu()
    kept = [
        (marked[where].transpose(0, 1)[..., : side.lengths[b]] > 0).double()
        for b, where in side.rows()
    ]
    count = sum(each.numel() for each in kept)
    rate = sum(float(each.sum()) for each in kept) / count
    deviation = math.sqrt(probability * (1 - probability) / (count / SHARING))
    assert abs(rate - (1 - probability)) < 5 * deviation
    tensors, grad, grads = problem(sides, (4, groups, 64, 64), BF16)
    limits = {"scale": 0.125, **limits}
    *found, _ = attended(sides, tensors, grad, grads, **drops, **limits)
    factors = [each / (1 - probability) for each in kept]
    exact = definition(sides, tensors, grad, torch.float64, limits, factors)
    for each, right in zip(found, exact, strict=True):
        assert_nmse(each, right, tol("attention", BF16, longest))


def module_and_call(lengths, heads=8, longest=None, channels=64):
    """A module, leaves, and the arguments of a call of packed sequences."""
    module = DotProductAttention(heads, channels, qkv_format="thd", attn_mask_type="padding_causal")
    sums = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    leaf = torch.randn(sum(lengths), 3, heads, channels).to("cuda", BF16).requires_grad_()
    most = longest or max(lengths)
    given = {"qkv_layer": leaf, "cu_seqlens_q": sums, "max_seqlen_q": most, "max_seqlen_kv": most}
    return module, leaf, given


def step(module, leaf, given):
    out = module(**given)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaf)]


def test_memory_goes_with_the_tokens():
    """And not with the largest bound times the sequences."""
    call = module_and_call([8192] + [32] * 31)
    step(*call)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(*call)
    used = torch.cuda.max_memory_allocated() - before
    padded = 4 * 32 * 8192 * 8 * 64  # bytes of the gradients of queries, in fp32
    assert used < 8 * call[1].nbytes < padded


def test_capture_with_other_lengths():
    """A graph replays with the lengths that are there then."""
    call = module_and_call([300, 100, 112], longest=384)
    module, leaf, given = call
    step(*call)
    graph, results = captured(lambda: step(*call), warm_ups=1)
    for lengths in ([1, 384, 127], [0, 200, 312]):
        sums = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        given["cu_seqlens_q"].copy_(sums)
        with torch.no_grad():
            leaf.copy_(torch.randn_like(leaf))
        graph.replay()
        for each, right in zip(results, step(module, leaf, given), strict=True):
            assert_nmse(each, right.double(), tol("round", BF16))


FEW_PLANS = """
import sys
import torch
sys.path[:0] = ["tests"]
from pytorch.test_cudnn_packed import module_and_call, step

for lengths in ([200, 190, 7], [193, 256, 1, 0], [130, 220, 240], [250] * 4, [255, 254, 256]):
    out, grad = step(*module_and_call(lengths))
    assert out.isfinite().all() and grad.isfinite().all()
"""


def test_one_plan_serves_many_batches(tmp_path):
    """3 and 4 sequences of 193 to 256 tokens, in any number: two of either direction."""
    environment = {**os.environ, "TE_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FEW_PLANS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    backwards = 2 * 2  # scratch of whole sequences, or of the tokens
    assert 4 <= len([*tmp_path.rglob("attention-*.bin")]) <= 2 + backwards


def test_random_sequences_of_a_module(rng):
    """Derived bounds, of which the host reads the device, are those that are given."""
    lengths = [int(n) for n in rng.integers(0, 500, 6)]
    module, leaf, given = module_and_call(lengths)
    expected = step(module, leaf, given)
    derived = {name: value for name, value in given.items() if "max" not in name}
    assert max(lengths) == 0 or np.isfinite(float(expected[0].float().sum()))
    for each, right in zip(step(module, leaf, derived), expected, strict=True):
        assert_nmse(each, right.double(), tol("round", BF16))
