# SPDX-License-Identifier: Apache-2.0
"""Operators that other packages implement, and the choice among implementations.

The names are those of the fork of NVIDIA Transformer Engine whose users write such packages;
docs/plugins_reference.md says what is different on purpose, and what is not there yet.
"""

import contextlib
import os
from typing import TYPE_CHECKING, Any

import transformer_engine
from transformer_engine.common import absent
from transformer_engine.plugin import core
from transformer_engine.plugin.core import get_default_manager, get_registry

if TYPE_CHECKING:
    from transformer_engine.plugin.conformance import check
    from transformer_engine.plugin.core import Explanation, SelectionPolicy
    from transformer_engine.plugin.who_runs import Coverage

_CLASSES = "TEFLBackendBase", "TEFLModule", "get_tefl_module"
_LAZY = dict.fromkeys(_CLASSES, "transformer_engine.plugin.core.backend_base")
_LAZY["tefl"] = "transformer_engine.plugin.core.backend_base"
_LAZY["check"] = "transformer_engine.plugin.conformance"
__getattr__, __dir__ = absent.attach(globals(), ("builtin", "conformance"), _LAZY)

__all__ = [
    "check",
    "core",
    "counts",
    "coverage",
    "explain",
    "get_include",
    "get_registry",
    "tefl",
    *_CLASSES,
    *absent.names_of(__name__),
]


def explain(op_name: str, device: Any = None) -> "Explanation":
    """Explain what an operator calls for this thread, and why; ``print`` shows it.

    With a `device` (a torch.device or its name) as modules call operators of the C library there,
    and optimizers those on lists of tensors: where this library has no kernels its definition in
    torch, ``reference.torch``, stands at the end.
    """
    if device is None:
        return get_default_manager().explain(op_name)
    from transformer_engine.plugin.who_runs import explained

    return explained(get_default_manager(), op_name, device)


def coverage(device: Any = "cpu", policy: "SelectionPolicy | None" = None) -> "Coverage":
    """List who runs each operator on a type of devices, and how often each was called.

    Parameters
    ----------
    device : torch.device or str, default "cpu"
        Any device that torch knows; its index does not matter.
    policy : SelectionPolicy, optional
        None: the one in force for this thread.

    Returns
    -------
    Coverage
        ``operators`` has a row for each operator of the C library, ``te_<name>``, which modules
        run: its implementations in the order in which calls ask them, those of operators of
        `transformer_engine_torch` that may replace it among them, then this library's kernels or,
        on a device without these, the definition in torch. Then a row for each other operator of
        `transformer_engine_torch`. ``str()``, ``to_markdown()`` and ``to_json()`` show it.
    """
    from transformer_engine.plugin.who_runs import covered

    with contextlib.nullcontext() if policy is None else core.policy_context(policy):
        return covered(get_default_manager(), device)


def counts() -> dict[str, int]:
    """Calls of implementations that ran, by "operator/impl_id"."""
    return get_default_manager().counts()


def get_include() -> str:
    """The folder of transformer_engine_plugin.h, for compilers of plug-ins."""
    package = os.path.dirname(os.path.abspath(transformer_engine.__file__))
    installed = os.path.join(package, "include")
    in_tree = os.path.join(os.path.dirname(package), "csrc", "include")
    return installed if os.path.exists(installed) else in_tree
