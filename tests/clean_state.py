# SPDX-License-Identifier: Apache-2.0
"""A fixture of folders and files, which import it: no FP8 state of other tests."""

import pytest


@pytest.fixture(autouse=True)
def clean():
    """Begin as a program does that has run nothing in FP8, and leave nothing behind."""
    import transformer_engine.pytorch as te

    te.reset()
    yield
    te.reset()
