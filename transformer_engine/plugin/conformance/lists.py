# SPDX-License-Identifier: Apache-2.0
"""Cases of operators on lists of tensors: scaling and norms."""

import math
from collections.abc import Iterator
from itertools import product

import torch

from transformer_engine.plugin.conformance.cases import Case, Draw, Exact, Result, name_of

_SHAPES = ((5,), (3, 7), (40, 11), (2, 129))


@Case.of("multi_tensor_scale", "multi_tensor_scale_tensor")
def _scale(op: str, draw: Draw) -> Iterator[Case]:
    for dtype, wide, broken in product(draw.dtypes, (False, True), (False, True)):
        given = [draw.normal(shape, dtype) for shape in _SHAPES]
        if broken:
            given[1][0, 0] = math.inf
        out = [draw.place(t.shape, torch.float32 if wide else dtype) for t in given]
        left = [(o, Result(f"out {i}", o.dtype)) for i, o in enumerate(out)]
        flag = draw.flag()
        left.append((flag, Result("noop_flag", depth=0)))
        exact = Exact(None, [*(g.double() * 0.3 for g in given), draw.flag(int(broken))])
        name = f"{name_of(dtype)}{' to float32' * wide}{' with Inf' * broken}"
        factor = draw.number(0.3) if op == "multi_tensor_scale_tensor" else 0.3
        yield Case(name, (2048, flag, [given, out], factor), (None,), left=left, exact=exact)


@Case.of("multi_tensor_l2norm", "multi_tensor_unscale_l2norm")
def _norm(op: str, draw: Draw) -> Iterator[Case]:
    unscaled = op == "multi_tensor_unscale_l2norm"
    for dtype in draw.dtypes:
        for each in (False, True):
            given = [draw.normal(shape, dtype) for shape in _SHAPES]
            factor = draw.number(0.5)
            norms = torch.stack([t.double().norm() for t in given]) * (0.5 if unscaled else 1.0)
            total, depth = norms.norm().view(1), sum(t.numel() for t in given)

            each_one = Result("norms of each", torch.float32, depth) if each else None
            wanted = (Result("the norm", torch.float32, depth), each_one)
            more = (factor,) if unscaled else ()
            name = f"{name_of(dtype)}{' each' * each}"
            args = (2048, draw.flag(), [given], *more, each)
            yield Case(name, args, wanted, exact=Exact((total, norms)))
