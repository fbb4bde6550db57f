# SPDX-License-Identifier: Apache-2.0
"""Tests of the mark npu as the process of the tests sees them: reports from another process."""

import os
import types

import pytest
import torch
from devices import process

OPTIONS = """
def pytest_addoption(parser):
    parser.addoption("--seed")
    parser.addoption("--nightly", action="store_true")
"""
FILE = """
import os, pytest

made = []

@pytest.fixture(scope="module")
def one():
    made.append(1)
    yield len(made)
    print("away")

def test_right(one):
    print("pid", os.getpid())
    assert one == 1

def test_wrong(one):
    assert one == 2, "it is the same one"

@pytest.mark.skip("not now")
def test_skipped():
    pass

def test_crash():
    os.kill(os.getpid(), 11)
"""


def outcomes(reports):
    return [(one["when"], one["outcome"]) for one in reports]


def said(reports):
    return str([one["longrepr"] for one in reports] + [one["sections"] for one in reports])


def test_reports(request, tmp_path):
    """Outcomes, output and fixtures are those of pytest; a process that dies says why."""
    file = tmp_path / "test_there.py"
    file.write_text(FILE)
    (tmp_path / "conftest.py").write_text(OPTIONS)  # those of tests/conftest.py
    config = types.SimpleNamespace(rootpath=tmp_path, getoption=request.config.getoption)
    child = process.Child(config, [str(file)])
    request.addfinalizer(child.end)
    names = [f"test_there.py::test_{name}" for name in ("right", "wrong", "skipped", "crash")]
    reports = child.ask((names[0], names[1]))
    assert outcomes(reports) == [("setup", "passed"), ("call", "passed"), ("teardown", "passed")]
    assert f"pid {os.getpid()}" not in said(reports) and "pid " in said(reports)
    reports = child.ask((names[1], names[2]))
    assert outcomes(reports)[1] == ("call", "failed") and "it is the same one" in said(reports)
    assert outcomes(child.ask((names[2], names[3])))[0] == ("setup", "skipped")
    with pytest.raises(EOFError):
        child.ask((names[3], None))
    assert "status -11" in child.end()


@pytest.mark.npu
def test_there():
    assert process.is_here() and torch.accelerator.current_accelerator().type == "npu"


def test_here():
    """Nothing of the device is in this process."""
    assert not process.is_here() and not hasattr(torch, "npu")
    assert torch._C._get_privateuse1_backend_name() == "privateuseone"
