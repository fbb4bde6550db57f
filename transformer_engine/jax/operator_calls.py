# SPDX-License-Identifier: Apache-2.0
"""Norms, activations and softmaxes by themselves: operators of the C library as custom calls.

Values are fp32 within an operator. It rounds them to a dtype, or casts them with the scale of
delayed scaling and records their amax. Other casts, of values that it gives in fp32, are made as
elsewhere.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from transformer_engine import _core
from transformer_engine.jax.custom_calls import call_operator
from transformer_engine.jax.definitions import are_custom_calls_on, casts, is_spread
from transformer_engine.jax.definitions.activations import Limits
from transformer_engine.jax.definitions.scaling_modes import Cast, ScalingMode
from transformer_engine.jax.operator_cuts import Cut, Labels, Result, over_devices, rows

NORMS = {"layernorm": _core.NORM_LAYERNORM, "rmsnorm": _core.NORM_RMSNORM}
"""Norms of the C library, by name."""
ACTIVATIONS = {
    ("gelu",): _core.ACTIVATION_GELU,
    ("gelu", "linear"): _core.ACTIVATION_GEGLU,
    ("quick_gelu",): _core.ACTIVATION_QGELU,
    ("quick_gelu", "linear"): _core.ACTIVATION_QGEGLU,
    ("relu",): _core.ACTIVATION_RELU,
    ("relu", "linear"): _core.ACTIVATION_REGLU,
    ("squared_relu",): _core.ACTIVATION_SRELU,
    ("squared_relu", "linear"): _core.ACTIVATION_SREGLU,
    ("silu",): _core.ACTIVATION_SILU,
    ("silu", "linear"): _core.ACTIVATION_SWIGLU,
    ("sigmoid", "linear"): _core.ACTIVATION_GLU,
    ("clamped_silu", "clamped_linear"): _core.ACTIVATION_CLAMPED_SWIGLU,
}
"""Activations of the C library, by names of the functions that are multiplied."""
DTYPES = tuple(jnp.dtype(each) for each in (jnp.float32, jnp.float16, jnp.bfloat16))
"""Dtypes of high precision of the C library."""
_PADDING = 16  # columns of transposed FP8 are a multiple of it


def run_on(*arrays: Array | None) -> bool:
    """Return whether operators compute on such arrays; asked while a call is traced."""
    there = [array for array in arrays if array is not None]
    known = all(array.dtype in DTYPES and array.size for array in there)
    return known and are_custom_calls_on(cut=True)


class Into(NamedTuple):
    """What the fp32 values of an operator become: numbers of a dtype, or FP8 with a given scale."""

    dtype: Any
    cast: Cast | None = None
    scale: Array | None = None  # fp32 [1]
    forms: tuple[bool, bool] = (True, False)  # row-wise, column-wise


def into(dtype: Any, cast: Cast | None, scale: Array | None, forms: tuple = (True, False)) -> Into:
    """`dtype` without a cast; what an operator casts itself; else fp32, which is cast later.

    Over a mesh it casts nothing: what it transposes can not be put together from parts.
    """
    if cast is None:
        return Into(dtype)
    if cast.mode is ScalingMode.DELAYED_TENSOR_SCALING and not is_spread():
        return Into(None, cast, scale, forms)
    return Into(jnp.dtype(jnp.float32))


class Made(NamedTuple):
    """What an operator made."""

    wide: Array | None
    row: casts.Quantized | None
    column: casts.Quantized | None  # its last group of dims comes first
    amax: Array | None  # fp32 [1]


def _matrix(array: Array, depth: int = 1) -> Array:
    first = array.ndim - depth
    return array.reshape(math.prod(array.shape[:first]), -1)


def _call(
    name: str, shape: Sequence[int], depth: int, to: Into, results: dict, **fields: Any
) -> tuple[Made, dict[str, Array]]:
    """Run an operator whose values have a shape, of whose dims the last `depth` are columns."""
    first, last = tuple(shape[: len(shape) - depth]), tuple(shape[len(shape) - depth :])
    rows, columns = math.prod(first), math.prod(last)
    if to.cast is None:
        results = results | {"wide": jax.ShapeDtypeStruct((rows, columns), to.dtype)}
    else:
        padded = -(-rows // _PADDING) * _PADDING
        forms = {"row": (rows, columns), "column": (columns, padded)}
        for wanted, (form, size) in zip(to.forms, forms.items(), strict=True):
            if wanted:
                results = results | {
                    form: jax.ShapeDtypeStruct(size, to.cast.dtype),
                    f"{form}_scales": jax.ShapeDtypeStruct((2,), jnp.float32),
                }
        fields |= {"mode": _core.SCALING_TENSOR, "scale": to.scale}
        fields |= {"amax": jnp.zeros(1, jnp.float32)}
    made = call_operator(name, results, **fields)
    wide, row, column = made.get("wide"), made.get("row"), made.get("column")
    inverse = None if to.cast is None else casts.reciprocal(to.scale)
    if wide is not None:
        wide = wide.reshape(shape)
    if row is not None:
        row = casts.Quantized(row.reshape(shape), inverse)
    if column is not None:
        column = casts.Quantized(column[:, :rows].reshape(*last, *first), inverse)
    return Made(wide, row, column, made.get("amax")), made


# ---- norms ---------------------------------------------------------------------------------------


def are_norms_on(x: Array, gamma: Array, beta: Array | None) -> bool:
    """Return whether the operators of norms compute on such arrays."""
    alike = beta is None or beta.dtype == gamma.dtype
    return alike and run_on(x, gamma, beta)


def norm(
    plan: Any, x: Array, gamma: Array, beta: Array | None, to: Into
) -> tuple[Made, tuple[Array | None, Array]]:
    """Normalize x [.., columns]: what it becomes, and mean and rsigma of rows fp32 [..].

    `plan` is a `NormPlan`; an RMSNorm has no mean.
    """
    lines = rows(x.ndim - 1)

    def run(x: Array, gamma: Array, beta: Array | None) -> tuple:
        count = math.prod(x.shape[:-1])
        means = plan.kind == "layernorm"
        given = {"rsigma": jnp.zeros(count, jnp.float32)}
        given |= {"mean": jnp.zeros(count, jnp.float32)} if means else {}
        fields = {"kind": NORMS[plan.kind], "gamma": gamma, "eps": plan.epsilon}
        fields |= {"beta": beta, "zero_centered": plan.zero_centered, "input": _matrix(x)}
        made, all_made = _call("norm", x.shape, 1, to, {}, **fields, **given)
        mean, rsigma = (
            all_made[name].reshape(x.shape[:-1]) if name in all_made else None
            for name in ("mean", "rsigma")
        )
        return made, (mean, rsigma)

    return over_devices(run, Cut((lines, (), ()), (Result(lines),) * 2), x, gamma, beta)


def norm_gradient(
    plan: Any,
    grad: Array,
    x: Array,
    gamma: Array,
    statistics: tuple[Array | None, Array],
) -> tuple[Array, Array, Array | None]:
    """Gradients of x, gamma and beta (None of an RMSNorm), in the dtypes of x and gamma."""
    lines, total = rows(x.ndim - 1), Result((), "sum")

    def run(grad: Array, x: Array, gamma: Array, mean: Array | None, rsigma: Array) -> tuple:
        results = {"grad_input": _like(_matrix(x)), "gamma_grad": _like(gamma)}
        if mean is not None:
            results["beta_grad"] = _like(gamma)
        made = call_operator(
            "norm_backward",
            results,
            grad_output=_matrix(grad),
            input=_matrix(x),
            kind=NORMS[plan.kind],
            rsigma=rsigma.reshape(-1),
            mean=None if mean is None else mean.reshape(-1),
            gamma=gamma,
            zero_centered=plan.zero_centered,
        )
        return made["grad_input"].reshape(x.shape), made["gamma_grad"], made.get("beta_grad")

    cut = Cut((lines, lines, (), lines, lines), (Result(lines), total, total))
    return over_devices(run, cut, grad, x, gamma, *statistics)


def _like(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


# ---- activations ---------------------------------------------------------------------------------


def _activation_fields(x: Array, kinds: tuple[str, ...], numbers: Limits) -> dict[str, Any]:
    limit, alpha, offset = numbers
    fields = {"input": _matrix(x, 2), "kind": ACTIVATIONS[kinds]}
    return fields | {"limit": limit, "alpha": alpha, "linear_offset": offset}


def activate(x: Array, kinds: tuple[str, ...], numbers: Limits, to: Into) -> Made:
    """The activation of x [.., functions, columns]: [.., columns]."""
    lines = rows(x.ndim - 2)

    def run(x: Array) -> tuple[Made]:
        shape = (*x.shape[:-2], x.shape[-1])
        return _call("activation", shape, 1, to, {}, **_activation_fields(x, kinds, numbers))[:1]

    return over_devices(run, Cut((lines,), (Result(lines),)), x)[0]


def activation_gradient(
    grad: Array, x: Array, kinds: tuple[str, ...], numbers: Limits, to: Into, sums: bool = False
) -> tuple[Made, Array | None]:
    """Gradient of x [.., functions, columns]; with `sums` those over rows, in the dtype of x."""
    lines = rows(x.ndim - 2)

    def run(grad: Array, x: Array) -> tuple[Made, Array | None]:
        fields = _activation_fields(x, kinds, numbers) | {"grad_output": _matrix(grad)}
        results = {}
        if sums:
            results["bias_grad"] = jax.ShapeDtypeStruct((math.prod(x.shape[-2:]),), x.dtype)
        made, all_made = _call("activation_backward", x.shape, 2, to, results, **fields)
        return made, all_made["bias_grad"].reshape(x.shape[-2:]) if sums else None

    cut = Cut((lines, lines), (Result(lines), Result((), "sum")))
    return over_devices(run, cut, grad, x)


# ---- softmaxes -----------------------------------------------------------------------------------


def _four_dims(array: Array) -> Array:
    return array.reshape(*(1,) * (4 - array.ndim), *array.shape)


def softmax(logits: Array, mask: Array | None, scale: float, causal: bool) -> Array:
    """Probabilities of logits [.., queries, keys] of 2 to 4 dims; not 0 in a mask hides a key."""
    lines = rows(logits.ndim - 2)

    def run(logits: Array, mask: Array | None) -> tuple[Array]:
        x = _four_dims(logits)
        window = {"window_left": -1, "window_right": 0} if causal else {}
        hidden = None if mask is None else _four_dims(mask != 0)
        made = call_operator(
            "softmax", {"output": _like(x)}, input=x, mask=hidden, scale=scale, **window
        )
        return (made["output"].reshape(logits.shape),)

    hides = () if mask is None else _labels_of_mask(mask, logits)
    return over_devices(run, Cut((lines, hides), (Result(lines),)), logits, mask)[0]


def _labels_of_mask(mask: Array, logits: Array) -> Labels:
    """Those of logits, but for dims that the mask is repeated along."""
    more = logits.ndim - mask.ndim
    labels = (None,) * -more + rows(logits.ndim - 2)[max(more, 0) :]
    sizes = (1,) * -more + logits.shape[max(more, 0) :]
    pairs = zip(labels, sizes, mask.shape, strict=False)
    return tuple(label if size == of else None for label, size, of in pairs)


def softmax_gradient(grad: Array, probabilities: Array, scale: float) -> Array:
    """Gradient of logits, in the dtype of the probabilities."""
    lines = rows(probabilities.ndim - 2)

    def run(grad: Array, probabilities: Array) -> tuple[Array]:
        p = _four_dims(probabilities)
        given = {"grad_output": _four_dims(grad), "probabilities": p, "scale": scale}
        made = call_operator("softmax_backward", {"grad_input": _like(p)}, **given)
        return (made["grad_input"].reshape(probabilities.shape),)

    return over_devices(run, Cut((lines, lines), (Result(lines),)), grad, probabilities)[0]
