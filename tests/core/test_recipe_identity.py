# SPDX-License-Identifier: Apache-2.0
"""Recipes: text, equality, pickles and copies agree with each other."""

import copy
import dataclasses
import functools
import io
import math
import pickle
import pickletools

import pytest
from hypothesis import given, strategies as st

from transformer_engine.common import config
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Format,
    MMParams,
    QParams,
)

pytestmark = pytest.mark.usefixtures("no_variables")

READY = [DelayedScaling, Float8CurrentScaling]
QUANT = ["fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"]
POWER_2 = config.TE_FP8_CURRENT_SCALING_POWER_2_SCALES
OVERRIDE = config.TE_BACKWARD_OVERRIDE

FORMATS = st.sampled_from([Format.E4M3, Format.HYBRID])
MM_PARAMS = st.builds(MMParams, st.booleans())
Q_PARAMS = st.builds(QParams, power_2_scale=st.booleans(), amax_epsilon=st.floats(0, 1))
DELAYED = st.builds(
    DelayedScaling,
    margin=st.integers(-126, 126),
    fp8_format=FORMATS,
    amax_history_len=st.integers(1, 10**6),
    amax_compute_algo=st.sampled_from(["max", "most_recent", max]),
    scaling_factor_compute_algo=st.sampled_from([None, math.ldexp]),
    reduce_amax=st.booleans(),
    measure_first=st.booleans(),
    fp8_dpa=st.booleans(),
    fp8_mha=st.booleans(),
)
CURRENT = st.builds(
    Float8CurrentScaling,
    use_power_2_scales=st.booleans(),
    fp8_format=FORMATS,
    fp8_gemm_fprop=MM_PARAMS,
    fp8_gemm_dgrad=MM_PARAMS,
    fp8_gemm_wgrad=MM_PARAMS,
    backward_override=st.sampled_from([None, "high_precision", "dequantized"]),
)


ROW = st.builds(
    Float8RowScaling,
    use_power_2_scales=st.booleans(),
    fp8_format=FORMATS,
    fp8_gemm_fprop=MM_PARAMS,
    backward_override=st.sampled_from([None, "high_precision", "dequantized"]),
)
BLOCK = st.builds(
    Float8BlockScaling,
    use_f32_scales=st.booleans(),
    fp8_format=FORMATS,
    w_block_scaling_dim=st.sampled_from([1, 2]),
    backward_override=st.sampled_from([None, "high_precision", "dequantized"]),
)
STRATEGIES = {
    DelayedScaling: DELAYED,
    Float8CurrentScaling: CURRENT,
    Float8RowScaling: ROW,
    Float8BlockScaling: BLOCK,
}


@st.composite
def recipes(draw):
    """Any recipe that can be made, assigned QParams included."""
    r = draw(DELAYED | CURRENT | ROW | BLOCK)
    if not r.delayed():
        for name in draw(st.sets(st.sampled_from(QUANT))):
            setattr(r, name, draw(Q_PARAMS))
    return r


# --- identity


@given(recipes(), recipes())
def test_repr_and_equality_agree(a, b):
    assert (repr(a) == repr(b)) is (a == b)
    assert a == copy.copy(a) and repr(a) == repr(copy.copy(a))


@given(recipes(), st.data())
def test_repr_follows_every_write(r, data):
    other = data.draw(STRATEGIES[type(r)])
    name = data.draw(st.sampled_from([f.name for f in dataclasses.fields(r)]))
    before = repr(r)
    same = getattr(r, name) == getattr(other, name)
    setattr(r, name, getattr(other, name))
    assert (repr(r) == before) is same


def test_repr_is_cached():
    r = DelayedScaling()
    assert repr(r) is repr(r)
    old = repr(r)
    r.margin = 1
    assert "margin=1" in repr(r) and repr(r) is repr(r) and repr(r) != old


@pytest.mark.parametrize("algo", ["max", max, lambda history: history])
def test_recipes_can_be_used_in_a_traced_function(algo):
    torch = pytest.importorskip("torch")

    def used(x, r):
        power_2 = r.float8_current_scaling() and r.fp8_quant_bwd_grad.power_2_scale
        return x * r.fp8_format.fp8_max("bwd") + len(repr(r)) + int(power_2)

    compiled = torch.compile(used, backend="eager", fullgraph=True)
    x = torch.ones(1)
    for r in (DelayedScaling(amax_compute_algo=algo), Float8CurrentScaling()):
        assert compiled(x, r) == used(x, r)
        r.fp8_format = Format.E4M3
        if r.float8_current_scaling():
            r.use_power_2_scales = True
        assert compiled(x, r) == used(x, r)


def test_repr_text():
    assert repr(DelayedScaling(amax_compute_algo=max)) == (
        "DelayedScaling(margin=0, fp8_format=Format.HYBRID, amax_history_len=1024, "
        "amax_compute_algo=<builtins.max>, scaling_factor_compute_algo=None, reduce_amax=True, "
        "fp8_dpa=False, fp8_mha=False, backward_override=None)"
    )


def test_not_hashable_and_not_equal_to_other_things():
    for r in (DelayedScaling(), Float8CurrentScaling()):
        with pytest.raises(TypeError, match="unhashable"):
            hash(r)
        assert r != 1 and r != repr(r)
    assert DelayedScaling() != Float8CurrentScaling()


def algo(history):
    return history


class Algo:
    """Callables of several kinds."""

    def method(self, history):
        return history

    @classmethod
    def class_method(cls, history):
        return history

    def __call__(self, history):
        return history


@pytest.mark.parametrize("function", [algo, Algo.class_method, Algo.method, max, math.ldexp])
def test_importable_callable_is_named(function):
    text = repr(DelayedScaling(amax_compute_algo=function))
    assert f"amax_compute_algo=<{function.__module__}.{function.__qualname__}>" in text


def make_local():
    return lambda history: history


@pytest.mark.parametrize(
    "make",
    [make_local, Algo, lambda: Algo().method, lambda: functools.partial(algo)],
    ids=["lambda", "instance", "method", "partial"],
)
def test_other_callables_are_told_apart(make):
    one, two = (DelayedScaling(amax_compute_algo=make()) for _ in range(2))
    assert " at 0x" in repr(one)
    assert repr(one) != repr(two) and one != two
    again = DelayedScaling(amax_compute_algo=one.amax_compute_algo)
    assert repr(again) == repr(one) and again == one


def test_method_of_one_object_is_one_callable():
    obj = Algo()
    one, two = (DelayedScaling(amax_compute_algo=obj.method) for _ in range(2))
    assert one.amax_compute_algo is not two.amax_compute_algo
    assert repr(one) == repr(two) and one == two


# --- pickling and copying

ALLOWED = {
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowScaling",
    "Format",
    "_FormatHelper",
    "MMParams",
    "QParams",
}


class AllowList(pickle.Unpickler):
    """Load what an allow-list of class names permits."""

    def find_class(self, module, name):
        assert module == "transformer_engine.common.recipe" and name in ALLOWED, (module, name)
        return super().find_class(module, name)


def numerics_only(r):
    """Replace callables, whose pickles name their own modules."""
    r = copy.copy(r)
    if r.delayed():
        r.amax_compute_algo, r.scaling_factor_compute_algo = "max", None
    return r


@pytest.mark.parametrize("protocol", [2, 4, 5])
@given(r=recipes())
def test_pickle_names_public_classes_only(protocol, r):
    r = numerics_only(r)
    repr(r)  # the cached text must not travel
    data = pickle.dumps(r, protocol)
    back = AllowList(io.BytesIO(data)).load()
    assert type(back) is type(r) and back == r and repr(back) == repr(r)
    opcodes = {op.name: arg for op, arg, _ in pickletools.genops(data)}
    assert not opcodes.keys() & {"INST", "OBJ", "PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"}
    assert "_repr_text" not in {arg for _, arg, _ in pickletools.genops(data)}


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("value", [*Format, MMParams(False), QParams(True, 1.0)])
def test_pickle_of_the_parts(protocol, value):
    back = AllowList(io.BytesIO(pickle.dumps(value, protocol))).load()
    assert back == value and (back is value) is isinstance(value, Format)


@given(recipes())
def test_copies_are_equal_and_independent(r):
    for copied in (copy.copy(r), copy.deepcopy(r), pickle.loads(pickle.dumps(r))):
        assert copied == r
        copied.fp8_format = Format.E4M3 if r.fp8_format is Format.HYBRID else Format.HYBRID
        assert copied != r


def test_unpickling_ignores_the_environment(monkeypatch):
    data = [pickle.dumps(cls()) for cls in READY]
    monkeypatch.setenv(POWER_2.name, "1")
    monkeypatch.setenv(OVERRIDE.name, "dequantized")
    delayed, current = (pickle.loads(d) for d in data)
    assert delayed.backward_override is None and current.backward_override is None
    assert current.use_power_2_scales is False


def test_state_of_another_version(monkeypatch):
    monkeypatch.setenv(OVERRIDE.name, "dequantized")
    monkeypatch.setenv(POWER_2.name, "1")
    current = Float8CurrentScaling.__new__(Float8CurrentScaling)
    current.__setstate__({"fp8_format": Format.E4M3, "from_elsewhere": 3})
    assert current.from_elsewhere == 3
    assert current == Float8CurrentScaling(False, Format.E4M3, backward_override=None)
    with pytest.raises(AssertionError, match=r"Float8CurrentScaling\.fp8_format=Format\.E5M2"):
        current.__setstate__({"fp8_format": Format.E5M2})
