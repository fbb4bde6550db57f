# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that need no device."""

import pytest

from transformer_engine.common import config


@pytest.fixture(scope="module")
def no_variables():
    """Start from an environment that sets nothing of ours."""
    with pytest.MonkeyPatch.context() as m:
        for variable in config.TABLE:
            for name in (variable.name, *variable.aliases):
                m.delenv(name, raising=False)
        yield
