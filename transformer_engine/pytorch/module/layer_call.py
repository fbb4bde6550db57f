# SPDX-License-Identifier: Apache-2.0
"""Whole layers as one call: the modules of a layer append their nodes to one graph.

A layer says in ``_emit(nodes, x, options, part)`` which modules follow each other, and how their
results go together. That runs over an `Outline`, which notes the modules, and over an `Emission`,
which makes the graph of one kind of call. Where the modules do nothing but what their classes
define, and the call has a key (see `call_key`), the layer runs as one plan per direction;
else it calls its modules, with the same bits.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.plans import CallPlans
from transformer_engine.pytorch.execution.autograd import apply_of, run_forward_alone
from transformer_engine.pytorch.execution.thread_state import RegionState, current_state
from transformer_engine.pytorch.module import quantized
from transformer_engine.pytorch.module.call import CallRun, LayerCall, Ran
from transformer_engine.pytorch.module.call_key import Recurrence, in_force, keep, layer_key
from transformer_engine.pytorch.module.emission import (
    ByModules,
    Emission,
    Outline,
    Value,
)
from transformer_engine.pytorch.module.weight_cache import (
    keep_caches,
    microbatch,
    microbatch_of,
    reads,
)
from transformer_engine.pytorch.scaling_state.scaling import Slots
from transformer_engine.pytorch.torchside.modes import (
    dispatch_modes,
    forward_gradients,
    only_forwards,
)

__all__ = ["Attending", "LayerCalls", "asked", "fills_of", "given_to"]

_UNKNOWN: Any = object()


class Attending(NamedTuple):
    """How one call attends."""

    key: tuple  # what its plans depend on
    spec: Callable  # makes the `attention_graphs.AttentionSpec`
    tensors: tuple[Tensor, ...]  # source, angles, mask, bias and lengths, as far as they are there
    draw: Callable[[Tensor], None] | None  # fills the random pair of its dropout; None: as others
    choice: Any  # of a backend, for `report`
    core: Any = None  # the module whose scaling state an attention in FP8 has
    constant: bool = False  # a call with the same arguments, none of them a tensor, does it again


# ---- calls that are made again -------------------------------------------------------------------


class _BoundLayer(NamedTuple):
    """A call of a layer that can be made again (see `call_key.KeptCall`)."""

    call: LayerCall
    first: LayerCall  # the same as the region's first one that records a backward
    apply: Callable  # runs one and records its backward
    remembered: tuple[tuple[dict, dict], ...]  # attributes of modules that tell of their last calls
    owners: tuple[Any, ...]  # modules whose scaling state it has, as of `LayerCall.owners`


class _Refused(NamedTuple):
    """The modules of a layer that has to call them, as they were found."""

    found: tuple

    @classmethod
    def of(cls, layer: torch.nn.Module) -> "_Refused":
        """Note those of a layer, and which of them only run the forwards of their classes."""
        return cls(tuple([(type(m), id(m), only_forwards(m)) for m in layer.modules()]))


class LayerCalls:
    """The modules of a layer as they were found, and the calls that were bound to them.

    `part` is that of the layer that it is of; None: all of it.
    """

    def __init__(self, layer: Any, options: tuple = (), part: int | None = None) -> None:
        outline = Outline(layer)
        layer._emit(outline, Value(), options, part)
        self.part = part
        self.modules, self._sites = tuple(outline.modules), tuple(outline.sites)
        self._settings = tuple(module._bound for module in self.modules)
        self._norms = tuple(outline.norms)
        self._norm_settings = tuple(norm._settings() for norm in self._norms)
        self._all = (*self.modules, *outline.others, *outline.blocks, *self._norms)
        self._parents: tuple[tuple[dict, str, torch.nn.Module | None], ...] = ()
        self._places, self._held = quantized.apart(tuple(outline.places))
        self._caches = all(module.cache_weights for module in self.modules)
        self._accumulates = any(module.fuse_wgrad_accumulation for module in self.modules)
        # By key the bound call; None where the layer has to call its modules.
        self.calls: dict[tuple, _BoundLayer | None] = {}
        self._recurrence = Recurrence()
        self.parts: tuple[LayerCalls, ...] = ()  # each part by itself, where there are several

    @classmethod
    def of(cls, layer: Any, options: tuple = (), kept: dict | None = None) -> "LayerCalls | None":
        """Those of a layer; None where one of its modules does more than its class defines.

        `options` are those of a call, as ``_emit`` takes them, of a layer whose modules depend on
        them, which are then kept in `kept`.
        """
        kept = layer.__dict__ if kept is None else kept
        if torch.compiler.is_compiling():
            return None
        known: LayerCalls | _Refused | None = kept.get("_calls")
        if type(known) is cls:
            if known._hold():
                return known
        elif known is not None and known == _Refused.of(layer):
            return None
        found: LayerCalls | None = None
        try:
            made = cls(layer, options)
            made._find_parents(layer)
            if made._hold():
                found = made
                count = layer._count_of_parts()
                found.parts = tuple(cls(layer, (), i) for i in range(count)) if count > 1 else ()
        except ByModules:
            pass
        kept["_calls"] = _Refused.of(layer) if found is None else found
        return found

    def _find_parents(self, layer: torch.nn.Module) -> None:
        """Note where the modules stand, which programs may change at any time."""
        for parent in layer.modules():
            children = parent._modules
            self._parents += tuple((children, n, m) for n, m in children.items() if m in self._all)
            absent = (n for n in getattr(parent, "_MAY_HAVE", ()) if children.get(n) is None)
            self._parents += tuple((children, n, None) for n in absent)

    def _hold(self) -> bool:
        """Tell whether the modules are still the layer's, only forward, and have their settings."""
        for children, name, module in self._parents:
            if children.get(name) is not module:
                return False
        for module, bound in zip(self.modules, self._settings, strict=True):
            if module.__dict__["_bound"] is not bound:
                return False
        for norm, settings in zip(self._norms, self._norm_settings, strict=True):
            if norm._settings() != settings:
                return False
        return only_forwards(*self._all)

    def run(self, layer: Any, inp: Tensor, options: tuple) -> Any:
        """Run the layer as one call: the results of its graph.

        Its graph depends on ``_layer_key(options)``; its ``_is_planned(inp, options)`` says whether
        there may be plans for so many dims; `options` are those of each attention.
        `NotImplemented` where it has to call its modules.
        """
        state = current_state()
        found = self._find(layer, inp, options, state)
        if found is None or (not found[1].plans.backward and forward_gradients()):
            return NotImplemented
        bound, call, tensors, own = found
        for attributes, values in bound.remembered:
            attributes.update(values)
        run = CallRun(call, *own)
        out = bound.apply(run, *tensors) if call.plans.backward else run_forward_alone(run, tensors)
        if call.first:
            state.first = False
        if call.plans.writes_caches:
            parts = [module._part_tensors() for module in self.modules]
            keep_caches(self.modules, own[0], parts, state.recipe)
        return out

    def plans(self, layer: Any, inp: Tensor, options: tuple) -> CallPlans | None:
        """Plans that `run` would run; makes slots where there are none."""
        found = self._find(layer, inp, options, current_state())
        return None if found is None else found[1].plans

    def _find(
        self, layer: Any, inp: Tensor, options: tuple, state: RegionState
    ) -> tuple[_BoundLayer, LayerCall, tuple, tuple] | None:
        """The call to make, its tensors and what its run has of its own (see `microbatch_of`).

        None where the layer has to call its modules.
        """
        key, tensors = layer_key(state, inp, self._places)
        if self._held:
            key, tensors = quantized.filled(key, tensors, self._held, state.enabled)
        if key is None or not layer._is_planned(inp, options) or dispatch_modes():
            return None
        attending: list[Attending] = []
        key, attended = (key, layer._layer_key(options)), ()
        for (module, (parameters, name)), given in zip(self._sites, options, strict=False):
            attends = layer if module is None else module
            how = attends._attending(inp, given, parameters.get(name, inp).dtype)
            if how is None:
                return None
            key, attended = (*key, how.key), (*attended, *how.tensors)
            attending.append(how)
        tensors = (tensors[0], *attended, *tensors[1:])
        first, own = layer._first_microbatch(options), ((), ())
        if self._caches:
            first = microbatch(self.modules, first, state)
        if first is not None or self._accumulates or self._held:
            own, key = microbatch_of(self.modules, first, state, key, tensors if self._held else ())
        bound = self.calls.get(key, _UNKNOWN)
        if bound is None or (bound is _UNKNOWN and not self._recurrence.is_met(key)):
            return None
        call = None if bound is _UNKNOWN else self._call_in(bound, state)
        if call is None:
            bound = self._bind(layer, inp, (options, attending, first), state)
            if bound is not None and not reads(bound.call, own[0]):
                return None
            keep(self.calls, key, bound)
            call = None if bound is None else self._call_in(bound, state)
        return None if call is None else (bound, call, tensors, own)

    def _call_in(self, bound: _BoundLayer, state: RegionState) -> LayerCall | None:
        """The call to make now; None where the state that it is bound to is no longer in force."""
        call = bound.call
        for module, slots in zip(bound.owners, call.owners, strict=True):
            if slots is not None and not in_force(slots, module, state):
                return None
        if call.plans.quantized and call.plans.backward and state.first:
            return bound.first if call.domain is state.domain else None
        return call

    # ---- binding -------------------------------------------------------------------------------

    def _bind(
        self,
        layer: Any,
        inp: Tensor,
        given: tuple[tuple, Sequence, bool | None],
        state: RegionState,
    ) -> _BoundLayer | None:
        """Find out what applies to a call of the layer; None where it has to call its modules.

        `given` are its options, how each attention attends, and ``is_first_microbatch``.
        """
        options, attending, first_microbatch = given
        if inp.shape[-1] != self.modules[0]._sizes()[0][0]:
            return None
        nodes = Emission(len(self.modules), attending, first_microbatch)
        try:
            plans = nodes.complete(layer._emit(nodes, nodes.input(inp), options, self.part))
            staged = nodes.staged(plans)
        except ByModules:
            return None
        label = type(layer).__name__ + ("" if layer.name is None else f"[{layer.name}]")
        call = LayerCall(plans, None, label)
        cores = tuple(how.core for how in attending if how.core is not None)
        owners = (
            *(of.slots for of in nodes.calls),
            *(_slots_of(core, state, inp) for core in cores),
        )
        call.set_owners(owners)
        call.splits = nodes.splits()
        begin = 2 + sum(len(how.tensors) for how in attending)
        call.first_module = (begin, begin + len(self.modules[0]._parameter_names()))
        call.fills, call.staged = fills_of(plans, attending), staged
        call.domain = state.domain
        first = copy.copy(call)
        first.first = True
        reason = None if plans.quantized else state.why()
        remembered = []
        for module, of in zip(self.modules, nodes.calls, strict=True):
            values: dict[str, Any] = {"_ran": Ran(of.plans, reason)}
            if plans.quantized:
                values["_quantization"] = module._quantization
            remembered.append((module.__dict__, values))
        self._settings = tuple(module._bound for module in self.modules)
        apply = apply_of(label, plans.result_count > 1)
        return _BoundLayer(call, first, apply, tuple(remembered), (*self.modules, *cores))


# ---- what a call of a layer would run ------------------------------------------------------------


class _Asked(BaseException):
    """Carries the arguments of a call of a layer, where these alone are asked for."""


_ASKING = threading.local()


def given_to(layer: Any, args: tuple, kwargs: dict) -> tuple:
    """Return the arguments that a layer's forward puts together; it does not go on. See `asked`."""
    outer, _ASKING.layer = getattr(_ASKING, "layer", None), layer
    try:
        layer.forward(*args, **kwargs)
    except _Asked as found:
        return found.args
    finally:
        _ASKING.layer = outer
    raise AssertionError(
        f"{type(layer).__name__}.forward was replaced, so its arguments are not known"
    )


def asked(layer: Any, *given: Any) -> None:
    """Stop a forward whose arguments alone are asked for, once it has put them together."""
    if getattr(_ASKING, "layer", None) is layer:
        raise _Asked(*given)


def _slots_of(core: Any, state: RegionState, inp: Tensor) -> Slots | None:
    """Slots of an attention in FP8."""
    recipe = core._recipe_in_force()
    return core._slots_for(recipe, state.group, inp.device) if recipe.delayed() else None


def fills_of(plans: CallPlans, attending: Sequence) -> tuple:
    """Functions that draw a call's random pairs (see `draw_pairs`), where attentions have them."""
    graph = plans.forward.graph
    nodes = (graph.nodes[n] for n in graph.numbers_of(_core.NODE_ATTENTION))
    draws = (how.draw for how in attending)
    known = {node.inputs[-1]: draw for node, draw in zip(nodes, draws, strict=True)}
    fills = tuple(known.get(number) for _, number in plans.drawn)
    return fills if any(fills) else ()
