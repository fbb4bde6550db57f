# SPDX-License-Identifier: Apache-2.0
"""The comparators, in order of preference: bits, ratio to a naive error, NMSE, float64 autograd.

Bounds are those of `tols.tol`. All take tensors of any device and compare on the CPU.
"""

import torch
from tols import tol

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    """Element bits of a tensor as integers, on the CPU."""
    plain = tensor.detach().cpu().contiguous()
    return plain.view(_INTEGERS[plain.element_size()])


def assert_bits(actual, expected, *, any_nan=False):
    """Same shape, dtype and bits. any_nan: a NaN equals every other NaN."""
    assert actual.dtype == expected.dtype, f"{actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{actual.shape}, expected {expected.shape}"
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


def nmse(actual, exact):
    """Sum of squared errors over the sum of squares of `exact`, in float64."""
    actual, exact = (t.detach().cpu().double() for t in (actual, exact))
    assert actual.shape == exact.shape, f"{actual.shape}, expected {exact.shape}"
    assert exact.isfinite().all(), "the exact values are not finite"
    squares = exact.square().sum()
    errors = (actual - exact).square().sum()
    return (errors / squares).item() if squares > 0 else errors.item()


def assert_nmse(actual, exact, bound):
    """Normalised mean squared error of at most `bound`, a sum of `tols.tol`."""
    error = nmse(actual, exact)
    assert error <= bound, f"normalised error {error:.3e} exceeds {bound:.3e}"


def assert_ref_ratio(actual, naive, exact, dtype):
    """Largest error at most twice that of a naive computation in `dtype`, plus its floor."""
    actual, naive, exact = (t.detach().cpu().double() for t in (actual, naive, exact))
    assert actual.shape == naive.shape == exact.shape
    floor = tol("ratio_floor", dtype) * exact.abs().max()
    error, allowed = (actual - exact).abs().max(), 2 * (naive - exact).abs().max() + floor
    assert error <= allowed, f"error {error:.3e} exceeds 2 x naive + floor = {allowed:.3e}"


def assert_grad64(grads, definition, inputs, grad_output, bound):
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
    """
    wide = {n: t.detach().cpu().double().requires_grad_(n in grads) for n, t in inputs.items()}
    output = definition(**wide)
    wanted = [wide[name] for name in grads]
    exact = torch.autograd.grad(output, wanted, grad_output.detach().cpu().double())
    for name, expected in zip(grads, exact, strict=True):
        error = nmse(grads[name], expected)
        assert error <= bound, f"gradient of {name}: error {error:.3e} exceeds {bound:.3e}"
