# SPDX-License-Identifier: Apache-2.0
"""What modules have to do with the plug-in system: they run what the policy in force selects.

A run of a plan reads the selection of its thread natively (`_core.Selection`). Here is what Python
adds: plug-ins are looked for once, and a backward runs in the scope of its forward.
"""

import sys
from typing import Any

from transformer_engine import _core
from transformer_engine.common import config

__all__ = ["find", "of_forward"]

_POLICY = (
    config.TE_FL_PREFER,
    config.TE_FL_PREFER_VENDOR,
    config.TE_FL_STRICT,
    config.TE_FL_ALLOW_VENDORS,
    config.TE_FL_DENY_VENDORS,
    config.TE_FL_PER_OP,
    config.TE_FL_PLUGIN_MODULES,
)
_GROUP = "te_fl.plugin"


def _are_wanted() -> bool:
    """Whether a plug-in is installed, or the environment says how implementations are chosen."""
    if any(variable.get() for variable in _POLICY):
        return True
    from importlib.metadata import entry_points

    return bool(entry_points(group=_GROUP))


def find() -> None:
    """Have modules obey the manager of the process, where there is one or a plug-in to load.

    The first run of a plan calls it. Where it finds nothing nobody is asked, until a program makes
    that manager.
    """
    manager = sys.modules.get("transformer_engine.plugin.core.manager")
    if getattr(manager, "_default", None) is not None or _are_wanted():
        from transformer_engine.plugin.core.manager import obey_default_manager

        obey_default_manager()


_core.find_selections(find)


def of_forward(scope: Any) -> Any:
    """The scope of a backward whose forward was in `scope`, None: obeyed nobody; None: none needed.

    Enter it around the backward, on whatever thread that runs.
    """
    return _core.unselected() if scope is None else scope
