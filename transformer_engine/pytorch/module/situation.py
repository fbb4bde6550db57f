# SPDX-License-Identifier: Apache-2.0
"""What a call of a module is decided by, as one key; and the calls that a module keeps by it.

A training loop calls a layer thousands of times in a few situations. `situation_of` puts the facts
that `ComposedModule._decide` goes by into a tuple; what was decided once for it is a `Bound` call,
which a later call finds under the same key. A situation in which something else counts, a
checkpoint say, has no key: it is decided anew each time. Settings of the module are no part of it:
one that is set takes its bound calls away.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.function import apply_of
from transformer_engine.pytorch.modes import dispatch_modes, faking, in_transform
from transformer_engine.pytorch.module.call import ModuleCall
from transformer_engine.pytorch.recompute import anywhere, may_record
from transformer_engine.pytorch.state import RegionState

__all__ = ["Bound", "situation_of"]

_graph_task = torch._C._current_graph_task_id
_autocast_enabled = torch.is_autocast_enabled
_grad_enabled = torch.is_grad_enabled


class Bound(NamedTuple):
    """A call of a module that can be made again, with the tensors that the module has then.

    Attributes
    ----------
    calls : tuple of ModuleCall
        The call, and the same as the region's first one that records a backward.
    records : bool
        It records a backward.
    apply : callable
        Runs one of the calls and records its backward.
    remembered : dict
        Attributes of the module that tell of its last call.
    """

    calls: tuple[ModuleCall, ModuleCall]
    records: bool
    apply: Callable
    remembered: dict[str, Any]

    @classmethod
    def of(cls, call: ModuleCall, module: Any) -> "Bound":
        """Keep a call that a module has just made."""
        later, first = copy.copy(call), copy.copy(call)
        later.first, first.first = False, True
        remembered = {"_ran": module._ran}
        if call.plans.quantized:
            remembered["_quantization"] = module._quantization
        return cls((later, first), call.plans.backward != 0, apply_of(call.label), remembered)

    def call_in(self, module: Any, state: RegionState) -> ModuleCall | None:
        """The call to make now; None where the state that it is bound to is no longer in force."""
        call, first = self.calls
        slots = call.slots
        if slots is not None and (
            slots is not module._slots
            or not slots.current
            or slots.group is not state.group
            or (slots.domain.label != state.label and (_grad_enabled() or state.calibrating))
            or module._loaded_state is not None
        ):
            return None
        if self.records and call.plans.quantized and state.first:
            return first if first.domain is state.domain else None
        return call


def situation_of(
    state: RegionState, inp: Tensor, parameters: dict[str, Tensor | None], names: tuple
) -> tuple[tuple | None, tuple[Tensor | None, ...]]:
    """Key of the situation of a call, and the module's tensors in it.

    Parameters
    ----------
    state : RegionState
        Of the thread; no graph is being traced.
    inp : Tensor
        The input.
    parameters : dict of str to Parameter
        Of the module.
    names : tuple of str or None
        Of the parameters that a call reads, in the order of its tensors; None for one it lacks.

    Returns
    -------
    key : tuple or None
        None where the call has to be decided by itself.
    tensors : tuple of Tensor or None
        After the input; nothing without a key.
    """
    recipe = state.recipe if state.enabled else None
    if type(inp) is not Tensor or inp.dim() == 0 or (recipe is None and state.calibrating):
        return None, ()
    dtype, gradients = inp.dtype, _grad_enabled()
    kind = "cpu" if inp.is_cpu else "cuda"
    if (
        not (inp.is_cpu or inp.is_cuda)
        or (dispatch_modes() and faking())
        or _autocast_enabled(kind)
        or _graph_task() != -1
        or in_transform()
        or (may_record(gradients, recipe is not None) and (gradients or anywhere()))
        # On a GPU, whether fp32 may use TF32 can change.
        or (recipe is None and dtype is torch.float32 and kind != "cpu")
    ):
        return None, ()
    wanted, tensors = int(inp.requires_grad), []
    for name in names:
        tensor = None
        if name is not None:
            tensor = parameters.get(name)
            if tensor is None or tensor.dtype is not dtype:
                return None, ()
            wanted = 2 * wanted + tensor.requires_grad
        tensors.append(tensor)
    identity = state.depth > 0 if recipe is None else recipe.__repr__()
    key = (identity, dtype, inp.get_device(), inp.size(-1), gradients, wanted)
    return key, tuple(tensors)
