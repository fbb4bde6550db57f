# SPDX-License-Identifier: Apache-2.0
"""Attention over ranks is attention: against float64, and a2a against one rank, bit for bit."""

import pytest
import torch
from comparators import assert_bits, assert_nmse
from pytorch import attention_model as model, context_parallel_programs as programs
from pytorch.ranks import FOUR, Ranks
from thinning import pairs
from tols import E4M3, tol

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch.attention.context_parallel import get_thd_partitioned_indices

HEADS, BATCH, LENGTH = 4, 2, 16  # LENGTH of the sequences that are not packed
LENGTHS = [9, 24, 0, 16]  # of packed ones
ROOM = [16, 24, 0, 24]  # of these with their padding, multiples of 8: two chunks of four ranks


@pytest.fixture(scope="module", params=[2, 4])
def gloo(request):
    """Processes on the CPU, whatever else is there."""
    group = Ranks("cpu", request.param)
    yield group
    group.close()


@pytest.fixture(scope="module", params=FOUR)
def four(request):
    group = Ranks(*request.param)
    yield group
    group.close()


def dtype_of(ranks):
    """CuDNN takes no fp32."""
    return torch.float32 if ranks.device == "cpu" else torch.bfloat16


def make_problem(form, dtype, groups=HEADS, channels=(16, 8), more=()):
    """Tensors of all ranks by name, in a format."""
    lead = {"sbhd": (LENGTH, BATCH), "bshd": (BATCH, LENGTH), "thd": (sum(ROOM),)}[form]
    k, v = channels
    made = {name: torch.randn(*lead, n, c).to(dtype)
            for name, n, c in (("q", HEADS, k), ("k", groups, k), ("v", groups, v))}  # fmt: skip
    made["grad"] = torch.randn(*lead, HEADS * v).to(dtype)
    made["padded"] = made["cu"] = None
    if form == "thd":
        made["cu"], made["padded"] = (
            torch.tensor([0, *torch.tensor(each).cumsum(0)], dtype=torch.int32)
            for each in (LENGTHS, ROOM)
        )
    if "bias" in more:
        made["bias"] = torch.randn(1, HEADS, LENGTH, LENGTH).to(dtype)
    if "sink" in more:
        made["sink"] = torch.randn(HEADS)
    return made


def call_of(problem):
    """Arguments of a forward that say where sequences are."""
    if problem["padded"] is None:
        return {}
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    cu, padded = problem["cu"], problem["padded"]
    made = dict(zip(names, (cu, cu, padded, padded), strict=True))
    return {**made, "max_seqlen_q": max(ROOM), "max_seqlen_kv": max(ROOM)}


def options_of(form, mask, problem, **more):
    """Of the module."""
    channels = problem["q"].shape[-1], problem["v"].shape[-1]
    made = {"num_attention_heads": HEADS, "kv_channels": channels, "qkv_format": form}
    made |= {"num_gqa_groups": problem["k"].shape[-2], "attn_mask_type": mask}
    return {**made, **more}


def sequences(form, problem):
    """Where each sequence is: (batch entry or None, tokens)."""
    if form != "thd":
        return [(b, slice(None)) for b in range(BATCH)]
    firsts = problem["padded"][:-1].tolist()
    return [(None, slice(f, f + n)) for f, n in zip(firsts, LENGTHS, strict=True)]


def at(tensor, form, place):
    """The tokens of a sequence [tokens, ...]."""
    b, tokens = place
    return tensor[tokens] if b is None else tensor[:, b] if form == "sbhd" else tensor[b]


def reference(form, problem, window):
    """Exact output and gradients by name, and magnitudes of the terms of those that cancel."""
    wide = {name: t.double().requires_grad_() for name, t in problem.items()
            if name in ("q", "k", "v", "bias", "sink")}  # fmt: skip
    out = torch.zeros(problem["grad"].shape, dtype=torch.float64)
    terms = {name: torch.zeros_like(wide[name]) for name in wide if name in "qk"}
    top = torch.full((HEADS,), -torch.inf, dtype=torch.float64)
    for place in sequences(form, problem):
        heads = [at(wide[name], form, place).transpose(0, 1)[None] for name in "qkv"]
        grad = at(problem["grad"].double(), form, place).unflatten(-1, (HEADS, -1))
        length = heads[0].shape[2]
        if length == 0:
            continue
        may = model.may_attend((1, HEADS, length, length), None, window)
        added = {} if "bias" not in wide else {"bias": wide["bias"]}
        made = model.attention(*heads, may, **added, sink=wide.get("sink"))
        at(out, form, place).copy_(made[0].transpose(0, 1).flatten(-2))
        found = model.gradient_terms(*heads, may, grad.transpose(0, 1)[None],
                                     **{n: t.detach() for n, t in added.items()})  # fmt: skip
        for name, each in zip("qk", found, strict=False):
            at(terms[name], form, place).copy_(each[0].transpose(0, 1).detach())
        scores = heads[0] @ heads[1].repeat_interleave(HEADS // heads[1].shape[1], 1).mT
        scores = scores * heads[0].shape[-1] ** -0.5 + added.get("bias", 0.0)
        top = torch.maximum(top, scores.masked_fill(~may, -torch.inf).amax((0, 2, 3)).detach())
    out.backward(problem["grad"].double())
    return {"out": out.detach(), "top": top, **{n: t.grad for n, t in wide.items()}}, terms


def whole(parts, form, problem, name):
    """A result of all ranks, put together."""
    if name in ("sink", "top"):
        for each in parts[1:]:
            assert_bits(each[name], parts[0][name])
        return parts[0][name]
    if name == "bias":
        made = torch.empty_like(problem["bias"])
        for rank, each in enumerate(parts):
            for chunk, rows in zip((rank, 2 * len(parts) - 1 - rank), each[name].chunk(2, 2),
                                   strict=True):  # fmt: skip
                made.chunk(2 * len(parts), 2)[chunk].copy_(rows)
        return made
    made = torch.full((problem["grad"] if name == "out" else problem[name]).shape, torch.nan)
    for rank, each in enumerate(parts):
        if form == "thd":
            tokens = get_thd_partitioned_indices(
                problem["padded"], sum(ROOM), len(parts), rank
            ).long()
            made[tokens] = each[name].float()
            continue
        chunks = made.chunk(2 * len(parts), form.index("s"))
        for chunk, rows in zip(
            (rank, -1 - rank), each[name].chunk(2, form.index("s")), strict=True
        ):
            chunks[chunk].copy_(rows)
    return made


def check(ranks, way, form, mask, problem, window=(-1, -1), **more):
    """Run a call over ranks, and hold it to float64; return the results by rank."""
    options = options_of(form, mask, problem, **more)
    parts = ranks.run(programs.attend, way, options, call_of(problem), problem)
    right = 0 if mask == "causal" else window[1]
    exact, terms = reference(form, problem, (window[0], right))
    bound = tol("attention_steps", problem["q"].dtype, max(problem["q"].shape[-1], LENGTH))
    for name in parts[0]:
        found = whole(parts, form, problem, name)
        assert_nmse(found, exact[name], bound, f"{way} {name}", terms.get(name))
        if form == "thd":
            gaps = exact["out"].eq(0).all(-1)
            assert name in ("sink", "top") or bool((found[gaps] == 0).all())
    return parts


WAYS = ["p2p", "all_gather", "a2a"]


@pairs(
    way=WAYS, form=["sbhd", "bshd", "thd"], mask=["causal", "no_mask"], groups=[4, 2],
    channels=[(8, 8), (16, 8)],
)  # fmt: skip
def test_against_float64(ranks, way, form, mask, groups, channels):
    """Outputs and gradients of shards are those of whole sequences, padding of packed ones too."""
    problem = make_problem(form, dtype_of(ranks), groups, channels)
    parts = check(ranks, way, form, mask, problem)
    if way == "a2a" and ranks.device == "cpu":
        module = te.DotProductAttention(**options_of(form, mask, problem))
        heads = [problem[name].clone().requires_grad_() for name in "qkv"]
        out = module(*heads, **call_of(problem))
        out.backward(problem["grad"])
        for name, each in zip(("out", "q", "k", "v"), (out, *(t.grad for t in heads)), strict=True):
            assert_bits(whole(parts, form, problem, name), each.detach())


@pytest.mark.parametrize("form", ["sbhd", "thd"])
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("way", [*WAYS, "a2a+p2p"])
def test_four_ranks(four, way, form, mask):
    check(four, way, form, mask, make_problem(form, dtype_of(four)))


@pytest.mark.parametrize("way", WAYS)
def test_bf16(ranks, way):
    """What steps round adds one rounding: outputs and gradients are added in fp32."""
    check(ranks, way, "bshd", "causal", make_problem("bshd", torch.bfloat16))


@pytest.mark.parametrize("form", ["bshd", "thd"])
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("way", ["p2p", "all_gather"])
def test_bf16_of_four(four, way, mask, form):
    """Sums of more than two steps, which are in fp32 on their way."""
    check(four, way, form, mask, make_problem(form, torch.bfloat16))


def test_window_of_four(four):
    """Steps that attend to a part of a chunk of another rank, in bf16."""
    problem = make_problem("bshd", torch.bfloat16)
    check(four, "all_gather", "bshd", "no_mask", problem, (3, 6), window_size=(3, 6))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_bias(ranks, way, mask):
    check(ranks, way, "sbhd", mask, make_problem("sbhd", dtype_of(ranks), more=("bias",)))


@pytest.mark.parametrize("way", ["a2a", "a2a+p2p"])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_bias_of_four(four, way, heads):
    """Each rank has the rows of its queries; a bias that heads share has the sum of gradients."""
    problem = make_problem("bshd", torch.float32, more=("bias",))
    problem["bias"] = problem["bias"][:, :heads]
    check(four, way, "bshd", "causal", problem)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["bshd", "thd"])
def test_learnable_softmax(ranks, way, form):
    """Each query has the term without a key once; its gradient is that of all ranks' tokens."""
    problem = make_problem(form, dtype_of(ranks), more=("sink",))
    check(ranks, way, form, "causal", problem, softmax_type="learnable")


def test_learnable_softmax_of_four(four):
    problem = make_problem("sbhd", dtype_of(four), more=("sink",))
    check(four, "a2a+p2p", "sbhd", "causal", problem, softmax_type="learnable")


@pytest.mark.parametrize("way", ["all_gather", "a2a"])
@pytest.mark.parametrize(
    ("form", "mask", "window"),
    [("sbhd", "causal", (5, 0)), ("bshd", "no_mask", (3, 6)), ("thd", "causal", (5, 0))],
)
def test_window(ranks, way, form, mask, window):
    problem = make_problem(form, dtype_of(ranks))
    check(ranks, way, form, mask, problem, window, window_size=window)


@pytest.mark.parametrize("way", [*WAYS, "a2a+p2p"])
def test_largest_score(four, way):
    if way != "a2a" and four.device == "cuda":
        pytest.skip("steps on a GPU do not say it")
    problem = make_problem("bshd", dtype_of(four))
    check(four, way, "bshd", "causal", problem, return_max_logit=True)


@pytest.mark.parametrize("way", WAYS)
def test_dropout(ranks, way):
    """Steps of a backward drop what those of the forward did, also in a recompute."""
    problem = make_problem("bshd", dtype_of(ranks), channels=(8, 8))
    for first, *others in ranks.run(programs.dropped, way, problem):
        zeros = float((first["out"] == 0).float().mean())
        assert zeros < 0.5, "a rank attended to nothing"
        for other in others if ranks.device == "cpu" else ():
            for name, each in first.items():
                assert_bits(other[name], each)


@pytest.mark.parametrize("form", ["bshd", "thd"])
@pytest.mark.parametrize("causal", [True, False])
def test_ring_in_float64(gloo, causal, form):
    """The schedule and the merge by themselves, without roundings of the operators."""
    problem = {name: t.double() if name in ("q", "k", "v", "grad") else t
               for name, t in make_problem(form, torch.float32).items()}  # fmt: skip
    parts = gloo.run(programs.ring_in_float64, form, causal, problem)
    exact, _ = reference(form, problem, (-1, 0 if causal else -1))
    bound = tol("attention_steps", torch.float64)
    for name in parts[0]:
        for rank, each in enumerate(parts):
            expected = programs_part(exact[name], form, problem, gloo.size, rank)
            assert torch.allclose(each[name], expected, rtol=0, atol=bound), f"{name} {rank}"


def programs_part(tensor, form, problem, size, rank):
    """What a rank of so many has of a tensor."""
    if form == "thd":
        tokens = get_thd_partitioned_indices(problem["padded"], sum(ROOM), size, rank)
        return tensor[tokens.long()]
    chunks = tensor.chunk(2 * size, form.index("s"))
    return torch.cat((chunks[rank], chunks[-1 - rank]), form.index("s"))


def check_fp8(ranks, way, kind, mask, form="sbhd"):
    """Each shard is as near as attention in FP8 on one rank is: a rounding of each operand.

    Magnitudes differ from rank to rank, so that scales of one rank are none of another.
    """
    made = RECIPES[kind](fp8_dpa=True)
    problem = make_problem(form, torch.bfloat16, 4, (16, 16))
    for name in "kv":
        factors = torch.logspace(-1, 1, problem[name].shape[0], 2.0, dtype=torch.bfloat16)
        problem[name] *= factors[(..., *(None,) * (problem[name].dim() - 1))]
    options = options_of(form, mask, problem)
    exact, _ = reference(form, problem, (-1, 0 if mask == "causal" else -1))
    parts = ranks.run(programs.attend, way, options, call_of(problem), problem, made)
    for rank, found in enumerate(parts):
        for name in ("out", "q", "k", "v"):
            expected = programs_part(exact[name], form, problem, len(parts), rank)
            terms = 5 if name == "out" else 16  # gradients of queries and keys cancel
            bound = terms * tol("quantize", E4M3)
            assert_nmse(found[name], expected, bound, f"rank {rank} {name}")
    return problem, options, parts, made


def test_compiled(ranks):
    """Attention over ranks runs between two graphs, with the same bits; one graph alone says so."""
    if ranks.size == 1:
        pytest.skip("one rank has a graph")
    for same, said in ranks.run(programs.compiled, make_problem("bshd", dtype_of(ranks))):
        assert same
        assert "Unsupported" in said


def test_steps_of_delayed_scaling(ranks):
    """A ring records the amaxes of what it casts, and the next region casts with their scales."""
    if ranks.size == 1:
        pytest.skip("one rank has no ring")
    problem = make_problem("bshd", torch.bfloat16, 4, (16, 16))
    for rank, (amax, scales) in enumerate(ranks.run(programs.delayed, problem)):
        own = [programs_part(problem[n], "bshd", None, ranks.size, rank) for n in "qkv"]
        largest = max(float(t.abs().max()) for t in own)
        assert amax == largest
        assert scales == [1.0, float(torch.tensor(448.0) / torch.tensor(largest))]


RECIPES = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling}


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("way", WAYS)
def test_fp8(ranks, way, mask, kind):
    problem, options, parts, made = check_fp8(ranks, way, kind, mask)
    if way == "a2a" and ranks.device == "cpu" and kind == "delayed":
        module = te.DotProductAttention(**options)
        heads = [problem[name].clone().requires_grad_() for name in "qkv"]
        with te.autocast(recipe=made):
            out = module(*heads)
        assert_bits(whole(parts, "sbhd", problem, "out").bfloat16(), out.detach())


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("way", ["p2p", "all_gather", "a2a+p2p"])
def test_fp8_of_four(four, way, kind):
    check_fp8(four, way, kind, "causal")


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("way", WAYS)
def test_fp8_of_packed_sequences(gloo, way, mask, kind):
    """No kernel of a GPU runs these."""
    check_fp8(gloo, way, kind, mask, "thd")


@pytest.mark.parametrize("kind", ["MultiheadAttention", "TransformerLayer"])
@pytest.mark.parametrize("way", WAYS)
def test_layers(ranks, way, kind):
    """Layers with rotary positions; what ranks' parameters get adds up to the gradient."""
    options = {"hidden_size": 32, "num_attention_heads": HEADS, "attention_dropout": 0.0}
    options["params_dtype"] = dtype = dtype_of(ranks)
    if kind == "TransformerLayer":
        options |= {"ffn_hidden_size": 64, "hidden_dropout": 0.0}
    else:
        options |= {"attn_mask_type": "causal"}
    module = getattr(te, kind)(**options, device="cpu")
    x = torch.randn(LENGTH, BATCH, 32, dtype=dtype, requires_grad=True)
    grad, angles = torch.randn_like(x), te.RotaryPositionEmbedding(8).cpu()(LENGTH)
    out = module(x, rotary_pos_emb=angles)
    out.backward(grad)
    state = module.state_dict()
    parts = ranks.run(programs.layer, kind, way, options, state, x.detach(), grad, angles)
    bound = 2 * tol("layer", dtype, 64)  # both sides err
    for rank, (mine, of_input, _) in enumerate(parts):
        for found, expected in ((mine, out.detach()), (of_input, x.grad)):
            part = programs_part(expected, "sbhd", None, len(parts), rank)
            assert_nmse(found, part, bound)
    for name, parameter in module.named_parameters():
        total = sum(of_parameters[name].double() for *_, of_parameters in parts)
        assert_nmse(total, parameter.grad, bound, name)
