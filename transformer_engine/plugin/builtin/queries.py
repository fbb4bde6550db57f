# SPDX-License-Identifier: Apache-2.0
"""Questions about libraries, and the empty state of delayed scaling."""

import ctypes
import functools

import torch

from transformer_engine.plugin.core.ops import FP8TensorMeta


@functools.cache
def get_cublasLt_version() -> int:
    """Version of the cuBLASLt that torch has loaded, as its own function gives it; 0: none."""
    if torch.version.cuda is None:
        return 0
    name = f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}"
    try:
        ask = ctypes.CDLL(name).cublasLtGetVersion
    except (OSError, AttributeError):
        return 0
    ask.restype = ctypes.c_size_t
    return int(ask())


def get_cudnn_version() -> int:
    """Version of cuDNN, as its own function gives it; 0 where there is none."""
    return int(torch.backends.cudnn.version() or 0)


def get_num_cublas_streams() -> int:
    """Streams that GEMMs of a group run on: 1, the current one."""
    return 1


def create_fp8_tensor_meta() -> FP8TensorMeta:
    """Make a state of delayed scaling, to be filled by its caller."""
    return FP8TensorMeta()
