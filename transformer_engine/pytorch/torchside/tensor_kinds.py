# SPDX-License-Identifier: Apache-2.0
"""Questions about tensors of other classes than `Tensor` and `Parameter`."""

from typing import Any

from torch import Tensor

from transformer_engine.pytorch.torchside.modes import wraps_tensors

ALIGNMENT = 16
"""Native code pads a line of quantized data with zeros to a multiple of this length."""


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


def is_quantized(tensor: Any) -> bool:
    """Return whether a tensor is a `QuantizedTensor`, without loading that class."""
    return type(tensor) is not Tensor and getattr(type(tensor), "_TE_QUANTIZED", False)


def local_of(tensor: Any) -> Any:
    """Get this rank's part of a sharded tensor (DTensor); any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def expect_tensor(label: str, given: Any) -> None:
    """Raise TypeError for an argument that is no tensor."""
    if not isinstance(given, Tensor):
        raise TypeError(f"{label}: {type(given).__name__}, expected a tensor")
