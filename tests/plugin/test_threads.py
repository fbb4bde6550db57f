# SPDX-License-Identifier: Apache-2.0
"""Changes of policies and registrations from many threads: none waits for another for ever.

Each program is a process of its own, which a deadlock ends by its time limit.
"""

import textwrap

import processes
import pytest

from transformer_engine.plugin import core as plugin

HEAD = """
import faulthandler, itertools, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from transformer_engine.plugin import core as plugin
faulthandler.dump_traceback_later(50, exit=True)
KIND = plugin.BackendImplKind

def impl(op, name, kind=KIND.DEFAULT, fn=None, **options):
    return plugin.OpImpl(op, name, kind, fn or (lambda: name), **options)

def in_thread(function, *arguments):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *arguments).result(30)
"""


def run(program, **variables):
    processes.run(HEAD + textwrap.dedent(program), **variables)


def test_everything_changes_at_once():
    run("""
    manager = plugin.get_default_manager()
    registry, numbers = manager.registry, itertools.count()
    registry.register(impl("op", "flagos.first"))
    op, errors, end = manager.operator("op"), [], time.monotonic() + 2

    def registers():
        name = f"flagos.{next(numbers)}"
        registry.register(impl("op", name))
        registry.unregister("op", name)

    def sets():
        plugin.set_global_policy(plugin.SelectionPolicy(strict=True))
        plugin.reset_global_policy()

    def inside():
        denied = frozenset({str(next(numbers))})
        with plugin.policy_context(plugin.SelectionPolicy("vendor", deny_vendors=denied)):
            assert op().startswith("flagos.")

    def others():
        manager.operator(f"op{next(numbers)}")
        manager.explain("op")

    def bumps():
        plugin.bump_policy_epoch()
        manager.bump_policy_epoch()

    def repeat(function):
        try:
            while time.monotonic() < end:
                function()
        except BaseException as error:
            errors.append(error)

    kinds = [registers, sets, inside, others, bumps, op]
    threads = [threading.Thread(target=repeat, args=(kind,)) for kind in 2 * kinds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert op() == "flagos.first"
    """)


@pytest.mark.parametrize("change", ["register", "policy"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_change_while_implementations_are_asked(change, inside):
    """Another thread's change, which an implementation waits for while it is asked, is not lost."""
    run(
        f"""
    manager = plugin.get_default_manager()
    registry, asked = manager.registry, []

    def changes():
        if {change == "register"}:
            registry.register(impl("op", "flagos.later", priority=1))
        else:
            plugin.set_global_policy(plugin.SelectionPolicy("reference"))

    def fn():
        return "flagos.first"

    def available():
        if not asked:
            asked.append(in_thread(changes))
        return True

    fn._is_available = available
    registry.register(impl("op", "flagos.first", fn=fn))
    registry.register(impl("op", "reference.r", KIND.REFERENCE))
    op = manager.operator("op")
    wanted = "flagos.later" if {change == "register"} else "reference.r"
    context = plugin.policy_context(plugin.SelectionPolicy("default"))
    if {inside}:
        with context:
            assert op() == "flagos.first"
            assert op() == ("flagos.later" if {change == "register"} else "flagos.first")
    else:
        assert op() == "flagos.first"
    assert asked and op() == wanted and in_thread(op) == wanted
    """
    )


def test_a_plugin_waits_for_a_module_that_another_thread_imports(tmp_path):
    """That module's own calls do not wait for the plug-in; all later ones see it."""
    (tmp_path / "imported_meanwhile.py").write_text(
        textwrap.dedent("""
        import __main__
        __main__.began.set()
        assert __main__.loading.wait(30)
        __main__.calls.append(__main__.op())
        """)
    )
    (tmp_path / "some_plugin.py").write_text(
        textwrap.dedent("""
        import __main__
        __main__.loading.set()
        import imported_meanwhile
        def register(registry):
            registry.register(__main__.impl("op", "flagos.plugin", priority=1))
        """)
    )
    run(
        f"""
    sys.path.insert(0, {str(tmp_path)!r})
    began, loading, calls = threading.Event(), threading.Event(), []
    manager = plugin.get_default_manager()
    manager.registry.register(impl("op", "flagos.own"))
    op = manager.operator("op")
    thread = threading.Thread(target=__import__, args=("imported_meanwhile",))
    thread.start()
    assert began.wait(30)
    assert op() == "flagos.plugin"
    thread.join()
    assert calls == ["flagos.own"] and op() == "flagos.plugin"
    """,
        TE_FL_PLUGIN_MODULES="some_plugin",
    )


def test_selections_and_operators_that_come_later():
    """An operator that a selection does not know follows the policy that was in force for it."""
    registry = plugin.OpRegistry()
    kinds = plugin.BackendImplKind
    for op in ("op", "later"):
        for kind in (kinds.DEFAULT, kinds.REFERENCE):
            name = f"{kind}.{op}"
            registry.register(plugin.OpImpl(op, name, kind, lambda name=name: name))
    manager, other = plugin.OpManager(registry), plugin.OpManager(registry)
    op, others = manager.operator("op"), other.operator("op")
    with plugin.with_preference("reference"):
        preferred, outer = manager.selection(), other.selection()
    plain = manager.selection()
    registry.register(plugin.OpImpl("last", "flagos.last", kinds.DEFAULT, lambda: "flagos.last"))
    registry.register(plugin.OpImpl("last", "reference.last", kinds.REFERENCE, lambda: "r.last"))
    last = manager.operator("last")
    with preferred:
        assert (op(), last()) == ("reference.op", "r.last")
        with plain:
            assert (op(), last()) == ("flagos.op", "flagos.last")
    with outer, plain:
        assert (op(), others()) == ("flagos.op", "reference.op")


def test_scopes_that_nobody_leaves_keep_nothing():
    """Of a thread that has ended, and of one that goes on: the module is collected with them."""
    run("""
    import gc, weakref
    from transformer_engine import _core

    class Policy:
        pass

    def enter():
        policy = Policy()
        scopes = [_core.Scope(policy), dispatcher.selection(), _core.Scope(policy)]
        for scope in scopes:
            scope.__enter__()
        assert op() == 1 and _core.policy_in_force() is policy
        return weakref.ref(policy)

    implementation = _core.Implementation("op", "flagos.f", lambda: 1)
    dispatcher = _core.Dispatcher(lambda policy: ((implementation,),), print)
    op = dispatcher.operator(0, "op")
    gone = [in_thread(enter), enter(), weakref.ref(_core), weakref.ref(implementation.function)]
    gc.collect()
    assert None not in [there() for there in gone]
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    for name in ("plugin", "_core", "KIND", "impl", "implementation", "dispatcher", "op"):
        del globals()[name]
    gc.collect()
    assert [there() for there in gone] == [None] * 4
    import transformer_engine._core as again
    assert again.policy_in_force() is None
    """)


def test_sixteen_threads_of_modules_and_operators():
    """While others register, reset the manager of the process, and set policies: all are right."""
    run("""
    import random
    import torch
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)
    norm, x, numbers = te.RMSNorm(16), torch.ones(4, 16), itertools.count()
    errors, end = [], time.monotonic() + 4

    def rmsnorm(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
        rsigma = (input.float().square().mean(-1) + eps).rsqrt()
        return (input.float() * rsigma[:, None] * weight).to(otype), None, rsigma

    def registers():
        registry, name = plugin.get_registry(), f"vendor.{next(numbers)}"
        options = {"vendor": "v", "supports": lambda *args: random.random() < 0.5}
        registry.register(impl("relu", name, KIND.VENDOR, lambda x, _: x.clamp(min=0), **options))
        options = {"vendor": "v", "supported_dtypes": random.choice([None, {"float32"}])}
        registry.register(impl("rmsnorm_fwd", name, KIND.VENDOR, rmsnorm, **options))
        if random.random() < 0.8:
            registry.unregister("relu", name)
            registry.unregister("rmsnorm_fwd", name)

    def calls():
        assert not tex.relu(-x, None).any()
        given = torch.zeros(4, 16, requires_grad=True)
        out = norm(given)
        assert out.shape == given.shape and not out.any()
        out.sum().backward()
        assert (given.grad > 1).all()  # 1 / sqrt(eps)

    def inside():
        kind = random.choice(["vendor", "reference", "flagos"])
        with plugin.with_preference(kind):
            calls()
            with plugin.get_manager().selection(), plugin.with_denied_vendors(str(next(numbers))):
                calls()

    def changes():
        if random.random() < 0.1:
            plugin.reset_default_manager()
        plugin.set_global_policy(plugin.SelectionPolicy(random.choice(["vendor", "reference"])))
        calls()
        plugin.reset_global_policy()
        plugin.bump_policy_epoch()

    def asks():
        plugin.get_manager().explain("relu")
        plugin.get_manager().counts()
        plugin.get_manager().operator(f"op{next(numbers) % 50}")

    def repeat(number):
        kinds = random.Random(number)
        try:
            while time.monotonic() < end:
                kinds.choice([registers, calls, inside, changes, asks])()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    """)
