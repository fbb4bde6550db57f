# SPDX-License-Identifier: Apache-2.0
"""Activation recompute gives the bits of a run without it, and advances the state once."""

import contextlib
import itertools

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, counted, states_of
from pytorch.recompute_cases import (
    CHECKPOINTS,
    KINDS,
    PROGRAMS,
    ROWS,
    STEPS,
    WIDTH,
    Block,
    compare,
    model_on,
    plain,
    train,
)
from thinning import pairs_of
from torch.utils.checkpoint import checkpoint as torch_checkpoint, set_checkpoint_early_stop

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.execution import recompute
from transformer_engine.pytorch.execution.thread_state import current_state

# Torch says so of every reentrant checkpoint inside another one: its forward has no gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


SITUATIONS = [(r, d, "linear") for r in RECIPES for d in (0.0, 0.5)]
SITUATIONS += [(r, 0.5, k) for r in ("delayed", "current") for k in KINDS if k != "linear"]


# Checkpoints and dropout are of torch: a recipe meets both.
@pairs_of(
    ("name", "recipe", "dropout", "kind"), [(n, *one) for n in PROGRAMS for one in SITUATIONS]
)
def test_region_outside(device, start, name, recipe, dropout, kind):
    made = RECIPES[recipe]()

    def forward(model, run, x):
        with te.autocast(recipe=made):
            for block in model:
                x = run(block, x)
        return x

    compare(start, device, (forward, PROGRAMS[name]), 6, dropout, kind)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_region_inside(device, start, name, recipe):
    made = RECIPES[recipe]()

    def forward(model, run, x):
        def inside(block, x):
            with te.autocast(recipe=made):
                return block(x)

        for block in model:
            x = run(inside, block, x)
        return x

    compare_inside(start, device, forward, name)


def compare_inside(start, device, forward, name):
    """As `compare`; a reentrant forward runs without gradients, so its exits update nothing."""
    results = []
    for run in (plain, PROGRAMS[name]):
        start()
        model = model_on(device)
        results.append(train(model, device, lambda x, m=model, r=run: forward(m, r, x)))
    (expected, base), (found, counts) = results
    assert base == [(18, 0)] * STEPS and counts == [(24, 0)] * STEPS
    assert_same_bits(found, expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_checkpoint_around_all(device, start, name):
    made = RECIPES["delayed"]()

    def forward(model, run, x):
        def all_blocks(x):
            for block in model:
                x = block(x)
            return x

        with te.autocast(recipe=made):
            return run(all_blocks, x)

    compare(start, device, (forward, PROGRAMS[name]), 6)


@pytest.mark.parametrize(("outer", "inner"), list(itertools.product(CHECKPOINTS, CHECKPOINTS)))
def test_nested_checkpoints(device, start, outer, inner):
    """Both recompute: the inner function runs three times."""
    made = RECIPES["delayed"]()

    def forward(model, run, x):
        first = plain if run is plain else CHECKPOINTS[outer]
        second = plain if run is plain else CHECKPOINTS[inner]

        def two(x):
            x = second(model[0], x)
            return second(model[1], x)

        with te.autocast(recipe=made):
            return model[2](first(two, x))

    results = []
    for run in (plain, torch_checkpoint):
        start()
        model = model_on(device)
        results.append(train(model, device, lambda x, m=model, r=run: forward(m, r, x)))
    assert_same_bits(results[1][0], results[0][0])
    counts = results[1][1]
    assert len(set(counts)) == 1 and 18 + 4 < counts[0][0] <= 18 + 8


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("kind", ["linear", "mlp-checkpoint"])
def test_same_modules_called_three_times_and_backwards_in_any_order(
    device, start, name, order, kind
):
    """Each recompute finds the scales of its own forward, whichever comes first."""
    made = RECIPES["delayed"]()
    results = []
    for run in (plain, CHECKPOINTS[name]):
        start()
        model = model_on(device, 1, kind=kind)
        inputs = [torch.randn(ROWS, WIDTH, device=device) * 8**n for n in range(3)]
        inputs = [x.requires_grad_() for x in inputs]
        outputs = []
        with counted() as gemms:
            for x in inputs:
                with te.autocast(recipe=made):
                    outputs.append(run(model[0], x))
            trace = [states_of(model)]
            for number in order:
                outputs[number].sum().backward()
                trace.append(states_of(model))
                trace.append([p.grad.clone() for p in model.parameters()])
        trace += [outputs, [x.grad for x in inputs]]
        results.append((trace, gemms.fp8))
    assert_same_bits(results[1][0], results[0][0])
    assert (results[0][1], results[1][1]) == (3 * KINDS[kind], 3 * KINDS[kind] + 6)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_several_calls_in_one_region_and_one_backward(device, start, name):
    made = RECIPES["delayed"]()

    def forward(model, run, x):
        with te.autocast(recipe=made):
            return sum(run(block, x * factor) for factor in (1, 5) for block in model)

    results = []
    for run in (plain, CHECKPOINTS[name]):
        start()
        model = model_on(device)
        results.append(train(model, device, lambda x, m=model, r=run: forward(m, r, x)))
    assert_same_bits(results[1][0], results[0][0])
    assert (results[0][1][0][0], results[1][1][0][0]) == (36, 48)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_retain_graph_twice(device, start, name):
    """Two backwards through one graph: the same gradients twice; the backward state goes on."""
    made = RECIPES["delayed"]()
    results = []
    for run in (plain, CHECKPOINTS[name]):
        start()
        model = model_on(device, 1)
        x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        with te.autocast(recipe=made):
            out = run(model[0], x)
        trace = [out]
        for keep in (True, False):
            with counted() as gemms:
                out.sum().backward(retain_graph=keep)
            trace += [x.grad.clone(), states_of(model)]
        results.append((trace, gemms.fp8))
    assert_same_bits(results[1][0], results[0][0])
    assert (results[0][1], results[1][1]) == (4, 6)


@pytest.mark.parametrize("name", ["torch-saved", "te-saved"])
@pytest.mark.parametrize("early", [True, False])
def test_early_stop(device, start, early, name):
    """Torch stops the recompute when it has what the backward saved; the next step is not upset."""
    made = RECIPES["delayed"]()

    def forward(model, run, x):
        with te.autocast(recipe=made), set_checkpoint_early_stop(early):
            for block in model:
                x = run(block, x)
        return x

    compare(start, device, (forward, CHECKPOINTS[name]), 6)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_settings_of_torchs_checkpoints_are_left_alone(device, use_reentrant):
    """They are the process's: another thread, or an interrupt, would find ours. All is repeated."""
    name, seen, ends = "_enable_checkpoint_early_stop", [], []

    def function(x):
        seen.append(getattr(torch.utils.checkpoint, name))
        x = x.sin()
        ends.append(None)  # the backward needs nothing of what is done from here on
        return x

    before = getattr(torch.utils.checkpoint, name)
    x = torch.ones(2, device=device, requires_grad=True)
    te.checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
    assert seen == [before] * 2 and len(ends) == 2
    assert getattr(torch.utils.checkpoint, name) is before


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("kind", ["linear", "mlp", "mlp-checkpoint"])
def test_weight_cache_inside_a_checkpoint(device, start, name, recipe, kind):
    """Microbatches: the recompute reads the cached weight of its forward."""
    made = RECIPES[recipe]()

    def forward(model, run, x):
        total = 0
        for first in (True, False):
            with te.autocast(recipe=made):
                y = x * (1 if first else 3)
                for block in model:
                    y = run(block, y, first)
            total = total + y
        return total

    results = []
    for run in (plain, CHECKPOINTS[name]):
        start()
        model = model_on(device, kind=kind)
        results.append(train(model, device, lambda x, m=model, r=run: forward(m, r, x)))
    assert_same_bits(results[1][0], results[0][0])
    base = 6 * KINDS[kind]
    assert (results[0][1][0][0], results[1][1][0][0]) == (base, base + 12)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_microbatches_with_a_backward_each(device, start, name):
    """The cache is rewritten between the forwards: the recompute keeps to its own."""
    made = RECIPES["delayed"]()
    results = []
    for run in (plain, CHECKPOINTS[name]):
        start()
        model = model_on(device, 1)
        x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
        outputs = []
        for factor in (1.0, 2.0):
            with te.autocast(recipe=made):
                outputs.append(run(model[0], x * factor, True))
        with counted() as gemms:
            for out in outputs:
                out.sum().backward()
        grads = [p.grad for p in model.parameters()]
        results.append(([outputs, x.grad, grads, states_of(model)], gemms.fp8))
    assert_same_bits(results[1][0], results[0][0])
    assert (results[0][1], results[1][1]) == (8, 12)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_first_block_without_checkpoint_and_the_other_way_round(device, start, name):
    made = RECIPES["delayed"]()

    def forward(model, run, x):
        with te.autocast(recipe=made):
            x = model[0](x)
            x = run(model[1], x)
            return model[2](x)

    compare(start, device, (forward, CHECKPOINTS[name]), 2)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_high_precision_under_a_checkpoint(device, start, name, kind):
    def forward(model, run, x):
        for block in model:
            x = run(block, x)
        return x

    results = []
    for run in (plain, CHECKPOINTS[name]):
        start()
        model = model_on(device, kind=kind)
        results.append(train(model, device, lambda x, m=model, r=run: forward(m, r, x)))
    assert_same_bits(results[1][0], results[0][0])
    base = 3 * KINDS[kind]
    assert (results[0][1][0], results[1][1][0]) == ((0, base), (0, base + 6))


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("before", [True, False])
def test_part_without_gradients_inside_a_checkpoint(device, start, name, recipe, before):
    """A frozen part, and a look at the output, of layers that did or did not run so before."""

    def forward(model, run, x):
        def function(x):
            with torch.no_grad():
                frozen = model[0](x)
                model[1](x)
            return model[1](frozen + x)

        if before:
            with torch.no_grad():
                model[0](x)
        region = te.autocast() if recipe is None else te.autocast(recipe=RECIPES[recipe]())
        with contextlib.nullcontext() if recipe is None else region:
            return run(function, x)

    results = []
    for run in (plain, CHECKPOINTS[name]):
        start()
        model = model_on(device, 2)
        for _ in range(STEPS):
            x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
            out = forward(model, run, x)
            out.square().sum().backward()
        grads = [p.grad for p in model[1].parameters()]
        assert all(p.grad is None for p in model[0].parameters())
        results.append([out, x.grad, grads, states_of(model)])
    assert_same_bits(*results)


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("together", [True, False])
def test_frozen_block_before_the_first_backward(device, start, name, recipe, together):
    """The scales of gradients are made although the region's first module has no backward."""

    def forward(model, run, x, image):
        if together:
            return run(lambda image, x: model[1](model[0](image) + x), image, x)
        return model[1](run(model[0], image) + x)

    results = []
    for run in (plain, CHECKPOINTS[name]):
        start()
        made = RECIPES[recipe]()
        model = model_on(device, 2)
        model[0].requires_grad_(False)
        for _ in range(STEPS):
            x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
            image = torch.randn(ROWS, WIDTH, device=device)
            with te.autocast(recipe=made):
                out = forward(model, run, x, image)
            out.square().sum().backward()
        if made.delayed():
            assert te.scales(model)["1.a.grad_output"].scale != 1.0
        results.append([out, x.grad, [p.grad for p in model[1].parameters()], states_of(model)])
    assert_same_bits(*results)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_backward_inside_another_region(device, start, name):
    """What is in force when the backward runs does not matter, and is not disturbed."""
    made = RECIPES["delayed"]()

    def regions(kind):
        if kind == "fp8":
            return te.autocast(recipe=DelayedScaling(amax_history_len=9))
        return te.autocast(enabled=False) if kind == "off" else contextlib.nullcontext()

    for kind in ("fp8", "off"):
        results = []
        for run, around in ((plain, None), (CHECKPOINTS[name], kind)):
            start()
            model = model_on(device, 1)
            x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
            with te.autocast(recipe=made):
                out = run(model[0], x)
            with counted() as gemms, torch.no_grad(), regions(around):
                owed = current_state().owes_update
                with torch.enable_grad():
                    out.sum().backward()
                assert current_state().owes_update == owed
            grads = [p.grad for p in model.parameters()]
            results.append(([out, x.grad, grads, states_of(model)], gemms.fp8))
        assert_same_bits(results[1][0], results[0][0])
        assert (results[0][1], results[1][1]) == (4, 6)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_modules_in_evaluation_mode(device, start, name):
    """Fine-tuning without dropout: eval() and gradients go together."""
    made = RECIPES["delayed"]()

    def forward(model, run, x):
        with te.autocast(recipe=made):
            for block in model.eval():
                x = run(block, x)
        return x

    compare(start, device, (forward, CHECKPOINTS[name]), 6)


def test_evaluation_under_no_grad_uses_no_recompute(device):
    model = model_on(device, 1).eval()
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.no_grad(), counted() as gemms, te.autocast(recipe=RECIPES["delayed"]()):
        expected = model[0](x)
        for run in CHECKPOINTS.values():
            assert_same_bits(run(model[0], x), expected)
    assert gemms.fp8 == 10


def test_forward_in_a_backward_without_a_checkpoint_names_te_checkpoint(device):
    """A recompute of somebody's own finds nothing stashed: an error, and the state is untouched."""
    block = Block(device)

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad(), te.autocast(recipe=made):
                block(ctx.saved_tensors[0].detach().requires_grad_())
            return grad

    made = RECIPES["delayed"]()
    with te.autocast(recipe=made):
        block(torch.randn(ROWS, WIDTH, device=device))
    before = states_of(block)
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    with counted() as gemms, pytest.raises(RuntimeError, match=r"Linear.*pytorch\.checkpoint"):
        Own.apply(x).sum().backward()
    assert gemms.fp8 == 0
    assert_same_bits(states_of(block), before)


def test_function_that_changes_between_the_calls(device):
    model = model_on(device, 2)
    calls = iter((model[0], model[1]))
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    with te.autocast(recipe=RECIPES["delayed"]()):
        out = te.checkpoint(lambda x: next(calls)(x), x)
    with pytest.raises(RuntimeError, match="must do the same at each call"):
        out.sum().backward()


def test_checkpoint_arguments(device):
    block = Block(device)
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="distribute_saved_activations"):
        te.checkpoint(block, x, distribute_saved_activations=True)
    entered = []

    @contextlib.contextmanager
    def note(name):
        entered.append(name)
        yield

    with counted() as gemms, te.autocast(recipe=RECIPES["delayed"]()):
        out = te.checkpoint(
            block,
            x,
            is_first_microbatch=True,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (note("forward"), note("recompute")),
        )
        assert block.a._weight_caches[0] is not None
    out.sum().backward()
    assert entered == ["forward", "recompute"] and gemms.fp8 == 2


def test_parameters_get_gradients_where_no_input_requires_one(device, start):
    """The reentrant form makes no node in the graph there."""
    x, results = torch.randn(ROWS, WIDTH, device=device), []
    for run in (plain, te.checkpoint):
        start()
        (block,) = model_on(device, 1)
        for _ in range(STEPS):
            with te.autocast(recipe=DelayedScaling(amax_history_len=2)):
                out = run(block, x)
            out.sum().backward()
        results.append([out, [p.grad for p in block.parameters()], states_of(block)])
    assert all(grad is not None for grad in results[0][1])
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_contexts_for_the_checkpoint_of_torch(device, start, recipe, mode):
    seen = []

    def again(block, x):
        def inside(x):
            distributed = te.distributed
            seen.append(
                (
                    distributed.is_fp8_activation_recompute_enabled(),
                    distributed.in_fp8_activation_recompute_phase(),
                    distributed.use_reentrant_activation_recompute(),
                )
            )
            return block(x)

        contexts = te.distributed.get_activation_recompute_contexts
        return torch_checkpoint(inside, x, use_reentrant=False, context_fn=contexts)

    made, results = RECIPES[recipe](), []
    x = torch.randn(ROWS, WIDTH, device=device)
    for run in (plain, again):
        start()
        (block,) = model_on(device, 1)
        block.train(mode == "train")
        for _ in range(STEPS):
            with te.autocast(recipe=made):
                out = run(block, x)
            out.sum().backward()
        results.append([out, [p.grad for p in block.parameters()], states_of(block)])
    assert_same_bits(results[1], results[0])
    assert seen == [(True, False, False), (True, True, False)] * STEPS
    assert not te.distributed.is_fp8_activation_recompute_enabled()
    assert not any(recompute._QUEUE.knows(module) for module in block.modules())


@pytest.mark.parametrize("checkpoint", [te.checkpoint, torch_checkpoint])
@pytest.mark.parametrize("reentrant", [True, False])
def test_which_form_of_recompute_runs(device, checkpoint, reentrant):
    seen, x = [], torch.ones(2, device=device, requires_grad=True)

    def inside(x):
        seen.append(te.distributed.use_reentrant_activation_recompute())
        return x.sin()

    checkpoint(inside, x, use_reentrant=reentrant).sum().backward()
    assert seen == [reentrant] * 2
    assert te.distributed.use_reentrant_activation_recompute()


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_stack_is_searched_without_a_checkpoint(device, recipe, monkeypatch):
    """A call without gradients is not taken for one that a reentrant checkpoint may repeat."""
    (block,), x = model_on(device, 1), torch.randn(ROWS, WIDTH, device=device)

    def searched():
        raise AssertionError

    monkeypatch.setattr(recompute, "_on_stack", searched)
    for _ in range(2):
        with torch.no_grad(), te.autocast(recipe=RECIPES[recipe]()):
            block(x)
