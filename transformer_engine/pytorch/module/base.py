# SPDX-License-Identifier: Apache-2.0
"""Base of modules with FP8 GEMMs: scaling state, region, checkpoints."""

import copy
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent, config, unread_variables
from transformer_engine.common.operand_casts import quantization_of
from transformer_engine.common.recipe import DelayedScaling, QuantizerRole, Recipe
from transformer_engine.pytorch.execution import recompute
from transformer_engine.pytorch.execution.recompute_frames import Entry
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.module import program_names
from transformer_engine.pytorch.module.fp8_meta import Fp8Meta, live_values
from transformer_engine.pytorch.module.parameters import keep_marks, marks_of
from transformer_engine.pytorch.module.program_names import *  # noqa: F403 - programs import them from here
from transformer_engine.pytorch.module.region import Region
from transformer_engine.pytorch.scaling_state import arenas, scaling
from transformer_engine.pytorch.scaling_state.extra_state import KEY, pack_state, unpack_state
from transformer_engine.pytorch.torchside.modes import (
    beside_graph,
    constant_in_graphs,
    exporting,
    graph_task,
    real_tensors,
    trace_again,
    unseen,
)
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized

_LAZY = {"initialize_ub": "transformer_engine.pytorch.module.user_buffers"}
__getattr__, __dir__ = absent.attach(globals(), (), _LAZY)
__all__ = [
    "Fp8Module",
    "NativeModule",
    "Region",
    "TransformerEngineBaseModule",
    *_LAZY,
    *program_names.__all__,
    *absent.names_of(__name__),
]


_NUMBERS = itertools.count(1)
_SHORT = {"forward": "fwd", "backward": "bwd"}


class NativeModule(torch.nn.Module):
    """Base of the modules whose forward calls native code."""

    def __init__(self) -> None:
        super().__init__()
        config.warn_of_unread(unread_variables.RUN)

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Called by `torch.nn.Module` instead of ``forward`` while `torch.jit` traces."""
        raise NotImplementedError(
            f"{type(self).__name__}: torch.jit.trace would record the output as a constant; use "
            "torch.compile"
        )

    def _marks(self) -> dict[str, dict[str, Any]]:
        """Marks of the module's own parameters, by name."""
        return {name: marks_of(p) for name, p in self._parameters.items() if p is not None}

    def _keep_marks(self, marks: Mapping[str, dict[str, Any]]) -> None:
        for name, given in marks.items():
            keep_marks(given, self._parameters[name])

    def _apply(self, fn: Callable, recurse: bool = True) -> "NativeModule":
        """Convert or move the parameters; new ones have the marks of those before."""
        marks = self._marks()
        super()._apply(fn, recurse)
        self._keep_marks(marks)
        return self

    def _load_from_state_dict(self, *given: Any) -> None:
        """Load; parameters that are assigned have the marks of those before."""
        marks = self._marks()
        super()._load_from_state_dict(*given)
        self._keep_marks(marks)

    def __getstate__(self) -> dict:
        """Copy and pickle with the marks of parameters, which copies of them have not."""
        return {**super().__getstate__(), "_copied_marks": self._marks()}

    def __setstate__(self, state: dict) -> None:
        """Restore a copy or a pickle."""
        marks = state.pop("_copied_marks", {})
        super().__setstate__(state)
        self._keep_marks(marks)

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set an attribute that is no parameter, buffer or module, past `torch.nn.Module`."""
        object.__setattr__(self, name, value)

    def module_setattr(self, name: str, value: Any) -> None:
        """Set an attribute as `torch.nn.Module` does."""
        torch.nn.Module.__setattr__(self, name, value)


class Fp8Module(NativeModule):
    """Base of the modules that run GEMMs in FP8.

    A module owns `SLOTS` consecutive slots of the forward and of the backward scaling state. They
    are no buffers (``half()`` would cast them): they live in shared chunks and follow the module to
    another device, recipe or copy at its next FP8 forward.
    """

    SLOTS: tuple[int, int]
    """Slots of the forward and of the backward state."""
    name: str | None = None
    """Given by the user, for messages."""
    output_quantizer_role: QuantizerRole | None = None
    """Role of the output, for the caller's own use: outputs stay in high precision."""
    grad_input_quantizer_role: QuantizerRole | None = None
    """Role of the gradient of the input, likewise."""
    _number = 0
    """Counts modules in the order in which they are made; a copy has that of the original."""
    _version = 0
    """Another one where calls have to be decided anew, those of layers around it too."""
    _trained_under: str | None = None
    """Class of the recipe of the last training call."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        if name is not None:
            self.__dict__["name"] = name
        self.__dict__["_number"] = next(_NUMBERS)
        self._slots: scaling.Slots | None = None
        self._loaded_state: dict | None = None  # of a checkpoint or a copy, until slots exist
        self._lacks_scales = False  # weights were loaded in place, scales were not
        self._quantization: tuple | None = None  # (repr of a recipe, its Quantization, recipe)

    def _forget_calls(self) -> None:
        """Decide anew what a call is."""
        self.__dict__.update(_kept_calls={}, _version=self._version + 1)

    # ---- region ------------------------------------------------------------------------------

    def _region(self, traced: bool) -> Region:
        """Return the state in force for a call that begins now; `traced`: a graph is traced."""
        state = current_state()
        recipe = state.recipe if state.enabled else None
        if traced:
            recipe = self._resolved(recipe, True)
            return Region(state, recipe, traced=True, exported=exporting())
        self._note_recipe(recipe)
        recipe = self._resolved(recipe, False)
        if not recompute.may_concern(torch.is_grad_enabled(), recipe is not None):
            return Region(state, recipe)
        record, replay = recompute.frames()
        if replay is not None:
            entry = replay.replay(self)
            if entry is None and recipe is None:
                return Region(state, None, record)  # it was no FP8 call
            if entry is None:
                raise RuntimeError(
                    f"{type(self).__name__}: FP8 in the recompute of a checkpointed forward that "
                    "did not run it in FP8; the function under the checkpoint must do the same "
                    "at each call"
                )
            return Region(state, entry.recipe, record, replay, (entry,))
        if recipe is not None and graph_task() != -1:
            raise RuntimeError(
                f"{type(self).__name__}: FP8 forward inside a backward, but not under a known "
                "checkpoint, so the scales of the first forward are not known. Use "
                "transformer_engine.pytorch.checkpoint or torch.utils.checkpoint for the recompute"
            )
        return Region(state, recipe, record)

    def _resolved(self, recipe: Recipe | None, traced: bool) -> Recipe | None:
        """The recipe that this module follows where one is in force; None: high precision."""
        del traced
        return recipe

    def _note_recipe(self, recipe: Recipe | None) -> None:
        """Tell the program where training goes on under another kind of recipe."""
        if recipe is None or not torch.is_grad_enabled() or graph_task() != -1:
            return
        now, before = type(recipe).__name__, self._trained_under
        if now != before:
            self.__dict__["_trained_under"] = now  # no setting: calls stay kept
            if before is not None:
                scaling.warn_of_switch(type(self).__name__, before, now)

    def _recipe_in_force(self) -> Recipe | None:
        """The recipe of this module's calls in the region of this thread."""
        return current_state().recipe

    def _record(
        self,
        region: Region,
        slots: scaling.Slots | None,
        updates_backward: bool,
        cache: tuple | None = None,
        kept: tuple[int, ...] = (),
        layer: int = 0,
    ) -> None:
        """Leave what a recompute of this call needs (see `recompute_frames.Entry`)."""
        if region.replays:
            entry = region.replays[0]._replace(updates_backward=updates_backward)
        else:
            scales, measures = None, 0
            if slots is not None:
                measures = slots.measures
                last = slots.forward_slot + self.SLOTS[0]
                with unseen():
                    scales = slots.forward_scale[slots.forward_slot : last].clone()
            domain = region.state.domain
            state = slots, scales, measures, cache, kept
            entry = Entry(self, region.recipe, *state, updates_backward, domain, layer)
        for frame in region.record:
            frame.record(entry)

    def _quantization_of(self, recipe: Recipe, traced: bool) -> Any:
        """Quantization of a recipe, remembered for the recipe used last."""
        if traced:
            return quantization_of(recipe)
        if getattr(recipe, "quantizations", None) is not None:
            self._quantization = (repr(recipe), recipe.quantizations[0], recipe)
            return recipe.quantizations[0]
        identity = repr(recipe)
        known = self._quantization
        if known is None or known[0] != identity:
            known = self._quantization = (identity, quantization_of(recipe), recipe)
        return known[1]

    # ---- scaling state -------------------------------------------------------------------------

    def _slots_for(
        self, recipe: DelayedScaling, group: Any, device: torch.device, traced: bool = False
    ) -> scaling.Slots:
        """Slots of this module under a delayed-scaling recipe, on a device."""
        state = current_state()
        if traced:
            self._ensure_slots(*arenas.rule_of(recipe)[:-1], group, device)
            beside_graph(arenas.adopt, state, self._slots.domain)
            return self._slots
        slots = self._slots
        if not self._slots_fit(arenas.identity_of(recipe), group, device):
            slots = self._make_slots(arenas.rule_of(recipe), group, device)
        if slots.domain.label != state.label and (
            torch.is_grad_enabled() or state.calibrating or recompute.in_reentrant_forward()
        ):
            arenas.join(state, slots.domain)
            slots.settle()  # the region was entered for another domain
        return slots

    def _scales_to_export(self, device: torch.device) -> Tensor:
        """Forward scales that an exported program computes with, for ever."""
        scales = self._constant_scales(device)
        if scales is None:
            raise RuntimeError(
                f"{type(self).__name__}: torch.export under DelayedScaling takes the scales that "
                "the module has found, and it has none: run it under this recipe first, load a "
                "checkpoint that has them, or export under Float8CurrentScaling"
            )
        return scales

    @constant_in_graphs
    def _constant_scales(self, device: torch.device) -> Tensor | None:
        """Copy of the forward scales outside of the graph, or None where there are none."""
        with real_tensors():
            values = self._state_values()
            return None if values is None else values["forward"][0].to(device)

    def _slots_fit(self, identity: str, group: Any, device: torch.device) -> bool:
        slots = self._slots
        return (
            slots is not None
            and slots.current
            and slots.identity == identity
            and slots.device == device
            and slots.group is group
            and self._loaded_state is None
        )

    @constant_in_graphs
    def _ensure_slots(self, *arguments: Any) -> None:
        """Make slots while a graph is traced, outside of the graph.

        Takes the fields of a rule, the group and the device one by one: plain values, so that a
        graph does not depend on the identity of a recipe object.
        """
        rule = scaling.Rule(*arguments[:-2], None)
        group, device = arguments[-2:]
        before = scaling.extent()
        if rule.scale is not None:  # it is given the recipe, which is no plain value
            recipe = current_state().recipe
            if recipe is None or repr(recipe) != rule.identity:
                raise NotImplementedError(
                    "scaling_factor_compute_algo with autocast inside a compiled function: enter "
                    "autocast outside of it"
                )
            rule = rule._replace(recipe=recipe)
        if not self._slots_fit(rule.identity, group, device):
            self._make_slots(rule, group, device)
        state = current_state()
        if state.label >= 0:
            arenas.join(state, self._slots.domain)
        self._keep_recipe(arenas.identity_of, rule.identity)
        if scaling.extent() != before and scaling.is_traced():
            trace_again("an update of scales is in the graph, and there are more of them now")

    def _keep_recipe(self, text_of: Callable, identity: str) -> None:
        """Remember the recipe of a graph that is being traced, where autocast is outside of it.

        Of the recipe in force there `text_of` gives `identity`.
        """
        recipe = self._recipe_in_force()
        if recipe is not None and text_of(recipe) == identity:
            self._quantization_of(recipe, False)
            self._note_recipe(recipe)

    def _make_slots(self, rule: scaling.Rule, group: Any, device: torch.device) -> scaling.Slots:
        """New slots, with the values that this module has or has loaded."""
        current = self._slots
        if current is not None and not current.live:
            current = None
        which = self._described(), self._number
        slots = scaling.slots_of(current, rule, group, device, self.SLOTS, *which)
        if self._loaded_state is not None:
            slots.load(self._loaded_state)
            self._loaded_state = None
        elif current is None and self._lacks_scales:
            scaling.warn_of_fresh_scales()
        self._lacks_scales = False
        self._slots = slots
        module = weakref.ref(self)
        slots.changed = lambda: _forget_calls_of(module())
        return slots

    def _label(self) -> str:
        """Class and name, for messages and profilers."""
        kind, name = type(self).__name__, self.name
        return kind if name is None else f"{kind}[{name}]"

    def _described(self) -> str:
        """Class, name and sizes: the same on all ranks that run this module."""
        return self._label()

    def _state_values(self) -> dict | None:
        """Copies of the scaling state, or None where there is none."""
        if self._loaded_state is not None:
            return self._loaded_state
        if self._slots is None or not self._slots.live:
            return None
        return self._slots.values()

    # ---- what programs ask ---------------------------------------------------------------------

    @property
    def fp8(self) -> bool:
        """True where a call that begins now runs in FP8."""
        return current_state().enabled

    @property
    def fp8_calibration(self) -> bool:
        """True where a call that begins now records amaxes in high precision."""
        return current_state().calibrating

    @property
    def fp8_initialized(self) -> bool:
        """True where the module has run in FP8, or loaded what one that did has saved."""
        return self._quantization is not None or live_values(self) is not None

    @property
    def primary_weights_in_fp8(self) -> bool:
        """True where parameters are quantized tensors."""
        return any(is_quantized(p) for p in self._parameters.values() if p is not None)

    @property
    def fp8_meta(self) -> Fp8Meta:
        """Recipe, scales and amax histories as a mapping; see `Fp8Meta`."""
        return Fp8Meta(self)

    # ---- what programs call, and calls of the module do not need -------------------------------

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Nothing: this module has no parameters of its own."""
        del defer_init

    def need_backward_dw(self) -> bool:
        """Return whether a backward leaves the weight gradient to `backward_dw`."""
        return getattr(self, "delay_wgrad_compute", False)

    def backward_dw(self) -> None:
        """Nothing: this module has no weight gradient that a backward would leave out."""

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable
    ) -> None:
        """Have a function called without arguments when `backward_dw` has made a gradient."""
        self.__dict__.setdefault("_wgrad_hooks", []).append(wgrad_accumulation_and_reduce_hook)

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

    def get_quantizer_roles(
        self, *, fwd: bool, num_quantizers: int
    ) -> list[QuantizerRole | None] | None:
        """Roles of the quantizers of a direction; None: the module asks for none by role."""
        del fwd, num_quantizers

    @property
    def is_fsdp2(self) -> bool:
        """True where FSDP2 has sharded the parameters."""
        return any(hasattr(p, "device_mesh") for p in self._parameters.values())

    def is_debug_iter(self) -> bool:
        """Return whether debug features look at this iteration: never."""
        return False

    def no_debug_features_active(self, quantizers: Any) -> bool:
        """Return whether no debug feature changes what quantizers do: always."""
        del quantizers
        return True

    def set_nccl_overlap_warning_if_tp(self) -> None:
        """Nothing: communication is not overlapped with GEMMs."""

    # ---- copies and checkpoints ----------------------------------------------------------------

    def __getstate__(self) -> dict:
        """Copy and pickle with the values of the scaling state, not with its chunks."""
        state = super().__getstate__()
        state["_loaded_state"] = self._state_values()
        state["_slots"] = None
        state["_quantization"] = None
        return state

    def __deepcopy__(self, memo: dict) -> "Fp8Module":
        """Copy what pickling would take along.

        The class that `torch.nn.utils.parametrize` makes refuses to be pickled, and would copy all
        attributes, the chunks of the scaling state too, where there were no method of ours.
        """
        kind = type(self)
        parametrized = torch.nn.utils.parametrize.is_parametrized(self)
        state = (kind.__bases__[0] if parametrized else kind).__getstate__(self)
        memo[id(self)] = twin = kind.__new__(kind)
        twin.__setstate__(copy.deepcopy(state, memo))
        return twin

    def get_extra_state(self) -> Tensor:
        """Delayed-scaling state as a 1-D uint8 tensor.

        Of no elements where there is none and none is expected. Fresh state where the module has
        none, but the recipe in force or the program's earlier calls say that it will have: loaders
        that read into what a state dict offers need an entry of the right size.
        """
        values = self._state_values()
        if values is None and config.TE_EXTRA_STATE.get() != "ignore":
            length = scaling.expected_length(self._recipe_in_force())
            if length is not None:
                values = scaling.fresh_values(length, self.SLOTS)
        state = pack_state(values)
        # transformers: nothing is missing, and nothing to initialise, where a checkpoint has none.
        state._is_hf_initialized = True
        return state

    def set_extra_state(self, state: Tensor | None) -> None:
        """Take over what `get_extra_state` gave: 1-D uint8.

        None, torch's placeholder for it and an empty tensor change nothing. TypeError or ValueError
        where it is not such a tensor, it is damaged, or no training made it; RuntimeError where
        another package wrote it as a pickle, which is never loaded. The module keeps what it had.
        """
        values = unpack_state(state, self.SLOTS)
        if values is not None and (self._has_state() or not scaling.is_fresh(values)):
            self._put_state(values)

    def _put_state(self, values: dict | None) -> None:
        """Take over values of the scaling state; None: those of a new module."""
        slots = self._slots
        if values is None:
            self._loaded_state = None
            if slots is not None and slots.live:
                slots.load(scaling.fresh_values(1, (1, 1)))
            return
        if slots is not None and slots.live and slots.fits(values):
            slots.load(values)  # in place: graphs, compiled or captured, read this memory
            self._loaded_state = None
        else:
            self._loaded_state, self._slots = values, None

    def _has_state(self) -> bool:
        live = self._slots is not None and self._slots.live
        return live or self._loaded_state is not None

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        """Save; empty scaling state only where variables themselves are asked for.

        That is how programs describe what they are going to load (megatron-core's sharded state
        dicts): what is not described would not be loaded.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        key = prefix + KEY
        state = destination[key]
        if not isinstance(state, Tensor):
            return  # a subclass's own: megatron-core has one that gives None
        destination[key] = state = state.detach()  # without the mark for transformers
        mode = config.TE_EXTRA_STATE.get()
        if state.numel() > 0 or keep_vars or mode == "always":
            return
        own = [p for p in self._parameters.values() if type(p) is torch.nn.Parameter]
        if mode == "auto" and any(p.is_meta for p in own):
            # A model without memory lists what it takes: transformers loads nothing else into it.
            # One that FSDP2 has sharded does not: what deals out shards knows parameters alone.
            destination[key] = state.to("meta")
        else:
            del destination[key]  # a plain torch.nn state dict stays one

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        *lists: list[str],
    ) -> None:
        key = prefix + KEY
        unpack_state(state_dict.get(key), self.SLOTS, key)  # raises before a weight changes
        in_place = any(
            _is_same_memory(state_dict.get(prefix + name), parameter)
            for name, parameter in self._parameters.items()
        )
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *lists
        )
        if key in missing_keys:
            missing_keys.remove(key)
        ignored = config.TE_EXTRA_STATE.get() == "ignore"
        self._lacks_scales = in_place and not ignored and not self._has_state()


def _forget_calls_of(module: Fp8Module | None) -> None:
    if module is not None:
        module._forget_calls()


def _is_same_memory(given: Any, parameter: Tensor | None) -> bool:
    """Return whether a loader filled the parameter itself; of sharded ones, the local part."""
    if not isinstance(given, Tensor) or parameter is None:
        return False
    given, own = (getattr(t, "_local_tensor", t) for t in (given, parameter))
    if is_quantized(given) and is_quantized(own):
        given, own = given.get_data_tensors()[0], own.get_data_tensors()[0]
    return not own.is_meta and own.numel() > 0 and given.data_ptr() == own.data_ptr()


# ---- names that programs import ------------------------------------------------------------------

TransformerEngineBaseModule = Fp8Module
absent.attach_methods(Fp8Module, __name__, "TransformerEngineBaseModule")

_2X_ACC_FPROP, _2X_ACC_DGRAD, _2X_ACC_WGRAD = False, True, True
"""True where sums of FP8 products of a direction are promoted to fp32 on the way, by default."""
