# SPDX-License-Identifier: Apache-2.0
"""A build of torch for ROCm, whose devices are "cuda", by a stand-in (`devices.rocm`)."""

from pathlib import Path

import processes
import pytest
from devices import process, rocm

HERE = Path(__file__).resolve().parents[1]
MISSING = process.missing() or rocm.missing()
PROGRAMS = (
    "definitions_run_the_modules",
    "matrices_are_multiplied",
    "what_is_there",
    "what_is_said",
    "plug_ins_take_operators",
    "architectures_are_nvidias",
    "captures_are_refused",
)


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("program", PROGRAMS)
def test_rocm(program, seed):
    code = (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); from devices import rocm_programs; "
        f"rocm_programs.torch.manual_seed({seed}); rocm_programs.{program}()"
    )
    processes.run(code, limit=300)
