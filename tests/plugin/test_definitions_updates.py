# SPDX-License-Identifier: Apache-2.0
"""Updates and norms of lists by their definition in torch have the bits of the C code."""

import copy

import pytest
import torch
from buffers import floats
from comparators import assert_bits
from microscaled import groups_of_kinds
from thinning import pairs, triples
from tols import BF16, E4M3, F16, F32

from transformer_engine import _core
from transformer_engine.plugin.definitions import updates

SHAPES = ((), (0, 3), (7,), (33, 16), (3, 64, 5))
DTYPES = (F32, F16, BF16)
CHUNK = 16384
"""Elements whose squares are added up in fp32."""
ADDERS = 512


def values(rng, shape, dtype, kind="any"):
    """Normal numbers, or NaN, Inf and subnormals among them."""
    count = torch.Size(shape).numel()
    if kind == "normal" or not count:
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype).reshape(shape)
    return groups_of_kinds(rng, (1, count), dtype).reshape(shape)


def squares(rng, shape, dtype, kind):
    return values(rng, shape, dtype, kind).abs()


def bits_of(rng, shape):
    """Any 16 bits."""
    return torch.from_numpy(rng.integers(-(2**15), 2**15, shape, dtype="int16")).view(BF16)


def one(value, dtype=F32):
    return None if value is None else torch.tensor([value], dtype=dtype)


def assert_same(kind, flags, lists, flag, numbers, step=3, on_device=(None,) * 3, casts=None):
    """A call by definition leaves the bits of the C code in all that it may write."""
    given = lists, flag, numbers, step, on_device, casts
    found, expected = copy.deepcopy(given), copy.deepcopy(given)
    updates.update(kind, flags, *found)
    _core.update(kind, flags, *expected)
    for mine, theirs in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert_bits(mine, theirs, any_nan=mine.is_floating_point() and mine.element_size() > 1)


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [t for v in value for t in tensors_of(v)] if hasattr(value, "__iter__") else []


def numbers_of(rng, **given):
    named = {
        "lr": 0.01, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "decay": 0.1, "grad_scale": 1.0,
        "momentum": 0.0, "dampening": 0.0, "top": 448.0,
    } | given  # fmt: skip
    return tuple(float(value) for value in named.values())


FLAGS = (0, _core.UPDATE_DECOUPLED | _core.UPDATE_CORRECTED, _core.UPDATE_CORRECTED)
STATES = ("plain", "rounded", "remainder")
WHERE = ("host", "device")
STOPS = (None, 0, 1)


@triples(
    dtype=DTYPES, state=STATES, flags=FLAGS, where=WHERE, stopped=STOPS, kind=("any", "normal")
)
def test_adam(rng, dtype, state, flags, where, stopped, kind):
    if state == "remainder":
        dtype = BF16
    lists = [
        [make(rng, shape, of, kind) for shape in SHAPES]
        for make, of in ((values, dtype), (values, dtype), (values, BF16), (squares, F32))
    ]
    rounded = [values(rng, shape, BF16) for shape in SHAPES] if state == "rounded" else None
    remainder = [bits_of(rng, shape) for shape in SHAPES] if state == "remainder" else None
    on_device = (None,) * 3
    if where == "device":
        on_device = one(0.02), one(0.25), one(int(rng.integers(1, 2**20)), torch.int32)
    numbers = numbers_of(rng, grad_scale=rng.choice([1.0, 0.5, 3.0]))
    flags |= int(rng.choice([0, _core.UPDATE_WRITE_GRAD]))
    step, flag = int(rng.integers(1, 10**6)), one(stopped, torch.int32)
    lists = (*lists, rounded, remainder)
    assert_same(_core.UPDATE_ADAM, flags, lists, flag, numbers, step, on_device)


@triples(
    dtype=DTYPES,
    flags=(0, _core.UPDATE_NESTEROV, _core.UPDATE_FIRST | _core.UPDATE_WRITE_GRAD),
    last=(0, _core.UPDATE_DECAY_LAST),
    momentum=(0.0, 0.9),
    decay=(0.0, 0.1),
    stopped=STOPS,
)
def test_gradient_descent(rng, dtype, flags, last, momentum, decay, stopped):
    lists = [[values(rng, shape, of) for shape in SHAPES] for of in (dtype, F32, F32, F16)]
    if not momentum:
        lists[2] = None
    lists = (*lists[:3], None, lists[3], None)
    numbers = numbers_of(rng, momentum=momentum, dampening=0.2, decay=decay, grad_scale=0.5)
    flag = one(stopped, torch.int32)
    assert_same(_core.UPDATE_SGD, flags | last, lists, flag, numbers)


@pairs(dtype=DTYPES, to=DTYPES, kind=("any", "normal"), where=WHERE, flagged=STOPS)
def test_products(rng, dtype, to, kind, where, flagged):
    lists = [[values(rng, shape, of, kind) for shape in SHAPES] for of in (dtype, to)]
    lists, flag = (*lists, None, None, None, None), one(flagged, torch.int32)
    on_device = (None, one(0.3) if where == "device" else None, None)
    numbers = numbers_of(rng, grad_scale=1.7)
    assert_same(_core.UPDATE_SCALE, 0, lists, flag, numbers, on_device=on_device)


@pairs(power_2=(0, _core.UPDATE_POWER_2), epsilon=(0.0, 1e-3), stopped=STOPS)
def test_scales_of_amaxes(rng, power_2, epsilon, stopped):
    amax = [squares(rng, (shape,), F32, "any") for shape in (1, 7)]
    lists = (amax, *([torch.ones_like(x) for x in amax] for _ in "ab"), None, None, None)
    numbers, flag = numbers_of(rng, eps=epsilon), one(stopped, torch.int32)
    assert_same(_core.UPDATE_RESCALE, power_2, lists, flag, numbers)


@pytest.mark.parametrize("stopped", STOPS)
@pytest.mark.parametrize("kind", [_core.UPDATE_ADAM, _core.UPDATE_SGD])
def test_values_are_cast(rng, kind, stopped):
    """New values are cast by the operator quantize, unless the flag stops all."""
    shapes = (16, 32), (7, 48)
    lists = [[make(rng, shape, F32, "normal") for shape in shapes]
             for make in (values, values, values, squares)]  # fmt: skip
    casts = tuple(
        {
            "mode": _core.SCALING_TENSOR, "row": torch.zeros(shape, dtype=E4M3),
            "row_scales": floats("cpu", 0.0, 0.0), "scale": floats("cpu", 3.0),
            "amax": floats("cpu", 0.0),
        }
        for shape in shapes
    )  # fmt: skip
    lists = (*lists[: 4 if kind == _core.UPDATE_ADAM else 2], *[None] * 4)[:6]
    flag = one(stopped, torch.int32)
    assert_same(kind, 0, lists, flag, numbers_of(rng), casts=casts)


def test_checks_come_first_and_may_be_all(rng):
    x = [torch.ones(3)]
    lists = x, x, x, x, None, None
    updates.update(
        _core.UPDATE_ADAM, _core.UPDATE_CHECK, lists, None, numbers_of(rng), 1, (None,) * 3
    )
    assert x[0].tolist() == [1.0] * 3
    with pytest.raises(ValueError, match="square: is missing"):
        updates.update(
            _core.UPDATE_ADAM, 0, (x, x, x, None, None, None), None, numbers_of(rng), 1, (None,) * 3
        )
    updates.update(_core.UPDATE_ADAM, 0, ([], [], [], [], None, None), None, (0.0,) * 9, 1,
                   (None,) * 3)  # fmt: skip


# ---- norms ---------------------------------------------------------------------------------------


SIZES = (0, 1, 1023, 1025, CHUNK, CHUNK + 1, 3 * CHUNK + 4099)


@pairs(factor=(None, 0.3), per_tensor=(False, True), flagged=STOPS, kind=("any", "normal"))
def test_norms(rng, factor, per_tensor, flagged, kind):
    tensors = [values(rng, (size,), dtype, kind) for size in SIZES for dtype in DTYPES]
    tensors += [values(rng, (6, 8), F32, kind).t(), values(rng, (), BF16, "normal")]
    flags = [one(flagged, torch.int32) for _ in "ab"]
    found = updates.l2norm(tensors, one(factor), flags[0], per_tensor)
    expected = _core.l2norm(tensors, one(factor), flags[1], per_tensor)
    for mine, theirs in zip(found, expected, strict=True):
        assert_bits(mine, theirs, any_nan=True)
    assert flags[0] == flags[1]


def test_norms_of_more_chunks_than_adders(rng):
    x = torch.from_numpy(rng.standard_normal(ADDERS * CHUNK + 5, dtype="float32"))
    for mine, theirs in zip(
        updates.l2norm([x, x[:9]], None, None, True), _core.l2norm([x, x[:9]], None, None, True),
        strict=True,
    ):  # fmt: skip
        assert_bits(mine, theirs)


def test_norms_refuse_what_the_library_refuses():
    with pytest.raises(TypeError, match="dtype i64"):
        updates.l2norm([torch.ones(3, dtype=torch.int64)], None, None, False)
    with pytest.raises(ValueError, match="none: expected some"):
        updates.l2norm([], None, None, False)


def test_checks_of_norms_write_nothing(rng):
    flag, infinite = one(0, torch.int32), [torch.full((3,), torch.inf)]
    assert _core.l2norm(infinite, None, flag, True, _core.L2NORM_CHECK) is None
    assert flag.tolist() == [0]
    with pytest.raises(ValueError, match="flags = 0x2, expected bits of 0x1"):
        _core.l2norm(infinite, None, flag, True, 2 * _core.L2NORM_CHECK)
