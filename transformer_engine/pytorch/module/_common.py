# SPDX-License-Identifier: Apache-2.0
"""Names that programs import from modules' inside; see `common.absent` for those not built."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(globals())
__all__ = [
    "noop_cat",
    "set_quantizer_amax_reduction_group",
    "set_quantizer_usage_for_wgrad_all_gather",
    *absent.names_of(__name__),
]


def noop_cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Put tensors side by side; one tensor is returned as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors), dim=dim)


def set_quantizer_amax_reduction_group(quantizer: Any, amax_reduction_group: Any) -> None:
    """Have a quantizer take the largest amax of the ranks of a group; None: of this rank.

    Quantizers without the attribute ``amax_reduction_group`` stay as they are.
    """
    if hasattr(quantizer, "amax_reduction_group"):
        quantizer.amax_reduction_group = amax_reduction_group
        quantizer.with_amax_reduction = amax_reduction_group is not None


def set_quantizer_usage_for_wgrad_all_gather(quantizer: Any) -> None:
    """Have a quantizer make what ranks would gather for a weight gradient: the column-wise form.

    The row-wise one where ``supports_only_rowwise_all_gather()`` says that it alone is gathered.
    """
    rowwise = quantizer.supports_only_rowwise_all_gather()
    quantizer.set_usage(rowwise=rowwise, columnwise=not rowwise)
