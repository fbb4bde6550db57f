# SPDX-License-Identifier: Apache-2.0
"""The recipes of small groups, MXFP8 and NVFP4; programs find them in `recipe`."""

from collections.abc import Callable
from typing import Any

from transformer_engine.common import config, recipe_rules as rules
from transformer_engine.common.recipe_base import (
    DerivedQParams,
    Format,
    QParams,
    Recipe,
    format_rule,
    recipe_class,
    setting,
)


@recipe_class
class MXFP8BlockScaling(Recipe):
    """FP8 with a power of two for each 32 values of a row or a column.

    The exponent is that of ``amax / fp8_max``, rounded up, so that nothing but Inf saturates. A
    tensor that GEMMs read in both directions is cast in both, each time from high precision. No
    device that the library knows multiplies these operands natively: GEMMs multiply them out to
    bf16, exactly, and count ``emulated.mxfp8`` (docs/formats_and_recipes.md).

    Parameters
    ----------
    margin : int, default 0
        Powers of two left free below the largest FP8 value, -126 to 126: added to each exponent.
    fp8_format : Format, default Format.E4M3
        Element types: E4M3 or HYBRID.
    fp8_dpa, fp8_mha : bool, default False
        Run attention, and pass its inputs and outputs, in FP8.
    backward_override : {None, "high_precision", "dequantized"}, optional
        As of `Float8CurrentScaling`.
    enable_2d_quantization : bool, default False
        Weights have one scale for each 32 x 32 values, the same in both directions.

    Raises
    ------
    AssertionError
        `fp8_format` is E5M2 or E2M1, or `backward_override` is none of the three.
    ValueError
        A value of another field, or a variable of the environment, is none of what is accepted.
    """

    margin: int = setting(rules.margin, 0)
    fp8_format: Format = setting(format_rule, Format.E4M3)
    fp8_dpa: bool = setting(rules.boolean, False)
    fp8_mha: bool = setting(rules.boolean, False)
    backward_override: str | None = setting(rules.backward_override, config.TE_BACKWARD_OVERRIDE)
    enable_2d_quantization: bool = setting(rules.boolean, False)

    _KIND = "mxfp8"


def _fp4_qparams(where: str, value: Any) -> QParams:
    """Accept a QParams that NVFP4 has."""
    value = rules.instance(QParams)(where, value)
    if value.power_2_scale or value.amax_epsilon != 0.0:
        raise ValueError(f"{where} has power_2_scale or amax_epsilon, which NVFP4 does not have")
    return value


def _only(wanted: Format) -> Callable[[str, Any], Format]:
    """Accept one format; AssertionError otherwise."""
    return rules.such(lambda value: value is wanted, str(wanted), AssertionError)


def _word(*words: str) -> Callable[[str, Any], str]:
    """Accept one of these words; AssertionError otherwise."""
    return rules.such(words.__contains__, f"one of {', '.join(words)}", AssertionError)


@recipe_class
class NVFP4BlockScaling(Recipe):
    """FP4 (E2M1) with an E4M3 scale for each 16 values, and one number for the whole tensor.

    With ``s = 6 * 448 / amax`` of the tensor, a group's scale is ``amax_of_group * s / 6`` in E4M3,
    and its values are multiplied by ``s / scale``. No device that the library knows multiplies
    these operands natively: GEMMs multiply them out to bf16, exactly but for the amaxes, whose part
    multiplies the product, and count ``emulated.nvfp4`` (docs/formats_and_recipes.md). There is no
    fp16 output.

    Parameters
    ----------
    disable_rht : bool, optional
        Do not mix groups of 16 values of the column-wise forms of inputs and gradients (random
        Hadamard transform), which the weight gradient multiplies. Default: the variable
        ``TE_NVFP4_DISABLE_RHT`` at the time of construction, otherwise False; likewise below.
    disable_stochastic_rounding : bool, optional
        Round gradients to nearest even.
    disable_2d_quantization : bool, optional
        Scales of weights are those of 16 values, and not of 16 x 16 that are the same in both
        directions.
    row_scaled_activation : bool, optional
        A number for each row of an input's row-wise form in place of one for all.
    nvfp4_4over6 : {"none", "weights", "activations", "all"}, optional
        Where groups use 4 as their largest number in place of 6 when that loses less; of inputs
        ("activations") with `disable_rht` alone.
    nvfp4_4over6_e4m3_use_256 : {"none", "weights", "activations", "all"}, optional
        Where that uses 256 as the largest scale in place of 448.
    nvfp4_4over6_err_mode : {"MAE", "MSE"}, optional
        The error by which it chooses.
    fp4_format, fp8_format : Format
        Element type and that of scales: E2M1 and E4M3.
    fp8_dpa, fp8_mha : bool, default False
        Run attention, and pass its inputs and outputs, in FP8.
    backward_override : {None, "high_precision", "dequantized"}, optional
        As of `Float8CurrentScaling`.

    Attributes
    ----------
    fp4_quant_fwd_inp, fp4_quant_fwd_weight, fp4_quant_bwd_grad : QParams
        How inputs, weights and gradients are quantized: no constructor arguments, but they can be
        assigned. One that is not assigned follows the switches above. ``del`` undoes an assignment.

    Raises
    ------
    AssertionError
        A format, a scope or `backward_override` is none of those above.
    ValueError
        A value of another field, or a variable of the environment, is none of what is accepted.
    """

    disable_rht: bool = setting(rules.boolean, config.TE_NVFP4_DISABLE_RHT)
    disable_stochastic_rounding: bool = setting(
        rules.boolean, config.TE_NVFP4_DISABLE_STOCHASTIC_ROUNDING
    )
    disable_2d_quantization: bool = setting(rules.boolean, config.TE_NVFP4_DISABLE_2D_QUANTIZATION)
    row_scaled_activation: bool = setting(rules.boolean, config.TE_NVFP4_ROW_SCALED_ACTIVATION)
    nvfp4_4over6: str = setting(_word(*config.NVFP4_SCOPES), config.TE_NVFP4_4OVER6)
    nvfp4_4over6_e4m3_use_256: str = setting(
        _word(*config.NVFP4_SCOPES), config.TE_NVFP4_4OVER6_E4M3_USE_256
    )
    nvfp4_4over6_err_mode: str = setting(_word("MAE", "MSE"), config.TE_NVFP4_4OVER6_ERR_MODE)
    fp4_format: Format = setting(_only(Format.E2M1), Format.E2M1)
    fp8_format: Format = setting(_only(Format.E4M3), Format.E4M3)
    fp8_dpa: bool = setting(rules.boolean, False)
    fp8_mha: bool = setting(rules.boolean, False)
    backward_override: str | None = setting(rules.backward_override, config.TE_BACKWARD_OVERRIDE)

    fp4_quant_fwd_inp = DerivedQParams(
        lambda r: QParams(random_hadamard_transform=not r.disable_rht), _fp4_qparams
    )
    fp4_quant_fwd_weight = DerivedQParams(
        lambda r: QParams(fp4_2d_quantization=not r.disable_2d_quantization), _fp4_qparams
    )
    fp4_quant_bwd_grad = DerivedQParams(
        lambda r: QParams(
            random_hadamard_transform=not r.disable_rht,
            stochastic_rounding=not r.disable_stochastic_rounding,
        ),
        _fp4_qparams,
    )

    _KIND = "nvfp4"
