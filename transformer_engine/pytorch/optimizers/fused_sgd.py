# SPDX-License-Identifier: Apache-2.0
"""`FusedSGD`: stochastic gradient descent by torch's fused kernel, under the name programs use."""

from collections.abc import Iterable

import torch

from transformer_engine.common import absent

__all__ = ["FusedSGD"]


class FusedSGD(torch.optim.SGD):
    """Stochastic gradient descent with momentum.

    Parameters
    ----------
    params : iterable of Parameter or of dict
        As of `torch.optim.SGD`.
    lr : float
        Learning rate.
    momentum, dampening, weight_decay, nesterov
        As of `torch.optim.SGD`.
    wd_after_momentum : bool, default False
        Not there yet.
    materialize_master_grads : bool, default True
        Accepted for its callers: gradients are read where they are.
    set_grad_none : bool, optional
        Older name of the argument of `zero_grad`.

    Raises
    ------
    ValueError
        Numbers that can not be.
    NotImplementedError
        ``wd_after_momentum=True``.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        del materialize_master_grads
        if wd_after_momentum:
            raise absent.refusal("pytorch.optimizers.FusedSGD", "(wd_after_momentum=True)")
        super().__init__(
            params,
            lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            fused=True,
        )
        self._grad_none = True if set_grad_none is None else bool(set_grad_none)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients, or fill them with 0; as of `FusedAdam.zero_grad`."""
        super().zero_grad(self._grad_none if set_to_none is None else set_to_none)
