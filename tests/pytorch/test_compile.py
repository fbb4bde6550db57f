# SPDX-License-Identifier: Apache-2.0
"""Modules under `torch.compile(fullgraph=True)`: the bits, the state and the number of graphs."""

import contextlib
import copy
import gc
import itertools
import json
import os
import shutil

import processes
import pytest
import torch
import torch._dynamo.utils
from device_kinds import MARKS, every_device
from pytorch.helpers import gemm_counts, same_draws

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.graphs import Graph, Norm
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format
from transformer_engine.pytorch.execution import plan_ops

WIDTH = 48
STEPS = 6

RECIPES = {
    "none": lambda: None,
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "delayed-most-recent": lambda: DelayedScaling(
        amax_history_len=2, amax_compute_algo="most_recent", margin=1, fp8_format=Format.E4M3
    ),
    "current": Float8CurrentScaling,
    "current-power-2": lambda: Float8CurrentScaling(use_power_2_scales=True),
}

# Inductor on a CPU needs a C++ compiler, which the package does without.
OPTIONS = {"aot_eager": {"backend": "aot_eager"}, "inductor": {}}
OPTIONS["reduce-overhead"] = {"mode": "reduce-overhead"}
BACKENDS = [
    pytest.param(kind, OPTIONS["aot_eager"], id=f"{kind}-aot_eager", marks=marks)
    for kind, marks in MARKS.items()
]


def programs(cpu, cuda):
    """Parameters (device, options, recipe, where, model): the CPU's, and some by CUDA compiler.

    What is traced is the same on all devices, so the CPU has every combination; CUDA, where each
    compiles for seconds, has every recipe, place and model, and each compiler has all models. The
    test device has what CUDA has of aot_eager.
    """
    for case in cpu:
        yield pytest.param("cpu", OPTIONS["aot_eager"], *case, id="-".join(["cpu", *case]))
    for kind, compilers in (("cuda", cuda), ("npu", ["aot_eager"])):
        for compiler in compilers:
            for case in cuda[compiler]:
                name = "-".join([kind, compiler, *case])
                yield pytest.param(kind, OPTIONS[compiler], *case, id=name, marks=MARKS[kind])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.config.error_on_recompile = False
    torch._dynamo.reset()


def region(recipe):
    if recipe is None:
        return contextlib.nullcontext()
    return te.autocast(enabled=True, recipe=recipe)


def linears(device):
    return [te.Linear(WIDTH, WIDTH, device=device) for _ in range(3)]


def norms_and_mlps(device):
    options = {"normalization": "RMSNorm", "zero_centered_gamma": True, "device": device}
    return [
        te.LayerNormLinear(WIDTH, WIDTH, parameters_split=("a", "b", "c"), device=device),
        te.LayerNormMLP(WIDTH, 64, device=device),
        te.LayerNormMLP(WIDTH, 32, activation="swiglu", checkpoint=True, **options),
        te.LayerNorm(WIDTH, device=device),
    ]


MODELS = {"linear": (linears, 3 * 3), "norms-mlps": (norms_and_mlps, 3 + 6 + 7)}
"""Layers of a model, and its GEMMs of a step."""


def model_on(device, model="linear"):
    te.reset()
    return torch.nn.Sequential(*MODELS[model][0](device))


def state_of(model):
    values = []
    for layer in model:
        if getattr(layer, "_slots", None) is not None:
            for scale, history in layer._slots.values().values():
                values += [scale, history]
    return values


def train(device, where, make_recipe, options, token_counts=(16,) * STEPS, model="linear"):
    """Outputs, gradients, weights and scaling state of a few steps; options None: eager."""
    model = model_on(device, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    inside = make_recipe()

    def step_inside(x):
        with region(inside):
            return model(x)

    forward = step_inside if where == "inside" else model
    if options is not None:
        forward = torch.compile(forward, fullgraph=True, **options)
    seen = []
    for step, tokens in enumerate(token_counts):
        torch._dynamo.config.error_on_recompile = options is not None and step >= 2
        x = torch.randn(tokens, WIDTH, device=device, requires_grad=True)
        # A new recipe object at each step: its fields matter, not its identity.
        with contextlib.nullcontext() if where == "inside" else region(make_recipe()):
            out = forward(x)
        (out * out).sum().backward()
        seen += [out.detach().clone(), x.grad.clone()]
        seen += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [p.detach().clone() for p in model.parameters()] + state_of(model)


# torch captures an empty graph on purpose to own a memory pool.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize(
    ("device", "options", "recipe", "where", "model"),
    list(
        programs(
            [
                *itertools.product(RECIPES, ["outside", "inside"], ["linear"]),
                ("none", "outside", "norms-mlps"),
                ("delayed", "outside", "norms-mlps"),
                ("delayed", "inside", "norms-mlps"),
                ("current", "outside", "norms-mlps"),
            ],
            {
                "aot_eager": [
                    ("delayed", "outside", "linear"),
                    ("current", "inside", "linear"),
                    ("delayed", "inside", "norms-mlps"),
                ],
                "inductor": [
                    ("delayed", "inside", "linear"),
                    ("delayed-most-recent", "outside", "linear"),
                    ("none", "outside", "linear"),
                    ("delayed", "outside", "norms-mlps"),
                    ("none", "outside", "norms-mlps"),
                    ("current", "outside", "norms-mlps"),
                ],
                "reduce-overhead": [
                    ("delayed", "outside", "linear"),
                    ("current-power-2", "inside", "linear"),
                    ("none", "inside", "linear"),
                    ("delayed", "inside", "norms-mlps"),
                    ("current", "outside", "norms-mlps"),
                ],
            },
        )
    ),
)
def test_bits_equal_eager_in_one_graph(device, options, where, recipe, model):
    make_recipe = RECIPES[recipe]
    with same_draws(device):
        expected = train(device, where, make_recipe, None, model=model)
    _core.reset_counters()
    got = train(device, where, make_recipe, options, model=model)
    expected_gemms = 0 if make_recipe() is None else MODELS[model][1] * STEPS
    warm_up = gemm_counts()[0] - expected_gemms
    if options.get("mode") == "reduce-overhead":  # replays of a CUDA graph are not counted
        assert warm_up <= 0
        assert make_recipe() is None or gemm_counts()[0] > 0
    else:
        assert warm_up == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert len(expected) == len(got)
    for reference, value in zip(expected, got, strict=True):
        assert torch.equal(reference, value)


@pytest.mark.parametrize(
    ("device", "options", "recipe", "where", "model"),
    list(
        programs(
            [
                *itertools.product(
                    ["none", "delayed", "current"], ["outside", "inside"], ["linear"]
                ),
                ("delayed", "outside", "norms-mlps"),
            ],
            {
                "aot_eager": [("delayed", "inside", "linear")],
                "inductor": [
                    ("none", "outside", "linear"),
                    ("current", "inside", "linear"),
                    ("delayed", "outside", "norms-mlps"),
                ],
            },
        )
    ),
)
def test_token_counts_make_no_new_graphs(device, options, where, recipe, model):
    make_recipe = RECIPES[recipe]
    counts = (16, 24, 33, 70, 5, 128)
    with same_draws(device):
        expected = train(device, where, make_recipe, None, counts, model)
    # Recompiling after step 2 is an error.
    got = train(device, where, make_recipe, options, counts, model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    for reference, value in zip(expected, got, strict=True):
        assert torch.equal(reference, value)


@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
@pytest.mark.parametrize("model", MODELS)
def test_dynamic_from_the_first_call(model, recipe):
    """Not only sizes are symbols then, but the floats of modules and recipes too."""
    arguments = ("cpu", "outside", RECIPES[recipe])
    counts = (16, 24, 33)
    with same_draws("cpu"):
        expected = train(*arguments, None, counts, model)
    got = train(*arguments, {"backend": "aot_eager", "dynamic": True}, counts, model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for reference, value in zip(expected, got, strict=True):
        assert torch.equal(reference, value)


@pytest.mark.parametrize("make", [te.Linear, te.LayerNormMLP])
def test_weight_caches_are_not_traced(make):
    """A graph can not tell whether a cached weight is still that of the parameter."""
    layer = make(WIDTH, WIDTH, device="cpu")
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(16, WIDTH)
    assert torch.equal(compiled(x, is_first_microbatch=True), layer(x))  # high precision has none
    with te.autocast(), pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(x, is_first_microbatch=True)


@pytest.mark.parametrize(("device", "options"), BACKENDS)
def test_callable_algorithms_are_traced(device, options):
    def most_recent(history):
        return history[0]

    def scale(amax, old, fp8_max, recipe):
        return torch.where(amax > 0, fp8_max / amax / 2.0**recipe.margin, old)

    # The scale function is given the recipe, so the graph depends on which object that is.
    recipe = DelayedScaling(
        margin=1,
        amax_history_len=3,
        amax_compute_algo=most_recent,
        scaling_factor_compute_algo=scale,
    )
    with same_draws(device):
        expected = train(device, "outside", lambda: recipe, None)
    got = train(device, "outside", lambda: recipe, options)
    for reference, value in zip(expected, got, strict=True):
        assert torch.equal(reference, value)


@pytest.mark.parametrize(("device", "options"), BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_training_evaluation_and_high_precision_alternate(device, options, model):
    model = model_on(device, model)
    compiled = torch.compile(model, fullgraph=True, **options)
    recipe = DelayedScaling(amax_history_len=4)
    x = torch.randn(8, WIDTH, device=device)
    outputs = []
    for step in range(4):
        torch._dynamo.config.error_on_recompile = step >= 2
        for forward in (model, compiled):
            with torch.no_grad(), te.autocast(recipe=recipe):
                low = forward(x)
            outputs.append((low, forward(x).detach()))
        with te.autocast(recipe=recipe):
            compiled(x).sum().backward()
    for eager, graph in zip(outputs[::2], outputs[1::2], strict=True):
        assert torch.equal(eager[0], graph[0])
        assert torch.equal(eager[1], graph[1])
        assert not torch.equal(eager[0], eager[1])


OUTER = {
    "nothing": contextlib.nullcontext,
    "current": lambda: te.autocast(recipe=Float8CurrentScaling()),
    "disabled": lambda: te.autocast(enabled=False),
}


@pytest.mark.parametrize("outer", OUTER)
@pytest.mark.parametrize("recipe", [None, DelayedScaling()], ids=["no recipe", "delayed"])
def test_region_inside_a_graph(recipe, outer):
    """Without a recipe it has the default, made with every eager region, and the first graph."""
    data, results = torch.randn(3, 16, WIDTH), []
    for compiled in (False, True):
        te.reset()
        with same_draws("cpu"):
            model = model_on("cpu")

        def step(x, model=model):
            with te.autocast(recipe=recipe):
                return model(x)

        run = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
        for x in data:
            with OUTER[outer]():
                out = run(x)
            out.square().sum().backward()
            results.append(out.detach())
        results += [*state_of(model), *(p.grad for p in model.parameters())]
    half = len(results) // 2
    for eager, graph in zip(results[:half], results[half:], strict=True):
        assert torch.equal(eager, graph)


def test_a_module_that_dies_while_another_is_traced():
    """The update inside the graph goes through the state of every module of the process."""
    te.reset()
    layer, others = te.Linear(WIDTH, WIDTH, device="cpu"), [te.Linear(16, 16, device="cpu")]
    with te.autocast(recipe=DelayedScaling(amax_history_len=7)):
        others[0](torch.randn(16, 16))
    recipe = DelayedScaling(amax_history_len=4)

    @torch.compiler.assume_constant_result
    def bury():
        others.clear()
        return gc.collect()

    def step(x):
        with te.autocast(recipe=recipe):
            out = layer(x)
        bury()
        return out

    layer.requires_grad_(False)  # both ways begin with the same state
    x = torch.randn(16, WIDTH)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    outputs = [compiled(x), compiled(x)]
    te.reset()
    for out in outputs:
        assert torch.equal(out, step(x))


def test_state_loaded_into_a_compiled_model():
    """The graph goes on with the loaded scales, without another trace."""

    def train(compiled):
        model, recipe = model_on("cpu"), DelayedScaling(amax_history_len=4)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        results, saved = [], None
        for number in range(6):
            if number == 3:
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                torch._dynamo.config.error_on_recompile = True
            if number == 5:
                model.load_state_dict(saved)
            x = torch.randn(16, WIDTH) * 4.0 ** (number % 3)
            with te.autocast(recipe=recipe):
                out = run(x)
            out.square().sum().backward()
            results.append(out.detach())
        return results + [model.state_dict()[name] for name in sorted(saved)]

    with same_draws("cpu"):
        eager = train(False)
    for one, other in zip(train(True), eager, strict=True):
        assert torch.equal(one, other)


# ---- operators by the number of results ----------------------------------------------------------


def test_a_plan_of_more_results_than_any_module_has():
    code = _core.dtype_code(torch.float32)
    graph, shape = Graph(), (_core.Extent(symbol=_core.SYMBOL_ROWS, multiply=1), WIDTH)
    x = graph.tensor("input", code, shape, _core.VALUE_INPUT | _core.VALUE_LEADING)
    for number in range(20):
        flags = _core.VALUE_RESULT | _core.VALUE_LEADING
        y = graph.value(f"output_{number}", code, shape, flags)
        norm = Norm(_core.NORM_RMSNORM, code, 10.0 ** -(number % 4))
        graph.add_norm(norm, (x, -1, -1), y)
    plan = graph.make(_core.DIRECTION_FORWARD)
    inp = torch.randn(6, WIDTH)

    def function(inp):
        return plan_ops.run_traced(plan.text, (0,), [inp], [], None)

    expected = plan_ops.run_native(plan, (0,), [inp], None)
    assert len(expected) == 21
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for made in (function(inp), compiled(inp)):
        assert len(made) == 21 and made[20].numel() == 0
        assert all(map(torch.equal, made[:20], expected[:20]))


@every_device
def test_recipes_in_turns(device):
    """Each has one graph; those that differ in how they attend alone have one state, too."""
    recipes = [DelayedScaling(amax_history_len=3, fp8_dpa=attends) for attends in (False, True)]
    recipes.append(Float8CurrentScaling())
    modules = [te.Linear(WIDTH, 32, device=device)]
    modules.append(copy.deepcopy(modules[0]))
    runs = [modules[0], torch.compile(modules[1], fullgraph=True, backend="aot_eager")]
    results, slots = ([], []), []
    for step in range(6):
        x = torch.randn(16, WIDTH, device=device)
        for run, found in zip(runs, results, strict=True):
            given = x.clone().requires_grad_()
            with te.autocast(recipe=recipes[step % 3]):
                y = run(given)
            y.square().sum().backward()
            found += [y, given.grad]
        slots.append(modules[1]._slots)
    assert all(map(torch.equal, *results)) and all(one is slots[0] for one in slots)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(recipes)


CACHED = """
import json, os, sys, torch
device, seed, os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1:]
os.environ.update(TORCHINDUCTOR_AUTOGRAD_CACHE="0", TORCHINDUCTOR_COMPILE_THREADS="1")
from torch._dynamo.utils import counters
import transformer_engine.pytorch as te
torch.manual_seed(int(seed))
layer = te.LayerNormMLP(48, 64, device=device)
compiled = torch.compile(lambda x: layer(x), fullgraph=True)
x = torch.randn(8, 48, device=device, requires_grad=True)
with te.autocast(recipe=te.recipe.DelayedScaling()):
    out = compiled(x)
out.square().sum().backward()
known = [name for name in dir(torch.ops.transformer_engine) if name.startswith("run_with_state_")]
hits = counters["inductor"]["fxgraph_cache_hit"]
print(json.dumps([hits, sorted(known), x.grad.tolist(), out.tolist()]))
"""


def test_cached_graphs_of_another_process(device, seed, tmp_path):
    """They hold operators that a process defines when it traces calls: before it looks for them."""
    if device == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("Inductor on a CPU needs a C++ compiler")
    results = []
    for _ in range(2):
        done = processes.run(CACHED, device, seed, tmp_path, limit=300, fresh=device != "cpu")
        results.append(json.loads(done.stdout))
    (misses, *first), (hits, *second) = results
    assert misses == 0 and hits == 2
    assert first == second and len(first[0]) == 2
