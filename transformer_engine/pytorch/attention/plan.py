# SPDX-License-Identifier: Apache-2.0
"""Attention as a node of a plan: that of a layer, or its own.

A call goes its way through checks, limits and the choice of a backend. Where that ends at the
library's operator, in high precision or in FP8, it runs as a plan of one node. In eager mode, in
high precision, the call is kept by what it depends on, in checkpoints, under `torch.autocast` and
hooks of saved tensors too. Where no argument but queries, keys and values is a tensor, so is the
whole way: by the arguments, and the facts of these three. In FP8, and where a graph is traced or a
dispatch mode or a transform of torch.func looks on, each call is made anew (`attend`). All ways
give the same bits.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.attention_graphs import AttentionSpec, core_graph
from transformer_engine.common.config import attention_switches
from transformer_engine.common.operand_casts import Quantization
from transformer_engine.common.plans import CallPlans, plans_of
from transformer_engine.pytorch.attention import fp8
from transformer_engine.pytorch.attention.backends import Choice
from transformer_engine.pytorch.attention.masks import Limits, deterministic
from transformer_engine.pytorch.attention.problem import CoreOptions, Heads
from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.execution.autograd import (
    apply_of,
    run_call,
    run_forward_alone,
    run_without_backward,
)
from transformer_engine.pytorch.execution.overrides import attention_class_name_now
from transformer_engine.pytorch.module.call import ModuleCall
from transformer_engine.pytorch.module.call_key import keep
from transformer_engine.pytorch.module.layer_call import Attending, fills_of
from transformer_engine.pytorch.module.quantized import measures_first
from transformer_engine.pytorch.torchside.device import is_captured, prepare_device
from transformer_engine.pytorch.torchside.graph_breaks import Outside
from transformer_engine.pytorch.torchside.modes import (
    any_autocast,
    autocast_dtype,
    deterministic_algorithms,
    dispatch_modes,
    exporting,
    forward_gradients,
    graph_task,
    in_transform,
)

# ---- the node ------------------------------------------------------------------------------------


_NO_ROTARY = ((), False, False)


def _fields(
    limits: Limits,
    slices: tuple,
    sequence_first: bool,
    numbers: tuple[float, float],
    rotary: tuple[tuple, bool, bool] = _NO_ROTARY,
) -> tuple[tuple, tuple[Tensor, ...]]:
    """Fields of an `AttentionSpec` before its quantization, and the tensors of the limits.

    `numbers` are scale and dropout, `rotary` the fields of rotary embeddings and norms. The
    dtype of a bias is torch's: see `spec_of`.
    """
    ends, offsets, bounds = limits.sequence_lengths(), (), ()
    if limits.packed is not None:
        queries, keys = limits.packed
        offsets = queries.offsets, keys.offsets
        # It has no elements: its shape tells a plan the bounds.
        longest = queries.longest, keys.longest, 0
        bounds = (queries.offsets.new_empty(longest, dtype=torch.int32),)
    bias, sink, slopes = limits.bias, limits.sink, limits.slopes
    records = torch.is_grad_enabled() and not exporting()
    fields = (
        slices, sequence_first, *numbers, tuple(limits.window), limits.bottom_right, *rotary,
        _shared_dims(limits.mask), _shared_dims(bias), len(ends),
        torch.float32 if bias is None else bias.dtype,
        records and bias is not None and bias.requires_grad, deterministic(),
        limits.packed is not None, sink is not None,
        records and sink is not None and sink.requires_grad,
        0 if slopes is None else slopes.dim(), limits.softcap, limits.max_logit,
    )  # fmt: skip
    tensors = (limits.mask, bias, *ends, *offsets, sink, slopes, *bounds)
    return fields, tuple([tensor for tensor in tensors if tensor is not None])


def _shared_dims(tensor: Tensor | None) -> tuple[int, ...] | None:
    """1 for each dim that is broadcast to the scores, 0 for others; None without a tensor."""
    return None if tensor is None else tuple([1 if n == 1 else 0 for n in tensor.shape])


def spec_of(fields: tuple, **cast: Any) -> AttentionSpec:
    """What `_fields` stands for, with fields of its quantization."""
    spec = AttentionSpec(*fields, **cast)
    return spec._replace(bias_dtype=_core.dtype_code(spec.bias_dtype))


def _slices(heads: Heads) -> tuple:
    """Heads, channels, offset and stride of queries, keys and values (see `AttentionSpec`)."""
    apart, slices = 3 - heads.joined, []
    for i, tensor in enumerate(heads.split()):
        count, channels = tensor.shape[-2:]
        before = max(i - apart, 0)  # of those that are in one tensor
        offset, stride = before * count * channels, channels
        if heads.dim == -2 and i >= apart:
            offset, stride = before * channels, heads.joined * channels
        slices.append((count, channels, offset, stride))
    return tuple(slices)


_grad_enabled = torch.is_grad_enabled

_NOTHING = ((), (), False, False)


def attention_node(
    core: Any,
    decision: tuple[Choice, Limits],
    slices: tuple,
    qkv_format: str,
    given: tuple[tuple, tuple, bool, bool] = _NOTHING,
    in_fp8: fp8.LayerCasts | None = None,
) -> Attending:
    """How a call that the library's operator runs attends as part of a plan.

    Scale, dropout and random state are those of `core`, a `DotProductAttention`; `decision` is what
    its `limits_for` gives; `slices` are of queries, keys and values in their projections; `given`
    is the source or nothing, the angles, whether these are interleaved, and whether norms come
    before them.
    """
    choice, limits = decision
    dropout = core.attention_dropout if core.training else 0.0
    source, angles, interleaved, norms_first = given
    tracker = core._get_tracker if dropout > 0.0 else None
    rotated = tuple([each.shape[1] for each in angles]) if angles else ()
    rotary = rotated, interleaved, norms_first
    numbers = core.softmax_scale, dropout
    fields, tensors = _fields(limits, slices, qkv_format == "sbhd", numbers, rotary)
    sources = tuple([(each.dtype, each.requires_grad) for each in source])
    key = fields, tracker, sources, in_fp8

    def spec() -> AttentionSpec:
        cast = {} if in_fp8 is None else in_fp8._asdict()
        cast.pop("recipe", None)
        return spec_of(fields, **cast)

    owner = None if in_fp8 is None else core
    anew = torch.compiler.is_compiling() or len(source) + len(angles) > 0
    constant = not anew and is_constant(core, limits)
    tensors = (*source, *angles, *tensors)
    return Attending(key, spec, tensors, _draw_in(tracker), choice, owner, constant)


def facts_around(core: Any) -> tuple:
    """Key of what a call of `core` depends on beside its settings, arguments and tensors.

    That is the parameter of its softmax, the grad mode (what inference mode has made can not be
    saved), and who may run attention.
    """
    sink, gradients = core.__dict__["_parameters"].get("softmax_offset"), _grad_enabled()
    if sink is not None:  # else there is none, or a parametrization makes it
        sink = sink, sink.requires_grad and gradients, sink.dtype, sink.device
    switches, repeatable = attention_switches(), deterministic_algorithms()
    return sink, gradients, switches, repeatable, attention_class_name_now()


def is_constant(core: Any, limits: Limits) -> bool:
    """Return whether a call with the same arguments, none of them a tensor, has these limits again.

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
    return not any(map(is_captured, made))


def _draw_in(tracker: Callable | None) -> Callable[[Tensor], None] | None:
    """Return what fills a dropout's random pair in a tracker's fork; None without a tracker."""
    if tracker is None:
        return None

    def draw(pair: Tensor) -> None:
        with tracker().fork():
            pair.random_()

    return draw


# ---- attention by itself: the calls that are found again -----------------------------------------


_VALUES = (bool, int, float, str, type(None))


class KeptCall(NamedTuple):
    """How a call runs."""

    call: ModuleCall
    apply: Callable | None  # runs it and records its backward; None: there is none
    limits: tuple[Tensor, ...]  # tensors of the call behind queries, keys and values
    choice: Choice
    dtype: torch.dtype | None  # that `torch.autocast` casts queries, keys and values to, or None

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Run it over queries, keys and values."""
        if self.dtype is not None:
            tensors = [tensor.to(self.dtype) for tensor in tensors]
        if self.apply is None:
            return run_forward_alone(self.call, (*tensors, *self.limits))
        out = self.apply(self.call, *tensors, *self.limits)
        return out if type(out) is Tensor else _without_gradient(out)


def _without_gradient(out: Any) -> Any:
    """A result, where it is two the largest scores [heads] without a gradient."""
    return (out[0], out[1].detach()) if type(out) is tuple else out


class _JoinedCall(ModuleCall):
    """A call over a tensor of several of queries, keys and values: a matrix to its plans."""

    inner: tuple[int, ...]  # its dims behind the leading ones
    index = 0  # of it among the tensors of the call

    def run_forward(self, tensors: tuple, caches: Any = None) -> tuple[Any, Sequence[Tensor]]:
        i = self.index
        matrix = tensors[i].flatten(-len(self.inner))
        return super().run_forward((*tensors[:i], matrix, *tensors[i + 1 :]), caches)

    def run_backward(self, grads: tuple, saved: Sequence, weights: Any = None) -> tuple:
        _, *found = super().run_backward(grads, saved, weights)
        if found[self.index] is not None:
            found[self.index] = found[self.index].unflatten(-1, self.inner)
        return None, *found


class KeptCalls:
    """The calls that an attention keeps."""

    def __init__(self) -> None:
        self._by_arguments: dict[tuple, KeptCall] = {}
        self._calls: dict[tuple, tuple[ModuleCall, Callable | None]] = {}

    def look_up(
        self, core: Any, tensors: tuple, arguments: tuple | None
    ) -> tuple[tuple | None, KeptCall | None]:
        """Key of a call, None for one that runs in no plan, and the call that is kept by it.

        `tensors` hold queries, keys and values, `arguments` are all others, None where these are
        the defaults. No graph is being traced.
        """
        asked = fp8.region_in_fp8 if graph_task() == -1 else fp8.in_force
        if asked(core) or dispatch_modes() or in_transform() or forward_gradients():
            return None, None  # runs another way
        facts = _core.facts_of_heads(*tensors)
        if facts is None:
            return None, None
        own = core.__dict__
        dtype = autocast_dtype(tensors[0].device.type) if any_autocast() else None
        key = (
            facts, dtype, own["training"], own["attention_dropout"], facts_around(core), arguments,
        )  # fmt: skip
        try:
            return key, self._by_arguments.get(key)
        except TypeError:  # an argument is a list
            return key, None

    def find(
        self, core: Any, heads: Heads, decision: tuple[Choice, Limits], qkv_format: str, key: tuple
    ) -> KeptCall | None:
        """The call for what its `limits_for` gave; None where another backend runs it."""
        if decision[0].backend != "native":
            return None
        attends = attention_node(core, decision, _slices(heads), qkv_format)
        facts, dtype, *_ = key
        kind = (facts, dtype, _grad_enabled(), heads.dim, attends.key)
        made = self._calls.get(kind)
        if made is None:
            made = keep(self._calls, kind, _bind(heads, attends, dtype))
        found = KeptCall(*made, attends.tensors, decision[0], dtype)
        if attends.constant and all(isinstance(each, _VALUES) for each in _flat(key[-1] or ())):
            keep(self._by_arguments, key, found)
        return found


def _bind(
    heads: Heads, attends: Attending, dtype: torch.dtype | None
) -> tuple[ModuleCall, Callable | None]:
    """Make the call of a kind, and what runs it; `dtype` as of `KeptCall`."""
    tensors, joined = heads.tensors, heads.joined
    trained = (*tensors, *attends.tensors)
    gradient = _grad_enabled() and any(tensor.requires_grad for tensor in trained)
    graph = core_graph(
        attends.spec(), _core.dtype_code(dtype or tensors[0].dtype), gradient, joined
    )
    plans = plans_of(graph)
    if joined:
        call: ModuleCall = _JoinedCall(plans, None, _LABEL)
        call.index, call.inner = len(tensors) - 1, tuple(tensors[-1].shape[-3:])
    else:
        call = ModuleCall(plans, None, _LABEL)
    call.fills = fills_of(plans, (attends,))
    return call, None if plans.backward is None else apply_of(_LABEL)


def _flat(arguments: tuple) -> list:
    return [item for each in arguments for item in (each if isinstance(each, tuple) else (each,))]


_LABEL = "attention"


# ---- a call of its own ---------------------------------------------------------------------------


class _Call(ModuleCall):
    """One call of an attention by itself."""

    def _returned(self, made: tuple) -> Any:
        """The output as a `Float8Tensor`, whose next values are cast with its slot, or measured."""
        from transformer_engine.pytorch.tensor.recipes import format_of

        graph = self.plans.graph
        cast = graph.nodes[0].quantization.input
        row = format_of(cast)
        forms = [None if index < 0 else made[index] for index in self.plans.returned]
        quantizer = row.make(cast, forms[0].device, measures_first(self.recipe))
        slots = self.slots
        if slots is not None:
            slot = slots.forward_slot + fp8.OUTPUT_SLOT
            quantizer.scale = slots.forward_scale[slot : slot + 1]
            quantizer.amax = slots.forward_history[0, slot : slot + 1]
            quantizer._bound = slots
        shape = tuple(forms[0].shape)
        fields = {**row.fields(quantizer, tuple(forms), shape), "_quantizer": quantizer}
        return row.tensor._made(fields, _core.torch_dtype(graph.values[0].dtype), shape)


def attend(
    module: Any,
    more: CoreOptions,
    heads: Heads,
    qkv_format: str,
    limits: Limits,
    scale: float,
    dropout: float,
) -> Any:
    """Softmax(scale * query key^T + bias) value, with dropout of the weights; in FP8 where it is.

    The attention is that of `module`, a `DotProductAttention`. Queries, keys and values are fp32
    (on the CPU), fp16 or bf16: [sequence, batch, heads, channels] (sbhd), [batch, sequence, heads,
    channels] (bshd) or [tokens, heads, channels] (thd); keys and values may have fewer heads, which
    divide those of the queries. Of what is in one tensor the gradient is too. Bias and sink of the
    limits are differentiable; a softcap bounds the products before the bias is added. The output
    [.., heads * channels of values] has the dtype of the queries, under `torch.autocast` its dtype,
    and is contiguous; with ``fp8_output`` it is a `Float8Tensor` of that nominal one. Where the
    limits want them, the largest scores [heads] fp32 follow, without a gradient.
    NotImplementedError for what no graph of `torch.export` or transform of torch.func holds.
    """
    traced, in_fp8 = torch.compiler.is_compiling(), fp8.in_force(module)
    if in_fp8 and fp8.leaves_graph(more, dropout, traced):
        return _attend_outside(module, more, heads, qkv_format, limits, scale, dropout)
    heads = heads.in_autocast()
    like, slices = heads.tensors[0], _slices(heads)
    if traced:  # what differs from graph to graph becomes a symbol, of which no plan is made
        slices = tuple([tuple([operator.index(each) for each in slice_]) for slice_ in slices])
        scale, dropout = plan_ops.as_constant(float(scale)), plan_ops.as_constant(float(dropout))
        limits = limits.replaced(softcap=plan_ops.as_constant(float(limits.softcap)))
    fields, given = _fields(limits, slices, qkv_format == "sbhd", (scale, dropout))
    trained = heads.tensors if in_fp8 else (*heads.tensors, *given)
    gradient = torch.is_grad_enabled() and not exporting()
    gradient = gradient and any([tensor.requires_grad for tensor in trained])
    casts = None
    if in_fp8:
        queries = like.shape[1 if qkv_format == "bshd" else 0]
        casts = fp8.casts_of(
            module, more, like, limits, traced, gradient=gradient, queries=queries, dropout=dropout
        )
    blank = casts is not None and casts.region.blank
    key = (
        torch.device("meta") if blank else like.device, like.dtype, gradient,
        heads.joined, fields, None if casts is None else casts.key,
    )  # fmt: skip
    if traced:
        module._ensure_plans(key)
    call = _Call(
        plans_for(module, key),
        None if casts is None else casts.slots,
        _LABEL if casts is None else type(module).__name__,
    )
    call.traced = plan_ops.behind_operators(like)
    records = call.plans.backward is not None
    if casts is not None:
        fp8.begin_call(module, call, casts, records)
    run = run_call if records else run_without_backward
    out = run(call, *_rows_of(heads, in_fp8), *given)
    if casts is not None:
        fp8.end_call(module, call, casts)
    return _without_gradient(out)


_attend_outside = Outside(attend)


def _rows_of(heads: Heads, in_fp8: bool) -> list[Tensor]:
    """Its tensors as plans read them: several in one as rows, in FP8 all of them, dense."""
    *apart, last = heads.tensors
    if not in_fp8:
        return [*apart, last.flatten(-3) if heads.joined else last]
    rows = [*(each.flatten(-2) for each in apart), last.flatten(-3 if heads.joined else -2)]
    return [tensor.contiguous() for tensor in rows]


def plans_for(module: Any, key: tuple) -> CallPlans:
    """The plans of a key, which are made where there are none."""
    known = module._plans.get(key)
    if known is not None:
        return known
    device, dtype, gradient, joined, fields, casts = key
    prepare_device(device)
    cast = {}
    if casts is not None:
        codes, epsilons, *bits = casts
        names = "fp8_gradient", "no_amax", "fp8_output"
        cast = dict(zip(names, bits, strict=True))
        cast["quantization"] = Quantization.of_flat(codes, epsilons)
    graph = core_graph(spec_of(fields, **cast), _core.dtype_code(dtype), gradient, joined)
    return keep(module._plans, key, plans_of(graph))
