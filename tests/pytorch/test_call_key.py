# SPDX-License-Identifier: Apache-2.0
"""A call that is found by its key is the one that would be decided on, in whatever order.

Random programs run twice over equal modules: as they are, and with every call decided anew.
Outputs, gradients, scaling state and errors must be the same, bit for bit.
"""

import contextlib
import gc
import weakref

import pytest
import torch
from pytorch.helpers import assert_same_bits, states_of
from pytorch.module_cases import quantized
from pytorch.random_programs import CALLS, CURRENT, DELAYED, MODES, REGIONS, steps_of
from thinning import every_other
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling
from transformer_engine.pytorch.custom_recipes.quantizer_factories import (
    current_scaling_factory,
    delayed_scaling_factory,
)
from transformer_engine.pytorch.module import call_key, linear_calls, norm
from transformer_engine.pytorch.torchside.modes import only_forwards

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:Linear. its weight is quantized"),
]

MODULES = {
    "linear": lambda **where: te.Linear(16, 16, **where),
    "split": lambda **where: te.Linear(16, 16, parameters_split=("a", "b"), **where),
    "norm_linear": lambda **where: te.LayerNormLinear(16, 16, **where),
    "mlp": lambda **where: te.LayerNormMLP(16, 32, **where),
    "main_grad": lambda **where: te.LayerNormMLP(16, 32, fuse_wgrad_accumulation=True, **where),
    "late": lambda **where: te.Linear(16, 16, delay_wgrad_compute=True, **where),
    "both": lambda **where: te.LayerNormLinear(
        16, 16, fuse_wgrad_accumulation=True, delay_wgrad_compute=True, **where
    ),
}

# Modules that a test of all ways takes besides.
NORMS = {
    "layer_norm": lambda **where: te.LayerNorm(16, **where),
    "rms_norm": lambda **where: te.RMSNorm(16, **where),
    "bare_norm": lambda **where: te.LayerNorm(16, bias=False, **where),
}
MORE = {
    "cached": lambda **where: caching(te.Linear(16, 16, **where)),
    "held": lambda **where: quantized_linear(**where),
    "again": lambda **where: te.LayerNormMLP(16, 32, checkpoint=True, **where),
}
# Quantizers of a program, which cast inside of the plan.
CUSTOM = {
    "custom": CustomRecipe(current_scaling_factory),
    "custom delayed": CustomRecipe(delayed_scaling_factory),
}
WIDER = REGIONS | {
    name: lambda recipe=recipe: te.autocast(recipe=recipe) for name, recipe in CUSTOM.items()
}
# Checkpoints in checkpoints.
NESTED = CALLS | {
    f"{outer} in {inner}": lambda f, x, outer=outer, inner=inner: CALLS[inner](
        lambda y: CALLS[outer](f, y), x
    )
    for outer in CALLS
    for inner in CALLS
    if "direct" not in (outer, inner)
}

PLAIN = ["linear", "split", "norm_linear", "mlp"]


def caching(module):
    """The module, which keeps the casts of its weights by itself."""
    module.cache_weights = True
    return module


def quantized_linear(**where):
    """A linear layer whose weight is a quantized tensor."""
    with te.quantized_model_init(recipe=DELAYED):
        return te.Linear(16, 16, **where)


def programs(seed):
    """Steps of a random program."""

    def draw(rng):
        return {
            "mode": rng.choice(list(MODES)),
            "outer": rng.choice(list(REGIONS)),
            "inner": rng.choice(["none", "none", *REGIONS]),
            "call": rng.choice(["direct", *CALLS]),
            "cast": rng.random() < 0.15,
            "wants": rng.random() < 0.6,
            "times": rng.choice([1, 1, 2]),
            "backward": rng.random() < 0.7,
            "shape": rng.choice([(4, 16), (2, 3, 16), (16,), (4, 8)]),
            "change": rng.choice([None] * 6 + ["freeze", "thaw", "replace", "reset"]),
            "first": rng.choice([None] * 6 + [True, False, False]),
        }

    return (step for _, step in steps_of(seed, draw, 0.6))


def ways(seed):
    """Steps of a random program of AMP, checkpoints in one another, and recipes by turns."""

    def draw(rng):
        return {
            "mode": rng.choice(["plain", "plain", "plain", "no_grad", "inference", "saved hooks"]),
            "outer": rng.choice(list(WIDER)),
            "inner": rng.choice(["none", "none", "none", *WIDER]),
            "call": rng.choice(list(NESTED)),
            "cast": rng.choice([False, True]),
            "cast_inside": rng.choice([None, None, torch.bfloat16, torch.float16]),
            "wants": rng.random() < 0.7,
            "times": rng.choice([1, 2]),
            "backward": rng.random() < 0.8,
            "shape": rng.choice([(4, 16), (2, 3, 16)]),
            "change": rng.choice([None] * 8 + ["freeze", "thaw"]),
            "first": rng.choice([None] * 3 + [True, False]),
        }

    return (step for _, step in steps_of(seed, draw, 0.35))


def change(module, what):
    """Something that a user does to a module between two calls."""
    parameters = list(module.named_parameters())
    if what in ("freeze", "thaw"):
        for _, parameter in parameters[:1]:
            parameter.requires_grad_(what == "thaw")
    elif what == "replace":
        name, parameter = parameters[0]
        with torch.no_grad():
            setattr(module, name, torch.nn.Parameter(parameter * 0.5))
    elif what == "reset":
        module.reset_fp8_meta_tensors()


def run_step(module, step, x):
    """Tensors that a step gives, or the error that it raises."""
    for parameter in module.parameters():
        parameter.grad = None

    kind, inside = x.device.type, step.get("cast_inside")
    plain = step["first"] is None or isinstance(module, te.LayerNorm | te.RMSNorm)

    def function(inp):
        amp = torch.autocast(kind, inside or torch.bfloat16, enabled=inside is not None)
        with WIDER[step["inner"]](), amp if inside else contextlib.nullcontext():
            for _ in range(step["times"]):
                if plain:
                    out = module(inp)
                else:
                    out = module(inp, is_first_microbatch=step["first"])
        return out

    try:
        with MODES[step["mode"]](), torch.autocast(kind, torch.bfloat16, enabled=step["cast"]):
            with WIDER[step["outer"]]():
                out = NESTED[step["call"]](function, x)
        if step["backward"] and out.requires_grad:
            out.float().square().sum().backward()
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return [out.detach(), x.grad, *(p.grad for p in module.parameters())]


def main_grads_of(module):
    """What the weights' gradients are added to; a weight that has come anew gets zeros."""
    weights = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    for weight in weights:
        if not hasattr(weight, "main_grad"):
            weight.main_grad = torch.zeros_like(weight)
    return [weight.main_grad for weight in weights]


def run_program(make, seed, device, steps=programs):
    """Results of every step, how much it cast, and what state and main gradients are after it."""
    torch.manual_seed(seed)
    module = make(device=device)
    results = []
    for step in steps(seed):
        change(module, step["change"])
        x = torch.randn(step["shape"], device=device, requires_grad=step["wants"])
        main = main_grads_of(module)
        _core.reset_counters()
        result = run_step(module, step, x)
        while getattr(module, "_wgrads", ()):
            module.backward_dw()
        left = [p.grad for p in module.parameters()] + [grad.clone() for grad in main]
        results.append((step, result, [torch.tensor(quantized()), states_of(module), left]))
    return results


# Programs are others in each run.
@every_other(kind=MODULES, number=range(12))
def test_found_calls_are_those_that_would_be_decided_on(kind, number, device, rng, monkeypatch):
    del number
    seed = int(rng.integers(2**31))
    as_it_is = run_program(MODULES[kind], seed, device)
    monkeypatch.setattr(linear_calls, "call_key", lambda *_: (None, ()))
    long_way = run_program(MODULES[kind], seed, device)
    for (step, ours, state), (_, theirs, expected) in zip(as_it_is, long_way, strict=True):
        assert isinstance(ours, str) == isinstance(theirs, str), (step, ours, theirs)
        if isinstance(ours, str):
            assert ours == theirs, step
        else:
            assert_same_bits(ours, theirs, str(step))
        assert_same_bits(state, expected, str(step))


# As above.
@every_other(kind=[*PLAIN, *NORMS, *MORE], number=range(6))
def test_all_ways_find_the_calls_that_would_be_decided_on(kind, number, device, rng, monkeypatch):
    """AMP of several dtypes, checkpoints in one another and around AMP, quantizers of a program."""
    del number
    seed = int(rng.integers(2**31))
    make = {**MODULES, **NORMS, **MORE}[kind]
    as_it_is = run_program(make, seed, device, ways)
    for owner in (linear_calls, norm):
        monkeypatch.setattr(owner, "call_key", lambda *_: (None, ()))
    long_way = run_program(make, seed, device, ways)
    for (step, ours, state), (_, theirs, expected) in zip(as_it_is, long_way, strict=True):
        assert isinstance(ours, str) == isinstance(theirs, str), (step, ours, theirs)
        if isinstance(ours, str):
            assert ours == theirs, step
        else:
            assert_same_bits(ours, theirs, str(step))
        assert_same_bits(state, expected, str(step))


FOUND_WAYS = {
    "amp": lambda m, x: within(torch.autocast(x.device.type, torch.bfloat16), m, x),
    "own": lambda m, x: te.checkpoint(m, x),
    "own, hooked": lambda m, x: te.checkpoint(m, x, use_reentrant=False),
    "torch": lambda m, x: torch_checkpoint(m, x, use_reentrant=True),
    "torch, hooked": lambda m, x: torch_checkpoint(m, x, use_reentrant=False),
    "amp in a checkpoint": lambda m, x: te.checkpoint(FOUND_WAYS["amp"], m, x),
    "calibrating": lambda m, x: within(
        te.autocast(enabled=False, calibrating=True, recipe=DELAYED), m, x
    ),
    "custom": lambda m, x: within(te.autocast(recipe=CUSTOM["custom delayed"]), m, x),
    "saved hooks": lambda m, x: within(MODES["saved hooks"](), m, x),
}


def within(block, module, x):
    """Call a module in a block."""
    with block:
        return module(x)


@pytest.mark.parametrize("recipe", [None, DELAYED], ids=["", "delayed"])
@pytest.mark.parametrize("way", FOUND_WAYS)
@pytest.mark.parametrize("kind", ["linear", "split", "norm_linear", "mlp", "cached", "held"])
def test_each_way_is_found(device, kind, way, recipe, monkeypatch):
    """After two steps nothing is decided anew, forwards that are repeated included."""
    module = {**MODULES, **MORE}[kind](device=device)
    if kind == "held" and (recipe is None or way in ("calibrating", "custom")):
        pytest.skip("without FP8 a quantized weight is dequantized at each call")
    decided, found = linear_calls.LinearCallBase._decide, []
    monkeypatch.setattr(
        linear_calls.LinearCallBase, "_decide", lambda *a: (found.append(a), decided(*a))[1]
    )
    for number in range(6):
        x = torch.randn(16, 16, device=device, requires_grad=True)
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = FOUND_WAYS[way](module, x)
        out.float().sum().backward()
        if number == 1:
            assert found
            found.clear()
    assert not found


@pytest.mark.parametrize("way", [None, "amp", "own", "torch, hooked"])
@pytest.mark.parametrize("kind", NORMS)
def test_norms_are_found(device, kind, way, monkeypatch):
    module, made = NORMS[kind](device=device), []
    real = norm.ModuleCall
    monkeypatch.setattr(norm, "ModuleCall", lambda *a: (made.append(a), real(*a))[1])
    results = []
    x = torch.randn(4, 16, device=device, requires_grad=True)
    for _ in range(4):
        x.grad = None
        module.zero_grad()
        out = module(x) if way is None else FOUND_WAYS[way](module, x)
        out.float().square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad for p in module.parameters())])
    assert len(made) == (2 if way in ("own",) else 1)
    for found in results[1:]:
        assert_same_bits(found, results[0])


def test_settings_and_parameters_of_a_norm_count_from_the_next_call_on(device):
    x = torch.randn(4, 16, device=device)
    module = te.LayerNorm(16, device=device)
    for _ in range(2):
        first = module(x)
    module.eps = 1.0
    assert not torch.equal(module(x), first)
    module.eps = 1e-5
    assert_same_bits(module(x), first)
    module.zero_centered_gamma = True
    doubled = module(x)
    module.zero_centered_gamma = False
    module.weight = torch.nn.Parameter(module.weight.detach() + 1.0)
    assert_same_bits(module(x), doubled)
    module._parameters["bias"] = None  # as frameworks take parameters away
    without = module(x)
    module._parameters["bias"] = torch.nn.Parameter(torch.ones(16, device=device))
    assert_same_bits(module(x), without + 1.0)
    assert module(x.bfloat16()).dtype is torch.float32
    module.follows_input = True
    assert module(x.bfloat16()).dtype is torch.bfloat16


def test_the_programs_find_calls(device, monkeypatch):
    taken = []
    real = call_key.KeptCall.holds

    def noted(*arguments):
        holds = real(*arguments)
        taken.append(holds)
        return holds

    decided = linear_calls.LinearCallBase._decide
    monkeypatch.setattr(call_key.KeptCall, "holds", noted)
    monkeypatch.setattr(
        linear_calls.LinearCallBase, "_decide", lambda *a: (taken.append(False), decided(*a))[1]
    )
    for seed in range(12):
        run_program(MODULES["linear"], seed, device)
    assert sum(taken) > 10 and taken.count(False) > 10


@pytest.mark.parametrize("first", [None, True, False])
@pytest.mark.parametrize("kind", ["linear", "split", "main_grad", "both"])
def test_microbatches_are_found(device, kind, first, monkeypatch):
    """From the third one on nothing is decided anew."""
    module = MODULES[kind](device=device)
    main_grads_of(module)
    decided, found = linear_calls.LinearCallBase._decide, []
    monkeypatch.setattr(
        linear_calls.LinearCallBase, "_decide", lambda *a: (found.append(a), decided(*a))[1]
    )
    for _ in range(6):
        x = torch.randn(16, 16, device=device, requires_grad=True)
        with te.autocast(recipe=DELAYED):
            module(x, is_first_microbatch=first).sum().backward()
    assert len(found) <= 3 if first is False else len(found) <= 2


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooked"])
@pytest.mark.parametrize("mode", ["no_grad", "inference"])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_checkpoint_after_calls_without_gradients(kind, mode, reentrant, device):
    module = MODULES[kind](device=device)
    x = torch.randn(8, 16, device=device, requires_grad=True)
    with MODES[mode]():
        expected = [module(x) for _ in range(3)][-1]
    out = te.checkpoint(module, x, use_reentrant=reentrant)
    assert_same_bits(out, expected)
    out.sum().backward()
    grads = [x.grad, *(p.grad for p in module.parameters())]
    x.grad = None
    module.zero_grad()
    module(x).sum().backward()
    assert_same_bits(grads, [x.grad, *(p.grad for p in module.parameters())])


# ---- what a found call leaves behind -------------------------------------------------------------


def step(module, x, recipe):
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = module(x)
    if out.requires_grad:
        out.sum().backward()


@pytest.mark.parametrize("kind", PLAIN)
def test_the_last_call_is_the_one_that_is_told_of(device, kind):
    """By turns in FP8 and without, both keys being known."""
    module, x = MODULES[kind](device=device), torch.randn(16, 16, device=device, requires_grad=True)
    for recipe in (DELAYED, None, CURRENT) * 3:
        step(module, x, recipe)
        assert module._last_call.plans.quantized == (recipe is not None)
        assert (module._last_call.reason is None) == (recipe is not None)
        if recipe is not None:
            assert module.fp8_meta["recipe"] is recipe or repr(module.fp8_meta["recipe"]) == repr(
                recipe
            )
    module(x)
    assert module._last_call.reason == "no autocast was in force"


def test_a_fake_call_between_takes_nothing(device, start):
    """A program that looks at shapes under a fake mode has the state of one that does not."""
    states = []
    for fake in (False, True):
        start()
        module, x = MODULES["linear"](device=device), torch.randn(16, 16, device=device)
        for number in range(4):
            with te.autocast(recipe=DELAYED):
                if fake:
                    with FakeTensorMode(allow_non_fake_inputs=True):
                        module(x)
                out = module(x)
            (out * 10**number).sum().backward()
        states.append(states_of(module))
    assert_same_bits(*states)


def test_a_name_and_sizes_that_are_set_count_from_the_next_call_on(device):
    module, x = te.Linear(16, 16, device=device), torch.randn(4, 16, device=device)
    module(x), module(x)
    module.name = "head"
    assert type(module(x).grad_fn).__name__ == "Linear[head]Backward"
    module.out_features = 8
    module.weight = torch.nn.Parameter(torch.randn(8, 16, device=device))
    module.bias = torch.nn.Parameter(torch.randn(8, device=device))
    assert module(x).shape == (4, 8)


@pytest.mark.parametrize("recipe", [None, DELAYED, CURRENT], ids=["none", "delayed", "current"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpoint"])
def test_buffers_of_a_run_without_rows_can_be_looked_at(device, recipe, checkpointed):
    module = te.LayerNormMLP(
        16, 32, normalization="RMSNorm", checkpoint=checkpointed, device=device
    )
    seen = set()

    def look(stage, buffers, done):
        del done
        seen.add(stage.name)
        for name in buffers:
            assert isinstance(buffers[name], torch.Tensor)

    module.observe_stages(look)
    x = torch.randn(0, 16, device=device, requires_grad=True)
    step(module, x, recipe)
    assert {"fc1_gemm_output", "fc2_gemm_grad_weight"} <= seen
    assert x.grad.shape == x.shape


def test_found_calls_keep_no_state_of_another_recipe(device):
    module, x = MODULES["linear"](device=device), torch.randn(4, 16, device=device)
    for length in (2, 3):
        for _ in range(3):  # decided, kept, found
            with te.autocast(recipe=DelayedScaling(amax_history_len=length)):
                out = module(x)
            out.sum().backward()
        if length == 2:
            slots = weakref.ref(module._slots)
    del out
    gc.collect()
    assert slots() is None


def test_tensors_of_a_call():
    own = {
        "weight": torch.nn.Parameter(torch.randn(4, 5)),
        "half": torch.randn(5).half(),
        "no": None,
    }
    inp = torch.randn(2, 3, 5)
    places = ((own, "weight"), None)
    facts, tensors = _core.tensors_of_call(inp, places)
    assert tensors[0] is inp and tensors[1] is own["weight"] and tensors[2] is None
    assert facts[1:] == (0, 5, 0b01, None)
    kinds = [facts, _core.tensors_of_call(inp.requires_grad_(), places)[0]]
    kinds += [_core.tensors_of_call(torch.randn(2, 4), places)[0]]
    kinds += [_core.tensors_of_call(torch.randn(2, 5).half(), ((own, "half"),))[0]]
    assert len(set(kinds)) == 4
    mixed = [_core.tensors_of_call(inp, ((own, name), None))[0] for name in ("half", "weight")]
    mixed.append(_core.tensors_of_call(inp.double().detach(), ((own, "half"), None))[0])
    assert mixed[0][:3] == facts[:3] and len(mixed[0][4]) == 6 and mixed[1][4] is None
    assert mixed[2][4] == mixed[0][4] and mixed[2][0] != mixed[0][0]
    alone = [(inp, ("missing",)), (inp, ("no",)), (torch.tensor(1.0), ())]
    alone += [(own["weight"], ()), (torch.empty(2, 5, device="meta"), ()), (None, ())]
    for given, wanted in alone:
        places = tuple((own, name) for name in wanted)
        assert _core.tensors_of_call(given, places) == (None, ())


SPOILS = {
    "forward hook": lambda m: m.register_forward_hook(lambda *given: None),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda *given: None),
    "backward hook": lambda m: m.register_full_backward_hook(lambda *given: None),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda *given: None),
    "own forward": lambda m: setattr(m, "forward", lambda x: x),
    "compiled": lambda m: setattr(m, "_compiled_call_impl", lambda x: x),
    "subclass": lambda m: setattr(m, "__class__", type("Mine", (type(m),), {})),
    "forward of the class": lambda m: setattr(m, "__class__", _of_library(m, "forward")),
    "call of the class": lambda m: setattr(m, "__class__", _of_library(m, "__call__")),
}


def _of_library(module, name):
    """A class that is like one of the library but for a method."""
    like = {"__module__": type(module).__module__, name: lambda self, x: x}
    return type("Other", (type(module),), like)


@pytest.mark.parametrize("spoil", SPOILS)
def test_modules_that_do_more_than_their_forwards(spoil):
    module, other = te.Linear(4, 4), te.LayerNorm(4)
    assert only_forwards(module, other) and only_forwards()
    SPOILS[spoil](module)
    assert not only_forwards(other, module)
    assert only_forwards(other)
    assert not only_forwards(torch.nn.Linear(4, 4))
