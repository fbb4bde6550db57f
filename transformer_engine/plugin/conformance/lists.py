# SPDX-License-Identifier: Apache-2.0
"""Cases of operators on lists of tensors: scaling and norms."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, name_of, near, same

_SHAPES = ((5,), (3, 7), (40, 11), (2, 129))


@Case.of("multi_tensor_scale", "multi_tensor_scale_tensor")
def _scale(op: str, draw: Draw) -> Iterator[Case]:
    for dtype, wide, broken in product(draw.dtypes, (False, True), (False, True)):
        given = [draw.normal(shape, dtype) for shape in _SHAPES]
        if broken:
            given[1][0, 0] = math.inf
        out = [draw.place(t.shape, torch.float32 if wide else dtype) for t in given]
        flag = draw.flag()

        def wanted(
            found: Any, given: list = given, out: list = out, flag: Tensor = flag,
            broken: bool = broken,
        ) -> list:  # fmt: skip
            raised = torch.tensor([int(broken)], dtype=torch.int32)
            pairs = enumerate(zip(given, out, strict=True))
            results = [near(f"out {i}", o, g.double() * 0.3, o.dtype) for i, (g, o) in pairs]
            return [*results, same("noop_flag", (flag != 0).int(), raised)]

        name = f"{name_of(dtype)}{' to float32' * wide}{' with Inf' * broken}"
        factor = draw.number(0.3) if op == "multi_tensor_scale_tensor" else 0.3
        yield Case(name, (2048, flag, [given, out], factor), wanted, written=(flag, *out))


@Case.of("multi_tensor_l2norm", "multi_tensor_unscale_l2norm")
def _norm(op: str, draw: Draw) -> Iterator[Case]:
    unscaled = op == "multi_tensor_unscale_l2norm"
    for dtype in draw.dtypes:
        for each in (False, True):
            given = [draw.normal(shape, dtype) for shape in _SHAPES]
            factor = draw.number(0.5)
            norms = torch.stack([t.double().norm() for t in given]) * (0.5 if unscaled else 1.0)
            total, depth = norms.norm().view(1), sum(t.numel() for t in given)

            def wanted(
                found: tuple, norms: Tensor = norms, total: Tensor = total, each: bool = each,
                depth: int = depth,
            ) -> list:  # fmt: skip
                results = [near("the norm", found[0], total, torch.float32, depth)]
                if each:
                    results.append(near("norms of each", found[1], norms, torch.float32, depth))
                return results

            more = (factor,) if unscaled else ()
            name = f"{name_of(dtype)}{' each' * each}"
            yield Case(name, (2048, draw.flag(), [given], *more, each), wanted)
