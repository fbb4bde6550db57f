# SPDX-License-Identifier: Apache-2.0
"""NVFP4 by its definition in PyTorch, whose forms are plain tensors to read and compare.

A cast has the bits of the CPU backend on every device, and runs no kernel of it. Random numbers of
stochastic rounding are not among the options.
"""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.recipe import QuantizerRole
from transformer_engine.plugin.definitions.codes import decode_e2m1, encode, encode_e2m1
from transformer_engine.plugin.definitions.microscales import nvfp4, transformed
from transformer_engine.plugin.definitions.scales import largest, numbers
from transformer_engine.pytorch.custom_recipes.quantizer_factories import tensor_of
from transformer_engine.pytorch.custom_recipes.reference_utils import (
    Fp4Formats,
    ReferenceQuantizer,
    ReferenceTensor,
    high_precision_gemm_ref as high_precision_gemm_ref,
    roundup_div as roundup_div,
)
from transformer_engine.pytorch.tensor.nvfp4_tensor import (
    ERR_MODES,
    SIGNED,
    UNSIGNED,
    NVFP4Quantizer,
)

_GROUP = 16
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def cast_to_fp4x2(x: Tensor) -> Tensor:
    """Numbers [..., n] as E2M1, to nearest even, two in a byte [..., n / 2]: the first is low."""
    codes = encode_e2m1(x.detach().float())
    return codes[..., 0::2] | codes[..., 1::2] << 4


def cast_from_fp4x2(x: Tensor, dq_dtype: torch.dtype) -> Tensor:
    """Undo `cast_to_fp4x2`: numbers of a dtype."""
    return decode_e2m1(torch.stack((x & 15, x >> 4), -1).flatten(-2)).to(dq_dtype)


def cast_to_e8(decode_scale: Tensor) -> Tensor:
    """Positive scales as E8M0, rounded up: uint8 exponents with the bias 127."""
    mantissa, exponent = torch.frexp(decode_scale.float())
    biased = torch.where(mantissa == 0.5, exponent - 1, exponent) + 127
    return biased.clamp(0, 254).to(torch.uint8)


def cast_to_e4m3(decode_scale: Tensor, global_amax: Tensor) -> Tensor:
    """The product as E4M3, which saturates."""
    product = (decode_scale * global_amax).float()
    return encode(product, torch.float8_e4m3fn).view(torch.float8_e4m3fn)


def get_wgrad_sign_vector() -> Tensor:
    """The signs of the random Hadamard transform: fp32 [16]."""
    return torch.tensor(_SIGNS, dtype=torch.float32)


class NVFP4TensorRef(ReferenceTensor):
    """Codes and scales of groups of 16, by rows and of the transpose, and an amax of each form.

    `data` is uint8 [rows, columns / 2] (columns are filled up to 16), `scale` E4M3 [rows, groups],
    `global_amax_row` fp32 [1], or [rows] of a tensor with an amax for each row. A value is its code
    times the scale of its group times amax / (6 * `nvfp4_e4m3_max`).
    """

    _TENSORS = (*ReferenceTensor._TENSORS, "global_amax_row", "global_amax_col")
    _SETTINGS = (
        *ReferenceTensor._SETTINGS,
        "nvfp4_use_4over6",
        "nvfp4_e4m3_max",
        "_with_rht",
    )

    global_amax_row: Tensor | None
    global_amax_col: Tensor | None
    nvfp4_use_4over6: bool
    nvfp4_e4m3_max: int

    def __init__(
        self,
        data: Tensor | None = None,
        scale: Tensor | None = None,
        data_t: Tensor | None = None,
        scale_t: Tensor | None = None,
        global_amax_row: Tensor | None = None,
        global_amax_col: Tensor | None = None,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        dtype: torch.dtype | None = None,
        device: Any = None,
        quant_dtype: Any = None,
        original_shape: tuple[int, ...] | None = None,
        _quantizer: Any = None,
    ) -> None:
        del device  # that of the data
        given = {"data": data, "scale": scale, "data_t": data_t, "scale_t": scale_t}
        given |= {"global_amax_row": global_amax_row, "global_amax_col": global_amax_col}
        given |= {"nvfp4_use_4over6": nvfp4_use_4over6, "nvfp4_e4m3_max": nvfp4_e4m3_max}
        given |= {"quant_dtype": quant_dtype, "original_shape": original_shape}
        super().__init__({**given, "_quantizer": _quantizer}, dtype)

    def _values(self, transposed: bool) -> Tensor:
        columns = self.original_shape[-1]
        if not transposed:
            return self._decoded_form(self.data, self.scale, False)[:, :columns]
        rows = torch.Size(self.original_shape[:-1]).numel()
        return self._decoded_form(self.data_t, self.scale_t, True)[:, :rows]

    def _decoded_form(self, data: Tensor, scale: Tensor, column: bool) -> Tensor:
        """Codes times the scales of their groups times the unit of a form, in fp32."""
        amax = self.global_amax_col if column else self.global_amax_row
        values = cast_from_fp4x2(data, torch.float32) * numbers(scale).repeat_interleave(_GROUP, 1)
        # By a number of Python a GPU would multiply with its reciprocal.
        return values * (amax / amax.new_tensor(6.0 * self.nvfp4_e4m3_max)).reshape(-1, 1)


class NVFP4QuantizerRef(ReferenceQuantizer):
    """Casts to NVFP4; the options are those of `NVFP4Quantizer`.

    Parameters
    ----------
    dtype : Fp4Formats
        ``Fp4Formats.E2M1``.
    rowwise, columnwise : bool, default True
        Which forms to make.
    quant_tile_shape : {(1, 16), (16, 16)}
        Values that have one scale.
    pow_2_scales, eps, nvfp4_4over6_err_use_fast_math
        NotImplementedError for anything but the defaults.
    row_scaled_nvfp4, nvfp4_use_4over6, nvfp4_e4m3_max, nvfp4_4over6_err_mode, with_rht, \
with_random_sign_mask
        As of `NVFP4Quantizer`.
    """

    STORAGE = NVFP4TensorRef
    supports_dequantize = True
    is_data_t_transposed_in_memory = True

    def __init__(
        self,
        dtype: Fp4Formats,
        rowwise: bool = True,
        columnwise: bool = True,
        pow_2_scales: bool = False,
        eps: float = 0.0,
        quant_tile_shape: tuple[int, int] = (1, 16),
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        nvfp4_4over6_err_use_fast_math: bool = False,
        with_rht: bool = False,
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise, columnwise)
        refused = {"pow_2_scales": pow_2_scales, "eps": eps}
        refused["nvfp4_4over6_err_use_fast_math"] = nvfp4_4over6_err_use_fast_math
        for name, value in refused.items():
            if value:
                raise NotImplementedError(f"NVFP4QuantizerRef: {name}={value!r} is not built")
        if tuple(quant_tile_shape) not in ((1, _GROUP), (_GROUP, _GROUP)):
            raise ValueError(
                f"NVFP4QuantizerRef: quant_tile_shape={quant_tile_shape}, expected (1, 16) or "
                "(16, 16)"
            )
        self.dtype, self.quant_tile_shape = dtype, tuple(quant_tile_shape)
        self._caster = NVFP4Quantizer(
            with_rht=with_rht,
            with_2d_quantization=quant_tile_shape[0] == _GROUP,
            row_scaled_nvfp4=row_scaled_nvfp4,
            nvfp4_use_4over6=nvfp4_use_4over6,
            nvfp4_e4m3_max=nvfp4_e4m3_max,
            nvfp4_4over6_err_mode=nvfp4_4over6_err_mode,
            with_random_sign_mask=with_random_sign_mask,
        )

    def _cast_matrix(self, matrix: Tensor) -> dict[str, Any]:
        caster, values = self._caster, matrix.detach().float()
        hadamard = (SIGNED if caster.with_random_sign_mask else UNSIGNED) * caster.with_rht
        turned = transformed(values, hadamard) if hadamard and self.columnwise_usage else None
        how = {
            "row": self.rowwise_usage or None,
            "column": self.columnwise_usage or None,
            "partials": largest(values),
            "column_partials": None if turned is None else largest(turned),
            "square": caster.with_2d_quantization,
            "row_scaled": caster.row_scaled_nvfp4,
            "four_over_six": ERR_MODES[caster.nvfp4_4over6_err_mode] * caster.nvfp4_use_4over6,
            "scales_to_256": caster.nvfp4_e4m3_max == 256,
            "hadamard": hadamard,
            "rng": None,
        }
        made = nvfp4(values, how, 0.0)
        fields: dict[str, Any] = {
            "quant_dtype": self.dtype,
            "nvfp4_use_4over6": caster.nvfp4_use_4over6,
            "nvfp4_e4m3_max": caster.nvfp4_e4m3_max,
            "_with_rht": caster.with_rht,
        }
        for form, end, place in (("row", "", "row"), ("column", "_t", "col")):
            if form in made:
                fields[f"data{end}"] = made[form]
                fields[f"scale{end}"] = made[f"{form}_scales"].view(torch.float8_e4m3fn)
                fields[f"global_amax_{place}"] = made[f"{form}_amax"]
        return fields

    def _operand(self, codes: Tensor, scale: Tensor, qresult: Any, column: bool) -> Tensor:
        """Values of codes [rows, k / 2]; the amax is that of a form of `qresult`."""
        if qresult is None:
            raise ValueError("NVFP4QuantizerRef.qgemm: qresult_x and qresult_w are needed")
        return qresult._decoded_form(codes, scale, column)


def nvfp4_ref_rht_2d_factory(role: QuantizerRole | None) -> NVFP4QuantizerRef:
    """For `CustomRecipe`: squares of weights, transformed columns of inputs and gradients."""
    weight = tensor_of(role) == "weight"
    tile = (_GROUP, _GROUP) if weight else (1, _GROUP)
    return NVFP4QuantizerRef(Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=not weight)
