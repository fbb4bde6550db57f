# SPDX-License-Identifier: Apache-2.0
"""Plug-ins that are shared objects: loading, slots by themselves, and modules that run them."""

import ctypes
import gc
import logging
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import processes
import pytest
import torch
from c_plugins import build, needs_compiler, usual
from native import fresh_core

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.plugin import core as plugin
from transformer_engine.plugin.core import discovery
from transformer_engine.plugin.core.logger_manager import LoggerManager

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    """Nothing of other tests; what modules obey is that of this test's manager."""
    for name in list(os.environ):
        if name.startswith("TE_FL_"):
            monkeypatch.delenv(name)
    _start()
    yield
    _start()


def _start():
    plugin.reset_global_policy()
    plugin.reset_default_manager()
    plugin.clear_discovered_plugin()
    _core.obey(None)


@pytest.fixture
def told(caplog):
    logger = LoggerManager.get_logger()
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, "TE-FL")
    yield lambda: [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    logger.removeHandler(caplog.handler)


def filled(slot, value=1.0, dtype=torch.float32):
    """What a slot of fill makes of a matrix."""
    output = torch.full((3, 5), -7.0, dtype=dtype)
    slot(output, value)
    return output


# ---- loading -------------------------------------------------------------------------------------


def test_a_slot_says_what_it_is_and_runs():
    (slot,) = _core.load_plugin(usual())
    assert (slot.op, slot.backend, slot.vendor, slot.kind) == ("fill", "mine", "acme", "vendor")
    assert (slot.device, slot.priority) == (_core.DEVICE_CPU, 0)
    before = slot.calls
    assert (filled(slot) == 1.5).all() and slot.calls == before + 1
    output = torch.zeros(2, 3)
    slot(value=2.0, output=output)
    assert (output == 2.5).all()
    assert repr(slot) == "<fill of backend mine>"
    with pytest.raises(TypeError):
        type(slot)()
    with pytest.raises(TypeError, match="fill: value: missing required argument"):
        slot(output)


def test_loading_twice_gives_the_same_slots(tmp_path):
    path = build(tmp_path)
    slots = _core.load_plugin(path)
    link = tmp_path / "link.so"
    link.symlink_to(path)
    for again in (path, str(path), os.fsencode(path), link):
        assert _core.load_plugin(again) is slots
    registry = plugin.OpRegistry()
    plugin.register_library(registry, path)
    version = registry.version
    plugin.register_library(registry, link)  # all of it is there
    assert len(registry.get_implementations("te_fill")) == 2 and registry.version == version + 1


def test_instances_of_the_module_share_a_plugin(tmp_path):
    path = build(tmp_path)
    library = ctypes.CDLL(str(path))
    one, two = fresh_core(), fresh_core()
    (first,), (second,) = one.load_plugin(path), two.load_plugin(path)
    assert first is not second and (filled(first) == filled(second)).all()
    assert first.calls == second.calls == 2
    del one, first
    gc.collect()
    assert library.plugin_released() == 0 and (filled(second) == 1.5).all()
    del two, second
    gc.collect()
    assert library.plugin_released() == 1
    core = fresh_core()  # it registers anew
    assert (filled(core.load_plugin(path)[0]) == 1.5).all()


REFUSED = {
    "other version": (dict(ABI=2 << 16), NotImplementedError, "built for version 2"),
    "says so itself": (dict(BUILT_FOR=9), NotImplementedError, "the library .* has 9"),
    "too small": (dict(BACKEND_SIZE=8), ValueError, "size = 8, expected"),
    "what is appended": (
        dict(BACKEND_SIZE="sizeof(te_plugin_backend) + 16", APPENDED="0, 5"),
        NotImplementedError, "it sets what this library",
    ),
    "no symbol": (dict(INIT="other_init"), ValueError, "it has no function te_plugin_init"),
    "fails": (dict(RESULT="TE_ERROR_STATE"), RuntimeError, "it gave no reason"),
    "strange result": (dict(RESULT="(te_status)3"), RuntimeError, "returned 3"),
    "fails and says why": (
        dict(RESULT='TE_HOST_FAIL(api, TE_ERROR_DEVICE, "no chip %d", 7)'),
        RuntimeError, "te_plugin_init returned -6: .*no chip 7",
    ),
    "no vendor": (dict(VENDOR=""), ValueError, "backend mine: it has no vendor"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_leaves_nothing(kind, tmp_path, monkeypatch, told):
    defines, error, text = REFUSED[kind]
    path = build(tmp_path, **defines)
    with pytest.raises(error, match=text):
        _core.load_plugin(path)
    released = ctypes.CDLL(str(path)).plugin_released()
    assert released == ("RESULT" in defines)  # it had registered
    good = build(tmp_path, "good")
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", f"{path},{good}")
    manager = plugin.OpManager()
    manager.ensure_initialized()
    (message,) = told()
    assert str(path) in message and "did not register" in message
    assert [done for *_, done in plugin.get_discovered_plugin()] == [False, True]
    assert manager.registry.list_operators() == ["te_fill"]


def test_structs_of_later_versions_are_read_as_far_as_they_are_known(tmp_path):
    path = build(tmp_path, BACKEND_SIZE="sizeof(te_plugin_backend) + 16")
    assert (filled(_core.load_plugin(path)[0]) == 1.5).all()


def test_files_that_are_no_libraries(tmp_path):
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(ValueError, match="text.so"):
        _core.load_plugin(tmp_path / "text.so")
    for nothing, error in ((None, TypeError), (3, TypeError), ("a\0b", ValueError)):
        with pytest.raises(error):
            _core.load_plugin(nothing)


def test_registration_ends_with_the_init(tmp_path):
    path = build(tmp_path)
    slots = _core.load_plugin(path)
    late = ctypes.PyDLL(str(path)).plugin_register_late
    assert late() == -5 and _core.load_plugin(path) is slots


# ---- slots ---------------------------------------------------------------------------------------


def test_errors_say_whose_they_are(tmp_path):
    (slot,) = _core.load_plugin(build(tmp_path))
    shape = r"\(output f32 \[3, 5\]\)"
    with pytest.raises(
        RuntimeError, match=rf"fill: backend mine: .*the chip is gone, value = 150 {shape}"
    ):
        filled(slot, 150.0)
    with pytest.raises(RuntimeError, match=f"fill: backend mine: it gave no reason {shape}"):
        filled(slot, 250.0)
    with pytest.raises(RuntimeError, match="it returned 77, which is no te_status"):
        filled(slot, 350.0)
    with pytest.raises(NotImplementedError, match="backend mine: .*value = -1 is negative"):
        filled(slot, -1.0)
    with pytest.raises(NotImplementedError, match="it gave no reason"):
        filled(slot, 450.0)
    with pytest.raises(ValueError, match="fill: output: its strides"):  # nobody is asked
        slot(torch.zeros(2, 2, 2).as_strided((2, 2, 2), (1, 2, 4)), 1.0)
    assert slot.calls == 0


def test_texts_of_any_encoding(tmp_path):
    """Cut off within a character, or no UTF-8: the error is still the plug-in's."""
    for i in range(4):  # of four bytes each
        text = "x" * i + "\\U0001F525" * 300
        (slot,) = _core.load_plugin(build(tmp_path, f"long{i}", REASON=text))
        with pytest.raises(RuntimeError, match="backend mine: .*\U0001f525.* \\(output f32"):
            filled(slot, 501.0)
    (slot,) = _core.load_plugin(build(tmp_path, "latin", REASON="abc\\351"))
    with pytest.raises(RuntimeError, match=r"abc\\xe9 \(output f32 \[3, 5\]\)"):
        filled(slot, 501.0)


def test_a_callback_that_raised_nothing_is_told(tmp_path):
    (slot,) = _core.load_plugin(build(tmp_path))
    with pytest.raises(RuntimeError, match=r"mine: it gave no reason \(output f32 \[3, 5\]\)"):
        filled(slot, 601.0)


def test_workspaces(tmp_path):
    path = build(tmp_path, NAME="scratchy", WORKSPACE="1000.0")
    (slot,) = _core.load_plugin(path)
    for value in (0.0, 0.001, 1.0, 97.0):
        assert (filled(slot, value) == torch.tensor(value + 0.5, dtype=torch.float32)).all()
    huge = build(tmp_path, "huge", NAME="huge", WORKSPACE="1e18")
    (slot,) = _core.load_plugin(huge)
    with pytest.raises(MemoryError, match="fill: backend huge: it asks for 9000000000000000000 "):
        filled(slot, 9.0)
    plugin.register_library(plugin.get_registry(), path)
    fill, output = plugin.get_default_manager().operator("te_fill"), torch.zeros(2, 2)
    with plugin.with_preference("vendor"):
        fill(output, 3.0)
    assert (output == 3.5).all()


def test_supports_of_a_slot():
    (slot,) = _core.load_plugin(usual())
    output, before = torch.zeros(2, 2), slot.calls
    assert slot.supports(output, 1.0) is True and slot.supports(output, value=-1.0) is False
    assert slot.supports(output.half(), 1.0) is False
    with pytest.raises(TypeError, match="fill"):
        slot.supports(output, "x")
    assert slot.calls == before and (output == 0).all()


@pytest.mark.gpu
def test_a_slot_of_another_device():
    (slot,) = _core.load_plugin(usual())
    output = torch.zeros(2, 2, device="cuda")
    assert slot.supports(output, 1.0) is False
    with pytest.raises(NotImplementedError, match="this slot is of cpu, and the tensors are on cu"):
        slot(output, 1.0)


def test_registered_operators(tmp_path, monkeypatch):
    """Two plug-ins, of which the manager's operator asks in the order of the policy."""
    first = build(tmp_path, "first", NAME="one", ADDED="1.0F", PRIORITY=5)
    second = build(tmp_path, "second", NAME="two", VENDOR="other", ADDED="2.0F")
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", f"{first},{second}")
    manager = plugin.OpManager()
    fill, output = manager.operator("te_fill"), torch.zeros(2, 2)

    def value(given=3.0):
        fill(output, given)
        return output[0, 0].item()

    assert value() == 3.0  # this library's own
    with plugin.with_preference("vendor"):
        assert value() == 4.0 and value(-3.0) == -3.0
        with plugin.with_denied_vendors("ACME"):
            assert value() == 5.0
    order = (("te_fill", ("impl:vendor.two",)),)
    with plugin.policy_context(plugin.SelectionPolicy(per_op_order=order)):
        assert value() == 5.0
        with pytest.raises(NotImplementedError, match=r"none that vendor\.two takes"):
            value(-1.0)
    counts = {"te_fill/vendor.one": 1, "te_fill/vendor.two": 2, "te_fill/default.native": 2}
    assert manager.counts() == counts
    names = [found.impl.impl_id for found in manager.explain("te_fill").candidates]
    assert names == ["default.native", "vendor.one", "vendor.two"]


def test_names_that_are_taken(tmp_path, monkeypatch, told):
    paths = [build(tmp_path, name) for name in ("one", "two")]
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", ",".join(map(str, paths)))
    manager = plugin.OpManager()
    manager.ensure_initialized()
    assert "two.so" in told()[0] and "vendor.mine" in told()[0]
    assert len(manager.registry.get_implementations("te_fill")) == 2


@pytest.mark.parametrize("as_type", [str, Path])
def test_entry_points_that_are_paths(as_type, monkeypatch):
    class Point:
        name, value = "point", "a path"

        @staticmethod
        def load():
            return as_type(usual())

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [Point])
    manager = plugin.OpManager()
    manager.ensure_initialized()
    assert plugin.get_discovered_plugin() == [("point", "entry_point", True)]
    assert manager.registry.get_implementation("te_fill", "vendor.mine").vendor == "acme"
    assert discovery.register_library is plugin.register_library


# ---- threads and processes -----------------------------------------------------------------------


def test_sixteen_threads(tmp_path):
    """All of them load it at once, and call it."""
    path, calls = build(tmp_path), 50
    barrier = threading.Barrier(16)

    def work(i):
        barrier.wait()
        (slot,) = _core.load_plugin(path)
        for n in range(calls):
            assert (filled(slot, float(i)) == i + 0.5).all()
            with pytest.raises(RuntimeError, match=f"value = {101 + n} "):
                filled(slot, 101.0 + n)
        return slot

    with ThreadPoolExecutor(16) as pool:
        slots = list(pool.map(work, range(16)))
    assert len(set(map(id, slots))) == 1 and slots[0].calls == 16 * calls


def run(program, **variables):
    quiet = "import warnings\nwarnings.simplefilter('ignore')\n"  # of forks where there are threads
    processes.run(quiet + textwrap.dedent(program), **variables)


def test_a_forked_child_goes_on(tmp_path):
    other = build(tmp_path, "other", NAME="other")
    run(f"""
    import os, torch
    import transformer_engine.pytorch
    from transformer_engine import _core
    (slot,) = _core.load_plugin({str(usual())!r})
    output = torch.zeros(2, 2)
    slot(output, 1.0)
    child = os.fork()
    if child == 0:
        assert _core.load_plugin({str(usual())!r})[0] is slot
        context = _core.Context(_core.DEVICE_CPU)
        slot(output, 2.0, context=context)
        (new,) = _core.load_plugin({str(other)!r})
        new(output, 3.0, context=context)
        os._exit(17 if (output == 3.5).all() and slot.calls == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    assert slot.calls == 1
    """)


def test_a_program_ends_with_slots_in_force():
    run(
        """
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine.plugin import get_registry
    te.RMSNorm(8)(torch.ones(2, 8))
    assert get_registry().get_implementation("te_fill", "vendor.mine") is not None
    """,
        TE_FL_PLUGIN_MODULES=str(usual()),
    )


# ---- modules -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The RMSNorm of examples/plugin_c."""
    folder = Path(__file__).parents[2] / "examples/plugin_c"
    out = tmp_path_factory.mktemp("example") / "rmsnorm.so"
    command = ["make", "-s", "-B", f"PYTHON={sys.executable}", f"OUT={out}"]
    path = os.pathsep.join(filter(None, [str(folder.parents[1]), os.environ.get("PYTHONPATH")]))
    subprocess.run(command, cwd=folder, check=True, env={**os.environ, "PYTHONPATH": path})
    return out


def step(module, x):
    """Output and gradients."""
    x = x.detach().requires_grad_()
    out = module(x)
    grads = torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])
    return out.detach(), *grads


FORWARD = "te_norm/vendor.example_c"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_modules_run_a_slot(example, monkeypatch, dtype):
    monkeypatch.setenv("TE_FL_PLUGIN_MODULES", str(example))
    module = te.RMSNorm(64, dtype=dtype, device="cpu")
    x = torch.randn(8, 64, dtype=dtype)
    own = step(module, x)
    with plugin.with_preference("vendor"):
        made = step(module, x)
    takes = dtype is not torch.float16
    assert plugins.counts().get(FORWARD, 0) == takes
    for a, b in zip(own, made, strict=True):
        torch.testing.assert_close(a, b)
    if not takes:
        assert torch.equal(own[0], made[0])
    order = "te_norm=vendor:example|flagos"
    monkeypatch.setenv("TE_FL_PER_OP", order)
    plugin.reset_global_policy()
    step(module, x)
    assert plugins.counts().get(FORWARD, 0) == 2 * takes
    with plugin.with_denied_vendors("example"):
        assert torch.equal(step(module, x)[0], own[0])
    assert plugins.counts().get(FORWARD, 0) == 2 * takes


def test_what_a_slot_does_not_take_is_this_librarys(example):
    plugin.register_library(plugin.get_registry(), example)
    x = torch.randn(8, 64)
    norm, linear = te.LayerNorm(64), te.LayerNormLinear(64, 32, normalization="RMSNorm")
    with plugin.with_preference("vendor"):
        norm(x)
        with te.autocast(enabled=True):
            linear(x)  # it casts to FP8
        assert FORWARD not in plugins.counts()
        linear(x)
        assert plugins.counts()[FORWARD] == 1
        with plugin.with_strict_mode(), pytest.raises(NotImplementedError, match="te_norm"):
            norm(x)
        assert "default.native" in str(plugins.explain("te_norm"))


def test_a_slot_that_fails_is_told_and_nobody_runs_after_it(tmp_path):
    broken = build(tmp_path, "broken", NAME="broken", OP="norm", ALWAYS_FAILS=1, PRIORITY=9)
    other = build(tmp_path, "other", NAME="other", OP="norm", ALWAYS_FAILS=1)
    for path in (broken, other):
        plugin.register_library(plugin.get_registry(), path)
    module, x = te.RMSNorm(64), torch.randn(8, 64)
    _core.reset_counters()
    with plugin.with_preference("vendor"), pytest.raises(RuntimeError) as caught:
        module(x)
    text = str(caught.value)
    assert "norm: backend broken: " in text and "the chip is gone" in text
    assert "input f32 [8, 64]" in text and "other" not in text
    assert "op.cpu.norm" not in _core.counters()
    module(x)  # by this library
    assert _core.counters()["op.cpu.norm"] == 1


def test_a_repetition_knows_the_slot_of_its_forward(example):
    plugin.register_library(plugin.get_registry(), example)
    module = te.LayerNormLinear(64, 32, normalization="RMSNorm", bias=False)
    x = torch.randn(8, 64, requires_grad=True)
    with plugin.with_preference("vendor"):
        out = te.checkpoint(module, x)
    assert plugins.counts()[FORWARD] == 1
    out.sum().backward()  # repeats the forward
    assert plugins.counts()[FORWARD] == 2


def test_graphs_run_the_slot_that_they_were_traced_with(example):
    plugin.register_library(plugin.get_registry(), example)
    module, x = te.RMSNorm(64), torch.randn(8, 64)
    compiled = torch.compile(module, backend="eager")
    with plugin.with_preference("vendor"):
        compiled(x)
        assert plugins.counts()[FORWARD] == 1
    compiled(x)  # another graph
    assert plugins.counts()[FORWARD] == 1
    with plugin.with_preference("vendor"):
        compiled(x)
    assert plugins.counts()[FORWARD] == 2


def test_selections_take_slots_of_their_operator_only():
    (slot,) = _core.load_plugin(usual())
    _core.Selection((("fill", slot, None),))
    for wrong in (("cast", slot, None), ("fill", slot, ("output",))):
        with pytest.raises(ValueError, match="Selection: slots"):
            _core.Selection((wrong,))
