# SPDX-License-Identifier: Apache-2.0
"""Modules that programs compose: one plan per direction, with the bits of their modules."""

import contextlib
import copy
import pickle
import random

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, same_draws, states_of
from pytorch.planned_modules import (
    BATCH,
    CHAINED,
    HEADS,
    HIDDEN,
    KINDS,
    LINKS,
    READERS,
    SOURCE,
    TOKENS,
    WITH_LINEARS,
    Chain,
    EncoderDecoder,
    Linears,
    Parallel,
    assert_one_plan,
    calls_of,
    hooked,
    inputs,
    planned_dtype,
    region,
    step,
)
from thinning import pairs

import transformer_engine.pytorch as te


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("kind", KINDS)
def test_one_plan_has_the_bits_of_the_modules(device, kind, recipe):
    dtype = planned_dtype(device)
    module = KINDS[kind](params_dtype=dtype, device=device)
    twin, steps = hooked(module), [inputs(kind, device, dtype) for _ in range(3)]
    results = []
    for own in (module, twin):
        with same_draws(device):
            results.append([step(own, given, recipe) for given in steps])
    assert_same_bits(*results)
    assert_one_plan(module)
    assert not calls_of(twin)
    with region(recipe):
        assert [title for title, _ in module.plans_of(*steps[0])] == ["forward", "backward"]
        assert twin.plans_of(*steps[0]) == []


def assert_chain_has_the_bits(links, recipe, device):
    """Of its modules called one by one, in 16 bits: results and states of two steps."""
    module = Chain(links, params_dtype=torch.bfloat16, device=device)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    twin = hooked(module)
    shape = TOKENS, 4, HIDDEN
    given = [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)]
    weights, results = torch.randn(shape, device=device, dtype=torch.bfloat16), []
    for own in (module, twin):
        results.append([])
        with same_draws(device):
            for x in given:
                x = x.clone().requires_grad_()
                with te.autocast(recipe is not None, recipe=recipe):
                    out = own(x)
                out.backward(weights)
                results[-1].append([out, x.grad, *(p.grad for p in own.parameters())])
                own.zero_grad()
        results[-1].append(states_of(own))
    assert_same_bits(*results, f"{links}")
    assert_one_plan(module)


# A reader asks for the form of its recipe, whichever norm or gate writes it.
@pairs(recipe=CHAINED, reader=READERS, norm=["layernorm", "rmsnorm"], gated=[False, True])
def test_who_reads_a_norm_reads_what_it_is_rounded_to(device, norm, gated, reader, recipe):
    """Also of several readers, whose gradients are added up before they come to the norm."""
    links = (norm, reader) if reader in WITH_LINEARS else (norm, reader, "linear")
    if gated:
        links = (norm, "gate", reader, "linear")
    assert_chain_has_the_bits(links, CHAINED[recipe](), device)


@pytest.mark.parametrize("recipe", CHAINED)
def test_chains_have_the_bits_of_their_modules(device, recipe):
    chance = random.Random(torch.initial_seed())
    for _ in range(6):
        links = [chance.choice(list(LINKS)) for _ in range(chance.randint(1, 4))]
        links.insert(chance.randint(0, len(links)), chance.choice(WITH_LINEARS))
        assert_chain_has_the_bits(tuple(links), CHAINED[recipe](), device)


def test_without_linear_layers_modules_are_called(device):
    module = Chain(("layernorm", "gate", "rmsnorm"), device=device)
    (given,) = inputs("chain", device)
    (first,), _, (last,) = module.layers
    normed = first(given)
    expected = last(normed + torch.nn.functional.mish(normed))
    assert_same_bits(module(given).detach(), expected.detach())
    assert module.plans_of(given) == []


@pytest.mark.parametrize("way", ["no_grad", "frozen", "eval", "compiled", "checkpoint", "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_ways_agree(device, kind, way):
    module = KINDS[kind](device=device)
    if way == "frozen":
        for number, parameter in enumerate(module.parameters()):
            parameter.requires_grad_(number % 3 == 0)
    module.train(way not in ("eval", "compiled"))
    twin, steps = hooked(module), [inputs(kind, device) for _ in range(3)]
    run = {"compiled": lambda m: torch.compile(m, backend="aot_eager")}.get(way, lambda m: m)
    results = []
    for own in (run(module), twin):
        with same_draws(device), contextlib.ExitStack() as stack:
            if way == "autocast":
                stack.enter_context(torch.autocast(device, torch.bfloat16))
            if way == "no_grad":
                stack.enter_context(torch.no_grad())
                results.append([own(*given) for given in steps])
            elif way == "checkpoint":
                results.append([checkpointed(own, given) for given in steps])
            else:
                results.append([step(own, given) for given in steps])
    assert_same_bits(*results)


def checkpointed(module, given):
    given = tuple(t.detach().clone().requires_grad_() for t in given)
    out = te.checkpoint(module, *given)
    out.square().mean().backward()
    grads = [p.grad for p in module.parameters()]
    module.zero_grad()
    return [out.detach(), *(t.grad for t in given), *grads]


def test_microbatches(device):
    """The first one casts the weights; later ones read its casts, whatever the weights are now."""
    dtype = planned_dtype(device)
    module = Parallel(0.0, params_dtype=dtype, device=device)
    given = inputs("parallel", device, dtype)
    first = step(module, given, "current", is_first_microbatch=True)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.data.mul_(2.0)
    later = step(module, given, "current", is_first_microbatch=False)
    assert_same_bits(later[0], first[0])
    assert_one_plan(module)
    again = step(module, given, "current", is_first_microbatch=True)
    assert not torch.equal(again[0], first[0])


def test_masks_and_arguments_of_a_call(device):
    dtype = planned_dtype(device)
    module = EncoderDecoder(params_dtype=dtype, device=device)
    twin, given = hooked(module), inputs("encoder-decoder", device, dtype)
    for seed in range(3):
        mask = torch.rand(BATCH, 1, TOKENS, SOURCE, device=device) < 0.2 + 0.2 * seed
        assert_same_bits(step(module, given, mask=mask), step(twin, given, mask=mask))
    block = Parallel(0.0, params_dtype=dtype, device=device)
    other = inputs("parallel", device, dtype)
    plain = hooked(block)
    for mask_type in ("causal", "no_mask", "causal"):
        assert_same_bits(
            step(block, other, mask_type=mask_type), step(plain, other, mask_type=mask_type)
        )
    assert not torch.equal(block(*other, "causal"), block(*other, "no_mask"))
    assert_one_plan(module)
    assert_one_plan(block)


class MayCross(te.PlannedModule):
    """Attends to a source where it is given one, and tells by its length."""

    def __init__(self, least=0, **options):
        super().__init__()
        self.norm = te.RMSNorm(HIDDEN, **options)
        self.cross = te.MultiheadAttention(
            HIDDEN, HEADS, attention_type="cross", attention_dropout=0.0, **options
        )
        self.least = least

    def emit(self, nodes, x, source=None):
        normed = nodes.run(self.norm, x)
        if source is None or (self.least and source.shape[0] < self.least):
            return normed
        return nodes.add(nodes.run(self.cross, normed, encoder_output=source), normed)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("least", [0, 1, 1000])
@pytest.mark.parametrize("order", ["without first", "with first"])
@pytest.mark.usefixtures("fresh_compiler")
def test_tensors_that_a_call_may_lack(device, order, least, compiled):
    """By position or by name: each has a plan of its own; what asks of their shapes, none."""
    dtype = planned_dtype(device)
    module = MayCross(least, params_dtype=dtype, device=device)
    x, source = inputs("encoder-decoder", device, dtype)
    kinds = [((x,), {}), ((x, source), {}), ((x,), {"source": source}), ((x, None), {})]
    own = torch.compile(module, backend="aot_eager") if compiled else module
    for args, options in kinds if order == "without first" else reversed(kinds):
        given = args[1] if len(args) > 1 else options.get("source")
        expected = module.norm(x)
        if given is not None and given.shape[0] >= least:
            expected = module.cross(expected, encoder_output=given) + expected
        assert_same_bits(own(*args, **options), expected)


def test_settings_count_from_the_next_call_on(device):
    module = Parallel(0.0, device=device)
    given = inputs("parallel", device)
    before = step(module, given)
    module.dropout = 0.9
    assert not torch.equal(step(module, given)[0], before[0])
    module.eval()
    assert_same_bits(step(module, given)[0], before[0])
    module.train().dropout = 0.0
    assert_same_bits(step(module, given), before)
    module.mlp = te.LayerNormMLP(HIDDEN, HIDDEN, device=device)
    assert not torch.equal(step(module, given)[0], before[0])


def test_modules_of_other_packages_are_called(device):
    class Mixed(Linears):
        def __init__(self):
            super().__init__(1, device=device)
            self.layers.append(torch.nn.Linear(HIDDEN, HIDDEN, device=device))

    module, given = Mixed(), inputs("linears", device)
    first, second = module.layers
    x = given[0].detach()
    expected = x + first(x)
    expected = second(expected) + expected
    assert_same_bits(module(x), expected)
    assert module.plans_of(x) == [] and not calls_of(module)


def test_hooks_of_blocks_run(device):
    module, seen = EncoderDecoder(device=device), []
    given = inputs("encoder-decoder", device)
    before = step(module, given)
    handle = module.block.register_forward_hook(lambda *_: seen.append(True))
    assert_same_bits(step(module, given), before)
    assert seen == [True]
    handle.remove()
    step(module, given)
    assert seen == [True]


def test_copies(device):
    module = Parallel(0.0, device=device)
    given = inputs("parallel", device)
    expected = step(module, given)
    loaded = Parallel(0.0, device=device)
    loaded.load_state_dict(module.state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert not calls_of(other)
        assert_same_bits(step(other, given), expected)


def test_what_nobody_reads(device):
    """A program may run what it has no use for."""

    class Dropping(Linears):
        def emit(self, nodes, x):
            nodes.run(self.layers[0], x)
            return nodes.run(self.layers[1], x)

    module, x = Dropping(2, device=device), torch.randn(TOKENS, HIDDEN, device=device)
    assert_same_bits(module(x).detach(), module.layers[1](x).detach())
    assert module.plans_of(x) == []


def test_a_module_without_emit():
    with pytest.raises(NotImplementedError, match="a PlannedModule defines emit"):
        te.PlannedModule()(torch.zeros(2, 2))
