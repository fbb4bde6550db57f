# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of the plug-in system."""

import pytest
import torch

from transformer_engine.plugin import core as plugin


@pytest.fixture
def manager():
    """A manager of the process that this test alone changes."""
    plugin.reset_default_manager()
    made = plugin.get_default_manager()
    made.ensure_initialized()
    yield made
    plugin.reset_default_manager()
    plugin.reset_global_policy()


@pytest.fixture
def dtype(device):
    """What this library's attention runs on a device."""
    return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16


@pytest.fixture
def environment(monkeypatch):
    """No variable of the plug-in system is set, and no policy stays."""
    for name in ("PREFER", "PREFER_VENDOR", "STRICT", "ALLOW_VENDORS", "DENY_VENDORS", "PER_OP",
                 "PLUGIN_MODULES"):  # fmt: skip
        monkeypatch.delenv(f"TE_FL_{name}", raising=False)
    plugin.reset_global_policy()
    yield
    plugin.reset_global_policy()
