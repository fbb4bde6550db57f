# SPDX-License-Identifier: Apache-2.0
"""Which implementation an operator calls: chosen when policies or registrations change."""

import contextlib
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, NoReturn

from transformer_engine import _core
from transformer_engine.plugin.core.discovery import discover_plugin
from transformer_engine.plugin.core.locks import ForkSafeLock
from transformer_engine.plugin.core.policy import PolicyManager, SelectionPolicy
from transformer_engine.plugin.core.predicates import predicate_of
from transformer_engine.plugin.core.registry import OpRegistry
from transformer_engine.plugin.core.types import BackendImplKind, OpImpl, match_token

__all__ = [
    "Candidate",
    "Explanation",
    "OpManager",
    "get_default_manager",
    "get_manager",
    "get_registry",
    "reset_default_manager",
    "reset_registry",
]

_KEPT_TABLES = 64
"""Tables of that many policies are kept between two changes."""


class Candidate(NamedTuple):
    """An implementation as a policy sees it."""

    impl: OpImpl
    refused: str  # why it is not used; "": it may be
    calls: int  # how often it was called


class Explanation(NamedTuple):
    """What an operator calls, and why; ``str()`` of it is a table."""

    op_name: str
    policy: SelectionPolicy
    candidates: tuple[Candidate, ...]  # in the order in which they are asked, then the others

    @property
    def selected(self) -> OpImpl | None:
        """The one that is asked first; None: a call raises."""
        return next((found.impl for found in self.candidates if not found.refused), None)

    def __str__(self) -> str:
        lines = [f"{self.op_name} under {self.policy.fingerprint()}"]
        if not self.candidates:
            lines.append("    nobody has registered an implementation")
        number = 0
        for impl, refused, calls in self.candidates:
            number += not refused
            place = "-" if refused else str(number)
            takes = "" if predicate_of(impl) is None else ", of calls that it takes"
            why = refused or f"priority {impl.priority}{takes}, called {calls} times"
            lines.append(f"    {place:>2}  {impl.impl_id:24} {why}")
        return "\n".join(lines)


class OpManager:
    """Operators by name, each a C object that calls the implementation in force.

    Parameters
    ----------
    registry : OpRegistry, optional
        Where the implementations are; None: one of its own.
    """

    def __init__(self, registry: OpRegistry | None = None) -> None:
        self._registry = OpRegistry() if registry is None else registry
        self._policies = PolicyManager.get_instance()
        self._lock = ForkSafeLock()
        self._initialized = False
        self._places: dict[str, int] = {}
        self._operators: dict[str, _core.Operator] = {}
        self._implementations: dict[OpImpl, _core.Implementation] = {}
        self._tables: dict[SelectionPolicy, tuple] = {}
        self._published: tuple[SelectionPolicy, tuple] | None = None
        me = weakref.ref(self)  # operators may outlive it
        self._dispatcher = _core.Dispatcher(
            lambda policy: _alive(me)._table(policy),
            lambda name, refused: _alive(me)._refuse(name, refused),
        )
        self._registry.listen(self)
        self._policies.listen(self)

    @property
    def registry(self) -> OpRegistry:
        """Where its implementations are."""
        return self._registry

    def ensure_initialized(self) -> None:
        """Let plug-ins register, the first time."""
        if self._initialized:
            return
        with self._lock:
            if not self._initialized:
                self._initialized = True  # what registers may ask for an operator
                discover_plugin(self._registry)

    # ---- what it tells -------------------------------------------------------------------------

    def operator(self, op_name: str) -> _core.Operator:
        """The operator: the same object at each time, whoever registers before or after."""
        found = self._operators.get(op_name)
        if found is not None:
            return found
        with self._lock:
            if op_name not in self._operators:
                place = self._places.setdefault(op_name, len(self._places))
                self.registry_changed((op_name,))
                self._operators[op_name] = self._dispatcher.operator(place, op_name)
            return self._operators[op_name]

    def call(self, op_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call an operator by its name; RuntimeError where it has no implementation."""
        return self.operator(op_name)(*args, **kwargs)

    def resolve_candidates(self, op_name: str) -> list[OpImpl]:
        """The implementations that a call asks, in this order; [] where it would raise."""
        found = self.explain(op_name).candidates
        usable = [candidate.impl for candidate in found if not candidate.refused]
        return usable[:1] if self._policies.get_policy().strict else usable

    def resolve(self, op_name: str) -> Callable[..., Any]:
        """The function that a call asks first; RuntimeError where there is none."""
        return self._selected(op_name).fn

    def get_selected_impl_id(self, op_name: str) -> str:
        """The name of the implementation that a call asks first."""
        return self._selected(op_name).impl_id

    def explain(self, op_name: str) -> Explanation:
        """All implementations of an operator under the policy of this thread."""
        self.ensure_initialized()
        policy = self._policies.get_policy()
        snapshot = self._registry.snapshot()
        found = _ranked(snapshot.impls_by_op.get(op_name, ()), op_name, policy)
        counted = [Candidate(impl, why, self._native(impl).calls) for impl, why in found]
        return Explanation(op_name, policy, tuple(counted))

    def counts(self) -> dict[str, int]:
        """Calls of implementations that ran, by "operator/impl_id"."""
        impls = tuple(self._implementations.items())
        return {f"{impl.op_name}/{impl.impl_id}": n.calls for impl, n in impls if n.calls}

    def selection(self) -> _core.Scope:
        """What is in force for this thread now, to be entered later, on whatever thread.

        A backward that enters it has the implementations of its forward, whatever has changed.
        """
        self.ensure_initialized()
        return self._dispatcher.selection()

    # ---- changes -------------------------------------------------------------------------------

    def bump_policy_epoch(self) -> None:
        """Choose anew, and ask again which implementations are available."""
        with self._lock:
            self._tables.clear()
            self._publish(None)

    policy_changed = bump_policy_epoch

    def registry_changed(self, operators: Collection[str]) -> None:
        """Choose anew for some operators."""
        with self._lock:
            former = self._published
            self._tables.clear()
            if former is None:
                self._publish(None)
                return
            policy, entries = former[0], list(former[1])
            impls = self._registry.snapshot().impls_by_op
            for op in operators:
                self._places.setdefault(op, len(self._places))
            entries += [()] * (len(self._places) - len(entries))
            for op in operators:
                entries[self._places[op]] = self._entry(impls.get(op, ()), op, policy)
            self._publish((policy, tuple(entries)))

    def _publish(self, made: tuple[SelectionPolicy, tuple] | None) -> None:
        """Put the global policy's table in force; None: it is made now. With the lock."""
        if made is None and self._initialized:
            with contextlib.suppress(ValueError):  # the environment's: the next call says so
                policy = self._policies.get_global_policy()
                made = policy, self._table(policy)
        if made is not None:
            self._tables[made[0]] = made[1]
        self._published = made
        self._dispatcher.publish(None if made is None else made[1])

    def _table(self, policy: SelectionPolicy | None) -> tuple:
        """Candidates of every operator under a policy, None: the global one."""
        self.ensure_initialized()
        with self._lock:
            policy = self._policies.get_global_policy() if policy is None else policy
            found = self._tables.get(policy)
            if found is None:
                if len(self._tables) >= _KEPT_TABLES:
                    self._tables.clear()
                impls = self._registry.snapshot().impls_by_op
                for op in impls:
                    self._places.setdefault(op, len(self._places))
                found = tuple(self._entry(impls.get(op, ()), op, policy) for op in self._places)
                self._tables[policy] = found
            return found

    def _entry(self, impls: tuple[OpImpl, ...], op: str, policy: SelectionPolicy) -> tuple:
        usable = [impl for impl, refused in _ranked(impls, op, policy) if not refused]
        return tuple(self._native(impl) for impl in (usable[:1] if policy.strict else usable))

    def _native(self, impl: OpImpl) -> _core.Implementation:
        found = self._implementations.get(impl)
        if found is None:
            found = _core.Implementation(impl.op_name, impl.impl_id, impl.fn, predicate_of(impl))
            found = self._implementations.setdefault(impl, found)
        return found

    # ---- errors --------------------------------------------------------------------------------

    def _selected(self, op_name: str) -> OpImpl:
        selected = self.explain(op_name).selected
        if selected is None:
            self._refuse(op_name, ())
        return selected

    def _refuse(self, op_name: str, asked: tuple) -> NoReturn:
        """Raise where no implementation was called; `asked` have not taken the call."""
        explanation = self.explain(op_name)
        if asked:
            names = ", ".join(one.impl_id for one in asked)
            strict = " (strict: no other one is asked)" if explanation.policy.strict else ""
            raise NotImplementedError(
                f"{op_name}: the call is none that {names} takes{strict}\n{explanation}"
            )
        known = "" if explanation.candidates else _nearest(op_name, self._registry)
        raise RuntimeError(f"{op_name}: no implementation can be called{known}\n{explanation}")


def _alive(me: "weakref.ref[OpManager]") -> OpManager:
    found = me()
    if found is None:
        raise RuntimeError("the OpManager of this operator is gone: keep it, or ask another one")
    return found


def _nearest(op_name: str, registry: OpRegistry) -> str:
    import difflib

    found = difflib.get_close_matches(op_name, registry.list_operators(), 3)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def _ranked(
    impls: tuple[OpImpl, ...], op_name: str, policy: SelectionPolicy
) -> list[tuple[OpImpl, str]]:
    """Implementations in the order in which a policy has them asked; then the others, and why."""
    tokens = policy.get_per_op_order(op_name)
    order = policy.get_default_order() if tokens is None else tokens
    used, others = [], []
    for impl in sorted(impls, key=lambda impl: (impl.priority, impl.impl_id), reverse=True):
        place = next((i for i, token in enumerate(order) if match_token(impl, token)), None)
        is_vendor = impl.kind is BackendImplKind.VENDOR
        if is_vendor and not policy.is_vendor_allowed(impl.vendor or ""):
            others.append((impl, f"the policy does not allow vendor {impl.vendor}"))
        elif place is None:
            others.append((impl, f"none of the tokens {'|'.join(order)} names it"))
        elif because := impl.unavailable_because():
            others.append((impl, because))
        else:
            used.append((place, impl))
    used.sort(key=lambda found: found[0])  # it keeps the order of equal ones
    return [(impl, "") for _, impl in used] + others


# ---- the manager of the process ------------------------------------------------------------------

_making = ForkSafeLock()
_default: OpManager | None = None


def get_default_manager() -> OpManager:
    """The manager of the process, made at its first use."""
    global _default
    found = _default
    if found is None:
        with _making:
            if _default is None:
                _default = OpManager()
            found = _default
    return found


get_manager = get_default_manager


def get_registry() -> OpRegistry:
    """The registry of the manager of the process."""
    return get_default_manager().registry


def reset_default_manager() -> None:
    """Let the next use make another manager, with a registry of its own; plug-ins register anew.

    What holds operators of the former one goes on with that.
    """
    global _default
    with _making:
        _default = None


reset_registry = reset_default_manager
