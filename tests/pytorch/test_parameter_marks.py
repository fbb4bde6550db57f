# SPDX-License-Identifier: Apache-2.0
"""Attributes of parameters that frameworks read stay where a parameter is replaced."""

import copy
import io

import pytest
import torch
from comparators import assert_nmse
from pytorch import mark_programs as programs
from pytorch.helpers import assert_same_bits
from pytorch.ranks import FOUR
from tols import F32, tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

quantized_too = pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])


def assigned(layer):
    layer.load_state_dict(copy.deepcopy(layer).state_dict(), assign=True)
    return layer


def pickled(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "bfloat16": lambda layer: layer.bfloat16(),
    "half": lambda layer: layer.half(),
    "to": lambda layer: layer.to("cpu", torch.bfloat16),
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "assign": assigned,
}


@quantized_too
@pytest.mark.parametrize("way", WAYS)
def test_marks_stay(way, quantized):
    layer = programs.layer_of(quantized, "cpu")
    before = programs.marks_of(layer)
    assert all(before.values()) and before["layernorm_mlp.fc1_weight"]["allreduce"] is False
    assert programs.marks_of(WAYS[way](layer)) == before


@quantized_too
def test_marks_stay_on_the_meta_device(quantized):
    layer = programs.layer_of(quantized, "meta")
    before = programs.marks_of(layer)
    with torch.device("cpu"):
        programs.reset(layer)
    assert programs.marks_of(layer) == before == programs.marks_of(programs.layer_of(False, "cpu"))


def test_marks_stay_where_torch_swaps_parameters(monkeypatch):
    """As it does for subclasses of tensors, where a program says so."""
    layer = programs.layer_of(False, "cpu")
    before = programs.marks_of(layer)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    assert programs.marks_of(layer.bfloat16()) == before


def test_a_new_parameter_has_its_own_marks():
    """megatron-core assigns one, and refuses marks that it has not set."""
    layer = programs.layer_of(False, "cpu")
    weight = torch.nn.Parameter(torch.empty_like(layer.layernorm_mlp.fc1_weight))
    weight.allreduce = True
    layer.layernorm_mlp.fc1_weight = weight
    assert vars(weight) == {"allreduce": True}


def test_first_values_stay_in_a_conversion():
    recipe = Float8CurrentScaling()
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        module = te.Linear(32, 16, device="cpu")
    values = module.weight.get_high_precision_init_val()
    weight = module.bfloat16().weight
    assert_same_bits(weight.get_high_precision_init_val(), values)
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None


@quantized_too
@pytest.mark.parametrize("on_meta", [False, True], ids=["values", "meta"])
def test_marks_stay_under_fsdp2(ranks, on_meta, quantized):
    options = {} if on_meta else {"tp_size": 1}
    wanted = programs.marks_of(programs.layer_of(False, "cpu", **options))
    for found in ranks.run(programs.sharded, quantized, on_meta):
        assert found == (wanted, wanted)


@pytest.mark.parametrize("ranks", FOUR, indirect=True)
def test_marks_say_how_to_train_sharded_parameters(ranks):
    """FSDP2 over parts of tensor parallelism trains as one process does."""
    layer = programs.layer_of(False, "cpu", tp_size=1)
    state = {name: p.detach().clone() for name, p in layer.named_parameters()}
    batches = [torch.randn(8, 4, programs.HIDDEN) for _ in range(3)]
    found = ranks.run(programs.trained, state, batches)
    for batch in batches:
        layer.zero_grad()
        (layer(batch).square().sum() / 2).backward()  # FSDP2 averages over its ranks
        with torch.no_grad():
            for p in layer.parameters():
                p.sub_(p.grad, alpha=programs.RATE / batch.numel())
    bound = 16 * len(batches) * tol("layer", F32, batches[0].numel())
    for theirs in found:
        assert theirs.keys() == state.keys()
        for name, p in layer.named_parameters():
            if "key_bias" in name:  # its gradient is 0: a softmax does not see what keys share
                continue
            assert_nmse(theirs[name] - state[name], p.detach() - state[name], bound, name)
