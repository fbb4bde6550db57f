# SPDX-License-Identifier: Apache-2.0
"""Questions about the version of JAX."""

import jax


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def jax_version_meet_requirement(version: str) -> bool:
    """Return whether JAX is at least that version, say "0.10.2"."""
    return _numbers(jax.__version__) >= _numbers(version)
