# SPDX-License-Identifier: Apache-2.0
"""What all quantized tensors share: quantizers, storages, and tensors of torch over these.

A format is three small classes: a quantizer, which allocates and casts; a storage, which names its
fields (`_TENSORS`, `_SETTINGS`) and says how they are read; and the two joined, a `torch.Tensor` of
a nominal dtype. What torch does with such tensors is in `quantized_dispatch.py`, for all of them.
"""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from transformer_engine.common import absent
from transformer_engine.pytorch.modes import (
    compilation,
    is_traced_or_faked,
    make_wrapper,
    no_torch_function,
    without_memory,
)
from transformer_engine.pytorch.quantized_dispatch import run as _dispatch
from transformer_engine.pytorch.quantizer import Quantizer, plain
from transformer_engine.pytorch.saved_tensors import (
    prepare_for_saving,
    restore_from_func_ctx,
    restore_from_saved,
)
from transformer_engine.pytorch.tensors import rebuild_quantized

__getattr__, __dir__ = absent.attach(globals())
__all__ = [
    "QuantizedTensor",
    "QuantizedTensorStorage",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_func_ctx",
    "restore_from_saved",
    *absent.names_of(__name__),
]


class _Dequantize(torch.autograd.Function):
    """A reading in high precision whose gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: "QuantizedTensor", dtype: torch.dtype) -> Tensor:
        ctx.dtype = tensor.dtype
        ctx.set_materialize_grads(False)  # a gradient that went to main_grad is none
        return tensor._dequantized(dtype, tuple(tensor.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple:
        return None if grad is None else grad.to(ctx.dtype), None


class QuantizedTensorStorage:
    """Quantized data and how to read them, of which torch knows nothing."""

    _TENSORS: ClassVar[tuple[str, ...]] = ()
    """Fields that are tensors, or None for a form that is not there."""
    _SETTINGS: ClassVar[tuple[str, ...]] = ()
    """Other fields, besides ``_quantizer`` and ``_dtype``."""
    _CAST_APART: ClassVar[bool] = False
    """Whether row-wise and column-wise form are casts by themselves."""

    _quantizer: Quantizer | None
    _dtype: torch.dtype  # nominal

    @classmethod
    def _made(cls, fields: dict[str, Any], dtype: torch.dtype) -> Any:
        """A storage of these fields; those that are not named are None."""
        made = cls.__new__(cls)
        made._take(fields, dtype)
        return made

    def _take(self, fields: dict[str, Any], dtype: torch.dtype) -> None:
        for name in (*self._TENSORS, *self._SETTINGS, "_quantizer"):
            setattr(self, name, fields.get(name))
        self._dtype = dtype

    def _fields(self) -> dict[str, Any]:
        """All fields by name, as `_made` takes them."""
        names = (*self._TENSORS, *self._SETTINGS, "_quantizer")
        return {name: getattr(self, name) for name in names}

    def _current_fields(self) -> dict[str, Any]:
        """The fields for a copy: without forms that are not of the values as they are now."""
        return self._fields()

    def _mapped(self, function: Any) -> dict[str, Any]:
        """The fields, with a function applied to each tensor, once to one that is shared."""
        fields, done = self._current_fields(), {}
        for name in self._TENSORS:
            tensor = fields[name]
            if tensor is not None:
                if id(tensor) not in done:
                    done[id(tensor)] = function(tensor)
                fields[name] = done[id(tensor)]
        return fields

    # ---- what a format says ----------------------------------------------------------------------

    def _dequantized(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        """The values in high precision."""
        raise NotImplementedError

    def _extent(self) -> tuple[int, ...]:
        """Shape of what it holds."""
        raise NotImplementedError

    def _default_quantizer(self) -> Quantizer:
        """What casts into it where it has no quantizer."""
        raise RuntimeError(
            f"{type(self).__name__}: it has no quantizer: give one, "
            "quantizer.update_quantized(src, tensor)"
        )

    @classmethod
    def _of_shape(cls, fields: dict[str, Any], shape: Sequence[int] | None) -> dict[str, Any]:
        """Fields of a tensor of a shape, where that is known, with what does not show in them."""
        del shape
        return fields

    @classmethod
    def _with_data(cls, fields: dict, data: Tensor) -> dict:
        """Fields with other row-wise data, and no others."""
        del fields, data
        raise NotImplementedError(f"{cls.__name__}.make_like: data: it has no one format")

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make a form (True), drop it (False) or leave it (None).

        RuntimeError where one is to be made, and there is nothing that it can be made of.
        """
        raise NotImplementedError

    def get_usages(self) -> dict[str, bool]:
        """Which forms are there."""
        raise NotImplementedError

    def _viewed_fields(self, view: Any) -> dict[str, Any] | None:
        """Fields of a view, which `view` makes of each tensor of its shape; None: it has none."""
        del view
        return None

    def _written(self) -> None:
        """Take note that all forms have been written."""

    def _kind(self) -> tuple:
        """What plans depend on, of the settings."""
        names = (name for name in self._SETTINGS if name != "_transpose_version")
        return tuple([getattr(self, name) for name in names])

    def _state(self) -> dict[str, Any]:
        """What `_take_state` takes over, where other tensors take the place of these."""
        return {}

    def _take_state(self, state: dict[str, Any]) -> None:
        """Undo `_state`."""

    def _takes(self, source: Any) -> bool:
        """Whether `copy_` copies the data of another quantized tensor, and does not cast again."""
        del source
        return False

    # ---- taken apart -----------------------------------------------------------------------------

    _FORGOTTEN = ("_quantizer", "_transpose_version")
    """Fields that a pickle has in another form, or not at all."""

    def _flat(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors that are there, by the names of attributes, and what else there is."""
        fields = self._fields()
        tensors = {name: fields.pop(name) for name in self._TENSORS}
        rest = {**fields, **self._state(), "_dtype": self._dtype, "_kind": self._kind()}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}, rest

    @classmethod
    def _of_flat(cls, tensors: dict[str, Tensor], rest: dict[str, Any]) -> dict[str, Any]:
        """Fields of what `_flat` gave; `_take_state` takes the rest besides."""
        return {**rest, **tensors}

    def _plain_fields(self) -> tuple[dict[str, Any], tuple | None]:
        """For a pickle: plain tensors, numbers and names, and what the quantizer is made of."""
        fields = {n: v for n, v in self._current_fields().items() if n not in self._FORGOTTEN}
        fields = {n: int(v) if isinstance(v, int) else v for n, v in fields.items()}
        return fields, None if self._quantizer is None else self._quantizer._as_plain()

    @classmethod
    def _restored(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields of a pickle as `_made` takes them."""
        return dict(fields)

    # ---- use -------------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """Shape of what it holds."""
        return torch.Size(self._extent())

    def size(self, dim: int | None = None) -> Any:
        """`shape`, or one dim of it."""
        return self.shape if dim is None else self.shape[dim]

    @property
    def dtype(self) -> torch.dtype:
        """Nominal dtype."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the data lie."""
        return next(t for t in self.get_data_tensors() if t is not None).device

    def get_data_tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that it consists of, None for what it lacks."""
        return tuple([getattr(self, name) for name in self._TENSORS])

    def get_metadata(self) -> dict[str, Any]:
        """All fields by name."""
        return self._fields()

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values in high precision, in the nominal dtype where `dtype` is None."""
        return self._dequantized(self._dtype if dtype is None else dtype, tuple(self.shape))

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Any:
        """Cast a tensor of the same shape into this one; see `Quantizer.update_quantized`."""
        return self._caster().update_quantized(tensor, self, noop_flag=noop_flag)

    def _caster(self) -> Quantizer:
        return self._default_quantizer() if self._quantizer is None else self._quantizer

    def _write(
        self, source: Tensor, quantizer: Quantizer | None = None, noop: Tensor | None = None
    ) -> None:
        """Cast plain values into all forms that are there."""
        (quantizer or self._caster())._cast(source, self, noop)
        self._count_write()
        self._written()

    def _count_write(self) -> None:
        """Count a write to the tensors: torch counts none of native code, nor below autograd."""
        if not is_traced_or_faked():
            tensors = self.get_data_tensors()
            increment_version([t for t in tensors if t is not None and not t.is_inference()])

    def prepare_for_saving(self) -> tuple[list[Tensor | None], "QuantizedTensorStorage"]:
        """Take the tensors out, for ``save_for_backward``; `restore_from_saved` puts them back."""
        tensors = list(self.get_data_tensors())
        for name in self._TENSORS:
            setattr(self, name, None)
        return tensors, self

    def restore_from_saved(self, tensors: list[Tensor | None]) -> list[Tensor | None]:
        """Take its tensors from the front of a list; return the others.

        ValueError where there are fewer.
        """
        count = len(self._TENSORS)
        if len(tensors) < count:
            raise ValueError(
                f"{type(self).__name__}.restore_from_saved: {len(tensors)} tensors, expected "
                f"{count}; give all that prepare_for_saving gave, in its order"
            )
        for name, tensor in zip(self._TENSORS, tensors[:count], strict=True):
            setattr(self, name, tensor)
        return tensors[count:]

    def clear(self) -> None:
        """Let the memory go: all tensors become empty."""
        for tensor in self.get_data_tensors():
            if tensor is not None:
                tensor.data = tensor.new_empty(0)

    def copy_from_storage(self, src: "QuantizedTensorStorage") -> None:
        """Copy data and scales of a storage of the same class, in place, in the forms of this one.

        ValueError where the other one lacks a form.
        """
        with torch.no_grad():
            for mine, other in zip(self.get_data_tensors(), src.get_data_tensors(), strict=True):
                if mine is None:
                    continue
                if other is None:
                    raise ValueError(f"{type(self).__name__}: src has other forms than this one")
                mine.copy_(other)
        self._count_write()
        self._written()

    def __repr__(self) -> str:
        """Settings and values."""
        return self._text({})

    def _shown(self) -> dict[str, Any]:
        """What is printed before the values."""
        return {}

    def _text(self, more: dict[str, Any]) -> str:
        tensors = [tensor for tensor in self.get_data_tensors() if tensor is not None]
        empty = not tensors or any(tensor.numel() == 0 for tensor in tensors)
        shown: dict[str, Any] = {}
        if empty or type(tensors[0]) is not Tensor or without_memory(tensors[0]):
            shown["shape"] = tuple(self.shape)
        elif any(self.get_usages().values()):
            shown = self._shown()
            shown["data"] = self._dequantized(self.dtype, tuple(self.shape))
        shown.update(more)
        shown["dtype"] = self.dtype
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in shown.items())})"


class QuantizedTensor(Tensor):
    """A tensor whose values are quantized: a nominal dtype and shape over a storage's fields.

    Subclasses add a storage class. Operators of torch that know nothing of quantized data read the
    values in high precision; those that write make them quantized again (`quantized_dispatch.py`).
    """

    __torch_function__ = no_torch_function
    _TE_QUANTIZED = True
    _viewed: tuple | None = None
    """(tensor that this is a view of, function that makes the view): writing goes there."""
    _writes: list | None = None
    """[number of writes] while a graph is traced, where no version tells; aliases share it."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Give a class the methods by which programs tell quantized tensors, as its own."""
        super().__init_subclass__(**options)
        cls.dequantize = cls.dequantize  # Megatron: "dequantize" in type(tensor).__dict__

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
        return next(f.device for f in map(fields.get, cls._TENSORS) if f is not None)

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

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values in high precision, in the nominal dtype where `dtype` is None.

        A gradient passes unchanged.
        """
        dtype = self.dtype if dtype is None else dtype
        if self.requires_grad and torch.is_grad_enabled():
            return _Dequantize.apply(self, dtype)
        return self._dequantized(dtype, tuple(self.shape))

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
        """Whether the data lie there."""
        return all(tensor.is_shared() for tensor in self.get_data_tensors() if tensor is not None)

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Any:
        """Cast a tensor of the same shape into this one; see `Quantizer.update_quantized`."""
        with torch.no_grad():
            self._caster().update_quantized(tensor.detach(), self, noop_flag=noop_flag)
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the first form that is there: by it programs tell whether two share any.

        To torch.compile, which describes the tensors of the forms besides, it is the wrapper's own.
        """
        if compilation() is not None:
            return super().untyped_storage()
        return next(t for t in self.get_data_tensors() if t is not None).untyped_storage()

    # ---- as a part of a weight that FSDP2 has sharded -----------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], None]:
        """What `torch.distributed.fsdp` gathers of a sharded parameter: values in high precision.

        Parts have scales of their own, and the forward casts the whole weight.
        """
        del mesh, outer_size, outer_stride
        bind = getattr(module, "_bind_shard", None)
        if bind is not None:
            bind(self)
        dtype = mp_policy.param_dtype or self.dtype
        with torch.no_grad():
            return (self._dequantized(dtype, tuple(self.shape)),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole weight, in the memory that was gathered to: `out`, where that is given."""
        del metadata, param_dtype
        (whole,) = all_gather_outputs
        if out is None:
            return whole, (whole,)
        if out.data_ptr() != whole.data_ptr():
            raise RuntimeError("fsdp_post_all_gather: FSDP2 gathered to other memory than before")
        return None

    def _write(
        self, source: Tensor, quantizer: Quantizer | None = None, noop: Tensor | None = None
    ) -> None:
        """Cast plain values into all forms; through a view into what it is a view of.

        That is cast as a whole: its scale is for all of its values.
        """
        if self._viewed is not None:
            whole, view = self._viewed
            values = whole._dequantized(whole.dtype, tuple(whole.shape))
            view(values).copy_(source)
            whole._write(values, None, noop)
        else:
            QuantizedTensorStorage._write(self, source, quantizer, noop)
        self._changed()

    def _take_view(self, other: "QuantizedTensor") -> None:
        """Be a view of what another tensor over the same data is one of."""
        self._viewed = other._viewed
        if is_traced_or_faked():
            self._writes = other._counted_writes()

    def _is_window(self) -> bool:
        """Whether it is a view, in high precision, of a format that has none of its data."""
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
        """Run an operator of torch; see `quantized_dispatch.py`."""
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
        made = cls._made(cls._of_flat(inner, rest), rest["_dtype"], shape, stride=stride)
        made._take_state(rest)
        return made

    def __coerce_same_metadata_as_tangent__(self, known: Any, expected: Any = None) -> Any:
        """Give this gradient to a compiled backward: as that knew it, or in high precision."""
        if expected is not None:
            return plain(self) if expected is Tensor else None
        return self if self.__metadata_guard__(known, self.__tensor_flatten__()[1]) else None

    @classmethod
    def __metadata_guard__(cls, known: dict, now: dict) -> bool:
        """Whether a graph that was made for these settings serves those."""
        one, other = known["_quantizer"], now["_quantizer"]
        return type(one) is type(other) and all(known[n] == now[n] for n in ("_dtype", "_kind"))

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Pickle: a function, and plain tensors, numbers and names for it."""
        del protocol
        fields, recast = self._plain_fields()
        about = (self.requires_grad, getattr(self, "_is_param", False), self._attributes())
        kind = type(self).__name__
        return rebuild_quantized, (kind, tuple(self.shape), self.dtype, fields, recast, about)

    def _attributes(self) -> dict[str, Any]:
        """What programs have put on the tensor."""
        own = {*self._TENSORS, *self._SETTINGS, "_quantizer", "_dtype", "_viewed", "_writes"}
        own |= {"_is_param", "_values", "_seen"}  # the last two are of an IdentityTensor
        own |= {"get_high_precision_init_val", "clear_high_precision_init_val"}
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __deepcopy__(self, memo: dict) -> Any:
        """Copy data and attributes; a parameter stays one."""
        if id(self) in memo:
            return memo[id(self)]
        made = self._like(self._mapped(Tensor.clone), requires_grad=self.requires_grad)
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
            made = self._caster().make_empty(value.shape, dtype=value.dtype, device=value.device)
            made._write(plain(value), self._caster())
            value = made
        Tensor.data.__set__(self, value.detach())
        self._take(value._fields(), value.dtype)
        self._viewed = value._viewed

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Settings and values."""
        del tensor_contents
        return self._text({"requires_grad": True} if self.requires_grad else {})
