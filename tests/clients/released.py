# SPDX-License-Identifier: Apache-2.0
"""Client packages, where they are installed."""

import importlib
import importlib.util

import pytest


def client(name):
    """Import a client package; skip the tests only where it is not installed.

    `pytest.importorskip` would skip them, too, where its import asks this package for a module that
    is not there: the very failure that these tests are for.
    """
    if importlib.util.find_spec(name) is None:
        reason = f"{name} is not installed; `make test-clients` brings it"
        pytest.skip(reason, allow_module_level=True)
    return importlib.import_module(name)
