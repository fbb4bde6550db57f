# SPDX-License-Identifier: Apache-2.0
"""Cases of operators of the C library, ``te_<name>``: functions of fields, and shared objects.

An operator that operators of `transformer_engine_torch` are made of has their cases: these run as
this library computes them, with the implementation in the place of its operator. The others have
cases here, held to their definition.
"""

import contextlib
import copy
import importlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin import adapters, builtin, definitions
from transformer_engine.plugin.conformance.cases import Case, Draw, Exact, Result, name_of
from transformer_engine.plugin.core.types import OpImpl
from transformer_engine.pytorch.torchside.device import number_of_type

_FIRST = 2**31 - 1
"""Priority of what is asked before all others."""
_SHAPES = ((5, 24), (1, 7), (16, 64))
_LOCK = threading.Lock()


class Checked:
    """An implementation in the place of its operator, for calls of the C library in a check."""

    def __init__(self, impl: OpImpl) -> None:
        self.op = adapters.LIBRARY[impl.op_name]
        self.taken, self.said = 0, "no call came to it"
        if isinstance(impl.fn, _core.NativeSlot):
            self._run, self._takes = _of_slot(impl.fn), None
        else:
            self._run, self._takes = adapters.taking_fields(impl)
        if impl.impl_id == adapters.NATIVE:
            raise NotImplementedError(
                f"check: {impl.op_name}: this library's own is what others are checked in"
            )

    def __call__(self, fields: dict[str, Any]) -> Any:
        """Run a call, or say why not."""
        answer = self._takes is None or self._takes(fields)
        if isinstance(answer, str) or not answer:
            self.said = answer or "supports"
            return NotImplemented
        try:
            self._run(fields)
        except NotImplementedError as error:
            self.said = str(error)
            return NotImplemented
        self.taken += 1
        return None

    def within(self, function: Callable[..., Any], draw: Draw) -> Callable[..., Any]:
        """A function whose calls of the operator come to it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._in_place(draw.device):
                return function(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def _in_place(self, device: torch.device) -> Iterator[None]:
        """Have operators of this process on such devices be it, inside ``with``."""
        name = "of plugin.check"
        _core.fill(torch.empty(1, 1, device=device), 0.0)  # by which the type is met
        with _LOCK:
            _core.register_backend(name, number_of_type(device), _FIRST, {self.op: self})
            try:
                yield
            finally:
                _core.unregister_backend(name)


def _of_slot(slot: "_core.NativeSlot") -> Callable[[Mapping[str, Any]], None]:
    def run(fields: Mapping[str, Any]) -> None:
        slot(**{name: value for name, value in fields.items() if value is not None})

    return run


def cases_of(
    op: str, draw: Draw, others: Mapping[str, Callable[[Draw], Iterable[Case]]]
) -> Iterator[tuple[str, Callable[..., Any], Case]]:
    """(operator, function, case) of an operator of the C library; `others` make those of others."""
    if op in _OWN:
        own = getattr(_core, op)
        yield from (("", own, case) for case in _OWN[op](draw))
    for name in adapters.mapped_to(op):
        if name not in others:
            continue
        module = next(m for m, names in builtin.NATIVE.items() if name in names.split())
        function = getattr(importlib.import_module(f"{builtin.__name__}.{module}"), name)
        yield from ((name, function, case) for case in others[name](draw))


# ---- operators that no operator of transformer_engine_torch is ----------------------------------


def _defined(op: str, name: str, fields: dict[str, Any], *left: tuple[str, Result]) -> Case:
    """A call by its definition: what that leaves in the fields that it writes."""
    copied = copy.deepcopy(fields)
    bound = inspect.signature(getattr(_core, op)).bind(**copied)
    bound.apply_defaults()
    definitions.definition(op)(bound.arguments)
    return Case(
        name, (), (None,), fields, left=[(fields[name], result) for name, result in left],
        exact=Exact(None, [copied[name] for name, _ in left]),
    )  # fmt: skip


def _fills(draw: Draw) -> Iterator[Case]:
    for dtype, shape in itertools.product(draw.dtypes, _SHAPES):
        fields = {"output": draw.place(shape, dtype), "value": 1.5}
        name = f"{name_of(dtype)} {list(shape)}"
        yield _defined("fill", name, fields, ("output", Result("output", depth=0)))


def _casts(draw: Draw) -> Iterator[Case]:
    for dtype, into in itertools.product(draw.dtypes, draw.dtypes):
        for shape in _SHAPES:
            fields = {"input": draw.normal(shape, dtype), "output": draw.place(shape, into)}
            name = f"{name_of(dtype)} to {name_of(into)} {list(shape)}"
            yield _defined("cast", name, fields, ("output", Result("output", depth=0)))


def _pair(draw: Draw) -> Tensor:
    return torch.tensor([1234567, 8], dtype=torch.int64, device=draw.device)


def _dropouts(draw: Draw) -> Iterator[tuple[str, dict[str, Any], torch.dtype, tuple[int, int]]]:
    for dtype, shape in itertools.product(draw.dtypes, ((8, 24), (4, 7))):
        for dropout, path in ((0.0, 0.0), (0.3, 0.0), (0.0, 0.5), (0.3, 0.5)):
            name = f"{name_of(dtype)} {list(shape)} dropout {dropout} drop path {path}"
            given = {"dropout": dropout, "drop_path": path, "samples": 4}
            yield name, given | ({"rng": _pair(draw)} if dropout or path else {}), dtype, shape


def _drops(draw: Draw) -> Iterator[Case]:
    for name, given, dtype, shape in _dropouts(draw):
        fields = {"input": draw.normal(shape, dtype), "output": draw.place(shape, dtype), **given}
        for more in ({}, {"bias": draw.normal(shape[1:], dtype)},
                     {"residual": draw.normal(shape, dtype)}):  # fmt: skip
            what = f"{name} {' '.join(more)}".rstrip()
            fields = {**fields, "output": draw.place(shape, dtype), **more}
            yield _defined("dropout_add", what, fields, ("output", Result("output", dtype)))


def _drops_backward(draw: Draw) -> Iterator[Case]:
    for name, given, dtype, shape in _dropouts(draw):
        fields = {"grad_output": draw.normal(shape, dtype), **given}
        fields["grad_input"] = draw.place(shape, dtype)
        fields["bias_grad"] = draw.place(shape[1:], dtype)
        left = ("grad_input", Result("grad_input", dtype)), (
            "bias_grad", Result("bias_grad", dtype, shape[0], terms=fields["grad_output"]),
        )  # fmt: skip
        yield _defined("dropout_backward", name, fields, *left)


def _gathers(draw: Draw) -> Iterator[Case]:
    for dtype in draw.dtypes:
        for paged in (False, True):
            caches = (4, 4, 2, 8) if paged else (2, 8, 2, 8)
            fields = {f"{name}_cache": draw.normal(caches, dtype) for name in ("key", "value")}
            fields["lengths"] = torch.tensor([5, 8], dtype=torch.int32, device=draw.device)
            fields |= {name: draw.place((2, 8, 2, 8), dtype) for name in ("key", "value")}
            if paged:
                table = torch.tensor([[3, 0], [1, 2]], dtype=torch.int32, device=draw.device)
                fields["page_table"] = table
            left = (("key", Result("key", depth=0)), ("value", Result("value", depth=0)))
            yield _defined("cache_gather", name_of(dtype) + " pages" * paged, fields, *left)


def _merges(draw: Draw) -> Iterator[Case]:
    names = ("total_statistics", "step_statistics")
    for dtype, weighs in itertools.product(draw.dtypes, (False, True)):
        fields = {name: draw.normal((2, 5, 3, 24), dtype) for name in ("total", "step")}
        fields["output"] = draw.place((2, 5, 3, 24), dtype)
        left = [("output", Result("output", dtype))]
        if weighs:
            fields |= {name: draw.normal((2, 5, 3, 1), torch.float32) for name in names}
            fields["statistics"] = draw.place((2, 5, 3, 1), torch.float32)
            left.append(("statistics", Result("statistics", torch.float32)))
        name = name_of(dtype) + (" outputs" if weighs else " gradients")
        yield _defined("attention_merge", name, fields, *left)


def _caps(draw: Draw) -> Iterator[Case]:
    for dtype, shape in itertools.product(draw.dtypes, _SHAPES):
        for backward in (False, True):
            fields = {"input": draw.normal(shape, dtype, 40.0), "cap": 30.0}
            fields["wide"] = draw.place(shape, dtype)
            if backward:
                fields["grad_output"] = draw.normal(shape, dtype)
            name = f"{name_of(dtype)} {list(shape)}{' gradient' * backward}"
            yield _defined("softcap", name, fields, ("wide", Result("wide", dtype)))


_OWN: dict[str, Callable[[Draw], Iterator[Case]]] = {
    "fill": _fills,
    "cast": _casts,
    "dropout_add": _drops,
    "dropout_backward": _drops_backward,
    "cache_gather": _gathers,
    "attention_merge": _merges,
    "softcap": _caps,
}
