# SPDX-License-Identifier: Apache-2.0
"""Every test of the front end begins and ends without FP8 state and without our variables."""

import pytest

import transformer_engine.pytorch as te
from transformer_engine.common import config


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Unset the variables of the package; drop FP8 state before and after."""
    for variable in config.TABLE:
        for name in (variable.name, *variable.aliases):
            monkeypatch.delenv(name, raising=False)
    te.reset()
    yield
    te.reset()
