# SPDX-License-Identifier: Apache-2.0
"""Attention scores changed by a function of the program: `score_mod`.

Programs write these functions for a graph of cuDNN: ``score_mod(graph, score, tensors)`` calls
``graph.mul``, ``graph.tanh`` and the like. Here `ScoreGraph` has these names, and computes at once
with torch's operators; a function may as well ignore it and compute with torch itself. So one runs
on every device, by the backend that has the scores in memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

_NAME = "DotProductAttention"


def _operation(function: Callable, *names: str) -> Callable:
    """A method of `ScoreGraph` from a function of tensors; `names` are those of its arguments."""

    def run(
        self: "ScoreGraph", *given: Any, compute_data_type: Any = None, name: str = "", **named: Any
    ) -> Tensor:
        del self, compute_data_type, name  # all is computed in fp32
        missing = names[len(given) :]
        if len(given) > len(names) or set(named) != set(missing):
            raise TypeError(f"score_mod: arguments are {names}, given {len(given)} and {[*named]}")
        return function(*given, *(named[each] for each in missing))

    return run


def _index(tensor: Tensor, axis: int) -> Tensor:
    shape = [1] * tensor.dim()
    shape[axis] = -1
    numbers = torch.arange(tensor.shape[axis], device=tensor.device, dtype=torch.float32)
    return numbers.view(shape).expand(tensor.shape)


def _derivative(of: Callable) -> Callable:
    """The gradient of an activation: of a loss and the activation's input."""

    def run(loss: Tensor, tensor: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = tensor.detach().requires_grad_()
            out = of(leaf)
        return torch.autograd.grad(out, leaf, loss)[0]

    return run


class ScoreGraph:
    """What a `score_mod` finds under the names of cuDNN's pointwise operations.

    Each takes tensors (or numbers, where it has two) by position or by cuDNN's argument names, and
    gives a tensor. NotImplementedError for a name that is not here.
    """

    add = _operation(torch.add, "a", "b")
    sub = _operation(torch.sub, "a", "b")
    mul = _operation(torch.mul, "a", "b")
    div = _operation(torch.div, "a", "b")
    add_square = _operation(lambda a, b: a + b * b, "a", "b")
    bias = _operation(torch.add, "input", "bias")
    scale = _operation(torch.mul, "input", "scale")
    max = _operation(lambda a, b: torch.maximum(a, torch.as_tensor(b).to(a)), "input0", "input1")
    min = _operation(lambda a, b: torch.minimum(a, torch.as_tensor(b).to(a)), "input0", "input1")
    mod = _operation(torch.fmod, "input0", "input1")
    pow = _operation(torch.pow, "input0", "input1")
    cmp_eq = _operation(torch.eq, "input", "comparison")
    cmp_neq = _operation(torch.ne, "input", "comparison")
    cmp_gt = _operation(torch.gt, "input", "comparison")
    cmp_ge = _operation(torch.ge, "input", "comparison")
    cmp_lt = _operation(torch.lt, "input", "comparison")
    cmp_le = _operation(torch.le, "input", "comparison")
    logical_and = _operation(torch.logical_and, "a", "b")
    logical_or = _operation(torch.logical_or, "a", "b")
    logical_not = _operation(torch.logical_not, "input")
    binary_select = _operation(
        lambda a, b, m: torch.where(m.bool(), a, b), "input0", "input1", "mask"
    )
    gen_index = _operation(_index, "input", "axis")
    abs = _operation(torch.abs, "input")
    ceil = _operation(torch.ceil, "input")
    floor = _operation(torch.floor, "input")
    neg = _operation(torch.neg, "input")
    exp = _operation(torch.exp, "input")
    log = _operation(torch.log, "input")
    sin = _operation(torch.sin, "input")
    cos = _operation(torch.cos, "input")
    tan = _operation(torch.tan, "input")
    erf = _operation(torch.erf, "input")
    sqrt = _operation(torch.sqrt, "input")
    rsqrt = _operation(torch.rsqrt, "input")
    reciprocal = _operation(torch.reciprocal, "input")
    identity = _operation(lambda x: x, "input")
    relu = _operation(torch.relu, "input")
    tanh = _operation(torch.tanh, "input")
    sigmoid = _operation(torch.sigmoid, "input")
    softplus = _operation(functional.softplus, "input")
    elu = _operation(functional.elu, "input")
    gelu = _operation(functional.gelu, "input")
    swish = _operation(functional.silu, "input")
    relu_backward = _operation(_derivative(torch.relu), "loss", "input")
    tanh_backward = _operation(_derivative(torch.tanh), "loss", "input")
    sigmoid_backward = _operation(_derivative(torch.sigmoid), "loss", "input")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"score_mod: graph.{name}: not among the operations that are here; compute with torch "
            "itself, the scores are a tensor"
        )


_GRAPH = ScoreGraph()


class ScoreMod(NamedTuple):
    """How the scores of a call are changed."""

    function: Callable  # score_mod
    backward: Callable | None  # score_mod_bprop; None: autograd's
    tensors: dict  # of the first
    backward_tensors: dict  # of the second

    def __call__(self, scores: Tensor) -> Tensor:
        """Change scores [batch, heads, queries, keys] fp32; the result likewise."""
        if self.backward is None:
            return self._checked(self.function(_GRAPH, scores, self.tensors), scores, "score_mod")
        return _Modified.apply(self, scores)

    def _checked(self, made: Any, scores: Tensor, label: str) -> Tensor:
        if not isinstance(made, Tensor) or made.shape != scores.shape:
            found = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise ValueError(
                f"{_NAME}: {label} gave {found}, expected a tensor like the scores, "
                f"{tuple(scores.shape)}"
            )
        return made.float()


class _Modified(torch.autograd.Function):
    """Scores with the gradient that a function gives."""

    @staticmethod
    def forward(ctx: Any, mod: ScoreMod, scores: Tensor) -> Tensor:
        ctx.mod = mod
        ctx.save_for_backward(scores)
        return mod._checked(mod.function(_GRAPH, scores, mod.tensors), scores, "score_mod").clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        mod, (scores,) = ctx.mod, ctx.saved_tensors
        mod.function(_GRAPH, scores, mod.tensors)  # it may leave what the other one reads
        made = mod.backward(_GRAPH, grad, mod.backward_tensors)
        return None, mod._checked(made, scores, "score_mod_bprop")


def score_mod_of(
    function: Any, backward: Any, tensors: Any, backward_tensors: Any, bias_type: str
) -> ScoreMod | None:
    """What a call says of it; None: nothing. TypeError or ValueError for what does not go."""
    given = {"score_mod": function, "score_mod_bprop": backward}
    for name, value in given.items():
        if value is not None and not callable(value):
            raise TypeError(f"{_NAME}: {name}: {type(value).__name__}, expected a function")
    for name, value, of in (
        ("score_mod_tensors", tensors, "score_mod"),
        ("score_mod_bprop_tensors", backward_tensors, "score_mod_bprop"),
        ("score_mod_bprop", backward, "score_mod"),
    ):
        if value is not None and given[of] is None:
            raise ValueError(f"{_NAME}: {name} without {of}")
        if value is not None and name.endswith("tensors") and not isinstance(value, dict):
            raise TypeError(f"{_NAME}: {name}: {type(value).__name__}, expected a dict of tensors")
    if function is None:
        return None
    if bias_type == "pre_scale_bias":
        raise ValueError(
            f"{_NAME}: score_mod with core_attention_bias_type='pre_scale_bias': it changes scores "
            "that are scaled already; add the bias in it"
        )
    return ScoreMod(function, backward, tensors or {}, backward_tensors or {})
