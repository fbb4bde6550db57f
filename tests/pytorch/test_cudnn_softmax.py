# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA with sinks and slopes of ALiBi, against float64; what falls to others."""

import math
import random

import numpy as np
import pytest
import torch
from attention_reference import slope_bias, softmax
from backend.packed_sequences import Packing
from comparators import assert_nmse
from pytorch.cudnn_attention_cases import (
    CHANNELS,
    HEADS,
    allowed,
    heads,
    products,
    some_heads,
    some_limits,
)
from pytorch.helpers import assert_same_bits, captured
from tols import BF16, EPS, F16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine import _core

pytestmark = pytest.mark.gpu


def diagonals(limits, sizes):
    """The key on the diagonal of query 0 of each sequence."""
    batch, _, queries, keys = sizes
    middle, ends = torch.full((batch,), limits.get("diagonal", 0)), []
    if not limits.get("bottom_right"):
        return middle
    for name, longest in (("query_lengths", queries), ("key_lengths", keys)):
        given = limits.get(name)
        ends.append(torch.full((batch,), longest) if given is None else given.cpu().long())
    return middle + ends[1] - ends[0]


class Problem:
    """One attention: what the operators make of it, and what is right."""

    def __init__(self, tensors, limits, sink=None, slopes=None, bias=None, scale=0.125):
        self.tensors, self.limits, self.scale = tensors, limits, scale
        self.sink, self.slopes, self.bias = sink, slopes, bias
        query, key, value = tensors
        self.sizes = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
        self.grad = torch.randn(*query.shape[:3], value.shape[3]).to(query)
        self.may = allowed(limits, self.sizes)

    def run(self, **more):
        """Output, gradients by name and statistics; all memory held NaN."""
        query, key, value = self.tensors
        batch, count, queries, _ = self.sizes
        added = {"sink": self.sink, "slopes": self.slopes, "bias": self.bias}
        given = {"scale": self.scale, **self.limits, **added, **more}
        given = {name: t for name, t in given.items() if t is not None}
        made = {
            "output": torch.full_like(self.grad, math.nan),
            "statistics": torch.full((batch, count, queries), math.nan, device="cuda"),
        }
        _core.attention(query, key, value, **made, **given)
        names = dict(query=query, key=key, value=value)
        if self.sink is not None:
            names["sink"] = self.sink
        grads = {f"grad_{name}": torch.full_like(t, math.nan) for name, t in names.items()}
        _core.attention_backward(
            self.grad, query, key, value, made["output"], made["statistics"], **grads, **given
        )
        return {**made, **grads}

    def scores(self, query, key):
        """[batch, heads, queries, keys], of tensors by heads."""
        scores = products(query, key, self.scale, self.limits.get("softcap", 0.0))
        if self.slopes is not None:
            of = slope_bias(self.slopes.cpu(), self.sizes, diagonals(self.limits, self.sizes))
            scores = scores + of.to(scores.dtype)
        return scores if self.bias is None else scores + self.bias.cpu().to(scores.dtype)

    def by_heads(self, query, key, value):
        parts = [t.transpose(1, 2) for t in (query, key, value)]
        group = parts[0].shape[1] // parts[1].shape[1]
        return parts[0], *(t.repeat_interleave(group, 1) for t in parts[1:])

    def right(self, dtype):
        """Output and gradients of the definition in a dtype, on the CPU."""
        leaves = [t.cpu().to(dtype).requires_grad_() for t in self.tensors]
        sink = None if self.sink is None else self.sink.cpu().to(dtype).requires_grad_()
        query, key, value = self.by_heads(*leaves)
        weights = softmax(self.scores(query, key), self.may, sink)
        out = (weights.to(dtype) @ value).transpose(1, 2)
        wanted = leaves if sink is None else [*leaves, sink]
        return [out.detach(), *torch.autograd.grad(out, wanted, self.grad.cpu().to(dtype))]

    def sizes_of_terms(self):
        """Largest sums of the magnitudes of the terms of each result."""
        query, key, value = self.by_heads(*(t.cpu().double() for t in self.tensors))
        grad = self.grad.cpu().double().transpose(1, 2)
        sink = None if self.sink is None else self.sink.cpu()
        p = softmax(self.scores(query, key), self.may, sink)
        dp = grad.abs() @ value.abs().mT
        mean = (p * dp).sum(-1, keepdim=True)
        ds = self.scale * p * (dp + mean)
        made = [p @ value.abs(), ds @ key.abs(), ds.mT @ query.abs(), p.mT @ grad.abs()]
        made.append(mean.sum((0, 2, 3)))
        return [float(t.max()) if t.numel() else 0.0 for t in made]

    def check(self, **more):
        """Errors of at most twice those of a naive computation and a rounding of the terms."""
        found, dtype = self.run(**more), self.tensors[0].dtype
        names = ["output", *(name for name in found if name.startswith("grad_"))]
        exact, naive = self.right(torch.float64), self.right(dtype)
        rights = zip(names, exact, naive, self.sizes_of_terms(), strict=False)
        for name, right, near, terms in rights:
            if right.numel() == 0:
                continue
            error = (found[name].cpu().double() - right).abs().max()
            allowance = 2 * (near.double() - right).abs().max()
            allowance += EPS[dtype] / 2 * (terms + right.abs().max())
            assert error <= allowance, f"{name}: error {error:.3e} exceeds {allowance:.3e}"
        self.check_rows(found)
        return found

    def check_rows(self, found):
        query, key, _ = self.by_heads(*(t.cpu().double() for t in self.tensors))
        scores = self.scores(query, key).masked_fill(~self.may, -math.inf)
        statistics, exact = found["statistics"].cpu(), scores.logsumexp(-1)
        none = ~self.may.any(3)
        if self.sink is None:
            assert (statistics[none] == -math.inf).all()
        else:
            sinks = self.sink.cpu()[:, None].expand_as(statistics)
            near = (statistics - sinks).abs() <= tol("terms", F32)
            assert (near | (statistics == -math.inf))[none].all()
            exact = torch.logaddexp(exact, sinks.double())
        sizes = products(query.abs(), key.abs(), self.scale, 0.0).masked_fill(~self.may, 0.0)
        bound = tol("attention", F32, scores.shape[-1] + query.shape[-1])
        # tanh is a quotient of exponentials: its terms are of size 1, those of a score of the cap
        cap = self.limits.get("softcap", 0.0)
        terms = (1 + exact.abs() + sizes.amax(-1) + cap)[~none]
        assert_nmse(statistics[~none], exact[~none], bound, "statistics", terms)
        assert (found["output"].cpu().transpose(1, 2)[none] == 0).all()


def new_sink(count=HEADS):
    return torch.randn(count, device="cuda")


def new_slopes(*shape):
    return torch.rand(shape, device="cuda") / 64


LIMITS = {
    "full": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 40, "window_right": 7},
    "bottom right": {"window_right": 0, "bottom_right": 1},
    "diagonal": {"window_right": 3, "diagonal": -9},
}
ENDS = {"query_lengths": [0, 130, 64], "key_lengths": [200, 0, 77]}


def with_lengths(limits):
    ends = {n: torch.tensor(v, dtype=torch.int32, device="cuda") for n, v in ENDS.items()}
    return {**limits, **ends}


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("kind", ["sink", "slopes", "slopes of sequences", "all", "none"])
@pytest.mark.parametrize("name", LIMITS)
def test_limits(name, kind, lengths):
    limits = with_lengths(LIMITS[name]) if lengths else LIMITS[name]
    sink = new_sink() if kind in ("sink", "all") else None
    slopes = None
    if kind not in ("sink", "none"):
        slopes = new_slopes(*((3, HEADS) if kind == "slopes of sequences" else (HEADS,)))
    problem = Problem(some_heads(3, 130, 200), limits, sink, slopes)
    if slopes is not None and (slopes.dim() == 2 or name in ("bottom right", "diagonal")):
        with pytest.raises(NotImplementedError, match="slopes of each sequence, or from another"):
            problem.run()
    else:
        problem.check()


def test_the_largest_scores_are_for_others():
    query, key, value = some_heads(3, 130, 200)
    top = torch.zeros(HEADS, device="cuda")
    with pytest.raises(NotImplementedError, match="attention: the largest scores"):
        _core.attention(query, key, value, torch.empty_like(query), top=top)
    module = te.DotProductAttention(
        HEADS, CHANNELS, qkv_format="bshd", attn_mask_type="no_mask", return_max_logit=True
    )
    with torch.no_grad():
        _, top = module(query, key, value)
    scores = CHANNELS**-0.5 * query.double().transpose(1, 2)
    scores = scores @ key.double().transpose(1, 2).mT
    largest = scores.amax((0, 2, 3))
    assert_nmse(top, largest, tol("attention", BF16, CHANNELS), "top", 1 + largest.abs())


@pytest.mark.parametrize("part", range(12))
def test_random_problems(part, seed):
    del part
    rng = random.Random(seed)
    for _ in range(4):
        batch, count = rng.choice([1, 3]), rng.choice([1, 2, 6])
        groups = rng.choice([g for g in range(1, count + 1) if count % g == 0])
        queries = rng.choice([1, 2, 17, 64, 100, 128, 130, 192])
        keys = rng.choice([queries, queries, 3, 64, 77, 128, 192, 200])
        d_k, d_v, dtype = rng.choice([8, 64, 128]), rng.choice([16, 64]), rng.choice([BF16, F16])
        tensors = (
            heads(batch, queries, count, d_k, dtype, rng.choice(["bshd", "sbhd"])),
            heads(batch, keys, groups, d_k, dtype),
            heads(batch, keys, groups, d_v, dtype),
        )
        sink = rng.choice([None, torch.zeros(count, device="cuda"), new_sink(count)])
        slopes = rng.choice([None, new_slopes(count), new_slopes(1, count)])
        slopes = None if keys == 1 else slopes
        bias = None
        if keys > 1 and rng.random() < 0.3:
            bias = torch.randn(rng.choice([1, batch]), count, queries, keys).to("cuda", dtype)
        limits = some_limits(rng, batch, queries, keys)
        if slopes is not None:  # which count from the top left corner
            limits.pop("bottom_right", None)
            limits.pop("diagonal", None)
        print(dtype, [tuple(t.shape) for t in tensors], sink is None, slopes is None, limits)
        Problem(tensors, limits, sink, slopes, bias, d_k**-0.5).check()


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("window", [{}, {"window_right": 0, "bottom_right": 1}], ids=str)
def test_packed_sequences(window, groups, seed):
    """What a padded batch gives: sequences of no tokens, and tokens of no sequence."""
    rng = np.random.default_rng(seed)
    queries = Packing(rng, 4, 130, gaps=True, lengths=[130, 0, 1, 64])
    keys = Packing(rng, 4, 200, gaps=True, lengths=[200, 77, 1, 0])
    sides, counts = (queries, keys, keys), (HEADS, groups, groups)
    tensors = [
        torch.randn(side.tokens, count, CHANNELS).to("cuda", BF16)
        for side, count in zip(sides, counts, strict=True)
    ]
    names = ("query", "key")
    limits = {
        f"{n}_lengths": s.vector("lengths", "cuda") for n, s in zip(names, sides[:2], strict=True)
    }
    padded = [side.padded(tensor) for side, tensor in zip(sides, tensors, strict=True)]
    slopes = None if window else new_slopes(HEADS)
    problem = Problem(padded, {**limits, **window}, new_sink(), slopes)
    right = problem.run()
    grad = queries.packed(problem.grad)[None]
    query, key, value = (tensor[None] for tensor in tensors)
    given = {
        f"{n}_offsets": s.vector("offsets", "cuda") for n, s in zip(names, sides[:2], strict=True)
    }
    given |= {"max_queries": 130, "max_keys": 200, "scale": 0.125, **limits, **window}
    given |= {"sink": problem.sink, "slopes": problem.slopes}
    out, sums = (
        torch.full_like(query, math.nan),
        query.new_full((1, queries.tokens, HEADS), math.nan),
    )
    sums = sums.float()
    _core.attention(query, key, value, out, statistics=sums, **given)
    named = {"query": query, "key": key, "value": value, "sink": problem.sink}
    grads = {f"grad_{name}": torch.full_like(t, math.nan) for name, t in named.items()}
    _core.attention_backward(grad, query, key, value, out, sums, **grads, **given)
    bound = tol("attention", BF16, 200)
    assert_nmse(out[0], queries.packed(right["output"]).double(), bound, "output")
    for name, side in zip(("query", "key", "value"), sides, strict=True):
        expected = side.packed(right[f"grad_{name}"]).double()
        assert_nmse(grads[f"grad_{name}"][0], expected, bound, name)
    assert_nmse(grads["grad_sink"], right["grad_sink"].double(), bound, "grad_sink")
    padded_sums = queries.packed(right["statistics"].transpose(1, 2), -math.inf)
    assert ((sums[0] == -math.inf) | (padded_sums > -math.inf)).all()


@pytest.mark.parametrize("lengths", [False, True])
def test_the_gradient_of_a_sink_goes_through_dropout(lengths):
    """With values that are equal in all keys, dropout alone makes the outputs of a row differ."""
    ones = torch.eye(64, 64).to("cuda", BF16)[None, :, None].expand(2, -1, HEADS, -1).contiguous()
    query, key = (heads(2, 64, HEADS, CHANNELS, BF16) for _ in range(2))
    limits = {}
    if lengths:
        limits = {n: torch.tensor([64, 40], dtype=torch.int32, device="cuda") for n in ENDS}
    problem = Problem((query, key, ones), limits, new_sink())
    rng = torch.randint(2**40, (2,), device="cuda")
    found = problem.run(dropout=0.3, rng=rng)
    # The values are a unit matrix: the outputs are the weights, from which the rest follows.
    weights = found["output"].cpu().double().transpose(1, 2)
    mean = (weights * problem.grad.cpu().double().transpose(1, 2)).sum(-1)
    share = (problem.sink.cpu().double()[:, None] - found["statistics"].cpu().double()).exp()
    share = share.masked_fill(~problem.may.any(3), 0.0)
    exact, terms = -(share * mean).sum((0, 2)), (share * mean.abs()).sum((0, 2))
    assert_nmse(found["grad_sink"], exact, tol("attention", BF16, 128), "grad_sink", terms)


def test_sums_of_heads_are_repeatable():
    problem = Problem(some_heads(3, 130, 200), LIMITS["causal"], new_sink(), new_slopes(HEADS))
    first, second = problem.run(), problem.run()
    assert_same_bits([first["grad_sink"]], [second["grad_sink"]])


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend(queries, keys):
    tensors = [heads(2, n, HEADS, CHANNELS, BF16) for n in (queries, keys, keys)]
    found = Problem(tensors, {}, new_sink(), new_slopes(HEADS)).run()
    assert (found["statistics"] == -math.inf).all() and (found["grad_sink"] == 0).all()


def test_everything_is_dropped():
    problem = Problem(some_heads(2, 64), {}, new_sink())
    rng = torch.randint(2**40, (2,), device="cuda")
    found = problem.run(dropout=1.0, rng=rng)
    assert (found["output"] == 0).all() and (found["grad_sink"] == 0).all()


@pytest.mark.parametrize("value", [-math.inf, -300.0, 300.0])
@pytest.mark.parametrize("limits", [{}, ENDS], ids=["full", "lengths"])
def test_extreme_sinks(limits, value):
    """One of -Inf is none; a large one takes all."""
    limits = with_lengths({}) if limits else {}
    problem = Problem(some_heads(3, 130, 200), limits)
    problem.sink = torch.full((HEADS,), value, device="cuda")
    found = problem.run()
    problem.sink = None
    plain = problem.run()
    for name in ("output", "grad_query", "grad_key", "grad_value"):
        assert found[name].isfinite().all(), name
        if value > 0:
            assert (found[name] == 0).all()
        else:
            assert_nmse(found[name], plain[name].double(), tol("attention", BF16, 200), name)
    assert found["grad_sink"].isfinite().all()


@pytest.mark.parametrize("kind", ["off-by-one", "learnable"])
@pytest.mark.parametrize("mask", ["causal", "padding", "no_mask"])
def test_modules_agree(mask, kind, monkeypatch):
    """The library's operator and the unfused backend: output and gradients."""
    given = {"core_attention_bias_type": "alibi"}
    if mask == "padding":
        given["cu_seqlens_q"] = torch.tensor([0, 60, 60, 100], dtype=torch.int32, device="cuda")
    module = te.DotProductAttention(
        HEADS, CHANNELS, 2, qkv_format="bshd", attn_mask_type=mask, softmax_type=kind
    )
    if kind == "learnable":
        torch.nn.init.normal_(module.softmax_offset)
    tensors = [heads(3, 64, n, CHANNELS, BF16).requires_grad_() for n in (HEADS, 2, 2)]
    results = []
    for fused in "10":
        monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
        monkeypatch.setenv("NVTE_FLASH_ATTN", fused)
        out = module(*tensors, **given)
        wanted = [*tensors, *module.parameters()]
        results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), wanted)])
        assert module._last_call.backend == ("native" if fused == "1" else "unfused")
    for i, (native, unfused) in enumerate(zip(*results, strict=True)):  # twice the error
        assert_nmse(native, unfused.double(), 4 * tol("attention", BF16, 64), f"result {i}")


def test_captured():
    """A CUDA graph of forward and backward gives the bits of the calls."""
    problem = Problem(some_heads(3, 128), with_lengths({}), new_sink(), new_slopes(HEADS))
    for ends in ("query_lengths", "key_lengths"):
        problem.limits[ends].clamp_(max=128)
    expected = problem.run()
    graph, results = captured(problem.run)
    for tensor in results.values():
        tensor.fill_(math.nan)
    graph.replay()
    names = ("output", "statistics", "grad_key", "grad_value", "grad_sink")
    assert_same_bits([results[n] for n in names], [expected[n] for n in names])
