# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a build of torch for ROCm: devices "cuda" that are none of NVIDIA's.

They are those of `devices.npu` under that name: kernels of the CPU, on memory that nothing else can
read. `register` makes them, in a process of its own, before the package is imported, with a build
of torch for the CPU alone, which has no "cuda" else. What asks for something of NVIDIA's raises
`Asked`, which no code may catch as an answer.
"""

from types import SimpleNamespace

import torch
from devices import build


class Asked(BaseException):  # noqa: N818 - no error of a program
    """A question was asked that only a GPU of NVIDIA answers."""


def missing():
    """Say why this torch can not take the stand-in; None where it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return None
    return "torch has devices of its own for cuda"


def register():
    """Make the devices known to torch as a build for ROCm would."""
    native, cuda = build.load("rocm_device"), torch.cuda
    native.register_hooks()
    torch.version.hip = "7.0.0"
    torch.Tensor.__dlpack_c_exchange_api__ = native.exchange_table(
        torch.Tensor.__dlpack_c_exchange_api__
    )
    cuda._lazy_init = lambda: None
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.device_count, cuda.current_device = native.device_count, native.current_device
    cuda._exchange_device = native.exchange_device
    cuda._maybe_exchange_device = lambda index: native.exchange_device(
        native.current_device() if index < 0 else index
    )
    cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)  # the default one
    for module, name in (
        (cuda, "get_device_capability"),
        (cuda, "get_device_properties"),
        (torch.backends.cudnn, "version"),
    ):
        setattr(module, name, refused(f"{module.__name__}.{name}"))


def refused(name):
    def ask(*args, **kwargs):
        raise Asked(name)

    return ask
