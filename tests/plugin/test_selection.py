# SPDX-License-Identifier: Apache-2.0
"""Which implementation an operator calls: registrations, calls, predicates, contexts."""

import gc
import random
import weakref

import pytest
import torch
from plugged_managers import ALL, KINDS, impl, manager_of

from transformer_engine import _core
from transformer_engine.plugin.core import (
    BackendImplKind,
    OpImpl,
    OpManager,
    OpRegistry,
    PolicyManager,
    SelectionPolicy,
    policy_context,
    set_global_policy,
    with_denied_vendors,
    with_preference,
    with_strict_mode,
)

pytestmark = pytest.mark.usefixtures("environment")


# ---- registrations -------------------------------------------------------------------------------


def test_what_implementations_must_be():
    with pytest.raises(ValueError, match=r"'vendor\.x'.*needs a vendor"):
        impl("vendor.x", vendor=None)
    for wrong in ({"fn": 3}, {"supports": 3}):
        with pytest.raises(TypeError, match="no callable"):
            impl("flagos.f", **wrong)
    with pytest.raises(TypeError, match="expected BackendImplKind"):
        OpImpl("op", "x", "vendor", print)
    for wrong in ({"op": 3}, {"vendor": 3}, {"priority": "high"}, {"priority": None},
                  {"supported_dtypes": "bfloat16"}):  # fmt: skip
        with pytest.raises(TypeError, match=f"{next(iter(wrong))}.*expected"):
            impl("flagos.f", **wrong)
    with pytest.raises(TypeError, match="impl_id=3, expected str"):
        OpImpl("op", 3, BackendImplKind.DEFAULT, print)
    with pytest.raises(ValueError, match="no architecture"):
        impl("flagos.f", min_arch="hopper")
    assert str(BackendImplKind.DEFAULT) == "flagos"


class Unhashable:
    """A function of a plug-in, as a dataclass would be one."""

    __hash__ = None

    def __eq__(self, other):
        return self is other

    def __call__(self, *args):
        return "unhashable"


class UnhashableTrue(Unhashable):
    def __call__(self, *args):
        return True


class Broken:
    """One whose availability can not be asked for."""

    @property
    def _is_available(self):
        raise OSError("no driver")

    def __call__(self):
        raise AssertionError


def test_odd_functions_are_in_nobodys_way():
    odd = impl("vendor.odd", fn=Unhashable(), supports=UnhashableTrue(), op="odd")
    broken = impl("vendor.broken", fn=Broken(), op="broken")
    manager = manager_of(odd, broken, impl("flagos.f"))
    assert manager.call("op") == "flagos.f" and manager.call("odd") == "unhashable"
    with pytest.raises(RuntimeError, match="it raised OSError: no driver"):
        manager.call("broken")
    assert not broken.is_available() and manager.counts() == {"op/flagos.f": 1, "odd/vendor.odd": 1}


def test_duplicates_and_half_lists():
    registry = OpRegistry()
    registry.register(impl("flagos.f"))
    with pytest.raises(ValueError, match=r"op has an implementation 'flagos\.f' already"):
        registry.register_impl(impl("flagos.f"))
    many = [impl("flagos.g"), impl("flagos.h"), impl("flagos.g")]
    with pytest.raises(ValueError, match=r"flagos\.g"):
        registry.register_many(many)
    with pytest.raises(TypeError, match="expected an OpImpl"):
        registry.register_many([impl("flagos.g"), print])
    assert [one.impl_id for one in registry.get_implementations("op")] == ["flagos.f"]
    assert registry.get_implementation("op", "flagos.g") is None
    assert registry.get_implementations("none") == [] and registry.list_operators() == ["op"]
    with pytest.raises(KeyError, match="no implementation"):
        registry.unregister("op", "flagos.g")


def test_changes_are_seen_at_once():
    manager = manager_of(impl("reference.torch"))
    op, snapshot = manager.operator("op"), manager.registry.snapshot()
    assert op() == "reference.torch" and manager.operator("op") is op
    manager.registry.register(impl("vendor.x"))
    assert op() == "vendor.x"
    with with_preference("reference"):
        assert op() == "reference.torch"
        manager.registry.register(impl("reference.z"))
        assert op() == "reference.z"
    former = set_global_policy(SelectionPolicy("reference"))
    assert former == SelectionPolicy() and op() == "reference.z"
    assert manager.registry.unregister("op", "reference.z").impl_id == "reference.z"
    assert op() == "reference.torch"
    assert [one.impl_id for one in snapshot.impls_by_op["op"]] == ["reference.torch"]
    with pytest.raises(TypeError):
        snapshot.impls_by_op["op"] = ()
    manager.registry.clear()
    with pytest.raises(RuntimeError, match="nobody has registered"):
        op()
    manager.registry.register(impl("flagos.f"))
    assert op() == "flagos.f"


def test_operators_that_come_later_and_names_that_are_close():
    manager = manager_of(impl("flagos.f", op="rmsnorm_fwd"))
    late = manager.operator("late")
    with pytest.raises(RuntimeError, match="nobody has registered"):
        late()
    manager.registry.register(impl("flagos.f", op="late"))
    assert late() == "flagos.f" and late.__name__ == "late" and "late" in repr(late)
    with pytest.raises(RuntimeError, match="did you mean rmsnorm_fwd"):
        manager.call("rmsnorm_fw")


def test_random_changes():
    """A model of the rules, beside any sequence of changes."""
    registry, numbers = OpRegistry(), random.Random(random.getrandbits(32))
    manager, there = OpManager(registry), {}
    operators = [f"op{i}" for i in range(3)]
    for _ in range(300):
        op, kind = numbers.choice(operators), numbers.choice(list(KINDS))
        name = f"{kind}.{numbers.choice('abc')}"
        if (op, name) in there:
            registry.unregister(op, name)
            del there[op, name]
        else:
            there[op, name] = priority = numbers.randrange(3)
            registry.register(impl(name, op=op, priority=priority))
        prefer = numbers.choice(list(KINDS))
        set_global_policy(SelectionPolicy(prefer))
        order = SelectionPolicy(prefer).get_default_order()
        for each in operators:
            ids = [n for o, n in there if o == each]
            ids.sort(key=lambda n: (there[each, n], n), reverse=True)
            ids.sort(key=lambda n: order.index(n.split(".")[0]))
            assert [one.impl_id for one in manager.resolve_candidates(each)] == ids
            if ids:
                assert manager.call(each) == ids[0]


# ---- calls ---------------------------------------------------------------------------------------


def test_arguments_and_results_pass_unchanged():
    seen = []
    given = (object(), [1]), {"key": object()}
    answer = object()
    one = impl("flagos.f", fn=lambda *args, **kwargs: seen.append((args, kwargs)) or answer)
    manager = manager_of(one)
    op = manager.operator("op")
    assert op(*given[0], **given[1]) is answer and manager.call("op") is answer
    assert seen == [given, ((), {})]
    assert seen[0][0][0] is given[0][0]
    assert manager.counts() == {"op/flagos.f": 2}


def test_errors_are_raised_as_they_are_and_nothing_runs_twice():
    """An implementation that has begun is never followed by another one."""
    ran = []

    def fails(*args):
        ran.append("fails")
        raise KeyError("half done")

    manager = manager_of(impl("flagos.f", fn=fails), impl("reference.torch"))
    for context in (with_strict_mode(), policy_context(SelectionPolicy())):
        with context, pytest.raises(KeyError, match="half done") as error:
            manager.call("op", 1)
        assert error.value.__notes__ == [
            "raised by flagos.f, an implementation of op; called with (1)"
        ]
    assert ran == ["fails", "fails"]


def test_arguments_that_can_not_be_shown():
    """A note says whose error it is all the same."""

    class Odd:
        shape = property(lambda self: 1 // 0)

        def __repr__(self):
            raise OSError

    def fails(x, y):
        raise KeyError("x")

    with pytest.raises(KeyError) as error:
        manager_of(impl("flagos.f", fn=fails)).call("op", Odd(), [Odd(), 2])
    (note,) = error.value.__notes__
    assert "raised by flagos.f, an implementation of op" in note and "(x=Odd, y=[Odd, 2])" in note


def test_what_does_not_take_a_call_is_passed_over():
    asked = []

    def takes(x, **options):
        asked.append((x, options))
        return x > 0

    manager = manager_of(impl("flagos.f", supports=takes), impl("reference.torch"))
    assert [manager.call("op", x, y=2) for x in (1, -1)] == ["flagos.f", "reference.torch"]
    assert asked == [(1, {"y": 2}), (-1, {"y": 2})]
    with with_strict_mode():
        assert manager.call("op", 1) == "flagos.f"
        with pytest.raises(NotImplementedError, match="strict: no other one is asked"):
            manager.call("op", -1)
    with policy_context(SelectionPolicy.from_dict(per_op_order={"op": ["flagos"]})):
        with pytest.raises(NotImplementedError, match=r"none that flagos\.f takes"):
            manager.call("op", -1)
        with pytest.raises(TypeError) as error:
            manager.call("op", "text")
        assert "flagos.f" in error.value.__notes__[0]


def test_dtypes_and_architectures(device):
    manager = manager_of(
        impl("vendor.new", min_arch="sm_70", vendor="new"),
        impl("flagos.f", supported_dtypes={"float16", "torch.bfloat16"}),
        impl("reference.torch"),
    )
    x = torch.ones(2, device=device)
    with with_preference("vendor"):
        expected = "vendor.new" if device == "cuda" else "flagos.f"
        assert manager.call("op", 1.0, x.half()) == expected
    assert manager.call("op", x.bfloat16()) == "flagos.f"
    assert manager.call("op", input=x) != "flagos.f"
    assert manager.call("op", 3) == "flagos.f"  # no tensor, no limit
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    for tensors, takes in (([x], False), ([x.half()], True), ([[x], [x.half()]], False),
                           ([(x.half(),), [x]], True)):  # fmt: skip
        expected = "flagos.f" if takes else "reference.torch"
        with with_denied_vendors("new"):
            assert manager.call("op", tensors) == manager.call("op", 8, flag, tensors) == expected
            assert manager.call("op", chunk_size=8, noop=flag, tensor_lists=tensors) == expected
    far = manager_of(impl("vendor.far", min_arch="99.0"), impl("reference.torch"))
    with with_preference("vendor"):
        assert far.call("op", x) == far.call("op", 8, [[x], [x]]) == "reference.torch"


def test_predicates_remember_what_they_were_told(device):
    asked = []

    def fits(dtype, where):
        asked.append((dtype, where))
        return dtype is not torch.float64

    x = torch.ones(2, device=device)
    for by_device in (True, False):
        asked.clear()
        takes = _core.Predicate(fits, lambda *args, **options: len(args) < 3, by_device)
        assert takes(x, 1) and takes(None, 2.0, other=x) is True
        assert takes(torch.nn.Parameter(x)) and not takes(x, 1, 2)
        assert asked == [(torch.float32, x.device)]
        assert not takes(x.double()) and not takes("text", x.double())
        assert len(asked) == 2
        many = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
        many += (torch.float16, torch.bfloat16, torch.complex64, torch.float8_e5m2)
        for dtype in 2 * many:
            assert takes(torch.empty(2, dtype=dtype, device=device))
        assert takes(torch.empty(2, device="meta", dtype=torch.float16)) and not takes(x.double())
        assert takes(x.to_sparse()) and not takes(x.double().to_sparse())

    class Tensor:
        dtype, device = torch.float64, "somewhere"

    assert not takes(Tensor()) and asked[-1] == (torch.float64, "somewhere")
    assert takes([3, x.double()]) and takes() and takes(object()) and takes([], ())
    endless = []
    endless.append(endless)
    assert takes(endless) and not takes(endless, x.double())
    for wrong in ((3,), (fits, 3)):
        with pytest.raises(TypeError, match="expected a callable"):
            _core.Predicate(*wrong)
    with pytest.raises(ZeroDivisionError):
        _core.Predicate(lambda dtype, where: 1 // 0)(x)


def test_availability_is_asked_when_implementations_are_chosen():
    state, asked = {"there": False}, []

    def fn():
        return "flagos.f"

    def available():
        asked.append(1)
        return state["there"]

    fn._is_available = available
    manager = manager_of(impl("flagos.f", fn=fn), impl("reference.torch"))
    assert [manager.call("op") for _ in range(5)] == ["reference.torch"] * 5
    assert len(asked) == 1
    assert "not available" in str(manager.explain("op"))
    state["there"] = True
    assert manager.call("op") == "reference.torch"
    manager.bump_policy_epoch()
    assert manager.call("op") == "flagos.f"

    def broken():
        raise OSError("no driver")

    fn._is_available = broken
    assert "OSError: no driver" in str(manager.explain("op"))


def test_availability_that_asks_for_operators():
    """That ends, and is told; else each one of these would double how often all are asked."""
    registry, asked = OpRegistry(), []
    manager = OpManager(registry)
    asks = {"call": lambda: manager.call("op"), "explain": lambda: manager.explain("op"),
            "other": lambda: other.call("op")}  # fmt: skip
    other = manager_of(impl("flagos.f"))
    for number, kind in enumerate(list(asks) * 7):

        def fn(name=f"flagos.{kind}{number}"):
            return name

        fn._is_available = lambda kind=kind: asked.append(kind) or asks[kind]()
        registry.register(impl(f"flagos.{kind}{number}", fn=fn))
    registry.register(impl("reference.torch"))
    assert manager.call("op") == "flagos.other8"
    assert len(asked) == 21
    manager.bump_policy_epoch()
    refused = [c.refused for c in manager.explain("op").candidates if c.refused]
    assert len(refused) == 14
    assert all("op: whether an implementation is available can not" in text for text in refused)


def test_explanation():
    manager = manager_of(*map(impl, ALL))
    manager.call("op")
    with with_denied_vendors("amd"):
        found = manager.explain("op")
    assert found.selected.impl_id == "flagos.f"
    assert {c.impl.impl_id: bool(c.refused) for c in found.candidates} == {
        "flagos.f": False, "vendor.CUDA": False, "vendor.amd": True, "reference.torch": False
    }  # fmt: skip
    text = str(found)
    assert "the policy does not allow vendor amd" in text and "called 1 times" in text
    assert manager.explain("none").selected is None


def test_contexts_can_be_entered_again_and_must_be_left_in_order():
    manager = manager_of(*map(impl, ALL))
    context = with_preference("reference")
    with context, with_preference("vendor"), context:
        assert manager.call("op") == "reference.torch"
    assert manager.call("op") == "flagos.f"
    one, two = with_preference("vendor"), with_preference("reference")
    one.__enter__()
    two.__enter__()
    with pytest.raises(RuntimeError, match="opposite order"):
        one.__exit__(None, None, None)
    two.__exit__(None, None, None)
    one.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="opposite order"):
        one.__exit__(None, None, None)
    for wrong in ("vendor", None):
        with pytest.raises(TypeError, match="expected a SelectionPolicy"):
            policy_context(wrong)
        with pytest.raises(TypeError, match="expected a SelectionPolicy"):
            set_global_policy(wrong)


def test_a_context_that_ends_while_implementations_are_asked():
    """A generator that has entered it goes on, say: its memory is not written then."""
    policy = SelectionPolicy("reference")

    def inside():
        with policy_context(policy):
            yield

    def fn():
        return "flagos.f"

    def available():
        if held:
            held.pop().close()
            others.extend(policy_context(SelectionPolicy("vendor")) for _ in range(8))
            for other in others:
                other.__enter__()
        return True

    held, others = [], []
    fn._is_available = available
    manager = manager_of(impl("flagos.f", fn=fn), impl("vendor.x"), impl("reference.torch"))
    op = manager.operator("op")
    for _ in range(100):
        generator = inside()
        next(generator)
        manager.bump_policy_epoch()
        held.append(generator)
        assert op() == "reference.torch"
        assert others and op() == "vendor.x"
        while others:
            others.pop().__exit__(None, None, None)
        assert op() == "flagos.f"


def test_managers_are_apart_and_end():
    registry = OpRegistry()
    registry.register(impl("flagos.f"))
    one, two = OpManager(registry), manager_of(impl("reference.torch"))
    with one.selection():
        registry.register_many([impl("flagos.g"), impl("flagos.g", op="late")])
        assert [one.call("op"), one.call("late")] == ["flagos.f", "flagos.g"]
        assert two.call("op") == "reference.torch"
    assert one.call("op") == "flagos.g"
    op, gone = one.operator("op"), weakref.ref(one)
    del one
    gc.collect()
    registry.register(impl("flagos.z"))
    assert op() == "flagos.z"  # it keeps its manager
    with with_preference("vendor"):
        assert op() == "flagos.z"
    del op
    gc.collect()
    assert gone() is None
    registry.register(impl("flagos.zz"))  # tells nobody


def test_what_is_unregistered_is_let_go():
    """With what it holds, unless a selection may still call it; its calls stay counted."""
    manager = manager_of(impl("flagos.f"))
    registry, op, there = manager.registry, manager.operator("op"), []
    kept = impl("vendor.kept", priority=9)
    registry.register(kept)
    with with_preference("vendor"):
        selection = manager.selection()
    registry.unregister("op", "vendor.kept")
    for _ in range(300):
        one = impl("vendor.x", fn=lambda *args: "x", supported_dtypes={"float32"})
        there.append(weakref.ref(one.fn))
        registry.register(one)
        with with_preference("vendor"):
            assert op() == "x"
        assert registry.unregister("op", "vendor.x") is one
    del one
    gc.collect()
    assert sum(fn() is not None for fn in there) < 100
    with selection:
        assert op() == "vendor.kept"
    assert manager.counts() == {"op/vendor.x": 300, "op/vendor.kept": 1}


def test_policies_of_all_managers():
    assert PolicyManager.get_instance() is PolicyManager.get_instance()
    before = PolicyManager.get_instance().get_policy_epoch()
    set_global_policy(SelectionPolicy("vendor"))
    assert PolicyManager.get_instance().get_policy_epoch() == before + 1
    assert _core.policy_in_force() is None


def test_mistakes_of_native_callers():
    with pytest.raises(TypeError, match="expected a callable"):
        _core.Implementation("op", "x", 3)
    dispatcher = _core.Dispatcher(lambda policy: [], lambda name, asked: None)
    op = dispatcher.operator(0, "op")
    with pytest.raises(TypeError, match="expected a tuple"):
        op()
    dispatcher.publish(((),))
    with pytest.raises(SystemError, match="no implementation was called"):
        op()
    with pytest.raises(TypeError, match="expected Implementations"):
        dispatcher.publish(((), (print,)))
    with pytest.raises(TypeError, match="expected Implementations"):
        _core.Dispatcher(lambda policy: ((3,),), print).operator(0, "op")()
    with pytest.raises(ValueError, match="index"):
        dispatcher.operator(-1, "op")
    with pytest.raises(TypeError, match="expected a tuple"):
        dispatcher.publish([])
    with pytest.raises(TypeError):
        _core.Operator()
