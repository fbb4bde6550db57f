# SPDX-License-Identifier: Apache-2.0
"""DDP, FSDP2 and distributed checkpoints: as one process with the joined batch, states alike."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from comparators import assert_nmse
from pytorch import distributed_programs as programs
from pytorch.helpers import assert_same_bits, states_of
from tols import BF16, E4M3, E5M2, F32, PASSED_ON, tol

import transformer_engine.pytorch as te

RATE = 1e-3  # weights change, but not so much that rounding errors grow
PRODUCTS = 24  # of two layers, one after the other: their errors add up
USES = [None, "delayed", "current"]
KINDS = [kind for kind in programs.BLOCKS if kind not in ("torch", "wide", "wide-torch")]


def random_weights(kind):
    """Weights of a model, none of them zero."""
    model = programs.make_model(kind, "cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def random_batches(count=4):
    shape = (8, programs.BATCH, programs.HIDDEN)
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(count)]


def joined(results):
    """Outputs of all ranks as one; all ranks have the same of everything else."""
    for result in results[1:]:
        for key in ("gradients", "parameters", "states"):
            assert_same_bits(result[key], results[0][key], key)
    outputs = zip(*(result["outputs"] for result in results), strict=True)
    return {**results[0], "outputs": [torch.cat(shares, dim=1) for shares in outputs]}


def bound(use, dtype=F32):
    """Sums in another order; in FP8 that can move a cast of what follows to its neighbour."""
    exact = tol("sum", F32, 64) + (0 if dtype is F32 else tol("round", dtype))
    exact *= PASSED_ON * PRODUCTS
    return exact if use is None else tol("round", E5M2)


def assert_close(found, exact, limit, gain=1.0):
    """Assert that outputs, gradients and states agree; `gain` is that of the gradients found.

    The gradient of a key's bias is 0 but for rounding: softmax takes no notice of it.
    """
    pairs = list(zip(found["outputs"], exact["outputs"], strict=True))
    gradients = list(zip(found["gradients"], exact["gradients"], strict=True))
    for mine, theirs in [*gradients, (found["parameters"], exact["parameters"])]:
        assert mine.keys() == theirs.keys()
        factor = 1.0 if mine is found["parameters"] else gain
        pairs += [(mine[n] * factor, theirs[n]) for n in mine if not n.endswith("key_bias")]
    for mine, theirs in zip(found["states"], exact["states"], strict=True):
        assert (mine is None) is (theirs is None)
        for direction in mine or ():
            pairs += zip(mine[direction], theirs[direction], strict=True)
    for mine, theirs in pairs:
        assert_nmse(mine.float(), theirs.float(), limit)


# ---- DDP -----------------------------------------------------------------------------------------


def alone(kind, use, weights, batches, device):
    """What one process makes of a batch."""
    te.reset()
    model = programs.make_model(kind, device)
    model.load_state_dict(weights)
    return programs.run_steps(model, use, [tuple(t.to(device) for t in b) for b in batches])


@pytest.mark.parametrize("use", [None, "delayed"], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_ddp_is_one_process_with_the_joined_batch(ranks, kind, use):
    """With delayed scaling because the ranks reduce their amaxes; DDP takes the mean."""
    weights, batches = random_weights(kind), random_batches()
    found = joined(ranks.run(programs.ddp, kind, use, weights, batches))
    exact = alone(kind, use, weights, batches, ranks.device)
    assert_close(found, exact, bound(use), gain=ranks.size)
    assert (use == "delayed") is all(state is not None for state in found["states"])


@pytest.mark.parametrize("kind", KINDS)
def test_ddp_with_current_scaling(ranks, kind):
    """Each rank measures its share: the mean of what single processes make of the shares."""
    weights, batches = random_weights(kind), random_batches()
    found = joined(ranks.run(programs.ddp, kind, "current", weights, batches))
    size = programs.BATCH // ranks.size
    shares = [
        alone(
            kind,
            "current",
            weights,
            [tuple(t[:, size * rank :][:, :size].clone() for t in batch) for batch in batches],
            ranks.device,
        )
        for rank in range(ranks.size)
    ]
    exact = joined([{**share, "gradients": shares[0]["gradients"]} for share in shares])
    exact["gradients"] = [
        {name: sum(step[name] for step in steps) / ranks.size for name in steps[0]}
        for steps in zip(*(share["gradients"] for share in shares), strict=True)
    ]
    assert_close(found, exact, bound(None if ranks.device == "cpu" else "current"))


# ---- FSDP2 ---------------------------------------------------------------------------------------


def assert_equal_on_cpu(ranks, found, exact, use):
    """Assert the same bits on a CPU; a GPU's libraries may add in another order."""
    if ranks.device == "cpu":
        assert_same_bits(found, exact)
    else:
        assert_close(found, exact, bound(use))


@pytest.mark.parametrize("use", USES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2_trains_as_ddp(ranks, kind, use):
    """Whether the whole weights are kept from forward to backward or made again."""
    given = (kind, use, random_weights(kind), random_batches())
    expected = joined(ranks.run(programs.ddp, *given, 1, False, RATE))
    for reshard in (True, False):
        found = joined(ranks.run(programs.fsdp2, *given, reshard, False, None, 1, False, RATE))
        assert_equal_on_cpu(ranks, found, expected, use)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("use", USES, ids=str)
@pytest.mark.parametrize("kind", ["Linear-split", "TransformerLayer"])
def test_fsdp2_with_microbatches(ranks, kind, use, reshard):
    """The cache of the weights goes with the whole weights, so this is as without flags."""
    given = (kind, use, random_weights(kind), random_batches(), reshard, False, None, 2)
    expected = joined(ranks.run(programs.fsdp2, *given, False, RATE))
    found = joined(ranks.run(programs.fsdp2, *given, True, RATE))
    assert_equal_on_cpu(ranks, found, expected, use)


@pytest.mark.parametrize("recompute", ["ours", "torch"])
@pytest.mark.parametrize("use", USES, ids=str)
@pytest.mark.parametrize("kind", ["Linear-split", "TransformerLayer"])
def test_fsdp2_with_recompute(ranks, kind, use, recompute):
    given = (kind, use, random_weights(kind), random_batches())
    expected = joined(ranks.run(programs.fsdp2, *given, True, False, None, 1, False, RATE))
    found = joined(ranks.run(programs.fsdp2, *given, True, False, recompute, 1, False, RATE))
    assert_equal_on_cpu(ranks, found, expected, use)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
def test_fsdp2_as_torch_linear(ranks, half, reshard):
    """The same wrap around the same weights, with and without a mixed-precision policy."""
    given = (None, random_weights("Linear"), random_batches(), reshard, half, None, 1, False, RATE)
    expected = joined(ranks.run(programs.fsdp2, "torch", *given))
    found = joined(ranks.run(programs.fsdp2, "Linear", *given))
    found["states"] = expected["states"]  # torch.nn.Linear is no module that could have one
    assert_close(found, expected, bound(None, BF16 if half else F32))


@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
@pytest.mark.parametrize("use", ["delayed", "current"])
def test_fsdp2_in_fp8_with_a_policy(ranks, use, half):
    """All ranks come to the same parameters and the same scales."""
    given = ("TransformerLayer", use, random_weights("TransformerLayer"), random_batches())
    found = joined(ranks.run(programs.fsdp2, *given, True, half, None, 1, False, RATE))
    assert all(p.isfinite().all() for p in found["parameters"].values())
    assert (use == "delayed") is (found["states"][0] is not None)


@pytest.mark.parametrize("use", [None, "current"], ids=str)
@pytest.mark.parametrize("policies", programs.NORM_POLICIES)
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_fsdp2_with_a_policy_of_norms_alone(ranks, kind, policies, use):
    """As single processes of the same dtypes; gradients of norms are averaged in fp32."""
    weights = programs.normalized(kind, "cpu", None).state_dict()
    weights = {n: torch.randn_like(t) * 0.2 for n, t in weights.items() if t.is_floating_point()}
    batches = random_batches(2)
    given = ranks.run(programs.fsdp2_of_norms, kind, policies, use, weights, batches)
    of_model, of_norms = (policy.param_dtype for policy in programs.NORM_POLICIES[policies])
    for _, seen in given:
        assert seen == {(of_model, of_norms, of_norms)}
    found, size = joined([result for result, _ in given]), programs.BATCH // ranks.size
    assert all(g.dtype is F32 for step in found["gradients"] for g in step.values())
    shares = []
    for rank in range(ranks.size):
        te.reset()
        model = programs.normalized(kind, ranks.device, None).to(of_model)
        for norm in (norm for block in model for norm in block.norms()):
            norm.to(of_norms)
        model.load_state_dict(weights)
        own = slice(size * rank, size * (rank + 1))
        part = [[t[:, own].to(ranks.device, of_model) for t in batch] for batch in batches]
        shares.append(programs.run_steps(model, use, part))
    limit = bound(use, BF16)
    outputs = zip(*(share["outputs"] for share in shares), strict=True)
    for mine, theirs in zip(found["outputs"], outputs, strict=True):
        assert_nmse(mine.float(), torch.cat(theirs, dim=1).float(), limit)
    for step, *theirs in zip(found["gradients"], *(s["gradients"] for s in shares), strict=True):
        for name, mine in step.items():
            mean = sum(of_rank[name].float() for of_rank in theirs) / ranks.size
            if ranks.device == "cpu" and "norm" in name and "layernorm" not in name:
                assert_same_bits(mine, mean, name)
            elif not name.endswith("key_bias"):
                assert_nmse(mine, mean, limit, name)


@pytest.mark.parametrize("how", ["reset_parameters", "to_empty"])
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2_of_meta_parameters(ranks, kind, how):
    for found in ranks.run(programs.fsdp2_from_meta, kind, how):
        for name, parameter in found.items():
            if name.endswith("bias"):
                assert not parameter.any()
            elif parameter.dim() == 2:  # of deviation 0.023
                assert 0.01 < parameter.std() < 0.1, name
            else:
                assert (parameter == 1).all()


@pytest.mark.parametrize("order", programs.ORDERS)
@pytest.mark.parametrize("name", programs.QUANTIZED)
def test_fsdp2_of_quantized_weights(ranks, name, order):
    """Parts are quantized, however they came to be, and the whole weights are what these say."""
    if name == "custom" and ranks.device == "cuda":
        pytest.skip("its quantizers are those of the CPU")
    whole = programs.quantized_model("cpu").state_dict()
    weights = {key: torch.randn_like(value) / 8 for key, value in whole.items()}
    loads = any("load" in action for action in programs.ORDERS[order])
    batches = [torch.randn(32, 64) for _ in range(2)]
    results = ranks.run(programs.quantized_shards, name, order, weights, batches)
    kinds = set(results[0][0].values())
    late = programs.ORDERS[order][-1] == "shard"  # FSDP2 deals out values in high precision
    assert (kinds == {"Tensor"}) if late else (len(kinds) == 1 and "Tensor" not in kinds)
    for result in results[1:]:
        assert_same_bits(result[2], results[0][2])
    before = joined_parts(results, 1)
    after = joined_parts(results, 3)
    for key, value in before.items():
        assert not torch.equal(value, after[key]), key
        if loads:
            family = "half_step_nvfp4" if name == "nvfp4" else "round"
            assert_nmse(value, weights[key], tol(family, E4M3))
    te.reset()
    scales, recipe = results[0][4], programs.QUANTIZED[name]
    with te.quantized_model_init(enabled=bool(scales), recipe=recipe):
        alone = programs.quantized_model(ranks.device)
    fresh = {key: value.clone() for key, value in alone.state_dict().items()}
    alone.load_state_dict({**fresh, **(weights if loads else {}), **before})
    for key, scale in scales.items():  # that of a cast of what was cast may be one bit off
        weight = alone.get_parameter(key)
        weight._scales.copy_(scale)
        assert_same_bits(weight.dequantize().cpu(), before[key])
    with te.autocast(recipe=recipe):
        out = alone(batches[0].to(ranks.device))
    if ranks.device == "cpu":
        assert_same_bits(out.detach(), results[0][2][0])


@pytest.mark.parametrize("kind", programs.OPTIMIZERS)
@pytest.mark.parametrize("name", [name for name in programs.QUANTIZED if name != "custom"])
def test_optimizers_of_quantized_shards(ranks, name, kind):
    """A step over parts is the step over plain copies of them, quantized."""
    batches = [torch.randn(32, 64) for _ in range(3)]
    for found, expected in ranks.run(programs.optimized_shards, name, kind, batches):
        for key, value in expected.items():
            assert_same_bits(found[key], value)


@pytest.mark.parametrize("name", [name for name in programs.QUANTIZED if name != "custom"])
def test_ddp_of_quantized_weights(ranks, name):
    """Ranks begin with the weights of the first one, and keep equal ones."""
    results = ranks.run(programs.quantized_ddp, name, [torch.randn(32, 64) for _ in range(3)])
    for before, after, quantized in results:
        assert quantized == 3
        assert_same_bits([before, after], list(results[0][:2]))
        assert any(not torch.equal(value, after[key]) for key, value in before.items())


def test_fsdp2_refuses_quantized_weights_of_uneven_parts(ranks):
    if ranks.size == 1:
        pytest.skip("one rank has all rows")
    for message in ranks.run(programs.uneven_shards):
        assert f"weight of 63 rows over {ranks.size} ranks as a Float8BlockwiseQTensor" in message
        assert "is not there yet: its rows must be a multiple of the ranks" in message


def joined_parts(results, place):
    """The whole weights of the parts of all ranks."""
    return {key: torch.cat([result[place][key] for result in results]) for key in results[0][place]}


@pytest.mark.parametrize("kind", ["torch", "Linear", "Linear-split"])
def test_fsdp2_weights_changed_before_the_backward(ranks, kind):
    for message in ranks.run(programs.in_place, kind):
        assert "modified by an inplace operation" in message


@pytest.mark.parametrize("use", USES, ids=str)
def test_fsdp2_frees_the_whole_weights(ranks, use):
    """No copy of a whole weight outlives the forward; activations are small beside it."""
    if ranks.device == "cpu":
        pytest.skip("the CPU's allocator does not tell")
    theirs = ranks.run(programs.memory_after_forward, "wide-torch", None)
    for ours, (left, weights) in zip(
        ranks.run(programs.memory_after_forward, "wide", use), theirs, strict=True
    ):
        assert ours[0] < left + weights / 8


# ---- distributed checkpoints ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("use", [None, "delayed"], ids=str)
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_a_checkpoint_of_all_ranks_loads_anywhere(ranks, tmp_path, wrapper, use):
    """Into one process, and into fresh ranks: in place, or whole, from all or from the first."""
    kind, folder = "TransformerLayer", str(tmp_path / "saved")
    given = (kind, use, wrapper, random_weights(kind), random_batches())
    results = ranks.run(programs.save, *given, folder)
    for result in results:
        assert_same_bits(result, results[0])
    expected = results[0]
    assert (use is not None) is all(state is not None for state in expected["states"])
    te.reset()
    model = programs.make_model(kind, "cpu")
    with programs.region(use):
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
    assert_same_bits(
        [p.detach() for _, p in sorted(model.named_parameters())], expected["parameters"]
    )
    assert_same_bits(states_of(model), expected["states"])
    ways = [("fsdp2", "place"), ("fsdp2", "whole"), ("fsdp2", "rank 0"), ("ddp", "place")]
    for way in [*ways, ("ddp", "rank 0")]:
        for result in ranks.run(programs.load, kind, use, way[0], folder, way[1]):
            assert_same_bits(result, expected, str(way))
