# SPDX-License-Identifier: Apache-2.0
"""Which implementation an operator calls: chosen when policies or registrations change."""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

from transformer_engine import _core
from transformer_engine.common import selections
from transformer_engine.common.contexts import Context
from transformer_engine.plugin import definitions
from transformer_engine.plugin.core.discovery import discover_others, warn_of_unknown
from transformer_engine.plugin.core.failures import NobodyError, nearest
from transformer_engine.plugin.core.locks import ForkSafeLock
from transformer_engine.plugin.core.policy import PolicyManager, SelectionPolicy, when_used
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

_OF_MODULES = ""
_KEPT_TABLES = 64
"""Tables of that many policies are kept between two changes."""
_KEPT_GONE = 32
"""Implementations of that many which were unregistered are kept before they are looked through."""


class _Row:
    """The implementations of an operator in the order of their priorities.

    Operators of equal `shape` are ranked alike by every policy that does not name them. An operator
    of which an implementation has to be asked whether it is available has none.
    """

    def __init__(self, op: str, impls: tuple[OpImpl, ...], manager: "OpManager") -> None:
        self.op, self.impls, self.shape = op, impls, None
        self.ordered = _by_priority(manager._and_own(op, impls))
        self.natives = tuple(map(manager._native, self.ordered))
        if not any(impl.has_availability() for impl in self.ordered):
            kinds = tuple([(impl.kind, impl.vendor, impl.impl_id) for impl in self.ordered])
            self.shape = manager._shapes.setdefault(kinds, object())  # which is compared faster


class _Table(NamedTuple):
    """Candidates of every operator under a policy, and what they were chosen from."""

    entries: tuple  # by place: what modules run; tuples of `_core.Implementation`
    by_row: dict[_Row, tuple]
    generation: int  # of the manager when that was read
    epoch: int


class Candidate(NamedTuple):
    """An implementation as a policy sees it."""

    impl: OpImpl
    refused: str  # why it is not used; "": it may be
    calls: int  # how often it was called
    said: str = ""  # what its `supports` said against the last call that it did not take


class Explanation(NamedTuple):
    """Explanation of what an operator calls, and why; ``str()`` of it is a table."""

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
        for impl, refused, calls, said in self.candidates:
            number += not refused
            place = "-" if refused else str(number)
            takes = "" if impl.takes is None else ", of calls that it takes"
            takes += said and f" (not the last other one: {said})"
            why = refused or f"priority {impl.priority}{takes}, called {calls} times"
            lines.append(f"    {place:>2}  {impl.impl_id:24} {why}")
        return "\n".join(lines)


class OpManager:
    """Operators by name, each a C object that calls the implementation in force.

    An operator keeps its manager: who has one needs nothing else.

    Parameters
    ----------
    registry : OpRegistry, optional
        Where the implementations are; None: one of its own.
    """

    def __init__(self, registry: OpRegistry | None = None) -> None:
        self._registry = OpRegistry() if registry is None else registry
        self._policies = PolicyManager.get_instance()
        self._lock = ForkSafeLock()
        self._discovering = ForkSafeLock()
        self._begun: object = None  # the lock under which plug-ins register
        self._initialized = False  # they have
        self._has_own = False  # this library's implementations register first
        self._found: dict[tuple[str, str, str], Any] = {}  # those that have, or have failed
        self._asking = threading.local()  # `now`: the thread asks what is available
        self._generation = 0  # raised by every change
        self._epoch = 0  # raised by those after which all is chosen anew
        # Place 0 is no operator's: runs of plans read it, where modules obey this manager.
        self._places: dict[str, int] = {_OF_MODULES: 0}
        self._obeyed = False
        self._selections: dict[tuple, Any] = {}
        self._operators: dict[str, _core.Operator] = {}
        self._implementations: dict[OpImpl, _core.Implementation] = {}
        self._looked_through = 0  # how many there were when those unregistered were last let go
        self._past: dict[str, int] = {}  # calls of those
        self._earlier: dict[OpImpl, int] = {}  # runs of slots of shared objects before it had them
        self._tables: dict[SelectionPolicy, _Table] = {}
        self._rows: dict[str, _Row] = {}
        self._shapes: dict[tuple, object] = {}
        self._dispatcher = _core.Dispatcher(self._table, self._refuse, self._function)
        self._registry.listen(self)
        self._policies.listen(self)

    @property
    def registry(self) -> OpRegistry:
        """Where its implementations are."""
        return self._registry

    def ensure_initialized(self) -> None:
        """Let plug-ins register, the first time.

        Other threads wait for that, but for those that are in the middle of an import: a plug-in
        may be waiting for theirs.

        RuntimeError in a child of a process that has forked while another thread did so: that
        thread is not there, and what it was importing can not be imported again.
        """
        if self._initialized:
            return
        with _Held(self._discovering, not _importing()) as held:
            if not held or self._begun is self._discovering.made():
                return  # plug-ins may ask for an operator, too
            if self._begun is not None:
                raise RuntimeError(
                    "this process was forked while another thread of its parent let plug-ins "
                    "register: have get_manager().ensure_initialized() done before processes fork"
                )
            self._begun = self._discovering.made()
            try:
                if self._has_own:
                    from transformer_engine.plugin.builtin import register_builtins

                    register_builtins(self._registry)
                discover_others(self._registry, self._found)
                self._initialized = True
                if self._has_own:
                    warn_of_unknown(self._registry)
            finally:
                self._begun = None  # one that was interrupted goes on at the next use

    # ---- what it tells -------------------------------------------------------------------------

    def operator(self, op_name: str) -> _core.Operator:
        """The operator: the same object at each time, whoever registers before or after."""
        with self._lock:
            found = self._operators.get(op_name)
            if found is None:
                place = self._places.setdefault(op_name, len(self._places))
                self._generation += 1  # a table has to be made that has the place
                self._dispatcher.publish(None)
                found = self._operators[op_name] = self._dispatcher.operator(place, op_name)
            return found

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
        impls = self._and_own(op_name, snapshot.impls_by_op.get(op_name, ()))
        found = self._ranked(_by_priority(impls), op_name, policy)
        counted = [
            Candidate(impl, why, self._calls(impl), self._native(impl).reason or "")
            for impl, why in found
        ]
        return Explanation(op_name, policy, tuple(counted))

    def counts(self) -> dict[str, int]:
        """Calls of implementations that ran, by "operator/impl_id".

        For the manager of the process also those of definitions on devices without kernels.
        """
        with self._lock:
            counted = dict(self._past)
            for impl in tuple(self._implementations):
                self._count(impl, counted)
        if self._has_own:
            for op, calls in definitions.calls().items():
                name = f"{op}/{definitions.NAME}"
                counted[name] = counted.get(name, 0) + calls
        return {name: calls for name, calls in counted.items() if calls}

    def selection(self) -> _core.Scope:
        """State in force for this thread now, to be entered later, on whatever thread.

        A backward that enters it has the implementations of its forward, whatever has changed.
        """
        self.ensure_initialized()
        return self._dispatcher.selection()

    # ---- changes -------------------------------------------------------------------------------

    def bump_policy_epoch(self) -> None:
        """Choose anew, and ask again which implementations are available."""
        with self._lock:
            self._epoch += 1
            self._changed()

    policy_changed = bump_policy_epoch

    def registry_changed(self) -> None:
        """Choose anew for the operators whose implementations are others."""
        with self._lock:
            self._changed()
            if len(self._implementations) > self._looked_through + _KEPT_GONE:
                self._let_go()

    def _let_go(self) -> None:
        """Keep the calls alone of implementations that nobody can call any more; with the lock.

        One that was unregistered may be in a selection that somebody keeps.
        """
        registered = self._registry.snapshot().impls_by_op
        for impl in tuple(self._implementations):
            native = self._implementations[impl]
            nobody_else = sys.getrefcount(native) == 3  # the dict, this name, and the argument
            if nobody_else and impl not in registered.get(impl.op_name, ()):
                self._count(impl, self._past)
                del self._implementations[impl]
                self._earlier.pop(impl, None)
        self._looked_through = len(self._implementations)

    def _changed(self) -> None:
        """Have the table made at the next call; with the lock."""
        self._generation += 1
        self._dispatcher.publish(None)
        if self._obeyed:
            selections.changed()

    def _table(self, policy: SelectionPolicy | None) -> tuple:
        """Candidates of every operator under a policy, None: the global one.

        No lock is held while implementations are asked whether they are available. A change in the
        meantime comes after the call that wants the table, and the dispatcher does not keep it.
        """
        self.ensure_initialized()
        with self._lock:
            generation, epoch = self._generation, self._epoch
            if not self._initialized:
                self._dispatcher.publish(None)  # nobody is to have the table of this call
        policy = self._policies.get_global_policy() if policy is None else policy
        known = self._tables.get(policy)
        if known is not None and known.generation == generation:
            return known.entries
        rows = self._rows_of(self._registry.snapshot().impls_by_op)
        # After another epoch those that say whether they are available are asked again.
        kept = {} if known is None or known.epoch != epoch else known.by_row
        named, entries = dict(policy.per_op_order), {}
        picks: dict[object, Callable[[tuple], tuple]] = {}  # by shape
        for row in rows:
            entry = kept.get(row)
            if entry is None:
                pick = None if row.op in named else picks.get(row.shape)
                if pick is None:
                    pick = self._pick(row, policy)
                    if row.shape is not None and row.op not in named:
                        picks[row.shape] = pick
                entry = pick(row.natives)
            entries[row] = entry
        made = tuple(entries.values())
        if self._obeyed:
            made = (self._of_modules(entries, policy), *made[1:])
        with self._lock:
            if generation == self._generation:
                if len(self._tables) >= _KEPT_TABLES:
                    self._tables.clear()
                self._tables[policy] = _Table(made, entries, generation, epoch)
        return made

    def _and_own(self, op: str, impls: tuple[OpImpl, ...]) -> tuple[OpImpl, ...]:
        """Implementations of an operator, with this library's own of one of the C library."""
        own = _of_library(op) if self._has_own else None
        if own is None or any(impl.impl_id == own.impl_id for impl in impls):
            return impls
        return (*impls, own)

    def _rows_of(self, impls: Mapping[str, tuple[OpImpl, ...]]) -> list[_Row]:
        """Those of all operators, by place."""
        with self._lock:
            for op in impls.keys() - self._places.keys():
                self._places[op] = len(self._places)
            places = tuple(self._places)
        rows = []
        for op in places:
            row, found = self._rows.get(op), impls.get(op, ())
            if row is None or row.impls is not found:
                row = self._rows[op] = _Row(op, found, self)
            rows.append(row)
        return rows

    def _pick(self, row: _Row, policy: SelectionPolicy) -> Callable[[tuple], tuple]:
        """What takes those that a policy has asked out of the implementations of an operator."""
        ranked = self._ranked(row.ordered, row.op, policy) if row.ordered else []
        places = [row.ordered.index(impl) for impl, refused in ranked if not refused]
        if len(places) > 1 and not policy.strict:
            return itemgetter(*places)
        return itemgetter(slice(places[0], places[0] + 1) if places else slice(0))

    def _ranked(
        self, ordered: list[OpImpl], op: str, policy: SelectionPolicy
    ) -> list[tuple[OpImpl, str]]:
        """`_ranked`; RuntimeError for one that asks for operators while it is asked.

        What these would be is what is being found out, by asking it: again and again, and twice as
        often for each further one that does so.
        """
        if getattr(self._asking, "now", False):
            raise RuntimeError(
                f"{op}: whether an implementation is available can not depend on operators of its "
                "manager, which are being chosen"
            )
        self._asking.now = True
        try:
            return _ranked(ordered, op, policy)
        finally:
            self._asking.now = False

    def obeyed(self) -> _core.Dispatcher:
        """Have modules run what this manager selects; what runs of plans ask."""
        with self._lock:
            self._obeyed = True
            self._changed()
        return self._dispatcher

    def _of_modules(
        self, entries: Mapping[_Row, tuple], policy: SelectionPolicy
    ) -> "_core.Selection | None":
        """Table that runs of plans ask before this library's own operators; None: there is none."""
        from transformer_engine.plugin import adapters

        found = adapters.overriding({row.op: entry for row, entry in entries.items()})
        closed = adapters.closed(found, policy)
        key = closed, *(tuple(by_op.items()) for by_op in found)
        if key in self._selections:  # graphs know it by its number
            return self._selections[key]
        if len(self._selections) >= _KEPT_TABLES:
            self._selections.clear()
        return self._selections.setdefault(key, adapters.selection(found, closed, self._refuse))

    def _native(self, impl: OpImpl) -> _core.Implementation:
        found = self._implementations.get(impl)
        if found is None:
            found = _core.Implementation(impl.op_name, impl.impl_id, *_called(impl))
            found = self._implementations.setdefault(impl, found)
            if isinstance(impl.fn, _core.NativeSlot):
                self._earlier.setdefault(impl, impl.fn.calls)
        return found

    def _count(self, impl: OpImpl, counted: dict[str, int]) -> None:
        name = f"{impl.op_name}/{impl.impl_id}"
        counted[name] = counted.get(name, 0) + self._calls(impl)

    def _calls(self, impl: OpImpl) -> int:
        """How often it was called; a slot counts its runs itself, for whoever has it."""
        native = self._native(impl)
        earlier = self._earlier.get(impl)
        return native.calls if earlier is None else impl.fn.calls - earlier

    # ---- errors --------------------------------------------------------------------------------

    def _selected(self, op_name: str) -> OpImpl:
        selected = self.explain(op_name).selected
        if selected is None:
            self._refuse(op_name, ())
        return selected

    def _refuse(self, op_name: str, asked: tuple, why: str = "") -> NoReturn:
        """Raise where no implementation was called; `asked` have not taken the call, and why."""
        explanation = self.explain(op_name)
        if asked:
            names = ", ".join(f"{i.impl_id} ({i.reason})" if i.reason else i.impl_id for i in asked)
            strict = " (strict: no other one is asked)" if explanation.policy.strict else ""
            because = why and f": {why}"
            raise NotImplementedError(
                f"{op_name}: the call is none that {names} takes{because}{strict}\n{explanation}"
            )
        ops = () if explanation.candidates else self._registry.snapshot().impls_by_op
        known = nearest(op_name, ops)
        raise NobodyError(f"{op_name}: no implementation can be called{known}\n{explanation}")

    def _function(self, op_name: str) -> Callable[..., Any]:
        """The function that says what an operator's arguments are: of its first implementation."""
        self.ensure_initialized()
        for impl in self._registry.snapshot().impls_by_op.get(op_name, ())[:1]:
            return inspect.unwrap(getattr(impl.fn, "func", impl.fn))
        raise AttributeError(f"{op_name}: nobody has registered an implementation")


def _called(impl: OpImpl) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """What a call calls: the function, and what says whether it takes the call."""
    from transformer_engine.plugin import adapters

    return adapters.taking_fields(impl) if adapters.is_of_fields(impl) else (impl.fn, impl.takes)


@functools.cache
def _of_library(op: str) -> OpImpl | None:
    """Own implementation of this library of an operator of the C library; None of another one."""
    name = op.removeprefix("te_")
    if name == op or name not in _core.op_names():
        return None
    kind, function = BackendImplKind.DEFAULT, getattr(_core, name)
    return OpImpl(op, "default.native", kind, function, priority=150)


def _importing() -> bool:
    """Return whether this thread is in the middle of an import."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _by_priority(impls: tuple[OpImpl, ...]) -> list[OpImpl]:
    return sorted(impls, key=lambda impl: (impl.priority, impl.impl_id), reverse=True)


def _ranked(
    ordered: list[OpImpl], op_name: str, policy: SelectionPolicy
) -> list[tuple[OpImpl, str]]:
    """Implementations in the order in which a policy has them asked; then the others, and why.

    They come in the order of their priorities.
    """
    tokens = policy.get_per_op_order(op_name)
    order = policy.get_default_order() if tokens is None else tokens
    used, others = [], []
    for impl in ordered:
        if tokens is None:
            place = order.index(impl.kind)  # a kind is a token, and all are there
        else:
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
                made = OpManager()
                made._has_own = True
                made.registry.fill_by(made.ensure_initialized)
                _core.obey(made.obeyed())
                _default = made
            found = _default
    return found


get_manager = get_default_manager
when_used(get_default_manager)


def get_registry() -> OpRegistry:
    """The registry of the manager of the process."""
    return get_default_manager().registry


def obey_default_manager() -> None:
    """Have modules obey the manager of the process, which plug-ins join."""
    manager = get_default_manager()
    _core.obey(manager.obeyed())
    manager.ensure_initialized()


BINDERS: list[Callable[[], None]] = []
"""Functions that take the operators of the manager anew: that of ``transformer_engine_torch``."""


def reset_default_manager() -> None:
    """Let the next use make another manager, with a registry of its own; plug-ins register anew.

    The attributes of ``transformer_engine_torch`` are its operators from then on. Who holds
    operators of the former one goes on with that.
    """
    global _default
    with _making:
        _default = None
    _core.obey(None)  # modules, too: their next run looks for plug-ins anew
    for bind in BINDERS:
        bind()


reset_registry = reset_default_manager


class _Held(Context):
    """Hold a lock inside ``with``: without `wait` only where no other thread has it."""

    def __init__(self, lock: ForkSafeLock, wait: bool) -> None:
        self._lock, self._wait, self._held = lock, wait, False

    def _enter(self) -> bool:
        self._undo_by(self._give_back)
        # A call in a call of C: no interrupt comes between the two.
        (self._held,) = map(self._lock.acquire, (self._wait,))
        return self._held

    def _give_back(self) -> None:
        held, self._held = self._held, False
        if held:
            self._lock.release()
