# SPDX-License-Identifier: Apache-2.0
"""Modules beside others of the same parameters and without options, and steps for some gradients.

Shared by the tests of gradients, of delayed weight gradients and of cached weights.
"""

import torch
from comparators import assert_nmse
from pytorch.helpers import counted
from pytorch.module_cases import (
    IN,
    ROWS,
    copy_values,
    count_of,
    make,
    outputs_of,
    region,
    step,
    weights_of,
    whole,
)
from tols import tol

import transformer_engine.pytorch as te


class Pair:
    """Two modules with the same parameters, one with options, and data that both are given.

    Attributes
    ----------
    plain, module : Module
        Without options and whole; with them, and split where the kind says so.
    weights : dict
        Names to the weights of `module`.
    """

    def __init__(self, kind, device, dtype=torch.float32, **options):
        self.plain = make(kind.removesuffix(" split"), device, dtype)
        self.module = make(kind, device, dtype, **options)
        copy_values(self.plain, self.module)
        self.weights = weights_of(self.module)
        self.device, self.dtype = device, dtype

    def batch(self):
        """Input and gradient of the output."""
        sizes = (IN, outputs_of(self.plain))
        return [torch.randn(ROWS, n, device=self.device, dtype=self.dtype) for n in sizes]

    def main_grads(self, make, dtype=torch.float32):
        """Give every weight a ``make(shape, device=, dtype=)`` as main_grad."""
        for weight in self.weights.values():
            weight.main_grad = make(weight.shape, device=self.device, dtype=dtype)

    def step(self, module, recipe, data, **call):
        """Output, gradient of the input, and those of norms and biases; split ones are joined."""
        out, dx, _ = step(module, data[0], recipe, data[1], **call)
        vectors = [n for n, p in self.plain.named_parameters() if p.dim() == 1]
        return out, dx, {n: whole(module, n, lambda p: p.grad) for n in vectors}


def assert_added(found, before, gradient, main_dtype, rounded):
    """`found` is before + gradient, in the precision of main_grad."""
    exact = before.double().cpu() + gradient.double().cpu()
    # The reference gradient was rounded to the weight's dtype, the one in main_grad was not.
    bound = tol("round", main_dtype) + tol("round", rounded) + tol("sum", torch.float32, ROWS)
    assert_nmse(found, exact, bound)


def run_with(module, needs, recipe, data, steps=2):
    """Steps with gradients of `needs` only: (outputs and gradients by name, counts)."""
    te.reset()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in needs)
    trace, counts = [], []
    for _ in range(steps):  # the second one goes the short way
        module.zero_grad()
        x = data[0].clone().requires_grad_("x" in needs)
        with counted() as gemms:
            with region(recipe):
                outputs = module(x)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            wanted = [(o, g) for o, g in zip(outputs, data[1:], strict=True) if o.requires_grad]
            if wanted:
                torch.autograd.backward(*zip(*wanted, strict=True))
        counts.append(count_of(gemms, recipe))
        found = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
        found |= {"x": x.grad} | {n: p.grad for n, p in module.named_parameters()}
        trace.append(found)
    return trace, counts, [o.requires_grad for o in outputs]
