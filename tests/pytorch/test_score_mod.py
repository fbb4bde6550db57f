# SPDX-License-Identifier: Apache-2.0
"""score_mod: functions of a program that change attention scores, against float64."""

import pytest
import torch
from attention_reference import softmax
from comparators import assert_grad64, assert_nmse
from pytorch import attention_model as model
from pytorch.helpers import assert_same_bits
from tols import BF16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.attention.scores import ScoreGraph

BATCH, QUERIES, KEYS, HEADS, GROUPS, CHANNELS = 2, 7, 11, 4, 2, 16
CAP = 0.7
SIZES = (BATCH, QUERIES, KEYS, HEADS, GROUPS, CHANNELS, CHANNELS)


def softcap(graph, score, tensors):
    small = graph.tanh(input=graph.div(a=score, b=tensors["cap"], compute_data_type=None))
    return graph.mul(small, tensors["cap"], name="capped")


def far(graph, score, tensors):
    """Less for keys that are far from the query, more for two heads: by indices."""
    distance = graph.sub(graph.gen_index(score, 3), graph.gen_index(score, axis=2))
    lowered = graph.sub(score, graph.mul(graph.abs(distance), 0.25))
    is_late = graph.cmp_ge(input=graph.gen_index(score, 1), comparison=2)
    return graph.binary_select(input0=graph.add(lowered, 1.0), input1=lowered, mask=is_late)


def by_torch(graph, score, tensors):
    del graph, tensors
    return torch.where(score > 0, score, 0.3 * score)


class Softcap:
    """With a gradient of its own, which reads what the forward has left."""

    def forward(self, graph, score, tensors):
        self.before = graph.div(score, tensors["cap"])
        return graph.mul(graph.tanh(self.before), tensors["cap"])

    def backward(self, graph, grad, tensors):
        of_tanh = graph.mul(grad, tensors["cap"])
        return graph.div(graph.tanh_backward(loss=of_tanh, input=self.before), tensors["cap"])


def exact(name):
    """The function of scores in float64."""
    if name in ("softcap", "own gradient"):
        return lambda score: CAP * torch.tanh(score / CAP)
    if name == "far":
        key, query = torch.arange(KEYS), torch.arange(QUERIES)[:, None]
        late = (torch.arange(HEADS) >= 2).double()[:, None, None]
        return lambda score: score - 0.25 * (key - query).abs() + late
    return lambda score: torch.where(score > 0, score, 0.3 * score)


def arguments(name, device):
    cap = {"cap": torch.tensor(CAP, device=device)}
    if name == "own gradient":
        own = Softcap()
        return {
            "score_mod": own.forward,
            "score_mod_bprop": own.backward,
            "score_mod_tensors": cap,
            "score_mod_bprop_tensors": cap,
        }
    function = {"softcap": softcap, "far": far, "by torch": by_torch}[name]
    return {"score_mod": function, "score_mod_tensors": cap}


def check(module, name, qkv, may, **more):
    """Output and gradients of a call; the first."""
    function, out = exact(name), module(*qkv, **arguments(name, qkv[0].device), **more)
    named = dict(zip("qkv", qkv, strict=True))

    def parts(q, k, v):
        q, k, v = (model.to_bhsd(t, "sbhd") for t in (q, k, v))
        each = HEADS // k.shape[1]
        return q, *(t.repeat_interleave(each, 1) for t in (k, v))

    def definition(q, k, v):
        q, k, v = parts(q, k, v)
        scores = function(CHANNELS**-0.5 * (q @ k.mT))
        return model.joined(softmax(scores, may) @ v, "sbhd")

    wide = {n: t.detach().cpu().double() for n, t in named.items()}
    bound = tol("attention", out.dtype, KEYS * QUERIES)
    assert_nmse(out, definition(**wide), bound)
    grad = torch.randn(out.shape).to(out)
    grads = dict(zip("qkv", torch.autograd.grad(out, qkv, grad), strict=True))
    # The magnitudes of the terms of the gradients of queries and keys, which cancel.
    q, k, v = parts(**wide)
    scores = (CHANNELS**-0.5 * (q @ k.mT)).requires_grad_()
    (slope,) = torch.autograd.grad(function(scores).sum(), scores)
    p = softmax(function(scores.detach()), may)
    of_out = model.to_bhsd(grad.cpu().double().unflatten(-1, (HEADS, CHANNELS)), "sbhd")
    of_p = (of_out @ v.mT).abs()
    of_scores = CHANNELS**-0.5 * slope.abs() * p * (of_p + (p * of_p).sum(-1, keepdim=True))
    of_keys = (of_scores.mT @ q.abs()).unflatten(1, (GROUPS, -1)).sum(2)
    terms = {"q": of_scores @ k.abs(), "k": of_keys}
    terms = {n: t.permute(2, 0, 1, 3) for n, t in terms.items()}
    assert_grad64(grads, definition, named, grad, bound, terms)
    return out


NAMES = pytest.mark.parametrize("name", ["softcap", "far", "own gradient"])


@NAMES
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_against_float64(device, name, dtype, mask):
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type=mask)
    qkv = model.make_qkv("sbhd", SIZES, dtype, device)
    window = (-1, 0) if mask == "causal" else (-1, -1)
    check(module, name, qkv, model.may_attend((BATCH, HEADS, QUERIES, KEYS), None, window))


def test_computed_by_torch(device):
    """The function need not use the graph. It has a kink at 0, so the scores are exact here."""
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="no_mask")
    qkv = [
        torch.randint(-3, 4, t.shape, device=device).to(F32).requires_grad_()
        for t in model.make_qkv("sbhd", SIZES, F32, device)
    ]
    check(module, "by torch", qkv, model.may_attend((BATCH, HEADS, QUERIES, KEYS)))


def test_with_lengths_and_recompute(device):
    """The bits of a call without a checkpoint, of scores with a padding mask besides."""
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="padding")
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    sums = [torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 3, 10], [0, 11, 12])]
    lengths = {"cu_seqlens_q": sums[0], "cu_seqlens_kv": sums[1]}
    q_mask, k_mask = (
        torch.arange(n)[None] >= torch.diff(s.cpu())[:, None]
        for n, s in zip((QUERIES, KEYS), sums, strict=True)
    )
    mask = (q_mask[:, None, :, None] | k_mask[:, None, None]).expand(BATCH, HEADS, -1, -1)
    may = model.may_attend((BATCH, HEADS, QUERIES, KEYS), mask)
    out = check(module, "softcap", qkv, may, **lengths)
    given = {**arguments("softcap", device), **lengths}
    again = module(*qkv, checkpoint_core_attention=True, **given)
    assert_same_bits(out.detach(), again.detach())
    grad = torch.randn_like(out)
    grads = [torch.autograd.grad(each, qkv, grad) for each in (module(*qkv, **given), again)]
    for x, y in zip(*grads, strict=True):
        assert_same_bits(x, y)


@pytest.mark.parametrize(("dtype_of_qkv", "autocast"), [(BF16, False), (BF16, True), (F32, True)])
def test_scores_are_not_rounded(device, dtype_of_qkv, autocast):
    """The product arrives in fp32, of operands of 16 bits too: a function may magnify it."""
    module, seen = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="no_mask"), []
    qkv = model.make_qkv("sbhd", SIZES, dtype_of_qkv, device)

    def note(graph, score, tensors):
        seen.append(score.detach().cpu())
        return score

    with torch.autocast(device, dtype=BF16, enabled=autocast):
        module(*qkv, score_mod=note)
    q, k = (model.to_bhsd(t.detach().cpu().double(), "sbhd") for t in qkv[:2])
    k = k.repeat_interleave(HEADS // GROUPS, 1)
    assert seen[0].dtype is F32
    terms = CHANNELS**-0.5 * (q.abs() @ k.abs().mT)
    assert_nmse(seen[0], CHANNELS**-0.5 * (q @ k.mT), tol("sum", F32, CHANNELS), terms=terms)


def test_tensors_have_gradients(device):
    """Those of score_mod_tensors, where autograd computes them."""
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="no_mask")
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    bias = torch.randn(1, HEADS, QUERIES, KEYS).to(device).requires_grad_()
    given = {"score_mod": lambda g, s, t: g.add(s, t["bias"]), "score_mod_tensors": {"bias": bias}}
    out = module(*qkv, **given)
    same = module(*qkv, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    bound = tol("attention", F32, KEYS * QUERIES)
    assert_nmse(out, same, bound)
    grad = torch.randn_like(out)
    found, expected = (torch.autograd.grad(each, bias, grad)[0] for each in (out, same))
    q, k, v = (model.to_bhsd(t.detach().cpu().double(), "sbhd") for t in qkv)
    of_out = model.to_bhsd(grad.cpu().double().unflatten(-1, (HEADS, CHANNELS)), "sbhd")
    may, wide = model.may_attend((BATCH, HEADS, QUERIES, KEYS)), bias.detach().cpu().double()
    terms = model.score_gradients(q, k, v, may, of_out, bias=wide)[1].sum(0, keepdim=True)
    assert_nmse(found, expected.cpu(), 2 * bound, terms=terms)


def test_packed_sequences(device):
    """Each sequence has the result that it has alone."""
    module = DotProductAttention(
        HEADS, CHANNELS, GROUPS, qkv_format="thd", attn_mask_type="padding_causal"
    )
    lengths = [5, 0, 1, 9]
    sums = torch.tensor([0, 5, 5, 6, 15], dtype=torch.int32, device=device)
    qkv = [torch.randn(15, n, CHANNELS, device=device) for n in (HEADS, GROUPS, GROUPS)]
    given = arguments("far", device)
    out = module(*qkv, cu_seqlens_q=sums, max_seqlen_q=9, **given)
    alone = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="causal")
    for begin, length in zip(sums.tolist()[:-1], lengths, strict=True):
        part = [t[begin : begin + length, None] for t in qkv]
        expected = alone(*part, **given)[:, 0]
        assert_nmse(out[begin : begin + length], expected, 2 * tol("attention", F32, 81))


def test_compiled(device):
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="no_mask")
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    given = arguments("softcap", device)
    compiled = torch.compile(lambda *qkv: module(*qkv, **given), fullgraph=True, backend="eager")
    out, made = module(*qkv, **given), compiled(*qkv)
    assert_nmse(made, out, 2 * tol("attention", F32, KEYS * QUERIES))


def test_who_runs_it(device):
    module = DotProductAttention(HEADS, CHANNELS, GROUPS)
    shape = QUERIES, BATCH, HEADS, CHANNELS
    found = te.explain_attention(module, shape, device=device, score_mod=softcap)
    assert found.backend == "unfused"
    assert str(found.refused["native"]).startswith("score_mod")
    with te.autocast(recipe=DelayedScaling(fp8_dpa=True)):
        found = te.explain_attention(module, shape, device=device, score_mod=softcap)
    assert found.backend is None


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"score_mod": 3}, TypeError, "score_mod: int"),
        ({"score_mod_bprop": max}, ValueError, "score_mod_bprop without score_mod"),
        ({"score_mod_tensors": {}}, ValueError, "score_mod_tensors without score_mod"),
        ({"score_mod": far, "score_mod_tensors": 3}, TypeError, "expected a dict"),
        (
            {"score_mod": far, "score_mod_bprop_tensors": {}},
            ValueError,
            "score_mod_bprop_tensors without score_mod_bprop",
        ),
        (
            {"score_mod": far, "core_attention_bias_type": "pre_scale_bias"},
            ValueError,
            "scaled already",
        ),
        ({"score_mod": lambda g, s, t: s[0]}, ValueError, "score_mod gave"),
        ({"score_mod": lambda g, s, t: g.conv(s)}, NotImplementedError, r"graph\.conv"),
        ({"score_mod": lambda g, s, t: g.add(s)}, TypeError, "arguments are"),
    ],
)
def test_mistakes(device, given, error, match):
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="no_mask")
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    if "core_attention_bias_type" in given:
        given = {**given, "core_attention_bias": torch.zeros(1, 1, QUERIES, KEYS, device=device)}
    with pytest.raises(error, match=match):
        module(*qkv, **given)


def test_a_gradient_of_another_shape(device):
    module = DotProductAttention(HEADS, CHANNELS, GROUPS, attn_mask_type="no_mask")
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    out = module(*qkv, score_mod=by_torch, score_mod_bprop=lambda graph, grad, tensors: grad[0])
    with pytest.raises(ValueError, match="score_mod_bprop gave"):
        out.sum().backward()


ONE = {
    "abs": abs, "neg": lambda x: -x, "identity": lambda x: x, "relu": torch.relu,
    "ceil": torch.ceil, "floor": torch.floor, "exp": torch.exp, "sin": torch.sin, "cos": torch.cos,
    "tan": torch.tan, "erf": torch.erf, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
    "reciprocal": lambda x: 1 / x, "softplus": torch.nn.functional.softplus,
    "elu": torch.nn.functional.elu, "gelu": torch.nn.functional.gelu,
    "swish": lambda x: x * torch.sigmoid(x),
}  # fmt: skip
TWO = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b, "add_square": lambda a, b: a + b * b, "bias": lambda a, b: a + b,
    "scale": lambda a, b: a * b, "max": torch.maximum, "min": torch.minimum,
    "mod": torch.fmod, "cmp_eq": lambda a, b: a == b, "cmp_neq": lambda a, b: a != b,
    "cmp_gt": lambda a, b: a > b, "cmp_ge": lambda a, b: a >= b, "cmp_lt": lambda a, b: a < b,
    "cmp_le": lambda a, b: a <= b, "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "relu_backward": lambda dy, x: dy * (x > 0),
    "tanh_backward": lambda dy, x: dy * (1 - torch.tanh(x) ** 2),
    "sigmoid_backward": lambda dy, x: dy * torch.sigmoid(x) * (1 - torch.sigmoid(x)),
}  # fmt: skip


def test_operations_of_the_graph():
    """Every one is what its name says."""
    graph, a, b = ScoreGraph(), torch.randn(5, 7), torch.randn(5, 7)
    positive = a.abs() + 0.5
    for name, function in ONE.items():
        torch.testing.assert_close(getattr(graph, name)(a), function(a))
    for name, function in TWO.items():
        torch.testing.assert_close(getattr(graph, name)(a, b), function(a, b))
    for name, function in {"log": torch.log, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt}.items():
        torch.testing.assert_close(getattr(graph, name)(input=positive), function(positive))
    torch.testing.assert_close(graph.pow(positive, b), positive**b)
    assert torch.equal(graph.logical_not(a > 0), a <= 0)
    assert torch.equal(graph.max(a, 0.0), torch.relu(a))
    assert graph.gen_index(a, 0)[:, 3].tolist() == [0, 1, 2, 3, 4]
    known = {n for n in vars(ScoreGraph) if not n.startswith("_")}
    tested = {*ONE, *TWO, "log", "sqrt", "rsqrt", "pow", "logical_not", "gen_index"}
    assert known == tested | {"binary_select"}
