# SPDX-License-Identifier: Apache-2.0
"""What programs call by the names of NVIDIA Transformer Engine beside its modules' forwards."""

import copy

import pytest
import torch
from comparators import assert_nmse
from pytorch.helpers import assert_same_bits
from pytorch.module_cases import batch, make, step
from tols import BF16, F32, tol

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import decode_cudnn_version
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    QuantizerRole,
)
from transformer_engine.pytorch import (
    _extra_state,
    constants,
    cpu_offload,
    cpu_offload_v1,
    distributed,
    export,
    jit,
    utils,
)
from transformer_engine.pytorch.attention import custom_ops
from transformer_engine.pytorch.module import _common, base
from transformer_engine.pytorch.transformer import DropPath

FP8 = constants.DType.kFloat8E4M3


# ---- numbers, devices, tensors -------------------------------------------------------------------


def test_numbers():
    assert [utils.ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert decode_cudnn_version(91900) == (9, 19, 0) and decode_cudnn_version(8907) == (8, 9, 7)
    assert decode_cudnn_version(0) == (0, 0, 0)


@pytest.mark.parametrize(
    ("inp", "weight", "fp8", "words"),
    [
        ((5, 7), (3, 7), False, None),
        ((8, 32), (16, 32), True, None),
        ((5, 7), (3, 8), False, "inp .5, 7., weight .3, 8."),
        ((5, 32), (16, 32), True, "by 8"),
        ((8, 32), (12, 32), True, "by 8"),
    ],
)
def test_dims_of_a_gemm(inp, weight, fp8, words):
    arguments = torch.empty(inp), torch.empty(weight), fp8
    if words is None:
        utils.check_gemm_dims(*arguments)
    else:
        with pytest.raises(ValueError, match=words):
            utils.check_gemm_dims(*arguments)


def test_devices(device):
    made = torch.empty(1, device=device).device
    assert utils.devices_match(made, torch.device(device))
    assert not utils.devices_match(made, torch.device("meta"))
    ones = utils.get_cached_ones_tensor(5, BF16, made)
    assert ones is utils.get_cached_ones_tensor(5, BF16, made) and (ones == 1).all()
    assert (ones.shape, ones.dtype, ones.device) == ((5,), BF16, made)
    with utils.gpu_autocast_ctx(dtype=BF16, enabled=torch.cuda.is_available()):
        assert not torch.cuda.is_available() or utils.torch_get_autocast_gpu_dtype() is BF16


def test_comparisons(capsys):
    a = torch.randn(4, 3)
    assert utils.all_close(a, a.clone()) and not utils.all_close(a, a + 1)
    assert not utils.all_close(a, a[:2])
    utils.compare_tensors(a, a + 2)
    utils.compare_tensors(a, a[:2])
    utils.print_rank_0("here")
    text = capsys.readouterr().out
    assert text.count("(4, 3) torch.float32") == 3 and "largest difference: 2" in text
    assert text.endswith("here\n")


def test_quantized_operands():
    x = torch.randn(16, 16)
    assert utils.needs_quantized_gemm(te.Float8CurrentScalingQuantizer(FP8).quantize(x))
    assert not utils.needs_quantized_gemm(x) and not utils.needs_quantized_gemm(None)


def test_equal_parts():
    x = torch.randn(3, 8)
    parts = utils.split_tensor_along_dim(x, -1, 4)
    assert_same_bits(torch.cat(parts, 1), x)
    assert parts[1].data_ptr() == x[:, 2:].data_ptr() and not parts[1].is_contiguous()
    assert utils.split_tensor_along_dim(x, -1, 4, True)[1].is_contiguous()
    with pytest.raises(ValueError, match="8 is not divisible by 3"):
        utils.split_tensor_along_dim(x, 1, 3)


def test_tensors_that_are_no_views():
    x, y = torch.randn(4, 4), torch.randn(2, 2)
    assert utils.assert_viewless_tensor(x) is x and utils.assert_viewless_tensor(None) is None
    assert utils.assert_viewless_tensor([x, None]) == [x, None]
    with pytest.raises(ValueError, match=r"\(4, 4\).*own. Why"):
        utils.assert_viewless_tensor([x[1:]], "Why")
    utils.safely_set_viewless_tensor_data(x, y)
    assert x.shape == (2, 2) and x.data_ptr() == y.data_ptr()
    with pytest.raises(ValueError, match="new data"):
        utils.safely_set_viewless_tensor_data(torch.randn(4)[:2], y)


def test_trackers_are_checked():
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    utils.validate_rng_states_func(lambda: tracker)
    utils.validate_ctx_manager(tracker.fork)
    with pytest.raises(TypeError, match="expected a function"):
        utils.validate_rng_states_func(3)
    with pytest.raises(TypeError, match="get_states, set_states, fork"):
        utils.validate_rng_states_func(lambda: 3)
    with pytest.raises(TypeError, match="a int object"):
        utils.validate_ctx_manager(lambda: 3)


def test_ranges():
    with utils.get_nvtx_range_context("outer"):
        utils.nvtx_range_push("inner")
        utils.nvtx_range_pop("inner")
    with pytest.raises(RuntimeError, match="no range"):
        utils.nvtx_range_pop()


def test_what_is_not_compiled_is_told_once():
    utils.record_compile_disabled("a reason")
    utils.record_compile_disabled("a reason")
    with pytest.warns(UserWarning, match="a reason") as told:
        utils.warn_if_compile_disabled()
    assert len(told) == 1
    utils.warn_if_compile_disabled()


# ---- small functions of layers -------------------------------------------------------------------


def test_l2_normalization():
    x = torch.randn(6, 32, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    wanted = wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)
    grad = torch.randn(6, 32)
    (exact,) = torch.autograd.grad(wanted, wide, grad.double())
    out, factor = jit.l2normalization_fwd_fused(x.detach(), 1e-6)
    assert_same_bits(out, jit.l2normalization_fused_(x.detach(), 1e-6))
    made = jit.l2normalization_backward_fused_(grad, x.detach(), factor, 1e-6)
    assert_nmse(made, exact, tol("sum", F32, 32))


def test_gelu_without_a_bias():
    x, grad = torch.randn(2, 6, 16)
    wide = x.double().requires_grad_()
    wanted = torch.nn.functional.gelu(wide, approximate="tanh")
    (exact,) = torch.autograd.grad(wanted, wide, grad.double())
    assert_nmse(jit.gelu_fused_(x), wanted, tol("gelu", F32))
    assert_nmse(jit.dgelu_fused_(grad, x), exact, tol("gelu", F32))


def test_bias_dropout_add():
    x, residual, bias = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    plain = residual + (x + bias)
    assert_same_bits(jit.bias_dropout_add(x, bias, residual, 0.5, False), plain)
    assert_same_bits(jit.bias_dropout_add_fused_inference(x, bias, residual, 0.5), plain)
    dropped = jit.bias_dropout_add_fused_train_(x, None, torch.zeros_like(x), 0.5)
    assert ((dropped == 0) | (dropped == 2 * x)).all()
    assert jit.get_bias_dropout_add(True) is jit.bias_dropout_add_fused_train


def test_conditions_of_graphs_are_refused():
    with pytest.raises(NotImplementedError, match=r"no_torch_dynamo\(when=...\)"):
        jit.no_torch_dynamo(when=lambda: True)


def test_paths_are_dropped_by_samples(device):
    layer, x = DropPath(0.5), torch.randn(64, 3, 8, device=device)
    out = layer(x)
    dropped = (out == 0).flatten(1).all(1)
    assert 0 < dropped.sum() < 64
    assert_same_bits(out[~dropped], 2 * x[~dropped])
    assert_same_bits(layer.eval()(x), x)
    with pytest.raises(ValueError, match="drop_prob"):
        DropPath(1.5)


@pytest.mark.parametrize("name", ["convert_thd_to_bshd", "fa_prepare_fwd"])
def test_operators_of_attention(device, name):
    x = torch.randn(6, 2, 16, device=device, dtype=BF16)
    lengths = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)
    if name == "convert_thd_to_bshd":
        made = custom_ops.convert_thd_to_bshd(x, lengths, 2, 4)
        assert_same_bits(made[1], x[2:])
        assert_same_bits(custom_ops.convert_bshd_to_thd(made, lengths, 6), x)
    else:
        whole = torch.randn(6, 2, 2, 48, device=device, dtype=BF16)
        parts = custom_ops.fa_prepare_fwd(whole[..., :16])
        assert_same_bits(custom_ops.fa_prepare_bwd(*parts), whole)
    assert custom_ops.QKV_FORMAT_VALUE["thd"] == int(tex.NVTE_QKV_Format.NVTE_THD)


# ---- constants, state, offload -------------------------------------------------------------------


def test_constants():
    assert constants.FP8FwdTensorIdx.GEMM1_WEIGHT == constants.FP8FwdTensors.GEMM1_WEIGHT == 1
    assert constants.FP8BwdTensorIdx.GRAD_OUTPUT2 == 2
    assert len(set(constants.QKVLayouts)) == len(constants.QKVLayouts) == 25
    spelt = {layout.removeprefix("NVTE_").lower() for layout in dir(tex.NVTE_QKV_Layout)}
    assert {name.lower() for name in constants.QKVLayouts} <= spelt
    cast = constants.DType.cast
    assert cast(BF16) is cast(6) is cast(constants.DType.kBFloat16) is constants.DType.kBFloat16
    with pytest.raises(TypeError, match=r"dtype=torch.int64"):
        cast(torch.int64)
    assert te.CPLoadBalancingStrategy.DUAL_CHUNK_SWAP.name == "DUAL_CHUNK_SWAP"


@pytest.mark.parametrize(
    ("recipe", "policy"),
    [
        (DelayedScaling(), "STATEFUL_FP8_DELAYED_SCALING"),
        (Float8CurrentScaling(), "STATELESS"),
        (MXFP8BlockScaling(), "STATELESS"),
        (CustomRecipe(lambda role: te.IdentityQuantizer()), "DYNAMIC"),
    ],
)
def test_state_of_recipes_in_checkpoints(recipe, policy):
    assert _extra_state.recipe_extra_state_policy(recipe).name == policy
    assert _extra_state.is_stateless_recipe(recipe) is (policy == "STATELESS")


def test_pickles_are_never_loaded(monkeypatch):
    monkeypatch.setenv(_extra_state.UNSAFE_PICKLE_EXTRA_STATE_ENV, "1")
    assert not _extra_state.unsafe_pickle_extra_state_enabled()
    assert not _extra_state.should_load_extra_state_pickle(b"\x80", "key")
    assert _extra_state.extra_state_pickle_advisory("key").startswith("key: ")
    with pytest.raises(TypeError, match="recipe=None"):
        _extra_state.recipe_extra_state_policy(None)


def test_what_is_off():
    assert not cpu_offload.NVTE_CPU_OFFLOAD_V1 and cpu_offload.OFFLOAD_SYNCHRONIZER is None
    assert not cpu_offload_v1.is_current_layer_offloaded()
    x, y = torch.ones(1), torch.ones(1)
    cpu_offload_v1.mark_activation_offload(x, offload=False)
    cpu_offload_v1.mark_activation_offload(y)
    assert not hasattr(x, "activation_offloading") and y.activation_offloading
    context, mark = cpu_offload_v1.get_cpu_offload_context(False, 2, 4, True, False, True)
    with context:
        assert mark(x) is x
    with pytest.raises(NotImplementedError, match="get_cpu_offload_context"):
        cpu_offload_v1.get_cpu_offload_context(True)
    assert not base.is_ub_initialized() and not base.using_cublasmp_backend()
    assert base.layers_atomic_ring_exchange == []
    assert (base._2X_ACC_FPROP, base._2X_ACC_DGRAD, base._2X_ACC_WGRAD) == (False, True, True)
    assert not distributed.HAS_TORCH_SYMMETRIC and not distributed.symmetric_mem_cache
    assert (export.TORCH_MAJOR, export.TORCH_MINOR) == te.torch_version()[:2]
    for module in (te.module.grouped_linear, te.module):
        assert not module.is_module_grouped_tensor_path_supported(None, BF16)
    assert not te.ops.basic.is_op_fuser_grouped_tensor_path_supported(None, BF16)
    assert not te.distributed_weight.is_distributed_weight(torch.ones(1))


def test_older_names_of_arguments():
    logits, target = torch.randn(2, 3, 8), torch.randint(8, (6,))
    found = te.parallel_cross_entropy(logits, target, overwrite_input=True)
    assert_same_bits(found, te.parallel_cross_entropy(logits, target))
    with pytest.raises(TypeError, match="_input"):
        te.parallel_cross_entropy(logits, target, _input=logits)
    layer = te.DotProductAttention(2, 16)
    strategy = te.CPLoadBalancingStrategy.NO_LOAD_BALANCE
    layer.set_context_parallel_group(None, [], None, "p2p", strategy)


# ---- weights that ranks share --------------------------------------------------------------------


def test_a_weight_of_a_rank_is_initialised():
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    weights = [torch.empty(8, 8, device="cuda" if torch.cuda.is_available() else "cpu")]
    weights.append(weights[0].clone())
    tracker_of = [lambda: tracker, None]
    for weight, get in zip(weights, tracker_of, strict=True):
        distributed.initialize_affine_weight_gpu(weight, torch.nn.init.normal_, get, 1, 2)
        assert (weight.partition_dim, weight.partition_stride) == (1, 2)
    again = te.CudaRNGStatesTracker()
    again.add("model-parallel-rng", 7)
    plain = torch.empty_like(weights[0])
    distributed.initialize_affine_weight_gpu(
        plain, torch.nn.init.normal_, lambda: again, set_tp_attributes=False
    )
    assert_same_bits(plain, weights[0].detach())
    assert not hasattr(plain, "partition_dim")


def test_classes_of_modules():
    classes = distributed.get_te_classes()
    assert {te.Linear, te.TransformerLayer, te.DotProductAttention, te.RMSNorm} <= set(classes)
    gathered, handle = distributed.gather_along_first_dim(
        torch.ones(2), None, external_coalescing=True
    )
    assert gathered.shape == (2,) and handle is None


def test_quantizers_for_ranks():
    class Ranked:
        amax_reduction_group, with_amax_reduction, alone = None, False, False

        def supports_only_rowwise_all_gather(self):
            return self.alone

        def set_usage(self, **usage):
            self.usage = usage

    quantizer = Ranked()
    _common.set_quantizer_amax_reduction_group(quantizer, "group")
    assert (quantizer.amax_reduction_group, quantizer.with_amax_reduction) == ("group", True)
    _common.set_quantizer_amax_reduction_group(quantizer, None)
    assert not quantizer.with_amax_reduction
    _common.set_quantizer_amax_reduction_group(object(), None)
    _common.set_quantizer_usage_for_wgrad_all_gather(quantizer)
    assert quantizer.usage == {"rowwise": False, "columnwise": True}
    quantizer.alone = True
    _common.set_quantizer_usage_for_wgrad_all_gather(quantizer)
    assert quantizer.usage == {"rowwise": True, "columnwise": False}


# ---- modules -------------------------------------------------------------------------------------


def test_names_of_parameters():
    assert (te.Linear(16, 16).weight_names, te.Linear(16, 16).bias_names) == (["weight"], ["bias"])
    split = te.Linear(16, 16, parameters_split=("a", "b"))
    assert split.weight_names == ["a_weight", "b_weight"]
    assert split.bias_names == ["a_bias", "b_bias"]
    assert te.LayerNormLinear(16, 16).weight_names == ["weight"]


def test_weight_gradients_that_are_put_off_are_told(device):
    layer = te.Linear(16, 16, delay_wgrad_compute=True, device=device)
    called = []
    layer.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(layer.weight.grad))
    assert layer.need_backward_dw() and not te.Linear(16, 16).need_backward_dw()
    layer(torch.randn(16, 16, device=device)).sum().backward()
    assert not called
    layer.backward_dw()
    assert len(called) == 1 and called[0] is layer.weight.grad
    attention = te.DotProductAttention(2, 16)
    assert not attention.need_backward_dw() and attention.backward_dw() is None
    assert attention.reset_parameters() is None


@pytest.mark.parametrize("kind", ["linear", "swiglu"])
def test_state_is_taken_and_given_back(device, kind):
    module = make(kind, device)
    assert module.get_fp8_meta_tensors() is None
    step(module, batch(device), DelayedScaling(amax_history_len=4))
    state = module.get_fp8_meta_tensors()
    assert set(state) == {"scaling_fwd", "scaling_bwd"}
    assert_same_bits(state["scaling_fwd"][0], module.fp8_meta["scaling_fwd"].scale)
    assert_same_bits(state["scaling_bwd"][1], module.fp8_meta["scaling_bwd"].amax_history)
    kept = copy.deepcopy(state)
    step(module, 8 * batch(device), DelayedScaling(amax_history_len=4))
    module.reset_fp8_meta_tensors(state)
    assert_same_bits(module.get_fp8_meta_tensors(), kept)
    module.reset_fp8_meta_tensors()
    assert module.get_fp8_meta_tensors() is None


def test_roles_of_quantizers():
    layer = te.LayerNormMLP(16, 32, name="mlp")
    boundary = QuantizerRole("linear", "", "next")
    layer.output_quantizer_role = boundary
    forward = layer.get_quantizer_roles(fwd=True, num_quantizers=6)
    assert [role and (role.tensor_type, role.name) for role in forward] == [
        ("input", "mlp.fc1"), ("weight", "mlp.fc1"), None,
        ("input", "mlp.fc2"), ("weight", "mlp.fc2"), ("", "next"),
    ]  # fmt: skip
    backward = layer.get_quantizer_roles(fwd=False, num_quantizers=4)
    assert [role and role.tensor_type for role in backward] == [
        "grad_output", None, "grad_output", None,
    ]  # fmt: skip
    with pytest.raises(ValueError, match="num_quantizers=3, expected 6"):
        layer.get_quantizer_roles(fwd=True, num_quantizers=3)
    attention = te.DotProductAttention(2, 16)
    assert attention.get_quantizer_roles(fwd=True, num_quantizers=3) is None


def test_questions_and_attributes():
    layer = te.Linear(16, 16)
    assert not layer.is_fsdp2 and not layer.is_debug_iter() and layer.no_debug_features_active([])
    assert layer.set_nccl_overlap_warning_if_tp() is None
    layer.fast_setattr("own", 3)
    layer.module_setattr("other", torch.nn.Identity())
    assert layer.own == 3 and "other" in dict(layer.named_children())
    for module in (te.RMSNorm(16), te.MultiheadAttention(32, 2), te.LayerNorm(16)):
        module.fast_setattr("own", 4)
        assert module.own == 4
    norm = te.LayerNorm(16)
    torch.nn.init.zeros_(norm.weight)
    norm.reset_layer_norm_parameters()
    assert (norm.weight == 1).all() and norm.fwd_ln_sm_margin == 0
    with pytest.raises(NotImplementedError, match="prepare_forward is not built yet"):
        layer.prepare_forward(torch.ones(1))
    with pytest.raises(NotImplementedError, match="onnx_forward"):
        layer.onnx_forward(torch.ones(1), False, True)
