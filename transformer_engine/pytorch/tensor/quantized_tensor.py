# SPDX-License-Identifier: Apache-2.0
"""Bases of quantized tensors: quantizers, storages, and tensors of torch over these.

A format is three small classes: a quantizer, which allocates and casts; a storage, which names its
fields (`_TENSORS`, `_SETTINGS`) and says how they are read; and the two joined, a `torch.Tensor` of
a nominal dtype. What torch does with such tensors is in `dispatch.py`, for all of them.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from transformer_engine.common import absent
from transformer_engine.pytorch.tensor import parts
from transformer_engine.pytorch.tensor.dispatch import run as _dispatch
from transformer_engine.pytorch.tensor.pickling import pickled_class, rebuild_quantized
from transformer_engine.pytorch.tensor.quantized_storage import (
    NOT_FIELDS,
    Dequantize,
    QuantizedTensorStorage,
)
from transformer_engine.pytorch.tensor.quantizer import (
    InnerTensor as InnerTensor,
    Quantizer as Quantizer,
    plain,
)
from transformer_engine.pytorch.tensor.quantizer_arguments import (
    checked_dtype,
    checked_tensor,
    positional,
)
from transformer_engine.pytorch.tensor.saved_tensors import (
    prepare_for_saving as prepare_for_saving,
    restore_from_func_ctx as restore_from_func_ctx,
    restore_from_saved as restore_from_saved,
)
from transformer_engine.pytorch.tensor.sharded import BeforeGather, Sent, after_gather
from transformer_engine.pytorch.torchside.modes import (
    compilation,
    is_traced_or_faked,
    make_wrapper,
    no_torch_function,
)

__getattr__, __dir__ = absent.attach(globals())


def _with_gradient(function: Any) -> Any:
    """A `dequantize` of a program through which a gradient passes unchanged."""

    @functools.wraps(function)
    def dequantize(self: Any, *, dtype: torch.dtype | None = None) -> Tensor:
        if self.requires_grad and torch.is_grad_enabled():
            return Dequantize.apply(self, self.dtype if dtype is None else dtype)
        return function(self, dtype=dtype)

    return dequantize


class QuantizedTensor(Tensor, QuantizedTensorStorage):
    """A tensor whose values are quantized: a nominal dtype and shape over a storage's fields.

    Formats add a storage class. Operators of torch that know nothing of quantized data read the
    values in high precision; those that write make them quantized again (`dispatch.py`).

    A class of a program defines `dequantize`, and makes its instances by this constructor. The
    attributes that these have then are copied, moved and saved with them.

    Parameters
    ----------
    shape : sequence of int
    dtype : torch.dtype
        Nominal one.
    requires_grad : bool, default False
        Whether autograd records it.
    device : torch.device, optional
        Where its data lie; the CPU where None.
    """

    __torch_function__ = no_torch_function
    _TE_QUANTIZED = True
    _PICKLED: ClassVar[tuple[str, ...]] = ()
    """Arguments, in the order in which files of the incumbent give them."""
    _viewed: tuple | None = None
    """(tensor that this is a view of, function that makes the view): writing goes there."""
    _writes: list | None = None
    """[number of writes] while a graph is traced, where no version tells; aliases share it."""
    _sent: Sent | None = None
    """What FSDP2 gathered of this part of a weight."""
    _own_rows: int | None = None
    """Of a part of a weight that FSDP2 has padded: rows that are no padding."""

    @staticmethod
    def _joined_fields(parts: Any) -> dict[str, Any] | None:
        """Fields of matrices of this format put row after row; None where it has none of such."""
        del parts
        return None

    def __init_subclass__(cls, **options: Any) -> None:
        """Give a class the methods by which programs tell quantized tensors, as its own."""
        super().__init_subclass__(**options)
        own = cls.dequantize  # Megatron: "dequantize" in type(tensor).__dict__
        known = own is QuantizedTensorStorage.dequantize
        cls.dequantize = own if known else _with_gradient(own)

    def __new__(  # noqa: D102 - the class's
        cls,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        requires_grad: bool = False,
        device: Any = None,
    ) -> Any:
        shape, dtype = positional(cls.__name__, (shape, dtype), None, dtype)
        options = {"dtype": dtype, "device": device, "requires_grad": requires_grad}
        return make_wrapper(cls, shape, layout=torch.strided, **options)

    def __init__(self, *args: Any, **options: Any) -> None:
        pass  # `__new__` has taken all

    @classmethod
    def _made(
        cls,
        fields: dict[str, Any],
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
        requires_grad: bool = False,
        stride: Sequence[int] | None = None,
    ) -> Any:
        """A tensor of these fields."""
        if shape is None:
            probe = cls._STORAGE._made(fields, dtype)
            shape = probe._extent()
        made = make_wrapper(
            cls,
            tuple(shape),
            strides=None if stride is None else tuple(stride),
            dtype=dtype,
            layout=torch.strided,
            device=cls._device_of(fields),
            requires_grad=requires_grad,
        )
        made._take(fields, dtype)
        return made

    @classmethod
    def _device_of(cls, fields: dict[str, Any]) -> torch.device:
        """Where the data of fields lie."""
        data = (Tensor, QuantizedTensorStorage)
        return next(f.device for f in fields.values() if isinstance(f, data))

    def _like(self, fields: dict[str, Any] | None = None, **changes: Any) -> Any:
        """A tensor of this class over fields, these ones where None; no gradient is wanted."""
        fields = self._fields() if fields is None else fields
        dtype = changes.pop("dtype", self.dtype)
        return type(self)._made(fields, dtype, changes.pop("shape", self.shape), **changes)

    @classmethod
    def make_like(
        cls,
        tensor: "QuantizedTensor",
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        data: Any = None,
    ) -> Any:
        """A tensor over the same data, of another nominal dtype or with other row-wise data.

        `data` are row-wise bytes to use instead, of shape `shape`; that of what they hold where it
        is None. NotImplementedError for a format whose forms have formats of their own.
        """
        fields = tensor._fields()
        if data is not None:
            fields = cls._with_data(fields, data)
        elif shape is None:
            shape = tensor.shape
        fields = cls._of_shape(fields, shape)
        return cls._made(fields, tensor.dtype if dtype is None else dtype, shape, requires_grad)

    # ---- values ----------------------------------------------------------------------------------

    dequantize = QuantizedTensorStorage.dequantize

    def to_dtype(self, dtype: torch.dtype) -> Any:
        """A tensor over the same data, of another nominal dtype."""
        dtype = checked_dtype(f"{type(self).__name__}.to_dtype", dtype)
        return type(self).make_like(self, dtype=dtype)

    @property
    def amax_reduction_group(self) -> Any:
        """The group over which its quantizer takes the largest amax; None: it was given none."""
        return getattr(self._quantizer, "amax_reduction_group", None)

    def float(self) -> Tensor:
        """The values in fp32."""
        return self.dequantize(dtype=torch.float32)

    def bfloat16(self) -> Tensor:
        """The values in bf16."""
        return self.dequantize(dtype=torch.bfloat16)

    def half(self) -> Tensor:
        """The values in fp16."""
        return self.dequantize(dtype=torch.float16)

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> Any:
        """Copy to the CPU, quantized."""
        del memory_format
        return self.to("cpu")

    def share_memory_(self) -> Any:
        """Move the data to memory that processes share."""
        for tensor in self.get_data_tensors():
            if tensor is not None:
                tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether the data lie there."""
        return all(tensor.is_shared() for tensor in self.get_data_tensors() if tensor is not None)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Any:
        """Cast a tensor of the same shape into this one; see `Quantizer.update_quantized`."""
        checked_tensor(f"{type(self).__name__}.quantize_: tensor", tensor)
        with torch.no_grad():
            self._caster().update_quantized(plain(tensor).detach(), self, noop_flag=noop_flag)
        self._changed()
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the first form that is there: by it programs tell whether two share any.

        To torch.compile, which describes the tensors of the forms besides, it is the wrapper's own.
        """
        if compilation() is not None:
            return super().untyped_storage()
        return next(t for t in self.get_data_tensors() if t is not None).untyped_storage()

    # ---- as a part of a weight that FSDP2 has sharded -----------------------------------------

    fsdp_pre_all_gather = BeforeGather()

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight, over the memory that was gathered to; `out`, where given, becomes that.

        With it the tensors, besides those, that FSDP2 is to free, and to allocate before the next
        call.
        """
        return after_gather(all_gather_outputs, metadata, param_dtype, out)

    def _write_by(self, quantizer: Quantizer, source: Tensor, noop: Tensor | None) -> None:
        """Cast plain values into all forms; through a view into what it is a view of.

        That is cast as a whole, by its own quantizer: its scale is for all of its values.
        """
        if self._viewed is None:
            QuantizedTensorStorage._write_by(self, quantizer, source, noop)
        else:
            parts.write(self, source, noop)

    def _written(self) -> None:
        parts.forget(self)
        super()._written()

    def _settle(self) -> None:
        parts.settle(self)

    def _dequantized(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        self._settle()
        return super()._dequantized(dtype, shape)

    def _mapped(self, function: Any) -> dict[str, Any]:
        self._settle()
        return super()._mapped(function)

    def _plain_fields(self) -> tuple[dict[str, Any], tuple | None]:
        self._settle()
        return super()._plain_fields()

    def _take_view(self, other: "QuantizedTensor") -> None:
        """Be a view of what another tensor over the same data is one of."""
        self._viewed = other._viewed
        if is_traced_or_faked():
            self._writes = other._counted_writes()

    def _is_window(self) -> bool:
        """Return whether it is a view, in high precision, of a format that has none of its data."""
        return False

    def _changed(self) -> None:
        """Count a change, which torch does for the arguments of an operator, but not for lists."""
        if is_traced_or_faked():
            self._counted_writes()[0] += 1
        elif not self.is_inference():
            increment_version(self)

    def _counted_writes(self) -> list:
        if self._writes is None:
            self._writes = [0]
        return self._writes

    # ---- torch -----------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Run an operator of torch; see `dispatch.py`."""
        return _dispatch(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], dict]:
        """Names of the tensors that it consists of, and what else there is: for compilers."""
        tensors, rest = self._flat()
        return list(tensors), rest

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], rest: dict, shape: Any, stride: Any
    ) -> Any:
        """Undo `__tensor_flatten__`."""
        made = cls._made(cls._of_flat(inner, rest, shape), rest["_dtype"], shape, stride=stride)
        made._take_state(rest)
        return made

    def __coerce_same_metadata_as_tangent__(self, known: Any, expected: Any = None) -> Any:
        """Give this gradient to a compiled backward: as that knew it, or in high precision."""
        if expected is not None:
            return plain(self) if expected is Tensor else None
        return self if self.__metadata_guard__(known, self.__tensor_flatten__()[1]) else None

    @classmethod
    def __metadata_guard__(cls, known: dict, now: dict) -> bool:
        """Return whether a graph that was made for these settings serves those."""
        one, other = known["_quantizer"], now["_quantizer"]
        return type(one) is type(other) and all(known[n] == now[n] for n in ("_dtype", "_kind"))

    @classmethod
    def _make_in_reduce_ex(cls, *given: Any) -> Any:
        """A tensor of what a file of the incumbent holds; ValueError for another quantizer."""
        arguments = dict(zip(cls._PICKLED[: len(given)], given, strict=True))
        quantizer = arguments.get("quantizer")
        if quantizer is not None and not isinstance(quantizer, Quantizer):
            kind = type(quantizer).__name__
            raise ValueError(f"a pickled {cls.__name__}: quantizer: {kind}, expected a Quantizer")
        return cls(**cls._of_pickle(arguments))

    @classmethod
    def _of_pickle(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the constructor for those of such a file."""
        return arguments

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickle: a function, and plain tensors, numbers and names for it."""
        del protocol
        fields, recast = self._plain_fields()
        about = (self.requires_grad, getattr(self, "_is_param", False), self._attributes())
        kind = pickled_class(type(self))
        return rebuild_quantized, (kind, tuple(self.shape), self.dtype, fields, recast, about)

    def _attributes(self) -> dict[str, Any]:
        """Attributes that programs have put on the tensor."""
        own = {*self._TENSORS, *self._SETTINGS, *NOT_FIELDS} - {"_high_precision_init_val"}
        own |= {"_values", "_seen"}  # of an IdentityTensor
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __deepcopy__(self, memo: dict) -> Any:
        """Copy data and attributes; a parameter stays one."""
        if id(self) in memo:
            return memo[id(self)]
        fields = self._mapped(Tensor.clone)
        if isinstance(type(self)._TENSORS, property):
            fields.update(copy.deepcopy({name: fields[name] for name in self._SETTINGS}, memo))
        made = self._like(fields, requires_grad=self.requires_grad)
        memo[id(self)] = made
        if self._quantizer is not None:
            made._quantizer = copy.deepcopy(self._quantizer, memo)
        made.__dict__.update(copy.deepcopy(self._attributes(), memo))
        if getattr(self, "_is_param", False):
            made._is_param = True
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    @property
    def data(self) -> Any:
        """The tensor without its graph, over the same memory; it can be assigned."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, type(self)):
            caster = self._caster()
            made = caster.make_empty(value.shape, dtype=value.dtype, device=value.device)
            made = caster._taken(made, "make_empty")
            made._write(plain(value), caster)
            value = made
        Tensor.data.__set__(self, value.detach())
        self._take(value._fields(), value.dtype)
        self._viewed = value._viewed

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Settings and values."""
        del tensor_contents
        return self._text({"requires_grad": True} if self.requires_grad else {})


class FormatTensor(QuantizedTensor):
    """A tensor of a format of this library: its class is made of this one and of the storage's.

    The arguments are as of `QuantizedTensor`, and of the storage but for ``fake_dtype``; where
    `shape` is None it is that of the data.
    """

    def __new__(  # noqa: D102 - the class's
        cls,
        *args: Any,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        **arguments: Any,
    ) -> Any:
        shape, dtype = positional(cls.__name__, args, shape, dtype)
        return cls._made(cls._checked(arguments, shape), dtype, shape, requires_grad)
