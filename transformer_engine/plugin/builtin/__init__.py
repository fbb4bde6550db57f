# SPDX-License-Identifier: Apache-2.0
"""Implementations of this library of the operators of `transformer_engine_torch`.

Each operator has at most two: ``default.native`` (kind DEFAULT), by the operators of `_core` or by
torch where there is none, and ``reference.torch`` (kind REFERENCE), its definition in plain torch,
which is slow and which other implementations are compared with. A few have no kernel that would be
worth it: there one function in plain torch is both (`SHARED`). Operators that are not built yet
have ``reference.absent``, which takes a call only where nobody else has registered one, and raises.

Registering imports nothing: a function is imported with its group when it is first called.
"""

import functools
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

from transformer_engine import _core
from transformer_engine.common.config import TE_FL_SKIP_CUDA
from transformer_engine.plugin.core.registry import OpRegistry
from transformer_engine.plugin.core.types import BackendImplKind, OpImpl

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    kind: (gradient, *(() if kind.endswith("glu") else (f"dbias_{gradient}",)))
    for kind in _core.activation_names()
    for gradient in ("clamped_dswiglu" if kind == "clamped_swiglu" else f"d{kind}",)
}
"""By activation its gradient, and that with column sums, which gated ones do not have."""
SOFTMAX = " ".join(
    f"scaled_{kind}softmax_{way}"
    for kind in ("", "masked_", "upper_triang_masked_", "aligned_causal_masked_")
    for way in ("forward", "backward")
)
ROPE = "fused_rope_forward fused_rope_backward fused_qkv_rope_forward fused_qkv_rope_backward"
_ATTENTION = f"fused_attn_fwd fused_attn_bwd copy_to_kv_cache {ROPE}"

NATIVE: dict[str, str] = {
    "quantization": "quantize dequantize bgrad_quantize multi_tensor_quantize split_quantize "
    "fp8_transpose compute_amax fused_amax_and_scale_update_after_reduction",
    "layers": "layernorm_fwd layernorm_bwd rmsnorm_fwd rmsnorm_bwd rmsnorm_bwd_add dropout_fwd "
    f"dropout_bwd generic_gemm {SOFTMAX} "
    + " ".join((*ACTIVATIONS, *itertools.chain(*ACTIVATIONS.values()))),
    "attention": f"get_fused_attn_backend {_ATTENTION}",
    "flash_attention": "get_flash_attention_class",
    "queries": "get_cublasLt_version get_cudnn_version get_num_cublas_streams "
    "create_fp8_tensor_meta",
}
"""Operators of ``default.native`` by the module of this package that has them."""

SHARED: dict[str, str] = {
    "layouts": "swap_first_dims fa_prepare_fwd fa_prepare_bwd convert_thd_to_bshd "
    "convert_bshd_to_thd fused_multi_row_padding fused_multi_row_unpadding "
    "thd_get_partitioned_indices thd_grad_correction thd_out_correction thd_read_half_tensor "
    "thd_read_second_half_lse thd_second_half_lse_correction",
    "quantization": "fp8_block_scaling_compute_partial_amax fp8_block_scaling_partial_cast",
    "optimizers": "multi_tensor_adam multi_tensor_adam_capturable "
    "multi_tensor_adam_capturable_master multi_tensor_adam_fp8 multi_tensor_adam_param_remainder "
    "multi_tensor_compute_scale_and_scale_inv multi_tensor_compute_scale_inv_e8m0 "
    "multi_tensor_l2norm multi_tensor_scale multi_tensor_scale_tensor "
    "multi_tensor_sgd multi_tensor_unscale_l2norm",
}
"""Operators whose one function, in plain torch, is both implementations."""

REFERENCE: dict[str, str] = {
    "reference.quantization": "fp8_transpose compute_amax "
    "fused_amax_and_scale_update_after_reduction",
    "reference.attention": _ATTENTION,
    "reference.layers": NATIVE["layers"],
}
"""Operators that have a ``reference.torch`` of their own."""

_WAITING: dict[str, dict[str, str]] = {
    "grouped GEMMs": {
        "te_general_grouped_gemm": "Products of pairs of matrices, and gradients of the biases.",
    },
    "kernels of mixtures of experts": {
        "moe_permute_fwd": "Tokens sorted by expert, where each came from, and the workspace.",
        "moe_permute_bwd": "Gradient of the tokens of `moe_permute_fwd`.",
        "moe_unpermute_fwd": "Tokens in their own order again: sums over experts, by `prob`.",
        "moe_unpermute_bwd": "Gradients of the input and of `prob` of `moe_unpermute_fwd`.",
        "fused_topk_with_score_function_fwd": "Probabilities of the chosen experts, which these "
        "are, and what the backward reads.",
        "fused_topk_with_score_function_bwd": "Gradient of the logits of its forward.",
        "fused_score_for_moe_aux_loss_fwd": "Scores of all experts, which are chosen, and what the "
        "backward reads.",
        "fused_score_for_moe_aux_loss_bwd": "Gradient of the logits of its forward.",
        "fused_moe_aux_loss_fwd": "The auxiliary loss, and what the backward reads.",
        "fused_moe_aux_loss_bwd": "Gradient of the probabilities of `fused_moe_aux_loss_fwd`.",
    },
    "NVSHMEM": {
        "init_nvshmem_backend": "Start NVSHMEM for the ranks of a group.",
        "create_nvshmem_tensor": "Allocate a tensor in memory that other ranks write.",
        "nvshmem_send_on_current_stream": "Write into another rank's memory.",
        "nvshmem_wait_on_current_stream": "Wait until another rank has written.",
        "nvshmem_finalize": "End NVSHMEM.",
    },
    "user buffers": {
        "bulk_overlap_ag_with_external_gemm": "All-gather while somebody else's GEMM runs.",
        "create_comm_overlap_helper": "Make what communicators share.",
        "create_comm_overlap": "Make a communicator that overlaps a collective with GEMMs.",
        "create_comm_overlap_p2p": "Make one that overlaps sends to neighbours with GEMMs.",
    },
}
ABSENT: dict[str, tuple[str, str]] = {
    op: (reason, what) for reason, group in _WAITING.items() for op, what in group.items()
}
"""Operators that are not built yet: what each waits for, and what it does."""


def _listed(groups: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(module, operator) of groups."""
    for module, names in groups.items():
        for name in names.split():
            yield module, name


OPERATORS: tuple[str, ...] = tuple(
    sorted([*ABSENT, *(name for groups in (NATIVE, SHARED) for _, name in _listed(groups))])
)
"""All of them."""


class _Later:
    """A function of this package, imported at its first call; `inspect` sees its signature.

    `function` is what to call: a C object that calls the function itself once it is there.
    """

    def __init__(self, module: str, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = f"{__name__}.{module}"
        self.function = functools.partial(self)

    def __getattr__(self, name: str) -> Any:
        """``__wrapped__``: the function."""
        if name != "__wrapped__":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(importlib.import_module(self.__module__), self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, and have further calls go to it."""
        found = self.__wrapped__
        self.function.__setstate__((found, (), {}, {"imported_by": self}))
        return found(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.__module__}.{self.__name__}>"


def register_builtins(registry: OpRegistry) -> int:
    """Register all implementations of this library that a registry has not; how many.

    The registry of `get_default_manager` has them from its first use on.
    """
    made = []
    of_native = _core.Predicate(_is_no_cuda) if TE_FL_SKIP_CUDA.get() else None
    for groups, kind, impl_id, priority, takes in (
        (NATIVE, BackendImplKind.DEFAULT, "default.native", 150, of_native),
        (SHARED, BackendImplKind.DEFAULT, "default.native", 150, None),
        (SHARED, BackendImplKind.REFERENCE, "reference.torch", 50, None),
        (REFERENCE, BackendImplKind.REFERENCE, "reference.torch", 50, None),
    ):
        for module, name in _listed(groups):
            fn = _Later(module, name).function
            made.append(OpImpl(name, impl_id, kind, fn, priority=priority, supports=takes))
    for name in ABSENT:
        fn, kind = _Later("absent", name).function, BackendImplKind.REFERENCE
        takes = _nobody_else(registry, name)
        made.append(OpImpl(name, "reference.absent", kind, fn, priority=-1, supports=takes))
    known = registry.snapshot().impls_by_op
    has = {(name, other.impl_id) for name, found in known.items() for other in found}
    made = [impl for impl in made if (impl.op_name, impl.impl_id) not in has]
    registry.register_many(made)
    return len(made)


def _is_no_cuda(dtype: Any, device: Any) -> bool:
    """Return whether a tensor lies where kernels run without CUDA, by `_core.Predicate`."""
    return getattr(device, "type", device) != "cuda"


def _nobody_else(registry: OpRegistry, name: str) -> Any:
    """A predicate: an operator has one implementation alone."""
    return lambda *args, **kwargs: len(registry.get_implementations(name)) == 1
