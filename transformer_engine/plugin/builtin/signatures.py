# SPDX-License-Identifier: Apache-2.0
"""Signatures of operators: the stub of `transformer_engine_torch` is the one list of them.

Implementations with many arguments are functions of one object, which has these by name.
"""

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable
from inspect import Signature
from pathlib import Path
from typing import Any

import transformer_engine

_STUB = Path(transformer_engine.__file__).parents[1] / "transformer_engine_torch/__init__.pyi"


@functools.cache
def _stubs() -> dict[str, Any]:
    """Functions of the stub, which is Python, by name."""
    found: dict[str, Any] = {}
    exec(compile(_STUB.read_text(encoding="utf-8"), _STUB, "exec"), found)
    return found


@functools.cache
def signature(op: str) -> Signature:
    """Of an operator."""
    return inspect.signature(_stubs()[op])


def operator(function: Callable, op: str = "") -> Callable:
    """Make a function an implementation of the operator of its name, or of `op` (decorator).

    It gets the arguments by name, as attributes of one object, and the places of results
    (`values.placed`) where it has a parameter `out`.
    """
    op = op or function.__name__
    return taking(signature(op), function, op)


def define(module: dict[str, Any], op: str, function: Callable, doc: str) -> None:
    """Define an operator in a module, by its ``globals()``; see `operator`."""
    made = module[op] = operator(function, op)
    made.__module__, made.__doc__ = module["__name__"], doc


def taking(own: Signature, function: Callable, name: str) -> Callable:
    """Make a function of one object one of arguments; see `operator`."""
    with_places = "out" in inspect.signature(function).parameters
    positional = [one for one in own.parameters.values() if one.kind is not one.KEYWORD_ONLY]
    own = own if with_places else own.replace(parameters=positional)
    defaults = [one.default for one in positional if one.default is not one.empty]
    made: Any = namedtuple(name, [one.name for one in positional], defaults=defaults)  # noqa: PYI024

    def call_of(args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            return made(*args, **kwargs)
        except TypeError:
            own.bind(*args, **kwargs)  # says what is wrong by the names of the operator
            raise

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(call_of(args, kwargs))

    def run_placing(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        return function(call_of(args, kwargs), out)

    found: Any = run_placing if with_places else run
    found.__name__ = found.__qualname__ = name
    found.__module__, found.__doc__ = function.__module__, function.__doc__
    found.__signature__ = own
    return found
