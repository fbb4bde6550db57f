# SPDX-License-Identifier: Apache-2.0
"""Scales and histories of delayed scaling, as programs hand them to quantizers."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class QuantizeMeta(NamedTuple):
    """State of one operand."""

    scale: Array | None = None  # fp32 [1], of delayed scaling
    amax_history: Array | None = None  # fp32 [length], likewise
    stochastic_rounding_rng_state: Array | None = None
    """uint32 [.., 4]: a seed and an offset of 64 bits, the low halves first; of NVFP4's gradients,
    and of several devices the first one's."""

    @staticmethod
    def fresh(length: int) -> "QuantizeMeta":
        """State before the first step: a scale of 1, and no amax."""
        return QuantizeMeta(jnp.ones(1, jnp.float32), jnp.zeros(length, jnp.float32))


class QuantizeMetaSet(NamedTuple):
    """State of the operands of a layer; None: a fresh one."""

    x: QuantizeMeta | None = None
    kernel: QuantizeMeta | None = None
    grad: QuantizeMeta | None = None
