# SPDX-License-Identifier: Apache-2.0
"""Norms of lists of tensors, and scales of lists of amaxes, against float64."""

import math

import pytest
import torch
from comparators import assert_bits, assert_repeats, assert_within
from device_kinds import every_device, our_kernels
from pytorch.helpers import captured
from tols import BF16, F16, F32

from transformer_engine import _core
from transformer_engine.pytorch.optimizers import (
    multi_tensor_compute_scale_and_scale_inv,
    multi_tensor_l2norm,
    multi_tensor_unscale_l2norm,
)
from transformer_engine_torch import multi_tensor_compute_scale_inv_e8m0

pytestmark = every_device

CHUNK = 16384  # elements that a block sums
DEPTH = 32  # terms of the longest sum in fp32: 16 of a lane, then halves of 1024 lanes
DTYPES = (F32, F16, BF16)


@pytest.fixture
def flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


def pick(low, end):
    return int(torch.randint(low, end, ()))


def draw(shape, dtype, device, skipped=0):
    """A tensor that begins so many elements after an aligned address."""
    whole = torch.randn(math.prod(shape) + skipped, device=device).to(dtype)
    return whole[skipped:].view(shape)


def lists_of(device):
    """Tensors of every dtype, that lie in every way."""
    sizes = [0, 1, 3, 4, 5, 1023, 1024, 1025, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 4099]
    sizes += [pick(1, 5 * CHUNK) for _ in range(6)]
    made = [
        draw((size,), dtype, device, skipped) for size in sizes for dtype in DTYPES
        for skipped in (0, pick(1, 8))
    ]  # fmt: skip
    made += [draw((), F32, device), draw((0, 3), BF16, device), draw((1, 1), F16, device)]
    made += [draw((40, 70), BF16, device).t(), draw((90, 50), F32, device)[:, 3:17]]
    made += [draw((1, 33), F32, device).expand(20, 33), torch._neg_view(draw((7,), F32, device))]
    return [made[i] for i in torch.randperm(len(made)).tolist()]


def norms64(tensors, factor=1.0):
    each = torch.stack([t.detach().double().cpu().mul(factor).norm() for t in tensors])
    return each.norm().view(1), each


def check(found, exact):
    for norm, right in zip(found, exact, strict=True):
        assert norm.dtype is F32
        assert_within(norm, right, right, depth=DEPTH)


@our_kernels
@pytest.mark.parametrize("factor", [None, -0.3], ids=["plain", "unscaled"])
def test_norms_of_any_lists(device, flag, factor):
    given = lists_of(device)
    before = [t.clone() for t in given]

    def run(per_tensor=True):
        if factor is None:
            return multi_tensor_l2norm(1, flag, [given], per_tensor)
        return multi_tensor_unscale_l2norm(1, flag, [given], number, per_tensor)

    number = torch.full((1,), factor or 1.0, device=device)
    check(run(), norms64(given, number.item()))
    assert_bits(run(False)[0], run()[0])
    assert run(False)[1].shape == (0,)
    assert_repeats(run)
    assert not flag.any()
    for tensor, old in zip(given, before, strict=True):
        assert torch.equal(tensor, old)


@our_kernels
@pytest.mark.parametrize("count", [160, 161, 500, 501, 2357])
def test_norms_of_many_tensors(device, flag, count):
    """More than a launch has, of tensors and of norms; those without elements take no part."""
    given = [draw((i * 37 % 101,), DTYPES[i % 3], device, i % 5) for i in range(count)]
    given[count // 2] = draw((2 * CHUNK + 9,), F32, device)
    check(multi_tensor_l2norm(1, flag, [given], True), norms64(given))
    nothing = [torch.empty(0, device=device)] * 3
    infinite = torch.full((1,), math.inf, device=device)
    total, each = multi_tensor_unscale_l2norm(1, flag, [nothing], infinite, True)
    assert total.tolist() == [0.0] and each.tolist() == [0.0] * 3
    assert not flag.any()


def test_factors_come_before_squares(device, flag):
    """Of values whose squares are Inf, or 0; a sum beyond fp32 is Inf, and sets the flag."""
    for power in (90, -90):
        plain = [draw((n,), dtype, device) for n in (5, 3 * CHUNK) for dtype in (F32, BF16)]
        scaled = [t * 2.0**power for t in plain]
        number = torch.full((1,), 2.0**-power, device=device)
        check(multi_tensor_unscale_l2norm(1, flag, [scaled], number, True), norms64(plain))
        assert not flag.any()
    large = [torch.full((CHUNK,), 2.0**62, device=device), torch.ones(3, device=device)]
    total, each = multi_tensor_l2norm(1, flag, [large], True)
    assert total.item() == math.inf and each.tolist()[0] == math.inf
    assert flag.item() == 1
    flag.zero_()
    total, _ = multi_tensor_l2norm(1, flag, [[torch.full((900,), 2.0**58, device=device)] * 40])
    exact = torch.tensor([2.0**58 * 36000**0.5], dtype=torch.float64)
    assert_within(total, exact, exact, depth=DEPTH)
    assert not flag.any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("size", [7, CHUNK + 1023, 2 * CHUNK])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flags_of_norms(device, flag, dtype, size, bad):
    given = [draw((size,), dtype, device, skipped) for skipped in (0, 1)]
    given[1][pick(0, size)] = bad
    total, each = multi_tensor_l2norm(1, flag, [given], True)
    assert flag.item() == 1 and not total.isfinite() and each.isfinite().tolist() == [True, False]
    multi_tensor_l2norm(1, flag, [given[:1]])
    assert flag.item() == 1  # never cleared
    flag.zero_()
    number = torch.full((1,), bad, device=device)
    multi_tensor_unscale_l2norm(1, flag, [given[:1]], number)
    assert flag.item() == 1


def test_norms_of_other_dtypes_and_classes(device):
    """They are read as fp32, and flags may be of any integer dtype."""
    given = [
        draw((5, 3), torch.float64, device), draw((9,), F32, device), draw((4,), BF16, device),
        torch.arange(-4, 9, device=device), torch.nn.Parameter(draw((6,), F16, device)),
    ]  # fmt: skip
    exact = norms64(given, 0.5)
    for dtype in (torch.int32, torch.int64, torch.uint8, torch.bool):
        flag = torch.zeros(1, dtype=dtype, device=device)
        half = torch.tensor(0.5, dtype=torch.float64, device=device)
        check(multi_tensor_unscale_l2norm(1, flag, [given], half, True), exact)
        assert not flag.any()
        broken = [*given, torch.full((2,), math.nan, device=device)]
        multi_tensor_l2norm(1, flag, [broken])
        assert flag.all()
    with pytest.raises(TypeError, match=r"inv_scale=0.5, expected a tensor of one element"):
        multi_tensor_unscale_l2norm(1, flag, [given], 0.5)
    with pytest.raises(ValueError, match=r"multi_tensor_l2norm: tensor_lists of \[5, 5\] tensors"):
        multi_tensor_l2norm(1, flag, [given, given])
    with pytest.raises(ValueError, match=r"inv_scale of 2 elements, expected one"):
        multi_tensor_unscale_l2norm(1, flag, [given], torch.ones(2, device=device))
    with pytest.raises(TypeError, match=r"tensor 1 of torch.complex64, expected real numbers"):
        multi_tensor_l2norm(1, flag, [[given[0], torch.full((3,), 1j, device=device)]])
    with pytest.raises(TypeError, match=r"multi_tensor_l2norm: tensor 1: int, expected a tensor"):
        multi_tensor_l2norm(1, flag, [[given[0], 3]])


def test_norms_without_a_flag(device):
    assert [t.tolist() for t in multi_tensor_l2norm(1, None, [[]], True)] == [[0.0], []]
    for given in ([draw((9,), F32, device)], [draw((9,), torch.float64, device)]):
        total, each = multi_tensor_l2norm(1, None, [given], True)
        check((total, each), norms64(given))


def test_gradients_of_quantized_and_sparse_kinds_are_no_memory(device, flag):
    """What has no memory of its own is read by its values."""
    from transformer_engine.pytorch import Float8CurrentScalingQuantizer

    wide = draw((32, 16), F32, device)
    quantizer = Float8CurrentScalingQuantizer(torch.float8_e4m3fn, device=torch.device(device))
    made = quantizer(wide)
    check(
        multi_tensor_l2norm(1, flag, [[made, wide]], True),
        norms64([made.dequantize(dtype=F32), wide]),
    )


@pytest.mark.gpu
def test_norms_have_the_same_bits_on_every_device():
    given = lists_of("cpu")
    for factor in (None, torch.tensor([0.37])):
        found = []
        for device in ("cpu", "cuda"):
            number = None if factor is None else factor.to(device)
            found.append(_core.l2norm([t.to(device) for t in given], number, None, True))
        for one, other in zip(*found, strict=True):
            assert_bits(other.cpu(), one)


@pytest.mark.gpu
def test_norms_of_tensors_on_several_devices():
    given = [draw((n,), F32, device) for n in (5, 900) for device in ("cpu", "cuda")]
    for device in ("cpu", "cuda"):
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        half = torch.tensor([0.5], device=device)
        check(multi_tensor_unscale_l2norm(1, flag, [given], half, True), norms64(given, 0.5))
        assert not flag.any()
        multi_tensor_l2norm(1, flag, [[*given, torch.full((1,), math.inf)]])
        assert flag.item() == 1


@pytest.mark.gpu
def test_norms_in_a_cuda_graph():
    """Replays read the factor, the values and the flag of their time."""
    given = [t for t in lists_of("cuda") if t.is_contiguous() and not t.is_neg()]
    flag, number = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.ones(1, device="cuda")

    def run():
        return multi_tensor_unscale_l2norm(1, flag, [given], number, True)

    graph, found = captured(run, warm_ups=1)
    for factor in (0.5, 3.0):
        number.fill_(factor)
        for tensor in given:
            tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        check(found, norms64(given, factor))
        for one, other in zip(found, run(), strict=True):
            assert_bits(one, other)
    assert not flag.any()
    next(t for t in given if t.numel()).view(-1)[0] = math.nan
    graph.replay()
    assert flag.item() == 1 and found[0].isnan()


# ---- scales of amaxes ----------------------------------------------------------------------------


def amaxes_of(device):
    special = [0.0, 1e-40, 2.0**-127, 1e-8, 448.0, 3.4e38, math.inf, math.nan]
    return [torch.rand(n, device=device) * 10.0 ** (n % 7 - 3) for n in (1, 1, 3, 0, 130)] + [
        torch.tensor(special, device=device),
        torch.tensor(3.0, device=device),
    ]


def scale64(amax, top, epsilon, power_2):
    """In float64, rounded to fp32."""
    amax = max(amax, epsilon) if amax == amax else amax
    if not math.isfinite(amax) or amax == 0.0:
        return 1.0
    scale = torch.tensor(top / amax, dtype=torch.float64).clamp(max=torch.finfo(F32).max).float()
    return 2.0 ** (math.frexp(scale.item())[1] - 1) if power_2 else scale.item()


@pytest.mark.parametrize("epsilon", [0.0, 2.0**-6], ids=["no-epsilon", "epsilon"])
@pytest.mark.parametrize("power_2", [False, True], ids=["any", "power-2"])
@pytest.mark.parametrize("top", [448.0, 57344.0])
def test_scales_of_amaxes(device, flag, top, power_2, epsilon):
    amaxes = amaxes_of(device)
    scales, inverses = ([torch.full_like(a, 7.0) for a in amaxes] for _ in range(2))
    multi_tensor_compute_scale_and_scale_inv(
        1, flag, [amaxes, scales, inverses], top, power_2, epsilon
    )
    for amax, scale, inverse in zip(amaxes, scales, inverses, strict=True):
        exact = [scale64(a, top, epsilon, power_2) for a in amax.reshape(-1).tolist()]
        assert_bits(scale.reshape(-1), torch.tensor(exact, dtype=F32))
        assert_bits(inverse, scale.cpu().double().reciprocal().float())


@pytest.mark.parametrize("stops", [False, True], ids=["writes", "stopped"])
def test_scales_of_amaxes_obey_the_flag(device, flag, stops):
    """On the device: what sets the flag need not have run yet when the scales are launched."""
    flag.fill_(int(stops))
    amaxes = amaxes_of(device)
    tiles = [torch.rand(3, 4, device=device), torch.rand(5, device=device).bfloat16()]
    made = [torch.full_like(a, 7.0) for a in amaxes], [torch.full_like(a, 7.0) for a in amaxes]
    codes = [torch.full((2 * t.numel(),), 77, dtype=torch.uint8, device=device)[::2] for t in tiles]
    codes = [code.view(tile.shape) for code, tile in zip(codes, tiles, strict=True)]
    multi_tensor_compute_scale_and_scale_inv(1, flag, [amaxes, *made], 448.0, False, 0.0)
    multi_tensor_compute_scale_inv_e8m0(1, flag, [tiles, codes])
    for tensor in (*made[0], *made[1]):
        assert (tensor == 7.0).all() if stops else not (tensor == 7.0).any()
    for code in codes:
        assert (code == 77).all() if stops else not (code == 77).any()


@pytest.mark.gpu
def test_scales_of_amaxes_in_a_cuda_graph():
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    amaxes = [torch.rand(n, device="cuda") for n in (1, 40)]
    made = [torch.zeros_like(a) for a in amaxes], [torch.zeros_like(a) for a in amaxes]
    codes = [torch.zeros_like(a, dtype=torch.uint8) for a in amaxes]

    def run():
        multi_tensor_compute_scale_and_scale_inv(1, flag, [amaxes, *made], 448.0, False, 0.0)
        multi_tensor_compute_scale_inv_e8m0(1, flag, [amaxes, codes])

    graph, _ = captured(run, warm_ups=1)
    kept = [t.clone() for t in (*made[0], *made[1], *codes)]
    for stops in (True, False):
        for amax in amaxes:
            amax.mul_(64.0)
        flag.fill_(int(stops))
        graph.replay()
        for tensor, old in zip((*made[0], *made[1], *codes), kept, strict=True):
            assert bool((tensor == old).any()) is stops
