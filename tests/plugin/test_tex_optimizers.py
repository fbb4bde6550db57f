# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps and reductions of `transformer_engine_torch` against float64."""

import pytest
import torch
from buffers import normal
from comparators import assert_bits
from tex_cases import Operators, assert_near
from tols import BF16, E4M3, F16, F32

import transformer_engine_torch as plain_tex
from transformer_engine.pytorch.constants import DType

native = Operators("default.native")
SHAPES = ((5,), (3, 7), (40, 11))
BETAS, EPS, LR, DECAY = (0.8, 0.95), 1e-6, 0.03, 0.2


def numbers(rng, dtype, device, square=False):
    made = [normal(rng, shape, dtype, device) for shape in SHAPES]
    return [t.abs() if square else t for t in made]


def flag(device, value=0):
    return torch.full((1,), value, dtype=torch.int32, device=device)


def adam64(grad, param, mean, square, step, mode, correct, factor=1.0):
    """New (parameter, mean, mean of squares), by the definition."""
    grad, param, mean, square = (t.double() for t in (grad, param, mean, square))
    grad = grad * factor
    if mode == 0:
        grad = grad + DECAY * param
    mean = BETAS[0] * mean + (1 - BETAS[0]) * grad
    square = BETAS[1] * square + (1 - BETAS[1]) * grad * grad
    unbiased = [
        t / (1 - beta**step) if correct else t
        for t, beta in zip((mean, square), BETAS, strict=True)
    ]
    update = unbiased[0] / (unbiased[1].sqrt() + EPS)
    if mode == 1:
        update = update + DECAY * param
    return param - LR * update, mean, square


def state(rng, device, dtype, masters):
    grads, params = numbers(rng, dtype, device), numbers(rng, dtype, device)
    lists = [grads, params, numbers(rng, F32, device), numbers(rng, F32, device, True)]
    if masters:
        lists.append([p.float() + 2**-12 for p in params])
    return lists


def copied(lists):
    return [[t.clone() for t in each] for each in lists]


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("correct", [0, 1])
@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_adam(rng, device, mode, correct, masters, dtype):
    lists = state(rng, device, dtype, masters)
    before = copied(lists)
    step = 3
    rest = (LR, *BETAS, EPS, step, mode, correct, DECAY)
    native.multi_tensor_adam(2048, flag(device, 1), lists, *rest)
    for now, then in zip(sum(lists, []), sum(before, []), strict=True):
        assert_bits(now, then)
    native.multi_tensor_adam(2048, flag(device), lists, *rest)
    for grad, *old, new in zip(*before[:4], zip(*lists, strict=True), strict=True):
        if masters:
            at = [id(t) for t in lists[0]].index(id(new[0]))
            old[0] = before[4][at]
        expected = adam64(grad, *old, step, mode, correct)
        for one, other in zip(new[1:4], expected, strict=True):
            assert_near(one, other, 4)
        if masters:
            assert_near(new[4], expected[0], 4)
            assert_bits(new[1], new[4].to(dtype))


@pytest.mark.parametrize("masters", [False, True])
def test_capturable_adam(rng, device, masters):
    lists = state(rng, device, BF16 if masters else F32, masters)
    before = copied(lists)
    op = native.multi_tensor_adam_capturable
    op = native.multi_tensor_adam_capturable_master if masters else op
    lr, step = torch.full((1,), LR, device=device), flag(device, 2)
    scale = torch.full((1,), 0.25, device=device)
    for noop in (1, 0):
        op(2048, flag(device, noop), lists, lr, *BETAS, EPS, step, 1, 1, DECAY, scale)
        if noop:
            assert_bits(lists[1][0], before[1][0])
            assert_bits(lists[2][0], before[2][0])
    for i in range(len(SHAPES)):
        old = [each[i] for each in before]
        param = old[4] if masters else old[1]
        expected = adam64(old[0], param, old[2], old[3], 2, 1, True, 0.25)
        assert_near(lists[4 if masters else 1][i], expected[0], 4)
        assert_near(lists[2][i], expected[1], 4)
        assert_near(lists[3][i], expected[2], 4)
    assert int(step) == 2


def test_adam_of_fp8_parameters(rng, device):
    lists = state(rng, device, F32, True)
    lists[1] = [torch.zeros_like(p, dtype=torch.uint8) for p in lists[1]]
    before = copied(lists)
    one = [torch.full((1,), value, device=device) for value in (8.0, 100.0, 500.0)]
    tops = [torch.full((1,), value, device=device) for value in (0.0, 99.0, 0.0)]
    inverses = [torch.zeros(1, device=device) for _ in SHAPES]
    given = [*lists, one, tops, inverses]
    rest = (LR, *BETAS, EPS, 1, 0, 1, DECAY, DType.kFloat8E4M3)
    native.multi_tensor_adam_fp8(2048, flag(device, 1), given, *rest)
    assert not any(t.any() for t in (*lists[1], *inverses))
    native.multi_tensor_adam_fp8(2048, flag(device), given, *rest)
    for i in range(len(SHAPES)):
        expected = adam64(*(before[n][i] for n in (0, 4, 2, 3)), 1, 0, True)
        assert_near(lists[4][i], expected[0], 4)
        codes = (lists[4][i] * one[i]).clamp(-448, 448).to(E4M3)
        assert_bits(lists[1][i], codes.view(torch.uint8))
        top = lists[4][i].abs().max().clamp(min=99.0 if i == 1 else 0.0)
        assert_bits(tops[i], top.view(1))
        assert_bits(inverses[i], one[i].reciprocal())


def test_adam_of_parameters_and_remainders(rng, device):
    """As fp32 parameters, whose high bits the bf16 ones are, rounded to nearest."""
    whole = numbers(rng, F32, device)
    whole[0][0] = 1.0 + 2**-8 + 2**-20  # rounded up
    bits = [t.view(torch.int32) for t in whole]
    rests = [b.to(torch.int16) for b in bits]
    params = [
        ((b >> 16) + (r < 0).int()).to(torch.int16).view(BF16)
        for b, r in zip(bits, rests, strict=True)
    ]
    grads = numbers(rng, F32, device)
    means, squares = numbers(rng, F32, device), numbers(rng, F32, device, True)
    other = copied([grads, whole, means, squares])
    rest = (LR, *BETAS, EPS, 4, 1, 1, DECAY)
    given = [grads, params, means, squares, rests]
    before = copied(given)
    native.multi_tensor_adam_param_remainder(2048, flag(device, 1), given, *rest)
    for now, then in zip(sum(given, []), sum(before, []), strict=True):
        assert_bits(now, then)
    native.multi_tensor_adam_param_remainder(2048, flag(device), given, *rest)
    native.multi_tensor_adam(2048, flag(device), other, *rest)
    for param, low, expected in zip(params, rests, other[1], strict=True):
        high = param.view(torch.int16).int() - (low < 0).int()
        assert_bits((high << 16 | low.int() & 0xFFFF).view(F32), expected)
        assert (param.float() - expected).abs().max() <= expected.abs().max() * 2**-8
    with pytest.raises(TypeError, match="low bits of torch.int32"):
        native.multi_tensor_adam_param_remainder(
            2048, flag(device), [*given[:4], [r.int() for r in rests]], *rest
        )


def test_adam_of_nothing(device):
    assert plain_tex.multi_tensor_adam() is native.multi_tensor_adam()
    plain_tex.multi_tensor_adam()(2048, flag(device), [[]] * 4, LR, *BETAS, EPS, 1, 1, 1, 0.0)
    with pytest.raises(ValueError, match="mode=2"):
        native.multi_tensor_adam(2048, flag(device), [[]] * 4, LR, *BETAS, EPS, 1, 2, 1, 0.0)
    with pytest.raises(ValueError, match="tensor_lists of"):
        native.multi_tensor_adam(2048, flag(device), [[]] * 3, LR, *BETAS, EPS, 1, 1, 1, 0.0)


def test_reductions_of_nothing(device):
    factor, found = torch.ones(1, device=device), flag(device)
    for total, each in (
        native.multi_tensor_l2norm(2048, found, [[]], True),
        native.multi_tensor_unscale_l2norm(2048, found, [[]], factor, True),
    ):
        assert total.tolist() == [0.0] and each.numel() == 0
    native.multi_tensor_scale(2048, found, [[], []], 2.0)
    assert not found.any()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_sgd(rng, device, momentum, nesterov, first, after):
    grads, params, states = (numbers(rng, F32, device) for _ in range(3))
    narrow = [torch.zeros_like(p, dtype=F16) for p in params]
    lists = [grads, params, states, narrow]
    before = copied(lists)
    decay, dampening, lr, scale = 0.1, 0.3, 0.05, 0.5
    rest = (decay, momentum, dampening, lr, nesterov, first, after, scale)
    native.multi_tensor_sgd(2048, flag(device, 1), lists, *rest)
    for now, then in zip(sum(lists, []), sum(before, []), strict=True):
        assert_bits(now, then)
    native.multi_tensor_sgd(2048, flag(device), lists, *rest)
    for i in range(len(SHAPES)):
        grad, param, kept = (each[i].double() for each in before[:3])
        update = scale * grad + (0 if after else decay * param)
        if momentum:
            kept = update if first else momentum * kept + (1 - dampening) * update
            update = update + momentum * kept if nesterov else kept
        update = update + (decay * param if after else 0)
        assert_near(params[i], param - lr * update, 4)
        assert_near(states[i], kept, 4)
        assert_bits(narrow[i], params[i].to(F16))


@pytest.mark.parametrize("power", [False, True])
def test_scales(device, power):
    amaxes = torch.tensor([1.5, 0.0, 1e-12, torch.inf, torch.nan, 448.0, 1e-38], device=device)
    amaxes = list(amaxes.split(1))
    scales, inverses = ([torch.zeros(1, device=device) for _ in amaxes] for _ in range(2))
    native.multi_tensor_compute_scale_and_scale_inv(
        2048, flag(device), [amaxes, scales, inverses], 448.0, power, 1e-10
    )
    for amax, scale, inverse in zip(amaxes, scales, inverses, strict=True):
        top = max(float(amax), float(torch.tensor(1e-10)))
        exact = 448.0 / top if 0 < top < torch.inf else 1.0
        if power:
            exact = 2.0 ** torch.tensor(exact).double().log2().floor().item()
        assert_near(scale, torch.tensor([exact], device=device))
        assert_bits(inverse, scale.reciprocal())


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_reductions(rng, device, dtype):
    tensors, found = numbers(rng, dtype, device), flag(device)
    exact = torch.stack([t.double().norm() for t in tensors])
    total, each = native.multi_tensor_l2norm(2048, found, [tensors], True)
    assert_near(total, exact.norm().view(1), 500)
    assert_near(each, exact, 500)
    assert native.multi_tensor_l2norm(2048, found, [tensors])[1].numel() == 0
    factor = torch.full((1,), 0.125, device=device)
    total, each = native.multi_tensor_unscale_l2norm(2048, found, [tensors], factor, True)
    assert_near(total, exact.norm().view(1) / 8, 500)
    assert_near(each, exact / 8, 500)
    outs = [torch.empty_like(t, dtype=F32) for t in tensors]
    native.multi_tensor_scale(2048, found, [tensors, outs], 0.3)
    for one, t in zip(outs, tensors, strict=True):
        assert_near(one, t.double() * 0.3)
    assert not found.any()
    tensors[1][0, 0] = torch.inf
    native.multi_tensor_scale(2048, found, [tensors, outs], 0.3)
    assert found.item() == 1
