# SPDX-License-Identifier: Apache-2.0
"""Activations that ranks share: each keeps a part, and all gather it in the backward."""

import pytest
import torch
from pytorch import sharing_programs as programs
from pytorch.helpers import assert_same_bits
from pytorch.ranks import FOUR_TOO

import transformer_engine.pytorch as te

WAYS = [{}, {"use_reentrant": False}]


@pytest.mark.parametrize("ranks", FOUR_TOO, indirect=True)
@pytest.mark.parametrize("recipe", programs.RECIPES)
def test_checkpoint_keeps_a_part_of_its_input(ranks, recipe):
    """With the bits of a run without a checkpoint; the input is let go."""
    weights = programs.make_layers({}, "cpu").state_dict()
    weights = {name: t for name, t in weights.items() if isinstance(t, torch.Tensor)}
    x, grad = torch.randn(16, 4, 32), torch.randn(16, 4, 32)
    plain = ranks.run(programs.checkpointed, weights, x, grad, recipe, None)
    for way in WAYS:
        found = ranks.run(programs.checkpointed, weights, x, grad, recipe, way)
        for (mine, gone), (wanted, _) in zip(found, plain, strict=True):
            assert gone
            assert_same_bits(mine, wanted)


def test_checkpoint_refuses():
    share = {"distribute_saved_activations": True}
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(ValueError, match="tp_group"):
        te.checkpoint(torch.sin, x, **share)
    for given in ((), ("text",)):
        with pytest.raises(TypeError, match="the first argument: (NoneType|str)"):
            te.checkpoint(print, *given, tp_group="group", **share)


def test_checkpoint_wants_equal_parts(monkeypatch):
    from transformer_engine.pytorch.torchside import collectives

    monkeypatch.setattr(collectives, "get_distributed_world_size", lambda group=None: 2)
    with pytest.raises(ValueError, match="3 elements are no 2 parts"):
        options = {"distribute_saved_activations": True, "tp_group": "group"}
        te.checkpoint(torch.sin, torch.ones(3), **options)


@pytest.mark.parametrize("option", ["distribute_saved_activations", "get_rng_state_tracker"])
def test_checkpoint_in_a_graph_refuses(option, fresh_compiler):
    options = {option: True if option.startswith("distribute") else dict}
    compiled = torch.compile(
        lambda x: te.checkpoint(torch.sin, x, **options), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match=f"{option} under torch.compile is not built"):
        compiled(torch.ones(3))
