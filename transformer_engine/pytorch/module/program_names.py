# SPDX-License-Identifier: Apache-2.0
"""What programs call of a module, and its own calls do not need."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.recipe import QuantizerRole

__all__ = ["ModuleNames", "PlainNames"]


class PlainNames:
    """Mixin of every module of this library."""

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set an attribute that is no parameter, buffer or module, past `torch.nn.Module`."""
        object.__setattr__(self, name, value)

    def module_setattr(self, name: str, value: Any) -> None:
        """Set an attribute as `torch.nn.Module` does."""
        torch.nn.Module.__setattr__(self, name, value)


class ModuleNames(PlainNames):
    """Mixin of the modules with FP8 state."""

    name: str | None = None
    """Given by the user, for messages."""
    output_quantizer_role: QuantizerRole | None = None
    """Role of the output, for the caller's own use: outputs stay in high precision."""
    grad_input_quantizer_role: QuantizerRole | None = None
    """Role of the gradient of the input, likewise."""

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Nothing: this module has no parameters of its own."""
        del defer_init

    # ---- weight gradients --------------------------------------------------------------------

    def need_backward_dw(self) -> bool:
        """Whether a backward leaves the weight gradient to `backward_dw`."""
        return getattr(self, "delay_wgrad_compute", False)

    def backward_dw(self) -> None:
        """Nothing: this module has no weight gradient that a backward would leave out."""

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable
    ) -> None:
        """Have a function called without arguments when `backward_dw` has made a gradient."""
        self.__dict__.setdefault("_wgrad_hooks", []).append(wgrad_accumulation_and_reduce_hook)

    # ---- scaling state -----------------------------------------------------------------------

    def get_fp8_meta_tensors(self) -> dict[str, list[Tensor]] | None:
        """Copies of the scaling state, or None where there is none.

        ``scaling_fwd`` and ``scaling_bwd``: [scale [n], amax history [length, n]], fp32.
        """
        values = self._state_values()
        if values is None:
            return None
        return {f"scaling_{_SHORT[d]}": [t.clone() for t in values[d]] for d in _SHORT}

    def reset_fp8_meta_tensors(
        self, fp8_meta_tensors: Mapping[str, Sequence[Tensor]] | None = None
    ) -> None:
        """Take over what `get_fp8_meta_tensors` gave; None: scale 1 and an empty history."""
        if fp8_meta_tensors is None:
            self._loaded_state = None
            self._slots = None
            return
        self._put_state({d: tuple(fp8_meta_tensors[f"scaling_{_SHORT[d]}"]) for d in _SHORT})

    # ---- questions ---------------------------------------------------------------------------

    def get_quantizer_roles(
        self, *, fwd: bool, num_quantizers: int
    ) -> list[QuantizerRole | None] | None:
        """Roles of the quantizers of a direction; None: the module asks for none by role."""
        del fwd, num_quantizers

    @property
    def is_fsdp2(self) -> bool:
        """Whether FSDP2 has sharded the parameters."""
        return any(hasattr(p, "device_mesh") for p in self._parameters.values())

    def is_debug_iter(self) -> bool:
        """Whether debug features look at this iteration: never."""
        return False

    def no_debug_features_active(self, quantizers: Any) -> bool:
        """Whether no debug feature changes what quantizers do: always."""
        del quantizers
        return True

    def set_nccl_overlap_warning_if_tp(self) -> None:
        """Nothing: communication is not overlapped with GEMMs."""


_SHORT = {"forward": "fwd", "backward": "bwd"}
