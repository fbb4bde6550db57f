# SPDX-License-Identifier: Apache-2.0
"""softmax and its gradient: values, masks, windows, biases, special numbers, dropout."""

import pytest
import torch
from attention_reference import (
    allowed,
    drop_factors,
    kept,
    new_pair,
    pair_on,
    softmax,
    softmax_terms,
)
from buffers import HIGH, LAYOUTS, RAGGED, Poisoned, laid_out, name_of, normal, op_count
from comparators import assert_bits, assert_grad64, assert_nmse, assert_repeats, assert_within
from refusals import check_refused
from tols import BF16, F16, F32, tol

from transformer_engine import _core

SHAPE = (2, 3, 5, 72)
# Aligned rows of several warps, and rows that no team of threads has registers for.
WIDE = [(1, 1, 2, 3072), (1, 1, 2, 8208)]
NAN, INF = float("nan"), float("inf")


def random_mask(rng, shape):
    return torch.from_numpy(rng.integers(0, 3, shape) == 0)


def some_dims(shape, which):
    """The shape with 1 for every dim that is not in `which`."""
    return tuple(size if dim in which else 1 for dim, size in enumerate(shape))


class Problem:
    """Scores, and what they are made of; `check` compares a call with float64."""

    def __init__(self, x, *, mask=None, bias=None, sink=None, scale=1.0, window=(-1, -1, 0)):
        self.x, self.mask, self.bias, self.scale, self.window = x, mask, bias, scale, window
        self.sink = sink
        self.may = allowed(x.shape, mask, *window)

    def arguments(self, device):
        left, right, diagonal = self.window
        parts = {"mask": self.mask, "bias": self.bias, "sink": self.sink}
        placed = {n: None if t is None else t.to(device) for n, t in parts.items()}
        window = {"window_left": left, "window_right": right, "diagonal": diagonal}
        return {"scale": self.scale, **placed, **window}

    def scores(self):
        scale = torch.tensor(self.scale, dtype=F32).double()
        return self.x.double() * scale + (0.0 if self.bias is None else self.bias.double())

    def exact(self):
        return softmax(self.scores(), self.may, self.sink)

    def run(self, device, *, layout="dense", probabilities=True, **more):
        """Output and probabilities of one call, both Poisoned."""
        made = [
            Poisoned(self.x.shape, self.x.dtype, device, layout=layout) if wanted else None
            for wanted in (True, probabilities)
        ]
        placed = laid_out(self.x, layout, device)
        _core.softmax(
            placed,
            made[0].tensor,
            probabilities=made[1].tensor if made[1] else None,
            **self.arguments(device),
            **more,
        )
        assert_bits(placed, self.x)
        assert all(memory.untouched() for memory in made if memory)
        return made

    def check(self, device, **options):
        for memory in self.run(device, **options):
            if memory is not None:
                terms = softmax_terms(self.scores(), self.may)
                assert_within(memory.tensor, self.exact(), terms, self.x.shape[-1])
                assert (memory.tensor.cpu()[~self.may] == 0).all(), "a forbidden key"


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_layouts(device, dtype, probabilities, layout, rng):
    problem = Problem(normal(rng, SHAPE, dtype, scale=3.0), scale=0.7)
    problem.check(device, layout=layout, probabilities=probabilities)


# Around the widths that a backend keeps in registers or on the stack.
@pytest.mark.parametrize("keys", [*RAGGED, 1023, 1024, 2048, 2049, 5003, 8192, 8200])
@pytest.mark.parametrize("queries", [1, 3])
def test_widths(device, queries, keys, rng):
    Problem(normal(rng, (1, 2, queries, keys), BF16), scale=2.5).check(device)
    Problem(normal(rng, (2, 1, queries, keys), F32), window=(-1, keys // 2, 0)).check(device)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)])
def test_empty(device, shape, counters):
    x = torch.empty(shape, device=device)
    _core.softmax(x, torch.empty_like(x), probabilities=torch.empty_like(x))
    _core.softmax_backward(x, torch.empty_like(x), torch.empty_like(x))
    assert counters() == {f"op.{device}.softmax": 1, f"op.{device}.softmax_backward": 1}


@pytest.mark.parametrize("scale", [0.125, -1.5, 0.0, 1e-30])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_scale(device, dtype, scale, rng):
    Problem(normal(rng, SHAPE, dtype), scale=scale).check(device)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
@pytest.mark.parametrize("shift", [-3e4, 3e4, 2.0**100])
def test_large_scores_do_not_overflow(device, shift, dtype, rng):
    """Only differences of scores matter; keys far below the largest one get 0."""
    x = torch.from_numpy(rng.integers(-3, 4, SHAPE)).to(dtype) * (abs(shift) < 2.0**24)
    bias = torch.where(random_mask(rng, SHAPE), shift, shift - abs(shift) / 4)
    bias[..., 0] = shift  # no row lacks a large one
    scores = x.double() + bias.double()
    out = Poisoned(SHAPE, dtype, device)
    _core.softmax(x.to(device), out.tensor, bias=bias.to(device))
    exact = softmax(scores, torch.ones(SHAPE, dtype=torch.bool))
    assert_within(out.tensor, exact, exact, SHAPE[-1])


SINKS = [SHAPE, (2, 3, 40, 16), (1, 5, 1, 30), (9, 2, 3, 520), *WIDE]


@pytest.mark.parametrize("shared", [False, True])  # a bias, which decides the order of the rows
@pytest.mark.parametrize("shape", SINKS, ids=str)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_sink(device, dtype, shape, shared, rng):
    sink = 2 * normal(rng, shape[1:2], F32)
    bias = normal(rng, (1, *shape[1:]), dtype) if shared else None
    mask = random_mask(rng, (shape[0], 1, 1, shape[3]))
    mask[0] = True  # rows without keys
    Problem(normal(rng, shape, dtype), mask=mask, bias=bias, sink=sink).check(device)


def test_sink_of_minus_inf_is_none(device, rng):
    problem = Problem(normal(rng, SHAPE, F32), window=(-1, 3, 0))
    expected = problem.run(device)
    problem.sink = torch.full((3,), -INF)
    for made, right in zip(problem.run(device), expected, strict=True):
        assert_bits(made.tensor, right.tensor)


# ---- masks, windows, biases ----------------------------------------------------------------------

DIMS = [(), (3,), (0, 3), (2,), (2, 3), (0,), (1, 3), (1, 2, 3), (0, 2, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8])
@pytest.mark.parametrize("which", DIMS)
@pytest.mark.parametrize("shape", [SHAPE, (2, 2, 3, 2050)])
def test_mask(device, shape, which, kind, rng):
    mask = random_mask(rng, some_dims(shape, which))
    if kind == torch.uint8:  # any other byte than 0 forbids
        mask = mask * torch.from_numpy(rng.integers(1, 256, mask.shape, dtype="uint8"))
    Problem(normal(rng, shape, BF16), mask=mask).check(device)


@pytest.mark.parametrize("which", DIMS)
@pytest.mark.parametrize("shape", [SHAPE, (2, 2, 3, 2050)])
def test_bias(device, shape, which, rng):
    bias = normal(rng, some_dims(shape, which), F32)
    Problem(normal(rng, shape, F32), bias=bias, scale=0.5).check(device)


@pytest.mark.parametrize("which", [(), (3,), (2, 3)])
@pytest.mark.parametrize("shape", WIDE)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_wide_rows_with_everything(device, dtype, shape, which, rng):
    mask, bias = random_mask(rng, shape), normal(rng, some_dims(shape, which), dtype)
    window = (-1, shape[3] // 2, 0)
    Problem(normal(rng, shape, dtype), mask=mask, bias=bias, window=window).check(device)
    mask = random_mask(rng, some_dims(shape, which))
    Problem(normal(rng, shape, dtype), mask=mask, window=window).check(device)


@pytest.mark.parametrize("bias_dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_bias_dtypes(device, dtype, bias_dtype, rng):
    bias = normal(rng, some_dims(SHAPE, (1, 3)), bias_dtype)
    Problem(normal(rng, SHAPE, dtype), bias=bias).check(device)


WINDOWS = [(-1, 0, 0), (-1, 0, 67), (-1, 0, -2), (2, -1, 0), (3, 5, 30), (0, 0, 0), (1, 1, -3)]
WINDOWS += [(0, 0, 500), (2**60, 2**60, -(2**60)), (-1, 2**60, 2**60), (-7, -7, 3)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("queries", [1, 5, 72])
def test_window(device, queries, window, rng):
    shape = (2, 2, queries, 72)
    mask = random_mask(rng, (2, 1, 1, 72))
    bias = normal(rng, (1, 2, queries, 72), F16)
    Problem(normal(rng, shape, F16), window=window).check(device)
    Problem(normal(rng, shape, F16), window=window, mask=mask, bias=bias).check(device)


@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_row_without_keys_is_zero(device, dtype, rng):
    mask = random_mask(rng, SHAPE)
    mask[:, 1] = True
    Problem(normal(rng, SHAPE, dtype), mask=mask).check(device)
    Problem(normal(rng, SHAPE, dtype), mask=torch.ones(1, 1, 1, 1).bool()).check(device)
    Problem(normal(rng, SHAPE, dtype), window=(-1, 0, -2)).check(device)


@pytest.mark.parametrize("view", ["heads inside", "expanded", "column step", "queries last"])
def test_any_view_is_read_and_strided_outputs_are_written(device, view, rng):
    b, h, q, k = SHAPE
    views = {
        "heads inside": normal(rng, (b, q, h, k), BF16, device).transpose(1, 2),
        "expanded": normal(rng, (b, 1, 1, k), BF16, device).expand(SHAPE),
        "column step": normal(rng, (b, h, q, 2 * k), BF16, device)[..., ::2],
        "queries last": normal(rng, (b, h, k, q), BF16, device).transpose(2, 3),
    }
    x, mask = views[view], random_mask(rng, (b, q, k, 1)).to(device).permute(0, 3, 1, 2)
    made = Poisoned((b, q, h, k), BF16, device, layout="strided")
    _core.softmax(x, made.tensor.transpose(1, 2), mask=mask)
    may = allowed(SHAPE, mask.cpu())
    terms = softmax_terms(x.cpu().double(), may)
    assert_within(made.tensor.transpose(1, 2), softmax(x.cpu().double(), may), terms, k)
    assert made.untouched()


# ---- special numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [72, 75, 2500, 3072, 8208])
@pytest.mark.parametrize("special", [NAN, -NAN, INF])
@pytest.mark.parametrize("where", ["input", "bias"])
def test_nan_and_inf_spoil_their_row(device, where, special, keys, rng):
    """All allowed keys of the row become NaN; forbidden ones stay 0, other rows are as ever."""
    shape = (1, 2, 4, keys)
    problem = Problem(
        normal(rng, shape, F32),
        bias=normal(rng, shape, F32),
        window=(-1, keys // 2, 0),
        mask=random_mask(rng, shape),
    )
    problem.mask[..., 0] = False  # a key to spoil, and one for the others
    problem.may[..., 0] = True
    spoilt = problem.x if where == "input" else problem.bias
    spoilt[0, 1, 2, 0] = special
    for memory in problem.run(device):
        row = memory.tensor.cpu()[0, 1, 2]
        assert row[problem.may[0, 1, 2]].isnan().all() and (row[~problem.may[0, 1, 2]] == 0).all()
        spoilt[0, 1, 2, 0] = 0.0
        exact, terms = problem.exact(), softmax_terms(problem.scores(), problem.may)
        spoilt[0, 1, 2, 0] = special
        others = torch.ones(shape[:3], dtype=torch.bool)
        others[0, 1, 2] = False
        assert_within(memory.tensor.cpu()[others], exact[others], terms[others], keys)


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_what_is_forbidden_is_not_looked_at(device, special, rng):
    mask = random_mask(rng, SHAPE)
    problem = Problem(normal(rng, SHAPE, F32), mask=mask, window=(-1, 60, 0))
    clean = problem.run(device)
    problem.x = problem.x.masked_fill(~problem.may, special)
    for memory, expected in zip(problem.run(device), clean, strict=True):
        assert_bits(memory.tensor, expected.tensor)


@pytest.mark.parametrize("keys", [72, 2500, 8208])
def test_score_of_minus_inf_forbids(device, keys, rng):
    """A bias of -Inf is a mask, up to rows in which nothing is left."""
    shape = (2, 2, 4, keys)
    mask = random_mask(rng, shape)
    mask[0, 1] = True
    x, bias = normal(rng, shape, BF16), torch.zeros(shape).masked_fill(mask, -INF)
    by_bias = Problem(x, bias=bias).run(device)
    for memory, expected in zip(by_bias, Problem(x, mask=mask).run(device), strict=True):
        assert_bits(memory.tensor, expected.tensor)


# ---- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("shape", [SHAPE, (2, 1, 7, 33), (1, 2, 2, 2049), *WIDE, (3, 1, 1, 1)])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_dropout_is_bit_exact(device, dtype, shape, probability, rng):
    """What is dropped is what Philox says; what is kept is the probability times 1 / (1 - p)."""
    pair = new_pair(rng)
    problem = Problem(normal(rng, shape, dtype), window=(-1, shape[3] // 2, 0))
    plain = problem.run(device)
    drop = {"rng": pair_on(device, pair), "dropout": probability}
    output, probabilities = problem.run(device, **drop)
    assert_bits(probabilities.tensor, plain[0].tensor)
    lone, _ = problem.run(device, probabilities=False, **drop)
    assert_bits(lone.tensor, output.tensor)
    stays = kept(pair, shape, probability) & problem.may
    assert torch.equal(output.tensor.cpu() != 0, stays)
    factors = drop_factors(pair, shape, probability)
    terms = softmax_terms(problem.scores(), problem.may) * factors
    assert_within(output.tensor, problem.exact() * factors, terms, shape[-1])


def test_dropout_of_zero_needs_no_numbers(device, rng):
    problem = Problem(normal(rng, SHAPE, BF16))
    expected, _ = problem.run(device)
    output, _ = problem.run(device, dropout=0.0, rng=pair_on(device, new_pair(rng)))
    assert_bits(output.tensor, expected.tensor)


@pytest.mark.parametrize("special", [NAN, INF])
def test_dropped_is_zero_even_if_spoilt(device, special, rng):
    pair = new_pair(rng)
    x = torch.full(SHAPE, special)
    output, probabilities = Problem(x).run(device, rng=pair_on(device, pair), dropout=0.5)
    stays = kept(pair, SHAPE, 0.5)
    assert probabilities.tensor.isnan().all()
    assert (output.tensor.cpu()[~stays] == 0).all() and output.tensor.cpu()[stays].isnan().all()


def test_keep_rate(device, rng):
    shape = (2, 4, 64, 128)
    for probability in (0.1, 0.5):
        out = torch.empty(shape, device=device)
        _core.softmax(
            torch.zeros(shape, device=device),
            out,
            dropout=probability,
            rng=pair_on(device, new_pair(rng)),
        )
        share = (out != 0).double().mean().item()
        assert abs(share - (1 - probability)) <= tol("share", F32, out.numel())


def test_twice_the_same(device, rng):
    problem = Problem(
        normal(rng, (2, 3, 70, 333), BF16),
        mask=random_mask(rng, (2, 1, 70, 333)),
        window=(-1, 0, 263),
    )
    drop = {"rng": pair_on(device, new_pair(rng)), "dropout": 0.2}
    assert_repeats(lambda: [memory.tensor for memory in problem.run(device, **drop)])


# ---- the gradient --------------------------------------------------------------------------------


def check_backward(device, shape, dtype, rng, *, dropout=0.0, scale=0.3, layout="dense"):
    """One call on its own: any probabilities, any gradient."""
    pair = new_pair(rng)
    grad = normal(rng, shape, dtype)
    p = softmax(normal(rng, shape, F32).double(), allowed(shape)).to(dtype)
    made = Poisoned(shape, dtype, device, layout=layout)
    drop = {"rng": pair_on(device, pair), "dropout": dropout} if dropout else {}
    _core.softmax_backward(
        laid_out(grad, layout, device),
        laid_out(p, layout, device),
        made.tensor,
        scale=scale,
        **drop,
    )
    dp = grad.double() * drop_factors(pair, shape, dropout)
    factor, weights = float(torch.tensor(scale, dtype=F32)), p.double()
    exact = factor * weights * (dp - (dp * weights).sum(-1, keepdim=True))
    sizes = dp.abs() + (dp * weights).abs().sum(-1, keepdim=True)
    assert_within(made.tensor, exact, abs(factor) * weights * sizes, shape[-1])
    assert made.untouched()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dropout", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_backward(device, dtype, dropout, layout, rng):
    check_backward(device, SHAPE, dtype, rng, dropout=dropout, layout=layout)


@pytest.mark.parametrize("keys", [*RAGGED, 1024, 2048, 2049, 5003, 8192, 8200])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_backward_widths(device, dropout, keys, rng):
    check_backward(device, (1, 2, 3, keys), BF16, rng, dropout=dropout)
    check_backward(device, (2, 1, 1, keys), F32, rng, dropout=dropout, scale=-2.0)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_gradient_of_the_definition(device, dtype, dropout, rng):
    """Forward and backward together, against float64 autograd through mask, bias and dropout."""
    pair, scale = new_pair(rng), 0.25
    problem = Problem(
        normal(rng, SHAPE, dtype, scale=2.0),
        mask=random_mask(rng, some_dims(SHAPE, (0, 3))),
        bias=normal(rng, some_dims(SHAPE, (1, 2, 3)), dtype),
        scale=scale,
        window=(-1, 40, 0),
    )
    drop = {"rng": pair_on(device, pair), "dropout": dropout} if dropout else {}
    _, probabilities = problem.run(device, **drop)
    grad, grad_input = normal(rng, SHAPE, dtype, device), Poisoned(SHAPE, dtype, device)
    _core.softmax_backward(grad, probabilities.tensor, grad_input.tensor, scale=scale, **drop)

    def definition(x):
        weights = softmax(x * scale + problem.bias.double(), problem.may)
        return weights * drop_factors(pair, SHAPE, dropout)

    bound = tol("softmax_grad", dtype) + tol("sum", F32, SHAPE[-1])
    assert_grad64({"x": grad_input.tensor}, definition, {"x": problem.x}, grad, bound)


@pytest.mark.parametrize("keys", [2500, 3072, 8208])
def test_backward_in_place_and_twice_the_same(device, keys, rng):
    shape = (2, 2, 5, keys)
    grad, p = normal(rng, shape, BF16, device), normal(rng, shape, BF16, device).abs()
    drop = {"rng": pair_on(device, new_pair(rng)), "dropout": 0.1}
    first = torch.empty_like(grad)
    _core.softmax_backward(grad, p, first, **drop)
    for _ in range(2):
        again = grad.clone()
        _core.softmax_backward(again, p, again, **drop)
        assert_bits(again, first)


def test_backward_keeps_nan_to_its_row(device, rng):
    grad, p = normal(rng, SHAPE, F32), torch.full(SHAPE, 1 / SHAPE[3])
    grad[1, 2, 3, 4] = NAN
    made = torch.empty(SHAPE, device=device)
    _core.softmax_backward(grad.to(device), p.to(device), made)
    spoilt = made.cpu().isnan().any(-1)
    assert spoilt.sum() == 1 and made.cpu()[1, 2, 3].isnan().all()


# ---- the gradient of the sink --------------------------------------------------------------------


def sink_gradients(device, x, mask, sink, dropout, rng):
    """log_sum and grad_sinks of a forward and its backward, and the same in float64."""
    pair, may = new_pair(rng), allowed(x.shape, mask)
    grad, rows = normal(rng, x.shape, x.dtype), x.shape[:3]
    drop = {"rng": pair_on(device, pair), "dropout": dropout} if dropout else {}
    log_sum, sinks = (Poisoned((rows.numel(),), F32, device) for _ in range(2))
    output, p, placed = (torch.empty_like(x, device=device) for _ in range(3))
    placed.copy_(x)
    of_mask = None if mask is None else mask.to(device)
    _core.softmax(
        placed, output, mask=of_mask, sink=sink.to(device), probabilities=p,
        log_sum=log_sum.tensor, **drop,
    )  # fmt: skip
    _core.softmax_backward(
        grad.to(device), p, torch.empty_like(p), sink=sink.to(device), log_sum=log_sum.tensor,
        grad_sinks=sinks.tensor, scale=0.5, **drop,
    )  # fmt: skip
    assert log_sum.untouched() and sinks.untouched()
    scores = x.double().masked_fill(~may, -INF)
    all_scores = torch.cat([scores, sink.double()[:, None, None].expand(*rows, 1)], -1)
    exact = all_scores.logsumexp(-1)
    own = (sink.double()[:, None] - exact).exp().nan_to_num(nan=0.0)
    dp = grad.double() * drop_factors(pair, x.shape, dropout)
    terms = own * (softmax(x.double(), may, sink.double()) * dp.abs()).sum(-1)
    made = -own * (softmax(x.double(), may, sink.double()) * dp).sum(-1)
    return *(t.tensor.cpu().view(rows) for t in (log_sum, sinks)), exact, made, terms


@pytest.mark.parametrize("level", [0.0, -12.0, 9.0])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("shape", [SHAPE, (2, 3, 5, 71), (2, 2, 9, 512), *WIDE])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_gradient_of_the_sink(device, dtype, shape, dropout, level, rng):
    """Of each row, and relative to its terms, however small the sink's share is."""
    mask = random_mask(rng, (shape[0], 1, *shape[2:]))
    mask[0, 0, 0] = True  # a row whose sum is its sink alone
    sink = level + normal(rng, (shape[1],), F32)
    logs, sinks, exact, made, terms = sink_gradients(
        device, normal(rng, shape, dtype), mask, sink, dropout, rng
    )
    assert_nmse(logs, exact, tol("sum", F32, shape[-1]), terms=1 + exact.abs())
    assert (sinks[0, :, 0] == 0).all()
    live = terms > 0
    bound = tol("round", dtype) + tol("sum", F32, shape[-1])
    assert_nmse(sinks[live], made[live], bound, terms=terms[live])


@pytest.mark.parametrize("level", [0.0, -INF])
def test_sums_of_rows_without_keys(device, level, rng):
    """Of no keys at all, or of none that may be attended: the sink, or +Inf where it is -Inf."""
    sink, lone = torch.full((3,), level), level if level > -INF else INF
    for keys in (0, 8):
        mask = torch.ones(2, 1, 5, keys, dtype=torch.bool)
        logs, sinks, *_ = sink_gradients(
            device, normal(rng, (2, 3, 5, keys), F32), mask, sink, 0.0, rng
        )
        assert_bits(logs, torch.full((2, 3, 5), lone))
        assert (sinks == 0).all()


def test_sum_of_a_row_of_nan(device):
    x, logs = torch.zeros(1, 1, 3, 8, device=device), torch.empty(3, device=device)
    x[0, 0, 1, 2], x[0, 0, 2, 5] = NAN, INF
    _core.softmax(x, torch.empty_like(x), log_sum=logs)
    assert logs.cpu().isnan().tolist() == [False, True, True]


# ---- refusals ------------------------------------------------------------------------------------

X = torch.zeros(2, 3, 4, 8)
WRONG = {
    "three dims": (ValueError, r"input: ndim = 3, expected 4", {"input": X[0]}),
    "integer input": (TypeError, r"input: dtype i32, expected", {"input": X.int()}),
    "other output dtype": (
        TypeError,
        r"output: dtype bf16, expected f32",
        {"output": X.bfloat16()},
    ),
    "other output shape": (ValueError, r"output: dim 3: size 7", {"output": X[..., :7].clone()}),
    "float mask": (TypeError, r"mask: dtype f32, expected u8", {"mask": X}),
    "short mask": (
        ValueError,
        r"mask: dim 2: size 2, expected 1 or 4",
        {"mask": X[:, :, :2].bool()},
    ),
    "wide bias": (ValueError, r"bias: dim 1: size 6", {"bias": torch.zeros(2, 6, 4, 8)}),
    "short sink": (ValueError, r"sink: .* vector of", {"sink": torch.zeros(7)}),
    "short sums": (ValueError, r"log_sum: .* vector of", {"log_sum": torch.zeros(23)}),
    "integer bias": (TypeError, r"bias: dtype i32", {"bias": X.int()}),
    "two-dim mask": (ValueError, r"mask: ndim = 2, expected 4", {"mask": X[0, 0].bool()}),
    "probabilities of another dtype": (
        TypeError,
        r"probabilities: dtype f16, expected f32",
        {"probabilities": X.half()},
    ),
    "no numbers": (ValueError, r"rng: .*NULL", {"dropout": 0.5}),
    "float numbers": (TypeError, r"rng: dtype f32, expected i64", {"rng": torch.zeros(2)}),
    "one number": (ValueError, r"rng: 1 elements", {"rng": torch.zeros(1, dtype=torch.int64)}),
    "negative probability": (ValueError, r"dropout: -0.5", {"dropout": -0.5}),
    "probability of NaN": (ValueError, r"dropout: -?nan", {"dropout": NAN}),
    "probability beyond 1": (ValueError, r"dropout: 1.5", {"dropout": 1.5}),
    "window too far": (ValueError, r"window_left: \d+, expected", {"window_left": 2**61}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    output = Poisoned(X.shape, F32, device)
    check_refused("softmax", device, WRONG[case], {"input": X, "output": output.tensor}, output)


def test_output_without_unit_stride_is_refused(device):
    memory = torch.zeros(2, 3, 8, 4, device=device)
    with pytest.raises(ValueError, match="softmax: output: its strides .* contiguous"):
        _core.softmax(X.to(device), memory.transpose(2, 3))
    assert (memory == 0).all()


def test_counted_once(device, counters, rng):
    x = normal(rng, SHAPE, F32, device)
    _core.softmax(x, torch.empty_like(x))
    assert counters() == {f"op.{device}.softmax": 1} and op_count(device, "softmax") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_cuda_close_to_cpu(dtype, rng):
    """Both are within their margins of the exact values; dropped are the same ones."""
    problem = Problem(
        normal(rng, (2, 3, 64, 1000), dtype), mask=random_mask(rng, (2, 1, 64, 1000)), scale=2.0
    )
    pair = new_pair(rng)
    made = [
        problem.run(device, rng=pair_on(device, pair), dropout=0.3)[0].tensor.cpu().double()
        for device in ("cpu", "cuda")
    ]
    assert torch.equal(made[0] == 0, made[1] == 0)
    assert_nmse(made[1], made[0], 2 * tol("round", dtype) + tol("sum", F32, 1000))
