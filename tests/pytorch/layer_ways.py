# SPDX-License-Identifier: Apache-2.0
"""Layers run as one call, in parts, and module by module: what all three must give alike."""

import contextlib
import copy

import pytest
import torch
from pytorch.attention_model import randomise
from pytorch.helpers import (
    RECIPES,
    assert_same_bits,
    counted,
    data_generator,
    random_of,
    states_of,
)
from tols import BF16, F32
from torch.utils.checkpoint import _StopRecomputationError

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.layer import transformer_layer
from transformer_engine.pytorch.module.layer_call import LayerRunner

HIDDEN, FFN, HEADS, LENGTH, SOURCE, BATCH = 32, 64, 4, 6, 9, 2
RECIPE_NAMES = [None, "delayed", "current"]
DROPS = {"hidden_dropout": 0.3, "attention_dropout": 0.2, "drop_path_rate": 0.25}
FUSED = {"fuse_qkv_params": True}
LAYER, ATTENTION = "TransformerLayer", "MultiheadAttention"


def dtype_of(device, recipe=None):
    """Of a layer that runs as one call: on a GPU, fp32 without FP8 asks for TF32 at each call."""
    return F32 if device == "cpu" and recipe is None else BF16


EVERY_RECIPE = {
    "none": lambda: None,
    "delayed": lambda **o: DelayedScaling(amax_history_len=3, **o),
    "measured": lambda **o: DelayedScaling(amax_history_len=3, measure_first=True, **o),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
"""One of each kind, by name; "none": in high precision."""


def region(recipe):
    """`autocast` with the recipe of a name, or nothing."""
    return contextlib.nullcontext() if recipe is None else te.autocast(recipe=RECIPES[recipe]())


def make_layer(device, dtype=F32, heads=HEADS, **options):
    """A `TransformerLayer` without dropout unless told, with random parameters."""
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype, **options}
    layer = te.TransformerLayer(HIDDEN, FFN, heads, device=device, **given)
    randomise(layer)
    return layer


def make_attention(device, dtype=F32, **options):
    """A `MultiheadAttention` likewise."""
    given = {"attention_dropout": 0.0, "params_dtype": dtype, **options}
    layer = te.MultiheadAttention(HIDDEN, HEADS, device=device, **given)
    randomise(layer)
    return layer


def form_of(layer):
    """Format of the inputs."""
    return getattr(layer, "attn_input_format", None) or layer.qkv_format


def is_crossed(layer):
    """Whether it takes ``encoder_output``."""
    return getattr(layer, "layer_type", None) == "decoder" or (
        getattr(layer, "attention_type", None) == "cross"
    )


def states(layer, length=LENGTH, batch=BATCH, dtype=None):
    """Random states that want a gradient; packed ones as many as in a batch."""
    parameter = next(layer.parameters())
    shapes = {"sbhd": (length, batch), "bshd": (batch, length), "thd": (batch * length,)}
    shape = shapes[form_of(layer)]
    made = torch.randn(*shape, HIDDEN).to(parameter.device, dtype or parameter.dtype)
    return made.requires_grad_()


def inputs_of(layer, **given):
    """Arguments of a call by name: the states, those of the source where it takes one, others."""
    given = {"hidden_states": states(layer), **given}
    if is_crossed(layer) and "encoder_output" not in given:
        given["encoder_output"] = states(layer, SOURCE)
    return given


# ---- which way a layer runs ----------------------------------------------------------------------


@contextlib.contextmanager
def watched():
    """Note (class of the layer, it runs as one call) of each call in the block."""
    found = []
    of, run = LayerRunner.of.__func__, LayerRunner.run

    def noted_of(cls, layer, *given):
        calls = of(cls, layer, *given)
        if calls is None:
            found.append((type(layer).__name__, False))
        return calls

    def noted_run(calls, layer, *given):
        try:
            out = run(calls, layer, *given)
        except _StopRecomputationError:  # it has all that a checkpoint is to repeat
            found.append((type(layer).__name__, True))
            raise
        found.append((type(layer).__name__, out is not NotImplemented))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerRunner, "of", classmethod(noted_of))
        patch.setattr(LayerRunner, "run", noted_run)
        yield found


@contextlib.contextmanager
def by_modules():
    """Every layer calls its modules in the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerRunner, "of", classmethod(lambda cls, layer, *given: None))
        yield


@contextlib.contextmanager
def in_parts(layer):
    """A `TransformerLayer` calls its modules in the block; its attention may run as one call."""
    mlp = getattr(layer, "layernorm_mlp", None)
    if mlp is None:
        yield
        return
    with mlp.register_forward_hook(lambda *_: None):
        yield


@contextlib.contextmanager
def by_branches():
    """A `TransformerLayer` runs one call for each branch, as large ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_layer, "_ONE_CALL", -1)
        yield


def assert_whole(layer, **given):
    """Assert that the next call is one; return its result."""
    return _assert_way(layer, True, given)


def assert_modules(layer, **given):
    """Assert that the next call calls the modules; return its result."""
    return _assert_way(layer, False, given)


def _assert_way(layer, whole, given):
    with watched() as found:
        out = layer(**given)
    assert found[0] == (type(layer).__name__, whole), found
    return out


# ---- steps ---------------------------------------------------------------------------------------


def _fresh(given, step):
    """The arguments of a step, the differentiable ones as new leaves with values of their own."""
    fresh, leaves = {}, {}
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name != _ANGLES:
            wants = value.requires_grad
            value = (value.detach() * (1 + step)).requires_grad_(wants)
            leaves[name] = value
        fresh[name] = value
    return fresh, leaves


_ANGLES = "rotary_pos_emb"


def _tensors(out):
    return [t for t in (out if isinstance(out, tuple) else (out,)) if t is not None]


def backward(outs):
    """Run the backward of results with gradients that are the same each time."""
    generator = data_generator()
    found = [out for out in outs if out.requires_grad]
    grads = [torch.randn(out.shape, generator=generator).to(out) for out in found]
    if found:
        torch.autograd.backward(found, grads)


def random_states(device):
    """States of the generators."""
    found = [torch.get_rng_state()]
    return found + ([] if device == "cpu" else [random_of(device).get_rng_state()])


def train(layer, given, recipe=None, steps=3):
    """Run steps: of each the results, all gradients, scaling state and random states."""
    results = []
    for step in range(steps):
        layer.zero_grad()
        fresh, leaves = _fresh(given, step)
        with region(recipe):
            outs = _tensors(layer(fresh.pop("hidden_states"), **fresh))
        backward(outs)
        results.append(
            {
                "outputs": [out.detach().clone() for out in outs],
                "inputs": {name: leaf.grad for name, leaf in leaves.items()},
                "parameters": {name: p.grad for name, p in layer.named_parameters()},
                "state": states_of(layer),
                "random": random_states(outs[0].device.type),
            }
        )
    return results


def assert_ways_agree(layer, given, *, recipe=None, whole=True, steps=3, start=lambda: None):
    """Assert that a layer runs as one call or not, and that all ways give the same bits.

    Parameters
    ----------
    layer : Module
        Left as it is: copies of it run.
    given : dict
        Arguments of the call by name. Floating tensors differ from step to step.
    recipe : str, optional
        In RECIPES.
    whole : bool
        The layer is expected to run as one call.
    steps : int
        How many.
    start : callable
        Called before the steps of each way.

    Returns
    -------
    list of dict
        As of `train`.
    """
    seed = int(torch.randint(2**31, ()))

    def run(way):
        own = copy.deepcopy(layer)
        te.reset()
        torch.manual_seed(seed)
        start()
        with way(own), counted() as gemms:
            return train(own, given, recipe, steps), (gemms.fp8, gemms.other)

    with watched() as found:
        ours, gemms = run(lambda _: contextlib.nullcontext())
    own = [taken for name, taken in found if name == type(layer).__name__]
    assert own == [whole] * steps, found
    branches = lambda _: by_branches()  # noqa: E731
    for way in (branches, lambda _: by_modules(), in_parts):
        with watched() as found:
            theirs, others = run(way)
        if way is branches and whole:
            assert {taken for name, taken in found if name == LAYER} <= {True}, found
        assert gemms == others
        for step, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same_bits(*pair, f"step {step}: ")
    return ours


# ---- changes between two calls -------------------------------------------------------------------


def assert_counts(layer, change, whole, *, undo=None, recipe=None, given=None):
    """Assert that a change counts, and that of both ways the bits are the same.

    Parameters
    ----------
    layer : Module
        Copies of it run.
    change : callable
        ``change(layer)``; returns another layer, or None for the same, or what `undo` takes.
    whole : bool
        The layer runs as one call after it.
    undo : callable, optional
        ``undo(layer, changed)``: it does so again after this.
    recipe, given
        As of `layer_ways.assert_ways_agree`.
    """
    given = inputs_of(layer) if given is None else given
    seed = int(torch.randint(2**31, ()))
    whole = [True, whole] + [True] * (undo is not None)

    def run():
        own = copy.deepcopy(layer)
        te.reset()
        torch.manual_seed(seed)
        results, ways = [], []
        for phase, _ in enumerate(whole):
            if phase == 1:
                changed = change(own)
                if isinstance(changed, type(own)):
                    own = changed
            elif phase == 2:
                undo(own, changed)
            with watched() as found:
                results.append(train(own, given, recipe, 2))
            ways.append([taken for name, taken in found if name == type(own).__name__])
        return results, ways

    ours, ways = run()
    assert ways == [[way] * 2 for way in whole]
    with by_modules():
        theirs, _ = run()
    for phase, pair in enumerate(zip(ours, theirs, strict=True)):
        assert_same_bits(*pair, f"phase {phase}: ")
    return ours


def set_of(path, value):
    """A change: set an attribute of a submodule, or of the layer."""
    path, _, name = path.rpartition(".")

    def change(layer):
        setattr(layer.get_submodule(path), name, value)

    return change


# ---- other programs ------------------------------------------------------------------------------


def both_ways(layer, run, whole=True, kind=LAYER):
    """Results of ``run(layer)`` of two equal layers, which are the same; of the first one.

    The first one runs as one call where it can, and that is asserted to be `whole` of each call
    (None: of none in particular); the second one calls its modules.
    """
    seed, results = int(torch.randint(2**31, ())), []
    for way in (contextlib.nullcontext, by_modules):
        own = copy.deepcopy(layer)
        te.reset()
        torch.manual_seed(seed)
        with way(), watched() as found:
            results.append((run(own), states_of(own), torch.get_rng_state()))
        taken = {taken for name, taken in found if name == kind}
        assert way is by_modules or whole is None or taken == {whole}, found
    assert_same_bits(*results)
    return results[0][0]


def gradients(layer, x, out):
    """Gradients of an input and of all parameters."""
    layer.zero_grad()
    x.grad = None
    backward([out])
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


def error_of(function):
    with pytest.raises(Exception) as error:  # noqa: B017, PT011 - the same of both ways
        function()
    return type(error.value).__name__, str(error.value)


def assert_same_error(layer, function):
    """Assert that both ways raise the same; the layer has made calls before, and makes them."""
    given = inputs_of(layer)
    expected = layer(**given).detach()
    ours = error_of(function)
    assert_same_bits(assert_whole(layer, **given), expected)
    with by_modules():
        theirs = error_of(function)
    assert ours[0] == theirs[0]
    # a refusal names the call that it is of: the layer's, or that of its first module
    assert (
        ours[1].removeprefix(LAYER) == theirs[1].removeprefix("LayerNormLinear") or ours == theirs
    )
    return ours[1]
