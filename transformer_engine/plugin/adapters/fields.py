# SPDX-License-Identifier: Apache-2.0
"""Fields of a call of an operator of the C library, and where results are put."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.adapters import (
    PLACED,
    UNEXPRESSED,
    Asked,
    Mapped,
    device_of,
    has_kernels,
    refusals,
)
from transformer_engine.plugin.core.failures import NobodyError, is_of_implementation
from transformer_engine.pytorch.cpp_extensions.values import matrix
from transformer_engine.pytorch.execution.overrides import native
from transformer_engine.pytorch.torchside.device import KERNELS
from transformer_engine.pytorch.torchside.modes import (
    any_autocast,
    in_own_dtypes,
    inside_operator,
    with_autograd,
)

Fields = Mapping[str, Any]
"""Fields of a call by name: tensors over the memory of the call, None where absent, numbers."""


def _takes_out(function: Callable) -> bool:
    """Return whether it takes places of results: what passes on any keyword may not name `out`."""
    try:
        parameter = inspect.signature(function).parameters.get("out")
    except (TypeError, ValueError):  # of what has none to show
        return False
    return parameter is not None and parameter.kind is parameter.KEYWORD_ONLY


class NotTakenError(Exception):
    """Nobody takes a call: this library's own implementation runs it."""


def taken(found: Any) -> Any:
    """What a choice has answered; NotTakenError where that is that nobody takes the call."""
    if found is NotImplemented:
        raise NotTakenError
    return found


def _nobody(*args: Any, **kwargs: Any) -> Any:
    """Answer as the choice of an operator that nobody else has."""
    return NotImplemented


class Choices(dict):
    """Implementations in place of this library's own, by operator: a `_core.Choice` of each."""

    def __init__(
        self,
        asked: Mapping[str, tuple],
        names: tuple[str, ...],
        closed: frozenset[str],
        refuse: Callable,
    ) -> None:
        """Of those of `names` that somebody else has or that are closed; as of `selection`."""
        self._asked = {n: asked.get(n, ()) for n in names if n in asked or n in closed}
        self._closed, self._refuse = closed, refuse
        self._followed: dict[str, Any] = {}
        super().__init__((name, self._choice(name, name in closed)) for name in self._asked)

    def __missing__(self, name: str) -> Callable:
        return _nobody

    def _choice(self, name: str, raises: bool) -> Any:
        """Of an operator's implementations; whether it raises for a call that none takes."""
        asked = self._asked[name]
        placed = tuple(_takes_out(one.function) for one in asked) if name in PLACED else None
        return _core.Choice(name, asked, self._refuse if raises else None, placed)

    def followed(self, name: str, *others: str) -> Any:
        """Return the choice of `name` where `others` are asked next.

        It does not raise for a call that it does not take, if somebody has one of these: where
        they are closed, the last one does.
        """
        if name not in self._closed or not any(other in self for other in others):
            return self[name]
        if name not in self._followed:
            self._followed[name] = self._choice(name, False)
        return self._followed[name]

    def same_as(self, other: "Choices") -> bool:
        """Return whether the same ones are asked, and raise for the same calls."""
        closed = (found._closed.intersection(found._asked) for found in (self, other))
        return self._asked == other._asked and len(set(closed)) == 1

    def implementations(self) -> str:
        """Whose these are, for people."""
        pairs = ((name, one.impl_id) for name in self for one in self._asked[name])
        return ", ".join(f"{impl_id} ({name})" for name, impl_id in pairs)

    def unexpressed(self, name: str) -> NoReturn:
        """Have nobody take a call that an operator's arguments can not express."""
        if name in self._closed:
            self._refuse(name, self._asked[name], UNEXPRESSED)
        raise NotTakenError


def reads(*names: str) -> Callable[[Callable], Callable]:
    """Say which fields of a call an adapter is given (decorator); else it is given all."""

    def mark(adapter: Callable) -> Callable:
        adapter.reads = names
        return adapter

    return mark


def as_they_are(name: str, asked: Asked) -> Iterator[Callable]:
    """What a module calls of implementations of an operator of the C library: slots and functions.

    Functions get the fields. They ask nobody while they run, as of `adapted`.
    """
    for one, everywhere in asked.every(name):
        if isinstance(one.function, _core.NativeSlot):
            if everywhere or _core.device_type_name(one.function.device) not in KERNELS:
                yield one.function
            continue
        run = _apart(_core.Choice(name, (one,)))
        yield run if everywhere else _elsewhere(run)


def _elsewhere(run: Callable[[Fields], Any]) -> Callable[[Fields], Any]:
    """The same, asked on devices without kernels of this library alone."""
    return lambda fields: NotImplemented if has_kernels(fields) else run(fields)


def _apart(run: Callable[[Fields], Any]) -> Callable[[Fields], Any]:
    """Have a call ask nobody while it runs, and compute in the dtypes of its tensors."""
    run_apart = in_own_dtypes(with_autograd(run))

    @native
    def slot(fields: Fields) -> Any:
        return run_apart(fields) if any_autocast() or inside_operator() else run(fields)

    return slot


def _by_device(adapter: Callable, choices: Choices, elsewhere: Choices, fields: Fields) -> Any:
    found = choices if has_kernels(fields) else elsewhere
    return adapter(found, fields) if found else NotImplemented


def adapted(row: Mapped, choices: Choices, elsewhere: Choices) -> tuple[Callable, tuple[str, ...]]:
    """Adapter of a module's call of an operator, from its fields to arguments.

    `elsewhere` are the choices on devices without kernels of this library. It asks nobody while it
    runs, and computes in the dtypes of its tensors. What an implementation has raised says whose it
    is. Of an error that what one returned has led to, a note says who was asked.
    """
    module, _, name = row.adapter.partition(":")
    adapter = getattr(importlib.import_module(f"transformer_engine.plugin.adapters.{module}"), name)
    asked = elsewhere.implementations()
    if choices.same_as(elsewhere):
        run = _apart(functools.partial(adapter, choices))
    else:
        run = _apart(functools.partial(_by_device, adapter, choices, elsewhere))

    def slot(fields: Fields) -> Any:
        try:
            return run(fields)
        except NotTakenError:
            return NotImplemented
        except (NotImplementedError, NobodyError) as error:  # no one takes the call, or is there
            with refusals(f"te_{row.op}", device_of(fields)):
                raise error
        except Exception as error:
            if not is_of_implementation(error):
                error.add_note(f"in what came from {asked}")
            raise

    return slot, getattr(adapter, "reads", None) or fields_of(row.op)


def fields_of(op: str) -> tuple[str, ...]:
    """Names of the fields of an operator of the C library."""
    return tuple(name for name, *_ in _core.op_fields(op))


def apart(into: Tensor | None, *read: Tensor | None) -> Tensor | None:
    """Where a result goes, as a matrix; None where that is one of the tensors it is made of."""
    if into is None:
        return None
    address = into.data_ptr()
    if any(t is not None and t.data_ptr() == address for t in read):
        return None
    return matrix(into)


def sums_of(counts: Tensor) -> Tensor:
    """Of none, of the first, of the first two, ..., int32."""
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def written(op: str, name: str, out: Tensor | None, values: Any) -> None:
    """Put a result of an implementation where a call wants it.

    Leading dims may be others, vectors may have dims of 1, and numbers may be floating-point ones
    of another dtype. TypeError for what is no tensor or has other numbers, ValueError for one of
    another shape or on another device.
    """
    if out is None or values is out:
        return
    if not isinstance(values, Tensor):
        raise TypeError(f"{op}: {name}: {type(values).__name__}, expected a tensor")
    if out.dim() < 2:
        lines_fit = values.dim() < 2 or max(values.shape) == max(out.numel(), 1)
    else:
        lines_fit = values.shape[-1:] == out.shape[-1:]
    if values.numel() != out.numel() or not lines_fit:
        raise ValueError(f"{op}: {name}: shape {tuple(values.shape)}, expected {tuple(out.shape)}")
    if (
        values.data_ptr() == out.data_ptr()
        and values.dtype == out.dtype
        and _lie_alike(values, out)
    ):
        return
    if values.device != out.device:
        raise ValueError(f"{op}: {name}: on {values.device}, expected {out.device}")
    if values.dtype != out.dtype and not (values.is_floating_point() and out.is_floating_point()):
        raise TypeError(f"{op}: {name}: {values.dtype}, expected {out.dtype}")
    if not values.is_contiguous():  # it may be a view of the place itself
        values = values.contiguous()
    out.copy_(values.view(out.shape))


def _lie_alike(values: Tensor, out: Tensor) -> bool:
    """Return whether two tensors of one address and as many elements are the same elements."""
    if values.shape == out.shape:
        return values.stride() == out.stride()
    return values.is_contiguous() and out.is_contiguous()
