# SPDX-License-Identifier: Apache-2.0
"""Cases of casts by quantizers: bit for bit what the formats define, as the CPU casts them."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Exact, Result, name_of

_SHAPES = ((32, 64), (128, 256), (16, 48), (3, 32, 32))


def quantizers(device: torch.device) -> dict[str, Any]:
    """New quantizers of all formats, by name."""
    import transformer_engine.pytorch.tensor as tensors
    from transformer_engine.pytorch.constants import DType

    code = DType.kFloat8E4M3
    scale, amax = torch.tensor([[3.0], [2.5]], dtype=torch.float32, device=device)
    tiles = partial(tensors.Float8BlockQuantizer, code, rowwise=True, columnwise=True)
    return {
        "delayed": tensors.Float8Quantizer(scale, amax, code),
        "current": tensors.Float8CurrentScalingQuantizer(code, device),
        "tiles": tiles(block_scaling_dim=1),
        "square tiles": tiles(block_scaling_dim=2),
        "rows": tensors.Float8RowQuantizer(code),
        "mxfp8": tensors.MXFP8Quantizer(code),
        "nvfp4": tensors.NVFP4Quantizer(),
    }


def quantizers_of_values(device: torch.device) -> dict[str, Any]:
    """Quantizers for operators that compute values, by name."""
    every = quantizers(device)
    return {kind: every[kind] for kind in ("current", "rows", "mxfp8")}


def _values(draw: Draw) -> Iterator[tuple[str, Tensor]]:
    for dtype in draw.dtypes:
        what = name_of(dtype)
        for shape in _SHAPES:
            yield f"{what} {list(shape)}", draw.normal(shape, dtype)
        yield f"{what} zeros", torch.zeros(32, 32, dtype=dtype, device=draw.device)
        outlier = draw.normal((32, 64), dtype)
        outlier[3, 5] = 3e4
        yield f"{what} an outlier", outlier
        small = draw.normal((32, 32), dtype, 2.0**-12)
        yield f"{what} small", small
        holes = draw.normal((32, 64), dtype)
        holes[2, 7], holes[4, 9] = math.nan, math.inf
        yield f"{what} NaN and Inf", holes


@Case.of("quantize", "bgrad_quantize")
def _quantize(op: str, draw: Draw) -> Iterator[Case]:
    with_sums = op == "bgrad_quantize"
    for kind in quantizers(torch.device("cpu")):
        for name, x in _values(draw):
            if "NaN" in name and kind == "nvfp4":
                continue  # its NaN is a scale: which code stands below it means nothing
            quantizer = quantizers(draw.device)[kind]
            reference = quantizers(torch.device("cpu"))[kind]
            expected = reference(x.cpu())
            delayed, amax = kind == "delayed", Result("the amax of the quantizer", depth=0)
            left = [(quantizer.amax, amax)] if delayed else []
            exact = Exact(expected, [reference.amax] if delayed else [])
            wanted: tuple = (Result("the result"),)
            if with_sums:
                rows = x.double().reshape(-1, x.shape[-1])
                wanted = (Result("the column sums", x.dtype, len(rows)), *wanted)
                exact = exact._replace(results=(rows.sum(0), expected))
            yield Case(f"{kind} {name}", (x, quantizer), wanted, left=left, exact=exact)
        if not with_sums:
            yield from _into(kind, draw)


def _into(kind: str, draw: Draw) -> Iterator[Case]:
    """To a tensor that is there; where the flag is not 0 that stays as it is."""
    for dtype, flag in product(draw.dtypes, (None, 0.0, 1.0)):
        quantizer = quantizers(draw.device)[kind]
        x, before = (draw.normal((32, 64), dtype) for _ in range(2))
        out = quantizer(before)
        noop = None if flag is None else draw.number(flag)
        expected = quantizers(torch.device("cpu"))[kind]((before if flag else x).cpu())
        wanted, left = (Result("the result"),), [(out, Result("output"))]
        how = "" if flag is None else f", flag {flag:g}"
        name, exact = f"{kind} {name_of(dtype)} into output{how}", Exact(expected, [expected])
        yield Case(name, (x, quantizer, out, noop), wanted, left=left, exact=exact)


@Case.of("dequantize")
def _dequantize(draw: Draw) -> Iterator[Case]:
    for kind, reference in quantizers(torch.device("cpu")).items():
        for dtype in draw.dtypes:
            x = draw.normal((32, 64), torch.float32)
            values = reference(x.cpu()).dequantize(dtype=torch.float32).double()
            made = quantizers(draw.device)[kind](x)
            wanted = (Result("the result", dtype),)
            yield Case(f"{kind} to {name_of(dtype)}", (made, dtype), wanted, exact=Exact(values))


@Case.of("multi_tensor_quantize", "split_quantize")
def _several(op: str, draw: Draw) -> Iterator[Case]:
    for dtype in draw.dtypes:
        named = quantizers(draw.device)
        expected = quantizers(torch.device("cpu"))
        parts = [draw.normal((32, 64), dtype) for _ in named]

        wanted = tuple(Result(f"the result, {kind}") for kind in named)
        exact = Exact([q(x.cpu()) for q, x in zip(expected.values(), parts, strict=True)])
        given = list(named.values())
        if op == "multi_tensor_quantize":
            args: tuple = (parts, given)
        else:
            args = (torch.cat(parts), [32] * len(parts), given)
        yield Case(name_of(dtype), args, wanted, exact=exact)


@Case.of("fp8_transpose")
def _transpose(draw: Draw) -> Iterator[Case]:
    for shape in ((32, 48), (7, 13), (1, 16), (2, 3, 32), (1, 1)):
        codes = (draw.uniform(shape) * 256).to(torch.uint8)
        for out in (draw.place((shape[-1], *shape[:-1]), torch.uint8), None):
            left = () if out is None else ((out, Result("out", depth=0)),)
            name = f"{list(shape)}{' a new tensor' * (out is None)}"
            wanted = (Result("the result", depth=0) if out is None else None,)
            yield Case(name, (codes, None), wanted, {"out": out}, left=left)


@Case.of("compute_amax")
def _amax(draw: Draw) -> Iterator[Case]:
    shapes = ((17,), (4, 5, 6), (0, 4), (0,))
    few = [
        (f"{name_of(dtype)} {list(shape)}", draw.normal(shape, dtype))
        for dtype in draw.dtypes
        for shape in shapes
    ]
    for name, x in [*_values(draw), *few]:
        out = draw.number(7.0)  # written over, not raised
        yield Case(name, (x, out), (None,), left=((out, Result("amax", torch.float32, 0)),))
