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
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from transformer_engine import _core

_MODULES = {
    "casts": "quantize dequantize amax transpose fill cast scaling_update",
    "products": "gemm",
    "layers": "norm norm_backward activation activation_backward softcap dropout_add "
    "dropout_backward",
    "attention": "softmax softmax_backward attention attention_backward attention_merge",
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
"""By type of device and name of the operator; they count their calls."""


def _closed(name: str, device: Any) -> str:
    return f"{name} on {device}: the policy admits no definition"


def functions(
    device_type: str = "cpu", why: Callable[[str, Any], str] = _closed
) -> dict[str, Callable[[Mapping[str, Any]], None]]:
    """By operator a function of the fields of a call: no autocast counts in it, no mode sees it.

    It raises NotImplementedError where the policy in force admits no definitions, with the text
    ``why("te_<op>", device)``. `device_type` is that of torch, by which calls are counted.
    """
    made, called = _MADE.setdefault(device_type, {}), {}
    for op in DEFINITIONS:
        name, run = f"te_{op}", functools.partial(_run, op)
        takes = functools.partial(_is_admitted, name)
        one = made.setdefault(name, _core.Implementation(name, NAME, run, takes))
        called[op] = functools.partial(_called, name, _core.Choice(name, (one,)), why)
    return called


def _called(name: str, choice: Callable, why: Callable, fields: Mapping[str, Any]) -> None:
    """Call a definition, or say why not."""
    if choice(fields) is NotImplemented:
        device = next(value.device for value in fields.values() if hasattr(value, "device"))
        raise NotImplementedError(why(name, device))


def _run(op: str, fields: Mapping[str, Any]) -> None:
    from transformer_engine.pytorch.torchside.modes import below_modes, in_own_dtypes

    with below_modes():
        in_own_dtypes(definition(op))(fields)


def definition(op: str) -> Callable[[Mapping[str, Any]], None]:
    """The function that defines an operator, whatever the policy admits."""
    return getattr(importlib.import_module(f"{__name__}.{DEFINITIONS[op]}"), op)


def _is_admitted(name: str, fields: Mapping[str, Any]) -> bool | str:
    from transformer_engine.plugin.core.policy import get_policy

    del fields
    return admitted(get_policy(), name) or "the policy admits no definition"


@functools.lru_cache(maxsize=1024)
def admitted(policy: Any, name: str) -> bool:
    """Return whether a policy lets an operator of the C library run by its definition."""
    tokens = policy.get_per_op_order(name)
    return tokens is None or not _OURS.isdisjoint(tokens)


def calls(device_type: str | None = None) -> Counter[str]:
    """Calls of definitions by name of the operator, on a type of devices; None: on all together."""
    counted: Counter[str] = Counter()
    for kind, made in _MADE.items():
        if device_type in (None, kind):
            counted.update({name: one.calls for name, one in made.items()})
    return counted


def device_of_lists(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Device of the first tensor of a call of an operator on lists; None where it has none."""
    lists = kwargs.get("tensor_lists", args[2] if len(args) > 2 else ())
    try:
        return next((tensor.device for each in lists for tensor in each), None)
    except (AttributeError, TypeError):  # what is no list of tensors this library's own refuses
        return None


def run_on_lists(op: str, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Run this library's own function of an operator on lists of tensors.

    It is counted as a definition where there are no kernels.
    """
    from transformer_engine.pytorch.torchside.device import has_kernels

    device = device_of_lists(args, kwargs)
    if device is None or has_kernels(device):
        return function(*args, **kwargs)
    made = _MADE.setdefault(device.type, {})
    one = made.setdefault(op, _core.Implementation(op, NAME, function))
    return _core.Choice(op, (one,))(*args, **kwargs)


def device_type(tensor: Any) -> int:
    """The number that `_core` has for the type of a tensor's device; calls are counted by it."""
    from transformer_engine.pytorch.torchside.device import number_of_type

    return number_of_type(tensor.device)
