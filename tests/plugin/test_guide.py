# SPDX-License-Identifier: Apache-2.0
"""The code samples of the guide of the fork with plug-ins, one by one.

The sample for JAX waits for `transformer_engine.jax`, which is not built yet.
"""

import ast
import os
from pathlib import Path

import processes
import pytest
import torch

from transformer_engine import _core

SETUP = Path(__file__).parents[2] / "setup.py"


def run(code, tmp_path, **environment):
    """What a program prints, run in a folder."""
    done = processes.run(code, folder=tmp_path, path=[tmp_path], **environment)
    return done.stdout.split()


def fp8_gemms():
    """Products of FP8 that were counted."""
    return sum(
        n for name, n in _core.counters().items() if name.startswith("gemm.") and "e4m3" in name
    )


def test_quick_example(device):
    """Its sizes; in FP8, forward and backward."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    in_features, out_features, hidden_size = 768, 3072, 2048
    model = te.Linear(in_features, out_features, bias=True, device=device)
    inp = torch.randn(hidden_size, in_features, device=device)
    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.E4M3)
    before = fp8_gemms()
    with te.autocast(enabled=True, recipe=fp8_recipe):
        out = model(inp)
    loss = out.sum()
    loss.backward()
    exact = inp.double() @ model.weight.double().T + model.bias.double()
    assert (out - exact).square().mean() < 0.06**2 * exact.square().mean()
    assert model.weight.grad.shape == (out_features, in_features)
    assert fp8_gemms() - before == 2  # the input wants no gradient


def test_in_tree():
    """A registration in a registry of one's own."""
    from transformer_engine.plugin.core import BackendImplKind, OpImpl, OpManager, OpRegistry

    def my_implementation(x):
        return 2 * x

    registry = OpRegistry()
    registry.register(
        OpImpl(
            op_name="my_op",
            impl_id="vendor.my_vendor",
            kind=BackendImplKind.VENDOR,
            fn=my_implementation,
            vendor="my_vendor",
        )
    )
    assert OpManager(registry).call("my_op", 4) == 8


PLUGIN = """
from transformer_engine.plugin.core import BackendImplKind, OpImpl


def my_implementation(x):
    return 2 * x


def register(registry):
    kind = BackendImplKind.VENDOR
    impl = OpImpl("my_op", "vendor.my_vendor", kind, my_implementation, vendor="my_vendor")
    registry.register(impl)
"""
CALL = """
from transformer_engine.plugin.core import get_default_manager
print(get_default_manager().call("my_op", 4))
"""


def test_out_of_tree_by_the_environment(tmp_path):
    (tmp_path / "my_plugin_module.py").write_text(PLUGIN)
    assert run(CALL, tmp_path, TE_FL_PLUGIN_MODULES="my_plugin_module") == ["8"]


def test_out_of_tree_by_an_entry_point(tmp_path):
    """As ``pip install`` leaves it; tests/packaging installs the examples."""
    (tmp_path / "my_plugin_module.py").write_text(PLUGIN)
    installed = tmp_path / "my_te_plugin-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: my-te-plugin\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text(
        "[te_fl.plugin]\nmine = my_plugin_module:register\n"
    )
    assert run(CALL, tmp_path) == ["8"]


VENDORS = """
from transformer_engine.plugin.core import BackendImplKind, OpImpl


def register(registry):
    for vendor, takes in ("acme", False), ("my_vendor", True):
        impl = OpImpl(
            "gelu", f"vendor.{vendor}", BackendImplKind.VENDOR, lambda input, quantizer: input,
            vendor=vendor, priority=not takes, supports=lambda *args, takes=takes: takes,
        )
        registry.register(impl)
"""
WHO_RAN = """
import torch
import transformer_engine_torch as tex
from transformer_engine.plugin.core import get_manager
try:
    tex.gelu(torch.zeros(1, 1), None)
except NotImplementedError:
    print("refused")
print(*get_manager().counts())
"""
VARIABLES = [
    ("", "default.native"),
    ("TE_FL_PREFER=reference", "reference.torch"),
    ("TE_FL_PREFER=VENDOR", "vendor.my_vendor"),
    ("TE_FL_PREFER_VENDOR=1", "vendor.my_vendor"),
    ("TE_FL_PREFER_VENDOR=0", "default.native"),
    ("TE_FL_PREFER=reference TE_FL_PREFER_VENDOR=1", "reference.torch"),
    ("TE_FL_PREFER=vendor TE_FL_STRICT=1", "refused"),
    ("TE_FL_PREFER=vendor TE_FL_STRICT=0", "vendor.my_vendor"),
    ("TE_FL_PREFER=vendor TE_FL_ALLOW_VENDORS=acme,other", "default.native"),
    ("TE_FL_PREFER=vendor TE_FL_DENY_VENDORS=my_vendor", "default.native"),
    ("TE_FL_PER_OP=gelu=reference|flagos;relu=vendor", "reference.torch"),
    ("TE_FL_PREFER=vendor TE_FL_PLUGIN_MODULES=", "default.native"),
]


@pytest.mark.parametrize(("variables", "expected"), VARIABLES)
def test_environment_variables(variables, expected, tmp_path):
    (tmp_path / "my_plugin_module.py").write_text(VENDORS)
    given = {"TE_FL_PLUGIN_MODULES": "my_plugin_module"}
    given |= dict(one.split("=", 1) for one in variables.split())
    found = run(WHO_RAN, tmp_path, **given)
    assert found == [expected if expected == "refused" else f"gelu/{expected}"]


def test_skipping_cuda(tmp_path):
    """CUDA tensors go to others than this library; here of anything that says it is one."""
    (tmp_path / "my_plugin_module.py").write_text(VENDORS)
    code = """
    import torch
    import transformer_engine.pytorch
    import transformer_engine_torch as tex
    from transformer_engine import _core
    from transformer_engine.plugin.core import get_manager

    class OnDevice:
        dtype, device = torch.float32, torch.device("cuda", 0)

    x = OnDevice()
    assert tex.gelu(x, None) is x
    assert get_manager().counts() == {"gelu/vendor.my_vendor": 1}
    tex.gelu(torch.zeros(1, 1), None)
    assert get_manager().counts()["gelu/default.native"] == 1
    try:
        _core.Context(_core.DEVICE_CUDA)
    except NotImplementedError as error:
        print(str(error).partition(":")[0])
    """
    given = {"TE_FL_SKIP_CUDA": "1", "TE_FL_PLUGIN_MODULES": "my_plugin_module"}
    assert run(code, tmp_path, **given) == ["TE_FL_SKIP_CUDA=1"]


@pytest.mark.parametrize(("level", "is_told"), [("", True), ("error", True), ("CRITICAL", False)])
def test_levels_of_the_logger(level, is_told, tmp_path):
    given = {"TEFL_LOG_LEVEL": level, "TE_FL_PLUGIN_MODULES": "no_such_module"}
    done = processes.run(WHO_RAN, folder=tmp_path, **given)
    assert done.stdout.split() == ["gelu/default.native"]
    assert ("no_such_module (env_module) did not register" in done.stderr) is is_told


@pytest.mark.skipif(not SETUP.exists(), reason="needs the source tree")
@pytest.mark.parametrize("te_cuda", ["", "0", "1"])
@pytest.mark.parametrize("skip", ["", "0", "1", "yes"])
def test_building_without_cuda(te_cuda, skip, monkeypatch):
    """While it is built: what setup.py does, without building."""
    functions = {
        found.name: found for found in ast.parse(SETUP.read_text()).body if hasattr(found, "name")
    }
    body = ast.Module([functions["why_no_cuda"]], [])
    names = {"os": os}
    exec(compile(body, str(SETUP), "exec"), names)
    monkeypatch.setenv("TE_CUDA", te_cuda)
    monkeypatch.setenv("TE_FL_SKIP_CUDA", skip)
    if skip == "yes" or (te_cuda, skip) == ("1", "1"):
        with pytest.raises(SystemExit, match="TE_FL_SKIP_CUDA="):
            names["why_no_cuda"]()
        return
    wanted = "TE_CUDA=0" if te_cuda == "0" else "TE_FL_SKIP_CUDA=1" if skip == "1" else ""
    assert names["why_no_cuda"]() == wanted


def test_usage(device):
    """Its recipe for training."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    fp8_recipe = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)
    model, input = te.Linear(64, 32, device=device), torch.randn(16, 64, device=device)
    before = fp8_gemms()
    with te.autocast(enabled=True, recipe=fp8_recipe):
        output = model(input)
    assert fp8_gemms() - before == 1
    assert output.shape == (16, 32) and output.isfinite().all()
