# SPDX-License-Identifier: Apache-2.0
"""The recompute that a program does by itself, and how modules find torch's checkpoints."""

import re

import processes
import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, states_of
from pytorch.recompute_cases import (
    CHECKPOINTS,
    ROWS,
    WIDTH,
    Block,
    Program,
    compare,
    model_on,
    plain,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import (
    activation_recompute_forward,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from transformer_engine.pytorch.execution import recompute

# Torch says so of a reentrant checkpoint in a forward without gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_program_with_several_forwards_pending(device, start, recipe, training):
    """Two microbatches in flight: the oldest forward is repeated first, in evaluation mode too."""
    made = RECIPES[recipe]()

    def step(model, run, xs):
        outs = []
        for x in xs:
            with te.autocast(recipe=made):
                outs.append(run(model, x))
        for out in outs:
            out.sum().backward()
        return [x.grad for x in xs] + [p.grad for p in model.parameters()] + [states_of(model)]

    results = []
    for run in (plain, Program.apply):
        start()
        model = Block(device).train(training)
        for factor in (1, 64):
            xs = [torch.randn(ROWS, WIDTH, device=device) * n * factor for n in (1, 8)]
            found = step(model, run, [x.requires_grad_() for x in xs])
        results.append(found)
    assert_same_bits(*results)


@pytest.mark.parametrize("inner", ["te-reentrant", "te-saved", "torch-saved"])
def test_checkpoint_inside_the_recompute_of_a_program(device, start, inner):
    made = RECIPES["delayed"]()

    def forward(model, run, x):
        def all_blocks(x):
            for block in model:
                x = (CHECKPOINTS[inner] if run is not plain else plain)(block, x)
            return x

        with te.autocast(recipe=made):
            return run(all_blocks, x)

    compare(start, device, (forward, Program.apply), 12)


def test_recompute_of_a_forward_that_was_not_marked(device):
    layer = te.Linear(WIDTH, WIDTH, device=device)

    class Unmarked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return layer(x)

        @staticmethod
        def backward(ctx, grad):
            # a region of its own: on CUDA another thread runs this
            with torch.enable_grad(), te.autocast(), activation_recompute_forward(True, True):
                layer(ctx.saved_tensors[0].detach())
            return grad

    x = torch.ones(ROWS, WIDTH, device=device, requires_grad=True)
    with te.autocast():
        out = Unmarked.apply(x)
        with pytest.raises(RuntimeError, match="did not run it in FP8"):
            out.sum().backward()


@activation_recompute_forward(activation_recompute=True)
def decorated():
    return is_fp8_activation_recompute_enabled(), in_fp8_activation_recompute_phase()


def test_mark_is_a_decorator_and_ends_with_an_error():
    assert decorated() == (True, False)
    with pytest.raises(KeyError), activation_recompute_forward(True, True):
        raise KeyError
    assert not is_fp8_activation_recompute_enabled() and not in_fp8_activation_recompute_phase()
    with activation_recompute_forward(recompute_phase=True):  # nothing is repeated
        assert not in_fp8_activation_recompute_phase()


# ---- how checkpoints are found -------------------------------------------------------------------


def signs(x):
    """Everything that torch tells of where a call runs."""
    return (
        torch.is_grad_enabled(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        torch._C._current_graph_task_id(),
        torch._C._current_autograd_node(),
        x.requires_grad,
    )


def test_a_reentrant_checkpoint_shows_no_sign(device):
    """Once this fails, the stack need not be walked for them."""
    seen = []

    def function(x):
        y = x * 2
        seen.append(signs(y))
        return y

    x = torch.ones(ROWS, WIDTH, device=device, requires_grad=True)
    torch_checkpoint(function, x, use_reentrant=True)
    with torch.no_grad():
        function(x)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("inside", [torch_checkpoint, None], ids=["checkpoint", "offloading"])
def test_hooks_show_the_topmost_pair_alone(device, inside):
    """The checkpoint around them is found all the same, and its recompute has its scales."""
    found = []
    layer = te.Linear(WIDTH, WIDTH, device=device)

    def inner(x):
        found.append(len(recompute.frames()[0]))
        return layer(x)

    def outer(x):
        if inside is not None:
            return inside(inner, x, use_reentrant=False)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return inner(x)

    results = []
    for run in (lambda f, x: torch_checkpoint(f, x, use_reentrant=False), plain):
        te.reset()
        layer.zero_grad()
        x = torch.ones(ROWS, WIDTH, device=device, requires_grad=True)
        with te.autocast(recipe=RECIPES["delayed"]()):
            out = run(outer, x)
        out.sum().backward()
        results.append([out, x.grad, layer.weight.grad, states_of(layer)])
    assert_same_bits(*results)
    assert found[0] == (2 if inside else 1)


@pytest.mark.parametrize("sign", recompute._SIGNS, ids=lambda sign: sign[0])
def test_a_torch_whose_names_have_changed_is_refused(sign, monkeypatch):
    for changed in ((sign[0], "other", sign[2]), (sign[0] + "_other", sign[1], sign[2])):
        monkeypatch.setattr(recompute, "_SIGNS", (changed,))
        with pytest.raises(ImportError, match="torch .* has no .*install a release of torch"):
            recompute._codes.__wrapped__()
    monkeypatch.undo()
    assert len(recompute._codes.__wrapped__()) == 1 + len(recompute._SIGNS)


def test_importing_the_package_checks_the_names():
    """Not in the middle of a training."""
    program = "import torch.utils.checkpoint as c; del c._checkpoint_hook; " + (
        "import transformer_engine.pytorch"
    )
    done = processes.run(program, check=False)
    assert done.returncode == 1
    assert re.search(r"ImportError: torch .* has no _checkpoint_hook", done.stderr), done.stderr


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_wrapper_of_composer(device, start, recipe, mode):
    """The calls of composer 0.32.1, composer/distributed/dist_strategy.py, around each layer."""
    tracker = te.distributed.CudaRNGStatesTracker()
    if device == "cuda":
        tracker.add("fsdp-rng", 7)

    def wrapped(module):
        return checkpoint_wrapper(
            module,
            context_fn=te.distributed.get_activation_recompute_contexts,
            checkpoint_fn=te.distributed.checkpoint,
            use_reentrant=False,
            get_rng_state_tracker=lambda: tracker,
        )

    made, results = RECIPES[recipe](), []
    x = torch.randn(ROWS, WIDTH, device=device)
    for wrap in (lambda module: module, wrapped):
        start()
        layers = list(model_on(device, 2, dropout=0.5))
        model = torch.nn.Sequential(*map(wrap, layers)).train(mode == "train")
        for _ in range(3):
            with te.autocast(recipe=made):
                out = model(x)
            out.sum().backward()
        parameters = [p.grad for layer in layers for p in layer.parameters()]
        results.append([out, parameters, [states_of(layer) for layer in layers]])
    assert_same_bits(results[1], results[0])
