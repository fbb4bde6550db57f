# SPDX-License-Identifier: Apache-2.0
"""Operators on lists of tensors: steps of optimizers, products, norms.

Their calls need no adapter: optimizers call the operators of `transformer_engine_torch` themselves.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine.plugin.adapters import LISTS, Asked, Closed, refusals
from transformer_engine.plugin.adapters.fields import Choices
from transformer_engine.plugin.definitions import device_of_lists
from transformer_engine.pytorch.execution.overrides import native
from transformer_engine.pytorch.torchside.device import has_kernels
from transformer_engine.pytorch.torchside.modes import in_own_dtypes


def overriding(asked: Asked, closed: Closed, refuse: Callable) -> dict[str, Callable]:
    """By operator what a call asks before this library's own; as of `adapters.selection`.

    It returns NotImplemented where nobody takes the call.
    """
    names = tuple(sorted(LISTS))
    there, elsewhere = (
        Choices(found, names, those, refuse) for found, those in zip(asked, closed, strict=True)
    )
    return {
        name: functools.partial(_called, name, _apart(there[name]), _apart(elsewhere[name]))
        for name in there.keys() | elsewhere.keys()
    }


def _apart(choice: Callable) -> Callable:
    """Have a call ask nobody while it runs, as of `fields.adapted`; it is not differentiated."""
    return native(in_own_dtypes(torch.no_grad()(choice)))


def _called(name: str, there: Callable, elsewhere: Callable, /, *args: Any, **kwargs: Any) -> Any:
    device = device_of_lists(args, kwargs)
    if device is None:  # there is nothing to compute
        return NotImplemented
    with refusals(name, device):
        return (there if has_kernels(device) else elsewhere)(*args, **kwargs)
