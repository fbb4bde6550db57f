# SPDX-License-Identifier: Apache-2.0
"""Attention whose scaled scores are capped: `softcap` of attention and layers, against float64."""

import copy
import inspect
import pickle

import attention_reference as reference
import pytest
import torch
from comparators import assert_grad64, assert_nmse, nmse
from pytorch import attention_model as model
from pytorch.fp8_attention_cases import RECIPES, attentions, module_of, run, tensors_of
from pytorch.helpers import assert_same_bits, same_draws
from tols import BF16, E4M3, F16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.fp8 import BLOCK

BATCH, QUERIES, KEYS, HEADS, GROUPS, CHANNELS = 2, 7, 11, 4, 2, 16
SIZES = (BATCH, QUERIES, KEYS, HEADS, GROUPS, CHANNELS, CHANNELS)
SCORES = BATCH, HEADS, QUERIES, KEYS
CAP = 0.7
SCALE = CHANNELS**-0.5
NO_MASK = {"attn_mask_type": "no_mask", "softcap": CAP}


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    """Bits are compared."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


def make(**options):
    return te.DotProductAttention(HEADS, CHANNELS, GROUPS, **NO_MASK | options)


def arbitrary(device):
    mask = torch.rand(BATCH, 1, QUERIES, KEYS) < 0.5  # not a tolerance
    may = model.may_attend(SCORES, mask)
    return {"attn_mask_type": "arbitrary"}, {"attention_mask": mask.to(device)}, may


def lengths(device):
    sums = [torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 3, 10], [0, 11, 12])]
    ends = [
        torch.arange(n)[None] >= torch.diff(s.cpu())[:, None]
        for n, s in zip((QUERIES, KEYS), sums, strict=True)
    ]
    mask = (ends[0][:, None, :, None] | ends[1][:, None, None]).expand(SCORES)
    given = {"cu_seqlens_q": sums[0], "cu_seqlens_kv": sums[1]}
    return {"attn_mask_type": "padding"}, given, model.may_attend(SCORES, mask)


def biased(kind):
    return lambda device: (
        {},
        {
            "core_attention_bias_type": kind,
            "core_attention_bias": torch.randn(1, HEADS, QUERIES, KEYS, device=device)
            .mul(1.0 if kind == "post_scale_bias" else 1.0 / SCALE)
            .requires_grad_(),
        },
        model.may_attend(SCORES),
    )


def sloped(device):
    del device
    options = {"bottom_right_diagonal": False}
    return options, {"core_attention_bias_type": "alibi"}, model.may_attend(SCORES)


CASES = {
    "plain": lambda d: ({}, {}, model.may_attend(SCORES)),
    "causal": lambda d: ({"attn_mask_type": "causal"}, {}, model.may_attend(SCORES, None, (-1, 0))),
    "window": lambda d: (
        {"window_size": (2, 3)}, {}, model.may_attend(SCORES, None, (2, 3), KEYS - QUERIES)
    ),
    "off by one": lambda d: ({"softmax_type": "off-by-one"}, {}, model.may_attend(SCORES)),
    "learnable": lambda d: ({"softmax_type": "learnable"}, {}, model.may_attend(SCORES)),
    "arbitrary": arbitrary,
    "lengths": lengths,
    "before the scale": biased("pre_scale_bias"),
    "behind the scale": biased("post_scale_bias"),
    "alibi": sloped,
}  # fmt: skip


def who_runs(device, dtype, case="plain"):
    """The kernels of cuDNN take no fp32, and give no gradient of a bias here."""
    apart = {"before the scale"} if device == "cpu" else {"before the scale", "behind the scale"}
    return "unfused" if case in apart or (device == "cuda" and dtype is F32) else "native"


def parts(q, k, v):
    """Queries, keys and values as [b, h, s, d], keys and values of each head."""
    q, k, v = (model.to_bhsd(t, "sbhd") for t in (q, k, v))
    return q, *(t.repeat_interleave(HEADS // GROUPS, 1) for t in (k, v))


def check(module, cap, qkv, may, given):
    """Output and all gradients of a call."""
    kind, bias = given.get("core_attention_bias_type"), given.get("core_attention_bias")
    named = dict(zip("qkv", qkv, strict=True))
    if bias is not None:
        named["bias"] = bias
    if module.softmax_offset is not None and module.softmax_offset.requires_grad:
        named["sink"] = module.softmax_offset
    fixed = torch.zeros(HEADS) if module.softmax_type == "off-by-one" else None
    slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625]).double()[:, None, None]
    before = kind == "pre_scale_bias"

    def capped(q, k, bias):
        scores = SCALE * (q @ k.mT + (bias if before else 0.0))
        return cap * torch.tanh(scores / cap)

    def probabilities(q, k, bias, sink):
        scores = capped(q, k, bias)
        if kind == "alibi":
            scores = scores - slopes * model.distance(QUERIES, KEYS, 0)
        scores = scores + (0.0 if before else bias)
        return reference.softmax(scores, may, fixed if sink is None else sink)

    def definition(q, k, v, bias=0.0, sink=None):
        q, k, v = parts(q, k, v)
        return model.joined(probabilities(q, k, bias, sink) @ v, "sbhd")

    out = module(*qkv, **given)
    wide = {n: t.detach().cpu().double() for n, t in named.items()}
    bound = tol("attention", out.dtype, KEYS * QUERIES)
    assert_nmse(out, definition(**wide), bound)
    grad = torch.randn(out.shape).to(out)
    found = torch.autograd.grad(out, list(named.values()), grad)
    # The magnitudes of the terms of gradients that cancel.
    q, k, v = parts(*(wide[n] for n in "qkv"))
    more = wide.get("bias", 0.0), wide.get("sink")
    slope = 1.0 - (capped(q, k, more[0]) / cap).square()
    p = probabilities(q, k, *more)
    of_out = model.to_bhsd(grad.cpu().double().unflatten(-1, (HEADS, CHANNELS)), "sbhd")
    of_p = (of_out @ v.mT).abs()
    inner = (p * of_p).sum(-1, keepdim=True)
    of_capped = p * (of_p + inner)
    of_scores = slope * of_capped
    of_keys = SCALE * (of_scores.mT @ q.abs()).unflatten(1, (GROUPS, -1)).sum(2)
    terms = {
        "q": (SCALE * of_scores @ k.abs()).permute(2, 0, 1, 3),
        "k": of_keys.permute(2, 0, 1, 3),
        "bias": (SCALE * of_scores if before else of_capped).sum(0, keepdim=True),
        "sink": inner.sum((0, 2, 3)),
    }
    grads = dict(zip(named, found, strict=True))
    assert_grad64(grads, definition, named, grad, bound, terms)
    return out


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("case", CASES)
def test_against_float64(device, case, dtype):
    options, given, may = CASES[case](device)
    module = make(**options).to(device)
    check(module, CAP, model.make_qkv("sbhd", SIZES, dtype, device), may, given)
    assert module._last_call.backend == who_runs(device, dtype, case)


@pytest.mark.parametrize("cap", [0.05, 3.0, 50.0])
def test_caps_of_calls(device, cap):
    """That of a call counts before that of the module."""
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    check(make(softcap=7.0), cap, qkv, model.may_attend(SCORES), {"softcap": cap})


@pytest.mark.parametrize("autocast", [False, True])
def test_scores_beyond_the_dtype(device, autocast):
    """The product is in fp32: scores that fp16 does not have are capped, not infinite."""
    qkv = model.make_qkv("sbhd", SIZES, F16, device)
    qkv[:2] = [(400.0 * t.detach()).requires_grad_() for t in qkv[:2]]
    q, k, v = parts(*(t.detach().cpu().double() for t in qkv))
    scores = SCALE * (q @ k.mT)
    assert scores.abs().max() > torch.finfo(F16).max
    with torch.autocast(device, dtype=F16, enabled=autocast):
        out = make()(*qkv)
    p = reference.softmax(CAP * torch.tanh(scores / CAP), model.may_attend(SCORES))
    assert_nmse(out, model.joined(p @ v, "sbhd"), tol("attention", F16, KEYS * QUERIES))
    grads = torch.autograd.grad(out, qkv, torch.randn_like(out))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("cap", [2.0**-126, 1e-30, 1e30, 2.0**100, 1.01 * 2.0**100, 3.4e38])
def test_extreme_caps(device, cap):
    """Small ones make all scores alike, large ones leave them as they are."""
    qkv = model.make_qkv("sbhd", SIZES, BF16, device)
    module = make(softcap=cap)
    out, *grads = step(module, qkv)
    # cuDNN refuses a cap whose quotients it would flush to 0.
    beyond = device == "cuda" and cap > 2.0**100
    assert module._last_call.backend == ("unfused" if beyond else "native")
    q, k, v = parts(*(t.detach().cpu().double() for t in qkv))
    p = reference.softmax(cap * torch.tanh(SCALE * (q @ k.mT) / cap), model.may_attend(SCORES))
    bound = tol("attention", BF16, KEYS * QUERIES)
    assert_nmse(out, model.joined(p @ v, "sbhd"), bound)
    if cap < 1.0:
        assert not grads[0].any() and not grads[1].any()
        return
    _, *others = step(make(softcap=0.0), qkv)
    for found, expected in zip(grads, others, strict=True):
        assert_nmse(found, expected, 2 * bound)


def step(module, qkv, **given):
    out = module(*qkv, **given)
    grad = torch.ones_like(out).cumsum(0)
    return [out.detach(), *torch.autograd.grad(out, qkv, grad)]


def test_0_is_none(device):
    """Of the module and of a call: what runs then, and its bits."""
    qkv, plain = model.make_qkv("sbhd", SIZES, F32, device), make(softcap=0.0)
    expected = step(plain, qkv)
    ran = plain._last_call.backend
    assert ran == ("native" if device == "cpu" else "unfused")
    for module, given in ((make(softcap=0), {}), (make(), {"softcap": 0.0})):
        for _ in range(3):
            assert_same_bits(step(module, qkv, **given), expected)
        assert module._last_call.backend == ran


def test_calls_in_turn(device):
    """A call with a cap is not taken for one without that has been kept, and the other way."""
    qkv, module = model.make_qkv("sbhd", SIZES, F32, device), make(softcap=0.0)
    plain, capped, more = (step(make(softcap=cap), qkv) for cap in (0.0, CAP, 0.3))
    for _ in range(4):
        assert_same_bits(step(module, qkv), plain)
        assert_same_bits(step(module, qkv, softcap=CAP), capped)
        assert_same_bits(step(module, qkv, softcap=0.3), more)
    module.softcap = CAP
    assert_same_bits(step(module, qkv), capped)
    assert not torch.equal(plain[0], capped[0]) and not torch.equal(capped[0], more[0])


def softcap(graph, score, tensors):
    return CAP * torch.tanh(score / CAP)


def test_dropout(device):
    """The draws and the result of the same cap by `score_mod`."""
    qkv, found = model.make_qkv("sbhd", SIZES, F32, device), []
    for cap, given in ((CAP, {}), (0.0, {"score_mod": softcap})):
        with same_draws(device):
            found.append(step(make(attention_dropout=0.4, softcap=cap), qkv, **given))
    for x, y in zip(*found, strict=True):
        assert_nmse(x, y, 2 * tol("attention", F32, KEYS * QUERIES))


def test_score_mod_gets_capped_scores(device):
    qkv, seen = model.make_qkv("sbhd", SIZES, F32, device), []

    def note(graph, score, tensors):
        seen.append(score.detach().cpu())
        return score + 1.0

    make()(*qkv, score_mod=note)
    q, k, _ = parts(*(t.detach().cpu().double() for t in qkv))
    exact = CAP * torch.tanh(SCALE * (q @ k.mT) / CAP)
    terms = SCALE * (q.abs() @ k.abs().mT)
    assert_nmse(seen[0], exact, tol("sum", F32, CHANNELS), terms=terms)


@pytest.mark.parametrize("case", CASES)
def test_recompute_gives_the_same_bits(device, case):
    options, given, _ = CASES[case](device)
    module = make(**options).to(device)
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    expected = step(module, qkv, **given)
    assert_same_bits(step(module, qkv, checkpoint_core_attention=True, **given), expected)


def test_packed_sequences(device):
    """Each sequence has the result that it has alone."""
    module = make(qkv_format="thd", attn_mask_type="padding_causal")
    sums = torch.tensor([0, 5, 5, 6, 15], dtype=torch.int32, device=device)
    qkv = [torch.randn(15, n, CHANNELS, device=device) for n in (HEADS, GROUPS, GROUPS)]
    out, alone = module(*qkv, cu_seqlens_q=sums, max_seqlen_q=9), make(attn_mask_type="causal")
    for begin, end in ((0, 5), (5, 6), (6, 15)):
        expected = alone(*(t[begin:end, None] for t in qkv))[:, 0]
        assert_nmse(out[begin:end], expected, 2 * tol("attention", F32, 81))


def test_largest_score(device):
    """It is that of the capped scores, with the bias behind the scale."""
    _, given, _ = biased("post_scale_bias")(device)
    qkv = model.make_qkv("sbhd", SIZES, F32, device)
    q, k, _ = parts(*(t.detach().cpu().double() for t in qkv))
    capped = CAP * torch.tanh(SCALE * (q @ k.mT) / CAP)
    _, top = make(return_max_logit=True)(*qkv)
    assert_nmse(top, capped.amax((0, 2, 3)), tol("attention", F32, KEYS))
    _, top = make(return_max_logit=True)(*qkv, **given)
    exact = capped + given["core_attention_bias"].detach().cpu().double()
    assert_nmse(top, exact.amax((0, 2, 3)), tol("attention", F32, KEYS))
    _, given, _ = biased("pre_scale_bias")(device)
    _, top = make(return_max_logit=True)(*qkv, **given)
    assert bool((top <= CAP).all())


@pytest.mark.parametrize("sizes", [(0, 5, 1), (5, 0, 1), (4, 4, 0), (1, 1, 1)])
def test_few_tokens(device, sizes):
    queries, keys, batch = sizes
    qkv = model.make_qkv("sbhd", (batch, queries, keys, *SIZES[3:]), F32, device)
    out, *grads = step(make(), qkv)
    assert out.shape == (queries, batch, HEADS * CHANNELS)
    for tensor, grad in zip(qkv, grads, strict=True):
        assert grad.shape == tensor.shape
    if keys == 0:
        assert not out.any()


def test_compiled(device):
    module, qkv = make(), model.make_qkv("sbhd", SIZES, F32, device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for given in ({}, {"softcap": 0.3}, {"softcap": 0.0}):
        for x, y in zip(step(compiled, qkv, **given), step(module, qkv, **given), strict=True):
            assert_nmse(x, y, 2 * tol("attention", F32, KEYS * QUERIES))


def test_functional_gradients_and_export(device):
    module, qkv = make(), model.make_qkv("sbhd", SIZES, F32, device)
    inputs = tuple(t.detach() for t in qkv)
    bound = 2 * tol("attention", F32, KEYS * QUERIES)

    def loss(*qkv):
        return module(*qkv).square().sum()

    expected = torch.autograd.grad(loss(*qkv), qkv)
    found = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    for x, y in zip(found, expected, strict=True):
        assert_nmse(x, y, bound)
    program = torch.export.export(module, inputs).module()
    assert_nmse(program(*inputs), module(*inputs), bound)


def test_copies(device):
    module, qkv = make(), model.make_qkv("sbhd", SIZES, F32, device)
    expected = step(module, qkv)
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert made.softcap == CAP and f"softcap={CAP}" in repr(made)
        assert_same_bits(step(made, qkv), expected)
    assert "softcap" not in repr(make(softcap=0.0))


def test_who_runs_it(device, monkeypatch):
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO")  # a reason of its own
    shape, module = (QUERIES, BATCH, HEADS, CHANNELS), make(softcap=0.0)
    for asked in (module, {"softcap": CAP}), (make(), {}):
        found = te.explain_attention(asked[0], shape, device=device, dtype=BF16, **asked[1])
        assert found.backend == "native" and found.refused["sdpa"].feature == "softcap"
    uncapped = te.explain_attention(make(), shape, device=device, dtype=BF16, softcap=0.0)
    assert all(refusal.feature != "softcap" for refusal in uncapped.refused.values())
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    qkv = model.make_qkv("sbhd", SIZES, BF16, device)
    _, given, _ = biased("pre_scale_bias")(device)
    given["core_attention_bias"] = given["core_attention_bias"].detach()
    with pytest.raises(ValueError, match="no backend is left .*softcap of scores with a pre_scale"):
        make()(*qkv, **given)


@pytest.mark.parametrize(
    "cap",
    [-1.0, float("nan"), float("inf"), "30", True, torch.tensor(30.0), 1e-60, 3.5e38, 10**400],
    ids=lambda cap: str(cap)[:8],
)
def test_what_is_no_cap(device, cap):
    """Nor is what fp32 has not: 1e-60 would be 0 there, and so no cap."""
    with pytest.raises(ValueError, match="softcap=.*expected a finite number of at least 0"):
        make(softcap=cap)
    module, qkv = make(), model.make_qkv("sbhd", SIZES, F32, device)
    with pytest.raises(ValueError, match="softcap=.*expected a finite number of at least 0"):
        module(*qkv, softcap=cap)


# ---- what runs -----------------------------------------------------------------------------------


def test_one_operator_each_way(device, counters):
    module, qkv = make(), model.make_qkv("sbhd", SIZES, BF16, device)
    for _ in range(3):
        step(module, qkv)
    assert attentions() == {"attention.bf16": 3, "attention_backward.bf16": 3}


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("sizes", [{}, {"channels": 128, "groups": HEADS, "queries": BLOCK}])
def test_in_fp8(device, kind, sizes, counters, monkeypatch):
    """In the CPU's kernels of FP8, its gradients too where it has some; once scales are found."""
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    module = module_of(**{n: sizes[n] for n in sizes if n != "queries"}, **NO_MASK)
    tensors, recipe = tensors_of(device, **sizes), RECIPES[kind](fp8_dpa=True)
    if device == "cuda":
        with pytest.raises(ValueError, match=r"softcap in FP8: the kernel of cuDNN"):
            run(module, tensors, recipe)
        return
    with torch.no_grad():
        tensors[0].mul_(4.0)
    for _ in range(2):
        te.reset_counters()
        found = run(module, tensors, recipe)
    of_backward = "e4m3" if kind == "delayed" and sizes else "bf16"
    assert attentions() == {"attention.e4m3": 1, f"attention_backward.{of_backward}": 1}
    out = module(*tensors)
    exact = [out.detach(), *torch.autograd.grad(out, tensors, torch.ones_like(out))]
    for i, (x, expected) in enumerate(zip(found, exact, strict=True)):
        terms = 5 if i == 0 else 16  # gradients of queries and keys cancel
        assert_nmse(x, expected, terms * tol("quantize", E4M3), f"result {i}")
    module.softcap = 0.0
    assert nmse(module(*tensors), out) > 100 * tol("quantize", E4M3)


# ---- layers --------------------------------------------------------------------------------------

PLACES = {
    te.DotProductAttention: ("bottom_right_diagonal", "bottom_right_diagonal"),
    te.MultiheadAttention: ("bottom_right_diagonal", "thd_attention_policy_dispatch"),
    te.TransformerLayer: ("bottom_right_diagonal", "thd_attention_policy_dispatch"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_place_among_the_arguments(kind):
    """As of NVIDIA Transformer Engine 2.20: programs give arguments by position."""
    for function, default, before in zip(
        (kind.__init__, kind.forward), (0.0, None), PLACES[kind], strict=True
    ):
        parameters = inspect.signature(function).parameters
        names = list(parameters)
        assert names[names.index(before) + 1] == "softcap"
        assert parameters["softcap"].default == default
    names = list(inspect.signature(te.DotProductAttention.forward).parameters)
    assert names[names.index("softcap") + 1] == "checkpoint_core_attention"
    for name in ("MultiheadAttention", "TransformerLayer"):
        assert list(inspect.signature(getattr(te, name).forward).parameters)[-1] == "softcap"


LAYERS = {
    "attention": lambda **o: te.MultiheadAttention(64, HEADS, attention_dropout=0.0, **o),
    "encoder": lambda **o: te.TransformerLayer(
        64, 128, HEADS, hidden_dropout=0.0, attention_dropout=0.0, **o
    ),
    "decoder": lambda **o: te.TransformerLayer(
        64, 128, HEADS, hidden_dropout=0.0, attention_dropout=0.0, layer_type="decoder", **o
    ),
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(device, kind, dtype):
    """By constructor, call and setting of each attention the same bits; others without a cap."""
    plain = LAYERS[kind](params_dtype=dtype, device=device)
    capped = LAYERS[kind](params_dtype=dtype, device=device, softcap=CAP)
    capped.load_state_dict(plain.state_dict())
    cores = [m for m in capped.modules() if isinstance(m, te.DotProductAttention)]
    assert [core.softcap for core in cores] == [CAP] * (2 if kind == "decoder" else 1)
    with torch.no_grad():  # scores that a cap changes
        for p in (*plain.parameters(), *capped.parameters()):
            p.mul_(4.0 if p.dim() == 2 else 1.0)
    x = torch.randn(6, 2, 64).to(device, dtype).requires_grad_()
    source = torch.randn(6, 2, 64).to(device, dtype)
    named = {"encoder_output": source} if kind == "decoder" else {}

    def outcome(layer, **given):
        out = layer(x, **named, **given)
        grads = torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])
        return [out.detach(), *grads]

    expected, without = outcome(capped), outcome(plain)
    assert all(core._last_call.backend == who_runs(device, dtype) for core in cores)
    assert not torch.equal(expected[0], without[0])
    for _ in range(3):
        assert_same_bits(outcome(plain), without)
        assert_same_bits(outcome(plain, softcap=CAP), expected)
        assert_same_bits(outcome(capped, softcap=0.0), without)
        assert_same_bits(outcome(capped), expected)
    for core in plain.modules():
        if isinstance(core, te.DotProductAttention):
            core.softcap = CAP
    assert_same_bits(outcome(plain), expected)
    hooked = copy.deepcopy(capped)
    for core in hooked.modules():
        core.register_forward_hook(lambda *_: None)
    assert_same_bits(outcome(hooked), expected)
