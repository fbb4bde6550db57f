# SPDX-License-Identifier: Apache-2.0
"""State of torch around a call: tracing, export, modes, transforms, fake tensors.

Names of torch that are not public stand here, because there is no public way to ask: tests of
torch's tools fail where a release of torch renames one. Elsewhere are the variables of torch's
checkpoints, by name in `recompute`. Whether a graph is traced is public
(`torch.compiler.is_compiling`).
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import starmap
from operator import getitem
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._functorch.utils import enable_single_level_autograd_function
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import (
    _global_parameter_registration_hooks,
    _has_any_global_hook,
)
from torch.nn.utils.parametrize import _inject_new_class
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
    return_and_correct_aliasing,
)
from torch.utils._pytree import arg_tree_leaves, tree_map_only

from transformer_engine import _core
from transformer_engine.common.contexts import Context

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Number of active `TorchDispatchMode` objects: counters, loggers and fake modes, which see torch
operators and nothing else."""

in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True where the thread is inside of a transform of `torch.func`."""

any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""True where `torch.autocast` is on for any kind of device; public ways ask for one, slower."""


deterministic_algorithms: Callable[[], bool] = torch._C._get_deterministic_algorithms
"""True where `torch.use_deterministic_algorithms` is on; the public way is a function in Python."""


def versions_kept(tensors: Sequence[Tensor]) -> AbstractContextManager:
    """A context in which writes to tensors do not count for autograd, which may have saved them."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of `torch.autocast` on a type of device; None: it is off there."""
    if not any_autocast() or device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
inside_operator: Callable[[], bool] = functools.partial(
    torch._C._dispatch_tls_is_dispatch_key_excluded, _AUTOGRAD
)
"""True where the thread is inside of a torch operator, whose own ones autograd does not see."""

active_modes: Callable[[], list] = _get_current_dispatch_mode_stack
"""These objects."""

forward_mode_enabled: Callable[[], bool] = torch._C._is_fwd_grad_enabled
"""False in the forward of a function of autograd, and in inference mode; not by `torch.no_grad`."""

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Number of the backward that the thread runs a part of; -1: it is in none."""

keeps_autograd_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""True where what was saved may be read again after the backward that the thread runs a part of
(``retain_graph=True``); True where it runs in none."""

top_saved_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""Innermost pair of `torch.autograd.graph.saved_tensors_hooks` in force, or None; given False."""

wraps_tensors: Callable[[Any], bool] = is_traceable_wrapper_subclass
"""True where a tensor is one of a subclass that has its values in other tensors."""

leaves_of: Callable[..., list] = arg_tree_leaves
"""Leaves of arguments: items of the lists, tuples and dicts among them."""

mapped_tensors: Callable[..., Any] = tree_map_only
"""Apply a function to what is of a class among the items of lists, tuples and dicts."""

aliasing: Callable[..., Any] = return_and_correct_aliasing
"""Say of a result of ``__torch_dispatch__`` which argument's memory it shares."""

make_wrapper: Callable[..., Tensor] = Tensor._make_wrapper_subclass
"""Make a tensor without memory, of a class that has its values in other tensors."""

no_torch_function: Callable = torch._C._disabled_torch_function_impl
"""``__torch_function__`` of a class that leaves all to ``__torch_dispatch__``."""

give_own_class: Callable[[torch.nn.Module], None] = _inject_new_class
"""Give a module a class of its own, as the first parametrization of a module does."""

take_back: Callable[[torch.library.Library], None] = torch.library.Library._destroy
"""Undo what a library has defined."""

below_autograd: Callable[[], AbstractContextManager] = torch._C._AutoDispatchBelowAutograd
"""A block in which operators go on below autograd, for autograd's part of an operator."""

at_this_level: Callable[[], AbstractContextManager] = enable_single_level_autograd_function
"""A block in which an autograd function may be applied at one level of function transforms."""

_forward_ad = torch.autograd.forward_ad
_transform = torch._C._functorch
_traced_modes = torch._ops._len_torch_dispatch_stack_pre_dispatch
_mode_of_kind = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_CALL = torch.nn.Module.__call__
_LIBRARY = __name__.partition(".")[0] + "."


def constant_in_graphs(function: Callable) -> Callable:
    """Run a function while a graph is traced and keep its result as a constant (decorator).

    What `torch.compiler.assume_constant_result` does, which imports the whole compiler: a second.
    A module can only be the ``self`` of a method: torch 2.11 takes none for an argument.
    """
    function._dynamo_marked_constant = True
    return function


_SKIPPED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def begins_no_graph(function: Callable) -> Callable:
    """Let torch.compile begin no graph in a function or in what it calls (decorator).

    A graph that begins before it may hold it. A module that torch could not trace, after an error
    say, runs as eager code, and torch would begin graphs in code that is for eager mode alone.
    """
    set_code_exec_strategy(function.__code__, _SKIPPED)
    return function


@constant_in_graphs
def exporting() -> bool:
    """Return whether `torch.export` traces: there is no backward then, and state must not change.

    A constant in graphs: `torch.compile` of torch 2.11 takes `is_exporting` for true wherever it
    meets it.
    """
    return torch.compiler.is_exporting()


@constant_in_graphs
def allows_tf32() -> bool:
    """Return whether products of fp32 on CUDA may round to TF32, by any of torch's settings.

    Where a program has used ``fp32_precision``, torch refuses to say what ``allow_tf32`` is.
    Guarded in graphs, though a constant there: `torch.compile` looks at this setting itself.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


class _TorchContext(Context):
    """A block with other states of torch for the thread."""

    def _within(self, kind: type, *arguments: Any) -> None:
        """Be in a guard of torch, which is in C; some count as soon as they are made."""
        made: list = []
        self._undo_by(_leave_guard, made)
        made[:] = starmap(kind, (arguments,))  # a call in a call of C: nothing comes between
        made[0].__enter__()

    def _set_grad(self, enabled: bool) -> None:
        self._undo_by(torch._C._set_grad_enabled, torch.is_grad_enabled())
        torch._C._set_grad_enabled(enabled)


class below_modes(_TorchContext):  # noqa: N801 - reads as what it does
    """A block of what an operator is made of: no mode and no transform of torch sees it.

    Nor does autograd.
    """

    def _enter(self) -> None:
        if torch._C._len_torch_function_stack() > 0:  # torch.export records changes of grad mode
            self._within(torch._C.DisableTorchFunction)
        self._set_grad(False)
        if in_transform():
            self._leave_transforms()
        if _traced_modes():  # torch.export traces: nothing is to be put back where that fails
            context = _disable_current_modes()
            self._undo_by(context.__exit__, None, None, None)
            context.__enter__()
        elif dispatch_modes():
            self._undo_by(_push_again, active_modes())
            while dispatch_modes():
                _pop_mode()

    def _leave_transforms(self) -> None:
        levels: list = []
        self._undo_by(_enter_again, levels)
        while _transform.peek_interpreter_stack() is not None:
            # A call in a call of C: nothing comes between the two.
            (level,) = starmap(_transform.pop_dynamic_layer_stack, ((),))
            levels.append(level)


class real_tensors(below_modes):  # noqa: N801 - reads as what it does
    """A block that makes tensors that outlive it: real ones, whatever is active around it."""

    def _enter(self) -> None:
        self._within(torch._C._InferenceMode, False)
        super()._enter()


class as_eager(_TorchContext):  # noqa: N801 - reads as what it does
    """A block, outside of the graph that is traced, of code that decides as in eager mode.

    Torch says there that a graph is traced, from version 2.13 on.
    """

    def __init__(self, gradients: bool = False) -> None:
        self._gradients = gradients

    def _enter(self) -> None:
        self._set(torch.compiler, _is_compiling_flag=False)
        self._set_grad(self._gradients)


def _leave_guard(made: list) -> None:
    for guard in made:
        guard.__exit__(None, None, None)


def _push_again(modes: list) -> None:
    for mode in modes[dispatch_modes() :]:
        _push_mode(mode)


def _enter_again(levels: list) -> None:
    while levels:
        (_,) = map(_transform.push_dynamic_layer_stack, map(levels.pop, (-1,)))


def unseen() -> AbstractContextManager:
    """A block that no dispatch mode sees; for what a module does beside its operators."""
    seen = not torch.compiler.is_compiling() and dispatch_modes()
    return real_tensors() if seen else contextlib.nullcontext()


def _selective_modes() -> tuple[type, ...]:
    """Modes of torch's selective checkpoints: those of a forward and of its repetition."""
    checkpoints = sys.modules.get("torch.utils.checkpoint")
    if checkpoints is None:
        return ()
    return checkpoints._CachingTorchDispatchMode, checkpoints._CachedTorchDispatchMode


def selective() -> bool:
    """Tell whether a selective checkpoint watches: its repetition runs some of the operators again.

    It takes the results of the others from its forward, by their number among those of a kind.
    """
    kinds = _selective_modes() if dispatch_modes() else ()
    return bool(kinds) and any(isinstance(mode, kinds) for mode in active_modes())


def seen_here() -> Callable[[Callable], Callable]:
    """Make a decorator of functions that an operator calls: what they run is seen as if run here.

    That is by the dispatch modes that are active now, which are off while an operator runs, and by
    autograd. Function transforms see nothing of it: an operator gets no tensors of theirs. Nor do
    selective checkpoints, which repeat the operator or nothing of it.
    """
    whole = _selective_modes()
    modes = [] if in_transform() else [m for m in active_modes() if not isinstance(m, whole)]
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def wrap(function: Callable) -> Callable:
        def run(*arguments: Any) -> Any:
            with _Seen(modes, keys):
                return function(*arguments)

        return run

    return wrap


class _Seen(_TorchContext):
    """A block that dispatch modes see."""

    def __init__(self, modes: list, keys: tuple) -> None:
        self._modes, self._keys = modes, keys

    def _enter(self) -> None:
        self._undo_by(_pop_again, dispatch_modes())
        for mode in self._modes:
            _push_mode(mode)
        if self._modes:
            self._within(torch._C._ForceDispatchKeyGuard, *self._keys)


def _pop_again(count: int) -> None:
    while dispatch_modes() > count:
        _pop_mode()


def with_autograd(function: Callable) -> Callable:
    """Let operators inside of a function be differentiated, inside of a custom operator, too.

    A torch operator, which is what a compiled graph calls, runs below autograd: without this what
    the function differentiates by ``torch.autograd.grad`` would have no graph (decorator).
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._SetExcludeDispatchKeyGuard(_AUTOGRAD, False):
            return function(*args, **kwargs)

    return run


def in_own_dtypes(function: Callable) -> Callable:
    """Have a function compute in the dtypes of its arguments, in regions of `torch.autocast`, too.

    Such a region says in which dtype operators of torch run; what is an operator itself is not to
    change with the operators that it is made of (decorator).
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not any_autocast():
            return function(*args, **kwargs)
        devices = (getattr(leaf, "device", None) for leaf in leaves_of(*args, **kwargs))
        kinds = {device.type for device in devices if isinstance(device, torch.device)} - {"meta"}
        with _without_autocast(kinds):
            return function(*args, **kwargs)

    return run


class _without_autocast(_TorchContext):  # noqa: N801 - reads as what it does
    """A block in which regions of `torch.autocast` do not count, for kinds of devices."""

    def __init__(self, kinds: set[str]) -> None:
        self._kinds = kinds

    def _enter(self) -> None:
        for kind in self._kinds:
            if torch.is_autocast_enabled(kind):
                self._undo_by(torch.set_autocast_enabled, kind, True)
                torch.set_autocast_enabled(kind, False)


def faking() -> bool:
    """Return whether a fake mode is active: tensors that are made now have no memory."""
    return dispatch_modes() > 0 and _mode_of_kind(_FAKE) is not None


def is_traced_or_faked(*tensors: Tensor) -> bool:
    """Return whether what runs now is part of a graph that is being traced, or makes no values.

    Or whether it reads fake ones of `tensors`: torch 2.11 does so outside of the mode they are of.
    """
    fake = any([isinstance(tensor, FakeTensor) for tensor in tensors])
    return fake or torch.compiler.is_compiling() or faking()


def compilation() -> CompileContext | None:
    """Identity of the frame that the thread compiles, the same in all attempts; None: none."""
    return CompileContext.try_get()


def trace_again(reason: str) -> NoReturn:
    """Begin the trace of a graph anew, from within it."""
    from torch._dynamo.exc import UnspecializeRestartAnalysis  # the compiler: it is loaded, it runs

    raise UnspecializeRestartAnalysis(restart_reason=reason)


def beside_graph(function: Callable, *arguments: Any) -> Any:
    """Call a function that changes state of Python, for code that may be traced.

    A graph holds tensors; what a trace changes besides is done once, when the graph has run. In a
    checkpoint that lies in the graph torch refuses such changes, because the repetition in the
    backward does not make them again: here it must not.
    """
    if not torch.compiler.is_compiling():
        return function(*arguments)
    from torch._dynamo import utils  # the compiler: it is loaded, it runs

    return utils._disable_side_effect_safety_checks_for_current_subtracer(function, *arguments)


def in_traced_checkpoint() -> bool:
    """Return whether what is traced now lies in a checkpoint of the graph.

    To be asked outside of the graph, by functions that are `constant_in_graphs`.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator  # loaded, as above

    tracer = InstructionTranslator.current_tx().output.current_tracer
    while tracer is not None:
        if tracer.description == "torch.utils.checkpoint.checkpoint":
            return True
        tracer = tracer.parent
    return False


def keep_result(operator: Any) -> None:
    """Save what an operator has made just now for the backward, where operators make a graph.

    In a checkpoint of the graph, whose backward would run the operator again.
    """
    mode = get_proxy_mode()
    if mode is None:
        return
    made = next(n for n in reversed(mode.tracer.graph.nodes) if n.target is operator)
    if made.meta.pop("recompute", None) is not None:
        from torch.utils.checkpoint import CheckpointPolicy  # loaded, as there is a checkpoint

        items = [user for user in made.users if user.target is getitem]
        for node in items or [made]:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def without_memory(tensor: Tensor) -> bool:
    """Return whether a call on a tensor gives shapes and dtypes alone; no graph is being traced.

    It is on the meta device, or fake, or a fake mode is active.
    """
    if (type(tensor) is not Tensor and isinstance(tensor, FakeTensor)) or tensor.is_meta:
        return True
    return dispatch_modes() > 0 and faking()


def is_composite(operator: Any) -> bool:
    """Return whether an operator is nothing but calls of others, on the devices of this machine."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = operator.name()
    return has(name, "CompositeImplicitAutograd") and not (has(name, "CPU") or has(name, "CUDA"))


def run_composite(operator: Any, args: tuple, kwargs: dict) -> Any:
    """Call the others; `decompose` would take those of compilers, which copy where these do not."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def after_autograd(keyset: torch._C.DispatchKeySet) -> torch._C.DispatchKeySet:
    """Dispatch keys of an operator call that come after autograd."""
    return keyset & torch._C._after_autograd_keyset


def forward_gradients() -> bool:
    """Return whether forward-mode differentiation is active: a tensor may carry a tangent."""
    return _forward_ad._current_level >= 0


def active_device() -> torch.device | None:
    """Device that ``with torch.device(...)`` or `torch.set_default_device` chose, or None.

    `torch.get_default_device` says "cpu" also where neither has been used.
    """
    chosen = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is not None
    if not chosen and torch._C._len_torch_function_stack() > 0:
        from torch.utils._device import DeviceContext  # loaded by the first such context

        modes = torch.overrides._get_current_function_mode_stack()
        chosen = any(isinstance(mode, DeviceContext) for mode in modes)
    return torch.get_default_device() if chosen else None


def only_forwards(*modules: torch.nn.Module) -> bool:
    """Return whether calls of modules run nothing but the forwards that their classes define.

    A layer may do the work of such submodules without calling them. Hooks, a forward of a subclass,
    of an instance or put in place of the class's, and ``module.compile()`` ask for the call; so
    does a graph that is being traced, which names its nodes by modules. A class of the library
    keeps its forward as ``_FORWARD``; other classes, subclasses of those too, may do anything, but
    those that are composed by `PlannedModule` (``IS_PLANNED``), whose forward is its.
    """
    if torch.compiler.is_compiling() or _has_any_global_hook():
        return False
    return _core.only_forward(modules, _CALL, _LIBRARY)


def replaces(module: torch.nn.Module, name: str, value: Any) -> bool:
    """Put a parameter in the place of another one of a module; False where torch has to do it.

    Torch looks the name up in all that a module has, which FSDP2 would wait for many times a step.
    A framework may have put a registration of its own in the place of torch's.
    """
    if (
        not isinstance(value, torch.nn.Parameter)
        or not value.is_leaf
        or _global_parameter_registration_hooks
        or type(module).register_parameter.__module__ != torch.nn.Module.__module__
    ):
        return False
    module.__dict__["_parameters"][name] = value
    return True


# ---- process groups ------------------------------------------------------------------------------


def group_of(name: str) -> Any:
    """A process group by its registered name, as torch's functional collectives find it."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)
