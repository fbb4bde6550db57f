# SPDX-License-Identifier: Apache-2.0
"""What is done to logits: of attention, or of a head."""

from torch import Tensor

from transformer_engine.pytorch.execution.autograd import run_call
from transformer_engine.pytorch.execution.custom_ops import OperatorCall, contiguous_like, operator

_softcap = operator(
    "softcap",
    "Tensor input, Tensor? grad_output, float cap",
    "wide",
    lambda inp, *_: contiguous_like(inp),
)


class _Softcap(OperatorCall):
    """Settings: the cap."""

    label = "softcap"

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        return _softcap(self.traced, *tensors, None, *self.settings), tensors

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        return None, _softcap(self.traced, *saved, *grads, *self.settings)


def softcap(inp: Tensor, cap: float) -> Tensor:
    """Bound logits smoothly: cap tanh(inp / cap), computed in fp32.

    `inp` is [..., features] in fp32, fp16 or bf16, and differentiable; the result has its shape and
    dtype. ValueError where the cap is not positive, or the input has no dims.
    """
    return run_call(_Softcap(inp, cap), inp)
