# SPDX-License-Identifier: Apache-2.0
"""How a tensor is scaled, and how a cast of it is described."""

from enum import Enum
from typing import Any, NamedTuple

import jax.numpy as jnp

from transformer_engine import _core


class ScalingMode(Enum):
    """Which elements share a scale, and where scales come from.

    The last three are this library's own.
    """

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1
    MXFP8_1D_SCALING = 2
    CURRENT_TENSOR_SCALING = 3
    NVFP4_1D_SCALING = 4
    NVFP4_2D_SCALING = 5
    BLOCK_1D_SCALING = 6
    BLOCK_2D_SCALING = 7
    ROW_SCALING = 8

    def is_tensor_scaling(self) -> bool:
        """Return whether a tensor has one scale."""
        return self in (self.DELAYED_TENSOR_SCALING, self.CURRENT_TENSOR_SCALING)

    def is_block_scaling(self) -> bool:
        """Return whether groups of elements have scales of their own."""
        return self is not self.NO_SCALING and not self.is_tensor_scaling()

    def is_1d_block_scaling(self) -> bool:
        """Return whether groups lie along the dim that a GEMM sums over."""
        one = (self.MXFP8_1D_SCALING, self.NVFP4_1D_SCALING, self.BLOCK_1D_SCALING)
        return self in (*one, self.ROW_SCALING)

    @property
    def is_mxfp8_scaling(self) -> bool:
        """Whether scales are powers of two of 32 values each."""
        return self is self.MXFP8_1D_SCALING

    @property
    def is_nvfp4_scaling(self) -> bool:
        """Whether data is E2M1."""
        return self in (self.NVFP4_1D_SCALING, self.NVFP4_2D_SCALING)


TILES: dict[ScalingMode, tuple[int | None, int | None]] = {
    ScalingMode.DELAYED_TENSOR_SCALING: (None, None),
    ScalingMode.CURRENT_TENSOR_SCALING: (None, None),
    ScalingMode.ROW_SCALING: (1, None),
    ScalingMode.BLOCK_1D_SCALING: (1, 128),
    ScalingMode.BLOCK_2D_SCALING: (128, 128),
    ScalingMode.MXFP8_1D_SCALING: (1, 32),
}
"""Lines, and elements of each, that share a scale; None: all."""


class Cast(NamedTuple):
    """How an operand of a GEMM is cast; hashable."""

    mode: ScalingMode
    dtype: Any  # of the data: numpy's
    power_2: bool = False  # scales are rounded down to powers of two
    epsilon: float = 0.0  # smallest amax
    margin: int = 0  # of MXFP8
    square: bool = False  # of MXFP8: one scale for 32 x 32 values
    options: int = 0  # of NVFP4: ``_core.CAST_*``

    @property
    def rounds_at_random(self) -> bool:
        """Whether it rounds stochastically."""
        return bool(self.options & _core.CAST_STOCHASTIC)

    @property
    def largest(self) -> float:
        """The largest number of the dtype."""
        return float(jnp.finfo(self.dtype).max)
