# SPDX-License-Identifier: Apache-2.0
"""Nothing outlives a step of a layer that runs as one call, nor the layer itself."""

import contextlib
import gc
import itertools
import weakref

import pytest
import torch
from pytorch.layer_ways import (
    BATCH,
    DROPS,
    HIDDEN,
    LAYER,
    LENGTH,
    RECIPE_NAMES,
    by_branches,
    dtype_of,
    inputs_of,
    make_attention,
    make_layer,
    region,
    states,
    watched,
)
from thinning import pairs
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine.pytorch.module import call, layer_call

MAKES = {
    "encoder": lambda *where: make_layer(*where, **DROPS),
    "decoder": lambda *where: make_layer(*where, layer_type="decoder", **DROPS),
    "attention": lambda *where: make_attention(*where, attention_dropout=0.3),
}


@pytest.fixture
def runs(monkeypatch):
    """Weak references to the runs of layers."""
    found = []

    class Noted(layer_call.CallRun):
        __slots__ = ("__weakref__",)

        def __init__(self, *given):
            super().__init__(*given)
            found.append(weakref.ref(self))

    monkeypatch.setattr(layer_call, "CallRun", Noted)
    return found


@contextlib.contextmanager
def without_collector():
    """What is freed in the block is freed by its last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def step(layer, given, recipe):
    with region(recipe):
        return layer(**given)


def alive(references):
    return [reference() for reference in references if reference() is not None]


# Layers, recipes and backends of attention end a run by the same object.
@pairs(kind=MAKES, recipe=RECIPE_NAMES, backend=["native", "sdpa", "unfused"], indirect=["backend"])
def test_runs_and_tensors_end_with_the_backward(device, backend, kind, recipe, runs):
    """Without the collector: there is no cycle."""
    layer = MAKES[kind](device, BF16)
    given = inputs_of(layer)
    step(layer, given, recipe).sum().backward()
    runs.clear()
    with without_collector():
        out = step(layer, given, recipe)
        made = [weakref.ref(out)]
        if backend == "native":
            assert len(alive(runs)) == 1
        out.sum().backward()
        del out
        assert not alive(runs) and not alive(made)


# As above.
@pairs(
    kind=MAKES, recipe=RECIPE_NAMES, mode=[torch.enable_grad, torch.no_grad, torch.inference_mode]
)
def test_runs_end_without_a_backward(device, kind, recipe, mode, runs):
    layer = MAKES[kind](device, dtype_of(device, recipe))
    given = inputs_of(layer)
    with without_collector():
        with mode():
            made = weakref.ref(step(layer, given, recipe))
        assert runs and not alive(runs) and made() is None


def test_inputs_are_not_kept(device, runs):
    """Masks, angles and biases of a call end with it, with the cast of what they were made of."""
    layer = make_layer(device, BF16)
    with without_collector():
        given = inputs_of(layer)
        given["rotary_pos_emb"] = te.RotaryPositionEmbedding(8).to(device)(LENGTH).to(BF16)
        mask = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool, device=device)
        bias = torch.randn(1, 1, LENGTH, LENGTH, device=device)
        given.update(attention_mask=mask, self_attn_mask_type="padding_causal")
        given.update(core_attention_bias=bias, core_attention_bias_type="post_scale_bias")
        kept = [weakref.ref(t) for t in (*given.values(), mask, bias) if torch.is_tensor(t)]
        step(layer, given, None).sum().backward()
        assert runs
        del given, mask, bias
        assert not alive(kept)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("kind", MAKES)
def test_layers_can_be_collected(device, kind, recipe):
    layer = MAKES[kind](device, dtype_of(device, recipe))
    parts = [weakref.ref(module) for module in layer.modules()]
    parts += [weakref.ref(parameter) for parameter in layer.parameters()]
    given = inputs_of(layer)
    for _ in range(2):
        step(layer, given, recipe).sum().backward()
    assert layer._calls.calls
    del layer
    gc.collect()
    assert not alive(parts)


def test_replaced_parts_can_be_collected(device):
    """Before the next call of the layer, which is the first one to see it, and after that."""
    layer = make_layer(device, dtype_of(device))
    given = inputs_of(layer)
    step(layer, given, None).sum().backward()
    old = weakref.ref(layer.layernorm_mlp)
    layer.layernorm_mlp = make_layer(device, dtype_of(device)).layernorm_mlp
    with watched() as found:
        step(layer, given, None).sum().backward()
    assert found == [(LAYER, True)]
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_steps_do_not_add_up(device, recipe, branches):
    """Objects and tensors that the collector knows are as many after twenty steps as before."""
    layer = make_layer(device, dtype_of(device, recipe), layer_type="decoder", **DROPS)
    given = inputs_of(layer)

    def count(steps):
        for _ in range(steps):
            step(layer, given, recipe).sum().backward()
        gc.collect()
        return len(gc.get_objects())

    with by_branches() if branches else contextlib.nullcontext():
        for _ in range(3):  # what was made for the first calls goes
            count(20)
        counts = [count(20) for _ in range(4)]
    # What a step leaves behind would add up each time; other threads add an object now and then.
    assert any(after <= before for before, after in itertools.pairwise(counts)), counts


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("kind", MAKES)
def test_memory_of_the_device_is_given_back(kind, recipe):
    layer = MAKES[kind]("cuda", BF16)
    given = inputs_of(layer)

    def allocated(steps):
        for _ in range(steps):
            step(layer, given, recipe).sum().backward()
        gc.collect()  # what other tests have left
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    allocated(4)
    assert allocated(1) == allocated(8)


def test_what_a_step_saves_is_what_the_backward_reads(device):
    """Without gradients of parameters nothing is kept of their inputs."""
    layer = make_layer(device, dtype_of(device))
    sizes = []
    for wanted in (True, False):
        layer.requires_grad_(wanted)
        x = torch.randn(LENGTH, BATCH, HIDDEN, device=device, dtype=dtype_of(device))
        out = layer(x.requires_grad_())
        own = {parameter.data_ptr() for parameter in layer.parameters()}
        saved = {t.data_ptr(): t.nbytes for t in out.grad_fn.saved_tensors}
        sizes.append(sum(n for at, n in saved.items() if at not in own))
    assert 0 < sizes[1] < sizes[0]


def test_a_run_that_fails_leaves_nothing(device, runs, monkeypatch):
    """An error in the middle, of torch's generator here."""
    layer = make_layer(device, dtype_of(device), **DROPS)
    x = states(layer)
    layer(x).sum().backward()
    runs.clear()

    def failing(tensor):
        raise RuntimeError("drawn in vain")

    monkeypatch.setattr(torch.Tensor, "random_", failing)
    with pytest.raises(RuntimeError, match="drawn in vain"):
        layer(x)
    monkeypatch.undo()
    gc.collect()
    assert not alive(runs)
    layer(x).sum().backward()


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("kind", MAKES)
def test_a_retained_graph_can_be_run_again(device, kind, recipe):
    """The last backward, which may write over what was saved, has the bits of those before it."""
    layer = MAKES[kind](device, dtype_of(device, recipe))
    given = inputs_of(layer)
    out = step(layer, given, recipe)
    wanted = [t for t in given.values() if torch.is_tensor(t) and t.requires_grad]
    wanted += layer.parameters()
    grad = torch.randn_like(out)

    def gradients(retain):
        return torch.autograd.grad(out, wanted, grad, retain_graph=retain, allow_unused=True)

    packed = [t for t in out.grad_fn.saved_tensors if t.dtype is torch.uint8 and t.dim() == 1]
    before = [t.clone() for t in packed]
    first, second = gradients(True), gradients(True)
    assert packed and all(map(torch.equal, packed, before))
    last = gradients(False)
    assert kind == "attention" or not all(map(torch.equal, packed, before))
    for kept, again, consumed in zip(first, second, last, strict=True):
        assert (kept is None) == (consumed is None)
        if kept is not None and recipe is None:  # scales move on from backward to backward
            assert torch.equal(kept, again) and torch.equal(kept, consumed)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(False)


@pytest.mark.gpu
def test_scratch_lies_in_what_was_saved(monkeypatch):
    """A layer's peak is that of one more matrix of the width of its MLP where it may not."""
    layer = te.TransformerLayer(512, 8192, 8, params_dtype=BF16, hidden_dropout=0.0)
    x = torch.randn(1024, 1, 512, device="cuda", dtype=BF16, requires_grad=True)

    def peak():
        layer(x).sum().backward()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer(x).sum().backward()
        return torch.cuda.max_memory_allocated() - before

    consuming = peak()
    monkeypatch.setattr(call, "keeps_autograd_graph", lambda: True)
    assert peak() - consuming >= 1024 * 8192 * 2
