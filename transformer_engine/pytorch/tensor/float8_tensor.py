# SPDX-License-Identifier: Apache-2.0
"""FP8 with one scale for the whole tensor: delayed and current scaling."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.casts import code_of
from transformer_engine.pytorch.tensor.quantized_storage import FormatStorage, count_writes
from transformer_engine.pytorch.tensor.quantized_tensor import FormatTensor
from transformer_engine.pytorch.tensor.quantizer import (
    CodesQuantizer,
    Quantizer,
    ReducesAmax,
    plain,
)
from transformer_engine.pytorch.tensor.quantizer_arguments import (
    as_bytes,
    checked_dtype,
    checked_tensor,
    fitted,
    fp8_type,
)
from transformer_engine.pytorch.tensor.versions import Version, is_of, version_of
from transformer_engine.pytorch.torchside.collectives import take_largest
from transformer_engine.pytorch.torchside.modes import dispatch_modes, is_traced_or_faked
from transformer_engine.pytorch.torchside.tensor_kinds import ALIGNMENT


def _scales_of(scale_inv: Tensor) -> Tensor:
    """{1 / scale, scale} of an inverse scale, of any shape of one element."""
    if checked_tensor("fp8_scale_inv", scale_inv).numel() != 1:
        raise ValueError(f"fp8_scale_inv: shape {tuple(scale_inv.shape)}, expected (1,)")
    inverse = scale_inv.detach().to(torch.float32).reshape(1)
    return torch.cat((inverse, inverse.reciprocal()))


class Float8TensorStorage(FormatStorage):
    """FP8 bytes of a matrix, its transpose where that was made, and one scale.

    Parameters
    ----------
    data : Tensor, optional
        uint8, row-wise: [..., columns].
    fp8_scale_inv : Tensor
        fp32 [1]: a value is its code times this.
    fp8_dtype : DType
        Of the codes: ``kFloat8E4M3`` or ``kFloat8E5M2``.
    data_transpose : Tensor, optional
        uint8, column-wise: [columns, ...].
    quantizer, fake_dtype
        As of `FormatStorage`; current scaling casts where there is no quantizer.
    transpose_invalid : bool, optional
        True: `data_transpose` is of other data than these, and is not read; it is made again where
        it is needed. Without `data` it is all there is, and counts.
    """

    _TENSORS = ("_data", "_transpose", "_scales")
    _ONE_SCALE = True
    _SETTINGS = ("_fp8_dtype", "_transpose_version")
    _FORMS = ("_data",), ("_transpose", "_transpose_version")
    _ARGUMENTS: ClassVar[dict[str, str]] = {
        "_transpose": "data_transpose",
        "_scales": "fp8_scale_inv",
    }

    _data: Tensor | None
    _transpose: Tensor | None
    _scales: Tensor  # fp32 {1 / scale, scale}
    _fp8_dtype: DType
    _transpose_version: Version | None
    """The data that the transpose was made of, as they were then."""

    def __init__(self, *, transpose_invalid: bool | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        if transpose_invalid:
            self._transpose_invalid = True

    # ---- fields ----------------------------------------------------------------------------------

    @property
    def _scale_inv(self) -> Tensor | None:
        """Factor of the codes, fp32 [1]."""
        return None if self._scales is None else self._scales[:1]

    @_scale_inv.setter
    def _scale_inv(self, value: Tensor) -> None:
        self._scales = _scales_of(value)

    @property
    def _transpose_invalid(self) -> bool:
        """True where there is no transpose of the data as they are now."""
        if self._transpose is None:
            return True
        return self._data is not None and not is_of(self._transpose_version, self._data)

    @_transpose_invalid.setter
    def _transpose_invalid(self, value: bool) -> None:
        if value and self._data is not None:
            self._transpose = None
        self._transpose_version = None if self._data is None else version_of(self._data)

    @classmethod
    def _checked(cls, arguments: dict[str, Any], shape: tuple | None = None) -> dict[str, Any]:
        given = cls._given(arguments, "data", "fp8_scale_inv", "fp8_dtype", "data_transpose")
        label, data, transpose = cls.__name__, given["data"], given["data_transpose"]
        if given["fp8_scale_inv"] is None:
            raise TypeError(f"{label}: fp8_scale_inv: None, expected a tensor of fp32 [1]")
        if data is None and transpose is None:
            raise ValueError(f"{label}: data and data_transpose are None: give one")
        for name in ("data", "data_transpose"):
            if given[name] is not None:
                given[name] = as_bytes(f"{label}: {name}", given[name])
        if shape is None:
            shape = _turned_back(transpose.shape) if data is None else tuple(data.shape)
        fields = {"_quantizer": given["quantizer"], "_scales": _scales_of(given["fp8_scale_inv"])}
        fields["_fp8_dtype"] = fp8_type(f"{label}: fp8_dtype", given["fp8_dtype"])
        expected = {"data": shape, "data_transpose": (*shape[-1:], *shape[:-1])}
        for name, field in (("data", "_data"), ("data_transpose", "_transpose")):
            if given[name] is not None:
                fields[field] = casts.given(fitted(f"{label}: {name}", given[name], expected[name]))
        if None not in (data, transpose):
            fields["_transpose_version"] = version_of(fields["_data"])
        return fields

    @classmethod
    def _with_data(cls, fields: dict, data: Tensor) -> dict:
        return {**fields, "_data": data, "_transpose": None, "_transpose_version": None}

    @classmethod
    def _as_arguments(cls, fields: dict[str, Any]) -> dict[str, Any]:
        made = super()._as_arguments({n: v for n, v in fields.items() if n != "_transpose_version"})
        if made.get("fp8_scale_inv") is not None:
            made["fp8_scale_inv"] = made["fp8_scale_inv"][:1]
        return made

    def _extent(self) -> tuple[int, ...]:
        if self._data is not None:
            return tuple(self._data.shape)
        return _turned_back(self._transpose.shape)

    # ---- values ----------------------------------------------------------------------------------

    def _decoded(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        if self._data is None and self._transpose is None:
            raise RuntimeError(f"{type(self).__name__}: it has no data: they were dropped")
        data = (self._data, self._scales, self._transpose, self._scales)
        return casts.dequantize(data, self._mode(), self._code(), shape, dtype)

    def _mode(self) -> int:
        return _core.SCALING_TENSOR

    def _code(self) -> int:
        return code_of(self._fp8_dtype)

    def _default_quantizer(self) -> Quantizer:
        return Float8CurrentScalingQuantizer(self._fp8_dtype, self._scales.device)

    def _takes(self, source: Any) -> bool:
        """Return whether bytes of another tensor can be copied: where no scale has to be kept.

        Lines of a sharded weight come from such a weight, all of which has one scale: loaders and
        FSDP2, which pads parts, copy some of them after the other.
        """
        return (
            isinstance(source, Float8TensorStorage)
            and (self._viewed is None or self._is_shard())
            and source._fp8_dtype == self._fp8_dtype
            and None not in (self._data, source._data)
            and self.shape == source.shape
        )

    def copy_from_storage(self, src: "Float8TensorStorage") -> None:
        """Copy data and scale of another one, in place; a transpose that is there follows."""
        with torch.no_grad():
            self._data.copy_(src._data)
            self._scales.copy_(src._scales)
            if self._transpose is not None:
                self._transpose.copy_(casts.transpose(self._data))
        self._count_write()
        self._written()

    def _viewed_fields(self, view: Any) -> dict[str, Any] | None:
        """Views of the row-wise bytes with rows in one piece; the transpose stays behind."""
        if self._data is None:
            return None
        try:
            data = view(self._data)
        except RuntimeError:  # padded rows do not lie as the nominal ones
            return None
        if data.dim() == 0 or data.stride(-1) != 1:
            return None
        cut = data.shape[-1] < self._data.shape[-1]
        if cut and data.dim() > 1 and casts.has_padding(data):  # of values that were cut off
            return None
        return {**self._fields(), "_data": data, "_transpose": None}

    @classmethod
    def _write_each(cls, pairs: Sequence[tuple[Any, Tensor]], noop: Tensor | None = None) -> None:
        """Write plain values to each of some tensors, by amaxes where their casts read these.

        Those of weights that a group of ranks shares take one collective together; a rank without a
        row of such a weight has a part in it.
        """
        groups: dict[tuple, list[tuple[Any, Tensor]]] = {}
        apart = is_traced_or_faked() or dispatch_modes()
        for into, source in pairs:
            caster = into._caster()
            if apart or not by_amax(into, caster):
                into._write(source, None, noop)
                continue
            group = caster.reduces() and (caster.amax_reduction_group,)
            groups.setdefault(group, []).append((into, source))
        for group, members in groups.items():
            joined, parts = casts.measure_each([source for _, source in members])
            if group:
                take_largest([joined], *group)
            for (into, source), partials in zip(members, parts, strict=True):
                into._caster().write_measured(into, source, partials, noop)
            count_writes([into for into, _ in members if into._viewed is None])

    def _written(self) -> None:
        if self._transpose is not None:
            self._transpose_invalid = False

    def _current_fields(self) -> dict[str, Any]:
        """The fields, without a transpose of other data than these: versions are not copied."""
        fields = super()._current_fields()
        if self._data is not None and self._transpose_invalid:
            fields["_transpose"] = fields["_transpose_version"] = None
        return fields

    @classmethod
    def _restored(cls, fields: dict[str, Any]) -> dict[str, Any]:
        return {**fields, "_fp8_dtype": fp8_type("_fp8_dtype", fields["_fp8_dtype"])}

    def _mapped(self, function: Any) -> dict[str, Any]:
        fields = super()._mapped(function)
        if None not in (fields["_data"], fields["_transpose"]):
            fields["_transpose_version"] = version_of(fields["_data"])
        return fields

    def _state(self) -> dict[str, Any]:
        return {"_transpose_version": None if self._transpose_invalid else 0}

    def _take_state(self, state: dict[str, Any]) -> None:
        if self._transpose is not None and state["_transpose_version"] is not None:
            self._transpose_invalid = False

    def _shown(self) -> dict[str, Any]:
        return {"fp8_dtype": self._fp8_dtype.name, "scale_inv": self._scale_inv.tolist()[0]}

    # ---- forms -----------------------------------------------------------------------------------

    def _make_form(self, form: str) -> None:
        """Make the transpose of the row-wise bytes; RuntimeError where these are to be made."""
        if form == "rowwise":
            raise RuntimeError(
                f"{type(self).__name__}: the row-wise data were dropped, and are not made of the "
                "transpose: keep them, update_usage(rowwise_usage=True) before"
            )
        self._create_transpose()

    def get_usages(self) -> dict[str, bool]:
        """Which forms are there, of the values as they are now."""
        return {"rowwise": self._data is not None, "columnwise": not self._transpose_invalid}

    def remove_caches(self) -> None:
        """Drop the transpose, which is made again of the row-wise bytes where there are such."""
        if self._data is not None:
            self.update_usage(columnwise_usage=False)

    def _turns(self) -> bool:
        return True

    def _memory_of_columns(self, fields: dict[str, Any], shape: tuple) -> dict[str, Any]:
        """Fields of the transpose of a tensor of other fields: plans make one of whole lines."""
        data = fields["_data"]
        padded = data.shape[1] % ALIGNMENT != 0
        transpose = casts.empty_columns(shape, data.device) if padded else None
        return {"_transpose": transpose, "_transpose_version": None}

    def _turn(self) -> None:
        """Write the transpose that is there anew."""
        if self._transpose is not None:
            casts.transpose_into(self._data, self._transpose)
            self._transpose_invalid = False

    def _create_transpose(self) -> None:
        """Make the transpose, unless it is there."""
        if not self._transpose_invalid:
            return
        if self._data is None:
            raise RuntimeError(f"{type(self).__name__}: its row-wise data were dropped")
        self._transpose = casts.transpose(self._data)
        self._transpose_invalid = False


def _turned_back(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the tensor of a transpose."""
    return (*shape[1:], *shape[:1])


class Float8Tensor(FormatTensor, Float8TensorStorage):
    """A tensor in FP8 with one scale; see `Float8TensorStorage`."""

    _STORAGE = Float8TensorStorage
    _DEFAULTS: ClassVar[dict[str, Any]] = {"fp8_dtype": DType.kFloat8E4M3}
    _PICKLED = ("data", "fp8_dtype", "fp8_scale_inv", "dtype", "shape", "data_transpose")

    @classmethod
    def make_like(
        cls,
        tensor: Any,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
        data: Tensor | None = None,
        data_transpose: Tensor | None = None,
    ) -> Any:
        """A tensor with the same scale; see `QuantizedTensor.make_like`.

        `data_transpose` are column-wise bytes to use instead, those of `data` where that is given.
        """
        if data_transpose is None:
            options = {"dtype": dtype, "requires_grad": requires_grad, "data": data}
            return super().make_like(tensor, shape=shape, **options)
        if shape is None:
            shape = _turned_back(data_transpose.shape) if data is None else data.shape
        options = {**tensor.get_metadata(), "data_transpose": data_transpose, "data": data}
        dtype = tensor.dtype if dtype is None else dtype
        return cls(shape=shape, dtype=dtype, requires_grad=requires_grad, **options)

    def _zeros(self, rows: int) -> "Float8Tensor":
        """So many lines of zeros, as FSDP2 pads this part of a weight with."""
        data = casts.empty_rows((rows, *self.shape[1:]), self.device).zero_()
        fields = {**self._fields(), "_data": data, "_transpose": None, "_transpose_version": None}
        fields["_scales"] = self._scales.clone()
        made = self._like(fields, shape=data.shape)
        made._own_rows = self.shape[0]
        return made

    def _is_shard(self) -> bool:
        """Return whether it is a part of a weight that ranks share."""
        return getattr(self._quantizer, "with_amax_reduction", False)


class PerTensorQuantizer(ReducesAmax, CodesQuantizer):
    """Casts with one scale."""

    TENSOR, STORAGE = Float8Tensor, Float8TensorStorage
    _GATHERS_ROWS = True
    _known: tuple[Tensor | None] | None = None
    """Partial maxima of what is cast, of all ranks that share it, where somebody has measured them;
    (None,): the scale is not 0, so nobody needs them."""

    def measures(self) -> bool:
        """Return whether a cast reads the amax of what is cast."""
        return True

    def reduces(self) -> bool:
        """Return whether it takes the largest amax of the ranks of a group."""
        return self.measures() and self.with_amax_reduction

    def write_measured(
        self, into: Any, source: Tensor, partials: Tensor, noop: Tensor | None
    ) -> None:
        """Write to a tensor by partial maxima that are known, those of all ranks.

        Of a part that FSDP2 has padded they are those of the padded one, too.
        """
        if is_cast_alone(into, self):
            fields = self.fields_of(into, partials, noop)
            casts.cast(source, into._mode(), into._code(), **fields, noop=noop)
            return
        self._known = (partials,)
        try:
            into._write(source, None, noop)
        finally:
            self._known = None

    def _measured(self, source: Tensor) -> Tensor | None:
        """Partial maxima of what is cast, of all ranks that share it; as of `_known`."""
        if self._known is not None:
            return self._known[0]
        partials = casts.measure(source)
        self._reduce(partials)
        return partials

    def _empty(self, shape: tuple, device: torch.device, pin_memory: bool) -> dict[str, Any]:
        self._check_usages()
        row = column = None
        if self.rowwise_usage:
            row = casts.empty_rows(shape, device, pin_memory)
        if self.columnwise_usage:
            column = casts.empty_columns(shape, device, pin_memory)
        scales = torch.ones(2, dtype=torch.float32, device=device, pin_memory=pin_memory)
        return {"_data": row, "_transpose": column, "_scales": scales, "_fp8_dtype": self.dtype}

    def create_tensor_from_data(
        self,
        data: Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> Any:
        """Take bytes for data that were cast with the scale of this quantizer; `internal`: storage.

        Where scales are found in what is cast it is 1: set the ``_scale_inv`` of what is returned.
        """
        label = f"{type(self).__name__}.create_tensor_from_data"
        fields = {
            "_data": casts.given(as_bytes(f"{label}: data", data)),
            "_scales": _scales_of(self._inverse_scale(data)),
            "_fp8_dtype": self.dtype,
            "_quantizer": self.copy(),
        }
        dtype = checked_dtype(f"{label}: fake_dtype", fake_dtype)
        if internal or self.internal:
            return self.STORAGE._made(fields, dtype)
        return self.TENSOR._made(fields, dtype, None, requires_grad)

    def _inverse_scale(self, data: Tensor) -> Tensor:
        """Factor of the codes of such data."""
        return torch.ones(1, dtype=torch.float32, device=data.device)

    def _partials(self, source: Tensor) -> Tensor | None:
        """Partial maxima by which a tensor is cast."""
        return self._measured(source)

    def _how(self, device: torch.device) -> dict[str, Any]:
        """Fields of a cast that say its scale, besides partial maxima."""
        raise NotImplementedError

    def fields_of(self, into: Any, partials: Tensor | None, noop: Tensor | None) -> dict[str, Any]:
        """Fields of `casts.cast` that cast into all forms of a storage; it is told of the write."""
        if noop is not None and into._transpose_invalid and into._data is not None:
            into._transpose = None  # it may be left as it is, but is of older values
        forms = {"row": into._data, "row_scales": into._scales, "column": into._transpose}
        return {**forms, "partials": partials, **self._how(into._scales.device)}

    def _cast(self, source: Tensor, into: Any, noop: Tensor | None) -> None:
        fields = self.fields_of(into, self._partials(source), noop)
        casts.cast(source, into._mode(), into._code(), **fields, noop=noop)


def is_cast_alone(into: Any, caster: Any) -> bool:
    """Return whether a write to a tensor is one cast of this library, and of no more than it."""
    return into._viewed is None and caster._casts_computed


def by_amax(into: Any, caster: Any) -> bool:
    """Return whether a write to a tensor reads an amax that may be found before."""
    if not isinstance(caster, PerTensorQuantizer):
        return False
    return caster.reduces() or (caster.measures() and is_cast_alone(into, caster))


def _of_slots(name: str) -> property:
    """An attribute that may be a view of a module's slots: read once their scales are made."""

    def read(self: Any) -> Tensor:
        if self._bound is not None:
            self._bound.settle("forward")
        return self.__dict__[name]

    def write(self: Any, value: Tensor) -> None:
        self.__dict__[name] = value

    return property(read, write)


class Float8Quantizer(PerTensorQuantizer):
    """Casts with a scale that somebody else sets: delayed scaling.

    Parameters
    ----------
    scale : Tensor
        fp32 [1]: values are multiplied with it; 0 stands for 1.
    amax : Tensor
        fp32 [1]: each cast raises it to the largest magnitude that it met.
    fp8_dtype, rowwise, columnwise
        As of `CodesQuantizer`.
    measure_first : bool, default False
        Where `scale` is 0 cast with that which fits the tensor, as
        ``DelayedScaling(measure_first=True)`` does; each cast measures then.
    """

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: Any,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        measure_first: bool = False,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.with_amax_reduction, self.amax_reduction_group = False, None
        self._bound: Any = None  # slots of a module, which have the scale and amax
        for name, given in (("scale", scale), ("amax", amax)):
            checked_tensor(f"Float8Quantizer: {name}", given)
        self.scale, self.amax = scale, amax
        self.measure_first = bool(measure_first)

    scale = _of_slots("scale")
    amax = _of_slots("amax")

    def copy(self) -> "Float8Quantizer":
        """Copy the settings; scale and amax are shared."""
        made = super().copy()
        made._bound = self._bound
        return made

    def __getstate__(self) -> dict:
        """Copy and pickle the values of scale and amax, apart from a module's slots."""
        if self._bound is not None:
            self._bound.settle("forward")
        return {**self.__dict__, "_bound": None}

    def _partials(self, source: Tensor) -> Tensor | None:
        # Of scale 0 the scale is that of the partials: 1 of none.
        measured = self.measure_first or self._known is not None
        return self._measured(source) if measured else casts.no_partials(source)

    def _how(self, device: torch.device) -> dict[str, Any]:
        scale, amax = self.scale, self.__dict__["amax"]  # both are made by now
        return {"scale": scale.to(device), "amax": amax if amax.device == device else None}

    def measures(self) -> bool:
        """Return whether a cast reads the amax of what is cast."""
        return self.measure_first

    def calibrate(self, tensor: Tensor) -> None:
        """Set the amax to the largest magnitude of a tensor, 0 of an empty one."""
        with torch.no_grad():
            values = plain(checked_tensor("Float8Quantizer: tensor", tensor)).detach()
            largest = values.abs().max() if values.numel() > 0 else values.new_zeros(())
            self.amax.copy_(largest.reshape(1))

    def _inverse_scale(self, data: Tensor) -> Tensor:
        return torch.where(self.scale == 0, 1.0, self.scale).reciprocal()

    def _own_settings(self) -> dict[str, Any]:
        scaling = {"scale": self.scale.detach().clone(), "amax": self.amax.detach().clone()}
        return {**scaling, "fp8_dtype": int(self.dtype), "measure_first": self.measure_first}


class Float8CurrentScalingQuantizer(PerTensorQuantizer):
    """Casts with the scale that fits the tensor: measured in a pass of its own.

    Parameters
    ----------
    fp8_dtype, rowwise, columnwise, amax_epsilon, force_pow_2_scales
        As of `CodesQuantizer`.
    device : torch.device
        Not read: tensors are made where their values are.
    with_amax_reduction : bool, default False
        Take the largest amax of the ranks of `amax_reduction_group`.
    amax_reduction_group : ProcessGroup, optional
        All ranks where None.
    use_existing_amax, scale, amax
        Not read.
    """

    _REPEATS = True

    def __init__(
        self,
        fp8_dtype: Any,
        device: Any = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        use_existing_amax: bool = False,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        del use_existing_amax, scale, amax
        how = {"amax_epsilon": amax_epsilon, "force_pow_2_scales": force_pow_2_scales}
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise, **how)
        self.device = device
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group

    def _how(self, device: torch.device) -> dict[str, Any]:
        return {"amax_epsilon": self.amax_epsilon, "power_2_scale": self.force_pow_2_scales}
