# SPDX-License-Identifier: Apache-2.0
"""Gradients of weights that go to ``main_grad`` (``fuse_wgrad_accumulation``)."""

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_engine import _core
from transformer_engine.pytorch.module.operands import DTYPES

TO_MAIN_GRAD = _core.VALUE_ACCUMULATE | _core.VALUE_OVERWRITE
"""Flags of a weight whose gradient goes to its ``main_grad``."""


def main_grad_of(weight: Parameter) -> Tensor:
    """``weight.main_grad``; RuntimeError where there is none."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "fuse_wgrad_accumulation=True, but the weight has no main_grad: assign a "
            f"tensor of shape {tuple(weight.shape)} to weight.main_grad before the forward. Under "
            "torch's fully_shard, which reduces weight.grad, leave fuse_wgrad_accumulation out"
        )
    return main_grad


def flag_of(kind: str, weight: Parameter, is_first_microbatch: bool | None) -> int:
    """How the gradient of a weight goes to its ``main_grad``: one of `TO_MAIN_GRAD`.

    `kind` is that of the module, for errors: TypeError for a dtype that no kernel adds to.
    """
    dtype = main_grad_of(weight).dtype
    if dtype not in DTYPES:
        raise TypeError(
            f"{kind}: main_grad is {dtype}, expected torch.float32, torch.float16 or torch.bfloat16"
        )
    overwrites = is_first_microbatch or getattr(weight, "overwrite_main_grad", False)
    return _core.VALUE_OVERWRITE if overwrites else _core.VALUE_ACCUMULATE


def dummy_grad(weight: Parameter) -> Tensor | None:
    """Return the gradient for autograd where the real one went to main_grad.

    A weight that has ``grad_added_to_main_grad`` belongs to a framework that counts gradient hooks:
    it is told, and gets a tensor so that the hooks run.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)
