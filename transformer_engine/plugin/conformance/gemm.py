# SPDX-License-Identifier: Apache-2.0
"""Cases of `generic_gemm`: layouts, epilogues, accumulation and quantized operands."""

from collections.abc import Iterator
from itertools import combinations, permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Result, name_of
from transformer_engine.plugin.conformance.casts import quantizers, quantizers_of_values

_SIZES = (
    *((16, 32, 48), (1, 16, 64), (33, 65, 17), (128, 96, 256)),
    *((0, 4, 16), (4, 0, 16), (4, 6, 0)),
)


class _Options(NamedTuple):
    """Options of a product; see `generic_gemm`."""

    bias: Tensor | None = None
    gelu: bool = False
    grad: bool = False
    gelu_in: Tensor | None = None
    out: Tensor | None = None
    accumulate: bool = False
    factors: tuple[float, float | None] = (1.0, None)
    quantizer: Any = None


def _case(name: str, operands: tuple, dtype: torch.dtype, **options: Any) -> Case:
    """D = op(B) op(A) of ``operands`` (A, transA, B, transB), and what goes with it."""
    bias, gelu, grad, gelu_in, out, accumulate, factors, quantizer = _Options(**options)
    A, transA, *_ = operands
    depth = A.shape[-1] if transA else A.shape[:-1].numel()
    space = torch.empty(1 << 16, dtype=torch.uint8, device=A.device)
    args = (
        *(*operands, out, quantizer, dtype, bias, None, gelu, gelu_in, grad),
        *(space, space.numel(), accumulate, True, None, None, None, False, *factors),
    )
    made = Result("the result", None if quantizer else dtype, depth, quantizer=quantizer)
    sums = before = None
    left = [] if out is None else [(out, Result("D", dtype, depth))]
    if grad and bias is not None:
        sums = Result("the gradient of the bias", bias.dtype, depth)
    if gelu and not grad:
        lacks = gelu_in is not None
        before = Result("the value before gelu", dtype, depth, may_lack=lacks)
        left += [(gelu_in, Result("gelu_in", dtype, depth))] * lacks
    return Case(name, args, (made, sums, before, None), written=(space,), left=tuple(left))


@Case.of("generic_gemm")
def _gemm(draw: Draw) -> Iterator[Case]:
    for dtype in draw.dtypes:
        what = name_of(dtype)
        for m, n, k in _SIZES:
            for transA, transB in product((True, False), repeat=2):
                A = draw.normal((n, k) if transA else (k, n), dtype)
                B = draw.normal((k, m) if transB else (m, k), dtype)
                layout = f"{'NT'[transA]}{'NT'[transB]}"
                yield _case(f"{what} {m}x{n}x{k} {layout}", (A, transA, B, transB), dtype)
        for name, options in _options(draw, dtype, 24, 40):
            A, B = draw.normal((40, 32), dtype), draw.normal((24, 32), dtype)
            yield _case(f"{what} {name}", (A, True, B, False), **{"dtype": dtype, **options})
        for kind, quantizer in quantizers_of_values(draw.device).items():
            A, B = draw.normal((32, 48), dtype), draw.normal((64, 48), dtype)
            operands = A, True, B, False
            yield _case(f"{what} cast, {kind}", operands, dtype, quantizer=quantizer)
        # Operands of more dims: of a forward, and of the gradient of an input and of a weight.
        x, weight = draw.normal((2, 3, 16), dtype), draw.normal((5, 6, 16), dtype)
        yield _case(f"{what} forward of [2, 3, 16]", (weight, True, x, False), dtype)
        dy, bias = draw.normal((2, 3, 8), dtype), draw.normal((8,), dtype)
        yield _case(
            f"{what} gradients of [2, 3, 16]", (x, False, dy, True), dtype, bias=bias, grad=True
        )
        weight, before = draw.normal((8, 16), dtype), draw.normal((2, 3, 16), dtype)
        through: dict[str, Any] = {"gelu": True, "grad": True, "gelu_in": before}
        name, operands = f"{what} through gelu to [2, 3, 16]", (weight, False, dy, False)
        yield _case(name, operands, dtype, bias=before[0, 0], **through)
        # A weight gradient: dy^T x, whose bias gradient are the sums of dy.
        x, dy = draw.normal((32, 40), dtype), draw.normal((32, 24), dtype)
        bias = draw.normal((24,), dtype)
        yield _case(f"{what} gradient of a bias", (x, False, dy, True), dtype, bias=bias, grad=True)
    yield from _mixed(draw)
    yield from _quantized(draw)


def _options(
    draw: Draw, dtype: torch.dtype, m: int, n: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the options of a product [m, n]."""
    f32, bias, before = torch.float32, draw.normal((n,), dtype), draw.normal((m, n), dtype)
    through = {"gelu": True, "grad": True, "gelu_in": draw.normal((m, n), dtype)}
    yield "bias", {"bias": bias}
    yield "into D", {"out": draw.place((m, n), dtype)}
    yield "to float32", {"dtype": f32}
    yield "into D of float32", {"out": draw.place((m, n), f32), "dtype": f32}
    yield "a factor", {"factors": (3.0, None)}
    yield "bias and gelu", {"bias": bias, "gelu": True}
    place = draw.place((m, n), dtype)
    yield "bias and gelu, whose argument is kept", {"bias": bias, "gelu": True, "gelu_in": place}
    yield "gradient through gelu", through
    yield "gradient through gelu and bias", {**through, "bias": bias}

    def added_to(kind: torch.dtype) -> dict[str, Any]:
        return {"out": draw.among_others(before.to(kind)), "accumulate": True, "dtype": kind}

    for kind in (f32, torch.float16, torch.bfloat16):
        yield f"accumulated in {name_of(kind)}", added_to(kind)
    yield "factors", {**added_to(dtype), "factors": (0.5, 2.0)}
    yield "factors and bias", {**added_to(dtype), "factors": (-0.5, 0.25), "bias": bias}


def _quantized(draw: Draw) -> Iterator[Case]:
    device, bf16 = draw.device, torch.bfloat16
    kinds = "current", "tiles", "square tiles", "mxfp8", "nvfp4"

    def operands(one: str, other: str, sign: bool = False) -> tuple:
        made = [draw.normal((rows, 64), bf16) for rows in (48, 32)]
        pairs = zip((one, other), made, strict=True)
        A, B = (quantizers(device)[kind](t.sign() if sign else t) for kind, t in pairs)
        return A, True, B, False

    for kind in kinds:
        name, bias = f"quantized, {kind}", draw.normal((48,), bf16)
        yield _case(name, operands(kind, kind), bf16)
        yield _case(f"{name}, bias and gelu", operands(kind, kind), bf16, bias=bias, gelu=True)
        # Sums of 1 and -1 are exact however they are added, so the bias shows how it was rounded.
        bias, signs = draw.normal((48,), torch.float32, 8.0), operands(kind, kind, True)
        yield _case(f"{name}, bias in float32", signs, torch.float32, bias=bias)
    for one, other in combinations(kinds, 2):
        for gelu in (False, True):
            name = f"{one} times {other}{', gelu' * gelu}"
            yield _case(name, operands(one, other), bf16, gelu=gelu)


def _mixed(draw: Draw) -> Iterator[Case]:
    """Operands of two dtypes."""
    for one, other in permutations(draw.dtypes, 2):
        A, B = draw.normal((24, 32), one), draw.normal((17, 32), other)
        for gelu in (False, True):
            name = f"{name_of(one)} and {name_of(other)}{', gelu' * gelu}"
            yield _case(name, (A, True, B, False), torch.float32, gelu=gelu)
