# SPDX-License-Identifier: Apache-2.0
"""Cases of operators: arguments, and what comes of them."""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

_EPS = torch.finfo(torch.float32).eps
_MARGIN = 128
"""Elements of others before and behind the memory of an argument, 256 bytes or more."""
_SINGLE = 8.0
"""How much further than the root of the mean square of errors may be that of one element."""


class Wanted(NamedTuple):
    """A result and what it has to be."""

    name: str
    found: Any
    exact: Tensor
    dtype: torch.dtype
    bound: float  # of the mean square of errors, relative to that of the values; 0: no bit differs
    terms: Tensor | None = None  # what the values are sums of, where these may cancel


class Result(NamedTuple):
    """What a result is, and how near it has to be to what it is to be.

    Within `steps` roundings to the dtype, and those of sums of `depth` terms in fp32. Each is an
    error of at most eps / 2 of its value, all in one direction so steps * eps / 2; sums of random
    sign err by sqrt(depth) of those. Functions on the way pass errors on with a gain whose square
    is at most 4, and exponentials of arguments up to 16 err by 32 eps. Of values that are sums of
    `terms` that cancel errors are relative to these. Values that are cast to E4M3 are each rounded
    by 2^-4 of it at most, but for small ones.
    """

    name: str
    dtype: torch.dtype | None = None  # None: that of what it is to be, or a quantized tensor
    depth: int = 1  # 0: bit for bit
    steps: float = 2.0
    terms: Tensor | None = None
    quantizer: Any = None  # it is cast; or left in high precision, where there is a dtype
    may_lack: bool = False  # None is as well
    finite: bool = False  # what it is where it is not to be finite means nothing

    def beside(self, found: Any, exact: Any) -> Iterator[Wanted]:
        """What was found, and what it is to be: float64, or of any dtype bit for bit."""
        name, dtype = self.name, self.dtype
        if hasattr(type(exact), "_dequantized"):
            _expect(found, type(exact))
            parts = zip(found.get_data_tensors(), exact.get_data_tensors(), strict=True)
            for i, (one, other) in enumerate(parts):
                if other is not None:
                    yield Wanted(f"{name}, part {i}", one, other, other.dtype, 0.0)
            return
        if self.quantizer is not None and (dtype is None or type(found) is not Tensor):
            _expect(found, type(self.quantizer.make_empty((32, 32), device=exact.device)))
            values = found.dequantize(dtype=torch.float32)
            yield Wanted(name, values, exact, torch.float32, 2.0**-8)
            return
        if self.finite and getattr(found, "shape", None) == exact.shape:
            seen = exact.isfinite()
            found, exact = found[seen], exact[seen]
        if self.depth == 0:
            exact = exact if dtype is None else exact.to(dtype)
            yield Wanted(name, found, exact, exact.dtype, 0.0)
            return
        rounding = self.steps * torch.finfo(dtype).eps / 2
        bound = rounding**2 + 4 * self.depth * (_EPS / 2) ** 2 + (32 * _EPS) ** 2
        yield Wanted(name, found, exact, dtype, bound, self.terms)


def _expect(found: Any, kind: type) -> None:
    if type(found) is not kind:
        raise TypeError(f"{type(found).__name__}, expected a {kind.__name__}")


class Exact(NamedTuple):
    """What a call gives: its results, and what it leaves in the arguments of `Case.left`.

    Of a list of tensors a list; or a function that gives either, after the call.
    """

    results: Any = None
    left: Sequence[Any] = ()
    before: Sequence[Tensor | None] = ()  # what was in these


CASES: dict[str, Callable[["Draw"], Iterable["Case"]]] = {}
"""Makers of the cases of operators, by operator, of the groups that are imported."""


@dataclass(frozen=True)
class Case:
    """A call and what it gives."""

    name: str  # for people
    args: tuple
    wanted: tuple[Result | None, ...] | Callable[[Any], Sequence[Wanted]]
    """A `Result`, or None for what is not looked at, for each result of the operator; or a function
    of what the call returned that gives a sequence of `Wanted`."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    written: tuple = ()
    """Tensors, or lists of them, that the call may write to; all others it has to leave alone."""
    left: Sequence[tuple[Any, Result]] = ()
    """Likewise, each with what is in it then; lists as a whole: an element alone may cancel to 0.
    Or functions that give what to compare."""
    wide: bool = True  # the definition is asked in float64; else in the dtypes of the arguments
    exact: Exact | None = None  # what the call gives; None: what the definition does

    @staticmethod
    def of(*ops: str) -> Callable[[Callable], Callable]:
        """Say of which operators a function makes the cases (decorator).

        It is given a `Draw`, and the operator where it has a parameter `op`.
        """

        def mark(make: Callable[..., Iterable[Case]]) -> Callable:
            with_op = "op" in inspect.signature(make).parameters
            CASES.update({op: functools.partial(make, op) if with_op else make for op in ops})
            return make

        return mark


class Draw:
    """Random data of a check.

    `forward` is the forward whose random masks a gradient reads, where one is known.
    """

    def __init__(
        self,
        device: torch.device,
        seed: int,
        dtypes: tuple[torch.dtype, ...],
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.device, self.dtypes, self.forward = device, dtypes, forward
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: Sequence[int], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Normal numbers."""
        values = torch.randn(tuple(shape), generator=self._generator, dtype=torch.float64)
        return self.among_others((values * scale).to(dtype).to(self.device))

    def among_others(self, tensor: Tensor) -> Tensor:
        """The same values, between elements that a call neither reads nor writes: NaN, or 165."""
        return self.place(tensor.shape, tensor.dtype).copy_(tensor)

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Where a result goes, as elements of others are."""
        other = math.nan if dtype.is_floating_point else 165 if dtype.itemsize == 1 else -1
        count = math.prod(shape)
        space = torch.full((count + 2 * _MARGIN,), other, dtype=dtype, device=self.device)
        return space[_MARGIN : _MARGIN + count].view(tuple(shape))

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """Numbers between 0 and 1, float64."""
        made = torch.rand(tuple(shape), generator=self._generator, dtype=torch.float64)
        return made.to(self.device)

    def flag(self, value: int = 0) -> Tensor:
        """An int32 tensor of one element."""
        return torch.full((1,), value, dtype=torch.int32, device=self.device)

    def number(self, value: float) -> Tensor:
        """An fp32 tensor of one element."""
        return self.place((1,), torch.float32).fill_(value)

    def strided(self, tensor: Tensor) -> Tensor:
        """The same values where they do not lie side by side."""
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor
        return wide[..., ::2]


def name_of(dtype: torch.dtype) -> str:
    """A short name."""
    return str(dtype).rpartition(".")[2]


_RECIPES = {
    "Float8Quantizer": "delayed",
    "Float8CurrentScalingQuantizer": "current",
    "Float8BlockQuantizer": "block",
    "Float8RowQuantizer": "row",
    "MXFP8Quantizer": "mxfp8",
    "NVFP4Quantizer": "nvfp4",
}


def recipe_of(case: Case) -> str:
    """Recipe whose quantized tensors or quantizers a call has; "none" for a call without."""
    for value in _each([*case.args, *case.kwargs.values()]):
        quantizer = value if hasattr(value, "make_empty") else getattr(value, "_quantizer", None)
        if quantizer is not None:
            return _RECIPES.get(type(quantizer).__name__, type(quantizer).__name__)
    return "none"


def dtype_of(case: Case) -> str:
    """Name of the dtype of a call's first tensor in high precision, "" where there is none."""
    for value in _each([*case.args, *case.kwargs.values()]):
        is_high = isinstance(value, Tensor) and not hasattr(type(value), "_dequantized")
        if is_high and value.is_floating_point() and value.element_size() > 1:
            return name_of(value.dtype)
    return ""


def _each(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _each(value)
        else:
            yield value


def _tensors(value: Any) -> list[Tensor]:
    """The memory that an argument is, or consists of."""
    if hasattr(type(value), "_dequantized"):
        return [part for part in value.get_data_tensors() if part is not None]
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for one in value for tensor in _tensors(one)]
    return []


class Kept(NamedTuple):
    """Bytes that arguments share with whatever lies around them, and which of them are written."""

    whole: Tensor
    before: Tensor
    written: list[Tensor]

    def touched(self) -> bool:
        """Return whether anything has been written."""
        return not torch.equal(self.whole, self.before)

    def changed(self) -> bool:
        """Return whether others have been written."""
        now = self.whole.clone()
        for tensor in self.written:
            _as_in(now, tensor).copy_(_as_in(self.before, tensor))
        return not torch.equal(now, self.before)


def _as_in(whole: Tensor, tensor: Tensor) -> Tensor:
    """A tensor at the same place of a copy of its storage."""
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return tensor.new_empty(0).set_(whole.untyped_storage(), *place)


def snapshot(case: Case) -> list[Kept]:
    """The memory of a call's arguments, and around them; what it may write to apart."""
    written = [*case.written, *(tensor for tensor, _ in case.left)]
    spared = {id(part) for one in written for part in _tensors(one)}
    found: dict[int, Kept] = {}
    for tensor in _tensors([*case.args, *case.kwargs.values()]):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in found:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            found[storage.data_ptr()] = Kept(whole, whole.clone(), [])
        if id(tensor) in spared:
            found[storage.data_ptr()].written.append(tensor)
    return list(found.values())


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.element_size() != 1 and one.is_floating_point():
        return bool(((one == other) | (one.isnan() & other.isnan())).all())
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def errors_of(wanted: Iterable[Wanted], before: list[Kept]) -> tuple[float, str]:
    """The largest error in units of what is allowed, and what is wrong; "": nothing."""
    largest = 0.0
    for one in wanted:
        error, why = _error(one)
        largest = max(largest, error)
        if why:
            return largest, f"{one.name}: {why}"
    if any(kept.changed() for kept in before):
        return float("inf"), "it has changed an argument, or what lies around one"
    return largest, ""


def _error(wanted: Wanted) -> tuple[float, str]:
    """(error in units of what is allowed, what is wrong)."""
    name, found, exact, dtype, bound, terms = wanted
    infinite = float("inf")
    if not isinstance(found, Tensor):
        return infinite, f"{type(found).__name__}, expected a tensor"
    if tuple(found.shape) != tuple(exact.shape):
        return infinite, f"shape {tuple(found.shape)}, expected {tuple(exact.shape)}"
    if found.dtype != dtype:
        return infinite, f"{found.dtype}, expected {dtype}"
    if found.requires_grad:
        return infinite, "it has a graph"
    found = found.detach()
    if bound == 0.0:
        return (0.0, "") if _equal(found, exact.to(found.device)) else (infinite, "other bits")
    got, exact = found.double().cpu(), exact.detach().double().cpu()
    finite = exact.isfinite()
    if not torch.equal(got.isnan(), exact.isnan()):
        return infinite, "NaN elsewhere"
    infinities = exact.isinf()
    if not torch.equal(got[infinities], exact[infinities]) or not got[finite].isfinite().all():
        return infinite, "Inf elsewhere"
    if not finite.any():
        return 0.0, ""
    scale = exact[finite].square().mean().clamp(min=torch.finfo(torch.float32).tiny)
    if terms is not None:
        numbers = terms[terms.isfinite()].double()
        scale = scale.clamp(min=float(numbers.square().mean()))
    apart = (got[finite] - exact[finite]).square()
    error = float(apart.mean() / scale / bound)
    if error > 1.0:
        return error, f"off by {(error * bound) ** 0.5:.2g} of its values"
    one = float((apart / exact[finite].square().clamp(min=scale)).max() / bound) / _SINGLE**2
    return max(
        error, one
    ), "" if one <= 1.0 else f"one value is off by {math.sqrt(float(apart.max())):.2g}"
