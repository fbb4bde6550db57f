# SPDX-License-Identifier: Apache-2.0
"""What the rest asks of a device of a third party, and codes of FP8 and FP4 that are made there."""

from types import SimpleNamespace

import pytest
import torch
from comparators import assert_bits
from thinning import one_each
from tols import BF16, E4M3, E5M2, F32

import transformer_engine_torch as tex
from transformer_engine.pytorch import graph, utils
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.custom_recipes import reference_current_scaling, reference_nvfp4
from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats
from transformer_engine.pytorch.optimizers import multi_tensor_step
from transformer_engine.pytorch.scaling_state import reduction
from transformer_engine.pytorch.torchside import device as devices

pytestmark = pytest.mark.npu


@pytest.fixture
def asked_anew():
    devices.can_pin.cache_clear()
    yield
    devices.can_pin.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_memory_is_pinned_where_the_package_can(npu, monkeypatch):
    values = torch.arange(5.0, device=npu)
    host, event = reduction.copy_of(values)
    event.synchronize()
    assert host.is_pinned() and host.tolist() == [0, 1, 2, 3, 4]
    devices.can_pin.cache_clear()
    empty = torch.empty

    def no_pins(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise NotImplementedError("npu: no pinned memory")
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", no_pins)
    host, event = reduction.copy_of(values)
    event.synchronize()
    assert not host.is_pinned() and host.tolist() == [0, 1, 2, 3, 4]


def test_what_its_module_of_torch_has_is_used(npu, monkeypatch):
    said = []
    ranges = SimpleNamespace(range_push=said.append, range_pop=lambda: said.append("end"))
    assert utils.get_sm_count() == 0
    with pytest.raises(NotImplementedError, match="npu: torch captures no graphs"):
        graph.graph_pool_handle()
    with utils.get_nvtx_range_context("without"):
        pass
    for name, value in (
        ("nvtx", ranges),
        ("graph_pool_handle", lambda: (0, 7)),
        ("get_device_properties", lambda index: SimpleNamespace(multi_processor_count=11 + index)),
    ):
        monkeypatch.setattr(torch.npu, name, value, raising=False)
    with utils.get_nvtx_range_context("within"):
        pass
    assert said == ["within", "end"]
    assert graph.graph_pool_handle() == (0, 7) and utils.get_sm_count() == 11


@one_each(quantizer=["nvfp4", "nvfp4 transformed", "e4m3", "e5m2"])
def test_reference_quantizers_cast_there(npu, quantizer):
    """Bits of the CPU, forms and their numbers, without a copy to the host."""
    of_nvfp4 = reference_nvfp4.NVFP4QuantizerRef
    current = reference_current_scaling.CurrentScalingQuantizerRef
    made = {
        "nvfp4": lambda: of_nvfp4(Fp4Formats.E2M1, quant_tile_shape=(16, 16)),
        "nvfp4 transformed": lambda: of_nvfp4(Fp4Formats.E2M1, with_rht=True),
        "e4m3": lambda: current(E4M3),
        "e5m2": lambda: current(E5M2),
    }[quantizer]()
    x = torch.randn(40, 72).to(BF16)
    wanted, found = made.quantize(x), made.quantize(x.to(npu))
    for name in wanted._TENSORS:
        one, other = (
            t.view(torch.uint8) if t.dtype in (E4M3, E5M2) else t
            for t in (getattr(found, name), getattr(wanted, name))
        )
        assert one.device == torch.device(npu)
        assert_bits(one.cpu(), other)
    assert_bits(found.dequantize(dtype=F32).cpu(), wanted.dequantize(dtype=F32))


@pytest.mark.parametrize("dtype", [DType.kFloat8E4M3, DType.kFloat8E5M2])
def test_slices_of_weights_are_cast_there(npu, dtype):
    weight, scale = torch.randn(300) * 50, torch.rand(5, 7) * 30
    scale[0, 0] = float("inf")
    codes = []
    for device in ("cpu", npu):
        out = torch.zeros(271, dtype=torch.uint8, device=device)
        tex.fp8_block_scaling_partial_cast(
            weight[:271].to(device), out, scale.to(device), 19, 26, 30, 4, dtype
        )
        codes.append(out.cpu())
    assert_bits(*codes)
    with pytest.raises(TypeError, match="out_dtype=.*expected an FP8 DType"):
        tex.fp8_block_scaling_partial_cast(
            weight[:271], codes[0], scale, 19, 26, 30, 4, DType.kBFloat16
        )


def test_parameters_in_fp8_are_stepped_there(npu):
    given = [torch.randn(33), torch.zeros(33, dtype=torch.uint8), torch.zeros(33), torch.zeros(33),
             torch.randn(33), torch.full((1,), 70.0), torch.zeros(1), torch.zeros(1)]  # fmt: skip
    results = []
    for device in ("cpu", npu):
        lists = [[t.clone().to(device)] for t in given]
        flag = torch.zeros(1, dtype=torch.int32, device=device)
        settings = 1e-2, 0.9, 0.99, 1e-8, 1, 0, 1, 0.0
        multi_tensor_step.multi_tensor_adam_fp8(65536, flag, lists, *settings, DType.kFloat8E4M3)
        with pytest.raises(TypeError, match="fp8_dtype=.*expected an FP8 DType"):
            multi_tensor_step.multi_tensor_adam_fp8(65536, flag, lists, *settings, DType.kFloat16)
        results.append([each[0].cpu() for each in lists])
    (_, codes, _, _, parameters, *_), amax = results[1], results[0][6]
    assert codes.any() and amax > 0
    assert_bits(codes, (parameters * 70.0).clamp(-448, 448).to(E4M3).view(torch.uint8))
