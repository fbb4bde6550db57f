# SPDX-License-Identifier: Apache-2.0
"""From a recipe to the casts of JAX arrays, by the recipe table of `common.operand_casts`."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from transformer_engine import _core
from transformer_engine.common import recipe as recipes
from transformer_engine.common.operand_casts import OperandCast, quantization_of
from transformer_engine.jax.definitions.scaling_modes import Cast, ScalingMode
from transformer_engine.jax.quantize.tensor import TensorSource

_DTYPES = {_core.DTYPE_E4M3: jnp.float8_e4m3fn, _core.DTYPE_E5M2: jnp.float8_e5m2}
_FP4 = jnp.dtype(jnp.float4_e2m1fn)
_MODES = {
    _core.RECIPE_DELAYED: ScalingMode.DELAYED_TENSOR_SCALING,
    _core.RECIPE_CURRENT: ScalingMode.CURRENT_TENSOR_SCALING,
    _core.RECIPE_ROW: ScalingMode.ROW_SCALING,
    _core.RECIPE_MXFP8: ScalingMode.MXFP8_1D_SCALING,
}


def _cast_of(operand: OperandCast, recipe: recipes.Recipe) -> Cast | None:
    """The cast of an operand under a recipe; None: it has none."""
    if operand.recipe == _core.RECIPE_NONE:
        return None
    squares = bool(operand.options & _core.CAST_TILES_2D)
    if operand.recipe == _core.RECIPE_BLOCK:
        mode = ScalingMode.BLOCK_2D_SCALING if squares else ScalingMode.BLOCK_1D_SCALING
        squares = False
    elif operand.recipe == _core.RECIPE_NVFP4:
        mode = ScalingMode.NVFP4_2D_SCALING if squares else ScalingMode.NVFP4_1D_SCALING
        return Cast(mode, _FP4, options=operand.options)
    elif operand.recipe in _MODES:
        mode = _MODES[operand.recipe]
    else:
        raise NotImplementedError(
            f"{type(recipe).__name__}: no cast of JAX arrays is built; use DelayedScaling, "
            "Float8CurrentScaling, Float8BlockScaling, Float8RowScaling, MXFP8BlockScaling or "
            "NVFP4BlockScaling"
        )
    power_2 = bool(operand.options & _core.CAST_POWER_2)
    margin = recipe.margin if recipe.delayed() else operand.margin
    dtype = jnp.dtype(_DTYPES[operand.dtype])
    return Cast(mode, dtype, power_2, operand.amax_epsilon, margin, squares)


def cast_of_mode(mode: ScalingMode, dtype: Any, margin: int = 0) -> Cast:
    """The cast of a mode without options; ValueError for a dtype that it can not make.

    Scales of 128 or 128 x 128 elements are powers of two, as those of the recipe.
    """
    known = [_FP4] if mode.is_nvfp4_scaling else _DTYPES.values()
    dtypes = [jnp.dtype(each) for each in known]
    if dtype is None or jnp.dtype(dtype) not in dtypes:
        raise ValueError(f"{mode} makes {' or '.join(map(str, dtypes))}, not {dtype}")
    tiles = mode in (ScalingMode.BLOCK_1D_SCALING, ScalingMode.BLOCK_2D_SCALING)
    squares = _core.CAST_TILES_2D * (mode is ScalingMode.NVFP4_2D_SCALING)
    return Cast(mode, jnp.dtype(dtype), power_2=tiles, margin=margin, options=squares)


def check_recipe(recipe: recipes.Recipe) -> None:
    """Raise where a recipe asks for what JAX does not have."""
    name = type(recipe).__name__
    for of in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, of, False):
            raise NotImplementedError(f"{name}({of}=True): attention in FP8 is not built for JAX")
    if not recipe.delayed():
        return
    if not isinstance(recipe.amax_compute_algo, str):
        raise NotImplementedError(f"{name}: amax_compute_algo is 'max' or 'most_recent' in JAX")
    if recipe.scaling_factor_compute_algo is not None or recipe.measure_first:
        raise NotImplementedError(
            f"{name}: JAX has neither scaling_factor_compute_algo nor measure_first"
        )
    if not recipe.reduce_amax:
        raise ValueError(f"{name}: reduce_amax=False: an amax in JAX is that of the whole array")


class QuantizeConfig:
    """What a recipe, or none, means for the operands of a layer.

    Attributes
    ----------
    recipe : Recipe or None
        The recipe.
    casts : tuple of Cast or None
        Of the input, the weight and the gradient of the output.
    amax_history_len : int
        Steps of a history; 0 but for delayed scaling.
    amax_compute_algo : str
        Of delayed scaling.
    backward_override : str or None
        Of the recipe.
    fast : int
        Products with fast accumulation, ``_core.LINEAR_FAST_*``.
    """

    def __init__(self, recipe: recipes.Recipe | None) -> None:
        self.recipe = recipe
        self.casts: tuple[Cast | None, ...] = (None, None, None)
        self.amax_history_len, self.amax_compute_algo = 0, "max"
        self.backward_override, self.fast = None, 0
        if recipe is None:
            return
        check_recipe(recipe)
        found = quantization_of(recipe)
        self.casts, self.fast = tuple(_cast_of(cast, recipe) for cast in found.casts), found.fast
        self.backward_override = recipe.backward_override
        if recipe.delayed():
            self.amax_history_len = recipe.amax_history_len
            self.amax_compute_algo = recipe.amax_compute_algo

    @classmethod
    def of_mode(cls, mode: ScalingMode, fwd_dtype: Any, bwd_dtype: Any) -> "QuantizeConfig":
        """Make that of one mode for all operands.

        Dtypes are E4M3 and E5M2 by default, of NVFP4 E2M1.
        """
        made = cls(None)
        if mode is ScalingMode.NO_SCALING:
            return made
        forward, backward = fwd_dtype or jnp.float8_e4m3fn, bwd_dtype or jnp.float8_e5m2
        if mode.is_nvfp4_scaling:
            forward, backward = fwd_dtype or _FP4, bwd_dtype or _FP4
        made.casts = tuple(cast_of_mode(mode, d) for d in (forward, forward, backward))
        made.fast = _core.LINEAR_FAST_OUTPUT if mode.is_tensor_scaling() else 0
        if mode is ScalingMode.DELAYED_TENSOR_SCALING:
            made.amax_history_len = 1024
        return made

    def is_fp8_enabled(self) -> bool:
        """Return whether any operand is cast."""
        return any(cast is not None for cast in self.casts)

    def get_scaling_mode(self, tensor_source: TensorSource) -> ScalingMode:
        """Return the mode of an operand."""
        cast = self.casts[tensor_source.value]
        return ScalingMode.NO_SCALING if cast is None else cast.mode

    @property
    def rounds_at_random(self) -> bool:
        """Whether gradients are rounded stochastically."""
        grad = self.casts[TensorSource.DGRAD.value]
        return grad is not None and grad.rounds_at_random

    @property
    def has_state(self) -> bool:
        """Whether operands have scales and histories that outlive a step."""
        return self.amax_history_len > 0


class Dtypes(NamedTuple):
    """Element types of a recipe."""

    forward: Any
    backward: Any


def format_dtypes(fp8_format: recipes.Format) -> Dtypes:
    """Element types of a format of FP8; NotImplementedError for one that has none in JAX."""
    known = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
    names = [fp8_format.dtype_name(direction) for direction in ("fwd", "bwd")]
    if not known.keys() >= set(names):
        raise NotImplementedError(f"{fp8_format}: no cast of JAX arrays is built")
    return Dtypes(*(known[name] for name in names))
