# SPDX-License-Identifier: Apache-2.0
"""Operations on lists of tensors, and optimizers."""

from transformer_engine.common import absent
from transformer_engine.pytorch.optimizers.fused_adam import FusedAdam
from transformer_engine.pytorch.optimizers.fused_sgd import FusedSGD
from transformer_engine.pytorch.optimizers.multi_tensor_apply import (
    MultiTensorApply,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)

__getattr__, __dir__ = absent.attach(globals())
__all__ = [
    "FusedAdam",
    "FusedSGD",
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
    *absent.names_of(__name__),
]
