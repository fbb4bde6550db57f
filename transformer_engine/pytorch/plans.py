# SPDX-License-Identifier: Apache-2.0
"""From a module's settings and a recipe to the plans that run it."""

import functools
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, NamedTuple

from transformer_engine import _core
from transformer_engine.common import absent
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.plan_text import make_plan, text_of

__all__ = [
    "HIGH_PRECISION",
    "Activation",
    "CallPlans",
    "CallSpec",
    "LinearSpec",
    "Norm",
    "Quantization",
    "call_plans",
    "linear_plans",
    "norm_plans",
    "quantization_of",
]


# Flags of a linear layer's part of a call (see te_linear_desc in the C header).
BIAS = _core.LINEAR_BIAS
DGRAD = _core.LINEAR_DGRAD
WGRAD = _core.LINEAR_WGRAD_NEEDED
SAVE_INPUT = _core.LINEAR_SAVE_INPUT
NO_AMAX = _core.LINEAR_NO_AMAX
ALLOW_TF32 = _core.LINEAR_ALLOW_TF32
ACCUMULATE = _core.LINEAR_ACCUMULATE_WGRAD
OVERWRITE = _core.LINEAR_OVERWRITE_WGRAD
DEFER = _core.LINEAR_DEFER_WGRAD
CACHE_WRITE = _core.LINEAR_CACHE_WRITE
CACHE_READ = _core.LINEAR_CACHE_READ
ZERO_CENTERED = _core.LINEAR_ZERO_CENTERED
GRAD_GAMMA = _core.LINEAR_GRAD_GAMMA
GRAD_BETA = _core.LINEAR_GRAD_BETA
RETURN_NORM = _core.LINEAR_RETURN_NORM
BIAS_FROZEN = _core.LINEAR_BIAS_FROZEN
NO_GAMMA = _core.LINEAR_NO_GAMMA
NO_BETA = _core.LINEAR_NO_BETA


class Quantization(NamedTuple):
    """What of a recipe the plans of a linear layer depend on.

    Attributes
    ----------
    recipe : int
        ``_core.RECIPE_*``.
    forward_fp8, backward_fp8 : int
        ``_core.DTYPE_*`` of inputs and weights, and of output gradients.
    flags : int
        ``_core.LINEAR_*`` of accumulation precision and of power-of-two scales.
    epsilon : tuple of float
        Smallest amax of input, weight and gradient (current scaling).
    """

    recipe: int
    forward_fp8: int
    backward_fp8: int
    flags: int
    epsilon: tuple[float, float, float]


HIGH_PRECISION = Quantization(
    _core.RECIPE_NONE, _core.DTYPE_E4M3, _core.DTYPE_E4M3, 0, (0.0, 0.0, 0.0)
)
"""No recipe: GEMMs in the dtype of the operands."""

_FP8_CODES = {"e4m3": _core.DTYPE_E4M3, "e5m2": _core.DTYPE_E5M2}


def quantization_of(recipe: Recipe) -> Quantization:
    """Quantization that a recipe asks for.

    Parameters
    ----------
    recipe : Recipe
        A `DelayedScaling` or `Float8CurrentScaling`.

    Returns
    -------
    Quantization
        Hashable, and equal for recipes that compute the same.

    Raises
    ------
    NotImplementedError
        The recipe asks for something that linear layers do not have.
    """
    absent.refuse_use(recipe)
    for name in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, name):
            raise NotImplementedError(f"{type(recipe).__name__}: {name}=True")
    if recipe.backward_override is not None:
        raise NotImplementedError(
            f"{type(recipe).__name__}: backward_override={recipe.backward_override!r}"
        )
    forward = _FP8_CODES[recipe.fp8_format.dtype_name("fwd")]
    backward = _FP8_CODES[recipe.fp8_format.dtype_name("bwd")]
    if recipe.delayed():
        flags = _core.LINEAR_FAST_FPROP
        return Quantization(_core.RECIPE_DELAYED, forward, backward, flags, (0.0, 0.0, 0.0))
    if not recipe.float8_current_scaling():
        raise NotImplementedError(f"Linear: recipe {type(recipe).__name__}")
    tensors = (recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad)
    gemms = (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    power_2 = (
        _core.LINEAR_POWER_2_INPUT,
        _core.LINEAR_POWER_2_WEIGHT,
        _core.LINEAR_POWER_2_GRAD,
    )
    fast = (_core.LINEAR_FAST_FPROP, _core.LINEAR_FAST_DGRAD, _core.LINEAR_FAST_WGRAD)
    flags = 0
    for tensor, flag in zip(tensors, power_2, strict=True):
        flags |= flag if tensor.power_2_scale else 0
    for gemm, flag in zip(gemms, fast, strict=True):
        flags |= 0 if gemm.use_split_accumulator else flag
    epsilon = tuple(float(tensor.amax_epsilon) for tensor in tensors)
    return Quantization(_core.RECIPE_CURRENT, forward, backward, flags, epsilon)


class LinearSpec(NamedTuple):
    """One linear layer of a call; everything but the number of tokens.

    Attributes
    ----------
    in_features, out_features : int
        Sizes.
    input, weight, bias, output, grad_weight : int
        ``_core.DTYPE_*``.
    quantization : Quantization
        How the operands are cast.
    flags : int
        ``_core.LINEAR_*`` of this call: bias added, which gradients, cache, main gradient, ...
    bias_grad : bool
        The bias needs a gradient.
    external : int
        Bits of the stages that the caller runs (``_core.LINEAR_STAGES``).
    gather : int
        Ranks from which the quantized input is gathered before the GEMM.
    """

    in_features: int
    out_features: int
    input: int
    weight: int
    bias: int
    output: int
    grad_weight: int
    quantization: Quantization
    flags: int
    bias_grad: bool = False
    external: int = 0
    gather: int = 1


class Norm(NamedTuple):
    """The norm before a linear layer.

    Attributes
    ----------
    kind : int
        ``_core.NORM_*``.
    dtype : int
        ``_core.DTYPE_*`` of gamma and beta.
    eps : float
        Added to the variance.
    """

    kind: int
    dtype: int
    eps: float


class Activation(NamedTuple):
    """The activation between two linear layers.

    Attributes
    ----------
    kind : int
        ``_core.ACTIVATION_*``.
    limit, alpha, linear_offset : float
        Of clamped_swiglu.
    """

    kind: int
    limit: float = 0.0
    alpha: float = 0.0
    linear_offset: float = 0.0


class CallSpec(NamedTuple):
    """One way to call a module made of a norm, one or two linear layers and an activation.

    Attributes
    ----------
    parts : tuple of LinearSpec
        One linear layer, or two with the activation between them.
    norm : Norm or None
        Before the first.
    activation : Activation or None
        With two layers.
    recompute : bool
        The backward repeats norm, first layer and activation instead of reading what they made.
    """

    parts: tuple[LinearSpec, ...]
    norm: Norm | None = None
    activation: Activation | None = None
    recompute: bool = False


def _arguments(plan: int) -> list[tuple[str, bool]]:
    """(name, changed in place) of what a plan is given; the scales are state that it only reads."""
    given = ("input", "parameter", "state")
    return [
        (name, role == "state" and name != "scale")
        for name, role, *_ in _core.plan_describe(plan)["buffers"]
        if role in given
    ]


def _outputs(plan: int) -> list[str]:
    return [name for name, role, *_ in _core.plan_describe(plan)["buffers"] if role == "output"]


def _picker(places: list[int]) -> Callable[[tuple], tuple]:
    """A function that picks items of a tuple as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    if places:
        at = places[0]
        return lambda values: (values[at],)
    return lambda values: ()


def gradient_name(tensor: str) -> str:
    """Output of a backward plan that is the gradient of a forward's tensor."""
    prefix, separator, name = tensor.rpartition("_")
    return f"{prefix}{separator}grad_{name}"


_STATE = ("scale", "history")


class CallPlans:
    """Plans of one kind of call, and how their arguments hang together, worked out once.

    Everything follows from the names of the plans' buffers: a tensor ``x`` of the forward has the
    gradient ``grad_x``, and what the backward reads besides gradients and scaling state was an
    argument or an output of the forward.

    Attributes
    ----------
    spec : CallSpec or None
        What they were made for.
    forward, backward, wgrad : int
        Plan ids; 0 where the call can not need one.
    texts : dict of int to str
        What a graph carries of each of them (see `plan_text`).
    tensors : tuple of str
        Names of the differentiable tensors of a call; one that the call lacks is passed as None.
    quantized : bool
        The GEMMs run in FP8.
    forward_inputs, saved, wgrad_inputs : tuple of str
        Arguments of the forward (without state), of the backward (without gradients and state) and
        of the deferred weight gradient.
    backward_arguments : tuple of (str, bool)
        All arguments of the backward, and whether it changes them in place.
    wgrad_has_rows : bool
        An input of the deferred weight gradient has the leading dims of the call.
    outputs, gradients : tuple of str
        Results of the forward and of the backward.
    returns : int
        How many of `outputs` are the module's results.
    takes : int
        How many of their gradients the backward reads, from the first on.
    cached : tuple of int
        Parts whose quantized weight is kept or taken from the cache.
    writes_cache : bool
        It is kept.
    main_grads : tuple of int
        Parts whose weight gradient goes to ``weight.main_grad``.
    defer : bool
        Weight gradients are put off.
    saves_packed : bool
        The forward makes a packed tensor for the backward.
    weight_place : int
        Where the weight of a single part stands among what is saved, the packed tensor first; -1
        where it is not saved.
    all_given : bool
        No tensor of a call is None.
    pick_saved : callable
        From (results of the forward..., tensors...) to what the backward of a plain call reads, the
        packed tensor first.
    places : tuple of int
        For each of `tensors` its gradient's place among the backward's outputs, or -1.
    all_gradients : bool
        The backward's outputs are the gradients of all tensors, in order.
    plain : bool
        Nothing but plain gradients: no cache, main gradient or deferred work.
    """

    def __init__(
        self,
        tensors: tuple[str, ...],
        forward: int,
        backward: int = 0,
        wgrad: int = 0,
        spec: CallSpec | None = None,
    ) -> None:
        self.spec = spec
        self.forward, self.backward, self.wgrad = forward, backward, wgrad
        self.texts = {plan: text_of(plan) for plan in (forward, backward, wgrad) if plan}
        self.tensors = tensors
        parts = () if spec is None else spec.parts
        self.quantized = bool(parts) and parts[0].quantization.recipe != _core.RECIPE_NONE
        self.forward_inputs = tuple(n for n, _ in _arguments(forward) if n not in _STATE)
        self.outputs = tuple(_outputs(forward))
        self.returns = 1 + ("norm_output" in self.outputs)
        flags = [part.flags for part in parts]
        self.cached = tuple(i for i, f in enumerate(flags) if f & _CACHE)
        self.writes_cache = any(f & CACHE_WRITE for f in flags)
        self.main_grads = tuple(
            i for i, f in enumerate(flags) if f & WGRAD and f & (ACCUMULATE | OVERWRITE)
        )
        self.defer = wgrad != 0
        self.all_given = all(name in self.forward_inputs for name in tensors)
        self.plain = not (self.cached or self.defer or self.main_grads)
        self._examine_backward()

    def _examine_backward(self) -> None:
        self.saves_packed = False
        self.takes = self.returns
        self.weight_place = -1
        self.saved = self.wgrad_inputs = self.gradients = self.backward_arguments = ()
        self.wgrad_has_rows = False
        self.reads_state = False
        self.places = (-1,) * len(self.tensors)
        self.all_gradients = False
        self.pick_saved = _picker([])
        if not self.backward:
            return
        roles = [role for _, role, *_ in _core.plan_describe(self.forward)["buffers"]]
        self.saves_packed = "saved" in roles
        self.backward_arguments = tuple(_arguments(self.backward))
        arguments = [name for name, _ in self.backward_arguments]
        self.reads_state = "scale" in arguments
        self.takes = 1 + ("grad_norm_output" in arguments)
        passed = {"grad_output", "grad_norm_output", *_STATE}
        saved = [n for n in arguments if n not in passed and not n.endswith("main_grad")]
        self.gradients = tuple(_outputs(self.backward))
        if self.wgrad:
            self.wgrad_inputs = tuple(n for n, mutated in _arguments(self.wgrad) if not mutated)
            known = {*passed, *saved, *self.gradients}
            saved += [n for n in self.wgrad_inputs if n not in known]
            buffers = _core.plan_describe(self.wgrad)["buffers"]
            self.wgrad_has_rows = any(role == "input" and lead for _, role, _, lead, *_ in buffers)
        self.saved = tuple(saved)
        if "weight" in saved:
            self.weight_place = saved.index("weight") + self.saves_packed
        at = {name: i for i, name in enumerate(self.gradients)}
        self.places = tuple(at.get(gradient_name(name), -1) for name in self.tensors)
        self.all_gradients = self.places == tuple(range(len(self.gradients)))
        if self.plain:
            results = len(self.outputs) + 1
            from_forward = {name: i for i, name in enumerate(self.outputs)}
            from_forward.update((name, results + i) for i, name in enumerate(self.tensors))
            places = [results - 1] if self.saves_packed else []
            self.pick_saved = _picker(places + [from_forward[name] for name in saved])


_CACHE = CACHE_WRITE | CACHE_READ
_ONLY_BACKWARD = ACCUMULATE | OVERWRITE | DEFER
_GRADIENTS = DGRAD | WGRAD | GRAD_GAMMA | GRAD_BETA
_FORWARD_EXTERNAL = (1 << _core.LINEAR_STAGES.index("produce_grad_output")) - 1
"""Bits of the stages of the forward plan; the others are the backward's."""


def _fields(direction: int, spec: LinearSpec, norm: Norm | None) -> dict[str, Any]:
    """Keywords of ``_core.linear_plan`` for one direction of a linear layer's call."""
    q = spec.quantization
    flags, external, gather = spec.flags, spec.external, 1
    if direction == _core.LINEAR_FORWARD:
        flags &= ~_ONLY_BACKWARD
        external &= _FORWARD_EXTERNAL
        gather = spec.gather
    else:
        # The backward of a call that wrote the cache reads it.
        reads_cache = CACHE_READ if flags & _CACHE else 0
        flags = flags & ~(_CACHE | NO_AMAX) | reads_cache
        external &= ~_FORWARD_EXTERNAL
        if not spec.bias_grad:
            flags |= BIAS_FROZEN
        if direction == _core.LINEAR_WGRAD:
            flags &= ~(DEFER | BIAS)
    fields = {
        "direction": direction,
        "in_features": spec.in_features,
        "out_features": spec.out_features,
        "input_dtype": spec.input,
        "weight_dtype": spec.weight,
        "bias_dtype": spec.bias,
        "output_dtype": spec.output,
        "grad_weight_dtype": spec.grad_weight,
        "recipe": q.recipe,
        "forward_fp8": q.forward_fp8,
        "backward_fp8": q.backward_fp8,
        "flags": q.flags | flags,
        "gather": gather,
        "external": external,
        "eps_input": q.epsilon[0],
        "eps_weight": q.epsilon[1],
        "eps_grad": q.epsilon[2],
    }
    if norm is not None:
        fields.update(norm=1 + norm.kind, norm_dtype=norm.dtype, norm_eps=norm.eps)
    return fields


_ACTIVATION_FIELDS = ("activation", "limit", "alpha", "linear_offset")


def _plan(direction: int, spec: CallSpec) -> int:
    first = _fields(direction, spec.parts[0], spec.norm)
    if spec.activation is None:
        return make_plan("linear", **first)
    flags = _core.MLP_RECOMPUTE if spec.recompute else 0
    second = _fields(direction, spec.parts[1], None)
    activation = dict(zip(_ACTIVATION_FIELDS, spec.activation, strict=True))
    return make_plan("mlp", direction=direction, **activation, flags=flags, fc1=first, fc2=second)


PREFIXES = {1: ("",), 2: ("fc1_", "fc2_")}
"""Of the names of buffers, by number of parts."""


@functools.cache
def call_plans(spec: CallSpec) -> CallPlans:
    """Plans of a call, made once per process and spec.

    Parameters
    ----------
    spec : CallSpec
        The call.

    Returns
    -------
    CallPlans
        Their ids and arguments.
    """
    tensors = ["input"]
    if spec.norm is not None:
        tensors += ["gamma", "beta"]
    for prefix in PREFIXES[len(spec.parts)]:
        tensors += [f"{prefix}weight", f"{prefix}bias"]
    backward = wgrad = 0
    forward = _plan(_core.LINEAR_FORWARD, spec)
    if any(part.flags & _GRADIENTS or part.bias_grad for part in spec.parts):
        backward = _plan(_core.LINEAR_BACKWARD, spec)
    if any(part.flags & DEFER and part.flags & WGRAD for part in spec.parts):
        wgrad = _plan(_core.LINEAR_WGRAD, spec)
    return CallPlans(tuple(tensors), forward, backward, wgrad, spec)


def linear_plans(spec: LinearSpec) -> CallPlans:
    """Plans of a linear layer by itself; see `call_plans`."""
    return call_plans(CallSpec((spec,)))


@functools.cache
def norm_plans(features: int, norm: Norm, dtypes: tuple[int, int], flags: int) -> CallPlans:
    """Plans of a norm by itself, made once per process and kind.

    Parameters
    ----------
    features : int
        Size of the normalized dim.
    norm : Norm
        Its kind.
    dtypes : tuple of int
        ``_core.DTYPE_*`` of input and output.
    flags : int
        `DGRAD`, `GRAD_GAMMA`, `GRAD_BETA`, `ZERO_CENTERED`, `NO_GAMMA`, `NO_BETA`.

    Returns
    -------
    CallPlans
        Over (input, gamma, beta).
    """
    inp, out = dtypes
    fields = {
        "features": features,
        "kind": norm.kind,
        "input_dtype": inp,
        "weight_dtype": norm.dtype,
        "output_dtype": out,
        "flags": flags,
        "eps": norm.eps,
    }
    forward = make_plan("norm", direction=_core.LINEAR_FORWARD, **fields)
    backward = 0
    if flags & _GRADIENTS:
        backward = make_plan("norm", direction=_core.LINEAR_BACKWARD, **fields)
    return CallPlans(("input", "gamma", "beta"), forward, backward)


def flags_of(bits: Iterable[tuple[int, Any]]) -> int:
    """Join the flags whose condition holds."""
    joined = 0
    for flag, condition in bits:
        if condition:
            joined |= flag
    return joined
