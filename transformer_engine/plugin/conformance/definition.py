# SPDX-License-Identifier: Apache-2.0
"""Results beside what they are to be: mostly the definition's, ``reference.torch`` in float64."""

import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin import builtin
from transformer_engine.plugin.conformance.cases import Case, Exact, Result, Wanted


def definition(op: str) -> Callable[..., Any]:
    """The function that says what an operator computes."""
    for module, names in (builtin.REFERENCE | builtin.SHARED).items():
        if op in names.split():
            return getattr(importlib.import_module(f"{builtin.__name__}.{module}"), op)
    raise LookupError(f"{op} has no definition: its cases say what they want")


def defined(op: str, case: Case) -> Exact:
    """What a case gives: as it says, or as the definition does with copies of its arguments."""
    exact = case.exact
    if exact is None and callable(case.wanted):
        exact = Exact()
    if exact is None:
        made: dict[int, Any] = {}
        copied = _wide if case.wide else copy.deepcopy
        args = [copied(one, made) for one in case.args]
        kwargs = {name: copied(one, made) for name, one in case.kwargs.items()}
        with torch.no_grad():
            results = definition(op)(*args, **kwargs)
        exact = Exact(results, [made[id(tensor)] for tensor, _ in case.left])
    there = [_joined(given) for given, _ in case.left]
    return exact._replace(before=[t.clone() if type(t) is Tensor else None for t in there])


def _joined(given: Any) -> Any:
    """All elements of a list of tensors, or what else is given; or what a function gives."""
    given = given() if callable(given) else given
    return torch.cat([t.flatten() for t in given]) if isinstance(given, list) else given


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


def compared(case: Case, found: Any, exact: Exact) -> Iterator[Wanted]:
    """The results of a call, and what it has written, beside what it is to give."""
    if callable(case.wanted):
        yield from case.wanted(found)
    else:
        values, results = (found,), (exact.results,)
        if isinstance(exact.results, tuple | list):
            values, results = found, exact.results
            if not isinstance(found, list | tuple):
                raise ValueError(f"{type(found).__name__}, expected {len(results)} results")
            if len(found) != len(results):
                raise ValueError(f"{len(found)} results, expected {len(results)}")
        for result, one, other in zip(case.wanted, values, results, strict=True):
            if result is None or (one is None and result.may_lack):
                continue
            if other is None and one is not None:
                raise ValueError(f"{result.name}, which there is not")
            if other is not None:
                yield from result.beside(one, other)
    for (given, result), to_be, before in zip(case.left, exact.left, exact.before, strict=True):
        now, then = _joined(given), _joined(to_be)
        yield from result.beside(now, then)
        if before is not None:
            stays = then.to(before.device) == before.to(then.dtype)
            kept = Result(f"what stays of {result.name}", depth=0)
            yield from kept.beside(now[stays], before[stays])
