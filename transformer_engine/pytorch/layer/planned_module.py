# SPDX-License-Identifier: Apache-2.0
"""`PlannedModule`: modules that a program composes of this library's, run as one plan."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention.problem import AttentionOptions
from transformer_engine.pytorch.execution.stages import HalvedFunction
from transformer_engine.pytorch.layer import traced_layer
from transformer_engine.pytorch.layer.composite import CompositeLayer
from transformer_engine.pytorch.layer.dropout import bias_dropout_add
from transformer_engine.pytorch.layer.multi_head_attention import MultiheadAttention
from transformer_engine.pytorch.module.call_key import keep
from transformer_engine.pytorch.module.emission import ByModules, Emission, Outline, Value
from transformer_engine.pytorch.module.layer_call import LayerRunner, asked
from transformer_engine.pytorch.module.norm import NormModule

_PLAIN = (bool, int, float, str, type(None))


class _Given(tuple):
    """Options of each attention of a call, with the arguments of that call."""

    args: tuple
    kwargs: dict[str, Any]
    key: tuple  # arguments that are no tensors, by place and by name
    first_microbatch: bool | None  # ``is_first_microbatch``
    drops_paths: bool


class CallTensor:
    """Stands for a tensor that a call was given, while the plan of such calls is made.

    A plan holds for all of them, so whoever computes with it gets an error, and the modules are
    called instead.
    """


class _Eager:
    """Runs modules at once, where a graph of them can not be made."""

    def __init__(self, first_microbatch: bool | None) -> None:
        self._first_microbatch = first_microbatch

    def run(self, module: Any, x: Tensor, **call: Any) -> Tensor:
        """Call a module."""
        if self._first_microbatch is not None and not isinstance(module, NormModule):
            call["is_first_microbatch"] = self._first_microbatch
        out = module(x, **call)
        return out[0] if isinstance(out, tuple) else out

    def function(self, function: Any, *xs: Tensor) -> Tensor:
        """Call a function of rows."""
        first, *dims = xs[0].shape[:-1]
        out = function(*[x.flatten(0, -2) for x in xs])
        ranks = function.ranks if isinstance(function, HalvedFunction) else 1
        return out.unflatten(0, (int(first * ranks), *dims))

    def add(
        self, x: Tensor, residual: Tensor, *, dropout: float = 0.0, drop_path: float = 0.0
    ) -> Tensor:
        """``dropout(x) + residual``."""
        return bias_dropout_add(x, None, residual, dropout, drop_path)


class _AttentionsOfCall:
    """Finds how the attentions of a call attend, in the graph that is traced."""

    def __init__(self, inp: Tensor) -> None:
        self._inp = inp
        self.attending: list = []  # as of `traced_layer.run`
        self.in_graph = True  # False: the call goes by modules

    def run(self, module: Any, x: Value, **call: Any) -> Value:
        """Note a module."""
        if getattr(module, "IS_PLANNED", False):
            return module.emit(self, x, **call)
        if isinstance(module, MultiheadAttention):
            self.attending.append(module.attending_in_graph(self._inp, AttentionOptions(**call)))
            self.in_graph = self.in_graph and self.attending[-1] is not NotImplemented
        return x

    def function(self, function: Any, *xs: Value) -> Value:
        """Note a function of rows, which is traced between the modules around it."""
        del function
        self.in_graph = False
        return xs[0]

    def add(self, x: Value, residual: Value, **drops: Any) -> Value:
        """Note an addition."""
        del residual, drops
        return x


class PlannedModule(CompositeLayer):
    """Base of modules that a program composes of this library's.

    A subclass defines ``emit(self, nodes, x, ...)``: how its modules follow each other, written
    once. Called as a module, ``module(x, ...)``, it runs as one plan per direction, as
    `TransformerLayer` does: all its norms, linear layers, attentions and additions are one call
    into C. Where a plan can not hold a call (hooks, modules of other packages, caches of keys and
    values), ``emit`` calls its modules instead, with the same bits.

    ``nodes`` has three methods:

    ``nodes.run(module, x, ...)``
        What a module makes of `x`; further arguments are those of its forward, by name. Modules are
        `Linear`, `LayerNormLinear`, `LayerNormMLP`, `LayerNorm`, `RMSNorm`, `MultiheadAttention`
        and other `PlannedModule`; their outputs alone are returned.
    ``nodes.add(x, y, dropout=0.0, drop_path=0.0)``
        ``dropout(x) + y``; `drop_path` drops whole samples of `x`, by its first dim. Both are
        probabilities of this call: 0.0 where ``self.training`` is False.
    ``nodes.function(f, x, ...)``
        ``f(x, ...)`` of different values, as matrices [rows, features]: a matrix of as many rows.
        `f` is of torch's operations; its gradient is autograd's, which repeats it. The plan calls
        it in its turn. Modules are called instead where it reads parameters or tensors of the call,
        or draws random numbers.

    The arguments of ``emit`` after `x` are those of the call: tensors may only be handed on to
    attentions (a mask, ``encoder_output``); others are numbers, strings or None, and each
    combination of these has a plan of its own. ``is_first_microbatch`` is an argument of every call
    (see `Linear`) and is not handed to ``emit``. Attributes that ``emit`` reads are settings: one
    that is set makes new plans.

    Examples
    --------
    >>> class Block(te.PlannedModule):
    ...     def __init__(self, hidden, heads):
    ...         super().__init__()
    ...         self.attention = te.MultiheadAttention(hidden, heads, input_layernorm=True)
    ...         self.mlp = te.LayerNormMLP(hidden, 4 * hidden)
    ...
    ...     def emit(self, nodes, x):
    ...         both = nodes.add(nodes.run(self.attention, x), nodes.run(self.mlp, x))
    ...         return nodes.add(both, x)
    """

    IS_PLANNED = True
    _READ_BY_PLANS = ("_settings", "training", "name")
    _settings = 0
    _attending: Any = None

    def emit(self, nodes: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """How the modules follow each other; see the class."""
        raise NotImplementedError(f"{type(self).__name__}: a PlannedModule defines emit(nodes, x)")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; what ``emit`` may read counts from the next call on."""
        super().__setattr__(name, value)
        if name != "training":
            self.__dict__["_settings"] = self._settings + 1

    def forward(
        self, x: Tensor, *args: Any, is_first_microbatch: bool | None = None, **kwargs: Any
    ) -> Tensor:
        """Run ``emit``; arguments as the class says."""
        if torch.compiler.is_compiling() and traced_layer.may_hold(x):
            out = self._run_in_graph(x, args, kwargs, is_first_microbatch)
            if out is not None:
                return out
        given = self._given(args, kwargs, is_first_microbatch)
        asked(self, x, given)
        if given is not None:
            calls = self._calls_of(given)
            if calls is not None:
                out = calls.run(self, x, given)
                if out is not NotImplemented:
                    return out
        return self.emit(_Eager(is_first_microbatch), x, *args, **kwargs)

    _FORWARD = forward

    def _given(
        self, args: tuple, kwargs: dict[str, Any], first_microbatch: bool | None
    ) -> _Given | None:
        """Return the arguments of a call; None for one that no plan holds."""
        if torch.compiler.is_compiling():
            return None
        outline = Outline(self)
        try:
            self._emit_with(outline, Value(), args, kwargs)
        except ByModules:
            return None
        # Tensors are known by their names, for `emit` may ask whether there is one.
        named = tuple(
            [
                (name, CallTensor if isinstance(value, (Tensor, CallTensor)) else value)
                for name, value in (*enumerate(args), *kwargs.items())
            ]
        )
        if not all(value is CallTensor or isinstance(value, _PLAIN) for _, value in named):
            return None
        made = _Given(outline.options)
        made.args, made.kwargs, made.first_microbatch = args, kwargs, first_microbatch
        made.key, made.drops_paths = named, outline.drops_paths
        return made

    def _run_in_graph(
        self, x: Tensor, args: tuple, kwargs: dict, first_microbatch: bool | None
    ) -> Any:
        """Run it as one call in the graph that is traced; None where it has to call its modules."""
        known = (*_PLAIN, Tensor)
        if not all([isinstance(value, known) for value in (*args, *kwargs.values())]):
            return None
        found = _AttentionsOfCall(x)
        self.emit(found, Value(), *args, **kwargs)
        if not found.in_graph:
            return None
        named = tuple([(name, traced_layer.constants(value)) for name, value in kwargs.items()])
        given = traced_layer.constants(args), named, first_microbatch
        return traced_layer.run(self, x, given, found.attending)

    def _options_in_graph(self, given: tuple) -> Any:
        args, named, first_microbatch = given
        args = [_as_given(value) for value in args]
        kwargs = {name: _as_given(value) for name, value in named}
        return self._given(tuple(args), kwargs, first_microbatch)

    def _calls_of(self, options: Any) -> LayerRunner | None:
        if options is None:
            return None
        kept = self.__dict__.setdefault("_by_arguments", {})
        key = self._layer_key(options)
        if key not in kept:
            keep(kept, key, {})
        return LayerRunner.of(self, options, kept[key])

    # ---- as one call (see `layer_call`) ----------------------------------------------------------

    def _emit(self, nodes: Any, x: Value, options: Any, branch: int | None) -> list[Value]:
        del branch
        if not isinstance(nodes, Emission):
            return [self.emit(nodes, x, *options.args, **options.kwargs)]
        args = [_without_values(value) for value in options.args]
        kwargs = {name: _without_values(value) for name, value in options.kwargs.items()}
        return [self._emit_with(nodes, x, args, kwargs)]

    def _emit_with(self, nodes: Any, x: Value, args: Sequence, kwargs: dict[str, Any]) -> Value:
        """Call `emit`; `ByModules` where it computes with a tensor that others stand for."""
        try:
            return self.emit(nodes, x, *args, **kwargs)
        except (AttributeError, TypeError) as error:
            if CallTensor.__name__ not in str(error):
                raise
            raise ByModules from error

    def _first_microbatch(self, options: Any) -> bool | None:
        return options.first_microbatch

    def _layer_key(self, options: Any) -> tuple:
        """Key of all that ``emit`` depends on."""
        training = tuple([block.training for block in self.modules()])
        return options.key, self._settings, training, self.name

    def _is_planned(self, inp: Tensor, options: Any) -> bool:
        """Return whether there may be plans for an input of so many dims."""
        attends = (module for module in self.modules() if isinstance(module, MultiheadAttention))
        dims = not options.drops_paths or inp.dim() == 3  # paths go by the first of two
        return dims and all(module._is_planned(inp) for module in attends)


def _as_given(value: Any) -> Any:
    """An argument of a call, of which a graph has made a constant; a stand-in for a tensor."""
    return CallTensor() if value == traced_layer.OBJECT else value


def _without_values(value: Any) -> Any:
    return CallTensor() if isinstance(value, Tensor) else value
