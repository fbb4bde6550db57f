# SPDX-License-Identifier: Apache-2.0
"""`FusedAdam`: Adam whose state is fp32 whatever the parameters are.

The arithmetic is torch's fused kernel. This class adds what training programs rely on: state and,
if asked for, parameters in fp32 beside 16-bit parameters, gradients under ``decoupled_grad``, and
the step counted by group.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from transformer_engine.common import absent
from transformer_engine.pytorch.tensors import is_quantized

__all__ = ["FusedAdam"]

_NAME = "FusedAdam"
_PATH = "pytorch.optimizers.FusedAdam"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LATE = 1.0e9
"""A step at which no bias is left to correct: beta to this power is 0."""


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW with fp32 state.

    Parameters
    ----------
    params : iterable of Parameter or of dict
        fp32, fp16 or bf16, quantized ones too; as of `torch.optim.Optimizer`.
    lr : float, default 1e-3
        Learning rate.
    betas : (float, float), default (0.9, 0.999)
        Decay of the mean of gradients and of their squares.
    eps : float, default 1e-8
        Added to the root of the mean of squares.
    weight_decay : float, default 0
        Weight decay.
    amsgrad : bool, default False
        Not there yet.
    bias_correction : bool, default True
        Divide the means by 1 - beta^step.
    adam_w_mode : bool, default True
        Weight decay apart from the gradient (AdamW); else added to it (L2 regularization).
    capturable : bool, default False
        Not there yet.
    master_weights : bool, default False
        Keep an fp32 copy of 16-bit and of quantized parameters as state ``master_param``, and
        update that.
    master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype : torch.dtype, default torch.float32
        Other dtypes are not there yet.
    use_decoupled_grad : bool, default False
        Read gradients from ``parameter.decoupled_grad``, which may have another dtype.
    store_param_remainders : bool, default False
        Not there yet.
    set_grad_none : bool, optional
        Older name of the argument of `zero_grad`.

    Raises
    ------
    ValueError
        A number that can not be.
    NotImplementedError
        An option that is not there yet.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        refused = {
            "amsgrad": (amsgrad, False),
            "capturable": (capturable, False),
            "master_weight_dtype": (master_weight_dtype, torch.float32),
            "exp_avg_dtype": (exp_avg_dtype, torch.float32),
            "exp_avg_sq_dtype": (exp_avg_sq_dtype, torch.float32),
            "store_param_remainders": (store_param_remainders, False),
        }
        for name, (value, default) in refused.items():
            if value != default:
                raise absent.refusal(_PATH, f"({name}={value!r})")
        numbers = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        for name, value in numbers.items():
            if not value >= 0.0:
                raise ValueError(f"{_NAME}: {name}={value!r}, expected a number of 0 or more")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"{_NAME}: betas={betas!r}, expected two numbers from 0 to below 1")
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self._grad_none = True if set_grad_none is None else bool(set_grad_none)

    # ---- gradients and state ---------------------------------------------------------------------

    def _grad_of(self, parameter: Tensor) -> Tensor | None:
        if self.use_decoupled_grad:
            return getattr(parameter, "decoupled_grad", None)
        return parameter.grad

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients that `step` reads, or fill them with 0.

        `set_to_none` None: what ``set_grad_none`` said, or True.
        """
        forget = self._grad_none if set_to_none is None else set_to_none
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=forget)
            return
        for parameter in self._parameters_of_groups():
            grad = self._grad_of(parameter)
            if grad is not None and forget:
                parameter.decoupled_grad = None
            elif grad is not None:
                grad.zero_()

    def _parameters_of_groups(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _has_master(self, parameter: Tensor) -> bool:
        wide = parameter.dtype is torch.float32 and not is_quantized(parameter)
        return bool(self.master_weights) and not wide

    def initialize_state(self, param: Tensor, store_param_remainders: bool = False) -> None:
        """Give a parameter its first state: means of 0 and, with masters, a copy in fp32.

        It is one of the groups'; `store_param_remainders` is not there yet.
        """
        if store_param_remainders:
            raise absent.refusal(_PATH, ".initialize_state(store_param_remainders=True)")
        state = self.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param, dtype=torch.float32)
        if self._has_master(param):
            state["master_param"] = param.detach().clone().float()

    def get_unscaled_state(
        self, param: Tensor, state_name: str, skip_unscale: bool = False
    ) -> Tensor:
        """State of a parameter in fp32, by its name; it is kept so, and is returned itself."""
        del skip_unscale
        return self.state[param][state_name]

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Take over a state of a parameter, given in fp32 or smaller."""
        if not self.state[param]:
            self.initialize_state(param)
        self.state[param][state_name].copy_(unscaled_state)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load what `state_dict` gave; state stays in fp32 beside 16-bit parameters."""
        super().load_state_dict(state_dict)  # which casts state to the dtype of the parameters
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, parameter in zip(saved, self._parameters_of_groups(), strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    value = value.to(parameter.device, torch.float32, copy=True)
                    self.state[parameter][name] = value

    # ---- step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable | None = None, grad_scaler: Any = None) -> Any:
        """Take one step; return what `closure` did, which computes loss and gradients again.

        `grad_scaler` is not there yet: call ``grad_scaler.step(optimizer)``. TypeError for a
        parameter or a gradient that is sparse, or of another dtype.
        """
        if grad_scaler is not None:
            raise absent.refusal(_PATH, ".step(grad_scaler=...)")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            places: dict[torch.device, list] = {}
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                grad = self._grad_of(parameter)
                if grad is not None and parameter.numel() > 0:
                    _check(parameter, grad)
                    places.setdefault(parameter.device, []).append((parameter, grad))
            for device, pairs in places.items():
                self._update(group, device, pairs)
        return loss

    def _update(self, group: dict, device: torch.device, pairs: list) -> None:
        """Update the parameters of a group on one device; `pairs`: (parameter, gradient)."""
        states = [self.state[parameter] for parameter, _ in pairs]
        updated = [
            state["master_param"] if self._has_master(parameter) else parameter.detach().float()
            for (parameter, _), state in zip(pairs, states, strict=True)
        ]
        before = float(group["step"] - 1) if group["bias_correction"] else _LATE
        function = adamw if self.adam_w_mode else adam
        function(
            updated,
            [grad.detach().float() for _, grad in pairs],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            list(torch.full((len(pairs),), before, dtype=torch.float32, device=device).unbind()),
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        rounded = [
            (p, new)
            for (p, _), new in zip(pairs, updated, strict=True)
            if p.dtype != new.dtype or is_quantized(p)
        ]
        if rounded:
            torch._foreach_copy_([p for p, _ in rounded], [new for _, new in rounded])


def _check(parameter: Tensor, grad: Tensor) -> None:
    for label, tensor in (("parameter", parameter), ("gradient", grad)):
        if tensor.dtype not in _DTYPES or tensor.layout is not torch.strided:
            raise TypeError(
                f"{_NAME}: a {label} of {tensor.dtype}, {tensor.layout}: expected a dense tensor "
                "of torch.float32, torch.float16 or torch.bfloat16"
            )
