# SPDX-License-Identifier: Apache-2.0
"""Functions of a program between the modules that it composes: one plan, the bits of modules."""

import copy

import pytest
import torch
from pytorch.helpers import assert_same_bits, same_draws
from pytorch.planned_modules import (
    BATCH,
    HEADS,
    HIDDEN,
    TOKENS,
    Linears,
    assert_one_plan,
    calls_of,
    hooked,
    planned_dtype,
    step,
)

import transformer_engine.pytorch as te


@pytest.mark.parametrize("unused", [False, True])
def test_functions_in_the_middle(device, unused):
    """Of one to four values, some of which need no gradient or get none, to another width."""

    class Several(te.PlannedModule):
        def __init__(self, count):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                te.Linear(HIDDEN, 16, device=device) for _ in range(count)
            )
            self.last = te.Linear(24, HIDDEN, device=device)

        def emit(self, nodes, x):
            parts = [nodes.run(layer, x) for layer in self.layers]
            return nodes.run(self.last, nodes.function(mixed, *parts))

    def mixed(*parts):
        total = sum(part.sin() * (i + 1) for i, part in enumerate(parts[unused:]))
        return torch.cat([total, total[:, :8].cos()], 1)

    for count in range(1 + unused, 5):
        module = Several(count)
        if count > 2:
            module.layers[1].weight.requires_grad_(False)
            module.layers[1].bias.requires_grad_(False)
        x = torch.randn(TOKENS, HIDDEN, device=device)
        twin = hooked(module)
        for given in (x, x.clone().requires_grad_()):
            results = []
            for own in (module, twin):
                out = own(given)
                out.square().sum().backward()
                grads = [p.grad for p in own.parameters()]
                results.append([out.detach(), given.grad, *grads])
                own.zero_grad()
                given.grad = None
            if unused:  # a plan gives zeros where autograd has nothing
                zeros = [
                    [torch.zeros(()) if t is None or not t.any() else t for t in found]
                    for found in results
                ]
                results = zeros
            assert_same_bits(*results)
        assert_one_plan(module)


class Joined(te.PlannedModule):
    """What reads the input is no linear layer; a sum of values of one width, or of two."""

    def __init__(self, first, width, **options):
        super().__init__()
        self.first, given = first, HIDDEN // 2 if first == "function" else HIDDEN
        self.norm = te.RMSNorm(HIDDEN, **options)
        self.attention = te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, **options)
        self.wide = te.Linear(HIDDEN, width, **options)
        self.skip = te.Linear(given, width if first == "function" else 1, **options)

    def emit(self, nodes, x):
        y = nodes.function(doubled, x) if self.first == "function" else x
        y = nodes.run(self.attention, x) if self.first == "attention" else y
        return nodes.add(nodes.run(self.wide, nodes.run(self.norm, y)), nodes.run(self.skip, x))


def doubled(x):
    return torch.cat([x, x.sin()], 1)


@pytest.mark.parametrize("first", ["function", "norm", "attention"])
def test_any_module_may_come_first(device, first):
    """The width of the input is that of its readers, not of the first linear layer."""
    dtype = planned_dtype(device)
    for width in (1, 24):
        module = Joined(first, width, params_dtype=dtype, device=device)
        columns, dims = module.skip.in_features, (TOKENS, BATCH)
        given = [torch.randn(*dims, columns, device=device, dtype=dtype) for _ in range(2)]
        twin = hooked(module)
        results = [[step(own, (x,)) for x in given] for own in (module, twin)]
        assert_same_bits(*results)
        if width == 1 or first == "function":
            assert_one_plan(module)
        else:  # one term of the sum is spread over the other
            assert not any(calls_of(module))
        with pytest.raises(ValueError, match="expected"):
            module(torch.randn(*dims, columns + 1, device=device, dtype=dtype))
        assert_same_bits(step(module, (given[0],)), results[1][0])


@pytest.mark.parametrize("what", ["parameter", "tensor", "random", "buffer"])
def test_what_functions_read(device, what):
    """A plan holds what is the same in all calls; else modules are called, with right numbers."""

    class Reading(Linears):
        def __init__(self):
            super().__init__(1, device=device)
            self.gain = torch.nn.Parameter(torch.tensor(2.0, device=device))
            self.register_buffer("fixed", torch.randn(HIDDEN, device=device))

        def emit(self, nodes, x, given):
            functions = {
                "parameter": lambda a: a * self.gain,
                "tensor": lambda a: a * given,
                "random": lambda a: torch.nn.functional.dropout(a, 0.5),
                "buffer": lambda a: a * self.fixed,
            }
            return nodes.function(functions[what], nodes.run(self.layers[0], x))

    module, results = Reading(), []
    twin = copy.deepcopy(module)
    given = [torch.randn(HIDDEN, device=device) for _ in range(3)]
    xs = [torch.randn(TOKENS, HIDDEN, device=device) for _ in range(3)]
    with same_draws(device):
        for x, tensor in zip(xs, given, strict=True):
            out = module(x, tensor)
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad for p in module.parameters())])
            module.zero_grad()
    with same_draws(device):
        for x, tensor, found in zip(xs, given, results, strict=True):
            out = twin.layers[0](x)
            other = {"parameter": twin.gain, "tensor": tensor, "buffer": twin.fixed}.get(what)
            out = torch.nn.functional.dropout(out, 0.5) if other is None else out * other
            out.square().sum().backward()
            assert_same_bits(found, [out.detach(), *(p.grad for p in twin.parameters())])
            twin.zero_grad()
    assert (what == "buffer") == any(calls_of(module))


def test_a_function_that_fails(device):
    class Failing(Linears):
        def emit(self, nodes, x):
            return nodes.function(fails, nodes.run(self.layers[0], x))

    def fails(x):
        if x.isnan().any():
            raise ArithmeticError("not a number")
        return x * 2

    module, x = Failing(1, device=device), torch.randn(3, HIDDEN, device=device)
    expected = module.layers[0](x) * 2
    assert_same_bits(module(x), expected)
    with pytest.raises(ArithmeticError, match="not a number"):
        module(x * torch.nan)
    assert_same_bits(module(x), expected)
    assert_one_plan(module)
