# SPDX-License-Identifier: Apache-2.0
"""What the native module asks about tensors that are not plainly `Tensor` or `Parameter`."""

from torch import Tensor

from transformer_engine.pytorch.modes import wraps_tensors


def plain_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor over the memory of an instance of a proper subclass of `Tensor`.

    A subclass without a dispatch of its own (a `torch.nn.Buffer`, a user's ``class T(Tensor)``) is
    only a label on real memory. One with ``__torch_dispatch__`` may have no memory at all, or
    memory that means something else, so its bytes must not be read: TypeError.
    """
    kind = type(tensor)
    dispatches = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    if dispatches or wraps_tensors(tensor):
        raise TypeError(
            f"{kind.__module__}.{kind.__qualname__}: tensors of this class have no memory that a "
            "kernel can read; convert it to a plain torch.Tensor first"
        )
    return tensor.as_subclass(Tensor)
