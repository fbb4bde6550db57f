# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments: an exception that names argument, value and fix, and nothing has changed."""

import sys

import native
import pytest
import torch
from core.junk import ACCEPTED, JUNK, STRANGE, core
from native import ROWS, SLOTS, K, N, fp8, fresh_core, linear_plan, linear_tensors, state
from native_cases import CASES


def raw(tensor):
    """Bytes of a dense tensor, in a copy."""
    return tensor.detach().clone().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def snapshot(values):
    """Bytes of the plain tensors among the arguments of a call."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return [
        (t, raw(t))
        for t in values
        if type(t) in plain and t.device.type == "cpu" and t.layout is torch.strided
    ]


def unchanged(before):
    return all(torch.equal(raw(t), bits) for t, bits in before)


def attempt(name, args, kwargs):
    """Call with wrong arguments: success, or a proper exception and untouched tensors."""
    before = snapshot([*args, *kwargs.values()])
    try:
        getattr(core, name)(*args, **kwargs)
    except ACCEPTED as error:
        assert str(error), name
        assert unchanged(before), f"{name} changed a tensor before it raised {error!r}"
        return error
    return None


@pytest.mark.parametrize("name", sorted(CASES))
def test_no_argument_crashes(name):
    case = CASES[name](core)
    try:
        for at in range(len(case.args)):
            for value in JUNK.values():
                args = list(case.args)
                args[at] = value
                attempt_and_undo(name, args, case.kwargs)
        for key in case.kwargs:
            for value in JUNK.values():
                attempt_and_undo(name, case.args, case.kwargs | {key: value})
        for value in JUNK.values():
            attempt_and_undo(name, [*case.args, value], case.kwargs)
            attempt_and_undo(name, case.args, case.kwargs | {"no_such_keyword": value})
        for count in range(len(case.args)):
            attempt_and_undo(name, case.args[:count], case.kwargs)
    finally:
        core.bind_torch(torch)
        for backend in ("case", "no tensor"):
            try:
                core.unregister_backend(backend)
            except ValueError:
                pass


def attempt_and_undo(name, args, kwargs):
    error = attempt(name, args, kwargs)
    if error is not None:
        return
    if name == "register_backend":
        core.unregister_backend(args[0])
    elif name == "unregister_backend":
        core.register_backend(args[0], core.DEVICE_CPU, 1, {})
    elif name == "bind_torch":
        core.bind_torch(torch)


@pytest.mark.parametrize("value", [v for k, v in JUNK.items() if k != "None"], ids=lambda v: None)
def test_references_of_wrong_arguments(value):
    calls = [
        lambda: core.run(value, 0, 0),
        lambda: core.run(linear_plan(core, 0), 0, 0, value, *[value] * 4),
        lambda: core.quantize(value, row=value, scale=value),
        lambda: core.gemm(value, a=value, b=value, context=value),
        lambda: core.register_backend(value, value, value, value),
        lambda: core.plan_infer(value, value),
        lambda: core.make_plan(0, value),
        lambda: core.make_plan(0, {"values": value, "nodes": value}),
        lambda: core.make_plan(0, {"values": (value,), "nodes": (value,)}),
        lambda: core.read_graph(value),
        lambda: core.run_staged(linear_plan(core, 0), 0, 0, value, value, value, value),
        lambda: core.dtype_code(value),
    ]
    for call in calls:
        for _ in range(3):
            with pytest.raises(ACCEPTED):
                call()
    before = sys.getrefcount(value)
    for call in calls:
        for _ in range(20):
            try:
                call()
            except ACCEPTED:
                pass
    assert abs(sys.getrefcount(value) - before) < 5


# ---- the texts ----


def run_with(**changes):
    """A delayed forward with some arguments replaced, and everything that it could have changed."""
    tensors = dict(
        zip(("input", "weight", "bias", "scale", "history"), linear_tensors(), strict=True)
    )
    tensors |= changes
    before = snapshot(tensors.values())
    core.reset_counters()
    with pytest.raises(ACCEPTED) as raised:
        core.run(linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *tensors.values())
    assert unchanged(before) and core.counters() == {}
    return raised.value


RUN_ERRORS = [
    ("input", lambda: "text", TypeError, ["expected a torch.Tensor", "'str'"]),
    ("input", lambda: None, TypeError, ["expected a torch.Tensor", "NoneType"]),
    (
        "input",
        lambda: torch.zeros(ROWS, K + 1),
        ValueError,
        ["last dim", f"{K + 1}", f"expected {K}"],
    ),
    ("input", lambda: torch.zeros(()), ValueError, ["0 dims", "expected at least 1"]),
    ("input", lambda: torch.zeros(ROWS, K).half(), TypeError, ["f16", "expected f32", ".to()"]),
    ("input", lambda: STRANGE["complex"], TypeError, ["torch.complex64", "not supported"]),
    ("input", lambda: STRANGE["float64"], TypeError, ["torch.float64", "not supported"]),
    ("input", lambda: STRANGE["meta"], TypeError, ["no memory", "plain dense tensor"]),
    (
        "input",
        lambda: STRANGE["sparse"],
        TypeError,
        ["no memory", "plain dense tensor"],
    ),
    ("input", lambda: STRANGE["fake"], TypeError, ["FakeTensor", "plain"]),
    ("input", lambda: STRANGE["wrapper"], TypeError, ["Wrapper", "plain"]),
    ("input", lambda: STRANGE["subclass"], TypeError, ["Sub", "plain"]),
    ("weight", lambda: torch.zeros(N, K, 1), ValueError, ["3 dims", "expected 2"]),
    (
        "weight",
        lambda: torch.zeros(N + 1, K),
        ValueError,
        ["first dim", f"{N + 1}", f"expected {N}"],
    ),
    ("bias", lambda: torch.zeros(N, 1), ValueError, ["2 dims", "expected 1"]),
    ("bias", lambda: torch.zeros(N - 1), ValueError, [f"{N - 1}", f"expected {N}"]),
    ("scale", lambda: torch.zeros(0), ValueError, ["size 0", "at least 1"]),
    ("history", lambda: torch.zeros(SLOTS, 4).t(), ValueError, ["strides", "contiguous"]),
    ("history", lambda: torch.zeros(4, SLOTS).double(), TypeError, ["torch.float64"]),
]


@pytest.mark.parametrize("argument,value,kind,words", RUN_ERRORS)
def test_run_names_argument_value_and_fix(argument, value, kind, words):
    error = run_with(**{argument: value()})
    assert type(error) is kind
    for word in (f"run: {argument}:", *words):
        assert word in str(error)


def test_run_counts_and_numbers():
    plan = linear_plan(core, core.DIRECTION_FORWARD)
    tensors = linear_tensors()
    with pytest.raises(TypeError, match="run: expected 5 tensors, got 4 arguments for them"):
        core.run(plan, 0, 0, *tensors[:4])
    with pytest.raises(
        TypeError, match="run: plan: expected a Plan, of make_plan, got <class 'str'"
    ):
        core.run("plan", 0, 0, *tensors)
    with pytest.raises(TypeError, match="plan: expected a Plan"):  # of another instance
        fresh_core().run(plan, 0, 0, *tensors)
    with pytest.raises(TypeError, match="cannot create"):
        core.Plan()
    with pytest.raises(ValueError, match="run: slot_fwd: -1 is out of range, expected 0 to"):
        core.run(plan, -1, 0, *tensors)
    before = snapshot(tensors)
    with pytest.raises(ValueError, match=f"slot {SLOTS} is outside the chunk of {SLOTS} slots"):
        core.run(plan, SLOTS, 0, *tensors)
    assert unchanged(before)


def test_rows_and_saved_must_agree():
    tensors = linear_tensors()
    _, saved = core.run(linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *tensors)
    plan = linear_plan(core, core.DIRECTION_BACKWARD)
    chunk = state()
    with pytest.raises(
        TypeError, match="run: saved: expected a uint8 tensor of [0-9]+ bytes, got None"
    ):
        core.run(plan, 0, 0, torch.ones(2, 3, N), tensors[1], *chunk, None)
    with pytest.raises(
        ValueError, match=r"run: saved: [0-9]+ bytes, expected at least [0-9]+ for 600 rows"
    ):
        core.run(plan, 0, 0, torch.ones(600, N), tensors[1], *chunk, saved)
    with pytest.raises(TypeError, match="run: saved: dtype f32, expected u8"):
        core.run(plan, 0, 0, torch.ones(2, 3, N), tensors[1], *chunk, saved.float())
    with pytest.raises(
        ValueError, match="run: input: its leading dims hold 5 rows, expected 6 as in grad_output"
    ):
        core.run(
            linear_plan(core, core.DIRECTION_BACKWARD, core.RECIPE_NONE),
            0, 0, torch.ones(6, N), torch.zeros(5, K), tensors[1],
        )  # fmt: skip
    assert (chunk[1] == 0).all()


def test_subclass_texts_come_from_classify():
    own = fresh_core()
    own.bind_torch(
        torch, lambda tensor: (_ for _ in ()).throw(TypeError(f"no {type(tensor).__name__}"))
    )
    with pytest.raises(TypeError, match="no Sub"):
        own.fill(STRANGE["subclass"], 1.0)
    own.bind_torch(torch, lambda tensor: tensor)
    with pytest.raises(TypeError, match="fill: output: classify gave .*Sub"):
        own.fill(STRANGE["subclass"], 1.0)


def test_vmap_and_functional_transforms():
    """A transformed tensor is an exact Tensor without memory of its own."""

    def inside(x):
        with pytest.raises(TypeError, match="transformed.*plain dense"):
            core.cast(x, torch.zeros(3, 3))
        return x

    torch.vmap(inside)(torch.zeros(2, 3, 3))


def test_fake_mode_gives_no_silent_result():
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = linear_tensors()
    with FakeTensorMode(), pytest.raises(TypeError, match="fake"):
        core.run(linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *tensors)
    assert (tensors[4] == 0).all()


class OtherEmpty(torch.overrides.TorchFunctionMode):
    """Gives another tensor in the place of a new one."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return self.made if function is torch.empty else function(*args, **(kwargs or {}))


@pytest.mark.parametrize("what", ["few elements", "another device"])
@pytest.mark.parametrize("call", ["workspace", "l2norm", "plan"])
def test_a_mode_that_makes_other_tensors(call, what):
    """Nothing is written to memory that is too small, or to what is no memory."""
    x, ones = torch.randn(64, 64), torch.ones(64)
    calls = {
        "workspace": lambda: core.norm_backward(
            x, x, 1, ones, grad_input=x.clone(), gamma_grad=ones.clone(), gamma=ones
        ),
        "l2norm": lambda: core.l2norm((x,), None, None, True),
        "plan": lambda: core.run(
            linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *linear_tensors()
        ),
    }
    arena = torch.zeros(1 << 16, dtype=torch.uint8)
    few = what == "few elements"
    made = arena[:3] if few else torch.empty(1 << 16, dtype=torch.uint8, device="meta")
    error = ValueError if few else TypeError
    with OtherEmpty(made), pytest.raises(error, match="another tensor" if few else "no memory"):
        calls[call]()
    assert not arena.any()


def test_fake_mode_around_norms_of_lists():
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = torch.randn(8)
    with FakeTensorMode(), pytest.raises(TypeError, match=r"l2norm.*memory"):
        core.l2norm((real,), None, None, True)


def x24():
    return torch.zeros(ROWS, K)


OP_ERRORS = [
    (
        lambda: core.quantize(x24(), mode=core.SCALING_TENSOR, row=fp8(ROWS, K)),
        ValueError,
        "quantize: mode: neither scale nor partials is given",
    ),
    (
        lambda: core.quantize(x24(), row=x24(), mode=1, scale=torch.ones(1)),
        TypeError,
        "quantize: row:",
    ),
    (
        lambda: core.quantize(x24(), row=fp8(ROWS, K), scale=torch.ones(1).double()),
        TypeError,
        "quantize: scale: dtype",
    ),
    (
        lambda: core.quantize(x24(), scale=torch.zeros(0)),
        ValueError,
        "quantize: scale: 0 elements, expected at least 1",
    ),
    (
        lambda: core.quantize(x24(), partials=torch.zeros(8)),
        ValueError,
        "quantize: partials: 8 elements",
    ),
    (
        lambda: core.quantize(x24(), amax_epsilon="x"),
        TypeError,
        "quantize: amax_epsilon: expected a float",
    ),
    (lambda: core.quantize(None), TypeError, "quantize: input: expected a torch.Tensor, got None"),
    (
        lambda: core.dequantize(x24(), row=fp8(ROWS, K), row_scales=torch.ones(2)),
        ValueError,
        "dequantize: mode: the input is not quantized",
    ),
    (lambda: core.gemm(x24(), a=x24(), b=x24()), ValueError, "gemm: d:"),
    (
        lambda: core.transpose(x24(), x24()),
        TypeError,
        "transpose: input: dtype f32, expected one-byte",
    ),
    (
        lambda: core.cast(x24(), torch.zeros(K, ROWS).t()),
        ValueError,
        "cast: output: its strides.*contiguous",
    ),
    (lambda: core.fill(x24(), "x"), TypeError, "fill: value: expected a float, got <class 'str'>"),
    (
        lambda: core.fill(x24(), 1.0, context=3),
        TypeError,
        "fill: context: expected a Context or None",
    ),
    (lambda: core.scaling_update(*state(), -1.0), ValueError, "scaling_update: fp8_max: -1"),
    (
        lambda: core.scaling_update(torch.ones(3), torch.zeros(2, SLOTS), 448.0),
        ValueError,
        "scaling_update: scale:",
    ),
    (lambda: core.amax(x24()), TypeError, "partials"),
    (lambda: core.plan_infer(linear_plan(core, 0), -1), ValueError, "plan_infer: rows: -1"),
    (
        lambda: core.plan_scratch(linear_plan(core, 0), 1, 9),
        ValueError,
        "plan_scratch: device_type: 9",
    ),
    (lambda: core.op_workspace("fills", {}, 0), ValueError, "fills"),
    (lambda: core.op_workspace("fill", 3, 0), TypeError, "op_workspace: fields: expected a dict"),
    (lambda: core.op_workspace("fill", {"no": 1.0}, 0), ValueError, "some are none of fill"),
    (lambda: core.op_workspace("fill", {"output": 3}, 0), TypeError, "expected .dtype, shape."),
    (lambda: core.op_workspace("fill", {"output": (0, 3)}, 0), TypeError, "expected .dtype, shape"),
    (lambda: core.op_workspace("fill", {"output": (0, (-1, 3))}, 0), ValueError, "output: -1"),
    (lambda: core.op_workspace("fill", {"output": (99, (1, 3))}, 0), ValueError, "output: 99"),
    (lambda: core.op_workspace("rope", {"input": (0, (1,) * 5)}, 0), ValueError, "it has 5 dims"),
    (lambda: core.op_workspace("fill", {"value": "x"}, 0), TypeError, "op_workspace: value"),
    (lambda: core.Context(0, 1), ValueError, "Context: device_index: 1"),
    (lambda: core.torch_dtype(99), ValueError, "torch_dtype: code: 99"),
    (lambda: core.dtype_code(torch.complex64), TypeError, "dtype_code: dtype: torch.complex64"),
    (lambda: core.bind_torch(sys), TypeError, "bind_torch: torch_module: this is not torch"),
    (lambda: core.bind_torch(torch, 3), TypeError, "bind_torch: classify: expected a callable"),
    (lambda: core.register_backend("b", 0, 0, {"no_op": print}), ValueError, "no operator 'no_op'"),
    (lambda: core.register_backend("b", 0, 0, {"fill": 3}), TypeError, "fill: 3 is not callable"),
    (
        lambda: core.register_backend("b", 0, 0, 3),
        TypeError,
        "register_backend: functions: expected a mapping",
    ),
    (
        lambda: core.register_backend(3, 0, 0, {}),
        TypeError,
        "register_backend: name: expected a str",
    ),
    (lambda: core.unregister_backend("b"), ValueError, "unregister_backend: name: no backend 'b'"),
]


@pytest.mark.parametrize("at", range(len(OP_ERRORS)))
def test_operators_name_argument_value_and_fix(at):
    call, kind, text = OP_ERRORS[at]
    with pytest.raises(kind, match=text):
        call()


def test_run_staged_arguments():
    name = "gemm_output"
    plan = linear_plan(core, core.DIRECTION_FORWARD, external=native.external(core, name))
    tensors = linear_tensors()
    good = [plan, 0, 0, {name: print}, None, lambda *_: None, *tensors]
    before = snapshot(tensors)
    for at, value, kind, text in (
        (3, [name], TypeError, "run_staged: functions: expected a dict, got <class 'list'>"),
        (3, {}, RuntimeError, f"run_staged: functions: stage {name} is external and has no"),
        (3, {name: 3}, TypeError, f"run_staged: functions: {name}: 3 is not callable"),
        (4, 3, TypeError, "run_staged: observer: expected callables .* got <class 'int'> and"),
        (5, None, TypeError, "run_staged: observer: expected callables .* <class 'NoneType'>$"),
        (6, torch.zeros(ROWS, K + 1), ValueError, "run_staged: input: the last dim has size 25"),
    ):
        args = list(good)
        args[at] = value
        with pytest.raises(kind, match=text):
            core.run_staged(*args)
        assert unchanged(before)
    with pytest.raises(TypeError, match="run_staged: expected plan, .* got 5 arguments"):
        core.run_staged(*good[:5])


@pytest.mark.parametrize("number", [-1, 10**6, 2**70, None, "x"])
def test_a_stage_asks_for_a_buffer_that_is_not_there(number):
    def gemm(lend):
        return lend(number)

    plan = linear_plan(core, 0, external=native.external(core, "gemm_output"))
    functions = {"gemm_output": gemm}
    with pytest.raises((ValueError, TypeError), match="run_staged: buffers:"):
        core.run_staged(plan, 0, 0, functions, None, lambda lend, *_: lend, *linear_tensors())


@pytest.mark.gpu
def test_mixed_devices():
    error = run_with(weight=torch.zeros(N, K, device="cuda"))
    assert "run: weight: it is on cuda:0 and the call runs on cpu:0" in str(error)
    context = core.Context(core.DEVICE_CUDA, 0)
    with pytest.raises(
        ValueError, match="fill: context: it is of cuda:0 and the tensors are on cpu:0"
    ):
        core.fill(x24(), 1.0, context=context)


@pytest.mark.skipif(not core.has_cuda(), reason="keeps nothing on disk: built without CUDA")
def test_a_folder_that_others_may_write_to_is_told(tmp_path):
    """In one line, and nothing is kept there; the rest of the call holds."""
    tmp_path.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="nothing is kept on disk: .*others may write to it"):
        core.cuda_configure(False, tmp_path)
    core.cuda_configure(False, None)
