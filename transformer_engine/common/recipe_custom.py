# SPDX-License-Identifier: Apache-2.0
"""The recipe of the user's own quantizers; programs find it in `recipe`."""

from collections.abc import Callable
from dataclasses import dataclass

from transformer_engine.common import config, recipe_rules as rules
from transformer_engine.common.recipe_base import Format, Recipe, format_rule, recipe_class, setting


@dataclass(frozen=True)
class QuantizerRole:
    """Role of a quantizer: the argument of a `CustomRecipe`'s function.

    Parameters
    ----------
    module_type : str
        "linear": a linear layer, by itself or part of a larger module. "dpa": the attention of
        queries to keys and values.
    tensor_type : str
        Of a linear layer "input", "weight" or "grad_output". Of an attention "qkv", its queries,
        keys and values; "s", the weights of softmax; "do", the gradient of the output; "dp", that
        of the weights.
    name : str
        Name of the module as the user gave it; of several linear layers in one module followed by
        that of the layer, "fc1" or "fc2".
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""


class QuantizerRequest:
    """Base of what a `CustomRecipe`'s function gives in place of a quantizer that needs state."""


@dataclass(frozen=True)
class DelayedScalingRequest(QuantizerRequest):
    """Asks for delayed scaling of a role, whose scale and history the module keeps.

    The fields are those of `DelayedScaling`; all requests of a module are the same.
    """

    fp8_format: Format = Format.HYBRID
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    scaling_factor_compute_algo: Callable | None = None
    reduce_amax: bool = True


@recipe_class
class CustomRecipe(Recipe):
    """Quantizers per role, from a function of the user.

    For each linear layer ``qfactory(role)`` is called with a `QuantizerRole` for its input, its
    weight and the gradient of its output, once a module, and gives a quantizer or a
    `DelayedScalingRequest`. Quantizers of this library cast inside of the module's plans: each role
    may have another format, and a GEMM of formats that no kernel reads together multiplies them
    out to fp32 and counts ``emulated.mixed``. `IdentityQuantizer` leaves a role in high precision.
    So does a `HybridQuantizer` of two equal ones. Others, subclasses of `Quantizer` and other
    `HybridQuantizer`, are called at their stage of the plan, and what they make is dequantized for
    the GEMMs.

    Parameters
    ----------
    qfactory : callable
        ``qfactory(role) -> Quantizer or QuantizerRequest``.
    fp8_format : Format, default Format.HYBRID
        Of what programs ask for the recipe's element types; quantizers have their own.
    fp8_dpa, fp8_mha : bool, default False
        Run attention in FP8, by the quantizers of its roles: a `DelayedScalingRequest` for all,
        or ``Float8CurrentScalingQuantizer`` for "qkv" (see docs/formats_and_recipes.md).
    backward_override : {None, "high_precision", "dequantized"}, optional
        As of `Float8CurrentScaling`.
    quantization_alignment : int, default 128
        Number of rows that programs which pack sequences should round up to.

    Raises
    ------
    AssertionError
        `fp8_format` is E5M2 or E2M1, or `backward_override` is none of the three.
    ValueError
        `qfactory` can not be called; `quantization_alignment` is no positive integer; a value of
        another field is of a wrong type.
    """

    qfactory: Callable = setting(rules.function)
    fp8_format: Format = setting(format_rule, Format.HYBRID)
    fp8_dpa: bool = setting(rules.boolean, False)
    fp8_mha: bool = setting(rules.boolean, False)
    backward_override: str | None = setting(rules.backward_override, config.TE_BACKWARD_OVERRIDE)
    quantization_alignment: int = setting(
        rules.integer(1, 1 << 30, "an integer of at least 1"), 128
    )

    _KIND = "custom"


for _public in (QuantizerRole, QuantizerRequest, DelayedScalingRequest):
    _public.__module__ = "transformer_engine.common.recipe"
