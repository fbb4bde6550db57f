# SPDX-License-Identifier: Apache-2.0
"""Link between modules and plug-ins: modules run what the policy in force selects.

A run of a plan reads the selection of its thread natively (`_core.Selection`). Here is what Python
adds: plug-ins are looked for once, a backward runs in the scope of its forward, and a graph of
torch.compile runs by the selection with which it was traced: another one makes another graph.
"""

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine import _core
from transformer_engine.common import config
from transformer_engine.common.selections import GENERATION, MET
from transformer_engine.pytorch.torchside.device import (
    add_type,
    has_kernels,
    stream_handle,
    type_name,
)
from transformer_engine.pytorch.torchside.locks import Lock
from transformer_engine.pytorch.torchside.modes import constant_in_graphs, graph_task

_POLICY = (
    config.TE_FL_PREFER,
    config.TE_FL_PREFER_VENDOR,
    config.TE_FL_STRICT,
    config.TE_FL_ALLOW_VENDORS,
    config.TE_FL_DENY_VENDORS,
    config.TE_FL_PER_OP,
    config.TE_FL_PLUGIN_MODULES,
    config.TE_PLUGIN,
)
_GROUP = "te_fl.plugin"


def _are_wanted() -> bool:
    """Return whether a plug-in is installed, or the environment chooses implementations."""
    if any(variable.get() for variable in _POLICY):
        return True
    from importlib.metadata import entry_points

    return bool(entry_points(group=_GROUP))


def _imported(name: str) -> Any:
    """The module of a name, None where nobody imports it: waits for a thread that is at it."""
    return importlib.import_module(name) if name in sys.modules else None


def find() -> None:
    """Have modules obey the manager of the process, where there is one or a plug-in to load.

    The first run of a plan calls it. Where it finds nothing nobody is asked, until a program makes
    that manager.
    """
    manager = _imported("transformer_engine.plugin.core.manager")
    made = manager is not None and manager._default is not None
    policy = _imported("transformer_engine.plugin.core.policy")
    if made or (policy is not None and policy.is_used()) or _are_wanted():
        manager = importlib.import_module("transformer_engine.plugin.core.manager")  # it registers
        manager.obey_default_manager()


_core.find_selections(find)


_MEETING = Lock()
_LAST = -(2**31)
"""Priority of what is asked after all others."""


def _why_nobody(name: str, device: torch.device) -> str:
    """Whom the policy has asked to run an operator of the C library, and why they did not."""
    return importlib.import_module("transformer_engine.plugin.who_runs").why_nobody(name, device)


@_MEETING.held
def _meet(tensor: Any, dlpack: int) -> None:
    """Make a type of device known: what nobody else runs there, definitions in torch run.

    `dlpack` is as of `_core.meet_devices`.
    """
    kind, name = tensor.device.type, f"{type_name(tensor.device)}.reference.torch"
    number = add_type(tensor.device, dlpack)
    if kind not in MET:
        definitions = importlib.import_module("transformer_engine.plugin.definitions")
        with contextlib.suppress(ValueError):  # a meeting that was interrupted has registered it
            _core.unregister_backend(name)
        _core.register_backend(name, number, _LAST, definitions.functions(kind, _why_nobody))
        MET.add(kind)
    manager = _imported("transformer_engine.plugin.core.manager")
    if manager is not None and manager._default is not None:
        manager._default.registry_changed()  # others are asked there
    _core.device_is_met(number, kind, functools.partial(stream_handle, kind))


_core.meet_devices(_meet)


def asked_of_lists(op: str) -> Callable | None:
    """What asks those who are selected to run an operator on lists before this library's own.

    It returns NotImplemented for a call that nobody takes. None: there is nobody.
    """
    return _core.selected_function(op)


def operator_of_lists(function: Callable) -> Callable:
    """Make a function an operator on lists of tensors, which obeys who is selected (decorator).

    They are asked first. What nobody else takes the function runs, ``__wrapped__`` of the operator:
    it is this library's own, whose parts on a device come from `of_lists`.
    """
    op = function.__name__

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        asked = asked_of_lists(op)
        found = NotImplemented if asked is None else asked(*args, **kwargs)
        if found is not NotImplemented:
            return found
        if MET:  # it may be a definition, which is counted
            definitions = importlib.import_module("transformer_engine.plugin.definitions")
            return definitions.run_on_lists(op, function, args, kwargs)
        return function(*args, **kwargs)

    return run


def of_lists(function: str, device: torch.device) -> Callable:
    """`_core.update` or `_core.l2norm`, or its definition in torch where no kernel of ours runs."""
    if has_kernels(device):
        return getattr(_core, function)
    return getattr(
        importlib.import_module("transformer_engine.plugin.definitions.updates"), function
    )


def replace_operators() -> None:
    """Have ``NVTE_PLUGIN`` put its module in place of ``transformer_engine_torch``."""
    if config.TE_PLUGIN.get():
        importlib.import_module("transformer_engine_torch")


def of_forward(scope: Any) -> Any:
    """The scope of a backward whose forward was in `scope`, None: obeyed nobody; None: none needed.

    Enter it around the backward, on whatever thread that runs. What is in force is not entered: it
    would be another condition for graphs that the backward runs.
    """
    if scope is None:
        return _core.unselected()
    return None if scope.in_force else scope


def natively() -> Any:
    """A context in which modules, and operators of module code, ask nobody."""
    return _core.unselected() or contextlib.nullcontext()


def native(function: Callable) -> Callable:
    """A function that runs `natively`.

    What implements an operator may be made of modules and of what they call, and would ask itself
    else.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        scope = _core.unselected()
        if scope is None:
            return function(*args, **kwargs)
        with scope:
            return function(*args, **kwargs)

    return run


# ---- attention by a class ------------------------------------------------------------------------


def attention_class() -> type | None:
    """The class of attention modules that is selected ahead of this library's; None: there is none.

    It is what `get_flash_attention_class` gives under the policy in force.
    """
    asked = _core.selected_function("get_flash_attention_class")
    return None if asked is None else asked()


def attention_class_name() -> str:
    """Its name; "" where there is none. In a graph that with which the graph was traced."""
    if torch.compiler.is_compiling():
        _find_first()
        return _name_in_graph(GENERATION[0], _LABELS.scope)
    return attention_class_name_now()


def attention_class_name_now() -> str:
    """`attention_class_name` where no graph is being traced: a call asks for it each time."""
    found = attention_class()
    return "" if found is None else f"{found.__module__}.{found.__qualname__}"


@constant_in_graphs
def _name_in_graph(generation: str, scope: str) -> str:
    del generation, scope  # conditions of the graph, since they are read
    return attention_class_name_now()


# ---- graphs ------------------------------------------------------------------------------------

IN_FORCE = -1
"""In place of a number: whatever is in force for the thread."""


class _Labels(threading.local):
    """``scope``: which scope of policies the thread is in, for the conditions of graphs.

    Each thread makes its own at the first look, a thread of torch that runs a backward, too.
    """

    read = False  # by a graph; until then no thread needs one

    def __init__(self) -> None:
        if _Labels.read:
            _core.label_scopes(self)


_LABELS = _Labels()
_KEPT: dict[int, Any] = {}
"""Scopes of the selections that graphs have been traced with, by number."""


@constant_in_graphs
def _find_first() -> None:
    """Let plug-ins be found, and this thread show its scope."""
    _Labels.read = True
    _core.label_scopes(_LABELS)
    _core.selected()


@constant_in_graphs
def _number(generation: str, scope: str) -> int:
    """Number of the selection in force, which stays with graphs; 0: nobody is asked.

    The arguments are conditions of the graph, since they are read.
    """
    del generation, scope
    kept = _core.selected()
    number = _core.selection_number()
    if number:
        _KEPT.setdefault(number, kept)
    return number


def number_of_graph() -> int:
    """By which selection a graph that is being traced runs; it is another one for another graph."""
    _find_first()
    return _number(GENERATION[0], _LABELS.scope)


def of_graph(number: int, forward: bool) -> Any:
    """The scope in which a run of a graph is that was traced with a selection; None: none needed.

    RuntimeError where a forward outside of a recompute is in another one, which its conditions did
    not tell.
    """
    if number == IN_FORCE:
        return None
    if forward and number != _core.selection_number() and graph_task() == -1:
        raise RuntimeError(
            "a compiled module was traced while other implementations were selected than are now: "
            "call torch.compiler.reset() after a change of the policy or of registrations"
        )
    return of_forward(_KEPT[number] if number else None)
