# SPDX-License-Identifier: Apache-2.0
"""Test data and buffers: dtypes by name, FP8 GEMMs by counter, memory with guards around it."""

import numpy as np
import torch
from tols import BF16, E4M3, E5M2, F16, F32

from transformer_engine import _core

HIGH = (F32, F16, BF16)
FP8 = (E4M3, E5M2)
POISON = 0xAA
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
GUARD = 64  # elements before and after what a test may write
# name: elements by which the start is off a 64-element boundary, elements between rows
LAYOUTS = {"dense": (0, 0), "misaligned": (1, 0), "strided": (0, 16), "ragged": (3, 5)}
RAGGED = (1, 15, 16, 17, 63, 65, 127, 129)  # around the sizes of vectors, tiles and blocks


def name_of(dtype):
    """Name of a torch dtype in the C API ("bf16"); the id of parametrised tests."""
    if dtype is torch.float64:  # of references alone
        return "f64"
    return _core.dtype_names()[_core.dtype_code(dtype)]


def names_of(dtypes):
    """Their names in a row ("e4m3-e5m2-bf16"); the id where a test takes several at once."""
    return "-".join(map(name_of, dtypes))


def fp8_gemms():
    """Count the FP8 GEMMs since the counters were reset, on all devices."""
    gemms = {n: v for n, v in _core.counters().items() if n.startswith("gemm.")}
    return sum(v for n, v in gemms.items() if ".e4m3" in n or ".e5m2" in n)


def op_count(device, op):
    """Count the runs of an operator since the counters were reset."""
    return _core.counters().get(f"op.{device}.{op}", 0)


def normal(rng, shape, dtype, device="cpu", scale=1.0):
    """Standard normal numbers times `scale`."""
    return torch.from_numpy(rng.standard_normal(shape) * scale).to(dtype).to(device)


def floats(device, *values):
    """A float tensor of one dim."""
    return torch.tensor(values, dtype=torch.float32, device=device)


def every_value(dtype):
    """All 65536 (256) values of a 16-bit (8-bit) dtype, NaN and Inf among them, in a square."""
    bits = 8 * dtype.itemsize
    codes = np.arange(2**bits, dtype=np.uint32).astype(f"uint{bits}")
    side = 2 ** (bits // 2)
    return torch.from_numpy(codes.view(f"int{bits}").copy()).view(dtype).reshape(side, side)


class Poisoned:
    """A tensor of poison within guards; `untouched()` looks at everything around its elements.

    Parameters
    ----------
    shape : tuple of int
        Shape of `tensor`.
    dtype, device :
        Of `tensor`.
    layout : str
        Of LAYOUTS.
    """

    def __init__(self, shape, dtype, device, *, layout="dense"):
        skew, gap = LAYOUTS[layout]
        rows = int(np.prod(shape[:-1], dtype=np.int64))
        stride = shape[-1] + gap
        total = 2 * GUARD + skew + rows * stride
        integer = INTEGERS[dtype.itemsize]
        self.poison = int.from_bytes(
            bytes([POISON] * dtype.itemsize), "little", signed=integer.is_signed
        )
        self.memory = torch.full((total,), self.poison, dtype=integer, device=device)
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size if len(strides) > 1 else stride)
        self.where = (tuple(shape), tuple(strides[-len(shape) :]), GUARD + skew)
        self.tensor = self.memory.view(dtype).as_strided(*self.where)

    def put(self, values):
        """Fill the tensor; returns it."""
        self.tensor.copy_(values)
        return self.tensor

    def untouched(self):
        """True where nothing outside of the tensor was written."""
        around = self.memory.clone()
        around.as_strided(*self.where).fill_(self.poison)
        return self._is_poison(around)

    def unwritten(self):
        """True where not even the tensor was written."""
        return self._is_poison(self.memory)

    def _is_poison(self, memory):
        return bool((memory.cpu().numpy() == self.poison).all())  # torch's all takes ten times that


def laid_out(values, layout, device):
    """The values on the device, in one of the LAYOUTS."""
    return Poisoned(values.shape, values.dtype, device, layout=layout).put(values)
