# SPDX-License-Identifier: Apache-2.0
"""Attention by itself as a plan: the calls that a `DotProductAttention` finds again.

A call goes its way through checks, limits and the choice of a backend. Where that ends at the
library's operator, and nothing but autograd looks on, it runs as a plan of one node, which is kept
by what it depends on. Where no argument but queries, keys and values is a tensor, so is the whole
way: by the arguments, and the facts of these three. Both ways give the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.config import attention_switches
from transformer_engine.common.layer_graphs import CoreSpec
from transformer_engine.common.plans import core_plans
from transformer_engine.pytorch.attention.dot_product_attention import fp8
from transformer_engine.pytorch.attention.dot_product_attention.attending import attending, sink_of
from transformer_engine.pytorch.attention.dot_product_attention.backends import Choice
from transformer_engine.pytorch.attention.dot_product_attention.heads import Heads, slices_of
from transformer_engine.pytorch.attention.dot_product_attention.limits import Limits
from transformer_engine.pytorch.execution.autograd import apply_of, run_forward_alone
from transformer_engine.pytorch.execution.overrides import attention_class_name
from transformer_engine.pytorch.module.call import LayerCall
from transformer_engine.pytorch.module.layer_call import Attending, fills_of
from transformer_engine.pytorch.module.situation import Recurrence, keep
from transformer_engine.pytorch.torchside.modes import (
    any_autocast,
    dispatch_modes,
    forward_gradients,
    graph_task,
    in_transform,
    top_saved_hooks,
)

__all__ = ["CoreCalls", "Found"]

_grad_enabled = torch.is_grad_enabled
_deterministic = torch.are_deterministic_algorithms_enabled
_VALUES = (bool, int, float, str, type(None))


class Found(NamedTuple):
    """How a call runs."""

    call: LayerCall
    apply: Callable | None  # runs it and records its backward; None: there is none
    limits: tuple[Tensor, ...]  # tensors of the call behind queries, keys and values
    choice: Choice

    def run(self, tensors: Sequence[Tensor]) -> Tensor:
        """Run it over queries, keys and values."""
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


class CoreCalls:
    """The calls that an attention keeps."""

    def __init__(self) -> None:
        self._by_arguments: dict[tuple, Found] = {}
        self._calls: dict[tuple, tuple[LayerCall, Callable | None]] = {}
        self._recurrence = Recurrence()

    def key_of(self, core: Any, tensors: tuple, arguments: tuple) -> tuple | None:
        """What a call is found by; None for one that runs in no plan.

        `tensors` hold queries, keys and values, `arguments` are all others. No graph is being
        traced.
        """
        if (
            fp8.is_asked_for(core)  # runs another way
            or dispatch_modes()
            or any_autocast()
            or in_transform()
            or forward_gradients()
            or graph_task() != -1  # a checkpoint compares what its two forwards save
            or top_saved_hooks(False) is not None
        ):
            return None
        facts = _core.facts_of_heads(*tensors)
        if facts is None:
            return None
        own = core.__dict__
        return (
            facts, _grad_enabled(), own["training"], own["attention_dropout"], sink_of(core),
            attention_switches(), _deterministic(), attention_class_name(), arguments,
        )  # fmt: skip

    def known(self, key: tuple) -> Found | None:
        """The call of a key that has been kept."""
        try:
            return self._by_arguments.get(key)
        except TypeError:  # an argument is a list
            return None

    def find(
        self, core: Any, heads: Heads, how: tuple[Choice, Limits], qkv_format: str, key: tuple
    ) -> Found | None:
        """The call for what its `limits_for` gave; None where it runs in no plan."""
        if heads.dim != 0 and not heads.tensors[-1].is_contiguous():
            return None
        attends = attending(core, how, slices_of(heads), qkv_format=qkv_format)
        if attends is None:
            return None
        kind = (key[0], _grad_enabled(), heads.dim, attends.key)
        made = self._calls.get(kind)
        if made is None:
            if not self._recurrence.is_met(kind):
                return None
            made = keep(self._calls, kind, _bind(heads, attends))
        found = Found(*made, attends.tensors, how[0])
        if attends.constant and all(isinstance(each, _VALUES) for each in _flat(key[-1])):
            keep(self._by_arguments, key, found)
        return found


def _bind(heads: Heads, attends: Attending) -> tuple[LayerCall, Callable | None]:
    """Make the call of a kind, and what runs it."""
    tensors, joined = heads.tensors, heads.joined
    trained = (*tensors, *attends.tensors)
    gradient = _grad_enabled() and any(tensor.requires_grad for tensor in trained)
    spec = CoreSpec(attends.spec(), _core.dtype_code(tensors[0].dtype), gradient, joined)
    plans, label = core_plans(spec), "attention"
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
