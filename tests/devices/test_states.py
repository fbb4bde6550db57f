# SPDX-License-Identifier: Apache-2.0
"""What is kept: state dicts across devices, random states, tools, and what is not there."""

import copy
import io

import pytest
import torch
from comparators import assert_bits
from devices.beside_cpu import (
    BATCH,
    FFN,
    HEADS,
    NO_DROPOUT,
    RECIPES,
    TOKENS,
    WIDTH,
    eager,
    on_the_cpu,
    train,
)
from pytorch.helpers import assert_same_bits
from thinning import pairs
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.torchside.device import is_any_captured, is_capturing

pytestmark = pytest.mark.npu

QUANTIZED = [name for name in RECIPES if name not in ("none", "custom")]


def layer(device, **options):
    options = {"params_dtype": BF16, **NO_DROPOUT, **options}
    return te.TransformerLayer(WIDTH, FFN, HEADS, device=device, **options)


def inputs(device, steps=2):
    return [torch.randn(TOKENS, BATCH, WIDTH).to(device, BF16) for _ in range(steps)]


# ---- checkpoints ---------------------------------------------------------------------------------


def saved(state, **options):
    """What `torch.load` gives of what `torch.save` has written."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, **options)


@pairs(there=["cpu", "npu:1"], recipe=QUANTIZED, quantized=[False, True])
def test_state_dicts_go_to_other_devices(npu, there, recipe, quantized):
    """Written on npu:0, read elsewhere: training goes on with the same bits."""

    def make(device):
        with te.quantized_model_init(enabled=quantized, recipe=RECIPES[recipe]()):
            return layer(device)

    model = make(npu)
    train(model, inputs(npu), eager(recipe))
    state = saved(model.state_dict(), map_location=there, weights_only=False)
    assert {t.device for t in state.values() if isinstance(t, torch.Tensor)} <= {
        torch.device(there), torch.device("cpu"),
    }  # fmt: skip
    other = make(there)
    other.load_state_dict(state)
    more = inputs(npu)
    with on_the_cpu():
        if there == "cpu":
            found = train(other, [x.cpu() for x in more], eager(recipe))
            back = make(npu)
            back.load_state_dict(saved(other.state_dict(), map_location=npu, weights_only=False))
        else:
            found = train(other, [x.to(there) for x in more], eager(recipe))
            _other_ran()
    expected = train(model, more, eager(recipe))
    assert_same_bits(found, expected)
    if there == "cpu":
        assert_same_bits(train(back, more, eager(recipe)), train(model, more, eager(recipe)))


def _other_ran():
    """The block of definitions on the CPU wants one to have run."""
    te.Linear(16, 16, device="cpu")(torch.ones(16, 16))


@pytest.mark.parametrize("recipe", ["none", "delayed", "mxfp8"])
@pytest.mark.parametrize("copies", [copy.deepcopy, saved])
def test_copies(npu, recipe, copies):
    model = layer(npu)
    train(model, inputs(npu), eager(recipe))
    other = copies(model) if copies is copy.deepcopy else copies(model, weights_only=False)
    x = inputs(npu)
    assert_same_bits(train(other, x, eager(recipe)), train(model, x, eager(recipe)))


# ---- random states, tools ------------------------------------------------------------------------


def test_seeds_repeat_dropouts(npu):
    model, x = layer(npu, hidden_dropout=0.5, attention_dropout=0.5), inputs(npu, 1)[0]
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(model(x))
    assert_bits(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_states_of_the_tracker(npu):
    """Dropouts inside of a fork draw from the tracker's state of the device alone."""
    tracker = te.distributed.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    model = layer(npu, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    x, found = inputs(npu, 1)[0], []
    states = tracker.get_states()
    for seed in (1, 2):
        torch.manual_seed(seed)
        tracker.set_states(copy.deepcopy(states))
        found.append(model(x))
    assert_bits(*found)
    assert not torch.equal(model(x), found[0])


def test_tools_name_the_device(npu):
    model, x = te.LayerNormLinear(WIDTH, FFN, device=npu), torch.randn(8, WIDTH, device=npu)
    with te.autocast(recipe=recipes.DelayedScaling()):
        text = io.StringIO()
        te.explain(model, x, file=text)
        model(x)
    te.report(model, file=text)
    explained, _, reported = text.getvalue().partition("backward: ")
    for said in (explained, reported):
        assert "npu:0: this library has no kernels for it" in said
    te.report(te.Linear(WIDTH, FFN, device="cpu"), file=(plainly := io.StringIO()))
    assert "no kernels" not in plainly.getvalue()


# ---- what is not there ---------------------------------------------------------------------------


def test_graphs_are_not_captured(npu):
    """The device has none of its streams, and its module says so."""
    model, x = te.Linear(WIDTH, FFN, device=npu), torch.randn(8, WIDTH, device=npu)
    with pytest.raises(NotImplementedError, match="npu: no graph can be captured, because"):
        with torch.npu.graph(torch.npu.NPUGraph()):
            model(x)
    assert not is_any_captured() and not is_capturing(npu)
