# SPDX-License-Identifier: Apache-2.0
"""Implementations of operators, their kinds, and the tokens that policies name them by."""

import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from transformer_engine import _core


class BackendImplKind(StrEnum):
    """Kind of the source of an implementation; ``str(kind)`` is its value."""

    DEFAULT = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"


_KINDS = {kind.value: kind for kind in BackendImplKind} | {"default": BackendImplKind.DEFAULT}
_ALIASES = {"nvidia": "cuda"}
"""Vendors by other names."""
_TYPES = {
    "op_name": str, "impl_id": str, "kind": BackendImplKind, "vendor": str | None, "priority": int,
}  # fmt: skip
TOKENS = "flagos (or default), vendor, reference, vendor:NAME or impl:ID"
"""Tokens of a policy."""


class Plain:
    """Equality, hash and text of a dataclass by its fields.

    What `dataclass` generates of these is compiled at each import, which takes long.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def _values(self) -> tuple:
        return tuple([*map(self.__dict__.__getitem__, self.__dataclass_fields__)])

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__dataclass_fields__)
        return f"{type(self).__qualname__}({shown})"


@dataclass(frozen=True, repr=False, eq=False)
class OpImpl(Plain):
    """An implementation of an operator.

    Parameters
    ----------
    op_name : str
        The operator.
    impl_id : str
        Its own name, by convention ``kind.name``; one operator has no two of a name.
    kind : BackendImplKind
        Who made it.
    fn : callable
        Takes the operator's arguments. Where it has an attribute ``_is_available``, a callable,
        that is asked whether the implementation can run in this process at all: when
        implementations are chosen, not at a call. One that raises counts as no.
    vendor : str, optional
        Whose it is; VENDOR needs one, compared without case, and "nvidia" is "CUDA".
    priority : int, default 0
        The larger number goes first among those that a token names; of equal ones the last
        `impl_id` of the alphabet.
    supported_dtypes : set of str, optional
        Names of the dtypes that its first tensor may have; None: any.
    min_arch : str, optional
        Smallest architecture of the device ("sm_90", "9.0"); None: any.
    supports : callable, optional
        Whether it takes a call, from the arguments of that and without side effects. Where it says
        no, the next implementation is asked.

    What is wrong raises here, where its author sees it: at a call it would be in the way of all
    operators, whose implementations are chosen together.

    Raises
    ------
    ValueError
        VENDOR without a `vendor`, or `min_arch` is no architecture.
    TypeError
        `fn` or `supports` is no callable, `kind` none of `BackendImplKind`, `priority` no int, or
        a name none.
    """

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any]
    vendor: str | None = None
    priority: int = 0
    supported_dtypes: Iterable[str] | None = None
    min_arch: str | None = None
    supports: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        which = f"OpImpl {self.impl_id!r}"
        for name, expected in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, expected):
                wanted = getattr(expected, "__name__", expected)
                raise TypeError(f"{which}: {name}={value!r}, expected {wanted}")
        for name, value in (("fn", self.fn), ("supports", self.supports)):
            if not callable(value) and not (name == "supports" and value is None):
                raise TypeError(f"{which}: {name}={value!r} is no callable")
        if self.kind is BackendImplKind.VENDOR and not self.vendor:
            raise ValueError(f"{which}: kind VENDOR needs a vendor")
        if self.supported_dtypes is not None:
            dtypes = names_of(self.supported_dtypes, f"{which}: supported_dtypes", object)
            self.__dict__["supported_dtypes"] = dtypes
        self.__dict__["takes"] = self._predicate()

    def __hash__(self) -> int:
        return hash((self.op_name, self.impl_id))  # functions need not have one

    def _predicate(self) -> Callable[..., Any] | None:
        """What says whether it takes a call, by the arguments; None: it takes every call."""
        limits = self.limits(self.supports)
        return self.supports if limits is None else limits

    def limits(self, supports: Callable[..., Any] | None = None) -> Callable[..., Any] | None:
        """What says whether a call's dtype and device fit, and then `supports`; None: all do."""
        if self.supported_dtypes is None and self.min_arch is None:
            return None
        least = None if self.min_arch is None else architecture(self.min_arch)
        named = self.supported_dtypes
        dtypes = None if named is None else frozenset(map(_plain, named))

        @functools.cache
        def fits(dtype: Any, device: Any) -> bool | None:
            return _fits(dtype, device, dtypes, least)

        return _core.Predicate(fits, supports, by_device=least is not None)

    def is_available(self) -> bool:
        """Return whether it can run in this process."""
        return not self.unavailable_because()

    def has_availability(self) -> bool:
        """Return whether it is to be asked; an attribute that raises counts as an answer."""
        try:
            return hasattr(self.fn, "_is_available")
        except Exception:  # noqa: BLE001 - `unavailable_because` tells it
            return True

    def unavailable_because(self) -> str:
        """Why it can not run in this process; "": it can."""
        try:
            ask = getattr(self.fn, "_is_available", None)
            available = not callable(ask) or ask()
            return "" if available else "it says that it is not available"
        except Exception as error:  # noqa: BLE001 - an answer like any other: it is not available
            return f"asked whether it is available it raised {type(error).__name__}: {error}"


def _plain(dtype: Any) -> str:
    """Name of a dtype without its framework."""
    return str(dtype).rpartition(".")[2].lower()


_INDICES = ("int32", "int64", "bool")
"""Dtypes of places, lengths and flags, which calls may have before the tensors that matter."""


def _fits(dtype: Any, device: Any, dtypes: frozenset | None, least: tuple | None) -> bool | None:
    """Return whether a tensor is one that is taken; None: the next one says so."""
    if least is not None:
        from transformer_engine.pytorch.torchside.device import get_device_compute_capability

        if get_device_compute_capability(device) < least:
            return False
    if dtypes is None or _plain(dtype) in dtypes:
        return True
    return None if _plain(dtype) in _INDICES else False


def names_of(given: Iterable[Any], what: str, kind: type = str) -> frozenset:
    """A set of names; TypeError for a text, which would be taken for its letters, and no names."""
    if isinstance(given, str):
        raise TypeError(f"{what}={given!r}, expected a set of names")
    found = frozenset(given)
    for name in found:
        if not isinstance(name, kind):
            raise TypeError(f"{what}={given!r}, expected a set of names")
    return found


def architecture(text: str) -> tuple[int, int]:
    """(major, minor) of "sm_90", "sm_90a", "9.0" or "90"; ValueError for anything else."""
    match = re.fullmatch(r"(?:sm_?)?(\d+?)\.?(\d)[a-z]?", str(text).strip().lower())
    if match is None:
        raise ValueError(f"min_arch={text!r} is no architecture: expected sm_90 or 9.0")
    return int(match[1]), int(match[2])


def vendor_key(name: str) -> str:
    """Key by which vendors are compared."""
    folded = name.strip().casefold()
    return _ALIASES.get(folded, folded)


def check_token(token: str) -> str:
    """The token; ValueError for what is none, with the grammar."""
    head, colon, rest = token.partition(":") if isinstance(token, str) else ("", "", "")
    if (token in _KINDS) or (colon and head in ("vendor", "impl") and rest):
        return token
    raise ValueError(f"{token!r} is no token of a policy: expected {TOKENS}")


@functools.lru_cache(maxsize=1024)
def _parts(token: str) -> tuple[str, str]:
    head, _, rest = check_token(token).partition(":")
    return head, rest


def match_token(impl: OpImpl, token: str) -> bool:
    """Return whether a token names an implementation; ValueError for what is no token."""
    head, rest = _parts(token)
    if head == "impl":
        return impl.impl_id == rest
    if not rest:
        return impl.kind is _KINDS[head]
    return impl.kind is BackendImplKind.VENDOR and vendor_key(impl.vendor or "") == vendor_key(rest)
