# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any moment of any context manager of the package: the thread is what it was before."""

import contextlib
import gc
import sys
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.contexts import Context
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.plugin import core as plugin
from transformer_engine.plugin.core.locks import ForkSafeLock
from transformer_engine.plugin.core.manager import _Held
from transformer_engine.plugin.core.registry import OpRegistry
from transformer_engine.plugin.core.types import BackendImplKind, OpImpl
from transformer_engine.pytorch import utils
from transformer_engine.pytorch.execution import recompute, thread_state
from transformer_engine.pytorch.torchside import modes
from transformer_engine.pytorch.torchside.device import outside_capture

TIMEOUT = 60.0
# The profiler raises in generators that are closed, too.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Interrupt(BaseException):
    """What a signal handler raises."""


class InterruptAt:
    """A profiler that raises at event number `at`, in whichever file.

    Handlers run where a function in Python begins and when a call of one in C has ended.
    """

    def __init__(self, at):
        self.at, self.seen = at, 0

    def __call__(self, frame, event, _):
        if event in ("call", "c_return"):
            self.seen += 1
            if self.seen == self.at:
                raise Interrupt


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Function(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


TRACKER = te.distributed.CudaRNGStatesTracker()
REGISTRY = OpRegistry()
LOCK = ForkSafeLock()
MODEL = torch.nn.Sequential(te.Linear(16, 16, device="cpu"), torch.nn.Linear(16, 16))
IMPL = OpImpl("op", "one", BackendImplKind.DEFAULT, lambda: None)


def is_free(lock):
    """Whether another thread can take a lock."""
    got = []

    def take():
        got.append(lock.acquire(timeout=0.01))
        if got[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join(TIMEOUT)
    return got[0]


def torch_state():
    """What contexts set of torch, of this thread."""
    return {
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "forward gradients": torch._C._is_fwd_grad_enabled(),
        "functions": torch._C._is_torch_function_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": [id(mode) for mode in modes.active_modes()],
        "transforms": len(torch._C._functorch.get_interpreter_stack() or ()),
        "autocast": torch.is_autocast_enabled("cpu"),
        "keys": str(torch._C._dispatch_tls_local_include_set()),
        "left out": str(torch._C._dispatch_tls_local_exclude_set()),
        "random": torch.get_rng_state().tolist(),
    }


def own_state():
    """What contexts set of this package."""
    now = thread_state.current_state()
    fields = ("enabled", "calibrating", "recipe", "group", "depth", "owes_update", "quantized_init")
    phase = recompute._thread.enabled, recompute._thread.repeats, recompute._thread.queued
    hooks = [
        [len(m._forward_hooks), len(m._forward_pre_hooks), m.__dict__.get("_observer")]
        for m in MODEL
    ]
    return {
        "state": id(now),
        **{name: getattr(now, name) for name in fields},
        "phase": phase,
        "runs": recompute._thread.runs,
        "own depth": recompute._thread.depth,
        "ranges": list(utils._RANGES),
        "recorders": dict(REGISTRY._recorders),
        "implementations": dict(REGISTRY.snapshot().impls_by_op),
        "hooks": hooks,
    }


def regions():
    with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
        with te.autocast(enabled=False, calibrating=True):
            len("")


def generator_around_a_region():
    @contextlib.contextmanager
    def mine():
        with te.autocast():
            yield

    with mine():
        len("")


def quantized_init():
    with te.quantized_model_init(), te.quantized_model_init(enabled=False):
        len("")


def recomputing():
    with te.distributed.activation_recompute_forward(True, True), recompute.known_to_modules():
        len("")


def another_region():
    with thread_state.in_region(thread_state.RegionState()):
        len("")


def real_tensors():
    with modes.real_tensors():
        len("")


def unseen():
    with modes.unseen():
        len("")


def seen():
    modes.seen_here()(len)("")


def own_dtypes():
    modes.in_own_dtypes(torch.add)(torch.ones(1), 1)


def fork():
    with TRACKER.fork("one"):
        torch.rand(3)


def decorated_fork():
    TRACKER.fork("one")(torch.rand)(3)


def states_put_back():
    with recompute._put_back(lambda: TRACKER, TRACKER.get_states()):
        len("")


def profiler_range():
    with utils.get_nvtx_range_context("range"):
        len("")


def outside():
    with outside_capture(torch.device("cpu")):
        len("")


def observed():
    with te.observe(MODEL):
        len("")


def watched():
    with te.watch_finite(MODEL):
        len("")


def counted():
    with te.counting():
        len("")


def registered():
    with REGISTRY.undone_if_it_fails():
        with REGISTRY.undone_if_it_fails():
            REGISTRY.register(IMPL)
        REGISTRY.unregister("op", "one")


def locked():
    with LOCK, LOCK:
        len("")


def held():
    with _Held(LOCK, True), _Held(LOCK, False):
        len("")


CONTEXTS = [
    regions, quantized_init, recomputing, another_region, real_tensors, unseen, seen, own_dtypes,
    fork, decorated_fork, states_put_back, profiler_range, outside, observed, watched, counted,
    registered, locked, held,
]  # fmt: skip


@pytest.fixture(autouse=True)
def tracker():
    TRACKER.reset()
    TRACKER.add("one", 17)


def interrupt_everywhere(function, check):
    """Run a function with an interrupt at each of its moments; how many there are.

    Nothing is collected meanwhile: an interrupt inside of a finalizer goes nowhere.
    """
    function()  # what is imported by the first call is
    before, at, errors = check(), 0, []
    collects = gc.isenabled()
    gc.disable()
    try:
        while True:
            at += 1
            profiler = sys.getprofile()
            sys.setprofile(InterruptAt(at))
            try:
                function()
            except Interrupt as error:
                errors.append(error)  # its traceback keeps what the function had: nothing dies
            else:
                return at - 1
            finally:
                sys.setprofile(profiler)
            assert check() == before, f"after an interrupt at point {at}"
    finally:
        if collects:
            gc.enable()


@pytest.mark.parametrize("function", CONTEXTS)
def test_own_state(function):
    def check():
        found = own_state()
        if function is watched:  # a hook that the interrupt keeps from being known: it does nothing
            found.pop("hooks")
        if function is registered:  # an interrupt ends the undoing that an error has begun
            found.pop("implementations")
        return found

    assert interrupt_everywhere(function, check) >= 2
    assert is_free(LOCK)


@pytest.mark.parametrize("function", CONTEXTS)
@pytest.mark.parametrize("around", ["nothing", "modes", "transform", "inference", "autocast"])
def test_state_of_torch(function, around):
    if around == "modes" and function is watched:
        pytest.skip("torch itself loses function modes where one is interrupted")

    def run(x):
        assert interrupt_everywhere(function, torch_state) >= 2
        return x.sum()

    x = torch.ones(2)
    if around == "transform":
        torch.func.grad(run)(x)
    elif around == "modes":
        with Dispatch(), Function(), Dispatch():
            run(x)
    elif around == "inference":
        with torch.inference_mode():
            run(x)
    elif around == "autocast":
        with torch.autocast("cpu"):
            run(x)
    else:
        run(x)


@pytest.mark.gpu
def test_outside_of_a_capture():
    """What runs there is in no graph; the stream is the one before, however the block ends."""
    device = torch.device("cuda", torch.cuda.current_device())
    counts = torch.zeros(2, device=device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = torch.cuda.current_stream()
        with outside_capture(device):
            assert torch.cuda.current_stream() != inside
            assert not torch.cuda.is_current_stream_capturing()
            counts[:1].add_(1)
        assert torch.cuda.current_stream() == inside
        with pytest.raises(Interrupt), outside_capture(device):
            raise Interrupt
        assert torch.cuda.current_stream() == inside
        assert torch.cuda.is_current_stream_capturing()
        counts[1:].add_(1)
    for _ in range(3):
        graph.replay()
    assert counts.tolist() == [1.0, 3.0]


def test_a_named_state_goes_on_or_stays():
    """An interrupted fork leaves the state of its name as it was, or where its draws have ended."""
    before = TRACKER.get_states()["one"].clone()
    fork()
    after = TRACKER.get_states()["one"].clone()
    seen = set()

    def check():
        now = TRACKER.get_states()["one"]
        seen.add((bool(torch.equal(now, before)), bool(torch.equal(now, after))))
        TRACKER.set_states({"one": before.clone()})

    TRACKER.set_states({"one": before.clone()})
    interrupt_everywhere(fork, check)
    assert seen == {(True, False), (False, True)}


# ---- the base -----------------------------------------------------------------------------------


class Notes(Context):
    """Changes two things; notes what is undone."""

    def __init__(self, fail=None):
        self.notes, self.fail = [], fail

    def _enter(self):
        for name in "ab":
            self._undo_by(self.notes.append, name)
            if self.fail == name:
                raise ValueError(name)
        return self

    def _left(self, kind, value, traceback):
        self.notes.append(kind)
        return kind is KeyError


def test_changes_are_undone_the_newest_first():
    with Notes() as context:
        assert context.notes == []
        with pytest.raises(RuntimeError, match="Notes: it is active already; make another one"):
            context.__enter__()
        assert context.notes == []
    assert context.notes == ["b", "a", None]
    with context:
        raise KeyError  # taken, as _left says
    assert context.notes == ["b", "a", None, "b", "a", KeyError]


ONE_AT_A_TIME = {
    "autocast": te.autocast,
    "fp8_autocast": te.fp8_autocast,
    "autocast off": lambda: te.autocast(enabled=False),
    "quantized_model_init": te.quantized_model_init,
    "fp8_model_init": lambda: te.fp8_model_init(enabled=False),
    "recompute": lambda: te.distributed.activation_recompute_forward(True, True),
    "forward of torch": lambda: te.distributed.get_activation_recompute_contexts()[0],
    "recompute of torch": lambda: te.distributed.get_activation_recompute_contexts()[1],
    "known": recompute.known_to_modules,
    "in_region": lambda: thread_state.in_region(thread_state.RegionState()),
    "put back": lambda: recompute._put_back(lambda: TRACKER, TRACKER.get_states()),
    "real tensors": modes.real_tensors,
    "unseen": modes.unseen,
    "fork": lambda: TRACKER.fork("one"),
    "range": lambda: utils.get_nvtx_range_context("range"),
    "outside": lambda: outside_capture(torch.device("cpu")),
    "observe": lambda: te.observe(MODEL),
    "watch_finite": lambda: te.watch_finite(MODEL),
    "counting": te.counting,
    "undone": REGISTRY.undone_if_it_fails,
    "held": lambda: _Held(LOCK, True),
}
ANY_TIMES = {
    "policy": lambda: plugin.with_preference("reference"),
    "lock": lambda: LOCK,
    "export": lambda: te.export.onnx_export(False),
    "offload": lambda: te.cpu_offload.get_cpu_offload_context(False)[0],
}


@pytest.mark.parametrize("name", ONE_AT_A_TIME)
def test_an_object_is_in_use_once_at_a_time(name):
    """A second entry is refused and changes nothing; entered after its end it does its work again.

    Objects of a kind nest.
    """

    def now():
        found = {**own_state(), **torch_state()}
        return {key: found[key] for key in found if key != "state"}

    before = now()
    with Dispatch():  # for `unseen`
        around, context = now(), ONE_AT_A_TIME[name]()
        for _ in range(2):
            with context:
                inside = now()
                with pytest.raises(RuntimeError, match="it is active already; make another one"):
                    context.__enter__()
                assert now() == inside
                if name != "observe":  # of one model
                    with ONE_AT_A_TIME[name]():
                        pass
                assert now() == inside
            assert now() == around
            with pytest.raises(RuntimeError, match="this region is not active"):
                context.__exit__(None, None, None)
            assert now() == around
    assert now() == before


@pytest.mark.parametrize("name", ANY_TIMES)
def test_an_object_in_use_several_times(name):
    context = ANY_TIMES[name]()

    def now():
        return own_state(), torch_state(), plugin.get_policy()

    before = now()
    with context:
        inside = now()
        with context, context:
            assert now() == inside
        assert now() == inside
    assert now() == before and is_free(LOCK)


DECORATORS = {
    "autocast": (te.autocast, lambda: thread_state.current_state().depth),
    "quantized_model_init": (
        te.quantized_model_init,
        lambda: thread_state.current_state().quantized_init is not None,
    ),
    "recompute": (
        lambda: te.distributed.activation_recompute_forward(True),
        lambda: recompute._thread.enabled,
    ),
    "range": (lambda: utils.get_nvtx_range_context("range"), lambda: len(utils._RANGES)),
    "fork": (lambda: TRACKER.fork("one"), lambda: None),
    "export": (lambda: te.export.onnx_export(False), lambda: None),
}


@pytest.mark.parametrize("name", DECORATORS)
def test_a_decorated_function_that_calls_itself(name):
    """Each call has an object of its own."""
    made, look = DECORATORS[name]

    @made()
    def run(times):
        found = [look()]
        return (found + run(times - 1) + [look()]) if times else found

    before = look()
    for _ in range(2):
        outermost, *_, last = run(2)
        assert outermost == last and look() == before


def test_a_failed_entry_is_undone():
    context = Notes("b")
    with pytest.raises(ValueError, match="b"), context:
        raise AssertionError("entered")
    assert context.notes == ["b", "a"] and context._outer is None
    with pytest.raises(RuntimeError, match="Notes: this region is not active"):
        context.__exit__(None, None, None)


def test_what_fails_to_undo_is_tried_twice_and_the_others_are_undone():
    calls = []

    def undo(times):
        calls.append(times)
        if len(calls) <= times:
            raise Interrupt(times)

    class Failing(Context):
        def __init__(self, times):
            self.times = times

        def _enter(self):
            self._undo_by(calls.append, "last")
            self._undo_by(undo, self.times)

        def _left(self, *error):
            calls.append("left")

    for times in (1, 2):
        calls.clear()
        context = Failing(times)
        context.__enter__()
        with pytest.raises(Interrupt):
            context.__exit__(None, None, None)
        assert calls == [times, times, "last"] and context._outer is None


@pytest.mark.parametrize("records", [5, (1,), ((1,),), ((len, 5),), ((object(), ("a",), ()),)])
def test_records_that_are_none(records):
    class Wrong:
        _outer = None

        @_core.Leaving
        def __exit__(self, *error):
            raise AssertionError("left")

    context = Wrong()
    context._outer = records
    with pytest.raises(TypeError):
        context.__exit__(None, None, None)
    assert context._outer is None
