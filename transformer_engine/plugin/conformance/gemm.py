# SPDX-License-Identifier: Apache-2.0
"""Cases of `generic_gemm`: layouts, epilogues, accumulation and quantized operands."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, gradients, name_of, near

_SIZES = ((16, 32, 48), (1, 16, 64), (33, 65, 17), (128, 96, 256))


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


def _case(name: str, draw: Draw, problem: _Problem) -> Case:
    """D = op(B) op(A) and what goes with it."""
    A, transA, B, transB, dtype, bias, gelu, grad, gelu_in, accumulate, into, factors = (
        getattr(problem, one.name) for one in fields(problem)
    )
    left, right = _plain(B).double(), _plain(A).double()
    left = left.T if transB else left
    right = right.T if transA else right
    alpha, beta = factors
    product = alpha * left @ right
    depth = left.shape[1]
    out = None
    if accumulate is not None:
        product = product + (1.0 if beta is None else beta) * accumulate.double()
        out = accumulate.clone()
    elif into:
        out = torch.empty(product.shape, dtype=dtype, device=draw.device)
    if bias is not None and not grad:
        product = product + bias.double()
    exact, pre, sums = product, None, None
    if gelu and not grad:
        exact, pre = _gelu(product), product
    elif gelu:
        (exact,) = gradients(_gelu, product, gelu_in)
    if grad and bias is not None:
        sums = exact.sum(0) if gelu else left.sum(1)
    space = torch.empty(1 << 16, dtype=torch.uint8, device=draw.device)
    args = (
        *(A, transA, B, transB, out, None, dtype, bias, None, gelu, gelu_in, grad),
        *(space, space.numel(), accumulate is not None, True, None, None, None, False, *factors),
    )

    def wanted(found: tuple) -> list:
        results = [near("the result", found[0], exact, dtype, depth)]
        if out is not None:
            results.append(near("D", out, exact, dtype, depth))
        if sums is not None:
            results.append(near("the gradient of the bias", found[1], sums, bias.dtype, depth))
        if pre is not None and found[2] is not None:
            results.append(near("the value before gelu", found[2], pre, dtype, depth))
        return results

    return Case(name, args, wanted, written=(space,) if out is None else (space, out))


def _gemm(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for dtype in draw.dtypes:
        what = name_of(dtype)
        for m, n, k in _SIZES:
            for transA, transB in ((True, False), (False, False), (False, True)):
                A = draw.normal((n, k) if transA else (k, n), dtype)
                B = draw.normal((k, m) if transB else (m, k), dtype)
                layout = f"{'NT'[transA]}{'NT'[transB]}"
                problem = _Problem(A, transA, B, transB, dtype)
                yield _case(f"{what} {m}x{n}x{k} {layout}", draw, problem)
        for name, options in _options(draw, dtype, 24, 40):
            A, B = draw.normal((40, 32), dtype), draw.normal((24, 32), dtype)
            given = {"dtype": dtype, **options}
            yield _case(f"{what} {name}", draw, _Problem(A, True, B, False, **given))
        # A weight gradient: dy^T x, whose bias gradient are the sums of dy.
        x, dy = draw.normal((32, 40), dtype), draw.normal((32, 24), dtype)
        place = draw.normal((24,), dtype)
        problem = _Problem(x, False, dy, True, dtype, place, grad=True)
        yield _case(f"{what} gradient of a bias", draw, problem)
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
    yield "bias and gelu", {"bias": bias, "gelu": True}
    yield "gradient through gelu", through
    yield "gradient through gelu and bias", {**through, "bias": bias}
    yield "accumulated", {"before": before}
    yield "accumulated in fp32", {"before": before.float(), "dtype": torch.float32}
    yield "factors", {"before": before, "factors": (0.5, 2.0)}


def _quantized(draw: Draw) -> Iterator[Case]:
    import transformer_engine.pytorch.tensor as tensors
    from transformer_engine.pytorch.constants import DType

    code, device = DType.kFloat8E4M3, draw.device
    makers = {
        "one scale": lambda: tensors.Float8CurrentScalingQuantizer(code, device),
        "tiles": lambda: tensors.Float8BlockQuantizer(code, rowwise=True, columnwise=True),
        "mxfp8": lambda: tensors.MXFP8Quantizer(code),
        "nvfp4": lambda: tensors.NVFP4Quantizer(),
    }
    for name, make in makers.items():
        A = make()(draw.normal((48, 64), torch.bfloat16))
        B = make()(draw.normal((32, 64), torch.bfloat16))
        yield _case(f"quantized, {name}", draw, _Problem(A, True, B, False, torch.bfloat16))


CASES = {"generic_gemm": _gemm}
