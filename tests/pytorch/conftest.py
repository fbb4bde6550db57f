# SPDX-License-Identifier: Apache-2.0
"""Every test of the front end begins and ends without FP8 state and without our variables."""

import sys

import pytest
import torch
from pytorch.ranks import GROUPS, Ranks

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common import config


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Unset the variables of the package; drop FP8 state before and after."""
    for variable in config.TABLE:
        for name in (variable.name, *variable.aliases):
            monkeypatch.delenv(name, raising=False)
    te.reset()
    yield
    te.reset()


@pytest.fixture(scope="session", params=GROUPS)
def ranks(request):
    """Processes of a group; the first function that they run starts them."""
    group = Ranks(*request.param)
    yield group
    group.close()


@pytest.fixture
def start():
    """One seed for the two runs that a test compares."""
    seed = int(torch.randint(2**31, ()))

    def begin():
        te.reset()
        torch.manual_seed(seed)

    return begin


@pytest.fixture
def repeatable(monkeypatch):
    """Gradients of attention have the same bits from run to run on a GPU too."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


FLASH_AND_FUSED = {"native": ("0", "1"), "sdpa": ("1", "0"), "unfused": ("0", "0")}


@pytest.fixture(params=FLASH_AND_FUSED)
def backend(request, device, monkeypatch):
    """Backends of attention: NVTE_FLASH_ATTN and NVTE_FUSED_ATTN ask for it, or for unfused."""
    for name, value in zip(("FLASH", "FUSED"), FLASH_AND_FUSED[request.param], strict=True):
        monkeypatch.setenv(f"NVTE_{name}_ATTN", value)
    return request.param


class _Noting:
    """The extension module; calls of what runs on tensors are noted."""

    RUN = (
        "run",
        "run_consuming",
        "run_staged",
        "attention",
        "attention_backward",
        "dropout_add",
        "rope",
        "norm",
    )

    def __init__(self, found):
        self._found = found

    def __getattr__(self, name):
        value = getattr(_core, name)
        if name not in self.RUN:
            return value

        def noted(*args, **kwargs):
            self._found.append(name)
            return value(*args, **kwargs)

        return noted


@pytest.fixture
def native_runs(monkeypatch):
    """Names of the calls of plans and operators that the package makes."""
    found = []
    noting = _Noting(found)
    for name, module in list(sys.modules.items()):
        if (
            name.startswith("transformer_engine.pytorch")
            and getattr(module, "_core", None) is _core
        ):
            monkeypatch.setattr(module, "_core", noting)
    return found


@pytest.fixture
def fresh_compiler():
    """No graphs and counts of other tests."""
    te.reset()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
