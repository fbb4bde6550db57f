# SPDX-License-Identifier: Apache-2.0
"""cache_append and cache_gather: pages, packed tokens, lengths, what is beyond the end, errors."""

import numpy as np
import pytest
import torch
from buffers import HIGH, LAYOUTS, Poisoned, laid_out, name_of, normal, op_count
from comparators import assert_bits
from hypothesis import given, strategies as st
from tols import BF16, F32

from transformer_engine import _core

BATCH, HEADS, PAGES, PAGE, EACH = 3, 2, 11, 4, 3
ROOM = PAGE * EACH
DTYPES = pytest.mark.parametrize("dtype", HIGH, ids=name_of)
PAGED = pytest.mark.parametrize("paged", [False, True])


def ints(values, device):
    return torch.as_tensor(values, dtype=torch.int32).to(device)


def make_caches(rng, dtype, paged, channels=(16, 8)):
    """Keys and values, and the table of pages or None."""
    lead = (PAGES, PAGE) if paged else (BATCH + 1, ROOM)
    caches = [normal(rng, (*lead, HEADS, n), dtype) for n in channels]
    table = torch.from_numpy(rng.permutation(PAGES)[: BATCH * EACH].reshape(BATCH, EACH)).int()
    return caches, table if paged else None


def rows_of(cache, table):
    """The tokens of each sequence, one after the other: a copy."""
    if table is None:
        return cache[:BATCH].clone()
    return cache[table.long()].flatten(1, 2)


def appended(cache, table, new, starts, counts):
    """What the sequences hold after new tokens (a list of those of each sequence)."""
    rows = rows_of(cache, table)
    for row, tokens, start, count in zip(rows, new, starts, counts, strict=True):
        row[start : start + count] = tokens[:count]
    return rows


def check_append(rng, device, dtype, paged, starts, counts, **options):
    channels, layout = options.pop("channels", (16, 8)), options.pop("layout", "dense")
    caches, table = make_caches(rng, dtype, paged, channels)
    longest = max([*counts, 1])
    new = [normal(rng, (BATCH, longest, HEADS, n), dtype) for n in channels]
    made = [Poisoned(c.shape, dtype, device, layout=layout) for c in caches]
    placed = [m.put(c) for m, c in zip(made, caches, strict=True)]
    given = [laid_out(t, layout, device) for t in new]
    if options.pop("packed", False):
        limits = torch.tensor([0, *counts]).cumsum(0)
        packed = [torch.cat([t[b, :n] for b, n in enumerate(counts)]) for t in new]
        given = [t.to(device) for t in packed]
        options["cu_seqlens"] = ints(limits, device)
    else:
        options["counts"] = ints(counts, device)
    if table is not None:
        options["page_table"] = table.to(device)
    _core.cache_append(*given, *placed, ints(starts, device), **options)
    for m, cache, tokens in zip(made, caches, new, strict=True):
        assert_bits(rows_of(m.tensor.cpu(), table), appended(cache, table, tokens, starts, counts))
        assert m.untouched()
    return made, caches


@PAGED
@DTYPES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_append(device, dtype, paged, layout, rng):
    check_append(rng, device, dtype, paged, (0, 5, 7), (3, 1, 5), layout=layout)
    check_append(rng, device, dtype, paged, (11, 0, 12), (1, 12, 0), layout=layout)


@PAGED
@pytest.mark.parametrize("packed", [False, True])
@given(data=st.data(), number=st.integers(0, 2**32 - 1))
def test_append_of_any_lengths(device, paged, packed, data, number):
    rng = np.random.default_rng(number)
    starts = [data.draw(st.integers(0, ROOM)) for _ in range(BATCH)]
    counts = [data.draw(st.integers(0, ROOM - start)) for start in starts]
    check_append(rng, device, BF16, paged, starts, counts, packed=packed)


@PAGED
@pytest.mark.parametrize("channels", [(1, 1), (7, 30), (8, 128), (256, 8)])
def test_head_sizes(device, paged, channels, rng):
    for dtype in (F32, BF16):
        check_append(rng, device, dtype, paged, (0, 3, 5), (2, 2, 0), channels=channels)


@PAGED
def test_append_writes_nothing_else(device, paged, rng):
    """Pages of no sequence, and rows of no batch entry."""
    made, caches = check_append(rng, device, BF16, paged, (1, 2, 3), (4, 5, 6))
    changed = (made[0].tensor.cpu() != caches[0]).any(-1).any(-1)
    assert changed.sum() == 15


@PAGED
@DTYPES
def test_gather(device, dtype, paged, rng):
    caches, table = make_caches(rng, dtype, paged)
    for lengths, tokens in (((0, 5, 12), 12), ((7, 1, 3), 7), ((0, 0, 0), 2)):
        made = [Poisoned((BATCH, tokens, HEADS, n), dtype, device) for n in (16, 8)]
        outputs = [m.tensor for m in made]
        where = {} if table is None else {"page_table": table.to(device)}
        _core.cache_gather(
            *(c.to(device) for c in caches), ints(lengths, device), *outputs, **where
        )
        for m, cache in zip(made, caches, strict=True):
            rows = rows_of(cache, table)[:, :tokens]
            behind = torch.arange(tokens) >= torch.tensor(lengths)[:, None]
            rows[behind] = 0
            assert_bits(m.tensor, rows)
            assert m.untouched()


@PAGED
def test_gather_gives_back_what_was_appended(device, paged, rng):
    caches, table = make_caches(rng, BF16, paged)
    caches = [c.to(device) for c in caches]
    where = {} if table is None else {"page_table": table.to(device)}
    new = [normal(rng, (BATCH, ROOM, HEADS, n), BF16).to(device) for n in (16, 8)]
    for start in range(0, ROOM, 4):
        part = [t[:, start : start + 4] for t in new]
        _core.cache_append(*part, *caches, ints([start] * BATCH, device), **where)
    made = [torch.empty_like(t) for t in new]
    _core.cache_gather(*caches, ints([ROOM] * BATCH, device), *made, **where)
    for mine, given_ in zip(made, new, strict=True):
        assert_bits(mine, given_)


def test_nothing_to_append(device, counters):
    caches = [torch.zeros(2, 4, HEADS, 8, device=device) for _ in range(2)]
    for shape in ((2, 0, HEADS, 8), (0, 3, HEADS, 8)):
        new = torch.zeros(shape, device=device)
        _core.cache_append(new, new, *caches, ints([0] * shape[0], device))
    made = torch.zeros(0, 3, HEADS, 8, device=device)
    _core.cache_gather(*caches, ints([], device), made, made.clone())
    expected = {f"op.{device}.cache_append": 2, f"op.{device}.cache_gather": 1}
    assert counters() == expected and op_count(device, "cache_append") == 2


# ---- errors --------------------------------------------------------------------------------------


def arguments(**changed):
    """A call of cache_append, paged."""
    given_ = {
        "key": torch.zeros(BATCH, 2, HEADS, 16),
        "value": torch.zeros(BATCH, 2, HEADS, 8),
        "key_cache": torch.zeros(PAGES, PAGE, HEADS, 16),
        "value_cache": torch.zeros(PAGES, PAGE, HEADS, 8),
        "starts": ints([0, 5, 10], "cpu"),
        "page_table": ints(range(BATCH * EACH), "cpu").view(BATCH, EACH),
    }
    return given_ | changed


WRONG = {
    "start": (
        ints([0, 5, 11], "cpu"),
        "starts: sequence 2 gets the tokens 11 to 12, .* room for 12",
    ),
    "before": (ints([0, -1, 0], "cpu"), "starts: sequence 1 gets the tokens -1 to 0"),
    "page": (ints([[0, 1, 2], [3, 99, 5], [6, 7, 8]], "cpu"), "page_table: page 99 of token 5"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_the_cpu_sees(case):
    value, text = WRONG[case]
    with pytest.raises(ValueError, match=f"cache_append: {text}"):
        _core.cache_append(**arguments(**{"page_table" if case == "page" else "starts": value}))


def test_lengths_that_can_not_be():
    with pytest.raises(ValueError, match=r"sequence 1 has the tokens \[0, 3\) of 2"):
        _core.cache_append(**arguments(counts=ints([2, 3, 0], "cpu")))
    caches = [torch.zeros(2, 4, HEADS, 8) for _ in range(2)]
    made = [torch.zeros(2, 3, HEADS, 8) for _ in range(2)]
    with pytest.raises(ValueError, match=r"cache_gather: sequence 0 has the tokens \[0, 4\) of 3"):
        _core.cache_gather(*caches, ints([4, 0], "cpu"), *made)


REFUSED = {
    "heads": ({"key": torch.zeros(BATCH, 2, 3, 16)}, "key: 3 heads of 16 channels, .* 2 of 16"),
    "channels": ({"value": torch.zeros(BATCH, 2, HEADS, 9)}, "value: 2 heads of 9 channels"),
    "tokens": ({"value": torch.zeros(BATCH, 3, HEADS, 8)}, "value: .*leading dims of key"),
    "dtype": (
        {"key": torch.zeros(BATCH, 2, HEADS, 16, dtype=BF16)},
        "key: dtype bf16, expected f32",
    ),
    "pages": ({"value_cache": torch.zeros(PAGES, 5, HEADS, 8)}, "value_cache: dim 1: size 5"),
    "table": ({"page_table": ints([[0, 1]], "cpu")}, "page_table: 1 rows"),
    "starts": ({"starts": ints([0], "cpu")}, "starts: length 1, expected a vector of 3"),
    "packed": ({"cu_seqlens": ints([0, 1, 2, 3], "cpu")}, "key: ndim = 4, expected 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, device):
    changed, text = REFUSED[case]
    given_ = {name: tensor.to(device) for name, tensor in arguments(**changed).items()}
    with pytest.raises((ValueError, TypeError), match=text):
        _core.cache_append(**given_)


def test_a_cache_without_a_table_has_a_page_for_each(device):
    caches = [torch.zeros(2, 4, HEADS, 8, device=device) for _ in range(2)]
    new = torch.zeros(3, 1, HEADS, 8, device=device)
    with pytest.raises(ValueError, match="key_cache: 2 pages for 3 sequences"):
        _core.cache_append(new, new, *caches, ints([0, 0, 0], device))
    made = [torch.zeros(2, 5, HEADS, 8, device=device) for _ in range(2)]
    with pytest.raises(ValueError, match="5 tokens of each sequence, the cache has room for 4"):
        _core.cache_gather(*caches, ints([0, 0], device), *made)


# ---- CUDA ----------------------------------------------------------------------------------------


@pytest.mark.gpu
@PAGED
@pytest.mark.parametrize("start", [ROOM - 1, ROOM, ROOM + 5])
def test_cuda_what_has_no_room_spoils_the_last_token(paged, start, rng):
    """Nobody on the host knows; it must not pass for a result."""
    caches, table = make_caches(rng, BF16, paged)
    placed = [c.cuda() for c in caches]
    new = [normal(rng, (BATCH, 3, HEADS, n), BF16).cuda() for n in (16, 8)]
    where = {} if table is None else {"page_table": table.cuda()}
    _core.cache_append(*new, *placed, ints((0, start, 2), "cuda"), **where)
    for cache, made, tokens in zip(caches, placed, new, strict=True):
        rows = rows_of(made.cpu(), table)
        expected = appended(cache, table, tokens.cpu(), (0, 0, 2), (3, 0, 3))
        assert rows[1, -1].isnan().all()
        expected[1, -1] = rows[1, -1]
        assert_bits(rows, expected)


@pytest.mark.gpu
def test_cuda_pages_that_there_are_not_are_passed_over(rng):
    caches, table = make_caches(rng, BF16, True)
    placed, wrong = [c.cuda() for c in caches], table.clone()
    wrong[1, 0], wrong[2, 0] = -1, PAGES
    new = [normal(rng, (BATCH, 3, HEADS, n), BF16).cuda() for n in (16, 8)]
    _core.cache_append(*new, *placed, ints([0] * 3, "cuda"), page_table=wrong.cuda())
    for cache, made, tokens in zip(caches, placed, new, strict=True):
        expected = appended(cache, table, tokens.cpu(), (0, 0, 0), (3, 0, 0))
        assert_bits(rows_of(made.cpu(), table), expected)
    made = [torch.full((BATCH, 3, HEADS, n), 7.0, dtype=BF16, device="cuda") for n in (16, 8)]
    _core.cache_gather(*placed, ints([3] * 3, "cuda"), *made, page_table=wrong.cuda())
    for mine, tokens in zip(made, new, strict=True):
        assert_bits(mine[0], tokens[0])
        assert not mine[1:].any()
