# SPDX-License-Identifier: Apache-2.0
"""Quantizers and a tensor as programs write them."""

import torch
from pytorch.quantized_cases import E4M3, current

import transformer_engine.pytorch as te


class Halves(te.QuantizedTensor):
    """Values in steps of a half."""

    @classmethod
    def of(cls, values, dtype):
        made = cls(values.shape, dtype, device=values.device)
        made.codes = (values.float() * 2).round().to(torch.int16)
        return made

    def dequantize(self, *, dtype=None):
        return (self.codes.float() / 2).to(dtype or self.dtype)


class HalvesQuantizer(te.Quantizer):
    """The three public methods, and no others."""

    def quantize_impl(self, tensor):
        return Halves.of(tensor, tensor.dtype)

    def update_quantized(self, src, dst, *, noop_flag=None):
        if noop_flag is None or noop_flag.item() == 0:
            dst.codes.copy_((src.float() * 2).round())
        return dst

    def make_empty(
        self, shape, *, dtype=torch.float32, device=None, requires_grad=False, pin_memory=False
    ):
        return Halves.of(torch.zeros(shape, device=device), dtype)


def halves_of(values):
    """The values that `HalvesQuantizer` makes of others."""
    return (values * 2).round() / 2 + 0.0  # integers have no -0


class Doubled(te.Float8CurrentScalingQuantizer):
    """A cast of this library, of other values."""

    def quantize_impl(self, tensor):
        return super().quantize_impl(tensor * 2)


class Columns(te.Float8BlockQuantizer):
    """A format of groups with values of its own."""

    def quantize_impl(self, tensor):
        return super().quantize_impl(tensor * 0.5)


class Writes(te.Float8CurrentScalingQuantizer):
    """Other values where it writes into a tensor, and there alone."""

    def update_quantized(self, src, dst, *, noop_flag=None):
        return super().update_quantized(src * 2, dst, noop_flag=noop_flag)


OWN = {
    "three methods": (lambda device: HalvesQuantizer(), halves_of),
    "current": (
        lambda device: Doubled(E4M3, device),
        lambda x: current()(x * 2).dequantize(dtype=torch.float32),
    ),
    "tiles": (
        lambda device: Columns(E4M3, rowwise=True, columnwise=True),
        lambda x: te.Float8BlockQuantizer(E4M3)(x * 0.5).dequantize(dtype=torch.float32),
    ),
}
"""Quantizers of a device, and the values that they make of fp32 ones."""


def custom(make):
    """The recipe that casts every operand by quantizers of a function without arguments."""
    return te.recipe.CustomRecipe(qfactory=lambda role: make())
