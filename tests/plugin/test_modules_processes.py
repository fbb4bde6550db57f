# SPDX-License-Identifier: Apache-2.0
"""Plug-ins under modules in processes of their own, and while others register."""

import textwrap

import processes
import pytest

pytestmark = pytest.mark.usefixtures("manager")

# ---- processes -----------------------------------------------------------------------------------

HEAD = """
import sys, torch
import transformer_engine.pytorch as te
from transformer_engine import _core
norm, x = te.RMSNorm(16), torch.ones(2, 16)
"""


def run(program, folder=None, **variables):
    path = [] if folder is None else [folder]
    processes.run(HEAD + textwrap.dedent(program), path=path, **variables)


def test_nothing_is_loaded_where_nobody_asks():
    run("""
    norm(x)
    assert _core.selected() is None
    assert "transformer_engine.plugin" not in sys.modules
    """)


def test_a_preference_of_the_environment():
    run(
        """
        norm(x)
        from transformer_engine import plugin
        assert plugin.counts() == {"rmsnorm_fwd/reference.torch": 1}
        """,
        TE_FL_PREFER="reference",
    )


def test_threads_that_come_while_plug_ins_are_looked_for():
    """They look, too, and none of them runs as if there were none."""
    run(
        """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        from transformer_engine.pytorch.execution import overrides
        both = threading.Barrier(2)

        def find():
            both.wait(30)
            overrides.find()

        _core.find_selections(find)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(norm, [x, x]))
        from transformer_engine import plugin
        assert plugin.counts() == {"rmsnorm_fwd/reference.torch": 2}
        """,
        TE_FL_PREFER="reference",
    )


def test_a_thread_that_comes_while_another_imports_the_policy():
    """It waits until that module is whole, and asks it then."""
    run("""
    import threading
    from importlib.machinery import PathFinder
    name = "transformer_engine.plugin.core.policy"
    entered, asked = threading.Event(), threading.Event()

    class Slowly:
        @staticmethod
        def find_spec(wanted, path=None, target=None):
            if wanted != name:
                return None
            spec = PathFinder.find_spec(wanted, path)
            execute = spec.loader.exec_module

            def exec_module(module):
                entered.set()
                asked.wait(1)  # the other thread is at the module, or waits for it
                execute(module)
                module.set_global_policy(module.SelectionPolicy(prefer="reference"))

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, Slowly)
    other = threading.Thread(target=__import__, args=(name,))
    other.start()
    assert entered.wait(30)
    norm(x)
    asked.set()
    other.join()
    from transformer_engine import plugin
    assert plugin.counts() == {"rmsnorm_fwd/reference.torch": 1}
    """)


PLUGIN = """
import transformer_engine.pytorch as te  # at its top, as plug-ins do
from transformer_engine.plugin.core import BackendImplKind, OpImpl

def norm(input, weight, *args):
    return input * 0 + 2, None, input.new_ones(input.shape[0])

def register(registry):
    registry.register(
        OpImpl("rmsnorm_fwd", "vendor.mine", BackendImplKind.VENDOR, norm, vendor="mine"))
"""


def test_a_module_of_the_environment(tmp_path):
    """The first run of a module finds it, and again after a reset."""
    (tmp_path / "te_test_plugin.py").write_text(PLUGIN)
    run(
        """
        assert norm(x).eq(2).all()
        from transformer_engine.plugin import core
        core.reset_default_manager()
        assert norm(x).eq(2).all()
        """,
        tmp_path,
        TE_FL_PLUGIN_MODULES="te_test_plugin",
        TE_FL_PREFER="vendor",
    )


def test_changes_while_modules_run():
    run("""
    import itertools, threading, time
    from transformer_engine.plugin import core as plugin
    numbers, errors, end = itertools.count(), [], time.monotonic() + 2
    exact = norm(x).detach()

    def one_more(inp, weight, *args):
        return torch.full_like(inp, 2.0), None, inp.new_ones(inp.shape[0])

    def registers():
        name = f"vendor.{next(numbers)}"
        plugin.get_registry().register(plugin.OpImpl(
            "rmsnorm_fwd", name, plugin.BackendImplKind.VENDOR, one_more, vendor=name))
        plugin.get_registry().unregister("rmsnorm_fwd", name)

    def runs():
        y = norm(x)
        assert torch.equal(y, exact)
        with plugin.with_preference("vendor"):
            y = norm(x)
        assert torch.equal(y, exact) or y.eq(2).all()

    def loop(function):
        try:
            while time.monotonic() < end:
                function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(f,)) for f in [registers] * 2 + [runs] * 14]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not errors, errors
    """)


@pytest.mark.gpu
def test_cuda_without_kernels_of_this_library():
    """Operators go to those of plain torch, modules raise."""
    run(
        """
        import transformer_engine_torch as tex
        from transformer_engine import plugin

        x = x.cuda()
        assert torch.equal(tex.relu(-x, None), torch.zeros_like(x))
        assert plugin.counts() == {"relu/reference.torch": 1}
        try:
            te.RMSNorm(16, device="cuda")(x)
        except NotImplementedError as error:
            assert "TE_FL_SKIP_CUDA=1" in str(error), error
        else:
            raise AssertionError("it ran")
        """,
        TE_FL_SKIP_CUDA="1",
    )
