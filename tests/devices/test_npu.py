# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

pytestmark = pytest.mark.npu

def test_a(npu):
    assert torch.accelerator.current_accelerator().type == "npu"
def test_b(npu):
    print("hello", torch.randn(2, device=npu))
    assert 0
@pytest.mark.skip("because")
def test_c(npu):
    print("hello")
def test_d(npu):
    import os
    os.kill(os.getpid(), 11)
def test_e(npu):
    pass
