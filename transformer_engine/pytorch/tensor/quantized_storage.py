# SPDX-License-Identifier: Apache-2.0
"""Storages: quantized data and how to read them, of which torch knows nothing.

A format names its fields (`_TENSORS`, `_SETTINGS`) and says how they are read; a class of a program
names none: then all attributes are that it has when this library first sees it (`_named`).
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from transformer_engine.pytorch.tensor.quantizer import Quantizer, check_caster, plain
from transformer_engine.pytorch.tensor.quantizer_arguments import checked_dtype
from transformer_engine.pytorch.torchside.modes import is_traced_or_faked, without_memory

NOT_FIELDS = frozenset(
    "_quantizer _dtype _own_fields _viewed _writes _sent _own_rows _is_param "
    "_high_precision_init_val get_high_precision_init_val clear_high_precision_init_val".split()
)
"""Attributes of tensors and storages that say nothing of their data."""
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
"""Settings that are compared of a class that does not name its own."""


def _checked(function: Any) -> Any:
    """A function `dequantize` of a program, whose result is checked.

    TypeError where it is no plain tensor, ValueError where a tensor has another shape than it.
    """

    @functools.wraps(function)
    def dequantize(self: Any, *args: Any, **options: Any) -> Tensor:
        made = function(self, *args, **options)
        label = f"{type(self).__name__}.dequantize: it returned"
        if not isinstance(made, Tensor) or hasattr(type(made), "_dequantized"):
            raise TypeError(f"{label} a {type(made).__name__}, expected a plain tensor")
        if isinstance(self, Tensor) and made.shape != self.shape:
            raise ValueError(f"{label} the shape {tuple(made.shape)}, expected {tuple(self.shape)}")
        return made

    return dequantize


def _read_by(kind: type, function: Any) -> None:
    """Let a class have the values that a function `dequantize` of a program gives."""

    def read(self: Any, dtype: torch.dtype, shape: tuple) -> Tensor:
        del shape
        return function(self, dtype=dtype).to(dtype, copy=True)  # whoever reads may write to it

    kind._dequantized = read
    if kind._decoded is QuantizedTensorStorage._decoded:
        kind._decoded = read


def count_writes(tensors: Sequence[Any]) -> None:
    """Let torch, and tensors themselves, know that native code has written all of their forms."""
    parts = (t for each in tensors for t in (*each.get_data_tensors(), each))
    increment_version([t for t in parts if t is not None and not t.is_inference()])
    for tensor in tensors:
        tensor._written()


class Dequantize(torch.autograd.Function):
    """A reading in high precision whose gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, dtype: torch.dtype) -> Tensor:  # noqa: D102 - torch's
        ctx.dtype = tensor.dtype
        ctx.set_materialize_grads(False)  # a gradient that went to main_grad is none
        return tensor._dequantized(dtype, tuple(tensor.shape))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple:  # noqa: D102 - torch's
        return None if grad is None else grad.to(ctx.dtype), None


class QuantizedTensorStorage:
    """Quantized data and how to read them, of which torch knows nothing."""

    _CAST_APART: ClassVar[bool] = False
    """True where row-wise and column-wise form are casts by themselves."""
    _ONE_SCALE: ClassVar[bool] = False
    """True where all codes of a tensor have one scale."""
    _ARGUMENTS: ClassVar[dict[str, str]] = {}
    """Fields, and the arguments of the constructor that have other names than these have."""
    _FORMS: tuple[tuple[str, ...], ...] = ()
    """Fields of the row-wise and the column-wise form, data first; none where values serve both."""

    _quantizer: Quantizer | None = None
    _dtype: torch.dtype | None = None  # nominal

    def __init_subclass__(cls, **options: Any) -> None:
        """Read the values of a class as it dequantizes, where that is a program's."""
        super().__init_subclass__(**options)
        for said, other in (("_TENSORS", "_SETTINGS"), ("_SETTINGS", "_TENSORS")):
            if said in vars(cls) and isinstance(getattr(cls, other), property):
                setattr(cls, other, ())
        own = vars(cls).get("dequantize")
        if own not in (None, QuantizedTensorStorage.dequantize):
            cls.dequantize = _checked(own)
            _read_by(cls, cls.dequantize)

    @property
    def _TENSORS(self) -> tuple[str, ...]:  # noqa: N802 - classes of this library say it as a constant
        """Fields that are tensors, or None for a form that is not there."""
        return self._named()[0]

    @property
    def _SETTINGS(self) -> tuple[str, ...]:  # noqa: N802
        """Other fields, besides ``_quantizer`` and ``_dtype``."""
        return self._named()[1]

    def _named(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Both, of a class that does not say: its attributes when it is first asked."""
        found = self.__dict__.get("_own_fields")
        if found is None:
            names = [name for name in self.__dict__ if name not in NOT_FIELDS]
            tensors = tuple([n for n in names if isinstance(self.__dict__[n], Tensor)])
            found = tensors, tuple([name for name in names if name not in tensors])
            self.__dict__["_own_fields"] = found
        return found

    @classmethod
    def _made(cls, fields: dict[str, Any], dtype: torch.dtype, shape: Any = None) -> Any:
        """A storage of these fields, whose shape they say; those that are not named are None."""
        del shape
        made = cls.__new__(cls)
        made._take(fields, dtype)
        return made

    def _take(self, fields: dict[str, Any], dtype: torch.dtype) -> None:
        says = not isinstance(type(self)._TENSORS, property)
        names: Any = (*self._TENSORS, *self._SETTINGS, "_quantizer") if says else fields
        for name in names:
            setattr(self, name, fields.get(name))
        self._dtype = dtype
        if not says:
            self._named()  # before a program puts other attributes on it

    def _like(self, fields: dict[str, Any]) -> Any:
        """Another one of this class, over these fields."""
        return type(self)._made(fields, self._dtype)

    @classmethod
    def _as_arguments(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Fields by the arguments of the constructor that take them."""
        return {cls._ARGUMENTS.get(name, name.removeprefix("_")): v for name, v in fields.items()}

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

    def _decoded(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        """The values in high precision, as the format has them."""
        raise NotImplementedError(f"{type(self).__name__}: it defines no dequantize(*, dtype=None)")

    def _dequantized(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        """The values in high precision, as the class dequantizes."""
        return self._decoded(dtype, shape)

    def _extent(self) -> tuple[int, ...]:
        """Shape of what it holds."""
        return tuple(self._dequantized(torch.float32, ()).shape)

    def _default_quantizer(self) -> Quantizer:
        """Quantizer for writes into it, where it has none of its own."""
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
        raise NotImplementedError(
            f"{cls.__name__}.make_like: data: this class has not one format for all its data: "
            "leave data out"
        )

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make a form (True), drop it (False) or leave it (None).

        RuntimeError where one is to be made, and there is nothing that it can be made of. A class
        that has no forms does nothing: its values serve both.
        """
        if not self._FORMS:
            return
        wanted = {"rowwise": rowwise_usage, "columnwise": columnwise_usage}
        for form, there in self.get_usages().items():
            if wanted[form] and not there:
                self._make_form(form)
        for keep, names in zip(wanted.values(), self._FORMS, strict=True):
            for name in names if keep is False else ():
                setattr(self, name, None)

    def _make_form(self, form: str) -> None:
        """Make a form, "rowwise" or "columnwise", of the other one; RuntimeError where none is."""
        raise RuntimeError(
            f"{type(self).__name__}: it has no {form.replace('wise', '-wise')} data, and they can "
            "not be made from the other form: quantize with both usages"
        )

    def get_usages(self) -> dict[str, bool]:
        """Which forms are there, of the values as they are now."""
        if not self._FORMS:
            return {"rowwise": True, "columnwise": True}
        row, column = (getattr(self, names[0]) is not None for names in self._FORMS)
        return {"rowwise": row, "columnwise": column}

    def _viewed_fields(self, view: Any) -> dict[str, Any] | None:
        """Fields of a view, which `view` makes of each tensor of its shape; None: it has none."""
        del view
        return None

    def _turns(self) -> bool:
        """Tell whether its column-wise form is the row-wise one, turned: its codes and scales."""
        return bool(getattr(self, "_is_2D_scaled", False))

    def _is_shard(self) -> bool:
        """Return whether it is a part of a weight that FSDP2 has sharded, and may pad."""
        return False

    def _written(self) -> None:
        """Take note that all forms have been written."""

    def _kind(self) -> tuple:
        """Settings that plans depend on."""
        names = (name for name in self._SETTINGS if name != "_transpose_version")
        values = [getattr(self, name) for name in names]
        if isinstance(type(self)._TENSORS, property):
            values = [value for value in values if isinstance(value, _PLAIN)]
        return tuple(values)

    def _state(self) -> dict[str, Any]:
        """State that `_take_state` takes over, where other tensors take the place of these."""
        return {}

    def _take_state(self, state: dict[str, Any]) -> None:
        """Undo `_state`."""

    def _takes(self, source: Any) -> bool:
        """Return whether `copy_` copies another tensor's quantized data, and casts nothing."""
        del source
        return False

    # ---- taken apart -----------------------------------------------------------------------------

    _FORGOTTEN = ("_quantizer", "_transpose_version")
    """Fields that a pickle has in another form, or not at all."""

    def _flat(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors that are there, by the names of attributes, and what else there is."""
        fields = self._fields()
        tensors = {name: fields.pop(name) for name in self._TENSORS}
        rest = {**fields, **self._state(), "_dtype": self.dtype, "_kind": self._kind()}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}, rest

    @classmethod
    def _of_flat(
        cls, tensors: dict[str, Tensor], rest: dict[str, Any], shape: Any
    ) -> dict[str, Any]:
        """Fields of what `_flat` gave, of a tensor of a shape; `_take_state` takes the rest."""
        del shape
        return {**{n: v for n, v in rest.items() if n not in ("_dtype", "_kind")}, **tensors}

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
        """Arguments of the constructor of this class that make another one over the same data.

        But for the shape and dtype of a tensor.
        """
        return self._as_arguments(self._current_fields())

    def update_quantizer(self, quantizer: Quantizer) -> None:
        """Let new values be cast by another quantizer; TypeError for one of another format."""
        storage = getattr(quantizer, "STORAGE", type(self))
        if not isinstance(quantizer, Quantizer) or not isinstance(self, storage):
            kinds = "a Quantizer" if self._quantizer is None else f"as {self._quantizer!r}"
            raise TypeError(
                f"{type(self).__name__}: quantizer: {type(quantizer).__name__}, expected {kinds}"
            )
        self._quantizer = quantizer

    def view(self, shape: Any, *more: int) -> "QuantizedTensorStorage":
        """Another storage over the same data, of another shape.

        ValueError where the scales would not be those of that shape.
        """
        shape = (shape, *more) if isinstance(shape, int) else tuple(shape)
        fields = self._viewed_fields(lambda data: data.view(shape))
        if fields is None:
            raise ValueError(
                f"{type(self).__name__}: view: shape {shape} of {tuple(self.shape)}: it has no "
                "such view of its data and scales: dequantize().view(shape), and quantize that"
            )
        return self._like(fields)

    def dequantize(self, *, dtype: torch.dtype | None = None) -> Tensor:
        """The values in high precision, in the nominal dtype where `dtype` is None.

        A gradient of a tensor passes unchanged.
        """
        dtype = self.dtype if dtype is None else dtype
        if isinstance(self, Tensor) and self.requires_grad and torch.is_grad_enabled():
            return Dequantize.apply(self, dtype)
        self._settle()
        return self._decoded(dtype, tuple(self.shape))

    def _settle(self) -> None:
        """Cast what waits for that; a storage has no such values."""

    def quantize_(self, tensor: Tensor, *, noop_flag: Tensor | None = None) -> Any:
        """Cast a tensor of the same shape into this one; see `Quantizer.update_quantized`."""
        return self._caster().update_quantized(tensor, self, noop_flag=noop_flag)

    def _caster(self) -> Quantizer:
        return self._default_quantizer() if self._quantizer is None else self._quantizer

    def _write(
        self, source: Tensor, quantizer: Quantizer | None = None, noop: Tensor | None = None
    ) -> None:
        """Write plain values, as a quantizer does, its own one where None."""
        quantizer = quantizer or self._caster()
        if quantizer._writes_natively:
            self._write_by(quantizer, source, noop)
        else:
            quantizer.update_quantized(source, self, noop_flag=noop)
            self._count_write()
        self._changed()

    @classmethod
    def _write_each(cls, pairs: Sequence[tuple[Any, Tensor]], noop: Tensor | None = None) -> None:
        """Write plain values to each of some tensors of this class."""
        for into, source in pairs:
            into._write(source, None, noop)

    def _write_by(self, quantizer: Quantizer, source: Tensor, noop: Tensor | None) -> None:
        """Cast plain values into all forms that are there."""
        quantizer._cast_into(source, self, noop)
        self._count_write()
        self._written()

    def _copy_forms(self, made: Any, noop: Tensor | None) -> None:
        """Copy the forms that are there of another one, where the element of `noop` is 0.

        TypeError for one of another class or with other settings, ValueError where it lacks a form.
        """
        mine, others = self._current_fields(), made._current_fields()
        alike = made._kind() == self._kind() and made.shape == self.shape
        if not (alike and mine.keys() == others.keys()):
            raise TypeError(
                f"{type(self).__name__}: its quantizer makes another kind of tensor, {made!r}: "
                "define update_quantized(src, dst, *, noop_flag=None)"
            )
        with torch.no_grad():
            for name in self._TENSORS:
                if mine[name] is None:
                    setattr(self, name, None)  # it may be of older values
                    continue
                if others[name] is None:
                    raise ValueError(
                        f"{type(self).__name__}: its quantizer makes no {name}: drop that form "
                        "with update_usage(), or set the quantizer's usage"
                    )
                values = others[name]
                if noop is not None:
                    values = torch.where(noop.reshape(()) != 0, mine[name], values)
                mine[name].copy_(values)

    def _count_write(self) -> None:
        """Count a write to the tensors: torch counts none of native code, nor below autograd."""
        if not is_traced_or_faked():
            tensors = self.get_data_tensors()
            increment_version([t for t in tensors if t is not None and not t.is_inference()])

    def _changed(self) -> None:
        """Count a change of a tensor, besides those of its parts."""

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
                    raise ValueError(
                        f"{type(self).__name__}: src lacks a form that this tensor has: give one "
                        "with the same forms"
                    )
                mine.copy_(other)
        self._count_write()
        self._written()

    def __repr__(self) -> str:
        """Settings and values."""
        return self._text({})

    def _shown(self) -> dict[str, Any]:
        """Text before the values."""
        return {}

    def _text(self, more: dict[str, Any]) -> str:
        tensors = [tensor for tensor in self.get_data_tensors() if tensor is not None]
        empty = not tensors or any(tensor.numel() == 0 for tensor in tensors)
        shown: dict[str, Any] = {}
        if empty or type(tensors[0]) is not Tensor or without_memory(tensors[0]):
            shown["shape"] = tuple(self.shape)
        elif any(self.get_usages().values()):
            shown = self._shown()
            shown["data"] = plain(self)
        shown.update(more)
        shown["dtype"] = self.dtype
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in shown.items())})"


class FormatStorage(QuantizedTensorStorage):
    """A storage of a format of this library, which its constructor makes of named arguments.

    Parameters
    ----------
    quantizer : Quantizer, optional
        What new values are cast by; one of the format where None.
    fake_dtype : torch.dtype, default torch.float32
        Nominal dtype.
    arguments
        Those of the format.
    """

    _DEFAULTS: ClassVar[dict[str, Any]] = {}
    """Of arguments; that of the others is None."""

    def __init__(self, *, fake_dtype: torch.dtype = torch.float32, **arguments: Any) -> None:
        checked_dtype(f"{type(self).__name__}: fake_dtype", fake_dtype)
        self._take(self._checked(arguments), fake_dtype)

    @classmethod
    def _checked(cls, arguments: dict[str, Any], shape: tuple | None = None) -> dict[str, Any]:
        """Fields of arguments, of a tensor of a shape where that is known."""
        raise NotImplementedError

    @classmethod
    def _given(cls, arguments: dict[str, Any], *names: str) -> dict[str, Any]:
        """The arguments of these names and the quantizer, all of them; TypeError for any other."""
        unknown = [name for name in arguments if name not in (*names, "quantizer")]
        if unknown:
            raise TypeError(f"{cls.__name__}: unexpected arguments {unknown}")
        check_caster(cls.__name__, arguments.get("quantizer"))
        return {**dict.fromkeys((*names, "quantizer")), **cls._DEFAULTS, **arguments}
