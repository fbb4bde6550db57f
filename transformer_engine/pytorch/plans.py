# SPDX-License-Identifier: Apache-2.0
"""From a module's settings and a recipe to the plans that run it."""

import functools
from typing import NamedTuple

from transformer_engine import _core
from transformer_engine.common.recipe import Recipe

__all__ = [
    "HIGH_PRECISION",
    "LinearPlans",
    "LinearSpec",
    "Quantization",
    "linear_plans",
    "quantization_of",
]


# Flags of a linear layer's call (see te_linear_desc in the C header).
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
    """One way to call a linear layer; everything but the number of tokens.

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


class LinearPlans:
    """Plans of one `LinearSpec`, and what a call must know of them, worked out once.

    Attributes
    ----------
    spec : LinearSpec
        What they were made for.
    forward, backward, wgrad : int
        Plan ids; 0 where the call can not need one.
    quantized : bool
        The GEMMs run in FP8.
    dgrad, wgrad_needed, bias_grad : bool
        Which gradients the backward makes.
    defer : bool
        The weight gradient is put off.
    into_main_grad : bool
        It goes to ``weight.main_grad``.
    writes_cache, reads_cache, cached : bool
        Whether the quantized weight is kept, taken from the cache, either.
    saves_packed, saves_input, saves_weight : bool
        What the forward leaves for the backward besides the cache.
    all_gradients : bool
        Input, weight and bias have gradients.
    plain : bool
        Nothing but plain gradients: no cache, main gradient or deferred work.
    """

    def __init__(self, spec: LinearSpec, forward: int, backward: int, wgrad: int) -> None:
        flags = spec.flags
        self.spec = spec
        self.forward = forward
        self.backward = backward
        self.wgrad = wgrad
        self.quantized = spec.quantization.recipe != _core.RECIPE_NONE
        self.dgrad = bool(flags & DGRAD)
        self.wgrad_needed = bool(flags & WGRAD)
        self.bias_grad = spec.bias_grad
        self.defer = self.wgrad_needed and bool(flags & DEFER)
        self.into_main_grad = self.wgrad_needed and bool(flags & (ACCUMULATE | OVERWRITE))
        self.writes_cache = bool(flags & CACHE_WRITE)
        self.reads_cache = bool(flags & CACHE_READ)
        self.cached = self.writes_cache or self.reads_cache
        self.saves_packed = self.quantized and (
            self.wgrad_needed or (self.dgrad and not self.cached)
        )
        self.saves_weight = self.dgrad and not self.cached
        self.saves_input = self.wgrad_needed and (not self.quantized or bool(flags & SAVE_INPUT))
        self.all_gradients = self.dgrad and self.wgrad_needed and self.bias_grad
        self.plain = not (self.cached or self.defer or self.into_main_grad)


_CACHE = CACHE_WRITE | CACHE_READ
_ONLY_BACKWARD = ACCUMULATE | OVERWRITE | DEFER
_GRADIENTS = DGRAD | WGRAD
_FORWARD_EXTERNAL = (1 << _core.LINEAR_STAGES.index("amax_grad_output")) - 1
"""Bits of the stages of the forward plan; the others are the backward's."""


def _plan(direction: int, spec: LinearSpec, flags: int, external: int, gather: int = 1) -> int:
    q = spec.quantization
    return _core.linear_plan(
        direction,
        spec.in_features,
        spec.out_features,
        spec.input,
        spec.weight,
        spec.bias,
        spec.output,
        spec.grad_weight,
        q.recipe,
        q.forward_fp8,
        q.backward_fp8,
        q.flags | flags,
        gather=gather,
        external=external,
        eps_input=q.epsilon[0],
        eps_weight=q.epsilon[1],
        eps_grad=q.epsilon[2],
    )


@functools.cache
def linear_plans(spec: LinearSpec) -> LinearPlans:
    """Plans of a linear layer's call, made once per process and spec.

    Parameters
    ----------
    spec : LinearSpec
        The call.

    Returns
    -------
    LinearPlans
        Their ids.
    """
    flags = spec.flags
    # The backward of a call that wrote the cache reads it.
    reads_cache = CACHE_READ if flags & _CACHE else 0
    backward_flags = flags & ~(_CACHE | BIAS | NO_AMAX) | reads_cache
    if spec.bias_grad:
        backward_flags |= BIAS
    backward = wgrad = 0
    forward = _plan(
        _core.LINEAR_FORWARD,
        spec,
        flags & ~_ONLY_BACKWARD,
        spec.external & _FORWARD_EXTERNAL,
        spec.gather,
    )
    if flags & _GRADIENTS or spec.bias_grad:
        backward = _plan(
            _core.LINEAR_BACKWARD, spec, backward_flags, spec.external & ~_FORWARD_EXTERNAL
        )
    if flags & DEFER and flags & WGRAD:
        wgrad_flags = backward_flags & ~(DEFER | BIAS)
        wgrad = _plan(_core.LINEAR_WGRAD, spec, wgrad_flags, spec.external & ~_FORWARD_EXTERNAL)
    return LinearPlans(spec, forward, backward, wgrad)
