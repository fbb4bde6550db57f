# SPDX-License-Identifier: Apache-2.0
"""Which implementations there are."""

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from transformer_engine.common.contexts import Context
from transformer_engine.plugin.core.locks import ForkSafeLock
from transformer_engine.plugin.core.types import OpImpl

__all__ = ["OpRegistry", "OpRegistrySnapshot"]


class OpRegistrySnapshot(NamedTuple):
    """All implementations at one time; nothing changes it."""

    impls_by_op: Mapping[str, tuple[OpImpl, ...]] = MappingProxyType({})
    version: int = 0  # how often the registry had changed


class OpRegistry:
    """Implementations by operator and name, for any number of threads.

    A change makes a new snapshot; managers are told of it before the change returns, so that the
    next call sees it.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._snapshot = OpRegistrySnapshot()
        # By thread those of the blocks that it is in: (implementation, whether it came).
        self._recorders: dict[int, tuple[list[tuple[OpImpl, bool]], ...]] = {}
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._fill: Callable[[], Any] | None = None

    def __reduce__(self) -> Any:
        raise TypeError("an OpRegistry holds functions of this process: it can not be pickled")

    def register_impl(self, impl: OpImpl) -> None:
        """Add an implementation; ValueError where its operator has one of that name."""
        self.register_many((impl,))

    register = register_impl

    def register_many(self, impls: Iterable[OpImpl]) -> None:
        """Add all of them, or none where one is refused.

        TypeError for what is no `OpImpl`, ValueError for a name that its operator has already.
        """
        given = tuple(impls)
        with self._lock:
            changed = dict(self._snapshot.impls_by_op)
            for impl in given:
                if not isinstance(impl, OpImpl):
                    raise TypeError(f"expected an OpImpl, got {type(impl).__name__}")
                known = changed.get(impl.op_name, ())
                if any(other.impl_id == impl.impl_id for other in known):
                    raise ValueError(
                        f"{impl.op_name} has an implementation {impl.impl_id!r} already: "
                        "unregister it first, or choose another impl_id"
                    )
                changed[impl.op_name] = (*known, impl)
            listeners = self._changed(changed, given, True)
        _tell(listeners)

    def unregister(self, op_name: str, impl_id: str) -> OpImpl:
        """Take an implementation out and return it; KeyError where there is none."""
        with self._lock:
            found = self._find(op_name, impl_id)
            if found is None:
                raise KeyError(f"{op_name} has no implementation {impl_id!r}")
            changed = dict(self._snapshot.impls_by_op)
            changed[op_name] = tuple(impl for impl in changed[op_name] if impl is not found)
            if not changed[op_name]:
                del changed[op_name]
            listeners = self._changed(changed, (found,), False)
        _tell(listeners)
        return found

    def undone_if_it_fails(self) -> "_Undone":
        """Registrations of this thread inside ``with``, undone if an error ends it."""
        return _Undone(self)

    def clear(self) -> None:
        """Take all out."""
        with self._lock:
            gone = tuple(itertools.chain(*self._snapshot.impls_by_op.values()))
            listeners = self._changed({}, gone, False)
        _tell(listeners)

    def snapshot(self) -> OpRegistrySnapshot:
        """All implementations, in the order of their registration."""
        return self._snapshot

    @property
    def version(self) -> int:
        """How often it has changed."""
        return self._snapshot.version

    def get_implementations(self, op_name: str) -> list[OpImpl]:
        """Those of an operator, in the order of their registration; [] where there are none."""
        return list(self._filled().get(op_name, ()))

    def get_implementation(self, op_name: str, impl_id: str) -> OpImpl | None:
        """One of an operator."""
        self._filled()
        return self._find(op_name, impl_id)

    def list_operators(self) -> list[str]:
        """Names of the operators that have any."""
        return list(self._filled())

    def fill_by(self, fill: Callable[[], Any]) -> None:
        """Call ``fill()`` before anybody asks what there is: it registers what is still to come."""
        self._fill = fill

    def _filled(self) -> Mapping[str, tuple[OpImpl, ...]]:
        if self._fill is not None:
            self._fill()
        return self._snapshot.impls_by_op

    def _find(self, op_name: str, impl_id: str) -> OpImpl | None:
        found = self._snapshot.impls_by_op.get(op_name, ())
        return next((impl for impl in found if impl.impl_id == impl_id), None)

    def listen(self, listener: Any) -> None:
        """Call ``listener.registry_changed()`` after each change, for as long as it lives."""
        with self._lock:
            self._listeners.add(listener)

    def _changed(self, impls: dict[str, tuple[OpImpl, ...]], who: tuple, came: bool) -> tuple:
        """Put the snapshot in place, at once; who is to be told, once the lock is free."""
        for recorder in self._recorders.get(threading.get_ident(), ()):
            recorder += [(impl, came) for impl in who]
        self._snapshot = OpRegistrySnapshot(MappingProxyType(impls), self.version + 1)
        return tuple(self._listeners)


def _tell(listeners: tuple) -> None:
    for listener in listeners:
        listener.registry_changed()


class _Undone(Context):
    """See `OpRegistry.undone_if_it_fails`."""

    def __init__(self, registry: OpRegistry) -> None:
        self._registry = registry
        self._done: list[tuple[OpImpl, bool]] = []

    def _enter(self) -> None:
        recorders, thread = self._registry._recorders, threading.get_ident()
        outer = recorders.get(thread)
        if outer is None:
            self._undo_by(recorders.pop, thread, None)
        else:
            self._undo_by(recorders.__setitem__, thread, outer)
        recorders[thread] = (*(outer or ()), self._done)

    def _left(self, kind: Any, value: Any, traceback: Any) -> None:
        if kind is None:
            return
        registry, thread = self._registry, threading.get_ident()
        around = registry._recorders.pop(thread, ())  # blocks for which nothing has happened
        for recorder in around:
            del recorder[len(recorder) - len(self._done) :]
        try:
            for impl, came in reversed(self._done):
                there = registry._find(impl.op_name, impl.impl_id)
                if came and there is impl:
                    registry.unregister(impl.op_name, impl.impl_id)
                elif not came and there is None:
                    registry.register(impl)
        finally:
            if around:
                registry._recorders[thread] = around
