# SPDX-License-Identifier: Apache-2.0
"""Attention as a node of a plan: that of a layer, or its own.

A call goes its way through checks, limits and the choice of a backend. Where that ends at the
library's operator, and nothing but autograd looks on, it runs as a plan of one node, which is kept
by what it depends on; in checkpoints, under `torch.autocast` and hooks of saved tensors too. Where
no argument but queries, keys and values is a tensor, so is the whole way: by the arguments, and the
facts of these three. Both ways give the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.attention_graphs import AttentionSpec, core_graph
from transformer_engine.common.config import attention_switches
from transformer_engine.common.plans import plans_of
from transformer_engine.pytorch.attention import fp8, native
from transformer_engine.pytorch.attention.backends import Choice
from transformer_engine.pytorch.attention.limits import Limits
from transformer_engine.pytorch.attention.problem import Heads, slices_of
from transformer_engine.pytorch.execution.autograd import apply_of, run_forward_alone
from transformer_engine.pytorch.execution.overrides import attention_class_name
from transformer_engine.pytorch.module.call import LayerCall
from transformer_engine.pytorch.module.call_key import Recurrence, keep
from transformer_engine.pytorch.module.layer_call import Attending, fills_of
from transformer_engine.pytorch.torchside.modes import (
    any_autocast,
    dispatch_modes,
    forward_gradients,
    graph_task,
    in_transform,
    top_saved_hooks,
)

__all__ = [
    "KeptCall",
    "KeptCalls",
    "alike",
    "angles_of",
    "attention_node",
    "is_constant",
    "sink_of",
]

# ---- the node ------------------------------------------------------------------------------------


_NOTHING = ((), (), False, False)


def attention_node(
    core: Any,
    how: tuple[Choice, Limits],
    slices: tuple,
    given: tuple[tuple, tuple, bool, bool] = _NOTHING,
    qkv_format: str | None = None,
    about: tuple[str, int] = ("cpu", 0),
    hands_over: bool = False,
) -> Attending | None:
    """How a call attends as part of a plan; None for what runs in no plan.

    Scale, dropout, random state and, if None is given, the format are those of `core`, a
    `DotProductAttention`; `how` is what its `limits_for` gives; `slices` are of queries, keys and
    values in their projections; `given` is the source or nothing, the angles, whether these are
    interleaved, and whether norms come before them. `about` says on what type of device that is,
    and how many queries there are, which attention in FP8 depends on; `hands_over`: that hands its
    output on in FP8.
    """
    choice, limits = how
    if choice.backend != "native" or limits.wants_top:
        return None
    qkv_format = core.qkv_format if qkv_format is None else qkv_format
    source, angles, interleaved, norms_first = given
    dropout = core.attention_dropout if core.training else 0.0
    tracker = core._get_tracker if dropout > 0.0 else None
    masks = [
        None if tensor is None else tuple(1 if n == 1 else 0 for n in tensor.shape)
        for tensor in (limits.mask, limits.bias)
    ]
    lengths = [n for n in (limits.query_lengths, limits.key_lengths) if n is not None]
    offsets, packed = (), None
    if limits.packed is not None:
        of_lengths, offsets = native.lengths_and_offsets(limits.packed)
        lengths = [n for n in of_lengths if n is not None]
        queries, keys = limits.packed
        packed = offsets[0].shape[0] - 1, queries.longest, keys.longest
    bias = limits.bias
    bias_dtype = torch.float32 if bias is None else bias.dtype
    sink, slopes = limits.sink, limits.slopes
    bias_grad, sink_grad = (
        added is not None and added.requires_grad and torch.is_grad_enabled()
        for added in (bias, sink)
    )
    softmax = sink is not None, sink_grad, 0 if slopes is None else slopes.dim()
    window = tuple(limits.window)
    channels = tuple(of.shape[1] for of in angles)
    repeatable = native.deterministic()
    in_fp8 = fp8.in_layer(core, *about, limits, dropout, hands_over)
    key = (
        slices, dropout, tracker, core.softmax_scale, window, limits.bottom_right, *masks,
        len(lengths), bias_dtype, bias_grad, channels, interleaved, norms_first, qkv_format,
        bool(source) and source[0].requires_grad, repeatable, packed, *softmax, in_fp8,
        limits.softcap,
    )  # fmt: skip

    def spec() -> AttentionSpec:
        cast = {} if in_fp8 is None else in_fp8._asdict()
        cast.pop("recipe", None)
        return AttentionSpec(
            slices, qkv_format == "sbhd", core.softmax_scale, dropout, window,
            limits.bottom_right, channels, interleaved, norms_first, *masks, len(lengths),
            _core.dtype_code(bias_dtype), bias_grad, repeatable, packed, *softmax,
            softcap=limits.softcap, **cast,
        )  # fmt: skip

    tensors = (limits.mask, bias, *lengths, *offsets, sink, slopes)
    tensors = (*source, *angles, *(tensor for tensor in tensors if tensor is not None))
    owner = None if in_fp8 is None else core
    constant = not (source or angles) and is_constant(core, limits)
    return Attending(key, spec, tensors, _draw_in(tracker), choice, owner, constant)


def alike(keys: Any, inp: Tensor, batch: int | None) -> bool:
    """Whether a source of keys goes together with the input; `batch`: the dim of it, or None."""
    return keys is inp or (
        type(keys) is Tensor
        and keys.dim() == inp.dim()
        and keys.dtype is inp.dtype
        and keys.device == inp.device
        and (batch is None or keys.shape[batch] == inp.shape[batch])
        and keys.shape[-1] == inp.shape[-1]
    )


def angles_of(
    given: Any, lengths: tuple[int, int], slices: tuple, inp: Tensor
) -> tuple[Tensor, ...] | None:
    """Angles [positions, channels] of queries and keys; None for what is to be called, or refused.

    One for both where they are the same.
    """
    if given is None:
        return ()
    both = given if isinstance(given, tuple | list) else (given, given)
    if len(both) != 2:
        return None
    found = []
    for angles, length, slice_ in zip(both, lengths, slices, strict=False):
        if (
            type(angles) is not Tensor
            or angles.dim() != 4
            or angles.shape[1:3] != (1, 1)
            or angles.requires_grad
            or angles.shape[0] < length
            or angles.shape[3] > slice_[1]
            or angles.shape[3] % 2 != 0
        ):
            return None
        flat = angles.reshape(angles.shape[0], angles.shape[3])
        found.append(flat.to(inp.device, torch.float32).contiguous())
    return tuple(found[:1] if both[0] is both[1] else found)


def sink_of(core: Any) -> tuple | None:
    """What a call depends on of the parameter of `core`'s softmax; None without one."""
    sink = core.__dict__["_parameters"].get("softmax_offset")
    if sink is None:  # or a parametrization makes it
        return None
    wanted = sink.requires_grad and torch.is_grad_enabled()
    return sink, wanted, sink.dtype, sink.device


def is_constant(core: Any, limits: Limits) -> bool:
    """Whether a call with the same arguments, none of them a tensor, has these limits again.

    Then they hold no tensors, but the parameter of the softmax or what is made once for a device.
    """
    lengths = limits.query_lengths is not None or limits.packed is not None
    if lengths or limits.mask is not None or limits.bias is not None:
        return False
    if isinstance(core.window_size, list):  # it may change
        return False
    learnt, offset = core.softmax_type == "learnable", core._parameters.get("softmax_offset")
    if learnt and limits.sink is not offset:  # a parametrization makes it, too
        return False
    made = [tensor for tensor in (limits.sink, limits.slopes) if tensor is not None]
    # What is made while a graph is captured is memory of that graph.
    return not any(t.is_cuda and torch.cuda.is_current_stream_capturing() for t in made)


def _draw_in(tracker: Callable | None) -> Callable[[Tensor], None] | None:
    """What fills the random pair of a dropout in the fork of a tracker; None without one."""
    if tracker is None:
        return None

    def draw(pair: Tensor) -> None:
        with tracker().fork():
            pair.random_()

    return draw


# ---- attention by itself: the calls that are found again -----------------------------------------


_grad_enabled = torch.is_grad_enabled
_deterministic = torch.are_deterministic_algorithms_enabled
_VALUES = (bool, int, float, str, type(None))


class KeptCall(NamedTuple):
    """How a call runs."""

    call: LayerCall
    apply: Callable | None  # runs it and records its backward; None: there is none
    limits: tuple[Tensor, ...]  # tensors of the call behind queries, keys and values
    choice: Choice
    dtype: torch.dtype | None  # that `torch.autocast` casts queries, keys and values to, or None

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        """Run it over queries, keys and values."""
        if self.dtype is not None:
            tensors = [tensor.to(self.dtype) for tensor in tensors]
        if self.apply is None:
            return run_forward_alone(self.call, (*tensors, *self.limits))
        return self.apply(self.call, *tensors, *self.limits)


class _JoinedCall(LayerCall):
    """A call over a tensor of several of queries, keys and values: a matrix to its plans."""

    inner: tuple[int, ...]  # its dims behind the leading ones
    at = 0  # its place among the tensors of the call

    def run_forward(self, tensors: tuple, caches: Any = None) -> tuple[Any, Sequence[Tensor]]:
        at = self.at
        matrix = tensors[at].flatten(-len(self.inner))
        return super().run_forward((*tensors[:at], matrix, *tensors[at + 1 :]), caches)

    def run_backward(self, grads: tuple, saved: Sequence, weights: Any = None) -> tuple:
        _, *found = super().run_backward(grads, saved, weights)
        if found[self.at] is not None:
            found[self.at] = found[self.at].unflatten(-1, self.inner)
        return None, *found


class KeptCalls:
    """The calls that an attention keeps."""

    def __init__(self) -> None:
        self._by_arguments: dict[tuple, KeptCall] = {}
        self._calls: dict[tuple, tuple[LayerCall, Callable | None]] = {}
        self._recurrence = Recurrence()

    def key_of(self, core: Any, tensors: tuple, arguments: tuple | None) -> tuple | None:
        """What a call is found by; None for one that runs in no plan.

        `tensors` hold queries, keys and values, `arguments` are all others, None where these are
        the defaults. No graph is being traced.
        """
        asked = fp8.is_asked_for if graph_task() == -1 else fp8.in_force
        if asked(core) or dispatch_modes() or in_transform() or forward_gradients():
            return None  # runs another way
        facts = _core.facts_of_heads(*tensors)
        if facts is None:
            return None
        own = core.__dict__
        dtype = _autocast_dtype(tensors[0]) if any_autocast() else None
        return (
            facts, dtype, _grad_enabled(), own["training"], own["attention_dropout"], sink_of(core),
            attention_switches(), _deterministic(), attention_class_name(), arguments,
        )  # fmt: skip

    def known(self, key: tuple) -> KeptCall | None:
        """The call of a key that has been kept."""
        try:
            return self._by_arguments.get(key)
        except TypeError:  # an argument is a list
            return None

    def find(
        self, core: Any, heads: Heads, how: tuple[Choice, Limits], qkv_format: str, key: tuple
    ) -> KeptCall | None:
        """The call for what its `limits_for` gave; None where it runs in no plan."""
        if heads.dim != 0 and not heads.tensors[-1].is_contiguous():
            return None
        attends = attention_node(core, how, slices_of(heads), qkv_format=qkv_format)
        if attends is None:
            return None
        facts, dtype, *_ = key
        kind = (facts, dtype, _grad_enabled(), heads.dim, attends.key)
        made = self._calls.get(kind)
        if made is None:
            if not (self._recurrence.is_met(kind) or _may_be_repeated()):
                return None
            made = keep(self._calls, kind, _bind(heads, attends, dtype))
        found = KeptCall(*made, attends.tensors, how[0], dtype)
        if attends.constant and all(isinstance(each, _VALUES) for each in _flat(key[-1] or ())):
            keep(self._by_arguments, key, found)
        return found


def _may_be_repeated() -> bool:
    """Whether a call is in a checkpoint, which compares what its two forwards save.

    So both run the same way, whichever calls came between.
    """
    return graph_task() != -1 or top_saved_hooks(False) is not None


def _autocast_dtype(like: Tensor) -> torch.dtype | None:
    """The dtype that `torch.autocast` casts to on the device of a tensor; None: it is off there."""
    device = like.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _bind(
    heads: Heads, attends: Attending, dtype: torch.dtype | None
) -> tuple[LayerCall, Callable | None]:
    """Make the call of a kind, and what runs it; `dtype` as of `KeptCall`."""
    tensors, joined = heads.tensors, heads.joined
    trained = (*tensors, *attends.tensors)
    gradient = _grad_enabled() and any(tensor.requires_grad for tensor in trained)
    graph = core_graph(
        attends.spec(), _core.dtype_code(dtype or tensors[0].dtype), gradient, joined
    )
    plans, label = plans_of(graph), "attention"
    if joined:
        call: LayerCall = _JoinedCall(plans, None, label)
        call.at, call.inner = len(tensors) - 1, tuple(tensors[-1].shape[-3:])
    else:
        call = LayerCall(plans, None, label)
    call.set_owners(())
    call.fills = fills_of(plans, (attends,))
    return call, None if plans.backward is None else apply_of(label)


def _flat(arguments: tuple) -> list:
    return [item for each in arguments for item in (each if isinstance(each, tuple) else (each,))]
