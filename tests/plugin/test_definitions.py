# SPDX-License-Identifier: Apache-2.0
"""``reference.torch`` says what operators are: held to torch's own functions and to loops here.

`plugin.check` compares all implementations with it; so nothing here comes from it.
"""

import itertools
import math

import pytest
import torch
from comparators import assert_bits, assert_nmse
from tols import F32, tol
from torch.nn import functional

from transformer_engine.plugin.conformance.attention import (
    Problem,
    backward_arguments,
    forward_arguments,
    settings,
)
from transformer_engine.plugin.conformance.cases import Draw
from transformer_engine.plugin.conformance.definition import definition, widened
from transformer_engine.plugin.core.ops import NVTE_QKV_Format
from transformer_engine.pytorch.constants import DType

F64 = torch.float64


@pytest.fixture
def draw(seed):
    return Draw(torch.device("cpu"), seed, (F32,))


def near(found, expected):
    """Float64 results, of numbers that were rounded to fp32 at most."""
    assert found.dtype == F64
    assert_nmse(found, expected, tol("sum", F32, 16))


def differentiated(function, inputs, grad):
    """Gradients of a function, by those of its result."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad)


# ---- norms, activations, products --------------------------------------------------------------


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms(draw, kind, zero_centered):
    x, dy, other = (draw.normal((3, 5, 24), F64) + 2 for _ in range(3))
    vectors = [draw.normal((24,), F64) for _ in range(2 if kind == "layernorm" else 1)]

    def exact(x, gamma, *beta):
        gamma, eps = gamma + zero_centered, 0.5
        if beta:
            return functional.layer_norm(x, x.shape[-1:], gamma, *beta, eps)
        return functional.rms_norm(x, x.shape[-1:], gamma, eps)

    options = 0.5, None, None, F64, 0, zero_centered
    y, mean, rsigma = definition(f"{kind}_fwd")(x, *vectors, *options)
    near(y, exact(x, *vectors))
    spread = x.var(-1, correction=0) if kind == "layernorm" else x.square().mean(-1)
    near(rsigma, (1 / (spread + 0.5).sqrt()).flatten())
    if kind == "layernorm":
        near(mean, x.mean(-1).flatten())
    expected = differentiated(exact, (x, *vectors), dy)
    statistics = (mean, rsigma) if kind == "layernorm" else (rsigma,)
    found = definition(f"{kind}_bwd")(dy, x, *statistics, vectors[0], 0, zero_centered)
    for one, wanted in zip(found, expected, strict=True):
        near(one, wanted)
    if kind == "rmsnorm":
        add = definition("rmsnorm_bwd_add")
        dx, dgamma = add(dy, x, other, rsigma, vectors[0], 0, zero_centered)
        near(dx, expected[0] + other)
        near(dgamma, expected[1])


def gelu(x):
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


SINGLE = {
    "gelu": gelu,
    "qgelu": lambda x: x * sigmoid(1.702 * x),
    "relu": lambda x: x * (x > 0),
    "srelu": lambda x: x * x * (x > 0),
    "silu": lambda x: x * sigmoid(x),
}
GATES = {"glu": sigmoid, "swiglu": SINGLE["silu"]}
GATES |= {f"{name.removesuffix('lu')}glu": SINGLE[name] for name in SINGLE if name != "silu"}


def clamped(limit, alpha):
    def run(x):
        a, b = x[..., :16], x[..., 16:]
        a, b = torch.where(a > limit, limit, a), torch.where(b.abs() > limit, limit * b.sign(), b)
        return a * sigmoid(alpha * a) * (b + 1)

    return run


ACTIVATIONS = {(name, ()): run for name, run in SINGLE.items()}
ACTIVATIONS |= {
    (name, ()): lambda x, gate=gate: gate(x[..., :16]) * x[..., 16:] for name, gate in GATES.items()
}
ACTIVATIONS |= {("clamped_swiglu", n): clamped(*(n or (7.0, 1.702))) for n in ((), (0.8, 0.9))}


@pytest.mark.parametrize(("name", "numbers"), ACTIVATIONS)
def test_activations(draw, name, numbers):
    exact, x = ACTIVATIONS[name, numbers], draw.normal((3, 5, 32), F64)
    found = definition(name)(x, None, *numbers)
    near(found, exact(x))
    grad = draw.normal(tuple(found.shape), F64)
    (expected,) = differentiated(exact, (x,), grad)
    gradient = "clamped_dswiglu" if name == "clamped_swiglu" else f"d{name}"
    near(definition(gradient)(grad, x, None, *numbers), expected)
    if name in SINGLE:
        sums, made = definition(f"dbias_{gradient}")(grad, x, None)
        near(sums, expected.sum((0, 1)))
        near(made, expected)


@pytest.mark.parametrize("kind", ["", "masked_", "upper_triang_masked_", "aligned_causal_masked_"])
def test_softmax(draw, kind):
    shape = (2, 6, 6) if kind.startswith("upper") else (2, 3, 5, 8)
    x, grad = draw.normal(shape, F64, 3.0), draw.normal(shape, F64)
    attended = torch.ones(shape, dtype=torch.bool)
    if kind == "masked_":
        attended = (draw.uniform((2, 1, 5, 8)) < 0.6).expand(shape).clone()
        attended[:, :, 2] = False
    elif kind:
        for query, key in itertools.product(range(shape[-2]), range(shape[-1])):
            attended[..., query, key] = key - (shape[-1] - shape[-2]) <= query
    powers = (0.7 * x).exp() * attended
    expected = powers / powers.sum(-1, keepdim=True).clamp(min=1e-300)
    mask = ((~attended[:, :1]).to(torch.uint8),) if kind == "masked_" else ()
    made = definition(f"scaled_{kind}softmax_forward")(x, *mask, 0.7)
    near(made, expected)
    (wanted,) = differentiated(lambda x: (0.7 * x).softmax(-1), (x,), grad)
    plain = (0.7 * x).softmax(-1)
    near(definition(f"scaled_{kind}softmax_backward")(grad, plain, 0.7), wanted)


@pytest.mark.parametrize("transB", [False, True])
@pytest.mark.parametrize("transA", [False, True])
def test_products(draw, transA, transB):
    """Of column-major matrices, as cuBLAS has them: of row-major ones op(B) op(A)."""
    A = draw.normal((6, 5) if transA else (5, 6), F64)
    B, D = draw.normal((5, 4) if transB else (4, 5), F64), draw.normal((4, 6), F64)
    product = torch.einsum(f"{'km' if transB else 'mk'},{'nk' if transA else 'kn'}->mn", B, A)

    def call(D, bias, gelu, gelu_in, grad, accumulate, *factors):
        operands, rest = (A, transA, B, transB), (None, 0, accumulate, True)
        options = (None, F64, bias, None, gelu, gelu_in, grad)
        last = None, None, None, False, *factors
        return definition("generic_gemm")(*operands, D, *options, *rest, *last)

    near(call(None, None, False, None, False, False)[0], product)
    bias, place = draw.normal((6,), F64), D.clone()
    found = call(place, bias, False, None, False, True, 0.5, 2.0)[0]
    assert found is place
    near(found, 0.5 * product + 2.0 * D + bias)
    made, _, before, _ = call(None, bias, True, None, False, False)
    near(before, product + bias)
    near(made, gelu(product + bias))
    (expected,) = differentiated(gelu, (D,), product)
    made, sums, *_ = call(None, bias, True, D, True, False)
    near(made, expected)
    near(sums, expected.sum(0))
    sums = call(None, draw.normal((4,), F64), False, None, True, False)[1]
    near(sums, B.sum(0 if transB else 1))


# ---- attention ---------------------------------------------------------------------------------


def tokens(problem, keys):
    """(sequence, tokens): where each sequence of a format lies in a tensor of it."""
    form = problem.setting.layout.split("_")[-1 if keys else 0]
    form = "".join(c for c in form if c.isalpha())
    counts = problem.counted[keys].tolist()
    starts = problem.padded[keys] if problem.setting.gaps else problem.counted[keys]
    for i, (first, end) in enumerate(itertools.pairwise(counts)):
        if form == "thd":
            begin = int(starts[i])
            yield (slice(begin, begin + end - first),)
        else:
            part = slice(0, end - first)
            yield (part, i) if form == "sbhd" else (i, part)


def mask_of(setting, queries, keys):
    """Which keys queries attend, and how far these are from the diagonal."""
    left, right = setting.window
    right = 0 if "causal" in setting.mask else right
    shift = keys - queries if "bottom_right" in setting.mask else 0
    apart = torch.tensor([[k - q - shift for k in range(keys)] for q in range(queries)])
    apart = apart.view(queries, keys)
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    for q, k in itertools.product(range(queries), range(keys)):
        distance = int(apart[q, k])
        allowed[q, k] = (left < 0 or distance >= -left) and (right < 0 or distance <= right)
    return allowed, apart


def slopes(heads):
    """ALiBi's: powers of 2^(-8 / n), and every second one of 2^(-4 / n) for the rest."""
    n = 2 ** int(math.log2(heads))
    first = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    return torch.tensor(first + [2.0 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)])


def attended(problem, query, key, value, bias, offset):
    """The output by torch's attention, sequence by sequence; a sink is one more key of no value."""
    setting, heads = problem.setting, problem.setting.heads[0]
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    places = zip(tokens(problem, 0), tokens(problem, 1), strict=True)
    for i, (at, at_keys) in enumerate(places):
        q, k, v = (t.transpose(0, 1) for t in (query[at], key[at_keys], value[at_keys]))
        k, v = (t.repeat_interleave(heads // setting.heads[1], 0) for t in (k, v))
        allowed, apart = mask_of(setting, q.shape[1], k.shape[1])
        added = torch.zeros(heads, *allowed.shape, dtype=F64)
        if bias is not None:
            added = added + bias[i % len(bias), ..., : q.shape[1], : k.shape[1]]
        if setting.bias == "alibi":
            added = added - slopes(heads)[:, None, None] * apart.abs()
        added = added.masked_fill(~allowed, -torch.inf)
        if setting.softmax != "vanilla":
            sink = q.new_zeros(heads) if offset is None else offset.flatten()
            k, v = (functional.pad(t, (0, 0, 0, 1)) for t in (k, v))
            added = torch.cat((added, sink.view(-1, 1, 1).expand(-1, q.shape[1], 1)), -1)
        if 0 in added.shape:
            continue
        nothing = (added == -torch.inf).all(-1, keepdim=True)
        added = added.masked_fill(nothing, 0.0)
        scale = problem.scale
        made = functional.scaled_dot_product_attention(q, k, v, added, scale=scale)
        out[at] = made.masked_fill(nothing, 0.0).transpose(0, 1)
    return out


@pytest.mark.parametrize("setting", list(settings()), ids=lambda setting: setting.name)
def test_attention(draw, setting):
    problem = Problem(draw, setting, F64)
    given = [*problem.tensors, problem.bias, problem.offset]
    wide = [None if t is None else t.double().requires_grad_() for t in given]
    expected = attended(problem, *wide)
    out, statistics, rng, *_ = definition("fused_attn_fwd")(*widened(forward_arguments(problem)))
    near(out, expected.detach())
    grad = draw.normal(tuple(out.shape), F64)
    aux = [statistics, rng, *problem.added]
    args = widened(backward_arguments(problem, out, grad, aux))
    found = definition("fused_attn_bwd")(*args)
    leaves = [t for t in wide if t is not None]
    gradients = iter(torch.autograd.grad(expected, leaves, grad))
    for one, leaf in zip(found, wide, strict=True):
        assert (one is None) == (leaf is None)
        if one is not None:
            near(one, next(gradients))


def test_statistics_of_attention(draw):
    """Logarithms of sums of exponentiated scores, and the largest of these for each head."""
    setting = next(one for one in settings() if one.name == "learnable causal")
    problem = Problem(draw, setting, F64)
    q, k, _ = (t.transpose(1, 2) for t in problem.tensors)
    scores = problem.scale * q @ k.repeat_interleave(2, 1).transpose(2, 3)
    allowed, _ = mask_of(setting, 9, 12)
    largest = scores.masked_fill(~allowed, -torch.inf).amax((0, 2, 3))
    sums = (scores.exp() * allowed).sum(-1) + problem.offset.double().exp()[..., 0]
    args = widened(forward_arguments(problem, top=True))
    _, top, statistics, *_ = definition("fused_attn_fwd")(*args)
    near(top, largest)
    near(statistics, sums.log()[..., None])


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
def test_caches(draw, form, paged):
    """Sequences of 2 and 5 tokens get 3 and 1 more."""
    had, new, size = (2, 5), (3, 1), 4 if paged else 8
    rows = [[4, 1], [0, 5]] if paged else [[1], [0]]
    lead = {"bshd": (2, 3), "sbhd": (3, 2), "thd": (4,)}[form]
    given = [draw.normal((*lead, 2, d), F32) for d in (8, 16)]
    caches = [draw.normal((6 if paged else 3, size, 2, d), F32) for d in (8, 16)]
    expected = []
    for tensor, cache in zip(given, caches, strict=True):
        made = cache.clone()
        if not paged:  # sequences move to their numbers in the batch
            made[0], made[1] = cache[1], cache[0]
        for i, first in enumerate((0, 3)):
            for j in range(new[i]):
                at = {"thd": (first + j,), "bshd": (i, j), "sbhd": (j, i)}[form]
                place = had[i] + j
                made[rows[i][place // size] if paged else i, place % size] = tensor[at]
        expected.append(made)
    sums = [torch.tensor(each, dtype=torch.int32) for each in ([0, 3, 4], [0, 5, 11])]
    kind = NVTE_QKV_Format[f"NVTE_{form.upper()}"]
    table = torch.tensor(rows, dtype=torch.int32)
    definition("copy_to_kv_cache")(
        *given, *caches, table, *sums, kind, 2, 3, 8, len(rows[0]), not paged
    )
    for cache, made in zip(caches, expected, strict=True):
        assert_bits(cache, made)


# ---- rotary embeddings -------------------------------------------------------------------------


def positions(length, size, rank):
    """Of the tokens that a rank has: of 2 `size` chunks two, one from each end."""
    if size == 1:
        return list(range(length))
    chunk = length // 2
    first, second = rank * chunk, (2 * size - 1 - rank) * chunk
    return [*range(first, first + chunk), *range(second, second + chunk)]


def turned(x, angles, interleaved):
    """Pairs of channels as complex numbers, turned by angles [.., 1, pairs]."""
    count = 2 * angles.shape[-1]
    part, rest = x[..., :count], x[..., count:]
    pairs = part.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    first, second = pairs.unbind(-1 if interleaved else -2)
    made = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    made = torch.stack((made.real, made.imag), -1 if interleaved else -2).flatten(-2)
    return torch.cat((made, rest), -1)


@pytest.mark.parametrize("ranks", [(1, 0), (2, 1)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_rotary_embeddings(draw, form, interleaved, ranks):
    """Of one tensor, and of queries and keys of a projection."""
    pairs, lengths = draw.normal((32, 6), F64), (4, 0, 8) if form == "thd" else (8, 8)
    double = pairs.repeat_interleave(2, -1) if interleaved else torch.cat((pairs, pairs), -1)
    freqs, kind = double[:, None, None], NVTE_QKV_Format[f"NVTE_{form.upper()}"]
    starts = torch.tensor([3, 11], dtype=torch.int32) if ranks == (1, 0) and form != "thd" else None
    at = [positions(n, *ranks) for n in lengths]
    whole = torch.tensor([0, 4, 4, 12], dtype=torch.int32) * ranks[0] if form == "thd" else None

    def shaped(starts):
        own = [[p + int(s) for p in each] for each, s in zip(at, starts, strict=True)]
        if form == "thd":
            return pairs[list(itertools.chain(*own))][:, None]
        angles = pairs[torch.tensor(own)]
        return (angles.transpose(0, 1) if form == "sbhd" else angles)[:, :, None]

    leading = (12,) if form == "thd" else (8, 2) if form == "sbhd" else (2, 8)
    x, grad = (draw.normal((*leading, 3, 16), F64) for _ in range(2))
    angles = shaped([0] * len(at) if starts is None else starts)
    found = definition("fused_rope_forward")(x, freqs, starts, kind, interleaved, whole, *ranks)
    near(found, turned(x, angles, interleaved))
    back = definition("fused_rope_backward")(grad, freqs, kind, interleaved, whole, *ranks)
    near(back, turned(grad, -shaped([0] * len(at)), interleaved))
    if form == "thd":
        return
    qkv, sizes = draw.normal((*leading, 3, 64), F64), [32, 16, 16]

    def parts(qkv, angles):
        q, k, v = qkv.split(sizes, -1)
        q = q.reshape(*leading, 6, 16)
        return turned(q, angles, interleaved), turned(k, angles, interleaved), v

    rest = sizes, kind, interleaved, *ranks
    found = definition("fused_qkv_rope_forward")(qkv, freqs, freqs, starts, *rest)
    for one, expected in zip(found, parts(qkv, angles), strict=True):
        near(one, expected)
    grads = [draw.normal(tuple(t.shape), F64) for t in found]
    leaf = qkv.clone().requires_grad_()
    outs = parts(leaf, shaped([0] * len(at)))
    (expected,) = torch.autograd.grad(outs, leaf, grads)
    near(definition("fused_qkv_rope_backward")(*grads, freqs, freqs, *rest), expected)


# ---- scales ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_update_of_delayed_scaling(draw, algo, reduced):
    """Slot by slot: idle, infinite, NaN in the window, tiny, ordinary."""
    history, scale = draw.normal((4, 5), F64).abs(), draw.normal((5,), F64).abs()
    history[0, 0], history[0, 1], history[2, 2], history[:, 3] = 0.0, math.inf, math.nan, 1e-38
    newest = draw.normal((5 * reduced,), F64).abs()
    expected, moved = scale.tolist(), history.clone()
    for slot in range(5):
        column = history[:, slot].tolist()
        if reduced and newest[slot] != 0:
            column[0] = float(newest[slot])
        numbers = [n for n in (column[:1] if algo == "most_recent" else column) if n == n]
        amax = max(numbers)
        if column[0] != 0:
            moved[:, slot] = torch.tensor([0.0, *column[2:], column[0]], dtype=F64)
            if 0 < amax < math.inf:
                expected[slot] = min(448.0 / 4 / amax, torch.finfo(F32).max)
    update = definition("fused_amax_and_scale_update_after_reduction")
    update(newest, [history], [scale], algo, DType.kFloat8E4M3, 2)
    assert_bits(history, moved, any_nan=True)
    for one, wanted in zip(scale, expected, strict=True):
        near(one, torch.tensor(wanted, dtype=F64))


def test_amaxes_and_transposes(draw):
    amax = torch.empty(1)
    for values in ((1.0, -3.0, math.nan), (math.nan,), (), (-math.inf, 2.0)):
        definition("compute_amax")(torch.tensor(values), amax)
        assert float(amax) == max([abs(v) for v in values if v == v], default=0.0)
    codes = (draw.uniform((2, 3, 5)) * 256).to(torch.uint8)
    turned = definition("fp8_transpose")(codes, None, out=None)
    for i, j, k in itertools.product(*map(range, codes.shape)):
        assert turned[k, i, j] == codes[i, j, k]


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_slices_of_a_weight(draw, kind):
    """[19, 26] in tiles of 4 x 4, from element 30 on."""
    weight, first, end = draw.normal((19, 26), F32).flatten(), 30, 301
    amax, exact = torch.full((5, 7), -1.0), torch.zeros(5, 7)
    scale, top = draw.uniform((5, 7)).float() * 2e4, torch.finfo(kind).max
    codes = torch.zeros(end - first, dtype=torch.uint8)
    wanted = []
    for i in range(first, end):
        tile = i // 26 // 4, i % 26 // 4
        exact[tile] = max(exact[tile], weight[i].abs())
        wanted.append((weight[i] * scale[tile]).clamp(-top, top))
    place = 19, 26, first, 4
    definition("fp8_block_scaling_compute_partial_amax")(weight[first:end], amax, *place)
    assert_bits(amax, exact)
    cast = definition("fp8_block_scaling_partial_cast")
    code = DType.kFloat8E4M3 if kind == torch.float8_e4m3fn else DType.kFloat8E5M2
    cast(weight[first:end], codes, scale, *place, code)
    assert_bits(codes, torch.stack(wanted).to(kind).view(torch.uint8))


# ---- copies ------------------------------------------------------------------------------------


def test_layouts(draw):
    x = draw.normal((3, 4, 5), F32)
    swapped = definition("swap_first_dims")(x, out=None)
    whole, grads = draw.normal((5, 2, 3, 24), F32), [draw.normal((2, 5, 3, 8), F32) for _ in "qkv"]
    apart = definition("fa_prepare_fwd")(whole[..., :8])
    joined = definition("fa_prepare_bwd")(*grads)
    for i, j in itertools.product(range(3), range(4)):
        assert_bits(swapped[j, i], x[i, j])
    for which, s, b in itertools.product(range(3), range(5), range(2)):
        part = slice(8 * which, 8 * which + 8)
        assert_bits(apart[which, b, s], whole[s, b, :, part])
        assert_bits(joined[s, b, :, part], grads[which][b, s])


@pytest.mark.parametrize("lengths", [(3, 0, 5), (1,), (0, 4), (7, 2, 0)])
@pytest.mark.parametrize("behind", [0, 2])
def test_packed_sequences(draw, lengths, behind):
    """With tokens of no sequence, and room behind the longest."""
    starts = [0, *itertools.accumulate(lengths)]
    cu, total, room = torch.tensor(starts), starts[-1] + behind, max(lengths) + behind
    packed, padded = draw.normal((total, 2, 5), F32), draw.normal((len(lengths), room, 2, 5), F32)
    apart, together = torch.zeros_like(padded), torch.zeros_like(packed)
    for i, n in enumerate(lengths):
        for j in range(n):
            apart[i, j], together[starts[i] + j] = packed[starts[i] + j], padded[i, j]
    args = cu, len(lengths), room
    assert_bits(definition("convert_thd_to_bshd")(packed, *args), apart)
    assert_bits(definition("convert_bshd_to_thd")(padded, cu, total), together)


@pytest.mark.parametrize("lists", [([2, 0, 7], [4, 4, 8]), ([3], [3]), ([0, 0], [0, 16])])
def test_rows_of_groups(draw, lists):
    rows, room = lists
    narrow, wide = draw.normal((sum(rows), 3), F32), draw.normal((sum(room), 3), F32)
    padded, cut, first, place = torch.zeros_like(wide), torch.zeros_like(narrow), 0, 0
    for count, space in zip(rows, room, strict=True):
        for i in range(count):
            padded[place + i], cut[first + i] = narrow[first + i], wide[place + i]
        first, place = first + count, place + space
    out = torch.empty_like(wide)
    definition("fused_multi_row_padding")(narrow, out, rows, room)
    assert_bits(out, padded)
    out = torch.empty_like(narrow)
    definition("fused_multi_row_unpadding")(wide, out, room, rows)
    assert_bits(out, cut)


# ---- context parallelism -----------------------------------------------------------------------

LENGTHS = ((4, 8, 2), (6,), (0, 2, 4), (2, 0, 0, 6, 0))


def sums(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def halves(lengths):
    """Tokens of the first and of the second halves."""
    made = [[], []]
    for first, n in zip((0, *itertools.accumulate(lengths)), lengths, strict=False):
        made[0] += range(first, first + n // 2)
        made[1] += range(first + n // 2, first + n)
    return made


def padded(lse, lengths, fill):
    """[sequences, heads, the longest] of [heads, tokens]."""
    made = lse.new_full((len(lengths), lse.shape[0], max(lengths)), fill)
    for row, part in zip(made, lse.split(list(lengths), 1), strict=True):
        row[:, : part.shape[1]] = part
    return made


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_tokens_of_a_rank(size, rank):
    chunks, expected, first = (1, 3, 0, 2), [], 0
    for n in chunks:
        for chunk in (rank, 2 * size - 1 - rank):
            expected += range(first + chunk * n, first + (chunk + 1) * n)
        first += 2 * size * n
    cu = sums([2 * size * n for n in chunks])
    found = definition("thd_get_partitioned_indices")(cu, first, size, rank)
    assert_bits(found, torch.tensor(expected, dtype=torch.int32))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
def test_halves_and_their_sums(draw, lengths, packed):
    cu, (first, second), short = sums(lengths), halves(lengths), [n // 2 for n in lengths]
    form = (lambda lse, *rest: lse.clone()) if packed else padded
    lse, step = draw.normal((3, sum(lengths)), F64), draw.normal((3, len(second)), F64)
    for half, at in enumerate((first, second)):
        found = definition("thd_read_half_tensor")(lse.t()[..., None], cu, half)
        assert_bits(found, lse.t()[at][..., None])
    size = len(second) if packed else max(short)
    found = definition("thd_read_second_half_lse")(form(lse, lengths, 9.0), cu, packed, size)
    assert_bits(found, form(lse[:, second], short, 0.0))
    expected = lse.clone()
    expected[:, second] = (lse[:, second].exp() + step.exp()).log()
    given = form(lse, lengths, 9.0)
    correct = definition("thd_second_half_lse_correction")
    correct(given, form(step, short, 7.0), cu, packed)
    near(given, form(expected, lengths, 9.0))


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_corrections_of_outputs(draw, lengths, packed, alone):
    at = halves(lengths)[1] if alone else list(range(sum(lengths)))
    short = [n // 2 for n in lengths] if alone else lengths
    out, step = draw.normal((sum(lengths), 3, 5), F64), draw.normal((len(at), 3, 5), F64)
    lse, of_step = draw.normal((3, sum(lengths)), F32), draw.normal((3, len(at)), F32)
    expected = out.clone()
    for i, token in enumerate(at):
        weights = (of_step[:, i].double() - lse[:, token].double()).exp()
        expected[token] += weights[:, None] * step[i]
    form = (lambda lse, *rest: lse.clone()) if packed else padded
    sizes = form(lse, lengths, 9.0), form(of_step, short, 7.0)
    definition("thd_out_correction")(out, step, *sizes, sums(lengths), alone, packed)
    assert_nmse(out, expected, tol("sum", F32, 16))


WORDS = [
    pair for pair in itertools.product(("add", "copy", "none"), repeat=2) if set(pair) != {"none"}
]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("words", WORDS)
def test_corrections_of_gradients(draw, lengths, words):
    for lead in ((), (2,)):
        alone, total = "none" in words, sum(lengths)
        grad = draw.normal((*lead, total, 3, 5), F32)
        step = draw.normal((*lead, total // 2 if alone else total, 3, 5), F32)
        expected, count = grad.clone(), 0
        for at, word in zip(halves(lengths), words, strict=True):
            for token in at if word != "none" else ():
                new = step[..., count if alone else token, :, :]
                count += 1
                old = expected[..., token, :, :] if word == "add" else 0.0
                expected[..., token, :, :] = old + new
        definition("thd_grad_correction")(grad, step, sums(lengths), *words)
        assert_bits(grad, expected)
