# SPDX-License-Identifier: Apache-2.0
"""The code samples of the guide of the fork with plug-ins, one by one.

The sample for JAX waits for `transformer_engine.jax`, which is not built yet.
"""

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from transformer_engine import _core

SETUP = Path(__file__).parents[2] / "setup.py"


def run(code, tmp_path, **environment):
    """What a program prints, run in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
            **environment,
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
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


GELU = """
from transformer_engine.plugin.core import BackendImplKind, OpImpl


def register(registry):
    kind = BackendImplKind.VENDOR
    for vendor, takes in (("acme", False), ("my_vendor", True)):
        impl = OpImpl(
            "gelu", f"vendor.{vendor}", kind, lambda x, quantizer: x, vendor=vendor,
            priority=not takes, supports=lambda x, quantizer, takes=takes: takes,
        )
        registry.register(impl)
"""
WHO_RAN = """
import logging
import torch
import transformer_engine_torch as tex
from transformer_engine.plugin import counts
from transformer_engine.plugin.core.logger_manager import LoggerManager
try:
    tex.gelu(torch.zeros(1, 1), None)
    print(*counts(), end=" ")
except NotImplementedError:
    print("raised", end=" ")
print(logging.getLevelName(LoggerManager.get_logger().level))
"""
MINE, OURS, LEVEL = "gelu/vendor.my_vendor", "gelu/default.native", "WARNING"
VENDORS_FIRST = {"TE_FL_PLUGIN_MODULES": "my_plugin_module", "TE_FL_PREFER": "vendor"}
VARIABLES = {  # the value, the other variables, and what is said without it and with it
    "TE_FL_PREFER": ("reference", {}, (OURS, LEVEL), ("gelu/reference.torch", LEVEL)),
    "TE_FL_STRICT": ("1", VENDORS_FIRST, (MINE, LEVEL), ("raised", LEVEL)),
    "TE_FL_ALLOW_VENDORS": ("acme,other", VENDORS_FIRST, (MINE, LEVEL), (OURS, LEVEL)),
    "TE_FL_DENY_VENDORS": ("my_vendor", VENDORS_FIRST, (MINE, LEVEL), (OURS, LEVEL)),
    "TE_FL_PER_OP": (
        "gelu=reference|flagos", VENDORS_FIRST, (MINE, LEVEL), ("gelu/reference.torch", LEVEL)
    ),
    "TE_FL_PLUGIN_MODULES": (
        "my_plugin_module", {"TE_FL_PREFER": "vendor"}, (OURS, LEVEL), (MINE, LEVEL)
    ),
    "TEFL_LOG_LEVEL": ("DEBUG", {}, (OURS, LEVEL), (OURS, "DEBUG")),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIABLES)
def test_environment_variables(name, tmp_path, monkeypatch):
    """Each changes what it is said to change."""
    for other in (*VARIABLES, "TE_FL_LOG_LEVEL", "TE_FL_PREFER_VENDOR"):
        monkeypatch.delenv(other, raising=False)
    (tmp_path / "my_plugin_module.py").write_text(GELU)
    value, others, without, with_it = VARIABLES[name]
    assert run(WHO_RAN, tmp_path, **others) == list(without)
    assert run(WHO_RAN, tmp_path, **others, **{name: value}) == list(with_it)


@pytest.mark.skipif(not SETUP.exists(), reason="needs the source tree")
@pytest.mark.parametrize("te_cuda", ["", "0", "1"])
@pytest.mark.parametrize("skip", ["", "0", "1", "yes"])
def test_skip_cuda(te_cuda, skip, monkeypatch):
    """TE_FL_SKIP_CUDA is of the build: what setup.py does, without building."""
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
