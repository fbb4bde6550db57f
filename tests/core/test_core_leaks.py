# SPDX-License-Identifier: Apache-2.0
"""Reference counts and memory over loops of calls, for every name of the module."""

import ctypes
import gc
import sys
import tracemalloc

import native
import pytest
import torch
from native import fresh_core
from native_cases import CASES, Case

CALLS = 200


@pytest.fixture(scope="module")
def core():
    return fresh_core()


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """Leave what is imported out of the collections of this file: they take 50 ms otherwise."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def heap_bytes():
    """Bytes that malloc has handed out, or None without glibc."""
    try:
        call = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    call.restype = MallocInfo
    info = call()
    return info.uordblks + info.hblkhd


def objects(case: Case):
    """What a call gets, containers' items included."""
    found = [*case.args, *case.kwargs.values()]
    for value in list(found):
        if isinstance(value, list):
            found += value
        elif isinstance(value, dict):
            found += value.values()
    return found


def changed(watched, work):
    """What has other counts of references after the work: (type, before, after)."""
    gc.collect()
    before = counts(watched)
    work()
    gc.collect()
    rows = zip(watched, before, counts(watched), strict=True)
    return [(type(value), b, a) for value, b, a in rows if abs(a - b) > 20]


def repeat(core, name, case, calls):
    for _ in range(calls):
        case.call(core, name)


def counts(values):
    return [sys.getrefcount(value) for value in values]


@pytest.mark.parametrize("name", sorted(CASES))
def test_references(core, name):
    case = CASES[name](core)
    try:
        repeat(core, name, case, 3)
        watched = [*objects(case), core, core.Context, None, True, torch.Tensor, torch.empty]
        found = changed(watched, lambda: repeat(core, name, case, CALLS))
    finally:
        if name == "unregister_backend":
            core.unregister_backend("case")
    assert found == []


@pytest.mark.parametrize("name", sorted(CASES))
def test_references_of_failing_calls(core, name):
    case = CASES[name](core)
    wrong = object()
    failing = []
    for at in range(len(case.args)):
        args = list(case.args)
        args[at] = wrong
        failing.append((args, case.kwargs))
    failing += [(case.args, case.kwargs | {key: wrong}) for key in case.kwargs]
    failing.append(([*case.args, wrong, wrong, wrong, wrong], {}))
    watched = [*objects(case), wrong, core, core.Context]

    def attempt():
        for args, kwargs in failing:
            try:
                getattr(core, name)(*args, **kwargs)
            except (TypeError, ValueError, NotImplementedError):
                continue
            case.undo()  # a flag may be any object

    try:
        attempt()
        found = changed(watched, lambda: [attempt() for _ in range(50)])
    finally:
        if name == "unregister_backend":
            core.unregister_backend("case")
        core.bind_torch(torch)
    assert found == []


@pytest.mark.parametrize("name", sorted(CASES))
def test_memory(core, name):
    """Neither Python's allocator nor malloc grows; a first try may still fill caches of torch."""
    case = CASES[name](core)
    try:
        repeat(core, name, case, 50)
        for _ in range(4):
            gc.collect()
            tracemalloc.start()
            heap = heap_bytes()
            traced = tracemalloc.get_traced_memory()[0]
            repeat(core, name, case, CALLS)
            gc.collect()
            traced = tracemalloc.get_traced_memory()[0] - traced
            tracemalloc.stop()
            heap = 0 if heap is None else heap_bytes() - heap
            if traced <= 4096 and heap <= 4096:
                break
    finally:
        if name == "unregister_backend":
            core.unregister_backend("case")
    assert traced <= 4096
    assert heap <= 4096


def test_memory_of_plans_backward_and_copies(core):
    """Copies of strange strides, negative bits and saved buffers go back."""
    tensors = native.linear_tensors()
    forward = native.linear_plan(core, core.DIRECTION_FORWARD)
    backward = native.linear_plan(core, core.DIRECTION_BACKWARD)
    chunk = native.state()
    _, saved = core.run(forward, 0, 0, *tensors)
    expanded = torch.ones(()).expand(2, 3, native.N)
    negative = torch._neg_view(tensors[0])
    watched = [*tensors, *chunk, saved, expanded, negative]

    def step():
        core.run(backward, 0, 0, expanded, tensors[1], *chunk, saved)
        core.run(forward, 0, 0, negative, *tensors[1:])

    for _ in range(20):
        step()
    before = counts(watched)
    for _ in range(4):
        heap = heap_bytes()
        for _ in range(CALLS):
            step()
        grown = 0 if heap is None else heap_bytes() - heap
        if grown <= 4096:
            break
    assert grown <= 4096
    assert counts(watched) == before


def test_memory_of_plans_of_ever_new_shapes(core):
    """Of each thousands of bytes, that go with it."""
    tensors = native.linear_tensors()
    first, before = 1, core.plan_count()

    def step(outputs):
        graph = native.Graph(core)
        graph.linear(graph.input(), graph.result(outputs))
        plan = graph.plan(core.DIRECTION_FORWARD)
        core.run(plan, 0, 0, tensors[0], torch.ones(outputs, native.K), torch.ones(outputs), *chunk)
        assert core.plan_count() == before + 1

    chunk = native.state()
    for _ in range(5):
        heap = heap_bytes()
        for outputs in range(first, first + CALLS):
            step(outputs)
        grown = 0 if heap is None else heap_bytes() - heap
        first += CALLS
        if grown <= 4096:
            break
    assert grown <= 4096 and core.plan_count() == before


def test_memory_of_instances():
    def make():
        core = fresh_core()
        core.run(native.linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *native.linear_tensors())
        core.counters()

    for _ in range(5):
        make()
    gc.collect()
    for _ in range(4):
        heap = heap_bytes()
        for _ in range(20):
            make()
        gc.collect()
        grown = 0 if heap is None else heap_bytes() - heap
        if grown <= 64 << 10:
            break
    assert grown <= 64 << 10
