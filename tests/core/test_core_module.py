# SPDX-License-Identifier: Apache-2.0
"""The module object: names, stub, instances, contexts, backends and counters."""

import ast
import gc
import inspect
import weakref
from pathlib import Path

import native
import pytest
import torch
from native import ROWS, K, fresh_core, linear_plan, linear_tensors
from native_cases import CASES

import transformer_engine
from transformer_engine import _core as shared

FOLDER = Path(transformer_engine.__file__).parent
FILES = FOLDER / "_core.pyi", FOLDER / "_core_names.pyi"  # the second one is written by the build
STUB = [node for path in FILES for node in ast.parse(path.read_text()).body]


@pytest.fixture
def core():
    return fresh_core()


def public(core):
    return [name for name in dir(core) if not name.startswith("__")]


# ---- names ----


def test_every_callable_has_a_case(core):
    callables = {name for name in public(core) if callable(getattr(core, name))}
    records = {name for name in callables if hasattr(getattr(core, name), "_fields")}
    # These are made by make_plan, dispatchers and load_plugin.
    assert callables == {*CASES, *records, "Plan", "Operator", "NativeSlot"}


def test_every_operator_has_an_entry_point(core):
    assert set(core.op_names()) <= set(CASES)


def test_the_cases_are_valid_calls(core):
    for name, make in CASES.items():
        make(core).call(core, name)
        if name == "unregister_backend":
            core.unregister_backend("case")


def test_the_stub_has_the_names_of_the_module(core):
    declared = []
    for node in STUB:
        if isinstance(node, ast.AnnAssign):
            declared.append(node.target.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            declared.append(node.name)
    assert sorted(declared) == sorted(public(core))


def test_the_stub_has_the_fields_of_records(core):
    records = [name for name in public(core) if hasattr(getattr(core, name), "_fields")]
    assert len(records) == 10
    for node in STUB:
        if not isinstance(node, ast.ClassDef) or node.name not in records:
            continue
        records.remove(node.name)
        record = getattr(core, node.name)
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
        assert tuple(each.target.id for each in fields) == record._fields
        defaults = record._field_defaults
        for each in fields:
            if not isinstance(each.value, ast.Constant) or each.value.value is not ...:
                assert ast.literal_eval(each.value) == defaults[each.target.id]
    assert not records


def test_the_stub_has_the_signatures_of_the_module(core):
    for node in STUB:
        if not isinstance(node, ast.FunctionDef):
            continue
        stub = ast.parse(f"def f({ast.unparse(node.args)}): ...").body[0].args
        real = inspect.signature(getattr(core, node.name)).parameters.values()
        kinds = inspect.Parameter
        for kind, names in (
            (kinds.POSITIONAL_ONLY, stub.posonlyargs),
            (kinds.POSITIONAL_OR_KEYWORD, stub.args),
            (kinds.KEYWORD_ONLY, stub.kwonlyargs),
        ):
            assert [p.name for p in real if p.kind == kind] == [a.arg for a in names], node.name
        defaults = [ast.literal_eval(d) for d in (*stub.defaults, *stub.kw_defaults) if d]
        assert [p.default for p in real if p.default is not p.empty] == defaults, node.name


def test_constants(core):
    assert core.version == transformer_engine.__version__
    for code, name in enumerate(core.dtype_names()):
        assert getattr(core, f"DTYPE_{name.upper()}") == code
    flags = [
        value
        for name, value in vars(core).items()
        if name.startswith("LINEAR_") and isinstance(value, int)
    ]
    assert len(core.LINEAR_STAGES) == len(set(core.LINEAR_STAGES)) <= 32
    assert len(flags) >= 3


def test_dtypes_map_both_ways(core):
    for code in range(len(core.dtype_names())):
        assert core.dtype_code(core.torch_dtype(code)) == code
    assert core.torch_dtype(core.DTYPE_E4M3) is torch.float8_e4m3fn


# ---- instances ----


def test_instances_are_isolated():
    one, two = fresh_core(), fresh_core(bind=False)
    assert one is not two and one.Context is not two.Context
    with pytest.raises(RuntimeError, match="import transformer_engine.pytorch"):
        two.dtype_code(torch.float32)
    context = two.Context(two.DEVICE_CPU)
    with pytest.raises(TypeError, match="fill: context: expected a Context"):
        one.fill(torch.zeros(2, 2), 1.0, context=context)
    one.close_contexts()
    assert not context.closed


def test_plans_are_the_same_in_every_instance():
    plans = [linear_plan(core, 0) for core in (fresh_core(), fresh_core(bind=False), shared)]
    before = shared.plan_count()
    plans.append(linear_plan(shared, 0))
    assert len({plan.id for plan in plans}) == 1 and shared.plan_count() == before
    assert linear_plan(shared, 1).id != plans[0].id


def test_importing_twice_gives_one_module():
    import importlib

    assert importlib.import_module("transformer_engine._core") is shared
    assert importlib.reload(shared) is shared


def test_an_instance_is_collected():
    core = fresh_core()
    for name, make in CASES.items():
        if name != "unregister_backend":
            make(core).call(core, name)
    # A function that refers to its module makes a cycle through the operator table's record.
    core.register_backend("cycle", core.DEVICE_CPU, 1, {"fill": lambda args, core=core: None})
    gone = weakref.ref(core)
    del core, make
    gc.collect()
    assert gone() is None
    output = torch.zeros(2, 2)
    fresh_core().fill(output, 3.0)  # "cycle" is out of the table
    assert (output == 3.0).all()


def test_binding_again_replaces_the_binding(core):
    seen = []
    core.bind_torch(
        torch, lambda tensor: seen.append(type(tensor)) or tensor.as_subclass(torch.Tensor)
    )
    output = torch.zeros(2, 2).as_subclass(native.Sub)
    core.fill(output, 2.0)
    assert seen == [native.Sub] and (output.as_subclass(torch.Tensor) == 2.0).all()
    core.bind_torch(torch)
    with pytest.raises(TypeError, match="Sub"):
        core.fill(output, 2.0)


# ---- contexts ----


def test_context_life(core):
    context = core.Context(core.DEVICE_CPU)
    assert context.device == (core.DEVICE_CPU, 0) and not context.closed
    core.fill(torch.zeros(2, 2), 1.0, context=context)
    context.close()
    context.close()
    assert context.closed and context.device == (core.DEVICE_CPU, 0)
    with pytest.raises(RuntimeError, match="fill: context: it is closed: make a new Context"):
        core.fill(torch.zeros(2, 2), 1.0, context=context)


def test_context_type_is_final_and_immutable(core):
    with pytest.raises(TypeError):
        type("Derived", (core.Context,), {})
    with pytest.raises(TypeError):
        core.Context.extra = 1
    with pytest.raises(AttributeError):
        core.Context(core.DEVICE_CPU).extra = 1


def test_contexts_come_back_after_a_close(core):
    core.fill(torch.zeros(2, 2), 1.0)
    core.close_contexts()
    core.close_contexts()
    output = torch.zeros(2, 2)
    core.fill(output, 4.0)
    assert (output == 4.0).all()


def test_tuning_that_was_refused_is_not_kept(core):
    for enabled in (True, False):
        with pytest.raises(NotImplementedError, match="tune_gemm"):
            core.tune_gemm(core.DEVICE_CPU, 0, enabled, None)
    core.close_contexts()
    core.fill(torch.zeros(2, 2), 1.0)


@pytest.mark.gpu
def test_tuning_outlives_contexts(tmp_path):
    """The file of winners grows by a line for each problem that was timed."""
    core, file = fresh_core(), tmp_path / "winners"

    def run(rows):
        a, b, d = torch.randn(3, rows, rows, device="cuda", dtype=torch.bfloat16)
        core.gemm(d, a=a, b=b)
        return len(file.read_text().splitlines()) if file.exists() else 0

    assert run(256) == 0
    core.tune_gemm(core.DEVICE_CUDA, 0, True, file)
    assert run(512) == 1
    core.close_contexts()
    assert run(768) == 2
    core.tune_gemm(core.DEVICE_CUDA, 0, False)
    core.close_contexts()
    assert run(1024) == 2


@pytest.mark.gpu
def test_contexts_end_while_a_graph_is_captured():
    """As they do where they are garbage; what is captured stays valid."""
    core = fresh_core()
    a, b = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    core.gemm(product, a=a, b=b)
    core.cast(a, product)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = a * 2
        core.close_contexts()
    graph.replay()
    assert torch.equal(doubled, a * 2)


def test_a_context_in_use_is_not_closed(core):
    context = core.Context(core.DEVICE_CPU)
    core.register_backend("closer", core.DEVICE_CPU, 1, {"fill": lambda args: context.close()})
    with pytest.raises(RuntimeError, match="close: 1 calls are running"):
        core.fill(torch.zeros(2, 2), 1.0, context=context)
    core.unregister_backend("closer")
    context.close()
    assert context.closed


def test_no_cuda_context_without_cuda(core):
    if core.has_cuda():
        pytest.skip("built with CUDA")
    with pytest.raises(NotImplementedError, match="CUDA"):
        core.Context(core.DEVICE_CUDA)


# ---- backends ----


def test_a_python_backend_overrides_an_operator(core):
    seen = []

    def cast(args):
        seen.append(sorted(args))
        args["output"].copy_(args["input"] * 2)

    core.register_backend("double", core.DEVICE_CPU, 1, {"cast": cast})
    output = torch.zeros(ROWS, K, dtype=torch.bfloat16)
    core.cast(torch.ones(ROWS, K), output)
    core.unregister_backend("double")
    assert seen == [["input", "output"]] and (output == 2).all()
    core.cast(torch.ones(ROWS, K), output)
    assert (output == 1).all()


@pytest.mark.parametrize("name", sorted(fresh_core(bind=False).op_names()))
def test_not_implemented_goes_to_the_next_backend(core, name):
    seen = []
    core.register_backend(
        "no", core.DEVICE_CPU, 5, {name: lambda args: seen.append(args.keys()) or NotImplemented}
    )
    try:
        CASES[name](core).call(core, name)
    finally:
        core.unregister_backend("no")
    assert len(seen) == 1


def test_arguments_of_a_python_backend(core):
    got = {}

    def quantize(args):
        for key, value in args.items():
            got[key] = value.clone() if isinstance(value, torch.Tensor) else value
        return NotImplemented

    core.register_backend("spy", core.DEVICE_CPU, 5, {"quantize": quantize})
    x, row = torch.randn(ROWS, K), native.fp8(ROWS, K)
    try:
        core.quantize(
            x, mode=core.SCALING_TENSOR, row=row, scale=torch.tensor([2.0, 3.0]), power_2_scale=1,
            amax_epsilon=0.5,
        )  # fmt: skip
    finally:
        core.unregister_backend("spy")
    assert torch.equal(got["input"], x)
    assert got["row"].dtype is torch.float8_e4m3fn and got["column"] is None
    assert got["mode"] == core.SCALING_TENSOR and got["scale"].tolist() == [2.0]
    assert got["partials"] is None and got["power_2_scale"] == 1 and got["amax_epsilon"] == 0.5


def test_an_exception_of_a_python_backend_is_the_callers(core):
    class Special(Exception):
        pass

    def gemm(args):
        raise Special("of its own")

    plan = linear_plan(core, core.DIRECTION_FORWARD, core.RECIPE_NONE)
    core.register_backend("raiser", core.DEVICE_CPU, 1, {"gemm": gemm})
    try:
        with pytest.raises(Special, match="of its own"):
            core.run(plan, 0, 0, *linear_tensors()[:3])
    finally:
        core.unregister_backend("raiser")
    core.run(plan, 0, 0, *linear_tensors()[:3])


def test_a_backend_may_unregister_itself_in_a_call(core):
    def fill(args):
        core.unregister_backend("once")
        args["output"].fill_(9.0)

    core.register_backend("once", core.DEVICE_CPU, 1, {"fill": fill})
    output = torch.zeros(2, 2)
    core.fill(output, 1.0)
    assert (output == 9.0).all()
    core.fill(output, 1.0)
    assert (output == 1.0).all()


# ---- counters ----


def test_counters(core):
    core.reset_counters()
    assert core.counters() == {}
    core.run(linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *linear_tensors())
    counted = core.counters()
    assert counted["gemm.cpu.e4m3.e4m3"] == 1 and counted["op.cpu.quantize"] == 2
    core.reset_counters()
    assert core.counters() == {}
