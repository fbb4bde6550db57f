# SPDX-License-Identifier: Apache-2.0
"""Predicates of implementations: whether one takes a call, by dtype, architecture and its own."""

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from transformer_engine import _core
from transformer_engine.plugin.core.types import OpImpl, architecture

_made: "weakref.WeakKeyDictionary[OpImpl, _core.Predicate]" = weakref.WeakKeyDictionary()


def predicate_of(impl: OpImpl) -> Callable[..., Any] | None:
    """Return whether it takes a call, from the arguments of that; None: it takes every call."""
    if impl.supported_dtypes is None and impl.min_arch is None:
        return impl.supports
    found = _made.get(impl)
    return _made.setdefault(impl, _predicate(impl)) if found is None else found


def _predicate(impl: OpImpl) -> _core.Predicate:
    least = None if impl.min_arch is None else architecture(impl.min_arch)
    named = impl.supported_dtypes
    dtypes = None if named is None else frozenset(map(_plain, named))

    @functools.cache
    def fits(dtype: Any, device: Any) -> bool | None:
        return _fits(dtype, device, dtypes, least)

    return _core.Predicate(fits, impl.supports, by_device=least is not None)


def _plain(dtype: Any) -> str:
    """Name of a dtype without its framework."""
    return str(dtype).rpartition(".")[2].lower()


_INDICES = ("int32", "int64", "bool")
"""Dtypes of places, lengths and flags, which calls may have before the tensors that matter."""


def _fits(dtype: Any, device: Any, dtypes: frozenset | None, least: tuple | None) -> bool | None:
    """Return whether a tensor is one that is taken; None: the next one says so."""
    if least is not None:
        if getattr(device, "type", "") != "cuda":
            return False
        if sys.modules["torch"].cuda.get_device_capability(device) < least:
            return False
    if dtypes is None or _plain(dtype) in dtypes:
        return True
    return None if _plain(dtype) in _INDICES else False
