# SPDX-License-Identifier: Apache-2.0
"""Calls of modules with linear layers: each is found by its key, or decided, planned and run.

`LinearCallBase._call` makes the key of a call (`_find_key`, see `call_key`) and runs the call kept
by it. Where there is none, `_decide` promotes the tensors, finds the recipe and the state in force,
gets the plans (`_prepare`, `_plans_for`), keeps all that by the key, and runs it.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common import graphs
from transformer_engine.common.graphs import LinearFlags
from transformer_engine.common.operand_casts import HIGH_PRECISION, Quantization, is_backward_wide
from transformer_engine.pytorch.execution import collectives
from transformer_engine.pytorch.execution.autograd import (
    run_call,
    run_forward_alone,
    run_without_backward,
)
from transformer_engine.pytorch.execution.recompute import may_concern
from transformer_engine.pytorch.execution.recompute_frames import unread_history
from transformer_engine.pytorch.execution.stages import Observer, Staged
from transformer_engine.pytorch.execution.thread_state import RegionState, current_state
from transformer_engine.pytorch.module import custom_quantizers, quantized, weight_cache
from transformer_engine.pytorch.module.calibration import record_amaxes
from transformer_engine.pytorch.module.call import CallRun, LastCall, ModuleCall
from transformer_engine.pytorch.module.call_key import (
    KeptCall,
    call_key,
    converted,
    keep,
    key_of_quantized,
)
from transformer_engine.pytorch.module.joined import SplitTensors
from transformer_engine.pytorch.module.linear_plans import LinearPlans
from transformer_engine.pytorch.module.main_gradients import TO_MAIN_GRAD, flag_of
from transformer_engine.pytorch.module.operands import (
    CallTensors,
    LinearTensors,
    conversions,
    dtypes_of,
    parameter_flags,
    promoted,
)
from transformer_engine.pytorch.module.parallel import ALONE, refuse_returned
from transformer_engine.pytorch.module.region import Region
from transformer_engine.pytorch.scaling_state import arenas, scaling
from transformer_engine.pytorch.torchside.device import on_cuda
from transformer_engine.pytorch.torchside.graph_breaks import Outside
from transformer_engine.pytorch.torchside.modes import (
    allows_tf32,
    begins_no_graph,
    beside_graph,
    constant_in_graphs,
    dispatch_modes,
    exporting,
    forward_gradients,
    without_memory,
)

_NOT_KEPT = (_core.RECIPE_NONE, _core.RECIPE_EXTERNAL)
"""Recipes of weights of which no quantized form is kept."""
_MEASURE = _core.LINEAR_MEASURE_OPERANDS | _core.LINEAR_MEASURE_GRAD
_OF_SLOTS = (None, None)
"""Scales and histories are those of the slots."""


class _BoundState(NamedTuple):
    """Quantization of a call, and the flags that follow for each part."""

    quantization: tuple[Quantization, ...]  # of each part
    flags: tuple[LinearFlags, ...]
    slots: scaling.Slots | None
    repeated: tuple[Tensor | None, Tensor | None]  # ``scales``, ``unread_history`` of `ModuleCall`
    caches: Sequence  # as of `ModuleCall`


class LinearCallBase(LinearPlans):
    """How `linear_base.LinearBase`, which has the parameters, is called."""

    zero_centered_gamma = False
    return_layernorm_output = False
    save_original_input = False
    _input_name = "inp"
    """Name of the input in messages; in a layer maybe that of the layer's argument."""
    _observer: Observer | None = None

    # ---- what a subclass says ------------------------------------------------------------------

    @abstractmethod
    def _linear_tensors(self) -> tuple[LinearTensors, ...]:
        """Weight and bias of each part, as a call reads them."""

    def _norm_tensors(self) -> tuple[Tensor, Tensor | None] | None:
        """Gamma and beta (None for RMSNorm); None without a norm."""
        return None

    @abstractmethod
    def _parameter_names(self) -> tuple[str | None, ...]:
        """Attribute of each tensor of a call after the input; None: it is none of its own."""

    def _split_tensors(self) -> SplitTensors | None:
        """How tensors of a call make up the one part's weight and bias; None for whole ones."""
        return None

    def _calibration_inputs(self, tensors: CallTensors) -> list[Tensor]:
        """Operands of each part's forward GEMM, in high precision."""
        return [tensors.input.detach()]

    # ---- a call --------------------------------------------------------------------------------

    def _call(
        self, inp: Tensor, is_first_microbatch: bool | None, returns: LinearFlags | None = None
    ) -> Any:
        """Run a call: the output, or (output, norm output).

        `returns` are the flags of what it returns in FP8: `VALUE_RETURN_QUANTIZED` of the output,
        or of the input where that is its gradient; None: nothing.
        """
        if torch.compiler.is_compiling():
            return self._call_traced(inp, is_first_microbatch, returns)
        state = current_state()
        own = self.__dict__  # in a class with __getattr__ an attribute takes longer
        if own.get("cache_weights"):
            is_first_microbatch = weight_cache.microbatch((self,), is_first_microbatch, state)
        recipe, region = state.recipe if state.enabled else None, None
        custom_made = recipe is not None and recipe.custom()
        if custom_made or may_concern(torch.is_grad_enabled(), recipe is not None):
            region = self._region(False)
            recipe = region.recipe
        key, tensors, shared = None, (), ((), ())
        if own["_present"] is not None:
            key, tensors, shared = self._find_key(state, recipe, region, inp, is_first_microbatch)
        if key is not None and (returns or own.get("sequence_parallel")):
            key = (key, returns, self.sequence_parallel and self._rows_join(inp))
        kept = None if key is None else own["_kept_calls"].get(key)
        if (
            kept is None
            or not (kept.records or not forward_gradients())
            or not kept.holds(self, state, region)
        ):
            found = key, shared[0]
            return self._decide(inp, is_first_microbatch, False, returns, region, found)
        if recipe is None and state.calibrating:
            record_amaxes(self, state, self._promote(inp, None)[0])
        own["_last_call"] = kept.ran
        if kept.quantized:
            own["_quantization"] = kept.quantization
        if kept.dtypes:
            tensors = converted(tensors, kept.dtypes)
        run = call = kept.call
        if region is not None or shared[0] or shared[1] or (state.owes_update and kept.updates):
            run = self._run_of(kept, state, region, shared)
        out = kept.apply(run, *tensors) if kept.records else run_forward_alone(run, tensors)
        if run is not call:
            self._finish(call, run.updates_backward, state, region, shared[0])
        return out

    @begins_no_graph
    def _run_of(
        self, kept: KeptCall, state: RegionState, region: Region | None, shared: tuple
    ) -> CallRun:
        """A run of a kept call; `shared` as of `_find_key`."""
        run = CallRun(kept.call, *shared)
        if region is None:
            run.updates_backward, run.domain = state.owes_update and kept.updates, state.domain
            return run
        run.updates_backward = kept.quantized and region.updates_backward(kept.records)
        run.domain = state.domain
        if region.replays:
            (replay,) = region.replays
            run.domain = replay.domain
            run.scales, run.unread_history = replay.scales, unread_history(replay)
        return run

    @begins_no_graph
    def _finish(
        self,
        call: ModuleCall,
        updates_backward: bool,
        state: RegionState,
        region: Region | None,
        caches: Sequence,
        parts: tuple[LinearTensors, ...] | None = None,
    ) -> None:
        """Take over what a run has made, and leave to checkpoints what its repetition needs.

        `caches` are those of the run; `parts` are the weights that it read, those of the module
        where None.
        """
        repeats = region is not None and bool(region.replays)
        kept = tuple([part for part, _ in call.plans.writes_caches])
        if updates_backward and not repeats:
            beside_graph(setattr, state, "owes_update", False)
        if kept and not repeats:
            recipe = state.recipe if region is None else region.recipe
            of = self._linear_tensors() if parts is None else parts
            weight_cache.keep_caches((self,), caches, (of,), (recipe,))
        if region is not None and region.record:
            cache = caches if kept or call.plans.reads_caches else None
            self._record(region, call.slots, updates_backward, cache, kept)

    def _call_traced(
        self, inp: Tensor, is_first_microbatch: bool | None, returns: LinearFlags | None
    ) -> Any:
        """`_call` while a graph is traced."""
        left_out = self._left_out(is_first_microbatch, returns)
        if left_out and exporting():
            kind = type(self).__name__
            raise NotImplementedError(f"{kind}: {left_out} in torch.export: leave it out there")
        if left_out:
            return _call_outside(self, inp, is_first_microbatch, returns)
        return self._decide(inp, is_first_microbatch, True, returns)

    def _left_out(self, is_first_microbatch: bool | None, returns: LinearFlags | None) -> str:
        """Feature of a call that no graph of torch.compile holds; "" where there is none.

        A graph holds plain tensors alone between the functions of autograd that it is made of, and
        what it keeps from call to call is the state of delayed scaling.
        """
        state = current_state()
        recipe = state.recipe
        if returns:
            return "fp8_output=True" if returns.output else "fp8_grad=True"
        if self._stages:
            return "override_stages"
        if not state.enabled:
            records = state.calibrating and recipe is not None and recipe.delayed()
            return "calibrating=True" if records else ""
        if recipe.custom():
            return "CustomRecipe"
        if is_first_microbatch is not None and not exporting():
            return "is_first_microbatch"
        return ""

    @begins_no_graph
    def _find_key(
        self,
        state: RegionState,
        recipe: Any,
        region: Region | None,
        inp: Tensor,
        is_first_microbatch: bool | None,
    ) -> tuple[tuple | None, tuple, tuple]:
        """Key of a call, its tensors, and `caches` and `weights` of its run (see `ModuleCall`).

        The last pair is "shared": the microbatches of a step read one cache, and add to one main
        gradient of a weight.
        """
        own, shared, forms = self.__dict__, ((), ()), ()
        if region is not None and custom_quantizers.calls_back(recipe):
            return None, (), shared
        if type(inp) is Tensor or self.NORM is not None:
            if recipe is None:
                identity, wide = (state.depth > 0) + 2 * state.calibrating, True
            else:
                identity, wide = recipe.__repr__(), recipe.backward_override is not None
            key, tensors = call_key(identity, inp, own["_present"], wide, region)
        else:
            key, tensors, forms = key_of_quantized(recipe, region, inp, own["_present"], self)
        weights = own["_quantized_parameters"]
        if weights:
            fp8 = recipe is not None and not recipe.custom()
            key, tensors = quantized.filled(key, tensors, weights, fp8)
        shares = is_first_microbatch is not None or own["fuse_wgrad_accumulation"] or weights
        if region is not None and region.replays:
            shares = shares or region.replays[0].cache is not None
        if key is not None and shares:
            shared, key = weight_cache.microbatch_of(
                (self,), is_first_microbatch, state, key, tensors if weights else (), region
            )
        if forms:
            shared = [*(shared[0] or (None,) * len(self.LINEARS)), forms], shared[1]
        return key, tensors, shared

    def _find_present(self, flat: tuple[Tensor | None, ...]) -> None:
        """Note which parameters a call consists of, where it consists of them alone."""
        names = self._parameter_names()
        pairs = list(zip(names, flat[1:], strict=False))  # fewer where weights were put together
        own = len(names) == len(flat) - 1
        own = own and all(t is None or self._parameters.get(name) is t for name, t in pairs)
        places = tuple(None if t is None else (self._parameters, name) for name, t in pairs)
        self._present, self._quantized_parameters = quantized.apart(places) if own else (None, ())

    @begins_no_graph
    def _decide(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None,
        traced: bool,
        returns: LinearFlags | None = None,
        region: Region | None = None,
        found: tuple[tuple | None, Sequence] = (None, ()),
    ) -> Any:
        """Decide a call, keep it by its key, and run it.

        `region` is that of the call if the caller has made it: `_region` takes an entry from the
        frame of a checkpoint, so it is called once a call. `found` are the key, None for a call
        without one, and the caches.
        """
        if region is None:
            region = self._region(traced)
        if not traced and isinstance(inp, Tensor) and without_memory(inp):
            region = region._replace(blank=True)
        tensors, weights = self._promote(inp, region.recipe, traced)
        if self.sequence_parallel:
            region = region._replace(joins=self._rows_join(inp))
        if region.state.calibrating and region.recipe is None and not region.blank:
            record_amaxes(self, region.state, tensors)
        call = self._prepare(tensors, region, is_first_microbatch, weights, returns)
        run = run_without_backward if call.plans.backward is None else run_call
        ran = None
        if not call.traced:
            ran = LastCall(call.plans, region.state.why() if region.recipe is None else None)
            self._keep(found, call, ran, tensors)
        out = run(call, *tensors.flat())
        self._finish(call, call.updates_backward, region.state, region, call.caches, tensors.parts)
        if ran is not None:
            self.__dict__["_last_call"] = ran
        return out

    def _keep(
        self,
        found: tuple[tuple | None, Sequence],
        call: ModuleCall,
        ran: LastCall,
        tensors: CallTensors,
    ) -> None:
        """Keep a call by its key, before it runs: a checkpoint may end a repetition in the middle.

        Not one that repeats a call over former slots, which it would keep alive.
        """
        if self._present is None:
            self._find_present(tensors.given)
        key, caches = found
        if key is None or not weight_cache.reads(call, caches):
            return
        if call.slots is None or call.slots is self._slots:
            call.dtypes = conversions(tensors.given, tensors.flat())
            keep(self._kept_calls, key, KeptCall(call, ran, self._quantization))

    def _promote(
        self, inp: Tensor, recipe: Any, traced: bool = False
    ) -> tuple[CallTensors, tuple[Tensor, ...]]:
        """Apply the dtype rules to the input and this module's tensors; these, and the weights.

        Each tensor is read once a call: a parametrization computes it, and may move on as it does.
        """
        own = self._parameters
        missing = [n for n in self._parameter_names() if n in own and own[n] is None]
        if missing:
            what = f"{type(self).__name__}: {', '.join(missing)} was set to None"
            raise TypeError(f"{what}: assign a parameter; bias=False makes one without biases")
        parts = self._linear_tensors()
        kind, norm = type(self).__name__, self._norm_tensors()
        quantization = () if recipe is None else self._quantizations(recipe, traced)
        usable = quantized.usable_parts(kind, parts, recipe, quantization)
        in_between = norm is not None or self._reads_together()
        given = (quantized.usable_input(inp, quantization, in_between), norm, usable)
        tensors = promoted(kind, self._sizes()[0][0], given, quantization, self._input_name)
        if not traced:
            tensors = tensors._replace(given=CallTensors(*given, tensors.output_dtype).flat())
        return tensors, tuple(part.weights[0] for part in parts)

    def _resolved(self, recipe: Any, traced: bool) -> Any:
        """The recipe that this module follows where one is in force; None: high precision.

        A `CustomRecipe` is asked for the quantizers of the module once.
        """
        if recipe is None or not recipe.custom():
            return recipe
        kind = type(self).__name__
        return custom_quantizers.remembered(
            self, recipe, lambda: custom_quantizers.resolve(recipe, kind, self.name, self.LINEARS)
        )

    def _prepare(
        self,
        tensors: CallTensors,
        region: Region,
        is_first_microbatch: bool | None,
        weights: tuple[Tensor, ...],
        returns: LinearFlags | None = None,
    ) -> ModuleCall:
        """Choose the plans and bind them to the state in force.

        `weights` are those of the module, one for each linear layer, before they were converted:
        they have ``main_grad``.
        """
        recipe = region.recipe
        inp, parts = tensors.input, tensors.parts
        flags, norm, behind = self._wanted(tensors, not region.exported)
        for i, weight in enumerate(weights):
            if flags[i].weight & _core.VALUE_GRADIENT:
                goes = LinearFlags(weight=self._wgrad_flags(weight, is_first_microbatch))
                flags[i] = flags[i].joined(goes)
        bound, measured = None, False
        if recipe is not None:
            bound = self._bind_state(tensors, region, is_first_microbatch)
            flags = [f.joined(g) for f, g in zip(flags, bound.flags, strict=True)]
            measured = any([f.node & _MEASURE for f in bound.flags])
            flags, caches = quantized.given_forms(tensors, recipe, flags, bound.caches, behind)
            if returns:
                quantized.add_returned(type(self).__name__, flags, returns, recipe, bound.slots)
        together = self._together(region, measured)
        if returns and recipe is not None:
            refuse_returned(type(self).__name__, returns, together)
        if is_backward_wide(recipe) and tensors.output_dtype is torch.float32:
            may = on_cuda(inp.device) and allows_tf32()
            tf32 = LinearFlags(_core.LINEAR_ALLOW_TF32 if may else 0)
            flags = [f.joined(tf32) for f in flags]
        dtypes = dtypes_of(tensors, weights, [f.weight & TO_MAIN_GRAD > 0 for f in flags])
        # A CustomRecipe is identified by its casts: its repr has the addresses of functions, which
        # later functions may have.
        identity = None if recipe is None else custom_quantizers.identity_of(recipe)
        recompute = self.checkpoint and behind[-1]
        device = torch.device("meta") if region.blank else inp.device  # else it would be prepared
        key = (device, identity, recompute, norm, together, tuple(flags), *dtypes)
        casts = (HIGH_PRECISION,) * len(parts) if bound is None else bound.quantization
        plans = self._plans_for(key, casts, region.traced)
        call = ModuleCall(plans, None if bound is None else bound.slots, self._label())
        call.traced = region.traced or region.blank
        call.group = None if together is ALONE else self.tp_group
        own = custom_quantizers.functions_of(recipe, weights, parts)
        call.staged = self._staged(call, own, region.traced)
        split = self._split_tensors()
        if split is not None and len(parts[0].weights) > 1:
            call.splits = (split._replace(begin=len(tensors.flat()) - split.count),)
        if bound is not None:
            call.scales, call.unread_history, call.caches = *bound.repeated, caches
            call.recipe, call.quantizers = recipe, {}
            call.updates_backward = not region.blank and region.updates_backward(behind[-1])
            call.domain = (region.replay or region.state).domain
            returned = returns is not None and returns.input > 0
            call.unused_pairs = plans.unused_pairs(casts, returned) if region.repeats else ()
        if any(f.weight & (TO_MAIN_GRAD | _core.VALUE_DEFER) for f in flags):
            call.weights = weights
            call.queue = self._wgrads
        return call

    def _staged(self, call: ModuleCall, own: dict, traced: bool) -> Staged | None:
        """Runner of functions at stages: of quantizers (`own`), of collectives, of the program."""
        functions = own
        if call.group is not None and not traced:
            functions = own | collectives.functions_of_call(call.plans, call.group)
        functions = functions | (self._stages or {})
        observer = None if traced else self._observer
        return Staged(functions, observer) if functions or observer is not None else None

    def _quantizations(self, recipe: Any, traced: bool) -> tuple[Quantization, ...]:
        """How each part casts under a recipe that this module follows."""
        found = self._quantization_of(recipe, traced)
        return custom_quantizers.of_parts(recipe, found, len(self.LINEARS))

    def _wanted(
        self, tensors: CallTensors, gradients: bool
    ) -> tuple[list[LinearFlags], tuple[int, ...], list[bool]]:
        """Flags of each part, those of the norm, and whether gradients of their inputs are wanted.

        Behind the last one whether any gradient is.
        """
        gradients = gradients and torch.is_grad_enabled()
        wanted, norm = gradients and tensors.input.requires_grad, ()
        first = LinearFlags(input=_core.VALUE_GRADIENT if wanted else 0)
        if tensors.norm is not None:
            gamma, beta = [parameter_flags((tensor,), gradients) for tensor in tensors.norm]
            node = _core.NODE_ZERO_CENTERED if self.zero_centered_gamma else 0
            made = graphs.RESULT if self.return_layernorm_output else _core.VALUE_LEADING
            norm = gamma, beta, node, made
            wanted = wanted or bool((gamma | beta) & _core.VALUE_GRADIENT)
        flags, behind = [], [wanted]
        for weights, biases in tensors.parts:
            weight, bias = [parameter_flags(each, gradients) for each in (weights, biases)]
            flags.append(LinearFlags(weight=weight, bias=bias))
            behind.append(behind[-1] or bool((weight | bias) & _core.VALUE_GRADIENT))
        flags[0] = flags[0].joined(first)
        return flags, norm, behind

    def _wgrad_flags(self, weight: Tensor, is_first_microbatch: bool | None) -> int:
        """Flags that say where the gradient of a weight goes."""
        flags = _core.VALUE_DEFER if self.delay_wgrad_compute else 0
        if self.fuse_wgrad_accumulation:
            flags |= flag_of(type(self).__name__, weight, is_first_microbatch)
        return flags

    def _bind_state(
        self, tensors: CallTensors, region: Region, is_first_microbatch: bool | None
    ) -> _BoundState:
        """State that an FP8 call quantizes with: that in force, or that of the call it repeats."""
        count = len(self.LINEARS)
        quantization = self._quantizations(region.recipe, region.traced)
        common = _core.LINEAR_SAVE_INPUT if self.save_original_input else 0
        replay = region.replay
        if replay is not None:
            watched = dispatch_modes() > 0
            caches = weight_cache.caches_to_repeat(replay, count, watched)
            of_weights = [0 if cache is None else graphs.WEIGHT_CACHED for cache in caches]
            history = unread_history(replay)
            for part in replay.kept if watched else ():
                of_weights[part] = _core.VALUE_KEEP_QUANTIZED
            no_amax = replay.scales is not None and history is None
            common |= replay.measures | _core.LINEAR_NO_AMAX * no_amax
            flags = tuple([LinearFlags(common, weight=of_weight) for of_weight in of_weights])
            return _BoundState(quantization, flags, replay.slots, (replay.scales, history), caches)
        slots = None
        if region.recipe.delayed():
            device = tensors.input.device
            if region.exported:
                scales = self._scales_to_export(device)
                flags = (LinearFlags(common | _core.LINEAR_NO_AMAX),) * count
                return _BoundState(quantization, flags, None, (scales, None), (None,) * count)
            if region.blank:
                slots = scaling.BlankSlots(arenas.rule_of(region.recipe), tensors.input)
            else:
                slots = self._slots_for(region.recipe, region.state.group, device, region.traced)
                self._bind_quantizers()
            common |= slots.measures | _core.LINEAR_MEASURE_OPERANDS * region.state.measures
        if is_first_microbatch is None or region.exported or region.blank:
            flags = (LinearFlags(common),) * count
            return _BoundState(quantization, flags, slots, _OF_SLOTS, (None,) * count)
        caches = weight_cache.held_caches(self, is_first_microbatch, tensors.parts, region.recipe)
        keeps = _core.VALUE_KEEP_QUANTIZED
        flags = tuple(
            LinearFlags(common)
            if q.weight.recipe in _NOT_KEPT
            else LinearFlags(common, weight=keeps if cache is None else graphs.WEIGHT_CACHED)
            for q, cache in zip(quantization, caches, strict=True)
        )
        return _BoundState(quantization, flags, slots, _OF_SLOTS, caches)

    @constant_in_graphs
    def _bind_quantizers(self) -> None:
        """Bind quantizers of weights; while a graph is traced, outside of the graph."""
        quantized.bind_quantizers(self)


@Outside
def _call_outside(module: LinearCallBase, *arguments: Any) -> Any:
    return module._call(*arguments)
