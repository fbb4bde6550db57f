# SPDX-License-Identifier: Apache-2.0
"""Key of a call of a module: all that decides it; and the calls that a module keeps by it.

A training loop calls a layer thousands of times in a few ways. `call_key` puts the facts that
`LinearCallBase._decide` goes by into a tuple: the recipe, the grad mode, dtypes and devices of the
tensors, the dtype of `torch.autocast`, whether a checkpoint records the call or repeats one. What
was decided once for it is a `KeptCall`, which a later call finds under the same key. What differs
between two calls of one key belongs to a run (`call.CallRun`): quantized weights that are kept,
scales of the call that a checkpoint repeats, main gradients. Settings of the module are no part of
the key: one that is set takes its kept calls away. Without a key, and decided anew, are calls in
transforms of `torch.func`, on tensors without memory, on tensors of other classes, and of more
than 62 tensors (`MOST_TENSORS` of csrc/python/torch_py.c).
"""

import copy
import itertools
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.operand_casts import is_backward_wide
from transformer_engine.pytorch.execution.autograd import apply_of
from transformer_engine.pytorch.execution.recompute import in_reentrant_forward
from transformer_engine.pytorch.execution.thread_state import RegionState
from transformer_engine.pytorch.module import custom_quantizers
from transformer_engine.pytorch.module.call import ModuleCall
from transformer_engine.pytorch.scaling_state.scaling import Slots
from transformer_engine.pytorch.torchside.device import NUMBERS_OF_CUDA, type_of_number
from transformer_engine.pytorch.torchside.modes import (
    allows_tf32,
    any_autocast,
    autocast_dtype,
    dispatch_modes,
    faking,
    in_transform,
    unseen,
)
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized

KEPT = 16
"""Keys that a module, or a layer, keeps calls and plans by."""

_grad_enabled = torch.is_grad_enabled


class KeptPlans:
    """Plans by the keys of calls; those that a graph reads are attributes, too.

    A trace that reads a dict would make its length a condition of the graph.
    """

    _numbers = itertools.count()  # no name comes again, for an older graph may read it

    def __init__(self) -> None:
        self.by_key: dict[tuple, Any] = {}

    def __len__(self) -> int:
        return len(self.by_key)

    def __setitem__(self, key: tuple, plans: Any) -> None:
        self.by_key[key] = plans

    def clear(self) -> None:
        """Drop all, names too."""
        self.__dict__ = {"by_key": {}}  # in one step, for other threads read

    def name_of(self, plans: Any) -> str:
        """Name of the attribute that these are."""
        for name, held in vars(self).items():
            if held is plans:
                return name
        name = f"plans_{next(self._numbers)}"
        setattr(self, name, plans)
        return name


def keep(kept: dict | KeptPlans, key: Any, value: Any) -> Any:
    """Keep a value by its key, among at most `KEPT`; return it."""
    if len(kept) >= KEPT:
        kept.clear()
    kept[key] = value
    return value


class Recurrence:
    """Decides whether a call with a new key is kept, and so gets plans.

    Making plans takes longer than a call. A setting that changes all the time, such as a dropout by
    a schedule, must not make plans at each step. So the more keys there were, the more often a new
    one has to come in a row.
    """

    def __init__(self) -> None:
        self._made = 0  # keys that calls were kept by
        self._new: Any = None  # the last key that no call was kept by
        self._row = 0  # times that it came in a row

    def is_met(self, key: tuple) -> bool:
        """Note that a key has come that no call is kept by; whether to keep one."""
        self._row = self._row + 1 if key == self._new else 1
        self._new = key
        if self._row <= self._made // KEPT:
            return False
        self._made += 1
        return True


class KeptCall:
    """A call that a module makes and can make again, with the tensors that it has then."""

    __slots__ = (
        "apply",
        "call",
        "dtypes",
        "quantization",
        "quantized",
        "ran",
        "records",
        "updates",
    )

    def __init__(
        self, call: ModuleCall, ran: Any = None, quantization: tuple | None = None
    ) -> None:
        self.call = copy.copy(call)
        # Each run has its own.
        self.call.caches = self.call.weights = ()
        self.call.scales = self.call.unread_history = self.call.domain = None
        self.call.updates_backward = False
        self.dtypes = call.dtypes
        self.records = call.plans.backward is not None
        self.quantized = call.plans.quantized
        # It updates the backward state where it is the first of a region that records a backward.
        self.updates = self.quantized and self.records
        self.apply = apply_of(call.label)  # runs it and records its backward
        self.ran = ran  # the `LastCall` that `report` finds in the module after it
        self.quantization = quantization if self.quantized else None  # `Fp8Module._quantization`

    def holds(self, module: Any, state: RegionState, region: Any) -> bool:
        """Return whether the slots that it runs over are those that a call would take now.

        `region` is a `base.Region`; None where no checkpoint and no `CustomRecipe` is around, so
        that `state`, that of the thread, says all.
        """
        slots = self.call.owner_slots[0]
        if region is None:
            return slots is None or in_force(slots, module, state)
        recipe = region.recipe
        if recipe is not None and recipe.custom() and recipe is not self.quantization[2]:
            return False  # its functions have the same texts as others
        if region.replays:
            return slots is region.replays[0].slots and (slots is None or slots is module._slots)
        return slots is None or in_force(slots, module, state, bool(region.record))


def in_force(slots: Slots, module: Any, state: RegionState, recorded: bool = False) -> bool:
    """Return whether a module still has these slots, and a call in this state takes them.

    `recorded`: a checkpoint records the call.
    """
    return (
        slots is module._slots
        and slots.current
        and slots.group is state.group
        and (
            slots.domain.label == state.label
            or not (_grad_enabled() or state.calibrating or (recorded and in_reentrant_forward()))
        )
        and module._loaded_state is None
    )


def converted(tensors: tuple, dtypes: tuple[torch.dtype | None, ...]) -> tuple:
    """Tensors in the dtypes that a call reads them in; None for one that it reads as it is."""
    pairs = zip(tensors, dtypes, strict=True)
    return tuple([t if dtype is None else t.to(dtype) for t, dtype in pairs])


def call_key(
    identity: Any,
    inp: Tensor,
    places: tuple[tuple[dict, str] | None, ...],
    wide: bool = False,
    region: Any = None,
) -> tuple[tuple | None, tuple[Tensor | None, ...]]:
    """Key of a call, and its tensors: the input and those of the module.

    No graph is being traced. `identity` is the text of the recipe that it quantizes by, or what
    else its module goes by. `places` say where the parameters that a call reads stand, in the order
    of its tensors; None for one that it lacks. `wide`: it has GEMMs in high precision. `region` is
    as of `KeptCall.holds`. (None, ()) where the call has to be decided by itself.
    """
    facts, tensors = _core.tensors_of_call(inp, places)
    if facts is None or (dispatch_modes() and faking()) or in_transform():
        return None, ()
    dtype = None
    if any_autocast():
        dtype = autocast_dtype(type_of_number(facts[1]))
    if wide and facts[1] in NUMBERS_OF_CUDA:
        # Whether fp32 may use TF32 can change.
        fp32 = (inp.dtype if dtype is None else dtype) is torch.float32
        if fp32 or (dtype is None and facts[4] is not None):
            facts = (*facts, allows_tf32())
    around = None if region is None else _around(region)
    return (identity, _grad_enabled(), facts, dtype, around), tensors


def _around(region: Any) -> tuple | bool:
    """Part of a key for the checkpoints around a call."""
    replays = region.replays
    if not replays:
        return bool(region.record)
    return *[(each.measures, each.scales is None) for each in replays], dispatch_modes() > 0


def layer_key(
    region: Any, inp: Tensor, places: tuple[tuple[dict, str] | None, ...]
) -> tuple[tuple | None, tuple[Tensor | None, ...]]:
    """`call_key` of a call of a layer in a `layer_region.LayerRegion`."""
    recipe = region.recipe
    if region.resolved:
        identity, wide = custom_quantizers.identity_of_all(region.resolved), True
    else:
        identity = region.state.depth > 0 if recipe is None else recipe.__repr__()
        wide = recipe is None or recipe.backward_override is not None
    around = region if region.record or region.replays else None
    return call_key(identity, inp, places, wide, around)


def key_of_quantized(
    recipe: Any, region: Any, inp: Any, places: tuple, module: Any
) -> tuple[tuple | None, tuple, tuple]:
    """`call_key` of a call of a module whose input arrives quantized, and what is read of it."""
    if recipe is None or recipe.custom() or not is_quantized(inp):
        return None, (), ()
    from transformer_engine.pytorch.tensor.recipes import forms_of, reads

    if not reads(inp, module._quantization_of(recipe, False), "input"):
        return None, (), ()
    own = next((place[0].get(place[1]) for place in places if place is not None), None)
    if own is None:
        return None, (), ()
    # A parameter stands for the input, which has the nominal dtype of a call that was made.
    wide = is_backward_wide(recipe)
    key, tensors = call_key(recipe.__repr__(), own.detach(), places, wide, region)
    if key is None:
        return None, (), ()
    columns = _grad_enabled() and not wide
    with unseen():  # as in `quantized.given_forms`
        forms, bits = forms_of(inp, "input", columns)
    facts = type(inp), inp.dtype, inp.device, inp.shape[-1], inp.requires_grad, bits
    return (key, *facts, *inp._kind()), (inp, *tensors[1:]), forms
