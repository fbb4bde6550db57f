# SPDX-License-Identifier: Apache-2.0
"""Base of the modules with linear layers: their parameters, settings, tools."""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common import config
from transformer_engine.common.plan_text import Plan
from transformer_engine.pytorch.execution.stages import (
    Halves,
    Observer,
    StageBuffers,
    external_steps,
    named,
)
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.module import custom_quantizers, quantized
from transformer_engine.pytorch.module.call import Deferred, LastCall
from transformer_engine.pytorch.module.call_key import KeptCall, KeptPlans
from transformer_engine.pytorch.module.linear_calls import LinearCallBase
from transformer_engine.pytorch.module.main_gradients import main_grad_of
from transformer_engine.pytorch.module.parameters import (
    add_grad,
    keep_marks_of,
    refuse_distributed,
    reset_linear,
)
from transformer_engine.pytorch.module.region import Region
from transformer_engine.pytorch.torchside.modes import replaces, without_memory
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized, local_of

_SHOWN = ("zero_centered_gamma", "return_layernorm_output", "return_bias")
_SHOWN += ("fuse_wgrad_accumulation", "delay_wgrad_compute", "save_original_input")
"""Settings that ``repr`` shows where they are on."""

_SIZES = ("in_features", "out_features", "hidden_size", "ffn_hidden_size")
_SETTINGS = (*_SIZES, *_SHOWN, "activation_spec", "apply_bias", "cache_weights", "checkpoint")
_SETTINGS += ("eps", "name", "return_layernorm_output_gathered")
_SETTINGS += ("parallel_mode", "set_parallel_mode", "sequence_parallel", "tp_size", "tp_group")
_SETTINGS += ("overlaps",)
"""Attributes that a call depends on and that users set after construction."""


class LinearBase(LinearCallBase):
    """Base of modules made of linear layers, with a norm before them or an activation between.

    The subclass calls `_begin` before it makes its parameters, and gives the tensors of a call.
    """

    _quantized_init: quantized.QuantizedInit | None = None
    """How the weights are quantized when they are made."""
    _plans: KeptPlans
    cache_weights = False
    """Keep quantized weights from call to call, until they change (docs/quantized_tensors.md)."""

    _READ_BY_PLANS = (*_SETTINGS, "NORM", "use_bias", "_stages")
    """Settings that plans of a layer depend on (see `traced_layer`)."""

    def _begin(
        self, name: str | None, biases: tuple[bool, bool], gradients: tuple[bool, bool]
    ) -> None:
        """Set what every instance has.

        `biases` are the arguments bias and return_bias, `gradients` fuse_wgrad_accumulation and
        delay_wgrad_compute.
        """
        self.name = name
        self.cache_weights = config.TE_CACHE_WEIGHTS.get()
        self._quantized_init = quantized.init_now(current_state())
        self.use_bias, self.return_bias = map(bool, biases)
        self.apply_bias = self.use_bias and not self.return_bias
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = map(bool, gradients)
        self._wgrads: deque = deque()
        self._forget_plans()
        self._weight_caches: tuple = (None,) * len(self.LINEARS)
        self._stages: dict[str, Callable] | None = None
        self._external = self._halves = (frozenset[int](),) * len(self.LINEARS)
        self._kept_calls: dict[tuple, KeptCall] = {}  # kept calls by their keys
        # Where the parameters of a call stand; None: not known, or it has others too.
        self._present: tuple[tuple[dict, str] | None, ...] | None = None
        self._quantized_parameters: tuple[quantized.QuantizedParameter, ...] = ()
        self._last_call: LastCall | None = None  # the last call

    # ---- what a subclass says ------------------------------------------------------------------

    @abstractmethod
    def _returned_bias(self, dtype: torch.dtype) -> Tensor:
        """The bias that ``return_bias=True`` returns beside an output of a dtype."""

    @abstractmethod
    def _initialisers(self) -> Iterable[tuple[str, Callable | None]]:
        """(prefix of the attribute names, init method) of each weight."""

    def add_bias(self) -> None:
        """Add the bias that ``return_bias=True`` returned beside the output, from now on."""
        if getattr(self, "return_bias", False):
            self.return_bias, self.apply_bias = False, self.use_bias

    def emit(self, nodes: Any, x: Any, name: str = "", **call: Any) -> Any:
        """Append its nodes over value `x`; return its output (see `layer_call`).

        `call` are other arguments of its forward, which are those of the whole layer here.
        """
        del call
        return nodes.linear(self, x, name, f"{name}output")[0]

    # ---- life ----------------------------------------------------------------------------------

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise the parameters; those on the meta device are made on the default device first.

        With `defer_init` do nothing.
        """
        if defer_init:
            return
        if self.NORM is not None:
            self.reset_layer_norm_parameters()
        for prefix, method in self._initialisers():
            reset_linear(self, prefix, method)
        if self._quantized_init is not None:
            names = [f"{prefix}weight" for prefix, _ in self._initialisers()]
            quantized.quantize_weights(self, names, self._quantized_init)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a setting counts from the next call on.

        A parameter that is assigned takes what was kept of the former one away: FSDP assigns the
        whole and the sharded one by turns, and their memory and versions do not tell their values.
        NotImplementedError for a `DistributedWeight`.
        """
        parameters = self.__dict__.get("_parameters", ())  # a subclass may set before __init__
        if name in parameters:
            refuse_distributed(type(self).__name__, name, value)
            former = parameters[name]
            if not replaces(self, name, value):
                super().__setattr__(name, value)
            keep_marks_of(former, parameters[name])
            self._forget_casts_of(name)
            return
        self._check_name(name)
        super().__setattr__(name, value)
        if name in _SETTINGS:  # calls and plans were remembered under the old setting
            self._forget_calls()
            self._forget_plans()
            self.__dict__["_present"] = None
        elif name == "_slots":  # calls that are bound to others would keep them
            self.__dict__["_kept_calls"] = {}

    def _check_name(self, name: str) -> None:
        """AttributeError for a name that can not be assigned to."""

    def _forget_plans(self) -> None:
        self.__dict__["_plans"] = KeptPlans()

    def _forget_casts_of(self, name: str) -> None:
        """Drop the cached cast of the weight that a parameter belongs to."""
        if any(self._weight_caches):
            kept = zip(self.LINEARS, self._weight_caches, strict=True)
            caches = tuple([None if name.startswith(part) else cache for part, cache in kept])
            self.__dict__["_weight_caches"] = caches
        quantized_ones = self._quantized_parameters
        known = len(quantized_ones) > 0 and name in [one.name for one in quantized_ones]
        if known != is_quantized(local_of(self._parameters[name])):  # FSDP2 has parts and wholes
            self._present, self._quantized_parameters = None, ()

    def _apply(self, fn: Callable, recurse: bool = True) -> "LinearBase":
        """Convert or move the parameters; what was kept of the old ones goes."""
        self._weight_caches = (None,) * len(self.LINEARS)
        self._forget_calls()
        first = {name: quantized.first_values(p) for name, p in self._parameters.items()}
        super()._apply(quantized.converted(fn), recurse)
        for name, value in first.items():
            if value is not None and is_quantized(self._parameters[name]):
                quantized.preserve(self._parameters[name], value)
        return self

    def _load_from_state_dict(self, *given: Any) -> None:
        """Load the module's own state; what was kept of the former weights goes.

        `torch.utils.swap_tensors`, by which torch may load, refuses what is referred to weakly.
        """
        self._weight_caches = (None,) * len(self.LINEARS)
        super()._load_from_state_dict(*given)

    def __getstate__(self) -> dict:
        """Copy and pickle without caches and pending weight gradients."""
        state = super().__getstate__()
        state |= {"_plans": KeptPlans(), "_kept_calls": {}, "_quantized_parameters": ()}
        state["_wgrads"] = deque()
        state |= dict.fromkeys(("_last_call", "_present", "_custom"))
        state["_weight_caches"] = (None,) * len(self.LINEARS)
        state.pop("_observer", None)
        return state

    def _replicate_for_data_parallel(self) -> "LinearBase":
        """Copy for `torch.nn.DataParallel`, without calls: its parameters are others."""
        made = super()._replicate_for_data_parallel()
        made.__dict__.update(_kept_calls={}, _present=None, _quantized_parameters=())
        return made

    # ---- what a forward returns ----------------------------------------------------------------

    def _results(self, inp: Tensor, out: Any) -> Any:
        """Select what a forward returns of the results of a call: output[, bias][, norm output]."""
        out, *normed = out if self.return_layernorm_output else (out,)
        normed = [self._norm_result(inp, tensor) for tensor in normed]
        biases = [self._returned_bias(out.dtype)] if self.return_bias else []
        return (out, *biases, *normed) if biases or normed else out

    def _norm_result(self, inp: Tensor, normed: Tensor) -> Tensor:
        """The norm's output as it is returned: what follows the norm gives it no gradient."""
        before = (inp, *self._norm_tensors())
        wanted = any(tensor is not None and tensor.requires_grad for tensor in before)
        return normed if wanted else normed.detach()

    def get_quantizer_roles(self, *, fwd: bool, num_quantizers: int) -> list:
        """Roles of the quantizers of a direction, in the order of the slots of the state.

        Of each linear layer input, weight and output forward, gradient of the output and of the
        input backward. Outputs and gradients of inputs are not cast: the last output and the first
        gradient of an input have the attributes ``output_quantizer_role`` and
        ``grad_input_quantizer_role``, others None. ValueError for another number.
        """
        roles: list = []
        for prefix in self.LINEARS:
            kinds = ("input", "weight") if fwd else ("grad_output",)
            roles += [*(custom_quantizers.role_of(self.name, prefix, kind) for kind in kinds), None]
        if num_quantizers != len(roles):
            raise ValueError(
                f"{type(self).__name__}.get_quantizer_roles: num_quantizers={num_quantizers}, "
                f"expected {len(roles)}"
            )
        if fwd:
            roles[-1] = self.output_quantizer_role
        else:
            roles[1] = self.grad_input_quantizer_role
        return roles

    # ---- weight gradients that were put off ----------------------------------------------------

    def backward_dw(self) -> None:
        """Compute the oldest weight gradients that a backward deferred.

        They are added to ``weight.grad`` (of each split weight), or to ``weight.main_grad`` with
        `fuse_wgrad_accumulation`. Does nothing without `delay_wgrad_compute`; RuntimeError where no
        weight gradient is pending.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._wgrads:
            raise RuntimeError(
                f"{type(self).__name__}.backward_dw: no weight gradient is pending; call it once a "
                "backward"
            )
        pending: Deferred = self._wgrads[0]
        plans = pending.plans
        state = [main_grad_of(pending.weights[i]) for i, _ in plans.main_grads]
        with torch.no_grad():
            outputs = iter(pending.run(state))
            self._wgrads.popleft()  # only now: a call that raised can be made again
            for i, part in enumerate(plans.parts):
                if not part.flags.weight & _core.VALUE_GRADIENT:
                    continue
                if i not in dict(plans.main_grads):
                    self._add_weight_grad(i, next(outputs))
                elif hasattr(pending.weights[i], "grad_added_to_main_grad"):
                    pending.weights[i].grad_added_to_main_grad = True
        for hook in self.__dict__.get("_wgrad_hooks", ()):
            hook()

    def _add_weight_grad(self, part: int, grad: Tensor) -> None:
        """Add to the ``grad`` of a part's weight."""
        add_grad(getattr(self, f"{self.LINEARS[part]}weight"), grad)

    # ---- tools and frameworks ------------------------------------------------------------------

    def plans_of(
        self, inp: Tensor, is_first_microbatch: bool | None = None
    ) -> list[tuple[str, Plan]]:
        """(title, plan) of what a call would run; see `explain`. Changes no state."""
        state = current_state()
        recipe = self._resolved(state.recipe if state.enabled else None, False)
        slots, loaded = self._slots, self._loaded_state
        region = Region(state, recipe, blank=without_memory(inp))
        tensors, owners = self._promote(inp, recipe)
        call = self._prepare(tensors, region, is_first_microbatch, owners)
        self._slots, self._loaded_state = slots, loaded
        plans = call.plans
        titles = ("forward", plans.forward), ("backward", plans.backward), ("wgrad", plans.wgrad)
        return [(title, plan) for title, plan in titles if plan is not None]

    def observe_stages(self, observer: Observer | None) -> None:
        """Let a function look at the stages of this module's plans from the next call on.

        ``f(stage, buffers, done)`` (see `stages.Observer`) is called before and after each stage;
        None ends it.
        The backward of a call that was observed is observed too. Calls inside compiled graphs are
        not.
        """
        self._observer = observer
        self._forget_calls()

    def override_stages(self, **stages: Callable[[StageBuffers], Any] | Halves) -> None:
        """Let Python functions run stages of this module's plans; none restores the built-in ones.

        ``f(buffers)`` by stage name (see `explain`, and `stages.StageBuffers`) fills the buffers
        that the stage writes. ``gemm_output`` is the forward GEMM, ``quantize_input`` the cast of
        the input, ``reduce_amax_input`` stands between measuring and casting (current scaling), and
        so on. `stages.Halves` runs a stage in two halves: other stages of the plan run between
        them. ValueError for a name that is no stage.
        """
        halves = {name: f for name, f in stages.items() if isinstance(f, Halves)}
        self._external = external_steps(stages, self.LINEARS)
        self._halves = external_steps(halves, self.LINEARS)
        self._stages = named(stages) or None
        self._forget_plans()
        self._forget_calls()
        self._weight_caches = (None,) * len(self.LINEARS)  # other stages have made them

    def _flags_text(self) -> list[str]:
        """Settings that differ from their defaults, for ``repr``."""
        return [f"{name}=True" for name in _SHOWN if getattr(self, name, False)]

    def _described(self) -> str:
        sizes = " and ".join(f"{columns} x {rows}" for columns, rows in self._sizes())
        return f"{super()._described()} {sizes}"
