# SPDX-License-Identifier: Apache-2.0
"""The recipes MXFP8BlockScaling and NVFP4BlockScaling: fields, rules, derived QParams, identity."""

import copy
import dataclasses
import pickle

import pytest

from transformer_engine import _core
from transformer_engine.common import config
from transformer_engine.common.operand_casts import quantization_of
from transformer_engine.common.recipe import (
    DelayedScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
)

pytestmark = pytest.mark.usefixtures("no_variables")

KINDS = [MXFP8BlockScaling, NVFP4BlockScaling]
kinds = pytest.mark.parametrize("cls", KINDS)
DEFAULTS = {
    MXFP8BlockScaling: {
        "margin": 0,
        "fp8_format": Format.E4M3,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
        "enable_2d_quantization": False,
    },
    NVFP4BlockScaling: {
        "disable_rht": False,
        "disable_stochastic_rounding": False,
        "disable_2d_quantization": False,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "fp4_format": Format.E2M1,
        "fp8_format": Format.E4M3,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    },
}
VARIABLES = {
    "disable_rht": config.TE_NVFP4_DISABLE_RHT,
    "disable_stochastic_rounding": config.TE_NVFP4_DISABLE_STOCHASTIC_ROUNDING,
    "disable_2d_quantization": config.TE_NVFP4_DISABLE_2D_QUANTIZATION,
    "row_scaled_activation": config.TE_NVFP4_ROW_SCALED_ACTIVATION,
    "nvfp4_4over6": config.TE_NVFP4_4OVER6,
    "nvfp4_4over6_e4m3_use_256": config.TE_NVFP4_4OVER6_E4M3_USE_256,
    "nvfp4_4over6_err_mode": config.TE_NVFP4_4OVER6_ERR_MODE,
}
TEXTS = {"nvfp4_4over6": "all", "nvfp4_4over6_e4m3_use_256": "weights"}
TEXTS["nvfp4_4over6_err_mode"] = "MSE"


@kinds
def test_fields_in_their_order(cls):
    made = cls()
    assert {f.name: getattr(made, f.name) for f in dataclasses.fields(cls)} == DEFAULTS[cls]
    assert [f.name for f in dataclasses.fields(cls)] == list(DEFAULTS[cls])


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("ours", [True, False], ids=["TE", "NVTE"])
def test_defaults_from_the_environment(name, ours, monkeypatch):
    variable = VARIABLES[name]
    text = TEXTS.get(name, "1")
    monkeypatch.setenv(variable.name if ours else variable.aliases[0], text)
    assert getattr(NVFP4BlockScaling(), name) == (True if text == "1" else text)


@kinds
def test_backward_override_from_the_environment(cls, monkeypatch):
    monkeypatch.setenv(config.TE_BACKWARD_OVERRIDE.name, "dequantized")
    assert cls().backward_override == "dequantized"


@pytest.mark.parametrize(
    ("cls", "changes", "error"),
    [
        (MXFP8BlockScaling, {"fp8_format": Format.E5M2}, AssertionError),
        (MXFP8BlockScaling, {"fp8_format": Format.E2M1}, AssertionError),
        (MXFP8BlockScaling, {"backward_override": "other"}, AssertionError),
        (MXFP8BlockScaling, {"margin": 0.5}, ValueError),
        (MXFP8BlockScaling, {"enable_2d_quantization": 2}, ValueError),
        (NVFP4BlockScaling, {"fp4_format": Format.E4M3}, AssertionError),
        (NVFP4BlockScaling, {"fp8_format": Format.HYBRID}, AssertionError),
        (NVFP4BlockScaling, {"nvfp4_4over6": "some"}, AssertionError),
        (NVFP4BlockScaling, {"nvfp4_4over6_e4m3_use_256": True}, AssertionError),
        (NVFP4BlockScaling, {"nvfp4_4over6_err_mode": "mae"}, AssertionError),
        (NVFP4BlockScaling, {"disable_rht": "no"}, ValueError),
    ],
)
def test_wrong_values(cls, changes, error):
    with pytest.raises(error, match=next(iter(changes))):
        cls(**changes)
    made = cls()
    (name, value), before = next(iter(changes.items())), repr(made)
    with pytest.raises(error):
        setattr(made, name, value)
    assert repr(made) == before


@kinds
def test_copies_pickles_and_text(cls):
    made = cls(backward_override="high_precision")
    assert copy.deepcopy(made) == made
    for protocol in range(2, 6):
        data = pickle.dumps(made, protocol)
        assert b"recipe_microscaling" not in data and b"transformer_engine.common.recipe" in data
        twin = pickle.loads(data)
        assert type(twin) is cls and repr(twin) == repr(made) and twin == made
    assert repr(made) != repr(cls()) and made != cls() and repr(made).startswith(cls.__name__)
    for name in DEFAULTS[cls]:
        assert f"{name}=" in repr(made)


def test_kinds_of_recipes():
    assert MXFP8BlockScaling.mxfp8() and MXFP8BlockScaling().mxfp8()
    assert NVFP4BlockScaling.nvfp4() and NVFP4BlockScaling().nvfp4()
    for cls in (*KINDS, DelayedScaling):
        assert cls.mxfp8() is (cls is MXFP8BlockScaling)
        assert cls.nvfp4() is (cls is NVFP4BlockScaling)
        assert not cls.float8_block_scaling() and not cls.float8_current_scaling()


# ---- derived QParams -----------------------------------------------------------------------------


def test_derived_qparams():
    made = NVFP4BlockScaling()
    assert made.fp4_quant_fwd_inp == QParams(random_hadamard_transform=True)
    assert made.fp4_quant_fwd_weight == QParams(fp4_2d_quantization=True)
    both = QParams(random_hadamard_transform=True, stochastic_rounding=True)
    assert made.fp4_quant_bwd_grad == both == NVFP4BlockScaling.fp4_quant_bwd_grad
    made.disable_rht = made.disable_stochastic_rounding = made.disable_2d_quantization = True
    for name in ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad"):
        assert getattr(made, name) == QParams()


def test_assigned_qparams():
    made, before = NVFP4BlockScaling(), repr(NVFP4BlockScaling())
    made.fp4_quant_bwd_grad = QParams(random_hadamard_transform=True)
    assert "fp4_quant_bwd_grad=" in repr(made) and repr(made) != before
    assert pickle.loads(pickle.dumps(made)).fp4_quant_bwd_grad == made.fp4_quant_bwd_grad
    del made.fp4_quant_bwd_grad
    assert repr(made) == before and made.fp4_quant_bwd_grad.stochastic_rounding
    for wrong in (QParams(power_2_scale=True), QParams(amax_epsilon=1.0), None):
        with pytest.raises(ValueError, match="fp4_quant_fwd_inp"):
            made.fp4_quant_fwd_inp = wrong


# ---- what plans are made of ----------------------------------------------------------------------


def options_of(found):
    """What the casts of input, weight and gradient are asked for."""
    return tuple(cast.options for cast in found.casts)


RHT, SR, SQUARE = _core.CAST_HADAMARD, _core.CAST_STOCHASTIC, _core.CAST_TILES_2D
OVER, SQUARED, TO_256 = _core.CAST_FOUR_OVER_SIX, _core.CAST_SQUARED, _core.CAST_TO_256
PLAIN = {
    "disable_rht": True,
    "disable_stochastic_rounding": True,
    "disable_2d_quantization": True,
}


def test_quantization():
    found = quantization_of(MXFP8BlockScaling(fp8_format=Format.HYBRID, margin=2))
    assert {cast.recipe for cast in found.casts} == {_core.RECIPE_MXFP8}
    assert [cast.dtype for cast in found.casts] == [_core.DTYPE_E4M3] * 2 + [_core.DTYPE_E5M2]
    assert [cast.margin for cast in found.casts] == [2, 2, 2]
    assert options_of(quantization_of(MXFP8BlockScaling(enable_2d_quantization=True))) == (
        0,
        SQUARE,
        0,
    )
    found = quantization_of(NVFP4BlockScaling())
    assert {cast.recipe for cast in found.casts} == {_core.RECIPE_NVFP4}
    assert options_of(found) == (RHT, SQUARE, RHT | SR)
    assert options_of(quantization_of(NVFP4BlockScaling(**PLAIN))) == (0, 0, 0)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"nvfp4_4over6": "weights"}, (0, OVER | TO_256, 0)),
        ({"nvfp4_4over6": "activations"}, (OVER | TO_256, 0, 0)),
        (
            {"nvfp4_4over6": "all", "nvfp4_4over6_err_mode": "MSE"},
            (OVER | SQUARED | TO_256, OVER | SQUARED | TO_256, 0),
        ),
        (
            {"nvfp4_4over6": "all", "nvfp4_4over6_e4m3_use_256": "weights"},
            (OVER, OVER | TO_256, 0),
        ),
        ({"row_scaled_activation": True}, (_core.CAST_ROW_SCALED, 0, 0)),
    ],
)
def test_nvfp4_scopes(fields, options):
    assert options_of(quantization_of(NVFP4BlockScaling(**PLAIN, **fields))) == options


def test_4over6_does_not_go_with_the_transform():
    with pytest.raises(ValueError, match="nvfp4_4over6 of activations, .*disable_rht=True"):
        quantization_of(NVFP4BlockScaling(nvfp4_4over6="all"))
    recipe = NVFP4BlockScaling(nvfp4_4over6="weights")
    assert options_of(quantization_of(recipe)) == (RHT, SQUARE | OVER | TO_256, RHT | SR)


@pytest.mark.parametrize("cls", [MXFP8BlockScaling, NVFP4BlockScaling])
def test_a_backward_in_high_precision_casts_no_gradient(cls):
    plain = quantization_of(cls())
    found = [quantization_of(cls(backward_override=how)) for how in config.BACKWARD_OVERRIDES]
    assert [one.backward for one in (plain, *found)] == [0, 1, 2]
    for one in found:
        assert options_of(one) == tuple(o & ~(RHT | SR) for o in options_of(plain))


def test_what_modules_refuse():
    with pytest.raises(NotImplementedError, match="fp8_dpa"):
        quantization_of(MXFP8BlockScaling(fp8_dpa=True))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("fp4_quant_fwd_inp", QParams(), ValueError),
        ("fp4_quant_bwd_grad", QParams(stochastic_rounding=True), ValueError),
        ("fp4_quant_fwd_weight", QParams(random_hadamard_transform=True), ValueError),
        ("fp4_quant_fwd_weight", QParams(stochastic_rounding=True), NotImplementedError),
    ],
)
def test_qparams_that_no_gemm_is_made_of(name, value, error):
    made = NVFP4BlockScaling()
    setattr(made, name, value)
    with pytest.raises(error, match="NVFP4BlockScaling"):
        quantization_of(made)
