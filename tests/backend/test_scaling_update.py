# SPDX-License-Identifier: Apache-2.0
"""scaling_update: one step of delayed scaling, in place, bit for bit."""

import numpy as np
import pytest
import torch
from buffers import Poisoned, name_of, op_count
from comparators import assert_bits
from hypothesis import given, strategies as st
from reference import FLT_MAX, FP8_MAX, delayed_update
from tols import BF16, E4M3, E5M2, F32

from transformer_engine import _core

INF, NAN = float("inf"), float("nan")
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
SPECIAL = [0.0, INF, NAN, SMALLEST, 1.0e-37, float(FLT_MAX), 1.0, 448.0]


class Chunk:
    """Scale and history on a device, side by side with what they must be."""

    def __init__(self, length, slots, device, layout="dense"):
        self.scale = Poisoned((slots,), F32, device)
        self.history = Poisoned((length, slots), F32, device, layout=layout)
        self.expected = np.ones(slots, np.float32), np.zeros((length, slots), np.float32)
        self.load(*self.expected)

    def load(self, scale, history):
        """Start from given values."""
        self.expected = np.float32(scale), np.float32(history)
        self.scale.put(torch.from_numpy(self.expected[0]))
        self.history.put(torch.from_numpy(self.expected[1]))

    def record(self, amaxes):
        """What the casts of one step leave in row 0."""
        row = torch.from_numpy(np.float32(amaxes))
        self.history.tensor[0].copy_(row)
        self.expected[1][0] = row.numpy()

    def step(self, fp8_max, most_recent=False):
        """Update both and compare."""
        _core.scaling_update(self.scale.tensor, self.history.tensor, fp8_max, algo=int(most_recent))
        self.expected = delayed_update(*self.expected, fp8_max, most_recent)
        assert_bits(self.scale.tensor, torch.from_numpy(self.expected[0]))
        assert_bits(self.history.tensor, torch.from_numpy(self.expected[1]))
        assert self.scale.untouched() and self.history.untouched()


def test_worked_example(device):
    """L = 4, E4M3, "max": the numbers of the definition."""
    scale, history = torch.ones(1, device=device), torch.zeros(4, 1, device=device)
    after = [
        ([0.0, 0.0, 0.0, 2.0], 224.0),
        ([0.0, 0.0, 2.0, 1.0], 224.0),
        ([0.0, 2.0, 1.0, 0.5], 224.0),
        ([0.0, 1.0, 0.5, 0.25], 224.0),
        ([0.0, 0.5, 0.25, 0.125], 448.0),
    ]
    for amax, (rows, expected) in zip([2.0, 1.0, 0.5, 0.25, 0.125], after, strict=True):
        history[0] = amax
        _core.scaling_update(scale, history, FP8_MAX[E4M3])
        assert_bits(history, torch.tensor(rows).reshape(4, 1))
        assert_bits(scale, torch.tensor([expected]))


def test_most_recent_example(device):
    """The window does not count: the scale follows the current amax."""
    scale, history = torch.ones(1, device=device), torch.zeros(3, 1, device=device)
    for amax, expected in [(2.0, 224.0), (1.0, 448.0), (4.0, 112.0), (0.0, 112.0), (8.0, 56.0)]:
        history[0] = amax
        _core.scaling_update(scale, history, FP8_MAX[E4M3], algo=_core.AMAX_MOST_RECENT)
        assert_bits(scale, torch.tensor([expected]))
    assert_bits(history, torch.tensor([[0.0], [4.0], [8.0]]))


@pytest.mark.parametrize("most_recent", [False, True])
def test_an_idle_step_changes_nothing(device, most_recent):
    """A slot without a cast keeps its history and its scale, whatever the window would say."""
    history = torch.tensor([[0.0], [4.0], [2.0], [1.0]], device=device)
    before, scale = history.clone(), torch.full((1,), 7.0, device=device)
    for _ in range(2):
        _core.scaling_update(scale, history, 448.0, algo=int(most_recent))
        assert_bits(history, before)
        assert_bits(scale, torch.tensor([7.0]))


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("most_recent", [False, True])
def test_idle_steps_anywhere_count_for_nothing(device, length, most_recent, rng):
    """Every pattern of ten busy and idle steps, a slot each, ends as its busy steps alone."""
    patterns = (np.arange(1024)[:, None] >> np.arange(10)) % 2  # [patterns, steps]
    amaxes = np.float32(2.0 ** rng.uniform(-10, 10, 10))
    chunk = Chunk(length, 1024, device)
    for amax, busy in zip(amaxes, patterns.T, strict=True):
        chunk.record(amax * busy)
        chunk.step(448.0, most_recent)
    alone = Chunk(length, 1024, device)
    for number in range(10):  # of each slot its busy steps first, the idle ones behind them
        busy = [amaxes[row == 1] for row in patterns]
        alone.record([found[number] if number < len(found) else 0.0 for found in busy])
        alone.step(448.0, most_recent)
    assert_bits(chunk.scale.tensor, alone.scale.tensor)
    assert_bits(chunk.history.tensor, alone.history.tensor)


def test_an_idle_step_behind_the_windows_largest(device):
    """The scale was made of one amax more than the history has: it does not move when idle."""
    chunk = Chunk(3, 1, device)
    for amax, scale in [(4.0, 112.0), (1.0, 112.0), (0.5, 112.0), (0.0, 112.0), (0.5, 448.0)]:
        chunk.record([amax])
        chunk.step(448.0)
        assert_bits(chunk.scale.tensor, torch.tensor([scale]))


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("amax", [0.0, INF, NAN])
def test_scale_is_kept(device, amax, most_recent):
    """An amax that is no positive number changes no scale; all but 0 enter the history."""
    scale, history = torch.full((1,), 3.0, device=device), torch.zeros(3, 1, device=device)
    history[0] = amax
    _core.scaling_update(scale, history, 448.0, algo=int(most_recent))
    assert_bits(scale, torch.tensor([3.0]))
    assert_bits(history, torch.tensor([[0.0], [0.0], [amax]]))


def test_inf_freezes_the_scale_until_it_leaves_the_window(device):
    chunk, scales = Chunk(4, 1, device), []
    for amax in [2.0, INF, 1.0, 1.0, 1.0, 1.0]:
        chunk.record([amax])
        chunk.step(448.0)
        scales.append(chunk.scale.tensor.item())
    assert scales == [224.0] * 5 + [448.0]  # current, then three steps as rows 3, 2, 1


def test_overflow_becomes_the_largest_float(device):
    chunk = Chunk(2, 2, device)
    chunk.record([1.0e-37, SMALLEST])
    chunk.step(57344.0)
    assert_bits(chunk.scale.tensor, torch.full((2,), float(FLT_MAX)))


@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("length", [1, 2, 3, 16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=name_of)
def test_all_special_values_in_all_places(device, dtype, length, most_recent):
    """Every pair (current, one of the window) of special values, a slot each."""
    pairs = np.array([(now, old) for now in SPECIAL for old in SPECIAL], np.float32)
    history = np.full((length, len(pairs)), 0.5, np.float32)
    history[length // 2] = pairs[:, 1]
    history[0] = pairs[:, 0]
    chunk = Chunk(length, len(pairs), device)
    chunk.load(np.linspace(1, 2, len(pairs)), history)
    chunk.step(FP8_MAX[dtype], most_recent)


@pytest.mark.parametrize("margin", [-3, 0, 1, 10])
def test_margin(device, margin, rng):
    """2^-margin comes in through fp8_max."""
    chunk = Chunk(3, 17, device)
    for _ in range(4):
        chunk.record(rng.uniform(0.01, 100, 17))
        chunk.step(FP8_MAX[E4M3] * 2.0**-margin)


@pytest.mark.parametrize("layout", ["dense", "ragged"])
@pytest.mark.parametrize("slots", [1, 31, 256, 1000])
def test_many_slots(device, slots, layout, rng):
    chunk = Chunk(5, slots, device, layout)
    for _ in range(8):
        amaxes = rng.exponential(10.0, slots)
        chunk.record(np.where(rng.random(slots) > 0.3, amaxes, 0.0))
        chunk.step(FP8_MAX[E5M2])


def test_usual_length(device, rng):
    chunk = Chunk(1024, 256, device)
    chunk.load(np.ones(256), rng.exponential(1.0, (1024, 256)))
    chunk.step(FP8_MAX[E4M3])
    chunk.record(rng.exponential(1.0, 256))
    chunk.step(FP8_MAX[E4M3])


AMAX = st.sampled_from(SPECIAL) | st.floats(0.0, float(FLT_MAX), width=32)


@given(data=st.data())
def test_any_sequence(device, data):
    length, slots = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    fp8_max = data.draw(st.sampled_from([448.0, 57344.0, 448.0 * 2.0**-5, 1.0e-30]))
    most_recent = data.draw(st.booleans())
    chunk = Chunk(length, slots, device, layout=data.draw(st.sampled_from(["dense", "ragged"])))
    step = st.lists(AMAX, min_size=slots, max_size=slots)
    for amaxes in data.draw(st.lists(step, min_size=1, max_size=8)):
        chunk.record(amaxes)
        chunk.step(fp8_max, most_recent)


@given(data=st.data())
def test_slots_are_independent(device, data):
    """A chunk updates as its slots would one by one."""
    columns = st.lists(AMAX, min_size=3, max_size=3)
    history = np.array(data.draw(st.lists(columns, min_size=1, max_size=5)), np.float32)
    whole = torch.ones(3, device=device), torch.from_numpy(history.copy()).to(device)
    _core.scaling_update(*whole, 448.0)
    for slot in range(3):
        one = torch.ones(1, device=device), torch.from_numpy(history[:, slot : slot + 1]).to(device)
        one = one[0], one[1].clone()
        _core.scaling_update(*one, 448.0)
        assert_bits(one[0], whole[0][slot : slot + 1])
        assert_bits(one[1], whole[1][:, slot : slot + 1])


def test_no_slots(device, counters):
    scale, history = torch.ones(0, device=device), torch.zeros(4, 0, device=device)
    _core.scaling_update(scale, history, 448.0)
    assert op_count(device, "scaling_update") == 1


ONES, ROWS = torch.ones(3), torch.zeros(4, 3)
WRONG = {
    "length of scale": (
        ValueError,
        r"scale: .*length 2, expected a vector of 3",
        (torch.ones(2), ROWS, 448.0),
    ),
    "matrix scale": (
        ValueError,
        r"scale: it has 2 dims, expected 1",
        (torch.ones(1, 3), ROWS, 448.0),
    ),
    "bf16 scale": (TypeError, r"scale: dtype bf16, expected f32", (ONES.to(BF16), ROWS, 448.0)),
    "bf16 history": (TypeError, r"history: dtype bf16, expected f32", (ONES, ROWS.to(BF16), 448.0)),
    "no rows": (
        ValueError,
        r"history: shape \[0, 3\], expected at least one row",
        (ONES, torch.zeros(0, 3), 448.0),
    ),
    "no maximum": (ValueError, r"fp8_max: 0, expected a positive", (ONES, ROWS, 0.0)),
    "negative maximum": (ValueError, r"fp8_max: -448, expected a positive", (ONES, ROWS, -448.0)),
    "NaN maximum": (ValueError, r"fp8_max: -?nan, expected a positive", (ONES, ROWS, NAN)),
    "text maximum": (
        TypeError,
        r"fp8_max: expected a float, got <class 'str'>",
        (ONES, ROWS, "448"),
    ),
    "no history": (TypeError, r"history: expected a torch.Tensor, got None", (ONES, None, 448.0)),
    "list scale": (
        TypeError,
        r"scale: expected a torch.Tensor, got <class 'list'>",
        ([1.0], ROWS, 448.0),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(device, case):
    exception, text, arguments = WRONG[case]
    placed = [a.clone().to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in placed]
    with pytest.raises(exception, match=f"scaling_update: {text}"):
        _core.scaling_update(*placed)
    for now, then in zip(placed, before, strict=True):
        if isinstance(now, torch.Tensor):
            assert_bits(now, then)


def test_strided_state_is_refused(device):
    memory = torch.zeros(4, 6, device=device)
    with pytest.raises(ValueError, match="scaling_update: history: its strides .* contiguous"):
        _core.scaling_update(torch.ones(3, device=device), memory[:, ::2], 448.0)
    with pytest.raises(ValueError, match="scaling_update: scale: its strides .* contiguous"):
        _core.scaling_update(torch.ones(6, device=device)[::2], memory[:, :3], 448.0)


@pytest.mark.gpu
def test_mixed_devices():
    with pytest.raises(ValueError, match="scaling_update: history: it is on cpu:0"):
        _core.scaling_update(torch.ones(3, device="cuda"), torch.zeros(4, 3), 448.0)


@pytest.mark.gpu
@pytest.mark.parametrize("most_recent", [False, True])
def test_cuda_equals_cpu(most_recent, rng):
    start = np.ones(256, np.float32), rng.exponential(1.0, (1024, 256)).astype(np.float32)
    results = []
    for device in ("cpu", "cuda"):
        scale, history = (torch.from_numpy(values).clone().to(device) for values in start)
        for _ in range(3):
            _core.scaling_update(scale, history, 448.0, algo=int(most_recent))
            history[0] = history[-1]
        results.append((scale, history))
    for on_cpu, on_cuda in zip(*results, strict=True):
        assert_bits(on_cuda, on_cpu)
