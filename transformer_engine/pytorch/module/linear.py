# SPDX-License-Identifier: Apache-2.0
"""`Linear`: y = x W^T + b with FP8 GEMMs inside `autocast`."""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_engine import _core
from transformer_engine.pytorch import ops, scaling
from transformer_engine.pytorch.function import run_call
from transformer_engine.pytorch.module.base import Fp8Module, Region
from transformer_engine.pytorch.module.parameters import (
    Split,
    default_device,
    initialise,
    refuse_distributed,
    split_rows,
)
from transformer_engine.pytorch.plans import (
    HIGH_PRECISION,
    LinearPlans,
    LinearSpec,
    Quantization,
    linear_plans,
)
from transformer_engine.pytorch.state import STATE

__all__ = ["Linear", "LinearCall"]

BIAS = _core.LINEAR_BIAS
DGRAD = _core.LINEAR_DGRAD
WGRAD = _core.LINEAR_WGRAD_NEEDED
SAVE_INPUT = _core.LINEAR_SAVE_INPUT
NO_AMAX = _core.LINEAR_NO_AMAX
ALLOW_TF32 = _core.LINEAR_ALLOW_TF32
ACCUMULATE = _core.LINEAR_ACCUMULATE_WGRAD
OVERWRITE = _core.LINEAR_OVERWRITE_WGRAD
DEFER = _core.LINEAR_DEFER_WGRAD
CACHE_WRITE = _core.LINEAR_CACHE_WRITE
CACHE_READ = _core.LINEAR_CACHE_READ


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
        The quantized weight: row-wise, column-wise, {scale, 1/scale}.
    weight : Parameter or None
        Whose ``main_grad`` takes the weight gradient.
    queue : deque or None
        Where a deferred weight gradient goes.
    """

    __slots__ = ("plans", "slots", "scales", "first", "cache", "weight", "queue")

    def __init__(self, plans: LinearPlans, slots: scaling.Slots | None) -> None:
        self.plans = plans
        self.slots = slots
        self.scales: Tensor | None = None
        self.first = False
        self.cache: tuple[Tensor, Tensor, Tensor] | None = None
        self.weight: Parameter | None = None
        self.queue: deque | None = None

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
        outputs = ops.run(self.plans.forward, (slot, 0), inputs, state)
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
            state.append(_main_grad(self.weight))
        outputs = list(ops.run(self.plans.backward, (0, slot), inputs, state, packed))
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
        rows = grad.shape[:-1].numel()
        self.queue.append((self.plans, inputs, packed, rows, self.weight))


def _main_grad(weight: Parameter) -> Tensor:
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


class Linear(Fp8Module):
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
        self._weight_cache: tuple | None = None
        device = torch.device(default_device() if device is None else device)
        dtype = params_dtype or dtype or torch.get_default_dtype()
        if self._split is not None and self.fuse_wgrad_accumulation:
            raise ValueError(
                "Linear: fuse_wgrad_accumulation and parameters_split: the split weights have no "
                "common main_grad"
            )
        self._make_parameters(device, dtype)

    def _make_parameters(self, device: torch.device, dtype: torch.dtype) -> None:
        for label, rows in self._parts():
            weight = torch.empty(rows, self.in_features, device=device, dtype=dtype)
            self.register_parameter(f"{label}weight", Parameter(weight))
        if self.use_bias:
            for label, rows in self._parts():
                bias = torch.empty(rows, device=device, dtype=dtype)
                self.register_parameter(f"{label}bias", Parameter(bias))
        else:
            for label, _ in self._parts():
                setattr(self, f"{label}bias", torch.empty(0, device=device, dtype=dtype))
        if device.type != "meta":
            self.reset_parameters()

    def _parts(self) -> list[tuple[str, int]]:
        """(prefix of the parameter names, rows) of each weight."""
        if self._split is None:
            return [("", self.out_features)]
        return [(f"{name}_", rows) for name, rows in self._split.parts]

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise the parameters; those on the meta device are made on the default device first.

        Parameters
        ----------
        defer_init : bool, default False
            Do nothing.
        """
        if defer_init:
            return
        for label, _ in self._parts():
            initialise(self, f"{label}weight", self._init_method, self._rng)
            if self.use_bias:
                initialise(self, f"{label}bias", torch.nn.init.zeros_, self._rng)
            else:
                empty = getattr(self, f"{label}bias")
                if empty.device.type == "meta":
                    setattr(self, f"{label}bias", torch.empty(0, dtype=empty.dtype))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a name that `parameters_split` replaced is an error."""
        split = self.__dict__.get("_split")
        if split is not None and name in ("weight", "bias"):
            raise AttributeError(
                f"Linear: {name} is split into "
                f"{', '.join(f'{part}_{name}' for part, _ in split.parts)}: assign those"
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict:
        """Copy and pickle without caches and pending weight gradients."""
        state = super().__getstate__()
        state["_plans"] = {}
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
            [..., in_features] in the dtype of the parameters, or in any of fp32, fp16 and bf16 under
            `torch.autocast`.
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
            raise NotImplementedError(
                f"Linear: {'fp8_output' if fp8_output else 'fp8_grad'}=True"
            )
        weight, bias = self._weight_and_bias()
        region = self._region()
        inp, weight, bias, output_dtype = self._promote(inp, weight, bias, region.recipe)
        if STATE.calibrating and region.recipe is None:
            self._calibrate(inp, weight)
        call = self._prepare(inp, weight, bias, output_dtype, region, is_first_microbatch)
        if call.plans.backward:
            out = run_call(call, inp, weight, bias)
        else:
            out = call.run_forward((inp, weight, bias))[0]
        if call.plans.has(CACHE_WRITE):
            key = self._cache_key(weight, call.plans.spec.quantization, call.slots)
            self._weight_cache = (key, call.cache)
        if region.record:
            self._record(region, call.slots, call.cache, call.first)
        if self.return_bias:
            return out, self._returned_bias(out.dtype)
        return out

    def _weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        parameters = self._parameters
        if self._split is None:
            weight = parameters.get("weight")
            if weight is None:  # replaced by a parametrization, or a plain tensor
                weight = self.weight
            bias = None
            if self.apply_bias:
                bias = parameters.get("bias")
                if bias is None:
                    bias = self.bias
            return weight, bias
        weight = torch.cat([getattr(self, f"{label}weight") for label, _ in self._parts()])
        if not self.apply_bias:
            return weight, None
        return weight, torch.cat([getattr(self, f"{label}bias") for label, _ in self._parts()])

    def _returned_bias(self, dtype: torch.dtype) -> Tensor:
        biases = [getattr(self, f"{label}bias") for label, _ in self._parts()]
        bias = biases[0] if len(biases) == 1 else torch.cat(biases)
        return bias.to(dtype)

    def _promote(
        self, inp: Tensor, weight: Tensor, bias: Tensor | None, recipe: Any
    ) -> tuple[Tensor, Tensor, Tensor | None, torch.dtype]:
        """Apply the dtype rules: (input, weight, bias, dtype of the output)."""
        if not isinstance(inp, Tensor):
            raise TypeError(f"Linear: inp: {type(inp).__name__}, expected a tensor")
        if inp.dim() == 0 or inp.shape[-1] != self.in_features:
            raise ValueError(
                f"Linear: inp: shape {tuple(inp.shape)}, expected [..., {self.in_features}]"
            )
        kind = inp.device.type
        if not torch.is_autocast_enabled(kind):
            for name, parameter in (("weight", weight), ("bias", bias)):
                if parameter is not None and parameter.dtype != inp.dtype:
                    raise TypeError(
                        f"Linear: inp is {inp.dtype} and {name} {parameter.dtype}: outside "
                        "torch.autocast they must be of one dtype; convert the input or the module"
                    )
            return inp, weight, bias, inp.dtype
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
    ) -> LinearCall:
        """Choose the plans and bind them to the state in force."""
        recipe = region.recipe
        flags = BIAS if bias is not None else 0
        bias_grad = False
        if torch.is_grad_enabled():
            if inp.requires_grad:
                flags |= DGRAD
            if weight.requires_grad:
                flags |= WGRAD
            bias_grad = bias is not None and bias.requires_grad
        records = flags & (DGRAD | WGRAD) != 0 or bias_grad
        if flags & WGRAD:
            flags |= self._wgrad_flags(weight, is_first_microbatch)
        slots = scales = cache = None
        quantization = HIGH_PRECISION
        replay = region.replay
        if recipe is not None:
            quantization = self._quantization_of(recipe)
            if self.save_original_input:
                flags |= SAVE_INPUT
            if replay is not None:
                slots, scales, cache = replay.slots, replay.scales, replay.cache
                flags |= (NO_AMAX if scales is not None else 0) | (CACHE_READ if cache else 0)
            else:
                if recipe.delayed():
                    slots = self._slots_for(recipe, inp.device)
                if is_first_microbatch is not None:
                    flags |= self._cache_flag(weight, is_first_microbatch, quantization, slots)
                    cache = self._weight_cache[1] if flags & CACHE_READ else None
        elif inp.dtype is torch.float32 and torch.backends.cuda.matmul.allow_tf32:
            flags |= ALLOW_TF32
        bias_dtype = weight.dtype if bias is None else bias.dtype
        grad_dtype = weight.main_grad.dtype if flags & (ACCUMULATE | OVERWRITE) else weight.dtype
        dtypes = (inp.dtype, weight.dtype, bias_dtype, output_dtype, grad_dtype)
        key = (flags, bias_grad, *dtypes, *quantization)
        if torch.compiler.is_compiling():
            self._ensure_plans(*key)
        plans = self._plans.get(key)
        if plans is None:
            plans = self._make_plans(key)
        call = LinearCall(plans, slots)
        call.scales = scales
        call.cache = cache
        if recipe is not None:
            call.first = self._take_first(region, records or bool(region.record))
        if flags & (ACCUMULATE | OVERWRITE | DEFER):
            call.weight = weight
            call.queue = self._wgrads
        return call

    def _wgrad_flags(self, weight: Tensor, is_first_microbatch: bool | None) -> int:
        flags = DEFER if self.delay_wgrad_compute else 0
        if self.fuse_wgrad_accumulation:
            _main_grad(weight)
            overwrite = is_first_microbatch or getattr(weight, "overwrite_main_grad", False)
            flags |= OVERWRITE if overwrite else ACCUMULATE
        return flags

    @staticmethod
    def _cache_key(weight: Tensor, quantization: Any, slots: scaling.Slots | None) -> tuple:
        version = -1 if weight.is_inference() else weight._version
        return (
            weight.data_ptr(),
            version,
            weight.dtype,
            weight.device,
            quantization,
            None if slots is None else slots.identity,
        )

    def _cache_flag(
        self,
        weight: Tensor,
        is_first_microbatch: bool,
        quantization: Any,
        slots: scaling.Slots | None,
    ) -> int:
        """Write the weight cache, or read it where it holds this very weight."""
        cache = self._weight_cache
        if is_first_microbatch or cache is None:
            return CACHE_WRITE
        if cache[0] != self._cache_key(weight, quantization, slots):
            return CACHE_WRITE  # the weight changed, moved, or another recipe is in force
        return CACHE_READ

    @torch._dynamo.assume_constant_result
    def _ensure_plans(self, *key: Any) -> None:
        """Make plans while a graph is traced, outside of the graph."""
        if key not in self._plans:
            self._make_plans(key)

    def _make_plans(self, key: tuple) -> LinearPlans:
        flags, bias_grad = key[:2]
        codes = [_core.dtype_code(dtype) for dtype in key[2:7]]
        quantization = Quantization(*key[7:])
        spec = LinearSpec(
            self.in_features, self.out_features, *codes, quantization, flags, bias_grad
        )
        plans = linear_plans(spec)
        self._plans[key] = plans
        return plans

    def _calibrate(self, inp: Tensor, weight: Tensor) -> None:
        """Record amaxes of a forward in high precision."""
        recipe = STATE.recipe
        if recipe is None or not recipe.delayed():
            return
        if torch.compiler.is_compiling():
            raise NotImplementedError("Linear: calibrating=True under torch.compile")
        slots = self._slots_for(recipe, inp.device)
        for offset, tensor in enumerate((inp, weight)):
            slot = slots.forward_slot + offset
            _core.quantize(tensor.detach(), amax=slots.forward_history[0, slot : slot + 1])

    def plans_of(self, inp: Tensor, is_first_microbatch: bool | None = None) -> list[tuple[str, int]]:
        """(title, plan id) of what a call would run; see `explain`. Changes no state."""
        weight, bias = self._weight_and_bias()
        recipe = STATE.recipe if STATE.enabled else None
        inp, weight, bias, dtype = self._promote(inp, weight, bias, recipe)
        first, slots = STATE.first, self._slots
        call = self._prepare(inp, weight, bias, dtype, Region(recipe, None, []), is_first_microbatch)
        STATE.first, self._slots = first, slots
        plans = call.plans
        titles = ("forward", plans.forward), ("backward", plans.backward), ("wgrad", plans.wgrad)
        return [(title, plan) for title, plan in titles if plan]

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
                "Linear.backward_dw: no weight gradient is pending; call it once after each backward"
            )
        plans, inputs, packed, rows, weight = self._wgrads.popleft()
        into_main_grad = plans.has(ACCUMULATE | OVERWRITE)
        state = [_main_grad(weight)] if into_main_grad else []
        with torch.no_grad():
            outputs = ops.run(plans.wgrad, (0, 0), inputs, state, packed, rows)
            if into_main_grad:
                if hasattr(weight, "grad_added_to_main_grad"):
                    weight.grad_added_to_main_grad = True
                return
            names = [f"{label}weight" for label, _ in self._parts()]
            for name, grad in zip(names, split_rows(outputs[0], self._parts()), strict=True):
                parameter = getattr(self, name)
                if not parameter.requires_grad:
                    continue
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
