# SPDX-License-Identifier: Apache-2.0
"""What devices can do is asked in one file, of the device that is meant."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import transformer_engine
import transformer_engine_torch as tex
from transformer_engine.plugin.core.ops import NVTE_Fused_Attn_Backend, NVTE_QKV_Layout
from transformer_engine.pytorch import graph, utils
from transformer_engine.pytorch.attention.dot_product_attention.utils import FusedAttentionParams
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.scaling_state import reduction
from transformer_engine.pytorch.torchside import device as devices

ROOT = Path(transformer_engine.__file__).parent


def asks_for_cuda(tree):
    """Lines that read ``is_cuda`` of something, or ``torch.cuda``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (
            node.attr == "is_cuda"
            or (
                node.attr == "cuda"
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            )
        ):
            yield node.lineno


def test_one_file_asks_for_cuda_by_name():
    found = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.rglob("*.py")
        if (lines := list(asks_for_cuda(ast.parse(path.read_text()))))
    }
    assert list(found) == ["pytorch/torchside/device.py"], found


def asked(dtype):
    return tex.get_fused_attn_backend(
        FusedAttentionParams(
            qkv_dtype=dtype, o_dtype=dtype, num_attn_heads=2, num_gqa_groups=2, head_dim_qk=12,
            head_dim_v=12, qkv_layout=NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD,
        )
    )  # fmt: skip


def test_fused_attention_is_asked_for_by_device(monkeypatch):
    """On the CPU of a machine with CUDA heads of 12 channels in fp32 run, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch.device("cpu"):
        for dtype in (DType.kFloat32, DType.kBFloat16):
            assert asked(dtype) == (NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, "")


@pytest.mark.gpu
def test_fused_attention_is_asked_for_by_device_on_cuda():
    with torch.device("cuda"):
        kind, why = asked(DType.kFloat32)
        assert kind == NVTE_Fused_Attn_Backend.NVTE_No_Backend and "float32" in why
        kind, why = asked(DType.kBFloat16)
        assert kind == NVTE_Fused_Attn_Backend.NVTE_No_Backend and "12) channels" in why


def test_of_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert devices.accelerator() == "cpu"
    assert not devices.can_pin("cpu") and devices.profiler_ranges() is None
    assert utils.get_sm_count() == 0 and devices.get_device_compute_capability() == (0, 0)
    assert devices.get_device_compute_capability(torch.device("cpu")) == (0, 0)
    with pytest.raises(NotImplementedError, match="cpu: torch captures no graphs"):
        graph.graph_pool_handle()


def test_handles_of_streams(monkeypatch):
    """A GPU of AMD is "cuda" for torch, whose streams have a name of their own for it."""
    assert devices.stream_handle("cpu", 0) == 0
    asked = lambda index: SimpleNamespace(cuda_stream=70 + index)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", asked)
    assert devices.stream_handle("cuda", 1) == 71


@pytest.mark.gpu
def test_of_cuda():
    here = torch.device("cuda", torch.cuda.current_device())
    assert devices.can_pin("cuda") and devices.profiler_ranges() is torch.cuda.nvtx
    properties = torch.cuda.get_device_properties(here)
    assert utils.get_sm_count() == properties.multi_processor_count
    assert devices.get_device_compute_capability(here) == (properties.major, properties.minor)
    assert graph.graph_pool_handle() != graph.graph_pool_handle()
    host, event = reduction.copy_of(torch.arange(5.0, device=here))
    event.synchronize()
    assert host.is_pinned() and host.tolist() == [0, 1, 2, 3, 4]
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        assert devices.stream_handle("cuda", here.index) == own.cuda_stream != 0
