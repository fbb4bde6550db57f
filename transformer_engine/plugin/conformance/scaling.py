# SPDX-License-Identifier: Apache-2.0
"""Cases of scales: of amaxes, of delayed scaling, and of slices of a weight that ranks own."""

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Exact, Result, name_of

_LARGEST = torch.finfo(torch.float32).max


def fp8_dtypes() -> tuple:
    """FP8 dtypes, of the library and of torch."""
    from transformer_engine.pytorch.constants import DType

    return (DType.kFloat8E4M3, torch.float8_e4m3fn), (DType.kFloat8E5M2, torch.float8_e5m2)


# ---- delayed scaling ---------------------------------------------------------------------------


@Case.of("fused_amax_and_scale_update_after_reduction")
def _update(draw: Draw) -> Iterator[Case]:
    options = product(("max", "most_recent"), (False, True), (0, 2), fp8_dtypes(), (4, 1))
    for algo, reduced, margin, (code, kind), rows in options:
        sizes = (3, 4, 1)
        histories = [draw.normal((rows, n), torch.float32).abs() for n in sizes]
        scales = [draw.normal((n,), torch.float32).abs() for n in sizes]
        histories[1][:, 1] = 0.0
        histories[1][:, 2] = math.inf
        histories[1][rows // 2, 3] = math.nan
        histories[2][:, 0] = 1e-38  # whose scale is the largest number
        buffer = draw.normal((sum(sizes) * reduced,), torch.float32).abs()
        buffer[:1] = 0.0  # no new amax
        buffer[-1:] = 1e-38
        left = [(t, Result(f"scales {i}", torch.float32)) for i, t in enumerate(scales)]
        left += [(t, Result(f"history {i}", torch.float32, 0)) for i, t in enumerate(histories)]
        how = f"{' reduced' * reduced} margin {margin} {name_of(kind)} of {rows}"
        args = (buffer, histories, scales, algo, code, margin)
        yield Case(f"{algo}{how}", args, (None,), left=tuple(left))


@Case.of("multi_tensor_compute_scale_and_scale_inv")
def _scales(draw: Draw) -> Iterator[Case]:
    special = (1.5, 0.0, 1e-12, math.inf, math.nan, 448.0, 1e-38, 3e38)
    amaxes = [*special, *draw.normal((9,), torch.float32).abs().tolist()]
    for largest, power, epsilon in product((448.0, 57344.0), (False, True), (0.0, 1e-10, 2.0)):
        given = [draw.number(value) for value in amaxes]
        made = [[draw.number(-1.0) for _ in given] for _ in range(2)]
        exact, least = [], float(torch.tensor(epsilon, dtype=torch.float32))
        for value in torch.cat(given).double().tolist():
            top = value if math.isnan(value) else max(value, least)
            scale = min(largest / top, _LARGEST) if 0 < top < math.inf else 1.0
            exact.append(2.0 ** math.floor(math.log2(scale)) if power else scale)

        left, values = [], []
        for i, (one, inverse) in enumerate(zip(*made, strict=True)):
            left.append((one, Result(f"scale {i}", torch.float32, 0 if power else 1)))
            left.append((inverse, Result(f"inverse {i}", torch.float32)))
            scale = torch.full((1,), exact[i], dtype=torch.float64)
            values += scale, partial(_inverse, one)
        name = f"{largest:g}, epsilon {epsilon:g}{', powers of 2' * power}"
        args = (2048, draw.flag(), [given, *made], largest, power, epsilon)
        yield Case(name, args, (None,), left=left, exact=Exact(None, values))


def _inverse(scale: Tensor) -> Tensor:
    return scale.double() ** -1


# ---- slices of a weight ------------------------------------------------------------------------

_SLICES = (
    (19, 26, 4, (0, 5, 200, 201, 494)),
    (19, 26, 16, (0, 26, 494)),
    (128, 256, 128, (0, 100, 128 * 129, 128 * 256)),
    (5, 3, 8, (0, 15)),
    (1, 1, 4, (0, 1)),
    (6, 8, 4, (0, 20, 20, 48)),  # a slice of nothing
)


def _parts(draw: Draw) -> Iterator[tuple]:
    """(name, a slice, shape of its weight, of the tiles, where it begins, their side)."""
    for dtype, (h, w, side, cuts) in product(draw.dtypes, _SLICES):
        weight = draw.normal((h, w), dtype).flatten()
        for first, end in pairwise(cuts):
            name = f"{name_of(dtype)} [{first}:{end}] of {[h, w]}, tiles of {side}"
            yield name, weight[first:end], (h, w), (-(-h // side), -(-w // side)), first, side


@Case.of("fp8_block_scaling_compute_partial_amax")
def _partial_amax(draw: Draw) -> Iterator[Case]:
    for name, part, sizes, shape, first, side in _parts(draw):
        amax = torch.full(shape, -1.0, dtype=torch.float32, device=draw.device)
        left = ((amax, Result("amax", depth=0)),)
        yield Case(name, (part, amax, *sizes, first, side), (None,), left=left, wide=False)


@Case.of("fp8_block_scaling_partial_cast")
def _partial_cast(draw: Draw) -> Iterator[Case]:
    """The codes of a slice lie among those of others."""
    for (name, part, sizes, shape, first, side), (code, kind) in product(
        _parts(draw), fp8_dtypes()
    ):
        scale = (draw.uniform(shape) * torch.finfo(kind).max).float()  # some numbers saturate
        whole = torch.full((math.prod(sizes),), 0x55, dtype=torch.uint8, device=draw.device)
        out = whole[first : first + len(part)]
        args = (part, out, scale, *sizes, first, side, code)
        left = ((out, Result("the codes", depth=0)),)
        yield Case(f"{name} {name_of(kind)}", args, (None,), left=left, wide=False)


@Case.of("multi_tensor_compute_scale_inv_e8m0")
def _exponents(draw: Draw) -> Iterator[Case]:
    special = (0.0, math.inf, math.nan, 448.0, 450.0, 2.0**-20, 896.0)
    for dtype in draw.dtypes:
        drawn = draw.normal((9,), torch.float32).abs()
        given = [drawn.to(dtype), drawn.new_tensor(special).to(dtype)]
        made = [draw.place(t.shape, torch.uint8) for t in given]
        left = [(out, Result(f"out {i}", depth=0)) for i, out in enumerate(made)]
        exact = [[_exponent(value) for value in amaxes.double().tolist()] for amaxes in given]
        values = Exact(None, [torch.tensor(each, dtype=torch.uint8) for each in exact])
        yield Case(name_of(dtype), (2048, None, [given, made]), (None,), left=left, exact=values)


def _exponent(amax: float) -> int:
    """Of amax / 448, rounded up."""
    if not math.isfinite(amax):
        return 255 if math.isnan(amax) else 254
    mantissa, exponent = math.frexp(amax / 448.0)
    return 0 if amax == 0.0 else exponent - (mantissa == 0.5) + 127
