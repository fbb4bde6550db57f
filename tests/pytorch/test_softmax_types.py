# SPDX-License-Identifier: Apache-2.0
"""Softmax off-by-one and learnable, and the largest scores, of every backend that has them."""

import copy

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from attention_reference import drop_factors, softmax
from comparators import assert_grad64, assert_nmse
from device_kinds import every_device, our_kernels
from pytorch import attention_model as model
from pytorch.helpers import assert_same_bits, same_draws
from tols import BF16, F16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.execution.random import draw_pair

pytestmark = every_device

BATCH, QUERIES, KEYS, HEADS, CHANNELS = 2, 7, 11, 4, 16
OURS = pytest.mark.parametrize("backend", ["native", "unfused"], indirect=True)
KINDS = pytest.mark.parametrize("kind", ["off-by-one", "learnable"])


def make(kind, groups=HEADS, device="cpu", **options):
    """A module on a device, with other offsets than 0, and what these are."""
    with torch.device(device):
        module = DotProductAttention(HEADS, CHANNELS, groups, softmax_type=kind, **options)
    if kind == "learnable":
        torch.nn.init.normal_(module.softmax_offset)
        return module, module.softmax_offset
    return module, torch.zeros(HEADS)


def scores_of(q, k, bias=0.0):
    """[batch, heads, queries, keys], of [b, h, s, d] tensors."""
    return CHANNELS**-0.5 * (q @ k.repeat_interleave(HEADS // k.shape[1], 1).mT) + bias


def share_of(sink, scores, may):
    """The probability of the sink [batch, heads, queries], not as 1 less those of the keys."""
    sink = sink[:, None, None].expand(*scores.shape[:3], 1)
    both = torch.cat([scores.masked_fill(~may, -torch.inf), sink], -1)
    return both.softmax(-1)[..., -1]


def check(module, sink, qkv, may, *, bias=0.0, factors=1.0, form="sbhd", **arguments):
    """Results and gradients of a call, that of the sink (None: there is none) too."""
    out = module(*qkv, **arguments)
    out, top = out if module.return_max_logit else (out, None)
    named = dict(zip("qkv", qkv, strict=True)) | ({} if sink is None else {"sink": sink})

    def joined(q, k, v, sink=None):
        q, k, v = (model.to_bhsd(t, form) for t in (q, k, v))
        made = model.attention(q, k, v, may, bias=bias, factors=factors, sink=sink)
        return model.joined(made, form)

    wide = {name: t.detach().cpu().double() for name, t in named.items()}
    bound = tol("attention", out.dtype, KEYS * QUERIES)
    assert_nmse(out, joined(**wide), bound)
    grad = torch.randn(out.shape).to(out)
    wanted = {name: t for name, t in named.items() if t.requires_grad}
    made = torch.autograd.grad(out, list(wanted.values()), grad)
    grads = dict(zip(wanted, made, strict=True))
    # The magnitudes of the terms of gradients that may cancel.
    q, k, v, do = (model.to_bhsd(t.cpu().double(), form) for t in (
        *(wide[name] for name in "qkv"), grad.unflatten(-1, (HEADS, CHANNELS))))  # fmt: skip
    scores = scores_of(q, k, bias)
    p = softmax(scores, may, wide.get("sink"))
    of_p = (do @ v.repeat_interleave(HEADS // v.shape[1], 1).mT).abs() * factors
    mean = (p * of_p).sum(-1, keepdim=True)
    of_scores = CHANNELS**-0.5 * p * (of_p + mean)
    of_k = (of_scores.mT @ q.abs()).unflatten(1, (k.shape[1], -1)).sum(2)
    of_q = of_scores @ k.abs().repeat_interleave(HEADS // k.shape[1], 1)
    order = (2, 0, 1, 3) if form == "sbhd" else (0, 2, 1, 3)
    terms = {"q": of_q.permute(order), "k": of_k.permute(order)}
    if sink is not None:
        terms["sink"] = (share_of(wide["sink"], scores, may) * mean[..., 0]).sum((0, 2))
    assert_grad64(grads, joined, named, grad, bound, terms)
    if top is not None:
        check_top(top, scores_of(q, k, bias).masked_fill(~may, -torch.inf), out.dtype)
    return out


def check_top(top, scores, dtype):
    """The unfused backend rounds its scores to the dtype."""
    exact = scores.amax((0, 2, 3))
    assert top.dtype is F32 and not top.requires_grad
    assert ((top.cpu() == -torch.inf) == (exact == -torch.inf)).all()
    some = exact > -torch.inf
    bound = tol("round", dtype) + tol("attention", F32, CHANNELS)
    assert_nmse(top.cpu()[some], exact[some], bound, "top", 1 + exact[some].abs())


# ---- values --------------------------------------------------------------------------------------


@OURS
@pytest.mark.parametrize("sizes", [(BATCH, 0, KEYS), (0, QUERIES, KEYS), (BATCH, QUERIES, 0)])
def test_a_sink_without_tokens_has_a_gradient_of_0(device, backend, sizes):
    module, sink = make("learnable", device=device, attn_mask_type="no_mask")
    dtype = F32 if device == "cpu" else BF16
    qkv = model.make_qkv("sbhd", (*sizes, HEADS, HEADS, CHANNELS, CHANNELS), dtype, device)
    out = module(*qkv)
    assert module._last_call.backend == backend and not out.any()
    grads = torch.autograd.grad(out, [*qkv, sink], torch.ones_like(out))
    for grad, tensor in zip(grads, [*qkv, sink], strict=True):
        assert grad.shape == tensor.shape and not grad.any()


@OURS
@KINDS
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_values_and_gradients(device, backend, kind, dtype, mask, groups):
    module, sink = make(kind, groups, device, attn_mask_type=mask, return_max_logit=True)
    sizes = (BATCH, QUERIES, KEYS, HEADS, groups, CHANNELS, CHANNELS)
    qkv = model.make_qkv("sbhd", sizes, dtype, device)
    diagonal = KEYS - QUERIES if mask == "causal_bottom_right" else 0
    window = (-1, -1) if mask == "no_mask" else (-1, 0)
    may = model.may_attend((BATCH, HEADS, QUERIES, KEYS), None, window, diagonal)
    check(module, sink, qkv, may)


@OURS
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize(("level", "length"), [(0.0, 512), (-12.0, 64), (6.0, 64)])
def test_gradient_of_small_offsets(device, backend, dtype, level, length):
    """Relative to the terms of this gradient, which a small offset has small ones of."""
    module, sink = make("learnable", HEADS, device, attn_mask_type="causal")
    torch.nn.init.constant_(sink, level)
    sizes = (1, length, length, HEADS, HEADS, CHANNELS, CHANNELS)
    qkv = model.make_qkv("sbhd", sizes, dtype, device)
    may = model.may_attend((1, HEADS, length, length), None, (-1, 0), 0)
    check(module, sink, qkv, may)


@OURS
@KINDS
def test_dropout_is_philox(device, backend, kind):
    """The gradient of the sink is that through the weights that are kept."""
    options = {"attn_mask_type": "no_mask", "attention_dropout": 0.4}
    module, sink = make(kind, HEADS, device, **options)
    sizes = (BATCH, QUERIES, KEYS, HEADS, HEADS, CHANNELS, CHANNELS)
    qkv = model.make_qkv("sbhd", sizes, F32, device)
    if device == "cuda" and backend == "native":
        pytest.skip("cuDNN draws its own numbers: see test_cudnn_softmax.py")
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    pair = draw_pair(qkv[0]).tolist()
    shape = (BATCH, HEADS, QUERIES, KEYS)
    factors, may = drop_factors(pair, shape, 0.4), model.may_attend(shape)
    torch.manual_seed(seed)
    check(module, sink, qkv, may, factors=factors)


@hypothesis.given(data=st.data())
def test_any_call(data):
    """Random masks, windows, biases, groups and lengths: both backends, against float64."""
    pick = lambda *values: data.draw(st.sampled_from(values))  # noqa: E731
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    kind, form = pick("off-by-one", "learnable", "vanilla"), pick("sbhd", "bshd")
    mask = pick("no_mask", "causal", "causal_bottom_right", "arbitrary", "padding_causal")
    groups, queries = pick(HEADS, 2, 1), pick(1, QUERIES, 20)
    keys = queries if mask == "padding_causal" else pick(1, queries, KEYS, 33)
    sizes, shape = (BATCH, queries, keys, HEADS, groups, CHANNELS, CHANNELS), {}
    shape = (BATCH, HEADS, queries, keys)
    given, window, diagonal, forbidden = {}, (-1, -1), 0, None
    if mask.startswith("causal") or mask == "padding_causal":
        window = (pick(-1, 3), 0)
        given["window_size"] = window
        diagonal = keys - queries if mask == "causal_bottom_right" else 0
    elif mask == "no_mask":
        diagonal = keys - queries  # of ALiBi
    if mask == "arbitrary":
        diagonal = keys - queries
        given["attention_mask"] = forbidden = torch.rand(shape) < 0.3
    if mask == "padding_causal":
        ends = [pick(0, 1, queries) for _ in range(BATCH)]
        given["cu_seqlens_q"] = torch.tensor([0, ends[0], sum(ends)], dtype=torch.int32)
        behind = torch.arange(queries) >= torch.tensor(ends)[:, None]
        forbidden = behind[:, None, :, None] | behind[:, None, None, :]
    bias = 0.0
    added = pick("no_bias", "alibi", "post_scale_bias")
    given["core_attention_bias_type"] = added
    if added == "alibi":
        slopes = torch.rand(pick((HEADS,), (BATCH, HEADS))) / 8
        given["alibi_slopes"] = slopes
        bias = -slopes.double().reshape(-1, HEADS, 1, 1) * model.distance(queries, keys, diagonal)
    elif added == "post_scale_bias":
        given["core_attention_bias"] = torch.randn(pick(1, BATCH), HEADS, pick(1, queries), keys)
        bias = given["core_attention_bias"].double()
    module, sink = make(kind, groups, qkv_format=form, attn_mask_type=mask, return_max_logit=True)
    may = model.may_attend(shape, forbidden, window, diagonal)
    qkv = model.make_qkv(form, sizes, F32, "cpu")

    used = None if kind == "vanilla" else sink
    check(module, used, qkv, may, bias=bias, form=form, **given)


def test_gradcheck_of_the_offset():
    """By differences, in fp32 of numbers that are exact enough for them."""
    module, offset = make("learnable", attn_mask_type="causal")
    sizes = (BATCH, QUERIES, QUERIES, HEADS, HEADS, CHANNELS, CHANNELS)
    qkv = [t.detach() for t in model.make_qkv("sbhd", sizes, F32, "cpu")]
    (grad,) = torch.autograd.grad(module(*qkv).sum(), offset)
    step = 2.0**-6
    for head in range(HEADS):
        sums = []
        for side in (-1, 1):
            with torch.no_grad():
                offset[head] += side * step
                sums.append(module(*qkv).double().sum())
                offset[head] -= side * step
        slope = (sums[1] - sums[0]) / (2 * step)
        # Of the differences' own error, a third of the square of the step, times all terms.
        assert_nmse(
            grad[head], slope, tol("ratio_floor", BF16) ** 2, f"head {head}", 1 + slope.abs()
        )


# ---- as a module ---------------------------------------------------------------------------------


def test_parameter_and_checkpoint(device):
    """It exists for "learnable" alone, in fp32 and at 0, under the name of the incumbent's."""
    for kind in ("vanilla", "off-by-one"):
        module, _ = make(kind, device=device)
        assert not module.state_dict() and not list(module.parameters())
    assert make("vanilla", device=device)[0].softmax_offset is None
    zeros = module.softmax_offset
    assert_same_bits([zeros.cpu()], [torch.zeros(HEADS)])
    assert not zeros.requires_grad and not isinstance(zeros, torch.nn.Parameter)
    with torch.device(device):
        module = DotProductAttention(HEADS, CHANNELS, softmax_type="learnable")
    assert list(module.state_dict()) == ["softmax_offset"]
    offset = module.softmax_offset
    assert offset.dtype is F32 and offset.shape == (HEADS,) and (offset == 0).all()
    assert offset.device.type == device and offset.requires_grad
    saved = {"softmax_offset": torch.randn(HEADS), "_extra_state": torch.zeros(0)}
    module.load_state_dict(saved)  # with the state of FP8 attention, which peers save
    assert_same_bits([module.softmax_offset.cpu()], [saved["softmax_offset"]])
    assert "softmax_type=learnable" in repr(module)


def test_on_the_meta_device():
    with torch.device("meta"):
        module = DotProductAttention(HEADS, CHANNELS, softmax_type="learnable")
    assert module.softmax_offset.is_meta
    module.reset_parameters()
    assert (module.softmax_offset == 0).all() and not module.softmax_offset.is_meta


def test_errors():
    with pytest.raises(ValueError, match="softmax_type='sink', expected one of vanilla"):
        DotProductAttention(HEADS, CHANNELS, softmax_type="sink")


@KINDS
def test_explained(kind):
    """Torch's attention has no such softmax, and keeps its scores to itself."""
    module, _ = make(kind)
    refused = te.explain_attention(module, (5, 2, HEADS, CHANNELS), device="cpu").refused
    assert refused["sdpa"].feature == f"softmax type {kind}"
    module = DotProductAttention(HEADS, CHANNELS, return_max_logit=True)
    refused = te.explain_attention(module, (5, 2, HEADS, CHANNELS), device="cpu").refused
    assert refused["sdpa"].feature == "return_max_logit"


def step(module, qkv, **arguments):
    """Results and gradients of a call."""
    out = module(*qkv, **arguments)
    out, *top = out if isinstance(out, tuple) else (out,)
    wanted = [*qkv, *module.parameters()]
    return [out, *top, *torch.autograd.grad(out.square().sum(), wanted)]


@our_kernels
@OURS
@KINDS
@pytest.mark.parametrize("returns", [False, True])
def test_compiled_equals_eager(device, backend, kind, returns):
    module, _ = make(kind, 2, device, return_max_logit=returns)
    sizes = (BATCH, KEYS, KEYS, HEADS, 2, CHANNELS, CHANNELS)
    qkv = model.make_qkv("sbhd", sizes, BF16, device)
    given = {"core_attention_bias_type": "alibi"}
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    made = []
    for call in (module, compiled):
        out = call(*qkv, **given)
        out, *top = out if returns else (out,)
        wanted = [*qkv, *module.parameters()]
        made.append([out, *top, *torch.autograd.grad(out.float().square().sum(), wanted)])
    assert len(made[0]) == 4 + returns + (kind == "learnable")
    assert_same_bits(*made)


@OURS
@KINDS
def test_recompute_gives_the_same_bits(device, backend, kind):
    module, _ = make(kind, 2, device, attention_dropout=0.2, return_max_logit=True)
    sizes = (BATCH, KEYS, KEYS, HEADS, 2, CHANNELS, CHANNELS)
    qkv = model.make_qkv("sbhd", sizes, BF16, device)
    made = []
    for recompute in (False, True):
        with same_draws(device):
            made.append(step(module, qkv, checkpoint_core_attention=recompute))
    assert_same_bits(*made)


def test_functional_gradients(device):
    module, offset = make("learnable", device=device)
    sizes = (BATCH, KEYS, KEYS, HEADS, HEADS, CHANNELS, CHANNELS)
    qkv = model.make_qkv("sbhd", sizes, BF16, device)

    def loss(parameters):
        return torch.func.functional_call(module, parameters, tuple(qkv)).float().square().sum()

    (expected,) = torch.autograd.grad(module(*qkv).float().square().sum(), offset)
    made = torch.func.grad(loss)({"softmax_offset": offset.detach()})["softmax_offset"]
    assert_same_bits([made], [expected])


def test_in_half_precision_and_copied(device):
    """A module that was cast computes with the rounded offsets in fp32."""
    module, _ = make("learnable", device=device)
    sizes = (BATCH, KEYS, KEYS, HEADS, HEADS, CHANNELS, CHANNELS)
    qkv = model.make_qkv("sbhd", sizes, BF16, device)
    rounded = copy.deepcopy(module)
    with torch.no_grad():
        rounded.softmax_offset.copy_(module.softmax_offset.to(BF16))
    expected = step(rounded, qkv)
    made = step(module.to(BF16), qkv)
    assert made[-1].dtype is BF16
    assert_same_bits(made, [*expected[:-1], expected[-1].to(BF16)])


def test_under_autocast(device):
    module, offset = make("learnable", device=device, return_max_logit=True)
    sizes = (BATCH, KEYS, KEYS, HEADS, HEADS, CHANNELS, CHANNELS)
    qkv = model.make_qkv("sbhd", sizes, F32, device)
    with torch.autocast(device, dtype=BF16):
        out, top = module(*qkv)
    assert out.dtype is BF16 and top.dtype is F32
    assert torch.autograd.grad(out.float().sum(), offset)[0].isfinite().all()


def test_slopes_keep_their_gradient(device):
    """The operator has none of them: another backend runs them, as a bias."""
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="causal")
    sizes = (BATCH, KEYS, KEYS, HEADS, HEADS, CHANNELS, CHANNELS)
    qkv = model.make_qkv("sbhd", sizes, F32, device)
    slopes = torch.rand(HEADS, device=device)
    plain = module(*qkv, core_attention_bias_type="alibi", alibi_slopes=slopes)
    slopes.requires_grad_()
    out = module(*qkv, core_attention_bias_type="alibi", alibi_slopes=slopes)
    assert_nmse(out, plain.detach().double(), 4 * tol("attention", F32, KEYS))
    assert module._last_call.backend == "unfused"
    (grads,) = torch.autograd.grad(out.square().sum(), slopes)
    assert (grads != 0).all()
