# SPDX-License-Identifier: Apache-2.0
"""The recipes of small groups, MXFP8 and NVFP4; programs find them in `recipe`."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from transformer_engine.common import config
from transformer_engine.common import recipe_rules as rules
from transformer_engine.common.recipe_base import (
    Format,
    QParams,
    Recipe,
    accept_unknown_arguments,
    format_rule,
    from_environment,
)


@accept_unknown_arguments
@dataclass(repr=False, eq=False)
class MXFP8BlockScaling(Recipe):
    """FP8 with a power of two for each 32 values of a row or a column.

    The exponent is that of ``amax / fp8_max``, rounded up, so that nothing but Inf saturates. A
    tensor that GEMMs read in both directions is cast in both, each time from high precision. No
    device that the library knows multiplies these operands natively: GEMMs multiply them out to
    bf16, exactly, and count ``emulated.mxfp8`` (docs/formats_and_recipes.md).

    Parameters
    ----------
    margin : int, default 0
        Exists for symmetry with `DelayedScaling`; modules refuse another one.
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
        A value of another field is out of range or of a wrong type, or a variable of the
        environment is not understood. Assignments raise these errors, too.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = from_environment(config.TE_BACKWARD_OVERRIDE)
    enable_2d_quantization: bool = False

    _KIND = "mxfp8"
    _RULES = {
        "margin": rules.integer(-126, 126, "an integer from -126 to 126"),
        "fp8_format": format_rule,
        "fp8_dpa": rules.boolean,
        "fp8_mha": rules.boolean,
        "backward_override": rules.backward_override,
        "enable_2d_quantization": rules.boolean,
    }


class _FP4QParams:
    """QParams of one kind of tensor, which follow the recipe until the user assigns others."""

    def __init__(self, derive: "Callable[[NVFP4BlockScaling], QParams]") -> None:
        self.derive = derive

    def __get__(self, recipe: "NVFP4BlockScaling | None", owner: type) -> QParams:
        """Return the derived value; on the class, that of a recipe constructed now."""
        return self.derive(owner() if recipe is None else recipe)


def _fp4_qparams(where: str, value: Any) -> QParams:
    """Accept a QParams that NVFP4 has."""
    value = rules.instance(QParams)(where, value)
    if value.power_2_scale or value.amax_epsilon != 0.0:
        raise ValueError(f"{where} has power_2_scale or amax_epsilon, which NVFP4 does not have")
    return value


def _only(wanted: Format) -> Callable[[str, Any], Format]:
    """Accept one format; AssertionError otherwise."""

    def rule(where: str, value: Any) -> Format:
        if value is not wanted:
            raise AssertionError(f"{where} must be {wanted}, got {value!r}")
        return value

    return rule


def _word(*words: str) -> Callable[[str, Any], str]:
    """Accept one of these words; AssertionError otherwise."""

    def rule(where: str, value: Any) -> str:
        if value not in words:
            raise AssertionError(f"{where} must be one of {', '.join(words)}, got {value!r}")
        return value

    return rule


@accept_unknown_arguments
@dataclass(repr=False, eq=False)
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
        A number for each row of an input in place of one for all. Modules refuse it: it is not
        built.
    nvfp4_4over6 : {"none", "weights", "activations", "all"}, optional
        Where groups may use 4 as their largest number in place of 6. Modules refuse it but for
        "none": it is not built.
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
        A value of another field is of a wrong type, or a variable of the environment is not
        understood. Assignments raise these errors, too.
    """

    disable_rht: bool = from_environment(config.TE_NVFP4_DISABLE_RHT)
    disable_stochastic_rounding: bool = from_environment(
        config.TE_NVFP4_DISABLE_STOCHASTIC_ROUNDING
    )
    disable_2d_quantization: bool = from_environment(config.TE_NVFP4_DISABLE_2D_QUANTIZATION)
    row_scaled_activation: bool = from_environment(config.TE_NVFP4_ROW_SCALED_ACTIVATION)
    nvfp4_4over6: str = from_environment(config.TE_NVFP4_4OVER6)
    nvfp4_4over6_e4m3_use_256: str = from_environment(config.TE_NVFP4_4OVER6_E4M3_USE_256)
    nvfp4_4over6_err_mode: str = from_environment(config.TE_NVFP4_4OVER6_ERR_MODE)
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = from_environment(config.TE_BACKWARD_OVERRIDE)

    # Without annotations: not fields, so that they stay out of the constructor.
    fp4_quant_fwd_inp = _FP4QParams(lambda r: QParams(random_hadamard_transform=not r.disable_rht))
    fp4_quant_fwd_weight = _FP4QParams(
        lambda r: QParams(fp4_2d_quantization=not r.disable_2d_quantization)
    )
    fp4_quant_bwd_grad = _FP4QParams(
        lambda r: QParams(
            random_hadamard_transform=not r.disable_rht,
            stochastic_rounding=not r.disable_stochastic_rounding,
        )
    )

    _KIND = "nvfp4"
    _RULES = {
        "disable_rht": rules.boolean,
        "disable_stochastic_rounding": rules.boolean,
        "disable_2d_quantization": rules.boolean,
        "row_scaled_activation": rules.boolean,
        "nvfp4_4over6": _word(*config.NVFP4_SCOPES),
        "nvfp4_4over6_e4m3_use_256": _word(*config.NVFP4_SCOPES),
        "nvfp4_4over6_err_mode": _word("MAE", "MSE"),
        "fp4_format": _only(Format.E2M1),
        "fp8_format": _only(Format.E4M3),
        "fp8_dpa": rules.boolean,
        "fp8_mha": rules.boolean,
        "backward_override": rules.backward_override,
        "fp4_quant_fwd_inp": _fp4_qparams,
        "fp4_quant_fwd_weight": _fp4_qparams,
        "fp4_quant_bwd_grad": _fp4_qparams,
    }

    def _numerics(self) -> list[tuple[str, Any]]:
        """Add the QParams that were assigned, as only those say something new."""
        cls = NVFP4BlockScaling
        assigned = []
        for name in ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad"):
            value = self.__dict__.get(name)
            if value is not None and value != cls.__dict__[name].derive(self):
                assigned.append((name, value))
        return [(f.name, getattr(self, f.name, None)) for f in fields(self)] + assigned


for _public in (MXFP8BlockScaling, NVFP4BlockScaling):
    _public.__module__ = "transformer_engine.common.recipe"
