# SPDX-License-Identifier: Apache-2.0
"""``NVTE_PLUGIN``: a module that may put its own ``transformer_engine_torch`` in place of ours.

This library's own operators are then in ``transformer_engine_torch_nv``, whoever is selected. The
operators of the other module are implementations of kind DEFAULT that come before ours, so that
modules run them, and a policy that names others goes first.
"""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

from transformer_engine.common import config
from transformer_engine.plugin.builtin import OPERATORS, register_builtins
from transformer_engine.plugin.core.registry import OpRegistry
from transformer_engine.plugin.core.types import BackendImplKind, OpImpl

PRIORITY = 1000
"""Of the other module's operators; those of this library have 150."""
_MODULE, _NATIVE = "transformer_engine_torch", "transformer_engine_torch_nv"
_FLASH, _CLASS = "flash_attention", "get_flash_attention_class"
_loaded: dict[str, ModuleType | None] = {}
"""By the variable's value: the module that has come in place of ours, None where that failed."""
_ours: list[ModuleType] = []
"""Ours, under both names."""


def _natively(function: Callable) -> Callable:
    """The function, so that what it runs of this library asks nobody: it may be what was asked."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        from transformer_engine.pytorch.execution.overrides import natively

        with natively():
            return function(*args, **kwargs)

    return run


def _native_module(operators: ModuleType) -> ModuleType:
    """Ours under the other name: its operators are this library's own, whatever is in force."""
    made, registry = ModuleType(_NATIVE, operators.__doc__), OpRegistry()
    register_builtins(registry)
    own = {op: registry.get_implementations(op)[0].fn for op in OPERATORS}
    found = {name: value for name, value in vars(operators).items() if name not in vars(made)}
    own[_FLASH] = lambda *args, **kwargs: own[_CLASS]()(*args, **kwargs)
    found |= {name: _natively(function) for name, function in own.items()}
    vars(made).update(found, __getattr__=functools.partial(getattr, operators))
    return made


def load() -> None:
    """Have the module load that the variable names, once; ours is complete then.

    A RuntimeWarning, and ours stays in place, where that fails: it has no ``load_plugins()``, or
    something raises.
    """
    name = config.TE_PLUGIN.get()
    if not name or name in _loaded:
        return
    before = {module: sys.modules.get(module) for module in (_MODULE, _NATIVE)}
    operators = before[_MODULE] or importlib.import_module(_MODULE)
    _loaded[name] = None  # what asks meanwhile asks for ours
    sys.modules[_NATIVE] = _native_module(operators)
    _ours[:] = operators, sys.modules[_NATIVE]
    try:
        importlib.import_module(name).load_plugins()
        replaced = sys.modules[_MODULE]
        if replaced is not operators:
            _operators_of(replaced, name)  # what it can not give fails here
            _loaded[name] = replaced
            _ask_for_backends(replaced)
    except Exception as error:  # noqa: BLE001 - whatever it is, ours stays in place
        for module, former in before.items():
            sys.modules.pop(module, None)
            if former is not None:
                sys.modules[module] = former
        _loaded[name] = None
        warnings.warn(
            f"NVTE_PLUGIN={name} is not used, it failed to load: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=2,
        )


def _operators_of(module: ModuleType, name: str) -> list[OpImpl]:
    """Implementations out of what a module has that is not ours."""
    found = {}
    for op in (*OPERATORS, _FLASH):
        function = getattr(module, op, None)
        if callable(function) and all(function is not getattr(own, op, None) for own in _ours):
            found[op] = function
    flash = found.pop(_FLASH, None)
    if flash is not None and _CLASS not in found:

        def flash_attention(*args: Any, **kwargs: Any) -> Any:
            return flash(*args, **kwargs)

        found[_CLASS] = lambda: flash_attention
    kind = BackendImplKind.DEFAULT
    return [OpImpl(op, f"default.{name}", kind, fn, None, PRIORITY) for op, fn in found.items()]


def _ask_for_backends(module: ModuleType) -> None:
    """`get_attention_backend` of programs is the module's, where it has one."""
    if hasattr(module, "get_attention_backend"):
        utils = importlib.import_module(
            "transformer_engine.pytorch.attention.dot_product_attention.utils"
        )
        utils._original_get_attention_backend = utils.get_attention_backend
        utils.get_attention_backend = module.get_attention_backend


def register(registry: OpRegistry) -> None:
    """Register the operators of the other module, where there is one."""
    load()
    name = config.TE_PLUGIN.get()
    module = _loaded.get(name)
    if module is not None:
        registry.register_many(_operators_of(module, name))
