# SPDX-License-Identifier: Apache-2.0
"""Each test begins and ends without FP8 state."""

import pytest
import torch
from clean_state import clean as clean


@pytest.fixture
def fresh_compiler():
    """No graphs of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
