# SPDX-License-Identifier: Apache-2.0
"""What the plug-in system tells: reasons, log lines, signatures, unknown names in variables."""

import ast
import inspect
import logging
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from plugged import KIND, Recorded, data, made, register

import transformer_engine.plugin as plugins
import transformer_engine_torch as tex
from transformer_engine import _core
from transformer_engine.plugin import builtin, core as plugin
from transformer_engine.plugin.core import builtin_ops, logger_manager

REASON = "it takes no Tuesdays"


@pytest.fixture
def told(caplog):
    """What the logger says from INFO on."""
    logger = logger_manager.get_logger()
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, "TE-FL")
    logger_manager._used.clear()
    yield caplog
    logger.removeHandler(caplog.handler)


def two(supports, **options):
    """A manager whose operator is asked of "vendor.one", then of "reference.two"."""
    registry = plugin.OpRegistry()
    registry.register_many(
        (
            plugin.OpImpl("op", "vendor.one", KIND.VENDOR, lambda x: "one", "v", 0,
                          supports=supports, **options),
            plugin.OpImpl("op", "reference.two", KIND.REFERENCE, lambda x: "two"),
        )
    )  # fmt: skip
    return plugin.OpManager(registry)


# ---- reasons -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limited", [{}, {"supported_dtypes": {"float32", "float64"}}])
def test_a_text_is_a_reason_against_a_call(limited):
    x = torch.ones(2)
    manager = two(lambda x: bool(x.sum() < 5) or REASON, **limited)
    op = manager.operator("op")
    assert (op(x), op(10 * x)) == ("one", "two")
    found = {one.impl.impl_id: one.said for one in manager.explain("op").candidates}
    assert found == {"vendor.one": REASON, "reference.two": ""}
    assert f"not the last other one: {REASON}" in str(manager.explain("op"))
    with plugin.with_strict_mode():
        assert op(x) == "one"
        with pytest.raises(NotImplementedError, match=rf"none that vendor.one \({REASON}\) takes"):
            op(10 * x)


def test_reasons_are_those_of_the_last_call_refused():
    answers = [REASON, False, REASON, True, 0, "", None]
    manager = two(lambda x: answers[x])
    op = manager.operator("op")
    for place, answer in enumerate(answers):
        assert op(place) == ("one" if answer is True else "two")
        said = manager.explain("op").candidates[0].said
        assert said == (answer if isinstance(answer, str) else REASON if answer is True else "")


def test_dtypes_refuse_without_a_reason():
    manager = two(lambda x: REASON, supported_dtypes={"float32"})
    for dtype, said in ((torch.float32, REASON), (torch.float64, ""), (torch.float32, REASON)):
        manager.operator("op")(torch.ones(1, dtype=dtype))
        assert manager.explain("op").candidates[0].said == said


def test_a_predicate_gives_its_reason():
    ask = _core.Predicate(lambda dtype, device: dtype != torch.float16, lambda x: REASON)
    assert ask(torch.ones(1)) == REASON and ask(torch.ones(1).half()) is False
    assert _core.Predicate(lambda dtype, device: True)(torch.ones(1)) is True


def test_modules_show_it(manager, device):
    register("rmsnorm_fwd", Recorded().forward, supports=lambda *args: REASON)
    module, x = made("RMSNorm", device), data(device)
    with plugin.with_preference("vendor"):
        module(x)
        assert REASON in str(plugins.explain("rmsnorm_fwd"))
        with plugin.with_strict_mode(), pytest.raises(NotImplementedError, match=REASON):
            module(x)


@pytest.mark.parametrize("answer", [REASON, False])
def test_the_check_shows_it(answer):
    impl = plugin.OpImpl("silu", "vendor.x", KIND.VENDOR, len, "x", supports=lambda *args: answer)
    rows = plugins.check(impl, device="cpu").rows
    assert {(row.outcome, row.why) for row in rows} == {("refused", answer or "supports")}


# ---- log lines -----------------------------------------------------------------------------------


def test_a_line_at_the_first_use_and_at_changes(told):
    manager = two(lambda x: x > 0)
    op = manager.operator("op")
    for x in (1, 1, -1, 1, -1):  # who runs goes by the call: a line for each, not for each call
        op(x)
    lines = ["op: vendor.one", "op: reference.two in place of vendor.one"]
    assert told.messages == lines
    manager.registry.register(
        plugin.OpImpl("op", "default.new", KIND.DEFAULT, lambda x: "new", priority=5)
    )
    for _ in range(3):
        op(1)
    lines.append("op: default.new in place of reference.two")
    assert told.messages == lines
    manager.registry.unregister("op", "default.new")
    op(1)
    assert told.messages == [*lines, "op: vendor.one in place of default.new"]
    manager.registry.register(plugin.OpImpl("other", "default.o", KIND.DEFAULT, lambda: None))
    op(1)  # the operator's implementation is the same
    assert len(told.messages) == 4


def test_lines_of_modules(manager, device, told):
    Recorded().register()
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    for _ in range(2):
        with plugin.with_preference("vendor"):
            module(x).sum().backward()
    assert sorted(told.messages) == ["rmsnorm_bwd: vendor.test", "rmsnorm_fwd: vendor.test"]


def test_levels_say_whether_there_are_lines(told):
    told.set_level(logging.WARNING, "TE-FL")
    two(None).operator("op")(1)
    assert told.messages == []


# ---- names of the fork ---------------------------------------------------------------------------


def test_once(told, capsys):
    logger = logger_manager.get_logger()
    text = f"once {random.random()}"
    for _ in range(2):
        logger_manager.info_once(text)
        logger.info_once(text)
        logger.warning_once("%s %d", text, 3)
        logger_manager.print_once(text)
    assert told.messages == [text, f"{text} 3"]
    assert capsys.readouterr().out == f"{text}\n"
    assert logger_manager.get_logger() is plugin.LoggerManager.get_logger()


def test_other_names():
    registry = plugin.OpRegistry()
    assert builtin_ops.register_builtins(registry) > 100
    policy = plugin.SelectionPolicy(prefer="vendor")
    for make in (plugin.create_policy_context, plugin.PolicyManager.create_policy_context):
        with make(policy):
            assert plugin.get_policy() is policy


# ---- what operators are --------------------------------------------------------------------------


def test_signatures_and_docs_of_all_operators():
    for name in builtin.OPERATORS:
        operator = plugin.get_manager().operator(name)
        parameters = inspect.signature(operator).parameters.values()
        assert all(p.annotation is not p.empty for p in parameters), name
        assert not any(p.kind is p.VAR_POSITIONAL for p in parameters), name
        assert len(inspect.getdoc(operator)) > 10 and operator.__name__ == name
    assert list(inspect.signature(tex.gelu).parameters) == ["input", "quantizer", "out"]


def test_signatures_of_other_operators():
    manager = plugin.OpManager()
    assert not hasattr(manager.operator("op"), "__wrapped__")
    manager.registry.register(plugin.OpImpl("op", "reference.o", KIND.REFERENCE, lambda a, b=3: a))
    assert str(inspect.signature(manager.operator("op"))) == "(a, b=3)"
    assert manager.operator("op").__doc__ is None
    assert _core.Dispatcher(print, print).operator(0, "op").__name__ == "op"


def test_all_operators_are_listed_before_anything_ran():
    program = """
from transformer_engine.plugin.core import get_registry
from transformer_engine.plugin import builtin
registry = get_registry()
assert set(registry.list_operators()) == set(builtin.OPERATORS)
assert registry.get_implementation("gelu", "reference.torch")
assert len(registry.get_implementations("gelu")) == 2
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_threads_list_all(manager):
    plugin.reset_default_manager()
    registry, found = plugin.get_registry(), []
    threads = [
        threading.Thread(target=lambda: found.append(len(registry.list_operators())))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [len(builtin.OPERATORS)] * 8


# ---- variables -----------------------------------------------------------------------------------


def test_unknown_names_in_variables(environment, monkeypatch, told):
    monkeypatch.setenv("TE_FL_DENY_VENDORS", "acme,NVIDIA")
    monkeypatch.setenv("TE_FL_ALLOW_VENDORS", "acme")
    monkeypatch.setenv(
        "TE_FL_PER_OP",
        "rmsnorm_fdw=flagos;te_fill=vendor;te_fil=flagos;*=impl:default.native|vendor:acme|flagos",
    )
    plugin.reset_default_manager()
    plugin.get_manager().ensure_initialized()
    known = [f"{name}: nobody has registered" for name in ("TE_FL_PER_OP", "TE_FL_DENY_VENDORS")]
    assert sorted(told.messages) == sorted(
        [
            "TE_FL_ALLOW_VENDORS: nobody has registered vendor acme",
            f"{known[1]} vendor NVIDIA",
            f"{known[1]} vendor acme",
            f"{known[0]} operator rmsnorm_fdw; did you mean rmsnorm_fwd or rmsnorm_bwd or "
            "rmsnorm_bwd_add?",
            f"{known[0]} operator te_fil; did you mean te_fill?",
            f"{known[0]} vendor acme",
        ]
    )
    plugin.get_manager().ensure_initialized()
    assert len(told.messages) == 6
    plugin.reset_default_manager()


def test_the_stub_and_the_page_are_up_to_date():
    script = Path(__file__).parents[2] / "tools/tex_stubs.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_stub_has_the_signatures():
    """As the parser of Python reads it."""
    source = Path(tex.__file__).with_suffix(".pyi").read_text()
    stubs = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            stubs[node.name] = node.args
        elif isinstance(node, ast.Assign):  # others of the same signature
            stubs |= {other.id: stubs[node.value.id] for other in node.targets}
    assert stubs.keys() == {*builtin.OPERATORS, "flash_attention"}
    for name in builtin.OPERATORS:
        parameters = inspect.signature(plugin.get_manager().operator(name)).parameters
        args = (*stubs[name].args, *stubs[name].kwonlyargs)
        assert [one.arg for one in args] == list(parameters), name


def test_arguments_are_bound_by_the_signatures():
    """Implementations that take theirs from the stub refuse what functions of these would."""
    x = torch.ones(2, 4)
    for given, named, text in (
        ((x,), {}, "missing a required argument: 'quantizer'"),
        ((x, None, (x,)), {}, "too many positional arguments"),
        ((x, None), {"quantiser": None}, "got an unexpected keyword argument 'quantiser'"),
        ((x, None), {"input": x}, "multiple values for argument 'input'"),
    ):
        with pytest.raises(TypeError, match=text):
            tex.silu(*given, **named)
    out = torch.empty_like(x)
    assert tex.silu(quantizer=None, input=x, out=(out,)).data_ptr() == out.data_ptr()
    with plugin.with_preference("reference"), pytest.raises(TypeError, match="'out'"):
        tex.silu(x, None, out=(out,))  # who has no places of results
    padded = inspect.signature(tex.fused_attn_fwd).parameters["cu_seqlens_q_padded"]
    assert padded.annotation == torch.Tensor | None
