# SPDX-License-Identifier: Apache-2.0
"""Packages that are written to the contract of the fork run as they are, on cpu and npu."""

from pathlib import Path

import processes
import pytest

PACKAGES = Path(__file__).parents[1] / "packages"
TESTS = PACKAGES.parent
WHERE = pytest.mark.parametrize("device", ["cpu", pytest.param("npu", marks=pytest.mark.npu)])

BEGIN = """
import sys
import torch
from comparators import assert_nmse
from tols import tol
device = sys.argv[1]
if device == "npu":
    from devices import npu
    npu.register()
import transformer_engine.pytorch as te
from transformer_engine import plugin
from transformer_engine.plugin import core

def step(*modules):
    "Output, gradients of input and parameters, on the host."
    model = torch.nn.Sequential(*modules)
    generator = torch.Generator().manual_seed(int(sys.argv[2]))
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    x = torch.randn(8, 32, generator=generator).to(device).requires_grad_()
    y = model(x)
    (y.float() ** 2).sum().backward()
    return [t.detach().float().cpu() for t in (y, x.grad, *(p.grad for p in model.parameters()))]

def compare(make, orders, names, kind):
    "The same numbers as without, and that exactly these ran."
    natively = core.SelectionPolicy(per_op_order=[("*", ("impl:default.native", "reference"))])
    with core.policy_context(natively):
        wanted = step(*make())
    with core.policy_context(core.SelectionPolicy(per_op_order=orders)):
        found = step(*make())
        text = str(plugin.coverage(device))
    for one, exact in zip(found, wanted, strict=True):
        assert_nmse(one, exact.double(), 8 * tol("sum", torch.float32, 32), "beside our own")
    ran = {name for name in plugin.counts() if name.endswith(kind)}
    assert ran == {f"{name}/{kind}" for name in names}, ran
    assert kind in text
"""
GEMS = """
import flag_gems
make = lambda: (te.RMSNorm(32, device=device), te.Linear(32, 16, bias=False, device=device),
                te.LayerNormLinear(16, 8, bias=False, normalization="RMSNorm", device=device))
names = "rmsnorm_fwd", "rmsnorm_bwd", "generic_gemm"
order = [] if device == "npu" else [(n, ("impl:default.flagos", "flagos")) for n in names]
compare(make, order, names, "default.flagos")
assert {"use_gems", "mm", "rms_norm_forward", "rms_norm_backward"} <= set(flag_gems.CALLS)
import transformer_engine_torch as tex
x = [torch.full((3,), 2.0, device=device), torch.full((4,), 1.0, device=device)]
with core.policy_context(core.SelectionPolicy(per_op_order=[("*", ("impl:default.flagos",))])):
    norm, each = tex.multi_tensor_l2norm(64, torch.zeros(1, dtype=torch.int32), [x], True)
    tex.multi_tensor_scale(64, torch.zeros(1, dtype=torch.int32), [x, x], 0.5)
    half, _ = te.optimizers.multi_tensor_l2norm(64, torch.zeros(1, dtype=torch.int32), [x])
assert norm.item() == 4.0 and each.shape == (2,) and x[0].cpu().tolist() == [1.0] * 3
assert half.item() == 2.0 and plugin.counts()["multi_tensor_l2norm/default.flagos"] == 2
print(core.get_discovered_plugin())
"""
EAGER = """
make = lambda: (te.LayerNorm(32, device=device), te.LayerNormMLP(
    32, 48, bias=False, activation="swiglu", device=device))
names = "layernorm_fwd", "layernorm_bwd", "generic_gemm", "swiglu", "dswiglu"
order = [] if device == "npu" else [(n, ("reference",)) for n in names]
compare(make, order, names, "reference.eager")
import transformer_engine_torch as tex
x = torch.randn(64, device=device)
with core.with_preference("reference"):
    made, mask = tex.dropout_fwd(x, 0.5)
    assert torch.equal(tex.dropout_bwd(made, mask, 0.5), made * mask / 0.5)
print(core.get_discovered_plugin())
"""
CASES = {"te_flagos_gems": ("flagos_gems", GEMS), "te_eager_reference": ("eager_reference", EAGER)}


def run(module, device, seed, folder, **variables):
    path = [folder, PACKAGES / CASES[module][0], TESTS]
    program = BEGIN + CASES[module][1]
    return processes.run(program, device, seed, path=path, **variables).stdout


@pytest.mark.parametrize("module", CASES)
@WHERE
def test_by_the_environment(module, device, seed, tmp_path):
    said = run(module, device, seed, tmp_path, TE_FL_PLUGIN_MODULES=module)
    assert f"('{module}', 'env_module', True)" in said


@pytest.mark.parametrize(
    ("module", "device"),
    [("te_flagos_gems", "cpu"), pytest.param("te_eager_reference", "npu", marks=pytest.mark.npu)],
)
def test_by_an_entry_point(module, device, seed, tmp_path):
    installed = tmp_path / f"{module}-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(f"[te_fl.plugin]\n{module} = {module}\n")
    said = run(module, device, seed, tmp_path)
    assert f"('{module}', 'entry_point', True)" in said
