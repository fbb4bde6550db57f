# SPDX-License-Identifier: Apache-2.0
"""Modules that programs compose: one plan per direction, with the bits of their modules."""

import contextlib
import copy
import pickle
import random

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, same_draws, states_of
from pytorch.quantized_cases import WEIGHT_RECIPES
from thinning import pairs

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling, MXFP8BlockScaling

HIDDEN, HEADS, TOKENS, SOURCE, BATCH = 64, 4, 8, 6, 2


class Parallel(te.PlannedModule):
    """Attention and MLP side by side, a norm behind them."""

    def __init__(self, dropout=0.1, **options):
        super().__init__()
        self.attention = te.MultiheadAttention(
            HIDDEN, HEADS, input_layernorm=True, attention_dropout=0.0, **options
        )
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", **options)
        self.norm = te.RMSNorm(HIDDEN, **options)
        self.dropout = dropout

    def emit(self, nodes, x, mask_type="causal"):
        both = nodes.run(self.attention, x, attn_mask_type=mask_type)
        both = nodes.add(both, nodes.run(self.mlp, x))
        out = nodes.add(both, x, dropout=self.dropout if self.training else 0.0)
        return nodes.run(self.norm, out)


class EncoderDecoder(te.PlannedModule):
    """Attention to itself, attention to a source, and a block of its own."""

    def __init__(self, **options):
        super().__init__()
        own = {"input_layernorm": True, "attention_dropout": 0.0, **options}
        self.attention = te.MultiheadAttention(HIDDEN, HEADS, attn_mask_type="causal", **own)
        self.cross = te.MultiheadAttention(HIDDEN, HEADS, attention_type="cross", **own)
        self.block = Parallel(0.0, **options)

    def emit(self, nodes, x, source, mask=None):
        x = nodes.add(nodes.run(self.attention, x), x)
        crossed = {} if mask is None else {"attention_mask": mask, "attn_mask_type": "arbitrary"}
        x = nodes.add(nodes.run(self.cross, x, encoder_output=source, **crossed), x)
        return nodes.run(self.block, x, mask_type="no_mask")


class Linears(te.PlannedModule):
    """Linear layers one after the other, of a list."""

    def __init__(self, count, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            te.Linear(HIDDEN, HIDDEN, bias=i % 2 == 0, **options) for i in range(count)
        )

    def emit(self, nodes, x):
        for layer in self.layers:
            x = nodes.add(nodes.run(layer, x), x)
        return x


class Gated(te.PlannedModule):
    """A gated MLP with an activation of the program's in the middle."""

    def __init__(self, **options):
        super().__init__()
        wide = 2 * HIDDEN
        self.gate = te.LayerNormLinear(HIDDEN, wide, bias=False, **options)
        self.up = te.LayerNormLinear(HIDDEN, wide, bias=False, **options)
        self.down = te.Linear(wide, HIDDEN, **options)

    def emit(self, nodes, x):
        gated = nodes.function(gate, nodes.run(self.gate, x), nodes.run(self.up, x))
        return nodes.add(nodes.run(self.down, gated), x)


def gate(x, y):
    return torch.nn.functional.mish(x) * y


class Chain(te.PlannedModule):
    """Links one after the other: modules by name, and what joins values."""

    def __init__(self, links, **options):
        super().__init__()
        self.links = links
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleList(make(**options) for make in LINKS[link]) for link in links
        )

    def emit(self, nodes, x):
        first = x
        for link, layers in zip(self.links, self.layers, strict=True):
            parts = [nodes.run(layer, x) for layer in layers]
            if link == "function":
                x = nodes.function(torch.nn.functional.mish, x)
            elif link == "add":
                x = nodes.add(x, first)
            elif link == "gate":
                x = nodes.add(x, nodes.function(torch.nn.functional.mish, x))
            else:
                x = parts[0]
            for part in parts[1:]:
                x = nodes.add(x, part)
        return x


LINKS = {
    "linear": [lambda **o: te.Linear(HIDDEN, HIDDEN, **o)],
    "saving": [lambda **o: te.Linear(HIDDEN, HIDDEN, save_original_input=True, **o)],
    "norm-linear": [lambda **o: te.LayerNormLinear(HIDDEN, HIDDEN, **o)],
    "mlp": [lambda **o: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, activation="swiglu", **o)],
    "layernorm": [lambda **o: te.LayerNorm(HIDDEN, **o)],
    "rmsnorm": [lambda **o: te.RMSNorm(HIDDEN, **o)],
    "attention": [
        lambda **o: te.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, attn_mask_type="causal", **o
        )
    ],
    "heads": [
        lambda **o: te.MultiheadAttention(
            HIDDEN, HEADS, attention_dropout=0.0, qk_norm_type="RMSNorm", fuse_qkv_params=False, **o
        )
    ],
    "fork": [lambda **o: te.Linear(HIDDEN, HIDDEN, **o)] * 2,
    "threefold": [lambda **o: te.LayerNormLinear(HIDDEN, HIDDEN, **o)] * 3,
    "add": [],
    "function": [],
    "gate": [],
}
READERS = [link for link, modules in LINKS.items() if modules]
WITH_LINEARS = [link for link in READERS if link not in ("layernorm", "rmsnorm")]
CHAINED = {
    "none": lambda: None,
    **RECIPES,
    **WEIGHT_RECIPES,
    "high": lambda: Float8CurrentScaling(backward_override="high_precision"),
    "dequantized": lambda: MXFP8BlockScaling(backward_override="dequantized"),
}

KINDS = {
    "gated": Gated,
    "parallel": Parallel,
    "encoder-decoder": EncoderDecoder,
    "linears": lambda **o: Linears(3, **o),
    "norms": lambda **o: Chain(("rmsnorm", "fork", "gate", "layernorm", "linear"), **o),
}


def inputs(kind, device, dtype=torch.float32):
    x = torch.randn(TOKENS, BATCH, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    if kind != "encoder-decoder":
        return (x,)
    source = torch.randn(SOURCE, BATCH, HIDDEN, device=device, dtype=dtype, requires_grad=True)
    return x, source


def planned_dtype(device):
    """Attention of it is part of a plan."""
    return torch.bfloat16 if device == "cuda" else torch.float32


_LINEARS = te.Linear | te.LayerNormLinear | te.LayerNormMLP


def hooked(module):
    """A twin that calls its modules: one of them has a hook."""
    twin = copy.deepcopy(module)
    first = next(m for m in twin.modules() if isinstance(m, _LINEARS))
    first.register_forward_hook(lambda *_: None)
    return twin


def region(recipe):
    return te.autocast(recipe is not None, recipe=recipe and RECIPES[recipe]())


def step(module, given, recipe=None, **options):
    given = tuple(t.detach().clone().requires_grad_() for t in given)
    with region(recipe):
        out = module(*given, **options)
    out.square().mean().backward()
    grads = [p.grad for p in module.parameters()]
    module.zero_grad()
    return [out.detach(), *(t.grad for t in given), *grads]


def calls_of(module):
    """Calls that a module keeps; None in the place of one that its modules make."""
    kept = module.__dict__.get("_by_arguments", {}).values()
    return [call for of in kept for call in getattr(of.get("_calls"), "calls", {}).values()]


def assert_one_plan(module):
    found = calls_of(module)
    assert found and None not in found


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


@pytest.mark.parametrize("unused", [False, True])
def test_functions_in_the_middle(device, unused):
    """Of one to four values, some of which need no gradient or get none, to another width."""

    class Several(te.PlannedModule):
        def __init__(self, count):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                te.Linear(HIDDEN, 16, device=device) for _ in range(count)
            )
            self.last = te.Linear(24, HIDDEN, device=device)

        def emit(self, nodes, x):
            parts = [nodes.run(layer, x) for layer in self.layers]
            return nodes.run(self.last, nodes.function(mixed, *parts))

    def mixed(*parts):
        total = sum(part.sin() * (i + 1) for i, part in enumerate(parts[unused:]))
        return torch.cat([total, total[:, :8].cos()], 1)

    for count in range(1 + unused, 5):
        module = Several(count)
        if count > 2:
            module.layers[1].weight.requires_grad_(False)
            module.layers[1].bias.requires_grad_(False)
        x = torch.randn(TOKENS, HIDDEN, device=device)
        twin = hooked(module)
        for given in (x, x.clone().requires_grad_()):
            results = []
            for own in (module, twin):
                out = own(given)
                out.square().sum().backward()
                grads = [p.grad for p in own.parameters()]
                results.append([out.detach(), given.grad, *grads])
                own.zero_grad()
                given.grad = None
            if unused:  # a plan gives zeros where autograd has nothing
                zeros = [
                    [torch.zeros(()) if t is None or not t.any() else t for t in found]
                    for found in results
                ]
                results = zeros
            assert_same_bits(*results)
        assert_one_plan(module)


class Joined(te.PlannedModule):
    """What reads the input is no linear layer; a sum of values of one width, or of two."""

    def __init__(self, first, width, **options):
        super().__init__()
        self.first, given = first, HIDDEN // 2 if first == "function" else HIDDEN
        self.norm = te.RMSNorm(HIDDEN, **options)
        self.attention = te.MultiheadAttention(HIDDEN, HEADS, attention_dropout=0.0, **options)
        self.wide = te.Linear(HIDDEN, width, **options)
        self.skip = te.Linear(given, width if first == "function" else 1, **options)

    def emit(self, nodes, x):
        y = nodes.function(doubled, x) if self.first == "function" else x
        y = nodes.run(self.attention, x) if self.first == "attention" else y
        return nodes.add(nodes.run(self.wide, nodes.run(self.norm, y)), nodes.run(self.skip, x))


def doubled(x):
    return torch.cat([x, x.sin()], 1)


@pytest.mark.parametrize("first", ["function", "norm", "attention"])
def test_any_module_may_come_first(device, first):
    """The width of the input is that of its readers, not of the first linear layer."""
    dtype = planned_dtype(device)
    for width in (1, 24):
        module = Joined(first, width, params_dtype=dtype, device=device)
        columns, dims = module.skip.in_features, (TOKENS, BATCH)
        given = [torch.randn(*dims, columns, device=device, dtype=dtype) for _ in range(2)]
        twin = hooked(module)
        results = [[step(own, (x,)) for x in given] for own in (module, twin)]
        assert_same_bits(*results)
        if width == 1 or first == "function":
            assert_one_plan(module)
        else:  # one term of the sum is spread over the other
            assert not any(calls_of(module))
        with pytest.raises(ValueError, match="expected"):
            module(torch.randn(*dims, columns + 1, device=device, dtype=dtype))
        assert_same_bits(step(module, (given[0],)), results[1][0])


def test_what_nobody_reads(device):
    """A program may run what it has no use for."""

    class Dropping(Linears):
        def emit(self, nodes, x):
            nodes.run(self.layers[0], x)
            return nodes.run(self.layers[1], x)

    module, x = Dropping(2, device=device), torch.randn(TOKENS, HIDDEN, device=device)
    assert_same_bits(module(x).detach(), module.layers[1](x).detach())
    assert module.plans_of(x) == []


@pytest.mark.parametrize("what", ["parameter", "tensor", "random", "buffer"])
def test_what_functions_read(device, what):
    """A plan holds what is the same in all calls; else modules are called, with right numbers."""

    class Reading(Linears):
        def __init__(self):
            super().__init__(1, device=device)
            self.gain = torch.nn.Parameter(torch.tensor(2.0, device=device))
            self.register_buffer("fixed", torch.randn(HIDDEN, device=device))

        def emit(self, nodes, x, given):
            functions = {
                "parameter": lambda a: a * self.gain,
                "tensor": lambda a: a * given,
                "random": lambda a: torch.nn.functional.dropout(a, 0.5),
                "buffer": lambda a: a * self.fixed,
            }
            return nodes.function(functions[what], nodes.run(self.layers[0], x))

    module, results = Reading(), []
    twin = copy.deepcopy(module)
    given = [torch.randn(HIDDEN, device=device) for _ in range(3)]
    xs = [torch.randn(TOKENS, HIDDEN, device=device) for _ in range(3)]
    with same_draws(device):
        for x, tensor in zip(xs, given, strict=True):
            out = module(x, tensor)
            out.square().sum().backward()
            results.append([out.detach(), *(p.grad for p in module.parameters())])
            module.zero_grad()
    with same_draws(device):
        for x, tensor, found in zip(xs, given, results, strict=True):
            out = twin.layers[0](x)
            other = {"parameter": twin.gain, "tensor": tensor, "buffer": twin.fixed}.get(what)
            out = torch.nn.functional.dropout(out, 0.5) if other is None else out * other
            out.square().sum().backward()
            assert_same_bits(found, [out.detach(), *(p.grad for p in twin.parameters())])
            twin.zero_grad()
    assert (what == "buffer") == any(calls_of(module))


def test_a_function_that_fails(device):
    class Failing(Linears):
        def emit(self, nodes, x):
            return nodes.function(fails, nodes.run(self.layers[0], x))

    def fails(x):
        if x.isnan().any():
            raise ArithmeticError("not a number")
        return x * 2

    module, x = Failing(1, device=device), torch.randn(3, HIDDEN, device=device)
    expected = module.layers[0](x) * 2
    assert_same_bits(module(x), expected)
    with pytest.raises(ArithmeticError, match="not a number"):
        module(x * torch.nan)
    assert_same_bits(module(x), expected)
    assert_one_plan(module)


def test_a_module_without_emit():
    with pytest.raises(NotImplementedError, match="a PlannedModule defines emit"):
        te.PlannedModule()(torch.zeros(2, 2))
