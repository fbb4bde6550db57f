# SPDX-License-Identifier: Apache-2.0
"""Flags: numbers of one bit each, joined to one number."""

from collections.abc import Iterable
from typing import Any


def flags_of(bits: Iterable[tuple[int, Any]]) -> int:
    """Join the flags whose condition holds; no flag is twice among them."""
    return sum(flag for flag, condition in bits if condition)
