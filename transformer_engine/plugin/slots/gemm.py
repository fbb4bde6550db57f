# SPDX-License-Identifier: Apache-2.0
"""``te_gemm`` by `generic_gemm`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.slots.casts import operand_of
from transformer_engine.plugin.slots.fields import Fields, written

_GEMM = tuple(name for name, *_ in _core.op_fields("gemm"))


def _operand(fields: Fields, name: str) -> Any:
    """A matrix, plain or quantized; with the padding of the dim that is summed over."""
    plain = fields[name]
    return operand_of(fields, f"{name}_") if plain is None else plain


def gemm(choices: Mapping[str, Any]) -> tuple[Callable, tuple[str, ...]]:
    """A product: of column-major matrices, for `generic_gemm`, so operands change places."""
    choice = choices["generic_gemm"]

    def run(fields: Fields) -> Any:
        out, bias, bias_grad = fields["d"], fields["bias"], fields["bias_grad"]
        is_coded = out.element_size() == 1
        gelu = fields["epilogue"] == _core.EPILOGUE_GELU
        grad = bias_grad is not None
        space = torch.empty(0, dtype=torch.uint8, device=out.device)
        found = choice(
            _operand(fields, "b"),
            bool(fields["b_transposed"]),
            _operand(fields, "a"),
            bool(fields["a_transposed"]),
            None if is_coded else out,
            None,
            torch.float32 if is_coded else out.dtype,
            bias_grad if grad else bias,
            None,
            gelu,
            fields["aux"],
            grad,
            space,
            0,
            bool(fields["accumulate"]),
            not fields["fast_accumulation"],
        )
        if found is NotImplemented:
            return NotImplemented
        made, sums, pre, *_ = found
        if is_coded:
            given = {"scale": fields["d_scale"], "amax": fields["d_amax"]}
            _core.quantize(made, mode=_core.SCALING_TENSOR, row=out, **given)
        else:
            written("generic_gemm", "the result", out, made)
        if grad:
            written("generic_gemm", "the gradient of the bias", bias_grad, sums)
        if fields["aux"] is not None:
            _written_aux(fields["aux"], pre)
        return None

    return run, _GEMM


def _written_aux(aux: Tensor, pre: Any) -> None:
    if pre is not None:  # None: it was written in place
        written("generic_gemm", "what gelu was applied to", aux, pre)
