# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that autograd does not get: they go to ``main_grad``, or are put off."""

import torch
from torch import Tensor

from transformer_engine.common import graphs
from transformer_engine.pytorch.module.call import Deferred, main_grad_of
from transformer_engine.pytorch.module.parameters import add_grad

_MAIN_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class WeightGradients:
    """What `composed.ComposedModule` has for fuse_wgrad_accumulation and delay_wgrad_compute."""

    def _wgrad_flags(self, owner: Tensor, is_first_microbatch: bool | None) -> int:
        """Where the weight gradient goes."""
        flags = graphs.DEFER if self.delay_wgrad_compute else 0
        if self.fuse_wgrad_accumulation:
            main = main_grad_of(owner).dtype
            if main not in _MAIN_DTYPES:
                raise TypeError(
                    f"{type(self).__name__}: main_grad is {main}, expected torch.float32, "
                    "torch.float16 or torch.bfloat16"
                )
            overwrite = is_first_microbatch or getattr(owner, "overwrite_main_grad", False)
            flags |= graphs.OVERWRITE if overwrite else graphs.ACCUMULATE
        return flags

    def backward_dw(self) -> None:
        """Compute the oldest weight gradients that a backward deferred.

        They are added to ``weight.grad`` (of each split weight), or to ``weight.main_grad`` with
        `fuse_wgrad_accumulation`. Does nothing without `delay_wgrad_compute`; RuntimeError where no
        weight gradient is pending.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._wgrads:
            raise RuntimeError(
                f"{type(self).__name__}.backward_dw: no weight gradient is pending; call it once a "
                "backward"
            )
        pending: Deferred = self._wgrads[0]
        plans = pending.plans
        state = [main_grad_of(pending.weights[i]) for i, _ in plans.main_grads]
        with torch.no_grad():
            outputs = iter(pending.run(state))
            self._wgrads.popleft()  # only now: a call that raised can be made again
            for i, part in enumerate(plans.parts):
                if not part.flags & graphs.WGRAD:
                    continue
                if i not in dict(plans.main_grads):
                    self._add_weight_grad(i, next(outputs))
                elif hasattr(pending.weights[i], "grad_added_to_main_grad"):
                    pending.weights[i].grad_added_to_main_grad = True
        for hook in self.__dict__.get("_wgrad_hooks", ()):
            hook()

    def _add_weight_grad(self, part: int, grad: Tensor) -> None:
        """Add to the ``grad`` of a part's weight."""
        add_grad(getattr(self, f"{self.PARTS[part]}weight"), grad)
