# SPDX-License-Identifier: Apache-2.0
"""Activation recompute: what a checkpointed forward leaves for the forward that repeats it.

A forward that runs inside a backward repeats an earlier one. It must use what that one used
(recipe, scales, whether it was the first module of its region), record no amax, and update nothing.
So the original writes an `Entry` per module call into the `Frame` of its checkpoint, and the
recompute reads them in the same order.

Frames belong to one call of a checkpoint function. `transformer_engine.pytorch.checkpoint` makes
its own; those of `torch.utils.checkpoint` hang on the object that torch keeps from a call to its
recompute: the context of its autograd function (reentrant), its frame object (non-reentrant). A
program with a recompute of its own says where it is with `activation_recompute_forward`.

Checkpoints are found on the Python stack, by the code objects of torch's functions and a variable
of each (`_SIGNS`), because torch gives no sign that would do:

- The function of a reentrant checkpoint runs with gradients off, those of forward mode too, and
  that is all: there is no hook and no current autograd node, and past its first module no input
  requires a gradient. It can not be told from other functions of autograd. Its context, which alone
  lives as long as a recompute may come, is in a variable of torch's and nowhere else: the node that
  it belongs to is not in a graph yet.
- A non-reentrant one hooks saved tensors, but torch tells the topmost pair of hooks alone: what a
  program does with hooks inside (offloading), or another checkpoint there, hides it.
- Both kinds nest in any order, and a recompute contains forwards of further checkpoints. What a
  call must be recorded for, and what it repeats, follows from which of them is inside which.

So a release of torch that renames one of these is an error when this module is imported. Tested
with 2.10, 2.11, 2.13 and 2.15.

Graphs that `torch.compile` has made choose what they do by the region that is in force, and call no
module. The repetition of a `checkpoint` of this package is in the region of its forward again, and
the forwards of plans leave a `Run` each in the frame, as modules leave entries (`of_first`).
"""

import contextlib
import copy
import functools
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from operator import attrgetter
from types import CodeType, FrameType
from typing import Any

import torch

from transformer_engine import _core
from transformer_engine.common import config
from transformer_engine.common.contexts import Context
from transformer_engine.pytorch.execution.overrides import of_forward
from transformer_engine.pytorch.execution.recompute_frames import Frame, Queue, Run
from transformer_engine.pytorch.execution.thread_state import current_state, in_region
from transformer_engine.pytorch.torchside.collectives import (
    agree,
    expect_own,
    gather_split_1d_tensor,
    split_tensor_into_1d_equal_chunks,
)
from transformer_engine.pytorch.torchside.device import is_any_captured
from transformer_engine.pytorch.torchside.modes import (
    begins_no_graph,
    forward_mode_enabled,
    graph_task,
    top_saved_hooks,
)

_QUEUE = Queue()
"""One for the process: backwards run in other threads than forwards."""


class _Thread(threading.local):
    """Where this thread is."""

    enabled = False  # in the recompute of a program: see `activation_recompute_forward`
    repeats = False
    queued = False  # and what calls leave is in `_QUEUE`
    depth = 0  # checkpoints of this package that it is inside of
    runs = 0  # behind operators that it does for modules, which know what they repeat


_thread = _Thread()


class activation_recompute_forward(Context, contextlib.ContextDecorator):  # noqa: N801 - users' name
    """Mark the forwards of a recompute that a program does by itself (context or decorator).

    With `activation_recompute` the forward inside will be repeated, or is: then in
    `recompute_phase`. The first forward, with gradients off, leaves what each FP8 module call used;
    the second one, which a backward repeats with gradients on, takes it up in the same order.
    Several forwards may be pending: the oldest is repeated first. Not needed around the
    `checkpoint` of this package and those of torch. Contexts do not nest.
    """

    _queued = True  # no checkpoint of torch keeps what calls leave

    def __init__(self, activation_recompute: bool = False, recompute_phase: bool = False) -> None:
        self._enabled = bool(activation_recompute)
        self._repeats = bool(activation_recompute and recompute_phase)

    def _recreate_cm(self) -> "activation_recompute_forward":
        """Give each call of a decorated function a context of its own."""
        return type(self)(self._enabled, self._repeats)

    def _enter(self) -> None:
        queued = self._enabled and self._queued
        self._set(_thread, enabled=self._enabled, repeats=self._repeats, queued=queued)


class _recompute_of_torch(activation_recompute_forward):  # noqa: N801 - as its base
    """The mark inside a checkpoint of torch, which is found on the stack and keeps all itself."""

    _queued = False


def get_activation_recompute_contexts() -> tuple[Any, Any]:
    """Contexts of a forward and of its repetition: a ``context_fn`` of torch's checkpoint.

    For ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``, which repeats FP8 forwards
    with or without them; inside, `is_fp8_activation_recompute_enabled` is true. A program that
    repeats forwards by itself takes `activation_recompute_forward`.
    """
    return _recompute_of_torch(True, False), _recompute_of_torch(True, True)


def use_reentrant_activation_recompute() -> bool:
    """Return whether the innermost checkpoint of torch or of this package is of the reentrant form.

    True outside of all: what `checkpoint` takes by default.
    """
    for kind, holder in _on_stack():
        if not isinstance(holder, Frame):  # one of ours is inside of a checkpoint of torch
            return kind.startswith("reentrant")
    return True


def is_fp8_activation_recompute_enabled() -> bool:
    """Return whether this thread is inside `activation_recompute_forward`, of either forward."""
    return _thread.enabled


def in_fp8_activation_recompute_phase() -> bool:
    """Return whether this thread is inside `activation_recompute_forward` of the second forward."""
    return _thread.repeats


@begins_no_graph
def may_concern(gradients: bool, fp8: bool) -> bool:
    """Tell whether a checkpoint may record or repeat a module call; cheap, and true where one does.

    A non-reentrant checkpoint hooks saved tensors, also for functions that switch gradients off for
    a part of what they do; a reentrant one is a function of autograd. False: no checkpoint is
    around the call, or none that records it (see `Frame`). `gradients` is the grad mode, `fp8`
    whether the call runs in FP8.
    """
    if graph_task() != -1 or top_saved_hooks(False) is not None:
        return True
    return not gradients and (_thread.depth > 0 or (fp8 and _may_be_reentrant()))


def _may_be_reentrant() -> bool:
    """Tell whether a reentrant checkpoint may run its forward; cheap, and true where one does.

    True in the forward of any function of autograd, and where a program says that it will repeat.
    """
    return _thread.queued or not (forward_mode_enabled() or torch.is_inference_mode_enabled())


def _call(frame: Frame, recompute: bool, function: Callable, inputs: tuple, kwargs: dict) -> Any:
    """Call a function under a checkpoint of this package."""
    _thread.depth += 1
    try:
        return function(*inputs, **kwargs)
    finally:
        _thread.depth -= 1


_SIGNS = (  # function of torch.utils.checkpoint (and one inside it), its variable, the kind
    ("CheckpointFunction.forward", "ctx", "reentrant forward"),
    ("CheckpointFunction.backward", "ctx", "reentrant recompute"),
    ("checkpoint", "gen", "forward"),  # a generator, or unset in a reentrant call
    ("_checkpoint_without_reentrant_generator", "new_frame", "generator"),
    ("_checkpoint_hook.__init__:unpack_hook", "frame", "recompute"),
)
_LATER = {"checkpoint": "_checkpoint_impl"}  # names from torch 2.15 on
_LATER["_checkpoint_without_reentrant_generator"] = "_checkpoint_without_reentrant_generator_impl"


def _code_with(path: str, variable: str) -> CodeType | None:
    """Code of a function of torch.utils.checkpoint; None where it has no such variable."""
    name, _, inner = path.partition(":")
    try:
        code = inspect.unwrap(attrgetter(name)(sys.modules["torch.utils.checkpoint"])).__code__
        if inner:
            code = {getattr(c, "co_name", None): c for c in code.co_consts}[inner]
    except (AttributeError, KeyError):
        return None
    return code if variable in code.co_varnames + code.co_freevars else None


@functools.cache
def _codes() -> dict[int, tuple[str, str, CodeType]]:
    """(kind, variable, code) of `_SIGNS` and `_call`, by id: hashing a code object takes long."""
    codes = [("own", "frame", _call.__code__)]
    for path, variable, kind in _SIGNS:
        code = _code_with(path, variable) or _code_with(_LATER.get(path, path), variable)
        if code is None:
            raise ImportError(
                f"torch {torch.__version__}: torch.utils.checkpoint has no {path} with a variable "
                f"{variable!r}, by which modules find the checkpoint that they run under; install "
                "a release of torch that this package was tested with"
            )
        codes.append((kind, variable, code))
    return {id(code): (kind, variable, code) for kind, variable, code in codes}


if "torch.utils.checkpoint" in sys.modules:
    _codes()  # now, where torch has loaded it, and not in the middle of a training


def _on_stack() -> Iterator[tuple[str, Any]]:
    """(kind, holder) of the checkpoints on the Python stack, innermost first.

    The recompute of the program itself counts as the outermost one.
    """
    if "torch.utils.checkpoint" in sys.modules:
        codes = _codes()
        caller: FrameType | None = sys._getframe(2)
        while caller is not None:
            found = codes.get(id(caller.f_code))
            if found is not None:
                kind, variable, _ = found
                names = caller.f_locals
                holder = names.get(variable)
                if kind == "own":
                    kind = "recompute" if names["recompute"] else "forward"
                elif kind == "forward":
                    running = getattr(holder, "gi_frame", None)  # None: a reentrant call's follows
                    holder = running and running.f_locals.get("new_frame")
                if holder is not None:
                    yield kind, holder
            caller = caller.f_back
    if _thread.queued:
        yield ("recompute" if _thread.repeats else "forward"), _QUEUE


def frames() -> tuple[list[Frame], Frame | None]:
    """Checkpoints around the current module call: (those that record it, the one that it repeats).

    Of the frames whose forward is being repeated the innermost one counts, or None; frames around
    it are none of this call's business.
    """
    record: list[Frame] = []
    for kind, holder in _on_stack():
        frame = holder if isinstance(holder, Frame) else getattr(holder, "_te_recompute", None)
        if frame is None:
            frame = holder._te_recompute = Frame(not kind.startswith("reentrant"))
        if kind.endswith("recompute"):
            return record, frame
        record.append(frame)
    return record, None


class known_to_modules(Context):  # noqa: N801 - reads as what it does, as `autocast`
    """Around a run behind an operator that is no part of a graph."""

    def _enter(self) -> None:
        self._set(_thread, runs=_thread.runs + 1)


def of_first(
    key: Hashable, state: Sequence[torch.Tensor], measures: bool
) -> Sequence[torch.Tensor]:
    """Scaling state of a forward's plan that a graph runs, instead of `state`.

    Inside a checkpointed forward that is `state`, of which the checkpoint keeps copies; in its
    repetition these, so that it casts by the same scales and leaves the state alone. `key` is the
    same for both, and another one where the plan quantizes in another way, which is an error.
    `measures`: see `Run`.
    """
    if _thread.runs or not may_concern(torch.is_grad_enabled(), fp8=True):
        return state
    record, replay = frames()
    if replay is not None:
        run = replay.replay_run(key)
        state = [kept.clone() for kept in run.state]
    elif record:
        run = Run(tuple([tensor.clone() for tensor in state]), measures)
        if state and in_reentrant_forward():
            current_state().owes_update = False  # its repetition has the flag: see `checkpoint`
    for frame in record:
        frame.record_run(key, run)
    return state


def repeats() -> bool:
    """Return whether a checkpoint on the Python stack repeats its forward."""
    return graph_task() != -1 and frames()[1] is not None


def same_pairs(pairs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Random pairs of a call under a selective checkpoint: a repetition has those of its forward.

    Both draw them, so that the generator goes on equally; but it may be in another state, where
    the checkpoint has kept the results of operators that draw numbers, too.
    """
    record, replay = frames()
    if replay is not None:
        pairs = replay.replay_pairs(pairs)
    for frame in record:
        frame.record_pairs(pairs)
    return pairs


def scope_of_forward(scope: Any) -> Any:
    """In which scope of plug-ins a forward inside a backward runs: in that of the one it repeats.

    `scope` is that of the thread, for one that repeats nothing known.
    """
    _, replay = frames()
    return scope if replay is None or replay.scope is None else replay.scope


def note_scope(scope: Any) -> None:
    """Leave the scope of a call without gradients to a checkpoint that is to repeat it.

    `scope` is ``_core.selected()``. Calls with gradients leave it with their record.
    """
    if scope is not None and _may_be_reentrant():
        for frame in frames()[0]:
            frame.note_scope(scope)


def anywhere() -> bool:
    """Return whether a checkpoint is on the Python stack."""
    return next(_on_stack(), None) is not None


def in_reentrant_forward() -> bool:
    """Return whether gradients are off only because a reentrant checkpoint runs its forward."""
    if _thread.queued and not _thread.repeats:
        return True
    return not forward_mode_enabled() and any(
        kind == "reentrant forward" and any(holder.needs_input_grad) for kind, holder in _on_stack()
    )


class _put_back(Context):  # noqa: N801 - reads as what it does
    """Give a tracker of random states the states it had, for the time of a recompute."""

    def __init__(self, get_tracker: Callable, states: Any) -> None:
        self._get_tracker, self._states = get_tracker, states

    def _enter(self) -> None:
        tracker = self._get_tracker()
        self._undo_by(tracker.set_states, tracker.get_states())
        tracker.set_states(self._states)


def _require_callables(function: Any, get_rng_state_tracker: Any, context_fn: Any) -> None:
    """Raise a TypeError for arguments of `checkpoint` that can not be called."""
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        raise TypeError(
            f"checkpoint: function: the class {function.__name__}, expected a module or another "
            "callable; make a module first"
        )
    given = (("function", function, "the arguments follow it"),)
    given += (("get_rng_state_tracker", get_rng_state_tracker, "give a function of no arguments"),)
    given += (("context_fn", context_fn, "give a function that returns two context managers"),)
    for name, value, fix in given:
        if not callable(value) and (value is not None or name == "function"):
            raise TypeError(f"checkpoint: {name}={value!r}, expected a callable; {fix}")


def _states_of(get_rng_state_tracker: Callable) -> Any:
    """The states of a tracker."""
    tracker = get_rng_state_tracker()
    if not (hasattr(tracker, "get_states") and hasattr(tracker, "set_states")):
        raise TypeError(
            f"checkpoint: get_rng_state_tracker returned a {type(tracker).__name__} object, "
            "expected a tracker with get_states and set_states, say a CudaRNGStatesTracker"
        )
    if is_any_captured():
        raise NotImplementedError(
            "checkpoint: get_rng_state_tracker in the capture of a CUDA graph is not built: a "
            "graph draws on and repeats no numbers; leave the tracker or the checkpoint out of it"
        )
    return tracker.get_states()


def _distributed(function: Callable, args: tuple, group: Any) -> tuple[Callable, tuple]:
    """The function and arguments of a checkpoint that keeps a part of the first one."""
    if group is None:
        raise ValueError(
            "checkpoint: distribute_saved_activations=True: give the ranks that share them, "
            "tp_group"
        )
    whole = args[0] if args else None
    expect_own("checkpoint: the first argument", whole)
    called = getattr(function, "func", function)  # of a functools.partial
    module = getattr(called, "__self__", called)  # of a method
    inside = module.modules() if isinstance(module, torch.nn.Module) else ()
    if any(getattr(each, "sequence_parallel", False) for each in inside):
        raise ValueError(
            "checkpoint: distribute_saved_activations=True of a module with sequence_parallel: its "
            "input is of this rank alone, and ranks can not keep parts of it for each other: leave "
            "one of them out"
        )
    if config.TE_CHECK_RANKS.get():
        data = whole.detach().contiguous().cpu().view(-1).view(torch.uint8)
        said = f"{list(whole.shape)} {whole.dtype} {hashlib.sha256(data.numpy()).hexdigest()[:16]}"
        agree("checkpoint: the ranks of tp_group differ in the first argument", said, group)
    part = split_tensor_into_1d_equal_chunks(whole.detach(), group, new_buffer=True)
    shape, needs_grad = whole.shape, whole.requires_grad
    first = [whole]  # of the forward: a repetition has no other

    def run(part: torch.Tensor, *others: Any, **kwargs: Any) -> Any:
        if first:
            whole = first.pop()
        else:
            whole = gather_split_1d_tensor(part, group).view(shape).requires_grad_(needs_grad)
        return function(whole, *others, **kwargs)

    return run, (part, *args[1:])


def checkpoint(
    function: Callable,
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Run a function without keeping its activations; repeat it in the backward.

    The repeated forward uses the recipe, scaling factors and random numbers of the first one, so
    the gradients are those of a run without recompute, bit for bit, wherever `autocast` was
    entered. Inside a graph that is being traced it is `torch.utils.checkpoint.checkpoint`; on CUDA
    devices torch draws other random numbers there than in eager code, and repeats these. Elsewhere
    all of the function is repeated, where torch's ``set_checkpoint_early_stop`` does not say
    otherwise.

    Parameters
    ----------
    function : callable
        A module or function of tensors; must do the same at each call.
    *args
        Its arguments.
    distribute_saved_activations : bool, default False
        Keep of the first argument, which is the same on all ranks of `tp_group`, the part of this
        rank alone; the parts are gathered for the repetition. The form is then the one without
        reentrance.
    get_rng_state_tracker : callable, optional
        Returns the tracker whose ``fork()`` modules enter: its ``get_states()`` are taken before
        the forward, and given back by ``set_states`` while it is repeated.
    tp_group : ProcessGroup, optional
        For `distribute_saved_activations`, which needs it.
    use_reentrant : bool, default True
        As of `torch.utils.checkpoint.checkpoint`; where no tensor of `args` requires a gradient,
        the form is the other one, since the reentrant one would give parameters none.
    **kwargs
        ``context_fn``, ``determinism_check``, ``debug``, ``preserve_rng_state`` go to
        `torch.utils.checkpoint.checkpoint`; the others to `function`.

    Returns
    -------
    Any
        What `function` returns.

    Raises
    ------
    TypeError
        `function`, `get_rng_state_tracker` or ``context_fn`` can not be called; the first argument
        is no plain tensor, with `distribute_saved_activations`.
    ValueError
        With `distribute_saved_activations`: no `tp_group`, or elements that its ranks do not
        divide; a module with `sequence_parallel`, whose input is of one rank. A function hides its
        modules: ``TE_CHECK_RANKS`` compares what the ranks give.
    NotImplementedError
        For `distribute_saved_activations` and `get_rng_state_tracker` under `torch.compile`.
    """
    from torch.utils.checkpoint import checkpoint as torch_checkpoint

    _require_callables(function, get_rng_state_tracker, kwargs.get("context_fn"))
    if torch.compiler.is_compiling():
        for name, given in (
            ("get_rng_state_tracker", get_rng_state_tracker is not None),
            ("distribute_saved_activations", distribute_saved_activations),
        ):
            if given:
                raise NotImplementedError(
                    f"checkpoint: {name} under torch.compile is not built: leave it out"
                )
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    if distribute_saved_activations:
        function, args = _distributed(function, args, tp_group)
        use_reentrant = False
    frame = Frame()
    options = {
        name: kwargs.pop(name)
        for name in ("context_fn", "determinism_check", "debug", "preserve_rng_state")
        if name in kwargs
    }

    forward = iter((True,))  # the first call is the forward, every later one repeats it
    region, scope = copy.copy(current_state()), _core.selected()
    states = None if get_rng_state_tracker is None else _states_of(get_rng_state_tracker)

    def run(*inputs: Any) -> Any:
        if next(forward, False):
            return _call(frame, False, function, inputs, kwargs)
        random = contextlib.nullcontext()
        if get_rng_state_tracker is not None:
            random = _put_back(get_rng_state_tracker, states)
        again = copy.copy(region)
        again.measures = frame.measures
        again.label = again.domain.label  # the forward may have made its state
        with random, in_region(again), of_forward(scope) or contextlib.nullcontext():
            return _call(frame, True, function, inputs, kwargs)

    # The reentrant form makes a node by the tensors among its arguments.
    makes_node = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    if use_reentrant and (makes_node or not torch.is_grad_enabled()):
        return torch_checkpoint(run, *args, use_reentrant=True, **options)
    return torch_checkpoint(run, *args, use_reentrant=False, early_stop=False, **options)
