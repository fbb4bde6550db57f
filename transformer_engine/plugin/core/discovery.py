# SPDX-License-Identifier: Apache-2.0
"""Finding plug-ins: entry points of installed packages, and modules that the environment names."""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from transformer_engine.common.config import TE_FL_PLUGIN_MODULES
from transformer_engine.plugin.core.logger_manager import LoggerManager
from transformer_engine.plugin.core.registry import OpRegistry

__all__ = [
    "PLUGIN_GROUP",
    "PLUGIN_MODULES_ENV",
    "clear_discovered_plugin",
    "discover_from_entry_points",
    "discover_from_env_modules",
    "discover_op_plugin",
    "discover_plugin",
    "get_discovered_plugin",
]

PLUGIN_GROUP = "te_fl.plugin"
"""Group of entry points, each a module or a function that registers."""
PLUGIN_MODULES_ENV = TE_FL_PLUGIN_MODULES.name

_found: list[tuple[str, str, bool]] = []


def discover_plugin(registry: OpRegistry) -> int:
    """Let every plug-in register; the number of those that did.

    One that fails is told once, by the logger, and leaves nothing in the registry. Into the
    registry of the process go this library's own implementations first.
    """
    _register_own(registry)
    return discover_from_entry_points(registry) + discover_from_env_modules(registry)


discover_op_plugin = discover_plugin


def _register_own(registry: OpRegistry) -> None:
    """Register the built-in implementations, if the registry is that of the default manager."""
    default = getattr(sys.modules.get(f"{__package__}.manager"), "_default", None)
    if default is not None and default.registry is registry:
        from transformer_engine.plugin.builtin import register_builtins

        register_builtins(registry)


def discover_from_entry_points(registry: OpRegistry) -> int:
    """`discover_plugin`, of installed packages."""
    from importlib.metadata import entry_points

    found = entry_points(group=PLUGIN_GROUP)
    return sum(_load(point.name, "entry_point", point.load, registry) for point in found)


def discover_from_env_modules(registry: OpRegistry) -> int:
    """`discover_plugin`, of the modules that ``TE_FL_PLUGIN_MODULES`` names."""
    return sum(
        _load(name, "env_module", lambda name=name: _import(name), registry)
        for name in TE_FL_PLUGIN_MODULES.get()
    )


def get_discovered_plugin() -> list[tuple[str, str, bool]]:
    """(name, "entry_point" or "env_module", whether it registered) of all that were found."""
    return list(_found)


def clear_discovered_plugin() -> None:
    """Forget them; what they have registered stays."""
    _found.clear()


def _import(name: str) -> Any:
    if name.endswith(".so"):
        raise NotImplementedError(
            "plug-ins that are shared objects are not built yet: name a Python module"
        )
    return importlib.import_module(name)


def _load(name: str, source: str, load: Callable[[], Any], registry: OpRegistry) -> bool:
    """Load a plug-in and let it register."""
    before = set(_names(registry))
    done = False
    try:
        _entry_of(load())(registry)
        done = True
    except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the program
        for op, impl_id in set(_names(registry)) - before:
            registry.unregister(op, impl_id)
        LoggerManager.get_logger().error(
            "plug-in %s (%s) did not register: %s: %s", name, source, type(error).__name__, error
        )
    _found.append((name, source, done))
    return done


def _names(registry: OpRegistry) -> Iterator[tuple[str, str]]:
    for op, impls in registry.snapshot().impls_by_op.items():
        for impl in impls:
            yield op, impl.impl_id


def _entry_of(loaded: Any) -> Callable[[OpRegistry], Any]:
    """The function of a plug-in that registers; TypeError where it has none."""
    if callable(loaded) and not isinstance(loaded, type):
        return loaded
    for name in ("te_fl_register", "register"):
        found = getattr(loaded, name, None)
        if callable(found):
            return found
    raise TypeError("it is no function and has no te_fl_register(registry) or register(registry)")
