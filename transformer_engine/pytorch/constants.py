# SPDX-License-Identifier: Apache-2.0
"""Names and numbers that programs compare with."""

from enum import Enum, IntEnum
from typing import Any

import torch


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

    @classmethod
    def cast(cls, dtype: Any) -> "DType":
        """The code of a dtype that is one of these, its number or a torch dtype.

        TypeError for a torch dtype that has none, ValueError for another number.
        """
        if not isinstance(dtype, torch.dtype):
            return cls(int(dtype))
        if dtype not in TE_DType:
            raise TypeError(f"DType.cast: dtype={dtype}, expected one of {[*map(str, TE_DType)]}")
        return TE_DType[dtype]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickle by value; some releases of Python would name the builtin `getattr` instead."""
        return DType, (int(self),)


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

FP8FwdTensorIdx, FP8BwdTensorIdx = FP8FwdTensors, FP8BwdTensors

MXFP8_BLOCK_SCALING_SIZE = 32
"""Values that share a scale in MXFP8."""
NVFP4_BLOCK_SCALING_SIZE = 16
"""Values that share a scale in NVFP4."""

AttnMaskTypes = tuple(
    "no_mask padding causal padding_causal causal_bottom_right padding_causal_bottom_right "
    "arbitrary".split()
)
AttnTypes = ("self", "cross")
AttnBiasTypes = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
QKVLayouts = tuple(
    "sb3hd sbh3d sbhd_sb2hd sbhd_sbh2d sbhd_sbhd_sbhd bs3hd bsh3d bshd_bs2hd bshd_bsh2d "
    "bshd_bshd_bshd t3hd th3d thd_t2hd thd_th2d thd_thd_thd sbhd_bshd_bshd bshd_sbhd_sbhd "
    "thd_bshd_bshd thd_sbhd_sbhd paged_kv_bshd_bshd_bshd paged_kv_bshd_sbhd_sbhd "
    "paged_kv_sbhd_bshd_bshd paged_kv_sbhd_sbhd_sbhd paged_kv_thd_bshd_bshd "
    "paged_kv_thd_sbhd_sbhd".split()
)
"""How queries, keys and values lie in memory: in one tensor, two or three."""
LayerTypes = ("encoder", "decoder")
GemmParallelModes = ("row", "column", None)


class CPLoadBalancingStrategy(Enum):
    """How context parallelism deals tokens to ranks: see `attention.context_parallel`.

    Modules take a group of one rank, which has them all.
    """

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    NO_LOAD_BALANCE = "no_load_balance"


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
