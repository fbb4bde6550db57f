# SPDX-License-Identifier: Apache-2.0
"""`Linear`: y = x W^T + b with FP8 GEMMs inside `autocast`."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch import ops, scaling
from transformer_engine.pytorch.device import prepare_device
from transformer_engine.pytorch.function import apply_plainly, run_call
from transformer_engine.pytorch.module.base import Region
from transformer_engine.pytorch.module.linear_call import LinearCall, main_grad_of
from transformer_engine.pytorch.module.parameters import (
    Split,
    default_device,
    refuse_distributed,
    split_rows,
)
from transformer_engine.pytorch.module.repeat import Repeat, repeated_call
from transformer_engine.pytorch.module.weight_cache import WeightCache
from transformer_engine.pytorch.module.weights import WeightModule
from transformer_engine.pytorch.plans import (
    ACCUMULATE,
    ALLOW_TF32,
    BIAS,
    CACHE_READ,
    CACHE_WRITE,
    DEFER,
    DGRAD,
    HIGH_PRECISION,
    NO_AMAX,
    OVERWRITE,
    SAVE_INPUT,
    WGRAD,
    LinearPlans,
    LinearSpec,
    Quantization,
    linear_plans,
)
from transformer_engine.pytorch.staged import StageBuffers, external_bits
from transformer_engine.pytorch.state import RegionState, current_state

__all__ = ["Linear"]

DEVICES = ("cpu", "cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SETTINGS = ("apply_bias", "delay_wgrad_compute", "fuse_wgrad_accumulation", "save_original_input")
"""Attributes that decide which plans a call runs and that users set after construction."""


class _BoundState(NamedTuple):
    """What a call quantizes with, and the flags that follow."""

    quantization: Quantization
    flags: int
    slots: scaling.Slots | None
    scales: Tensor | None
    cache: tuple[Tensor, Tensor, Tensor] | None


_HIGH_PRECISION_STATE = _BoundState(HIGH_PRECISION, 0, None, None, None)


class Linear(WeightModule):
    """Linear layer, a drop-in for `torch.nn.Linear`, with FP8 GEMMs inside `autocast`.

    Parameters
    ----------
    in_features, out_features : int
        Sizes of an input and an output sample. Any size works; multiples of 16 need no padding.
    sequence_parallel, tp_group, tp_size, parallel_mode, symmetric_ar_type
        Tensor parallelism: not there yet, only the defaults are accepted.
    fuse_wgrad_accumulation : bool, default False
        Add the weight gradient to ``weight.main_grad`` (fp32 or bf16) inside its GEMM instead of
        returning it. Overwritten instead for ``is_first_microbatch=True`` or where
        ``weight.overwrite_main_grad`` is true.
    get_rng_state_tracker : callable, optional
        Returns a tracker whose ``fork(rng_tracker_name)`` is entered while parameters are made.
    rng_tracker_name : str, optional
        The name to fork.
    init_method : callable, optional
        ``f(weight)`` that initialises in place; normal with mean 0 and deviation 0.023 where None.
        Biases begin at 0.
    bias : bool, default True
        Have a bias.
    return_bias : bool, default False
        Return (output, bias) and leave adding the bias to the caller.
    params_dtype : torch.dtype, optional
        dtype of the parameters; torch's default dtype where None. ``dtype`` is an alias.
    parameters_split : sequence of str or dict of str to int, optional
        Keep the weight and bias as several parameters along the outputs, ``<name>_weight`` and
        ``<name>_bias``: equal parts for a sequence, the given sizes for a dict.
    device : torch.device or str, optional
        Where the parameters are made; "cuda" where there is one, else "cpu". On "meta" they have no
        data until `reset_parameters`.
    ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad, ub_name
        Communication overlap: not there yet.
    delay_wgrad_compute : bool, default False
        The backward leaves the weight gradient out; `backward_dw` computes it.
    save_original_input : bool, default False
        Keep the input itself for the backward, where another module keeps it anyway, instead of its
        FP8 copy. The numbers are the same.
    name : str, optional
        Name of the module for messages.

    Attributes
    ----------
    weight : Parameter
        [out_features, in_features] (unless split).
    bias : Parameter or Tensor
        [out_features]; an empty tensor where there is none.
    """

    SLOTS = (3, 2)

    def __init__(  # noqa: PLR0913 - the argument list that users know
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        refuse_distributed(
            "Linear",
            sequence_parallel=(sequence_parallel, False),
            tp_group=(tp_group, None),
            tp_size=(tp_size, 1),
            parallel_mode=(parallel_mode, None),
            ub_overlap_ag=(ub_overlap_ag, False),
            ub_overlap_rs=(ub_overlap_rs, False),
            ub_overlap_rs_dgrad=(ub_overlap_rs_dgrad, False),
            ub_bulk_dgrad=(ub_bulk_dgrad, False),
            ub_bulk_wgrad=(ub_bulk_wgrad, False),
            ub_name=(ub_name, None),
            symmetric_ar_type=(symmetric_ar_type, None),
        )
        for label, size in (("in_features", in_features), ("out_features", out_features)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"Linear: {label} = {size!r}, expected a positive int")
        if dtype is not None and params_dtype is not None and dtype != params_dtype:
            raise ValueError(f"Linear: dtype={dtype} and params_dtype={params_dtype} differ")
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = bool(bias)
        self.return_bias = bool(return_bias)
        self.apply_bias = self.use_bias and not self.return_bias
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        self.delay_wgrad_compute = bool(delay_wgrad_compute)
        self.save_original_input = bool(save_original_input)
        self.name = name
        self._init_method = init_method
        self._rng = (get_rng_state_tracker, rng_tracker_name)
        self._split = Split.of("Linear", parameters_split, out_features)
        self._wgrads: deque = deque()
        self._plans: dict[tuple, LinearPlans] = {}
        self._weight_cache: WeightCache | None = None
        self._stages: dict[str, Callable] | None = None
        self._external = 0
        self._last: Repeat | None = None
        device = torch.device(default_device() if device is None else device)
        dtype = params_dtype or dtype or torch.get_default_dtype()
        if self._split is not None and self.fuse_wgrad_accumulation:
            raise ValueError(
                "Linear: fuse_wgrad_accumulation and parameters_split: the split weights have no "
                "common main_grad"
            )
        self._make_parameters(device, dtype)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a setting counts from the next call on."""
        super().__setattr__(name, value)
        if name in _SETTINGS:
            self.__dict__["_last"] = None  # it was remembered under the old setting

    def _apply(self, fn: Callable, recurse: bool = True) -> "Linear":
        """Convert or move the parameters; what was kept of the old ones goes."""
        self._weight_cache = None
        self._last = None
        return super()._apply(fn, recurse)

    def __getstate__(self) -> dict:
        """Copy and pickle without caches and pending weight gradients."""
        state = super().__getstate__()
        state["_plans"] = {}
        state["_last"] = None
        state["_weight_cache"] = None
        state["_wgrads"] = deque()
        return state

    def extra_repr(self) -> str:
        """Sizes and what differs from the defaults."""
        parts = [f"in_features={self.in_features}", f"out_features={self.out_features}"]
        parts.append(f"bias={self.use_bias}")
        for flag in (
            "return_bias",
            "fuse_wgrad_accumulation",
            "delay_wgrad_compute",
            "save_original_input",
        ):
            if getattr(self, flag):
                parts.append(f"{flag}=True")
        if self._split is not None:
            parts.append(f"parameters_split={dict(self._split.parts)}")
        return ", ".join(parts)

    # ---- forward -------------------------------------------------------------------------------

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Apply the layer.

        Parameters
        ----------
        inp : Tensor
            [..., in_features] in the dtype of the parameters, or in any of fp32, fp16 and bf16
            under `torch.autocast`.
        is_first_microbatch : bool, optional
            With gradient accumulation: True for the first microbatch of a step (the weight is
            quantized and kept), False for the others (the kept one is used). None quantizes the
            weight at each call and keeps nothing.
        fp8_output, fp8_grad : bool
            Not there yet.

        Returns
        -------
        Tensor or (Tensor, Tensor)
            [..., out_features]; with `return_bias` and the bias, not added.

        Raises
        ------
        TypeError
            dtypes or kinds of tensors that do not go together.
        ValueError
            The last dim is not `in_features`.
        """
        if fp8_output or fp8_grad:
            raise NotImplementedError(f"Linear: {'fp8_output' if fp8_output else 'fp8_grad'}=True")
        traced = torch.compiler.is_compiling()
        last = self._last
        if last is not None and is_first_microbatch is None and not traced:
            state = current_state()
            call = repeated_call(last, self, state, inp)
            if call is not None:
                if last.records:
                    out = apply_plainly(call, inp, last.weight, last.bias)
                else:
                    out = call.run_forward((inp, last.weight, last.bias))[0]
                if call.first:
                    state.first = False
                return (out, self._returned_bias(out.dtype)) if self.return_bias else out
        return self._long_way(inp, is_first_microbatch, traced)

    def _long_way(self, inp: Tensor, is_first_microbatch: bool | None, traced: bool) -> Any:
        """Find out what applies to a call, and run it."""
        weight, bias = self._weight_and_bias()
        region = self._region(traced)
        owner = weight
        inp, weight, bias, output_dtype = self._promote(inp, weight, bias, region.recipe)
        if region.state.calibrating and region.recipe is None:
            self._calibrate(region.state, inp, weight)
        call = self._prepare(inp, weight, bias, output_dtype, region, is_first_microbatch, owner)
        if call.plans.backward:
            out = run_call(call, inp, weight, bias)
        else:
            out = call.run_forward((inp, weight, bias))[0]
        if call.first and region.replay is None:
            region.state.first = False
        if call.plans.writes_cache:
            sources = self._cache_sources(weight)
            quantization = call.plans.spec.quantization
            self._weight_cache = WeightCache.of(call.cache, sources, quantization, call.slots)
        if region.record:
            self._record(region, call.slots, call.cache, call.first)
        if not traced:
            self._remember(region, call, inp, weight, bias)
        if self.return_bias:
            return out, self._returned_bias(out.dtype)
        return out

    def _remember(
        self, region: Region, call: LinearCall, inp: Tensor, weight: Tensor, bias: Tensor | None
    ) -> None:
        """Keep what a later call of the same kind can start from; see `repeat`."""
        self._last = None
        parameters = self._parameters
        if (
            call.plans.plain
            and call.plans.spec.input == call.plans.spec.weight == call.plans.spec.output
            and region.replay is None
            and not region.record
            and self._stages is None
            and self._split is None
            and parameters.get("weight") is weight
            and (bias is None or parameters.get("bias") is bias)
            and (  # on a GPU, whether fp32 may use TF32 can change
                region.recipe is not None
                or inp.dtype is not torch.float32
                or inp.device.type == "cpu"
            )
        ):
            identity = None if region.recipe is None else repr(region.recipe)
            self._last = Repeat.of(call, inp, weight, bias, identity)

    def _promote(
        self, inp: Tensor, weight: Tensor, bias: Tensor | None, recipe: Any
    ) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
        """Apply the dtype rules: (input, weight, bias, dtype of the output)."""
        if not isinstance(inp, Tensor):
            raise TypeError(f"Linear: inp: {type(inp).__name__}, expected a tensor")
        if inp.dim() == 0 or inp.size(-1) != self.in_features:
            raise ValueError(
                f"Linear: inp: shape {tuple(inp.shape)}, expected [..., {self.in_features}]"
            )
        kind = inp.device.type
        if kind not in DEVICES:
            raise TypeError(
                f"Linear: inp is on {inp.device}, expected a tensor of the CPU or of a CUDA device"
            )
        if not torch.is_autocast_enabled(kind):
            dtype = inp.dtype
            if weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
                raise TypeError(
                    f"Linear: inp is {dtype}, weight {weight.dtype}, bias "
                    f"{None if bias is None else bias.dtype}: outside torch.autocast they must be "
                    "of one dtype; convert the input or the module"
                )
            return inp, weight, bias, dtype
        dtype = torch.get_autocast_dtype(kind)
        if recipe is None:
            bias = None if bias is None else bias.to(dtype)
            return inp.to(dtype), weight.to(dtype), bias, dtype
        return inp, weight, bias, dtype

    def _prepare(
        self,
        inp: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        output_dtype: torch.dtype,
        region: Region,
        is_first_microbatch: bool | None,
        owner: Tensor,
    ) -> LinearCall:
        """Choose the plans and bind them to the state in force; `owner` is the weight itself."""
        recipe = region.recipe
        flags, bias_grad = self._wanted(inp, weight, bias)
        records = flags & (DGRAD | WGRAD) != 0 or bias_grad
        if flags & WGRAD:
            flags |= self._wgrad_flags(owner, weight.dtype, recipe, is_first_microbatch)
        bound = _HIGH_PRECISION_STATE
        if recipe is not None:
            bound = self._bind_state(inp, weight, region, is_first_microbatch)
        elif inp.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
            flags |= ALLOW_TF32
        flags |= bound.flags
        bias_dtype = weight.dtype if bias is None else bias.dtype
        grad_dtype = owner.main_grad.dtype if flags & (ACCUMULATE | OVERWRITE) else weight.dtype
        dtypes = (inp.dtype, weight.dtype, bias_dtype, output_dtype, grad_dtype)
        key = (inp.device, flags, bias_grad, None if recipe is None else repr(recipe), *dtypes)
        call = LinearCall(self._plans_for(key, bound.quantization, region.traced), bound.slots)
        call.traced = region.traced
        call.scales = bound.scales
        call.cache = bound.cache
        call.stages = self._stages
        if recipe is not None:
            call.first = self._is_first(region, records or bool(region.record))
        if flags & (ACCUMULATE | OVERWRITE | DEFER):
            call.weight = owner
            call.queue = self._wgrads
        return call

    @staticmethod
    def _wanted(inp: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, bool]:
        """(flags of the bias and of the gradients of input and weight, the bias has a gradient)."""
        flags = BIAS if bias is not None else 0
        if not torch.is_grad_enabled():
            return flags, False
        if inp.requires_grad:
            flags |= DGRAD
        if weight.requires_grad:
            flags |= WGRAD
        return flags, bias is not None and bias.requires_grad

    def _bind_state(
        self, inp: Tensor, weight: Tensor, region: Region, is_first_microbatch: bool | None
    ) -> "_BoundState":
        """What an FP8 call quantizes with: the state in force, or that of the call it repeats."""
        quantization = self._quantization_of(region.recipe, region.traced)
        flags = SAVE_INPUT if self.save_original_input else 0
        replay = region.replay
        if replay is not None:
            flags |= NO_AMAX if replay.scales is not None else 0
            flags |= CACHE_READ if replay.cache is not None else 0
            return _BoundState(quantization, flags, replay.slots, replay.scales, replay.cache)
        slots = cache = None
        if region.recipe.delayed():
            slots = self._slots_for(region.recipe, region.state.group, inp.device, region.traced)
        if is_first_microbatch is not None:
            flags |= self._cache_flag(weight, is_first_microbatch, quantization, slots)
            cache = self._weight_cache.tensors if flags & CACHE_READ else None
        return _BoundState(quantization, flags, slots, None, cache)

    def _plans_for(self, key: tuple, quantization: Quantization, traced: bool) -> LinearPlans:
        if traced:
            if self._stages:
                raise NotImplementedError("Linear: override_stages under torch.compile")
            self._ensure_plans(key, *quantization)
        plans = self._plans.get(key)
        return self._make_plans(key, quantization) if plans is None else plans

    def _wgrad_flags(
        self, owner: Tensor, dtype: torch.dtype, recipe: Any, is_first_microbatch: bool | None
    ) -> int:
        """Where the weight gradient goes; `dtype` is that of the GEMM's operands without FP8."""
        flags = DEFER if self.delay_wgrad_compute else 0
        if self.fuse_wgrad_accumulation:
            main = main_grad_of(owner).dtype
            if recipe is None and main not in (dtype, torch.float32):
                raise TypeError(
                    f"Linear: main_grad is {main}, the operands are {dtype}: without FP8 it must "
                    "be torch.float32 or of their dtype"
                )
            overwrite = is_first_microbatch or getattr(owner, "overwrite_main_grad", False)
            flags |= OVERWRITE if overwrite else ACCUMULATE
        return flags

    def _cache_flag(
        self,
        weight: Tensor,
        is_first_microbatch: bool,
        quantization: Quantization,
        slots: scaling.Slots | None,
    ) -> int:
        """Write the weight cache, or read it where it holds this very weight."""
        cache = self._weight_cache
        if is_first_microbatch or cache is None:
            return CACHE_WRITE
        holds = cache.holds(self._cache_sources(weight), quantization, slots)
        return CACHE_READ if holds else CACHE_WRITE

    @ops.constant_in_graphs
    def _ensure_plans(self, key: tuple, *quantization: Any) -> None:
        """Make plans while a graph is traced, outside of the graph."""
        if key not in self._plans:
            self._make_plans(key, Quantization(*quantization))

    def _make_plans(self, key: tuple, quantization: Quantization) -> LinearPlans:
        """Plans for a kind of call; see `_prepare` for the key."""
        device, flags, bias_grad, _, *dtypes = key
        for label, dtype in zip(
            ("inp", "weight", "bias", "output", "main_grad"), dtypes, strict=True
        ):
            if dtype not in DTYPES:
                raise TypeError(
                    f"Linear: {label} is {dtype}, expected torch.float32, torch.float16 or "
                    "torch.bfloat16; convert it"
                )
        codes = [_core.dtype_code(dtype) for dtype in dtypes]
        sizes = (self.in_features, self.out_features)
        spec = LinearSpec(*sizes, *codes, quantization, flags, bias_grad, self._external)
        prepare_device(device)
        plans = linear_plans(spec)
        self._plans[key] = plans
        return plans

    def _calibrate(self, state: RegionState, inp: Tensor, weight: Tensor) -> None:
        """Record amaxes of a forward in high precision."""
        recipe = state.recipe
        if recipe is None or not recipe.delayed():
            return
        if torch.compiler.is_compiling():
            raise NotImplementedError("Linear: calibrating=True under torch.compile")
        if torch._C._current_graph_task_id() != -1:
            return  # the recompute of a forward that has recorded them
        prepare_device(inp.device)
        slots = self._slots_for(recipe, state.group, inp.device)
        for offset, tensor in enumerate((inp, weight)):
            slot = slots.forward_slot + offset
            _core.quantize(tensor.detach(), amax=slots.forward_history[0, slot : slot + 1])

    def plans_of(
        self, inp: Tensor, is_first_microbatch: bool | None = None
    ) -> list[tuple[str, int]]:
        """(title, plan id) of what a call would run; see `explain`. Changes no state."""
        weight, bias = self._weight_and_bias()
        state = current_state()
        recipe = state.recipe if state.enabled else None
        owner = weight
        inp, weight, bias, dtype = self._promote(inp, weight, bias, recipe)
        slots, loaded = self._slots, self._loaded_state
        region = Region(state, recipe, None, [], False)
        call = self._prepare(inp, weight, bias, dtype, region, is_first_microbatch, owner)
        self._slots, self._loaded_state = slots, loaded
        plans = call.plans
        titles = ("forward", plans.forward), ("backward", plans.backward), ("wgrad", plans.wgrad)
        return [(title, plan) for title, plan in titles if plan]

    def override_stages(self, **stages: Callable[[StageBuffers], Any]) -> None:
        """Let Python functions run stages of this layer's plans; none restores the built-in ones.

        Parameters
        ----------
        **stages
            ``f(buffers)`` by stage name (see `explain`, and `staged.StageBuffers`); it fills the
            buffers that the stage writes. ``gemm_output`` is the forward GEMM, ``quantize_input``
            the cast of the input, ``reduce_amax_input`` stands between measuring and casting
            (current scaling), and so on.

        Raises
        ------
        ValueError
            A name is no stage.
        """
        self._external = external_bits(stages)
        self._stages = dict(stages) or None
        self._plans = {}
        self._last = None

    # ---- delayed weight gradients --------------------------------------------------------------

    def backward_dw(self) -> None:
        """Compute the oldest weight gradient that a backward put off.

        It is added to ``weight.grad`` (of each split weight), or to ``weight.main_grad`` with
        `fuse_wgrad_accumulation`. Does nothing without `delay_wgrad_compute`.

        Raises
        ------
        RuntimeError
            No weight gradient is pending.
        """
        if not self.delay_wgrad_compute:
            return
        if not self._wgrads:
            raise RuntimeError(
                "Linear.backward_dw: no weight gradient is pending; call it once a backward"
            )
        plans, inputs, packed, rows, weight = self._wgrads[0]
        into_main_grad = plans.into_main_grad
        state = [main_grad_of(weight)] if into_main_grad else []
        with torch.no_grad():
            outputs = ops.run(plans.wgrad, (0, 0), inputs, state, packed, rows)
            self._wgrads.popleft()  # only now: a call that raised can be made again
            if into_main_grad:
                if hasattr(weight, "grad_added_to_main_grad"):
                    weight.grad_added_to_main_grad = True
                return
            names = [f"{label}weight" for label, _ in self._parts()]
            for name, grad in zip(names, split_rows(outputs[0], self._parts()), strict=True):
                parameter = getattr(self, name)
                if not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = grad.to(parameter.dtype)
                else:
                    parameter.grad.add_(grad)
