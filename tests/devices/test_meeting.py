# SPDX-License-Identifier: Apache-2.0
"""How a type of device becomes known, each time in a process of its own."""

from pathlib import Path

import processes
import pytest
from devices import process

HERE = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(process.missing() is not None, reason=str(process.missing()))


@pytest.mark.parametrize(
    "program",
    ["after_other_types", "from_two_threads", "again_after_an_interrupt", "first_call_of_a_layer",
     "first_call_of_an_attention"],
)  # fmt: skip
def test_meeting(program):
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); from devices import meeting\n"
    processes.run(f"{code}meeting.{program}()", limit=300)
