# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C at any moment, and forks at any moment: nothing hangs afterwards."""

import contextlib
import inspect
import os
import signal
import sys
import threading
import time

import pytest
import torch
from pytorch.helpers import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.execution import recompute, thread_state
from transformer_engine.pytorch.scaling_state import arenas, scaling
from transformer_engine.pytorch.torchside import locks

CPU = torch.device("cpu")
TIMEOUT = 60.0
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Interrupt(BaseException):
    """What a signal handler raises."""


# ---- at every point of a statement --------------------------------------------------------------


class InterruptAt:
    """A profiler that raises at event number `at` of `files`.

    CPython runs signal handlers when a function begins and when a call has ended. A profiler is
    called there, too, and what it raises comes out of the very same instruction. No handler runs at
    the return of a function in Python, which a profiler is told of as well.
    """

    def __init__(self, at, files, events=("call", "return", "c_return")):
        self.at, self.files, self.seen, self.events = at, files, 0, events

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename in self.files and event in self.events:
            self.seen += 1
            if self.seen == self.at:
                raise Interrupt


def use_state():
    """Everything that takes a lock: slots taken, freed and swept, scales updated, all dropped."""
    rule = arenas.rule_of(DelayedScaling(amax_history_len=2))
    handle = scaling.Slots(CPU, rule, None, (3, 2), "Linear", 1)
    del handle
    handle = scaling.Slots(CPU, rule, None, (3, 2), "Linear", 1)
    assert handle.live
    arenas.join(thread_state.RegionState(), handle.domain)
    scaling.update("forward", handle.domain)
    scaling.reset()


def finishes(function):
    """Whether a function ends in another thread."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    return not thread.is_alive()


def test_an_interrupt_leaves_no_lock_taken():
    files = {scaling.__file__, arenas.__file__, locks.__file__}
    at = 0
    while True:
        at += 1
        raised, before = False, sys.getprofile()
        sys.setprofile(InterruptAt(at, files))
        try:
            use_state()
        except Interrupt:
            raised = True
        finally:
            sys.setprofile(before)
        assert finishes(use_state), f"a lock is taken after an interrupt at point {at}"
        if not raised:
            break
    assert at > 60  # it has been interrupted everywhere


def test_a_lock_is_exclusive_and_reentrant():
    lock, inside, most = locks.Lock(), [], []

    @lock.held
    def work(depth=0):
        inside.append(1)
        most.append(len(inside) - depth)
        time.sleep(0.001)
        if depth == 0:
            work(1)
        inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 16


# ---- at every point of a context ----------------------------------------------------------------


def region_state():
    """Everything that contexts of this thread set."""
    now = thread_state.current_state()
    fields = ("enabled", "calibrating", "recipe", "group", "depth", "owes_update", "quantized_init")
    kept = tuple(getattr(now, name) for name in fields)
    phase = (recompute._thread.enabled, recompute._thread.repeats, recompute._thread.runs)
    return (now, *kept, *phase, recompute._thread.depth)


def nested_regions():
    with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
        with te.autocast(enabled=False, calibrating=True):
            len("")


def quantized_init():
    with te.quantized_model_init(), te.quantized_model_init(enabled=False):
        len("")


def recomputing():
    with te.distributed.activation_recompute_forward(True, True), recompute.known_to_modules():
        len("")


def in_another_region():
    with thread_state.in_region(thread_state.RegionState()):
        len("")


def decorated():
    te.quantized_model_init()(te.autocast()(len))("")


CONTEXTS = [nested_regions, quantized_init, recomputing, in_another_region, decorated]


@pytest.mark.parametrize("function", CONTEXTS)
def test_an_interrupt_leaves_no_region_active(function):
    """Also where the traceback keeps the contexts: nothing hangs on their being collected."""
    files = {module.__file__ for module in (scaling, thread_state, recompute, quantization)}
    files.add(inspect.getfile(te.autocast))
    files |= {contextlib.__file__, __file__}
    before, at, errors = region_state(), 0, []
    while True:
        at += 1
        profiler = sys.getprofile()
        sys.setprofile(InterruptAt(at, files, ("call", "c_return")))
        try:
            function()
        except Interrupt as error:
            errors.append(error)
        else:
            break
        finally:
            sys.setprofile(profiler)
        assert region_state() == before, f"a region is active after an interrupt at point {at}"
    assert at > 5
    layer, x = te.Linear(16, 16, device="cpu"), torch.randn(16, 16)
    step(layer, x)
    first = te.scales(layer)["input"]
    step(layer, 1024 * x)
    assert te.scales(layer)["input"].amax == 1024 * first.amax  # scales are updated
    assert te.scales(layer)["input"].scale < first.scale


def test_an_exit_without_an_entry_is_refused():
    for context in (te.autocast(), te.quantized_model_init(), thread_state.in_region(None)):
        with pytest.raises(RuntimeError, match=f"{type(context).__name__}: this region is not"):
            context.__exit__(None, None, None)


# ---- a GEMM of seconds --------------------------------------------------------------------------


@pytest.fixture
def alarm():
    """Set a timer: `alarm(seconds, action)` runs the action in a signal handler."""
    old = signal.getsignal(signal.SIGALRM)

    def start(seconds, action):
        signal.signal(signal.SIGALRM, lambda *_: action())
        signal.setitimer(signal.ITIMER_REAL, seconds)

    yield start
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, old)


def interrupt():
    raise Interrupt


@pytest.fixture(params=[1, 2])
def threads(request):
    """Threads of CPU kernels."""
    old = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(old)


@pytest.mark.parametrize("direction", ["operator", "forward", "backward"])
def test_a_long_gemm_is_interrupted(direction, threads, alarm):
    layer = te.Linear(6000, 6000, bias=False, device="cpu")
    with torch.no_grad():
        layer.weight.fill_(0.5)
    x = torch.ones(6000 if direction != "backward" else 1500, 6000, requires_grad=True)
    out = torch.empty(6000, 6000)
    if direction == "backward":
        y = layer(x)
        grad = torch.ones_like(y)
        y[:1].backward(grad[:1], retain_graph=True)  # torch imports much at its first backward
    started = time.monotonic()
    alarm(0.1, interrupt)
    with pytest.raises(Interrupt):
        if direction == "operator":
            _core.gemm(out, a=x.detach(), b=layer.weight.detach(), b_transposed=True)
        elif direction == "forward":
            layer(x)
        else:
            y.backward(grad)
    stopped = time.monotonic() - started
    small = torch.ones(4, 6000)
    assert (layer(small) == 3000).all()  # what follows is whole
    assert stopped < 30


@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_a_long_attention_is_interrupted(op, threads, alarm):
    """Half a million queries and keys would take minutes."""
    x, out = torch.ones(1, 1 << 19, 1, 16), torch.empty(1, 1 << 19, 1, 16)
    statistics = torch.zeros(1, 1, 1 << 19)
    small = torch.ones(1, 4, 1, 16)
    _core.attention(small, small, small, torch.empty_like(small))
    started = time.monotonic()
    alarm(0.1, interrupt)
    with pytest.raises(Interrupt):
        if op == "attention":
            _core.attention(x, x, x, out)
        else:
            other = torch.empty_like(out)
            _core.attention_backward(x, x, x, x, x, statistics, grad_query=out, grad_key=other)
    stopped = time.monotonic() - started
    out = torch.empty_like(small)
    _core.attention(small, small, small, out)
    assert_same_bits(out, small)  # what follows is whole
    assert stopped < 30


def test_a_handler_that_returns_interrupts_nothing(threads, alarm):
    layer = te.Linear(4096, 4096, bias=False, device="cpu")
    x = torch.randn(2048, 4096)
    with torch.no_grad():
        expected = layer(x)
        ran = []
        alarm(0.02, lambda: ran.append(time.monotonic()))
        out = layer(x)
        while not ran:
            out = layer(x)
    assert_same_bits(out, expected)


def test_another_thread_s_gemm_goes_on(alarm):
    layer = te.Linear(3000, 3000, bias=False, device="cpu")
    x, results = torch.randn(3000, 3000), []

    def work():
        with torch.no_grad():
            results.append(layer(x))

    thread = threading.Thread(target=work)
    alarm(0.05, interrupt)
    with pytest.raises(Interrupt):
        thread.start()
        while True:
            time.sleep(0.01)
    thread.join(TIMEOUT)
    with torch.no_grad():
        assert_same_bits(results[0], layer(x))


# ---- forked children ----------------------------------------------------------------------------


def in_child(function):
    """Run a function in a forked child; fail where it raises or hangs."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException as error:  # noqa: BLE001 - told below
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            assert status == 0, f"the child ended with status {status}"
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


def step(layer, x):
    """A forward in FP8, and the update of its scales.

    No torch operator that would use torch's own threads, and no backward: torch refuses that in a
    child where there is a GPU.
    """
    with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
        return layer(x)


@pytest.mark.parametrize(
    "lock", [scaling._UPDATING, arenas.ARENAS_LOCK], ids=["updating", "arenas"]
)
def test_a_fork_while_another_thread_holds_a_lock(lock):
    layer = te.Linear(16, 16, device="cpu")
    x = torch.randn(16, 16)
    step(layer, x)
    taken, done = threading.Event(), threading.Event()

    @lock.held
    def hold():
        taken.set()
        done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert taken.wait(TIMEOUT)

        def child():
            step(layer, x)
            step(te.Linear(16, 32, device="cpu"), x)
            te.reset()

        in_child(child)
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("user", ["transformer_engine", "torch"])
def test_cpu_kernels_in_a_child_whose_parent_used_threads(user):
    """GNU's OpenMP waits in a child for the threads of a team that only the parent has."""
    layer = te.Linear(512, 512, device="cpu")
    x = torch.randn(512, 512)
    with torch.no_grad():
        expected = layer(x)
    if user == "torch":
        torch.randn(512, 512) @ x

    def child():
        with torch.no_grad():
            found = layer(x)
        assert (found.numpy() == expected.numpy()).all()
        step(layer, x)

    in_child(child)


def test_a_child_updates_the_state_of_the_cpu_alone(monkeypatch):
    layer = te.Linear(16, 16, device="cpu")
    x = torch.randn(16, 16)
    step(layer, x)
    domain = layer._slots.domain
    (arena,) = domain.arenas["forward"].values()
    key = (torch.device("meta"), *arena.key[1:])
    elsewhere = arenas.Arena(domain, "forward", key, arena.rule, None)
    monkeypatch.setitem(domain.arenas["forward"], key, elsewhere)

    def child():
        assert list(domain.arenas["forward"].values()) == [arena]
        step(layer, x)

    in_child(child)
    assert list(domain.arenas["forward"].values()) == [arena, elsewhere]


def test_a_child_of_a_child():
    layer = te.Linear(64, 64, device="cpu")
    x = torch.randn(64, 64)
    step(layer, x)

    def child():
        step(layer, x)
        in_child(lambda: step(layer, x))

    in_child(child)


def test_contexts_of_a_child_while_a_call_of_the_parent_runs():
    x = torch.ones(512, 512)
    out, own = torch.empty(512, 512), _core.Context(_core.DEVICE_CPU)
    stop = threading.Event()

    def work():
        while not stop.is_set():
            _core.gemm(torch.empty(512, 512), a=x, b=x)

    thread = threading.Thread(target=work)
    thread.start()
    try:

        def child():
            _core.close_contexts()  # no call of this process is running
            _core.gemm(out, a=x, b=x)
            try:
                _core.gemm(out, a=x, b=x, context=own)
            except RuntimeError as error:
                assert "forked" in str(error) and "new one" in str(error)
            else:
                raise AssertionError("a context of the parent was used")
            own.close()

        for _ in range(5):
            in_child(child)
    finally:
        stop.set()
        thread.join()
    _core.gemm(out, a=x, b=x, context=own)  # the parent's goes on
    assert (out == 512).all()


class Encoded(torch.utils.data.Dataset):
    """Samples that a module makes in the workers."""

    def __init__(self):
        self.layer = te.Linear(256, 256, device="cpu")

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad(), te.autocast():
            return self.layer(torch.full((256, 256), float(index)))


def test_modules_in_the_workers_of_a_data_loader():
    data = Encoded()
    expected = [data[i] for i in range(4)]
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=TIMEOUT
    )
    assert_same_bits(list(loader), expected)


@pytest.mark.gpu
def test_cuda_in_a_forked_child_says_what_to_do():
    layer = te.Linear(16, 16, device="cuda")
    x = torch.ones(16, 16, device="cuda")
    weight = layer.weight.detach()
    out = layer(x).detach()
    step(layer, x)  # its scaling state is on the device
    torch.cuda.synchronize()

    def child():
        try:
            _core.gemm(out, a=x, b=weight, b_transposed=True)
        except RuntimeError as error:
            assert "spawn" in str(error), error
        else:
            raise AssertionError("CUDA was used in a forked child")
        step(te.Linear(16, 16, device="cpu"), torch.ones(16, 16))

    in_child(child)
    assert layer(x).isfinite().all()
