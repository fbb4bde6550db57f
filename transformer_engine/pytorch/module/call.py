# SPDX-License-Identifier: Apache-2.0
"""One call of a module: which plans run, over which state."""

import contextlib
import copy
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Parameter

from transformer_engine import _core
from transformer_engine.common.plan_text import Plan
from transformer_engine.common.plans import CallPlans
from transformer_engine.pytorch.execution import collectives, plan_ops
from transformer_engine.pytorch.execution.overrides import of_forward
from transformer_engine.pytorch.execution.random import draw_pairs
from transformer_engine.pytorch.execution.stages import Staged
from transformer_engine.pytorch.execution.thread_state import Domain
from transformer_engine.pytorch.module import quantized
from transformer_engine.pytorch.module.joined import SplitTensors
from transformer_engine.pytorch.module.main_gradients import dummy_grad, main_grad_of
from transformer_engine.pytorch.scaling_state import reduction, scaling
from transformer_engine.pytorch.torchside.device import is_captured
from transformer_engine.pytorch.torchside.modes import dispatch_modes, keeps_autograd_graph
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized


class Deferred(NamedTuple):
    """Weight gradients that a backward deferred."""

    plans: CallPlans  # whose ``wgrad`` plan computes them
    inputs: list[Tensor]  # what it reads
    packed: Tensor | None  # packed tensor of the forward
    rows: int  # product of the leading dims, -1 where an input has them
    weights: tuple[Parameter, ...]  # of each part
    scope: Any  # of the plug-ins that the backward obeyed (`_core.selected`)
    group: Any = None  # over which the plan's collectives run; None: it has none

    def run(self, state: list[Tensor]) -> tuple:
        """Compute them: the outputs of the plan, which adds to the main gradients in `state`."""
        with of_forward(self.scope) or contextlib.nullcontext():
            return self._run(state)

    def _run(self, state: list[Tensor]) -> tuple:
        plan, inputs, staged = self.plans.wgrad, self.inputs, None
        if self.group is not None:
            staged = collectives.staged_over(plan, self.group)
        if plan_ops.behind_operators(inputs[0]) or plan_ops.watched():
            given = inputs, state, self.packed, self.rows
            return plan_ops.run_traced(plan.text, (0,), *given, staged=staged)
        return plan_ops.run_native(plan, (0,), [*inputs, *state], self.packed, self.rows, staged)


class LastCall(NamedTuple):
    """Record of a module's last call, for `report`."""

    plans: CallPlans  # what ran; of a compiled call, what was traced last
    reason: str | None  # why its GEMMs were not in FP8; None where they were


class ModuleCall:
    """One call of a module: its plans, over the state in force (see `autograd.Call`)."""

    splits: tuple[SplitTensors, ...] = ()
    """Weights and biases that come as several tensors, and so do their gradients; by place."""
    dtypes: tuple[torch.dtype | None, ...] = ()
    """The dtype that each tensor is converted to before a run, None for one that is read as it is;
    () where all are."""
    queue: deque | None = None  # where deferred weight gradients go
    staged: Staged | None = None  # Python functions of external stages, and an observer
    group: Any = None  # over which collectives run; None: there are none
    fills: tuple = ()  # of each random pair the function that draws it, as of `draw_pairs`
    recipe: Any = None  # in force, of modules that take and give quantized tensors
    quantizers: dict[bool, Any]  # of what is returned quantized, by whether that is the gradient
    traced = False
    # What a run has of its own: of a call that is made again, see `CallRun`.
    scales: Tensor | None = None
    """Forward scales to cast with in place of the slots': those of the call that this one repeats,
    or of an exported program."""
    unread_history: Tensor | None = None  # takes the amaxes of a repeated call; nobody reads them
    updates_backward = False  # update the backward state after this call's backward
    domain: Domain | None = None  # whose backward state that is
    caches: Sequence = ()
    """Per part the quantized weight (row-wise, column-wise, scales) or None. A list where a forward
    writes to it."""
    weights: tuple[Parameter, ...] = ()  # of each part; their ``main_grad`` takes the gradient
    unused_pairs: tuple[int, ...] = ()
    """Indices of random pairs that a forward under a checkpoint draws and no plan reads. The first
    forward of a reentrant checkpoint runs without gradients, so it can not tell which pairs the
    backward will read. It draws all that could be read, and its repetition draws as many."""

    def __init__(self, plans: CallPlans, slots: scaling.Slots | None, label: str) -> None:
        self.plans = plans
        # Of each module whose scaling state it uses (its owners); None without delayed scaling.
        self.owner_slots = (slots,)
        self.label = label  # class and, where it has one, name: for messages and profilers

    @property
    def slots(self) -> scaling.Slots | None:
        """Slots of the first module."""
        return self.owner_slots[0]

    def _run(
        self,
        plan: Plan,
        slots: tuple,
        given: Sequence,
        written: int,
        packed: tuple = (),
    ) -> tuple:
        """Run a plan, which writes to none but the last `written` of what it is given.

        Returns its outputs and what it packs for the backward.
        """
        staged = self.staged
        if self.traced or (dispatch_modes() and plan_ops.watched()):
            at = len(given) - written
            inputs, state = list(given[:at]), list(given[at:])
            saved = packed[0] if packed else None
            group = self.group.group_name if self.traced and self.group is not None else ""
            options = {"staged": staged, "group": group}
            return plan_ops.run_traced(plan.text, slots, inputs, state, saved, **options)
        if staged is None:
            if not packed or not self.plans.may_consume or not self._consumes(packed):
                return _core.run(plan.native, slots, slots, *given, *packed)
            try:
                return _core.run_consuming(plan.native, slots, slots, *given, *packed)
            finally:  # a backward that fails later frees nothing: reading it again is an error
                increment_version(packed[0])
        of_run = staged.of(plan)
        return _core.run_staged(plan.native, slots, slots, *of_run, *given, *packed)

    def _consumes(self, packed: tuple) -> bool:
        """Return whether a run is the last one that reads what was packed, and may write over it.

        That is of a plan with scratch, which has a use for the memory. A captured backward can be
        replayed where its forward is not, whatever autograd says now.
        """
        if packed[0] is None or keeps_autograd_graph():
            return False
        return not is_captured(packed[0])

    def run_forward(
        self, tensors: tuple[Tensor | None, ...], run: "CallRun | None" = None
    ) -> tuple[Any, Sequence[Tensor]]:
        """Run the forward over the tensors that ``plans.tensors`` names.

        `run` has what is its own; None: this call has.
        """
        plans, parts = self.plans, tensors
        own = self if run is None else run
        if self.splits:
            for split in reversed(self.splits):
                tensors = split.join(tensors, self.traced)
        if plans.reads_caches:
            for i in plans.reads_caches:
                tensors = (*tensors, *own.caches[i])
        if plans.drawn or self.unused_pairs:
            count = len(plans.drawn) + len(self.unused_pairs)
            pairs = draw_pairs(tensors[0], count, self.fills)
            if self.unused_pairs:
                pairs = [pair for i, pair in enumerate(pairs) if i not in self.unused_pairs]
            tensors = (*tensors, *pairs)
        given = tensors if plans.pick_inputs.all else plans.pick_inputs(tensors, self.traced)
        results = self._run_forward(given, own)
        count = plans.result_count
        if plans.returned:
            out = self._returned(results)
            out = out if count == 0 else (out, *results[:count])
        else:
            out = results[0] if count == 1 else results[:count]
        if plans.writes_caches:
            for i, places in plans.writes_caches:
                own.caches[i] = tuple([None if at is None else results[at] for at in places])
        if plans.backward is None:
            return out, ()
        saved = plans.pick_saved((*results, *tensors), self.traced)
        return out, self._save_parts(saved, parts) if self.splits else saved

    def _returned(self, made: tuple) -> Any:
        """The first result, a quantized tensor, of what the forward's plan has made."""
        return quantized.returned(self, made, self.plans.returned, gradient=False)

    def _run_forward(self, given: tuple, own: "ModuleCall | CallRun") -> tuple:
        """Run the forward's plan, over the scaling state too."""
        plan, slots = self.plans.forward, self.owner_slots[0]
        if not self.plans.forward_state:  # nothing is cast, or by scales of its own
            return self._run(plan, (0,), given, 0)
        if own.scales is not None:
            if own.unread_history is None:
                return self._run(plan, (0,), (*given, own.scales), 0)
            return self._run(plan, (0,), (*given, own.scales, own.unread_history), 1)
        given = (*given, slots.forward_scale, slots.forward_history)
        return self._run(plan, (slots.forward_slot,), given, 1)

    def run_backward(
        self, grads: tuple[Tensor, ...], saved: Sequence[Tensor], run: "CallRun | None" = None
    ) -> tuple[Tensor | None, ...]:
        """Run the backward: None, then the gradient of each tensor of the forward."""
        plans = self.plans
        own = self if run is None else run
        weights = own.weights
        if self.splits:
            saved = self._join_saved(saved)
        packed, saved = saved[: plans.saves_packed], saved[plans.saves_packed :]
        if type(grads[0]) is not Tensor and is_quantized(grads[0]):
            plans, grads, forms = quantized.gradient_of(self, grads)
        if plans.pick_given is not None:
            given = plans.pick_given((*grads, *forms, *saved))
        else:
            if not plans.pick_grads.all:
                grads = plans.pick_grads(grads, self.traced)
            given = (*grads, *saved) if not plans.defer else (*grads, *saved[: plans.reads_saved])
        main = plans.main_grads if not plans.defer else ()
        into = tuple([main_grad_of(weights[i]) for i, _ in main]) if main else ()
        results = self._run_backward(plans, given, packed, into)
        if plans.defer:
            inputs = plans.pick_deferred((*results[:-1], *saved, *grads), self.traced)
            # A plan that reads a tensor with leading dims takes the number of rows from that.
            rows = -1 if plans.wgrad_has_rows else grads[0].shape[:-1].numel() // plans.gathers
            saved_packed = packed[0] if packed else None
            scope = None if self.traced else _core.selected()
            deferred = plans, list(inputs), saved_packed, rows, weights, scope, self.group
            self.queue.append(Deferred(*deferred))
        if own.updates_backward:
            scaling.update("backward", own.domain)
        if plans.all_gradients and not self.splits:
            return None, *results[:-1]
        found: Sequence = [None if at < 0 else results[at] for at in plans.places]
        if plans.returned_grad:
            found[0] = quantized.returned(self, results, plans.returned_grad, gradient=True)
        for i, place in main:
            found[place] = dummy_grad(weights[i])
        for split in self.splits:
            found = split.spread(found)
        return None, *found

    def _run_backward(self, plans: CallPlans, given: tuple, packed: tuple, main: tuple) -> tuple:
        """Run the backward of some plans, over the scaling state and main gradients too."""
        slots = self.owner_slots[0]
        slot, written = 0, len(main)
        if slots is not None and plans.backward_state:
            if not self.traced and reduction.STARTED:
                slots.settle("backward")
            given = (*given, slots.backward_scale, slots.backward_history)
            slot, written = slots.backward_slot, written + 1
        return self._run(plans.backward, (slot,), (*given, *main), written, packed)

    def _save_parts(self, saved: Sequence[Tensor], given: tuple) -> Sequence[Tensor]:
        """Save the weights themselves, and not what they make up: the first one in its place.

        So autograd sees a change of any of them, and a framework that frees and restores parameters
        (FSDP) finds them. The other weights come last.
        """
        kept = list(saved)
        for split in self.splits:
            place = self.plans.weight_places[split.part]
            if place >= 0:
                kept[place], *others = split.weights(given)
                kept += others
        return kept

    def _join_saved(self, saved: Sequence[Tensor]) -> Sequence[Tensor]:
        """Undo `_save_parts`."""
        found, end = list(saved), len(saved)
        for split in reversed(self.splits):
            place = self.plans.weight_places[split.part]
            if place >= 0:
                begin = end - len(split.weight.rows) + 1
                parts = (found[place], *found[begin:end])
                found[place], end = split.weight.join(parts, self.traced), begin
        return found[:end]


_GONE: Any = object()
"""Stands for the slots of an owner in a call that is kept without them."""


class LayerCall(ModuleCall):
    """One call of a layer, whose modules lend it their parameters and slots."""

    first_module = (0, 0)
    """Begin and end of the gradients of the first module, among what `run_backward` gives."""

    def over(self, owner_slots: tuple) -> "LayerCall":
        """The same call over other slots."""
        made = copy.copy(self)
        made.set_owner_slots(owner_slots)
        return made

    def released(self) -> "LayerCall":
        """The same call over no slots: it can not run, and keeps none alive."""
        made = copy.copy(self)
        made.owner_slots = tuple([None if slots is None else _GONE for slots in self.owner_slots])
        made._state = made._slots = made._domains = ()
        return made

    def set_owner_slots(self, owner_slots: tuple) -> None:
        """Run over these slots, whose chunks and numbers are read once, here."""
        self.owner_slots = owner_slots
        self._domains = {slots.domain for slots in owner_slots if slots is not None}
        state = {"forward": self.plans.forward_state, "backward": self.plans.backward_state}
        self._state = tuple(
            tuple(getattr(owner_slots[of], f"{direction}_{what}") for what, of in links)
            for direction, links in state.items()
        )
        self._slots = tuple(
            tuple(
                0 if slots is None else getattr(slots, f"{direction}_slot") for slots in owner_slots
            )
            for direction in state
        )

    def _run_forward(self, given: tuple, own: "ModuleCall | CallRun") -> tuple:
        slots, state = self._slots[0], self._state[0]
        if own.scales is not None:  # of each owner those of the call that it repeats
            state = tuple([own.scales[of] for _, of in self.plans.forward_state])
            slots = (0,) * len(slots)
        # Scales are among those that are said to be written.
        return self._run(self.plans.forward, slots, (*given, *state), len(state))

    def _run_backward(self, plans: CallPlans, given: tuple, packed: tuple, main: tuple) -> tuple:
        if not self.traced and reduction.STARTED:
            for domain in self._domains:
                scaling.settle(domain, "backward")
        state = (*self._state[1], *main)
        given = (*given, *state)
        return self._run(plans.backward, self._slots[1], given, len(state), packed)


class CallRun:
    """A run of a call that is made again (see `autograd.Call`), with what is its own.

    The attributes but `call` are as of `ModuleCall`.
    """

    __slots__ = (
        "caches",
        "call",
        "domain",
        "scales",
        "unread_history",
        "updates_backward",
        "weights",
    )
    traced = False

    def __init__(self, call: ModuleCall, caches: Sequence = (), weights: tuple = ()) -> None:
        self.call, self.caches, self.weights = call, caches, weights
        self.updates_backward, self.domain = call.updates_backward, call.domain
        self.scales = self.unread_history = None

    @property
    def label(self) -> str:
        """Of the call."""
        return self.call.label

    def run_forward(self, tensors: tuple) -> tuple[Any, Sequence[Tensor]]:
        """Run the forward."""
        result = self.call.run_forward(tensors, self)
        self.caches, self.scales, self.unread_history = (), None, None
        return result

    def run_backward(self, grads: tuple, saved: tuple) -> tuple:
        """Run the backward: None, then the gradient of each tensor of the forward."""
        run, unused = self, False
        if len(grads) > 1:  # None for a result that nobody has used
            unused = grads[0] is None
            some = grads[1] if unused else grads[0]
            grads = tuple([some.new_zeros(some.shape) if g is None else g for g in grads])
            main = [i for i, _ in self.call.plans.main_grads if i > 0] if unused else ()
            for i in main:  # nobody wants the gradients behind the first module
                weights = run.weights
                nowhere = SimpleNamespace(main_grad=torch.zeros_like(main_grad_of(weights[i])))
                run = CallRun(self.call, (), (*weights[:i], nowhere, *weights[i + 1 :]))
                run.updates_backward, run.domain = self.updates_backward, self.domain
        found = self.call.run_backward(grads, saved, run)
        if not unused:
            return found
        begin, end = self.call.first_module
        return tuple([g if i == 1 or begin <= i < end else None for i, g in enumerate(found)])
