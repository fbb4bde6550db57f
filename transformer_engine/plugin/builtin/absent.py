# SPDX-License-Identifier: Apache-2.0
"""Operators that are not built yet: each raises NotImplementedError, and says what it waits for.

Where somebody has registered an implementation, with the signature of the stub, that is called.
"""

from collections.abc import Callable
from typing import Any

from transformer_engine.plugin.builtin import ABSENT
from transformer_engine.plugin.builtin.signatures import operator


def __getattr__(name: str) -> Callable:
    """The operator `name`, which raises."""
    if name not in ABSENT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    reason, what = ABSENT[name]

    def refuse(call: Any) -> Any:
        raise NotImplementedError(
            f"{name} is not built yet: it waits for {reason}. Instead: register an implementation "
            "of your own (docs/plugins.md)"
        )

    refuse.__doc__ = what
    return operator(refuse, name)
