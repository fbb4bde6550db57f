# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments: an exception that names argument, value and fix, and nothing has changed."""

import re
import sys

import native
import pytest
import torch
from native import CASES, ROWS, SLOTS, K, N, fp8, fresh_core, linear_plan, linear_tensors, state

core = fresh_core()
STRANGE = native.strange_tensors()


def closed_context():
    context = core.Context(core.DEVICE_CPU)
    context.close()
    return context


JUNK = {
    "None": None,
    "-1": -1,
    "7": 7,
    "huge": 2**70,
    "-huge": -(2**70),
    "int64 max": 2**63 - 1,
    "int32 max": 2**31 - 1,
    "str": "no tensor",
    "surrogate": "\udc80",
    "bytes": b"x",
    "float": 1.5,
    "nan": float("nan"),
    "list": [1, 2],
    "dict": {"cast": 3},
    "object": object(),
    "class": torch.Tensor,
    "dtype": torch.complex64,
    "module": sys,
    "closed context": closed_context(),
    "context": core.Context(core.DEVICE_CPU),
    "scalar": torch.tensor(1.0),
    "empty": torch.zeros(0),
    "vector": torch.zeros(7),
    "int tensor": torch.zeros(ROWS, K, dtype=torch.int32),
    "uint8": torch.zeros(5, dtype=torch.uint8),
    "expanded": torch.zeros(()).expand(ROWS, K),
    "column stride": torch.zeros(K, ROWS).t(),
    "half": torch.zeros(ROWS, K, dtype=torch.float16),
    "high": torch.zeros(1, 1, 1, 2, 3),
    "negative bit": torch._neg_view(torch.zeros(ROWS, K)),
    **STRANGE,
}

ACCEPTED = (ValueError, TypeError, NotImplementedError, RuntimeError, MemoryError, ImportError)


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
        lambda: core.make_plan(0, 0, value, value),
        lambda: core.make_plan(0, 0, (value,), (value,)),
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
    ("input", lambda: STRANGE["meta"], TypeError, ["no memory", "plain dense CPU or CUDA tensor"]),
    (
        "input",
        lambda: STRANGE["sparse"],
        TypeError,
        ["no memory", "plain dense CPU or CUDA tensor"],
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
    plan = linear_plan(core, core.DIRECTION_FORWARD, external=native.stage_bit(core, name))
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

    plan = linear_plan(core, 0, external=native.stage_bit(core, "gemm_output"))
    functions = {"gemm_output": gemm}
    with pytest.raises((ValueError, TypeError), match="run_staged: buffers:"):
        core.run_staged(plan, 0, 0, functions, None, lambda lend, *_: lend, *linear_tensors())


# ---- graphs ----


def junked(item, junk):
    """Every way to put junk into a nested tuple, in place of one item or of the whole."""
    yield junk
    if not isinstance(item, tuple):
        return
    for at, inner in enumerate(item):
        for changed in junked(inner, junk):
            yield (*item[:at], changed, *item[at + 1 :])
    yield item[:-1]
    yield (*item, junk)


NUMBERS = {"-2": -2, "1000": 1000, "2**31": 2**31, "2**32": 2**32, "2**63": 2**63}


@pytest.mark.parametrize("of", ["mlp", "attention"])
@pytest.mark.parametrize("value", [*JUNK, *NUMBERS])
def test_no_graph_crashes(value, of):
    """Each field of each value and node is junk in turn; what is taken has a layout."""
    junk = (JUNK | NUMBERS)[value]
    graph = {"mlp": native.mlp_graph, "attention": native.attention_graph}[of](core)
    direction, flags, *lists = graph.arguments(core.DIRECTION_FORWARD)
    made = refused = 0
    for number, items in enumerate(lists):
        for at, item in enumerate(items):
            for changed in junked(item, junk):
                graph = list(lists)
                graph[number] = (*items[:at], changed, *items[at + 1 :])
                try:
                    plan = core.make_plan(made % 3, flags, *graph)
                except ACCEPTED as error:
                    assert str(error)
                    refused += 1
                    continue
                made += 1
                assert core.plan_describe(plan)["direction"]
                if of == "mlp":
                    assert core.plan_infer(plan, 3)
    assert refused > made


def graph_error(direction=0, flags=0, value=(0, {}), node=(0, {}), **change):
    """What make_plan says of the norm-MLP with some fields of a value and of a node replaced."""
    graph = native.mlp_graph(core)
    values, nodes = graph.values, graph.nodes
    at = [v.name for v in values].index(value[0]) if value[0] else 0
    values[at] = values[at]._replace(**value[1])
    nodes[node[0]] = nodes[node[0]]._replace(**node[1])
    lists = {"values": tuple(values), "nodes": tuple(nodes)} | change
    with pytest.raises(ACCEPTED) as raised:
        core.make_plan(direction, flags, lists["values"], lists["nodes"])
    return raised.value


ROWS_DIM = (core.SYMBOL_ROWS, 1, 1)
LINEAR = native.mlp_graph(core).nodes[1]
CAST = LINEAR.quantization


def cast_of(*changes, backward=0, recipe=1):
    """Quantization of a node with changes: (operand, field, value), fields as the struct has."""
    dtypes = (core.DTYPE_U8,) * 3 if recipe == core.RECIPE_NVFP4 else [c[1] for c in CAST[:3]]
    casts = [[recipe, dtype, 0.0, 0, 0] for dtype in dtypes]
    for role, field, value in changes:
        casts[role][("recipe", "dtype", "epsilon", "options", "margin").index(field)] = value
    return (1, dict(quantization=(*map(tuple, casts), backward)))


FP4 = core.RECIPE_NVFP4
RHT, SR, SQUARE = core.CAST_HADAMARD, core.CAST_STOCHASTIC, core.CAST_TILES_2D
OVER = core.CAST_FOUR_OVER_SIX
GRAPH_ERRORS = [
    (dict(direction=3), ValueError, "make_plan: direction: 3 is out of range, expected 0 to 2"),
    (dict(flags=-1), ValueError, "make_plan: flags: -1 is out of range"),
    (dict(flags=2), ValueError, "graph: size .*, or flags 0x2"),
    (dict(values=()), ValueError, "graph: it has no values"),
    (dict(nodes=()), ValueError, "graph: it has no nodes"),
    (dict(values=(), nodes=()), ValueError, "graph: it has no values"),
    (dict(values=[]), TypeError, "make_plan: values: <class 'list'>, nodes: .* expected tuples"),
    (dict(values=(3,)), TypeError, "make_plan: values: expected a tuple, got <class 'int'>"),
    (dict(nodes=(LINEAR,) * 1025), ValueError, "1025 nodes, expected at most 8192 and 1024"),
    (dict(value=("", dict(name="x" * 24))), ValueError, "x{24} has more than 23 characters"),
    (dict(value=("", dict(name="a\0b"))), ValueError, "embedded null"),
    (dict(value=("", dict(flags=2**32))), ValueError, "make_plan: flags: 4294967296 is out of"),
    (dict(value=("", dict(flags=1 << 10))), ValueError, "value 0: name, ndim = 2 or flags = 0x400"),
    (dict(value=("", dict(flags=3))), ValueError, "flags = 0x3"),
    (
        dict(value=("", dict(dtype=core.DTYPE_U8))),
        TypeError,
        "graph: input: dtype u8, gradient f32",
    ),
    (dict(value=("", dict(grad_dtype=99))), TypeError, "gradient invalid, expected f32, f16 or"),
    (dict(value=("", dict(shape=()))), ValueError, "make_plan: input: 0 dims, expected 1 to 4"),
    (dict(value=("", dict(shape=(1,) * 5))), ValueError, "make_plan: input: 5 dims, expected 1"),
    (dict(value=("", dict(shape=(0, K)))), ValueError, "make_plan: shape: 0 is out of range"),
    (dict(value=("", dict(shape=((9, 1, 1), K)))), ValueError, "dim 0 is 1 . roundup.symbol 9, 1"),
    (dict(value=("", dict(shape=(2**31 - 1, K)))), ValueError, "graph: input: dim 0 is"),
    (dict(value=("", dict(shape=(ROWS_DIM, 2**30)))), ValueError, "graph: input: too large"),
    (dict(value=("", dict(shape=(5, K)))), ValueError, "input: leading dims that are no number"),
    (
        dict(value=("fc1_bias", dict(flags=core.VALUE_PARAMETER | core.VALUE_DEFER))),
        ValueError,
        "node 1 reads fc1_bias, whose flags 0x82 only a linear's weight has",
    ),
    (dict(value=("fc1_weight", dict(shape=(N, K + 1)))), ValueError, "fc1_weight is no parameter"),
    (dict(value=("fc1_bias", dict(shape=(N + 1,)))), ValueError, "fc1_bias is no parameter of 1 x"),
    (dict(value=("gamma", dict(shape=(K - 1,)))), ValueError, "norm: gamma: gamma is no parameter"),
    (dict(value=("fc2_input", dict(flags=0, shape=(7, N)))), ValueError, "activation: from .*rows"),
    (dict(node=(0, dict(name="x" * 24))), ValueError, "nodes: x{24} has more than 23 characters"),
    (dict(node=(0, dict(kind=99))), ValueError, "graph: node 0: kind 99 does not exist"),
    (
        dict(node=(1, dict(inputs=(0,) * 300))),
        ValueError,
        "node 1 .gemm.: 300 inputs, 0 numbers and",
    ),
    (dict(node=(2, dict(numbers=(0.0,) * 4))), ValueError, "4 numbers and 0 slices, expected at"),
    (dict(node=(1, dict(flags=2 * core.NODE_DETERMINISTIC))), ValueError, "flags 0x800"),
    (
        dict(node=(2, dict(flags=core.NODE_ZERO_CENTERED))),
        ValueError,
        "node 2 .activation.: flags 0x40, external 0x0 and recipe 0, of which it knows 0x0, 0x0",
    ),
    (dict(node=(0, dict(quantization=CAST))), ValueError, "recipe 1, of which .* 0x0 and none"),
    (dict(node=(0, dict(external=1))), ValueError, "node 0 .norm.: flags 0x0, external 0x1"),
    (dict(node=(1, dict(inputs=(99, *LINEAR.inputs[1:])))), ValueError, "there is no value 99"),
    (dict(node=(0, dict(inputs=(2, 5, 6)))), ValueError, "reads norm_output, which nobody"),
    (dict(node=(1, dict(inputs=LINEAR.inputs[:1]))), ValueError, "it has no weight"),
    (dict(node=(0, dict(output=0))), ValueError, "node 0 makes input, which is there already"),
    (dict(node=(0, dict(variant=3))), ValueError, "norm: kind = 3 does not exist"),
    (dict(node=(0, dict(variant=1))), ValueError, "norm: kind 1 with a beta"),
    (dict(node=(0, dict(numbers=(-1.0,)))), ValueError, "eps = -1"),
    (dict(node=(2, dict(variant=99))), ValueError, "activation: kind = 99 does not exist"),
    (
        dict(node=(2, dict(variant=1))),
        ValueError,
        "activation: geglu of 40 f32 columns gives no 40",
    ),
    (dict(node=cast_of((1, "recipe", 9))), ValueError, "recipe = 9 does not exist"),
    (dict(node=cast_of((0, "dtype", 0))), TypeError, "input: recipe 1 has no f32"),
    (dict(node=cast_of((2, "epsilon", -1.0))), ValueError, "gradient: amax_epsilon"),
    (dict(node=cast_of((1, "options", 256))), ValueError, "weight: .*0x100, of which recipe 1 has"),
    (dict(node=cast_of((1, "margin", 1))), ValueError, "margin = 1 of recipe 1"),
    (dict(node=cast_of(backward=3)), ValueError, "backward = 3 with recipe 1"),
    (dict(node=cast_of(backward=1, recipe=0)), ValueError, "backward = 1 with"),
    (dict(node=cast_of((0, "options", RHT))), ValueError, "input: .* 0x4, of which recipe 1 has"),
    (dict(node=cast_of((0, "options", RHT), recipe=FP4)), ValueError, "nvfp4 transforms input and"),
    (dict(node=cast_of((1, "options", RHT), recipe=FP4)), ValueError, "nvfp4 transforms input and"),
    (
        dict(node=cast_of((0, "options", RHT | OVER), (2, "options", RHT), recipe=FP4)),
        ValueError,
        "4 over 6",
    ),
    (
        dict(node=cast_of((0, "options", core.CAST_ROW_SCALED | SQUARE), recipe=FP4)),
        ValueError,
        "scaled rows have no tiles",
    ),
    (
        dict(node=cast_of((0, "options", RHT), (2, "options", RHT | SR), recipe=FP4)),
        ValueError,
        r"inputs\[3\] = -1, expected an input i64",
    ),
    (dict(node=cast_of((2, "recipe", FP4))), TypeError, "gradient: recipe 6 has no e5m2"),
    (dict(node=cast_of((0, "options", SQUARE))), ValueError, "0x2, of which recipe 1 has"),
    (
        dict(node=cast_of((0, "recipe", core.RECIPE_EXTERNAL), (0, "dtype", core.DTYPE_F32))),
        ValueError,
        "operand 0 is the caller's: its stage must be external",
    ),
    (
        dict(
            node=(1, {**cast_of(recipe=core.RECIPE_ROW)[1], "gather": 2, "external": 1 << 8}),
        ),
        NotImplementedError,
        "gather = 2: the scales of rows and tiles are not gathered",
    ),
    (dict(node=(1, dict(slots=(-1, 0)))), ValueError, "slots.0. = -1, expected 0 to 32767"),
    (dict(node=(1, dict(external=1 << 31))), ValueError, "external 0x80000000"),
    (dict(node=(1, dict(gather=0))), ValueError, "gather = 0: at least 1"),
    (dict(node=(1, dict(gather=2))), ValueError, "gather = 2: at least 1; more needs a recipe and"),
]


@pytest.mark.parametrize("at", range(len(GRAPH_ERRORS)))
def test_make_plan_names_what_is_wrong(at):
    change, kind, text = GRAPH_ERRORS[at]
    error = graph_error(**change)
    assert type(error) is kind and re.search(text, str(error)), error


def test_graphs_that_can_not_be():
    graph = native.mlp_graph(core)
    graph.rows("nothing", K, core.VALUE_RESULT)
    with pytest.raises(ValueError, match="no node makes the result nothing"):
        graph.plan(0)
    graph.linear(0, graph.rows("dead", K), "dead_")
    with pytest.raises(ValueError, match="node 4 makes dead, which is no result and which nobody"):
        graph.plan(0)
    graph = native.chain_graph(core, 2)
    first = graph.nodes[0].inputs
    graph.nodes[1] = graph.nodes[1]._replace(inputs=(graph.nodes[1].inputs[0], *first[1:]))
    with pytest.raises(NotImplementedError, match="the gradient of n0_weight, which is read twice"):
        graph.plan(0)
    graph = native.chain_graph(core, 1, core.RECIPE_NONE)
    graph.values[0] = graph.values[0]._replace(dtype=core.DTYPE_BF16)
    with pytest.raises(TypeError, match="without a recipe all are one dtype"):
        graph.plan(0)


@pytest.mark.gpu
def test_mixed_devices():
    error = run_with(weight=torch.zeros(N, K, device="cuda"))
    assert "run: weight: it is on cuda:0 and the call runs on cpu:0" in str(error)
    context = core.Context(core.DEVICE_CUDA, 0)
    with pytest.raises(
        ValueError, match="fill: context: it is of cuda:0 and the tensors are on cpu:0"
    ):
        core.fill(x24(), 1.0, context=context)
