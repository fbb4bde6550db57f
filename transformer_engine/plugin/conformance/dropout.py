# SPDX-License-Identifier: Apache-2.0
"""Cases of dropout: what is kept, how much of it, and the gradient by the same mask."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import (
    Case,
    Draw,
    Exact,
    Result,
    Wanted,
    name_of,
    near,
)

_P = 0.3


def share(kept: Tensor, p: float) -> Wanted:
    """Of n independent decisions, within six standard deviations."""
    found = kept.double().mean().view(1)
    exact = torch.full((1,), 1 - p, dtype=torch.float64)
    bound = (3 / math.sqrt(kept.numel()) / (1 - p)) ** 2
    return Wanted("the share that is kept", found, exact, torch.float64, bound)


def _pairs(kept: Tensor, p: float) -> Iterator[Wanted]:
    """Neighbours that are both kept, along each dim, within nine standard deviations.

    Those of independent pairs: pairs that share an element depend on each other a little.
    """
    for dim, size in enumerate(kept.shape):
        if kept.numel() // size * (size - 1) < 1024:
            continue
        both = kept.narrow(dim, 0, size - 1) & kept.narrow(dim, 1, size - 1)
        found = both.double().mean().view(1)
        exact = torch.full((1,), (1 - p) ** 2, dtype=torch.float64)
        bound = (4.5 / math.sqrt(both.numel()) / (1 - p) ** 2) ** 2
        yield Wanted(
            f"neighbours that are both kept, dim {dim}", found, exact, torch.float64, bound
        )


@Case.of("dropout_fwd")
def _forward(draw: Draw) -> Iterator[Case]:
    for dtype in draw.dtypes:
        for shape in ((64, 96), (3, 5, 256), (16,)):
            x = draw.normal(shape, dtype)
            x[x == 0] = 1

            def wanted(found: tuple, x: Tensor = x) -> list:
                kept = found[0] != 0
                exact = x.double() * kept / (1 - _P)
                results = [near("the result", found[0], exact, x.dtype), share(kept, _P)]
                return [*results, *_pairs(kept, _P)]

            yield Case(f"{name_of(dtype)} {list(shape)}", (x, _P), wanted)

        nothing = draw.normal((2, 0, 16), dtype)
        yield _certain(f"{name_of(dtype)} nothing dropped", x, 0.0, x)
        yield _certain(f"{name_of(dtype)} all dropped", x, 1.0, torch.zeros_like(x))
        yield _certain(f"{name_of(dtype)} no elements", nothing, _P, nothing)


def _certain(name: str, x: Tensor, p: float, exact: Tensor) -> Case:
    """Where no random number matters."""
    wanted = (Result("the result", x.dtype), None)
    return Case(name, (x, p), wanted, exact=Exact((exact.double(), None)))


@Case.of("dropout_bwd")
def _backward(op: str, draw: Draw) -> Iterator[Case]:
    """By the mask of the forward, which its result for ones shows."""
    if draw.forward is None:
        raise ValueError(f"check: forward: {op} reads the mask of a dropout_fwd: which is it?")
    for dtype in draw.dtypes:
        for shape in ((64, 96), (3, 5, 256), (17,), (0, 16)):
            for p in (0.0, _P, 1.0):
                grad = draw.normal(shape, dtype)
                out, mask = draw.forward(torch.ones_like(grad), p)
                kept = (out != 0).double()
                exact = grad.double() * kept / (1 - p if p < 1 else 1)
                into = draw.place(shape, dtype) if p == _P else None
                left = [] if into is None else [(into, Result("grad_input", dtype))]
                values = Exact(exact, [exact] * len(left))
                name = f"{name_of(dtype)} {list(shape)} p={p}"
                wanted = (Result("the gradient", dtype),)
                yield Case(name, (grad, mask, p, into), wanted, left=left, exact=values)
