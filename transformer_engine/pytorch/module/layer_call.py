# SPDX-License-Identifier: Apache-2.0
"""Whole layers as one call: the modules of a layer lend it their parameters and scaling state.

A layer says how it is made of modules. Where these do nothing but what their classes define, and
the situation has a key (see `situation`), the layer runs as one plan per direction; else it calls
its modules, with the same bits.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.layer_graphs import AddSpec, BranchSpec, LayerSpec
from transformer_engine.common.plans import CallPlans, layer_plans
from transformer_engine.pytorch.execution.autograd import apply_of, run_forward_alone
from transformer_engine.pytorch.execution.thread_state import RegionState, current_state
from transformer_engine.pytorch.module import quantized
from transformer_engine.pytorch.module.call import CallRun, LayerCall, ModuleCall, Ran
from transformer_engine.pytorch.module.composed import ComposedModule
from transformer_engine.pytorch.module.norm import NormModule
from transformer_engine.pytorch.module.situation import Recurrence, in_force, keep, situation_of
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

__all__ = ["Attending", "Branch", "Layer", "LayerCalls", "fills_of"]

_UNKNOWN: Any = object()


class Branch(NamedTuple):
    """A branch of a layer, as it is made of modules."""

    name: str  # prefix of its nodes
    modules: tuple[ComposedModule, ...]  # as of `layer_graphs.BranchSpec.calls`
    others: tuple[torch.nn.Module, ...] = ()
    """Further modules whose forwards the layer does the work of."""
    attention: str | None = None
    """Where the module stands whose ``_attending`` says how it attends; "": the layer itself, which
    no branch holds, for a layer that nobody else holds has to be freed at once."""
    bias: str | None = None  # parameter of the last module that the addition adds
    norms: tuple[torch.nn.Module, ...] = ()  # of the heads of queries and of keys


class Attending(NamedTuple):
    """How one call attends."""

    key: tuple  # what its plans depend on
    spec: Callable  # makes the `layer_graphs.AttentionSpec`
    tensors: tuple[Tensor, ...]  # source, angles, mask, bias and lengths, as far as they are there
    draw: Callable[[Tensor], None] | None  # fills the random pair of its dropout; None: as others
    choice: Any  # of a backend, for `report`
    core: Any = None  # the module whose scaling state an attention in FP8 has
    constant: bool = False  # a call with the same arguments, none of them a tensor, does it again


class Layer(NamedTuple):
    """How a layer puts its branches together, now."""

    adds: tuple[AddSpec | None, ...]  # how each joins the residual stream, but for biases
    parallel: AddSpec | None = None  # how the sum of all does
    residual_is_norm: bool = False  # the residuals are the outputs of the branches' norms


class _BoundLayer(NamedTuple):
    """A call of a layer that can be made again (see `situation.Bound`)."""

    call: LayerCall
    first: LayerCall  # the same as the region's first one that records a backward
    apply: Callable  # runs one and records its backward
    remembered: tuple[tuple[dict, dict], ...]  # attributes of modules that tell of their last calls
    owners: tuple[Any, ...]  # modules whose scaling state it has, as of `LayerCall.owners`


class LayerCalls:
    """The modules of a layer as they were found, and the calls that were bound to them."""

    def __init__(self, branches: tuple[Branch, ...], first: int = 0) -> None:
        self.branches = branches
        self._first = first
        self.modules = tuple(module for branch in branches for module in branch.modules)
        self._settings = tuple(module._bound for module in self.modules)
        others = (module for branch in branches for module in (*branch.others, *branch.norms))
        self._all = (*self.modules, *others)
        self._norms = tuple(norm for branch in branches for norm in branch.norms)
        self._norm_settings = tuple(norm._settings() for norm in self._norms)
        self._parents: tuple[tuple[dict, str, torch.nn.Module | None], ...] = ()
        self._places, self._held = quantized.apart(tuple(self._find_places()))
        self._weights = tuple(  # where a weight stands whose dtype the heads of an attention have
            None if branch.attention is None else _weight_of(branch.modules[0])
            for branch in branches
        )
        self._caches = all(module.cache_weights for module in self.modules)
        self._accumulates = any(module.fuse_wgrad_accumulation for module in self.modules)
        # By key the bound call; None where the layer has to call its modules.
        self.calls: dict[tuple, _BoundLayer | None] = {}
        self._recurrence = Recurrence()
        self.parts: tuple[LayerCalls, ...] = ()  # each branch by itself, where there are several

    @classmethod
    def of(cls, layer: Any) -> "LayerCalls | None":
        """Those of a layer; None where one of its modules does more than its class defines."""
        if torch.compiler.is_compiling():
            return None
        known: LayerCalls | None = layer.__dict__.get("_calls")
        if known is not None and known._hold():
            return known
        branches, found = layer._branches(), None
        if (
            branches
            and all(isinstance(m, ComposedModule) for b in branches for m in b.modules)
            and all(isinstance(m, NormModule) for b in branches for m in b.norms)
        ):
            made = cls(branches)
            made._find_parents(layer)
            if made._hold():
                found = made
                if len(branches) > 1:
                    found.parts = tuple(cls((branch,), i) for i, branch in enumerate(branches))
        layer.__dict__["_calls"] = found
        return found

    def _find_parents(self, layer: torch.nn.Module) -> None:
        """Note where the modules stand, which programs may change at any time."""
        for parent in layer.modules():
            children = parent._modules
            self._parents += tuple((children, n, m) for n, m in children.items() if m in self._all)
            absent = (n for n in getattr(parent, "_MAY_HAVE", ()) if children.get(n) is None)
            self._parents += tuple((children, n, None) for n in absent)

    def _hold(self) -> bool:
        """Whether the modules are still the layer's, only forward, and have their settings."""
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

    def _find_places(self) -> Iterable[tuple[dict, str] | None]:
        """Where the parameters of a call stand."""
        for branch in self.branches:
            for module in branch.modules:
                parameters = module._parameters
                for name in module._parameter_names():
                    there = name is not None and parameters.get(name) is not None
                    yield (parameters, name) if there else None
            if branch.bias is not None:
                yield branch.modules[-1]._parameters, branch.bias
            for norm in branch.norms:
                parameters = norm._parameters
                for name in ("weight", "bias"):
                    yield (parameters, name) if parameters.get(name) is not None else None

    def run(self, layer: Any, inp: Tensor, options: tuple) -> Any:
        """Run the layer as one call: the results of its graph.

        Its ``_layer()`` says how its branches are put together now, and depends on
        ``_layer_key()``, its ``_is_planned(inp)`` whether there may be plans for so many dims;
        `options` are those of each branch. `NotImplemented` where it has to call its modules.
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
        """What `run` would run; makes slots where there are none."""
        found = self._find(layer, inp, options, current_state())
        return None if found is None else found[1].plans

    def _find(
        self, layer: Any, inp: Tensor, options: tuple, state: RegionState
    ) -> tuple[_BoundLayer, LayerCall, tuple, tuple] | None:
        """The call to make, its tensors and what its run has of its own (see `microbatch_of`).

        None where the layer has to call its modules.
        """
        key, tensors = situation_of(state, inp, self._places, True)
        if self._held:
            key, tensors = quantized.filled(key, tensors, self._held, state)
        if key is None or not layer._is_planned(inp) or dispatch_modes():
            return None
        attending: list[Attending | None] = []
        key, attended = (key, layer._layer_key()), ()
        for branch, weight, given in zip(self.branches, self._weights, options, strict=True):
            how = None
            if weight is not None:
                attends = layer._modules[branch.attention] if branch.attention else layer
                how = attends._attending(inp, given, weight[0].get(weight[1], inp).dtype)
                if how is None:
                    return None
                key, attended = (*key, how.key), (*attended, *how.tensors)
            attending.append(how)
        tensors = (tensors[0], *attended, *tensors[1:])
        first, own = options[0].is_first_microbatch, ((), ())
        if self._caches:
            first = microbatch(self.modules, first, state)
        if first is not None or self._accumulates or self._held:
            own, key = microbatch_of(self.modules, first, state, key, tensors if self._held else ())
        bound = self.calls.get(key, _UNKNOWN)
        if bound is None or (bound is _UNKNOWN and not self._recurrence.is_met(key)):
            return None
        call = None if bound is _UNKNOWN else self._call_in(bound, state)
        if call is None:
            bound = self._bind(layer, inp, (attending, first), state)
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
        self, layer: Any, inp: Tensor, given: tuple[Sequence, bool | None], state: RegionState
    ) -> _BoundLayer | None:
        """Find out what applies to a call of the layer; None where it has to call its modules.

        `given` is how each branch attends, and ``is_first_microbatch``.
        """
        attending, first_microbatch = given
        if inp.shape[-1] != self.modules[0]._sizes()[0][0]:
            return None
        made = layer._layer()
        made = made._replace(adds=made.adds[self._first :][: len(self.branches)])
        calls = self._module_calls(made, inp, attending, first_microbatch)
        if calls is None:
            return None
        plans = layer_plans(self._spec(made, calls, attending))
        flat = [call for found in calls for call in found]
        label = type(layer).__name__ + ("" if layer.name is None else f"[{layer.name}]")
        call = LayerCall(plans, None, label)
        cores = tuple(how.core for how in attending if how is not None and how.core is not None)
        owners = (*(of.slots for of in flat), *(_slots_of(core, state, inp) for core in cores))
        call.set_owners(owners)
        call.splits = self._splits(flat, attending)
        begin = 2 + sum(len(how.tensors) for how in attending if how is not None)
        call.first_module = (begin, begin + len(self.modules[0]._parameter_names()))
        call.fills = fills_of(plans, attending)
        call.domain = state.domain
        first = copy.copy(call)
        first.first = True
        reason = None if plans.quantized else state.why()
        remembered = []
        for module, of in zip(self.modules, flat, strict=True):
            values: dict[str, Any] = {"_ran": Ran(of.plans, reason)}
            if plans.quantized:
                values["_quantization"] = module._quantization
            remembered.append((module.__dict__, values))
        self._settings = tuple(module._bound for module in self.modules)
        apply = apply_of(label, plans.result_count > 1)
        return _BoundLayer(call, first, apply, tuple(remembered), (*self.modules, *cores))

    def _module_calls(
        self, made: Layer, inp: Tensor, attending: Sequence, first: bool | None
    ) -> list[list[ModuleCall]] | None:
        """The calls that the modules of each branch would make; None where one can not be joined.

        Nothing has run yet, so each gets a tensor without rows, of the dtype of its input, that
        requires a gradient where its input will.
        """
        gradients = torch.is_grad_enabled()
        stream, dtype = gradients and inp.requires_grad, inp.dtype
        calls = []
        for branch, how in zip(self.branches, attending, strict=True):
            wanted, of_input, found = stream, dtype, []
            channels = how.spec().slices[0][1] if branch.norms else 0
            heads = _made_in(branch.modules[0])
            if not all(norm.serves(channels, heads) for norm in branch.norms):
                return None
            for i, module in enumerate(branch.modules):
                given = wanted
                if i == 1 and len(branch.modules) == 3:
                    of_input = how.tensors[0].dtype
                    given = gradients and how.tensors[0].requires_grad
                if i == len(branch.modules) - 1:
                    of_input = heads if i > 0 else dtype
                    wanted = given = wanted or (gradients and _want_gradients(branch.norms))
                like = torch.empty(0, module._sizes()[0][0], dtype=of_input, device=inp.device)
                call = _call_of(module, like.requires_grad_(given), first)
                if call is None:
                    return None
                found.append(call)
                wanted = wanted or call.plans.backward is not None
            if made.parallel is None:
                stream = wanted
                residual = heads if made.residual_is_norm else dtype
                dtype = torch.promote_types(residual, _made_in(branch.modules[-1]))
            calls.append(found)
        return calls

    def _spec(self, made: Layer, calls: list, attending: Sequence) -> LayerSpec:
        """What the plans of a call are made of."""
        branches = []
        for branch, add, found, how in zip(self.branches, made.adds, calls, attending, strict=True):
            if add is not None and branch.bias is not None:
                bias = branch.modules[-1]._parameters[branch.bias]
                wanted = torch.is_grad_enabled() and bias.requires_grad
                add = add._replace(bias=_core.dtype_code(bias.dtype), bias_grad=wanted)
            specs = tuple(call.plans.spec for call in found)
            attention = None if how is None else how.spec()
            norms = tuple(norm.as_node() for norm in branch.norms)
            rest = add, norms, made.residual_is_norm
            branches.append(BranchSpec(branch.name, specs, attention, *rest))
        return LayerSpec(tuple(branches), made.parallel)

    def _splits(self, calls: list[ModuleCall], attending: Sequence) -> tuple:
        """Weights that come as several tensors, with their places among those of the layer."""
        at = 1 + sum(len(how.tensors) for how in attending if how is not None)
        found, part, of = [], 0, iter(calls)
        for branch in self.branches:
            for module in branch.modules:
                call = next(of)
                for split in call.splits:
                    found.append(split._replace(begin=at + split.begin - 1, part=part))
                at += len(module._parameter_names())
                part += len(call.plans.spec.parts)
            at += (branch.bias is not None) + 2 * len(branch.norms)
        return tuple(found)


def _slots_of(core: Any, state: RegionState, inp: Tensor) -> Slots | None:
    """Slots of an attention in FP8."""
    recipe = core._recipe_in_force()
    return core._slots_for(recipe, state.group, inp.device) if recipe.delayed() else None


def fills_of(plans: CallPlans, attending: Sequence) -> tuple:
    """What draws each random pair of a call (see `draw_pairs`), where an attention says how."""
    graph = plans.forward.graph
    nodes = (graph.nodes[n] for n in graph.numbers_of(_core.NODE_ATTENTION))
    draws = (how.draw for how in attending if how is not None)
    known = {node.inputs[-1]: draw for node, draw in zip(nodes, draws, strict=True)}
    fills = tuple(known.get(number) for _, number in plans.drawn)
    return fills if any(fills) else ()


def _want_gradients(norms: tuple[torch.nn.Module, ...]) -> bool:
    return any(parameter.requires_grad for norm in norms for parameter in norm.parameters())


def _weight_of(module: ComposedModule) -> tuple[dict, str]:
    """Where the first weight of a module stands."""
    return module._parameters, module.weight_names[0]


def _made_in(module: ComposedModule) -> torch.dtype:
    """The dtype of what a module makes, but in `torch.autocast`: that of its weights."""
    return module._part_tensors()[0].weights[0].dtype


def _call_of(module: ComposedModule, given: Tensor, first: bool | None) -> ModuleCall | None:
    """The call that a module would make of an input; None for one that can not be joined."""
    if module.checkpoint:
        return None
    region = module._region(False)
    if region.replay is not None or region.record:
        return None
    tensors, owners = module._promote(given, region.recipe)
    module._find_present(tensors.flat())
    if module._present is None:  # some are no parameters of its own
        return None
    call = module._prepare(tensors, region, first, owners)
    return None if call.plans.defer or call.traced or call.staged else call
