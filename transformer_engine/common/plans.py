# SPDX-License-Identifier: Apache-2.0
"""The plans of a kind of call, and which argument of one comes from where in another."""

import functools
import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from transformer_engine import _core
from transformer_engine.common.graphs import (
    GRAD,
    GRAD_INPUT,
    OUTPUT,
    CallSpec,
    Graph,
    Link,
    Norm,
    call_graph,
    forms_of,
    norm_graph,
)
from transformer_engine.common.operand_casts import Quantization
from transformer_engine.common.plan_text import Plan

_STATE = ("scale", "history")
_GIVEN = ("input", "parameter", "state")

_keep = functools.lru_cache(maxsize=64)
"""Keeps the plans of the last 64 graphs: a new module like an earlier one gets these."""


def _arguments(plan: Plan) -> dict[Link, bool]:
    """Links of the arguments of a plan, and whether the run changes them."""
    given = (buffer for buffer in plan.described.buffers if buffer.role in _GIVEN)
    return {(buffer.link, buffer.of): bool(buffer.written) for buffer in given}


def _links(plan: Plan, role: str) -> list[Link]:
    return [(b.link, b.of) for b in plan.described.buffers if b.role == role]


def _has_rows(plan: Plan) -> bool:
    """Return whether an input of a plan has the leading dims of the call."""
    return any(b.role == "input" and b.leading for b in plan.described.buffers)


def leading_dims(plan: Plan, shapes: Sequence) -> list:
    """Leading dims of the tokens and of a source sequence; None where no input has them.

    `shapes` are those of the first tensors that the plan is given.
    """
    leads = (lead_of(plan, source) for source in (False, True))
    return [dims_of(plan, at, shapes[at]) if 0 <= at < len(shapes) else None for at in leads]


def lead_of(plan: Plan, source: bool) -> int:
    """Number of the first input with the leading dims of the tokens, or of a source; -1: none."""
    for number, buffer in enumerate(plan.described.buffers):
        if buffer.role == "input" and buffer.leading and is_of_source(buffer.shape[0]) == source:
            return number
    return -1


def is_of_source(rows: _core.Extent) -> bool:
    """Return whether rows are those of a source sequence."""
    return rows.symbol >= _core.SYMBOL_SOURCE_ROWS


def dims_of(plan: Plan, number: int, shape: Sequence) -> Sequence:
    """Leading dims of a sequence, from the shape of an input that has them."""
    buffer = plan.described.buffers[number]
    dims, ranks = shape[: -1 if len(buffer.shape) < 3 else -2], buffer.shape[0].multiply
    return dims if ranks == 1 else (dims[0] // ranks, *dims[1:])


def sizes_of(plan: Plan, shapes: Sequence, rows: Any = -1) -> list:
    """Values of the symbols in a run of a plan, integers or symbolic ones, by `SYMBOL_*`.

    Arguments as of `leading_dims`; `rows` is the number of tokens, -1 where an input says it.
    """
    sizes: list = [0]
    for dims in leading_dims(plan, shapes):
        sizes += (0, 0, 0) if dims is None else (math.prod(dims), *(*dims, 0, 0)[:2])
    if rows != -1:
        sizes[_core.SYMBOL_ROWS] = rows
    if not plan.described.symbols >> _core.SYMBOL_SEQUENCES:
        return sizes
    sizes += [None] * (_core.SYMBOL_MAX_KEYS + 1 - len(sizes))
    for buffer, shape in zip(plan.described.buffers, shapes, strict=False):
        for extent, length in zip(buffer.shape, shape, strict=False):
            if extent.symbol >= _core.SYMBOL_SEQUENCES and sizes[extent.symbol] is None:
                sizes[extent.symbol] = length - extent.add
    return sizes


def extent_value(extent: _core.Extent, sizes: Sequence) -> Any:
    """Roundup(multiply * value of the symbol, align) / divide + add; `sizes` as of `sizes_of`."""
    if extent.multiply == 0:
        return extent.add
    size, align = extent.multiply * sizes[extent.symbol], extent.align
    if align > 1:
        size = (size + align - 1) // align * (align // extent.divide)
    return size + extent.add


def shape_of(buffer: _core.Buffer, leading: Sequence, sizes: Sequence) -> list:
    """Shape of a buffer, with the leading dims of the call where it has them.

    `leading` as `leading_dims` gives them, `sizes` as `sizes_of`.
    """
    shape, first = [extent_value(extent, sizes) for extent in buffer.shape], buffer.shape[0]
    dims = leading[is_of_source(first)] if buffer.leading and len(buffer.shape) < 3 else None
    if dims is not None:
        shape[:1] = [first.multiply * dims[0], *dims[1:]] if dims else []
    return shape


def result_shapes(plan: Plan, inputs: Sequence, rows: Any = -1) -> tuple[list, Any]:
    """Shapes of what a plan makes, on integers or symbolic ones; arguments as of `sizes_of`.

    Returns dtype (``DTYPE_*``) and shape of each output, in plan order, and the bytes of the packed
    saved tensor; 0: none.
    """
    leading, sizes = leading_dims(plan, inputs), sizes_of(plan, inputs, rows)
    buffers = plan.described.buffers
    outputs = [(b.dtype, shape_of(b, leading, sizes)) for b in buffers if b.role == "output"]
    if plan.described.direction != "forward":
        return outputs, 0
    return outputs, sum(extent_value(each, sizes) for each in plan.described.saved_bytes)


class Picker:
    """Picks those items of a tuple that are wanted."""

    def __init__(self, wanted: Sequence[Link], known: Sequence[Link | None]) -> None:
        at = {link: i for i, link in enumerate(known)}
        self.places = [at[link] for link in wanted]
        self.all = self.places == list(range(len(known)))  # every item is wanted, in order
        # Where no graph is traced: torch's tracer knows no `operator.itemgetter`.
        self.fast = itemgetter(*self.places) if len(self.places) > 1 else None

    def __call__(self, values: tuple, traced: bool = False) -> tuple:
        """Pick; `traced`: in a graph that is being traced."""
        if self.all:
            return values
        if self.fast is not None and not traced:
            return self.fast(values)
        return tuple([values[i] for i in self.places])


class CallPlans:
    """Plans of one kind of call, and where each argument of a plan comes from, worked out once.

    Everything follows from the links of the plans' buffers, which are the same in all plans of a
    graph: what the backward reads besides gradients and scaling state was an argument or an output
    of the forward.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph  # that they are of
        self.parts = tuple(graph.parts)  # the linear layers, `LinearSpec`
        # None where the call can not need one.
        self.forward = graph.make(_core.DIRECTION_FORWARD)
        self.backward = graph.make(_core.DIRECTION_BACKWARD) if graph.has_gradients else None
        self.wgrad = graph.make(_core.DIRECTION_DEFERRED) if graph.defers else None
        # The differentiable tensors of a call; None for one that it lacks: passed as None.
        self.tensors = tuple(graph.tensors)
        self.quantized = any(part.quantization.is_quantized for part in self.parts)
        given = _arguments(self.forward)
        # Arguments of the forward, and the scaling state that it is given.
        self.forward_inputs = tuple(link for link in given if link[0] not in _STATE)
        self.forward_state = tuple(link for link in given if link[0] in _STATE)
        self.outputs = tuple(_links(self.forward, "output"))
        self.results = tuple(graph.results)  # of the module: the first of `outputs`
        # Places among `outputs` of the forms of the first result, where that is returned quantized,
        # -1 for one that is not made; and how many results are not.
        self.returned = self._places_of_result(graph)
        self.result_count = len(self.results) - bool(self.returned)
        # The first result has so many times the rows of the call: those of all ranks.
        self.gathers = graph.values[graph.results[0][1]].shape[0].multiply or 1
        self._of_quantized: dict[int, CallPlans | None] = {}  # see `for_gradient`
        held = {*self.forward_inputs, *self.outputs}
        caches = [forms_of(of + 1, held) for of in graph.operands]
        flags = [graph.flags_of(("value", of)) for of in graph.weights]
        # Parts whose quantized weight is given (behind them the input, where that is); (part,
        # places among `outputs`) of those where it is kept, None for a form that nothing reads.
        self.reads_caches = tuple(i for i, f in enumerate(flags) if f & _core.VALUE_QUANTIZED)
        if graph.flags_of(graph.tensors[0]) & _core.VALUE_QUANTIZED:
            self.reads_caches += (len(flags),)
            caches.append(forms_of(graph.operands[0], held))
        places = {link: place for place, link in enumerate(self.outputs)}
        self.writes_caches = tuple(
            (i, tuple(map(places.get, caches[i])))
            for i, f in enumerate(flags)
            if f & _core.VALUE_KEEP_QUANTIZED
        )
        # (part, weight's place among `tensors`) where its gradient goes to ``weight.main_grad``.
        self.main_grads = tuple(
            (i, self.tensors.index(("value", graph.weights[i])))
            for i, f in enumerate(flags)
            if f & (_core.VALUE_ACCUMULATE | _core.VALUE_OVERWRITE)
        )
        self.defer = self.wgrad is not None
        sources = list(self.tensors)
        for i in self.reads_caches:
            sources += caches[i]
        # Random pairs that a call draws, in this order: those that one of its plans reads.
        read = {link for p in (self.forward, self.backward) if p for link in _arguments(p)}
        self.drawn = tuple(link for link in graph.drawn if link in read)
        sources += self.drawn
        # From the tensors and caches of a call.
        self.pick_inputs = Picker(self.forward_inputs, sources)
        self._examine_backward(graph, sources)

    def _places_of_result(self, graph: Graph) -> tuple[int, ...]:
        """Places among `outputs` of the forms of the first result; () where it is none of FP8."""
        first = graph.results[0]
        if not graph.flags_of(first) & _core.VALUE_RETURN_QUANTIZED:
            return ()
        maker = graph.maker_of(first)
        if graph.nodes[maker].kind == _core.NODE_LINEAR:
            return _places_of_forms(maker * _core.OPERAND_ROLES + OUTPUT, self.outputs)
        at = {link: place for place, (link, _) in enumerate(self.outputs)}  # an attention made it
        return at["heads"], -1, at["heads_scales"]

    def _examine_backward(self, graph: Graph, sources: list) -> None:
        self.saves_packed = False  # the forward makes a packed tensor for the backward
        # Arguments of the backward without gradients and state: the first `reads_saved` of these,
        # the others are for the deferred weight gradient.
        self.saved: tuple[Link, ...] = ()
        self.reads_saved = 0
        # Where the weight of each part stands among what is saved, the packed tensor first; -1: it
        # is not saved.
        self.weight_places = (-1,) * len(graph.weights)
        self.wgrad_inputs = self.gradients = self.backward_state = ()
        self.wgrad_has_rows = False  # an input of it has the leading dims of the call
        # For each of `tensors` its gradient's place among the backward's outputs, or -1.
        self.places = (-1,) * len(self.tensors)
        self.all_gradients = False  # the backward's outputs are these, in order
        # The backward has scratch, which may lie in what was saved once that has been read.
        self.may_consume = False
        # As `returned`, of the gradient of the input among the backward's outputs.
        self.returned_grad: tuple[int, ...] = ()
        # Where the gradient of the output arrives quantized: what the backward is given, from the
        # gradients of results, the forms of that one and what is saved.
        self.pick_given: Picker | None = None
        if self.backward is None:
            return
        self.saves_packed = bool(_links(self.forward, "saved"))
        self.may_consume = not self.defer and bool(_links(self.backward, "scratch"))
        arguments = _arguments(self.backward)
        self.backward_state = tuple(link for link in arguments if link[0] in _STATE)
        # Of the largest scores of an attention there is none, so nothing reads that.
        results = [("gradient", of) if link == "value" else (link, of) for link, of in self.results]
        ours = (*_STATE, "gradient")
        saved = [link for link in arguments if link[0] not in ours]
        self.reads_saved = len(saved)
        self.pick_grads = Picker([link for link in arguments if link in results], results)
        self.gradients = tuple(_links(self.backward, "output"))
        if graph.flags_of(graph.tensors[0]) & _core.VALUE_RETURN_QUANTIZED:
            self.returned_grad = _places_of_forms(graph.operands[0] + GRAD_INPUT, self.gradients)
        if graph.flags_of(graph.results[0]) & _core.VALUE_QUANTIZED:
            maker = graph.maker_of(graph.results[0])
            forms = forms_of(maker * _core.OPERAND_ROLES + GRAD, arguments)
            saved = [link for link in saved if link not in forms]
            known = [*results, *forms, *saved]
            self.pick_given = Picker([link for link in arguments if link in known], known)
        if self.wgrad is not None:
            given = _arguments(self.wgrad)
            self.wgrad_inputs = tuple(link for link, written in given.items() if not written)
            known = {*results, *saved, *self.gradients}
            saved += [link for link in self.wgrad_inputs if link not in known]
            self.wgrad_has_rows = _has_rows(self.wgrad)
            read = [link for link in arguments if link in results]
            # From (gradients..., saved..., gradients of the results).
            self.pick_deferred = Picker(self.wgrad_inputs, [*self.gradients, *saved, *read])
        self.saved = tuple(saved)
        packed = [_PACKED] if self.saves_packed else []
        # From (outputs of the forward..., packed tensor, tensors and caches...).
        self.pick_saved = Picker([*packed, *saved], [*self.outputs, _PACKED, *sources])
        found = {link: i + self.saves_packed for i, link in enumerate(saved)}
        self.weight_places = tuple(found.get(("value", of), -1) for of in graph.weights)
        at = {link: i for i, link in enumerate(self.gradients)}
        self.places = tuple(
            -1 if link is None else at.get(("gradient", link[1]), -1) for link in self.tensors
        )
        self.all_gradients = self.places == tuple(range(len(self.gradients)))

    def for_gradient(self, flags: int) -> "CallPlans | None":
        """Plans of the same call whose gradient of the output arrives quantized.

        `flags` are as of `Graph.with_gradient`. The backward is run over what the forward of these
        has saved; None where it can not be.
        """
        if flags not in self._of_quantized:
            maker = self.graph.nodes[self.graph.maker_of(self.graph.results[0])]
            made = None
            if maker.kind == _core.NODE_LINEAR and not self.defer:  # a collective reads values
                made = plans_of(self.graph.with_gradient(flags))
            self._of_quantized[flags] = made if made is None or self._saves_for(made) else None
        return self._of_quantized[flags]

    def unused_pairs(self, quantization: Sequence[Quantization], returned: bool) -> tuple[int, ...]:
        """Indices of random pairs that these plans do not read.

        With all gradients wanted, plans of this call would read them. They follow those that these
        plans read. `quantization` is that of each linear layer; `returned`: the gradient of the
        input is returned quantized.
        """
        stochastic = [bool(each.grad.options & _core.CAST_STOCHASTIC) for each in quantization]
        return tuple(range(len(self.drawn), sum(stochastic) + (stochastic[0] and returned)))

    def _saves_for(self, other: "CallPlans") -> bool:
        saved = [_links(plans.forward, "saved") for plans in (self, other)]
        return (
            saved[0] == saved[1]
            and set(other.saved) <= set(self.saved)
            and _has_rows(other.backward)
        )


def _places_of_forms(operand: int, made: Sequence[Link]) -> tuple[int, ...]:
    """Where the forms of an operand stand among what a plan makes; -1: it makes none."""
    return tuple(made.index(link) if link in made else -1 for link in forms_of(operand, made))


_PACKED = ("packed", 0)
"""Stands for the packed tensor, which is no single buffer."""


@_keep
def plans_of(graph: Graph) -> CallPlans:
    """Plans of a graph that is complete; those of the last ones are kept."""
    return CallPlans(graph)


def call_plans(spec: CallSpec) -> CallPlans:
    """Plans of a call."""
    return plans_of(call_graph(spec))


def norm_plans(features: int, norm: Norm, dtypes: tuple[int, int], wanted: bool) -> CallPlans:
    """Plans of a norm by itself, over (input, gamma, beta).

    `dtypes` are ``_core.DTYPE_*`` of input and output; `wanted`: the input has a gradient.
    """
    return plans_of(norm_graph(features, norm, dtypes, wanted))
