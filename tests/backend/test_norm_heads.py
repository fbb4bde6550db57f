# SPDX-License-Identifier: Apache-2.0
"""norm and norm_backward of rows that no matrix has, as heads of a projection lie.

The bits are those of the same rows one behind the other, which other tests compare with float64.
"""

import pytest
import torch
from buffers import HIGH, Poisoned, name_of, normal
from comparators import assert_bits
from layer_reference import NORMS
from refusals import check_refused
from tols import BF16, F32

from transformer_engine import _core

KINDS = pytest.mark.parametrize("kind", list(NORMS))
EPS = 1e-3
# [tokens, groups, heads of a group, channels], other channels of a group beside them
SHAPES = [(7, 3, 1, 16), (5, 2, 3, 8), (40, 4, 2, 128), (3, 1, 2, 256), (9, 2, 2, 5), (2, 3, 4, 33)]


def heads_of(tensor, shape, offset=1):
    """A view [tokens, groups, heads, channels] of a projection with other channels around it."""
    tokens, groups, heads, channels = shape
    beside = tensor.shape[1] // groups - heads * channels
    strides = (tensor.shape[1], heads * channels + beside, channels, 1)
    return tensor.as_strided(shape, strides, tensor.storage_offset() + offset)


def width(shape, beside):
    return shape[1] * (shape[2] * shape[3] + beside)


def parameters(rng, kind, channels, dtype, device):
    gamma = None if kind == "l2" else normal(rng, (channels,), dtype, device)
    return gamma, normal(rng, (channels,), dtype, device) if kind == "layernorm" else None


def run_norm(x, kind, gamma, beta, rows, *, device, dtype):
    mean = torch.empty(rows, device=device) if kind == "layernorm" else None
    rsigma, wide = torch.empty(rows, device=device), torch.empty(rows, x.shape[-1], dtype=dtype)
    wide = wide.to(device)
    _core.norm(
        x, kind=NORMS[kind], gamma=gamma, beta=beta, mean=mean, rsigma=rsigma, wide=wide, eps=EPS
    )
    return wide, rsigma, mean


@KINDS
@pytest.mark.parametrize("beside", [16, 8, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_norm(device, dtype, shape, beside, kind, rng):
    rows, channels = shape[0] * shape[1] * shape[2], shape[3]
    whole = normal(rng, (shape[0], width(shape, beside)), dtype, device)
    gamma, beta = parameters(rng, kind, channels, dtype, device)
    for offset in (0, beside):
        x = heads_of(whole, shape, offset)
        options = {"device": device, "dtype": dtype}
        found = run_norm(x, kind, gamma, beta, rows, **options)
        dense = x.reshape(rows, channels)
        for ours, expected in zip(
            found, run_norm(dense, kind, gamma, beta, rows, **options), strict=True
        ):
            assert (ours is None) == (expected is None)
            assert ours is None or torch.equal(ours, expected)
        again = torch.empty_like(found[0])
        _core.norm(
            x, kind=NORMS[kind], gamma=gamma, beta=beta, mean=found[2], rsigma=found[1],
            wide=again, statistics_given=True,
        )  # fmt: skip
        assert_bits(again, found[0])


@KINDS
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_norm_backward(device, dtype, shape, added, kind, rng):
    rows, channels = shape[0] * shape[1] * shape[2], shape[3]
    whole = normal(rng, (shape[0], width(shape, 8)), dtype, device)
    gamma, beta = parameters(rng, kind, channels, dtype, device)
    grad = normal(rng, (rows, channels), dtype, device)
    other = normal(rng, (rows, channels), dtype, device) if added else None
    x = heads_of(whole, shape, 8)
    _, rsigma, mean = run_norm(x, kind, gamma, beta, rows, device=device, dtype=dtype)

    def run(x, grad_input):
        sums = [None if t is None else torch.empty_like(t) for t in (gamma, beta)]
        _core.norm_backward(
            grad, x, kind=NORMS[kind], rsigma=rsigma, mean=mean, gamma=gamma, grad_add=other,
            grad_input=grad_input, gamma_grad=sums[0], beta_grad=sums[1],
        )  # fmt: skip
        return sums

    made = Poisoned(whole.shape, dtype, device)
    expected = torch.empty(rows, channels, dtype=dtype, device=device)
    sums = run(x.reshape(rows, channels), expected)
    before = made.tensor.view(torch.uint8).clone()
    into = heads_of(made.tensor, shape, 8)
    found = run(x, into)
    assert_bits(into.reshape(rows, channels), expected)
    for ours, theirs in zip(found, sums, strict=True):
        assert ours is None or torch.equal(ours, theirs)
    into.copy_(heads_of(before.view(dtype), shape, 8))  # nothing else was written
    assert torch.equal(made.tensor.view(torch.uint8), before) and made.untouched()
    dense = torch.empty_like(x, memory_format=torch.contiguous_format)
    run(x, dense)  # read as heads, written as rows
    assert_bits(dense.view(rows, channels), expected)


def test_rows_of_more_dims_that_a_matrix_has(device, rng):
    """[tokens, heads, channels] without anything between: any width, and casts."""
    for channels in (8, 300, 1032):
        x = normal(rng, (6, 4, channels), BF16, device)
        gamma, beta = parameters(rng, "layernorm", channels, BF16, device)
        options = {"device": device, "dtype": BF16}
        found = run_norm(x, "layernorm", gamma, beta, 24, **options)
        expected = run_norm(x.view(24, channels), "layernorm", gamma, beta, 24, **options)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", [(0, 2, 2, 8), (3, 0, 2, 8), (3, 2, 0, 8)], ids=str)
def test_empty(device, shape):
    x = torch.empty(*shape[:3], 16, device=device)[..., 8:]
    wide, rsigma = torch.empty(0, 8, device=device), torch.empty(0, device=device)
    _core.norm(x, kind=NORMS["rmsnorm"], wide=wide, rsigma=rsigma)
    gamma = torch.full((8,), float("nan"), device=device)
    _core.norm_backward(wide, x, kind=NORMS["rmsnorm"], rsigma=rsigma, gamma_grad=gamma)
    assert not gamma.any()  # sums of nothing


# ---- refusals ------------------------------------------------------------------------------------

X = torch.zeros(4, 3, 32)[:, :2, :16]  # heads beside others
WIDE, LINES = torch.zeros(8, 16), torch.zeros(8)
WRONG = {
    "one dim": (
        ValueError,
        "input: ndim = 1, expected rows",
        {"input": torch.zeros(16), "wide": torch.zeros(1, 16), "rsigma": None},
    ),
    "wide of heads": (
        ValueError,
        r"wide: shape \[4, 16\], expected \[8, 16\]",
        {"wide": WIDE[:4].clone()},
    ),
    "rsigma": (ValueError, "rsigma: ndim 1 and length 4", {"rsigma": LINES[:4].clone()}),
    "measured": (
        ValueError,
        "input: its rows are those of no matrix",
        {"amax_partials": torch.zeros(_core.AMAX_PARTIALS)},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    output = Poisoned(WIDE.shape, F32, device)
    good = {"input": X, "kind": NORMS["rmsnorm"], "wide": output.tensor, "rsigma": LINES}
    check_refused("norm", device, WRONG[case], good, output)


def test_wrong_gradient(device):
    good = {"grad_output": WIDE, "input": X, "kind": NORMS["rmsnorm"], "rsigma": LINES}
    refusal = ValueError, r"grad_output: shape \[4, 16\], expected \[8, 16\]"
    check_refused("norm_backward", device, (*refusal, {"grad_output": WIDE[:4].clone()}), good)


@pytest.mark.gpu
def test_cuda_refuses_wide_heads():
    x = torch.zeros(4, 3, 600, device="cuda")[:, :2, :512]
    with pytest.raises(NotImplementedError, match="heads of 512 columns, expected at most 256"):
        _core.norm(x, kind=NORMS["rmsnorm"], wide=torch.zeros(8, 512, device="cuda"))
