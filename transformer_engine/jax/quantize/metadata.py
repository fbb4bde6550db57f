# SPDX-License-Identifier: Apache-2.0
"""Scales and histories of delayed scaling, as programs hand them to quantizers."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class QuantizeMeta(NamedTuple):
    """State of one operand."""

    scale: Array  # fp32 [1]
    amax_history: Array  # fp32 [length]

    @staticmethod
    def fresh(length: int) -> "QuantizeMeta":
        """State before the first step: a scale of 1, and no amax."""
        return QuantizeMeta(jnp.ones(1, jnp.float32), jnp.zeros(length, jnp.float32))


class QuantizeMetaSet(NamedTuple):
    """State of the operands of a layer; None: a fresh one."""

    x: QuantizeMeta | None = None
    kernel: QuantizeMeta | None = None
    grad: QuantizeMeta | None = None
