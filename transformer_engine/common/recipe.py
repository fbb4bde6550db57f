# SPDX-License-Identifier: Apache-2.0
"""Recipes: which low-precision formats are used and how their scales are found.

A recipe is a plain, mutable dataclass. Every field has a rule that runs whenever the field is
written, in the constructor and later, so that a recipe is valid at any time and the code that uses
it need not check again. `repr` shows everything that changes numerics and is therefore the
identity of a recipe. Modules whose recipes print alike share their amax bookkeeping, and so do
those whose recipes differ in how they attend alone.

Two habits of client programs shape this file. They pass keyword arguments that recipes no longer
have (`recipe_base.recipe_class`). And they unpickle recipes through allow-lists of
class names, so the pickle of a recipe must name this module's public classes only.

Every recipe runs on every device. Which of them a device multiplies by itself is asked with
``te.is_mxfp8_available()``, its siblings and ``check_*_support()`` of `pytorch.quantization`, never
with ``hasattr``.
"""

import math
from collections.abc import Callable
from typing import Any

from transformer_engine.common import absent, config, recipe_rules as rules
from transformer_engine.common.recipe_base import (
    DerivedQParams,
    Format,
    MMParams,
    QParams,
    Recipe,
    _FormatHelper,  # noqa: F401 - pickles of a Format name it here
    format_rule,
    gemm_setting,
    recipe_class,
    setting,
)
from transformer_engine.common.recipe_custom import (
    CustomRecipe,
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
)
from transformer_engine.common.recipe_microscaling import MXFP8BlockScaling, NVFP4BlockScaling

__all__ = [
    "CustomRecipe",
    "DelayedScaling",
    "DelayedScalingRequest",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowScaling",
    "Format",
    "MMParams",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "QuantizerRequest",
    "QuantizerRole",
    "Recipe",
    *absent.names_of(__name__),
]

__getattr__, __dir__ = absent.attach(globals())


@recipe_class
class DelayedScaling(Recipe):
    """FP8 with one scale per tensor, predicted from the amaxes of earlier steps.

    After a step, ``scale = fp8_max * 2**-margin / amax``; a tensor is multiplied by its scale and
    cast. An amax of 0, Inf or NaN keeps the scale.

    Parameters
    ----------
    margin : int, default 0
        Binary orders of magnitude left free below the largest FP8 value, -126 to 126.
    fp8_format : Format, default Format.HYBRID
        Element types: HYBRID or E4M3.
    amax_history_len : int, default 1024
        Number of steps whose amaxes are kept, at least 1.
    amax_compute_algo : {"max", "most_recent"} or callable, default "max"
        How the amax is chosen from the history. A callable maps the history, a tensor of shape
        [amax_history_len, n] whose row 0 is the current step, to n amaxes. With a callable, here or
        below, the history rolls in steps that recorded nothing too; else these change nothing.
    scaling_factor_compute_algo : callable, optional
        Computes new scales from ``(amax, old_scale, fp8_max, recipe)``. None is the formula above.
    reduce_amax : bool, default True
        Use the largest amax of all ranks of the group that ``autocast`` names.
    fp8_dpa, fp8_mha : bool, default False
        Run attention in FP8. `fp8_mha`: layers hand its output to the projection in FP8 too.
    backward_override : None
        Exists for symmetry with other recipes; anything but None is refused.
    measure_first : bool, default False
        Cast a tensor whose slot has never recorded an amax with its own, as current scaling does:
        ``scale = fp8_max / amax``. By default its scale is 1, under which small gradients round to
        zero for the first steps. A field of this library's own.

    Raises
    ------
    AssertionError
        `fp8_format` is E5M2 or E2M1, or `backward_override` is not None.
    ValueError
        A value of another field is out of range or of a wrong type.
    """

    margin: int = setting(rules.margin, 0)
    fp8_format: Format = setting(format_rule, Format.HYBRID)
    amax_history_len: int = setting(rules.integer(1, math.inf, "an integer of at least 1"), 1024)
    amax_compute_algo: str | Callable = setting(rules.amax_compute_algo, "max")
    scaling_factor_compute_algo: Callable | None = setting(rules.optional_callable, None)
    reduce_amax: bool = setting(rules.boolean, True)
    fp8_dpa: bool = setting(rules.boolean, False)
    fp8_mha: bool = setting(rules.boolean, False)
    backward_override: str | None = setting(rules.no_backward_override, config.TE_BACKWARD_OVERRIDE)
    measure_first: bool = setting(rules.boolean, False)

    _KIND = "delayed"

    def _numerics(self) -> list[tuple[str, Any]]:
        """Leave the field that others do not have out, unless it says something."""
        return [pair for pair in super()._numerics() if pair != ("measure_first", False)]


def _power_2_qparams() -> DerivedQParams:
    """QParams that follow the recipe's choice of powers of two."""
    return DerivedQParams(lambda recipe: QParams(power_2_scale=recipe._power_2()))


class _Measuring(Recipe):
    """Base of recipes that find scales in the tensors that they cast."""

    fp8_quant_fwd_inp = _power_2_qparams()
    fp8_quant_fwd_weight = _power_2_qparams()
    fp8_quant_bwd_grad = _power_2_qparams()

    def _power_2(self) -> bool:
        """Return whether scales are powers of two."""
        return self.use_power_2_scales


@recipe_class
class Float8CurrentScaling(_Measuring):
    """FP8 with one scale per tensor, computed from the tensor itself just before the cast.

    ``scale = fp8_max / max(amax, amax_epsilon)``, and 1 where that amax is 0, Inf or NaN.

    Parameters
    ----------
    use_power_2_scales : bool, optional
        Round scales down to powers of two. Default: the variable
        ``TE_FP8_CURRENT_SCALING_POWER_2_SCALES`` at the time of construction, otherwise False.
    fp8_format : Format, default Format.HYBRID
        Element types: HYBRID or E4M3.
    fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad : MMParams
        How the GEMMs of the output, of the input's gradient and of the weight's gradient run. Split
        accumulation by default in the two gradients.
    fp8_dpa, fp8_mha : bool, default False
        Run attention in FP8. `fp8_mha`: layers hand its output to the projection in FP8 too.
    backward_override : {None, "high_precision", "dequantized"}, optional
        Run the backward in high precision, from the operands as they were or as dequantized.
        Default: the variable ``TE_BACKWARD_OVERRIDE`` at the time of construction, otherwise None.

    Attributes
    ----------
    fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad : QParams
        How inputs, weights and gradients are quantized: no constructor arguments, but they can be
        assigned. One that is not assigned follows `use_power_2_scales`; one that is no longer does.
        ``del`` undoes an assignment.

    Raises
    ------
    AssertionError
        `fp8_format` is E5M2 or E2M1, or `backward_override` is none of the three.
    ValueError
        A value of another field, or a variable of the environment, is none of what is accepted.
    """

    use_power_2_scales: bool = setting(rules.boolean, config.TE_FP8_CURRENT_SCALING_POWER_2_SCALES)
    fp8_format: Format = setting(format_rule, Format.HYBRID)
    fp8_gemm_fprop: MMParams = gemm_setting(split=False)
    fp8_gemm_dgrad: MMParams = gemm_setting(split=True)
    fp8_gemm_wgrad: MMParams = gemm_setting(split=True)
    fp8_dpa: bool = setting(rules.boolean, False)
    fp8_mha: bool = setting(rules.boolean, False)
    backward_override: str | None = setting(rules.backward_override, config.TE_BACKWARD_OVERRIDE)

    _KIND = "current"


@recipe_class
class Float8BlockScaling(_Measuring):
    """FP8 with one scale per tile of 1 x 128 or 128 x 128 elements, computed from the tile.

    ``scale = fp8_max / max(amax, amax_epsilon)``, and 1 where that amax is 0, Inf or NaN. What a
    GEMM reads has its tiles along the dim that it sums over: a tensor that two GEMMs read in both
    directions is cast twice, each time from high precision.

    Parameters
    ----------
    use_f32_scales : bool, optional
        Keep scales as they come out; without it they are rounded down to powers of two. Default:
        the variable ``TE_FP8_BLOCK_SCALING_FP32_SCALES`` at the time of construction, otherwise
        False.
    fp8_format : Format, default Format.E4M3
        Element types: E4M3 or HYBRID.
    x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim : {1, 2}, default 1, 2, 1
        Tiles of inputs, weights and gradients: 1 x 128, or 128 x 128. At most one of them has 2.
    fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad : MMParams
        How GEMMs run: always with split accumulation.
    fp8_dpa, fp8_mha : False
        Exist for symmetry with other recipes; True is refused.
    backward_override : {None, "high_precision", "dequantized"}, optional
        As of `Float8CurrentScaling`.

    Attributes
    ----------
    fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad : QParams
        As of `Float8CurrentScaling`: where not assigned they follow `use_f32_scales`.

    Raises
    ------
    AssertionError
        `fp8_format` is E5M2 or E2M1; two kinds of tensors have tiles of 128 x 128; a GEMM is
        without split accumulation; `fp8_dpa` or `fp8_mha` is True; `backward_override` is none of
        the three.
    ValueError
        As of `Float8CurrentScaling`.
    """

    use_f32_scales: bool = setting(rules.boolean, config.TE_FP8_BLOCK_SCALING_FP32_SCALES)
    fp8_format: Format = setting(format_rule, Format.E4M3)
    x_block_scaling_dim: int = setting(rules.one_of(1, 2), 1)
    w_block_scaling_dim: int = setting(rules.one_of(1, 2), 2)
    grad_block_scaling_dim: int = setting(rules.one_of(1, 2), 1)
    fp8_gemm_fprop: MMParams = gemm_setting(split=True)
    fp8_gemm_dgrad: MMParams = gemm_setting(split=True)
    fp8_gemm_wgrad: MMParams = gemm_setting(split=True)
    fp8_dpa: bool = setting(rules.never, False)
    fp8_mha: bool = setting(rules.never, False)
    backward_override: str | None = setting(rules.backward_override, config.TE_BACKWARD_OVERRIDE)

    _KIND = "block"

    def _power_2(self) -> bool:
        return not self.use_f32_scales

    def _check_fields(self) -> None:
        name = type(self).__name__
        dims = [f"{of}_block_scaling_dim" for of in ("x", "w", "grad")]
        twice = [dim for dim in dims if getattr(self, dim) == 2]
        if len(twice) > 1:
            raise AssertionError(
                f"{name}: {' and '.join(twice)} are 2: no GEMM multiplies tiles of 128 x 128 with "
                "such tiles; let one of them be 2"
            )
        for gemm in ("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"):
            if not getattr(self, gemm).use_split_accumulator:
                raise AssertionError(
                    f"{name}.{gemm}={getattr(self, gemm)}: GEMMs on tiles have no fast "
                    "accumulation; pass MMParams(use_split_accumulator=True)"
                )


@recipe_class
class Float8RowScaling(_Measuring):
    """FP8 with one scale per row of what a GEMM reads, computed from the row (not the incumbent's).

    The output's GEMM reads inputs and weights with a scale per token and per output feature; the
    gradients' GEMMs read weights, inputs and gradients with a scale per column where they sum over
    tokens or output features. ``scale = fp8_max / max(amax, amax_epsilon)``, and 1 where that amax
    is 0, Inf or NaN. Finer than one scale per tensor, and Hopper's fastest FP8 GEMMs; a cast reads
    its tensor twice, as under `Float8CurrentScaling`.

    Parameters
    ----------
    use_power_2_scales : bool, default False
        Round scales down to powers of two.
    fp8_format : Format, default Format.HYBRID
        Element types: HYBRID or E4M3.
    fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad : MMParams
        As of `Float8CurrentScaling`.
    fp8_dpa, fp8_mha : False
        Exist for symmetry with other recipes; True is refused.
    backward_override : {None, "high_precision", "dequantized"}, optional
        As of `Float8CurrentScaling`.

    Attributes
    ----------
    fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad : QParams
        As of `Float8CurrentScaling`.

    Raises
    ------
    AssertionError
        `fp8_format` is E5M2 or E2M1; `fp8_dpa` or `fp8_mha` is True; `backward_override` is none
        of the three.
    ValueError
        As of `Float8CurrentScaling`.
    """

    use_power_2_scales: bool = setting(rules.boolean, False)
    fp8_format: Format = setting(format_rule, Format.HYBRID)
    fp8_gemm_fprop: MMParams = gemm_setting(split=False)
    fp8_gemm_dgrad: MMParams = gemm_setting(split=True)
    fp8_gemm_wgrad: MMParams = gemm_setting(split=True)
    fp8_dpa: bool = setting(rules.never, False)
    fp8_mha: bool = setting(rules.never, False)
    backward_override: str | None = setting(rules.backward_override, config.TE_BACKWARD_OVERRIDE)

    _KIND = "row"
