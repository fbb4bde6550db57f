# SPDX-License-Identifier: Apache-2.0
"""Names of NVIDIA Transformer Engine: importable by their paths; absent ones raise when used."""

import copy
import importlib
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch

import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine.common import absent
from transformer_engine.common.absent_names import FEATURES

ROOT = Path(transformer_engine.__file__).parents[1]

# What client programs import, by module.
IMPORTED = {
    "transformer_engine.common.recipe": "CustomRecipe DelayedScaling Float8BlockScaling "
    "Float8CurrentScaling Format MMParams MXFP8BlockScaling NVFP4BlockScaling QParams Recipe",
    "transformer_engine.pytorch": "CudaRNGStatesTracker DType DotProductAttention Fp8Padding "
    "Fp8Unpadding GroupedLinear InferenceParams LayerNorm LayerNormLinear LayerNormMLP Linear "
    "MultiheadAttention RMSNorm RotaryPositionEmbedding TransformerLayer "
    "UserBufferQuantizationMode attention autocast checkpoint constants cpp_extensions "
    "cpu_offload cpu_offload_v1 cross_entropy destroy_ub distributed distributed_weight ep export "
    "float8_tensor fp8 fp8_autocast fp8_model_init get_cpu_offload_context get_cudnn_version "
    "get_default_recipe get_device_compute_capability graph initialize_ub is_bf16_available "
    "is_fp8_available is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available jit "
    "make_graphed_callables module moe_permute moe_unpermute moe_sort_chunks_by_index onnx_export "
    "ops optimizers parallel_cross_entropy permutation quantization quantized_model_init "
    "quantized_tensor router tensor torch_version transformer utils",
    "transformer_engine.pytorch.attention": "DotProductAttention InferenceParams "
    "MultiheadAttention RotaryPositionEmbedding _SplitAlongDim apply_fused_qkv_rotary_pos_emb "
    "apply_rotary_pos_emb dot_product_attention inference multi_head_attention rope",
    "transformer_engine.pytorch.attention.dot_product_attention": "DotProductAttention "
    "_attention_backends backends context_parallel softmax utils",
    "transformer_engine.pytorch.attention.dot_product_attention.backends": "FlashAttention "
    "FusedAttention UnfusedDotProductAttention",
    "transformer_engine.pytorch.attention.dot_product_attention.utils": "AttentionParams "
    "get_attention_backend",
    "transformer_engine.pytorch.attention.inference": "InferenceParams",
    "transformer_engine.pytorch.attention.multi_head_attention": "MultiheadAttention",
    "transformer_engine.pytorch.attention.rope": "RotaryPositionEmbedding "
    "apply_fused_qkv_rotary_pos_emb apply_rotary_pos_emb",
    "transformer_engine.pytorch.constants": "AttnMaskTypes DType MXFP8_BLOCK_SCALING_SIZE "
    "NVFP4_BLOCK_SCALING_SIZE TE_DType",
    "transformer_engine.pytorch.cpp_extensions": "cast_to_fp8 fused_attn_fwd general_gemm "
    "general_grouped_gemm rmsnorm_fwd",
    "transformer_engine.pytorch.cpu_offload": "get_cpu_offload_context mark_not_offload",
    "transformer_engine.pytorch.cpu_offload_v1": "get_cpu_offload_context",
    "transformer_engine.pytorch.cross_entropy": "parallel_cross_entropy",
    "transformer_engine.pytorch.distributed": "CudaRNGStatesTracker FullyShardedDataParallel "
    "_NVFP4AllGatherAsyncHandle activation_recompute_forward allreduce checkpoint "
    "gather_along_first_dim get_all_rng_states get_distributed_rank get_distributed_world_size "
    "graph_safe_rng_available has_te_modules in_fp8_activation_recompute_phase "
    "is_fp8_activation_recompute_enabled prepare_te_modules_for_fsdp "
    "reduce_scatter_along_first_dim set_all_rng_states set_tensor_model_parallel_attributes "
    "split_tensor_into_1d_equal_chunks symm_mem_alloc",
    "transformer_engine.pytorch.ep": "EpBuffer ep_bootstrap ep_combine ep_dispatch ep_finalize "
    "ep_prepare is_symm_backed symm_mem_alloc",
    "transformer_engine.pytorch.export": "onnx_export te_translation_table",
    "transformer_engine.pytorch.float8_tensor": "Float8Tensor",
    "transformer_engine.pytorch.graph": "make_graphed_callables restore_fp8_tensors "
    "save_fp8_tensors set_capture_end set_capture_start",
    "transformer_engine.pytorch.jit": "jit_fuser no_torch_dynamo set_jit_fusion_options "
    "warmup_jit_bias_dropout_add warmup_jit_bias_gelu warmup_jit_l2normalization",
    "transformer_engine.pytorch.module": "Fp8Padding Fp8Unpadding GroupedLinear LayerNorm "
    "LayerNormLinear LayerNormMLP Linear RMSNorm _common base fp8_padding fp8_unpadding "
    "grouped_linear initialize_ub layernorm layernorm_linear layernorm_mlp linear rmsnorm",
    "transformer_engine.pytorch.module._common": "apply_normalization noop_cat",
    "transformer_engine.pytorch.module.base": "TransformerEngineBaseModule "
    "UserBufferQuantizationMode destroy_ub get_dummy_wgrad get_workspace initialize_ub",
    "transformer_engine.pytorch.module.fp8_padding": "Fp8Padding",
    "transformer_engine.pytorch.module.fp8_unpadding": "Fp8Unpadding",
    "transformer_engine.pytorch.module.grouped_linear": "GroupedLinear",
    "transformer_engine.pytorch.module.layernorm": "LayerNorm",
    "transformer_engine.pytorch.module.layernorm_linear": "LayerNormLinear general_gemm",
    "transformer_engine.pytorch.module.layernorm_mlp": "LayerNormMLP",
    "transformer_engine.pytorch.module.linear": "Linear general_gemm",
    "transformer_engine.pytorch.module.rmsnorm": "RMSNorm",
    "transformer_engine.pytorch.ops": "AllReduce BasicLinear Bias FusibleOperation GEGLU GELU "
    "GroupedLinear LayerNorm Linear MakeExtraOutput RMSNorm ReGLU ReLU ReduceScatter "
    "ScaledClampedQGeGLU ScaledSReLU ScaledSwiGLU Sequential SiLU SwiGLU",
    "transformer_engine.pytorch.ops.basic": "BasicLinear GroupedLinear",
    "transformer_engine.pytorch.ops.basic.grouped_linear": "GRAD_INPUT_BUFFER_KEY GroupedLinear "
    "OUTPUT_BUFFER_KEY",
    "transformer_engine.pytorch.ops.op": "BasicOperation FusedOperation FusibleOperation",
    "transformer_engine.pytorch.optimizers": "FusedAdam FusedSGD MultiTensorApply "
    "multi_tensor_applier multi_tensor_l2norm multi_tensor_scale multi_tensor_scale_tensor",
    "transformer_engine.pytorch.permutation": "moe_permute moe_permute_and_pad_with_probs "
    "moe_permute_with_probs moe_sort_chunks_by_index moe_sort_chunks_by_index_with_probs "
    "moe_unpermute",
    "transformer_engine.pytorch.quantization": "FP8GlobalStateManager autocast check_fp8_support "
    "get_align_size_for_quantization quantized_model_init",
    "transformer_engine.pytorch.fp8": "FP8GlobalStateManager autocast "
    "check_fp8_block_scaling_support check_fp8_support check_mxfp8_support check_nvfp4_support "
    "check_recipe_support fp8_autocast fp8_model_init get_default_fp8_recipe get_default_recipe "
    "is_fp8_available",
    "transformer_engine.pytorch.quantized_tensor": "QuantizedTensor",
    "transformer_engine.pytorch.router": "fused_compute_score_for_moe_aux_loss fused_moe_aux_loss "
    "fused_topk_with_score_function",
    "transformer_engine.pytorch.tensor": "MXFP8TensorStorage NVFP4TensorStorage QuantizedTensor",
    "transformer_engine.pytorch.tensor.float8_blockwise_tensor": "Float8BlockwiseQTensor",
    "transformer_engine.pytorch.tensor.float8_tensor": "Float8Tensor",
    "transformer_engine.pytorch.tensor.grouped_tensor": "GroupedTensor",
    "transformer_engine.pytorch.tensor.mxfp8_tensor": "MXFP8Quantizer MXFP8Tensor",
    "transformer_engine.pytorch.tensor.nvfp4_tensor": "NVFP4Tensor",
    "transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage": (
        "Float8BlockwiseQTensorStorage"
    ),
    "transformer_engine.pytorch.tensor.storage.float8_tensor_storage": "Float8TensorStorage",
    "transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage": "MXFP8TensorStorage",
    "transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage": "NVFP4TensorStorage",
    "transformer_engine.pytorch.tensor.utils": "cast_master_weights_to_fp8 "
    "post_all_gather_processing quantize_master_weights replace_raw_data",
    "transformer_engine.pytorch.torch_version": "torch_version",
    "transformer_engine.pytorch.transformer": "TransformerLayer",
    "transformer_engine.pytorch.utils": "SplitAlongDim assert_dim_for_fp8_exec divide "
    "get_cudnn_version get_device_compute_capability make_weak_ref nvtx_range_pop nvtx_range_push "
    "requires_grad round_up_to_nearest_multiple",
    "transformer_engine_torch": "DType FP8BwdTensors FP8FwdTensors dequantize rmsnorm_fwd "
    "thd_get_partitioned_indices",
}

# What the test files of NVIDIA Transformer Engine 2.20.2 import and start with, by module.
STARTED_WITH = {
    "transformer_engine.common": "_get_shared_object_file",
    "transformer_engine.debug.features": "api",
    "transformer_engine.debug.features.utils": "stats_computation",
    "transformer_engine.debug.pytorch": "debug_quantization",
    "transformer_engine.pytorch": (
        "HybridQuantizedTensor HybridQuantizedTensorStorage QuantizerRole _extra_state "
        "custom_recipes dynamo"
    ),
    "transformer_engine.pytorch.attention": "FusedMLAQUpProjRopeQuant",
    "transformer_engine.pytorch.attention.dot_product_attention": "flex_attention",
    "transformer_engine.pytorch.attention.dot_product_attention.context_parallel": (
        "generate_positional_ids_for_cp get_batch_on_this_cp_rank pad_thd_sequences_for_cp"
    ),
    "transformer_engine.pytorch.attention.dot_product_attention.utils": (
        "AttentionLogging _get_supported_versions check_set_window_size"
    ),
    "transformer_engine.pytorch.constants": "FP8BwdTensorIdx FP8FwdTensorIdx",
    "transformer_engine.pytorch.cpp_extensions": "general_grouped_gemm_for_grouped_tensor",
    "transformer_engine.pytorch.cpp_extensions.fused_attn": "FusedAttnBackend",
    "transformer_engine.pytorch.cpp_extensions.gemm": (
        "_unwrap_tensor _validate_native_gemm_output_quantizer"
    ),
    "transformer_engine.pytorch.custom_recipes": (
        "gemm quantizer_factories quantizer_factory_zoo reference_current_scaling reference_nvfp4"
    ),
    "transformer_engine.pytorch.distributed_weight": "is_distributed_weight",
    "transformer_engine.pytorch.module": (
        "_split_quantization is_module_grouped_tensor_path_supported"
    ),
    "transformer_engine.pytorch.module._common": "set_quantizer_usage_for_wgrad_all_gather",
    "transformer_engine.pytorch.module.base": "_2X_ACC_DGRAD _2X_ACC_FPROP _2X_ACC_WGRAD",
    "transformer_engine.pytorch.module.grouped_linear": (
        "_GroupedLinear is_module_grouped_tensor_path_supported"
    ),
    "transformer_engine.pytorch.ops": "fused fuser",
    "transformer_engine.pytorch.ops.basic": "basic_linear",
    "transformer_engine.pytorch.ops.basic.grouped_linear": (
        "is_op_fuser_grouped_tensor_path_supported"
    ),
    "transformer_engine.pytorch.ops.fused": "grouped_mlp",
    "transformer_engine.pytorch.quantization": (
        "MXFP8BlockScalingRecipeState NVFP4BlockScalingRecipeState RecipeState "
        "_amax_and_scale_update _default_sf_compute"
    ),
    "transformer_engine.pytorch.router": "QBHistogramMode RoutingMapFormat",
    "transformer_engine.pytorch.triton": "mhc",
    "transformer_engine.pytorch.utils": "gpu_autocast_ctx",
    "transformer_engine_torch": "multi_tensor_compute_scale_inv_e8m0",
}

LISTED = {
    (absent._full(module), name): feature
    for feature in FEATURES
    for module, name in feature.listed()
}


def look_up(module, path):
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


# ---- every name ----------------------------------------------------------------------------------


@pytest.mark.parametrize("module", IMPORTED)
def test_names_are_importable(module):
    found = importlib.import_module(module)
    for name in IMPORTED[module].split():
        exec(f"from {module} import {name}", {})
        assert name in dir(found), name


@pytest.mark.parametrize("module", STARTED_WITH)
def test_what_the_tests_of_the_incumbent_import(module):
    found = importlib.import_module(module)
    for name in STARTED_WITH[module].split():
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")


@pytest.mark.parametrize(("module", "name"), LISTED)
def test_an_absent_name_raises_when_used(module, name):
    found, feature = look_up(module, name), LISTED[module, name]
    with pytest.raises(NotImplementedError) as info:
        found(1, option=2)
    text = str(info.value)
    assert name in text and feature.reason in text and feature.instead in text
    assert text.startswith("transformer_engine")
    assert te.is_available(f"{module}.{name}") is False


@pytest.mark.parametrize(("module", "name"), LISTED)
def test_an_absent_name_behaves(module, name):
    """It prints, pickles, copies and can be looked at; `from module import *` gives it."""
    found = look_up(module, name)
    assert name.split(".")[-1] in repr(found)
    assert inspect.getdoc(found).startswith("Not built yet")
    assert inspect.signature(found)
    assert copy.deepcopy(found) is found
    if "." not in name:
        assert pickle.loads(pickle.dumps(found)) is found
        assert name in importlib.import_module(module).__all__
    if isinstance(found, type):
        assert not isinstance(torch.ones(1), found) and not isinstance(te.Linear, found)
        assert not isinstance(torch.nn.Parameter(torch.ones(1)), found)
        derived = type("Derived", (found,), {"__init__": lambda self: None})
        assert issubclass(derived, found)
        with pytest.raises(NotImplementedError, match=r"base of .*Derived"):
            derived()


def test_one_absent_name_is_one_object():
    paths = ["pytorch", "pytorch.module", "pytorch.module.grouped_linear"]
    objects = {look_up(f"transformer_engine.{path}", "GroupedLinear") for path in paths}
    assert len(objects) == 1
    (only,) = objects
    assert only.__module__ == "transformer_engine.pytorch.module.grouped_linear"
    assert issubclass(only, torch.nn.Module)
    assert te.ops.GroupedLinear is not only
    assert te.ops.GroupedLinear is te.ops.basic.grouped_linear.GroupedLinear


def test_no_absent_name_hides_one_that_is_built():
    for module, name in LISTED:
        assert "." in name or look_up(module, name) is absent.stand_in(module, name), name


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("attention", "DotProductAttention"),
        ("attention.dot_product_attention", "DotProductAttention"),
        ("attention.multi_head_attention", "MultiheadAttention"),
        ("attention.rope", "apply_rotary_pos_emb"),
        ("distributed", "checkpoint"),
        ("distributed", "CudaRNGStatesTracker"),
        ("fp8", "autocast"),
        ("fp8", "fp8_autocast"),
        ("fp8", "is_fp8_available"),
        ("fp8", "quantized_model_init"),
        ("module", "Linear"),
        ("module.layernorm", "LayerNorm"),
        ("module.layernorm_linear", "LayerNormLinear"),
        ("module.layernorm_mlp", "LayerNormMLP"),
        ("module.linear", "Linear"),
        ("module.rmsnorm", "RMSNorm"),
        ("quantization", "autocast"),
        ("quantization", "get_default_recipe"),
        ("torch_version", "torch_version"),
        ("transformer", "TransformerLayer"),
        ("utils", "get_cudnn_version"),
        ("constants", "DType"),
        ("float8_tensor", "Float8Tensor"),
        ("quantized_tensor", "QuantizedTensor"),
        ("tensor", "Float8Quantizer"),
        ("tensor", "QuantizedTensorStorage"),
        ("tensor.float8_tensor", "Float8Tensor"),
        ("tensor.quantized_tensor", "Quantizer"),
    ],
)
def test_a_name_is_the_same_object_under_every_path(path, name):
    module = importlib.import_module(f"transformer_engine.pytorch.{path}")
    assert getattr(module, name) is getattr(te, name)


def test_base_class_of_the_modules_with_fp8_gemms():
    base = te.module.base.TransformerEngineBaseModule
    fp8 = (te.Linear(16, 16), te.LayerNormLinear(16, 16), te.LayerNormMLP(16, 32))
    assert all(isinstance(module, base) for module in fp8)
    assert not isinstance(te.LayerNorm(16), base) and not isinstance(torch.nn.Linear(1, 1), base)


# ---- asking --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Linear", True),
        ("fp8.check_fp8_support", True),
        ("transformer_engine.common.recipe.DelayedScaling", True),
        ("common.recipe.Float8CurrentScaling", True),
        ("GroupedLinear", False),
        ("permutation.moe_permute", False),
        ("tensor.float8_tensor.Float8Tensor.make_like", True),
        ("tensor.grouped_tensor.GroupedTensor", False),
        ("common.recipe.NVFP4BlockScaling", True),
        ("common.recipe.CustomRecipe", True),
        ("transformer_engine.pytorch.ops.Sequential", False),
    ],
)
def test_is_available(name, expected):
    assert te.is_available(name) is expected
    answer, reason = te.is_available(name, return_reason=True)
    assert answer is expected and bool(reason) is not expected


def test_is_available_of_a_name_that_nobody_knows():
    answer, reason = te.is_available("Linnear", return_reason=True)
    assert answer is False and "Linnear" in reason
    with pytest.raises(TypeError, match=r"name=<class .*Linear'>, expected a string"):
        te.is_available(te.Linear)


def test_an_attribute_that_nobody_knows():
    for module in IMPORTED:
        with pytest.raises(AttributeError, match="no attribute 'linnear'"):
            importlib.import_module(module).linnear  # noqa: B018


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_recipes_are_asked_for(name):
    """About the hardware: modules run such recipes all the same, emulated."""
    question = getattr(te, f"is_{name}_available")
    assert question() is False
    answer, reason = question(return_reason=True)
    assert answer is False and "no native GEMMs" in reason and f"emulated.{name}" in reason
    assert getattr(te.fp8, f"check_{name}_support")() == (False, reason)
    assert getattr(te.fp8.FP8GlobalStateManager, f"is_{name}_available")() == (False, reason)


# ---- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: te.cpu_offload.get_cpu_offload_context(True), "get_cpu_offload_context"),
        (lambda: te.onnx_export(True), "onnx_export"),
        (
            lambda: te.distributed.gather_along_first_dim(
                torch.ones(1), None, quantizer=te.NVFP4Quantizer(), external_coalescing=True
            ),
            "gather_along_first_dim",
        ),
        (
            lambda: te.fp8.FP8GlobalStateManager.set_skip_fp8_weight_update_tensor(True),
            "set_skip_fp8_weight_update_tensor",
        ),
    ],
)
def test_what_is_built_in_part_refuses_the_rest(call, name):
    with pytest.raises(NotImplementedError, match=rf"{name}.* is not built yet: .* Instead: "):
        call()


@pytest.mark.parametrize("init", [te.quantized_model_init, te.fp8_model_init])
def test_disabled_forms_change_nothing(init):
    with init(enabled=False):
        layer = te.Linear(16, 16)
    assert type(layer.weight) is torch.nn.Parameter
    assert not te.fp8.FP8GlobalStateManager.with_fp8_parameters()
    context, mark = te.cpu_offload.get_cpu_offload_context(False, 1, 1)
    with context, te.onnx_export(False):
        out = mark(layer(torch.ones(16, 16, device=layer.weight.device)))
    out.sum().backward()
    assert layer.weight.grad is not None


# ---- modules and documents -----------------------------------------------------------------------


def test_the_table_in_the_documents_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "tools/names_table.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


# Imports each path in a process that has imported torch alone, and prints those that fail.
FIRST = """
import json, os, sys, traceback
import torch
for module, names in json.load(sys.stdin).items():
    child = os.fork()
    if child == 0:
        try:
            exec(f"from {module} import " + ", ".join(names.split()))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        print(module)
"""


def test_every_path_can_be_imported_first():
    """No path depends on another one having been imported."""
    given = json.dumps(IMPORTED)
    done = processes.run(FIRST, folder=ROOT, input=given, limit=300)
    assert done.stdout == "", done.stderr


# Prints the modules that no attributes of their packages lead to.
REACHED = """
import functools, json, sys
import transformer_engine.pytorch
for module in json.load(sys.stdin):
    try:
        functools.reduce(getattr, module.split(".")[1:], transformer_engine)
    except AttributeError as error:
        print(error)
"""


def test_modules_are_attributes_of_their_packages():
    """``te.ops.basic.grouped_linear`` works where nothing has imported it by its path."""
    given = json.dumps([module for module in IMPORTED if module.startswith("transformer_engine.")])
    done = processes.run(REACHED, folder=ROOT, input=given, limit=300)
    assert done.stdout == "", done.stderr
