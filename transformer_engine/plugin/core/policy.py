# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an operator goes first: policies, and which one is in force."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from transformer_engine import _core
from transformer_engine.common import config
from transformer_engine.plugin.core.locks import ForkSafeLock
from transformer_engine.plugin.core.types import Plain, check_token, names_of, vendor_key

__all__ = [
    "PREFER_DEFAULT",
    "PREFER_REFERENCE",
    "PREFER_VENDOR",
    "VALID_PREFER_VALUES",
    "PolicyManager",
    "SelectionPolicy",
    "bump_policy_epoch",
    "create_policy_context",
    "get_policy",
    "get_policy_epoch",
    "policy_context",
    "policy_from_env",
    "reset_global_policy",
    "set_global_policy",
    "with_allowed_vendors",
    "with_denied_vendors",
    "with_preference",
    "with_strict_mode",
]

PREFER_DEFAULT = "flagos"
PREFER_VENDOR = "vendor"
PREFER_REFERENCE = "reference"
EVERY = "*"
"""In `per_op_order`: every operator without an order of its own."""

_KINDS = PREFER_DEFAULT, PREFER_VENDOR, PREFER_REFERENCE
VALID_PREFER_VALUES = frozenset(_KINDS)
_ORDERS = {kind: (kind, *(other for other in _KINDS if other != kind)) for kind in _KINDS}


def _prefer_of(value: str) -> str:
    """The value of `prefer` that a word means; ValueError for others."""
    word = str(value).strip().lower()
    word = PREFER_DEFAULT if word == "default" else word
    if word not in VALID_PREFER_VALUES:
        raise ValueError(f"prefer={value!r}, expected one of {sorted(VALID_PREFER_VALUES)}")
    return word


@dataclass(frozen=True, repr=False, eq=False)
class SelectionPolicy(Plain):
    """How implementations are chosen; equal policies choose equally.

    Parameters
    ----------
    prefer : {"flagos", "vendor", "reference"}
        The kind that goes first; "default" is "flagos".
    strict : bool, default False
        An implementation that does not take a call is an error; else the next one is asked.
    per_op_order : tuple of (str, tuple of str)
        Tokens of an operator, in place of the order by kinds: what none of them names is not used.
        "*" is every operator that has none of its own, those of the C library, too.
    deny_vendors : frozenset of str
        Vendors that are not used.
    allow_vendors : frozenset of str, optional
        Vendors of which alone some are used; None: all, an empty set: none.

    Raises
    ------
    ValueError
        `prefer` is none of these words, something in `per_op_order` is no token, or an operator
        is there twice.
    TypeError
        Vendors are one text, or something that is no name.
    """

    prefer: str = PREFER_DEFAULT
    strict: bool = False
    per_op_order: Iterable[tuple[str, str | Iterable[str]]] = ()
    deny_vendors: Iterable[str] = frozenset()
    allow_vendors: Iterable[str] | None = None

    def __post_init__(self) -> None:
        orders = []
        for op, tokens in self.per_op_order:
            listed = (tokens,) if isinstance(tokens, str) else tuple(tokens)
            orders.append((op, tuple(check_token(token) for token in listed)))
        orders.sort()
        for (op, _), (other, _) in itertools.pairwise(orders):
            if op == other:
                raise ValueError(f"per_op_order: {op} is there twice, expected one order of it")
        self.__dict__.update(
            prefer=_prefer_of(self.prefer),
            strict=bool(self.strict),
            per_op_order=tuple(orders),
            deny_vendors=names_of(self.deny_vendors, "deny_vendors"),
        )
        if self.allow_vendors is not None:
            self.__dict__["allow_vendors"] = names_of(self.allow_vendors, "allow_vendors")

    @classmethod
    def from_dict(
        cls,
        prefer: str = PREFER_DEFAULT,
        strict: bool = False,
        per_op_order: Mapping[str, Iterable[str]] | None = None,
        deny_vendors: Iterable[str] | None = None,
        allow_vendors: Iterable[str] | None = None,
    ) -> "SelectionPolicy":
        """A policy of plain containers; here an empty `allow_vendors` means all."""
        orders = tuple((op, tuple(tokens)) for op, tokens in (per_op_order or {}).items())
        return cls(prefer, strict, orders, deny_vendors or (), allow_vendors or None)

    def _but(self, **fields: Any) -> "SelectionPolicy":
        """The same but for fields, whose values are right."""
        made = object.__new__(SelectionPolicy)
        made.__dict__.update(self.__dict__, **fields)
        return made

    @property
    def per_op_order_dict(self) -> dict[str, list[str]]:
        """`per_op_order` by operator."""
        return {op: list(tokens) for op, tokens in self.per_op_order}

    def get_per_op_order(self, op_name: str) -> list[str] | None:
        """Tokens of an operator that has its own, or of "*"; None: the order by kinds."""
        orders = dict(self.per_op_order)
        tokens = orders.get(op_name, orders.get(EVERY))
        return None if tokens is None else list(tokens)

    def get_default_order(self) -> list[str]:
        """Tokens of all other operators."""
        return list(_ORDERS[self.prefer])

    def is_vendor_allowed(self, vendor: str) -> bool:
        """Return whether implementations of a vendor are used; denied wins over allowed."""
        key = vendor_key(vendor)
        if key in map(vendor_key, self.deny_vendors):
            return False
        return self.allow_vendors is None or key in map(vendor_key, self.allow_vendors)

    def fingerprint(self) -> str:
        """A text that two policies share where they are equal, and only there."""
        allowed = "*" if self.allow_vendors is None else ",".join(sorted(self.allow_vendors))
        orders = ";".join(f"{op}={'|'.join(tokens)}" for op, tokens in self.per_op_order)
        denied = ",".join(sorted(self.deny_vendors))
        return f"prefer={self.prefer};strict={self.strict};deny={denied};allow=[{allowed}];{orders}"


def policy_from_env() -> SelectionPolicy:
    """The policy that the environment asks for; ValueError for what is not understood."""
    allowed = config.TE_FL_ALLOW_VENDORS.get()
    prefer = config.TE_FL_PREFER.get()
    if not prefer:
        by_vendor = config.TE_FL_PREFER_VENDOR.get()
        prefer = PREFER_VENDOR if by_vendor else PREFER_DEFAULT
    strict, orders = config.TE_FL_STRICT.get(), config.TE_FL_PER_OP.get()
    denied = frozenset(config.TE_FL_DENY_VENDORS.get())
    try:
        return SelectionPolicy(
            prefer, strict, orders, denied, frozenset(allowed) if allowed else None
        )
    except ValueError as error:  # the others have been looked at as they were read
        raise ValueError(f"{config.TE_FL_PER_OP.name}: {error}") from None


_make_manager: list[Callable[[], Any]] = []
"""One, once the module of the manager is there."""


def when_used(make_manager: Callable[[], Any]) -> None:
    """Say what makes the manager of the process, without which modules obey no policy."""
    _make_manager[:] = [make_manager]


def is_used() -> bool:
    """Return whether a program has said, outside of the environment, how operators are chosen."""
    return _core.policy_in_force() is not None or _policies._policy_is_set


def _scope(policy: SelectionPolicy) -> _core.Scope:
    for make in _make_manager:
        make()
    return _core.Scope(policy)


class PolicyManager:
    """The policy in force: that of this thread's context, else the global one.

    The global one is that of the environment until a program sets one.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._policy: SelectionPolicy | None = None
        self._policy_is_set = False  # by a program, not the environment
        self._epoch = 0
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()

    @staticmethod
    def get_instance() -> "PolicyManager":
        """The one of the process."""
        return _policies

    def get_policy(self) -> SelectionPolicy:
        """The policy in force for this thread."""
        return _core.policy_in_force() or self.get_global_policy()

    def get_global_policy(self) -> SelectionPolicy:
        """The one that is in force outside of contexts."""
        found = self._policy
        if found is None:
            with self._lock:
                if self._policy is None:
                    self._policy = policy_from_env()
                found = self._policy
        return found

    def set_global_policy(self, policy: SelectionPolicy) -> SelectionPolicy:
        """Put a policy in force outside of contexts; the former one is returned."""
        if not isinstance(policy, SelectionPolicy):
            raise TypeError(f"expected a SelectionPolicy, got {type(policy).__name__}")
        with self._lock:
            former = self.get_global_policy()
            self._policy, self._policy_is_set = policy, True
        for make in _make_manager:
            make()
        self.bump_policy_epoch()
        return former

    def reset_global_policy(self) -> None:
        """Read the environment anew, at the next use."""
        with self._lock:
            self._policy, self._policy_is_set = None, False
        self.bump_policy_epoch()

    def get_policy_epoch(self) -> int:
        """How often the global policy has changed."""
        return self._epoch

    def bump_policy_epoch(self) -> int:
        """Let managers choose anew; the number of changes."""
        with self._lock:
            self._epoch += 1
            epoch, listeners = self._epoch, tuple(self._listeners)
        for listener in listeners:
            listener.policy_changed()
        return epoch

    def listen(self, listener: Any) -> None:
        """Call ``listener.policy_changed()`` after every change, for as long as it lives."""
        with self._lock:
            self._listeners.add(listener)


_policies = PolicyManager()
get_policy = _policies.get_policy
set_global_policy = _policies.set_global_policy
reset_global_policy = _policies.reset_global_policy
get_policy_epoch = _policies.get_policy_epoch
bump_policy_epoch = _policies.bump_policy_epoch


# ---- contexts ------------------------------------------------------------------------------------


def policy_context(policy: SelectionPolicy) -> _core.Scope:
    """Put a policy in force for this thread, inside ``with``; it may be entered again."""
    if not isinstance(policy, SelectionPolicy):
        raise TypeError(f"expected a SelectionPolicy, got {type(policy).__name__}")
    return _scope(policy)


create_policy_context = policy_context
PolicyManager.create_policy_context = staticmethod(policy_context)  # type: ignore[attr-defined]


def with_strict_mode() -> _core.Scope:
    """The policy in force now, strict, as `policy_context` does it."""
    return _scope(get_policy()._but(strict=True))


def with_preference(prefer: str) -> _core.Scope:
    """The policy in force now with another kind first, as `policy_context` does it."""
    return _scope(get_policy()._but(prefer=_prefer_of(prefer)))


def with_allowed_vendors(*vendors: str) -> _core.Scope:
    """The policy in force now with these vendors alone, as `policy_context` does it."""
    return _scope(get_policy()._but(allow_vendors=names_of(vendors, "vendors")))


def with_denied_vendors(*vendors: str) -> _core.Scope:
    """The policy in force now without these vendors either, as `policy_context` does it."""
    policy = get_policy()
    denied = policy.deny_vendors | names_of(vendors, "vendors")
    return _scope(policy._but(deny_vendors=denied))
