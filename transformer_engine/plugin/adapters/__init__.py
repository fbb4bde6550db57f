# SPDX-License-Identifier: Apache-2.0
"""Implementations that modules run where the policy in force selects others than this library's.

Modules run operators of the C library, of which `MAPPED` says by which operators of
`transformer_engine_torch` they are defined. An adapter makes a function for a slot of the C
operator out of implementations of these: it gets the fields of a call as a dict, calls one, and
writes what that returns to where the call wants it. A call that no implementation takes goes on to
this library's own (`NotImplemented`); under a strict policy, or one that leaves ours out, it
raises.

Operators ``te_<name>`` are those of the C library themselves: of their implementations modules run
the slots of plug-ins that are shared objects (`discovery.register_library`), which take a call as
it is and are asked before all adapters.

Importing this package imports no torch; adapters are imported when one is needed.
"""

import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from transformer_engine import _core
from transformer_engine.common.selections import CLASSES
from transformer_engine.plugin import builtin

NATIVE = "default.native"
"""The implementations of this library: modules have these anyway."""


class Mapped(NamedTuple):
    """An operator of the C library, and the operators that its calls are."""

    op: str  # of the C library
    names: tuple[str, ...]  # of `transformer_engine_torch`
    adapter: str  # module of this package, and its function of choices and fields of a call


_CASTS = ("quantize", "bgrad_quantize")
_OF_VALUES = (*_CASTS, "compute_amax")  # what becomes of values that another operator computes
_SOFTMAX = builtin.SOFTMAX.split()  # each forward, and its backward
_UPDATE = "fused_amax_and_scale_update_after_reduction"

MAPPED: tuple[Mapped, ...] = (
    Mapped("quantize", _CASTS, "casts:quantize"),
    Mapped("dequantize", ("dequantize",), "casts:dequantize"),
    Mapped("gemm", ("generic_gemm",), "gemm:gemm"),
    Mapped("norm", ("layernorm_fwd", "rmsnorm_fwd", *_OF_VALUES), "values:norm"),
    Mapped(
        "norm_backward", ("layernorm_bwd", "rmsnorm_bwd", "rmsnorm_bwd_add"), "values:norm_backward"
    ),
    Mapped("activation", (*builtin.ACTIVATIONS, *_OF_VALUES), "values:activation"),
    Mapped(
        "activation_backward",
        (*itertools.chain(*builtin.ACTIVATIONS.values()), *_OF_VALUES),
        "values:activation_backward",
    ),
    Mapped("softcap", _OF_VALUES, "values:softcap"),
    Mapped("attention", ("fused_attn_fwd",), "attention:attention"),
    Mapped("attention_backward", ("fused_attn_bwd",), "attention:attention_backward"),
    Mapped("softmax", tuple(_SOFTMAX[::2]), "attention:softmax"),
    Mapped("softmax_backward", tuple(_SOFTMAX[1::2]), "attention:softmax_backward"),
    Mapped("rope", tuple(builtin.ROPE.split()), "attention:rope"),
    Mapped("cache_append", ("copy_to_kv_cache",), "state:cache_append"),
    Mapped("transpose", ("fp8_transpose",), "state:transpose"),
    Mapped("amax", ("compute_amax",), "state:amax"),
    Mapped("scaling_update", (_UPDATE,), "state:scaling_update"),
)
"""In any order: an operator of the C library is in it once."""

PLACED: frozenset[str] = frozenset(
    name
    for row in MAPPED
    if row.op.partition("_")[0] in ("norm", "activation")
    for name in row.names
    if name not in _OF_VALUES
)
"""Operators whose implementations are told where results go that the signature has no place for:
by the keyword `out`, a tuple of tensors for the results, if they have a parameter of that name."""

ATTENTION_CLASS = "get_flash_attention_class"
"""It is no operator of the C library: `te.DotProductAttention` asks for the class at a call."""

OPERATORS: frozenset[str] = frozenset(
    (ATTENTION_CLASS, *(name for row in MAPPED for name in row.names))
)
"""Operators of `transformer_engine_torch` that modules run."""


def overrides(implementations: Iterable[Any]) -> tuple:
    """Those of an operator's implementations that are asked before this library's own."""
    return tuple(itertools.takewhile(lambda one: one.impl_id != NATIVE, implementations))


_LIBRARY = {f"te_{op}": op for op in _core.op_names()}
_WITHOUT = {"dropout_fwd": "dropout_add", "dropout_bwd": "dropout_backward"}
"""Operators that can express no call of that of the C library which is theirs, and that one."""
_REFERENCE = frozenset(("reference", "impl:reference.torch"))
"""Tokens that name definitions, which run operators where this library has no kernels."""
_ADMIT_OURS = frozenset(("flagos", "default", f"impl:{NATIVE}"))
"""Tokens that name this library's own."""
UNEXPRESSED = "the operator's arguments do not express it"
"""Why an implementation of an operator is not asked."""


def _end(
    op: str, name: str, overriding: Mapping[str, tuple], refuse: Callable, only: str = ""
) -> tuple:
    """A slot that raises for each call of an operator of the C library that comes to it.

    `only`: for those alone in which a field is not 0, which no operator expresses.
    """
    asked = overriding.get(name, ())

    def run(fields: Mapping[str, Any]) -> Any:
        if not only:
            return refuse(name, asked)
        return refuse(name, asked, UNEXPRESSED) if fields[only] else NotImplemented

    return op, run, (only,) if only else ()


def overriding(chosen: Mapping[str, Iterable[Any]]) -> Mapping[str, tuple]:
    """Of the implementations in force by operator those that modules run in place of their own."""
    asked = {n: overrides(found) for n, found in chosen.items() if n in OPERATORS or n in _WITHOUT}
    for name in filter(chosen.__contains__, _LIBRARY):  # those that are slots of shared objects
        found = overrides(chosen[name])
        asked[name] = tuple(one for one in found if isinstance(one.function, _core.NativeSlot))
    return {name: found for name, found in asked.items() if found}


def closed(overriding: Mapping[str, tuple], policy: Any) -> frozenset[str]:
    """Operators of which modules do not run this library's own where nobody else takes a call.

    Under a strict policy all that have somebody else, and those whose order leaves ours out. An
    operator of the C library is closed by its own order; where also each operator that it is mapped
    to leaves ours out, it is here as "*te_norm": what nobody has taken in the end is not run.
    """
    found = set(overriding if policy.strict else ())
    if not policy.per_op_order:
        return frozenset(found)
    named = dict(policy.per_op_order)

    def without_ours(name: str) -> bool:
        tokens = policy.get_per_op_order(name)
        return tokens is not None and not _ADMIT_OURS.intersection(tokens)

    names = *OPERATORS, *_WITHOUT, *(name for name in _LIBRARY if name in named)
    found |= set(filter(without_ours, names))
    for name, op in _LIBRARY.items():
        mapped = [n for row in MAPPED if row.op == op for n in row.names]
        mapped += [n for n, of in _WITHOUT.items() if of == op]
        if all(map(without_ours, (name, *mapped))):
            found.add(f"*{name}")
    return frozenset(found)


def selection(
    overriding: Mapping[str, tuple], closed: frozenset[str], refuse: Callable
) -> "_core.Selection | None":
    """Table that runs of plans ask first; None: there is none.

    `overriding` are implementations by operator, in the order in which they are asked. A call that
    none of them takes is this library's own, but of those operators that are `closed`, for which
    ``refuse(name, asked, why)`` raises.
    """
    slots: list[tuple[str, Callable, tuple | None]] = []
    for name, op in _LIBRARY.items():
        slots += ((op, one.function, None) for one in overriding.get(name, ()))
        slots += [_end(op, name, overriding, refuse)] if name in closed else ()
    if closed or not OPERATORS.isdisjoint(overriding):
        fields = importlib.import_module(f"{__name__}.fields")  # imports torch
        for row in MAPPED:
            own = fields.Choices(overriding, row.names, closed, refuse)
            slots += [(row.op, *fields.adapted(row, own))] if own else ()
    for name in closed & _WITHOUT.keys():
        slots.append(_end(_WITHOUT[name], name, overriding, refuse, "dropout"))
    for name, op in _LIBRARY.items():
        slots += [_end(op, name, overriding, refuse)] if f"*{name}" in closed else ()
    if not slots and ATTENTION_CLASS not in overriding:
        return None
    made = _core.Selection(tuple(slots))
    if ATTENTION_CLASS in overriding:
        asked = importlib.import_module("transformer_engine.plugin.builtin.flash_attention")
        CLASSES[made.number] = asked.class_in_force
    return made
