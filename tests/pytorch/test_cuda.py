# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows: graph capture, devices and threads, kernels, run-time compilation."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from pytorch.helpers import captured, same_draws, side_stream

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

pytestmark = pytest.mark.gpu

RECIPES = {"delayed": lambda: DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling}
WIDTH = 64
TOKENS = 48


def linears(**options):
    return [te.Linear(WIDTH, WIDTH, **options) for _ in range(3)]


def norms_and_mlps(**options):
    return [
        te.LayerNormLinear(WIDTH, WIDTH, parameters_split=("a", "b"), **options),
        te.LayerNormMLP(WIDTH, 2 * WIDTH, **options),
        te.LayerNormMLP(
            WIDTH, WIDTH, activation="swiglu", normalization="RMSNorm", checkpoint=True, **options
        ),
        te.LayerNorm(WIDTH, **options),
    ]


MODELS = {"linear": linears, "norms-mlps": norms_and_mlps}


def model_on(device, model="linear"):
    te.reset()
    return torch.nn.Sequential(*MODELS[model](params_dtype=torch.bfloat16, device=device))


def state_of(model):
    out = [p.detach().clone() for p in model.parameters()]
    for layer in model:
        if getattr(layer, "_slots", None) is not None:
            for scale, history in layer._slots.values().values():
                out += [scale, history]
    return out


def assert_same(expected, got):
    assert len(expected) == len(got)
    for reference, value in zip(expected, got, strict=True):
        assert torch.equal(reference.cpu(), value.cpu())


# The warm-up runs on a side stream, as torch asks for; its gradients are made on another one.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("recipe", [*RECIPES, "none"])
@pytest.mark.parametrize("model", MODELS)
def test_graph_replays_equal_eager(recipe, model):
    """Forward, backward, optimizer and scale updates in a plain graph, 100 replays."""
    steps = 100 if model == "linear" else 25
    data = torch.randn(steps + 3, TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    kind, enabled = model, recipe != "none"

    def build():
        with same_draws("cuda"):
            model = model_on("cuda", kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        static = data[0].clone().requires_grad_()
        format_recipe = RECIPES[recipe]() if enabled else None

        def step():
            optimizer.zero_grad(set_to_none=False)
            static.grad.zero_() if static.grad is not None else None
            with te.autocast(enabled=enabled, recipe=format_recipe):
                out = model(static)
            out.float().square().mean().backward()
            optimizer.step()
            return out

        return model, static, step

    def feed(static, index):
        with torch.no_grad():
            static.copy_(data[index])

    model, static, step = build()
    expected = []
    for index in range(steps + 3):
        feed(static, index)
        out = step()
        expected.append((out.detach().clone(), static.grad.clone(), state_of(model)))

    model, static, step = build()
    with side_stream():
        for index in range(3):
            feed(static, index)
            out = step()
            assert_same(
                [*expected[index][:2], *expected[index][2]], [out, static.grad, *state_of(model)]
            )
    graph, out = captured(step)
    for index in range(3, steps + 3):
        feed(static, index)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(
            [*expected[index][:2], *expected[index][2]], [out, static.grad, *state_of(model)]
        )


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
@pytest.mark.parametrize("make", [te.Linear, te.LayerNormLinear, te.LayerNormMLP])
def test_slots_are_not_made_while_capturing(make):
    layer = make(WIDTH, WIDTH, device="cuda")
    x = torch.randn(TOKENS, WIDTH, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="warm-up"):
        with torch.no_grad(), torch.cuda.graph(graph), te.autocast(recipe=DelayedScaling()):
            layer(x)
    torch.cuda.synchronize()
    with torch.no_grad(), te.autocast(recipe=DelayedScaling()):
        assert torch.isfinite(layer(x)).all()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_backward_from_a_fresh_thread(recipe, kind):
    def run(in_thread):
        with same_draws("cuda"):
            model = model_on("cuda", kind)
            x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(recipe=RECIPES[recipe]()):
            out = model(x)
        loss = out.float().square().sum()
        failures = []

        def backward():
            try:
                loss.backward()
            except BaseException as error:  # noqa: BLE001 - shown to the main thread
                failures.append(error)

        if in_thread:
            thread = threading.Thread(target=backward)
            thread.start()
            thread.join()
        else:
            backward()
        assert not failures
        return [x.grad, *[p.grad for p in model.parameters()], *state_of(model)]

    assert_same(run(False), run(True))


@pytest.mark.parametrize("make", [te.Linear, te.LayerNormMLP])
def test_forward_and_backward_in_a_thread_without_context(make):
    seed, results = int(torch.randint(2**31, ())), []

    def work():
        torch.manual_seed(seed)
        layer = make(WIDTH, WIDTH, device="cuda")
        x = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
        with te.autocast():
            layer(x).sum().backward()
        results.append([x.grad.cpu(), *(p.grad.cpu() for p in layer.parameters())])

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_same(results[0], results[1])


@pytest.mark.multigpu
@pytest.mark.parametrize("recipe", [*RECIPES, "none"])
def test_module_on_another_device_than_the_current_one(recipe):
    data = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)

    def run(device):
        model = model_on(device)
        x = data.to(device).requires_grad_()
        enabled = recipe != "none"
        for _ in range(2):
            with te.autocast(enabled=enabled, recipe=RECIPES[recipe]() if enabled else None):
                out = model(x)
            out.float().square().sum().backward()
        assert out.device == torch.device(device)
        return [out.detach(), x.grad, *[p.grad for p in model.parameters()], *state_of(model)]

    torch.cuda.set_device(0)
    weights = model_on("cuda:0").state_dict()
    first = run_with_weights(run, weights, "cuda:0")
    second = run_with_weights(run, weights, "cuda:1")
    assert torch.cuda.current_device() == 0
    assert_same(first, second)


def run_with_weights(run, weights, device):
    """`run` with the same initial weights on every device (each device has its own generator)."""
    original = te.Linear.reset_parameters
    values = [v.cpu() for v in weights.values()]
    order = iter(values)

    def copy_parameters(self, defer_init=False):
        original(self, defer_init)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(next(order))

    te.Linear.reset_parameters = copy_parameters
    try:
        return run(device)
    finally:
        te.Linear.reset_parameters = original


def test_mixed_devices_are_an_error():
    layer = te.Linear(WIDTH, WIDTH, device="cuda")
    with pytest.raises(ValueError, match="cuda:0"), te.autocast():
        layer(torch.randn(TOKENS, WIDTH))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
@pytest.mark.parametrize("recipe", RECIPES)
def test_counted_gemms_are_the_kernels_that_ran(recipe):
    from torch.profiler import ProfilerActivity, profile

    layers = 3
    model = torch.nn.Sequential(
        *[te.Linear(256, 256, params_dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    )
    x = torch.randn(128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        with te.autocast(recipe=RECIPES[recipe]()):
            out = model(x)
        out.backward(torch.ones_like(out))

    step()
    torch.cuda.synchronize()
    _core.reset_counters()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    names = [e.name for e in profiled.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    # cuBLASLt writes operand dtypes as letters (q: e4m3, r: e5m2); older kernels spell them out.
    fp8 = re.compile(r"nvjet_\w*?_[qr]{2}|e4m3|e5m2")
    gemms = [name for name in names if fp8.search(name.lower()) and not name.startswith("te_")]
    counted = {n: c for n, c in _core.counters().items() if n.startswith("gemm.")}
    assert counted == {"gemm.cuda.e4m3.e4m3": layers, "gemm.cuda.e5m2.e4m3": 2 * layers}
    assert len(gemms) == 3 * layers, names


NVRTC_PROGRAM = """
import sys, torch
import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling
torch.manual_seed(int(sys.argv[2]))
seen = []
makers = (te.Linear, te.LayerNormMLP)
recipes = (DelayedScaling(), Float8CurrentScaling(), None)
dtypes = (torch.float32, torch.bfloat16, torch.float16)
# A kernel takes seconds to compile: each module meets each recipe and each dtype.
cases = [(m, r, dtypes[(i + j) % 3]) for i, m in enumerate(makers) for j, r in enumerate(recipes)]
for make, recipe, dtype in cases:
    layer = make(72, 40, params_dtype=dtype, device="cuda")
    x = torch.randn(33, 72, device="cuda", dtype=dtype, requires_grad=True)
    for _ in range(2):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = layer(x)
        out.sum().backward()
    seen += [out.detach().cpu(), x.grad.cpu(), *(p.grad.cpu() for p in layer.parameters())]
torch.save((seen, _core.counters()), sys.argv[1])
"""


def test_kernels_compiled_at_run_time_give_the_same_bits(tmp_path, seed):
    results = {}
    for forced in ("0", "1"):
        path = tmp_path / f"{forced}.pt"
        environment = {**os.environ, "TE_NVRTC": forced, "TE_CACHE_DIR": str(tmp_path / "cache")}
        root = Path(te.__file__).parents[2]
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        subprocess.run(
            [sys.executable, "-c", NVRTC_PROGRAM, str(path), str(seed)],
            check=True,
            env=environment,
            timeout=300,
        )
        results[forced] = torch.load(path)
    fallback = "fallback.kernel_from_source"
    assert fallback not in results["0"][1]
    assert results["1"][1][fallback] > 0
    assert_same(results["0"][0], results["1"][0])
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
