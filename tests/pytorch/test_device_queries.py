# SPDX-License-Identifier: Apache-2.0
"""What `is_fp8_available` and its kin say about devices, present ones and others."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.torchside import device

QUERIES = [te.is_fp8_available, te.is_bf16_available]
KNOWN = {(7, 5): (False, False), (8, 0): (False, True), (8, 6): (False, True),
         (8, 9): (True, True), (9, 0): (True, True), (12, 0): (True, True)}  # fmt: skip


def pretend(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)


@pytest.mark.parametrize("capability", KNOWN, ids=str)
def test_by_compute_capability(monkeypatch, capability):
    pretend(monkeypatch, capability)
    assert te.get_device_compute_capability() == capability
    assert tuple(query() for query in QUERIES) == KNOWN[capability]
    for query, expected in zip(QUERIES, KNOWN[capability], strict=True):
        available, reason = query(return_reason=True)
        assert available is expected
        assert (reason == "") if available else (str(capability) in reason)


def test_without_a_device(monkeypatch):
    pretend(monkeypatch, None)
    assert te.get_device_compute_capability() == (0, 0)
    for query in QUERIES:
        assert query() is False
        available, reason = query(return_reason=True)
        assert available is False and "CUDA device" in reason
    assert "CPU" in te.is_fp8_available(return_reason=True)[1]


def test_a_build_for_rocm(monkeypatch):
    """Its devices are called cuda, and answer by numbers of AMD's."""
    pretend(monkeypatch, (9, 4))
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert device.type_name(cuda) == "cuda" and device.on_cuda(cuda) and device.has_kernels(cuda)
    monkeypatch.setattr(torch.version, "hip", "7.0.0")
    assert device.type_name(cuda) == "rocm" and device.in_words(cuda) == "cuda:0 (rocm)"
    assert not device.on_cuda(cuda) and not device.has_kernels(cuda)
    assert device.type_name(cpu) == device.in_words(cpu) == "cpu" and device.has_kernels(cpu)
    assert device.accelerator() == "cuda" and te.get_device_compute_capability() == (0, 0)
    assert not any(query() for query in QUERIES)
    assert device.without_kernels(cuda).startswith("cuda:0 (rocm): this library has no kernels")


@pytest.mark.gpu
def test_this_device():
    assert te.get_device_compute_capability() == torch.cuda.get_device_capability()
    assert te.is_bf16_available(return_reason=True) == (True, "")
    if torch.cuda.get_device_capability() >= (8, 9):
        assert te.is_fp8_available() is True


def test_default_recipe_is_one_that_runs():
    assert te.get_default_recipe() == DelayedScaling()
