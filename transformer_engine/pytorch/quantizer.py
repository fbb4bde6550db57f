# SPDX-License-Identifier: Apache-2.0
"""`Quantizer`: what makes quantized tensors of a format, and casts into them."""

import abc
import copy
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.pytorch.modes import constant_in_graphs

__all__ = ["Quantizer", "plain"]


def plain(tensor: Any) -> Tensor:
    """The values of a tensor in high precision; a plain tensor itself."""
    if hasattr(type(tensor), "_dequantized"):
        return tensor._dequantized(tensor.dtype, tuple(tensor.shape))
    return tensor


class Quantizer(abc.ABC):
    """Makes quantized tensors of a format, and casts into them.

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
    _KEEPS_ALL: ClassVar[bool] = False
    """Whether it holds tensors without dims."""

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage = bool(rowwise)
        self.columnwise_usage = bool(columnwise)
        self.internal = False
        self.optimize_for_gemm = False

    # ---- what a format says ----------------------------------------------------------------------

    @abc.abstractmethod
    def _empty(self, shape: tuple, device: torch.device, pin_memory: bool) -> dict[str, Any]:
        """Fields of a storage, without values, for the usages that are set."""

    @abc.abstractmethod
    def _cast(self, source: Tensor, into: Any, noop: Tensor | None) -> None:
        """Write the forms that a storage has; `source` is plain, in any floating dtype."""

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
        for a shape without dims, unless the format keeps high precision, TypeError for a dtype that
        is no floating one.
        """
        if not (tuple(shape) or self._KEEPS_ALL):
            raise ValueError(f"{type(self).__name__}: shape (): expected at least one dim")
        if not dtype.is_floating_point:
            raise TypeError(f"{type(self).__name__}: dtype: {dtype}, expected a floating dtype")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        fields = self._empty(tuple(shape), torch.device(device), pin_memory)
        fields["_quantizer"] = self.copy()
        if self.internal:
            return self.STORAGE._made(fields, dtype)
        return self.TENSOR._made(fields, dtype, tuple(shape), requires_grad)

    def quantize(self, tensor: Tensor, *, out: Any = None, dtype: torch.dtype | None = None) -> Any:
        """Quantize a tensor: into `out` where that is given, else into a new one of nominal dtype.

        `dtype` is that of `tensor` where None. A gradient passes unchanged. TypeError where the
        nominal dtype is no floating one.
        """
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

    def _quantized(self, tensor: Tensor, dtype: torch.dtype | None) -> Any:
        source = plain(tensor)
        kind = tensor.dtype if dtype is None else dtype
        if not kind.is_floating_point:
            raise TypeError(f"{type(self).__name__}: tensor: {kind}, expected a floating dtype")
        made = self.make_empty(source.shape, dtype=kind, device=source.device)
        self._cast(source, made, None)
        made._written()
        return made

    @constant_in_graphs
    def _number(self) -> int:
        """What `_quantize_in_graph` knows it by."""
        for number, quantizer in _IN_GRAPHS.items():
            if quantizer is self:
                return number
        number = next(_NUMBERS)
        _IN_GRAPHS[number] = self
        return number

    def multi_quantize(self, tensors: Iterable[Tensor]) -> list:
        """Quantize each of some tensors."""
        return [self.quantize(tensor) for tensor in tensors]

    def update_quantized(self, src: Tensor, dst: Any, *, noop_flag: Tensor | None = None) -> Any:
        """Cast into an existing quantized tensor, in all forms that it has; return it.

        How these lie (element type, tiles, transforms) is up to the tensor, not to this quantizer.
        Where the fp32 element of `noop_flag` is not 0 nothing is written. ValueError where the
        shapes differ, or `noop_flag` is not one fp32 element on the device of `dst`.
        """
        source = plain(src)
        if tuple(source.shape) != tuple(dst.shape):
            raise ValueError(
                f"{type(self).__name__}: src: shape {tuple(source.shape)}, expected that of dst, "
                f"{tuple(dst.shape)}"
            )
        if noop_flag is not None:
            self._check_flag(noop_flag, dst.device)
        if source.device != dst.device:
            source = source.to(dst.device)
        dst._write(source, self, noop_flag)
        return dst

    def _check_flag(self, flag: Tensor, device: torch.device) -> None:
        if (flag.numel(), flag.dtype, flag.device) != (1, torch.float32, device):
            raise ValueError(
                f"{type(self).__name__}: noop_flag: {tuple(flag.shape)}, {flag.dtype}, "
                f"{flag.device}, expected one element, torch.float32, {device}"
            )

    # ---- settings --------------------------------------------------------------------------------

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Say which forms to make; None leaves one as it is."""
        if rowwise is not None:
            self.rowwise_usage = bool(rowwise)
        if columnwise is not None:
            self.columnwise_usage = bool(columnwise)

    def get_usages(self) -> dict[str, bool]:
        """Which forms it makes."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def copy(self) -> "Quantizer":
        """Copy the settings; tensors of a scaling state are shared."""
        return copy.copy(self)

    def calibrate(self, tensor: Tensor) -> None:
        """Record what a tensor would need, without a cast: nothing, unless the format has state."""
        del tensor

    def is_quantizable(self, inp: Tensor) -> bool:
        """Whether the format can hold a tensor."""
        return inp.is_floating_point()

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the column-wise data of a tensor."""
        return (*shape[-1:], *shape[:-1])

    def get_scale_shape(self, shape: Sequence[int], columnwise: bool = False) -> tuple[int, ...]:
        """Shape of the inverse scales of a tensor's row-wise, or column-wise, data."""
        del shape, columnwise
        return (1,)

    def onnx_quantize(self, tensor: Tensor) -> Any:
        """Quantize in a graph for ONNX: NotImplementedError."""
        raise absent.refusal("pytorch.export.onnx_export", f": {type(self).__name__}.onnx_quantize")

    def onnx_dequantize(self, tensor: Any) -> Tensor:
        """Dequantize in a graph for ONNX: NotImplementedError."""
        raise absent.refusal(
            "pytorch.export.onnx_export", f": {type(self).__name__}.onnx_dequantize"
        )

    def _as_plain(self) -> tuple[str, dict[str, Any]]:
        """Name of the class, and arguments that are numbers, names and plain tensors."""
        return type(self).__name__, {**self.get_usages(), **self._own_settings()}

    def _own_settings(self) -> dict[str, Any]:
        """Further arguments, as of `_as_plain`."""
        return {}

    @classmethod
    def _of_plain(cls, arguments: dict[str, Any]) -> "Quantizer":
        """Undo `_as_plain`."""
        return cls(**arguments)

    def _settings(self) -> dict[str, Any]:
        """What to print."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def __repr__(self) -> str:
        """Class and settings."""
        settings = ", ".join(f"{name}={value}" for name, value in self._settings().items())
        return f"{type(self).__name__}({settings})"


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
