# SPDX-License-Identifier: Apache-2.0
"""Locks that a forked child finds free, whichever other thread of its parent held them.

Whoever holds one calls nothing that may take another one: no listener, no function of a plug-in.
The one exception is the lock of discovery, which is held while plug-ins register, and by nobody who
holds another one (see `OpManager.ensure_initialized`).
"""

import os
import weakref
from _thread import RLock


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

    def _renew(self) -> None:
        if not self._is_owned():  # by the thread that has forked, which goes on
            self._at_fork_reinit()
            self._made = object()


_LOCKS: "weakref.WeakSet[ForkSafeLock]" = weakref.WeakSet()


def _renew() -> None:
    for lock in tuple(_LOCKS):
        lock._renew()


os.register_at_fork(after_in_child=_renew)
