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


ADMITTING = frozenset(("reference", "impl:reference.torch"))
"""Tokens of policies that name these."""


def functions() -> dict[str, Callable[[Mapping[str, Any]], None]]:
    """By operator a function of the fields of a call: no autocast counts in it, no mode sees it.

    It raises NotImplementedError where the policy in force admits no definitions.
    """
    return {op: functools.partial(_run, op) for op in DEFINITIONS}


def _run(op: str, fields: Mapping[str, Any]) -> None:
    from transformer_engine.plugin.core.policy import get_policy
    from transformer_engine.pytorch.torchside.modes import below_modes, in_own_dtypes

    if not admitted(get_policy(), op):
        tokens = ", ".join(get_policy().get_per_op_order(f"te_{op}") or ())
        device = next(value.device for value in fields.values() if hasattr(value, "device"))
        raise NotImplementedError(
            f"te_{op} on {device}: nobody takes the call. The policy names {tokens}; its "
            "definition in torch runs where the policy names `reference`, too"
        )
    module = importlib.import_module(f"{__name__}.{DEFINITIONS[op]}")
    with below_modes():
        in_own_dtypes(getattr(module, op))(fields)


@functools.lru_cache(maxsize=1024)
def admitted(policy: Any, op: str) -> bool:
    """Return whether a policy lets an operator of the C library run by its definition."""
    tokens = policy.get_per_op_order(f"te_{op}")
    return tokens is None or not ADMITTING.isdisjoint(tokens)


def device_type(tensor: Any) -> int:
    """The number that `_core` has for the type of a tensor's device; calls are counted by it."""
    from transformer_engine.pytorch.torchside.device import number_of_type

    return number_of_type(tensor.device.type)
