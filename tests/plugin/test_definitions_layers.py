# SPDX-License-Identifier: Apache-2.0
"""Norms, activations, soft caps and dropouts by their definition in torch, beside C and float64."""

import math

import pytest
import torch
from attention_reference import new_pair, pair_on, uniforms
from buffers import HIGH, LAYOUTS, RAGGED, Poisoned, laid_out, name_of, normal
from comparators import assert_bits, assert_within
from definitions import assert_defined, both, by_definition
from layer_reference import (
    ACTIVATIONS,
    GATED,
    NORMS,
    activation,
    activation_grad_terms,
    activation_terms,
    clamps,
    norm,
    norm_grad_terms,
    norm_terms,
    statistics,
    wide,
)
from thinning import pairs
from tols import BF16, E4M3, F16, F32

from transformer_engine import _core
from transformer_engine.plugin.definitions import philox

NAN, INF = math.nan, math.inf
EPS = 1e-3
NUMBERS = {"limit": 0.7, "alpha": 1.25, "linear_offset": -0.5}


def shape_of(rng):
    return tuple(int(n) for n in rng.choice(RAGGED, 2))


def poisoned(shape, dtype, layout="dense"):
    return Poisoned(shape, dtype, "cpu", layout=layout).tensor


def assert_same_specials(op, *args, only, **fields):
    """NaN and Inf are where the C code has them, in these arguments of a call."""
    (_, found), (_, expected) = both(op, *args, **fields)
    for name in only:
        ours, theirs = found[name].float(), expected[name].float()
        assert torch.equal(ours.isnan(), theirs.isnan()), name
        assert torch.equal(ours.isinf() * ours.sign(), theirs.isinf() * theirs.sign()), name


# ---- random words --------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 6, 4096])
def test_words_are_those_of_the_stream(first, rng):
    pair, count = new_pair(rng), int(rng.integers(0, 300))
    found = philox.uniforms(pair_on("cpu", pair), first, count)
    assert_bits(found.double(), uniforms(pair, first + count)[first:])


@pytest.mark.parametrize("offset", [-3, 2**32 - 2, 2**63 - 2, -(2**63), 2**31 - 1])
def test_counters_carry_and_wrap(offset, rng):
    pair = new_pair(rng)[0], offset
    assert_bits(philox.uniforms(pair_on("cpu", pair), 0, 41).double(), uniforms(pair, 41))


# ---- activations ---------------------------------------------------------------------------------


@pairs(name=list(ACTIVATIONS), dtype=HIGH, result=HIGH, layout=list(LAYOUTS))
def test_activations(name, dtype, result, layout, rng):
    rows, columns = shape_of(rng)
    x = normal(rng, (rows, columns * (2 if name in GATED else 1)), dtype, scale=2.0)
    placed, made = (
        laid_out(x, layout, "cpu"),
        Poisoned((rows, columns), result, "cpu", layout=layout),
    )
    numbers = clamps(**NUMBERS)
    with by_definition("activation"):
        _core.activation(placed, kind=ACTIVATIONS[name], wide=made.tensor, **numbers)
    exact = activation(name, wide(x), **numbers)
    assert_within(made.tensor, exact, activation_terms(name, wide(x), **numbers))
    assert made.untouched()


@pairs(name=list(ACTIVATIONS), dtype=HIGH, layout=list(LAYOUTS))
def test_gradients_of_activations(name, dtype, layout, rng):
    rows, columns = shape_of(rng)
    inner = columns * (2 if name in GATED else 1)
    x, grad = normal(rng, (rows, inner), dtype), normal(rng, (rows, columns), dtype)
    made, sums = Poisoned(x.shape, dtype, "cpu", layout=layout), poisoned((inner,), F32)
    numbers = clamps(**NUMBERS)
    with by_definition("activation_backward"):
        _core.activation_backward(
            laid_out(grad, layout, "cpu"), x, kind=ACTIVATIONS[name], wide=made.tensor,
            bias_grad=sums, **numbers,
        )  # fmt: skip
    leaf = wide(x).requires_grad_()
    (exact,) = torch.autograd.grad(activation(name, leaf, **numbers), leaf, wide(grad))
    terms = activation_grad_terms(name, wide(x), wide(grad), **numbers)
    assert_within(made.tensor, exact, terms)
    assert_within(sums, exact.sum(0), terms.sum(0), rows)
    assert made.untouched()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_special_numbers(name, rng):
    """NaN, Inf and numbers of every size, at each place that an activation reads."""
    sizes = [0.0, -0.0, 1e-40, 0.7, 3.0, 90.0, 1e4, 1e20, 3e38, INF]
    special = torch.tensor([NAN, *sizes, *(-size for size in sizes)])
    count = len(special)
    first = special.repeat(3) if name not in GATED else special.repeat_interleave(count)
    x = first[None] if name not in GATED else torch.stack((first, special.repeat(count)))
    x = x.reshape(1, -1)
    grad = normal(rng, first[None].shape, F32)
    kind = ACTIVATIONS[name]
    assert_same_specials(
        "activation", x, kind=kind, wide=torch.zeros_like(grad), only=["wide"], **NUMBERS
    )
    assert_same_specials(
        "activation_backward",
        grad,
        x,
        kind=kind,
        wide=torch.zeros_like(x),
        only=["wide"],
        **NUMBERS,
    )


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_soft_caps(dtype, gradient, rng):
    x, cap = normal(rng, shape_of(rng), dtype, scale=30.0), 25.0
    grad, made = normal(rng, x.shape, dtype), torch.empty_like(x)
    x[0, 0] = NAN
    with by_definition("softcap"):
        _core.softcap(x, cap, grad_output=grad if gradient else None, wide=made)
    assert made[0, 0].isnan()
    x[0, 0] = 0.0
    u = wide(x) / cap
    exact = (1 - torch.tanh(u) ** 2) * wide(grad) if gradient else cap * torch.tanh(u)
    made[0, 0] = exact[0, 0]
    # An error of eps of u is one of u tanh'(u) of the value, and of twice its square of the slope.
    terms = (1 + 2 * u.abs()) * (1 - torch.tanh(u) ** 2) * wide(grad).abs()
    assert_within(made, exact, terms if gradient else exact.abs())


# ---- norms ---------------------------------------------------------------------------------------


def norm_problem(rng, kind, dtype, shape):
    """Input, gamma and beta; of an L2 norm the first alone."""
    x = normal(rng, shape, dtype, scale=3.0) + 2
    gamma = None if kind == "l2" else normal(rng, shape[1:], dtype)
    return x, gamma, normal(rng, shape[1:], dtype) if kind == "layernorm" else None


def factor(gamma, zero_centered, columns):
    if gamma is None:
        return torch.ones(columns, dtype=torch.float64)
    return wide(gamma) + zero_centered


def new_statistics(kind, rows):
    found = {"rsigma": poisoned((rows,), F32)}
    return found | ({"mean": poisoned((rows,), F32)} if kind == "layernorm" else {})


@pairs(kind=list(NORMS), dtype=HIGH, result=HIGH, zero_centered=[False, True], layout=list(LAYOUTS))
def test_norms(kind, dtype, result, zero_centered, layout, rng):
    shape = shape_of(rng)
    x, gamma, beta = norm_problem(rng, kind, dtype, shape)
    fields = {"kind": NORMS[kind], "gamma": gamma, "beta": beta, "zero_centered": zero_centered}
    sums = new_statistics(kind, shape[0])
    made = Poisoned(shape, result, "cpu", layout=layout)
    again = torch.empty(shape, dtype=result)
    with by_definition("norm"):
        placed = laid_out(x, layout, "cpu")
        _core.norm(placed, wide=made.tensor, eps=EPS, **sums, **fields)
        _core.norm(placed, wide=again, statistics_given=True, **sums, **fields)
    weight = factor(gamma, zero_centered, shape[1])
    bias = torch.zeros_like(weight) if beta is None else wide(beta)
    terms = norm_terms(kind, wide(x), weight, bias, EPS)
    assert_within(made.tensor, norm(kind, wide(x), weight, bias, EPS), terms, shape[1])
    assert_bits(again, made.tensor.clone())
    mean, rsigma = statistics(kind, wide(x), EPS)
    sizes = wide(x).abs().mean(1)
    spread = rsigma[:, 0] * (1 + (sizes * rsigma[:, 0] if beta is not None else 0))
    assert_within(sums["rsigma"], rsigma[:, 0], spread, shape[1])
    if kind == "layernorm":
        assert_within(sums["mean"], mean[:, 0], sizes, shape[1])
    assert made.untouched()


@pairs(kind=list(NORMS), dtype=HIGH, zero_centered=[False, True], added=[False, True])
def test_gradients_of_norms(kind, dtype, zero_centered, added, rng):
    shape = shape_of(rng)
    x, gamma, _ = norm_problem(rng, kind, dtype, shape)
    grad, other = (normal(rng, shape, dtype) for _ in range(2))
    mean, rsigma = (t[:, 0].float() for t in statistics(kind, wide(x), EPS))
    made, sums = torch.empty(shape, dtype=F32), poisoned(shape[1:], F32)
    fields = {"mean": mean, "beta_grad": poisoned(shape[1:], F32)} if kind == "layernorm" else {}
    with by_definition("norm_backward"):
        _core.norm_backward(
            grad, x, kind=NORMS[kind], rsigma=rsigma, gamma=gamma, grad_input=made,
            grad_add=other if added else None, zero_centered=zero_centered, gamma_grad=sums,
            **fields,
        )  # fmt: skip
    total = wide(grad) + wide(other) * added
    leaf = wide(x).requires_grad_()
    weight = factor(gamma, zero_centered, shape[1]).requires_grad_()
    (exact, of_gamma) = torch.autograd.grad(norm(kind, leaf, weight, 0, EPS), (leaf, weight), total)
    of_x, *of_sums = norm_grad_terms(kind, wide(x), weight.detach(), total, EPS)
    # The statistics are rounded: an error of the mean or of rsigma is one of each term.
    assert_within(made, exact, of_x * (2 + x.double().abs() * rsigma[:, None]), shape[1])
    assert_within(sums, of_gamma, of_sums[0], shape[0])
    if kind == "layernorm":
        assert_within(fields["beta_grad"], total.sum(0), of_sums[1], shape[0])


@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_gradients_are_added_to_those_of_another_reader(dtype, rng):
    """As rounded, and in place."""
    shape = shape_of(rng)
    x, gamma, _ = norm_problem(rng, "rmsnorm", dtype, shape)
    grad, residual = (normal(rng, shape, dtype) for _ in range(2))
    fields = {
        "kind": NORMS["rmsnorm"],
        "rsigma": statistics("rmsnorm", wide(x), EPS)[1][:, 0].float(),
    }
    plain, target = torch.empty_like(x), residual.clone()
    with by_definition("norm_backward"):
        _core.norm_backward(grad, x, gamma=gamma, grad_input=plain, **fields)
        _core.norm_backward(grad, x, gamma=gamma, grad_input=target, grad_residual=target, **fields)
    assert_bits(target, (plain.float() + residual.float()).to(dtype))


@pytest.mark.parametrize("op", ["norm", "norm_backward"])
@pytest.mark.parametrize("kind", NORMS)
def test_rows_that_no_matrix_has(kind, op, rng):
    """Heads of a projection are the same rows as a matrix of them."""
    whole = normal(rng, (5, 3, 40), BF16)
    heads = whole.as_strided((5, 3, 2, 8), (120, 40, 8, 1), 11)
    rows = heads.reshape(30, 8)
    _, gamma, _ = norm_problem(rng, kind, BF16, rows.shape)
    fields = {"kind": NORMS[kind], "gamma": gamma} | new_statistics(kind, 30)
    found = [torch.empty(30, 8, dtype=BF16) for _ in range(2)]
    with by_definition(op):
        for x, made in zip((heads, rows), found, strict=True):
            if op == "norm":
                _core.norm(x, wide=made, **fields)
                continue
            fields["rsigma"].fill_(0.5), fields.get("mean", torch.zeros(1)).fill_(0.25)
            into = made.view(x.shape) if x is heads else made
            _core.norm_backward(rows, x, grad_input=into, **fields)
    assert_bits(*found)


# ---- casts of what was computed ------------------------------------------------------------------


def _runs(rng, shape):
    """Calls of operators that cast, less what the cast is: (operator, arguments, fields)."""
    x, grad = normal(rng, shape, BF16), normal(rng, shape, BF16)
    gelu, gamma = _core.ACTIVATION_GELU, normal(rng, shape[1:], F32)
    return {
        "norm": ((x,), {"kind": _core.NORM_RMSNORM, "gamma": gamma}),
        "activation": ((x,), {"kind": gelu}),
        "activation_backward": ((grad, x), {"kind": gelu}),
        "softcap": ((x, 2.0), {}),
    }


@pytest.mark.parametrize("op", ["norm", "activation", "activation_backward", "softcap"])
def test_values_are_cast_as_quantize_casts_them(op, rng):
    """In one call to fp32 and to FP8, both forms, with an amax."""
    shape = shape_of(rng)
    args, fields = _runs(rng, shape)[op]
    scale, values = torch.tensor([float(rng.uniform(1, 90))]), torch.empty(shape)

    def request():
        forms = {"row": poisoned(shape, E4M3), "column": poisoned(shape[::-1], E4M3)}
        scales = poisoned((2,), F32)
        forms |= {"row_scales": scales, "column_scales": scales}
        return forms | {"amax": torch.tensor([0.1]), "scale": scale, "mode": _core.SCALING_TENSOR}

    found, expected = request(), request()
    with by_definition(op):
        getattr(_core, op)(*args, wide=values, **found, **fields)
    _core.quantize(values, **expected)
    for name in ("row", "column", "row_scales", "amax"):
        assert_bits(found[name], expected[name])


# ---- dropouts ------------------------------------------------------------------------------------


@pairs(
    dtype=HIGH,
    dropout=[0.0, 0.3, 1.0],
    drop_path=[0.0, 0.4],
    parts=[(), ("bias",), ("residual",), ("bias", "residual")],
    layout=list(LAYOUTS),
)
def test_dropouts(dtype, dropout, drop_path, parts, layout, rng):
    """Decisions and values have the bits of the C code."""
    samples, (each, columns) = int(rng.integers(1, 5)), shape_of(rng)
    shape = (samples * each, columns)
    x, residual = (normal(rng, shape, dtype) for _ in range(2))
    x[int(rng.integers(shape[0])), 0] = NAN
    given = {"bias": normal(rng, (columns,), F16), "residual": laid_out(residual, layout, "cpu")}
    assert_defined(
        "dropout_add", laid_out(x, layout, "cpu"), poisoned(shape, dtype, layout),
        rng=pair_on("cpu", new_pair(rng)), dropout=dropout, drop_path=drop_path, samples=samples,
        **{name: given[name] for name in parts},
    )  # fmt: skip


@pairs(dtype=HIGH, dropout=[0.0, 0.3, 1.0], drop_path=[0.0, 0.4], wanted=["input", "bias", "both"])
def test_gradients_of_dropouts(dtype, dropout, drop_path, wanted, rng):
    samples, (each, columns) = int(rng.integers(1, 5)), shape_of(rng)
    grad = normal(rng, (samples * each, columns), dtype)
    made = torch.empty(grad.shape, dtype=dtype) if wanted != "bias" else None
    sums = torch.empty(columns) if wanted != "input" else None
    found = assert_defined(
        "dropout_backward", grad, grad_input=made, bias_grad=sums,
        rng=pair_on("cpu", new_pair(rng)), dropout=dropout, drop_path=drop_path, samples=samples,
        but=["bias_grad"] if sums is not None else [],
    )  # fmt: skip
    if sums is None:
        return
    factor = 1 / ((1 - dropout) * (1 - drop_path)) if dropout < 1.0 else 0.0
    ours, theirs = found["bias_grad"]
    assert_within(ours, theirs.double(), 2 * factor * wide(grad).abs().sum(0), len(grad))


# ---- nothing -------------------------------------------------------------------------------------


NOTHING = [(0, 6), (5, 0), (0, 0)]


def _operators_of(x):
    """Calls that read one tensor: (operator, arguments, fields)."""
    made = torch.empty_like(x)
    yield "dropout_add", (x, made), {"rng": torch.tensor([3, 5]), "dropout": 0.5}
    yield (
        "dropout_backward",
        (x,),
        {"grad_input": made, "rng": torch.zeros(2).long(), "dropout": 1.0},
    )
    yield "softcap", (x, 2.0), {"wide": made}
    yield "activation", (x,), {"kind": _core.ACTIVATION_GELU, "wide": made}
    yield "activation_backward", (x, x), {"kind": _core.ACTIVATION_SILU, "wide": made}
    if x.shape[1]:
        sums = torch.empty(0)
        yield "norm", (x,), {"kind": _core.NORM_L2, "wide": made, "rsigma": sums}


@pytest.mark.parametrize("shape", NOTHING, ids=str)
def test_nothing_of_nothing(shape):
    for op, args, fields in _operators_of(torch.empty(shape)):
        assert_defined(op, *args, **fields)


def test_column_sums_of_no_rows_are_zero():
    x, sums = torch.empty(0, 6), [torch.full((6,), NAN) for _ in range(2)]
    assert_defined(
        "norm_backward", x, x, kind=_core.NORM_LAYERNORM, rsigma=torch.empty(0),
        mean=torch.empty(0), gamma_grad=sums[0], beta_grad=sums[1],
    )  # fmt: skip
    assert_defined("dropout_backward", x, bias_grad=torch.full((6,), NAN))
