# SPDX-License-Identifier: Apache-2.0
"""Between arrays of JAX and tensors of torch, with the same bits."""

import jax
import numpy as np
import torch

_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
_TORCH = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float8_e8m0fnu": torch.uint8,
}
NAMES = {dtype: name for name, dtype in _TORCH.items() if dtype is not torch.uint8}
"""Names of JAX's dtypes by those of torch."""


def to_torch(array):
    """A tensor with the bits of an array; E8M0 is uint8."""
    values = np.array(array)
    plain = torch.from_numpy(values.view(_INTEGERS[values.dtype.itemsize]))
    return plain.view(_TORCH[values.dtype.name]).reshape(values.shape)


def to_jax(tensor):
    """An array with the bits of a tensor on the CPU."""
    plain = tensor.detach().contiguous().view(_of_size(tensor.element_size())).numpy()
    return jax.numpy.asarray(plain.view(np.dtype(jax.numpy.dtype(NAMES[tensor.dtype]))))


def _of_size(size):
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
