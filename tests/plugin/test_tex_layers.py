# SPDX-License-Identifier: Apache-2.0
"""Operators of layers, of each implementation, against float64: values, gradients, casts."""

import pytest
import torch
from buffers import normal
from comparators import assert_bits
from tex_cases import (
    FORMATS,
    HIGH,
    Operators,
    assert_near,
    assert_same_data,
    each_implementation,
    grads64,
    quantizers,
)
from tols import BF16, F16, F32, tol

from transformer_engine.plugin.core.ops import NVTE_QKV_Format
from transformer_engine.pytorch.attention import RotaryPositionEmbedding
from transformer_engine.pytorch.constants import DType

UNGATED = {
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": lambda x: x * (x > 0),
    "srelu": lambda x: x * x * (x > 0),
    "silu": lambda x: x * torch.sigmoid(x),
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def clamped(x, limit=7.0, alpha=1.702):
    first, second = x.chunk(2, -1)
    first, second = first.clamp(max=limit), second.clamp(-limit, limit)
    return first * torch.sigmoid(alpha * first) * (second + 1)


def gated(name):
    def run(x):
        first, second = x.chunk(2, -1)
        return UNGATED[GATED[name]](first) * second

    return run


ACTIVATIONS = {**UNGATED, **{name: gated(name) for name in GATED}, "clamped_swiglu": clamped}
high = pytest.mark.parametrize("dtype", HIGH)


def gradient_name(name):
    return "clamped_dswiglu" if name == "clamped_swiglu" else f"d{name}"


# ---- activations -----------------------------------------------------------------------------


@each_implementation
@pytest.mark.parametrize("name", ACTIVATIONS)
@high
def test_activations(rng, device, tex, name, dtype):
    x = normal(rng, (3, 5, 48), dtype, device)
    exact = ACTIVATIONS[name](x.double())
    out = getattr(tex, name)(x, None)
    assert out.dtype == dtype
    assert_near(out, exact)
    grad = normal(rng, tuple(out.shape), dtype, device)
    (expected,) = grads64(ACTIVATIONS[name], grad, x)
    made = getattr(tex, gradient_name(name))(grad, x, None)
    assert made.dtype == dtype
    assert_near(made, expected)
    if name in UNGATED:
        sums, made = getattr(tex, f"dbias_d{name}")(grad, x, None)
        assert sums.dtype == dtype
        assert_near(made, expected)
        assert_near(sums, expected.sum((0, 1)), 15)


@each_implementation
def test_numbers_of_clamped_swiglu(rng, device, tex):
    x = normal(rng, (7, 32), F32, device, 4.0)
    grad = normal(rng, (7, 16), F32, device)
    numbers = {"limit": 2.5, "alpha": 0.9}
    assert_near(tex.clamped_swiglu(x, None, **numbers), clamped(x.double(), 2.5, 0.9))
    (expected,) = grads64(lambda t: clamped(t, 2.5, 0.9), grad, x)
    assert_near(tex.clamped_dswiglu(grad, x, None, 2.5, 0.9), expected)


@each_implementation
@pytest.mark.parametrize("kind", FORMATS)
def test_cast_results(rng, device, tex, kind):
    """With a quantizer come the bits that it makes of the result without one."""
    make = quantizers(device)[kind]
    x, grad = normal(rng, (32, 64), BF16, device), normal(rng, (32, 64), BF16, device)
    gamma = normal(rng, (64,), BF16, device)
    assert_same_data(tex.silu(x, make), make(tex.silu(x, None)))
    assert_same_data(tex.dsilu(grad, x, make), make(tex.dsilu(grad, x, None)))
    sums, made = tex.dbias_dsilu(grad, x, make)
    expected = tex.dbias_dsilu(grad, x, None)
    assert_bits(sums, expected[0])
    assert_same_data(made, make(expected[1]))
    out, _, rsigma = tex.rmsnorm_fwd(x, gamma, 1e-5, None, make, BF16, 0, False)
    plain, _, again = tex.rmsnorm_fwd(x, gamma, 1e-5, None, None, BF16, 0, False)
    assert_same_data(out, make(plain))
    assert_bits(rsigma, again)
    into = make(torch.zeros_like(x))
    given, *_ = tex.layernorm_fwd(x, gamma, gamma, 1e-5, into, make, BF16, 0, False)
    plain, *_ = tex.layernorm_fwd(x, gamma, gamma, 1e-5, None, None, BF16, 0, False)
    assert given is into
    assert_same_data(into, make(plain))


@each_implementation
def test_refused_activations(tex):
    x = torch.ones(2, 4)
    for given in ((None, None), (3, None)):
        with pytest.raises(TypeError, match="silu: input: .*expected a tensor"):
            tex.silu(*given)
    with pytest.raises(TypeError, match="silu: quantizer: str"):
        tex.silu(x, "e4m3")


@each_implementation
def test_few_and_no_elements(rng, device, tex):
    for shape in ((0, 16), (16,), (2, 0, 16)):
        x, gamma = normal(rng, shape, F32, device), torch.ones(16, device=device)
        assert tex.gelu(x, None).shape == shape == tex.dgelu(x, x, None).shape
        assert tex.swiglu(x, None).shape == (*shape[:-1], 8)
        sums, made = tex.dbias_drelu(x, x, None)
        assert_near(sums, (x * (x > 0)).double().reshape(-1, 16).sum(0))
        y, mu, rsigma = tex.layernorm_fwd(x, gamma, gamma, 1e-5, None, None, F32, 0, False)
        assert_near(y, norm64("layernorm", x.double(), gamma, gamma, 1e-5, False), 16)
        dx, dgamma, dbeta = tex.layernorm_bwd(x, x, mu, rsigma, gamma)
        assert dx.shape == shape
        assert_near(dbeta, x.double().reshape(-1, 16).sum(0))
        dx, _ = tex.rmsnorm_bwd_add(x, x, x, rsigma, gamma, 0, False)
        assert dx.shape == shape
        assert tex.dropout_fwd(x, 0.5)[0].shape == shape


def test_refused_shapes(device):
    tex = Operators("default.native")
    with pytest.raises(ValueError, match="swiglu: input: 3 columns, expected two halves"):
        tex.swiglu(torch.ones(2, 3, device=device), None)
    with pytest.raises(ValueError, match="silu: input: shape"):
        tex.silu(torch.ones((), device=device), None)
    with pytest.raises(ValueError):
        tex.dsilu(torch.ones(2, 3, device=device), torch.ones(2, 4, device=device), None)


# ---- norms -----------------------------------------------------------------------------------


def norm64(kind, x, gamma, beta, eps, zero_centered):
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y * (gamma + 1 if zero_centered else gamma)
    return y if beta is None else y + beta


@each_implementation
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("dtype", "out"), [(F32, F32), (BF16, BF16), (F16, F16), (BF16, F32)])
def test_norms(rng, device, tex, kind, zero_centered, dtype, out):
    x, dy = normal(rng, (3, 7, 40), dtype, device), normal(rng, (3, 7, 40), dtype, device)
    gamma, beta = normal(rng, (40,), dtype, device), normal(rng, (40,), dtype, device)
    eps = 1e-3
    wide = [t.double() for t in (x, gamma, beta)]
    otype = DType.kFloat32 if out == F32 else out
    rest = (eps, None, None, otype, 0, zero_centered)
    if kind == "layernorm":
        y, mu, rsigma = tex.layernorm_fwd(x, gamma, beta, *rest)
        assert_near(mu, wide[0].mean(-1).flatten(), 40)
        exact = norm64(kind, *wide, eps, zero_centered)
        variance = wide[0].var(-1, correction=0)
        made = tex.layernorm_bwd(dy, x, mu, rsigma, gamma, 0, zero_centered)
        inputs = (x, gamma, beta)
    else:
        y, mu, rsigma = tex.rmsnorm_fwd(x, gamma, *rest)
        assert mu is None
        exact = norm64(kind, *wide[:2], None, eps, zero_centered)
        variance = wide[0].square().mean(-1)
        made = tex.rmsnorm_bwd(dy, x, rsigma, gamma, 0, zero_centered, eps)
        inputs = (x, gamma)
    assert y.dtype == out and rsigma.dtype == F32
    assert_near(y, exact, 40)
    assert_near(rsigma, (variance + eps).rsqrt().flatten(), 40)
    expected = grads64(lambda x, g, b=None: norm64(kind, x, g, b, eps, zero_centered), dy, *inputs)
    for one, other, like in zip(made, expected, inputs, strict=True):
        assert one.dtype == like.dtype
        assert_near(one, other, 40)


@each_implementation
@high
def test_rmsnorm_bwd_add(rng, device, tex, dtype):
    x, dz, add = (normal(rng, (5, 3, 32), dtype, device) for _ in range(3))
    gamma = normal(rng, (32,), dtype, device)
    _, _, rsigma = tex.rmsnorm_fwd(x, gamma, 1e-5, None, None, dtype, 0, True)
    dx, dgamma = tex.rmsnorm_bwd_add(dz, x, add, rsigma, gamma, 0, True)
    expected = grads64(lambda x, g: norm64("rmsnorm", x, g, None, 1e-5, True), dz, x, gamma)
    assert_near(dx, expected[0] + add.double(), 32)
    assert_near(dgamma, expected[1], 32)


@each_implementation
def test_norms_write_where_they_are_told(rng, device, tex):
    x, gamma = normal(rng, (4, 16), F32, device), torch.ones(16, device=device)
    into = torch.empty(4, 16, device=device, dtype=BF16)
    y, *_ = tex.rmsnorm_fwd(x, gamma, 1e-5, into, None, BF16, 0, False)
    plain, *_ = tex.rmsnorm_fwd(x, gamma, 1e-5, None, None, BF16, 0, False)
    assert y is into
    assert_bits(into, plain)
    no_bias, *_ = tex.layernorm_fwd(x, gamma, None, 1e-5, None, None, F32, 0, False)
    assert_near(no_bias, norm64("layernorm", x.double(), 1.0, None, 1e-5, False), 16)
    with pytest.raises(ValueError, match="rmsnorm_fwd: out: shape"):
        tex.rmsnorm_fwd(x, gamma, 1e-5, into[:2], None, BF16, 0, False)
    with pytest.raises(TypeError, match="rmsnorm_fwd: otype="):
        tex.rmsnorm_fwd(x, gamma, 1e-5, None, None, "bf16", 0, False)


@each_implementation
def test_what_is_given_may_require_gradients(rng, device, tex):
    """And may lie as it likes: results are those of plain tensors, without a graph."""
    x = normal(rng, (16, 24), F32, device).t()
    gamma = torch.nn.Parameter(normal(rng, (16,), F32, device))
    plain = x.contiguous()
    x.requires_grad_()
    calls = [
        lambda t, g: tex.silu(t, None),
        lambda t, g: tex.dsilu(t, t, None),
        lambda t, g: tex.layernorm_fwd(t, g, g, 1e-5, None, None, F32, 0, False)[0],
        lambda t, g: tex.rmsnorm_bwd(t, t, torch.ones(24, device=device), g)[1],
        lambda t, g: tex.scaled_softmax_forward(t[None, None], 0.5),
        lambda t, g: tex.dropout_fwd(t, 0.0)[0],
    ]
    for call in calls:
        found = call(x, gamma)
        assert not found.requires_grad and found.grad_fn is None
        assert_near(found, call(plain, gamma.detach()).double())
    before = x.detach().clone()
    tex.dropout_fwd(x, 0.5)
    assert_bits(x, before)


# ---- softmax ---------------------------------------------------------------------------------

SOFTMAX = ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked")


@each_implementation
@pytest.mark.parametrize("kind", SOFTMAX)
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_softmax(rng, device, tex, kind, dtype):
    shape = (6, 9, 9) if "triang" in kind else (2, 3, 9, 17)
    x, scale = normal(rng, shape, dtype, device), 0.7
    future = torch.ones(shape[-2:], dtype=torch.bool, device=device).triu(1 + shape[-1] - shape[-2])
    mask, given = future, ()
    if kind == "scaled":
        mask = torch.zeros_like(future)
    elif kind == "scaled_masked":
        mask = torch.from_numpy(rng.random((2, 1, 9, 17)) < 0.4).to(device)
        mask[0, 0, 3] = True  # a query that attends nothing
        given = (mask if dtype == F16 else mask.to(torch.uint8),)

    def softmax64(x):
        p = (x * scale).masked_fill(mask, -torch.inf).softmax(-1)
        return torch.where(mask.expand_as(p), 0.0, p)

    out = getattr(tex, f"{kind}_softmax_forward")(x, *given, scale)
    assert out.dtype == dtype and not out[mask.expand_as(out)].any()
    assert_near(out, softmax64(x.double()), shape[-1])
    grad = normal(rng, shape, dtype, device)
    p = out.double()
    dp = grad.double()
    expected = scale * p * (dp - (dp * p).sum(-1, keepdim=True))
    kept = grad.clone()
    made = getattr(tex, f"{kind}_softmax_backward")(grad, out, scale)
    assert made.dtype == dtype
    assert_near(made, expected, shape[-1])
    assert_bits(grad, kept)


def test_refused_softmax():
    tex = Operators("default.native")
    with pytest.raises(ValueError, match="scaled_softmax_forward: input: shape"):
        tex.scaled_softmax_forward(torch.ones(2, 3, 4), 1.0)
    with pytest.raises(ValueError, match="square"):
        tex.scaled_upper_triang_masked_softmax_forward(torch.ones(2, 3, 4), 1.0)
    with pytest.raises(TypeError, match="mask: torch.float32"):
        tex.scaled_masked_softmax_forward(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 1.0)


# ---- dropout ---------------------------------------------------------------------------------


@each_implementation
@high
def test_dropout(rng, device, tex, dtype):
    x, p = normal(rng, (64, 96), dtype, device), 0.3
    x[x == 0] = 1
    out, mask = tex.dropout_fwd(x, p)
    kept = out != 0
    assert abs(kept.double().mean().item() - 0.7) < tol("share", F32, kept.numel())
    assert_near(out, x.double() * kept / 0.7)
    grad = normal(rng, (64, 96), dtype, device)
    assert_near(tex.dropout_bwd(grad, mask, p), grad.double() * kept / 0.7)
    into = torch.empty_like(grad)
    assert tex.dropout_bwd(grad, mask, p, into) is into
    assert_bits(into, tex.dropout_bwd(grad, mask, p))
    torch.manual_seed(5)
    first, _ = tex.dropout_fwd(x, p)
    torch.manual_seed(5)
    into = torch.empty_like(x)
    again, _ = tex.dropout_fwd(x, p, out=into)
    assert again is into
    assert_bits(first, again)
    assert_bits(tex.dropout_fwd(x, 0.0)[0], x)
    assert not tex.dropout_fwd(x, 1.0)[0].any()
    with pytest.raises(ValueError, match="dropout_fwd: dropout_probability=1.5"):
        tex.dropout_fwd(x, 1.5)
    with pytest.raises(ValueError, match="dropout_bwd: mask"):
        tex.dropout_bwd(grad, torch.ones(3, device=device), p)


# ---- rotary positions ------------------------------------------------------------------------


def rope64(t, angles, interleaved):
    """`t` [.., heads, d] by angles [.., 1, rotated] in float64."""
    count = angles.shape[-1]
    turned, rest = t[..., :count], t[..., count:]
    if interleaved:
        partners = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        partners = torch.cat((-second, first), -1)
    return torch.cat((turned * angles.cos() + partners * angles.sin(), rest), -1)


@each_implementation
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("ranks", [(1, 0), (2, 1)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rope(rng, device, tex, form, interleaved, ranks, dtype):
    size, rank = ranks
    freqs = RotaryPositionEmbedding(12, interleaved=interleaved)(32).to(device)
    lengths = (4, 8)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    tokens = sum(lengths)
    shape = {"sbhd": (8, 2, 3, 16), "bshd": (2, 8, 3, 16), "thd": (tokens, 3, 16)}[form]
    x = normal(rng, shape, dtype, device)

    def of_rank(n):
        at = torch.arange(n)
        if size == 1:
            return at
        chunk = n // 2
        return torch.cat((at[:chunk] + rank * chunk, at[:chunk] + (2 * size - 1 - rank) * chunk))

    if form == "thd":
        at = torch.cat([of_rank(n) for n in lengths])
        angles = freqs[at, 0].double()
    else:
        angles = freqs[of_rank(8), 0].double()
        angles = angles[:, None] if form == "sbhd" else angles
    packed = cu * size if form == "thd" else None
    kind = NVTE_QKV_Format[f"NVTE_{form.upper()}"]
    out = tex.fused_rope_forward(x, freqs, None, kind, interleaved, packed, size, rank)
    assert out.dtype == dtype
    assert_near(out, rope64(x.double(), angles, interleaved))
    grad = normal(rng, shape, dtype, device)
    (expected,) = grads64(lambda t: rope64(t, angles, interleaved), grad, x)
    made = tex.fused_rope_backward(grad, freqs, kind, interleaved, packed, size, rank)
    assert_near(made, expected)


@each_implementation
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_rope_from_start_positions(rng, device, tex, form):
    freqs = RotaryPositionEmbedding(16)(32).to(device)
    x = normal(rng, (8, 2, 3, 16) if form == "sbhd" else (2, 8, 3, 16), F32, device)
    starts = torch.tensor([3, 11], dtype=torch.int32, device=device)
    kind = NVTE_QKV_Format[f"NVTE_{form.upper()}"]
    out = tex.fused_rope_forward(x, freqs, starts, kind, False, None, 1, 0)
    for i, first in enumerate((3, 11)):
        angles = freqs[first : first + 8, 0].double()
        rows = (slice(None), i) if form == "sbhd" else i
        assert_near(out[rows], rope64(x[rows].double(), angles, False))


@each_implementation
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
def test_rope_by_angles_of_each_sequence(rng, device, tex, form):
    freqs = normal(rng, (3, 3, 1, 8), F32, device)
    freqs[..., 4:] = freqs[..., :4]
    x = normal(rng, (3, 3, 2, 8), F32, device)
    kind = NVTE_QKV_Format[f"NVTE_{form.upper()}"]
    angles = freqs.double() if form == "sbhd" else freqs.double().transpose(0, 1)
    out = tex.fused_rope_forward(x, freqs, None, kind, False, None, 1, 0)
    assert_near(out, rope64(x.double(), angles, False))
    made = tex.fused_rope_backward(x, freqs, kind, False, None, 1, 0)
    assert_near(made, rope64(x.double(), -angles, False))


@each_implementation
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_of_a_projection(rng, device, tex, form, interleaved):
    sizes = [32, 16, 24]
    freqs = [RotaryPositionEmbedding(n, interleaved=interleaved)(8).to(device) for n in (12, 8)]
    x = normal(rng, (8, 2, 3, 72) if form == "sbhd" else (2, 8, 3, 72), BF16, device)
    angles = [f[:, :, 0].double() if form == "sbhd" else f[:, 0].double() for f in freqs]
    angles = [a[:, :, None] if form == "sbhd" else a for a in angles]

    def parts64(x):
        q, k, v = x.split(sizes, -1)
        q = q.reshape(*x.shape[:2], 6, 16)
        return (
            rope64(q, angles[0], interleaved), rope64(k, angles[1], interleaved), v.clone()
        )  # fmt: skip

    kind = NVTE_QKV_Format[f"NVTE_{form.upper()}"]
    made = tex.fused_qkv_rope_forward(x, *freqs, None, sizes, kind, interleaved, 1, 0)
    for one, other in zip(made, parts64(x.double()), strict=True):
        assert_near(one, other)
    grads = tuple(normal(rng, tuple(t.shape), BF16, device) for t in made)
    (expected,) = grads64(parts64, grads, x)
    grad = tex.fused_qkv_rope_backward(*grads, *freqs, sizes, kind, interleaved, 1, 0)
    assert grad.shape == x.shape
    assert_near(grad, expected)


@each_implementation
def test_refused_rope(tex):
    x, freqs = torch.ones(4, 1, 1, 8), torch.ones(4, 1, 1, 8)
    with pytest.raises(ValueError, match="fused_rope_forward: qkv_format=9"):
        tex.fused_rope_forward(x, freqs, None, 9, False, None, 1, 0)
