# SPDX-License-Identifier: Apache-2.0
"""Programs of `test_rocm`: each runs in a process of its own, on the stand-in for AMD's GPUs."""

import io

from devices import rocm

rocm.register()

import pytest  # noqa: E402 - after the device
import torch  # noqa: E402
from devices import acme  # noqa: E402
from devices.beside_cpu import (  # noqa: E402
    BATCH,
    MODULES,
    RECIPES,
    TOKENS,
    WIDTH,
    assert_as_on_the_cpu,
    eager,
    ran,
    region,
)
from tols import BF16, F32  # noqa: E402

import transformer_engine.plugin as plugins  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine import _core  # noqa: E402
from transformer_engine.plugin import core as plugin  # noqa: E402
from transformer_engine.pytorch.cpp_extensions import general_gemm, product  # noqa: E402
from transformer_engine.pytorch.module import call_key, linear_calls  # noqa: E402
from transformer_engine.pytorch.torchside import device as devices  # noqa: E402

GPU = torch.device("cuda", 0)


def inputs(device="cpu", dtype=BF16):
    return [torch.randn(TOKENS, BATCH, WIDTH).to(device, dtype) for _ in range(2)]


def made(name, device=GPU, dtype=BF16):
    return MODULES[name](params_dtype=dtype, device=device)


def definitions_run_the_modules():
    """With the bits of definitions on the CPU; nothing of NVIDIA's is asked for."""
    _core.cuda_configure = _core.tune_gemm = rocm.refused("settings of CUDA kernels")
    for module in (call_key, linear_calls, product):
        module.allows_tf32 = rocm.refused("TF32")
    for name in MODULES:
        for recipe in RECIPES if name == "TransformerLayer" else ("none", "delayed"):
            dtype = F32 if recipe == "none" else BF16
            given = inputs(dtype=dtype)
            assert_as_on_the_cpu(made(name, "cpu", dtype), given, eager(recipe), GPU)
            assert ran() == {"rocm"}
            counted = _core.counters()
            gemms = {name for name in counted if name.startswith("gemm.")}
            assert gemms <= {"gemm.rocm.f32.f32", "gemm.rocm.bf16.bf16"}
            assert not [name for name in counted if "cuda" in name], counted


def matrices_are_multiplied():
    """By the function of the extension's name, too."""
    product.allows_tf32 = rocm.refused("TF32")
    a, b = torch.randn(4, 8), torch.randn(6, 8)
    found, *_ = general_gemm(b.to(GPU), a.to(GPU), out_dtype=F32)
    assert found.device == GPU and ran() == {"rocm"}
    torch.testing.assert_close(found.cpu(), a @ b.t())


def what_is_there():
    """Nothing that NVIDIA's GPUs have; torch's own name is the default of modules."""
    assert te.Linear(4, 4).weight.device == GPU
    assert devices.type_name(GPU) == "rocm" and not devices.on_cuda(GPU)
    assert not devices.has_kernels(GPU) and devices.has_kernels(torch.device("cpu"))
    assert te.get_device_compute_capability() == (0, 0)
    for query in (te.is_fp8_available, te.is_bf16_available, te.is_fp8_block_scaling_available):
        available, reason = query(return_reason=True)
        assert not available and "CUDA device" in reason


def what_is_said():
    """Reports, coverage and errors have the type's name."""
    model, x = made("LayerNormLinear"), inputs(GPU)[0]
    text = io.StringIO()
    with region("delayed"):
        te.explain(model, x, file=text)
        model(x)
    te.report(model, file=text)
    assert text.getvalue().count("cuda:0 (rocm): this library has no kernels for it") == 2
    covered = plugins.coverage("cuda")
    assert covered.device == "rocm" and "operators on rocm" in str(covered)
    assert not covered.of("nobody")
    assert set(covered.of("reference")) >= {f"te_{op}" for op in _core.op_names()}
    assert covered.row("te_gemm").runs == 1
    assert "no kernels for rocm" in str(plugins.explain("te_gemm", device=GPU))
    only = plugin.SelectionPolicy(per_op_order=[("*", ("vendor",))])
    with plugin.policy_context(only), pytest.raises(NotImplementedError, match="rocm"):
        model(x)


def plug_ins_take_operators():
    """A vendor's, which names torch's type of device."""
    vendor, model, x = acme.Vendor(), made("LayerNormMLP"), inputs(GPU)[0]
    wanted = model(x)
    vendor.register(plugin.get_registry())
    with plugin.policy_context(plugin.SelectionPolicy("vendor")):
        found = model(x)
    assert vendor.calls["rmsnorm_fwd"] + vendor.calls["layernorm_fwd"] == 1
    assert vendor.calls["generic_gemm"] == 2
    torch.testing.assert_close(found, wanted)
    row = plugins.coverage("cuda", plugin.SelectionPolicy("vendor")).row("te_gemm")
    assert row.runners[0].impl_id == "vendor.acme"
    impl = plugin.get_registry().get_implementation("layernorm_fwd", "vendor.acme")
    report = plugins.check(impl, device=GPU, dtypes=[torch.bfloat16])
    assert report.passed, report


def architectures_are_nvidias():
    """An implementation for compute capabilities takes nothing there."""
    taken = []
    impl = plugin.OpImpl(
        "te_norm", "vendor.sm", plugin.BackendImplKind.VENDOR, taken.append, vendor="sm",
        min_arch="sm80",
    )  # fmt: skip
    plugin.get_registry().register(impl)
    with plugin.policy_context(plugin.SelectionPolicy("vendor")):
        made("RMSNorm")(inputs(GPU)[0])
    assert not taken and ran() == {"rocm"}


def captures_are_refused():
    """What a capture would have to leave out: cuThreadExchangeStreamCaptureMode is CUDA's."""
    torch.cuda.is_current_stream_capturing = lambda: True
    with pytest.raises(RuntimeError, match="rocm.*a graph of its stream is being captured"):
        with devices.outside_capture(GPU):
            pass
