# SPDX-License-Identifier: Apache-2.0
"""Cases of activations, their gradients, and those with column sums."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from transformer_engine.plugin.builtin import ACTIVATIONS
from transformer_engine.plugin.conformance.cases import Case, Draw, Result, name_of
from transformer_engine.plugin.conformance.casts import quantizers_of_values

_SHAPES = ((5, 48), (1, 16), (3, 7, 32), (33, 130), (0, 16), (16,), (2, 0, 16))


def _inputs(draw: Draw) -> Iterator[tuple[str, Tensor]]:
    for dtype in draw.dtypes:
        what = name_of(dtype)
        for shape in _SHAPES:
            yield f"{what} {list(shape)}", draw.normal(shape, dtype)
        x = draw.normal((4, 32), dtype, 4.0)
        yield f"{what} large", x
        yield f"{what} strided", draw.strided(x)
        yield f"{what} zeros", torch.zeros_like(x)
        if dtype != torch.float32:  # where 1 + tanh cancels in that
            yield f"{what} below -2", (-2 - draw.uniform((4, 32))).to(dtype)


def _broken(draw: Draw) -> Iterator[tuple[str, Tensor]]:
    for dtype in draw.dtypes:
        x = draw.normal((4, 32), dtype)
        x[1, 3] = math.nan
        yield f"{name_of(dtype)} NaN", x


def _numbers(op: str) -> tuple[tuple, ...]:
    """Further arguments of an operator, for the cases that have some."""
    return ((), (2.5, 0.9)) if op.startswith("clamped") else ((),)


@Case.of(*ACTIVATIONS)
def _forward(op: str, draw: Draw) -> Iterator[Case]:
    given = [(name, x, numbers) for numbers in _numbers(op) for name, x in _inputs(draw)]
    given += [(name, x, ()) for name, x in _broken(draw)]
    for name, x, numbers in given:
        wanted = (Result("the result", x.dtype),)
        yield Case(f"{name} {numbers or ''}".rstrip(), (x, None, *numbers), wanted)
    for dtype in draw.dtypes:
        for kind, quantizer in quantizers_of_values(draw.device).items():
            wanted = (Result("the result", quantizer=quantizer),)
            x = draw.normal((32, 64), dtype)
            yield Case(f"{name_of(dtype)} cast, {kind}", (x, quantizer), wanted)


@Case.of(*itertools.chain(*ACTIVATIONS.values()))
def _backward(op: str, draw: Draw) -> Iterator[Case]:
    # NaN, but where a step or a clamp is differentiated: its derivative there is anybody's.
    steps = op.endswith(("drelu", "dreglu", "clamped_dswiglu"))
    for numbers in _numbers(op):
        for name, x in (*_inputs(draw), *(() if steps else _broken(draw))):
            columns = x.shape[-1] // (2 if op.endswith("glu") else 1)
            grad = draw.normal((*x.shape[:-1], columns), x.dtype)
            wanted: tuple = (Result("the gradient", x.dtype),)
            if op.startswith("dbias_"):
                rows = max(x.numel() // x.shape[-1], 1)
                wanted = (Result("the gradient of the bias", x.dtype, rows), *wanted)
            yield Case(f"{name} {numbers or ''}".rstrip(), (grad, x, None, *numbers), wanted)
