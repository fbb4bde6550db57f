# SPDX-License-Identifier: Apache-2.0
"""Products of fp32 under each of torch's settings of TF32, of which one hides another."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.module import linear_calls
from transformer_engine.pytorch.torchside import modes

MATMUL = torch.backends.cuda.matmul
SETTINGS = {
    "nothing": (lambda: None, False),
    "allow_tf32": (lambda: setattr(MATMUL, "allow_tf32", True), True),
    "no allow_tf32": (lambda: setattr(MATMUL, "allow_tf32", False), False),
    "high": (lambda: torch.set_float32_matmul_precision("high"), True),
    "fp32_precision": (lambda: setattr(MATMUL, "fp32_precision", "tf32"), True),
    "no fp32_precision": (lambda: setattr(MATMUL, "fp32_precision", "ieee"), False),
    "fp32_precision of all": (lambda: setattr(torch.backends, "fp32_precision", "tf32"), True),
}


@pytest.fixture(params=SETTINGS)
def allowed(request):
    """Whether the setting in force allows TF32."""
    before = MATMUL.fp32_precision, torch.backends.fp32_precision
    setting, allows = SETTINGS[request.param]
    setting()
    yield allows
    MATMUL.allow_tf32 = False
    MATMUL.fp32_precision, torch.backends.fp32_precision = before


def test_is_known(allowed):
    assert modes.allows_tf32() is allowed


@pytest.mark.usefixtures("allowed")
def test_modules_and_gemms_run():
    x = torch.randn(8, 16, requires_grad=True)
    linear = te.Linear(16, 16)
    y = linear(x)
    y.sum().backward()
    torch.testing.assert_close(y, torch.nn.functional.linear(x, linear.weight, linear.bias))
    assert torch.isfinite(x.grad).all()
    assert general_gemm(linear.weight.detach(), x.detach())[0].shape == (8, 16)


@pytest.mark.usefixtures("allowed")
def test_compiled_module_runs():
    torch._dynamo.reset()  # it counts what other tests have compiled
    x = torch.randn(8, 16)
    linear = te.Linear(16, 16)
    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), linear(x))


@pytest.mark.gpu
@pytest.mark.parametrize("again", [False, True], ids=["", "found again"])
def test_products_round_as_the_setting_says(allowed, again):
    """TF32 keeps 10 bits: errors of some 3e-4 of the largest result, where fp32 has 1e-6."""
    linear = te.Linear(1024, 1024, bias=False, device="cuda")
    x = torch.randn(256, 1024, device="cuda")
    with torch.no_grad():
        y = linear(x)
        y = linear(x) if again else y
        exact = x.double() @ linear.weight.double().T
    assert bool((y - exact).abs().max() > 3e-5 * exact.abs().max()) is allowed


def test_whether_a_thread_is_inside_of_an_operator():
    """It is asked by plug-ins, which switch autograd on there, and nowhere else."""
    assert not modes.inside_operator()
    with modes.below_autograd():
        assert modes.inside_operator()
    assert not modes.inside_operator()


@pytest.mark.gpu
def test_calls_in_fp32_are_found_by_what_the_setting_allows(monkeypatch):
    """Three are decided, the module's first one and one of each setting; the bits are theirs."""
    decided, decide = [], linear_calls.LinearCallBase._decide
    monkeypatch.setattr(
        linear_calls.LinearCallBase, "_decide", lambda *a: (decided.append(a), decide(*a))[1]
    )
    linear, x = te.Linear(256, 256, device="cuda"), torch.randn(64, 256, device="cuda")
    before, found = MATMUL.fp32_precision, {"ieee": [], "tf32": []}
    try:
        for precision in ["ieee", "tf32"] * 3:
            MATMUL.fp32_precision = precision
            found[precision].append(linear(x))
    finally:
        MATMUL.fp32_precision = before
    assert len(decided) == 3
    for results in found.values():
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not torch.equal(found["ieee"][0], found["tf32"][0])
