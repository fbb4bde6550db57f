# SPDX-License-Identifier: Apache-2.0
"""Softmax, attention and their gradients by their definition in torch, beside C and float64."""

import math

import pytest
import torch
from attention_fp8_reference import (
    INPUTS,
    Call,
    assert_gradients,
    flips,
    problem_of,
    rounded,
)
from attention_reference import (
    WINDOWS,
    allowed,
    drop_factors,
    kept,
    new_pair,
    pair_on,
    softmax as softmax64,
    softmax_terms,
)
from backend.attention_problem import Problem
from backend.packed_sequences import Packing
from buffers import HIGH, LAYOUTS, Poisoned, laid_out, name_of, normal
from comparators import assert_bits, assert_nmse, assert_within
from definitions import both, by_definition
from thinning import pairs
from tols import BF16, E4M3, E5M2, F32, tol

from transformer_engine import _core
from transformer_engine.plugin.definitions.scores import product

NAN, INF = math.nan, math.inf
ATTENTION = "attention", "attention_backward"


def random_mask(rng, shape):
    return torch.from_numpy(rng.integers(0, 3, shape) == 0)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# ---- softmax -------------------------------------------------------------------------------------

SCORES = (2, 3, 7, 33)
SOFTMAX_WINDOWS = {"full": (-1, -1, 0), "causal": (-1, 0, 5), "window": (4, 2, -1)}


@pairs(
    dtype=HIGH,
    window=list(SOFTMAX_WINDOWS),
    added=["none", "mask", "bias", "both"],
    sink=[False, True],
    dropout=[0.0, 0.3],
    layout=list(LAYOUTS),
)
def test_softmax(dtype, window, added, sink, dropout, layout, rng):
    left, right, diagonal = SOFTMAX_WINDOWS[window]
    x = normal(rng, SCORES, dtype, scale=3.0)
    mask = random_mask(rng, (2, 1, 7, 33)) if added in ("mask", "both") else None
    bias = normal(rng, (1, 3, 1, 33), F32) if added in ("bias", "both") else None
    sinks = normal(rng, (3,), F32) if sink else None
    pair, sums = new_pair(rng), torch.empty(2 * 3 * 7)
    made = [Poisoned(SCORES, dtype, "cpu", layout=layout) for _ in range(2)]
    with by_definition("softmax"):
        _core.softmax(
            laid_out(x, layout, "cpu"), made[0].tensor, probabilities=made[1].tensor, mask=mask,
            bias=bias, sink=sinks, log_sum=sums, scale=0.5, window_left=left, window_right=right,
            diagonal=diagonal, dropout=dropout, rng=pair_on("cpu", pair),
        )  # fmt: skip
    scores = 0.5 * x.double() + (0.0 if bias is None else bias.double())
    may = allowed(SCORES, mask, left, right, diagonal)
    exact, terms = softmax64(scores, may, sinks), softmax_terms(scores, may)
    factors = drop_factors(pair, SCORES, dropout)
    assert_within(made[0].tensor, exact * factors, terms * factors, SCORES[3])
    assert_within(made[1].tensor, exact, terms, SCORES[3])
    assert not made[0].tensor[(factors == 0) | ~may].any()
    full = scores.masked_fill(~may, -INF).logsumexp(-1)
    full = full if sinks is None else torch.logaddexp(full, sinks.double()[:, None])
    full = full.flatten()
    some = full > -INF
    assert torch.equal(sums == INF, ~some)
    assert_within(sums[some], full[some], 1 + full[some].abs(), SCORES[3])
    assert all(memory.untouched() for memory in made)


@pairs(dtype=HIGH, sink=[False, True], dropout=[0.0, 0.3], in_place=[False, True])
def test_gradients_of_softmax(dtype, sink, dropout, in_place, rng):
    p = torch.softmax(normal(rng, SCORES, F32), -1).to(dtype)
    grad, pair, fields = normal(rng, SCORES, dtype), new_pair(rng), {}
    if sink:
        fields = {"sink": normal(rng, (3,), F32), "log_sum": normal(rng, (42,), F32)}
        fields["grad_sinks"] = torch.empty(42)
    wide = grad.double() * drop_factors(pair, SCORES, dropout)
    made = grad if in_place else torch.empty_like(grad)
    with by_definition("softmax_backward"):
        _core.softmax_backward(
            grad, p, made, scale=0.7, dropout=dropout, rng=pair_on("cpu", pair), **fields
        )
    mean = (wide * p.double()).sum(-1, keepdim=True)
    sizes = (wide * p.double()).abs().sum(-1, keepdim=True)
    terms = 0.7 * p.double() * (wide.abs() + sizes)
    assert_within(made, 0.7 * p.double() * (wide - mean), terms, SCORES[3])
    if sink:
        power = fields["sink"].double()[:, None] - fields["log_sum"].double().view(2, 3, 7)
        own = power.exp() * (1 + power.abs())
        exact = -(power.exp() * mean[..., 0]).flatten()
        assert_within(fields["grad_sinks"], exact, (own * sizes[..., 0]).flatten(), SCORES[3])


@pytest.mark.parametrize("special", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["input", "bias", "sink"])
def test_special_scores(where, special, rng):
    """NaN and zeros are where the C code has them."""
    given = {"input": normal(rng, SCORES, F32), "bias": normal(rng, SCORES, F32)}
    given |= {"sink": normal(rng, (3,), F32), "mask": random_mask(rng, SCORES)}
    given["mask"][1, 2, 3] = True  # a row without keys
    given[where][1 if where != "sink" else slice(None)].view(-1)[::5] = special
    x, made = given.pop("input"), torch.empty(SCORES)
    (found, _), (expected, _) = both("softmax", x, made, **given)
    assert torch.equal(found[1].isnan(), expected[1].isnan())
    assert torch.equal(found[1] == 0.0, expected[1] == 0.0)


# ---- products ------------------------------------------------------------------------------------


def test_zeros_take_nothing_of_special_numbers(rng):
    """Elsewhere the product is that of IEEE arithmetic."""
    a, b = normal(rng, (3, 9, 12), F32), normal(rng, (3, 12, 5), F32)
    a[torch.from_numpy(rng.random(a.shape) < 0.5)] = 0.0
    for special in (NAN, INF, -INF):
        b[torch.from_numpy(rng.integers(0, 16, b.shape) == 0)] = special
    terms = torch.where((a == 0.0)[..., None], 0.0, a[..., None] * b[:, None])
    exact, found = terms.double().sum(2), product(a, b)
    assert torch.equal(found.isnan(), exact.isnan())
    some = exact.isinf()
    assert torch.equal(found[some].double(), exact[some]) and exact.isnan().any() and some.any()
    some = exact.isfinite()
    sizes = terms.double().abs().sum(2)
    assert_within(found[some], exact[some], sizes[some], 12)


# ---- attention -----------------------------------------------------------------------------------

SHAPE = (2, 13, 21, 4, 2, 8, 12)  # batch, queries, keys, heads, kv_heads, d_k, d_v
ADDED = {
    "nothing": lambda rng: {},
    "mask": lambda rng: {"mask": random_mask(rng, (2, 1, 13, 21))},
    "bias": lambda rng: {"bias": normal(rng, (1, 4, 13, 1), F32)},
    "bias of all": lambda rng: {"bias": normal(rng, (2, 4, 13, 21), BF16)},
    "slopes": lambda rng: {"slopes": normal(rng, (2, 4), F32).abs()},
    "cap": lambda rng: {"softcap": 0.8},
    "lengths": lambda rng: {"lengths": {"query": [13, 5], "key": [9, 21]}},
    "no keys": lambda rng: {"lengths": {"query": [13, 0], "key": [0, 3]}},
}


@pairs(
    added=list(ADDED),
    window=list(WINDOWS),
    dtype=HIGH,
    sink=[False, True],
    dropout=[0.0, 0.3],
    layout=list(LAYOUTS),
)
def test_attention(added, window, dtype, sink, dropout, layout, rng):
    """Output, statistics, largest scores and all gradients."""
    options = ADDED[added](rng) | WINDOWS[window] | {"dropout": dropout, "pair": new_pair(rng)}
    if sink:
        options["sink"] = normal(rng, (4,), F32)
    problem = Problem(rng, SHAPE, dtype, **options)
    with by_definition(*ATTENTION) as ran:
        problem.check(layout)
    assert set(ran) == set(ATTENTION)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (1, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_groups_of_heads(dtype, heads, rng):
    with by_definition(*ATTENTION):
        Problem(rng, (2, 9, 11, *heads, 8, 4), dtype, window_right=0).check()


def test_large_scores_do_not_overflow(rng):
    problem = Problem(rng, (1, 6, 40, 2, 2, 8, 8))
    spread = torch.from_numpy(rng.integers(0, 2, (1, 2, 6, 40))) * 2.0**15
    problem.bias, problem.options["scale"] = spread - 2.0**16, 1.0
    for name in ("query", "key"):  # scores are exact
        problem.tensors[name] = problem.tensors[name].round()
    exact = problem.reference(torch.float64)[0]
    with by_definition(*ATTENTION):
        assert_nmse(problem.run()["output"], exact, tol("attention", F32, 40))


@pytest.mark.parametrize("keys", [1, 21])
def test_dropped_are_those_of_the_stream(keys, rng):
    """Values of one key each show the weights."""
    pair, shape = new_pair(rng), (2, 3, 5, keys)
    query, key = torch.zeros(2, 5, 3, 4), torch.zeros(2, keys, 3, 4)
    value = torch.eye(keys)[:, None].expand(2, keys, 3, keys).contiguous()
    made = torch.empty(2, 5, 3, keys)
    with by_definition("attention"):
        _core.attention(query, key, value, made, dropout=0.5, rng=pair_on("cpu", pair))
    assert torch.equal(made.transpose(1, 2) != 0.0, kept(pair, shape, 0.5))


@pytest.mark.parametrize("special", [NAN, INF, -INF])
@pytest.mark.parametrize("name", INPUTS)
def test_special_numbers(name, special, rng):
    """NaN is where the C code has it, in the output and in all gradients."""
    problem = Problem(rng, SHAPE, window_left=6, window_right=2)
    spoilt = problem.tensors[name]
    spoilt[1, 4, 1, 2] = special
    with by_definition(*ATTENTION):
        found = problem.run()
    expected = problem.run()
    for result, right in expected.items():
        assert torch.equal(found[result].isnan(), right.isnan()), result
        if result != "top":
            assert torch.equal(found[result] == INF, right == INF), result


@pytest.mark.parametrize("at", range(5))
def test_empty(at, rng):
    """No sequences, queries, keys, heads, nor heads of keys."""
    shape = [2, 3, 4, 2, 2, 8, 8]
    shape[at if at < 3 else 3] = 0
    if at == 4:
        shape[4] = 0
    with by_definition(*ATTENTION):
        made = Problem(rng, tuple(shape)).run()
    for name, tensor in made.items():
        expected = -INF if name in ("statistics", "top") else 0.0
        assert (tensor == expected).all(), name


def test_lengths_that_can_not_be_give_nan(rng):
    """Of their sequence; no host knows them."""
    problem = Problem(rng, (3, 5, 6, 4, 2, 8, 8), lengths={"query": [5, 6, 2], "key": [6, 6, 3]})
    with by_definition(*ATTENTION):
        made = problem.run()
    for name in ("output", "statistics", "grad_query", "grad_key", "grad_value"):
        assert made[name][1].isnan().all(), name
        assert made[name][[0, 2]].isnan().sum() == 0, name


def test_calls_are_counted(rng, counters):
    problem = Problem(rng, (1, 3, 4, 2, 2, 8, 8), BF16)
    problem.run()
    expected = {name: n for name, n in counters().items() if "attention" in name}
    _core.reset_counters()
    with by_definition(*ATTENTION):
        problem.run()
    found = {name: n for name, n in counters().items() if "attention" in name}
    assert {n: v for n, v in expected.items() if not n.startswith("op.")} == {
        n: v for n, v in found.items() if not n.startswith("op.")
    }


# ---- packed sequences ----------------------------------------------------------------------------

HEADS, GROUPS, D_K, D_V = 4, 2, 8, 12


def packed_run(tensors, queries, keys, options):
    """Output, statistics, largest scores and gradients of packed tensors, poisoned before."""
    given, grad = [t[None] for t in tensors[:3]], tensors[3][None]
    where = {"query_offsets": queries.vector("offsets"), "key_offsets": keys.vector("offsets")}
    where |= {"query_lengths": queries.vector("lengths"), "key_lengths": keys.vector("lengths")}
    where |= {"max_queries": queries.longest, "max_keys": keys.longest, "scale": 0.4} | options
    made = {"output": torch.full_like(grad, NAN)}
    made["statistics"] = torch.full((1, queries.tokens, HEADS), NAN)
    grads = {f"grad_{n}": torch.full_like(t, NAN) for n, t in zip(INPUTS, given, strict=True)}
    if "sink" in options:
        grads["grad_sink"] = torch.full((HEADS,), NAN)
    _core.attention(*given, made["output"], statistics=made["statistics"], **where)
    _core.attention_backward(grad, *given, made["output"], made["statistics"], **grads, **where)
    return made | grads


@pairs(
    window=list(WINDOWS),
    dtype=HIGH,
    gaps=[False, True],
    added=["nothing", "sink", "slopes", "cap"],
    dropout=[0.0, 0.3],
)
def test_packed_sequences(window, dtype, gaps, added, dropout, rng):
    """As the C code has them; tokens of no sequence hold NaN, and give 0, or -Inf."""
    queries = Packing(rng, 4, 13, gaps=gaps, lengths=[13, 0, 1, int(rng.integers(0, 14))])
    keys = Packing(rng, 4, 21, gaps=gaps, lengths=[21, 5, int(rng.integers(0, 22)), 1])
    sides = (queries, keys, keys, queries)
    sizes = (HEADS, D_K), (GROUPS, D_K), (GROUPS, D_V), (HEADS, D_V)
    tensors = [
        normal(rng, (side.tokens, *size), dtype) for side, size in zip(sides, sizes, strict=True)
    ]
    for tensor, side in zip(tensors, sides, strict=True):
        tensor[~side.owned()] = NAN
    options = {"dropout": dropout, "rng": pair_on("cpu", new_pair(rng))} | WINDOWS[window]
    options |= {
        "nothing": {},
        "sink": {"sink": normal(rng, (HEADS,), F32)},
        "slopes": {"slopes": normal(rng, (4, HEADS), F32).abs()},
        "cap": {"softcap": 0.8},
    }[added]
    with by_definition(*ATTENTION):
        found = packed_run(tensors, queries, keys, options)
    for name, right in packed_run(tensors, queries, keys, options).items():
        ours = found[name]
        assert torch.equal(ours == -INF, right == -INF), name
        some = right != -INF
        assert_nmse(ours[some], right[some], 2 * tol("attention", dtype, 21), name)
    for name in ("output", "grad_query"):
        assert not found[name][0, ~queries.owned()].any()


def test_places_that_can_not_be_give_nan(rng):
    """All tokens of a sequence that is longer than the bound, or whose keys are."""
    queries, keys = Packing(rng, 3, 5, lengths=[4, 7, 5]), Packing(rng, 3, 6, lengths=[6, 2, 9])
    sides = (queries, keys, keys, queries)
    sizes = (HEADS, D_K), (GROUPS, D_K), (GROUPS, D_V), (HEADS, D_V)
    tensors = [normal(rng, (s.tokens, *n), F32) for s, n in zip(sides, sizes, strict=True)]
    with by_definition(*ATTENTION):
        found = packed_run(tensors, queries, keys, {})
    for name in ("output", "statistics", "grad_query", "grad_key", "grad_value"):
        good = 6 if name in ("grad_key", "grad_value") else 4
        assert found[name][0, :good].isfinite().all(), name
        assert found[name][0, good:].isnan().all(), name


# ---- FP8 -----------------------------------------------------------------------------------------

FP8_SHAPE = (2, 17, 29, 4, 2, 16, 24)
FP8_LIMITS = {"full": {}, "causal": {"window_right": 0}, "cap": {"softcap": 0.8}}


@pytest.mark.parametrize("given", [False, True], ids=["bound", "given"])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("limits", FP8_LIMITS)
def test_attention_in_fp8(limits, dropout, given, rng):
    operands, definition, options = problem_of(rng, FP8_SHAPE, FP8_LIMITS[limits], dropout)
    call = Call("cpu", operands, **options)
    exact = definition.output()
    scale = torch.tensor([300.0 / float(exact.abs().max())]) if given else None
    with by_definition("attention"):
        output = call.forward(scale)
    expected = float(operands[2].scales[1]) * (1 - dropout) if scale is None else float(scale)
    assert_bits(output.scales, torch.tensor([1.0 / torch.tensor(expected), expected]))
    assert_nmse(output.wide, rounded(exact, E4M3, expected), flips(exact, E4M3), "output")
    assert_nmse(call.output_amax, exact.abs().max().reshape(1), tol("amax", F32))
    assert_nmse(call.weights_amax, definition.dropped.max().reshape(1), tol("amax", F32))
    terms = 1 + definition.statistics.abs()
    assert_within(call.statistics, definition.statistics, terms, FP8_SHAPE[2] + FP8_SHAPE[5])


@pytest.mark.parametrize("grads", [E4M3, E5M2], ids=name_of)
@pytest.mark.parametrize("limits", FP8_LIMITS)
def test_gradients_in_fp8(limits, grads, rng):
    problem = problem_of(rng, FP8_SHAPE, FP8_LIMITS[limits])
    assert_gradients(rng, problem, grads, lambda: by_definition("attention_backward"))
