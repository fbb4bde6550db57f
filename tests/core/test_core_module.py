# SPDX-License-Identifier: Apache-2.0
"""The module object: names, stub, instances, contexts, and what plans return through it."""

import ast
import gc
import inspect
import threading
import weakref
from pathlib import Path

import native
import pytest
import torch
from comparators import assert_nmse
from native import CASES, ROWS, K, N, fresh_core, linear_plan, linear_tensors, state
from tols import tol

import transformer_engine
from transformer_engine import _core as shared

STUB = ast.parse(Path(transformer_engine.__file__).with_name("_core.pyi").read_text())


@pytest.fixture
def core():
    return fresh_core()


def public(core):
    return [name for name in dir(core) if not name.startswith("__")]


# ---- names ----


def test_every_callable_has_a_case(core):
    callables = {name for name in public(core) if callable(getattr(core, name))}
    assert callables == set(CASES)


def test_every_operator_has_an_entry_point(core):
    assert set(core.op_names()) <= set(CASES)


def test_the_cases_are_valid_calls(core):
    for name, make in CASES.items():
        make(core).call(core, name)
        if name == "unregister_backend":
            core.unregister_backend("case")


def test_the_stub_has_the_names_of_the_module(core):
    declared = set()
    for node in STUB.body:
        if isinstance(node, ast.AnnAssign):
            declared.add(node.target.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            declared.add(node.name)
    declared.discard("PlanDescription")
    assert declared == set(public(core))


def test_the_stub_has_the_signatures_of_the_module(core):
    for node in STUB.body:
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
    assert linear_plan(fresh_core(), 0) == linear_plan(fresh_core(bind=False), 0)
    assert linear_plan(shared, 0) != linear_plan(shared, 1)


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
        core.gemm(a, b, d)
        return len(file.read_text().splitlines()) if file.exists() else 0

    assert run(256) == 0
    core.tune_gemm(core.DEVICE_CUDA, 0, True, file)
    assert run(512) == 1
    core.close_contexts()
    assert run(768) == 2
    core.tune_gemm(core.DEVICE_CUDA, 0, False)
    core.close_contexts()
    assert run(1024) == 2


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


# ---- run ----


def reference(tensors):
    return torch.nn.functional.linear(*tensors[:3])


def test_run_returns_outputs_and_saved(core):
    tensors = linear_tensors()
    plain = linear_plan(core, core.DIRECTION_FORWARD, core.RECIPE_NONE)
    output, saved = core.run(plain, 0, 0, *tensors[:3])
    assert saved is None and output.shape == (2, 3, N) and type(output) is torch.Tensor
    assert_nmse(output, reference(tensors), tol("sum", torch.float32, K))
    delayed = linear_plan(core, core.DIRECTION_FORWARD)
    output, saved = core.run(delayed, 1, 0, *tensors)
    assert saved.dtype is torch.uint8 and saved.shape == (core.plan_infer(delayed, ROWS)[0],)
    assert_nmse(output, reference(tensors), 2 * tol("round", torch.float8_e4m3fn))
    history = tensors[4]
    assert history[0, 1] == tensors[0].abs().max() and history[0, 2] == tensors[1].abs().max()
    assert history[0, 0] == 0 and history[0, 3] == 0
    grads = core.run(
        linear_plan(core, core.DIRECTION_BACKWARD),
        1,
        0,
        torch.randn(2, 3, N),
        tensors[1],
        *state(),
        saved,
    )
    assert [tuple(g.shape) for g in grads[:3]] == [(2, 3, K), (N, K), (N,)] and grads[3] is None


@pytest.mark.parametrize("leading", [(), (5,), (0,), (2, 0, 3), (1, 1), (2, 1, 3, 1, 2)])
def test_leading_dims(core, leading):
    tensors = linear_tensors()
    tensors[0] = torch.randn(*leading, K)
    output, _ = core.run(linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *tensors)
    assert output.shape == (*leading, N)


def test_sixty_dims(core):
    tensors = linear_tensors()
    tensors[0] = torch.randn(*[1] * 60, K)
    output, _ = core.run(linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *tensors)
    assert output.shape == (*[1] * 60, N)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        lambda x: torch.cat([x, x], dim=-1)[..., :K],
        lambda x: torch.stack([x, x], dim=-1)[..., 0],
        lambda x: x.flip(0).flip(0),
        lambda x: x.to_mkldnn().to_dense() if torch.backends.mkldnn.is_available() else x,
    ],
    ids=["permuted", "row stride", "column stride", "flipped", "round trip"],
)
def test_strides(core, change):
    tensors = linear_tensors()
    plan = linear_plan(core, core.DIRECTION_FORWARD)
    expected, _ = core.run(plan, 0, 0, *tensors)
    tensors[0] = change(tensors[0])
    output, _ = core.run(plan, 0, 0, *tensors)
    assert torch.equal(output, expected)


def test_expanded_gradient(core):
    tensors = linear_tensors()
    backward = linear_plan(core, core.DIRECTION_BACKWARD, core.RECIPE_NONE)
    expanded = torch.ones(()).expand(2, 3, N)
    got = core.run(backward, 0, 0, expanded, tensors[0], tensors[1])
    expected = core.run(backward, 0, 0, torch.ones(2, 3, N), tensors[0], tensors[1])
    assert all(torch.equal(a, b) for a, b in zip(got[:3], expected[:3], strict=True))


def test_negative_bit(core):
    output = torch.zeros(2, 2)
    core.cast(torch._neg_view(torch.ones(2, 2)), output)
    assert (output == -1.0).all()
    with pytest.raises(ValueError, match=r"cast: output: its negative bit.*resolve_neg"):
        core.cast(torch.ones(2, 2), torch._neg_view(output))
    z = torch.tensor([[1 + 2j], [3 + 4j]])
    output = torch.zeros(2, 1)
    core.cast(z.conj().imag, output)
    assert output.flatten().tolist() == [-2.0, -4.0]


def test_saved_may_be_none_where_nothing_was_saved(core):
    tensors = linear_tensors()
    backward = linear_plan(core, core.DIRECTION_BACKWARD, core.RECIPE_NONE)
    args = [torch.ones(2, 3, N), tensors[0], tensors[1]]
    assert len(core.run(backward, 0, 0, *args)) == len(core.run(backward, 0, 0, *args, None))
    with pytest.raises(TypeError, match="run: saved: this plan saves nothing: pass None"):
        core.run(backward, 0, 0, *args, torch.zeros(4, dtype=torch.uint8))


def test_deferred_weight_gradient_takes_rows(core):
    tensors = linear_tensors()
    _, saved = core.run(linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *tensors)
    grad_output = torch.randn(2, 3, N)
    now = core.run(
        linear_plan(core, core.DIRECTION_BACKWARD), 0, 0, grad_output, tensors[1], *state(), saved
    )
    put_off = {"weight_flags": core.VALUE_DEFER}
    backward = linear_plan(core, core.DIRECTION_BACKWARD, **put_off)
    outputs = native.buffers_of(core, backward, "output")
    assert outputs == ["grad_input", "grad_bias", "grad_output_column", "grad_output_scales"]
    later = core.run(backward, 0, 0, grad_output, tensors[1], *state(), saved)
    results = dict(zip(outputs, later, strict=False))
    wgrad = linear_plan(core, core.DIRECTION_DEFERRED, **put_off)
    given = [results[name] for name in native.buffers_of(core, wgrad, "input")]
    grad_weight, none = core.run(wgrad, 0, 0, *given, saved, ROWS)
    assert none is None and torch.equal(grad_weight, now[1])
    with pytest.raises(TypeError, match="run: rows: expected an int"):
        core.run(wgrad, 0, 0, *given, saved, saved)


def test_more_buffers_than_a_run_has_at_hand(core):
    """A chain whose backward has over 56 buffers and 40 stages, against torch."""
    depth = 12
    graph = native.chain_graph(core, depth, core.RECIPE_NONE)
    forward, backward = (graph.plan(d) for d in (core.DIRECTION_FORWARD, core.DIRECTION_BACKWARD))
    x = torch.randn(2, 3, K, requires_grad=True)
    weights = [torch.randn(K, K).div_(K**0.5).requires_grad_() for _ in range(depth)]
    biases = [torch.randn(K, requires_grad=True) for _ in range(depth)]
    y = x
    for w, b in zip(weights, biases, strict=True):
        y = torch.nn.functional.linear(y, w, b)
    parameters = [p for pair in zip(weights, biases, strict=True) for p in pair]
    given = {"input": x, "grad_output": torch.randn(2, 3, K)}
    given |= {f"n{i}_weight": w for i, w in enumerate(weights)}
    given |= {f"n{i}_bias": b for i, b in enumerate(biases)}
    given = {name: tensor.detach() for name, tensor in given.items()}

    def tensors_of(plan):
        return [given[name] for name in native.buffers_of(core, plan, "input", "parameter")]

    output, saved = core.run(forward, 0, 0, *tensors_of(forward))
    assert_nmse(output, y, depth * tol("sum", torch.float32, K))
    *grads, none = core.run(backward, 0, 0, *tensors_of(backward), saved)
    expected = torch.autograd.grad(y, [x, *parameters], given["grad_output"])
    for grad, exact in zip(grads, expected, strict=True):
        assert_nmse(grad, exact, 2 * depth * tol("sum", torch.float32, K))
    described = core.plan_describe(native.chain_graph(core, depth).plan(core.DIRECTION_BACKWARD))
    assert len(described["buffers"]) > 56 and len(described["stages"]) > 40 and none is None


def test_a_plan_that_does_nothing(core):
    """Rows are its only argument, and there is no tensor to tell a device."""
    plan = linear_plan(core, core.DIRECTION_DEFERRED, core.RECIPE_NONE)
    assert core.plan_describe(plan)["stages"] == () and core.plan_infer(plan, 3) == (0, 0, ())
    assert core.run(plan, 0, 0, ROWS) == (None,)


# ---- functions at stages ----


def run_staged(core, plan, functions, observer, *tensors):
    """run_staged, whose functions get lend() itself."""
    return core.run_staged(
        plan, 0, 0, functions, observer, lambda lend, plan, rows, slot: lend, *tensors
    )


def test_an_observer_sees_every_stage_and_changes_nothing(core):
    tensors = linear_tensors()
    plan = linear_plan(core, core.DIRECTION_FORWARD)
    output, saved = core.run(plan, 0, 0, *tensors)
    described, seen = core.plan_describe(plan), []
    output_number = [name for name, *_ in described["buffers"]].index("output")

    def look(stage, operator, lend, done):
        seen.append((stage, operator, done))
        if (stage, done) == ("gemm_output", True):
            assert torch.equal(lend(output_number), output)

    history = torch.zeros_like(tensors[4])
    again = run_staged(core, plan, {}, look, *tensors[:4], history)
    assert torch.equal(again[0], output) and torch.equal(history, tensors[4])
    assert again[1].shape == saved.shape
    assert seen == [
        (name, operator, done)
        for name, operator, *_ in described["stages"]
        for done in (False, True)
    ]


def test_an_external_stage_is_called(core):
    name = "quantize_input"
    plan = linear_plan(core, core.DIRECTION_FORWARD, external=native.stage_bit(core, name))
    described = core.plan_describe(plan)
    assert (name, "external", 0) in [stage[:3] for stage in described["stages"]]
    with pytest.raises(RuntimeError, match="run: plan: it has external stages: use run_staged"):
        core.run(plan, 0, 0, *linear_tensors())
    numbers = {buffer[0]: i for i, buffer in enumerate(described["buffers"])}
    tensors, calls, kept = linear_tensors(), [], []

    def make_buffers(lend, *rest):
        calls.append(rest)
        return lend

    def quantize(lend):
        forms = {name: lend(numbers[f"input_{name}"]) for name in ("row", "column")}
        kept.extend([lend, forms["row"], lend(numbers["output"])])
        assert lend(numbers["input"]) is tensors[0] and lend(numbers["scale"]) is tensors[3]
        scales = lend(numbers["input_scales"])
        core.quantize(
            tensors[0], mode=core.SCALING_TENSOR, row_scales=scales, column_scales=scales,
            scale=torch.tensor([2.0]), **forms,
        )  # fmt: skip

    functions = {name: quantize}
    output, _ = core.run_staged(plan, 1, 2, functions, None, make_buffers, *tensors)
    assert calls == [(plan, ROWS, 1)] and kept[2] is output
    assert_nmse(output, reference(tensors), 2 * tol("round", torch.float8_e4m3fn))
    assert tensors[4][0].nonzero().flatten().tolist() == [2]  # the weight's alone
    lend, row, _ = kept
    assert row.dtype is torch.float8_e4m3fn and row.shape == (ROWS, 32)  # outlives the run
    with pytest.raises(RuntimeError, match="run_staged: buffers: the run is over"):
        lend(0)


def test_a_run_within_a_run(core):
    """The function of a stage runs the same plan; each run has buffers of its own."""
    name = "gemm_output"
    plan = linear_plan(
        core, core.DIRECTION_FORWARD, core.RECIPE_NONE, external=native.stage_bit(core, name)
    )
    numbers = {buffer[0]: i for i, buffer in enumerate(core.plan_describe(plan)["buffers"])}
    tensors = linear_tensors()[:3]

    def inner(lend):
        lend(numbers["output"]).fill_(3.0)

    def outer(lend):
        mine = lend(numbers["output"])
        (theirs, _) = run_staged(core, plan, {name: inner}, None, *tensors)
        mine.copy_(theirs + 1)

    output, _ = run_staged(core, plan, {name: outer}, None, *tensors)
    assert (output == 4.0).all()


def test_an_exception_of_a_stage_is_the_callers(core):
    class Special(Exception):
        pass

    def fail(lend):
        raise Special("of its own")

    name = "gemm_output"
    plan = linear_plan(
        core, core.DIRECTION_FORWARD, core.RECIPE_NONE, external=native.stage_bit(core, name)
    )
    tensors = linear_tensors()[:3]
    with pytest.raises(Special, match="of its own"):
        run_staged(core, plan, {name: fail}, None, *tensors)
    with pytest.raises(Special, match="of its own"):
        run_staged(core, plan, {name: print}, lambda *_: fail(None), *tensors)


def test_threads(core):
    """Calls of several threads, while another closes the contexts that none is using."""
    tensors = linear_tensors()[:3]
    plan = linear_plan(core, core.DIRECTION_FORWARD, core.RECIPE_NONE)
    expected, _ = core.run(plan, 0, 0, *tensors)
    failures = []

    def work():
        for _ in range(200):
            if not torch.equal(core.run(plan, 0, 0, *tensors)[0], expected):
                failures.append("other bits")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    refused = 0
    while any(thread.is_alive() for thread in threads):
        try:
            core.close_contexts()
        except RuntimeError as error:
            assert "running" in str(error)
            refused += 1
    for thread in threads:
        thread.join()
    assert failures == []


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
