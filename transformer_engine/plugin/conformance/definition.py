# SPDX-License-Identifier: Apache-2.0
"""Results of the definition of an operator, its ``reference.torch``, in float64."""

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.plugin import builtin
from transformer_engine.plugin.conformance.cases import Case, Result, Wanted, coded, near, same


def definition(op: str) -> Callable[..., Any]:
    """The function that says what an operator computes."""
    for module, names in (builtin.REFERENCE | builtin.SHARED).items():
        if op in names.split():
            return getattr(importlib.import_module(f"{builtin.__name__}.{module}"), op)
    raise LookupError(f"{op} has no definition: its cases say what they want")


class Defined(NamedTuple):
    """Results of a definition, and what it leaves in the arguments of `Case.left`."""

    results: Any
    left: list[Tensor]
    before: list[Tensor]  # what was in these


def defined(op: str, case: Case) -> Defined | None:
    """Run the definition on copies of a case's arguments; None for a case with its own values."""
    if callable(case.wanted):
        return None
    made: dict[int, Any] = {}
    copied = _wide if case.wide else copy.deepcopy
    args = [copied(one, made) for one in case.args]
    kwargs = {name: copied(one, made) for name, one in case.kwargs.items()}
    with torch.no_grad():
        results = definition(op)(*args, **kwargs)
    left = [made[id(tensor)] for tensor, _ in case.left]
    return Defined(results, left, [tensor.clone() for tensor, _ in case.left])


def widened(args: Sequence[Any]) -> list:
    """Copies of arguments in float64, for a definition."""
    made: dict[int, Any] = {}
    return [_wide(one, made) for one in args]


def _wide(value: Any, made: dict[int, Any]) -> Any:
    """A copy of an argument in float64, if it is in high precision; nothing is cast."""
    if isinstance(value, list | tuple):
        return type(value)(_wide(one, made) for one in value)
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point and value.itemsize > 1 else value
    if hasattr(value, "make_empty"):  # a quantizer
        return None
    if hasattr(type(value), "_dequantized"):
        return value.dequantize(dtype=torch.float32).double()
    if not isinstance(value, Tensor):
        return value
    if id(value) not in made:
        is_wide = value.is_floating_point() and value.element_size() > 1
        made[id(value)] = value.to(torch.float64 if is_wide else value.dtype, copy=True)
    return made[id(value)]


def compared(case: Case, found: Any, exact: Defined) -> Iterator[Wanted]:
    """The results of a call, and what it has written, beside those of the definition."""
    several = isinstance(exact.results, tuple | list)
    values = counted(found, len(exact.results)) if several else (found,)
    results = exact.results if several else (exact.results,)
    for result, one, other in zip(case.wanted, values, results, strict=True):
        if result is None or (one is None and result.may_lack):
            continue
        if other is None and one is not None:
            raise ValueError(f"{result.name}, which there is not")
        if other is not None:
            yield _beside(result, one, other)
    for (tensor, result), other, before in zip(case.left, exact.left, exact.before, strict=True):
        yield _beside(result, tensor, other)
        stays = other == before.to(other.dtype)
        yield same(f"what stays of {result.name}", tensor[stays], before[stays])


def counted(found: Any, count: int) -> Sequence[Any]:
    """Results of which there are as many; ValueError for anything else."""
    if not isinstance(found, list | tuple):
        raise ValueError(f"{type(found).__name__}, expected {count} results")
    if len(found) != count:
        raise ValueError(f"{len(found)} results, expected {count}")
    return found


def _beside(result: Result, found: Any, exact: Tensor) -> Wanted:
    """A result and the definition's."""
    name, dtype = result.name, result.dtype
    if result.quantizer is not None and (dtype is None or type(found) is not Tensor):
        return coded(name, found, result.quantizer, exact)
    if result.finite and getattr(found, "shape", None) == exact.shape:
        seen = exact.isfinite()
        found, exact = found[seen], exact[seen]
    if result.depth == 0:
        return same(name, found, exact if dtype is None else exact.to(dtype))
    return near(name, found, exact, dtype, result.depth, result.steps, result.terms)
