# SPDX-License-Identifier: Apache-2.0
"""The short way of a call that is of the same kind as the last one.

A training loop calls a layer thousands of times in the same situation. The long way
(`ComposedModule._long_way`) decides what applies; where it was a plain call, the situation is
remembered here, and a later call that finds it unchanged goes straight to its plans. Every fact
that the long way decides by is compared, by identity where that is enough.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.function import apply_of
from transformer_engine.pytorch.modes import in_transform
from transformer_engine.pytorch.module.call import ModuleCall, PlainCall
from transformer_engine.pytorch.recompute import anywhere, may_record
from transformer_engine.pytorch.state import RegionState

__all__ = ["Repeat", "repeated_call"]

_graph_task = torch._C._current_graph_task_id
_autocast_enabled = torch.is_autocast_enabled
_grad_enabled = torch.is_grad_enabled


class Repeat(NamedTuple):
    """A plain call of a module and the situation it was made in.

    Attributes
    ----------
    tensors : tuple of Tensor or None
        What was read besides the input.
    parameters : tuple of (str, Parameter, bool)
        Attribute, value and ``requires_grad`` of each of them that is there.
    dtype : torch.dtype
        Of input, parameters and output.
    device : torch.device
        Of the input.
    kind : str
        Its type.
    features : int
        Its last dim.
    input_grad : bool
        It required a gradient.
    gradients : bool
        Grad mode.
    identity : str or None
        Repr of the recipe; None: high precision.
    calls : tuple of PlainCall
        The call, and the same as the region's first one that records a backward.
    records : bool
        It records a backward.
    apply : callable
        Runs one of the calls and records its backward.
    """

    tensors: tuple
    parameters: tuple
    dtype: torch.dtype
    device: torch.device
    kind: str
    features: int
    input_grad: bool
    gradients: bool
    identity: str | None
    calls: tuple[PlainCall, PlainCall]
    records: bool
    apply: Callable

    @classmethod
    def of(
        cls, call: ModuleCall, inp: Tensor, names: tuple, tensors: tuple, identity: str | None
    ) -> "Repeat":
        """Remember a call of the long way."""
        later = PlainCall(call.plans, call.slots, call.label)
        first = PlainCall(call.plans, call.slots, call.label)
        first.first, first.domain = True, call.domain
        first.split = later.split = call.split
        parameters = tuple(
            (name, tensor, tensor.requires_grad)
            for name, tensor in zip(names, tensors, strict=True)
            if tensor is not None
        )
        return cls(
            tensors,
            parameters,
            inp.dtype,
            inp.device,
            inp.device.type,
            inp.size(-1),
            inp.requires_grad,
            torch.is_grad_enabled(),
            identity,
            (later, first),
            call.plans.backward != 0,
            apply_of(call.label),
        )


def repeated_call(last: Repeat, module: Any, state: RegionState, inp: Tensor) -> PlainCall | None:
    """The call to run again, or None where the situation is another one.

    Parameters
    ----------
    last : Repeat
        What was remembered.
    module : ComposedModule
        The module; no graph is being traced.
    state : RegionState
        Of the thread.
    inp : Tensor
        The input.

    Returns
    -------
    PlainCall or None
        Ready for ``last.apply``.
    """
    (
        _,
        tensors,
        dtype,
        device,
        kind,
        features,
        input_grad,
        gradients,
        identity,
        calls,
        records,
        _,
    ) = last
    recipe = state.recipe if state.enabled else None
    if recipe is None:
        if identity is not None or state.calibrating:
            return None
    elif recipe.__repr__() != identity:
        return None
    if (
        type(inp) is not Tensor
        or inp.dtype is not dtype
        or inp.requires_grad is not input_grad
        or inp.device != device
        or inp.dim() == 0
        or inp.size(-1) != features
        or _grad_enabled() is not gradients
        or _autocast_enabled(kind)
        or _graph_task() != -1
        or in_transform()
        or (may_record(gradients, recipe is not None) and (gradients or anywhere()))
    ):
        return None
    parameters = module._parameters
    for name, tensor, wanted in tensors:
        if (
            parameters.get(name) is not tensor
            or tensor.requires_grad is not wanted
            or tensor.dtype is not dtype
        ):
            return None
    slots = calls[0].slots
    if slots is not None and (
        slots is not module._slots
        or not slots.current
        or slots.group is not state.group
        or (gradients and slots.domain.label != state.label)
        or module._loaded_state is not None
    ):
        return None
    if records and recipe is not None and state.first:
        return calls[1] if calls[1].domain is state.domain else None
    return calls[0]
