# SPDX-License-Identifier: Apache-2.0
"""Quantized weights under FSDP2 and HSDP: ranks exchange codes, and have the bits of DDP."""

import pytest
import torch
from comparators import assert_nmse
from pytorch import sharded_programs as programs
from pytorch.helpers import assert_same_bits, high_precision_bound
from pytorch.ranks import FOUR_TOO
from thinning import chosen, one_each
from tols import E5M2, tol

from transformer_engine.common.recipe import DelayedScaling

FOUR = [pytest.param(("cpu", 4), id="gloo-4")]
BOTH_FORMS = ("lines", "mxfp8", "nvfp4 lines")
"""Formats whose column-wise form is no row-wise one, turned: both travel."""
FORMATS = ("delayed", "current", "tiles", "mxfp8", "nvfp4")
LAYOUTS = [
    (2, 1),
    (1, 2),
    (1, 1),
]  # of four ranks: copies that a checkpoint is saved of, and loaded


def random_weights(sizes=(programs.SIZE, programs.SIZE)):
    model = programs.model_of("cpu", sizes)
    return {n: torch.randn(p.shape) / 8 for n, p in model.named_parameters()}


def random_batches(ranks, count, columns=programs.SIZE):
    return [[torch.randn(16, columns) for _ in range(ranks)] for _ in range(count)]


def share_of(name):
    """Bytes of codes and scales, to those of bf16."""
    codes = 0.5 if name.startswith("nv") else 1.0
    scales = {"mxfp8": 1 / 32, "nvfp4": 1 / 16, "lines": 4 / 128, "tiles": 4 * 4 / 128 / 512}
    forms = 2 if name in BOTH_FORMS else 1
    return (
        forms * (codes + scales.get(name.split()[-1] if name in scales else name.split()[0], 0)) / 2
    )


@pytest.mark.parametrize("name", programs.RECIPES)
def test_trains_as_ddp_and_gathers_codes(ranks, name):
    """Of two ranks a sum has one order, and so the same bits."""
    check_training(ranks, name, [(1, True), (1, False)])


@pytest.mark.parametrize("ranks", FOUR, indirect=True)
@chosen([("delayed",), ("current",), ("tiles",)], name=list(programs.RECIPES))
def test_trains_over_four_ranks(ranks, name):
    """All of them share the weights, or two and two."""
    check_training(ranks, name, [(1, True), (2, True)])


def check_training(ranks, name, ways):
    """Train under DDP and in each way: (copies of the weights, whether they are freed between)."""
    weights, batches = random_weights(), random_batches(ranks.size, 3)
    wanted = ranks.run(programs.trained, name, weights, batches, "ddp")
    for way in ways:
        found = ranks.run(programs.trained, name, weights, batches, way)
        for (losses, values, share), (theirs, of_ddp, _) in zip(found, wanted, strict=True):
            assert_same_bits(values, found[0][1])
            if ranks.size <= 2 and ranks.device == "cpu":
                assert_same_bits(losses, theirs)
                assert_same_bits(values, of_ddp)
            for mine, other in zip(losses, theirs, strict=True):
                assert_nmse(mine, other, tol("round", E5M2))
            if ranks.size > 1:
                assert share == pytest.approx(share_of(name))
            assert share <= 0.52 or name in BOTH_FORMS


@pytest.mark.parametrize("name", programs.RECIPES)
def test_no_codes_of_a_whole_weight_stay(ranks, name):
    """Neither gathered ones nor those that were derived of them, between forward and backward."""
    if ranks.size == 1:
        pytest.skip("one rank has the whole weight")
    for kept in ranks.run(programs.kept_codes, name, torch.randn(16, programs.SIZE)):
        assert kept == [0, 0, 0, 0]


@pytest.mark.parametrize("name", programs.RECIPES)
def test_hooks(ranks, name):
    """Later calls write to the same tensors, and autograd takes no notice.

    What is gathered is always of the part as it is.
    """
    for same, exact, dtype, values, wanted, later in ranks.run(programs.hooks, name):
        assert same and exact and dtype is torch.bfloat16 and all(later)
        assert_same_bits(values, wanted.to(torch.bfloat16))


@pytest.mark.parametrize("name", programs.RECIPES)
def test_pieces_are_rounded_once(ranks, name):
    """As loaders write them, each rank another number: ranks that share a scale measure once.

    Codes are copied, and nobody waits for anybody.
    """
    rows = programs.SIZE // ranks.size
    values = [torch.randn(rows, programs.SIZE) for _ in range(ranks.size)]
    measures = name in ("current", "delayed measured") or name.startswith("nvfp4")
    for pairs, counts in ranks.run(programs.written_by_pieces, name, values):
        for found, wanted in pairs:
            assert_same_bits(found, wanted)
        assert counts == [int(measures), 0]


def uneven_rows(ranks, is_empty):
    """A number of rows that ranks share unevenly, so that one has none, or all have some."""
    parts = range(1, 70)
    found = [r for r in parts if r % ranks and ((ranks - 1) * -(-r // ranks) >= r) == is_empty]
    return found[int(torch.randint(len(found), ()))]


@pytest.mark.parametrize("ranks", FOUR_TOO, indirect=True)
@pytest.mark.parametrize("is_empty", [False, True], ids=["fewer", "none"])
@pytest.mark.parametrize("name", ["current", "delayed", "delayed measured"])
def test_uneven_parts(ranks, name, is_empty):
    """Some ranks have fewer rows than others, or none: the losses are those of DDP."""
    if ranks.size == 1:
        pytest.skip("one rank has all rows")
    rows = uneven_rows(ranks.size, is_empty)
    weights = random_weights((64, rows))
    batches = random_batches(ranks.size, 3, 64)
    for losses, wanted, kinds, values, of_ddp in ranks.run(
        programs.uneven, name, weights, batches, rows
    ):
        assert all(kinds)
        if ranks.size == 2 and ranks.device == "cpu":
            assert_same_bits(losses, wanted)
            assert_same_bits(values, of_ddp)
        for mine, other in zip(losses, wanted, strict=True):
            assert_nmse(mine, other, tol("round", E5M2))


@pytest.mark.parametrize("ranks", FOUR, indirect=True)
@pytest.mark.parametrize("name, count", [("delayed", 0), ("delayed measured", 1), ("current", 1)])
def test_weights_share_one_reduction(ranks, name, count):
    """All weights of an optimizer, among them some that a rank has fewer rows of."""
    for found in ranks.run(programs.reductions, name, random_batches(ranks.size, 3, 64)):
        assert found == [count] * 3 + [2 * count] * 3


def test_masters_of_the_first_values(ranks):
    """They are not rounded; a step leaves one scale to all parts, torch's too."""
    batches = random_batches(ranks.size, 2, 64)
    results = ranks.run(programs.preserved, batches)
    for found, losses, scales in results:
        for master, first in found:
            assert_same_bits(master, first)
        assert all(loss.isfinite() for loss in losses)
        assert_same_bits(scales, results[0][2])


@pytest.mark.parametrize("ranks", FOUR, indirect=True)
@one_each(layouts=LAYOUTS, name=FORMATS)
def test_checkpoints_of_other_layouts(ranks, tmp_path, name, layouts):
    """Parameters, scaling state and optimizer: what is loaded has the bits of what was saved."""
    given = (name, random_weights(), random_batches(ranks.size, 4), str(tmp_path), layouts)
    for before, loaded, wanted, losses in ranks.run(programs.resaved, *given):
        assert_same_bits(loaded, before)
        for mine, other in zip(losses, wanted, strict=True):
            assert_nmse(mine, other, tol("round", E5M2))


def test_main_gradients_are_refused(ranks):
    for message in ranks.run(programs.refused):
        assert "fully_shard, which reduces weight.grad" in message


@pytest.mark.parametrize("apart", [False, True])
def test_scales_of_a_rank_alone_are_refused(ranks, apart):
    if ranks.size == 1:
        pytest.skip("one rank has the whole weight")
    recipe = DelayedScaling(reduce_amax=apart)
    for message in ranks.run(programs.unshared_scales, recipe, apart):
        assert "reduce_amax=False" in message and "is not there" in message


def test_main_gradients_in_buckets(ranks):
    """A wrapper that has ``main_grad`` in its buckets, as Megatron's, has the gradients of DDP."""
    for found in ranks.run(programs.in_buckets, random_batches(ranks.size, 3, 64)):
        for plain, main in found:
            assert_nmse(main, plain, 4 * high_precision_bound(torch.float32, 3 * 16 * ranks.size))
