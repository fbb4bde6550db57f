# SPDX-License-Identifier: Apache-2.0
"""Offload of activations to the host: only its disabled form is built."""

import contextlib
from typing import Any

from torch import Tensor

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(globals())

NVTE_CPU_OFFLOAD_V1 = False
"""True where `cpu_offload_v1` offloads."""
OFFLOAD_SYNCHRONIZER = None
"""Context that copies activations: none."""
CPUOffloadEnabled = False
"""True where activations are offloaded."""


def is_cpu_offload_enabled() -> bool:
    """Return whether activations are offloaded: never."""
    return False


def is_current_layer_offloaded() -> bool:
    """Return whether the layer that runs has its activations offloaded: never."""
    return False


def mark_activation_offload(*tensors: Tensor | None, offload: bool = True) -> None:
    """Mark tensors that an offload would copy to the host; without `offload` do nothing."""
    for tensor in tensors:
        if tensor is not None and offload:
            tensor.activation_offloading = True


def mark_not_offload(*tensors: Tensor | None) -> None:
    """Mark tensors that an offload would leave on the device."""
    for tensor in tensors:
        if tensor is not None:
            tensor._TE_do_not_offload = True


def _same(tensor: Tensor) -> Tensor:
    return tensor


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int | None = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    manual_synchronization: bool = False,
    retain_pinned_cpu_buffers: bool = False,
    offload_stream: Any = None,
) -> tuple:
    """(context, function to call on each layer's output): only the disabled form is built.

    A context that changes nothing and the identity; and None with `manual_synchronization`, the
    only option that is read. NotImplementedError where enabled.
    """
    if enabled:
        raise absent.refusal("pytorch.cpu_offload.get_cpu_offload_context", "(enabled=True)")
    pair = (contextlib.nullcontext(), _same)
    return (*pair, None) if manual_synchronization else pair
