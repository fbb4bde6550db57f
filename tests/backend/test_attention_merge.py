# SPDX-License-Identifier: Apache-2.0
"""attention_merge: outputs and statistics of two attentions as of one, sums of gradients."""

import pytest
import torch
from buffers import HIGH, LAYOUTS, Poisoned, laid_out, name_of, normal, op_count
from comparators import assert_bits, assert_repeats, assert_within
from definitions import assert_defined
from refusals import check_refused
from thinning import pairs
from tols import BF16, F32

from transformer_engine import _core

SHAPE = (2, 9, 3, 24)  # batch, queries, heads, channels
INF, NAN = float("inf"), float("nan")
CHANNELS = [1, 7, 8, 64, 128, 260, 1025]
DEPTH = 8  # roundings of a weight: of a difference, an exponential, a sum and a quotient, of each


def statistics_of(rng, shape, scale=2.0):
    """Logarithms of sums of exponentials as they lie beside outputs of one length."""
    batch, tokens, heads, _ = shape
    return normal(rng, (batch, heads, tokens), F32, scale=scale)


def seen(statistics, device):
    """As [batch, queries, heads, 1]."""
    return statistics.to(device).transpose(1, 2)[..., None]


def merged(total, step, before, added):
    """Exact output and its statistic, and magnitudes of the terms of the output."""
    total, step, before, added = (t.cpu().double() for t in (total, step, before, added))
    both = torch.logaddexp(before, added)
    of_total, of_step = ((each - both).exp().nan_to_num() for each in (before, added))
    terms = of_total * total.abs() + of_step * step.abs()
    return of_total * total + of_step * step, both, terms


def call(total, step, output, before=None, added=None, statistics=None):
    given = {"total_statistics": before, "step_statistics": added, "statistics": statistics}
    given = {name: value for name, value in given.items() if value is not None}
    _core.attention_merge(total, step, output, **given)


@pairs(total=HIGH, step=HIGH, result=HIGH, layout=list(LAYOUTS), swapped=[False, True],
       channels=CHANNELS)  # fmt: skip
def test_against_float64(device, total, step, result, layout, swapped, channels, rng):
    """Every triple of dtypes, rows that begin anywhere, either order of batch and tokens."""
    shape = (*SHAPE[:3], channels)
    lie = (shape[1], shape[0], *shape[2:]) if swapped else shape

    def order(tensor):
        return tensor.transpose(0, 1) if swapped else tensor

    x, y = normal(rng, lie, total), normal(rng, lie, step)
    before, added = (seen(statistics_of(rng, shape), device) for _ in range(2))
    out = Poisoned(lie, result, device, layout=layout)
    sums = torch.empty_like(before)
    call(order(laid_out(x, layout, device)), order(laid_out(y, layout, device)),
         order(out.tensor), before, added, sums)  # fmt: skip
    exact, both, terms = merged(order(x), order(y), before, added)
    assert_within(order(out.tensor), exact, terms, DEPTH)
    assert_within(sums, both, before.cpu().double().abs() + 1.0, 2)
    assert out.untouched()


@pairs(total=HIGH, step=HIGH, result=HIGH, layout=list(LAYOUTS), channels=CHANNELS)
def test_sums(device, total, step, result, layout, channels, rng):
    """Without statistics a sum, with the bits of one in fp32 that is rounded once."""
    shape = (*SHAPE[:3], channels)
    x, y = normal(rng, shape, total), normal(rng, shape, step)
    x[0], y[0] = -0.0, -0.0
    out = Poisoned(shape, result, device, layout=layout)
    call(laid_out(x, layout, device), laid_out(y, layout, device), out.tensor)
    assert_bits(out.tensor, (x.float() + y.float()).to(result))
    assert out.untouched()


@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("place", ["total", "step"])
def test_halves_in_place(device, dtype, place, rng):
    """The second half of the tokens, into the memory of a part; the first half stays."""
    whole = {n: normal(rng, SHAPE, dtype).to(device) for n in ("total", "step")}
    before, added = (statistics_of(rng, SHAPE).to(device) for _ in range(2))
    kept, sums = {n: t.clone() for n, t in whole.items()}, before.clone()
    half = SHAPE[1] // 2
    parts = [t[:, half:] for t in whole.values()]
    views = [seen(t, device)[:, half:] for t in (before, added)]
    output = whole[place][:, half:]
    call(*parts, output, *views, views[0])
    exact, both, terms = merged(*(t[:, half:] for t in kept.values()),
                                *(seen(t, device)[:, half:] for t in (sums, added)))  # fmt: skip
    assert_within(output, exact, terms, DEPTH)
    assert_within(views[0], both, seen(sums, "cpu")[:, half:].double().abs() + 1.0, 2)
    assert_bits(before[..., :half], sums[..., :half])
    assert_bits(whole[place][:, :half], kept[place][:, :half])


@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_rows_that_attend_nothing(device, dtype, rng):
    """A part of statistic -Inf adds nothing, whatever it holds; both make 0 and -Inf."""
    total, step = (normal(rng, (1, 4, 1, 40), dtype) for _ in range(2))
    before, added = torch.tensor([-INF, 2.0, -INF, 1.0]), torch.tensor([1.0, -INF, -INF, 1.0])
    total[0, 0], step[0, 1], total[0, 2], step[0, 2] = NAN, INF, NAN, -INF
    out, sums = torch.empty_like(total, device=device), torch.empty(1, 1, 4, device=device)
    views = [seen(each.view(1, 1, 4), device) for each in (before, added, sums)]
    call(total.to(device), step.to(device), out, *views)
    assert_bits(out[0, 0], step[0, 0])
    assert_bits(out[0, 1], total[0, 1])
    assert_bits(out[0, 2], torch.zeros_like(total[0, 2]))
    assert_bits(views[2].flatten()[:3], torch.tensor([1.0, 2.0, -INF]))
    mean = (total[0, 3].double() + step[0, 3].double()) / 2
    assert_within(out[0, 3], mean, (total[0, 3].double().abs() + step[0, 3].double().abs()) / 2, 4)


def test_nan_and_inf(device):
    """NaN of a statistic or of what has a weight is in the output; far weights are 0."""
    nan, ones = torch.full((1, 1, 1, 8), NAN), torch.ones(1, 1, 1, 8)
    for parts, sums in (((ones, ones), (NAN, 0.0)), ((ones, ones), (0.0, NAN)),
                        ((nan, ones), (0.0, 0.0)), ((ones, ones), (INF, INF))):  # fmt: skip
        out = torch.zeros(1, 1, 1, 8, device=device)
        views = [torch.full((1, 1, 1, 1), s, device=device) for s in (*sums, 0.0)]
        call(*(t.to(device) for t in parts), out, *views)
        assert bool(out.isnan().all())
    views = [torch.full((1, 1, 1, 1), s, device=device) for s in (500.0, -500.0, 0.0)]
    call(ones.to(device), nan.to(device), out, *views)
    assert_bits(out, ones)
    assert_bits(views[2], views[0])


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_no_elements(device, shape):
    out = torch.empty(shape, device=device)
    views = [torch.empty(*shape[:3], 1, device=device) for _ in range(3)]
    call(out, out.clone(), out.clone(), *views)


def test_no_channels(device, rng):
    """Statistics alone are merged."""
    empty = torch.empty(1, 4, 2, 0, device=device)
    before, added = (seen(statistics_of(rng, (1, 4, 2, 0)), device) for _ in range(2))
    sums = torch.empty_like(before)
    call(empty, empty.clone(), empty.clone(), before, added, sums)
    both = torch.logaddexp(before.cpu().double(), added.cpu().double())
    assert_within(sums, both, before.cpu().double().abs() + 1.0, 2)


def test_runs_repeat(device, rng):
    x, y = (normal(rng, SHAPE, BF16).to(device) for _ in range(2))
    before, added = (seen(statistics_of(rng, SHAPE), device) for _ in range(2))

    def run():
        out, sums = torch.empty_like(x), torch.empty_like(before)
        call(x, y, out, before, added, sums)
        return out, sums

    assert_repeats(run)


@pytest.mark.gpu
def test_cuda_has_the_values_of_the_cpu(rng):
    """Far more rows than a grid has blocks at a time, of the largest common size."""
    shape = (1, 4096, 16, 128)
    x, y = normal(rng, shape, BF16), normal(rng, shape, F32)
    before, added = (statistics_of(rng, shape) for _ in range(2))
    made = []
    for device in ("cpu", "cuda"):
        out, sums = torch.empty(shape, device=device), torch.empty_like(before, device=device)
        call(x.to(device), y.to(device), out, *(seen(t, device) for t in (before, added)),
             seen(sums, device))  # fmt: skip
        made.append(out.cpu())
    exact, _, terms = merged(x, y, seen(before, "cpu"), seen(added, "cpu"))
    for out in made:
        assert_within(out, exact, terms, DEPTH)
    assert op_count("cuda", "attention_merge") > 0


@pairs(total=HIGH, step=HIGH, result=HIGH, layout=list(LAYOUTS))
def test_definition(total, step, result, layout, rng):
    """Statistics that weigh exactly, or nothing, so that the definition in torch has the bits."""
    x, y = (laid_out(normal(rng, SHAPE, d), layout, "cpu") for d in (total, step))
    places = torch.from_numpy(rng.integers(0, 3, (2, *SHAPE[:3], 1)))
    before, added = torch.tensor([-INF, 300.0, 5.0])[places]
    added[(before == added) & before.isfinite()] += 200.0
    out = Poisoned(SHAPE, result, "cpu", layout=layout)
    sums = {"total_statistics": before, "step_statistics": added}
    assert_defined("attention_merge", x, y, out.tensor, **sums, statistics=before.clone())
    assert_defined("attention_merge", x, y, out.tensor)


X = torch.zeros(2, 4, 2, 8)
SUMS = torch.zeros(2, 4, 2, 1)


@pytest.mark.parametrize(
    "case",
    [
        (ValueError, "step: dim 1: size 3, expected 4", {"step": X[:, :3]}),
        (ValueError, "output: dim 3: size 4, expected 8", {"output": X[..., :4].clone()}),
        (ValueError, "total: ndim = 3, expected 4", {"total": X[0]}),
        (TypeError, "total: dtype e4m3", {"total": X.to(torch.float8_e4m3fn)}),
        (ValueError, "step_statistics: None beside statistics", {"step_statistics": None}),
        (ValueError, "total_statistics: statistics, which", {"statistics": None}),
        (ValueError, "statistics: dim 3: size 8, expected 1", {"statistics": X.clone()}),
        (TypeError, "statistics: dtype bf16, expected f32", {"statistics": SUMS.to(BF16)}),
    ],
    ids=lambda case: case[1],
)
def test_errors(device, case):
    good = {
        "total": X, "step": X.clone(), "output": X.clone(), "total_statistics": SUMS,
        "step_statistics": SUMS.clone(), "statistics": SUMS.clone(),
    }  # fmt: skip
    check_refused("attention_merge", device, case, good)


def test_memory_of_others(device):
    """Only what is documented may be one memory."""
    x, sums = X.to(device), SUMS.to(device)
    with pytest.raises(ValueError, match="attention_merge: statistics shares memory with step_"):
        call(x, x.clone(), x.clone(), sums.clone(), sums, sums)
    narrow = x.view(-1).view(BF16)[: x.numel()].view(x.shape)
    with pytest.raises(ValueError, match="attention_merge: output shares memory with total"):
        call(x, x.clone(), narrow)
