# SPDX-License-Identifier: Apache-2.0
"""`FusedSGD`: stochastic gradient descent in one pass of the C library."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from transformer_engine.pytorch.execution.overrides import asked_of_lists
from transformer_engine.pytorch.optimizers.checks import (
    check_beginning,
    check_dense,
    check_numbers,
    check_parameter,
)
from transformer_engine.pytorch.optimizers.multi_tensor_apply import multi_tensor_applier
from transformer_engine.pytorch.optimizers.multi_tensor_step import (
    multi_tensor_sgd,
    multi_tensor_sgd_cast,
)
from transformer_engine.pytorch.optimizers.quantized_updates import Updates
from transformer_engine.pytorch.optimizers.updates import local_part, wide_copy
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized

_NAME = "FusedSGD"
_NUMBERS = ("lr", "momentum", "weight_decay")  # that groups of parameters may have
_COPIED = "_grad_none", "materialize_master_grads", "wd_after_momentum"
"""Attributes of an optimizer, beside torch's, that its copies have."""


class FusedSGD(torch.optim.Optimizer):
    """Stochastic gradient descent with momentum, computed in fp32.

    Parameters
    ----------
    params : iterable of Parameter or of dict
        fp32, fp16 or bf16, quantized ones too; as of `torch.optim.SGD`.
    lr : float
        Learning rate; may be left out where each group of parameters has its own.
    momentum, dampening, weight_decay, nesterov
        As of `torch.optim.SGD`; the momentum is kept in fp32.
    wd_after_momentum : bool, default False
        Weight decay is added behind the momentum, not into it.
    materialize_master_grads : bool, default True
        Accepted for its callers: gradients are read where they are.
    set_grad_none : bool, optional
        Older name of the argument of `zero_grad`.

    Raises
    ------
    ValueError
        Numbers that can not be, or a group without a learning rate.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        check_numbers(_NAME, numbers, *_NUMBERS)
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError(
                f"{_NAME}: nesterov=True with momentum={momentum!r} and dampening={dampening!r}: "
                "it needs a momentum, and a dampening of 0"
            )
        super().__init__(params, {**numbers, "dampening": dampening, "nesterov": nesterov})
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        self._grad_none = True if set_grad_none is None else bool(set_grad_none)

    def __getstate__(self) -> dict:
        """State for copies and pickles: torch's, and that of this class."""
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _COPIED}}

    def add_param_group(self, param_group: dict) -> None:
        """Add parameters with numbers of their own; raises as the class does."""
        check_numbers(_NAME, param_group, *_NUMBERS)
        if isinstance(param_group, dict) and param_group.get("lr", self.defaults["lr"]) is required:
            raise ValueError(f"{_NAME}: no lr for a group of parameters, expected a learning rate")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients, or fill them with 0; as of `FusedAdam.zero_grad`."""
        super().zero_grad(self._grad_none if set_to_none is None else set_to_none)

    def get_momentums(self, params: Iterable[Tensor]) -> tuple[list[Tensor | None], bool]:
        """(momenta, whether the last one is new); they are made where they are missing."""
        found, first = [], True
        for param in params:
            state = self.state[param]
            first = state.get("momentum_buffer") is None
            if first:
                check_beginning(_NAME, param.device)
                state["momentum_buffer"] = torch.zeros_like(wide_copy(param))
            found.append(state["momentum_buffer"])
        return found, first

    def load_state_dict(self, state_dict: dict) -> None:
        """Load what `state_dict` gave, or the state of a `torch.optim.SGD`; momenta in fp32."""
        super().load_state_dict(state_dict)  # which casts them to the dtype of the parameters
        for saved, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            for key, param in zip(saved["params"], group["params"], strict=True):
                found = state_dict["state"].get(key, {}).get("momentum_buffer")
                if found is not None:
                    kept = found.to(param.device, torch.float32, copy=True)
                    self.state[param]["momentum_buffer"] = kept

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> Any:
        """Take one step; return what `closure` did, which computes loss and gradients again.

        TypeError for a parameter or a gradient that is sparse, or of another dtype.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(g, [p for p in g["params"] if p.grad is not None]) for g in self.param_groups]
        for param in (p for _, ready in groups for p in ready):
            check_parameter(_NAME, param)
            check_dense(_NAME, "gradient", param.grad)
        for group, ready in groups:
            # A parameter whose first gradient comes later has its first step then.
            fresh = [p for p in ready if self.state[p].get("momentum_buffer") is None]
            old = [p for p in ready if self.state[p].get("momentum_buffer") is not None]
            for params, first in ((fresh, True), (old, False)):
                self._update(group, params, first)
        return loss

    def _update(self, group: dict, params: list[Tensor], first: bool) -> None:
        momentum = group["momentum"]
        kept = self.get_momentums(params)[0] if momentum != 0.0 else []
        numbers = (
            group["weight_decay"], momentum, group["dampening"], group["lr"], group["nesterov"],
            first, self.wd_after_momentum, 1.0,
        )  # fmt: skip
        flags: dict[torch.device, Tensor] = {}
        plain: dict[torch.device, list[list[Tensor]]] = {}
        casts: dict[torch.device, Updates] = {}
        for i, param in enumerate(params):
            device = param.device
            if device not in flags:
                flags[device] = torch.zeros(1, dtype=torch.int32, device=device)
                apply = functools.partial(_apply, flags[device], numbers)
                casts[device] = Updates(apply, multi_tensor_sgd, multi_tensor_sgd_cast)
            quantized = is_quantized(local_part(param))
            value = wide_copy(param) if quantized else param
            row = [param.grad, value, kept[i] if momentum != 0.0 else _no_momentum(value)]
            if quantized:
                casts[device].add(param, row)
                continue
            for each, tensor in zip(plain.setdefault(device, [[], [], []]), row, strict=True):
                each.append(tensor)
        for device, lists in plain.items():
            multi_tensor_applier(multi_tensor_sgd, flags[device], lists, *numbers)
        for updates in casts.values():
            updates.flush()


def _no_momentum(value: Tensor) -> Tensor:
    """What stands in place of a momentum: the value, but where somebody else may write there."""
    ours = asked_of_lists("multi_tensor_sgd") is None
    return value if ours else torch.zeros_like(value, dtype=torch.float32)


def _apply(flag: Tensor, numbers: tuple, op: Callable, lists: list) -> None:
    multi_tensor_applier(op, flag, lists, *numbers)
