# SPDX-License-Identifier: Apache-2.0
"""attention of packed sequences: the bits of a padded batch, and 0 between the sequences."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from attention_reference import WINDOWS
from backend.packed_sequences import Packing
from buffers import LAYOUTS, Poisoned, laid_out, name_of, normal
from comparators import assert_bits
from refusals import check_refused
from tols import BF16, F16, F32

from transformer_engine import _core

HEADS, GROUPS, D_K, D_V = 4, 2, 24, 40


def problem(rng, queries, keys, dtype, shape=(HEADS, GROUPS, D_K, D_V)):
    """Packed query, key, value and gradient of the output; NaN in tokens of no sequence."""
    heads, groups, d_k, d_v = shape
    made = []
    for side, count, channels in (
        (queries, heads, d_k), (keys, groups, d_k), (keys, groups, d_v), (queries, heads, d_v),
    ):  # fmt: skip
        tensor = normal(rng, (side.tokens, count, channels), dtype)
        tensor[~side.owned()] = float("nan")
        made.append(tensor)
    return made


def run(tensors, statistics, layout="dense", **options):
    """Output, statistics and gradients, each Poisoned; tensors [batch, tokens, heads, channels]."""
    *inputs, grad = (laid_out(t, layout, "cpu") for t in tensors)
    made = [Poisoned(grad.shape, grad.dtype, "cpu", layout=layout)]
    made.append(Poisoned(statistics, F32, "cpu"))
    output, sums = (memory.tensor for memory in made)
    made += [Poisoned(t.shape, t.dtype, "cpu", layout=layout) for t in inputs]
    names = ["grad_query", "grad_key", "grad_value"]
    top = {}
    if "sink" in options:
        made += [Poisoned(grad.shape[2:3], F32, "cpu") for _ in range(2)]
        names.append("grad_sink")
        top["top"] = made[-1].tensor
    _core.attention(*inputs, output, statistics=sums, **top, **options)
    grads = {name: memory.tensor for name, memory in zip(names, made[2:], strict=False)}
    _core.attention_backward(grad, *inputs, output, sums, **grads, **options)
    assert all(memory.untouched() for memory in made)
    return [memory.tensor for memory in made]


def check(random, queries, keys, dtype=F32, *, layout="dense", with_lengths=True, **options):
    """Everything has the bits that it has in a padded batch; elsewhere it is 0, or -Inf."""
    tensors = problem(random, queries, keys, dtype)
    scale = {"scale": D_K**-0.5} | options
    lengths = {"query_lengths": queries.vector("lengths"), "key_lengths": keys.vector("lengths")}
    where = {"query_offsets": queries.vector("offsets"), "key_offsets": keys.vector("offsets")}
    bounds = {"max_queries": queries.longest, "max_keys": keys.longest}
    given = [t[None] for t in tensors]
    sizes = (1, queries.tokens, HEADS)
    found = run(
        given, sizes, layout, **where, **bounds, **(lengths if with_lengths else {}), **scale
    )
    sides = (queries, keys, keys, queries)
    padded = [side.padded(t) for side, t in zip(sides, tensors, strict=True)]
    sizes = (queries.batch, HEADS, queries.longest)
    output, sums, *grads = run(padded, sizes, **lengths, **scale)
    assert_bits(found[0][0], queries.packed(output))
    assert_bits(found[1][0], queries.packed(sums.transpose(1, 2), -float("inf")))
    for tensor, side, right in zip(found[2:5], sides, grads, strict=False):
        assert_bits(tensor[0], side.packed(right))
    for tensor, right in zip(found[5:], grads[3:], strict=True):  # of the sink, and the largest
        assert_bits(tensor, right)


@pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=name_of)
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window, dtype, gaps, rng):
    queries = Packing(rng, 4, 90, gaps=gaps, lengths=[90, 0, 1, 37])
    keys = Packing(rng, 4, 210, gaps=gaps, lengths=[210, 5, 1, 0])
    check(rng, queries, keys, dtype, with_lengths=gaps, **WINDOWS[window])


@pytest.mark.parametrize("of_sequences", [False, True])
@pytest.mark.parametrize("window", ["full", "bottom right"])
def test_sinks_and_slopes(window, of_sequences, rng):
    """Slopes count from the diagonal of each sequence."""
    queries = Packing(rng, 4, 90, gaps=True, lengths=[90, 0, 1, 37])
    keys = Packing(rng, 4, 210, gaps=True, lengths=[210, 5, 1, 0])
    slopes = normal(rng, (4, HEADS) if of_sequences else (HEADS,), F32)
    options = {"sink": normal(rng, (HEADS,), F32), "slopes": slopes}
    check(rng, queries, keys, **options, **WINDOWS[window])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, rng):
    queries, keys = Packing(rng, 3, 60, gaps=True), Packing(rng, 3, 70, gaps=True)
    check(rng, queries, keys, layout=layout)


@hypothesis.given(data=st.data())
def test_random_lengths(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    batch, gaps = data.draw(st.integers(0, 5)), data.draw(st.booleans())
    queries = Packing(rng, batch, data.draw(st.integers(0, 200)), gaps=gaps)
    keys = Packing(rng, batch, data.draw(st.integers(0, 200)), gaps=gaps)
    options = data.draw(st.sampled_from(list(WINDOWS.values())))
    if data.draw(st.booleans()):
        options = {**options, "dropout": 0.3, "rng": torch.tensor([5, 7])}
    check(rng, queries, keys, data.draw(st.sampled_from([F32, BF16])), **options)


def test_many_short_sequences(rng):
    """Of more heads of keys than threads, and of fewer: both ways to the gradients."""
    lengths = [int(n) for n in rng.integers(0, 4, 40)]
    side = Packing(rng, 40, 3, lengths=lengths)
    check(rng, side, side, with_lengths=False, window_right=0)


def test_loose_bounds(rng):
    """Bounds say nothing but which random numbers there are."""
    side = Packing(rng, 3, 50)
    tensors = [t[None] for t in problem(rng, side, side, F32)]
    where = dict.fromkeys(("query_offsets", "key_offsets"), side.vector("offsets"))
    sizes = (1, side.tokens, HEADS)
    exact = run(tensors, sizes, **where, max_queries=50, max_keys=50)
    loose = run(tensors, sizes, **where, max_queries=4096, max_keys=700)
    for each, right in zip(loose, exact, strict=True):
        assert_bits(each, right)


Q, K = torch.zeros(1, 9, 4, 8), torch.zeros(1, 7, 2, 8)


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


OFFSETS = {
    "query_offsets": ints(0, 4, 9), "key_offsets": ints(0, 2, 7), "max_queries": 5, "max_keys": 5
}  # fmt: skip
WRONG = {
    "no keys": (ValueError, "key_offsets: None beside query_offsets", {"key_offsets": None}),
    "no queries": (ValueError, "query_offsets: None beside key_off", {"query_offsets": None}),
    "number": (ValueError, "key_offsets: .* vector of 3", {"key_offsets": ints(0, 7)}),
    "none": (ValueError, "query_offsets: length 0", {"query_offsets": ints()}),
    "dtype": (TypeError, "key_offsets: dtype f32", {"key_offsets": torch.zeros(3)}),
    "batch": (ValueError, "query: dim 0: size 2, expected 1", {"query": torch.zeros(2, 9, 4, 8)}),
    "mask": (ValueError, "mask: it does not go", {"mask": torch.zeros(1, 1, 1, 1).bool()}),
    "bias": (ValueError, "bias: it does not go", {"bias": torch.zeros(1, 1, 1, 1)}),
    "bound": (ValueError, "max_queries: -1, expected", {"max_queries": -1}),
    "other bound": (ValueError, r"max_keys: \d+, expected", {"max_keys": 2**31}),
    "lengths": (ValueError, "key_lengths: .* vector of 2", {"key_lengths": ints(1, 2, 3)}),
    "statistics": (
        ValueError,
        "statistics: dim 1: size 4, expected 9",
        {"statistics": torch.zeros(1, 4, 9)},
    ),
    "longer than the bound": (
        ValueError,
        r"query_offsets: 5 of sequence 1, expected 0 to 4 \(cu_seqlens_q\)",
        {"max_queries": 4},
    ),
    "longer than its place": (
        ValueError,
        r"key_offsets: sequence 0 of 3 tokens from 0 on, the next from 2 on",
        {"key_lengths": ints(3, 1)},
    ),
    "falling": (
        ValueError,
        "query_offsets: -2 of sequence 1",
        {"query_offsets": ints(0, 4, 2)},
    ),
    "behind the tensor": (
        ValueError,
        "key_offsets: sequence 1 of 5 tokens from 3 on, the next from 8 on, of 7",
        {"key_offsets": ints(0, 3, 8)},
    ),
    "before the tensor": (
        ValueError,
        "query_offsets: sequence 0 of 5 tokens from -1 on",
        {"query_offsets": ints(-1, 4, 9)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(case):
    output = Poisoned(Q.shape, F32, "cpu")
    good = {"query": Q, "key": K, "value": K, "output": output.tensor, **OFFSETS}
    check_refused("attention", "cpu", WRONG[case], good, output)
