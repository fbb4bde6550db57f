# SPDX-License-Identifier: Apache-2.0
"""Attention operators of `transformer_engine_torch` against float64, and copies between layouts."""

import math

import pytest
import torch
from buffers import normal
from comparators import assert_bits, assert_nmse
from tex_cases import Operators, assert_near, assert_same_data, each_implementation, quantizers
from tols import BF16, F16, F32, tol

import transformer_engine.pytorch as te
import transformer_engine_torch as plain_tex
from transformer_engine.plugin.core.ops import (
    FlashAttentionBase,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from transformer_engine.pytorch.attention.dot_product_attention.masks import default_alibi_slopes
from transformer_engine.pytorch.constants import DType

native = Operators("default.native")
BATCH, QUERIES, KEYS, HEADS, GROUPS, DIM, DIM_V = 2, 9, 12, 4, 2, 16, 24
LENGTHS = (6, 9), (12, 7)


class Problem:
    """One attention: its tensors, and the same in float64, [batch, heads, sequence, channels]."""

    def __init__(self, rng, device, form="bshd", dtype=F32, mask="NO_MASK", window=(-1, -1),
                 bias="NO_BIAS", softmax="VANILLA", padded=False):  # fmt: skip
        self.form, self.dtype, self.device, self.window = form, dtype, device, window
        self.mask = NVTE_Mask_Type[f"NVTE_{mask}" if mask == "NO_MASK" else f"NVTE_{mask}_MASK"]
        self.bias_type = NVTE_Bias_Type[f"NVTE_{bias}"]
        self.softmax = NVTE_Softmax_Type[f"NVTE_{softmax}_SOFTMAX"]
        self.scale = 1 / math.sqrt(DIM) * 1.3
        packed = form == "thd"
        self.lengths = LENGTHS if packed or "PADDING" in mask else ((QUERIES,) * 2, (KEYS,) * 2)
        sums = [torch.tensor([0, a, a + b]) for a, b in self.lengths]
        self.counted = [s.to(device, torch.int32) for s in sums]
        self.places = [s + torch.tensor([0, 2, 5]) * padded for s in sums]
        self.padded = [p.to(device, torch.int32) if padded else None for p in self.places]
        sizes = ((QUERIES, HEADS, DIM), (KEYS, GROUPS, DIM), (KEYS, GROUPS, DIM_V))
        self.tensors = []
        for i, (length, heads, dim) in enumerate(sizes):
            lead = {"bshd": (BATCH, length), "sbhd": (length, BATCH)}.get(
                form, (int(self.places[min(i, 1)][-1]),)
            )
            self.tensors.append(normal(rng, (*lead, heads, dim), dtype, device))
        self.bias = self.offset = None
        if bias == "POST_SCALE_BIAS":
            self.bias = normal(rng, (1, HEADS, QUERIES, KEYS), dtype, device)
        if softmax == "LEARNABLE":
            self.offset = normal(rng, (1, HEADS, 1, 1), F32, device)

    @property
    def layout(self):
        return NVTE_QKV_Layout["NVTE_" + "_".join([self.form.upper()] * 3)]

    def forward(self, tex, training=True, **changed):
        given = {
            "max_seqlen_q": QUERIES, "max_seqlen_kv": KEYS, "is_training": training,
            "attn_scale": self.scale, "p_dropout": 0.0, "set_zero": True,
            "qkv_layout": self.layout, "bias_type": self.bias_type,
            "attn_mask_type": self.mask, "softmax_type": self.softmax,
            "window_size": self.window, "cu_seqlens_q": self.counted[0],
            "cu_seqlens_kv": self.counted[1], "Q": self.tensors[0], "K": self.tensors[1],
            "V": self.tensors[2], "fake_dtype": self.dtype,
            "cu_seqlens_q_padded": self.padded[0], "cu_seqlens_kv_padded": self.padded[1],
            "page_table_k": None, "page_table_v": None, "s_quantizer": None,
            "o_quantizer": None, "Bias": self.bias, "SoftmaxOffset": self.offset,
            "rng_gen": None, "rng_elts_per_thread": 4, "return_max_logit": False,
        }  # fmt: skip
        return tex.fused_attn_fwd(*{**given, **changed}.values())

    def backward(self, tex, out, grad, aux, **changed):
        given = {
            "max_seqlen_q": QUERIES, "max_seqlen_kv": KEYS, "attn_scale": self.scale,
            "p_dropout": 0.0, "set_zero": True, "qkv_layout": self.layout,
            "bias_type": self.bias_type, "attn_mask_type": self.mask,
            "softmax_type": self.softmax, "window_size": self.window, "deterministic": True,
            "cu_seqlens_q": self.counted[0], "cu_seqlens_kv": self.counted[1],
            "Q": self.tensors[0], "K": self.tensors[1], "V": self.tensors[2], "O": out,
            "dO": grad, "fake_dtype": self.dtype, "dqkv_type": DType.kBFloat16,
            "Aux_CTX_Tensors": aux, "cu_seqlens_q_padded": self.padded[0],
            "cu_seqlens_kv_padded": self.padded[1], "s_quantizer": None,
            "dp_quantizer": None, "dqkv_quantizer": None,
        }  # fmt: skip
        return tex.fused_attn_bwd(*{**given, **changed}.values())

    def sequence(self, t, i, keys):
        """[heads, length, channels] of a sequence."""
        if self.form == "thd":
            first = int(self.places[keys][i])
            return t[first : first + self.lengths[keys][i]].transpose(0, 1)
        return (t[i] if self.form == "bshd" else t[:, i]).transpose(0, 1)

    def attend64(self, q, k, v, bias=None, offset=None):
        """(outputs, logarithms of sums) of the sequences, [heads, queries, ..], float64."""
        outs, sums = [], []
        for i in range(BATCH):
            rows = [self.sequence(t, i, n > 0) for n, t in enumerate((q, k, v))]
            rows[1:] = [t.repeat_interleave(HEADS // GROUPS, 0) for t in rows[1:]]
            count = rows[0].shape[1], rows[1].shape[1]
            ends = [self.lengths[n][i] for n in (0, 1)]
            may = torch.zeros(count, dtype=torch.bool)
            name = self.mask.name
            shift = ends[1] - ends[0] if "BOTTOM" in name else 0
            slack = torch.zeros(count, dtype=torch.float64)
            for a in range(ends[0]):
                for b in range(ends[1]):
                    left, right = self.window
                    may[a, b] = (left < 0 or b >= a + shift - left) and (
                        right < 0 or b <= a + shift + right
                    )
                    may[a, b] &= "CAUSAL" not in name or b <= a + shift
                    slack[a, b] = abs(b - a - shift)
            may, slack = may.to(q.device), slack.to(q.device)
            scores = self.scale * rows[0] @ rows[1].transpose(1, 2)
            if bias is not None:
                scores = scores + bias[0]
            if self.bias_type == NVTE_Bias_Type.NVTE_ALIBI:
                slopes = default_alibi_slopes(HEADS, q.device).double()
                scores = scores - slopes[:, None, None] * slack
            scores = scores.masked_fill(~may, -torch.inf)
            joined = scores
            if self.softmax != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX:
                sink = torch.zeros(HEADS).to(q) if offset is None else offset.flatten()
                joined = torch.cat((scores, sink[:, None, None].expand(-1, count[0], 1)), -1)
            total = joined.logsumexp(-1)
            weights = (scores - total.nan_to_num(neginf=0.0)[..., None]).exp()
            outs.append(torch.where(may, weights, 0.0) @ rows[2])
            sums.append(total)
        return outs, sums


CASES = [
    {},
    {"form": "sbhd", "mask": "CAUSAL"},
    {"form": "sbhd", "mask": "CAUSAL_BOTTOM_RIGHT", "window": (3, 0)},
    {"mask": "PADDING"},
    {"mask": "PADDING_CAUSAL_BOTTOM_RIGHT"},
    {"mask": "NO_MASK", "window": (2, 4)},
    {"form": "thd", "mask": "PADDING"},
    {"form": "thd", "mask": "PADDING_CAUSAL", "padded": True},
    {"bias": "POST_SCALE_BIAS"},
    {"bias": "ALIBI", "mask": "CAUSAL"},
    {"softmax": "OFF_BY_ONE"},
    {"softmax": "LEARNABLE", "mask": "CAUSAL"},
    {"dtype": BF16, "mask": "CAUSAL"},
    {"dtype": F16, "form": "sbhd"},
]


@each_implementation
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_attention(rng, tex, case):
    problem = Problem(rng, "cpu", **case)
    bound = tol("attention", problem.dtype, 64)
    out, statistics, pair, *rest = problem.forward(tex)
    assert rest == [t for t in (problem.bias, problem.offset) if t is not None]
    assert out.dtype == problem.dtype and pair.shape == (2,) and pair.dtype == torch.int64
    given = [t for t in (*problem.tensors, problem.bias, problem.offset) if t is not None]
    wide = {id(t): t.double().requires_grad_() for t in given}
    inputs = [wide.get(id(t)) for t in (*problem.tensors, problem.bias, problem.offset)]
    exact, sums = problem.attend64(*inputs)
    grad = normal(rng, tuple(out.shape), problem.dtype)
    total = 0
    for i, (values, totals) in enumerate(zip(exact, sums, strict=True)):
        ends = problem.lengths[0][i]
        assert_nmse(problem.sequence(out, i, False)[:, :ends], values[:, :ends], bound)
        if problem.form == "thd":
            first = int(problem.places[0][i])
            found = statistics[first : first + ends, :, 0].t()
        else:
            found = statistics[i, :, :ends, 0]
        known = [t.nan_to_num(neginf=-99.0) for t in (found, totals[:, :ends])]
        assert_nmse(*known, bound)
        of_grad = problem.sequence(grad, i, False).double()
        total = total + (values[:, :ends] * of_grad[:, :ends]).sum()
    made = problem.backward(tex, out, grad, [statistics, pair, *rest])
    assert len(made) == 5
    expected = torch.autograd.grad(total, list(wide.values()))
    found = [t for t in made if t is not None]
    assert len(found) == len(expected)
    for one, other, like in zip(found, expected, given, strict=True):
        assert one.shape == like.shape and one.dtype == like.dtype
        assert_nmse(one, other, bound)


@each_implementation
def test_attention_of_one_tensor_and_casts(rng, tex):
    """Views of one projection, an output that is cast, inference, the largest scores."""
    problem = Problem(rng, "cpu", dtype=BF16)
    whole = normal(rng, (BATCH, KEYS, HEADS, 3, DIM), BF16)
    views = whole.unbind(3)
    sums = torch.tensor([0, KEYS, 2 * KEYS], dtype=torch.int32)
    given = {
        "qkv_layout": NVTE_QKV_Layout.NVTE_BSH3D, "Q": views[0], "K": views[1], "V": views[2],
        "cu_seqlens_q": sums, "cu_seqlens_kv": sums, "max_seqlen_q": KEYS,
    }  # fmt: skip
    (out,) = problem.forward(tex, False, **given)
    q, k, v = (t.double().transpose(1, 2) for t in views)
    exact = (problem.scale * q @ k.transpose(2, 3)).softmax(-1) @ v
    assert_nmse(out, exact.transpose(1, 2), tol("attention", BF16, 64))
    make = quantizers("cpu")["current"]
    (cast,) = problem.forward(tex, False, **given, o_quantizer=make)
    assert_same_data(cast, make(out))
    out, top = problem.forward(tex, False, **given, return_max_logit=True)
    assert_near(top, (problem.scale * q @ k.transpose(2, 3)).amax((0, 2, 3)), DIM)


@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
def test_both_implementations_agree(rng, form):
    """On any options together, with sequences of no token and queries that attend nothing."""
    reference = Operators("reference.torch")
    biases = ["NO_BIAS", "ALIBI"] + ["POST_SCALE_BIAS"] * (form != "thd")
    for _ in range(20):
        mask = NVTE_Mask_Type(int(rng.integers(6))).name.removeprefix("NVTE_")
        problem = Problem(
            rng, "cpu", form, mask=mask.removesuffix("_MASK") if mask != "NO_MASK" else mask,
            window=[(-1, -1), (2, -1), (-1, 1), (1, 2)][rng.integers(4)],
            bias=str(rng.choice(biases)),
            softmax=str(rng.choice(["VANILLA", "OFF_BY_ONE", "LEARNABLE"])),
        )  # fmt: skip
        if form != "thd":
            ends = [rng.integers(0, n + 1, BATCH) for n in (QUERIES, KEYS)]
            problem.counted = [torch.tensor([0, a, a + b], dtype=torch.int32) for a, b in ends]
        made = []
        grad = None
        for tex in (native, reference):
            out, *aux = problem.forward(tex)
            grad = normal(rng, tuple(out.shape), F32) if grad is None else grad
            made.append([out, *aux, *problem.backward(tex, out, grad, aux)])
        for one, other in zip(*made, strict=True):
            if one is not None:
                found, expected = (t.double().nan_to_num(neginf=-99.0) for t in (one, other))
                terms = 1 + expected.abs()  # gradients of scores cancel
                assert_nmse(found, expected, tol("attention", F32, 64), terms=terms)


def test_dropout_of_attention(rng):
    """Drawn from the generator; the backward repeats it."""
    problem = Problem(rng, "cpu")
    results = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(7)
        results.append(problem.forward(native, p_dropout=0.4, rng_gen=generator))
    assert_bits(results[0][0], results[1][0])
    out, statistics, pair = results[0]
    plain = problem.forward(native)[0]
    assert not torch.equal(out, plain)
    assert_bits(problem.forward(native, False, p_dropout=0.4)[0], plain)
    # The output is linear in the values: their gradient is the transposed map.
    grad = normal(rng, tuple(out.shape), F32)
    made = problem.backward(native, out, grad, [statistics, pair], p_dropout=0.4)
    both = (made[2].double() * problem.tensors[2].double()).sum()
    assert_near(both[None].float(), (out.double() * grad.double()).sum()[None], 4096)


def test_refused_attention(rng):
    problem = Problem(rng, "cpu")
    tables = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="fused_attn_fwd: page_table_k"):
        problem.forward(native, page_table_k=tables)
    with pytest.raises(NotImplementedError, match="PRE_SCALE_BIAS"):
        problem.forward(native, bias_type=NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS)
    with pytest.raises(NotImplementedError, match="qkv_layout=NVTE_Paged"):
        problem.forward(native, qkv_layout=NVTE_QKV_Layout.NVTE_Paged_KV_BSHD_BSHD_BSHD)
    with pytest.raises(NotImplementedError, match="Q: Float8Tensor"):
        problem.forward(native, Q=quantizers("cpu")["current"](problem.tensors[0]))
    for name, kind in (("attn_mask_type", NVTE_Mask_Type), ("bias_type", NVTE_Bias_Type)):
        with pytest.raises(
            ValueError, match=f"fused_attn_fwd: {name}=77, expected a {kind.__name__}"
        ):
            problem.forward(native, **{name: 77})
    with pytest.raises(ValueError, match="fused_attn_fwd: qkv_layout="):
        problem.forward(native, qkv_layout=99)
    with pytest.raises(ValueError, match="needs SoftmaxOffset"):
        problem.forward(native, softmax_type=NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX)
    out, statistics, _ = problem.forward(native)
    with pytest.raises(ValueError, match="Aux_CTX_Tensors: 1 tensors"):
        problem.backward(native, out, out, [statistics])


def test_backend_query():
    def ask(dtype=DType.kBFloat16, layout=NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, dim=64, bias=0):
        return native.get_fused_attn_backend(
            True, dtype, dtype, layout, bias, NVTE_Mask_Type.NVTE_CAUSAL_MASK, 0, 0.0, 8, 2, 128,
            128, dim, dim, -1, 0, False,
        )  # fmt: skip

    none = NVTE_Fused_Attn_Backend.NVTE_No_Backend
    if not torch.cuda.is_available():
        assert ask() == ask(torch.float32) == NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    assert ask(DType.kFloat8E4M3) == none
    assert ask(layout=NVTE_QKV_Layout.NVTE_Paged_KV_BSHD_BSHD_BSHD) == none
    assert ask(bias=NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS) == none


# ---- the attention class ---------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
@pytest.mark.parametrize("layout", ["sbhd_sbhd_sbhd", "bshd_bshd_bshd"])
def test_flash_attention_class(rng, mask, layout):
    kind = plain_tex.get_flash_attention_class()
    assert issubclass(kind, FlashAttentionBase)
    run = plain_tex.flash_attention(0.2, layer_number=3)
    assert type(run) is kind and run.layer_number == 3 and run.backend_name == "FlashAttention"
    form = layout[:4]
    shapes = (7, 2, 4, 16), (7, 2, 2, 16), (7, 2, 2, 16)
    tensors = [normal(rng, shape, F32) for shape in shapes]
    if form == "bshd":
        tensors = [t.transpose(0, 1).contiguous() for t in tensors]
    tensors = [t.requires_grad_() for t in tensors]
    out = run(*tensors, qkv_layout=layout, attn_mask_type=mask)
    module = te.DotProductAttention(4, 16, 2, qkv_format=form, softmax_scale=0.2)
    expected = module(*tensors, attn_mask_type=mask)
    assert_bits(out, expected)
    grad = torch.ones_like(out)
    for one, other in zip(
        torch.autograd.grad(out, tensors, grad), torch.autograd.grad(expected, tensors, grad),
        strict=True,
    ):  # fmt: skip
        assert_bits(one, other)
    assert not list(run.state_dict())
    dropping = kind(0.2, attention_dropout=0.5)
    assert not torch.equal(dropping(*tensors, qkv_layout=layout), out)
    assert_bits(dropping.eval()(*tensors, qkv_layout=layout, attn_mask_type=mask), out)
    with pytest.raises(NotImplementedError, match="fp8"):
        run(*tensors, qkv_layout=layout, fp8=True)


# ---- caches ----------------------------------------------------------------------------------


@each_implementation
@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("paged", [False, True])
def test_copy_to_kv_cache(rng, device, tex, form, paged):
    new, had = (3, 1), (2, 5)
    pages, size = (6, 4) if paged else (3, 8)
    caches = [normal(rng, (pages, size, 2, d), BF16, device) for d in (8, 16)]
    table = torch.tensor([[4, 1], [0, 5]] if paged else [[2], [0]], dtype=torch.int32)
    table = table.to(device)
    lead = {"bshd": (2, 3), "sbhd": (3, 2), "thd": (4,)}[form]
    given = [normal(rng, (*lead, 2, d), BF16, device) for d in (8, 16)]
    expected = [cache.clone() for cache in caches]
    for cache, kept, tensor in zip(expected, caches, given, strict=True):
        if not paged:
            cache[:2] = kept[table[:, 0].long()]
        for i in range(2):
            first = sum(new[:i])
            if form == "thd":
                rows = tensor[first : first + new[i]]
            else:
                rows = (tensor[i] if form == "bshd" else tensor[:, i])[: new[i]]
            for j in range(new[i]):
                at = had[i] + j
                page = int(table[i, at // size]) if paged else i
                cache[page, at % size] = rows[j]
    cu_new = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    cu_cached = torch.tensor([0, 5, 11], dtype=torch.int32, device=device)
    tex.copy_to_kv_cache(
        *given, *caches, table, cu_new, cu_cached, NVTE_QKV_Format[f"NVTE_{form.upper()}"], 2, 3,
        8, table.shape[1], not paged,
    )  # fmt: skip
    for cache, other in zip(caches, expected, strict=True):
        assert_bits(cache, other)


def test_flash_attention_is_repeatable_or_refuses(monkeypatch):
    heads = [torch.randn(4, 1, 2, 8) for _ in range(3)]
    given = {"qkv_layout": "sbhd_sbhd_sbhd"}
    run = plain_tex.flash_attention(0.2, deterministic=True)
    with pytest.raises(NotImplementedError, match="deterministic=True"):
        run(*heads, **given)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    expected = plain_tex.flash_attention(0.2)(*heads, **given)
    assert torch.equal(run(*heads, **given), expected)
