# SPDX-License-Identifier: Apache-2.0
"""Implementations that modules run where the policy in force selects others than this library's.

Modules run operators of the C library, of which `MAPPED` says by which operators of
`transformer_engine_torch` they are defined. An adapter makes a function for a slot of the C
operator out of implementations of these: it gets the fields of a call as a dict, calls one, and
writes what that returns to where the call wants it. A call that no implementation takes goes on to
this library's own (`NotImplemented`); under a strict policy, or one that leaves ours out, it
raises.

Operators ``te_<name>`` are those of the C library themselves: their implementations take a call as
it is and are asked before all adapters. They are slots of plug-ins that are shared objects
(`discovery.register_library`), or functions of Python, which get the fields of the call as a dict.

Importing this package imports no torch; adapters are imported when one is needed.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from transformer_engine import _core
from transformer_engine.common.selections import MET
from transformer_engine.plugin import builtin, definitions
from transformer_engine.plugin.core.failures import NobodyError, is_of_implementation

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

LISTS: frozenset[str] = frozenset(builtin.SHARED["optimizers"].split())
"""Operators on lists of tensors, which optimizers and programs run: none of the C library."""

OPERATORS: frozenset[str] = frozenset(
    (ATTENTION_CLASS, *LISTS, *(name for row in MAPPED for name in row.names))
)
"""Operators of `transformer_engine_torch` that modules and optimizers run."""


def overrides(implementations: Iterable[Any]) -> tuple:
    """Those of an operator's implementations that are asked before this library's own."""
    return tuple(itertools.takewhile(lambda one: one.impl_id != NATIVE, implementations))


def replacing(implementations: Iterable[Any]) -> tuple:
    """Those that are asked on devices without kernels of this library, before its definitions.

    That this library's own kernels come first in an order means nothing there.
    """
    found = tuple(implementations)
    first = overrides(found)
    return (*first, *(one for one in found[len(first) + 1 :] if one.impl_id != definitions.NAME))


LIBRARY: dict[str, str] = {f"te_{op}": op for op in _core.op_names()}
"""Operators of the C library as plug-ins name them, and their names there."""
WITHOUT: dict[str, str] = {"dropout_fwd": "dropout_add", "dropout_bwd": "dropout_backward"}
"""Operators that can express no call of that of the C library which is theirs, and that one."""
_ADMIT_OURS = frozenset(("flagos", "default", f"impl:{NATIVE}"))
"""Tokens that name this library's own."""
UNEXPRESSED = "the operator's arguments do not express it"
"""Why an implementation of an operator is not asked."""


class Closed(NamedTuple):
    """Operators of which modules do not run this library's own where nobody else takes a call.

    An operator of the C library is closed by its own order; where also each operator that it is
    mapped to leaves ours out, it is here as "*te_norm": what nobody has taken in the end is not
    run. Where this library has no kernels its own are definitions, and other names admit them.
    """

    names: frozenset[str]
    without_kernels: frozenset[str]  # the same on devices where there are none


class Asked(NamedTuple):
    """Implementations in force by operator that modules run in place of this library's own."""

    where_kernels: Mapping[str, tuple]
    without_kernels: Mapping[str, tuple]  # on devices where this library has none

    def every(self, name: str) -> Iterator[tuple[Any, bool]]:
        """Those of an operator in order, and whether they are asked on every device."""
        first = self.where_kernels.get(name, ())
        yield from ((one, True) for one in first)
        yield from ((one, False) for one in self.without_kernels.get(name, ())[len(first) :])


def mapped_to(op: str) -> tuple[str, ...]:
    """Operators of `transformer_engine_torch` by which one of the C library may be replaced."""
    found = (name for row in MAPPED if row.op == op for name in row.names)
    return tuple(n for n in found if op in ("quantize", "amax") or n not in _OF_VALUES)


# ---- operators of the C library ------------------------------------------------------------------


def is_of_fields(impl: Any) -> bool:
    """Return whether an `OpImpl` is a function of the fields of a call of the C library's."""
    if impl.op_name not in LIBRARY or impl.impl_id == NATIVE:
        return False
    return not isinstance(impl.fn, _core.NativeSlot)


def taking_fields(impl: Any) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """Function and predicate of such an implementation, for calls of either kind.

    They are called with a dict of the fields, as modules do, or with the arguments that the
    operator's function of `_core` has.
    """
    signature = inspect.signature(getattr(_core, LIBRARY[impl.op_name]))

    def read(args: tuple, kwargs: dict) -> Mapping[str, Any]:
        if len(args) == 1 and not kwargs and isinstance(args[0], dict):
            return args[0]
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return {name: value for name, value in bound.arguments.items() if name != "context"}

    @functools.wraps(impl.fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return impl.fn(read(args, kwargs))

    def takes(*args: Any, **kwargs: Any) -> Any:
        fields = read(args, kwargs)
        limits = impl.limits()
        answer = True if limits is None else limits(*fields.values())
        if answer is not True or impl.supports is None:
            return answer
        return impl.supports(fields)

    return run, None if impl.takes is None else takes


# ---- tables --------------------------------------------------------------------------------------


def _end(name: str, asked: Asked, closed: Closed, refuse: Callable) -> tuple:
    """A slot that raises for each call of an operator of the C library that comes to it.

    `name` is that of the operator, with "*" before it at the end of all, or one of `WITHOUT`,
    which expresses no call that drops something.
    """
    op = WITHOUT.get(name) or LIBRARY[name.removeprefix("*")]
    drops, name_of_op = name in WITHOUT, name.removeprefix("*")

    def run(fields: Mapping[str, Any]) -> Any:
        there = not has_kernels(fields)
        if name not in closed[there] or (drops and not fields["dropout"]):
            return NotImplemented
        with refusals(f"te_{op}", device_of(fields)):
            found = asked[there].get(name_of_op, ())
            return refuse(name_of_op, found, UNEXPRESSED if drops else "")

    return op, run, (_core.op_fields(op)[0][0], "dropout") if drops else None


def device_of(fields: Mapping[str, Any]) -> Any:
    """The device of a call."""
    return next(value.device for value in fields.values() if hasattr(value, "device"))


def has_kernels(fields: Mapping[str, Any]) -> bool:
    """Return whether this library has kernels for the device of a call."""
    from transformer_engine.pytorch.torchside.device import has_kernels

    return has_kernels(device_of(fields))


@contextlib.contextmanager
def refusals(name: str, device: Any) -> Iterator[None]:
    """Have errors inside ``with`` that nobody takes a call say on which device; no other errors.

    On devices without kernels of this library all are NotImplementedError.
    """
    from transformer_engine.pytorch.torchside.device import has_kernels

    try:
        yield
    except NobodyError as error:
        if has_kernels(device):
            raise
        who_runs = importlib.import_module("transformer_engine.plugin.who_runs")  # imports this
        raise NotImplementedError(f"{who_runs.why_nobody(name, device)} ({error})") from None
    except NotImplementedError as error:
        if not is_of_implementation(error):
            error.add_note(f"{name} on {device}: nobody takes the call")
        raise


def overriding(chosen: Mapping[str, Iterable[Any]]) -> Asked:
    """Of the implementations in force by operator those that modules run in place of their own."""
    names = [name for name in chosen if name in OPERATORS or name in WITHOUT or name in LIBRARY]
    asked = {name: found for name in names if (found := overrides(chosen[name]))}
    if not MET:
        return Asked(asked, asked)
    return Asked(asked, {name: found for name in names if (found := replacing(chosen[name]))})


def closed(asked: Asked, policy: Any) -> Closed:
    """Operators closed by orders, and under a strict policy all that have somebody else."""
    strictly = [frozenset(found if policy.strict else ()) for found in asked]
    if not policy.per_op_order:
        return Closed(*strictly)
    admit = _ADMIT_OURS, _ADMIT_OURS | definitions.ADMITTING
    pairs = zip(strictly, admit, strict=True)
    return Closed(*(found | _closed_by_orders(policy, tokens) for found, tokens in pairs))


def _closed_by_orders(policy: Any, admitting: frozenset[str]) -> frozenset[str]:
    """Operators whose order has none of these tokens."""
    named = dict(policy.per_op_order)

    def without_ours(name: str) -> bool:
        tokens = policy.get_per_op_order(name)
        return tokens is not None and admitting.isdisjoint(tokens)

    names = *OPERATORS, *WITHOUT, *(name for name in LIBRARY if name in named)
    found = set(filter(without_ours, names))
    for name, op in LIBRARY.items():
        mapped = [n for row in MAPPED if row.op == op for n in row.names]
        mapped += [n for n, of in WITHOUT.items() if of == op]
        if all(map(without_ours, (name, *mapped))):
            found.add(f"*{name}")
    return frozenset(found)


def selection(asked: Asked, closed: Closed, refuse: Callable) -> "_core.Selection | None":
    """Table that runs of plans ask first; None: there is none.

    `asked` has implementations by operator, in the order in which they are asked. A call that none
    of them takes is this library's own, but of those operators that are `closed`, for which
    ``refuse(name, asked, why)`` raises.
    """
    slots: list[tuple[str, Callable, tuple | None]] = []
    either = closed.names | closed.without_kernels
    names = asked.where_kernels.keys() | asked.without_kernels.keys()
    if not either and not names:
        return None
    fields = importlib.import_module(f"{__name__}.fields")  # imports torch
    for name, op in LIBRARY.items():
        slots += ((op, slot, None) for slot in fields.as_they_are(name, asked))
        slots += [_end(name, asked, closed, refuse)] if name in either else ()
    if either or not OPERATORS.isdisjoint(names):
        for row in MAPPED:
            pairs = zip(asked, closed, strict=True)
            own = [fields.Choices(found, row.names, those, refuse) for found, those in pairs]
            slots += [(row.op, *fields.adapted(row, *own))] if any(own) else ()
    ends = *WITHOUT, *(f"*{name}" for name in LIBRARY)
    slots += (_end(name, asked, closed, refuse) for name in ends if name in either)
    others: dict[str, Callable] = {}
    if not LISTS.isdisjoint(either | names):
        lists = importlib.import_module(f"{__name__}.lists")
        others = lists.overriding(asked, closed, refuse)
    if ATTENTION_CLASS in asked.where_kernels:
        classes = importlib.import_module("transformer_engine.plugin.builtin.flash_attention")
        others[ATTENTION_CLASS] = classes.class_in_force
    return _core.Selection(tuple(slots), others) if slots or others else None
