# SPDX-License-Identifier: Apache-2.0
"""One call of a linear layer: which plans run, over which state."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_engine import _core
from transformer_engine.pytorch import ops, scaling
from transformer_engine.pytorch.plans import LinearPlans
from transformer_engine.pytorch.staged import run_staged

__all__ = ["LinearCall", "PlainCall", "main_grad_of"]


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
    traced : bool
        A graph is being traced: run behind torch operators.
    """

    scales: Tensor | None = None
    first = False
    cache: tuple[Tensor, Tensor, Tensor] | None = None
    weight: Parameter | None = None
    queue: deque | None = None
    stages: dict[str, Callable] | None = None
    traced = False

    def __init__(self, plans: LinearPlans, slots: scaling.Slots | None) -> None:
        self.plans = plans
        self.slots = slots

    def _run(
        self,
        plan: int,
        slots: tuple[int, int],
        inputs: list[Tensor],
        state: list[Tensor],
        packed: Tensor | None = None,
    ) -> tuple:
        if self.traced:
            return ops.run_traced(plan, slots, inputs, state, packed)
        if self.stages:
            return run_staged(plan, slots, [*inputs, *state], packed, self.stages)
        return ops.run_native(plan, slots, [*inputs, *state], packed)

    def run_forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the forward over (input, weight, bias or None)."""
        inp, weight, bias = tensors
        plans = self.plans
        if plans.reads_cache:
            inputs = [inp, self.cache[0], self.cache[2]]
        else:
            inputs = [inp, weight]
        if bias is not None:
            inputs.append(bias)
        slots = self.slots
        if slots is None:
            outputs = self._run(plans.forward, (0, 0), inputs, [])
        elif self.scales is not None:
            inputs.append(self.scales)
            outputs = self._run(plans.forward, (0, 0), inputs, [])
        else:
            inputs.append(slots.forward_scale)
            place = (slots.forward_slot, 0)
            outputs = self._run(plans.forward, place, inputs, [slots.forward_history])
        saved = [outputs[-1]] if plans.saves_packed else []
        if plans.saves_weight:
            saved.append(weight)
        elif plans.cached:
            if plans.writes_cache:
                self.cache = outputs[1:4]
            if plans.dgrad:
                saved += self.cache[1:]
        if plans.saves_input:
            saved.append(inp)
        return outputs[0], saved

    def run_backward(self, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Run the backward: None, then the gradients of (input, weight, bias)."""
        plans = self.plans
        packed, original = None, None
        if plans.saves_packed:
            packed, *saved = saved
        if plans.saves_input:
            *saved, original = saved
        inputs, state, place = self._backward_inputs([grad, *saved], original)
        outputs = self._run(plans.backward, place, inputs, state, packed)
        at = 0
        grad_input = grad_weight = grad_bias = None
        if plans.dgrad:
            grad_input = outputs[0]
            at = 1
        if plans.wgrad_needed and not plans.defer:
            if plans.into_main_grad:
                grad_weight = _dummy_grad(self.weight)
            else:
                grad_weight = outputs[at]
                at += 1
        if plans.bias_grad:
            grad_bias = outputs[at]
            at += 1
        if plans.defer:
            self._defer(grad, original, packed, outputs[at : at + 2])
        if self.first:
            scaling.update("backward")
        return None, grad_input, grad_weight, grad_bias

    def _backward_inputs(
        self, inputs: list[Tensor], original: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor], tuple[int, int]]:
        """(inputs, state, slots) of the backward; `inputs` begins with gradient and weight."""
        plans = self.plans
        slots = self.slots
        state = []
        place = (0, 0)
        if original is not None and not plans.defer:
            inputs.append(original)
        if slots is not None and (plans.dgrad or plans.wgrad_needed):
            inputs.append(slots.backward_scale)
            state.append(slots.backward_history)
            place = (0, slots.backward_slot)
        if plans.into_main_grad and not plans.defer:
            state.append(main_grad_of(self.weight))
        return inputs, state, place

    def _defer(
        self, grad: Tensor, original: Tensor | None, packed: Tensor | None, quantized: tuple
    ) -> None:
        """Put the weight gradient off: what its plan reads goes to the module's queue."""
        inputs = [*quantized] if self.plans.quantized else [grad]
        if original is not None:
            inputs.append(original)
        # A plan that reads a tensor with leading dims takes the number of rows from that.
        rows = -1 if original is not None else grad.shape[:-1].numel()
        self.queue.append((self.plans, inputs, packed, rows, self.weight))


class PlainCall(LinearCall):
    """A call in eager mode with nothing to decide but what its plans say.

    The same as `LinearCall` for plans that are `plain`, with every other case left out: this is
    what a training loop runs.
    """

    def run_forward(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run the forward over (input, weight, bias or None)."""
        inp, weight, bias = tensors
        plans = self.plans
        slots = self.slots
        given = (inp, weight) if bias is None else (inp, weight, bias)
        if slots is None:
            out, packed = _core.run(plans.forward, 0, 0, *given)
        else:
            out, packed = _core.run(
                plans.forward,
                slots.forward_slot,
                0,
                *given,
                slots.forward_scale,
                slots.forward_history,
            )
        if not plans.backward:
            return out, ()
        saved = (packed,) if plans.saves_packed else ()
        if plans.saves_weight:
            saved += (weight,)
        if plans.saves_input:
            saved += (inp,)
        return out, saved

    def run_backward(self, grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Run the backward: None, then the gradients of (input, weight, bias)."""
        plans = self.plans
        slots = self.slots
        if not plans.saves_packed:
            outputs = _core.run(plans.backward, 0, 0, grad, *saved)
        elif slots is None:
            outputs = _core.run(plans.backward, 0, 0, grad, *saved[1:], saved[0])
        else:
            outputs = _core.run(
                plans.backward,
                0,
                slots.backward_slot,
                grad,
                *saved[1:],
                slots.backward_scale,
                slots.backward_history,
                saved[0],
            )
        if self.first:
            scaling.update("backward")
        if plans.all_gradients:
            return None, outputs[0], outputs[1], outputs[2]
        made = iter(outputs)
        grad_input = next(made) if plans.dgrad else None
        grad_weight = next(made) if plans.wgrad_needed else None
        return None, grad_input, grad_weight, next(made) if plans.bias_grad else None


def main_grad_of(weight: Parameter) -> Tensor:
    """``weight.main_grad``; RuntimeError where there is none."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "Linear: fuse_wgrad_accumulation=True, but the weight has no main_grad: assign a "
            f"tensor of shape {tuple(weight.shape)} to weight.main_grad before the forward"
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
