# SPDX-License-Identifier: Apache-2.0
"""Attention in FP8 from its definition, in float64 with every cast written out."""

import contextlib
from dataclasses import dataclass

import torch
from attention_reference import allowed, drop_factors, new_pair, pair_on, softmax
from buffers import normal
from comparators import assert_bits, assert_nmse
from tols import E4M3, tol

from transformer_engine import _core

MAX = {dtype: torch.finfo(dtype).max for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)}
INPUTS = ("query", "key", "value")


@dataclass
class Quantized:
    """FP8 data, and {1/scale, scale} as the operators take them."""

    data: torch.Tensor
    scales: torch.Tensor

    @property
    def wide(self):
        """The values in float64."""
        return self.data.double() * self.scales[0].double()

    def to(self, device):
        """The same on a device."""
        return Quantized(self.data.to(device), self.scales.to(device))


def rounded(values, dtype, scale):
    """Values after a cast with a scale, read again: float64."""
    limit = MAX[dtype]
    return (values * scale).clamp(-limit, limit).float().to(dtype).double() / scale


def quantized(values, dtype=E4M3, scale=None):
    """A tensor cast with a scale, by default that of current scaling."""
    if scale is None:
        scale = MAX[dtype] / values.abs().max().double().clamp_min(1e-30)
    scale = torch.as_tensor(scale, dtype=torch.float32)
    scales = torch.stack([1.0 / scale, scale])
    data = (values.float() * scale).clamp(-MAX[dtype], MAX[dtype]).to(dtype)
    return Quantized(data, scales)


def heads(tensor, count):
    """[batch, tokens, heads, channels] as [batch, heads, tokens, channels], heads repeated."""
    return tensor.transpose(1, 2).repeat_interleave(count // tensor.shape[2], 1)


class Definition:
    """One problem of quantized queries, keys and values; `factors` are those of a dropout."""

    def __init__(self, operands, scale, may, factors=None, dropout=0.0, softcap=0.0):
        self.scale, self.dropout = scale, dropout
        count = operands[0].data.shape[2]
        self.groups = operands[1].data.shape[2]
        self.query, self.key, self.value = (heads(x.wide, count) for x in operands)
        scores = self.query @ self.key.mT * scale
        self.slope = 1.0  # of what the cap makes of the scores
        if softcap:
            share = torch.tanh(scores / softcap)
            scores, self.slope = softcap * share, 1.0 - share.square()
        self.weights = softmax(scores, may)
        kept = scores.masked_fill(~may, -torch.inf)
        self.statistics = torch.logsumexp(kept, -1)
        self.dropped = self.weights if factors is None else self.weights * factors
        self.weights_scale = MAX[E4M3] * (1.0 - dropout)

    def plain(self):
        """The output without a cast of weights."""
        return (self.dropped @ self.value).transpose(1, 2)

    def output(self):
        """The output before its cast."""
        return (rounded(self.dropped, E4M3, self.weights_scale) @ self.value).transpose(1, 2)

    def gradients(self, grad, output, scores_scale):
        """Of queries, keys and values before their casts, and of the scores likewise."""
        _, of_scores = self.plain_gradients(grad, output)
        weights = rounded(self.weights, E4M3, self.weights_scale)
        cast = rounded(of_scores, grad.data.dtype, float(scores_scale))
        return self._products(weights, cast, grad), of_scores

    def plain_gradients(self, grad, output):
        """The same without casts of weights and of the gradient of the scores."""
        wide, kept = (heads(x.wide, self.query.shape[1]) for x in (grad, output))
        sums = (wide * kept).sum(-1, keepdim=True)
        of_scores = self.weights * (wide @ self.value.mT - sums) * self.slope * self.scale
        return self._products(self.weights, of_scores, grad), of_scores

    def _products(self, weights, of_scores, grad):
        wide = heads(grad.wide, self.query.shape[1])
        made = of_scores @ self.key, self._grouped(of_scores.mT @ self.query)
        return [x.transpose(1, 2) for x in (*made, self._grouped(weights.mT @ wide))]

    def _grouped(self, x):
        return x.unflatten(1, (self.groups, -1)).sum(2)


def device_floats(device, *values):
    """Floats on a device, one tensor each."""
    return [torch.tensor([value], dtype=torch.float32, device=device) for value in values]


class Call:
    """A run of the operator, and of its gradient."""

    def __init__(self, device, operands, **options):
        self.operands = [operand.to(device) for operand in operands]
        self.device, self.options = device, options
        query, value = self.operands[0].data, self.operands[2].data
        batch, queries, count, _ = query.shape
        shape = (batch, queries, count, value.shape[3])
        self.output = Quantized(
            torch.empty(shape, dtype=E4M3, device=device), torch.empty(2, device=device)
        )
        self.statistics = torch.empty(batch, count, queries, device=device)
        self.output_amax, self.weights_amax = device_floats(device, 0.0, 0.0)

    def problem(self):
        """Keywords that both directions take."""
        named = {f"{n}_scales": x.scales for n, x in zip(INPUTS, self.operands, strict=True)}
        return named | self.options

    def forward(self, output_scale=None):
        """Run the forward; the output's scale by default follows from that of the values."""
        given = {} if output_scale is None else {"output_scale": output_scale}
        _core.attention(
            *(x.data for x in self.operands),
            self.output.data,
            statistics=self.statistics,
            output_scales=self.output.scales,
            output_amax=self.output_amax,
            weights_amax=self.weights_amax,
            **given,
            **self.problem(),
        )
        return self.output

    def backward(self, grad, scores_scale, grads_scale):
        """Run the gradient; the three gradients as `Quantized`."""
        dtype, grad = grad.data.dtype, grad.to(self.device)
        made = [torch.empty_like(x.data, dtype=dtype) for x in self.operands]
        scales = torch.empty(2, device=self.device)
        self.scores_amax, self.grads_amax = device_floats(self.device, 0.0, 0.0)
        factors = device_floats(self.device, scores_scale, grads_scale)
        _core.attention_backward(
            grad.data,
            *(x.data for x in self.operands),
            self.output.data,
            self.statistics,
            **{f"grad_{n}": x for n, x in zip(INPUTS, made, strict=True)},
            output_scales=self.output.scales,
            grad_output_scales=grad.scales,
            grads_scales=scales,
            grad_scores_scale=factors[0],
            grads_scale=factors[1],
            grad_scores_amax=self.scores_amax,
            grads_amax=self.grads_amax,
            **self.problem(),
        )
        return [Quantized(x, scales) for x in made]


# ---- problems ------------------------------------------------------------------------------------


def operands_of(rng, shape):
    """Queries, keys and values with scales of their own."""
    batch, queries, keys, heads, groups, d_k, d_v = shape
    sizes = (
        (batch, queries, heads, d_k),
        (batch, keys, groups, d_k),
        (batch, keys, groups, d_v),
    )
    factors = 1.0, 2.0, 0.3
    pairs = zip(sizes, factors, strict=True)
    return [quantized(normal(rng, size, torch.float32) * factor) for size, factor in pairs]


def may_of(shape, window):
    batch, queries, keys, heads, *_ = shape
    limits = [window.get(f"window_{side}", -1) for side in ("left", "right")]
    return allowed((batch, heads, queries, keys), None, *limits, window.get("diagonal", 0))


def problem_of(rng, shape, limits, dropout=0.0):
    """(operands, definition, options of a call on the CPU) of a shape and of what limits it."""
    operands, scale = operands_of(rng, shape), shape[5] ** -0.5
    batch, queries, keys, heads, *_ = shape
    options, factors = {"scale": scale, **limits}, 1.0
    if dropout:
        pair = new_pair(rng)
        factors = drop_factors(pair, (batch, heads, queries, keys), dropout)
        options |= {"dropout": dropout, "rng": pair_on("cpu", pair)}
    may, cap = may_of(shape, limits), limits.get("softcap", 0.0)
    return operands, Definition(operands, scale, may, factors, dropout, cap), options


def flips(exact, dtype):
    """Bound for casts that go to a neighbour: of results, and of what their rows are sums of."""
    recast = tol("recast", dtype) * (1 + exact.shape[-1]) / exact.numel()
    return recast + tol("sum", torch.float32, 512)


def assert_gradients(rng, problem, grads, ours=contextlib.nullcontext):
    """Gradients on the CPU, against float64 with each cast written out; `ours` is around them."""
    operands, definition, options = problem
    call = Call("cpu", operands, **options)
    output = call.forward()
    grad = quantized(normal(rng, output.data.shape, torch.float32) * 0.01, grads)
    _, of_scores = definition.gradients(grad, output, 1.0)
    scores_scale = MAX[grads] / float(of_scores.abs().max())
    exact, _ = definition.gradients(grad, output, scores_scale)
    largest = max(float(x.abs().max()) for x in exact)
    scale = MAX[grads] / largest
    with ours():
        made = call.backward(grad, scores_scale, scale)
    for what, x, expected in zip(INPUTS, made, exact, strict=True):
        bound = 2 * flips(expected, grads)  # of two casts
        assert_nmse(x.wide, rounded(expected, grads, scale), bound, what)
    amax = 4 * tol("amax", torch.float32)
    assert_nmse(call.scores_amax, of_scores.abs().max().reshape(1), amax)
    assert_nmse(call.grads_amax, torch.tensor([largest]), amax)
    assert_bits(made[0].scales, torch.stack([1 / made[0].scales[1], made[0].scales[1]]))
