# SPDX-License-Identifier: Apache-2.0
"""Finding plug-ins: entry points of installed packages, and what the environment names.

A plug-in is a Python module or function, or a shared object (transformer_engine_plugin.h).
"""

import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from transformer_engine import _core
from transformer_engine.common import config
from transformer_engine.plugin.core.failures import nearest
from transformer_engine.plugin.core.logger_manager import LoggerManager
from transformer_engine.plugin.core.policy import EVERY
from transformer_engine.plugin.core.registry import OpRegistry
from transformer_engine.plugin.core.types import BackendImplKind, OpImpl, vendor_key

__all__ = [
    "PLUGIN_GROUP",
    "PLUGIN_MODULES_ENV",
    "clear_discovered_plugin",
    "discover_from_entry_points",
    "discover_from_env_modules",
    "discover_op_plugin",
    "discover_plugin",
    "get_discovered_plugin",
    "register_library",
]

PLUGIN_GROUP = "te_fl.plugin"
"""Group of entry points: a module or a function that registers, or the path of a shared object."""
PLUGIN_MODULES_ENV = config.TE_FL_PLUGIN_MODULES.name

_Plugin = tuple[str, str, str, Callable[[], Any]]
"""Name, source, what it is and loader: two packages may use one name."""
_Known = dict[tuple[str, str, str], Any]
_found: list[tuple[str, str, bool]] = []


def discover_plugin(registry: OpRegistry) -> int:
    """Let every plug-in register; the number of those that did.

    One that fails is told once, by the logger, and leaves nothing in the registry.
    """
    return discover_others(registry, {})


discover_op_plugin = discover_plugin


def discover_others(registry: OpRegistry, known: _Known) -> int:
    """`discover_plugin`, of those that are not in `known`; they are added there.

    Where that is interrupted, it goes on with the same `known`. One that is found by an entry point
    and by its name registers once.
    """
    return _load_all((*_entry_points(), *_env_modules()), registry, known)


def discover_from_entry_points(registry: OpRegistry) -> int:
    """`discover_plugin`, of installed packages."""
    return _load_all(_entry_points(), registry, {})


def discover_from_env_modules(registry: OpRegistry) -> int:
    """`discover_plugin`, of the modules and shared objects that ``TE_FL_PLUGIN_MODULES`` names."""
    return _load_all(_env_modules(), registry, {})


def _entry_points() -> Iterator[_Plugin]:
    from importlib.metadata import entry_points

    for point in entry_points(group=PLUGIN_GROUP):
        yield point.name, "entry_point", point.value, point.load


def _env_modules() -> Iterator[_Plugin]:
    for name in config.TE_FL_PLUGIN_MODULES.get():
        yield name, "env_module", name, lambda name=name: _named(name)
    if name := config.TE_PLUGIN.get():
        replacement = "transformer_engine.plugin.core.replacement"
        yield name, "NVTE_PLUGIN", name, lambda: importlib.import_module(replacement)


def get_discovered_plugin() -> list[tuple[str, str, bool]]:
    """(name, "entry_point", "env_module" or "NVTE_PLUGIN", whether it registered) of all found."""
    return list(_found)


def clear_discovered_plugin() -> None:
    """Forget them; what they have registered stays."""
    _found.clear()


def register_library(registry: OpRegistry, path: "str | os.PathLike[str]") -> None:
    """Register the operators of a shared object that exports ``te_plugin_init``.

    Each is an implementation of ``te_<name>``, the operator of that name of the C library, with
    `impl_id` ``vendor.<backend>`` or as its kind says; its function is a `_core.NativeSlot`.
    Beside it stands ``default.native``, this library's own. What the registry has of the very same
    slots stays as it is. ValueError where the file can not be loaded, is no plug-in, or has a name
    that is taken; or what its ``te_plugin_init`` failed with.
    """
    made = []
    for slot in _core.load_plugin(path):
        op, name = f"te_{slot.op}", f"{slot.kind}.{slot.backend}"
        known = registry.get_implementation(op, name)
        if known is None or known.fn is not slot:
            kind, given = BackendImplKind[slot.kind.upper()], (slot.vendor, slot.priority)
            made.append(OpImpl(op, name, kind, slot, *given, supports=slot.supports))
    for op in sorted({impl.op_name for impl in made}):
        if registry.get_implementation(op, "default.native") is None:
            native = getattr(_core, op.removeprefix("te_"))
            made.append(OpImpl(op, "default.native", BackendImplKind.DEFAULT, native))
    registry.register_many(made)


def warn_of_unknown(registry: OpRegistry) -> None:
    """Tell of operators, vendors and implementations in variables that nobody has registered."""
    by_op = registry.snapshot().impls_by_op
    impls = [impl for found in by_op.values() for impl in found]
    ops = {*by_op, *(f"te_{op}" for op in _core.op_names()), EVERY}
    vendors = {vendor_key(impl.vendor) for impl in impls if impl.vendor}
    ids = {impl.impl_id for impl in impls}
    orders = config.TE_FL_PER_OP
    named = [
        (variable, "vendor", vendor)
        for variable in (config.TE_FL_ALLOW_VENDORS, config.TE_FL_DENY_VENDORS)
        for vendor in variable.get()
    ]
    for op, tokens in orders.get():
        named.append((orders, "operator", op))
        named += ((orders, *token.split(":", 1)) for token in tokens if ":" in token)
    for variable, kind, name in named:
        known = {"operator": ops, "vendor": vendors, "impl": ids}.get(kind)
        if known is not None and (vendor_key(name) if kind == "vendor" else name) not in known:
            what = "implementation" if kind == "impl" else kind
            text = f"{variable.name}: nobody has registered {what} {name}{nearest(name, known)}"
            LoggerManager.get_logger().warning(text)


def _named(name: str) -> Any:
    """A module, or the path of a shared object as it is."""
    is_path = "/" in name or re.search(r"\.so(\.\d+)*$", name)
    return name if is_path else importlib.import_module(name)


def _load_all(found: Iterable[_Plugin], registry: OpRegistry, known: _Known) -> int:
    return sum(
        _load(*key, load, registry, known) for *key, load in found if tuple(key) not in known
    )


def _load(
    name: str, source: str, value: str, load: Callable, registry: OpRegistry, known: _Known
) -> bool:
    """Load a plug-in, and let it register: `known` has its function then."""
    done, register = False, None
    try:
        with registry.undone_if_it_fails():
            found = _entry_of(load())
            if not any(found is one for one in known.values()):  # it may have another name, too
                found(registry)
        done, register = True, found
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it must not end the program
        LoggerManager.get_logger().error(
            "plug-in %s (%s) did not register: %s: %s", name, source, type(error).__name__, error
        )
    known[name, source, value] = register
    _found.append((name, source, done))
    return done


def _entry_of(loaded: Any) -> Callable[[OpRegistry], Any]:
    """The function of a plug-in that registers; TypeError where it has none."""
    if isinstance(loaded, str | os.PathLike):
        return lambda registry: register_library(registry, loaded)
    if callable(loaded) and not isinstance(loaded, type):
        return loaded
    for name in ("te_fl_register", "register"):
        found = getattr(loaded, name, None)
        if callable(found):
            return found
    raise TypeError(
        "it is no function, has no te_fl_register(registry) or register(registry), and is no path "
        "of a shared object"
    )
