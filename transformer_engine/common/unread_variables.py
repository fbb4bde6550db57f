# SPDX-License-Identifier: Apache-2.0
"""Environment variables that NVIDIA Transformer Engine 2.20 reads and this library does not.

`config` has those that are read. A program that sets one of `RUN` is told so once, when it makes
its first module; ``setup.py`` tells of those of `BUILD`. The tables in ``docs/environment.md`` are
made from here (``tools/environment_table.py``).
"""

from typing import NamedTuple


class Unread(NamedTuple):
    """Variables that are not read, for one reason."""

    names: str  # separated by blanks
    what: str  # what they are for there; no sentence
    instead: str  # what to do here
    same: str = ""  # values, separated by blanks, that ask for what is done here anyway

    def line(self, name: str, value: str) -> str:
        """Text of the warning where it is set."""
        return (
            f"environment variable {name}={value!r} is not read by this library ({self.what}). "
            f"Here: {self.instead}"
        )


_NO_GROUPS = "there are no grouped GEMMs; unset it"
_NO_TRITON = "no kernel is written in Triton; unset it"
_NO_USER_BUFFERS = "there are no user buffers (docs/not_there.md); unset it"

RUN = (
    Unread(
        "NVTE_FLASH_ATTN_V2 NVTE_FLASH_ATTN_V3 NVTE_FLASH_ATTN_V4",
        "which versions of the package flash-attn may run",
        "that package is not used; NVTE_FUSED_ATTN, NVTE_FLASH_ATTN and NVTE_UNFUSED_ATTN choose "
        "(docs/attention.md)",
        same="0",
    ),
    Unread(
        "NVTE_FUSED_ATTN_BACKEND",
        "kernel of fused attention, in releases before 2.20",
        "the call decides; te.explain_attention says by what",
    ),
    Unread(
        "NVTE_FUSED_ATTN_USE_FAv2_BWD",
        "backward of attention by flash-attn 2",
        "a backward runs by the backend of its forward; unset it",
        same="0",
    ),
    Unread(
        "NVTE_APPLY_QK_LAYER_SCALING",
        "scores of fp16 attention divided by the number of the layer until the softmax",
        "the scores are fp32 and need it not; results are the same without it",
        same="0",
    ),
    Unread(
        "NVTE_MASKED_SOFTMAX_FUSION",
        "softmax of unfused attention in one kernel",
        "it always is one; unset it",
        same="1",
    ),
    Unread(
        "NVTE_BATCH_MHA_P2P_COMM",
        "communication of context parallelism",
        "context parallelism over several ranks is not built (docs/not_there.md)",
        same="0",
    ),
    Unread(
        "NVTE_DPA_FP8CS_O_in_F16",
        "the output of FP8 attention kept in 16 bits for the backward",
        "a call returns its FP8 output read again, so numbers would be the same; unset it",
    ),
    Unread(
        "NVTE_USE_FAST_MATH NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH",
        "casts by approximate arithmetic",
        "casts are exact, with the same bits on every device; unset it",
        same="0",
    ),
    Unread(
        "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE",
        "unpickling of _extra_state entries",
        "nothing is unpickled; TE_EXTRA_STATE=ignore loads the weights alone (docs/checkpoints.md)",
        same="0",
    ),
    Unread(
        "NVTE_TORCH_COMPILE",
        "small functions compiled by torch.compile",
        "nothing is compiled unless the program asks for it; unset it",
        same="0",
    ),
    Unread(
        "NVTE_BIAS_GELU_NVFUSION NVTE_BIAS_DROPOUT_FUSION",
        "bias and GELU, or bias, dropout and residual, in one kernel",
        "they always are; unset it",
        same="1",
    ),
    Unread(
        "NVTE_GEMM_GELU_FUSION",
        "GELU as part of the GEMM before it",
        "GELU is fused with the cast of the GEMM after it; unset it",
        same="0",
    ),
    Unread(
        "NVTE_FWD_LAYERNORM_SM_MARGIN NVTE_BWD_LAYERNORM_SM_MARGIN NVTE_INF_LAYERNORM_SM_MARGIN "
        "NVTE_EXT_MARGIN_SM",
        "multiprocessors that norms or GEMMs leave free",
        "kernels take the whole GPU; unset it",
        same="0",
    ),
    Unread(
        "NVTE_NORM_FWD_USE_CUDNN NVTE_NORM_BWD_USE_CUDNN "
        "NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE",
        "norms by cuDNN",
        "norms are this library's own kernels; unset it",
        same="0",
    ),
    Unread(
        "NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE",
        "1 + weight of a zero-centered norm rounded to the dtype of the weight",
        "it is fp32; unset it",
        same="0",
    ),
    Unread(
        "NVTE_ENABLE_CUTEDSL_BACKEND",
        "MXFP8 casts by kernels in CuTe DSL, on Blackwell",
        "casts are CUDA C; unset it",
        same="0",
    ),
    Unread(
        "NVTE_USE_CUTLASS_GROUPED_GEMM NVTE_CUTLASS_GROUPED_GEMM_WARN_FALLBACK "
        "NVTE_GROUPED_LINEAR_SINGLE_PARAM NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM "
        "NVTE_CUTEDSL_FUSED_GROUPED_MLP NVTE_CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM",
        "grouped linear layers",
        _NO_GROUPS,
        same="0",
    ),
    Unread(
        "NVTE_FUSED_GROUP_REQUANTIZE",
        "MXFP8 tensors of a group cast again in one kernel",
        _NO_GROUPS,
        same="0",
    ),
    Unread(
        "NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP",
        "weight gradients of a grouped MLP without CuTe DSL",
        _NO_GROUPS,
        same="0 1",
    ),
    Unread(
        "NVTE_FUSED_MLA_Q_UPROJ",
        "projection of queries of MLA in one kernel, on Blackwell",
        "te.Linear and te.apply_rotary_pos_emb; unset it",
        same="0",
    ),
    Unread(
        "NVTE_RADIX_TOPK_THRESHOLD NVTE_EP_HANDLE_CACHE_SIZE",
        "routers and communication of mixtures of experts",
        "they are not built (docs/not_there.md)",
    ),
    Unread(
        "NVTE_AG_P2P_MULTI_ATOMIC NVTE_RS_STRIDED_ATOMIC NVTE_UBDEBUG NVTE_NODOUBLE NVTE_DOPIN",
        "overlap of communication and GEMMs",
        _NO_USER_BUFFERS,
        same="0",
    ),
    Unread(
        "NVTE_CPU_OFFLOAD_V1",
        "the older offload of activations to the host",
        "torch.autograd.graph.save_on_cpu(pin_memory=True), or te.checkpoint",
        same="0",
    ),
    Unread(
        "NVTE_DEBUG NVTE_DEBUG_LEVEL",
        "a log of how attention chose its backend",
        "te.explain_attention(...) and te.explain(module, x) say it (docs/debugging_numerics.md)",
        same="0",
    ),
    Unread(
        "NVTE_PRINT_LAYER_NUMBER NVTE_PRINT_RANK",
        "which layers and ranks log statistics",
        "te.observe, te.report (docs/debugging_numerics.md)",
    ),
    Unread(
        "NVTE_NVTX_ENABLED",
        "NVTX ranges around modules",
        "torch.autograd.profiler.emit_nvtx(); every module has a name of its own there",
        same="0",
    ),
    Unread(
        "NVTE_DISABLE_NVRTC",
        "no kernels that are compiled while the program runs",
        "kernels are compiled only where no device image loads; leave TE_NVRTC unset",
        same="0",
    ),
    Unread(
        "NVTE_CUDA_INCLUDE_DIR",
        "headers of CUDA for kernels that are compiled while the program runs",
        "kernels need no headers then; unset it",
    ),
    Unread(
        "NVTE_DISABLE_TRITON_AUTOTUNING",
        "kernels in Triton with fixed settings",
        _NO_TRITON,
        same="0 1",
    ),
    Unread(
        "NVTE_TENSOR_HANDLE_POOL_SIZE_MB NVTE_GROUPED_TENSOR_HANDLE_POOL_SIZE_MB",
        "memory for descriptors of tensors",
        "descriptors lie on the stack of a call; unset it",
    ),
    Unread(
        "NVTE_ONNX_KVCACHE_MAX_SEQ_LEN",
        "length of the cache in an export to ONNX",
        "there is no export to ONNX; torch.export.export",
    ),
    Unread(
        "NVTE_COMPILE_OP_SIDE_EFFECTS",
        "how operators stand in graphs of torch.compile",
        "see docs/torch_tools.md; unset it",
    ),
)
"""Variables that are read while a program with PyTorch runs."""

BUILD = (
    Unread("NVTE_CUDA_ARCHS", "GPUs to compile for", "TE_CUDA_ARCHS=sm_90a"),
    Unread(
        "NVTE_PYTORCH_SKIP_CUDA_BUILD",
        "no device code",
        "TE_CUDA=0: the CPU backend alone",
    ),
    Unread("NVTE_BUILD_DEBUG", "a build for debuggers", "CFLAGS='-O0 -g'"),
    Unread(
        "NVTE_BUILD_MAX_JOBS NVTE_BUILD_THREADS_PER_JOB",
        "compilers that run at the same time",
        "there are as many as CPUs in the affinity of the process: taskset says how many",
    ),
    Unread(
        "NVTE_USE_CCACHE NVTE_CCACHE_BIN",
        "a cache of the compiler",
        "CC='ccache cc'; what has not changed is not compiled again anyway",
    ),
    Unread(
        "NVTE_CMAKE_BUILD_DIR NVTE_CMAKE_EXTRA_ARGS",
        "CMake",
        "it is not used; CFLAGS and LDFLAGS are read",
    ),
    Unread(
        "NVTE_FRAMEWORK NVTE_PROJECT_BUILDING NVTE_RELEASE_BUILD NVTE_NO_LOCAL_VERSION "
        "NVTE_BUILD_METAPACKAGE NVTE_BUILD_USE_NVIDIA_WHEELS NVTE_PYTORCH_FORCE_BUILD "
        "NVTE_PYTORCH_FORCE_CXX11_ABI NVTE_SKIP_SUBMODULE_CHECKS_DURING_BUILD",
        "packages and frameworks to build",
        "there is one package, for PyTorch, with no C++ and no submodules",
    ),
    Unread(
        "NVTE_BUILD_ACTIVATION_WITH_FAST_MATH NVTE_BUILD_NUM_PHILOX_ROUNDS",
        "arithmetic of kernels",
        "it is one on every device, with Philox4x32-10",
    ),
    Unread(
        "NVTE_UB_WITH_MPI NVTE_ENABLE_NVSHMEM NVTE_WITH_CUBLASMP NVTE_WITH_CUSOLVERMP "
        "NVTE_WITH_NCCL_EP",
        "libraries for communication",
        "none of them is used: collectives are torch.distributed's",
    ),
)
"""Variables that are read while that library is built. They have no meaning when a program runs."""

ELSEWHERE = (
    Unread(
        "NVTE_JAX_CUSTOM_CALLS NVTE_JAX_CUSTOM_CALLS_RE NVTE_JAX_ENFORCE_TRITON_AUTOTUNING "
        "NVTE_JAX_ENFORCE_V2_GROUPED_GEMM NVTE_JAX_ALL_REDUCE_IN_FP32 "
        "NVTE_JAX_EP_NCCL_COMM_FROM_XLA NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION "
        "NVTE_FUSED_RING_ATTENTION_USE_SCAN NVTE_USE_PYTORCH_TRITON NVTE_DEBUG_NUMERICS",
        "its package for JAX",
        "there is none for JAX",
    ),
    Unread(
        "NVTE_TEST_NVINSPECT_ENABLED NVTE_TEST_NVINSPECT_CONFIG_FILE "
        "NVTE_TEST_NVINSPECT_FEATURE_DIRS NVTE_TEST_ARTIFACTS_DIR "
        "NVTE_TEST_CHECKPOINT_ARTIFACT_PATH NVTE_JAX_UNITTEST_LEVEL",
        "its own tests",
        "they do not come with this library",
    ),
)
"""Variables that a program with PyTorch does not meet; nothing is said where one is set."""
