# SPDX-License-Identifier: Apache-2.0
"""The older form of `cpu_offload`; only its disabled form is built."""

from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch import cpu_offload
from transformer_engine.pytorch.cpu_offload import (
    CPUOffloadEnabled,
    is_cpu_offload_enabled,
)

__getattr__, __dir__ = absent.attach(globals())
__all__ = [
    "CPUOffloadEnabled",
    "get_cpu_offload_context",
    "is_cpu_offload_enabled",
    "is_current_layer_offloaded",
    "mark_activation_offload",
    *absent.names_of(__name__),
]


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
) -> tuple:
    """As `cpu_offload.get_cpu_offload_context`: only the disabled form is built."""
    return cpu_offload.get_cpu_offload_context(
        enabled, num_layers, model_layers, offload_activations, offload_weights, double_buffering
    )


def is_current_layer_offloaded() -> bool:
    """Return whether the layer that runs has its activations offloaded: never."""
    return False


def mark_activation_offload(*tensors: Tensor | None, offload: bool = True) -> None:
    """Mark tensors that an offload would copy to the host; without `offload` do nothing."""
    if offload:
        cpu_offload.mark_activation_offload(*tensors)
