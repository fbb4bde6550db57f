# SPDX-License-Identifier: Apache-2.0
"""Cases of copies: between layouts, of packed sequences, of groups of rows, into caches.

And of context parallelism of packed sequences: tokens of a rank, halves, corrections.
"""

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


# ---- context parallelism -----------------------------------------------------------------------

_EVEN = ((4, 8, 2), (6,), (0, 2, 4), (2, 0, 0, 6, 0), (64, 34))
_HEADS, _CHANNELS = 3, 5


def _halved(lengths: tuple) -> tuple:
    return tuple(n // 2 for n in lengths)


@Case.of("thd_get_partitioned_indices")
def _indices(draw: Draw) -> Iterator[Case]:
    for size, chunks in product((1, 2, 4), ((1, 3, 2), (5,), (2, 0, 1))):
        lengths = tuple(2 * size * n for n in chunks)
        for rank in range(size):
            args = (sums(draw, lengths), sum(lengths), size, rank)
            name = f"{list(lengths)}, rank {rank} of {size}"
            yield Case(name, args, (Result("the tokens", depth=0),))


def _tokens(draw: Draw, dtype: torch.dtype, tokens: int, pair: bool = False) -> Tensor:
    """Keys and values in one tensor, or one of heads."""
    return draw.normal((*([2] * pair), tokens, _HEADS, _CHANNELS), dtype)


@Case.of("thd_read_half_tensor")
def _half(draw: Draw) -> Iterator[Case]:
    for dtype, lengths, pair in product(draw.dtypes, _EVEN, (False, True)):
        x = _tokens(draw, dtype, sum(lengths), pair)
        for half in range(2):
            name = f"{name_of(dtype)} {list(lengths)} half {half}{' of two' * pair}"
            yield Case(name, (x, sums(draw, lengths), half), (Result("the half", dtype, 0),))


# Logarithms of sums


def _lse(draw: Draw, lengths: tuple, packed: bool, fill: float, scale: float = 1.0) -> Tensor:
    """[heads, tokens], or [sequences, heads, the longest] with something behind the ends."""
    lse = draw.normal((_HEADS, sum(lengths)), torch.float32, scale)
    if packed:
        return lse
    made = lse.new_full((len(lengths), _HEADS, max(lengths)), fill)
    for row, part in zip(made, lse.split(list(lengths), 1), strict=True):
        row[:, : part.shape[1]] = part
    return made


@Case.of("thd_read_second_half_lse")
def _read_lse(draw: Draw) -> Iterator[Case]:
    for lengths, packed in product(_EVEN, (False, True)):
        short = _halved(lengths)
        size = sum(short) if packed else max(short)
        args = (_lse(draw, lengths, packed, 9.0), sums(draw, lengths), packed, size)
        wanted = (Result("the half", torch.float32, 0),)
        yield Case(f"{list(lengths)}{' packed' * packed}", args, wanted)


@Case.of("thd_second_half_lse_correction")
def _correct_lse(draw: Draw) -> Iterator[Case]:
    for lengths, packed, scale in product(_EVEN, (False, True), (1.0, 200.0)):
        lse = _lse(draw, lengths, packed, 9.0, scale)
        step = _lse(draw, _halved(lengths), packed, 7.0, scale)
        # Of one token nothing was attended until now: the first of a second half.
        entry = next(i for i, n in enumerate(lengths) if n)
        (lse if packed else lse[entry])[0, lengths[entry] // 2] = -torch.inf
        args = (lse, step, sums(draw, lengths), packed)
        name = f"{list(lengths)}{' packed' * packed}{' large' * (scale > 1.0)}"
        yield Case(name, args, (None,), left=((lse, Result("lse", torch.float32)),))


# Corrections


@Case.of("thd_out_correction")
def _correct_out(draw: Draw) -> Iterator[Case]:
    flags = product((False, True), (False, True))
    for dtype, lengths, (alone, packed) in product(draw.dtypes, _EVEN, list(flags)):
        short = _halved(lengths) if alone else lengths
        out, step = (_tokens(draw, dtype, sum(each)) for each in (lengths, short))
        lse = _lse(draw, lengths, packed, 9.0), _lse(draw, short, packed, 7.0)
        args = (out, step, *lse, sums(draw, lengths), alone, packed)
        how = f"{' second halves' * alone}{' packed' * packed}"
        name = f"{name_of(dtype)} {list(lengths)}{how}"
        yield Case(name, args, (None,), left=((out, Result("out", dtype)),))


_WORDS = (
    *(("add", "add"), ("copy", "add"), ("add", "copy"), ("copy", "copy")),
    *(("none", "add"), ("add", "none"), ("none", "copy"), ("copy", "none")),
)


@Case.of("thd_grad_correction")
def _correct_grad(draw: Draw) -> Iterator[Case]:
    for dtype, lengths, pair, words in product(draw.dtypes, _EVEN, (False, True), _WORDS):
        tokens = sum(lengths)
        grad = _tokens(draw, dtype, tokens, pair)
        step = _tokens(draw, dtype, tokens // 2 if "none" in words else tokens, pair)
        args = (grad, step, sums(draw, lengths), *words)
        name = f"{name_of(dtype)} {list(lengths)} {words[0]}, {words[1]}{' of two' * pair}"
        yield Case(name, args, (None,), left=((grad, Result("grad", dtype)),))
