# SPDX-License-Identifier: Apache-2.0
"""One call of a linear layer: which plans run, over which state."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_engine import _core
from transformer_engine.pytorch import ops, scaling
from transformer_engine.pytorch.plans import (
    ACCUMULATE,
    BIAS,
    CACHE_READ,
    CACHE_WRITE,
    DEFER,
    DGRAD,
    OVERWRITE,
    SAVE_INPUT,
    WGRAD,
    LinearPlans,
)
from transformer_engine.pytorch.staged import run_staged

__all__ = ["LinearCall", "main_grad_of"]


class LinearCall:
    """One call of a linear layer: its plans, over the state in force (see `function.Call`).

    Attributes
    ----------
    plans : LinearPlans
        What runs.
    slots : Slots or None
        The module's slots (delayed scaling).
    scales : Tensor or None
        Forward scales of the call that this one repeats.
    first : bool
        Update the backward state after this call's backward.
    cache : tuple of Tensor or None
        The quantized weight: row-wise, column-wise, {1/scale, scale}.
    weight : Parameter or None
        Whose ``main_grad`` takes the weight gradient.
    queue : deque or None
        Where a deferred weight gradient goes.
    stages : dict or None
        Python functions of external stages.
    """

    __slots__ = ("plans", "slots", "scales", "first", "cache", "weight", "queue", "stages")

    def __init__(self, plans: LinearPlans, slots: scaling.Slots | None) -> None:
        self.plans = plans
        self.slots = slots
        self.scales: Tensor | None = None
        self.first = False
        self.cache: tuple[Tensor, Tensor, Tensor] | None = None
        self.weight: Parameter | None = None
        self.queue: deque | None = None
        self.stages: dict[str, Callable] | None = None

    def _run(
        self,
        plan: int,
        slots: tuple[int, int],
        inputs: list[Tensor],
        state: list[Tensor],
        packed: Tensor | None = None,
    ) -> tuple:
        if self.stages:
            return run_staged(plan, slots, [*inputs, *state], packed, self.stages)
        return ops.run(plan, slots, inputs, state, packed)

    def run_forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the forward over (input, weight, bias or None)."""
        inp, weight, bias = tensors
        flags = self.plans.spec.flags
        inputs = [inp]
        if flags & CACHE_READ:
            inputs += [self.cache[0], self.cache[2]]
        else:
            inputs.append(weight)
        if flags & BIAS:
            inputs.append(bias)
        state = []
        slot = 0
        if self.scales is not None:
            inputs.append(self.scales)
        elif self.slots is not None:
            inputs.append(self.slots.forward_scale)
            state.append(self.slots.forward_history)
            slot = self.slots.forward_slot
        outputs = self._run(self.plans.forward, (slot, 0), inputs, state)
        if flags & CACHE_WRITE:
            self.cache = outputs[1:4]
        return outputs[0], self._to_save(inp, weight, outputs[-1])

    def _to_save(self, inp: Tensor, weight: Tensor, packed: Tensor | None) -> tuple[Tensor, ...]:
        flags = self.plans.spec.flags
        saved = []
        if self._saves_packed():
            saved.append(packed)
        if flags & DGRAD:
            if self._cached():
                saved += self.cache[1:]
            else:
                saved.append(weight)
        if flags & WGRAD and (flags & SAVE_INPUT or not self._quantized()):
            saved.append(inp)
        return tuple(saved)

    def _quantized(self) -> bool:
        return self.plans.spec.quantization.recipe != _core.RECIPE_NONE

    def _cached(self) -> bool:
        return bool(self.plans.spec.flags & (CACHE_READ | CACHE_WRITE))

    def _saves_packed(self) -> bool:
        flags = self.plans.spec.flags
        return self._quantized() and bool(
            flags & WGRAD or (flags & DGRAD and not flags & (CACHE_READ | CACHE_WRITE))
        )

    def run_backward(self, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Run the backward: gradients of (input, weight, bias)."""
        spec = self.plans.spec
        flags = spec.flags
        saved = list(saved)
        packed = saved.pop(0) if self._saves_packed() else None
        inputs = [grad]
        if flags & DGRAD:
            inputs += [saved.pop(0) for _ in range(2 if self._cached() else 1)]
        original = saved.pop(0) if saved else None
        defer = bool(flags & DEFER)
        state = []
        slot = 0
        if original is not None and not defer:
            inputs.append(original)
        if self.slots is not None and flags & (DGRAD | WGRAD):
            inputs.append(self.slots.backward_scale)
            state.append(self.slots.backward_history)
            slot = self.slots.backward_slot
        into_main_grad = flags & (ACCUMULATE | OVERWRITE)
        if into_main_grad and flags & WGRAD and not defer:
            state.append(main_grad_of(self.weight))
        outputs = list(self._run(self.plans.backward, (0, slot), inputs, state, packed))
        grad_input = outputs.pop(0) if flags & DGRAD else None
        grad_weight = None
        if flags & WGRAD and not defer:
            grad_weight = _dummy_grad(self.weight) if into_main_grad else outputs.pop(0)
        grad_bias = outputs.pop(0) if spec.bias_grad else None
        if defer and flags & WGRAD:
            self._defer(grad, original, packed, outputs)
        if self.first:
            scaling.update("backward")
        return grad_input, grad_weight, grad_bias

    def _defer(
        self, grad: Tensor, original: Tensor | None, packed: Tensor | None, outputs: list
    ) -> None:
        """Put the weight gradient off: what its plan reads goes to the module's queue."""
        inputs = outputs[:2] if self._quantized() else [grad]
        if original is not None:
            inputs.append(original)
        # A plan that reads a tensor with leading dims takes the number of rows from that.
        rows = -1 if original is not None else grad.shape[:-1].numel()
        self.queue.append((self.plans, inputs, packed, rows, self.weight))


def main_grad_of(weight: Parameter) -> Tensor:
    """``weight.main_grad``; RuntimeError where there is none."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "Linear: fuse_wgrad_accumulation=True, but the weight has no main_grad: assign a tensor "
            f"of shape {tuple(weight.shape)} to weight.main_grad before the forward"
        )
    return main_grad


def _dummy_grad(weight: Parameter) -> Tensor | None:
    """What autograd gets where the gradient went to main_grad.

    A weight that has ``grad_added_to_main_grad`` belongs to a framework that counts gradient hooks:
    it is told, and gets a tensor so that the hooks run.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)
