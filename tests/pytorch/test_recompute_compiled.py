# SPDX-License-Identifier: Apache-2.0
"""Compiled modules under checkpoints: the bits of a run without, wherever the backward runs."""

import contextlib
import copy
import itertools

import pytest
import torch
from pytorch.helpers import assert_same_bits, states_of
from pytorch.recompute_cases import CHECKPOINTS, PROGRAMS, ROWS, WIDTH, Block, plain
from thinning import pairs
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    NVFP4BlockScaling,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    # The compiler looks at the attribute of every input.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

STEPS = 3
RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=2),
    "measured": lambda: DelayedScaling(amax_history_len=2, measure_first=True),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
OWN = [name for name in CHECKPOINTS if name.startswith("te")]


@pytest.fixture(autouse=True)
def enough_graphs():
    """None of other tests, and as many as states of scales, gradients and flags ask for."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def train(blocks, functions, run, made, x, backward_inside=False):
    """Gradients and losses of a few steps, states after them, and FP8 GEMMs of the last step."""
    found = []
    for step in range(STEPS):
        for block in blocks:
            block.zero_grad()
        given = (x * 2.0**step).requires_grad_()
        with te.counting() as ran:
            with te.autocast(enabled=made is not None, recipe=made):
                out = given
                for function in functions:
                    out = run(function, out)
                if backward_inside:
                    out.square().mean().backward()
            if not backward_inside:
                out.square().mean().backward()
        found += [out.detach(), given.grad, *(p.grad for b in blocks for p in b.parameters())]
        count = ran.fp8_gemms
    return found, [states_of(block) for block in blocks], count


def pair(device, count, kind="linear"):
    blocks = [Block(device, kind=kind) for _ in range(count)]
    return blocks, copy.deepcopy(blocks), torch.randn(ROWS, WIDTH, device=device)


# A checkpoint repeats calls of operators, which hold what recipe and kind of module ask for.
@pairs(name=OWN, recipe=RECIPES, kind=["linear", "mlp"])
def test_backward_outside_of_the_region(device, name, recipe, kind):
    """Two compiled blocks around one that is not; scales change between forward and repetition."""
    blocks, same, x = pair(device, 3, kind)
    made = RECIPES[recipe]()
    expected = train(blocks, blocks, plain, made, x)
    functions = [torch.compile(b, backend="aot_eager") if i != 1 else b for i, b in enumerate(same)]
    found = train(same, functions, CHECKPOINTS[name], made, x)
    assert_same_bits(found[0], expected[0])
    assert_same_bits(found[1], expected[1])
    assert (expected[2], found[2]) == (18, 24)


@pytest.mark.parametrize("name", OWN)
def test_two_modules_in_one_function(device, name):
    """Of a compiled module and one that is not the first one has the flag, in either order."""
    made = RECIPES["delayed"]()
    for compiled_first in (True, False):
        blocks, same, x = pair(device, 2)
        expected = train(blocks, [torch.nn.Sequential(*blocks)], plain, made, x)
        calls = list(same)
        calls[1 - compiled_first] = torch.compile(same[1 - compiled_first], backend="aot_eager")
        both = [lambda x, calls=calls: calls[1](calls[0](x))]
        found = train(same, both, CHECKPOINTS[name], made, x)
        assert_same_bits(found[:2], expected[:2])


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("inside", [False, True])
def test_region_of_the_function(device, name, inside):
    """A function that enters its region itself, and a backward inside or outside of another one."""
    made = RECIPES["current"]()
    blocks, same, x = pair(device, 2)
    compiled = [torch.compile(block, backend="aot_eager") for block in same]

    def entering(block):
        def function(x):
            with te.autocast(recipe=made):
                return block(x)

        return function

    around = made if inside else None
    expected = train(blocks, map_all(entering, blocks), plain, around, x, inside)
    found = train(same, map_all(entering, compiled), PROGRAMS[name], around, x, inside)
    assert_same_bits(found[:2], expected[:2])
    assert (expected[2], found[2]) == (12, 16)


def map_all(function, items):
    return [function(item) for item in items]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in OWN])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_others_repeat_in_the_same_precision_or_not_at_all(device, name, recipe):
    (block,), _, x = pair(device, 1)
    compiled = torch.compile(block, backend="aot_eager")
    made = RECIPES[recipe]()
    with te.autocast(recipe=made):
        out = PROGRAMS[name](compiled, x.requires_grad_())
    with pytest.raises(RuntimeError, match=r"another precision.*transformer_engine\.pytorch\.ch"):
        out.sum().backward()


def test_a_compiler_that_has_given_up(device):
    """A forward in a graph and its repetition without one: an error that says what to do."""
    compiled = torch.compile(Block(device), backend="aot_eager")
    x = torch.randn(ROWS, WIDTH, device=device, requires_grad=True)
    with te.autocast(recipe=RECIPES["delayed"]()):
        out = te.checkpoint(compiled, x)
    torch._dynamo.config.recompile_limit = 1  # until the test ends
    with pytest.raises(RuntimeError, match=r"Linear more than the 0 times.*recompile_limit"):
        out.sum().backward()


@pytest.mark.parametrize(("name", "grad"), list(itertools.product(OWN, [True, False])))
def test_high_precision_and_no_gradients(device, name, grad):
    blocks, same, x = pair(device, 1)
    compiled = torch.compile(same[0], backend="aot_eager")
    given = x.requires_grad_(grad)
    with contextlib.nullcontext() if grad else torch.no_grad():
        expected, found = blocks[0](given), CHECKPOINTS[name](compiled, given)
    assert_same_bits(found, expected)
    if grad:
        found.sum().backward()
        other = torch.autograd.grad(expected.sum(), given)[0]
        assert_same_bits(given.grad, other)


def test_backward_twice(device):
    """A graph that is kept is repeated twice, over the scales of its forward both times."""
    made = RECIPES["delayed"]()
    blocks, same, x = pair(device, 1)
    results = []
    for block, run in ((blocks[0], plain), (same[0], te.checkpoint)):
        function = block if run is plain else torch.compile(block, backend="aot_eager")
        given = x.detach().clone().requires_grad_()
        with te.autocast(recipe=made):
            out = run(function, given)
        for keeps in (True, False):
            out.sum().backward(retain_graph=keeps)
        results.append([given.grad, *(p.grad for p in block.parameters())])
    assert_same_bits(results[1], results[0])


def test_random_pairs_of_nvfp4(device):
    """The forward draws as many pairs as its repetition, which needs them."""
    torch.manual_seed(1)
    made = NVFP4BlockScaling()
    layers = [te.Linear(64, 64, params_dtype=torch.bfloat16, device=device) for _ in range(2)]
    same = copy.deepcopy(layers)
    x = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
    results = []
    for chosen, run in ((layers, torch_checkpoint), (same, te.checkpoint)):
        functions = chosen if run is torch_checkpoint else [
            torch.compile(layer, backend="aot_eager") for layer in chosen
        ]  # fmt: skip
        given = x.clone().requires_grad_()
        torch.manual_seed(7)
        with te.autocast(recipe=made):
            out = given
            for function in functions:
                out = run(function, out, use_reentrant=False)
        out.sum().backward()
        results.append([out.detach(), given.grad])
    assert_same_bits(results[1][0], results[0][0])
    assert torch.isfinite(results[1][1]).all()
