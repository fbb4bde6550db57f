# SPDX-License-Identifier: Apache-2.0
"""Checks of optimizers, before they change anything."""

from collections.abc import Mapping
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.optim.optimizer import required

from transformer_engine.pytorch.optimizers.updates import check_apart, local_part
from transformer_engine.pytorch.torchside.device import is_capturing

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIRECT = (torch.float32, torch.bfloat16)
"""dtypes of state that an update reads and writes as it is."""


def check_numbers(optimizer: str, given: Any, *names: str) -> None:
    """TypeError for a number of a group of parameters that is none, ValueError for one below 0."""
    if not isinstance(given, Mapping):
        return  # no group: torch says so
    for name in names:
        value = given.get(name, required)
        if value is required:
            continue
        text = f"{optimizer}: {name}={value!r}, expected a number of 0 or more"
        if not isinstance(value, SupportsFloat):
            raise TypeError(text)
        if not value >= 0.0:
            raise ValueError(text)


def check_adam(optimizer: str, given: Any) -> None:
    """`check_numbers`, and betas from 0 to below 1."""
    check_numbers(optimizer, given, "lr", "eps", "weight_decay")
    if not isinstance(given, Mapping) or "betas" not in given:
        return
    betas = given["betas"]
    text = f"{optimizer}: betas={betas!r}, expected two numbers from 0 to below 1"
    is_pair = isinstance(betas, list | tuple) and len(betas) == 2
    if not is_pair or not all(isinstance(beta, SupportsFloat) for beta in betas):
        raise TypeError(text)
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(text)


def check_dense(optimizer: str, label: str, tensor: Tensor) -> None:
    """TypeError for a tensor that is sparse, or of another dtype than the kernels read."""
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        raise TypeError(
            f"{optimizer}: a {label} of {tensor.dtype}, {tensor.layout}: expected a dense tensor "
            "of torch.float32, torch.float16 or torch.bfloat16"
        )


def check_parameter(optimizer: str, param: Tensor) -> None:
    """`check_dense`; ValueError for one of which elements share memory."""
    check_dense(optimizer, "parameter", param)
    if not param.is_contiguous():
        check_apart(optimizer, local_part(param))


def check_decoupled(optimizer: str, param: Tensor, grad: Tensor) -> None:
    """Check gradients as torch does, but for their dtype and shape."""
    have, given = local_part(param), local_part(grad)
    if have.numel() != given.numel() or have.device != given.device:
        raise ValueError(
            f"{optimizer}: a decoupled_grad of {given.numel()} elements on {given.device}: "
            f"expected {have.numel()} on {have.device}, as its parameter"
        )


def check_beginning(optimizer: str, device: torch.device) -> None:
    """RuntimeError where states that are made now would be made anew by every replay of a graph."""
    if is_capturing(device):
        raise RuntimeError(
            f"{optimizer}.step: a CUDA graph is captured, and states are missing: every replay "
            "would make new ones: take a step before the capture"
        )


def check_states(
    dtypes: Mapping[str, torch.dtype], capturable: bool, masters: bool, remainders: bool
) -> None:
    """Of `FusedAdam`: ValueError for a dtype of a state, RuntimeError for options that exclude."""
    known = (*DTYPES, torch.uint8)
    for name, dtype in dtypes.items():
        legal = DTYPES if name == "master_param" else known
        argument = "master_weight_dtype" if name == "master_param" else f"{name}_dtype"
        if dtype not in legal:
            expected = ", ".join(map(str, legal))
            raise ValueError(f"FusedAdam: {argument}={dtype!r}, expected one of {expected}")
    if not capturable:
        return
    if remainders:
        raise RuntimeError("FusedAdam: capturable=True and store_param_remainders=True: choose one")
    if masters and dtypes["master_param"] is not torch.float32:
        raise RuntimeError(
            f"FusedAdam: capturable=True and master_weight_dtype={dtypes['master_param']}: it has "
            "to be torch.float32"
        )
    if dtypes["exp_avg"] is not dtypes["exp_avg_sq"] or dtypes["exp_avg"] not in DIRECT:
        raise RuntimeError(
            f"FusedAdam: capturable=True with exp_avg_dtype={dtypes['exp_avg']} and "
            f"exp_avg_sq_dtype={dtypes['exp_avg_sq']}: both have to be torch.float32, or both "
            "torch.bfloat16"
        )
