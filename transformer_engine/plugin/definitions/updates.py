# SPDX-License-Identifier: Apache-2.0
"""One pass over lists of tensors: `_core.update` and `_core.l2norm`, which are no operators.

Arguments, results and errors are those of `_core`, whose checks come first. Formulas and the order
of sums are those of `csrc/include/transformer_engine_updates.h` and `csrc/core/l2norm_order.h`, and
every operation is rounded by itself: the bits are those of the CPU, but for those of a NaN. Numbers
on the device stay there; roots, sums of chunks and powers of betas are float64, which it needs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.definitions.casts import store
from transformer_engine.plugin.definitions.codes import quotient, reciprocal
from transformer_engine.plugin.definitions.scales import scale_of_amax

_GRAD, _VALUE, _MEAN, _SQUARE, _ROUNDED, _REMAINDER = range(6)  # te_update_list
_STEP_BITS = 31  # of an int32 that is positive

_obeying_quantize = _core.obeying("quantize")


class _Numbers(NamedTuple):
    """Of a call; what the device has is a tensor without dims."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    decay: float
    grad_scale: float | Tensor
    momentum: float
    dampening: float
    top: float
    corrections: tuple[float | Tensor, float | Tensor]
    flags: int

    def has(self, flag: int) -> bool:
        return bool(self.flags & flag)


def update(
    kind: int,
    flags: int,
    lists: tuple[Sequence[Tensor] | None, ...],
    flag: Tensor | None,
    numbers: tuple[float, ...],
    step: int,
    device_numbers: tuple[Tensor | None, ...],
    casts: tuple[dict[str, Any], ...] | None = None,
) -> None:
    """Run a step of Adam or of gradient descent, products, or scales of amaxes: `_core.update`.

    Casts are calls of the operator `quantize`, which others may take.
    """
    given = lists, flag, numbers, step, device_numbers, casts
    _core.update(kind, flags | _core.UPDATE_CHECK, *given)
    if flags & _core.UPDATE_CHECK or not lists[_GRAD]:
        return
    lr, grad_scale, step_at = (None if n is None else n.reshape(()) for n in device_numbers)
    all_numbers = _Numbers(
        *numbers,
        corrections=_corrections(flags, numbers[1:3], step if step_at is None else step_at),
        flags=flags,
    )
    if lr is not None:
        all_numbers = all_numbers._replace(lr=lr)
    if grad_scale is not None:
        all_numbers = all_numbers._replace(grad_scale=grad_scale)
    rows = zip(*(each or [None] * len(lists[_GRAD]) for each in lists), strict=True)
    if kind == _core.UPDATE_SCALE:
        _scale(list(rows), all_numbers, flag)
        return
    kept = None if flag is None else flag.reshape(()) != 0
    for row in rows:
        _RULES[kind](row, all_numbers, kept)
    noop = None if flag is None else flag.to(torch.float32)
    for value, fields in zip(lists[_VALUE], casts or (), strict=bool(casts)):
        _obeying_quantize(value, **fields, noop=noop)


def _corrections(
    flags: int, betas: tuple[float, float], step: int | Tensor
) -> tuple[float | Tensor, float | Tensor]:
    """1 - beta^step, by squaring as `te_update_correction` does it; 1 where none is wanted."""
    if not flags & _core.UPDATE_CORRECTED:
        return 1.0, 1.0
    if isinstance(step, int):
        return tuple(1.0 - _power(beta, step) for beta in betas)
    squares = [torch.full((), beta, dtype=torch.float64, device=step.device) for beta in betas]
    powers = [torch.ones_like(square) for square in squares]
    for bit in range(_STEP_BITS):
        taken = (step >> bit & 1) != 0
        for i, square in enumerate(squares):
            powers[i] = torch.where(taken, powers[i] * square, powers[i])
            squares[i] = square * square
    return tuple((1.0 - power).to(torch.float32) for power in powers)


def _power(beta: float, step: int) -> float:
    power = 1.0
    while step:
        if step & 1:
            power *= beta
        beta, step = beta * beta, step >> 1
    return power


# ---- kinds ---------------------------------------------------------------------------------------
# Each gets a row, a tensor or None of each list; where `kept` is true nothing is written.


def _scale(rows: list[tuple], n: _Numbers, flag: Tensor | None) -> None:
    infinite = []
    for row in rows:
        grad = row[_GRAD].to(torch.float32)
        infinite.append((~grad.isfinite()).any())
        store(row[_VALUE], grad * n.grad_scale)
    if flag is not None:
        flag.masked_fill_(torch.stack(infinite).any(), 1)


def _adam(row: tuple, n: _Numbers, kept: Tensor | None) -> None:
    grad, value = row[_GRAD].to(torch.float32) * n.grad_scale, _value(row)
    scaled = grad
    if not n.has(_core.UPDATE_DECOUPLED):
        grad = grad + value * n.decay
    mean = row[_MEAN].to(torch.float32) * n.beta1 + grad * (1.0 - n.beta1)
    square = row[_SQUARE].to(torch.float32) * n.beta2 + grad * (1.0 - n.beta2) * grad
    change = _rounded_root(quotient(square, n.corrections[1])) + n.eps
    change = quotient(quotient(mean, n.corrections[0]), change)
    if n.has(_core.UPDATE_DECOUPLED):
        change = change + value * n.decay
    _store_value(row, value - change * n.lr, kept)
    store(row[_MEAN], mean, kept)
    store(row[_SQUARE], square, kept)
    if n.has(_core.UPDATE_WRITE_GRAD):
        store(row[_GRAD], scaled, kept)


def _sgd(row: tuple, n: _Numbers, kept: Tensor | None) -> None:
    grad, value = row[_GRAD].to(torch.float32) * n.grad_scale, _value(row)
    scaled, last = grad, n.has(_core.UPDATE_DECAY_LAST)
    if n.decay and not last:
        grad = grad + value * n.decay
    if n.momentum:
        mean = grad
        if not n.has(_core.UPDATE_FIRST):
            mean = row[_MEAN].to(torch.float32) * n.momentum + grad * (1.0 - n.dampening)
        grad = grad + mean * n.momentum if n.has(_core.UPDATE_NESTEROV) else mean
        store(row[_MEAN], mean, kept)
    if n.decay and last:
        grad = grad + value * n.decay
    _store_value(row, value - grad * n.lr, kept)
    if n.has(_core.UPDATE_WRITE_GRAD):
        store(row[_GRAD], scaled, kept)


def _rescale(row: tuple, n: _Numbers, kept: Tensor | None) -> None:
    amax = row[_GRAD].to(torch.float32) * n.grad_scale
    scale = scale_of_amax(amax, n.top, n.eps, n.has(_core.UPDATE_POWER_2))
    store(row[_VALUE], scale, kept)
    store(row[_MEAN], reciprocal(scale), kept)


_RULES = {
    _core.UPDATE_ADAM: _adam,
    _core.UPDATE_SGD: _sgd,
    _core.UPDATE_RESCALE: _rescale,
}


def _rounded_root(values: Tensor) -> Tensor:
    """Fp32 roots, rounded once: those of torch are not, on a CPU either."""
    return values.to(torch.float64).sqrt().to(torch.float32)


def _value(row: tuple) -> Tensor:
    """The value of a row in fp32, of both its halves where there is a remainder."""
    if row[_REMAINDER] is None:
        return row[_VALUE].to(torch.float32)
    high, low = (row[i].view(torch.int16).to(torch.int32) for i in (_VALUE, _REMAINDER))
    return ((high << 16) + low).view(torch.float32)


def _store_value(row: tuple, value: Tensor, kept: Tensor | None) -> None:
    if row[_ROUNDED] is not None:
        store(row[_ROUNDED], value, kept)
    if row[_REMAINDER] is None:
        store(row[_VALUE], value, kept)
        return
    bits = value.view(torch.int32)
    low = bits << 16 >> 16  # with its sign
    store(row[_VALUE].view(torch.int16), bits - low >> 16, kept)
    store(row[_REMAINDER].view(torch.int16), low, kept)


# ---- norms ---------------------------------------------------------------------------------------

_WARP, _GROUP, _THREADS, _STEPS, _ADDERS = 32, 4, 256, 16, 512
_LANES = _GROUP * _THREADS
_CHUNK = _STEPS * _LANES


def l2norm(
    tensors: Sequence[Tensor], factor: Tensor | None, flag: Tensor | None, per_tensor: bool
) -> tuple[Tensor, Tensor]:
    """Roots of sums of squares, of all tensors and of each: `_core.l2norm`."""
    _core.l2norm(tensors, factor, flag, per_tensor, _core.L2NORM_CHECK)
    sums = [_sums_of_chunks(tensor, factor) for tensor in tensors]
    total = _root(torch.cat(sums))
    each = torch.cat([_root(own) for own in sums]) if per_tensor else total.new_empty(0)
    if flag is not None:
        flag.masked_fill_(~total.isfinite(), 1)
    return total, each


def _sums_of_chunks(tensor: Tensor, factor: Tensor | None) -> Tensor:
    """Sums of squares of the chunks of a tensor, [chunks] fp32."""
    values = tensor.detach().reshape(-1).to(torch.float32)
    if factor is not None:
        values = values * factor
    steps = _in_lines(values * values, _CHUNK).view(-1, _STEPS, _LANES)
    a, b, c, d = _in_turn(steps.transpose(0, 1)).view(-1, _THREADS, _GROUP).unbind(-1)
    return _joined((a + b) + (c + d))


def _root(sums: Tensor) -> Tensor:
    """Root of the sum of fp32 numbers, [1] fp32."""
    if not sums.numel():
        return sums.new_zeros(1)
    adders = _in_turn(_in_lines(sums.to(torch.float64), _ADDERS))
    return _joined(adders[None]).sqrt().to(torch.float32)


def _in_lines(values: Tensor, length: int) -> Tensor:
    """Numbers as lines of a length, with zeros behind them."""
    return torch.nn.functional.pad(values, (0, -len(values) % length)).view(-1, length)


def _in_turn(terms: Tensor) -> Tensor:
    """The sum over the first dim, one by one."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _joined(sums: Tensor) -> Tensor:
    """The sum over the last dim: of each warp halves first, then of the warps."""
    return _by_halves(_by_halves(sums.unflatten(-1, (-1, _WARP))))


def _by_halves(sums: Tensor) -> Tensor:
    while sums.shape[-1] > 1:
        a, b = sums.chunk(2, -1)
        sums = a + b
    return sums[..., 0]
