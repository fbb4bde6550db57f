# SPDX-License-Identifier: Apache-2.0
"""NVFP4: four bits a value, an FP8 scale for each 16 values, and one for the tensor."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common import absent
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.execution.random import draw_pair
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.joints import Joint
from transformer_engine.pytorch.tensor.quantizer import ReducesAmax
from transformer_engine.pytorch.tensor.quantizer_arguments import checked_shape
from transformer_engine.pytorch.tensor.two_forms import (
    FORMS,
    TwoFormQuantizer,
    TwoFormStorage,
    TwoFormTensor,
    rows_of_scales,
)

__getattr__, __dir__ = absent.attach(globals())

ERR_MODES = {"MAE": 1, "MSE": 2}
"""How groups choose between 4 and 6: te_four_over_six of the C header."""
_USUAL = {"_row_scaled_nvfp4": False, "_nvfp4_e4m3_max": 448, "_with_random_sign_mask": True}
"""Settings that nobody has to say."""
SIGNED, UNSIGNED = 1, 2
"""How columns are transformed: te_hadamard of the C header."""


class NVFP4TensorStorage(TwoFormStorage):
    """Pairs of E2M1 numbers in bytes, the first in the low half, with scales of two levels.

    Data are [M, roundup(K, 16) / 2], and column-wise [K, roundup(M, 16) / 2]. Their scales (E4M3
    in uint8) are [roundup(M, 128), roundup(ceil(K / 16), 4)], of the column-wise ones with K and M
    swapped; ``amax_rowwise`` and ``amax_columnwise``, fp32 [1], make up the scale of the tensor
    (with ``row_scaled_nvfp4`` the former, [M], that of each row). ``nvfp4_e4m3_max`` is the largest
    scale of a group that there may be, 448 or 256: a value is code * scale * amax / (6 * that).
    With ``with_rht`` the column-wise values are transformed, and negated first unless
    ``with_random_sign_mask`` is False.
    """

    _TENSORS = (*TwoFormStorage._TENSORS, "_amax_rowwise", "_amax_columnwise")
    _FORMS = TwoFormStorage._FORMS[0], (*TwoFormStorage._FORMS[1], "_amax_columnwise")
    _SETTINGS = (
        "_fp8_dtype",
        "_is_2D_scaled",
        "_with_rht",
        "_row_scaled_nvfp4",
        "_nvfp4_e4m3_max",
        "_with_random_sign_mask",
        "_logical_shape",
        "_with_gemm_swizzled_scales",
    )
    _KINDS = (DType.kFloat4E2M1,)
    _GATHERED: ClassVar[dict] = {
        ("rowwise", False): Joint(0, 0, 1, 128, 1),
        ("rowwise", True): Joint(0, 0, 1, 128, 16),
        ("columnwise", False): Joint(1, 1, 16, 4, 16),
        ("columnwise", True): Joint(1, 1, 16, 4, 16),
    }
    _OTHER_NAMES: ClassVar[dict[str, str]] = {"fp4_dtype": "fp8_dtype"}
    _amax_rowwise: Tensor | None
    _amax_columnwise: Tensor | None
    _is_2D_scaled: bool  # squares of 16 x 16 values have one scale
    _with_rht: bool  # the column-wise values are transformed
    _row_scaled_nvfp4: bool  # each row has an amax
    _nvfp4_e4m3_max: int
    _with_random_sign_mask: bool
    _logical_shape: tuple[int, ...]
    _with_gemm_swizzled_scales = rows_of_scales

    @property
    def _fp4_dtype(self) -> DType:
        return self._fp8_dtype

    _MODE = _core.SCALING_NVFP4

    def _code(self) -> int:
        return _core.DTYPE_U8

    def _extent(self) -> tuple[int, ...]:
        return tuple(self._logical_shape)

    def _take(self, fields: dict[str, Any], dtype: torch.dtype) -> None:
        if fields.get("_logical_shape") is None:  # nobody said so: without padding
            fields = {**fields, "_logical_shape": _shape_of_pairs(fields)}
        super()._take(fields, dtype)
        for name, usual in _USUAL.items():
            if getattr(self, name) is None:
                setattr(self, name, usual)
        if self._nvfp4_e4m3_max not in (448, 256):
            raise ValueError(
                f"{type(self).__name__}: nvfp4_e4m3_max={self._nvfp4_e4m3_max!r}, expected 448 or "
                "256"
            )

    def _shares_amax(self) -> bool:
        return getattr(self._quantizer, "with_amax_reduction", False)

    def _scales_to_256(self) -> bool:
        return self._nvfp4_e4m3_max == 256

    def _of_layout(self) -> TwoFormQuantizer:
        return NVFP4Quantizer(self._fp8_dtype)

    @classmethod
    def _of_shape(cls, fields: dict[str, Any], shape: Sequence[int] | None) -> dict[str, Any]:
        return fields if shape is None else {**fields, "_logical_shape": tuple(shape)}

    def _shapes(self, shape: tuple) -> dict[str, tuple[int, ...]]:
        rows = math.prod(shape[:-1]) if self._row_scaled_nvfp4 else 1
        return {**super()._shapes(shape), "_amax_rowwise": (rows,), "_amax_columnwise": (1,)}

    def _decoded(self, dtype: torch.dtype, shape: tuple) -> Tensor:
        if self._rowwise_data is None and self._columnwise_data is not None and self._with_rht:
            raise RuntimeError(
                f"{type(self).__name__}: its column-wise data are of transformed values, and the "
                "row-wise ones were dropped: keep them to read the values"
            )
        return super()._decoded(dtype, shape)

    def _turned(self) -> tuple[Tensor, Tensor] | None:
        """Squares are the same column-wise: their codes change places."""
        if not self._is_2D_scaled:
            return None
        *leading, columns = self._logical_shape
        rows = math.prod(leading)
        down, across = -(-rows // 16), -(-columns // 16)
        pairs = self._rowwise_data.view(rows, across * 8)
        codes = torch.stack((pairs & 15, pairs >> 4), -1).flatten(1)[:, :columns].t().contiguous()
        codes = torch.nn.functional.pad(codes, (0, down * 16 - rows))
        scales = self._rowwise_scale_inv
        turned = scales.new_zeros(-(-columns // 128) * 128, -(-down // 4) * 4)
        found = scales[:rows:16, :across].t().repeat_interleave(16, 0)
        turned[:columns, :down] = found[:columns]
        return codes[:, ::2] | codes[:, 1::2] << 4, turned

    def _make_form(self, form: str) -> None:
        super()._make_form(form)
        if self._amax_columnwise is None:
            self._amax_columnwise = self._amax_rowwise.clone()

    def _viewed_fields(self, view: Any) -> dict[str, Any] | None:
        """Views of all values that keep the last dim: two of its values share a byte."""
        if self._rowwise_data is None:
            return None
        shape = torch.Size(self._logical_shape)
        like = view(torch.empty(shape, device="meta"))
        lines = like.dim() > 0 and like.shape[:-1].numel() == shape[:-1].numel()
        if not lines or like.shape[-1] != shape[-1] or not like.is_contiguous():
            return None
        data = self._rowwise_data.view(*like.shape[:-1], self._rowwise_data.shape[-1])
        return {**self._fields(), "_rowwise_data": data, "_logical_shape": tuple(like.shape)}


def _shape_of_pairs(fields: dict[str, Any]) -> tuple[int, ...]:
    """Shape of a tensor whose data these are, as far as they tell: lines may have padding."""
    row, column = fields.get("_rowwise_data"), fields.get("_columnwise_data")
    lines = (2 * column.shape[-1],) if row is None else row.shape[:-1]
    return (*lines, 2 * row.shape[-1] if column is None else column.shape[0])


class NVFP4Tensor(TwoFormTensor, NVFP4TensorStorage):
    """A tensor in NVFP4; see `NVFP4TensorStorage`."""

    _STORAGE = NVFP4TensorStorage
    _PICKLED = (
        "shape", *FORMS, "amax_rowwise", "amax_columnwise", "fp4_dtype", "dtype", "quantizer",
        "with_gemm_swizzled_scales", "row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max",
    )  # fmt: skip

    @classmethod
    def _with_data(cls, fields: dict, data: Tensor) -> dict:
        length, old = 2 * data.shape[-1], fields["_logical_shape"][-1]
        if length == -(-old // 16) * 16:
            length = old  # lines of the same bytes have the same padding
        shape = (*data.shape[:-1], length)
        return {**super()._with_data(fields, data), "_logical_shape": shape}

    @classmethod
    def _of_pickle(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        arguments.pop("nvfp4_use_4over6", None)  # how groups were cast, not how they are read
        quantizer = arguments.get("quantizer")
        return {
            **arguments,
            "is_2D_scaled": getattr(quantizer, "with_2d_quantization", False),
            "with_rht": getattr(quantizer, "with_rht", False),
            "with_random_sign_mask": getattr(quantizer, "with_random_sign_mask", True),
        }


class NVFP4Quantizer(ReducesAmax, TwoFormQuantizer):
    """Casts to NVFP4.

    Parameters
    ----------
    fp4_dtype, rowwise, columnwise
        As of `CodesQuantizer`; there is one element type.
    with_amax_reduction : bool, default False
        Take the largest amax of the ranks of `amax_reduction_group`.
    amax_reduction_group : ProcessGroup, optional
        All ranks where None.
    with_rht : bool, default False
        Transform groups of 16 values of the column-wise form (random Hadamard transform).
    with_post_rht_amax : bool, default False
        Not read: the amax of the column-wise form is that of what is cast.
    with_2d_quantization : bool, default False
        Squares of 16 x 16 values have one scale.
    stochastic_rounding : bool, default False
        Round up or down by chance, with random numbers from torch's generator.
    row_scaled_nvfp4 : bool, default False
        The row-wise form has an amax for each row; not with `with_2d_quantization`.
    nvfp4_use_4over6 : bool, default False
        The largest magnitude of a group becomes 4 instead of 6 where that loses less; neither with
        `with_rht` nor with `stochastic_rounding`.
    nvfp4_e4m3_max : {448, 256}, default 448
        Largest scale of a group; with 256 there is one for 4 in every group.
    nvfp4_4over6_err_mode : {"MAE", "MSE"}, default "MAE"
        What it loses: the sum of errors, or of their squares.
    with_random_sign_mask : bool, default True
        The transform negates some values first, by the signs of the recipe; False: none.

    Raises
    ------
    ValueError
        Options do not go together, or a value is none of those above.
    """

    TENSOR, STORAGE = NVFP4Tensor, NVFP4TensorStorage
    _ARGUMENTS = (
        "fp4_dtype", "with_rht", "with_post_rht_amax", "with_2d_quantization",
        "stochastic_rounding", "row_scaled_nvfp4", "nvfp4_use_4over6", "nvfp4_e4m3_max",
        "nvfp4_4over6_err_mode", "with_random_sign_mask",
    )  # fmt: skip
    _SCALES = torch.uint8
    _KINDS = NVFP4TensorStorage._KINDS

    def __init__(
        self,
        fp4_dtype: Any = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: Any = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        if with_2d_quantization and (with_rht or row_scaled_nvfp4):
            other = "with_rht" if with_rht else "row_scaled_nvfp4"
            raise ValueError(f"NVFP4Quantizer: {other} and with_2d_quantization: give one of them")
        if nvfp4_use_4over6 and (with_rht or stochastic_rounding):
            other = "with_rht" if with_rht else "stochastic_rounding"
            raise ValueError(f"NVFP4Quantizer: {other} and nvfp4_use_4over6: give one of them")
        if nvfp4_e4m3_max not in (448, 256) or nvfp4_4over6_err_mode not in ERR_MODES:
            raise ValueError(
                f"NVFP4Quantizer: nvfp4_e4m3_max={nvfp4_e4m3_max}, nvfp4_4over6_err_mode="
                f"{nvfp4_4over6_err_mode!r}, expected 448 or 256, 'MAE' or 'MSE'"
            )
        super().__init__(fp4_dtype, rowwise=rowwise, columnwise=columnwise)
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.with_rht = bool(with_rht)
        self.with_post_rht_amax = bool(with_post_rht_amax)
        self.with_2d_quantization = bool(with_2d_quantization)
        self.stochastic_rounding = bool(stochastic_rounding)
        self.row_scaled_nvfp4 = bool(row_scaled_nvfp4)
        self.nvfp4_use_4over6 = bool(nvfp4_use_4over6)
        self.nvfp4_e4m3_max = int(nvfp4_e4m3_max)
        self.nvfp4_4over6_err_mode = nvfp4_4over6_err_mode
        self.with_random_sign_mask = bool(with_random_sign_mask)

    def _rowwise_shape(self, shape: tuple) -> tuple[int, ...]:
        self._check_shape(shape)
        return (*shape[:-1], -(-shape[-1] // 16) * 8)

    def _empty_rows(self, shape: tuple, device: torch.device, pin_memory: bool) -> Tensor:
        options = {"dtype": torch.uint8, "device": device, "pin_memory": pin_memory}
        return torch.empty(self._rowwise_shape(shape), **options)

    def _empty_columns(self, shape: tuple, device: torch.device, pin_memory: bool) -> Tensor:
        options = {"dtype": torch.uint8, "device": device, "pin_memory": pin_memory}
        return torch.empty(self.get_columnwise_shape(shape), **options)

    def convert_shape_for_fp4(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the row-wise bytes of a tensor: two values to a byte, lines of 16 values."""
        return self._rowwise_shape(checked_shape("NVFP4Quantizer", shape))

    def is_requantization_safe(self) -> bool:
        """Return whether a cast again gives the same bits: not where it rounds by chance."""
        return super().is_requantization_safe() and not self.stochastic_rounding

    def get_columnwise_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the column-wise bytes of a tensor; ValueError for one without dims."""
        self._check_shape(tuple(shape))
        return self._rowwise_shape((shape[-1], math.prod(shape[:-1])))

    def _format_settings(self, shape: tuple | None) -> dict[str, Any]:
        return {
            **super()._format_settings(shape),
            "_is_2D_scaled": self.with_2d_quantization,
            "_with_rht": self.with_rht,
            "_row_scaled_nvfp4": self.row_scaled_nvfp4,
            "_nvfp4_e4m3_max": self.nvfp4_e4m3_max,
            "_with_random_sign_mask": self.with_random_sign_mask,
            "_logical_shape": None if shape is None else tuple(shape),
            "_with_gemm_swizzled_scales": False,
        }

    def _empty(self, shape: tuple, device: torch.device, pin_memory: bool) -> dict[str, Any]:
        fields = super()._empty(shape, device, pin_memory)
        options = {"dtype": torch.float32, "device": device, "pin_memory": pin_memory}
        rows = math.prod(shape[:-1]) if self.row_scaled_nvfp4 else 1
        for form, length in (("rowwise", rows), ("columnwise", 1)):
            if f"_{form}_data" in fields:
                fields[f"_amax_{form}"] = torch.empty(length, **options)
        return fields

    def _how(self, source: Tensor, into: Any, amax: Tensor | None) -> dict[str, Any]:
        columns, by_rows = into._columnwise_data is not None, into._row_scaled_nvfp4
        how: dict[str, Any] = {
            "square": into._is_2D_scaled,
            "row_scaled": by_rows,
            "four_over_six": ERR_MODES[self.nvfp4_4over6_err_mode] * self.nvfp4_use_4over6,
            "scales_to_256": into._scales_to_256(),
        }
        measured = []
        if amax is not None:
            how["partials"] = casts.partials_of(amax)
        elif columns or not by_rows:
            how["partials"] = casts.measure(source)
            measured.append(how["partials"])
        if into._with_rht and columns:
            how["hadamard"] = SIGNED if into._with_random_sign_mask else UNSIGNED
            how["column_partials"] = casts.measure(source, how["hadamard"])
            measured.append(how["column_partials"])
        self._reduce(*measured)
        if self.stochastic_rounding:
            how["rng"] = draw_pair(source)
        return how
