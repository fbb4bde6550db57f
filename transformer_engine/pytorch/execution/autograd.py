# SPDX-License-Identifier: Apache-2.0
"""The autograd functions of the package: a module call as a node of the autograd graph."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.execution import recompute
from transformer_engine.pytorch.execution.overrides import of_forward
from transformer_engine.pytorch.torchside.modes import (
    begins_no_graph,
    exporting,
    forward_gradients,
    graph_task,
    in_transform,
)

_grad_enabled = torch.is_grad_enabled


class Call(Protocol):
    """One call of a module: which plans run, over which state."""

    traced: bool
    """Run behind torch operators: a graph is being traced, or the tensors have no memory."""
    label: str  # whose call it is: a module's class, or a function

    def run_forward(self, tensors: tuple[Tensor, ...]) -> tuple[Any, Sequence[Tensor]]:
        """Run the forward; return the output and what the backward needs."""

    def run_backward(
        self, grads: tuple[Tensor, ...], saved: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """Run the backward; return None, then one gradient or None per tensor of the forward."""


def _refuse(label: str, what: str) -> NoReturn:
    raise NotImplementedError(
        f"{label}: {what} is not supported: its gradients are computed by native code in reverse "
        "mode. torch.func.grad, torch.func.vjp and torch.func.functional_call work; for gradients "
        "of each sample call torch.func.grad in a loop, for a batch of inputs add a leading dim"
    )


class _Gradients(torch.autograd.Function):
    """A backward whose results can not be differentiated: that is an error, never a zero.

    It stays connected with what it read. torch's ``once_differentiable`` cuts the graph, so
    `torch.autograd.functional.hessian` would take the inputs for unused.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, count: int, *tensors: Tensor) -> tuple:
        ctx.label = call.label
        return call.run_backward(tensors[:count], tensors[count:])[1:]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        _refuse(ctx.label, "a second derivative")


class _PlanFunction(torch.autograd.Function):
    """A call in a graph that is being traced: `torch.compile` takes no function that has a jvp."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        output, saved = call.run_forward(tensors)
        ctx.save_for_backward(*saved)
        ctx.call = call
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # create_graph: to differentiate again is an error, by gradients or by what was saved.
            return None, *_Gradients.apply(ctx.call, len(grads), *grads, *ctx.saved_tensors)
        return ctx.call.run_backward(grads, ctx.saved_tensors)


class _EagerFunction(_PlanFunction):
    """A call in eager mode; `apply_of` makes a class of each label.

    Its backward obeys the plug-ins that its forward did.
    """

    @staticmethod
    @begins_no_graph
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        scope = _core.selected()
        if scope is None or graph_task() == -1:
            output, saved = call.run_forward(tensors)
        else:
            scope = recompute.scope_of_forward(scope)
            with of_forward(scope) or contextlib.nullcontext():
                output, saved = call.run_forward(tensors)
        ctx.save_for_backward(*saved)
        ctx.call, ctx.scope = call, scope
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        scope = of_forward(ctx.scope)
        if scope is None and not _grad_enabled():
            return ctx.call.run_backward(grads, ctx.saved_tensors)
        with scope or contextlib.nullcontext():
            return _PlanFunction.backward(ctx, *grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse(ctx.call.label, "forward-mode differentiation (jvp)")


class _SeveralFunction(_EagerFunction):
    """A call of several results, which is told of which of them there is no gradient: None."""

    @staticmethod
    @begins_no_graph
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return _EagerFunction.forward(ctx, call, *tensors)


_ASKED_FOR = ("forward", "setup_context", "boxed_grads_call", "clear_saved_tensors_on_access")
"""Attributes that torch looks up at each call, through all bases: each class has them
itself. Flags that this torch does not know are None."""


@functools.lru_cache(maxsize=256)
def apply_of(label: str, several: bool = False) -> Callable:
    """`run_call` in eager mode, for calls of one label and outside of function transforms.

    Without a gradient of one of `several` results its backward gets None, else zeros.

    It is the native half of `Function.apply`. The Python half binds default arguments, which there
    are none of, and unwraps what function transforms left behind, which costs more than the rest of
    a call. The class has the label's name, so that torch's messages (`torch.autograd.
    set_detect_anomaly`), profilers and ``grad_fn`` say "LinearBackward". The node's ``apply``,
    which looks for the function's backward among several, is that backward at once.
    """
    base = _SeveralFunction if several else _EagerFunction
    names = {name: inspect.getattr_static(base, name, None) for name in _ASKED_FOR}
    kind = type(label, (base,), {**names, "__doc__": f"Calls of a {label}."})
    kind._backward_cls.apply = kind.backward
    return super(torch.autograd.Function, kind).apply


class _Recorded:
    """A call under a function transform: what it saved, by where it came from.

    Such a function may save its inputs and outputs alone, so what the backward needs besides is
    made an output.
    """

    def __init__(self, call: Call) -> None:
        call.traced = True  # tensors of a transform have no memory of their own
        self.call = call
        self.outputs = 1  # how many outputs are the module's results
        # Of what is saved, among the tensors of the call followed by all outputs; -1: None.
        self.places: tuple[int, ...] = ()

    def run_forward(self, tensors: tuple) -> tuple[Tensor, ...]:
        """Run the forward: the module's results, then what else is saved."""
        output, saved = self.call.run_forward(tensors)
        results = list(output) if isinstance(output, tuple | list) else [output]
        self.outputs = len(results)
        known = {id(t): place for place, t in enumerate([*tensors, *results]) if t is not None}
        known[id(None)] = -1
        places = []
        for tensor in saved:
            place = known.get(id(tensor))
            if place is None:
                place = known[id(tensor)] = len(tensors) + len(results)
                results.append(tensor)
            places.append(place)
        self.places = tuple(places)
        return tuple(results)


class _TransformedFunction(torch.autograd.Function):
    """A call under a transform of `torch.func`."""

    @staticmethod
    def forward(recorded: _Recorded, *tensors: Tensor) -> tuple[Tensor, ...]:
        return recorded.run_forward(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        recorded, *tensors = inputs
        known = [*tensors, *output, None]
        ctx.save_for_backward(*(known[place] for place in recorded.places))
        ctx.mark_non_differentiable(*output[recorded.outputs :])
        ctx.recorded, ctx.call, ctx.scope = recorded, recorded.call, _core.selected()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        # Operators refuse to be differentiated again, at each level of transforms.
        with of_forward(ctx.scope) or contextlib.nullcontext():
            return ctx.call.run_backward(grads[: ctx.recorded.outputs], ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse(ctx.call.label, "forward-mode differentiation (jvp)")

    @staticmethod
    def vmap(info: Any, in_dims: Any, recorded: _Recorded, *tensors: Any) -> Any:
        del info, in_dims, tensors
        _refuse(recorded.call.label, "vmap")


def _distinct(tensors: tuple) -> list[Tensor | None]:
    """The same with views for repeated tensors, which torch.compile takes in no function."""
    made: list[Tensor | None] = []
    for tensor in tensors:
        repeated = tensor is not None and any(tensor is other for other in made)
        made.append(tensor.view_as(tensor) if repeated else tensor)
    return made


def run_call(call: Call, *tensors: Tensor) -> Any:
    """Run a module call and record its backward; returns the output of ``call.run_forward``.

    `tensors` are the differentiable inputs, in the order that `call` expects.
    """
    if call.traced and torch.compiler.is_compiling():
        if exporting():
            return call.run_forward(tensors)[0]
        return _PlanFunction.apply(call, *_distinct(tensors))
    if in_transform():
        recorded = _Recorded(call)
        results = _TransformedFunction.apply(recorded, *tensors)
        return results[0] if recorded.outputs == 1 else results[: recorded.outputs]
    return apply_of(call.label)(call, *tensors)


def run_forward_alone(call: Any, tensors: tuple) -> Any:
    """Run a call in eager mode and outside of transforms that no gradient is wanted of."""
    recompute.note_scope(_core.selected())
    return call.run_forward(tensors)[0]


def run_without_backward(call: Call, *tensors: Tensor) -> Any:
    """Run a module call that no gradient is wanted of; arguments as of `run_call`."""
    if not call.traced and (forward_gradients() or in_transform()):
        return run_call(call, *tensors)  # which refuses tangents and batches
    return call.run_forward(tensors)[0] if call.traced else run_forward_alone(call, tensors)
