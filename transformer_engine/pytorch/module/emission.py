# SPDX-License-Identifier: Apache-2.0
"""Outlines of layers and graphs of calls, to which the modules of a layer append their nodes.

Both have the methods that ``emit`` and ``_emit`` of modules call; see `layer_call`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common import attention_graphs
from transformer_engine.common.graphs import ROWS, Graph, Link, input_flags
from transformer_engine.common.plans import CallPlans, plans_of
from transformer_engine.pytorch.execution.stages import HalvedFunction, Staged, named
from transformer_engine.pytorch.module.call import ModuleCall
from transformer_engine.pytorch.module.joined import SplitTensors
from transformer_engine.pytorch.module.layer_region import LayerRegion
from transformer_engine.pytorch.module.layer_stages import (
    ModuleStages,
    function_of_stage,
    lending,
)
from transformer_engine.pytorch.module.linear_base import LinearBase
from transformer_engine.pytorch.module.norm import NormModule
from transformer_engine.pytorch.module.operands import DTYPES, conversions
from transformer_engine.pytorch.module.region import Region
from transformer_engine.pytorch.torchside.device import is_capturing, module_of, random_kept
from transformer_engine.pytorch.torchside.modes import autocast_dtype


class ByModules(Exception):  # noqa: N818 - nothing went wrong
    """A layer, or this call of it, has to call its modules."""


class Value(NamedTuple):
    """Stands for the tensor from one module to the next, while a layer is looked through."""

    number: int = -1  # in the graph; -1 where there is none yet
    dtype: torch.dtype = torch.float32
    wanted: bool = False  # something that it was made of has a gradient


class Bias(NamedTuple):
    """A bias that a module returns, for the layer to add."""

    module: LinearBase
    name: str  # of its parameter


# ---- what a layer is made of ---------------------------------------------------------------------


class Outline:
    """The modules of a layer, in the order in which they append their nodes.

    Its methods are those of `Emission`. `ByModules` for a module of another package.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        self._layer = layer
        self.modules: list[LinearBase] = []  # those with linear layers, which have slots
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
        if not isinstance(module, LinearBase):
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

    def attends(self, module: Any, over: LinearBase, options: Any = None) -> int:
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
            self.norm(norm, Value(), "")
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

    def __init__(
        self, modules: int, attending: Sequence, first_microbatch: bool | None, region: LayerRegion
    ) -> None:
        self.graph = Graph()
        self.calls: list[ModuleCall] = []  # that the modules would make
        self._attending, self._first_microbatch, self._device = attending, first_microbatch, None
        self._owners, self._region = modules, region
        self._unused_pairs: dict[int, int] = {}
        """How many pairs a module draws for nobody, by how many there are up to it."""
        self._sites = self._named = 0  # how many there are so far
        self._functions: dict[int, tuple[Callable, tuple[bool, ...]]] = {}
        """Those of the program by their nodes, each with whether its inputs have gradients."""
        self._staged: list[ModuleStages] = []  # of modules some of whose stages functions run
        self._order: dict[int, int] = {}  # numbers of values in the graph that is complete
        self._given: list[list[Link | None]] = [[] for _ in attending]  # of each attention
        self._parameters: list[Link | None] = []
        # The dtypes that parameters of a call are read in, before some are joined; None: their own.
        self._dtypes: list[torch.dtype | None] = []
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
        self, module: LinearBase, x: Value, name: str, output: str = "output"
    ) -> tuple[Value, Value]:
        """As of `Outline`."""
        columns = module._sizes()[0][0]
        if self.graph.values[x.number].shape[1] != columns:
            raise ByModules  # which refuse it
        given = torch.empty(0, columns, dtype=x.dtype, device=self._device)
        region = self._region.of(len(self.calls))
        if not self._region.resolved:
            module._note_recipe(region.recipe)
        call = _call_of(module, given.requires_grad_(x.wanted), self._first_microbatch, region)
        if call is None:
            raise ByModules
        parts, own = len(self.graph.parts), call.plans.graph
        stream, read = x, own.tensors[0][1]
        if self._rows(x).multiply % own.values[read].shape[0].multiply:
            raise ByModules  # the rows of the layer are those of all ranks
        x = self._in_dtype(x, own.values[read].dtype, name)
        begin = len(self.graph.tensors)
        numbers = self.graph.append(own, x.number, name, output, len(self.calls))
        self._parameters += self.graph.tensors[begin:]
        if call.unused_pairs:
            self._unused_pairs[len(self.graph.drawn)] = len(call.unused_pairs)
        for split in call.splits:
            self._splits.append(
                split._replace(begin=len(self._dtypes) + split.begin - 1, part=parts)
            )
        self._dtypes += call.dtypes[1:] or [None] * len(module._parameter_names())
        if call.staged is not None:
            at = numbers, len(self.graph.nodes) - len(own.nodes), len(self.calls)
            self._staged.append(ModuleStages(call, name, *at, self._rows(x)))
        self.calls.append(call)
        wanted = x.wanted or call.plans.backward is not None
        _, made = own.results[0]
        normed = stream if own.normed == read else self._value(numbers[own.normed], wanted)
        return self._value(numbers[made], wanted), normed

    def _in_dtype(self, x: Value, dtype: int, name: str) -> Value:
        """A value in the dtype that a module reads it in, which `torch.autocast` says."""
        graph = self.graph
        known = graph.values[x.number]
        if known.dtype == dtype:
            return x
        made = graph.value(f"{name}input", dtype, known.shape)
        graph.node(_core.NODE_CONVERT, (x.number,), made, name=name)
        return self._value(made, x.wanted)

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
        self._dtypes += None, None
        made = numbers[plans.graph.results[0][1]]
        return self._value(made, x.wanted or plans.backward is not None)

    def function(self, function: Callable, *xs: Value) -> Value:
        """As of `Outline`."""
        graph, numbers = self.graph, tuple(x.number for x in xs)
        if len({*numbers}) < len(numbers):
            raise ByModules
        if autocast_dtype(self._device.type) is not None:
            raise ByModules  # its operators have dtypes of their own
        rows, halves = self._rows(xs[0]), ()
        if isinstance(function, HalvedFunction):
            dtype = graph.values[numbers[0]].dtype
            columns = function.columns(*(graph.values[n].shape[1] for n in numbers))
            times = rows.multiply * function.ranks
            if times != int(times):  # fewer rows than the tokens
                raise ByModules
            rows, halves = rows._replace(multiply=int(times)), (0, 1)
        else:
            out = self._tried(function, xs)
            dtype, columns = _core.dtype_code(out.dtype), out.shape[1]
        self._named += 1
        name = f"{self._named}_"
        made = graph.value(f"{name}output", dtype, (rows, columns))
        self._functions[len(graph.nodes)] = function, tuple(x.wanted for x in xs)
        graph.node(_core.NODE_FUNCTION, numbers, made, name=name, halves=halves)
        return self._value(made, any(x.wanted for x in xs))

    def _rows(self, x: Value) -> _core.Extent:
        return self.graph.values[x.number].shape[0]

    def _tried(self, function: Callable, xs: tuple[Value, ...]) -> Tensor:
        """Call a function with two rows of zeros.

        `ByModules` where a plan can not hold it: it fails, draws random numbers, which its gradient
        would draw again, or reads what has a gradient of its own.
        """
        given = [
            torch.zeros(2, self.graph.values[x.number].shape[1], dtype=x.dtype, device=self._device)
            for x in xs
        ]
        if is_capturing(self._device):
            raise ByModules
        with random_kept(self._device):
            before = _random_states(self._device)
            try:
                with torch.enable_grad():
                    out = function(*given)
            except Exception as error:  # the program sees it where the function is called
                raise ByModules from error
            after = _random_states(self._device)
            draws = not all(map(torch.equal, before, after))
        if not isinstance(out, Tensor) or out.dim() != 2 or out.dtype not in DTYPES:
            raise ByModules
        if draws or out.requires_grad or out.shape[0] != 2:
            raise ByModules
        return out

    def attends(self, module: Any, over: LinearBase, options: Any = None) -> int:
        """As of `Outline`."""
        del module, over, options
        self._sites += 1
        return self._sites - 1

    def source(self, site: int, name: str) -> Value:
        """As of `Outline`."""
        tensor = self._attending[site].tensors[0]
        if tensor.dtype not in DTYPES:
            raise ByModules
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
        self._dtypes += [None] * 2 * len(norms)
        owner = 0
        if how.quantization is not None:  # behind all modules
            owner, self._owners = self._owners, self._owners + 1
        numbers, given = [value.number for value in projected], (angles, limits, normed)
        context = attention_graphs.attend(graph, how, numbers, given, name, owner)
        wanted = any(value.wanted for value in projected) or how.bias_grad or how.sink_grad
        wanted = wanted or any(p.requires_grad for norm in norms for p in norm.parameters())
        return self._value(context, wanted)

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
        if graph.values[x.number].shape != graph.values[residual.number].shape:
            raise ByModules  # one is spread over the other
        if bias is not None:
            parameter = bias.module._parameters[bias.name]
            wanted = torch.is_grad_enabled() and parameter.requires_grad
            flags = _core.VALUE_PARAMETER | (_core.VALUE_GRADIENT if wanted else 0)
            dtype, shape = graph.values[x.number].dtype, tuple(parameter.shape)
            number = graph.tensor(f"{name}added_bias", dtype, shape, flags)
            self._parameters.append(graph.tensors[-1])
            self._dtypes.append(None if parameter.dtype is x.dtype else x.dtype)
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
        numbers = [value.number for value in results]
        if {node.output for node in self.graph.nodes} - {*numbers, *self.graph.read()}:
            raise ByModules  # a program has no use for what one makes
        self.graph.returns(numbers)
        given = [link for links in self._given for link in links]
        tensors = [self.graph.tensors[0], *given, *self._parameters]
        self._order = self.graph.order(tensors)
        return plans_of(self.graph.ordered(tensors))

    def staged(self, plans: CallPlans) -> Staged | None:
        """Runner of functions of the program at stages of `plans`; None without any."""
        found: dict[str, Callable] = {}
        for way in ("forward", "backward"):
            plan = getattr(plans, way)
            for number, stage in enumerate(() if plan is None else plan.stages):
                if stage.node in self._functions and not 0 <= stage.half < number:
                    function, wanted = self._functions[stage.node]
                    one = function_of_stage(function, wanted, stage, way == "backward")
                    found |= named({stage.name: one})
            for stages in self._staged if plan is not None else ():
                functions = stages.functions(way, plan, self._order)
                if functions is None:
                    raise ByModules
                found |= functions
        return Staged(found, None, lending) if found else None

    def unused_pairs(self, plans: CallPlans) -> tuple[int, ...]:
        """As of `ModuleCall`: those of the modules, as indices among all pairs of the layer."""
        places: list[int] = []
        drawn = 0
        for number, link in enumerate((None, *plans.graph.drawn)):
            drawn += link in plans.drawn
            begin = drawn + len(places)
            places += range(begin, begin + self._unused_pairs.get(number, 0))
        return tuple(places)

    def dtypes(self) -> tuple[torch.dtype | None, ...]:
        """As of `ModuleCall`."""
        given = 1 + sum(map(len, self._given))
        return (*[None] * given, *self._dtypes) if any(self._dtypes) else ()

    def splits(self) -> tuple[SplitTensors, ...]:
        """Weights that come as several tensors, with their places among those of the layer."""
        before = 1 + sum(map(len, self._given))
        return tuple(split._replace(begin=before + split.begin) for split in self._splits)


def _random_states(device: torch.device) -> list[Tensor]:
    """Of the generators that a function may draw from."""
    states, module = [torch.random.get_rng_state()], module_of(device.type)
    return states if module is None else [*states, module.get_rng_state(device)]


def _call_of(
    module: LinearBase, given: Tensor, first_microbatch: bool | None, region: Region
) -> ModuleCall | None:
    """The call that a module would make of an input; None for one that can not be joined."""
    if module.checkpoint:
        return None
    tensors, weights = module._promote(given, region.recipe)
    module._find_present(tensors.given)
    if module._present is None:  # some are no parameters of its own
        return None
    call = module._prepare(tensors, region, first_microbatch, weights)
    call.dtypes = conversions(tensors.given, tensors.flat())
    observed = call.staged is not None and call.staged.observer is not None
    return None if call.plans.defer or call.traced or observed else call
