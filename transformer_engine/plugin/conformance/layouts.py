# SPDX-License-Identifier: Apache-2.0
"""Cases of copies: between layouts, of packed sequences, of groups of rows, into caches."""

from collections.abc import Iterator
from itertools import accumulate, product

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Result, name_of

_MADE = (Result("the result", depth=0),)


def _into(name: str, args: tuple, out: Tensor, by_name: bool = False) -> Case:
    """A call that writes all of `out`."""
    more = {"out": out} if by_name else {}
    wanted = (None,)
    return Case(name, args, wanted, more, left=((out, Result("out", depth=0)),), wide=False)


@Case.of("swap_first_dims")
def _swap(draw: Draw) -> Iterator[Case]:
    for dtype in draw.dtypes:
        what = name_of(dtype)
        given = [
            (f"{what} {list(shape)}", draw.normal(shape, dtype))
            for shape in ((5, 7), (3, 4, 5), (1, 9, 2), (33, 65), (0, 4), (4, 0, 3))
        ]
        x = draw.normal((6, 4, 5), dtype)
        for name, one in (*given, (f"{what} strided", draw.strided(x))):
            out = draw.place((one.shape[1], one.shape[0], *one.shape[2:]), dtype)
            yield _into(name, (one,), out, True)
        yield Case(f"{what} a new tensor", (x,), _MADE, {"out": None}, wide=False)


@Case.of("fa_prepare_fwd")
def _prepare_forward(draw: Draw) -> Iterator[Case]:
    """It reads what lies beside its argument."""
    for dtype in draw.dtypes:
        for s, b, heads, d in ((5, 2, 3, 8), (1, 1, 1, 16), (33, 3, 2, 64), (7, 2, 5, 5)):
            whole = draw.normal((s, b, heads, 3 * d), dtype)
            name = f"{name_of(dtype)} {[s, b, heads, d]}"
            yield Case(name, (whole[..., :d],), _MADE, wide=False)


@Case.of("fa_prepare_bwd")
def _prepare_backward(draw: Draw) -> Iterator[Case]:
    for dtype in draw.dtypes:
        for shape in ((2, 5, 3, 8), (1, 1, 1, 16), (3, 33, 2, 64), (2, 7, 5, 5)):
            parts = tuple(draw.normal(shape, dtype) for _ in range(3))
            yield Case(f"{name_of(dtype)} {list(shape)}", parts, _MADE, wide=False)


# ---- packed sequences --------------------------------------------------------------------------

_LENGTHS = ((3, 0, 5), (1,), (0, 4), (7, 2, 0), (64, 1, 33))


def sums(draw: Draw, lengths: tuple) -> Tensor:
    """[sequences + 1] int32: of none, of the first, of the first two, ..."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=draw.device)


@Case.of("convert_thd_to_bshd", "convert_bshd_to_thd")
def _packed(op: str, draw: Draw) -> Iterator[Case]:
    behind = 0, 2  # tokens of no sequence, and room behind the longest
    for dtype, lengths, more in product(draw.dtypes, _LENGTHS, behind):
        cu, total = sums(draw, lengths), sum(lengths) + more
        b, room = len(lengths), max(lengths) + more
        if op == "convert_thd_to_bshd":
            args: tuple = (draw.normal((total, 2, 5), dtype), cu, b, room)
        else:
            args = (draw.normal((b, room, 2, 5), dtype), cu, total)
        yield Case(f"{name_of(dtype)} {list(lengths)}, {more} more", args, _MADE, wide=False)


# ---- rows of groups ----------------------------------------------------------------------------


@Case.of("fused_multi_row_padding", "fused_multi_row_unpadding")
def _groups(op: str, draw: Draw) -> Iterator[Case]:
    lists = (([2, 0, 7], [4, 4, 8]), ([3], [3]), ([1, 17, 33], [16, 32, 48]), ([0, 0], [0, 16]))
    for dtype, (rows, room), columns in product(draw.dtypes, lists, (4, 37)):
        given = [draw.normal((sum(each), columns), dtype) for each in (rows, room)]
        each = [rows, room]
        if op == "fused_multi_row_unpadding":
            given, each = given[::-1], each[::-1]
        yield _into(f"{name_of(dtype)} {rows} of {columns}", (*given, *each), given[1])


# ---- caches ------------------------------------------------------------------------------------


@Case.of("copy_to_kv_cache")
def _cache(draw: Draw) -> Iterator[Case]:
    """Sequences of 2 and 5 tokens get some more; pages have 4 tokens, a cache without pages 8."""
    from transformer_engine.plugin.core.ops import NVTE_QKV_Format

    every = product(draw.dtypes, ("bshd", "sbhd", "thd"), (False, True), ((3, 1), (0, 2), (1, 1)))
    for dtype, form, paged, new in every:
        rows, longest = [[4, 1], [0, 5]] if paged else [[1], [0]], max(new)
        table = torch.tensor(rows, dtype=torch.int32, device=draw.device)
        lead = {"bshd": (2, longest), "sbhd": (longest, 2), "thd": (sum(new),)}[form]
        tokens = [draw.normal((*lead, 2, d), dtype) for d in (8, 16)]
        size = (6, 4) if paged else (3, 8)
        caches = [draw.normal((*size, 2, d), dtype) for d in (8, 16)]
        had = tuple(n + m for n, m in zip((2, 5), new, strict=True))
        args = (
            *(*tokens, *caches, table, sums(draw, new), sums(draw, had)),
            *(NVTE_QKV_Format[f"NVTE_{form.upper()}"], 2, longest, 8, table.shape[1], not paged),
        )
        results = (Result("k_cache", depth=0), Result("v_cache", depth=0))
        left = tuple(zip(caches, results, strict=True))
        name = f"{name_of(dtype)} {form}{' in pages' * paged} {list(new)} more"
        yield Case(name, args, (None,), left=left, wide=False)
