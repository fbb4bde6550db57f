# SPDX-License-Identifier: Apache-2.0
"""The comparators: bits, a margin for each element, ratio to a naive error, NMSE, float64 autograd.

Bounds are those of `tols.tol`. All take tensors of any device and compare on the CPU.
"""

import numpy as np
import torch
from reference import encode
from tols import EPS, F32, tol

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    """Element bits of a tensor as integers, on the CPU."""
    plain = tensor.detach().cpu().contiguous()
    return plain.view(_INTEGERS[plain.element_size()])


def all_finite(tensor):
    """Of a tensor on the CPU; numpy finds out in a fraction of torch's time."""
    return bool(np.isfinite(tensor.numpy()).all())


def assert_bits(actual, expected, *, any_nan=False):
    """Same shape, dtype and bits. any_nan: a NaN equals every other NaN."""
    assert actual.dtype == expected.dtype, f"{actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{actual.shape}, expected {expected.shape}"
    if np.array_equal(bits(actual).numpy(), bits(expected).numpy()):  # the quick answer
        return
    different = bits(actual) != bits(expected)
    if any_nan:
        wide = [t.detach().cpu().float() for t in (actual, expected)]
        different &= ~(wide[0].isnan() & wide[1].isnan())
    count = int(different.sum())
    if count:
        at = tuple(different.nonzero()[0].tolist())
        got, want = bits(actual)[at].item(), bits(expected)[at].item()
        raise AssertionError(
            f"{count} of {different.numel()} elements differ, first at {at}: bits {got:#x} "
            f"({actual.detach().cpu()[at].double().item()!r}), expected {want:#x} "
            f"({expected.detach().cpu()[at].double().item()!r})"
        )


def assert_repeats(run, times=3):
    """run() gives new tensors; they have the same bits whichever thread comes first."""
    first = list(run())
    for _ in range(times - 1):
        for again, expected in zip(run(), first, strict=True):
            assert_bits(again, expected)


def assert_within(actual, exact, terms, depth=1):
    """Every element within its margin: the error of its fp32 terms, and its own rounding.

    Parameters
    ----------
    actual : Tensor
        What was computed, in f32, f16 or bf16.
    exact, terms : Tensor
        float64: the exact values, and the sums of the magnitudes of the terms that make each.
    depth : int
        Terms of the longest sum among them.
    """
    dtype = actual.dtype
    actual, exact, terms = (t.detach().cpu().double() for t in (actual, exact, terms))
    assert actual.shape == exact.shape, f"{actual.shape}, expected {exact.shape}"
    assert all_finite(exact) and all_finite(terms), "the exact values are not finite"
    margin = tol("terms", F32, depth) * terms
    if dtype != F32:  # f32 is rounded among the terms
        largest = (exact.abs() + margin).clamp(min=torch.finfo(dtype).smallest_normal)
        margin = margin + largest * EPS[dtype] / 2
    error = (actual - exact).abs()
    beyond = ~(error <= margin)
    if beyond.numpy().any():
        at = tuple(beyond.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(beyond.sum())} of {beyond.numel()} elements are off by more than their margin, "
            f"first at {at}: {actual[at].item()!r}, expected {exact[at].item()!r} within "
            f"{margin[at].item():.3e}"
        )


def assert_cast_within(actual, exact, scale, terms, depth=1):
    """FP8 of numbers that are known up to a margin: each code is that of a number within it.

    The cast is monotonic, so a value between exact - margin and exact + margin has a code between
    theirs: almost always one code, two neighbours where the margin holds a boundary of rounding.
    The product with the scale is rounded to fp32 first: another eps of the exact value.

    Parameters
    ----------
    actual : Tensor
        FP8.
    exact, terms : Tensor
        As in `assert_within`, before the scale.
    scale : float
        The scale of the cast.
    depth : int
        As in `assert_within`.
    """
    exact, terms = (t.detach().cpu().double() for t in (exact, terms))
    margin = tol("terms", F32, depth) * terms + exact.abs() * EPS[F32]
    sides = [((exact + sign * margin) * scale).numpy() for sign in (-1, 1)]
    low, high = (_order(encode(side.astype("float32"), actual.dtype)) for side in sides)
    found = _order(bits(actual).numpy())
    assert found.shape == low.shape, f"{found.shape}, expected {low.shape}"
    beyond = (found < low) | (found > high)
    assert not beyond.any(), (
        f"{int(beyond.sum())} of {beyond.size} codes are those of no number within the margin, "
        f"first at {tuple(int(i[0]) for i in beyond.nonzero())}"
    )


def _order(codes):
    """FP8 codes as integers in the order of their values; both zeros are 0."""
    codes = codes.astype("int16")
    return (codes & 0x7F) * (1 - 2 * (codes >> 7))


def nmse(actual, exact, terms=None):
    """Sum of squared errors over the sum of squares of `exact`, or of its `terms`, in float64."""
    actual, exact = (t.detach().cpu().double() for t in (actual, exact))
    assert actual.shape == exact.shape, f"{actual.shape}, expected {exact.shape}"
    assert all_finite(exact), "the exact values are not finite"
    squares = (exact if terms is None else terms).square().sum()
    errors = (actual - exact).square().sum()
    return (errors / squares).item() if squares > 0 else errors.item()


def assert_nmse(actual, exact, bound, what="", terms=None):
    """Normalised mean squared error of at most `bound`, a sum of `tols.tol`.

    `terms`: sums of the magnitudes of the terms of `exact`, where these cancel.
    """
    error = nmse(actual, exact, terms)
    assert error <= bound, f"{what} normalised error {error:.3e} exceeds {bound:.3e}"


def assert_ref_ratio(actual, naive, exact, dtype, terms=None):
    """Largest error at most twice that of a naive computation in `dtype`, plus its floor.

    `terms`: sums of the magnitudes of the terms of `exact`, where few elements are sums of many
    that cancel: what is rounded is the terms, and of few errors the naive ones may all be small.
    """
    actual, naive, exact = (t.detach().cpu().double() for t in (actual, naive, exact))
    assert actual.shape == naive.shape == exact.shape
    floor = tol("ratio_floor", dtype) * (exact if terms is None else terms).abs().max()
    error, allowed = (actual - exact).abs().max(), 2 * (naive - exact).abs().max() + floor
    assert error <= allowed, f"error {error:.3e} exceeds 2 x naive + floor = {allowed:.3e}"


def assert_grad64(grads, definition, inputs, grad_output, bound, terms=None):
    """Gradients against torch's float64 autograd of the definition.

    Parameters
    ----------
    grads : dict
        The gradients to check, by name of the input.
    definition : callable
        Takes `inputs` by name, as float64 tensors, and returns the output.
    inputs : dict
        Tensors by name.
    grad_output : Tensor
        Gradient of the output.
    bound : float
        Normalised error allowed for each gradient, a sum of `tols.tol`.
    terms : dict, optional
        Sums of the magnitudes of the terms of gradients that cancel, by name.
    """
    wide = {n: t.detach().cpu().double().requires_grad_(n in grads) for n, t in inputs.items()}
    output = definition(**wide)
    wanted = [wide[name] for name in grads]
    exact = torch.autograd.grad(output, wanted, grad_output.detach().cpu().double())
    for name, expected in zip(grads, exact, strict=True):
        error = nmse(grads[name], expected, (terms or {}).get(name))
        assert error <= bound, f"gradient of {name}: error {error:.3e} exceeds {bound:.3e}"
