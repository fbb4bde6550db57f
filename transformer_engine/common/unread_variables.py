# SPDX-License-Identifier: Apache-2.0
"""Environment variables that NVIDIA Transformer Engine 2.20 reads and this library does not.

`config` has those that are read. A program that sets one of `RUN` is told so once, when it makes
its first module; ``setup.py`` tells of those of `BUILD`. The tables in ``docs/environment.md`` are
made from here (``tools/environment_table.py``).
"""

import re
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


def _entries(table: str) -> tuple[Unread, ...]:
    """Read a table of "names = same", "there: what" and "here: instead"; all but names indented."""
    found = []
    for entry in re.split(r"\n(?=\S)", table.strip()):
        names, what, instead = re.split(" (?:there|here): ", " ".join(entry.split()))
        names, _, same = names.partition(" = ")
        found.append(Unread(names, what, instead, same))
    return tuple(found)


RUN = _entries(
    """
NVTE_FLASH_ATTN_V2 NVTE_FLASH_ATTN_V3 NVTE_FLASH_ATTN_V4 = 0
    there: which versions of the package flash-attn may run
    here: that package is not used; NVTE_FUSED_ATTN, NVTE_FLASH_ATTN and NVTE_UNFUSED_ATTN choose
        (docs/attention.md)
NVTE_FUSED_ATTN_BACKEND
    there: kernel of fused attention, in releases before 2.20
    here: the call decides; te.explain_attention says by what
NVTE_FUSED_ATTN_USE_FAv2_BWD = 0
    there: backward of attention by flash-attn 2
    here: a backward runs by the backend of its forward; unset it
NVTE_APPLY_QK_LAYER_SCALING = 0
    there: scores of fp16 attention divided by the number of the layer until the softmax
    here: the scores are fp32 and need it not; results are the same without it
NVTE_MASKED_SOFTMAX_FUSION = 1
    there: softmax of unfused attention in one kernel
    here: it always is one; unset it
NVTE_BATCH_MHA_P2P_COMM = 0
    there: communication of context parallelism
    here: sends and receives of a hop are one batch always; unset it
NVTE_DPA_FP8CS_O_in_F16
    there: the output of FP8 attention kept in 16 bits for the backward
    here: a call returns its FP8 output read again, so numbers would be the same; unset it
NVTE_USE_FAST_MATH NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH = 0
    there: casts by approximate arithmetic
    here: casts are exact, with the same bits on every device; unset it
NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE = 0
    there: unpickling of _extra_state entries
    here: nothing is unpickled; TE_EXTRA_STATE=ignore loads the weights alone (docs/checkpoints.md)
NVTE_TORCH_COMPILE = 0
    there: small functions compiled by torch.compile
    here: nothing is compiled unless the program asks for it; unset it
NVTE_BIAS_GELU_NVFUSION NVTE_BIAS_DROPOUT_FUSION = 1
    there: bias and GELU, or bias, dropout and residual, in one kernel
    here: they always are; unset it
NVTE_GEMM_GELU_FUSION = 0
    there: GELU as part of the GEMM before it
    here: GELU is fused with the cast of the GEMM after it; unset it
NVTE_FWD_LAYERNORM_SM_MARGIN NVTE_BWD_LAYERNORM_SM_MARGIN NVTE_INF_LAYERNORM_SM_MARGIN
    NVTE_EXT_MARGIN_SM = 0
    there: multiprocessors that norms or GEMMs leave free
    here: kernels take the whole GPU; unset it
NVTE_NORM_FWD_USE_CUDNN NVTE_NORM_BWD_USE_CUDNN NVTE_CUDNN_MXFP8_NORM_OUTPUT_IN_INPUT_DTYPE = 0
    there: norms by cuDNN
    here: norms are this library's own kernels; unset it
NVTE_ZERO_CENTERED_GAMMA_IN_WTYPE = 0
    there: 1 + weight of a zero-centered norm rounded to the dtype of the weight
    here: it is fp32; unset it
NVTE_ENABLE_CUTEDSL_BACKEND = 0
    there: MXFP8 casts by kernels in CuTe DSL, on Blackwell
    here: casts are CUDA C; unset it
NVTE_USE_CUTLASS_GROUPED_GEMM NVTE_CUTLASS_GROUPED_GEMM_WARN_FALLBACK
    NVTE_GROUPED_LINEAR_SINGLE_PARAM NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM
    NVTE_CUTEDSL_FUSED_GROUPED_MLP NVTE_CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM = 0
    there: grouped linear layers
    here: there are no grouped GEMMs; unset it
NVTE_FUSED_GROUP_REQUANTIZE = 0
    there: MXFP8 tensors of a group cast again in one kernel
    here: there are no grouped GEMMs; unset it
NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP = 0 1
    there: weight gradients of a grouped MLP without CuTe DSL
    here: there are no grouped GEMMs; unset it
NVTE_FUSED_MLA_Q_UPROJ = 0
    there: projection of queries of MLA in one kernel, on Blackwell
    here: te.Linear and te.apply_rotary_pos_emb; unset it
NVTE_RADIX_TOPK_THRESHOLD NVTE_EP_HANDLE_CACHE_SIZE
    there: routers and communication of mixtures of experts
    here: they are not built (docs/not_there.md)
NVTE_AG_P2P_MULTI_ATOMIC NVTE_RS_STRIDED_ATOMIC NVTE_UBDEBUG NVTE_NODOUBLE NVTE_DOPIN = 0
    there: overlap of communication and GEMMs
    here: there are no user buffers (docs/not_there.md); unset it
NVTE_CPU_OFFLOAD_V1 = 0
    there: the older offload of activations to the host
    here: torch.autograd.graph.save_on_cpu(pin_memory=True), or te.checkpoint
NVTE_DEBUG NVTE_DEBUG_LEVEL = 0
    there: a log of how attention chose its backend
    here: te.explain_attention(...) and te.explain(module, x) say it (docs/debugging_numerics.md)
NVTE_PRINT_LAYER_NUMBER NVTE_PRINT_RANK
    there: which layers and ranks log statistics
    here: te.observe, te.report (docs/debugging_numerics.md)
NVTE_NVTX_ENABLED = 0
    there: NVTX ranges around modules
    here: torch.autograd.profiler.emit_nvtx(); every module has a name of its own there
NVTE_DISABLE_NVRTC = 0
    there: no kernels that are compiled while the program runs
    here: kernels are compiled only where no device image loads; leave TE_NVRTC unset
NVTE_CUDA_INCLUDE_DIR
    there: headers of CUDA for kernels that are compiled while the program runs
    here: kernels need no headers then; unset it
NVTE_DISABLE_TRITON_AUTOTUNING = 0 1
    there: kernels in Triton with fixed settings
    here: no kernel is written in Triton; unset it
NVTE_TENSOR_HANDLE_POOL_SIZE_MB NVTE_GROUPED_TENSOR_HANDLE_POOL_SIZE_MB
    there: memory for descriptors of tensors
    here: descriptors lie on the stack of a call; unset it
NVTE_ONNX_KVCACHE_MAX_SEQ_LEN
    there: length of the cache in an export to ONNX
    here: there is no export to ONNX; torch.export.export
NVTE_COMPILE_OP_SIDE_EFFECTS
    there: how operators stand in graphs of torch.compile
    here: see docs/torch_tools.md; unset it
"""
)
"""Variables that are read while a program with PyTorch runs."""

BUILD = _entries(
    """
NVTE_CUDA_ARCHS
    there: GPUs to compile for
    here: TE_CUDA_ARCHS=sm_90a
NVTE_PYTORCH_SKIP_CUDA_BUILD
    there: no device code
    here: TE_CUDA=0: the CPU backend alone
NVTE_BUILD_DEBUG
    there: a build for debuggers
    here: CFLAGS='-O0 -g'
NVTE_BUILD_MAX_JOBS NVTE_BUILD_THREADS_PER_JOB
    there: compilers that run at the same time
    here: there are as many as CPUs in the affinity of the process: taskset says how many
NVTE_USE_CCACHE NVTE_CCACHE_BIN
    there: a cache of the compiler
    here: CC='ccache cc'; what has not changed is not compiled again anyway
NVTE_CMAKE_BUILD_DIR NVTE_CMAKE_EXTRA_ARGS
    there: CMake
    here: it is not used; CFLAGS and LDFLAGS are read
NVTE_FRAMEWORK NVTE_PROJECT_BUILDING NVTE_RELEASE_BUILD NVTE_NO_LOCAL_VERSION NVTE_BUILD_METAPACKAGE
    NVTE_BUILD_USE_NVIDIA_WHEELS NVTE_PYTORCH_FORCE_BUILD NVTE_PYTORCH_FORCE_CXX11_ABI
    NVTE_SKIP_SUBMODULE_CHECKS_DURING_BUILD
    there: packages and frameworks to build
    here: there is one package, for PyTorch and JAX, with no C++ and no submodules
NVTE_BUILD_ACTIVATION_WITH_FAST_MATH NVTE_BUILD_NUM_PHILOX_ROUNDS
    there: arithmetic of kernels
    here: it is one on every device, with Philox4x32-10
NVTE_UB_WITH_MPI NVTE_ENABLE_NVSHMEM NVTE_WITH_CUBLASMP NVTE_WITH_CUSOLVERMP NVTE_WITH_NCCL_EP
    there: libraries for communication
    here: none of them is used: collectives are torch.distributed's
"""
)
"""Variables that are read while that library is built. They have no meaning when a program runs."""

ELSEWHERE = _entries(
    """
NVTE_JAX_CUSTOM_CALLS_RE NVTE_JAX_ENFORCE_TRITON_AUTOTUNING NVTE_JAX_ENFORCE_V2_GROUPED_GEMM
    NVTE_JAX_ALL_REDUCE_IN_FP32 NVTE_JAX_EP_NCCL_COMM_FROM_XLA
    NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION NVTE_FUSED_RING_ATTENTION_USE_SCAN
    NVTE_USE_PYTORCH_TRITON NVTE_DEBUG_NUMERICS
    there: its package for JAX
    here: layers of JAX have no such choice; TE_JAX_CUSTOM_CALLS says what computes them
NVTE_TEST_NVINSPECT_ENABLED NVTE_TEST_NVINSPECT_CONFIG_FILE NVTE_TEST_NVINSPECT_FEATURE_DIRS
    NVTE_TEST_ARTIFACTS_DIR NVTE_TEST_CHECKPOINT_ARTIFACT_PATH NVTE_JAX_UNITTEST_LEVEL
    there: its own tests
    here: they do not come with this library
"""
)
"""Variables that a program with PyTorch does not meet; nothing is said where one is set."""
