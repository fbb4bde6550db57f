# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: the device, fresh random numbers with a printed seed, counters from zero.

A run draws one seed; every test makes its own from it and its name. `pytest --seed N` repeats a
run, in any selection and order of tests.
"""

import gc
import secrets
import zlib

import hypothesis
import numpy as np
import pytest
import torch

import transformer_engine.pytorch  # noqa: F401 - hands torch to the extension
from transformer_engine import _core

# Time decides no test; examples are few because each test is one of many.
hypothesis.settings.register_profile("te", deadline=None, max_examples=30, print_blob=True)
hypothesis.settings.load_profile("te")


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=None, help="seed of the random test data")


def pytest_configure(config):
    if config.getoption("seed") is None:
        sent = getattr(config, "workerinput", {})
        config.option.seed = sent.get("seed", secrets.randbits(31))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Give the processes of pytest-xdist one seed."""
    node.workerinput["seed"] = node.config.getoption("seed")


def pytest_report_header(config):
    return f"test data: --seed {config.getoption('seed')}"


def pytest_collection_finish():
    """Keep torch and the list of tests out of every later collection: many tests make one."""
    gc.collect()
    gc.freeze()


def missing(marker):
    """Say why tests of this mark can not run here; None where they can."""
    needed = {"gpu": 1, "multigpu": 2}[marker]
    if not _core.has_cuda():
        return "the extension was built without CUDA"
    found = torch.cuda.device_count()
    return None if found >= needed else f"needs {needed} CUDA device(s), found {found}"


def pytest_runtest_setup(item):
    for marker in ("gpu", "multigpu"):
        if item.get_closest_marker(marker) is not None:
            reason = missing(marker)
            if reason is not None:
                pytest.skip(reason)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """The backend under test: "cpu", and "cuda" under the mark `gpu`."""
    return request.param


@pytest.fixture(autouse=True)
def seed(request):
    """Seed of this test's data; torch's generators start from it."""
    run = request.config.getoption("seed")
    number = zlib.crc32(f"{run} {request.node.nodeid}".encode())
    print(f"seed {number} (pytest --seed {run})")
    torch.manual_seed(number)
    return number


@pytest.fixture
def rng(seed):
    """Generator of this test's data."""
    return np.random.default_rng(seed)


@pytest.fixture
def counters():
    """`_core.counters`, from zero."""
    _core.reset_counters()
    return _core.counters
