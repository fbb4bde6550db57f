# SPDX-License-Identifier: Apache-2.0
"""Cases of norms and their gradients."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Result, name_of
from transformer_engine.plugin.conformance.casts import quantizers_of_values
from transformer_engine.plugin.conformance.definition import definition

_SHAPES = ((5, 40), (1, 16), (3, 7, 40), (33, 129), (64, 1024), (0, 16), (16,), (2, 0, 16))


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


@Case.of("layernorm_fwd", "rmsnorm_fwd")
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
        wide, depth = x.double(), x.shape[-1]
        # A mean may cancel, and what is less it: their rounding goes by what is added up.
        centre = wide - wide.mean(-1, keepdim=True)
        terms = wide * (centre.square().mean(-1, keepdim=True) + eps).rsqrt() if centred else None
        y = Result("y", otype, depth, terms=terms, quantizer=quantizer)  # who asked may cast it
        mu = Result("mu", torch.float32, depth, terms=wide) if centred else None
        given = (x, *vectors) if centred else (x, vectors[0])
        args = (*given, eps, out, quantizer, otype, 0, zero_centered)
        left = () if out is None else ((out, y._replace(name="ln_out")),)
        return Case(name, args, (y, mu, Result("rsigma", torch.float32, depth)), left=left)

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


@Case.of("layernorm_bwd", "rmsnorm_bwd", "rmsnorm_bwd_add")
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
        gamma = draw.normal(shape[-1:], of_factors)
        given = (x.double(), gamma.double(), *((None,) if centred else ()), eps, None, None)
        forward = definition("layernorm_fwd" if centred else "rmsnorm_fwd")
        _, *statistics = forward(*given, torch.float64, 0, zero_centered)
        statistics = [each.float() for each in statistics if each is not None]
        args = (dy, x, *((other,) if adds else ()), *statistics, gamma, 0, zero_centered)
        # Statistics are rounded to fp32, gradients of factors are sums over rows.
        depth = max(shape[-1], x.numel() // shape[-1], 1)
        wanted = [Result("dx", dtype, depth), Result("dgamma", of_factors, depth)]
        wanted += [Result("dbeta", of_factors, depth)] * centred
        yield Case(name, args, tuple(wanted))
