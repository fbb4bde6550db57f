# SPDX-License-Identifier: Apache-2.0
"""What the operators of the C library compute, in plain torch, on any device that torch has.

For a device that has no kernels of ours: `functions` gives what `_core.register_backend` takes.
They are slow, and follow the arithmetic of the CPU: casts, scales and copies have its bits, sums
may be made in another order. Codes are made of integers, for not every device converts to FP8.
Nothing is read back to the host but where a function says so.

A function gets the fields of a call by name, as `_core.op_fields` lists them (tensors over the
memory of the call, None where absent, numbers), and writes to those. The arguments were checked.
Importing this package imports no torch: a module is imported when one of its functions is called.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from transformer_engine import _core

_MODULES = {
    "casts": "quantize dequantize amax transpose fill cast scaling_update",
    "products": "gemm",
    "layers": "norm norm_backward activation activation_backward softcap dropout_add "
    "dropout_backward",
    "attention": "softmax softmax_backward attention attention_backward",
    "rope": "rope",
    "caches": "cache_append cache_gather",
}

DEFINITIONS: dict[str, str] = {op: module for module, ops in _MODULES.items() for op in ops.split()}
"""By operator the module of this package that has a function of its name."""

NAME = "reference.torch"
"""`impl_id` of these as implementations."""
ADMITTING = frozenset(("reference", f"impl:{NAME}"))
"""Tokens of policies that name these."""
_OURS = ADMITTING | {"flagos", "default", "impl:default.native"}
"""Tokens that name this library's own: where it has no kernels, these."""

_MADE: dict[str, dict[str, _core.Implementation]] = {}
"""By type of device and operator; they count their calls."""


def _closed(op: str, device: Any) -> str:
    return f"te_{op} on {device}: the policy admits no definition"


def functions(
    device_type: str = "cpu", why: Callable[[str, Any], str] = _closed
) -> dict[str, Callable[[Mapping[str, Any]], None]]:
    """By operator a function of the fields of a call: no autocast counts in it, no mode sees it.

    It raises NotImplementedError where the policy in force admits no definitions, with the text
    ``why(op, device)``. `device_type` is that of torch, by which calls are counted.
    """
    made = _MADE.setdefault(device_type, {})
    for op in DEFINITIONS.keys() - made.keys():
        run = functools.partial(_run, op)
        made[op] = _core.Implementation(f"te_{op}", NAME, run, functools.partial(_is_admitted, op))
    choices = {op: _core.Choice(f"te_{op}", (one,)) for op, one in made.items()}
    return {op: functools.partial(_called, op, choice, why) for op, choice in choices.items()}


def _called(op: str, choice: Callable, why: Callable, fields: Mapping[str, Any]) -> None:
    """Call a definition, or say why not."""
    if choice(fields) is NotImplemented:
        device = next(value.device for value in fields.values() if hasattr(value, "device"))
        raise NotImplementedError(why(op, device))


def _run(op: str, fields: Mapping[str, Any]) -> None:
    from transformer_engine.pytorch.torchside.modes import below_modes, in_own_dtypes

    with below_modes():
        in_own_dtypes(definition(op))(fields)


def definition(op: str) -> Callable[[Mapping[str, Any]], None]:
    """The function that defines an operator, whatever the policy admits."""
    return getattr(importlib.import_module(f"{__name__}.{DEFINITIONS[op]}"), op)


def _is_admitted(op: str, fields: Mapping[str, Any]) -> bool | str:
    from transformer_engine.plugin.core.policy import get_policy

    del fields
    return admitted(get_policy(), op) or "the policy admits no definition"


@functools.lru_cache(maxsize=1024)
def admitted(policy: Any, op: str) -> bool:
    """Return whether a policy lets an operator of the C library run by its definition."""
    tokens = policy.get_per_op_order(f"te_{op}")
    return tokens is None or not _OURS.isdisjoint(tokens)


def calls(device_type: str | None = None) -> dict[str, int]:
    """Calls of definitions by operator, on a type of devices; None: on all together."""
    counted = dict.fromkeys(DEFINITIONS, 0)
    for kind, made in _MADE.items():
        if device_type in (None, kind):
            for op, one in made.items():
                counted[op] += one.calls
    return counted


def device_type(tensor: Any) -> int:
    """The number that `_core` has for the type of a tensor's device; calls are counted by it."""
    from transformer_engine.pytorch.torchside.device import number_of_type

    return number_of_type(tensor.device)
