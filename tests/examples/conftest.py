# SPDX-License-Identifier: Apache-2.0
"""The examples as modules."""

import importlib
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    """Import a module of the examples by its name."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(EXAMPLES))
        names = ("checkpoints", "generate", "gpt", "layout", "progress", "report", "textdata",
                 "train_gpt")  # fmt: skip
        for name in set(names) - before:
            sys.modules.pop(name, None)
