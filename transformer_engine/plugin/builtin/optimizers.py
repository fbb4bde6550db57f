# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps and reductions over lists of tensors: those of `transformer_engine.pytorch`.

`multi_tensor_scale` and the norms set `noop_flag` to 1 where they meet Inf or NaN.
"""

from torch import Tensor

from transformer_engine.pytorch.optimizers import multi_tensor_apply
from transformer_engine.pytorch.optimizers.multi_tensor_apply import (
    multi_tensor_l2norm,
    multi_tensor_scale_tensor,
)
from transformer_engine.pytorch.optimizers.multi_tensor_step import (
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_adam_fp8,
    multi_tensor_adam_param_remainder,
    multi_tensor_compute_scale_and_scale_inv,
    multi_tensor_compute_scale_inv_e8m0,
    multi_tensor_sgd,
)
from transformer_engine.pytorch.optimizers.updates import Lists, checked_lists

__all__ = [
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_compute_scale_inv_e8m0",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
]


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float
) -> None:
    """Write the first list times `scale` into the second; see `optimizers.multi_tensor_scale`."""
    lists = checked_lists("multi_tensor_scale", tensor_lists, 2)
    if not lists[0]:
        return
    multi_tensor_apply.multi_tensor_scale(chunk_size, noop_flag, lists, scale)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    scale: Tensor,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the tensors times `scale`, an fp32 tensor of one element."""
    given = chunk_size, noop_flag, tensor_lists, scale, per_tensor
    return multi_tensor_apply.multi_tensor_unscale_l2norm(*given)
