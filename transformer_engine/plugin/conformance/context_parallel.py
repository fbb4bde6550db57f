# SPDX-License-Identifier: Apache-2.0
"""Cases of context parallelism of packed sequences: tokens of a rank, halves, corrections."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Result, name_of
from transformer_engine.plugin.conformance.layouts import sums

_LENGTHS = ((4, 8, 2), (6,), (0, 2, 4), (2, 0, 0, 6, 0), (64, 34))
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
    for dtype, lengths, pair in product(draw.dtypes, _LENGTHS, (False, True)):
        x = _tokens(draw, dtype, sum(lengths), pair)
        for half in range(2):
            name = f"{name_of(dtype)} {list(lengths)} half {half}{' of two' * pair}"
            yield Case(name, (x, sums(draw, lengths), half), (Result("the half", dtype, 0),))


# ---- logarithms of sums ------------------------------------------------------------------------


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
    for lengths, packed in product(_LENGTHS, (False, True)):
        short = _halved(lengths)
        size = sum(short) if packed else max(short)
        args = (_lse(draw, lengths, packed, 9.0), sums(draw, lengths), packed, size)
        wanted = (Result("the half", torch.float32, 0),)
        yield Case(f"{list(lengths)}{' packed' * packed}", args, wanted)


@Case.of("thd_second_half_lse_correction")
def _correct_lse(draw: Draw) -> Iterator[Case]:
    for lengths, packed, scale in product(_LENGTHS, (False, True), (1.0, 200.0)):
        lse = _lse(draw, lengths, packed, 9.0, scale)
        step = _lse(draw, _halved(lengths), packed, 7.0, scale)
        # Of one token nothing was attended until now: the first of a second half.
        entry = next(i for i, n in enumerate(lengths) if n)
        (lse if packed else lse[entry])[0, lengths[entry] // 2] = -torch.inf
        args = (lse, step, sums(draw, lengths), packed)
        name = f"{list(lengths)}{' packed' * packed}{' large' * (scale > 1.0)}"
        yield Case(name, args, (None,), left=((lse, Result("lse", torch.float32)),))


# ---- corrections -------------------------------------------------------------------------------


@Case.of("thd_out_correction")
def _correct_out(draw: Draw) -> Iterator[Case]:
    flags = product((False, True), (False, True))
    for dtype, lengths, (alone, packed) in product(draw.dtypes, _LENGTHS, list(flags)):
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
    for dtype, lengths, pair, words in product(draw.dtypes, _LENGTHS, (False, True), _WORDS):
        tokens = sum(lengths)
        grad = _tokens(draw, dtype, tokens, pair)
        step = _tokens(draw, dtype, tokens // 2 if "none" in words else tokens, pair)
        args = (grad, step, sums(draw, lengths), *words)
        name = f"{name_of(dtype)} {list(lengths)} {words[0]}, {words[1]}{' of two' * pair}"
        yield Case(name, args, (None,), left=((grad, Result("grad", dtype)),))
