# SPDX-License-Identifier: Apache-2.0
"""Attention in FP8 emulated: what FP8 would round is rounded, and multiplied in high precision.

By `torch_backends.attend_in_steps`, so for every mask, bias and softmax, on every device. Queries,
keys, values, weights and output are cast and read again, with the scales and slots of state that
attention in FP8 has (`fp8.py`). The backward is in high precision, of what was read: casts pass
gradients through.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.attention import fp8, torch_backends
from transformer_engine.pytorch.attention.fp8_recipe import recipe_of
from transformer_engine.pytorch.attention.limits import Limits
from transformer_engine.pytorch.attention.problem import Heads
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer, Float8Quantizer
from transformer_engine.pytorch.torchside.graph_breaks import Outside
from transformer_engine.pytorch.torchside.modes import exporting, unseen, without_memory

_HEADS, _OUTPUT, _WEIGHTS = 2, 3, 8
"""Slots of the forward's state, as of ``csrc/layer/heads_fp8.c``."""
_E4M3 = torch.float8_e4m3fn
_MAX = 448.0  # of it


class _Through(torch.autograd.Function):
    """A cast and its reading, with the gradient passed through."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, quantizer: Any, note: Callable | None) -> Tensor:
        del ctx
        cast = quantizer(source.contiguous())
        if note is not None:
            note(cast._scale_inv)
        return cast.dequantize(dtype=source.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad, None, None


class _Casts:
    """The casts of one call."""

    def __init__(self, recipe: Any, state: tuple, device: torch.device, dropout: float) -> None:
        self._recipe, self._device, self._room = recipe, device, 1.0 - dropout
        self._slots, self._scales, _ = state
        self._of_values: Tensor | None = None  # their 1 / scale

    def _scale(self, value: Tensor | float, slot: int) -> Float8Quantizer:
        """A cast with a scale; a slot of the state, where there is one, records its amax."""
        like = {"dtype": torch.float32, "device": self._device}
        scale = torch.as_tensor(value, **like).reshape(1)
        with unseen():  # a repetition records no amax
            amax = torch.zeros_like(scale)
            if self._slots is not None and self._scales is None:
                at = self._slots.forward_slot + slot
                amax = self._slots.forward_history[0, at : at + 1]
        return Float8Quantizer(scale, amax, _E4M3, columnwise=False)

    def _delayed(self, slot: int) -> Float8Quantizer:
        """A cast with a scale of the state, or that of a call that is repeated."""
        with unseen():
            if self._scales is not None:
                scale = self._scales[slot].clone()
            else:
                scale = self._slots.forward_scale[self._slots.forward_slot + slot].clone()
        return self._scale(scale, slot)

    def heads(self, tensor: Tensor) -> Tensor:
        """Queries, keys, values, or several of them; what comes last has the values."""
        if self._recipe.delayed():
            quantizer: Any = self._delayed(_HEADS)
        else:
            how = self._recipe.fp8_quant_fwd_inp
            quantizer = Float8CurrentScalingQuantizer(
                _E4M3, columnwise=False, force_pow_2_scales=how.power_2_scale,
                amax_epsilon=how.amax_epsilon,
            )  # fmt: skip
        return _Through.apply(tensor, quantizer, self._note)

    def _note(self, scale_inv: Tensor) -> None:
        self._of_values = scale_inv

    def weights(self, tensor: Tensor) -> Tensor:
        """Weights of softmax with their dropout, which are at most 1 / (1 - p)."""
        if self._room == 0.0:  # all are dropped
            return tensor
        return _Through.apply(tensor, self._scale(_MAX * self._room, _WEIGHTS), None)

    def output(self, tensor: Tensor) -> Tensor:
        """The output; no mean of values exceeds them, but by dropout."""
        if self._recipe.delayed():
            return _Through.apply(tensor, self._delayed(_OUTPUT), None)
        if self._room == 0.0:
            return tensor
        return _Through.apply(tensor, self._scale(self._room / self._of_values, _OUTPUT), None)


def attend(
    module: Any, heads: Heads, qkv_format: str, limits: Limits, scale: float, dropout: float
) -> Any:
    """Attend; arguments as of `torch_backends.attend_in_steps`, of a `DotProductAttention`.

    Its casts keep their state outside of graphs, and so it runs. NotImplementedError in
    `torch.export`.
    """
    if torch.compiler.is_compiling():
        if exporting():
            raise NotImplementedError(
                "DotProductAttention: FP8 attention that is emulated (TE_UNFUSED_DPA_EMULATE_FP8) "
                "in torch.export: leave it out there"
            )
        return _attend_outside(module, heads, qkv_format, limits, scale, dropout)
    region = module._region(False)
    if region.replay is None:
        region = region._replace(recipe=recipe_of(region.recipe, module))
    tensors, like = heads.tensors, heads.tensors[0]
    if like.device.type != "meta" and torch.is_autocast_enabled(like.device.type):
        dtype = torch.get_autocast_dtype(like.device.type)
        tensors = tuple(tensor.to(dtype) for tensor in tensors)
    if without_memory(like):
        return torch_backends.attend_in_steps(
            heads._replace(tensors=tensors), qkv_format, limits, scale, dropout
        )
    module._quantization_of(region.recipe, False)  # what programs read of it
    state = fp8.state_of(module, region, like)
    casts = _Casts(region.recipe, state, like.device, dropout)
    given = heads._replace(tensors=tuple(map(casts.heads, tensors)))
    out = torch_backends.attend_in_steps(
        given, qkv_format, limits.but(cast=casts.weights), scale, dropout
    )
    out, *top = out if limits.wants_top else (out,)
    out = casts.output(out)
    if region.record:
        module._record(region, state[0] if region.replay is None else None, False)
    return (out, *top) if top else out


_attend_outside = Outside(attend)
