# SPDX-License-Identifier: Apache-2.0
"""Plans as text: what a graph carries, so that a process that never made a plan can.

``linear/1 direction=0 in_features=48 ...``: the maker of the plan, the version of this format, and
the numbers that the maker is given. A plan's id is a hash of these numbers, but a process that
loads an exported program knows no plan of that id.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from transformer_engine import _core

__all__ = ["ReadPlan", "make_plan", "plan_of", "read_text", "text_of"]

VERSION = 1
"""Raised whenever a number of a plan gets another meaning."""

_MAKERS: dict[str, Callable[..., int]] = {
    "linear": _core.linear_plan,
    "mlp": _core.mlp_plan,
    "norm": _core.norm_plan,
}
_PARTS = ("fc1", "fc2")
"""Fields of an MLP that are fields of a linear layer in their turn."""

_TEXTS: dict[int, str] = {}


class ReadPlan(NamedTuple):
    """What a text says.

    Attributes
    ----------
    maker : str
        "linear", "mlp" or "norm".
    fields : dict of str to int or float
        Arguments of ``_core.<maker>_plan``; those of the parts of an MLP are dicts.
    """

    maker: str
    fields: dict[str, Any]

    def sizes(self) -> dict[str, tuple[int, int]]:
        """(in_features, out_features) of each linear layer, by the prefix of its stages."""
        if self.maker == "norm":
            return {}
        parts = {"": self.fields}
        if self.maker == "mlp":
            parts = {f"{part}_": self.fields[part] for part in _PARTS}
        return {name: (f["in_features"], f["out_features"]) for name, f in parts.items()}


def make_plan(maker: str, **fields: Any) -> int:
    """Id of a plan, made where it is not there yet.

    Parameters
    ----------
    maker : str
        "linear", "mlp" or "norm".
    **fields
        Arguments of ``_core.<maker>_plan``, by name.

    Returns
    -------
    int
        Its id; `text_of` knows its text from now on.
    """
    plan = _MAKERS[maker](**fields)
    if plan not in _TEXTS:
        flat: dict[str, Any] = {}
        for name, value in fields.items():
            if isinstance(value, dict):
                flat.update((f"{name}.{inner}", number) for inner, number in value.items())
            else:
                flat[name] = value
        numbers = " ".join(f"{name}={value!r}" for name, value in flat.items())
        _TEXTS[plan] = f"{maker}/{VERSION} {numbers}"
    return plan


def text_of(plan: int) -> str:
    """Text of a plan that `make_plan` made."""
    return _TEXTS[plan]


def read_text(text: str) -> ReadPlan:
    """Read a text.

    Parameters
    ----------
    text : str
        What `text_of` gave, in this process or another one.

    Returns
    -------
    ReadPlan
        Its content.

    Raises
    ------
    ValueError
        It is no such text, or one of another version of this package.
    """
    head, *words = text.split()
    maker, _, version = head.partition("/")
    if maker not in _MAKERS or version != str(VERSION):
        raise ValueError(
            f"plan {head!r}: this version of transformer_engine reads "
            f"{', '.join(f'{name}/{VERSION}' for name in _MAKERS)}: export the program again with "
            "it, or load it with the version that exported it"
        )
    fields: dict[str, Any] = {}
    for word in words:
        name, _, number = word.partition("=")
        value = int(number) if number.lstrip("-").isdigit() else float(number)
        part, _, inner = name.partition(".")
        if inner:
            fields.setdefault(part, {})[inner] = value
        else:
            fields[name] = value
    return ReadPlan(maker, fields)


@functools.cache
def plan_of(text: str) -> int:
    """Id of the plan of a text, made where this process has none; ValueError as of `read_text`."""
    maker, fields = read_text(text)
    return make_plan(maker, **fields)
