# SPDX-License-Identifier: Apache-2.0
"""What a call of a module is decided by, as one key; and the calls that a module keeps by it.

A training loop calls a layer thousands of times in a few situations. `situation_of` puts the facts
that `ComposedModule._decide` goes by into a tuple; what was decided once for it is a `Bound` call,
which a later call finds under the same key. A situation in which something else counts, a
checkpoint say, has no key: it is decided anew each time. Settings of the module are no part of it:
one that is set takes its bound calls away.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.operand_casts import is_backward_wide
from transformer_engine.pytorch.execution.autograd import apply_of
from transformer_engine.pytorch.execution.recompute import anywhere, may_record
from transformer_engine.pytorch.execution.thread_state import RegionState
from transformer_engine.pytorch.module.call import ModuleCall
from transformer_engine.pytorch.scaling_state.scaling import Slots
from transformer_engine.pytorch.torchside.modes import (
    allows_tf32,
    any_autocast,
    dispatch_modes,
    faking,
    graph_task,
    in_transform,
)
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized

__all__ = [
    "Bound",
    "Recurrence",
    "in_force",
    "keep",
    "situation_of",
    "situation_of_quantized",
]

KEPT = 16
"""Situations that a module, or a layer, keeps calls and plans of."""

_grad_enabled = torch.is_grad_enabled


def keep(kept: dict, key: Any, value: Any) -> Any:
    """Keep a value by its key, among at most `KEPT`; return it."""
    if len(kept) >= KEPT:
        kept.clear()
    kept[key] = value
    return value


class Recurrence:
    """Whether a call is bound to a new situation, which takes plans.

    To make them takes longer than a call, so a setting that changes all the time, a dropout by a
    schedule, must not make some at each step: the more there were, the more often a situation has
    to come in a row.
    """

    def __init__(self) -> None:
        self._made = 0  # how many situations calls were bound to
        self._new: Any = None  # the last one that there was no call for,
        self._row = 0  # and how often it came in a row

    def is_met(self, key: tuple) -> bool:
        """Note that a situation has come that there is no call for; whether to bind one."""
        self._row = self._row + 1 if key == self._new else 1
        self._new = key
        if self._row <= self._made // KEPT:
            return False
        self._made += 1
        return True


class Bound:
    """A call that a module has just made and can make again, with the tensors that it has then."""

    __slots__ = ("apply", "call", "first", "quantization", "quantized", "ran", "records")

    def __init__(self, call: ModuleCall, module: Any) -> None:
        # The same, as the region's first one that records a backward: `first`.
        self.call = copy.copy(call)
        self.call.caches = self.call.weights = ()  # each run has its own
        self.first = copy.copy(self.call)
        self.call.first, self.first.first = False, True
        self.records = call.plans.backward is not None
        self.quantized = call.plans.quantized
        self.apply = apply_of(call.label)  # runs one of them and records its backward
        self.ran = module._ran  # what the module tells of its last call, and of the last in FP8
        self.quantization = module._quantization if self.quantized else None

    def call_in(self, module: Any, state: RegionState) -> ModuleCall | None:
        """The call to make now; None where the state that it is bound to is no longer in force."""
        call = self.call
        slots = call.slots
        if slots is not None and not in_force(slots, module, state):
            return None
        if self.quantized and self.records and state.first:
            return self.first if call.domain is state.domain else None
        return call


def in_force(slots: Slots, module: Any, state: RegionState) -> bool:
    """Whether a module still has these slots, and a call in this state takes them."""
    return (
        slots is module._slots
        and slots.current
        and slots.group is state.group
        and (slots.domain.label == state.label or not (_grad_enabled() or state.calibrating))
        and module._loaded_state is None
    )


def situation_of(
    state: RegionState,
    inp: Tensor,
    places: tuple[tuple[dict, str] | None, ...],
    mixed: bool = False,
) -> tuple[tuple | None, tuple[Tensor | None, ...]]:
    """Key of the situation of a call, and the input and the module's tensors in it.

    No graph is being traced. `places` say where the parameters that a call reads stand, in the
    order of its tensors; None for one that it lacks. `mixed`: they may be of several dtypes, as
    where a norm comes first. (None, ()) where the call has to be decided by itself.
    """
    recipe = state.recipe if state.enabled else None
    if (recipe is None and state.calibrating) or (recipe is not None and recipe.custom()):
        return None, ()
    facts, tensors = _core.tensors_of_call(inp, places)
    gradients = _grad_enabled()
    if (
        facts is None
        or (facts[4] is not None and not mixed)
        or (dispatch_modes() and faking())
        or any_autocast()
        or graph_task() != -1
        or in_transform()
        or (may_record(gradients, recipe is not None) and (gradients or anywhere()))
    ):
        return None, ()
    # On a GPU, whether fp32 may use TF32 can change.
    if facts[1] >= 0 and is_backward_wide(recipe):
        if facts[4] is not None:
            facts = (*facts, allows_tf32())
        elif inp.dtype is torch.float32:
            return None, ()
    return (state.depth > 0 if recipe is None else recipe.__repr__(), gradients, facts), tensors


def situation_of_quantized(
    state: RegionState, inp: Any, places: tuple, module: Any
) -> tuple[tuple | None, tuple, tuple]:
    """`situation_of` a call of a module whose input arrives quantized, and what is read of it."""
    recipe = state.recipe if state.enabled else None
    if recipe is None or recipe.custom() or not is_quantized(inp):
        return None, (), ()
    from transformer_engine.pytorch.tensor.recipes import forms_of, reads

    if not reads(inp, module._quantization_of(recipe, False), "input"):
        return None, (), ()
    own = next((place[0].get(place[1]) for place in places if place is not None), None)
    if own is None:
        return None, (), ()
    # A parameter stands for the input, which has the nominal dtype of a call that was made.
    key, tensors = situation_of(state, own.detach(), places)
    if key is None:
        return None, (), ()
    columns = _grad_enabled() and not is_backward_wide(recipe)
    forms, bits = forms_of(inp, "input", columns)
    facts = type(inp), inp.dtype, inp.device, inp.shape[-1], inp.requires_grad, bits
    return (key, *facts, *inp._kind()), (inp, *tensors[1:]), forms
