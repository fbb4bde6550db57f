# SPDX-License-Identifier: Apache-2.0
"""``te_gemm`` by `generic_gemm`."""

from typing import Any

import torch

from transformer_engine import _core
from transformer_engine.plugin.adapters.casts import operand_of
from transformer_engine.plugin.adapters.fields import Choices, Fields, taken, written


def _operand(fields: Fields, name: str) -> Any:
    """A matrix, plain or quantized; with the padding of the dim that is summed over."""
    plain = fields[name]
    return operand_of(fields, f"{name}_") if plain is None else plain


def gemm(choices: Choices, fields: Fields) -> None:
    """A product: of column-major matrices, for `generic_gemm`, so operands change places."""
    out, aux, bias_grad = fields["d"], fields["aux"], fields["bias_grad"]
    is_coded, grad = out.element_size() == 1, bias_grad is not None
    gelu = fields["epilogue"] == _core.EPILOGUE_GELU
    bias = bias_grad if grad else fields["bias"]
    result = (None, None, torch.float32) if is_coded else (out, None, out.dtype)
    space = torch.empty(0, dtype=torch.uint8, device=out.device)
    found = choices["generic_gemm"](
        *(_operand(fields, "b"), bool(fields["b_transposed"])),
        *(_operand(fields, "a"), bool(fields["a_transposed"])),
        *(*result, bias, None, gelu, aux, grad, space, 0),
        *(bool(fields["accumulate"]), not fields["fast_accumulation"]),
    )
    made, sums, pre, *_ = taken(found)
    if is_coded:
        given = {"scale": fields["d_scale"], "amax": fields["d_amax"]}
        _core.quantize(made, mode=_core.SCALING_TENSOR, row=out, **given)
    else:
        written("generic_gemm", "the result", out, made)
    if grad:
        written("generic_gemm", "the gradient of the bias", bias_grad, sums)
    if aux is not None and pre is not None:  # None: it was written in place
        written("generic_gemm", "what gelu was applied to", aux, pre)
