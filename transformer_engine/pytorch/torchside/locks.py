# SPDX-License-Identifier: Apache-2.0
"""Locks that neither an interrupt nor a fork leaves taken."""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any


class Lock:
    """A re-entrant lock for functions: ``@lock.held`` runs a function while the thread holds it.

    A signal handler (Ctrl-C) may raise after any call, so also between a lock's ``acquire`` and the
    ``try`` after it. Here the ``try`` comes first and releasing what was never taken is no error.
    A forked child has a lock of its own: the thread that held the parent's does not run there.

    Finalizers must not take it: they run in the middle of any statement, also of one that holds it.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def held(self, function: Callable) -> Callable:
        """Run a function under the lock (decorator), and give it back however the function ends."""

        @functools.wraps(function)
        def locked(*args: Any) -> Any:
            lock = self._lock
            try:
                lock.acquire()
                return function(*args)
            finally:
                try:  # the release is the first call of this block: none before it can raise
                    lock.release()
                except RuntimeError:
                    pass  # interrupted while it waited

        return locked
