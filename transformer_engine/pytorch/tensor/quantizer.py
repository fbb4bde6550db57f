# SPDX-License-Identifier: Apache-2.0
"""`Quantizer`: what makes quantized tensors of a format, and casts into them.

A format of this library says how its tensors are made empty and cast (`_empty`, `_cast`); all else
is composed of that. A class of a program defines the public methods instead (`quantize_impl`,
`update_quantized`, `make_empty`), and whatever casts goes by these where a class defines them.
"""

import abc
import copy
import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.tensor.pickling import pickled_class
from transformer_engine.pytorch.tensor.quantizer_arguments import (
    FP8,
    check_flag,
    checked_dtype,
    checked_shape,
    checked_tensor,
    fp8_type,
)
from transformer_engine.pytorch.torchside.collectives import take_largest
from transformer_engine.pytorch.torchside.device import accelerator
from transformer_engine.pytorch.torchside.modes import constant_in_graphs


def plain(tensor: Any) -> Tensor:
    """The values of a tensor in high precision; a plain tensor itself."""
    if hasattr(type(tensor), "_dequantized"):
        return tensor._dequantized(tensor.dtype, tuple(tensor.shape))
    return tensor


class InnerTensor(NamedTuple):
    """One of the tensors that a quantized tensor consists of, as it has to be."""

    ctor_kwarg: str  # the argument of the constructor that takes it
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.uint8


class Quantizer(abc.ABC):
    """Makes quantized tensors of a format, and casts into them.

    A subclass of a program defines `quantize_impl`, and, so that its tensors can be written to and
    be parameters, `update_quantized` and `make_empty`. Where a class defines `quantize_impl` alone,
    `update_quantized` copies what that makes.

    Parameters
    ----------
    rowwise, columnwise : bool, default True
        Which forms to make: as GEMMs over the last dim read it, and over the others.

    Attributes
    ----------
    rowwise_usage, columnwise_usage : bool
        The same.
    internal : bool
        Make a storage, which torch knows nothing of, and no tensor.
    optimize_for_gemm : bool
        Lay scales out as GEMMs read them, where a format has two ways; else it changes nothing.
    """

    TENSOR: ClassVar[type]
    """Class of the tensors that it makes; its storage class is `STORAGE`."""
    STORAGE: ClassVar[type]
    _CASTS_COMPUTED: ClassVar[bool] = False
    """True where `_cast` takes a `casts.Computed`, and casts it once."""
    _REPEATS: ClassVar[bool] = False
    """True where casting the same values again gives the same bits, and changes no state."""
    _GATHERS_ROWS: ClassVar[bool] = False
    """True where the column-wise form is made of the row-wise one alone."""
    _of_part: bool = False
    """True of the quantizer of a rank's part of a weight."""
    _ARGUMENTS: ClassVar[tuple[str, ...]] = ()
    """Arguments of the constructor, besides the usages, that are attributes by the same names; an
    element type is ``dtype``."""

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage = bool(rowwise)
        self.columnwise_usage = bool(columnwise)
        self.internal = False
        self.optimize_for_gemm = False

    # ---- what a format says ----------------------------------------------------------------------

    def _empty(self, shape: tuple, device: torch.device, pin_memory: bool) -> dict[str, Any]:
        """Fields of a storage, without values, for the usages that are set.

        ValueError for a shape that the format has no blocks for.
        """
        raise self._undefined("make_empty(shape, *, dtype, device, requires_grad, pin_memory)")

    def _for_values(self, dtype: torch.dtype) -> "Quantizer":
        """Return the quantizer of a tensor of a nominal dtype."""
        del dtype
        return self.copy()

    def _cast(self, source: Tensor, into: Any, noop: Tensor | None) -> None:
        """Write the forms that a storage has; `source` is plain, in any floating dtype."""
        raise self._undefined("quantize_impl(tensor)")

    def _format_settings(self, shape: tuple | None) -> dict[str, Any]:
        """Fields of what it makes that are no tensors; those of any shape where that is None."""
        del shape
        return {}

    def _check_shape(self, shape: tuple) -> None:
        """ValueError for a shape that the format has no blocks for."""
        del shape

    def _undefined(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__}: it defines no {method}: define it")

    # ---- what a class of a program says ----------------------------------------------------------

    @property
    def _casts_natively(self) -> bool:
        """True where what it makes is what `_cast` makes: its class has no cast of a program."""
        return type(self).quantize_impl is Quantizer.quantize_impl

    @property
    def _casts_computed(self) -> bool:
        """True where a storage can be written from a `casts.Computed`."""
        return self._CASTS_COMPUTED and self._casts_natively and self._writes_natively

    @property
    def _writes_natively(self) -> bool:
        """True where it writes into tensors as this class does."""
        return type(self).update_quantized is Quantizer.update_quantized

    # ---- making tensors --------------------------------------------------------------------------

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Any:
        """Allocate a quantized tensor of a shape and nominal dtype, without values.

        On the current CUDA device where there is one, unless `device` says otherwise. ValueError
        for a shape without dims, where the blocks of the format need one, TypeError for a dtype
        that is no floating one.
        """
        label = type(self).__name__
        shape, dtype = checked_shape(label, shape), checked_dtype(f"{label}: dtype", dtype)
        if device is None:
            device = accelerator()
        kept = self._for_values(dtype)
        fields = kept._empty(shape, torch.device(device), pin_memory)
        fields["_quantizer"] = kept
        if self.internal:
            return self.STORAGE._made(fields, dtype)
        return self.TENSOR._made(fields, dtype, shape, requires_grad)

    def quantize(self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        """Quantize a tensor: into `out` where that is given, else into a new one of nominal dtype.

        `dtype` is that of `tensor` where None. A gradient passes unchanged. TypeError where the
        nominal dtype is no floating one.
        """
        checked_tensor(f"{type(self).__name__}: tensor", tensor)
        if out is not None:
            return self.update_quantized(tensor, out)
        if torch.compiler.is_compiling() and not self.internal:
            _offer_in_graph()
            return _quantize_in_graph(tensor, self._number(), dtype)
        if self.internal or not (tensor.requires_grad and torch.is_grad_enabled()):
            return self._quantized(tensor, dtype)
        return _Quantize.apply(tensor, self, dtype)

    def __call__(self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        """`quantize`."""
        return self.quantize(tensor, out=out, dtype=dtype)

    def quantize_impl(self, tensor: Tensor) -> Any:
        """Cast a plain tensor into a new one of its dtype: what `quantize` calls, below autograd.

        A class of a program that defines it casts by it wherever this library would cast.
        """
        source = plain(checked_tensor(f"{type(self).__name__}: tensor", tensor))
        made = self.make_empty(source.shape, dtype=source.dtype, device=source.device)
        self._cast(source, made, None)
        made._written()
        return made

    def _quantized(self, tensor: Tensor, dtype: torch.dtype | None) -> Any:
        label = f"{type(self).__name__}: tensor"
        nominal = tensor.dtype if dtype is None else dtype
        checked_dtype(label, tensor.dtype), checked_dtype(label, nominal)
        source = plain(tensor)
        made = self.quantize_impl(source) if self._casts_natively else self._made(source)
        if made.dtype == nominal:
            return made
        if isinstance(made, Tensor):
            return made._like(dtype=nominal)
        made._dtype = nominal
        return made

    def _made(self, source: Tensor) -> Any:
        """Call `quantize_impl` of a program; the result knows its quantizer and nominal dtype."""
        outer = id(self) not in _THREAD.casting
        _THREAD.casting.add(id(self))
        try:
            made = self.quantize_impl(source)
        finally:
            if outer:
                _THREAD.casting.discard(id(self))
        made = self._taken(made, "quantize_impl")
        if not isinstance(made, Tensor) and made._dtype is None:
            made._dtype = source.dtype
        return made

    def _taken(self, made: Any, method: str) -> Any:
        """Give the result of a program's method its quantizer.

        TypeError where that is no quantized tensor.
        """
        if not hasattr(type(made), "_dequantized"):
            raise TypeError(
                f"{type(self).__name__}.{method}: it returned a {type(made).__name__}, expected a "
                "QuantizedTensor or a QuantizedTensorStorage"
            )
        _ = made._TENSORS  # its attributes now are its fields: what is put on it later is none
        if made._quantizer is None:
            made._quantizer = self.copy()
        return made

    @constant_in_graphs
    def _number(self) -> int:
        """Key of `_quantize_in_graph`."""
        for number, quantizer in _IN_GRAPHS.items():
            if quantizer is self:
                return number
        number = next(_NUMBERS)
        _IN_GRAPHS[number] = self
        return number

    def multi_quantize(self, list_of_tensors: Sequence[Tensor]) -> list:
        """Quantize each of some tensors."""
        if isinstance(list_of_tensors, Tensor):
            raise TypeError(
                f"{type(self).__name__}: list_of_tensors: a tensor, expected a list of tensors"
            )
        return [self.quantize(tensor) for tensor in list_of_tensors]

    # ---- writing into tensors --------------------------------------------------------------------

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Cast into an existing quantized tensor, in all forms that it has; return it.

        How these lie (element type, tiles, transforms) is up to the tensor, not to this quantizer.
        Where the fp32 element of `noop_flag` is not 0 nothing is written. TypeError where `src` is
        no tensor, or `dst` none of this quantizer's format; ValueError where the shapes differ, or
        `noop_flag` is not one fp32 element on the device of `dst`.
        """
        label = type(self).__name__
        source = plain(checked_tensor(f"{label}: src", src))
        if not hasattr(type(dst), "_write_by"):
            raise TypeError(f"{label}: dst: {type(dst).__name__}, expected a quantized tensor")
        if tuple(source.shape) != tuple(dst.shape):
            raise ValueError(
                f"{label}: src: shape {tuple(source.shape)}, expected that of dst, "
                f"{tuple(dst.shape)}"
            )
        checked_dtype(f"{label}: src", source.dtype)
        if noop_flag is not None:
            check_flag(label, noop_flag, dst.device)
        if source.device != dst.device:
            source = source.to(dst.device)
        dst._write_by(self, source, noop_flag)
        return dst

    def _cast_into(self, source: Any, into: Any, noop: Tensor | None) -> None:
        """Write the forms that a storage has, as the class of this quantizer casts."""
        if not self._casts_natively and id(self) not in _THREAD.casting:
            own = self.get_usages()
            self.set_usage(**into.get_usages())
            try:
                made = self._made(source)
            finally:
                self.set_usage(**own)
            into._copy_forms(made, noop)
            return
        if not isinstance(into, getattr(self, "STORAGE", type(into))):
            raise TypeError(
                f"{type(self).__name__}: dst: {type(into).__name__}, expected a "
                f"{self.STORAGE.__name__}"
            )
        self._cast(source, into, noop)

    # ---- its tensors: their parts, shapes, and what may be done ----------------------------------
    #
    # Whoever makes tensors of parts uses both halves:
    # ``tensor_class(**q.alloc_tensors(shape), **q.create_metadata(shape, dtype=dtype))``.

    def inner_tensor_specs(self, shape: Sequence[int]) -> list[InnerTensor]:
        """Parts of a tensor of a shape, in the usages that are set."""
        self._check_declared("inner_tensor_specs(shape)")
        return [
            InnerTensor(name, tuple(part.shape), part.dtype)
            for name, part in self.alloc_tensors(shape, device="meta").items()
        ]

    def alloc_tensors(self, shape: Sequence[int], *, device: Any = None) -> dict[str, Tensor]:
        """Allocate what a tensor of a shape consists of, without values.

        By the arguments of the constructor; `device` is as of `make_empty`.
        """
        self._check_declared("alloc_tensors(shape, *, device=None)")
        shape = checked_shape(type(self).__name__, shape)
        if device is None:
            device = accelerator()
        fields = self._empty(shape, torch.device(device), False)
        for name in self._format_settings(shape):
            del fields[name]
        made = self.STORAGE._as_arguments(fields)
        return {name: part for name, part in made.items() if part is not None}

    def storage_metadata(self, fake_dtype: torch.dtype) -> dict[str, Any]:
        """Arguments of the storage's constructor besides these tensors, for a nominal dtype."""
        self._check_declared("storage_metadata(fake_dtype)")
        return {**self._other_arguments(None), "fake_dtype": fake_dtype}

    def create_metadata(
        self, _shape: Sequence[int], *, dtype: torch.dtype, requires_grad: bool = False
    ) -> dict[str, Any]:
        """Arguments of the constructor of what it makes besides `alloc_tensors`.

        That is a tensor, or with `internal` a storage.
        """
        self._check_declared("create_metadata(shape, *, dtype, requires_grad=False)")
        shape = checked_shape(type(self).__name__, _shape)
        made = self._other_arguments(shape)
        if self.internal:
            return {**made, "fake_dtype": dtype}
        return {**made, "shape": shape, "dtype": dtype, "requires_grad": requires_grad}

    def _check_declared(self, method: str) -> None:
        """NotImplementedError for a class of a program, which does not say what it makes."""
        if not hasattr(self, "STORAGE"):
            raise self._undefined(method)

    def _other_arguments(self, shape: tuple | None) -> dict[str, Any]:
        settings = self.STORAGE._as_arguments(self._format_settings(shape))
        return {**settings, "quantizer": self.copy()}

    def is_quantizable(self, inp: Tensor) -> bool:
        """Return whether the format can hold a tensor."""
        checked_tensor(f"{type(self).__name__}: inp", inp)
        try:
            self._check_shape(tuple(inp.shape))
        except ValueError:
            return False
        return inp.is_floating_point()

    def is_requantization_safe(self) -> bool:
        """Return whether a tensor may be cast again where it is read again.

        That gives the same bits then, and changes no state. Of a cast of a program it is not known.
        """
        return self._REPEATS and self._casts_natively and self._writes_natively

    def supports_only_rowwise_all_gather(self) -> bool:
        """Return whether ranks gather row-wise data alone, and make the column-wise ones of it."""
        return self._GATHERS_ROWS

    def get_columnwise_shape(self, rowwise_data_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the column-wise data of a tensor."""
        return (*rowwise_data_shape[-1:], *rowwise_data_shape[:-1])

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool = False) -> tuple[int, ...]:
        """Shape of the inverse scales of a tensor's row-wise, or column-wise, data."""
        del shape, columnwise
        return (1,)

    # ---- settings --------------------------------------------------------------------------------

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Say which forms to make; None leaves one as it is."""
        if rowwise is not None:
            self.rowwise_usage = bool(rowwise)
        if columnwise is not None:
            self.columnwise_usage = bool(columnwise)

    def _check_usages(self) -> None:
        """Raise a ValueError where it makes no form."""
        if not (self.rowwise_usage or self.columnwise_usage):
            label = type(self).__name__
            raise ValueError(f"{label}: neither usage is set: set_usage(rowwise=True)")

    def get_usages(self) -> dict[str, bool]:
        """Which forms it makes."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> "Quantizer":
        """Copy the settings; tensors of a scaling state are shared."""
        made = copy.copy(self)
        made.__dict__.pop("_of_part", None)
        return made

    def calibrate(self, tensor: Tensor) -> None:
        """Record what a tensor would need, without a cast: nothing, unless the format has state."""
        checked_tensor(f"{type(self).__name__}: tensor", tensor)

    def onnx_quantize(self, tensor: Tensor) -> Any:
        """Quantize in a graph for ONNX: NotImplementedError."""
        raise absent.refusal("pytorch.export.onnx_export", f": {type(self).__name__}.onnx_quantize")

    def onnx_dequantize(self, tensor: Any) -> Tensor:
        """Dequantize in a graph for ONNX: NotImplementedError."""
        raise absent.refusal(
            "pytorch.export.onnx_export", f": {type(self).__name__}.onnx_dequantize"
        )

    def _as_plain(self) -> tuple[Any, dict[str, Any]]:
        """Name of the class, and arguments that are numbers, names and plain tensors.

        Of a class of a program the class itself, and its attributes.
        """
        kind = pickled_class(type(self))
        if kind is type(self):
            return kind, dict(self.__dict__)
        return kind, {**self.get_usages(), **self._own_settings()}

    def _own_settings(self) -> dict[str, Any]:
        """Further arguments, as of `_as_plain`."""
        types = ("fp8_dtype", "fp4_dtype")
        return {n: int(self.dtype) if n in types else getattr(self, n) for n in self._ARGUMENTS}

    @classmethod
    def _of_plain(cls, arguments: dict[str, Any]) -> "Quantizer":
        """Undo `_as_plain`."""
        if pickled_class(cls) is cls:
            made = cls.__new__(cls)
            made.__dict__.update(arguments)
            return made
        return cls(**arguments)

    def _settings(self) -> dict[str, Any]:
        """Text of ``repr``."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def __repr__(self) -> str:
        """Class and settings."""
        settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return f"{type(self).__name__}({settings})"


class CodesQuantizer(Quantizer):
    """Casts to codes of an element type.

    Parameters
    ----------
    fp8_dtype : DType
        Of the codes.
    rowwise, columnwise : bool, default True
        Which forms to make.
    amax_epsilon : float, default 0.0
        Smallest amax, where scales are found in what is cast.
    force_pow_2_scales : bool, default False
        Round such scales down to powers of two.
    """

    _CASTS_COMPUTED = True
    _ARGUMENTS: ClassVar[tuple[str, ...]] = ("fp8_dtype", "amax_epsilon", "force_pow_2_scales")
    _KINDS = FP8

    def __init__(
        self,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        label = type(self).__name__
        self.dtype = fp8_type(f"{label}: fp8_dtype", fp8_dtype, self._KINDS)
        self.amax_epsilon = float(amax_epsilon)
        self.force_pow_2_scales = bool(force_pow_2_scales)
        if not 0.0 <= self.amax_epsilon < math.inf:
            raise ValueError(
                f"{label}: amax_epsilon={amax_epsilon}, expected a finite number from 0 on"
            )

    def _format_settings(self, shape: tuple | None) -> dict[str, Any]:
        del shape
        return {"_fp8_dtype": self.dtype}

    def _settings(self) -> dict[str, Any]:
        return {"dtype": self.dtype.name, **super()._settings()}


class ReducesAmax:
    """The part of quantizers that can take the largest amax of the ranks of a group."""

    with_amax_reduction: bool = False
    amax_reduction_group: Any = None

    def copy(self) -> Any:
        """Copy the settings but for the reduction, which belongs to one call."""
        made = super().copy()
        made.with_amax_reduction, made.amax_reduction_group = False, None
        return made

    def reduce_over(self, group: Any) -> None:
        """Take the largest amax of the ranks of a group at each cast from now on."""
        self.with_amax_reduction, self.amax_reduction_group = True, group

    def __deepcopy__(self, memo: dict) -> Any:
        """Copy all but the group, which is that of the copy too."""
        state = dict(self.__getstate__() or {})
        group = state.pop("amax_reduction_group", None)
        memo[id(self)] = made = type(self).__new__(type(self))
        made.__dict__.update(copy.deepcopy(state, memo), amax_reduction_group=group)
        return made

    def _reduce(self, *partials: Tensor) -> None:
        """Make partial maxima those of all ranks, by one collective, where that is asked for."""
        if self.with_amax_reduction:
            take_largest(partials, self.amax_reduction_group)


def check_caster(label: str, given: Any) -> None:
    """Check the quantizer of a tensor: TypeError for what is none; there may be none."""
    if given is not None and not isinstance(given, Quantizer):
        raise TypeError(f"{label}: quantizer: {type(given).__name__}, expected a Quantizer")


class _Thread(threading.local):
    """Casts of a thread."""

    def __init__(self) -> None:
        self.casting: set[int] = set()
        """Quantizers of programs whose `quantize_impl` it is in, by id: where that calls
        `update_quantized`, it means the cast of the class that it is derived from."""


_THREAD = _Thread()
_IN_GRAPHS: dict[int, Quantizer] = {}
"""Quantizers of compiled graphs, which live as long as the program: a graph carries a number."""
_NUMBERS = itertools.count()


def _quantize_in_graph(tensor: Tensor, number: int, dtype: torch.dtype | None) -> Any:
    """`Quantizer.quantize` as one call of a graph; compilers look inside when they trace it."""
    quantizer = _IN_GRAPHS[number]
    if tensor.requires_grad and torch.is_grad_enabled():
        return _Quantize.apply(tensor, quantizer, dtype)
    return quantizer._quantized(tensor, dtype)


@constant_in_graphs
def _offer_in_graph() -> None:
    torch.compiler.allow_in_graph(_quantize_in_graph)


class _Quantize(torch.autograd.Function):
    """A cast whose gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, quantizer: Quantizer, dtype: Any) -> Any:
        return quantizer._quantized(tensor.detach(), dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad, None, None
