# SPDX-License-Identifier: Apache-2.0
"""Operators that are not built yet: each raises NotImplementedError, and says what it waits for.

They are made of the definitions below, which are those that implementations of others are to have.
Where one is registered, that is called.
"""

import ast
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any

from transformer_engine.plugin.builtin import ABSENT

_DEFINITIONS = '''
te_general_grouped_gemm(A: Sequence[Any], transa: bool, B: Sequence[Any], transb: bool,
        D: Sequence[Tensor] | None, D_type: Any, m_splits: Sequence[int], bias: Sequence[Tensor],
        bias_type: Any, single_output: bool, pre_gelu_out: Sequence[Tensor], grad: bool,
        workspace: Sequence[Tensor], workspaceSize: int, accumulate: bool,
        use_split_accumulator: bool, math_sm_count: int) -> list[Tensor] | None:
    """Products of pairs of matrices, as `generic_gemm` of each: the gradients of the biases."""

moe_permute_fwd(input: Tensor, dtype: Any, indices: Tensor, num_out_tokens: int,
        workspace: list[Tensor], max_expanded_token_num: int
        ) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Tokens sorted by expert, where each came from, and the workspace."""

moe_permute_bwd(input: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor, num_tokens: int,
        topK: int) -> Tensor:
    """Gradient of the tokens of `moe_permute_fwd`."""

moe_unpermute_fwd(input: Tensor, dtype: Any, row_id_map: Tensor, prob: Tensor, num_tokens: int,
        topK: int) -> Tensor:
    """Tokens in their own order again: sums over experts, weighted by `prob`."""

moe_unpermute_bwd(input_bwd: Tensor, input_fwd: Tensor, dtype: Any, row_id_map: Tensor,
        prob: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of `prob` of `moe_unpermute_fwd`."""

fused_topk_with_score_function_fwd(logits: Tensor, topk: int, use_pre_softmax: bool,
        num_groups: int, group_topk: int, scaling_factor: float, score_function: Any,
        expert_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities of the chosen experts, which these are, and what the backward reads."""

fused_topk_with_score_function_bwd(num_tokens: int, num_experts: int, routing_map: Tensor,
        intermediate_output: Tensor, grad_probs: Tensor, topk: int, use_pre_softmax: bool,
        scaling_factor: float, score_function: Any) -> Tensor:
    """Gradient of the logits of `fused_topk_with_score_function_fwd`."""

fused_score_for_moe_aux_loss_fwd(logits: Tensor, topk: int, score_function: Any
        ) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all experts, which are chosen, and what the backward reads."""

fused_score_for_moe_aux_loss_bwd(num_tokens: int, num_experts: int, intermediate_output: Tensor,
        grad_scores: Tensor, topk: int, score_function: Any) -> Tensor:
    """Gradient of the logits of `fused_score_for_moe_aux_loss_fwd`."""

fused_moe_aux_loss_fwd(probs: Tensor, tokens_per_expert: Tensor, total_num_tokens: int,
        num_experts: int, num_rows: int, num_cols: int, topk: int, coeff: float
        ) -> tuple[Tensor, Tensor]:
    """The auxiliary loss, and what the backward reads."""

fused_moe_aux_loss_bwd(Const_buf: Tensor, tokens_per_expert: Tensor, num_rows: int,
        num_cols: int, grad_aux_loss: Tensor) -> Tensor:
    """Gradient of the probabilities of `fused_moe_aux_loss_fwd`."""

init_nvshmem_backend(process_group: Any) -> None:
    """Start NVSHMEM for the ranks of a group."""

create_nvshmem_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor in memory that other ranks write."""

nvshmem_send_on_current_stream(src: Tensor, dst: Tensor, peer: int, signal: Tensor) -> None:
    """Write into another rank's memory."""

nvshmem_wait_on_current_stream(signal: Tensor, wait_kind: str) -> None:
    """Wait until another rank has written."""

nvshmem_finalize() -> None:
    """End NVSHMEM."""

bulk_overlap_ag_with_external_gemm(allgather_communicator: Any, send_stream: Any,
        recv_stream: Any) -> Any:
    """All-gather while a GEMM of somebody else runs."""

create_comm_overlap_helper(world_group: Any = None, intra_node_group: Any = None) -> Any:
    """Make what communicators share."""

create_comm_overlap(buffer_shape: list[int], buffer_dtype: torch.dtype, helper: Any, tp_size: int,
        num_splits: int = 3, num_max_streams: int = 3, comm_cga_size: int = 2,
        gemm_priority: int = 0, comm_priority: int = 0, num_comm_sm: int = 16,
        set_sm_margin: bool = True, atomic_gemm: bool = False,
        rs_overlap_first_gemm: bool = False) -> Any:
    """Make a communicator that overlaps a collective with GEMMs."""

create_comm_overlap_p2p(buffer_shape: list[int], buffer_dtype: torch.dtype, helper: Any,
        tp_size: int, comm_type: Any, num_max_streams: int = 3, comm_cga_size: int = 1,
        gemm_priority: int = 0, comm_priority: int = 0, num_comm_sm: int = 1,
        set_sm_margin: bool = False, atomic_gemm: bool = False, use_ce: bool = True,
        aggregate: bool = False) -> Any:
    """Make a communicator that overlaps sends to neighbours with GEMMs."""
'''


def __getattr__(name: str) -> Callable:
    """The operator `name`, which raises."""
    for reason, names in ABSENT.items():
        if name in names.split():
            return _refusing(name, reason)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _refusing(name: str, reason: str) -> Callable:
    """A function with the signature and the docstring of a definition."""
    definitions = _DEFINITIONS.strip().split("\n\n")
    text = next(each for each in definitions if each.startswith(f"{name}("))
    (node,) = ast.parse(f"def {text}").body
    given = node.args.args
    defaults = [Parameter.empty] * (len(given) - len(node.args.defaults))
    defaults += map(ast.literal_eval, node.args.defaults)
    parameters = [
        Parameter(
            one.arg,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=default,
            annotation=ast.unparse(one.annotation),
        )
        for one, default in zip(given, defaults, strict=True)
    ]
    signature = Signature(parameters, return_annotation=ast.unparse(node.returns))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        raise NotImplementedError(
            f"{name} is not built yet: it waits for {reason}. Instead: register an implementation "
            "of your own (docs/plugins.md)"
        )

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__signature__ = signature
    refuse.__doc__ = ast.get_docstring(node)
    return refuse
