# SPDX-License-Identifier: Apache-2.0
"""What plans return through the module, and Python functions at their stages."""

import functools
import threading

import native
import pytest
import torch
from comparators import assert_nmse
from native import ROWS, K, N, fresh_core, linear_plan, linear_tensors, state
from tols import tol


@pytest.fixture
def core():
    return fresh_core()


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
    assert len(described.buffers) > 56 and len(described.stages) > 40 and none is None


@pytest.mark.parametrize("rows", [1, 3, 5, 6, 130])
@pytest.mark.parametrize("recipe", ["RECIPE_NONE", "RECIPE_DELAYED"])
@pytest.mark.parametrize("make", ["mlp", "attention", "chain", "sums"])
def test_a_run_that_consumes_what_was_saved(core, make, recipe, rows):
    """It gives the same bits, and writes to what was saved, which it reads no more, not beyond."""
    chain = functools.partial(native.chain_graph, depth=5)
    graph = {"mlp": native.mlp_graph, "attention": native.attention_graph, "chain": chain}
    graph = (graph | {"sums": native.sums_graph})[make]
    graph = graph(core, recipe=getattr(core, recipe))
    forward, backward = (graph.plan(d) for d in (core.DIRECTION_FORWARD, core.DIRECTION_BACKWARD))
    width = graph.values[0].shape[1]
    given = {"angles": torch.randn(rows, native.HEAD), "input": torch.randn(rows, 1, width)}
    given |= dict(zip(("scale", "history"), state(), strict=True))
    given |= {"grad_output": torch.randn(rows, 1, graph.values[1].shape[1])}
    for value in graph.values:
        if value.flags & core.VALUE_PARAMETER:
            given[value.name] = torch.randn(value.shape)

    def run(run, plan, *saved):
        tensors = [given[n] for n in native.buffers_of(core, plan, "input", "parameter", "state")]
        external = [s.name for s in core.plan_describe(plan).stages if s.external]
        if not external:
            return run(plan, 0, 0, *tensors, *saved)
        numbers = native.numbers_of(core, plan)
        draw = {name: lambda lend: lend(numbers["add_rng"]).zero_() for name in external}
        return run_staged(core, plan, draw, None, *tensors)

    *_, saved = run(core.run, forward)
    before = saved.clone()
    *expected, _ = run(core.run, backward, saved)
    assert torch.equal(saved, before)
    around = torch.full((saved.numel() + 2 * 1024,), 77, dtype=torch.uint8)
    saved = around[1024:-1024].copy_(saved)
    *found, _ = run(core.run_consuming, backward, saved)
    assert (around[:1024] == 77).all() and (around[-1024:] == 77).all()
    assert len(found) == len(expected) > 0
    assert all(map(torch.equal, found, expected))
    if rows == 130:
        assert not torch.equal(saved, before)


def test_a_forward_consumes_nothing(core):
    with pytest.raises(ValueError, match="a forward consumes nothing that was saved"):
        core.run_consuming(linear_plan(core, core.DIRECTION_FORWARD), 0, 0, *linear_tensors())


def test_a_plan_that_does_nothing(core):
    """Rows are its only argument, and there is no tensor to tell a device."""
    plan = linear_plan(core, core.DIRECTION_DEFERRED, core.RECIPE_NONE)
    assert core.plan_describe(plan).stages == () and core.plan_infer(plan, 3) == (0, 0, ())
    assert core.run(plan, 0, 0, ROWS) == (None,)


# ---- functions at stages ----


def run_staged(core, plan, functions, observer, *tensors):
    """run_staged, whose functions get lend() itself."""
    return core.run_staged(plan, 0, 0, functions, observer, lambda lend, rows, slot: lend, *tensors)


def test_an_observer_sees_every_stage_and_changes_nothing(core):
    tensors = linear_tensors()
    plan = linear_plan(core, core.DIRECTION_FORWARD)
    output, saved = core.run(plan, 0, 0, *tensors)
    described, seen = core.plan_describe(plan), []
    output_number = native.numbers_of(core, plan)["output"]

    def look(stage, lend, done):
        seen.append((stage, done))
        if (described.stages[stage].name, done) == ("gemm_output", True):
            assert torch.equal(lend(output_number), output)

    history = torch.zeros_like(tensors[4])
    again = run_staged(core, plan, {}, look, *tensors[:4], history)
    assert torch.equal(again[0], output) and torch.equal(history, tensors[4])
    assert again[1].shape == saved.shape
    assert seen == [(s, done) for s in range(len(described.stages)) for done in (False, True)]


def test_an_external_stage_is_called(core):
    name = "quantize_input"
    plan = linear_plan(core, core.DIRECTION_FORWARD, external=native.external(core, name))
    described = core.plan_describe(plan)
    assert (name, True, 0) in [(s.name, bool(s.external), s.node) for s in described.stages]
    with pytest.raises(RuntimeError, match="run: plan: it has external stages: use run_staged"):
        core.run(plan, 0, 0, *linear_tensors())
    numbers = native.numbers_of(core, plan)
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
    assert calls == [(ROWS, 1)] and kept[2] is output
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
        core, core.DIRECTION_FORWARD, core.RECIPE_NONE, external=native.external(core, name)
    )
    numbers = native.numbers_of(core, plan)
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
        core, core.DIRECTION_FORWARD, core.RECIPE_NONE, external=native.external(core, name)
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


# ---- attention, sizes of sequences ----

WIDTH = native.HEADS * native.HEAD


def attention_tensors():
    """What the graph of attention is given, by name."""
    shapes = {
        "input": (2, 5, WIDTH), "angles": (7, native.HEAD), "qkv_weight": (3 * WIDTH, WIDTH),
        "qkv_bias": (3 * WIDTH,), "add_bias": (WIDTH,), "grad_output": (2, 5, WIDTH),
    }  # fmt: skip
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def run_attention(core, given):
    """Results of the forward of the graph of attention; dropout by the pair (7, 11)."""
    plan = native.attention_graph(core, core.RECIPE_NONE).plan(0)
    number = native.numbers_of(core, plan)
    pair = torch.tensor([7, 11])
    functions = {"add_draw": lambda lend: lend(number["add_rng"]).copy_(pair)}
    names = native.buffers_of(core, plan, "input", "parameter")
    return run_staged(core, plan, functions, None, *(given[name] for name in names))


def attended(given):
    """What the graph computes before its dropout + add, in float64."""
    x, angles, weight, bias, _, _ = (tensor.double() for tensor in given.values())
    qkv = torch.nn.functional.linear(x, weight, bias).unflatten(-1, (3, native.HEADS, native.HEAD))
    query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
    first, second = query.chunk(2, -1)
    turn = angles[:5]
    query = query * turn.cos() + torch.cat((-second, first), -1) * turn.sin()
    forbidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    scores = (0.5 * query @ key.transpose(2, 3)).masked_fill(forbidden, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2)


def test_attention_in_a_run(core):
    given = attention_tensors()
    output, _ = run_attention(core, given)
    capped = 30 * (attended(given) / 30).tanh() + given["add_bias"]
    dropped = output - given["input"]
    kept = dropped != 0
    assert 0.5 < kept.float().mean() < 0.95  # three quarters of 120
    exact = torch.where(kept, capped / 0.75, 0)
    assert_nmse(dropped, exact, 4 * tol("sum", torch.float32, WIDTH))


@pytest.mark.parametrize("shape", [(10, WIDTH), (2, 5, 1, WIDTH), (WIDTH,)])
def test_heads_need_sequences(core, shape):
    with pytest.raises(ValueError, match=f"input: {len(shape)} dims, expected 3"):
        run_attention(core, attention_tensors() | {"input": torch.randn(shape)})
