# SPDX-License-Identifier: Apache-2.0
"""Cases of softmax with masks, and its gradients."""

from collections.abc import Iterator

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Result, name_of

_KINDS = ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked")
_SCALE = 0.7


def _shapes(kind: str) -> tuple[tuple[int, ...], ...]:
    if "triang" in kind:
        return (6, 9, 9), (2, 64, 64), (1, 1, 1)
    return (2, 3, 9, 17), (1, 2, 64, 64), (2, 1, 1, 130)


def _mask(shape: tuple, draw: Draw) -> Tensor:
    """Make a mask of keys that are not attended, of a shape that goes with that of the scores."""
    mask = draw.uniform((shape[0], 1, *shape[-2:])) < 0.4
    mask[0, 0, shape[-2] // 2] = True  # a query that attends nothing
    return mask.to(torch.uint8)


@Case.of(*(f"{kind}_softmax_forward" for kind in _KINDS))
def _forward(op: str, draw: Draw) -> Iterator[Case]:
    kind = op.removesuffix("_softmax_forward")
    for dtype in draw.dtypes:
        # Numbers whose exponentials are no numbers, and whose differences are exact.
        large = (draw.normal(_shapes(kind)[0], dtype, 2.0) + 300).round()
        given = [(str(list(s)), draw.normal(s, dtype, 3.0), _SCALE) for s in _shapes(kind)]
        for name, x, scale in (*given, ("large", large, 1.0)):
            mask = (_mask(x.shape, draw),) if kind == "scaled_masked" else ()
            wanted = (Result("the result", dtype, x.shape[-1]),)
            yield Case(f"{name_of(dtype)} {name}", (x, *mask, scale), wanted)


@Case.of(*(f"{kind}_softmax_backward" for kind in _KINDS))
def _backward(op: str, draw: Draw) -> Iterator[Case]:
    kind = op.removesuffix("_softmax_backward")
    for dtype in draw.dtypes:
        for shape in _shapes(kind):
            scores, grad = draw.normal(shape, torch.float64), draw.normal(shape, dtype)
            if kind == "scaled_masked":
                scores = scores.masked_fill(_mask(shape, draw) != 0, -torch.inf)
            elif kind != "scaled":
                future = torch.ones_like(scores, dtype=torch.bool).triu(1 + shape[-1] - shape[-2])
                scores = scores.masked_fill(future, -torch.inf)
            out = torch.nan_to_num(scores.softmax(-1)).to(dtype)
            terms = _SCALE * out.double() * grad.double()  # where there is one key they cancel
            wanted = (Result("the gradient", dtype, shape[-1], terms=terms),)
            yield Case(f"{name_of(dtype)} {list(shape)}", (grad, out, _SCALE), wanted)
