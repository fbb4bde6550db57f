# SPDX-License-Identifier: Apache-2.0
"""The plug-in system: implementations of operators, and which of them runs (docs/plugins.md)."""

from transformer_engine.common import absent
from transformer_engine.plugin.core import discovery, manager, policy, registry
from transformer_engine.plugin.core.discovery import *  # noqa: F403 - what it has in __all__
from transformer_engine.plugin.core.logger_manager import LoggerManager
from transformer_engine.plugin.core.manager import *  # noqa: F403
from transformer_engine.plugin.core.policy import *  # noqa: F403
from transformer_engine.plugin.core.registry import *  # noqa: F403
from transformer_engine.plugin.core.types import BackendImplKind, OpImpl, match_token

_CLASSES = "TEFLBackendBase", "TEFLModule", "get_tefl_module", "reset_tefl_module"
_LAZY = {
    "Logger": "transformer_engine.plugin.core.logger_manager",
    **dict.fromkeys(_CLASSES, "transformer_engine.plugin.core.backend_base"),
}
__getattr__, __dir__ = absent.attach(globals(), lazy=_LAZY)

__all__ = [  # noqa: PLE0604 - texts, all of them
    "BackendImplKind",
    "LoggerManager",
    "OpImpl",
    "match_token",
    *discovery.__all__,
    *manager.__all__,
    *policy.__all__,
    *registry.__all__,
    *_LAZY,
    *absent.names_of(__name__),
]
