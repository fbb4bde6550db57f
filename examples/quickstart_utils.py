# SPDX-License-Identifier: Apache-2.0
"""The helpers that a tutorial builds its Transformer layers with: attention, an MLP, a stopwatch.

The baseline of such a tutorial is a layer of plain torch modules, whose one `qkv_projection` has
the rows of its weight ordered head by head: query, key and value of head 0, then of head 1.  The
`share_parameters_*` functions give its parameters to a layer built another way, so that both
compute the same function.  Everything here works on a CPU as on a GPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import transformer_engine.pytorch as te

NOTHING: Mapping[str, Any] = MappingProxyType({})


class DotProductAttention(torch.nn.Module):
    """Attention as its definition has it: softmax(Q K^T / sqrt(d)) V, in plain torch operations.

    Parameters
    ----------
    num_attention_heads : int
        Heads.
    kv_channels : int
        Values per head.
    attention_dropout : float
        Probability with which an attention weight is dropped in training.
    """

    def __init__(
        self, num_attention_heads: int, kv_channels: int, attention_dropout: float
    ) -> None:
        super().__init__()
        self.hidden_size = num_attention_heads * kv_channels
        self.scale = 1.0 / math.sqrt(kv_channels)
        self.dropout = torch.nn.Dropout(attention_dropout)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
    ) -> Tensor:
        """Attend.

        Parameters
        ----------
        query, key, value : Tensor
            [length, samples, heads, channels].
        attention_mask : Tensor, optional
            Boolean, broadcast to [samples, heads, query length, key length]; True hides a key from
            a query. Nothing is hidden without it: the attention is not causal by itself.

        Returns
        -------
        Tensor
            [length, samples, heads * channels].
        """
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        # Scaled before the product: half precision could overflow after it.
        scores = (query * self.scale) @ key.transpose(2, 3)
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask, float("-inf"))
        context = self.dropout(scores.softmax(dim=-1)) @ value
        return context.permute(2, 0, 1, 3).flatten(2)


class BasicMLP(torch.nn.Module):
    """The MLP of a Transformer layer: two linear layers with a GELU between them."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.linear1 = torch.nn.Linear(hidden_size, ffn_hidden_size)
        self.linear2 = torch.nn.Linear(ffn_hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., hidden_size] of [..., hidden_size]."""
        return self.linear2(torch.nn.functional.gelu(self.linear1(x), approximate="tanh"))


def speedometer(  # noqa: PLR0913 - the argument list that tutorials write
    module: torch.nn.Module,
    input: Tensor,
    output_grad: Tensor,
    forward_kwargs: Mapping[str, Any] = NOTHING,
    fp8_autocast_kwargs: Mapping[str, Any] | None = None,
    timing_iters: int = 50,
    warmup_iters: int = 50,
) -> None:
    """Print the mean time of a forward and a backward; the arguments are those of `mean_time`."""
    milliseconds = mean_time(
        module, input, output_grad, forward_kwargs, fp8_autocast_kwargs, timing_iters, warmup_iters
    )
    print(f"Mean time: {milliseconds} ms")


def mean_time(  # noqa: PLR0913 - as above
    module: torch.nn.Module,
    input: Tensor,
    output_grad: Tensor,
    forward_kwargs: Mapping[str, Any] = NOTHING,
    fp8_autocast_kwargs: Mapping[str, Any] | None = None,
    timing_iters: int = 50,
    warmup_iters: int = 50,
) -> float:
    """Return the mean time of a forward and a backward, in ms.

    Parameters
    ----------
    module : torch.nn.Module
        What runs. Its gradients are dropped before every forward, as a training step does, and
        left empty.
    input, output_grad : Tensor
        What goes in, and the gradient of what comes out.
    forward_kwargs : mapping
        Further arguments of the forward.
    fp8_autocast_kwargs : mapping, optional
        Arguments of `te.fp8_autocast`, which the forward runs in; FP8 is off without them.
    timing_iters, warmup_iters : int
        Iterations that count, and iterations before them.
    """
    region = {"enabled": False} if fp8_autocast_kwargs is None else fp8_autocast_kwargs

    def step() -> None:
        module.zero_grad(set_to_none=True)
        with te.fp8_autocast(**region):  # the forward alone belongs inside
            output = module(input, **forward_kwargs)
        output.backward(output_grad)

    for _ in range(warmup_iters):
        step()
    milliseconds = _stopwatch(step, timing_iters, input.device)
    module.zero_grad(set_to_none=True)
    return milliseconds


def _stopwatch(step: Callable[[], None], times: int, device: torch.device) -> float:
    """Return the mean time of `step` in ms, by the clock of the device."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(times):
            step()
        return (time.perf_counter() - began) * 1e3 / times
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        start.record()
        for _ in range(times):
            step()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def share_parameters_with_basic_te_model(
    te_model: torch.nn.Module, basic_model: torch.nn.Module
) -> None:
    """Give a layer of `te.LayerNorm` and `te.Linear` the parameters of the baseline.

    The layers share them: they are the same `Parameter` objects afterwards.
    """
    for name in ("ln1", "qkv_projection", "projection", "ln2", "mlp.linear1", "mlp.linear2"):
        ours, theirs = te_model.get_submodule(name), basic_model.get_submodule(name)
        ours.weight, ours.bias = theirs.weight, theirs.bias


def share_parameters_with_fused_te_model(
    te_model: torch.nn.Module, basic_model: torch.nn.Module
) -> None:
    """Give a layer of `te.LayerNormLinear` and `te.LayerNormMLP` the parameters of the baseline.

    The layers share them: they are the same `Parameter` objects afterwards.
    """
    qkv, basic = te_model.ln_qkv, basic_model.qkv_projection
    qkv.layer_norm_weight, qkv.layer_norm_bias = basic_model.ln1.weight, basic_model.ln1.bias
    qkv.weight, qkv.bias = basic.weight, basic.bias
    _share_projection_and_mlp(te_model.projection, te_model.ln_mlp, basic_model)


def share_parameters_with_transformerlayer_te_model(
    te_model: te.TransformerLayer, basic_model: torch.nn.Module
) -> None:
    """Give a `te.TransformerLayer` the parameters of the baseline.

    Shared, the same `Parameter` objects afterwards, is everything but query, key and value of a
    layer that keeps these apart (``fuse_qkv_params=False``, the default).  Their rows alternate in
    the baseline's one weight, so that no contiguous part of it holds the queries: they are
    *copied*.  A layer with ``fuse_qkv_params=True`` has the baseline's order and shares it, too.
    """
    qkv, basic = te_model.self_attention.layernorm_qkv, basic_model.qkv_projection
    qkv.layer_norm_weight, qkv.layer_norm_bias = basic_model.ln1.weight, basic_model.ln1.bias
    if hasattr(qkv, "query_weight"):
        _copy_query_key_value(qkv, basic, basic_model.num_attention_heads)
    else:
        qkv.weight, qkv.bias = basic.weight, basic.bias
    _share_projection_and_mlp(te_model.self_attention.proj, te_model.layernorm_mlp, basic_model)


@torch.no_grad()
def _copy_query_key_value(
    qkv: te.LayerNormLinear, basic: torch.nn.Linear, num_attention_heads: int
) -> None:
    """Copy the rows of `basic`, ordered [head, (query, key, value), channel], into three parts."""
    for kind in ("weight", "bias"):
        fused = getattr(basic, kind)
        parts = fused.unflatten(0, (num_attention_heads, 3, -1)).unbind(1)
        for name, part in zip(("query", "key", "value"), parts, strict=True):
            getattr(qkv, f"{name}_{kind}").copy_(part.flatten(0, 1))


def _share_projection_and_mlp(
    projection: te.Linear, mlp: te.LayerNormMLP, basic_model: torch.nn.Module
) -> None:
    basic = basic_model.projection
    projection.weight, projection.bias = basic.weight, basic.bias
    mlp.layer_norm_weight, mlp.layer_norm_bias = basic_model.ln2.weight, basic_model.ln2.bias
    for name, linear in (("fc1", basic_model.mlp.linear1), ("fc2", basic_model.mlp.linear2)):
        setattr(mlp, f"{name}_weight", linear.weight)
        setattr(mlp, f"{name}_bias", linear.bias)
