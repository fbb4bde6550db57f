# SPDX-License-Identifier: Apache-2.0
"""The native entry points as torch operators, for graphs, dispatch modes and fake tensors.

Eager code calls `_core` directly. While a graph is traced, where a dispatch mode watches (a counter
of FLOPs, a logger), and for tensors without memory, the same plans run behind operators whose fake
kernels evaluate the plan's sizes on symbolic numbers. A graph carries the text of a plan, not its
id: another process may load it.

``run`` is a pure function of its inputs and returns a list, for any number of results. A plan that
writes amax histories or main gradients runs behind ``run_with_state_<n>``, which gives n tensors:
an operator that mutates and returns a list can not be functionalised. (In a checkpoint of a graph
it runs as three others: see `_run_to_repeat`.) Of these, one is defined when
the first plan of as many results is traced. Graphs that outlive a process find what they need:
programs of torch.export change no state, so they hold ``run`` alone, and what torch.compile has
cached it takes after it has traced the same calls again.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.plan_text import Plan, plan_of
from transformer_engine.common.plans import result_shapes
from transformer_engine.pytorch.execution import overrides, recompute
from transformer_engine.pytorch.execution.collectives import staged_over
from transformer_engine.pytorch.execution.stages import Staged
from transformer_engine.pytorch.torchside.flops import FORMULAS, offer_formulas
from transformer_engine.pytorch.torchside.locks import Lock
from transformer_engine.pytorch.torchside.modes import (
    after_autograd,
    at_this_level,
    below_autograd,
    constant_in_graphs,
    dispatch_modes,
    exporting,
    group_of,
    in_traced_checkpoint,
    keep_result,
    leaves_of,
    seen_here,
    take_back,
    without_memory,
)

_RUN = (
    "str plan, int[] slots, Tensor[] inputs, Tensor? saved, SymInt rows, int staged, "
    "int selection, str group"
)

_LIBRARY = torch.library.Library("transformer_engine", "DEF")
_FRAGMENTS: list[torch.library.Library] = []  # of operators that calls define, one each


def as_constant(number: float) -> float:
    """A float for a function that is `constant_in_graphs`.

    ``torch.compile(dynamic=True)`` makes symbols of the floats it meets; their text is a constant.
    """
    return float.fromhex(number.hex())


def behind_operators(tensor: Tensor) -> bool:
    """Return whether a call of this input that begins now is to run behind torch operators.

    That is where a graph is being traced, or the tensor has no memory that native code could read.
    Whether a dispatch mode watches is asked at each run: see `watched`.
    """
    return torch.compiler.is_compiling() or without_memory(tensor)


def watched() -> bool:
    """Return whether a dispatch mode is active, which sees torch operators alone."""
    if not dispatch_modes():
        return False
    offer_formulas()
    return True


def define(
    schema: str,
    implementation: Callable,
    fake: Callable,
    tags: tuple[torch.Tag, ...] = (),
    then: Callable[[Any], Any] | None = None,
    library: torch.library.Library = _LIBRARY,
) -> None:
    """Make a native function an operator ``torch.ops.transformer_engine.<name>``.

    At least one argument of the schema is a tensor: it says on which device to run.
    `implementation` gets tensors that have memory, `fake` gives empty results of the right shapes
    and dtypes. `then` is called where a graph is made of operators, behind the node.
    """
    name = schema[: schema.index("(")]
    library.define(schema, tags=tags)
    # On any device: one that gets operators that it lacks run by the CPU would run these so, too.
    library.impl(name, implementation, "CompositeExplicitAutograd")
    # Over the one that an interrupted definition has left: torch 2.11 does not take that back.
    torch.library.register_fake(
        f"transformer_engine::{name}", fake, lib=library, allow_override=True
    )
    library.impl(name, _refusing_backward(name, then), "Autograd", with_keyset=True)
    library.impl(name, _refusing_batches(name), "FuncTorchBatched", with_keyset=True)
    offer_formulas()


def define_obeying(
    name: str, arguments: str, results: str, implementation: Callable, fake: Callable
) -> Callable:
    """`define` an operator that runs what the plug-in system selects; returns what calls it.

    In a graph that is the selection with which the graph was traced, else the one in force.
    """

    def run(*given: Any, selection: int = overrides.IN_FORCE, **named: Any) -> Any:
        with overrides.of_graph(selection, False) or contextlib.nullcontext():
            return implementation(*given, **named)

    def run_fake(*given: Any, selection: int = overrides.IN_FORCE, **named: Any) -> Any:
        del selection
        return fake(*given, **named)

    schema = f"{name}({arguments}, *, int selection={overrides.IN_FORCE}) -> ({results})"
    define(schema, run, run_fake)
    operator = getattr(torch.ops.transformer_engine, name)

    def call(*given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() and not exporting():
            return operator(*given, **named, selection=overrides.number_of_graph())
        return operator(*given, **named)

    return call


class _NoBackward(torch.autograd.Function):
    """Pass results on; a backward that comes to them is an error, not a silent zero."""

    @staticmethod
    def forward(
        ctx: Any, name: str, results: tuple[Tensor, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        del tensors  # only they make the results require gradients
        ctx.name = name
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(
            f"transformer_engine::{ctx.name} can not be differentiated here: a module has "
            "first derivatives only, and a program of torch.export has a forward only: take first "
            "derivatives of the module itself"
        )


_pass_on = super(torch.autograd.Function, _NoBackward).apply  # the same under function transforms


def _refusing_batches(name: str) -> Callable:
    """Rule for `torch.vmap`: modules refuse it, but jacobians batch backwards."""

    def run(*arguments: Any, **named: Any) -> Any:
        raise NotImplementedError(
            f"transformer_engine::{name}: vmap is not supported, and with it torch.func.jacrev and "
            "is_grads_batched: run the module or its backward in a loop"
        )

    return run


def _refusing_backward(name: str, then: Callable | None = None) -> Callable:
    """Autograd's part of an operator.

    Modules call operators inside of their own autograd function. Who differentiates through one
    that stands alone, in a program of `torch.export` or in the backward of `torch.func.grad`, would
    get no gradients and no error.
    """

    def run(keyset: Any, *arguments: Any, **named: Any) -> Any:
        operator = getattr(torch.ops.transformer_engine, name).default
        with below_autograd():
            results = operator.redispatch(after_autograd(keyset), *arguments, **named)
        if then is not None:
            then(operator)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return results
        tensors = [t for t in leaves_of(*arguments) if isinstance(t, Tensor)]
        if results is None or not any(t.requires_grad for t in tensors):
            return results
        single = isinstance(results, Tensor)
        with at_this_level():
            passed = _pass_on(name, (results,) if single else tuple(results), *tensors)
        return passed[0] if single else passed

    return run


def run_native(
    plan: Plan,
    slots: Sequence[int],
    tensors: list[Tensor],
    saved: Tensor | None,
    rows: int = -1,
    staged: Staged | None = None,
) -> tuple:
    """Run a plan at once.

    Arguments as of `run_traced`, with inputs and state in one list; returns the outputs in plan
    order, then the packed saved tensor or None.
    """
    given, slots = [*tensors], tuple(slots)
    if saved is not None or rows >= 0:
        given.append(saved)
    if rows >= 0:  # only a plan whose inputs have no leading dims is told
        given.append(rows)
    if staged is not None:
        return _core.run_staged(plan.native, slots, slots, *staged.of(plan), *given)
    return _core.run(plan.native, slots, slots, *given)


_STAGED: dict[int, Staged] = {}
"""The Python functions of runs that go on, which a torch operator can not be given, by a number
that it can; 0: there are none."""

_numbers = itertools.count(1)


def _run(
    text: str,
    slots: Sequence[int],
    inputs: list[Tensor],
    saved: Tensor | None,
    rows: int,
    staged: int,
    selection: int,
    group: str = "",
    state: Sequence[Tensor] = (),
    places: Sequence[int] = (),
    of_checkpoint: bool = False,
) -> list[Tensor]:
    plan, functions, given = plan_of(text), _STAGED.get(staged), [*inputs, *state]
    if group:
        functions = staged_over(plan, group_of(group))
    is_forward = plan.graph.direction == _core.DIRECTION_FORWARD
    scaled = len(state) and len(state) + 1  # the scales are an input, the histories state
    at = plan.given - len(places) if places else len(given) - scaled
    if is_forward and not of_checkpoint:  # whose scales are those of the first forward
        given[at:] = recompute.of_first((tuple(slots), plan.casts), given[at:], plan.measures)
    if places:
        given[at:] = [given[at + place] for place in places]
    with overrides.of_graph(selection, is_forward) or contextlib.nullcontext():
        *outputs, packed = run_native(plan, slots, given, saved, rows, functions)
    return [*outputs, inputs[0].new_empty(0, dtype=torch.uint8) if packed is None else packed]


def _run_fake(
    text: str, slots: Sequence[int], inputs: list[Tensor], saved: Any, rows: Any, *others: Any
) -> list[Tensor]:
    del slots, saved, others
    made, packed = result_shapes(plan_of(text), [tensor.shape for tensor in inputs], rows)
    made.append((_core.DTYPE_U8, [packed]))
    return [inputs[0].new_empty(shape, dtype=_core.torch_dtype(of)) for of, shape in made]


_UPDATES = [0]


def scaling_updates(made: bool = False) -> int:
    """A number that changes with delayed scaling's scales, which are written in place.

    `made`: they have been, from Python. Replays of CUDA graphs do not count.
    """
    _UPDATES[0] += made
    return _UPDATES[0]


def _scaling_update(scale: Tensor, history: Tensor, fp8_max: float, most_recent: bool) -> None:
    scaling_updates(made=True)
    algo = _core.AMAX_MOST_RECENT if most_recent else _core.AMAX_MAX
    _obeying_update(scale, history, fp8_max, algo=algo)


_obeying_update = _core.obeying("scaling_update")


# Programs that were exported before there were groups name none.
define(f'run({_RUN}="") -> Tensor[]', _run, _run_fake)
_traced_update = define_obeying(
    "scaling_update",
    "Tensor(a!) scale, Tensor(b!) history, float fp8_max, bool most_recent",
    "",
    _scaling_update,
    lambda *_: None,
)


# ---- in checkpoints of a graph -------------------------------------------------------------------


def _run_recorded(*arguments: Any) -> list[Tensor]:
    """`_run` of a forward over histories of its own, which are its last results: one row each.

    The last arguments are how many, and `places`. The repetition of a checkpoint in a graph runs it
    again, and must not write to the histories of the modules, nor read them.
    """
    *arguments, count, places = arguments
    scale = arguments[2][-1]  # the scales are the last inputs
    rows = [scale.new_zeros(1, len(scale)) for _ in range(count)]
    return [*_run(*arguments, rows, places, of_checkpoint=True), *rows]


def _run_recorded_fake(*arguments: Any) -> list[Tensor]:
    *arguments, count, _ = arguments
    scale = arguments[2][-1]
    return [*_run_fake(*arguments), *[scale.new_empty(1, len(scale)) for _ in range(count)]]


def _keep_scale(scale: Tensor, text: str, slots: Sequence[int]) -> Tensor:
    """The scales that a forward in a checkpoint of a graph casts with, for its repetition too."""
    plan = plan_of(text)
    (scale,) = recompute.of_first((tuple(slots), plan.casts), [scale], plan.measures)
    return scale.clone()


def _record_amaxes(history: Tensor, row: Tensor) -> None:
    """Take amaxes over into a history, but those of a forward that another checkpoint repeats."""
    if not recompute.repeats():
        torch.fmax(history[0], row[0], out=history[0])


FORMULAS["run_recorded"] = FORMULAS["run"]
define(
    f"run_recorded({_RUN}, int count, int[] places) -> Tensor[]", _run_recorded, _run_recorded_fake
)
define(
    "keep_scale(Tensor scale, str plan, int[] slots) -> Tensor",
    _keep_scale,
    lambda scale, *_: torch.empty_like(scale),
    then=keep_result,
)
define("record_amaxes(Tensor(a!) history, Tensor row) -> ()", _record_amaxes, lambda *_: None)


@constant_in_graphs
def _scales_to_keep(text: str, inputs: int, places: int) -> int:
    """How many of the inputs of a forward, the last ones, are scales that its repetition needs.

    0 where the operator that is traced is in no checkpoint of the graph, or is of a backward.
    """
    plan = plan_of(text)
    if plan.graph.direction != _core.DIRECTION_FORWARD or not in_traced_checkpoint():
        return 0
    return inputs - (plan.given - places) if places else 1


def _run_to_repeat(given: tuple, scales: int, state: list[Tensor], places: Sequence[int]) -> tuple:
    """Run a forward that a checkpoint in the graph repeats, where no state may move."""
    operators = torch.ops.transformer_engine
    plan, slots, inputs, *others = given
    at = len(inputs) - scales
    inputs = [*inputs[:at], *[operators.keep_scale(one, plan, slots) for one in inputs[at:]]]
    made = operators.run_recorded(plan, slots, inputs, *others, len(state), places)
    for history, row in zip(state, made[-len(state) :], strict=True):
        operators.record_amaxes(history, row)
    return tuple(made[: -len(state)])


@Lock().held
@functools.cache
def _define_with_state(count: int) -> str:
    """Define ``run_with_state_<count>``; return its name."""
    name = f"run_with_state_{count}"
    FORMULAS[name] = FORMULAS["run"]
    schema = (
        f"{name}({_RUN}, Tensor(a!)[] state, int[] places) -> ({', '.join(['Tensor'] * count)})"
    )

    def returned(function: Callable) -> Callable:
        return lambda *arguments: made[0] if len(made := function(*arguments)) == 1 else tuple(made)

    library = torch.library.Library("transformer_engine", "FRAGMENT")
    try:
        define(schema, returned(_run), returned(_run_fake), library=library)
        _FRAGMENTS.append(library)
    except BaseException:  # an interrupt: what is half defined can not be defined again
        take_back(library)
        raise
    return name


@constant_in_graphs
def _with_state(text: str) -> str:
    """Name of the operator that runs a plan which writes state; defined outside of the graph."""
    buffers = plan_of(text).described.buffers
    return _define_with_state(sum(buffer.role == "output" for buffer in buffers) + 1)


def run_traced(
    plan: str,
    slots: tuple[int, ...],
    inputs: list[Tensor],
    state: list[Tensor],
    saved: Tensor | None,
    rows: Any = -1,
    staged: Staged | None = None,
    places: Sequence[int] = (),
    number: int = 0,
    group: str = "",
) -> tuple:
    """Run a plan, given by its text (see `plan_text`), behind a torch operator.

    `slots` are the first ones of each module in the chunks of the plan's direction. `inputs` is
    what the plan reads: inputs, parameters and scales; `state` what it writes besides outputs: amax
    history, main gradient; both in plan order. `saved` is the packed tensor of the forward, for a
    plan that reads it, `rows` the product of the leading dims; -1 where an input has them. `places`
    is for a plan that is given a tensor several times, which `inputs` and `state` have once: which
    of those behind the plan's inputs and parameters each of its last arguments is. Dispatch modes
    see what functions of `staged` run as if there were no operator around it; `number` is that of
    functions which are known already. `group` is the registered name of the process group that
    collectives of a graph run over; "": there are none. Returns the outputs in plan order, then the
    packed saved tensor, empty where there is none.
    """
    if staged is not None:
        number = next(_numbers)
        _STAGED[number] = staged.wrapped(seen_here())
        try:
            return run_traced(plan, slots, inputs, state, saved, rows, None, places, number)
        finally:
            del _STAGED[number]
    of_graph = torch.compiler.is_compiling() and not exporting()
    selection = overrides.number_of_graph() if of_graph else overrides.IN_FORCE
    given: tuple = (plan, slots, inputs, saved, rows, number, selection, group)
    operator = torch.ops.transformer_engine.run
    if state:
        scales = _scales_to_keep(plan, len(inputs), len(places)) if of_graph else 0
        if scales:
            return _run_to_repeat(given, scales, state, places)
        operator, given = (
            getattr(torch.ops.transformer_engine, _with_state(plan)),
            (*given, state, places),
        )
    if torch.compiler.is_compiling():
        made = operator(*given)
    else:
        with recompute.known_to_modules():
            made = operator(*given)
    return (made,) if isinstance(made, Tensor) else tuple(made)


def scaling_update(scale: Tensor, history: Tensor, fp8_max: float, most_recent: bool) -> None:
    """Update a chunk of delayed-scaling slots in place.

    Scale [slots] and history [length, slots] are fp32, `fp8_max` is the largest FP8 value times
    2^-margin. `most_recent`: the newest amax counts, not the largest of the history.
    """
    traced = torch.compiler.is_compiling() or watched()
    update = _traced_update if traced else _scaling_update
    update(scale, history, fp8_max, most_recent)
