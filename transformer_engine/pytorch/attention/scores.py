# SPDX-License-Identifier: Apache-2.0
"""Functions of scores of attention, and of logits: softmax, softcap, functions of a program."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from transformer_engine.pytorch.execution.autograd import run_call
from transformer_engine.pytorch.execution.custom_ops import OperatorCall, contiguous_like, operator
from transformer_engine.pytorch.execution.random import draw_pair
from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor

# ---- softcap -------------------------------------------------------------------------------------


_softcap = operator(
    "softcap",
    "Tensor input, Tensor? grad_output, float cap",
    "wide",
    lambda inp, *_: contiguous_like(inp),
)


class _Softcap(OperatorCall):
    """Settings: the cap."""

    label = "softcap"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        return _softcap(self.traced, *tensors, None, *self.settings), tensors

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        return None, _softcap(self.traced, *saved, *grads, *self.settings)


def softcap(inp: Tensor, cap: float) -> Tensor:
    """Bound logits smoothly: cap tanh(inp / cap), computed in fp32.

    `inp` is [..., features] in fp32, fp16 or bf16, and differentiable; the result has its shape and
    dtype. ValueError where the cap is not positive, or the input has no dims; TypeError for what is
    no tensor.
    """
    expect_tensor("softcap: inp", inp)
    return run_call(_Softcap(inp, cap), inp)


# ---- softmax -------------------------------------------------------------------------------------


THREADS_PER_WARP, THREADS_PER_BLOCK = 32, 128
"""As programs count the rows that a block of threads takes; kernels here choose their own."""


def _row_of_each(scores: Tensor) -> Tensor:
    """A number for each row of scores, [batch * heads * queries] fp32."""
    return scores.new_empty(scores.shape[:3].numel(), dtype=torch.float32)


_forward = operator(
    "softmax",
    "Tensor input, Tensor? mask, Tensor? bias, Tensor? sink, Tensor? rng, float scale, "
    "float dropout, int window_left, int window_right, SymInt diagonal, bool wants_sink",
    "output probabilities log_sum",
    lambda scores, mask, bias, sink, rng, *numbers: (
        contiguous_like(scores),
        None if rng is None else contiguous_like(scores),
        _row_of_each(scores) if numbers[-1] else None,
    ),
    unit_stride="input",
)
_backward = operator(
    "softmax_backward",
    "Tensor grad_output, Tensor probabilities, Tensor? rng, Tensor? sink, Tensor? log_sum, "
    "float scale, float dropout",
    "grad_input grad_sinks",
    lambda grad, probabilities, rng, sink, *_: (
        contiguous_like(probabilities),
        None if sink is None else _row_of_each(probabilities),
    ),
    unit_stride="grad_output",
)


class _Bias(NamedTuple):
    """A bias that has a gradient."""

    shape: torch.Size
    dtype: torch.dtype
    wide: bool
    """The gradients of scores are made in fp32: they are added up, or the bias has more digits."""


class _ScaledSoftmax(OperatorCall):
    """Settings: the bias, None where it has no gradient, then the numbers of the operator.

    The last of these says whether the sink has a gradient.
    """

    label = "scaled_softmax"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        output, probabilities, log_sum = _forward(self.traced, *tensors, *self.settings[1:])
        sink, rng = tensors[3:]
        of_sink = (sink, log_sum) if self.settings[-1] else (None, None)
        return output, (output if rng is None else probabilities, rng, *of_sink)

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        of_bias, scale, dropout, *_ = self.settings
        (grad_output,), (probabilities, *rest) = grads, saved
        dtype = probabilities.dtype
        if of_bias is not None and of_bias.wide:
            grad_output, probabilities = grad_output.float(), probabilities.float()
        factor = scale if of_bias is None else 1.0  # the bias is added after scaling
        grad, sinks = _backward(self.traced, grad_output, probabilities, *rest, factor, dropout)
        grad_bias = None
        if of_bias is not None:
            grad_bias = grad.sum_to_size(of_bias.shape).to(of_bias.dtype)
            grad = (grad if scale == 1.0 else grad * scale).to(dtype)
        grad_sink = sinks.view(grad.shape[:3]).sum((0, 2)) if self.settings[-1] else None
        return None, grad, None, grad_bias, grad_sink, None


def scaled_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    sink: Tensor | None = None,
    scale: float = 1.0,
    dropout: float = 0.0,
    window: tuple[int, int] = (-1, -1),
    diagonal: int = 0,
) -> Tensor:
    """Softmax over the keys of scale * scores + bias, with dropout, in fp32.

    Query i attends the keys i + diagonal - window[0] .. i + diagonal + window[1] that `mask`
    leaves; a negative number of the window is no limit on that side, and (-1, 0) is causal. The
    diagonal, the key of query 0, is 0, or keys - queries for the bottom right corner. A query that
    attends no key has probabilities of 0.

    `scores` are [batch, heads, queries, keys] fp32, fp16 or bf16, with a unit last stride; each dim
    of `mask` (bool, True: masked out) and `bias` (a float dtype, differentiable) is 1 or theirs.
    `sink` [heads] fp32, differentiable, are scores without a key, which join the sums that the
    others are divided by. The result has the shape and dtype of the scores.
    """
    of_bias = None
    if bias is not None and bias.requires_grad:
        finer = bias.dtype.itemsize > scores.dtype.itemsize
        of_bias = _Bias(bias.shape, bias.dtype, finer or bias.shape != scores.shape)
    wants_sink = sink is not None and sink.requires_grad
    call = _ScaledSoftmax(scores, of_bias, scale, dropout, *window, diagonal, wants_sink)
    return run_call(call, scores, mask, bias, sink, draw_pair(scores) if dropout > 0.0 else None)


# ---- functions of a program ----------------------------------------------------------------------


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
    """Functions for a `score_mod`, under the names of cuDNN's pointwise operations.

    Each takes tensors (or numbers, where it has two) by position or by cuDNN's argument names, and
    gives a tensor. NotImplementedError for a name that is not here.
    """

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"score_mod: graph.{name}: not among the operations that are here; compute with torch "
            "itself, the scores are a tensor"
        )


_ELEMENTWISE = (
    "abs ceil floor neg exp log sin cos tan erf sqrt rsqrt reciprocal relu tanh sigmoid logical_not"
).split()
_OPERATIONS: dict[str, dict[str, Callable]] = {
    "a b": {
        "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
        "add_square": lambda a, b: a + b * b,
        "logical_and": torch.logical_and, "logical_or": torch.logical_or,
    },
    "input0 input1": {
        "max": lambda a, b: torch.maximum(a, torch.as_tensor(b).to(a)),
        "min": lambda a, b: torch.minimum(a, torch.as_tensor(b).to(a)),
        "mod": torch.fmod, "pow": torch.pow,
    },
    "input comparison": {
        "cmp_eq": torch.eq, "cmp_neq": torch.ne, "cmp_gt": torch.gt,
        "cmp_ge": torch.ge, "cmp_lt": torch.lt, "cmp_le": torch.le,
    },
    "input": {
        **{name: getattr(torch, name) for name in _ELEMENTWISE},
        "identity": lambda x: x, "softplus": functional.softplus, "elu": functional.elu,
        "gelu": functional.gelu, "swish": functional.silu,
    },
    "loss input": {
        f"{name}_backward": _derivative(getattr(torch, name))
        for name in ("relu", "tanh", "sigmoid")
    },
    "input bias": {"bias": torch.add},
    "input scale": {"scale": torch.mul},
    "input axis": {"gen_index": _index},
    "input0 input1 mask": {"binary_select": lambda a, b, m: torch.where(m.bool(), a, b)},
}  # fmt: skip
"""By the names of their arguments."""

for _arguments, _functions in _OPERATIONS.items():
    for _name, _function in _functions.items():
        setattr(ScoreGraph, _name, _operation(_function, *_arguments.split()))


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


def checked_score_mod(
    function: Any, backward: Any, tensors: Any, backward_tensors: Any, bias_type: str
) -> ScoreMod | None:
    """Check the argument of a call; None: there is none. TypeError or ValueError if wrong."""
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
