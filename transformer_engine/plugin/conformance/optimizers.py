# SPDX-License-Identifier: Apache-2.0
"""Cases of optimizer steps: what they leave in parameters and states, and what they do not touch.

Each comes with a flag of 1, too: then nothing is written.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, Wanted, name_of, near, same

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


def _joined(names: tuple, now: tuple, exact: list[tuple]) -> list[Wanted]:
    """Lists of tensors and what each is to be, list by list: an element alone may cancel to 0."""
    results = []
    for name, found, values in zip(names, now, zip(*exact, strict=True), strict=True):
        one, other = (torch.cat([t.flatten() for t in each]) for each in (found, values))
        results.append(near(name, one, other, found[0].dtype, _DEPTH))
    return results


def _both(case: Case, flag: Tensor) -> Iterator[Case]:
    """A case, and that nothing is written where a flag says so.

    The second is made first: the first changes what both are given.
    """
    args = list(case.args)
    args[1] = torch.ones_like(flag)
    yield replace(case, name=f"{case.name}, skipped", args=tuple(args), wanted=lambda found: [],
                  written=())  # fmt: skip
    yield case


def _of_adam(lists: list, numbers: _Step) -> Callable[[Any], list[Wanted]]:
    """Expected lists after a step, from the lists as they are now."""
    masters = lists[4] if len(lists) == 5 else lists[1]
    rows = masters, lists[2], lists[3]
    exact = [_adam(numbers, *row) for row in zip(lists[0], *rows, strict=True)]

    def wanted(found: Any) -> list[Wanted]:
        del found
        results = _joined(("parameters", "means", "means of squares"), rows, exact)
        if len(lists) == 5:
            rounded = zip(lists[1], masters, strict=True)
            results += [same("rounded parameters", p, m.to(p.dtype)) for p, m in rounded]
        return results

    return wanted


@Case.of("multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master")
def _adam_cases(op: str, draw: Draw) -> Iterator[Case]:
    capturable = "capturable" in op
    with_masters = (op.endswith("_master"),) if capturable else (False, True)
    for dtype, masters, numbers in product(draw.dtypes, with_masters, _STEPS):
        lists, flag = _state(draw, dtype, masters), draw.flag()
        lr, step, inverse, written = _LR, numbers.step, (), lists[1:]
        if capturable:
            numbers = numbers._replace(factor=0.25)
            lr, step, inverse = draw.number(_LR), draw.flag(numbers.step), (draw.number(0.25),)
            written = lists  # gradients may be left times their factor
        args = (_CHUNK, flag, lists, lr, *_BETAS, _EPS, step, *numbers.tail, *inverse)
        name = f"{name_of(dtype)}{' with fp32' * masters} {numbers}"
        yield from _both(Case(name, args, _of_adam(lists, numbers), written=tuple(written)), flag)
    if op == "multi_tensor_adam":
        nothing = (_CHUNK, draw.flag(), [[], [], [], []], _LR, *_BETAS, _EPS, 1, 1, 1, _DECAY)
        yield Case("no tensors", nothing, lambda found: [])


def _of_fp8(lists: list, numbers: _Step, kind: torch.dtype) -> Callable[[Any], list[Wanted]]:
    """Expected eight lists after a step: codes are casts of the fp32 parameters."""
    grads, codes, means, squares, masters, scales, amaxes, inverses = lists
    of_step = _of_adam([grads, masters, means, squares], numbers)
    before, top = [t.clone() for t in amaxes], torch.finfo(kind).max

    def wanted(found: Any) -> list[Wanted]:
        results = of_step(found)
        for i, (master, scale) in enumerate(zip(masters, scales, strict=True)):
            cast = (master * scale).clamp(-top, top).to(kind).view(torch.uint8)
            amax = torch.cat((before[i], master.abs().flatten())).max().view(1)
            results += [
                same(f"codes {i}", codes[i], cast),
                same(f"amax {i}", amaxes[i], amax),
                near(f"inverse {i}", inverses[i], scale.double() ** -1, torch.float32),
            ]
        return results

    return wanted


@Case.of("multi_tensor_adam_fp8")
def _fp8(draw: Draw) -> Iterator[Case]:
    from transformer_engine.pytorch.constants import DType

    formats = (DType.kFloat8E4M3, torch.float8_e4m3fn), (DType.kFloat8E5M2, torch.float8_e5m2)
    for dtype, numbers, (code, kind) in product(draw.dtypes, _STEPS, formats):
        lists, flag = _state(draw, dtype, True), draw.flag()
        codes = [torch.full(t.shape, 0x55, dtype=torch.uint8, device=draw.device) for t in lists[1]]
        factors = (8.0, 300.0, 1.0, 2.0, 5e4, 0.5)  # some saturate
        scales = [draw.number(value) for value in factors]
        amaxes = [draw.number(99.0 * (i % 2)) for i in range(len(scales))]
        inverses = [draw.number(0.0) for _ in scales]
        given = [lists[0], codes, *lists[2:5], scales, amaxes, inverses]
        args = (_CHUNK, flag, given, _LR, *_BETAS, _EPS, numbers.step, *numbers.tail, code)
        written = codes, *lists[2:5], amaxes, inverses
        wanted = _of_fp8(given, numbers, kind)
        name = f"{name_of(dtype)} {numbers} {name_of(kind)}"
        yield from _both(Case(name, args, wanted, written=written), flag)


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
        rows = zip(grads, whole, means, squares, strict=True)
        exact = [_adam(numbers, *row) for row in rows]

        def wanted(
            found: Any, params: list = params, rests: list = rests, means: list = means,
            squares: list = squares, exact: list = exact,
        ) -> list:  # fmt: skip
            now = []
            for param, rest in zip(params, rests, strict=True):
                high = param.view(torch.int16).int() - (rest < 0).int()
                now.append(((high << 16) | (rest.int() & 0xFFFF)).view(torch.float32))
            names = "both halves of parameters", "means", "means of squares"
            return _joined(names, (now, means, squares), exact)

        lists = [grads, params, means, squares, rests]
        args = (_CHUNK, flag, lists, _LR, *_BETAS, _EPS, numbers.step, *numbers.tail)
        name = f"gradients {name_of(dtype)} {numbers}"
        case = Case(name, args, wanted, written=tuple(lists[1:]))
        yield from _both(case, flag)


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
        exact = [numbers.run(*row) for row in zip(grads, params, states, strict=True)]

        def wanted(
            found: Any, params: list = params, states: list = states, exact: list = exact,
            rounded: list | None = rounded if narrow else None,
        ) -> list:  # fmt: skip
            results = _joined(("parameters", "momenta"), (params, states), exact)
            for one, param in zip(rounded or (), params, strict=bool(rounded)):
                results.append(same("rounded parameters", one, param.to(one.dtype)))
            return results

        flag = draw.flag()
        # Without momentum its state stays as it is.
        written = (*params, *rounded, *(states if momentum else ()))
        name = f"{name_of(dtype)}{' rounded' * narrow} {numbers}"
        yield from _both(Case(name, (_CHUNK, flag, lists, *numbers), wanted, written=written), flag)
