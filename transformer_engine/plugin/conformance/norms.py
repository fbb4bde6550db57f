# SPDX-License-Identifier: Apache-2.0
"""Cases of norms and their gradients."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, gradients, name_of, near

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


def _forward(op: str, draw: Draw) -> Iterator[Case]:
    centred = op == "layernorm_fwd"

    def case(
        name: str,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor | None,
        eps: float,
        zero_centered: bool,
        otype: torch.dtype,
        out: Tensor | None = None,
    ) -> Case:
        wide = [None if t is None else t.double() for t in (x, gamma, beta)]
        y, mean, rsigma = exact_norm(*wide, eps, centred, zero_centered)
        depth = x.shape[-1]
        given = (x, gamma, beta) if centred else (x, gamma)

        def wanted(found: tuple) -> list:
            results = [near("y", found[0], y, otype, depth)]
            if centred:
                results.append(near("mu", found[1], mean, torch.float32, depth))
            results.append(near("rsigma", found[2], rsigma, torch.float32, depth))
            if out is not None:
                results.append(near("ln_out", out, y, otype, depth))
            return results

        args = (*given, eps, out, None, otype, 0, zero_centered)
        return Case(name, args, wanted, written=() if out is None else (out,))

    for name, shape, dtype, zero_centered, eps in _settings(draw):
        x = draw.normal(shape, dtype)
        gamma, beta = (draw.normal(shape[-1:], dtype) for _ in range(2))
        beta = beta if centred else None
        yield case(name, x, gamma, beta, eps, zero_centered, dtype)
    for dtype in draw.dtypes:
        x, gamma, beta = (draw.normal(s, dtype) for s in ((4, 32), (32,), (32,)))
        beta = beta if centred else None
        what = name_of(dtype)
        yield case(f"{what} to float32", x, gamma, beta, 1e-5, False, torch.float32)
        out = torch.empty_like(x)
        yield case(f"{what} into ln_out", x, gamma, beta, 1e-5, False, dtype, out)
        yield case(f"{what} strided", draw.strided(x), gamma, beta, 1e-5, False, dtype)
        yield case(f"{what} zeros", torch.zeros_like(x), gamma, beta, 1e-5, False, dtype)
        bad = x.clone()
        bad[1, 3] = math.nan
        yield case(f"{what} NaN in a row", bad, gamma, beta, 1e-5, False, dtype)
        if centred:
            yield case(f"{what} without bias", x, gamma, None, 1e-5, True, dtype)


def _backward(op: str, draw: Draw) -> Iterator[Case]:
    centred, adds = op == "layernorm_bwd", op == "rmsnorm_bwd_add"
    for name, shape, dtype, zero_centered, eps in _settings(draw):
        x, dy, other = (draw.normal(shape, dtype) for _ in range(3))
        gamma, beta = (draw.normal(shape[-1:], dtype) for _ in range(2))
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
            found: tuple, exact: list = exact, dtype: torch.dtype = dtype, depth: int = depth
        ) -> list:
            names = ("dx", "dgamma", "dbeta")
            pairs = zip(names, found, exact, strict=False)
            return [near(name, got, one, dtype, depth) for name, got, one in pairs]

        yield Case(name, args, wanted)


CASES = {
    "layernorm_fwd": _forward,
    "rmsnorm_fwd": _forward,
    "layernorm_bwd": _backward,
    "rmsnorm_bwd": _backward,
    "rmsnorm_bwd_add": _backward,
}
