# SPDX-License-Identifier: Apache-2.0
"""The logger of the plugin system: "TE-FL", to stderr, with the level of ``TEFL_LOG_LEVEL``."""

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformer_engine.common.config import TE_FL_LOG_LEVEL

if TYPE_CHECKING:
    from logging import Logger

_LEVELS = "debug", "info", "warning", "error"
_ONCE = tuple(f"{level}_once" for level in _LEVELS)
"""Functions of this module, and methods of the logger: `Logger.info` of a text, once a process."""


def __getattr__(name: str) -> Any:
    if name in _ONCE:
        return getattr(get_logger(), name)
    if name != "Logger":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from logging import Logger  # to load it takes longer than all of the plug-in system

    return Logger


class LoggerManager:
    """Makes the logger at its first use."""

    _logger: "Logger | None" = None

    @classmethod
    def get_logger(cls) -> "Logger":
        """The logger; a program that has given it handlers keeps those."""
        import logging

        if cls._logger is None:
            logger = logging.getLogger("TE-FL")
            if not logger.handlers:
                handler = logging.StreamHandler(sys.stderr)
                handler.setFormatter(logging.Formatter("[%(name)s %(levelname)s] %(message)s"))
                logger.addHandler(handler)
                logger.propagate = False
            logger.setLevel(TE_FL_LOG_LEVEL.get())
            for level in _LEVELS:
                setattr(logger, f"{level}_once", functools.partial(_once, getattr(logger, level)))
            cls._logger = logger
        return cls._logger

    @classmethod
    def reset(cls) -> None:
        """Read the level anew at the next use."""
        cls._logger = None


get_logger = LoggerManager.get_logger
_told: set[tuple] = set()
_used: dict[str, str] = {}
"""By operator: the implementation that the last line about it names."""


def _once(tell: Callable, message: Any, *args: Any, **kwargs: Any) -> None:
    key = tell.__name__, str(message), *map(str, args)
    if key not in _told:
        _told.add(key)
        tell(message, *args, **kwargs)


def print_once(*values: Any, **kwargs: Any) -> None:
    """`print`, once a process for each text."""
    _once(print, *values, **kwargs)


def log_use(op: str, impl_id: str) -> None:
    """Log that an operator calls an implementation, where the last line says another one."""
    former = _used.get(op)
    if former != impl_id:
        _used[op] = impl_id
        get_logger().info("%s: %s%s", op, impl_id, former and f" in place of {former}" or "")
