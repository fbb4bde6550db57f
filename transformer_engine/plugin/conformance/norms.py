# SPDX-License-Identifier: Apache-2.0
"""Cases of norms and their gradients."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import (
    Case,
    Draw,
    counted,
    gradients,
    name_of,
    near,
)
from transformer_engine.plugin.conformance.casts import coded, quantizers_of_values

_SHAPES = ((5, 40), (1, 16), (3, 7, 40), (33, 129), (64, 1024), (0, 16), (16,), (2, 0, 16))


def exact_norm(
    x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, centred: bool, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rsigma), in float64."""
    mean = x.mean(-1, keepdim=True)
    values = x - mean if centred else x
    rsigma = (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = values * rsigma * (gamma + 1 if zero_centered else gamma)
    return (y if beta is None else y + beta), mean.flatten(), rsigma.flatten()


def _settings(draw: Draw) -> Iterator[tuple[str, tuple, torch.dtype, bool, float]]:
    for dtype in draw.dtypes:
        for shape in _SHAPES:
            zero_centered = sum(shape) % 2 == 0
            name = f"{name_of(dtype)} {list(shape)}{' zero-centered' * zero_centered}"
            yield name, shape, dtype, zero_centered, 1e-5
        yield f"{name_of(dtype)} large eps", (6, 48), dtype, False, 0.5


def _mixed(draw: Draw) -> Iterator[tuple[str, tuple[torch.dtype, torch.dtype, torch.dtype]]]:
    """Dtypes of input, factors and output that are not one, with a name.

    The output has that of the factors, as modules ask for it, or of the input.
    """
    for of_input, of_factors in itertools.permutations(draw.dtypes, 2):
        for of_output in (of_factors, of_input):
            name = f"{name_of(of_input)} by {name_of(of_factors)} to {name_of(of_output)}"
            yield name, (of_input, of_factors, of_output)


def _forward(op: str, draw: Draw) -> Iterator[Case]:
    centred = op == "layernorm_fwd"

    def case(
        name: str,
        x: Tensor,
        vectors: tuple[Tensor, Tensor | None],
        eps: float,
        zero_centered: bool,
        otype: torch.dtype,
        out: Tensor | None = None,
        quantizer: Any = None,
    ) -> Case:
        wide = [None if t is None else t.double() for t in (x, *vectors)]
        y, mean, rsigma = exact_norm(*wide, eps, centred, zero_centered)
        depth = x.shape[-1]
        given = (x, *vectors) if centred else (x, vectors[0])
        terms = wide[0] * rsigma.view(*x.shape[:-1], 1) if centred else None

        def wanted(found: tuple) -> list:
            made, *statistics = counted(found, 3)
            if quantizer is None or type(made) is Tensor:  # who asked may cast it
                results = [near("y", made, y, otype, depth, terms=terms)]
            else:
                results = [coded("y", made, quantizer, y)]
            if centred:
                # A sum may cancel: its rounding goes by what is added up.
                results.append(near("mu", statistics[0], mean, torch.float32, depth, terms=wide[0]))
            results.append(near("rsigma", statistics[1], rsigma, torch.float32, depth))
            if out is not None:
                results.append(near("ln_out", out, y, otype, depth, terms=terms))
            return results

        args = (*given, eps, out, quantizer, otype, 0, zero_centered)
        return Case(name, args, wanted, written=() if out is None else (out,))

    def vectors(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        gamma, beta = (draw.normal((count,), dtype) for _ in range(2))
        return gamma, beta if centred else None

    for name, shape, dtype, zero_centered, eps in _settings(draw):
        x = draw.normal(shape, dtype)
        yield case(name, x, vectors(shape[-1], dtype), eps, zero_centered, dtype)
    for name, (dtype, of_factors, otype) in _mixed(draw):
        both = vectors(40, of_factors)
        yield case(name, draw.normal((5, 40), dtype), both, 1e-5, False, otype)
    for dtype in draw.dtypes:
        x, both, what = draw.normal((4, 32), dtype), vectors(32, dtype), name_of(dtype)
        yield case(f"{what} to float32", x, both, 1e-5, False, torch.float32)
        out = draw.place(x.shape, dtype)
        yield case(f"{what} into ln_out", x, both, 1e-5, False, dtype, out)
        yield case(f"{what} strided", draw.strided(x), both, 1e-5, False, dtype)
        yield case(f"{what} zeros", torch.zeros_like(x), both, 1e-5, False, dtype)
        bad = x.clone()
        bad[1, 3] = math.nan
        yield case(f"{what} NaN in a row", bad, both, 1e-5, False, dtype)
        for kind, quantizer in quantizers_of_values(draw.device).items():
            given = vectors(64, dtype), 1e-5, True, torch.float32, None, quantizer
            yield case(f"{what} cast, {kind}", draw.normal((32, 64), dtype), *given)
        if centred:
            yield case(f"{what} without bias", x, (both[0], None), 1e-5, True, dtype)
            far = (draw.normal((4, 64), torch.float32) + 1e3).to(dtype)
            yield case(f"{what} far from 0", far, vectors(64, dtype), 1e-5, False, dtype)


def _backward(op: str, draw: Draw) -> Iterator[Case]:
    centred, adds = op == "layernorm_bwd", op == "rmsnorm_bwd_add"
    settings = [
        (name, shape, (dtype,) * 3, zero_centered, eps)
        for name, shape, dtype, zero_centered, eps in _settings(draw)
    ]
    settings += [(name, (5, 40), dtypes, False, 1e-5) for name, dtypes in _mixed(draw)]
    for name, shape, dtypes, zero_centered, eps in settings:
        dtype, of_factors, of_output = dtypes
        x, dy, other = (draw.normal(shape, each) for each in (dtype, of_output, dtype))
        gamma, beta = (draw.normal(shape[-1:], of_factors) for _ in range(2))
        inputs = (x, gamma, beta) if centred else (x, gamma)
        _, mean, rsigma = exact_norm(x.double(), gamma.double(), None, eps, centred, zero_centered)

        def function(
            x: Tensor,
            g: Tensor,
            b: Tensor | None = None,
            eps: float = eps,
            zero: bool = zero_centered,
        ) -> Tensor:
            return exact_norm(x, g, b, eps, centred, zero)[0]

        exact = list(gradients(function, dy, *inputs))
        if adds:
            exact[0] = exact[0] + other.double()
        statistics = (mean.float(), rsigma.float()) if centred else (rsigma.float(),)
        args = (dy, x, *((other,) if adds else ()), *statistics, gamma, 0, zero_centered)
        # Statistics are rounded to fp32, gradients of factors are sums over rows.
        depth = max(shape[-1], x.numel() // shape[-1], 1)

        def wanted(
            found: tuple, exact: list = exact, dtypes: tuple = dtypes, depth: int = depth
        ) -> list:
            kinds = (("dx", dtypes[0]), ("dgamma", dtypes[1]), ("dbeta", dtypes[1]))[: len(exact)]
            each = zip(kinds, counted(found, len(exact)), exact, strict=True)
            return [near(name, got, one, dtype, depth) for (name, dtype), got, one in each]

        yield Case(name, args, wanted)


CASES = {
    "layernorm_fwd": _forward,
    "rmsnorm_fwd": _forward,
    "layernorm_bwd": _backward,
    "rmsnorm_bwd": _backward,
    "rmsnorm_bwd_add": _backward,
}
