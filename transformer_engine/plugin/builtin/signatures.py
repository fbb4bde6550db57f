# SPDX-License-Identifier: Apache-2.0
"""Signatures of operators: the stub of `transformer_engine_torch` is the one list of them.

Implementations with many arguments are functions of one object, which has these by name.
"""

import ast
import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import torch

import transformer_engine
from transformer_engine.plugin.core import ops

_STUB = Path(transformer_engine.__file__).parents[1] / "transformer_engine_torch/__init__.pyi"
_NAMES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, list, tuple, type)},
    "Callable": Callable,
    "Sequence": Sequence,
    **{"Any": Any, "Tensor": torch.Tensor, "Generator": torch.Generator, "dtype": torch.dtype},
    **{"torch": torch, "ops": ops},
}
"""Names that annotations of arguments consist of."""


@functools.cache
def _definitions() -> dict[str, ast.FunctionDef]:
    found: dict[str, ast.FunctionDef] = {}
    for node in ast.parse(_STUB.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name):
                found[name] = node
            case ast.Assign(targets=others, value=ast.Name(id=name)):
                found.update((other.id, found[name]) for other in others)
    return found


def _type(node: ast.expr | None) -> Any:
    """The type that an annotation of the stub means."""
    match node:
        case ast.Name(id=name):
            return _NAMES[name]
        case ast.Attribute(value=owner, attr=name):
            return getattr(_type(owner), name)
        case ast.Subscript(value=generic, slice=arguments):
            return _type(generic)[_type(arguments)]
        case ast.Tuple(elts=elements):
            return tuple(map(_type, elements))
        case ast.BinOp(left=one, right=other):
            return _type(one) | _type(other)
    return ast.literal_eval(node)


@functools.cache
def signature(op: str) -> Signature:
    """Of an operator."""
    node = _definitions()[op]
    given = node.args
    defaults = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    parameters = [
        Parameter(
            one.arg,
            kind,
            default=Parameter.empty if default is None else ast.literal_eval(default),
            annotation=_type(one.annotation),
        )
        for kind, names, values in (
            (Parameter.POSITIONAL_OR_KEYWORD, given.args, defaults),
            (Parameter.KEYWORD_ONLY, given.kwonlyargs, given.kw_defaults),
        )
        for one, default in zip(names, values, strict=True)
    ]
    return Signature(parameters, return_annotation=_type(node.returns))


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
