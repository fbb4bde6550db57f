# SPDX-License-Identifier: Apache-2.0
"""Cases of copies: between layouts, of packed sequences, of groups of rows, into caches."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, name_of, same


def _made(name: str, args: tuple, exact: Tensor) -> Case:
    return Case(name, args, lambda found: [same("the result", found, exact)])


def _into(name: str, args: tuple, out: Tensor, exact: Tensor, by_name: bool = False) -> Case:
    """A call that writes all of `out`."""
    more = {"out": out} if by_name else {}
    return Case(name, args, lambda found: [same("out", out, exact)], more, (out,))


def _swap(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for dtype in draw.dtypes:
        for shape in ((5, 7), (3, 4, 5), (1, 9, 2), (33, 65), (0, 4), (4, 0, 3)):
            x = draw.normal(shape, dtype)
            exact = x.transpose(0, 1).contiguous()
            name = f"{name_of(dtype)} {list(shape)}"
            out = draw.place(exact.shape, dtype)
            yield _into(name, (x,), out, exact, True)
        x = draw.normal((6, 4, 5), dtype)
        exact = x.transpose(0, 1).contiguous()
        out = draw.place(exact.shape, dtype)
        yield _into(f"{name_of(dtype)} strided", (draw.strided(x),), out, exact, True)
        made = _made(f"{name_of(dtype)} a new tensor", (x,), exact)
        yield replace(made, kwargs={"out": None})


def _prepare_forward(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for dtype in draw.dtypes:
        for s, b, heads, d in ((5, 2, 3, 8), (1, 1, 1, 16), (33, 3, 2, 64), (7, 2, 5, 5)):
            whole = draw.normal((s, b, heads, 3 * d), dtype)
            exact = torch.stack([t.transpose(0, 1) for t in whole.split(d, -1)])
            kept = whole.clone()

            def wanted(
                found: Any, exact: Any = exact, whole: Any = whole, kept: Any = kept
            ) -> list:
                return [same("the result", found, exact), same("what it reads", whole, kept)]

            yield Case(f"{name_of(dtype)} {[s, b, heads, d]}", (whole[..., :d],), wanted)


def _prepare_backward(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for dtype in draw.dtypes:
        for shape in ((2, 5, 3, 8), (1, 1, 1, 16), (3, 33, 2, 64), (2, 7, 5, 5)):
            parts = [draw.normal(shape, dtype) for _ in range(3)]
            exact = torch.cat([t.transpose(0, 1) for t in parts], -1)
            yield _made(f"{name_of(dtype)} {list(shape)}", tuple(parts), exact)


# ---- packed sequences --------------------------------------------------------------------------

_LENGTHS = ((3, 0, 5), (1,), (0, 4), (7, 2, 0), (64, 1, 33))


def _sums(draw: Draw, lengths: tuple) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(draw.device, torch.int32)


def _packed(op: str, draw: Draw) -> Iterator[Case]:
    apart = op == "convert_thd_to_bshd"
    for dtype in draw.dtypes:
        for lengths in _LENGTHS:
            for behind in (0, 2):  # tokens of no sequence, and room behind the longest
                cu, total = _sums(draw, lengths), sum(lengths) + behind
                b, room = len(lengths), max(lengths) + behind
                one = draw.normal((total, 2, 5), dtype)
                other = draw.normal((b, room, 2, 5), dtype)
                exact = torch.zeros_like(other if apart else one)
                for i, (first, end) in enumerate(pairwise(cu.tolist())):
                    if apart:
                        exact[i, : end - first] = one[first:end]
                    else:
                        exact[first:end] = other[i, : end - first]
                args = (one, cu, b, room) if apart else (other, cu, total)
                name = f"{name_of(dtype)} {list(lengths)}, {behind} more"
                yield _made(name, args, exact)


# ---- rows of groups ----------------------------------------------------------------------------


def _groups(op: str, draw: Draw) -> Iterator[Case]:
    padding = op == "fused_multi_row_padding"
    lists = (([2, 0, 7], [4, 4, 8]), ([3], [3]), ([1, 17, 33], [16, 32, 48]), ([0, 0], [0, 16]))
    for dtype in draw.dtypes:
        for rows, room in lists:
            for columns in (4, 37):
                narrow = draw.normal((sum(rows), columns), dtype)
                wide = draw.normal((sum(room), columns), dtype)
                given, out = (narrow, wide) if padding else (wide, narrow)
                exact = torch.zeros_like(out)
                places = zip(exact.split(room if padding else rows),
                             given.split(rows if padding else room), rows, strict=True)  # fmt: skip
                for place, group, count in places:
                    place[:count] = group[:count]
                args = (given, out, *((rows, room) if padding else (room, rows)))
                yield _into(f"{name_of(dtype)} {rows} of {columns}", args, out, exact)


# ---- caches ------------------------------------------------------------------------------------


def _cache(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for dtype in draw.dtypes:
        for form in ("bshd", "sbhd", "thd"):
            for paged in (False, True):
                for new in ((3, 1), (0, 2), (1, 1)):
                    yield _appended(draw, dtype, form, paged, new)


def _appended(draw: Draw, dtype: torch.dtype, form: str, paged: bool, new: tuple) -> Case:
    """Sequences of 2 and 5 tokens get some more; pages have 4 tokens, a cache without pages 8."""
    from transformer_engine.plugin.core.ops import NVTE_QKV_Format

    had, size = (2, 5), 4 if paged else 8
    rows = [[4, 1], [0, 5]] if paged else [[1], [0]]
    table = torch.tensor(rows, dtype=torch.int32, device=draw.device)
    longest = max(new)
    lead = {"bshd": (2, longest), "sbhd": (longest, 2), "thd": (sum(new),)}[form]
    tokens = [draw.normal((*lead, 2, d), dtype) for d in (8, 16)]
    caches = [draw.normal((6 if paged else 3, size, 2, d), dtype) for d in (8, 16)]
    exact = []
    for given, cache in zip(tokens, caches, strict=True):
        made = cache.clone()
        if not paged:  # sequences move to their numbers in the batch
            made[:2] = cache[[1, 0]]
        for i, first in enumerate((0, new[0])):
            if form == "thd":
                own = given[first : first + new[i]]
            else:
                own = (given[i] if form == "bshd" else given[:, i])[: new[i]]
            for j, token in enumerate(own):
                at = had[i] + j
                made[rows[i][at // size] if paged else i, at % size] = token
        exact.append(made)
    cached = tuple(n + m for n, m in zip(had, new, strict=True))
    args = (
        *tokens, *caches, table, _sums(draw, new), _sums(draw, cached),
        NVTE_QKV_Format[f"NVTE_{form.upper()}"], 2, longest, 8, table.shape[1], not paged,
    )  # fmt: skip

    def wanted(found: Any) -> list:
        del found
        pairs = zip(("k_cache", "v_cache"), caches, exact, strict=True)
        return [same(name, cache, other) for name, cache, other in pairs]

    name = f"{name_of(dtype)} {form}{' in pages' * paged} {list(new)} more"
    return Case(name, args, wanted, written=tuple(caches))


CASES = {
    "swap_first_dims": _swap,
    "fa_prepare_fwd": _prepare_forward,
    "fa_prepare_bwd": _prepare_backward,
    "convert_thd_to_bshd": _packed,
    "convert_bshd_to_thd": _packed,
    "fused_multi_row_padding": _groups,
    "fused_multi_row_unpadding": _groups,
    "copy_to_kv_cache": _cache,
}
