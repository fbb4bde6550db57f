# SPDX-License-Identifier: Apache-2.0
"""Modules that are split over ranks: together they are the module of one rank."""

import itertools
import re

import pytest
import torch
from comparators import assert_nmse
from pytorch import tensor_parallel_programs as programs
from pytorch.ranks import FOUR_TOO, GROUPS
from thinning import in_turns, pairs
from tols import BF16, E5M2, F32, tol

STEPS = 3
KINDS = {  # ways of input and output: without and with sequence parallelism
    "column": (("all", "columns"), ("rows", "columns")),
    "row": (("columns", "all"), ("columns", "rows")),
    "ln_column": (("all", "columns"), ("rows", "columns")),
    "mlp": (("all", "all"), ("rows", "rows")),
    "attention": (("all", "all"), ("rows", "rows")),
    "layer": (("all", "all"), ("rows", "rows")),
}
SUMMED = {"column": ("grad_input",), "row": ("output",)}
"""Of linear layers what is a sum over ranks; all else has the same bits."""
EXACT = ("none", "delayed", "block", "mxfp8")
"""Recipes under which a rank's cast of a part is a part of the cast of all."""
FORMS = {"delayed": torch.uint8, "current": torch.uint8, "block": torch.uint8, "mxfp8": torch.uint8}


def problem_of(kind, ways, rows, options):
    """Parameters of the whole module, its input and gradients of its output."""
    module = programs.make(kind, **options)
    state = {name: p.detach() for name, p in module.named_parameters()}
    for name, value in state.items():
        if value.dim() == 1 and "norm" not in name:
            value.normal_()
    columns = programs.HIDDEN
    lead = (rows // 4, 4) if kind in ("attention", "layer") else (rows,)
    x = torch.randn(*lead, columns)
    outputs = programs.FFN if kind in ("column", "row", "ln_column") else columns
    grads = [torch.randn(*lead, outputs) for _ in range(STEPS)]
    return module, (state, x, grads, ways)


def joined(kind, ways, sequence, name, parts, whole):
    """A tensor of all ranks."""
    if name in ("output", "grad_input"):
        way = ways[name == "output"]
        if way == "all":
            return parts[0]
        return torch.cat(parts, 0 if way == "rows" else -1)
    if name.startswith("other_"):
        return torch.cat(parts) if parts[0].shape != whole.shape else parts[0]
    if parts[0].shape == whole.shape:  # norms of heads see those of a rank
        return sum(parts) if sequence or "q_norm" in name or "k_norm" in name else parts[0]
    dim = 1 if kind == "row" or any(text in name for text in ("proj.", "fc2_")) else 0
    if "fc1_" in name and whole.shape[0] == 2 * programs.FFN:
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([torch.cat(half) for half in halves])
    return torch.cat(parts, dim)


def columns_of_ranks(options, ranks):
    """Outputs of a split weight in the order of the ranks; None: they are in order."""
    if "parameters_split" not in options:
        return None
    pieces = torch.arange(programs.FFN).split([*options["parameters_split"].values()])
    return torch.cat([piece.chunk(ranks)[rank] for rank in range(ranks) for piece in pieces])


def check(ranks, kind, recipe, sequence, options, rows, how=(False, False, False)):
    """Assert that the parts are the whole; returns what rank 0 sent in gathers."""
    options = {"dtype": torch.float32, "device": "cpu", **options}
    ways = KINDS[kind][sequence]
    module, problem = problem_of(kind, ways, rows, options)
    options.pop("device")
    order = columns_of_ranks(options, ranks.size)
    state, x, grads, ways = problem
    given = (state, x, [grad if order is None else grad[..., order] for grad in grads], ways)
    parts = ranks.run(programs.step, kind, recipe, {**options, "sequence": sequence}, given, how)
    whole = programs.run(module, recipe, x, grads, how[0])
    if order is not None:
        whole["output"] = whole["output"][..., order]
    summed = SUMMED.get(kind)
    bound = 4 * tol("layer", F32, 4 * max(rows, programs.FFN))
    if kind in ("attention", "layer"):  # gradients of scores cancel
        bound *= 16
    if recipe != "none":  # a sum in another order may be rounded to the code beside
        bound += 8 * tol("round", E5M2)
    # A rank has an amax of its own: of all that it has, or of a tile that is cut.
    split = programs.HIDDEN if kind == "row" else programs.FFN
    cut = recipe == "block" and split // ranks.size % programs.TILE != 0
    if cut or recipe in ("current", "nvfp4", "unshared"):
        bound += 8 * tol("round", E5M2) + (0.05 if recipe == "nvfp4" else 0.0)
    for name, theirs in whole.items():
        mine = joined(kind, ways, sequence, name, [found[name] for found, _ in parts], theirs)
        if "key_bias" in name:  # it is 0: a softmax does not see what all keys have in common
            continue
        by_sum = "bias" in name and (sequence or kind == "row")  # in another order
        by_sum = by_sum or (sequence and "norm" in name)
        exact = summed is not None and recipe in EXACT and ranks.device == "cpu" and not by_sum
        exact = exact and not cut
        if exact and name not in summed:
            assert torch.equal(mine, theirs), name
        else:
            assert_nmse(mine, theirs, bound, name)
    return parts[0][1]


NCCL = [group for group in GROUPS if group.values[0][0] == "cuda"]
four_too = pytest.mark.parametrize("ranks", FOUR_TOO, indirect=True)


@four_too
@pairs(kind=list(KINDS), recipe=list(programs.RECIPES), sequence=[False, True], rows=[512, 288])
def test_parts_are_the_whole(ranks, kind, recipe, sequence, rows):
    """288 rows are no tiles of each rank: values are gathered where tiles do not join."""
    sent = check(ranks, kind, recipe, sequence, {}, rows)
    if ranks.size == 1:
        return
    assert bool(sent) == sequence
    if sequence and recipe in FORMS and (rows == 512 or recipe in ("delayed", "current")):
        linear = [dtype for dtype, _ in sent]
        assert torch.float32 not in linear and FORMS[recipe] in linear


CASES = [
    ("column", {"bias": False}), ("column", {"parameters_split": {"a": 192, "b": 64}}),
    ("column", {"delay_wgrad_compute": True}), ("column", {"return_bias": True}),
    ("row", {"delay_wgrad_compute": True}), ("row", {"return_bias": True}),
    ("ln_column", {"normalization": "RMSNorm", "return_layernorm_output": True}),
    ("ln_column", {"return_layernorm_output": True, "return_layernorm_output_gathered": True}),
    ("ln_column", {"delay_wgrad_compute": True, "zero_centered_gamma": True}),
    ("mlp", {"activation": "swiglu", "normalization": "RMSNorm"}), ("mlp", {"checkpoint": True}),
    ("mlp", {"return_layernorm_output": True, "return_layernorm_output_gathered": True}),
    ("mlp", {"delay_wgrad_compute": True, "bias": False}),
    ("attention", {"fuse_qkv_params": True, "num_gqa_groups": 4, "input_layernorm": True}),
    ("attention", {"qk_norm_type": "RMSNorm", "bias": False}),
    ("layer", {"fuse_qkv_params": True, "activation": "swiglu", "num_gqa_groups": 4}),
    ("layer", {"apply_residual_connection_post_layernorm": True}),
    ("layer", {"parallel_attention_mlp": True}), ("layer", {"output_layernorm": True}),
    ("column", {"ub_overlap_ag": True}), ("row", {"ub_overlap_ag": True, "ub_overlap_rs": True}),
    ("ln_column", {"ub_overlap_ag": True}), ("mlp", {"ub_overlap_rs": True}),
    ("mlp", {"ub_overlap_ag": True, "checkpoint": True}), ("attention", {"ub_overlap_rs": True}),
    ("layer", {"ub_tp_comm_overlap": True, "activation": "swiglu"}),
]  # fmt: skip
HOW = [(False, False, False), (True, False, False), (False, True, False), (False, False, True)]
"""Weights are cast once a step, the group is given later, compiled."""


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("case", "recipe", "how"), [*in_turns(CASES, ["none", "delayed", "current", "block"], HOW)]
)
def test_options(ranks, case, recipe, sequence, how):
    check(ranks, case[0], recipe, sequence, case[1], 512, how)


LAYERS = {
    "attention": [{}, {"qk_norm_type": "RMSNorm"}, {"num_gqa_groups": 4}],
    "layer": [{}, {"ub_tp_comm_overlap": True}, {"qk_norm_type": "RMSNorm"}],
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_is_one_plan(ranks, kind):
    """One call into C in each direction, with the bits of its modules."""
    for options, recipe in itertools.product(LAYERS[kind], ["none", "delayed", "current", "block"]):
        given = {"dtype": torch.bfloat16, "sequence": True, **options}
        _, problem = problem_of(
            kind, KINDS[kind][True], 256 * ranks.size, {**given, "device": "cpu"}
        )
        state, x, grads, ways = problem
        problem = (state, x.bfloat16(), [grad.bfloat16() for grad in grads], ways)
        for joined_, apart in ranks.run(programs.joined_and_apart, kind, recipe, given, problem):
            assert joined_["calls"] == 2 * STEPS < apart["calls"]
            for name, tensor in apart["found"].items():
                assert torch.equal(joined_["found"][name], tensor), (options, recipe, name)


def stages_of_pieces(kind, rank, size):
    """Products and collectives of a forward, of a layer split by columns or by rows."""
    others = ["gemm_output"] * ((rank > 0) + (rank < size - 1))
    if kind == "column":
        return ["gather", "gemm_output", "gather_finish", *others]
    return [*others, "exchange", "gemm_output", "exchange_finish"]


@four_too
def test_gemms_in_pieces(ranks):
    """Beside collectives, where products are not multiplied out."""
    if ranks.size == 1:
        pytest.skip("one rank has all rows")
    for kind, recipe in itertools.product(("column", "row"), ["none", "delayed", "block", "mxfp8"]):
        for rank, (forward, backward, text) in enumerate(ranks.run(programs.stages, kind, recipe)):
            assert ("GEMMs run in one piece under MXFP8BlockScaling" in text) == (recipe == "mxfp8")
            if recipe == "mxfp8":
                assert forward.count("gemm_output") == backward.count("gemm_grad_input") == 1
                continue
            assert forward == stages_of_pieces(kind, rank, ranks.size)
            others = ["gemm_grad_input"] * ((rank > 0) + (rank < ranks.size - 1))
            if kind == "row":
                started, own, finished, *rest = backward
                assert started.startswith("gather") and finished == f"{started}_finish"
                assert own == "gemm_grad_input" and rest == others
            else:
                assert backward.count("gemm_grad_input") == 1


@four_too
@pairs(kind=["column", "row"], recipe=["none", "delayed", "current", "block"], tiles=[True, False])
def test_pieces_have_the_bits_of_one_piece(ranks, kind, recipe, tiles):
    """On two ranks a sum has one order; a GPU may multiply fewer rows in another one.

    Ranks have whole tiles of rows, or not.
    """
    rows = 128 * ranks.size if tiles else 144 * ranks.size
    ways, how = KINDS[kind][True], HOW[0]
    _, problem = problem_of(kind, ways, rows, {"dtype": torch.float32, "device": "cpu"})
    options = {"dtype": torch.float32, "sequence": True}
    bound = tol("layer", F32, rows) + (recipe != "none") * 8 * tol("round", E5M2)
    whole, cut = (
        ranks.run(programs.step, kind, recipe, options | asked, problem, how)
        for asked in ({}, {"ub_overlap_ag": True, "ub_overlap_rs": True})
    )
    for (theirs, _), (mine, _) in zip(whole, cut, strict=True):
        for name, tensor in mine.items():
            if ranks.device == "cpu" and (ranks.size <= 2 or kind == "column"):
                assert torch.equal(tensor, theirs[name]), name
            else:
                assert_nmse(tensor, theirs[name], bound, name)


def test_chosen_overlaps(ranks):
    """`initialize_ub` measures, or takes what it is told; modules that are made later follow it."""
    for found in ranks.run(programs.chosen_overlaps):
        assert found["before"] == ((True, False, True),) * 2
        told, measured = found["told"]
        assert told == ((True, False, True), (False, False, False))
        assert all(type(does) is bool for does in measured)
        assert found["initialized"] == [False, True, False]
        assert found["twice"].startswith("RuntimeError: initialize_ub: it was called before")
        assert found["method"].startswith("ValueError: initialize_ub: fc1_fprop: method='none'")
        assert found["cublasmp"].startswith("NotImplementedError: initialize_ub: with_cublasmp")
        assert found["size"].startswith("ValueError: initialize_ub: tp_size=")


@four_too
def test_bf16(ranks):
    """Outputs and gradients travel in the dtype of activations, and are rounded as they are."""
    options = {"dtype": torch.bfloat16, "device": "cpu"}
    for sequence in (False, True):
        module, problem = problem_of("mlp", KINDS["mlp"][sequence], 512, options)
        state, x, grads, ways = problem
        x, grads = x.bfloat16(), [grad.bfloat16() for grad in grads]
        given = (state, x, grads, ways)
        of_rank = {"dtype": torch.bfloat16, "sequence": sequence}
        parts = ranks.run(programs.step, "mlp", "delayed", of_rank, given, HOW[0])
        whole = programs.run(module, "delayed", x, grads)
        for name in ("output", "grad_input", "fc1_weight", "fc2_weight"):
            found = [part[name] for part, _ in parts]
            mine = joined("mlp", KINDS["mlp"][sequence], sequence, name, found, whole[name])
            assert mine.dtype == torch.bfloat16
            assert_nmse(mine, whole[name], 8 * tol("round", E5M2) + tol("layer", BF16, 1024), name)


@pairs(kind=["ln_column", "mlp", "layer"], recipe=list(programs.RECIPES), sequence=[False, True])
def test_ways_to_run(ranks, kind, recipe, sequence):
    """Whatever gradients are wanted, a call has the bits of one that makes all."""
    ways, options = KINDS[kind][sequence], {"dtype": torch.float32, "sequence": sequence}
    _, problem = problem_of(kind, ways, 256 * ranks.size, {"dtype": torch.float32, "device": "cpu"})
    for found in ranks.run(programs.ways_to_run, kind, recipe, options, problem):
        assert found == dict.fromkeys(found, [])


@four_too
def test_marks(ranks):
    """What frameworks read on parameters; a rank's shapes."""
    n = ranks.size
    common = {"dtype": torch.float32, "sequence": True}
    split = {"parameters_split": {"a": 192, "b": 64}, **common}
    hidden, ffn = programs.HIDDEN, programs.FFN
    for found in ranks.run(programs.marks, "column", split):
        for name, rows in split["parameters_split"].items():
            assert found[f"{name}_weight"] == ((rows // n, hidden), [True, 0, 1, None])
            assert found[f"{name}_bias"] == ((rows // n,), [True, 0, 1, None])
    for found in ranks.run(programs.marks, "row", common):
        assert found["weight"] == ((ffn, hidden // n), [True, 1, 1, None])
        assert found["bias"] == ((ffn,), [None, None, None, n > 1])
    for found in ranks.run(programs.marks, "mlp", {**common, "activation": "swiglu"}):
        assert found["fc1_weight"] == ((2 * ffn // n, hidden), [True, 0, 1, None])
        assert found["fc2_weight"] == ((hidden, ffn // n), [True, 1, 1, None])
        assert found["fc2_bias"] == ((hidden,), [None, None, None, n > 1])
        assert found["layer_norm_weight"] == ((hidden,), [None, None, None, n > 1])


@pytest.mark.parametrize("ranks", NCCL, indirect=True)
@pytest.mark.parametrize(
    ("way", "recipe"),
    [("step", "none"), ("step", "delayed"), ("callables", "none"), ("callables", "current")],
)
def test_graphs_with_collectives(ranks, way, recipe):
    """Replays are steps. Torch warms callables up on any gradients, so no amaxes are kept there."""
    data = [torch.randn(64, 4, programs.HIDDEN) for _ in range(4)]
    bound = tol("layer", BF16, 256) + (recipe != "none") * 8 * tol("round", E5M2)
    for eager, replayed in ranks.run(programs.replayed, recipe, way, data):
        for wanted, found in zip(eager, replayed, strict=True):
            for one, other in zip(found, wanted, strict=True):
                assert other.abs().max() > 0 or one.abs().max() == 0
                assert_nmse(one, other, bound)
        assert not torch.equal(replayed[0][0], replayed[1][0])


def test_attention_draws_from_a_tracker(ranks):
    """With sequence parallelism a program has entered its fork around the layer."""
    for found in ranks.run(programs.forks):
        assert found == [True, ranks.size == 1]


def test_a_layer_of_experts_exchanges_nothing(ranks):
    """Without a mode; what frameworks read is there all the same."""
    for marks in ranks.run(programs.unshared):
        assert marks == [True, 0, 1]


REFUSED = {
    "no group": "RuntimeError: Linear: tp_size={n}, and no tp_group: call set_tensor_parallel_gr",
    "no size": "ValueError: Linear: out_features=.* is no multiple of tp_size={n}",
    "split": "ValueError: Linear: parameters_split: b=.* is no multiple of tp_size={n}",
    "another size": "ValueError: Linear: tp_size=.*, and a tp_group of {n} ranks",
    "symmetric": "NotImplementedError: Linear: symmetric_ar_type='one_shot' over {n} ranks is not",
    "made for one": "ValueError: Linear: tp_group has {n} ranks, the module was made for 1",
    "no mode": "ValueError: MultiheadAttention: tp_size={n} with set_parallel_mode=False",
    "batch first": "ValueError: MultiheadAttention: sequence_parallel=True with qkv_format='bshd'",
    "groups": "ValueError: DotProductAttention: num_gqa_groups=1 is no multiple of tp_size={n}",
    "rows": "ValueError: ",
    "fp8_output": "NotImplementedError: Linear: fp8_output=True: a sum over {n} ranks",
    "fp8_grad": "NotImplementedError: Linear: fp8_grad=True: the gradient of a sum over {n} ranks",
}


@four_too
def test_refused(ranks):
    if ranks.size == 1:
        pytest.skip("one rank shares nothing")
    for found in ranks.run(programs.refusals):
        assert found.keys() == REFUSED.keys()
        for name, text in REFUSED.items():
            assert re.match(text.format(n=ranks.size), found[name]), found[name]
