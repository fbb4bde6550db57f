# SPDX-License-Identifier: Apache-2.0
"""Whole layers as one call: the modules of a layer append their nodes to one graph.

A layer says in ``_emit(nodes, x, options, part)`` which modules follow each other, and how their
results go together. That runs over an `Outline`, which notes the modules, and over an `Emission`,
which makes the graph of one kind of call. Where the modules do nothing but what their classes
define, and the situation has a key (see `situation`), the layer runs as one plan per direction;
else it calls its modules, with the same bits.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common import attention_graphs
from transformer_engine.common.graphs import ROWS, Graph, Link, input_flags
from transformer_engine.common.plan_text import Plan
from transformer_engine.common.plans import CallPlans, plans_of
from transformer_engine.pytorch.execution.autograd import apply_of, run_forward_alone
from transformer_engine.pytorch.execution.stages import Staged
from transformer_engine.pytorch.execution.thread_state import RegionState, current_state
from transformer_engine.pytorch.module import quantized
from transformer_engine.pytorch.module.call import CallRun, LayerCall, ModuleCall, Ran
from transformer_engine.pytorch.module.composed import ComposedModule
from transformer_engine.pytorch.module.joined import SplitTensors
from transformer_engine.pytorch.module.norm import NormModule
from transformer_engine.pytorch.module.operands import DTYPES
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

__all__ = ["Attending", "ByModules", "LayerCalls", "Value", "fills_of", "given_to"]

_UNKNOWN: Any = object()


class ByModules(Exception):  # noqa: N818 - nothing went wrong
    """A layer, or this call of it, has to call its modules."""


class Attending(NamedTuple):
    """How one call attends."""

    key: tuple  # what its plans depend on
    spec: Callable  # makes the `attention_graphs.AttentionSpec`
    tensors: tuple[Tensor, ...]  # source, angles, mask, bias and lengths, as far as they are there
    draw: Callable[[Tensor], None] | None  # fills the random pair of its dropout; None: as others
    choice: Any  # of a backend, for `report`
    core: Any = None  # the module whose scaling state an attention in FP8 has
    constant: bool = False  # a call with the same arguments, none of them a tensor, does it again


class Value(NamedTuple):
    """What one module hands to the next one, while a layer is looked through."""

    number: int = -1  # in the graph; -1 where there is none yet
    dtype: torch.dtype = torch.float32
    wanted: bool = False  # something that it was made of has a gradient


class Bias(NamedTuple):
    """A bias that a module returns, for the layer to add."""

    module: ComposedModule
    name: str  # of its parameter


# ---- what a layer is made of ---------------------------------------------------------------------


class Outline:
    """The modules of a layer, in the order in which they append their nodes.

    Its methods are those of `Emission`. `ByModules` for a module of another package.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer
        self.modules: list[ComposedModule] = []  # those with linear layers, which have slots
        self.norms: list[NormModule] = []  # of the heads of queries and of keys
        self.others: list[torch.nn.Module] = []
        """Further modules whose forwards the layer does the work of."""
        # Where the parameters of a call stand, None for one that a module lacks.
        self.places: list[tuple[dict, str] | None] = []
        self.blocks: list[torch.nn.Module] = []  # modules of the program that are composed as it is
        self.drops_paths = False
        self.options: list[Any] = []  # of the call of each attention
        # Of each attention the module that says how it attends, and where a weight stands whose
        # dtype its heads have. None is the layer itself: it is not held, for a layer that nobody
        # else holds has to be freed at once.
        self.sites: list[tuple[Any, tuple[dict, str]]] = []

    def does_work_of(self, *modules: torch.nn.Module) -> None:
        """Note modules that are not called, besides those that the other methods are given."""
        self.others += [module for module in modules if module is not self._layer]

    def linear(
        self, module: Any, x: Value, name: str, output: str = "output"
    ) -> tuple[Value, Value]:
        """Add a module with linear layers over `x`; return its result and the output of its norm.

        Without a norm that is `x`. `name` comes before the names of its nodes and values, `output`
        is the name of its result.
        """
        del x, name, output
        if not isinstance(module, ComposedModule):
            raise ByModules
        self.modules.append(module)
        for parameter in module._parameter_names():
            self._place(module, parameter)
        return Value(), Value()

    def run(self, module: Any, x: Value, **call: Any) -> Value:
        """Add a module over `x`, called with further arguments; return its output."""
        if not hasattr(module, "emit"):
            raise ByModules
        if getattr(module, "IS_PLANNED", False):
            self.blocks.append(module)
            return module.emit(self, x, **call)
        return module.emit(self, x, "", **call)

    def norm(self, module: NormModule, x: Value, output: str) -> Value:
        """Add a norm over `x`, whose result has the name `output`."""
        del x, output
        self.norms.append(module)
        self._place(module, "weight")
        self._place(module, "bias")
        return Value()

    def function(self, function: Callable, *xs: Value) -> Value:
        """Add a function of the program's (see `rows_function`)."""
        del function, xs
        return Value()

    def attends(self, module: Any, over: ComposedModule, options: Any = None) -> int:
        """Note an attention between projections; return its number.

        `module` says in ``_attending(inp, options, dtype)`` how a call attends, `over` is the first
        projection.
        """
        self.options.append(options)
        where = over._parameters, over.weight_names[0]
        self.sites.append((None if module is self._layer else module, where))
        return len(self.sites) - 1

    def source(self, site: int, name: str) -> Value:
        """Add the sequence that the keys and values of an attention are of."""
        del site, name
        return Value()

    def attend(self, site: int, projected: Sequence[Value], norms: tuple, name: str) -> Value:
        """Add an attention over projections, `norms` of the heads of queries and keys before it."""
        del site, projected, name
        for norm in norms:
            if not isinstance(norm, NormModule):
                raise ByModules
            self.norms.append(norm)
            self._place(norm, "weight")
            self._place(norm, "bias")
        return Value()

    def add(
        self,
        x: Value,
        residual: Value,
        bias: Bias | None = None,
        *,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        name: str = "",
        output: str = "sum",
    ) -> Value:
        """Add ``dropout(x + bias) + residual``; `drop_path` drops samples, by their first dim."""
        del x, residual, dropout, name, output
        self.drops_paths |= drop_path > 0.0
        if bias is not None:
            self._place(*bias)
        return Value()

    def _place(self, module: torch.nn.Module, name: str | None) -> None:
        parameters = module._parameters
        there = name is not None and parameters.get(name) is not None
        self.places.append((parameters, name) if there else None)


# ---- the graph of a call -------------------------------------------------------------------------


class Emission:
    """The graph of one kind of call of a layer, to which its modules append their nodes.

    Nothing has run yet, so each module decides by a tensor without rows, of the dtype of its input,
    that requires a gradient where its input will. `ByModules` where one can not be joined.
    """

    def __init__(self, outline: "LayerCalls", attending: Sequence, first: bool | None) -> None:
        self.graph = Graph()
        self.calls: list[ModuleCall] = []  # that the modules would make
        self._attending, self._first, self._device = attending, first, None
        self._owners = len(outline.modules)
        self._sites = self._named = 0  # how many there are so far
        self.functions: dict[int, tuple[Callable, tuple[bool, ...]]] = {}
        """Those of the program by their nodes, each with whether its inputs have gradients."""
        self._given: list[list[Link | None]] = [[] for _ in attending]  # of each attention
        self._parameters: list[Link | None] = []
        self._places = 0  # of parameters of a call, before some are joined
        self._splits: list[SplitTensors] = []

    def input(self, inp: Tensor) -> Value:
        """Add the input."""
        if inp.dtype not in DTYPES:  # a module says which it takes
            raise ByModules
        wanted = torch.is_grad_enabled() and inp.requires_grad
        shape = ROWS, inp.shape[-1]
        self._input = "input", _core.dtype_code(inp.dtype), shape, input_flags(wanted)
        self._device = inp.device
        number = self.graph.tensor(*self._input)
        return Value(number, inp.dtype, wanted)

    def does_work_of(self, *modules: torch.nn.Module) -> None:
        """As of `Outline`."""

    def linear(
        self, module: ComposedModule, x: Value, name: str, output: str = "output"
    ) -> tuple[Value, Value]:
        """As of `Outline`."""
        given = torch.empty(0, module._sizes()[0][0], dtype=x.dtype, device=self._device)
        call = _call_of(module, given.requires_grad_(x.wanted), self._first)
        if call is None:
            raise ByModules
        parts, own = len(self.graph.parts), call.plans.graph
        begin = len(self.graph.tensors)
        numbers = self.graph.append(own, x.number, name, output, len(self.calls))
        self._parameters += self.graph.tensors[begin:]
        for split in call.splits:
            self._splits.append(split._replace(begin=self._places + split.begin - 1, part=parts))
        self._places += len(module._parameter_names())
        self.calls.append(call)
        wanted = x.wanted or call.plans.backward is not None
        _, made = own.results[0]
        return self._value(numbers[made], wanted), self._value(numbers[own.normed], wanted)

    def run(self, module: Any, x: Value, **call: Any) -> Value:
        """As of `Outline`."""
        if getattr(module, "IS_PLANNED", False):
            return module.emit(self, x, **call)
        self._named += 1
        return module.emit(self, x, f"{self._named}_", **call)

    def norm(self, module: NormModule, x: Value, output: str) -> Value:
        """As of `Outline`."""
        columns = self.graph.values[x.number].shape[1]
        like = torch.empty(0, columns, dtype=x.dtype, device=self._device)
        plans = module.plans_over(like.requires_grad_(x.wanted))
        if plans is None:
            raise ByModules
        begin = len(self.graph.tensors)
        numbers = self.graph.append(plans.graph, x.number, "", output, 0)
        self._parameters += self.graph.tensors[begin:]
        self._places += 2
        made = numbers[plans.graph.results[0][1]]
        return self._value(made, x.wanted or plans.backward is not None)

    def function(self, function: Callable, *xs: Value) -> Value:
        """As of `Outline`."""
        graph, numbers = self.graph, tuple(x.number for x in xs)
        if len({*numbers}) < len(numbers):
            raise ByModules
        likes = [
            torch.empty(2, graph.values[x.number].shape[1], dtype=x.dtype, device="meta")
            for x in xs
        ]
        with torch.no_grad():
            out = function(*likes)
        if not isinstance(out, Tensor) or out.dim() != 2 or out.dtype not in DTYPES:
            raise ByModules
        rows, _ = graph.values[numbers[0]].shape
        self._named += 1
        name = f"{self._named}_"
        dtype = _core.dtype_code(out.dtype)
        made = graph.value(f"{name}output", dtype, (rows, out.shape[1]))
        self.functions[len(graph.nodes)] = function, tuple(x.wanted for x in xs)
        graph.node(_core.NODE_FUNCTION, numbers, made, name=name)
        return self._value(made, any(x.wanted for x in xs))

    def attends(self, module: Any, over: ComposedModule, options: Any = None) -> int:
        """As of `Outline`."""
        del module, over, options
        self._sites += 1
        return self._sites - 1

    def source(self, site: int, name: str) -> Value:
        """As of `Outline`."""
        tensor = self._attending[site].tensors[0]
        wanted = torch.is_grad_enabled() and tensor.requires_grad
        given = name, _core.dtype_code(tensor.dtype), tensor.shape[-1], wanted
        number = attention_graphs.add_source(self.graph, *given)
        self._given[site].append(self.graph.tensors[-1])
        return Value(number, tensor.dtype, wanted)

    def attend(self, site: int, projected: Sequence[Value], norms: tuple, name: str) -> Value:
        """As of `Outline`."""
        graph, how = self.graph, self._attending[site].spec()
        heads, channels = projected[0].dtype, how.slices[0][1]
        if not all(norm.serves(channels, heads) for norm in norms):
            raise ByModules
        begin = len(graph.tensors)
        angles = attention_graphs.add_angles(graph, how, name)
        limits = attention_graphs.add_limits(graph, how, name, bool(self._given[site]))
        self._given[site] += graph.tensors[begin:]
        begin, nodes = len(graph.tensors), tuple(norm.as_node() for norm in norms)
        normed = attention_graphs.add_heads_norms(graph, how, nodes, name)
        self._parameters += graph.tensors[begin:]
        self._places += 2 * len(norms)
        owner = 0
        if how.quantization is not None:  # behind all modules
            owner, self._owners = self._owners, self._owners + 1
        numbers, given = [value.number for value in projected], (angles, limits, normed)
        context = attention_graphs.attend(graph, how, numbers, given, name, owner)
        wanted = any(value.wanted for value in projected) or how.bias_grad or how.sink_grad
        return self._value(context, wanted or _want_gradients(norms))

    def add(
        self,
        x: Value,
        residual: Value,
        bias: Bias | None = None,
        *,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        name: str = "",
        output: str = "sum",
    ) -> Value:
        """As of `Outline`."""
        graph, number, wanted = self.graph, -1, False
        if bias is not None:
            parameter = bias.module._parameters[bias.name]
            wanted = torch.is_grad_enabled() and parameter.requires_grad
            flags = _core.VALUE_PARAMETER | (_core.VALUE_GRADIENT if wanted else 0)
            dtype, shape = _core.dtype_code(parameter.dtype), tuple(parameter.shape)
            number = graph.tensor(f"{name}added_bias", dtype, shape, flags)
            self._parameters.append(graph.tensors[-1])
            self._places += 1
        inputs = x.number, number, residual.number
        made = attention_graphs.add_dropout(graph, inputs, output, name, (dropout, drop_path))
        return self._value(made, wanted or x.wanted or residual.wanted)

    def _value(self, number: int, wanted: bool) -> Value:
        return Value(number, _core.torch_dtype(self.graph.values[number].dtype), wanted)

    def complete(self, results: Sequence[Value]) -> CallPlans:
        """Make `results` those of the graph, and its plans.

        Its tensors are the input, what each attention is given (source, angles, mask, bias,
        lengths, offsets, sink, slopes), and the parameters in the order of `Outline.places`.
        """
        self.graph.returns([value.number for value in results])
        given = [link for links in self._given for link in links]
        tensors = [self.graph.tensors[0], *given, *self._parameters]
        return plans_of(self.graph.ordered(tensors))

    def splits(self) -> tuple[SplitTensors, ...]:
        """Weights that come as several tensors, with their places among those of the layer."""
        before = 1 + sum(map(len, self._given))
        return tuple(split._replace(begin=before + split.begin) for split in self._splits)


# ---- calls that are made again -------------------------------------------------------------------


class _BoundLayer(NamedTuple):
    """A call of a layer that can be made again (see `situation.Bound`)."""

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
        nodes = Emission(self, attending, first_microbatch)
        try:
            plans = nodes.complete(layer._emit(nodes, nodes.input(inp), options, self.part))
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
        call.fills = fills_of(plans, attending)
        call.staged = staged_of(plans, nodes.functions)
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
    """What a call of a layer is given, where that alone is asked for."""


_ASKING = threading.local()


def given_to(layer: Any, args: tuple, kwargs: dict) -> tuple:
    """What a call of a layer gets of its forward, which does not go on; see `asked`."""
    outer, _ASKING.layer = getattr(_ASKING, "layer", None), layer
    try:
        layer.forward(*args, **kwargs)
    except _Asked as found:
        return found.args
    finally:
        _ASKING.layer = outer
    raise AssertionError(f"{type(layer).__name__}.forward: not its own")


def asked(layer: Any, *given: Any) -> None:
    """Stop a forward whose arguments alone are asked for, once it has put them together."""
    if getattr(_ASKING, "layer", None) is layer:
        raise _Asked(*given)


def _slots_of(core: Any, state: RegionState, inp: Tensor) -> Slots | None:
    """Slots of an attention in FP8."""
    recipe = core._recipe_in_force()
    return core._slots_for(recipe, state.group, inp.device) if recipe.delayed() else None


def fills_of(plans: CallPlans, attending: Sequence) -> tuple:
    """What draws each random pair of a call (see `draw_pairs`), where an attention says how."""
    graph = plans.forward.graph
    nodes = (graph.nodes[n] for n in graph.numbers_of(_core.NODE_ATTENTION))
    draws = (how.draw for how in attending)
    known = {node.inputs[-1]: draw for node, draw in zip(nodes, draws, strict=True)}
    fills = tuple(known.get(number) for _, number in plans.drawn)
    return fills if any(fills) else ()


def staged_of(plans: CallPlans, functions: dict) -> Staged | None:
    """What runs the external stages of a forward and of a backward; None where there are none."""
    ways = (plans.forward, _run_function), (plans.backward, _run_gradient)
    found = {
        stage.name: partial(run, *functions[stage.node], stage.buffers)
        for plan, run in ways
        for stage in (() if plan is None else plan.stages)
        if stage.external
    }
    return Staged(found, None, _lending) if found else None


def _run_function(
    function: Callable, wanted: tuple[bool, ...], buffers: tuple, lend: Callable[[int], Tensor]
) -> None:
    """A function of a program in a forward: of the inputs, to the output."""
    del wanted
    *inputs, output = map(lend, buffers)
    with torch.no_grad():
        output.copy_(function(*inputs))


def _run_gradient(
    function: Callable, wanted: tuple[bool, ...], buffers: tuple, lend: Callable[[int], Tensor]
) -> None:
    """Its gradients, by autograd: of that of the output, and the inputs."""
    grad, *others = map(lend, buffers)
    inputs, grads = others[: len(wanted)], others[len(wanted) :]
    inputs = [x.detach().requires_grad_(is_) for x, is_ in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        out = function(*inputs)
    asked_for = [x for x in inputs if x.requires_grad]
    found = torch.autograd.grad(out, asked_for, grad, allow_unused=True)
    for into, made in zip(grads, found, strict=True):
        into.zero_() if made is None else into.copy_(made)


def _lending(plan: Plan, lend: Callable[[int], Tensor], *sizes: int) -> Callable[[int], Tensor]:
    """What these functions get: the function that lends a buffer by its number."""
    del plan, sizes
    return lend


def _want_gradients(norms: tuple[torch.nn.Module, ...]) -> bool:
    return any(parameter.requires_grad for norm in norms for parameter in norm.parameters())


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
