# SPDX-License-Identifier: Apache-2.0
"""Operators that other packages implement, and the choice among implementations.

The names are those of the fork of NVIDIA Transformer Engine whose users write such packages;
docs/plugins_reference.md says what is different on purpose, and what is not there yet.
"""

import os
from typing import TYPE_CHECKING

import transformer_engine
from transformer_engine.common import absent
from transformer_engine.plugin import core
from transformer_engine.plugin.core import get_default_manager, get_registry

if TYPE_CHECKING:
    from transformer_engine.plugin.conformance import check
    from transformer_engine.plugin.core import Explanation

_CLASSES = "TEFLBackendBase", "TEFLModule", "get_tefl_module"
_LAZY = dict.fromkeys(_CLASSES, "transformer_engine.plugin.core.backend_base")
_LAZY["tefl"] = "transformer_engine.plugin.core.backend_base"
_LAZY["check"] = "transformer_engine.plugin.conformance"
__getattr__, __dir__ = absent.attach(globals(), ("builtin", "conformance"), _LAZY)

__all__ = [
    "check",
    "core",
    "counts",
    "explain",
    "get_include",
    "get_registry",
    "tefl",
    *_CLASSES,
    *absent.names_of(__name__),
]


def explain(op_name: str) -> "Explanation":
    """Explain what an operator calls for this thread, and why; ``print`` shows it."""
    return get_default_manager().explain(op_name)


def counts() -> dict[str, int]:
    """Calls of implementations that ran, by "operator/impl_id"."""
    return get_default_manager().counts()


def get_include() -> str:
    """The folder of transformer_engine_plugin.h, for compilers of plug-ins."""
    package = os.path.dirname(os.path.abspath(transformer_engine.__file__))
    installed = os.path.join(package, "include")
    in_tree = os.path.join(os.path.dirname(package), "csrc", "include")
    return installed if os.path.exists(installed) else in_tree
