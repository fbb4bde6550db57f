# SPDX-License-Identifier: Apache-2.0
"""One call of a module: which plans run, over which state."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_engine import _core
from transformer_engine.pytorch import scaling, torch_ops
from transformer_engine.pytorch.modes import dispatch_modes
from transformer_engine.pytorch.module.joined import SplitTensors
from transformer_engine.pytorch.plans import PREFIXES, CallPlans
from transformer_engine.pytorch.staged import Observer, run_staged
from transformer_engine.pytorch.state import Domain

__all__ = ["Deferred", "ModuleCall", "PlainCall", "Ran", "main_grad_of"]

CACHED = ("weight_row", "weight_column", "weight_pair")
"""Buffers of a part that make up the cache of its quantized weight."""


class Deferred(NamedTuple):
    """Weight gradients that a backward put off.

    Attributes
    ----------
    plans : CallPlans
        Whose ``wgrad`` plan computes them.
    inputs : list of Tensor
        What it reads.
    packed : Tensor or None
        Packed tensor of the forward.
    rows : int
        Product of the leading dims, -1 where an input has them.
    weights : tuple of Parameter
        Of each part.
    """

    plans: CallPlans
    inputs: list[Tensor]
    packed: Tensor | None
    rows: int
    weights: tuple[Parameter, ...]

    def run(self, state: list[Tensor]) -> tuple:
        """Compute them: the outputs of the plan, which adds to the main gradients in `state`."""
        plan, inputs = self.plans.wgrad, self.inputs
        if torch_ops.behind_operators(inputs[0]) or torch_ops.watched():
            text = self.plans.texts[plan]
            return torch_ops.run_traced(text, (0, 0), inputs, state, self.packed, self.rows)
        return torch_ops.run_native(plan, (0, 0), [*inputs, *state], self.packed, self.rows)


class Ran(NamedTuple):
    """What a module remembers of its last call, for `report`.

    Attributes
    ----------
    plans : CallPlans
        What ran; of a compiled call, what was traced last.
    reason : str or None
        Why its GEMMs were not in FP8; None where they were.
    """

    plans: CallPlans
    reason: str | None


class ModuleCall:
    """One call of a module: its plans, over the state in force (see `function.Call`).

    Attributes
    ----------
    plans : CallPlans
        What runs.
    slots : Slots or None
        The module's slots (delayed scaling).
    scales : Tensor or None
        Forward scales of the call that this one repeats, or of an exported program.
    first : bool
        Update the backward state after this call's backward.
    domain : Domain or None
        What that touches.
    caches : tuple
        Per part the quantized weight (row-wise, column-wise, {1/scale, scale}) or None.
    weights : tuple of Parameter
        Of each part; whose ``main_grad`` takes the weight gradient.
    queue : deque or None
        Where deferred weight gradients go.
    stages : dict or None
        Python functions of external stages.
    observer : callable or None
        Looks at each stage of the plans.
    split : SplitTensors or None
        The weight and the bias come as several tensors, and so do their gradients.
    label : str
        Class of the module and, where it has one, its name: what messages and profilers say.
    traced : bool
        Run behind torch operators: a graph is being traced, or the tensors have no memory.
    """

    split: SplitTensors | None = None
    scales: Tensor | None = None
    first = False
    domain: Domain | None = None
    caches: tuple = (None, None)
    weights: tuple[Parameter, ...] = ()
    queue: deque | None = None
    stages: dict[str, Callable] | None = None
    observer: Observer | None = None
    traced = False

    def __init__(self, plans: CallPlans, slots: scaling.Slots | None, label: str) -> None:
        self.plans = plans
        self.slots = slots
        self.label = label

    def _run(
        self,
        plan: int,
        slots: tuple[int, int],
        inputs: list[Tensor],
        state: list[Tensor],
        packed: Tensor | None = None,
    ) -> tuple:
        if not self.traced and (self.stages or self.observer):
            given = [*inputs, *state]
            return run_staged(plan, slots, given, packed, self.stages or {}, self.observer)
        if self.traced or torch_ops.watched():
            return torch_ops.run_traced(self.plans.texts[plan], slots, inputs, state, packed)
        return torch_ops.run_native(plan, slots, [*inputs, *state], packed)

    def _cached(self, names: dict[str, Tensor]) -> None:
        """Add the cached weights by the names of their buffers."""
        plans = self.plans
        prefixes = PREFIXES[len(plans.spec.parts)]
        for i in plans.cached:
            if self.caches[i] is not None:
                for name, tensor in zip(CACHED, self.caches[i], strict=True):
                    names[prefixes[i] + name] = tensor

    def _keep_caches(self, names: dict[str, Tensor]) -> None:
        """Take the weights that the forward has quantized into the caches."""
        plans = self.plans
        caches = list(self.caches)
        for i, prefix in enumerate(PREFIXES[len(plans.spec.parts)]):
            if f"{prefix}weight_row" in plans.outputs:
                caches[i] = tuple(names[prefix + name] for name in CACHED)
        self.caches = tuple(caches)

    def run_forward(self, tensors: tuple[Tensor | None, ...]) -> tuple[Any, list[Tensor]]:
        """Run the forward over the tensors that ``plans.tensors`` names."""
        plans = self.plans
        given = tensors
        if self.split is not None:
            tensors = self.split.join(given, self.traced)
        names = dict(zip(plans.tensors, tensors, strict=True))
        if plans.cached:
            self._cached(names)
        inputs = [names[name] for name in plans.forward_inputs]
        slots = self.slots
        if self.scales is not None:
            inputs.append(self.scales)
            results = self._run(plans.forward, (0, 0), inputs, [])
        elif slots is None:
            results = self._run(plans.forward, (0, 0), inputs, [])
        else:
            inputs.append(slots.forward_scale)
            place = (slots.forward_slot, 0)
            results = self._run(plans.forward, place, inputs, [slots.forward_history])
        for at, name in enumerate(plans.outputs):
            names[name] = results[at]
        if plans.writes_cache:
            self._keep_caches(names)
        saved = [results[-1]] if plans.saves_packed else []
        saved += [names[name] for name in plans.saved]
        if self.split is not None:
            saved = self._save_parts(saved, given)
        return (results[0] if plans.returns == 1 else tuple(results[:2])), saved

    def run_backward(
        self, grads: tuple[Tensor, ...], saved: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """Run the backward: None, then the gradient of each tensor of the forward."""
        plans = self.plans
        packed = None
        if self.split is not None:
            saved = self._join_saved(saved)
        if plans.saves_packed:
            packed, *saved = saved
        names = dict(zip(plans.saved, saved, strict=True))
        names["grad_output"] = grads[0]
        if plans.takes == 2:
            names["grad_norm_output"] = grads[1]
        slots = self.slots
        place = (0, 0)
        if slots is not None and plans.reads_state:
            names["scale"] = slots.backward_scale
            names["history"] = slots.backward_history
            place = (0, slots.backward_slot)
        self._add_main_grads(names)
        inputs, state = [], []
        for name, mutated in plans.backward_arguments:
            (state if mutated else inputs).append(names[name])
        results = self._run(plans.backward, place, inputs, state, packed)
        for at, name in enumerate(plans.gradients):
            names[name] = results[at]
        found = [None if at < 0 else results[at] for at in plans.places]
        if plans.defer:
            self._defer(names, packed, grads[0])
        for i in plans.main_grads if not plans.defer else ():
            prefix = PREFIXES[len(plans.spec.parts)][i]
            found[plans.tensors.index(f"{prefix}weight")] = _dummy_grad(self.weights[i])
        if self.first:
            scaling.update("backward", self.domain)
        return None, *(found if self.split is None else self.split.spread(found))

    def _save_parts(self, saved: Sequence[Tensor], given: tuple) -> Sequence[Tensor]:
        """Save the weights themselves, last, and not what they make up.

        So autograd sees a change of any of them, and a framework that frees and restores parameters
        (FSDP) finds them.
        """
        at = self.plans.weight_place
        return saved if at < 0 else (*saved[:at], *saved[at + 1 :], *self.split.weights(given))

    def _join_saved(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """Undo `_save_parts`."""
        at = self.plans.weight_place
        if at < 0:
            return saved
        end = len(saved) - len(self.split.weight.rows)
        weight = self.split.weight.join(saved[end:], self.traced)
        return (*saved[:at], weight, *saved[at:end])

    def _add_main_grads(self, names: dict[str, Tensor]) -> None:
        plans = self.plans
        for i in plans.main_grads:
            prefix = PREFIXES[len(plans.spec.parts)][i]
            names[f"{prefix}main_grad"] = main_grad_of(self.weights[i])

    def _defer(self, names: dict[str, Tensor], packed: Tensor | None, grad: Tensor) -> None:
        """Put the weight gradients off: what their plan reads goes to the module's queue."""
        plans = self.plans
        inputs = [names[name] for name in plans.wgrad_inputs]
        # A plan that reads a tensor with leading dims takes the number of rows from that.
        rows = -1 if plans.wgrad_has_rows else grad.shape[:-1].numel()
        self.queue.append(Deferred(plans, inputs, packed, rows, self.weights))


class PlainCall(ModuleCall):
    """A call in eager mode with nothing to decide but what its plans say.

    The same as `ModuleCall` for plans that are `plain`, with every other case left out: this is
    what a training loop runs. Behind torch operators, and where a dispatch mode watches, it is a
    `ModuleCall` after all.
    """

    def run_forward(self, tensors: tuple[Tensor | None, ...]) -> tuple[Any, tuple[Tensor, ...]]:
        """Run the forward over the tensors that ``plans.tensors`` names."""
        if self.traced or dispatch_modes():
            return super().run_forward(tensors)
        plans = self.plans
        slots = self.slots
        parts = tensors
        if self.split is not None:
            tensors = self.split.join(parts, False)
        given = tensors if plans.all_given else [t for t in tensors if t is not None]
        if slots is None:
            results = _core.run(plans.forward, 0, 0, *given)
        else:
            results = _core.run(
                plans.forward,
                slots.forward_slot,
                0,
                *given,
                slots.forward_scale,
                slots.forward_history,
            )
        out = results[0] if plans.returns == 1 else results[:2]
        if not plans.backward:
            return out, ()
        saved = plans.pick_saved((*results, *tensors))
        return out, saved if self.split is None else self._save_parts(saved, parts)

    def run_backward(
        self, grads: tuple[Tensor, ...], saved: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, ...]:
        """Run the backward: None, then the gradient of each tensor of the forward."""
        if self.traced or dispatch_modes():
            return super().run_backward(grads, saved)
        plans = self.plans
        slots = self.slots
        if plans.takes < plans.returns:
            grads = grads[:1]
        if self.split is not None:
            saved = self._join_saved(saved)
        if not plans.saves_packed:
            results = _core.run(plans.backward, 0, 0, *grads, *saved)
        elif slots is None or not plans.reads_state:
            results = _core.run(plans.backward, 0, 0, *grads, *saved[1:], saved[0])
        else:
            results = _core.run(
                plans.backward,
                0,
                slots.backward_slot,
                *grads,
                *saved[1:],
                slots.backward_scale,
                slots.backward_history,
                saved[0],
            )
        if self.first:
            scaling.update("backward", self.domain)
        if self.split is not None:
            found = [None if at < 0 else results[at] for at in plans.places]
            return None, *self.split.spread(found)
        if plans.all_gradients:
            return None, *results[:-1]
        return None, *[None if at < 0 else results[at] for at in plans.places]


def main_grad_of(weight: Parameter) -> Tensor:
    """``weight.main_grad``; RuntimeError where there is none."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise RuntimeError(
            "fuse_wgrad_accumulation=True, but the weight has no main_grad: assign a "
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
