# SPDX-License-Identifier: Apache-2.0
"""Checks of the fields of a recipe.

A rule maps (where, value) to the value to store, in one canonical type, so that two recipes that
mean the same print the same; `where` names the field in messages. Rules raise ValueError for a
wrong type too, unless they say otherwise: so did the validation library that client programs were
written against.
"""

import operator
from collections.abc import Callable
from typing import Any

from transformer_engine.common import config


def such(
    accepts: Callable[[Any], Any], meaning: str, error: type[Exception] = ValueError
) -> Callable[[str, Any], Any]:
    """Make a rule that stores what is accepted as it is; `meaning` says what that is."""

    def rule(where: str, value: Any) -> Any:
        if accepts(value):
            return value
        raise error(f"{where} must be {meaning}, got {value!r}")

    return rule


def boolean(where: str, value: Any) -> bool:
    """Accept a bool, or the numbers 0 and 1 as configuration files give them."""
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise ValueError(f"{where} must be True or False, got {value!r}")


def integer(low: int, high: float, meaning: str) -> Callable[[str, Any], int]:
    """Accept an integer of any type, `low` and `high` included."""

    def rule(where: str, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool) or not low <= number <= high:
            raise ValueError(f"{where} must be {meaning}, got {value!r}")
        return number

    return rule


margin = integer(-126, 126, "an integer from -126 to 126")
"""Powers of two left free: beyond the exponents of fp32, 2**-margin is no scale any more."""


def one_of(*accepted: int) -> Callable[[str, Any], int]:
    """Accept these integers; AssertionError for others."""

    def rule(where: str, value: Any) -> int:
        if isinstance(value, bool) or value not in accepted:
            words = " or ".join(map(str, accepted))
            raise AssertionError(f"{where} must be {words}, got {value!r}")
        return int(value)

    return rule


def never(where: str, value: Any) -> bool:
    """Accept False; AssertionError for True, ValueError for what is no bool."""
    if boolean(where, value):
        raise AssertionError(f"{where}=True is not supported: leave it out")
    return False


def instance(kind: type) -> Callable[[str, Any], Any]:
    """Accept an instance of one class."""
    return such(lambda value: isinstance(value, kind), f"a {kind.__name__}")


_OVERRIDES = (None, *config.BACKWARD_OVERRIDES)
backward_override = such(
    _OVERRIDES.__contains__, " or ".join(map(repr, _OVERRIDES)), AssertionError
)


def no_backward_override(where: str, value: Any) -> None:
    """Accept None; AssertionError otherwise."""
    if value is not None:
        raise AssertionError(
            f"{where} must be None (delayed scaling has no other backward), got {value!r}; where "
            f"it was not passed, it came from the variable {config.TE_BACKWARD_OVERRIDE.name} or "
            f"{config.TE_BACKWARD_OVERRIDE.aliases[0]}: unset that"
        )


function = such(callable, "a function")
optional_callable = such(lambda value: value is None or callable(value), "None or a callable")
amax_compute_algo = such(
    lambda value: callable(value) or (isinstance(value, str) and value in ("max", "most_recent")),
    "'max', 'most_recent' or a callable",
)
