# SPDX-License-Identifier: Apache-2.0
"""A quantized weight kept over the microbatches of a step."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.scaling import Slots


class WeightCache(NamedTuple):
    """The quantized weight, and of what it is the quantized form."""

    tensors: tuple[Tensor, Tensor, Tensor]  # row-wise and column-wise data, {1/scale, scale}
    key: tuple  # memory, versions and dtype of the weight, recipe, whether inference mode made it
    sources: tuple  # the tensors that the weight consisted of

    @classmethod
    def of(
        cls, tensors: tuple, sources: tuple[Tensor, ...], quantization: Any, slots: Slots | None
    ) -> "WeightCache":
        """Keep what a forward made of `sources`, and how: the state for delayed scaling alone."""
        key = cls._key_of(sources, quantization, slots)
        return cls(tensors, key, tuple(map(weakref.ref, sources)))

    def holds(self, sources: tuple[Tensor, ...], quantization: Any, slots: Slots | None) -> bool:
        """Whether it is these very tensors with the values they have now, under this recipe."""
        if self.key != self._key_of(sources, quantization, slots):
            return False  # they changed, moved, or another recipe is in force
        # Another tensor may lie in the memory that the cached one had.
        return all(kept() is t for kept, t in zip(self.sources, sources, strict=True))

    @staticmethod
    def _key_of(sources: tuple[Tensor, ...], quantization: Any, slots: Slots | None) -> tuple:
        versions = [(t.data_ptr(), -1 if t.is_inference() else t._version) for t in sources]
        return (
            *versions,
            sources[0].dtype,
            sources[0].device,
            quantization,
            None if slots is None else slots.identity,
            torch.is_inference_mode_enabled(),  # what it makes can not be saved for a backward
        )
