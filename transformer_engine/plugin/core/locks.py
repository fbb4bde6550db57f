# SPDX-License-Identifier: Apache-2.0
"""Locks that a forked child finds free, whichever thread of its parent held them."""

import os
import threading
import weakref
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


_LOCKS: "weakref.WeakSet[ForkSafeLock]" = weakref.WeakSet()


def _renew() -> None:
    for lock in tuple(_LOCKS):
        lock._lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)
