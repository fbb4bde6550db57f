# SPDX-License-Identifier: Apache-2.0
"""Base of `LayerNorm` and `RMSNorm`, and the norm without parameters for attention heads."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_engine import _core
from transformer_engine.common.graphs import Norm
from transformer_engine.common.plans import CallPlans, norm_plans
from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.execution.autograd import (
    run_call,
    run_forward_alone,
    run_without_backward,
)
from transformer_engine.pytorch.module.base import NativeModule
from transformer_engine.pytorch.module.call import ModuleCall
from transformer_engine.pytorch.module.call_key import KeptCall, call_key, converted, keep
from transformer_engine.pytorch.module.operands import (
    DTYPES,
    codes_of,
    conversions,
    one_dtype,
    parameter_flags,
    refuse_memory,
)
from transformer_engine.pytorch.module.parameters import (
    checked_dtype,
    checked_eps,
    device_of,
    have_memory,
    keep_marks_of,
    reset_norm,
)
from transformer_engine.pytorch.scaling_state.extra_state import KEY, says_nothing
from transformer_engine.pytorch.torchside.device import prepare_device
from transformer_engine.pytorch.torchside.modes import (
    autocast_dtype,
    constant_in_graphs,
    exporting,
    faking,
    forward_gradients,
    without_memory,
)
from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor, is_quantized

DEFAULT_EPS = torch.finfo(torch.float32).eps
"""Value of ``eps=None``: the precision that the statistics are computed in, as in torch."""

_SETTINGS = ("eps", "follows_input", "normalized_shape", "zero_centered_gamma")
"""Attributes that a call depends on and that users set after construction."""


class NormModule(NativeModule):
    """Base of the norms over the last dims of a tensor."""

    _READ_BY_PLANS = _SETTINGS
    """Settings that plans of a layer depend on (see `traced_layer`)."""
    KIND: int
    HAS_WEIGHT = HAS_BIAS = False
    eps: float | None
    zero_centered_gamma = False

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[tuple, CallPlans] = {}
        self._kept_calls: dict[tuple, KeptCall] = {}
        self._places: dict[tuple, tuple] | None = None  # see `_find_places`

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a setting counts from the next call on.

        A parameter has the marks of the one of which it is another form.
        """
        parameters = self.__dict__.get("_parameters", {})
        former = parameters.get(name)
        super().__setattr__(name, value)
        keep_marks_of(former, parameters.get(name))
        if name in _SETTINGS:  # calls were kept under the old one
            self.__dict__.update(_kept_calls={}, _places=None)

    def __getstate__(self) -> dict:
        """Copy and pickle without plans and calls."""
        return {**super().__getstate__(), "_plans": {}, "_kept_calls": {}, "_places": None}

    def _replicate_for_data_parallel(self) -> "NormModule":
        """Copy for `torch.nn.DataParallel`, without calls: its parameters are others."""
        made = super()._replicate_for_data_parallel()
        made.__dict__.update(_kept_calls={}, _places=None)
        return made

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *given: Any) -> None:
        """Load; the incumbent's norms have an ``_extra_state`` of nothing, which is dropped."""
        key, unexpected_keys = prefix + KEY, given[3]
        dropped = says_nothing(state_dict, key)  # raises before a weight changes
        super()._load_from_state_dict(state_dict, prefix, *given)
        if dropped and key in unexpected_keys:
            unexpected_keys.remove(key)

    def _settings(self) -> tuple:
        """Notes of a layer that runs it as a node (see `as_node`)."""
        tensors = self._parameters
        shape = getattr(self, "normalized_shape", None)
        present = tuple(tensors.get(name) is not None for name in ("weight", "bias"))
        return self.eps, self.zero_centered_gamma, shape, *present

    def emit(self, nodes: Any, x: Any, name: str = "") -> Any:
        """Append its node over value `x`; return its output (see `layer_call`)."""
        return nodes.norm(self, x, f"{name}output")

    def plans_over(self, like: Tensor) -> CallPlans | None:
        """Plans of a call over an input of this dtype; None for what no graph has as a node."""
        gamma, beta = self._parameters.get("weight"), self._parameters.get("bias")
        dtypes = {tensor.dtype for tensor in (gamma, beta) if tensor is not None}
        shape = getattr(self, "normalized_shape", like.shape[-1:])
        if (
            len(dtypes) > 1
            or tuple(shape) != tuple(like.shape[-1:])
            or (gamma is None and beta is not None)
            or like.dtype not in DTYPES
        ):
            return None
        out = like.dtype if gamma is None or getattr(self, "follows_input", False) else gamma.dtype
        if isinstance(self, AffineNorm):
            out = autocast_dtype(like.device.type) or out
        eps = DEFAULT_EPS if self.eps is None else self.eps
        key = self._key((like, gamma, beta), out, eps, False)
        return self._plans.get(key) or self._make_plans(key)

    def serves(self, channels: int, dtype: torch.dtype) -> bool:
        """Tell whether it runs as a node on heads of so many channels, and is not to be called."""
        return (
            channels <= _core.NORM_HEAD_COLUMNS
            and getattr(self, "normalized_shape", (channels,)) == (channels,)
            and all(parameter.dtype is dtype for parameter in self.parameters())
        )

    def as_node(self) -> Norm:
        """Its norm for the graph of a layer."""
        gamma, beta = self._parameters.get("weight"), self._parameters.get("bias")
        dtype = torch.float32 if gamma is None else gamma.dtype
        eps = DEFAULT_EPS if self.eps is None else self.eps
        return Norm(self.KIND, _core.dtype_code(dtype), eps, *self._node_flags((gamma, beta)))

    def _node_flags(self, affine: tuple, gradients: bool = True) -> tuple[int, int, int]:
        """Flags of a `Norm`: of gamma, beta and its node; `gradients`: these may have some."""
        gradients = gradients and torch.is_grad_enabled()
        gamma, beta = [parameter_flags((tensor,), gradients) for tensor in affine]
        node = _core.NODE_ZERO_CENTERED if self.zero_centered_gamma else 0
        return gamma, beta if gamma else 0, node

    def _find_places(self) -> dict[tuple[bool, bool], tuple]:
        """Where the parameters of a call stand, by whether weight and bias are None.

        Nothing for a norm over several dims: it reads other tensors than its own.
        """
        if len(getattr(self, "normalized_shape", (1,))) > 1:
            return {}
        here = self._parameters
        return {
            (no_weight, no_bias): (
                (here, "weight") if self.HAS_WEIGHT and not no_weight else None,
                (here, "bias") if self.HAS_BIAS and not no_bias else None,
            )
            for no_weight in (False, True)
            for no_bias in (False, True)
        }

    def _find(self, inp: Any) -> tuple[tuple | None, tuple]:
        """Key of a call, None where it has none, and its tensors; no graph is being traced."""
        own = self.__dict__
        places, here = own["_places"], own["_parameters"]
        if places is None:
            places = own["_places"] = self._find_places()
        # A parameter that is no attribute of its own has a place, and is not found there.
        absent = here.get("weight", places) is None, here.get("bias", places) is None
        found = places.get(absent)
        return (None, ()) if found is None else call_key(absent, inp, found)

    def _run_bound(self, key: tuple | None, tensors: tuple) -> Any:
        """Run the call that is kept by a key; `NotImplemented` where there is none."""
        kept = self.__dict__["_kept_calls"].get(key)
        if kept is None or not (kept.records or not forward_gradients()):
            return NotImplemented
        if kept.dtypes:
            tensors = converted(tensors, kept.dtypes)
        if kept.records:
            return kept.apply(kept.call, *tensors)
        return run_forward_alone(kept.call, tensors)

    def _check(self, inp: Any, shape: tuple[int, ...]) -> None:
        """Raise where `inp` is no tensor [..., *shape] on a device of the library."""
        kind = type(self).__name__
        expect_tensor(f"{kind}: inp", inp)
        if tuple(inp.shape[-len(shape) :]) != shape:
            raise ValueError(
                f"{kind}: inp: shape {tuple(inp.shape)}, expected "
                f"[..., {', '.join(map(str, shape))}]"
            )

    def _key(
        self,
        tensors: tuple[Tensor, Tensor | None, Tensor | None],
        out: torch.dtype | None,
        eps: float,
        exported: bool,
    ) -> tuple:
        """Key of the plans of a call."""
        inp, gamma, beta = tensors
        wanted = torch.is_grad_enabled() and not exported and inp.requires_grad
        dtype = inp.dtype if gamma is None else gamma.dtype
        settings = (wanted, *self._node_flags((gamma, beta), not exported))
        return inp.device, inp.dtype, dtype, out or dtype, inp.size(-1), settings, eps

    def _run(
        self,
        inp: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        out: torch.dtype | None = None,
        found: tuple[tuple | None, tuple] = (None, ()),
    ) -> Tensor:
        """Normalize the last dim of `inp`, in fp32, to a dtype; None: that of gamma.

        `found` is what `_find` has found.
        """
        traced = torch.compiler.is_compiling()
        eps = DEFAULT_EPS if self.eps is None else self.eps
        if traced:
            eps = plan_ops.as_constant(eps)
        key = self._key((inp, gamma, beta), out, eps, traced and exporting())
        if traced:
            self._ensure_plans(key)
        blank = not traced and without_memory(inp)
        if blank and not faking():
            refuse_memory(type(self).__name__, inp, [t for t in (gamma, beta) if t is not None])
        if blank:
            key = (torch.device("meta"), *key[1:])  # no device is prepared for nothing
        plans = self._plans.get(key)
        if plans is None:
            plans = self._make_plans(key)
        label = type(self).__name__
        call = ModuleCall(plans, None, label)
        call.traced = traced or blank
        if found[0] is not None and not call.traced:
            call.dtypes = conversions(found[1], (inp, gamma, beta))
            keep(self._kept_calls, found[0], KeptCall(call))
        run = run_without_backward if plans.backward is None else run_call
        return run(call, inp, gamma, beta)

    @constant_in_graphs
    def _ensure_plans(self, key: tuple) -> None:
        """Make plans while a graph is traced, outside of the graph."""
        if key not in self._plans:
            self._make_plans(key)

    def _make_plans(self, key: tuple) -> CallPlans:
        device, inp, gamma, out, features, settings, eps = key
        wanted, *flags = settings
        labels = "inp", "the output", "weight"
        *codes, of_norm = codes_of(type(self).__name__, labels, (inp, out, gamma))
        prepare_device(device)
        norm = Norm(self.KIND, of_norm, eps, *flags)
        return keep(self._plans, key, norm_plans(features, norm, tuple(codes), wanted))


class AffineNorm(NormModule):
    """Base of the norms with parameters."""

    HAS_WEIGHT = True
    EPS_IS_OPTIONAL = False

    def __init__(
        self,
        normalized_shape: int | Iterable[int] | None = None,
        eps: float | None = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        *,
        elementwise_affine: bool = True,
        bias: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int | dict[str, int] = 0,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        if (normalized_shape is None) == (hidden_size is None):
            raise RuntimeError(
                f"{kind}: normalized_shape={normalized_shape!r} and hidden_size={hidden_size!r}: "
                "give exactly one"
            )
        shape = normalized_shape if hidden_size is None else hidden_size
        self.normalized_shape = tuple(shape) if isinstance(shape, Iterable) else (shape,)
        sizes = self.normalized_shape
        if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"{kind}: normalized_shape={shape!r}: expected positive sizes")
        margins = sm_margin.values() if isinstance(sm_margin, dict) else (sm_margin,)
        if any(margins):
            raise NotImplementedError(f"{kind}: sm_margin={sm_margin!r}: leave it out")
        self.eps = None if eps is None and self.EPS_IS_OPTIONAL else checked_eps(kind, eps)
        self.elementwise_affine = bool(elementwise_affine)
        self.follows_input = False  # te.convert: the output has the dtype of the input
        self.zero_centered_gamma = bool(zero_centered_gamma)
        self.sequence_parallel = sequence_parallel
        device = device_of(device)
        dtype = checked_dtype(kind, params_dtype, dtype)
        if bias and not self.HAS_BIAS:
            raise TypeError(f"{kind}: bias=True: this norm adds none; te.LayerNorm does")
        present = {"weight": self.elementwise_affine}
        if self.HAS_BIAS:
            present["bias"] = self.elementwise_affine and bias is not False
        for name, there in present.items():
            empty = torch.empty(self.normalized_shape, device=device, dtype=dtype)
            self.register_parameter(name, Parameter(empty) if there else None)
        if have_memory(self):
            self.reset_parameters()

    def reset_parameters(self, defer_init: bool | None = None) -> None:
        """Give gamma 1 (0 where it is zero-centred) and beta 0; see `Linear.reset_parameters`."""
        if defer_init:
            return
        reset_norm(self)
        if self.sequence_parallel is not None:
            for parameter in self.parameters():
                parameter.sequence_parallel = self.sequence_parallel

    def extra_repr(self) -> str:
        """Shape and what differs from the defaults."""
        text = f"{self.normalized_shape}, eps={self.eps}"
        if self.weight is None:
            text += ", elementwise_affine=False"
        elif self.HAS_BIAS and self.bias is None:
            text += ", bias=False"
        return text + (", zero_centered_gamma=True" if self.zero_centered_gamma else "")

    def forward(self, inp: Tensor) -> Tensor:
        """Normalize [..., *normalized_shape] over the last dims.

        Input and parameters are read in their own dtypes, fp32, fp16 or bf16, and an input of fp64
        in fp32, a quantized one in its values; inside is fp32. The output has the shape of the
        input and the dtype of the weight (that of `torch.autocast` inside one; without a weight
        that of the input), the gradients those of what they belong to. ValueError where the last
        dims are not `normalized_shape`, TypeError for other dtypes or kinds of tensors.
        """
        found: tuple = (None, ())
        if not torch.compiler.is_compiling():
            found = self._find(inp)
            made = self._run_bound(*found)
            if made is not NotImplemented:
                return made
        dims = len(self.normalized_shape)
        self._check(inp, self.normalized_shape)
        gamma, beta = self.weight, self.bias if self.HAS_BIAS else None
        if gamma is None and beta is not None:
            raise ValueError(
                f"{type(self).__name__}: weight is None and bias is not: set both to None, or give "
                "a weight of ones"
            )
        if is_quantized(inp):
            inp = inp.dequantize()
        out = inp.dtype if gamma is None or self.follows_input else gamma.dtype
        if not inp.is_meta and torch.is_autocast_enabled(inp.device.type):
            out = torch.get_autocast_dtype(inp.device.type)
        if inp.dtype is torch.float64 and out is not torch.float64:
            inp = inp.float()
        if gamma is not None:
            gamma, beta = one_dtype(gamma, beta)
        if dims == 1:
            return self._run(inp, gamma, beta, out, found)
        size = math.prod(self.normalized_shape)
        flat = inp.reshape(*inp.shape[:-dims], size)
        flat_parameters = [p if p is None else p.reshape(size) for p in (gamma, beta)]
        return self._run(flat, *flat_parameters, out).reshape(inp.shape)

    _FORWARD = forward


class L2Normalization(NormModule):
    """x / sqrt(sum of squares + eps) over the last dim."""

    KIND = _core.NORM_L2

    def __init__(self, eps: float = 1e-6, **options: Any) -> None:
        super().__init__()
        if options:
            raise TypeError(f"L2Normalization: unknown options {sorted(options)}")
        self.eps = checked_eps("L2Normalization", eps)

    def extra_repr(self) -> str:
        """Return eps."""
        return f"eps={self.eps}"

    def forward(self, inp: Tensor) -> Tensor:
        """Normalize the last dim of [..., features]."""
        found: tuple = (None, ())
        if not torch.compiler.is_compiling():
            found = self._find(inp)
            made = self._run_bound(*found)
            if made is not NotImplemented:
                return made
        self._check(inp, tuple(getattr(inp, "shape", ())[-1:]) or (1,))
        return self._run(inp, None, None, None, found)

    _FORWARD = forward
