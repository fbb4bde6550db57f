# SPDX-License-Identifier: Apache-2.0
"""Locks that a forked child finds free, whichever other thread of its parent held them.

Whoever holds one calls nothing that may take another one: no listener, no function of a plug-in.
The one exception is the lock of discovery, which is held while plug-ins register, and by nobody who
holds another one (see `OpManager.ensure_initialized`).
"""

import os
import weakref
from _thread import RLock

from transformer_engine.common.contexts import Context

__all__ = ["ForkSafeLock"]


class ForkSafeLock(RLock):
    """A reentrant lock, as a context manager.

    Its ``__enter__`` and ``__exit__`` are those of the lock, in C, which no interrupt can split.
    """

    def __init__(self) -> None:
        self._made = object()
        _LOCKS.add(self)

    def made(self) -> object:
        """Another object after a fork that has renewed it: what it guarded may be half done."""
        return self._made

    def hold(self, wait: bool) -> "_Hold":
        """Whether it is held inside ``with``: without `wait` only where no other thread has it."""
        return _Hold(self, wait)

    def _renew(self) -> None:
        if not self._is_owned():  # by the thread that has forked, which goes on
            self._at_fork_reinit()
            self._made = object()


class _Hold(Context):
    def __init__(self, lock: ForkSafeLock, wait: bool) -> None:
        self._lock, self._wait, self._held = lock, wait, False

    def _enter(self) -> bool:
        self._undo_by(self._give_back)
        # A call in a call of C: no interrupt comes between the two.
        (self._held,) = map(self._lock.acquire, (self._wait,))
        return self._held

    def _give_back(self) -> None:
        held, self._held = self._held, False
        if held:
            self._lock.release()


_LOCKS: "weakref.WeakSet[ForkSafeLock]" = weakref.WeakSet()


def _renew() -> None:
    for lock in tuple(_LOCKS):
        lock._renew()


os.register_at_fork(after_in_child=_renew)
