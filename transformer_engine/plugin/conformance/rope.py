# SPDX-License-Identifier: Apache-2.0
"""Cases of rotary embeddings, and their gradients."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Result, name_of

_TOKENS, _BATCH, _HEADS, _DIM = 8, 2, 3, 16
_RESULT = "the result"


def _angles(draw: Draw, count: int, interleaved: bool) -> Tensor:
    """fp32 [positions, 1, 1, count]: each frequency turns two channels."""
    rates = 10000.0 ** -(torch.arange(0, count, 2, dtype=torch.float64) / count)
    each = torch.arange(4 * _TOKENS, dtype=torch.float64)[:, None] * rates
    both = each.repeat_interleave(2, -1) if interleaved else torch.cat((each, each), -1)
    return both.float()[:, None, None].to(draw.device)


def _format(form: str) -> tuple[tuple[int, ...], int]:
    """Leading dims of tensors of a format, and its `NVTE_QKV_Format`."""
    from transformer_engine.plugin.core.ops import NVTE_QKV_Format

    leading = {"sbhd": (_TOKENS, _BATCH), "bshd": (_BATCH, _TOKENS), "thd": (12,)}[form]
    return leading, NVTE_QKV_Format[f"NVTE_{form.upper()}"]


def _starts(draw: Draw) -> Tensor:
    return torch.tensor([3, 11], dtype=torch.int32, device=draw.device)


@Case.of("fused_rope_forward", "fused_rope_backward")
def _rope(op: str, draw: Draw) -> Iterator[Case]:
    backward = op == "fused_rope_backward"
    ranks = (_DIM, (1, 0)), (12, (1, 0)), (12, (2, 1))
    options = product(draw.dtypes, ("sbhd", "bshd", "thd"), (False, True), ranks)
    for dtype, form, interleaved, (count, (size, rank)) in options:
        (leading, kind), cu = _format(form), None
        if form == "thd":
            cu = torch.tensor([0, 4, 4, 12], dtype=torch.int32, device=draw.device) * size
        x = draw.normal((*leading, _HEADS, _DIM), dtype)
        starts = () if backward else (None,)
        angles = _angles(draw, count, interleaved)
        how = f"{' interleaved' * interleaved} rank {rank} of {size}"
        name = f"{name_of(dtype)} {form} {count} of {_DIM}{how}"
        args = (x, angles, *starts, kind, interleaved, cu, size, rank)
        yield Case(name, args, (Result(_RESULT, dtype),))
    # Sequences that begin at positions of their own (a gradient takes none), or have such angles.
    for dtype, form in product(draw.dtypes, ("sbhd", "bshd")):
        leading, kind = _format(form)
        own = draw.normal((_TOKENS, _BATCH, 1, 12), torch.float32)
        own[..., 6:] = own[..., :6]
        given = {"angles": (own, *(() if backward else (None,)))}
        if not backward:
            given["positions"] = _angles(draw, 12, False), _starts(draw)
        for what, angles_and_starts in given.items():
            x = draw.normal((*leading, _HEADS, _DIM), dtype)
            args = (x, *angles_and_starts, kind, False, None, 1, 0)
            name = f"{name_of(dtype)} {form} {what} of each sequence"
            yield Case(name, args, (Result(_RESULT, dtype),))


_SIZES = ((32, 16, 24), (16, 16, 16), (48, 8, 8))
"""Channels of a group of queries, of its key and of its value, in a projection."""


@Case.of("fused_qkv_rope_forward", "fused_qkv_rope_backward")
def _projection(op: str, draw: Draw) -> Iterator[Case]:
    """Queries, keys and values of a projection, and its gradient."""
    backward = op == "fused_qkv_rope_backward"
    options = product(draw.dtypes, ("sbhd", "bshd"), (False, True), _SIZES, ((1, 0), (2, 1)))
    for dtype, form, interleaved, sizes, (size, rank) in options:
        leading, kind = _format(form)
        angles = [_angles(draw, n, interleaved) for n in (sizes[1], sizes[1] // 2)]
        rest = (list(sizes), kind, interleaved, size, rank)
        name = f"{name_of(dtype)} {form} {list(sizes)}{' interleaved' * interleaved}"
        ending = f" rank {rank} of {size}"
        if backward:
            heads = _HEADS * sizes[0] // sizes[1], _HEADS, _HEADS
            widths = sizes[1], sizes[1], sizes[2]
            pairs = zip(heads, widths, strict=True)
            grads = [draw.normal((*leading, *pair), dtype) for pair in pairs]
            wanted = (Result("the gradient", dtype),)
            yield Case(f"{name}{ending}", (*grads, *angles, *rest), wanted)
            continue
        x = draw.normal((*leading, _HEADS, sum(sizes)), dtype)
        wanted = tuple(Result(what, dtype) for what in ("queries", "keys", "values"))
        yield Case(f"{name}{ending}", (x, *angles, None, *rest), wanted)
        if size == 1:
            args = (x, *angles, _starts(draw), *rest)
            yield Case(f"{name} from positions{ending}", args, wanted)
