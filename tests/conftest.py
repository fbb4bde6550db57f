# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: the device, fresh random numbers with a printed seed, counters from zero.

A run draws one seed; every test makes its own from it and its name. `pytest --seed N` repeats a
run, in any selection and order of tests.
"""

import functools
import gc
import logging
import re
import secrets
import zlib

import hypothesis
import numpy as np
import pytest
import torch
from device_kinds import MARKS, OURS
from devices import process as npu_process
from thinning import few_there

import transformer_engine.pytorch  # noqa: F401 - hands torch to the extension
from transformer_engine import _core

# Time decides no test; examples are few because each test is one of many.
hypothesis.settings.register_profile("te", deadline=None, max_examples=30, print_blob=True)
hypothesis.settings.load_profile("te")


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=None, help="seed of the random test data")
    parser.addoption("--nightly", action="store_true", help="run the tests of the mark nightly too")


def pytest_configure(config):
    # pytest gives a handler to each logger that does not propagate, six times a test; torch has 40.
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger) and logger.name.startswith("torch"):
            logger.propagate = True
    if config.getoption("seed") is None:
        sent = getattr(config, "workerinput", {})
        config.option.seed = sent.get("seed", secrets.randbits(31))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Give the processes of pytest-xdist one seed."""
    node.workerinput["seed"] = node.config.getoption("seed")


def pytest_report_header(config):
    return f"test data: --seed {config.getoption('seed')}"


def pytest_terminal_summary(terminalreporter, config):
    for mark, reason in left_out(config).items():
        terminalreporter.write_line(f"left out: {mark} ({reason})")


def pytest_collection():
    """Thousands of tests are made, and none goes: no collection of garbage finds any."""
    gc.disable()


def pytest_collection_modifyitems(config, items):
    """Leave tests out whose marks can not run, or are not asked for: skipping each takes longer."""
    few_there([item for item in items if item.get_closest_marker("npu")])
    marks = left_out(config).keys()
    kept, left = [], []
    for item in items:
        (left if marks & {mark.name for mark in item.iter_markers()} else kept).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def pytest_collection_finish():
    """Keep torch and the list of tests out of every later collection: many tests make one."""
    gc.collect()
    gc.freeze()
    gc.enable()


def left_out(config):
    """Marks whose tests this run leaves out, with the reason: those that `-m` does not name."""
    reasons = {mark: missing(mark) for mark in ("gpu", "multigpu", "npu")}
    reasons["nightly"] = None if config.getoption("nightly") else "--nightly runs them"
    named = re.findall(r"\w+", config.getoption("markexpr"))
    return {mark: reason for mark, reason in reasons.items() if reason and mark not in named}


@functools.cache
def missing(marker, needed=None):
    """Say why tests of this mark can not run here; None where they can.

    `needed`: how many devices, where the mark says so.
    """
    if marker == "npu":
        return npu_process.missing()
    needed = needed or {"gpu": 1, "multigpu": 2}[marker]
    if not _core.has_cuda():
        return "the extension was built without CUDA"
    found = torch.cuda.device_count()
    return None if found >= needed else f"needs {needed} CUDA device(s), found {found}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Send tests of the device npu to the process that has it."""
    if item.get_closest_marker("npu") is None or npu_process.is_here() or missing("npu"):
        return None
    return npu_process.run(item, nextitem)


def pytest_runtest_setup(item):
    for marker in ("gpu", "multigpu", "npu"):
        for mark in item.iter_markers(marker):
            reason = missing(marker, *mark.args)
            if reason is not None:
                pytest.skip(reason)


@pytest.fixture(scope="session")
def device(request):
    """The kind of device under test: "cpu", and under their marks "cuda" and "npu"."""
    return request.param


def pytest_generate_tests(metafunc):
    """Make tests of `device` for its kinds (`device_kinds`) that are not left out: thousands."""
    if "device" not in metafunc.fixturenames:
        return
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        if "device" in (names.replace(" ", "").split(",") if isinstance(names, str) else names):
            return  # a test that names its devices
    mark, left = metafunc.definition.get_closest_marker("devices"), left_out(metafunc.config)
    kinds = mark.args if mark else OURS
    if npu_process.is_here():
        kinds, left = {"npu"}.intersection(kinds), {}
    devices = [pytest.param(kind, marks=marks) for kind, marks in MARKS.items()
               if kind in kinds and not {mark.name for mark in marks} & left.keys()]  # fmt: skip
    metafunc.parametrize("device", devices, indirect=True, scope="session")


@pytest.fixture(autouse=True)
def seed(request):
    """Seed of this test's data; torch's generators start from it."""
    run = request.config.getoption("seed")
    number = zlib.crc32(f"{run} {request.node.nodeid}".encode())
    print(f"seed {number} (pytest --seed {run})")
    # Without a device torch.manual_seed keeps each seed for one to come, and the stack as text.
    alone = missing("gpu") and not npu_process.is_here()
    (torch.default_generator.manual_seed if alone else torch.manual_seed)(number)
    return number


@pytest.fixture
def npu():
    """The first of two devices of a third party, for tests of the mark `npu`."""
    return torch.device("npu", 0)


@pytest.fixture
def rng(seed):
    """Generator of this test's data."""
    return np.random.default_rng(seed)


@pytest.fixture
def counters():
    """`_core.counters`, from zero."""
    _core.reset_counters()
    return _core.counters
