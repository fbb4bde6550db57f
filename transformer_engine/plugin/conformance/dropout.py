# SPDX-License-Identifier: Apache-2.0
"""Cases of dropout: what is kept, how much of it, and the gradient by the same mask."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Wanted, name_of, near

_P = 0.3


def _share(out: Tensor, kept: Tensor, p: float) -> Wanted:
    """Of n independent decisions, within six standard deviations."""
    del out
    found = kept.double().mean().view(1)
    exact = torch.full((1,), 1 - p, dtype=torch.float64)
    bound = (3 / math.sqrt(kept.numel()) / (1 - p)) ** 2
    return Wanted("the share that is kept", found, exact, torch.float64, bound)


def _forward(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for dtype in draw.dtypes:
        for shape in ((64, 96), (3, 5, 256), (16,)):
            x = draw.normal(shape, dtype)
            x[x == 0] = 1

            def wanted(found: tuple, x: Tensor = x) -> list:
                kept = found[0] != 0
                exact = x.double() * kept / (1 - _P)
                return [near("the result", found[0], exact, x.dtype), _share(x, kept, _P)]

            yield Case(f"{name_of(dtype)} {list(shape)}", (x, _P), wanted)

        def all_kept(found: tuple, x: Tensor = x) -> list:
            return [near("the result", found[0], x.double(), x.dtype)]

        def none_kept(found: tuple, x: Tensor = x) -> list:
            return [near("the result", found[0], torch.zeros_like(x).double(), x.dtype)]

        yield Case(f"{name_of(dtype)} nothing dropped", (x, 0.0), all_kept)
        yield Case(f"{name_of(dtype)} all dropped", (x, 1.0), none_kept)


CASES: dict[str, Any] = {"dropout_fwd": _forward}
