# SPDX-License-Identifier: Apache-2.0
"""Arguments of tools: a model, and modules of it to leave out."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable
from typing import Any

from torch.nn import Module


def check_model(caller: str, model: Any, argument: str = "model") -> None:
    """Raise a TypeError for what is no module."""
    if not isinstance(model, Module):
        kind = type(model).__name__
        raise TypeError(f"{caller}: {argument}: {kind}, expected a torch.nn.Module")


class Skip:
    """A ``skip`` argument of `caller`.

    It names modules by path (or a pattern of paths), class, object, or ``f(path, module) -> bool``,
    or is an iterable of these. TypeError for something else.
    """

    def __init__(self, caller: str, skip: Any) -> None:
        self._caller = caller
        single = isinstance(skip, str | Module) or callable(skip)
        if not single and not isinstance(skip, Iterable):
            raise TypeError(f"{caller}: skip={skip!r}, expected paths, classes or functions")
        self._patterns: list[str] = []
        self._classes: list[type] = []
        self._modules: list[Module] = []
        self._functions: list[Callable[[str, Module], Any]] = []
        for item in (skip,) if single else skip:
            if isinstance(item, str):
                self._patterns.append(item)
            elif isinstance(item, type):
                self._classes.append(item)
            elif isinstance(item, Module):
                self._modules.append(item)
            elif callable(item):
                self._functions.append(item)
            else:
                raise TypeError(
                    f"{caller}: skip: {item!r}, expected a path, a class, a module or a function "
                    "of path and module"
                )

    def matches(self, path: str, module: Module) -> bool:
        """Return whether it names this module."""
        return (
            any(fnmatch.fnmatchcase(path, pattern) for pattern in self._patterns)
            or isinstance(module, tuple(self._classes))
            or any(module is one for one in self._modules)
            or any(function(path, module) for function in self._functions)
        )

    def check(self, names: list[str]) -> None:
        """Raise for a path without wildcards that no module has."""
        for pattern in self._patterns:
            if not set(pattern) & set("*?[") and pattern not in names:
                close = difflib.get_close_matches(pattern, names, 3)
                hint = f"; did you mean {', '.join(map(repr, close))}?" if close else ""
                raise ValueError(f"{self._caller}: skip: the model has no module {pattern!r}{hint}")
