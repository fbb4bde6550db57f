# SPDX-License-Identifier: Apache-2.0
"""Cases of softmax with masks, and its gradients."""

from collections.abc import Iterator

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, name_of, near

_KINDS = ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked")
_SCALE = 0.7


def _shapes(kind: str) -> tuple[tuple[int, ...], ...]:
    if "triang" in kind:
        return (6, 9, 9), (2, 64, 64), (1, 1, 1)
    return (2, 3, 9, 17), (1, 2, 64, 64), (2, 1, 1, 130)


def _masked(kind: str, shape: tuple, draw: Draw) -> Tensor:
    """What is not attended to, of a shape that goes with that of the scores."""
    queries, keys = shape[-2:]
    if kind == "scaled":
        return torch.zeros(queries, keys, dtype=torch.bool, device=draw.device)
    if kind != "scaled_masked":
        every = torch.ones(queries, keys, dtype=torch.bool, device=draw.device)
        return every.triu(1 + keys - queries)
    mask = draw.uniform((shape[0], 1, queries, keys)) < 0.4
    mask[0, 0, queries // 2] = True  # a query that attends nothing
    return mask


def _forward(op: str, draw: Draw) -> Iterator[Case]:
    kind = op.removesuffix("_softmax_forward")
    for dtype in draw.dtypes:
        for shape in _shapes(kind):
            x, mask = draw.normal(shape, dtype, 3.0), _masked(kind, shape, draw)
            p = (x.double() * _SCALE).masked_fill(mask, -torch.inf).softmax(-1)
            exact = torch.where(mask.expand_as(p), 0.0, p)
            given = (mask.to(torch.uint8),) if kind == "scaled_masked" else ()

            def wanted(found: Tensor, exact: Tensor = exact, dtype: torch.dtype = dtype) -> list:
                return [near("the result", found, exact, dtype, exact.shape[-1])]

            yield Case(f"{name_of(dtype)} {list(shape)}", (x, *given, _SCALE), wanted)
        # Numbers whose exponentials are no numbers, and whose differences are exact.
        shape = _shapes(kind)[0]
        x, mask = (draw.normal(shape, dtype, 2.0) + 300).round(), _masked(kind, shape, draw)
        p = x.double().masked_fill(mask, -torch.inf).softmax(-1)
        exact = torch.where(mask.expand_as(p), 0.0, p)
        given = (mask.to(torch.uint8),) if kind == "scaled_masked" else ()

        def large(found: Tensor, exact: Tensor = exact, dtype: torch.dtype = dtype) -> list:
            return [near("the result", found, exact, dtype, exact.shape[-1])]

        yield Case(f"{name_of(dtype)} large", (x, *given, 1.0), large)


def _backward(op: str, draw: Draw) -> Iterator[Case]:
    kind = op.removesuffix("_softmax_backward")
    for dtype in draw.dtypes:
        for shape in _shapes(kind):
            mask, grad = _masked(kind, shape, draw), draw.normal(shape, dtype)
            scores = draw.normal(shape, torch.float64).masked_fill(mask, -torch.inf)
            out = torch.nan_to_num(scores.softmax(-1)).to(dtype)
            p, dp = out.double(), grad.double()
            exact = _SCALE * p * (dp - (dp * p).sum(-1, keepdim=True))
            made = {"exact": exact, "dtype": dtype, "depth": exact.shape[-1]}
            made["terms"] = _SCALE * p * dp  # where there is one key they cancel

            def wanted(found: Tensor, made: dict = made) -> list:
                return [near("the gradient", found, **made)]

            yield Case(f"{name_of(dtype)} {list(shape)}", (grad, out, _SCALE), wanted)


CASES = {f"{kind}_softmax_forward": _forward for kind in _KINDS}
CASES |= {f"{kind}_softmax_backward": _backward for kind in _KINDS}
