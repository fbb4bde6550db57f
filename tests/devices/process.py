# SPDX-License-Identifier: Apache-2.0
"""Tests of the mark `npu` run in a process of their own, where the device is registered.

It is a child of the fork server (`processes`), one of each process of pytest-xdist, which the first
such test starts. The tests' own process sends it their ids and reports what it answers, so nothing
else differs: selection, fixtures of any scope, seeds and reports are the usual ones.

Why not in the same process: torch's autograd makes its threads in the first backward, for the
devices that it knows by then, so the device would have to be registered in every process of tests;
and from then on torch.accelerator, torch.Stream(), and the defaults of checkpoints, data loaders
and process groups are those of the device, in tests of CUDA too.
"""

import contextlib
import functools
import os
import socket
import tempfile
from multiprocessing.connection import Client, Connection

import processes
import pytest
import torch
from devices import build, npu

LIMIT = 900  # seconds in which the process starts: it may wait for another one that builds


def missing():
    """Say why these tests can not run here; None where they can, or where they have to (CI)."""
    if build.compiler() is not None or "CI" in os.environ:
        return None
    return "the test device needs a C++ compiler"


def is_here():
    """Whether this is the process of these tests."""
    return npu.is_registered()


# ---- of the tests --------------------------------------------------------------------------------


def run(item, nextitem):
    """Run a test there, and report it as if it had run here."""
    child = _child(item.session)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    try:
        answers = child.ask((item.nodeid, nextitem and nextitem.nodeid))
    except (EOFError, ConnectionError):
        _child.cache_clear()
        said = child.end()
        reports = [pytest.TestReport(
            item.nodeid, item.location, {}, "failed", f"the process of the device ended\n{said}",
            "call",
        )]  # fmt: skip
    else:
        deserialize = item.config.hook.pytest_report_from_serializable
        reports = [deserialize(config=item.config, data=data) for data in answers]
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    # What tests of this process have set up ends with their file, whose last test this may be.
    item.session._setupstate.teardown_exact(nextitem)
    return True


@functools.lru_cache(1)
def _child(session):
    # Collected again, a folder would be another node, which has not the fixtures of its conftest.
    files = {str(item.path): None for item in session.items if item.get_closest_marker("npu")}
    child = Child(session.config, list(files))
    session.config.add_cleanup(child.end)
    return child


class Child:
    """The process, with the tests of some files: it answers ids with reports."""

    def __init__(self, config, files):
        options = [
            f"--rootdir={config.rootpath}", f"--seed={config.getoption('seed')}", "--nightly",
            f"--tb={config.getoption('tbstyle')}", "-p", "no:xdist", "-p", "no:cacheprovider",
            *files,
        ]  # fmt: skip
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as waiting:
            path = f"{folder}/here"
            waiting.bind(path)
            waiting.listen()
            waiting.settimeout(LIMIT)
            program = f"from devices.process import serve\nserve({path!r}, {options})"
            root = config.rootpath
            self._process = processes.start(
                program, folder=root, path=[root, root / "tests"], PYTEST_ADDOPTS=""
            )
            self._connection = Connection(waiting.accept()[0].detach())
        self._ended = None

    def ask(self, question):
        self._connection.send(question)
        return self._connection.recv()

    def end(self):
        """End the process, if it has not; return what it said."""
        if self._ended is None:
            with contextlib.suppress(OSError):
                self._connection.close()
            self._ended = self._process.wait(LIMIT, check=False)
        return f"status {self._ended.returncode}\n{self._ended.stdout}\n{self._ended.stderr}"


# ---- of the process ------------------------------------------------------------------------------


def serve(path, options):
    """Run tests, whose ids are asked for one by one."""
    npu.register()
    import transformer_engine.pytorch as te

    # The first layer on a type of device runs module by module, which `test_meeting` is about.
    te.RMSNorm(8, device="npu")(torch.ones(8, device="npu"))
    pytest.main(options, plugins=[_Serving(Client(path))])


class _Serving:
    def __init__(self, connection):
        self._connection, self._reports = connection, []

    def pytest_runtest_logreport(self, report):
        self._reports.append(report)

    def pytest_runtestloop(self, session):
        items = {item.nodeid: item for item in session.items}
        serialize = session.config.hook.pytest_report_to_serializable
        while True:
            try:
                wanted, following = self._connection.recv()
            except EOFError:
                return True
            # Fixtures of a wider scope stay for what follows; the session's for tests elsewhere.
            following = following and items.get(following, session)
            session._setupstate.teardown_exact(items[wanted])  # another one may have been announced
            self._reports.clear()
            items[wanted].ihook.pytest_runtest_protocol(item=items[wanted], nextitem=following)
            made = [serialize(config=session.config, report=report) for report in self._reports]
            self._connection.send(made)
