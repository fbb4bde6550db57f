# SPDX-License-Identifier: Apache-2.0
"""Cases of activations, their gradients, and those with column sums."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import (
    Case,
    Draw,
    counted,
    gradients,
    name_of,
    near,
)
from transformer_engine.plugin.conformance.casts import coded, quantizers_of_values

_SHAPES = ((5, 48), (1, 16), (3, 7, 32), (33, 130), (0, 16), (16,), (2, 0, 16))
_UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": lambda x: x * (x > 0),
    "srelu": lambda x: x * x * (x > 0),
    "silu": lambda x: x * torch.sigmoid(x),
}
_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "glu": torch.sigmoid,
    "geglu": _UNGATED["gelu"],
    "qgeglu": _UNGATED["qgelu"],
    "reglu": _UNGATED["relu"],
    "sreglu": _UNGATED["srelu"],
    "swiglu": _UNGATED["silu"],
}


def _clamped(limit: float, alpha: float) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        first, second = first.clamp(max=limit), second.clamp(-limit, limit)
        return first * torch.sigmoid(alpha * first) * (second + 1)

    return run


def _gated(name: str) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return _GATED[name](first) * second

    return run


FUNCTIONS = {**_UNGATED, **{name: _gated(name) for name in _GATED}}


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


def _broken(op: str, draw: Draw) -> Iterator[tuple[str, Tensor]]:
    """NaN, but where a step or a clamp is differentiated: its derivative there is anybody's."""
    for dtype in () if op.endswith(("drelu", "dreglu", "clamped_dswiglu")) else draw.dtypes:
        x = draw.normal((4, 32), dtype)
        x[1, 3] = math.nan
        yield f"{name_of(dtype)} NaN", x


def _numbers(op: str) -> tuple[tuple, ...]:
    """Further arguments of an operator, for the cases that have some."""
    return ((), (2.5, 0.9)) if op.startswith("clamped") else ((),)


def _function(op: str, numbers: tuple) -> Callable[[Tensor], Tensor]:
    name = op.removeprefix("dbias_")
    if name.startswith("clamped"):
        return _clamped(*(numbers or (7.0, 1.702)))
    return FUNCTIONS[name if name in FUNCTIONS else name.removeprefix("d")]


def _forward(op: str, draw: Draw) -> Iterator[Case]:
    for numbers in _numbers(op):
        function = _function(op, numbers)
        for name, x in _inputs(draw):
            exact = function(x.double())

            def wanted(found: Tensor, exact: Tensor = exact, dtype: torch.dtype = x.dtype) -> list:
                return [near("the result", found, exact, dtype)]

            yield Case(f"{name} {numbers or ''}".rstrip(), (x, None, *numbers), wanted)
    for dtype in draw.dtypes:
        for kind, quantizer in quantizers_of_values(draw.device).items():
            x = draw.normal((32, 64), dtype)
            exact = _function(op, ())(x.double())

            def cast(found: Any, exact: Tensor = exact, quantizer: Any = quantizer) -> list:
                return [coded("the result", found, quantizer, exact)]

            yield Case(f"{name_of(dtype)} cast, {kind}", (x, quantizer), cast)
        x = draw.normal((4, 32), dtype)
        x[1, 3] = math.nan
        exact = _function(op, ())(x.double())

        def nan(found: Tensor, exact: Tensor = exact, dtype: torch.dtype = dtype) -> list:
            return [near("the result", found, exact, dtype)]

        yield Case(f"{name_of(dtype)} NaN", (x, None), nan)


def _backward(op: str, draw: Draw) -> Iterator[Case]:
    for numbers in _numbers(op):
        function = _function(op, numbers)
        for name, x in (*_inputs(draw), *_broken(op, draw)):
            grad = draw.normal(tuple(function(x.double()).shape), x.dtype)
            (exact,) = gradients(function, grad, x)
            rows = max(x.numel() // x.shape[-1], 1)

            def wanted(
                found: tuple | Tensor,
                exact: Tensor = exact,
                dtype: torch.dtype = x.dtype,
                rows: int = rows,
            ) -> list:
                if not op.startswith("dbias_"):
                    return [near("the gradient", found, exact, dtype)]
                sums = exact.reshape(-1, exact.shape[-1]).sum(0)
                counted(found, 2)
                return [
                    near("the gradient of the bias", found[0], sums, dtype, rows),
                    near("the gradient", found[1], exact, dtype),
                ]

            yield Case(f"{name} {numbers or ''}".rstrip(), (grad, x, None, *numbers), wanted)


CASES = {name: _forward for name in (*FUNCTIONS, "clamped_swiglu")}
CASES |= {f"d{name}": _backward for name in FUNCTIONS} | {"clamped_dswiglu": _backward}
CASES |= {f"dbias_d{name}": _backward for name in _UNGATED}
