# SPDX-License-Identifier: Apache-2.0
"""Functions that programs import beside the modules: lists of tensors, GEMMs, losses, sizes."""

import math
from functools import partial

import pytest
import torch
from comparators import assert_nmse, assert_within
from pytorch.helpers import assert_same_bits
from tols import BF16, F16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.pytorch import jit, utils
from transformer_engine.pytorch.attention import _SplitAlongDim
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from transformer_engine.pytorch.module.base import get_dummy_wgrad
from transformer_engine.pytorch.optimizers import (
    MultiTensorApply,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_scale_tensor,
    multi_tensor_unscale_l2norm,
)
from transformer_engine_torch import thd_get_partitioned_indices

# ---- lists of tensors ----------------------------------------------------------------------------

SHAPES = [(3, 5), (1,), (), (64, 17), (0, 4)]


def make_list(device, dtype):
    return [torch.randn(shape, device=device).to(dtype) * 3 for shape in SHAPES]


@pytest.fixture
def flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


@pytest.mark.parametrize("source", [F32, F16, BF16])
@pytest.mark.parametrize("target", [F32, F16, BF16])
@pytest.mark.parametrize("op", [multi_tensor_scale, multi_tensor_scale_tensor])
def test_multi_tensor_scale(device, source, target, op, flag):
    factor = float(torch.rand(())) + 0.5
    given = make_list(device, source)
    out = [torch.empty_like(t, dtype=target) for t in given]
    scale = factor if op is multi_tensor_scale else torch.tensor([factor], device=device)
    assert multi_tensor_applier(op, flag, [given, out], scale) is None
    expected = [(t.float() * torch.tensor(factor, device=device)).to(target) for t in given]
    assert_same_bits(out, expected)
    assert flag.item() == 0
    in_place = [(t.float() * torch.tensor(factor, device=device)).to(source) for t in given]
    multi_tensor_applier(op, flag, [given, given], scale)
    assert_same_bits(given, in_place)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("op", [multi_tensor_scale, multi_tensor_l2norm])
def test_multi_tensor_flag(device, bad, op, flag):
    given = make_list(device, F32)
    given[3][2, 2] = bad
    lists = [given, [t.clone() for t in given]] if op is multi_tensor_scale else [given]
    multi_tensor_applier(op, flag, lists, *([1.0] if op is multi_tensor_scale else []))
    assert flag.item() == 1
    given[3][2, 2] = 1.0
    multi_tensor_applier(op, flag, lists, *([1.0] if op is multi_tensor_scale else []))
    assert flag.item() == 1  # set, never cleared


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_multi_tensor_l2norm(device, dtype, flag):
    given = make_list(device, dtype)
    wide = [t.double().flatten() for t in given if t.numel()]
    exact = torch.stack([t.norm() for t in wide])
    total, each = multi_tensor_applier(multi_tensor_l2norm, flag, [given], True)
    assert total.shape == (1,) and total.dtype == each.dtype == F32
    assert_nmse(each, exact, tol("sum", F32, 64 * 17))
    assert_nmse(total, torch.cat(wide).norm().view(1), tol("sum", F32, 2000))
    alone, none = multi_tensor_applier(multi_tensor_l2norm, flag, [given])
    assert_same_bits(alone, total)
    assert none.shape == (0,)
    inverse = torch.tensor([-0.25], device=device)
    scaled, parts = multi_tensor_applier(multi_tensor_unscale_l2norm, flag, [given], inverse, True)
    assert_same_bits([scaled, parts], [total * 0.25, each * 0.25])


def test_multi_tensor_l2norm_beyond_the_range_of_fp16(device, flag):
    given = [torch.full((64, 64), 60000.0, dtype=F16, device=device)]
    total, _ = multi_tensor_applier(multi_tensor_l2norm, flag, [given])
    assert_nmse(total, torch.full((1,), 64 * 60000.0).double(), tol("sum", F32, 64 * 64))
    assert flag.item() == 0


def test_multi_tensor_applier(device, flag):
    calls = []
    apply = MultiTensorApply(128)
    assert apply(lambda *a: calls.append(a), flag, [[torch.ones(0)], [torch.ones(0)]]) is None
    assert not calls
    one, two = torch.ones(2), torch.ones(0)
    assert apply(lambda *a: a, flag, [[two, one], [one, two]], 5) == (128, flag, [[one], [two]], 5)
    with pytest.raises(RuntimeError, match=r"\[1, 2\] tensors"):
        apply(multi_tensor_scale, flag, [[one], [one, one]], 1.0)


NO_TENSORS = {
    "numbers": ([[1.0], [2.0]], r"tensor_lists\[0\]\[0\]: float, expected a tensor"),
    "one": ([[torch.ones(2)], [None]], r"tensor_lists\[1\]\[0\]: NoneType, expected a tensor"),
    "no lists": ([1.0, 2.0], r"tensor_lists\[0\]: float, expected a list"),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_lists_of_no_tensors(device, flag, name):
    lists, words = NO_TENSORS[name]
    for call in (partial(multi_tensor_scale, 1), partial(multi_tensor_applier, multi_tensor_scale)):
        with pytest.raises(TypeError, match=words):
            call(flag, lists, 1.0)


# ---- GEMM and loss -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("layout", ["TN", "NN", "NT"])
def test_general_gemm(device, dtype, layout):
    m, n, k = 24, 40, 32
    shapes = {"TN": ((n, k), (m, k)), "NN": ((k, n), (m, k)), "NT": ((k, n), (k, m))}
    a, b = (torch.randn(shape, device=device).to(dtype) for shape in shapes[layout])
    left, right = {"TN": (b, a.t()), "NN": (b, a), "NT": (b.t(), a)}[layout]
    exact, terms = left.double() @ right.double(), left.double().abs() @ right.double().abs()
    for out_dtype in (None, F32):
        out, *rest = general_gemm(a, b, out_dtype=out_dtype, layout=layout)
        assert out.dtype == (out_dtype or dtype) and rest == [None, None, None]
        assert_within(out, exact, terms, k)
    bias = torch.randn(n, device=device)
    with_bias = general_gemm(a, b, F32, layout=layout, bias=bias)[0]
    assert_within(with_bias, exact + bias.double(), terms + bias.double().abs(), k + 1)
    again = general_gemm(a, b, F32, layout=layout, out=with_bias, accumulate=True)[0]
    assert again is with_bias
    assert_within(again, 2 * exact + bias.double(), 2 * terms + bias.double().abs(), 2 * k + 1)
    sums = general_gemm(a, b, layout=layout, bias=bias, grad=True)[1]
    dim = 0 if layout == "NT" else 1  # the one that the product sums over
    assert_within(sums, b.double().sum(dim), b.double().abs().sum(dim), k)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduce", [False, True])
def test_parallel_cross_entropy(device, dtype, smoothing, reduce):
    batch, length, classes, ignored = 3, 5, 33, -1
    logits = torch.randn(batch, length, classes, device=device).to(dtype).requires_grad_()
    target = torch.randint(classes, (batch, length), device=device)
    target[1, 2] = ignored
    exact = logits.detach().double().requires_grad_()
    logs = exact.log_softmax(-1)
    picked = logs.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    losses = -(1 - smoothing) * picked - smoothing * logs.mean(-1)
    losses = losses * (target != ignored)
    expected = losses.sum().view(1) / (batch * length - 1) if reduce else losses
    out = parallel_cross_entropy(logits, target, smoothing, reduce, None, ignored, True)
    assert out.dtype == F32 and out.shape == expected.shape
    assert_nmse(out, expected, tol("sum", F32, classes))
    grad = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, logits, grad)
    (wanted,) = torch.autograd.grad(expected, exact, grad.double())
    assert found.dtype == dtype and (found[1, 2] == 0).all()
    assert_nmse(found, wanted, tol("round", dtype) + 4 * tol("sum", F32, classes))


def test_parallel_cross_entropy_of_ignored_targets_alone(device):
    logits = torch.randn(1, 2, 4, device=device)
    target = torch.full((1, 2), -100, device=device)
    assert parallel_cross_entropy(logits, target, 0.0, True).tolist() == [0.0]
    with pytest.raises(ValueError, match=r"target \(3,\)"):
        parallel_cross_entropy(logits, target.new_zeros(3))


# ---- attention -----------------------------------------------------------------------------------


def test_split_along_dim(device):
    x = torch.randn(4, 3, 6, device=device, requires_grad=True)
    for parts, expected in (
        (_SplitAlongDim.apply(x, 2, [1, 5]), x.split([1, 5], 2)),
        (_SplitAlongDim.apply(x, 1, 1, True), x.unbind(1)),
    ):
        assert_same_bits(list(parts), list(expected))
    assert _SplitAlongDim is utils.SplitAlongDim


@pytest.mark.parametrize("world", [1, 2, 3])
def test_thd_get_partitioned_indices(device, world):
    lengths = [2 * world * n for n in (1, 3, 0, 2)]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    total = sum(lengths)
    owned = [thd_get_partitioned_indices(starts, total, world, rank) for rank in range(world)]
    assert sorted(torch.cat(owned).tolist()) == list(range(total))
    for rank, found in enumerate(owned):
        assert found.dtype == torch.int32
        first = lengths[0] // (2 * world)
        expected = [*range(rank * first, (rank + 1) * first)]
        last = 2 * world - 1 - rank
        expected += range(last * first, (last + 1) * first)
        assert found[: len(expected)].tolist() == expected
    with pytest.raises(ValueError, match=f"multiple of {2 * world}"):
        thd_get_partitioned_indices(torch.tensor([0, 2 * world + 1]), 1, world, 0)


# ---- sizes, devices, tensors ---------------------------------------------------------------------


def test_sizes():
    assert utils.divide(12, 4) == 3
    assert [utils.round_up_to_nearest_multiple(n, 16) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
    for call in (lambda: utils.divide(3, 2), lambda: utils.round_up_to_nearest_multiple(1, 0)):
        with pytest.raises(ValueError):
            call()
    utils.assert_dim_for_fp8_exec(torch.ones(2, 4, 32))
    for shape in ((7, 32), (8, 24)):
        with pytest.raises(ValueError, match=str(shape[0])):
            utils.assert_dim_for_fp8_exec(torch.ones(8, 16), torch.ones(shape))


def test_versions(monkeypatch):
    version = te.torch_version()
    assert torch.__version__.startswith(".".join(map(str, version))) and version >= (2, 10)
    for number, expected in ((91002, (9, 10, 2)), (8906, (8, 9, 6)), (None, (0, 0, 0))):
        monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda n=number: n)
        assert utils.get_cudnn_version() == expected


def test_initialisation():
    for init, deviation in (
        (utils.init_method_normal(0.5), 0.5),
        (utils.scaled_init_method_normal(0.5, 8), 0.125),
        (utils.get_default_init_method(), 0.023),
    ):
        made = init(torch.empty(64, 64))
        share = (made.abs() < 0.6745 * deviation).double().mean()  # half of a normal distribution
        assert abs(share - 0.5) < tol("share", F32, made.numel())
    assert (utils.init_method_constant(3.0)(torch.empty(4)) == 3).all()


def test_tensors(device):
    x = torch.randn(4, device=device)
    assert utils.cast_if_needed(x, F32) is x and utils.cast_if_needed(None, F32) is None
    assert utils.cast_if_needed(x, BF16).dtype == BF16
    assert utils.requires_grad(None, x.clone().requires_grad_())
    assert not utils.requires_grad(x, None)
    assert_same_bits(utils.combine_tensors([x, x], 0), torch.stack([x, x]))
    kept = x.clone()
    kept._do_not_clear = True
    utils.clear_tensor_data(x, None, kept)
    assert x.numel() == 0 and kept.numel() == 4
    assert utils.canonicalize_dtype(None) is torch.get_default_dtype()
    assert utils.canonicalize_device("cpu") == torch.device("cpu")


def test_glu_rows_take_turns():
    gate, up = torch.arange(8), torch.arange(100, 108)
    mixed = utils.interleave_glu_tensor(torch.cat([gate, up]), 4)
    assert mixed.tolist() == [*range(4), *range(100, 104), *range(4, 8), *range(104, 108)]
    assert_same_bits(utils.deinterleave_glu_tensor(mixed, 4), torch.cat([gate, up]))
    for size in (0, 3):
        with pytest.raises(ValueError, match="interleave_size"):
            te.interleave_glu_tensor(mixed, size)


@pytest.mark.gpu
def test_weak_reference_shares_memory_and_keeps_nothing_alive():
    base = torch.arange(24.0, device="cuda").view(4, 6)
    view = base[1:, ::2].requires_grad_()
    made = utils.make_weak_ref({"a": [view], "b": (None, 1, "x")})
    alias = made["a"][0]
    assert made["b"] == (None, 1, "x") and alias.requires_grad
    assert alias.data_ptr() == view.data_ptr() and alias.stride() == view.stride()
    assert_same_bits(alias, view)
    base.add_(1)
    assert_same_bits(alias, view)
    before = torch.cuda.memory_allocated()
    del base, view
    assert torch.cuda.memory_allocated() < before


def test_weak_reference_of_other_things():
    x = torch.ones(2)
    assert utils.make_weak_ref([x])[0] is x
    with pytest.raises(TypeError, match="object object"):
        utils.make_weak_ref(object())


def test_profiler_ranges():
    utils.nvtx_range_push("outer")
    utils.nvtx_range_push("inner")
    with pytest.raises(ValueError, match="'outer'.*'inner'"):
        utils.nvtx_range_pop("outer")
    utils.nvtx_range_pop()
    utils.nvtx_range_pop("outer")
    with pytest.raises(RuntimeError, match="no range"):
        utils.nvtx_range_pop()


def test_dummy_gradients():
    first = get_dummy_wgrad([4, 8], BF16, zero=True)
    assert first.shape == (4, 8) and first.dtype == BF16 and (first == 0).all()
    first.fill_(3)
    assert get_dummy_wgrad([4, 8], BF16).data_ptr() == first.data_ptr()
    assert (get_dummy_wgrad([4, 8], BF16, zero=True) == 0).all()
    assert get_dummy_wgrad([4, 8], F32).dtype == F32


# ---- torch.compile and small functions -----------------------------------------------------------


def test_jit_functions(device):
    x = torch.randn(5, 16, device=device, requires_grad=True)
    bias = torch.randn(16, device=device, requires_grad=True)
    exact = [t.detach().double().requires_grad_() for t in (x, bias)]
    out = jit.bias_gelu_fused(x, bias)
    wanted = torch.nn.functional.gelu(exact[0] + exact[1], approximate="tanh")
    bound = tol("gelu", F32)
    assert_nmse(out, wanted, bound)
    grad = torch.randn_like(out)
    d_bias, d_x = jit.bgrad_dgelu_fused(grad, x.detach(), bias.detach())
    grads = torch.autograd.grad(wanted, exact, grad.double())
    for found, expected in zip((d_x, d_bias), grads, strict=True):
        assert_nmse(found, expected, bound + tol("sum", F32, 16))
    assert jit.bgrad_dgelu_fused(grad, x.detach(), None)[0] is None
    normed = jit.l2normalization_fused(x.detach(), 1e-6)
    square = exact[0].detach().square().sum(-1, keepdim=True) + 1e-6
    assert_nmse(normed, exact[0].detach() / square.sqrt(), tol("sum", F32, 16))
    add = jit.get_bias_dropout_add(training=False)
    assert_same_bits(add(x, bias, x, 0.5), x + (x + bias))
    dropped = jit.get_bias_dropout_add(training=True)(x, None, torch.zeros_like(x), 0.5)
    assert ((dropped == 0) | (dropped == 2 * x)).all()


def test_jit_does_not_compile_what_needs_none():
    def function(x):
        return x

    assert jit.jit_fuser(function) is function
    jit.set_jit_fusion_options()
    for name in dir(jit):
        if name.startswith("warmup_jit"):
            sizes = (16, 1, 2) if name.endswith("all_dtypes") else (16, F32, 1, 2)
            assert getattr(jit, name)(*sizes) is None


def test_no_torch_dynamo_keeps_a_function_out_of_graphs():
    @jit.no_torch_dynamo()
    def outside(x):
        return x + (2 if torch.compiler.is_compiling() else 1)

    run = torch.compile(lambda x: outside(x) * 1, backend="eager")
    assert run(torch.zeros(())).item() == 1


def test_lazy_compile_compiles_at_the_first_call():
    seen = []

    @jit.lazy_compile
    def function(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    assert not seen
    assert function(torch.zeros(())).item() == 1 and seen[0]
