# SPDX-License-Identifier: Apache-2.0
"""``NVTE_PLUGIN``: a module that puts its own ``transformer_engine_torch`` in place."""

import os
import subprocess
import sys
import textwrap

import pytest

PLUGIN = """
    import sys, types

    def load_plugins():
        import transformer_engine_torch_nv as nv
        made = types.ModuleType("transformer_engine_torch")
        made.__getattr__ = lambda name: getattr(nv, name)
        made.calls = []

        def passing_on(name):
            def run(*args, **kwargs):
                made.calls.append(name)
                return getattr(nv, name)(*args, **kwargs)
            setattr(made, name, run)

        for name in ("rmsnorm_fwd", "quantize", "generic_gemm", "flash_attention"):
            passing_on(name)
        made.get_attention_backend = lambda *args: "mine"
        made.multi_tensor_adam = 3  # no operator
        sys.modules["transformer_engine_torch"] = made
        {more}
"""

PROGRAM = """
    {first}
    import torch
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex, transformer_engine_torch_nv as nv
    from transformer_engine import plugin
    from transformer_engine.plugin import core
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    def called():
        made, tex.calls[:] = set(tex.calls), []
        return made

    assert (tex.__name__ + "_nv", "transformer_engine_torch") == (nv.__name__, tex.__name__)
    assert tex.DType is te.DType and nv.DType is te.DType
    x, norm = torch.randn(32, 32), te.RMSNorm(32)
    wanted = torch.nn.functional.rms_norm(x, (32,), eps=norm.eps)
    torch.testing.assert_close(norm(x), wanted)
    assert called() == {"rmsnorm_fwd"}
    assert plugin.explain("rmsnorm_fwd").selected.impl_id == "default.nvte_test"

    # What it does not have is ours, under either name; ours under the other name asks nobody.
    y, _, rsigma = tex.rmsnorm_fwd(x, norm.weight, 1e-5, None, None, torch.float32, 0, False)
    assert called() == {"rmsnorm_fwd"}
    tex.rmsnorm_bwd(torch.ones_like(y), x, rsigma, norm.weight)
    nv.rmsnorm_fwd(x, norm.weight, 1e-5, None, None, torch.float32, 0, False)
    nv.flash_attention(1.0)
    assert called() == set()

    with te.autocast(enabled=True):
        y = te.LayerNormLinear(32, 32, normalization="RMSNorm")(x)
    assert called() == {"rmsnorm_fwd", "generic_gemm", "quantize"}
    y.sum().backward()
    assert "generic_gemm" in called()

    torch.testing.assert_close(
        te.DotProductAttention(2, 16)(*(q := [torch.randn(4, 2, 2, 16) for _ in range(3)])),
        torch.nn.functional.scaled_dot_product_attention(
            *(t.permute(1, 2, 0, 3) for t in q), is_causal=True
        ).permute(2, 0, 1, 3).reshape(4, 2, 32),
    )
    assert called() == {"flash_attention"}
    assert utils.get_attention_backend() == "mine"
    assert isinstance(utils._original_get_attention_backend(), tuple)

    # Policies go before it, and a new manager has it again.
    with core.with_preference("reference"):
        norm(x)
    assert called() == set()
    core.reset_default_manager()
    norm(x)
    assert called() == {"rmsnorm_fwd"}
    assert ("nvte_test", "NVTE_PLUGIN", True) in core.get_discovered_plugin()
    assert te.plugin.counts() == {"rmsnorm_fwd/default.nvte_test": 1}
"""


def run(folder, program, more="pass", plugin=PLUGIN):
    (folder / "nvte_test.py").write_text(textwrap.dedent(plugin).replace("{more}", more))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TE_FL_", "NVTE_"))}
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**kept, "NVTE_PLUGIN": "nvte_test", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("first", ["import transformer_engine_torch", ""])
def test_a_module_in_place_of_ours(first, tmp_path):
    done = run(tmp_path, PROGRAM.replace("{first}", first))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Warning" not in done.stderr


FAILED = """
    import sys, warnings
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        import transformer_engine.pytorch as te
    (warning,) = [w for w in told if issubclass(w.category, RuntimeWarning)]
    print(warning.message)
    import torch, transformer_engine_torch as tex
    from transformer_engine.plugin import counts
    assert "transformer_engine_torch_nv" not in sys.modules and not hasattr(tex, "calls")
    te.RMSNorm(32)(torch.randn(2, 32))
    tex.gelu(torch.ones(3), None)
    assert counts() == {"gelu/default.native": 1}
"""


@pytest.mark.parametrize(
    ("more", "plugin", "text"),
    [
        ("raise KeyError('too late')", PLUGIN, "KeyError: 'too late'"),
        ("", "x = 3", "AttributeError: module 'nvte_test' has no attribute 'load_plugins'"),
        ("", "import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("del sys.modules['transformer_engine_torch']", PLUGIN, "KeyError"),
    ],
)
def test_ours_stays_where_it_fails(more, plugin, text, tmp_path):
    done = run(tmp_path, FAILED, more, plugin)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"NVTE_PLUGIN=nvte_test is not used, it failed to load: {text}" in done.stdout


def test_a_module_that_replaces_nothing(tmp_path):
    """It may register by itself."""
    plugin = """
        def load_plugins():
            from transformer_engine.plugin.core import BackendImplKind, OpImpl, get_registry
            import transformer_engine_torch_nv as nv
            vendor = BackendImplKind.VENDOR
            get_registry().register(OpImpl("gelu", "vendor.x", vendor, nv.relu, "x"))
    """
    program = """
        import torch, transformer_engine_torch as tex
        from transformer_engine.plugin.core import with_preference
        x = torch.randn(9)
        with with_preference("vendor"):
            assert torch.equal(tex.gelu(x, None), x.relu())
        assert hasattr(tex, "bind_operators")
    """
    done = run(tmp_path, program, plugin=plugin)
    assert done.returncode == 0, done.stderr[-3000:]
