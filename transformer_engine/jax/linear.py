# SPDX-License-Identifier: Apache-2.0
"""A linear layer with its gradients, as parts that functions of layers are made of.

Each product gets operands whose last dims it sums over: the input as it is and the weight turned;
the output's gradient and the weight as they are; both input and gradient turned. With one scale for
a tensor its data is turned; else it is cast in both directions from high precision.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from transformer_engine.jax import operator_calls
from transformer_engine.jax.definitions import casts, chosen
from transformer_engine.jax.definitions.scaling_modes import Cast, ScalingMode
from transformer_engine.jax.operator_calls import Into, Made
from transformer_engine.jax.quantize.quantizer import Quantizer, QuantizerSet
from transformer_engine.jax.quantize.state import Drawn, Use, joined, recorded, tapped
from transformer_engine.jax.quantize.tensor import turned

GEMM_NAME = "te_gemm"
"""Name of the products' results for the policies of `jax.checkpoint`."""


class OperandPlan(NamedTuple):
    """How one operand of a layer is cast; static."""

    cast: Cast | None = None  # None: not
    slot: int = 0  # number of the call among those of a reading of its state
    name: str | None = None  # for the policies of `jax.checkpoint`

    @property
    def mode(self) -> ScalingMode:
        """Which elements share a scale."""
        return ScalingMode.NO_SCALING if self.cast is None else self.cast.mode


class LinearPlan(NamedTuple):
    """How a linear layer computes; static."""

    x: OperandPlan = OperandPlan()
    kernel: OperandPlan = OperandPlan()
    grad: OperandPlan = OperandPlan()
    backward: str | None = None  # backward_override of the recipe
    fast: int = 0  # ``_core.LINEAR_FAST_*``

    @property
    def is_quantized(self) -> bool:
        """Whether the input is cast."""
        return self.x.cast is not None


Uses = tuple[Use | None, Use | None, Use | Drawn | None]
"""State of input, weight and gradient, of those that have one."""


def plan_of(quantizer: Quantizer | None) -> tuple[OperandPlan, Use | None]:
    """Split a quantizer into what is static and what is not."""
    if quantizer is None:
        return OperandPlan(), None
    use, slot = quantizer.use()
    return OperandPlan(quantizer.cast, slot, quantizer.checkpoint_name), use


def plan_of_set(quantizers: QuantizerSet) -> tuple[LinearPlan, Uses]:
    """Split a quantizer set into what is static and what is not."""
    made = [plan_of(q) for q in (quantizers.x, quantizers.kernel, quantizers.dgrad)]
    plans, uses = zip(*made, strict=True)
    return LinearPlan(*plans, quantizers.backward_override, quantizers.fast), uses


class _Form(NamedTuple):
    """An operand of a product: lines, in low precision or not."""

    data: Array | casts.Quantized
    depth: int  # dims at its end that are summed over

    def turned(self) -> "_Form":
        """The other form, of one that has one scale or none."""
        data = self.data
        first = (data if isinstance(data, Array) else data.data).ndim - self.depth
        if isinstance(data, Array):
            return _Form(turned(data, first), first)
        return _Form(casts.Quantized(turned(data.data, first), data.scale_inv), first)


def check_arrays(op: str, x: Array, **wanted: tuple[Array | None, tuple[int, ...]]) -> None:
    """Check what a layer is given: each array by its name, with the shape that it has to have.

    ValueError for another shape, TypeError for what has no float dtype.
    """
    for name, (array, shape) in {"x": (x, x.shape), **wanted}.items():
        if array is None:
            continue
        if array.shape != tuple(shape):
            raise ValueError(f"{op}: {name} is {array.shape}, expected {tuple(shape)}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{op}: {name} is {array.dtype}, expected a float dtype")


def cast_lines(x: Array, plan: OperandPlan, use: Use | None, depth: int) -> Any:
    """Cast a tensor as an operand; itself where it is not cast."""
    if plan.cast is None:
        return x
    made = chosen("quantize")(x, plan.cast, None if use is None else use.scale, depth)
    if plan.name is None:
        return made
    return _named(made, plan.name)


def _named(made: casts.Quantized, name: str) -> casts.Quantized:
    """A cast with a name for the policies of `jax.checkpoint`."""
    return casts.Quantized(*(checkpoint_name(leaf, name) for leaf in made))


def amax_of(x: Array, use: Use | None) -> Array | None:
    """The amax [1] that the state of an operand is to record."""
    return None if use is None else recorded(x, use.scale)


def gradient_of_use(amax: Array | None, plan: OperandPlan) -> Use | None:
    """The gradient of the state of an operand."""
    return None if amax is None else tapped(amax, plan.slot)


def _both_forms(x: Array, plan: OperandPlan, use: Use | None, depth: int) -> tuple[Any, Any]:
    """An operand as it is and turned."""
    made = cast_lines(x, plan, use, depth)
    if plan.mode.is_block_scaling():
        first = x.ndim - depth
        return made, cast_lines(turned(x, first), plan, use, first)
    return made, _Form(made, depth).turned().data


class Saved(NamedTuple):
    """What the backward of a linear layer needs of its forward."""

    x_turned: Any  # [in.., batch..]
    kernel: Any  # [in.., out..]
    amaxes: tuple[Array | None, Array | None]  # of input and weight
    dtypes: tuple[Array, Array]  # empty arrays, of the dtypes of input and weight


def linear_forward(
    x: Array, kernel: Array, plan: LinearPlan, uses: Uses, depth: int = 1
) -> tuple[Array, Saved]:
    """X [batch.., in..] times kernel [in.., out..], in fp32; `depth` is how many dims of in."""
    across = kernel.ndim - depth
    if plan.backward is None:
        x_row, x_turned = _both_forms(x, plan.x, uses[0], depth)
        kernel_row, kernel_turned = _both_forms(kernel, plan.kernel, uses[1], across)
    else:
        x_row = cast_lines(x, plan.x, uses[0], depth)
        kernel_turned = cast_lines(turned(kernel, depth), plan.kernel, uses[1], depth)
        kept = x, kernel
        if plan.backward == "dequantized":
            back = chosen("dequantize")
            kept = (
                back(x_row, plan.x.mode, x.dtype, depth),
                turned(back(kernel_turned, plan.kernel.mode, kernel.dtype, depth), across),
            )
        x_turned, kernel_row = turned(kept[0], x.ndim - depth), kept[1]
    y = chosen("gemm")(x_row, kernel_turned, (plan.x.mode, plan.kernel.mode), depth)
    amaxes = amax_of(x, uses[0]), amax_of(kernel, uses[1])
    dtypes = jnp.zeros(0, x.dtype), jnp.zeros(0, kernel.dtype)
    return checkpoint_name(y, GEMM_NAME), Saved(x_turned, kernel_row, amaxes, dtypes)


class LinearGradients(NamedTuple):
    """Gradients of a linear layer."""

    x: Array  # fp32
    kernel: Array  # in the dtype of the kernel
    uses: Uses


def linear_backward(
    saved: Saved, grad: Array, plan: LinearPlan, uses: Uses, depth: int = 1
) -> LinearGradients:
    """Gradients of `linear_forward`, by that of its result, in the input's dtype."""
    data = saved.kernel if isinstance(saved.kernel, Array) else saved.kernel.data
    across = data.ndim - depth
    batch = grad.ndim - across
    wide = OperandPlan()
    used = plan if plan.backward is None else LinearPlan(wide, wide, wide)
    row, column = _both_forms(grad, used.grad, uses[2], across)
    gemm = chosen("gemm")
    of_x = gemm(row, saved.kernel, (used.grad.mode, used.kernel.mode), across)
    of_kernel = gemm(saved.x_turned, column, (used.x.mode, used.grad.mode), batch)
    amaxes = (*saved.amaxes, amax_of(grad, uses[2]))
    made = tuple(
        gradient_of_use(amax, operand)
        for amax, operand in zip(amaxes, (plan.x, plan.kernel, plan.grad), strict=True)
    )
    return LinearGradients(of_x, of_kernel.astype(saved.dtypes[1].dtype), made)


def bias_gradient(grad: Array, bias: Array | None) -> Array | None:
    """Gradient of a bias, the sum over the first dims."""
    if bias is None:
        return None
    rows = tuple(range(grad.ndim - bias.ndim))
    return jnp.sum(grad.astype(jnp.float32), rows).astype(bias.dtype)


def with_bias(y: Array, bias: Array | None, quantized: bool, dtype: Any) -> Array:
    """Fp32 results, with a bias, rounded once.

    Behind a product of `quantized` operands the bias is 16-bit, as the C library has it.
    """
    if bias is None:
        return y.astype(dtype)
    if quantized:
        bias = bias.astype(jnp.float16 if dtype == jnp.float16 else jnp.bfloat16)
    return (y + bias.astype(jnp.float32)).astype(dtype)


def as_cast(
    values: Array, plan: OperandPlan, use: Use | None, dtype: Any
) -> tuple[Array, Array | None]:
    """What the cast of fp32 values stands for, in `dtype`, and the amax that it is to record."""
    if plan.cast is None:
        return values.astype(dtype), None
    made = cast_lines(values, plan, use, 1)
    return chosen("dequantize")(made, plan.mode, dtype), amax_of(values, use)


def into(plan: OperandPlan, use: Use | None, x: Array) -> Into:
    """What the values of an operator over `x` become."""
    return operator_calls.into(x.dtype, plan.cast, None if use is None else use.scale)


def as_made(made: Made, plan: OperandPlan, use: Use | None, dtype: Any) -> tuple:
    """As `as_cast`, of what an operator made."""
    if made.row is None:
        return as_cast(made.wide, plan, use, dtype)
    row = made.row if plan.name is None else _named(made.row, plan.name)
    return chosen("dequantize")(row, plan.mode, dtype), joined(made.amax, use.scale)


def operand_of(values: Array, plan: LinearPlan, dtype: Any) -> Array:
    """Fp32 values as the input of a layer: rounded to `dtype` where they are not cast."""
    return values if plan.is_quantized else values.astype(dtype)
