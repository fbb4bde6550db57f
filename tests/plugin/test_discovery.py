# SPDX-License-Identifier: Apache-2.0
"""Plug-ins that are found, threads, forks and backwards."""

import logging
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

import transformer_engine.pytorch
from transformer_engine.plugin import core as plugin
from transformer_engine.plugin.builtin import OPERATORS
from transformer_engine.plugin.core import discovery
from transformer_engine.plugin.core.logger_manager import LoggerManager

KIND = plugin.BackendImplKind


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.delenv("TE_FL_PLUGIN_MODULES", raising=False)
    plugin.reset_global_policy()
    plugin.reset_default_manager()  # tests before may have let it look for plug-ins
    plugin.clear_discovered_plugin()
    yield
    plugin.reset_global_policy()
    plugin.reset_default_manager()
    plugin.clear_discovered_plugin()


@pytest.fixture
def told(caplog):
    """What the logger said."""
    logger = LoggerManager.get_logger()
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, "TE-FL")
    yield caplog
    logger.removeHandler(caplog.handler)


def write(folder, name, text, monkeypatch):
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


REGISTERS = """
    from transformer_engine.plugin.core import BackendImplKind, OpImpl

    def {entry}(registry):
        registry.register(OpImpl(
            "my_op", "vendor.mine", BackendImplKind.VENDOR, lambda x: x + 1, vendor="mine"
        ))
        {more}
"""


@pytest.mark.parametrize("entry", ["register", "te_fl_register"])
def test_modules_of_the_environment(entry, tmp_path, monkeypatch):
    write(tmp_path, "te_plug_one", REGISTERS.format(entry=entry, more="pass"), monkeypatch)
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "te_plug_one")
    manager = plugin.OpManager()
    assert manager.call("my_op", 1) == 2
    assert plugin.get_discovered_plugin() == [("te_plug_one", "env_module", True)]
    manager.ensure_initialized()
    assert len(plugin.get_discovered_plugin()) == 1


def test_entry_points(monkeypatch):
    def register(registry):
        registry.register(plugin.OpImpl("my_op", "reference.r", KIND.REFERENCE, lambda: "found"))

    class Point:
        name, value = "point", "module:register"

        @staticmethod
        def load():
            return register

    asked = []
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: asked.append(group) or [Point]
    )
    assert plugin.get_default_manager().call("my_op") == "found"
    assert asked == ["te_fl.plugin"] == [plugin.PLUGIN_GROUP]
    assert plugin.get_discovered_plugin() == [("point", "entry_point", True)]
    assert set(plugin.get_registry().list_operators()) - set(OPERATORS) == {"my_op"}


FAILURES = {
    "exits": "import sys; sys.exit(3)",
    "exits when it registers": REGISTERS.format(entry="register", more="raise SystemExit(3)"),
    "raises": REGISTERS.format(entry="register", more="raise OSError('no chip')"),
    "has no entry": "x = 3",
    "can not be imported": "import a_module_that_is_not_there",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_failures_are_told_once_and_leave_nothing(kind, tmp_path, monkeypatch, told):
    write(tmp_path, "te_plug_bad", FAILURES[kind], monkeypatch)
    write(tmp_path, "te_plug_good", REGISTERS.format(entry="register", more="pass"), monkeypatch)
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "te_plug_bad,te_plug_good,./libplug.so")
    manager = plugin.OpManager()
    assert manager.call("my_op", 1) == 2
    assert manager.registry.list_operators() == ["my_op"]
    messages = [record.getMessage() for record in told.records if record.levelname == "ERROR"]
    assert len(messages) == 2
    assert "te_plug_bad" in messages[0] and "libplug.so: cannot open shared object" in messages[1]
    assert [done for *_, done in plugin.get_discovered_plugin()] == [False, True, False]


def test_an_interrupt_while_plug_ins_register(monkeypatch, told):
    """It is raised, and the next use goes on from there; nothing is lost or registered twice."""

    class Point:
        def __init__(self, name):
            self.name, self.value = "plug-in", name

        def load(self):
            def register(registry):
                asked.append(self.value)
                name = f"vendor.{self.value}"
                kind = KIND.VENDOR
                registry.register(plugin.OpImpl(name, name, kind, print, vendor=self.value))
                if self.value == "two" and asked.count("two") < 3:
                    raise KeyboardInterrupt

            return register

    asked, points = [], [Point(name) for name in ("one", "two", "three")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    manager = plugin.OpManager()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            manager.ensure_initialized()
        assert manager.registry.list_operators() == ["vendor.one"]
    assert "vendor.three" in str(manager.explain("vendor.three"))
    assert manager.registry.list_operators() == ["vendor.one", "vendor.two", "vendor.three"]
    assert asked == ["one", "two", "two", "two", "three"] and not told.records


def test_a_plug_in_that_fails_takes_nothing_of_others(monkeypatch, told):
    """What another thread registers meanwhile stays."""

    class Point:
        name, value = "bad", "module:register"

        @staticmethod
        def load():
            return register

    def register(registry):
        registry.register(plugin.OpImpl("op", "vendor.bad", KIND.VENDOR, print, vendor="bad"))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(registry.register, counted("flagos.other", KIND.DEFAULT)).result(30)
        raise OSError("no chip")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point])
    manager = plugin.OpManager()
    assert manager.call("op") == "flagos.other"
    assert [one.impl_id for one in manager.registry.get_implementations("op")] == ["flagos.other"]
    assert "OSError: no chip" in told.records[0].getMessage()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_a_failure_took_away_is_back(error, tmp_path, monkeypatch, told):
    """Implementations that it has unregistered, or put its own in the place of."""
    registry = plugin.OpRegistry()
    impls = [plugin.OpImpl("my_op", f"reference.{n}", KIND.REFERENCE, str) for n in "abc"]
    registry.register_many(impls)

    def register(given):
        given.unregister("my_op", "reference.a")
        given.unregister("my_op", "reference.b")
        given.register(plugin.OpImpl("my_op", "reference.b", KIND.REFERENCE, int))
        given.register(plugin.OpImpl("other", "reference.b", KIND.REFERENCE, int))
        raise error

    point = SimpleNamespace(name="point", value="", load=lambda: register)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            plugin.discover_plugin(registry)
    else:
        assert plugin.discover_plugin(registry) == 0
    assert registry.list_operators() == ["my_op"]
    left = {impl.impl_id: impl for impl in registry.get_implementations("my_op")}
    assert all(left[impl.impl_id] is impl for impl in impls) and len(left) == 3


@pytest.mark.parametrize("name", ["libno_such.so", "libno_such.so.1", "libno_such.so.1.2", "./no"])
def test_names_of_shared_objects(name, monkeypatch, told):
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", name)
    plugin.OpManager().ensure_initialized()
    assert f"{name}: cannot open shared object" in told.text


def test_levels_of_the_logger(monkeypatch):
    names = "NOTSET DEBUG INFO WARN WARNING ERROR FATAL CRITICAL".split()
    for name, level in (("TEFL_LOG_LEVEL", "info"), *(("TE_FL_LOG_LEVEL", one) for one in names)):
        monkeypatch.setenv(name, level)
        LoggerManager.reset()
        assert LoggerManager.get_logger().level == getattr(logging, level.upper())
    assert plugin.Logger is logging.Logger
    LoggerManager.reset()


def test_imports_no_torch_and_asks_for_nothing():
    program = """
        import sys
        import transformer_engine.plugin.core as plugin
        from transformer_engine.plugin import core, explain
        assert "torch" not in sys.modules and "importlib.metadata" not in sys.modules
        assert plugin.OpManager().registry.list_operators() == []
        backend = core.TEFLBackendBase()
        assert backend.is_available() and "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


# ---- threads and processes -----------------------------------------------------------------------


def counted(name, kind=KIND.REFERENCE, op="op"):
    return plugin.OpImpl(op, name, kind, lambda: name)


def test_contexts_belong_to_their_thread():
    registry = plugin.OpRegistry()
    registry.register_many([counted("flagos.f", KIND.DEFAULT), counted("reference.r")])
    manager = plugin.OpManager(registry)
    op = manager.operator("op")
    with plugin.with_preference("reference"), ThreadPoolExecutor(1) as pool:
        assert op() == "reference.r" and pool.submit(op).result() == "flagos.f"


def test_sixteen_threads_while_another_registers():
    registry = plugin.OpRegistry()
    registry.register(counted("reference.000"))
    manager = plugin.OpManager(registry)
    op, stop, errors = manager.operator("op"), threading.Event(), []

    def calls(i):
        last = ""
        context = plugin.with_preference("reference") if i % 2 else plugin.with_strict_mode()
        while not stop.is_set():
            with context:
                found = op()
            if found < last:  # names rise, and a later one wins
                errors.append((last, found))
            last = found

    threads = [threading.Thread(target=calls, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for i in range(1, 200):
        registry.register(counted(f"reference.{i:03}"))
        manager.operator(f"other{i}")
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors and op() == "reference.199"


def test_a_forked_child_goes_on(tmp_path):
    """Also where another thread holds the locks when the process forks."""
    program = """
        import os, threading
        from transformer_engine.plugin import core as plugin
        kind = plugin.BackendImplKind.REFERENCE
        registry = plugin.OpRegistry()
        registry.register(plugin.OpImpl("op", "reference.a", kind, lambda: "a"))
        manager = plugin.OpManager(registry)
        assert manager.call("op") == "a"
        held, leave = threading.Event(), threading.Event()
        def hold():
            with registry._lock, manager._lock:
                held.set()
                leave.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        child = os.fork()
        if child == 0:
            assert manager.call("op") == "a"
            registry.register(plugin.OpImpl("op", "reference.b", kind, lambda: "b"))
            with plugin.with_preference("vendor"):
                assert manager.call("op") == "b"
            os._exit(17)
        leave.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
        assert manager.call("op") == "a"
    """
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60, env=environment
    )


def test_a_fork_while_plug_ins_register(tmp_path):
    """By the thread in which they do the child goes on; by another one it says what is missing."""
    (tmp_path / "forks.py").write_text(
        textwrap.dedent("""
        import os, sys
        import __main__
        from transformer_engine.plugin.core import BackendImplKind, OpImpl

        def add(registry, name, **options):
            fn = lambda: name
            registry.register(OpImpl("op", name, BackendImplKind.DEFAULT, fn, **options))

        def register(registry):
            add(registry, "flagos.a")
            __main__.registers.set()
            assert __main__.leave.wait(30)
            if os.environ["FORKS"] == "plug-in":
                __main__.child = os.fork()
            add(registry, "flagos.b")
        """)
    )
    program = """
        import os, threading
        from transformer_engine.plugin import core as plugin
        registers, leave, child = threading.Event(), threading.Event(), None
        manager = plugin.OpManager()
        op = manager.operator("op")

        def end(child):
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17

        if os.environ["FORKS"] == "plug-in":
            leave.set()
            assert op() == "flagos.b"
            if child == 0:
                os._exit(17)
        else:
            thread = threading.Thread(target=manager.ensure_initialized)
            thread.start()
            assert registers.wait(30)
            child = os.fork()
            if child == 0:
                for ask in (op, manager.selection, lambda: manager.explain("op")):
                    try:
                        ask()
                    except RuntimeError as error:
                        assert "forked while another thread" in str(error)
                    else:
                        os._exit(1)
                leave.set()
                assert plugin.OpManager().call("op") == "flagos.b"
                os._exit(17)
            leave.set()
            thread.join()
            assert op() == "flagos.b"
        end(child)
    """
    for forks in ("plug-in", "main"):
        environment = {**os.environ, "PYTHONWARNINGS": "ignore", "FORKS": forks,
                       "TE_FL_PLUGIN_MODULES": "forks",
                       "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}  # fmt: skip
        command = [sys.executable, "-c", textwrap.dedent(program)]
        subprocess.run(command, check=True, timeout=60, env=environment)


def test_a_backward_has_the_selection_of_its_forward():
    """On autograd's own thread too, whatever has changed since."""
    registry = plugin.OpRegistry()
    for name, kind in (("flagos.f", KIND.DEFAULT), ("reference.r", KIND.REFERENCE)):
        registry.register_many([counted(name, kind, "fwd"), counted(name, kind, "bwd")])
    manager, ran = plugin.OpManager(registry), []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.selection = manager.selection()
            ran.append(manager.operator("fwd")())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with ctx.selection:
                ran.append(manager.operator("bwd")())
            return grad

    x = torch.ones(2, requires_grad=True)
    with plugin.with_preference("reference"):
        out = Function.apply(x)
    registry.register(counted("reference.z", op="bwd"))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(out.sum().backward).result()
    assert ran == ["reference.r", "reference.r"]
    out = Function.apply(x)
    plugin.set_global_policy(plugin.SelectionPolicy("reference"))
    out.sum().backward()
    assert ran[2:] == ["flagos.f", "flagos.f"]
    assert manager.operator("bwd")() == "reference.z"


def test_names_of_functions():
    assert transformer_engine.pytorch.plugin is transformer_engine.plugin
    assert discovery.discover_op_plugin is discovery.discover_plugin


@pytest.mark.parametrize("loads", ["the module", "its function"])
def test_a_plug_in_of_two_names_registers_once(loads, tmp_path, monkeypatch, told):
    """Installed, and named by the variable besides."""
    write(tmp_path, "te_plug_twice", REGISTERS.format(entry="register", more="pass"), monkeypatch)
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", "te_plug_twice")

    class Point:
        name, value = "twice", "te_plug_twice"

        @staticmethod
        def load():
            import te_plug_twice

            return te_plug_twice if loads == "the module" else te_plug_twice.register

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point])
    assert plugin.OpManager().call("my_op", 1) == 2
    found = [("twice", "entry_point", True), ("te_plug_twice", "env_module", True)]
    assert plugin.get_discovered_plugin() == found
    assert not told.records
