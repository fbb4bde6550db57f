# SPDX-License-Identifier: Apache-2.0
"""Whole layers as one call: the modules of a layer append their nodes to one graph.

A layer says in ``_emit(nodes, x, options, branch)`` which modules follow each other, and how their
results go together. That runs over an `Outline`, which notes the modules, and over an `Emission`,
which makes the graph of one kind of call. Where the modules do nothing but what their classes
define, and the call has a key (see `call_key`), the layer runs as one plan per direction;
else it calls its modules, with the same bits.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.plans import CallPlans
from transformer_engine.pytorch.execution.autograd import apply_of, run_forward_alone
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.module import quantized
from transformer_engine.pytorch.module.call import CallRun, LastCall, LayerCall
from transformer_engine.pytorch.module.call_key import (
    Recurrence,
    converted,
    in_force,
    keep,
    layer_key,
)
from transformer_engine.pytorch.module.emission import (
    ByModules,
    Emission,
    Outline,
    Value,
)
from transformer_engine.pytorch.module.layer_region import LayerRegion, region_of
from transformer_engine.pytorch.module.linear_base import LinearBase
from transformer_engine.pytorch.module.weight_cache import (
    keep_caches,
    microbatch,
    microbatch_of,
    reads,
)
from transformer_engine.pytorch.scaling_state.scaling import Slots
from transformer_engine.pytorch.torchside.modes import (
    any_autocast,
    autocast_dtype,
    begins_no_graph,
    dispatch_modes,
    forward_gradients,
    only_forwards,
)

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


class KeptLayerCall(NamedTuple):
    """A call of a layer that can be made again (see `call_key.KeptCall`)."""

    call: LayerCall
    apply: Callable  # runs one and records its backward
    remembered: tuple[tuple[dict, dict], ...]  # attributes of modules that tell of their last calls
    owners: tuple[Any, ...]  # modules whose scaling state it has, as of `LayerCall.owner_slots`
    measures: tuple[int, ...]  # flags of these slots that its plans depend on


class _Refused(NamedTuple):
    """The modules of a layer that has to call them, as they were found."""

    found: tuple

    @classmethod
    def of(cls, layer: torch.nn.Module) -> "_Refused":
        """Note those of a layer, and which of them only run the forwards of their classes."""
        return cls(tuple([(type(m), id(m), only_forwards(m)) for m in layer.modules()]))


class LayerRunner:
    """The modules of a layer as they were found, and the calls that are kept of them.

    `branch` is that of the layer that it is of; None: all of it.
    """

    def __init__(self, layer: Any, options: tuple = (), branch: int | None = None) -> None:
        outline = Outline(layer)
        layer._emit(outline, Value(), options, branch)
        if not outline.modules:  # nothing that a plan would join
            raise ByModules
        self.branch = branch
        self.modules, self._sites = tuple(outline.modules), tuple(outline.sites)
        # An attribute lookup of torch takes longer than one in the attributes of the module.
        self._versions = tuple((m.__dict__, m._version) for m in self.modules)
        self._norms = tuple((norm, norm._settings()) for norm in outline.norms)
        self._all = (*self.modules, *outline.others, *outline.blocks, *outline.norms)
        self._parents: tuple[tuple[dict, str, torch.nn.Module | None], ...] = ()
        self._places, self._quantized_parameters = quantized.apart(tuple(outline.places))
        self._caches = all(module.cache_weights for module in self.modules)
        self._in_parts = any(module.sequence_parallel for module in self.modules)
        self._accumulates = any(module.fuse_wgrad_accumulation for module in self.modules)
        # By key the kept call; None where the layer has to call its modules.
        self.calls: dict[tuple, KeptLayerCall | None] = {}
        self._recurrence = Recurrence()
        self.branches: tuple[LayerRunner, ...] = ()  # each by itself, where there are several

    @classmethod
    def of(cls, layer: Any, options: tuple = (), kept: dict | None = None) -> "LayerRunner | None":
        """Those of a layer; None where one of its modules does more than its class defines.

        `options` are those of a call, as ``_emit`` takes them, of a layer whose modules depend on
        them, which are then kept in `kept`.
        """
        kept = layer.__dict__ if kept is None else kept
        if torch.compiler.is_compiling():
            return None
        known: LayerRunner | _Refused | None = kept.get("_calls")
        if type(known) is cls:
            if known._hold():
                return known
        elif known is not None and known == _Refused.of(layer):
            return None
        found: LayerRunner | None = None
        try:
            made = cls(layer, options)
            made._find_parents(layer)
            if made._hold():
                found = made
                count = layer._count_of_branches()
                found.branches = tuple(cls(layer, (), i) for i in range(count)) if count > 1 else ()
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
        for attributes, version in self._versions:
            if attributes.get("_version", 0) != version:
                return False
        for norm, settings in self._norms:
            if norm._settings() != settings:
                return False
        return only_forwards(*self._all)

    @begins_no_graph
    def run(self, layer: Any, inp: Tensor, options: tuple) -> Any:
        """Run the layer as one call: the results of its graph.

        Its graph depends on ``_layer_key(options)``; its ``_is_planned(inp, options)`` says whether
        there may be plans for so many dims; `options` are those of each attention.
        `NotImplemented` where it has to call its modules.
        """
        found = self._find(layer, inp, options)
        if found is None or (not found[1].plans.backward and forward_gradients()):
            return NotImplemented
        kept_call, call, tensors, own, region = found
        records, state, repeated = call.plans.backward is not None, region.state, region.replays
        if repeated:
            for owner in kept_call.owners:
                region.frame.replay(owner)  # taken out of the checkpoint: the next ones follow
        for attributes, values in kept_call.remembered:
            attributes.update(values)
        if call.dtypes:
            tensors = converted(tensors, call.dtypes)
        run = CallRun(call, *own)
        run.updates_backward = call.plans.quantized and region.updates_backward(records)
        run.domain = (repeated[0] if repeated else state).domain
        if repeated:
            run.scales = tuple([entry.scales for entry in repeated])
        out = kept_call.apply(run, *tensors) if records else run_forward_alone(run, tensors)
        if run.updates_backward and not repeated:
            state.owes_update = False
        if call.plans.writes_caches and not repeated:
            parts = [module._linear_tensors() for module in self.modules]
            recipes = [region.recipe_of(i) for i in range(len(parts))]
            keep_caches(self.modules, own[0], parts, recipes)
        if region.record:
            region.leave(id(layer), kept_call.owners, call, own[0], run.updates_backward)
        return out

    def plans(self, layer: Any, inp: Tensor, options: tuple) -> CallPlans | None:
        """Plans that `run` would run; makes slots where there are none."""
        found = self._find(layer, inp, options)
        return None if found is None else found[1].plans

    def _find(
        self, layer: Any, inp: Tensor, options: tuple
    ) -> tuple[KeptLayerCall, LayerCall, tuple, tuple, LayerRegion] | None:
        """The call to make, its tensors, what its run has of its own (see `microbatch_of`).

        And the region that it is in. None where the layer has to call its modules.
        """
        state = current_state()
        region = None if dispatch_modes() else region_of(state, self.modules, id(layer))
        if region is None:
            return None
        key, tensors = layer_key(region, inp, self._places)
        if self._quantized_parameters:
            fp8 = region.recipe is not None and not region.resolved
            key, tensors = quantized.filled(key, tensors, self._quantized_parameters, fp8)
        if key is None or not layer._is_planned(inp, options):
            return None
        found = self._attending(layer, inp, options, region)
        if found is None:
            return None
        attending, region = found
        key, attended = (key, layer._layer_key(options)), ()
        for how in attending:
            key, attended = (*key, how.key), (*attended, *how.tensors)
        tensors = (tensors[0], *attended, *tensors[1:])
        first_microbatch, own = layer._first_microbatch(options), ((), ())
        if self._caches:
            first_microbatch = microbatch(self.modules, first_microbatch, state)
        shares = first_microbatch is not None or self._accumulates or self._quantized_parameters
        if shares or (region.replays and any([e.cache is not None for e in region.replays])):
            held = tensors if self._quantized_parameters else ()
            own, key = microbatch_of(self.modules, first_microbatch, state, key, held, region)
        if self._in_parts:  # of the sequence: see `parallel.TensorParallel._rows_join`
            region = region._replace(joins=self.modules[0]._rows_join(inp))
            key = (key, region.joins)
        kept_call = self.calls.get(key, _UNKNOWN)
        # Torch compares what a call and its repetition save, so both have to run the same way.
        new = kept_call is _UNKNOWN and not (region.record or region.replays)
        if kept_call is None or (new and not self._recurrence.is_met(key)):
            return None
        call = None if kept_call is _UNKNOWN else self._call_in(kept_call, key, region, inp.device)
        if call is None:
            kept_call = self._make_call(layer, inp, (options, attending, first_microbatch), region)
            if kept_call is not None and not reads(kept_call.call, own[0]):
                kept_call = None
            self._keep(key, kept_call)
            call = None if kept_call is None else kept_call.call
        return None if call is None else (kept_call, call, tensors, own, region)

    def _attending(
        self, layer: Any, inp: Tensor, options: tuple, region: LayerRegion
    ) -> tuple[list[Attending], LayerRegion] | None:
        """How each attention of a call attends, and the region of these too.

        None where one has to be called.
        """
        found: list[Attending] = []
        cast = autocast_dtype(inp.device.type) if any_autocast() else None
        for (module, (parameters, name)), given in zip(self._sites, options, strict=False):
            attends = layer if module is None else module
            dtype = cast or parameters.get(name, inp).dtype
            how = attends._attending(inp, given, dtype, region.frame)
            if how is None:
                return None
            found.append(how)
        known: LayerRegion | None = region
        if region.replays:
            known = region.with_cores((*self.modules, *_cores_of(found)))
        return None if known is None else (found, known)

    def _call_in(
        self, kept_call: KeptLayerCall, key: tuple, region: LayerRegion, device: torch.device
    ) -> LayerCall | None:
        """A call over the state in force; None: there has to be another one.

        Of a call that is repeated that is the state of this one.
        """
        call, recorded = kept_call.call, bool(region.record)
        if region.replays:
            slots = tuple([entry.slots for entry in region.replays])
            if slots == call.owner_slots:
                return call
        else:
            for module, own in zip(kept_call.owners, call.owner_slots, strict=True):
                if own is not None and not in_force(own, module, region.state, recorded):
                    break
            else:
                return call
            # Another group is, or a recipe that the modules come back to.
            numbered = enumerate(zip(kept_call.owners, call.owner_slots, strict=True))
            slots = tuple(
                [None if s is None else _slots_of(m, region, device, i) for i, (m, s) in numbered]
            )
        if call.staged is not None or _measures_of(slots) != kept_call.measures:
            return None  # its stages, or its plans, depend on them
        call = call.over(slots)
        self._keep(key, kept_call._replace(call=call))
        return call

    def _keep(self, key: tuple, kept_call: KeptLayerCall | None) -> None:
        """Keep a call by its key, and no slots but those that the modules have now."""
        if kept_call is None or _are_own(kept_call.call.owner_slots, kept_call.owners):
            keep(self.calls, key, kept_call)
        for other, kept in self.calls.items():
            if kept is not None and not _are_own(kept.call.owner_slots, kept.owners):
                self.calls[other] = kept._replace(call=kept.call.released())

    # ---- making a call -------------------------------------------------------------------------

    def _make_call(
        self,
        layer: Any,
        inp: Tensor,
        given: tuple[tuple, Sequence, bool | None],
        region: LayerRegion,
    ) -> KeptLayerCall | None:
        """Find out what applies to a call of the layer; None where it has to call its modules.

        `given` are its options, how each attention attends, and ``is_first_microbatch``.
        """
        options, attending, first_microbatch = given
        nodes = Emission(len(self.modules), attending, first_microbatch, region)
        try:
            plans = nodes.complete(layer._emit(nodes, nodes.input(inp), options, self.branch))
            staged = nodes.staged(plans)
        except ByModules:
            return None
        label = type(layer).__name__ + ("" if layer.name is None else f"[{layer.name}]")
        call = LayerCall(plans, None, label)
        cores = _cores_of(attending)
        owners = (
            *(of.slots for of in nodes.calls),
            *(
                _slots_of(core, region, inp.device, i)
                for i, core in enumerate(cores, len(self.modules))
            ),
        )
        call.set_owner_slots(owners)
        call.splits, call.dtypes = nodes.splits(), nodes.dtypes()
        begin = 2 + sum(len(how.tensors) for how in attending)
        call.first_module = (begin, begin + len(self.modules[0]._parameter_names()))
        call.staged, call.unused_pairs = staged, nodes.unused_pairs(plans)
        call.fills = fills_of(plans, attending, call.unused_pairs)
        remembered = []
        for i, (module, of) in enumerate(zip(self.modules, nodes.calls, strict=True)):
            reason = region.state.why() if region.recipe_of(i) is None else None
            values: dict[str, Any] = {"_last_call": LastCall(of.plans, reason)}
            if of.plans.quantized:
                values["_quantization"] = module._quantization
            remembered.append((module.__dict__, values))
        apply = apply_of(label, plans.result_count > 1)
        everyone, measures = (*self.modules, *cores), _measures_of(owners)
        return KeptLayerCall(call, apply, tuple(remembered), everyone, measures)


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
    raise AssertionError(f"{type(layer).__name__}.forward was replaced by another function")


def asked(layer: Any, *given: Any) -> None:
    """Stop a forward whose arguments alone are asked for, once it has put them together."""
    if getattr(_ASKING, "layer", None) is layer:
        raise _Asked(*given)


def _cores_of(attending: Sequence[Attending]) -> tuple:
    """Attentions in FP8, which have scaling state."""
    return tuple([how.core for how in attending if how.core is not None])


def _slots_of(
    module: Any, region: LayerRegion, device: torch.device, number: int = 0
) -> Slots | None:
    """Slots of a module, or of an attention in FP8; `number` is that among the owners of a call."""
    if region.replays:
        return region.replays[number].slots
    is_linear = isinstance(module, LinearBase)
    recipe = region.recipe_of(number) if is_linear else module._recipe_in_force()
    if not recipe.delayed():
        return None
    slots = module._slots_for(recipe, region.state.group, device)
    if is_linear:
        quantized.bind_quantizers(module)
    return slots


def _measures_of(owners: Sequence) -> tuple[int, ...]:
    return tuple([0 if slots is None else slots.measures for slots in owners])


def _are_own(slots: Sequence, owners: Sequence) -> bool:
    """Return whether slots are those that owners have now; others are not to be kept alive."""
    return all([s is None or s is owner._slots for s, owner in zip(slots, owners, strict=True)])


def fills_of(plans: CallPlans, attending: Sequence, unused_pairs: Sequence[int] = ()) -> tuple:
    """Functions that draw a call's random pairs (see `draw_pairs`), where attentions have them.

    `unused_pairs` is as of `ModuleCall`.
    """
    graph = plans.forward.graph
    nodes = (graph.nodes[n] for n in graph.numbers_of(_core.NODE_ATTENTION))
    draws = (how.draw for how in attending)
    known = {node.inputs[-1]: draw for node, draw in zip(nodes, draws, strict=True)}
    fills = [known.get(number) for _, number in plans.drawn]
    for place in unused_pairs:
        fills.insert(place, None)
    return tuple(fills) if any(fills) else ()
