# SPDX-License-Identifier: Apache-2.0
"""Helpers around `torch.compile`, and small functions of layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent


def jit_fuser(function: Callable) -> Callable:
    """The function as it is (decorator): the library's modules need no compiler to fuse."""
    return function


def lazy_compile(func: Callable) -> Callable:
    """Compile a function at its first call (decorator)."""
    compiled: list[Callable] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(torch.compile(func))
        return compiled[0](*args, **kwargs)

    return run


def no_torch_dynamo(recursive: bool = True, when: Any = None) -> Callable[[Callable], Callable]:
    """A decorator that keeps a function out of graphs of `torch.compile`.

    With `recursive` the functions that it calls, too. NotImplementedError for another condition
    `when` than None, which is always.
    """
    if when is not None:
        raise absent.refusal("pytorch.jit.no_torch_dynamo", "(when=...)")
    return lambda function: torch.compiler.disable(function, recursive=recursive)


def set_jit_fusion_options() -> None:
    """Nothing: there are no fusions of a compiler to set up."""


def warmup_jit_bias_dropout_add(
    hidden_size: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int
) -> None:
    """Nothing: there is nothing that a first call would compile."""


def warmup_jit_bias_dropout_add_all_dtypes(
    hidden_size: int, seq_length: int, micro_batch_size: int
) -> None:
    """Nothing: there is nothing that a first call would compile."""


def warmup_jit_bias_gelu(
    ffn_hidden_size_per_partition: int, dtype: torch.dtype, seq_length: int, micro_batch_size: int
) -> None:
    """Nothing: there is nothing that a first call would compile."""


def warmup_jit_bias_gelu_all_dtypes(
    ffn_hidden_size: int, seq_length: int, micro_batch_size: int
) -> None:
    """Nothing: there is nothing that a first call would compile."""


warmup_jit_l2normalization = warmup_jit_bias_dropout_add
warmup_jit_l2normalization_all_dtypes = warmup_jit_bias_dropout_add_all_dtypes


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


gelu_fused_ = partial(bias_gelu_fused, bias=None)
"""gelu(inp) in the tanh form."""


def dgelu_fused_(grad_output: Tensor, inp: Tensor) -> Tensor:
    """Gradient of the input of `gelu_fused_`."""
    return bgrad_dgelu_fused(grad_output, inp, None)[1]


def l2normalization_fwd_fused(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x / sqrt(sum of squares + eps) over the last dim, the fp32 factors [..., 1])."""
    wide = x.float()
    factor = torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + eps)
    return (wide * factor).to(x.dtype), factor


def l2normalization_fused(x: Tensor, eps: float) -> Tensor:
    """X / sqrt(sum of squares + eps) over the last dim, in fp32 inside."""
    return l2normalization_fwd_fused(x, eps)[0]


def l2normalization_backward_fused(
    grad_output: Tensor, x: Tensor, rsqrt_norm: Tensor, eps: float
) -> Tensor:
    """Gradient of `x` of `l2normalization_fwd_fused`, whose factors `rsqrt_norm` are.

    r dy - x r^3 sum(x dy) over the last dim, where r are the factors: `eps` is in them.
    """
    del eps
    grad, wide, factor = grad_output.float(), x.float(), rsqrt_norm.float()
    along = (grad * wide).sum(-1, keepdim=True)
    return (factor * grad - wide * factor.pow(3) * along).to(x.dtype)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, prob: float, training: bool
) -> Tensor:
    """Residual + dropout(x + bias); nothing is dropped unless `training`."""
    return residual + torch.nn.functional.dropout(_add(x, bias), prob, training)


bias_dropout_add_fused_train = partial(bias_dropout_add, training=True)
"""Residual + dropout(x + bias)."""
bias_dropout_add_fused_inference = partial(bias_dropout_add, training=False)
"""Residual + x + bias; `prob` is not read."""


def get_bias_dropout_add(training: bool) -> Callable:
    """`bias_dropout_add_fused_train` or `bias_dropout_add_fused_inference`."""
    return bias_dropout_add_fused_train if training else bias_dropout_add_fused_inference


bgrad_dgelu_fused_ = bgrad_dgelu_fused
bias_dropout_add_fused_inference_ = bias_dropout_add_fused_inference
bias_dropout_add_fused_train_ = bias_dropout_add_fused_train
bias_gelu_fused_ = bias_gelu_fused
l2normalization_backward_fused_ = l2normalization_backward_fused
l2normalization_fused_ = l2normalization_fused
l2normalization_fwd_fused_ = l2normalization_fwd_fused
