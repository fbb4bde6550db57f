# SPDX-License-Identifier: Apache-2.0
"""Names of NVIDIA Transformer Engine that are importable here, and raise when they are used.

Programs import many names that they use only under some option, and their imports must not fail.
`absent_names.FEATURES` is the one list of what is not built yet. From it come the objects that
stand under those names (`attach`), the messages of what is built in part (`refusal`), the answer to
"is it there?" (`find`), and the table in ``docs/names.md`` (``tools/names_table.py``).

A class that is absent can be subclassed, compared and used in ``isinstance`` (nothing is an
instance of it); making an instance of it or of a subclass raises, and so does calling an absent
function.

Modules with no other names are made when they are imported (`_Finder`), and so are those of
`other_paths.OTHER_PATHS`, whose names are defined elsewhere.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

from transformer_engine.common.absent_names import FEATURES, MODULES, Feature
from transformer_engine.common.other_paths import OTHER_PATHS

PACKAGE = "transformer_engine."

_MADE: dict[tuple[str, str], Any] = {}
"""Stand-ins by (full name of the home module, name), so that every path gives the same object."""


def _full(module: str) -> str:
    """Full name of a module of the table: relative to the package, or a module of its own."""
    return module if module.startswith("transformer_engine") else PACKAGE + module


def _index() -> dict[str, dict[str, tuple[Feature, str]]]:
    """Module -> name -> (feature, home module); the first module that lists a name is its home."""
    index: dict[str, dict[str, tuple[Feature, str]]] = {}
    for feature in FEATURES:
        homes: dict[str, str] = {}
        for module, name in feature.listed():
            home = homes.setdefault(name, _full(module))
            index.setdefault(_full(module), {})[name] = (feature, home)
    return index


_INDEX = _index()


def _entry(path: str) -> tuple[Feature, str] | None:
    """(feature, home module and name) of a full name in the table; methods have a class in it."""
    parts = path.split(".")
    for i in range(len(parts) - 1, 0, -1):
        module, name = ".".join(parts[:i]), ".".join(parts[i:])
        if name in _INDEX.get(module, {}):
            feature, home = _INDEX[module][name]
            return feature, f"{home}.{name}"
    return None


def names_of(module: str) -> list[str]:
    """Absent names that a module (its full name) offers, without methods."""
    return [name for name in _INDEX.get(module, {}) if "." not in name]


def message(path: str, feature: Feature, what: str = "") -> str:
    """Text of the error: the name, the reason, the alternative."""
    return f"{path}{what} is not built yet: {feature.reason}. Instead: {feature.instead}"


def refusal(name: str, what: str) -> NotImplementedError:
    """The error, to be raised, of something that is built in part.

    `name` is a path as `Feature.partly` has it, `what` of it is refused, say ``"(enabled=True)"``.
    """
    for feature in FEATURES:
        if name in feature.partly.split():
            return NotImplementedError(message(_full(name), feature, what))
    raise AssertionError(f"{name} is in no feature's `partly`")


class _Nothing(contextlib.ContextDecorator):
    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def disabled(name: str, enabled: bool) -> Any:
    """A context, or decorator, that changes nothing: the disabled form of what is not built.

    Raises `refusal` of the name where `enabled`.
    """
    if enabled:
        raise refusal(name, "(enabled=True)")
    return _Nothing()


def find(path: str) -> tuple[bool, str]:
    """Return whether a name is built, and the reason, empty where it is.

    The name is a full one, or relative to ``transformer_engine`` or ``transformer_engine.pytorch``.
    """
    tried = [PACKAGE + path, f"{PACKAGE}pytorch.{path}"]
    if path.startswith("transformer_engine"):
        tried = [path]
    for full in tried:
        entry = _entry(full)
        if entry is not None:
            feature, home = entry
            return False, message(home, feature)
    for full in tried:
        if _resolves(full):
            return True, ""
    return False, f"{path}: neither this library nor its list of what is to come has such a name"


def _resolves(full: str) -> bool:
    """Return whether a dotted name leads to an object."""
    parts = full.split(".")
    found = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], start=2):
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            return False
    return True


def _refuse(path: str, feature: Feature) -> Callable:
    """A function that raises whatever it is given."""

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(message(path, feature))

    absent.__module__, _, absent.__name__ = path.rpartition(".")
    absent.__qualname__ = absent.__name__
    absent.__doc__ = f"Not built yet: {feature.reason}.\n\nInstead: {feature.instead}"
    return absent


def _class(home: str, name: str, feature: Feature) -> type:
    """A class whose absent methods raise when they are called."""
    path = f"{home}.{name}"
    base: type = object
    if feature.base:
        module, _, attribute = feature.base.rpartition(".")
        base = getattr(importlib.import_module(module), attribute)

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        own = f"{cls.__module__}.{cls.__qualname__}"
        raise NotImplementedError(
            message(path, feature, "" if own == path else f" (base of {own})")
        )

    doc = f"Not built yet: {feature.reason}.\n\nInstead: {feature.instead}"
    members = {"__module__": home, "__qualname__": name, "__doc__": doc, "__new__": __new__}
    made = type(name, (base,), members)
    attach_methods(made, home, name)
    return made


def attach_methods(cls: type, module: str, name: str) -> None:
    """Give a class its absent methods, which raise when they are called.

    `module` is the full name of the module where the table has them, `name` the class there.
    """
    for method in _INDEX.get(module, {}):
        owner, _, attribute = method.partition(".")
        if attribute and owner == name:
            feature, home = _INDEX[module][method]
            function = _refuse(f"{home}.{method}", feature)
            function.__qualname__ = method
            setattr(cls, attribute, staticmethod(function))


def stand_in(module: str, name: str) -> Any:
    """The object under an absent name: a class where it begins with a capital, else a function."""
    feature, home = _INDEX[module][name]
    key = (home, name)
    if key not in _MADE:
        is_class = name.lstrip("_")[:1].isupper()
        made = _class(home, name, feature) if is_class else _refuse(f"{home}.{name}", feature)
        _MADE.setdefault(key, made)
    return _MADE[key]


_WITHOUT_FILES = frozenset(map(_full, (*MODULES, *OTHER_PATHS)))


def _below(module: str) -> frozenset[str]:
    """Names of the modules right below one (its full name) that have no files."""
    start = f"{module}."
    inside = (full.removeprefix(start) for full in _WITHOUT_FILES if full.startswith(start))
    return frozenset(name for name in inside if "." not in name)


def attach(
    namespace: dict[str, Any],
    submodules: Iterable[str] = (),
    lazy: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Give a module its absent names, and others that are fetched when they are asked for.

    `namespace` is the ``globals()`` of the module, `submodules` are modules below it, and `lazy`
    tells for a name the full name of the module that has it. Modules below it that have no files
    need not be named. Returns the module's ``__getattr__`` and ``__dir__``. By the former a module
    without an ``__all__`` has one: its names without an underscore, and these.
    """
    module = namespace["__name__"]
    names = frozenset(names_of(module))
    below = frozenset(submodules) | _below(module)

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            own = [n for n, value in namespace.items() if not isinstance(value, ModuleType)]
            return sorted({*(n for n in own if not n.startswith("_")), *names, *lazy})
        if name in names:
            value = stand_in(module, name)
        elif name in lazy:
            value = getattr(importlib.import_module(lazy[name]), name)
        elif name in below:
            return importlib.import_module(f"{module}.{name}")
        else:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        namespace[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*namespace, *names, *lazy, *below})

    return __getattr__, __dir__


class _Finder:
    """Finds and loads modules without files; it comes before the finders of files and folders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Describe a module; None for one that is none of these."""
        if name not in _WITHOUT_FILES:
            return None
        is_package = any(other.startswith(f"{name}.") for other in _WITHOUT_FILES)
        return ModuleSpec(name, self, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system make it."""

    def exec_module(self, module: ModuleType) -> None:
        """Give it its names."""
        homes = OTHER_PATHS.get(module.__name__.removeprefix(PACKAGE), {})
        entries = _INDEX.get(module.__name__, {}).values()
        titles = ", ".join(dict.fromkeys(feature.title for feature, _ in entries))
        module.__doc__ = f"{titles or 'Modules below'}: names that are not built yet."
        if homes:
            module.__doc__ = f"Names of {', '.join(homes)} under the path that programs import."
        names: list[str] = []
        for home, listed in homes.items():
            found = importlib.import_module(PACKAGE + home)
            own = found.__all__ if listed == "*" else listed.split()
            vars(module).update({name: getattr(found, name) for name in own})
            names += own
        module.__getattr__, module.__dir__ = attach(vars(module))
        module.__all__ = [*names, *(n for n in names_of(module.__name__) if n not in names)]


sys.meta_path.insert(0, _Finder())
