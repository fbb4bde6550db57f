# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps and reductions over lists of tensors: those of `transformer_engine.pytorch`.

`multi_tensor_scale` and the norms set `noop_flag` to 1 where they meet Inf or NaN.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from transformer_engine.plugin.builtin import SHARED
from transformer_engine.plugin.builtin.signatures import operator
from transformer_engine.pytorch.execution.overrides import native
from transformer_engine.pytorch.optimizers import multi_tensor_apply, multi_tensor_step

_CALLED = vars(multi_tensor_apply) | vars(multi_tensor_step)
"""What programs call, which asks others first: this library's own are wrapped in these."""
_OWN: dict[str, Callable] = {
    name: native(_CALLED[name].__wrapped__) for name in SHARED["optimizers"].split()
}
globals().update(_OWN)


@operator
def multi_tensor_scale(call: Any) -> None:
    """Write the first list times `scale` into the second; see `optimizers.multi_tensor_scale`."""
    _OWN["multi_tensor_scale"](*call)


@operator
def multi_tensor_unscale_l2norm(call: Any) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the tensors times `scale`, an fp32 tensor of one element."""
    return _OWN["multi_tensor_unscale_l2norm"](*call)
