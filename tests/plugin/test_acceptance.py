# SPDX-License-Identifier: Apache-2.0
"""What a plug-in system has to pass, through `tex` and modules: a test for each demand.

The other files of this folder take each apart. That all 113 signatures round-trip is tested in
test_tex_operators.py; what a call costs `make report` tells, and no test decides.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import processes
import pytest
import torch
from comparators import assert_bits

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.plugin.core import (
    BackendImplKind,
    OpImpl,
    SelectionPolicy,
    get_policy,
    get_registry,
    match_token,
    policy_context,
    reset_global_policy,
    with_allowed_vendors,
    with_denied_vendors,
    with_preference,
)

pytestmark = pytest.mark.usefixtures("manager", "environment")
POLICY = SelectionPolicy.from_dict


def vendor(name="mine", fn=None, op="relu", **options):
    """Register an implementation of a vendor, which gives its name."""
    fn = (lambda *args, **kwargs: name) if fn is None else fn
    impl = OpImpl(op, f"vendor.{name}", BackendImplKind.VENDOR, fn, vendor=name, **options)
    get_registry().register(impl)
    return impl


def relu():
    """Who computes ``tex.relu``: a vendor's name, or "torch" for what is a tensor."""
    made = tex.relu(torch.tensor([[-1.0, 2.0]]), None)
    return made if isinstance(made, str) else "torch"


def run(program, **variables):
    """Run a program in a process of its own; what it printed, and what it complained of."""
    done = processes.run(program, **variables)
    return done.stdout.split(), done.stderr


# ---- who is chosen -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefer", "order"),
    [
        ("flagos", ["default.native", "vendor.mine", "reference.torch"]),
        ("vendor", ["vendor.mine", "default.native", "reference.torch"]),
        ("reference", ["reference.torch", "default.native", "vendor.mine"]),
    ],
)
def test_order_for_each_preference(prefer, order, manager):
    vendor()
    with with_preference(prefer):
        assert [impl.impl_id for impl in manager.resolve_candidates("relu")] == order
        assert (relu() == "mine") == (prefer == "vendor")


def test_token_grammar(monkeypatch):
    impl = vendor("Mine")
    for token, matches in {
        "vendor": True, "flagos": False, "default": False, "reference": False,
        "vendor:mine": True, "vendor:MINE": True, "vendor:other": False,
        "impl:vendor.Mine": True, "impl:vendor.mine": False,
    }.items():  # fmt: skip
        assert match_token(impl, token) == matches, token
    for unknown in ("", "cuda", "vendor:", "impl:", "kind:vendor", "Vendor"):
        with pytest.raises(ValueError, match="is no token of a policy"):
            POLICY(per_op_order={"relu": [unknown]})
    monkeypatch.setenv("TE_FL_PER_OP", "relu=cuda")
    reset_global_policy()
    with pytest.raises(ValueError, match="TE_FL_PER_OP"):
        relu()


def test_an_order_of_one_operator_is_all_of_it():
    with policy_context(POLICY(per_op_order={"relu": ["vendor:mine"], "rmsnorm_fwd": ["vendor"]})):
        with pytest.raises(RuntimeError, match="relu: no implementation can be called"):
            relu()
        with pytest.raises(RuntimeError, match="rmsnorm_fwd: no implementation can be called"):
            te.RMSNorm(16)(torch.ones(2, 16))
        assert te.LayerNorm(16)(torch.ones(2, 16)).shape == (2, 16)
        vendor()
        assert relu() == "mine"


def test_vendors_that_are_allowed_or_denied():
    vendor()
    with with_preference("vendor"):
        assert relu() == "mine"
        with with_allowed_vendors("MINE", "other"):
            assert relu() == "mine"
            with with_denied_vendors("mine"):
                assert relu() == "torch"  # denied wins
        with with_allowed_vendors():  # none of them, unlike no list at all
            assert relu() == "torch"
            assert get_policy().fingerprint() != POLICY(prefer="vendor").fingerprint()
    assert SelectionPolicy(allow_vendors=None) != SelectionPolicy(allow_vendors=frozenset())


def test_duplicates_and_ties():
    vendor("a", priority=3)
    with pytest.raises(ValueError, match=r"relu has an implementation 'vendor\.a' already"):
        vendor("a")
    vendor("z", priority=3)
    vendor("b", priority=2)
    with with_preference("vendor"):
        assert relu() == "z"  # of equal priorities the last of the alphabet


def test_late_registrations_are_seen_at_once():
    with with_preference("vendor"):
        assert relu() == "torch"
        impl = vendor()
        assert relu() == "mine"
        get_registry().unregister(impl.op_name, impl.impl_id)
        assert relu() == "torch"


# ---- what happens when one fails -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "strict"), [(None, False), ("0", False), ("1", True), ("true", True)]
)
def test_strictness_is_as_documented(variable, strict, monkeypatch):
    """It is about who takes a call: an error of one that has begun is always raised."""
    if variable is not None:
        monkeypatch.setenv("TE_FL_STRICT", variable)
    monkeypatch.setenv("TE_FL_PREFER", "vendor")
    reset_global_policy()
    impl = vendor(supports=lambda *args: False)
    assert get_policy().strict == strict
    if strict:
        with pytest.raises(NotImplementedError, match="strict: no other one is asked"):
            relu()
    else:
        assert relu() == "torch"
    get_registry().unregister(impl.op_name, impl.impl_id)
    vendor(fn=lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        relu()


@pytest.mark.parametrize("of", ["tex", "a module"])
def test_nothing_runs_after_a_side_effect(of):
    done = []

    def fails(*args):
        done.append(1)
        raise OSError("half way")

    vendor(op="rmsnorm_fwd", fn=fails)
    x, weight = torch.ones(2, 16), torch.ones(16)
    with with_preference("vendor"), pytest.raises(OSError, match="half way") as error:
        if of == "tex":
            tex.rmsnorm_fwd(x, weight, 1e-5, None, None, torch.float32, 0, False)
        else:
            te.RMSNorm(16)(x)
    assert done == [1]
    assert "vendor.mine" in error.value.__notes__[0] and "[2, 16]" in error.value.__notes__[0]


# ---- processes and threads -----------------------------------------------------------------------


PLUGIN = """
from transformer_engine.plugin.core import BackendImplKind, OpImpl

def register(registry):
    print("registers")
    registry.register(OpImpl("relu", "vendor.mine", BackendImplKind.VENDOR, lambda *args: "mine",
                             vendor="mine"))
"""


def test_a_forked_child_goes_on(tmp_path):
    (tmp_path / "te_forked_plugin.py").write_text(PLUGIN)
    said, complaints = run(
        """
        import os, torch
        import transformer_engine_torch as tex
        print(tex.relu(torch.ones(1, 2), None), flush=True)
        child = os.fork()
        if child == 0:
            print(tex.relu(torch.ones(1, 2), None), flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """,
        path=[tmp_path], TE_FL_PLUGIN_MODULES="te_forked_plugin", TE_FL_PREFER="vendor",
    )  # fmt: skip
    assert said == ["registers", "mine", "mine"] and not complaints


def test_a_plug_in_that_fails_is_told_once(tmp_path):
    (tmp_path / "te_broken_plugin.py").write_text("import a_library_that_is_not_there")
    said, complaints = run(
        """
        import torch
        import transformer_engine.pytorch as te
        import transformer_engine_torch as tex
        for _ in range(3):
            tex.relu(torch.ones(1, 2), None)
            te.RMSNorm(16)(torch.ones(2, 16))
        print("done")
        """,
        path=[tmp_path], TE_FL_PLUGIN_MODULES="te_broken_plugin",
    )  # fmt: skip
    assert said == ["done"]
    assert complaints.count("te_broken_plugin") == 1 and "a_library_that_is_not_there" in complaints


def test_sixteen_threads_while_one_registers():
    impl, stop = vendor(), threading.Event()

    def resolves(seen):
        with with_preference("vendor"):
            while not stop.is_set():
                seen.add(relu())
        return seen

    with ThreadPoolExecutor(16) as pool:
        found = [pool.submit(resolves, set()) for _ in range(16)]
        for _ in range(200):
            get_registry().unregister(impl.op_name, impl.impl_id)
            get_registry().register(impl)
        stop.set()
    for each in found:
        assert each.result() and each.result() <= {"mine", "torch"}


def test_a_backward_has_the_implementations_of_its_forward():
    """On whatever thread, whoever came since."""
    native = {
        op: get_registry().get_implementation(op, "default.native").fn
        for op in ("rmsnorm_fwd", "rmsnorm_bwd")
    }
    ran = []
    for op, fn in native.items():
        vendor(op=op, fn=lambda *args, op=op, fn=fn: ran.append(op) or fn(*args))
    module, x = te.RMSNorm(16), torch.randn(4, 16, requires_grad=True)
    (wanted,) = torch.autograd.grad(module(x).sum(), x)
    with with_preference("vendor"):
        loss = module(x).sum()
    get_registry().unregister("rmsnorm_bwd", "vendor.mine")
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert ran == ["rmsnorm_fwd", "rmsnorm_bwd"]
    assert_bits(x.grad, wanted)
