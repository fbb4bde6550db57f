# SPDX-License-Identifier: Apache-2.0
"""Names and numbers that programs compare with."""

from enum import IntEnum
from typing import Any

import torch

__all__ = [
    "AttnBiasTypes",
    "AttnMaskTypes",
    "AttnTypes",
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "GemmParallelModes",
    "LayerTypes",
    "MXFP8_BLOCK_SCALING_SIZE",
    "NVFP4_BLOCK_SCALING_SIZE",
    "TE_DType",
    "TE_DType_To_Torch",
    "dist_group_type",
    "torch_dtype",
]


class DType(IntEnum):
    """Codes of element types."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


TE_DType: dict[torch.dtype, DType] = {
    torch.uint8: DType.kByte,
    torch.int32: DType.kInt32,
    torch.float32: DType.kFloat32,
    torch.float16: DType.kFloat16,
    torch.bfloat16: DType.kBFloat16,
    torch.float8_e4m3fn: DType.kFloat8E4M3,
    torch.float8_e5m2: DType.kFloat8E5M2,
}
"""Code of a torch dtype."""

TE_DType_To_Torch: dict[DType, torch.dtype] = {code: dtype for dtype, code in TE_DType.items()}
"""Torch dtype of a code."""


FP8FwdTensors = IntEnum(
    "FP8FwdTensors",
    [f"GEMM{i}_{what}" for i in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")],
    start=0,
)
"""Slots of a module's forward state: three for each GEMM."""

FP8BwdTensors = IntEnum(
    "FP8BwdTensors", [f"GRAD_{what}{i}" for i in (1, 2, 3) for what in ("OUTPUT", "INPUT")], start=0
)
"""Slots of a module's backward state: two for each GEMM."""

MXFP8_BLOCK_SCALING_SIZE = 32
"""Values that share a scale in MXFP8."""
NVFP4_BLOCK_SCALING_SIZE = 16
"""Values that share a scale in NVFP4."""

AttnMaskTypes = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
AttnTypes = ("self", "cross")
AttnBiasTypes = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)

dist_group_type = torch.distributed.ProcessGroup if torch.distributed.is_available() else None
"""Class of a group of ranks."""


def torch_dtype(op: str, name: str, value: Any) -> torch.dtype:
    """The torch dtype of an argument, given as that, as a `DType` or as its number."""
    if isinstance(value, torch.dtype):
        return value
    found = TE_DType_To_Torch.get(value)
    if found is None:
        raise TypeError(f"{op}: {name}={value!r}, expected a torch.dtype or a DType")
    return found
