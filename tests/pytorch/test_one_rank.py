# SPDX-License-Identifier: Apache-2.0
"""The arguments of tensor and context parallelism on one rank: accepted, and without effect."""

import copy
import pickle

import pytest
import torch
from pytorch.helpers import same_draws
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import transformer_engine.pytorch as te

OVERLAP = ("ub_overlap_ag", "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad")
LINEAR = {
    **dict.fromkeys((*OVERLAP, "ub_bulk_wgrad", "sequence_parallel"), True),
    "tp_size": 1,
    "parallel_mode": "column",
    "ub_name": "qkv",
    "symmetric_ar_type": "one_shot",
}
LAYER = {
    **dict.fromkeys((*OVERLAP, "ub_bulk_wgrad", "sequence_parallel", "set_parallel_mode"), True),
    "tp_size": 1,
}
MLP = {**LAYER, "return_layernorm_output_gathered": True, "symmetric_ar_type": "one_shot"}
OPTIONS = {
    te.Linear: LINEAR,
    te.LayerNormLinear: {**LINEAR, "return_layernorm_output_gathered": True},
    te.LayerNormMLP: MLP,
    te.MultiheadAttention: LAYER,
    te.TransformerLayer: {**LAYER, "ub_tp_comm_overlap": True},
    te.DotProductAttention: {"sequence_parallel": True, "tp_size": 1},
}
SIZES = {te.MultiheadAttention: (32, 4), te.DotProductAttention: (4, 8)}
SIZES[te.TransformerLayer] = (32, 64, 4)
EVERY = pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)


def make(kind, device="cpu", **options):
    """A module; twice the same one after the same seed."""
    sizes = next((s for base, s in SIZES.items() if issubclass(kind, base)), (32, 48))
    if issubclass(kind, te.DotProductAttention):
        return kind(*sizes, **options)
    if issubclass(kind, te.TransformerLayer):
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **options}
    if issubclass(kind, te.MultiheadAttention):
        options = {"attention_dropout": 0.0, **options}
    return kind(*sizes, device=device, **options)


def run(module, device):
    """Output and gradients of a call in FP8; the next one has the same input."""
    with same_draws(device):
        x = torch.randn(16, 2, 32, device=device, requires_grad=True)
    with te.autocast():
        if isinstance(module, te.DotProductAttention):
            heads = x.unflatten(-1, (4, 8))
            out = module(heads, heads, heads)
        else:
            out = module(x)
    out.sum().backward()
    return [out, x.grad, *(p.grad for p in module.parameters())]


@pytest.fixture
def groups(request):
    """Initialise torch.distributed as the only rank of `request.param` ranks; give its group."""
    store = FakeStore() if request.param > 1 else distributed.HashStore()
    backend = "fake" if request.param > 1 else "gloo"
    distributed.init_process_group(backend, store=store, rank=0, world_size=request.param)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


ONE = pytest.mark.parametrize("groups", [1], indirect=True)
TWO = pytest.mark.parametrize("groups", [2], indirect=True)


@EVERY
@ONE
def test_one_rank_changes_nothing(kind, groups, device, start):
    start()
    plain = make(kind, device)
    start()
    parallel = make(kind, device, tp_group=groups, **OPTIONS[kind])
    for ours, theirs in zip(run(parallel, device), run(plain, device), strict=True):
        assert torch.equal(ours, theirs)
    assert parallel.tp_group is groups
    assert parallel.tp_size == 1
    assert parallel.sequence_parallel is False


@EVERY
@ONE
def test_a_group_set_later_is_every_submodules_too(kind, groups):
    module = make(kind)
    assert module.tp_group is None
    module.set_tensor_parallel_group(groups)
    inside = [m for m in module.modules() if hasattr(m, "tp_group")]
    assert module in inside
    assert all(m.tp_group is groups for m in inside)
    module.set_tensor_parallel_group(None)
    assert all(m.tp_group is None for m in inside)


@pytest.mark.parametrize("made", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@EVERY
@ONE
def test_copies_and_pickles_have_no_group(kind, groups, made):
    module = make(kind, tp_group=groups)
    for attention in module.modules():
        if isinstance(attention, te.DotProductAttention):
            attention.set_context_parallel_group(groups, [0], None, "p2p")
    other = made(module)
    assert other.tp_group is None
    assert module.tp_group is groups
    for ours, theirs in zip(run(other, "cpu"), run(module, "cpu"), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
@ONE
def test_context_parallel_groups(groups, layer_type):
    layer = make(te.TransformerLayer, layer_type=layer_type)
    cores = [m for m in layer.modules() if isinstance(m, te.DotProductAttention)]
    assert len(cores) == (2 if layer_type == "decoder" else 1)
    for given in (groups, [groups, groups], None):
        layer.set_context_parallel_group(given, [0], None, "a2a")
        assert all(core.cp_group is given and core.cp_comm_type == "a2a" for core in cores)
    layer.self_attention.set_context_parallel_group(groups)
    assert cores[0].cp_group is groups
    assert te.DotProductAttention(4, 8, cp_group=groups, cp_global_ranks=[0]).cp_group is groups


@EVERY
@TWO
def test_groups_of_more_ranks(kind, groups):
    name = kind.__name__
    with pytest.raises(ValueError, match=f"{name}: tp_size=3, and a tp_group of 2 ranks"):
        make(kind, tp_group=groups, tp_size=3)
    module = make(kind)
    with pytest.raises(ValueError, match="tp_group has 2 ranks, the module was made for 1"):
        module.set_tensor_parallel_group(groups)
    assert module.tp_group is None
    if hasattr(module, "set_context_parallel_group"):
        with pytest.raises(ValueError, match="'a2a\\+p2p' takes a list of two groups"):
            module.set_context_parallel_group([None, groups])
        with pytest.raises(ValueError, match="'a2a\\+p2p' takes a list of two groups"):
            module.set_context_parallel_group(groups, cp_comm_type="a2a+p2p")
        with pytest.raises(ValueError, match="expected two groups for 'a2a\\+p2p'"):
            module.set_context_parallel_group([groups], cp_comm_type="a2a+p2p")
        with pytest.raises(ValueError, match=r"cp_global_ranks=\[0\], expected 2 ranks"):
            module.set_context_parallel_group(groups, [0])
        with pytest.raises(NotImplementedError, match="NO_LOAD_BALANCE of 2 ranks is not there"):
            module.set_context_parallel_group(
                groups, load_balancing_strategy=te.CPLoadBalancingStrategy.NO_LOAD_BALANCE
            )
        module.set_context_parallel_group(groups)
        assert (module.cp_size, module.cp_rank) == (2, groups.rank())
        again = pickle.loads(pickle.dumps(module))
        assert (again.cp_group, again.cp_size, again.cp_rank) == (None, 1, 0)


@EVERY
def test_what_is_no_group_is_refused(kind):
    for wrong in (3, "tp", object(), [None, 2]):
        with pytest.raises(TypeError, match=r"tp_group=.*: expected a torch.distributed.Process"):
            make(kind, tp_group=wrong)
        module = make(kind)
        with pytest.raises(TypeError, match=r"tp_group=.*new_group returns it, or None"):
            module.set_tensor_parallel_group(wrong)
        assert module.tp_group is None
        if hasattr(module, "set_context_parallel_group"):
            with pytest.raises(TypeError, match=r"cp_group=.*: expected a torch.distributed"):
                module.set_context_parallel_group(wrong)


@EVERY
@pytest.mark.parametrize("size", [0, -1, 2.0, "1", True, None], ids=str)
def test_what_is_no_number_of_ranks_is_refused(kind, size):
    with pytest.raises(ValueError, match=rf"tp_size={size!r}, expected a positive int"):
        make(kind, tp_size=size)


@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear], ids=lambda kind: kind.__name__)
def test_what_is_no_mode_is_refused(kind):
    with pytest.raises(ValueError, match="parallel_mode='rows', expected None, 'column' or 'row'"):
        make(kind, parallel_mode="rows")


# ---- what frameworks read of the parameters ------------------------------------------------------


def marks(parameter):
    """(dim that would be split, or None; ``sequence_parallel`` or None where it is not set)."""
    split = getattr(parameter, "tensor_model_parallel", False)
    if split:
        assert parameter.partition_stride == 1
    dim = parameter.partition_dim if split else None
    return dim, getattr(parameter, "sequence_parallel", None)


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("split", [None, ("query", "key")], ids=["whole", "split"])
@pytest.mark.parametrize("mode", [None, "column", "row"])
@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear], ids=lambda kind: kind.__name__)
def test_parameters_of_a_linear_say_how_they_would_be_split(kind, mode, split, place):
    module = make(kind, place, parallel_mode=mode, parameters_split=split)
    if place == "meta":
        module.reset_parameters()
    weight = (1 if mode == "row" else 0, None)
    bias = {None: (None, None), "column": (0, None), "row": (None, False)}[mode]
    for name, parameter in module.named_parameters():
        if name.startswith("layer_norm"):
            assert marks(parameter) == (None, False)
        else:
            assert marks(parameter) == (weight if name.endswith("weight") else bias)
    assert module.parallel_mode == mode


@pytest.mark.parametrize("modes", [False, True])
def test_parameters_of_a_layer_say_how_they_would_be_split(modes):
    layer = make(te.TransformerLayer, set_parallel_mode=modes)
    found = {name: marks(p) for name, p in layer.named_parameters()}
    column, row, nothing = (0, None), (1, None), (None, None)
    attention, mlp = "self_attention.", "layernorm_mlp."
    assert found[f"{attention}layernorm_qkv.query_weight"] == column
    assert found[f"{attention}layernorm_qkv.query_bias"] == (column if modes else nothing)
    assert found[f"{attention}proj.weight"] == (row if modes else column)
    assert found[f"{attention}proj.bias"] == ((None, False) if modes else nothing)
    assert found[f"{mlp}fc1_weight"] == column
    assert found[f"{mlp}fc1_bias"] == (column if modes else nothing)
    assert found[f"{mlp}fc2_weight"] == row
    assert found[f"{mlp}fc2_bias"] == ((None, False) if modes else nothing)
    norms = [marks for name, marks in found.items() if "layer_norm" in name]
    assert norms == [(None, False)] * 4


def test_a_marked_parameter_saves_and_loads_safely(tmp_path):
    layer = make(te.Linear, parallel_mode="row")
    torch.save(layer.weight, tmp_path / "weight.pt")
    loaded = torch.load(tmp_path / "weight.pt", weights_only=True)
    assert torch.equal(loaded, layer.weight)
    assert loaded.partition_dim == 1


# ---- subclasses ----------------------------------------------------------------------------------


@EVERY
def test_a_subclass_may_set_attributes_before_its_base_is_made(kind, start):
    """As those of megatron-core do."""

    class Wrapper(kind):
        def __init__(self, *args, **options):
            self.config = {"tp": 1}
            self.is_first_microbatch = True
            self.tp_size = 1
            super().__init__(*args, **options)

    start()
    module = make(Wrapper)
    assert module.config == {"tp": 1}
    assert module.is_first_microbatch
    start()
    plain = make(kind)
    for ours, theirs in zip(run(module, "cpu"), run(plain, "cpu"), strict=True):
        assert torch.equal(ours, theirs)
