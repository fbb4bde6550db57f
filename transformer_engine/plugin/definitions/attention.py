# SPDX-License-Identifier: Apache-2.0
"""Softmax, attention with a matrix of scores, and their gradients.

The random decisions of dropout are those of the CPU. Lengths and places of sequences that can not
be are known on the device alone, as on a GPU: what belongs to such a sequence is NaN.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.definitions import device_type
from transformer_engine.plugin.definitions.casts import raised
from transformer_engine.plugin.definitions.codes import encode, quotient, reciprocal
from transformer_engine.plugin.definitions.layers import drop
from transformer_engine.plugin.definitions.scales import largest, numbers
from transformer_engine.plugin.definitions.scores import (
    INF,
    Side,
    limits_of,
    product,
    scores_of,
    side_of,
    softmax_gradient,
    weigh,
    wrong_of,
)
from transformer_engine.pytorch.attention.masks import window_mask

# ---- softmax -------------------------------------------------------------------------------------


def softmax(fields: Mapping[str, Any]) -> None:
    """Run `_core.softmax`."""
    scores = fields["input"].float() * fields["scale"]
    if fields["bias"] is not None:
        scores = scores + fields["bias"].float()
    if fields["mask"] is not None:
        scores = scores.masked_fill(fields["mask"] != 0, -INF)
    diagonal = torch.full((1, 1, 1, 1), fields["diagonal"], device=scores.device)
    window = fields["window_left"], fields["window_right"]
    outside = window_mask(window, diagonal, *scores.shape[2:])
    made = weigh(scores if outside is None else scores.masked_fill(outside, -INF), fields["sink"])
    if fields["log_sum"] is not None:
        fields["log_sum"].copy_(made.log_sums(INF).flatten())
    if fields["probabilities"] is not None:
        fields["probabilities"].copy_(made.weights)
    fields["output"].copy_(_dropped(made.weights, fields))


def softmax_backward(fields: Mapping[str, Any]) -> None:
    """Run `_core.softmax_backward`."""
    p, grad = fields["probabilities"].float(), _dropped(fields["grad_output"].float(), fields)
    made, mean = softmax_gradient(p, grad, fields["scale"])
    if fields["grad_sinks"] is not None:
        own = (fields["sink"][:, None] - fields["log_sum"].view(p.shape[:3])).exp()
        fields["grad_sinks"].copy_((-own * mean[..., 0]).flatten())
    fields["grad_input"].copy_(made)


def _dropped(values: Tensor, fields: Mapping[str, Any]) -> Tensor:
    """Values [batch, heads, queries, keys] through the dropout of a call."""
    probability = fields.get("dropout", 0.0)
    return drop(values, fields["rng"], probability) if probability > 0.0 else values


# ---- attention -----------------------------------------------------------------------------------


def attend(
    fields: Mapping[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cast: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, logarithms of sums, largest scores [heads]) of a call of `_core.attention`.

    Tensors are [batch, length, heads, channels], or packed [1, tokens, heads, channels], as the
    output is; the sums are [batch, heads, length], or packed [1, tokens, heads], -Inf where no key
    is attended and there is no sink. Of sequences that can not be both are NaN. All is in the dtype
    of the tensors, and differentiable. `fields` may lack what a call does not have. `cast` rounds
    the weights.
    """
    queries, keys = side_of(fields, "query", query), side_of(fields, "key", key)
    limits = limits_of(fields, queries, keys)
    k, v = (_for_each_query(keys.pad(t), query) for t in (key, value))
    scores, _ = scores_of(fields, queries.pad(query), k, limits)
    top = scores.new_full(scores.shape[1:2], -INF)
    top = scores.detach().amax((0, 2, 3)) if scores.numel() else top
    made = weigh(scores, fields.get("sink"))
    weights = _dropped(made.weights, fields)
    output = product(weights if cast is None else cast(weights), v)
    sums = made.log_sums(-INF).masked_fill(limits.outside[..., 0], -INF)
    wrong = wrong_of(queries, keys)
    return queries.unpad(output, wrong), _unpad_sums(sums, queries, wrong), top


def _for_each_query(tensor: Tensor, query: Tensor) -> Tensor:
    """Heads of keys [batch, kv_heads, ..] once for each head of the queries."""
    return tensor.repeat_interleave(query.shape[2] // max(tensor.shape[1], 1), 1)


def _unpad_sums(sums: Tensor, queries: Side, wrong: Tensor | None) -> Tensor:
    """[batch, heads, queries], or of packed sequences [1, tokens, heads]."""
    made = queries.unpad(sums, wrong, -INF)
    return made.transpose(1, 2) if queries.rows is None else made


def _pad_sums(sums: Tensor, queries: Side) -> Tensor:
    """And back."""
    return sums if queries.rows is None else queries.pad(sums)


def _joined(tensor: Tensor, kv_heads: int) -> Tensor:
    """Sums over the heads of [batch, heads, ..] that share a head of keys."""
    batch, heads, *rest = tensor.shape
    return tensor.view(batch, kv_heads, heads // max(kv_heads, 1), *rest).sum(2)


class _Fp8:
    """The casts of a call in FP8: of weights, and of what it writes."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.weights_scale = ctypes.c_float(448.0 * self._kept()).value

    def _kept(self) -> float:
        """By how much dropout may enlarge weights, inverted."""
        dropout = self.fields["dropout"]
        return ctypes.c_float(1.0 - dropout).value if dropout < 1.0 else 1.0

    def inverse(self, name: str) -> Tensor:
        return self.fields[f"{name}_scales"][0]

    def output_scale(self) -> Tensor:
        given = self.fields["output_scale"]
        return self.fields["value_scales"][1:] * self._kept() if given is None else given

    def record(self, name: str, *measured: Tensor) -> None:
        """Raise an amax to the largest magnitude of tensors."""
        slot = self.fields.get(name)
        for values in () if slot is None else measured:
            slot.copy_(raised(slot, largest(values)))

    def rounded(self, values: Tensor, scale: Any, dtype: torch.dtype) -> Tensor:
        """The numbers of the codes of values, without the scale."""
        return numbers(encode(values * scale, dtype).view(dtype))

    def cast_weights(self, weights: Tensor) -> Tensor:
        self.record("weights_amax", weights)
        return self.rounded(weights, self.weights_scale, torch.float8_e4m3fn)


def _write(target: Tensor | None, values: Tensor, scale: Tensor | None = None) -> None:
    """Write values; of FP8 their codes with a scale."""
    if target is None:
        return
    if scale is None:
        target.copy_(values)
    else:
        target.view(torch.uint8).copy_(encode(values * scale, target.dtype))


def _write_scales(target: Tensor, scale: Tensor) -> None:
    target.copy_(torch.cat((reciprocal(scale), scale)))


def _count(fields: Mapping[str, Any], backward: int) -> None:
    query = fields["query"]
    _core.count_attention(device_type(query), _core.dtype_code(query.dtype), backward)


def _wide(tensor: Tensor) -> Tensor:
    """Numbers in fp32, of FP8 without their scale."""
    return numbers(tensor) if tensor.element_size() == 1 else tensor.float()


def attention(fields: Mapping[str, Any]) -> None:
    """Run `_core.attention`."""
    _count(fields, 0)
    query, key, value = (_wide(fields[name]) for name in ("query", "key", "value"))
    if fields["query_scales"] is None:
        output, sums, top = attend(fields, query, key, value)
        scale = None
    else:
        fp8 = _Fp8(fields)
        scaled = fields["scale"] * (fp8.inverse("query") * fp8.inverse("key"))
        output, sums, top = attend({**fields, "scale": scaled}, query, key, value, fp8.cast_weights)
        output = output * quotient(fp8.inverse("value"), fp8.weights_scale)
        scale = fp8.output_scale()
        fp8.record("output_amax", output)
        _write_scales(fields["output_scales"], scale)
    _write(fields["output"], output, scale)
    for name, made in (("statistics", sums), ("top", top)):
        _write(fields[name], made)


# ---- its gradient --------------------------------------------------------------------------------


class _Gradient:
    """One call of the gradient, up to the products: [batch, heads, queries, keys]."""

    def __init__(self, fields: Mapping[str, Any], factors: dict[str, Any]) -> None:
        """Numbers of FP8 are without their scales: those are the `factors`."""
        query, key = _wide(fields["query"]), _wide(fields["key"])
        self.queries, self.keys = side_of(fields, "query", query), side_of(fields, "key", key)
        self.kv_heads = key.shape[2]
        self.query = self.queries.pad(query)
        self.key, value = (
            _for_each_query(self.keys.pad(t), query) for t in (key, _wide(fields["value"]))
        )
        self.grad = self.queries.pad(_wide(fields["grad_output"]))
        limits = limits_of(fields, self.queries, self.keys)
        scale = fields["scale"] * factors["scores"]
        scores, slope = scores_of({**fields, "scale": scale}, self.query, self.key, limits)
        output = self.queries.pad(_wide(fields["output"]))
        mean = (self.grad * output).sum(-1, keepdim=True) * factors["mean"]
        sums = _pad_sums(fields["statistics"], self.queries)[..., None]
        weights = torch.where(scores == -INF, 0.0, (scores - sums).exp())
        of_weights = _dropped(self.grad @ value.transpose(2, 3) * factors["of_weights"], fields)
        self.of_biased = torch.where(weights == 0.0, 0.0, weights * (of_weights - mean))
        of_scores = fields["scale"] * self.of_biased
        if slope is not None:
            of_scores = torch.where(of_scores == 0.0, 0.0, of_scores * slope)
        self.of_scores, self.weights = of_scores, _dropped(weights, fields)
        no_sum = limits.outside | (sums == -INF)
        self.of_sink = None
        if fields["sink"] is not None:
            own = (fields["sink"][:, None, None] - sums).exp()
            self.of_sink = -torch.where(no_sum, 0.0, own * mean).sum((0, 2, 3))

    def gradients(self) -> dict[str, Tensor]:
        """Of query, key and value, as these lie."""
        of_scores, heads = self.of_scores, self.kv_heads
        made = {
            "query": product(of_scores, self.key),
            "key": _joined(product(of_scores.transpose(2, 3), self.query), heads),
            "value": _joined(product(self.weights.transpose(2, 3), self.grad), heads),
        }
        sides = {"query": self.queries, "key": self.keys, "value": self.keys}
        wrong = wrong_of(self.queries, self.keys)
        return {name: sides[name].unpad(grads, wrong) for name, grads in made.items()}


_NO_FACTORS = {"scores": 1.0, "of_weights": 1.0, "mean": 1.0}


def attention_backward(fields: Mapping[str, Any]) -> None:
    """Run `_core.attention_backward`."""
    _count(fields, 1)
    if fields["query_scales"] is not None:
        _backward_in_fp8(fields)
        return
    call = _Gradient(fields, _NO_FACTORS)
    for name, made in call.gradients().items():
        _write(fields[f"grad_{name}"], made)
    if fields["grad_bias"] is not None:
        fields["grad_bias"].copy_(call.of_biased.sum_to_size(fields["grad_bias"].shape))
    if fields["grad_sink"] is not None:
        fields["grad_sink"].copy_(call.of_sink)


def _backward_in_fp8(fields: Mapping[str, Any]) -> None:
    fp8, dtype = _Fp8(fields), fields["grad_output"].dtype
    query, key, value, grad, output = map(
        fp8.inverse, ("query", "key", "value", "grad_output", "output")
    )
    call = _Gradient(
        fields, {"scores": query * key, "of_weights": grad * value, "mean": grad * output}
    )
    scores_scale, scale = fields["grad_scores_scale"], fields["grads_scale"]
    fp8.record("grad_scores_amax", call.of_scores)
    call.of_scores = fp8.rounded(call.of_scores, scores_scale, dtype)
    call.weights = fp8.rounded(call.weights, fp8.weights_scale, torch.float8_e4m3fn)
    factors = {
        "query": key / scores_scale,
        "key": query / scores_scale,
        "value": quotient(grad, fp8.weights_scale),
    }
    made = {name: grads * factors[name] for name, grads in call.gradients().items()}
    wanted = {name: grads for name, grads in made.items() if fields[f"grad_{name}"] is not None}
    fp8.record("grads_amax", *wanted.values())
    _write_scales(fields["grads_scales"], scale)
    for name, grads in wanted.items():
        _write(fields[f"grad_{name}"], grads, scale)


# ---- several attentions --------------------------------------------------------------------------


def attention_merge(fields: Mapping[str, Any]) -> None:
    """Run `_core.attention_merge`."""
    parts = [fields[name].float() for name in ("total", "step")]
    if fields["statistics"] is not None:
        sums = [fields[f"{name}_statistics"] for name in ("total", "step")]
        merged = torch.logaddexp(*sums)
        for i, each in enumerate(sums):
            weight = (each - merged).exp().masked_fill(each == -INF, 0.0)
            parts[i] = torch.where(weight == 0.0, 0.0, weight * parts[i])
        fields["statistics"].copy_(merged)
    fields["output"].copy_(parts[0] + parts[1])
