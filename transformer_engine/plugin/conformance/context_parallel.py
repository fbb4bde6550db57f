# SPDX-License-Identifier: Apache-2.0
"""Cases of context parallelism of packed sequences: which tokens a rank has, halves, corrections.

Expected values are made token by token from lists of those of first and of second halves.
"""

from collections.abc import Iterator
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Wanted, name_of, near, same

_LENGTHS = ((4, 8, 2), (6,), (0, 2, 4), (2, 0, 0, 6, 0), (64, 34))
_HEADS, _CHANNELS = 3, 5


def _sums(draw: Draw, lengths: tuple) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=draw.device)


def _halves(lengths: tuple) -> list[list[int]]:
    """Tokens of the first and of the second halves."""
    made: list[list[int]] = [[], []]
    for first, n in zip((0, *accumulate(lengths)), lengths, strict=False):
        made[0] += range(first, first + n // 2)
        made[1] += range(first + n // 2, first + n)
    return made


def _indices(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for size in (1, 2, 4):
        for chunks in ((1, 3, 2), (5,), (2, 0, 1)):
            lengths = tuple(2 * size * n for n in chunks)
            for rank in range(size):
                made = []
                for first, n in zip((0, *accumulate(lengths)), chunks, strict=False):
                    for chunk in (rank, 2 * size - 1 - rank):
                        made += range(first + chunk * n, first + (chunk + 1) * n)
                exact = torch.tensor(made, dtype=torch.int32)
                args = (_sums(draw, lengths), sum(lengths), size, rank)

                def wanted(found: Any, exact: Tensor = exact) -> list:
                    return [same("the tokens", found, exact)]

                yield Case(f"{list(lengths)}, rank {rank} of {size}", args, wanted)


def _tokens(draw: Draw, dtype: torch.dtype, tokens: int, pair: bool) -> tuple[Tensor, int]:
    """Keys and values in one tensor, or one of heads; and the dim of its tokens."""
    lead = (2,) if pair else ()
    return draw.normal((*lead, tokens, _HEADS, _CHANNELS), dtype), len(lead)


def _half(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for dtype, lengths, pair in product(draw.dtypes, _LENGTHS, (False, True)):
        x, dim = _tokens(draw, dtype, sum(lengths), pair)
        for half, tokens in enumerate(_halves(lengths)):
            exact = x.index_select(dim, torch.tensor(tokens, device=draw.device))

            def wanted(found: Any, exact: Tensor = exact) -> list:
                return [same("the half", found, exact)]

            name = f"{name_of(dtype)} {list(lengths)} half {half}{' of two' * pair}"
            yield Case(name, (x, _sums(draw, lengths), half), wanted)


# ---- logarithms of sums ------------------------------------------------------------------------


def _padded(lse: Tensor, lengths: tuple, fill: float = 0.0) -> Tensor:
    """[sequences, heads, the longest] of [heads, tokens]."""
    made = lse.new_full((len(lengths), lse.shape[0], max(lengths)), fill)
    parts = lse.split(list(lengths), 1)
    for row, part in zip(made, parts, strict=True):
        row[:, : part.shape[1]] = part
    return made


def _form(lse: Tensor, lengths: tuple, packed: bool, fill: float = 0.0) -> Tensor:
    return lse.clone() if packed else _padded(lse, lengths, fill)


def _shorter(lengths: tuple) -> tuple:
    return tuple(n // 2 for n in lengths)


def _read_lse(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for lengths, packed in product(_LENGTHS, (False, True)):
        lse = draw.normal((_HEADS, sum(lengths)), torch.float32)
        exact = _form(lse[:, _halves(lengths)[1]], _shorter(lengths), packed)
        args = (_form(lse, lengths, packed, 9.0), _sums(draw, lengths), packed, exact.shape[-1])

        def wanted(found: Any, exact: Tensor = exact) -> list:
            return [same("the half", found, exact)]

        yield Case(f"{list(lengths)}{' packed' * packed}", args, wanted)


def _correct_lse(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for lengths, packed, scale in product(_LENGTHS, (False, True), (1.0, 200.0)):
        second, short = _halves(lengths)[1], _shorter(lengths)
        lse = draw.normal((_HEADS, sum(lengths)), torch.float32, scale)
        step = draw.normal((_HEADS, len(second)), torch.float32, scale)
        lse[0, second[0]] = -torch.inf  # nothing was attended until now
        exact = lse.double()
        exact[:, second] = torch.logaddexp(exact[:, second], step.double())
        exact = _form(exact, lengths, packed, 9.0)
        given = _form(lse, lengths, packed, 9.0)
        args = (given, _form(step, short, packed, 7.0), _sums(draw, lengths), packed)

        def wanted(found: Any, given: Tensor = given, exact: Tensor = exact) -> list:
            del found
            return [near("lse", given, exact, torch.float32)]

        name = f"{list(lengths)}{' packed' * packed}{' large' * (scale > 1.0)}"
        yield Case(name, args, wanted, written=(given,))


# ---- corrections -------------------------------------------------------------------------------


def _changed(what: str, tensor: Tensor, before: Tensor, exact: Tensor, at: list, dim: int) -> list:
    """Some tokens have new values, the others those of before."""
    index = torch.tensor(at, dtype=torch.int64, device=tensor.device)
    spared = [i for i in range(tensor.shape[dim]) if i not in set(at)]
    others = torch.tensor(spared, dtype=torch.int64, device=tensor.device)
    new = tensor.index_select(dim, index), exact.index_select(dim, index)
    results: list[Wanted] = [near(what, *new, tensor.dtype)]
    old = tensor.index_select(dim, others), before.index_select(dim, others)
    return [*results, same("tokens that have to stay", *old)]


def _correct_out(op: str, draw: Draw) -> Iterator[Case]:
    del op
    flags = product((False, True), (False, True))
    for dtype, lengths, (alone, packed) in product(draw.dtypes, _LENGTHS, list(flags)):
        tokens = _halves(lengths)[1] if alone else list(range(sum(lengths)))
        out, _ = _tokens(draw, dtype, sum(lengths), False)
        step, _ = _tokens(draw, dtype, len(tokens), False)
        of_step = draw.normal((_HEADS, len(tokens)), torch.float32)
        lse = draw.normal((_HEADS, sum(lengths)), torch.float32)
        exact, before = out.double(), out.clone()
        weights = (of_step.double() - lse.double()[:, tokens]).exp().t()
        exact[tokens] += step.double() * weights[..., None]
        short = _shorter(lengths) if alone else lengths
        of_all, of_part = _form(lse, lengths, packed, 9.0), _form(of_step, short, packed, 7.0)
        args = (out, step, of_all, of_part, _sums(draw, lengths), alone, packed)

        def wanted(
            found: Any, given: tuple = ("out", out, before, exact, tokens, 0)
        ) -> list:  # fmt: skip
            del found
            return _changed(*given)

        how = f"{' second halves' * alone}{' packed' * packed}"
        yield Case(f"{name_of(dtype)} {list(lengths)}{how}", args, wanted, written=(out,))


_WORDS = (
    *(("add", "add"), ("copy", "add"), ("add", "copy"), ("copy", "copy")),
    *(("none", "add"), ("add", "none"), ("none", "copy"), ("copy", "none")),
)


def _correct_grad(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for dtype, lengths, pair in product(draw.dtypes, _LENGTHS, (False, True)):
        for words in _WORDS:
            halves = _halves(lengths)
            alone = "none" in words
            grad, dim = _tokens(draw, dtype, sum(lengths), pair)
            step, _ = _tokens(draw, dtype, sum(lengths) // (2 if alone else 1), pair)
            exact, before, written = grad.double(), grad.clone(), []
            for tokens, word in zip(halves, words, strict=True):
                if word == "none":
                    continue
                at = (slice(None),) * dim + (tokens,)
                new = step.double() if alone else step.double()[at]
                exact[at] = new + (exact[at] if word == "add" else 0.0)
                written += tokens

            def wanted(
                found: Any, given: tuple = ("grad", grad, before, exact, written, dim)
            ) -> list:  # fmt: skip
                del found
                return _changed(*given)

            name = f"{name_of(dtype)} {list(lengths)} {words[0]}, {words[1]}{' of two' * pair}"
            args = (grad, step, _sums(draw, lengths), *words)
            yield Case(name, args, wanted, written=(grad,))


CASES = {
    "thd_get_partitioned_indices": _indices,
    "thd_read_half_tensor": _half,
    "thd_read_second_half_lse": _read_lse,
    "thd_second_half_lse_correction": _correct_lse,
    "thd_out_correction": _correct_out,
    "thd_grad_correction": _correct_grad,
}
