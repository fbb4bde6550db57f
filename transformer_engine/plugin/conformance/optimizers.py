# SPDX-License-Identifier: Apache-2.0
"""Cases of operators on lists of tensors: optimizer steps, scaling and norms.

Of steps: what they leave in parameters and states, and what they do not touch. Each comes with a
flag of 1, too: then nothing is written.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Exact, Result, name_of
from transformer_engine.plugin.conformance.scaling import fp8_dtypes

_SHAPES = ((5,), (3, 7), (1,), (0,), (40, 11), (2, 129))
_BETAS, _EPS, _LR, _DECAY = (0.8, 0.95), 1e-6, 0.03, 0.2
_DEPTH = 8  # roundings to fp32 of a step
_CHUNK = 2048


class _Step(NamedTuple):
    """Numbers of a step of Adam."""

    step: int = 3
    mode: int = 1  # 0: decay is added to gradients, 1: it is apart
    correct: int = 1  # means are divided by 1 - beta^step
    decay: float = _DECAY
    factor: float = 1.0  # of gradients

    def __str__(self) -> str:
        kind = "AdamW" if self.mode else "Adam"
        return f"{kind} step {self.step}{'' if self.correct else ' biased'} decay {self.decay}"

    @property
    def tail(self) -> tuple:
        return self.mode, self.correct, self.decay


_STEPS = (
    *(_Step(mode=mode, correct=correct) for mode, correct in product((0, 1), (0, 1))),
    *(_Step(step=1), _Step(step=500), _Step(decay=0.0)),
)


def _adam(numbers: _Step, grad: Tensor, param: Tensor, mean: Tensor, square: Tensor) -> tuple:
    """New (parameter, mean, mean of squares), float64."""
    grad, param, mean, square = (t.double() for t in (grad, param, mean, square))
    grad = grad * numbers.factor
    if numbers.mode == 0:
        grad = grad + numbers.decay * param
    mean = _BETAS[0] * mean + (1 - _BETAS[0]) * grad
    square = _BETAS[1] * square + (1 - _BETAS[1]) * grad * grad
    first, second = (
        t / (1 - beta**numbers.step) if numbers.correct else t
        for t, beta in zip((mean, square), _BETAS, strict=True)
    )
    update = first / (second.sqrt() + _EPS)
    if numbers.mode == 1:
        update = update + numbers.decay * param
    return param - _LR * update, mean, square


def _drawn(draw: Draw, dtype: torch.dtype) -> list[Tensor]:
    return [draw.normal(shape, dtype) for shape in _SHAPES]


def _state(draw: Draw, dtype: torch.dtype, masters: bool) -> list[list[Tensor]]:
    """Gradients, parameters, means, means of squares, and maybe fp32 parameters."""
    grads, params, means, squares = (
        _drawn(draw, kind) for kind in (dtype, dtype, torch.float32, torch.float32)
    )
    made = [grads, params, means, [t.abs() for t in squares]]
    return [*made, [p.float() + 2.0**-12 for p in params]] if masters else made


class _Left(NamedTuple):
    """Tensors that a step writes, and what they are then; see `Exact`."""

    name: str
    tensors: list[Tensor] | Callable[[], list[Tensor]]
    exact: Any
    depth: int = _DEPTH
    dtype: torch.dtype | None = None  # None: that of the first tensor

    @property
    def result(self) -> Result:
        dtype = self.tensors[0].dtype if self.dtype is None else self.dtype
        return Result(self.name, dtype, self.depth)


def _cases(name: str, args: tuple, left: list[_Left], written: tuple = ()) -> Iterator[Case]:
    """A case, and that nothing is written where a flag says so."""
    chunk, flag, *rest = args
    skipping = (chunk, torch.ones_like(flag), *rest)
    yield Case(f"{name}, skipped", skipping, (None,), exact=Exact())
    results, exact = [(one.tensors, one.result) for one in left], [one.exact for one in left]
    yield Case(name, args, (None,), written=written, left=results, exact=Exact(None, exact))


def _rounded(to: list[Tensor], values: list[Tensor]) -> _Left:
    """Tensors that are the roundings of others."""
    pairs = list(zip(values, to, strict=True))
    return _Left("rounded parameters", to, lambda: [v.to(t.dtype) for v, t in pairs], 0)


def _after(step: Callable[..., tuple], names: tuple[str, ...], lists: list) -> list[_Left]:
    """All but the first of lists after a step, from what is in them now."""
    exact = zip(*(step(*row) for row in zip(*lists, strict=True)), strict=True)
    return [_Left(*each) for each in zip(names, lists[1:], map(list, exact), strict=True)]


def _stepped(numbers: _Step, *lists: list[Tensor]) -> list[_Left]:
    """Parameters and means after a step of Adam, from gradients and these as they are now."""
    return _after(partial(_adam, numbers), ("parameters", "means", "means of squares"), list(lists))


def _of_adam(numbers: _Step, lists: list) -> list[_Left]:
    """Lists after a step; with fp32 parameters the others are their roundings."""
    grads, params, means, squares, *masters = lists
    if not masters:
        return _stepped(numbers, *lists)
    return [*_stepped(numbers, grads, *masters, means, squares), _rounded(params, *masters)]


@Case.of("multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master")
def _adam_cases(op: str, draw: Draw) -> Iterator[Case]:
    capturable = "capturable" in op
    with_masters = (op.endswith("_master"),) if capturable else (False, True)
    for dtype, masters, numbers in product(draw.dtypes, with_masters, _STEPS):
        lists, flag = _state(draw, dtype, masters), draw.flag()
        lr, step, inverse, written = _LR, numbers.step, (), ()
        if capturable:
            numbers = numbers._replace(factor=0.25)
            lr, step, inverse = draw.number(_LR), draw.flag(numbers.step), (draw.number(0.25),)
            written = lists[0]  # they may be left times their factor
        args = (_CHUNK, flag, lists, lr, *_BETAS, _EPS, step, *numbers.tail, *inverse)
        name = f"{name_of(dtype)}{' with fp32' * masters} {numbers}"
        yield from _cases(name, args, _of_adam(numbers, lists), tuple(written))
    if op == "multi_tensor_adam":
        nothing = (_CHUNK, draw.flag(), [[], [], [], []], _LR, *_BETAS, _EPS, 1, 1, 1, _DECAY)
        yield Case("no tensors", nothing, (None,), exact=Exact())


def _of_fp8(lists: list, numbers: _Step, kind: torch.dtype) -> list[_Left]:
    """Eight lists after a step: codes are casts of the fp32 parameters."""
    grads, codes, means, squares, masters, scales, amaxes, inverses = lists
    before, top = [t.clone() for t in amaxes], torch.finfo(kind).max

    def casts() -> list[Tensor]:
        pairs = zip(masters, scales, strict=True)
        return [(m * s).clamp(-top, top).to(kind).view(torch.uint8) for m, s in pairs]

    def largest() -> list[Tensor]:
        pairs = zip(before, masters, strict=True)
        return [torch.cat((t, m.abs().flatten())).max().view(1) for t, m in pairs]

    left = _stepped(numbers, grads, masters, means, squares)
    left += _Left("codes", codes, casts, 0), _Left("amaxes", amaxes, largest, 0)
    pairs = enumerate(zip(inverses, scales, strict=True))
    return left + [_Left(f"inverse {i}", [one], 1 / scale.double(), 1) for i, (one, scale) in pairs]


@Case.of("multi_tensor_adam_fp8")
def _fp8(draw: Draw) -> Iterator[Case]:
    for dtype, numbers, (code, kind) in product(draw.dtypes, _STEPS, fp8_dtypes()):
        lists, flag = _state(draw, dtype, True), draw.flag()
        codes = [torch.full(t.shape, 0x55, dtype=torch.uint8, device=draw.device) for t in lists[1]]
        factors = (8.0, 300.0, 1.0, 2.0, 5e4, 0.5)  # some saturate
        scales = [draw.number(value) for value in factors]
        amaxes = [draw.number(99.0 * (i % 2)) for i in range(len(scales))]
        inverses = [draw.number(0.0) for _ in scales]
        given = [lists[0], codes, *lists[2:5], scales, amaxes, inverses]
        args = (_CHUNK, flag, given, _LR, *_BETAS, _EPS, numbers.step, *numbers.tail, code)
        name = f"{name_of(dtype)} {numbers} {name_of(kind)}"
        yield from _cases(name, args, _of_fp8(given, numbers, kind))


@Case.of("multi_tensor_adam_param_remainder")
def _remainders(draw: Draw) -> Iterator[Case]:
    """Parameters are the high halves of fp32 ones, and one more where the low one is negative."""
    for dtype, numbers in product(draw.dtypes, _STEPS):
        grads, _, means, squares = _state(draw, dtype, False)
        whole, flag = _drawn(draw, torch.float32), draw.flag()
        whole[0][0] = 1.0 + 2.0**-8 + 2.0**-20  # whose high half is rounded up
        bits = [t.view(torch.int32) for t in whole]
        rests = [b.to(torch.int16) for b in bits]
        halves = zip(bits, rests, strict=True)
        params = [
            ((b >> 16) + (r < 0).int()).to(torch.int16).view(torch.bfloat16) for b, r in halves
        ]
        left = _stepped(numbers, grads, whole, means, squares)
        left[0] = left[0]._replace(tensors=partial(_whole, params, rests), dtype=torch.float32)
        lists = [grads, params, means, squares, rests]
        args = (_CHUNK, flag, lists, _LR, *_BETAS, _EPS, numbers.step, *numbers.tail)
        name = f"gradients {name_of(dtype)} {numbers}"
        yield from _cases(name, args, left, (*params, *rests))


def _whole(params: list[Tensor], rests: list[Tensor]) -> list[Tensor]:
    """fp32 numbers of the halves."""
    made = []
    for param, rest in zip(params, rests, strict=True):
        high = param.view(torch.int16).int() - (rest < 0).int()
        made.append(((high << 16) | (rest.int() & 0xFFFF)).view(torch.float32))
    return made


# ---- stochastic gradient descent ---------------------------------------------------------------


class _Descent(NamedTuple):
    """Numbers of a step, in the order of the arguments."""

    decay: float
    momentum: float
    dampening: float
    lr: float
    nesterov: bool
    first: bool
    after: bool
    scale: float

    def __str__(self) -> str:
        words = (*("nesterov" * self.nesterov, "first" * self.first, "decay after" * self.after),)
        said = f"momentum {self.momentum} decay {self.decay} {' '.join(filter(None, words))}"
        return said.rstrip()

    def run(self, grad: Tensor, param: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """New (parameter, momentum), float64."""
        grad, param, state = (t.double() for t in (grad, param, state))
        update = self.scale * grad + (0.0 if self.after else self.decay * param)
        if self.momentum:
            kept = self.momentum * state + (1 - self.dampening) * update
            state = update if self.first else kept
            update = update + self.momentum * state if self.nesterov else state
        update = update + (self.decay * param if self.after else 0.0)
        return param - self.lr * update, state


@Case.of("multi_tensor_sgd")
def _sgd(draw: Draw) -> Iterator[Case]:
    flags = (False, True)
    options = product(draw.dtypes, flags, (0.0, 0.9), (0.0, 0.1), flags, flags, flags)
    for dtype, narrow, momentum, decay, nesterov, first, after in options:
        if (after and not decay) or ((nesterov or first) and not momentum):
            continue
        numbers = _Descent(decay, momentum, 0.3, 0.05, nesterov, first, after, 0.5)
        kind = torch.float32 if narrow else dtype
        grads, params, states = (_drawn(draw, one) for one in (dtype, kind, torch.float32))
        rounded = [torch.zeros_like(p, dtype=dtype) for p in params]
        lists = [grads, params, states, *([rounded] if narrow else [])]
        left = _after(numbers.run, ("parameters", "momenta"), lists[:3])
        # Without momentum its state stays as it is.
        left = left[: 1 + (momentum > 0)] + ([_rounded(rounded, params)] if narrow else [])
        name = f"{name_of(dtype)}{' rounded' * narrow} {numbers}"
        yield from _cases(name, (_CHUNK, draw.flag(), lists, *numbers), left)


# ---- scaling and norms -------------------------------------------------------------------------

_LISTED = ((5,), (3, 7), (40, 11), (2, 129))


@Case.of("multi_tensor_scale", "multi_tensor_scale_tensor")
def _scale(op: str, draw: Draw) -> Iterator[Case]:
    for dtype, wide, broken in product(draw.dtypes, (False, True), (False, True)):
        given = [draw.normal(shape, dtype) for shape in _LISTED]
        if broken:
            given[1][0, 0] = math.inf
        out = [draw.place(t.shape, torch.float32 if wide else dtype) for t in given]
        left = [(o, Result(f"out {i}", o.dtype)) for i, o in enumerate(out)]
        flag = draw.flag()
        left.append((flag, Result("noop_flag", depth=0)))
        exact = Exact(None, [*(g.double() * 0.3 for g in given), draw.flag(int(broken))])
        name = f"{name_of(dtype)}{' to float32' * wide}{' with Inf' * broken}"
        factor = draw.number(0.3) if op == "multi_tensor_scale_tensor" else 0.3
        yield Case(name, (2048, flag, [given, out], factor), (None,), left=left, exact=exact)


@Case.of("multi_tensor_l2norm", "multi_tensor_unscale_l2norm")
def _norm(op: str, draw: Draw) -> Iterator[Case]:
    unscaled = op == "multi_tensor_unscale_l2norm"
    for dtype in draw.dtypes:
        for each in (False, True):
            given = [draw.normal(shape, dtype) for shape in _LISTED]
            factor = draw.number(0.5)
            norms = torch.stack([t.double().norm() for t in given]) * (0.5 if unscaled else 1.0)
            total, depth = norms.norm().view(1), sum(t.numel() for t in given)

            each_one = Result("norms of each", torch.float32, depth) if each else None
            wanted = (Result("the norm", torch.float32, depth), each_one)
            more = (factor,) if unscaled else ()
            name = f"{name_of(dtype)}{' each' * each}"
            args = (2048, draw.flag(), [given], *more, each)
            yield Case(name, args, wanted, exact=Exact((total, norms)))
