# SPDX-License-Identifier: Apache-2.0
"""The logger of the plugin system: "TE-FL", to stderr, with the level of ``TEFL_LOG_LEVEL``."""

import sys
from typing import TYPE_CHECKING, Any

from transformer_engine.common.config import TE_FL_LOG_LEVEL

__all__ = ["Logger", "LoggerManager"]

if TYPE_CHECKING:
    from logging import Logger


def __getattr__(name: str) -> Any:
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
            cls._logger = logger
        return cls._logger

    @classmethod
    def reset(cls) -> None:
        """Read the level anew at the next use."""
        cls._logger = None
