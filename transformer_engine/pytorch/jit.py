# SPDX-License-Identifier: Apache-2.0
"""Helpers around `torch.compile`, and small functions of layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "bgrad_dgelu_fused",
    "bias_gelu_fused",
    "get_bias_dropout_add",
    "jit_fuser",
    "l2normalization_fused",
    "lazy_compile",
    "no_torch_dynamo",
    "set_jit_fusion_options",
    "warmup_jit_bias_dropout_add",
    "warmup_jit_bias_dropout_add_all_dtypes",
    "warmup_jit_bias_gelu",
    "warmup_jit_bias_gelu_all_dtypes",
    "warmup_jit_l2normalization",
    "warmup_jit_l2normalization_all_dtypes",
]


def jit_fuser(function: Callable) -> Callable:
    """The function as it is (decorator): the library's modules need no compiler to fuse."""
    return function


def lazy_compile(function: Callable) -> Callable:
    """Compile a function at its first call (decorator)."""
    compiled: list[Callable] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(torch.compile(function))
        return compiled[0](*args, **kwargs)

    return run


def no_torch_dynamo(recursive: bool = True) -> Callable[[Callable], Callable]:
    """A decorator that keeps a function out of graphs of `torch.compile`.

    With `recursive` the functions that it calls, too.
    """
    return lambda function: torch.compiler.disable(function, recursive=recursive)


def set_jit_fusion_options() -> None:
    """Nothing: there are no fusions of a compiler to set up."""


def _warm_up(*args: Any, **kwargs: Any) -> None:
    """Nothing: there is nothing that a first call would compile."""


warmup_jit_bias_dropout_add = _warm_up
warmup_jit_bias_dropout_add_all_dtypes = _warm_up
warmup_jit_bias_gelu = _warm_up
warmup_jit_bias_gelu_all_dtypes = _warm_up
warmup_jit_l2normalization = _warm_up
warmup_jit_l2normalization_all_dtypes = _warm_up


def _add(inp: Tensor, bias: Tensor | None) -> Tensor:
    return inp if bias is None or bias.numel() == 0 else inp + bias


def bias_gelu_fused(inp: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(inp + bias) in the tanh form; without a bias gelu(inp)."""
    return torch.nn.functional.gelu(_add(inp, bias), approximate="tanh")


def bgrad_dgelu_fused(
    grad_output: Tensor, inp: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """(gradient of the bias or None, gradient of the input) of `bias_gelu_fused`."""
    added = _add(inp, bias)
    grad = torch.ops.aten.gelu_backward(grad_output, added, approximate="tanh")
    return (None if added is inp else grad.flatten(0, -2).sum(0)), grad


def l2normalization_fused(x: Tensor, eps: float) -> Tensor:
    """X / sqrt(sum of squares + eps) over the last dim, in fp32 inside."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)).to(x.dtype)


def get_bias_dropout_add(training: bool) -> Callable:
    """A function ``f(x, bias, residual, prob)``: residual + dropout(x + bias).

    Nothing is dropped unless `training`.
    """

    def run(x: Tensor, bias: Tensor | None, residual: Tensor, prob: float) -> Tensor:
        return residual + torch.nn.functional.dropout(_add(x, bias), prob, training)

    return run
