# SPDX-License-Identifier: Apache-2.0
"""`coverage`: who runs each operator on a type of devices, under a policy, and how often."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from transformer_engine import _core
from transformer_engine.plugin import adapters, builtin, definitions
from transformer_engine.plugin.core.manager import (
    Candidate,
    Explanation,
    OpManager,
    get_default_manager,
)
from transformer_engine.plugin.core.policy import get_policy
from transformer_engine.plugin.core.types import BackendImplKind, OpImpl

if TYPE_CHECKING:
    from transformer_engine.plugin.core.policy import SelectionPolicy


class Runner(NamedTuple):
    """An implementation that is asked whether it takes a call of an operator."""

    op_name: str  # what it implements: the operator, or one by which that is replaced
    impl_id: str
    kind: str  # "flagos" (this library's own), "vendor" or "reference"
    vendor: str | None
    calls: int | None  # None: calls of this library's kernels are not counted by themselves
    said: str = ""  # why it did not take the last call that it did not take


class Covered(NamedTuple):
    """An operator, and who runs it in the order in which they are asked."""

    op_name: str
    runners: tuple[Runner, ...]  # (): nobody, a call raises
    runs: int | None  # on this type of devices; None: such operators are not counted
    closed: str = ""  # why neither this library's kernels nor a definition run it

    def in_words(self) -> str:
        """Who runs it, in order."""
        shown = []
        for one in self.runners:
            whose = one.impl_id if one.op_name == self.op_name else f"{one.impl_id} ({one.op_name})"
            shown.append(f"{whose} x{one.calls}" if one.calls else whose)
        return ", ".join(shown) or "nobody"


class Coverage(NamedTuple):
    """Result of `transformer_engine.plugin.coverage`; ``str()`` of it is a table."""

    device: str
    policy: "SelectionPolicy"
    operators: tuple[Covered, ...]  # those that modules run, then others

    def row(self, op_name: str) -> Covered:
        """Row of an operator by its name; KeyError where there is none."""
        for row in self.operators:
            if row.op_name == op_name:
                return row
        raise KeyError(op_name)

    def of(self, kind: str) -> tuple[str, ...]:
        """Operators that a kind is first to run: "flagos", "vendor", "reference", "nobody"."""
        first = ((row, row.runners[0].kind if row.runners else "nobody") for row in self.operators)
        return tuple(row.op_name for row, found in first if found == kind)

    def _cells(self) -> Iterator[tuple[str, str, str]]:
        for row in self.operators:
            runs = "" if row.runs is None else str(row.runs)
            yield row.op_name, row.in_words() + (f": {row.closed}" if row.closed else ""), runs

    def __str__(self) -> str:
        lines = [f"operators on {self.device} under {self.policy.fingerprint()}"]
        cells = tuple(self._cells())
        width = max(len(name) for name, *_ in cells)
        lines += [f"    {name:{width}}  {runs:>6}  {who}" for name, who, runs in cells]
        return "\n".join(lines)

    def to_markdown(self) -> str:
        """A table for a page: operator, who runs it in order, how often it ran."""
        lines = [f"| operator on {self.device} | run by, in order | runs |", "|---|---|---|"]
        lines += [f"| `{name}` | {who} | {runs} |" for name, who, runs in self._cells()]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """All that there is, for programs."""
        rows = [
            {**row._asdict(), "runners": [one._asdict() for one in row.runners]}
            for row in self.operators
        ]
        found = {"device": self.device, "policy": self.policy.fingerprint(), "operators": rows}
        return json.dumps(found, indent=1)


def covered(manager: OpManager, device: Any = "cpu") -> Coverage:
    """Of a device under the policy in force; as `transformer_engine.plugin.coverage`."""
    import torch

    device = torch.device(device)
    asked = _Asked(manager, device)
    of_library = tuple(asked.of_library(op) for op in _core.op_names())
    replaced = {name for row in adapters.MAPPED for name in row.names}
    others = sorted(set(builtin.OPERATORS) - builtin.ABSENT.keys() - replaced)
    rows = (*of_library, *map(asked.of_others, others))
    return Coverage(asked.type_name, get_policy(), rows)


def why_nobody(name: str, device: Any) -> str:
    """Why nobody runs an operator of the C library, or one on lists of tensors.

    That is whom the policy has asked, and what they said.
    """
    from transformer_engine.pytorch.torchside.device import in_words

    asked = _Asked(get_default_manager(), device)
    op = adapters.LIBRARY.get(name)
    row = asked.of_others(name) if op is None else asked.of_library(op)
    found = [f"{one.impl_id} ({one.op_name}{one.said and f': {one.said}'})" for one in row.runners]
    by = ", ".join(found) or "nobody, for no implementation is registered that the policy admits"
    return f"{name} on {in_words(device)}: nobody takes the call. Asked: {by}. {row.closed}"


def explained(manager: OpManager, op_name: str, device: Any) -> Explanation:
    """`OpManager.explain` of a call on a device: as `transformer_engine.plugin.explain`."""
    import torch

    from transformer_engine.pytorch.torchside.device import has_kernels, type_name

    found, device = manager.explain(op_name), torch.device(device)
    of_lists = op_name in adapters.LISTS
    if op_name not in adapters.LIBRARY and not of_lists:
        return found
    kind, there, candidates = type_name(device), has_kernels(device), []
    usable = [one.impl for one in found.candidates if not one.refused]
    asked = usable if there else adapters.replacing(usable)
    definition = None  # one that is asked when nobody else takes a call
    for one in found.candidates:
        fn, why = one.impl.fn, ""
        if isinstance(fn, _core.NativeSlot) and _core.device_type_name(fn.device) != kind:
            why = f"it is for {_core.device_type_name(fn.device)}"
        elif one.impl.impl_id == adapters.NATIVE and not there:
            why = f"this library has no kernels for {kind}"
        elif one.impl.impl_id == definitions.NAME and not there and one.impl not in asked:
            definition = one.impl
            continue
        candidates.append(one._replace(refused=one.refused or why))
    if not there and not (of_lists and definition is None):
        calls = definitions.calls(device.type)[op_name]
        why = "" if definitions.admitted(found.policy, op_name) else "the policy does not name it"
        if definition is None:
            fn = definitions.definition(adapters.LIBRARY[op_name])
            definition = OpImpl(op_name, definitions.NAME, BackendImplKind.REFERENCE, fn)
        candidates.append(Candidate(definition, why, calls))
    candidates.sort(key=lambda one: bool(one.refused))
    return found._replace(candidates=tuple(candidates))


class _Asked:
    """Who is asked on a device, under the policy in force."""

    def __init__(self, manager: OpManager, device: Any) -> None:
        from transformer_engine.pytorch.torchside.device import has_kernels, type_name

        self._manager, self._device = manager, device
        self.type_name = type_name(device)
        self._has_kernels = has_kernels(device)
        self._policy = get_policy()
        names = *adapters.OPERATORS, *adapters.WITHOUT, *adapters.LIBRARY
        first = {name: self._first(name) for name in names}
        self._overriding = {name: found for name, found in first.items() if found}
        asked = adapters.Asked(self._overriding, self._overriding)
        self._closed = adapters.closed(asked, self._policy)[not self._has_kernels]

    def _first(self, name: str) -> list[Candidate]:
        """Those that are asked before this library's own."""
        used = {one.impl: one for one in _used(self._manager, name, self._policy)}
        impls = (adapters.overrides if self._has_kernels else adapters.replacing)(used)
        return [used[impl] for impl in impls if self._is_here(impl.fn)]

    def _is_here(self, function: Any) -> bool:
        """Return whether it runs on the device: slots of shared objects run on one type alone."""
        if not isinstance(function, _core.NativeSlot):
            return True
        return _core.device_type_name(function.device) == self.type_name

    def _runners(self, name: str) -> list[Runner]:
        return [_runner(one) for one in self._overriding.get(name, ())]

    def of_library(self, op: str) -> Covered:
        """Row of an operator of the C library."""
        name, mapped = f"te_{op}", adapters.mapped_to(op)
        runners, runs = self._runners(name), _core.counters().get(f"op.{self.type_name}.{op}", 0)
        if name in self._closed:
            return Covered(name, tuple(runners), runs, self._why(name))
        for other in mapped:
            runners += self._runners(other)
        if f"*{name}" in self._closed or (mapped and self._closed.issuperset(mapped)):
            return Covered(name, tuple(runners), runs, self._why(name))
        return self._with_own(name, runners, runs)

    def _with_own(self, name: str, runners: list[Runner], runs: int | None) -> Covered:
        """A row that ends with this library's kernels, or the definition where there are none."""
        if self._has_kernels:
            own = Runner(name, adapters.NATIVE, "flagos", None, None)
        elif definitions.admitted(self._policy, name):
            calls = definitions.calls(self._device.type)[name]
            own = Runner(name, definitions.NAME, "reference", None, calls)
        else:
            return Covered(name, tuple(runners), runs, self._why(name))
        return Covered(name, (*runners, own), runs)

    def _why(self, name: str) -> str:
        """Why this library does not run an operator of its own."""
        tokens = self._policy.get_per_op_order(name)
        if tokens is None:
            return "The policy is strict, or the orders of its operators leave this library out"
        own = "kernels" if self._has_kernels else "definitions in torch"
        wanted = "flagos" if self._has_kernels else "reference"
        return (
            f"The policy names {'|'.join(tokens)}: this library's {own} run where it names {wanted}"
        )

    def of_others(self, name: str) -> Covered:
        """Row of an operator of `transformer_engine_torch` that no operator of the C library is."""
        if name not in adapters.LISTS:
            used = _used(self._manager, name, self._policy)
            return Covered(name, tuple(map(_runner, used)), None)
        runners = self._runners(name)
        if name in self._closed:
            return Covered(name, tuple(runners), None, self._why(name))
        if any(one.impl_id == definitions.NAME for one in runners):  # which takes every call
            return Covered(name, tuple(runners), None)
        return self._with_own(name, runners, None)


def _used(manager: OpManager, name: str, policy: "SelectionPolicy") -> list[Candidate]:
    """Those that a call may ask, in order."""
    used = [one for one in manager.explain(name).candidates if not one.refused]
    return used[:1] if policy.strict else used


def _runner(one: Candidate) -> Runner:
    impl = one.impl
    kind = str(BackendImplKind(impl.kind))
    return Runner(impl.op_name, impl.impl_id, kind, impl.vendor, one.calls, one.said)
