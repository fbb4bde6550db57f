# SPDX-License-Identifier: Apache-2.0
"""On which kinds of devices tests of the fixture `device` run: marks of a file or of a test.

That of a test wins. Without one of them a test runs on the devices that have kernels of ours.
"""

import pytest

OURS = ("cpu", "cuda")
MARKS = {"cpu": [], "cuda": [pytest.mark.gpu], "npu": [pytest.mark.npu]}
"""Marks of the tests of each kind."""

every_device = pytest.mark.devices(*MARKS)
our_kernels = pytest.mark.devices(*OURS)
"""For what a test asks of kernels of ours (bits, memory, streams), or what is slow without them."""
