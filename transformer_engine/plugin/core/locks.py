# SPDX-License-Identifier: Apache-2.0
"""Locks that a forked child finds free, whichever other thread of its parent held them.

Whoever holds one calls nothing that may take another one: no listener, no function of a plug-in.
The one exception is the lock of discovery, which is held while plug-ins register, and by nobody who
holds another one (see `OpManager.ensure_initialized`).
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

__all__ = ["ForkSafeLock"]


class ForkSafeLock:
    """A reentrant lock, as a context manager."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _LOCKS.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: Any) -> None:
        self._lock.release()

    def made(self) -> object:
        """Another object after a fork that has renewed it: what it guarded may be half done."""
        return self._lock

    @contextlib.contextmanager
    def hold(self, wait: bool) -> Iterator[bool]:
        """Whether it is held inside ``with``: without `wait` only where no other thread has it."""
        held = self._lock.acquire(blocking=wait)
        try:
            yield held
        finally:
            if held:
                self._lock.release()


_LOCKS: "weakref.WeakSet[ForkSafeLock]" = weakref.WeakSet()


def _renew() -> None:
    for lock in tuple(_LOCKS):
        if not lock._lock._is_owned():  # by the thread that has forked, which goes on
            lock._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)
