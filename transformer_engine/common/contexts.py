# SPDX-License-Identifier: Apache-2.0
"""Context managers that an interrupt can not split, made of what undoes their changes.

A signal handler (Ctrl-C) may raise where a function in Python begins and after each call. A
generator of `contextlib.contextmanager` is entered and left by functions in Python, so that its
``finally`` may come too late, in the middle of something else, or never.
"""

from collections.abc import Callable
from typing import Any

from transformer_engine import _core


def active(context: Any) -> RuntimeError:
    """The error, to be raised, of an entry of an object that has not been left yet.

    It has one place for what undoes its changes, which the second entry would take.
    """
    return RuntimeError(f"{type(context).__name__}: it is active already; make another one")


class Context:
    """Base of such context managers.

    The subclass has `_enter`, which says how a change is undone before it makes it (`_undo_by`).
    What it has said is undone, the newest first, where `_enter` or the block fails and where the
    block ends. `_left` may do more, after that. An object is in use once at a time.
    """

    _outer: tuple | None = None  # see `_core.Leaving`

    def _enter(self) -> Any:
        """Make the changes; return what ``as`` gives."""

    def _left(self, kind: Any, value: Any, traceback: Any) -> Any:
        """Do more when all is undone; arguments and result as of ``__exit__``."""

    def _undo_by(self, function: Callable, *arguments: Any) -> None:
        """Undo the next change by a call.

        It must find nothing to do where the change was not made or is undone: an interrupted call
        is made again. To call a function in C is safe where the change follows at once.
        """
        self._outer = ((function, arguments), *self._outer)

    def _set(self, owner: Any, **values: Any) -> None:
        """Give attributes of an object other values."""
        former = tuple([getattr(owner, name) for name in values])
        self._outer = ((owner, tuple(values), former), *self._outer)
        for name, value in values.items():
            setattr(owner, name, value)

    @_core.Entering
    def __enter__(self) -> Any:
        if self._outer is not None:
            raise active(self)
        self._outer = ()
        return self._enter()

    @_core.Leaving
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> Any:
        return self._left(kind, value, traceback)
