# SPDX-License-Identifier: Apache-2.0
"""DotProductAttention: outputs and gradients of every backend, biases, dropout, packed inputs."""

import math

import pytest
import torch
from attention_reference import drop_factors
from comparators import assert_grad64, assert_nmse
from device_kinds import every_device, our_kernels
from pytorch import attention_model as model
from pytorch.helpers import assert_same_bits, same_draws
from thinning import pairs_first
from tols import BF16, F16, F32, tol
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine import _core
from transformer_engine.common.config import AttentionSwitches
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.attention.backends import (
    BIAS_TYPES,
    CallKind,
    choose_backend,
)
from transformer_engine.pytorch.attention.masks import mask_type
from transformer_engine.pytorch.attention.scores import scaled_softmax
from transformer_engine.pytorch.execution.random import draw_pair

pytestmark = every_device

BATCH, QUERIES, KEYS, HEADS, CHANNELS = 2, 7, 11, 4, 16
DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
FORMS = pytest.mark.parametrize("form", ["sbhd", "bshd"])
OURS = pytest.mark.parametrize("backend", ["native", "unfused"], indirect=True)


def sizes(queries=QUERIES, keys=KEYS, groups=HEADS, channels=(CHANNELS, CHANNELS)):
    return (BATCH, queries, keys, HEADS, groups, *channels)


def ran():
    """Backend of what ran since the counters began: one operator of ours each, or none."""
    names = {name.rpartition(".")[2] for name in _core.counters()}
    return "native" if "attention" in names else "unfused" if "softmax" in names else "sdpa"


def check(module, qkv, may, *, form, dtype, bias=None, options=None, **arguments):
    """Output and gradients of a call against the definition.

    `options`: those of the definition (`model.attention`); its bias is `bias_factor` times the
    tensor `bias` where that is given.
    """
    options = dict(options or {})
    bias_factor = options.pop("bias_factor", 1.0)
    out = module(*qkv, core_attention_bias=bias, **arguments)
    named = dict(zip("qkv", qkv, strict=True))
    if bias is not None:
        named["bias"] = bias

    def definition(q, k, v, bias=None):
        q, k, v = (model.to_bhsd(t, form) for t in (q, k, v))
        added = {} if bias is None else {"bias": bias_factor * bias}
        return model.joined(model.attention(q, k, v, may, **options, **added), form)

    wide = {name: t.detach().cpu().double() for name, t in named.items()}
    bound = tol("attention", dtype, KEYS)
    assert out.dtype == dtype and out.is_contiguous()
    assert_nmse(out, definition(**wide), bound)
    grad = torch.randn(out.shape).to(out)
    grads = dict(zip(named, torch.autograd.grad(out, named.values(), grad), strict=True))
    # Of scores' gradients p (dp - sum(p dp)) the terms are rounded, and they cancel: wholly where
    # a query sees one key, by any amount where it sees few.
    of_output = grad.cpu().double().unflatten(-1, (module.num_attention_heads, -1))
    heads = [model.to_bhsd(t, form) for t in (*(wide[n] for n in "qkv"), of_output)]
    added = {} if bias is None else {"bias": bias_factor * wide["bias"]}
    *terms, of_scores = model.gradient_terms(*heads[:3], may, heads[3], **options, **added)
    terms = dict(zip("qk", terms, strict=True))
    if bias is not None:
        terms["bias"] = bias_factor * of_scores.sum_to_size(bias.shape)
    assert_grad64(grads, definition, named, grad, bound, terms)
    return out


# ---- backends ------------------------------------------------------------------------------------


@DTYPES
@FORMS
@pytest.mark.parametrize("groups", [HEADS, 2, 1])
@pytest.mark.parametrize("mask", ["no_mask", "causal"])
@pytest.mark.parametrize("square", [True, False])
def test_values_and_gradients(device, backend, dtype, form, groups, mask, square):
    queries, keys = (KEYS, KEYS) if square else (QUERIES, KEYS)
    module = DotProductAttention(
        HEADS, CHANNELS, groups, qkv_format=form, attn_mask_type=mask, softmax_scale=0.3
    )
    qkv = model.make_qkv(form, sizes(queries, keys, groups), dtype, device)
    window = (-1, 0) if mask == "causal" else (-1, -1)
    may = model.may_attend((BATCH, HEADS, queries, keys), window=window)
    _core.reset_counters()
    check(
        module,
        qkv,
        may,
        form=form,
        dtype=dtype,
        options={"scale": 0.3},
    )
    if backend == "native" and device == "cuda" and dtype == F32:
        backend = "sdpa"
    lacks = backend == "sdpa" and groups != HEADS and dtype == F32
    assert ran() == ("unfused" if lacks else backend)


@FORMS
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
def test_values_of_other_width(device, backend, form, mask):
    module = DotProductAttention(HEADS, (16, 24), qkv_format=form, attn_mask_type=mask)
    qkv = model.make_qkv(form, sizes(channels=(16, 24)), F32, device)
    window = (-1, -1) if mask == "no_mask" else (-1, 0)
    diagonal = KEYS - QUERIES if mask == "causal_bottom_right" else 0
    may = model.may_attend((BATCH, HEADS, QUERIES, KEYS), window=window, diagonal=diagonal)
    out = check(module, qkv, may, form=form, dtype=F32)
    assert out.shape[2] == HEADS * 24


def choose(mask, window=(-1, -1), square=True, bias="no_bias", grouped=False, dtype=BF16, **other):
    kind = mask_type(mask)
    bottom_right = kind.bottom_right is not False
    on, of = other.pop("on", (True, True, True)), other.pop("device", "cuda")
    problem = kind, window, bottom_right, square, bias, grouped, dtype, of, AttentionSwitches(*on)
    other = {"channels": (64, 64), "capability": 90, "cudnn": 91900, **other}
    return choose_backend(CallKind(*problem, **other))


@pytest.mark.parametrize("mask", ["no_mask", "padding_causal", "arbitrary", "causal_bottom_right"])
@pytest.mark.parametrize("bias", BIAS_TYPES)
def test_what_cudnn_takes_runs_natively(mask, bias):
    problem = {"window": (3, 2), "square": False, "bias": bias, "grouped": True}
    assert choose(mask, **problem) == ("native", {})
    for changed, word in (
        ({"dtype": F32}, "fp32"),
        ({"channels": (64, 60)}, "(64, 60) channels"),
        ({"channels": (264, 64)}, "(264, 64) channels"),
        ({"capability": 80}, "compute capability 8.0"),
        ({"cudnn": 91800}, "cuDNN 91800: expected at least 91900"),
        ({"cudnn_lacks": "the gradient of something"}, "gradient of something"),
        ({"on": (True, False, True)}, "NVTE_FUSED_ATTN"),
    ):
        refused = choose(mask, **{**problem, **changed})
        assert refused.backend == "unfused" and word in str(refused.reasons["native"])


def test_choice_and_reasons():
    other = {"on": (True, False, True)}
    for taken in (
        choose("no_mask", **other),
        choose("no_mask", square=False, **other),
        choose("causal", (-1, 0), **other),
        choose("causal", (-1, 0), square=False, **other),
        choose("causal_bottom_right", (-1, 0), **other),
        choose("no_mask", grouped=True, **other),
        choose("no_mask", dtype=F32),
        choose("no_mask", capability=80),
    ):
        assert taken.backend == "sdpa" and set(taken.reasons) == {"native"}
    for refused, word in (
        (choose("padding", **other), "padding"),
        (choose("arbitrary", **other), "arbitrary"),
        (choose("causal", (3, 0), **other), "window"),
        (choose("no_mask", (2, 2), **other), "window"),
        (choose("no_mask", bias="alibi", **other), "alibi"),
        (choose("causal_bottom_right", (-1, 0), square=False, **other), "top left"),
        (choose("no_mask", grouped=True, dtype=F32), "fp32"),
        (choose("no_mask", on=(True, False, True, False)), "not repeatable"),
    ):
        assert refused.backend == "unfused" and word in str(refused.reasons["sdpa"])


def test_the_cpu_runs_everything_natively():
    options = ("padding", (2, 2)), ("padding_causal_bottom_right", (3, 0)), ("arbitrary", (-1, -1))
    for mask, window in options:
        for bias in BIAS_TYPES:
            problem = (mask, window, False, bias, True, F32)
            assert choose(*problem, device="cpu") == ("native", {})
            without_fused = choose(*problem, device="cpu", on=(True, False, True))
            assert without_fused.backend == "unfused"
            assert str(without_fused.reasons["native"]) == "switched off by NVTE_FUSED_ATTN"


def backend_of(module, qkv):
    """Run the module, and say by the counters which backend it was."""
    _core.reset_counters()
    module(*qkv)
    return ran()


@pytest.mark.parametrize(
    ("flash", "fused", "unfused", "expected"),
    [
        ("1", "1", "1", "native"),
        ("1", "0", "0", "sdpa"),
        ("0", "1", "0", "native"),
        ("0", "0", "1", "unfused"),
        ("1", "0", "1", "sdpa"),
    ],
)
def test_switches_choose_at_each_call(device, flash, fused, unfused, expected, monkeypatch):
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="no_mask")
    qkv = model.make_qkv("sbhd", sizes(), BF16, device)
    assert backend_of(module, qkv) == "native"
    for name, value in (("FLASH", flash), ("FUSED", fused), ("UNFUSED", unfused)):
        monkeypatch.setenv(f"NVTE_{name}_ATTN", value)
    assert backend_of(module, qkv) == expected
    monkeypatch.undo()
    assert backend_of(module, qkv) == "native"


def test_switches_that_leave_no_backend(device, monkeypatch):
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="no_mask")
    qkv = model.make_qkv("sbhd", sizes(), BF16, device)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    mask = torch.zeros(BATCH, 1, 1, KEYS, dtype=torch.bool, device=device)
    pair = (mask[..., :QUERIES], mask)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    with pytest.raises(ValueError, match=r"mask type padding.*NVTE_UNFUSED_ATTN"):
        module(*qkv, pair, attn_mask_type="padding")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    names = "NVTE_FLASH_ATTN and NVTE_FUSED_ATTN.*NVTE_UNFUSED_ATTN"
    with pytest.raises(ValueError, match=names):
        module(*qkv)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    assert backend_of(module, qkv) == "unfused"


# ---- what the library's operator neither copies nor makes ----------------------------------------


class Operators(TorchDispatchMode):
    """Names of torch's operators that make or move data, and the largest result of any."""

    def __init__(self):
        super().__init__()
        self.made, self.largest = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in results if isinstance(results, tuple | list) else (results,):
            if isinstance(tensor, torch.Tensor) and not function.is_view:
                self.made.add(function.__name__.partition(".")[0])
                self.largest = max(self.largest, tensor.numel())
        return results


@FORMS
@pytest.mark.parametrize("kind", ["causal", "causal_bottom_right", "padding_causal_bottom_right"])
def test_formats_are_read_by_strides_and_limits_as_numbers(form, kind):
    """Of views of a packed projection nothing is copied; no tensor has the size of the scores."""
    length = 64
    lead = (length, BATCH) if form == "sbhd" else (BATCH, length)
    packed = torch.randn(*lead, HEADS, 3, 4, requires_grad=True)
    qkv = packed.unbind(-2)
    module = DotProductAttention(HEADS, 4, qkv_format=form, attn_mask_type=kind, window_size=(9, 0))
    ends = [torch.tensor([0, 50, 50 + n], dtype=torch.int32) for n in (20, 60)]
    lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), ends, strict=True))
    log = Operators()
    with log:
        out = module(*qkv, **lengths)
        grads = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert log.made <= {"run", "ones_like", "sub"}
    assert log.largest <= packed.numel() < BATCH * HEADS * length * length
    assert all(grad.is_contiguous() for grad in grads)


@pytest.mark.parametrize(("lengths", "wrong"), [((4, KEYS + 1), KEYS + 1), ((-1, 3), -1)])
def test_lengths_beyond_the_sequence_are_refused(lengths, wrong):
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="padding")
    qkv = model.make_qkv("sbhd", sizes(KEYS), F32, "cpu")
    ends = torch.tensor((0, *lengths)).cumsum(0).int()
    with pytest.raises(ValueError, match=f"query_lengths: {wrong} of.* 0 to {KEYS}"):
        module(*qkv, cu_seqlens_q=ends)


# ---- views that begin anywhere -------------------------------------------------------------------


def unaligned(shape, where, device):
    """A view whose lines, or whose memory, begin at an odd element."""
    if where == "lines":
        return torch.randn(*shape[:-1], shape[-1] + 3, device=device, dtype=F16)[..., 1:-2]
    return torch.randn(1 + math.prod(shape), device=device, dtype=F16)[1:].view(shape)


# Each tensor is copied by itself, by its own address and strides, before a backend is called.
@pytest.mark.parametrize(
    ("backend", "which", "way", "where"),
    pairs_first(
        ["native", "sdpa", "unfused"],
        ["q", "k", "v", "qkv", "grad", "qkv grad"],
        ["eager", "compiled"],
        ["lines", "memory"],
    ),
    indirect=["backend"],
)
def test_views_without_alignment(device, backend, which, way, where):
    """Kernels of other libraries read 16 bytes at once: what does not begin there is copied."""
    torch._dynamo.reset()
    _core.reset_counters()
    shapes = dict.fromkeys("qk", (1, 33, 4, 72)) | {"v": (1, 33, 4, 64), "grad": (1, 33, 256)}
    given = {
        name: unaligned(shape, where, device)
        if name in which
        else torch.randn(shape, device=device, dtype=F16)
        for name, shape in shapes.items()
    }
    module = DotProductAttention(4, (72, 64), qkv_format="bshd", attn_mask_type="causal")
    call = torch.compile(module, backend="aot_eager") if way == "compiled" else module
    made = []
    for run, tensors in ((call, given), (module, {n: t.clone() for n, t in given.items()})):
        qkv = [tensors[name].detach().requires_grad_() for name in "qkv"]
        out = run(*qkv)
        made.append([out, *torch.autograd.grad(out, qkv, tensors["grad"])])
    assert ran() == backend
    for x, y in zip(*made, strict=True):
        assert_nmse(x, y.double(), 4 * tol("attention", F16, 33))


# ---- biases --------------------------------------------------------------------------------------

BIAS_SHAPES = {
    "bhss": (BATCH, HEADS, QUERIES, KEYS),
    "1hss": (1, HEADS, QUERIES, KEYS),
    "b1ss": (BATCH, 1, QUERIES, KEYS),
    "11ss": (1, 1, QUERIES, KEYS),
    "111s": (1, 1, 1, KEYS),
}


@pytest.mark.parametrize("shape", BIAS_SHAPES)
@pytest.mark.parametrize("kind", ["pre_scale_bias", "post_scale_bias"])
@OURS
def test_bias(device, backend, kind, shape):
    module = DotProductAttention(HEADS, CHANNELS, attn_mask_type="causal")
    qkv = model.make_qkv("sbhd", sizes(), F32, device)
    bias = torch.randn(BIAS_SHAPES[shape], device=device).requires_grad_()
    may = model.may_attend((BATCH, HEADS, QUERIES, KEYS), window=(-1, 0))
    factor = CHANNELS**-0.5 if kind == "pre_scale_bias" else 1.0
    check(
        module,
        qkv,
        may,
        form="sbhd",
        dtype=F32,
        bias=bias,
        options={"bias_factor": factor},
        core_attention_bias_type=kind,
    )


@OURS
def test_bias_in_16_bits_with_groups(device, backend):
    module = DotProductAttention(HEADS, CHANNELS, 2, attn_mask_type="no_mask")
    qkv = model.make_qkv("sbhd", sizes(groups=2), BF16, device)
    bias = torch.randn(BATCH, HEADS, QUERIES, KEYS).to(device, BF16).requires_grad_()
    may = model.may_attend((BATCH, HEADS, QUERIES, KEYS))
    check(
        module,
        qkv,
        may,
        form="sbhd",
        dtype=BF16,
        bias=bias,
        core_attention_bias_type="post_scale_bias",
    )


@pytest.mark.parametrize("bias_dtype", [F32, BF16])
@pytest.mark.parametrize("shape", BIAS_SHAPES)
def test_gradient_of_a_bias_is_added_up_in_fp32(device, shape, bias_dtype):
    """Of scores in 16 bits: from the probabilities as they are, rounded at the end alone."""
    scores = torch.randn(BIAS_SHAPES["bhss"]).to(device, BF16)
    bias = torch.randn(BIAS_SHAPES[shape]).to(device, bias_dtype).requires_grad_()
    out = scaled_softmax(scores, bias=bias)
    grad = torch.randn(out.shape).to(out)
    (made,) = torch.autograd.grad(out, bias, grad)
    p, dp = (t.detach().cpu().double() for t in (out, grad))
    mean, of_mean = ((p * each).sum(-1, keepdim=True) for each in (dp, dp.abs()))
    exact, terms = ((p * each).sum_to_size(bias.shape) for each in (dp - mean, dp.abs() + of_mean))
    bound = tol("sum", F32, p.numel()) + (tol("round", BF16) if bias_dtype is BF16 else 0.0)
    assert made.dtype is bias_dtype
    assert_nmse(made, exact, bound, terms=terms)


@pytest.mark.parametrize("heads", [1, 4, 6])
@pytest.mark.parametrize("slopes", ["default", "heads", "batch"])
@pytest.mark.parametrize("mask", ["causal", "no_mask", "causal_bottom_right"])
@OURS
def test_alibi(device, backend, mask, slopes, heads):
    module = DotProductAttention(heads, CHANNELS, attn_mask_type=mask)
    qkv = model.make_qkv(
        "sbhd", (BATCH, QUERIES, KEYS, heads, heads, CHANNELS, CHANNELS), F32, device
    )
    given = None
    if slopes == "default":
        # n = 4 for 6 heads: 2^(-8 k / 4), then 2^(-4 (2 k - 1) / 4)
        exact = {1: [-8], 4: [-2, -4, -6, -8], 6: [-2, -4, -6, -8, -1, -3]}[heads]
        wide = 2.0 ** torch.tensor(exact, dtype=torch.float64)
    else:
        wide = torch.rand(*((BATCH,) if slopes == "batch" else ()), heads).double()
        given = wide.to(device, F32)
        wide = given.cpu().double()
    diagonal = 0 if mask == "causal" else KEYS - QUERIES
    bias = -wide.reshape(-1, heads, 1, 1) * model.distance(QUERIES, KEYS, diagonal)
    window = (-1, -1) if mask == "no_mask" else (-1, 0)
    may = model.may_attend((BATCH, heads, QUERIES, KEYS), window=window, diagonal=diagonal)
    check(
        module,
        qkv,
        may,
        form="sbhd",
        dtype=F32,
        options={"bias": bias},
        core_attention_bias_type="alibi",
        alibi_slopes=given,
    )


@OURS
def test_fp16_scores_do_not_overflow_before_scaling(device, backend):
    """64 products of 40 x 40 are beyond fp16, an eighth of them is not."""
    module = DotProductAttention(1, 64, attn_mask_type="causal", window_size=(2, 0))
    q = torch.full((4, 1, 1, 64), 40.0, device=device, dtype=F16)
    v = torch.randn(4, 1, 1, 64, device=device).to(F16)
    out = module(q, q, v).view(4, 64)
    expected = torch.stack([v[max(0, i - 2) : i + 1].double().mean(0).view(64) for i in range(4)])
    assert_nmse(out, expected, tol("attention", F16, 64))


# ---- dropout -------------------------------------------------------------------------------------


@OURS
@pytest.mark.parametrize("groups", [HEADS, 2])
def test_dropout_is_philox(device, backend, groups):
    """The probabilities that the pair of the call says, for output and gradients."""
    module = DotProductAttention(
        HEADS, CHANNELS, groups, attention_dropout=0.4, attn_mask_type="causal", window_size=(4, 0)
    )
    qkv = model.make_qkv("sbhd", sizes(groups=groups), F32, device)
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    pair = draw_pair(qkv[0]).tolist()
    shape = (BATCH, HEADS, QUERIES, KEYS)
    factors = drop_factors(pair, shape, 0.4)
    may = model.may_attend(shape, window=(4, 0))
    torch.manual_seed(seed)
    check(
        module,
        qkv,
        may,
        form="sbhd",
        dtype=F32,
        options={"factors": factors},
    )


@our_kernels
def test_dropout_is_seeded_and_off_in_eval(device, backend):
    """Every backend: one seed, one result; the mean over many draws is the undropped output."""
    module = DotProductAttention(HEADS, CHANNELS, attention_dropout=0.5)
    dtype = F32 if device == "cpu" else F16
    qkv = model.make_qkv("sbhd", (BATCH, KEYS, KEYS, HEADS, HEADS, 16, 16), dtype, device)
    seed = int(torch.randint(2**31, ()))
    torch.manual_seed(seed)
    first, second = module(*qkv), module(*qkv)
    torch.manual_seed(seed)
    assert_same_bits([module(*qkv), module(*qkv)], [first, second])
    assert not torch.equal(first, second)
    draws = torch.stack([module(*qkv).detach().double() for _ in range(400)])
    still = module.eval()(*qkv).double()
    assert_same_bits(module(*qkv).double(), still)
    deviation = draws.std(0) / 400**0.5
    rounding = tol("round", dtype) ** 0.5 * still.abs().max()
    assert ((draws.mean(0) - still).abs() <= 6 * deviation + rounding).all()


def test_random_state_tracker_is_forked(device):
    """Dropout is drawn inside the fork, and only where something is dropped."""
    forks = []

    class Tracker:
        def fork(self):
            forks.append(1)
            return same_draws(device)

    module = DotProductAttention(
        HEADS, CHANNELS, attention_dropout=0.5, get_rng_state_tracker=Tracker
    )
    qkv = model.make_qkv("sbhd", sizes(KEYS), F32, device)
    assert_same_bits(module(*qkv), module(*qkv))
    assert len(forks) == 2
    module.eval()(*qkv)
    assert len(forks) == 2


# ---- packed inputs -------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("dim", [-3, -2])
def test_packed(device, form, dim):
    module = DotProductAttention(HEADS, CHANNELS, qkv_format=form)
    q, k, v = model.make_qkv(form, sizes(KEYS), F32, device)
    expected = module(q, k, v)
    qkv = torch.stack([q, k, v], dim)
    assert_same_bits(module(qkv_layer=qkv, qkv_interleave_dim=dim), expected)
    kv = torch.stack([k, v], dim)
    assert_same_bits(module(q, kv_layer=kv, qkv_interleave_dim=dim), expected)
    grads = torch.autograd.grad(module(qkv_layer=qkv, qkv_interleave_dim=dim).sum(), (q, k, v))
    assert_same_bits(list(grads), list(torch.autograd.grad(expected.sum(), (q, k, v))))
