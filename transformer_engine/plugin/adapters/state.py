# SPDX-License-Identifier: Apache-2.0
"""Operators that keep state between calls, or measure: scales, caches, transposes."""

import math

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.adapters.fields import Choices, Fields, sums_of, taken, written
from transformer_engine.plugin.core.ops import DType, NVTE_QKV_Format

_LARGEST = {DType.kFloat8E4M3: 448.0, DType.kFloat8E5M2: 57344.0}


def amax(choices: Choices, fields: Fields) -> None:
    """The largest magnitude, as the first of partial ones; the others are 0."""
    if fields["hadamard"]:
        choices.unexpressed("compute_amax")
    measured(choices, fields["input"], fields["partials"])


def measured(choices: Choices, values: Tensor, partials: Tensor) -> None:
    """Have an implementation of ``compute_amax`` measure; NotTakenError where none takes it."""
    found = torch.zeros(1, dtype=torch.float32, device=partials.device)
    taken(choices["compute_amax"](values, found))
    partials.zero_()
    partials[:1] = found


def transpose(choices: Choices, fields: Fields) -> None:
    """Bytes transposed, and zeros behind them."""
    data, into = fields["input"], fields["output"].view(torch.uint8)
    e5m2 = data.dtype == torch.float8_e5m2
    dtype = DType.kFloat8E5M2 if e5m2 else DType.kFloat8E4M3
    made = taken(choices["fp8_transpose"](data.view(torch.uint8), dtype, out=None))
    rows = data.shape[0]
    written("fp8_transpose", "the result", into[:, :rows], made.view(torch.uint8))
    into[:, rows:].zero_()


def scaling_update(choices: Choices, fields: Fields) -> None:
    """The update of delayed scaling, of amaxes that are in the history already."""
    name = "fused_amax_and_scale_update_after_reduction"
    scale, history = fields["scale"], fields["history"]
    rule = _rule(fields["fp8_max"])
    if rule is None:
        choices.unexpressed(name)
    algorithm = "most_recent" if fields["algo"] == _core.AMAX_MOST_RECENT else "max"
    nothing_new = scale.new_empty(0)
    taken(choices[name](nothing_new, [history], [scale], algorithm, *rule))


def _rule(largest: float) -> tuple[DType, float] | None:
    """The dtype and the margin of a largest value; None for one of neither.

    E5M2's largest is 2^7 times E4M3's, so where either fits the scales are the same.
    """
    for dtype, value in _LARGEST.items():
        margin = math.log2(value / largest) if largest > 0.0 else -1.0
        if margin >= 0.0 and value * 2.0**-margin == largest:
            return dtype, margin
    return None


def cache_append(choices: Choices, fields: Fields) -> None:
    """New keys and values behind those that sequences have.

    Packed ones have no gaps between sequences: modules leave none.
    """
    starts, counts, packed = fields["starts"], fields["counts"], fields["cu_seqlens"]
    caches, table = (fields["key_cache"], fields["value_cache"]), fields["page_table"]
    new = [fields[name].contiguous() for name in ("key", "value")]
    batch, longest = starts.shape[0], new[0].shape[0 if packed is not None else 1]
    form = NVTE_QKV_Format.NVTE_BSHD
    if packed is not None:
        form, counts = NVTE_QKV_Format.NVTE_THD, packed.diff()
    elif counts is None:
        counts = torch.full_like(starts, longest)
    pages = 1 if table is None else table.shape[1]
    sums = sums_of(counts) if packed is None else packed, sums_of(starts + counts)
    sizes = batch, longest, pages * caches[0].shape[1], pages
    taken(choices["copy_to_kv_cache"](*new, *caches, table, *sums, form, *sizes, table is None))
