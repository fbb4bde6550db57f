# SPDX-License-Identifier: Apache-2.0
"""Functions of `_core` that make tensors: torch operators, and the calls that differentiate them.

They run what the plug-in system selects, as plans do (`_core.obeying`).

An operator is its arguments, the names of its results and a function that allocates these. From
that and the fields of the function (`_core.op_fields`) come what eager code calls, the torch
operator and its fake kernel. A differentiable function is an `OperatorCall` of two such.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.execution.autograd import run_call
from transformer_engine.pytorch.torchside.device import reads_vectors
from transformer_engine.pytorch.torchside.modes import dispatch_modes, in_transform


def contiguous_like(tensor: Tensor) -> Tensor:
    """Allocate a dense tensor of the shape and dtype of another one."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether each line of the last dim has memory of its own that begins at 16 bytes."""
    size = tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and all(
        n > 0 and n * size % 16 == 0 for n in tensor.stride()[:-1]
    )


def _copied(tensor: Tensor) -> Tensor:
    return contiguous_like(tensor).copy_(tensor)


def operator(
    name: str,
    arguments: str,
    results: str,
    empty: Callable,
    *,
    unit_stride: str = "",
    by_sequence: str = "",
) -> Callable:
    """Make a function of `_core` a torch operator, and what runs either.

    It returns ``run(traced, *arguments)``: the results, by the torch operator where the call is
    traced or a dispatch mode watches. A backward asks again: modes come and go between the two.

    Parameters
    ----------
    name : str
        Of the function, and of ``torch.ops.transformer_engine.<name>``.
    arguments : str
        Of the torch operator, as its schema has them, with the names of the function's fields;
        those that are no fields are for `empty`.
    results : str
        Fields that it writes, in their order.
    empty : callable
        Allocates the results for these arguments: a tensor, or a tuple with None for what there is
        none of. Behind the torch operator that is an empty tensor.
    unit_stride : str
        Fields that are copied where they have another last stride than 1.
    by_sequence : str
        Fields [batch, sequence, ...] that come as [sequence, batch, ...] where the argument
        ``sequence_first`` is True.
    """
    names = [argument.split()[-1] for argument in arguments.split(",")]
    given = (names, results.split(), empty, unit_stride.split(), by_sequence.split())
    return traceable(name, arguments, len(results.split()), _native(name, *given), empty)


def traceable(
    name: str, arguments: str, results: int, native: Callable, empty: Callable
) -> Callable:
    """`operator` of a function in Python; `results` is how many tensors it returns."""
    made = ", ".join(["Tensor"] * results)
    packet = plan_ops.define_obeying(
        name, arguments, made, _without_none(native), _without_none(empty)
    )

    def run(traced: bool, *arguments: Any) -> Any:
        if traced or (dispatch_modes() and plan_ops.watched()):
            return packet(*arguments)
        return native(*arguments)

    return run


def _native(
    name: str,
    arguments: list[str],
    results: list[str],
    empty: Callable,
    unit_stride: list[str],
    by_sequence: list[str],
) -> Callable:
    """Make the function for eager code from text: a call costs what one written by hand does."""
    fields = _core.op_fields(name)
    lines = [f"def {name}({', '.join(arguments)}):"]
    for field in unit_stride:
        lines.append(f"if {field}.stride(-1) != 1: {field} = {field}.contiguous()")
    lines.append(f"made = empty({', '.join(arguments)})")
    lines.append(f"{', '.join(results)} = made")
    if by_sequence:
        views = ", ".join(f"{field}.transpose(0, 1)" for field in by_sequence)
        lines.append(f"if sequence_first: {', '.join(by_sequence)} = {views}")
    first = [field for field, *_ in itertools.takewhile(lambda field: field[3], fields)]
    known = {field for field, *_ in fields} - set(first)
    keywords = [f"{each}={each}" for each in (*results, *arguments) if each in known]
    lines += [f"core({', '.join(first + keywords)})", "return made"]
    scope = {"core": _core.obeying(name), "empty": empty}
    exec("\n    ".join(lines), scope)
    return scope[name]


def _without_none(function: Callable) -> Callable:
    """A function whose results are tensors, as torch operators have them: empty ones for None."""

    def run(*arguments: Any) -> Any:
        made = function(*arguments)
        if isinstance(made, Tensor):
            return made
        return tuple(arguments[0].new_empty(0) if tensor is None else tensor for tensor in made)

    return run


class OperatorCall:
    """One call of a differentiable function of operators; see `function.Call` for its methods."""

    __slots__ = ("settings", "traced")
    label = ""

    def __init__(self, like: Tensor, *settings: Any) -> None:
        """`settings`: what the forward and the backward need besides tensors."""
        self.settings, self.traced = settings, plan_ops.behind_operators(like)


# ---- what other libraries read -------------------------------------------------------------------

_copy = traceable("aligned", "Tensor tensor", 1, _copied, contiguous_like)
"""A copy, which no compiler takes for the tensor itself."""


class _Aligned(OperatorCall):
    """A copy, whose gradient is the tensor's."""

    label = "aligned"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        return _copy(self.traced, *tensors), ()

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        return None, *grads


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where a kernel of another library could not read it in vectors.

    Such kernels take views whose last stride is 1, and read 16 bytes at once; not all check that
    each line begins at a multiple of these. The copy has its dims in the order of the tensor's
    memory: some want the gradient of an output laid out as this is. Where a graph is traced nobody
    knows where tensors will begin, so it copies. Differentiable.
    """
    if not reads_vectors(tensor):
        return tensor
    if plan_ops.behind_operators(tensor) or in_transform():
        return run_call(_Aligned(tensor), tensor)
    if tensor.stride(-1) == 1 and is_aligned(tensor):
        return tensor
    last = tensor.dim() - 1
    order = [*sorted(range(last), key=tensor.stride, reverse=True), last]
    copy = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute([order.index(dim) for dim in range(last + 1)])


class _AlignedGradient(torch.autograd.Function):
    """The tensor itself, whose gradient arrives as `aligned` makes it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _copy(True, grad) if plan_ops.behind_operators(grad) else aligned(grad)


def with_aligned_gradient(tensor: Tensor) -> Tensor:
    """The output of another library's kernel, whose backward may read its gradient in vectors."""
    if not reads_vectors(tensor) or not tensor.requires_grad:
        return tensor
    return _AlignedGradient.apply(tensor)
