# SPDX-License-Identifier: Apache-2.0
"""Recipes: defaults, rules, and what existing programs do with them."""

import copy
import dataclasses
import inspect
import itertools
import math
import pickle
import warnings

import numpy as np
import pytest

from transformer_engine.common import config, recipe
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

pytestmark = pytest.mark.usefixtures("no_variables")

MEASURING = [Float8CurrentScaling, Float8BlockScaling, Float8RowScaling]
READY = [DelayedScaling, *MEASURING]
DIMS = ["x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"]
GEMMS = ["fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"]
QUANT = ["fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"]
POWER_2 = config.TE_FP8_CURRENT_SCALING_POWER_2_SCALES
F32_SCALES = config.TE_FP8_BLOCK_SCALING_FP32_SCALES
OVERRIDE = config.TE_BACKWARD_OVERRIDE

# --- formats


@pytest.mark.parametrize(
    ("name", "fwd", "bwd"),
    [
        ("E2M1", ("e2m1", 6), ("e2m1", 6)),
        ("E4M3", ("e4m3", 448), ("e4m3", 448)),
        ("E5M2", ("e5m2", 57344), ("e5m2", 57344)),
        ("HYBRID", ("e4m3", 448), ("e5m2", 57344)),
    ],
)
def test_format(name, fwd, bwd):
    member = getattr(Format, name)
    assert member.value == (fwd[1], bwd[1]) == (member.value.max_fwd, member.value.max_bwd)
    assert (member.dtype_name("fwd"), member.fp8_max("fwd")) == fwd
    assert (member.dtype_name("bwd"), member.fp8_max("bwd")) == bwd
    assert Format((fwd[1], bwd[1])) is member


@pytest.mark.parametrize("direction", ["forward", "", None, 0])
def test_format_wrong_direction(direction):
    for method in (Format.HYBRID.fp8_max, Format.HYBRID.dtype_name):
        with pytest.raises(ValueError, match=f"'fwd' or 'bwd', got {direction!r}"):
            method(direction)


# --- defaults and kinds


def test_defaults_of_delayed_scaling():
    assert dataclasses.asdict(DelayedScaling()) == {
        "margin": 0,
        "fp8_format": Format.HYBRID,
        "amax_history_len": 1024,
        "amax_compute_algo": "max",
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
        "measure_first": False,
    }


def test_defaults_of_current_scaling():
    r = Float8CurrentScaling()
    assert [f.name for f in dataclasses.fields(r)] == [
        "use_power_2_scales",
        "fp8_format",
        "fp8_gemm_fprop",
        "fp8_gemm_dgrad",
        "fp8_gemm_wgrad",
        "fp8_dpa",
        "fp8_mha",
        "backward_override",
    ]
    assert r.use_power_2_scales is False and r.fp8_format is Format.HYBRID
    assert r.fp8_gemm_fprop == MMParams(False)
    assert r.fp8_gemm_dgrad == r.fp8_gemm_wgrad == MMParams(True) == MMParams()
    assert (r.fp8_dpa, r.fp8_mha, r.backward_override) == (False, False, None)
    assert [getattr(r, name) for name in QUANT] == [QParams()] * 3


def test_defaults_of_block_scaling():
    assert dataclasses.asdict(Float8BlockScaling()) == {
        "use_f32_scales": False,
        "fp8_format": Format.E4M3,
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        **dict.fromkeys(GEMMS, {"use_split_accumulator": True}),
        "fp8_dpa": False,
        "fp8_mha": False,
        "backward_override": None,
    }
    made = Float8BlockScaling(use_f32_scales=True)
    assert [getattr(Float8BlockScaling(), name) for name in QUANT] == [QParams(True)] * 3
    assert [getattr(made, name) for name in QUANT] == [QParams(False)] * 3


def test_defaults_of_row_scaling():
    """As those of current scaling."""
    made, like = Float8RowScaling(), Float8CurrentScaling()
    assert dataclasses.asdict(made) == dataclasses.asdict(like)
    assert [getattr(made, name) for name in QUANT] == [QParams()] * 3


def test_one_kind_of_tensor_has_square_tiles():
    for pair in itertools.combinations(DIMS, 2):
        dims = {name: 2 if name in pair else 1 for name in DIMS}
        with pytest.raises(AssertionError, match=f"{pair[0]} and {pair[1]} are 2"):
            Float8BlockScaling(**dims)
    r = Float8BlockScaling()
    with pytest.raises(AssertionError, match="x_block_scaling_dim and w_block_scaling_dim are 2"):
        r.x_block_scaling_dim = 2
    assert r == Float8BlockScaling() and repr(r) == repr(Float8BlockScaling())
    r.w_block_scaling_dim = 1
    r.x_block_scaling_dim = 2
    assert r == Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1)
    assert pickle.loads(pickle.dumps(r)) == r


def test_defaults_of_the_parameters():
    assert dataclasses.astuple(MMParams()) == (True,)
    assert dataclasses.astuple(QParams()) == (False, 0.0, False, False, False)


def test_positional_arguments_and_signature():
    assert DelayedScaling(3, Format.E4M3, 16, "most_recent") == DelayedScaling(
        margin=3, fp8_format=Format.E4M3, amax_history_len=16, amax_compute_algo="most_recent"
    )
    for cls in READY:
        assert list(inspect.signature(cls).parameters) == [f.name for f in dataclasses.fields(cls)]
    with pytest.raises(TypeError, match="positional"):
        DelayedScaling(*range(20))


@pytest.mark.parametrize("cls", [*READY, MXFP8BlockScaling, NVFP4BlockScaling, Recipe])
def test_kinds(cls):
    kinds = {
        "delayed": {DelayedScaling},
        "float8_current_scaling": {Float8CurrentScaling},
        "float8_per_tensor_scaling": {DelayedScaling, Float8CurrentScaling},
        "float8_block_scaling": {Float8BlockScaling},
        "float8_row_scaling": {Float8RowScaling},
        "mxfp8": {MXFP8BlockScaling},
        "nvfp4": {NVFP4BlockScaling},
        "custom": set(),
    }
    for method, members in kinds.items():
        assert getattr(cls, method)() is (cls in members)
        if cls in READY:
            assert getattr(cls(), method)() is (cls in members)


# --- rules, in the constructor and on assignment

NOT_BOOL = [2, -1, "True", None, 0.5, []]
WRONG = [
    (DelayedScaling, "margin", ValueError, [127, -127, 0.5, "1", None, True]),
    (DelayedScaling, "amax_history_len", ValueError, [0, -1, 1.5, "16", None, True]),
    (DelayedScaling, "amax_compute_algo", ValueError, ["mean", None, 3, ["max"]]),
    (DelayedScaling, "scaling_factor_compute_algo", ValueError, ["max", 3]),
    (DelayedScaling, "reduce_amax", ValueError, NOT_BOOL),
    (DelayedScaling, "measure_first", ValueError, NOT_BOOL),
    (DelayedScaling, "backward_override", AssertionError, ["high_precision", "dequantized", 0]),
    (Float8CurrentScaling, "use_power_2_scales", ValueError, NOT_BOOL),
    (Float8RowScaling, "use_power_2_scales", ValueError, NOT_BOOL),
    (Float8BlockScaling, "use_f32_scales", ValueError, NOT_BOOL),
    *[
        (Float8BlockScaling, f"{of}_block_scaling_dim", AssertionError, [0, 3, "1", None, True])
        for of in ("x", "w", "grad")
    ],
    *[
        (Float8BlockScaling, f"fp8_gemm_{name}", AssertionError, [MMParams(False)])
        for name in ("fprop", "dgrad", "wgrad")
    ],
    *[
        (cls, name, AssertionError, [True])
        for cls in (Float8BlockScaling, Float8RowScaling)
        for name in ("fp8_dpa", "fp8_mha")
    ],
    *[(cls, "backward_override", AssertionError, ["bf16", "", 0]) for cls in MEASURING],
    *[
        (cls, f"fp8_gemm_{name}", ValueError, [True, None, QParams()])
        for cls in MEASURING
        for name in ("fprop", "dgrad", "wgrad")
    ],
    *[
        (cls, name, error, values)
        for cls in READY
        for name, error, values in (
            ("fp8_dpa", ValueError, NOT_BOOL),
            ("fp8_mha", ValueError, NOT_BOOL),
            ("fp8_format", AssertionError, [Format.E5M2, Format.E2M1]),
            ("fp8_format", ValueError, ["HYBRID", "fp8", None, 448]),
        )
    ],
]


@pytest.mark.parametrize(
    ("cls", "name", "error", "value"),
    [(cls, name, error, value) for cls, name, error, values in WRONG for value in values],
)
def test_wrong_value_is_refused_and_changes_nothing(cls, name, error, value):
    shown = str(value) if isinstance(value, Format) else repr(value)
    r = cls()
    before = repr(r)
    for write in (lambda: cls(**{name: value}), lambda: setattr(r, name, value)):
        with pytest.raises(error) as e:
            write()
        assert f"{cls.__name__}.{name}" in str(e.value)
        assert shown in str(e.value)
    assert repr(r) == before and r == cls()


def test_every_field_has_a_rule_and_a_wrong_value_here():
    for cls in READY:
        names = {f.name for f in dataclasses.fields(cls)}
        assert names == cls._RULES.keys() - set(QUANT)
        assert names == {name for c, name, *_ in WRONG if c is cls}


def test_format_as_text_gets_the_fix():
    with pytest.raises(ValueError, match=r"pass Format\.HYBRID \(from transformer_engine"):
        DelayedScaling(fp8_format="HYBRID")
    with pytest.raises(ValueError, match=r"pass Format\.E4M3 \(from transformer_engine"):
        Float8CurrentScaling().fp8_format = "e4m3"


def test_values_are_stored_in_one_type():
    r = DelayedScaling(margin=np.int64(2), amax_history_len=np.int32(16), reduce_amax=0, fp8_dpa=1)
    assert [type(v) for v in (r.margin, r.amax_history_len)] == [int, int]
    assert r.reduce_amax is False and r.fp8_dpa is True
    assert repr(r) == repr(DelayedScaling(2, amax_history_len=16, reduce_amax=False, fp8_dpa=True))


@pytest.mark.parametrize("value", NOT_BOOL)
def test_parameters_refuse_what_is_no_bool(value):
    with pytest.raises(ValueError, match=r"MMParams\.use_split_accumulator"):
        MMParams(value)
    for f in dataclasses.fields(QParams):
        if f.name != "amax_epsilon":
            with pytest.raises(ValueError, match=rf"QParams\.{f.name}"):
                QParams(**{f.name: value})


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf, -math.inf, "0", None])
def test_amax_epsilon_out_of_range(value):
    with pytest.raises(ValueError, match=r"QParams\.amax_epsilon.*got"):
        QParams(amax_epsilon=value)


def test_parameters_are_frozen_and_print_one_way():
    assert repr(QParams(amax_epsilon=0)) == repr(QParams(amax_epsilon=-0.0)) == repr(QParams())
    assert repr(MMParams(1)) == repr(MMParams(True)) and hash(MMParams(1)) == hash(MMParams(True))
    for value in (MMParams(), QParams()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, False)


def test_fields_can_not_be_deleted():
    for r in (DelayedScaling(), Float8CurrentScaling()):
        with pytest.raises(AttributeError, match="fp8_format"):
            del r.fp8_format
        assert r.fp8_format is Format.HYBRID


# --- arguments that recipes do not have


def test_arguments_of_client_programs_are_dropped_in_silence():
    extras = {
        "interval": 1,
        "override_linear_precision": (False, False, False),
        "params_dtype": object(),
        "device": "cuda",
        "opt_level": "O2",
        "backend": "TE",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cls in READY:
            r = cls(fp8_format=Format.E4M3, **extras)
            assert r == cls(fp8_format=Format.E4M3)
            assert not extras.keys() & vars(r).keys()


@pytest.mark.parametrize("cls", READY)
def test_other_unknown_arguments_raise(cls):
    with pytest.raises(TypeError, match=f"{cls.__name__} .*amax_histroy_len=3.*fp8_format"):
        cls(fp8_format=Format.E4M3, amax_histroy_len=3, device="cuda")


def test_quantizer_parameters_are_no_constructor_arguments():
    with pytest.raises(TypeError, match="fp8_quant_fwd_inp"):
        Float8CurrentScaling(fp8_quant_fwd_inp=QParams(power_2_scale=True))


class Subclass(DelayedScaling):
    """As a training framework does it: own arguments, extras handed on."""

    def __init__(self, settings, fp8_format, override_linear_precision=(False, False, False)):
        super().__init__(
            margin=settings["margin"],
            fp8_format=fp8_format,
            override_linear_precision=override_linear_precision,
            params_dtype=None,
            device="cuda",
        )
        self.note = "mine"


def test_subclass_that_hands_on_extras():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        r = Subclass({"margin": 2}, Format.E4M3)
    assert (r.margin, r.fp8_format, r.note) == (2, Format.E4M3, "mine")
    assert r.delayed() and not r.float8_current_scaling()
    assert repr(r).startswith("Subclass(margin=2, ")
    assert r != DelayedScaling(margin=2, fp8_format=Format.E4M3)
    back = pickle.loads(pickle.dumps(r))
    assert back == r and back.note == "mine"
    with pytest.raises(ValueError, match=r"Subclass\.margin"):
        Subclass({"margin": "2"}, Format.E4M3)


@dataclasses.dataclass(repr=False, eq=False)
class WithField(Float8CurrentScaling):
    """A subclass with a field of its own."""

    labels: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(init=False, repr=False, eq=False)
class WithFieldSetLate(DelayedScaling):
    """A subclass that sets its field after the base is constructed."""

    labels: list

    def __init__(self, labels=()):
        super().__init__(margin=1)
        self.labels = list(labels)


@pytest.mark.parametrize("cls", [WithField, WithFieldSetLate])
def test_subclass_with_a_field(cls):
    assert cls(labels=[1]) != cls(labels=[]) and "labels=[1]" in repr(cls(labels=[1]))
    for copied in (copy.deepcopy(cls(labels=[1])), pickle.loads(pickle.dumps(cls(labels=[1])))):
        assert copied == cls(labels=[1]) and repr(copied) == repr(cls(labels=[1]))


def test_pickle_that_lacks_a_required_field():
    r = WithFieldSetLate.__new__(WithFieldSetLate)
    with pytest.raises(ValueError, match="WithFieldSetLate lacks 'labels'"):
        r.__setstate__({"margin": 1})


# --- environment


@pytest.mark.parametrize("name", [POWER_2.name, *POWER_2.aliases])
def test_power_2_scales_from_the_environment(name, monkeypatch):
    before = Float8CurrentScaling()
    monkeypatch.setenv(name, "1")
    r = Float8CurrentScaling()
    assert r.use_power_2_scales is True
    assert Float8CurrentScaling.fp8_quant_fwd_inp == r.fp8_quant_fwd_inp == QParams(True)
    assert Float8CurrentScaling(use_power_2_scales=False) == before  # the argument wins
    assert before.use_power_2_scales is False
    monkeypatch.delenv(name)
    assert r.use_power_2_scales is True
    assert Float8CurrentScaling.fp8_quant_fwd_inp == QParams()


@pytest.mark.parametrize("name", [OVERRIDE.name, *OVERRIDE.aliases])
def test_backward_override_from_the_environment(name, monkeypatch):
    monkeypatch.setenv(name, "dequantized")
    assert Float8CurrentScaling().backward_override == "dequantized"
    assert Float8CurrentScaling(backward_override=None).backward_override is None
    with pytest.raises(AssertionError, match=name):
        DelayedScaling()
    assert DelayedScaling(backward_override=None).backward_override is None
    monkeypatch.setenv(name, "maybe")
    for cls in READY:
        with pytest.raises(ValueError, match=f"{name}='maybe'.*high_precision"):
            cls()


@pytest.mark.parametrize("name", [F32_SCALES.name, *F32_SCALES.aliases])
def test_f32_scales_from_the_environment(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    r = Float8BlockScaling()
    assert r.use_f32_scales is True
    assert Float8BlockScaling.fp8_quant_fwd_inp == r.fp8_quant_fwd_inp == QParams(False)
    assert Float8BlockScaling(use_f32_scales=False).fp8_quant_bwd_grad == QParams(True)
    monkeypatch.delenv(name)
    assert r.use_f32_scales is True


# --- quantizer parameters of current scaling


def test_quantizer_parameters_follow_the_recipe_until_assigned():
    r = Float8CurrentScaling(use_power_2_scales=True)
    assert [getattr(r, name) for name in QUANT] == [QParams(power_2_scale=True)] * 3
    r.fp8_quant_bwd_grad = QParams(amax_epsilon=0.5)
    r.use_power_2_scales = False
    assert r.fp8_quant_fwd_inp == r.fp8_quant_fwd_weight == QParams()
    assert r.fp8_quant_bwd_grad == QParams(amax_epsilon=0.5)
    assert Float8CurrentScaling().fp8_quant_bwd_grad == QParams()  # that instance only
    del r.fp8_quant_bwd_grad
    assert r == Float8CurrentScaling()


@pytest.mark.parametrize("name", QUANT)
def test_assigned_quantizer_parameters_are_part_of_the_identity(name):
    plain, r = Float8CurrentScaling(), Float8CurrentScaling()
    setattr(r, name, QParams(amax_epsilon=1e-3))
    assert r != plain and f"{name}={QParams(amax_epsilon=1e-3)!r}" in repr(r)
    setattr(r, name, QParams())  # the same numerics as no assignment
    assert r == plain and repr(r) == repr(plain)
    r.use_power_2_scales = True  # and now they are not
    other = Float8CurrentScaling(use_power_2_scales=True)
    assert r != other and repr(r) != repr(other)


@pytest.mark.parametrize("name", QUANT)
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        MMParams(),
        QParams(random_hadamard_transform=True),
        QParams(stochastic_rounding=True),
        QParams(fp4_2d_quantization=True),
    ],
)
def test_wrong_quantizer_parameters(name, value):
    r = Float8CurrentScaling()
    with pytest.raises(ValueError, match=rf"Float8CurrentScaling\.{name}"):
        setattr(r, name, value)
    assert r == Float8CurrentScaling()


# --- recipes to come


def test_everything_public_is_defined_here():
    for name in recipe.__all__:
        assert getattr(recipe, name).__module__ == "transformer_engine.common.recipe"


def factory(role):
    """Of a CustomRecipe, importable for pickles."""
    return role


def test_custom():
    made = recipe.CustomRecipe(factory, fp8_format=Format.E4M3)
    assert isinstance(made, Recipe) and made.custom() and recipe.CustomRecipe.custom()
    assert made.quantization_alignment == 128 and not made.fp8_dpa and not made.delayed()
    assert "factory" in repr(made) and "E4M3" in repr(made)
    assert copy.deepcopy(made) == made
    for protocol in range(2, 6):
        twin = pickle.loads(pickle.dumps(made, protocol))
        assert twin == made and repr(twin) == repr(made)
    for other in (Recipe, DelayedScaling, Float8CurrentScaling, DelayedScaling()):
        assert not other.custom()
    for wrong in (3, None):
        with pytest.raises(ValueError, match="qfactory must be a function"):
            recipe.CustomRecipe(wrong)
    with pytest.raises(ValueError, match="quantization_alignment"):
        made.quantization_alignment = 0
    with pytest.raises(AssertionError, match="E5M2"):
        made.fp8_format = Format.E5M2
