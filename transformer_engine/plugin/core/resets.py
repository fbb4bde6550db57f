# SPDX-License-Identifier: Apache-2.0
"""Making the manager of the process anew, with the module whose attributes are its operators."""

from collections.abc import Callable

from transformer_engine.plugin.core import manager

__all__ = ["BINDERS", "reset_default_manager", "reset_registry"]

BINDERS: list[Callable[[], None]] = []
"""What takes the operators of the manager anew: that of ``transformer_engine_torch``."""


def reset_default_manager() -> None:
    """Let the next use make another manager, with a registry of its own; plug-ins register anew.

    The attributes of ``transformer_engine_torch`` are its operators from then on. Who holds
    operators of the former one goes on with that.
    """
    manager.reset_default_manager()
    for bind in BINDERS:
        bind()


reset_registry = reset_default_manager
