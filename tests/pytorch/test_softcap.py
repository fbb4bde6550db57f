# SPDX-License-Identifier: Apache-2.0
"""`attention.softcap`: values, gradients, torch.compile and torch.func."""

import pytest
import torch
from buffers import normal
from comparators import assert_bits, assert_within
from tols import BF16, F16, F32

from transformer_engine.pytorch.attention import softcap

CAP = 2.5


def gradient(inp, grad):
    """Of float64 tensors, and its terms: the slope is known as well as 1 - tanh^2 can be."""
    u = inp.detach().double() / CAP
    exact = grad.double() / torch.cosh(u) ** 2
    return exact, exact.abs() * (2 + 2 * u.abs())


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_values_and_gradients(device, dtype, turned, rng):
    inp = normal(rng, (3, 5, 7), dtype, scale=2 * CAP).to(device)
    inp = (inp.transpose(0, 2) if turned else inp).requires_grad_()
    output = softcap(inp, CAP)
    exact = CAP * torch.tanh(inp.detach().double() / CAP)
    assert_within(output, exact, exact.abs())
    grad = normal(rng, output.shape, dtype).to(device)
    (found,) = torch.autograd.grad(output, inp, grad)
    assert_within(found, *gradient(inp, grad))
    assert output.dtype == found.dtype == dtype and output.is_contiguous()


def test_a_gradient_of_one_number(device, rng):
    inp = normal(rng, (3, 7), F32).to(device).requires_grad_()
    (found,) = torch.autograd.grad(softcap(inp, CAP).sum(), inp)
    assert_within(found, *gradient(inp, torch.ones_like(inp)))


def test_compiled_and_functional_give_the_same_bits(device, rng):
    inp = normal(rng, (4, 6), F32).to(device)

    def loss(inp):
        return softcap(inp, CAP).square().sum()

    leaf = inp.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    assert_bits(torch.autograd.grad(compiled(leaf), leaf)[0], expected)
    assert_bits(torch.func.grad(loss)(inp), expected)


def test_errors(device):
    for cap in (0.0, -1.0):
        with pytest.raises(ValueError, match="cap"):
            softcap(torch.ones(2, 3, device=device), cap)
    with pytest.raises(TypeError, match="float64"):
        softcap(torch.ones(2, 3, device=device, dtype=torch.float64), 1.0)
