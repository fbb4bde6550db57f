# SPDX-License-Identifier: Apache-2.0
"""checkpoint_core_attention keeps queries, keys and values, and nothing that attention makes."""

import pytest
import torch
from pytorch.attention_operators import unkept
from pytorch.helpers import RECIPES
from pytorch.layer_ways import by_modules
from tols import BF16
from torch.multiprocessing.reductions import StorageWeakRef

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention import plan, scores

LENGTH, BATCH, HIDDEN, HEADS = 40, 2, 64, 4


@pytest.fixture
def made(monkeypatch):
    """Weak references to the memory of what forwards of attention make, by what it is."""
    found = {}

    def note(of, way, *names):
        forward = getattr(of, way)

        def noted(*arguments):
            results = forward(*arguments)
            for name, tensor in zip(names, results, strict=True):
                if tensor is not None:
                    found[name] = StorageWeakRef(tensor.untyped_storage())
            return results

        monkeypatch.setattr(of, way, noted)

    note(plan._Call, "_run_forward", "output", "statistics")  # the second packs what is saved
    note(scores, "_forward", "weights", "probabilities", "log_sum")
    return found


def alive(made):
    return {name for name, reference in made.items() if not reference.expired()}


def attend(kind, device):
    """What is called with and without a recompute, and its input."""
    options = {"params_dtype": BF16, "device": device, "attention_dropout": 0.1}
    if kind == "core":
        module = te.DotProductAttention(HEADS, HIDDEN // HEADS, attention_dropout=0.1)
        shape = LENGTH, BATCH, HEADS, HIDDEN // HEADS
        tensors = [torch.randn(shape, dtype=BF16, device=device).requires_grad_() for _ in range(3)]
        return lambda recompute: module(*tensors, checkpoint_core_attention=recompute).square()
    if kind == "attention":
        module = te.MultiheadAttention(HIDDEN, HEADS, **options)
    else:
        module = te.TransformerLayer(HIDDEN, 4 * HIDDEN, HEADS, **options)
    x = torch.randn(LENGTH, BATCH, HIDDEN, dtype=BF16, device=device).requires_grad_()
    return lambda recompute: module(x, checkpoint_core_attention=recompute)


@pytest.mark.parametrize("backend", ["native", "unfused"], indirect=True)
@pytest.mark.parametrize("kind", ["core", "attention", "layer"])
def test_what_attention_makes_is_freed(device, backend, kind, made):
    run = attend(kind, device)
    with by_modules(), unkept():
        out = run(False)
    assert alive(made) >= ({"statistics"} if backend == "native" else {"probabilities"})
    out.sum().backward()
    made.clear()
    out = run(True)
    assert made and alive(made) <= {"output"}  # which the projection behind it keeps, or the test
    made.clear()
    out.sum().backward()
    assert made, "it was not repeated"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_in_fp8_the_output_is_freed_too(device, kind, recipe, made):
    """The projection keeps its FP8 form."""
    run = attend(kind, device)
    with te.autocast(recipe=RECIPES[recipe]()):
        with by_modules(), unkept():
            out = run(False)
        assert alive(made) == {"output", "statistics"}
        made.clear()
        out = run(True)
    assert made and not alive(made)
    out.sum().backward()


@pytest.mark.gpu
def test_cuda_memory_between_forward_and_backward(monkeypatch):
    """The probabilities of the unfused attention, and their dropout's, are not there."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    options = {"params_dtype": BF16, "device": "cuda", "attention_dropout": 0.1}
    layer = te.TransformerLayer(256, 512, 8, **options)
    x = torch.randn(1024, 2, 256, dtype=BF16, device="cuda", requires_grad=True)
    held = {}
    for recompute in (False, True, False, True):
        before = torch.cuda.memory_allocated()
        out = layer(x, checkpoint_core_attention=recompute)
        held[recompute] = torch.cuda.memory_allocated() - before
        out.sum().backward()
        layer.zero_grad()
        x.grad = out = None
    probabilities = 2 * 8 * 1024 * 1024 * 2
    assert held[False] - held[True] >= probabilities
