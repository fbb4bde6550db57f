# SPDX-License-Identifier: Apache-2.0
"""The plug-in system: implementations of operators, and which of them runs (docs/plugins.md)."""

from transformer_engine.common import absent
from transformer_engine.plugin.core.discovery import (
    PLUGIN_GROUP,
    PLUGIN_MODULES_ENV,
    clear_discovered_plugin,
    discover_from_entry_points,
    discover_from_env_modules,
    discover_op_plugin,
    discover_plugin,
    get_discovered_plugin,
    register_library,
)
from transformer_engine.plugin.core.logger_manager import LoggerManager
from transformer_engine.plugin.core.manager import (
    OpManager,
    get_default_manager,
    get_manager,
    get_registry,
)
from transformer_engine.plugin.core.policy import (
    PREFER_DEFAULT,
    PREFER_REFERENCE,
    PREFER_VENDOR,
    VALID_PREFER_VALUES,
    PolicyManager,
    SelectionPolicy,
    bump_policy_epoch,
    create_policy_context,
    get_policy,
    get_policy_epoch,
    policy_context,
    policy_from_env,
    reset_global_policy,
    set_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)
from transformer_engine.plugin.core.registry import OpRegistry, OpRegistrySnapshot
from transformer_engine.plugin.core.resets import reset_default_manager, reset_registry
from transformer_engine.plugin.core.types import BackendImplKind, OpImpl, match_token

_CLASSES = "TEFLBackendBase", "TEFLModule", "get_tefl_module", "reset_tefl_module"
__getattr__, __dir__ = absent.attach(
    globals(),
    lazy={
        **dict.fromkeys(
            ("Candidate", "Explanation"), "transformer_engine.plugin.core.explanations"
        ),
        "Logger": "transformer_engine.plugin.core.logger_manager",
        **dict.fromkeys(_CLASSES, "transformer_engine.plugin.core.backend_base"),
    },
)

__all__ = [
    "PLUGIN_GROUP",
    "PLUGIN_MODULES_ENV",
    "PREFER_DEFAULT",
    "PREFER_REFERENCE",
    "PREFER_VENDOR",
    "VALID_PREFER_VALUES",
    "BackendImplKind",
    "Candidate",
    "Explanation",
    "Logger",
    "LoggerManager",
    "OpImpl",
    "OpManager",
    "OpRegistry",
    "OpRegistrySnapshot",
    "PolicyManager",
    "SelectionPolicy",
    *_CLASSES,
    "bump_policy_epoch",
    "clear_discovered_plugin",
    "create_policy_context",
    "discover_from_entry_points",
    "discover_from_env_modules",
    "discover_op_plugin",
    "discover_plugin",
    "get_default_manager",
    "get_discovered_plugin",
    "get_manager",
    "get_policy",
    "get_policy_epoch",
    "get_registry",
    "match_token",
    "policy_context",
    "policy_from_env",
    "register_library",
    "reset_default_manager",
    "reset_global_policy",
    "reset_registry",
    "set_global_policy",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
    *absent.names_of(__name__),
]
