# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for `make sanitize`: refuse to run against any but the sanitized extension."""

import transformer_engine._core as core


def pytest_configure():
    """Stop before the first test where the extension is another one."""
    if "sanitize" not in core.__file__:
        raise RuntimeError(f"expected the sanitized extension, not {core.__file__}")
