# SPDX-License-Identifier: Apache-2.0
"""The name of NVIDIA Transformer Engine's native module, for programs that import from it.

The native module of this library is `transformer_engine._core`. Here stand the few of the
other's entries that are plain facts or short; those that are not built yet raise when they are
called (`transformer_engine.common.absent`).
"""

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.constants import DType, FP8BwdTensors, FP8FwdTensors

_QUANTIZERS = (
    "Float8Quantizer",
    "Float8CurrentScalingQuantizer",
    "Float8BlockQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
)
_LAZY = dict.fromkeys(_QUANTIZERS, "transformer_engine.pytorch.tensor")

__getattr__, __dir__ = absent.attach(globals(), lazy=_LAZY)
__all__ = [
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    *_LAZY,
    "thd_get_partitioned_indices",
    *absent.names_of(__name__),
]


def thd_get_partitioned_indices(
    cu_seqlens: Tensor, total_tokens: int, world_size: int, rank: int
) -> Tensor:
    """Tokens of packed sequences that a rank of context parallelism owns.

    Each sequence is cut into 2 * world_size chunks; rank r has chunk r and chunk
    2 * world_size - 1 - r.

    Parameters
    ----------
    cu_seqlens : Tensor
        [b + 1] int32: first token of each sequence, and their sum; lengths are multiples of
        2 * world_size.
    total_tokens : int
        Tokens of all sequences.
    world_size, rank : int
        Ranks, and which one.

    Returns
    -------
    Tensor
        [total_tokens / world_size] int32, on the device of `cu_seqlens`.

    Raises
    ------
    ValueError
        A length is no multiple.
    """
    starts = cu_seqlens.tolist()
    pieces = []
    for start, end in zip(starts, starts[1:], strict=False):
        chunk, rest = divmod(end - start, 2 * world_size)
        if rest:
            raise ValueError(
                f"thd_get_partitioned_indices: a sequence of {end - start} tokens, expected a "
                f"multiple of {2 * world_size}"
            )
        for index in (rank, 2 * world_size - 1 - rank):
            pieces.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
    found = torch.cat(pieces).to(cu_seqlens.device, torch.int32)
    if len(found) != total_tokens // world_size:
        raise ValueError(
            f"thd_get_partitioned_indices: total_tokens={total_tokens}, but the sequences of "
            f"cu_seqlens have {starts[-1] - starts[0]}"
        )
    return found
