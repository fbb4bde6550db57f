# SPDX-License-Identifier: Apache-2.0
"""Operations on lists of tensors: products by the C library, norms by torch.

An operation is ``op(chunk_size, noop_flag, tensor_lists, *args)``; `multi_tensor_applier` calls it.
It sets the flag, an int32 tensor of one element, to 1 where it meets Inf or NaN, and never clears
it. No operation waits for the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.optimizers.updates import checked_lists, run_update

__all__ = [
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
]


class MultiTensorApply:
    """Calls an operation on lists of tensors.

    `chunk_size` is handed to the operations, which do not need it.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable, noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
    ) -> Any:
        """Call an operation (see above) on the tensors that have elements; None where none has.

        `noop_flag_buffer` is [1] int32, `args` are further arguments of `op`. The lists have one
        length (RuntimeError otherwise); DTensors stand for this rank's part.
        """
        if len({len(each) for each in tensor_lists}) > 1:
            lengths = [len(each) for each in tensor_lists]
            raise RuntimeError(f"multi_tensor_applier: lists of {lengths} tensors")
        local = [[getattr(t, "_local_tensor", t) for t in each] for each in tensor_lists]
        kept = [i for i, tensor in enumerate(local[0]) if tensor.numel() > 0] if local else []
        if not kept:
            return None
        return op(self.chunk_size, noop_flag_buffer, [[e[i] for i in kept] for e in local], *args)


multi_tensor_applier = MultiTensorApply(65536)


def _flag(noop_flag: Tensor, sums: list[Tensor]) -> None:
    """Set the flag where a number is not finite."""
    device = noop_flag.device
    finite = torch.stack([each.to(device, torch.float32) for each in sums]).isfinite().all()
    noop_flag.masked_fill_(~finite, 1)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Any
) -> None:
    """Write ``input * scale``, computed in fp32, into the second list.

    The lists are of inputs and outputs, of fp32, fp16 and bf16; they may be the same tensors.
    `noop_flag`, [1] int32, is set to 1 where an input is not finite, `scale` is one number;
    `chunk_size` is ignored.
    """
    inputs, outputs = checked_lists("multi_tensor_scale", tensor_lists, 2)
    lists = [inputs, outputs, None, None, None, None]
    run_update(_core.UPDATE_SCALE, 0, lists, noop_flag, {"grad_scale": scale})


def multi_tensor_scale_tensor(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], scale: Tensor
) -> None:
    """`multi_tensor_scale` by an fp32 tensor of one element, which is not read on the host."""
    multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale.reshape(()))


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """The norm of all elements, [1] fp32, and of each tensor, [tensors] (or [0]) fp32.

    Arguments as of `multi_tensor_scale`: the flag is set where a norm is not finite, and there is
    one list of tensors, of any dtypes. The norms of tensors come with `per_tensor` alone.
    """
    del chunk_size
    with torch.no_grad():
        norms = torch._foreach_norm([tensor.float() for tensor in tensor_lists[0]], 2)
        _flag(noop_flag, norms)
        each = torch.stack([norm.to(norms[0].device) for norm in norms])
        total = torch.linalg.vector_norm(each).view(1)
        return total, each if per_tensor else each.new_empty(0)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    inv_scale: Tensor,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the tensors times `inv_scale`, an fp32 tensor of one element.

    The products are what is squared: scaled values whose squares have no finite sum have a norm.
    """
    with torch.no_grad():
        factors = {t.device: inv_scale.to(t.device).reshape(()) for t in tensor_lists[0]}
        products = [t.float() * factors[t.device] for t in tensor_lists[0]]
    return multi_tensor_l2norm(chunk_size, noop_flag, [products], per_tensor)
