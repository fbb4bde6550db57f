# SPDX-License-Identifier: Apache-2.0
"""Classes that plug-ins of the fork derive from, or ask for the operators."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from transformer_engine.plugin.builtin import OPERATORS
from transformer_engine.plugin.core.manager import OpManager, get_manager, reset_registry

__all__ = ["TEFLBackendBase", "TEFLModule", "get_tefl_module", "reset_tefl_module"]


class TEFLBackendBase:
    """Base of a class with a method for each operator, of which it defines those that it has.

    The methods are registered as functions of an `OpImpl`; here each raises NotImplementedError.
    """

    def is_available(self) -> bool:
        """Return whether they can run in this process."""
        return True


def _lacking(name: str) -> Callable:
    def method(self: TEFLBackendBase, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no {name}")

    method.__name__ = name
    method.__qualname__ = f"TEFLBackendBase.{name}"
    method.__doc__ = f"The operator `{name}`."
    return method


for _name in OPERATORS:
    setattr(TEFLBackendBase, _name, _lacking(_name))


class TEFLModule:
    """The operators of a manager as attributes, and what else `transformer_engine_torch` has.

    Parameters
    ----------
    manager : OpManager, optional
        That of the process where None.
    """

    def __init__(self, manager: OpManager | None = None) -> None:
        found = get_manager() if manager is None else manager
        self.__dict__.update(vars(get_tefl_module()), __name__=type(self).__name__)
        self.__dict__.update({name: found.operator(name) for name in OPERATORS})
        self._manager = found

    def __getitem__(self, name: str) -> Any:
        """An attribute; KeyError where there is none."""
        return self.__dict__[name]

    def __repr__(self) -> str:
        return f"<TEFLModule of {len(OPERATORS)} operators>"


def get_tefl_module() -> ModuleType:
    """The module `transformer_engine_torch`."""
    return importlib.import_module("transformer_engine_torch")


reset_tefl_module = reset_registry


def __getattr__(name: str) -> Any:
    if name == "tefl":  # that of the process, made where somebody asks for it
        return get_tefl_module()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
