# SPDX-License-Identifier: Apache-2.0
"""Functions that programs import from ``transformer_engine.pytorch.module.base``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_engine.pytorch.module.overlap import (
    UserBufferQuantizationMode,
    destroy_ub,
    is_ub_initialized,
)
from transformer_engine.pytorch.module.parameters import default_device
from transformer_engine.pytorch.torchside.device import canonicalize_device

__all__ = [
    "UserBufferQuantizationMode",
    "destroy_ub",
    "get_dummy_wgrad",
    "get_workspace",
    "is_ub_initialized",
    "layers_atomic_ring_exchange",
    "using_cublasmp_backend",
]

layers_atomic_ring_exchange: list[str] = []
"""Layers whose overlap of communication and GEMMs would be atomic: none."""


def using_cublasmp_backend() -> bool:
    """Return whether communication and GEMMs are overlapped by cuBLASMp: never."""
    return False


def get_workspace() -> Tensor:
    """A tensor for arguments called ``workspace``: empty, as the library finds its own memory."""
    return torch.empty(0, dtype=torch.uint8, device=default_device())


_DUMMIES: dict[tuple, Tensor] = {}
"""Made by `get_dummy_wgrad`, by shape, dtype and device."""


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """Return a stand-in for a weight gradient that was added to ``main_grad`` already.

    Of the shape and dtype of the weight, on the current device of the machine's accelerator, or the
    CPU where there is none; of zeros with `zero`, else its contents mean nothing. One memory serves
    all calls of a kind.
    """
    device = canonicalize_device(default_device())
    key = (tuple(shape), dtype, device)
    if key not in _DUMMIES:
        _DUMMIES[key] = torch.empty(tuple(shape), dtype=dtype, device=device)
    dummy = _DUMMIES[key].detach()
    return dummy.zero_() if zero else dummy
