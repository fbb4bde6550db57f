# SPDX-License-Identifier: Apache-2.0
"""The older form of `cpu_offload`; only its disabled form is built."""

from transformer_engine.pytorch.cpu_offload import (
    CPUOffloadEnabled,
    get_cpu_offload_context,
    is_cpu_offload_enabled,
    mark_activation_offload,
)

__all__ = [
    "CPUOffloadEnabled",
    "get_cpu_offload_context",
    "is_cpu_offload_enabled",
    "mark_activation_offload",
]
