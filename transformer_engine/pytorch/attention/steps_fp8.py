# SPDX-License-Identifier: Apache-2.0
"""Attention in FP8 over ranks by steps: what is cast once, on the rank that has it, and travels.

Queries, keys and values are cast with the scales and slots of state that attention in FP8 has
(`fp8`). Around a ring codes go with their scales, which may differ from rank to rank; keys that are
gathered are read in one step, and have one scale. Each step gives its output in FP8, as the
operator does, and outputs are added in fp32. The backward is in high precision, of what the codes
say, so gradients add up as any others.
"""

from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.attention import fp8
from transformer_engine.pytorch.attention.steps import INVERSE
from transformer_engine.pytorch.module.parallel import has_all
from transformer_engine.pytorch.torchside.collectives import take_largest
from transformer_engine.pytorch.torchside.modes import unseen

_E4M3 = torch.float8_e4m3fn
_HEADS, _WEIGHTS = 2, 8
"""Slots of the forward's state, as of ``csrc/layer/heads_fp8.c``."""


class StepCasts:
    """The casts of one call of a `DotProductAttention`, whose queries are `like`.

    With `group`, whose ranks' keys are read together, these have one scale: NotImplementedError
    where delayed scaling does not see to it.
    """

    def __init__(self, core: Any, like: Tensor, group: Any = None) -> None:
        self._core, self._region = core, fp8.region_of(core, False)
        self._recipe, self._group = self._region.recipe, group
        if group is not None and self._recipe.delayed():
            self._check_reduction()
        core._quantization_of(self._recipe, False)  # what programs read of it
        self._slots, self._scales, _ = fp8.scaling_state_of(core, self._region, like)
        # A call that is repeated has the scales of the first one, and records no amax.
        self._repeats = self._scales is not None
        if self._slots is not None and not self._repeats:
            slots, first = self._slots, self._slots.forward_slot
            with unseen():
                self._scales = slots.forward_scale[first : first + fp8.SLOTS[0]].clone()

    def _check_reduction(self) -> None:
        state = self._region.state.group
        if not (self._recipe.reduce_amax and has_all(state, self._group)):
            raise NotImplementedError(
                f"{type(self._core).__name__}: cp_comm_type='all_gather' in FP8 by delayed scaling "
                "whose amaxes are not those of all ranks of cp_group is not there: leave "
                "reduce_amax=False out, and give autocast an amax_reduction_group with these "
                "ranks, or cp_comm_type='p2p' or 'a2a'"
            )

    def _amax(self, slot: int) -> Tensor | None:
        if self._slots is None or self._repeats:
            return None
        at = self._slots.forward_slot + slot
        return self._slots.forward_history[0, at : at + 1]

    def cast(self, *heads: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Codes in e4m3, dense, and their scales [2] fp32, of queries, keys and values."""
        heads = tuple([each.contiguous() for each in heads])
        quantizer = self._quantizer()
        if self._group is None or self._recipe.delayed():
            made = [quantizer(each) for each in heads]
        else:
            from transformer_engine.pytorch.tensor.casts import measure_each

            joined, parts = measure_each(heads)
            take_largest([joined[_core.AMAX_PARTIALS :]], self._group)  # not of the queries
            made = []
            for each, partials in zip(heads, parts, strict=True):
                into = quantizer.make_empty(each.shape, dtype=each.dtype, device=each.device)
                quantizer.write_measured(into, each, partials, None)
                made.append(into)
        return [(each._data.contiguous().view(_E4M3), each._scales) for each in made]

    def _quantizer(self) -> Any:
        # Few ask for them, and what they load.
        from transformer_engine.pytorch.tensor import (
            Float8CurrentScalingQuantizer,
            Float8Quantizer,
        )

        if not self._recipe.delayed():
            how = self._recipe.fp8_quant_fwd_inp
            return Float8CurrentScalingQuantizer(
                _E4M3, columnwise=False, force_pow_2_scales=how.power_2_scale,
                amax_epsilon=how.amax_epsilon,
            )  # fmt: skip
        amax = self._amax(_HEADS)
        with unseen():
            scale = self._scales[_HEADS : _HEADS + 1]
            amax = torch.zeros_like(scale) if amax is None else amax
        return Float8Quantizer(scale, amax, _E4M3, columnwise=False)

    def fields(self) -> dict[str, Any]:
        """Fields of the forward's operator that are the same in all steps."""
        if not self._recipe.delayed():
            return {}
        output = fp8.OUTPUT_SLOT
        return {
            "output_scale": self._scales[output : output + 1],
            "output_amax": self._amax(output),
            "weights_amax": self._amax(_WEIGHTS),
        }

    def end(self) -> None:
        """Note that the call has run."""
        region = self._region
        if region.record:
            self._core._record(region, self._slots if region.replay is None else None, False)


def read(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes say, in a dtype."""
    return (codes.to(torch.float32) * scales[INVERSE]).to(dtype)
