# SPDX-License-Identifier: Apache-2.0
"""Torch's fused attention: which of its kernels runs, decided in one place.

`torch.nn.functional.scaled_dot_product_attention` looks for the best kernel at each call. Where one
is known to be the best for a device, it is called directly, which is also the cheaper call.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["KERNEL", "Problem", "kernel_for"]

KERNEL = "auto"
"""What runs 16-bit attention on CUDA devices: a key of `_DIRECT`, or "auto": torch chooses."""

Kernel = Callable[[Tensor, Tensor, Tensor, float, bool, float], Tensor]
"""f(query, key, value, dropout, causal, scale): [batch, heads, length, channels], any strides."""


class Problem(NamedTuple):
    """What the choice of a kernel depends on.

    Attributes
    ----------
    device_type : str
        "cpu" or "cuda".
    dtype : torch.dtype
        Of queries, keys and values.
    channels : tuple of int
        Of queries and keys, and of values.
    grouped : bool
        Several heads share keys and values.
    """

    device_type: str
    dtype: torch.dtype
    channels: tuple[int, int]
    grouped: bool


def _auto(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float
) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, None, dropout, causal, scale=scale
    )


def _auto_grouped(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float
) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, None, dropout, causal, scale=scale, enable_gqa=True
    )


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float
) -> Tensor:
    statistics = torch.is_grad_enabled()  # the backward needs them
    return torch._scaled_dot_product_cudnn_attention(
        query, key, value, None, statistics, dropout, causal, False, scale=scale
    )[0]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float
) -> Tensor:
    return torch._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]


_DIRECT: dict[str, tuple[Kernel, int]] = {"cudnn": (_cudnn, 128), "flash": (_flash, 256)}
"""By name: the kernel and the most channels that it takes."""


def kernel_for(problem: Problem, square: bool, traced: bool) -> Kernel:
    """The kernel to call.

    Parameters
    ----------
    problem : Problem
        What is to be run.
    square : bool
        There are as many queries as keys.
    traced : bool
        A graph is being traced: only torch's public function belongs there.

    Returns
    -------
    callable
        See `Kernel`.
    """
    auto = _auto_grouped if problem.grouped else _auto
    if KERNEL == "auto" or traced or problem.device_type != "cuda" or not square:
        return auto
    kernel, most = _DIRECT[KERNEL]
    half = problem.dtype in (torch.float16, torch.bfloat16)
    equal = problem.channels[0] == problem.channels[1]
    if half and equal and problem.channels[0] % 8 == 0 and problem.channels[0] <= most:
        return auto if problem.grouped else kernel
    return auto
