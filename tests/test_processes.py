# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run in processes of their own, forked and in new interpreters."""

import os
import re
import subprocess
from pathlib import Path

import processes
import pytest

BOTH = pytest.mark.parametrize("fresh", [False, True], ids=["forked", "fresh"])


@BOTH
def test_a_program_has_what_it_is_given(fresh, tmp_path):
    (tmp_path / "beside.py").write_text("here = 5\n")
    program = """
    import atexit, os, sys, beside, __main__
    atexit.register(print, "end", flush=True)
    assert __main__.beside is beside and __name__ == "__main__"
    print(sys.argv[1:], os.getcwd(), os.environ["TE_HERE"], beside.here, sys.stdin.read())
    print("and this", file=sys.stderr)
    """
    folder = tmp_path / "folder"
    folder.mkdir()
    done = processes.run(
        program, 1, "a b", folder=folder, path=[tmp_path], input="öx", fresh=fresh, TE_HERE="yes"
    )
    assert done.stdout.splitlines() == [f"['1', 'a b'] {folder} yes 5 öx", "end"]
    assert done.stderr == "and this\n" and done.returncode == 0


@BOTH
def test_a_file_is_a_program(fresh, tmp_path):
    (tmp_path / "beside.py").write_text("here = 5\n")
    file = tmp_path / "program.py"
    file.write_text("import sys, beside\nprint(beside.here, sys.argv, __file__)\n")
    said = processes.run(file, "x", fresh=fresh).stdout
    assert said == f"5 {[str(file), 'x']} {file}\n"


@BOTH
def test_failures(fresh):
    with pytest.raises(AssertionError, match="(?s)exit status 1.*ZeroDivisionError") as caught:
        processes.run("print('before')\n1 / 0", fresh=fresh)
    assert "before" in str(caught.value)
    assert processes.run("raise SystemExit(3)", fresh=fresh, check=False).returncode == 3
    killed = processes.run("import os; os.kill(os.getpid(), 11)", fresh=fresh, check=False)
    assert killed.returncode == -11
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run("import time; time.sleep(60)", fresh=fresh, limit=1)
    assert processes.run("print(1)", fresh=fresh).stdout == "1\n"


def test_a_child_is_no_copy_of_another():
    """Nor of the process of the tests, and it has imported nothing of this package."""
    program = """
    import os, random, sys, numpy
    assert "torch" in sys.modules
    assert not [name for name in sys.modules if name.startswith("transformer_engine")]
    assert len(os.listdir("/proc/self/task")) == 1
    import torch
    assert not torch.cuda.is_initialized()
    (torch.randn(300, 300) @ torch.randn(300, 300)).sum()
    print(os.getpid(), random.random(), numpy.random.random(), "OPENBLAS_NUM_THREADS" in os.environ)
    """
    first, second = (processes.run(program).stdout.split() for _ in "ab")
    assert not set(first[:3]) & set(second[:3]) and int(first[0]) != os.getpid()
    assert first[3] == str("OPENBLAS_NUM_THREADS" in os.environ)


def test_threads_of_a_child():
    program = "import torch; print(torch.get_num_threads())"
    assert processes.run(program, OMP_NUM_THREADS="3").stdout == "3\n"


def test_what_is_read_before_a_program_begins():
    with pytest.raises(ValueError, match=re.escape("{'TORCH_LOGS': '+dynamo'}")):
        processes.run("", TORCH_LOGS="+dynamo")
    later = {"TORCHINDUCTOR_CACHE_DIR": "here"}  # as Inductor sets it in the process of the tests
    program = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    assert processes.run(program, **later).stdout == "here\n"
    said = processes.run("import sys; print(sys.warnoptions)", fresh=True, PYTHONWARNINGS="ignore")
    assert said.stdout == "['ignore']\n"


def test_the_server_ends_with_its_process():
    program = """
    import sys, processes
    processes.run("")
    print(processes._server()._process.pid)
    """
    path = [Path(processes.__file__).parent]
    pid = int(processes.run(program, path=path, fresh=True).stdout)
    assert not Path(f"/proc/{pid}").exists()
