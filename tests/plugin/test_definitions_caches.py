# SPDX-License-Identifier: Apache-2.0
"""Caches of keys and values, and rotary positions, by their definition in torch, beside C."""

import pytest
import torch
from attention_reference import cp_positions, rope
from buffers import HIGH, LAYOUTS, Poisoned, laid_out, normal
from comparators import assert_bits, assert_within
from definitions import assert_defined, by_definition
from thinning import pairs
from tols import BF16, F32

from transformer_engine import _core

BATCH, HEADS, PAGES, PAGE, EACH = 3, 2, 11, 4, 3
ROOM = PAGE * EACH


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# ---- caches --------------------------------------------------------------------------------------


def new_caches(rng, dtype, paged, layout="dense", channels=(16, 5)):
    """Keys and values as (positional arguments, fields)."""
    lead = (PAGES, PAGE) if paged else (BATCH + 1, ROOM)
    caches = [laid_out(normal(rng, (*lead, HEADS, n), dtype), layout, "cpu") for n in channels]
    table = torch.from_numpy(rng.permutation(PAGES)[: BATCH * EACH].reshape(BATCH, EACH)).int()
    return caches, {"page_table": table} if paged else {}


def new_tokens(rng, dtype, lead, layout="dense", channels=(16, 5)):
    return [laid_out(normal(rng, (*lead, HEADS, n), dtype), layout, "cpu") for n in channels]


@pairs(dtype=HIGH, paged=[False, True], form=["all", "counts", "packed"], layout=list(LAYOUTS))
def test_tokens_are_appended(dtype, paged, form, layout, rng):
    caches, where = new_caches(rng, dtype, paged, layout)
    counts = [int(n) for n in rng.integers(0, 6, BATCH)]
    starts = [int(rng.integers(0, ROOM - 5)) for _ in range(BATCH)]
    lead = (BATCH, 5)
    if form == "counts":
        where["counts"] = ints(*counts)
    elif form == "packed":
        first = int(rng.integers(0, 3))  # tokens before those of the first sequence, and behind all
        limits = torch.tensor([first, *counts]).cumsum(0)
        lead, where["cu_seqlens"] = (int(limits[-1]) + 2,), limits.int()
    new = new_tokens(rng, dtype, lead, layout)
    for tensor in new:
        tensor[(0,) * tensor.dim()] = torch.nan
    assert_defined("cache_append", *new, *caches, ints(*starts), **where)


@pairs(dtype=HIGH, paged=[False, True], layout=list(LAYOUTS))
def test_tokens_are_gathered(dtype, paged, layout, rng):
    caches, where = new_caches(rng, dtype, paged, layout)
    made = [Poisoned((BATCH, ROOM - 1, HEADS, n), dtype, "cpu", layout=layout) for n in (16, 5)]
    lengths = ints(*(int(n) for n in rng.integers(0, ROOM, BATCH)))
    assert_defined("cache_gather", *caches, lengths, *(m.tensor for m in made), **where)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("start", [ROOM - 1, ROOM, ROOM + 5])
def test_what_has_no_room_spoils_the_last_token(paged, start, rng):
    """No host knows; it must not pass for a result."""
    caches, where = new_caches(rng, BF16, paged)
    table, new = where.get("page_table"), new_tokens(rng, BF16, (BATCH, 3))
    expected = [cache.clone() for cache in caches]
    with by_definition("cache_append"):
        _core.cache_append(*new, *caches, ints(0, start, 2), **where)
    page, place = (int(table[1, -1]), PAGE - 1) if paged else (1, ROOM - 1)
    for cache, right, tokens in zip(caches, expected, new, strict=True):
        assert cache[page, place].isnan().all()
        right[page, place] = cache[page, place]
        for sequence, begin in ((0, 0), (2, 2)):
            for j in range(3):
                entry, at = divmod(begin + j, PAGE) if paged else (0, begin + j)
                right[int(table[sequence, entry]) if paged else sequence, at] = tokens[sequence, j]
        assert_bits(cache, right)


def test_pages_that_there_are_not_are_passed_over(rng):
    caches, where = new_caches(rng, BF16, True)
    table = where["page_table"]
    table[1, 0], table[2, 0] = -1, PAGES
    expected, new = [cache.clone() for cache in caches], new_tokens(rng, BF16, (BATCH, 3))
    made = [torch.full((BATCH, 3, HEADS, n), 7.0, dtype=BF16) for n in (16, 5)]
    with by_definition("cache_append", "cache_gather"):
        _core.cache_append(*new, *caches, ints(0, 0, 0), page_table=table)
        _core.cache_gather(*caches, ints(3, 3, 3), *made, page_table=table)
    for cache, right, tokens, mine in zip(caches, expected, new, made, strict=True):
        right[table[0, 0].long(), :3] = tokens[0]
        assert_bits(cache, right)
        assert_bits(mine[0], tokens[0])
        assert not mine[1:].any()


def test_negative_starts_are_passed_over(rng):
    caches, _ = new_caches(rng, F32, False)
    expected, new = [cache.clone() for cache in caches], new_tokens(rng, F32, (BATCH, 2))
    with by_definition("cache_append"):
        _core.cache_append(*new, *caches, ints(-1, -2, 0))
    for cache, right, tokens in zip(caches, expected, new, strict=True):
        right[0, 0], right[2, :2] = tokens[0, 1], tokens[2]
        assert_bits(cache, right)


def test_nothing_is_appended_and_gathered(rng):
    caches, where = new_caches(rng, F32, True)
    packed, none = new_tokens(rng, F32, (4,)), torch.empty(0, dtype=torch.int32)
    assert_defined("cache_append", *packed, *caches, none, cu_seqlens=ints(0))
    assert_defined(
        "cache_append", *new_tokens(rng, F32, (BATCH, 0)), *caches, ints(0, 0, 0), **where
    )
    made = new_tokens(rng, F32, (BATCH, 4))
    assert_defined("cache_gather", *caches, ints(0, 0, 0), *made, **where)
    empty = [torch.empty(0, PAGE, HEADS, n) for n in (16, 5)]
    assert_defined("cache_gather", *empty, ints(0, 0, 0), *made, **where)


# ---- rotary positions ----------------------------------------------------------------------------

POSITIONS, DIM = 40, 16
LIMITS = (1, 5, 5, 13, 20)  # of packed sequences: tokens before and behind, and one without any


class Angles:
    """Angles of positions, and where the tokens of a form stand; `chunks` of a rank."""

    def __init__(self, rng, form, ranks, with_starts, rotary):
        self.freqs = torch.from_numpy(rng.uniform(-10, 10, (POSITIONS, rotary))).float()
        self.form, self.ranks, self.rank = form, ranks, int(rng.integers(ranks))
        lengths = [8, 8] if form == "dense" else [end - begin for begin, end in self.spans()]
        top = POSITIONS - max(lengths) * ranks
        self.starts = [int(rng.integers(0, top + 1)) for _ in lengths] if with_starts else None

    def spans(self):
        """First token and end of each packed sequence on a rank."""
        limits = [2 * n for n in LIMITS]
        return list(zip(limits[:-1], limits[1:], strict=True))

    def lead(self):
        return (2, 8) if self.form == "dense" else (44,)

    def fields(self):
        found = {"cp_size": self.ranks, "cp_rank": self.rank}
        if self.starts is not None:
            found["start_positions"] = ints(*self.starts)
        if self.form == "packed":
            found["cu_seqlens"] = ints(*(2 * n * self.ranks for n in LIMITS))
        return found

    def positions(self):
        """Position of each token, [2, 8] or [tokens]; -1 of no sequence."""

        def of(length, sequence):
            start = 0 if self.starts is None else self.starts[sequence]
            return cp_positions(length * self.ranks, self.ranks, self.rank) + start

        if self.form == "dense":
            return torch.stack([of(8, b) for b in range(2)])
        found = torch.full((44,), -1)
        for b, (begin, end) in enumerate(self.spans()):
            found[begin:end] = of(end - begin, b)
        return found


def turned(x, angles, positions, interleaved, backward):
    """Float64 values of heads [.., heads, channels], and their terms."""
    wide, inside = x.double(), positions >= 0
    by = angles.freqs[positions.clamp(min=0)].double()[..., None, :]
    by = torch.where(inside[..., None, None], by, 0.0)
    exact = rope(wide, by, interleaved)
    if backward:
        leaf = torch.zeros_like(wide, requires_grad=True)
        (exact,) = torch.autograd.grad(rope(leaf, by, interleaved), leaf, wide)
    rotary, terms = by.shape[-1], wide.abs()
    pairs = terms[..., :rotary]
    if interleaved:
        pairs = pairs + pairs.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        pairs = pairs + torch.cat((pairs[..., rotary // 2 :], pairs[..., : rotary // 2]), -1)
    return exact, torch.cat((pairs, terms[..., rotary:]), -1)


@pairs(
    dtype=HIGH,
    form=["dense", "packed"],
    ranks=[1, 2],
    starts=[False, True],
    interleaved=[False, True],
    backward=[False, True],
    in_place=[False, True],
)
def test_three_parts_turn(dtype, form, ranks, starts, interleaved, backward, in_place, rng):
    """Queries and keys by angles of their own, two heads to a line of the queries; values stay."""
    angles = [Angles(rng, form, ranks, starts, rotary) for rotary in (DIM, 6)]
    angles[1].rank, angles[1].starts = angles[0].rank, angles[0].starts
    sizes = {"query": (3, 2 * DIM), "key": (3, DIM), "value": (3, 5)}
    given = {n: normal(rng, (*angles[0].lead(), *size), dtype) for n, size in sizes.items()}
    made = {n: Poisoned(t.shape, dtype, "cpu", layout="strided") for n, t in given.items()}
    placed = {n: m.put(given[n]) if in_place else given[n].clone() for n, m in made.items()}
    with by_definition("rope"):
        _core.rope(
            placed["query"], made["query"].tensor, freqs=angles[0].freqs, channels=DIM,
            key=placed["key"], key_output=made["key"].tensor, key_freqs=angles[1].freqs,
            value=placed["value"], value_output=made["value"].tensor,
            interleaved=interleaved, backward=backward, **angles[0].fields(),
        )  # fmt: skip
    positions = angles[0].positions()
    for name, by in zip(("query", "key"), angles, strict=True):
        heads = given[name].unflatten(-1, (-1, DIM)).flatten(-3, -2)
        found = made[name].tensor.unflatten(-1, (-1, DIM)).flatten(-3, -2)
        assert_within(found, *turned(heads, by, positions, interleaved, backward))
        assert_bits(found[positions < 0], heads[positions < 0])
    assert_bits(made["value"].tensor.clone(), given["value"])
    assert all(m.untouched() for m in made.values())


def test_positions_beyond_the_angles_are_nan(rng):
    """No host knows them."""
    x, freqs = normal(rng, (2, 9, 3, 32), F32), torch.rand(POSITIONS, 24)
    made = torch.empty_like(x)
    with by_definition("rope"):
        _core.rope(x, made, freqs=freqs, start_positions=ints(POSITIONS - 4, -3))
    lacking = torch.zeros(x.shape, dtype=torch.bool)
    lacking[0, 4:, :, :24] = lacking[1, :3, :, :24] = True
    assert torch.equal(made.isnan(), lacking)


@pytest.mark.parametrize("shape", [(0, 9, 3, 32), (2, 0, 3, 32), (2, 9, 0, 32)], ids=str)
def test_nothing_turns(shape, rng):
    x, freqs = torch.empty(shape), normal(rng, (POSITIONS, 24), F32)
    assert_defined("rope", x, torch.empty(shape), freqs=freqs)
