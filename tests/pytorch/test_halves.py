# SPDX-License-Identifier: Apache-2.0
"""Stages in two halves: what a function has started goes on while other stages run."""

import copy
import sys
import weakref
from fractions import Fraction

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.plan_text import read_text
from transformer_engine.pytorch.execution.stages import HalvedFunction, Halves

HIDDEN, TOKENS, BATCH = 64, 6, 2
FP8 = [None, "delayed", "current"]


class Copy(HalvedFunction):
    """A copy beside the plan: on a side stream, on the CPU not before it is finished.

    `ranks` copies behind each other, or the sum of as many parts.
    """

    def __init__(self, ranks=1):
        self.ranks = ranks
        self.log = []  # halves, and whether what is made was there
        self.pending = {}
        self.fails = None  # the half that raises
        self.cycles = 0  # a CUDA stream takes before it copies
        self.stream = None

    def __deepcopy__(self, memo):
        return Copy(self.ranks)

    def _begin(self, name, pairs):
        self._note(name)
        for _, to in pairs:
            if not to.is_cuda:
                to.fill_(torch.nan)
        if pairs and pairs[0][1].is_cuda:
            if self.stream is None:
                self.stream = torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                if self.cycles:
                    torch.cuda._sleep(self.cycles)
                self._copy(pairs)
                event = torch.cuda.Event()
                event.record()
            self.pending[event] = True
            return event
        started = object()
        self.pending[started] = pairs
        return started

    def _end(self, name, started):
        pairs = self.pending.pop(started)
        if pairs is True:
            torch.cuda.current_stream().wait_event(started)
        else:
            self._copy(pairs)
        self._note(name)

    def _note(self, name):
        self.log.append(name)
        if self.fails == name:
            raise ArithmeticError(name)

    @staticmethod
    def _copy(pairs):
        for source, to in pairs:
            if to.shape[0] >= source.shape[0]:
                to.view(-1, *source.shape).copy_(
                    source.expand(to.shape[0] // source.shape[0], -1, -1)
                )
            else:
                to.copy_(source.view(-1, *to.shape).sum(0))

    def start(self, inputs, output):
        (x,) = inputs
        return self._begin("start", [(x, output)])

    def finish(self, started):
        self._end("finish", started)

    def start_backward(self, grad, inputs, grads):
        return self._begin("start_backward", [(grad, to) for to in grads if to is not None])

    def finish_backward(self, started):
        self._end("finish_backward", started)


class Overlapped(te.PlannedModule):
    """A linear layer between the halves of one copy in a forward, of the other in a backward."""

    def __init__(self, **options):
        super().__init__()
        self.first, self.second = Copy(), Copy()
        self.side = te.Linear(HIDDEN, HIDDEN, **options)
        self.last = te.LayerNormLinear(HIDDEN, HIDDEN, **options)
        self.meanwhile = lambda: None

    def emit(self, nodes, x):
        copied = nodes.function(self.first, x)
        side = nodes.function(self.between, nodes.run(self.side, x))
        again = nodes.function(self.second, x)
        out = nodes.run(self.last, nodes.add(again, nodes.add(copied, side)))
        return nodes.add(out, x)

    def between(self, x):
        self.meanwhile()
        return x * 2


def tokens(device, *shape, dtype=torch.float32):
    return torch.randn(*(shape or (TOKENS, BATCH)), HIDDEN, device=device, dtype=dtype)


def hooked(module):
    """A twin that calls its modules."""
    twin = copy.deepcopy(module)
    for child in twin.modules():
        if isinstance(child, te.Linear | te.LayerNormLinear | te.LayerNormMLP):
            child.register_forward_hook(lambda *_: None)
            break
    return twin


def step(module, x, recipe=None):
    x = x.detach().clone().requires_grad_()
    with te.autocast(recipe is not None, recipe=recipe and RECIPES[recipe]()):
        out = module(x)
    out.square().mean().backward()
    found = [out.detach(), x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return found


def kept(module):
    found = [of.get("_calls") for of in module.__dict__.get("_by_arguments", {}).values()]
    return [
        call
        for calls in [*found, module.__dict__.get("_calls")]
        if calls is not None
        for call in getattr(calls, "calls", {}).values()
    ]


def assert_one_plan(module):
    assert kept(module) and None not in kept(module)


@pytest.mark.parametrize("recipe", FP8)
def test_bits_and_order(device, recipe):
    module, xs = Overlapped(device=device), [tokens(device) for _ in range(3)]
    twin, results, log = hooked(module), [], []
    module.first.log = module.second.log = log
    module.__dict__["meanwhile"] = lambda: log.append("between")
    for own in (module, twin):
        results.append([])
        for x in xs:
            log.clear()
            results[-1].append(step(own, x, recipe))
        if own is module:
            seen = list(log)
    assert_same_bits(*results)
    assert_one_plan(module)
    # Autograd repeats the function between in the backward.
    assert seen == [
        *("start", "between", "start", "finish", "finish"),
        *("start_backward", "between", "start_backward", "finish_backward", "finish_backward"),
    ]
    plans = module.plans_of(xs[0].requires_grad_())
    for (_, plan), inside in zip(plans, ("gemm_output", "gemm_grad_input"), strict=True):
        stages = plan.stages
        pairs = [(i, s.half) for i, s in enumerate(stages) if s.half > i]
        assert len(pairs) == 2
        names = [s.name for begin, end in pairs for s in stages[begin:end]]
        assert any(name.endswith(inside) for name in names)
        for begin, end in pairs:
            assert stages[end].name == stages[begin].name + "_finish"
            assert stages[end].half == begin and stages[end].buffers == stages[begin].buffers


def test_nothing_is_there_between_the_halves(device):
    module, x, seen = Overlapped(device=device), tokens(device), []
    with torch.no_grad():
        expected = [module(x) for _ in range(3)][-1]

    def look():
        ((started, pairs),) = module.first.pending.items()
        if device == "cuda":
            seen.append(not started.query())
        else:
            seen.append(all(torch.isnan(to).all() for _, to in pairs))

    module.first.cycles = 200_000_000
    module.__dict__["meanwhile"] = look
    with torch.no_grad():
        assert_same_bits(module(x), expected)
    assert seen == [True]
    assert_one_plan(module)


class Gathered(te.PlannedModule):
    """A linear layer over the rows of three ranks, whose result may go back to one."""

    def __init__(self, scatter, **options):
        super().__init__()
        self.inner = te.Linear(HIDDEN, HIDDEN, **options)
        self.gather, self.scatter = Copy(3), Copy(Fraction(1, 3)) if scatter else None

    def emit(self, nodes, x):
        x = nodes.run(self.inner, nodes.function(self.gather, x))
        return x if self.scatter is None else nodes.function(self.scatter, x)


@pytest.mark.parametrize("shape", [(16,), (8, BATCH)])  # FP8 pads the rows of each rank to 16
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("recipe", FP8)
def test_other_rows(device, recipe, scatter, shape):
    module = Gathered(scatter, device=device)
    twin, x = hooked(module), tokens(device, *shape)
    for _ in range(3):
        results = step(module, x, recipe), step(twin, x, recipe)
        assert_same_bits(*results)
        assert results[0][0].shape == ((1 if scatter else 3) * shape[0], *shape[1:], HIDDEN)
    assert_one_plan(module)


def test_a_function_of_many_values(device):
    class Many(te.PlannedModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(te.Linear(HIDDEN, 8, device=device) for _ in range(7))
            self.last = te.Linear(56, HIDDEN, device=device)

        def emit(self, nodes, x):
            parts = [nodes.run(layer, x) for layer in self.layers]
            return nodes.run(
                self.last, nodes.function(lambda *all: torch.cat(all, 1).sin(), *parts)
            )

    module, x = Many(), tokens(device)
    twin = hooked(module)
    for _ in range(3):
        assert_same_bits(step(module, x), step(twin, x))
    assert_one_plan(module)


# ---- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.parametrize(
    "where", ["start", "finish", "between", "start_backward", "finish_backward"]
)
def test_failures(device, where, error):
    """What was started is finished, the error arrives, and the next call is right."""
    module, x = Overlapped(device=device), tokens(device)
    for _ in range(2):
        expected = step(module, x)
    assert_one_plan(module)

    def fail():
        raise error(where)

    first, second = module.first, module.second
    first.log.clear(), second.log.clear()
    if where == "between":
        module.__dict__["meanwhile"] = fail
    else:
        first.__dict__["_note"] = lambda name: (first.log.append(name), name == where and fail())
    with pytest.raises(error, match=where):
        step(module, x)
    module.zero_grad()
    for one in (first, second):
        begun = sum(name.startswith("start") for name in one.log) - (
            one is first and "start" in where
        )
        assert begun == sum(name.startswith("finish") for name in one.log)
        one.__dict__.pop("_note", None)
        one.pending.clear()
    module.__dict__["meanwhile"] = lambda: None
    assert_same_bits(step(module, x), expected)


def test_a_second_half_that_fails_too(device, monkeypatch):
    """The first error arrives; the other one is told of, as one that nobody can catch."""
    module, x, told = Overlapped(device=device), tokens(device), []
    expected = [module(x).detach() for _ in range(3)][-1]

    def fail():
        raise ArithmeticError("between")

    module.__dict__["meanwhile"], module.first.fails = fail, "finish"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda told_of: told.append(str(told_of.exc_value)))
        with pytest.raises(ArithmeticError, match="between"):
            module(x)
    assert told == ["finish"]
    module.__dict__["meanwhile"], module.first.fails = (lambda: None), None
    assert_same_bits(module(x).detach(), expected)


# ---- stages of modules ---------------------------------------------------------------------------


def product(into, a, b, form):
    """A GEMM by Python, ``a b^T``, in two halves, of which the second one doubles it."""

    def operand(buffers, name, form):
        if f"{name}_{form}" in buffers:
            return buffers[f"{name}_{form}"].double() * buffers[f"{name}_scales"][0].double()
        return buffers[name].double()

    def start(buffers):
        left, right = operand(buffers, a, "row"), operand(buffers, b, form)
        found = left @ (right.t() if right.shape[-1] == left.shape[-1] else right)
        for bias in ("bias_cast", "bias"):  # in a layer it may be added behind
            if bias in buffers:
                found += buffers[bias].double()
                break
        buffers[into].copy_(found.view(buffers[into].shape))
        return buffers[into]

    def finish(buffers, started):
        assert buffers[into].data_ptr() == started.data_ptr()
        started.mul_(2)

    return Halves(start, finish)


def whole(halves):
    """The same at once."""
    return lambda buffers: halves.finish(buffers, halves.start(buffers))


def products(grad="grad_input"):
    """Of a linear layer, whose input has that gradient."""
    return {
        "gemm_output": product("output", "input", "weight", "row"),
        "gemm_grad_input": product(grad, "grad_output", "weight", "column"),
    }


def with_stages_of(twin, module):
    for own, other in zip(module.modules(), twin.modules(), strict=True):
        if getattr(own, "_stages", None):
            other._stages = own._stages
    return twin


@pytest.mark.parametrize("recipe", FP8)
def test_halves_of_a_linear_layer(device, recipe):
    layer, x = te.Linear(HIDDEN, HIDDEN, device=device), tokens(device)
    twin = copy.deepcopy(layer)
    layer.override_stages(**products())
    twin.override_stages(**{name: whole(halves) for name, halves in products().items()})
    for _ in range(3):
        assert_same_bits(step(layer, x, recipe), step(twin, x, recipe))
    names = [stage.name for stage in layer.plans_of(x.requires_grad_())[1][1].stages]
    assert "gemm_grad_input_finish" in names


def test_halves_that_are_no_functions(device):
    layer = te.Linear(HIDDEN, HIDDEN, device=device)
    with pytest.raises(ValueError, match="gemm_outputs"):
        layer.override_stages(gemm_outputs=Halves(print, print))
    layer.override_stages(gemm_output=Halves(print, None))
    with pytest.raises(TypeError, match="gemm_output_finish: None is not callable"):
        layer(tokens(device))
    functions = {"gemm_output": print}
    layer.override_stages(gemm_output=Halves(print, print))
    plan = layer.plans_of(tokens(device))[0][1]
    given = tokens(device), layer.weight, layer.bias
    with pytest.raises(RuntimeError, match="gemm_output_finish is external and has no function"):
        _core.run_staged(plan.native, 0, 0, functions, None, print, *given)
    with pytest.raises(RuntimeError, match="external stages"):
        _core.run(plan.native, 0, 0, *given)


class Chain(te.PlannedModule):
    """Modules that share values: gradients that are passed on, and sums of several."""

    def __init__(self, **options):
        super().__init__()
        self.one = te.Linear(HIDDEN, HIDDEN, **options)
        self.two = te.LayerNormLinear(HIDDEN, HIDDEN, **options)
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **options)

    def emit(self, nodes, x):
        y = nodes.add(nodes.run(self.one, x), x)
        both = nodes.add(nodes.run(self.two, y), nodes.run(self.mlp, y))
        return nodes.add(both, y)


@pytest.mark.parametrize("recipe", FP8)
def test_stages_of_modules_in_a_layer(device, recipe):
    """The layer is one plan, and the functions see what they see where the module is called."""
    module, x, seen = Chain(device=device), tokens(device), []

    def gemm(buffers):
        seen.append((buffers.rows, buffers.slot >= 0))
        into = buffers["output"]
        a, b = buffers.get("input"), buffers["weight"].double()
        if recipe is not None:
            of = ("input", "weight")
            a, b = (buffers[f"{x}_row"].double() * buffers[f"{x}_scales"][0].double() for x in of)
        bias = buffers["bias_cast" if "bias_cast" in buffers else "bias"].double()
        into.copy_((a.double() @ b.t() + bias).view(into.shape))

    module.one.override_stages(**products() | {"gemm_output": gemm})
    module.two.override_stages(gemm_grad_input=products("grad_norm_output")["gemm_grad_input"])
    twin = with_stages_of(hooked(module), module)
    for _ in range(3):
        assert_same_bits(step(module, x, recipe), step(twin, x, recipe))
    assert_one_plan(module)
    assert not kept(twin) and len(seen) == 6 and len(set(seen)) == 1
    assert seen[0][0] == TOKENS * BATCH
    for own in (module.one, module.two, twin.one, twin.two):
        own.override_stages()
    for _ in range(2):
        assert_same_bits(step(module, x, recipe), step(twin, x, recipe))
    assert_one_plan(module)


@pytest.mark.parametrize("recipe", FP8)
def test_stages_in_a_transformer_layer(device, recipe):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer = te.TransformerLayer(
        HIDDEN,
        2 * HIDDEN,
        4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        device=device,
    )
    proj = product("output", "input", "weight", "row")
    fc2 = product("output", "fc2_input", "fc2_weight", "row")
    layer.self_attention.proj.override_stages(gemm_output=proj)
    layer.layernorm_mlp.override_stages(fc2_gemm_output=fc2)
    twin, x = with_stages_of(hooked(layer), layer), tokens(device, dtype=dtype)
    for _ in range(3):
        assert_same_bits(step(layer, x, recipe), step(twin, x, recipe))
    assert_one_plan(layer)
    assert not kept(twin)


@pytest.mark.parametrize("recipe", FP8)
def test_stages_over_a_source(device, recipe):
    """A module of a layer may read another sequence, whose rows its functions are told."""

    class Cross(te.PlannedModule):
        def __init__(self):
            super().__init__()
            options = {"attention_dropout": 0.0, "params_dtype": dtype, "device": device}
            self.attention = te.MultiheadAttention(
                HIDDEN, 4, attention_type="cross", input_layernorm=True, **options
            )

        def emit(self, nodes, x):
            return nodes.add(nodes.run(self.attention, x, encoder_output=source), x)

    multiplied = whole(product("output", "input", "weight", "row"))

    def double(buffers):
        seen.append((buffers.rows, tuple(buffers["output"].shape[:-1])))
        return multiplied(buffers)

    dtype, seen = torch.bfloat16 if device == "cuda" else torch.float32, []
    source = tokens(device, 4, BATCH, dtype=dtype)
    module, x = Cross(), tokens(device, dtype=dtype)
    module.attention.key_value.override_stages(gemm_output=double)
    twin = hooked(module)
    twin.attention.proj.register_forward_hook(lambda *_: None)
    twin.attention.key_value._stages = module.attention.key_value._stages
    for _ in range(3):
        assert_same_bits(step(module, x, recipe), step(twin, x, recipe))
    assert_one_plan(module)
    assert len(seen) == 6 and set(seen) == {(4 * BATCH, (4, BATCH))}


def test_what_a_first_half_gives_lives_as_long_as_the_run(device):
    class Started:
        pass

    layer, x, alive = te.Linear(HIDDEN, HIDDEN, device=device), tokens(device), []

    def start(buffers):
        given = Started()
        alive.append(weakref.ref(given))
        return given

    layer.override_stages(
        gemm_output=Halves(start, lambda _, given: alive.append(given is not None))
    )
    for _ in range(3):
        layer(x)
    assert [one() for one in alive[::2]] == [None] * 3 and alive[1::2] == [True] * 3


# ---- texts and graphs ----------------------------------------------------------------------------


def test_text(device):
    module, x = Overlapped(device=device), tokens(device)
    step(module, x)
    for _, plan in module.plans_of(x.requires_grad_()):
        graph = read_text(plan.text)
        halves = [node.halves for node in graph.nodes if node.kind == _core.NODE_FUNCTION]
        assert sorted(halves) == [(), (0, 1), (0, 1)]
        again = _core.make_plan(
            graph.direction, _core.Graph(graph.flags, graph.values, graph.nodes)
        )
        assert again.id == plan.native.id
        nodes = [node._replace(halves=()) for node in graph.nodes]
        whole = _core.make_plan(graph.direction, _core.Graph(graph.flags, graph.values, nodes))
        assert whole.id != plan.native.id
        assert all(stage.half == -1 for stage in _core.plan_describe(whole).stages)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", FP8)
def test_cuda_graph(recipe):
    """A side stream is part of a captured graph, and joined in it."""
    module, x = Overlapped(device="cuda"), tokens("cuda").requires_grad_()
    grad = torch.randn_like(x)
    how = {"enabled": recipe is not None, "recipe": recipe and RECIPES[recipe]()}

    def run():
        with te.autocast(**how):
            out = module(x)
        return out, *torch.autograd.grad(out, [x, *module.parameters()], grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [t.detach() for t in run()]  # autograd's graph is of the capture's stream
    if recipe == "delayed":  # its scales have moved on since
        graph.replay()
        assert all(torch.isfinite(t).all() for t in captured)
        return
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
        graph.replay()
        replayed = [t.clone() for t in captured]
        assert_same_bits(replayed, list(run()))


@pytest.mark.gpu
def test_a_failure_while_a_graph_is_captured():
    """What was started is joined, so the capture ends with the error alone."""
    module, x = Overlapped(device="cuda"), tokens("cuda")
    with torch.no_grad():
        expected = module(x), module(x), module(x)

    def fail():
        raise ArithmeticError("between")

    module.__dict__["meanwhile"] = fail
    with pytest.raises(ArithmeticError, match="between"), torch.no_grad():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            module(x)
    module.__dict__["meanwhile"] = lambda: None
    with torch.no_grad():
        assert_same_bits(module(x), expected[-1])
