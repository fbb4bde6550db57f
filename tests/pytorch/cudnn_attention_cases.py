# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA as the tests of cuDNN's kernels have it: calls, limits and what is right."""

import math

import torch
from attention_reference import softmax
from tols import BF16, EPS

from transformer_engine import _core

HEADS, CHANNELS = 4, 64
SHARING = 4
"""Queries for which cuDNN's kernels take one decision of a dropout: two apart, within eight."""


def heads(batch, tokens, count, channels, dtype, order="bshd"):
    """Normal numbers [batch, tokens, count, channels] that lie in some order."""
    if order == "packed":
        return torch.randn(batch, tokens, count, 3, channels).to("cuda", dtype)[..., 1, :]
    places = ["bshd".index(letter) for letter in order]
    shape = (batch, tokens, count, channels)
    made = torch.randn([shape[i] for i in places]).to("cuda", dtype)
    return made.permute([places.index(i) for i in range(4)])


def allowed(limits, sizes):
    """Bool [batch, heads, queries, keys]: what may be attended."""
    batch, count, queries, keys = sizes
    mask, ends = limits.get("mask"), []
    for name, longest in (("query_lengths", queries), ("key_lengths", keys)):
        given = limits.get(name)
        ends.append(torch.full((batch,), longest) if given is None else given.cpu().long())
    row, column = torch.arange(queries)[:, None], torch.arange(keys)
    middle = torch.full((batch,), limits.get("diagonal", 0))
    if limits.get("bottom_right"):
        middle = middle + ends[1] - ends[0]
    of_queries, of_keys, middle = (t[:, None, None, None] for t in (*ends, middle))
    may = (row < of_queries) & (column < of_keys)
    for name, side in (("window_left", -1), ("window_right", 1)):
        if limits.get(name, -1) >= 0:
            may = may & (side * (column - row - middle) <= limits[name])
    may = may.expand(sizes)
    return may if mask is None else may & (mask.cpu() == 0)


def products(q, k, scale, cap):
    """Scores before a bias."""
    scores = scale * (q @ k.mT)
    return cap * torch.tanh(scores / cap) if cap else scores


def definition(q, k, v, bias, may, scale, factors=1.0, cap=0.0):
    """[batch, tokens, heads, channels], in the dtype of the arguments."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = products(q, k, scale, cap) + (0.0 if bias is None else bias)
    return ((softmax(scores, may) * factors).to(v.dtype) @ v).transpose(1, 2)


def differentiated(tensors, grad, dtype, *arguments):
    """Output and gradients of the definition in a dtype, on the CPU."""
    wide = [None if t is None else t.detach().cpu().to(dtype).requires_grad_() for t in tensors]
    out = definition(*wide, *arguments)
    wanted = [t for t in wide if t is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad.cpu().to(dtype))]


def attended(tensors, grad, wants_bias=True, **limits):
    """Output, gradients and statistics of the operators; they fill memory that holds NaN."""
    query, key, value, bias = tensors
    batch, queries, count, _ = query.shape
    out = torch.full((batch, queries, count, value.shape[3]), math.nan).to(query)
    statistics = torch.full((batch, count, queries), math.nan, device="cuda")
    inputs = {"query": query, "key": key, "value": value, **limits}
    if bias is not None:
        inputs["bias"] = bias
    _core.attention(output=out, statistics=statistics, **inputs)
    names = ("query", "key", "value", *(["bias"] if bias is not None and wants_bias else []))
    grads = {f"grad_{n}": torch.full_like(inputs[n], math.nan) for n in names}
    _core.attention_backward(grad_output=grad, output=out, statistics=statistics, **inputs, **grads)
    return [out, *grads.values(), statistics]


def term_sizes(tensors, grad, may, scale, cap=0.0):
    """Largest sums of the magnitudes of the terms of the output and of each gradient."""
    wide = [None if t is None else t.detach().cpu().double() for t in (*tensors, grad)]
    q, k, v, do = (wide[i].transpose(1, 2) for i in (0, 1, 2, 4))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    p = softmax(products(q, k, scale, cap) + (0.0 if wide[3] is None else wide[3]), may)
    dp = do.abs() @ v.abs().mT
    ds = p * (dp + (p * dp).sum(-1, keepdim=True))
    made = [p @ v.abs(), scale * ds @ k.abs(), scale * ds.mT @ q.abs(), p.mT @ do.abs(), ds]
    return [float(t.max()) if t.numel() else 0.0 for t in made]


def assert_right(tensors, limits, scale):
    """Errors of at most twice those of a naive computation and a rounding of the terms."""
    query, key, _, bias = tensors
    batch, queries, count, _ = query.shape
    may, given = allowed(limits, (batch, count, queries, key.shape[1])), tensors
    if bias is not None:  # of which the definition makes NaN where all keys of a row have -Inf
        may = may & (bias.cpu() != -math.inf)
        tensors = (*tensors[:3], bias.masked_fill(bias == -math.inf, 0.0))
    grad = torch.randn(batch, queries, count, tensors[2].shape[3]).to(query)
    dtype = query.dtype
    cap = limits.get("softcap", 0.0)
    gradient_of_bias = bias is not None and bias.dtype is dtype and bias.shape[2:] == may.shape[2:]
    gradient_of_bias = gradient_of_bias and not cap
    *found, statistics = attended(given, grad, gradient_of_bias, scale=scale, **limits)
    exact = differentiated(tensors, grad, torch.float64, may, scale, 1.0, cap)
    naive = differentiated(tensors, grad, dtype, may, scale, 1.0, cap)
    sizes = term_sizes(tensors, grad, may, scale, cap)
    for at, tensor in enumerate(found):  # without the bias where it has no gradient
        if tensor.numel() == 0:
            continue
        wide, near = tensor.cpu().double(), naive[at].double()
        error, allowance = (wide - exact[at]).abs().max(), 2 * (near - exact[at]).abs().max()
        allowance += EPS[dtype] / 2 * (sizes[at] + exact[at].abs().max())
        assert error <= allowance, f"result {at}: error {error:.3e} exceeds {allowance:.3e}"
    none = ~may.any(3)
    assert (statistics.cpu()[none] == -math.inf).all() and statistics.isfinite().cpu()[~none].all()
    assert (found[0].cpu().transpose(1, 2)[none] == 0).all()


def some_limits(rng, batch, queries, keys):
    limits = {}
    if rng.random() < 0.5:
        limits["window_right"] = rng.choice([0, 0, 5, 50])
    if rng.random() < 0.3:
        limits["window_left"] = rng.choice([0, 3, 40])
    if limits and rng.random() < 0.4:
        limits["bottom_right"] = 1
    elif limits and rng.random() < 0.2:
        limits["diagonal"] = rng.choice([-20, 7])
    for name, longest in (("query_lengths", queries), ("key_lengths", keys)):
        if rng.random() < 0.3:
            ends = [rng.choice([0, 1, longest, rng.randrange(longest + 1)]) for _ in range(batch)]
            limits[name] = torch.tensor(ends, dtype=torch.int32, device="cuda")
    if keys > 1 and rng.random() < 0.25:
        shape = [rng.choice([1, n]) for n in (batch, 1, queries, keys)]
        mask = torch.rand(shape) < 0.3
        if shape[2] > 6:
            mask[:, :, 3:6] = True  # rows that attend nothing
        limits["mask"] = mask.to("cuda", torch.uint8)
    if rng.random() < 0.3:
        limits["softcap"] = rng.choice([0.5, 20.0])
    return limits


def some_heads(batch, queries, keys=None, dtype=BF16):
    lengths = (queries, keys or queries, keys or queries)
    return [heads(batch, n, HEADS, CHANNELS, dtype) for n in lengths]
