# SPDX-License-Identifier: Apache-2.0
"""dropout_add and dropout_backward: decisions bit for bit, values, drop path, column sums."""

import itertools

import numpy as np
import pytest
import torch
from attention_reference import (
    drop_factors,
    kept,
    new_pair,
    pair_on,
    path_factors,
    philox,
    uniforms,
)
from buffers import HIGH, LAYOUTS, RAGGED, Poisoned, laid_out, name_of, normal, op_count
from comparators import assert_bits, assert_grad64, assert_repeats, assert_within
from refusals import check_refused
from tols import BF16, F16, F32, tol

from transformer_engine import _core

SHAPE = (60, 133)
NAN, INF = float("nan"), float("inf")
PARTS = [
    {name for name, wanted in zip(("bias", "residual"), chosen, strict=True) if wanted}
    for chosen in itertools.product((False, True), repeat=2)
]


def name_parts(parts):
    return "+".join(sorted(parts)) or "alone"


def factors(pair, shape, dropout=0.0, drop_path=0.0, samples=1):
    """What both dropouts multiply the elements by, [rows, columns] in float64."""
    both = drop_factors(pair, shape, dropout)
    return both * path_factors(pair, shape, drop_path, samples)


def check_add(rng, device, shape, dtype, parts=("bias", "residual"), **options):
    """One call against float64; `options` are those of `factors`, layout, bias_dtype, in_place."""
    layout = options.pop("layout", "dense")
    bias = normal(rng, shape[1:], options.pop("bias_dtype", dtype)) if "bias" in parts else None
    x = normal(rng, shape, dtype)
    residual = normal(rng, shape, dtype) if "residual" in parts else None
    made = Poisoned(shape, dtype, device, layout=layout)
    placed = made.put(x) if options.pop("in_place", False) else laid_out(x, layout, device)
    pair = new_pair(rng)
    _core.dropout_add(
        placed,
        made.tensor,
        bias=None if bias is None else bias.to(device),
        residual=None if residual is None else laid_out(residual, layout, device),
        rng=pair_on(device, pair),
        **options,
    )
    factor = factors(pair, shape, **options)
    path = torch.zeros(shape, dtype=torch.float64) if bias is None else bias.double().expand(shape)
    rest = torch.zeros(shape, dtype=torch.float64) if residual is None else residual.double()
    exact = rest + (x.double() + path) * factor
    assert_within(made.tensor, exact, rest.abs() + (x.double().abs() + path.abs()) * factor)
    dropped = factor == 0
    assert torch.equal(made.tensor.cpu()[dropped].double(), rest[dropped]), "a dropped element"
    assert made.untouched()


# ---- the generator -------------------------------------------------------------------------------


def test_published_numbers():
    """Philox4x32-10 of this file gives the answers published with it."""
    full = 0xFFFFFFFF
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], (0xA4093822, 0x299F31D0)
    answers = [
        (([0] * 4, (0, 0)), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (([full] * 4, (full, full)), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (pi, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]
    for (counter, key), words in answers:
        assert tuple(int(word) for word in philox([counter], key)[0]) == words


PAIRS = [(0, 0), (-1, -1), (2**32, 2**32 - 2), (-(2**63), 2**63 - 1), (12345, 2**40 + 7)]


@pytest.mark.parametrize("pair", PAIRS)
def test_decisions_are_those_of_philox(device, pair):
    """Counters across 2^32 and 2^64, keys of two words; thresholds that the stream contains."""
    shape = (37, 41)
    numbers = uniforms(pair, shape[0] * shape[1])
    x = torch.ones(shape, device=device)
    for probability in (numbers[5].item(), numbers[700].item(), 2.0**-24, 0.5):
        made = Poisoned(shape, F32, device)
        _core.dropout_add(x, made.tensor, rng=pair_on(device, pair), dropout=probability)
        assert torch.equal(made.tensor.cpu() != 0, (numbers >= probability).reshape(shape))
        assert torch.equal(made.tensor.cpu() != 0, kept(pair, shape, probability))


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_keep_rate(device, probability, rng):
    x = torch.ones(512, 256, device=device)
    made = torch.empty_like(x)
    _core.dropout_add(x, made, rng=pair_on(device, new_pair(rng)), dropout=probability)
    share = (made != 0).double().mean().item()
    assert abs(share - (1 - probability)) <= tol("share", F32, x.numel())


def test_pairs_give_other_decisions(device, rng):
    """Another seed decides independently; an offset of n is the stream from element 4 n on."""
    seed, offset = new_pair(rng)
    x = torch.ones(64, 256, device=device)
    made = [torch.empty_like(x) for _ in range(3)]
    for out, pair in zip(
        made, [(seed, offset), (seed ^ 1, offset), (seed, offset + 64)], strict=True
    ):
        _core.dropout_add(x, out, rng=pair_on(device, pair), dropout=0.5)
    first, other, later = (out.cpu() != 0 for out in made)
    assert abs((first == other).double().mean().item() - 0.5) <= tol("share", F32, x.numel())
    assert torch.equal(first.flatten()[256:], later.flatten()[:-256])


# ---- dropout_add ---------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", PARTS, ids=name_parts)
@pytest.mark.parametrize("dropout", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_values(device, dtype, dropout, parts, rng):
    check_add(rng, device, SHAPE, dtype, parts, dropout=dropout)


@pytest.mark.parametrize("bias_dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_bias_dtypes(device, dtype, bias_dtype, rng):
    check_add(rng, device, SHAPE, dtype, {"bias"}, bias_dtype=bias_dtype, dropout=0.3)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_layouts(device, dtype, layout, in_place, rng):
    check_add(rng, device, (33, 136), dtype, layout=layout, in_place=in_place, dropout=0.2)


@pytest.mark.parametrize("columns", [*RAGGED, 1024, 1025, 3001])
@pytest.mark.parametrize("rows", [1, 6])
def test_shapes(device, rows, columns, rng):
    check_add(rng, device, (rows, columns), BF16, dropout=0.4, drop_path=0.4, samples=rows)


@pytest.mark.parametrize("samples", [1, 5, 12, 60])
@pytest.mark.parametrize("drop_path", [0.3, 1.0])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_drop_path(device, dropout, drop_path, samples, rng):
    for parts in PARTS:
        options = {"dropout": dropout, "drop_path": drop_path, "samples": samples}
        check_add(rng, device, SHAPE, F32, parts, **options)


def test_drop_path_takes_whole_samples(device, rng):
    """Leading dims are rows: a batch of sequences is dropped sequence by sequence."""
    pair = new_pair(rng)
    x = torch.ones(50, 7, 9, device=device)
    made = torch.empty_like(x)
    _core.dropout_add(x, made, rng=pair_on(device, pair), drop_path=0.5, samples=50)
    stays = path_factors(pair, (350, 9), 0.5, 50).reshape(50, 7, 1).expand(50, 7, 9)
    assert_bits(made, stays.float())


def test_no_dropout_copies(device, rng):
    x = normal(rng, SHAPE, F16, device)
    made = torch.empty_like(x)
    _core.dropout_add(x, made)
    assert_bits(made, x)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_empty(device, shape, counters):
    x, rng = torch.empty(shape, device=device), pair_on(device, (1, 2))
    _core.dropout_add(x, torch.empty_like(x), rng=rng, dropout=0.5, drop_path=0.5)
    sums = Poisoned(shape[1:], F32, device)
    _core.dropout_backward(x, grad_input=torch.empty_like(x), bias_grad=sums.tensor)
    assert_bits(sums.tensor, torch.zeros(shape[1]))
    assert counters() == {f"op.{device}.dropout_add": 1, f"op.{device}.dropout_backward": 1}


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_special_numbers(device, special, rng):
    """They pass where kept; what is dropped is 0, and the residual is added to it."""
    pair = new_pair(rng)
    x, residual = torch.full(SHAPE, special), normal(rng, SHAPE, F32)
    made = torch.empty(SHAPE, device=device)
    options = {"dropout": 0.5, "drop_path": 0.3, "samples": 12}
    placed = residual.to(device)
    _core.dropout_add(x.to(device), made, residual=placed, rng=pair_on(device, pair), **options)
    stays = factors(pair, SHAPE, **options) != 0
    assert_bits(made, torch.where(stays, x, residual), any_nan=True)


READS = {
    "transposed": lambda x: x.t(),
    "column_step": lambda x: x[:, ::2],
    "expanded_row": lambda x: x[:1].expand(9, -1),
    "three_dims": lambda x: x.reshape(5, 4, -1).permute(1, 0, 2),
}


@pytest.mark.parametrize("view", READS)
def test_any_view_is_read(device, view, rng):
    x = READS[view](normal(rng, (20, 24), F32, device))
    pair, made = new_pair(rng), torch.empty(x.shape, device=device)
    _core.dropout_add(x, made, residual=x, rng=pair_on(device, pair), dropout=0.25)
    factor = factors(pair, (x[..., 0].numel(), x.shape[-1]), 0.25).reshape(x.shape)
    wide = x.cpu().double()
    assert_within(made, wide + wide * factor, wide.abs() * (1 + factor))


# ---- dropout_backward ----------------------------------------------------------------------------


def check_backward(rng, device, shape, dtype, **options):
    """One call against float64; `options` are those of `factors`, layout, sums_dtype, wanted."""
    layout, sums_dtype = options.pop("layout", "dense"), options.pop("sums_dtype", dtype)
    wanted = options.pop("wanted", ("grad_input", "bias_grad"))
    grad, pair = normal(rng, shape, dtype), new_pair(rng)
    made = {
        "grad_input": Poisoned(shape, dtype, device, layout=layout),
        "bias_grad": Poisoned(shape[1:], sums_dtype, device, layout=layout),
    }
    outputs = {name: made[name].tensor for name in wanted}
    _core.dropout_backward(
        laid_out(grad, layout, device), **outputs, rng=pair_on(device, pair), **options
    )
    exact = grad.double() * factors(pair, shape, **options)
    if "grad_input" in wanted:
        assert_within(made["grad_input"].tensor, exact, exact.abs())
        assert torch.equal(made["grad_input"].tensor.cpu() == 0, exact == 0)
    if "bias_grad" in wanted:
        assert_within(made["bias_grad"].tensor, exact.sum(0), exact.abs().sum(0), shape[0])
    for name, memory in made.items():
        assert memory.untouched() if name in wanted else memory.unwritten()


@pytest.mark.parametrize("sums_dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("dropout", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_backward(device, dtype, dropout, sums_dtype, rng):
    check_backward(rng, device, SHAPE, dtype, dropout=dropout, sums_dtype=sums_dtype)


@pytest.mark.parametrize("wanted", [("grad_input",), ("bias_grad",), ()])
def test_backward_makes_what_is_wanted(device, wanted, rng):
    check_backward(rng, device, SHAPE, BF16, dropout=0.5, wanted=wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_backward_layouts(device, dtype, layout, rng):
    check_backward(rng, device, (33, 136), dtype, layout=layout, dropout=0.2)


@pytest.mark.parametrize("shape", [(1, 1), (1, 1025), (64, 17), (65, 1024), (1000, 33), (7, 3001)])
def test_backward_shapes(device, shape, rng):
    check_backward(rng, device, shape, F32, dropout=0.4, drop_path=0.2, samples=shape[0])


@pytest.mark.parametrize("samples", [1, 12, 60])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_backward_drop_path(device, dropout, samples, rng):
    check_backward(rng, device, SHAPE, BF16, dropout=dropout, drop_path=0.3, samples=samples)


@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_gradient_of_the_definition(device, dtype, rng):
    """Against float64 autograd of residual + drop_path(dropout(input + bias))."""
    pair, options = new_pair(rng), {"dropout": 0.2, "drop_path": 0.2, "samples": 12}
    grad, made = normal(rng, SHAPE, dtype), Poisoned(SHAPE, dtype, device)
    sums = Poisoned(SHAPE[1:], dtype, device)
    _core.dropout_backward(
        grad.to(device),
        grad_input=made.tensor,
        bias_grad=sums.tensor,
        rng=pair_on(device, pair),
        **options,
    )

    def definition(x, bias):
        return (x + bias) * factors(pair, SHAPE, **options)

    inputs = {"x": normal(rng, SHAPE, dtype), "bias": normal(rng, SHAPE[1:], dtype)}
    bound = tol("round", dtype) + tol("sum", F32, SHAPE[0])
    assert_grad64({"x": made.tensor, "bias": sums.tensor}, definition, inputs, grad, bound)


def test_twice_the_same(device, rng):
    """Sums do not depend on which thread comes first."""
    grad, pair = normal(rng, (900, 530), F32, device), pair_on(device, new_pair(rng))
    options = {"rng": pair, "dropout": 0.1, "drop_path": 0.1, "samples": 30}

    def run():
        made, added, sums = torch.empty_like(grad), grad.clone(), torch.empty(530, device=device)
        _core.dropout_backward(grad, grad_input=made, bias_grad=sums, **options)
        _core.dropout_add(added, added, residual=grad, bias=sums, **options)
        return made, sums, added

    assert_repeats(run)


def test_sums_keep_nan_and_inf(device):
    grad = torch.ones(100, 4, device=device)
    grad[50, 1], grad[60, 2] = NAN, INF
    sums = torch.zeros(4, device=device)
    _core.dropout_backward(grad, bias_grad=sums)
    assert_bits(sums, torch.tensor([100.0, NAN, INF, 100.0]), any_nan=True)


# ---- refusals ------------------------------------------------------------------------------------

X = torch.zeros(6, 8)
PAIR = torch.tensor([1, 2])
WRONG = {
    "integer input": (TypeError, r"input: dtype i32, expected", {"input": X.int()}),
    "other output dtype": (
        TypeError,
        r"output: dtype bf16, expected f32",
        {"output": X.bfloat16()},
    ),
    "other output shape": (ValueError, r"output: shape \[5, 8\]", {"output": X[:5].clone()}),
    "other residual dtype": (TypeError, r"residual: dtype f16", {"residual": X.half()}),
    "other residual shape": (ValueError, r"residual: shape \[6, 7\]", {"residual": X[:, :7]}),
    "short bias": (ValueError, r"bias: .*length 7, expected a vector of 8", {"bias": X[0, :7]}),
    "integer bias": (TypeError, r"bias: dtype i32", {"bias": X[0].int()}),
    "no numbers": (ValueError, r"rng: .*NULL", {"dropout": 0.5}),
    "no numbers for the path": (ValueError, r"rng: .*NULL", {"drop_path": 0.5}),
    "int32 numbers": (TypeError, r"rng: dtype i32, expected i64", {"rng": PAIR.int()}),
    "one number": (ValueError, r"rng: 1 elements", {"rng": PAIR[:1]}),
    "negative": (ValueError, r"dropout: -0.1", {"dropout": -0.1, "rng": PAIR}),
    "beyond 1": (ValueError, r"drop_path: 1.01", {"drop_path": 1.01, "rng": PAIR}),
    "NaN": (ValueError, r"drop_path: -?nan", {"drop_path": NAN, "rng": PAIR}),
    "no samples": (ValueError, r"samples: 0, expected", {"samples": 0}),
    "samples that do not divide": (
        ValueError,
        r"samples: 4, .* divides the 6 rows",
        {"samples": 4},
    ),
    "no input": (TypeError, r"input: expected a torch.Tensor, got None", {"input": None}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    output = Poisoned(X.shape, F32, device)
    good = {"input": X, "output": output.tensor}
    check_refused("dropout_add", device, WRONG[case], good, output)


BACKWARD_WRONG = {
    "integer gradient": (TypeError, r"grad_output: dtype i32", {"grad_output": X.int()}),
    "other dtype": (TypeError, r"grad_input: dtype bf16", {"grad_input": X.bfloat16()}),
    "other shape": (ValueError, r"grad_input: shape \[6, 7\]", {"grad_input": X[:, :7].clone()}),
    "short sums": (ValueError, r"bias_grad: .*length 5", {"bias_grad": torch.zeros(5)}),
    "integer sums": (TypeError, r"bias_grad: dtype i32", {"bias_grad": X[0].int()}),
    "no numbers": (ValueError, r"rng: .*NULL", {"dropout": 0.5}),
    "samples": (ValueError, r"samples: 5, .* divides the 6 rows", {"samples": 5}),
}


@pytest.mark.parametrize("case", BACKWARD_WRONG)
def test_backward_wrong_argument(device, case):
    check_refused("dropout_backward", device, BACKWARD_WRONG[case], {"grad_output": X})


def test_counted_once(device, counters, rng):
    x = normal(rng, SHAPE, F32, device)
    _core.dropout_add(x, x)
    assert counters() == {f"op.{device}.dropout_add": 1} and op_count(device, "dropout_add") == 1


# ---- CUDA against CPU ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("shape", [(1, 1), (64, 1000), (1024, 768), (999, 77)])
def test_cuda_drops_what_the_cpu_drops(shape, dtype, rng):
    pair, ones = new_pair(rng), torch.ones(shape, dtype=dtype)
    made = []
    for device in ("cpu", "cuda"):
        out = torch.empty(shape, dtype=dtype, device=device)
        options = {"dropout": 0.1, "drop_path": 0.2, "samples": shape[0]}
        _core.dropout_add(ones.to(device), out, rng=pair_on(device, pair), **options)
        made.append(out.cpu())
    assert np.array_equal(*(out.float().numpy() == 0 for out in made))
