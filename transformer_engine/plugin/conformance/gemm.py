# SPDX-License-Identifier: Apache-2.0
"""Cases of `generic_gemm`: layouts, epilogues, accumulation and quantized operands."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import combinations, permutations, product
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import (
    Case,
    Draw,
    Wanted,
    counted,
    gradients,
    name_of,
    near,
)
from transformer_engine.plugin.conformance.casts import coded, quantizers_of_values

_SIZES = (
    *((16, 32, 48), (1, 16, 64), (33, 65, 17), (128, 96, 256)),
    *((0, 4, 16), (4, 0, 16), (4, 6, 0)),
)


def _gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


def _plain(tensor: Any) -> Tensor:
    return (
        tensor.dequantize(dtype=torch.float32) if hasattr(type(tensor), "_dequantized") else tensor
    )


@dataclass(frozen=True)
class _Problem:
    """Arguments of a product; `before` is what D holds, where it is added to."""

    A: Any
    transA: bool
    B: Any
    transB: bool
    dtype: torch.dtype
    bias: Tensor | None = None
    gelu: bool = False
    grad: bool = False
    gelu_in: Tensor | None = None
    before: Tensor | None = None
    into: bool = False
    factors: tuple[float, float | None] = (1.0, None)
    quantizer: Any = None


def _result(problem: _Problem, found: Any, exact: Tensor, depth: int) -> Wanted:
    if problem.quantizer is not None:
        return coded("the result", found, problem.quantizer, exact)
    return near("the result", found, exact, problem.dtype, depth)


def _case(name: str, draw: Draw, problem: _Problem) -> Case:
    """D = op(B) op(A) and what goes with it; operands [.., k] are matrices of all their rows."""
    A, transA, B, transB, dtype, bias, gelu, grad, gelu_in, accumulate, into, factors = (
        getattr(problem, one.name) for one in fields(problem)[:-1]
    )
    left, right = (_plain(t).double() for t in (B, A))
    leading = () if transB else left.shape[:-1]
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    left = left.T if transB else left
    right = right.T if transA else right
    alpha, beta = factors
    made = alpha * left @ right
    made = made.view(*leading, right.shape[1]) if leading else made
    depth = left.shape[1]
    out = None
    if accumulate is not None:
        made = made + (1.0 if beta is None else beta) * accumulate.double()
        out = draw.among_others(accumulate)
    elif into:
        out = draw.place(made.shape, dtype)
    if bias is not None and not grad:
        made = made + bias.double()
    exact, pre, sums = made, None, None
    if gelu and not grad:
        exact, pre = _gelu(made), made
    elif gelu:
        (exact,) = gradients(_gelu, made, gelu_in)
    if grad and bias is not None:
        sums = exact.flatten(0, -2).sum(0) if gelu else left.sum(1)
    space = torch.empty(1 << 16, dtype=torch.uint8, device=draw.device)
    args = (
        *(A, transA, B, transB, out, problem.quantizer, dtype, bias, None, gelu, gelu_in, grad),
        *(space, space.numel(), accumulate is not None, True, None, None, None, False, *factors),
    )

    def wanted(found: tuple) -> list:
        counted(found, 4)
        results = [_result(problem, found[0], exact, depth)]
        if out is not None:
            results.append(near("D", out, exact, dtype, depth))
        if sums is not None:
            results.append(near("the gradient of the bias", found[1], sums, bias.dtype, depth))
        if pre is not None and (gelu_in is None or found[2] is not None):
            results.append(near("the value before gelu", found[2], pre, dtype, depth))
        if pre is not None and gelu_in is not None:
            results.append(near("gelu_in", gelu_in, pre, dtype, depth))
        return results

    places = (space, out, None if pre is None else gelu_in)
    return Case(name, args, wanted, written=tuple(t for t in places if t is not None))


def _gemm(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for dtype in draw.dtypes:
        what = name_of(dtype)
        for m, n, k in _SIZES:
            for transA, transB in product((True, False), repeat=2):
                A = draw.normal((n, k) if transA else (k, n), dtype)
                B = draw.normal((k, m) if transB else (m, k), dtype)
                layout = f"{'NT'[transA]}{'NT'[transB]}"
                problem = _Problem(A, transA, B, transB, dtype)
                yield _case(f"{what} {m}x{n}x{k} {layout}", draw, problem)
        for name, options in _options(draw, dtype, 24, 40):
            A, B = draw.normal((40, 32), dtype), draw.normal((24, 32), dtype)
            given = {"dtype": dtype, **options}
            yield _case(f"{what} {name}", draw, _Problem(A, True, B, False, **given))
        for kind, quantizer in quantizers_of_values(draw.device).items():
            A, B = draw.normal((32, 48), dtype), draw.normal((64, 48), dtype)
            problem = _Problem(A, True, B, False, dtype, quantizer=quantizer)
            yield _case(f"{what} cast, {kind}", draw, problem)
        # Operands of more dims: of a forward, and of the gradient of an input and of a weight.
        x, weight = draw.normal((2, 3, 16), dtype), draw.normal((5, 6, 16), dtype)
        yield _case(f"{what} forward of [2, 3, 16]", draw, _Problem(weight, True, x, False, dtype))
        dy, bias = draw.normal((2, 3, 8), dtype), draw.normal((8,), dtype)
        problem = _Problem(x, False, dy, True, dtype, bias, grad=True)
        yield _case(f"{what} gradients of [2, 3, 16]", draw, problem)
        weight, before = draw.normal((8, 16), dtype), draw.normal((2, 3, 16), dtype)
        problem = _Problem(
            weight, False, dy, False, dtype, before[0, 0], gelu=True, grad=True, gelu_in=before
        )
        yield _case(f"{what} through gelu to [2, 3, 16]", draw, problem)
        # A weight gradient: dy^T x, whose bias gradient are the sums of dy.
        x, dy = draw.normal((32, 40), dtype), draw.normal((32, 24), dtype)
        place = draw.normal((24,), dtype)
        problem = _Problem(x, False, dy, True, dtype, place, grad=True)
        yield _case(f"{what} gradient of a bias", draw, problem)
    yield from _mixed(draw)
    yield from _quantized(draw)


def _options(
    draw: Draw, dtype: torch.dtype, m: int, n: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """What may go with a product [m, n]."""
    bias, before = draw.normal((n,), dtype), draw.normal((m, n), dtype)
    through = {"gelu": True, "grad": True, "gelu_in": draw.normal((m, n), dtype)}
    yield "bias", {"bias": bias}
    yield "into D", {"into": True}
    yield "to float32", {"dtype": torch.float32}
    yield "into D of float32", {"into": True, "dtype": torch.float32}
    yield "a factor", {"factors": (3.0, None)}
    yield "bias and gelu", {"bias": bias, "gelu": True}
    place = draw.place((m, n), dtype)
    yield "bias and gelu, whose argument is kept", {"bias": bias, "gelu": True, "gelu_in": place}
    yield "gradient through gelu", through
    yield "gradient through gelu and bias", {**through, "bias": bias}
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        yield f"accumulated in {name_of(kind)}", {"before": before.to(kind), "dtype": kind}
    yield "factors", {"before": before, "factors": (0.5, 2.0)}
    yield "factors and bias", {"before": before, "factors": (-0.5, 0.25), "bias": bias}


def _quantized(draw: Draw) -> Iterator[Case]:
    import transformer_engine.pytorch.tensor as tensors
    from transformer_engine.pytorch.constants import DType

    code, device, bf16 = DType.kFloat8E4M3, draw.device, torch.bfloat16
    tiles = partial(tensors.Float8BlockQuantizer, code, rowwise=True, columnwise=True)
    makers = {
        "one scale": lambda: tensors.Float8CurrentScalingQuantizer(code, device),
        "tiles": tiles,
        "tiles of rows": lambda: tiles(block_scaling_dim=1),
        "mxfp8": lambda: tensors.MXFP8Quantizer(code),
        "nvfp4": lambda: tensors.NVFP4Quantizer(),
    }
    for name, make in makers.items():
        A, B = (make()(draw.normal((rows, 64), bf16)) for rows in (48, 32))
        yield _case(f"quantized, {name}", draw, _Problem(A, True, B, False, bf16))
        bias = draw.normal((48,), bf16)
        problem = _Problem(A, True, B, False, bf16, bias, gelu=True)
        yield _case(f"quantized, {name}, bias and gelu", draw, problem)
        # Sums of 1 and -1 are exact however they are added, so the bias shows how it was rounded.
        A, B = (make()(draw.normal((rows, 64), bf16).sign()) for rows in (48, 32))
        bias = draw.normal((48,), torch.float32, 8.0)
        problem = _Problem(A, True, B, False, torch.float32, bias)
        yield _case(f"quantized, {name}, bias in float32", draw, problem)
    for one, other in combinations(makers, 2):
        A, B = (
            makers[one]()(draw.normal((48, 64), bf16)),
            makers[other]()(draw.normal((32, 64), bf16)),
        )
        for gelu in (False, True):
            problem = _Problem(A, True, B, False, bf16, gelu=gelu)
            yield _case(f"{one} times {other}{', gelu' if gelu else ''}", draw, problem)


def _mixed(draw: Draw) -> Iterator[Case]:
    """Operands of two dtypes."""
    for one, other in permutations(draw.dtypes, 2):
        A, B = draw.normal((24, 32), one), draw.normal((17, 32), other)
        for gelu in (False, True):
            problem = _Problem(A, True, B, False, torch.float32, gelu=gelu)
            name = f"{name_of(one)} and {name_of(other)}{', gelu' if gelu else ''}"
            yield _case(name, draw, problem)


CASES = {"generic_gemm": _gemm}
