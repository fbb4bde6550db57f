# SPDX-License-Identifier: Apache-2.0
"""One attention of the operators: its arguments, its definition in float64, and the comparison."""

import torch
from attention_reference import allowed, drop_factors, pair_on, slope_bias, softmax
from buffers import Poisoned, laid_out, normal
from comparators import assert_bits, assert_nmse, assert_ref_ratio
from tols import F32, tol

from transformer_engine import _core

INF = float("inf")
SHAPE = (2, 70, 210, 4, 2, 24, 40)  # batch, queries, keys, heads, kv_heads, d_k, d_v


class Problem:
    """One attention; `check` compares a call and its gradients with float64."""

    def __init__(self, rng, shape=SHAPE, dtype=F32, **options):
        batch, queries, keys, heads, groups, d_k, d_v = shape
        self.dtype, self.scores_shape = dtype, (batch, heads, queries, keys)
        self.tensors = {
            "query": normal(rng, (batch, queries, heads, d_k), dtype),
            "key": normal(rng, (batch, keys, groups, d_k), dtype),
            "value": normal(rng, (batch, keys, groups, d_v), dtype),
        }
        self.grad = normal(rng, (batch, queries, heads, d_v), dtype)
        self.bias = options.pop("bias", None)
        self.sink, self.slopes = options.pop("sink", None), options.pop("slopes", None)
        self.mask = options.pop("mask", None)
        self.lengths = options.pop("lengths", {})
        self.pair, self.dropout = options.pop("pair", None), options.pop("dropout", 0.0)
        self.options = {"scale": d_k**-0.5 if d_k else 1.0} | options

    @property
    def inputs(self):
        added = {"bias": self.bias, "sink": self.sink}
        return self.tensors | {name: t for name, t in added.items() if t is not None}

    def arguments(self):
        """Keywords of a call, less the tensors by position."""
        lengths = {
            f"{n}_lengths": torch.tensor(v, dtype=torch.int32) for n, v in self.lengths.items()
        }
        drop = {} if self.pair is None else {"rng": pair_on("cpu", self.pair)}
        return (
            {"bias": self.bias, "mask": self.mask, "dropout": self.dropout}
            | {"sink": self.sink, "slopes": self.slopes}
            | drop
            | lengths
            | self.options
        )

    def lengths_of(self, name, batch):
        limit = self.scores_shape[2 if name == "query" else 3]
        return self.lengths.get(name, [limit] * self.scores_shape[0])[batch]

    @property
    def may(self):
        """Bool [batch, heads, queries, keys]: what a query may attend."""
        batch, heads, queries, keys = self.scores_shape
        window = [self.options.get(f"window_{side}", -1) for side in ("left", "right")]
        rows = []
        for b in range(batch):
            q, k = self.lengths_of("query", b), self.lengths_of("key", b)
            mask = None if self.mask is None else self.mask[b % self.mask.shape[0]][None]
            row = allowed((1, heads, queries, keys), mask, *window, self.diagonal(b)).clone()
            row[:, :, q:] = False
            row[..., k:] = False
            rows.append(row)
        return torch.cat(rows) if rows else torch.zeros(self.scores_shape, dtype=torch.bool)

    def diagonal(self, batch):
        """The key on the diagonal of query 0."""
        shift = self.lengths_of("key", batch) - self.lengths_of("query", batch)
        return self.options.get("diagonal", 0) + (shift if self.options.get("bottom_right") else 0)

    def capped(self, query, key):
        """Scores before bias and slopes, of tensors as `heads` gives them."""
        scores, cap = (query @ key.mT) * self.options["scale"], self.options.get("softcap", 0.0)
        return cap * torch.tanh(scores / cap) if cap else scores

    def scores(self, query, key, bias=None):
        """Of tensors as `heads` gives them."""
        scores = self.capped(query, key)
        if self.slopes is not None:
            diagonals = [self.diagonal(b) for b in range(self.scores_shape[0])]
            scores = scores + slope_bias(self.slopes, self.scores_shape, diagonals).to(scores.dtype)
        return scores if bias is None else scores + bias.to(scores.dtype)

    def heads(self, **tensors):
        """Tensors as [batch, heads, tokens, channels]: those of keys once for each head."""
        group = self.scores_shape[1] // max(self.tensors["key"].shape[2], 1)
        turned = {name: x.transpose(1, 2) for name, x in tensors.items()}
        for name in {"key", "value"} & turned.keys():
            turned[name] = turned[name].repeat_interleave(group, 1)
        return turned

    def weights(self, query, key, bias=None, sink=None):
        """What values are multiplied by, less dropout, for tensors as `heads` gives them."""
        return softmax(self.scores(query, key, bias), self.may, sink)

    def factors(self):
        """Of the dropout, in float64."""
        return drop_factors(self.pair or (0, 0), self.scores_shape, self.dropout)

    def definition(self, query, key, value, bias=None, sink=None):
        """The output, in the dtype of its arguments."""
        parts = self.heads(query=query, key=key, value=value)
        weights = self.weights(parts["query"], parts["key"], bias, sink)
        return (weights * self.factors().to(weights.dtype) @ parts["value"]).transpose(1, 2)

    def terms(self):
        """Magnitudes of the terms of gradients that may cancel, by name."""
        parts = self.heads(
            grad=self.grad.double(), **{n: t.double() for n, t in self.tensors.items()}
        )
        weights = self.weights(parts["query"], parts["key"], self.bias, self.sink)
        of_weights = (parts["grad"] @ parts["value"].mT).abs() * self.factors()
        of_scores = weights * (of_weights + (weights * of_weights).sum(-1, keepdim=True))
        scale, groups = abs(self.options["scale"]), self.tensors["key"].shape[2]
        of_capped = of_scores
        if self.options.get("softcap"):
            cap = self.options["softcap"]
            share = self.capped(parts["query"], parts["key"]) / cap
            slope = 1.0 - share.square()
            # A rounding of the terms of a score is one of its slope, -2 tanh(u) (1 - tanh(u)^2).
            sizes = scale * (parts["query"].abs() @ parts["key"].abs().mT) / cap
            of_scores = of_scores * slope * (1.0 + 2.0 * share.abs() * sizes)
        of_keys = (of_scores.mT @ parts["query"].abs()).unflatten(1, (groups, -1)).sum(2)
        terms = {
            "grad_query": scale * (of_scores @ parts["key"].abs()).transpose(1, 2),
            "grad_key": scale * of_keys.transpose(1, 2),
        }
        if self.bias is not None:
            terms["grad_bias"] = of_capped.sum_to_size(self.bias.shape)
        if self.sink is not None:
            terms["grad_sink"] = (weights * of_weights).sum((0, 2, 3))
        return terms

    def reference(self, dtype):
        """Output and gradients by autograd of the definition in a dtype."""
        leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in self.inputs.items()}
        output = self.definition(**leaves)
        grads = torch.autograd.grad(output, list(leaves.values()), self.grad.to(dtype))
        return [output.detach(), *grads]

    def run(self, layout="dense"):
        """Output, statistics and gradients by name, each Poisoned."""
        b, h, q, _ = self.scores_shape
        made = {
            "output": Poisoned(self.grad.shape, self.dtype, "cpu", layout=layout),
            "statistics": Poisoned((b, h, q), F32, "cpu"),
            "top": Poisoned((h,), F32, "cpu"),
        }
        inputs = [laid_out(t, layout, "cpu") for t in self.tensors.values()]
        output, statistics, top = (memory.tensor for memory in made.values())
        _core.attention(*inputs, output, statistics=statistics, top=top, **self.arguments())
        for name, tensor in self.inputs.items():
            lies = layout if tensor.dim() > 1 else "dense"
            made[f"grad_{name}"] = Poisoned(tensor.shape, tensor.dtype, "cpu", layout=lies)
        grads = {n: memory.tensor for n, memory in made.items() if n.startswith("grad_")}
        grad = laid_out(self.grad, layout, "cpu")
        _core.attention_backward(grad, *inputs, output, statistics, **grads, **self.arguments())
        for placed, given in zip(inputs, self.tensors.values(), strict=True):
            assert_bits(placed, given)
        assert all(memory.untouched() for memory in made.values())
        return {name: memory.tensor for name, memory in made.items()}

    def check(self, layout="dense", *, naive=None):
        """Compare everything; naive: a dtype in which a plain computation may err half as much."""
        made, terms = self.run(layout), self.terms()
        depth = max(self.scores_shape[2] * self.scores_shape[1], self.scores_shape[3])
        names = ["output", *(f"grad_{name}" for name in self.inputs)]
        exact = dict(zip(names, self.reference(torch.float64), strict=True))
        for name, expected in exact.items():
            dtypes = (made[name].dtype, self.dtype)
            bound = tol("attention", max(dtypes, key=lambda d: torch.finfo(d).eps), depth)
            assert_nmse(made[name], expected, bound, name, terms.get(name))
        if naive is not None:
            for name, plain in zip(names, self.reference(naive), strict=True):
                summed = terms.get(name) if name in ("grad_bias", "grad_sink") else None
                assert_ref_ratio(made[name], plain, exact[name], naive, summed)
        self.check_statistics(made["statistics"], made["top"])
        return made

    def check_statistics(self, statistics, top):
        parts = self.heads(**{n: t.double() for n, t in self.tensors.items()})
        scores = self.scores(parts["query"], parts["key"], self.bias).masked_fill(~self.may, -INF)
        exact, empty = scores.logsumexp(-1), ~self.may.any(-1)
        if self.sink is None:
            assert (statistics[empty] == -INF).all()
        else:
            sinks = self.sink[:, None].expand_as(statistics)
            assert ((statistics == -INF) | (statistics == sinks))[empty].all()
            exact = torch.logaddexp(exact, sinks.double())
        largest = scores.amax((0, 2, 3)) if scores.numel() else top.double() * 0 - INF
        assert ((top == -INF) == (largest == -INF)).all()
        some = largest > -INF
        bound = tol("attention", F32, self.tensors["query"].shape[3])
        assert_nmse(top[some], largest[some], bound, "top", 1 + largest[some].abs())
        # The error is one of a score, and of 1 where the score is small: as for a probability.
        terms = 1 + exact[~empty].abs()
        bound = tol("attention", F32, scores.shape[-1])
        assert_nmse(statistics[~empty], exact[~empty], bound, "statistics", terms)
