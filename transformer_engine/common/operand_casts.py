# SPDX-License-Identifier: Apache-2.0
"""From a recipe to the casts that it asks for: of the operands of a linear layer's GEMMs.

A graph has them among the fields of its linear nodes (`graphs.LinearSpec`).
"""

import functools
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

from transformer_engine import _core
from transformer_engine.common.recipe import Recipe


def flags_of(bits: Iterable[tuple[int, Any]]) -> int:
    """Join the flags, numbers of one bit each, whose condition holds."""
    return functools.reduce(operator.or_, (flag for flag, condition in bits if condition), 0)


class OperandCast(NamedTuple):
    """How an operand of a linear layer's GEMMs is cast; te_operand_cast of the C header."""

    recipe: int = _core.RECIPE_NONE  # ``_core.RECIPE_*``
    dtype: int = _core.DTYPE_E4M3  # ``_core.DTYPE_*`` of its data
    amax_epsilon: float = 0.0  # smallest amax
    options: int = 0  # ``_core.CAST_*``
    margin: int = 0  # of MXFP8


class Quantization(NamedTuple):
    """Part of a recipe that the plans of a linear layer depend on.

    `casts` and `backward` are the members of te_quantization, so that nodes take it as it is.
    """

    input: OperandCast = OperandCast()
    weight: OperandCast = OperandCast()
    grad: OperandCast = OperandCast()  # of the output
    fast: int = 0  # ``_core.LINEAR_FAST_*``: GEMMs with fast accumulation
    backward: int = _core.BACKWARD_QUANTIZED
    """``_core.BACKWARD_*``: what the GEMMs of the backward multiply."""

    @property
    def casts(self) -> tuple[OperandCast, OperandCast, OperandCast]:
        """Of all operands."""
        return self.input, self.weight, self.grad

    @property
    def is_quantized(self) -> bool:
        """True where any operand has a recipe."""
        return any(cast.recipe != _core.RECIPE_NONE for cast in self.casts)

    def flat(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Integers and floats of it, for graphs of torch; `of_flat` undoes it."""
        numbers = [n for c in self.casts for n in (c.recipe, c.dtype, c.options, c.margin)]
        return (*numbers, self.fast, self.backward), tuple(c.amax_epsilon for c in self.casts)

    @classmethod
    def of_flat(cls, numbers: tuple[int, ...], epsilons: tuple[float, ...]) -> "Quantization":
        """Undo `flat`."""
        casts = [
            OperandCast(*numbers[4 * i : 4 * i + 2], epsilon, *numbers[4 * i + 2 : 4 * i + 4])
            for i, epsilon in enumerate(epsilons)
        ]
        return cls(*casts, *numbers[12:])


HIGH_PRECISION = Quantization()
"""No recipe: GEMMs in the dtype of the operands."""

BACKWARDS = {
    None: _core.BACKWARD_QUANTIZED,
    "high_precision": _core.BACKWARD_HIGH_PRECISION,
    "dequantized": _core.BACKWARD_DEQUANTIZED,
}
"""By ``backward_override``."""
_MEASURING = {"current": _core.RECIPE_CURRENT, "block": _core.RECIPE_BLOCK, "row": _core.RECIPE_ROW}
"""By kind of a recipe that finds scales in the tensors that it casts."""
_FP8_CODES = {"e4m3": _core.DTYPE_E4M3, "e5m2": _core.DTYPE_E5M2}


def quantization_of(recipe: Recipe) -> Quantization:
    """Quantization that a recipe asks for: hashable, and equal for recipes that compute the same.

    NotImplementedError where it asks for something that linear layers do not have.
    """
    return overridden(_quantization_of_casts(recipe), recipe)


def overridden(found: Quantization, recipe: Recipe) -> Quantization:
    """The same with a recipe's ``backward_override``."""
    backward = BACKWARDS[recipe.backward_override]
    if backward == _core.BACKWARD_QUANTIZED:
        return found
    # Neither gradients nor column-wise forms are cast, of which these are said.
    of_backward = _core.CAST_HADAMARD | _core.CAST_UNSIGNED | _core.CAST_STOCHASTIC
    casts = [cast._replace(options=cast.options & ~of_backward) for cast in found.casts]
    return Quantization(*casts, found.fast, backward)


def is_backward_wide(recipe: Recipe | None) -> bool:
    """Return whether a backward's GEMMs multiply in high precision: they do without a recipe."""
    return recipe is None or recipe.backward_override is not None


def _quantization_of_casts(recipe: Recipe) -> Quantization:
    """`quantization_of` a recipe without ``backward_override``."""
    if recipe.custom():
        raise NotImplementedError(
            f"{type(recipe).__name__}: it makes quantizers for the roles of a module, and this "
            "call has no role: use another recipe here"
        )
    for name in ("fp8_dpa", "fp8_mha"):
        if getattr(recipe, name) and (recipe.mxfp8() or recipe.nvfp4()):
            raise NotImplementedError(
                f"{type(recipe).__name__}: {name}=True: attention has no kernels for this format; "
                "leave it out, or set TE_DPA_FP8_RECIPE to DelayedScaling or Float8CurrentScaling"
            )
    if recipe.nvfp4():
        return _nvfp4_quantization(recipe)
    forward = _FP8_CODES[recipe.fp8_format.dtype_name("fwd")]
    dtypes = forward, forward, _FP8_CODES[recipe.fp8_format.dtype_name("bwd")]
    if recipe.delayed():
        casts = [OperandCast(_core.RECIPE_DELAYED, dtype) for dtype in dtypes]
        return Quantization(*casts, _core.LINEAR_FAST_OUTPUT)
    if recipe.mxfp8():
        squares = 0, _core.CAST_TILES_2D * recipe.enable_2d_quantization, 0
        kinds = zip(dtypes, squares, strict=True)
        margin = recipe.margin
        return Quantization(*(OperandCast(_core.RECIPE_MXFP8, d, 0.0, s, margin) for d, s in kinds))
    kind = _MEASURING.get(recipe._KIND)
    if kind is None:
        raise NotImplementedError(
            f"Linear: no cast is known for a {type(recipe).__name__}: use a recipe of "
            "transformer_engine.common.recipe, or a CustomRecipe"
        )
    tensors = (recipe.fp8_quant_fwd_inp, recipe.fp8_quant_fwd_weight, recipe.fp8_quant_bwd_grad)
    gemms = (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad)
    ways = (_core.LINEAR_FAST_OUTPUT, _core.LINEAR_FAST_GRAD_INPUT, _core.LINEAR_FAST_GRAD_WEIGHT)
    narrow = (not gemm.use_split_accumulator for gemm in gemms)
    fast = flags_of(zip(ways, narrow, strict=True))
    dims = [getattr(recipe, f"{of}_block_scaling_dim", 1) for of in ("x", "w", "grad")]
    casts = [
        measuring_cast(kind, dtype, tensor.power_2_scale, dim == 2, tensor.amax_epsilon)
        for dtype, tensor, dim in zip(dtypes, tensors, dims, strict=True)
    ]
    return Quantization(*casts, fast)


def measuring_cast(
    kind: int, dtype: int, power_2: bool, tiles_2d: bool, epsilon: float
) -> OperandCast:
    """A cast whose scales are those of the tensor itself, of its tiles or of its rows."""
    options = flags_of(((_core.CAST_POWER_2, power_2), (_core.CAST_TILES_2D, tiles_2d)))
    return OperandCast(kind, dtype, float(epsilon), options)


def _nvfp4_quantization(recipe: Any) -> Quantization:
    """`quantization_of` NVFP4; ValueError for QParams that no GEMM can be made of."""
    tensors = (recipe.fp4_quant_fwd_inp, recipe.fp4_quant_fwd_weight, recipe.fp4_quant_bwd_grad)
    scopes = ("activations", "weights", None)  # no gradients
    casts = [
        _nvfp4_cast(recipe, tensor, scope) for tensor, scope in zip(tensors, scopes, strict=True)
    ]
    check_nvfp4("NVFP4BlockScaling", casts)
    return Quantization(*casts)


def _nvfp4_cast(recipe: Any, how: Any, scope: str | None) -> OperandCast:
    """The cast of one kind of tensor, by its QParams and what the recipe says of a scope."""
    chooses = scope is not None and recipe.nvfp4_4over6 in (scope, "all")
    to_256 = chooses and recipe.nvfp4_4over6_e4m3_use_256 in (scope, "all")
    options = nvfp4_options(
        tiles_2d=how.fp4_2d_quantization,
        hadamard=how.random_hadamard_transform,
        stochastic=how.stochastic_rounding,
        four_over_six=recipe.nvfp4_4over6_err_mode if chooses else None,
        to_256=to_256,
        row_scaled=recipe.row_scaled_activation and scope == "activations",
    )
    return OperandCast(_core.RECIPE_NVFP4, _core.DTYPE_U8, options=options)


def nvfp4_options(
    *,
    tiles_2d: bool,
    hadamard: bool,
    stochastic: bool,
    four_over_six: str | None,
    to_256: bool,
    row_scaled: bool,
    signed: bool = True,
) -> int:
    """``_core.CAST_*`` of a cast to NVFP4; `four_over_six` is the error that it chooses by.

    `signed`: the Hadamard transform negates values first.
    """
    return flags_of(
        (
            (_core.CAST_TILES_2D, tiles_2d),
            (_core.CAST_HADAMARD, hadamard),
            (_core.CAST_UNSIGNED, hadamard and not signed),
            (_core.CAST_STOCHASTIC, stochastic),
            (_core.CAST_FOUR_OVER_SIX, four_over_six is not None),
            (_core.CAST_SQUARED, four_over_six == "MSE"),
            (_core.CAST_TO_256, to_256),
            (_core.CAST_ROW_SCALED, row_scaled),
        )
    )


def check_nvfp4(name: str, casts: Iterable[OperandCast]) -> None:
    """Raise where casts to NVFP4 do not go together; `name` is the recipe's."""
    inp, weight, grad = casts
    transforms = [bool(cast.options & _core.CAST_HADAMARD) for cast in (inp, weight, grad)]
    tiles = (inp.options | grad.options) & _core.CAST_TILES_2D
    if transforms[0] and (inp.options ^ grad.options) & _core.CAST_UNSIGNED:
        raise ValueError(
            f"{name}: with_random_sign_mask of the quantizers of input and gradient differs: one "
            "GEMM multiplies what they make, so give both the same"
        )
    if transforms not in ([False] * 3, [True, False, True]) or (transforms[0] and tiles):
        raise ValueError(
            f"{name}: random_hadamard_transform belongs to fp4_quant_fwd_inp and "
            "fp4_quant_bwd_grad alike, whose column-wise forms one GEMM multiplies, never to "
            "fp4_quant_fwd_weight, and not beside fp4_2d_quantization"
        )
    if (inp.options | weight.options) & _core.CAST_STOCHASTIC:
        raise NotImplementedError(
            f"{name}: stochastic_rounding of anything but fp4_quant_bwd_grad is not built: set "
            "it there only"
        )
    for cast, what in zip((inp, weight), ("activations", "weights"), strict=True):
        if cast.options & _core.CAST_FOUR_OVER_SIX and cast.options & _core.CAST_HADAMARD:
            raise ValueError(
                f"{name}: nvfp4_4over6 of {what}, which random_hadamard_transform mixes: pass "
                "disable_rht=True"
            )
    if inp.options & _core.CAST_ROW_SCALED and inp.options & _core.CAST_TILES_2D:
        raise ValueError(
            f"{name}: row_scaled_activation with fp4_2d_quantization of inputs: an amax for each "
            "row needs groups inside of a row; set one of the two to False"
        )
