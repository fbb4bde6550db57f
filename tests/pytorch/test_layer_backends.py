# SPDX-License-Identifier: Apache-2.0
"""Backends of attention inside of a layer that runs as one call: the bits of the modules."""

import pytest
import torch
from pytorch.helpers import states_of_tracker
from pytorch.layer_ways import (
    LENGTH,
    SOURCE,
    assert_ways_agree,
    inputs_of,
    make_attention,
    make_layer,
    states,
)
from thinning import pairs
from tols import BF16

from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

OPTIONS = {
    "plain": {},
    "bshd": {"attn_input_format": "bshd", "fuse_qkv_params": True},
    "dropped": {"attention_dropout": 0.3, "hidden_dropout": 0.1},
    "groups": {"num_gqa_groups": 2},
    "two channels": {"kv_channels": (16, 8)},
    "groups, two channels": {"kv_channels": (8, 16), "num_gqa_groups": 2},
    "no mask": {"self_attn_mask_type": "no_mask"},
    "decoder": {"layer_type": "decoder"},
    "decoder, dropped": {"layer_type": "decoder", "attention_dropout": 0.3},
}


# A recipe is of the products, an option of what lies between them.
@pairs(
    backend=["native", "sdpa", "unfused"],
    options=OPTIONS,
    recipe=[None, "delayed"],
    indirect=["backend"],
)
def test_backends(device, backend, options, recipe):
    """But for the library's operator they are made of torch's, which are no part of a plan."""
    layer = make_layer(device, BF16, **OPTIONS[options])
    whole = backend == "native"
    assert_ways_agree(layer, inputs_of(layer), recipe=recipe, whole=whole)


def test_backends_that_change_between_calls(device, monkeypatch):
    """The variables of the environment count at each call."""
    layer = make_layer(device, BF16)
    for fused, flash, whole in (("1", "1", True), ("0", "1", False), ("0", "0", False)) * 2:
        monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
        monkeypatch.setenv("NVTE_FLASH_ATTN", flash)
        assert_ways_agree(layer, inputs_of(layer), whole=whole)


@pytest.mark.parametrize("lengths", [(LENGTH, SOURCE), (SOURCE, LENGTH)])
@pytest.mark.parametrize("kind", ["no_mask", "causal"])
def test_lengths_of_queries_and_keys(device, backend, kind, lengths):
    layer = make_attention(device, BF16, attention_type="cross", attn_mask_type=kind)
    given = inputs_of(layer, hidden_states=states(layer, lengths[0]))
    given["encoder_output"] = states(layer, lengths[1])
    assert_ways_agree(layer, given, whole=backend == "native")


def test_a_backward_that_is_run_twice(device, backend):
    layer = make_layer(device, BF16, attention_dropout=0.3, hidden_dropout=0.1)
    x = states(layer)
    out = layer(x).float().square().sum()
    out.backward(retain_graph=True)
    first = [t.grad.clone() for t in (x, *layer.parameters())]
    for tensor in (x, *layer.parameters()):
        tensor.grad = None
    out.backward()
    for tensor, grad in zip((x, *layer.parameters()), first, strict=True):
        assert torch.equal(tensor.grad, grad)


@pytest.mark.parametrize("options", [{}, {"layer_type": "decoder"}], ids=["encoder", "decoder"])
def test_tracker(device, backend, options, monkeypatch):
    """Dropout of each attention is drawn inside of the tracker's fork, hidden dropout is not."""
    if device == "cpu":  # the tracker swaps the CPU's state where there is no CUDA device
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 1234)
    begin = tracker.get_states()
    found = []

    def start():
        found.append(states_of_tracker(tracker)["model-parallel-rng"])
        tracker.set_states(begin)

    drops = {"hidden_dropout": 0.3, "attention_dropout": 0.2}
    layer = make_layer(device, BF16, get_rng_state_tracker=lambda: tracker, **options, **drops)
    whole = backend == "native"
    assert_ways_agree(layer, inputs_of(layer), start=start, whole=whole)
    start()
    begun, *ended = found
    assert len(ended) == 4 and not torch.equal(begun, ended[0])
    assert all(torch.equal(end, ended[0]) for end in ended)
