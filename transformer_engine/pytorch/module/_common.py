# SPDX-License-Identifier: Apache-2.0
"""What programs import from the inside of modules; see `common.absent` for what is not built."""

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(globals())
__all__ = ["noop_cat", *absent.names_of(__name__)]


def noop_cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Put tensors side by side; one tensor is returned as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim=dim)
