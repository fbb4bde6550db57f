# SPDX-License-Identifier: Apache-2.0
"""Activations that ranks share: each keeps a part, and all gather it in the backward."""

import functools

import pytest
import torch
from pytorch import sharing_programs as programs
from pytorch.helpers import assert_same_bits
from pytorch.ranks import FOUR_TOO

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

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


def calls_of(module):
    return [module, module.forward, functools.partial(module, is_first_microbatch=None)]


@pytest.mark.parametrize("number", range(3))
def test_checkpoint_refuses_inputs_of_one_rank(number):
    """Under sequence parallelism: wherever it can see the module."""
    layer = te.LayerNormLinear(
        8, 8, tp_size=2, parallel_mode="column", sequence_parallel=True, device="cpu"
    )
    call = calls_of(layer)[number]
    with pytest.raises(ValueError, match="of a module with sequence_parallel: its input is of"):
        te.checkpoint(call, torch.ones(2, 8), distribute_saved_activations=True, tp_group="group")


def test_checkpoint_compares_inputs_where_it_is_asked_to(ranks):
    """Where a function hides the module."""
    for same, found in ranks.run(programs.other_inputs):
        assert same == ""
        if ranks.size > 1:
            assert "the ranks of tp_group differ in the first argument: rank 0: [4, 8] " in found


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


# ---- FSDP1 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("recipe", programs.RECIPES)
def test_fsdp1_trains_as_ranks_with_whole_models(ranks, recipe, original):
    """Bit for bit: of two ranks a sum has one order."""
    weights = {n: torch.randn(p.shape) * 0.2 for n, p in parameters_of_layers().items()}
    batches = [[torch.randn(16, 2, 32) for _ in range(ranks.size)] for _ in range(3)]
    wanted = ranks.run(programs.by_hand, weights, batches, recipe)
    found = ranks.run(programs.sharded, weights, batches, recipe, original)
    for (outputs, parameters, groups), (theirs, of_whole) in zip(found, wanted, strict=True):
        assert groups == [True, True]
        assert_same_bits(outputs, theirs)
        assert_same_bits(parameters, of_whole)


def parameters_of_layers():
    return dict(programs.make_layers({}, "cpu").named_parameters())


def test_fsdp1_refuses():
    model = torch.nn.Sequential(te.Linear(32, 32, device="cpu"))
    with pytest.raises(TypeError, match="fsdp_root: Sequential"):
        te.distributed.prepare_te_modules_for_fsdp(model)
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        model = torch.nn.Sequential(te.Linear(32, 32, device="cpu"))
    with pytest.raises(RuntimeError, match="0.weight is a quantized parameter"):
        te.distributed.FullyShardedDataParallel(model)
    made = te.distributed.FullyShardedDataParallel
    assert issubclass(made, torch.distributed.fsdp.FullyShardedDataParallel)


# ---- weights of other libraries ------------------------------------------------------------------


class Sharded(torch.nn.Parameter):
    """A weight whose rows are put together by one of its group."""

    group = ()

    def grad_buffer(self):
        return None

    def materialize_group_for_forward(self):
        return [torch.cat((each.detach(), each.detach())) for each in self.group]

    def materialize_group_for_backward(self):
        return [whole * 2 for whole in self.materialize_group_for_forward()]

    def finalize_group_grads(self, wgrads):
        return [None if g is None else g.chunk(2)[0] for g in wgrads]


def test_distributed_weights():
    from transformer_engine.pytorch import distributed_weight as functions

    plain = [torch.nn.Parameter(torch.randn(2, 3)) for _ in range(2)]
    shards = [Sharded(p.detach().clone()) for p in plain]
    for each in shards:
        each.group = shards
    assert not functions.is_distributed_weight(plain[0])
    assert functions.is_distributed_weight(shards[0])
    assert isinstance(shards[0], functions.DistributedWeight)
    for call in ("forward", "backward"):
        materialize = getattr(functions, f"materialize_weight_for_{call}")
        assert all(a is b for a, b in zip(materialize(plain), plain, strict=True))
        wanted = [torch.cat((p.detach(), p.detach())) * (1 + (call == "backward")) for p in plain]
        assert_same_bits(materialize(shards), wanted)
        with pytest.raises(TypeError, match="Sharded, Parameter: all of a layer"):
            materialize([shards[0], plain[0]])
        with pytest.raises(ValueError, match="returned 2 tensors for 1 weights"):
            materialize(shards[:1])
    grads = [torch.randn(4, 3), None]
    assert functions.finalize_weight_grads(plain, grads) == grads
    first, second = functions.finalize_weight_grads(shards, grads)
    assert_same_bits(first, grads[0][:2])
    assert second is None
    with pytest.raises(ValueError, match="the caller returned 1 tensors for 2 weights"):
        functions.finalize_weight_grads(shards, grads[:1])
