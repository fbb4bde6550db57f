# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers over lists of tensors, by torch's fused operators.

An operation takes ``(chunk_size, noop_flag, tensor_lists, ...)``: lists of one length, of grads,
parameters, ...; `chunk_size` is not needed. Where the int32 element of `noop_flag` is not 0 nothing
is written. No operation waits for the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from transformer_engine.pytorch.constants import torch_dtype

__all__ = [
    "checked_lists",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adam_fp8",
    "multi_tensor_adam_param_remainder",
    "multi_tensor_compute_scale_and_scale_inv",
    "multi_tensor_sgd",
]

Lists = Sequence[Sequence[Tensor]]

_LATE = 1.0e9
"""A step at which no bias is left to correct: beta to this power is 0."""


def checked_lists(op: str, lists: Lists, *counts: int) -> list[list[Tensor]]:
    """The lists, detached; ValueError for another number of them, or other lengths."""
    if len(lists) not in counts or len({len(each) for each in lists}) > 1:
        expected = " or ".join(map(str, counts))
        raise ValueError(
            f"{op}: tensor_lists of {[len(each) for each in lists]} tensors, expected {expected} "
            "lists of one length"
        )
    return [[tensor.detach() for tensor in each] for each in lists]


def _write(skip: Tensor, pairs: Any) -> None:
    """Copy new values into tensors, unless there is nothing to do."""
    for old, new in pairs:
        if old is not new:
            old.copy_(torch.where(skip.to(old.device), old, new.to(old.dtype)))


class _Adam:
    """One step's numbers."""

    def __init__(self, noop_flag: Tensor, lr: Any, betas: tuple, eps: float, step: Any) -> None:
        self.skip = noop_flag.detach().reshape(()) != 0
        self.lr = lr.detach().reshape(()) if isinstance(lr, Tensor) else float(lr)
        self.betas, self.eps, self.step = betas, eps, step

    def update(
        self, lists: list, mode: int, bias_correction: int, weight_decay: float
    ) -> list[Tensor]:
        """Update means in place; the new parameters in fp32, where they are fp32 in place.

        `lists` are gradients, parameters, means and means of squares.
        """
        if mode not in (0, 1):
            raise ValueError(f"multi_tensor_adam: mode={mode!r}, expected 0 (L2) or 1 (AdamW)")
        grads, params, means, squares = ([t.float() for t in each] for each in lists)
        if not params:
            return params
        step = self.step.detach().reshape(()) if isinstance(self.step, Tensor) else self.step
        before = step - 1 if bias_correction else _LATE
        steps = [p.new_empty((), dtype=torch.float32).fill_(before) for p in params]
        function = adamw if mode == 1 else adam
        function(
            params, grads, means, squares, [], steps,
            foreach=False, fused=True, amsgrad=False, maximize=False,
            found_inf=self.skip.to(params[0].device, torch.float32),
            beta1=self.betas[0], beta2=self.betas[1], lr=self.lr, eps=self.eps,
            weight_decay=weight_decay,
        )  # fmt: skip
        for old, new in ((lists[2], means), (lists[3], squares)):
            _write(self.skip, zip(old, new, strict=True))
        return params


def multi_tensor_adam(
    chunk_size: int | None = None,
    noop_flag: Tensor | None = None,
    tensor_lists: Lists | None = None,
    lr: float | None = None,
    beta1: float | None = None,
    beta2: float | None = None,
    eps: float | None = None,
    step: int | None = None,
    mode: int | None = None,
    bias_correction: int | None = None,
    weight_decay: float | None = None,
) -> Any:
    """One step of Adam, in fp32; called with nothing, this function itself.

    Parameters
    ----------
    noop_flag : Tensor
        int32 [1].
    tensor_lists : list of list of Tensor
        Gradients, parameters, means, means of squares; then maybe fp32 parameters, which are
        updated in place of the others, and rounded into them. Any floating dtypes.
    lr, beta1, beta2, eps, weight_decay : float
        As of `torch.optim.Adam`.
    step : int
        From 1.
    mode : int
        0: weight decay is added to the gradient; 1: it is apart (AdamW).
    bias_correction : int
        Divide means by 1 - beta^step.

    Raises
    ------
    ValueError
        Lists of other numbers or lengths, another mode.
    """
    if noop_flag is None:
        return multi_tensor_adam
    lists = checked_lists("multi_tensor_adam", tensor_lists, 4, 5)
    numbers = _Adam(noop_flag, lr, (beta1, beta2), eps, step)
    _step(numbers, lists, mode, bias_correction, weight_decay)
    return None


def _step(numbers: _Adam, lists: list, mode: int, bias_correction: int, decay: float) -> None:
    """Update parameters, by fp32 ones where there are some."""
    updated = [lists[0], lists[-1] if len(lists) == 5 else lists[1], lists[2], lists[3]]
    new = numbers.update(updated, mode, bias_correction, decay)
    _write(numbers.skip, zip(updated[1], new, strict=True))
    if len(lists) == 5:
        _write(numbers.skip, zip(lists[1], new, strict=True))


def _capturable(
    op: str, count: int, lists: Lists, numbers: _Adam, rest: tuple, inv_scale: Tensor
) -> None:
    found = checked_lists(op, lists, count)
    found[0] = [grad.float() * inv_scale.detach().reshape(()) for grad in found[0]]
    _step(numbers, found, *rest)


def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """`multi_tensor_adam` of four lists, with `lr`, `step` and a factor of gradients on the device.

    `lr` and `inv_scale` are fp32, `step` int32, tensors of one element.
    """
    numbers = _Adam(noop_flag, lr, (beta1, beta2), epsilon, step)
    rest = mode, bias_correction, weight_decay
    _capturable("multi_tensor_adam_capturable", 4, tensor_lists, numbers, rest, inv_scale)


def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """`multi_tensor_adam_capturable` with fp32 parameters as a fifth list."""
    numbers = _Adam(noop_flag, lr, (beta1, beta2), epsilon, step)
    rest = mode, bias_correction, weight_decay
    _capturable("multi_tensor_adam_capturable_master", 5, tensor_lists, numbers, rest, inv_scale)


def multi_tensor_adam_fp8(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    fp8_dtype: Any,
) -> None:
    """`multi_tensor_adam` of parameters in FP8, which are cast of fp32 ones by their scale.

    The lists are gradients, codes (uint8), means, means of squares, fp32 parameters, scales, amaxes
    and inverse scales, the last three fp32 of one element each: amaxes are raised, inverse scales
    written.
    """
    op = "multi_tensor_adam_fp8"
    lists = checked_lists(op, tensor_lists, 8)
    grads, codes, means, squares, masters, scales, amaxes, inverses = lists
    dtype = torch_dtype(op, "fp8_dtype", fp8_dtype)
    numbers = _Adam(noop_flag, lr, (beta1, beta2), epsilon, step)
    updated = [grads, masters, means, squares]
    new = numbers.update(updated, mode, bias_correction, weight_decay)
    _write(numbers.skip, zip(masters, new, strict=True))
    largest = torch.finfo(dtype).max
    for master, code, scale, amax, inverse in zip(
        new, codes, scales, amaxes, inverses, strict=True
    ):
        cast = (master * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
        top = torch.maximum(amax, master.abs().max()) if master.numel() else amax
        written = ((code.view(torch.uint8), cast), (amax, top), (inverse, scale.reciprocal()))
        _write(numbers.skip, written)


def multi_tensor_adam_param_remainder(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """`multi_tensor_adam` of fp32 parameters that are kept as bf16 ones and what these lack.

    The lists are gradients, parameters (bf16), means, means of squares, and the low 16 bits of the
    fp32 parameters (int16). A parameter is the high 16 bits, and one more where the low ones are
    negative: rounded to nearest.
    """
    op = "multi_tensor_adam_param_remainder"
    grads, params, means, squares, rests = checked_lists(op, tensor_lists, 5)
    masters = []
    for param, rest in zip(params, rests, strict=True):
        if param.dtype != torch.bfloat16 or rest.dtype != torch.int16:
            raise TypeError(
                f"{op}: a parameter of {param.dtype}, low bits of {rest.dtype}: expected "
                "torch.bfloat16 and torch.int16"
            )
        low = rest.int()
        high = param.view(torch.int16).int() - (low < 0).int()
        masters.append(((high << 16) | (low & 0xFFFF)).view(torch.float32))
    numbers = _Adam(noop_flag, lr, (beta1, beta2), epsilon, step)
    updated = [grads, masters, means, squares]
    new = numbers.update(updated, mode, bias_correction, weight_decay)
    for master, param, rest in zip(new, params, rests, strict=True):
        bits = master.view(torch.int32)
        low = bits.to(torch.int16)
        high = (bits >> 16) + (low < 0).int()
        written = ((param.view(torch.int16), high.to(torch.int16)), (rest, low))
        _write(numbers.skip, written)


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """One step of stochastic gradient descent, in fp32.

    Parameters
    ----------
    noop_flag : Tensor
        int32 [1].
    tensor_lists : list of list of Tensor
        Gradients, parameters, momenta; then maybe parameters that the new ones are rounded into.
    wd, momentum, dampening, lr, nesterov
        As of `torch.optim.SGD`.
    first_run : bool
        The momenta have no values yet: they become the gradients.
    wd_after_momentum : bool
        Weight decay does not go into the momenta.
    scale : float
        Factor of the gradients.
    """
    lists = checked_lists("multi_tensor_sgd", tensor_lists, 3, 4)
    skip = noop_flag.detach().reshape(()) != 0
    for grad, param, state, *narrow in zip(*lists, strict=True):
        update, value = grad.float() * scale, param.float()
        if wd != 0.0 and not wd_after_momentum:
            update = update + wd * value
        if momentum != 0.0:
            kept = update if first_run else momentum * state.float() + (1.0 - dampening) * update
            update = update + momentum * kept if nesterov else kept
            _write(skip, ((state, kept),))
        if wd != 0.0 and wd_after_momentum:
            update = update + wd * value
        value = value - lr * update
        _write(skip, [(param, value), *((each, value) for each in narrow)])


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Scales of amaxes: max_fp8 / max(amax, epsilon), and their inverses.

    The lists are amaxes, scales and inverse scales, fp32. A scale is 1 for an amax of 0, Inf or
    NaN, the largest fp32 where it would be larger, and rounded down to a power of 2 if asked.
    """
    del chunk_size, noop_flag
    lists = checked_lists("multi_tensor_compute_scale_and_scale_inv", tensor_lists, 3)
    for amax, scale, inverse in zip(*lists, strict=True):
        top = torch.where(amax < epsilon, epsilon, amax)
        made = (torch.full_like(top, max_fp8) / top).clamp(max=torch.finfo(torch.float32).max)
        made = torch.where(top.isfinite() & (top != 0.0), made, 1.0)
        if force_pow_2_scales:
            made = (made.view(torch.int32) & -0x800000).view(torch.float32)
        scale.copy_(made.view(scale.shape))
        inverse.copy_(made.reciprocal().view(inverse.shape))
